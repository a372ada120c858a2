"""Runs over bytes: the cohort's numbers at every silo, faults, pauses, and going on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import scaffpd as sp
from cases.posts import write_table
from cases.refusals import refuses
from cases.silos import (
    FIRST_LINE,
    MODEL,
    OBJECTIVE,
    QUICK,
    RANGES,
    ROUGH,
    Faulty,
    Killed,
    agree,
    cohort,
    epsilon_of,
    events,
    federation,
    is_right,
    model_of,
    models_of,
    mostly_long,
    patients_who_die,
    rows,
    run,
)
from scaffpd.deploy.board import BEGIN, POST
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.transcript import FIRST
from scaffpd.federation.own_weights import OwnWeights
from scaffpd.report.record import RunRecord
from scaffpd.secure.keys import SIGNATURE
from scaffpd.settings.federation import FederationFile


def without_proof(kind, settings="", rounds=4):
    return {
        OBJECTIVE: f'[algorithm]\nkind = "{kind}"\n{settings}\n',
        "rounds = 500\ntol = 1e-6": f"rounds = {rounds}",
    }


WAYS = {
    "fair": {
        "rounds = 500\ntol = 1e-6": "rounds = 15\ntol = 0",
        FIRST_LINE: f"{FIRST_LINE}\nnear = 0.0",
    },
    "ScaffPD": {
        "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 3\n[objective]',
        **ROUGH,
    },
    "softmax": {'"logistic"': '"softmax"', **ROUGH},
    "squared": {'"logistic"': '"squared"', **ROUGH},
    "FedAvg": without_proof("FedAvg", 'local_steps = 2\nweights = "uniform"\nlocal_rate = 0.1'),
    "Scaffold": without_proof("Scaffold", "local_steps = 2\nlocal_rate = 0.1"),
    "DeltaFL": without_proof(
        "DeltaFL", 'local_steps = 2\nweights = "uniform"\nlocal_rate = 0.1\ntail = 0.9'
    ),
    "CVaR": {OBJECTIVE: '[objective]\nkind = "CVaR"\nalpha = 0.6\n', **ROUGH},
}


@pytest.mark.parametrize("way", mostly_long(WAYS, "fair", "Scaffold"))
def test_every_silo_has_the_cohorts_model(tmp_path, way):
    path, places = federation(tmp_path, replacing=WAYS[way])
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    if way == "fair":  # and that of another method, on a cohort that hides nothing
        method = sp.fair(FederationFile.read(path).method.objective)
        wanted = sp.train(method, cohort(path, places), 12)
        np.testing.assert_allclose(model_of(path), wanted.x, rtol=0, atol=1e-8)
        assert wanted.certificate < outcome.certificate < 1e-11


def stations(folder):
    """Twelve stations in Beijing: fine dust from the weather, 60 days of each to train on."""
    data = sp.data.beijing_air(new=0)
    columns = ", ".join(f'"x{j}" = "number"' for j in range(data.train[0][0].shape[1]))
    places = {}
    for name, (X, y) in zip(data.names, data.train, strict=True):
        places[name] = folder / name / "silo.toml"
        places[name].parent.mkdir()
        rows = np.column_stack([X, y]).tolist()
        names = [f"x{j}" for j in range(X.shape[1])] + ["y"]
        table = [dict(zip(names, row, strict=True)) for row in rows]
        write_table(places[name].with_name("rows.csv"), table)
        file = f'name = "{name}"\n[data]\nfile = "rows.csv"\ntarget = "y"\ntest = 0\n'
        places[name].write_text(file)
    path = folder / "federation.toml"
    path.write_text(
        f"silos = {json.dumps([*places])}\n{FIRST_LINE}\ncolumns = {{{columns}}}\n[model]\n"
        f'kind = "squared"\nl2 = 0.03\n{OBJECTIVE}[training]\nrounds = 500\ntol = 1e-6\n'
    )
    agree(path, places)
    return path, places


@pytest.mark.parametrize(
    "dispersion", [pytest.param("", marks=pytest.mark.long), 'dispersion = "auto"']
)
def test_counts_with_offsets_have_the_cohorts_model_and_dispersion(tmp_path, dispersion):
    """Exposures of five silos, of which one calls them otherwise and one has none."""
    random = np.random.default_rng(0)
    places = {}
    for k, name in enumerate(("north", "south", "west", "east", "coast")):
        places[name] = tmp_path / name / "silo.toml"
        places[name].parent.mkdir()
        X = random.normal(size=(80, 2))
        log_e = np.log(random.uniform(5, 60, 80)) if k else np.zeros(80)
        mean = np.exp(0.5 * X[:, 0] - 0.3 * X[:, 1] + 0.1 * k + log_e)
        y = random.poisson(random.gamma(2.0, mean / 2))
        heads = ["x0", "x1", "y", *[("log_e", "log_hours")[k == 1]] * (k > 0)]
        lines = np.column_stack([X, y, log_e])[:, : len(heads)].tolist()
        table = [dict(zip(heads, line, strict=True)) for line in lines]
        write_table(places[name].with_name("rows.csv"), table)
        offset = f'offset = "{heads[3]}"\n' if k else ""
        places[name].write_text(
            f'name = "{name}"\n[data]\nfile = "rows.csv"\ntarget = "y"\n{offset}test = 0\n'
        )
    path = tmp_path / "federation.toml"
    path.write_text(
        f"silos = {json.dumps([*places])}\n{FIRST_LINE}\n"
        'columns = {x0 = "number", x1 = "number"}\n'
        f'[model]\nkind = "poisson"\nl2 = 0.03\n{dispersion}\n{OBJECTIVE}'
        "[training]\nrounds = 200\ntol = 1e-6\n"
    )
    agree(path, places)
    outcome, _ = run(path, places)
    assert outcome.status == "converged"
    here = cohort(path, places)
    file = FederationFile.read(path)
    # in one process proofs are sharper, and a run may end some rounds earlier
    federation = sp.SecureAggregation(here, colluding=file.colluding)
    wanted = sp.train(file.method, federation, outcome.rounds)
    for x in models_of(path, places).values():
        np.testing.assert_allclose(x, wanted.x, rtol=0, atol=1e-8)
    assert wanted.certificate <= outcome.certificate
    assert here.model.exposed
    assert bool(here.model.dispersion) == bool(dispersion)
    if dispersion:
        own = {name: data.train for name, data in rows(path, places)[0].items()}
        wanted = sp.Cohort(own, replace(here.model, dispersion="auto"))
        assert here.model.dispersion == pytest.approx(wanted.model.dispersion, rel=1e-4)
        assert 0.2 < here.model.dispersion < 1.2


# exchanges to a gap of 1e-6 before there was a floor (benchmarks/DEPLOY.md)
EXCHANGES = {"hospitals": (federation, 15), "stations": (stations, 10)}


@pytest.mark.parametrize("where", mostly_long(EXCHANGES, "hospitals"))
def test_without_a_floor_the_model_is_that_of_the_objective(tmp_path, where):
    """c = 0, which only silos that allow all weight on one take part in; a floor costs nothing."""
    made, before = EXCHANGES[where]
    (tmp_path / "floor").mkdir()
    path, places = made(tmp_path / "floor")
    outcome, _ = run(path, places)
    assert outcome.status == "converged"
    assert RunRecord.read(FederationFile.read(path).folder).main.exchanges <= 1.1 * before
    (tmp_path / "none").mkdir()
    path, places = made(tmp_path / "none")
    text = path.read_text().replace("rounds = 500\ntol = 1e-6", "rounds = 15\ntol = 0")
    path.write_text(text.replace(FIRST_LINE, f"{FIRST_LINE}\nnear = 0.0\nfloor = 0.0"))
    for place in places.values():
        place.write_text(place.read_text() + "\n[limits]\nshare = 1.0\n")
    agree(path, places)
    outcome, _ = run(path, places)
    assert outcome.final
    objective = FederationFile.read(path).method.objective
    assert isinstance(objective, sp.ChiSquare)
    wanted = sp.train(sp.fair(objective), cohort(path, places), 12)
    np.testing.assert_allclose(model_of(path), wanted.x, rtol=0, atol=1e-8)


@pytest.mark.parametrize("strength", mostly_long(["l2 = 0.03", "", 'kappa = "auto"'], "l2 = 0.03"))
def test_times_to_an_event(tmp_path, strength):
    """Cox's model: of each silo's own risk sets, with entries where a silo has them."""
    path, places = patients_who_die(tmp_path, model=strength)
    text = path.read_text().replace("rounds = 500\ntol = 1e-6", "rounds = 4")  # each is dear
    path.write_text(text.replace("[objective]", WAYS["ScaffPD"]["[objective]"]))
    agree(path, places)
    outcome, _ = run(path, places)
    assert outcome.final
    models_of(path, places)
    if strength == "l2 = 0.03":
        is_right(path, places, outcome)
    else:  # a run starts at the optimum that belongs to its strengths
        assert outcome.certificate < 1e-3
    encoded, _ = rows(path, places)
    assert [name for name, own in encoded.items() if own.train[1][:, 2].any()] == ["va"]
    record = RunRecord.read(FederationFile.read(path).folder)
    assert all(0.3 < one.test_score < 1 for one in record.main.clients)


def test_what_a_run_leaves(tmp_path):
    path, places = federation(tmp_path, replacing=ROUGH)
    outcome, transport = run(path, places)
    folder = DeployedRun(FederationFile.read(path).folder)
    record = RunRecord.read(folder.path)
    assert record.clients == list(places)
    assert record.main.certificate == outcome.certificate <= 1e-3
    assert {one.client for one in record.main.clients} == set(places)
    assert all(0 < one.test_score < 1 for one in record.main.clients)
    assert {one.test_rows for one in record.main.clients} == {None}  # nobody shows how many
    rounds, _ = folder.entries()
    assert [line["round"] for line in rounds] == list(range(1, outcome.rounds + 1))
    assert folder.status()["state"] == "converged"
    count = transport.count
    assert coordinate(path, transport) == outcome  # nothing is trained again
    assert transport.count == count
    path.write_text(path.read_text().replace("rho = 0.1", "rho = 0.2"))
    assert coordinate(path, transport).status == "failed"  # a folder is for one agreement


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The outcome of a run in which nothing happens, and its model."""
    path, places = federation(tmp_path_factory.mktemp("undisturbed"), replacing=ROUGH)
    outcome, _ = run(path, places)
    return outcome, model_of(path)


@pytest.mark.parametrize("first", [True, False])
def test_a_silo_that_was_restarted_goes_on_with_the_same_numbers(tmp_path, undisturbed, first):
    quiet, wanted = undisturbed
    path, places = federation(tmp_path, replacing=ROUGH)
    who = next(iter(places)) if first else "va"
    outcome, _ = run(path, places, {16: [("restart", who)]})
    assert (outcome.status, outcome.rounds) == (quiet.status, quiet.rounds)
    np.testing.assert_array_equal(model_of(path), wanted)
    models_of(path, places)
    assert [(one.client, one.what) for one in events(path)] == [(who, "absent")]
    assert "was restarted" in events(path)[0].sentence


def test_a_repeated_round_asks_the_same_to_the_bit(tmp_path):
    """A second epoch shows no point beside one of the first: its sums would be new."""
    path, places = federation(tmp_path, replacing=ROUGH)
    _, transport = run(path, places, {26: [("restart", "va")]})
    epochs = [[]]
    for site, question, answer in transport.log:
        reply = decode(answer)
        if site == "cleveland" and decode(question).kind == BEGIN:
            epochs.append([])
        if site == "cleveland" and reply.kind == POST and reply.values["senders"] == FIRST:
            asked = decode(reply.arrays[POST].tobytes()[SIGNATURE:])
            epochs[-1] += [asked.arrays["x"]] if asked.kind == OwnWeights.kind else []
    first, second = ([x for x in points if x.any()] for points in epochs[1:])
    apart = np.array([[np.abs(a - b).max() for b in second] for a in first])
    assert (apart == 0).any()
    assert (apart[apart > 0] > 1e-4).all()


def test_a_silo_that_dies_pauses_the_run_until_it_is_back(tmp_path, undisturbed, fake_clock):
    path, places = federation(tmp_path, replacing=ROUGH | QUICK)
    outcome, transport = run(path, places, {15: [("kill", "va")]})
    assert (outcome.status, outcome.final) == ("paused", False)
    assert "'va' did not answer" in outcome.sentence
    with pytest.raises(StopIteration):
        next(tmp_path.rglob("model.safetensors"))
    transport.restart("va")
    outcome = coordinate(path, transport)
    assert outcome.status == "converged"
    np.testing.assert_array_equal(model_of(path), undisturbed[1])


def test_a_coordinator_that_is_killed_twice_goes_on(tmp_path):
    """After other rounds: what is asked first then is about another point."""
    method = {"[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 2\n[objective]'}
    method |= {"rounds = 500\ntol = 1e-6": "rounds = 6"}
    path, places = federation(tmp_path / "a", replacing=method)
    run(path, places)
    wanted = model_of(path)
    path, places = federation(tmp_path / "b", replacing=method)
    transport = Faulty(places, {36: [("crash",)], 96: [("crash",)]})
    for rounds in (2, 6):
        with pytest.raises(Killed):
            coordinate(path, transport)
        assert DeployedRun(FederationFile.read(path).folder).rounds() == rounds
    assert coordinate(path, transport).status == "round limit"
    np.testing.assert_array_equal(model_of(path), wanted)
    models_of(path, places)


def test_noise_allows_for_three_stops(tmp_path):
    """Repeated rounds are charged again, and ε has room for them."""
    method = RANGES | {
        "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 2\n[objective]',
        "[training]\nrounds = 500\ntol = 1e-6": "[privacy]\nepsilon = 4.0\n[training]\nrounds = 8",
    }
    path, places = federation(tmp_path, replacing=method)
    transport = Faulty(places, {30: [("crash",)], 62: [("crash",)], 94: [("crash",)]})
    for _ in range(3):
        with pytest.raises(Killed):
            coordinate(path, transport)
    outcome = coordinate(path, transport)
    assert outcome.status == "round limit"
    assert 0 < epsilon_of(path) <= 4.0
    models_of(path, places)


def test_a_run_waits_for_operators(tmp_path, fake_clock):
    """And a silo that is gone for a moment after that has its `timeout` from then on."""
    soon = {'folder = "run"': 'folder = "run"\ntimeout = 20.0'}
    path, places = federation(tmp_path, replacing=ROUGH | soon, granted=False)
    script = {31: [("consent",)], 33: [("kill", "va")], 34: [("restart", "va")]}
    transport = Faulty(places, script)
    transport.consent = lambda: agree(path, places)
    assert coordinate(path, transport).status == "converged"
    assert [one.what for one in events(path)] == ["waits", "absent"]
    assert "refuses for now" in events(path)[0].sentence
    assert fake_clock.now > 20  # longer than for a silo that is gone


def test_changed_rows_need_a_new_agreement(tmp_path, fake_clock):
    path, places = federation(tmp_path, replacing=ROUGH | QUICK)
    outcome, transport = run(path, places, {15: [("kill", "va")]})
    assert outcome.status == "paused"
    table = tmp_path / "va" / "patients.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")
    transport.restart("va")
    outcome = coordinate(path, transport)
    assert outcome.status in ("paused", "failed")
    assert "not those that this run began with" in outcome.sentence


def test_a_snapshot_that_was_restored_is_no_state_of_the_others(tmp_path, fake_clock):
    """The silo goes back, and all begin anew from a state that everybody has, or from the start."""
    path, places = federation(tmp_path, replacing=ROUGH | QUICK)
    outcome, transport = run(path, places, {15: [("kill", "va")]})
    (states,) = (tmp_path / "va" / "runs").glob("*/states.json")
    states.write_text('[[1, "00"]]')
    transport.restart("va")
    outcome = coordinate(path, transport)
    assert outcome.status == "converged"
    is_right(path, places, outcome)


def test_garbage_is_no_post(tmp_path, fake_clock):
    path, places = federation(tmp_path, replacing=ROUGH | QUICK)

    def lie(answer):
        reply = decode(answer)
        if reply.kind != POST:
            return answer
        return encode(Message(POST, {**reply.values, "step": 10**6}, reply.arrays))

    outcome, _ = run(path, places, {12: [("lie", "va", lie)]})
    assert outcome.status == "paused"
    assert "cannot be used" in outcome.sentence
    outcome, _ = run(
        *federation(tmp_path / "b", replacing=ROUGH | QUICK),
        {12: [("lie", "va", lambda answer: b"\0" * 40)]},
    )
    assert "unreadable" in outcome.sentence


def test_a_board_that_changes_a_post_gets_no_model(tmp_path, fake_clock):
    path, places = federation(tmp_path, replacing=ROUGH | QUICK)

    def lie(answer):
        reply = decode(answer)
        if reply.kind != POST:
            return answer
        post = np.array(reply.arrays[POST])
        post[-1] ^= 1
        return encode(Message(POST, reply.values, {POST: post}))

    outcome, _ = run(path, places, {14: [("lie", "va", lie)]})
    assert outcome.status in ("failed", "paused")
    assert "is not the one that it made" in outcome.sentence
    assert list(tmp_path.rglob("model.safetensors")) == []


def test_a_file_of_the_folder_that_is_broken_is_named(tmp_path):
    path, places = federation(tmp_path, replacing=ROUGH)
    folder = FederationFile.read(path).folder
    folder.mkdir()
    (folder / "states.json").write_text("{")
    outcome, _ = run(path, places)
    assert outcome.status == "failed"
    assert "states.json" in outcome.sentence
    with refuses("run-file-unreadable"):
        (folder / "outcome.json").write_text("{")
        DeployedRun(folder).outcome()


PERSONAL = {MODEL: f"{MODEL}kappa = 5.0\n", **ROUGH}


def test_personal_models_stay_at_their_silos(tmp_path):
    path, places = federation(tmp_path, replacing=PERSONAL)
    outcome, _ = run(path, places)
    assert outcome.status == "converged"
    models_of(path, places)
