"""Secure sums across silos: a cohort's optimum, masks and scalars on the wire, no wrong model."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

import scaffpd as sp
from cases.refusals import refuses
from cases.silos import (
    OBJECTIVE,
    QUICK,
    REQUIRED,
    SCAFF_PD,
    SECURE,
    Faulty,
    Killed,
    changed,
    cohort,
    federation,
    is_right,
    leaks,
    locks,
    model_of,
    mostly_long,
    run,
    secured,
    uncertified,
)
from scaffpd.cli import app
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.files import lock_file
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.silo import SiloFile
from scaffpd.secure.masking import Identity

pytestmark = pytest.mark.usefixtures("fake_clock")


def setup(path):
    return DeployedRun(FederationFile.read(path).folder).setup()


def kinds(transport):
    return {decode(question, 2**31).kind for _, question, _ in transport.log}


def add(place, text):
    place.write_text(place.read_text() + text)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run to which nothing happens: its files, its outcome and what was carried."""
    path, places = secured(tmp_path_factory.mktemp("undisturbed"), 3)
    return path, *run(path, places)


@pytest.fixture(scope="module")
def required(tmp_path_factory):
    """A run among silos that answer in masked sums only, and what was carried."""
    path, places = secured(tmp_path_factory.mktemp("required"), 3, rules=REQUIRED)
    return path, places, run(path, places)[1]


def test_the_certified_optimum_is_the_cohorts_and_the_agreement_the_plain_one(
    tmp_path, undisturbed
):
    path, outcome, transport = undisturbed
    places = transport.places
    is_right(path, places, outcome)
    other, elsewhere = federation(tmp_path / "b", 3, replacing=SCAFF_PD, more=QUICK)
    plain, _ = run(other, elsewhere)
    assert outcome.rounds == plain.rounds
    np.testing.assert_allclose(model_of(path), model_of(other), rtol=0, atol=1e-9)
    np.testing.assert_allclose(setup(path).mean, setup(other).mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(setup(path).deviation, setup(other).deviation, rtol=1e-12)
    method = FederationFile.read(path).method
    masked = sp.train(method, sp.SecureAggregation(cohort(path, places)), rounds=500, tol=1e-3)
    np.testing.assert_allclose(model_of(path), masked.x, rtol=0, atol=1e-9)


def test_columns_of_very_different_sizes_agree_as_plainly(tmp_path):
    """Cholesterol by the picogram, ages by the age: every column has its own digits."""
    found = []
    for name, more in (("a", SECURE), ("b", QUICK)):
        change = {**SCAFF_PD, "rounds = 500": "rounds = 1"}
        path, places = federation(tmp_path / name, 3, replacing=change, more=more)
        for place in places.values():
            file = place.parent / "patients.csv"
            head, *rows = file.read_text().splitlines()
            scaled = [row.split(",") for row in rows]
            for row in scaled:
                row[0] = f"{float(row[0]) * 1e-5:g}" if row[0] else ""
                row[4] = f"{float(row[4]) * 1e9:g}" if row[4] else ""
            file.write_text("\n".join([head, *(",".join(row) for row in scaled)]) + "\n")
        run(path, places)
        found.append(setup(path))
    assert found[0].deviation.max() / found[0].deviation.min() > 1e13
    np.testing.assert_allclose(found[0].mean, found[1].mean, rtol=1e-12, atol=1e-20)
    np.testing.assert_allclose(found[0].deviation, found[1].deviation, rtol=1e-12)


# --- who leaves, and who comes back


def goes_on(path, places, script, undisturbed):
    """Whatever happens, the run ends with the model of a run to which nothing does."""
    transport = Faulty(places, script)
    outcome = coordinate(path, transport)
    if outcome.status == "paused":
        transport.dead.clear()
        outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert leaks(transport.log) == []
    assert outcome.rounds == undisturbed[1].rounds
    np.testing.assert_allclose(model_of(path), model_of(undisturbed[0]), rtol=0, atol=1e-12)
    return transport


@pytest.mark.parametrize("moment", mostly_long([4, 7, 8, 18, 24, 25, 28, 30], 4, 25))
def test_a_run_waits_for_a_silo_and_no_vector_is_summed_among_others(tmp_path, undisturbed, moment):
    """The difference of two sums over different silos would show the one that has left."""
    path, places = secured(tmp_path, 3)
    transport = goes_on(path, places, {moment: [("kill", "va")]}, undisturbed)
    groups = {
        tuple(asked.values["names"])
        for asked in (decode(question, 2**31) for _, question, _ in transport.log)
        if asked.kind == "masked"
    }
    assert groups == {tuple(places)}


@pytest.mark.parametrize("moment", mostly_long([6, 10, 20, 27, 31], 27))
def test_restarted_silos_meet_again(tmp_path, moment, monkeypatch, undisturbed):
    """With the locks that conftest.py takes away elsewhere: none is left behind, or taken twice."""
    locks(monkeypatch, lock_file)
    path, places = secured(tmp_path, 3)
    goes_on(path, places, {moment: [("restart", "va")]}, undisturbed)
    assert {"answered.lock", "audit.lock"} <= {file.name for file in places["va"].parent.iterdir()}


@pytest.mark.parametrize("moment", mostly_long([6, 16, 25, 33], 25))
def test_a_killed_coordinator_goes_on_with_the_same_numbers(tmp_path, undisturbed, moment):
    path, places = secured(tmp_path, 3)
    transport = Faulty(places, {moment: [("crash",)]})
    with pytest.raises(Killed):
        coordinate(path, transport)
    outcome = coordinate(path, transport)  # silos live on, with what they remember
    is_right(path, places, outcome)
    assert leaks(transport.log) == []
    assert outcome.rounds == undisturbed[1].rounds
    np.testing.assert_allclose(model_of(path), model_of(undisturbed[0]), rtol=0, atol=1e-12)


@pytest.mark.long
def test_silos_killed_and_restarted_at_every_exchange(tmp_path, undisturbed):
    for moment in range(1, undisturbed[2].count + 1):
        for what in ("kill", "restart"):
            path, places = secured(tmp_path / f"{moment}{what}", 3)
            goes_on(path, places, {moment: [(what, "va")]}, undisturbed)


# --- what leaves


def test_nothing_else_leaves_and_the_detector_can_tell(tmp_path, monkeypatch, required):
    _, _, transport = required
    assert leaks(transport.log) == []
    assert len(transport.log) > 100
    few = {**SCAFF_PD, "rounds = 500": "rounds = 3"}
    plain, elsewhere = federation(tmp_path / "b", 2, replacing=few, more=QUICK)
    _, open_ = run(plain, elsewhere)
    assert any("'c'" in leak for leak in leaks(open_.log))
    monkeypatch.setattr("scaffpd.secure.masking.add_stream", lambda total, key, sign: None)
    bare, where = secured(tmp_path / "c", 3, replacing=few)
    _, unmasked = run(bare, where)
    assert sum("not uniform" in leak for leak in leaks(unmasked.log)) == len(where)


LIES = {
    "another shape": changed(masked=lambda y: y[:-1]),
    "another format": changed(masked=lambda y: y.astype(np.float64)),
    "wrong masks": changed(masked=lambda y: y * 3 + 1),
    "noise": changed(masked=lambda y: np.random.default_rng(0).integers(-(2**63), 2**63, len(y))),
    "a NaN loss": changed(scalars=lambda s: s * np.nan),
    "no bytes": lambda answer: b"",
    "a mad exponent": lambda answer: answer.replace(b'"exponent": ', b'"exponent": 77'),
}


@pytest.mark.parametrize(
    ("lie", "moment"),
    mostly_long(
        [*((lie, 23) for lie in LIES), ("another shape", 3), ("wrong masks", 3), ("noise", 3)],
        *[("another shape", 23), ("noise", 23), ("a mad exponent", 23), ("wrong masks", 3)],
    ),
)
def test_garbage_never_gives_a_wrong_model(tmp_path, lie, moment):
    path, places = secured(tmp_path, 3)
    outcome, transport = run(path, places, {moment: [("lie", "va", LIES[lie])]})
    assert set(leaks(transport.log)) <= {"nothing was masked"}
    assert outcome.status in ("failed", "paused")
    assert outcome.sentence.endswith(".")
    model = FederationFile.read(path).folder / "model.safetensors"
    assert model.exists() == ("is stored" in outcome.sentence)  # of a round before the lie


METHODS = ("FedAvg", "FedAvg, 3 drawn", "QFFL", "AFL", "DRFA", "FedProx", "Extragradient")


@pytest.mark.parametrize("name", mostly_long(METHODS, "DRFA", "Extragradient"))
def test_methods(tmp_path, name):
    kind = name.split(",")[0]
    drawn = "clients_per_round = 3\n" if "drawn" in name else ""
    change = uncertified(kind, drawn)
    if kind == "Extragradient":
        change = {
            OBJECTIVE: f'[algorithm]\nkind = "{kind}"\n\n{OBJECTIVE}',
            "rounds = 500\ntol = 1e-6": "rounds = 6\ntol = 0",
        }
    path, places = secured(tmp_path, 4 if drawn else 3, replacing=change)
    outcome, transport = run(path, places)
    assert (outcome.status, outcome.rounds) == ("round limit", 6), outcome
    assert leaks(transport.log) == []
    file = FederationFile.read(path)
    wanted = sp.train(file.method, cohort(path, places), rounds=6, seed=file.training.seed)
    np.testing.assert_allclose(model_of(path), wanted.x, rtol=0, atol=1e-11)


# --- what is refused


@pytest.mark.parametrize("kind", ["Scaffold", "ProxSkip", "MinimaxNewton"])
def test_methods_that_look_at_single_silos_are_refused_by_the_file(tmp_path, kind):
    objective = f"\n{OBJECTIVE}" if "Minimax" in kind else ""
    change = {OBJECTIVE: f'[algorithm]\nkind = "{kind}"\n{objective}', "tol = 1e-6": "tol = 0"}
    path, _ = secured(tmp_path, replacing=change)
    with refuses("method-sees-vectors"):
        FederationFile.read(path)


@pytest.mark.parametrize(
    ("silos", "more", "words"),
    [
        (2, "", "at least 3 clients"),
        (4, "colluding = 3\n", "1 <= colluding <= 2, got 3"),
        (4, "colluding = 0\n", "colluding"),
        (4, "share = 0.5\n", "share"),
    ],
)
def test_what_the_file_cannot_say(tmp_path, silos, more, words):
    path, _ = secured(tmp_path, silos, more)
    with pytest.raises(InputError, match=words):
        FederationFile.read(path)


@pytest.mark.parametrize("before", [True, False])
def test_a_silo_that_requires_masks_answers_nothing_else(required, before):
    path, places, transport = required
    name, place = next(iter(places.items()))
    silo = Silo.open(place) if before else transport.silos[name]
    x = np.zeros(len(model_of(path)))
    agreed = setup(path)
    plan = {"steps": 1, "rate": 0.1, "scale": 1.0, "prox": 0.0, "snapshot": None}
    values = {
        "setup": agreed.digest,
        "plan": {**plan, "batch_size": None, "key": [0]},
        "pull": 1.0,
        "limit": 1,
        "steepest": 1.0,
        "schema": dict(agreed.schema),
        "batch_size": None,
        "key": [0],
    }
    roles = ("x", "at", "correction", "metric", "direction")
    arrays = {**dict.fromkeys(roles, x), "V": np.eye(len(x), 1)}

    def ask(kind, **more):
        return decode(silo.answer(encode(Message(kind, {**values, **more}, arrays))), 2**31)

    vectors = ("local_updates", "proximal_steps", "diagonal", "curvature", "project", "totals")
    for kind in ("gradients", *vectors, "memory", "each", "x"):
        answer = ask(kind)
        assert set(answer.arrays) <= {"scalars"}, kind
        assert all(array.size <= 3 for array in answer.arrays.values())
        if kind != "gradients":
            assert answer.kind in ("refused", "missing"), kind
        if kind not in ("gradients", "totals") and not before:
            assert answer.kind == "refused"
    parts = (("curvature", "slopes"), ("losses", "scalars"), ("gradients", "scalars"))
    for about, part in parts:
        answer = ask("masked", about=about, parts=[part], weight=1.0, total=1.0, numbers=None)
        assert answer.kind in ("refused", "missing")
    parts = (("gradients", "scalars"), ("totals", "sum"), ("totals", "n"), ("evaluate", "scalars"))
    for about, part in parts:
        assert ask("sizes", about=about, parts=[part]).kind in ("refused", "missing")


def test_a_silo_that_requires_masks_takes_no_part_in_a_plain_federation(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    add(places["va"], REQUIRED)
    outcome, transport = run(path, places)
    assert outcome.status == "failed"
    assert "only masked vectors" in outcome.sentence
    assert not (FederationFile.read(path).folder / "model.safetensors").exists()
    assert kinds(transport).isdisjoint({"gradients", "local_updates"})


def test_a_share_that_is_declined_ends_the_run_with_the_sentence(tmp_path):
    path, places = secured(tmp_path, 3)
    add(places["va"], "\n[secure]\nshare = 0.2\n")
    outcome, transport = run(path, places)
    assert (outcome.status, outcome.final) == ("failed", True)
    assert "'va' would make up" in outcome.sentence
    assert leaks(transport.log) in ([], ["nothing was masked"])


# --- who a silo is to the others


def shown(place):
    done = CliRunner().invoke(app, ["silo", "key", str(place)])
    assert done.exit_code == 0
    return done.stdout.strip()


def nothing_trained(path, outcome, sentence):
    assert (outcome.status, outcome.final) == ("failed", True)
    assert sentence in outcome.sentence
    assert not (FederationFile.read(path).folder / "model.safetensors").exists()


def test_silo_key_shows_the_print_of_a_key_that_stays(tmp_path):
    _, places = secured(tmp_path, 3)
    first = shown(places["va"])
    assert shown(places["va"]) == first
    assert len(first) == 64
    file = places["va"].parent / "identity.key"
    assert file.stat().st_mode & 0o077 == 0
    assert Identity.stored("va", file).card.fingerprint == first
    file.write_text("no key\n")
    for damaged in (file, tmp_path / "nowhere" / "identity.key"):
        with pytest.raises(InputError, match="cannot be read or written"):
            Identity.stored("va", damaged)


def test_a_pin_that_does_not_fit_ends_the_run_before_anything_is_masked(tmp_path):
    path, places = secured(tmp_path, 3)
    pins = {name: shown(place) for name, place in places.items()} | {"cleveland": "0" * 64}
    add(places["va"], "\n[secure.pins]\n" + "".join(f'{n} = "{p}"\n' for n, p in pins.items()))
    outcome, transport = run(path, places)
    nothing_trained(path, outcome, "The key of 'cleveland' is not the one that is pinned here")
    assert leaks(transport.log) == ["nothing was masked"]
    add(places["hungarian"], '\n[secure.pins]\ncleveland = "abc"\n')
    with pytest.raises(InputError, match="fingerprint of 64 digits"):
        SiloFile.read(places["hungarian"])


def with_card(**changes):
    """A lie about the silo's card."""

    def lie(answer):
        message = decode(answer, 2**31)
        if "card" not in message.values:
            return answer
        card = {**message.values["card"], **changes}
        return encode(Message(message.kind, {**message.values, "card": card}, message.arrays))

    return lie


def test_a_silo_that_another_one_plays_is_noticed(tmp_path):
    path, places = secured(tmp_path, 3)
    forged = Identity("va").card.values()
    outcome, _ = run(path, places, {1: [("lie", "va", with_card(**forged))]})
    nothing_trained(path, outcome, "Another client shows a card in the name of 'va'")


def test_a_key_of_small_order_is_refused(tmp_path):
    """The secret with its owner would be public."""
    path, places = secured(tmp_path, 3)
    outcome, transport = run(path, places, {1: [("lie", "va", with_card(once=bytes(32).hex()))]})
    assert outcome.status in ("failed", "paused")
    assert leaks(transport.log) == ["nothing was masked"]


@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_pinned_key_is_replaced_where_the_others_pin_the_new_one_first(tmp_path, pinned_first):
    path, places = secured(tmp_path, 3, rules=REQUIRED)
    text = path.read_text()
    path.write_text(text.replace("rounds = 500", "rounds = 1"))
    assert run(path, places)[0].rounds == 1
    path.write_text(text.replace("rounds = 500", "rounds = 2"))
    old = shown(places["va"])
    (places["va"].parent / "identity.key").unlink()
    for place in places.values() if pinned_first else ():
        place.write_text(place.read_text().replace(old, shown(places["va"])))
    outcome, transport = run(path, places)
    if not pinned_first:
        assert "The key of 'va' is not the one that is pinned here" in outcome.sentence
        return
    assert outcome.rounds == 2
    whole, elsewhere = secured(tmp_path / "whole", 3, replacing={**SCAFF_PD, "500": "2"})
    run(whole, elsewhere)
    np.testing.assert_allclose(model_of(path), model_of(whole), rtol=1e-10, atol=1e-12)
    assert leaks(transport.log) == []
