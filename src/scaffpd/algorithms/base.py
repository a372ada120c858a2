r"""What the methods of the zoo share: one name for one thing, the clients of a round, and states that a run is made of.

A method asks only for what its paper sends. The losses in a run's history are looked up with `evaluate`, which is not
counted as traffic; a method that needs them pays for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, count, positive, unknown
from scaffpd.federation import Federation, Gradients, LocalPlan, Vector
from scaffpd.objectives.base import Objective
from scaffpd.objectives.inputs import LARGEST

STEPS, CLIENTS = 1, 2  # what a round's random numbers are for: rows of minibatches, and who takes part
WEIGHTS = ("samples", "uniform")
POSITIVE = ("local_rate", "server_rate", "dual_rate")
COUNTS = ("local_steps", "batch_size", "clients_per_round")


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """What every method has between two rounds.

    Attributes:
        x: the model.
        weights: the weight of every client in the last step.
        losses: f_i(x), for the history.
        rounds: rounds made.
        seed: seeds all randomness of the run.
        local_rate: η_ℓ, given or automatic.
        certificate: +∞: nothing is proven.
        floor: +∞ as well.
        accepted: every step is taken.
    """

    x: Tensor
    weights: Vector
    losses: Vector
    rounds: int
    seed: int
    local_rate: float
    certificate: float = np.inf
    floor: float = np.inf
    accepted: bool = True


State = TypeVar("State", bound=ServerState)


@dataclass(frozen=True, kw_only=True)
class LocalMethod:
    """A method whose clients make local steps with one common rate.

    Args:
        local_steps: how many local steps a client makes per round.
        batch_size: samples per local gradient; `None` uses all of them.
        local_rate: η_ℓ; left out, it is 1/max_i L_i, with the expected smoothness of minibatches in place of L_i.
    """

    knobs: ClassVar[tuple[str, ...]] = ("local_rate",)

    local_steps: int = 10
    batch_size: int | None = None
    local_rate: float | None = None

    def __post_init__(self) -> None:
        check_settings(self)

    def automatic(self, federation: Federation) -> dict[str, float]:
        """The rate that is used where none is given."""
        return {"local_rate": safe_rate(federation, self.batch_size)}

    def resume(self, federation: Federation, state: State) -> State:
        """A state read from disk is complete."""
        return state

    def uncertified(self, state: ServerState) -> str | None:
        """The clients' gradients at the model that is returned are not asked for."""
        return f"{type(self).__name__} does not measure how far from the optimum it is."

    def _plan(self, state: ServerState, **more: Any) -> LocalPlan:
        key = (state.seed, state.rounds + 1, STEPS)
        return LocalPlan(self.local_steps, state.local_rate, batch_size=self.batch_size, key=key, **more)

    def _rate(self, federation: Federation) -> float:
        return safe_rate(federation, self.batch_size) if self.local_rate is None else float(self.local_rate)


@dataclass(frozen=True, kw_only=True)
class AveragingMethod(LocalMethod):
    """A method that averages the models of the clients, or of a random part of them.

    Args:
        local_steps: see `LocalMethod`.
        batch_size: see `LocalMethod`.
        local_rate: see `LocalMethod`.
        server_rate: η_g, the factor on the averaged update.
        clients_per_round: how many clients take part in a round, drawn uniformly without replacement; `None` for all.
        weights: "samples" counts a client by its n_i, "uniform" every client alike.
    """

    server_rate: float = 1.0
    clients_per_round: int | None = None
    weights: str = "samples"

    def _prior(self, federation: Federation, samples: NDArray[np.int64]) -> Vector:
        """p_i = n_i/n or 1/N."""
        check_participation(self, self.clients_per_round, federation)
        return client_weights(self.weights, samples)

    def _participants(self, state: ServerState, prior: Vector) -> tuple[NDArray[np.int64], Vector]:
        """Who takes part in the next round, and p_i of those (0 for the others)."""
        everyone = np.arange(len(prior))
        if self.clients_per_round is None:
            return everyone, prior
        random = np.random.default_rng([state.seed, state.rounds + 1, CLIENTS])
        chosen = np.sort(random.choice(everyone, self.clients_per_round, replace=False))
        return chosen, np.where(np.isin(everyone, chosen), prior, 0)


def client_weights(kind: str, samples: NDArray[np.int64]) -> Vector:
    """p_i = n_i/n for "samples", 1/N for "uniform"."""
    return samples / samples.sum() if kind == "samples" else np.full(len(samples), 1 / len(samples))


def begin(federation: Federation, x0: Tensor | None) -> tuple[Tensor, Vector, NDArray[np.int64]]:
    """x⁰, the losses there, and how many samples everybody has."""
    x = federation.start() if x0 is None else x0
    scores = federation.evaluate(x)
    check_finite(scores.loss, federation.names)
    return x, scores.loss, scores.counts


def moved(federation: Federation, state: State, x: Tensor, weights: Vector, **changes: Any) -> State:
    """The state after a round that ended at x."""
    losses = federation.evaluate(x).loss
    return replace(state, x=x, losses=losses, weights=weights, rounds=state.rounds + 1, **changes)


def safe_rate(federation: Federation, batch_size: int | None) -> float:
    """1/max_i L_i: common to all clients, for clients with rates of their own would not minimise the common loss."""
    return 1 / steepest(federation.constants().expected_smoothness(batch_size))


def steepest(smoothness: Vector) -> float:
    """The largest L_i, or a sentence where all losses are flat."""
    if not smoothness.max() > 0:
        raise InputError("The losses do not depend on the model: all features are zero and there is no regulariser.")
    return float(smoothness.max())


def safe_dual_rate(objective: Objective, at: Gradients, losses: Vector, primal_rate: float) -> float:
    """σ with σ τ K² < 1/2, for K² ≥ ‖∂(∇_x Φ)/∂λ‖² at x⁰: on the simplex only differences of gradients matter.

    K² = Σ ‖c_i‖² − N‖c̄‖² there, and Σ ‖c_i‖² elsewhere: N scalars and a sum.
    """
    n = len(losses)
    coupling = float(at.norms().sum())
    if objective.simplex:
        mean = float(at.sum(np.full(n, 1 / n)).norm())
        coupling = max(coupling - n * mean**2, 1e-12 * coupling)
    return 0.45 / (coupling * primal_rate) if coupling * primal_rate > 0 else 1.0


def dual_step(objective: Objective, s: Vector, weights: Vector, rate: float) -> Vector:
    """prox_σ(s, λ); λ itself where the losses are about to end the run."""
    sane = bool(np.all(np.abs(s) < LARGEST / 4))
    return objective.prox(s, weights, rate) if sane else weights


def check_objective(method: Any, objective: Any) -> None:
    """Refuse what is no objective."""
    if not isinstance(objective, Objective):
        name = type(method).__name__
        raise InputError(f"{name} needs an objective such as ChiSquare(rho=0.1), got {objective!r}.")


def check_settings(method: Any) -> None:
    """Refuse what the arguments with common names cannot be."""
    owner = type(method).__name__
    given = {item.name: getattr(method, item.name) for item in fields(method) if item.init}
    for name, value in given.items():
        if name in POSITIVE and value is not None:
            positive(owner, name, value)
        if name in COUNTS and value is not None:
            count(owner, name, value)
        if name == "weights" and value not in WEIGHTS:
            raise unknown("weights", value, WEIGHTS)
        if name == "objective":
            check_objective(method, value)
    if "local_steps" in given and given["local_steps"] is None and type(method).local_steps is not None:
        raise InputError(f"{owner} needs a whole number local_steps >= 1, got None.")
    if "server_rate" in given and given["server_rate"] is None and type(method).server_rate is not None:
        raise InputError(f"{owner} needs a number for server_rate, got None.")


def check_participation(method: Any, clients_per_round: int | None, federation: Federation) -> None:
    """Refuse more clients than there are."""
    n = len(federation.names)
    if clients_per_round is not None and clients_per_round > n:
        raise InputError(
            f"{type(method).__name__} needs clients_per_round <= {n}, the number of clients, got {clients_per_round}."
        )


def check_finite(losses: Vector, names: Sequence[str]) -> None:
    """Refuse a start from which nothing can come."""
    if not np.all(np.isfinite(losses)):
        bad = names[int(np.argmin(np.isfinite(losses)))]
        raise InputError(f"The loss of client {bad!r} is not finite at the start.")
