"""A session of masked posts as `Sites`: one site is here, or none at an onlooker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.base import OWN_SUMS, Algorithm
from scaffpd.data.curves import Limits, Matrix, Total
from scaffpd.data.tabular.agree import Schema, width
from scaffpd.data.tabular.questions import RowCounts, RowQuestion
from scaffpd.deploy.agreement import LARGEST, Agreement, check_size
from scaffpd.deploy.replica import PublicFacts, ReplicaChannel, replica
from scaffpd.deploy.rows import SiloRows
from scaffpd.deploy.transcript import Session
from scaffpd.federation import ClientScores, Federation
from scaffpd.federation.questions import SPLITS
from scaffpd.models import Linear, Personal
from scaffpd.models.personal import base_of
from scaffpd.pipeline.sites import Arrays, Encoding, Model
from scaffpd.privacy.counts import CountNoise
from scaffpd.privacy.private import public_smoothness
from scaffpd.secure.aggregation import colluding_of
from scaffpd.secure.ring import BYTES, Places
from scaffpd.settings.terms import FederationTerms


def sent(d: int, method: Algorithm) -> int:
    """Return the most numbers of a silo in one exchange of a method."""
    return d + d * (d + 1) // 2 * (OWN_SUMS in method.questions)


@dataclass(frozen=True)
class SiloSites:
    """All silos of an agreement, as one of them sees them; `rows` are `None` at an onlooker.

    Attributes:
        about: what identifies agreement and rows of all silos.
    """

    session: Session
    agreement: Agreement
    terms: FederationTerms
    rows: SiloRows | None
    about: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.session.names

    @property
    def room(self) -> float:
        """The most numbers of an exchange: everybody gets all vectors."""
        return LARGEST // (BYTES * len(self.names))

    def counting(self, schema: Schema) -> tuple[Total, Limits | None]:
        """Count rows in masked sums, with noise where it is agreed."""
        z = self.agreement.values["noise"].get("counts")
        if z is None:
            return lambda edges: self.total(RowCounts(schema, edges)), None
        noise = CountNoise(z, self.terms.numbers, len(self.names))

        def total(edges: Sequence[Matrix]) -> Matrix:
            question = RowCounts(schema, edges, noisy=True)
            own = np.zeros(question.shape[1], np.int64)
            if self.rows is not None:
                own = self.rows.noisy_counts(schema, edges, noise)
            return noise.read(self._posted(question, own))

        return total, noise.limits

    def total(self, question: RowQuestion) -> Matrix:
        own = np.zeros(question.shape)
        if self.rows is not None:
            own = question.answer(self.rows.data, 0)
        return self._posted(question, own.ravel()).reshape(question.shape)

    def _posted(self, question: RowQuestion, own: Matrix | NDArray[np.int64]) -> Matrix:
        if not question.whole:
            return self.session.wide_total(question.part, own.astype(np.float64))
        places = Places.usual(len(own), len(self.names), 0)
        return self.session.total(question.part, own.astype(np.int64), places)

    def agree(self, kind: str, values: Mapping[str, object], arrays: Arrays) -> Arrays:
        return self.session.propose(kind, values, arrays)[1]

    def federation(self, encoding: Encoding, model: Model) -> Federation:
        cohort = None if self.rows is None else self.rows.cohort(encoding, model)
        private = self.terms.privacy
        found = replica(
            self.session,
            None if cohort is None else cohort.channel,
            colluding_of(len(self.names), self.terms.colluding),
            self._facts(encoding, model),
            self.about,
            1.0 if self.rows is None else self.rows.share,
            private is not None and private.shared,
        )
        check_size(sent(found.dimension, self.terms.method), len(self.names))
        return found

    def _facts(self, encoding: Encoding, model: Model) -> PublicFacts:
        terms = self.terms
        rows = np.array([*terms.counted.values()], np.int64)
        rate = terms.training.rate
        facts = PublicFacts(rows, smoothness=np.nan if rate is None else 1 / rate)
        if isinstance(model, Linear | Personal):
            features = width(encoding.schema) + len(base_of(model).beyond)
            facts = replace(facts, model=model, width=features)
        noise = self.agreement.values["noise"]
        if not noise:
            return facts
        linear = None if facts.model is None else base_of(facts.model)
        ridge = facts.ridge.most if linear else 0.0
        known = public_smoothness(linear, noise.get("smoothness"), noise.get("radius"), ridge)
        return replace(facts, smoothness=np.nan if known is None else known, noisy=True)

    def scores(
        self, encoding: Encoding, model: Model, federation: Federation, x: Matrix
    ) -> dict[str, ClientScores]:
        """Exchange how x serves every silo; with noise nobody asks."""
        if self.terms.privacy is not None:
            return {}
        found = {split: federation.evaluate(x, split) for split in SPLITS}
        return {split: own for split, own in found.items() if own.counts.any()}

    def own(self, federation: Federation, x: Tensor) -> Tensor | None:
        channel = federation.channel
        assert isinstance(channel, ReplicaChannel)
        return None if channel.rows is None else channel.rows.own(x)
