"""Every question to every runtime: clients here or silos that run the method, sums plain or masked,
give the same answers.

The cohort with plain sums is the measure. Algorithms are then tested on a cohort alone.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.refusals import refuses
from runtimes import MODELS, NAMES, RUNTIMES, data_of, federation_of, model_of
from scaffpd.errors import InputError
from scaffpd.federation import LocalPlan, ProximalPlan
from scaffpd.federation.border import QUESTIONS
from scaffpd.federation.questions import UNBOUNDED, GradientsAt, Losses, Question

N = len(NAMES)
SOME = [3, 0, 2]
W = np.array([0.4, 0.3, 0.2, 0.1])
ASKED = {"all, full": ((None, (0,)), None), "some, minibatch": ((5, (4, 2)), SOME)}
EXACT = {"cohort": 1e-12, "masked cohort": 1e-12, "masked silos": 1e-12}
OTHERS = [name for name in RUNTIMES if name != "cohort"]


@cache
def measure(model):
    return federation_of("cohort", model)


def point(federation, seed=1):
    start = federation.start()
    return start + 0.3 * torch.from_numpy(np.random.default_rng(seed).standard_normal(len(start)))


def weights(clients):
    return W if clients is None else np.where(np.isin(np.arange(N), clients), W, 0.0)


def close(seen, expected, runtime, steps=1):
    seen = np.asarray(seen)
    expected = np.asarray(expected)
    np.testing.assert_array_equal(np.isnan(seen), np.isnan(expected))
    scale = float(np.nanmax(np.abs(expected), initial=1e-3))
    np.testing.assert_allclose(seen, expected, rtol=0, atol=steps * EXACT[runtime] * scale)


def traffic(federation):
    sent = federation.traffic
    return sent.exchanges, sent.bytes_up, sent.bytes_down


class Both:
    """One question to a runtime and to the cohort; what both have sent for it."""

    def __init__(self, runtime, model, there):
        self.runtime, self.here, self.there = runtime, measure(model), there

    def __call__(self, question):
        out = []
        for federation in (self.here, self.there):
            before = traffic(federation)
            answer = question(federation)
            out.append(
                (answer, tuple(b - a for a, b in zip(before, traffic(federation), strict=True)))
            )
        (expected, cost), (seen, paid) = out
        if not self.runtime.startswith("masked"):
            assert paid == cost
        return seen, expected

    def agree(self, question):
        close(*self(question), self.runtime)


@pytest.fixture(params=OTHERS)
def runtime(request):
    return request.param


@pytest.fixture(scope="module")
def asked():
    """A runtime of a model, made once: no question changes what another one is answered."""
    return cache(federation_of)


@pytest.fixture(params=MODELS)
def both(request, runtime, asked):
    return Both(runtime, request.param, asked(runtime, request.param))


@pytest.fixture(params=[model for model in MODELS if model != "module"])
def curved(request, runtime):
    """Models that answer questions about curvature, which networks do not.

    Made anew for every test: silos make few sums at one point.
    """
    return Both(runtime, request.param, federation_of(runtime, request.param))


def gradients(federation, batch=(None, (0,)), clients=None, seed=1):
    return federation.gradients(point(federation, seed), *batch, clients=clients)


@pytest.mark.cover(2)
@pytest.mark.parametrize(("batch", "clients"), ASKED.values(), ids=ASKED)
def test_losses_and_gradients(both, batch, clients):
    w = weights(clients)

    def apart(f):
        return point(f, 2) - point(f)

    both.agree(lambda f: f.losses(point(f), *batch, clients=clients))
    (seen, expected) = both(lambda f: gradients(f, batch, clients))
    close(seen.losses, expected.losses, both.runtime)
    close(seen.sum(w), expected.sum(w), both.runtime)
    lengths_agree(both, seen, expected)
    loss, gradient = seen.rounding()
    picked = np.arange(N) if clients is None else clients
    for bound, other in zip((loss, gradient), expected.rounding(), strict=True):
        known = np.minimum(other[picked], UNBOUNDED)
        assert (bound[picked] >= known / 2).all()  # a cohort of four pads its rows: a little more
        if both.runtime.startswith("masked"):  # everybody knows the sum of all bounds
            assert (bound[picked] <= 4 * known.sum() + 1e-18).all()
    assert float(apart(both.here).norm()) > 0.1


def lengths_agree(both, seen, expected):
    """Lengths of single vectors, which silos show nobody."""
    if both.runtime == "masked silos":
        with refuses("vectors-stay-at-silos"):
            seen.norms()
    else:
        close(seen.norms(), expected.norms(), both.runtime)


@pytest.mark.cover(2)
@pytest.mark.parametrize("clients", [None, SOME], ids=["all", "some"])
def test_curvature(curved, clients):
    if curved.runtime == "masked silos":
        return  # see test_directions_have_to_be_allowed
    w = weights(clients)

    def restriction(f):
        V = torch.stack([point(f, seed) for seed in (5, 6)], 1)
        return gradients(f, clients=clients).restriction(V, w, 1 + point(f, 7).abs())

    seen, expected = curved(restriction)
    for part in ("slopes", "curvature", "sizes"):
        close(getattr(seen, part), getattr(expected, part), curved.runtime)


@pytest.mark.cover(2)
@pytest.mark.parametrize("clients", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize("what", ["diagonal", "hessian"])
def test_sums_of_second_derivatives(curved, what, clients):
    w = weights(clients)
    curved.agree(lambda f: getattr(gradients(f, clients=clients), what)(w))


@pytest.mark.cover(2)
@pytest.mark.parametrize("what", ["each", "hessians"])
def test_single_vectors_are_shown_by_plain_sums_alone(both, what):
    if both.runtime.startswith("masked"):
        with pytest.raises(InputError, match="Secure sums hide every client's own vector"):
            getattr(gradients(both.there), what)()
    elif what == "each" or "Module" not in repr(both.here.model):
        for clients in (None, SOME):
            both.agree(lambda f, clients=clients: getattr(gradients(f, clients=clients), what)())


STARTS = {
    "nothing": lambda f, clients: None,
    "answered": lambda f, clients: gradients(f, clients=clients),
    "answered elsewhere, minibatch": lambda f, clients: gradients(f, (5, (1,)), clients, seed=3),
}


@pytest.mark.cover(2)
@pytest.mark.parametrize(("batch", "clients"), ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("start", STARTS)
def test_local_steps(both, start, batch, clients):
    plan = LocalPlan(4, 0.05, batch_size=batch[0], key=batch[1], prox=0.2, snapshot=2)
    w = weights(clients)

    def steps(f):
        at = STARTS[start](f, clients)
        return f.local_updates(point(f), at, None if at is None else point(f, 2), plan, clients)

    seen, expected = both(steps)
    close(seen.sum(w), expected.sum(w), both.runtime)
    close(seen.snapshot(w), expected.snapshot(w), both.runtime)
    lengths_agree(both, seen, expected)
    without = both.there.local_updates(point(both.there), None, None, LocalPlan(2, 0.01), clients)
    with pytest.raises(InputError, match="no vectors 'snapshot'"):
        without.snapshot(w)


@pytest.mark.cover(2)
@pytest.mark.parametrize("clients", [None, SOME], ids=["all", "some"])
def test_proximal_steps(curved, clients):
    w = weights(clients)

    def steps(f):
        D = 1 + point(f, 7).abs()
        return f.proximal_steps(gradients(f, clients=clients), point(f, 2), ProximalPlan(0.5, D))

    seen, expected = curved(steps)
    close(seen.sum(w), expected.sum(w), curved.runtime, steps=20)


@pytest.mark.cover(1)
def test_kept_vectors(both):
    def kept(f):
        return f.memory().plus(0.5, gradients(f)).plus(-1.0, point(f, 2), [1, 3])

    seen, expected = both(kept)
    close(seen.sum(W), expected.sum(W), both.runtime)
    plan = LocalPlan(3, 0.05)
    steps = both(lambda f: f.local_updates(point(f), kept(f), point(f, 2), plan))
    close(steps[0].sum(W), steps[1].sum(W), both.runtime)


@pytest.mark.cover(1)
def test_scores(both):
    for split in ("train", "test"):
        seen, expected = both(lambda f, split=split: f.evaluate(point(f), split))
        assert seen.names == expected.names
        close(seen.loss, expected.loss, both.runtime)
        close(seen.score, expected.score, both.runtime)
        if both.runtime != "masked silos" or split == "train":  # rows count as agreed
            np.testing.assert_array_equal(seen.counts, expected.counts)
    with pytest.raises(InputError, match="split"):
        both.there.evaluate(point(both.there), "tets")


def test_points_belong_to_those_who_were_asked(runtime, asked):
    federation = asked(runtime, "squared")
    question = None
    question = GradientsAt(point(federation))
    everybody = federation.gradients(question.x).losses
    for clients in ([0], [1], [2, 0]):
        losses = federation.ask(question, clients).numbers("loss")
        np.testing.assert_allclose(losses[clients], everybody[clients], rtol=1e-12)
    with pytest.raises(InputError, match="no vectors 'typo'"):
        federation.ask(question).added("typo", W)


@pytest.mark.cover(1)
def test_constants(both):
    seen, expected = both(lambda f: f.constants())
    silos = both.runtime == "masked silos"  # they know what was agreed on
    for part in ("samples",) if silos else ("samples", "smoothness", "steepest"):
        np.testing.assert_allclose(getattr(seen, part), getattr(expected, part), rtol=1e-6)
    assert (seen.convex, seen.quadratic) == (expected.convex, expected.quadratic and not silos)
    assert (seen.strong_convexity <= expected.strong_convexity * (1 + 1e-6)).all()
    if not silos:
        np.testing.assert_allclose(seen.strong_convexity, expected.strong_convexity, rtol=1e-6)
    np.testing.assert_array_equal(both.there.start(), both.here.start())
    assert tuple(both.there.names) == NAMES


def test_refusals(runtime, asked):
    federation = asked(runtime, "squared")
    x = point(federation)
    for wrong in ([], [0, 0], [N], [-1]):
        with pytest.raises(InputError, match=f"distinct numbers from 0 to {N - 1}"):
            federation.losses(x, clients=wrong)
    for answers in (
        gradients(federation, clients=SOME),
        federation.local_updates(x, None, None, LocalPlan(2), SOME),
    ):
        with pytest.raises(InputError, match="zero for clients that were not asked"):
            answers.sum(np.ones(N))
    at = federation.gradients(x, clients=[0, 1])
    with pytest.raises(InputError, match="gradients of these clients"):
        federation.local_updates(x, at, x, LocalPlan(1), [1, 2])


@pytest.mark.parametrize("where", ["masked cohort", "masked silos"])
def test_directions_have_to_be_allowed(where):
    federation = federation_of(where, "squared", projections=False)
    assert federation.constants().first_order
    at = gradients(federation)
    with pytest.raises(InputError, match="projections=True"):
        at.restriction(
            torch.ones(len(federation.start()), 1).double(),
            W,
            torch.ones(len(federation.start())).double(),
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_masked_runtimes_pay_alike(model):
    """Two rounds of questions with masks: as many exchanges, bytes up and bytes down."""
    paid = []
    for where in ("masked cohort", "masked silos"):
        federation = federation_of(where, model)
        for _ in range(2):
            at = gradients(federation)
            c = at.sum(W)
            federation.local_updates(at.x, at, c, LocalPlan(2, 0.01)).sum(W)
        paid.append(traffic(federation))
    assert paid[0] == paid[1]


def test_the_problems_differ_between_clients():
    for model in MODELS:
        assert repr(model_of(model))
        assert len({len(y) for _, y in data_of(model)[0].values()}) == N
        losses = measure(model).losses(point(measure(model)))
        assert len(set(np.round(losses, 6))) == N
    assert isinstance(measure("squared"), sp.Cohort)


def test_nobody_takes_the_place_of_our_questions():
    """A silo's gate reads what may leave from them."""
    for kind in ("losses", "gradients", ""):
        with pytest.raises(InputError, match="needs its own kind"):
            type("Mine", (Question,), {"kind": kind, "__module__": "mine"})
    assert QUESTIONS["losses"] is Losses
