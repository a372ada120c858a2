r"""`Silo`: one site. It runs the agreed method itself, and answers the board with its next post.

It takes an agreement from outside and decides from that document alone. What it cannot do with its
own rows it says in one sentence for all cases: refusals tell nothing about rows.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.curves import Matrix, counted
from scaffpd.data.pairs import pair_sums
from scaffpd.data.tabular.agree import Column, Schema
from scaffpd.deploy.agreement import Agreement, allowed
from scaffpd.deploy.board import BEGIN, DONE, LOST, NEWS, Abandoned, Mailbox, read_news
from scaffpd.deploy.dataset import Dataset, Wanted
from scaffpd.deploy.ledger import PrivacyLedger
from scaffpd.deploy.messages import REFUSED, Message, decode, encode
from scaffpd.deploy.preparing import Totals, modelled
from scaffpd.deploy.program import RunStates, take_part
from scaffpd.deploy.records import LEFT, SiloRecords
from scaffpd.deploy.transcript import Journal, Session, Tampered
from scaffpd.errors import InputError
from scaffpd.files import JsonLines, load_or_create, make_folder, write_file
from scaffpd.models import Linear
from scaffpd.privacy import Private
from scaffpd.privacy.accountant import Account, ReleaseEntry
from scaffpd.privacy.counts import CountNoise, PrivateCounts
from scaffpd.privacy.noise import digest, secret_bytes
from scaffpd.run.settings.federation import FederationTerms
from scaffpd.run.settings.methods import load
from scaffpd.run.settings.model_file import Setup, linear, model_bytes
from scaffpd.run.settings.silo import SiloFile
from scaffpd.secure.aggregation import check_weightings
from scaffpd.secure.keys import Identity, derived
from scaffpd.secure.ring import ClippedSum
from scaffpd.training.cohort import Cohort

log = logging.getLogger("scaffpd.silo")
CARD = "card"
READY = "ready"
PATIENCE = 20.0  # seconds after which a silo that computes says so
AWAITED = "agreement-awaited"
NOT_TOLD = "This silo cannot take part; its own log says why."
MODEL = "model.safetensors"


class SiloRows:
    """The rows of a silo under an agreement."""

    def __init__(self, file: SiloFile, agreement: Agreement, terms: FederationTerms) -> None:
        self.file = file
        self.terms = terms
        self.share = file.limits.share
        self.digest = agreement.digest
        self.cards = agreement.cards
        self.folder = make_folder(file.run(agreement.digest.hex()))
        self.noise = agreement.values["noise"]
        self._secret = load_or_create(file.identity)
        self._fresh = secret_bytes(None)  # noise is drawn from it, and it never touches a disk
        self._counted = JsonLines(self.folder / "counts.jsonl")
        self.data = Dataset.read(file, self._secret, Wanted.of(terms))
        self.data.check(file.limits)
        self.ledger = PrivacyLedger(file.spent, agreement.digest.hex(), file.limits.epsilon)
        self.account: Account | None = None
        self._counts: PrivateCounts | None = None

    def commitment(self) -> str:
        """Return a hash of the rows, salted for this agreement."""
        return self.data.commitment(derived(self._secret, b"salt" + self.digest))

    def journal(self) -> Journal:
        """Return what was asked in this run, and weightings of these rows in all runs of the same
        members; refuse an objective that is one too many.
        """
        cards = repr([(name, card.digits) for name, card in sorted(self.cards.items())])
        marks = self.data.marks(derived(self._secret, b"weightings"))
        rows, train = (digest(mark, cards).hex() for mark in marks)
        method = self.terms.method
        objective = rows, repr(getattr(method, "objective", method))
        found = Journal(self.folder / "asked.jsonl", self.file.weightings, train, objective)
        check_weightings(found.objectives, len(self.cards), self.terms.colluding)
        return found

    def totals(self, schema: Schema, mean: Matrix | None) -> Totals:
        """Return the sums of encoded columns over training rows."""
        return self.data.totals(schema, mean)

    def counts(
        self, schema: Schema, edges: Sequence[Matrix], noise: CountNoise | None
    ) -> NDArray[np.int64]:
        """Return training rows, and whether there are any, in all cells; or rows with noise.

        A later epoch posts the same noised counts: the release is stored, and paid for once.
        """
        numbers = self.data.sorted_numbers(schema)
        if noise is None:
            return counted(numbers, edges).ravel().astype(np.int64)
        name = self.file.name
        if self._counts is None:
            self._counts = PrivateCounts(numbers, noise, self._fresh, name)
            budget = self.noise["epsilon"]
            self.account = self.ledger.open(Account((name,), self.noise["delta"], budget))
        assert self.account is not None
        asked = [own.tolist() for own in edges]
        for line in JsonLines(self._counted.file).read():
            if line["edges"] == asked:
                self.account.charge([ReleaseEntry(0, bytes.fromhex(line["mark"]), noise.z)])
                return np.array(line["counts"], np.int64)
        found = self._counts(edges)
        release = self._counts.releases[-1]
        self.account.charge([release])
        self._counted.append({"edges": asked, "mark": release.mark.hex(), "counts": found.tolist()})
        return found

    def pair_sums(self, setup: Setup, sides: Sequence[Column], model: Linear, u: Tensor) -> Matrix:
        """Return G and H at this silo's own model u."""
        X, y = self.data.encoded(setup.schema, setup.mean, setup.deviation).train
        return pair_sums(self.data.indicators(setup.schema, sides), *model.slopes(u, X, y))

    def cohort(self, setup: Setup) -> Cohort:
        """Return the rows with the agreed model, private if so agreed; strengths stay "auto"."""
        ready = self.data.encoded(
            setup.schema, setup.mean, setup.deviation, separate=bool(self.noise)
        )
        test = None if ready.test is None else {self.file.name: ready.test}
        model = self._model(setup)
        made = Cohort({self.file.name: ready.train}, model, test=test, settle=False)
        if self.noise:
            self.account = self.ledger.open(made.channel.account)
        return made

    def _model(self, setup: Setup) -> Any:
        kind = setup.model.get("kind", "linear")
        if kind != "linear":
            if kind not in self.file.models:
                raise InputError("model-not-listed", f"[models] has no model {kind!r}.")
            log.warning("The model %r is the code of %r.", kind, self.file.models[kind])
            model = load(self.file.path.parent, self.file.models[kind])
        elif not self.noise:
            return modelled(setup)
        else:
            model = linear(setup.model)
        if not self.noise:
            return model
        about = {name: own for name, own in self.noise.items() if name not in ("epsilon", "counts")}
        together = {"together": self.together} if "colluding" in about else {}
        return Private(model, **about, **together, budget=self.noise["epsilon"])

    @property
    def together(self) -> int:
        """A public bound on the rows of all silos, for the units of shared noise."""
        return 2**20 * len(self.terms.silos)

    def written_down(self) -> None:
        """Write releases down before a post leaves."""
        if self.account is not None:
            self.ledger.write(self.account)


class Silo:
    """One site: its file, its rows, its records, and the run that it takes part in."""

    def __init__(self, file: SiloFile) -> None:
        self.file = file
        self.name = file.name
        self.records = SiloRecords(file.records)
        self._mailbox: Mailbox | None = None
        self._epoch = ""
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
            return encode(_refusal(error))
        except Exception:
            log.exception("a question failed")
            return encode(Message(REFUSED, {"sentence": NOT_TOLD}))

    def _answer(self, asked: Message) -> Message:
        if asked.kind == CARD:
            return Message(CARD, {"card": self.identity.card.digits})
        if asked.kind == BEGIN:
            self._begin(asked)
            return Message(READY)
        if asked.kind != NEWS:
            raise InputError("question-unknown", "This silo does not know this message.")
        mailbox = self._mailbox
        if mailbox is None or asked.values.get("epoch") != self._epoch:
            return Message(LOST)
        mailbox.show(*read_news(asked))
        reply = mailbox.next(PATIENCE)
        if reply.kind == DONE and mailbox.failure is not None:
            if isinstance(mailbox.failure, InputError):
                return _refusal(mailbox.failure)
            return Message(REFUSED, {"sentence": NOT_TOLD})
        return reply

    def _begin(self, asked: Message) -> None:
        """Decide about an agreement, and start to run it."""
        agreement = Agreement.of(asked.values.get("agreement"), self.file.path)
        run = agreement.digest.hex()
        agreement.check(self.file, self.identity.card)
        self.records.ask(run, agreement.values)
        others = bool(agreement.with_others(self.records.begun()))
        allowed(self.file, self.records.granted(run), others)
        states = asked.values.get("states")
        if not isinstance(states, list):
            raise InputError("question-unknown", "This silo does not know this message.")
        self.records.begin(run, self.file.limits.runs)
        if self._mailbox is not None:
            self._mailbox.close()
        self._epoch = str(asked.values.get("epoch"))
        mailbox = Mailbox()
        self._mailbox = mailbox
        program = threading.Thread(
            target=mailbox.run,
            args=(lambda: self._run(mailbox, agreement, states),),
            daemon=True,
            name=f"silo {self.name}",
        )
        program.start()

    def _run(self, mailbox: Mailbox, agreement: Agreement, states: list[Any]) -> None:
        """Run the agreement; write the model once everybody has confirmed."""
        terms = agreement.terms(self.file.path)
        session = Session(mailbox, agreement.cards, agreement.digest, self.name, self.identity)
        try:
            rows = SiloRows(self.file, agreement, terms)
            session.before = rows.written_down
            if terms.privacy is None:  # with noise, a repeat is another release
                session.journal = rows.journal()
            done = take_part(session, agreement, terms, RunStates(rows.folder), states, rows)
            write_file(rows.folder / MODEL, model_bytes(done.result.x, done.setup))
        except Abandoned:
            raise
        except InputError as error:
            log.error("%s", error)
            raise error if _public(error) else InputError("silo-cannot", NOT_TOLD) from None
        except Exception:
            log.exception("the run failed")  # the details may contain data and stay here
            raise InputError("silo-cannot", NOT_TOLD) from None
        finally:
            self.records.note(LEFT, agreement.digest.hex(), posts=session.sent)


def _public(error: InputError) -> bool:
    """Return whether a sentence is about what everybody sees."""
    known = (
        "model-too-large",
        "privacy-budget",  # the account counts releases, which are public
        "rows-changed",
        "share-too-large",
        "too-many-weightings",
    )
    return isinstance(error, Tampered | ClippedSum) or error.code in known


def _refusal(error: InputError) -> Message:
    log.warning("refused: %s", error)
    waits = {"waits": True} if error.code == AWAITED else {}
    return Message(REFUSED, {"sentence": str(error), "code": error.code, **waits})
