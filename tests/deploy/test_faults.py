"""Silos that die, hang, restart and send garbage; coordinators that are killed: never a wrong
result.
"""

from __future__ import annotations

import itertools
import zipfile

import numpy as np
import pytest

from cases.refusals import refuses
from cases.silos import (
    OBJECTIVE,
    QUICK,
    Faulty,
    Killed,
    changed,
    cohort,
    events,
    is_right,
    model_of,
    mostly_long,
    rough,
    run,
)
from scaffpd.deploy.coordinate import coordinate, reopen
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.run.record import RunRecord
from scaffpd.run.settings.federation import FederationFile

SCAFF_PD = {
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 10\n\n[objective]',
    "1e-6": "1e-3",
}
pytestmark = pytest.mark.usefixtures("fake_clock")
_UNDISTURBED = {}


def federation(folder, replacing=None, more=QUICK):
    return rough(folder, 3, replacing=replacing, more=more)


def folder_of(path):
    return DeployedRun(FederationFile.read(path).folder)


def undisturbed(folder, change):
    """Outcome and model of a run in which nothing happens; made once for every federation."""
    key = repr(change)
    if key not in _UNDISTURBED:
        path, places = federation(folder, replacing=change)
        _UNDISTURBED[key] = run(path, places)[0], model_of(path)
    return _UNDISTURBED[key]


# --- silos


@pytest.mark.parametrize("moment", mostly_long(range(2, 26, 2), 8))
def test_a_restarted_silo_changes_no_number(tmp_path, moment):
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD)
    outcome, _ = run(path, places, {moment: [("restart", "va"), ("restart", "cleveland")]})
    expected, x = undisturbed(tmp_path / "b", SCAFF_PD)
    assert outcome.status == expected.status == "converged"
    np.testing.assert_array_equal(model_of(path), x)
    assert events(path) == []


@pytest.mark.parametrize("moment", mostly_long([1, 2, 3, 5, 6, 7, 9, 12, 14], 3, 9))
def test_a_run_pauses_for_a_silo_that_dies_and_goes_on_with_the_same_numbers(tmp_path, moment):
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD)
    outcome, _ = run(path, places, {moment: [("kill", "va")]})
    assert (outcome.status, outcome.final) == ("paused", False)
    assert "Silo 'va' did not answer" in outcome.sentence
    assert f"after round {outcome.rounds}" in outcome.sentence
    assert {(e.client, e.what) for e in events(path)} == {("va", "absent")}
    if moment > 5:  # there is an agreement
        assert RunRecord.read(folder_of(path).path).models[0].status == "paused"
    again, _ = run(path, places, {1: [("kill", "hungarian")]})
    assert (again.status, again.final) == ("paused", False)
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    np.testing.assert_array_equal(model_of(path), undisturbed(tmp_path / "b", SCAFF_PD)[1])


def test_a_run_that_waits_goes_on_by_itself_when_a_silo_is_back(tmp_path):
    more = QUICK.replace("start_timeout = 3.0", "start_timeout = 30.0")
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD, more=more)
    outcome, _ = run(path, places, {9: [("kill", "va")], "look 4": [("restart", "va")]})
    is_right(path, places, outcome)
    assert [e.what for e in events(path)] == ["absent"]
    np.testing.assert_array_equal(model_of(path), undisturbed(tmp_path / "b", SCAFF_PD)[1])


def test_everybody_gone(tmp_path):
    path, places = federation(tmp_path)
    outcome, _ = run(path, places, {8: [("kill", name) for name in places]})
    assert (outcome.status, outcome.final) == ("paused", False)
    is_right(path, places, run(path, places)[0])


def test_uncertified_methods_that_draw_silos_wait_for_those_they_draw(tmp_path):
    change = {
        OBJECTIVE: '[algorithm]\nkind = "DRFA"\nclients_per_round = 2\n',
        "rounds = 500\ntol = 1e-6": "rounds = 8",
    }
    path, places = federation(tmp_path, replacing=change)
    outcome, _ = run(path, places, {10: [("kill", "va")]})
    assert outcome.status == "paused"
    outcome, _ = run(path, places)
    assert (outcome.status, outcome.rounds) == ("round limit", 8)
    assert cohort(path, places).evaluate(model_of(path)).loss.max() < np.log(2)


GARBAGE = {
    "garbage": lambda answer: b"\x80\x04garbage",
    "nothing": lambda answer: b"",
    "cut": lambda answer: answer[: len(answer) // 2],
    "nan": changed(c=lambda c: c * np.nan, d=lambda d: d * np.nan),
    "inf": changed(scalars=lambda s: s + np.inf),
    "huge": changed(c=lambda c: c * 1e101, d=lambda d: d * 1e101),
    "shape": changed(c=lambda c: c[:-1], d=lambda d: np.append(d, 0.0)),
    "matrix": changed(c=lambda c: c[:, None], d=lambda d: d[None]),
    "format": changed(c=lambda c: c.astype(np.int64), d=lambda d: d.astype(np.int64)),
    "single": changed(c=lambda c: c.astype(np.float32), d=lambda d: d.astype(np.float32)),
    "name": lambda answer: answer.replace(b'"silo": "va"', b'"silo": "xx"'),
    "kind": lambda answer: answer.replace(b'"kind": "answer"', b'"kind": "anthem"'),
}


@pytest.mark.parametrize("lie", mostly_long(GARBAGE, "matrix", "nan", "name"))
def test_garbage_is_not_taken_and_the_silo_is_named(tmp_path, lie):
    """It stops the run after a few attempts; with sound answers the run goes on."""
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD)
    outcome, transport = run(path, places, {9: [("lie", "va", GARBAGE[lie])]})
    assert outcome.status == "paused"
    assert "'va'" in outcome.sentence
    assert {e.client for e in events(path)} == {"va"}
    assert transport.count < 60
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    np.testing.assert_array_equal(model_of(path), undisturbed(tmp_path / "b", SCAFF_PD)[1])


def test_a_single_bad_answer_costs_a_round_and_changes_no_number(tmp_path):
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD)
    script = {9: [("lie", "va", GARBAGE["cut"])], 10: [("honest", "va")]}
    outcome, _ = run(path, places, script)
    is_right(path, places, outcome)
    assert [e.what for e in events(path)] == ["garbage"]
    np.testing.assert_array_equal(model_of(path), undisturbed(tmp_path / "b", SCAFF_PD)[1])


def test_a_replayed_answer_is_not_taken(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD)
    first = []

    def replay(answer):
        first.append(answer)
        return first[0]

    outcome, _ = run(path, places, {9: [("lie", "va", replay)]})
    assert outcome.status == "paused"
    assert any("another question" in e.sentence for e in events(path))


def test_what_silos_say_is_printable(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD)

    def rude(answer):
        message = decode(answer, 2**31)
        sentence = "\x1b[2Jgone\n9,va,back,all is well"
        return encode(Message("failed", {**message.values, "sentence": sentence}))

    outcome, _ = run(path, places, {9: [("lie", "va", rude)]})
    assert outcome.status == "paused"
    assert outcome.sentence.isprintable()
    assert all(e.sentence.isprintable() for e in events(path))


FIRST = {
    "samples": lambda answer: answer.replace(b'"samples": ', b'"samples": 9999999999999999999999'),
    "dimension": lambda answer: answer.replace(b'"dimension": ', b'"dimension": 9'),
    "convex": lambda answer: answer.replace(b'"convex": true', b'"convex": null'),
    "nan": changed(constants=lambda c: c * np.nan),
    "negative": changed(constants=lambda c: -c),
}


@pytest.mark.parametrize("lie", mostly_long(FIRST, "samples", "nan"))
def test_garbage_in_answer_to_the_agreement(tmp_path, lie):
    path, places = federation(tmp_path, replacing=SCAFF_PD)
    outcome, _ = run(path, places, {1: [("lie", "va", FIRST[lie])]})
    assert outcome.status in ("paused", "failed")
    assert "'va'" in outcome.sentence


def test_a_silo_that_knows_nothing_before_there_is_an_agreement_was_restarted(tmp_path):
    path, places = federation(tmp_path)
    missing = lambda answer: encode(Message("missing", decode(answer, 2**20).values))
    outcome = coordinate(path, Faulty(places, {2: [("lie", "va", missing)]}))
    assert outcome.status == "paused"
    assert "restarted" in outcome.sentence


def test_a_second_site_of_the_same_name_and_strangers_are_not_asked(tmp_path):
    path, places = federation(tmp_path, replacing={', "va"]': "]"})
    transport = Faulty(places)
    transport.silos["intruder"] = transport.silos["hungarian"]
    outcome = coordinate(path, transport)
    assert outcome.status == "converged"
    asked = {
        decode(question, 2**31).kind
        for site, question, _ in transport.log
        if site in ("va", "intruder")
    }
    assert asked == {"hello"}


def test_divergence_is_called_by_its_name_and_nobody_is_blamed(tmp_path):
    steps = (
        '[algorithm.steps]\nkind = "Fixed"\ntau = 1e9\nsigma = 1.0\nlocal_rate = 1e6\n\n[objective]'
    )
    text = f'[algorithm]\nkind = "ScaffPD"\nlocal_steps = 10\n{steps}'
    path, places = federation(tmp_path, replacing={"[objective]": text, '"logistic"': '"squared"'})
    outcome, _ = run(path, places)
    assert outcome.status == "diverged"
    assert events(path) == []


def flipped(file):
    """The label of the first patient is another one."""
    lines = file.read_text().splitlines()
    first = lines[1][:-1] + str(1 - int(lines[1][-1]))
    file.write_text("\n".join([lines[0], first, *lines[2:]]) + "\n")


@pytest.mark.parametrize("when", ["between two runs", "in the middle"])
def test_a_silo_whose_data_changed_is_named_and_goes_on_with_its_old_data(tmp_path, when):
    path, places = federation(tmp_path, replacing=SCAFF_PD)
    file = places["va"].parent / "patients.csv"
    good = file.read_text()
    if when == "between two runs":
        assert run(path, places, {12: [("kill", "va")]})[0].status == "paused"
        flipped(file)
        outcome, _ = run(path, places)
    else:
        transport = Faulty(places)
        transport.swap = lambda site: (flipped(file), transport.restart(site))
        transport.script[12] = [("swap", "va")]
        outcome = coordinate(path, transport)
    assert (outcome.status, outcome.final) == ("paused", False)
    assert "Silo 'va' has changed" in outcome.sentence
    assert events(path)[-1].what == "changed"
    file.write_text(good)
    is_right(path, places, run(path, places)[0])


def test_rows_that_a_private_silo_has_lost_are_noticed_by_their_number(tmp_path):
    """Its constants say nothing of its rows: only their number does."""
    noisy = {
        "rounds = 500\ntol = 1e-6\n": "rounds = 6\n",
        "[objective]": '[algorithm]\nkind = "ScaffPD"\n\n[objective]',
    }
    path, places = federation(tmp_path, replacing=noisy, more="[privacy]\nepsilon = 8\n" + QUICK)
    for place in places.values():
        rules = '\n[privacy]\nepsilon = 20\ndelta = 1e-5\ncolumns = "exact"\n'
        place.write_text(place.read_text() + rules)
    with pytest.raises(Killed):
        run(path, places, {12: [("crash",)]})
    table = places["va"].parent / "patients.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-5]) + "\n")
    outcome, _ = run(path, places)
    assert outcome.status == "paused"
    assert [(e.client, e.what) for e in events(path)] == [("va", "changed")]


# --- coordinators


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
            OBJECTIVE: '[algorithm]\nkind = "Scaffold"\n',
            "tol = 1e-6": "tol = 0",
            "500": "8",
        }
    path, places = federation(tmp_path / "a", replacing=change)
    with pytest.raises(Killed):
        run(path, places, {moment: [("crash",)]})
    outcome, _ = run(path, places, {})
    expected, x = undisturbed(tmp_path / "b", change)
    assert outcome.rounds == expected.rounds
    assert outcome.certificate == expected.certificate
    np.testing.assert_array_equal(model_of(path), x)


def test_a_finished_run_stays_finished_and_goes_on_to_a_smaller_tolerance(tmp_path):
    path, places = federation(tmp_path)
    first, _ = run(path, places)
    folder = folder_of(path)
    assert reopen(FederationFile.read(path), folder) == first
    again, transport = run(path, places)
    assert again == first
    assert transport.count == 0
    path.write_text(path.read_text().replace("tol = 1e-3", "tol = 1e-7"))
    assert reopen(FederationFile.read(path), folder) is None  # whoever asks first
    assert not folder.has_outcome()
    again, _ = run(path, places)
    assert again.rounds > first.rounds
    assert again.certificate <= 1e-7 < first.certificate


def test_another_federation_leaves_a_finished_run_alone(tmp_path):
    path, places = federation(tmp_path)
    first, _ = run(path, places)
    folder = folder_of(path).path
    text = path.read_text()
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    for damage in ("rho", "{", '{"about": 3}'):
        path.write_text(text.replace("rho = 0.1", "rho = 0.2") if damage == "rho" else text)
        if damage != "rho":
            (folder / "settings.json").write_text(damage)
        outcome, transport = run(path, places)
        assert (outcome.status, transport.count) == ("failed", 0)
        assert "is of another" in outcome.sentence or "settings.json" in outcome.sentence
        after = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        assert {name for name in after if after[name] != before.get(name)} <= {"settings.json"}
    (folder / "settings.json").write_bytes(before["settings.json"])
    path.write_text(text)
    again, transport = run(path, places)
    assert (again, transport.count) == (first, 0)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("setup.json", "{}"),
        ("constants.json", '{"cleveland": 3}'),
        ("settings.json", '{"about": 3}'),
        ("outcome.json", '{"final": true}'),
        ("progress.jsonl", '{"event": {"round": 3}}\n'),
        ("progress.jsonl", "{\n"),
    ],
)
def test_damaged_files_of_a_run_are_named(tmp_path, name, damage):
    """JSON that can be parsed and makes no sense fails in a sentence, as does its status."""
    path, places = federation(tmp_path)
    with pytest.raises(Killed):
        run(path, places, {14: [("crash",)]})
    folder = folder_of(path)
    (folder.path / name).write_text(damage)
    outcome, _ = run(path, places)
    assert outcome.status == "failed"
    assert any(word in outcome.sentence for word in (name, "agreement", "of another"))
    if name == "outcome.json":
        with refuses("run-file-unreadable"):
            folder.status()
    if name == "progress.jsonl":
        with refuses("progress-unreadable"):
            folder.status()


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_checkpoint_ends_the_run_with_its_name(tmp_path, damage):
    path, places = federation(tmp_path)
    with pytest.raises(Killed):
        run(path, places, {14: [("crash",)]})
    file = folder_of(path).checkpoint
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[:500])
    else:
        with zipfile.ZipFile(file) as found:
            losses = found.read("history.losses.npy")
        last = whole.index(losses) + len(losses) - 1
        file.write_bytes(whole[:last] + bytes([whole[last] ^ 0xFF]) + whole[last + 1 :])
    outcome, _ = run(path, places)
    assert (outcome.status, outcome.final) == ("failed", True)
    assert "checkpoint.npz' is not a readable scaffpd checkpoint; remove it" in outcome.sentence
    file.unlink()
    is_right(path, places, run(path, places)[0])


def test_the_record_of_a_run_has_its_silos_scores_and_rounds(tmp_path):
    path, places = federation(tmp_path)
    outcome, _ = run(path, places, {8: [("lie", "va", GARBAGE["cut"])], 9: [("honest", "va")]})
    found = RunRecord.read(folder_of(path).path)
    model = found.main
    x = model_of(path)
    assert (found.kind, found.measure, found.split) == ("deploy", "accuracy", "test")
    assert (model.status, model.rounds, model.certificate) == (
        "converged",
        outcome.rounds,
        outcome.certificate,
    )
    here = {split: cohort(path, places).evaluate(x, split) for split in ("train", "test")}
    for i, score in enumerate(model.clients):
        assert (score.client, score.train_rows) == (found.clients[i], here["train"].counts[i])
        assert score.test_loss == pytest.approx(here["test"].loss[i], abs=1e-12)
        assert score.test_score == pytest.approx(here["test"].accuracy[i])
    assert [row.round for row in model.history] == list(range(outcome.rounds + 1))
    assert sum(model.last.weights) == pytest.approx(1)
    assert [event.what for event in found.events] == ["garbage"]
