"""`joining_` of estimators: rows kept aside tell what joining brings, and the model is trained on all rows."""

import numpy as np
import pytest

import scaffpd as sp

pytest.importorskip("sklearn")


def rows(labels, rng=0):
    random = np.random.default_rng(rng)
    X = random.normal(size=(120, 4))
    clients = np.repeat(["a", "b", "c"], 40)
    z = X @ np.ones(4) + random.normal(size=120)
    return X, (z > 0 if labels else 5 * z + 3), clients


@pytest.mark.parametrize("labels", [False, True])
def test_rows_kept_aside_tell_what_joining_brings(labels):
    X, y, clients = rows(labels)
    kind = sp.FairFederatedClassifier if labels else sp.FairFederatedRegressor
    model = kind(held_out=0.5, random_state=1).fit(X, y, clients)
    found = model.joining_
    assert found.names == ("a", "b", "c")
    assert found.rows == ((20, 20),) * 3
    assert found.measure == ("accuracy" if labels else "rmse")
    assert found.recommendation in ("alone", "average", "fair", "personal")
    if not labels:  # errors are in units of y
        assert 3 < found.score[1].mean() < 12
    plain = kind().fit(X, y, clients)
    assert plain.joining_ is None
    np.testing.assert_array_equal(plain.coef_, model.coef_)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"held_out": 1.0}, "FairFederatedRegressor needs 0 <= held_out < 1, got 1.0."),
        (
            {"held_out": 0.5, "epsilon": 4.0},
            "held_out trains models without noise: leave it or epsilon out.",
        ),
        (
            {"choose": "mean", "epsilon": 4.0},
            "choose trains models without noise, which would cost ε: leave it or epsilon out.",
        ),
        ({"choose": "third"}, "Unknown measure 'third': choose one of 'mean', 'worst fifth'."),
        (
            {"choose": "mean", "algorithm": sp.ScaffPD(sp.Average())},
            "choose needs an objective that it may change: leave algorithm out, or pass a class.",
        ),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(sp.InputError) as refused:
        sp.FairFederatedRegressor(**arguments).fit(*rows(False))
    assert str(refused.value) == words


def test_strengths_are_chosen_by_folds():
    X, y, clients = rows(False)
    rng = np.random.default_rng(3)
    X = np.hstack([X, rng.normal(size=(120, 60))])  # columns that say nothing ask for a larger l2
    model = sp.FairFederatedRegressor(choose="mean", held_out=0.3, random_state=1).fit(
        X, y, clients
    )
    choice = model.choice_
    assert choice.l2 > 0.05
    assert isinstance(choice.objective, sp.ChiSquare)
    assert choice.rounds <= 300
    plain = sp.FairFederatedRegressor(choice.objective, l2=choice.l2, random_state=1).fit(
        X, y, clients
    )
    np.testing.assert_allclose(plain.coef_, model.coef_)
    assert plain.choice_ is None
    assert model.joining_.names == ("a", "b", "c")
    fixed = sp.FairFederatedRegressor(sp.CVaR(0.4), choose="worst fifth", random_state=1).fit(
        X, y, clients
    )
    assert fixed.choice_.objective.alpha == 0.4


def test_a_client_with_two_rows_is_refused():
    X, y, clients = rows(False)
    clients[:38] = "b"
    with pytest.raises(sp.InputError, match="Client 'a' has 2 rows: held_out needs at least 4"):
        sp.FairFederatedRegressor(held_out=0.5).fit(X, y, clients)
