r"""Decide which questions a silo answers, by its earlier answers and its operator's rules.

A coordinator chooses the points x, and answers at chosen points can reveal rows. So a silo allows

- `limits.runs` agreements, on algorithms that its file allows, and only their questions;
- `limits.points` points with ‖x − x⁰‖ ≤ `limits.radius`, on a path no longer than `PATH`: far out
  a loss reveals which rows lie on which side of a plane (not a quadratic one, without a limit);
- accuracies at `SCORES` points, as they reveal as much near as far out;
- gradients and local work only at points where the loss was asked for;
- if vectors are masked: ‖c_i‖² only where a run begins, ‖d_i‖² only if the algorithm needs it and
  without a correction, and at most `CORRECTIONS` corrections at one point.

All this is recorded per agreement in a file that outlives the process (answered.jsonl).
"""

from __future__ import annotations

import hashlib
import secrets
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import SIZES as MEASURED
from scaffpd.deploy.messages import SIZES, JsonMapping, digest
from scaffpd.deploy.silo.records import AnswerJournal, as_numbers, as_text
from scaffpd.errors import InputError
from scaffpd.federation import Key
from scaffpd.federation.questions import (
    GradientsAt,
    LocalSteps,
    Losses,
    Optima,
    Project,
    Question,
    Scores,
)
from scaffpd.run.settings.methods import algorithm_kind
from scaffpd.run.settings.model_file import Setup
from scaffpd.run.settings.silo import SiloFile
from scaffpd.secure.sketch import Sketch

ATTEMPTS = {"schema": 4, "mean": 4, "agreement": 1}  # per process
BEGINNINGS = 8  # points at which ‖c_i‖² may leave: where a run begins or resumes
PATH = 500.0  # the longest path of x in a run, unless the loss is quadratic
SCORES = 20  # the most points with an accuracy in a run
LOCAL_STEPS = 10_000  # the most local steps of a question
CORRECTIONS = 3  # at one point: a run that resumes there may have another one


class SiloGuard:
    """Decide which questions a silo answers."""

    def __init__(self, file: SiloFile) -> None:
        self.file = file
        self.limits = file.limits
        self.journal = AnswerJournal(file.answered)
        self._agreed: dict[str, list[str]] = {}  # attempts at an agreement by this process
        self.run = ""  # the name of the run, the same for all l2 and κ
        self.promised: int | None = None  # the most points under the consent
        self._questions: dict[str, frozenset[str]] = {}

    @cached_property
    def seed(self) -> int:
        """The silo's secret seed of sketches and minibatches."""
        with self.journal.turn():
            if not self.journal.known("", "seed"):
                self.journal.note("", "seed", str(secrets.randbits(63)))
            return int(next(iter(self.journal.known("", "seed"))))

    @cached_property
    def sketch(self) -> Sketch:
        """Sketch that identifies vectors."""
        return Sketch(self.seed)

    # --- agreements

    def attempt(self, what: str, value: str) -> None:
        """Allow one agreement per process, a few attempts at it, and `limits.runs` in all.

        Sums over ever different columns, means or models would reveal single rows.
        """
        name = hashlib.sha256(value.encode()).hexdigest()
        seen = self._agreed.setdefault(what, [])
        if name not in seen:
            if len(seen) >= ATTEMPTS[what]:
                raise InputError(
                    "another-agreement",
                    f"Limit reached: this silo has already answered for another {what}; restart "
                    "it.",
                )
            seen.append(name)
        with self.journal.turn():
            known = self.journal.known("", what)
            if name not in known and len(known) >= ATTEMPTS[what] * self.limits.runs:
                raise InputError(
                    "runs-used-up",
                    f"Limit reached: this silo has already taken part in {self.limits.runs} runs, "
                    "all that limits.runs allows.",
                )
            self.journal.note("", what, name)

    def check_trust(self) -> None:
        """Refuse keys that only the coordinator vouches for, if the silo's file requires masks."""
        if self.file.secure.required and not self.file.secure.pins:
            raise InputError(
                "keys-not-pinned",
                "This silo requires masks, so its operator has to pin the others' keys "
                "(secure.pins): only the coordinator vouches for them.",
            )

    def check_agreement(self, setup: Setup) -> None:
        """Refuse an agreement that the silo's file does not allow."""
        allowed = self.limits.algorithms
        secure = self.file.secure
        if allowed is not None and setup.algorithm not in allowed:
            raise InputError(
                "algorithm-not-allowed",
                f"This silo takes part in {', '.join(allowed)}, not in {setup.algorithm}.",
            )
        self.asked_by(setup.algorithm)
        if secure.required and not setup.secure:
            raise InputError(
                "agreement-without-masks",
                "This silo sends only masked vectors, and the agreement has no secure sums.",
            )
        if self.file.privacy.required and not setup.privacy:
            raise InputError(
                "agreement-without-noise",
                "This silo takes part only with differential privacy, and the agreement has none.",
            )
        if setup.secure.get("projections") and not secure.projections:
            raise InputError(
                "agreement-shows-projections",
                "This silo does not reveal its gradient along directions that the coordinator "
                "chooses.",
            )
        # One agreement a run. What is answered is counted over all agreements that differ in l2 or
        # κ alone: c_i + l2·x differs from c_i by what a coordinator knows.
        self.attempt("agreement", setup.digest)
        self.run = setup.columns

    def asked_by(self, algorithm: str) -> frozenset[str]:
        """Return the questions of an algorithm; foreign code only if this silo's file names it."""
        if algorithm not in self._questions:
            if ":" in algorithm and algorithm not in (self.limits.algorithms or ()):
                raise InputError(
                    "algorithm-unknown-here",
                    f"This silo does not know {algorithm}: limits.algorithms has to name it.",
                )
            kind = algorithm_kind(algorithm, self.file.path.parent, keep=False)
            self._questions[algorithm] = kind.questions | {Scores.kind}
        return self._questions[algorithm]

    # --- questions as written

    def check_kind(self, setup: Setup, kind: str) -> None:
        """Refuse a question that the algorithm does not ask."""
        answered = self.asked_by(setup.algorithm)
        shown = {Project.kind} if setup.secure.get("projections") else set()
        more = {Optima.kind, *shown} if GradientsAt.kind in answered else set()
        if kind not in answered | more:
            raise InputError(
                "question-not-needed",
                f"{setup.algorithm} needs no question {kind!r}: it is not answered.",
            )

    def check_work(self, values: JsonMapping) -> None:
        """Refuse more local steps, or smaller minibatches, than the silo's file allows."""
        plan = values.get("plan")
        plan = plan if isinstance(plan, dict) else {}
        for steps in (plan.get("steps", 0), values.get("limit", 0)):
            if not isinstance(steps, int) or steps > LOCAL_STEPS:
                raise InputError(
                    "too-many-local-steps",
                    f"{steps} local steps are asked for; this silo makes {LOCAL_STEPS} at most.",
                )
        for batch in (plan.get("batch_size"), values.get("batch_size")):
            if batch is not None and not (
                isinstance(batch, int) and self.limits.rows <= batch < 2**31
            ):
                raise InputError(
                    "batch-too-small",
                    f"A batch of {batch} rows is asked for; this silo answers for "
                    f"{self.limits.rows} or more.",
                )

    def drawn_here(self, values: JsonMapping) -> JsonMapping:
        """Draw minibatches from the silo's own secret as well if it requires masks.

        A coordinator that knew their rows could solve for the losses of single rows.
        """
        if not self.file.secure.required:
            return values
        plan = values.get("plan")
        drawn = dict(values)
        if isinstance(plan, dict):
            drawn["plan"] = {**plan, "key": self._secret_key(plan.get("key"))}
        if "key" in values:
            drawn["key"] = self._secret_key(values["key"])
        return drawn

    def _secret_key(self, key: Any) -> Any:
        if not isinstance(key, list):
            return key
        return [int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:7], "big")]

    # --- questions as read

    def admit(self, setup: Setup, question: Question, use: str, start: Tensor) -> None:
        """Admit a question or refuse it; `use` says whether its vector is masked, or measured."""
        run = self.run
        hides = bool(setup.secure)
        with self.journal.turn():
            at = getattr(question, "at", None)
            if isinstance(question, GradientsAt) and use:
                at = question
            asked = self.journal.known(run, GradientsAt.kind)
            if isinstance(at, GradientsAt) and _name(at) not in asked:
                raise InputError(
                    "point-without-loss", "This silo has not been asked for its loss at that point."
                )
            if isinstance(question, Losses):
                self._reach(setup, question.x, start, (question.batch_size, question.key))
            elif isinstance(question, LocalSteps | Scores):
                self._reach(setup, question.x, start, (None, (0,)))
            if isinstance(question, GradientsAt):
                self.journal.note(run, GradientsAt.kind, _name(question))
            if isinstance(question, Scores) and question.accuracy:
                name = f"{_digest(question.x)} {question.split}"
                self._few("scores", name, SCORES, f"its accuracy at {SCORES} points")
            if self.file.secure.projections:  # which shows gradients along any direction anyway
                return
            if use == SIZES:
                self._measured(setup, question)
            if hides and isinstance(question, LocalSteps):
                self._corrected(question)

    def _few(self, what: str, name: str, most: int, words: str) -> None:
        """Count names of a kind, and refuse more than `most` in a run."""
        known = self.journal.known(self.run, what)
        if name not in known and len(known) >= most:
            raise InputError(
                "limit-reached", f"Limit reached: this silo has already released {words}."
            )
        self.journal.note(self.run, what, name)

    def _reach(self, setup: Setup, x: Tensor, start: Tensor, batch: tuple[int | None, Key]) -> None:
        """Admit a point x, or refuse one too far out or one too many."""
        limits = self.limits
        known = self.journal.known(self.run, "point")
        name = f"{_digest(x)} {batch}"
        way = 0.0
        if name in known:
            return
        most = limits.points if self.promised is None else min(self.promised, limits.points)
        if len(known) >= most:
            raise InputError(
                "limit-reached",
                f"Limit reached: this silo has already answered at {most} points, all that "
                "limits.points allows, or the rounds need to which it consented.",
            )
        if not bool(torch.isfinite(x).all()):
            raise InputError("point-not-finite", "The point has entries that are not finite.")
        here = self.sketch(x.numpy(force=True))
        if setup.model.get("loss") != "squared":
            far = float((x - start).double().norm())
            if far > limits.radius:
                raise InputError(
                    "point-too-far",
                    f"The point is {far:.3g} away from the start, and limits.radius is "
                    f"{limits.radius:g}.",
                )
            way, before = next(reversed(known.values()), (0.0, None))
            last = self.sketch(start.numpy(force=True)) if before is None else as_numbers(before)
            way += float(np.linalg.norm(here - last))
            if way > PATH:
                raise InputError(
                    "path-too-long",
                    f"Limit reached: the run has gone {way:.3g} from point to point, and a silo "
                    f"goes along for {PATH:g}.",
                )
        self.journal.note(self.run, "point", name, (way, as_text(here)))

    def _measured(self, setup: Setup, question: Question) -> None:
        """Admit a vector's norm: of c_i where a run begins, of d_i if the method needs it."""
        if isinstance(question, GradientsAt):
            words = f"the length of its gradient at {BEGINNINGS} points"
            return self._few(f"{SIZES} {setup.digest}", _name(question), BEGINNINGS, words)
        plain = (
            isinstance(question, LocalSteps) and question.correction is None and question.at is None
        )
        if not plain or MEASURED not in self.asked_by(setup.algorithm):
            raise InputError(
                "norm-not-needed",
                "This silo reports the norm of its gradient where a run begins, and no other norm.",
            )
        return None

    def _corrected(self, question: LocalSteps) -> None:
        """Admit local steps with a correction and c_i, or neither.

        Many corrections at one point would reveal c_i.
        """
        at = question.at
        correction = question.correction
        if (at is None) != (correction is None) or (
            isinstance(at, GradientsAt) and not torch.equal(at.x, question.x)
        ):
            raise InputError(
                "correction-elsewhere",
                "Local steps have a correction and c_i at the same point, or neither, where sums "
                "are masked.",
            )
        if correction is not None and isinstance(at, GradientsAt):
            what = f"correction {_name(at)}"
            words = f"its local work for {CORRECTIONS} corrections at that point"
            self._few(what, _digest(correction), CORRECTIONS, words)


def _name(at: GradientsAt) -> str:
    return f"{_digest(at.x)} {(at.batch_size, at.key)}"


def _digest(x: Tensor) -> str:
    return digest(x.detach().numpy(force=True))
