r"""`Silo`: check a question against the site's own rules, and answer it.

An answer depends on the silo's data and the question alone. Its state of a run (the agreement, the last vectors) is a
copy of what the coordinator has sent, and it asks for what it lacks. So a restarted silo continues where its last
process stopped; the site stores only what it has answered (`guard`).

A silo puts a question to its own cohort of one client. It answers what `guard` allows and refuses everything else in
one sentence; the question's class declares what its answer shows.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch import Tensor

import scaffpd
from scaffpd.data.silos import fold_numbers
from scaffpd.data.tabular.agree import checked_schema
from scaffpd.data.tabular.encode import expanded_names
from scaffpd.deploy import messages
from scaffpd.deploy.log import RunLog
from scaffpd.deploy.messages import (
    Array,
    Message,
    MissingVectors,
    VectorCache,
    WrittenQuestion,
    decode,
    encode,
)
from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.deploy.silo.guard import AwaitsConsent, SiloConsent, SiloGuard
from scaffpd.deploy.silo.records import (
    AuditLog,
    PrivacyLedger,
    as_numbers,
    as_text,
    check_shared,
    shared_parts,
)
from scaffpd.errors import InputError
from scaffpd.federation.questions import QUESTIONS, GradientsAt, Question, Scores
from scaffpd.federation.weighed import Response, WeighedQuestion
from scaffpd.models.personal import Personal
from scaffpd.models.threads import limit_threads
from scaffpd.run.settings import reading
from scaffpd.run.settings.model_file import TRIAL, Setup, linear
from scaffpd.run.settings.silo import SiloFile
from scaffpd.study.joining import JoiningScores, own_scores
from scaffpd.training.cohort import Cohort

if TYPE_CHECKING:
    from scaffpd.deploy.silo.masking import SiloMasking

log = logging.getLogger("scaffpd.silo")
MEGABYTE = 2**20
NAMED = 500  # columns that a line of the log names, with at most 100 characters each
CARRIED = 2  # vectors passed to the silo's next process: x and c; it asks for others
POINTS = (
    2  # points whose answers are cached: this round's and, after a rejected step, the last one's
)


class Silo:
    """One site: its file, its data, and the agreement under which it answers."""

    def __init__(self, file: SiloFile) -> None:
        self.file = file
        self.name = file.name
        self._setup: Setup | None = None
        self._vectors = VectorCache()
        self.guard, self.audit, self.log = (
            SiloGuard(file),
            AuditLog(file.limits.audit),
            RunLog(file.log),
        )
        self.consent = SiloConsent(file, self.guard.journal)
        self._points: dict[Any, GradientsAt] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], kit: Path | None = None) -> Silo:
        """Open the silo of a silo.toml; its data is read with the first question about it.

        An engine's startup kit has the certificate that proves its name to other silos.
        """
        file = SiloFile.read(Path(path))
        return cls(file if kit is None else file.with_kit(kit))

    # --- made by the first question that needs it

    @cached_property
    def data(self) -> Dataset:
        """The site's own table."""
        data: Dataset = self._local(Dataset.read, self.file)
        data.check(self.file.limits)
        return data

    @cached_property
    def masking(self) -> SiloMasking:
        """The silo's part in secure sums."""
        from scaffpd.deploy.silo.masking import (
            SiloMasking,
        )  # needs the optional package cryptography

        masking: SiloMasking = self._local(SiloMasking, self.name, self.file.secure, self.guard)
        return masking

    @cached_property
    def ledger(self) -> PrivacyLedger | None:
        """The silo's releases under an agreement with noise."""
        setup = self._setup
        if setup is None or not setup.privacy:
            return None
        return PrivacyLedger(self.file.privacy, setup.privacy, setup.digest)

    @cached_property
    def cohort(self) -> Cohort:
        """The site's rows and the agreed model."""
        assert self._setup is not None
        setup = self._setup
        own = self.data.cohort
        if own is None:
            model = self._model(setup)
            schema = checked_schema(setup.schema)
            width = len(expanded_names(schema))
            self._check_dimension(
                width * max(1, getattr(getattr(model, "model", model), "classes", None) or 1)
            )
            train, held = self._rows(setup)
            test = None if held is None else {self.name: held}
            model = model if self.ledger is None else self.ledger.private(model)
            own = Cohort({self.name: train}, model, dtype=setup.dtype, test=test)
        self._check_dimension(own.dimension)
        if self.ledger is not None:
            self._local(self.ledger.open, own)
        return own

    def _rows(self, setup: Setup) -> tuple[Any, Any]:
        """Return training rows and held-out rows; in a trial, the training rows without a fold, and that fold."""
        schema = checked_schema(setup.schema)
        apart = bool(setup.privacy)
        ready = self.data.encoded(schema, setup.mean, setup.deviation, apart=apart)
        if "fold" not in setup.model:
            return ready.train, ready.test
        (X, y), (fold, folds, seed) = ready.train, self._trial(setup)
        out = fold_numbers(self.name, y, folds, seed) == fold
        return (X[~out], y[~out]), (X[out], y[out])

    def _trial(self, setup: Setup) -> tuple[int, int, int]:
        """Return the left-out fold, the number of folds and the seed; refuse a fold with too few rows."""
        values = messages.read_values(
            dict.fromkeys(TRIAL, NonNegativeInt), setup.model, "The trial cannot be used."
        )
        fold, folds, seed = (int(values[name]) for name in TRIAL)
        rows = self.data.rows[0]
        least = self.file.limits.rows
        if not 2 <= folds <= 20 or fold >= folds or rows // folds < least:
            has = rows // max(folds, 1)
            raise InputError(
                "silo-reports-loss",
                f"This silo reports the loss of {least} rows or more, and a fold would have {has}.",
            )
        return fold, folds, seed

    def _model(self, setup: Setup) -> Any:
        kind = setup.model.get("kind", "linear")
        if kind == "linear":
            model = linear(setup.model)
            personal = (
                "strength" in setup.model and not setup.privacy
            )  # noise protects the shared model only
            return Personal(model, setup.model["strength"]) if personal else model
        if kind not in self.file.models:
            raise InputError(
                "silo-knows-model",
                f"This silo knows no model {kind!r}; its file lists models under [models].",
            )
        return self._local(reading.load, self.file.path.parent, self.file.models[kind])

    def _local(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function about this site's files; its error messages stay in the site's log."""
        try:
            return function(*given)
        except InputError as error:
            log.error("%s", error)
            raise InputError(
                "silo-own-files", "The silo's own files cannot be read; its log says why."
            ) from None

    # --- one question

    def answer(self, question: bytes) -> bytes:
        """Return the reply to a question, which may be a refusal; never raise."""
        number = None
        asked = None
        try:
            asked = decode(question, self.file.limits.message_mb * MEGABYTE)
            given = asked.values.get("question")
            number = given if isinstance(given, str) and len(given) <= 64 else None
            reply = self._reply(asked)
        except MissingVectors as missing:
            reply = Message("missing", {"names": list(missing.names)})
        except InputError as error:
            log.warning("refused: %s", error)
            waits = {"waits": True} if isinstance(error, AwaitsConsent) else {}
            reply = Message("refused", {"sentence": str(error), **waits})
        except Exception as error:
            log.exception("a question failed")  # the details may contain data and stay here
            reply = Message(
                "failed", {"sentence": f"{type(error).__name__}; the silo's log says more."}
            )
        return self._written_down(asked, reply, {"question": number, "silo": self.name})

    def _written_down(
        self, asked: Message | None, reply: Message, names: Mapping[str, Any]
    ) -> bytes:
        """Log the reply and return it as bytes; if the log fails, return a refusal."""
        sent = encode(Message(reply.kind, {**reply.values, **names}, reply.arrays))
        setup = self._setup
        about = (
            {"run": "", "algorithm": ""}
            if setup is None
            else {"run": setup.columns, "algorithm": setup.algorithm}
        )
        more: dict[str, Any] = {"masked": self._masks, "private": self._private}
        if asked is not None and asked.kind in messages.ASKING and self.consent.asks is not None:
            more |= {"asks": self.consent.asks, "columns": _columns(setup)}
        try:
            self.audit.note(asked, reply, len(sent), {**about, **more})
        except InputError as error:
            log.error("%s", error)
            return encode(
                Message("refused", {"sentence": "The silo's own log cannot be written.", **names})
            )
        self.log.run, level = (
            about["run"],
            {"refused": "warning", "failed": "error"}.get(reply.kind, "info"),
        )
        question = "unreadable" if asked is None else asked.kind
        why = reply.values.get("sentence", "")
        self.log.note(
            level, f"{question}: {reply.kind}, {len(sent)} bytes. {why}".strip(), self.name
        )
        return sent

    def _reply(self, asked: Message) -> Message:
        """Return the answer; if vectors are masked, only the part that may leave."""
        if asked.kind != "hello":
            self.consent.check(
                asked.kind, asked.values.get("asks") if asked.kind in messages.ASKING else None
            )
        hides = self._masks or asked.kind in messages.SECRET
        if asked.kind in messages.SECRET:
            self.guard.check_trust()
        reply = (
            self.masking.answer(asked, self._compute, self._named)
            if hides
            else self._compute(asked)
        )
        return (
            self.masking.released(asked.kind, reply) if self._masks else reply
        )  # the agreement may be new

    def _compute(self, asked: Message, use: str = "") -> Message:
        """Answer a question that is not about keys; `use` says how its vector is used (see `SiloGuard.admit`)."""
        first: dict[str, Callable[[Message], Message]] = {
            "hello": lambda _: Message("answer", {"version": scaffpd.__version__}),
            "describe": lambda _: Message("answer", {"description": self.data.describe()}),
            "totals": self._totals,
            "setup": self._agree,
            "start": self._start,
        }
        return first[asked.kind](asked) if asked.kind in first else self._train(asked, use)

    @property
    def _masks(self) -> bool:
        """Return whether vectors leave only masked, by the silo's own file or the agreement."""
        return self.file.secure.required or (self._setup is not None and bool(self._setup.secure))

    @property
    def _private(self) -> bool:
        """Return whether everything that depends on rows carries noise."""
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
                "silo-takes-part",
                "This silo takes part only with differential privacy, and the federation has no [privacy].",
            )
        if private and not rules.columns:
            raise InputError(
                "noise-cover-sums",
                "Noise does not cover sums over columns: they leave this silo only if its file says so, with "
                'privacy.columns = "exact". Declare the ranges of columns in [features.ranges] of the federation '
                "instead: then no sums are needed.",
            )
        schema = checked_schema(asked.values.get("schema"))
        mean = asked.arrays.get("mean")
        self._check_dimension(len(expanded_names(schema)))
        self.guard.attempt("schema", json.dumps(schema, sort_keys=True))
        if mean is not None:
            self.guard.attempt("mean", mean.tobytes().hex())
        return Message("answer", {}, self.data.totals(schema, mean))

    def _agree(self, asked: Message) -> Message:
        self._bind(Setup.of(asked.values.get("setup")))
        cohort = self.cohort
        start = self.cohort.start().numpy(force=True)
        known = cohort.constants()
        d = cohort.dimension
        probe = 0.0
        hidden = self._setup is not None and self._setup.secure.get("losses") == "hidden"
        if not self._private and not hidden:  # the loss at an arbitrary point identifies the data
            probe = float(
                cohort.evaluate(np.random.default_rng(0).standard_normal(d) / np.sqrt(d)).loss[0]
            )
        values = {
            "dimension": d,
            "dtype": str(start.dtype),
            "convex": known.convex,
            "quadratic": known.quadratic,
            "tested": self._tested,
            "start": messages.digest(start) if start.any() else "",
            "samples": int(known.samples[0]),
            "noisy": known.noisy,
        }
        scalars = np.array(
            [known.smoothness[0], known.strong_convexity[0], known.steepest[0], probe]
        )
        return Message("answer", values, {"constants": scalars})

    def _bind(self, setup: Setup) -> None:
        """Accept an agreement that can be read and that this silo's file allows."""
        checked_schema(setup.schema)  # before anything of it is stored: the log names its columns
        self.guard.promised = self.consent.match(setup)
        self.guard.check_agreement(setup)
        check_shared(self.file.secure, setup.privacy, self.data.cohort is not None)
        if "fold" in setup.model:
            self._check_trial(setup)
        if self._setup is None or self._setup.digest != setup.digest:
            self._setup = setup
            self._points.clear()
            vars(self).pop("cohort", None)

    def _check_trial(self, setup: Setup) -> None:
        """Refuse a trial without a fold if this silo's file or data rules it out, or if the folds change."""
        if not self.file.limits.choosing:
            raise InputError(
                "silo-lets-strengths",
                "This silo lets no strengths be chosen by its rows: limits.choosing in its file is false.",
            )
        if setup.privacy or self.data.cohort is not None:
            what = (
                "its budget of privacy would pay for every trial"
                if setup.privacy
                else "its model is its own"
            )
            raise InputError(
                "silo-lets-strengths", f"This silo lets no strengths be chosen by its rows: {what}."
            )
        self.guard.attempt("cut into folds", repr(self._trial(setup)[1:]))

    def _start(self, asked: Message) -> Message:
        self._check_setup(asked.values.get("setup"))
        return Message("answer", {}, {"x": self.cohort.start().numpy(force=True)})

    # --- while training

    def _train(self, asked: Message, use: str) -> Message:
        values = messages.own_steps(asked.values, self.name)
        setup = self._check_setup(values.get("setup"))
        if asked.kind == messages.SPENT and self._private:
            return self._spent()
        if self._private and asked.kind == Scores.kind:
            raise InputError(
                "silo-private-releases", "This silo is private: it releases no scores."
            )
        self.guard.check_kind(setup, asked.kind)
        self.guard.check_work(values)
        if values.get("split") == "test" and not self._tested:
            raise InputError(
                "silo-held-fewer",
                f"This silo has held out fewer than {self.file.limits.rows} rows: it does not test on them.",
            )
        vectors = {role: self._vector(array) for role, array in self._named(asked).items()}
        question = self._read(
            asked.kind, WrittenQuestion(self.guard.drawn_here(values), vectors, asked.arrays)
        )
        self.guard.admit(setup, question, use, self.cohort.start())
        channel = self.cohort.channel
        if isinstance(question, JoiningScores):
            return Message("answer", {}, self._compared(setup, question))
        if isinstance(question, WeighedQuestion):
            self._weigh(question, values)
        with self._noted(), limit_threads(channel.work):
            reply = channel.ask(question, [0])
            if isinstance(question, Response) and (name := question.weighing.name):
                self._keep(name)
            shown = self.masking.coarse(question, reply) if self._masks else reply
            arrays = messages.reply_arrays(question, shown, self.cohort.start())
            shared = shared_parts(self.name, reply, values) if use == messages.MASKED else {}
            own = next((part.unweighted for part in reply.vectors.values()), None)
            if use == messages.MASKED and own is not None:  # for the guard alone; it never leaves
                bare, weight = own()
                arrays |= {
                    messages.BARE: bare[0].double().numpy(force=True),
                    messages.WEIGHT: weight,
                }
            return Message("answer", {"shared": True} if shared else {}, arrays | shared)

    def _weigh(self, question: WeighedQuestion, values: Mapping[str, Any]) -> None:
        """Pass this silo's index and stored weight to its cohort of one client."""
        channel = self.cohort.channel
        names = messages.names_of(values, "names")
        centre = question.weighing.centre
        if self.name not in names:
            raise InputError(
                "silo-among-those", "This silo is not among those that find their own weights."
            )
        channel.place = names.index(self.name), len(names)
        if (
            centre and centre not in channel.weights
        ):  # another process of this silo may have stored it
            kept = self.guard.journal.known(self.guard.run, messages.WEIGHT).get(str(centre))
            channel.weights |= {} if kept is None else {centre: as_numbers(kept)}

    def _keep(self, name: int) -> None:
        """Record the cohort's weight under a number; a number in use keeps its weight."""
        kept = self.cohort.channel.weights
        journal = self.guard.journal
        run = self.guard.run
        with journal.turn():
            journal.note(run, messages.WEIGHT, str(name), as_text(kept[name]))
            first = as_numbers(journal.known(run, messages.WEIGHT)[str(name)])
            now = kept[name]
        kept[name] = first
        if not np.allclose(
            first, now, rtol=1e-9, atol=0
        ):  # a repeated question has the same weight
            raise InputError(
                "silo-another-weight", "This silo has another weight under that number."
            )

    def _compared(self, setup: Setup, question: JoiningScores) -> dict[str, Array]:
        """Return means and covariances of scores on held-out rows, alone and with the run's models; no single row's."""
        if not self.file.limits.joining:
            raise InputError(
                "silo-release-scores",
                "This silo does not release its scores: limits.joining in its file is false.",
            )
        if (
            not self._tested
            or setup.model.get("kind", "linear") != "linear"
            or self.data.cohort is not None
        ):
            raise InputError(
                "silo-compares-linear",
                f"This silo compares linear models on {self.file.limits.rows} held-out rows or more.",
            )
        train, test = self._rows(setup.with_model(**dict.fromkeys(TRIAL)))
        x = {
            name: getattr(question, name).numpy(force=True)
            for name in ("average", "fair", "personal")
        }
        return own_scores(
            self.name, train, test, linear(setup.model), x, question.strength, question.seed
        )

    def _named(self, asked: Message) -> dict[str, Array]:
        """Return the vectors of a question by their roles, sent with it or earlier."""
        named = asked.values.get("vectors", {})
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise InputError("question-name-vectors", "The question does not name its vectors.")
        self._vectors.put(
            {name: asked.arrays[name] for name in named.values() if name in asked.arrays}
        )
        found = self._vectors.find(named.values())
        return {role: found[name] for role, name in named.items()}

    def _vector(self, array: Array) -> Tensor:
        like = self.cohort.start()
        if array.shape != like.shape:
            raise InputError(
                "vector-shape-came",
                f"A vector of shape {array.shape} came for a model of {like.numel()} parameters.",
            )
        return torch.from_numpy(array).to(like)

    def _read(self, kind: str, written: WrittenQuestion) -> Question:
        """Read a question; reuse cached points."""

        def point(role: str) -> GradientsAt:
            if role not in written.vectors:
                raise InputError(
                    "question-name-vectors", f"The question does not name its vectors ({role})."
                )
            asked = (messages.vector_digest(written.vectors[role]), *written.batch())
            if asked not in self._points:
                while len(self._points) >= POINTS:
                    self._points.pop(next(iter(self._points)))
                self._points[asked] = GradientsAt(written.vectors[role], *asked[1:])
            return self._points[asked]

        if kind not in QUESTIONS:
            raise InputError("silo-knows-question", f"This silo knows no question {kind!r}.")
        question: Question = written.read(QUESTIONS[kind], point)
        return question

    def _spent(self) -> Message:
        """Answer with (ε, δ) so far, which depends on the questions and not on the rows."""
        with self._noted():
            found = self.cohort.privacy
            assert found is not None
            return Message("answer", {"epsilon": found.worst, "delta": found.delta})

    def _noted(self) -> AbstractContextManager[None]:
        """Record what an answer releases if there is a ledger."""
        return nullcontext() if self.ledger is None else self.ledger.while_answering(self.cohort)

    def _check_setup(self, name: Any) -> Setup:
        if self._setup is None or self._setup.digest != name:
            raise MissingVectors(["setup"])
        return self._setup

    def _check_dimension(self, dimension: int) -> None:
        most = self.file.limits.dimension
        if dimension > most:
            raise InputError(
                "model-parameters-larger",
                f"A model of {dimension} parameters is larger than the {most} that this silo allows.",
            )

    # --- state passed to the site's next process

    def kept(self) -> bytes:
        """Return the state for this site's next process: agreements, vectors, secrets of sums; no rows."""
        values: dict[str, Any] = {"agreed": self.guard.agreed, "asks": self.consent.asks}
        if self._setup is not None:
            values["setup"] = self._setup.values()
        if "masking" in vars(self):
            values["secrets"] = self.masking.party.kept()
        if {"setup", "secrets"} & values.keys():
            values["rows"] = self.data.digest
        return encode(Message("kept", values, self._vectors.last(CARRIED)))

    def restore(self, kept: bytes) -> None:
        """Restore what `kept` returned in an earlier process; ignore what cannot be read, or is about other rows."""
        try:
            message = decode(kept, self.file.limits.message_mb * MEGABYTE)
            agreed = message.values.get("agreed")
            if isinstance(agreed, dict):
                self.guard.agreed = {
                    str(what): [str(name) for name in names] for what, names in agreed.items()
                }
            self.consent.asks = message.values.get("asks")
            if {"setup", "secrets"} & message.values.keys() and message.values.get(
                "rows"
            ) != self.data.digest:
                raise InputError(
                    "rows-changed-two",
                    "its rows have changed: two answers under one mask would show how",
                )
            if "secrets" in message.values:
                self.masking.restore(message.values["secrets"])
            if "setup" in message.values:
                self._bind(Setup.of(message.values["setup"]))
                self._vectors.put(message.arrays)
        except InputError as error:
            log.warning("earlier work of this site is lost: %s", error)


def _columns(setup: Setup | None) -> list[str]:
    """Return the names of an agreement's columns."""
    names = (
        []
        if setup is None
        else [column["name"][:100] for column in checked_schema(setup.schema)["columns"]]
    )
    return names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more"]
