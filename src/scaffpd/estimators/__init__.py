"""scikit-learn estimators: `fit(X, y, clients=...)`, and everything else as scikit-learn has it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, softmax

from scaffpd.errors import InputError, not_installed

if find_spec("sklearn") is None:
    raise not_installed("scikit-learn", "sklearn")

from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from scaffpd.estimators.base import Array, FairFederated, Grouping, dense, owners

__all__ = ["FairFederatedClassifier", "FairFederatedRegressor"]


class FairFederatedClassifier(ClassifierMixin, FairFederated):  # type: ignore[misc]
    """Logistic (two classes) or softmax regression whose optimum is fair to the clients that own the rows.

    It solves min_x max_λ Σ λ_i f_i(x) − ψ(λ) with f_i the mean log-loss of client i plus (l2/2)‖x‖², and proves how
    far from the optimum it is. With one client it is scikit-learn's `LogisticRegression` with C = 1/(l2 · rows), but
    for the intercept, which l2 shrinks as well. `sample_weight` is not supported in `fit`: clients are weighed.

    Args:
        objective: (Λ, ψ), such as `Agnostic()`, or its name, such as "cvar"; `None` is `ChiSquare(rho=0.1)`. Its
            `prior` is in the order of `clients_`, which are sorted. A search reaches its arguments: `objective__alpha`.
        l2: the regulariser, for columns as they are trained on; `tol` needs l2 > 0.
        fit_intercept: whether there is a constant term.
        standardise: scale every column to mean zero and deviation one, by sums over clients (without an intercept, to
            deviation one only).
        tol: stop when the optimality gap is proven to be at most this; `None` makes all rounds, and so does `epsilon`,
            because with noise nothing can be proven.
        max_rounds: the most communication rounds; `None` is 1000, and 30 with `epsilon`.
        algorithm: `None` is `fair(objective)`; else a function of the objective, such as `ScaffPD`, or a ready
            algorithm, which has its own objective.
        random_state: seeds algorithms that draw minibatches or clients.
        verbose: show a progress bar.
        epsilon: differential privacy of every row: ε of all that the clients send in `fit`. Standardised rows longer
            than 3 are shortened for it. Not covered: means and deviations of the columns, the labels there are,
            `client_scores_`, `client_losses_`, and whoever chooses settings by scores on the same rows.
        delta: its δ.
        clip: C, the largest norm of a row's gradient.
        noise_seed: of noise that can be repeated, for experiments; it protects nobody. `None` takes a secret of the
            operating system, whatever `random_state` is.
        held_out: a share of every client's rows, such as 0.3, to find out what joining brings, before the model is
            trained on all rows.
        choose: "mean" or "worst fifth": l2, whatever it is, and the strength of an objective that is given by its name,
            or not at all, are those with the lowest held-out loss by this measure, in three folds of every client's
            rows and at most 300 rounds.

    Attributes:
        classes_: the labels, of all clients together.
        coef_: (1, features) for two classes, else (classes, features), in the units of X.
        intercept_: one number for each row of `coef_`.
        clients_: the clients, sorted.
        client_weights_: client → λ, its weight in the worst mixture.
        client_losses_: client → f_i(x) on its training rows, regulariser included.
        client_scores_: client → accuracy on its training rows.
        certificate_: the optimality gap is proven to be at most this.
        privacy_: what has been spent, a `Spent`; `None` without `epsilon`.
        joining_: a `Joining`: alone, one average or fair model, or a personal one, client by client; `None` without
            `held_out`.
        choice_: a `Choice`, all points that were tried; `None` without `choose`.
        n_rounds_: rounds made (`n_iter_` is the same).
        history_: the table of all rounds.
        status_: how the run ended.
        result_: the `Result` of `train`; its x is in standardised units.
        n_features_in_: the number of columns.
        feature_names_in_: their names, where X had any.
    """

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train on rows X with labels y; `clients` says who owns each row (`None`: all are one client's)."""
        X, y = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr")
        check_classification_targets(y)
        X, group = dense(X), owners(self, clients, X.shape[0])
        self.classes_, labels = np.unique(y, return_inverse=True)
        k = len(self.classes_)
        if k < 2:
            only = self.classes_.tolist()[0]
            raise InputError(f"A classifier needs at least two classes, but there is only one class here: {only!r}.")
        loss, classes = ("logistic", None) if k == 2 else ("softmax", k)
        weights, self.intercept_ = self._train(X, labels, group, loss, classes)
        self.coef_ = np.ascontiguousarray(weights.T)
        self.client_scores_ = self._scores(y, self._labels(X @ weights + self.intercept_), group)
        return self._finish()

    def decision_function(self, X: Any) -> Array:
        """Log-odds of the second class for two classes, else one score per class."""
        z = self._linear(X)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of every row."""
        return self._labels(self._linear(X))

    def predict_proba(self, X: Any) -> Array:
        """The probability of every class, in the order of `classes_`."""
        z = self._linear(X)
        p: Array = np.column_stack([expit(-z), expit(z)]) if z.shape[1] == 1 else softmax(z, axis=1)
        return p

    def predict_log_proba(self, X: Any) -> Array:
        """Its logarithm."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def score(self, X: Any, y: ArrayLike, sample_weight: Any = None, clients: Any = None) -> float:
        """Accuracy over all rows; given `clients`, the mean over the fifth of them that is served worst."""
        if clients is None:
            return float(super().score(X, y, sample_weight))
        return self._worst_fifth(X, y, sample_weight, clients)

    def _scores(self, y: NDArray[Any], found: NDArray[Any], group: Grouping) -> dict[Any, float]:
        return group.mapping(group.means(found == y))

    def _labels(self, z: Array) -> NDArray[Any]:
        chosen = (z[:, 0] > 0).astype(np.intp) if z.shape[1] == 1 else z.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels


class FairFederatedRegressor(RegressorMixin, FairFederated):  # type: ignore[misc]
    """Ridge regression whose optimum is fair to the clients that own the rows.

    It solves min_x max_λ Σ λ_i f_i(x) − ψ(λ) with f_i the mean squared error of client i plus (l2/2)‖x‖², and proves
    how far from the optimum it is. With one client it is scikit-learn's `Ridge` with alpha = l2 · rows / 2.
    `sample_weight` is not supported in `fit`: clients are weighed.

    Args:
        objective: (Λ, ψ), such as `Agnostic()`, or its name, such as "cvar"; `None` is `ChiSquare(rho=0.1)`. Its
            `prior` is in the order of `clients_`, which are sorted. A search reaches its arguments: `objective__alpha`.
        l2: the regulariser, for columns as they are trained on; `tol` needs l2 > 0.
        fit_intercept: whether there is a constant term.
        standardise: scale every column and the target to mean zero and deviation one, by sums over clients (without an
            intercept, to deviation one only); losses, `tol` and the objective's parameters are then in units of the
            target's variance, else in its units squared.
        tol: stop when the optimality gap is proven to be at most this; `None` makes all rounds, and so does `epsilon`,
            because with noise nothing can be proven.
        max_rounds: the most communication rounds; `None` is 1000, and 30 with `epsilon`.
        algorithm: `None` is `fair(objective)`; else a function of the objective, such as `ScaffPD`, or a ready
            algorithm, which has its own objective.
        random_state: seeds algorithms that draw minibatches or clients.
        verbose: show a progress bar.
        epsilon: differential privacy of every row: ε of all that the clients send in `fit`. Standardised rows longer
            than 3 are shortened for it. Not covered: means and deviations of the columns, the labels there are,
            `client_scores_`, `client_losses_`, and whoever chooses settings by scores on the same rows.
        delta: its δ.
        clip: C, the largest norm of a row's gradient.
        noise_seed: of noise that can be repeated, for experiments; it protects nobody. `None` takes a secret of the
            operating system, whatever `random_state` is.
        held_out: a share of every client's rows, such as 0.3, to find out what joining brings, before the model is
            trained on all rows.
        choose: "mean" or "worst fifth": l2, whatever it is, and the strength of an objective that is given by its name,
            or not at all, are those with the lowest held-out loss by this measure, in three folds of every client's
            rows and at most 300 rounds.

    Attributes:
        coef_: (features,), in the units of X and y.
        intercept_: a number.
        clients_: the clients, sorted.
        client_weights_: client → λ, its weight in the worst mixture.
        client_losses_: client → f_i(x) on its training rows, regulariser included.
        client_scores_: client → share of the variance explained on its training rows; see `score_by_client`.
        certificate_: the optimality gap is proven to be at most this.
        privacy_: what has been spent, a `Spent`; `None` without `epsilon`.
        joining_: a `Joining`: alone, one average or fair model, or a personal one, client by client; `None` without
            `held_out`.
        choice_: a `Choice`, all points that were tried; `None` without `choose`.
        n_rounds_: rounds made (`n_iter_` is the same).
        history_: the table of all rounds.
        status_: how the run ended.
        result_: the `Result` of `train`; its x is in standardised units.
        n_features_in_: the number of columns.
        feature_names_in_: their names, where X had any.
    """

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train on rows X with targets y; `clients` says who owns each row (`None`: all are one client's)."""
        X, y = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr", y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        X, group = dense(X), owners(self, clients, X.shape[0])
        weights, intercept = self._train(X, y, group, "squared", None)
        self.coef_, self.intercept_ = np.ascontiguousarray(weights[:, 0]), float(intercept[0])
        self.client_scores_ = self._scores(y, X @ self.coef_ + self.intercept_, group)
        return self._finish()

    def __sklearn_tags__(self) -> Any:
        """Noise may hide what there is to learn, most of all from few rows."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = self.epsilon is not None
        return tags

    def predict(self, X: Any) -> Array:
        """The expected target of every row."""
        return self._linear(X)

    def score(self, X: Any, y: ArrayLike, sample_weight: Any = None, clients: Any = None) -> float:
        """R² over all rows; given `clients`, the mean over the fifth of them that is served worst."""
        if clients is None:
            return float(super().score(X, y, sample_weight))
        return self._worst_fifth(X, y, sample_weight, clients)

    def _scores(self, y: NDArray[Any], found: NDArray[Any], group: Grouping) -> dict[Any, float]:
        y = y.astype(np.float64)
        return group.mapping(1 - group.means((found - y) ** 2) / (y.var() or 1.0))  # 1 as for a constant column
