"""What a coordinator learns where losses are hidden: by looking at a run, and by lying."""

from __future__ import annotations

import json

import numpy as np
import pytest
from curious import errors, gradients_from_losses, losses_seen, ordinary_run
from dishonest import NAMES, Coordinator, RefusedError, learn, masked, meet, point

from scaffpd.config.model_file import read_model
from scaffpd.deploy.session import SiloRequest
from scaffpd.federation import LocalPlan
from scaffpd.federation.questions import GradientsAt, LocalSteps, Losses, Optima, Scores
from scaffpd.federation.weighed import Response, Thresholds, Weighing
from scaffpd.masking import FixedPoint
from scaffpd.objectives import ChiSquare

X = np.array([0.1, -0.2, 0.3, 0.05])
NUMBERS, ONES = FixedPoint.finest(len(NAMES), 11), np.ones(len(NAMES))
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
        assert {len(seen) for _, seen in losses_seen(transport.log).values()} == {1}  # the scores of the last table


# --- lying


@pytest.fixture
def coordinator(tmp_path):
    found = Coordinator(tmp_path, "Fair", secure='losses = "hidden"\n')
    assert found.setup.secure["losses"] == "hidden"
    meet(found)
    return found


def weigh(coordinator, at, *levels, told=None, **more):
    """Σ over silos of their answers about thresholds, and the answers; `told` has thresholds for single silos."""
    rows = {}
    for name in NAMES:
        own = levels if told is None else told[name]
        reply = masked(coordinator, name, Thresholds(at, Weighing(GOAL, own)), "masses", ONES, NUMBERS, **more)
        rows[name] = reply.arrays["masked"].view(np.uint64)
    return NUMBERS.decode(sum(rows.values())), np.stack([*rows.values()]).view(np.int64)


def respond(coordinator, at, nu, levels, rows):
    """Σ λ_i c_i at a threshold, with what silos want to see."""
    total, about = 0, SiloRequest.of(Response(at, Weighing(GOAL, (nu,))))
    values = {
        **about.values, "about": about.kind, "parts": ["weighted"], "names": list(NAMES), "colluding": 1,
        "weights": ONES.tolist(), "numbers": NUMBERS.values(),
        "seen": {"levels": list(levels), "numbers": NUMBERS.values()},
    }  # fmt: skip
    for name in NAMES:
        reply = coordinator.put(name, SiloRequest("masked", values, about.vectors, arrays={"seen": rows}))
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
    np.testing.assert_allclose(sums[[2, 4, 6]], [form.weights(losses, n, 0.0, form.prior).sum() for n in levels])
    found = respond(coordinator, at, nu, levels, rows)
    np.testing.assert_allclose(found[:4], form.weights(losses, nu, 0.0, form.prior) @ gradients, atol=1e-9)


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
    forged = rows.copy()  # say that the others have weight: whose answer is changed does not find it
    forged[int(np.argmin(losses)), 2:8:2] += 2**49
    with pytest.raises(RefusedError, match="not among those"):
        respond(coordinator, at, nu, levels, forged)
    low = (0.0, 0.1, 0.2)
    _, fine = weigh(coordinator, at, *low)  # all have weight there, and no threshold above ν is shown
    with pytest.raises(RefusedError, match="thresholds above"):
        respond(coordinator, at, nu, low, fine)


def test_different_thresholds_for_different_silos_give_noise(coordinator):
    at = GradientsAt(point(X))
    told = {name: (0.2,) if name == "north" else (9.0,) for name in NAMES}
    sums, _ = weigh(coordinator, at, told=told)
    losses, _ = truths(coordinator, at.x)
    form = GOAL.separable(4)
    alone = form.weights(losses, 0.2, 0.0, form.prior)[0]
    assert abs(sums[2] - alone) > 1e-3


@pytest.mark.parametrize("kind", ["gradients", "losses", "optima", "sizes", "local", "clear", "scores"])
def test_nothing_of_a_single_silo_is_answered(coordinator, kind):
    at = GradientsAt(point(X))
    weigh(coordinator, at, 0.3)
    about = SiloRequest.of(Thresholds(at, Weighing(GOAL, (0.3,))))
    size = {**about.values, "about": about.kind, "parts": ["masses"], "names": list(NAMES)}
    asked = {
        "gradients": lambda: coordinator.ask("north", at), "losses": lambda: coordinator.ask("north", Losses(at.x)),
        "optima": lambda: coordinator.ask("north", Optima()),
        "sizes": lambda: coordinator.put("north", SiloRequest("sizes", size, about.vectors)),
        "local": lambda: masked(
            coordinator, "north", LocalSteps(at.x, at, at.x, LocalPlan(2, 0.1)), "d", ONES, NUMBERS
        ),
        "clear": lambda: coordinator.ask("north", Thresholds(at, Weighing(GOAL, (0.3,))), names=list(NAMES)),
        "scores": lambda: [coordinator.ask("north", Scores(point(k * X))) for k in range(3)],
    }[kind]  # fmt: skip
    with pytest.raises(RefusedError):
        asked()


def test_scores_are_few_and_a_silo_may_keep_them(tmp_path):
    coordinator = Coordinator(tmp_path, "Fair", "[limits]\nscores = 0\n", secure='losses = "hidden"\n')
    assert learn(coordinator.ask, "north", Scores(point(X), accuracy=False)) is None


def test_a_silo_can_insist(tmp_path):
    with pytest.raises(Exception, match=r"keeps its losses to itself \(secure.losses\)"):
        Coordinator(tmp_path, "ScaffPD", secure='losses = "hidden"\n')


def test_thresholds_at_a_point_are_few_and_so_are_objectives(coordinator):
    at, told = GradientsAt(point(X)), 0
    for k in range(20):
        told += learn(weigh, coordinator, at, 0.1 + 0.01 * k) is not None
    assert told == 12
    names = []
    for k in range(5):
        other = Thresholds(GradientsAt(point(X + 1)), Weighing(ChiSquare(0.2 + k), (0.3,)))
        names.append(learn(masked, coordinator, "north", other, "masses", ONES, NUMBERS) is not None)
    assert names == [True, True, False, False, False]


def largest_loss(coordinator, x, low=0.0, high=8.0):
    """The largest loss of all silos, without a name: Σ λ_i(ν) is zero from there on. Eight thresholds a question."""
    at = GradientsAt(point(x))
    for _ in range(12):
        levels = tuple(np.linspace(low, high, 10)[1:-1])
        masses = weigh(coordinator, at, *levels)[0][2::2][: len(levels)]
        below = [n for n, mass in zip(levels, masses, strict=True) if mass > 0]
        above = [n for n, mass in zip(levels, masses, strict=True) if not mass > 0]
        low, high = max(below, default=low), min(above, default=high)
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
