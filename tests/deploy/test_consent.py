"""Consent: what a run asks for is shown and stored, and a silo goes by what its file and its people
have decided.
"""

from __future__ import annotations

import json
import os
import pwd

import pytest
from typer.testing import CliRunner

from cases.silos import QUICK, SCAFF_PD, Faulty, events, is_right, opened, rough, run, secured
from scaffpd.cli import app
from scaffpd.cli.silo import show_requests
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import ASKING, Message, decode, encode
from scaffpd.deploy.silo.records import audit, decide, decisions, request_name, requests
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.silo import SiloFile

pytestmark = pytest.mark.usefixtures("fake_clock")


def federation(folder, silos=2, more=QUICK):
    return rough(folder, silos, more=more)


def with_consent(places, name, text):
    places[name].write_text(places[name].read_text() + f"\n[consent]\n{text}\n")
    return SiloFile.read(places[name])


def asked(file):
    return requests(file)[-1]


def test_without_a_table_everything_is_as_before_and_the_request_is_stored(tmp_path):
    path, places = federation(tmp_path)
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    found = asked(SiloFile.read(places["va"]))
    assert found["asks"] == FederationFile.read(path).request()
    assert "age" in found["columns"]
    assert found["state"] == 'taken, as consent.policy = "always" says'


def test_a_person_agrees_and_the_run_goes_on(tmp_path):
    path, places = federation(tmp_path)
    file = with_consent(places, "va", 'policy = "ask"')
    outcome, transport = run(path, places)
    assert (outcome.status, outcome.final) == ("paused", False)
    assert "refuses for now: Nobody at this silo has agreed" in outcome.sentence
    assert [event.what for event in events(path)] == ["waits"]
    kinds = {
        decode(q, 2**20).kind
        for site, q, a in transport.log
        if site == "va" and decode(a, 2**20).kind == "answer"
    }
    assert kinds == {"hello"}  # neither names of columns nor sums have left
    granted = CliRunner().invoke(
        app, ["silo", "consent", str(places["va"]), "--grant", asked(file)["request"][:8]]
    )
    assert granted.exit_code == 0, granted.output
    assert "granted by" in granted.output
    outcome, _ = run(path, places)
    is_right(path, places, outcome)


def test_a_decision_is_about_the_whole_name_of_a_request_and_has_the_account_that_made_it(tmp_path):
    path, places = federation(tmp_path)
    file = with_consent(places, "va", 'policy = "ask"')
    name = request_name(FederationFile.read(path).request())
    decide(
        file.consents, name[:20], True, "dpo"
    )  # another request could be made with as many of its digits
    assert f"(request {name[:20]})" in run(path, places)[0].sentence
    words = ["silo", "consent", str(places["va"]), "--grant", name[:12]]
    done = CliRunner().invoke(app, words, env={"LOGNAME": "mallory"})
    assert f"Request {name[:20]}\n" in done.output
    found = decisions(file.consents)[name]
    assert (found["granted"], found["by"]) == (True, pwd.getpwuid(os.getuid()).pw_name)
    is_right(path, places, run(path, places)[0])


def test_a_consent_that_is_withdrawn_during_a_run_stops_the_next_answer(tmp_path):
    path, places = federation(tmp_path)
    file = with_consent(places, "va", 'policy = "ask"')
    run(path, places)
    name = asked(file)["request"]
    decide(file.consents, name, True, "dpo")

    class Midway(Faulty):
        def stop(self):
            decide(file.consents, name, False, "dpo")

    transport = Midway(places, {12: [("stop",)]})
    outcome = coordinate(path, transport)
    assert outcome.status == "failed"
    assert f"({name[:20]}) was withdrawn" in outcome.sentence
    assert any("withdrawn" in why for why in audit(file.audit)["refused"])
    later = [
        (decode(q, 2**20).kind, decode(a, 2**20).kind)
        for site, q, a in transport.log
        if site == "va"
    ]
    after = later[[answer for _, answer in later].index("refused") :]
    assert all(answer == "refused" or question == "hello" for question, answer in after)
    decide(file.consents, name, True, "dpo")
    is_right(path, places, run(path, places)[0])


def test_with_masks_and_a_restart_too(tmp_path):
    path, places = secured(tmp_path, 3, replacing={**SCAFF_PD, "500": "3"})
    names = [*places]
    files = [with_consent(places, name, 'policy = "ask"') for name in names]
    assert "Nobody at this silo has agreed" in run(path, places)[0].sentence
    for file in files:
        decide(file.consents, request_name(FederationFile.read(path).request()), True, "dpo")
    outcome, _ = run(path, places, {14: [("restart", names[0])]})
    assert outcome.rounds == 3, outcome
    assert all(own["asks"]["secure"] for own in map(asked, files))


# --- a coordinator that does not keep to what it has asked for


QUESTIONS = []


def settled(tmp_path):
    """A silo that has consented to a run, and the questions of that run, which is made once."""
    path, places = federation(tmp_path)
    file = with_consent(places, "va", 'policy = "ask"')
    decide(file.consents, request_name(FederationFile.read(path).request()), True, "dpo")
    if not QUESTIONS:
        _, transport = run(path, places)
        QUESTIONS.extend(question for site, question, _ in transport.log if site == "va")
    return places["va"], [decode(question, 2**20) for question in QUESTIONS]


def put(silo, message, **values):
    return decode(
        silo.answer(encode(Message(message.kind, {**message.values, **values}, message.arrays))),
        2**20,
    )


def fresh(tmp_path, file):
    for name in ("answered.jsonl", "audit.jsonl"):
        (file.parent / name).unlink(missing_ok=True)
    return Silo.open(file)


def test_an_agreement_on_something_else_is_refused(tmp_path):
    file, questions = settled(tmp_path)
    setup = next(q for q in questions if q.kind == "setup")
    for change, word in (
        ({"algorithm": "ScaffPD"}, "method"),
        ({"model": {**setup.values["setup"]["model"], "loss": "squared"}}, "model"),
        ({"secure": {"colluding": 1}}, "masks"),
        ({"privacy": {"epsilon": 9.0}}, "ε"),
    ):
        reply = put(fresh(tmp_path, file), setup, setup={**setup.values["setup"], **change})
        assert f"another {word}" in reply.values["sentence"], reply
    assert put(fresh(tmp_path, file), setup).kind == "answer"
    asks = {**setup.values["asks"], "rounds": 10_000}
    assert put(fresh(tmp_path, file), setup, asks=asks).values["waits"] is True
    for bad in (
        3,
        {},
        {**setup.values["asks"], "rounds": "many"},
        {**setup.values["asks"], "objective": "x" * 10**5},
    ):
        reply = put(fresh(tmp_path, file), setup, asks=bad)
        assert reply.kind == "refused"
        assert "waits" not in reply.values


def test_an_agreement_has_no_setting_of_the_model_that_was_not_asked_for(tmp_path):
    file, questions = settled(tmp_path)
    setup = next(q for q in questions if q.kind == "setup")
    own = setup.values["setup"]["model"]
    asks = {
        **setup.values["asks"],
        "model": {name: value for name, value in own.items() if name != "kind"},
    }
    decide(SiloFile.read(file).consents, request_name(asks), True, "dpo")
    assert (
        put(fresh(tmp_path, file), setup, asks=asks).kind == "answer"
    )  # a model without a kind is linear
    for more in ({"kind": "small"}, {"depth": 3}):
        agreed = {**setup.values["setup"], "model": {**own, **more}}
        reply = put(fresh(tmp_path, file), setup, asks=asks, setup=agreed)
        assert "another model" in reply.values.get("sentence", ""), reply


def test_columns_that_cannot_be_read_are_refused_and_nothing_of_them_is_kept(tmp_path):
    file, questions = settled(tmp_path)
    setup = next(q for q in questions if q.kind == "setup")
    agreed = setup.values["setup"]
    silo = fresh(tmp_path, file)
    for schema in ({"columns": [{}]}, {"columns": 5}):
        assert put(silo, setup, setup={**agreed, "schema": schema}).kind == "refused"
    assert put(silo, setup).kind == "answer"
    odd = {**agreed["schema"], "task": "prepared", "dimension": 3, "columns": 5}
    assert put(fresh(tmp_path, file), setup, setup={**agreed, "schema": odd}).kind in (
        "refused",
        "failed",
    )


def test_what_is_too_long_is_refused_and_the_next_process_goes_on(tmp_path):
    path, places = federation(tmp_path)
    asks = {**FederationFile.read(path).request(), "objective": "x" * 2_000_000}
    silo = Silo.open(places["va"])
    describe = Message("describe", {"question": "1"})
    assert "too long" in put(silo, describe, asks=asks).values["sentence"]
    put(silo, Message("x" * 2_000_000, {}))
    assert put(Silo.open(places["va"]), describe).kind == "answer"
    file = SiloFile.read(places["va"])
    assert requests(file) == []
    found = audit(file.audit)
    assert (found["whole"], found["lines"]) == (True, 3)
    silo.audit.note(
        describe,
        Message("answer"),
        0,
        {"run": "x" * 2**20, "algorithm": "", "masked": 0, "private": 0},
    )
    assert (
        put(Silo.open(places["va"]), describe).kind == "answer"
    )  # a line of any length is read back
    found = audit(file.audit)
    assert (found["whole"], found["lines"]) == (True, 5)


NO_NOISE = {
    "no δ": (1.0, None),
    "large δ": (1.0, 2.0),
    "no ε": (0.0, 1e-5),
    "huge ε": (10**400, 1e-5),
}


@pytest.mark.parametrize(("epsilon", "delta"), NO_NOISE.values(), ids=NO_NOISE)
def test_noise_that_makes_no_sense_is_no_request(tmp_path, epsilon, delta):
    path, places = federation(tmp_path)
    asks = {**FederationFile.read(path).request(), "epsilon": epsilon, "delta": delta}
    reply = put(Silo.open(places["va"]), Message("describe", {"question": "1"}), asks=asks)
    assert "ε" in reply.values["sentence"]
    assert requests(SiloFile.read(places["va"])) == []
    time = "2026-01-01T00:00:00"  # a line of a log that has it is shown all the same
    show_requests(
        [{"asks": asks, "state": "", "columns": [], "request": "0", "first": time, "last": time}]
    )


def test_no_question_is_answered_before_the_request(tmp_path):
    file, questions = settled(tmp_path)
    silo = fresh(tmp_path, file)
    for question in questions:
        values = {name: value for name, value in question.values.items() if name != "asks"}
        reply = decode(silo.answer(encode(Message(question.kind, values, question.arrays))), 2**20)
        assert reply.kind == (
            "answer"
            if question.kind == "hello"
            else "refused"
            if question.kind in ASKING
            else "missing"
        )
        assert not reply.arrays


def test_more_points_than_the_rounds_need_are_refused(tmp_path):
    file, questions = settled(tmp_path)
    silo = fresh(tmp_path, file)
    setup, asked_for = (
        next(q for q in questions if q.kind == kind) for kind in ("setup", "gradients")
    )
    assert put(silo, setup).kind == "answer"
    silo.guard.promised = 3
    for k in range(3):
        moved = asked_for.arrays["x"] + 1e-3 * (k + 1)
        assert put(silo, Message("gradients", asked_for.values, {"x": moved})).kind == "answer"
    reply = put(silo, Message("gradients", asked_for.values, {"x": moved + 1}))
    assert "Limit reached" in reply.values["sentence"]


def test_the_rounds_asked_for_leave_room_for_an_honest_run(tmp_path):
    """Points per round, measured: a run has one a round, and one where it begins."""
    path, places = federation(tmp_path)
    outcome, transport = run(path, places)
    silo = transport.silos["va"]
    points = silo.guard.journal.known(silo.guard.run, "point")
    assert len(points) <= outcome.rounds + 2


# --- files


def test_a_file_of_consents_that_cannot_be_read_is_no_consent(tmp_path):
    path, places = federation(tmp_path)
    file = with_consent(places, "va", 'policy = "ask"')
    decide(file.consents, request_name(FederationFile.read(path).request()), True, "dpo")
    with file.consents.open("a") as half:
        half.write('{"request": ')
    outcome, _ = run(path, places)
    assert "'consents.jsonl', cannot be read" in outcome.sentence
    (own,) = requests(file)  # the operator sees the request, and decides anew
    decide(file.consents, own["request"], True, "dpo")
    assert [json.loads(line)["by"] for line in file.consents.read_text().splitlines()] == [
        "dpo",
        "dpo",
    ]
    assert run(path, places)[0].status == "converged"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grant", "ff"], "not the beginning of one request"),
        (["--grant", "a", "--revoke", "b"], "not both"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, arguments, words):
    _, places = federation(tmp_path)
    done = CliRunner().invoke(app, ["silo", "consent", str(places["va"]), *arguments])
    assert done.exit_code != 0
    assert words in str(done.exception) + done.output
    with pytest.raises(InputError, match="did you mean 'ask'"):
        with_consent(places, "va", 'policy = "asc"')


def test_the_command_lists_what_is_asked(tmp_path):
    path, places = federation(tmp_path)
    file = with_consent(places, "va", 'policy = "ask"')
    assert (
        "No run has asked" in CliRunner().invoke(app, ["silo", "consent", str(places["va"])]).output
    )
    run(path, places)
    shown = " ".join(CliRunner().invoke(app, ["silo", "consent", str(places["va"])]).output.split())
    for words in (
        "waits for consent at this site",
        "ChiSquare",
        "Fair, 500 rounds",
        "in the clear",
        "hospitals, with cleveland",
    ):
        assert words in shown
    read = json.loads(
        CliRunner().invoke(app, ["silo", "consent", str(places["va"]), "--json"]).output
    )
    assert read[0]["request"] == asked(file)["request"]
    name = read[0]["request"]
    assert (
        CliRunner().invoke(app, ["silo", "consent", str(places["va"]), "--revoke", name]).exit_code
        == 0
    )
    assert asked(file)["state"].startswith("withdrawn by")
    assert opened(places)  # the file is whole
