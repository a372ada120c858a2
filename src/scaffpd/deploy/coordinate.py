r"""`coordinate`: carry a run from the first greeting to its page, over any transport.

The coordinator keeps the board, and runs the method without rows as an onlooker: it learns what
every silo learns. A silo that does not answer is waited for, and a new epoch goes on from the last
round; after `timeout` seconds the run pauses. To go on without a silo is another agreement.
"""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from scaffpd import __version__
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.board import Board, Mailbox, SiloTrouble
from scaffpd.deploy.deployed_run import FAILED, OUTCOME, PAUSED, DeployedRun, Outcome, read_json
from scaffpd.deploy.messages import REFUSED, Message, Transport, encode
from scaffpd.deploy.program import Finished, RunStates, take_part
from scaffpd.deploy.recording import outcome_of, record_of
from scaffpd.deploy.silo import CARD
from scaffpd.deploy.transcript import Session
from scaffpd.errors import InputError
from scaffpd.federation import Vector
from scaffpd.fields import Json
from scaffpd.files import clear_drafts, write_file
from scaffpd.report.folder import MAIN
from scaffpd.report.record import EventRecord
from scaffpd.secure.keys import Card
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import model_bytes
from scaffpd.training.loop import RoundInfo

log = logging.getLogger("scaffpd.coordinator")
PAUSE_SECONDS = 1.0  # between two attempts to reach silos
STRIKES = 3  # epochs in a row without a new round, after which the run pauses
JOIN_SECONDS = 60.0  # for the onlooker, once all silos are done


def coordinate(path: Path, transport: Transport) -> Outcome:
    """Run the federation of a federation.toml, or resume it; write the result to its folder."""
    file = FederationFile.read(path)
    folder = DeployedRun(file.folder)
    with folder.locked():
        clear_drafts(folder.path)
        try:
            done = reopen(file, folder)
            if done is not None:
                return done
            outcome = Coordination(file, folder, transport).run()
        except InputError as error:
            outcome = Outcome(FAILED, str(error), folder.rounds())
        except Exception as error:  # a full disk, or FLARE has ended the job
            log.exception("The coordinator stops.")
            outcome = folder.pause(str(error))
        if not (folder.path / OUTCOME).exists():  # that of a run with other settings stays
            if outcome.status in (PAUSED, FAILED):
                with suppress(InputError, OSError):  # a file may be what cannot be read
                    record_of(file, folder, outcome).write(folder.path)
            folder.end(outcome)
        log.info("round %s: %s", outcome.rounds, outcome.sentence)
    return outcome


def reopen(file: FederationFile, folder: DeployedRun) -> Outcome | None:
    """Return the outcome of a finished run; otherwise remove it, so that the run goes on.

    A folder is for one agreement: another one needs another folder.
    """
    about: Json = {"terms": file.terms(), "version of scaffpd": __version__}
    place = folder.path / "settings.json"
    if read_json(place, about) != about:
        raise InputError(
            "folder-of-another-run",
            f"The run in {str(folder.path)!r} has other terms: use a new folder.",
        )
    write_file(place, json.dumps(about))
    ended = folder.outcome()
    if ended is not None and ended.final:
        return ended
    (folder.path / OUTCOME).unlink(missing_ok=True)
    return None


class Coordination:
    """One run at the coordinator."""

    def __init__(self, file: FederationFile, folder: DeployedRun, transport: Transport) -> None:
        self.file = file
        self.folder = folder
        self.board = Board(transport, file.silos, file.timeout)
        self.states = RunStates(folder.path)
        self.started = time.monotonic()

    def run(self) -> Outcome:
        """Make epochs until the run ends, or a silo is missing for too long."""
        strikes = 0
        reached: tuple[int, bool] | None = None
        since = time.monotonic()
        while True:
            try:
                return self._finish(self._epoch())
            except SiloTrouble as found:
                trouble = self._noted(found)
            failure = trouble.failure
            now = self.folder.rounds(), failure.waits
            strikes = strikes + 1 if now == reached else 1
            if now != reached or failure.waits:  # a person may take as long as the server runs
                since = time.monotonic()
            reached = now
            refused = failure.what == REFUSED and not failure.waits
            late = time.monotonic() - since > self.file.timeout
            if late or (refused and strikes >= STRIKES):
                return self.folder.pause(str(trouble))
            time.sleep(PAUSE_SECONDS * (min(strikes, 15) if failure.waits else 1))

    def agreement(self) -> Agreement:
        replies = self.board.asked(dict.fromkeys(self.file.silos, encode(Message(CARD))))
        cards = {name: Card.of(reply.values.get("card")) for name, reply in replies.items()}
        return Agreement.made(self.file, cards)

    def _epoch(self) -> Finished:
        """Carry posts from the agreement to the end, with an onlooker in a thread of its own."""
        agreement = self.agreement()
        states = self.states.known()
        mailbox = Mailbox()
        found: list[Finished] = []
        session = Session(mailbox, agreement.cards, agreement.digest)

        def look_on() -> None:
            found.append(
                take_part(
                    session, agreement, self.file, self.states, states, None, self._after_round
                )
            )

        try:
            self.board.begin(agreement.values, states)
            onlooker = mailbox.start(look_on)
            try:
                self.board.run(mailbox)
                onlooker.join(JOIN_SECONDS)
            finally:
                mailbox.close()
                onlooker.join(JOIN_SECONDS)
            if mailbox.failure is not None:
                raise mailbox.failure
        except SiloTrouble as trouble:
            self.board.leave(trouble.name)
            raise
        except Exception:
            self.board.leave()
            raise
        return found[0]

    def _noted(self, trouble: SiloTrouble) -> SiloTrouble:
        failure = trouble.failure
        what = "waits" if failure.waits else failure.what
        event = EventRecord(
            round=self.folder.rounds(), client=trouble.name, what=what, sentence=str(trouble)
        )
        _, before = self.folder.entries()
        if not before or before[-1] != event:  # one that waits for a person repeats itself
            self.folder.progress({"event": event.model_dump()})
        return trouble

    def _after_round(self, info: RoundInfo) -> None:
        gap = float(info.state.certificate)
        self.folder.progress(
            {
                "round": info.rounds,
                "certificate": gap if np.isfinite(gap) else None,
                "losses": _known(info.state.losses),
                "weights": _known(info.state.weights),
                "exchanges": int(info.history["exchanges"][-1]),
                "messages_up": self.board.wire.bytes_up,
                "messages_down": self.board.wire.bytes_down,
                "seconds": round(time.monotonic() - self.started, 3),
            }
        )

    def _finish(self, done: Finished) -> Outcome:
        result = done.model.result
        outcome = outcome_of(self.file, done)
        write_file(self.folder.path / MAIN, model_bytes(result.x, done.setup))
        record_of(self.file, self.folder, outcome, done).write(self.folder.path)
        return outcome


def _known(numbers: Vector) -> list[float | None]:
    return [None if math.isnan(number) else float(number) for number in numbers]
