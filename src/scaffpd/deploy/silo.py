r"""`Silo`: one site. It runs the agreed method itself, and answers the board with its next post.

It takes an agreement from outside and decides from that document alone. What it cannot do with its
own rows it says in one sentence for all cases: refusals tell nothing about rows.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from scaffpd.deploy.agreement import LONGEST, Agreement, allowed
from scaffpd.deploy.board import BEGIN, DONE, LEAVE, LOST, NEWS, Abandoned, Mailbox, read_news
from scaffpd.deploy.judging import judged
from scaffpd.deploy.ledger import TableLedger
from scaffpd.deploy.messages import REFUSED, Message, decode, encode, plain
from scaffpd.deploy.program import Finished, RunStates, take_part
from scaffpd.deploy.recording import silo_record
from scaffpd.deploy.records import Known, SiloRecords
from scaffpd.deploy.refusals import (
    AWAITED,
    CANNOT,
    OF_DOCUMENTS,
    PUBLIC,
    SENTENCES,
    UNUSABLE,
    WAITS,
    refusal,
)
from scaffpd.deploy.rows import SiloRows
from scaffpd.deploy.transcript import Session, Tampered
from scaffpd.errors import InputError
from scaffpd.files import write_file
from scaffpd.report.folder import MAIN, write_files
from scaffpd.report.recording import exports
from scaffpd.secure.keys import Identity
from scaffpd.secure.ring import ClippedSum
from scaffpd.settings.model_file import model_bytes
from scaffpd.settings.silo import SiloFile
from scaffpd.settings.terms import FederationTerms

log = logging.getLogger("scaffpd.silo")
CARD = "card"
READY = "ready"
PATIENCE = 20.0  # seconds after which a silo that computes says so
DESERTED = 3600.0  # seconds without a post of others, after which the rows are free for other runs
HEADER = LONGEST + 2**12  # bytes of a question's values: an agreement, and states of a run


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
        self.file.folder.mkdir(parents=True, exist_ok=True)
        return Identity.stored(self.file.identity)

    def answer(self, question: bytes) -> bytes:
        """Return the silo's card, the beginning of a run, or its next post; never raise."""
        try:
            with self._lock:
                return encode(self._answer(decode(question, header=HEADER)))
        except InputError as error:
            log.warning("refused (%s): %s", error.code, plain(error))
            public = error if _of_others(error) else refusal(error.code)
            about = {"code": public.code, "sentence": str(public), "waits": public.code in WAITS}
        except Exception:
            log.exception("a question failed")
            about = {"code": CANNOT, "sentence": SENTENCES[CANNOT]}
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
            raise refusal("question-unknown")
        mailbox = self._mailbox
        if mailbox is None or asked.values.get("epoch") != self._epoch:
            return Message(LOST)
        mailbox.show(*read_news(asked))
        reply = mailbox.next(PATIENCE)
        if reply.kind == DONE and mailbox.failure is not None:
            if isinstance(mailbox.failure, Abandoned):
                return Message(LOST)
            # `answer` makes a refusal of it; a traceback would grow with every question
            raise mailbox.failure.with_traceback(None)
        return reply

    def _begin(self, asked: Message, states: list[list[object]]) -> None:
        agreement = self._read(asked.values.get("agreement"))
        run = agreement.digest.hex()
        agreement.check(self.file, self.identity.card)
        known = self.records.known()
        self._allowed(agreement, known, bool(agreement.with_others(known.begun)))
        terms = agreement.settled(self.file)
        if run == self._run_name:
            self.close()
        ledger = TableLedger(self.file.ledger, self.file.noted)
        try:
            ledger.take(lambda: self.records.known().ledger)
        except InputError as error:
            raise _public(error) from None
        try:
            # another run of this silo may have begun, and ended, while this one waited
            known = self.records.known()
            foreign = ledger.others(self.identity.card.fingerprint)
            others = bool(agreement.with_others(known.begun))
            self._allowed(agreement, known, others or (foreign and not agreement.values["noise"]))
            self.records.begin(run, agreement.values, self.file.limits.runs, ledger.link)
            self._run_name = run
            self._epoch = str(asked.values.get("epoch"))
            self._mailbox = Mailbox(DESERTED)
            hold = partial(self._hold, ledger, self._mailbox, agreement, terms, states)
            self._mailbox.start(hold)
        except BaseException:
            ledger.leave()
            raise

    def _allowed(self, agreement: Agreement, known: Known, others: bool) -> None:
        """Refuse what the operator has not agreed to, and note the wish."""
        run = agreement.digest.hex()
        try:
            allowed(self.file, known.granted.get(run), others)
        except InputError as error:
            if error.code == AWAITED:
                self.records.ask(run, agreement.values)
            raise

    def _read(self, document: object) -> Agreement:
        """Read an agreement; almost whatever is wrong with it has one code."""
        try:
            return Agreement.of(document, self.file.path)
        except InputError as error:
            if error.code in OF_DOCUMENTS:
                raise
            raise InputError(UNUSABLE, str(error)) from None  # the sentence is for the log

    def close(self) -> None:
        """End the epoch under way, and wait until it has ended; its rows are free then."""
        if self._mailbox is not None:
            self._mailbox.close(PATIENCE)

    def _hold(
        self,
        ledger: TableLedger,
        mailbox: Mailbox,
        agreement: Agreement,
        terms: FederationTerms,
        states: list[list[object]],
    ) -> None:
        """Run the agreement, and note what has left, while no other run is over these rows."""
        run = agreement.digest.hex()
        with ledger:
            session = Session(mailbox, agreement.cards, agreement.digest, self.name, self.identity)
            try:
                self._run(session, agreement, terms, states, ledger)
            finally:
                self.records.leave(run, session.sent, ledger.link)

    def _run(
        self,
        session: Session,
        agreement: Agreement,
        terms: FederationTerms,
        states: list[list[object]],
        ledger: TableLedger,
    ) -> None:
        try:
            rows = SiloRows(self.file, agreement, terms, ledger)
            session.before = rows.written_down
            if terms.privacy is None:  # with noise, a repeat is another release
                session.journal = rows.journal()
            done = take_part(session, agreement, terms, RunStates(rows.folder), states, rows)
            write_file(rows.folder / MAIN, model_bytes(done.model.result.x, done.setup))
            _recorded(rows, terms, done)
        except Abandoned:
            raise
        except InputError as error:
            raise _public(error) from None
        except BaseException:  # the operator's own code may even exit
            log.exception("the run failed")  # the details may contain data and stay here
            raise refusal(CANNOT) from None


def _recorded(rows: SiloRows, terms: FederationTerms, done: Finished) -> None:
    """Judge the model on the silo's rows and write its record; nobody waits for it, and nothing of
    it is known elsewhere, not even that it failed.
    """
    try:
        made = silo_record(terms, replace(done, record=judged(rows.data, terms, done.record)))
        write_files(rows.folder, exports(made))
        made.write(rows.folder)
        log.info("`scaffpd report %s` makes this silo's page.", rows.folder)
    except Exception:
        log.exception("the model is there, but this silo's rows could not be judged")


def _public(error: InputError) -> InputError:
    """Return the error as others get it; the log has it whole."""
    log.error("%s", error)
    return error if _of_others(error) or error.code in PUBLIC else refusal(CANNOT)


def _of_others(error: InputError) -> bool:
    """Whether it is about what others have posted."""
    return isinstance(error, Tampered | ClippedSum)
