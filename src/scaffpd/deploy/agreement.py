"""The handshake before training: silos agree on features, model and privacy, and describe losses.

Three short exchanges of names and sums (see `tabular`), and one in which every silo builds its
model. No row leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from scaffpd.data.tabular.agree import (
    PREPARED,
    agree,
    declared_scale,
    deviation_of,
    mean_of,
    width,
)
from scaffpd.deploy.messages import (
    GARBAGE,
    Array,
    Failure,
    Json,
    JsonMapping,
    Message,
    digest,
    read_values,
)
from scaffpd.deploy.remote import LARGEST_REPLY, Facts, Session, SiloRequest, SiloTrouble
from scaffpd.errors import InputError
from scaffpd.federation import Constants
from scaffpd.models import Linear
from scaffpd.privacy import Private
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.methods import kind_of
from scaffpd.run.settings.model_file import Setup

SPARE = 2  # further rounds that the noise allows for: a round that is repeated after a restart
FACTS = {
    "dimension": PositiveInt,
    "samples": PositiveInt,
    "tested": NonNegativeInt,
    "convex": bool,
    "quadratic": bool,
    "dtype": Literal["float32", "float64"],
    "start": str,
}


def negotiate(session: Session, members: Sequence[str], file: FederationFile) -> Setup:
    """Agree on columns, categories, labels, means and deviations.

    The sums over columns are masked under [secure].
    """
    algorithm = kind_of(file.method)
    answers = session.ask(SiloRequest("describe"), members)
    described: Json = {name: reply.values.get("description") for name, reply in answers.items()}
    schema = agree(described, file.features.standardise, file.features.ranges)
    prepared = schema["task"] == PREPARED
    noise: Json = {}
    if file.privacy:
        noise = propose_noise(file, 1 if prepared else width(schema))
        if "colluding" in noise:  # so that the units leave room for the sum
            rows = [int(silo["train"]) for silo in described.values()]
            noise["together"] = max(rows) * len(file.silos)
    scale = (np.zeros(0), np.zeros(0)) if prepared else declared_scale(schema)
    if scale is None:  # declared ranges need no sums
        totals = _totals(session, members, file)
        about = {"schema": schema, "private": bool(file.privacy)}
        mean = mean_of(totals(SiloRequest("totals", about)), schema)
        squares = totals(SiloRequest("totals", about, arrays={"mean": mean}))
        scale = mean, deviation_of(squares, mean, schema)
    model = file.model.values() if prepared else _completed(file.model.values(), schema)
    return Setup(algorithm, model, schema, *scale, file.masking, noise)


def propose_noise(file: FederationFile, columns: int) -> Json:
    """Find the noise for the run's method and rounds.

    A silo has its own ledger and stops at its own ε; this only makes the run end there. By default
    rows are shortened to √d, their usual length once columns are standardised.
    """
    assert file.privacy is not None
    about = file.privacy.model_dump(exclude_none=True)
    linear = file.model.kind == "linear"
    if not linear and "smoothness" not in about:
        raise InputError(
            "network-without-smoothness",
            "[privacy] with a network needs a public smoothness: a loss's curvature depends on the "
            "data.",
        )
    if linear and not {"radius", "smoothness"} & set(about):
        about["radius"] = math.sqrt(columns + 1)  # and the intercept
    solved = Private.solved(
        Linear(),
        about["epsilon"],
        file.method,
        file.training.rounds + SPARE,
        about["delta"],
    )
    return {**about, "noise": solved.noise, "loss_noise": solved.loss_noise}


def _totals(
    session: Session, members: Sequence[str], file: FederationFile
) -> Callable[[SiloRequest], dict[str, Mapping[str, Array]]]:
    """Return a function that asks for totals: every silo's, or masked those of all together."""
    if file.secure:
        from scaffpd.deploy.secure import secure_totals  # needs the optional package cryptography

        return secure_totals(session, members, file.secure.colluding)
    return lambda request: {
        name: reply.arrays for name, reply in session.ask(request, members).items()
    }


def _completed(model: JsonMapping, schema: JsonMapping) -> Json:
    """Return the model with the number of classes over all silos."""
    labels = schema.get("labels")
    classes = len(labels) if isinstance(labels, list) else 0
    if model.get("loss") == "logistic" and classes not in (0, 2):
        raise InputError(
            "logistic-of-many-labels",
            f"Logistic loss has two classes, but the silos have {classes} labels: use "
            'loss = "softmax".',
        )
    needed = model.get("loss") in ("softmax", "squared") and classes and not model.get("classes")
    return {**model, "classes": classes} if needed else dict(model)


def settle(session: Session, members: Sequence[str], setup: Setup) -> Facts:
    """Send the agreement to every silo and return what they report about their losses."""
    session.setup = setup
    first = members[0]
    replies = session.ask(SiloRequest("setup", {"setup": setup.values()}), members)
    read = {name: _facts(name, replies[name]) for name in members}
    for name in members:
        for what in ("dimension", "dtype", "start"):
            if read[name][what] != read[first][what]:
                raise InputError(
                    "models-differ", f"The models of silos {name!r} and {first!r} differ in {what}."
                )
    start = np.zeros(read[first]["dimension"], dtype=read[first]["dtype"])
    if read[first]["start"]:
        shape = start.shape
        start = session.ask(SiloRequest("start"), [first])[first].arrays.get("x", start)
        if start.shape != shape or digest(start) != read[first]["start"]:
            raise InputError(
                "another-start", f"Silo {first!r} sent another starting point than it announced."
            )
    for name in members:
        session.constants[name] = np.append(read[name]["constants"], read[name]["samples"])
    session.largest = max(LARGEST_REPLY, 3 * 8 * len(start))
    column = {what: np.array([read[name][what] for name in members]) for what in (*FACTS, "noisy")}
    L, mu, steepest, probes = np.array([read[name]["constants"] for name in members]).T
    l2 = setup.model.get("l2")
    ridge = np.repeat(l2, len(start) // len(l2)) if isinstance(l2, list | tuple) else None
    known = Constants(
        L,
        mu,
        bool(column["convex"].all()),
        steepest,
        column["samples"],
        bool(column["quadratic"].all()),
        bool(column["noisy"].any()),
        ridge=ridge,
    )
    return Facts(tuple(members), known, start, probes, column["tested"])


def _facts(name: str, reply: Message) -> Json:
    """Read one silo's answer to the agreement."""
    constants = reply.arrays.get("constants", np.zeros(0))
    useless = SiloTrouble(name, Failure("its answer to the agreement cannot be used", GARBAGE))
    try:
        read = read_values(FACTS, reply.values, "")
    except InputError:
        raise useless from None
    whole = max(read["dimension"], read["samples"], read["tested"]) < 2**53
    numbers = (
        constants.shape == (4,)
        and constants.dtype == np.float64
        and bool(np.isfinite(constants).all())
    )
    if not whole or not numbers or constants[:3].min() < 0:
        raise useless
    return {**read, "constants": constants, "noisy": reply.values.get("noisy") is True}
