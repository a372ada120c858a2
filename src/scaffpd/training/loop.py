"""`train`: the one loop that drives every algorithm, on every runtime."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray

import scaffpd.training.history as disk
from scaffpd.algorithms.base import Algorithm as Algorithm
from scaffpd.algorithms.base import RunState
from scaffpd.errors import ExposedError, InputError, count, positive
from scaffpd.federation import Federation, Traffic, Vector
from scaffpd.models.numerics import limit_threads
from scaffpd.objectives import Excess
from scaffpd.objectives.excess import equilibrium
from scaffpd.privacy.accountant import Account, Spent
from scaffpd.training.history import MANY, Checkpoint, History
from scaffpd.training.progress import Progress

PATIENCE = 100  # rounds in a row without an acceptable step before a run is called stalled
LOOKING = (
    2  # passes of local steps for one pass that looks up all losses, where there are many clients
)
# more rounds than this, in which no loss has moved by such a share, are no progress
FEW = 3
MOVED = 1e-3
# of `tol`: how exact models are where λ answers held-out losses; what it may then gain
ANSWERED = 0.1
UNASKED = 1e-4
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
        """Describe the status in one sentence."""
        return SENTENCES[self]


SENTENCES = {
    Status.CONVERGED: "The optimality gap is proven to be at most tol.",
    Status.ROUND_LIMIT: "All rounds were made.",
    Status.PRECISION: "The gap is proven down to rounding error; this number format cannot certify the tol asked for.",
    Status.STALLED: "No further step was acceptable: rounding or noise dominates.",
    Status.DIVERGED: "The losses grew without bound; the last finite point is returned. Use smaller steps, or Auto().",
    Status.INTERRUPTED: "The run was interrupted (Ctrl-C); the last finished round is returned.",
    Status.STOPPED: "A callback asked to stop.",
}


UNMOVED = (
    f"No client's loss has moved by more than {MOVED:.1%} since the start: give a larger local_rate or more "
    "local_steps, or check that the network can learn these labels at all."
)


@dataclass(frozen=True)
class RoundInfo:
    """Argument of callbacks after every round."""

    rounds: int
    state: Any
    history: History
    account: Account | None = None

    @property
    def privacy(self) -> Spent | None:
        """Privacy cost of the clients' answers so far; `None` if they are not `Private`."""
        return None if self.account is None else self.account.spent()


Callback = Callable[[RoundInfo], bool | None]


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        x: the parameters, a flat array (`Linear.reshape` gives them their shapes).
        weights: λ, the weight of every client in the worst mixture.
        certificate: the duality gap of (x, weights) is at most this; +∞ where nothing is proven.
        status: how the run ended.
        message: the same in a sentence or two.
        history: the table of all rounds; with `Excess(objective, "held-out")` those of the run that x is from.
        names: the clients.
        rounds: rounds made, in all runs together where there are several.
        privacy: what the clients' answers have cost, all runs on the same federation together; `None` where they are
            not `Private`.
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
    x0: Any = None,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    callbacks: Sequence[Callback] = (),
    every_client: bool | None = None,
) -> Result:
    """Run `algorithm` on `federation` until a certified gap of `tol`, for at most `rounds` rounds.

    Args:
        algorithm: such as `fair(ChiSquare(rho=0.1))`.
        federation: such as a `Cohort`.
        rounds: the most communication rounds to make, rounds of an earlier part of a resumed run included. With
            `Excess(objective, "held-out")`, which takes several runs (at most 60), the most of each of them.
        tol: stop as soon as the proven optimality gap is at most this.
        seed: seeds all randomness.
        x0: where to start; by default the federation's own choice. The state of an earlier run on the same clients (a
            callback's `info.state`) hands over what that run has learnt besides x, where the algorithm can use it.
        progress: show a progress bar; by default where standard error is a terminal.
        checkpoint: a path or `Checkpoint(path, every=…)`. If the file is there, the run goes on from it, with the same
            numbers as if it had never stopped (and `x0` is not looked at).
        callbacks: called with a `RoundInfo` after every round; one that returns `True` ends the run.
        every_client: keep every client's loss and weight of every round in the history. By default up to 10,000
            clients; beyond, the history has their spread, and a method that asks only some clients has the losses of
            all looked up once in a while (NaN in between), and at the end.
    """
    _check(algorithm, federation, rounds, tol, seed, callbacks)
    keeper = Checkpoint(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    if keeper is not None and not isinstance(keeper, Checkpoint):
        raise InputError(
            "train-path-checkpoint",
            f"train needs a path or Checkpoint(...) for checkpoint, got {checkpoint!r}.",
        )
    if isinstance(objective := getattr(algorithm, "objective", None), Excess):
        if objective.by_held_out:
            if keeper is not None:
                raise InputError(
                    "weights-answer-held",
                    "Weights that answer held-out losses take several runs: leave checkpoint out.",
                )
            settings = {
                "seed": seed,
                "progress": progress,
                "callbacks": callbacks,
                "every_client": every_client,
            }
            return _answering(algorithm, objective.objective, federation, rounds, tol, x0, settings)
        algorithm = replace(cast(Any, algorithm), objective=objective.settled(federation))
    whole = len(federation.names) <= MANY if every_client is None else bool(every_client)
    run = _TrainingRun(algorithm, federation, seed, keeper, whole)
    with limit_threads(federation.channel.work):
        run.begin(_start(federation, getattr(x0, "x", x0)), x0)
        reason = algorithm.uncertified(run.state)
        if tol is not None and reason is not None:
            raise InputError(
                "tol-certificate-none", f"tol needs a certificate, and there is none: {reason}"
            )
        with Progress(progress, rounds, tol) as bar:
            status = run.until(
                rounds,
                tol,
                [
                    *callbacks,
                    lambda info: bar.show(info.rounds, info.state.certificate, info.state.losses),
                ],
            )
        return run.result(status)


def _answering(
    algorithm: Any,
    objective: Any,
    federation: Federation,
    rounds: int,
    tol: float | None,
    x0: Any,
    settings: dict[str, Any],
) -> Result:
    """Let λ answer the losses on held-out rows: runs with fixed levels, each from where the last one ended."""
    channel = federation.channel
    if not channel.here or federation.sums.hides or federation.account is not None:
        raise InputError(
            "weights-answer-held",
            "Weights that answer held-out losses need clients in this process, not masked or private.",
        )
    if channel.test is None:
        raise InputError(
            "weights-answer-held",
            "Weights that answer held-out losses need rows that are kept aside: Cohort(..., test=...).",
        )
    known = x0
    wanted = UNASKED if tol is None else tol
    made = 0

    def keep(info: RoundInfo) -> None:
        nonlocal known
        known = info.state

    def solve(goal: Excess) -> tuple[Result, Vector, Vector, Vector]:
        nonlocal made
        own = settings | {"x0": known, "callbacks": [*settings["callbacks"], keep]}
        found = train(
            replace(algorithm, objective=goal), federation, rounds, tol and ANSWERED * tol, **own
        )
        made += found.rounds
        if found.status in (Status.INTERRUPTED, Status.STOPPED, Status.DIVERGED):
            raise _EndedError(found)
        x = torch.as_tensor(found.x).to(federation.start())
        return (
            found,
            found.weights,
            federation.losses(x),
            federation.evaluate(x, "test", accuracy=False).loss,
        )

    result: Result
    try:
        result, gain, turns = equilibrium(objective, len(federation.names), solve, wanted)
    except _EndedError as ended:
        return replace(cast(Result, ended.args[0]), rounds=made)
    runs = f"{turns} run{'s' * (turns > 1)}, {made} round{'s' * (made != 1)} in all"
    said = f"{result.message} λ answers held-out losses after {runs}: another would gain at most {gain:.1e}."
    status = result.status if gain <= wanted else Status.STALLED
    return replace(result, status=status, message=said, rounds=made)


class _EndedError(Exception):
    """A run that the next one does not go on from."""


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
        self.federation = federation
        self.seed = seed
        self.keeper = keeper
        self.history = History(federation.names, whole)
        self.clock = time.perf_counter()
        self.saved = 0
        self.rejected = 0
        self.state: Any = None
        self.account = federation.account
        self.released = 0
        self.refusal = ""
        self.done: tuple[Any, int, Traffic, int]

    def begin(self, x0: torch.Tensor | None, before: Any) -> None:
        self.federation.traffic.restore(Traffic())
        if isinstance(before, RunState):
            self.state = self.algorithm.follow(self.federation, before, self.seed)
        if self.state is None:
            self.state = self.algorithm.init(self.federation, self.seed, x0)
        if self.keeper is not None and self.keeper.exists():
            self._resume()
        else:
            self._record()
        if isinstance(self.state, RunState) and not self.history.every_client:
            self.state = replace(self.state, every=_rounds_between(self.algorithm, self.federation))
        self.last_finite = self.state
        self._complete()

    def _record(self) -> None:
        seconds = time.perf_counter() - self.clock
        self.history.append(
            self.state, self.federation.traffic, seconds, self.federation.channel.absent
        )

    def until(self, rounds: int, tol: float | None, callbacks: Sequence[Callback]) -> Status:
        """Make rounds until one of the named outcomes."""
        try:
            while (status := self._outcome(rounds, tol)) is None:
                self.state = self.algorithm.round(self.federation, self.state)
                self._record()
                self._complete()
                info = RoundInfo(self.state.rounds, self.state, self.history, self.account)
                answers = [callback(info) for callback in callbacks]
                if any(answer is True for answer in answers):
                    status = Status.STOPPED
                    break
        except KeyboardInterrupt:
            status = Status.INTERRUPTED
        except (
            ExposedError
        ) as refusal:  # x hardly moves any more, and λ does: clients let no further sum be made
            status = Status.STALLED
            self.refusal = f" {refusal}"
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
        """Forget a round that was begun and not finished."""
        self.state, rows, traffic, self.rejected = self.done
        self.history.truncate(rows)
        self.federation.traffic.restore(traffic)

    def _look_up(self) -> None:
        """Look up the losses of the last state, where that was not its turn, unless clients hide them."""
        if self.federation.sums.silent:
            return
        if not getattr(self.state, "looked_up", True) and bool(torch.isfinite(self.state.x).all()):
            self.state = replace(self.state, losses=self.federation.evaluate(self.state.x).loss)
            self.history.look_up(self.state.losses)

    def _finite(self) -> bool:
        losses = self.state.losses
        if not getattr(self.state, "looked_up", True) and np.isnan(losses).all():
            return bool(torch.isfinite(self.state.x).all())
        limit = EXPLOSION * (1 + np.abs(self.history.first_losses).max())
        return bool(np.all(np.isfinite(losses)) and np.abs(losses).max() <= limit)

    def _outcome(self, rounds: int, tol: float | None) -> Status | None:
        state = self.state
        if not self._finite():
            return Status.DIVERGED
        if tol is not None and state.certificate <= tol:
            return Status.CONVERGED
        if (
            tol is not None
            and np.isfinite(state.certificate)
            and tol < state.certificate <= 2 * state.floor
        ):
            return Status.PRECISION
        if self.rejected >= PATIENCE or self.algorithm.stalled(state):
            return Status.STALLED
        if state.rounds < rounds:
            return None
        return Status.STALLED if self._unmoved() else Status.ROUND_LIMIT

    def _unmoved(self) -> bool:
        """Return whether nothing is proven and no loss has moved since the start; losses with noise cannot tell."""
        noisy = self.account is not None or getattr(
            getattr(self.state, "constants", None), "noisy", False
        )
        if noisy or len(self.history) <= FEW or np.isfinite(self.state.certificate):
            return False
        before = self.history.first_losses
        after = np.asarray(self.state.losses)
        return bool(np.all(np.abs(after - before) <= MOVED * np.abs(before)))

    def _about(self) -> dict[str, Any]:
        return {
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
            "kind": np.asarray(type(self.state).__name__),
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
        if about.get("version") != disk.series():
            self._follow(arrays, about)
            return
        for name, value in self._about().items():
            if about.get(name) != value:
                raise InputError(
                    "checkpoint-another-remove",
                    f"The checkpoint {str(self.keeper.path)!r} is of another {name}; remove it, or use another file.",
                )
        try:
            if self.account is not None:
                self.account.merge(arrays)
            like = self.algorithm.like(self.federation, self.state, str(arrays["kind"]))
            self.state = self.algorithm.resume(self.federation, disk.unpack(like, arrays))
            self.history = History.unpack(self.federation.names, arrays)
            kept = Traffic(**{k: int(arrays[f"traffic.{k}"]) for k in vars(Traffic())})
            seconds = float(arrays["seconds"])
            rejected = int(arrays["rejected"])
        except KeyError as missing:
            raise InputError(
                "checkpoint-lacks-remove",
                f"The checkpoint {str(self.keeper.path)!r} lacks {missing}; remove it.",
            ) from None
        self.federation.traffic.restore(kept)
        self.clock -= seconds
        self.saved = self.state.rounds
        self.released = 0 if self.account is None else self.account.total
        self.rejected = rejected - (
            not self.state.accepted
        )  # `_complete` counts the last round again

    def _follow(self, arrays: disk.Arrays, about: dict[str, Any]) -> None:
        """Go on from the x of another version's checkpoint with a new state, if its losses are those of the clients."""
        assert self.keeper is not None
        version = about.get("version", "0.1")
        x = arrays.get("state.x")
        words = f"The checkpoint {str(self.keeper.path)!r} was written by version {version}"
        if self.account is not None or self.federation.sums.silent:
            raise InputError(
                "run-noise-hidden",
                f"{words}, and a run with noise or hidden losses ends with its version; use another file.",
            )
        known = about.get("names") == list(self.federation.names)
        if (
            not known
            or x is None
            or x.shape != tuple(self.state.x.shape)
            or "history.losses" not in arrays
        ):
            raise InputError(
                "another-problem-remove",
                f"{words}, and is of another problem; remove it, or use another file.",
            )
        start = torch.from_numpy(x).to(self.state.x)
        losses = self.federation.evaluate(start).loss
        if not np.allclose(losses, arrays["history.losses"][-1], rtol=1e-5, atol=1e-8):
            raise InputError(
                "clients-other-losses",
                f"{words}, and clients have other losses than it says; remove it, or use another file.",
            )
        self.federation.traffic.restore(Traffic())
        self.state = self.algorithm.init(self.federation, self.seed, start)
        self.refusal = f" It began at the x of a checkpoint that version {version} had written."
        self._record()

    def result(self, status: Status) -> Result:
        """Return the outcome; of a diverged run the last finite point."""
        state = self.last_finite if status is Status.DIVERGED else self.state
        reason = self.algorithm.uncertified(state)
        message = (
            status.sentence
            if reason is None
            else f"{status.sentence} There is no certificate: {reason}"
        )
        if status is Status.STALLED and self._unmoved():
            message = f"{message} {UNMOVED}"
        if status in (Status.ROUND_LIMIT, Status.STALLED):
            message = (
                f"{message} {self.algorithm.advise(state, self.history['certificate'])}".strip()
            )
        message = f"{message}{self.refusal} {self.algorithm.explain(state)}".strip()
        x = state.x.detach().cpu().numpy()
        names = tuple(self.federation.names)
        weights = state.weights.copy()
        certificate = float(state.certificate)
        spent = None if self.account is None else self.account.spent()
        own = self.federation.own_models(state.x)
        personal = None if own is None else own.detach().cpu().numpy()
        return Result(
            x,
            weights,
            certificate,
            status,
            message,
            self.history,
            names,
            state.rounds,
            spent,
            personal,
        )


def _check(
    algorithm: Any, federation: Any, rounds: int, tol: float | None, seed: Any, callbacks: Any
) -> None:
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            "train-algorithm-such",
            f"train needs an algorithm such as fair(ChiSquare(rho=0.1)), got {algorithm!r}.",
        )
    if not isinstance(federation, Federation):
        raise InputError(
            "train-federation-such",
            f"train needs a federation such as Cohort(clients, model), got {type(federation).__name__}.",
        )
    count("train", "rounds", rounds)
    if tol is not None:
        positive("train", "tol", tol)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(
            "train-whole-number", f"train needs a whole number seed >= 0, got {seed!r}."
        )
    if not isinstance(callbacks, Sequence):
        raise InputError(
            "train-list-callbacks", f"train needs a list of callbacks, got {callbacks!r}."
        )
    for callback in callbacks:
        if not callable(callback):
            raise InputError(
                "train-callables-callbacks",
                f"train needs callables in callbacks, got {callback!r}.",
            )


def _rounds_between(algorithm: Algorithm, federation: Federation) -> int:
    """Return after how many rounds looking up all losses takes no more than a fraction of their local steps."""
    clients = len(federation.names)
    steps = getattr(algorithm, "local_steps", None) or 1
    asked = getattr(algorithm, "clients_per_round", None) or clients
    batch = getattr(algorithm, "batch_size", None)
    each = federation.channel.work / clients
    step = min(each, (batch or math.inf) * federation.dimension) if math.isfinite(each) else 1.0
    return max(
        1,
        math.ceil(
            LOOKING * clients * (each if math.isfinite(each) else 1.0) / (asked * steps * step)
        ),
    )


def _start(federation: Federation, x0: Any) -> torch.Tensor | None:
    if x0 is None:
        return None
    x = federation.point(x0, "x0").clone()
    if not bool(torch.isfinite(x).all()):
        raise InputError("x0-nan-infinite", "x0 has a NaN or infinite entry.")
    return x
