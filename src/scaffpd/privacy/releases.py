r"""How often a method makes each client release something in R rounds: what noise is solved from.

Counted from the methods' own questions; where a method asks some clients only, or asks less in some rounds, these are
the most that a client can be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scaffpd.errors import InputError
from scaffpd.privacy.accountant import Release


@dataclass(frozen=True)
class Asked:
    """The most releases of a client.

    Attributes:
        gradients: over all of its records.
        losses: over all of them.
        sampled_gradients: over Poisson samples, local steps among them.
        sampled_losses: over Poisson samples.
        batch_size: b, of the samples; `None` where there are none.
    """

    gradients: int = 0
    losses: int = 0
    sampled_gradients: int = 0
    sampled_losses: int = 0
    batch_size: int | None = None

    def __add__(self, other: Asked) -> Asked:
        """Both."""
        if None not in (self.batch_size, other.batch_size) and self.batch_size != other.batch_size:
            raise InputError(f"Batches of {self.batch_size} and of {other.batch_size} rows do not share one budget.")
        return Asked(
            self.gradients + other.gradients,
            self.losses + other.losses,
            self.sampled_gradients + other.sampled_gradients,
            self.sampled_losses + other.sampled_losses,
            self.batch_size or other.batch_size,
        )

    def releases(self, noise: float, loss_noise: float, samples: int | None) -> dict[Release, int]:
        """The same for a client of m_i records with these noise multipliers."""
        rate = 1.0 if self.batch_size is None or samples is None else min(1.0, self.batch_size / samples)
        counts: dict[Release, int] = {}
        for release, n in (
            (Release(noise), self.gradients),
            (Release(noise, rate), self.sampled_gradients),
            (Release(loss_noise), self.losses),
            (Release(loss_noise, rate), self.sampled_losses),
        ):
            if n:
                counts[release] = counts.get(release, 0) + n
        return counts


def _questions(gradients: int, losses: int, batch_size: int | None) -> Asked:
    if batch_size is None:
        return Asked(gradients, losses)
    return Asked(sampled_gradients=gradients, sampled_losses=losses, batch_size=batch_size)


def _steps(method: Any, rounds: int) -> Asked:
    """J local steps in every round."""
    return _questions(rounds * method.local_steps, 0, method.batch_size)


def _points(n: int, batch_size: int | None = None) -> Asked:
    """Losses and gradients at n points."""
    return _questions(n, n, batch_size)


def _scaff_pd(method: Any, rounds: int) -> Asked:
    exact = getattr(method, "exact", True)  # as Fair has it, which takes Scaff-PD where there is noise
    points = _points(rounds + 1, None if exact else method.batch_size)
    known = rounds if method.batch_size is None else 0  # the first local gradient is c_i
    return points + _questions(rounds * method.local_steps - known, 0, method.batch_size)


def _dual(method: Any, rounds: int) -> Asked:
    """Local steps and a loss in every round; the coupling at x⁰ where the dual rate is left out."""
    if not method.objective.simplex:
        raise InputError(
            f"{type(method).__name__} starts from exact losses where weights are not on the simplex: "
            f"{method.objective!r} cannot be private with it; use ScaffPD."
        )
    start = _points(1) if method.dual_rate is None else Asked()
    return start + _steps(method, rounds) + _questions(0, rounds, method.batch_size)


def _afl(method: Any, rounds: int) -> Asked:
    known = method.dual_rate is None and method.batch_size is None  # the losses at x⁰, from the coupling there
    return _dual(method, rounds) + Asked(losses=-1 if known else 0)


def _scaffold(method: Any, rounds: int) -> Asked:
    return _steps(method, rounds) + (_points(rounds, method.batch_size) if method.option == "I" else Asked())


ASKED: dict[str, Callable[[Any, int], Asked]] = {
    "ScaffPD": _scaff_pd,
    "Fair": _scaff_pd,
    "AcceleratedPrimalDual": lambda method, rounds: _points(rounds + 1),
    "FedAvg": _steps,
    "FedProx": _steps,
    "Scaffold": _scaffold,
    "QFFL": lambda method, rounds: _steps(method, rounds) + _questions(0, rounds, None),
    "DeltaFL": lambda method, rounds: _steps(method, rounds) + _questions(0, rounds, None),
    "AFL": _afl,
    "DRFA": _dual,
    "GradientDescentAscent": lambda method, rounds: _points(rounds + 1),
    "Extragradient": lambda method, rounds: _points(2 * rounds + 1),
    "MinimaxGradient": lambda method, rounds: _points(2 * rounds + 1),
    "QuasiNewtonMinimax": lambda method, rounds: _points(rounds + 1),
}


def asked(method: Any, rounds: int) -> Asked:
    """The most that `method` asks of a client in so many rounds."""
    name = type(method).__name__
    if name not in ASKED:
        raise InputError(
            f"How often {name} asks a client is not known beforehand: give Private noise= and budget= instead, "
            f"or take one of {', '.join(ASKED)}."
        )
    return ASKED[name](method, rounds)
