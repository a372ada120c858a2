r"""`Session`: one silo's part in the exchanges of a run, each tied to all that went before.

At a step the first silo alone posts (a proposal: the next question), or all silos do. A post is
signed together with the hash of all posts before,

    T_{k+1} = H(T_k, k, kind, all posts of step k),

so that a post that was forged, replayed, moved to another step or made for others is noticed at
that step, two views of a step at the next one, and an omission by time. Everybody checks all
signatures, with the keys of the agreement, and adds up by itself. Masks are derived from T_k, in
which the proposal is: silos that were shown different proposals add up to noise.

An epoch begins with every start of a process: each silo posts the agreement's hash, a fresh key, a
commitment to its rows, and the states that it can go on from. What was proposed in an earlier epoch
is proposed again to the bit, or refused (`Journal`): a point beside it would have further sums.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scaffpd.deploy.messages import EPOCH, Array, JsonMapping, Message, decode, encode
from scaffpd.errors import InputError
from scaffpd.federation import Traffic, Vector
from scaffpd.federation.border import Part, Shown
from scaffpd.fields import Json
from scaffpd.files import JsonLines
from scaffpd.secure.keys import SIGNATURE, Card, Identity, Masks
from scaffpd.secure.ring import Places, add, narrow, wide

FIRST = "first"  # who posts at a step
ALL = "all"
NEAR = 1e-9  # numbers of a proposal may differ by this share of the largest, whatever the method
STATE = "state"  # the proposals about an epoch itself
END = "end"
OBJECTIVE = "objective"
DIRECTIONS = 64  # in which points are compared
SMALL = 2**16  # bytes of a proposal up to which the first silo stores it, to propose it again


class Tampered(InputError):
    """Posts that are not what the silos of the agreement have posted."""


class Link(Protocol):
    """The way to the board."""

    def exchange(self, step: int, senders: str, own: bytes | None) -> Mapping[str, bytes]:
        """Post `own` at a step, and return the posts of the first silo or of all by name."""


@dataclass(frozen=True)
class Point:
    """Where vectors are summed, as it is compared and written down.

    Attributes:
        kind: what the vectors are of; those of other kinds are never the same.
        sketch: x in at most `DIRECTIONS` directions, none of which is longer than x: points are at
            least as far from each other as their sketches. Empty for x = 0.
    """

    kind: str
    sketch: bytes = b""

    @classmethod
    def of(cls, kind: str, x: Vector) -> Point:
        """Sketch a point: sums of every 64th entry, with signs drawn once, over √(their number).

        At zero all linear models begin, whatever their columns.
        """
        if not x.any():
            return cls(kind)
        rows = -(-len(x) // DIRECTIONS)
        width = min(len(x), DIRECTIONS)
        padded = np.zeros(rows * width)
        padded[: len(x)] = x * (np.random.default_rng(len(x)).integers(0, 2, len(x)) * 2 - 1)
        return cls(f"{kind} {len(x)}", (padded.reshape(rows, width).sum(0) / rows**0.5).tobytes())

    def near(self, other: Point, distance: float) -> bool:
        if self == other:
            return True
        if self.kind.split()[0] != other.kind.split()[0] or (
            self.sketch and other.sketch and self.kind != other.kind
        ):
            return False
        mine, theirs = (np.frombuffer(one.sketch) if one.sketch else 0.0 for one in (self, other))
        return bool(np.linalg.norm(np.atleast_1d(mine - theirs)) <= distance)

    def __str__(self) -> str:
        return f"{self.kind} {b64encode(self.sketch).decode()}"

    @classmethod
    def read(cls, text: str) -> Point:
        kind, _, sketch = text.rpartition(" ")
        return cls(kind, b64decode(sketch))


class Weightings:
    """Weightings with which the vectors of a point were summed, and objectives they follow from.

    Points nearer to each other than an agreed distance are one: the difference of two sums with
    other weights would be one silo's vector, but for what it changes from point to point.

    Args:
        known: places, and weightings there, of this run and others.
        objective: of this run.
        distance: by which points have to differ.
    """

    def __init__(
        self, known: Iterable[tuple[str, str]] = (), objective: str = "", distance: float = 0.0
    ) -> None:
        self.new: list[tuple[str, str]] = []  # not written down yet
        self.distance = distance
        self._objective = hashlib.sha256(objective.encode()).hexdigest()
        self._objectives = set[str]()
        self._found: dict[Point, set[str]] = {}
        for place, found in known:
            if place == OBJECTIVE:
                self._objectives.add(found)
            else:
                self._found.setdefault(Point.read(place), set()).add(found)

    @property
    def objectives(self) -> int:
        return len(self._objectives | {self._objective})

    def count(self, point: Point, weighting: bytes, own: bool = False) -> tuple[int, int]:
        """Note a weighting at a point; return how many there are near it, and how many of them are
        the silos' own under this run's objective.
        """
        family = f"{self._objective[:16]} " if own else ""
        name = f"{family}{hashlib.sha256(weighting).hexdigest()}"
        if name not in self._found.setdefault(point, set()):
            self._found[point].add(name)
            self.new.append((str(point), name))
        if self._objective not in self._objectives:
            self._objectives.add(self._objective)
            self.new.append((OBJECTIVE, self._objective))
        around = [own for other, own in self._found.items() if point.near(other, self.distance)]
        near = set[str]().union(*around)
        return len(near), sum(one.startswith(family) for one in near) if own else 0


class Journal:
    """What a silo was asked in a run, over all epochs: proposals by their place, and weightings.

    Args:
        file: where proposals are written before a post leaves; by default nowhere.
        weightings: of the rows.
    """

    def __init__(self, file: Path | None = None, weightings: Weightings | None = None) -> None:
        self._lines = None if file is None else JsonLines(file)
        self.weightings = Weightings() if weightings is None else weightings
        self._hashes: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._new: list[list[str]] = []
        self.begin()
        for entries in () if self._lines is None else self._lines.read():
            for entry in entries:
                self._note(*entry)

    def begin(self) -> None:
        self._rounds = 0
        self._place = "start"
        self._counts = Counter[str]()

    def resume(self, rounds: int) -> None:
        """Go on after so many rounds: what is asked first is about the point reached there."""
        self._rounds = rounds
        self._place = f"resumed {rounds}"
        self._counts.clear()

    def next_round(self) -> None:
        self._place = f"round {self._rounds}"
        self._rounds += 1
        self._counts.clear()

    def key(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{self._place} {kind} {self._counts[kind]}"

    def before(self, key: str) -> bytes | None:
        return b64decode(self._bodies[key]) if key in self._bodies else None

    def proposed(self, key: str, body: bytes, own: bool) -> None:
        """Note a proposal; refuse one that was another in an earlier epoch."""
        found = hashlib.sha256(body).hexdigest()
        if self._hashes.get(key, found) != found:
            raise Tampered(
                "repeat-differs",
                "The first silo repeats a step of an earlier start with other numbers: go on where "
                "it ran before, or with a new agreement.",
            )
        if key not in self._hashes:
            again = b64encode(body).decode() if own and len(body) <= SMALL else ""
            self._new.append([key, found, again])
            self._note(key, found, again)

    def write(self) -> None:
        if self._new and self._lines is not None:
            self._lines.append(self._new)
        self._new.clear()

    def _note(self, name: str, found: str, body: str) -> None:
        self._hashes[name] = found
        self._bodies |= {name: body} if body else {}


@dataclass(eq=False)
class Session:
    """Exchanges of one epoch; without an identity, those of an onlooker, who posts nothing."""

    link: Link
    cards: Mapping[str, Card]  # of all silos in their order: the first one proposes
    agreement: bytes  # its hash
    name: str = ""
    identity: Identity | None = None
    tolerance: float = NEAR  # by how much a proposal may differ from one's own, as a share
    wire: Traffic = field(default_factory=Traffic)
    announced: Container[Part] = ()  # what may leave; a part that is not in it is never encoded
    before: Callable[[], None] = lambda: None  # called before a post leaves
    journal: Journal = field(default_factory=Journal)
    sent: dict[str, list[int]] = field(default_factory=dict, init=False)  # posts and bytes by kind
    step: int = field(default=0, init=False)
    digest: bytes = field(default=b"", init=False)  # T
    _masks: Masks | None = field(default=None, init=False, repr=False)
    _next: bytes | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.names = tuple(self.cards)
        self.digest = hashlib.sha256(b"scaffpd board" + self.agreement).digest()

    @property
    def proposes(self) -> bool:
        return self.name == self.names[0]

    def open(self, about: JsonMapping) -> dict[str, Json]:
        """Begin an epoch: post one's own facts, and return everybody's."""
        own = None
        if self.identity is not None:
            self._masks = Masks(self.name, self.identity)
            facts = {
                **about,
                "agreement": self.agreement.hex(),
                "fresh": self._masks.fresh.hex(),
            }
            own = json.dumps(facts).encode()
        found: dict[str, Json] = {}
        for name, post in self._exchange(EPOCH, ALL, own).items():
            try:
                found[name] = dict(json.loads(post))
                fresh = bytes.fromhex(found[name]["fresh"])
                same = found[name]["agreement"] == self.agreement.hex() and len(fresh) == 32
            except (ValueError, KeyError, TypeError):
                same = False
            if not same:
                raise Tampered("agreement-differs", f"Silo {name!r} has a different agreement.")
        if self._masks is not None:
            keys = {name: bytes.fromhex(facts["fresh"]) for name, facts in found.items()}
            self._masks.meet(self.cards, keys)
        return found

    def _exchange(self, kind: str, senders: str, body: bytes | None) -> dict[str, bytes]:
        """Post, check everybody's signature, and add the posts to the transcript."""
        said = self.digest + self.step.to_bytes(8, "big") + f"{senders} {kind}".encode()
        own = None
        if body is not None and self.identity is not None:
            self.before()
            self.journal.write()
            own = self.identity.sign(said + body) + body
            count, size = self.sent.get(kind, (0, 0))
            self.sent[kind] = [count + 1, size + len(own)]
        posts = self.link.exchange(self.step, senders, own)
        names = self.names[:1] if senders == FIRST else self.names
        if set(posts) != set(names):
            raise Tampered("other-members", f"The board shows posts of others at step {self.step}.")
        digest = hashlib.sha256(said)
        for name in names:
            post = posts[name]
            if not self.cards[name].signed(post[:SIGNATURE], said + post[SIGNATURE:]):
                raise Tampered(
                    "post-not-signed",
                    f"The post of silo {name!r} at step {self.step} is not the one that it made "
                    "after what this silo has seen.",
                )
            digest.update(len(post).to_bytes(8, "big") + post)
        if own is not None and posts[self.name] != own:
            raise Tampered("own-post-changed", "The board shows a different post of this silo.")
        self.wire.add(
            exchanges=1, up=len(own or b""), down=sum(len(post) for post in posts.values())
        )
        self.digest = digest.digest()
        self.step += 1
        return {name: posts[name][SIGNATURE:] for name in names}

    # --- proposals

    def upcoming(self) -> Message:
        """Return the first silo's next proposal, which is not its turn to make here."""
        if self._next is None:
            (self._next,) = self._exchange("proposal", FIRST, None).values()
        return decode(self._next)

    def propose(
        self, kind: str, values: JsonMapping, arrays: Mapping[str, Array]
    ) -> tuple[Json, dict[str, Array]]:
        """Return the first silo's question, once it is found to be the one expected here."""
        key = self.journal.key(kind)
        if self.proposes:
            body = self.journal.before(key) or encode(Message(kind, values, arrays))
            self._exchange("proposal", FIRST, body)
            theirs = decode(body)
        else:
            theirs = self.upcoming()
            body = self._next or b""
            self._next = None
        if theirs.kind != kind or theirs.arrays.keys() != arrays.keys():
            raise _unexpected(kind, theirs.kind)
        if not close_values(values, theirs.values, self.tolerance):
            raise _unexpected("question", "values")
        for name, array in arrays.items():
            other = theirs.arrays[name]
            if other.shape != array.shape or other.dtype != array.dtype:
                raise _unexpected(kind, name)
            differ = array != other  # infinite numbers have to be the same
            pair = np.stack([array[differ], other[differ]])
            size = np.abs(array[np.isfinite(array)]).max(initial=0)
            if not np.all(np.abs(np.diff(pair, axis=0)) <= self.tolerance * size):
                raise _unexpected(kind, name)
        if kind not in (STATE, END):
            self.journal.proposed(key, body, self.proposes)
        return dict(theirs.values), dict(theirs.arrays)

    # --- what all silos post

    def clear(
        self, shown: Sequence[Shown], own: Vector, sizes: Sequence[int] | None = None
    ) -> NDArray[np.float64]:
        """Return the numbers of all silos as they are, (N, k): each in the range of its part, or
        NaN; `sizes` say how many of the k belong to every part.
        """
        kind = self._allowed(shown, one_by_one=True)
        counts = np.ones(len(shown), np.int64) if sizes is None else sizes
        least, most = np.repeat([one.range for one in shown], counts, axis=0).T
        usable = np.where((least <= own) & (own <= most), own, np.nan)
        body = np.ascontiguousarray(usable, dtype="<f8").tobytes()
        posts = self._numbers(f"clear {kind}", body, len(body))
        table = np.stack([np.frombuffer(post, dtype="<f8") for post in posts])
        for name, row in zip(self.names, table, strict=True):
            if np.any((row < least) | (row > most)):
                raise Tampered(
                    "number-out-of-range",
                    f"Silo {name!r} posted a number that {shown[0].words} cannot be.",
                )
        return table

    def total(self, shown: Shown, own: Vector | NDArray[np.int64] | None, places: Places) -> Vector:
        """Return the sum of all silos' vectors, of which each leaves masked."""
        kind = self._allowed([shown], one_by_one=False)
        body = None
        about = f"{self.step} masked {kind} {len(places.fraction)}"
        if self._masks is not None and own is not None:
            masked = self._masks.add(places.encode(own), self.digest, about.encode())
            body = masked.astype("<u8").tobytes()
        posts = self._numbers(f"masked {kind}", body, places.bytes)
        terms = (np.frombuffer(post, dtype="<u8").reshape(2, -1) for post in posts)
        return places.decode(reduce(add, terms))

    def _allowed(self, shown: Sequence[Shown], one_by_one: bool) -> str:
        """Refuse what was not announced; return its name."""
        for one in shown:
            if one.key not in self.announced or (one_by_one and not one.each):
                raise InputError(
                    "not-announced",
                    f"The method asks for {one.words} ({' '.join(one.key)}), which the agreement "
                    "does not announce.",
                )
        named = [one.part for one in shown if one.extra or not one_by_one]
        return " ".join([shown[0].kind, *named])

    def _numbers(self, kind: str, body: bytes | None, size: int) -> list[bytes]:
        posts = self._exchange(kind, ALL, body)
        for name, post in posts.items():
            if len(post) != size:
                raise Tampered(
                    "post-of-other-length", f"Silo {name!r} posted too few or too many numbers."
                )
        return list(posts.values())

    def wide_total(self, shown: Shown, own: Vector) -> Vector:
        """Return the sum of vectors whose numbers have any scale; an onlooker passes zeros."""
        places, parts = wide(np.asarray(own, dtype=np.float64), len(self.names))
        return narrow(self.total(shown, parts, places))

    def confirm(self) -> None:
        """End the epoch: everybody has seen the same."""
        self._exchange("confirm", ALL, b"")


def close_values(own: object, theirs: object, tolerance: float) -> bool:
    """Return whether JSON values are the same but for the last digits of numbers."""
    if isinstance(own, float) and isinstance(theirs, float):
        return abs(own - theirs) <= tolerance * max(abs(own), abs(theirs))
    if isinstance(own, Mapping) and isinstance(theirs, Mapping):
        pairs = [(own[key], theirs[key]) for key in own if key in theirs]
        return own.keys() == theirs.keys() and all(close_values(a, b, tolerance) for a, b in pairs)
    if isinstance(own, list | tuple) and isinstance(theirs, list | tuple):
        pairs = list(zip(own, theirs, strict=False))
        return len(own) == len(theirs) and all(close_values(a, b, tolerance) for a, b in pairs)
    return type(own) is type(theirs) and own == theirs


def _unexpected(kind: str, what: str) -> Tampered:
    return Tampered(
        "proposal-differs",
        f"The first silo asks for {what}, where the agreed method asks for {kind}.",
    )
