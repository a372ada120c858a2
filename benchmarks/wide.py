"""Seconds and memory of a round where features are many and stored once: squared loss on rows of a table.

    python benchmarks/wide.py --device cuda --samples 40000 --features 50000 --outputs 100 --clients 20

prints the time of a pass over the data (A x and Aᵀv), of one client's decomposition and of rounds of FedAvg, SCAFFOLD,
DRFA and Scaff-PD, as multiples of a pass, and the peak memory as a multiple of the data.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

import scaffpd as sp
from scaffpd.data import Table

ROUNDS = 20


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work, device: str, repeats: int = 5) -> float:
    """Median seconds, after one call to warm up."""
    work()
    seconds = []
    for _ in range(repeats):
        start = clock(device)
        work()
        seconds.append(clock(device) - start)
    return median(seconds)


def clients(samples: int, number: int, seed: int) -> list[np.ndarray]:
    """Unequal clients, as after a Dirichlet partition with a small α."""
    random = np.random.default_rng(seed)
    share = random.gamma(2.0, size=number)
    sizes = np.maximum(1, (samples * share / share.sum()).astype(int))
    return np.split(random.permutation(sizes.sum()), np.cumsum(sizes)[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--features", type=int, default=2000)
    parser.add_argument("--outputs", type=int, default=10)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--stored", choices=["float16", "float32"], default="float16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(json.dumps(vars(options) | {"json": None}, default=str))
    found = measure(options)
    for name, value in found.items():
        print(f"{name:42s} {value:12.5g}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def numbers(samples: int, features: int, stored: str) -> np.ndarray:
    """Random features, without drawing every one of them."""
    base = (
        np.random.default_rng(0)
        .standard_normal((min(samples, 1000), features), dtype=np.float32)
        .astype(stored)
    )
    values = np.empty((samples, features), stored)
    for k in range(0, samples, len(base)):
        piece = values[k : k + len(base)]
        piece[:] = np.roll(base, k // len(base), axis=1)[: len(piece)]
    return values


def measure(options: argparse.Namespace) -> dict[str, float]:
    random = np.random.default_rng(1)
    values = numbers(options.samples, options.features, options.stored)
    table = Table(values, options.features**-0.5, "random")
    y = random.integers(0, options.outputs, options.samples)
    parts = clients(options.samples, options.clients, 0)
    device = options.device
    parts = [np.sort(p[p < options.samples]) for p in parts]
    found: dict[str, float] = {}
    start = clock(device)
    cohort = sp.Cohort(
        [(table.rows(p), y[p]) for p in parts],
        sp.Linear("squared", l2=1e-6, classes=options.outputs),
        device=device,
        dtype=torch.float32,
    )
    oracle = cohort._oracle
    A = oracle.rows.A
    found["seconds to load"] = clock(device) - start
    start = clock(device)
    _ = oracle.spectrum
    found["seconds of all decompositions"] = clock(device) - start
    found["largest client"] = max(map(len, parts))
    X = torch.randn(options.features, options.outputs, device=device)
    V = torch.randn(len(A), options.outputs, device=device)
    forward = timed(lambda: A @ X, device)
    backward = timed(lambda: A.T @ V, device)
    size = A.parts[0].numel() * A.parts[0].element_size()
    found |= {"seconds of A x": forward, "seconds of Aᵀv": backward, "GB of data": size / 1e9}
    found["GB/s of A x"] = size / forward / 1e9
    found["GB/s of Aᵀv"] = size / backward / 1e9
    work = 2 * 2 * A.parts[0].numel() * options.outputs
    found["TFLOP/s of A x (two halves)"] = work / forward / 1e12
    exact = A.parts[0][:200].double() @ X.double() * A.scale
    found["relative error of A x"] = float(((A @ X)[:200] - exact).norm() / exact.norm())
    passes = (forward + backward) / 2
    for name, method in {
        "FedAvg": sp.FedAvg(local_steps=10),
        "SCAFFOLD": sp.Scaffold(local_steps=10),
        "DRFA": sp.DRFA(local_steps=10),
        "q-FFL": sp.QFFL(local_steps=10),
        "Scaff-PD": sp.ScaffPD(sp.ChiSquare(0.1), local_steps=10),
    }.items():
        sp.train(method, cohort, rounds=2, progress=False)
        start = clock(device)
        result = sp.train(method, cohort, rounds=ROUNDS, progress=False)
        seconds = np.diff(result.history["seconds"])
        found[f"seconds a round, {name}"] = float(np.median(seconds))
        found[f"passes a round, {name}"] = float(np.median(seconds)) / passes
        found[f"seconds of {ROUNDS} rounds, {name}"] = clock(device) - start
    if device == "cuda":
        found["peak memory / data"] = torch.cuda.max_memory_allocated() / size
    return found


if __name__ == "__main__":
    main()
