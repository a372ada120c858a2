"""`Private`: the description of a model whose clients answer with clipped and noised sums."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.errors import INSIDE, InputError, count, positive, ranged
from scaffpd.federation import Constants
from scaffpd.federation.plans import ReleaseCounts
from scaffpd.models import Linear, Module
from scaffpd.models.cox import refuse_noise
from scaffpd.models.glm import LinearOracle
from scaffpd.models.linear import AUTO
from scaffpd.models.losses import loss_named
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.oracle import ClientData, Oracle
from scaffpd.models.point import Ridge
from scaffpd.privacy.accountant import SAFE, Account, least_noise
from scaffpd.privacy.mechanism import (
    LARGEST_NOISE,
    Clip,
    ClippedSums,
    LinearSums,
    ModuleSums,
    PersonSums,
)
from scaffpd.privacy.noise import client_key, digest, secret_bytes
from scaffpd.privacy.oracle import PrivateClient, PrivateOracle

# What a private run does if nothing else is said.
ROUNDS = 30  # every round is a release of a gradient and a loss
LOCAL_STEPS = 1  # the first local gradient is known already; every further one is a release
RADIUS = 3.0  # R, of rows whose columns have deviation one
LOSS_SHARE = 0.3  # of the budget, for losses
# l2 of coefficients, and of intercepts. Evidence would cost ε, and chooses less, for it knows
# nothing of the noise: benchmarks/privacy/DEFAULTS.md
RIDGE = 0.1
INTERCEPT = 1e-3

SECRET = 16  # bytes of a secret, at least


def private_ridge(features: int, intercepts: int = 1) -> list[float]:
    return [RIDGE] * features + [INTERCEPT] * intercepts


class Counted(Protocol):
    """A method that knows how often it asks a client."""

    def releases(self, rounds: int) -> ReleaseCounts: ...


class PrivateOptions(TypedDict, total=False):
    """Arguments of `Private` besides noise and budget."""

    clip: float
    loss_clip: float
    radius: float | None
    smoothness: float | None
    secret: bytes | int | None
    colluding: int | None
    together: int | None
    records: int | None


@dataclass(frozen=True)
class Private:
    r"""A model with differential privacy for every record, whoever sees what the clients send.

    Every client clips what a record contributes and adds discrete Gaussian noise:

        c_i = (1/m_i) (Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖) + N(0, (zC)² I)) + l2 x
        L_i = (1/m_i) (Σ_j clip(ℓ_j, 0, B) + N(0, (z_L B)²)) + (l2/2)‖x‖²

    and counts what it has released: `Result.privacy`.

    Args:
        model: `Linear(...)` or `Module(...)`.
        noise: z, the noise of gradients over C.
        clip: C, the largest norm of a record's gradient.
        loss_noise: z_L, the noise of losses over B; left out, z.
        loss_clip: B, the largest loss of a record.
        radius: R; longer rows of a `Linear` model, intercept included, are scaled to this length.
            Then L_i = curvature·R² + l2 is public, and no gradient is longer than R ("logistic"
            loss) or √2 R ("softmax").
        smoothness: a public L_i of all clients, where there is no radius: theirs depend on data.
        secret: what noise is drawn from: at least 16 bytes that no other party knows, or a whole
            number for experiments that can be repeated. Left out, it comes from the operating
            system, and a resumed run is not the same run.
        delta: δ of the account.
        budget: the largest ε that a client spends; it does not answer what would exceed it.
        colluding: t; the noise of gradients is shared among the clients, of which so many may add
            none, or show theirs. It protects against whoever sees only sums over all clients, as
            with `SecureAggregation`, and is √(n − t) times smaller where clients are alike. Left
            out, every client hides its own gradients from everybody.
        together: the most records of all clients, those elsewhere included, which everybody knows:
            all count in the same units.
        records: m of the clients here, which everybody knows, where sums may be over fewer records:
            one that lacks a label adds zero, and how many do is nobody's business.
    """

    model: Linear | Module
    noise: float = 1.0
    clip: float = 1.0
    loss_noise: float | None = None
    loss_clip: float = 4.0
    radius: float | None = None
    smoothness: float | None = None
    secret: bytes | int | None = field(default=None, repr=False, compare=False)
    delta: float = 1e-5
    budget: float | None = None
    colluding: int | None = None
    together: int | None = None
    # it scales the answer and no noise, which follows from what `repr` shows
    records: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        model = self.model
        if not isinstance(model, Linear | Module):
            raise InputError(
                "private-of-other-model",
                f"Private needs Linear(...) or Module(...), got {model!r}.",
            )
        if getattr(model, "l2", None) == AUTO:
            raise InputError(
                "private-evidence",
                "Private needs l2 as a number: strengths by evidence are not private.",
            )
        if not isinstance(model, Linear):
            if self.radius is not None:
                raise InputError(
                    "radius-with-network",
                    "Private takes a radius with Linear models only: give smoothness= instead.",
                )
        elif not model.summed:
            refuse_noise()
        elif model.weighted or not model.smooth or model.ordered:
            raise InputError(
                "private-rows-weighted",
                "Private takes neither weighted rows, counts nor ordered categories: the slope of "
                "their loss depends on the records.",
            )
        for name in ("noise", "clip", "loss_noise", "loss_clip", "radius", "smoothness", "budget"):
            if getattr(self, name) is not None:
                positive("Private", name, getattr(self, name))
        if max(self._noise) > LARGEST_NOISE:
            raise InputError("noise-too-large", "Private takes noise of at most 2^32 times a clip.")
        if self.colluding not in (None, 0):
            count("Private", "colluding", self.colluding)
        for name in ("together", "records"):
            if getattr(self, name) is not None:
                count("Private", name, getattr(self, name))
        _check_delta(self.delta)
        # `True` is no seed, and the message does not repeat the secret
        secret = self.secret
        seed = isinstance(secret, int | np.integer) and not isinstance(secret, bool) and secret >= 0
        long = isinstance(secret, bytes) and len(secret) >= SECRET
        if secret is not None and not seed and not long:
            raise InputError(
                "secret-too-short",
                f"Private needs a secret of at least {SECRET} bytes, or a whole number >= 0 for "
                "experiments.",
            )

    @property
    def _noise(self) -> tuple[float, float]:
        return float(self.noise), float(self.noise if self.loss_noise is None else self.loss_noise)

    @classmethod
    def solved(
        cls,
        model: Linear | Module,
        epsilon: float,
        algorithm: Counted | Sequence[Counted],
        rounds: int,
        delta: float = 1e-5,
        loss_share: float = LOSS_SHARE,
        before: float = 0.0,
        **rest: Unpack[PrivateOptions],
    ) -> Self:
        """Find the noise with which `rounds` rounds of `algorithm` cost ε; more are refused.

        With n_g gradients and n_L losses, Σ 1/z² = n_g/z² + n_L/z_L², of which losses get a share.

        Args:
            model: `Linear(...)` or `Module(...)`.
            epsilon: ε that every client may spend.
            algorithm: such as `ScaffPD(...)`, whose local steps count; a list shares ε, each member
                for so many rounds on one `Cohort`.
            rounds: R, the most rounds.
            delta: δ.
            loss_share: the share of the budget that losses get where a method asks for them.
            before: Σ 1/z² of what every client has released before, out of the same ε.
            rest: clip, loss_clip, radius, smoothness, secret, colluding and together.
        """
        budget = positive("Private.solved", "epsilon", epsilon)
        _check_delta(delta)
        ranged("Private.solved", "loss_share", loss_share, INSIDE, "loss-share-out-of-range")
        count("Private.solved", "rounds", rounds)
        methods = algorithm if isinstance(algorithm, Sequence) else [algorithm]
        asked = sum((method.releases(rounds) for method in methods), ReleaseCounts())
        if asked == ReleaseCounts():
            raise InputError("nothing-released", "Nothing is released, so no noise is needed.")
        share = float(loss_share)
        if not asked.losses or not asked.gradients:
            share = 1.0 if asked.losses else 0.0
        left = (least_noise(budget, float(delta)) * SAFE) ** -2 - before
        if not left > 0:
            raise InputError("privacy-budget", f"Nothing of ε = {budget:g} is left for training.")
        z = left**-0.5
        found = z * (asked.gradients / (1 - share)) ** 0.5 if asked.gradients else z
        losses = z * (asked.losses / share) ** 0.5 if asked.losses else found
        return cls(model, noise=found, loss_noise=losses, delta=delta, budget=budget, **rest)

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' data; held-out rows are the experimenter's, without privacy."""
        if like is not None:
            inner = like.inner if isinstance(like, PrivateOracle) else like
            return self.model.oracle(data, inner)
        data = replace(data, features=[np.asarray(x) for x in data.features])
        oracle = self.model.oracle(data)
        sizes = [len(x) for x in data.features]
        if self.together is not None and sum(sizes) > self.together:
            raise InputError(
                "too-many-records",
                f"These clients have {sum(sizes)} records, more than {self.together} as agreed.",
            )
        if self.together is None and (self.colluding or 0) >= len(sizes):
            raise InputError(
                "too-few-to-share-noise",
                f"Private shares noise among more than colluding={self.colluding} clients.",
            )
        z, z_L = self._noise
        most = self.together or max(sizes) * (1 if self.colluding is None else len(sizes))
        clips = Clip.of(float(self.clip), z, most), Clip.of(float(self.loss_clip), z_L, most)
        sums: ClippedSums
        if isinstance(oracle, LinearOracle):
            sums = self._linear_sums(data, oracle, clips)
            ridge = oracle.ridge
        else:
            assert isinstance(oracle, ModuleOracle)
            sums = ModuleSums(oracle, clips)
            ridge = Ridge(oracle.l2)
        return PrivateOracle(
            oracle,
            sums,
            clips,
            (z, z_L),
            ridge,
            self._public([self.records or size for size in sizes], ridge),
            self._members(data),
            Account(data.names, float(self.delta), self.budget),
            self.colluding,
        )

    def _linear_sums(
        self, data: ClientData, oracle: LinearOracle, clips: tuple[Clip, Clip]
    ) -> LinearSums:
        """Sum over records; with periods over persons, with a row for each."""
        if not (isinstance(self.model, Linear) and self.model.periods):
            return LinearSums.of(oracle, clips, self.radius)
        model, rows = self.model.by_periods(data, whole=True)
        whole = model.oracle(rows)
        assert isinstance(whole, LinearOracle)
        return replace(PersonSums.of(whole, clips, self.radius), periods=len(self.model.periods))

    def _members(self, data: ClientData) -> list[PrivateClient]:
        """Derive every client's key, from all that its answers depend on besides the question."""
        secret = secret_bytes(self.secret)
        model = repr(self), self._network()
        rows = enumerate(zip(data.names, data.features, data.labels, strict=True))
        return [
            PrivateClient(
                i,
                client_key(secret, name, *model, _content(X), _content(y)),
                self.records or len(X),
            )
            for i, (name, X, y) in rows
        ]

    def _network(self) -> bytes:
        """Hash what a network's loss depends on besides x, so that two networks never share noise.

        Functions look alike: with one as the loss, every binding has new noise.
        """
        if isinstance(self.model, Linear):
            return b""
        state = self.model.module.state_dict()
        parts = {name: _content(tensor.detach().cpu()) for name, tensor in state.items()}
        named = isinstance(self.model.loss, str)
        return digest(*parts, *parts.values(), b"" if named else os.urandom(16))

    def _public(self, samples: Sequence[int], ridge: Ridge) -> Constants | None:
        """Return constants on which no record has an influence."""
        linear = self.model if isinstance(self.model, Linear) else None
        L = public_smoothness(linear, self.smoothness, self.radius, ridge.most)
        if L is None:
            return None
        smooth = np.full(len(samples), L)
        mu = np.full(len(samples), ridge.least if linear else 0.0)
        return Constants(smooth, mu, linear is not None, smooth, np.array(samples), noisy=True)


def public_smoothness(
    model: Linear | None, given: float | None, radius: float | None, ridge: float
) -> float | None:
    """Return a public L: as given, or that of rows no longer than R; `None` without either."""
    if given is not None:
        return float(given)
    if model is None or radius is None:
        return None
    loss = "logistic" if model.periods else model.loss
    # every period of a person adds a curvature
    return float(loss_named(loss).curvature * max(len(model.periods), 1) * radius**2 + ridge)


def _check_delta(delta: float) -> None:
    ranged("Private", "delta", delta, INSIDE, "delta-out-of-range")


def _content(array: ArrayLike) -> bytes:
    values = np.ascontiguousarray(array)
    return digest(str(values.dtype), values.shape, values.tobytes())
