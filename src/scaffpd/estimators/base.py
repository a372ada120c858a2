"""Base class of the estimators: their parameters, the one run, scores by client."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from scaffpd.algorithms import fair
from scaffpd.algorithms.base import Algorithm
from scaffpd.data.curves import plainly
from scaffpd.data.silos import standardiser
from scaffpd.errors import InputError, count, positive, real
from scaffpd.estimators.rows import (
    Array,
    Client,
    Data,
    Grouping,
    Labels,
    check_columns,
    grouping,
    owners,
    row_weights,
)
from scaffpd.models import Linear, Personal
from scaffpd.models.linear import AUTO, nearly_free
from scaffpd.objectives import Average, ChiSquare, named
from scaffpd.objectives.base import Objective
from scaffpd.pipeline.curves import Curves
from scaffpd.pipeline.models import Contest, Trained
from scaffpd.pipeline.run import Settings, run
from scaffpd.pipeline.sites import SitesHere
from scaffpd.privacy import LOCAL_STEPS, RADIUS, ROUNDS, Private, Spent, private_ridge
from scaffpd.privacy.counts import PrivateCounting, spent_on_counts
from scaffpd.privacy.noise import secret_bytes
from scaffpd.tasks.base import Task
from scaffpd.training.loop import Result, Status
from scaffpd.training.metrics import a_fifth


@dataclass(frozen=True)
class Scale:
    """Values become (values − mean)/deviation, column by column."""

    mean: Array
    deviation: Array

    @classmethod
    def of(
        cls,
        parts: Sequence[Array],
        centred: bool,
        what: str,
        weights: Sequence[Array] | None = None,
    ) -> Scale:
        """Compute mean and deviation over all clients; a model without an intercept leaves the mean
        where it is.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = standardiser(parts, weights)
        wrong = np.flatnonzero(~(np.isfinite(mean) & np.isfinite(deviation)))
        if wrong.size:
            raise InputError(
                "column-too-large",
                f"{what} {wrong[0]} has values too large to be standardised: scale them first.",
            )
        return cls(mean if centred else np.zeros_like(mean), deviation)

    @classmethod
    def none(cls, columns: int) -> Scale:
        return cls(np.zeros(columns), np.ones(columns))

    def __call__(self, values: Array) -> Array:
        scaled: Array = (values - self.mean) / self.deviation
        return scaled


def in_units(
    weights: Array, intercept: Array, inputs: Scale, outputs: Scale
) -> tuple[Array, Array]:
    """Convert weights (features × outputs) and intercepts to values as they were given."""
    W = weights / inputs.deviation[:, None] * outputs.deviation
    return W, intercept * outputs.deviation + outputs.mean - inputs.mean @ W


@dataclass(eq=False, repr=False)
class FairFederated(BaseEstimator):  # type: ignore[misc]
    """A linear model that serves every client, as scikit-learn knows models; see the two that are
    made of it.
    """

    # if scikit-learn routes metadata, `fit` asks for clients, `score` only by `set_score_request`
    __metadata_request__fit: ClassVar = {"clients": True}
    __metadata_request__score: ClassVar = {"clients": False}

    objective: Objective | str | None = None
    _: KW_ONLY
    l2: float | str = AUTO
    personal: bool | float = False
    fit_intercept: bool = True
    standardise: bool = True
    curves: bool = False
    pairs: int = 0
    tol: float | None = 1e-6
    max_rounds: int | None = None
    algorithm: Callable[[Objective], Algorithm] | None = None
    random_state: int | np.random.RandomState | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    noise_seed: int | None = None

    coef_: Array = field(init=False)
    client_coef_: dict[Client, Array] = field(init=False)
    client_intercept_: dict[Client, Array] = field(init=False)
    result_: Result = field(init=False)
    privacy_: Spent | None = field(init=False)

    def __sklearn_tags__(self) -> Any:
        """Accept sparse rows, and make them dense client by client."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _rows(
        self, X: Data, y: Data, clients: Data, sample_weight: Data, **checks: bool
    ) -> tuple[Array, Labels, Grouping, Array | None]:
        check_columns(X)
        X, y = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr", **checks)
        dense = X.toarray() if hasattr(X, "toarray") else X
        group = owners(type(self).__name__, clients, len(dense))
        weights = row_weights(sample_weight, dense, group)
        if weights is None:
            return dense, y, group, None
        there = weights > 0  # rows that count for nothing are left out
        return dense[there], y[there], group.only(there), weights[there]

    def _train(
        self,
        X: Array,
        y: Labels,
        group: Grouping,
        task: Task,
        classes: int,
        row_weights: Array | None,
    ) -> tuple[Array, Array]:
        name = type(self).__name__
        usual = 1000 if self.epsilon is None else ROUNDS
        rounds = count(name, "max_rounds", usual if self.max_rounds is None else self.max_rounds)
        if self.tol is not None:
            positive(name, "tol", self.tol)
        parts = group.split(X)
        algorithm = self._algorithm(self._objective([len(part) for part in parts]))
        shares = None if row_weights is None else group.split(row_weights)
        targets, outputs = self._targets(group.split(y), shares, task)
        intercept = bool(self.fit_intercept)
        weighted = shares is not None
        counts = self._counting() if self.curves and self.epsilon is not None else None
        self.curves_ = None
        if self.curves:
            known = getattr(self, "feature_names_in_", None)
            beside = task.linear(AUTO, classes, intercept, weighted=weighted)
            pairs = dict(zip(group.names, zip(parts, targets, strict=True), strict=True))
            counting = plainly if counts is None else counts
            self.curves_ = Curves(self.pairs).fit(pairs, known, beside, counting)
            parts = [self.curves_.encode(part) for part in parts]
        inputs = self._inputs(parts, shares)
        groups = None if self.curves_ is None else self.curves_.groups
        ridge = self._ridge(parts[0].shape[1])
        model = task.linear(ridge, classes, intercept, weighted=weighted, groups=groups)
        scaled = [(inputs(part), target) for part, target in zip(parts, targets, strict=True)]
        sites, encoding = SitesHere.of_arrays(group.names, scaled, [], task)
        asked = self._modelled(model, algorithm, rounds, counts)
        settings = Settings(
            encoding,
            [Contest(name, asked, algorithm, tol=self._tol)],
            rounds=rounds,
            seed=_seed(self.random_state),
            start=lambda _: None,  # to all digits, a row of weight two is two rows
        )
        sites = sites if counts is None else replace(sites, counted=counts)
        self._store(run(settings, sites, until="trained").models[0], group)

        def as_given(x: Array) -> tuple[Array, Array]:
            weights, offset = model.reshape(x, len(inputs.mean))
            known = np.zeros(weights.shape[1]) if offset is None else offset
            return in_units(weights, known, inputs, outputs)

        result = self.result_
        own = [] if result.personal is None else [as_given(u) for u in result.personal]
        names = group.clients.tolist()[: len(own)]
        self.client_coef_ = {name: W.T for name, (W, _) in zip(names, own, strict=True)}
        self.client_intercept_ = {name: b for name, (_, b) in zip(names, own, strict=True)}
        return as_given(result.x)

    def _targets(
        self, targets: list[Labels], shares: list[Array] | None, task: Task
    ) -> tuple[list[Labels], Scale]:
        scale = Scale.none(1)
        if self.standardise and task.scaled:
            numbers = [part.astype(np.float64) for part in targets]
            columns = [part[:, None] for part in numbers]
            scale = Scale.of(columns, bool(self.fit_intercept), "Target", shares)
            targets = [scale(part) for part in numbers]
        if shares is not None:
            targets = [np.column_stack([part, w]) for part, w in zip(targets, shares, strict=True)]
        return targets, scale

    def _inputs(self, parts: list[Array], shares: list[Array] | None) -> Scale:
        """Return the scale of encoded columns; steps are centred, but not scaled."""
        if not self.standardise:
            return Scale.none(parts[0].shape[1])
        scale = Scale.of(parts, bool(self.fit_intercept), "Column", shares)
        if self.curves_ is None:
            return scale
        return replace(scale, deviation=np.where(self.curves_.steps, 1.0, scale.deviation))

    def _modelled(
        self, model: Linear, algorithm: Algorithm, rounds: int, counts: PrivateCounting | None
    ) -> Linear | Private | Personal:
        """Return the model as it is trained: every client's own, or with noise."""
        if self.epsilon is None:
            if self.personal is False:
                return model
            return Personal(model, AUTO if self.personal is True else self.personal)
        if self.personal is not False:
            raise InputError(
                "personal-with-noise",
                "Personal models are made after private training: leave personal out, and let "
                "every client call sp.personalise for itself.",
            )
        epsilon = positive(type(self).__name__, "epsilon", self.epsilon)
        return Private.solved(
            model,
            epsilon,
            algorithm,
            rounds,
            self.delta,
            before=0.0 if counts is None else spent_on_counts(epsilon, self.delta),
            clip=self.clip,
            radius=RADIUS,  # rows that are longer, once scaled, are shortened
            secret=self.noise_seed,
        )

    def _store(self, one: Trained, group: Grouping) -> None:
        result = one.result
        self.result_ = result
        self.history_ = result.history
        self.status_ = str(result.status)
        self.certificate_ = result.certificate
        self.privacy_ = one.federation.privacy
        self.n_rounds_ = self.n_iter_ = result.rounds
        self.clients_ = group.clients
        self.client_weights_ = group.mapping(result.weights)
        self.client_losses_ = group.mapping(one.federation.evaluate(result.x).loss)

    def _counting(self) -> PrivateCounting:
        """Return how clients count rows for thresholds where ε is spent."""
        if self.pairs:
            raise InputError(
                "pairs-with-noise",
                "Pairs are looked for without noise: leave pairs or epsilon out.",
            )
        epsilon = positive(type(self).__name__, "epsilon", self.epsilon)
        return PrivateCounting(epsilon, self.delta, secret_bytes(self.noise_seed))

    def _ridge(self, features: int) -> float | str | list[float]:
        """Return l2 as `Linear` takes it: on all coefficients but the intercept."""
        if self.epsilon is not None:
            given = not isinstance(self.l2, str)
            return self.l2 if given else private_ridge(features, self.fit_intercept)
        if isinstance(self.l2, str):
            return self.l2
        l2 = real(type(self).__name__, "l2", self.l2)
        return nearly_free(l2, features, bool(self.fit_intercept))

    @property
    def _tol(self) -> float | None:
        """Return the tolerance; with noise nothing can be proven, and all rounds are made."""
        return self.tol if self.epsilon is None else None

    def _objective(self, sizes: Sequence[int]) -> Objective:
        if isinstance(self.objective, str):
            return named(self.objective)
        if self.objective is None and self.personal is not False:
            return Average(prior=np.array(sizes, dtype=float))  # every row counts once
        objective = ChiSquare(rho=0.1) if self.objective is None else self.objective
        if not isinstance(objective, Objective):
            raise InputError(
                "not-an-objective",
                f'objective must be one such as ChiSquare(rho=0.1) or "cvar", got {objective!r}.',
            )
        return objective

    def _algorithm(self, objective: Objective) -> Algorithm:
        if self.algorithm is None:
            return fair(objective) if self.epsilon is None else fair(objective, LOCAL_STEPS)
        try:
            return self.algorithm(objective)
        except TypeError:
            given = getattr(self.algorithm, "__name__", repr(self.algorithm))
            raise InputError(
                "algorithm-without-objective",
                f"algorithm must take an objective, as ScaffPD does; {given} does not.",
            ) from None

    def _finish(self) -> Self:
        """Say what did not go as asked, once everything that was found is stored."""
        result = self.result_.uninterrupted()
        missed = self._tol is not None and not result.certificate <= self._tol
        if missed or result.status in (Status.DIVERGED, Status.STALLED):
            text = f"{result} A larger max_rounds, tol or l2 helps where the gap is too large."
            warnings.warn(text, ConvergenceWarning, stacklevel=3)
        return self

    def score_by_client(self, X: Data, y: ArrayLike, clients: Data = None) -> dict[Client, float]:
        """Return client → accuracy on its rows; of numbers, 1 − (its mean squared error)/(variance
        of all y).
        """
        found = self.predict(X, clients)
        scores: dict[Client, float] = self._scores(
            np.asarray(y), found, grouping(clients, len(found))
        )
        return scores

    def _check_scored(self, clients: Data) -> None:
        """Refuse to score personal models as if they were the shared one."""
        if clients is None and len(getattr(self, "client_coef_", ())) > 1:
            raise InputError(
                "score-of-personal-models",
                "Every client has a model of its own: pass clients= to score. In cross_val_score "
                "and searches set_score_request(clients=True) sends them, with "
                "set_config(enable_metadata_routing=True).",
            )

    def _worst_fifth(self, X: Data, y: ArrayLike, sample_weight: Data, clients: Data) -> float:
        """Return the mean score over the ⌈N/5⌉ clients that are served worst; rows of one client
        count alike.
        """
        if sample_weight is not None:
            raise InputError(
                "score-of-weighted-clients",
                "score takes sample_weight or clients, not both: rows of one client count equally.",
            )
        scores = sorted(self.score_by_client(X, y, clients).values())
        return float(np.mean(scores[: a_fifth(len(scores))]))

    def _linear(self, X: Data, clients: Data = None) -> Array:
        """Return ⟨a_j, x⟩ plus the intercept; rows of clients with models of their own by these."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, accept_sparse="csr", reset=False)
        return self._outputs(X, None if clients is None else grouping(clients, X.shape[0]))

    def _outputs(self, X: Data, group: Grouping | None) -> Array:
        X = self._encoded(X)
        z: Array = X @ self.coef_.T + self.intercept_
        if group is None or not self.client_coef_:
            return z
        for i, client in enumerate(group.clients.tolist()):
            if client in self.client_coef_:
                rows = group.owner == i
                own = X[rows] @ self.client_coef_[client].T + self.client_intercept_[client]
                z[rows] = own if z.ndim == 2 else own[:, 0]
        return z

    def _encoded(self, X: Data) -> Data:
        if self.curves_ is None:
            return X
        return self.curves_.encode(X.toarray() if hasattr(X, "toarray") else X)


def _seed(random_state: int | np.random.RandomState | None) -> int:
    """Return a whole number as it is, and draw a seed from anything else."""
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
