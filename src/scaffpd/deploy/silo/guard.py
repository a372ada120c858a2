r"""Decide which questions a silo answers, by its earlier answers and its operator's rules.

A coordinator chooses the points x, and answers at chosen points can reveal rows. So a silo allows only

- `limits.runs` agreements, on algorithms that its file allows, and only the questions of that algorithm;
- `limits.points` points with ‖x − x⁰‖ ≤ `limits.radius`, on a path no longer than `limits.path`: far out a loss reveals
  which rows lie on which side of a plane (quadratic losses do not; they have no limit);
- accuracies at `limits.scores` points, as they reveal as much near as far out;
- gradients and local work only at points where the loss was asked for;
- if losses are hidden: thresholds, and vectors weighted by them, for sums alone; at one point `LEVELS` questions for
  thresholds and two for a gradient, for `OBJECTIVES` objectives; scores at `SCORED` points, if `limits.scores` allows
  as many;
- if vectors are masked: ‖c_i‖² only where a run begins, ‖d_i‖² only if the algorithm needs it and without a correction,
  and at most `CORRECTIONS` corrections at one point.

All this is recorded per agreement in a file that outlives the process (`limits.answered`).

A silo answers no run without consent. A coordinator describes its run with the first question and with the agreement
(`asks`: model, method, objective, rounds, ε, masks). The SHA-256 of that names the request, so another objective, or
more rounds, is another request. Decisions are lines of a file that only `scaffpd silo consent` writes; write access to
it is the right to grant. The silo reads it before every answer, so a withdrawal takes effect with the next question.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import SIZES as MEASURED
from scaffpd.deploy.messages import (
    ASKING,
    MASKED,
    SIZES,
    MissingVectors,
    read_values,
    vector_digest,
)
from scaffpd.deploy.silo.records import AnswerJournal, as_numbers, as_text, decisions
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
from scaffpd.federation.weighed import Response, Thresholds, WeighedQuestion, WeighedSteps
from scaffpd.objectives import to_values
from scaffpd.run.settings.model_file import Setup
from scaffpd.run.settings.reading import algorithm_kind
from scaffpd.run.settings.silo import SiloFile
from scaffpd.secure.sketch import Sketch
from scaffpd.study.folds import HeldOutLoss
from scaffpd.study.joining import JoiningScores

ATTEMPTS = {  # per process, to allow for silos that leave
    "schema": 4,
    "mean": 4,
    "agreement": 1,
    "cut into folds": 1,
    "choice of strengths": 1000,
    "set of strengths": 1,
}
WEIGHED = {Thresholds.kind, Response.kind, WeighedSteps.kind}
BEGINNINGS = 8  # points at which ‖c_i‖² may leave: where a run begins, or restarts without a silo
# questions at one point; objectives; points with scores
LEVELS = 12
RESPONSES = 4
OBJECTIVES = 3
SCORED = 2
CORRECTIONS = 3  # at one point: a run that restarts there has another one
ASKS = {
    "federation": str,
    "silos": list[str],
    "algorithm": str,
    "objective": str,
    "model": dict[str, Any],
    "rounds": int,
    "secure": dict[str, Any],
    "epsilon": float | int | None,
    "delta": float | None,
}
FREE = (
    "l2",
    "strength",
    "classes",
    "fold",
    "folds",
    "seed",
)  # settings of a model that silos determine together
LONGEST = 20_000  # characters of a request
SHOWN = 20  # digits of a request's name in sentences and lists; decisions use all of them
SLACK = 20  # points beyond two a round, for starts and restarts


class AwaitsConsent(InputError):
    """The run still awaits consent at this site."""


def request_name(asks: Mapping[str, Any]) -> str:
    """Return the name of a request, the 64 digits of its SHA-256."""
    return hashlib.sha256(json.dumps(asks, sort_keys=True).encode()).hexdigest()


class SiloConsent:
    """Decide whether a silo takes part in a run; `asks` is the run's request."""

    def __init__(self, file: SiloFile, journal: AnswerJournal) -> None:
        self.rules = file.consent
        self.journal = journal
        self._strict = file.consent.strict
        self.asks: dict[str, Any] | None = None

    def check(self, kind: str, given: Any) -> None:
        """Refuse a question unless the site has consented to its run; `given` is the request in the question."""
        if given is not None:
            self.asks = None  # the log must not record a refused question as a request
            asks = read_values(
                ASKS, given, "What the run asks for is not complete, or cannot be read."
            )
            if len(json.dumps(asks)) > LONGEST:
                raise InputError("run-asks-too", "What the run asks for is too long.")
            if asks["epsilon"] is not None and not (
                0 < asks["epsilon"] < 1e300 and 0 < (asks["delta"] or 0) < 1
            ):
                raise InputError(
                    "run-asks-above",
                    "What the run asks for has an ε that is not above 0, or no δ between 0 and 1 with it.",
                )
            self.asks = asks
        if not self._strict and not self.rules.file.exists():
            return
        if self.asks is None and kind not in ASKING:
            raise MissingVectors(
                ["setup"]
            )  # a new process of this silo, which gets the agreement again
        if self.asks is None:
            raise InputError(
                "silo-takes-part",
                "This silo takes part with consent ([consent] in its file), and the coordinator does not say what its "
                "run asks for: it needs version 0.2 or later.",
            )
        self._within_rules(self.asks)
        self._decided(request_name(self.asks))

    def _within_rules(self, asks: Mapping[str, Any]) -> None:
        """Refuse requests that the silo's file rules out, even with consent."""
        rules = self.rules
        if rules.expires is not None and _today() > rules.expires:
            raise InputError(
                "silo-consent-runs", f"This silo's consent to all runs ended on {rules.expires}."
            )
        if rules.federations is not None and asks["federation"] not in rules.federations:
            known = ", ".join(rules.federations)
            raise InputError(
                "silo-takes-part",
                f"This silo takes part in {known}, not in a federation {asks['federation']!r}.",
            )
        if rules.rounds is not None and asks["rounds"] > rules.rounds:
            raise InputError(
                "run-asks-rounds",
                f"The run asks for {asks['rounds']} rounds, and consent.rounds is {rules.rounds}.",
            )
        if rules.epsilon is not None and not 0 < (asks["epsilon"] or 0) <= rules.epsilon:
            cost = "no noise" if asks["epsilon"] is None else f"ε = {asks['epsilon']:g}"
            raise InputError(
                "run-asks-consent",
                f"The run asks for {cost}, and consent.epsilon is {rules.epsilon:g}.",
            )

    def _decided(self, name: str) -> None:
        """Refuse a request that was withdrawn or has expired; without a decision apply the policy."""
        said = decisions(self.rules.file).get(name)
        short = name[:SHOWN]
        if said is not None and not said["granted"]:
            raise InputError(
                "consent-run-withdrawn",
                f"Consent to this run ({short}) was withdrawn on {said['time'][:10]}.",
            )
        if said is not None and said["until"] and _today().isoformat() > said["until"]:
            raise InputError(
                "consent-run-ended", f"Consent to this run ({short}) ended on {said['until']}."
            )
        if (
            said is not None
            or self.rules.policy == "always"
            or (self.rules.policy == "once" and self._first(name))
        ):
            return
        raise AwaitsConsent(
            "nobody-silo-agreed",
            f"Nobody at this silo has agreed to the run yet (request {short}): `scaffpd silo consent` shows it.",
        )

    def _first(self, name: str) -> bool:
        """Return whether a request is the first one under the policy "once"."""
        with self.journal.turn():
            taken = self.journal.known("", "consent")
            if not taken:
                self.journal.note("", "consent", name)
            return name in taken

    def match(self, setup: Setup) -> int | None:
        """Refuse an agreement that differs from the request; return the most points that it may use."""
        if self.asks is None or not self._strict:
            return None
        same = {
            "method": setup.algorithm == self.asks["algorithm"],
            "masks": dict(setup.secure) == self.asks["secure"],
            "ε": setup.privacy.get("epsilon") == self.asks["epsilon"],
            "δ": setup.privacy.get("delta") == self.asks["delta"],
            "model": _fixed(setup.model) == _fixed(self.asks["model"]),
        }
        if wrong := [name for name, is_same in same.items() if not is_same]:
            raise InputError(
                "agreement-another-silo",
                f"The agreement has another {wrong[0]} than this silo was asked to consent to.",
            )
        return 2 * int(self.asks["rounds"]) + SLACK


def _fixed(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model that the request fixes; one without a kind is linear."""
    return {"kind": "linear", **{name: value for name, value in model.items() if name not in FREE}}


def _today() -> date:
    return datetime.now(UTC).date()


class SiloGuard:
    """Decide which questions a silo answers."""

    def __init__(self, file: SiloFile) -> None:
        self.file, self.limits, self.journal = (
            file,
            file.limits,
            AnswerJournal(file.limits.answered),
        )
        # attempts at an agreement answered by this process and its predecessors
        self.agreed: dict[str, list[str]] = {}
        self.run = ""  # the name of the run, the same for all strengths and folds
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
        seen = self.agreed.setdefault(what, [])
        if name not in seen:
            if len(seen) >= ATTEMPTS[what]:
                raise InputError(
                    "silo-answered-another",
                    f"This silo has answered for another {what} already: restart it for a new run.",
                )
            seen.append(name)
        with self.journal.turn():
            known = self.journal.known("", what)
            if name not in known and len(known) >= ATTEMPTS[what] * self.limits.runs:
                raise InputError(
                    "silo-taken-part",
                    f"This silo has taken part in {self.limits.runs} runs, which is all that limits.runs allows; its "
                    "operator can allow more.",
                )
            self.journal.note("", what, name)

    def check_trust(self) -> None:
        """Refuse keys that only the coordinator vouches for, if the silo's file requires secure sums."""
        if self.file.secure.required and not self.file.secure.trusted:
            raise InputError(
                "silo-requires-masks",
                "This silo requires masks, and only the coordinator vouches for the others' keys: its operator has to "
                "pin them (secure.pins), or to name an authority that is not the coordinator's (secure.authority).",
            )

    def check_agreement(self, setup: Setup) -> None:
        """Refuse an agreement that the silo's file does not allow."""
        allowed = self.limits.algorithms
        secure = self.file.secure
        if allowed is not None and setup.algorithm not in allowed:
            raise InputError(
                "silo-takes-part",
                f"This silo takes part in {', '.join(allowed)}, not in {setup.algorithm}.",
            )
        self.asked_by(setup.algorithm)
        if secure.required and not setup.secure:
            raise InputError(
                "silo-sends-masked",
                "This silo sends only masked vectors, and the agreement has no secure sums.",
            )
        if self.file.privacy.required and not setup.privacy:
            raise InputError(
                "silo-takes-part",
                "This silo takes part only with differential privacy, and the agreement has none.",
            )
        if secure.losses == "hidden" and setup.secure.get("losses") != "hidden":
            raise InputError(
                "silo-hides-losses",
                "This silo hides its losses (secure.losses), and the agreement does not.",
            )
        if setup.secure.get("projections") and not secure.projections:
            raise InputError(
                "silo-reveal-gradient",
                "This silo does not reveal its gradient along directions that the coordinator chooses.",
            )
        self.attempt("agreement", setup.columns)
        free = self.limits.choosing and not setup.privacy  # a ledger covers one model
        self.attempt("choice of strengths" if free else "set of strengths", setup.digest)
        self.run = setup.columns

    def asked_by(self, algorithm: str) -> frozenset[str]:
        """Return the questions of an algorithm; import foreign code only if this silo's own file names it."""
        if algorithm not in self._questions:
            if ":" in algorithm and algorithm not in (self.limits.algorithms or ()):
                raise InputError(
                    "silo-know-limits",
                    f"This silo does not know {algorithm}: limits.algorithms has to name it.",
                )
            kind = algorithm_kind(algorithm, self.file.path.parent, keep=False)
            self._questions[algorithm] = kind.questions | {Scores.kind}
        return self._questions[algorithm]

    # --- questions as written

    def check_kind(self, setup: Setup, kind: str) -> None:
        """Refuse a question that the algorithm does not ask."""
        answered = self.asked_by(setup.algorithm)
        if setup.secure.get("losses") == "hidden":
            if kind not in (answered & WEIGHED) | {Scores.kind, JoiningScores.kind}:
                raise InputError(
                    "losses-hidden-run", f"Losses are hidden in this run: {kind!r} is not answered."
                )
            return
        shown = {Project.kind} if setup.secure.get("projections") else set()
        more = {Optima.kind, *shown} if GradientsAt.kind in answered else set()
        more |= {HeldOutLoss.kind} if "fold" in setup.model else {JoiningScores.kind}
        if kind not in answered | more:
            raise InputError(
                "question-answered",
                f"{setup.algorithm} needs no question {kind!r}: it is not answered.",
            )

    def check_work(self, values: Mapping[str, Any]) -> None:
        """Refuse more local steps, or smaller minibatches, than the silo's file allows."""
        plan = values.get("plan")
        plan = plan if isinstance(plan, dict) else {}
        for steps in (plan.get("steps", 0), values.get("limit", 0)):
            if not isinstance(steps, int) or steps > self.limits.local_steps:
                raise InputError(
                    "local-steps-asked",
                    f"{steps} local steps are asked for; this silo makes {self.limits.local_steps} at most.",
                )
        for batch in (plan.get("batch_size"), values.get("batch_size")):
            if batch is not None and not (
                isinstance(batch, int) and self.limits.rows <= batch < 2**31
            ):
                raise InputError(
                    "batch-rows-asked",
                    f"A batch of {batch} rows is asked for; this silo answers for {self.limits.rows} or more.",
                )

    def drawn_here(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draw minibatches from the silo's own secret as well if it requires masks.

        A coordinator that knew their rows could solve for single rows' losses from many minibatches.
        """
        if not self.file.secure.required:
            return values
        plan = values.get("plan")
        own = (
            {"plan": {**plan, "key": self._secret_key(plan.get("key"))}}
            if isinstance(plan, dict)
            else {}
        )
        return {
            **values,
            **own,
            **({"key": self._secret_key(values["key"])} if "key" in values else {}),
        }

    def _secret_key(self, key: Any) -> Any:
        if not isinstance(key, list):
            return key
        return [int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:7], "big")]

    # --- questions as read

    def admit(self, setup: Setup, question: Question, use: str, start: Tensor) -> None:
        """Admit a question or refuse it; `use` says whether its vector is to be masked, or measured."""
        run = self.run
        hides = bool(setup.secure)
        with self.journal.turn():
            at = (
                question
                if isinstance(question, GradientsAt) and use
                else getattr(question, "at", None)
            )
            if isinstance(question, WeighedQuestion):
                self._weighed(setup, question, use, start)
            if isinstance(at, GradientsAt) and _name(at) not in self.journal.known(
                run, GradientsAt.kind
            ):
                raise InputError(
                    "silo-been-asked", "This silo has not been asked for its loss at that point."
                )
            if isinstance(question, Losses):
                self._reach(setup, question.x, start, (question.batch_size, question.key))
            elif isinstance(question, LocalSteps | Scores | HeldOutLoss):
                self._reach(setup, question.x, start, (None, (0,)))
            if isinstance(question, GradientsAt):
                self.journal.note(run, GradientsAt.kind, _name(question))
            self._scored(question, setup.secure.get("losses") == "hidden")
            if self.file.secure.projections:  # which shows gradients along any direction anyway
                return
            if use == SIZES:
                self._measured(setup, question)
            if hides and isinstance(question, LocalSteps):
                self._corrected(question)

    def _weighed(self, setup: Setup, question: WeighedQuestion, use: str, start: Tensor) -> None:
        """Limit thresholds at a point, and gradients weighted by them; both only for sums."""
        if setup.secure and use != MASKED:
            raise InputError(
                "silos-weigh-themselves", "What silos weigh themselves leaves in sums only."
            )
        at = question.at
        about = question.weighing
        goal = json.dumps(to_values(about.objective), sort_keys=True)
        self._few("objective", goal, OBJECTIVES, f"its weights for {OBJECTIVES} objectives")
        how = f"{about.levels} {about.delta} {about.centre} {about.mass}"
        if isinstance(question, Thresholds):
            self._reach(setup, at.x, start, (at.batch_size, at.key))
            self.journal.note(self.run, GradientsAt.kind, _name(at))
            words = f"its weight for {LEVELS} sets of thresholds at that point"
            return self._few(f"thresholds {_name(at)}", how, LEVELS, words)
        self._few(
            f"response {_name(at)}", how, RESPONSES, f"{RESPONSES} of its weights at that point"
        )
        if isinstance(question, WeighedSteps):
            what = f"correction {_name(at)}"
            words = f"its local work for {CORRECTIONS} corrections at that point"
            self._few(what, vector_digest(question.correction), CORRECTIONS, words)
        return None

    def _scored(self, question: Question, hidden: bool) -> None:
        """Limit accuracies, including those of models compared at the end, and losses if they are hidden."""
        if isinstance(question, Scores) and hidden:
            most = min(self.limits.scores, SCORED)
            return self._few(
                "hidden scores", vector_digest(question.x), most, f"its scores at {most} points"
            )
        if isinstance(question, Scores) and question.accuracy:
            name = f"{vector_digest(question.x)} {question.split}"
        elif isinstance(question, JoiningScores):
            name = " ".join(
                map(vector_digest, (question.average, question.fair, question.personal))
            )
        else:
            return None
        words = (
            f"its accuracy at {self.limits.scores} points, which is all that limits.scores allows"
        )
        return self._few("scores", name, self.limits.scores, words)

    def _few(self, what: str, name: str, most: int, words: str) -> None:
        """Count names of a kind, and refuse more than `most` in a run."""
        known = self.journal.known(self.run, what)
        if name not in known and len(known) >= most:
            raise InputError("silo-told", f"This silo has told {words}.")
        self.journal.note(self.run, what, name)

    def _reach(self, setup: Setup, x: Tensor, start: Tensor, batch: tuple[int | None, Key]) -> None:
        """Admit a point x, or refuse one too far out or one too many."""
        limits = self.limits
        known = self.journal.known(self.run, "point")
        name = f"{vector_digest(x)} {batch}"
        way = 0.0
        if name in known:
            return
        if self.promised is not None and len(known) >= self.promised:
            raise InputError(
                "silo-answered-points",
                f"This silo has answered at {self.promised} points: that is beyond the rounds asked for.",
            )
        if len(known) >= limits.points:
            raise InputError(
                "silo-answered-points",
                f"This silo has answered at {limits.points} points, which is all that its file allows.",
            )
        if not bool(torch.isfinite(x).all()):
            raise InputError("point-entries-finite", "The point has entries that are not finite.")
        here = self.sketch(x.numpy(force=True))
        if setup.model.get("loss") != "squared":
            if (far := float((x - start).double().norm())) > limits.radius:
                raise InputError(
                    "point-away-start",
                    f"The point is {far:.3g} away from the start, and limits.radius is {limits.radius:g}.",
                )
            way, before = next(reversed(known.values()), (0.0, None))
            last = self.sketch(start.numpy(force=True)) if before is None else as_numbers(before)
            way += float(np.linalg.norm(here - last))
            if way > limits.path:
                raise InputError(
                    "run-gone-point",
                    f"The run has gone {way:.3g} from point to point, and limits.path is {limits.path:g}.",
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
                "silo-reports-norm",
                "This silo reports the norm of its gradient where a run begins, and no other norm.",
            )
        return None

    def _corrected(self, question: LocalSteps) -> None:
        """Admit local steps with a correction and c_i, or neither; many corrections at one point would reveal c_i."""
        at = question.at
        correction = question.correction
        if (at is None) != (correction is None) or (
            isinstance(at, GradientsAt) and not torch.equal(at.x, question.x)
        ):
            raise InputError(
                "local-steps-correction",
                "Local steps have a correction and c_i at the same point, or neither, where sums are masked.",
            )
        if correction is not None and isinstance(at, GradientsAt):
            what = f"correction {_name(at)}"
            words = f"its local work for {CORRECTIONS} corrections at that point"
            self._few(what, vector_digest(correction), CORRECTIONS, words)


def _name(at: GradientsAt) -> str:
    return f"{vector_digest(at.x)} {(at.batch_size, at.key)}"
