"""The handshake before training: silos agree on features, model and privacy, and describe their losses.

Three short exchanges of names and sums (see `tabular`), and one in which every silo builds its model. No row leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from scaffpd.data.tabular.agree import (
    PREPARED,
    agree,
    declared_scale,
    deviation_of,
    longest_square,
    mean_of,
    spread_of,
)
from scaffpd.data.tabular.encode import expanded_names, with_expansion
from scaffpd.deploy.messages import (
    REFUSED,
    Facts,
    Failure,
    Message,
    Unanswered,
    Unusable,
    digest,
    plain,
    read_values,
)
from scaffpd.deploy.session import LACKS, LARGEST_REPLY, TOGETHER, Session, SiloRequest
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Federation, Vector
from scaffpd.models import Linear
from scaffpd.objectives import Objective
from scaffpd.privacy import Private
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.model_file import Setup, linear
from scaffpd.run.settings.reading import kind_of, with_usual
from scaffpd.study.choosing import KAPPAS, L2S, Choice, search

GOOD_ENOUGH = 1e-4  # the certified gap to stop at: models that folds tell apart differ by much more
SPARE = 2  # how often a trial may restart when a silo leaves
FACTS = {
    "dimension": PositiveInt,
    "samples": PositiveInt,
    "tested": NonNegativeInt,
    "convex": bool,
    "quadratic": bool,
    "dtype": Literal["float32", "float64"],
    "start": str,
}

Ask = Callable[[SiloRequest], dict[str, Message]]


@dataclass(frozen=True)
class SiloTrials:
    """Train silos without a fold of their rows; every fold and every set of strengths has its own agreement."""

    setup: Setup  # the agreement on columns
    file: FederationFile  # the coordinator's settings
    federation: Callable[
        [Setup], Federation
    ]  # sends an agreement to the silos and returns them as a federation

    @property
    def folds(self) -> int:
        """Number of folds K."""
        assert self.file.choosing is not None
        return self.file.choosing.folds

    @property
    def model(self) -> Linear:
        """Linear model without strengths."""
        return linear(self.setup.model)

    def scale(self) -> float:
        """Mean square of a column: one once standardised, and assumed to be one otherwise."""
        return 1.0

    def clients(self, fold: int, l2: float, kappa: float) -> Federation:
        """Return the silos without a fold."""
        strength = None if math.isinf(kappa) else kappa
        trial = {"fold": fold, "folds": self.folds, "seed": self.file.training.seed}
        return self.federation(self.setup.with_model(l2=l2, strength=strength, **trial))

    def method(self, goal: Objective) -> Any:
        """Return the run's own method."""
        return replace(self.file.method, objective=goal)

    def tolerance(self, clients: Federation, l2: float) -> float | None:
        """Return a rough tolerance; `None` if the method certifies nothing."""
        return GOOD_ENOUGH if self.file.training.tol is not None and l2 > 0 else None

    def choice(self) -> Choice:
        """Choose the strengths by folds; try several of the objective if the file gives none."""
        about = self.file.choosing
        goal = self.file.method.objective
        seed = self.file.training.seed
        assert about is not None
        l2 = about.l2 or L2S
        strength = about.strength or KAPPAS
        given = self.file.objective
        free = with_usual(given, self.file.path) != given
        return search(self, goal, l2, strength, about.by, seed, about.budget, free)


class Refusal(InputError):
    """A silo refuses the agreement and says why; `waits` if a person there has to consent first."""

    def __init__(self, name: str, sentence: str, waits: bool = False) -> None:
        super().__init__("silo-refuses", f"Silo {name!r} refuses{' for now' * waits}: {sentence}")
        self.name = name
        self.waits = waits


def negotiate(session: Session, members: Sequence[str], file: FederationFile) -> Setup:
    """Agree on columns, categories, labels, means and deviations; mask the sums over columns under [secure]."""
    ask = _asker(session, members, file.faults.timeout)
    algorithm = kind_of(file.method)
    described: dict[str, Any] = {
        n: reply.values.get("description") for n, reply in ask(SiloRequest("describe")).items()
    }
    schema = agree(described, file.features.standardise, file.features.ranges)
    schema = with_expansion(schema, file.features.expand)
    prepared = schema["task"] == PREPARED
    noise: dict[str, Any] = {}
    if file.privacy:
        noise = propose_noise(file, 1 if prepared else len(expanded_names(schema)))
        if "colluding" in noise:  # so that the units leave room for the sum
            rows = [int(silo["train"]) for silo in described.values()]
            noise["together"] = max(rows) * len(file.silos)
    if prepared:
        return Setup(
            algorithm,
            file.model.values(),
            schema,
            np.zeros(0),
            np.zeros(0),
            "",
            file.masking,
            noise,
        )
    scale = declared_scale(schema)
    numbers = file.features.numbers or ""
    if scale is None:  # declared ranges need no sums
        totals = _totals(ask, members, file)
        about = {"schema": schema, "private": bool(file.privacy)}
        mean = mean_of(totals(SiloRequest("totals", about)), schema)
        squares = totals(SiloRequest("totals", about, arrays={"mean": mean}))
        scale = mean, deviation_of(squares, mean)
        session.spread = spread_of(squares, scale[1]) if schema["standardise"] else {}
    return Setup(
        algorithm,
        _completed(file.model.values(), schema),
        schema,
        *scale,
        numbers,
        file.masking,
        noise,
    )


def propose_noise(file: FederationFile, columns: int) -> dict[str, Any]:
    """Find the noise for the run's method and rounds.

    A silo keeps its own ledger and stops at its own ε; this only makes the run end there. By default rows are shortened
    to √d, their usual length once columns are standardised.
    """
    assert file.privacy is not None
    about = file.privacy.model_dump(exclude_none=True)
    linear = file.model.kind == "linear"
    share = about.pop("loss_share")
    if not linear and "smoothness" not in about:
        raise InputError(
            "privacy-network-public",
            "[privacy] with a network needs a public smoothness: a loss's curvature depends on the data.",
        )
    if linear and not {"radius", "smoothness"} & set(about):
        about["radius"] = math.sqrt(columns + file.model.intercept)
    solved = Private.solved(
        Linear(),
        about["epsilon"],
        file.method,
        file.training.rounds + SPARE,
        about["delta"],
        share,
    )
    return {**about, "noise": solved.noise, "loss_noise": solved.loss_noise}


def _totals(ask: Ask, members: Sequence[str], file: FederationFile) -> Callable[[SiloRequest], Any]:
    """Return a function that asks for the totals of every silo; for those of all together if they are masked."""
    if not file.secure:
        return lambda request: {name: reply.arrays for name, reply in ask(request).items()}
    from scaffpd.deploy.secure import secure_totals  # needs the optional package cryptography

    return secure_totals(ask, members, file)


def _completed(model: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model with the number of classes over all silos."""
    labels = schema.get("labels")
    classes = len(labels) if isinstance(labels, list) else 0
    if model.get("loss") == "logistic" and classes not in (0, 2):
        raise InputError(
            "logistic-loss-two",
            f'Logistic loss has two classes, but the silos have {classes} labels: use loss = "softmax".',
        )
    needed = model.get("loss") in ("softmax", "squared") and classes and not model.get("classes")
    return {**model, "classes": classes} if needed else dict(model)


def settle(session: Session, members: Sequence[str], setup: Setup, timeout: float) -> Facts:
    """Send the agreement to every member and return what they report about their losses."""
    session.setup = setup
    first = members[0]
    replies = _asker(session, members, timeout)(SiloRequest("setup", {"setup": setup.values()}))
    read = {name: _facts(name, replies[name]) for name in members}
    for name in members:
        for what in ("dimension", "dtype", "start"):
            if read[name][what] != read[first][what]:
                theirs = plain(read[name][what], 40)
                ours = plain(read[first][what], 40)
                raise Refusal(name, f"its model has {what} {theirs}, that of {first!r} has {ours}.")
    start = np.zeros(read[first]["dimension"], dtype=read[first]["dtype"])
    if read[first]["start"]:
        shape = start.shape
        reply = _asker(session, [first], timeout)(SiloRequest("start"))[first]
        start = reply.arrays.get("x", start)
        if start.shape != shape or digest(start) != read[first]["start"]:
            raise Refusal(first, "it sent another starting point than it had announced.")
    session.constants |= {
        name: np.append(read[name]["constants"], read[name]["samples"]) for name in members
    }
    session.largest = max(LARGEST_REPLY, 3 * 8 * len(start))
    column = {what: np.array([read[name][what] for name in members]) for what in (*FACTS, "noisy")}
    L, mu, steepest, probes = np.array([read[name]["constants"] for name in members]).T
    known = Constants(
        L,
        mu,
        bool(column["convex"].all()),
        steepest,
        column["samples"],
        bool(column["quadratic"].all()),
        bool(column["noisy"].any()),
    )
    return Facts(
        known,
        start,
        probes,
        column["tested"],
        row_squares(session, members, setup, column["samples"]),
    )


def row_squares(
    session: Session, members: Sequence[str], setup: Setup, samples: NDArray[np.int64]
) -> Vector:
    """Bound the mean ‖a‖² of every silo's rows, intercept included; infinite where nothing is agreed.

    The bound comes from declared ranges, or else from the silo's sums over columns, which it sent before any question.
    Masked sums bound every silo by the sum over all of them.
    """
    schema = setup.schema
    most = np.full(len(members), np.inf)
    if setup.model.get("kind", "linear") != "linear" or schema.get("expand", "") not in ("", "rff"):
        return most
    total = session.spread.get(TOGETHER, np.inf)
    spread = np.array([session.spread.get(name, total) for name in members])
    most = spread / samples if schema["task"] != PREPARED else most
    if schema.get("declared"):
        most = np.full(len(members), longest_square(dict(schema)))
    return most + bool(setup.model.get("intercept")) + 2 * (schema.get("expand") == "rff")


def _facts(name: str, reply: Message) -> dict[str, Any]:
    """Read one silo's answer to the agreement."""
    constants = reply.arrays.get("constants", np.zeros(0))
    useless = "its answer to the agreement cannot be used."
    try:
        read = read_values(FACTS, reply.values, useless)
    except InputError:
        raise Unusable(name, useless) from None
    whole = max(read["dimension"], read["samples"], read["tested"]) < 2**53
    numbers = (
        constants.shape == (4,)
        and constants.dtype == np.float64
        and bool(np.isfinite(constants).all())
    )
    if not whole or not numbers or constants[:3].min() < 0:
        raise Unusable(name, useless)
    return {**read, "constants": constants, "noisy": reply.values.get("noisy") is True}


def _asker(session: Session, members: Sequence[str], timeout: float) -> Ask:
    """Return a function that asks all members and fails if one does not answer."""

    def ask(request: SiloRequest) -> dict[str, Message]:
        answers = {}
        for name, reply in session.exchange(request, members, timeout).items():
            if isinstance(reply, Failure):
                if reply.what == REFUSED:
                    raise Refusal(name, reply.reason, reply.waits)
                raise Unanswered(name, "it was started anew" if reply is LACKS else reply.reason)
            answers[name] = reply
        return answers

    return ask
