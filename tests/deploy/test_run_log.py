"""Logs as JSON lines at coordinator and silo: what happened, run by run, and no value, key or exception's text."""

from __future__ import annotations

import json
import multiprocessing
import re

import numpy as np
import pytest
from deploy_cases import QUICK, federation, opened

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.log import RunLog
from scaffpd.deploy.messages import Failure, InProcess, Message, decode, encode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.run.settings.reading import LogSettings
from scaffpd.run.settings.silo import SiloFile

FIELDS = {"time", "level", "run", "round", "silo", "message"}
SECRET = "patient 4711 has 1234.5678"


def lines(file):
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert all(set(line) == FIELDS for line in found)
    return found


class Absent(InProcess):
    """One silo does not answer for a while."""

    asked = 0

    def ask(self, questions, timeout):
        self.asked += 1
        replies = super().ask(questions, timeout)
        return replies | ({"va": Failure("away")} if 9 < self.asked < 13 else {})


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    path, places = federation(
        tmp_path_factory.mktemp("logged"), more=QUICK + '\n[log]\nfile = "run.jsonl"\n'
    )
    for file in places.values():
        file.write_text(file.read_text() + '\n[log]\nfile = "silo.jsonl"\n')
    outcome = coordinate(path, Absent(opened(places)))
    return path, places, outcome


def test_the_coordinators_log_tells_the_run(logged):
    path, _, outcome = logged
    found = lines(path.parent / "run.jsonl")
    assert found[-1]["message"] == outcome.sentence
    assert found[-1]["round"] == outcome.rounds
    rounds = [line["round"] for line in found if line["message"].startswith("The round is done")]
    assert rounds == list(range(1, outcome.rounds + 1))
    away = [line for line in found if line["level"] == "warning"]
    assert {line["silo"] for line in away} == {"va"}
    assert len({line["run"] for line in found}) == 1
    assert [line["time"] for line in found] == sorted(line["time"] for line in found)


def test_both_sides_call_the_run_the_same_and_a_silo_logs_every_question(logged):
    path, places, _ = logged
    run = lines(path.parent / "run.jsonl")[-1]["run"]
    found = lines(places["va"].parent / "silo.jsonl")
    audited = (places["va"].parent / "audit.jsonl").read_text().splitlines()
    assert len(found) == len(audited)
    assert {line["run"] for line in found} == {None, run}
    assert {line["silo"] for line in found} == {"va"}
    assert (places["va"].parent / "silo.jsonl").stat().st_mode & 0o077 == 0


def test_no_number_of_the_data_or_of_an_answer_is_in_it(logged):
    """Every number in a silo's log is the size of an answer."""
    _, places, _ = logged
    table = np.genfromtxt(places["va"].parent / "patients.csv", delimiter=",", skip_header=1)
    values = {f"{v:g}" for v in table[np.isfinite(table)] if v != int(v)}
    assert values
    for line in lines(places["va"].parent / "silo.jsonl"):
        assert re.fullmatch(r"[a-z_]+: (answer|missing), \d+ bytes\.", line["message"]), line
        assert not values & set(re.findall(r"[\d.]+\d", line["message"]))


def test_an_exceptions_text_stays_out(logged, tmp_path, monkeypatch):
    file = tmp_path / "silo.toml"
    file.write_text(logged[1]["va"].read_text())
    silo = Silo.open(file)

    def fail(*_):
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(Silo, "_reply", fail)
    assert decode(silo.answer(encode(Message("hello", {}))), 2**20).kind == "failed"
    (line,) = lines(tmp_path / "silo.jsonl")
    assert line["level"] == "error"
    assert "ZeroDivisionError" in line["message"]
    assert SECRET not in json.dumps(line)


def settings(folder, **more):
    return LogSettings.model_validate({"file": "log.jsonl", **more}, context=folder / "silo.toml")


def test_files_are_turned_over_and_only_so_many_kept(tmp_path):
    log = RunLog(settings(tmp_path, size_mb=1, keep=2))
    for _ in range(1600):
        log.note("info", "x\n" * 1000)
    sizes = {
        file.name: file.stat().st_size for file in tmp_path.iterdir() if file.suffix != ".lock"
    }
    assert set(sizes) == {"log.jsonl", "log.jsonl.1", "log.jsonl.2"}
    assert max(sizes.values()) <= 2**20
    for name in sizes:
        assert lines(tmp_path / name)


def write(folder, name):
    log = RunLog(settings(folder, size_mb=1, keep=9))
    for number in range(300):
        log.note("info", name * 1900, name, number)


def test_several_processes_share_a_log(tmp_path):
    """As on Flower, where every question has a process of its own: no line is lost or torn while files turn over."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(tmp_path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    files = [file for file in tmp_path.iterdir() if file.suffix != ".lock"]
    assert len(files) > 1
    found = [(line["silo"], line["round"]) for file in files for line in lines(file)]
    assert sorted(found) == [(name, number) for name in "abc" for number in range(300)]


def test_levels_and_long_messages(tmp_path):
    log = RunLog(settings(tmp_path, level="warning"))
    log.note("info", "not this")
    log.note("error", "y" * 10**6)
    (line,) = lines(tmp_path / "log.jsonl")
    assert len(line["message"]) == 2000


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "plain").write_text("no folder")
    RunLog(settings(tmp_path, file="plain/log.jsonl")).note("info", "words")
    assert "Cannot write" in capsys.readouterr().err


def test_a_log_keeps_at_least_one_full_file(tmp_path):
    with pytest.raises(ValueError, match="keep"):  # with none, Python never begins a new file
        settings(tmp_path, keep=0)


def test_a_misspelt_level_is_refused(logged, tmp_path):
    file = tmp_path / "silo.toml"
    file.write_text(logged[1]["va"].read_text() + 'level = "warn"\n')
    with pytest.raises(InputError, match="warning"):
        SiloFile.read(file)
