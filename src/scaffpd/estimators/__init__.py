"""scikit-learn estimators: `fit(X, y, clients=...)`, and everything else as scikit-learn has it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, softmax

from scaffpd.errors import InputError, not_installed, unknown

if find_spec("sklearn") is None:
    raise not_installed("scikit-learn", "sklearn")

from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from scaffpd.estimators.base import FairFederated
from scaffpd.estimators.rows import Array, Client, Data, Grouping, Labels
from scaffpd.estimators.survival import FairFederatedSurvival
from scaffpd.models.losses import loss_named
from scaffpd.tasks import TASKS, solving
from scaffpd.tasks.classification import Classification

__all__ = ["FairFederatedClassifier", "FairFederatedRegressor", "FairFederatedSurvival"]

REGRESSIONS = [loss for one in TASKS if not (one.labelled or one.timed) for loss in one.losses]


@dataclass(eq=False, repr=False, kw_only=True)
class FairFederatedClassifier(ClassifierMixin, FairFederated):  # type: ignore[misc]
    """Logistic (two classes) or softmax regression whose optimum is fair to the clients that own
    the rows.

    It solves min_x max_λ Σ λ_i f_i(x) − ψ(λ) with f_i the mean log-loss of client i plus a ridge on
    the coefficients, and proves how far from the optimum it is. With one client it is
    scikit-learn's `LogisticRegression` with C = 1/(l2 · rows).
    Weights of rows count among the rows of one client: f_i is a weighted mean, and how much a
    client counts is for the objective to say.

    Args:
        objective: (Λ, ψ), such as `Agnostic()`, or its name, such as "cvar"; `None` is
            `ChiSquare(rho=0.1)`, with personal models the mean over all rows. Its `prior` is in
            the order of `clients_`, which are sorted.
        l2: the ridge on all coefficients but the intercept, for columns as they are trained on;
            "auto" sets it by the evidence of the rows. `tol` needs l2 > 0.
        personal: give every client a model of its own near a shared one, as near as the evidence of
            the rows says, or a number κ (see `Personal`); `predict(X, clients=...)` uses them, and
            the shared one for other clients.
        fit_intercept: whether there is a constant term.
        standardise: scale every column to mean zero and deviation one, by sums over clients
            (without an intercept, to deviation one only).
        curves: give every column steps beside its line, at thresholds agreed on by sums over
            clients; see `Curves`. `coef_` is then of the columns that `curves_.names` names.
        pairs: with curves, the most pairs of columns that get products of steps, where evidence
            says that they act together.
        tol: stop when the optimality gap is proven to be at most this; `None` makes all rounds, and
            so does `epsilon`, because with noise nothing can be proven.
        max_rounds: the most communication rounds; `None` is 1000, and 30 with `epsilon`.
        algorithm: `None` is `fair(objective)`; else a function of the objective, such as `ScaffPD`.
        random_state: seeds algorithms that draw minibatches or clients.
        epsilon: differential privacy of every row: ε of all that the clients send in `fit`, counts
            for the thresholds of curves included.
            Standardised rows longer than 3 are shortened for it. Not covered: means and deviations
            of the columns, the labels there are, `client_scores_`, `client_losses_`, and whoever
            chooses settings by scores on the same rows.
        delta: its δ.
        clip: C, the largest norm of a row's gradient.
        noise_seed: of noise that can be repeated, for experiments; it protects nobody. `None` takes
            a secret of the operating system, whatever `random_state` is.

    Attributes:
        classes_: the labels, of all clients together.
        coef_: (1, features) for two classes, else (classes, features), in the units of X.
        intercept_: one number for each row of `coef_`.
        curves_: the `Curves` of the columns, or `None`.
        client_coef_: client → the same of its own model; empty without personal models.
        client_intercept_: likewise.
        clients_: the clients, sorted.
        client_weights_: client → λ, its weight in the worst mixture.
        client_losses_: client → f_i(x) on its training rows, regulariser included.
        client_scores_: client → accuracy on its training rows.
        certificate_: the optimality gap is proven to be at most this.
        privacy_: what has been spent, a `Spent`; `None` without `epsilon`.
        n_rounds_: rounds made (`n_iter_` is the same).
        history_: the table of all rounds.
        status_: how the run ended.
        result_: the `Result` of `train`; its x is in standardised units.
        n_features_in_: the number of columns.
        feature_names_in_: their names, where X had any.
    """

    def fit(self, X: Data, y: Data, clients: Data = None, sample_weight: Data = None) -> Self:
        """Train on rows X with labels y.

        `clients` says who owns each row (`None`: all are one client's), `sample_weight` what it
        counts for among the rows of its client.
        """
        X, y, group, shares = self._rows(X, y, clients, sample_weight)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        k = len(self.classes_)
        if k < 2:
            only = self.classes_.tolist()[0]
            raise InputError(
                "one-class",
                f"A classifier needs two classes, but there is only one class here: {only!r}.",
            )
        weights, self.intercept_ = self._train(X, labels, group, Classification(), k, shares)
        self.coef_ = np.ascontiguousarray(weights.T)
        self.client_scores_ = self._scores(y, self._labels(self._outputs(X, group)), group, shares)
        return self._finish()

    def decision_function(self, X: Data, clients: Data = None) -> Array:
        """Return the log-odds of the second class for two classes, else one score per class."""
        z = self._linear(X, clients)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict(self, X: Data, clients: Data = None) -> Labels:
        """Return the most probable class of every row; `clients` says whose models to use."""
        return self._labels(self._linear(X, clients))

    def predict_proba(self, X: Data, clients: Data = None) -> Array:
        """Return the probability of each class, in the order of `classes_`."""
        z = self._linear(X, clients)
        if z.shape[1] == 1:
            return np.column_stack([expit(-z), expit(z)])
        p: Array = softmax(z, axis=1)
        return p

    def predict_log_proba(self, X: Data, clients: Data = None) -> Array:
        """Return the logarithm of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X, clients))

    def score(
        self, X: Data, y: ArrayLike, sample_weight: Data = None, clients: Data = None
    ) -> float:
        """Return the accuracy over all rows; given `clients`, the mean over the fifth of them that
        is served worst.
        """
        self._check_scored(clients)
        if clients is None:
            return float(super().score(X, y, sample_weight))
        return self._worst_fifth(X, y, sample_weight, clients)

    def _scores(
        self, y: Labels, found: Labels, group: Grouping, weights: Array | None = None
    ) -> dict[Client, float]:
        return group.mapping(group.means((found == y).astype(np.float64), weights))

    def _labels(self, z: Array) -> Labels:
        chosen = (z[:, 0] > 0).astype(np.intp) if z.shape[1] == 1 else z.argmax(axis=1)
        labels: Labels = self.classes_[chosen]
        return labels


@dataclass(eq=False, repr=False, kw_only=True)
class FairFederatedRegressor(RegressorMixin, FairFederated):  # type: ignore[misc]
    """Ridge regression whose optimum is fair to the clients that own the rows.

    It solves min_x max_λ Σ λ_i f_i(x) − ψ(λ) with f_i the mean squared error of client i plus a
    ridge on the coefficients, and proves how far from the optimum it is. With one client it is
    scikit-learn's `Ridge` with alpha = l2 · rows / 2. Weights of rows count among the rows of one
    client: f_i is a weighted mean. Parameters and attributes are those of
    `FairFederatedClassifier`, without `classes_`, and with these:

    Args:
        standardise: scale every column and the target to mean zero and deviation one, by sums over
            clients (without an intercept, to deviation one only); losses, `tol` and the objective's
            parameters are then in units of the target's variance, else in its units squared.
        loss: "squared", or "poisson" for counts: their likelihood, with the mean log(1 + e^z) of a
            linear z. Columns are standardised, counts are not.

    Attributes:
        coef_: (features,), in the units of X and y.
        intercept_: a number.
        client_scores_: client → share of the variance explained on its training rows; see
            `score_by_client`.
    """

    loss: str = "squared"

    def fit(self, X: Data, y: Data, clients: Data = None, sample_weight: Data = None) -> Self:
        """Train on rows X with targets y; `clients` and `sample_weight` as for classifiers."""
        if self.loss not in REGRESSIONS:
            raise unknown("loss", self.loss, REGRESSIONS)
        X, y, group, shares = self._rows(X, y, clients, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        weights, intercept = self._train(X, y, group, solving(self.loss, False), 0, shares)
        self.coef_ = np.ascontiguousarray(weights[:, 0])
        self.intercept_ = float(intercept[0])
        self.client_scores_ = self._scores(y, self._mean(self._outputs(X, group)), group, shares)
        return self._finish()

    def _mean(self, z: Array) -> Array:
        mean: Array = loss_named(self.loss).mean(z)
        return mean

    def __sklearn_tags__(self) -> Any:
        """Expect poor scores with `epsilon`: noise may hide what there is to learn, most of all
        from few rows.
        """
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = self.epsilon is not None
        return tags

    def predict(self, X: Data, clients: Data = None) -> Array:
        """Return the expected target of every row; `clients` says whose models to use."""
        return self._mean(self._linear(X, clients))

    def score(
        self, X: Data, y: ArrayLike, sample_weight: Data = None, clients: Data = None
    ) -> float:
        """Return R² over all rows; given `clients`, the mean over the fifth of them that is served
        worst.
        """
        self._check_scored(clients)
        if clients is None:
            return float(super().score(X, y, sample_weight))
        return self._worst_fifth(X, y, sample_weight, clients)

    def _scores(
        self, y: Labels, found: Labels, group: Grouping, weights: Array | None = None
    ) -> dict[Client, float]:
        target = np.asarray(y, dtype=np.float64)
        errors = (np.asarray(found, dtype=np.float64) - target) ** 2
        mean = np.average(target, weights=weights)
        spread = float(np.average((target - mean) ** 2, weights=weights))
        # a constant target has no variance: its errors count as they are
        return group.mapping(1 - group.means(errors, weights) / (spread or 1.0))
