"""scikit-learn estimators: `fit(X, y, clients=...)`, and everything else as scikit-learn has it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, softmax

from scaffpd.errors import InputError, not_installed, unknown

if find_spec("sklearn") is None:
    raise not_installed("scikit-learn", "sklearn")

from sklearn.base import ClassifierMixin, RegressorMixin, clone
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets

from scaffpd.data.silos import enough_rows, fold_numbers
from scaffpd.estimators.base import Array, FairFederated, Grouping, grouping, row_weights
from scaffpd.models.losses import loss_named
from scaffpd.study.folds import FOLDS

__all__ = ["FairFederatedClassifier", "FairFederatedRegressor"]

CALIBRATIONS = ("sigmoid", "isotonic")
ENOUGH = 25  # rows of every class by which a client's probabilities are corrected by themselves
REGRESSIONS = ("squared", "poisson")


def _sigmoid(model: Any, z: Array) -> Array:
    p: Array = model.predict_proba(z[:, None])[:, 1]
    return p


@dataclass(eq=False, repr=False, kw_only=True)
class FairFederatedClassifier(ClassifierMixin, FairFederated):  # type: ignore[misc]
    """Logistic (two classes) or softmax regression whose optimum is fair to the clients that own the rows.

    It solves min_x max_λ Σ λ_i f_i(x) − ψ(λ) with f_i the mean log-loss of client i plus (l2/2)‖x‖², and proves how
    far from the optimum it is. With one client it is scikit-learn's `LogisticRegression` with C = 1/(l2 · rows), but
    for the intercept, which l2 shrinks as well. Weights of rows count among the rows of one client: f_i is a weighted
    mean, and how much a client counts is for the objective to say.

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
        class_weight: what rows count for by their class, as {class: weight}, or "balanced": n/(k n_c), with the numbers
            of rows of all clients together, so that a row of a class counts for the same at every client.
        calibrate: "sigmoid" or "isotonic" corrects `predict_proba` by scores of rows that models have not seen, in
            three folds of every client's rows: for all clients, and, where a client has 25 rows of every class, for it
            alone, which `predict_proba(X, clients=...)` then takes.

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

    class_weight: dict[Any, float] | str | None = None
    calibrate: str | None = None

    def fit(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> Self:
        """Train on rows X with labels y.

        `clients` says who owns each row (`None`: all are one client's), `sample_weight` what it counts for among the
        rows of its client.
        """
        X, y, group, weights_of_rows = self._rows(X, y, clients, sample_weight)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        k = len(self.classes_)
        if k < 2:
            only = self.classes_.tolist()[0]
            raise InputError(
                "classifier-least-two",
                f"A classifier needs at least two classes, but there is only one class here: {only!r}.",
            )
        loss, classes = ("logistic", None) if k == 2 else ("softmax", k)
        shares = self._class_shares(labels, weights_of_rows)
        if shares is not None:  # rows that count for nothing are not there
            there = shares > 0
            X = X[there]
            y = y[there]
            labels = labels[there]
            shares = shares[there]
            group = group.only(there)
        self.calibrators_ = self._calibrators(X, labels, group, loss, classes, shares)
        weights, self.intercept_ = self._train(X, labels, group, loss, classes, shares)
        self.coef_ = np.ascontiguousarray(weights.T)
        self.client_scores_ = self._scores(
            y, self._labels(X @ weights + self.intercept_), group, shares
        )
        return self._finish()

    def _class_shares(self, labels: NDArray[np.intp], shares: Array | None) -> Array | None:
        """Return the weights of rows, times those of their classes."""
        if self.class_weight is None:
            return shares
        rows = np.ones(len(labels)) if shares is None else shares
        if isinstance(self.class_weight, str):
            if self.class_weight != "balanced":
                raise unknown("class_weight", self.class_weight, ("balanced",))
            counts = np.bincount(labels, rows, len(self.classes_))
            factors = np.divide(
                rows.sum() / len(counts), counts, out=np.zeros(len(counts)), where=counts > 0
            )
        else:
            given = dict(self.class_weight)
            if strange := [label for label in given if label not in self.classes_.tolist()]:
                raise InputError(
                    "class-weight-weight",
                    f"class_weight has a weight for {strange[0]!r}, which is none of the classes in y.",
                )
            factors = np.array([float(given.get(label, 1.0)) for label in self.classes_.tolist()])
        return row_weights(
            rows * factors[labels], labels[:, None], Grouping(np.array(["all"]), 0 * labels)
        )

    def _calibrators(
        self,
        X: Array,
        labels: NDArray[np.intp],
        group: Grouping,
        loss: str,
        classes: int | None,
        shares: Array | None,
    ) -> dict[Any, list[Any]]:
        """Learn from rows that a model has not seen what its scores are worth: of all clients, and of each by itself.

        Every client's rows are cut into folds; the scores of a fold are those of a model of the others.
        """
        if self.calibrate is None:
            return {}
        if self.calibrate not in CALIBRATIONS:
            raise unknown("calibrate", self.calibrate, CALIBRATIONS)
        if self.epsilon is not None:
            raise InputError(
                "calibrate-trains-models",
                "calibrate trains models without noise, which would cost ε: leave it or epsilon out.",
            )
        number = np.empty(len(labels), dtype=np.int64)
        scores = np.empty((len(labels), classes or 1))
        for k, name in enumerate(group.names):
            own = group.owner == k
            enough_rows(f"Client {name!r}", int(own.sum()), FOLDS)
            number[own] = fold_numbers(name, labels[own], FOLDS, 0)
        for fold in range(FOLDS):
            out = number == fold
            quiet = clone(self).set_params(calibrate=None, held_out=0.0)
            quiet.classes_ = self.classes_
            part = None if shares is None else shares[~out]
            weights, offset = quiet._train(
                X[~out], labels[~out], group.only(~out), loss, classes, part
            )
            scores[out] = X[out] @ weights + offset
        made = {None: self._calibrated(scores, labels, shares)}
        for k, client in enumerate(group.clients.tolist()):
            own = group.owner == k
            if np.bincount(labels[own], minlength=len(self.classes_)).min() >= ENOUGH:
                made[client] = self._calibrated(
                    scores[own], labels[own], None if shares is None else shares[own]
                )
        return made

    def _calibrated(
        self, scores: Array, labels: NDArray[np.intp], shares: Array | None
    ) -> list[Any]:
        """Fit one function of the score for every class, or for the second one of two."""
        columns = (
            [labels == 1] if scores.shape[1] == 1 else [labels == k for k in range(scores.shape[1])]
        )
        made = []
        for z, hit in zip(scores.T, columns, strict=True):
            if self.calibrate == "isotonic":
                made.append(
                    IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
                    .fit(z, hit, shares)
                    .predict
                )
            else:
                made.append(
                    partial(_sigmoid, LogisticRegression(C=1e4).fit(z[:, None], hit, shares))
                )
        return made

    def decision_function(self, X: Any) -> Array:
        """Return the log-odds of the second class for two classes, else one score per class."""
        z = self._linear(X)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of every row."""
        if not getattr(self, "calibrators_", None):
            return self._labels(self._linear(X))
        labels: NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return labels

    def predict_proba(self, X: Any, clients: Any = None) -> Array:
        """Return the probability of each class, in the order of `classes_`; with `calibrate`, by every row's client."""
        z = self._linear(X)
        if not self.calibrators_:
            p: Array = (
                np.column_stack([expit(-z), expit(z)]) if z.shape[1] == 1 else softmax(z, axis=1)
            )
            return p
        group = grouping(clients, len(z))
        out = np.empty((len(z), len(self.classes_)))
        for k, client in enumerate(group.clients.tolist()):
            made = self.calibrators_.get(
                client if clients is not None else None, self.calibrators_[None]
            )
            own = group.owner == k
            q = np.column_stack([f(column) for f, column in zip(made, z[own].T, strict=True)])
            q = np.column_stack([1 - q, q]) if q.shape[1] == 1 else q + 1e-12
            out[own] = q / q.sum(1, keepdims=True)
        return out

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def score(self, X: Any, y: ArrayLike, sample_weight: Any = None, clients: Any = None) -> float:
        """Return the accuracy over all rows; given `clients`, the mean over the fifth of them that is served worst."""
        if clients is None:
            return float(super().score(X, y, sample_weight))
        return self._worst_fifth(X, y, sample_weight, clients)

    def _scores(
        self, y: NDArray[Any], found: NDArray[Any], group: Grouping, weights: Array | None = None
    ) -> dict[Any, float]:
        return group.mapping(group.means(found == y, weights))

    def _labels(self, z: Array) -> NDArray[Any]:
        chosen = (z[:, 0] > 0).astype(np.intp) if z.shape[1] == 1 else z.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels


@dataclass(eq=False, repr=False, kw_only=True)
class FairFederatedRegressor(RegressorMixin, FairFederated):  # type: ignore[misc]
    """Ridge regression whose optimum is fair to the clients that own the rows.

    It solves min_x max_λ Σ λ_i f_i(x) − ψ(λ) with f_i the mean squared error of client i plus (l2/2)‖x‖², and proves
    how far from the optimum it is. With one client it is scikit-learn's `Ridge` with alpha = l2 · rows / 2.
    Weights of rows count among the rows of one client: f_i is a weighted mean. Parameters and attributes are those of
    `FairFederatedClassifier`, without `class_weight`, `calibrate` and `classes_`, and with these:

    Args:
        standardise: scale every column and the target to mean zero and deviation one, by sums over clients (without an
            intercept, to deviation one only); losses, `tol` and the objective's parameters are then in units of the
            target's variance, else in its units squared.
        loss: "squared", or "poisson" for counts: their likelihood, with the mean log(1 + e^z) of a linear z. Columns
            are standardised, counts are not.

    Attributes:
        coef_: (features,), in the units of X and y.
        intercept_: a number.
        client_scores_: client → share of the variance explained on its training rows; see `score_by_client`.
    """

    loss: str = "squared"

    def fit(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> Self:
        """Train on rows X with targets y.

        `clients` says who owns each row (`None`: all are one client's), `sample_weight` what it counts for among the
        rows of its client.
        """
        if self.loss not in REGRESSIONS:
            raise unknown("loss", self.loss, REGRESSIONS)
        X, y, group, shares = self._rows(X, y, clients, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        if shares is not None:
            there = shares > 0
            X = X[there]
            y = y[there]
            shares = shares[there]
            group = group.only(there)
        weights, intercept = self._train(X, y, group, self.loss, None, shares)
        self.coef_, self.intercept_ = np.ascontiguousarray(weights[:, 0]), float(intercept[0])
        self.client_scores_ = self._scores(
            y, self._mean(X @ self.coef_ + self.intercept_), group, shares
        )
        return self._finish()

    def _mean(self, z: Array) -> Array:
        mean: Array = loss_named(self.loss).mean(z)
        return mean

    def __sklearn_tags__(self) -> Any:
        """Expect poor scores with `epsilon`: noise may hide what there is to learn, most of all from few rows."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = self.epsilon is not None
        return tags

    def predict(self, X: Any) -> Array:
        """Return the expected target of every row."""
        return self._mean(self._linear(X))

    def score(self, X: Any, y: ArrayLike, sample_weight: Any = None, clients: Any = None) -> float:
        """Return R² over all rows; given `clients`, the mean over the fifth of them that is served worst."""
        if clients is None:
            return float(super().score(X, y, sample_weight))
        return self._worst_fifth(X, y, sample_weight, clients)

    def _scores(
        self, y: NDArray[Any], found: NDArray[Any], group: Grouping, weights: Array | None = None
    ) -> dict[Any, float]:
        y = y.astype(np.float64)
        spread = np.average((y - np.average(y, weights=weights)) ** 2, weights=weights)
        return group.mapping(
            1 - group.means((found - y) ** 2, weights) / (spread or 1.0)
        )  # 1 as for a constant column
