"""The noise of a private run: what a coordinator proposes, and how it tells what was spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scaffpd.deploy.coordinator.federation_file import FederationFile
from scaffpd.deploy.coordinator.line import Question
from scaffpd.deploy.coordinator.roster import Roster
from scaffpd.deploy.protocol.needs import SPENT
from scaffpd.errors import InputError
from scaffpd.models import Linear
from scaffpd.privacy import Private

SPARE = 2  # rounds that may be begun anew when a silo leaves


def proposed(file: FederationFile, rows: int, columns: int) -> dict[str, Any]:
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
    return {**about, "noise": _one(solved.noise), "loss_noise": _one(solved.loss_noise)}


def _one(value: Any) -> float:
    return float(value[0] if isinstance(value, tuple) else value)


def told(roster: Roster, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """(ε, δ) of every silo that answers."""
    replies = roster.ask(Question(SPENT), list(names))
    found = {name: {what: reply.values.get(what) for what in ("epsilon", "delta")} for name, reply in replies.items()}
    return {name: both for name, both in found.items() if all(isinstance(value, float) for value in both.values())}
