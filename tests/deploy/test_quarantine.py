"""Quarantine: what comes after a lie, which answers are garbage and no lie, and what cannot be found out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from deploy_cases import (
    QUICK,
    Faulty,
    Killed,
    cohort,
    encoded,
    events,
    is_right,
    model_of,
    opened,
    rough,
)
from hostile_cases import Liar, array, attacked, is_quarantined, loss, weights
from test_faults import LIES, SCAFF_PD

import scaffpd as sp
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import Failure, InProcess, Message, decode, encode
from scaffpd.deploy.session import Session, SiloRequest
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile

pytestmark = pytest.mark.usefixtures("fake_clock")


def federation(folder, silos=3, **how):
    return rough(folder, silos, **how)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lie", ["nan", "inf", "shape", "format"])
def test_malformed_answers_are_garbage_and_no_crime(tmp_path, lie):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    transport = Faulty(places, {9: [("lie", "va", LIES[lie])]})
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert "va" not in outcome.members
    assert events(path)[0]["what"] == "garbage"
    assert "quarantined" not in {e["what"] for e in events(path)}


@pytest.mark.parametrize("where", [0, 3])
def test_absurd_constants_are_noticed_before_the_first_round(tmp_path, where):
    path, places = federation(tmp_path, more=QUICK)

    def claim(arrays, n):
        arrays["constants"][where] *= 1e10
        return arrays

    outcome, liar = attacked(path, places, setup=claim)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places) - {"va"}
    assert ("(length of rows)", "(loss at zero)")[where // 3] in events(path)[0]["sentence"]
    assert "gradients" not in liar.heard


def test_more_convex_than_smooth_is_a_contradiction(tmp_path):
    path, places = federation(tmp_path, more=QUICK)
    outcome, _ = attacked(
        path, places, setup=array("constants", lambda c: np.array([c[0], 2 * c[0], *c[2:]]))
    )
    assert set(outcome.members) == set(places) - {"va"}
    assert "(constants)" in events(path)[0]["sentence"]


def test_a_flat_or_steep_claim_about_the_loss_gives_itself_away(tmp_path):
    for i, scale in enumerate((0.01, 0.0)):
        path, places = federation(tmp_path / str(i), more=QUICK)
        claim = array(
            "constants", lambda c, scale=scale: np.array([scale * (c[0] - 0.03) + 0.03, *c[1:]])
        )
        outcome, _ = attacked(path, places, setup=claim)
        assert set(outcome.members) == set(places) - {"va"}


@pytest.mark.parametrize("kind", ["FedAvg", "Scaffold"])
def test_methods_without_losses_see_absurd_updates(tmp_path, kind):
    change = {
        '[objective]\nkind = "ChiSquare"\nrho = 0.1\n': f'[algorithm]\nkind = "{kind}"\n',
        "rounds = 500\ntol = 1e-6": "rounds = 12",
    }
    path, places = federation(tmp_path, replacing=change, more=QUICK)
    outcome, _ = attacked(path, places, local_updates=array("d", lambda d: 1e9 * (1 + d), 3))
    assert (outcome.status, outcome.rounds) == ("round limit", 12)
    assert [e["what"] for e in events(path)][:1] == ["quarantined"]
    assert cohort(path, places).evaluate(model_of(path)).loss.max() < np.log(2)


def test_a_quarantined_silo_is_not_asked_after_a_resume_either(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    silos = opened(places)
    silos["va"] = Liar(silos["va"], gradients=array("c", np.negative, 3))

    class Crashing(InProcess):
        count = 0

        def ask(self, questions, timeout):
            self.count += 1
            if self.count > 20:
                raise Killed
            return super().ask(questions, timeout)

    with pytest.raises(Killed):
        coordinate(path, Crashing(silos))
    assert [e["what"] for e in events(path)] == ["quarantined", "dropped"]
    outcome, again = attacked(path, places)  # honest by now: that comes too late
    is_quarantined(path, places, outcome, "consistency")
    assert set(again.heard) == {"hello"}
    path.write_text(path.read_text().replace("tol = 1e-3", "tol = 1e-9"))
    later, again = attacked(path, places)
    assert later.rounds > outcome.rounds
    assert set(later.members) == set(places) - {"va"}
    assert set(again.heard) == {"hello"}


def test_a_liar_may_leave_too_few(tmp_path):
    path, places = federation(tmp_path / "a", more=QUICK.replace("quorum = 2", "quorum = 3"))
    outcome, _ = attacked(path, places, gradients=array("c", np.negative, 2))
    assert (outcome.status, outcome.final) == ("paused", False)
    assert "va is quarantined" in outcome.sentence
    path, places = federation(tmp_path / "b", more=QUICK + 'missing = "pause"\n')
    outcome, _ = attacked(path, places, gradients=array("c", np.negative, 2))
    assert (outcome.status, outcome.final) == ("paused", False)
    assert outcome.sentence.startswith("Silo 'va' is quarantined.")


def test_two_liars_among_four(tmp_path):
    path, places = federation(tmp_path, 4, more=QUICK)
    silos = opened(places)
    silos["va"] = Liar(silos["va"], gradients=array("c", np.negative, 2))
    silos["hungarian"] = Liar(silos["hungarian"], gradients=loss(lambda f: f + 0.2, 4))
    outcome = coordinate(path, InProcess(silos))
    is_right(path, places, outcome)
    assert set(outcome.members) == {"cleveland", "switzerland"}
    assert [e["client"] for e in events(path) if e["what"] == "quarantined"] == ["va", "hungarian"]


def offset(amount):
    """A constant on top of every loss that is ever told: a convex function like the true one."""
    setup = array("constants", lambda c: c + np.array([0.0, 0.0, 0.0, amount]))
    return {
        "setup": setup,
        "gradients": loss(lambda f: f + amount),
        "evaluate": loss(lambda f: f + amount),
    }


@pytest.mark.parametrize("cap", [None, 0.4])
def test_a_constant_offset_is_no_contradiction_of_numbers_and_a_cap_bounds_its_weight(
    tmp_path, cap
):
    """Targets of a regression are of any size. Losses of labels are not: see tests/security/test_lies.py."""
    line = "" if cap is None else f"cap = {cap}\n"
    change = {"rho = 0.1\n": f"rho = 0.1\n{line}", '"logistic"': '"squared"'}
    path, places = federation(tmp_path, replacing=change, more=QUICK)
    for place in places.values():
        place.write_text(place.read_text().replace('"disease"', '"age"\ntask = "regression"'))
    outcome, _ = attacked(path, places, **offset(1e4))
    assert outcome.status == "converged"
    assert events(path) == []
    share = weights(path, "va")[-1]
    assert share == pytest.approx(1.0 if cap is None else cap, abs=1e-9)
    rows, model = encoded(path, places)
    clients = sp.Cohort({name: rows[name].train for name in places}, model)
    objective = FederationFile.read(path).method.objective
    told = clients.evaluate(model_of(path)).loss + 1e4 * (np.array(list(places)) == "va")
    assert objective.maximizer(told)[list(places).index("va")] == pytest.approx(share, abs=1e-9)


def test_a_loss_that_is_said_not_to_be_convex_ends_the_certificate_in_a_sentence(tmp_path):
    path, places = federation(tmp_path, more=QUICK)

    class Denying(Liar):
        def answer(self, question):
            told = decode(super().answer(question), 2**31)
            values = {**told.values, "convex": False} if "convex" in told.values else told.values
            return encode(Message(told.kind, values, told.arrays))

    silos = opened(places)
    silos["va"] = Denying(silos["va"])
    outcome = coordinate(path, InProcess(silos))
    assert outcome.status == "failed"
    assert "not known to be convex" in outcome.sentence


def test_a_cap_is_a_quorum(tmp_path):
    """Weights of at most 0.3 take four silos: without one of them the run waits, and does not fail."""
    path, places = federation(
        tmp_path / "a", 4, replacing={"rho = 0.1\n": "rho = 0.1\ncap = 0.3\n"}, more=QUICK
    )
    outcome, _ = attacked(path, places, gradients=array("c", np.negative, 2))
    assert (outcome.status, outcome.final) == ("paused", False)
    assert outcome.sentence.startswith(
        "Fewer than 4 silos are there (cleveland, hungarian, switzerland; va is quar"
    )
    path, places = federation(
        tmp_path / "b", 4, replacing={"rho = 0.1\n": "rho = 0.1\ncap = 0.2\n"}, more=QUICK
    )
    outcome, liar = attacked(path, places)
    assert (outcome.status, liar.heard) == ("failed", [])
    assert outcome.sentence == "ChiSquare has cap=0.2, but 4 clients need at least 0.25 (1/4)."


@pytest.mark.parametrize(
    "text", ["outlier = 2", "outlier = -1.0", 'outlier = "much"', "outlier = inf"]
)
def test_outlier_has_to_leave_room_for_honest_differences(tmp_path, text):
    path, _ = federation(tmp_path, more=QUICK + text + "\n")
    with pytest.raises(InputError, match="outlier"):
        FederationFile.read(path)


class Echo:
    """A silo that says what it is told to say."""

    def __init__(self, reply):
        self.reply = reply
        self.seen = []

    def answer(self, question):
        self.seen.append(question)
        return self.reply(decode(question, 2**31), self.seen)


def said(number, name="va"):
    return encode(Message("answer", {"question": number, "silo": name}))


def exchanged(reply, times=3):
    """What `Session` makes of the replies to some questions in a row."""
    line = Session(InProcess({"va": Echo(reply)}))
    line.sites["va"] = "va"
    return [line.exchange(SiloRequest("losses"), ["va"], 1.0)["va"] for _ in range(times)]


def test_a_line_takes_no_answer_twice():
    """Old bytes sent again are an answer to another question, however right they were."""
    kept = []

    def replay(question, seen):
        kept.append(said(question.values["question"]))
        return kept[0]

    first, *others = exchanged(replay)
    assert isinstance(first, Message)
    for reply in others:
        assert isinstance(reply, Failure)
        assert reply.what == "garbage"
        assert reply.reason == "an answer to another question"


def test_a_line_takes_no_answer_to_an_earlier_question():
    """One round late: every answer is new, and to the question before."""

    def late(question, seen):
        earlier = decode(seen[max(len(seen) - 2, 0)], 2**31)
        return said(earlier.values["question"])

    first, *others = exchanged(late)
    assert isinstance(first, Message)
    assert [reply.reason for reply in others] == ["an answer to another question"] * 2


def test_no_two_questions_have_the_same_number():
    echo = Echo(lambda question, seen: said(question.values["question"]))
    line = Session(InProcess({"va": echo}))
    line.sites["va"] = "va"
    for _ in range(50):
        line.exchange(SiloRequest("losses"), ["va"], 1.0)
    numbers = [decode(question, 2**31).values["question"] for question in echo.seen]
    assert len(set(numbers)) == 50
    assert all(a != b for a, b in pairwise(numbers))


def test_old_bytes_in_a_run_are_named_garbage(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)

    class Replaying(Liar):
        def answer(self, question):
            told = super().answer(question)
            if self.heard[-1] == "gradients" and self.heard.count("gradients") >= 3:
                return self.old
            self.old = told
            return told

    silos = opened(places)
    silos["va"] = Replaying(silos["va"])
    outcome = coordinate(path, InProcess(silos))
    is_right(path, places, outcome)
    assert "va" not in outcome.members
    first = events(path)[0]
    assert (first["client"], first["what"]) == ("va", "garbage")
    assert "an answer to another question" in first["sentence"]
