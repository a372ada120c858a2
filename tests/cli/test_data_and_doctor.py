"""`scaffpd data` and `scaffpd doctor`: facts that agree with the loaders, broken files named, an honest exit code."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from scaffpd import cli
from scaffpd.cli.data import EMBEDDED
from scaffpd.cli.doctor import EXTRAS
from scaffpd.data.datasets import CATEGORIES, NUMBERS

WEIGHTS = "efficientnet_lite0_imagenet.npz"
NAMES = ["adult", "cifar10", "cifar100", "tiny_imagenet"]


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "SCAFFPD_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def listed(capsys, *more):
    assert cli.run(["data", "--json", *map(str, more)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return {entry["name"]: entry for part in json.loads(captured.out).values() for entry in part}


# ------------------------------------------------------------------ data


def test_what_is_embedded_is_what_the_loaders_return():
    entries = {entry.name: entry for entry in EMBEDDED}
    silos = {
        "heart_disease": sp.data.heart_disease(0),
        "digits": sp.data.digits(),
        "breast_cancer": sp.data.breast_cancer(),
        "diabetes": sp.data.diabetes(),
    }
    for name, found in silos.items():
        entry = entries.pop(name)
        assert entry.rows == sum(len(y) for _, y in found.train)
        assert entry.columns == len(found.features)
        assert entry.classes == found.classes
    assert len(silos["heart_disease"].names) == 4
    assert len(silos["diabetes"].names) == 5
    drawn = sp.data.synthetic()
    entry = entries.pop("synthetic")
    assert (entry.rows, entry.columns) == (sum(len(y) for _, y in drawn), drawn[0][0].shape[1])
    air = sp.data.beijing_air()
    entry = entries.pop("beijing_air")
    assert entry.rows == sum(len(y) for _, y in [*air.train, *air.test])
    assert (entry.columns, entry.clients) == (len(air.features), len(air.names))
    assert not entries


def test_without_a_folder_everything_else_is_missing_and_says_how_to_provide_it(capsys):
    assert cli.run(["data"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "heart_disease",
        "1,797",
        "Not embedded",
        "adult.data.csv.gz",
        "cifar-10-batches-py",
        "SCAFFPD_DATA",
    ):
        assert words in out
    found = listed(capsys)
    assert [found[name]["state"] for name in NAMES] == ["missing"] * 4


def adult_files(
    folder, rows=120, columns=(*NUMBERS, *CATEGORIES, "native-country", "classification")
):
    folder.mkdir(parents=True)
    cells = dict.fromkeys(NUMBERS, "1") | {"occupation": "Sales", "classification": ">50K"}
    line = ", ".join(cells.get(name, "a") for name in columns)
    for part in ("data", "test"):
        text = "\n".join([", ".join(columns), *[line] * rows]) + "\n"
        (folder / f"adult.{part}.csv.gz").write_bytes(gzip.compress(text.encode()))


def test_what_is_found_is_counted_without_decoding(tmp_path, capsys, monkeypatch):
    adult_files(tmp_path / "adult")
    for part, each in (("train", 2), ("test", 1)):
        for k in range(10):
            (tmp_path / "cifar10" / part / f"c{k}").mkdir(parents=True)
            for i in range(each):
                (tmp_path / "cifar10" / part / f"c{k}" / f"{i}.png").write_bytes(b"no image")
    for part in ("train", "val"):
        for k in range(200):
            (tmp_path / "tiny-imagenet-200" / part / f"n{k}").mkdir(parents=True)
            (tmp_path / "tiny-imagenet-200" / part / f"n{k}" / "x.JPEG").write_bytes(b"no image")
    (tmp_path / "weights").mkdir()
    np.savez(
        tmp_path / "weights" / "efficientnet_lite0_imagenet.npz", a=np.zeros((2, 3)), b=np.zeros(4)
    )
    monkeypatch.setenv("SCAFFPD_DATA", str(tmp_path))
    found = listed(capsys)
    assert [found[name]["state"] for name in NAMES] == ["found", "found", "missing", "found"]
    assert (found["adult"]["rows"], found["adult"]["clients"]) == (120, "1 by occupation")
    assert found["adult"]["columns"] == len(sp.data.adult().features)
    assert (
        found["cifar10"]["rows"],
        found["cifar10"]["test_rows"],
        found["cifar10"]["classes"],
    ) == (20, 10, 10)
    assert found["tiny_imagenet"]["rows"] == found["tiny_imagenet"]["test_rows"] == 200
    assert found["tiny_imagenet"]["note"] == "a subset"
    assert found["weights/efficientnet_lite0_imagenet.npz"]["note"] == "1e-05 million numbers"
    assert cli.run(["data"]) == 0
    out = capsys.readouterr().out
    assert "Found in" in out
    assert "Missing" in out


def test_python_batches_by_their_sizes(tmp_path, capsys):
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{k}" for k in range(1, 6))):
        with (place / name).open("wb") as file:
            file.truncate(10000 * 3072)
    assert listed(capsys, "--data", tmp_path)["cifar10"]["rows"] == 50000
    with (place / "data_batch_3").open("wb") as file:
        file.truncate(1000)
    broken = listed(capsys, "--data", tmp_path)["cifar10"]
    assert broken["state"] == "broken"
    assert (
        "data_batch_3' is truncated or damaged: it is too small for 10,000 images" in broken["note"]
    )


def spoilt_weights():
    """No archive, a single array, and an archive whose compressed numbers were overwritten."""
    single = io.BytesIO()
    archive = io.BytesIO()
    np.save(single, np.zeros(4))
    np.savez_compressed(archive, a=np.arange(1000.0))
    whole = bytearray(archive.getvalue())
    whole[100:300] = b"\xff" * 200
    return [b"PK", single.getvalue(), bytes(whole)]


@pytest.mark.parametrize(
    ("file", "content", "name", "words"),
    [
        ("adult/adult.data.csv.gz", b"age,sex", "adult", "is not gzipped"),
        (
            "adult/adult.data.csv.gz",
            gzip.compress(b"age,sex\n1,2\n", mtime=0),
            "adult",
            "has no 'education-num' in its header row",
        ),
        (
            "adult/adult.data.csv.gz",
            gzip.compress(b"age" * 9999, mtime=0)[:40],
            "adult",
            "is cut off or damaged",
        ),
        ("cifar-10-batches-py/batches.meta", b"rubbish", "cifar10", "data_batch_1' is missing"),
        ("cifar-100-python/meta", b"rubbish", "cifar100", "train' is missing"),
        *(
            (f"weights/{WEIGHTS}", content, f"weights/{WEIGHTS}", "not a complete")
            for content in spoilt_weights()
        ),
    ],
)
def test_what_is_broken_is_named(file, content, name, words, tmp_path, capsys):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_bytes(content)
    found = listed(capsys, "--data", tmp_path)[name]
    assert found["state"] == "broken"
    assert words in found["note"]
    assert cli.run(["data", "--data", str(tmp_path)]) == 0
    assert "Broken" in capsys.readouterr().out


def test_a_short_line_of_adult_is_named(tmp_path):
    adult_files(tmp_path / "adult", rows=3)
    file = tmp_path / "adult" / "adult.data.csv.gz"
    text = gzip.decompress(file.read_bytes()).decode()
    file.write_bytes(gzip.compress((text + "1, 2\n").encode()))
    with pytest.raises(sp.InputError, match=r"has no 'capital-gain' in line 5|in line 5"):
        sp.data.adult(folder=tmp_path)


# ------------------------------------------------------------------ doctor


def test_all_is_well(capsys):
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("scaffpd", "torch", "cores", "GPU", "Self-check", "All is well"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80


def test_as_json(capsys):
    assert cli.run(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    assert found["works"] is True
    assert found["self_check"] == {"subspace saddle": "ok", "Scaff-PD": "ok"}
    assert found["environment"]["scaffpd"] == sp.__version__


def test_extras_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"all", "dev", "docs", "experiments"}
    for name, (_, needed) in EXTRAS.items():
        packages = {package if isinstance(package, str) else package[0] for package in needed}
        assert packages == {requirement.split(">")[0].split("=")[0] for requirement in extras[name]}


def test_an_extra_that_is_missing_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr("scaffpd.machine.version", lambda _: None)
    assert cli.run(["doctor"]) == 0
    assert 'pip install "scaffpd[flare]"' in " ".join(capsys.readouterr().out.split())


def wrong_x(*_, **__):
    class Result:
        x = np.array([1.1])
        weights = np.array([2 / 3, 1 / 3])
        certificate = 1e-9
        message = "converged"

    return Result


def no_proof(*_, **__):
    class Result:
        x = np.array([1.0])
        weights = np.array([2 / 3, 1 / 3])
        certificate = 0.1
        message = "round limit"

    return Result


def broken(*_, **__):
    raise RuntimeError("illegal instruction")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (wrong_x, "the optimum is"),
        (no_proof, "no certified gap"),
        (broken, "RuntimeError: illegal instruction"),
    ],
)
def test_what_does_not_work_is_said_with_exit_code_1(train, words, capsys, monkeypatch):
    monkeypatch.setattr("scaffpd.training.loop.train", train)
    assert cli.run(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert words in out
    assert "Training does not work on this machine" in out


def test_a_library_that_cannot_be_loaded(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "scaffpd.objectives", None)
    assert cli.run(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["self_check"]
    assert list(found) == ["loading"]
    assert found["loading"].startswith("ModuleNotFoundError: import of scaffpd.objectives halted")


def test_a_data_folder_that_is_not_there_is_pointed_at(capsys, monkeypatch):
    monkeypatch.setenv("SCAFFPD_DATA", "/nowhere/at/all")
    assert cli.run(["doctor"]) == 0
    assert "/nowhere/at/all is not there" in " ".join(capsys.readouterr().out.split())


# ------------------------------------------------------------------ init


def test_a_settings_file_for_a_table_trains_once_its_guesses_are_right(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [
        f"n{k},{['north', 'south'][k % 2]},{k * k % 37},2024-01-{1 + k % 28:02},{k % 3 % 2}"
        for k in range(60)
    ]
    (tmp_path / "p.csv").write_text("\n".join(["name,site,age,day,ill", *rows, ""]))
    assert cli.run(["init", "p.csv"]) == 0
    text = (tmp_path / "config.toml").read_text()
    found = tomllib.loads(text)["data"]
    assert (found["file"], found["client"], found["target"]) == ("p.csv", "site", "ill")
    assert text.count("(a guess: check it)") == 2
    for line in (
        "#   name: 60 texts (n0, n1, n10, n11, …)",
        "#   age: numbers from 0 to 36",
        "#   day: dates",
    ):
        assert line in text.splitlines()
    assert cli.run(["train", "config.toml", "--quiet", "--no-report", "--splits", "0"]) == 0
    assert cli.run(["init", "p.csv"]) == 2
    assert cli.run(["init", "p.csv", "--out", "b.toml", "--target", "ile"]) == 2
    assert capsys.readouterr().err.endswith("Unknown column 'ile': did you mean 'ill'?\n")
    assert cli.run(["init", "p.csv", "--out", "b.toml", "--target", "age", "--client", "day"]) == 0
    assert "guess" not in (tmp_path / "b.toml").read_text()
