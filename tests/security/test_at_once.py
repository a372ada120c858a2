"""Two runs over the same rows at the same time, and a ledger that somebody meddles with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from cases.silos import (
    OBJECTIVE,
    QUICK,
    RANGES,
    ROUGH,
    Faulty,
    agree,
    agreement,
    entries,
    events,
    federation,
    released,
    run,
)
from scaffpd.deploy.board import BEGIN
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.ledger import Entrant, TableLedger
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.records import GRANTED, SiloRecords
from scaffpd.deploy.replica import OwnVectors, ReplicaSums
from scaffpd.deploy.silo import READY, Silo
from scaffpd.federation.questions import GradientsAt
from scaffpd.files import JsonLines
from scaffpd.privacy.accountant import Account, epsilon

THREE = ["cleveland", "hungarian", "va"]
METHOD = '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 1\n'
PRIORS = ([0.4, 0.3, 0.3], [0.3, 0.45, 0.25])
ROUNDS = {"rounds = 500": "rounds = 4\nrate = 0.1"}
PRIVATE = {
    'folder = "run"': 'folder = "run"\ncurves = "off"',
    "[training]\nrounds = 500\ntol = 1e-6": "[privacy]\nepsilon = 8.0\n[training]\nrounds = 6",
}


class Abreast(Faulty):
    """Two coordinators' transports, whose questions take turns as long as both ask any."""

    def __init__(self, places, barrier, silos=None):
        super().__init__(places)
        self.silos = silos or self.silos
        self.barrier = barrier

    def ask(self, questions, timeout):
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(0.5)
        return super().ask(questions, timeout)


@pytest.fixture
def hasty(monkeypatch):
    """Coordinators and silos that wait for others only for moments."""
    monkeypatch.setattr(import_module("scaffpd.deploy.coordinate"), "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(import_module("scaffpd.deploy.ledger"), "GLANCE", 0.05, raising=False)


def second(path, places, folder, old, new):
    """Another run of the same silos, in a folder of its own, which all agree to."""
    other = path.with_name(f"{folder}.toml")
    text = path.read_text().replace('folder = "run"', f'folder = "{folder}"')
    assert old in text
    other.write_text(text.replace(old, new))
    agree(other, places)
    return other


def elsewhere(path, places, folder):
    """Another federation: files and keys of its own, and the same tables by other paths."""
    other, theirs = federation(folder, len(places), granted=False)
    other.write_text(path.read_text())
    for number, (name, place) in enumerate(theirs.items()):
        table = place.parent / "patients.csv"
        table.unlink()
        table.symlink_to(Path(os.path.relpath(places[name].parent, table.parent)) / table.name)
        place.write_text(places[name].read_text())
        key = place.parent / "identity.key"
        key.write_text(f"{number + 99:064x}\n")
    return other, theirs


def both(first, other):
    """Carry two runs at the same time; return outcomes."""
    found = {}

    def go(number, path, transport):
        found[number] = coordinate(path, transport)

    threads = [
        threading.Thread(target=go, args=(k, *one), daemon=True)
        for k, one in enumerate((first, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return [found[k] for k in range(2)]


class Seen:
    """What one silo sees of both runs: sums at the start, their weights, and its own gradient."""

    def __init__(self, monkeypatch):
        self.sums = []
        self.own = {}
        add = ReplicaSums.sum
        seen = self

        def look(self, part, vectors, asked, weights):
            found = add(self, part, vectors, asked, weights)
            question = vectors.asked.question if isinstance(vectors, OwnVectors) else None
            name = self.session.name
            here = isinstance(question, GradientsAt) and part == "c"
            if name and here and not bool(question.x.any()):
                own = vectors.asked.own.vectors[part].each()[0]
                seen.own[name] = own.double().numpy().copy()
                if name == THREE[0]:
                    seen.sums.append((np.array(weights), found.double().numpy().copy()))
            return found

        monkeypatch.setattr(ReplicaSums, "sum", look)

    def error(self):
        """How well the first silo knows the others' gradients: the share that is wrong."""
        weights = np.array([own for own, _ in self.sums])
        left = np.array([total for _, total in self.sums]) - weights[:, :1] * self.own[THREE[0]]
        found = np.linalg.lstsq(weights[:, 1:], left, rcond=None)[0]
        true = np.array([self.own[name] for name in THREE[1:]])
        return float(np.linalg.norm(found - true) / np.linalg.norm(true))


@pytest.mark.parametrize("how", ["the same silos", "processes", "federations"])
def test_two_objectives_at_once_are_counted_together(tmp_path, monkeypatch, hasty, how):
    """Each alone is refused after the other; at the same time both were accepted."""
    objective = f"{METHOD}\n{OBJECTIVE}prior = {PRIORS[0]}\n"
    path, places = federation(tmp_path / "a", 3, ROUGH | ROUNDS | {OBJECTIVE: objective})
    assert list(places) == THREE
    for place in places.values():  # silos of other keys would hold out other rows
        place.write_text(place.read_text().replace("test = 0.3", "test = 0.0"))
    theirs = places
    start = path
    if how == "federations":
        start, theirs = elsewhere(path, places, tmp_path / "b")
    other = second(start, theirs, "two", f"prior = {PRIORS[0]}", f"prior = {PRIORS[1]}")
    seen = Seen(monkeypatch)
    barrier = threading.Barrier(2)
    one = Abreast(places, barrier)
    two = Abreast(theirs, barrier, one.silos if how == "the same silos" else None)
    outcomes = both((path, one), (other, two))
    said = [outcome.sentence for outcome in outcomes if outcome.status == "paused"]
    assert len(said) == 1, outcomes
    assert "more weightings than are safe" in said[0]
    assert seen.error() > 0.1
    assert len({line["run"] for line in entries(places["va"])}) == 1
    # without that ledger the second one shows everything: this is what is at stake
    memory = shutil.ignore_patterns(".patients.csv.scaffpd", "ledger.link", "rec*", "run*", "two")
    for part in {path.parent, other.parent}:
        shutil.copytree(part, tmp_path / "c" / part.name, symlinks=True, ignore=memory)
    late, whose = (path, places) if outcomes[0].status == "paused" else (other, theirs)
    late, *whose = (tmp_path / "c" / one.relative_to(tmp_path) for one in (late, *whose.values()))
    whose = dict(zip(THREE, whose, strict=True))
    agree(late, whose)
    assert run(late, whose)[0].final
    assert seen.error() < 1e-9


def test_a_budget_of_two_runs_at_once(tmp_path, monkeypatch, hasty):
    """`limits.epsilon = 8`: at the same time two runs with such an ε got 8.67."""
    path, places = federation(tmp_path, 3, PRIVATE | RANGES, granted=False)
    for place in places.values():
        place.write_text(place.read_text() + "\n[limits]\nepsilon = 8\n")
    agree(path, places)
    other = second(path, places, "two", "rounds = 6", "rounds = 7")
    charged = {}
    charge = Account.charge

    def noted(self, asked):
        charge(self, asked)
        own = charged.setdefault(self.names[0], {})
        own.update({entry.mark.hex(): [entry.noise, entry.times] for entry in asked})

    monkeypatch.setattr(Account, "charge", noted)
    barrier = threading.Barrier(2)
    outcomes = both((path, Abreast(places, barrier)), (other, Abreast(places, barrier)))
    said = [outcome.sentence for outcome in outcomes if outcome.status == "paused"]
    assert len(said) == 1, outcomes
    assert "privacy budget of this silo's rows" in said[0]
    for name, place in places.items():
        spent = sum(times / z**2 for z, times in charged[name].values())
        assert 6 < epsilon(spent, 1e-5) <= 8
        assert {mark: [z, times] for mark, z, times in released(place)} == charged[name]


def ledger_of(tmp_path, name="va"):
    return tmp_path / name / ".patients.csv.scaffpd" / "ledger.jsonl"


def deleted(ledger):
    ledger.unlink()


def all_deleted(ledger):
    shutil.rmtree(ledger.parent)


def truncated(ledger):
    with ledger.open("r+b") as file:
        file.truncate(len(ledger.read_bytes().splitlines(True)[0]))


def a_line_changed(ledger):
    time.sleep(0.02)  # a clock of files ticks a hundred times a second
    text = ledger.read_bytes()
    with ledger.open("r+b") as file:
        place = text.index(b'"weightings": [["') + len(b'"weightings": [["')
        file.seek(place)
        file.write(b"o" if text[place : place + 1] != b"o" else b"p")


def replaced(ledger):
    copy = ledger.with_name("copy")
    shutil.copyfile(ledger, copy)
    copy.replace(ledger)


def another_writer(ledger):
    lines = ledger.read_bytes().splitlines(True)
    with ledger.open("ab") as file:
        file.write(lines[0])


def lock_deleted(ledger):
    (ledger.parent / "lock").unlink()


DURING = [deleted, all_deleted, truncated, a_line_changed, replaced, another_writer, lock_deleted]
BETWEEN = {
    deleted: "lacks what the silo has noted",
    all_deleted: "lacks what the silo has noted",
    truncated: "lacks what the silo has noted",
    a_line_changed: "was changed or removed",
    another_writer: "was changed or removed",
}


@pytest.mark.parametrize("harm", DURING, ids=lambda harm: harm.__name__)
def test_meddling_with_the_ledger_during_a_run_ends_it(tmp_path, fake_clock, harm):
    path, places = federation(tmp_path, 3, ROUGH | QUICK)
    transport = Faulty(places, {26: [("harm",)]})
    transport.harm = lambda: harm(ledger_of(tmp_path))
    outcome = coordinate(path, transport)
    # what nobody has changed is gone on from, in an epoch that has read it all
    assert outcome.status == "converged" if harm in (replaced, lock_deleted) else "paused"
    said = events(path)[0].sentence
    assert "'va' refuses" in said
    assert "The ledger of this silo's table was changed" in said
    sent = [line["posts"] for line in Silo.open(places["va"]).records.read() if "posts" in line]
    assert sum(count for kind in sent[0].values() for count in kind[:1]) < 26


@pytest.mark.parametrize("harm", BETWEEN, ids=lambda harm: harm.__name__)
def test_a_ledger_that_has_gone_back_is_noticed_at_the_next_run(tmp_path, fake_clock, harm):
    path, places = federation(tmp_path, 3, ROUGH | QUICK)
    assert run(path, places)[0].status == "converged"
    ledger = ledger_of(tmp_path)
    newest = ledger.with_name("newest")
    shutil.copytree(ledger.parent, tmp_path / "newest")
    harm(ledger)
    again = second(path, places, "two", "l2 = 0.03", "l2 = 0.05")
    outcome, _ = run(again, places)
    assert outcome.status == "paused"
    assert BETWEEN[harm] in outcome.sentence
    assert str(tmp_path) not in outcome.sentence
    shutil.rmtree(ledger.parent, ignore_errors=True)
    shutil.copytree(tmp_path / "newest", ledger.parent)
    assert not newest.exists()
    assert run(again, places)[0].status == "converged"


def test_an_older_copy_is_noticed_and_the_file_of_a_ledger_is_small(tmp_path, fake_clock):
    path, places = federation(tmp_path, 3, ROUGH | QUICK)
    assert run(path, places)[0].status == "converged"
    ledger = ledger_of(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(ledger.parent, copy)
    other = second(path, places, "two", "l2 = 0.03", "l2 = 0.05")
    assert run(other, places)[0].status == "converged"
    assert ledger.stat().st_size > (copy / "ledger.jsonl").stat().st_size
    shutil.rmtree(ledger.parent)
    shutil.copytree(copy, ledger.parent)
    third = second(path, places, "three", "l2 = 0.03", "l2 = 0.07")
    assert "lacks what the silo has noted" in run(third, places)[0].sentence
    assert (ledger.parent.stat().st_mode & 0o077, ledger.stat().st_mode & 0o077) == (0, 0)


def test_a_touched_ledger_is_read_again_and_goes_on(tmp_path, fake_clock):
    path, places = federation(tmp_path, 3, ROUGH)
    transport = Faulty(places, {26: [("touch",)]})
    transport.touch = lambda: os.utime(ledger_of(tmp_path))
    assert coordinate(path, transport).status == "converged"


def test_another_key_of_the_same_rows_needs_a_person(tmp_path):
    """Whoever the members are: names and keys may be others', and the difference is a gradient."""
    path, places = federation(tmp_path / "a", 4, ROUGH)
    assert run(path, places)[0].status == "converged"
    other, theirs = elsewhere(path, places, tmp_path / "b")
    document = agreement(other, theirs)
    pins = "".join(f'{name} = "{card.fingerprint}"\n' for name, card in document.cards.items())
    place = theirs["va"]
    place.write_text(f'agree = "always"\n{place.read_text()}\n[members]\n{pins}')
    asked = encode(Message(BEGIN, {"agreement": document.values, "epoch": "1", "states": []}))
    reply = decode(Silo.open(place).answer(asked))
    assert (reply.values.get("code"), reply.values.get("waits")) == ("agreement-awaited", True)
    agree(other, theirs)
    silo = Silo.open(place)
    assert decode(silo.answer(asked)).kind == READY
    silo.close()


BEGUN = """
import sys, time
from pathlib import Path
from scaffpd.deploy.silo import Silo
print(len(Silo.open(sys.argv[1]).answer(Path(sys.argv[2]).read_bytes())), flush=True)
time.sleep(100)
"""


def test_a_process_that_is_killed_leaves_no_lock(tmp_path, hasty):
    path, places = federation(tmp_path, 3)
    place = places["va"]
    values = {"agreement": agreement(path, places).values, "epoch": "1", "states": []}
    asked = encode(Message(BEGIN, values))
    (tmp_path / "asked").write_bytes(asked)
    command = [sys.executable, "-c", BEGUN, str(place), str(tmp_path / "asked")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert int(holder.stdout.readline()) == len(encode(Message(READY)))
            silo = Silo.open(place)
            reply = decode(silo.answer(asked))
            assert (reply.values["code"], reply.values["waits"]) == ("table-busy", True)
            assert [line["what"] for line in silo.records.read()].count("begun") == 1
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
    assert decode(silo.answer(asked)).kind == READY
    second_one = Silo.open(place)
    assert decode(second_one.answer(asked)).values["code"] == "table-busy"  # in one process, too
    silo.close()
    assert decode(second_one.answer(asked)).kind == READY
    second_one.close()


def test_a_coordinator_that_never_comes_back_holds_no_table_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("scaffpd.deploy.silo.DESERTED", 0.3)
    path, places = federation(tmp_path, 3)
    values = {"agreement": agreement(path, places).values, "epoch": "1", "states": []}
    asked = encode(Message(BEGIN, values))
    first, second_one = Silo.open(places["va"]), Silo.open(places["va"])
    assert decode(first.answer(asked)).kind == READY  # and then nobody asks it again
    for _ in range(100):
        reply = decode(second_one.answer(asked))
        if reply.kind == READY:
            break
        assert reply.values["code"] == "table-busy"
        time.sleep(0.1)
    assert reply.kind == READY
    second_one.close()


def test_runs_are_counted_and_noted_under_one_lock(tmp_path, monkeypatch):
    """FLARE starts a process for every job: two of them counted the same runs."""
    records = SiloRecords(tmp_path / "records.jsonl")
    known = SiloRecords.known

    def slowly(self):
        found = known(self)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(SiloRecords, "known", slowly)
    found = []

    def begin(run):
        records = SiloRecords(tmp_path / "records.jsonl")
        try:
            records.begin(run, {}, 1)
            found.append("begun")
        except ValueError as error:
            found.append(error.code)

    for name in "ab":
        records.ask(name, {})
    threads = [threading.Thread(target=begin, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["begun", "too-many-runs"]


def test_a_full_disk_is_no_ledger_that_went_back(tmp_path, monkeypatch):
    who = Entrant("run", "silo", "members", "rows")
    ledger = TableLedger(tmp_path / "ledger")
    ledger.take()
    ledger.write(who, [("start", "one")])

    def full(self, entry):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", full)
        with pytest.raises(OSError, match="space"):
            ledger.write(who, [("start", "two")])
    ledger.leave()
    again = TableLedger(tmp_path / "ledger")
    again.take(lambda: ledger.link)
    assert again.weightings(who) == [("start", "one")]
    again.leave()


def test_documents_that_nobody_else_has_signed_use_up_no_runs(tmp_path):
    """Twenty were all that a silo ever took part in; each `begin` made its file longer."""
    path, places = federation(tmp_path, 3, granted=False)
    silo = Silo.open(places["va"])

    def begun(k):
        other = path.with_name("other.toml")
        other.write_text(path.read_text() + f"seed = {k}\n")
        document = agreement(other, places)
        silo.records.note(GRANTED, document.digest.hex(), by="test")
        values = {"agreement": document.values, "epoch": str(k), "states": []}
        reply = decode(silo.answer(encode(Message(BEGIN, values))))
        silo.close()
        return reply

    for k in range(24):  # limits.runs is 20
        assert begun(k).kind == READY, k
    size = silo.file.records.stat().st_size
    for _ in range(10):
        assert begun(0).kind == READY
    grown = silo.file.records.stat().st_size - size
    assert grown < 10 * 400  # the grants of this test alone
    assert silo.records.known().counted == set()
