"""Differential privacy of single records: `Private` answers are clipped, noised, and counted against a budget."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from scaffpd.errors import InputError, count, positive, real
from scaffpd.federation import Constants
from scaffpd.models import Linear, Module
from scaffpd.models.glm import LinearOracle
from scaffpd.models.losses import loss_named
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.oracle import ClientData, Oracle
from scaffpd.privacy.accountant import Account, ReleaseCounts, Spent, solved
from scaffpd.privacy.mechanism import LARGEST_NOISE, Clip, ClippedSums, LinearSums, ModuleSums
from scaffpd.privacy.noise import client_key, digest, secret_bytes

__all__ = ["Private", "Spent"]

ROUNDS = 30  # every round is a release of a gradient and a loss
LOCAL_STEPS = 1  # the first local gradient is known already; every further one is a release
RADIUS = 3.0  # R, of rows whose columns have deviation one
LOSS_SHARE = 0.3  # of the budget, for losses


SECRET = 16  # bytes of a secret, at least
Multiplier = float | tuple[float, ...]  # of all clients, or of each


def multiplier(name: str, value: Any, clip: float) -> Multiplier:
    """Check noise: one number or one for every client, >= 0, and only on what is clipped."""
    several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    numbers = [real("Private", name, z) for z in (value if several else [value])]
    if not numbers or not all(0 <= z <= LARGEST_NOISE for z in numbers):
        raise InputError(
            "private-finite-up", f"Private needs {name} >= 0 and finite, up to 2^32, got {value!r}."
        )
    if clip == float("inf") and any(numbers):
        limit = "clip" if name == "noise" else "loss_clip"
        raise InputError(
            "private-finite-bounded",
            f"Private needs a finite {limit} with {name} > 0: what is not bounded cannot be hidden.",
        )
    return tuple(numbers) if several else numbers[0]


def spread(name: str, value: Multiplier, n: int) -> tuple[float, ...]:
    """Return a number for every client."""
    if not isinstance(value, tuple):
        return (value,) * n
    if len(value) != n:
        raise InputError(
            "private-clients", f"Private has {name} for {len(value)} clients, but there are {n}."
        )
    return value


def check_delta(delta: Any) -> None:
    """Check a probability."""
    if not 0 < real("Private", "delta", delta) < 1:
        raise InputError("private-delta", f"Private needs 0 < delta < 1, got {delta!r}.")


def check_secret(secret: Any) -> None:
    """Check the length of a secret, without repeating it in the message."""
    whole = isinstance(secret, int | np.integer) and not isinstance(secret, bool) and secret >= 0
    if (
        secret is not None
        and not whole
        and not (isinstance(secret, bytes) and len(secret) >= SECRET)
    ):
        raise InputError(
            "private-secret-least",
            f"Private needs a secret of at least {SECRET} bytes, or a whole number >= 0 for experiments.",
        )


@dataclass(frozen=True)
class Private:
    r"""A model with differential privacy for every single record, whoever sees what the clients send.

    Every client clips what a record contributes and adds discrete Gaussian noise before anything leaves it:

        c_i = (1/m_i) (Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖) + N(0, (zC)² I)) + l2 x
        L_i = (1/m_i) (Σ_j clip(ℓ_j, 0, B) + N(0, (z_L B)²)) + (l2/2)‖x‖²

    and counts what it has released; `train` reports the sum as `Result.privacy`. Give it to a `Cohort` in the place of
    the model. Without noise and without clips (`noise=0, clip=inf, loss_clip=inf`) it *is* the model, bit for bit.

    Args:
        model: `Linear(...)` or `Module(...)`.
        noise: z, the noise of gradients over C; one number, or one for every client.
        clip: C, the largest norm of a record's gradient.
        loss_noise: z_L, the noise of losses over B; left out, z.
        loss_clip: B, the largest loss of a record.
        radius: R; rows of a `Linear` model, intercept included, that are longer are scaled to this length. Then
            L_i = curvature·R² + l2 is public, and no gradient is longer than R ("logistic" loss) or √2 R ("softmax").
        smoothness: a public L_i of all clients, where there is no radius. Data may not leave as a smoothness either.
        secret: what noise is drawn from: at least 16 bytes that no other party knows, or a whole number for experiments
            that can be repeated. Left out, it comes from the operating system, and a resumed run is not the same run.
        delta: δ of the account.
        budget: the largest ε that a client spends; it does not answer what would exceed it.
        colluding: t; the noise of gradients is shared among the clients, of which so many may add none, or show the
            server what they have added. It then protects against whoever sees nothing but sums over all clients, as a
            server does with `SecureAggregation`, and is √(n − t) times smaller where clients are alike. Left out, every
            client hides its own gradients from everybody.
        together: where noise is shared with clients elsewhere: how many records all of them have at most. Then all
            count in the same units.
    """

    model: Linear | Module
    noise: Multiplier = 1.0
    clip: float = 1.0
    loss_noise: Multiplier | None = None
    loss_clip: float = 4.0
    radius: float | None = None
    smoothness: float | None = None
    secret: bytes | int | None = field(default=None, repr=False, compare=False)
    delta: float = 1e-5
    budget: float | None = None
    colluding: int | None = None
    together: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, Linear | Module):
            raise InputError(
                "private-model-such",
                f"Private needs a model such as Linear(...) or Module(...), got {self.model!r}.",
            )
        for name in ("clip", "loss_clip"):
            if not real("Private", name, getattr(self, name)) > 0:
                raise InputError(
                    "private-post-init", f"Private needs {name} > 0, got {getattr(self, name)!r}."
                )
        if self.loss_noise is None:
            object.__setattr__(self, "loss_noise", self.noise)
        for name, most in (("noise", self.clip), ("loss_noise", self.loss_clip)):
            object.__setattr__(self, name, multiplier(name, getattr(self, name), most))
        for name in ("radius", "smoothness", "budget"):
            if getattr(self, name) is not None:
                positive("Private", name, getattr(self, name))
        if self.radius is not None and not isinstance(self.model, Linear):
            raise InputError(
                "private-takes-radius",
                "Private takes a radius with Linear models only: give smoothness= instead.",
            )
        if isinstance(self.model, Linear) and (self.model.weighted or self.model.loss == "poisson"):
            what = "weighted rows" if self.model.weighted else "counts"
            raise InputError(
                "private-take-how",
                f"Private does not take {what}: how steep their loss is follows from the records.",
            )
        if self.colluding is not None and (type(self.colluding) is not int or self.colluding < 0):
            raise InputError(
                "private-whole-number",
                f"Private needs a whole number colluding >= 0, got {self.colluding!r}.",
            )
        if self.together is not None:
            count("Private", "together", self.together)
        check_delta(self.delta)
        check_secret(self.secret)

    @classmethod
    def solved(
        cls,
        model: Linear | Module,
        epsilon: float,
        algorithm: Any,
        rounds: int,
        samples: Sequence[int] | None = None,
        delta: float = 1e-5,
        loss_share: float = LOSS_SHARE,
        **rest: Any,
    ) -> Private:
        """Find the noise with which `rounds` rounds of `algorithm` cost ε; more of them are refused.

        Args:
            model: `Linear(...)` or `Module(...)`.
            epsilon: ε that every client may spend.
            algorithm: what will be trained with, such as `ScaffPD(...)`; local steps, batch size and the like count. A
                list of them shares ε: each makes so many rounds, all on one `Cohort`.
            rounds: R, the most rounds.
            samples: m_i of every client, in order; needed where the algorithm has a batch size.
            delta: δ.
            loss_share: the share of the budget that losses get where a method asks for them, by 1/z².
            rest: clip, loss_clip, radius, smoothness, secret and colluding.
        """
        positive("Private.solved", "epsilon", epsilon)
        check_delta(delta)
        if not 0 < real("Private.solved", "loss_share", loss_share) < 1:
            raise InputError(
                "private-solved-loss",
                f"Private.solved needs loss_share between 0 and 1, got {loss_share!r}.",
            )
        for name in ("noise", "loss_noise", "budget"):
            if name in rest:
                raise InputError(
                    "private-solved-finds", f"Private.solved finds {name} by itself: leave it out."
                )
        methods = algorithm if isinstance(algorithm, list | tuple) else [algorithm]
        count("Private.solved", "rounds", rounds)
        questions = sum((method.releases(rounds) for method in methods), ReleaseCounts())
        sizes: list[int | None] = [None]
        if questions.batch_size is not None:
            if samples is None:
                raise InputError(
                    "private-solved-samples",
                    "Private.solved needs samples=, the clients' numbers of records, for minibatches.",
                )
            sizes = [count("Private.solved", "samples", m) for m in samples]
        ratio = _ratio(questions, float(loss_share))
        found = tuple(_noise(questions, m, ratio, float(epsilon), float(delta)) for m in sizes)
        noise: Multiplier = found if len(found) > 1 else found[0]
        losses = tuple(ratio * z for z in found)
        return cls(
            model,
            noise=noise,
            loss_noise=losses if len(losses) > 1 else losses[0],
            delta=delta,
            budget=float(epsilon),
            **rest,
        )

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' checked data; held-out rows are the experimenter's and bound without privacy."""
        from scaffpd.privacy.oracle import (
            PrivateClient,
            PrivateOracle,
        )  # few runs have private clients

        if self._open or like is not None:
            return self.model.oracle(data, like.inner if isinstance(like, PrivateOracle) else like)
        data = replace(data, features=[np.asarray(x) for x in data.features])
        inner = self.model.oracle(data)
        names = data.names
        account = Account(names, float(self.delta), self.budget)
        members = [PrivateClient(i, *about) for i, about in enumerate(self._members(data))]
        z, z_L = (max(z) for z in zip(*[m[3:] for m in members], strict=True))
        sizes = [m.samples for m in members]
        most = self.together or max(sizes) * (1 if self.colluding is None else len(members))
        if self.together is not None and sum(sizes) > self.together:
            raise InputError(
                "these-clients-records",
                f"These clients have {sum(sizes)} records, more than the {self.together} agreed on.",
            )
        few = self.together is None and (self.colluding or 0) >= len(members)
        if self.colluding is not None and (z == 0 or few):
            raise InputError(
                "private-shares-noise",
                f"Private shares noise > 0 among more than colluding={self.colluding} clients.",
            )
        clips = Clip.of(float(self.clip), z, most), Clip.of(float(self.loss_clip), z_L, most)
        sums = self._sums(inner, clips)
        l2 = float(self.model.l2)
        largest = self.together or max(sizes)
        return PrivateOracle(
            inner, sums, clips, l2, self._public(sizes), members, account, self.colluding, largest
        )

    @property
    def _open(self) -> bool:
        """Return whether nothing is clipped or noised."""
        free = self.clip == self.loss_clip == float("inf") and self.radius is None
        return (
            free and not np.any(np.asarray(self.noise)) and not np.any(np.asarray(self.loss_noise))
        )

    def _members(self, data: ClientData) -> Iterator[tuple[bytes, int, float, float]]:
        """Every client's key, number of records, z and z_L."""
        n = len(data.names)
        secret = secret_bytes(self.secret)
        network = self._network()
        z, z_L = (spread(name, getattr(self, name), n) for name in ("noise", "loss_noise"))
        for i, (name, X, y) in enumerate(zip(data.names, data.features, data.labels, strict=True)):
            yield (
                client_key(secret, name, repr(self), network, _content(X), _content(y)),
                len(X),
                z[i],
                z_L[i],
            )

    def _network(self) -> bytes:
        """Hash what a network's loss depends on besides x, so that two networks never share noise.

        Frozen parameters and buffers are part of it. A loss that is a function cannot be told from another one: its
        noise is new with every binding.
        """
        if isinstance(self.model, Linear):
            return b""
        parts = {
            name: _content(tensor.detach().cpu())
            for name, tensor in self.model.module.state_dict().items()
        }
        named = isinstance(self.model.loss, str)
        return digest(*parts, *parts.values(), b"" if named else os.urandom(16))

    def _sums(self, inner: Oracle, clips: tuple[Clip, Clip]) -> ClippedSums:
        if isinstance(inner, LinearOracle):
            return LinearSums.of(inner, clips, self.radius)
        assert isinstance(inner, ModuleOracle)
        return ModuleSums(inner, clips)

    def _public(self, samples: Sequence[int]) -> Constants | None:
        """Return constants on which no record has an influence."""
        linear = isinstance(self.model, Linear)
        L = self.smoothness
        if L is None and self.radius is not None:
            L = loss_named(str(self.model.loss)).curvature * self.radius**2 + self.model.l2
        if L is None:
            return None
        n = len(samples)
        mu = np.full(n, float(self.model.l2) if linear else 0.0)
        return Constants(
            np.full(n, float(L)), mu, linear, np.full(n, float(L)), np.array(samples), noisy=True
        )


def _content(array: Any) -> bytes:
    values = np.ascontiguousarray(array)
    return digest(str(values.dtype), values.shape, values.tobytes())


def _ratio(questions: ReleaseCounts, share: float) -> float:
    """Return z_L/z for which losses take that share of Σ n/z²."""
    losses = questions.losses + questions.sampled_losses
    gradients = questions.gradients + questions.sampled_gradients
    return (
        float(np.sqrt(losses * (1 - share) / (share * gradients))) if losses and gradients else 1.0
    )


@lru_cache(maxsize=4096)
def _noise(
    questions: ReleaseCounts, samples: int | None, ratio: float, epsilon: float, delta: float
) -> float:
    return solved(lambda z: questions.releases(z, ratio * z, samples), epsilon, delta)
