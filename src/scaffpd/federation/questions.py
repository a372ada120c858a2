r"""Questions of a server to its clients: a class each, with its arithmetic, cost and disclosure.

A question is a value: vectors, plain numbers and plans. It defines how clients answer (`answer`,
for all clients of an oracle at once), which parts of the answer leave a client (`shows`: each by
itself, or only in a sum over clients if sums are masked), and what it costs. The same class answers
in a cohort and at a silo. A class of yours with a `kind` of its own is a question like those here:
docs/extending.md adds one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import unknown
from scaffpd.federation.border import Announced, Shown, each, summed
from scaffpd.federation.plans import Key, LocalPlan, ProximalPlan, Restriction, Vector


def same_point(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)


class SharedSum(NamedTuple):
    """A sum of vectors to which every client has added its share of the noise."""

    parts: Tensor  # what every client adds, (n, d), whole numbers of which only the sum may be seen
    unit: float  # the size of a unit
    public: Tensor  # what is added to the sum, of public numbers

    def total(self, added: Tensor | None = None) -> Tensor:
        """Return the sum, from the parts as somebody else has added them up, or as they are."""
        added = self.parts.sum(0) if added is None else added
        return (added.double() * self.unit).to(self.public) + self.public


@dataclass(frozen=True, eq=False)
class Vectors:
    """Handle on one vector per client, v_i, each where it was computed."""

    sum: Callable[[Tensor], Tensor]  # Σ_i w_i v_i, for the weights of these clients
    each: Callable[[], Tensor]  # the v_i themselves, (n, …)
    squares: Callable[[], Tensor] | None = None  # ‖v_i‖² per client, if cheaper than the v_i
    shape: tuple[int, ...] = ()  # shape of a v_i, if it is not that of x
    # w → each client's noisy addend of the sum, if clients share the noise
    addends: Callable[..., SharedSum] | None = None
    # whether `sum` takes weights in double precision, for any format of x
    double_weights: bool = False

    @classmethod
    def of(cls, made: Displacements, squares: Callable[[], Tensor] | None = None) -> Vectors:
        """Make a handle on the vectors of a point or of local steps."""
        fine = getattr(made, "fine", None) is not None
        return cls(made.sum, made.each, squares, (), getattr(made, "shares", None), fine)

    def norms(self) -> Tensor:
        return self.each().square().sum(1) if self.squares is None else self.squares()


@dataclass(frozen=True)
class Reply:
    """Answers of some clients."""

    # numbers of every client, (n, …), by name, computed when called
    numbers: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    # handles on vectors that stay with the clients until a sum asks for them
    vectors: Mapping[str, Vectors] = field(default_factory=dict)


class EvaluatedPoint(Protocol):
    """Losses, gradients and second derivatives of all clients at one x."""

    losses: Tensor

    def sum(self, weights: Tensor) -> Tensor: ...  # Σ_i w_i c_i
    def norms(self) -> Tensor: ...  # ‖c_i‖² per client
    def each(self) -> Tensor: ...  # the c_i themselves, (N, d)
    # slopes, curvature and norms along V, (d, k), for w and the diagonal D
    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Restriction[Tensor]: ...
    def curvatures(self, V: Tensor) -> Tensor: ...  # every client's VᵀH_iV, (N, k, k)
    def hessian(self, weights: Tensor) -> Tensor: ...  # Σ_i w_i H_i, (d, d), in double precision
    # Σ_i w_i diag H_i; raise `InputError` if it is not available
    def diagonal(self, weights: Tensor) -> Tensor: ...
    # every client's diag H_i, (N, d); raise `InputError` if it is not available
    def diagonals(self) -> Tensor: ...
    # ρ_i of `Widths`, (N,); infinite if unknown
    def widths(self, root: Tensor, weights: Tensor | None) -> Tensor: ...
    # Bound the rounding errors of L_i and of c_i (its norm); infinite if unknown
    def rounding(self) -> tuple[Tensor, Tensor]: ...


class Displacements(Protocol):
    """d_i = x − u_{i,J} of all clients after one batch of local steps."""

    def sum(self, weights: Tensor) -> Tensor: ...  # Σ_i w_i d_i
    def each(self) -> Tensor: ...  # the d_i themselves, (N, d)


class OwnModes(Protocol):
    """Own models u_i of all clients around one x, for `ModesAt` and `ModeSpread`."""

    def modes(self) -> dict[str, Vectors]: ...  # minima, gradients and Hessians as functions of x
    # squared distances to x and their degrees of freedom
    def spread(self, C: Tensor, step: Tensor) -> Vectors: ...
    def dispersed(self, grid: Tensor) -> Vectors: ...  # log likelihoods of counts
    # L u_i, and the variances of its parts
    def own(self, C: Tensor, step: Tensor, L: Tensor) -> Vectors: ...
    # products of slopes and Hessians
    def information(self, C: Tensor, step: Tensor, groups: Tensor) -> Vectors: ...
    # squares of them, for `ModeSquares`
    def squares(self, at: Question) -> Vectors: ...


class ClientSide(Protocol):
    """Clients that answer a question: their numerics, and what they remember."""

    # f_i(x) without the gradients
    def losses(self, x: Tensor, batch_size: int | None, key: Key) -> Tensor: ...
    # Evaluate a point, once for as long as the question is in use
    def point(self, at: GradientsAt) -> EvaluatedPoint: ...
    def local_updates(
        self, x: Tensor, at: GradientsAt | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements: ...  # Take local steps from x
    def proximal_steps(
        self, at: GradientsAt, correction: Tensor, plan: ProximalPlan
    ) -> Displacements: ...  # Solve the clients' local models at the answered point
    # Solve for the clients' own models, once for as long as the question is in use
    def modes(self, at: Question) -> OwnModes: ...
    def products(self) -> Tensor: ...  # [A_i 1]ᵀ[A_i 1] of every client's rows, (N, k + 1, k + 1)
    # loss, score and number of samples on the "train" or "test" rows
    def scores(self, x: Tensor, split: str) -> tuple[Vector, Vector, NDArray[np.int64]]: ...


Shapes = dict[str, tuple[int, ...]]  # of parts of an answer
SPLITS = ("train", "test")
REACH = 1e6  # the largest width: what is farther proves nothing
# classes of widths, each a third wider than the one below it: a sum counts who is in which, and has
# the largest for any number of clients, in whole numbers that masked sums have room for
WIDTHS = np.geomspace(1e-2, REACH, 64)
UNBOUNDED = 1e12  # of an error that nobody knows: nothing is proven then
LOSS = "your loss at every point that the method visits"


@dataclass(frozen=True, eq=False)
class Question(Announced):
    """Question to all clients at once."""

    # parts that are symmetric matrices, of which half is counted
    symmetric: ClassVar[tuple[str, ...]] = ()

    def shapes(self, d: int) -> Shapes:
        """Return the shapes of the parts of a client's answer besides `scalars`; d is that of x."""
        return dict.fromkeys(self.vectors, (d,))

    def revealed(self, d: int) -> Shapes:
        """Return the shapes of the parts that every client reveals with its answer."""
        shapes = {part: own for part, own in self.shapes(d).items() if part not in self.vectors}
        return Shapes(dict.fromkeys(self.scalars, ())) | shapes

    def answer(self, clients: ClientSide) -> Reply:
        """Answer for all clients."""
        raise NotImplementedError

    @property
    def sent(self) -> Tensor | None:
        """Return x, if the question has one; it is sent to clients that do not have it yet."""
        x = getattr(self, "x", None)
        return x if isinstance(x, Tensor) else None

    def down(self, d: int) -> int:
        """Return how many numbers go down to a client besides that point."""
        return 0

    def up(self, d: int, masked: bool = False) -> int:
        """Count the numbers that come up from a client; masked vectors count with their sums."""
        total = sum(map(math.prod, self.revealed(d).values()))
        for part, shape in self.shapes(d).items():
            if part in self.vectors and not masked:
                half = part in self.symmetric
                total += shape[0] * (shape[0] + 1) // 2 if half else math.prod(shape)
        return total


@dataclass(frozen=True, eq=False)
class Losses(Question):
    """Losses L_i = f_i(x), over all samples or over a seeded minibatch."""

    kind = "losses"
    shows: ClassVar[tuple[Shown, ...]] = (each("loss", LOSS),)

    x: Tensor
    batch_size: int | None = None
    key: Key = (0,)

    def answer(self, clients: ClientSide) -> Reply:
        losses = clients.losses(self.x, self.batch_size, self.key)
        return Reply({"loss": lambda: losses})


@dataclass(frozen=True, eq=False)
class GradientsAt(Losses):
    """Losses L_i, gradients c_i = ∇f_i(x), and bounds on their rounding errors."""

    kind = "gradients"
    shows = (
        each("loss", LOSS),
        each("norm", "the length of your gradient", extra=True),
        summed("c", "the weighted sum of gradients"),
        summed("errors", "bounds on the rounding errors of losses and gradients", extra=True),
    )

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"c": (d,), "errors": (2,)}

    def answer(self, clients: ClientSide) -> Reply:
        point = clients.point(self)

        rounding = cache(point.rounding)

        def errors() -> Tensor:
            return torch.stack([part.double() for part in rounding()], 1).cpu()

        def finite() -> Tensor:
            return errors().nan_to_num(UNBOUNDED, UNBOUNDED).clamp(max=UNBOUNDED)

        bounds = Vectors(lambda w: w.cpu().double() @ finite(), finite, shape=(2,))
        numbers = {"loss": lambda: point.losses, "errors": errors}
        return Reply(numbers, {"c": Vectors.of(point, point.norms), "errors": bounds})


@dataclass(frozen=True, eq=False)
class LocalSteps(Question):
    """Local steps: d_i = x − u_{i,J} after J of them from x, and at the plan's snapshot."""

    kind = "local_updates"
    shows = (
        each("norm", "the length of your update in every round", extra=True),
        summed("d", "the weighted sum of local updates"),
        summed("snapshot", "the weighted sum of updates after some of the steps", extra=True),
    )

    x: Tensor
    # the point at which c_i was answered, or the clients' stored c_i, (n, d); `None` leaves c_i out
    at: GradientsAt | Tensor | None
    correction: Tensor | None  # c; `None` leaves it out
    plan: LocalPlan

    def shapes(self, d: int) -> Shapes:
        return dict.fromkeys(self.vectors[: 1 if self.plan.snapshot is None else 2], (d,))

    @property
    def sent(self) -> Tensor | None:
        """Return x, unless clients have just answered there."""
        known = isinstance(self.at, GradientsAt) and same_point(self.at.x, self.x)
        return None if known else self.x

    def down(self, d: int) -> int:
        return 0 if self.correction is None else d

    def answer(self, clients: ClientSide) -> Reply:
        """Take all local steps; repeat the first t' for the snapshot, with the same minibatches."""

        def work(steps: int) -> Displacements:
            plan = replace(self.plan, steps=steps)
            return clients.local_updates(self.x, self.at, self.correction, plan)

        parts = {"d": Vectors.of(work(self.plan.steps))}
        if self.plan.snapshot is not None:
            parts["snapshot"] = Vectors.of(work(self.plan.snapshot))
        return Reply({}, parts)


@dataclass(frozen=True, eq=False)
class ProximalSteps(Question):
    """Proximal steps (`ProximalPlan`), with H_i = ∇²f_i at the answered point."""

    kind = "proximal_steps"
    shows = (summed("d", "the weighted sum of proximal steps"),)

    at: GradientsAt
    correction: Tensor
    plan: ProximalPlan

    def down(self, d: int) -> int:
        return d + 1

    def answer(self, clients: ClientSide) -> Reply:
        done = clients.proximal_steps(self.at, self.correction, self.plan)
        return Reply({}, {"d": Vectors(done.sum, done.each)})


@dataclass(frozen=True, eq=False)
class Curvature(Question):
    """Losses to second order in the span of V (`Restriction`)."""

    kind = "curvature"
    shows = (
        each("slopes", "your gradient along directions that the server chooses"),
        each("size", "the length of your gradient"),
        summed("curvature", "the weighted sum of curvatures along these directions"),
    )
    symmetric = ("curvature",)

    at: GradientsAt
    V: Tensor
    metric: Tensor

    def shapes(self, d: int) -> Shapes:
        k = self.V.shape[1]
        return {"slopes": (k,), "curvature": (k, k)}

    def down(self, d: int) -> int:
        """Count one vector: clients lack only the last column of V."""
        return d

    def answer(self, clients: ClientSide) -> Reply:
        """Answer in one pass over the data, which the sum of curvatures makes if it comes first."""
        point = clients.point(self.at)
        seen = list[Restriction[Tensor]]()

        def curvature(weights: Tensor) -> Tensor:
            seen[:] = [point.restriction(self.V, weights, self.metric)]
            return seen[0].curvature

        def last() -> Restriction[Tensor]:
            if not seen:
                curvature(torch.zeros_like(point.losses))
            return seen[0]

        numbers = {"slopes": lambda: last().slopes, "size": lambda: last().sizes}
        each = lambda: point.curvatures(self.V)
        return Reply(numbers, {"curvature": Vectors(curvature, each, shape=(self.V.shape[1],) * 2)})


@dataclass(frozen=True, eq=False)
class Hessian(Question):
    """Second derivatives H_i = ∇²f_i at the answered point, (d, d)."""

    kind = "hessian"
    shows = (summed("hessian", "the weighted sum of Hessians", tables=True),)
    symmetric = ("hessian",)

    at: GradientsAt

    def shapes(self, d: int) -> Shapes:
        return {"hessian": (d, d)}

    def answer(self, clients: ClientSide) -> Reply:
        point = clients.point(self.at)
        x = self.at.x
        each = lambda: point.curvatures(torch.eye(len(x)).to(x)).double()
        return Reply({}, {"hessian": Vectors(point.hessian, each, None, (len(x),) * 2, None, True)})


@dataclass(frozen=True, eq=False)
class Widths(Question):
    """How far rows reach where there is little curvature: ρ_i = R max ‖v‖ in the norm of (RRᵀ)⁻¹
    (`algorithms/concordant.py`), as the class of `WIDTHS` that it is in.
    """

    kind = "widths"
    shows = (summed("class", "how far rows reach where there is little curvature, by classes"),)

    at: GradientsAt
    root: Tensor  # R, lower triangular
    weights: Tensor | None  # λ_i, without which only one model for all has an answer

    def shapes(self, d: int) -> Shapes:
        return {"class": (len(WIDTHS) + 1,)}

    def down(self, d: int) -> int:
        return d * (d + 1) // 2

    def answer(self, clients: ClientSide) -> Reply:
        found = clients.point(self.at).widths(self.root, self.weights).double().cpu()
        classes = torch.searchsorted(torch.from_numpy(WIDTHS), found.nan_to_num(torch.inf))
        marks = torch.nn.functional.one_hot(classes, len(WIDTHS) + 1).double()
        return Reply(
            {},
            {
                "class": Vectors(
                    lambda w: w.cpu().double() @ marks,
                    lambda: marks,
                    shape=(len(WIDTHS) + 1,),
                    double_weights=True,
                )
            },
        )


@dataclass(frozen=True, eq=False)
class ColumnProducts(Question):
    """Sums over rows of the products of every two columns; the last one is a column of ones.

    They say what Hessians of logistic losses say at zero, and with the same weights.
    """

    kind = "products"
    shows = (summed("products", "sums over rows of the products of two columns", tables=True),)
    symmetric = ("products",)

    x: Tensor  # zero
    features: int

    def shapes(self, d: int) -> Shapes:
        return {"products": (self.features + 1,) * 2}

    def answer(self, clients: ClientSide) -> Reply:
        each = clients.products()

        def total(weights: Tensor) -> Tensor:
            found: Tensor = torch.tensordot(weights.to(each), each, 1)
            return found

        shape = each.shape[1:]
        return Reply({}, {"products": Vectors(total, lambda: each, None, shape, None, True)})


@dataclass(frozen=True, eq=False)
class Diagonal(Question):
    """Diagonal of ∇²f_i at the answered point."""

    kind = "diagonal"
    shows = (summed("diagonal", "the weighted sum of Hessians' diagonals"),)

    at: GradientsAt

    def answer(self, clients: ClientSide) -> Reply:
        point = clients.point(self.at)
        return Reply({}, {"diagonal": Vectors(point.diagonal, point.diagonals)})


@dataclass(frozen=True, eq=False)
class Scores(Question):
    """Loss, score and number of samples on "train" or "test" rows, for the logs: not counted."""

    kind = "evaluate"
    shows = (
        each("loss", "your loss"),
        each("score", "your score", extra=True, range=(0.0, 1.0)),
    )
    sent = None

    x: Tensor
    split: str = "train"
    score: bool = True  # whether to compute the score; else it is NaN. Silos reveal few of them.

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise unknown("split", self.split, SPLITS)

    def revealed(self, d: int) -> Shapes:
        return super().revealed(d) | ({"score": ()} if self.score else {})

    def answer(self, clients: ClientSide) -> Reply:
        loss, right, count = clients.scores(self.x, self.split)
        parts = {"loss": loss, "count": count} | ({"score": right} if self.score else {})
        found = {name: np.asarray(part, dtype=np.float64) for name, part in parts.items()}
        return Reply({name: torch.from_numpy(part).clone for name, part in found.items()})


@dataclass(frozen=True, eq=False)
class Stored(Question):
    """Vectors that clients store from round to round (`Memory`), which a sum asks for."""

    kind = "memory"
    shows = (summed("memory", "the weighted sum of vectors that silos store"),)
