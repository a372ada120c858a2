r"""The ledger of a table: what its rows were summed with and released, over all runs of all silos.

It is in a folder of the table (`SiloFile.ledger`): a lock, a secret, and one file of linked lines,
to which every post that reveals something new adds one, on disk before the post leaves. Whoever
runs over the table holds the lock from the first look at the ledger to the end of the run, and the
kernel frees it if the process dies: two runs that count at the same time would both count too few.

Before every post the file has to be the one that this run has read and written. That a whole ledger
is an older one shows at the next run: every silo notes the last link in its own folder, in its
records as a run begins and ends, and in a small file with every line that it adds.

Noise comes from the operating system, and neither it nor what it is drawn from is ever stored: a
question that is repeated after a restart is another release. Counts for curves are stored with
their noise, so that the same bytes are posted again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from scaffpd.deploy.deployed_run import GLANCE
from scaffpd.deploy.records import LINK, LinkedLines, link_of
from scaffpd.deploy.refusals import TABLE_BUSY, refusal
from scaffpd.deploy.transcript import OBJECTIVE
from scaffpd.errors import InputError
from scaffpd.fields import Json
from scaffpd.files import LOCK_NAME, load_or_create, write_file
from scaffpd.privacy.accountant import Account, ReleaseEntry
from scaffpd.secure.keys import derived

log = logging.getLogger("scaffpd.silo")
DELTA = 1e-5  # of a silo's own budget


@dataclass(frozen=True)
class Entrant:
    """Whose entries they are."""

    run: str  # hash of the agreement
    silo: str  # fingerprint of the silo's key
    members: str  # names the keys of the run's members
    rows: str  # names the rows


class TableLedger:
    """The ledger of a table, and the lock without which nobody reads or writes it.

    Args:
        folder: where both are.
        noted: the silo's own file with the last link that it has written; by default none.
    """

    def __init__(self, folder: Path, noted: Path | None = None) -> None:
        self.folder = folder
        self._noted = noted
        self.link = ""  # of the last line
        self.secret = b""  # keys the marks that name rows: those of a silo differ between silos
        self._file = folder / "ledger.jsonl"
        # taken by the thread that a run begins in, and left by the one that the run ends in
        self._lock = FileLock(folder / LOCK_NAME, timeout=GLANCE, thread_local=False)
        self._lines = LinkedLines(self._file)
        self._entries: list[Json] = []
        self._seen: tuple[int, ...] = ()

    def take(self, noted: Callable[[], str] = str) -> None:
        """Hold the table for a run, and read its ledger; refuse if it lacks a link noted before.

        What is `noted` in the silo's records is looked up once nobody else runs over the table.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise refusal(TABLE_BUSY) from None
        except OSError as error:
            raise InputError(
                "ledger-not-writable",
                f"Cannot write the ledger {str(self.folder)!r}: {error.strerror}. Name another "
                "folder in data.ledger.",
            ) from None
        try:
            self._read(noted())
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        """Hold the table, which `take` has taken, until the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _read(self, noted: str) -> None:
        written = self._noted.read_text() if self._noted and self._noted.exists() else ""
        self.secret = load_or_create(self.folder / "secret.key")
        self._file.touch(0o600)
        self._seen = self._state()
        # a ledger whose secret has gone cannot name rows: its first link is not the same, either
        self._lines = LinkedLines(self._file, derived(self.secret, b"ledger").hex())
        self._entries = self._chain()
        self.link = self._entries[-1][LINK] if self._entries else self._lines.first
        if not {noted, written} <= {"", self._lines.first, *(line[LINK] for line in self._entries)}:
            log.error("The ledger %s has gone back in time.", self.folder)
            raise refusal("ledger-went-back")

    def _chain(self) -> list[Json]:
        try:
            return list(self._lines.read())
        except (OSError, ValueError):
            raise self._changed() from None

    def _chain_end(self) -> str:
        try:
            return self._lines.last()
        except (OSError, ValueError, KeyError, TypeError):
            raise self._changed() from None

    def _changed(self) -> InputError:
        log.error("The ledger %s was changed by somebody else.", self.folder)
        return refusal("ledger-changed")

    def _state(self) -> tuple[int, ...]:
        """Return what shows in no time that ledger and lock are others; the last one is a time."""
        try:
            own = os.stat(self._file)
            lock = os.stat(self.folder / LOCK_NAME)
        except OSError:
            raise self._changed() from None
        return (lock.st_dev, lock.st_ino, own.st_dev, own.st_ino, own.st_size, own.st_ctime_ns)

    def check(self) -> None:
        """Refuse if somebody else has written, cut or replaced the ledger, or its lock."""
        now = self._state()
        if now == self._seen:  # since it was read, or read back
            return
        # a backup may have touched it; or a line was written over
        if now[:-1] != self._seen[:-1] or self._chain() != self._entries:
            raise self._changed()
        self._seen = now

    def write(
        self,
        who: Entrant,
        weightings: Sequence[Sequence[str]] = (),
        releases: Sequence[ReleaseEntry] = (),
    ) -> None:
        """Append what is new, and read it back; called before a post leaves."""
        self.check()
        if not weightings and not releases:
            return
        line: Json = {
            **vars(who),
            "weightings": list(map(list, weightings)),
            "releases": [[one.mark.hex(), one.noise, one.times] for one in releases],
        }
        link = link_of(self.link, line)
        if not link == self._lines.append(line) == self._chain_end():
            raise self._changed()  # somebody wrote meanwhile
        self.link = link
        self._entries.append({**line, LINK: link})
        self._seen = self._state()
        if self._noted is not None:
            write_file(self._noted, link)

    def weightings(self, who: Entrant) -> list[tuple[str, str]]:
        """Return places, and weightings there, that count for a run over these rows.

        Under one key other members are a person's decision, who has read whose gradient that shows;
        objectives count all the same, as a second one would show every gradient. Another key of the
        same rows may be that of the same members.
        """
        return [
            (place, found)
            for line in self._entries
            if line["rows"] == who.rows
            for place, found in line["weightings"]
            if place == OBJECTIVE or line["members"] == who.members or line["silo"] != who.silo
        ]

    def others(self, silo: str) -> bool:
        """Return whether there were sums without noise under another key than this silo's.

        Who the members were, and whose gradient a difference shows, only a person can find out.
        """
        return any(line["weightings"] and line["silo"] != silo for line in self._entries)

    def open(self, account: Account | None, who: Entrant, budget: float | None) -> Account:
        """Add to an account what was released in its run, and bind it to a budget of all runs."""
        if account is None:
            raise InputError(
                "cohort-not-private",
                "The silo's own Cohort is not private: build it from a Private model.",
            )
        if budget is not None:
            account.wider = Account(account.names, DELTA, budget)
        for line in self._entries:
            for mark, noise, times in line["releases"]:  # one by one: plans may have become longer
                entry = ReleaseEntry(0, bytes.fromhex(mark), noise, times)
                if account.wider is not None:
                    account.wider.count([entry])
                if line["run"] == who.run:
                    account.count([entry])
        return account
