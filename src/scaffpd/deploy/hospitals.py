"""The four hospitals of the heart-disease data as silos: a folder each, with its table and its silo.toml.

The example of `scaffpd deploy local`, and what the tests deploy.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from scaffpd.data.heart_disease import COLUMNS, HOSPITALS, read
from scaffpd.data.silos import Client
from scaffpd.errors import InputError

SILO = """\
name = "{name}"

[data]
file = "patients.csv"
target = "disease"
categories = ["cp", "restecg", "slope", "thal"]

[split]
test = 0.3
"""
FEDERATION = """\
name = "hospitals"
silos = [{silos}]
folder = "run"

[model]
loss = "logistic"
l2 = 0.03
intercept = true

[objective]
kind = "ChiSquare"
rho = 0.1

[training]
rounds = 500
tol = 1e-6
"""
LEAST = 40  # patients of a silo


def write_hospitals(folder: Path, silos: int = 4) -> tuple[Path, dict[str, Path]]:
    """Write a federation.toml and the silos' folders; where they are.

    More than four silos are parts of hospitals: wards, say.
    """
    places = {}
    for name, (raw, labels) in _wards(silos).items():
        home = folder / name
        home.mkdir(parents=True)
        with (home / "patients.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*COLUMNS, "disease"])
            for row, label in zip(raw.tolist(), labels.tolist(), strict=True):
                writer.writerow([*("" if value != value else f"{value:g}" for value in row), label])
        (home / "silo.toml").write_text(SILO.format(name=name), encoding="utf-8")
        places[name] = home / "silo.toml"
    path = folder / "federation.toml"
    path.write_text(FEDERATION.format(silos=", ".join(f'"{name}"' for name in places)), encoding="utf-8")
    return path, places


def _wards(silos: int) -> dict[str, Client]:
    """Whole hospitals, or nearly equal parts of them."""
    hospitals = {name: read(name) for name in HOSPITALS}
    most = sum(len(labels) // LEAST for _, labels in hospitals.values())
    if not 2 <= silos <= most:
        raise InputError(f"There are patients for 2 to {most} silos, not for {silos}.")
    if silos <= len(hospitals):
        return dict(list(hospitals.items())[:silos])
    parts = dict.fromkeys(hospitals, 1)
    while sum(parts.values()) < silos:
        fullest = max(parts, key=lambda name: len(hospitals[name][1]) / parts[name])
        parts[fullest] += 1
    wards = {}
    for name, (raw, labels) in hospitals.items():
        order = np.random.default_rng(0).permutation(len(labels))
        for k, rows in enumerate(np.array_split(order, parts[name])):
            wards[name if parts[name] == 1 else f"{name}-{k + 1}"] = raw[rows], labels[rows]
    return wards
