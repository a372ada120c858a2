"""FedAvg of a network on images: what a candidate reads, how its rounds are timed, what it hands
back. NumPy only.

`../network_simulators.py` writes the problem into a file: the clients' images, who takes part in
which round, the rows of every minibatch, and the parameters to start from, under PyTorch's names
and in its layout. A candidate makes all rounds, says when each is over, and leaves its last model
in another file, which is judged by the same code for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import workload as w
from numpy.typing import NDArray

Parameters = dict[str, NDArray[np.float32]]
Tick = Callable[[], None]  # to be called before the first round, and after every round
Train = Callable[["Images", Tick], Parameters]


@dataclass(frozen=True)
class Images:
    """The problem.

    Attributes:
        network: "cnn" or "resnet", see `experiments/images/small_networks.py`.
        X: images (clients, rows, channels, height, width).
        y: labels (clients, rows).
        clients: who takes part (rounds, taking part), in increasing order.
        rows: of every minibatch (rounds, taking part, steps, batch).
        start: the parameters to start from.
        rate: η_ℓ.
    """

    network: str
    X: w.Floats
    y: w.Labels
    clients: w.Labels
    rows: w.Labels
    start: Parameters
    rate: float

    def minibatches(self, r: int, i: int) -> w.Labels:
        """The rows that client i uses in round r = 0, 1, …, (steps, batch)."""
        return self.rows[r, int(np.searchsorted(self.clients[r], i))]

    def save(self, file: Path) -> None:
        """Write all of it."""
        start = {f"start/{name}": value for name, value in self.start.items()}
        fields = {name: value for name, value in vars(self).items() if name != "start"}
        np.savez(file, **fields, **start)


@cache
def load(file: str) -> Images:
    """What `Images.save` has written; once in a process."""
    with np.load(file) as stored:
        found = {name: stored[name] for name in stored.files}
    start = {
        name.removeprefix("start/"): found.pop(name)
        for name in list(found)
        if name.startswith("start/")
    }
    return Images(
        **found | {"network": str(found["network"]), "rate": float(found["rate"]), "start": start}
    )


def measure(name: str, version: str, ways: Mapping[str, Train]) -> None:
    """Time the fastest of several ways (by name; one will do), write its model, and print a line of
    JSON.
    """
    given = w.arguments()
    problem = load(given.images)
    best = (
        min(ways, key=lambda way: probed(ways[way], problem)) if len(ways) > 1 else next(iter(ways))
    )
    startup, seconds, model = timed(ways[best], problem)
    np.savez(given.into, **model)
    line = {
        "name": name,
        "version": version,
        "setting": best,
        "startup_seconds": startup,
        "seconds": seconds,
    }
    print(json.dumps(line), flush=True)


def timed(train: Train, problem: Images) -> tuple[float, list[float], Parameters]:
    """Seconds of this process before the first round, seconds of every round, and the model."""
    stamps = list[tuple[float, float]]()
    model = train(problem, lambda: stamps.append((time.perf_counter(), w.since_start())))
    return stamps[0][1], np.diff([stamp for stamp, _ in stamps]).tolist(), model


def probed(train: Train, problem: Images, steps: int = 2) -> float:
    """Seconds of a round of few clients and steps, after one that warms up."""
    few = replace(
        problem, clients=problem.clients[[0, 0], :4], rows=problem.rows[[0, 0], :4, :steps]
    )
    return timed(train, few)[1][1]
