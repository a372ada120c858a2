r"""What algorithms share: what they declare, their states, and the common parts of local methods.

An algorithm asks only for what its paper sends. The losses in a run's history are looked up with
`evaluate`, which is not counted as traffic; an algorithm that needs losses asks for them, and pays.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, Range, count, positive, ranged, unknown
from scaffpd.federation import Federation, LocalPlan, Vector
from scaffpd.federation.border import shown
from scaffpd.federation.own_weights import OwnSums, OwnWeights
from scaffpd.federation.plans import ReleaseCounts
from scaffpd.federation.questions import (
    ColumnProducts,
    Curvature,
    Diagonal,
    GradientsAt,
    Hessian,
    LocalSteps,
    Losses,
    ProximalSteps,
    Stored,
    Widths,
)
from scaffpd.objectives.base import Objective

# The purpose of random numbers is the last part of their key, so that the draws of one purpose do
# not change when a method draws more for another: rows of minibatches, and who takes part.
STEPS = 1
CLIENTS = 2

# What an algorithm may ask for (`Algorithm.questions`).
GRADIENTS = GradientsAt.kind
LOSSES = Losses.kind
UPDATES = LocalSteps.kind
PROXIMAL = ProximalSteps.kind
CURVATURE = Curvature.kind
DIAGONAL = Diagonal.kind
HESSIAN = Hessian.kind
WIDTHS = Widths.kind
OWN_WEIGHTS = OwnWeights.kind
OWN_SUMS = OwnSums.kind
PRODUCTS = ColumnProducts.kind
STORED = Stored.kind
NORMS = f"{GRADIENTS}.norm"  # ‖c_i‖²
ERRORS = f"{GRADIENTS}.errors"  # bounds on rounding, for a certificate
SIZES = f"{UPDATES}.norm"  # ‖d_i‖²
SNAPSHOT = f"{UPDATES}.snapshot"

# What an algorithm may need of a federation (`Algorithm.needs`).
CONVEX = "losses that are known to be convex"
EXACT = "losses and gradients of all rows, without noise"
SLOPES = "every client's gradient along directions that the server chooses"
VECTORS = "every client's own vectors, at the server"
MATRICES = "sums of d² numbers"
MEMORY = "vectors that clients store from round to round"

WEIGHTS = ("samples", "uniform")
POSITIVE = ("local_rate", "server_rate", "dual_rate")
COUNTS = ("local_steps", "batch_size", "clients_per_round", "pairs")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of an algorithm between two rounds; a checkpoint holds the state and nothing else."""

    shows_losses: ClassVar[bool] = True  # whether `losses` and `weights` are known to anybody

    x: Tensor  # the model
    weights: Vector  # the weight of every client, λ or that of the last step
    losses: Vector  # f_i(x); NaN where a method that does not need them has not looked them up
    rounds: int = 0  # rounds made; one whose step was rejected counts
    seed: int  # seeds all randomness of the run
    certificate: float = np.inf  # the proven gap of (x, weights); +∞ where nothing is proven
    floor: float = np.inf  # the part of it that is rounding
    accepted: bool = True  # whether the round's step was taken
    # whether losses that are for the history alone are looked up after every round
    looks: bool = field(default=True, metadata={"transient": True})


if TYPE_CHECKING:  # of what type checkers bring along: Python has defaults from 3.13 on
    import typing_extensions

    # A bare `Algorithm` is an algorithm with any state.
    S = typing_extensions.TypeVar("S", bound=RunState, default=Any)
else:
    S = TypeVar("S", bound=RunState)


class Algorithm(Generic[S]):
    """A frozen dataclass of settings with `init` and `round`: a state in, a state out.

    What the rest of the package has to know about an algorithm are class attributes.

    Attributes:
        published: its name in tables and for `compare`, which leaves out those without one.
        questions: what it may ask of clients, such as `{GRADIENTS, UPDATES}`; silos answer
            no other.
        needs: what it needs of a federation besides, such as `{CONVEX, VECTORS}`.
        asks_losses: whether it asks for all losses that it needs, and runs without scores.
        proves: whether it can certify its result.
        knobs: rates that `compare` may tune; `automatic` has those that are left out.
        strengths: settings that say how fair the result is, which `compare` may tune as well.
        tolerance: by what share of its size a point may differ between the processors of silos.
        ranges: of settings that only it has.
    """

    published: ClassVar[str] = ""
    questions: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()
    asks_losses: ClassVar[bool] = False
    proves: ClassVar[bool] = False
    knobs: ClassVar[tuple[str, ...]] = ()
    strengths: ClassVar[tuple[str, ...]] = ()
    tolerance: ClassVar[float] = 1e-6
    ranges: ClassVar[tuple[tuple[str, Range], ...]] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def positive(self) -> bool:
        """Whether losses must not fall below zero."""
        return bool(getattr(getattr(self, "objective", None), "positive", False))

    def asks(self, convex: bool = True) -> frozenset[str]:
        """Return which of its `questions` it asks with its settings, about convex losses or not."""
        return self.questions

    @classmethod
    def simulated(cls, asked: frozenset[str] | None = None) -> frozenset[str]:
        """Return what it asks that no silo shows: numbers of a single client but its loss."""
        names = cls.questions if asked is None else asked
        single = {
            name for name in names for one in shown([name]) if one.each and one.part != "loss"
        }
        return frozenset(single)

    def measures(self, convex: bool = True) -> bool:
        """Return whether its server needs L_i, which silos keep: they agree on a rate instead."""
        return False

    def choice(self, federation: Federation) -> Algorithm:
        """Return the algorithm to run on this federation: itself, unless it stands for several."""
        return self

    def reason(self, federation: Federation) -> str:
        """Say which algorithm that is and why, where it is not itself."""
        return ""

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> S:
        """Return the state before the first round."""
        raise NotImplementedError

    def round(self, federation: Federation, state: S) -> S:
        """Make one communication round."""
        raise NotImplementedError

    def resume(self, federation: Federation, state: S) -> S:
        """Make a state that was read from disk ready for `round`; most are complete as they are."""
        return state

    def follow(self, federation: Federation, before: RunState, seed: int = 0) -> S | None:
        """Return the first state of a run that goes on from another's last; `None`: from its x."""
        return None

    def stalled(self, state: S) -> bool:
        """Return whether no further round would change anything."""
        return False

    def advise(self, state: S) -> str:
        """Say what would help a run that ended without its tolerance."""
        return ""

    def uncertified(self, state: S) -> str | None:
        """Say why there is no certificate, or return `None` where there is one."""
        return f"{type(self).__name__} does not measure how far from the optimum it is."

    def automatic(self, federation: Federation) -> dict[str, float]:
        """Return the rates that are used where none are given."""
        return {}

    def releases(self, rounds: int) -> ReleaseCounts:
        """Return the most that a client releases in so many rounds, for private runs."""
        raise InputError(
            "releases-unknown",
            f"How often {type(self).__name__} asks a client is not known beforehand: give Private "
            "noise= and budget= instead, or use another method, such as ScaffPD.",
        )

    @classmethod
    def needs_objective(cls) -> bool:
        """Return whether it has to be given an objective; others have one of their own."""
        objective = inspect.signature(cls).parameters.get("objective")
        return objective is not None and objective.default is inspect.Parameter.empty

    @classmethod
    def usual(
        cls, objective: Objective, local_steps: int, batch_size: int | None
    ) -> dict[str, Self]:
        """Return what `compare` runs, by label: the algorithm with the settings that it takes."""
        takes = {"local_steps": local_steps, "batch_size": batch_size}
        known = inspect.signature(cls).parameters
        given: dict[str, object] = {name: one for name, one in takes.items() if name in known}
        own = {"objective": objective} if cls.needs_objective() else {}
        return {cls.published or cls.__name__: cls(**own, **given)}


@dataclass(frozen=True, kw_only=True)
class ServerState(RunState):
    """Adds η_ℓ of local steps, given or automatic."""

    local_rate: float


@dataclass(frozen=True, kw_only=True)
class AveragingState(ServerState):
    """Adds p_i, what clients count for."""

    prior: Vector


Local = TypeVar("Local", bound=ServerState)
Averaged = TypeVar("Averaged", bound=AveragingState)
Moved = TypeVar("Moved", bound=RunState)


@dataclass(frozen=True, kw_only=True)
class LocalMethod(Algorithm[Local], Generic[Local]):
    """A method whose clients make local steps with one common rate.

    Args:
        local_steps: how many local steps a client makes per round.
        batch_size: samples per local gradient; `None` uses all of them.
        local_rate: η_ℓ; left out, it is 1/max_i L_i, with the expected smoothness of minibatches in
            place of L_i.
    """

    questions = frozenset({UPDATES})
    knobs: ClassVar[tuple[str, ...]] = ("local_rate",)

    local_steps: int = 10
    batch_size: int | None = None
    local_rate: float | None = None

    def automatic(self, federation: Federation) -> dict[str, float]:
        return {"local_rate": self._safe_rate(federation)}

    def measures(self, convex: bool = True) -> bool:
        return self.local_rate is None

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count J local steps a round, and a loss of all rows where losses are asked for."""
        steps = ReleaseCounts.over(self.batch_size, gradients=rounds * self.local_steps)
        return steps + ReleaseCounts(losses=rounds if LOSSES in self.questions else 0)

    def _plan(self, state: Local) -> LocalPlan:
        key = (state.seed, state.rounds + 1, STEPS)
        return LocalPlan(self.local_steps, state.local_rate, batch_size=self.batch_size, key=key)

    def _rate(self, federation: Federation) -> float:
        if self.local_rate is not None:
            return float(self.local_rate)
        return self._safe_rate(federation)

    def _safe_rate(self, federation: Federation) -> float:
        """Return 1/max_i L_i: with rates of their own, clients would not minimise the mean."""
        return 1 / steepest(federation.constants().expected_smoothness(self.batch_size))


@dataclass(frozen=True, kw_only=True)
class AveragingMethod(LocalMethod[Averaged], Generic[Averaged]):
    """A method that averages the models of the clients, or of a random part of them.

    The other arguments are those of `LocalMethod`.

    Args:
        server_rate: η_g, the factor on the averaged update.
        clients_per_round: how many clients take part in a round, drawn uniformly without
            replacement; `None` for all.
        weights: "samples" counts a client by its n_i, "uniform" every client alike.
    """

    server_rate: float = 1.0
    clients_per_round: int | None = None
    weights: str = "samples"

    def _begin(self, federation: Federation, seed: int, x0: Tensor | None) -> AveragingState:
        check_participation(self, self.clients_per_round, federation)
        x, losses, samples = begin(federation, x0)
        prior = client_weights(self.weights, samples)
        rate = self._rate(federation)
        return AveragingState(
            x=x, weights=prior, prior=prior, losses=losses, seed=seed, local_rate=rate
        )

    def _participants(self, state: AveragingState) -> tuple[NDArray[np.int64], Vector]:
        """Draw who takes part in the next round, and return p_i of those (0 for the others)."""
        everyone = np.arange(len(state.prior))
        if self.clients_per_round is None:
            return everyone, state.prior
        random = np.random.default_rng([state.seed, state.rounds + 1, CLIENTS])
        chosen = np.sort(random.choice(everyone, self.clients_per_round, replace=False))
        return chosen, np.where(np.isin(everyone, chosen), state.prior, 0)


def client_weights(kind: str, samples: NDArray[np.int64]) -> Vector:
    return samples / samples.sum() if kind == "samples" else np.full(len(samples), 1 / len(samples))


def begin(federation: Federation, x0: Tensor | None) -> tuple[Tensor, Vector, NDArray[np.int64]]:
    """Return x⁰, the losses there, and how many samples every client has.

    Silos show no loss for the history alone: it is NaN, and they count as they have agreed.
    """
    x = federation.start() if x0 is None else x0
    if not federation.channel.here:
        samples = federation.constants().samples
        return x, np.full(len(samples), np.nan), samples
    scores = federation.evaluate(x, score=False)
    check_finite(scores.loss, federation.names)
    return x, scores.loss, scores.counts


def moved(federation: Federation, state: Moved, x: Tensor, weights: Vector) -> Moved:
    """Return the state after a round that ended at x, with its losses if they are looked up."""
    unknown_losses = np.full(len(weights), np.nan)
    new = replace(state, x=x, losses=unknown_losses, weights=weights, rounds=state.rounds + 1)
    if not new.looks:
        return new
    return replace(new, losses=federation.evaluate(x, score=False).loss)


def steepest(smoothness: Vector) -> float:
    """Return the largest L_i; refuse losses that are all flat, and curvatures that silos keep."""
    if np.isnan(smoothness).any():
        raise InputError(
            "curvature-stays-at-silos",
            "How curved its loss is stays at every silo: agree on training.rate.",
        )
    if not smoothness.max() > 0:
        raise InputError(
            "flat-losses",
            "The losses do not depend on the model: all features are zero and there is no "
            "regulariser.",
        )
    return float(smoothness.max())


def check_settings(method: Algorithm) -> None:
    """Refuse what the arguments with common names cannot be; `None` is one only by default."""
    owner = type(method).__name__
    for item in fields(method):  # type: ignore[arg-type]  # every algorithm is a dataclass
        name = item.name
        value = getattr(method, name)
        if value is None and item.default is None:
            continue
        if name in POSITIVE:
            positive(owner, name, value)
        if name in COUNTS:
            count(owner, name, value)
        for setting, where in method.ranges:
            if setting == name:
                ranged(owner, name, value, where)
        if name == "weights" and value not in WEIGHTS:
            raise unknown("weights", value, WEIGHTS)
        if name == "objective" and not isinstance(value, Objective):
            raise InputError(
                "not-an-objective",
                f"{owner} needs an objective such as ChiSquare(rho=0.1), got {value!r}.",
            )


def check_participation(method: Algorithm, chosen: int | None, federation: Federation) -> None:
    n = len(federation.names)
    if chosen is not None and chosen > n:
        raise InputError(
            "too-many-clients-per-round",
            f"{type(method).__name__} needs clients_per_round <= {n}, the number of clients, "
            f"got {chosen}.",
        )


def check_finite(losses: Vector, names: Sequence[str]) -> None:
    if not np.all(np.isfinite(losses)):
        bad = names[int(np.argmin(np.isfinite(losses)))]
        raise InputError(
            "start-not-finite", f"The loss of client {bad!r} is not finite at the start."
        )
