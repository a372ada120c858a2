r"""`coordinate`: carry out a whole run over any transport, from the first greeting to the model.

The training loop drives all silos like a cohort and writes its state after every round, so a
coordinator that was killed resumes from the last round with the same numbers. A silo that does not
answer is waited for, and the round is made again; after `start_timeout` seconds the run pauses.
To go on without a silo is another run, with another federation.toml and another folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from scaffpd import __version__
from scaffpd.deploy.agreement import negotiate, settle
from scaffpd.deploy.deployed_run import (
    FAILED,
    OUTCOME,
    PAUSED,
    DeployedRun,
    Outcome,
    write_outcome,
)
from scaffpd.deploy.messages import GARBAGE, SPENT, Failure, Json, Message, Transport
from scaffpd.deploy.recording import record_of
from scaffpd.deploy.remote import (
    CHANGED,
    Facts,
    Remote,
    RemoteChannel,
    Session,
    SiloRequest,
    SiloTrouble,
)
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores, Federation
from scaffpd.federation.questions import Scores
from scaffpd.files import write_file
from scaffpd.run.record import EventRecord
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.model_file import Setup, model_bytes
from scaffpd.training.history import Checkpoint
from scaffpd.training.history import read as read_checkpoint
from scaffpd.training.loop import Result, RoundInfo, Status, train

log = logging.getLogger("scaffpd.coordinator")
PAUSE_SECONDS = 1.0  # between two checks for silos
STRIKES = 3  # troubles in a row without a new round, after which the run pauses


def coordinate(path: Path, transport: Transport) -> Outcome:
    """Run the federation of a federation.toml, or resume it; write the result to its folder."""
    file = FederationFile.read(path)
    folder = DeployedRun(file.folder)
    with folder.locked():
        try:
            done = reopen(file, folder)
            if done is not None:
                return done
            outcome = Coordination(file, folder, transport).run()
        except InputError as error:
            rounds = 0 if folder.has_outcome() else _rescue(folder)
            kept = f" The model of round {rounds} is stored." if rounds else ""
            outcome = Outcome(FAILED, True, f"{error}{kept}", rounds)
        if not folder.has_outcome():  # of a run with other settings, which stays as it is
            if outcome.status in (PAUSED, FAILED):
                with suppress(InputError):  # a file of the folder may be what cannot be read
                    record_of(file, folder, outcome).write(folder.path)
            write_outcome(folder, outcome)
        log.info("round %s: %s", outcome.rounds, outcome.sentence)
    return outcome


def reopen(file: FederationFile, folder: DeployedRun) -> Outcome | None:
    """Return the outcome of a finished run; otherwise remove it, so that the run goes on.

    A run continues after a failure, and if more rounds or another tolerance are asked for. A folder
    is for one federation and one version of the package: another may compute something else.
    """
    about = file.identity() | {"version of scaffpd": __version__}
    settings: Json = {"about": about, "rounds": file.training.rounds, "tol": file.training.tol}
    before = folder.read("settings.json", Json) or settings
    known: Json = before["about"] if isinstance(before.get("about"), dict) else {}
    if known != about:
        names = (name for name in {**known, **about} if known.get(name) != about.get(name))
        raise InputError(
            "folder-of-another-run",
            f"The run in {str(folder.path)!r} is of another {next(names)}: use a new folder.",
        )
    folder.write("settings.json", settings)
    ended = folder.read(OUTCOME, Outcome)
    if ended is not None and ended.final and ended.status != FAILED and before == settings:
        return ended
    (folder.path / OUTCOME).unlink(missing_ok=True)
    return None


def _rescue(folder: DeployedRun) -> int:
    """Write the model of the last finished round after a failure, and return that round.

    A run that has spent its privacy budget has nothing else to show for it.
    """
    try:
        setup = folder.setup()
        if setup is None or not folder.checkpoint.exists():
            return 0
        arrays, _ = read_checkpoint(folder.checkpoint)
        write_file(folder.path / "model.safetensors", model_bytes(arrays["state.x"], setup))
        return int(arrays["state.rounds"])
    except InputError:  # the run has failed because a file of the folder cannot be read
        return 0


class Coordination:
    """One run at the coordinator."""

    def __init__(self, file: FederationFile, folder: DeployedRun, transport: Transport) -> None:
        self.file = file
        self.folder = folder
        self.session = Session(transport, file.faults.timeout, asks=file.request())
        self.started = time.monotonic()

    def run(self) -> Outcome:
        """Train until the run ends, or a silo is missing for too long."""
        strikes = 0
        reached = -1
        while True:
            trouble = self._gather()
            if trouble is None:
                try:
                    return self._run()
                except SiloTrouble as found:
                    trouble = self._noted(found)
            done = self.folder.rounds()
            strikes = strikes + 1 if done == reached else 1
            reached = done
            waited = time.monotonic() - self.started > self.file.faults.start_timeout
            gives_up = waited if trouble.failure.waits else strikes >= STRIKES
            if (
                trouble.failure.what == CHANGED
                or gives_up
                or trouble.name not in self.session.sites
            ):
                return Outcome(PAUSED, False, f"{trouble} The run waits after round {done}.", done)
            time.sleep(PAUSE_SECONDS)

    def _gather(self) -> SiloTrouble | None:
        """Wait for all silos, at most `start_timeout` seconds; return why one is missing."""
        deadline = time.monotonic() + self.file.faults.start_timeout
        self.session.sites.clear()
        why: dict[str, Failure] = {}
        while True:
            left = deadline - time.monotonic()
            for name, reply in self.session.greet(min(self.file.faults.timeout, left)).items():
                if isinstance(reply, Message):
                    why.pop(name, None)
                elif name not in why or reply.what == GARBAGE:
                    why[name] = reply
            missing = [name for name in self.file.silos if name not in self.session.sites]
            if not missing:
                return None
            if time.monotonic() + PAUSE_SECONDS > deadline:
                found = why.get(missing[0], Failure("it is not connected"))
                return self._noted(SiloTrouble(missing[0], found))
            time.sleep(PAUSE_SECONDS)

    def _noted(self, trouble: SiloTrouble) -> SiloTrouble:
        what = "waits" if trouble.failure.waits else trouble.failure.what
        event = EventRecord(
            round=self.folder.rounds(), client=trouble.name, what=what, sentence=str(trouble)
        )
        _, before = self.folder.entries()
        if not before or before[-1] != event:  # one that waits for a person repeats itself
            self.folder.progress({"event": event.model_dump()})
        return trouble

    def _run(self) -> Outcome:
        """Agree, train from the last checkpoint, and write the result."""
        setup = self.folder.setup()
        if setup is None:
            setup = negotiate(self.session, self.file.silos, self.file)
            self.folder.write("setup.json", setup.values())
        facts = settle(self.session, self.file.silos, setup)
        self._same_data()
        federation = self._federation(facts)
        assert isinstance(federation.channel, RemoteChannel)
        return self._finish(setup, federation.channel, self._fit(federation))

    def _same_data(self) -> None:
        """Store what every silo reports about its rows; refuse one whose report has changed."""
        now = {name: self.session.constants[name].tolist() for name in self.file.silos}
        before = self.folder.read("constants.json", dict[str, list[float]]) or now
        for name in self.file.silos:
            if before.get(name) != now[name]:
                why = "its data are not those of this run: put them back, or use a new folder"
                raise SiloTrouble(name, Failure(why, CHANGED))
        self.folder.write("constants.json", now)

    def _federation(self, facts: Facts) -> Federation:
        """Return the silos as a federation, with masked vectors under [secure]."""
        if not self.file.secure:
            return Remote(self.session, facts)
        from scaffpd.deploy.secure import MaskedRemote  # needs the optional package cryptography
        from scaffpd.secure.aggregation import SecureAggregation

        return SecureAggregation(Remote(self.session, facts, MaskedRemote), **self.file.masking)

    def _fit(self, federation: Federation) -> Result:
        """Run the training loop, from its checkpoint if there is one."""
        plan = self.file.training
        wire = self.session.wire

        def after(info: RoundInfo) -> None:
            gap = float(info.state.certificate)
            self.folder.progress(
                {
                    "round": info.rounds,
                    "members": list(self.file.silos),
                    "absent": [],
                    "certificate": gap if np.isfinite(gap) else None,
                    "losses": [float(loss) for loss in info.state.losses],
                    "weights": [float(weight) for weight in info.state.weights],
                    "exchanges": federation.traffic.exchanges,
                    "messages_up": wire.bytes_up,
                    "messages_down": wire.bytes_down,
                    "seconds": round(time.monotonic() - self.started, 3),
                }
            )
            log.info("round %s is done", info.rounds)

        return train(
            self.file.method,
            federation,
            plan.rounds,
            plan.tol,
            plan.seed,
            progress=False,
            checkpoint=Checkpoint(self.folder.checkpoint, every=1),
            callbacks=[after],
        )

    def _finish(self, setup: Setup, channel: RemoteChannel, result: Result) -> Outcome:
        """Write the result and return the outcome."""
        private = self.file.privacy is not None
        spent = self._spent() if private else {}
        scores = {} if private else self._scores(channel, result)
        worst = max(spent.values(), key=lambda own: own["epsilon"], default=None)
        proven = float(result.certificate) if np.isfinite(result.certificate) else None
        sentence = f"{result}{_privately(worst) if private else ''}"
        final = result.status is not Status.INTERRUPTED
        outcome = Outcome(str(result.status), final, sentence, result.rounds, proven, worst)
        write_file(self.folder.path / "model.safetensors", model_bytes(result.x, setup))
        record_of(self.file, self.folder, outcome, result, scores, spent).write(self.folder.path)
        return outcome

    def _spent(self) -> dict[str, dict[str, float]]:
        """Return (ε, δ) of every silo that reports them."""
        found = {}
        for name, reply in self.session.ask(SiloRequest(SPENT), self.file.silos).items():
            pair = {part: reply.values.get(part) for part in ("epsilon", "delta")}
            known = {part: value for part, value in pair.items() if isinstance(value, float)}
            if len(known) == len(pair):
                found[name] = known
        return found

    def _scores(self, channel: RemoteChannel, result: Result) -> dict[str, ClientScores]:
        """Return every silo's loss and accuracy on training and held-out rows."""
        counts = {"train": channel.facts.constants.samples, "test": channel.facts.tested}
        found = {}
        for split, own in counts.items():
            if own.any():
                question = Scores(torch.from_numpy(result.x).to(channel.like), split)
                numbers = channel.scores(question).numbers
                loss, accuracy = (numbers[part]().double().numpy() for part in ("loss", "accuracy"))
                found[split] = ClientScores(tuple(channel.names), loss, accuracy, own)
        return found


def _privately(worst: Mapping[str, float] | None) -> str:
    """Say what ε and δ the run has cost."""
    if worst is None:
        return " No silo reported what this has cost."
    pair = f"(ε, δ) = ({worst['epsilon']:.2f}, {worst['delta']:g})"
    return (
        f" Every record is protected with {pair}, as counted by the silos; the agreement on "
        "columns is not covered."
    )
