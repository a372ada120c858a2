"""Sums over records to which each contributes a bounded amount: what noise is added to.

    Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖)   and   Σ_j clip(ℓ_j, 0, B),

so that a record that is there or not moves the first by at most C and the second by at most B. A record whose gradient
is no number contributes nothing, one whose loss is none contributes B.

The noise is one that only its client can draw, and the same whenever the same question is asked:

    K_i = HKDF-SHA256(secret; name, model and data of client i)
    K   = HMAC-SHA256(K_i; kind of question, all bytes of x, corrections, plan and key)
    u   = the key stream of ChaCha20 under HMAC(K; "noise" or "rows"),  64 bits a number
    g   = Φ⁻¹((⌊u/2¹¹⌋ + ½) 2⁻⁵³)

So asking again gains nothing, a resumed run has the same digits, and another question gets fresh noise. Without the
secret nobody can tell the numbers from random ones; the keys of a plan, which the server knows, are not enough. The
data enters K_i so that two versions of it never share their noise.

The numbers g are Gaussian to double precision, the usual approximation, and not a discrete mechanism: what the last
digits of a floating-point sum may give away (Mironov, "On significance of the least significant bits for differential
privacy", 2012) is not covered.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap

from scaffpd.errors import InputError, not_installed
from scaffpd.models.glm import LinearOracle
from scaffpd.models.layout import StackedSamples, product
from scaffpd.models.losses import Loss
from scaffpd.models.module import ModuleOracle

KEY, MARK = 32, 16  # bytes of a key, and of what tells questions apart


def secret_bytes(secret: bytes | int | None) -> bytes:
    """Return the secret itself, that of an experiment's seed, or one from the operating system."""
    if secret is None:
        return os.urandom(KEY)
    return secret if isinstance(secret, bytes) else hashlib.sha256(b"seed %d" % secret).digest()


def client_key(secret: bytes, *about: str | bytes) -> bytes:
    """Derive K_i, a key for one client, model and data set."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ModuleNotFoundError:
        raise not_installed("cryptography", "privacy") from None
    return HKDF(SHA256(), KEY, salt=None, info=digest(*about)).derive(secret)


def digest(*parts: Any) -> bytes:
    """Hash texts, numbers and vectors so that none can be mistaken for another."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            about, content = f"{part.dtype} {tuple(part.shape)}", np.ascontiguousarray(part.detach().cpu()).tobytes()
        else:
            about, content = type(part).__name__, part if isinstance(part, bytes) else repr(part).encode()
        whole.update(f"{about} {len(content)};".encode() + content)
    return whole.digest()


class PrivateQuestion:
    """A question to one client: what is drawn to answer it.

    Args:
        key: K_i of the client.
        content: the `digest` of everything that the answer depends on, besides the data.
    """

    def __init__(self, key: bytes, content: bytes) -> None:
        self._key = hmac.digest(key, content, "sha256")

    @cached_property
    def mark(self) -> bytes:
        """Identifies this question; with another secret the same question has another mark."""
        return hmac.digest(self._key, b"mark", "sha256")[:MARK]

    @cached_property
    def noise(self) -> KeyStream:
        """Gaussian numbers."""
        return KeyStream(hmac.digest(self._key, b"noise", "sha256"))

    @cached_property
    def rows(self) -> KeyStream:
        """Uniform numbers that decide which rows take part."""
        return KeyStream(hmac.digest(self._key, b"rows", "sha256"))


class KeyStream:
    """Pseudo-random numbers under a key, one after the other."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def uniform(self, size: int) -> NDArray[np.float64]:
        """Draw the next numbers, strictly between 0 and 1."""
        bits = np.frombuffer(self._cipher.update(bytes(8 * size)), dtype="<u8")
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def normal(self, size: int) -> NDArray[np.float64]:
        """Draw the next numbers as standard Gaussians."""
        from scipy.special import ndtri

        gaussian: NDArray[np.float64] = ndtri(self.uniform(size))
        return gaussian


def normals(questions: Sequence[PrivateQuestion], size: int) -> NDArray[np.float64]:
    """Draw the next Gaussians of every client, (N, size)."""
    return np.stack([question.noise.normal(size) for question in questions])


def drawn(questions: Sequence[PrivateQuestion], sizes: Sequence[int], rates: Sequence[float]) -> NDArray[np.bool_]:
    """Draw a Poisson sample of every client: row j of client i takes part with probability q_i, independently."""
    return np.concatenate([
        question.rows.uniform(size) < rate for question, size, rate in zip(questions, sizes, rates, strict=True)
    ])  # fmt: skip


TOGETHER = 2**22  # numbers in the gradients of single records that are held at a time


class ClippedSums(Protocol):
    """Clipped sums of all clients; `drawn` says which rows of the stack take part, `None` all of them."""

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Σ_j clip(ℓ_j(x), 0, B) per client."""

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """Σ_j of the clipped gradients, (N, d), at one point for all, (d,), or at every client's own, (N, d)."""

    def only(self, clients: list[int]) -> ClippedSums:
        """The same for some of the clients."""


@dataclass(frozen=True)
class LinearSums:
    """Linear models: ∇ℓ_j = a_j ⊗ r_j has the norm ‖a_j‖‖r_j‖, so that clipping scales residuals.

    Attributes:
        rows: the samples, each with the weight 1.
        loss: ℓ.
        outputs: k.
        clip: C.
        loss_clip: B.
    """

    rows: StackedSamples
    loss: Loss
    outputs: int
    clip: float
    loss_clip: float

    @classmethod
    def of(cls, oracle: LinearOracle, clip: float, loss_clip: float, radius: float | None) -> LinearSums:
        """Take the oracle's records; those longer than R are scaled to the length R."""
        rows = oracle.rows
        if rows.stored:
            raise InputError("Private needs features that fit into memory.")
        A = rows.A if radius is None else rows.A * (radius / rows.norms).clamp_max(1)[:, None]
        return cls(
            StackedSamples(A, rows.y, rows.layout, torch.ones_like(rows.share)),
            oracle.loss,
            oracle.outputs,
            clip,
            loss_clip,
        )

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """One product for all clients."""
        values = bounded(self.loss.value(self._predictions(x), self.rows.y), self.loss_clip)
        return self.rows.layout.segment_sum(values if drawn is None else values * drawn)

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """A_iᵀ (s ∘ r)_i with s_j = min(1, C/(‖a_j‖‖r_j‖)): batched products."""
        r = torch.nan_to_num(self.loss.residual(self._predictions(at), self.rows.y), posinf=0.0, neginf=0.0)
        scale = shrink(self.rows.norms * r.norm(dim=1), self.clip)
        scale = scale if drawn is None else scale * drawn
        return self.rows.each(scale[:, None] * r).mT.flatten(1)

    def only(self, clients: list[int]) -> LinearSums:
        """The rows of some clients."""
        return replace(self, rows=self.rows.only(clients))

    def _predictions(self, at: Tensor) -> Tensor:
        """⟨a_j, x⟩, or ⟨a_j, u_i⟩ with every client's own u_i."""
        if at.ndim == 1:
            return self.rows.A @ at.view(-1, self.outputs)
        z, own = at.new_empty(len(self.rows.A), self.outputs), at.view(len(at), -1, self.outputs)
        for block in self.rows.blocks:
            inside = block.weight > 0
            z[block.rows[inside]] = product(self.rows.of(block)[0], own[block.clients])[inside]
        return z


@dataclass(frozen=True)
class ModuleSums:
    """Networks: the gradients of single records by vectorised differentiation, some records at a time.

    Attributes:
        oracle: the network and its data.
        clip: C.
        loss_clip: B.
    """

    oracle: ModuleOracle
    clip: float
    loss_clip: float

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Client by client."""
        with torch.no_grad():
            return torch.stack([self._sum(self._one, x, part, ()) for part in self._parts(drawn)])

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """Client by client."""
        points = at.expand(len(self.oracle.X), at.shape[-1])
        pairs = zip(points, self._parts(drawn), strict=True)
        return torch.stack([self._sum(grad(self._one), u, part, u.shape) for u, part in pairs])

    def only(self, clients: list[int]) -> ModuleSums:
        """The samples of some clients."""
        return replace(self, oracle=self.oracle.only(clients))

    def _parts(self, drawn: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The records of every client that take part."""
        if drawn is None:
            yield from zip(self.oracle.X, self.oracle.y, strict=True)
            return
        masks = torch.split(drawn, [len(X) for X in self.oracle.X])
        yield from ((X[mask], y[mask]) for X, y, mask in zip(self.oracle.X, self.oracle.y, masks, strict=True))

    def _one(self, x: Tensor, X: Tensor, y: Tensor) -> Tensor:
        output = functional_call(self.oracle.network, self.oracle.unflatten(x), (X[None],))
        return self.oracle.loss(output, y[None]).squeeze()

    def _sum(
        self, one: Callable[..., Tensor], x: Tensor, part: tuple[Tensor, Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        """Σ_j of what is clipped, over pieces of the records."""
        total = x.new_zeros(shape)
        for X, y in zip(*(torch.split(t, max(1, TOGETHER // len(x))) for t in part), strict=True):
            if len(X):
                total = total + self._clipped(self._each(one, x, X, y))
        return total

    def _each(self, one: Callable[..., Tensor], x: Tensor, X: Tensor, y: Tensor) -> Tensor:
        try:
            return vmap(one, in_dims=(None, 0, 0))(x.detach(), X, y)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise InputError(f"The network cannot be differentiated record by record: {reason}.") from None

    def _clipped(self, each: Tensor) -> Tensor:
        if each.ndim == 1:
            return bounded(each, self.loss_clip).sum()
        each = torch.where(torch.isfinite(each).all(1, keepdim=True), each, 0)
        return shrink(each.norm(dim=1), self.clip) @ each


def shrink(norms: Tensor, clip: float) -> Tensor:
    """min(1, C/‖·‖)."""
    return torch.ones_like(norms) if clip == float("inf") else (clip / norms).clamp_max(1)


def bounded(values: Tensor, most: float) -> Tensor:
    """clip(ℓ, 0, B)."""
    return torch.nan_to_num(values, nan=most, posinf=most).clamp(0, most)
