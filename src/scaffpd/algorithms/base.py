r"""Base classes of algorithms: their declarations, and shared code for starts and local steps.

An algorithm asks only for what its paper sends. The losses in a run's history are looked up with `evaluate`, which is
not counted as traffic; an algorithm that needs them pays for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.steps.base import Schedule
from scaffpd.errors import InputError, count, positive, real, unknown
from scaffpd.federation import Federation, LocalPlan, Vector
from scaffpd.federation.questions import (
    Curvature,
    Diagonal,
    GradientsAt,
    LocalSteps,
    Losses,
    ProximalSteps,
)
from scaffpd.objectives.base import Objective
from scaffpd.privacy.accountant import ReleaseCounts

# what a round's random numbers are for: rows of minibatches, and who takes part
STEPS = 1
CLIENTS = 2
WEIGHTS = ("samples", "uniform")
POSITIVE = ("local_rate", "server_rate", "dual_rate", "local_epochs", "adaptivity")
RANGES: dict[
    str, tuple[str, Callable[[float], bool]]
] = {  # of other settings, where classes of ours declare them
    "mu": ("mu >= 0 and finite", lambda value: 0 <= value < np.inf),
    "q": ("q >= 0 and finite", lambda value: 0 <= value < np.inf),
    "tail": ("0 < tail <= 1", lambda value: 0 < value <= 1),
    "momentum": ("0 <= momentum < 1", lambda value: 0 <= value < 1),
    "second_momentum": ("0 <= second_momentum < 1", lambda value: 0 <= value < 1),
}
COUNTS = ("local_steps", "batch_size", "clients_per_round", "pairs")
# what an algorithm may ask for
GRADIENTS = GradientsAt.kind
LOSSES = Losses.kind
UPDATES = LocalSteps.kind
PROXIMAL = ProximalSteps.kind
CURVATURE = Curvature.kind
DIAGONAL = Diagonal.kind
SIZES = "sizes"  # ‖d_i‖², where vectors are masked


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of an algorithm between two rounds; a checkpoint holds the state and nothing else.

    Attributes:
        x: the model.
        weights: the weight of every client, λ or that of the last step.
        losses: f_i(x); NaN where a method that does not need them has not looked them up.
        rounds: rounds made; one whose step was rejected counts.
        seed: seeds all randomness of the run.
        certificate: the proven gap of (x, weights); +∞ where nothing is proven.
        floor: the part of it that is rounding.
        accepted: whether the round's step was taken.
        every: losses that are for the history alone are looked up once in so many rounds.
    """

    x: Tensor
    weights: Vector
    losses: Vector
    rounds: int = 0
    seed: int
    certificate: float = np.inf
    floor: float = np.inf
    accepted: bool = True
    every: int = field(default=1, metadata={"transient": True})

    @property
    def looked_up(self) -> bool:
        """Return whether losses are computed after this round."""
        return self.rounds % self.every == 0


@dataclass(frozen=True, kw_only=True)
class ServerState(RunState):
    """Adds the rate of local steps.

    Attributes:
        local_rate: η_ℓ, given or automatic.
    """

    local_rate: float


State = TypeVar("State", bound=RunState)


class Algorithm:
    """A frozen dataclass of settings with `init` and `round`: a state in, a state out.

    What the rest of the package has to know about an algorithm are class attributes; `train` needs none of them.

    Attributes:
        published: its name in tables and for `compare`; empty for one that `compare` leaves out unless it is asked for.
        questions: what it asks of clients, such as `{GRADIENTS, UPDATES}`; silos answer nothing else.
        sees_vectors: whether the server looks at vectors of single clients, and not only at sums of them.
        keeps_vectors: whether the server keeps vectors of single clients from round to round.
        asks_losses: whether it asks for all the losses that it needs, so that it runs where clients release no scores.
        proves: whether it can certify its result.
        knobs: rates that `compare` may tune; `automatic` has those that are left out.
        strengths: settings that say how fair the result is, which `compare` may tune as well.
    """

    published: ClassVar[str] = ""
    questions: ClassVar[frozenset[str]] = frozenset()
    sees_vectors: ClassVar[bool] = False
    keeps_vectors: ClassVar[bool] = False
    asks_losses: ClassVar[bool] = False
    proves: ClassVar[bool] = False
    knobs: ClassVar[tuple[str, ...]] = ()
    strengths: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> Any:
        """Return the state before the first round."""
        raise NotImplementedError

    def round(self, federation: Federation, state: Any) -> Any:
        """Make one communication round."""
        raise NotImplementedError

    def resume(self, federation: Federation, state: Any) -> Any:
        """Make a state that was read from disk ready for `round`; most are complete as they are."""
        return state

    def like(self, federation: Federation, state: Any, kind: str) -> Any:
        """Return a state of the kind (a class name) that was read from disk; `state` is that of a new run."""
        return state

    def follow(self, federation: Federation, before: Any, seed: int = 0) -> Any:
        """Return the first state of a run that goes on from another run's last one; `None` starts from its x alone."""
        return None

    def explain(self, state: Any) -> str:
        """Say what a reader of the result should know besides its status."""
        return ""

    def stalled(self, state: Any) -> bool:
        """Return whether no further round would change anything."""
        return False

    def advise(self, state: Any, certificates: Vector) -> str:
        """Say what would help a run that ended without its tolerance; `certificates` are those of all rounds."""
        return ""

    def uncertified(self, state: Any) -> str | None:
        """Say why there is no certificate, or return `None` where there is one."""
        return f"{type(self).__name__} does not measure how far from the optimum it is."

    def automatic(self, federation: Federation) -> dict[str, float]:
        """Return the rates that are used where none are given."""
        return {}

    def releases(self, rounds: int) -> ReleaseCounts:
        """Return the most that a client releases in so many rounds, which the noise of private runs is solved from."""
        raise InputError(
            "how-often-asks",
            f"How often {type(self).__name__} asks a client is not known beforehand: give Private noise= and budget= "
            "instead, or take another method, such as ScaffPD.",
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
        """Return what `compare` runs, by label: the algorithm with those of the settings that it takes.

        One that minimises an objective of its own keeps it, as published.
        """
        takes: dict[str, Any] = {"local_steps": local_steps, "batch_size": batch_size}
        known = {
            name: value
            for name, value in takes.items()
            if name in inspect.signature(cls).parameters
        }
        own = {"objective": objective} if cls.needs_objective() else {}
        return {cls.published or cls.__name__: cls(**own, **known)}


@dataclass(frozen=True, kw_only=True)
class LocalMethod(Algorithm):
    """A method whose clients make local steps with one common rate.

    Args:
        local_steps: how many local steps a client makes per round.
        batch_size: samples per local gradient; `None` uses all of them.
        local_rate: η_ℓ; left out, it is 1/max_i L_i, with the expected smoothness of minibatches in place of L_i.
        schedule: `Schedule(...)`, a factor on η_ℓ in every round.
    """

    questions: ClassVar[frozenset[str]] = frozenset({UPDATES})
    knobs: ClassVar[tuple[str, ...]] = ("local_rate",)

    local_steps: int = 10
    batch_size: int | None = None
    local_rate: float | None = None
    schedule: Schedule | None = None

    def automatic(self, federation: Federation) -> dict[str, float]:
        """Return the rate that is used where none is given."""
        return {"local_rate": safe_rate(federation, self.batch_size)}

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count J local steps in every round, and a loss over all records where losses are asked for."""
        steps = ReleaseCounts.over(self.batch_size, gradients=rounds * self.local_steps)
        return steps + ReleaseCounts(losses=rounds if LOSSES in self.questions else 0)

    def _plan(self, state: ServerState, **more: Any) -> LocalPlan:
        key = (state.seed, state.rounds + 1, STEPS)
        return LocalPlan(
            self.local_steps, self._eta(state), batch_size=self.batch_size, key=key, **more
        )

    def _eta(self, state: ServerState) -> float:
        """Return η_ℓ of the next round."""
        return state.local_rate * (
            1.0 if self.schedule is None else self.schedule(state.rounds + 1)
        )

    def _rate(self, federation: Federation) -> float:
        return (
            safe_rate(federation, self.batch_size)
            if self.local_rate is None
            else float(self.local_rate)
        )


@dataclass(frozen=True, kw_only=True)
class AveragingMethod(LocalMethod):
    """A method that averages the models of the clients, or of a random part of them.

    Args:
        local_steps: see `LocalMethod`.
        batch_size: see `LocalMethod`.
        local_rate: see `LocalMethod`.
        schedule: see `LocalMethod`.
        server_rate: η_g, the factor on the averaged update.
        clients_per_round: how many clients take part in a round, drawn uniformly without replacement; `None` for all.
        weights: "samples" counts a client by its n_i, "uniform" every client alike.
    """

    server_rate: float = 1.0
    clients_per_round: int | None = None
    weights: str = "samples"

    def _first(
        self, federation: Federation, seed: int, x0: Tensor | None, rate: float | None = None
    ) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Return what a state has before the first round, p_i = n_i/n or 1/N among it; and n_i."""
        x, losses, samples = begin(federation, x0)
        check_participation(self, self.clients_per_round, federation)
        prior = client_weights(self.weights, samples)
        rate = self._rate(federation) if rate is None else rate
        known = {
            "x": x,
            "weights": prior,
            "prior": prior,
            "losses": losses,
            "seed": seed,
            "local_rate": rate,
        }
        return known, samples

    def _participants(self, state: ServerState, prior: Vector) -> tuple[NDArray[np.int64], Vector]:
        """Draw who takes part in the next round, and return p_i of those (0 for the others)."""
        everyone = np.arange(len(prior))
        if self.clients_per_round is None:
            return everyone, prior
        random = np.random.default_rng([state.seed, state.rounds + 1, CLIENTS])
        chosen = np.sort(random.choice(everyone, self.clients_per_round, replace=False))
        return chosen, np.where(np.isin(everyone, chosen), prior, 0)


def client_weights(kind: str, samples: NDArray[np.int64]) -> Vector:
    """Return p_i = n_i/n for "samples", 1/N for "uniform"."""
    return samples / samples.sum() if kind == "samples" else np.full(len(samples), 1 / len(samples))


def begin(federation: Federation, x0: Tensor | None) -> tuple[Tensor, Vector, NDArray[np.int64]]:
    """Return x⁰, the losses there, and how many samples every client has."""
    x = federation.start() if x0 is None else x0
    scores = federation.evaluate(x, accuracy=False)
    check_finite(scores.loss, federation.names)
    return x, scores.loss, scores.counts


def moved(
    federation: Federation, state: State, x: Tensor, weights: Vector, **changes: Any
) -> State:
    """Return the state after a round that ended at x."""
    new = replace(
        state,
        x=x,
        losses=np.full(len(weights), np.nan),
        weights=weights,
        rounds=state.rounds + 1,
        **changes,
    )
    return (
        replace(new, losses=federation.evaluate(x, accuracy=False).loss) if new.looked_up else new
    )


def safe_rate(federation: Federation, batch_size: int | None) -> float:
    """Return 1/max_i L_i, one rate for all: clients with rates of their own would not minimise the common loss."""
    return 1 / steepest(federation.constants().expected_smoothness(batch_size))


def steepest(smoothness: Vector) -> float:
    """Return the largest L_i; refuse losses that are all flat."""
    if not smoothness.max() > 0:
        raise InputError(
            "losses-depend-model",
            "The losses do not depend on the model: all features are zero and there is no regulariser.",
        )
    return float(smoothness.max())


def check_settings(method: Any) -> None:
    """Refuse what the arguments with common names cannot be."""
    owner = type(method).__name__
    ours = [
        c for c in type(method).mro() if c.__module__.startswith("scaffpd.") and is_dataclass(c)
    ]
    for item in (own for own in fields(method) if own.init):
        name = item.name
        value = getattr(method, item.name)
        left_out = value is None and getattr(type(method), name, None) is None
        if name in POSITIVE and not left_out:
            positive(owner, name, value)
        if name in COUNTS and not left_out:
            count(owner, name, value)
        if name in RANGES and not left_out and any(item in fields(c) for c in ours):
            words, fits = RANGES[name]
            if not fits(real(owner, name, value)):
                raise InputError("check-settings", f"{owner} needs {words}, got {value!r}.")
        if name == "schedule" and value is not None and not isinstance(value, Schedule):
            raise InputError(
                "schedule-schedule", f"{owner} needs schedule=Schedule(...), got {value!r}."
            )
        if name == "weights" and value not in WEIGHTS:
            raise unknown("weights", value, WEIGHTS)
        if name == "objective" and not isinstance(value, Objective):
            raise InputError(
                "objective-such-chisquare",
                f"{owner} needs an objective such as ChiSquare(rho=0.1), got {value!r}.",
            )


def check_participation(method: Any, clients_per_round: int | None, federation: Federation) -> None:
    """Refuse more clients than there are."""
    n = len(federation.names)
    if clients_per_round is not None and clients_per_round > n:
        raise InputError(
            "clients-per-round",
            f"{type(method).__name__} needs clients_per_round <= {n}, the number of clients, got {clients_per_round}.",
        )


def check_finite(losses: Vector, names: Sequence[str]) -> None:
    """Refuse a start from which nothing can come."""
    if not np.all(np.isfinite(losses)):
        bad = names[int(np.argmin(np.isfinite(losses)))]
        raise InputError(
            "loss-client-finite", f"The loss of client {bad!r} is not finite at the start."
        )
