"""Excess losses: the objective of f_i − b_i, in every operation, with its certificate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from objective_cases import ALL, build

import scaffpd as sp
from cases.reference import reference_optimum
from scaffpd.objectives.excess import IDLE, equilibrium
from scaffpd.run.settings.reading import objective_of

LOSSES = np.array([0.9, 0.4, 1.3, 0.7])
B = np.array([0.5, 0.1, 1.1, 0.2])


@pytest.mark.parametrize("kind", ALL)
def test_operations_are_those_of_the_shifted_losses(kind):
    plain = build(kind, 0.4, LOSSES - B, None)
    excess = sp.Excess(plain, B)
    old = plain.start(LOSSES - B)
    assert excess.simplex == plain.simplex
    for sigma in (0.3, np.array([0.1, 1.0, 0.5, 2.0])):
        step = excess.prox(LOSSES, old, sigma)
        np.testing.assert_allclose(step, plain.prox(LOSSES - B, old, sigma))
        np.testing.assert_allclose(
            excess.prox_jacobian(LOSSES, old, sigma), plain.prox_jacobian(LOSSES - B, old, sigma)
        )
        random = np.random.default_rng(0)

        def goal(w, sigma=sigma):
            return excess.value(w) - LOSSES @ w + np.sum((w - old) ** 2 / (2 * sigma))

        for _ in range(50):  # from the definition: no other λ ∈ Λ does better
            other = plain.prox(random.normal(size=4), step, 0.1)
            assert goal(step) <= goal(other) + 1e-12
    best = excess.maximizer(LOSSES)
    assert excess.support(LOSSES) == pytest.approx(LOSSES @ best - excess.value(best))
    assert excess.support(LOSSES) == pytest.approx(plain.support(LOSSES - B))
    assert excess.contains(best)
    assert excess.strong_convexity(4) == plain.strong_convexity(4)
    assert excess.curvature(best) == plain.curvature(best)
    np.testing.assert_array_equal(excess.weights(4), plain.weights(4))
    np.testing.assert_allclose(excess.start(LOSSES), old)


def clients(loss):
    random = np.random.default_rng(7)
    pairs = []
    for n, noise in ((30, 0.1), (12, 2.0), (20, 0.5)):
        X = random.normal(size=(n, 3))
        z = X @ random.normal(size=3) + noise * random.normal(size=n)
        pairs.append((X, z if loss == "squared" else (z > 0).astype(int)))
    return pairs


@pytest.mark.cover(1)
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("kind", ALL)
def test_the_proven_gap_covers_the_true_one(kind, loss):
    pairs = clients(loss)
    cohort = sp.Cohort(pairs, sp.Linear(loss, l2=0.05))
    own = np.array([reference_optimum([pair], loss, 0.05, sp.Average()).value for pair in pairs])
    np.testing.assert_allclose(cohort.optima(), own, rtol=1e-10)
    start = cohort.losses(cohort.start()) - own
    objective = build(kind, 0.4, start, None)
    result = sp.train(sp.fair(sp.Excess(objective, "own")), cohort, tol=1e-9, rounds=300)
    numbers = sp.Excess(objective, own)
    best = reference_optimum(pairs, loss, 0.05, numbers)
    excess = numbers.support(cohort.losses(torch.as_tensor(result.x))) - best.value
    assert result.status == "converged"
    assert excess <= result.certificate + best.gap
    assert abs(excess) <= 2e-9
    few = sp.train(sp.ScaffPD(numbers, local_steps=2), cohort, rounds=2)
    assert (
        numbers.support(cohort.losses(torch.as_tensor(few.x))) - best.value
        <= few.certificate + best.gap
    )


def test_regret_looks_at_what_a_client_could_have():
    """By losses the noisiest client counts most; by regret the one that could have had nearly no loss counts too."""
    cohort = sp.Cohort(clients("squared"), sp.Linear("squared", l2=0.05))
    raw = sp.train(sp.fair(sp.Agnostic()), cohort, tol=1e-9)
    regret = sp.train(sp.fair(sp.Excess(sp.Agnostic(), "own")), cohort, tol=1e-9)
    assert raw.weights[0] == 0 < regret.weights[0]
    assert raw.weights[1] > regret.weights[1]
    worst = [(cohort.evaluate(r.x).loss - cohort.optima()).max() for r in (raw, regret)]
    assert worst[1] < 0.8 * worst[0]


def test_own_optima_of_personal_models():
    pairs = clients("squared")
    plain = sp.Cohort(pairs, sp.Linear("squared", l2=0.05))
    np.testing.assert_allclose(
        sp.Cohort(pairs, sp.Personal(sp.Linear("squared", l2=0.05), 3.0)).optima(), plain.optima()
    )


def test_a_settings_file_names_an_offset(tmp_path):
    made = objective_of({"kind": "CVaR", "alpha": 0.5, "offset": [0.1, 0.2]}, tmp_path / "run.toml")
    assert isinstance(made, sp.Excess)
    assert made.support([1.1, 0.3]) == pytest.approx(sp.CVaR(0.5).support([1.0, 0.1]))
    assert (
        objective_of({"kind": "CVaR", "alpha": 0.5, "offset": "own"}, tmp_path / "run.toml").offset
        == "own"
    )


def aside(loss):
    """Other rows of the same clients, harder for the first."""
    random = np.random.default_rng(11)
    pairs = zip((1.5, 0.2, 0.2), clients(loss), strict=True)
    return [(X + shift * random.normal(size=X.shape), y) for shift, (X, y) in pairs]


@pytest.mark.cover(1)
@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("objective", [sp.ChiSquare(0.3), sp.CVaR(0.6), sp.Tilted(0.5)], ids=repr)
def test_weights_answer_held_out_losses(objective, loss):
    cohort = sp.Cohort(clients(loss), sp.Linear(loss, l2=0.05), test=aside(loss))
    plain = sp.train(sp.fair(objective), cohort, tol=1e-9)
    found = sp.train(sp.fair(sp.Excess(objective, "held-out")), cohort, tol=1e-7)
    h = cohort.evaluate(found.x, "test").loss
    assert (
        objective.support(h) - h @ found.weights + objective.value(found.weights) <= 1e-7
    )  # nobody has a better λ
    best = reference_optimum(
        clients(loss), loss, 0.05, sp.Average(prior=np.maximum(found.weights, 1e-12))
    )
    value = found.weights @ cohort.evaluate(found.x).loss
    assert (
        -1e-9 <= value - best.value <= found.certificate + best.gap + 1e-9
    )  # and nobody a better x for this λ
    assert np.abs(found.weights - plain.weights).max() > 1e-3
    assert "answers held-out losses" in found.message


def test_held_out_rows_that_are_the_training_rows_change_nothing():
    cohort = sp.Cohort(clients("squared"), sp.Linear("squared", l2=0.05), test=clients("squared"))
    for method in (sp.fair, lambda o: sp.ScaffPD(o, local_steps=5)):
        plain, same = (
            sp.train(method(o), cohort, tol=1e-7)
            for o in (sp.ChiSquare(0.3), sp.Excess(sp.ChiSquare(0.3), "held-out"))
        )
        np.testing.assert_allclose(same.x, plain.x, atol=1e-3)
        assert same.status == plain.status == "converged"
    straight = sp.train(sp.fair(sp.ChiSquare(0.3)), cohort, tol=1e-8)
    turned = sp.train(sp.fair(sp.Excess(sp.ChiSquare(0.3), "held-out")), cohort, tol=1e-7)
    np.testing.assert_array_equal(
        turned.x, straight.x
    )  # one run, to a tenth of tol, with levels of zero
    assert "after 1 run" in turned.message


def test_turns_that_bring_nothing_end():
    asked = []

    def deaf(goal):
        asked.append(goal)
        return len(asked), np.full(4, 0.25), LOSSES, B

    model, gain, turns = equilibrium(sp.ChiSquare(0.1), 4, deaf, 1e-6)
    assert (model, turns, len(asked)) == (1, 1 + IDLE, 1 + IDLE)
    assert gain == pytest.approx(sp.ChiSquare(0.1).support(B) - B.mean())
    cohort = sp.Cohort(clients("logistic"), sp.Linear("logistic", l2=0.05), test=aside("logistic"))
    method = sp.ScaffPD(sp.Excess(sp.ChiSquare(0.1), "held-out"))
    assert sp.train(method, cohort, callbacks=[lambda info: info.rounds >= 2]).status == "stopped"


def test_rounds_of_all_runs_are_counted():
    cohort = sp.Cohort(clients("logistic"), sp.Linear("logistic", l2=0.05), test=aside("logistic"))
    method = sp.fair(sp.Excess(sp.ChiSquare(0.3), "held-out"))
    made = []
    found = sp.train(method, cohort, tol=1e-7, callbacks=[made.append])
    assert found.rounds == len(made) > len(found.history) - 1
    assert f"runs, {len(made)} rounds in all" in found.message
    again = []
    most = len(made) - 1
    stopped = sp.train(
        method, cohort, tol=1e-7, callbacks=[lambda info: again.append(info) or len(again) >= most]
    )
    assert (stopped.status, stopped.rounds) == ("stopped", most)


def test_an_estimator_refits_all_rows_with_the_weights_that_were_found():
    pairs = clients("squared")
    X, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    who = np.repeat([0, 1, 2], [len(y) for _, y in pairs])
    fitted = sp.FairFederatedRegressor(
        sp.Excess(sp.ChiSquare(0.3), "held-out"), random_state=0, standardise=False, l2=0.05
    ).fit(X, y, clients=who)
    weights = np.array(list(fitted.client_weights_.values()))
    same = sp.FairFederatedRegressor(sp.Average(prior=weights), standardise=False, l2=0.05).fit(
        X, y, clients=who
    )
    np.testing.assert_allclose(fitted.coef_, same.coef_, atol=1e-3)
    assert fitted.certificate_ <= 1e-6
    assert "another would gain at most" in fitted.result_.message
    assert (
        fitted.n_rounds_ == fitted.result_.rounds > len(fitted.history_) - 1
    )  # those for the weights count too
    other = sp.FairFederatedRegressor(sp.ChiSquare(0.3), standardise=False, l2=0.05).fit(
        X, y, clients=who
    )
    assert np.abs(weights - np.array(list(other.client_weights_.values()))).max() > 1e-3


LOGISTIC = sp.Cohort(clients("logistic"), sp.Linear("logistic", l2=0.0))
NETWORK = sp.Cohort(clients("softmax"), sp.Module(torch.nn.Linear(3, 2)), dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: sp.Excess(sp.CVaR(0.5), "mine"), "or 'own'"),
        (lambda: sp.Excess(sp.CVaR(0.5), [0.1, np.nan]), "finite offset"),
        (lambda: sp.Excess("CVaR", 0.0), "needs an objective"),
        (lambda: sp.Excess(sp.Excess(sp.CVaR(0.5), 0.0), 0.0), "needs an objective"),
        (
            lambda: sp.Excess(sp.CVaR(0.5), [0.1, 0.2]).support([1.0, 2.0, 3.0]),
            "for 2 clients, but there are 3",
        ),
        (lambda: sp.Excess(sp.CVaR(0.5), "own").support([1.0, 2.0]), "before `train`"),
        (lambda: LOGISTIC.optima(), "l2 > 0"),
        (
            lambda: sp.train(sp.fair(sp.Excess(sp.CVaR(0.5), "held-out")), LOGISTIC),
            "rows that are kept aside",
        ),
        (
            lambda: sp.train(
                sp.fair(sp.Excess(sp.CVaR(0.5), "held-out")), sp.SecureAggregation(LOGISTIC)
            ),
            "in this proc",
        ),
        (
            lambda: sp.train(
                sp.fair(sp.Excess(sp.CVaR(0.5), "held-out")), LOGISTIC, checkpoint="a.ckpt"
            ),
            "leave checkpoint",
        ),
        (
            lambda: objective_of(
                {"kind": "CVaR", "alpha": 0.5, "offset": "held-out"}, Path("run.toml")
            ),
            "in Python",
        ),
        (lambda: NETWORK.optima(), "known for Linear models"),
    ],
)
def test_refusals_are_one_sentence(make, match):
    with pytest.raises(sp.InputError, match=match) as error:
        make()
    assert str(error.value).rstrip(".").count(". ") == 0
