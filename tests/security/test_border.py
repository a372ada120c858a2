"""What leaves a silo is what was announced: equal sets, for every method, objective and mode."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from cases.boards import ALL, sessions, together
from cases.refusals import refuses
from cases.silos import (
    MODEL,
    OBJECTIVE,
    RANGES,
    ROWS,
    agree,
    agreement,
    federation,
    mostly_long,
    patients_who_die,
    run,
)
from runtimes import cohort_of, point_of
from scaffpd.algorithms import ALGORITHMS
from scaffpd.algorithms.base import SLOPES, VECTORS
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.announcing import announced, phases
from scaffpd.deploy.ledger import TableLedger
from scaffpd.deploy.rows import SiloRows
from scaffpd.deploy.silo import Silo
from scaffpd.deploy.transcript import Session
from scaffpd.errors import InputError
from scaffpd.federation.border import QUESTIONS
from scaffpd.federation.questions import GradientsAt, Losses
from scaffpd.objectives import OBJECTIVES
from scaffpd.secure.ring import Places
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.silo import SiloFile

# three rounds, however good the model is by then
SHORT = {"rounds = 500": "rounds = 3\nrate = 0.1", "tol = 1e-6\n": ""}
PRIVATE = RANGES | {
    "[training]\nrounds = 500\ntol = 1e-6\n": "[privacy]\nepsilon = 8.0\n[training]\nrounds = 2\n"
}
GOALS = {
    name: "" if kind.usual is None else f"{kind.parameter} = {kind.usual}"
    for name, kind in OBJECTIVES.items()
} | {"CVaR": "alpha = 0.6", "ChiSquareBall": "delta = 0.05", "Nash": "b = 3.0"}


class Recorder:
    """Notes what sessions post, part by part, beside what they say that it is."""

    def __init__(self, monkeypatch):
        self.posted = set()
        self.numbers = {}
        for name in ("clear", "total"):
            original = getattr(Session, name)
            monkeypatch.setattr(Session, name, self._noting(original))
        original = Session._numbers

        def numbers(session, kind, body, size):
            self.numbers.setdefault(kind, set()).add(size)
            return original(session, kind, body, size)

        monkeypatch.setattr(Session, "_numbers", numbers)

    def _noting(self, original):
        recorder = self

        def post(session, shown, *given):
            parts = [shown] if hasattr(shown, "key") else shown
            recorder.posted |= {one.key for one in parts}
            return original(session, shown, *given)

        return post


def compared(path, places, monkeypatch):
    """Run an agreement; return what was posted and what had been announced."""
    file = FederationFile.read(path)
    recorder = Recorder(monkeypatch)
    outcome, _ = run(path, places)
    assert outcome.final, outcome.sentence
    # the hash of rows goes with the keys at the beginning of an epoch
    expected = announced(file) - {("commitment", "rows")}
    return recorder, expected


def accepted(name):
    """Whether silos take part in a method at all: it needs no single vectors, nor their lengths."""
    kind = ALGORITHMS[name]
    return not kind.needs & {VECTORS, SLOPES} and name != "QFFL"


SETTINGS = {"AFL": "dual_rate = 0.1\n", "DRFA": "dual_rate = 0.1\n"}
WAYS = {
    **{name: (name, SETTINGS.get(name, "")) for name in ALGORITHMS if accepted(name)},
    "ScaffPD, one step": ("ScaffPD", "local_steps = 1\n"),
    "ScaffPD, fixed": (
        "ScaffPD",
        'steps = {kind = "Fixed", tau = 0.5, sigma = 0.1, local_rate = 0.1}\n',
    ),
    "FedAvg, alike": ("FedAvg", 'weights = "uniform"\n'),
}


def prepared(folder, way="MinimaxSums", objective="ChiSquare", mode="plain"):
    """An agreement of a method, an objective and a mode, granted by four silos."""
    name, settings = WAYS[way]
    replacing, more = MODES[mode]
    method = f'[algorithm]\nkind = "{name}"\n{settings}'
    if ALGORITHMS[name].needs_objective():
        method = f'[objective]\nkind = "{objective}"\n{GOALS[objective]}\n{method}'
    replacing = {OBJECTIVE: method} | (replacing if "noise" in mode else replacing | SHORT)
    path, places = federation(folder, replacing=replacing, granted=False)
    text = path.read_text()
    path.write_text(text.replace("epsilon = 8.0\n", f"epsilon = 8.0\n{more}") + ROWS)
    for place in places.values():
        place.write_text(place.read_text() + "\n[limits]\nshare = 1.0\n")
    agree(path, places)
    return path, places


@pytest.mark.parametrize("way", WAYS)
def test_every_method_posts_what_was_announced(tmp_path, fake_clock, monkeypatch, way):
    recorder, expected = compared(*prepared(tmp_path, way=way), monkeypatch)
    assert recorder.posted == expected


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_posts_what_was_announced(tmp_path, fake_clock, monkeypatch, objective):
    recorder, expected = compared(*prepared(tmp_path, "Fair", objective), monkeypatch)
    assert recorder.posted == expected


MODES = {
    "plain": ({}, ""),
    "curves": ({"labels = [0, 1]\n": 'labels = [0, 1]\ncurves = "on"\npairs = 2\n'}, ""),
    "evidence": ({"l2 = 0.03\n": 'kappa = "auto"\n'}, ""),
    "personal": ({"l2 = 0.03\n": "l2 = 0.03\nkappa = 2.0\n"}, ""),
    "ranges": (RANGES, ""),
    "noise": (PRIVATE, ""),
    "noise and curves": (PRIVATE | {"labels = [0, 1]\n": 'labels = [0, 1]\ncurves = "on"\n'}, ""),
    "shared noise": (PRIVATE, "shared = true\n"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_posts_what_was_announced(tmp_path, fake_clock, monkeypatch, mode):
    recorder, expected = compared(*prepared(tmp_path, "Fair", mode=mode), monkeypatch)
    assert recorder.posted == expected


NETWORK = """\
import torch, scaffpd
def made():
    torch.manual_seed(0)
    layers = torch.nn.Linear(22, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)
    return scaffpd.Module(torch.nn.Sequential(*layers).double(), l2=0.01)
"""
METHODS = {
    "Fair": "",
    "FedAvg": 'local_rate = 0.1\nlocal_steps = 2\nbatch_size = 20\nweights = "uniform"\n',
    "ScaffPD": "local_steps = 2\nbatch_size = 20\n",
    "AFL": "local_rate = 0.1\nbatch_size = 32\ndual_rate = 0.1\n",
}
NOISE = {
    **RANGES,
    "rounds = 500\ntol = 1e-6": "rounds = 2\n[privacy]\nepsilon = 8.0\nsmoothness = 4.0",
}


def networks(folder, way, least=20, ending=SHORT):
    """An agreement on a network, granted by silos that answer about so many rows at least."""
    method = f'[algorithm]\nkind = "{way}"\n{METHODS[way]}'
    goal = OBJECTIVE if ALGORITHMS[way].needs_objective() else ""
    changes = {MODEL: '[model]\nkind = "net"\n', OBJECTIVE: goal + method, **ending}
    path, places = federation(folder, replacing=changes, more=ROWS, granted=False)
    for place in places.values():
        (place.parent / "own_net.py").write_text(NETWORK)
        more = f'\n[limits]\nrows = {least}\nshare = 1.0\n[models]\nnet = "own_net:made"\n'
        place.write_text(place.read_text() + more)
    agree(path, places)
    return path, places


@pytest.mark.parametrize("way", mostly_long(METHODS, "Fair"))
def test_networks_post_what_was_announced(tmp_path, fake_clock, monkeypatch, way):
    recorder, expected = compared(*networks(tmp_path, way), monkeypatch)
    assert recorder.posted == expected


def test_networks_with_noise_post_what_was_announced(tmp_path, fake_clock, monkeypatch):
    """Noise decides about the steps, and with them about the questions: at most those."""
    recorder, expected = compared(*networks(tmp_path, "Fair", ending=NOISE), monkeypatch)
    assert {("gradients", "c")} <= recorder.posted <= expected


@pytest.mark.parametrize("way", METHODS)
def test_no_silo_is_asked_about_fewer_rows_than_its_file_allows(tmp_path, way):
    """Minibatches of networks too, that of the default among them, from the document alone."""
    path, places = networks(tmp_path, way, 33)
    document = agreement(path, places)
    for place in places.values():
        silo = Silo.open(place)
        with refuses("minibatch-too-small"):
            document.check(silo.file, silo.identity.card)


TASKS = ["softmax", "ordinal", "squared", "poisson"]


@pytest.mark.parametrize("kind", mostly_long(TASKS, "softmax"))
def test_other_tasks_post_what_was_announced(tmp_path, fake_clock, monkeypatch, kind):
    labels = {} if kind in ("softmax", "ordinal") else {"labels = [0, 1]\n": ""}
    model = {'kind = "logistic"\nl2 = 0.03': f'kind = "{kind}"'}
    path, places = federation(tmp_path, replacing=model | labels | SHORT)
    recorder, expected = compared(path, places, monkeypatch)
    assert recorder.posted == expected


def test_times_to_an_event_post_what_was_announced(tmp_path, fake_clock, monkeypatch):
    recorder, expected = compared(*patients_who_die(tmp_path, replacing=SHORT), monkeypatch)
    assert recorder.posted == expected


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_accepted_posts_what_was_announced(
    tmp_path, fake_clock, monkeypatch, way, objective, mode
):
    try:
        path, places = prepared(tmp_path, way, objective, mode)
    except InputError as refused:
        pytest.skip(f"silos do not take part in that: {refused.code}")
    file = FederationFile.read(path)
    recorder = Recorder(monkeypatch)
    outcome, _ = run(path, places)
    assert recorder.posted <= announced(file)
    if outcome.final and outcome.rounds > 1:
        assert recorder.posted == announced(file) - {("commitment", "rows")}


def test_numbers_in_the_clear_are_as_many_as_their_parts(tmp_path, fake_clock, monkeypatch):
    """A number more under the name of another part would be one that nobody has read about."""
    recorder, _ = compared(*prepared(tmp_path, "ScaffPD"), monkeypatch)
    clear = {kind: sizes for kind, sizes in recorder.numbers.items() if kind.startswith("clear")}
    parts = {"clear gradients": 1, "clear evaluate score": 2}
    assert clear == {kind: {8 * count} for kind, count in parts.items()}


SIMULATED = {
    "q-FFL shows lengths of updates": (
        "method-for-simulation",
        {OBJECTIVE: '[algorithm]\nkind = "QFFL"\n'},
    ),
    "AFL shows lengths of gradients": (
        "method-for-simulation",
        {OBJECTIVE: '[algorithm]\nkind = "AFL"\n'},
    ),
    "minibatches of a table": (
        "minibatch-of-a-table",
        {OBJECTIVE: '[algorithm]\nkind = "AFL"\nbatch_size = 1\ndual_rate = 0.1\n'},
    ),
    "large ones": (
        "minibatch-of-a-table",
        {"[objective]": '[algorithm]\nkind = "ScaffPD"\nbatch_size = 200\n[objective]'},
    ),
    "few rows of a network": (
        "minibatch-too-small",
        {
            MODEL: '[model]\nkind = "net"\n',
            OBJECTIVE: '[algorithm]\nkind = "FedAvg"\nbatch_size = 19\n',
        },
    ),
    "steps by curvature": ("rate-missing", {OBJECTIVE: '[algorithm]\nkind = "Scaffold"\n'}),
    "steps by theory": (
        "method-for-simulation",
        {"[objective]": '[algorithm]\nkind = "ScaffPD"\nsteps = {kind = "Theory"}\n[objective]'},
    ),
    "a single step": (
        "rate-missing",
        {"[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 1\n[objective]'},
    ),
    "numbers of rows": (
        "rows-missing",
        {OBJECTIVE: '[algorithm]\nkind = "FedAvg"\nlocal_rate = 0.1\n'},
    ),
}


@pytest.mark.parametrize("what", SIMULATED)
def test_what_needs_more_is_for_simulation(tmp_path, what):
    """One sentence, from the agreement alone, before any number leaves."""
    code, changes = SIMULATED[what]
    path, _ = federation(tmp_path, granted=False)
    text = path.read_text().replace("rounds = 500\ntol = 1e-6", "rounds = 4")
    for old, new in changes.items():
        text = text.replace(old, new)
    path.write_text(text)
    with refuses(code):
        FederationFile.read(path)


def test_curves_with_pairs_need_more_than_three_silos(tmp_path):
    """They were refused after counts had left."""
    for more, refused in (("pairs = 2", True), ("pairs = 0", False)):
        curves = {"labels = [0, 1]\n": f'labels = [0, 1]\ncurves = "on"\n{more}\n'}
        if refused:
            with refuses("curves-with-few-silos"):
                federation(tmp_path / "three", 3, curves)
            federation(tmp_path / "four", 4, curves, granted=False)
        else:
            federation(tmp_path / "none", 3, curves, granted=False)


def test_rows_fewer_than_agreed_take_no_part(tmp_path, fake_clock):
    """What a silo counts for is no more than it has."""
    path, places = federation(tmp_path, more=ROWS.replace("va = 100", "va = 1000"))
    outcome, _ = run(path, places)
    assert outcome.status == "paused"
    assert outcome.sentence.startswith("Silo 'va' refuses: This silo cannot take part")


def test_nobody_draws_a_silos_minibatches(tmp_path):
    """With a public seed everybody knew which rows a loss is over."""
    path, places = federation(tmp_path, granted=False)
    file = FederationFile.read(path)
    drawn = set()
    for name, place in places.items():
        own = SiloFile.read(place)
        for document in (
            agreement(path, places),
            Agreement({**agreement(path, places).values, "x": 1}),
        ):
            rows = SiloRows(own, document, file, TableLedger(tmp_path / name))
            drawn.add(rows.minibatches)
    assert len(drawn) == 2 * len(places)
    cohort = cohort_of("logistic", ["a"])
    x = point_of(cohort)
    public = cohort.losses(x, 4, (1, 2))
    cohort.channel.secret = (next(iter(drawn)),)
    assert cohort.losses(x, 4, (1, 2)) != public
    assert cohort.losses(x) == cohort_of("logistic", ["a"]).losses(x)


def test_what_was_not_announced_is_refused_before_bytes_exist():
    """Also where the session's owner is honest and the method is not."""
    made, board = sessions(("a", "b", "c"))
    for session in made.values():
        session.announced = frozenset({("losses", "loss")})
        session._exchange = None  # whoever gets there fails otherwise

    def clear(name, session):
        with refuses("not-announced"):
            session.clear(GradientsAt.shows[:1], np.zeros(1))
        with refuses("not-announced"):
            session.total(GradientsAt.named("c"), np.zeros(2), Places.usual(2, 3))
        return True

    assert all(one is True for one in together(made, board, clear).values())
    # a part that only a sum may show is not shown one by one, whatever was announced
    session = next(iter(made.values()))
    session.announced = ALL["announced"]
    with refuses("not-announced"):
        session.clear([GradientsAt.named("c")], np.zeros(2))
    session.announced = ()
    with refuses("not-announced"):
        session.clear(Losses.shows, np.zeros(1))


def test_every_part_has_words_that_can_be_read_aloud(tmp_path):
    for kind, question in QUESTIONS.items():
        for one in question.shows:
            assert one.kind == kind
            assert one.words
            assert "_" not in one.words
            assert not one.words.endswith(".")
    path, _ = federation(tmp_path)
    found = phases(FederationFile.read(path))
    assert [phase.when for phase in found] == ["before training", "in every round", "at the end"]
    assert all(phase.shown for phase in found)


def test_methods_ask_for_no_more_than_they_may():
    """`asks`, with any settings, is part of `questions`, from which work is planned."""
    for name, kind in ALGORITHMS.items():
        if name == "Fair" or not kind.questions:
            continue
        known = inspect.signature(kind).parameters
        given = {"objective": OBJECTIVES["Average"]()} if kind.needs_objective() else {}
        for steps in (1, 5):
            more = {"local_steps": steps} if "local_steps" in known else {}
            method = kind(**given, **more)
            for convex in (True, False):
                assert method.asks(convex) <= kind.questions, (name, steps, convex)
