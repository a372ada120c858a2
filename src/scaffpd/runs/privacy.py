r"""`[privacy]` of a run: what ε is to be, what is clipped, and where noise comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from scaffpd.errors import InputError
from scaffpd.privacy import Private
from scaffpd.privacy.defaults import LOCAL_STEPS, LOSS_SHARE, RADIUS, ROUNDS
from scaffpd.settings.section import Section


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of every training row, whoever sees what the clients send.

    Attributes:
        epsilon: ε of all models of the run together.
        delta: δ.
        clip: C, the largest norm of a row's gradient.
        loss_clip: B, the largest loss of a row.
        radius: R, the longest row once columns are scaled; longer ones are shortened. Not for networks.
        smoothness: a public L; left out, it follows from R.
        loss_share: the share of the budget that losses get.
        seed: of noise that can be repeated, for experiments; left out, a secret from the operating system.
    """

    epsilon: float
    delta: float = Private.delta
    clip: float = Private.clip
    loss_clip: float = Private.loss_clip
    radius: float | None = RADIUS
    smoothness: float | None = None
    loss_share: float = LOSS_SHARE
    seed: int | None = None

    @classmethod
    def read(cls, top: Section) -> Privacy | None:
        """What [privacy] says; `None` where there is no such table."""
        if "privacy" not in top:
            return None
        section = top.section("privacy", [item.name for item in fields(cls)])
        above, share = "a number above 0", "a number between 0 and 1"
        known = {"epsilon": section.number("epsilon", None, above, 1e-9, float("inf"))}
        for key in ("clip", "loss_clip", "radius", "smoothness"):
            if key in section:
                known[key] = section.number(key, None, above, 1e-9, float("inf"))
        for key in ("delta", "loss_share"):
            if key in section:
                known[key] = section.number(key, None, share, 1e-300, 1)
        if "radius" not in section and _network(top):
            known["radius"] = None  # type: ignore[assignment]
        return cls(**known, seed=section.whole("seed", None) if "seed" in section else None)

    def table(self) -> dict[str, Any]:
        """The same as [privacy] of a `config.toml`."""
        return asdict(self)

    def model(
        self, bare: Any, methods: Sequence[Any], rounds: int, samples: Sequence[int], secret: bytes | None = None
    ) -> Private:
        """The model with the noise that makes ε of these methods, so many rounds each."""
        if self.radius is None and self.smoothness is None:
            raise InputError(
                "How smooth the losses of a network are is a fact about the data: give [privacy] a public smoothness."
            )
        return Private.solved(
            bare, self.epsilon, list(methods), rounds, samples, self.delta, self.loss_share, clip=self.clip,
            loss_clip=self.loss_clip, radius=self.radius, smoothness=self.smoothness,
            secret=secret if self.seed is None else self.seed,
        )  # fmt: skip


def _network(top: Section) -> bool:
    model = top.values.get("model", {})
    return isinstance(model, dict) and "network" in model


def settle(top: Section) -> None:
    """Defaults of other tables that are good ones where noise is added: fewer rounds, one local step, one model."""
    if "privacy" not in top:
        return
    training, algorithm = (
        dict(top.section(name, top.values.get(name, {}) or ()).values) for name in ("training", "algorithm")
    )
    top.values["training"] = {"rounds": ROUNDS, "baseline": False, **training}
    if algorithm.get("kind", "Fair") == "Fair":
        top.values["algorithm"] = {"local_steps": LOCAL_STEPS, **algorithm}


def noise_of(model: Private, rounds: int) -> str:
    """The noise that was found, in a sentence."""
    z, z_L = _reach(model.noise), _reach(model.loss_noise)
    return f"Noise for ε = {model.budget:g} in {rounds} rounds: z = {z} for gradients, z_L = {z_L} for losses."


def _reach(noise: float | tuple[float, ...] | None) -> str:
    """One z, or how far they reach."""
    several = noise if isinstance(noise, tuple) else (noise or 0.0,)
    low, high = min(several), max(several)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
