"""One silo that lies in its own numbers and terms: everybody ends in one sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases.silos import OBJECTIVE, federation, mostly_long, run
from scaffpd.deploy.refusals import CANNOT, SENTENCES
from scaffpd.deploy.transcript import Session
from scaffpd.federation.questions import Scores, Vectors
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile
from scaffpd.training.cohort import LocalChannel

LIAR = "va"
SIZES = [1e308, -1e308, np.inf, np.nan, 1e51, 1e10, -1e10, 1e-308, 0.0, -1.0]
WAYS = {
    "fair": "",
    "ScaffPD": "local_steps = 2\n",
    "AFL": "dual_rate = 0.1\nlocal_rate = 0.1\n",
    "DeltaFL": 'local_rate = 0.1\nweights = "uniform"\ntail = 0.9\n',
    "Scaffold": "local_rate = 0.1\n",
}
WHEN = ("training", "scores")


def lying(monkeypatch, value, when):
    """Let one silo's every number and every term of a sum be this one."""
    ask = LocalChannel.ask

    def ask_liar(self, question, chosen):
        reply = ask(self, question, chosen)
        if self.names != (LIAR,) or (when == "scores") != isinstance(question, Scores):
            return reply

        def filled(part):
            return lambda *given: torch.full_like(part(*given).double(), value)

        numbers = {name: filled(part) for name, part in reply.numbers.items()}
        vectors = {
            name: Vectors(filled(part.sum), filled(part.each), None, part.shape)
            for name, part in reply.vectors.items()
        }
        return type(reply)(numbers, vectors)

    monkeypatch.setattr(LocalChannel, "ask", ask_liar)
    post = Session._numbers

    def as_it_is(self, kind, body, size):
        if (
            self.name == LIAR
            and kind.startswith("clear")
            and (when == "scores") == ("evaluate" in kind)
        ):
            body = np.full(size // 8, value, "<f8").tobytes()  # an honest session posts NaN
        return post(self, kind, body, size)

    monkeypatch.setattr(Session, "_numbers", as_it_is)


def method(kind):
    named = f'[algorithm]\nkind = "{kind}"\n{WAYS[kind]}'
    own = kind in ("Scaffold", "DeltaFL")
    changes = {OBJECTIVE: named if own else OBJECTIVE + named}
    ending = {"rounds = 500\ntol = 1e-6": "rounds = 4"}
    return {} if kind == "fair" else changes | ending


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", mostly_long(WAYS, "fair"))
@pytest.mark.parametrize("sizes", mostly_long([SIZES, SIZES[::3]], SIZES[::3]), ids=["all", "some"])
def test_a_lie_ends_in_one_sentence(tmp_path, fake_clock, monkeypatch, sizes, kind, when, caplog):
    """Ten numbers each: none brings an exception, and those in the clear name who said them."""
    known = {*SENTENCES.values()} - {SENTENCES[CANNOT]}
    for number, value in enumerate(sizes):
        path, places = federation(tmp_path / str(number), 3, method(kind))
        with monkeypatch.context() as patch:
            lying(patch, value, when)
            outcome, _ = run(path, places)
        assert "Traceback" not in caplog.text, (value, caplog.text[-3000:])
        folder = FederationFile.read(path).folder
        if outcome.final:
            found = RunRecord.read(folder)
            assert found.main.rounds == outcome.rounds
        else:
            said = ("posted a number that", "too large or not finite", "is not finite at the start")
            fixed = any(sentence in outcome.sentence for sentence in known)
            assert fixed or any(words in outcome.sentence for words in said), (value, outcome)
        clear = when == "scores" or kind in ("ScaffPD", "AFL", "DeltaFL")
        if clear and abs(value) > 1e50 and np.isfinite(value):
            assert f"Silo {LIAR!r} posted a number" in outcome.sentence or outcome.final
