r"""What a server may ask of its clients: one class a question, with its arithmetic, its cost and what it shows.

A question is a value: vectors, plain numbers and plans. It says how clients answer it (`answer`, for all clients of an
oracle at once), which parts of the answer are numbers that every client shows, which are vectors (`vectors`; where sums
are masked they leave a client only in a sum), and what it costs. The same class answers in a cohort and at a silo, and
writes and reads its own messages (`deploy/messages.py`). A class of your own with a `kind` of its own is a question
like those here: docs/extending.md adds one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, unknown
from scaffpd.federation.values import Key, LocalPlan, ProximalPlan, Vector, Weighing, same_point


@dataclass(frozen=True, eq=False)
class Vectors:
    """A handle on one vector per client, v_i, each where it was made.

    Attributes:
        sum: Σ_i w_i v_i, for the weights of these clients.
        each: the v_i themselves, (n, …).
        squares: ‖v_i‖² per client, where that takes less than the v_i.
        shape: of a v_i, where it is not that of x.
        shares: w → what every client adds to the sum, where it is to hide what they add (`SharedSum` of `privacy`).
        fine: whether `sum` takes weights in double precision, whatever the format of x.
        own: each client's vector without its weight, and that weight, where clients have weighted their vectors
            themselves: what a client goes by when it decides whether a sum would show too much of it.
        padded: whether the size of a vector is to be hidden, but for a power of 256.
    """

    sum: Callable[[Tensor], Tensor]
    each: Callable[[], Tensor]
    squares: Callable[[], Tensor] | None = None
    shape: tuple[int, ...] = ()
    shares: Callable[..., Any] | None = None
    fine: bool = False
    own: Callable[[], tuple[Tensor, Vector]] | None = None
    padded: bool = False

    @classmethod
    def of(cls, made: Any, squares: Callable[[], Tensor] | None = None) -> Vectors:
        """A handle on what clients have made."""
        fine = getattr(made, "fine", None) is not None
        return cls(made.sum, made.each, squares, shares=getattr(made, "shares", None), fine=fine)

    def norms(self) -> Tensor:
        """‖v_i‖² per client."""
        return self.each().square().sum(1) if self.squares is None else self.squares()


@dataclass(frozen=True)
class Reply:
    """What some clients answer.

    Attributes:
        numbers: of every client, (n, …), by their names, computed when they are called.
        vectors: handles on what stays with the clients until a sum asks for it.
    """

    numbers: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    vectors: Mapping[str, Vectors] = field(default_factory=dict)


class Answering(Protocol):
    """Clients that compute: an oracle, and what it has computed before."""

    @property
    def oracle(self) -> Any:
        """An `Oracle` over these clients (models/oracle.py)."""

    def point(self, at: GradientsAt) -> Any:
        """Everything at a point that was asked about, computed once."""

    def lowest(self) -> Tensor:
        """min_u f_i(u) of every client."""

    def scores(self, x: Tensor, split: str) -> tuple[Vector, Vector, NDArray[np.int64]]:
        """Loss, accuracy and number of samples of a split."""

    def own(self, x: Tensor) -> Tensor | None:
        """u_i(x) of every client, (n, d), where the model is `Personal`."""

    def form(self, objective: Any) -> Any:
        """The `Separable` form of an objective, for these clients."""

    def moduli(self) -> Vector:
        """μ_i of every client."""

    def centre(self, name: int) -> Vector:
        """The weights that these clients keep under a name."""

    def keep(self, name: int, weights: Vector) -> None:
        """Keep weights under a name."""


SPLITS = ("train", "test")
COMPARED = 5  # constant, alone, average, fair, personal
QUESTIONS: dict[str, type[Question]] = {}


@dataclass(frozen=True, eq=False)
class Question:
    """One question to all clients at once.

    Attributes:
        kind: its name in messages and in `Algorithm.questions`.
        scalars: the numbers that every client shows, by name.
        vectors: parts of the answer that leave a client only in a sum, where sums are masked.
        loss: which of the scalars is a loss, or a change of one; it leaves as coarse as a silo's file says.
    """

    kind: ClassVar[str] = ""
    scalars: ClassVar[tuple[str, ...]] = ()
    vectors: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        known = QUESTIONS.get(cls.kind, cls)
        if not cls.kind or (known.__module__ == __name__ != cls.__module__):
            raise InputError(f"A question of your own needs a kind of its own, not {cls.kind!r}.")
        QUESTIONS[cls.kind] = cls

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """The parts of one client's answer besides `scalars`, and their shapes; x has length d."""
        return dict.fromkeys(self.vectors, (d,))

    def answer(self, clients: Answering) -> Reply:
        """Answer for all clients."""
        raise NotImplementedError

    @property
    def sent(self) -> Tensor | None:
        """The point that goes down with the question, to clients that have not just been sent it."""
        return None

    def down(self, d: int) -> int:
        """How many numbers go down to a client besides that point."""
        return 0

    def up(self, d: int, masked: bool = False) -> int:
        """How many numbers come up from a client; masked vectors are counted with their sums."""
        hidden = self.vectors if masked else ()
        parts = [math.prod(shape) for part, shape in self.shapes(d).items() if part not in hidden]
        return len(self.scalars) + sum(parts)


@dataclass(frozen=True, eq=False)
class Losses(Question):
    """L_i = f_i(x), over all samples or over a seeded minibatch."""

    kind = "losses"
    scalars: ClassVar[tuple[str, ...]] = ("loss",)
    loss = "loss"

    x: Tensor
    batch_size: int | None = None
    key: Key = (0,)

    @property
    def sent(self) -> Tensor:
        """The point x."""
        return self.x

    def answer(self, clients: Answering) -> Reply:
        """L_i."""
        losses = clients.oracle.losses(self.x, self.batch_size, self.key)
        return Reply({"loss": lambda: losses})


@dataclass(frozen=True, eq=False)
class GradientsAt(Losses):
    """L_i, c_i = ∇f_i(x), and bounds on their rounding errors."""

    kind = "gradients"
    scalars = ("loss", "loss_error", "gradient_error")
    vectors = ("c",)

    def answer(self, clients: Answering) -> Reply:
        """Everything at x; rounding is bounded when somebody asks for it."""
        point = clients.point(self)
        rounding = cache(point.rounding)
        numbers = {"loss": lambda: point.losses, "loss_error": lambda: rounding()[0]}
        return Reply({**numbers, "gradient_error": lambda: rounding()[1]}, {"c": Vectors.of(point, point.norms)})


@dataclass(frozen=True, eq=False)
class LocalSteps(Question):
    """d_i = x − u_{i,J} after J local steps from x, and the same at the plan's snapshot.

    Attributes:
        at: where c_i was answered, or the c_i that clients keep, (n, d); `None` leaves c_i out.
        correction: c; `None` leaves it out.
    """

    kind = "local_updates"
    vectors = ("d", "snapshot")

    x: Tensor
    at: GradientsAt | Tensor | None
    correction: Tensor | None
    plan: LocalPlan

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """The vectors d_i, and the snapshot where there is one."""
        return dict.fromkeys(self.vectors[: 1 if self.plan.snapshot is None else 2], (d,))

    @property
    def sent(self) -> Tensor | None:
        """The point x, unless clients have just answered there."""
        return None if isinstance(self.at, GradientsAt) and same_point(self.at.x, self.x) else self.x

    def down(self, d: int) -> int:
        """The correction."""
        return 0 if self.correction is None else d

    def answer(self, clients: Answering) -> Reply:
        """All local steps; the snapshot's are the first t' of them once more, with the same minibatches."""
        held = clients.point(self.at) if isinstance(self.at, GradientsAt) else self.at

        def work(steps: int) -> Any:
            return clients.oracle.local_updates(self.x, held, self.correction, self.plan.up_to(steps))

        steps = {"d": self.plan.steps} | ({} if self.plan.snapshot is None else {"snapshot": self.plan.snapshot})
        done = {part: work(number) for part, number in steps.items()}
        return Reply({}, {part: Vectors.of(found) for part, found in done.items()})


SUMMARY = 6  # numbers that go with λ_i c_i: see `Response`


@dataclass(frozen=True, eq=False)
class WeighedQuestion(Question):
    """A question whose clients weigh themselves: nothing of a single client leaves, not even its loss.

    Attributes:
        at: where.
        weighing: how.
    """

    kind = "weighed"

    at: GradientsAt
    weighing: Weighing

    @property
    def sent(self) -> Tensor | None:
        """The point x."""
        return self.at.x

    def down(self, d: int) -> int:
        """Thresholds, δ and the centre's mass."""
        return len(self.weighing.levels) + 2

    def losses(self, clients: Answering) -> tuple[Any, Any, Vector, Vector]:
        """The point, the objective's form, L_i, and the centre."""
        point, form, about = clients.point(self.at), clients.form(self.weighing.objective), self.weighing
        centre = clients.centre(about.centre) / about.mass if about.centre else form.prior
        return point, form, point.losses.double().cpu().numpy(), centre

    def weights(self, clients: Answering) -> Vector:
        """λ_i at the first threshold."""
        _, form, losses, centre = self.losses(clients)
        weights: Vector = form.weights(losses, self.weighing.levels[0], self.weighing.delta, centre)
        return weights


@dataclass(frozen=True, eq=False)
class Thresholds(WeighedQuestion):
    """p_i L_i, p_i L_i², and for every ν λ_i(ν) and max_l (L_i − ν) l − ψ_i(l) − (δ/2)(l − m_i)²: for sums."""

    kind = "thresholds"
    vectors = ("masses",)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Two numbers, and two for every threshold."""
        return {"masses": (2 + 2 * len(self.weighing.levels),)}

    def answer(self, clients: Answering) -> Reply:
        """All of it from L_i."""
        _, form, losses, centre = self.losses(clients)
        rows = [form.prior * losses, form.prior * losses**2]
        for nu in self.weighing.levels:
            rows += [made(losses, nu, self.weighing.delta, centre) for made in (form.weights, form.conjugate)]
        return Reply({}, {"masses": _stacked(np.stack(rows, 1))})


@dataclass(frozen=True, eq=False)
class Response(WeighedQuestion):
    """λ_i c_i, and with it what a certificate is made of: for sums.

    The numbers are λ_i; λ_i (L_i − b_i), from below; what ψ is made of (`Separable.moment`); ψ_i*(L_i − ν), from above;
    λ_i μ_i; and λ_i times the bound on the rounding error of c_i.
    """

    kind = "response"
    vectors = ("weighted",)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """A vector and the numbers."""
        return {"weighted": (d + SUMMARY,)}

    def answer(self, clients: Answering) -> Reply:
        """λ_i is kept where it has a name."""
        point, form, losses, centre = self.losses(clients)
        about, nu = self.weighing, self.weighing.levels[0]
        weights = form.weights(losses, nu, about.delta, centre)
        if about.name:
            clients.keep(about.name, weights)
        e, error = (bound.double().cpu().numpy() for bound in point.rounding())
        e = e * (1 + 1e-12) + 1e-15 * (np.abs(losses) + np.abs(form.offset))
        numbers = [
            weights, weights * (losses - form.offset - e), form.moment(weights),
            form.conjugate(losses + e, nu, 0.0, centre), weights * clients.moduli(),
            weights * error * (1 + 1e-12),
        ]  # fmt: skip
        summary = np.stack(numbers, 1)

        def each() -> Tensor:
            c = point.each().double().cpu()
            return torch.cat([torch.from_numpy(weights)[:, None] * c, torch.from_numpy(summary)], 1)

        made = Vectors(lambda w: w.double().cpu() @ each(), each, shape=(len(self.at.x) + SUMMARY,), fine=True)
        return Reply({}, {"weighted": replace(made, own=lambda: (point.each(), weights), padded=True)})


@dataclass(frozen=True, eq=False)
class WeighedSteps(WeighedQuestion):
    """λ_i d_i with d_i = x − u_{i,J} after J local steps from x: for sums."""

    kind = "weighed_steps"
    vectors = ("weighted_d",)

    correction: Tensor
    plan: LocalPlan

    @property
    def sent(self) -> None:
        """Clients have answered at x."""

    def down(self, d: int) -> int:
        """The correction too."""
        return d + super().down(d)

    def answer(self, clients: Answering) -> Reply:
        """The local steps that `LocalSteps` asks for, weighted."""
        made, point = self.weights(clients), clients.point(self.at)
        done = clients.oracle.local_updates(self.at.x, point, self.correction, self.plan)
        weights = torch.from_numpy(made).to(self.at.x)

        def each() -> Tensor:
            return weights[:, None] * cast(Tensor, done.each())

        held = Vectors(lambda w: cast(Tensor, done.sum(w.to(weights) * weights)), each)
        return Reply({}, {"weighted_d": replace(held, own=lambda: (done.each(), made), padded=True)})


def _stacked(rows: NDArray[np.float64]) -> Vectors:
    """Numbers of every client, (n, k), that leave in sums only."""
    table = torch.from_numpy(rows)
    return Vectors(lambda w: w.double().cpu() @ table, lambda: table, shape=rows.shape[1:], fine=True, padded=True)


@dataclass(frozen=True, eq=False)
class ProximalSteps(Question):
    """d_i ≈ argmin ½dᵀH_i d + (β/2)‖d‖²_D − ⟨c, d⟩ with H_i = ∇²f_i where clients have answered."""

    kind = "proximal_steps"
    vectors = ("d",)

    at: GradientsAt
    correction: Tensor
    plan: ProximalPlan

    def down(self, d: int) -> int:
        """The correction and β."""
        return d + 1

    def answer(self, clients: Answering) -> Reply:
        """All local models, solved."""
        done = clients.oracle.proximal_steps(clients.point(self.at), self.correction, self.plan)
        return Reply({}, {"d": Vectors(done.sum, done.each)})


@dataclass(frozen=True, eq=False)
class Curvature(Question):
    """The losses to second order in the span of V = [v_1 … v_k]: Vᵀc_i, ‖c_i‖² in the metric D⁻¹, and VᵀH_iV."""

    kind = "curvature"
    scalars = ("size",)
    vectors = ("curvature",)

    at: GradientsAt
    V: Tensor = field(metadata={"matrix": True})
    metric: Tensor

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Slopes along the k columns, and a k × k matrix."""
        k = self.V.shape[1]
        return {"slopes": (k,), "curvature": (k, k)}

    def down(self, d: int) -> int:
        """One vector: of the columns of V the last sum is the only one that clients lack."""
        return d

    def up(self, d: int, masked: bool = False) -> int:
        """Half of a symmetric matrix will do."""
        k = self.V.shape[1]
        return k + 1 + (0 if masked else k * (k + 1) // 2)

    def answer(self, clients: Answering) -> Reply:
        """All of it in one pass over the data, which the sum of curvatures makes where it comes first."""
        point, seen = clients.point(self.at), list[Any]()

        def curvature(weights: Tensor) -> Tensor:
            seen[:] = [point.restriction(self.V, weights, self.metric)]
            return seen[0].curvature  # type: ignore[no-any-return]

        def last() -> Any:
            return seen[0] if seen else point.restriction(self.V, torch.zeros_like(point.losses), self.metric)

        numbers = {"slopes": lambda: last().slopes, "size": lambda: last().sizes}
        matrices = Vectors(curvature, lambda: point.curvatures(self.V), shape=(self.V.shape[1],) * 2)
        return Reply(numbers, {"curvature": matrices})


@dataclass(frozen=True, eq=False)
class Diagonal(Question):
    """The diagonal of ∇²f_i where clients have answered."""

    kind = "diagonal"
    vectors = ("diagonal",)

    at: GradientsAt

    def answer(self, clients: Answering) -> Reply:
        """The diagonals, or their weighted sum."""
        point = clients.point(self.at)
        return Reply({}, {"diagonal": Vectors(point.diagonal, point.diagonals)})


@dataclass(frozen=True, eq=False)
class Project(Question):
    """⟨c_i, v⟩ for a direction v that clients can form from what they were sent."""

    kind = "project"
    scalars = ("slope",)
    loss = "slope"

    at: GradientsAt
    direction: Tensor

    def answer(self, clients: Answering) -> Reply:
        """One number a client."""
        slopes = clients.point(self.at).project(self.direction)
        return Reply({"slope": lambda: slopes})


@dataclass(frozen=True, eq=False)
class Optima(Question):
    """min_u f_i(u), which every client solves for by itself."""

    kind = "optima"
    scalars = ("lowest",)
    loss = "lowest"

    def answer(self, clients: Answering) -> Reply:
        """One number a client."""
        return Reply({"lowest": clients.lowest})


@dataclass(frozen=True, eq=False)
class Scores(Question):
    """Loss, accuracy and number of samples of x on the "train" or "test" rows, for the logs: not counted.

    Attributes:
        accuracy: whether the accuracy is asked for; it is NaN otherwise. Silos show few of them.
    """

    kind = "evaluate"
    scalars = ("loss", "accuracy", "count")
    loss = "loss"

    x: Tensor
    split: str = "train"
    accuracy: bool = True

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise unknown("split", self.split, SPLITS)

    def answer(self, clients: Answering) -> Reply:
        """Three numbers a client."""
        loss, right, count = clients.scores(self.x, self.split)
        parts = zip(self.scalars, (loss, right if self.accuracy else right * np.nan, count), strict=True)
        found = {name: torch.from_numpy(np.asarray(part, dtype=np.float64)) for name, part in parts}
        return Reply({name: partial(found.__getitem__, name) for name in found})


@dataclass(frozen=True, eq=False)
class HeldOutLoss(Question):
    """The mean loss on rows that a client leaves out of training, without the regulariser: what `choose` goes by."""

    kind = "held_out_loss"
    scalars: ClassVar[tuple[str, ...]] = ("loss",)
    loss = "loss"

    x: Tensor
    l2: float

    @property
    def sent(self) -> Tensor:
        """The point x."""
        return self.x

    def answer(self, clients: Answering) -> Reply:
        """f_i(u_i) − (l2/2)‖u_i‖² on held-out rows, with u_i = x where there is one model for all."""
        own = clients.own(self.x)
        models = self.x[None] if own is None else own
        regulariser = self.l2 / 2 * models.double().square().sum(1).cpu()
        found = torch.from_numpy(np.asarray(clients.scores(self.x, "test")[0], dtype=np.float64)) - regulariser
        return Reply({"loss": lambda: found})


@dataclass(frozen=True, eq=False)
class JoiningScores(Question):
    """How a silo does on its held-out rows: with a constant answer, alone, and with three models of the run.

    Means of losses and of errors (wrong labels, or the root mean squared error), and their covariances over rows.
    """

    kind = "joining_scores"
    scalars = ("train_rows", "test_rows")

    average: Tensor
    fair: Tensor
    personal: Tensor
    strength: float
    seed: int

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Of losses, then of errors."""
        return {"means": (2, COMPARED), "covariances": (2, COMPARED, COMPARED)}

    def answer(self, clients: Answering) -> Reply:
        """A silo answers from its rows (`deploy/silo/silo.py`)."""
        raise InputError("Clients in this process are compared by sp.joining(...).")
