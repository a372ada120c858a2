"""`Cohort`: clients in this process. Simulation is a cohort of N, a real silo answers with a cohort of one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, unknown
from scaffpd.federation import ClientScores, Constants, LocalPlan, Traffic, Vector
from scaffpd.models.oracle import Arrays, Displacements, Oracle, Point

SPLITS = ("train", "test")


class Model(Protocol):
    """A description that can be bound to clients' data."""

    def oracle(
        self, features: Arrays, labels: Arrays, names: list[str], device: torch.device, dtype: torch.dtype | None
    ) -> Oracle:
        """Bind to data."""


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
        if not hasattr(model, "oracle"):
            raise InputError(f"Cohort needs a model such as Linear(...) or Module(...), got {model!r}.")
        pairs, self._names = _named_pairs(clients, names)
        self.model = model
        self._device = _checked_device(device)
        self._splits = {"train": self._bind(pairs, dtype, None)}
        if test is not None:
            held_out, test_names = _named_pairs(test, self._names if not isinstance(test, Mapping) else None)
            if test_names != self._names:
                raise InputError(f"The test data is of clients {test_names}, the training data of {self._names}.")
            self._splits["test"] = self._bind(held_out, dtype, self._splits["train"].features)
        self._traffic = Traffic()
        self._constants: Constants | None = None

    def _bind(self, pairs: list[tuple[Any, Any]], dtype: torch.dtype | None, features: int | None) -> _Split:
        X = [_features(name, x) for name, (x, _) in zip(self._names, pairs, strict=True)]
        y = [_labels(name, b, len(a)) for name, a, (_, b) in zip(self._names, X, pairs, strict=True)]
        width = X[0].shape[1:] if features is None else (features,)
        for name, a in zip(self._names, X, strict=True):
            if a.shape[1:] != width:
                raise InputError(f"Client {name!r} has {_width(a.shape[1:])} features, but others have {_width(width)}.")
        oracle = self.model.oracle(X, y, list(self._names), self._device, dtype)
        if "train" in getattr(self, "_splits", {}) and oracle.dimension != self._oracle.dimension:
            raise InputError("The test data has other classes or outputs than the training data: give `classes=`.")
        return _Split(oracle, np.array([len(a) for a in X]), X[0].shape[1], X, y)

    @property
    def _oracle(self) -> Oracle:
        return self._splits["train"].oracle

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
        """A hash of model, names, number format and all training data."""
        digest = hashlib.sha256(repr((self.model, self._names, self.start().dtype, str(self._device.type))).encode())
        for array in (*self._splits["train"].X, *self._splits["train"].y):
            digest.update(repr((array.shape, array.dtype.str)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def constants(self) -> Constants:
        """L_i and μ_i, computed and sent once."""
        if self._constants is None:
            self._constants = self._oracle.constants()
        self._count(exchanges=1, up=2)
        return self._constants

    def start(self) -> Tensor:
        """The default x⁰."""
        return self._oracle.start()

    def gradients(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> _Gradients:
        """One exchange: x down, (L_i, c_i) up."""
        self._count(exchanges=1, down=self.dimension, up=self.dimension + 1)
        return _Gradients(self, self._oracle.evaluate(x, batch_size, key))

    def local_updates(self, x: Tensor, at: _Gradients, correction: Tensor, plan: LocalPlan) -> _Updates:
        """One exchange: the correction down, d_i up."""
        self._count(exchanges=1, down=self.dimension, up=self.dimension)
        return _Updates(self._oracle.local_updates(x, at.point, correction, plan), correction)

    def evaluate(self, x: Tensor | NDArray[np.float64], split: str = "train") -> ClientScores:
        """Per-client loss, accuracy and sample counts of x on "train" or "test"."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        if split not in self._splits:
            raise InputError('This cohort has no test data: pass `test=` to Cohort, or evaluate on "train".')
        chosen = self._splits[split]
        loss, accuracy = chosen.oracle.scores(torch.as_tensor(x).to(self.start()))
        return ClientScores(tuple(self._names), loss, accuracy, chosen.counts)

    def _count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        size = self.start().element_size() * len(self._names)
        self._traffic.add(exchanges=exchanges, up=up * size, down=down * size)

    def __repr__(self) -> str:
        return f"Cohort of {len(self._names)} clients, {int(self._splits['train'].counts.sum())} samples, {self.model!r}"


class _Split:
    """One bound set of samples."""

    def __init__(self, oracle: Oracle, counts: NDArray[np.int64], features: int, X: Arrays, y: Arrays) -> None:
        self.oracle, self.counts, self.features, self.X, self.y = oracle, counts, features, X, y


class _Gradients:
    """`Gradients` of a cohort: N-sized results as NumPy float64, vectors as tensors."""

    def __init__(self, cohort: Cohort, point: Point) -> None:
        self._cohort, self.point = cohort, point
        self.losses: Vector = point.losses.double().cpu().numpy()

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i c_i."""
        return self.point.sum(torch.as_tensor(weights).to(self.point.losses))

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client: N scalars up."""
        self._cohort._count(up=1)
        return self.point.project(direction).double().cpu().numpy()

    def norms(self) -> Vector:
        """‖c_i‖² per client: N scalars up."""
        self._cohort._count(up=1)
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
    pairs = list(clients)
    if not pairs:
        raise InputError("A cohort needs at least one client.")
    labels = [f"client-{i}" for i in range(len(pairs))] if names is None else [str(n) for n in names]
    if len(labels) != len(pairs):
        raise InputError(f"There are {len(pairs)} clients but {len(labels)} names.")
    if len(set(labels)) != len(labels):
        twice = next(n for n in labels if labels.count(n) > 1)
        raise InputError(f"Two clients are named {twice!r}; names must differ.")
    for name, pair in zip(labels, pairs, strict=True):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"Client {name!r} must be a pair (X, y), got {type(pair).__name__}.")
    return pairs, labels


def _features(name: str, x: Any) -> NDArray[np.generic]:
    raw = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if raw.dtype.kind not in "fiub":
        try:
            raw = raw.astype(np.float64)
        except (TypeError, ValueError):
            raise InputError(f"Client {name!r} has features that are not numbers: encode categories first.") from None
    if raw.ndim < 2:
        raise InputError(f"Client {name!r} has features of shape {raw.shape}; samples × features are expected.")
    if raw.shape[0] == 0:
        raise InputError(f"Client {name!r} has no samples.")
    if raw.size == 0:
        raise InputError(f"Client {name!r} has no features.")
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        row, column, *_ = (int(k) for k in np.argwhere(~np.isfinite(raw))[0])
        raise InputError(f"Client {name!r} has a NaN or infinite value in column {column} (first in row {row}).")
    return raw


def _labels(name: str, y: Any, rows: int) -> NDArray[np.generic]:
    raw = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if raw.ndim == 0 or len(raw) != rows:
        raise InputError(f"Client {name!r} has {rows} samples but {raw.size if raw.ndim == 0 else len(raw)} labels.")
    return raw


def _width(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"Device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return chosen
