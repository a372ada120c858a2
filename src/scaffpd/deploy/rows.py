"""A silo's rows under an agreement: what a run needs of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.curves import Matrix
from scaffpd.data.tabular.agree import Schema
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.dataset import Dataset
from scaffpd.deploy.ledger import Entrant, TableLedger
from scaffpd.deploy.tables import Wanted
from scaffpd.deploy.transcript import Journal, Weightings
from scaffpd.errors import InputError
from scaffpd.files import JsonLines, load_or_create, make_folder
from scaffpd.pipeline.sites import Encoding, Model, NamedModel
from scaffpd.privacy import Private
from scaffpd.privacy.accountant import Account, ReleaseEntry
from scaffpd.privacy.counts import CountNoise, PrivateCounts
from scaffpd.privacy.noise import digest, secret_bytes
from scaffpd.secure.aggregation import check_weightings
from scaffpd.secure.keys import derived
from scaffpd.settings.methods import load
from scaffpd.settings.silo import SiloFile
from scaffpd.settings.terms import FederationTerms
from scaffpd.training.cohort import Cohort

log = logging.getLogger("scaffpd.silo")


class SiloRows:
    """The rows of a silo under an agreement; its ledger has been taken for the run."""

    def __init__(
        self, file: SiloFile, agreement: Agreement, terms: FederationTerms, ledger: TableLedger
    ) -> None:
        self.file = file
        self.ledger = ledger
        self.terms = terms
        self.share = file.limits.share
        self.digest = agreement.digest
        self.cards = agreement.cards
        self.folder = make_folder(file.run(agreement.digest.hex()))
        self.noise = agreement.values["noise"]
        self._secret = load_or_create(file.identity)
        self._fresh = secret_bytes(None)  # noise is drawn from it, and it never touches a disk
        self._counted = JsonLines(self.folder / "counts.jsonl")
        self.data = Dataset.read(file, Wanted.agreed(terms))
        self.data.check(file.limits)
        if self.data.rows[0] < terms.counted[file.name]:
            raise InputError(
                "rows-fewer-than-agreed",
                f"Silo {file.name!r} has {self.data.rows[0]} training rows, fewer than the "
                f"{terms.counted[file.name]} that the agreement counts it for.",
            )
        # All rows, whichever are held out: silos of the same table hold out others, and sums over
        # most of the same rows show nearly what sums over the same ones do.
        rows = digest(self.data.marks(derived(ledger.secret, b"rows")))
        self.entrant = Entrant(
            agreement.digest.hex(),
            self.cards[file.name].fingerprint,
            digest(*sorted(card.fingerprint for card in self.cards.values())).hex(),
            rows.hex(),
        )
        self.weightings = Weightings()
        self.account: Account | None = None
        self._written = 0  # releases of the account that are in the ledger
        self._counts: PrivateCounts | None = None

    @property
    def minibatches(self) -> int:
        """What minibatches are drawn from: if all could draw them, they would ask about rows."""
        return int.from_bytes(derived(self._secret, b"minibatches" + self.digest), "big")

    def commitment(self) -> str:
        return self.data.commitment(derived(self._secret, b"salt" + self.digest))

    def journal(self) -> Journal:
        """Return what was asked in this run, and weightings of these rows in all runs; refuse an
        objective that is one too many.
        """
        method = self.terms.method
        objective = repr(getattr(method, "objective", method))
        known = self.ledger.weightings(self.entrant)
        self.weightings = Weightings(known, objective, self.terms.distance)
        check_weightings(self.weightings.objectives, len(self.cards), self.terms.colluding)
        return Journal(self.folder / "asked.jsonl", self.weightings)

    def noisy_counts(
        self, schema: Schema, edges: Sequence[Matrix], noise: CountNoise
    ) -> NDArray[np.int64]:
        """Return training rows in all cells with noise.

        A later epoch posts the same noised counts: the release is stored, and paid for once.
        """
        numbers = self.data.sorted_numbers(schema)
        name = self.file.name
        if self._counts is None:
            self._counts = PrivateCounts(numbers, noise, self._fresh, name)
            budget = self.noise["epsilon"]
            self._pay(Account((name,), self.noise["delta"], budget))
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

    def cohort(self, encoding: Encoding, model: Model) -> Cohort:
        """Return the rows with the agreed model, private if so agreed; strengths stay "auto"."""
        ready = self.data.encoded(*encoding, separate=bool(self.noise))
        test = None if ready.test is None else {self.file.name: ready.test}
        bound = self._model(model)
        made = Cohort({self.file.name: ready.train}, bound, test=test, settle=False)
        made.channel.secret = (self.minibatches,)
        if self.noise:
            self._pay(made.channel.account)
        return made

    def _model(self, model: Any) -> Any:
        if isinstance(model, NamedModel):
            entry = self.file.models.get(model.name)
            if entry is None:
                raise InputError("model-not-listed", f"[models] has no model {model.name!r}.")
            log.warning("The model %r is the code of %r.", model.name, entry)
            model = load(self.file.path.parent, entry)
        if not self.noise:
            return model
        about = {name: own for name, own in self.noise.items() if name not in ("epsilon", "counts")}
        # public bounds on the rows of all, for the units of sums
        shared = "colluding" in about
        about["together"] = 2**20 * len(self.terms.silos) if shared else self.data.length
        about["records"] = self.data.records
        return Private(model, **about, budget=self.noise["epsilon"])

    def _pay(self, account: Account | None) -> None:
        """Charge what follows to an account, which begins with what was released before."""
        self.written_down()
        self.account = self.ledger.open(account, self.entrant, self.file.limits.epsilon)
        self._written = len(self.account.counted)

    def written_down(self) -> None:
        """Write weightings and releases down before a post leaves."""
        counted = [] if self.account is None else self.account.counted
        self.ledger.write(self.entrant, self.weightings.new, counted[self._written :])
        self.weightings.new.clear()
        self._written = len(counted)
