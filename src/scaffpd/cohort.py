"""`Cohort`: clients in this process. Simulation is a cohort of N, a real silo answers with a cohort of one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, unknown
from scaffpd.federation import ClientScores, Constants, Gradients, LocalPlan, Traffic, Vector
from scaffpd.models.inputs import read_features, read_labels
from scaffpd.models.oracle import Arrays, Displacements, Oracle, Point

SPLITS = ("train", "test")


class Model(Protocol):
    """A description that can be bound to clients' data."""

    def oracle(
        self,
        features: Arrays,
        labels: Arrays,
        names: list[str],
        device: torch.device,
        dtype: torch.dtype | None,
        like: Oracle | None = None,
    ) -> Oracle:
        """Bind to data; held-out data is bound `like` the training data, with an x of the same length."""


class Cohort:
    """N clients in this process, vectorised; implements `Federation`.

    Args:
        clients: one (X, y) pair per site, NumPy arrays or torch tensors; or a mapping from names to pairs.
        model: `Linear(...)` or `Module(...)`.
        names: the clients' names; by default their numbers ("client-0", …).
        device: where the data and x live, such as "cpu" or "cuda".
        dtype: float64 by default for linear models, the network's own for modules.
        test: held-out pairs in the same order (or with the same names), for `evaluate(x, "test")`.
    """

    def __init__(
        self,
        clients: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]],
        model: Model,
        names: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        test: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        if not hasattr(model, "oracle") or isinstance(model, type):
            raise InputError(f"Cohort needs a model such as Linear(...) or Module(...), got {model!r}.")
        pairs, self._names = _named_pairs(clients, names)
        self.model = model
        self._device, self._dtype = _checked_device(device), _checked_dtype(dtype)
        self._train = self._bind(pairs, None)
        self._test = None if test is None else self._bind_test(test)
        self._traffic = Traffic()
        self._number_size = self.start().element_size()
        self._constants: Constants | None = None
        self._fingerprint: str | None = None

    def _bind(self, pairs: list[tuple[Any, Any]], like: _Split | None) -> _Split:
        X = [read_features(name, x) for name, (x, _) in zip(self._names, pairs, strict=True)]
        y = [read_labels(name, b, len(a)) for name, a, (_, b) in zip(self._names, X, pairs, strict=True)]
        columns = _agreed_columns(self._names, [x for x, _ in pairs], None if like is None else like.columns)
        shape = X[0].shape[1:] if like is None else like.shape
        for name, a in zip(self._names, X, strict=True):
            if a.shape[1:] != shape:
                raise InputError(
                    f"Client {name!r} has {_width(a.shape[1:])} features, but others have {_width(shape)}."
                )
        oracle = self.model.oracle(
            X, y, list(self._names), self._device, self._dtype, None if like is None else like.oracle
        )
        return _Split(oracle, np.array([len(a) for a in X]), shape, columns)

    def _bind_test(self, test: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]]) -> _Split:
        try:
            named = isinstance(test, Mapping)
            pairs, names = _named_pairs(test, None if named else self._names)
            if set(names) != set(self._names):
                raise InputError(f"Its clients are {names}, those of the training data {self._names}.")
            by_name = dict(zip(names, pairs, strict=True))
            split = self._bind([by_name[name] for name in self._names], self._train)
            if split.oracle.dimension != self.dimension:
                raise InputError("It has another number of outputs than the training data.")
        except InputError as error:
            raise InputError(f"The test data cannot be used: {error}") from None
        return split

    @property
    def _oracle(self) -> Oracle:
        return self._train.oracle

    @property
    def names(self) -> Sequence[str]:
        """The clients, in the order given."""
        return tuple(self._names)

    @property
    def dimension(self) -> int:
        """d, the length of x."""
        return self._oracle.dimension

    @property
    def traffic(self) -> Traffic:
        """What a real federation would have sent by now."""
        return self._traffic

    @property
    def fingerprint(self) -> str:
        """A hash of model, names, number format and all training data as the model sees it."""
        if self._fingerprint is None:
            about = (self.model, self._names, str(self.start().dtype), self._device.type)
            digest = hashlib.sha256(repr(about).encode())
            for tensor in self._oracle.contents():
                digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
                digest.update(np.ascontiguousarray(tensor.detach().cpu()).data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def constants(self) -> Constants:
        """One exchange: L_i and μ_i up (computed once)."""
        if self._constants is None:
            self._constants = self._oracle.constants()
        self._count(exchanges=1, up=2)
        return self._constants

    def start(self) -> Tensor:
        """The default x⁰."""
        return self._oracle.start()

    def gradients(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> _Gradients:
        """One exchange: x down; c_i, L_i and the bounds on their rounding errors up."""
        self._count(exchanges=1, down=self.dimension, up=self.dimension + 3)
        return _Gradients(self, self._oracle.evaluate(x, batch_size, key))

    def local_updates(self, x: Tensor, at: Gradients, correction: Tensor, plan: LocalPlan) -> _Updates:
        """One exchange: the correction down, d_i up."""
        if not isinstance(at, _Gradients) or at.cohort is not self:
            raise InputError("local_updates needs the gradients that this cohort itself has answered.")
        self._count(exchanges=1, down=self.dimension, up=self.dimension)
        return _Updates(self._oracle.local_updates(x, at.point, correction, plan), correction)

    def evaluate(self, x: Tensor | NDArray[np.float64], split: str = "train") -> ClientScores:
        """Per-client loss f_i(x) (regulariser included), accuracy and sample counts of x on "train" or "test"."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        chosen = self._train if split == "train" else self._test
        if chosen is None:
            raise InputError('This cohort has no test data: pass `test=` to Cohort, or evaluate on "train".')
        loss, accuracy = chosen.oracle.scores(self._point(x))
        return ClientScores(tuple(self._names), loss, accuracy, chosen.counts)

    def _point(self, x: Any) -> Tensor:
        like = self.start()
        try:
            point = torch.as_tensor(x).detach().to(like)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"x must be an array of {self.dimension} numbers.") from None
        if point.shape != like.shape:
            raise InputError(f"x has shape {tuple(point.shape)}, but the model has {self.dimension} parameters.")
        return point

    def _count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        size = self._number_size * len(self._names)
        self._traffic.add(exchanges=exchanges, up=up * size, down=down * size)

    def __repr__(self) -> str:
        samples = int(self._train.counts.sum())
        return f"Cohort of {len(self._names)} clients, {samples} samples, {self.model!r}"


class _Split(NamedTuple):
    """One bound set of samples."""

    oracle: Oracle
    counts: NDArray[np.int64]
    shape: tuple[int, ...]
    columns: list[str] | None


class _Gradients:
    """`Gradients` of a cohort: N-sized results as NumPy float64, vectors as tensors."""

    def __init__(self, cohort: Cohort, point: Point) -> None:
        self.cohort, self.point = cohort, point
        self.losses: Vector = point.losses.double().cpu().numpy()

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bounds on the rounding errors of L_i and c_i."""
        loss, gradient = self.point.rounding()
        return loss.double().cpu().numpy(), gradient.double().cpu().numpy()

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i c_i."""
        return self.point.sum(torch.as_tensor(weights).to(self.point.losses))

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client: N scalars up."""
        self.cohort._count(exchanges=1, up=1)
        return self.point.project(direction).double().cpu().numpy()

    def norms(self) -> Vector:
        """‖c_i‖² per client: N scalars up."""
        self.cohort._count(exchanges=1, up=1)
        return self.point.norms().double().cpu().numpy()


class _Updates:
    """`Updates` of a cohort."""

    def __init__(self, displacements: Displacements, like: Tensor) -> None:
        self._displacements, self._like = displacements, like

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i d_i."""
        return self._displacements.sum(torch.as_tensor(weights).to(self._like))


def _named_pairs(
    clients: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]], names: Sequence[str] | None
) -> tuple[list[tuple[Any, Any]], list[str]]:
    if isinstance(clients, Mapping):
        if names is not None:
            raise InputError("The clients are a mapping and carry their names: leave `names` out.")
        names, clients = list(clients), list(clients.values())
    if not isinstance(clients, Iterable):
        raise InputError(f"A cohort needs a list of pairs (X, y), got {type(clients).__name__}.")
    pairs = list(clients)
    if not pairs:
        raise InputError("A cohort needs at least one client.")
    labels = [f"client-{i}" for i in range(len(pairs))] if names is None else _checked_names(names, len(pairs))
    for name, pair in zip(labels, pairs, strict=True):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"Client {name!r} must be a pair (X, y), got {type(pair).__name__}.")
    return [(x, y) for x, y in pairs], labels


def _checked_names(names: Any, n: int) -> list[str]:
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise InputError(f"names must be a list with one name per client, got {names!r}.")
    labels = [str(name) for name in names]
    if len(labels) != n:
        raise InputError(f"There are {n} clients but {len(labels)} names.")
    for name, times in Counter(labels).items():
        if times > 1:
            raise InputError(f"Two clients are named {name!r}; names must differ.")
    return labels


def _agreed_columns(names: Sequence[str], features: Sequence[Any], known: list[str] | None) -> list[str] | None:
    """The column names of those clients that have any (data frames): the same names in the same order, everywhere."""
    for name, X in zip(names, features, strict=True):
        own = [str(column) for column in X.columns] if hasattr(X, "columns") else None
        known = own if known is None else known
        if own is not None and known is not None and own != known and len(own) == len(known):
            at = next(i for i, (a, b) in enumerate(zip(own, known, strict=True)) if a != b)
            raise InputError(
                f"Client {name!r} has column {own[at]!r} where others have {known[at]!r}: "
                "name and order the columns alike everywhere."
            )
    return known


def _width(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(f"Device {device!r} cannot be used here: {reason}.") from None
    return chosen


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype must be a floating-point type such as torch.float32, got {dtype!r}.")
    return dtype
