r"""Clients that mask their vectors, and the checks of each before it answers.

A client scales its vector by its own weight, encodes it and masks it; the result is a
`MaskedReply`. It sends only scalars besides. It receives the weights of all clients: its masks
depend on them.

Two sums of nearly the same vectors can reveal what one hides: Σ over all and Σ over all but one
give that one's vector. Two sums with weights λ and λ' of vectors v and v' give a client's own to
within about ‖v − v'‖/‖λ − λ'‖₁. So two sums count as two weightings of one vector if

    ‖v/‖v‖ ∓ v'/‖v'‖‖ < ‖λ − λ'‖₁ / SHARPNESS    (Σ|λ_j| = 1),

and a client allows at most `WEIGHTINGS` sums of one vector, fewer than N − t, and over the same
clients only. It remembers a vector as a `Sketch`, whose distances are those of the vectors to
within a third.

Two sums are refused, too, if a combination of them would nearly be this client's vector
(`max_exposure`). Rounding reveals no more than these sums. A term of fewer than `FINE` digits is
rounded at random with the term as its mean, so that Σ q_i is the sum that was allowed, plus noise,
however coarse the numbers. To search a longer one's last digits takes other factors of w, which
count as other weights (`weight_distance`), or other formats, of which a client allows `FORMATS`.
Sums over columns are rounded to the nearest, as remainders need that: their weights are ones, and
such formats as few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import ExposedError, InputError
from scaffpd.federation.plans import Vector
from scaffpd.secure.masking import FixedPoint, Identity, Party, Terms
from scaffpd.secure.sketch import Sketch
from scaffpd.secure.terms import FINE, LARGEST, SMALLEST, Ring, exponent_of

# formats of one vector: sums are repeated with another clip, or with the remainders of the last
FORMATS = 8
# binary digits of a weight, so that weights computed in two ways are the same, or next to it
PRECISE = 46
REMEMBERED = 256  # sums that a client in this process remembers
# vectors nearer than this have the same digits, as far as they are rounded to the nearest
SAME = 1e-12
SHARPNESS = 1000.0  # two sums of one vector reveal it to a thousandth of its length at best
# weightings of one vector: λ, and equal weights, which set a dual rate, or the last λ, which
# measures curvature
WEIGHTINGS = 2


def weightings(terms: Terms) -> int:
    """Return how many weightings of one vector clients allow: fewer than N − t."""
    return max(1, min(WEIGHTINGS, len(terms.names) - terms.colluding - 1))


@dataclass(frozen=True, eq=False)
class Weighting:
    """Weights w_j of all clients in a sum, in the order of its terms, rounded: see `PRECISE`."""

    terms: Terms
    values: Vector

    def __post_init__(self) -> None:
        parts, powers = np.frexp(self.values)
        object.__setattr__(
            self, "values", np.ldexp(np.rint(np.ldexp(parts, PRECISE)), powers - PRECISE)
        )

    @cached_property
    def total(self) -> float:
        """Σ |w_j|."""
        return float(np.abs(self.values).sum())

    @cached_property
    def normalised(self) -> Vector:
        """λ, with Σ|λ_j| = 1."""
        return self.values / (self.total or 1.0)

    def of(self, name: str, share: float) -> float:
        """Return the client's own weight; refuse a sum that would nearly be its own vector."""
        weight = float(self.values[self.terms.names.index(name)])
        if not math.isfinite(self.total):
            raise InputError(
                "weight-not-finite",
                "A vector with a NaN or infinite weight cannot be added securely.",
            )
        if abs(weight) > share * self.total * (1 + 2.0 ** (1 - PRECISE)):  # weights are rounded
            raise TooLarge(
                "share-too-large",
                f"Client {name!r} would make up {abs(weight) / self.total:.0%} of a sum, more than "
                f"the {share:.0%} that it agrees to: the sum would show its vector. Use an "
                "objective that caps weights (CVaR, or a cap), or allow a larger share.",
            )
        return weight


class SumRecord(NamedTuple):
    """A sum with a client's vector."""

    length: int  # of the vector
    sketch: Vector  # of the vector at norm one
    names: tuple[str, ...]  # the clients
    weights: Vector  # their λ
    total: float = 1.0  # Σ|w_j|
    form: str = ""  # the number format

    def weight_distance(self, other: SumRecord) -> float:
        """Return ‖λ − λ'‖₁ over all clients; more if w is not 2ᵏ w', which rounds otherwise."""
        ratio = math.remainder(math.log2(self.total) - math.log2(other.total), 1)
        digits = min(abs(ratio), SHARPNESS * SAME)
        if self.names == other.names:
            return float(np.abs(self.weights - other.weights).sum()) + digits
        mine, theirs = (dict(zip(one.names, one.weights, strict=True)) for one in (self, other))
        return (
            float(
                sum(abs(mine.get(name, 0.0) - theirs.get(name, 0.0)) for name in {*mine, *theirs})
            )
            + digits
        )

    @np.errstate(all="ignore")
    def max_exposure(self, other: SumRecord, own: int) -> float:
        """Return client i's largest share in a combination, max_α |λ_i − αλ'_i| / ‖λ − αλ'‖₁.

        Between two of the points α = λ_j/λ'_j it is monotone. With λ = (a, b, b, …) and
        λ' = (a', b', b', …) it is one.
        """
        there = other.weights != 0
        at = self.weights[there] / other.weights[there]
        sizes = np.abs(other.weights[there])
        order = np.argsort(at)
        at, below, moment = at[order], np.cumsum(sizes[order]), np.cumsum((sizes * at)[order])
        rest = (
            at * (2 * below - below[-1])
            + moment[-1]
            - 2 * moment
            + np.abs(self.weights[~there]).sum()
        )
        part = np.abs(self.weights[own] - at * other.weights[own])
        return float(
            (part / np.maximum(rest - 1e-14 * (1 + np.abs(at)), np.maximum(part, 1e-300))).max()
        )


@dataclass(eq=False, repr=False)
class DisclosureGuard:
    """Memory of the sums with a client's vectors; it refuses those that would reveal one."""

    counted: bool = True  # whether the number of different sums is limited
    sketch: Sketch = field(default_factory=Sketch)
    most: int = REMEMBERED  # how many sums are remembered
    _known: list[SumRecord] = field(default_factory=list, init=False)

    def check(
        self, vector: Vector, weighting: Weighting, own: int, share: float, total: float, form: str
    ) -> SumRecord | None:
        """Allow client `own`'s vector in a sum, or refuse.

        Return what to remember; `None` if it adds nothing.
        """
        size = float(np.linalg.norm(vector))
        if weighting.values[own] == 0 or size == 0:
            return None
        terms = weighting.terms
        record = SumRecord(
            len(vector), self.sketch(vector) / size, terms.names, weighting.normalised, total, form
        )
        near = self._near(record)
        formats = {known.form for known, distance in near if distance < SAME} - {"", form}
        if form and len(formats) >= FORMATS:
            raise ExposedError(
                "too-many-formats",
                "This client's vector has been in sums of many formats: one more could show its "
                "digits.",
            )
        same = [
            known
            for known, distance in near
            if record.weight_distance(known) > SHARPNESS * distance
        ]
        if any(known.names != terms.names for known in same):
            raise InputError(
                "sum-over-others",
                "This client's vector was in a sum: one over other clients would show a client's "
                "own.",
            )
        many = len({(known.weights.tobytes(), known.total) for known in same}) >= weightings(terms)
        exposed = any(record.max_exposure(known, own) > share for known in same)
        if self.counted and (many or exposed):
            raise ExposedError(
                "too-many-weightings",
                "This client's vector has been in sums with other weights: one more could show it.",
            )
        return record

    def _near(self, record: SumRecord) -> list[tuple[SumRecord, float]]:
        """Return the sums of nearly the same vector, and how far that is from this one."""
        known = [one for one in self._known if one.length == record.length]
        if not known:
            return []
        sketches = np.array([one.sketch for one in known])
        distance = np.minimum(
            *(np.linalg.norm(sketches - sign * record.sketch, axis=1) for sign in (1, -1))
        )
        return [(known[k], float(distance[k])) for k in np.flatnonzero(distance < 2 / SHARPNESS)]

    def remember(self, record: SumRecord | None) -> None:
        """Remember a sum with the vector."""
        if record is not None:
            self._known = [*self._known[1 - self.most :], record]


@dataclass(frozen=True)
class MaskedReply:
    """Client's answer to a question for its masked vector."""

    exponent: int  # e, with |w_i v_i| ≤ 2ᵉ
    vector: Ring | None  # y_i; `None` if the question's clip is smaller than that, or not given


@dataclass(frozen=True)
class SumRequest:
    """Requested sum."""

    held: Any  # vector of every client, as the channel identifies it
    weights: Weighting  # w_i of all clients
    numbers: FixedPoint | None  # the format; `None` asks for the sizes of vectors alone


class TooLarge(InputError):
    """Sum that would nearly be a client's own vector."""


class GuardedParty(NamedTuple):
    """Client in secure sums."""

    party: Party  # its keys
    guard: DisclosureGuard  # the sums with its vectors
    share: float  # the largest share of a sum that it accepts

    def answer(
        self,
        sums: Weighting,
        numbers: FixedPoint | None,
        vector: Any,
        asked: bytes,
        columns: tuple[Vector, int] | None = None,
    ) -> MaskedReply:
        """Return the masked vector; without a format, or if it does not fit, only its size.

        In a sum over columns `vector` is a remainder, and `columns` has all digits of it, which are
        checked, and how many are left out.
        """
        weight = sums.of(self.party.name, self.share)
        own = np.asarray(vector, dtype=np.float64).ravel()
        seen, beyond = (own, None) if columns is None else columns
        exponent = _exponent(own, weight)
        if numbers is None or exponent > numbers.exponent:
            return MaskedReply(exponent, None)
        total = sums.total or 1.0
        place = sums.terms.names.index(self.party.name)
        share = self.share if columns is None else 1.0  # all weights are one
        digits = numbers.bits + round(math.log2(total)) + exponent_of(seen)
        # rounded at random, or no secret
        free = beyond is None and (digits < FINE or not self.guard.counted)
        form = "" if free else f"{digits} {beyond}"
        record = self.guard.check(seen, sums, place, share, total, form)
        asked += sums.values.tobytes()
        masked = self.party.mask(sums.terms, asked, numbers, weight * own, beyond is not None)
        self.guard.remember(record)
        return MaskedReply(exponent, masked)


def _exponent(vector: NDArray[np.float64], weight: float) -> int:
    """Bound |w v| by 2ᵉ from v alone: other weights reveal nothing more of v."""
    if weight == 0 or not np.any(vector):
        return SMALLEST
    return int(np.clip(exponent_of(vector) + math.ceil(math.log2(abs(weight))), SMALLEST, LARGEST))


class LocalParties:
    """Clients in this process, each with its own identity and secrets: see `GuardedParty`."""

    def __init__(self, names: Sequence[str], share: float, counted: bool) -> None:
        guard = partial(DisclosureGuard, counted=counted, sketch=Sketch())
        self._asked = 0
        self.members = {
            name: GuardedParty(Party(Identity(name), seed=name.encode()), guard(), share)
            for name in names
        }
        cards = [member.party.identity.card for member in self.members.values()]
        for member in self.members.values():
            member.party.meet(cards)

    def mask(self, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Return the masked vectors, or their sizes; every question here is new."""
        self._asked += 1
        asked = self._asked.to_bytes(16)
        names = wanted.weights.terms.names
        rows = [vector.detach().cpu().numpy() for vector in wanted.held.each()]
        return {
            name: self.members[name].answer(wanted.weights, wanted.numbers, row, asked)
            for name, row in zip(names, rows, strict=True)
        }
