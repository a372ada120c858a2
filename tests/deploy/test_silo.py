"""What a silo answers, what it refuses, and what leaves it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from test_runtime_agreement import EVERYTHING, settings

import scaffpd as sp
from cases.silos import QUICK, Faulty, opened, rough, run
from scaffpd.algorithms import ALGORITHMS
from scaffpd.algorithms.base import SIZES
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import PROTOCOL, Message, decode, encode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.run.record import RunRecord
from scaffpd.run.settings.federation import FederationFile


def federation(folder, silos=2, **how):
    return rough(folder, silos, **how)


# every kind of answer, and the shapes of all that may be in it, with d parameters and k directions
LEAVES = {
    "gradients": {"c": "d", "scalars": 3},
    "losses": {"scalars": 1},
    "local_updates": {"d": "d", "snapshot": "d"},
    "proximal_steps": {"d": "d"},
    "curvature": {"curvature": "kk", "slopes": "k", "scalars": 1},
    "diagonal": {"diagonal": "d"},
    "evaluate": {"scalars": 3},
    "totals": {"n": "columns", "sum": "columns", "squares": "columns"},
    "setup": {"constants": 4},
    "start": {"x": "d"},
}
WORDS = {  # what an answer says besides, for every kind
    "hello": {"version"},
    "describe": {"description"},
    "setup": {"dimension", "dtype", "convex", "quadratic", "noisy", "tested", "start", "samples"},
}


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Every question and answer of a short run, with the agreement and the algorithm's name; each
    run is made once.
    """

    @functools.cache
    def log(name, loss):
        path, places = settings(tmp_path_factory.mktemp(name), name, rounds=3, silos=2)
        path.write_text(path.read_text().replace('"logistic"', f'"{loss}"'))
        transport = Faulty(places)
        file = FederationFile.read(path)
        assert coordinate(path, transport).final
        pairs = [
            (decode(question, 2**31), decode(answer, 2**31))
            for _, question, answer in transport.log
        ]
        return pairs, DeployedRun(file.folder).setup(), type(file.method).__name__

    return log


@pytest.mark.parametrize("name", EVERYTHING)
def test_nothing_leaves_but_what_the_algorithm_needs(exchanged, name):
    pairs, setup, algorithm = exchanged(name, "logistic")
    asked = set()
    for question, answer in pairs:
        if answer.kind == "missing":
            continue
        assert answer.kind == "answer"
        assert set(answer.values) - {"question", "silo"} == WORDS.get(question.kind, set())
        sizes = {"d": 25, "columns": len(setup.mean)}
        if question.kind == "curvature":
            sizes |= {"k": question.arrays["V"].shape[1], "kk": question.arrays["V"].shape[1] ** 2}
        allowed = LEAVES.get(question.kind, {})
        for part, array in answer.arrays.items():
            assert array.size == sizes.get(allowed[part], allowed[part]), (question.kind, part)
        if question.kind in LEAVES and question.kind not in ("totals", "setup", "start"):
            asked.add(question.kind)
    assert asked <= ALGORITHMS[algorithm].questions | {"evaluate"}


def test_algorithms_ask_what_they_say_they_ask(exchanged):
    """Every algorithm of the package is listed, and every question that it declares is asked by
    some run.
    """
    classes = {
        name for name in sp.algorithms.__all__ if isinstance(getattr(sp.algorithms, name), type)
    }
    assert set(ALGORITHMS) == classes - {"Algorithm"}
    declared = {
        name: set(kind.questions) - {SIZES} for name, kind in ALGORITHMS.items()
    }  # with masks only
    asked = {name: set() for name in ALGORITHMS}
    for name in EVERYTHING:
        pairs, _, algorithm = exchanged(name, "logistic")
        if "diagonal" in declared[algorithm]:  # which squared losses are asked for
            pairs = [*pairs, *exchanged(name, "squared")[0]]
        asked[algorithm] |= {question.kind for question, _ in pairs} & set().union(
            *declared.values()
        )
    asked["Fair"] |= {"local_updates"}  # where it chooses Scaff-PD
    for name in ("ScaffPD", "Fair"):
        asked[name] |= {"losses"}  # on networks
    assert declared == asked


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A silo after a run, and what it would be asked next; its answers depend on nothing that was
    asked before.
    """
    change = {
        "[objective]": '[algorithm]\nkind = "ScaffPD"\n\n[objective]',
        "rounds = 500": "rounds = 3",
    }
    path, places = federation(tmp_path_factory.mktemp("ready"), replacing=change, more=QUICK)
    outcome, transport = run(path, places)
    assert outcome.final
    setup = DeployedRun(FederationFile.read(path).folder).setup()
    x = np.zeros(25)

    def ask(kind, arrays=None, **values):
        values = {"setup": setup.digest, "question": "1", **values}
        question = encode(Message(kind, values, {"x": x} if arrays is None else arrays))
        return decode(transport.silos["va"].answer(question), 2**31)

    return ask, transport.silos["va"], setup


PLAN = {
    "steps": 10,
    "rate": None,
    "scale": 1.0,
    "batch_size": None,
    "key": [0],
    "prox": 0.0,
    "snapshot": None,
}


def test_sound_questions_are_answered(ready):
    ask, _, _ = ready
    assert ask("gradients").kind == "answer"
    assert ask("local_updates", plan=PLAN).kind == "answer"
    assert ask("evaluate", split="test").kind == "answer"


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("curvature", {}, "ScaffPD needs no question 'curvature'"),
        ("diagonal", {}, "ScaffPD needs no question"),
        ("rows", {}, "ScaffPD needs no question 'rows'"),
        ("local_updates", {"plan": {**PLAN, "steps": 10_001}}, "10001 local steps are asked for"),
        ("local_updates", {"plan": {**PLAN, "steps": -1}}, "cannot be carried out"),
        ("local_updates", {"plan": {**PLAN, "steps": "many"}}, "local steps are asked for"),
        ("local_updates", {"plan": {"steps": 1}}, "not complete"),
        ("local_updates", {"plan": {**PLAN, "rate": "x"}}, "cannot be carried out (rate)"),
        ("local_updates", {"plan": {**PLAN, "batch_size": 1}}, "A batch of 1 rows"),
        (
            "gradients",
            {"batch_size": 1},
            "A batch of 1 rows is asked for; this silo answers for 20 or more",
        ),
        ("gradients", {"batch_size": True}, "A batch of True rows"),
        ("gradients", {"key": ["a"]}, "batch size or key"),
        ("evaluate", {"split": "all"}, "Unknown split"),
    ],
)
def test_refusals(ready, kind, values, sentence):
    ask, _, _ = ready
    answer = ask(kind, **values)
    assert answer.kind == "refused"
    assert sentence in answer.values["sentence"]
    assert not answer.arrays


def test_vectors_are_checked(ready):
    ask, _, _ = ready
    answer = ask("gradients", {"x": np.zeros(5)})
    assert "shape (5,) came for a model of 25" in answer.values["sentence"]
    assert "lacks the vector x" in ask("gradients", {}).values["sentence"]
    assert ask("gradients", setup="another").kind == "missing"


def limited(tmp_path, text, change=None):
    path, places = federation(tmp_path, replacing=change, more=QUICK)
    place = places["va"]
    place.write_text(place.read_text() + f"\n[limits]\n{text}\n")
    return coordinate(path, Faulty(places))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            'algorithms = ["ScaffPD"]',
            "Silo 'va' refuses: This silo takes part in ScaffPD, not in Fair.",
        ),
        (
            "dimension = 10",
            "Silo 'va' refuses: A model of 24 parameters is larger than the 10 that this silo "
            "allows.",
        ),
        ("rows = 150", "training rows"),
    ],
)
def test_a_silo_accepts_only_what_its_file_allows(tmp_path, text, sentence):
    outcome = limited(tmp_path, text)
    assert (outcome.status, outcome.final) == ("failed", True)
    assert sentence in outcome.sentence


def test_what_is_wrong_with_a_silos_files_stays_there(tmp_path, caplog):
    path, places = federation(tmp_path, more=QUICK)
    (places["va"].parent / "patients.csv").write_text("age,secret-name,disease\nSmith,1,2,3\n")
    outcome = coordinate(path, Faulty(places))
    assert (
        outcome.sentence
        == "Silo 'va' refuses: The silo's own files cannot be read; its log says why."
    )
    assert "line 2" in caplog.text or "patients.csv" in caplog.text


def test_a_silo_whose_schema_differs_is_refused_with_its_column(tmp_path):
    path, places = federation(tmp_path, more=QUICK)
    file = places["va"].parent / "patients.csv"
    file.write_text(file.read_text().replace("chol", "cholesterol", 1))
    outcome = coordinate(path, Faulty(places))
    assert "Silo 'va' has no column 'chol', which 'cleveland' has" in outcome.sentence
    file.write_text(file.read_text().replace("cholesterol", "chol", 1))
    assert coordinate(path, Faulty(places)).status == "converged"  # once it is put right


def test_an_exception_in_a_silo_says_its_kind_and_nothing_else(tmp_path, monkeypatch, caplog):
    _, places = federation(tmp_path)
    silo = opened(places)["va"]
    monkeypatch.setattr("scaffpd.deploy.silo.dataset.Dataset.describe", lambda *_: 1 / 0)
    answer = decode(silo.answer(encode(Message("describe", {"question": "7"}))), 2**20)
    assert answer.kind == "failed"
    assert answer.values == {
        "sentence": "ZeroDivisionError; the silo's log says more.",
        "question": "7",
        "silo": "va",
    }


def test_single_rows_are_not_told(tmp_path):
    """Few held-out rows are not tested on; a second agreement, with other columns or means, is
    refused.
    """
    path, places = federation(tmp_path, more=QUICK)
    place = places["va"]
    place.write_text(place.read_text().replace("test = 0.3", "test = 0.05"))
    outcome = coordinate(path, Faulty(places))
    assert outcome.status == "converged"
    last = RunRecord.read(FederationFile.read(path).folder).main.clients[-1]
    assert (last.client, last.test_rows, last.test_loss, last.test_score) == ("va", 0, None, None)
    silo = Silo.open(place)
    setup = DeployedRun(FederationFile.read(path).folder).setup()

    def ask(kind, arrays=None, **values):
        return decode(
            silo.answer(encode(Message(kind, {"question": "1", **values}, arrays or {}))), 2**31
        )

    assert ask("setup", setup=setup.values()).values["tested"] == 0
    x = np.zeros(25)
    tested = ask("evaluate", {"x": x}, split="test", setup=setup.digest)
    assert "does not test on them" in tested.values["sentence"]
    other = {**setup.values(), "mean": (setup.mean + 1).tolist()}
    assert "another agreement" in ask("setup", setup=other).values["sentence"]
    schema = setup.values()["schema"]
    for k in range(4):
        assert ask("totals", {"mean": setup.mean + k}, schema=schema).kind == "answer"
    fifth = ask("totals", {"mean": setup.mean - 1}, schema=schema)
    assert "another mean" in fifth.values["sentence"]


def test_an_absurd_model_is_refused_before_it_is_built(tmp_path):
    path, places = federation(
        tmp_path,
        replacing={'"logistic"': '"softmax"', "l2 = 0.03": "l2 = 0.03\nclasses = 20_000_000"},
        more=QUICK,
    )
    outcome = coordinate(path, Faulty(places))
    assert "parameters is larger than the 1000000" in outcome.sentence


@pytest.mark.parametrize("number", [float("nan"), "x" * 1000, {"a": 1}, 7])
def test_odd_question_numbers_are_not_repeated(tmp_path, number):
    import json

    from safetensors.numpy import save

    _, places = federation(tmp_path)
    header = json.dumps(
        {"protocol": PROTOCOL, "kind": "hello", "values": {"question": number}}
    ).encode()
    answer = opened(places)["va"].answer(save({"header": np.frombuffer(header, dtype=np.uint8)}))
    assert decode(answer, 2**20).values["question"] is None


def test_an_entry_may_return_rows_or_a_cohort(tmp_path):
    code = (
        "import numpy as np\nimport scaffpd as sp\n"
        "def rows():\n    r = np.random.default_rng(SEED)\n"
        "    return r.standard_normal((60, 5)), r.integers(0, 2, 60)\n"
        "def cohort():\n    return sp.Cohort({NAME: rows()}, sp.Linear('logistic', l2=0.1))\n"
    )
    for entry in ("rows", "cohort"):
        path, places = federation(tmp_path / entry, more=QUICK)
        for seed, (name, place) in enumerate(places.items()):
            (place.parent / "ward.py").write_text(
                code.replace("SEED", str(seed)).replace("NAME", repr(name))
            )
            place.write_text(f'name = "{name}"\n[data]\nentry = "ward:{entry}"\n')
        outcome = coordinate(path, Faulty(places))
        assert outcome.status == "converged", outcome


def test_a_network_that_silos_know_by_name(tmp_path):
    path, places = federation(
        tmp_path,
        replacing={
            '[model]\nloss = "logistic"\nl2 = 0.03\n': '[model]\nkind = "net"\n',
            "rounds = 500\ntol = 1e-6": "rounds = 3\ntol = 0",
        },
        more=QUICK,
    )
    code = (
        "import torch\nimport scaffpd as sp\n"
        "def make():\n    torch.manual_seed(0)\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(24, 4), torch.nn.Tanh(), "
        "torch.nn.Linear(4, 2)).double()\n"
        "    return sp.Module(net, 'cross_entropy', l2=0.01)\n"
    )
    for place in places.values():
        (place.parent / "nets.py").write_text(code)
        place.write_text(place.read_text() + '\n[models]\nnet = "nets:make"\n')
    outcome = coordinate(path, Faulty(places))
    assert outcome.status == "round limit", outcome
    unknown = coordinate(*_without_models(tmp_path / "other"))
    assert "This silo knows no model 'net'" in unknown.sentence


def _without_models(folder):
    change = {'[model]\nloss = "logistic"\nl2 = 0.03\n': '[model]\nkind = "net"\n'}
    path, places = federation(folder, replacing=change, more=QUICK)
    return path, Faulty(places)
