"""Silos that lie with numbers: each a real silo behind a wrapper that changes what it says."""

from __future__ import annotations

import csv

import numpy as np
from deploy_cases import events, is_right, opened

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import InProcess, Message, decode, encode
from scaffpd.run.settings.federation import FederationFile


class Liar:
    """A silo whose answers to some kinds of questions are changed: `lie(arrays, n)` for the n-th of that kind.

    Attributes:
        heard: the kinds of questions, in order.
        lied: how many questions it had heard when it first lied.
    """

    def __init__(self, silo, **lies):
        self.silo = silo
        self.lies = lies
        self.heard = []
        self.lied = None

    def answer(self, question):
        kind = decode(question, 2**31).kind
        self.heard.append(kind)
        answer = decode(self.silo.answer(question), 2**31)
        if kind in self.lies and answer.kind == "answer":
            told = self.lies[kind](
                {k: np.array(v) for k, v in answer.arrays.items()}, self.heard.count(kind)
            )
            if self.lied is None and any(
                not np.array_equal(told[k], v) for k, v in answer.arrays.items()
            ):
                self.lied = len(self.heard)
            answer = Message(answer.kind, answer.values, told)
        return encode(answer)


def loss(change, since=1, until=10**9):
    """A lie about the first scalar from one answer to another."""

    def lie(arrays, n):
        if since <= n <= until:
            arrays["scalars"][0] = change(arrays["scalars"][0])
        return arrays

    return lie


def array(name, change, since=1, until=10**9):
    """A lie about an array."""

    def lie(arrays, n):
        if since <= n <= until:
            arrays[name] = change(arrays[name])
        return arrays

    return lie


def stale(since):
    """The arrays of the answer before, as if nothing had moved."""
    kept = []

    def lie(arrays, n):
        kept.append(arrays)
        return kept[since - 2] if n >= since else arrays

    return lie


def attacked(path, places, who="va", **lies):
    """A run with one liar: the outcome, and the liar."""
    silos = opened(places)
    liar = silos[who] = Liar(silos[who], **lies)
    return coordinate(path, InProcess(silos)), liar


def weights(path, who):
    """The silo's weight in every round; `None` where it was no member."""
    with (FederationFile.read(path).folder / "rounds.csv").open() as file:
        return [float(row[f"weight[{who}]"] or "nan") for row in csv.DictReader(file)]


def is_quarantined(path, places, outcome, test):
    """Named by an event and in the outcome, without weight, and the others have their optimum."""
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places) - {"va"}
    assert "va had been quarantined" in outcome.sentence
    first = next(e for e in events(path) if e["client"] == "va")
    assert first["what"] == "quarantined"
    assert f"({test})" in first["sentence"], first["sentence"]
    assert {e["client"] for e in events(path)} == {"va"}
    assert np.isnan(weights(path, "va")[-1])
