"""A silo's rows under an agreement: what a run needs of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.curves import Matrix, counted
from scaffpd.data.pairs import pair_sums
from scaffpd.data.tabular.agree import Column, Schema, encoded_features
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.dataset import Dataset, Wanted
from scaffpd.deploy.ledger import PrivacyLedger
from scaffpd.deploy.transcript import Journal
from scaffpd.errors import InputError
from scaffpd.files import JsonLines, load_or_create, make_folder
from scaffpd.models import Linear, Personal
from scaffpd.privacy import Private
from scaffpd.privacy.accountant import Account, ReleaseEntry
from scaffpd.privacy.counts import CountNoise, PrivateCounts
from scaffpd.privacy.noise import digest, secret_bytes
from scaffpd.run.settings.federation import FederationTerms
from scaffpd.run.settings.methods import load
from scaffpd.run.settings.model_file import Setup, linear, strength_of
from scaffpd.run.settings.silo import SiloFile
from scaffpd.secure.aggregation import check_weightings
from scaffpd.secure.keys import derived
from scaffpd.training.cohort import Cohort

log = logging.getLogger("scaffpd.silo")


def modelled(setup: Setup) -> Linear | Personal:
    """Return the linear model of a setup, personal if it has a strength."""
    groups = [feature.group for feature in encoded_features(setup.schema)]
    model = replace(linear(setup.model), groups=groups)
    strength = strength_of(setup.model)
    return model if strength is None else Personal(model, strength)


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
        self.data = Dataset.read(file, self._secret, Wanted.of(terms.encoding(), terms.task))
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
        model: Any = None
        if kind == "linear":
            model = linear(setup.model) if self.noise else modelled(setup)
        elif kind in self.file.models:
            log.warning("The model %r is the code of %r.", kind, self.file.models[kind])
            model = load(self.file.path.parent, self.file.models[kind])
        else:
            raise InputError("model-not-listed", f"[models] has no model {kind!r}.")
        if not self.noise:
            return model
        about = {name: own for name, own in self.noise.items() if name not in ("epsilon", "counts")}
        if "colluding" in about:  # a public bound on the rows of all, for the units of shared noise
            about["together"] = 2**20 * len(self.terms.silos)
        return Private(model, **about, budget=self.noise["epsilon"])

    def written_down(self) -> None:
        """Write releases down before a post leaves."""
        if self.account is not None:
            self.ledger.write(self.account)
