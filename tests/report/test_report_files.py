"""Folders that are runs, folders that are none, and what is written where."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_folders

from scaffpd.cli import run as command
from scaffpd.cli.results import show
from scaffpd.errors import InputError
from scaffpd.run import page as report
from scaffpd.run.page import embedded, harmless, pictures
from scaffpd.run.page.figures import figures
from scaffpd.run.page.read import read

RESULTS = Path(__file__).parents[2] / "results"


def markup(page):
    """A page without what is in its scripts."""
    return re.sub(r"(<script[^>]*>).*?</script>", r"\1</script>", page, flags=re.S)


def broken(hospitals, tmp_path, change):
    folder = tmp_path / "broken"
    shutil.copytree(hospitals, folder)
    change(folder)
    return folder


def put(name, text):
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def summary(**changed):
    def change(folder):
        file = folder / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def nothing(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def below(folder):
    nothing(folder)
    (folder / "inside").mkdir()
    (folder / "inside" / "summary.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (shutil.rmtree, "There is no folder '.*broken'."),
        (
            nothing,
            "is not the folder of a run: it has neither summary.json .* nor table.csv .* nor settings.json",
        ),
        (below, "not the folder of a run: did you mean '.*inside'?"),
        (put("summary.json", '{"format": 1, "mod'), "is not JSON: was it cut off"),
        (put("summary.json", "[1]"), "should hold a JSON object"),
        (summary(format=2), "has format 2; this version reads 1"),
        (summary(models=[]), "has no models yet: was it interrupted"),
        (summary(models=[{"role": "before"}]), "has no name"),
        (put("clients.csv", "model,clint\n"), "has no column 'client'"),
        (
            put("clients.csv", "model,client,weight\naverage,va\n"),
            "line 2, has 2 cells where 3 are named",
        ),
        (
            put("clients.csv", "model,client,weight\naverage,va,much\n"),
            "'weight' has 'much' where a number should be",
        ),
        (
            put("clients.csv", "model,client\nother,va\n"),
            "has a model 'other' that summary.json does not name",
        ),
        (put("rounds.csv", "model,certificate\n"), "has no column 'round'"),
        (
            put("partition.csv", "client,label,train_rows,test_rows\nva,0,many,1\n"),
            "'train_rows' has 'many' where a",
        ),
        (lambda f: (f / "rounds.csv").write_bytes(b"\xff\xfe\x00"), "cannot be read as text"),
    ],
)
def test_what_is_no_run_gets_a_sentence(hospitals, tmp_path, change, sentence):
    folder = broken(hospitals, tmp_path, change)
    with pytest.raises(InputError, match=sentence) as caught:
        report.write(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    "gone", ["rounds.csv", "clients.csv", "partition.csv", "config.toml", "environment.json"]
)
def test_what_a_folder_does_not_have_is_left_out(hospitals, tmp_path, gone):
    folder = broken(hospitals, tmp_path, lambda f: (f / gone).unlink())
    text = report.write(folder).read_text(encoding="utf-8")
    names = {figure.name for figure in figures(read(folder))}
    lost = {
        "rounds.csv": {"weights", "certificate", "losses"},
        "clients.csv": {"clients"},
        "partition.csv": {"partition"},
    }.get(gone, set())
    whole = {"clients", "weights", "certificate", "losses", "communication", "partition"}
    assert names == whole - lost
    assert (
        "config.toml</summary>" not in text
        if gone == "config.toml"
        else "config.toml</summary>" in text
    )


def test_empty_cells_of_counts_are_zero(hospitals, tmp_path):
    folder = broken(hospitals, tmp_path, lambda folder: None)
    file = folder / "partition.csv"
    head, first, *others = file.read_text().splitlines()
    file.write_text("\n".join([head, first.rsplit(",", 1)[0] + ",", *others]))
    assert "None" not in re.sub(
        "<script.*?</script>", "", report.write(folder).read_text("utf-8"), flags=re.S
    )
    assert read(folder).partition[0]["test_rows"] == 0


def test_the_page_is_one_file_that_stands_alone(hospitals, tmp_path):
    written = report.write(hospitals, tmp_path / "page.html")
    text = written.read_text(encoding="utf-8")
    assert written == tmp_path / "page.html"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|<script[^>]*\bsrc=", markup(text))
    assert "default-src 'none'" in text
    assert text.count("'sha256-") == 2
    assert "unsafe-eval" not in text.split("</head>")[0]
    assert "scaffpd train hospitals/config.toml" in text
    assert "The worst-served hospital" in re.sub("<[^>]+>", "", text)
    assert report.write(hospitals) == hospitals / "report.html"


def test_hostile_names_stay_text(hostile, tmp_path):
    text = report.write(hostile, tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 3
    assert not re.search("<img|<b>bold|onerror=alert[^&]*>", markup(text))
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S).group(1))
    assert {row["client"] for row in data["data"]["clients"]} == set(run_folders.HOSTILE)


def test_what_is_embedded_cannot_end_its_script():
    text = embedded({"a": "</script><!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028&"}
    assert "</script" not in harmless("x = '</script>'; y = '<!--'").lower()


def test_a_failed_write_leaves_the_old_page(hospitals, tmp_path, monkeypatch):
    old = tmp_path / "page.html"
    old.write_text("old")
    monkeypatch.setattr("scaffpd.run.page.page", lambda *_: "\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        report.write(hospitals, old)
    assert old.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_places_that_cannot_be_written(hospitals, tmp_path):
    with pytest.raises(InputError, match=r"is a folder; --out needs a file"):
        report.write(hospitals, tmp_path)
    with pytest.raises(InputError, match=r"Cannot write .*No such file"):
        report.write(hospitals, tmp_path / "no" / "page.html")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"Cannot write to the folder .*it is a file"):
        report.write_figures(hospitals, "svg", tmp_path / "file")


@pytest.mark.parametrize("form", ["png", "svg"])
def test_every_figure_is_a_picture_too(hospitals, form):
    drawn = pictures(read(hospitals), form)
    views = {"communication-mb", "communication-rounds", "communication-exchanges"}
    assert {Path(name).stem for name in drawn} == {
        "clients",
        "weights",
        "certificate",
        "losses",
        "partition",
    } | views
    start = b"\x89PNG" if form == "png" else b"<svg"
    assert all(content.startswith(start) and len(content) > 2000 for content in drawn.values())
    if form == "svg":
        assert b"cleveland" in drawn["clients.svg"]
        assert b"proven gap" in drawn["certificate.svg"]


def test_a_comparison_is_read_from_its_tables():
    digits = read(RESULTS / "digits")
    hospitals = read(RESULTS / "hospitals")
    assert digits.role("before") == "FedAvg"
    assert digits.role("after") == max(digits.overall, key=lambda n: digits.overall[n].worst_20)
    assert digits.overall["FedAvg"].worst_20 == pytest.approx(0.847, abs=1e-3)
    assert "seed 0 alone" in digits.note  # other partitions under every seed
    assert "mean over 5 seeds" in hospitals.note
    assert len(hospitals.clients) == 4
    assert hospitals.command.startswith("scaffpd compare hospitals --methods all")


def test_a_comparison_of_losses(tmp_path):
    """A regression has no accuracies: losses, and less is better."""
    heads = "method,seeds,failures,rounds_mean,megabytes_up_mean,megabytes_down_mean,test_accuracy_mean_mean,"
    heads += (
        "test_loss_mean_mean,test_loss_worst_20_mean,test_loss_worst_mean,test_loss_worst_20_sd"
    )
    lines = [
        "FedAvg,1,,10,1,1,,2.0,4.0,4.0,",
        "Ours,1,,10,2,2,,2.2,3.0,3.0,",
        "Bad,0,It diverged.,,,,,,,,",
    ]
    (tmp_path / "table.csv").write_text("\n".join([heads, *lines]))
    rows = [
        f"{m},0,{c},0.5,9,1.0,,9,{v},nan" for m, v in (("FedAvg", 4.0), ("Ours", 3.0)) for c in "ab"
    ]
    named = "method,seed,client,weight,train_samples,train_loss,train_accuracy,test_samples,test_loss,test_accuracy"
    (tmp_path / "clients.csv").write_text("\n".join([named, *rows]))
    story = read(tmp_path)
    assert (story.measure, story.role("before"), story.role("after")) == ("loss", "FedAvg", "Ours")
    text = markup(report.write(tmp_path).read_text(encoding="utf-8"))
    assert "Ours serves the" in text
    assert "It diverged." in text


def test_a_deployed_run_joins_its_segments(deployed):
    story = read(deployed)
    numbers = [r.number for r in story.rounds]
    assert numbers == list(range(len(numbers)))
    assert all(
        a.megabytes < b.megabytes and a.exchanges < b.exchanges
        for a, b in zip(story.rounds, story.rounds[1:], strict=False)
    )
    assert [e["what"] for e in story.events] == ["absent", "dropped", "back", "joined"]
    assert any(r.absent for r in story.rounds)
    assert story.models[0].status == "converged"
    assert story.word == "silo"


def test_what_joining_brings_silos_is_on_the_page_of_a_deployed_run(deployed, stations, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(deployed, folder)
    shutil.copy(stations / "joining.csv", folder)
    said = json.loads((stations / "summary.json").read_text())["joining"]
    (folder / "joining.json").write_text(json.dumps(said))
    assert read(folder).joining.sentence == said["sentence"]
    assert {"joining", "absent"} < {figure.name for figure in figures(read(folder))}
    text = markup(report.write(folder).read_text(encoding="utf-8"))
    assert re.sub("\u00a0", " ", text).index(said["sentence"].split(":")[0]) < text.index(
        "figure-joining"
    )


def test_a_run_that_waits_has_a_page(deployed, tmp_path):
    folder = tmp_path / "waiting"
    shutil.copytree(deployed, folder)
    (folder / "clients.csv").unlink()
    (folder / "outcome.json").write_text(
        '{"status": "paused", "final": false, "sentence": "Silo va is away.", "rounds": 3}'
    )
    text = report.write(folder).read_text(encoding="utf-8")
    assert "There is no result yet." in text
    assert "Silo va is away." in text
    assert "deploy resume" in text


def test_the_library_is_made_once_for_a_user(monkeypatch, tmp_path):
    """The second process finds it in the cache; a cache that cannot be written is no trouble."""
    made = []
    fake = SimpleNamespace(
        __version__="9.9", javascript_bundle=lambda: made.append(1) or "let vega = 'Ω';"
    )
    monkeypatch.setitem(sys.modules, "vl_convert", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [report.library.__wrapped__() for _ in range(3)] == ["let vega = 'Ω';"] * 3
    assert len(made) == 1
    assert [file.name for file in (tmp_path / "scaffpd").iterdir()] == ["vega-9.9.js"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert report.library.__wrapped__() == "let vega = 'Ω';"
    assert len(made) == 2


def test_without_vl_convert_there_is_a_sentence(hospitals, monkeypatch):
    assert report.available() is None
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert "vl-convert" in report.available()
    with pytest.raises(InputError, match="vl-convert"):
        report.write_figures(hospitals, "png")


def test_the_command(hospitals, tmp_path, capsys, monkeypatch):
    assert command(["report", str(hospitals), "--out", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "r.html")
    assert (
        command(["report", str(hospitals), "--format", "svg", "--out", str(tmp_path / "pictures")])
        == 0
    )
    written = capsys.readouterr().out.split()
    assert all(Path(name).exists() for name in written)
    assert len(written) == 8
    assert command(["report", str(hospitals), "--format", "svgg"]) == 2
    assert "did you mean 'svg'?" in capsys.readouterr().err
    assert command(["report", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    opened = []
    monkeypatch.setattr("typer.launch", lambda url: opened.append(url) or 0)
    assert command(["report", str(hospitals), "--out", str(tmp_path / "r.html"), "--open"]) == 0
    assert opened == [(tmp_path / "r.html").as_uri()]


def renamed(folder, target, old, new):
    """A copy of a run's folder in which one client has another name."""
    shutil.copytree(folder, target)
    for file in target.glob("*.csv"):
        file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    summary = json.loads((target / "summary.json").read_text())
    for own in summary["coalition"]["clients"]:
        own["client"] = own["client"].replace(old, new)
    (target / "summary.json").write_text(json.dumps(summary))
    return target


@pytest.mark.parametrize("name", ["Aotizhongxin and the hills", "Aotizhongxin " * 9])
def test_names_are_never_broken_on_a_terminal_of_80_columns(
    stations, tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setenv("COLUMNS", "80")
    show(renamed(stations, tmp_path / "run", "Aotizhongxin", name))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith("Aotizhongxin")]
    tables = (
        [line for line in rows if line.rstrip().endswith(("noise", "yes", "no"))],
        [line for line in rows if re.search(r" 0\.\d{3}$", line.rstrip())],
    )
    assert [len(found) for found in tables] == [1, 1]
    heads = [k for k, line in enumerate(lines) if set(line) == {"─"}]
    for head in heads:  # one line for every station
        below = [line.split(" ")[0] for line in lines[head + 1 : head + 6]]
        assert sorted(below) == ["Aotizhongxin", "Changping", "Dongsi", "Gucheng", "Huairou"]
    if len(name) < 40:
        assert name in tables[0][0]  # the constant answer made room


def test_the_terminal_calls_a_useless_certificate_useless(hospitals, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(hospitals, folder)
    show(folder)
    assert "useless" not in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    for model in summary["models"]:
        model |= {"certificate": 61.0, "status": "round limit"}
    (folder / "summary.json").write_text(json.dumps(summary))
    show(folder)
    said = " ".join(capsys.readouterr().out.split())
    last = {r.model: r for r in read(folder).rounds}["fair"]
    value = sum(w * last.losses[c] for c, w in last.weights.items())
    assert f"certified gap 6.1e+01, which is useless: the objective itself is {value:.2g}" in said
    assert "smaller by more than this" not in said
    assert "but proven within" not in said
    page = markup(report.write(folder).read_text(encoding="utf-8"))
    assert "so the certificate is useless" in page
