"""The handshake before training: silos agree on features, model and privacy, and describe their losses.

Three short exchanges of names and sums (see `tabular`), and one in which every silo builds its model. No row leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.config.federation import FederationFile
from scaffpd.deploy.membership import Membership
from scaffpd.deploy.messages import Array, Failure, Message, Setup, digest, plain
from scaffpd.deploy.questions import SPENT
from scaffpd.deploy.session import LEAST_ROOM, Session, SiloRequest, answered
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Vector
from scaffpd.models import Linear
from scaffpd.privacy import Private
from scaffpd.tabular.agree import agree, deviation_of, mean_of
from scaffpd.tabular.schema import PREPARED, width

USELESS = "its answer to the agreement cannot be used."

Asking = Callable[[SiloRequest], dict[str, Message]]


@dataclass(frozen=True)
class Facts:
    """What the members said when they took the agreement.

    Attributes:
        constants: of their losses.
        start: x⁰.
        probes: f_i at one arbitrary point: it tells one table from another.
        tested: how many rows each has held out.
    """

    constants: Constants
    start: Array = field(repr=False)
    probes: Vector
    tested: NDArray[np.int64]


def negotiate(
    line: Session,
    members: Sequence[str],
    algorithm: str,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    timeout: float,
    secure: Mapping[str, Any] | None = None,
    privacy: Callable[[int, int], Mapping[str, Any]] | None = None,
) -> Setup:
    """Agree on columns, categories, labels, means and deviations; sums over columns are masked where all sums are.

    `privacy` finds the noise for the fewest rows of a silo and the number of encoded columns.
    """
    ask, masked = _asker(line, members, timeout), dict(secure or {})
    described = {name: reply.values.get("description") for name, reply in ask(SiloRequest("describe")).items()}
    schema = agree(described, bool(settings.get("standardise", True)))
    if schema["task"] == PREPARED:
        return Setup(algorithm, model, schema, np.zeros(0), np.zeros(0), "", masked, _noise(privacy, described, 1))
    totals = _totals(ask, members, masked)
    about = {"schema": schema, "private": privacy is not None}
    mean = mean_of(totals(SiloRequest("totals", about)), schema)
    deviation = deviation_of(totals(SiloRequest("totals", about, arrays={"mean": mean})), mean)
    numbers = str(settings.get("numbers", ""))
    noise = _noise(privacy, described, width(schema))
    return Setup(algorithm, _completed(model, schema), schema, mean, deviation, numbers, masked, noise)


def _noise(
    privacy: Callable[[int, int], Mapping[str, Any]] | None, described: Mapping[str, Any], columns: int
) -> Mapping[str, Any]:
    """The agreement on privacy, for the silo with the fewest rows: its minibatches show the most of a row."""
    return {} if privacy is None else privacy(min(int(silo["train"]) for silo in described.values()), columns)


def _totals(ask: Asking, members: Sequence[str], secure: Mapping[str, Any]) -> Callable[[SiloRequest], Any]:
    """Totals of every silo; or, where they are masked, of all of them together."""
    if not secure:
        return lambda question: {name: reply.arrays for name, reply in ask(question).items()}
    from scaffpd.deploy.secure import secure_totals  # needs a package that plain sums do not

    return secure_totals(ask, members, secure)


def _completed(model: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The model with the number of classes that the silos have together."""
    labels = schema.get("labels")
    classes = len(labels) if isinstance(labels, list) else 0
    if model.get("loss") == "logistic" and classes not in (0, 2):
        raise InputError(f'Logistic loss has two classes, but the silos have {classes} labels: use loss = "softmax".')
    needs_classes = model.get("loss") == "softmax" or (model.get("loss") == "squared" and classes)
    return {**model, "classes": classes} if needs_classes and classes and not model.get("classes") else dict(model)


def settle(line: Session, members: Sequence[str], setup: Setup, timeout: float) -> Facts:
    """Hand every member the agreement; what they say about their losses with it."""
    line.setup = setup
    ask = _asker(line, members, timeout)
    replies = ask(SiloRequest("setup", {"setup": setup.values()}))
    read = {name: _facts(name, reply) for name, reply in replies.items()}
    dimensions = {name: facts["dimension"] for name, facts in read.items()}
    first = members[0]
    for name in members:
        for what in ("dimension", "dtype", "start"):
            if read[name][what] != read[first][what]:
                theirs, ours = plain(read[name][what], 40), plain(read[first][what], 40)
                raise Refusal(name, f"its model has {what} {theirs}, that of {first!r} has {ours}.")
    start = np.zeros(dimensions[first], dtype=read[first]["dtype"])
    if read[first]["start"]:
        start = _asker(line, [first], timeout)(SiloRequest("start"))[first].arrays.get("x", start)
        if start.shape != (dimensions[first],) or digest(start) != read[first]["start"]:
            raise Refusal(first, "it sent another starting point than it had announced.")
    columns = np.array([read[name]["constants"] for name in members])
    known = Constants(
        columns[:, 0], columns[:, 1], all(read[name]["convex"] for name in members), columns[:, 2],
        np.array([read[name]["samples"] for name in members], dtype=np.int64),
        all(read[name]["quadratic"] for name in members), any(read[name].get("noisy") is True for name in members),
    )  # fmt: skip
    line.taken |= {name: read[name]["constants"] for name in members}
    line.most = max(LEAST_ROOM, 3 * 8 * len(start))
    return Facts(known, start, columns[:, 3], np.array([read[name]["tested"] for name in members]))


def _facts(name: str, reply: Message) -> dict[str, Any]:
    """One silo's answer to the agreement, checked."""
    values, constants = reply.values, reply.arrays.get("constants")
    whole = all(type(values.get(key)) is int and 0 <= values[key] < 2**53 for key in ("dimension", "samples", "tested"))
    flags = all(type(values.get(key)) is bool for key in ("convex", "quadratic"))
    words = values.get("dtype") in ("float32", "float64") and isinstance(values.get("start"), str)
    numbers = constants is not None and constants.shape == (4,) and bool(np.all(np.isfinite(constants)))
    if not (whole and flags and words and numbers) or values["samples"] < 1 or values["dimension"] < 1:
        raise Refusal(name, USELESS)
    assert constants is not None
    if constants[:3].min() < 0 or constants.dtype != np.float64:
        raise Refusal(name, USELESS)
    return {**values, "constants": constants}


def _asker(line: Session, members: Sequence[str], timeout: float) -> Asking:
    """Questions that everybody has to answer: before training nothing can stand in for a silo."""

    def ask(question: SiloRequest) -> dict[str, Message]:
        answers = {}
        for name, reply in line.exchange(question, members, timeout).items():
            if isinstance(reply, Failure):
                raise Unanswered(name, reply.reason)
            if reply.kind == "missing":
                raise Unanswered(name, "it was started anew")
            if not answered(reply):
                raise Refusal(name, plain(reply.values.get("sentence")))
            answers[name] = reply
        return answers

    return ask


class Unanswered(Exception):
    """A silo went away while the agreement was made."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Silo {name!r} did not answer: {plain(reason).rstrip('.')}.")
        self.name = name


class Refusal(InputError):
    """A silo does not take the agreement, and says why."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"Silo {name!r} refuses: {sentence}")
        self.name = name


SPARE = 2  # rounds that may be begun anew when a silo leaves


def propose_noise(file: FederationFile, rows: int, columns: int) -> dict[str, Any]:
    """The agreement on privacy: noise for the run's method and rounds, and for a silo of so many rows.

    A silo counts by itself, and stops at its own ε: this only makes the run come out there. Rows are shortened to √d,
    their usual length once columns are standardised, where nothing else is said.
    """
    about = dict(file.privacy)
    share = about.pop("loss_share")
    linear = file.model.get("kind", "linear") == "linear"
    if not linear and "smoothness" not in about:
        raise InputError("[privacy] with a network needs smoothness: how curved a loss is, is a fact about the data.")
    if linear and not {"radius", "smoothness"} & set(about):
        about["radius"] = math.sqrt(columns + bool(file.model.get("intercept")))
    solved = Private.solved(
        Linear(), about["epsilon"], file.algorithm, file.rounds + SPARE, [rows], about["delta"], share
    )
    return {**about, "noise": _scalar(solved.noise), "loss_noise": _scalar(solved.loss_noise)}


def _scalar(value: Any) -> float:
    return float(value[0] if isinstance(value, tuple) else value)


def spent_budgets(roster: Membership, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """(ε, δ) of every silo that answers."""
    replies = roster.ask(SiloRequest(SPENT), list(names))
    found = {name: {what: reply.values.get(what) for what in ("epsilon", "delta")} for name, reply in replies.items()}
    return {name: both for name, both in found.items() if all(isinstance(value, float) for value in both.values())}
