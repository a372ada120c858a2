"""Losses that stay at silos: what sums say about them, and thresholds of somebody's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.boards import GoneError, singles, trained
from cases.refusals import refuses
from runtimes import NAMES, cohort_of
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.transcript import Tampered
from scaffpd.federation import Federation
from scaffpd.federation.own_weights import OwnSums, OwnWeights
from scaffpd.secure.keys import Card, Identity, Masks

OBJECTIVES = [sp.ChiSquare(0.05), sp.ChiSquare(0.1, cap=0.43), sp.Tilted(0.1), sp.QFair(2.0)]


def clients(n, d=4):
    random = np.random.default_rng(n)
    data = []
    for i in range(n):
        X = random.standard_normal((20 + 5 * i, d))
        y = X @ (random.standard_normal(d) + i / n) + random.logistic(size=len(X)) > 0
        data.append((X, y.astype(int)))
    return sp.Cohort(data, sp.Linear("logistic", l2=0.02))


def said(questions, losses, p):
    """All numbers about losses that sums at one point say, as functions of the losses."""
    found = []
    for question in questions:
        if isinstance(question, OwnWeights):
            t = losses - float(question.level)
            found += [part.sum() for part in question.objective._conjugate(t, p)[1:]]
        else:
            found += list(question._numbers(losses, 0 * losses, p)[1].sum(0))
    return np.array(found)


def ranks(objective, n, monkeypatch):
    """How many unknown losses the sums of every point of a run determine; silo 0 knows its own."""
    cohort = clients(n)
    asked = []
    ask = Federation.ask

    def watched(self, question, *given):
        asked.append(question)
        return ask(self, question, *given)

    monkeypatch.setattr(Federation, "ask", watched)
    sp.train(sp.MinimaxSums(objective), sp.SecureAggregation(cohort), 12, 1e-9)
    monkeypatch.undo()
    points = {}
    for question in asked:
        if isinstance(question, OwnWeights | OwnSums):
            points.setdefault(question.at.x.numpy().tobytes(), []).append(question)
    found = []
    for questions in points.values():
        x = questions[0].at.x
        losses = cohort.evaluate(x).loss
        p = objective.weights(n)
        steps = 1e-6 * np.eye(n)[1:]
        rows = [said(questions, losses + s, p) - said(questions, losses - s, p) for s in steps]
        found.append(int(np.linalg.matrix_rank(np.array(rows) / 2e-6, tol=1e-6)))
    return found


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_what_sums_say_about_losses(objective, monkeypatch):
    """With five honest silos, losses can move along a surface that no sum of a point sees; with
    two, both are determined.
    """
    many = ranks(objective, 6, monkeypatch)
    assert len(many) > 3
    assert max(many) < 5
    few = ranks(objective, 3, monkeypatch)
    assert max(few) == 2


def test_a_first_silo_with_a_threshold_of_its_own_is_not_followed():
    """A ν at which others' weights vanish would leave one silo's vector in the sum."""

    def meddle(name, method, federation):
        ask = federation.channel.ask

        def elsewhere(question, chosen):
            if name == "a" and isinstance(question, OwnWeights | OwnSums) and question.at.x.any():
                with torch.no_grad():
                    question.level.add_(1e-3)
            return ask(question, chosen)

        federation.channel.ask = elsewhere
        return method

    found, made, _ = trained(
        singles(lambda names: cohort_of("logistic", names), NAMES),
        sp.MinimaxSums(sp.ChiSquare(0.1, cap=0.43)),
        meddle=meddle,
    )
    for name in ("b", "c", "d", ""):
        assert isinstance(found[name], Tampered | GoneError), found[name]
    assert "masked own_weights terms" not in made["b"].sent  # nobody answered at that ν


def test_nothing_is_in_the_clear():
    found, made, _ = trained(
        singles(lambda names: cohort_of("logistic", names), NAMES),
        sp.MinimaxSums(sp.ChiSquare(0.1, cap=0.43)),
    )
    assert found["b"].status == "converged"
    assert [kind for kind in made["b"].sent if "clear" in kind] == []


def test_a_key_of_small_order_is_refused():
    """With it everybody would know the secret that two silos share."""
    own, other = Identity(), Identity()
    cards = {"a": own.card, "b": other.card}
    for keys, point in (
        (cards, bytes(32)),
        ({**cards, "b": Card(other.card.signs, bytes(32))}, other.card.masks),
    ):
        with refuses("key-unreadable"):
            Masks("a", own).meet(keys, {"b": point})


def test_messages_that_would_take_too_much_memory_are_refused_before_they_are_read():
    with refuses("message-too-long"):
        decode(encode(Message("news")), most=10)
    with refuses("too-many-arrays"):
        decode((2**21).to_bytes(8, "little") + bytes(2**21))
    with refuses("too-many-values"):
        decode(encode(Message("news", {"n": [0] * 600_000})))
