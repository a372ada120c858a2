r"""`Silo`: check a question against the site's own rules, and answer it.

An answer depends on the silo's data and the question alone. The agreement is a copy of what the
coordinator has sent, and a restarted silo asks for it; the site stores only what it has answered
(`guard`).

A silo puts a question to its own cohort of one client. It answers what `guard` allows and refuses
everything else in one sentence; the question's class declares what its answer shows.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

import scaffpd
from scaffpd.data.tabular.agree import checked_schema, width
from scaffpd.deploy import messages
from scaffpd.deploy.messages import (
    Array,
    Json,
    JsonMapping,
    Message,
    MissingAgreement,
    WrittenQuestion,
    decode,
    digest,
    encode,
    reply_arrays,
)
from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.deploy.silo.guard import SiloGuard
from scaffpd.deploy.silo.privacy import PrivacyLedger, check_shared, shared_parts
from scaffpd.deploy.silo.records import AWAITED, AuditLog, SiloConsent
from scaffpd.errors import InputError
from scaffpd.federation.questions import QUESTIONS, GradientsAt, Question, Scores
from scaffpd.models.execution import limit_threads
from scaffpd.models.personal import Personal
from scaffpd.run.settings import methods
from scaffpd.run.settings.model_file import Setup, linear
from scaffpd.run.settings.silo import SiloFile
from scaffpd.training.cohort import Cohort

if TYPE_CHECKING:
    from scaffpd.deploy.silo.masking import SiloMasking

log = logging.getLogger("scaffpd.silo")
LARGEST_QUESTION = 512 * 2**20  # bytes
NAMED = 500  # columns that a line of the log names, with at most 100 characters each
POINTS = 2  # points whose answers are cached: this round's and, after a rejected step, the last's
P = ParamSpec("P")
T = TypeVar("T")


class Silo:
    """One site: its file, its data, and the agreement under which it answers."""

    def __init__(self, file: SiloFile) -> None:
        self.file = file
        self.name = file.name
        self._setup: Setup | None = None
        self.guard = SiloGuard(file)
        self.audit = AuditLog(file.audit)
        self.consent = SiloConsent(file)
        self._points: dict[Any, GradientsAt] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Silo:
        """Open the silo of a silo.toml; its data is read with the first question about it."""
        return cls(SiloFile.read(Path(path)))

    # --- made by the first question that needs it

    @cached_property
    def data(self) -> Dataset:
        """The site's own table."""
        data = self._local(Dataset.read, self.file)
        data.check(self.file.limits)
        return data

    @cached_property
    def masking(self) -> SiloMasking:
        """The silo's part in secure sums."""
        from scaffpd.deploy.silo.masking import SiloMasking  # needs the package cryptography

        return self._local(SiloMasking, self.file, self.guard)

    @cached_property
    def ledger(self) -> PrivacyLedger | None:
        """The silo's releases under an agreement with noise."""
        setup = self._setup
        if setup is None or not setup.privacy:
            return None
        return PrivacyLedger(self.file, setup.privacy, setup.digest)

    @cached_property
    def cohort(self) -> Cohort:
        """The site's rows and the agreed model."""
        assert self._setup is not None
        setup = self._setup
        own = self.data.cohort
        if own is None:
            model = self._model(setup)
            schema = checked_schema(setup.schema)
            classes = getattr(getattr(model, "model", model), "classes", None) or 1
            self._check_dimension(width(schema) * classes)
            ready = self.data.encoded(
                schema, setup.mean, setup.deviation, separate=bool(setup.privacy)
            )
            test = None if ready.test is None else {self.name: ready.test}
            model = model if self.ledger is None else self.ledger.private(model)
            own = Cohort({self.name: ready.train}, model, test=test)
        self._check_dimension(own.dimension)
        if self.ledger is not None:
            self._local(self.ledger.open, own)
        return own

    def _model(self, setup: Setup) -> Any:
        kind = setup.model.get("kind", "linear")
        if kind == "linear":
            model = linear(setup.model)
            # noise protects the shared model only
            personal = "strength" in setup.model and not setup.privacy
            return Personal(model, setup.model["strength"]) if personal else model
        if kind not in self.file.models:
            raise InputError(
                "model-unknown-here",
                f"This silo knows no model {kind!r}; its file lists models under [models].",
            )
        return self._local(methods.load, self.file.path.parent, self.file.models[kind])

    def _local(self, function: Callable[P, T], *given: P.args, **options: P.kwargs) -> T:
        """Call a function about this site's files; its error messages stay in the site's log."""
        try:
            return function(*given, **options)
        except InputError as error:
            log.error("%s", error)
            raise InputError(
                "own-files-unreadable", "The silo's own files cannot be read; its log says why."
            ) from None

    # --- one question

    def answer(self, question: bytes) -> bytes:
        """Return the reply to a question, which may be a refusal; never raise."""
        number = None
        asked = None
        try:
            asked = decode(question, LARGEST_QUESTION)
            given = asked.values.get("question")
            number = given if isinstance(given, str) and len(given) <= 64 else None
            reply = self._reply(asked)
        except MissingAgreement:
            reply = Message("missing")
        except InputError as error:
            log.warning("refused: %s", error)
            waits = {"waits": True} if error.code == AWAITED else {}
            reply = Message("refused", {"sentence": str(error), **waits})
        except Exception as error:
            log.exception("a question failed")  # the details may contain data and stay here
            sentence = f"{type(error).__name__}; the silo's log says more."
            reply = Message("failed", {"sentence": sentence})
        return self._written_down(asked, reply, {"question": number, "silo": self.name})

    def _written_down(self, asked: Message | None, reply: Message, names: JsonMapping) -> bytes:
        """Log the reply and return it as bytes; if the log fails, return a refusal."""
        sent = encode(Message(reply.kind, {**reply.values, **names}, reply.arrays))
        setup = self._setup
        about: Json = {
            "run": "" if setup is None else setup.columns,
            "algorithm": "" if setup is None else setup.algorithm,
            "masked": self._masks,
            "private": self._private,
        }
        if asked is not None and asked.kind in messages.ASKING and self.consent.asks is not None:
            about |= {"asks": self.consent.asks, "columns": _columns(setup)}
        try:
            self.audit.note(asked, reply, len(sent), about)
        except InputError as error:
            log.error("%s", error)
            refusal = {"sentence": "The silo's own log cannot be written.", **names}
            return encode(Message("refused", refusal))
        return sent

    def _reply(self, asked: Message) -> Message:
        """Return the answer; if vectors are masked, only the part that may leave."""
        if asked.kind != "hello":
            given = asked.values.get("asks") if asked.kind in messages.ASKING else None
            self.consent.check(asked.kind, given)
        if asked.kind in messages.SECRET:
            self.guard.check_trust()
        if self._masks or asked.kind in messages.SECRET:
            reply = self.masking.answer(asked, self._compute)
        else:
            reply = self._compute(asked)
        # with the reply, as the agreement may be new
        return self.masking.released(asked.kind, reply) if self._masks else reply

    def _compute(self, asked: Message, use: str = "") -> Message:
        """Answer a question that is not about keys; `use` is that of `SiloGuard.admit`."""
        first: dict[str, Callable[[Message], Message]] = {
            "hello": lambda _: Message("answer", {"version": scaffpd.__version__}),
            "describe": lambda _: Message("answer", {"description": self.data.describe()}),
            "totals": self._totals,
            "setup": self._agree,
        }
        return first[asked.kind](asked) if asked.kind in first else self._train(asked, use)

    @property
    def _masks(self) -> bool:
        """Whether vectors leave only masked, by the silo's own file or the agreement."""
        return self.file.secure.required or (self._setup is not None and bool(self._setup.secure))

    @property
    def _private(self) -> bool:
        """Whether everything that depends on rows carries noise."""
        return self.file.privacy.required or (self._setup is not None and bool(self._setup.privacy))

    @property
    def _tested(self) -> int:
        """Number of held-out rows to report; zero if there are too few."""
        rows = self.data.rows[1]
        return rows if rows >= self.file.limits.rows and not self._private else 0

    # --- before training

    def _totals(self, asked: Message) -> Message:
        promised = (self.consent.asks or {}).get("epsilon") is not None  # and consented to
        private = promised or asked.values.get("private") is True
        rules = self.file.privacy
        if rules.required and not private:
            raise InputError(
                "run-without-noise",
                "This silo takes part only with differential privacy, and the federation has no "
                "[privacy].",
            )
        if private and not rules.columns:
            raise InputError(
                "sums-without-noise",
                "Noise does not cover sums over columns: they leave this silo only with "
                'privacy.columns = "exact" in its file. Declare [features.ranges] in the '
                "federation instead.",
            )
        schema = checked_schema(asked.values.get("schema"))
        mean = asked.arrays.get("mean")
        self._check_dimension(width(schema))
        self.guard.attempt("schema", json.dumps(schema, sort_keys=True))
        if mean is not None:
            self.guard.attempt("mean", mean.tobytes().hex())
        return Message("answer", {}, self.data.totals(schema, mean))

    def _agree(self, asked: Message) -> Message:
        self._bind(Setup.of(asked.values.get("setup")))
        cohort = self.cohort
        start = cohort.start().numpy(force=True)
        known = cohort.constants()
        d = cohort.dimension
        probe = 0.0
        if not self._private:  # the loss at an arbitrary point identifies the data
            point = np.random.default_rng(0).standard_normal(d) / np.sqrt(d)
            probe = float(cohort.evaluate(point).loss[0])
        values = {
            "dimension": d,
            "dtype": str(start.dtype),
            "convex": known.convex,
            "quadratic": known.quadratic,
            "tested": self._tested,
            "start": digest(start) if start.any() else "",
            "samples": int(known.samples[0]),
            "noisy": known.noisy,
        }
        scalars = [known.smoothness[0], known.strong_convexity[0], known.steepest[0], probe]
        return Message("answer", values, {"constants": np.array(scalars)})

    def _bind(self, setup: Setup) -> None:
        """Accept an agreement that can be read and that this silo's file allows."""
        checked_schema(setup.schema)  # before anything of it is stored: the log names its columns
        self.guard.promised = self.consent.match(setup)
        self.guard.check_agreement(setup)
        check_shared(self.file.secure, setup.privacy, self.data.cohort is not None)
        if self._setup is None or self._setup.digest != setup.digest:
            self._setup = setup
            self._points.clear()
            for made in ("cohort", "ledger"):
                vars(self).pop(made, None)

    # --- while training

    def _train(self, asked: Message, use: str) -> Message:
        values = asked.values
        setup = self._setup
        if setup is None or setup.digest != values.get("setup"):
            raise MissingAgreement
        if asked.kind == "start":
            return Message("answer", {}, {"x": self.cohort.start().numpy(force=True)})
        if asked.kind == messages.SPENT and self._private:
            with self._noted():  # (ε, δ) so far depends on the questions and not on the rows
                found = self.cohort.privacy
                assert found is not None
                return Message("answer", {"epsilon": found.worst, "delta": found.delta})
        if self._private and asked.kind == Scores.kind:
            raise InputError("scores-with-noise", "This silo is private: it releases no scores.")
        self.guard.check_kind(setup, asked.kind)
        self.guard.check_work(values)
        if values.get("split") == "test" and not self._tested:
            raise InputError(
                "too-few-held-out",
                f"This silo has held out fewer than {self.file.limits.rows} rows: it does not test "
                "on them.",
            )
        question = self._read(asked.kind, self.guard.drawn_here(values), asked.arrays)
        self.guard.admit(setup, question, use, self.cohort.start())
        channel = self.cohort.channel
        with self._noted(), limit_threads(channel.work):
            reply = channel.ask(question, [0])
            arrays = reply_arrays(question, reply, self.cohort.start())
            shared = shared_parts(self.name, reply, values) if use == messages.MASKED else {}
            return Message("answer", {"shared": True} if shared else {}, arrays | shared)

    def _read(self, kind: str, values: JsonMapping, arrays: Mapping[str, Array]) -> Question:
        """Read a question; reuse cached points, so that their answers are computed once."""
        vectors = {role: self._vector(one) for role, one in arrays.items() if one.ndim == 1}
        written = WrittenQuestion(values, vectors, arrays)

        def point(role: str) -> GradientsAt:
            x = written.vector(role)
            asked = (digest(x.numpy(force=True)), *written.batch())
            if asked not in self._points:
                while len(self._points) >= POINTS:
                    self._points.pop(next(iter(self._points)))
                self._points[asked] = GradientsAt(x, *asked[1:])
            return self._points[asked]

        if kind not in QUESTIONS:
            raise InputError("question-unknown", f"This silo knows no question {kind!r}.")
        question: Question = written.read(QUESTIONS[kind], point)
        return question

    def _vector(self, array: Array) -> Tensor:
        like = self.cohort.start()
        if array.shape != like.shape:
            raise InputError(
                "vector-of-other-model",
                f"A vector of shape {array.shape} came for a model of {like.numel()} parameters.",
            )
        return torch.from_numpy(array).to(like)

    def _noted(self) -> AbstractContextManager[None]:
        """Record what an answer releases if there is a ledger."""
        return nullcontext() if self.ledger is None else self.ledger.while_answering(self.cohort)

    def _check_dimension(self, dimension: int) -> None:
        most = self.file.limits.dimension
        if dimension > most:
            raise InputError(
                "model-too-large",
                f"A model of {dimension} parameters is larger than the {most} that this silo "
                "allows.",
            )


def _columns(setup: Setup | None) -> list[str]:
    """Return the names of an agreement's columns."""
    if setup is None:
        return []
    names = [column["name"][:100] for column in checked_schema(setup.schema)["columns"]]
    return names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more"]
