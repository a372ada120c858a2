"""A federation on this machine: what `deploy provision`, `silo start` and `deploy run` do.

Only the server's address is another: localhost, and a port that is free. The heart-disease
hospitals are files to try it with.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scaffpd.data.hospitals import CATEGORIES, COLUMNS, HOSPITALS, read
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.deployed_run import Outcome
from scaffpd.deploy.flare.admin import Watch, run
from scaffpd.deploy.flare.serving import check_installed
from scaffpd.deploy.processes import Processes, free_port
from scaffpd.deploy.records import GRANTED
from scaffpd.deploy.silo import Silo
from scaffpd.errors import InputError
from scaffpd.secure.aggregation import colluding_of
from scaffpd.settings.federation import FederationFile

HOST = "localhost"
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


def silo_files(file: FederationFile) -> dict[str, Path]:
    """Return NAME/silo.toml of every silo, in folders beside federation.toml."""
    places = {name: file.path.parent / name / "silo.toml" for name in file.silos}
    for name, place in places.items():
        if not place.is_file():
            raise InputError(
                "silo-file-missing",
                f"{file.path.name!r} names the silo {name!r}, but there is no {str(place)!r}.",
            )
    return places


def agree_for_all(file: FederationFile, places: Mapping[str, Path]) -> None:
    """Agree to the run for all silos: whoever starts them here is the operator of each."""
    opened = {name: Silo.open(path) for name, path in places.items()}
    cards = {name: silo.identity.card for name, silo in opened.items()}
    digest = Agreement.made(file, cards).digest.hex()
    for silo in opened.values():
        if digest not in silo.records.known().granted:
            silo.records.note(GRANTED, digest, by="deploy local")


def provision(file: FederationFile, address: tuple[str, int], renew: bool = False) -> None:
    check_installed()
    colluding_of(len(file.silos), file.colluding)  # before anybody gets a kit that is of no use
    from scaffpd.deploy.flare.provision import FlareProject, write_parts

    write_parts(FlareProject(file.name, list(file.silos), *address), file.path.parent, renew)


@contextmanager
def running_silos(places: Mapping[str, Path]) -> Iterator[None]:
    """Run `scaffpd silo start` for every silo as long as the block lasts."""
    silos = {place: Processes() for place in places.values()}
    try:
        for place, silo in silos.items():
            command = ["scaffpd", "silo", "start", str(place)]
            silo.start(command, place.with_name("silo.log"), os.environ, place.parent)
        yield
    finally:
        for silo in silos.values():
            silo.end()


def run_here(
    file: FederationFile, watch: Watch, say: Callable[[str], object], seconds: float
) -> Outcome:
    places = silo_files(file)
    agree_for_all(file, places)
    provision(file, (HOST, free_port()), renew=True)
    say(f"Starting FLARE's server and {len(places)} silos.")
    with running_silos(places):
        return run(file, watch, say, seconds)


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
