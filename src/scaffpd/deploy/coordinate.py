r"""`coordinate`: carry out a whole run over any transport, from the first greeting to the model on disk.

A run consists of segments, each with fixed members. The training loop drives a segment like a cohort and writes its
state after every round, so a coordinator that was killed resumes from the last round with the same numbers. When a silo
is dropped, quarantined or comes back, a new segment starts from the last x before any rejected answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaffpd import __version__
from scaffpd.deploy.agreement import Refusal, SiloTrials, negotiate, settle
from scaffpd.deploy.byzantine import FEWEST, absurd_facts, influence_shares
from scaffpd.deploy.deployed_record import (
    CLIENTS,
    JOINING,
    SCORES,
    client_scores,
    deployed_record,
)
from scaffpd.deploy.deployed_run import (
    FAILED,
    MODEL,
    OUTCOME,
    PAUSED,
    DeployedRun,
    Outcome,
    Segment,
)
from scaffpd.deploy.log import RunLog
from scaffpd.deploy.messages import (
    GARBAGE,
    SPENT,
    Facts,
    Failure,
    Message,
    Transport,
    Unanswered,
    Unusable,
)
from scaffpd.deploy.remote import Remote, RemoteChannel
from scaffpd.deploy.session import (
    Lost,
    Membership,
    Paused,
    Quarantined,
    Returned,
    Session,
    SiloEvent,
    SiloRequest,
)
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores, Federation, Traffic
from scaffpd.federation.questions import Scores
from scaffpd.files import write_file
from scaffpd.objectives import Average, ChiSquare
from scaffpd.run.recording import joining_record
from scaffpd.run.settings.federation import PAUSE, STRIKES, FederationFile
from scaffpd.run.settings.model_file import Setup
from scaffpd.study.joining import JoiningScores, of_silos
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import Result, RoundInfo, Status, train
from scaffpd.training.metrics import client_row

PULL = 100.0  # default κ of personal models
PAUSE_SECONDS = 1.0  # between two checks for silos
JOINED = "Silo {!r} is part of the objective again."
DROPPED = "Silo {!r} is left out from here on."


def coordinate(path: Path, transport: Transport) -> Outcome:
    """Run the federation of a federation.toml, or resume it; write the result to the run's folder."""
    file = FederationFile.read(path)
    folder = DeployedRun(file.folder)
    folder.log = RunLog(file.log)
    earlier = folder.path / OUTCOME
    with folder.locked():
        try:
            if (done := reopen(file, folder)) is not None:
                return done
            outcome = Coordination(file, folder, transport).run()
        except InputError as error:
            rounds = 0 if earlier.exists() else _rescued(folder)
            words = f" The model of round {rounds} is kept." if rounds else ""
            outcome = Outcome(FAILED, True, f"{error}{words}", rounds=rounds)
        if not earlier.exists():  # of a run with other settings, which stays as it is
            folder.write(OUTCOME, asdict(outcome))
            deployed_record(folder).write(folder.path)
        level = (
            "error"
            if outcome.status == FAILED
            else "warning"
            if outcome.status == PAUSED
            else "info"
        )
        folder.log.note(level, outcome.sentence, number=outcome.rounds)
    return outcome


def reopen(file: FederationFile, folder: DeployedRun) -> Outcome | None:
    """Return the outcome of a finished run; otherwise remove it, so that the run goes on, and return `None`.

    A run continues after a failure, and if more rounds or another tolerance are asked for. A folder is for one
    federation. A run of another minor version continues with a new state. If its method or objective reads differently
    there, as settings may have new names, its outcome does not count, and an event says so.
    """
    about = file.identity()
    version = __version__
    goal = "algorithm or objective"
    length: dict[str, Any] = {"rounds": file.training.rounds, "tol": file.training.tol}
    settings: dict[str, Any] = {"about": about, "version": version, **length}
    before = folder.read("settings.json") or settings
    told = dict(before["about"]) if isinstance(before.get("about"), dict) else {}
    was = told.get(goal)
    if told and before.get("version") != version:
        told[goal] = about[goal]
        before["version"] = version
        before["about"] = told
    if told != about:
        other = next((name for name in about if told.get(name) != about[name]), "federation")
        raise InputError(
            "run-another-use",
            f"The run in {str(folder.path)!r} is of another {other}: use a new folder.",
        )
    if was != about[goal]:
        words = (
            f"Another version of scaffpd began this run as {was}. From here on it is {about[goal]}."
        )
        folder.event(SiloEvent(folder.rounds(), "", "upgraded", words))
    folder.write("settings.json", settings)
    same = before == settings and was == about[goal]
    if folder.final() and same and (outcome := Outcome.of(folder)).status != FAILED:
        return outcome
    (folder.path / OUTCOME).unlink(missing_ok=True)
    return None


def _rescued(folder: DeployedRun) -> int:
    """Write the model of the last finished round after a failure, and return that round."""
    try:
        setup = folder.setup()
        segments = folder.segments()
        x = None if not segments else folder.reached(segments[-1])[0]
        if setup is None or x is None:
            return 0
        folder.write_model(x, setup)
        return folder.rounds()
    except InputError:  # the run has failed because a file of the folder cannot be read
        return 0


def _fewest(file: FederationFile) -> int:
    """Return the fewest silos that can hold all weight under the objective's cap."""
    objective = getattr(file.method, "objective", None)
    silos = len(file.silos)
    if file.faults.influence is not None:
        if objective is None:
            raise InputError(
                "faults-influence-method",
                "[faults] has influence, which needs a method with an objective.",
            )
        objective.limited(np.ones(silos))  # raises an error if it bounds no weights
    if not isinstance(objective, ChiSquare) or objective.cap is None:
        return 1
    objective.weights(silos)  # raises an error if even all silos are too few
    return min(silos, int(np.ceil(1 / objective.cap - 1e-9)))


class Changed(Exception):
    """A silo's data have changed since the run began."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Silo {name!r} has other data than the run began with: put them back, or use a new folder."
        )
        self.name = name


class Coordination:
    """One run at the coordinator."""

    def __init__(self, file: FederationFile, folder: DeployedRun, transport: Transport) -> None:
        self.file = file
        self.folder = folder
        self.policy = file.faults
        self.session, self.started = Session(transport), time.monotonic()
        self.session.barred, self.session.asks = folder.quarantined(), file.request()
        self.fewest = max(self.policy.quorum, _fewest(file))
        self.absences: Counter[str] = Counter()
        self.strikes: Counter[str] = Counter()
        self.unread: dict[str, str] = {}  # silos with unreadable answers, and why
        self.waited: set[str] = set()  # silos that wait for a person's consent
        self.changed: set[str] = set()  # silos whose data have changed

    def run(self) -> Outcome:
        """Train segments until one of them ends the run."""
        members = self._gather()
        while True:
            if (reason := self._too_few(members)) is not None:
                return self._pause(reason)
            try:
                setup = self._strengthened(members, self._agreement(members))
                facts = settle(self.session, members, setup, self.policy.timeout)
                self._same_data(members)
                absurd = absurd_facts(facts, self.policy.outlier, setup)
                Quarantined.accuse(members, absurd, self.folder.rounds(), self.folder.event)
            except (Unanswered, Refusal, Changed) as trouble:
                if isinstance(trouble, Refusal) and trouble.waits:
                    if not self._consent_awaited(trouble):
                        return self._pause(str(trouble))
                    continue
                members = self._without(members, trouble)
                continue
            except Quarantined as found:
                members = self._bar(members, found)
                continue
            outcome = self._train(self._segment(members), setup, facts)
            if isinstance(outcome, Outcome):
                return outcome
            members = outcome

    def _too_few(self, members: Sequence[str]) -> str | None:
        """Say why a run cannot start or continue with these silos; `None` if it can."""
        away = [name for name in self.file.silos if name not in members]
        if away and self.policy.missing == PAUSE:
            fate = "quarantined" if away[0] in self.session.barred else "not there"
            words = self.unread.get(away[0], f"Silo {away[0]!r} is {fate}.")
            return str(Changed(away[0])) if away[0] in self.changed else words
        if len(members) < self.fewest:
            barred = "".join(
                f"; {name} is quarantined" for name in self._in_order(self.session.barred)
            )
            why = "".join(f" {self.unread[name]}" for name in away if name in self.unread)
            return f"Fewer than {self.fewest} silos are there ({', '.join(members) or 'nobody'}{barred}).{why}"
        return None

    def _bar(self, members: Sequence[str], found: Quarantined) -> list[str]:
        """Drop the quarantined silos and return the remaining members."""
        self.session.barred |= {*found.names}
        return [name for name in members if name not in self.session.barred]

    def _gather(self) -> list[str]:
        """Wait for all silos, at most as long as the policy says, and return those that are there."""
        deadline = time.monotonic() + self.policy.start_timeout
        here = list[str]()
        awaited = {*self.file.silos} - self.session.barred
        while len(here) < len(awaited):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for name, reply in self.session.greet(
                min(self.policy.timeout, max(left, 1.0)), here
            ).items():
                if isinstance(reply, Message) and name in awaited and name not in here:
                    here.append(name)
                elif (
                    isinstance(reply, Failure) and reply.what == GARBAGE and name not in self.unread
                ):
                    self.unread[name] = (
                        f"Silo {name!r} cannot take part: {reply.reason.rstrip('.')}."
                    )
                    self.folder.event(
                        SiloEvent(self.folder.rounds(), name, GARBAGE, self.unread[name])
                    )
            if len(here) < len(awaited):
                time.sleep(min(PAUSE_SECONDS, max(left, 0)))
        return self._in_order({*here})

    def _agreement(self, members: Sequence[str]) -> Setup:
        """Return the run's one agreement; the first members make it."""
        setup = self.folder.setup()
        if setup is None:
            setup = negotiate(self.session, members, self.file)
            self.folder.write("spread.json", self.session.spread)
            self.folder.write("setup.json", setup.values())
        self.session.spread = self.folder.read("spread.json", dict[str, float]) or {}
        self.folder.log.run = setup.columns
        self.folder.log.note(
            "info", f"The silos agree: {', '.join(members)}.", number=self.folder.rounds()
        )
        return setup

    def _strengthened(self, members: Sequence[str], setup: Setup) -> Setup:
        """Return the agreement with strengths chosen by folds, once for the whole run."""
        if self.file.choosing is None:
            return setup
        chosen = self.folder.read("choice.json")
        if chosen is None:
            try:
                choice = SiloTrials(setup, self.file, partial(self._settled, members)).choice()
            except (Lost, Paused) as gone:
                name = gone.names[0] if isinstance(gone, Lost) else members[0]
                raise Unanswered(name, f"strengths were being chosen ({gone})") from None
            goal = choice.objective
            chosen = {
                "l2": choice.l2,
                "kappa": choice.strength if math.isfinite(choice.strength) else None,
                "objective": {goal.parameter: goal.strength} if goal.strengths else {},
                "sentence": choice.sentence,
                "tried": [{**row, "kappa": str(row["kappa"])} for row in choice.table],
            }
            self.folder.write("choice.json", chosen)
        goal = self.file.method.objective
        for name, value in chosen["objective"].items():
            goal = goal.with_strength(value) if name == goal.parameter else goal
        self.file = self.file.with_objective(goal)
        strengthened = setup.with_model(l2=chosen["l2"], strength=chosen["kappa"])
        self.folder.write("setup.json", strengthened.values())
        return strengthened

    def _settled(self, members: Sequence[str], setup: Setup) -> Federation:
        """Send the members a separate agreement and return them; all have to be there."""
        facts = settle(self.session, members, setup, self.policy.timeout)
        strict = self.policy.model_copy(update={"quorum": len(members)})
        return self._federation(
            Remote(Membership(self.session, members, strict, self.folder.event), facts)
        )

    def _same_data(self, members: Sequence[str]) -> None:
        """Store what every silo reports about its losses; refuse one whose report has changed."""
        before = self.folder.read("constants.json", dict[str, list[float]]) or {}
        now = {name: self.session.constants[name].tolist() for name in members}
        told = {
            name: before.get(name, now[name]) for name in members
        }  # version 0.1 had no number of rows
        self.changed = {name for name in members if told[name] != now[name][: len(told[name])]}
        if self.changed:
            raise Changed(min(self.changed))
        self.folder.write("constants.json", before | now)

    def _consent_awaited(self, trouble: Refusal) -> bool:
        """Wait a little for a person's consent at a silo; return whether there is time for that."""
        if trouble.name not in self.waited:
            self.waited.add(trouble.name)
            self.folder.event(SiloEvent(self.folder.rounds(), trouble.name, "waits", str(trouble)))
        time.sleep(self.policy.probe)
        return time.monotonic() - self.started < self.policy.start_timeout

    def _without(
        self, members: Sequence[str], trouble: Unanswered | Refusal | Changed
    ) -> list[str]:
        """Leave out a silo that refuses the agreement; the first agreement needs all members."""
        if isinstance(trouble, Refusal) and not self.folder.segments():
            raise trouble
        self.absences[trouble.name] += 1
        what = "changed" if isinstance(trouble, Changed) else "absent"
        self.strikes[trouble.name] += (
            STRIKES if what == "changed" else isinstance(trouble, Refusal | Unusable)
        )
        self.folder.event(SiloEvent(self.folder.rounds(), trouble.name, what, str(trouble)))
        return [name for name in members if name != trouble.name]

    def _segment(self, members: Sequence[str]) -> Segment:
        """Return the last segment if members, reports and version are unchanged; otherwise begin a new one."""
        segments = self.folder.segments()
        last = segments[-1] if segments else Segment(-1, tuple(members), 0)
        if segments and self.folder.goes_on(last) and last.members == tuple(members):
            return last
        x, rounds = self.folder.reached(last) if segments else (None, 0)
        segment = Segment(len(segments), tuple(members), last.before + rounds)
        for name in self.file.silos:
            if name in members and name not in last.members:
                self.folder.event(SiloEvent(segment.before, name, "joined", JOINED.format(name)))
            elif name in last.members and name not in members:
                self.folder.event(SiloEvent(segment.before, name, "dropped", DROPPED.format(name)))
        self.folder.begin(segment, x)
        return segment

    def _train(self, segment: Segment, setup: Setup, facts: Facts) -> Outcome | list[str]:
        """Train one segment; return the run's outcome or the members of the next segment."""
        dropped = [
            name for name in self.file.silos if name not in {*segment.members} | self.session.barred
        ]
        membership = Membership(
            self.session,
            segment.members,
            self.policy,
            self.folder.event,
            dropped,
            self.absences,
            self.strikes,
        )
        membership.round = self.folder.rounds()
        remote = Remote(membership, facts)
        channel = remote.channel
        while True:
            try:
                federation = self._federation(remote)
                assert isinstance(federation.channel, RemoteChannel)
                channel = federation.channel
                return self._finish(segment, setup, channel, self._fit(segment, federation))
            except Quarantined as found:
                return self._bar(segment.members, found)
            except Returned as returned:
                return self._in_order({*segment.members, *returned.names})
            except (Lost, Paused) as reason:
                if isinstance(reason, Lost) and self.policy.missing != PAUSE:
                    return self._in_order({*segment.members} - {*reason.names})
                there = self._wait(membership)
                if self._too_few(there) is not None:
                    words = f"No answer of {reason}." if isinstance(reason, Lost) else str(reason)
                    return self._pause(words)
                if channel.stood_in or there != list(segment.members):
                    return there

    def _in_order(self, names: set[str]) -> list[str]:
        return [name for name in self.file.silos if name in names]

    def _fit(self, segment: Segment, federation: Federation) -> Result:
        """Run the training loop on this segment, from its checkpoint if there is one."""
        file = self.file
        channel = federation.channel
        assert isinstance(channel, RemoteChannel)
        membership = channel.membership

        def after(info: RoundInfo) -> None:
            self._progress(segment, membership, info, federation.traffic)
            membership.finish_round(segment.before + info.rounds)

        algorithm = file.method
        members = len(segment.members)
        if (
            getattr(algorithm, "clients_per_round", None) or 0
        ) > members:  # cannot draw more than there are
            algorithm = replace(algorithm, clients_per_round=members)
        if self.policy.influence is not None and members >= FEWEST:
            shares = influence_shares(channel.facts, self.policy.influence)
            algorithm = replace(algorithm, objective=algorithm.objective.limited(shares))
        return train(
            algorithm,
            federation,
            max(file.training.rounds - segment.before, 1),
            file.training.tol,
            file.training.seed,
            self.folder.start(segment),
            progress=False,
            checkpoint=Checkpoint(self.folder.checkpoint(segment), every=1),
            callbacks=[after],
        )

    def _federation(self, remote: Remote) -> Federation:
        """Return the silos as a federation, with masked vectors under [secure]."""
        if not self.file.secure:
            return remote
        from scaffpd.deploy.secure import MaskedRemote  # needs the optional package cryptography
        from scaffpd.secure import SecureAggregation

        masked = Remote(remote.channel.membership, remote.channel.facts, MaskedRemote)
        return SecureAggregation(masked, **self.file.masking)

    def _wait(self, membership: Membership) -> list[str]:
        """Wait for absent silos and return those that are there."""
        deadline = time.monotonic() + self.policy.start_timeout
        there = {*membership.present}
        while self._too_few(self._in_order(there)) is not None and time.monotonic() < deadline:
            there |= {*membership.welcome()}
            time.sleep(0 if self._too_few(self._in_order(there)) is None else PAUSE_SECONDS)
        return self._in_order(there)

    def _finish(
        self, segment: Segment, setup: Setup, remote: RemoteChannel, result: Result
    ) -> Outcome:
        """Write the result and return the outcome."""
        remote.membership.ending = True
        spent = self._spent(remote) if self.file.privacy else {}
        rows = self._rows(segment, remote, result, spent)
        self.folder.write_table("clients.csv", rows)
        text = SCORES.dump_json(client_scores(rows))
        write_file(self.folder.path / CLIENTS, text)
        self.folder.write_rounds(self.file.silos)
        self.folder.write_model(result.x, setup)
        joining = (
            self._joining(segment.members, setup, result) if self.file.training.joining else ""
        )
        proven = float(result.certificate) if np.isfinite(result.certificate) else None
        whole = replace(result, rounds=segment.before + result.rounds)
        worst = max(spent.values(), key=lambda own: own["epsilon"], default=None)
        words = _privately(worst) if self.file.privacy else ""
        sentence = f"{whole}{words}{self._missing(segment, remote)}{joining}"
        final = result.status is not Status.INTERRUPTED
        return Outcome(
            str(result.status), final, sentence, segment.members, whole.rounds, proven, worst
        )

    def _joining(self, members: Sequence[str], setup: Setup, result: Result) -> str:
        """Train the models still missing, ask silos to score them and their own, and return a sentence on the gains."""
        kappa = float(setup.model.get("strength", PULL))
        try:
            question = self._compared(members, setup, result, kappa)
            replies = self.session.exchange(SiloRequest.of(question), members, self.policy.timeout)
        except (Lost, Paused, Quarantined, Unanswered, Refusal) as trouble:
            return f" Gains from joining were not measured: {trouble}"
        wanted = question.shapes(0) | {"scalars": (2,)}
        arrays = {
            name: reply.arrays for name, reply in replies.items() if isinstance(reply, Message)
        }
        told = {
            name: own
            for name, own in arrays.items()
            if {
                part: own[part].shape
                for part in own.keys() & wanted
                if np.isfinite(own[part]).all()
            }
            == wanted
        }
        refused = [name for name in members if name not in told]
        if not told:
            return " Gains from joining were not measured: no silo releases its scores (limits.joining in its file)."
        found = of_silos(told, "accuracy" if setup.schema["labels"] else "rmse", kappa)
        write_file(self.folder.path / JOINING, joining_record(found).model_dump_json())
        self.folder.write_table("joining.csv", found.table())
        quiet = f" ({', '.join(refused)} did not release theirs.)" if refused else ""
        return f" {found.sentence}{quiet}"

    def _compared(
        self, members: Sequence[str], setup: Setup, result: Result, kappa: float
    ) -> JoiningScores:
        """Train an average, a fair and a shared model for personal ones; reuse the run's own."""
        algorithm = self.file.method
        plan = self.file.training
        x = {}
        own = "personal" if "strength" in setup.model else "fair"
        goals = {"average": Average(prior=algorithm.objective.prior), "fair": algorithm.objective}
        for name, goal in (*goals.items(), ("personal", algorithm.objective)):
            strength = kappa if name == "personal" else None
            if name == own:
                x[name] = result.x
            else:
                silos = self._settled(members, setup.with_model(strength=strength))
                run = replace(algorithm, objective=goal), silos, plan.rounds, plan.tol, plan.seed
                x[name] = train(*run, result.x, False).x
        self._settled(members, setup)
        average, fair, personal = (
            torch.from_numpy(np.asarray(x[name])) for name in ("average", "fair", "personal")
        )
        return JoiningScores(average, fair, personal, kappa, plan.seed)

    def _spent(self, remote: RemoteChannel) -> dict[str, dict[str, Any]]:
        """Return (ε, δ) of every silo that answers."""
        replies = remote.membership.ask(SiloRequest(SPENT), list(remote.names))
        pairs = {
            name: (reply.values.get("epsilon"), reply.values.get("delta"))
            for name, reply in replies.items()
        }
        both = {
            name: pair
            for name, pair in pairs.items()
            if all(isinstance(value, float) for value in pair)
        }
        return {
            name: {"epsilon": epsilon, "delta": delta} for name, (epsilon, delta) in both.items()
        }

    def _rows(
        self,
        segment: Segment,
        remote: RemoteChannel,
        result: Result,
        spent: Mapping[str, Mapping[str, float]],
    ) -> list[dict[str, Any]]:
        """Return the table of silos: scores, or under privacy the last noisy loss and the ε spent."""
        counts = {"train": remote.facts.constants.samples, "test": remote.facts.tested}
        if self.file.privacy:  # silos do not say how many rows they hold out
            noisy = np.array([result.history[f"loss[{name}]"][-1] for name in segment.members])
            scores = {
                "train": ClientScores(
                    segment.members, noisy, np.full(len(noisy), np.nan), counts["train"]
                )
            }
        else:
            scores = {
                split: self._scores(remote, result, split, own) for split, own in counts.items()
            }
        rows = []
        for i, name in enumerate(segment.members):
            row = client_row(MODEL, name, result.weights[i], scores, i)
            rows.append(
                row
                | ({"epsilon": spent.get(name, {}).get("epsilon", "")} if self.file.privacy else {})
            )
        return rows

    def _scores(
        self, remote: RemoteChannel, result: Result, split: str, counts: Any
    ) -> ClientScores:
        """Return every silo's loss and accuracy; NaN if unknown."""
        loss = accuracy = np.full(len(counts), np.nan)
        if counts.any():
            question = Scores(torch.from_numpy(result.x).to(remote.like), split)
            numbers = remote.scores(question, complete=False).numbers
            loss, accuracy = (numbers[name]().double().numpy() for name in ("loss", "accuracy"))
        return ClientScores(tuple(remote.names), loss, accuracy, counts)

    def _missing(self, segment: Segment, remote: RemoteChannel) -> str:
        """Say which silos are missing from the result, or partly missing."""
        gone = {*self.file.silos} - {*segment.members}
        sorts = (
            (gone - self.session.barred, "dropped"),
            (gone & self.session.barred, "quarantined"),
        )
        fates = [f"{', '.join(self._in_order(who))} had been {what}" for who, what in sorts if who]
        words = f" It is about {', '.join(segment.members)}; {'; '.join(fates)}." if gone else ""
        stale = sorted(remote.membership.absent)
        return words + (f" {', '.join(stale)} did not answer at the end." if stale else "")

    def _pause(self, sentence: str) -> Outcome:
        segments = self.folder.segments()
        done = self.folder.rounds()
        self.folder.write_rounds(self.file.silos)
        members = segments[-1].members if segments else ()
        return Outcome(
            PAUSED, False, f"{sentence} The run waits after round {done}.", members, done
        )

    def _progress(
        self, segment: Segment, membership: Membership, info: RoundInfo, sent: Traffic
    ) -> None:
        state = info.state
        wire = self.session.wire
        gap = float(state.certificate)
        self.folder.progress(
            {
                "round": segment.before + info.rounds,
                "segment": segment.number,
                "members": list(segment.members),
                "certificate": gap if np.isfinite(gap) else None,
                "losses": [float(v) for v in state.losses],
                "weights": [float(v) for v in state.weights],
                "absent": sorted(membership.absent),
                "exchanges": sent.exchanges,
                "bytes_up": sent.bytes_up,
                "bytes_down": sent.bytes_down,
                "messages_up": wire.bytes_up,
                "messages_down": wire.bytes_down,
                "seconds": round(time.monotonic() - self.started, 3),
            }
        )


def _privately(worst: Mapping[str, float] | None) -> str:
    """Say what ε and δ the run has cost."""
    if worst is None:
        return " No silo reported what this has cost."
    pair = f"(ε, δ) = ({worst['epsilon']:.2f}, {worst['delta']:g})"
    return f" Every record is protected with {pair}, as counted by the silos; the agreement on columns is not covered."
