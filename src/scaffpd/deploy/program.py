r"""What every silo runs, and the coordinator without rows: one agreed run, from epoch to model.

epoch       keys, commitments to rows, and the last state that all can go on from
columns     curves, scale, pairs and strengths, by masked sums (`scaffpd.pipeline.columns`)
training    `train(method, replica)`; every round ends in a state that all have
scores      of the last point, in the clear
confirm     everybody has seen the same: only now a model is written
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.announcing import Spendings, announced
from scaffpd.deploy.deployed_run import read_json
from scaffpd.deploy.messages import Json
from scaffpd.deploy.rows import SiloRows
from scaffpd.deploy.sites import SiloSites
from scaffpd.deploy.transcript import STATE, Session, Tampered
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores, Federation
from scaffpd.files import write_file
from scaffpd.models import Linear, Personal
from scaffpd.models.personal import base_of
from scaffpd.pipeline.columns import Ready, agreed, problem
from scaffpd.pipeline.sites import NamedModel
from scaffpd.run.settings.federation import FederationTerms
from scaffpd.run.settings.model_file import Setup, finite
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import Result, RoundInfo, train

KEPT = 2  # states: a silo may be one round ahead of another


@dataclass(frozen=True)
class Finished:
    """What a run has found."""

    result: Result
    setup: Setup
    scores: dict[str, ClientScores]
    spent: dict[str, float]  # ε of every silo, with noise


class RunStates:
    """The states of a run on disk that can be gone on from, each with the transcript up to it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.checkpoint = folder / "checkpoint.npz"
        self._file = folder / "states.json"

    def known(self) -> list[list[object]]:
        """Return rounds and transcripts, the latest last."""
        states: list[list[object]] = read_json(self._file, [])
        return states

    def note(self, rounds: int, digest: bytes) -> None:
        """Keep the checkpoint of a round that has ended."""
        shutil.copyfile(self.checkpoint, self._place(rounds))
        states = [*self.known(), [rounds, digest.hex()]][-KEPT:]
        write_file(self._file, json.dumps(states))
        current = {self._place(int(str(state[0]))) for state in states}
        for old in set(self.folder.glob("state-*.npz")) - current:
            old.unlink()

    def restore(self, others: Sequence[Sequence[Sequence[object]]]) -> str:
        """Go back to the last state that all have, and return its transcript; else to none."""
        known = [{tuple(state) for state in states} for states in (self.known(), *others)]
        common = set.intersection(*known)
        states = [state for state in self.known() if tuple(state) in common]
        write_file(self._file, json.dumps(states))
        self.checkpoint.unlink(missing_ok=True)
        if not states:
            return ""
        shutil.copyfile(self._place(int(str(states[-1][0]))), self.checkpoint)
        return str(states[-1][1])

    def same(self, name: str, now: Json) -> None:
        """Refuse facts that were others when this run began."""
        before = read_json(self.folder / name, now)
        for silo, fact in now.items():
            if before.get(silo) != fact:
                raise InputError(
                    "rows-changed",
                    f"The rows of silo {silo!r} are not those that this run began with: changed "
                    "rows need a new agreement.",
                )
        write_file(self.folder / name, json.dumps(now))

    def _place(self, rounds: int) -> Path:
        return self.folder / f"state-{rounds}.npz"


def take_part(
    session: Session,
    agreement: Agreement,
    terms: FederationTerms,
    states: RunStates,
    coordinator: Sequence[Sequence[object]],
    rows: SiloRows | None,
    after: Callable[[RoundInfo, Federation], None] | None = None,
) -> Finished:
    """Run the agreement to its end; `coordinator` are states, `rows` are `None` at an onlooker."""
    session.tolerance = terms.method.tolerance
    session.announced = announced(terms)
    private = terms.privacy is not None  # then no hash of rows leaves: it would confirm a guess
    own = None if rows is None else rows.commitment()
    facts = session.open({"rows": None if private else own, "states": states.known()})
    commitments = {name: fact.get("rows") for name, fact in facts.items()}
    states.same("rows.json", {session.name: own} if private else commitments)
    before = states.restore([coordinator, *(_states(fact) for fact in facts.values())])
    session.propose(STATE, {"state": before}, {})
    session.journal.begin()
    about = hashlib.sha256(agreement.digest + repr(sorted(commitments.items())).encode())
    sites = SiloSites(session, agreement, terms, rows, about.hexdigest())
    plan = terms.plan()
    encoding = agreed(terms.encoding(), sites, plan)
    ready = problem(encoding, sites, plan.model(encoding.schema))

    def ended(info: RoundInfo) -> None:
        states.note(info.rounds, session.digest)
        if after is not None:
            after(info, ready.federation)

    result = train(
        terms.method,
        ready.federation,
        terms.rounds,
        terms.tol,
        terms.training.seed,
        None if ready.strengths is None else ready.strengths.x,
        progress=False,
        checkpoint=Checkpoint(states.checkpoint, every=1),
        callbacks=[ended],
    )
    scores = {} if private else _scores(ready.federation, result)
    spent = _spent(session, ready.federation) if private else {}
    session.confirm()
    return Finished(result, _setup(terms, agreement, ready), scores, spent)


def _states(fact: Json) -> list[list[object]]:
    given = fact.get("states")
    if not isinstance(given, list) or not all(isinstance(state, list) for state in given):
        raise Tampered("post-unreadable", "A silo's states cannot be read.")
    return given


def _setup(terms: FederationTerms, agreement: Agreement, ready: Ready) -> Setup:
    """Describe what the parameters expect of a row."""
    found = Setup(terms.linear(), *ready.encoding, dict(agreement.values["noise"]))
    if isinstance(ready.model, NamedModel):
        return found
    base = base_of(ready.model)
    assert isinstance(base, Linear)
    changes: Json = {"l2": base.l2}
    if isinstance(ready.model, Personal):
        changes["strength"] = ready.model.strength
    lists = {name: finite(own) for name, own in changes.items() if isinstance(own, list)}
    return found.with_model(**(changes | lists))


def _scores(federation: Federation, result: Result) -> dict[str, ClientScores]:
    """Exchange scores of the last point, on training and on held-out rows."""
    found = {split: federation.evaluate(result.x, split) for split in ("train", "test")}
    return {split: own for split, own in found.items() if own.counts.any()}


def _spent(session: Session, federation: Federation) -> dict[str, float]:
    """Exchange ε so far, which depends on the questions and not on the rows."""
    private = federation.privacy
    own = np.array([0.0 if private is None else private.worst])
    return dict(zip(session.names, session.clear(Spendings.shows, own)[:, 0].tolist(), strict=True))
