"""Secure sums across silos: the optimum of a cohort, masks and scalars on the wire, and never a wrong model."""

from __future__ import annotations

import numpy as np
import pytest
from deploy_cases import (
    QUICK,
    Faulty,
    Killed,
    changed,
    cohort,
    events,
    federation,
    is_right,
    locks,
    model_of,
    mostly_long,
    run,
)
from secure_silos import (
    OBJECTIVE,
    REQUIRED,
    SCAFF_PD,
    SECURE,
    EveryTime,
    leaks,
    secured,
    uncertified,
)

import scaffpd as sp
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.files import lock_file
from scaffpd.run.settings.federation import FederationFile

pytestmark = pytest.mark.usefixtures("fake_clock")


def setup(path):
    return DeployedRun(FederationFile.read(path).folder).setup()


def kinds(transport):
    """What every exchange was about, in order; `log` has one entry for each silo."""
    seen = {}
    for _, question, _ in transport.log:
        message = decode(question, 2**31)
        seen.setdefault(message.values["question"], message.kind)
    return list(seen.values())


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
    assert set(outcome.members) == set(places)
    other, elsewhere = federation(tmp_path / "b", 3, replacing=SCAFF_PD, more=QUICK)
    plain, _ = run(other, elsewhere)
    assert outcome.rounds == plain.rounds
    np.testing.assert_allclose(model_of(path), model_of(other), rtol=0, atol=1e-9)
    np.testing.assert_allclose(setup(path).mean, setup(other).mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(setup(path).deviation, setup(other).deviation, rtol=1e-12)
    masked = sp.train(
        FederationFile.read(path).method,
        sp.SecureAggregation(cohort(path, places)),
        rounds=500,
        tol=1e-3,
    )
    np.testing.assert_allclose(model_of(path), masked.x, rtol=0, atol=1e-9)


def test_columns_of_very_different_sizes_agree_as_plainly(tmp_path):
    """Cholesterol by the picogram, ages by the age: every column keeps its own digits."""
    found = []
    for name, more in (("a", SECURE), ("b", QUICK)):
        path, places = federation(
            tmp_path / name, 3, replacing={**SCAFF_PD, "rounds = 500": "rounds = 1"}, more=more
        )
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


def survives(folder, moment, who="va"):
    path, places = secured(folder, drop=True)
    outcome, transport = run(path, places, {moment: [("kill", who)]})
    if outcome.status == "paused":
        assert len([e for e in events(path) if e["what"] != "dropped"]) >= 1
        assert "Fewer than 3" in outcome.sentence
    else:
        is_right(path, places, outcome)
    assert leaks(transport.log) == []
    return outcome


SAMPLE = (
    4,
    7,
    8,
    18,
    24,
    25,
    28,
    30,
    33,
)  # of the agreement and of the first rounds, masked vectors and shares


@pytest.mark.parametrize("moment", mostly_long(SAMPLE, 4, 25))
def test_a_silo_killed_at_some_exchange(tmp_path, moment):
    survives(tmp_path, moment)


@pytest.mark.long
def test_a_silo_killed_at_every_exchange(tmp_path, undisturbed):
    for moment in range(1, undisturbed[2].count + 1):
        for who in ("cleveland", "va"):
            survives(tmp_path / f"{moment}{who}", moment, who)


def test_after_its_masked_vector_a_silo_is_not_needed_for_the_sum(tmp_path, undisturbed):
    """The sum is open with the last vector; who leaves then is missed with the next question."""
    assert "reveal" not in kinds(undisturbed[2])

    class Leaving(Faulty):
        """One of its silos is gone after the twelfth of its masked vectors."""

        sums = 0

        def ask(self, questions, timeout):
            replies = super().ask(questions, timeout)
            self.sums += decode(questions["va"], 2**31).kind == "masked" if "va" in questions else 0
            self.dead |= {"va"} if self.sums == 12 else set()
            return replies

    path, places = secured(tmp_path / "a", drop=True)
    transport = Leaving(places)
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert "va" not in outcome.members
    assert "reveal" not in kinds(transport)
    assert leaks(transport.log) == []


@pytest.mark.parametrize("moment", mostly_long([6, 10, 20, 27, 31], 27))
def test_restarted_silos(tmp_path, moment, monkeypatch):
    """Their secrets of an exchange are gone with them: they are left out of the round, and may be back.

    With the locks that conftest.py takes away elsewhere: none is left behind, or taken twice.
    """
    locks(monkeypatch, lock_file)
    path, places = secured(tmp_path, drop=True)
    outcome, transport = run(path, places, {moment: [("restart", "va")]})
    is_right(path, places, outcome)
    assert leaks(transport.log) == []
    assert {"answered.lock", "audit.lock"} <= {file.name for file in places["va"].parent.iterdir()}


@pytest.mark.parametrize("moment", mostly_long([20, 24, 28, 31], 31))
def test_without_leave_to_go_on_a_run_waits_and_nobody_is_shown(tmp_path, moment):
    """Who leaves is waited for: no vector is ever summed in two companies, which would show the one that has left."""
    path, places = secured(tmp_path)
    transport = Faulty(places, {moment: [("kill", "va")]})
    outcome = coordinate(path, transport)
    assert outcome.status == "paused"
    transport.dead.clear()
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places)
    companies = {}
    for site, question, answer in transport.log:
        asked = decode(question, 2**31)
        if asked.kind == "masked" and "masked" in decode(answer, 2**31).arrays:
            about = (site, asked.values["about"], str(asked.values.get("vectors")))
            companies.setdefault(about, set()).add(tuple(asked.values["names"]))
    assert companies
    assert all(len(names) == 1 for names in companies.values())


def test_a_coordinator_that_goes_on_regardless_is_refused(tmp_path):
    path, places = secured(tmp_path)
    path.write_text(path.read_text().replace("[faults]", '[faults]\nmissing = "drop"'))
    outcome, _ = run(path, places, {28: [("kill", "va")]})
    assert outcome.status in ("failed", "paused")
    assert (
        any("over other clients" in event["sentence"] for event in events(path))
        or "over other clients" in outcome.sentence
    )


@pytest.mark.parametrize("moment", mostly_long([27, 31], 27))
def test_everybody_restarted_at_once(tmp_path, moment):
    path, places = secured(tmp_path, 3)
    outcome, transport = run(path, places, {moment: [("restart", name) for name in places]})
    if outcome.status == "paused":
        outcome, transport = run(path, places)
    is_right(path, places, outcome)
    assert leaks(transport.log) == []


@pytest.mark.long
def test_silos_restarted_at_every_exchange(tmp_path, undisturbed):
    for moment in range(1, undisturbed[2].count + 1):
        path, places = secured(tmp_path / str(moment))
        outcome, _ = run(
            path, places, {moment: [("restart", "va")], moment + 3: [("restart", "cleveland")]}
        )
        if outcome.status != "paused":
            is_right(path, places, outcome)


def test_a_process_for_every_question(tmp_path, undisturbed):
    path, places = secured(tmp_path / "a", 3)
    transport = EveryTime(places)
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places)
    assert events(path) == []
    assert leaks(transport.log) == []
    np.testing.assert_array_equal(model_of(path), model_of(undisturbed[0]))


@pytest.mark.parametrize("moment", mostly_long([6, 16, 25, 33], 25))
def test_a_killed_coordinator_goes_on_with_the_same_numbers(tmp_path, undisturbed, moment):
    path, places = secured(tmp_path / "a", 3)
    transport = Faulty(places, {moment: [("crash",)]})
    with pytest.raises(Killed):
        coordinate(path, transport)
    outcome = coordinate(path, transport)  # silos live on, with what they remember
    is_right(path, places, outcome)
    assert leaks(transport.log) == []
    assert outcome.rounds == undisturbed[1].rounds
    np.testing.assert_allclose(model_of(path), model_of(undisturbed[0]), rtol=0, atol=1e-12)


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


def test_losses_leave_as_multiples(tmp_path):
    quantum = 0.01
    path, places = secured(
        tmp_path, 3, rules=f"\n[secure]\nquantum = {quantum}\n", replacing={**SCAFF_PD, "500": "8"}
    )
    outcome, transport = run(path, places)
    assert outcome.status in ("precision", "round limit", "stalled")
    assert outcome.certificate >= quantum
    seen = 0
    for _, question, answer in transport.log:
        kind = decode(question, 2**31).kind
        arrays = decode(answer, 2**31).arrays
        loss = (
            arrays["constants"][3]
            if kind == "setup"
            else arrays["scalars"][0]
            if "scalars" in arrays
            else 0.0
        )
        if kind in ("setup", "gradients", "evaluate"):
            seen += 1
            assert abs(loss / quantum - round(loss / quantum)) < 1e-9
    assert seen > 20


LIES = {
    "another shape": changed(masked=lambda y: y[:-1]),
    "another format": changed(masked=lambda y: y.astype(np.float64)),
    "wrong masks": changed(masked=lambda y: y * 3 + 1),
    "noise": changed(masked=lambda y: np.random.default_rng(0).integers(-(2**63), 2**63, len(y))),
    "a NaN loss": changed(scalars=lambda s: s * np.nan),
    "no bytes": lambda answer: b"",
    "a mad exponent": lambda answer: answer.replace(b'"exponent": ', b'"exponent": 77'),
}


EARLY = [(lie, 3) for lie in ("another shape", "wrong masks", "noise")]


@pytest.mark.parametrize(
    ("lie", "moment"),
    mostly_long(
        [*((lie, 23) for lie in LIES), *EARLY],
        *[
            ("another shape", 23),
            ("noise", 23),
            ("a mad exponent", 23),
            ("wrong masks", 3),
        ],
    ),
)
def test_garbage_never_gives_a_wrong_model(tmp_path, lie, moment):
    path, places = secured(tmp_path)
    outcome, transport = run(path, places, {moment: [("lie", "va", LIES[lie])]})
    assert set(leaks(transport.log)) <= {"nothing was masked"}
    if outcome.status in ("failed", "paused"):
        assert outcome.sentence.endswith(".")
        model = FederationFile.read(path).folder / "model.safetensors"
        assert model.exists() == ("is kept" in outcome.sentence)  # of a round before the lie
    else:
        is_right(path, places, outcome)


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


@pytest.mark.parametrize("kind", ["Scaffold", "ProxSkip", "MinimaxNewton"])
def test_methods_that_look_at_single_silos_are_refused_by_the_file(tmp_path, kind):
    objective = f"\n{OBJECTIVE}" if "Minimax" in kind else ""
    path, _ = secured(
        tmp_path,
        replacing={
            OBJECTIVE: f'[algorithm]\nkind = "{kind}"\n{objective}',
            "tol = 1e-6": "tol = 0",
        },
    )
    with pytest.raises(
        InputError, match=rf"{kind} looks at every silo's own vectors.*take \[secure\] out"
    ):
        FederationFile.read(path)


@pytest.mark.parametrize(
    ("silos", "more", "sentence"),
    [
        (2, "", "at least 3 clients"),
        (4, "colluding = 3\n", "1 <= colluding <= 2, got 3"),
        (4, "colluding = 0\n", "colluding"),
        (4, "leaving = -1\n", "leaving"),
        (4, 'colluding = "one"\n', "colluding"),
        (4, "share = 0.5\n", "share"),
    ],
)
def test_what_the_file_cannot_say(tmp_path, silos, more, sentence):
    path, _ = secured(tmp_path, silos, more)
    with pytest.raises(InputError, match=sentence):
        FederationFile.read(path)


@pytest.mark.parametrize(("more", "quorum"), [("", 3), ("colluding = 2\n", 4)])
def test_the_quorum_is_what_sums_bear(tmp_path, more, quorum):
    path, places = secured(tmp_path, more=more, drop=True)
    assert FederationFile.read(path).faults.quorum == quorum
    outcome, _ = run(path, places, {29: [("kill", "va")]})
    if quorum == 3:
        is_right(path, places, outcome)
    else:
        assert (outcome.status, outcome.final) == ("paused", False)
        outcome, _ = run(path, places)
        is_right(path, places, outcome)


@pytest.mark.parametrize("before", [True, False])
def test_a_silo_that_requires_masks_answers_nothing_else(required, before):
    path, places, transport = required
    name, place = next(iter(places.items()))
    silo = Silo.open(place) if before else transport.silos[name]
    x = np.zeros(len(model_of(path)))
    agreed = setup(path)
    plan = {
        "steps": 1,
        "rate": 0.1,
        "scale": 1.0,
        "batch_size": None,
        "key": [0],
        "prox": 0.0,
        "snapshot": None,
    }
    values = {
        "setup": agreed.digest,
        "vectors": dict.fromkeys(("x", "at", "correction", "metric", "direction"), "v"),
        "plan": plan,
        "pull": 1.0,
        "limit": 1,
        "steepest": 1.0,
        "schema": dict(agreed.schema),
        "batch_size": None,
        "key": [0],
    }
    asked = (
        "gradients",
        "local_updates",
        "proximal_steps",
        "diagonal",
        "curvature",
        "totals",
        "memory",
        "each",
        "x",
    )
    for kind in asked:
        answer = decode(
            silo.answer(encode(Message(kind, values, {"v": x, "V": np.eye(len(x), 1)}))), 2**31
        )
        assert set(answer.arrays) <= {"scalars"}, kind
        assert all(array.size <= 3 for array in answer.arrays.values())
        if kind != "gradients":
            assert answer.kind in ("refused", "missing"), kind
        if kind not in ("gradients", "totals") and not before:
            assert answer.kind == "refused"
    for about, part in (("curvature", "slopes"), ("losses", "scalars"), ("gradients", "scalars")):
        weighed = {
            **values,
            "about": about,
            "parts": [part],
            "weight": 1.0,
            "total": 1.0,
            "numbers": None,
        }
        answer = decode(
            silo.answer(encode(Message("masked", weighed, {"v": x, "V": np.eye(len(x), 1)}))), 2**31
        )
        assert answer.kind in ("refused", "missing")
    for about, part in (
        ("gradients", "scalars"),
        ("totals", "sum"),
        ("totals", "n"),
        ("evaluate", "scalars"),
    ):
        question = Message("sizes", {**values, "about": about, "parts": [part]}, {"v": x})
        assert decode(silo.answer(encode(question)), 2**31).kind in ("refused", "missing")


def test_a_silo_that_requires_masks_takes_no_part_in_a_plain_federation(tmp_path):
    path, places = federation(tmp_path, replacing=SCAFF_PD, more=QUICK)
    places["va"].write_text(places["va"].read_text() + REQUIRED)
    outcome, transport = run(path, places)
    assert outcome.status == "failed"
    assert "only masked vectors" in outcome.sentence
    assert not (FederationFile.read(path).folder / "model.safetensors").exists()
    assert not [kind for kind in kinds(transport) if kind in ("gradients", "local_updates")]


def test_a_share_that_is_declined_ends_the_run_with_the_sentence(tmp_path):
    path, places = secured(tmp_path, 3)
    places["va"].write_text(places["va"].read_text() + "\n[secure]\nshare = 0.2\n")
    outcome, transport = run(path, places)
    assert (outcome.status, outcome.final) == ("failed", True)
    assert "'va' would make up" in outcome.sentence
    assert "allow a larger share" in outcome.sentence
    assert leaks(transport.log) in ([], ["nothing was masked"])


def no_key(answer):
    """A card with a key of small order: whoever meets it has no secret with it; its owner says nothing about it."""
    message = decode(answer, 2**31)
    if message.kind == "missing":
        return encode(Message("answer", {k: v for k, v in message.values.items() if k != "names"}))
    if "card" not in message.values:
        return answer
    card = {**message.values["card"], "once": bytes(32).hex()}
    return encode(Message(message.kind, {**message.values, "card": card}, message.arrays))


def mad(answer):
    message = decode(answer, 2**31)
    if "exponent" not in message.values:
        return answer
    return encode(Message(message.kind, {**message.values, "exponent": 900}, message.arrays))


@pytest.mark.parametrize(
    ("lie", "moment", "what"),
    [(no_key, 14, "quarantined"), (mad, 30, "garbage")],
    ids=["key", "size"],
)
def test_who_spoils_sums_is_left_out_and_not_those_who_say_so(tmp_path, lie, moment, what):
    path, places = secured(tmp_path, silos=5, more="colluding = 1\n", drop=True)
    outcome, transport = run(path, places, {moment: [("lie", "va", lie)]})
    first = events(path)[0]
    assert (first["client"], first["what"]) == ("va", what)
    assert {e["client"] for e in events(path)} == {"va"}
    assert "va" not in outcome.members
    is_right(path, places, outcome)
    assert leaks(transport.log) == []


def test_directions_of_the_coordinators_own_are_refused(required):
    """A silo shows its gradient along no direction; d of them would be all of it."""
    _, _, transport = required
    asked = next(
        decode(q, 2**31) for _, q, a in transport.log if decode(q, 2**31).kind == "gradients"
    )
    x = next(iter(asked.arrays))
    names = {"at": x, "direction": "mine"}
    arrays = {x: asked.arrays[x], "mine": np.eye(len(asked.arrays[x]))[0]}
    question = encode(Message("project", {**asked.values, "vectors": names}, arrays))
    reply = decode(transport.silos["va"].answer(question), 2**31)
    assert reply.kind == "refused"
    assert "needs no question 'project'" in reply.values["sentence"]


HIDDEN = 'losses = "hidden"\n'
MILD = {"rho = 0.1": "rho = 1.0"}  # no silo of three has all of the weight


@pytest.mark.parametrize("objective", ["ChiSquare", "CVaR"])
def test_hidden_losses_give_the_same_optimum_and_nothing_of_a_single_silo_leaves(
    tmp_path, objective
):
    """With the first objective, every process answers one question: what silos keep is in their journals."""
    goal = (
        MILD
        if objective == "ChiSquare"
        else {OBJECTIVE: '[objective]\nkind = "CVaR"\nalpha = 0.5\n'}
    )
    few = 3 if objective == "ChiSquare" else 4  # the fewest that this objective takes
    path, places = secured(
        tmp_path, few, more=HIDDEN, rules=REQUIRED + HIDDEN, replacing=goal | {"1e-6": "1e-3"}
    )
    transport = EveryTime(places) if objective == "ChiSquare" else Faulty(places)
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert "losses are hidden" in outcome.sentence
    assert leaks(transport.log) == []
    shown = {
        decode(question, 2**31).kind
        for _, question, answer in transport.log
        if b"scalars" in answer
    }
    assert shown == {"evaluate"}  # the last table
    assert {"gradients", "losses", "sizes", "local_updates"}.isdisjoint(kinds(transport))


def test_a_killed_coordinator_goes_on_with_hidden_losses(tmp_path):
    path, places = secured(tmp_path, more=HIDDEN, replacing={"1e-6": "1e-3"})
    transport = Faulty(places, {30: [("crash",)]})
    with pytest.raises(Killed):
        coordinate(path, transport)
    outcome = coordinate(path, transport)
    is_right(path, places, outcome)
    assert leaks(transport.log) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (SCAFF_PD, "ScaffPD needs losses"),
        ({'kind = "ChiSquare"\nrho = 0.1': 'kind = "QFair"\nq = 1.0'}, "QFair has no"),
    ],
)
def test_hidden_losses_need_a_method_that_can(tmp_path, change, sentence):
    path, _ = secured(tmp_path, more=HIDDEN, replacing=change)
    with pytest.raises(InputError, match=sentence):
        FederationFile.read(path)
