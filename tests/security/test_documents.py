"""What a coordinator writes into its first message: a silo takes it for data, whatever it says.

Everything here goes through `Silo.answer`, before anybody at the silo has agreed to anything.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import re
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from cases.refusals import refuses
from cases.silos import (
    OBJECTIVE,
    QUICK,
    RANGES,
    ROUGH,
    agreement,
    federation,
    is_right,
    mostly_long,
    run,
)
from scaffpd import __file__ as package
from scaffpd import cli
from scaffpd.deploy.agreement import LONGEST, Agreement
from scaffpd.deploy.announcing import UNKNOWN
from scaffpd.deploy.board import BEGIN
from scaffpd.deploy.messages import HEADER, PROTOCOL, REFUSED, VERSION, Message, decode, encode
from scaffpd.deploy.records import GRANTED, WAITING, SiloRecords
from scaffpd.deploy.refusals import AWAITED, CANNOT, SENTENCES, TABLE_BUSY, UNUSABLE
from scaffpd.deploy.silo import READY, Silo
from scaffpd.errors import InputError
from scaffpd.federation.border import shown
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.silo import SiloFile
from scaffpd.settings.terms import FederationTerms

PASSWORD = "correct-horse-battery"
MODULE = f"""
from pathlib import Path
from scaffpd.objectives import Agnostic

Path(__file__).with_name("imported").write_text("here")
PATIENTS = ["{PASSWORD}"]


class Mine(Agnostic):
    pass
"""
NOISE = {"[training]\nrounds = 500\ntol = 1e-6": "[privacy]\nepsilon = 2.0\n[training]\nrounds = 3"}
FUZZED = 2000  # documents of a seed: 10,000 in `make test-all`


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A silo with things that nobody is to see, and a document that it would ask its operator."""
    monkeypatch.setenv("DATABASE_PASSWORD", PASSWORD)
    path, places = federation(tmp_path, granted=False)
    place = places["va"]
    (place.parent / "ourdata.py").write_text(MODULE)
    monkeypatch.chdir(place.parent)  # whatever a silo finds, it finds from here, too
    place.write_text(place.read_text() + "\n[limits]\nshare = 0.90625\n")
    return Silo.open(place), copy.deepcopy(agreement(path, places).values)


def began(silo, document):
    asked = Message(BEGIN, {"agreement": document, "epoch": "1", "states": []})
    return silo.answer(encode(asked))


def place_of(document, path):
    """The table of a document that the last of these names is a key of."""
    for name in path[:-1]:
        document = document.setdefault(name, {})
    return document


def is_fixed(reply, codes=tuple(SENTENCES)):
    """Whether a reply is a refusal of one of these codes, with its sentence and nothing else."""
    found = decode(reply)
    code = found.values["code"]
    assert found.kind == REFUSED
    assert code in codes, found.values
    assert dict(found.values) == {
        "code": code,
        "sentence": SENTENCES[code],
        "waits": code == "agreement-awaited",
    }
    assert not found.arrays


def everything(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


FIELDS = (
    ("terms", "algorithm", "kind"),
    ("terms", "objective", "kind"),
    ("terms", "algorithm", "steps", "kind"),
    ("terms", "model", "kind"),
    ("terms", "algorithm", "weights"),
    ("terms", "name"),
)
ENTRIES = ("os:environ", "ourdata:PATIENTS", "venv.__main__:x", "ourdata:Mine", "../ourdata")


@pytest.mark.parametrize("field", FIELDS, ids="-".join)
@pytest.mark.parametrize("entry", ENTRIES)
def test_no_module_is_named(site, field, entry):
    """It imported what the document named, and answered with the repr of it."""
    silo, document = site
    place_of(document, field)[field[-1]] = entry
    top = entry.partition(":")[0]
    before = everything(silo.file.folder.parent)
    loaded = top in sys.modules
    reply = began(silo, document)
    if field[-1] == "name":  # a text, and shown as one
        is_fixed(reply, ["agreement-awaited"])
        (silo.file.records).unlink()
        (silo.file.records).with_suffix(".lock").unlink(missing_ok=True)
    else:
        is_fixed(reply, ["agreement-unusable"])
    assert PASSWORD.encode() not in reply
    assert everything(silo.file.folder.parent) == before
    assert (top in sys.modules) is loaded


@pytest.mark.parametrize("field", FIELDS[:2], ids="-".join)
def test_a_name_that_no_file_lists_stays_a_name(site, field):
    """Not even once the operator has agreed is a module of that name looked for."""
    silo, document = site
    place_of(document, field)[field[-1]] = "ourdata"
    document["terms"]["objective"].pop("rho")
    is_fixed(began(silo, document), ["agreement-awaited"])
    silo.records.note(GRANTED, Agreement(document).digest.hex(), by="test")
    is_fixed(began(silo, document), ["code-not-listed"])
    assert not (silo.file.folder / "imported").exists()
    assert "ourdata" not in sys.modules
    assert not silo.records.known().runs


def test_own_code_is_loaded_once_a_person_has_agreed(tmp_path, capsys, fake_clock):
    """A name in the agreement, and an entry in every file: what it asks for is not known before."""
    listed = '\n[objectives]\nmine = "ourdata:Mine"\n'
    path, places = federation(
        tmp_path,
        granted=False,
        replacing={OBJECTIVE: '[objective]\nkind = "mine"\n', **QUICK, **ROUGH},
        more=listed,
    )
    for folder in (tmp_path, *(place.parent for place in places.values())):
        (folder / "ourdata.py").write_text(MODULE)
    for place in places.values():
        share = 0.5 if place == places["va"] else 1.0
        place.write_text(f"{place.read_text()}{listed}\n[limits]\nshare = {share}\n")
    marks = [place.with_name("imported") for place in places.values()]
    document = agreement(path, places)  # the coordinator's own file, with its own copy
    assert "ourdata" not in json.dumps(document.values)
    digest = document.digest.hex()
    silos = {name: Silo.open(place) for name, place in places.items()}
    for silo in silos.values():
        is_fixed(began(silo, document.values), ["agreement-awaited"])
    assert cli.run(["silo", "agree", str(places["va"])]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "objective 'mine' = ourdata:Mine of this silo's own file" in words
    assert "loaded once you have agreed: it may ask for all that follows" in words
    assert "Losses in the clear: yes" in words
    for union in ("sum of gradients", "local updates", "Hessians", "your loss at every point"):
        assert union in words, union
    assert not any(mark.exists() for mark in marks)
    for silo in silos.values():
        silo.records.note(GRANTED, digest, by="test")
    # the limit of the share depends on the objective: it is checked now, before a row is read
    is_fixed(began(silos["va"], document.values), ["share-too-large"])
    assert marks[-1].exists()
    assert not silos["va"].records.known().runs
    text = places["va"].read_text()
    places["va"].write_text(text.replace("share = 0.5", "share = 1.0"))
    outcome, _ = run(path, places)
    assert all(mark.exists() for mark in marks)
    is_right(path, places, outcome)


def test_noise_of_own_code_is_checked_once_it_is_loaded(tmp_path):
    """It depends on what the method asks; a document that has less is refused then."""
    listed = '\n[objectives]\nmine = "ourdata:Mine"\n'
    path, places = federation(
        tmp_path,
        granted=False,
        replacing={OBJECTIVE: '[objective]\nkind = "mine"\n', **NOISE, **RANGES},
        more=listed,
    )
    for folder in (tmp_path, places["va"].parent):
        (folder / "ourdata.py").write_text(MODULE)
    places["va"].write_text(places["va"].read_text() + f"{listed}[limits]\nshare = 1.0\n")
    silo = Silo.open(places["va"])
    values = agreement(path, places).values
    for noise, code in ((values["noise"]["noise"], None), (1e-6, "agreement-unusable")):
        document = {**values, "noise": {**values["noise"], "noise": noise}}
        is_fixed(began(silo, document), ["agreement-awaited"])
        silo.records.note(GRANTED, Agreement(document).digest.hex(), by="test")
        reply = began(silo, document)
        if code is None:
            assert decode(reply).kind == READY
        else:
            is_fixed(reply, [code])
    for noise in ({}, {"noise": "x"}, {"noise": [1.0]}, dict.fromkeys("abcdefghijklm", 1.0), 3):
        is_fixed(began(silo, {**values, "noise": noise}), ["agreement-unusable"])


def test_own_code_that_fails_or_exits_is_not_told(site):
    silo, document = site
    folder = silo.file.folder
    document["terms"]["objective"] = {"kind": "mine"}
    for number, text in enumerate((f"raise ValueError('{PASSWORD}')", "raise SystemExit(3)")):
        (folder / f"broken{number}.py").write_text(text)
        silo.file.objectives["mine"] = f"broken{number}:Mine"
        silo.records.note(GRANTED, Agreement(document).digest.hex(), by="test")
        is_fixed(began(silo, document), ["silo-cannot"])
    assert not silo.records.known().runs


def test_an_own_class_does_not_take_a_name_of_the_package(site):
    silo, _ = site
    text = silo.file.path.read_text()
    for line in ('[methods]\nFair = "a:B"', '[objectives]\nCVaR = "a:B"'):
        silo.file.path.write_text(f"{text}\n{line}\n")
        with refuses("name-of-the-package"):
            SiloFile.read(silo.file.path)
    silo.file.path.write_text(f'{text}\n[methods]\n"a:b" = "a:B"\n')
    with refuses("setting-invalid"):
        SiloFile.read(silo.file.path)


def test_few_agreements_wait_for_the_operator(site, monkeypatch, capsys):
    """Five of 4 MB made the next `silo agree` take 47 seconds."""
    silo, document = site
    text = {f"column {k}": "number" for k in range(1500)}

    def asked(seed):
        document["terms"]["training"]["seed"] = seed
        document["terms"]["columns"] = text
        return began(silo, document)

    for seed in range(WAITING):
        is_fixed(asked(seed), ["agreement-awaited"])
        is_fixed(asked(seed), ["agreement-awaited"])  # a coordinator asks again and again
    size = silo.file.records.stat().st_size
    assert size < WAITING * 2 * LONGEST
    reads = []
    whole = SiloRecords.read
    monkeypatch.setattr(SiloRecords, "read", lambda self: reads.append(1) or whole(self))
    is_fixed(asked(100), ["too-many-waiting"])
    assert len(reads) <= 2
    assert silo.file.records.stat().st_size == size
    place = str(silo.file.path)
    before = time.perf_counter()
    assert cli.run(["silo", "agree", place, "--json"]) == 0
    assert time.perf_counter() - before < 10.0
    shown = json.loads(capsys.readouterr().out)
    assert [own["state"] for own in shown] == ["waiting"] * WAITING
    assert cli.run(["silo", "agree", place, "--revoke", shown[0]["agreement"]]) == 0
    is_fixed(asked(100), ["agreement-awaited"])  # what is decided does not count
    is_fixed(asked(101), ["too-many-waiting"])
    assert cli.run(["silo", "agree", place, "--grant", shown[1]["agreement"]]) == 0
    assert decode(asked(1)).kind == READY  # and does not wait behind others
    is_fixed(asked(0), ["agreement-revoked"])


def test_documents_are_small(site):
    silo, document = site
    columns = document["terms"]["columns"] = {"age": "number"}
    while (left := LONGEST - len(json.dumps(document))) > 600:
        columns[f"{len(columns):0400}"] = "number"
    columns["y" * (left - len(', "": "number"'))] = "number"
    assert len(json.dumps(document)) == LONGEST
    is_fixed(began(silo, document), ["agreement-awaited"])
    document["terms"]["name"] += "s"
    is_fixed(began(silo, document), ["agreement-too-large"])
    document["terms"]["name"] = "n" * 10**6
    is_fixed(began(silo, document), ["too-many-values"])
    (line,) = silo.records.read()  # what is refused is not written down
    assert len(json.dumps(line)) < LONGEST + 1000


def test_a_federation_that_is_too_large_is_refused_at_its_coordinator(tmp_path):
    path, places = federation(tmp_path, granted=False)
    columns = "".join(f'"{"c" * 100}{k}" = "number"\n' for k in range(700))
    path.write_text(path.read_text().replace("[columns]\n", f"[columns]\n{columns}"))
    with refuses("agreement-too-large"):
        agreement(path, places)


NUMBERS = (True, "1", [], {}, -1, -1.0, 1e308, float("nan"), float("inf"), 10**400)
OUTSIDE = {
    ("privacy", "delta"): (0.999999, 0.0011, 0, 1e-31),
    ("privacy", "epsilon"): (0, 1e-7, 1e7),
    ("privacy", "clip"): (0, 1e-9, 1e7),
    ("privacy", "loss_clip"): (0, 1e-9, 1e7),
    ("privacy", "radius"): (0, 1e13),
    ("privacy", "smoothness"): (0, 1e13),
    ("training", "rounds"): (0, 10**6 + 1, 2.0),
    ("training", "seed"): (2**62 + 1, 2.0),
    ("training", "tol"): (1e7,),
    ("model", "l2"): (1e13,),
    ("model", "kappa"): (0, 1e13),
    ("pairs",): (1001, 2.0),
    ("colluding",): (0, 1001, 1.0),
    ("algorithm", "local_steps"): (0, 10**6 + 1, 2.0),
    ("algorithm", "batch_size"): (0, 10**6 + 1, 2.0),
    ("algorithm", "local_rate"): (0, 1e7),
    ("objective", "rho"): (0, 1e13),
    ("objective", "cap"): (0, 1.1),
}
TEXTS = {
    ("name",): ("", "n" * 101, "\ud800", 3),
    ("silos",): ([], ["a"] * 3, [f"s{k}" for k in range(1001)], ["../a", "b", "c"], ["s" * 64]),
    ("columns",): (
        {},
        {"a" * 501: "number"},
        {"": "number"},
        {"\ud800": "number"},
        {"a": ["f" * 501]},
        {"a": ["f", {"a": 1}]},
        {"a": [0.0, 1e160]},
        {"a": [1.0, 0.0]},
        {"a": [float("nan"), 1.0]},
        [2**31 + 1],
        [2**20, 2**20],
        [1] * 9,
        [0],
    ),
    ("labels",): ([1], list(range(1001)), [True, False], ["a" * 501, "b"], [2**60, 1], ["a", 1]),
    ("curves",): ("maybe", True, "\ud800"),
    ("objective", "prior"): ([0.0] * 4, [1.0] * 1001, ["a"], [float("nan")] * 4, 3),
    ("objective", "kind"): ("", "a" * 64, "a.b", "a b", 3),
    ("algorithm", "kind"): ("", "a" * 64, "__class__", "Fa ir", 3),
    ("algorithm", "objective"): ({"kind": "Agnostic"}, "Agnostic"),
    ("algorithm", "steps"): ({"kind": "StepRule"}, {"kind": "Fixed", "tau": 1e9}, "Auto", {}),
    ("algorithm", "other"): ({"a": 1}, ["a"], "a:b", "a" * 64, [1.0] * 1001, 1e13),
}


def test_every_number_and_every_text_has_a_range(tmp_path):
    """A δ of .999999 was accepted. The same table reads a coordinator's federation.toml."""
    path, places = federation(tmp_path, granted=False, replacing={**NOISE, **RANGES})
    path.write_text(
        path.read_text().replace(
            "[objective]", '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 2\n[objective]'
        )
    )
    whole = agreement(path, places).values
    place = places["va"]
    assert Agreement.of(whole, place).values == whole
    wrong = {path: (*values, *NUMBERS) for path, values in OUTSIDE.items()} | TEXTS
    for field, values in wrong.items():
        for value in (*values, None):
            document = copy.deepcopy(whole)
            place_of(document["terms"], field)[field[-1]] = value
            assert is_refused(document, place, value), (field, value)


def is_refused(document, place, value):
    """Whether its terms alone are refused, whatever its noise is; or all of it, for a null."""
    try:
        Agreement.of(document, place) if value is None else Agreement(document).terms(place)
    except InputError:
        return True
    return False


def test_json_is_read_strictly(site):
    """A member that is there twice is shown once; no number of a document is none."""
    silo, document = site
    text = asking(document)
    is_fixed(silo.answer(raw(text)), ["agreement-awaited"])
    for old, new in (
        ('"terms": {', '"terms": {"name": "a", '),
        ("0.1", "1e999"),
        ("0.1", "NaN"),
        ("0.1", "-Infinity"),
        ("500", "9" * 5000),
        ('"agreement": ', '"agreement": ' + "[" * 30_000),
    ):
        assert old in text
        is_fixed(silo.answer(raw(text.replace(old, new, 1))), ["not-a-message"])


def raw(text):
    """A message whose JSON is this text."""
    return save({HEADER: np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)})


def asking(document):
    values = {"agreement": document, "epoch": "1", "states": []}
    about = {"protocol": PROTOCOL, "version": VERSION, "kind": BEGIN, "values": values}
    return json.dumps(about)


ODD = (
    *(True, None, "", "x" * 70_000, "\ud800", "a:b", "os:environ", "../..", "{0.__class__}", "%s"),
    *(0, -1, 10**30, 1.0, -0.0, 1e308, float("nan"), float("inf"), [], {}, [[]], {"a": {}}),
    *([0.5] * 1001, [[[[[[[[1]]]]]]]], {"kind": "Fair"}, "CVaR", "cox", "auto", "*", "number"),
)


def spots(value):
    """Every table or list of a document with a key of it."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from spots(value[key])


def mutated(dice, document):
    """A document with something odd in it, as the text of a question."""
    made = copy.deepcopy(document)
    for _ in range(dice.choice((1, 1, 2, 4))):
        table, key = dice.choice(list(spots(made)))
        match dice.randrange(4):
            case 0 if isinstance(table, dict):
                table[dice.choice(("kind", "extra", "x" * 600, "__init__", "\ud800"))] = (
                    dice.choice(ODD)
                )
            case 1:
                del table[key]
            case _:
                table[key] = copy.deepcopy(dice.choice(ODD))
    text = asking(made)
    match dice.randrange(12):
        case 0:  # a member twice
            text = text.replace('"terms": {', '"terms": {"name": "a", "name": "b", ', 1)
        case 1:
            text = text.replace("0.1", "1e999", 1)
        case 2:
            text = text.replace("500", "9" * 5000, 1)
        case 3:
            text = text.replace('"agreement": ', '"agreement": ' + "[" * 5000, 1)
        case 4:
            text = text[: dice.randrange(len(text))]
    return text


@pytest.mark.parametrize("seed", mostly_long(range(46, 51), 46))
def test_mutated_documents_get_a_fixed_answer(site, monkeypatch, caplog, seed):
    """No text, number or path of this machine is in a reply, and nothing fails by surprise."""
    silo, document = site
    table = silo.file.folder / "patients.csv"
    table.write_text(table.read_text().replace("age,", "agesecret,", 1))
    local = [PASSWORD, str(silo.file.folder), "patients", "agesecret", "90625", "91%", "ourdata"]
    methods = import_module("scaffpd.settings.methods")

    def imported(name):
        raise AssertionError(name)

    monkeypatch.setattr(methods.importlib, "import_module", imported)
    dice = random.Random(seed)
    codes = set()
    caplog.set_level(logging.ERROR, logger="scaffpd.silo")
    for _ in range(FUZZED):
        reply = silo.answer(raw(mutated(dice, document)))
        is_fixed(reply)
        codes.add(decode(reply).values["code"])
        for text in local:
            assert text.encode() not in reply
    assert not caplog.records, caplog.records[0].exc_text  # "a question failed"
    assert {"agreement-unusable", "not-a-message", "agreement-awaited"} <= codes, codes
    assert len(silo.records.known().documents) <= WAITING
    for garbage in (b"", b"\0" * 100, raw("[]"), raw("NaN"), raw('{"kind": "card", "kind": "b"}')):
        is_fixed(silo.answer(garbage), ["not-a-message"])


def test_what_this_silos_file_says_is_not_told(site):
    """A refusal by a limit of silo.toml has no number of it."""
    silo, document = site
    document["terms"]["floor"] = 0.0
    reply = began(silo, document)
    is_fixed(reply, ["share-too-large"])
    silo.file.identity.write_text("unreadable")
    other = Silo.open(silo.file.path)
    is_fixed(began(other, document), ["silo-cannot"])


def test_all_fixed_sentences_stand_for_a_refusal():
    """Every code that is answered is raised somewhere in the package."""
    places = [file for file in Path(package).parent.rglob("*.py") if file.name != "refusals.py"]
    raised = set(re.findall(r'"([a-z0-9-]+)"', "".join(file.read_text() for file in places)))
    assert SENTENCES.keys() <= raised | {CANNOT, UNUSABLE, AWAITED, TABLE_BUSY}


def test_what_own_code_may_post_was_read_before(tmp_path):
    """A question of its own was announced once it was loaded, when nobody read any more."""
    path, _ = federation(tmp_path, granted=False)
    path.write_text(
        path.read_text() + '[algorithm]\nkind = "mine"\n[methods]\nmine = "peeking:Mine"\n'
    )
    (tmp_path / "peeking.py").write_text(
        "from scaffpd.algorithms import ScaffPD\n"
        "from scaffpd.federation.border import each\n"
        "from scaffpd.federation.questions import Question\n"
        "class Peek(Question):\n"
        '    kind = "peek"\n'
        '    shows = (each("row", "your first row"),)\n'
        "class Mine(ScaffPD):\n"
        '    questions = ScaffPD.questions | {"peek"}\n'
        "    def asks(self, convex=True):\n"
        '        return super().asks(convex) | {"peek"}\n'
    )
    with refuses("method-for-simulation"):
        FederationFile.read(path)
    assert ("peek", "row") not in {one.key for one in shown(UNKNOWN)}


def test_terms_have_no_entries():
    """The coordinator's own list of classes does not travel."""
    assert {"methods", "objectives", "folder"} <= FederationFile.model_fields.keys()
    assert not {"methods", "objectives", "folder"} & FederationTerms.model_fields.keys()
