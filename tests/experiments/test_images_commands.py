"""`experiments.reproduce` on images: from made-up images to tables and pictures, and what the folders hold."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
from image_study_cases import EACH, OPTIONS, contents, light, reproduce, rows, sentence, size_of_png

from experiments import image_curves as curves
from experiments import image_study
from experiments import reproduce as commands
from experiments.image_plans import METHODS, NUMBERS, RHOS
from scaffpd.study.comparison.runs import Runner

RUNS = ("about.json", "clients.csv", "runs.csv", "runs.jsonl", "table.csv")


def check_table(folder, name, clients=20, seeds=2):
    """Every number of `table.csv` anew, from the accuracies of single clients."""
    few = clients // 5
    lines = rows(folder / "table.csv")
    for line in lines:
        alpha = float(line["alpha"])
        scores = {}
        for row in rows(folder / f"alpha-{alpha:g}" / "clients.csv"):
            if row["model"] == line["method"]:
                scores.setdefault(row["seed"], []).append(float(row["test_accuracy"]))
        accuracy = np.sort(np.array(list(scores.values())), axis=1)
        assert accuracy.shape == (seeds, clients)
        for column, values in (
            ("average", accuracy),
            ("worst_20", accuracy[:, :few]),
            ("best_20", accuracy[:, -few:]),
        ):
            each = values.mean(1)
            assert float(line[column]) == pytest.approx(each.mean(), abs=1e-6)
            assert float(line[f"{column}_sd"]) == pytest.approx(each.std(ddof=1), abs=1e-6)
        assert (line["table"], int(line["seeds"])) == (name, seeds)
        reported = NUMBERS[name, alpha].get(line["method"], ("", ""))
        assert [line["paper_average"], line["paper_worst_20"]] == list(map(str, reported))
    return lines


# ------------------------------------------------------------------ CIFAR-10


@pytest.fixture(scope="module")
def cifar10(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("cifar10") / "a study"
    assert reproduce(root, "cifar10", out, "--train-per-class", "80", "--quiet") == 0
    return out


def test_a_table_leaves_these_files(cifar10):
    own = ["README.md", "about.json", "partition-alpha-0.05.png", "table.csv"]
    assert list(contents(cifar10)) == sorted([*own, *(f"alpha-0.05/{name}" for name in RUNS)])
    width, height = size_of_png(cifar10 / "partition-alpha-0.05.png")
    assert min(width, height) > 600


def test_the_numbers_are_those_of_the_clients(cifar10):
    lines = check_table(cifar10, "cifar10")
    assert [line["method"] for line in lines] == list(METHODS)
    average = {line["method"]: float(line["average"]) for line in lines}
    assert (
        min(average[name] for name in ("FedAvg", "SCAFFOLD", "AFL", "DRFA", "Scaff-PD")) > 0.5
    )  # chance: 0.1
    assert all(float(line["rounds"]) == 3 for line in lines)
    assert all("=" in line["chosen"] for line in lines)


def test_every_method_had_the_same_budget_and_chose_on_the_first_partition(cifar10):
    runs = rows(cifar10 / "alpha-0.05" / "runs.csv")
    for method in METHODS:
        own = [(run["phase"], run["seed"]) for run in runs if run["model"] == method]
        assert own == [("tune", "0")] * 2 + [("final", "0"), ("final", "1")]


def test_the_page_has_the_paper_beside_ours_and_names_the_network(cifar10):
    page = (cifar10 / "README.md").read_text(encoding="utf-8")
    assert page.startswith("# CIFAR-10, 20 clients\n")
    assert "EfficientNet-Lite0" in page
    assert "a subset, 1,000 of 50,000 training images" in page
    assert "of these 80 training and 5 test images a class" in page
    assert "800 for training, 50 for testing; 300 coordinates of the eNTK at 16 pixels" in page
    lines = {line["method"]: line for line in rows(cifar10 / "table.csv")}
    for method in METHODS:
        (row,) = [text for text in page.splitlines() if text.startswith(f"| {method} |")]
        cells = [cell.strip(" *") for cell in row.strip("|").split("|")][1:]
        for cell, name in zip(cells, ("average", "worst_20"), strict=False):
            mean, deviation = (100 * float(lines[method][key]) for key in (name, f"{name}_sd"))
            assert [float(part) for part in cell.split(" ± ")] == pytest.approx(
                [mean, deviation], abs=0.0051
            )
        reported = NUMBERS["cifar10", 0.05].get(method)
        assert cells[2:] == (
            ["–", "–"] if reported is None else [f"{value:.2f}" for value in reported]
        )
    assert "\n- α = 0.05: Scaff-PD's worst 20 % (" in page
    assert "(partition-alpha-0.05.png)" in page


def test_how_it_came_about_can_be_read_and_done_again(cifar10):
    about = json.loads((cifar10 / "about.json").read_text(encoding="utf-8"))
    words = shlex.split(about["command"])
    assert words[:5] == ["python", "-m", "experiments.reproduce", "cifar10", "--small"]
    given = dict(zip(words[5::2], words[6::2], strict=True))
    assert given == dict(zip(OPTIONS[::2], OPTIONS[1::2], strict=True)) | {
        "--train-per-class": "80",
        "--out": cifar10.as_posix(),
    }
    assert (about["plan"]["name"], about["plan"]["alphas"], about["plan"]["rounds"]) == (
        "cifar10",
        [0.05],
        3,
    )
    assert about["features"]["shape"] == [850, 300]
    assert about["seconds"]["all"] >= about["seconds"]["features"] > 0
    assert "EfficientNet-Lite0" in about["features"]["backbone"]


@pytest.mark.long
def test_an_interrupted_study_goes_on_to_the_same_numbers(root, cifar10, tmp_path):
    log = cifar10 / "alpha-0.05" / "runs.jsonl"
    part = tmp_path / "alpha-0.05"
    part.mkdir()
    (part / "about.json").write_bytes((cifar10 / "alpha-0.05" / "about.json").read_bytes())
    lines = log.read_bytes().splitlines(keepends=True)
    (part / "runs.jsonl").write_bytes(b"".join(lines[:20]) + lines[20][:50])
    assert reproduce(root, "cifar10", tmp_path, "--train-per-class", "80", "--quiet") == 0
    assert (part / "clients.csv").read_bytes() == (
        cifar10 / "alpha-0.05" / "clients.csv"
    ).read_bytes()
    keep = [key for key in rows(tmp_path / "table.csv")[0] if key != "seconds"]
    for one, other in zip(rows(tmp_path / "table.csv"), rows(cifar10 / "table.csv"), strict=True):
        assert [one[key] for key in keep] == [other[key] for key in keep]


@pytest.mark.parametrize(
    ("option", "value"), [("--rounds", "4"), pytest.param("--l2", "0.1", marks=pytest.mark.long)]
)
def test_other_settings_need_another_folder(option, value, root, cifar10, capsys):
    before = contents(cifar10)
    assert (
        reproduce(root, "cifar10", cifar10, "--train-per-class", "80", "--quiet", option, value)
        == 2
    )
    assert "has a comparison with other" in sentence(capsys)
    assert contents(cifar10) == before


def other_weights(name="efficientnet-lite0", folder=None, size=224):
    return light(name, folder, size, seed=1)


def test_other_weights_need_another_folder(root, cifar10, capsys):
    """The same command, but features that differ."""
    assert (
        reproduce(
            root, "cifar10", cifar10, "--train-per-class", "80", "--quiet", network=other_weights
        )
        == 2
    )
    assert "has a comparison with other data; use another folder" in sentence(capsys)


def test_the_same_command_again_changes_nothing_and_shows_the_table(
    root, cifar10, capsys, monkeypatch
):
    def never(*_):
        raise AssertionError("there is nothing left to do")

    before = contents(cifar10)
    monkeypatch.setattr(Runner, "carry_out", never)
    assert reproduce(root, "cifar10", cifar10, "--train-per-class", "80") == 0
    assert contents(cifar10) == before
    out = capsys.readouterr().out
    assert "α = 0.05" in out
    for line in rows(cifar10 / "table.csv"):
        (row,) = [text for text in out.splitlines() if text.startswith(f"{line['method']} ")]
        assert f"{100 * float(line['average']):.2f} ± " in row
        assert all(
            f"{value:.2f}" in row for value in NUMBERS["cifar10", 0.05].get(line["method"], ())
        )
    assert "**" not in out
    assert "Verdict\nα = 0.05: Scaff-PD's worst 20 %" in out
    assert (
        "EfficientNet-Lite0 (ImageNet weights) takes the place of the paper's ResNet-18."
        in out.replace("\n", " ")
    )
    assert str(cifar10 / "table.csv") in out.replace("\n", "")


# ------------------------------------------------------------------ the other commands


@pytest.fixture(scope="module")
def tiny(root, tmp_path_factory):
    """Folders of `tradeoff` and, beside it, of the comparison behind it."""
    out = tmp_path_factory.mktemp("tiny")
    assert reproduce(root, "tradeoff", out / "tradeoff", "--quiet") == 0
    return out


@pytest.mark.long
def test_tradeoff(tiny, root):
    alone = [f"runs/alpha-0.01/{name}" for name in RUNS]
    assert sorted(contents(tiny / "tradeoff")) == [
        "command.txt",
        *alone,
        "tradeoff.csv",
        "tradeoff.png",
    ]
    assert len(rows(tiny / "tradeoff" / "tradeoff.csv")) == 2 * len(METHODS)
    assert size_of_png(tiny / "tradeoff" / "tradeoff.png")[0] > 1000
    command = (tiny / "tradeoff" / "command.txt").read_text(encoding="utf-8")
    assert command.startswith("python -m experiments.reproduce tradeoff --small --seeds 2")
    before = contents(tiny)
    assert reproduce(root, "tradeoff", tiny / "tradeoff", "--quiet") == 0
    assert contents(tiny) == before


@pytest.mark.long
def test_the_tradeoff_of_a_study_that_is_there(root, tmp_path):
    """`tradeoff` beside `tinyimagenet` shows its runs and makes none."""
    study = tmp_path / "tinyimagenet"
    out = tmp_path / "tradeoff"
    assert reproduce(root, "tinyimagenet", study, "--quiet") == 0
    lines = check_table(study, "tinyimagenet")
    assert [float(line["alpha"]) for line in lines] == [
        a for a in (0.01, 0.05, 0.1) for _ in METHODS
    ]
    page = (study / "README.md").read_text(encoding="utf-8")
    assert page.count("(paper) |") == 6
    assert page.count("\n- α = ") == 3
    before = contents(study)
    assert reproduce(root, "tradeoff", out, "--quiet") == 0
    assert contents(study) == before
    assert sorted(contents(out)) == ["command.txt", "tradeoff.csv", "tradeoff.png"]


@pytest.mark.long
def test_other_partitions_and_more_tuning(root, tmp_path):
    assert (
        reproduce(root, "cifar10", tmp_path, "--balanced", "--climb", "--quiet", "--seeds", "1")
        == 0
    )
    about = json.loads((tmp_path / "about.json").read_text(encoding="utf-8"))
    for option in ("--balanced", "--climb"):
        assert about["plan"][option.removeprefix("--")] is True
        assert option in about["command"]
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page.count("\n| 0.05 | ") == len(METHODS)  # what was chosen, and what it cost


@pytest.mark.long
def test_which_regulariser(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(image_study, "L2S", image_study.L2S[::4])
    assert reproduce(root, "regulariser", tmp_path) == 0
    found = rows(tmp_path / "regulariser.csv")
    assert {row["dataset"] for row in found} == {"cifar10", "cifar100", "tinyimagenet"}
    said = capsys.readouterr().out
    for name, title in (("cifar10", "CIFAR-10"), ("tinyimagenet", "Tiny-ImageNet")):
        own = [row for row in found if row["dataset"] == name]
        top = max(own, key=lambda row: (float(row["accuracy"]), float(row["l2"])))
        assert f"{title}: l2 = {float(top['l2']):.2g}, {100 * float(top['accuracy']):.1f} %" in said


@pytest.fixture(scope="module")
def rho(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("rho")
    assert reproduce(root, "rho", out, "--quiet") == 0
    return out


@pytest.mark.long
def test_rho(rho):
    assert {path.name for path in rho.iterdir()} == {"README.md", "rho.csv", "rho.png", "tuning"}
    points = rows(rho / "rho.csv")
    assert list(points[0]) == list(curves.COLUMNS)
    labels = [*(f"Scaff-PD, ρ = {value:g}" for value in RHOS), "SCAFFOLD"]
    expected = [
        (label, str(seed), str(r)) for seed in range(2) for label in labels for r in range(4)
    ]
    assert [(p["method"], p["seed"], p["round"]) for p in points] == expected
    starts = {(p["seed"], p["average"], p["worst_20"]) for p in points if p["round"] == "0"}
    assert len(starts) == 2  # everybody starts at the same point
    assert all(
        0 <= float(p["worst_20"]) <= float(p["average"]) <= float(p["best_20"]) <= 1 for p in points
    )
    assert size_of_png(rho / "rho.png")[0] > 1000
    page = (rho / "README.md").read_text(encoding="utf-8")
    assert all(f"- {label}: after 3 rounds" in page for label in labels)


@pytest.mark.long
def test_the_tuned_baseline_of_rho_is_the_one_of_the_comparison(root, tmp_path, monkeypatch):
    """SCAFFOLD's last point on the first partition is the final run that the tuning made there."""
    monkeypatch.setattr(curves, "RHOS", RHOS[:1])
    assert reproduce(root, "rho", tmp_path, "--quiet", "--seeds", "1") == 0
    (final,) = [row for row in rows(tmp_path / "tuning" / "runs.csv") if row["phase"] == "final"]
    (last,) = [
        p
        for p in rows(tmp_path / "rho.csv")
        if (p["method"], p["seed"], p["round"]) == ("SCAFFOLD", "0", "3")
    ]
    assert float(last["average"]) == pytest.approx(float(final["test_accuracy_mean"]), abs=1e-6)
    assert float(last["worst_20"]) == pytest.approx(
        float(final["test_accuracy_worst_20"]), abs=1e-6
    )


@pytest.mark.long
def test_rho_again_gives_the_same_numbers(rho, root):
    before = contents(rho)
    assert reproduce(root, "rho", rho, "--quiet") == 0
    after = contents(rho)
    assert {k: v for k, v in after.items() if k != "rho.png"} == {
        k: v for k, v in before.items() if k != "rho.png"
    }


@pytest.mark.long
def test_causes(root, tmp_path, capsys):
    assert reproduce(root, "causes", tmp_path, "--seeds", "1") == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page in capsys.readouterr().out
    points = rows(tmp_path / "causes.csv")
    assert list(points[0]) == list(curves.CAUSE_COLUMNS)
    labels = list(curves.contestants(2))
    expected = [
        (l2, label, str(r))
        for l2 in ("0.001", "0.003", "0.01")
        for label in labels
        for r in range(4)
    ]
    assert [(p["l2"], p["method"], p["round"]) for p in points] == expected
    for label in labels:
        (row,) = [text for text in page.splitlines() if text.startswith(f"| {label} |")]
        last = [p for p in points if p["method"] == label and p["round"] == "3"]
        cells = [
            f"{100 * float(p['worst_20']):.1f} ({100 * float(p['average']):.1f})" for p in last
        ]
        assert [cell.strip() for cell in row.strip("|").split("|")][1:] == cells
    assert "l2 = 0.003, 3 rounds" in page


# ------------------------------------------------------------------ long ones


@pytest.mark.long
def test_fifty_clients(root, tmp_path):
    assert reproduce(root, "cifar100-50clients", tmp_path, "--quiet", each=EACH) == 0
    lines = check_table(tmp_path, "cifar100-50clients", clients=50)
    assert [line["method"] for line in lines] == list(METHODS)
    assert (
        (tmp_path / "README.md").read_text(encoding="utf-8").startswith("# CIFAR-100, 50 clients\n")
    )


@pytest.mark.long
def test_all_of_it(root, tmp_path):
    assert reproduce(root, "all", tmp_path, "--quiet", each=EACH | {"tinyimagenet": (2, 1)}) == 0
    names = {
        "cifar10",
        "cifar100",
        "cifar100-50clients",
        "tinyimagenet",
        "rho",
        "tradeoff",
        "causes",
        "regulariser",
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    for name, clients in (
        ("cifar10", 20),
        ("cifar100", 20),
        ("tinyimagenet", 20),
        ("cifar100-50clients", 50),
    ):
        check_table(tmp_path / name, name, clients)
        about = json.loads((tmp_path / name / "about.json").read_text(encoding="utf-8"))
        assert about["command"].endswith(f"--out {(tmp_path / name).as_posix()}")
    before = contents(tmp_path)
    assert reproduce(root, "all", tmp_path, "--quiet", each=EACH | {"tinyimagenet": (2, 1)}) == 0
    after = contents(tmp_path)
    assert [
        name for name in before if before[name] != after[name] and not name.endswith(".png")
    ] == []


@pytest.mark.long
def test_two_processes_and_one_have_the_same_numbers(root, tmp_path):
    """Without the changes that make other tests fast: real network, spawned processes, `--small` as it is."""
    where = ("--data", str(root), "--cache", str(root / "features"), "--device", "cpu", "--quiet")
    more = (*where, *OPTIONS, "--train-per-class", "80")
    assert commands.run(["cifar10", "--small", "--out", str(tmp_path / "two"), *more]) == 0
    assert (
        reproduce(root, "cifar10", tmp_path / "one", *more[-2:], "--quiet", each=EACH, network=None)
        == 0
    )
    one, two = (tmp_path / name / "alpha-0.05" / "clients.csv" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
