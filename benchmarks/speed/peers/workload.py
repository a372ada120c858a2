"""The problem that every peer solves, and how each of them is timed. Needs NumPy and scikit-learn
only.

Softmax regression with an intercept on scikit-learn's digits (pixels in [0, 1]): N = 20 clients
with 72 rows each, cut from the rows sorted by label, so that a client knows one digit or two; 357
rows are held out. A round of FedAvg is J = 50 local steps of every client, on minibatches of 32
rows drawn with replacement, at rate 0.1 and with l2 = 1e-4 (on the intercept too, where a library's
weight decay knows no difference); the server takes the plain average. float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

CLIENTS = 20
ROWS = 72
FEATURES = 64
CLASSES = 10
STEPS = 50
BATCH = 32
RATE = 0.1
L2 = 1e-4
LEAST = 1.0  # seconds that a measurement has to fill

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
Model = tuple[Floats, Floats]  # weights (features × classes), intercept (classes)
Train = Callable[[int], Model]  # from a number of rounds to the model that they end in


@cache
def data() -> tuple[Floats, Labels, Floats, Labels]:
    """X (clients × rows × features) and y (clients × rows) to train on, and X, y held out."""
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    y = y.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(y))
    train = order[: CLIENTS * ROWS]
    held_out = order[CLIENTS * ROWS :]
    train = train[np.argsort(y[train], kind="stable")]
    return (
        X[train].reshape(CLIENTS, ROWS, FEATURES),
        y[train].reshape(CLIENTS, ROWS),
        X[held_out],
        y[held_out],
    )


def accuracy(model: Model, X: Floats, y: Labels) -> float:
    """The share of rows whose label the model finds."""
    weights, intercept = (np.asarray(part, dtype=np.float32) for part in model)
    found = X.reshape(-1, FEATURES) @ weights + intercept
    return float((found.argmax(1) == y.ravel()).mean())


def measure(name: str, version: str, ways: Mapping[str, Train]) -> None:
    """Time the fastest of several ways to do the same (by name; one will do), and print a line of
    JSON about it.
    """
    rounds = arguments().rounds
    startup = since_start()
    best = fastest(ways) if len(ways) > 1 else next(iter(ways))
    took, model = seconds(ways[best], rounds)
    report(name, version, rounds, took, model, startup, best)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--images", help="the problem of `images.py` in the place of this one: its file"
    )
    parser.add_argument("--into", help="where to write the network")
    return parser.parse_args()


def seconds(train: Train, rounds: int) -> tuple[float, Model]:
    """Seconds of `train(rounds)` after a warm-up (the median, repeated until LEAST is full), and
    the model.
    """
    train(2)
    times: list[float] = []
    while sum(times) < LEAST:
        begun = time.perf_counter()
        model = train(rounds)
        times.append(time.perf_counter() - begun)
    return statistics.median(times), model


def fastest(ways: Mapping[str, Train]) -> str:
    """The name of the fastest of several ways to do the same, by two rounds of each after a
    warm-up.
    """

    def probe(train: Train) -> float:
        train(1)
        begun = time.perf_counter()
        train(2)
        return time.perf_counter() - begun

    return min(ways, key=lambda name: probe(ways[name]))


def report(
    name: str,
    version: str,
    rounds: int,
    took: float,
    model: Model,
    startup: float,
    setting: str = "",
) -> None:
    """One line of JSON about a finished measurement."""
    X, y, X_held_out, y_held_out = data()
    line = {
        "name": name,
        "version": version,
        "rounds": rounds,
        "steps_per_second": rounds * CLIENTS * STEPS / took,
        "accuracy": accuracy(model, X_held_out, y_held_out),
        "train_accuracy": accuracy(model, X, y),
        "startup_seconds": startup,
        "setting": setting,
    }
    print(json.dumps(line), flush=True)


def since_start() -> float:
    """Seconds since this process began (on Linux)."""
    began = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
