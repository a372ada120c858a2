"""Base class of both estimators: parameters, the clients of rows, the one call of `train`, scores
by client.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from scaffpd.algorithms import fair
from scaffpd.algorithms.base import Algorithm
from scaffpd.data.curves import plainly
from scaffpd.data.silos import is_missing, standardiser
from scaffpd.errors import InputError, count, positive, real
from scaffpd.models import Linear, Personal
from scaffpd.models.linear import AUTO, nearly_free
from scaffpd.objectives import Average, ChiSquare, named
from scaffpd.objectives.base import Objective
from scaffpd.pipeline.curves import Curves
from scaffpd.privacy import LOCAL_STEPS, RADIUS, ROUNDS, Private, Spent, private_ridge
from scaffpd.privacy.counts import PrivateCounting, spent_on_counts
from scaffpd.privacy.noise import secret_bytes
from scaffpd.tasks.base import Task
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import Result, Status, train
from scaffpd.training.metrics import a_fifth

ALONE = "all"  # the name of the one client if nobody was named
Array = NDArray[np.float64]
Labels = NDArray[np.generic]
Data: TypeAlias = Any  # what scikit-learn takes: arrays, lists, sparse matrices, data frames
Client: TypeAlias = str | int | float | bool | object  # a name or a number


Kind = TypeVar("Kind", bound=np.generic)


class Grouping(NamedTuple):
    """The clients in sorted order, and which of them every row belongs to."""

    clients: Labels
    owner: NDArray[np.intp]

    @property
    def names(self) -> list[str]:
        """The clients' names as text."""
        return [str(client) for client in self.clients.tolist()]

    def split(self, values: NDArray[Kind]) -> list[NDArray[Kind]]:
        """Split `values` by client, rows in their order."""
        ends = np.cumsum(np.bincount(self.owner, minlength=len(self.clients)))
        return np.split(values[np.argsort(self.owner, kind="stable")], ends[:-1])

    def means(self, values: Array, weights: Array | None = None) -> Array:
        """Return the (weighted) mean of one number per row, over every client's rows."""
        parts = self.split(np.ones(len(values)) if weights is None else weights)
        return np.array(
            [np.average(part, weights=w) for part, w in zip(self.split(values), parts, strict=True)]
        )

    def only(self, rows: NDArray[np.bool_]) -> Grouping:
        """Return the same clients with some of their rows."""
        return Grouping(self.clients, self.owner[rows])

    def mapping(self, values: Iterable[float]) -> dict[Client, float]:
        """Return client → its number."""
        return {
            client: float(value)
            for client, value in zip(self.clients.tolist(), values, strict=True)
        }


def grouping(clients: Data, rows: int) -> Grouping:
    """Read names, numbers or categories, one per row; `None` is one client that has all rows."""
    if clients is None:
        return Grouping(np.array([ALONE]), np.zeros(rows, dtype=np.intp))
    values = _values(clients)
    if len(values) != rows:
        raise InputError(
            "clients-length",
            f"There are {rows} rows but {len(values)} values in clients: give one client per row.",
        )
    try:
        first = {value: row for row, value in reversed(list(enumerate(values)))}
    except TypeError:  # lists, the rows of a matrix
        raise InputError(
            "clients-not-a-column", "clients must be names or numbers, one per row."
        ) from None
    missing = [row for value, row in first.items() if is_missing(value)]
    if missing:
        raise InputError(
            "client-missing",
            f"clients has a missing value (row {min(missing)}): every row needs a client.",
        )
    try:
        ordered: list[Client] = sorted(first)  # type: ignore[type-var]
    except TypeError:  # names and numbers together
        ordered = sorted(first, key=str)
    number = {value: i for i, value in enumerate(ordered)}
    return Grouping(_array(ordered), np.array([number[value] for value in values], dtype=np.intp))


def _values(clients: Data) -> list[Client]:
    """Return plain Python values: NumPy would make the name 'nan' of a missing one among names."""
    for method in ("to_pylist", "to_list", "tolist"):  # of pyarrow, of data frames, of NumPy
        if hasattr(clients, method):
            return list(getattr(clients, method)())
    if isinstance(clients, str | bytes) or not isinstance(clients, Iterable):
        raise InputError(
            "clients-not-a-column",
            f"clients must have one value per row, got {clients!r}: pass the column itself.",
        )
    return [value.item() if isinstance(value, np.generic) else value for value in clients]


def _array(values: list[Client]) -> Labels:
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        return np.array(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


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
        """Leave everything as it is."""
        return cls(np.zeros(columns), np.ones(columns))

    def __call__(self, values: Array) -> Array:
        """Return values in units of their deviation."""
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
        """Check what `fit` is given; return dense rows, targets, owners and weights of rows."""
        check_columns(X)
        X, y = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr", **checks)
        dense = X.toarray() if hasattr(X, "toarray") else X
        group = owners(self, clients, len(dense))
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
        """Train on the clients' rows; return weights (features × outputs) and intercepts."""
        usual = 1000 if self.epsilon is None else ROUNDS
        rounds = count(
            type(self).__name__, "max_rounds", usual if self.max_rounds is None else self.max_rounds
        )
        if self.tol is not None:
            positive(type(self).__name__, "tol", self.tol)
        parts = group.split(X)
        algorithm = self._algorithm(self._objective([len(part) for part in parts]))
        intercept = bool(self.fit_intercept)
        targets: list[Labels] = group.split(y)
        shares = None if row_weights is None else group.split(row_weights)
        outputs = Scale.none(1)
        if self.standardise and task.scaled:
            numbers = [part.astype(np.float64) for part in targets]
            outputs = Scale.of([part[:, None] for part in numbers], intercept, "Target", shares)
            targets = [outputs(part) for part in numbers]
        if shares is not None:
            targets = [np.column_stack([part, w]) for part, w in zip(targets, shares, strict=True)]
        self.curves_ = None
        counts = self._counting() if self.curves and self.epsilon is not None else None
        if self.curves:
            known = getattr(self, "feature_names_in_", None)
            beside = task.linear(AUTO, classes, intercept, weighted=shares is not None)
            rows = dict(zip(group.names, zip(parts, targets, strict=True), strict=True))
            counting = plainly if counts is None else counts
            self.curves_ = Curves(self.pairs).fit(rows, known, beside, counting)
            parts = [self.curves_.encode(part) for part in parts]
        width = parts[0].shape[1]
        inputs = Scale.none(width)
        if self.standardise:
            inputs = Scale.of(parts, intercept, "Column", shares)
            if self.curves_ is not None:  # steps are centred, but not scaled
                unscaled = np.where(self.curves_.steps, 1.0, inputs.deviation)
                inputs = replace(inputs, deviation=unscaled)
        ridge = self._ridge(width)
        groups = None if self.curves_ is None else self.curves_.groups
        weighted = shares is not None
        model = task.linear(ridge, classes, intercept, weighted=weighted, groups=groups)
        pairs = [(inputs(part), target) for part, target in zip(parts, targets, strict=True)]
        trained: Linear | Private | Personal = model
        if self.personal is not False:
            trained = Personal(model, AUTO if self.personal is True else self.personal)
        if self.epsilon is not None:  # rows longer than R, once scaled, are shortened
            if self.personal is not False:
                raise InputError(
                    "personal-with-noise",
                    "Personal models are made after private training: leave personal out, and let "
                    "every client call sp.personalise for itself.",
                )
            epsilon = positive(type(self).__name__, "epsilon", self.epsilon)
            trained = Private.solved(
                model,
                epsilon,
                algorithm,
                rounds,
                self.delta,
                before=0.0 if counts is None else spent_on_counts(epsilon, self.delta),
                clip=self.clip,
                radius=RADIUS,
                secret=self.noise_seed,
            )
        cohort = Cohort(pairs, trained, names=group.names)
        if counts is not None and cohort.channel.account is not None:
            cohort.channel.account.charge(counts.releases)
        seed = _seed(self.random_state)
        result = train(algorithm, cohort, rounds, self._tol, seed, progress=False)
        self.result_ = result
        self.history_ = result.history
        self.status_ = str(result.status)
        self.certificate_ = result.certificate
        self.privacy_ = cohort.privacy
        self.n_rounds_ = self.n_iter_ = result.rounds
        self.clients_ = group.clients
        self.client_weights_ = group.mapping(result.weights)
        self.client_losses_ = group.mapping(cohort.evaluate(result.x).loss)

        def as_given(x: Array) -> tuple[Array, Array]:
            weights, offset = model.reshape(x, width)
            known = np.zeros(weights.shape[1]) if offset is None else offset
            return in_units(weights, known, inputs, outputs)

        own = [] if result.personal is None else [as_given(u) for u in result.personal]
        names = group.clients.tolist()[: len(own)]
        self.client_coef_ = {name: W.T for name, (W, _) in zip(names, own, strict=True)}
        self.client_intercept_ = {name: b for name, (_, b) in zip(names, own, strict=True)}
        return as_given(result.x)

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
        """Return rows as they are, or as lines and steps."""
        if self.curves_ is None:
            return X
        return self.curves_.encode(X.toarray() if hasattr(X, "toarray") else X)


def check_columns(X: Data) -> None:
    """Refuse a data frame with columns of categories, whose codes would be read as numbers."""
    for name, kind in zip(getattr(X, "columns", ()), getattr(X, "dtypes", ()), strict=False):
        if str(kind).lower().startswith(("str", "category", "enum", "categorical", "date")):
            raise InputError(
                "column-not-numbers",
                f"Column {str(name)!r} holds {kind} values, not numbers: encode it first, as by "
                "make_column_transformer((OneHotEncoder(handle_unknown='ignore'), "
                f"[{str(name)!r}]), remainder='passthrough').",
            )


def row_weights(sample_weight: Data, X: Data, group: Grouping) -> Array | None:
    """Return a weight for every row, or `None` where rows count alike; a client's weights must not
    all be zero.
    """
    if sample_weight is None:
        return None
    weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if np.any(weights < 0):
        raise InputError(
            "weight-out-of-range",
            f"sample_weight has the value {weights.min():g}; weights of rows are >= 0.",
        )
    for name, own in zip(group.names, group.split(weights), strict=True):
        if not own.sum() > 0:
            raise InputError(
                "client-without-weight",
                f"All rows of client {name!r} have weight zero: leave them out, or give them "
                "weights.",
            )
    return weights


def owners(estimator: FairFederated, clients: Data, rows: int) -> Grouping:
    """Return who owns which row; warn where nobody says so."""
    if clients is None:
        warnings.warn(
            f"{type(estimator).__name__}.fit got no clients, so all rows are one client's: pass "
            "clients=, one name per row. In cross_val_score and searches groups= does not reach "
            "fit: set_config(enable_metadata_routing=True) and pass params={'clients': ...}.",
            UserWarning,
            stacklevel=4,
        )
    return grouping(clients, rows)


def _seed(random_state: int | np.random.RandomState | None) -> int:
    """Return a whole number as it is, and draw a seed from anything else."""
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
