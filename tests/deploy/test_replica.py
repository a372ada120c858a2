"""Methods that every silo runs by itself, against the same method on a cohort of this process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.boards import GoneError, facts_of, lockstep, sessions, singles, together, trained
from cases.cohorts import linear, pairs
from cases.refusals import refuses
from runtimes import NAMES, cohort_of, point_of
from scaffpd.deploy.replica import replica
from scaffpd.deploy.transcript import Journal, Tampered
from scaffpd.federation.border import summed
from scaffpd.federation.own_weights import OwnWeights
from scaffpd.federation.questions import Question, Reply, Vectors
from scaffpd.training.settling import by_evidence, settled

# the model, and rounds of the method that a deployed `fair` is, and of ScaffPD, for 1e-8 in x
OBJECTIVES = {
    sp.Average(): ("logistic", 6, 12),
    sp.Agnostic(): ("squared", 50, 50),
    sp.ChiSquare(rho=0.1): ("logistic", 13, 26),
    sp.ChiSquare(rho=0.05, cap=0.4): ("logistic", 13, 30),
    sp.ChiSquareBall(0.2): ("squared", 36, 36),
    sp.CVaR(0.5): ("squared", 50, 50),
    sp.Tilted(1.0): ("logistic", 8, 17),
    sp.QFair(1.0): ("logistic", 8, 17),
    sp.Nash(b=2.0): ("logistic", 8, 16),
}
METHODS = [
    sp.ScaffPD(sp.ChiSquare(rho=0.1), local_steps=10, batch_size=4),
    sp.FedAvg(local_steps=3, batch_size=4, local_rate=0.1),
    sp.FedAvg(local_steps=3, weights="samples"),
    sp.Scaffold(local_steps=3),
    sp.AFL(local_steps=2, dual_rate=0.1),
    sp.AFL(sp.QFair(1.0), dual_rate=0.1),  # off the simplex λ⁰ goes by the losses
    sp.DRFA(sp.Tilted(1.0), local_steps=3, dual_rate=0.1),
    sp.DeltaFL(local_steps=2),
]


def results(method, model="logistic", **options):
    found, made, _ = trained(
        singles(lambda names: cohort_of(model, names), NAMES), method, **options
    )
    for one in found.values():
        if isinstance(one, BaseException):
            raise one
    return found, made


# Scaff-PD is what a deployed `fair` is where losses do not separate: one objective shows the other
# cells, and `test-all` runs them
CELLS = [
    pytest.param(
        o,
        fair,
        marks=() if fair or o == sp.ChiSquare(rho=0.1) else pytest.mark.long,
        id=f"{'fair' if fair else 'ScaffPD'} {o!r}",
    )
    for o in OBJECTIVES
    for fair in (True, False)
]


@pytest.mark.parametrize(("objective", "deployed"), CELLS)
def test_silos_find_the_optimum_of_a_cohort_in_this_process(objective, deployed):
    """Against minimax Newton on a cohort that hides nothing: x to 1e-8, both gaps below 1e-9."""
    model, *rounds = OBJECTIVES[objective]
    method = sp.MinimaxSums(objective) if objective.separable else sp.fair(objective)
    method = method if deployed else sp.ScaffPD(objective, local_steps=10)
    found, made = results(method, model, rounds=rounds[not deployed], tol=None)
    wanted = sp.train(sp.fair(objective), cohort_of(model), 12)
    assert wanted.certificate < 1e-12
    for one in found.values():
        np.testing.assert_array_equal(one.x, found[""].x)
        np.testing.assert_allclose(one.x, wanted.x, rtol=0, atol=1e-8)
        assert one.certificate < 1e-9
    assert len({session.digest for session in made.values()}) == 1


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_silos_make_the_rounds_of_a_cohort_in_this_process(method):
    """Methods that end nowhere in particular, round by round."""
    found, _ = results(method, rounds=8, tol=None)
    wanted = sp.train(method, cohort_of("logistic"), 8)
    for one in found.values():
        np.testing.assert_array_equal(one.x, found[""].x)
        np.testing.assert_allclose(one.x, wanted.x, rtol=0, atol=1e-8)
        np.testing.assert_allclose(one.weights, wanted.weights, rtol=0, atol=1e-8)
        np.testing.assert_allclose(one.certificate, wanted.certificate, rtol=1e-4)


@pytest.mark.parametrize("model", ["squared", "softmax", "module"])
def test_other_models(model):
    method = sp.ScaffPD(sp.ChiSquare(rho=0.1), local_steps=5)
    found, _ = results(method, model, rounds=8, tol=None)
    wanted = sp.train(method, sp.SecureAggregation(cohort_of(model)), 8)
    np.testing.assert_allclose(found["c"].x, wanted.x, rtol=0, atol=1e-8)


class Rounded(sp.ChiSquare):
    """The same objective on a processor whose last digits are others."""

    drawn = np.random.default_rng(7)

    def _prox(self, s, weights, rate):
        found = super()._prox(s, weights, rate)
        return np.maximum(found * (1 + 4e-15 * self.drawn.standard_normal(len(found))), 0)


@pytest.mark.cover(1)
@pytest.mark.parametrize("who", ["a", "c"], ids=["first", "another"])
@pytest.mark.parametrize("kind", ["fair", "MinimaxSums", "ScaffPD", "FedAvg", "Scaffold"])
def test_processors_that_round_differently_finish_a_run_together(kind, who):
    """Last digits of weights, points and rates differ at one silo, in every round."""
    objective = sp.ChiSquare(rho=0.1)
    made = {
        "fair": sp.fair(objective),
        "MinimaxSums": sp.MinimaxSums(objective),
        "ScaffPD": sp.ScaffPD(objective, local_steps=10),
        "FedAvg": sp.FedAvg(local_steps=3),
        "Scaffold": sp.Scaffold(local_steps=3),
    }[kind]
    random = np.random.default_rng(3)

    def meddle(name, method, federation):
        if name != who:
            return method
        ask = federation.channel.ask

        def noisy(question, chosen):
            x = getattr(question, "x", None)
            own = question.kind == OwnWeights.kind
            if isinstance(x, torch.Tensor) and (own or getattr(question, "at", None) is None):
                x.mul_(torch.from_numpy(1 + 2e-15 * random.standard_normal(len(x))))
            plan = getattr(question, "plan", None)
            if plan is not None and plan.rate is not None:
                question = replace(question, plan=replace(plan, rate=plan.rate * (1 + 3e-16)))
            return ask(question, chosen)

        federation.channel.ask = noisy
        own = Rounded(rho=0.1)
        return replace(method, objective=own) if hasattr(method, "objective") else method

    tol = 1e-7 if made.proves else None
    found, _ = results(made, meddle=meddle, rounds=60 if tol else 15, tol=tol)
    wanted = sp.train(made, sp.SecureAggregation(cohort_of("logistic")), 60 if tol else 15, tol)
    for one in found.values():
        np.testing.assert_array_equal(one.x, found[""].x)
        np.testing.assert_allclose(one.x, wanted.x, rtol=0, atol=1e-8)


def test_a_first_silo_that_goes_elsewhere_is_not_followed():
    def meddle(name, method, federation):
        ask = federation.channel.ask

        def elsewhere(question, chosen):
            if name == "a" and getattr(question, "x", None) is not None and question.x.any():
                question.x.add_(1e-3)
            return ask(question, chosen)

        federation.channel.ask = elsewhere
        return method

    found, made, _ = trained(
        singles(lambda names: cohort_of("logistic", names), NAMES),
        sp.ScaffPD(sp.ChiSquare(rho=0.1)),
        meddle=meddle,
    )
    for name in ("b", "c", "d", ""):
        assert isinstance(found[name], Tampered | GoneError)
        if isinstance(found[name], Tampered):
            assert found[name].code == "proposal-differs"
    sums = [kind for kind in made["b"].sent if kind.startswith("masked")]
    assert made["b"].sent[sums[0]][0] == 1  # at the start, before anybody went elsewhere


@dataclass(frozen=True, eq=False)
class OwnTerms(Question):
    """A sum of what clients compute with weights that only they know, as losses stay at home."""

    kind = "own terms of a test"
    shows = (summed("terms", "terms of a test"),)

    x: torch.Tensor
    nu: float

    def shapes(self, d):
        return {"terms": (d + 2,)}

    def answer(self, clients):
        loss = clients.losses(self.x, None, (0,))
        share = (0.25 + (loss - self.nu)).clamp_min(0)
        rows = torch.cat([share[:, None], loss[:, None], share[:, None] * self.x], 1)
        return Reply(
            {}, {"terms": Vectors(lambda w: w @ rows, lambda: rows, shape=(rows.shape[1],))}
        )


def test_a_question_whose_weights_stay_at_home_is_one_exchange():
    here = sp.SecureAggregation(cohort_of("logistic"))
    silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES))
    ones = np.ones(len(NAMES))
    x = point_of(here)
    before = silos.channel.session.step
    seen = silos.ask(OwnTerms(x, 0.6)).added("terms", ones)
    assert silos.channel.session.step == before + 2  # the proposal, and the sum
    wanted = here.ask(OwnTerms(x, 0.6)).added("terms", ones)
    np.testing.assert_allclose(seen, wanted, rtol=0, atol=1e-12)


def test_few_weightings_at_one_point():
    silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES))
    at = silos.gradients(point_of(silos))
    for weights in ([0.4, 0.3, 0.2, 0.1], [0.8, 0.6, 0.4, 0.2], [0.25, 0.25, 0.25, 0.25]):
        at.sum(np.array(weights))  # the second is the first one's double
    with refuses("too-many-weightings"):
        at.sum(np.array([0.1, 0.2, 0.3, 0.4]))
    with refuses("too-many-weightings"):  # another question about the same point
        silos.gradients(at.x + 0).sum(np.array([0.1, 0.2, 0.3, 0.4]))


def test_no_single_vector_is_shown():
    silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES))
    at = silos.gradients(point_of(silos))
    for what in ("each", "hessians"):
        with refuses("method-needs-vectors"):
            getattr(at, what)()


def test_other_strengths_on_the_same_rows():
    here = sp.SecureAggregation(cohort_of("logistic"))
    silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES))
    x = point_of(here)
    w = np.full(4, 0.25)
    for l2 in (0.3, [0.1, 0.2, 0.5]):
        seen = silos.using(l2=l2)
        wanted = here.using(l2=l2)
        np.testing.assert_allclose(
            seen.gradients(x).sum(w), wanted.gradients(x).sum(w), rtol=0, atol=1e-12
        )
        ridge = wanted.constants().ridge
        assert (seen.constants().ridge is None) == (ridge is None)
        if ridge is not None:
            np.testing.assert_array_equal(seen.constants().ridge, ridge)
    with refuses("too-many-weightings"):  # an offset l2 x that all know makes no other vector
        for k, l2 in enumerate((0.1, 0.2, 0.3)):
            silos.using(l2=l2).gradients(x).sum(np.roll([0.7, 0.1, 0.1, 0.1], k))


@pytest.mark.cover(1)
@pytest.mark.parametrize("rounds_differently", ["", "a", "c"])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_silos_find_the_cohorts_strengths(loss, rounds_differently):
    """Silos that settle "auto" together, from masked sums, and an onlooker without rows; also where
    one silo's processor has other last digits.
    """
    random = np.random.default_rng(5)
    model = linear(loss, "auto", intercept=True)
    rows = dict(zip("abcd", pairs(loss, (30, 12, 45, 20)), strict=True))
    wanted = sp.Cohort(rows, sp.Personal(model))
    singly = {
        name: sp.Cohort({name: own}, sp.Personal(model), settle=False) for name, own in rows.items()
    }
    facts = facts_of(singly)

    def action(name, session):
        session.open({})
        own = singly.get(name)
        session.tolerance = 1e-6
        federation = replica(session, own.channel if own else None, 1, facts, "test")
        ask = federation.channel.ask

        def noisy(question, chosen):
            for part in ("x", "C", "step"):  # τ stays the same from question to question
                given = getattr(question, part, None)
                if name and name == rounds_differently and given is not None:
                    shape = tuple(given.shape)
                    given.mul_(torch.from_numpy(1 + 1e-15 * random.standard_normal(shape)))
            return ask(question, chosen)

        federation.channel.ask = noisy
        found = by_evidence(federation, sp.Personal(model), 3)
        using = settled(federation, sp.Personal(model), found)
        session.confirm()
        return found, using.channel.rows.model if name else None

    answers = together(*sessions(list("abcd")), action)
    for name, answer in answers.items():
        if isinstance(answer, BaseException):
            raise answer
        found, own = answer
        np.testing.assert_allclose(found.l2, wanted.strengths.l2, rtol=1e-6)
        np.testing.assert_allclose(found.strength, wanted.strengths.strength, rtol=1e-6)
        np.testing.assert_allclose(found.x, wanted.strengths.x, atol=1e-8)
        if name:
            np.testing.assert_allclose(own.strength, wanted.model.strength, rtol=1e-6)


def epoch(journals, meddle=None):
    """One epoch of the same run; silos keep their journals."""
    rows = singles(lambda names: cohort_of("logistic", names), NAMES)
    method = sp.MinimaxSums(sp.ChiSquare(rho=0.1))
    return trained(rows, method, rounds=6, tol=None, meddle=meddle, journals=journals)


def moved(by):
    """The first silo is elsewhere with every point, by a share that the tolerance allows."""

    def meddle(name, method, federation):
        ask = federation.channel.ask

        def elsewhere(question, chosen):
            x = getattr(question, "x", None)
            if name == "a" and isinstance(question, OwnWeights) and x.any():
                with torch.no_grad():
                    x.mul_(1 + by)
            return ask(question, chosen)

        federation.channel.ask = elsewhere
        return method

    return meddle


def test_a_point_beside_one_of_an_earlier_epoch_is_refused(tmp_path):
    """Its sums would be further weightings of nearly the same vectors."""
    files = {name: tmp_path / f"{name}.jsonl" for name in NAMES}
    first, _, _ = epoch({name: Journal(file) for name, file in files.items()})
    for own in ({}, {"a": Journal(files["a"])}):  # without its own journal, and with it
        journals = {name: Journal(file) for name, file in files.items() if name != "a"} | own
        found, made, _ = epoch(journals, moved(1e-9))
        if own:  # processors differ, and the same is proposed as before
            np.testing.assert_array_equal(found["c"].x, first["c"].x)
            continue
        codes = {one.code for name, one in found.items() if isinstance(one, Tampered)}
        assert codes == {"repeat-differs"}
        assert "masked terms" not in made["b"].sent  # nobody answered there
    found, _, _ = epoch({}, moved(1e-9))  # the first time, processors may differ
    assert found["c"].rounds == 6


def test_weightings_of_a_point_are_counted_over_epochs():
    journals = {name: Journal() for name in NAMES}
    weights = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
    for place, own in enumerate(weights):
        for journal in journals.values():
            journal.resume(place)
            journal.next_round()
        silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES), journals)
        at = silos.gradients(point_of(silos))
        if place < 2:
            at.sum(np.array(own))
        else:
            with refuses("too-many-weightings"):
                at.sum(np.array(own))
