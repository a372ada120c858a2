r"""A silo's records, which outlive runs and processes: what was asked, agreed to, and has left.

Every line of records.jsonl has a link, the SHA-256 of the link before and of the line: changing,
removing or inserting one changes all later links, and a link that was noted down elsewhere proves
that the end was not cut off. Write access to the file is the right to agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from scaffpd.deploy.messages import Json, JsonMapping
from scaffpd.errors import InputError
from scaffpd.files import JsonLines

ASKED = "asked"  # an agreement came
GRANTED = "granted"  # by a person here
REVOKED = "revoked"
BEGUN = "begun"  # an epoch, whatever became of it
LEFT = "left"  # how many posts of which kind, in an epoch
WAITING = 8  # agreements that nobody here has decided about, at most


@dataclass(frozen=True)
class Known:
    """What the records say about agreements, by their hashes."""

    documents: dict[str, Json]
    granted: dict[str, bool]  # the last decision of a person
    runs: set[str]  # in which this silo has taken part

    @property
    def begun(self) -> dict[str, Json]:
        """Documents of the runs that this silo has taken part in."""
        return {digest: own for digest, own in self.documents.items() if digest in self.runs}

    @property
    def waiting(self) -> set[str]:
        """Agreements that wait for a person."""
        return self.documents.keys() - self.granted.keys() - self.runs


class SiloRecords:
    """The file of records."""

    def __init__(self, file: Path) -> None:
        self._lines = JsonLines(file)

    def note(self, what: str, digest: str, **about: object) -> None:
        """Append a line; what cannot be written down does not happen."""
        with self._locked():
            self._append(what, digest, **about)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._lines.file.parent.mkdir(parents=True, exist_ok=True)
            with self._lines.lock():
                yield
        except InputError:
            raise
        except (OSError, ValueError, KeyError):
            raise InputError(
                "records-unreadable",
                f"The silo's records {self._lines.file.name!r} cannot be read.",
            ) from None

    def _append(self, what: str, digest: str, **about: object) -> None:
        before = self._lines.last({"link": ""})
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "what": what,
            "agreement": digest,
            **about,
        }
        self._lines.append({**line, "link": _link(before["link"], line)})

    def read(self) -> list[Json]:
        """Return all lines; refuse a file in which a link is wrong."""
        lines = list[Json]()
        link = ""
        try:
            for line in JsonLines(self._lines.file).read():
                link = _link(link, {name: part for name, part in line.items() if name != "link"})
                if line["link"] != link:
                    raise ValueError
                lines.append(line)
        except (OSError, ValueError, KeyError, AttributeError):
            raise InputError(
                "records-changed",
                f"Line {len(lines) + 1} of the silo's records {self._lines.file.name!r} was "
                "changed, or an earlier line was removed.",
            ) from None
        return lines

    def known(self) -> Known:
        """Return what is known about agreements; it reads the file once."""
        found = Known({}, {}, set())
        for line in self.read():
            digest = line["agreement"]
            what = line["what"]
            if what == ASKED:
                found.documents[digest] = line["document"]
            elif what in (GRANTED, REVOKED):
                found.granted[digest] = what == GRANTED
            elif what == BEGUN:
                found.runs.add(digest)
        return found

    def granted(self, digest: str) -> bool | None:
        """Return the last decision about an agreement; `None` without one."""
        return self.known().granted.get(digest)

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
            self._append(ASKED, digest, document=document)

    def begin(self, digest: str, document: JsonMapping, most: int) -> None:
        """Note an epoch; refuse one run too many."""
        with self._locked():
            known = self.known()
            if len(known.runs | {digest}) > most:
                raise InputError(
                    "too-many-runs",
                    f"This silo has taken part in {len(known.runs)} runs, and its limits.runs is "
                    f"{most}: go on with an earlier agreement, or let its operator raise that.",
                )
            if digest not in known.documents:
                self._append(ASKED, digest, document=document)
            self._append(BEGUN, digest)


def _link(before: str, line: JsonMapping) -> str:
    content = json.dumps(line, sort_keys=True)
    return hashlib.sha256(f"{before}{content}".encode()).hexdigest()


def audit(lines: Sequence[Json], noted: str = "") -> list[Json]:
    """Return run by run what has left; refuse if a noted link is missing."""
    if noted and not any(line["link"] == noted for line in lines):
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
