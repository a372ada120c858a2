"""FLARE's simulator: the same client and server objects, without TLS and without provisioning.

It runs in a process of its own: FLARE's simulator changes the directory, the logging and the environment of the one
that it is called in.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from scaffpd.deploy.flare import client, server
from scaffpd.deploy.processes import Processes
from scaffpd.errors import InputError

NAME = "simulated"


def simulate(federation: Path, silos: Mapping[str, Path], work: Path, patience: float = 600.0) -> None:
    """Run a federation in FLARE's simulator; the coordinator leaves its results where federation.toml says.

    Args:
        federation: federation.toml.
        silos: silo.toml of every silo, by name.
        work: an empty folder for everything that FLARE writes.
        patience: seconds for all of it.
    """
    files = work / "silos"
    files.mkdir(parents=True, exist_ok=True)
    for name, file in silos.items():
        (files / f"{name}.toml").symlink_to(file.resolve())
    log = work / "simulator.log"
    extra = {client.VARIABLE: str(files.resolve()), server.VARIABLE: str(federation.resolve()), "OMP_NUM_THREADS": "1"}
    processes = Processes()
    command = ["scaffpd.deploy.flare.simulate", str(work.resolve()), *sorted(silos)]
    processes.start("simulator", command, log, os.environ | extra, work)
    try:
        deadline = time.monotonic() + patience
        while processes.alive("simulator"):
            if time.monotonic() > deadline:
                raise InputError(f"FLARE's simulator did not finish within {patience:g} seconds: {log} says more.")
            time.sleep(0.1)
        failed = processes.code("simulator")
    finally:
        processes.kill()
    if failed:
        raise InputError(f"FLARE's simulator failed: {log} says why.")


def main(work: Path, names: list[str]) -> None:
    """What the simulator's own process does."""
    from nvflare.recipe import SimEnv

    from scaffpd.deploy.flare.provision import recipe

    place = SimEnv(clients=names, num_threads=len(names), workspace_root=str(work / "simulator"))
    recipe(NAME, len(names)).execute(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
