"""FLARE's simulator: the same client and server objects, without TLS and without provisioning.

It runs in a process of its own: FLARE's simulator changes the directory, the logging and the environment of the one
that it is called in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scaffpd.deploy.flare import client, server


def simulate(federation, silos, work, patience=600.0):
    """Run a federation in FLARE's simulator; the coordinator leaves its results where federation.toml says."""
    files = work / "silos"
    files.mkdir(parents=True, exist_ok=True)
    for name, file in silos.items():
        (files / f"{name}.toml").symlink_to(file.resolve())
    extra = {
        client.VARIABLE: str(files.resolve()),
        server.VARIABLE: str(federation.resolve()),
        "OMP_NUM_THREADS": "1",
    }
    log = work / "simulator.log"
    with log.open("wb") as stream:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            str(work.resolve()),
            *sorted(silos),
        ]
        done = subprocess.run(
            command,
            cwd=work,
            env=os.environ | extra,
            stdout=stream,
            stderr=stream,
            timeout=patience,
            check=False,
        )
    assert done.returncode == 0, log.read_text()


def main(work, names):
    """What the simulator's own process does."""
    from nvflare.recipe import SimEnv

    from scaffpd.deploy.flare.provision import recipe

    place = SimEnv(clients=names, num_threads=len(names), workspace_root=str(work / "simulator"))
    recipe("simulated", len(names)).execute(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
