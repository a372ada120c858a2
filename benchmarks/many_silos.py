"""Many silos as processes, by the documented commands: seconds a round, and memory.

    python benchmarks/many_silos.py [--silos 30]

Every silo has 100 to 300 made-up rows of eight columns. `deploy provision`, a `silo start` for
each, `deploy run`, and the line that each silo prints when the run asks it; then the run goes to a
certified gap of 1e-6. Memory is the largest seen of each kind of process: the resident set, in
which shared libraries count for every process, and the proportional one, in which they count once.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil

from faults import SCAFFPD, Parts
from scaffpd.report.record import RunRecord

COLUMNS = 8
SILO = """\
name = "{name}"
[data]
file = "rows.csv"
target = "y"
"""
FEDERATION = """\
name = "many"
silos = {names}
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
tol = 1e-6
"""
ASKED = "A run asks this silo: scaffpd "
PATIENCE = 540.0


def made_up(folder: Path, silos: int) -> tuple[Path, dict[str, Path]]:
    """Write silos whose labels follow coefficients that differ a little."""
    random = np.random.default_rng(0)
    shared = random.standard_normal(COLUMNS)
    names = [f"x{k}" for k in range(COLUMNS)]
    places = {}
    for k in range(silos):
        home = folder / f"silo-{k + 1}"
        home.mkdir(parents=True)
        X = random.standard_normal((random.integers(100, 301), COLUMNS))
        z = X @ (shared + 0.3 * random.standard_normal(COLUMNS))
        y = random.random(len(z)) < 1 / (1 + np.exp(-z))
        with (home / "rows.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*names, "y"])
            writer.writerows([*row, int(label)] for row, label in zip(X.tolist(), y, strict=True))
        places[home.name] = home / "silo.toml"
        places[home.name].write_text(SILO.format(name=home.name), encoding="utf-8")
    path = folder / "federation.toml"
    columns = "\n".join(f'{name} = "number"' for name in names)
    path.write_text(FEDERATION.format(names=list(places), columns=columns), encoding="utf-8")
    return path, places


class Memory:
    """The largest memory of every kind of process, in MB."""

    def __init__(self, home: Path) -> None:
        self.home = str(home)
        self.largest: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def look(self) -> None:
        """Measure all processes of the federation."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if not self._ours(process, words):
                    continue
                used = process.memory_full_info()
                own = self.largest[_kind(words)]
                own[:] = max(own[0], used.rss / 1e6), max(own[1], used.pss / 1e6)

    def _ours(self, process: psutil.Process, words: list[str]) -> bool:
        return any(self.home in word for word in words) or process.cwd().startswith(self.home)


def _kind(words: list[str]) -> str:
    text = " ".join(words)
    kinds = {
        "runner_process": "the server's job",
        "worker_process": "a silo's job",
        "server_train": "FLARE's server",
        "client_train": "FLARE's site",
        "silo start": "silo start",
        "deploy run": "deploy run",
        "flare.admin": "FLARE's administrator",
        "silo agree": "silo agree",
    }
    return next((kind for word, kind in kinds.items() if word in text), "others")


def main() -> None:
    """Provision, start, agree, run, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--silos", type=int, default=30)
    given = parser.parse_args()
    begun = time.monotonic()

    def note(words: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {words}", flush=True)

    with tempfile.TemporaryDirectory(prefix="scaffpd-many-") as folder:
        home = Path(folder) / "federation"
        parts = Parts(home, write=lambda place: made_up(place, given.silos))
        note(f"{given.silos} silos are provisioned")
        try:
            run(parts, note)
        finally:
            parts.stop()


def run(parts: Parts, note: Callable[[str], None]) -> None:
    """Start everything, agree, and wait for the model."""
    memory = Memory(parts.home)
    parts.write(120.0, agreed=False)
    for name in parts.places:
        parts.start(name)
    coordinator = parts.start("run", seconds=PATIENCE)
    waiting = set(parts.places)
    deadline = time.monotonic() + PATIENCE
    look = 0.0
    agreeing: list[Future[object]] = []
    with ThreadPoolExecutor(8) as operators:
        while coordinator.poll() is None and time.monotonic() < deadline:
            for name in sorted(waiting):
                text = (parts.home / f"{name}.out").read_text("utf-8", "replace")
                if ASKED in text:
                    words = text.split(ASKED)[1].splitlines()[0].split()
                    waiting.discard(name)
                    agreed = operators.submit(subprocess.run, [*SCAFFPD, *words], check=True)
                    agreeing.append(agreed)
                    if not waiting:
                        note("all silos have been asked, and their operators agree")
            if time.monotonic() > look:  # it takes a while itself
                memory.look()
                look = time.monotonic() + 10.0
            time.sleep(0.5)
    for agreed in agreeing:
        agreed.result()
    if coordinator.poll() != 0:
        raise SystemExit(f"The run has not ended: {parts.said('run')}")
    note(parts.said("run"))
    record = RunRecord.read(parts.file.folder).main
    marks = [row.seconds for row in record.history]
    between = statistics.median(b - a for a, b in pairwise(marks))
    print(
        f"{len(parts.places)} silos: {record.rounds:g} rounds, {record.exchanges:g} exchanges, "
        f"certified gap {record.certificate:.1e}; {between:.2f} s a round (median)"
    )
    models = parts.models()
    same = all(np.array_equal(x, models[""]) for x in models.values())
    print(f"all {len(models) - 1} silos have the coordinator's model, bit for bit: {same}")
    for kind, (rss, pss) in sorted(memory.largest.items()):
        print(f"{kind:>22}: {rss:5.0f} MB resident, {pss:5.0f} MB proportional")


if __name__ == "__main__":
    main()
