"""What a silo measures on its own rows once the model is trained; nothing of it leaves."""

from __future__ import annotations

from dataclasses import replace

from scaffpd.data.tabular.encode import ClientRows
from scaffpd.models import Linear, Personal, personalise
from scaffpd.models.personal import base_of
from scaffpd.numbers import several
from scaffpd.objectives import Average, Objective
from scaffpd.pipeline.judging import MOST_NUMBERS, Judged, held_out_scores
from scaffpd.pipeline.models import TOL, Trained
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.run import Record
from scaffpd.pipeline.sites import SitesHere, Splits
from scaffpd.privacy import Private
from scaffpd.settings.terms import FederationTerms
from scaffpd.study.gains import Joining
from scaffpd.study.joining import JoiningSplit
from scaffpd.study.verdict import AVERAGE, FAIR, PERSONAL


def named(terms: FederationTerms) -> str:
    """Name the model of a federation as a run of a table does."""
    if terms.model.kappa is not None:
        return PERSONAL
    objective = getattr(terms.method, "objective", None)
    if objective is None:
        return type(terms.method).__name__
    return AVERAGE if isinstance(objective, Average) else FAIR


def judged(data: ClientRows, terms: FederationTerms, found: Record) -> Record:
    """Score the model on the silo's rows, and compare it with one of these rows alone."""
    one = found.models[0]
    base = base_of(one.model)
    base = base.model if isinstance(base, Private) else base
    if not isinstance(base, Linear):
        return found
    rows = prepared(data, terms, found, base)
    if isinstance(one.model, Personal):
        own = personalise(one.result.x, *rows.train[0], one.model)
        one = replace(one, result=replace(one.result, personal=own[None]))
    brings = "" if not rows.test else joining(rows, one, terms)
    return replace(found, own=Judged(rows, brings, held_out_scores(rows, [one])))


def prepared(data: ClientRows, terms: FederationTerms, found: Record, model: Linear) -> Prepared:
    sites = SitesHere.of([data])
    encoded = data.encoded(*found.encoding, separate=terms.privacy is not None)
    test = [] if encoded.test is None else [encoded.test]
    sites.encoded.append((found.encoding, Splits([encoded.train], test)))
    about = f"{several(sum(data.rows), 'row')} of silo {data.name}"
    labels = tuple(map(str, terms.labels or ()))
    return Prepared(sites, found.encoding, model, labels, about, "silo")


def joining(rows: Prepared, one: Trained, terms: FederationTerms) -> Joining | str:
    if rows.numbers > MOST_NUMBERS:
        return f"What joining brings is not measured: more than {MOST_NUMBERS:,} numbers."
    if one.name not in (AVERAGE, FAIR, PERSONAL):
        return f"What joining brings is not measured for {one.name}."
    objective = one.objective
    personal = Personal(rows.model)
    goal = objective if isinstance(objective, Objective) else Average()
    split = JoiningSplit(
        rows.train, rows.test, personal, goal, rows.names, TOL, terms.rounds, rows.task
    )
    return split.judge(1.0, 1, rows.word, {one.name: one.result}, others=False)
