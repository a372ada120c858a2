"""The same rows are known again: however they are read, whoever asks, and whenever."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet
import pytest

from cases.refusals import refuses
from cases.silos import (
    QUICK,
    ROUGH,
    Faulty,
    Killed,
    agree,
    agreement,
    entries,
    federation,
    run,
)
from scaffpd.deploy.board import BEGIN
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.dataset import Dataset
from scaffpd.deploy.ledger import Entrant, TableLedger
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.records import LEFT, SiloRecords
from scaffpd.deploy.silo import READY, Silo
from scaffpd.deploy.tables import ANYTHING, Wanted
from scaffpd.settings.silo import SiloFile
from scaffpd.tasks import named

SHORT = ROUGH | QUICK | {"rounds = 500": "rounds = 2"}
SECRET = bytes(32)


def another(path, folder, *changes):
    """The federation's file with changes, and a folder of its own."""
    text = path.read_text().replace('folder = "run"', f'folder = "{folder}"')
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    other = path.with_name(f"{folder}.toml")
    other.write_text(text)
    return other


OTHER_PRIOR = ("rho = 0.1", "rho = 0.1\nprior = [0.4, 0.3, 0.3]")
NO_LABELS = ("labels = [0, 1]\n", "")
READINGS = {
    "numbers": (NO_LABELS,),
    "numbers of another loss": (NO_LABELS, ('kind = "logistic"', 'kind = "squared"')),
    "texts": (("labels = [0, 1]", 'labels = ["0", "1"]'),),
    "fewer columns": (('chol = "number"\n', ""), NO_LABELS),
}


@pytest.mark.parametrize("how", READINGS)
def test_rows_that_a_document_has_read_in_another_way_are_the_same(tmp_path, fake_clock, how):
    """Without `labels` a target is numbers, and every gradient is that of the run with them."""
    path, places = federation(tmp_path, 3, SHORT)
    assert run(path, places)[0].final
    other = another(path, "two", OTHER_PRIOR, *READINGS[how])
    agree(other, places)
    outcome, _ = run(other, places)
    assert outcome.status == "paused"
    assert "with more weightings than are safe" in outcome.sentence
    assert len({line["rows"] for line in entries(places["va"])}) == 1


def written(folder, suffix, y):
    file = folder / f"table.{suffix}"
    if suffix == "csv":
        lines = [f"{cell},{k}" for k, cell in enumerate(y)]
        file.write_text("\n".join(["y,x", *lines]) + "\n")
    else:
        pa.parquet.write_table(pa.table({"y": y, "x": range(len(y))}), file)
    return file


def mark(folder, source, wanted=ANYTHING):
    place = folder / "silo.toml"
    place.write_text(f'name = "a"\n[data]\n{source}\ntest = 0.0\n')
    return Dataset.read(SiloFile.read(place), wanted).marks(SECRET)


def of_table(folder, suffix, y, wanted=ANYTHING):
    return mark(folder, f'file = "{written(folder, suffix, y).name}"\ntarget = "y"', wanted)


def test_a_mark_is_of_the_rows_and_not_of_the_agreement(tmp_path):
    y = [0, 1, 1, 0, 1]
    first = of_table(tmp_path, "csv", y)
    for wanted in (
        Wanted((), (), named("classification")),
        Wanted((), (), named("regression")),
        Wanted(("x",), ("x",), named("classification")),
        Wanted(("x", "y"), ("x", "y"), named("classification")),  # the target as categories
    ):
        assert of_table(tmp_path, "csv", y, wanted) == first
    for suffix, cells in (
        ("csv", ["0.0", "1.0", "1", "0", " 1"]),
        ("csv", ["0", "", "1", "1", "NA", "0", "1"]),  # without a target it is no row
        ("csv", ["false", "true", "true", "false", "true"]),
        ("csv", [1, 1, 1, 0, 0]),  # in another order
        ("parquet", y),
        ("parquet", [float(one) for one in y]),
        ("parquet", [str(one) for one in y]),
        ("parquet", [one == 1 for one in y]),
    ):
        assert of_table(tmp_path, suffix, cells) == first, cells
    for cells in (y[1:], [*y, 1], [0, 1, 1, 1, 1], [0, 2, 2, 0, 2], ["a", "b", "b", "a", "b"]):
        assert of_table(tmp_path, "csv", cells) != first, cells
    halves = [0.5, 1.25, 3.0]
    category = Wanted(("x", "y"), ("x", "y"), named("classification"))
    texts = ["0.50", "1.250", "3"]
    assert of_table(tmp_path, "csv", texts, category) == of_table(tmp_path, "csv", halves)


def test_a_mark_of_an_entry_and_of_times(tmp_path):
    (tmp_path / "rows_of.py").write_text(
        "import numpy as np\n"
        "def ints():\n    return np.eye(4), np.array([0, 1, 1, 0])\n"
        "def floats():\n    return np.eye(4), np.array([0.0, 1.0, 1.0, 0.0])\n"
        "def texts():\n    return np.eye(4), np.array(['0', '1', '1', '0'])\n"
        "def truths():\n    return np.eye(4), np.array([False, True, True, False])\n"
    )
    found = {
        mark(tmp_path, f'entry = "rows_of:{kind}"', Wanted((), (), task))
        for kind in ("ints", "floats", "texts", "truths")
        for task in (None, named("classification"))
    }
    assert len(found) == 1
    (tmp_path / "table.csv").write_text("days,died,x\n3,1,1\n5,0,2\n8,1,2\n")
    source = 'file = "table.csv"\ntarget = ["days", "died"]'
    times = mark(tmp_path, source)
    assert mark(tmp_path, source, Wanted(("x",), ("x",), named("survival"))) == times
    (tmp_path / "table.csv").write_text("days,died,x\n3,1,1\n5,0,2\n9,1,2\n")
    assert mark(tmp_path, source) != times


def begun(silo, document, epoch="1"):
    values = {"agreement": document.values, "epoch": epoch, "states": []}
    return decode(silo.answer(encode(Message(BEGIN, values))))


def meanwhile(monkeypatch, what):
    """Do something once, while a silo waits for its table."""
    take = TableLedger.take
    todo = [what]

    def slow(self, *noted):
        if todo:
            todo.pop()()
        return take(self, *noted)

    monkeypatch.setattr(TableLedger, "take", slow)


def test_a_run_that_begins_while_another_one_waits_has_a_person_asked(tmp_path, monkeypatch):
    """What the silo knew before it waited is no longer all."""
    path, places = federation(tmp_path, granted=False)
    four = agreement(path, places)
    pins = "".join(f'{name} = "{card.fingerprint}"\n' for name, card in four.cards.items())
    place = places["va"]
    place.write_text(f'agree = "always"\n{place.read_text()}\n[members]\n{pins}')
    others = {name: own for name, own in places.items() if name != "hungarian"}
    three = agreement(another(path, "three", ('"hungarian", ', "")), others)
    silo = Silo.open(place)

    def first():
        early = Silo.open(place)
        assert begun(early, four).kind == READY
        early.close()

    meanwhile(monkeypatch, first)
    reply = begun(silo, three)
    assert (reply.values.get("code"), reply.values.get("waits")) == ("agreement-awaited", True)
    assert three.digest.hex() in silo.records.known().waiting
    assert begun(silo, four).kind == READY  # the table is free
    silo.close()


def test_what_was_noted_of_the_ledger_is_looked_up_once_the_table_is_free(tmp_path, monkeypatch):
    path, places = federation(tmp_path, 3)
    document = agreement(path, places)
    place = places["va"]

    def first():
        early = Silo.open(place)
        assert begun(early, document).kind == READY
        early.close()
        shutil.rmtree(SiloFile.read(place).ledger)

    meanwhile(monkeypatch, first)
    assert begun(Silo.open(place), document).values.get("code") == "ledger-went-back"


def renamed(path, places, key=""):
    """The first silo under another name, with another prior and this key, or its own."""
    old = places["cleveland"].parent
    new = old.with_name("aachen")
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("rec*", "led*", "runs", ".*.scaffpd"))
    place = new / "silo.toml"
    place.write_text(place.read_text().replace("cleveland", "aachen"))
    if key:
        (new / "identity.key").write_text(key)
    other = another(path, "two", OTHER_PRIOR, ('"cleveland"', '"aachen"'))
    theirs = {"aachen": place, **{name: places[name] for name in ("hungarian", "va")}}
    agree(other, theirs)
    return other, theirs


@pytest.mark.parametrize("key", ["", f"{77:064x}\n"], ids=["its own key", "another key"])
def test_another_name_gets_no_second_objective(tmp_path, fake_clock, monkeypatch, key):
    """With its own rows taken away, two weightings of two others are solved for both."""
    path, places = federation(tmp_path, 3, SHORT)
    for place in places.values():  # another key would hold out other rows
        place.write_text(place.read_text().replace("test = 0.3", "test = 0.0"))
    agree(path, places)
    found = {}
    weightings = TableLedger.weightings

    def look(self, who):
        found.setdefault(who.run, set()).add(who.members)
        return weightings(self, who)

    monkeypatch.setattr(TableLedger, "weightings", look)
    assert run(path, places)[0].final
    other, theirs = renamed(path, places, key)
    document = agreement(other, theirs)
    (told,) = document.with_others(Silo.open(places["va"]).records.known().begun) or ("",)
    assert "another objective" in told
    assert "every single gradient, this silo's included" in told
    outcome, _ = run(other, theirs)
    assert outcome.status == "paused"
    assert "with more weightings than are safe" in outcome.sentence
    assert {len(members) for members in found.values()} == {1}
    assert len(set.union(*found.values())) == (2 if key else 1)  # members are keys


def test_another_key_under_the_same_name_is_another_member(tmp_path):
    path, places = federation(tmp_path, 3, granted=False)
    before = agreement(path, places)
    earlier = {before.digest.hex(): before.values}
    assert before.with_others(earlier) == []
    (places["va"].parent / "identity.key").write_text(f"{77:064x}\n")
    now = agreement(path, places)
    (told,) = now.with_others(earlier)
    assert "compute the gradient of silo 'va' (with another key) at the model's own start" in told


def test_a_ledger_as_it_was_when_a_killed_run_began_is_noticed(tmp_path, monkeypatch, fake_clock):
    """A process that is killed notes nothing as its run ends."""
    path, places = federation(tmp_path, 3, ROUGH | QUICK)
    note = SiloRecords.note

    def killed(self, what, *about, **more):
        if what != LEFT:
            note(self, what, *about, **more)

    monkeypatch.setattr(SiloRecords, "note", killed)
    transport = Faulty(places, {34: [("crash",)]})
    with pytest.raises(Killed):
        coordinate(path, transport)
    for silo in transport.silos.values():
        silo.close()
    place = places["va"]
    ledger = SiloFile.read(place).ledger / "ledger.jsonl"
    newest = ledger.read_bytes()
    assert len(newest.splitlines()) > 1
    for old in (b"", newest.splitlines(True)[0]):
        ledger.write_bytes(old)
        reply = begun(Silo.open(place), agreement(path, places))
        assert reply.values.get("code") == "ledger-went-back"
    ledger.write_bytes(newest)
    silo = Silo.open(place)
    assert begun(silo, agreement(path, places)).kind == READY
    silo.close()


def test_every_line_of_a_ledger_is_noted_by_the_silo_that_wrote_it(tmp_path):
    who = Entrant("run", "silo", "members", "rows")
    ledger = TableLedger(tmp_path / "ledger", tmp_path / "ledger.link")
    ledger.take()
    ledger.write(who)  # nothing is new
    assert not (tmp_path / "ledger.link").exists()
    ledger.write(who, [("start", "one")])
    assert (tmp_path / "ledger.link").read_text() == ledger.link
    ledger.leave()
    theirs = TableLedger(tmp_path / "ledger", tmp_path / "theirs.link")  # of the same table
    theirs.take()
    theirs.write(replace(who, silo="other"), [("start", "two")])
    theirs.leave()
    ledger.take()
    ledger.leave()
    lines = (tmp_path / "ledger" / "ledger.jsonl").read_bytes().splitlines(True)
    (tmp_path / "ledger" / "ledger.jsonl").write_bytes(lines[0])
    with refuses("ledger-went-back"):
        theirs.take()
    ledger.take()
    ledger.leave()


def test_two_agreements_never_share_a_folder(tmp_path):
    _, places = federation(tmp_path, 3)
    file = SiloFile.read(places["va"])
    one, two = ("0" * 63 + end for end in "12")
    assert file.run(one) != file.run(two)
