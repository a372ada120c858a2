"""The heart-disease hospitals as silos: files to try a deployment with."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from scaffpd.data.hospitals import CATEGORIES, COLUMNS, HOSPITALS, read

SILO = """\
name = "{name}"

[data]
file = "patients.csv"
target = "disease"
test = 0.3
"""
FEDERATION = """\
name = "hospitals"
silos = [{silos}]
folder = "run"
labels = [0, 1]

[columns]
{columns}

[model]
kind = "logistic"
l2 = 0.03

[objective]
kind = "ChiSquare"
rho = 0.1

[training]
rounds = 500
tol = 1e-6
"""


def write_hospitals(folder: Path) -> tuple[Path, dict[str, Path]]:
    """Write a folder per hospital with table and silo.toml; return federation.toml and these."""
    places = {}
    for name in HOSPITALS:
        raw, labels = read(name)
        home = folder / name
        home.mkdir(parents=True)
        with (home / "patients.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*COLUMNS, "disease"])
            for row, label in zip(raw.tolist(), labels.tolist(), strict=True):
                writer.writerow([*("" if value != value else f"{value:g}" for value in row), label])
        places[name] = home / "silo.toml"
        places[name].write_text(SILO.format(name=name), encoding="utf-8")
    path = folder / "federation.toml"
    names = ", ".join(f'"{name}"' for name in places)
    kinds = {name: list(map(str, CATEGORIES.get(name, ()))) or "number" for name in COLUMNS}
    columns = "\n".join(f"{name} = {json.dumps(kind)}" for name, kind in kinds.items())
    path.write_text(FEDERATION.format(silos=names, columns=columns), encoding="utf-8")
    return path, places
