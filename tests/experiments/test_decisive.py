"""The decisive tables: clients in their eigenvectors against the package's own, exact optima, the climb, a piece."""

from __future__ import annotations

import csv
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import scaffpd as sp
from comparison_cases import Copies
from experiments import (
    image_decisive,
    image_divisions,
    image_exact,
    image_findings,
    image_pieces,
    image_rows,
    spectral,
)
from experiments.image_study import Ground, Place
from scaffpd.data import Table
from scaffpd.errors import InputError
from scaffpd.study.comparison import runs as pool

RESULTS = Path(__file__).parents[2] / "results" / "decisive"
C = 4
D = 12
METHODS = [
    sp.FedAvg(local_steps=7),
    sp.FedAvg(local_steps=7, weights="uniform", local_rate=0.3),
    sp.FedProx(local_steps=7, mu=0.2),
    sp.Scaffold(local_steps=7),
    sp.Scaffold(local_steps=3, option="I", weights="samples"),
    sp.QFFL(q=1.0, local_steps=7),
    sp.DeltaFL(local_steps=7, tail=0.4),
    sp.AFL(local_steps=7),
    sp.DRFA(local_steps=7),
    sp.ScaffPD(sp.ChiSquare(0.1), local_steps=7),
    sp.ScaffPD(
        sp.ChiSquare(0.1),
        steps=sp.Fixed(tau=1.0, sigma=0.5, theta=0.9, local_rate=0.2),
        local_steps=7,
    ),
]


@pytest.fixture(scope="module")
def clients():
    """Six clients, some with fewer samples than features."""
    random = np.random.default_rng(0)
    found = []
    for m in (40, 8, 25, 12, 60, 10):
        y = random.integers(0, C, m)
        found.append((random.normal(size=(m, D)) * 0.3 + 0.5 * (y[:, None] == np.arange(D) % C), y))
    return found


def spectra(clients, targets="one-hot"):
    return spectral.decompose([(torch.tensor(X), torch.tensor(y)) for X, y in clients], C, targets)


@pytest.mark.parametrize(
    "method", METHODS, ids=lambda m: type(m).__name__
)  # the same in every process
def test_methods_make_the_same_rounds_in_eigenvectors_as_on_rows(clients, method):
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.01, classes=C))
    own = spectral.federation(spectral.Quadratics.shared(spectra(clients), 0.01))
    a, b = (sp.train(method, each, rounds=12, progress=False) for each in (cohort, own))
    assert np.linalg.norm(a.x - b.x) <= 1e-10 * np.linalg.norm(a.x)
    np.testing.assert_allclose(a.weights, b.weights, atol=1e-9)
    if np.isfinite(a.certificate):
        assert (
            b.certificate >= 0.5 * a.certificate
        )  # μ_i = l2 here, and more where a client has many samples


@pytest.mark.parametrize(
    "objective", [sp.Average(), sp.ChiSquare(0.01), sp.ChiSquare(1.0), sp.CVaR(0.3)], ids=repr
)
def test_optima_are_those_of_the_package_and_of_an_interior_point(clients, objective):
    s = spectra(clients)
    model = sp.Linear("squared", l2=0.01, classes=C)
    found = spectral.saddle(spectral.Quadratics.shared(s, 0.01), objective, 1e-11)
    other = sp.train(sp.fair(objective), sp.Cohort(clients, model), tol=1e-10, progress=False)
    assert found.gap <= 1e-9
    np.testing.assert_allclose(found.X.flatten().numpy(), other.x, atol=1e-5)
    pull = torch.tensor([3.0 / len(y) for _, y in clients], dtype=torch.float64)
    mine = spectral.saddle(spectral.Quadratics.personal(s, 0.01, pull), objective, 1e-11)
    cohort = sp.Cohort(clients, sp.Personal(model, 3.0))
    theirs = sp.train(sp.fair(objective), cohort, tol=1e-9, progress=False)
    ours = spectral.own_models(s, 0.01, pull, mine.X).flatten(1)
    np.testing.assert_allclose(ours.numpy(), cohort.own_models(theirs.x).numpy(), atol=1e-3)


def test_targets_of_tct_are_half_the_loss_of_centred_targets(clients):
    q = spectral.Quadratics.shared(spectra(clients, "tct"), 0.02)
    X = torch.from_numpy(np.random.default_rng(1).normal(size=(D, C)))
    losses = q.losses(X, q.spectra.W @ X).numpy()
    for (A, y), found in zip(clients, losses, strict=True):
        own = np.mean(np.sum((A @ X.numpy() - (np.eye(C)[y] - 1 / C)) ** 2, 1)) / 2
        assert found == pytest.approx(own + 0.01 * float(X.square().sum()), rel=1e-10)


def test_an_equilibrium_answers_held_out_losses(clients):
    q = spectral.Quadratics.shared(spectra(clients), 0.01)
    objective = sp.ChiSquare(0.3)
    random = np.random.default_rng(5)
    aside = [(X + 0.2 * random.normal(size=X.shape), y) for X, y in clients]

    def held(X):
        return np.array([np.mean(np.sum((A @ X.numpy() - np.eye(C)[y]) ** 2, 1)) for A, y in aside])

    found = spectral.equilibrium(q, objective, held, 1e-9)
    np.testing.assert_allclose(found.weights, objective.maximizer(held(found.X)), atol=1e-4)
    best = q.minimum(torch.from_numpy(found.weights))[0]
    np.testing.assert_allclose(found.X.numpy(), best.numpy(), atol=1e-9)
    assert (
        np.abs(found.weights - spectral.saddle(q, objective).weights).max() > 1e-3
    )  # training losses say otherwise


def test_a_climb_ends_where_both_neighbours_are_worse():
    axes = {"a": image_rows.Axis(1.0, 2.0), "b": image_rows.Axis(1.0, 3.0, low=0.2, high=1.0)}
    found = image_rows.climbed(
        axes, lambda v: (-abs(np.log2(v["a"]) - 5.2) - abs(v["b"] - 3), None)
    )
    assert found.values == {"a": 32.0, "b": 1.0}
    assert not found.open
    tried = {v["a"] for v, _, _ in found.tried}
    assert {16.0, 64.0} <= tried
    stopped = image_rows.climbed(axes, lambda v: (v["a"], None), most=4)
    assert "a" in stopped.open


def test_every_averaging_row_has_both_weightings():
    names = list(image_rows.rows(10))
    for method in ("FedAvg", "FedProx", "SCAFFOLD", "q-FFL", "Δ-FL"):
        assert {f"{method}, by samples", f"{method}, by clients"} <= set(names)


def test_a_row_climbs_from_where_rows_like_it_ended():
    row = image_rows.rows(10)["Scaff-PD, Fixed"]
    known = {
        "FedAvg, by clients": {"l2": 1e-3, "rate": 1.5},
        "Scaff-PD, Auto": {"l2": 1e-6, "rho": 0.3},
    }
    starts = {name: axis.start for name, axis in row.starting(known).axes.items()}
    assert starts == {"l2": 1e-6, "rho": 0.3, "rate": 1.5, "odds": 0.3}
    assert row.starting({}).axes == row.axes
    assert all(
        before in image_rows.rows(10)
        for each in image_rows.rows(10).values()
        for before in each.after
    )


def test_pieces_are_chosen_by_what_they_have():
    pieces = image_decisive.of("tinyimagenet")
    assert len({piece.name for piece in pieces}) == len(pieces)
    assert {p.plan.backbone for p in image_decisive.chosen(pieces, backbone="resnet18-layer3")} == {
        "resnet18-layer3"
    }
    assert [p.loss for p in image_decisive.chosen(pieces, loss="tct")] == ["tct"]
    with pytest.raises(InputError, match="backbone"):
        image_decisive.chosen(pieces, backbone="resnet")


def drawn(each, mean, random):
    y = np.repeat(np.arange(len(mean)), each)
    return (mean[y] + random.normal(size=(len(y), mean.shape[1]))).astype(np.float32), y


def ground(clients=8, classes=12, features=10):
    random = np.random.default_rng(0)
    mean = 0.8 * random.normal(size=(classes, features))
    (X, y), (T, t) = drawn(60, mean, random), drawn(25, mean, random)
    piece = image_decisive.of("cifar100", small=True)[0]
    plan = replace(piece.plan, clients=clients, seeds=2, stops=(3, 6), tune=4)
    piece = replace(
        piece,
        plan=plan,
        rows=("FedAvg, by clients", "Scaff-PD, Auto", image_rows.TUNED),
        extras=False,
    )
    return piece, Ground(
        plan, Table(np.vstack([X, T]), features**-0.5, "k"), y, t, classes, "drawn", 0.0
    )


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_piece_is_written_row_by_row_and_goes_on(tmp_path):
    piece, here = ground()
    assert not image_pieces.carry_out(
        (piece, here, image_pieces.LANES), "cpu", tmp_path, deadline=time.time() - 1
    )
    assert image_pieces.carry_out((piece, here, image_pieces.LANES), "cpu", tmp_path)
    runs = read(tmp_path / piece.name / "runs.csv")
    names = dict.fromkeys(run["row"] for run in runs)
    assert {*image_rows.EXACT, "FedAvg, by clients", "Scaff-PD, Auto"} <= set(names)
    for run in runs:
        each = np.array(run["accuracies"].split(), dtype=float)
        assert float(run["average"]) == pytest.approx(each.mean(), abs=0.01)
        assert float(run["worst_20"]) == pytest.approx(np.sort(each)[:2].mean(), abs=0.01)
    own = {name: [run for run in runs if run["row"] == name] for name in names}
    for a, b in zip(
        own[image_rows.OWN_FAIR], own[f"{image_rows.OWN_FAIR} (other means)"], strict=True
    ):
        assert abs(float(a["average"]) - float(b["average"])) <= 0.3
        assert abs(float(a["worst_20"]) - float(b["worst_20"])) <= 0.3
    assert {path.name for path in image_findings.write(tmp_path, "cifar100", "command")} == {
        *("README.md", "contrasts.csv", "rows.png")
    }
    line = next(row for row in read(tmp_path / "contrasts.csv") if row["minus"] == image_rows.ALONE)
    mean = [
        np.mean([float(run["worst_20"]) for run in own[name]])
        for name in (line["row"], line["minus"])
    ]
    assert float(line["worst_20"]) == pytest.approx(mean[0] - mean[1], abs=0.01)
    before = (tmp_path / piece.name / "runs.csv").read_bytes()
    assert image_pieces.carry_out((piece, here, image_pieces.LANES), "cpu", tmp_path)
    assert (tmp_path / piece.name / "runs.csv").read_bytes() == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.long
def test_processes_that_share_a_piece_write_what_one_would(tmp_path, monkeypatch):
    piece, here = ground()
    piece = replace(
        piece, rows=("FedAvg, by samples", "Scaff-PD, Auto", "Scaff-PD, average"), extras=True
    )
    piece = replace(piece, plan=replace(piece.plan, seeds=1), choosing=1, l2s=(1e-3,))
    monkeypatch.setattr(image_decisive, "ground", lambda source, place: here)
    monkeypatch.setattr(
        image_pieces.os, "cpu_count", lambda: 1
    )  # copies of a process have one thread
    monkeypatch.setattr(pool, "get_context", {"spawn": Copies(0)}.get)
    place = Place(None, tmp_path, "cpu")
    for workers, folder in ((1, "one"), (2, "many")):
        assert not image_decisive.decide([piece], place, tmp_path / folder, workers, seconds=1e-9)
        assert image_decisive.decide([piece], place, tmp_path / folder, workers)
    same = ("row", "partition", "worst_20", "certificate", "chosen")
    for file, columns in (
        ("runs.csv", same),
        ("fit.csv", image_pieces.FIT),
        ("held.csv", image_pieces.HELD),
    ):
        one, many = (read(tmp_path / place / piece.name / file) for place in ("one", "many"))
        assert sorted([row[c] for c in columns] for row in one) == sorted(
            [row[c] for c in columns] for row in many
        )
    about = json.loads((tmp_path / "many" / piece.name / "about.json").read_text(encoding="utf-8"))
    assert about["complete"]
    assert len(about["commit"].split(", ")) == 1
    for run in read(tmp_path / "one" / piece.name / "runs.csv"):
        if run["row"].startswith("Scaff-PD"):  # the dual value of the run's own λ
            assert -1e-12 <= float(run["certificate"]) < 0.5


def test_one_average_model_is_a_weighted_ridge_regression():
    piece, here = ground()
    F = torch.from_numpy(np.asarray(here.table.values, dtype=np.float64)) * here.table.scale
    labels = torch.from_numpy(np.concatenate([here.train, here.test]))
    division = image_divisions.Division(here, F, labels, piece, 1)
    X = image_exact.averaged(division, "fit", {"l2": 0.03})[0].numpy()
    H = 0.03 * np.eye(F.shape[1])
    b = np.zeros(X.shape)
    for A, y in division.pairs("fit"):
        own = A.numpy()
        Y = np.eye(here.classes)[y.numpy()]
        H += 2 * own.T @ own / len(own) / 8
        b += 2 * own.T @ Y / len(own) / 8
    np.testing.assert_allclose(X, np.linalg.solve(H, b), atol=1e-9)
    rows = division.rows
    for i in range(8):
        assert sorted([*rows["fit"][i].tolist(), *rows["held"][i].tolist()]) == sorted(
            rows["all"][i].tolist()
        )
        right = (F[rows["test"][i]].numpy() @ X).argmax(1) == labels[rows["test"][i]].numpy()
        assert division.accuracy(torch.from_numpy(X), "test")[0][i] == pytest.approx(right.mean())


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/")), ids=lambda path: path.name)
def test_the_published_page_is_that_of_the_published_runs(folder):
    page = (folder / "README.md").read_text(encoding="utf-8")
    command = page.splitlines()[2].strip("`")
    pieces = image_findings.load(folder)
    assert image_findings.page(pieces, folder.name, command) == page
    for made in pieces:
        others = made.runs.get(f"{image_rows.OWN_FAIR} (other means)", [])
        for column in ("average", "worst_20") if others else ():
            found = made.difference(image_rows.OWN_FAIR, others[0]["row"], column)
            assert len(found) == len(others)
            assert np.abs(found).max() <= 0.3


def test_every_interval_that_the_page_on_images_cites_is_one_of_the_results():
    known = {("4.0", "1.2")}  # of an earlier run, which the page says
    for folder in RESULTS.glob("*/"):
        for row in read(folder / "contrasts.csv"):
            for value, half in (("worst_20", "half"), ("average", "average_half")):
                known.add((f"{abs(float(row[value])):.1f}", f"{float(row[half]):.1f}"))
        for made in image_findings.load(folder):
            for point in (
                point for rho in ("0.03", "0.1", "0.5") for point in image_findings.gains(made, rho)
            ):
                known.add((f"{abs(point['gain']):.1f}", f"{point['half']:.1f}"))
    page = (
        (RESULTS.parents[1] / "docs" / "images.md").read_text(encoding="utf-8").split("## Data")[0]
    )
    cited = re.findall(r"(\d+\.\d) ± (\d+\.\d)", page)
    assert len(cited) > 80
    assert [pair for pair in cited if pair not in known] == []


def test_a_small_study_asks_for_one_piece_and_a_wrong_choice_is_refused(capsys):
    assert len(image_decisive.of("cifar100", small=True)) == 1
    with pytest.raises(SystemExit):
        image_decisive.main(["cifar100", "--alpha", "0.3"])
    assert "leave out an option" in capsys.readouterr().err
