"""`Cohort`: clients in this process. A simulation is a cohort of N, a real silo answers with a
cohort of one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.evidence import Strengths
from scaffpd.errors import InputError, first_line
from scaffpd.federation import (
    Constants,
    Federation,
    Key,
    LocalPlan,
    ProximalPlan,
    Strength,
    Vector,
)
from scaffpd.federation.modes import ModesAt
from scaffpd.federation.questions import Displacements, EvaluatedPoint, GradientsAt, Question, Reply
from scaffpd.models.arrays import read_labels, read_tables
from scaffpd.models.envelopes import client_modes, proximal_steps
from scaffpd.models.modes import ClientModes
from scaffpd.models.module import Module
from scaffpd.models.oracle import ClientData, Oracle
from scaffpd.models.rows import RowsOracle
from scaffpd.privacy.accountant import Account
from scaffpd.training.settling import by_evidence, dispersed, settled

Pair = tuple[Any, Any]  # X and y: arrays, tensors or data frames


def named_pairs(
    clients: Sequence[Pair] | Mapping[str, Pair], names: Sequence[str] | None
) -> tuple[list[Pair], list[str]]:
    if isinstance(clients, Mapping):
        if names is not None:
            raise InputError(
                "names-given-twice",
                "The clients are a mapping and already carry their names: leave out `names`.",
            )
        names = list(clients)
        clients = list(clients.values())
    if not isinstance(clients, Iterable):
        raise InputError(
            "not-pairs",
            f"A cohort needs a list of pairs (X, y), got {type(clients).__name__}.",
        )
    pairs = list(clients)
    if not pairs:
        raise InputError("no-clients", "A cohort needs at least one client.")
    labels = (
        [f"client-{i}" for i in range(len(pairs))]
        if names is None
        else _checked_names(names, len(pairs))
    )
    for name, pair in zip(labels, pairs, strict=True):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                "client-not-a-pair",
                f"Client {name!r} must be a pair (X, y), got {type(pair).__name__}.",
            )
    return [(x, y) for x, y in pairs], labels


def in_order(test: Sequence[Pair] | Mapping[str, Pair], names: list[str]) -> list[Pair]:
    """Return held-out pairs in the order of the training clients, one for each of them."""
    pairs, given = named_pairs(test, None if isinstance(test, Mapping) else names)
    if set(given) != set(names):
        raise InputError(
            "test-clients-differ",
            f"Its clients are {given}, those of the training data {names}.",
        )
    by_name = dict(zip(given, pairs, strict=True))
    return [by_name[name] for name in names]


def _checked_names(names: object, n: int) -> list[str]:
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise InputError(
            "names-not-a-list", f"names must be a list with one name per client, got {names!r}."
        )
    labels = [str(name) for name in names]
    if len(labels) != n:
        raise InputError("names-length", f"There are {n} clients but {len(labels)} names.")
    for name, times in Counter(labels).items():
        if times > 1:
            raise InputError(
                "client-name-twice", f"Two clients are named {name!r}; names must differ."
            )
    return labels


def agreed_columns(
    names: Sequence[str], features: Sequence[object], known: list[str] | None
) -> list[str] | None:
    """Return the column names of clients with data frames, which must agree in name and order."""
    for name, X in zip(names, features, strict=True):
        own = [str(column) for column in X.columns] if hasattr(X, "columns") else None
        known = own if known is None else known
        if own is not None and known is not None and own != known and len(own) == len(known):
            at = next(i for i, (a, b) in enumerate(zip(own, known, strict=True)) if a != b)
            raise InputError(
                "columns-differ",
                f"Client {name!r} has column {own[at]!r} where others have {known[at]!r}: "
                "use the same column names in the same order everywhere.",
            )
    return known


def checked_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = first_line(error)
        if reason.startswith("Expected one of"):
            reason = "there is no such kind of device"
        raise InputError(
            "device-unusable", f"Device {device!r} cannot be used here: {reason}."
        ) from None
    return chosen


class ModelSpec(Protocol):
    """Description that can be bound to clients' data."""

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to data; held-out data is bound `like` the training data, with an x of the same
        length.
        """


@runtime_checkable
class StrengthenedModel(ModelSpec, Protocol):
    """A model whose strengths may change after it is bound to data."""

    def using(self, l2: Strength | None, strength: Strength | None) -> StrengthenedModel:
        """Return the model with other strengths; `None` keeps one."""

    def rebound(self, oracle: Oracle, like: Oracle | None = None) -> Oracle:
        """Return an oracle of this model with this model's strengths, on the same data."""


class Split(NamedTuple):
    """Bound samples of one split."""

    oracle: Oracle
    counts: NDArray[np.int64]
    shape: tuple[int, ...]
    columns: list[str] | None


class LocalChannel:
    """Channel to clients in this process, whose oracle answers for all of them at once."""

    here = True

    def __init__(
        self,
        names: Sequence[str],
        about: str,
        train: Split,
        test: Split | None,
        model: ModelSpec | None = None,
    ) -> None:
        self.names = tuple(names)
        self.model = model
        self.about = about
        self.train = train
        self.test = test
        self._everyone = list(range(len(self.names)))
        # the last list that was found to contain all clients, and those that were asked last
        self._whole: Sequence[int] = self._everyone
        self._some: tuple[list[int], Oracle] = self._everyone, train.oracle
        self.secret: Key = ()  # of a silo's own, which nobody else draws the minibatches from
        self.points = WeakKeyDictionary[GradientsAt, dict[tuple[int, ...], EvaluatedPoint]]()
        self.modes = WeakKeyDictionary[ModesAt, dict[tuple[int, ...], ClientModes]]()
        self._constants: Constants | None = None
        self._fingerprint: str | None = None

    @property
    def work(self) -> float:
        """Number of numbers that a pass over the training features reads; infinite if the work is
        elsewhere.
        """
        most = self.train.oracle.most_rows
        if most is None:
            return math.inf
        return int(np.minimum(self.train.counts, most).sum()) * math.prod(self.train.shape)

    @property
    def tested(self) -> bool:
        return self.test is not None

    @property
    def account(self) -> Account | None:
        return getattr(self.train.oracle, "account", None)  # an oracle of one's own may have none

    @property
    def fingerprint(self) -> str:
        """Hash of model, names, number format and all training data as the model sees it."""
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self.about} {self.model!r}".encode())
            for tensor in self.train.oracle.contents():
                digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
                digest.update(np.ascontiguousarray(tensor.detach().cpu()).data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def constants(self) -> Constants:
        if self._constants is None:
            self._constants = self.train.oracle.constants()
        return self._constants

    def start(self) -> Tensor:
        return self.train.oracle.start()

    def using(self, l2: Strength | None, strength: Strength | None) -> LocalChannel:
        if not isinstance(self.model, StrengthenedModel):
            raise InputError(
                "strengths-fixed",
                f"Linear(...) and Personal(...) can change their strengths, not {self.model!r}.",
            )
        model = self.model.using(l2, strength)
        train = self.train._replace(oracle=model.rebound(self.train.oracle))
        test = self.test
        if test is not None:
            test = test._replace(oracle=model.rebound(test.oracle, train.oracle))
        return LocalChannel(self.names, self.about, train, test, model)

    def only(self, clients: Sequence[int]) -> LocalChannel:
        """Return some of the clients, to be trained by themselves."""
        chosen = list(clients)
        part = self.train.oracle.only(chosen), self.train.counts[chosen]
        train = self.train._replace(oracle=part[0], counts=part[1])
        return LocalChannel([self.names[i] for i in chosen], self.about, train, None, self.model)

    def own(self, x: Tensor) -> Tensor | None:
        """Return every client's own model u_i(x), (N, d); `None` if the model is not `Personal`."""
        own = getattr(self.train.oracle, "own", None)
        found: Tensor | None = None if own is None else own(x)
        return found

    def resumed(self, rounds: int) -> None:
        """Do nothing: what was asked before is of no interest here."""

    def decided(self, status: str | None) -> str | None:
        """Return it: nobody else runs the method."""
        return status

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        if chosen is self._whole or list(chosen) == self._everyone:
            self._whole = chosen
            return question.answer(AnsweringClients(self, self.train.oracle))
        if self._some[0] != chosen:
            self._some = list(chosen), self.train.oracle.only(list(chosen))
        return question.answer(AnsweringClients(self, self._some[1], tuple(chosen)))


class AnsweringClients(NamedTuple):
    """Clients of a channel, as seen by questions: an `Oracle`, and its cached results."""

    channel: LocalChannel
    oracle: Oracle
    chosen: tuple[int, ...] = ()  # empty for all clients

    def point(self, at: GradientsAt) -> EvaluatedPoint:
        """Evaluate a point, once for these clients for as long as the question is in use."""
        points = self.channel.points.setdefault(at, {})
        if self.chosen not in points:
            points[self.chosen] = self.oracle.evaluate(at.x, at.batch_size, self._key(at.key))
        return points[self.chosen]

    def losses(self, x: Tensor, batch_size: int | None, key: Key) -> Tensor:
        return self.oracle.losses(x, batch_size, self._key(key))

    def _key(self, public: Key) -> Key:
        return (*self.channel.secret, *public)

    def local_updates(
        self,
        x: Tensor,
        at: GradientsAt | Tensor | None,
        correction: Tensor | None,
        plan: LocalPlan,
    ) -> Displacements:
        held = self.point(at) if isinstance(at, GradientsAt) else at
        plan = replace(plan, key=self._key(plan.key))
        return self.oracle.local_updates(x, held, correction, plan)

    def proximal_steps(
        self, at: GradientsAt, correction: Tensor, plan: ProximalPlan
    ) -> Displacements:
        return proximal_steps(self.point(at), correction, plan)

    def scores(self, x: Tensor, split: str) -> tuple[Vector, Vector, NDArray[np.int64]]:
        chosen = self.channel.train if split == "train" else self.channel.test
        if chosen is None:
            raise InputError(
                "cohort-without-test-rows",
                "This cohort has no test data: pass `test=` when you make it, or evaluate on "
                '"train".',
            )
        return *chosen.oracle.scores(x), chosen.counts

    def products(self) -> Tensor:
        assert isinstance(self.oracle, RowsOracle)
        return self.oracle.products()

    def modes(self, at: Question) -> ClientModes:
        """Solve for the u_i of a linear model, once for as long as the question is in use."""
        assert isinstance(at, ModesAt)
        solved = self.channel.modes.setdefault(at, {})
        if self.chosen not in solved:
            before = self.channel.modes.get(at.start, {}).get(self.chosen) if at.start else None
            solved[self.chosen] = client_modes(self.oracle, at, before)
        return solved[self.chosen]


class Cohort(Federation):
    """N clients in this process, vectorised.

    Args:
        clients: one (X, y) pair per site, NumPy arrays or torch tensors; or a mapping from names to
            pairs.
        model: `Linear(...)`, `Module(...)` or a `torch.nn.Module` as it is, or one of the first
            two `Private(...)` or `Personal(...)`.
        names: the clients' names; by default their numbers ("client-0", …).
        device: device of the data and x, such as "cpu" or "cuda".
        dtype: float64 by default for linear models, the network's own for modules. With bfloat16
            linear models keep features in it and compute in float32: half of the memory, and of
            the time where reading takes it. Certificates are of the rounded features.
        test: held-out pairs in the same order (or with the same names), for `evaluate(x, "test")`.
        settle: whether strengths that are "auto" are set by evidence now, so that `model` has them
            as numbers; `strengths` says what was found.
    """

    channel: LocalChannel
    strengths: Strengths | None = None

    def __init__(
        self,
        clients: Sequence[Pair] | Mapping[str, Pair],
        model: ModelSpec | torch.nn.Module,
        names: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        test: Sequence[Pair] | Mapping[str, Pair] | None = None,
        settle: bool = True,
    ) -> None:
        if isinstance(model, torch.nn.Module):
            model = Module(model)
        if not hasattr(model, "oracle") or isinstance(model, type):
            raise InputError(
                "not-a-model",
                f"Cohort needs a model such as Linear(...) or Module(...), got {model!r}.",
            )
        pairs, known = named_pairs(clients, names)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(
                "dtype-not-floating",
                f"dtype must be a floating-point type such as torch.float32, got {dtype!r}.",
            )
        where = checked_device(device)
        if settle:

            def trial(one: object) -> tuple[Federation, int, list[str] | None]:
                made = Cohort(pairs, one, known, device, dtype, settle=False)  # type: ignore[arg-type]
                return made, made.channel.train.shape[0], made.channel.train.columns

            model = dispersed(model, trial)  # type: ignore[assignment]
        train = bound(model, known, pairs, where, dtype)
        held = None if test is None else _bound_test(model, known, test, where, dtype, train)
        about = repr((known, str(train.oracle.start().dtype), where.type))
        super().__init__(LocalChannel(known, about, train, held, model))
        self.strengths = by_evidence(self, model, train.shape[0], train.columns) if settle else None
        if self.strengths is not None:
            self.channel = settled(self, model, self.strengths).channel

    @property
    def model(self) -> ModelSpec | None:
        return self.channel.model

    @property
    def _oracle(self) -> Oracle:
        return self.channel.train.oracle

    def personal(self, x: Tensor | NDArray[np.float64]) -> dict[str, Tensor]:
        """Return every client's own model u_i(x) by name, if the model is `Personal`. Nothing is
        sent.
        """
        own = self.own_models(x)
        if own is None:
            raise InputError(
                "one-model-for-all",
                "All clients share this model: use Personal(model, ...) for personal ones.",
            )
        return dict(zip(self.names, own, strict=True))

    @property
    def tested(self) -> bool:
        return self.channel.tested

    def __repr__(self) -> str:
        samples = int(self.channel.train.counts.sum())
        return f"Cohort of {len(self.names)} clients, {samples} samples, {self.model!r}"


def bound(
    model: ModelSpec,
    names: list[str],
    pairs: list[Pair],
    device: torch.device,
    dtype: torch.dtype | None,
    like: Split | None = None,
) -> Split:
    """Check the clients' arrays and bind the model to them; held-out rows are bound `like` the
    training rows.
    """
    X = read_tables(names, [x for x, _ in pairs])
    y = [read_labels(name, b, len(a)) for name, a, (_, b) in zip(names, X, pairs, strict=True)]
    columns = agreed_columns(names, [x for x, _ in pairs], None if like is None else like.columns)
    shape = X[0].shape[1:] if like is None else like.shape
    for name, a in zip(names, X, strict=True):
        if a.shape[1:] != shape:
            own, others = ("×".join(map(str, each)) for each in (a.shape[1:], shape))
            raise InputError(
                "features-differ",
                f"Client {name!r} has {own} features, but others have {others}.",
            )
    data = ClientData(X, y, list(names), device, dtype, columns)
    oracle = model.oracle(data, None if like is None else like.oracle)
    return Split(oracle, np.array([len(a) for a in X]), shape, columns)


def _bound_test(
    model: ModelSpec,
    names: list[str],
    test: Sequence[Pair] | Mapping[str, Pair],
    device: torch.device,
    dtype: torch.dtype | None,
    train: Split,
) -> Split:
    try:
        split = bound(model, names, in_order(test, names), device, dtype, train)
        if split.oracle.dimension != train.oracle.dimension:
            raise InputError(
                "outputs-differ", "It has a different number of outputs than the training data."
            )
    except InputError as error:
        raise InputError("test-data-unusable", f"The test data cannot be used: {error}") from None
    return split
