"""`Cohort`: clients in this process. Simulation is a cohort of N, a real silo answers with a cohort of one."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd import federation
from scaffpd.cohort.answers import Chosen, CohortGradients, CohortMemory, CohortUpdates, TrafficLedger, scattered
from scaffpd.errors import InputError, unknown
from scaffpd.federation import Clients, ClientScores, Constants, Gradients, LocalPlan, ProximalPlan, Vector, same_point
from scaffpd.models.oracle import ClientData, Displacements, Oracle, read_features, read_labels
from scaffpd.models.personal import lowest
from scaffpd.privacy.accountant import Account, Spent
from scaffpd.privacy.oracle import PrivateOracle


def named_pairs(
    clients: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]], names: Sequence[str] | None
) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Return the clients' (X, y) and their names."""
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


def agreed_columns(names: Sequence[str], features: Sequence[Any], known: list[str] | None) -> list[str] | None:
    """Return the column names of the clients that have any (data frames), the same in the same order everywhere."""
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


def checked_device(device: str | torch.device) -> torch.device:
    """Return a device that can be used."""
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        reason = "there is no such kind of device" if reason.startswith("Expected one of") else reason
        raise InputError(f"Device {device!r} cannot be used here: {reason}.") from None
    return chosen


SPLITS = ("train", "test")


class ModelSpec(Protocol):
    """A description that can be bound to clients' data."""

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to data; held-out data is bound `like` the training data, with an x of the same length."""


class Cohort(TrafficLedger):
    """N clients in this process, vectorised; implements `Federation`.

    Args:
        clients: one (X, y) pair per site, NumPy arrays or torch tensors; or a mapping from names to pairs.
        model: `Linear(...)` or `Module(...)`, or one of them `Private(...)` or `Personal(...)`.
        names: the clients' names; by default their numbers ("client-0", …).
        device: where the data and x live, such as "cpu" or "cuda".
        dtype: float64 by default for linear models, the network's own for modules.
        test: held-out pairs in the same order (or with the same names), for `evaluate(x, "test")`.
    """

    def __init__(
        self,
        clients: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]],
        model: ModelSpec,
        names: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        test: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        if not hasattr(model, "oracle") or isinstance(model, type):
            raise InputError(f"Cohort needs a model such as Linear(...) or Module(...), got {model!r}.")
        pairs, self._names = named_pairs(clients, names)
        self.model = model
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(f"dtype must be a floating-point type such as torch.float32, got {dtype!r}.")
        self._device, self._dtype = checked_device(device), dtype
        self._train = self._bind(pairs, None)
        self._test = None if test is None else self._bind_test(test)
        super().__init__(self._names, self._oracle.start())
        self._asked_last: tuple[Oracle, Chosen] | None = None
        self._constants: Constants | None = None
        self._fingerprint: str | None = None

    def _bind(self, pairs: list[tuple[Any, Any]], like: _Split | None) -> _Split:
        X = [read_features(name, x) for name, (x, _) in zip(self._names, pairs, strict=True)]
        y = [read_labels(name, b, len(a)) for name, a, (_, b) in zip(self._names, X, pairs, strict=True)]
        columns = agreed_columns(self._names, [x for x, _ in pairs], None if like is None else like.columns)
        shape = X[0].shape[1:] if like is None else like.shape
        for name, a in zip(self._names, X, strict=True):
            if a.shape[1:] != shape:
                own, others = ("×".join(map(str, each)) for each in (a.shape[1:], shape))
                raise InputError(f"Client {name!r} has {own} features, but others have {others}.")
        data = ClientData(X, y, list(self._names), self._device, self._dtype, columns)
        oracle = self.model.oracle(data, None if like is None else like.oracle)
        return _Split(oracle, np.array([len(a) for a in X]), shape, columns)

    def _bind_test(self, test: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]]) -> _Split:
        try:
            named = isinstance(test, Mapping)
            pairs, names = named_pairs(test, None if named else self._names)
            if set(names) != set(self._names):
                raise InputError(f"Its clients are {names}, those of the training data {self._names}.")
            by_name = dict(zip(names, pairs, strict=True))
            split = self._bind([by_name[name] for name in self._names], self._train)
            if split.oracle.dimension != self._oracle.dimension:
                raise InputError("It has another number of outputs than the training data.")
        except InputError as error:
            raise InputError(f"The test data cannot be used: {error}") from None
        return split

    @property
    def _oracle(self) -> Oracle:
        return self._train.oracle

    @property
    def numbers(self) -> float:
        """How many numbers a pass over the training features reads; infinite where the work is not in those."""
        most = self._oracle.most_rows
        if most is None:
            return math.inf
        return int(np.minimum(self._train.counts, most).sum()) * math.prod(self._train.shape)

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
        """One exchange: L_i, μ_i, max_j L_ij and n_i up (computed once)."""
        if self._constants is None:
            self._constants = self._oracle.constants()
        self.count(exchanges=1, up=4 * len(self._names))
        return self._constants

    def start(self) -> Tensor:
        """The default x⁰."""
        return self._oracle.start()

    def memory(self) -> CohortMemory:
        """A zero vector at every client; nothing is sent."""
        return CohortMemory(self.start().new_zeros(len(self._names), self.dimension))

    def losses(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
    ) -> Vector:
        """One exchange: x down, L_i up."""
        oracle, chosen = self._among(clients)
        self.count(exchanges=alone, down=self._send(x, chosen), up=len(chosen))
        return scattered(oracle.losses(x, batch_size, key), self._asked(chosen))

    def gradients(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
        coefficients_sent: int | None = None,
    ) -> CohortGradients:
        """One exchange: x (or how to form it) down; c_i, L_i and the bounds on their rounding errors up."""
        oracle, chosen = self._among(clients)
        down = self._send(x, chosen) if coefficients_sent is None else coefficients_sent * len(chosen)
        self.count(exchanges=alone, down=down, up=(self.dimension + 3) * len(chosen))
        return CohortGradients(self._asked(chosen), oracle.evaluate(x, batch_size, key), x)

    def local_updates(
        self,
        x: Tensor,
        at: Gradients | federation.Memory | None,
        correction: Tensor | None,
        plan: LocalPlan,
        clients: Clients = None,
    ) -> CohortUpdates:
        """One exchange: x (to whom it has not been sent) and the correction down, d_i up."""
        oracle, chosen = self._among(clients)
        held = self._held(at, chosen)
        vectors = len(chosen) * self.dimension
        down = (0 if isinstance(at, CohortGradients) and same_point(at.x, x) else self._send(x, chosen)) + (
            correction is not None
        ) * vectors
        self.count(exchanges=1, down=down, up=vectors * (2 if plan.snapshot is not None else 1))

        def work(steps: int) -> Displacements:
            return oracle.local_updates(x, held, correction, replace(plan, steps=steps))

        return CohortUpdates(self._asked(chosen), plan, work)

    def proximal_steps(self, at: Gradients, correction: Tensor, plan: ProximalPlan) -> CohortUpdates:
        """One exchange: the correction and β down, d_i up."""
        oracle, chosen = self._among(at.chosen if isinstance(at, CohortGradients) else None)
        point = self._held(at, chosen)
        self.count(exchanges=1, down=len(chosen) * (self.dimension + 1), up=len(chosen) * self.dimension)
        return CohortUpdates(
            self._asked(chosen), LocalPlan(1), lambda _: oracle.proximal_steps(point, correction, plan)
        )

    def _held(self, at: Any, chosen: Chosen) -> Any:
        """The c_i of the chosen clients, as their oracle takes them."""
        if at is None:
            return None
        if isinstance(at, CohortMemory) and at.vectors.shape == (len(self._names), self.dimension):
            return at.vectors[chosen]
        if isinstance(at, CohortGradients) and at.asked.cohort is self and at.chosen == chosen:
            return at.point
        raise InputError("local_updates needs what these very clients have answered (gradients) or kept (memory).")

    def _among(self, clients: Clients) -> tuple[Oracle, Chosen]:
        """The oracle of some clients, and their numbers."""
        chosen = self._chosen(clients)
        if chosen is self._everyone:
            return self._oracle, chosen
        if self._asked_last is None or self._asked_last[1] != chosen:
            self._asked_last = self._oracle.only(chosen), chosen
        return self._asked_last

    def evaluate(self, x: Tensor | NDArray[np.float64], split: str = "train") -> ClientScores:
        """Per-client loss f_i(x) (regulariser included), accuracy and sample counts of x on "train" or "test".

        A `Personal` model is scored at each client's own u_i(x), made from its training rows.
        """
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        chosen = self._train if split == "train" else self._test
        if chosen is None:
            raise InputError('This cohort has no test data: pass `test=` when you make it, or evaluate on "train".')
        loss, accuracy = chosen.oracle.scores(self._point(x))
        return ClientScores(tuple(self._names), loss, accuracy, chosen.counts)

    def own_models(self, x: Tensor | NDArray[np.float64]) -> Tensor | None:
        """Every client's own model u_i(x), (N, d); `None` where the model is not `Personal`. Nothing is sent."""
        oracle = cast(Any, self._oracle)
        return oracle.own(self._point(x)) if hasattr(oracle, "own") else None

    def personal(self, x: Tensor | NDArray[np.float64]) -> dict[str, Tensor]:
        """The same by name."""
        own = self.own_models(x)
        if own is None:
            raise InputError("This model is one for all: clients have models of their own with Personal(model, ...).")
        return dict(zip(self._names, own, strict=True))

    def optima(self) -> Vector:
        """One exchange: min_u f_i(u) up, which every client solves for by itself."""
        self.count(exchanges=1, up=len(self._names))
        return lowest(self._oracle).double().cpu().numpy()

    @property
    def tested(self) -> bool:
        """Whether there are held-out rows."""
        return self._test is not None

    @property
    def account(self) -> Account | None:
        """What private clients have released; `None` where the model is not `Private`."""
        oracle = self._oracle
        return oracle.account if isinstance(oracle, PrivateOracle) else None

    @property
    def privacy(self) -> Spent | None:
        """What the clients' answers have cost so far, a `Spent`; `None` where the model is not `Private`."""
        return None if self.account is None else self.account.spent()

    @property
    def doubles(self) -> bool:
        """Whether `exact` works."""
        return hasattr(self._oracle, "double")

    def exact(self) -> Cohort:
        """The same clients on the same stored data, computed with in double precision; their test rows stay behind."""
        if not self.doubles:
            raise InputError("Only clients whose features are rows of a table can change to double precision.")
        other, oracle = copy.copy(self), cast(Any, self._oracle)
        other._train = self._train._replace(oracle=oracle.double())
        other._test, other._dtype, other._constants, other._fingerprint = None, torch.float64, None, None
        other._asked_last = None
        TrafficLedger.__init__(other, self._names, other.start())
        return other

    def _point(self, x: Any) -> Tensor:
        like = self.start()
        kind = (like.shape, like.dtype, like.device)
        if isinstance(x, Tensor) and not x.requires_grad and (x.shape, x.dtype, x.device) == kind:
            return x  # itself, so that whoever has just answered at x knows it again
        try:
            point = torch.as_tensor(x).detach().to(like)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"x must be an array of {self.dimension} numbers.") from None
        if point.shape != like.shape:
            raise InputError(f"x has shape {tuple(point.shape)}, but the model has {self.dimension} parameters.")
        return point

    def __repr__(self) -> str:
        samples = int(self._train.counts.sum())
        return f"Cohort of {len(self._names)} clients, {samples} samples, {self.model!r}"


class _Split(NamedTuple):
    """One bound set of samples."""

    oracle: Oracle
    counts: NDArray[np.int64]
    shape: tuple[int, ...]
    columns: list[str] | None
