r"""A silo's records, which outlive runs and processes: what was asked, agreed to, and has left.

Every line has a link, the SHA-256 of the link before and of the line: changing, removing or
inserting one changes all later links, and a link that was noted down elsewhere proves that the end
was not cut off. Write access to records.jsonl is the right to agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from scaffpd.deploy.messages import EPOCH, JsonMapping
from scaffpd.errors import InputError
from scaffpd.fields import Json
from scaffpd.files import JsonLines

LINK = "link"
ASKED = "asked"  # an agreement came
GRANTED = "granted"  # by a person here
REVOKED = "revoked"
BEGUN = "begun"  # an epoch, whatever became of it
LEFT = "left"  # how many posts of which kind, in an epoch
WAITING = 8  # agreements that nobody here has decided about, at most


class LinkedLines:
    """A file of linked lines, to append to and to read.

    Args:
        file: its path.
        first: the link before the first line.
    """

    def __init__(self, file: Path, first: str = "") -> None:
        self.file = file
        self.first = first
        self._lines = JsonLines(file)

    def lock(self) -> AbstractContextManager[None]:
        return self._lines.lock()

    def append(self, line: JsonMapping) -> str:
        link = link_of(self.last(), line)
        self._lines.append({**line, LINK: link})
        return link

    def last(self) -> str:
        return str(self._lines.last({LINK: self.first})[LINK])

    def read(self) -> Iterator[Json]:
        """Yield all lines; a line that is none, or has a wrong link, raises a ValueError."""
        link = self.first
        for line in JsonLines(self.file).read():
            if not isinstance(line, dict):
                raise ValueError
            link = link_of(link, {name: part for name, part in line.items() if name != LINK})
            if line.get(LINK) != link:
                raise ValueError
            yield line


def link_of(before: str, line: JsonMapping) -> str:
    content = json.dumps(line, sort_keys=True)
    return hashlib.sha256(f"{before}{content}".encode()).hexdigest()


@dataclass
class Known:
    """What the records say about agreements, by their hashes."""

    documents: dict[str, Json]
    granted: dict[str, bool]  # the last decision of a person
    runs: set[str]  # that have begun here
    left: dict[str, bool]  # of those that were left: whether others took part in any epoch
    ledger: str = ""  # the last link of the table's ledger that was noted

    @property
    def counted(self) -> set[str]:
        """Runs that `limits.runs` counts: a document that nobody else has signed is none."""
        return {digest for digest in self.runs if self.left.get(digest, True)}

    @property
    def begun(self) -> dict[str, Json]:
        return {digest: own for digest, own in self.documents.items() if digest in self.runs}

    @property
    def waiting(self) -> set[str]:
        return self.documents.keys() - self.granted.keys() - self.runs


class SiloRecords:
    """The file of records."""

    def __init__(self, file: Path) -> None:
        self._lines = LinkedLines(file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file; what cannot be written down does not happen."""
        try:
            self._lines.file.parent.mkdir(parents=True, exist_ok=True)
            with self._lines.lock():
                yield
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                "records-unreadable",
                f"The silo's records {self._lines.file.name!r} cannot be read.",
            ) from None

    def note(self, what: str, digest: str, **about: object) -> None:
        with self._locked():
            self._append(what, digest, about)

    def _append(self, what: str, digest: str, about: JsonMapping) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        self._lines.append({"time": time, "what": what, "agreement": digest, **about})

    def read(self) -> list[Json]:
        """Return all lines; refuse a file in which a link is wrong."""
        lines = list[Json]()
        try:
            for line in self._lines.read():
                lines.append(line)
        except (OSError, ValueError):
            raise InputError(
                "records-changed",
                f"Line {len(lines) + 1} of the silo's records {self._lines.file.name!r} was "
                "changed, or an earlier line was removed.",
            ) from None
        return lines

    def known(self) -> Known:
        """Return what is known about agreements; it reads the file once."""
        found = Known({}, {}, set(), {})
        for line in self.read():
            digest = line["agreement"]
            what = line["what"]
            if what == ASKED:
                found.documents[digest] = line["document"]
            elif what in (GRANTED, REVOKED):
                found.granted[digest] = what == GRANTED
            elif what == BEGUN:
                found.runs.add(digest)
            elif what == LEFT:
                met = bool(line["posts"].keys() - {EPOCH})
                found.left[digest] = met or found.left.get(digest, False)
            found.ledger = line.get("ledger") or found.ledger
        return found

    def ask(self, digest: str, document: JsonMapping) -> None:
        """Note an agreement that a person has to decide about, once; refuse one too many."""
        with self._locked():
            known = self.known()
            if digest in known.documents:
                return
            if digest not in known.granted and len(known.waiting) >= WAITING:
                raise InputError(
                    "too-many-waiting",
                    f"{WAITING} agreements wait for the operator of this silo already: `scaffpd "
                    "silo agree` shows them, and --grant or --revoke decides.",
                )
            self._append(ASKED, digest, {"document": document})

    def begin(self, digest: str, document: JsonMapping, most: int, ledger: str = "") -> None:
        """Note an epoch and the ledger's last link; refuse one run too many.

        Several processes of a silo may begin at the same time: the lock is held from the count on.
        """
        with self._locked():
            known = self.known()
            if len(known.counted | {digest}) > most:
                raise InputError(
                    "too-many-runs",
                    f"This silo has taken part in {len(known.counted)} runs, and its limits.runs "
                    f"is {most}: go on with an earlier agreement, or let its operator raise that.",
                )
            if digest not in known.documents:
                self._append(ASKED, digest, {"document": document})
            if digest not in known.runs or ledger != known.ledger:
                self._append(BEGUN, digest, {"ledger": ledger})

    def leave(self, digest: str, posts: Mapping[str, Sequence[int]], ledger: str) -> None:
        """Note what has left in an epoch; one without others is noted once, however often begun."""
        with self._locked():
            known = self.known()
            if digest not in known.left or posts.keys() - {EPOCH} or ledger != known.ledger:
                self._append(LEFT, digest, {"posts": posts, "ledger": ledger})


def audit(lines: Sequence[Json], noted: str = "") -> list[Json]:
    """Return run by run what has left; refuse if a noted link is missing."""
    if noted and not any(line[LINK] == noted for line in lines):
        raise InputError("link-missing", "These records do not contain that link.")
    runs: dict[str, Json] = {}
    for line in lines:
        run = runs.setdefault(
            line["agreement"],
            {"agreement": line["agreement"], "from": line["time"], "epochs": 0, "posts": {}},
        )
        run["to"] = line["time"]
        run["epochs"] += line["what"] == BEGUN
        if line["what"] in (GRANTED, REVOKED):
            run["decision"] = f"{line['what']} by {line.get('by', 'somebody')}"
        for kind, (count, size) in (line.get("posts") or {}).items():
            had = run["posts"].get(kind, [0, 0])
            run["posts"][kind] = [had[0] + count, had[1] + size]
    return list(runs.values())
