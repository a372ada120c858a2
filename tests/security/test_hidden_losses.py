"""What a coordinator learns where losses are hidden: by looking at a run, and by lying."""

from __future__ import annotations

import json

import numpy as np
import pytest
from curious import errors, gradients_from_losses, losses_seen, ordinary_run
from dishonest import NAMES, Coordinator, RefusedError, learn, masked, meet, point
from scipy.optimize import brentq

from scaffpd.deploy.messages import digest
from scaffpd.deploy.session import SiloRequest
from scaffpd.deploy.silo.silo import Silo
from scaffpd.federation import LocalPlan
from scaffpd.federation.questions import GradientsAt, LocalSteps, Losses, Optima, Scores
from scaffpd.federation.weighed import Response, Thresholds, Weighing
from scaffpd.objectives import ChiSquare
from scaffpd.run.settings.model_file import read_model
from scaffpd.secure.masking import FixedPoint

X = np.array([0.1, -0.2, 0.3, 0.05])
NUMBERS = FixedPoint.finest(len(NAMES), 11)
ONES = np.ones(len(NAMES))
GOAL = ChiSquare(0.1)


# --- looking


@pytest.mark.parametrize(
    ("losses", "kind", "least", "most"), [("clear", "ScaffPD", 0, 0.02), ("hidden", "Fair", 0.9, 2)]
)
def test_gradients_from_the_losses_of_an_ordinary_run(tmp_path, losses, kind, least, most):
    """Before: every silo's gradient to 1 % or better, with five parameters and 14 points."""
    transport, outcome, file = ordinary_run(tmp_path, 5, losses, kind)
    assert outcome.status == "converged"
    x = read_model(file.folder / "model.safetensors")[0]
    found = errors(transport, gradients_from_losses(transport.log, x), x)
    assert least <= min(found) <= max(found) <= most
    if losses == "hidden":
        assert {len(seen) for _, seen in losses_seen(transport.log).values()} == {
            1
        }  # the scores of the last table


# --- lying


@pytest.fixture
def coordinator(tmp_path):
    found = Coordinator(tmp_path, "Fair", secure='losses = "hidden"\n')
    assert found.setup.secure["losses"] == "hidden"
    meet(found)
    return found


def weigh(coordinator, at, *levels, told=None, numbers=NUMBERS, how=(), junk=None):
    """Σ over silos of their answers about thresholds, and the answers; `told` has thresholds for single silos."""
    rows = {}
    for name in NAMES:
        own = Weighing(GOAL, levels if told is None else told[name], *how)
        more = {} if junk is None else {"junk": name if junk == "each" else junk}
        reply = masked(coordinator, name, Thresholds(at, own), "masses", ONES, numbers, **more)
        rows[name] = reply.arrays["masked"].view(np.uint64)
    return numbers.decode(sum(rows.values())), np.stack([*rows.values()]).view(np.int64)


def said(question, part, names=NAMES, numbers=NUMBERS, **more):
    """What a question for masked vectors says."""
    about = SiloRequest.of(question)
    return {
        **about.values,
        "about": about.kind,
        "parts": [part],
        "names": list(names),
        "colluding": 1,
        "weights": [1.0] * len(names),
        "numbers": numbers.values(),
        **more,
    }


def respond(coordinator, at, nu, levels, rows, seen=None, names=NAMES, how=(), name=0):
    """Σ λ_i c_i at a threshold, with what silos want to see: the answers about thresholds, and that question."""
    weighing = Weighing(GOAL, (nu,), *(how or (0.0, 0, 1.0)), name)
    total = 0
    question = Response(at, weighing)
    seen = seen or said(Thresholds(at, Weighing(GOAL, tuple(levels), *how)), "masses", names)
    values = said(question, "weighted", names, seen=seen)
    vectors = SiloRequest.of(question).vectors
    for silo in names:
        reply = coordinator.put(silo, SiloRequest("masked", values, vectors, arrays={"seen": rows}))
        if "masked" not in reply.arrays:
            raise RefusedError(reply.values)
        total = total + reply.arrays["masked"].view(np.uint64)
    return NUMBERS.decode(total)


def truths(coordinator, x):
    losses = np.array([float(coordinator.truth(name)[2].losses(x)[0]) for name in NAMES])
    return losses, np.array([coordinator.gradient(name, x) for name in NAMES])


def test_honest_sums_are_right(coordinator):
    at = GradientsAt(point(X))
    losses, gradients = truths(coordinator, at.x)
    nu = GOAL.support(losses)
    form = GOAL.separable(4)
    levels = (nu - 0.1, nu, nu + 0.01)
    sums, rows = weigh(coordinator, at, *levels)
    np.testing.assert_allclose(
        sums[[2, 4, 6]], [form.weights(losses, n, 0.0, form.prior).sum() for n in levels]
    )
    found = respond(coordinator, at, nu, levels, rows)
    np.testing.assert_allclose(
        found[:4], form.weights(losses, nu, 0.0, form.prior) @ gradients, atol=1e-9
    )


def test_the_worst_served_silo_cannot_be_singled_out_by_a_threshold(coordinator):
    """At a threshold just below the largest loss only that silo has weight: the sum would be its gradient."""
    at = GradientsAt(point(X))
    losses, _ = truths(coordinator, at.x)
    first, second = np.sort(losses)[[-1, -2]]
    form = GOAL.separable(4)
    nu = (first + second) / 2 + GOAL.rho
    assert np.count_nonzero(form.weights(losses, nu, 0.0, form.prior)) == 1
    levels = (nu - 0.01, nu, nu + 1e-6)
    _, rows = weigh(coordinator, at, *levels)
    assert learn(respond, coordinator, at, nu, levels, rows) is None
    forged = (
        rows.copy()
    )  # say that the others have weight: whose answer is changed does not find it
    forged[int(np.argmin(losses)), 2:8:2] += 2**49
    with pytest.raises(RefusedError, match="not among those"):
        respond(coordinator, at, nu, levels, forged)
    low = (0.0, 0.1, 0.2)
    _, fine = weigh(
        coordinator, at, *low
    )  # all have weight there, and no threshold above ν is shown
    with pytest.raises(RefusedError, match="thresholds above"):
        respond(coordinator, at, nu, low, fine)


# --- answers about thresholds that are not about the question at hand


@pytest.fixture
def alone(coordinator):
    """A point, and a threshold there at which one silo only has weight; and that silo's number."""
    at = GradientsAt(point(X))
    form = GOAL.separable(4)
    losses, _ = truths(coordinator, at.x)
    nu = np.sort(losses)[-2:].mean() + GOAL.rho
    weights = form.weights(losses, nu, 0.0, form.prior)
    assert np.count_nonzero(weights) == 1
    assert weights.sum() < 0.1
    return at, nu, int(np.argmax(losses))


def refused(words, *given, **more):
    with pytest.raises(RefusedError, match=words):
        respond(*given, **more)


def test_answers_at_another_point_that_had_the_same_name(coordinator, alone, monkeypatch):
    at, nu, _ = alone
    far = GradientsAt(point(-8 * X))
    labels = {}

    def named(vectors):
        coordinator.session._sent.clear()
        return {
            role: (labels.get("one", f"h-{digest(v.numpy())}"), v.numpy())
            for role, v in vectors.items()
        }

    monkeypatch.setattr(coordinator.session, "_named", named)
    honest, _ = weigh(coordinator, at, nu)
    labels["one"] = "N"
    other, _ = weigh(coordinator, far, nu)
    sums, rows = weigh(coordinator, at, nu)
    labels.clear()
    assert other[2] > 10 * honest[2]
    np.testing.assert_allclose(sums, honest)
    refused("nearly the silo's own|share", coordinator, at, nu, (nu,), rows)


@pytest.mark.parametrize("honest", [True, False])
def test_answers_for_a_minibatch(coordinator, alone, honest):
    at, nu, _ = alone
    batch = GradientsAt(at.x, 20, (0,))
    _, rows = weigh(coordinator, batch, nu)
    weigh(coordinator, at, nu)
    shown = said(Thresholds(batch if honest else at, Weighing(GOAL, (nu,))), "masses")
    refused(
        "thresholds above" if honest else "not among those", coordinator, at, nu, (nu,), rows, shown
    )


@pytest.mark.parametrize("honest", [True, False])
def test_answers_among_more_silos_than_the_sum_has(coordinator, alone, honest):
    at, nu, worst = alone
    levels = tuple(nu + 1e-3 * k for k in range(8))
    _, rows = weigh(coordinator, at, *levels)
    names = [NAMES[worst], *(name for name in NAMES if name != NAMES[worst])][:3]
    shown = said(Thresholds(at, Weighing(GOAL, levels)), "masses", NAMES if honest else names)
    rows = np.stack([rows[NAMES.index(name)] for name in names])
    words = "thresholds above" if honest else "not among those"
    refused(words, coordinator, at, nu, levels, rows, shown, names)


@pytest.mark.parametrize("shown", [{}, {"junk": "north"}])
def test_answers_that_were_asked_for_with_a_word_of_its_own_for_everybody(
    coordinator, alone, shown
):
    at, nu, _ = alone
    levels = tuple(nu + 1e-3 * k for k in range(8))
    _, rows = weigh(coordinator, at, *levels, junk="each")
    seen = said(Thresholds(at, Weighing(GOAL, levels)), "masses", **shown)
    refused(
        "does not add up" if shown else "not among those", coordinator, at, nu, levels, rows, seen
    )


def test_answers_for_weights_that_are_replaced_later(coordinator, alone):
    """Around weights under a number, at a price at which nobody leaves them."""
    at, nu, _ = alone
    losses, gradients = truths(coordinator, at.x)
    fair = GOAL.support(losses)
    form = GOAL.separable(4)
    weights = form.weights(losses, fair, 0.0, form.prior)
    _, rows = weigh(coordinator, at, fair)
    respond(coordinator, at, fair, (fair,), rows, name=5)
    respond(coordinator, at, fair, (fair,), rows, name=5)  # the same again is the same
    near = (1e6, 5, 1.0)
    sums, kept = weigh(coordinator, at, fair, how=near)
    assert sums[2] == pytest.approx(weights.sum(), abs=1e-4)
    _, rows = weigh(coordinator, at, nu)
    refused("another weight under that number", coordinator, at, nu, (nu,), rows, name=5)
    found = respond(coordinator, at, fair, (fair,), kept, how=near)
    np.testing.assert_allclose(found[:4], weights @ gradients, atol=1e-4)


def test_answers_rounded_up_by_few_digits(coordinator, alone):
    at, _, worst = alone
    losses, _ = truths(coordinator, at.x)
    form = GOAL.separable(4)
    few = FixedPoint(len(NAMES), 11, 5)
    own = lambda nu: form.weights(losses, nu, 0.0, form.prior)[worst]
    nu = brentq(lambda nu: own(nu) - 0.6 / 32, losses.max() - 1, losses.max() + GOAL.rho)
    assert np.count_nonzero(form.weights(losses, nu, 0.0, form.prior)) == 1
    sums, rows = weigh(coordinator, at, nu, numbers=few)
    assert sums[2] in (0, 1 / 32)  # at random: either way too little to count on
    seen = said(Thresholds(at, Weighing(GOAL, (nu,))), "masses", numbers=few)
    refused("share", coordinator, at, nu, (nu,), rows, seen)


def test_answers_masked_with_keys_of_several_processes(coordinator, alone):
    """Everybody's own answer to that very question; but they add up to noise."""
    at, nu, _ = alone
    _, rows = weigh(coordinator, at, nu)
    coordinator.silos["west"] = coordinator.session.transport.silos["west"] = Silo.open(
        coordinator.places["west"]
    )
    meet(coordinator)
    _, again = weigh(coordinator, at, nu)
    rows[0] = again[0]
    refused("does not add up", coordinator, at, nu, (nu,), rows)


@pytest.mark.parametrize(
    "seen", [[1], "x", {"weighing": 1}, {"weighing": {"levels": ["a"]}, "numbers": {}}, {"no": 0}]
)
def test_questions_that_show_nonsense_end_in_a_sentence(coordinator, alone, seen):
    at, nu, _ = alone
    _, rows = weigh(coordinator, at, nu)
    refused("thresholds above its own", coordinator, at, nu, (nu,), rows, seen)
    refused("thresholds above its own", coordinator, at, nu, (nu,), rows[:2])


def test_different_thresholds_for_different_silos_give_noise(coordinator):
    at = GradientsAt(point(X))
    told = {name: (0.2,) if name == "north" else (9.0,) for name in NAMES}
    sums, _ = weigh(coordinator, at, told=told)
    losses, _ = truths(coordinator, at.x)
    form = GOAL.separable(4)
    alone = form.weights(losses, 0.2, 0.0, form.prior)[0]
    assert abs(sums[2] - alone) > 1e-3


@pytest.mark.parametrize(
    "kind", ["gradients", "losses", "optima", "sizes", "local", "clear", "scores"]
)
def test_nothing_of_a_single_silo_is_answered(coordinator, kind):
    at = GradientsAt(point(X))
    weigh(coordinator, at, 0.3)
    about = SiloRequest.of(Thresholds(at, Weighing(GOAL, (0.3,))))
    size = {**about.values, "about": about.kind, "parts": ["masses"], "names": list(NAMES)}
    asked = {
        "gradients": lambda: coordinator.ask("north", at),
        "losses": lambda: coordinator.ask("north", Losses(at.x)),
        "optima": lambda: coordinator.ask("north", Optima()),
        "sizes": lambda: coordinator.put("north", SiloRequest("sizes", size, about.vectors)),
        "local": lambda: masked(
            coordinator, "north", LocalSteps(at.x, at, at.x, LocalPlan(2, 0.1)), "d", ONES, NUMBERS
        ),
        "clear": lambda: coordinator.ask(
            "north", Thresholds(at, Weighing(GOAL, (0.3,))), names=list(NAMES)
        ),
        "scores": lambda: [coordinator.ask("north", Scores(point(k * X))) for k in range(3)],
    }[kind]
    with pytest.raises(RefusedError):
        asked()


def test_scores_are_few_and_a_silo_may_keep_them(tmp_path):
    coordinator = Coordinator(
        tmp_path, "Fair", "[limits]\nscores = 0\n", secure='losses = "hidden"\n'
    )
    assert learn(coordinator.ask, "north", Scores(point(X), accuracy=False)) is None


def test_a_silo_can_insist(tmp_path):
    with pytest.raises(Exception, match=r"hides its losses \(secure.losses\)"):
        Coordinator(tmp_path, "ScaffPD", secure='losses = "hidden"\n')


def test_thresholds_at_a_point_are_few_and_so_are_objectives(coordinator):
    at = GradientsAt(point(X))
    told = 0
    for k in range(20):
        told += learn(weigh, coordinator, at, 0.1 + 0.01 * k) is not None
    assert told == 12
    names = []
    for k in range(5):
        other = Thresholds(GradientsAt(point(X + 1)), Weighing(ChiSquare(0.2 + k), (0.3,)))
        names.append(
            learn(masked, coordinator, "north", other, "masses", ONES, NUMBERS) is not None
        )
    assert names == [True, True, False, False, False]


def largest_loss(coordinator, x, low=0.0, high=8.0):
    """The largest loss of all silos, without a name: Σ λ_i(ν) is zero from there on. Eight thresholds a question."""
    at = GradientsAt(point(x))
    for _ in range(12):
        levels = tuple(np.linspace(low, high, 10)[1:-1])
        masses = weigh(coordinator, at, *levels)[0][2::2][: len(levels)]
        below = [n for n, mass in zip(levels, masses, strict=True) if mass > 0]
        above = [n for n, mass in zip(levels, masses, strict=True) if not mass > 0]
        low = max(below, default=low)
        high = min(above, default=high)
    return (low + high) / 2 - GOAL.rho


def test_what_remains_is_the_largest_loss_without_a_name(coordinator):
    """A coordinator that lies can bisect: with d + 1 points it has the gradient of the silo that is served worst."""
    losses, gradients = truths(coordinator, point(X))
    assert largest_loss(coordinator, X) == pytest.approx(losses.max(), abs=1e-8)
    step = 1e-3
    found = [largest_loss(coordinator, X + step * e) for e in np.eye(4)]
    learnt = (np.array(found) - losses.max()) / step
    worst = gradients[int(np.argmax(losses))]
    assert np.linalg.norm(learnt - worst) < 0.02 * np.linalg.norm(worst)


def test_the_journal_holds_no_loss(coordinator):
    at = GradientsAt(point(X))
    weigh(coordinator, at, 0.3)
    losses, _ = truths(coordinator, at.x)
    lines = (coordinator.places["north"].parent / "answered.jsonl").read_text().splitlines()
    assert not any(f"{losses[0]:.6f}"[:7] in json.dumps(line) for line in lines)
