"""Folders in the format of `scaffpd train`, written from runs that are really trained here."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import scaffpd as sp
from scaffpd.training.metrics import a_fifth

COSTS = (
    "round",
    "certificate",
    "accepted",
    "exchanges",
    "bytes_up",
    "bytes_down",
    "absent",
    "seconds",
)
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\"quoted\" 'and' {{data}} & <b>bold</b>, comma",
    "Ω 医院 \u2028 🏥 \\ ]]>",
    "x" * 300,
)


def trained(folder, cohort, objectives, *, rounds=60, tol=1e-6, labels=(), **about):
    """Train every objective and write the folder; `objectives` is {name: (role, objective)}."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    regression = about.get("task") == "regression"
    measure = "rmse" if regression else "accuracy"
    split = about.get("split", "test")
    models = []
    clients = []
    lines = []
    for name, (role, objective) in objectives.items():
        algorithm = objective if hasattr(objective, "round") else sp.fair(objective)
        measured = {}

        def note(moment, into=measured):
            into[moment.rounds] = over_clients(
                values(cohort, moment.state.x, split, measure), measure
            )

        result = sp.train(
            algorithm, cohort, rounds=rounds, tol=tol, progress=False, callbacks=[note]
        )
        models.append(entry(name, role, objective, result))
        clients += client_rows(name, cohort, result, measure, split)
        lines += round_rows(name, result.history, measured)
    summary = {
        "format": 1,
        "kind": "train",
        "title": "a run",
        "command": f"scaffpd train {folder.name}/config.toml",
        "made": "2026-11-16T05:00:00+00:00",
        "version": "0.1.0",
        "task": "classification",
        "measure": measure,
        "split": split,
        "labels": list(labels),
        "clients_word": "client",
        "model": "linear",
        "data": "some rows",
        "models": models,
        "remarks": ["Nothing was dropped."],
        "verdict": None,
        "path": None,
        **about,
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "config.toml").write_text(
        '[objective]\nkind = "ChiSquare"\nrho = 0.1\n', encoding="utf-8"
    )
    (folder / "environment.json").write_text('{"scaffpd": "0.1.0"}', encoding="utf-8")
    write(folder / "rounds.csv", lines, f"{split}_{measure}", cohort.names)
    table(folder / "clients.csv", clients)
    return folder


def entry(name, role, objective, result):
    last = result.history
    finite = np.isfinite(result.certificate)
    return {
        "name": name,
        "role": role,
        "objective": repr(objective),
        "algorithm": "subspace saddle",
        "status": str(result.status),
        "message": result.message,
        "rounds": result.rounds,
        "certificate": float(result.certificate) if finite else None,
        "exchanges": int(last["exchanges"][-1]),
        "bytes_up": int(last["bytes_up"][-1]),
        "bytes_down": int(last["bytes_down"][-1]),
        "seconds": float(last["seconds"][-1]),
        "strength": getattr(objective, "rho", None),
    }


def client_rows(name, cohort, result, measure, held):
    rows = [
        {"model": name, "client": c, "train_rows": "", "test_rows": "", "weight": float(w)}
        for c, w in zip(cohort.names, result.weights, strict=True)
    ]
    for split in ("train", "test"):
        scores = cohort.evaluate(result.x, split) if split == "train" or held == "test" else None
        found = None if scores is None else values(cohort, result.x, split, measure)
        for i, row in enumerate(rows):
            row[f"{split}_rows"] = "" if scores is None else int(scores.counts[i])
            row[f"{split}_loss"] = "" if scores is None else float(scores.loss[i])
            row[f"{split}_{measure}"] = "" if found is None else float(found[i])
    return rows


def values(cohort, x, split, measure):
    """Per client: the share of right predictions, or the root of the mean squared error."""
    if measure == "accuracy":
        return cohort.evaluate(x, split).accuracy
    weights, intercept = cohort.model.reshape(x, features=len(x) - 1)
    rows = {"train": cohort.rows_train, "test": cohort.rows_test}[split]
    return np.array(
        [
            np.sqrt(np.mean((X @ np.asarray(weights) + np.asarray(intercept) - y) ** 2))
            for X, y in rows
        ]
    )


def over_clients(found, measure):
    """Mean, worst 20 % and worst."""
    order = np.sort(found) if measure == "accuracy" else np.sort(found)[::-1]
    return float(order.mean()), float(order[: a_fifth(len(order))].mean()), float(order[0])


def round_rows(name, history, measured):
    rows = []
    for i in range(len(history)):
        row = {"model": name, **{cost: history[cost][i].item() for cost in COSTS}}
        row["measures"] = measured.get(row["round"], ("", "", ""))
        row["losses"], row["weights"] = history.losses[i].tolist(), history.weights[i].tolist()
        rows.append(row)
    return rows


def write(path, rows, score, names):
    heads = ["model", *COSTS, *(f"{score}_{which}" for which in ("mean", "worst_20", "worst"))]
    heads += [f"loss[{n}]" for n in names] + [f"weight[{n}]" for n in names]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        for row in rows:
            writer.writerow(
                [
                    row["model"],
                    *(row[c] for c in COSTS),
                    *row["measures"],
                    *row["losses"],
                    *row["weights"],
                ]
            )


def table(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def partition(folder, silos, names, labels=None):
    rows = []
    for i, name in enumerate(names):
        train = np.asarray(silos.train[i][1])
        test = np.asarray(silos.test[i][1]) if silos.test else np.array([])
        if labels is None:
            rows.append(
                {"client": name, "label": "", "train_rows": len(train), "test_rows": len(test)}
            )
            continue
        for k, label in enumerate(labels):
            rows.append(
                {
                    "client": name,
                    "label": label,
                    "train_rows": int((train == k).sum()),
                    "test_rows": int((test == k).sum()),
                }
            )
    table(folder / "partition.csv", rows)


def hospitals(folder, names=None, **about):
    silos = sp.data.heart_disease(test_fraction=0.3, seed=0)
    names = names or silos.names
    cohort = sp.Cohort(
        silos.train, sp.Linear("logistic", l2=0.01, intercept=True), names=names, test=silos.test
    )
    labels = ["healthy", "ill"]
    two = {"average": ("before", sp.Average()), "fair": ("after", sp.ChiSquare(rho=0.1))}
    made = trained(
        folder,
        cohort,
        two,
        labels=labels,
        **{"title": "heart disease: four hospitals", "clients_word": "hospital", **about},
    )
    partition(made, silos, names, labels)
    return made


def digits(folder, clients=20, **about):
    silos = sp.data.digits(clients=clients, alpha=0.05 if clients < 100 else 0.3, test_fraction=0.3)
    cohort = sp.Cohort(
        silos.train,
        sp.Linear("softmax", l2=1e-3, intercept=True, classes=10),
        names=silos.names,
        test=silos.test,
    )
    three = {
        "average": ("before", sp.Average()),
        "fair": ("after", sp.ChiSquare(rho=0.1)),
        "worst case": ("", sp.Agnostic()),
    }
    labels = [str(k) for k in range(10)]
    made = trained(
        folder,
        cohort,
        three,
        tol=1e-4,
        labels=labels,
        rounds=4,
        **{"title": f"digits: {clients} clients", **about},
    )
    partition(made, silos, silos.names, labels)
    return made


def path(folder, **about):
    silos = sp.data.heart_disease(test_fraction=0.3, seed=0)
    cohort = sp.Cohort(
        silos.train,
        sp.Linear("logistic", l2=0.01, intercept=True),
        names=silos.names,
        test=silos.test,
    )
    grid = [3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003]
    points = {"average": ("before", sp.Average())}
    points |= {
        f"ρ = {rho:g}": ("after" if rho == 0.1 else "", sp.ChiSquare(rho=rho)) for rho in grid
    }
    points["worst case"] = ("", sp.Agnostic())
    knee = {
        "parameter": "rho",
        "symbol": "ρ",
        "objective": "ChiSquare",
        "average": "average",
        "knee": "ρ = 0.1",
        "why": "Beyond ρ = 0.1, another point for the worst-served costs the average more than it brings.",
        "rounds_warm": 40,
        "rounds_cold": 90,
    }
    return trained(
        folder,
        cohort,
        points,
        kind="path",
        path=knee,
        title="heart disease: path over ρ",
        clients_word="hospital",
        **about,
    )


def diabetes(folder, **about):
    """Regression: the progression itself, by decade of age."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    X = data.data[:, 1:]
    y = data.target
    X = (X - X.mean(0)) / X.std(0)
    decades = np.clip(data.data[:, 0].astype(int) // 10, 2, 6)
    names = [f"{d}0 to {d}9" for d in range(2, 7)]
    rows = [np.flatnonzero(decades == d) for d in range(2, 7)]

    silos = SimpleNamespace(
        train=[(X[r[::2]], y[r[::2]] - 150) for r in rows],
        test=[(X[r[1::2]], y[r[1::2]] - 150) for r in rows],
    )
    cohort = sp.Cohort(
        silos.train, sp.Linear("squared", l2=1e-3, intercept=True), names=names, test=silos.test
    )
    cohort.rows_train = silos.train
    cohort.rows_test = silos.test
    two = {"average": ("before", sp.Average()), "worst case": ("after", sp.Agnostic())}
    made = trained(
        folder,
        cohort,
        two,
        tol=1e-3,
        task="regression",
        **{"title": "diabetes: five decades", "clients_word": "decade", **about},
    )
    partition(made, silos, names)
    return made


def stations(folder, **about):
    """Five stations, two of them new: what joining brings, how alike models should be, and who gains from whom."""
    air = sp.data.beijing_air(new=2, days=40, seed=1)
    some = [
        air.names.index(n) for n in ("Aotizhongxin", "Changping", "Dongsi", "Gucheng", "Huairou")
    ]
    names = [air.names[i] for i in some]
    train, test = ([part[i] for i in some] for part in (air.train, air.test))
    model = sp.Linear("squared", l2=0.1, intercept=True)
    goal = sp.CVaR(alpha=0.4)
    cohort = sp.Cohort(train, model, names=names, test=test)
    cohort.rows_train = train
    cohort.rows_test = test
    found = sp.joining(train, test, model, goal, names=names, block=7, word="station")
    game = sp.coalition(
        train, test, sp.Personal(model, found.strength), goal, names=names, most=4, permutations=4
    )
    two = {"average": ("before", sp.Average()), "fair": ("after", goal)}
    about = {"title": "five stations", "clients_word": "station", "task": "regression", **about}
    about |= {"joining": found.summary(), "coalition": game.summary()}
    made = trained(folder, cohort, two, tol=1e-3, **about)
    table(made / "joining.csv", found.table())
    table(made / "kappa_path.csv", found.kappa_path)
    table(made / "coalition.csv", game.table())
    partition(made, SimpleNamespace(train=train, test=test), names)
    return made


def deployed(folder):
    """Four hospitals as silos, one of which goes away and comes back."""
    from deploy_cases import QUICK, federation, run

    scaff_pd = {"[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 10\n\n[objective]'}
    file, places = federation(folder, replacing=scaff_pd, more=QUICK)
    run(file, places, {12: [("kill", "va")], 30: [("restart", "va")]})
    return folder / "run"


def many(folder, clients=1000, rounds=40):
    """A folder as a run of many clients leaves it; written, not trained: only its size matters."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    names = [f"client {i}" for i in range(clients)]
    models = []
    scores = []
    lines = []
    for name, role, shift in (("average", "before", 0.0), ("fair", "after", 0.03)):
        accuracy = np.clip(random.beta(8, 2, clients) + shift, 0, 1)
        models.append(
            {
                "name": name,
                "role": role,
                "status": "converged",
                "certificate": 1e-6,
                "rounds": rounds,
            }
        )
        scores += [
            {
                "model": name,
                "client": c,
                "train_rows": 90,
                "test_rows": 40,
                "weight": 1 / clients,
                "train_loss": 0.3,
                "test_loss": 0.4,
                "train_accuracy": a,
                "test_accuracy": a,
            }
            for c, a in zip(names, accuracy, strict=True)
        ]
        for i in range(rounds):
            row = dict.fromkeys(COSTS, i) | {
                "model": name,
                "certificate": 10.0**-i,
                "measures": (0.8, 0.6, 0.4),
            }
            lines.append(
                row
                | {
                    "losses": random.random(clients) + 0.1,
                    "weights": random.dirichlet(np.ones(clients)),
                }
            )
    about = {
        "format": 1,
        "kind": "train",
        "title": "many",
        "measure": "accuracy",
        "split": "test",
        "models": models,
    }
    (folder / "summary.json").write_text(json.dumps(about), encoding="utf-8")
    write(folder / "rounds.csv", lines, "test_accuracy", names)
    table(folder / "clients.csv", scores)
    shares = [
        {"client": c, "label": k, "train_rows": int(random.integers(30)), "test_rows": 4}
        for c in names
        for k in range(10)
    ]
    table(folder / "partition.csv", shares)
    return folder
