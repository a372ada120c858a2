r"""What every silo runs, and the coordinator without rows: one agreed run, from epoch to model.

epoch       keys, commitments to rows, and the last state that all can go on from
run         the steps of every run (`scaffpd.pipeline.run`), by masked sums; every round ends in a
            state that all have, and scores of the last point are in the clear
confirm     everybody has seen the same: only now a model is written
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from scaffpd.deploy.agreement import Agreement, check_size
from scaffpd.deploy.announcing import Spendings, announced
from scaffpd.deploy.deployed_run import read_json
from scaffpd.deploy.judging import named
from scaffpd.deploy.rows import SiloRows
from scaffpd.deploy.sites import SiloSites
from scaffpd.deploy.transcript import STATE, Session, Tampered
from scaffpd.errors import InputError
from scaffpd.federation import Federation
from scaffpd.fields import Json
from scaffpd.files import write_file
from scaffpd.models import Linear, Personal
from scaffpd.models.personal import base_of
from scaffpd.pipeline.columns import Ready
from scaffpd.pipeline.judging import estimated, lines_of
from scaffpd.pipeline.models import Contest, Contests, Trained
from scaffpd.pipeline.run import Nobody, Record, Settings, run, start_of
from scaffpd.pipeline.sites import Encoding, NamedModel
from scaffpd.settings.model_file import Setup, finite
from scaffpd.settings.terms import FederationTerms
from scaffpd.study.coefficients import CoefficientTable
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import RoundInfo, StartPoint

BESIDE = 0.9  # of the mode, where training starts
KEPT = 2  # states: a silo may be one round ahead of another


@dataclass(frozen=True)
class Finished:
    """What a run has found."""

    record: Record
    setup: Setup
    spent: dict[str, float]  # ε of every silo, with noise
    effects: CoefficientTable | None = None

    @property
    def model(self) -> Trained:
        return self.record.models[0]


class RunStates:
    """The states of a run on disk that can be gone on from, each with the transcript up to it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.checkpoint = folder / "checkpoint.npz"
        self._file = folder / "states.json"
        self._noted: tuple[int, int] | None = None

    def known(self) -> list[list[object]]:
        states: list[list[object]] = read_json(self._file, [])
        return states

    def note(self, rounds: int, digest: bytes) -> None:
        if not self.checkpoint.exists() or self._written() == self._noted:
            return  # the round has left nothing to go on from: its losses are not finite
        self._noted = self._written()
        shutil.copyfile(self.checkpoint, self._place(rounds))
        states = [*self.known(), [rounds, digest.hex()]][-KEPT:]
        write_file(self._file, json.dumps(states))
        current = {self._place(int(str(state[0]))) for state in states}
        for old in set(self.folder.glob("state-*.npz")) - current:
            old.unlink()

    def _written(self) -> tuple[int, int]:
        about = self.checkpoint.stat()
        return about.st_ino, about.st_mtime_ns

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
    after: Callable[[RoundInfo], None] | None = None,
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
    checkpoint = Checkpoint(states.checkpoint, every=1)
    found = run(
        Settings(
            terms.encoding(),
            asked(terms),
            terms.plan(),
            terms.rounds,
            terms.training.seed,
            lambda _: checkpoint,
            beside_mode,
        ),
        sites,
        watcher=Rounds(states, session, after),
    )
    spent = _spent(session, found.models[0].federation) if private else {}
    table = _effects(sites, found) if terms.model.effects else None
    session.confirm()
    return Finished(found, _setup(terms, agreement, found), spent, table)


def _effects(sites: SiloSites, found: Record) -> CoefficientTable | None:
    """Estimate effects by sums; own coefficients stay at their silos."""
    terms = sites.terms
    model = base_of(found.models[0].model)
    assert isinstance(model, Linear)
    lines = lines_of(found.encoding)[0]
    d = len(lines.mean) + len(model.beyond)
    check_size((d * model.outputs_each) ** 2, len(sites.names))
    labels = tuple(map(str, terms.labels or ()))
    bound = partial(sites.federation, lines)
    return estimated(bound, lines, range(len(lines.mean)), model, labels, terms.model)


def beside_mode(ready: Ready) -> StartPoint:
    """Return a start near the mode, and not at it: there silos that are alike have the first step
    end where it began, and nothing is summed twice at one point.
    """
    mode = start_of(ready)
    return BESIDE * mode if isinstance(mode, np.ndarray) else mode


def asked(terms: FederationTerms) -> Contests:

    def first(encoding: Encoding, models: Sequence[Trained]) -> Contest | None:
        model = terms.modelled(encoding.schema)
        return None if models else Contest(named(terms), model, terms.method, "after", terms.tol)

    return first


class Rounds(Nobody):
    """Keeps the state of every round, and says that it has ended."""

    def __init__(
        self, states: RunStates, session: Session, after: Callable[[RoundInfo], None] | None
    ) -> None:
        self.states = states
        self.session = session
        self.after = after

    def show(self, info: RoundInfo) -> None:
        self.states.note(info.rounds, self.session.digest)
        if self.after is not None:
            self.after(info)


def _states(fact: Json) -> list[list[object]]:
    given = fact.get("states")
    if not isinstance(given, list) or not all(isinstance(state, list) for state in given):
        raise Tampered("post-unreadable", "A silo's states cannot be read.")
    return given


def _setup(terms: FederationTerms, agreement: Agreement, found: Record) -> Setup:
    model = found.models[0].model
    made = Setup(terms.linear(), *found.encoding, dict(agreement.values["noise"]))
    if isinstance(model, NamedModel):
        return made
    base = base_of(model)
    assert isinstance(base, Linear)
    changes: Json = {"l2": base.l2} | ({"dispersion": base.dispersion} if base.dispersion else {})
    if isinstance(model, Personal):
        changes["strength"] = model.strength
    lists = {name: finite(own) for name, own in changes.items() if isinstance(own, list)}
    return made.with_model(**(changes | lists))


def _spent(session: Session, federation: Federation) -> dict[str, float]:
    private = federation.privacy
    own = np.array([0.0 if private is None else private.worst])
    return dict(zip(session.names, session.clear(Spendings.shows, own)[:, 0].tolist(), strict=True))
