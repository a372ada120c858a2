r"""`Silo`: one site. It runs the agreed method itself, and answers the board with its next post.

It takes an agreement from outside and decides from that document alone. What it cannot do with its
own rows it says in one sentence for all cases: refusals tell nothing about rows.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from scaffpd.deploy.agreement import Agreement, allowed
from scaffpd.deploy.board import BEGIN, DONE, LEAVE, LOST, NEWS, Abandoned, Mailbox, read_news
from scaffpd.deploy.ledger import TABLE_BUSY, TableLedger
from scaffpd.deploy.messages import REFUSED, Message, decode, encode
from scaffpd.deploy.program import RunStates, take_part
from scaffpd.deploy.records import LEFT, SiloRecords
from scaffpd.deploy.rows import SiloRows
from scaffpd.deploy.transcript import Session, Tampered
from scaffpd.errors import InputError
from scaffpd.files import write_file
from scaffpd.run.settings.model_file import model_bytes
from scaffpd.run.settings.silo import SiloFile
from scaffpd.secure.keys import Identity
from scaffpd.secure.ring import ClippedSum

log = logging.getLogger("scaffpd.silo")
CARD = "card"
READY = "ready"
PATIENCE = 20.0  # seconds after which a silo that computes says so
AWAITED = ("agreement-awaited", TABLE_BUSY)  # what time may change
PUBLIC = (  # codes of refusals about what everybody sees
    TABLE_BUSY,
    "ledger-changed",
    "ledger-went-back",
    "model-too-large",
    "privacy-budget",  # the account counts releases, which are public
    "rows-changed",
    "share-too-large",
    "too-many-weightings",
)
NOT_TOLD = "This silo cannot take part; its own log says why."
MODEL = "model.safetensors"


class Silo:
    """One site: its file, its rows, its records, and the run that it takes part in."""

    def __init__(self, file: SiloFile) -> None:
        self.file = file
        self.name = file.name
        self.records = SiloRecords(file.records)
        self._mailbox: Mailbox | None = None
        self._epoch = ""
        self._run_name = ""
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Silo:
        """Open the silo of a silo.toml; its rows are read once it takes part."""
        return cls(SiloFile.read(Path(path)))

    @cached_property
    def identity(self) -> Identity:
        """The silo's keys."""
        self.file.folder.mkdir(parents=True, exist_ok=True)
        return Identity.stored(self.file.identity)

    def answer(self, question: bytes) -> bytes:
        """Return the silo's card, the beginning of a run, or its next post; never raise."""
        try:
            with self._lock:
                return encode(self._answer(decode(question)))
        except InputError as error:
            log.warning("refused: %s", error)
            about = {"sentence": str(error), "code": error.code, "waits": error.code in AWAITED}
        except Exception:
            log.exception("a question failed")
            about = {"sentence": NOT_TOLD}
        return encode(Message(REFUSED, about))

    def _answer(self, asked: Message) -> Message:
        if asked.kind == CARD:
            return Message(CARD, {"card": self.identity.card.digits})
        states = asked.values.get("states")
        if asked.kind == BEGIN and isinstance(states, list):
            self._begin(asked, states)
            return Message(READY)
        if asked.kind == LEAVE:
            if self._mailbox is not None and asked.values.get("epoch") == self._epoch:
                self._mailbox.close()
            return Message(DONE)
        if asked.kind != NEWS:
            raise InputError("question-unknown", "This silo does not know this message.")
        mailbox = self._mailbox
        if mailbox is None or asked.values.get("epoch") != self._epoch:
            return Message(LOST)
        mailbox.show(*read_news(asked))
        reply = mailbox.next(PATIENCE)
        if reply.kind == DONE and mailbox.failure is not None:
            raise mailbox.failure  # `answer` makes a refusal of it
        return reply

    def _begin(self, asked: Message, states: list[Any]) -> None:
        agreement = Agreement.of(asked.values.get("agreement"), self.file.path)
        run = agreement.digest.hex()
        agreement.check(self.file, self.identity.card)
        self.records.ask(run, agreement.values)
        others = bool(agreement.with_others(self.records.begun()))
        allowed(self.file, self.records.granted(run), others)
        if run == self._run_name:
            self.close()
        ledger = TableLedger(self.file.ledger)
        try:
            ledger.take(self.records.ledger())
        except InputError as error:
            raise _public(error) from None
        try:
            fingerprint = self.identity.card.fingerprint
            if not agreement.values["noise"] and ledger.others(fingerprint):
                allowed(self.file, self.records.granted(run), others=True)
            self.records.begin(run, self.file.limits.runs, ledger.link)
            self._run_name = run
            self._epoch = str(asked.values.get("epoch"))
            self._mailbox = Mailbox()
            self._mailbox.start(partial(self._hold, ledger, self._mailbox, agreement, states))
        except BaseException:
            ledger.leave()
            raise

    def close(self) -> None:
        """End the epoch under way, and wait until it has ended; its rows are free then."""
        if self._mailbox is not None:
            self._mailbox.close(PATIENCE)

    def _hold(
        self, ledger: TableLedger, mailbox: Mailbox, agreement: Agreement, states: list[Any]
    ) -> None:
        """Run the agreement, and note what has left, while no other run is over these rows."""
        run = agreement.digest.hex()
        with ledger:
            session = Session(mailbox, agreement.cards, agreement.digest, self.name, self.identity)
            try:
                self._run(session, agreement, states, ledger)
            finally:
                self.records.note(LEFT, run, posts=session.sent, ledger=ledger.link)

    def _run(
        self, session: Session, agreement: Agreement, states: list[Any], ledger: TableLedger
    ) -> None:
        """Run the agreement; write the model once everybody has confirmed."""
        terms = agreement.terms(self.file.path)
        try:
            rows = SiloRows(self.file, agreement, terms, ledger)
            session.before = rows.written_down
            if terms.privacy is None:  # with noise, a repeat is another release
                session.journal = rows.journal()
            done = take_part(session, agreement, terms, RunStates(rows.folder), states, rows)
            write_file(rows.folder / MODEL, model_bytes(done.result.x, done.setup))
        except Abandoned:
            raise
        except InputError as error:
            raise _public(error) from None
        except BaseException:  # the operator's own code may even exit
            log.exception("the run failed")  # the details may contain data and stay here
            raise InputError("silo-cannot", NOT_TOLD) from None


def _public(error: InputError) -> InputError:
    """Return the error as others get it; the log has it whole."""
    log.error("%s", error)
    public = isinstance(error, Tampered | ClippedSum) or error.code in PUBLIC
    return error if public else InputError("silo-cannot", NOT_TOLD)
