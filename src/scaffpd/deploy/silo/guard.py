r"""What a silo answers: the one place that decides, and the file in which it remembers what it has answered.

A coordinator chooses the points x, and answers tell as much as the points let them. So a silo goes by a script:

- agreements on an algorithm that its file allows, `limits.runs` of them; what that algorithm asks, and nothing else;
- points with ‖x − x⁰‖ ≤ `limits.radius`, on a way no longer than `limits.path`, and `limits.points` of them: far out a
  loss shows which rows lie on which side of a plane (quadratic losses do not; there x may go anywhere);
- accuracies at `limits.scores` points: they show as much near as far out;
- gradients and local work only where the loss has been asked for;
- where losses are hidden: thresholds, and what silos weigh by them, for sums alone; `LEVELS` questions for thresholds
  and two for a gradient at one point, for `OBJECTIVES` objectives; scores at `SCORED` points, if `limits.scores` allows
  as many;
- where vectors are masked: ‖c_i‖² where a run begins, ‖d_i‖² where the algorithm needs it and of local work without a
  correction alone, and at one point no more than `CORRECTIONS` corrections.

All this is remembered by agreements, in a file that outlives the process (`limits.answered`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import SIZES as MEASURED
from scaffpd.config.model_file import Setup
from scaffpd.config.reading import algorithm_kind
from scaffpd.config.silo import SiloFile
from scaffpd.deploy.messages import MASKED, SIZES, WEIGHT, digest
from scaffpd.errors import InputError
from scaffpd.federation import Key, Vector
from scaffpd.federation.questions import (
    GradientsAt,
    HeldOutLoss,
    JoiningScores,
    LocalSteps,
    Losses,
    Optima,
    Project,
    Question,
    Scores,
)
from scaffpd.federation.weighed import Response, Thresholds, WeighedQuestion, WeighedSteps
from scaffpd.objectives import to_values
from scaffpd.secure.parties import Sketch
from scaffpd.system import append_line, lock_file

ATTEMPTS = {  # of one process, while silos go away
    "schema": 4, "mean": 4, "agreement": 1, "cut into folds": 1, "choice of strengths": 1000, "set of strengths": 1,
}  # fmt: skip
WEIGHED = {Thresholds.kind, Response.kind, WeighedSteps.kind}
BEGINNINGS = 8  # points at which ‖c_i‖² is told: where a run begins, or begins anew without somebody
LEVELS, RESPONSES, OBJECTIVES, SCORED = 12, 4, 3, 2  # questions at one point; objectives, and points with scores
CORRECTIONS = 3  # at one point: a run that begins anew there has another


class AnswerJournal:
    """A file of lines [run, what, name, more] that only grows; other processes of the silo write to it as well."""

    def __init__(self, file: Path) -> None:
        self._file, self._read, self._held = file, 0, False
        self._known: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(dict)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other processes of this silo out, and read what they have written."""
        if self._held:
            yield
            return
        with lock_file(self._file.with_suffix(".lock")):
            self._refresh()
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _refresh(self) -> None:
        try:
            with self._file.open("rb") as lines:
                lines.seek(self._read)
                for line in lines:
                    run, what, name, more = json.loads(line)
                    self._known[run, what][name] = more
                    self._read += len(line)
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            raise InputError(f"The silo's file of earlier answers, {self._file.name!r}, cannot be read.") from None

    def known(self, run: str, what: str) -> dict[str, Any]:
        """Return what there is of a kind, by its names, the oldest first."""
        return self._known[run, what]

    def note(self, run: str, what: str, name: str, more: Any = None) -> None:
        """Remember something before an answer leaves."""
        if name in self._known[run, what]:
            return
        try:
            self._read += append_line(self._file, json.dumps([run, what, name, more]))
        except OSError:
            raise InputError(f"The silo's file of earlier answers, {self._file.name!r}, cannot be written.") from None
        self._known[run, what][name] = more


def as_text(numbers: Vector) -> str:
    """Numbers as a line of the journal has them."""
    return base64.b64encode(np.asarray(numbers, dtype="<f8").tobytes()).decode()


def as_numbers(text: str) -> Vector:
    """What `as_text` made."""
    return np.frombuffer(base64.b64decode(text), dtype="<f8")


class SiloGuard:
    """Decides what one silo answers.

    Attributes:
        agreed: the attempts at an agreement that this process, or the one whose place it takes, has answered.
        run: the name of the run, which is the same for all strengths and folds that it tries.
    """

    def __init__(self, file: SiloFile) -> None:
        self.file, self.limits, self.journal = file, file.limits, AnswerJournal(file.limits.answered)
        self.agreed: dict[str, list[str]] = {}
        self.run = ""
        self.promised: int | None = None  # the most points of the run that the silo has consented to
        self._questions: dict[str, frozenset[str]] = {}

    @cached_property
    def seed(self) -> int:
        """The silo's own secret, from which sketches and the rows of minibatches are drawn."""
        with self.journal.turn():
            if not self.journal.known("", "seed"):
                self.journal.note("", "seed", str(secrets.randbits(63)))
            return int(next(iter(self.journal.known("", "seed"))))

    @cached_property
    def sketch(self) -> Sketch:
        """Makes the sketches by which vectors are known again."""
        return Sketch(self.seed)

    # --- agreements

    def attempt(self, what: str, value: str) -> None:
        """Allow one agreement a process, a few attempts at it, and `limits.runs` in all.

        Sums by ever other columns, means or models would tell single rows apart.
        """
        name, seen = hashlib.sha256(value.encode()).hexdigest(), self.agreed.setdefault(what, [])
        if name not in seen:
            if len(seen) >= ATTEMPTS[what]:
                raise InputError(
                    f"This silo has answered for another {what} already: a new run needs a new start of it."
                )
            seen.append(name)
        with self.journal.turn():
            known = self.journal.known("", what)
            if name not in known and len(known) >= ATTEMPTS[what] * self.limits.runs:
                raise InputError(
                    f"This silo has taken part in {self.limits.runs} runs, which is all that limits.runs allows; its "
                    "operator can allow more."
                )
            self.journal.note("", what, name)

    def check_trust(self) -> None:
        """Refuse secure sums with keys for which only the coordinator vouches, where the file requires such sums."""
        if self.file.secure.required and not self.file.secure.trusted:
            raise InputError(
                "This silo requires masks, and only the coordinator vouches for the others' keys: its operator has to "
                "pin them (secure.pins), or to name an authority that is not the coordinator's (secure.authority)."
            )

    def check_agreement(self, setup: Setup) -> None:
        """Refuse an agreement that the silo's file does not allow."""
        allowed, secure = self.limits.algorithms, self.file.secure
        if allowed is not None and setup.algorithm not in allowed:
            raise InputError(f"This silo takes part in {', '.join(allowed)}, not in {setup.algorithm}.")
        self.asked_by(setup.algorithm)
        if secure.required and not setup.secure:
            raise InputError("This silo sends vectors masked only, and the agreement has no secure sums.")
        if self.file.privacy.required and not setup.privacy:
            raise InputError("This silo takes part with differential privacy only, and the agreement has none.")
        if secure.losses == "hidden" and setup.secure.get("losses") != "hidden":
            raise InputError("This silo keeps its losses to itself (secure.losses), and the agreement has them shown.")
        if setup.secure.get("projections") and not secure.projections:
            raise InputError("This silo does not show its gradient along directions that the coordinator chooses.")
        self.attempt("agreement", setup.columns)
        free = self.limits.choosing and not setup.privacy  # a ledger is for one model
        self.attempt("choice of strengths" if free else "set of strengths", setup.digest)
        self.run = setup.columns

    def asked_by(self, algorithm: str) -> frozenset[str]:
        """Return what an algorithm asks; foreign code is looked at only where this silo's own file names it."""
        if algorithm not in self._questions:
            if ":" in algorithm and algorithm not in (self.limits.algorithms or ()):
                raise InputError(f"This silo does not know {algorithm}: limits.algorithms has to name it.")
            kind = algorithm_kind(algorithm, self.file.path.parent, keep=False)
            self._questions[algorithm] = kind.questions | {Scores.kind}
        return self._questions[algorithm]

    # --- questions, as they are written

    def check_kind(self, setup: Setup, kind: str) -> None:
        """Refuse what the algorithm does not ask."""
        answered = self.asked_by(setup.algorithm)
        if setup.secure.get("losses") == "hidden":
            if kind not in (answered & WEIGHED) | {Scores.kind, JoiningScores.kind}:
                raise InputError(f"Losses are hidden in this run: {kind!r} is not answered.")
            return
        shown = {Project.kind} if setup.secure.get("projections") else set()
        more = {Optima.kind, *shown} if GradientsAt.kind in answered else set()
        more |= {HeldOutLoss.kind} if "fold" in setup.model else {JoiningScores.kind}
        if kind not in answered | more:
            raise InputError(f"{setup.algorithm} needs no question {kind!r}: it is not answered.")

    def check_work(self, values: Mapping[str, Any]) -> None:
        """Refuse more local steps, or smaller minibatches, than the silo's file allows."""
        plan = values.get("plan")
        plan = plan if isinstance(plan, dict) else {}
        for steps in (plan.get("steps", 0), values.get("limit", 0)):
            if not isinstance(steps, int) or steps > self.limits.local_steps:
                raise InputError(
                    f"{steps} local steps are asked for; this silo makes {self.limits.local_steps} at most."
                )
        for batch in (plan.get("batch_size"), values.get("batch_size")):
            if batch is not None and not (isinstance(batch, int) and self.limits.rows <= batch < 2**31):
                raise InputError(
                    f"A batch of {batch} rows is asked for; this silo answers for {self.limits.rows} or more."
                )

    def drawn_here(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draw minibatches from the silo's own secret as well, where it requires masks.

        A coordinator that knew their rows could solve losses over many of them for every row's own.
        """
        if not self.file.secure.required:
            return values
        plan = values.get("plan")
        own = {"plan": {**plan, "key": self._secret_key(plan.get("key"))}} if isinstance(plan, dict) else {}
        return {**values, **own, **({"key": self._secret_key(values["key"])} if "key" in values else {})}

    def _secret_key(self, key: Any) -> Any:
        if not isinstance(key, list):
            return key
        return [int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:7], "big")]

    # --- questions, as they are meant

    def admit(self, setup: Setup, question: Question, use: str, start: Tensor) -> None:
        """Let a question be answered, or refuse it; `use` says whether its vector is to be masked, or measured."""
        run, hides = self.run, bool(setup.secure)
        with self.journal.turn():
            at = question if isinstance(question, GradientsAt) and use else getattr(question, "at", None)
            if isinstance(question, WeighedQuestion):
                self._weighed(setup, question, use, start)
            if isinstance(at, GradientsAt) and _name(at) not in self.journal.known(run, GradientsAt.kind):
                raise InputError("This silo has not been asked for its loss at that point.")
            if isinstance(question, Losses):
                self._reach(setup, question.x, start, (question.batch_size, question.key))
            elif isinstance(question, LocalSteps | Scores | HeldOutLoss):
                self._reach(setup, question.x, start, (None, (0,)))
            if isinstance(question, GradientsAt):
                self.journal.note(run, GradientsAt.kind, _name(question))
            self._scored(run, question, setup.secure.get("losses") == "hidden")
            if self.file.secure.projections:  # then gradients are shown along any direction
                return
            if use == SIZES:
                self._measured(setup, question)
            if hides and isinstance(question, LocalSteps):
                self._corrected(run, question)

    def _weighed(self, setup: Setup, question: WeighedQuestion, use: str, start: Tensor) -> None:
        """Let few thresholds be tried at a point, and few gradients be weighed by them; for sums alone."""
        if setup.secure and use != MASKED:
            raise InputError("What silos weigh themselves leaves in sums only.")
        at, about = question.at, question.weighing
        goal = json.dumps(to_values(about.objective), sort_keys=True)
        self._few(self.run, "objective", goal, OBJECTIVES, f"its weights for {OBJECTIVES} objectives")
        how = f"{about.levels} {about.delta} {about.centre} {about.mass}"
        if isinstance(question, Thresholds):
            self._reach(setup, at.x, start, (at.batch_size, at.key))
            self.journal.note(self.run, GradientsAt.kind, _name(at))
            words = f"its weight for {LEVELS} sets of thresholds at that point"
            return self._few(self.run, f"thresholds {_name(at)}", how, LEVELS, words)
        self._few(self.run, f"response {_name(at)}", how, RESPONSES, f"{RESPONSES} of its weights at that point")
        if isinstance(question, WeighedSteps):
            what, words = f"correction {_name(at)}", f"its local work for {CORRECTIONS} corrections at that point"
            self._few(self.run, what, _digest(question.correction), CORRECTIONS, words)
        return None

    def remember_masses(self, name: str) -> None:
        """Remember a masked answer about thresholds, by its name."""
        with self.journal.turn():
            self.journal.note(self.run, "masses", name)

    def has_masses(self, name: str) -> bool:
        """Whether this silo has given such an answer."""
        with self.journal.turn():
            return name in self.journal.known(self.run, "masses")

    def keep_weight(self, name: int, weight: Vector) -> None:
        """Keep the silo's own weight for another process of it."""
        with self.journal.turn():
            self.journal.note(self.run, WEIGHT, str(name), as_text(weight))

    def kept_weight(self, name: int) -> Vector | None:
        """The weight that was kept under a number."""
        with self.journal.turn():
            kept = self.journal.known(self.run, WEIGHT).get(str(name))
        return None if kept is None else as_numbers(kept)

    def _scored(self, run: str, question: Question, hidden: bool) -> None:
        """Let few accuracies leave, also those of models that are compared at the end; few losses, where they hide."""
        if isinstance(question, Scores) and hidden:
            most = min(self.limits.scores, SCORED)
            return self._few(run, "hidden scores", _digest(question.x), most, f"its scores at {most} points")
        if isinstance(question, Scores) and question.accuracy:
            name = f"{_digest(question.x)} {question.split}"
        elif isinstance(question, JoiningScores):
            name = " ".join(map(_digest, (question.average, question.fair, question.personal)))
        else:
            return None
        words = f"its accuracy at {self.limits.scores} points, which is all that limits.scores allows"
        return self._few(run, "scores", name, self.limits.scores, words)

    def _few(self, run: str, what: str, name: str, most: int, words: str) -> None:
        """Count something that a run may have a few of."""
        known = self.journal.known(run, what)
        if name not in known and len(known) >= most:
            raise InputError(f"This silo has told {words}.")
        self.journal.note(run, what, name)

    def _reach(self, setup: Setup, x: Tensor, start: Tensor, batch: tuple[int | None, Key]) -> None:
        """Let x go to a point, or refuse one that is too far out, or too many of them."""
        limits, known = self.limits, self.journal.known(self.run, "point")
        name, way = f"{_digest(x)} {batch}", 0.0
        if name in known:
            return
        if self.promised is not None and len(known) >= self.promised:
            raise InputError(f"This silo has answered at {self.promised} points: that is beyond the rounds asked for.")
        if len(known) >= limits.points:
            raise InputError(f"This silo has answered at {limits.points} points, which is all that its file allows.")
        if not bool(torch.isfinite(x).all()):
            raise InputError("The point has entries that are not finite.")
        here = self.sketch(x.numpy(force=True))
        if setup.model.get("loss") != "squared":
            if (far := float((x - start).double().norm())) > limits.radius:
                raise InputError(f"The point is {far:.3g} away from the start, and limits.radius is {limits.radius:g}.")
            way, before = next(reversed(known.values()), (0.0, None))
            last = self.sketch(start.numpy(force=True)) if before is None else as_numbers(before)
            way += float(np.linalg.norm(here - last))
            if way > limits.path:
                raise InputError(f"The run has gone {way:.3g} from point to point, and limits.path is {limits.path:g}.")
        self.journal.note(self.run, "point", name, (way, as_text(here)))

    def _measured(self, setup: Setup, question: Question) -> None:
        """Let the silo tell the length of a vector: of c_i where a run begins, of d_i where the method needs it."""
        if isinstance(question, GradientsAt):
            words = f"the length of its gradient at {BEGINNINGS} points"
            return self._few(self.run, f"{SIZES} {setup.digest}", _name(question), BEGINNINGS, words)
        plain = isinstance(question, LocalSteps) and question.correction is None and question.at is None
        if not plain or MEASURED not in self.asked_by(setup.algorithm):
            raise InputError("This silo tells the length of its gradient where a run begins, and of nothing else.")
        return None

    def _corrected(self, run: str, question: LocalSteps) -> None:
        """Let local steps have a correction together with c_i: without c_i, or by many of them, it would show c_i."""
        at, correction = question.at, question.correction
        if (at is None) != (correction is None) or (isinstance(at, GradientsAt) and not torch.equal(at.x, question.x)):
            raise InputError(
                "Local steps have a correction and c_i at the same point, or neither, where sums are masked."
            )
        if correction is not None and isinstance(at, GradientsAt):
            what, words = f"correction {_name(at)}", f"its local work for {CORRECTIONS} corrections at that point"
            self._few(run, what, _digest(correction), CORRECTIONS, words)


def _digest(x: Tensor) -> str:
    return digest(x.numpy(force=True))


def _name(at: GradientsAt) -> str:
    return f"{_digest(at.x)} {(at.batch_size, at.key)}"
