r"""`Silo`: what a site answers.

A silo is a function of its own data and of the question: everything else that it holds (the agreement, the last
vectors) is a copy of what the coordinator has sent, and it says so when it lacks something. So a restarted silo goes on
where another process of it was, and nothing needs to be saved at a site.

It answers what its own file allows, with what `work` lists, and refuses everything else in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import scaffpd
from scaffpd.cohort import Cohort
from scaffpd.config import objects
from scaffpd.config.objects import algorithm_kind
from scaffpd.deploy.messages import Message, MissingVectors, Setup, VectorCache, decode, digest, encode, linear
from scaffpd.deploy.questions import EVALUATE, GRADIENTS, PROJECT, SECRET, SPENT
from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.deploy.silo.handlers import NamedVector, SiloCohort
from scaffpd.deploy.silo.privacy_ledger import PrivacyLedger, spent
from scaffpd.deploy.silo.silo_file import SiloFile
from scaffpd.errors import InputError
from scaffpd.tabular.schema import checked_schema, width

if TYPE_CHECKING:
    from scaffpd.deploy.silo.masking import SiloMasking

log = logging.getLogger("scaffpd.silo")
MEGABYTE = 2**20
CARRIED = 2  # vectors that another process of the silo is handed: x and c; it asks for what it lacks
UNNAMED = ("V", "around", "mean")  # arrays of a question that are no vectors with a name
ATTEMPTS = {"schema": 4, "mean": 4, "agreement": 1}


class Silo:
    """One site: its file, its data, and the work that it has agreed to do."""

    def __init__(self, file: SiloFile) -> None:
        self.file, self.name = file, file.name
        self._data: Dataset | None = None
        self._setup: Setup | None = None
        self._work: SiloCohort | None = None
        self._shelf = VectorCache()
        self._known: dict[str, frozenset[str]] = {}
        self._agreed: dict[str, list[str]] = {}
        self._secret: SiloMasking | None = None
        self._books: PrivacyLedger | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], kit: Path | None = None) -> Silo:
        """The silo that a silo.toml describes; its data is read with the first question about it.

        With an engine's startup kit, other silos know it by the certificate in there.
        """
        file = SiloFile.read(Path(path))
        return cls(file if kit is None else replace(file, secure=file.secure.known_by(kit)))

    @property
    def data(self) -> Dataset:
        """The site's own table."""
        if self._data is None:
            data = self._own(Dataset.read, self.file)
            data.check(self.file.limits)
            self._data = data
        return self._data

    def _own(self, function: Callable[..., Any], *given: Any) -> Any:
        """What only concerns this site: sentences about its files stay in its log."""
        try:
            return function(*given)
        except InputError as error:
            log.error("%s", error)
            raise InputError("The silo's own files cannot be read; its log says why.") from None

    def answer(self, question: bytes) -> bytes:
        """The reply to a question; a refusal is a reply as well, nothing is ever raised."""
        number = None
        try:
            asked = decode(question, self.file.limits.message_mb * MEGABYTE)
            given = asked.values.get("question")
            number = given if isinstance(given, str) and len(given) <= 64 else None
            reply = self._reply(asked)
        except MissingVectors as missing:
            reply = Message("missing", {"names": list(missing.names)})
        except InputError as error:
            log.warning("refused: %s", error)
            reply = Message("refused", {"sentence": str(error)})
        except Exception as error:
            log.exception("a question failed")  # the details stay here: they may speak of data
            reply = Message("failed", {"sentence": f"{type(error).__name__}; the silo's log says more."})
        return encode(Message(reply.kind, {**reply.values, "question": number, "silo": self.name}, reply.arrays))

    def _reply(self, asked: Message) -> Message:
        """The answer, as far as it may leave: where vectors are masked, all of it goes through one gate."""
        hides = self._masks or asked.kind in SECRET
        reply = self._masking.answer(asked, self._computed) if hides else self._computed(asked)
        return self._masking.released(asked.kind, reply) if self._masks else reply  # an agreement may be new

    def _computed(self, asked: Message) -> Message:
        opening: dict[str, Callable[[Message], Message]] = {
            "hello": self._hello, "describe": self._describe, "totals": self._totals, "setup": self._agree,
            "start": self._start,
        }  # fmt: skip
        if asked.kind in opening:
            return opening[asked.kind](asked)
        return self._train(asked)

    @property
    def _masks(self) -> bool:
        """Whether vectors leave masked only: the silo's own file wants it, or the agreement does."""
        return self.file.secure.required or (self._setup is not None and bool(self._setup.secure))

    @property
    def _masking(self) -> SiloMasking:
        if self._secret is None:
            from scaffpd.deploy.silo.masking import SiloMasking  # needs a package that plain sums do not

            self._secret = self._own(SiloMasking, self.name, self.file.secure)
        return self._secret

    def _hello(self, asked: Message) -> Message:
        return Message("answer", {"version": scaffpd.__version__})

    def _describe(self, asked: Message) -> Message:
        return Message("answer", {"description": self.data.describe()})

    def _totals(self, asked: Message) -> Message:
        private, rules = asked.values.get("private") is True, self.file.privacy
        if rules.required and not private:
            raise InputError(
                "This silo takes part with differential privacy only, and the federation has no [privacy]."
            )
        if private and not rules.columns:
            raise InputError(
                "Noise does not cover sums over columns: they leave this silo only where its file says so, with "
                'privacy.columns = "exact".'
            )
        schema, mean = checked_schema(asked.values.get("schema")), asked.arrays.get("mean")
        self._check_dimension(width(schema))
        self._agreed_to("schema", json.dumps(schema, sort_keys=True))
        if mean is not None:
            self._agreed_to("mean", mean.tobytes().hex())
        return Message("answer", {}, self.data.totals(schema, mean))

    def _agreed_to(self, what: str, value: str) -> None:
        """A run needs one agreement, and a few attempts at it while silos go away.

        Sums by ever other columns, means or models would tell single rows apart.
        """
        name = hashlib.sha256(value.encode()).hexdigest()
        seen = self._agreed.setdefault(what, [])
        if name not in seen and len(seen) >= ATTEMPTS[what]:
            raise InputError(f"This silo has answered for another {what} already: a new run needs a new start of it.")
        self._agreed[what] = [*seen, name] if name not in seen else seen

    def _agree(self, asked: Message) -> Message:
        self._bind(Setup.of(asked.values.get("setup")))
        work = self._the_work()
        known, cohort = work.cohort.constants(), work.cohort
        start = work.like.numpy(force=True)
        values = {
            "dimension": cohort.dimension, "dtype": str(start.dtype), "convex": known.convex,
            "quadratic": known.quadratic, "tested": self._tested, "start": digest(start) if start.any() else "",
            "samples": int(known.samples[0]), "noisy": known.noisy,
        }  # fmt: skip
        scalars = np.array([known.smoothness[0], known.strong_convexity[0], known.steepest[0], self._probe(work)])
        return Message("answer", values, {"constants": scalars})

    def _probe(self, work: SiloCohort) -> float:
        """The loss at one arbitrary point, by which the data are known again; nothing where it would be a release."""
        if self._private:
            return 0.0
        d = work.cohort.dimension
        return float(work.cohort.evaluate(np.random.default_rng(0).standard_normal(d) / np.sqrt(d)).loss[0])

    @property
    def _tested(self) -> int:
        """How many held-out rows others may hear of: enough of them, or none."""
        rows = self.data.rows[1]
        return rows if rows >= self.file.limits.rows and not self._private else 0

    @property
    def _private(self) -> bool:
        """Whether everything that rows have a part in carries noise."""
        return self.file.privacy.required or (self._setup is not None and bool(self._setup.privacy))

    def _start(self, asked: Message) -> Message:
        self._check_setup(asked.values.get("setup"))
        return Message("answer", {}, {"x": self._the_work().like.numpy(force=True)})

    def _train(self, asked: Message) -> Message:
        values = asked.values
        setup = self._check_setup(values.get("setup"))
        if asked.kind == SPENT and self._private:
            with self._booked(work := self._the_work()):
                return Message("answer", spent(work.cohort))
        if self._private and asked.kind == EVALUATE:
            raise InputError("This silo is private: it releases no scores.")
        answered = self._questions(setup.algorithm)
        if asked.kind not in answered | ({PROJECT} if setup.secure and GRADIENTS in answered else set()):
            raise InputError(f"{setup.algorithm} needs no question {asked.kind!r}: it is not answered.")
        self._check_steps(values)
        if values.get("split") == "test" and not self._tested:
            raise InputError(
                f"This silo has held out fewer than {self.file.limits.rows} rows: it does not test on them."
            )
        named = values.get("vectors", {})
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise InputError("The question does not name its vectors.")
        self._shelf.put({name: array for name, array in asked.arrays.items() if name not in UNNAMED})
        work = self._the_work()
        found = self._shelf.find(named.values())
        vectors = {role: NamedVector(name, work.vector(found[name])) for role, name in named.items()}
        with self._booked(work):
            return work.answer(asked.kind, values, vectors, asked.arrays)

    def _booked(self, work: SiloCohort) -> AbstractContextManager[None]:
        """While something is answered that has to be written down."""
        return nullcontext() if self._books is None else self._books.while_answering(work.cohort)

    def _check_setup(self, name: Any) -> Setup:
        if self._setup is None or self._setup.digest != name:
            raise MissingVectors(["setup"])
        return self._setup

    def _check_steps(self, values: Mapping[str, Any]) -> None:
        plan, limits = values.get("plan"), self.file.limits
        plan = plan if isinstance(plan, dict) else {}
        for steps in (plan.get("steps", 0), values.get("limit", 0)):
            if not isinstance(steps, int) or steps > limits.local_steps:
                raise InputError(f"{steps} local steps are asked for; this silo makes {limits.local_steps} at most.")
        for batch in (plan.get("batch_size"), values.get("batch_size")):
            if batch is not None and not (isinstance(batch, int) and batch >= limits.rows):
                raise InputError(f"A batch of {batch} rows is asked for; this silo answers for {limits.rows} or more.")

    def _check_dimension(self, dimension: int) -> None:
        most = self.file.limits.dimension
        if dimension > most:
            raise InputError(f"A model of {dimension} parameters is larger than the {most} that this silo allows.")

    def _bind(self, setup: Setup) -> None:
        """Take an agreement, if this silo's file allows it."""
        limits = self.file.limits
        if limits.algorithms is not None and setup.algorithm not in limits.algorithms:
            raise InputError(f"This silo takes part in {', '.join(limits.algorithms)}, not in {setup.algorithm}.")
        self._questions(setup.algorithm)
        if self.file.secure.required and not setup.secure:
            raise InputError("This silo sends vectors masked only, and the agreement has no secure sums.")
        if self.file.privacy.required and not setup.privacy:
            raise InputError("This silo takes part with differential privacy only, and the agreement has none.")
        if setup.secure.get("projections") and not self.file.secure.projections:
            raise InputError("This silo does not show its gradient along directions that the coordinator chooses.")
        self._agreed_to("agreement", setup.digest)
        if self._setup is None:
            self._setup, self._work = setup, None
            self._shelf.clear()

    def _questions(self, algorithm: str) -> frozenset[str]:
        """What an algorithm asks; code that is not ours is looked at only where this silo's own file names it."""
        if algorithm not in self._known:
            if ":" in algorithm and algorithm not in (self.file.limits.algorithms or ()):
                raise InputError(f"This silo does not know {algorithm}: limits.algorithms has to name it.")
            kind = algorithm_kind(algorithm, self.file.path.parent, look=objects.glimpse)
            self._known[algorithm] = kind.questions | {EVALUATE}
        return self._known[algorithm]

    def _the_work(self) -> SiloCohort:
        assert self._setup is not None
        if self._work is None:
            if self._setup.privacy:
                self._books = PrivacyLedger(self.file.privacy, self._setup.privacy, self._setup.digest)
            cohort = self._cohort(self._setup)
            if self._books is not None:
                self._own(self._books.open, cohort)
            self._work = SiloCohort(cohort)
        return self._work

    def _cohort(self, setup: Setup) -> Cohort:
        own = self.data.cohort
        if own is None:
            model, schema = self._model(setup), checked_schema(setup.schema)
            self._check_dimension(width(schema) * max(1, getattr(model, "classes", None) or 1))
            ready = self.data.encoded(schema, setup.mean, setup.deviation)
            test = None if ready.test is None else {self.name: ready.test}
            model = model if self._books is None else self._books.private(model)
            own = Cohort({self.name: ready.train}, model, dtype=setup.dtype, test=test)
        self._check_dimension(own.dimension)
        return own

    def _model(self, setup: Setup) -> Any:
        kind = setup.model.get("kind", "linear")
        if kind == "linear":
            return linear(setup.model)
        if kind not in self.file.models:
            raise InputError(f"This silo knows no model {kind!r}; its file lists models under [models].")
        return self._own(objects.load, self.file.path.parent, self.file.models[kind])

    def kept(self) -> bytes:
        """What another process of this site needs to go on: agreements, vectors, secrets of open sums; no rows."""
        values: dict[str, Any] = {"agreed": self._agreed, "stamp": self._stamp()}
        if self._setup is not None:
            values["setup"] = self._setup.values()
        if self._secret is not None:
            values["secrets"] = self._secret.kept()
        return encode(Message("kept", values, self._shelf.last(CARRIED)))

    def _stamp(self) -> list[int]:
        """Tells whether the data's file is still the one that was read."""
        file = self.file.source.file
        if file is None or not file.exists():
            return []
        about = file.stat()
        return [about.st_size, about.st_mtime_ns]

    def restore(self, kept: bytes) -> None:
        """Go on from what `kept` returned in an earlier process; what cannot be read is as if it had been lost."""
        try:
            message = decode(kept, self.file.limits.message_mb * MEGABYTE)
            agreed = message.values.get("agreed")
            if isinstance(agreed, dict):
                self._agreed = {str(what): [str(name) for name in names] for what, names in agreed.items()}
            if "secrets" in message.values:
                self._masking.restore(message.values["secrets"])
            if "setup" in message.values and message.values.get("stamp") == self._stamp():
                self._bind(Setup.of(message.values["setup"]))
                self._shelf.put(message.arrays)
        except InputError as error:
            log.warning("earlier work of this site is lost: %s", error)
