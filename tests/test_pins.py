"""A dozen outcomes, number by number, as they were before the pipeline was rewritten: pins.json.

Each goes through a front door alone: the command line, an estimator, or silos around a board.
`python tests/test_pins.py` writes the file anew; `SCAFFPD_PINS=1e-9` compares more strictly than
two processors agree. Those of silos were written anew twice: they deal rows by stored marks and
recode what few rows have, so they train on other rows; and they keep a floor under every weight.
"""

import csv
import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from scaffpd.cli import run as cli

PINS = Path(__file__).with_name("pins.json")
TOLERANCE = float(os.environ.get("SCAFFPD_PINS", "1e-6"))
# what depends on the clock or the machine, or on how often somebody was asked
PASSING = {
    *("made", "seconds", "environment", "config", "command", "version", "history", "exchanges"),
    *("bytes_up", "bytes_down", "rounds", "certificate", "certificates", "message", "title"),
    *("settings", "format", "bins", "curves"),
}
TABLE = "--client site --columns age,dose,sex,kind --tol 1e-10 --splits 2 --no-report --quiet"
COMMANDS = {
    "hospitals": "train hospitals --tol 1e-10 --splits 2 --no-report --quiet",
    "worst": "train hospitals --objective CVaR --tol 1e-9 --splits 1 --no-report --quiet",
    "classes": f"train table.csv --target ill {TABLE}",
    "lines": f"train table.csv --target ill --curves off {TABLE} --l2 0.1 --kappa 3",
    "numbers": f"train table.csv --target cost {TABLE}",
    "several": f"train table.csv --target grade --curves off {TABLE}",
    "weights": f"train table.csv --target cost --weight weight {TABLE} --columns age,dose",
    "counts": f"train table.csv --target visits --task counts --offset log --curves off {TABLE}",
    "survival": f"train table.csv --time days --event died --curves off {TABLE}",
    "periods": f"train table.csv --time days --event died --periods 20,50,90 {TABLE}",
    "path": "path hospitals --points 3 --no-report --quiet --tol 1e-10",
}
GRADES = ("mild", "fair", "poor")
CLIENTS = ("north", "south", "east", "west", "isle")


def table(path, n=300):
    """Rows of five sites with all kinds of columns and targets, and values that are missing."""
    draw = np.random.default_rng(11)
    site = draw.integers(len(CLIENTS), size=n)
    age = np.round(draw.normal(55 + 2 * site, 9), 1)
    dose = np.round(draw.gamma(2.0, 3.0, n), 2)
    sex = np.array(["f", "m"])[draw.integers(2, size=n)]
    kind = np.array(["a", "b", "c", "d"])[np.minimum(draw.poisson(0.8, n), 3)]
    z = 0.07 * (age - 58) * np.where(site == 4, -1, 1) + (sex == "m") - 0.8 * (kind == "b")
    z = z + 0.3 * np.sin(dose)
    days = np.ceil(draw.exponential(60 * np.exp(-0.5 * z)))
    years = np.round(draw.uniform(0.5, 3.0, n), 2)
    found = {
        "site": np.array(CLIENTS)[site],
        "age": np.where(draw.random(n) < 0.05, "", age.astype(str)),
        "dose": dose,
        "sex": sex,
        "kind": np.where(draw.random(n) < 0.05, "", kind),
        "ill": (z + draw.logistic(size=n) > 0).astype(int),
        "cost": np.round(1000 + 200 * z + draw.normal(0, 90, n), 1),
        "grade": np.array(GRADES)[np.digitize(z + draw.normal(size=n), [-0.7, 1])],
        "visits": draw.poisson(years * np.log1p(np.exp(0.5 * z))),
        "log": np.round(np.log(years), 6),
        "days": days,
        "died": np.where(draw.random(n) < 0.7, "yes", "no"),
        "weight": np.round(draw.uniform(0.5, 2.0, n), 2),
    }
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(found)
        writer.writerows(zip(*(column.tolist() for column in found.values()), strict=True))
    return path


def flat(found, name=""):
    """Yield (name, number) of all numbers of nested JSON values."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in PASSING:
                yield from flat(value, f"{name}.{key}")
    elif isinstance(found, list):
        for k, value in enumerate(found):
            yield from flat(value, f"{name}[{k}]")
    elif isinstance(found, float | int):
        yield name, float(f"{found:.11g}")


def of_command(name, folder):
    """What a command line finds: its record, and the parameters of its models."""
    from safetensors.numpy import load_file

    line = COMMANDS[name].replace("table.csv", str(table(folder / "table.csv")))
    assert cli([*line.split(), "--out", str(folder / "run")]) == 0
    record = json.loads((folder / "run" / "run.json").read_text())
    models = {
        f"{file.stem} {key}": array.ravel().tolist()
        for file in sorted((folder / "run").glob("*.safetensors"))
        for key, array in load_file(file).items()
        if array.dtype.kind == "f"
    }
    return {"record": record, "models": models}


def of_estimators(folder):
    import scaffpd as sp

    with table(folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    column = lambda name: np.array([float(row[name] or "nan") for row in rows])
    X = np.nan_to_num(np.column_stack([column("age"), column("dose"), column("weight")]), nan=55.0)
    sites = np.array([row["site"] for row in rows])
    ill = column("ill").astype(int)
    ends = np.column_stack([column("days"), [row["died"] == "yes" for row in rows]])
    made = {
        "fair": (sp.FairFederatedClassifier(tol=1e-10), ill),
        "personal": (sp.FairFederatedClassifier(tol=1e-10, personal=True, curves=True), ill),
        "numbers": (sp.FairFederatedRegressor(tol=1e-10, personal=True), column("cost")),
        "private": (sp.FairFederatedClassifier(epsilon=8.0, noise_seed=1, max_rounds=3), ill),
        "survival": (sp.FairFederatedSurvival(tol=1e-10), ends),
    }
    found = {}
    for name, (estimator, y) in made.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator.fit(X, y, clients=sites)
        found[name] = {
            "x": np.ravel(estimator.coef_).tolist(),
            "intercept": np.ravel(estimator.intercept_).tolist(),
            "losses": list(estimator.client_losses_.values()),
            "own": [np.ravel(own).tolist() for own in estimator.client_coef_.values()],
        }
    return found


SILOS = {
    "default": {},
    "personal": {"l2 = 0.03\n": 'kappa = "auto"\n'},
    "curves": {"labels = [0, 1]\n": 'labels = [0, 1]\ncurves = "on"\npairs = 2\n'},
    "paper": {"rho = 0.1\n": 'rho = 0.1\n[algorithm]\nkind = "ScaffPD"\n'},
}


def of_silos(name, folder):
    """What four silos around a board find."""
    from safetensors.numpy import load_file

    from cases.silos import federation, run

    path, places = federation(folder, replacing=SILOS[name])
    run(path, places)
    record = json.loads((path.parent / "run" / "run.json").read_text())
    arrays = load_file(path.parent / "run" / "model.safetensors")
    models = {key: own.ravel().tolist() for key, own in arrays.items() if own.dtype.kind == "f"}
    return {"record": record, "models": models}


OUTCOMES = (*COMMANDS, "estimators", *(f"silos {name}" for name in SILOS))


def outcome(name, folder):
    if name in COMMANDS:
        found = of_command(name, folder)
    elif name == "estimators":
        found = of_estimators(folder)
    else:
        found = of_silos(name.split()[1], folder)
    return dict(flat(found))


def names_of(found):
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OUTCOMES)
def test_outcomes_are_what_they_were(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, *wanted = json.loads(PINS.read_text())[name]
    found = outcome(name, tmp_path)
    differ = {
        key: (now, before)
        for (key, now), before in zip(found.items(), wanted, strict=False)
        if not np.isclose(now, before, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    }
    assert differ == {}
    assert names_of(found) == names


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, str(Path(__file__).parent))
    made = {}
    for one in OUTCOMES:
        with tempfile.TemporaryDirectory() as place:
            found = outcome(one, Path(place))
            made[one] = [names_of(found), *found.values()]
    PINS.write_text(json.dumps(made, separators=(",", ":")).replace("],", "],\n") + "\n")
