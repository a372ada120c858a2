"""The server's small saddle problems: proofs recomputed from the definitions, and extremes."""

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from objective_cases import ALL, ON_SIMPLEX, build, powers, vectors

import scaffpd as sp
from cases.objectives import contains
from scaffpd.algorithms.saddle import solve_quadratics, solve_saddle
from scaffpd.algorithms.subspace import SubspaceModel, orthonormal
from scaffpd.objectives.base import Objective

every_kind = pytest.mark.parametrize("kind", ALL)
TINY = 1e-25  # what is below it is rounding of sums that vanish
DIGITS = 8 * np.finfo(np.float64).eps  # of a weight, twice what may be wrong


@dataclass(frozen=True)
class Problem:
    objective: Objective
    a: np.ndarray
    F: np.ndarray
    start: np.ndarray
    diagonal: np.ndarray | None
    tol: float

    @property
    def w(self):
        return np.zeros(len(self.a)) if self.diagonal is None else self.diagonal

    @property
    def coupling(self):
        """All of E, with what holds the weights to their start below it."""
        return np.vstack([self.F, np.diag(self.w)])

    @property
    def shift(self):
        """What is taken from Eλ: −½ Σ w_i² (λ_i − l_i)² is −½‖diag(w) λ − w ∘ l‖²."""
        return np.concatenate([np.zeros(len(self.F)), self.w * self.start])

    def solve(self):
        return solve_saddle(self.objective, self.a, self.F, self.start, self.tol, self.diagonal)

    def whole(self, found):
        """z, with the answer to the weights that are held below it."""
        return np.concatenate([found.z, -self.w * (found.weights - self.start)])

    def bounds(self, found):
        """Both sides of the duality, from their definitions."""
        z = self.whole(found)
        weights = found.weights
        pull = self.coupling @ weights - self.shift
        above = (
            self.objective.support(self.a + self.coupling.T @ z)
            - float(self.shift @ z)
            + 0.5 * float(z @ z)
        )
        return above, float(self.a @ weights) - self.objective.value(weights) - 0.5 * float(
            pull @ pull
        )

    def size(self, found):
        """The sum of the terms whose difference the gap is, without their signs."""
        z = np.abs(self.whole(found))
        weights = np.abs(found.weights)
        E = np.abs(self.coupling)
        terms = (
            (np.abs(self.a) + E.T @ z) @ weights
            + penalty_size(self.objective, found.weights)
            + z @ z
        )
        far = np.max(np.abs(self.a) + E.T @ z) if self.objective.simplex else 0.0
        held = self.w**2 @ weights  # it multiplies the last digits of the weights
        off = np.abs(self.whole(found) + self.coupling @ found.weights - self.shift)
        lost = (
            1e-2 * off @ (E @ weights)
        )  # ½‖z + Eλ‖² has the rounding ⟨|z + Eλ|, ε|E|λ⟩ of sums that cancel
        return float(
            terms + far + self.shift @ z + held + lost + 1e-15 * np.sum((E @ weights) ** 2)
        )


def penalty_size(objective, weights):
    """The sum of the terms of ψ without their signs: those of Nash cancel where λ_i is near
    p_i/b_i.
    """
    if not isinstance(objective, sp.Nash):
        return abs(objective.value(weights))
    p = objective.weights(len(weights))
    return float(np.abs(objective.levels(len(p))) @ weights + 1 + p @ np.abs(np.log(weights / p)))


def last_digits(problem, found):
    """The most that the last digits of the weights change the gap: less cannot be asked for.

    A weight is known to a few ε of itself. By w² that moves v, and the gap by ½⟨δ, support''(v) δ⟩
    with δ_i = w_i² ε λ_i, which is much where the support function bends much, as a power of large
    losses does.
    """
    other = (found._replace(weights=found.weights * (1 + sign * DIGITS)) for sign in (-1, 1))
    return max(above - below for above, below in map(problem.bounds, other))


def couplings(random, r, n, wide):
    normal = random.normal(size=(r, n))
    return {
        "any": normal,
        "none": 0 * normal,
        "identical clients": normal[:, :1] * np.ones(n),
        "rank one": normal[:, :1] * random.normal(size=n),
        "far from the mean": normal + 1e3,
        "badly scaled": normal * 10.0 ** random.uniform(-wide, wide, (r, 1)),
        "unequal clients": normal * 10.0 ** random.uniform(-wide, wide, n),
    }


def diagonals(random, n, wide):
    some = random.uniform(0.1, 2.0, n)
    return {
        "no": None,
        "zero": np.zeros(n),
        "equal": np.full(n, 0.3),
        "any": some,
        "some": some * (random.random(n) < 0.5),
        "unequal": 10.0 ** random.uniform(-wide, wide, n),
        "rounding": np.full(n, 1e-9),
    }


@st.composite
def problems(draw, kind, clients=8, wide=1.5):
    """Any number of clients, with ties, zeros, weights on the boundary and couplings of every
    kind.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, clients))
    r = draw(st.sampled_from([0, 1, 2, 5]))
    scale = (
        draw(powers(-wide, wide)) if kind != "QFair" else draw(powers(-1, 1))
    )  # its weights are powers of losses
    others = st.one_of(
        st.sampled_from([0.0, 1.0, 1.0 + 2e-16]), st.floats(0.0, 3.0).map(lambda v: round(v, 9))
    )
    a = draw(vectors(n, others)) * scale + (
        draw(st.sampled_from([0.0, 0.0, 1e6])) if kind in ON_SIMPLEX else 0.0
    )
    prior = draw(
        st.sampled_from([None, random.uniform(0.1, 1.0, n), 10.0 ** random.uniform(-6, 0, n)])
    )
    objective = build(kind, draw(powers(-2 * wide, 2 * wide)), a, prior)
    start = objective.start(a)
    if draw(st.booleans()):
        start = objective.prox(random.normal(size=n), start, 10.0 ** random.uniform(-3, 3))
    coupling = draw(st.sampled_from(sorted(couplings(random, r, n, wide))))
    diagonal = draw(st.sampled_from(sorted(diagonals(random, n, wide))))
    return Problem(
        objective,
        a,
        couplings(random, r, n, wide)[coupling] * draw(powers(-wide, wide)),
        start,
        diagonals(random, n, wide)[diagonal],
        draw(st.sampled_from([1e-3, 1e-8, 1e-12])) * max(float(np.abs(a).max()), 1e-12),
    )


def assert_proven(problem, found):
    """Nothing but finite numbers, weights in Λ, and a gap that is what both sides say; the size of
    its terms.
    """
    assert np.all(np.isfinite(found.weights))
    assert np.all(np.isfinite(found.z))
    assert found.z.shape == (len(problem.F),)
    assert contains(problem.objective, found.weights)
    assert found.gap >= 0
    if not np.isfinite(found.gap):
        return np.inf
    above, below = problem.bounds(found)
    size = problem.size(found) + abs(above) + abs(below)
    assert abs(above - below - found.gap) <= 1e-12 * size + TINY
    assert abs(found.value - above) <= 1e-12 * size + TINY
    return size


def assert_solved(problem, found):
    size = assert_proven(problem, found)
    if found.gap > max(problem.tol, 1e-12 * size) + TINY:
        assert not problem.objective.simplex
        assert found.gap <= last_digits(problem, found)


# --- any problem


@every_kind
@pytest.mark.parametrize(
    ("examples", "clients"), [(8, 8), pytest.param(1500, 30, marks=pytest.mark.long)]
)
def test_the_proof_is_honest_and_good_enough(kind, examples, clients):
    @given(data=st.data())
    @settings(deadline=None, max_examples=examples)
    def search(data):
        problem = data.draw(problems(kind, clients))
        assert_solved(problem, problem.solve())
        wild = data.draw(problems(kind, clients, wide=6.0))
        assert_proven(wild, wild.solve())

    search()


# --- extremes

LOSSES = np.array([0.3, 1.2, 0.7, 0.7, 0.0])
COUPLING = np.random.default_rng(5).normal(size=(3, 5))
HALF = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
EXTREMES = {
    "no coupling": {"F": 0 * COUPLING, "diagonal": np.zeros(5)},
    "no rows": {"F": np.empty((0, 5))},
    "one client": {"a": LOSSES[:1], "F": COUPLING[:, :1], "diagonal": np.ones(1)},
    "one client, alone": {"a": LOSSES[:1], "F": np.empty((0, 1))},
    "identical clients": {"a": np.full(5, 0.7), "F": COUPLING[:, :1] * np.ones(5)},
    "losses equal but for rounding": {"a": 0.7 + 1e-16 * np.arange(5), "F": COUPLING},
    "losses of zero": {"a": np.zeros(5), "F": COUPLING},
    "large losses": {"a": 1e12 * LOSSES, "F": 1e6 * COUPLING, "tol": 1.0},
    "small losses": {"a": 1e-12 * LOSSES, "F": 1e-6 * COUPLING, "tol": 1e-20},
    "large coupling": {"F": 1e12 * COUPLING},
    "small coupling": {"F": 1e-12 * COUPLING},
    "large and small rows": {"F": COUPLING * np.array([[1e12], [1.0], [1e-12]])},
    "large diagonal": {"F": COUPLING, "diagonal": np.full(5, 1e12)},
    "one weight is held": {
        "a": np.zeros(5),
        "F": np.empty((0, 5)),
        "diagonal": np.array([0.0, 0.0, 0.2, 0.0, 0.0]),
    },
    "small diagonal": {"F": COUPLING, "diagonal": np.full(5, 1e-12)},
    "large and small diagonal": {"F": COUPLING, "diagonal": np.array([0.0, 1e-6, 1.0, 1e6, 1e12])},
    "more rows than clients": {"F": np.random.default_rng(6).normal(size=(40, 5))},
    "the same row again": {"F": np.repeat(COUPLING[:1], 4, 0)},
    "weights on the boundary": {"F": COUPLING, "start": HALF},
    "a common shift": {"a": 2.0**40 + LOSSES, "F": COUPLING},
    "an uneven prior": {"F": COUPLING, "prior": 10.0 ** np.array([-12.0, -6.0, -3.0, 0.0, 0.0])},
    "a small parameter": {"F": COUPLING, "parameter": 1e-12},
    "a large parameter": {"F": COUPLING, "parameter": 1e12},
    "no tolerance": {"F": COUPLING, "diagonal": np.ones(5), "tol": 0.0},
}


def extreme(kind, name):
    case = {
        "a": LOSSES,
        "diagonal": None,
        "tol": 1e-10,
        "prior": None,
        "parameter": 0.5,
        **EXTREMES[name],
    }
    objective = build(kind, case["parameter"], case["a"], case["prior"])
    start = objective.start(case["a"])
    if "start" in case:
        start = objective.prox(np.zeros(5), case["start"], 1.0)
    return Problem(objective, case["a"], case["F"], start, case["diagonal"], case["tol"])


@pytest.mark.sample(70)
@every_kind
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_solved(kind, name):
    if kind == "QFair" and name == "large losses":
        pytest.skip("its weights are powers of losses")
    problem = extreme(kind, name)
    assert_solved(problem, problem.solve())


@every_kind
@pytest.mark.parametrize("size", [1e60, 1e160, 1e300])
@pytest.mark.parametrize("where", ["a", "F", "diagonal"])
def test_what_overflows_is_no_error_and_no_proof(kind, size, where):
    case = {"a": LOSSES, "F": COUPLING, "diagonal": np.ones(5)}
    objective = build(kind, 0.5, LOSSES, None)
    start = objective.start(LOSSES)
    case[where] = size * np.abs(case[where])
    found = solve_saddle(objective, case["a"], case["F"], start, 1e-10, case["diagonal"])
    assert np.all(np.isfinite(found.weights))
    assert np.all(np.isfinite(found.z))
    assert contains(objective, found.weights)
    assert not np.isnan(found.gap)
    assert not np.isnan(found.value)


@pytest.mark.parametrize("gain", [1e-2, 1e-6, 1e-10])
def test_nash_with_losses_close_to_the_level(gain):
    problem = Problem(
        sp.Nash(LOSSES + gain), LOSSES, COUPLING, np.full(5, 0.2), np.full(5, 0.1), 1e-10
    )
    assert_solved(problem, problem.solve())


def test_nash_needs_the_coupling_where_losses_are_above_the_level():
    """support(a) is infinite; support(a + Eᵀz) is not."""
    problem = Problem(sp.Nash(LOSSES.max() - 0.1), LOSSES, np.eye(5), np.ones(5), None, 1e-10)
    assert problem.objective.support(LOSSES) == np.inf
    assert_solved(problem, problem.solve())


# --- what it costs


def typical(kind, n, r, seed):
    random = np.random.default_rng(seed)
    a = random.exponential(size=n)
    F = random.normal(size=(r, n)) * 10.0 ** random.uniform(-1, 0.5, (r, 1))
    objective = build(kind, 0.3, a, random.uniform(0.1, 1.0, n) if seed % 2 else None)
    return Problem(objective, a, F, objective.start(a), random.uniform(0.2, 2.0, n), 1e-12)


@every_kind
def test_it_takes_few_newton_steps(kind):
    steps = []
    for seed in range(6):
        problem = typical(kind, 50, 20, seed)
        found = problem.solve()
        assert_solved(problem, found)
        steps.append(found.iterations)
        raised = problem.a + problem.w**2 * problem.start
        again = solve_saddle(problem.objective, raised, problem.coupling, found.weights, 1e-9)
        assert again.iterations <= 3  # from the solution
    assert np.mean(steps) <= 25
    assert max(steps) <= 60


@every_kind
def test_no_matrix_of_all_pairs_of_clients_is_formed(kind):
    problem = typical(kind, 1000, 5, 0)
    tracemalloc.start()
    found = problem.solve()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_solved(problem, found)
    assert peak < 8 * 1000**2 / 4


# --- the model of the subspace saddle method


def subspace_model(kind, n, k, seed, w=None):
    random = np.random.default_rng(seed)
    losses = random.exponential(size=n)
    slopes = random.normal(size=(n, k))
    root = random.normal(size=(k, k + 2))
    objective = build(kind, 0.3, losses, random.uniform(0.2, 1.0, n))
    weights = objective.prox(random.normal(size=n), objective.start(losses), 0.1)
    w = random.uniform(0.1, 1.0, n) * (random.random(n) < 0.8) if w is None else w
    return SubspaceModel(objective, losses, slopes, root @ root.T, weights, w)


def height(m, alpha, weights, damping):
    """m(α, l), from its definition."""
    bend = 0.5 * (1 + damping) * alpha @ m.curvature @ alpha
    held = 0.5 * np.sum(m.w**2 * (weights - m.weights) ** 2)
    return float(weights @ (m.losses + m.slopes @ alpha) + bend - m.objective.value(weights) - held)


def answer(m, weights, damping):
    """argmin_α m(α, l)."""
    return -np.linalg.solve((1 + damping) * m.curvature, m.slopes.T @ weights)


@every_kind
@pytest.mark.parametrize("seed", range(4))
def test_the_models_players_have_nothing_to_gain(kind, seed):
    m = subspace_model(kind, 8, 3, seed)
    random = np.random.default_rng(seed)
    damping = 0.25
    step = m.solve(damping, 1e-12)
    np.testing.assert_allclose(step.z, answer(m, step.weights, damping), atol=1e-5)
    assert height(m, step.z, step.weights, damping) == pytest.approx(step.value, rel=1e-10)
    for _ in range(20):
        other = m.objective.prox(random.normal(size=8), m.weights, 0.3)
        assert height(m, step.z, other, damping) <= step.value + 1e-10
        alpha = step.z + random.normal(size=3) * 10.0 ** random.uniform(-4, 0)
        assert height(m, alpha, step.weights, damping) >= step.value - 1e-10


@every_kind
def test_the_merit_lies_between_staying_and_moving_freely(kind):
    """⟨L, λ⟩ − ψ(λ) ≤ F_w(L) ≤ support(L), with equality for w = ∞ and w = 0."""
    m = subspace_model(kind, 6, 2, 0)
    losses = m.losses + 0.01 * np.arange(6)
    if kind == "Nash":
        losses = m.losses - 0.01 * np.arange(6)
    stay = float(losses @ m.weights) - m.objective.value(m.weights)
    free, held = (
        subspace_model(kind, 6, 2, 0, np.full(6, w)).merit(losses, 1e-12) for w in (0.0, 1e3)
    )
    assert stay - 1e-12 <= m.merit(losses, 1e-12) <= m.objective.support(losses) + 1e-12
    assert free == pytest.approx(m.objective.support(losses), rel=1e-9)
    assert held == pytest.approx(stay, abs=1e-5)


def test_a_model_with_flat_directions_is_solved():
    """Curvature of rank one, and none at all."""
    m = subspace_model("ChiSquare", 5, 3, 0)
    flat = SubspaceModel(
        m.objective, m.losses, m.slopes[:, :1] * np.ones(3), np.ones((3, 3)), m.weights, m.w
    )
    step = flat.solve(0.0, 1e-10)
    line = SubspaceModel(
        m.objective, m.losses, m.slopes[:, :1], np.ones((1, 1)), m.weights, m.w
    ).solve(0.0, 1e-10)
    assert step.value == pytest.approx(line.value, rel=1e-6)
    assert step.z.sum() == pytest.approx(float(line.z[0]), rel=1e-4)
    none = SubspaceModel(m.objective, m.losses, m.slopes[:, :0], np.empty((0, 0)), m.weights, m.w)
    assert none.solve(0.0, 1e-12).value == pytest.approx(none.merit(m.losses, 1e-12), rel=1e-12)


# --- the basis


@given(
    st.integers(1, 8),
    st.integers(0, 12),
    st.integers(1, 10),
    st.integers(0, 2**16),
    st.sampled_from([0, 1, 2, 3]),
)
@settings(deadline=None, max_examples=60)
def test_the_basis_is_orthonormal_and_spans_the_first_columns(d, count, most, seed, rank):
    random = np.random.default_rng(seed)
    columns = list(
        torch.from_numpy(random.normal(size=(count, d)) * 10.0 ** random.uniform(-8, 8, (count, 1)))
    )
    if rank:  # everything in the span of a few, and one of them missing
        columns = (
            [
                sum(
                    float(c) * b
                    for c, b in zip(random.normal(size=rank), columns[:rank], strict=False)
                )
                for _ in columns
            ]
            if len(columns) >= rank
            else columns
        )
    metric = torch.from_numpy(10.0 ** random.uniform(-3, 3, d))
    V = orthonormal(columns, metric, most)
    assert V.shape[0] == d
    sizes = np.linalg.svd(
        np.array([np.asarray(c / c.norm()) for c in columns]).reshape(count, d), compute_uv=False
    )
    assume(
        not np.any((sizes > 1e-10) & (sizes < 1e-3))
    )  # neither dependent nor clearly independent
    expected = int(np.count_nonzero(sizes > 1e-3))
    assert V.shape[1] == min(expected, most, d)
    np.testing.assert_allclose(V.mT @ (metric[:, None] * V), np.eye(V.shape[1]), atol=1e-12)
    if V.shape[1] == expected:
        for column in columns:  # nothing is left outside
            inside = V @ (V.mT @ (metric * column))
            assert float((metric.sqrt() * (column - inside)).norm()) <= 1e-5 * float(
                (metric.sqrt() * column).norm()
            )


def test_the_basis_of_long_columns():
    d = 2503
    random = np.random.default_rng(d)
    free = torch.from_numpy(random.normal(size=(6, d)))
    nothing = torch.full((d,), np.nan, dtype=torch.float64)
    columns = [free[0], 1e9 * free[0] - free[1], nothing, free[0] + free[1], *free[2:], free.sum(0)]
    metric = torch.from_numpy(10.0 ** random.uniform(-2, 2, d))
    V = orthonormal(columns, metric, 8)
    assert V.shape == (d, 6)
    np.testing.assert_allclose(V.mT @ (metric[:, None] * V), np.eye(6), atol=1e-13)
    inside = V @ (V.mT @ (metric[:, None] * free.mT))
    np.testing.assert_allclose(inside[:, 2:], free.mT[:, 2:], atol=1e-9)
    assert orthonormal([nothing], metric, 2).shape == (d, 0)


def test_a_capped_step_whose_level_is_far_from_the_quantile():
    """Held clients keep weight that the quantile counts on, so that ν lies at a larger loss: steps
    1e30 apart.
    """
    prior = np.array([0.134, 0.068, 0.027, 0.023, 0.166, 0.184, 0.129, 0.151, 0.118])
    objective = sp.CVaR(0.76, prior)
    losses = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 0.125, 0.0, 0.0, 1.0])
    for small in (1e-2, 1e-12, 1e-30):
        held = np.where(np.isin(np.arange(9), (2, 6)), 3.5, small)
        lam = objective.prox(losses, objective.prior, 1 / held)
        old = objective.prior
        v = losses - (lam - old) * held
        assert lam.sum() == pytest.approx(1, abs=1e-15)
        assert objective.support(v) == pytest.approx(float(v @ lam), abs=1e-15)


def test_what_one_mixture_needs_for_a_factor_is_not_added_to_the_next():
    H = np.stack([np.diag([1.0, -1e-6]), np.diag([1.0, 1e-6])])
    a = np.array([-10.0, 0.0])
    E = np.array([[0.0, 0.0], [1e-3, 1e-3]])
    found = [
        solve_quadratics(sp.Agnostic(), a, E, H, np.array(start), 0.0, 1e-12)
        for start in ([1.0, 0.0], [0.0, 1.0])
    ]
    assert found[0].value == pytest.approx(-0.5, abs=1e-6)
    assert found[0].value == pytest.approx(found[1].value)
