r"""From an agreement to silos that can train: all that comes from rows is a masked sum.

curves      how many rows, and of how many silos, lie between edges: thresholds of every column
scale       n, Σx and Σ(x − mean)² of every encoded column
pairs       G and H of the silos' own additive models (`scaffpd.data.pairs`)
strengths   l2 and κ by evidence (`scaffpd.algorithms.evidence`), where the terms say "auto"

Every silo takes these steps itself, with the code that clients in one process have; an onlooker
takes them without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.algorithms.base import OWN_SUMS, Algorithm
from scaffpd.algorithms.evidence import Strengths
from scaffpd.data.pairs import chosen_pairs
from scaffpd.data.tabular.agree import (
    Column,
    Schema,
    curved,
    scale_of,
    width,
)
from scaffpd.data.tabular.clients import common
from scaffpd.deploy.agreement import LARGEST, Agreement, check_size
from scaffpd.deploy.replica import replica
from scaffpd.deploy.rows import SiloRows, modelled
from scaffpd.deploy.transcript import Session
from scaffpd.federation import Federation
from scaffpd.models import Linear
from scaffpd.models.linear import AUTO
from scaffpd.privacy.counts import CountNoise
from scaffpd.privacy.private import private_ridge
from scaffpd.run.settings.federation import FederationTerms
from scaffpd.run.settings.model_file import Setup, finite, linear
from scaffpd.secure.aggregation import colluding_of
from scaffpd.secure.ring import BYTES, Places
from scaffpd.training.cohort import Cohort
from scaffpd.training.pairs import indicators_of, noise_of, paired, too_many
from scaffpd.training.settling import by_evidence

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Ready:
    """Silos with columns, scale and strengths that all have agreed on."""

    setup: Setup
    cohort: Cohort | None  # this silo's own; `None` at an onlooker
    federation: Federation
    strengths: Strengths | None = None  # by evidence


def sent(d: int, method: Algorithm) -> int:
    """Return the most numbers of a silo in one exchange of a method."""
    return d + _hessian(d) * (OWN_SUMS in method.questions)


def _hessian(d: int) -> int:
    return d * (d + 1) // 2


@dataclass(frozen=True)
class Preparing:
    """The steps of one silo, or of an onlooker, whose `rows` are `None`."""

    session: Session
    agreement: Agreement
    terms: FederationTerms
    rows: SiloRows | None
    about: str

    def run(self) -> Ready:
        """Agree on columns, scale and strengths, one after the other."""
        schema = self.terms.encoding()
        sides: list[Column] = []
        if self.terms.curved:
            noise = self._noise()
            limits = None if noise is None else noise.limits
            schema, sides = curved(schema, partial(self._counted, schema, noise), limits)
        setup = self._scaled(schema)
        if self.terms.paired and len(sides) > 1:
            more = self._paired(setup, schema, [common(one, schema, setup.mean) for one in sides])
            setup = setup if more is schema else self._scaled(more)
        found = self._federated(setup)
        auto = AUTO in (setup.model.get("l2"), setup.model.get("strength"))
        return self._settled(found) if auto else found

    def _noise(self) -> CountNoise | None:
        z = self.agreement.values["noise"].get("counts")
        return None if z is None else CountNoise(z, self.terms.numbers, len(self.session.names))

    def _counted(self, schema: Schema, noise: CountNoise | None, edges: Sequence[Matrix]) -> Matrix:
        cells = sum(len(own) + 1 for own in edges)
        own = np.zeros(cells if noise is not None else 2 * cells, np.int64)
        if self.rows is not None:
            own = self.rows.counts(schema, edges, noise)
        places = Places.usual(len(own), len(self.session.names), 0)
        total = self.session.total("counts", own, places)
        return total.reshape(2, cells) if noise is None else noise.read(total)

    def _scaled(self, schema: Schema) -> Setup:
        """Return the agreement with the scale of all columns, by sums or as it was declared."""

        def total(mean: Matrix | None) -> Matrix:
            own = np.zeros((2, width(schema)))
            if self.rows is not None:
                own = self.rows.data.totals(schema, mean)
            kind = "sum" if mean is None else "squares"
            found = self.session.wide_total(kind, own.ravel()).reshape(own.shape)
            found[0] = np.rint(found[0])
            return found

        scale = scale_of(schema, total)
        noise = dict(self.agreement.values["noise"])
        setup = Setup(self.terms.linear(), schema, *scale, noise)
        if self.terms.privacy is None or setup.model.get("l2") != AUTO:
            return setup
        return setup.with_model(l2=private_ridge(width(schema)))  # evidence would cost ε

    def _federated(self, setup: Setup) -> Ready:
        cohort = None if self.rows is None else self.rows.cohort(setup)
        shared = None
        if self.terms.privacy is not None and self.terms.privacy.shared:
            model, device = linear(setup.model), torch.device("cpu")
            shared = model.ridge(width(setup.schema) + 1, model.classes or 1, device)
        federation = replica(
            self.session,
            None if cohort is None else cohort.channel,
            colluding_of(len(self.session.names), self.terms.colluding),
            self.about,
            shared,
            1.0 if self.rows is None else self.rows.share,
        )
        check_size(sent(federation.dimension, self.terms.method), len(self.session.names))
        return Ready(setup, cohort, federation)

    def _settled(self, found: Ready) -> Ready:
        """Set the strengths that the terms leave to the rows."""
        size = _hessian(found.federation.dimension)
        check_size(size, len(self.session.names), ", or l2 and kappa as numbers")
        columns = width(found.setup.schema)
        strengths = by_evidence(found.federation, modelled(found.setup), columns)
        assert strengths is not None
        own = {"l2": strengths.l2, "strength": strengths.strength, "x": strengths.x.numpy()}
        agreed = self.session.propose("strengths", {}, own)[1]
        auto = [name for name in ("l2", "strength") if found.setup.model.get(name) == AUTO]
        using = {name: agreed[name].tolist() for name in auto}
        return Ready(
            found.setup.with_model(**{name: finite(own) for name, own in using.items()}),
            None if found.cohort is None else found.cohort.using(**using),
            found.federation.using(**using),
            replace(strengths, x=torch.from_numpy(np.array(agreed["x"]))),
        )

    def _paired(self, setup: Setup, schema: Schema, sides: Sequence[Column]) -> Schema:
        """Search for pairs that pay beside the silos' own additive models, and return the schema
        with them.
        """
        model = modelled(setup.with_model(strength=None))
        assert isinstance(model, Linear)
        columns = indicators_of(sides)
        outputs = model.classes or 1
        size = 1 + sum(len(column.places) for column in columns)
        upper = np.triu_indices(size)
        own = np.zeros((2, outputs, len(upper[0])))
        d = outputs * (width(schema) + 1)
        largest = max(2 * own.size, _hessian(d))
        if too_many(columns) or BYTES * largest * len(self.session.names) > LARGEST:
            return schema
        ready = self._settled(self._federated(setup.with_model(strength=AUTO)))
        assert ready.strengths is not None
        if self.rows is not None and ready.cohort is not None:
            (u,) = ready.cohort.personal(ready.strengths.x).values()
            own = self.rows.pair_sums(setup, sides, model, u)[:, :, *upper]
        total = self.session.wide_total("pairs", own.ravel()).reshape(own.shape)
        sums = np.zeros((2, outputs, size, size))
        sums[:, :, *upper] = sums[:, :, *upper[::-1]] = total / noise_of(model, ready.strengths)
        chosen = chosen_pairs(columns, sums, self.terms.pairs)
        values = {"pairs": [[list(pair.columns), *map(list, pair.cuts)] for pair in chosen]}
        self.session.propose("pairs", values, {})
        return paired(schema, sides, chosen)
