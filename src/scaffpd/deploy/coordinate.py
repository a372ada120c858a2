r"""`coordinate`: a whole run over any transport, from the first greeting to the model on disk.

A run is made of segments, each with the same members throughout; the training loop drives every segment as it drives a
cohort, and writes its state after every round. A coordinator that was killed resumes from the segment's last round and
gives the same numbers. When a silo is dropped, quarantined or comes back, a new segment starts from the x that was
reached, before any answer that was not believed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.checkpoint import Checkpoint
from scaffpd.config.federation import PAUSE, FederationFile
from scaffpd.config.objects import kind_of
from scaffpd.deploy.agreement import Facts, Refusal, Unanswered, negotiate, propose_noise, settle, spent_budgets
from scaffpd.deploy.byzantine import absurd_facts
from scaffpd.deploy.deployed_run import MODEL, DeployedRun, Segment
from scaffpd.deploy.membership import Lost, Membership, Paused, Quarantined, Returned, SiloEvent, accuse
from scaffpd.deploy.messages import Setup, Transport
from scaffpd.deploy.remote import Remote
from scaffpd.deploy.session import Session, answered
from scaffpd.errors import InputError
from scaffpd.federation import Federation
from scaffpd.objectives import ChiSquare
from scaffpd.training import Result, RoundInfo, Status, train

PAUSED, FAILED = "paused", "failed"
BREATH = 1.0  # seconds between two looks at who is there


@dataclass(frozen=True)
class Outcome:
    """How a run ended, or why it waits.

    Attributes:
        status: one of the training loop's, "paused" or "failed".
        final: whether there is nothing left to do but to put something right ("failed") and resume.
        sentence: the same in words.
        members: the silos that the result is about.
        rounds: rounds made.
        certificate: the proven gap; `None` where nothing is proven.
        privacy: the largest ε of a silo, and δ; `None` where there is no noise.
    """

    status: str
    final: bool
    sentence: str
    members: tuple[str, ...] = ()
    rounds: int = 0
    certificate: float | None = None
    privacy: Mapping[str, float] | None = None

    @classmethod
    def of(cls, folder: DeployedRun) -> Outcome:
        """What a run's folder says."""
        ended = folder.outcome()
        if ended is None:
            raise InputError(f"The run in {str(folder.path)!r} has no outcome yet.")
        return cls(**{**ended, "members": tuple(ended["members"])})


def coordinate(path: Path, transport: Transport) -> Outcome:
    """Carry out the federation of a federation.toml, or go on with it; the run's folder has the result."""
    file = FederationFile.read(path)
    folder = DeployedRun(file.folder)
    with folder.locked():
        try:
            if (done := finished(file, folder)) is not None:
                return done
            outcome = Coordination(file, folder, transport).go()
        except InputError as error:
            rounds = _rescued(folder)
            words = f" The model of round {rounds} is kept." if rounds else ""
            outcome = Outcome(FAILED, True, f"{error}{words}", rounds=rounds)
        folder.write_outcome(asdict(outcome))
    return outcome


def finished(file: FederationFile, folder: DeployedRun) -> Outcome | None:
    """The outcome of a run that needs nothing more; `None`, and no outcome is left, where there is something to do.

    There is after a failure, and where more rounds or another tolerance are asked for. A folder is for one federation.
    """
    about = file.identity()
    settings: dict[str, Any] = {"about": about, "rounds": file.rounds, "tol": file.tol}
    kept = folder.settings() or settings
    if kept.get("about") != about:
        other = next((name for name in about if kept.get("about", {}).get(name) != about[name]), "federation")
        raise InputError(f"The run in {str(folder.path)!r} is of another {other}: use a new folder.")
    folder.write_settings(settings)
    if folder.final() and kept == settings and (outcome := Outcome.of(folder)).status != FAILED:
        return outcome
    folder.forget_outcome()
    return None


def _rescued(folder: DeployedRun) -> int:
    """After a failure: the model of the last finished round is kept, for a budget may be spent on it; which round."""
    setup, segments = folder.setup(), folder.segments()
    x = None if not segments else folder.reached(segments[-1])[0]
    if setup is None or x is None:
        return 0
    folder.write_model(x, setup)
    return folder.rounds()


def _fewest(file: FederationFile) -> int:
    """How many silos it takes to have all of the weight, where an objective caps that of each."""
    objective, silos = getattr(file.algorithm, "objective", None), len(file.silos)
    if not isinstance(objective, ChiSquare) or objective.cap is None:
        return 1
    objective.weights(silos)  # or a sentence that even all of them are too few
    return min(silos, int(np.ceil(1 / objective.cap - 1e-9)))


class Coordination:
    """One coordinator at work."""

    def __init__(self, file: FederationFile, folder: DeployedRun, transport: Transport) -> None:
        self.file, self.folder, self.policy = file, folder, file.policy
        self.line = Session(transport)
        self.line.barred = folder.quarantined()
        self.fewest = max(self.policy.quorum, _fewest(file))
        self.started = time.monotonic()
        self.absences: Counter[str] = Counter()
        self.strikes: Counter[str] = Counter()

    def go(self) -> Outcome:
        """Segments until one of them ends the run."""
        members = self._gather()
        while True:
            if (reason := self._too_few(members)) is not None:
                return self._pause(reason)
            try:
                setup = self._agreement(members)
                facts = settle(self.line, members, setup, self.policy.timeout)
                absurd = absurd_facts(facts, self.policy.outlier)
                accuse({members[i]: why for i, why in absurd.items()}, self.folder.rounds(), self._record)
            except (Unanswered, Refusal) as trouble:
                members = self._without(members, trouble)
                continue
            except Quarantined as found:
                members = self._barring(members, found)
                continue
            segment = self._segment(members)
            outcome = self._train(segment, setup, facts)
            if isinstance(outcome, Outcome):
                return outcome
            members = outcome

    def _too_few(self, members: Sequence[str]) -> str | None:
        """Why a run cannot start, or go on, with these silos."""
        away = [name for name in self.file.silos if name not in members]
        if away and self.policy.missing == PAUSE:
            return f"Silo {away[0]!r} is {'quarantined' if away[0] in self.line.barred else 'not there'}."
        if len(members) < self.fewest:
            barred = "".join(f"; {name} is quarantined" for name in self._in_order(self.line.barred))
            return f"Fewer than {self.fewest} silos are there ({', '.join(members) or 'nobody'}{barred})."
        return None

    def _barring(self, members: Sequence[str], found: Quarantined) -> list[str]:
        """Nothing more is asked of silos that have given themselves away; who is left."""
        self.line.barred |= {*found.names}
        return [name for name in members if name not in self.line.barred]

    def _gather(self) -> list[str]:
        """Wait until everybody is there, or for the time that the policy gives them."""
        deadline, here = time.monotonic() + self.policy.start_timeout, list[str]()
        awaited = {*self.file.silos} - self.line.barred
        while len(here) < len(awaited):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for name, reply in self.line.greet(min(self.policy.timeout, max(left, 1.0)), here).items():
                if answered(reply) and name in awaited and name not in here:
                    here.append(name)
            if len(here) < len(awaited):
                time.sleep(min(BREATH, max(left, 0)))
        return self._in_order({*here})

    def _agreement(self, members: Sequence[str]) -> Setup:
        """The run's one agreement: made by those who were there first, kept for good."""
        setup = self.folder.setup()
        if setup is None:
            name = kind_of(self.file.algorithm)
            file, timeout = self.file, self.policy.timeout
            noise = partial(propose_noise, file) if file.privacy else None
            setup = negotiate(self.line, members, name, file.model, file.features, timeout, file.secure, noise)
            self.folder.write_setup(setup)
        return setup

    def _without(self, members: Sequence[str], trouble: Unanswered | Refusal) -> list[str]:
        """Leave out a silo that does not take the agreement; the first agreement has no exceptions."""
        if isinstance(trouble, Refusal) and not self.folder.segments():
            raise trouble
        self.absences[trouble.name] += 1
        self.strikes[trouble.name] += isinstance(trouble, Refusal)
        self._record(SiloEvent(self.folder.rounds(), trouble.name, "absent", str(trouble)))
        return [name for name in members if name != trouble.name]

    def _segment(self, members: Sequence[str]) -> Segment:
        """The last segment, if it had these members and answers of all of them; or a new one from where that ended."""
        segments = self.folder.segments()
        if segments and segments[-1].members == tuple(members) and not self.folder.stood_in(segments[-1]):
            return segments[-1]
        x, rounds = (None, 0) if not segments else self.folder.reached(segments[-1])
        before = rounds + (segments[-1].before if segments else 0)
        segment = Segment(len(segments), tuple(members), before)
        for name in self.file.silos if segments else ():
            was, now = name in segments[-1].members, name in members
            if was != now:
                what, words = (
                    ("joined", "is part of the objective again") if now else ("dropped", "is left out from here on")
                )
                self._record(SiloEvent(before, name, what, f"Silo {name!r} {words}."))
        self.folder.begin(segment, x)
        return segment

    def _train(self, segment: Segment, setup: Setup, facts: Facts) -> Outcome | list[str]:
        """One segment: the run's outcome, or the members of the next segment."""
        dropped = [name for name in self.file.silos if name not in {*segment.members} | self.line.barred]
        roster = Membership(
            self.line, segment.members, self.policy, self._record, dropped, self.absences, self.strikes
        )  # fmt: skip
        roster.round = self.folder.rounds()
        remote = Remote(roster, facts)
        while True:
            try:
                result = self._fit(segment, remote)
                return self._finish(segment, setup, remote, result)
            except Quarantined as found:
                return self._barring(segment.members, found)
            except Returned as returned:
                return self._in_order({*segment.members, *returned.names})
            except (Lost, Paused) as reason:
                if isinstance(reason, Lost) and self.policy.missing != PAUSE:
                    return self._in_order({*segment.members} - {*reason.names})
                there = self._wait(roster)
                if self._too_few(there) is not None:
                    return self._pause(str(reason))
                if remote.stood_in or there != list(segment.members):
                    return there

    def _in_order(self, names: set[str]) -> list[str]:
        return [name for name in self.file.silos if name in names]

    def _fit(self, segment: Segment, remote: Remote) -> Result:
        """The training loop on this segment, from its checkpoint if there is one."""
        federation = self._federation(remote)

        def after(moment: RoundInfo) -> None:
            self._progress(segment, remote, moment, federation.traffic.exchanges)
            remote.roster.finish_round(segment.before + moment.rounds)

        rounds = max(self.file.rounds - segment.before, 1)
        keeper = Checkpoint(self.folder.checkpoint(segment), every=1)
        algorithm, x0 = self._algorithm(len(segment.members)), self.folder.start(segment)
        return train(
            algorithm, federation, rounds, self.file.tol, self.file.seed, x0,
            progress=False, checkpoint=keeper, callbacks=[after],
        )  # fmt: skip

    def _federation(self, remote: Remote) -> Federation:
        """The silos, with masked vectors where the federation has [secure]."""
        if not self.file.secure:
            return remote
        from scaffpd.secure import SecureAggregation  # needs a package that plain sums do not

        return SecureAggregation(remote, **self.file.secure)

    def _algorithm(self, members: int) -> Any:
        """The algorithm for so many silos: no more of them can be drawn."""
        algorithm = self.file.algorithm
        drawn = getattr(algorithm, "clients_per_round", None)
        return algorithm if drawn is None or drawn <= members else replace(algorithm, clients_per_round=members)

    def _wait(self, roster: Membership) -> list[str]:
        """Give the absent and the dropped time to come back; who is there then."""
        deadline, there = time.monotonic() + self.policy.start_timeout, {*roster.present}
        while self._too_few(self._in_order(there)) is not None and time.monotonic() < deadline:
            there |= {*roster.welcome()}
            time.sleep(0 if self._too_few(self._in_order(there)) is None else BREATH)
        return self._in_order(there)

    def _finish(self, segment: Segment, setup: Setup, remote: Remote, result: Result) -> Outcome:
        """Write the result down."""
        remote.roster.ending = True
        spent = spent_budgets(remote.roster, remote.names) if self.file.privacy else {}
        rows = self._rows(segment, remote, result, spent)
        self.folder.write_clients(rows)
        self.folder.write_rounds(self.file.silos)
        self.folder.write_model(result.x, setup)
        proven = float(result.certificate) if np.isfinite(result.certificate) else None
        final = result.status is not Status.INTERRUPTED
        whole = replace(result, rounds=segment.before + result.rounds)
        worst = max(spent.values(), key=lambda own: own["epsilon"], default=None)
        words = _privately(worst) if self.file.privacy else ""
        sentence = f"{whole}{words}{self._missing(segment, remote)}"
        return Outcome(str(result.status), final, sentence, segment.members, whole.rounds, proven, worst)

    def _rows(
        self, segment: Segment, remote: Remote, result: Result, spent: Mapping[str, Mapping[str, float]]
    ) -> list[dict[str, Any]]:
        """The table of silos: scores, or, where they are private, the last noisy loss and what that has cost."""
        splits = ("train", "test") if remote.facts.tested.any() else ("train",)
        asked = () if self.file.privacy else splits
        tables = {split: remote.evaluate(result.x, split, complete=False) for split in asked}
        rows = []
        for i, name in enumerate(segment.members):
            row: dict[str, Any] = {"model": MODEL, "client": name, "weight": float(result.weights[i])}
            for split, scores in tables.items():
                row |= {f"{split}_rows": int(scores.counts[i]), f"{split}_loss": float(scores.loss[i])}
                row |= {f"{split}_accuracy": float(scores.accuracy[i])}
            if self.file.privacy:
                row |= {"train_rows": int(remote.facts.constants.samples[i])}
                row |= {"train_loss": float(result.history[f"loss[{name}]"][-1])}
                row |= {"epsilon": spent.get(name, {}).get("epsilon", "")}
            rows.append(row)
        return rows

    def _missing(self, segment: Segment, remote: Remote) -> str:
        """What the reader must know about silos that are not in the result, or not fully."""
        gone = {*self.file.silos} - {*segment.members}
        sorts = ((gone - self.line.barred, "dropped"), (gone & self.line.barred, "quarantined"))
        fates = [f"{', '.join(self._in_order(who))} had been {what}" for who, what in sorts if who]
        words = f" It is about {', '.join(segment.members)}; {'; '.join(fates)}." if gone else ""
        stale = sorted(remote.roster.absent)
        return words + (f" {', '.join(stale)} did not answer at the end." if stale else "")

    def _pause(self, sentence: str) -> Outcome:
        segments, done = self.folder.segments(), self.folder.rounds()
        self.folder.write_rounds(self.file.silos)
        members = segments[-1].members if segments else ()
        return Outcome(PAUSED, False, f"{sentence} The run waits after round {done}.", members, done)

    def _progress(self, segment: Segment, remote: Remote, moment: RoundInfo, exchanges: int) -> None:
        state = moment.state
        gap = float(state.certificate)
        self.folder.progress({
            "round": segment.before + moment.rounds, "segment": segment.number, "members": list(segment.members),
            "certificate": gap if np.isfinite(gap) else None, "losses": [float(v) for v in state.losses],
            "weights": [float(v) for v in state.weights], "absent": sorted(remote.roster.absent),
            "exchanges": exchanges, "messages_up": self.line.wire.bytes_up,
            "messages_down": self.line.wire.bytes_down, "seconds": round(time.monotonic() - self.started, 3),
        })  # fmt: skip

    def _record(self, event: SiloEvent) -> None:
        self.folder.event(event)
        self.folder.progress({"event": asdict(event)})


def _privately(worst: Mapping[str, float] | None) -> str:
    """What the run has cost, in words."""
    if worst is None:
        return " No silo said what this has cost."
    pair = f"(ε, δ) = ({worst['epsilon']:.2f}, {worst['delta']:g})"
    return f" Every record is protected with {pair}, as silos count it; the agreement on columns is not covered."
