"""What a coordinator that lies learns from silos that require masks: every attack, and what is left
of it.

Docstrings say what the attack learnt, here or in an audit, before silos bound their answers to the
question and went by a script (commit 4de0dbf).
"""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
from dishonest import (
    NAMES,
    NUMBERS,
    ROWS,
    Coordinator,
    RefusedError,
    bisect_exponent,
    bisect_factor,
    digits_beyond,
    learn,
    losses_nearby,
    masked,
    meet,
    point,
    project_own_way,
    read_rows,
    rows_read,
    single_out,
    single_point,
    sizes_of_corrections,
    subset,
    summed,
    two_weightings,
    weightings,
    written,
)

from scaffpd.deploy.agreement import settle
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.remote import SiloRequest
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.federation import LocalPlan
from scaffpd.federation.questions import GradientsAt, LocalSteps, Losses, Scores
from scaffpd.secure.masking import FixedPoint, Identity, Terms

X = np.array([0.1, -0.2, 0.3, 0.05])


def off(found, truth):
    """The relative error of what was learnt; infinite where there is nothing."""
    if found is None or not np.all(np.isfinite(found)):
        return np.inf
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


@pytest.fixture
def coordinator(tmp_path):
    found = Coordinator(tmp_path)
    meet(found)
    return found


def sentence(attack, *given):
    """The sentence with which a silo refuses."""
    with pytest.raises(RefusedError) as refused:
        attack(*given)
    return str(refused.value)


# --- rows


@pytest.mark.parametrize(
    "scale", [1e6, 1e9, 2.0], ids=["far out", "as far as the audit went", "within the radius"]
)
def test_rows_cannot_be_read_from_losses(coordinator, scale):
    """Before: 38 of 40 rows, with 574 questions."""
    rows, _, _ = coordinator.truth("north")
    assert rows_read(read_rows(coordinator, "north", scale), rows) <= 1
    assert len(rows) == ROWS


def test_accuracies_are_few_and_stay_few_when_the_silo_is_started_anew(coordinator):
    """An accuracy counts the rows on one side of a plane, near as well as far out."""
    name = "north"
    told = 0
    for k in range(100):
        if k == 10:
            coordinator.restart(name)
        told += learn(coordinator.ask, name, Scores(point(0.01 * (k + 1) * X))) is not None
    assert told == 20
    assert "released its accuracy" in sentence(coordinator.ask, name, Scores(point(2 * X)))
    reply = coordinator.ask(name, Scores(point(3 * X), accuracy=False))  # what a run logs
    assert np.isnan(reply.arrays["scalars"][1])
    assert np.isfinite(reply.arrays["scalars"][0])


@pytest.mark.parametrize(
    ("limit", "answered"),
    [("points = 7", 7), ("path", 5), ("radius = 5.0", 5)],
    ids=["points", "path", "radius"],
)
def test_points_are_limited(tmp_path, monkeypatch, limit, answered):
    if limit == "path":
        monkeypatch.setattr("scaffpd.deploy.silo.guard.PATH", 5.0)
    coordinator = Coordinator(tmp_path, rules="" if limit == "path" else f"[limits]\n{limit}\n")
    way = np.array([1.0, 0, 0, 0])
    found = [
        learn(coordinator.ask, "north", GradientsAt(point((k + 1) * way))) is not None
        for k in range(9)
    ]
    assert found == [k < answered for k in range(9)]
    assert learn(coordinator.ask, "north", GradientsAt(point(way))) is not None  # it has been there


def test_runs_are_limited(tmp_path):
    """FLARE starts a process for every job, and a job is the coordinator's: agreements are counted
    in a file.
    """
    first = Coordinator(tmp_path, rules="[limits]\nruns = 2\n")
    for k in range(4):
        silo = Silo.open(first.places["north"])
        setup = first.setup.values()
        setup["mean"] = [mean + 0.1 * k for mean in setup["mean"]]
        reply = decode(
            silo.answer(encode(Message("setup", {"setup": setup, "question": "1"}))), 2**20
        )
        assert reply.kind == (
            "answer" if k < 2 else "refused"
        )  # the first is that of the run before


def test_other_strengths_share_the_sums_of_a_run(coordinator):
    """c_i + l2·x is a known offset. Before: every silo's gradient, from as many l2 as silos.

    A process takes one l2; with others, which `limits.runs` counts, the same vectors are the same.
    """
    at = GradientsAt(point(X))
    other = coordinator.setup.with_model(l2=2e-3)
    with pytest.raises(InputError, match="another agreement"):
        settle(coordinator.session, NAMES, other)

    def sums_of_many_strengths():
        for k, weights in enumerate(0.1 + 0.6 * np.eye(4)):
            for name in NAMES:
                coordinator.restart(name)
            coordinator.session.constants.clear()
            settle(
                coordinator.session, NAMES, coordinator.setup.with_model(l2=1e-3 * (1 + 1e-9 * k))
            )
            meet(coordinator)
            for name in NAMES:
                coordinator.ask(name, at)
            summed(coordinator, dict.fromkeys(NAMES, (at, weights)))

    assert "could show it" in sentence(sums_of_many_strengths)


def test_rows_of_minibatches_are_the_silo_s_own_secret(tmp_path):
    """Losses over n known minibatches at one point would give every row's own loss."""
    silo = Coordinator(tmp_path / "a", "DRFA").silos["north"]
    other = Coordinator(tmp_path / "b", "DRFA", required=False)
    drawn = [
        silo.guard.drawn_here({"key": [k], "plan": {"key": [k], "steps": 3}}) for k in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0]["key"] != [1]
    assert drawn[0]["plan"] == {"key": drawn[0]["key"], "steps": 3}
    assert other.silos["north"].guard.drawn_here({"key": [1]}) == {"key": [1]}
    again = Silo.open(silo.file.path)  # the same rows again, in another process
    assert again.guard.drawn_here({"key": [2]})["key"] == drawn[2]["key"]


# --- single vectors


def test_single_vectors_cannot_be_summed(coordinator):
    """Before: the victim's own vector to rounding, by telling the others other weights, or another
    point.
    """
    truth = coordinator.gradient("north", point(X))
    at = GradientsAt(point(X))
    weights = np.full(4, 0.25)
    for name in NAMES:
        coordinator.ask(name, at)
    told = dict.fromkeys(NAMES, (at, weights))
    honest = sum(0.25 * coordinator.gradient(name, point(X)) for name in NAMES)
    assert off(summed(coordinator, told), honest) < 1e-9
    assert off(learn(single_out, coordinator, "north", X + 0.5), truth) > 0.5
    assert off(learn(single_point, coordinator, "north", X + 0.7), truth) > 0.5
    assert off(learn(single_out, coordinator, "north", X), truth) > 0.5


@pytest.mark.parametrize("nudge", [0.0, 1e-12, 1e-7])
def test_weightings_of_one_vector(coordinator, nudge):
    """Before: everybody's vector to 1e-16, 3e-12 and 3e-7 of its length."""
    found = learn(weightings, coordinator, X, nudge)
    assert found is None
    assert "one more could show it" in sentence(weightings, coordinator, X, nudge)


@pytest.mark.parametrize("change", [-0.15, 1e-3, 5e-10, 1e-12])
def test_two_weightings_that_differ_in_one_client(coordinator, change):
    """Before: its vector to 1e-16 of its length, to 7e-8 with weights that counted as the same."""
    assert "could show it" in sentence(two_weightings, coordinator, X, change)


def test_weights_that_differ_in_their_last_digits_are_the_same(coordinator):
    assert np.all(two_weightings(coordinator, X, 1e-15) == 0)


def test_two_weightings_that_mix_everybody_are_answered(coordinator):
    at = GradientsAt(point(X))
    truth = np.array([coordinator.gradient(name, point(X)) for name in NAMES])
    for weights in (np.full(4, 0.25), np.array([0.1, 0.2, 0.3, 0.4])):
        for name in NAMES:
            coordinator.ask(name, at)
        assert off(summed(coordinator, dict.fromkeys(NAMES, (at, weights))), weights @ truth) < 1e-9


def test_digits_of_vectors_cannot_be_asked_for_one_by_one(coordinator):
    """Before: everybody's vector without any error, from 61 sums with the same weights."""
    assert "nothing to be masked" in sentence(digits_beyond, coordinator, X)


def test_digits_of_sums_over_columns_are_few(coordinator):
    """Before: Σ of every single binary digit. A run asks for five sums at most."""

    def total(bits):
        values = {
            "schema": dict(coordinator.setup.schema),
            "parts": ["n", "sum"],
            "about": "totals",
        }
        values |= {"names": list(NAMES), "colluding": 1, "weights": [1.0] * 4}
        numbers = FixedPoint.finest(4, 20 - bits)
        asked = SiloRequest(
            "masked", {**values, "beyond": float(bits), "numbers": numbers.values()}
        )
        return "masked" in coordinator.put("north", asked).arrays

    assert [total(bits) for bits in range(30, 0, -1)] == [True] * 8 + [False] * 22
    assert total(30)


def test_coarse_numbers_single_nobody_out(coordinator):
    """Before: the victim's vector to 2e-13 of its length. The same vector with other factors is
    another weighting.
    """
    assert "could show it" in sentence(bisect_factor, coordinator, X)


@pytest.mark.long
def test_coarse_numbers_at_points_nearby(coordinator):
    """Before: to 2e-7. Silos round at random, so the search ends anywhere."""
    truth = coordinator.gradient("north", point(X))
    found = learn(bisect_factor, coordinator, X, 1e-9)
    assert off(found, truth) > 0.05


def test_sums_in_coarse_numbers_are_right_on_average(coordinator):
    """A silo that rounds at random answers the same question with the same numbers, and another one
    with others.
    """
    party = coordinator.silos["north"].masking.party
    terms = Terms(NAMES, 1)
    numbers = FixedPoint(4, 20, 0)
    vector = np.full(20_000, 0.3)
    others = [coordinator.silos[name].masking.party for name in NAMES[1:]]
    first = party.mask(terms, b"one", numbers, vector)
    assert np.array_equal(first, party.mask(terms, b"one", numbers, vector))
    total = numbers.decode(
        sum((other.mask(terms, b"one", numbers, 0 * vector) for other in others), first)
    )
    assert set(total) == {0.0, 1.0}
    assert abs(total.mean() - 0.3) < 0.02


def test_no_mask_is_used_twice_after_the_rows_have_changed(coordinator):
    """With the same masks, two answers would show c of the old rows less c of the new ones."""
    name = "north"
    at = GradientsAt(point(X))
    weights = np.full(4, 0.25)
    coordinator.ask(name, at)
    first = masked(coordinator, name, at, "c", weights, NUMBERS).arrays["masked"]
    again = masked(coordinator, name, at, "c", weights, NUMBERS).arrays["masked"]
    assert np.array_equal(again, first)
    rows = coordinator.places[name].parent / "rows.csv"
    rows.write_text("\n".join(rows.read_text().splitlines()[:-1]) + "\n")
    coordinator.restart(name)
    assert "has changed" in sentence(masked, coordinator, name, at, "c", weights, NUMBERS)
    coordinator.session.constants.clear()  # the coordinator does not mind other data
    assert "lacks" in sentence(masked, coordinator, name, at, "c", weights, NUMBERS)
    meet(coordinator)
    later = masked(coordinator, name, at, "c", weights, NUMBERS).arrays["masked"]
    assert np.abs((later - first).astype(float)).min() > 2.0**40  # not a difference of gradients


def test_sums_over_fewer(coordinator):
    assert learn(subset, coordinator, X) is None
    assert "over other clients" in sentence(subset, coordinator, X)


def test_parts_are_asked_for_once(coordinator):
    """Before: ["c", "c"] was another vector to the silo, and so had further sums; many parts took
    much memory.
    """
    at = GradientsAt(point(X))
    coordinator.ask("north", at)
    for parts in (["c", "c"], [], ["scalars"], ["c"] * 10**5, ["d"]):
        words = sentence(
            lambda p=parts: masked(coordinator, "north", at, "c", np.ones(4), NUMBERS, parts=p)
        )
        assert "nothing to be masked" in words
    many = sentence(
        lambda: masked(coordinator, "north", at, "c", np.ones(4), NUMBERS, parts=["c"] * 10**6)
    )
    assert "the silo cannot read the question: The message has too many values." in many


def test_gradients_from_scalars(coordinator):
    """Before: the gradient to 1e-9 by either."""
    truth = coordinator.gradient("north", point(X))
    assert off(project_own_way(coordinator, "north", X), truth) == np.inf
    assert off(sizes_of_corrections(coordinator, "north", X), truth) == np.inf
    assert learn(bisect_exponent, coordinator, "north", X) is None


def test_corrections_at_a_point_are_few(coordinator):
    at = GradientsAt(point(X))
    coordinator.ask("north", at)
    work = [LocalSteps(at.x, at, point(k * X), LocalPlan(2, 0.1)) for k in range(6)]
    told = [learn(masked, coordinator, "north", one, "d", np.ones(4)) is not None for one in work]
    assert told == [True] * 3 + [False] * 3


def test_lengths_of_gradients_are_told_where_a_run_begins(coordinator):
    told = []
    for k in range(12):
        asked = SiloRequest.of(GradientsAt(point(X + 0.01 * k)))
        coordinator.put("north", asked)
        about = SiloRequest(
            "sizes", {**asked.values, "about": asked.kind, "parts": ["c"]}, asked.arrays
        )
        told.append(learn(coordinator.put, "north", about) is not None)
    assert told == [True] * 8 + [False] * 4


@pytest.mark.parametrize(
    "question", ["gradients", "local_updates", "diagonal", "curvature", "losses"]
)
def test_what_the_method_does_not_ask_is_not_answered(tmp_path, question):
    coordinator = Coordinator(tmp_path, "FedAvg")
    asked = {
        "gradients": GradientsAt(point(X)),
        "losses": Losses(point(X)),
        "local_updates": None,
    }.get(question)
    if asked is not None:
        assert "needs no question" in sentence(coordinator.ask, "north", asked)
    elif question != "local_updates":
        words = sentence(coordinator.put, "north", SiloRequest(question, {}, {"at": X}))
        assert "needs no question" in words
    else:
        work = LocalSteps(point(X), None, None, LocalPlan(2, 0.1))
        assert "only masked vectors" in sentence(coordinator.ask, "north", work)


# --- members


def test_invented_members_and_keys_of_the_coordinator_s_own(coordinator):
    sybil = Identity("sybil").card.values()
    assert "has pins" in sentence(meet, coordinator, lambda cards: {**cards, "sybil": sybil})
    forged = Identity("south").card.values()
    words = sentence(meet, coordinator, lambda cards: {**cards, "south": forged})
    assert "another key" in words or "in the name of" in words
    at = GradientsAt(point(X))
    coordinator.ask("north", at)
    two = sentence(masked, coordinator, "north", at, "c", np.ones(2), NUMBERS, ["north", "south"])
    assert "3 silos or more" in two


def test_a_man_in_the_middle_needs_the_pins(tmp_path):
    coordinator = Coordinator(tmp_path)
    theirs = {name: Identity(name).card.values() for name in NAMES}
    with pytest.raises(RefusedError, match=r"pinned|in the name of"):
        meet(coordinator, lambda cards: theirs)


def test_without_pins_a_silo_that_requires_masks_takes_no_part(tmp_path):
    """The coordinator of a FLARE deployment makes all certificates; so they do not count."""
    _, places = written(tmp_path, required=True)
    place = places["north"]
    place.write_text(place.read_text().split("[secure.pins]")[0])
    silo = Silo.open(place)
    reply = decode(silo.answer(encode(Message("card", {"question": "1"}))), 2**20)
    assert reply.kind == "refused"
    assert "secure.pins" in reply.values["sentence"]


# --- what a silo does with anything else


def test_lists_of_names_are_refused_at_once(coordinator):
    """Before: an `open` with 300,001 names took a silo for minutes."""
    names = [f"s{k}" for k in range(300_001)]
    at = GradientsAt(point(X))
    coordinator.ask("north", at)
    start = time.process_time()
    assert learn(masked, coordinator, "north", at, "c", np.ones(3), NUMBERS, names) is None
    card = Identity("x").card.values()
    cards = [card | {"name": name} for name in names[:10_000]]
    assert learn(coordinator.put, "north", SiloRequest("meet", {"cards": cards})) is None
    assert time.process_time() - start < 2.0  # both together, of this process alone


BROKEN = [
    None,
    3,
    -1,
    "x",
    [],
    [1],
    ["x"],
    {},
    {"x": 1},
    1e308,
    True,
    [[]],
    {"x": "y"},
    2**70,
    [1.0] * 3,
    [-1],
    [2**70],
]


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.long)])
def test_malformed_questions_end_in_a_sentence(coordinator, every):
    """Before: some of them ended as KeyError or OverflowError."""
    at = GradientsAt(point(X))
    asked = SiloRequest.of(LocalSteps(at.x, at, point(X), LocalPlan(2, 0.1)))
    values = {
        **asked.values,
        "about": "local_updates",
        "parts": ["d"],
        "names": list(NAMES),
        "colluding": 1,
        "weights": [0.25] * 4,
        "numbers": NUMBERS.values(),
        "setup": coordinator.setup.digest,
        "split": "train",
        "cards": [],
        "question": "1",
        "schema": dict(coordinator.setup.schema),
        "pull": 1.0,
        "limit": 1,
        "steepest": 1.0,
        "accuracy": True,
    }
    kinds = (
        "masked",
        "sizes",
        "card",
        "meet",
        "gradients",
        "losses",
        "local_updates",
        "evaluate",
        "project",
        "totals",
    )
    kinds = (
        *kinds,
        "setup",
        "start",
        "spent",
        "describe",
        "optima",
        "curvature",
        "proximal_steps",
        "open",
    )
    silo = coordinator.silos["north"]
    roles = ("x", "at", "correction", "metric", "direction")
    arrays = {**dict.fromkeys(roles, X), "V": np.eye(4)[:, :1]}
    cases = list(itertools.product(kinds, values, BROKEN))
    assert len(cases) > 5000
    for kind, key, broken in cases[::every]:
        message = Message(kind, {**values, key: broken}, arrays)
        reply = decode(silo.answer(encode(message)), 2**24)
        assert reply.kind != "failed", (kind, key, broken, reply.values)


def test_what_remains_is_what_the_page_says(coordinator):
    """A gradient from differences of losses: one point a direction. Noise alone hides it."""
    truth = coordinator.gradient("north", point(X))
    assert off(losses_nearby(coordinator, "north", X), truth) < 1e-3


def test_a_journal_whose_last_line_a_crash_has_cut_off_forgets_no_answer_that_has_left(coordinator):
    """The silo goes on, and answers before the cut count against `limits.points` as before."""
    place = coordinator.places["north"]
    place.write_text(place.read_text() + "\n[limits]\npoints = 2\n")
    file = place.parent / "answered.jsonl"
    coordinator.ask("north", GradientsAt(point(X)))
    before = file.read_bytes()
    for end in (b'["r", "poi', b"\0" * 40, before.splitlines()[-1]):
        with file.open("ab") as half:
            half.write(end)
        coordinator.session.transport.silos["north"] = Silo.open(place)
        coordinator.ask("north", GradientsAt(point(X)))
    coordinator.ask("north", GradientsAt(point(2 * X)))
    text = file.read_bytes()
    assert text.startswith(before)
    assert all(len(json.loads(line)) == 4 for line in text.splitlines())
    with pytest.raises(RefusedError, match="points"):
        coordinator.ask("north", GradientsAt(point(3 * X)))


def test_the_journal_is_the_owner_s(coordinator):
    file = coordinator.places["north"].parent / "answered.jsonl"
    coordinator.ask("north", GradientsAt(point(X)))
    assert file.stat().st_mode & 0o077 == 0
    assert all(len(json.loads(line)) == 4 for line in file.read_text().splitlines())
    file.write_text('["r", "poi\n')  # a whole line may stand for an answer that has left
    fresh = Silo.open(coordinator.places["north"])
    reply = decode(
        fresh.answer(encode(Message("setup", {"setup": coordinator.setup.values()}))), 2**20
    )
    assert reply.kind == "refused"
    assert "cannot be read" in reply.values["sentence"]
