"""Minimax from sums: the optimum of methods that see everything, proven from sums alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.errors import InputError
from scaffpd.objectives import Excess

OBJECTIVES = {
    "chi": sp.ChiSquare(0.3),
    "capped": sp.ChiSquare(0.05, cap=0.4),
    "tilted": sp.Tilted(0.3, prior=[1, 2, 3, 4, 5]),
    "cvar": sp.CVaR(0.5),
    "agnostic": sp.Agnostic(),
    "average": sp.Average(),
    "excess": Excess(sp.ChiSquare(0.3), [0.1, 0.0, -0.2, 0.0, 0.1]),
}


def cohort(loss="logistic", dtype=torch.float64, seed=0):
    rng = np.random.default_rng(seed)
    data = []
    for m in (30, 44, 25, 60, 33):
        X = rng.normal(size=(m, 6)) + 0.5 * rng.normal(size=6)
        y = X @ rng.normal(size=6) + rng.normal(size=m)
        data.append((X, y if loss == "squared" else (y > 0).astype(int)))
    return sp.Cohort(data, sp.Linear(loss, l2=0.05), dtype=dtype)


def excess(objective, clients, x, best):
    """By how much x is above the best objective value known."""
    value = [
        objective.support(clients.losses(torch.as_tensor(one).to(clients.start())))
        for one in (x, best)
    ]
    return value[0] - value[1]


# A fifth more rounds than it takes, with logistic and with squared loss; a wrong direction takes
# half as many more.
MOST = {
    "chi": (7, 23),
    "capped": (14, 32),
    "tilted": (7, 23),
    "cvar": (28, 45),
    "agnostic": (22, 52),
    "average": (7, 7),
    "excess": (7, 23),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_optimum_is_that_of_an_open_run_and_the_proof_holds(name, loss):
    objective = OBJECTIVES[name]
    tol = 1e-5 if name in ("cvar", "agnostic") else 1e-7
    seen = []
    hidden = sp.SecureAggregation(
        cohort(loss), share=1.0, losses="hidden", record=lambda *what: seen.append(what)
    )
    rounds = MOST[name][loss == "squared"]
    result = sp.train(
        sp.fair(objective),
        hidden,
        rounds,
        tol=tol,
        callbacks=[lambda info: seen.append(info.state)],
    )
    best = sp.train(sp.MinimaxNewton(objective), cohort(loss), rounds=100, tol=1e-10).x
    assert result.status == "converged"
    off = excess(objective, cohort(loss), result.x, best)
    assert -1e-9 <= off <= result.certificate <= tol
    assert np.isnan(result.weights).all()
    states = [one for one in seen if not isinstance(one, tuple)]
    for state in states:  # every certificate on the way is true
        gap = excess(objective, cohort(loss), state.x, best)
        assert gap <= state.certificate * (1 + 1e-9) + 1e-12
    assert not any(np.isfinite(state.losses).any() for state in states)


def test_plain_sums_give_the_same_points():
    objective = sp.ChiSquare(0.3)
    plain = sp.train(sp.MinimaxSums(objective), cohort(), rounds=4)
    hidden = sp.train(
        sp.MinimaxSums(objective), sp.SecureAggregation(cohort(), losses="hidden"), rounds=4
    )
    np.testing.assert_allclose(plain.x, hidden.x, atol=1e-9)


def test_single_precision_is_proven_too():
    objective = sp.ChiSquare(0.3)
    hidden = sp.SecureAggregation(cohort(dtype=torch.float32), losses="hidden")
    result = sp.train(sp.fair(objective), hidden, rounds=60, tol=1e-4)
    best = sp.train(sp.MinimaxNewton(objective), cohort(), rounds=100, tol=1e-10).x
    assert result.status == "converged"
    assert (
        excess(objective, cohort(), result.x, best) <= result.certificate + 1e-6
    )  # the data are rounded, too


@pytest.mark.parametrize("name", ["chi", "cvar"])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, name):
    objective = OBJECTIVES[name]
    file = tmp_path / "run.npz"
    tol = 1e-5 if name == "cvar" else 1e-7
    whole = sp.train(
        sp.fair(objective), sp.SecureAggregation(cohort(), share=1.0, losses="hidden"), tol=tol
    )
    sp.train(
        sp.fair(objective),
        sp.SecureAggregation(cohort(), share=1.0, losses="hidden"),
        rounds=5,
        checkpoint=file,
    )
    again = sp.SecureAggregation(cohort(), share=1.0, losses="hidden")
    result = sp.train(sp.fair(objective), again, tol=tol, checkpoint=file)
    assert result.status == "converged"
    np.testing.assert_allclose(result.x, whole.x, atol=1e-3)


def test_a_centre_is_weights_over_their_sum():
    """Weights of a threshold that is off sum to S ≠ 1: the next Φ is that of a proximal step from
    λ/S.
    """
    objective = OBJECTIVES["cvar"]
    federation = cohort()
    method = sp.MinimaxSums(objective)
    state = method.init(federation, x0=torch.full((6,), 0.1, dtype=torch.float64))
    L = federation.losses(state.x)
    nu = state.nu - 0.12 * state.delta
    weights = np.clip(1 / 5 + (L - nu) / state.delta, 0, 1 / (0.5 * 5))
    off = method._answered(federation, replace(state, nu=nu))
    assert off.mass == pytest.approx(weights.sum())
    assert abs(off.mass - 1) > 0.1
    moved = method._centred(federation, replace(off, primal=0.0, dual=1e-3))
    centre = weights / weights.sum()
    wanted = objective.prox(L, centre, 1 / moved.delta)
    away = moved.delta / 2 * np.square(wanted - centre).sum()
    assert moved.value == pytest.approx(wanted @ L - away, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_remembered_pair_has_a_curvature_of_another_sign(dtype):
    """The loops of L-BFGS divide by ρ, summed in another order than `s @ y`: rounding must not
    choose its sign.
    """
    method = sp.MinimaxSums(sp.ChiSquare(0.3))
    seen = []
    sp.train(
        method, cohort(dtype=dtype), rounds=1, callbacks=[lambda info: seen.append(info.state)]
    )
    drawn = torch.Generator().manual_seed(0)
    nothing = torch.zeros(1, 33, dtype=dtype)
    state = replace(
        seen[-1], x=nothing[0], direction=nothing[0], moves=nothing[:0], changes=nothing[:0]
    )
    bends = replace(state, x=nothing[0] + 1, direction=nothing[0] + 1)
    assert len(method._with_pair(state, bends).moves) == 1
    kept = []
    for _ in range(300):
        s, y = torch.randn(2, 33, dtype=dtype, generator=drawn)
        y = y - s * (s @ y) / (s @ s)
        new = method._with_pair(state, replace(state, x=s, direction=y))
        kept += (new.moves * new.changes).sum(1).tolist()
    assert not kept


def test_three_clients_let_a_vector_into_one_sum_only():
    def three():
        return sp.SecureAggregation(
            sp.Cohort(_rows(3), sp.Linear("logistic", l2=0.05)), losses="hidden"
        )

    assert not three().sums.allows_reweighting
    assert sp.train(sp.fair(sp.ChiSquare(0.3)), three(), tol=1e-7).status == "converged"
    with pytest.raises(InputError, match="moves weights while x stands still"):
        sp.train(sp.fair(sp.CVaR(0.6)), three())


def _rows(n):
    rng = np.random.default_rng(1)
    data = []
    for k in range(n):
        X = rng.normal(size=(40, 3)) + 0.3 * k
        data.append((X, (X.sum(1) + rng.normal(size=40) > 0.3 * k).astype(int)))
    return data


def test_what_is_refused():
    with pytest.raises(InputError, match="find their own weights"):
        sp.MinimaxSums(sp.QFair(1.0))
    hidden = sp.SecureAggregation(cohort(), losses="hidden")
    with pytest.raises(InputError, match="Losses are hidden"):
        sp.train(sp.ScaffPD(sp.ChiSquare(0.3)), hidden, rounds=2)
    with pytest.raises(InputError, match="losses"):
        sp.SecureAggregation(cohort(), losses="secret")
    with pytest.raises(InputError, match="batch_size"):
        sp.train(sp.fair(sp.ChiSquare(0.3), batch_size=5), hidden, rounds=2)
