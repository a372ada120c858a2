"""Silos that die, hang, restart and lie; coordinators that are killed: never a wrong result."""

from __future__ import annotations

import csv
import itertools
import zipfile

import numpy as np
import pytest
from deploy_cases import (
    QUICK,
    Faulty,
    Killed,
    changed,
    cohort,
    events,
    is_right,
    model_of,
    mostly_long,
    progress,
    rough,
    run,
)

from scaffpd.deploy.coordinate import coordinate, reopen
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.session import SiloEvent
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile

SCAFF_PD = {
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 10\n\n[objective]',
    "1e-6": "1e-3",
}
pytestmark = pytest.mark.usefixtures("fake_clock")
_UNDISTURBED = {}


def federation(folder, replacing=None, more=""):
    """Three of the hospitals: two are left when one has gone."""
    return rough(folder, 3, replacing=replacing, more=more)


def undisturbed(folder, change):
    """The outcome and the model of a run in which nothing happens; made once for every federation."""
    key = repr(change)
    if key not in _UNDISTURBED:
        path, places = federation(folder, replacing=change, more=QUICK)
        _UNDISTURBED[key] = run(path, places)[0], model_of(path)
    return _UNDISTURBED[key]


@pytest.mark.parametrize(
    ("who", "moment"),
    mostly_long(itertools.product(["cleveland", "va"], [6, 7, 8, 9, 12, 14]), ("va", 12)),
)
def test_a_silo_that_dies_is_dropped_and_the_others_get_their_optimum(tmp_path, who, moment):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    outcome, _ = run(path, places, {moment: [("kill", who)]})
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places) - {who}
    assert who in outcome.sentence
    assert f"converged after {outcome.rounds} rounds" in outcome.sentence
    made = [line["round"] for line in progress(path) if "round" in line]
    assert made == list(range(made[0], outcome.rounds + 1))  # of all parts
    assert [e["what"] for e in events(path) if e["client"] == who][:1] == ["absent"]
    assert (
        any(e["what"] == "dropped" for e in events(path))
        or not DeployedRun(FederationFile.read(path).folder).segments()[1:]
    )


@pytest.mark.parametrize("moment", mostly_long(range(6, 18), 17))
def test_a_silo_may_die_at_any_moment_up_to_the_last(tmp_path, moment):
    path, places = federation(tmp_path, more=QUICK)
    outcome, transport = run(path, places, {moment: [("kill", "va")]})
    is_right(path, places, outcome)
    assert transport.count >= 17
    if set(outcome.members) == set(places):  # it had converged before
        assert outcome.sentence.endswith("va did not answer at the end.")
        table = (FederationFile.read(path).folder / "clients.csv").read_text().splitlines()
        *_, last = csv.DictReader(table)
        assert last["test_loss"] == ""
        for split in ("train", "test"):  # it had told its numbers of rows
            assert (
                int(last[f"{split}_rows"])
                == cohort(path, places).evaluate(model_of(path), split).counts[-1]
            )


@pytest.mark.parametrize(
    ("kind", "sampled"),
    mostly_long(
        [("AFL", None), *itertools.product(["FedAvg", "Scaffold", "DRFA", "QFFL"], [None, 1, 4])],
        *[("FedAvg", 1), ("DRFA", None)],
    ),
)
def test_uncertified_methods_go_on_without_a_silo(tmp_path, kind, sampled):
    drawn = "" if sampled is None or kind == "AFL" else f"clients_per_round = {sampled}\n"
    change = {
        '[objective]\nkind = "ChiSquare"\nrho = 0.1\n': f'[algorithm]\nkind = "{kind}"\n{drawn}',
        "rounds = 500\ntol = 1e-6": "rounds = 12",
    }
    path, places = federation(tmp_path, replacing=change, more=QUICK)
    outcome, _ = run(path, places, {11: [("kill", "va")]})
    assert (outcome.status, outcome.rounds) == ("round limit", 12)
    assert np.isfinite(model_of(path)).all()
    losses = cohort(path, places).evaluate(model_of(path)).loss
    assert losses.max() < np.log(2)  # better than knowing nothing


def test_one_silo_that_is_asked_alone_and_lies_does_not_end_the_run(tmp_path):
    change = {
        '[objective]\nkind = "ChiSquare"\nrho = 0.1\n': '[algorithm]\nkind = "FedAvg"\nclients_per_round = 1\n',
        "rounds = 500\ntol = 1e-6": "rounds = 12",
    }
    path, places = rough(tmp_path, replacing=change, more=QUICK)
    outcome, _ = run(
        path, places, {8: [("lie", name, LIES["nan"]) for name in ("va", "cleveland")]}
    )
    assert outcome.status == "round limit"
    assert np.isfinite(model_of(path)).all()


REJOINING = {
    "samples": lambda answer: answer.replace(b'"samples": ', b'"samples": 9999999999999999999999'),
    "dimension": lambda answer: answer.replace(b'"dimension": ', b'"dimension": 9'),
    "convex": lambda answer: answer.replace(b'"convex": true', b'"convex": null'),
    "nan": changed(constants=lambda c: c * np.nan),
    "negative": changed(constants=lambda c: -c),
}


@pytest.mark.parametrize("lie", mostly_long(REJOINING, "samples"))
def test_garbage_in_answer_to_the_agreement_when_a_silo_rejoins(tmp_path, lie):
    path, places = federation(
        tmp_path, replacing={**SCAFF_PD, "1e-6": "1e-8"}, more=QUICK + "max_age = 1\n"
    )
    script = {8: [("kill", "va")], 16: [("restart", "va"), ("lie", "va", REJOINING[lie])]}
    outcome, _ = run(path, places, script)
    assert outcome.status == "converged", outcome
    assert "va" not in outcome.members


def test_single_precision_answers_of_another_format_are_not_taken(tmp_path):
    path, places = federation(
        tmp_path, replacing=SCAFF_PD, more=QUICK + '[features]\nnumbers = "float32"\n'
    )
    wide = changed(c=lambda c: c.astype(np.float64), d=lambda d: d.astype(np.float64))
    outcome, _ = run(path, places, {9: [("lie", "va", wide)]})
    assert outcome.final
    assert outcome.status != "failed"
    assert "va" not in outcome.members


@pytest.mark.parametrize("moment", mostly_long([3, 6, 7, 12], 7))
def test_policy_pause_never_goes_on_without_somebody(tmp_path, moment):
    path, places = federation(
        tmp_path, replacing=SCAFF_PD, more=QUICK + 'missing = "pause"\nmax_age = 0\n'
    )
    outcome, _ = run(path, places, {moment: [("kill", "va")]})
    assert (outcome.status, outcome.final) == ("paused", False)
    with_one_away, _ = run(path, places, {1: [("kill", "hungarian")]})
    assert (with_one_away.status, with_one_away.final) == ("paused", False)
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places)


def test_a_dropped_silo_that_is_back_counts_for_the_quorum(tmp_path):
    more = QUICK.replace("start_timeout = 0.2", "start_timeout = 20.0")
    path, places = federation(
        tmp_path, replacing={**SCAFF_PD, "1e-6": "1e-8"}, more=more + "max_age = 0\n"
    )
    script = {8: [("kill", "va")], 14: [("kill", "hungarian"), ("restart", "va")]}
    outcome, _ = run(path, places, script)
    assert outcome.status == "converged"
    assert set(outcome.members) == {"cleveland", "va"}
    assert [e["what"] for e in events(path)].count("back") == 1


def test_data_that_change_in_the_middle_of_a_run_are_noticed(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    file = places["va"].parent / "patients.csv"
    transport = Faulty(places)

    def swap(site):
        file.write_text("\n".join(file.read_text().splitlines()[:90]) + "\n")
        transport.restart(site)

    transport.swap = swap
    transport.script[12] = [("swap", "va")]
    outcome = coordinate(path, transport)
    assert any("data are not those that the run began with" in e["sentence"] for e in events(path))
    assert "changed" in {e["what"] for e in events(path) if e["client"] == "va"}
    is_right(path, places, outcome)
    assert set(outcome.members) == {*places} - {"va"}


def test_a_silo_that_greets_but_never_works_costs_less_and_less(tmp_path):
    path, places = federation(
        tmp_path, replacing={**SCAFF_PD, "1e-6": "1e-10"}, more=QUICK + "max_age = 1\n"
    )

    def mute(answer):
        return answer if b'"values": {"version"' in answer else b""

    outcome, _ = run(path, places, {9: [("lie", "va", mute)]})
    assert outcome.final
    assert "va" not in outcome.members
    rounds = [int(e["round"]) for e in events(path) if e["what"] == "back"]
    assert len(rounds) <= 5
    assert sorted(np.diff(rounds)) == list(np.diff(rounds))  # the waits grow


def test_what_silos_say_is_printable_in_tables(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)

    def rude(answer):
        message = decode(answer, 2**31)
        return encode(
            Message("failed", {**message.values, "sentence": "\x1b[2Jgone\n9,va,back,all is well"})
        )

    run(path, places, {9: [("lie", "va", rude)]})
    assert all(text.isprintable() for e in events(path) for text in e.values())


def test_silos_that_fail_at_every_question_end_the_run(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)

    def failing(answer):
        message = decode(answer, 2**31)
        if message.kind != "answer" or not message.arrays:  # they greet as ever
            return answer
        return encode(Message("failed", {**message.values, "sentence": "MemoryError"}))

    outcome, _ = run(path, places, {9: [("lie", name, failing) for name in places]})
    assert not outcome.final
    assert outcome.status == "paused"
    assert len([e for e in events(path) if e["what"] == "absent"]) <= 3 * len(places)


@pytest.mark.parametrize("moment", mostly_long([1, 2, 3, 4, 5], 3))
def test_a_silo_that_dies_while_the_agreement_is_made(tmp_path, moment):
    path, places = federation(tmp_path, more=QUICK)
    outcome, _ = run(path, places, {moment: [("kill", "hungarian")]})
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places) - {"hungarian"}


@pytest.mark.parametrize("moment", mostly_long(range(7, 15, 3), 10))
def test_a_silo_that_comes_back_within_the_age_is_part_of_the_result(tmp_path, moment):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK + "max_age = 20\n")
    outcome, _ = run(path, places, {moment: [("kill", "va")], moment + 5: [("restart", "va")]})
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places)
    assert [e["what"] for e in events(path)] == ["absent", "back"]
    lines = [line for line in progress(path) if "round" in line]
    assert any(line["absent"] == ["va"] for line in lines)
    assert all(line["certificate"] is None for line in lines if line["absent"])


def test_a_dropped_silo_that_comes_back_later_joins_a_new_segment(tmp_path):
    path, places = federation(
        tmp_path, replacing={**SCAFF_PD, "1e-6": "1e-9"}, more=QUICK + "max_age = 1\n"
    )
    outcome, _ = run(path, places, {8: [("kill", "va")], 16: [("restart", "va")]})
    assert outcome.status == "converged"
    assert set(outcome.members) == set(places)
    assert [e["what"] for e in events(path)] == ["absent", "dropped", "back", "joined"]
    segments = DeployedRun(FederationFile.read(path).folder).segments()
    assert [len(s.members) for s in segments] == [3, 2, 3]
    is_right(path, places, outcome)


@pytest.mark.parametrize("moment", mostly_long(range(2, 26, 2), 8))
def test_a_restarted_silo_costs_an_exchange_and_changes_no_number(tmp_path, moment):
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD, more=QUICK)
    outcome, _ = run(path, places, {moment: [("restart", "va"), ("restart", "cleveland")]})
    expected, x = undisturbed(tmp_path / "b", SCAFF_PD)
    assert outcome.status == expected.status == "converged"
    np.testing.assert_array_equal(model_of(path), x)
    assert events(path) == []


@pytest.mark.parametrize(
    ("kind", "moment"),
    mostly_long(
        itertools.product(["Fair", "ScaffPD", "Scaffold"], [1, 3, 5, 6, 7, 9, 12, 15]),
        *[("Fair", 9), ("ScaffPD", 12), ("Scaffold", 6)],
    ),
)
def test_a_killed_coordinator_goes_on_with_the_same_numbers(tmp_path, kind, moment):
    change = {} if kind == "Fair" else SCAFF_PD
    if kind == "Scaffold":
        change = {
            '[objective]\nkind = "ChiSquare"\nrho = 0.1\n': '[algorithm]\nkind = "Scaffold"\n',
            "tol = 1e-6": "tol = 0",
            "500": "8",
        }
    path, places = federation(tmp_path / "a", replacing=change, more=QUICK)
    with pytest.raises(Killed):
        run(path, places, {moment: [("crash",)]})
    outcome, _ = run(path, places, {})
    expected, x = undisturbed(tmp_path / "b", change)
    assert outcome.rounds == expected.rounds
    assert outcome.certificate == expected.certificate
    np.testing.assert_array_equal(model_of(path), x)


@pytest.mark.long
def test_a_coordinator_killed_again_and_again(tmp_path):
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD, more=QUICK)
    expected, x = undisturbed(tmp_path / "b", SCAFF_PD)
    random = np.random.default_rng(0)
    kills = 0
    outcome = None
    while outcome is None:
        try:
            outcome, _ = run(path, places, {int(random.integers(1, 11)): [("crash",)]})
        except Killed:
            kills += 1
        assert kills < 200
    assert kills > 5
    np.testing.assert_array_equal(model_of(path), x)
    assert outcome.certificate == expected.certificate


def test_below_the_quorum_the_run_pauses_and_goes_on_later(tmp_path):
    more = QUICK.replace("quorum = 2", "quorum = 3")
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD, more=more)
    outcome, _ = run(path, places, {9: [("kill", "va")]})
    assert outcome.status == "paused"
    assert not outcome.final
    assert "Fewer than 3 silos" in outcome.sentence
    assert "after round" in outcome.sentence
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    np.testing.assert_array_equal(model_of(path), undisturbed(tmp_path / "b", SCAFF_PD)[1])


def test_a_run_that_waits_goes_on_by_itself_when_a_silo_is_back(tmp_path):
    more = QUICK.replace("quorum = 2", "quorum = 3").replace(
        "start_timeout = 0.2", "start_timeout = 30.0"
    )
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=more)
    outcome, _ = run(path, places, {9: [("kill", "va")], "look 4": [("restart", "va")]})
    is_right(path, places, outcome)
    assert [e["what"] for e in events(path)] == ["absent", "back"]


def test_policy_pause_waits_for_everybody(tmp_path):
    path, places = federation(
        tmp_path, replacing=SCAFF_PD, more=QUICK + 'missing = "pause"\nmax_age = 2\n'
    )
    outcome, _ = run(path, places, {9: [("kill", "va")]})
    assert (outcome.status, outcome.final) == ("paused", False)
    assert "'va' has given no answer for 3 rounds" in outcome.sentence
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places)


def test_too_few_at_the_start(tmp_path):
    path, places = federation(tmp_path, more=QUICK.replace("quorum = 2", "quorum = 3"))
    outcome, _ = run(path, places, {1: [("kill", "va"), ("kill", "hungarian")]})
    assert (outcome.status, outcome.final) == ("paused", False)
    outcome, _ = run(path, places)
    is_right(path, places, outcome)


LIES = {
    "garbage": lambda answer: b"\x80\x04garbage",
    "nothing": lambda answer: b"",
    "cut": lambda answer: answer[: len(answer) // 2],
    "nan": changed(c=lambda c: c * np.nan, d=lambda d: d * np.nan),
    "inf": changed(scalars=lambda s: s + np.inf),
    "shape": changed(c=lambda c: c[:-1], d=lambda d: np.append(d, 0.0)),
    "matrix": changed(c=lambda c: c[:, None], d=lambda d: d[None]),
    "format": changed(c=lambda c: c.astype(np.int64), d=lambda d: d.astype(np.int64)),
}


@pytest.mark.parametrize("lie", mostly_long(LIES, "matrix"))  # others: test_quarantine, test_wire
def test_a_silo_that_returns_garbage_is_left_out_and_not_asked_for_ever(tmp_path, lie):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    outcome, _ = run(path, places, {9: [("lie", "va", LIES[lie])]})
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places) - {"va"}
    assert {e["client"] for e in events(path)} == {"va"}


def test_a_replayed_answer_is_not_taken(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    kept = []

    def replay(answer):
        kept.append(answer)
        return kept[0]

    outcome, _ = run(path, places, {9: [("lie", "va", replay)]})
    is_right(path, places, outcome)
    assert any("another question" in e["sentence"] for e in events(path))


def test_an_answer_in_another_silos_name_is_not_taken(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    transport = Faulty(places)
    transport.script[9] = [
        ("lie", "va", lambda answer: answer.replace(b'"silo": "va"', b'"silo": "xx"'))
    ]
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert any("in the name of 'xx'" in e["sentence"] for e in events(path))


def test_a_second_site_of_the_same_name_is_ignored(tmp_path):
    path, places = federation(tmp_path, more=QUICK)
    transport = Faulty(places)
    transport.silos["intruder"] = transport.silos["va"]
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places)


def test_strangers_are_not_asked(tmp_path):
    path, places = federation(tmp_path, replacing={', "va"]': "]"}, more=QUICK)
    outcome, transport = run(path, places)
    assert set(outcome.members) == set(places) - {"va"}
    assert {question for site, question, _ in transport.log if site == "va"} == {
        question for site, question, _ in transport.log[:3] if site == "va"
    }


def test_a_silo_that_is_always_too_slow_for_work_is_dropped_though_it_says_hello(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)

    def busy(answer):
        return answer if len(answer) < 400 else b""  # greetings pass

    outcome, _ = run(path, places, {9: [("lie", "va", busy)]})
    is_right(path, places, outcome)
    assert "va" not in outcome.members


def test_everybody_gone(tmp_path):
    path, places = federation(tmp_path, more=QUICK)
    outcome, _ = run(path, places, {8: [("kill", name) for name in places]})
    assert (outcome.status, outcome.final) == ("paused", False)
    is_right(path, places, run(path, places)[0])


def test_divergence_is_called_by_its_name_and_nobody_is_blamed(tmp_path):
    steps = (
        '[algorithm.steps]\nkind = "Fixed"\ntau = 1e9\nsigma = 1.0\nlocal_rate = 1e6\n\n[objective]'
    )
    text = f'[algorithm]\nkind = "ScaffPD"\nlocal_steps = 10\n{steps}'
    path, places = federation(
        tmp_path, replacing={"[objective]": text, '"logistic"': '"squared"'}, more=QUICK
    )
    outcome, _ = run(path, places)
    assert outcome.status == "diverged"
    assert events(path) == []


def test_another_algorithm_needs_another_folder(tmp_path):
    path, places = federation(tmp_path, more=QUICK.replace("quorum = 2", "quorum = 3"))
    assert run(path, places, {9: [("kill", "va")]})[0].status == "paused"
    text = path.read_text()
    for old, new in (
        ("[objective]", '[algorithm]\nkind = "ScaffPD"\n[objective]'),
        ("l2 = 0.03", "l2 = 0.1"),
    ):
        path.write_text(text.replace(old, new))
        outcome, _ = run(path, places)
        assert outcome.status == "failed"
        assert "is of another " in outcome.sentence
        assert "use a new folder" in outcome.sentence
    path.write_text(text)
    is_right(path, places, run(path, places)[0])


@pytest.mark.parametrize("missing", ["pause", "drop"])
def test_a_silo_whose_data_changed_is_named_and_the_policy_says_who_goes_on(tmp_path, missing):
    path, places = federation(tmp_path, more=QUICK + 'missing = "pause"\n')
    assert run(path, places, {12: [("kill", "va")]})[0].status == "paused"
    file = places["va"].parent / "patients.csv"
    good = file.read_text()
    lines = good.splitlines()
    file.write_text(
        "\n".join([lines[0], lines[1][:-1] + str(1 - int(lines[1][-1])), *lines[2:]]) + "\n"
    )
    path.write_text(path.read_text().replace('"pause"', f'"{missing}"'))
    outcome, _ = run(path, places)
    changed = [e["client"] for e in events(path) if e["what"] == "changed"]
    assert changed == ["va"]
    if missing == "drop":
        assert set(outcome.members) == {*places} - {"va"}
    else:
        assert (outcome.status, outcome.final) == ("paused", False)
        assert "'va' has other data than the run began with" in outcome.sentence
        file.write_text(good)  # put back: the run goes on with everybody
        outcome, _ = run(path, places)
        assert set(outcome.members) == set(places)
    is_right(path, places, outcome)


def test_a_finished_run_stays_finished_and_goes_on_to_a_smaller_tolerance(tmp_path):
    """A supervisor asks before it starts an engine, and waits for an outcome; the coordinator asks once more."""
    path, places = federation(tmp_path, more=QUICK)
    first, _ = run(path, places)
    folder = DeployedRun(FederationFile.read(path).folder)
    assert reopen(FederationFile.read(path), folder) == first
    again, transport = run(path, places)
    assert again == first
    assert transport.count == 0
    path.write_text(path.read_text().replace("tol = 1e-3", "tol = 1e-7"))
    assert reopen(FederationFile.read(path), folder) is None  # whoever asks first, the run goes on
    assert not folder.final()
    again, _ = run(path, places)
    assert again.rounds > first.rounds
    assert again.certificate <= 1e-7 < first.certificate


def test_another_federation_leaves_the_outcome_and_the_model_of_a_finished_run_alone(tmp_path):
    path, places = federation(tmp_path, more=QUICK)
    first, _ = run(path, places)
    kept = FederationFile.read(path).folder
    text = path.read_text()
    before = {file.name: file.read_bytes() for file in kept.iterdir() if file.is_file()}
    for damage in ('"rho = 0.2"', "{", '{"about": 3}'):
        path.write_text(text.replace("rho = 0.1", "rho = 0.2") if "rho" in damage else text)
        if "rho" not in damage:
            (kept / "settings.json").write_text(damage)
        outcome, transport = run(path, places)
        assert (outcome.status, transport.count) == ("failed", 0)
        assert "is of another" in outcome.sentence or "settings.json" in outcome.sentence
        after = {file.name: file.read_bytes() for file in kept.iterdir() if file.is_file()}
        assert {name for name in after if after[name] != before.get(name)} <= {"settings.json"}
    (kept / "settings.json").write_bytes(before["settings.json"])
    path.write_text(text)
    again, transport = run(path, places)
    assert (again, transport.count) == (first, 0)


@pytest.mark.parametrize("cut", ["3,clev", "3,cleveland,quaran", "\0"])
def test_a_quarantine_outlives_a_damaged_table_of_events(tmp_path, cut):
    """The quarantine is in progress.jsonl, flushed to disk; events.csv is written whole, and anew with every event."""
    path, places = federation(tmp_path, more=QUICK)
    lie = {7: [("lie", "va", changed(c=lambda v: v * 1e9))]}
    with pytest.raises(Killed):
        run(path, places, {**lie, 11: [("crash",)]})
    folder = DeployedRun(FederationFile.read(path).folder)
    assert folder.quarantined() == {"va"}
    table = folder.path / "events.csv"
    good = events(path)
    text = table.read_text()
    table.write_text(text[: text.index("quarantined") + 6] + cut)
    assert folder.quarantined() == {"va"}
    outcome, _ = run(path, places)
    assert set(outcome.members) == {*places} - {"va"}
    assert events(path)[: len(good)] == good
    table.write_text(text[: text.index("quarantined") + 6] + cut)
    folder.event(SiloEvent(outcome.rounds, "cleveland", "absent", "It is away."))
    assert events(path)[: len(good)] == good
    assert events(path)[-1]["client"] == "cleveland"
    with (folder.path / "progress.jsonl").open("a") as file:
        file.write(
            '{"event": {"round": 1, "silo": "hungarian", "what": "quarantined", "sentence": ""}}\n'
        )  # of 0.1
    assert folder.quarantined() == {"va", "hungarian"}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("segments.json", '{"segments": [{"number": 0}]}'),
        ("constants.json", '{"cleveland": 3}'),
        ("spread.json", '{"cleveland": "x"}'),
        ("settings.json", '{"about": 3}'),
        ("outcome.json", '{"final": true}'),
        ("progress.jsonl", '{"event": 3}\n'),
        ("progress.jsonl", '{"event": {"round": 3}}\n'),
        ("progress.jsonl", "3\n"),
        ("progress.jsonl", "{\n"),
    ],
)
def test_damaged_files_of_a_run_are_named(tmp_path, name, damage):
    """JSON that can be parsed and makes no sense is a failure in a sentence, for the run and for its status."""
    path, places = federation(tmp_path, more=QUICK)
    with pytest.raises(Killed):
        run(path, places, {14: [("crash",)]})
    folder = DeployedRun(FederationFile.read(path).folder)
    (folder.path / name).write_text(damage)
    outcome, _ = run(path, places)
    assert outcome.status == "failed"
    assert name in outcome.sentence or "is of another" in outcome.sentence
    if name in ("outcome.json", "progress.jsonl"):
        with pytest.raises(InputError, match=name):
            folder.status()


def test_the_coordinator_may_be_the_first_to_see_a_smaller_tolerance(tmp_path):
    path, places = federation(tmp_path, more=QUICK)
    first, _ = run(path, places)
    path.write_text(path.read_text().replace("tol = 1e-3", f"tol = {first.certificate / 2}"))
    assert run(path, places)[0].rounds > first.rounds


def test_a_checkpoint_that_cannot_be_read_ends_the_run_with_its_name(tmp_path):
    """The failure is an outcome, not an exception: on FLARE the job would be handed in again and again."""
    path, places = federation(tmp_path, more=QUICK)
    with pytest.raises(Killed):
        run(path, places, {14: [("crash",)]})
    file = FederationFile.read(path).folder / "segment-0.npz"
    file.write_bytes(file.read_bytes()[:500])
    outcome, _ = run(path, places)
    assert (outcome.status, outcome.final) == ("failed", True)
    assert "segment-0.npz' is not a readable scaffpd checkpoint; remove it" in outcome.sentence
    file.unlink()
    is_right(path, places, run(path, places)[0])


def test_a_flipped_byte_of_a_checkpoint_is_found_before_silos_work_for_a_new_segment(tmp_path):
    """The losses so far are needed at the very end only; with other members the segment does not go on."""
    path, places = federation(tmp_path, more=QUICK)
    with pytest.raises(Killed):
        run(path, places, {14: [("crash",)]})
    file = FederationFile.read(path).folder / "segment-0.npz"
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as found:
        losses = found.read("history.losses.npy")
    last = whole.index(losses) + len(losses) - 1
    file.write_bytes(whole[:last] + bytes([whole[last] ^ 0xFF]) + whole[last + 1 :])
    outcome, _ = run(path, places, {1: [("kill", "va")]})
    assert (outcome.status, outcome.final) == ("failed", True)
    assert "segment-0.npz' is not a readable scaffpd checkpoint; remove it" in outcome.sentence
    assert not (file.parent / "segment-1.npz").exists()


def test_rows_that_a_private_silo_has_lost_are_noticed_by_their_number(tmp_path):
    """Its constants say nothing of its rows: without the count the run would end over "another problem"."""
    noisy = {
        "rounds = 500\ntol = 1e-6\n": "rounds = 6\n",
        "[objective]": '[algorithm]\nkind = "ScaffPD"\n\n[objective]',
    }
    path, places = federation(tmp_path, replacing=noisy, more="[privacy]\nepsilon = 8\n" + QUICK)
    for place in places.values():
        place.write_text(
            place.read_text() + '\n[privacy]\nepsilon = 20\ndelta = 1e-5\ncolumns = "exact"\n'
        )
    with pytest.raises(Killed):
        run(path, places, {12: [("crash",)]})
    table = places["va"].parent / "patients.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-5]) + "\n")
    outcome, _ = run(path, places)
    assert outcome.members == ("cleveland", "hungarian")
    assert [event["client"] for event in events(path) if event["what"] == "changed"] == ["va"]
