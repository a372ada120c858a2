"""`train`: the one loop that drives every algorithm, on every runtime."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

import scaffpd.training.history as disk
from scaffpd import __version__
from scaffpd.algorithms.base import Algorithm as Algorithm
from scaffpd.algorithms.base import RunState
from scaffpd.errors import InputError, count, positive
from scaffpd.federation import Federation, PrivacyAccount, Spent, Traffic, Vector
from scaffpd.models.cox import refuse_powers
from scaffpd.models.execution import limit_threads
from scaffpd.models.personal import base_of
from scaffpd.training.history import MANY, Checkpoint, History
from scaffpd.training.progress import Progress

PATIENCE = 100  # rounds in a row without an acceptable step before a run is called stalled
FEW = 3  # more rounds than this in which no loss has moved by the share MOVED are no progress
MOVED = 1e-3
EXPLOSION = 1e10  # growth of the largest loss beyond which a run is called diverged


class Status(StrEnum):
    """Status of a finished run."""

    CONVERGED = "converged"
    ROUND_LIMIT = "round limit"
    PRECISION = "precision"
    STALLED = "stalled"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"

    @property
    def sentence(self) -> str:
        return SENTENCES[self]


SENTENCES = {
    Status.CONVERGED: "The optimality gap is proven to be at most tol.",
    Status.ROUND_LIMIT: "All rounds were made.",
    Status.PRECISION: "The gap is proven down to rounding error; this number format cannot "
    "certify the tol asked for.",
    Status.STALLED: "No further step was acceptable: rounding or noise dominates.",
    Status.DIVERGED: "The losses grew without bound; the last finite point is returned. Use "
    "smaller steps, or Auto().",
    Status.INTERRUPTED: "The run was interrupted (Ctrl-C); the last finished round is returned.",
    Status.STOPPED: "A callback asked to stop.",
}


UNMOVED = (
    f"No client's loss has moved by more than {MOVED:.1%} since the start: give a larger "
    "local_rate or more "
    "local_steps, or check that the network can learn these labels at all."
)


@dataclass(frozen=True)
class RoundInfo:
    """Argument of callbacks after every round."""

    rounds: int
    state: RunState
    history: History
    account: PrivacyAccount | None = None

    @property
    def privacy(self) -> Spent | None:
        """Privacy cost of the clients' answers so far; `None` if they are not `Private`."""
        return None if self.account is None else self.account.spent()


Callback = Callable[[RoundInfo], bool | None]
StartPoint = RunState | torch.Tensor | ArrayLike | None  # an x, or an earlier run's last state


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        x: the parameters, a flat array (`Linear.reshape` gives them their shapes).
        weights: λ, the weight of every client in the worst mixture.
        certificate: the duality gap of (x, weights) is at most this; +∞ where nothing is proven.
        status: how the run ended.
        message: the same in a sentence or two.
        history: the table of all rounds.
        names: the clients.
        rounds: rounds made.
        privacy: what the clients' answers have cost, all runs on the same federation together;
            `None` where they are not `Private`.
        personal: u_i, the model of client `names[i]`, for a `Personal` model; (N, d).
    """

    x: NDArray[np.float64]
    weights: Vector
    certificate: float
    status: Status
    message: str
    history: History = field(repr=False)
    names: tuple[str, ...]
    rounds: int
    privacy: Spent | None = None
    personal: NDArray[np.float64] | None = field(default=None, repr=False)

    def uninterrupted(self) -> Self:
        """Return the result; where Ctrl-C ended the run, end what would go on from it as well."""
        if self.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        return self

    def __str__(self) -> str:
        proof = f", certified gap {self.certificate:.2e}" if np.isfinite(self.certificate) else ""
        spent = "" if self.privacy is None else f", {self.privacy}"
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        return f"{self.status} after {rounds}{proof}{spent}. {self.message}"


def train(
    algorithm: Algorithm,
    federation: Federation,
    rounds: int = 1000,
    tol: float | None = None,
    seed: int = 0,
    x0: StartPoint = None,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    callbacks: Sequence[Callback] = (),
    every_client: bool | None = None,
) -> Result:
    """Run `algorithm` on `federation` until a certified gap of `tol`, for at most `rounds` rounds.

    Args:
        algorithm: such as `fair(ChiSquare(rho=0.1))`.
        federation: such as a `Cohort`.
        rounds: the most communication rounds to make, those of an earlier part of a resumed run
            included.
        tol: stop as soon as the proven optimality gap is at most this.
        seed: seeds all randomness.
        x0: where to start; by default the federation's own choice. The state of an earlier run on
            the same clients (a callback's `info.state`) hands over what that run has learnt besides
            x, where the algorithm can use it.
        progress: show a progress bar; by default where standard error is a terminal.
        checkpoint: a path or `Checkpoint(path, every=…)`. If the file is there, the run goes on
            from it, with the same numbers as if it had never stopped (and `x0` is not looked at).
        callbacks: called with a `RoundInfo` after every round; one that returns `True` ends the
            run.
        every_client: keep every client's loss and weight of every round in the history. By default
            up to 10,000 clients; beyond, the history has those of the start and of the end, and
            losses that a method does not need itself are looked up there alone.
    """
    _check(algorithm, federation, rounds, tol, seed)
    keeper = Checkpoint(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    if keeper is not None and not isinstance(keeper, Checkpoint):
        raise InputError(
            "not-a-checkpoint",
            f"train needs a path or Checkpoint(...) for checkpoint, got {checkpoint!r}.",
        )
    whole = len(federation.names) <= MANY if every_client is None else bool(every_client)
    # All that touches data belongs inside: a method is chosen by the losses' constants, and their
    # small eigenproblems take several times longer on two threads than on one.
    with limit_threads(federation.channel.work):
        run = _TrainingRun(algorithm, federation, seed, keeper, whole)
        run.begin(_start(federation, x0), x0)
        reason = run.method.uncertified(run.state)
        if tol is not None and reason is not None:
            raise InputError(
                "tol-without-certificate", f"tol needs a certificate, and there is none: {reason}"
            )
        with Progress(progress, rounds, tol) as bar:

            def show(info: RoundInfo) -> None:
                bar.show(info.rounds, info.state.certificate, info.state.losses)

            status = run.until(rounds, tol, [*callbacks, show])
        return run.result(status)


def uncertified(algorithm: Algorithm, federation: Federation, seed: int = 0) -> str | None:
    """Say why a method has no certificate on these clients; `None` where it has one."""
    method = algorithm.choice(federation)
    reason: str | None = method.uncertified(method.init(federation, seed, None))
    return reason


class _TrainingRun:
    """The moving parts of one call of `train`."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        seed: int,
        keeper: Checkpoint | None,
        whole: bool,
    ) -> None:
        self.algorithm = algorithm
        # What stands for several methods chooses one here, before traffic is counted.
        self.method = algorithm.choice(federation)
        self.reason = algorithm.reason(federation)
        self.federation = federation
        self.seed = seed
        self.keeper = keeper
        self.history = History(federation.names, whole)
        self.clock = time.perf_counter()
        self.saved = 0
        self.rejected = 0
        self.state: RunState
        self.account = federation.account
        self.released = 0
        self.done: tuple[RunState, int, Traffic, int]

    def begin(self, x0: torch.Tensor | None, before: StartPoint) -> None:
        self.federation.traffic.restore(Traffic())
        followed = None
        if isinstance(before, RunState):
            followed = self.method.follow(self.federation, before, self.seed)
        if followed is None:
            followed = self.method.init(self.federation, self.seed, x0)
        self.state = followed
        if self.keeper is not None and self.keeper.exists():
            self._resume()
        else:
            self._record()
        if not (self.history.every_client and self.federation.channel.here):
            self.state = replace(self.state, looks=False)
        self.last_finite = self.state
        self._complete()

    def _record(self) -> None:
        seconds = time.perf_counter() - self.clock
        self.history.append(self.state, self.federation.traffic, seconds)

    def until(self, rounds: int, tol: float | None, callbacks: Sequence[Callback]) -> Status:
        """Make rounds until one of the named outcomes."""
        try:
            while (status := self._decided(rounds, tol)) is None:
                self.state = self.method.round(self.federation, self.state)
                self._record()
                self._complete()
                info = RoundInfo(self.state.rounds, self.state, self.history, self.account)
                answers = [callback(info) for callback in callbacks]
                if any(answer is True for answer in answers):
                    status = Status.STOPPED
                    break
        except KeyboardInterrupt:
            status = Status.INTERRUPTED
        finally:
            self._roll_back()
            self._look_up()
            self._save()
        return status

    def _complete(self) -> None:
        """Mark the round as done: from here on it is what an interruption leaves behind."""
        rejected = 0 if self.state.accepted else self.rejected + 1
        self.done = (self.state, len(self.history), self.federation.traffic.snapshot(), rejected)
        self.rejected = rejected
        if self._finite():
            self.last_finite = self.state
            if self.keeper is not None and self.state.rounds - self.saved >= self.keeper.every:
                self._save()

    def _roll_back(self) -> None:
        self.state, rows, traffic, self.rejected = self.done
        self.history.truncate(rows)
        self.federation.traffic.restore(traffic)

    def _look_up(self) -> None:
        """Look up the losses of the last state, where that was not its turn."""
        shown = self.state.shows_losses
        unknown = not self.state.looks and np.isnan(self.state.losses).all()
        here = self.federation.channel.here  # silos show no loss for the history alone
        if here and shown and unknown and bool(torch.isfinite(self.state.x).all()):
            self.state = replace(self.state, losses=self.federation.evaluate(self.state.x).loss)
            self.history.look_up(self.state.losses)

    def _finite(self) -> bool:
        losses = self.state.losses
        shown = self.state.shows_losses and self.state.looks
        if not shown and np.isnan(losses).all():
            return bool(torch.isfinite(self.state.x).all())
        limit = EXPLOSION * (1 + np.abs(self.history.first_losses).max())
        return bool(np.all(np.isfinite(losses)) and np.abs(losses).max() <= limit)

    def _decided(self, rounds: int, tol: float | None) -> Status | None:
        """Return how the run ends, as all who run it together agree; `None` goes on."""
        status = self.federation.channel.decided(self._outcome(rounds, tol))
        return None if status is None else Status(status)

    def _outcome(self, rounds: int, tol: float | None) -> Status | None:
        state = self.state
        if not self._finite():
            return Status.DIVERGED
        if tol is not None and state.certificate <= tol:
            return Status.CONVERGED
        finite = state.certificate < np.inf
        if tol is not None and finite and tol < state.certificate <= 2 * state.floor:
            return Status.PRECISION
        if self.rejected >= PATIENCE or self.method.stalled(state):
            return Status.STALLED
        if state.rounds < rounds:
            return None
        return Status.STALLED if self._unmoved() else Status.ROUND_LIMIT

    def _unmoved(self) -> bool:
        """Return whether nothing is proven and no loss has moved since the start; losses with noise
        cannot tell.
        """
        constants = getattr(self.state, "constants", None)
        noisy = self.account is not None or getattr(constants, "noisy", False)
        if noisy or len(self.history) <= FEW or np.isfinite(self.state.certificate):
            return False
        before = self.history.first_losses
        after = np.asarray(self.state.losses)
        return bool(np.all(np.abs(after - before) <= MOVED * np.abs(before)))

    def _about(self) -> dict[str, object]:
        return {
            "version": __version__,
            "algorithm": repr(self.algorithm),
            "problem": self.federation.fingerprint,
            "seed": self.seed,
            "names": list(self.federation.names),
        }

    def _save(self) -> None:
        released = 0 if self.account is None else self.account.total
        if (
            self.keeper is None
            or not self._finite()
            or (self.state.rounds, released) == (self.saved, self.released)
        ):
            return
        traffic = {f"traffic.{k}": np.asarray(v) for k, v in vars(self.federation.traffic).items()}
        seconds = {
            "seconds": np.asarray(time.perf_counter() - self.clock),
            "rejected": np.asarray(self.rejected),
        }
        arrays = disk.pack(self.state) | self.history.pack() | traffic | seconds
        disk.write(
            self.keeper.path,
            arrays if self.account is None else arrays | self.account.pack(),
            self._about(),
        )
        self.saved = self.state.rounds
        self.released = released

    def _resume(self) -> None:
        assert self.keeper is not None
        arrays, about = disk.read(self.keeper.path)
        for name, value in self._about().items():
            if about.get(name) != value:
                raise InputError(
                    "checkpoint-of-another-run",
                    f"The checkpoint {str(self.keeper.path)!r} belongs to another {name}; "
                    "remove it, or use another file.",
                )
        try:
            if self.account is not None:
                self.account.merge(arrays)
            read = disk.unpack(self.state, arrays)
            self.federation.channel.resumed(read.rounds)
            self.state = self.method.resume(self.federation, read)
            self.history = History.unpack(self.federation.names, arrays)
            held = Traffic(**{k: int(arrays[f"traffic.{k}"]) for k in vars(Traffic())})
            seconds = float(arrays["seconds"])
            rejected = int(arrays["rejected"])
        except KeyError as missing:
            raise InputError(
                "checkpoint-incomplete",
                f"The checkpoint {str(self.keeper.path)!r} lacks {missing}; remove it.",
            ) from None
        self.federation.traffic.restore(held)
        self.clock -= seconds
        self.saved = self.state.rounds
        self.released = 0 if self.account is None else self.account.total
        self.rejected = rejected - (
            not self.state.accepted
        )  # `_complete` counts the last round again

    def result(self, status: Status) -> Result:
        """Return the outcome; of a diverged run the last finite point."""
        state = self.last_finite if status is Status.DIVERGED else self.state
        reason = self.method.uncertified(state)
        said = [status.sentence]
        if reason is not None:
            said.append(f"There is no certificate: {reason}")
        if status is Status.STALLED and self._unmoved():
            said.append(UNMOVED)
        if status in (Status.ROUND_LIMIT, Status.STALLED):
            said.append(self.method.advise(state))
        said.append(self.reason)
        own = self.federation.own_models(state.x)
        return Result(
            state.x.detach().cpu().numpy(),
            state.weights.copy(),
            float(state.certificate),
            status,
            " ".join(filter(None, said)),
            self.history,
            tuple(self.federation.names),
            state.rounds,
            None if self.account is None else self.account.spent(),
            None if own is None else own.detach().cpu().numpy(),
        )


def _check(
    algorithm: object,
    federation: object,
    rounds: int,
    tol: float | None,
    seed: object,
) -> None:
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            "not-an-algorithm",
            f"train needs an algorithm such as fair(ChiSquare(rho=0.1)), got {algorithm!r}.",
        )
    if not isinstance(federation, Federation):
        given = type(federation).__name__
        raise InputError(
            "not-a-federation",
            f"train needs a federation such as Cohort(clients, model), got {given}.",
        )
    model = base_of(getattr(federation, "model", None))
    if algorithm.positive and not getattr(model, "summed", True):
        refuse_powers()
    count("train", "rounds", rounds)
    if tol is not None:
        positive("train", "tol", tol)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(
            "seed-out-of-range", f"train needs a whole number seed >= 0, got {seed!r}."
        )


def _start(federation: Federation, x0: StartPoint) -> torch.Tensor | None:
    if x0 is None:
        return None
    given = x0.x if isinstance(x0, RunState) else x0
    x = federation.point(given, "x0").clone()
    if not bool(torch.isfinite(x).all()):
        raise InputError("x0-not-finite", "x0 has a NaN or infinite entry.")
    return x
