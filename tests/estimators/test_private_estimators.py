"""Estimators with `epsilon` fit privately, say what was spent, and are otherwise scikit-learn's."""

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.estimators.base import Scale

pytestmark = pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")


def table(n=600):
    random = np.random.default_rng(2)
    X = random.normal(size=(n, 3)) * [1.0, 5.0, 0.2] + [0.0, 3.0, 1.0]
    clients = np.array(list("abc"))[np.arange(n) % 3]
    signal = X[:, 0] + (X[:, 1] - 3) / 5
    return X, signal + 0.3 * random.normal(size=n), clients


X, Y, CLIENTS = table()
LABELS = np.where(Y > 0, "ill", "well")


def test_a_private_classifier_is_of_use_and_says_what_was_spent():
    model = sp.FairFederatedClassifier(epsilon=4, noise_seed=1).fit(X, LABELS, clients=CLIENTS)
    assert model.privacy_.names == ("a", "b", "c")
    assert 3.99 < model.privacy_.worst <= 4
    assert model.n_rounds_ == 30
    assert model.certificate_ == np.inf
    assert model.score(X, LABELS) > 0.85


def test_a_private_regressor_is_of_use():
    model = sp.FairFederatedRegressor(epsilon=4, delta=1e-6, noise_seed=1).fit(
        X, Y, clients=CLIENTS
    )
    assert model.privacy_.worst <= 4
    assert model.privacy_.delta == 1e-6
    assert model.score(X, Y) > 0.5


def test_it_is_the_library_by_hand():
    model = sp.FairFederatedClassifier(epsilon=2, clip=0.5, max_rounds=5, noise_seed=9).fit(
        X, LABELS, clients=CLIENTS
    )
    scale = Scale.of([X[c == CLIENTS] for c in "abc"], True, "Column")
    pairs = [(scale(X[c == CLIENTS]), (LABELS[c == CLIENTS] == "well").astype(int)) for c in "abc"]
    method = sp.fair(sp.ChiSquare(0.1), local_steps=1)
    linear = sp.Linear("logistic", [0.1] * X.shape[1] + [1e-3], intercept=True)
    private = sp.Private.solved(linear, 2, method, 5, clip=0.5, radius=3.0, secret=9)
    by_hand = sp.train(method, sp.Cohort(pairs, private, list("abc")), rounds=5)
    assert np.array_equal(model.result_.x, by_hand.x)
    assert model.privacy_.worst == by_hand.privacy.worst <= 2


def test_noise_is_the_operating_systems_unless_it_has_a_seed():
    def fitted(**settings):
        return (
            sp.FairFederatedClassifier(epsilon=1, max_rounds=3, random_state=0, **settings)
            .fit(X, LABELS)
            .coef_
        )

    assert np.array_equal(fitted(noise_seed=5), fitted(noise_seed=5))
    assert not np.array_equal(fitted(noise_seed=5), fitted(noise_seed=6))
    assert not np.array_equal(fitted(), fitted())  # also with the same random_state


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epsilon": 0}, "FairFederatedClassifier needs epsilon > 0"),
        ({"epsilon": "4"}, "needs a number for epsilon"),
        ({"epsilon": 1, "delta": 2}, "0 < delta < 1"),
        ({"epsilon": 1, "clip": 0}, "clip > 0"),
        ({"epsilon": 1, "noise_seed": -1}, "a whole number >= 0 for experiments"),
        ({"epsilon": 1, "algorithm": sp.SubspaceSaddle}, "is not known beforehand"),
        ({"epsilon": 1, "algorithm": lambda _: sp.FedAvg(batch_size=9)}, "leave batch_size out"),
    ],
)
def test_what_cannot_be_private_is_refused(settings, sentence):
    with pytest.raises(sp.InputError, match=sentence):
        sp.FairFederatedClassifier(**settings).fit(X, LABELS, clients=CLIENTS)


@pytest.mark.parametrize("estimator", [sp.FairFederatedClassifier, sp.FairFederatedRegressor])
def test_weights_of_rows_are_refused_in_private(estimator):
    with pytest.raises(sp.InputError, match="neither weighted rows"):
        estimator(epsilon=4).fit(
            X, LABELS[0] == LABELS, clients=CLIENTS, sample_weight=np.arange(len(X))
        )
