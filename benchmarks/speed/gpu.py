"""(f) A GPU: how near to what the device can do a round of training and the extraction of features
come.

Limits are measured, not read from a data sheet: bytes per second of a large copy (read and
written), floating-point operations per second of large square products. A round of Scaff-PD with
squared loss on stored features reads all of them four times (A x, Aᵀr, A c, AᵀB), and what that
takes at the speed of the copy is its limit.

    PYTHONPATH=src python benchmarks/speed/gpu.py --out gpu.json [--quick] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Row, interleaved, table

import scaffpd as sp
from scaffpd.models.execution import GraphReplay

sys.path += [str(Path(__file__).resolve().parents[k]) for k in (1, 2)]
TITLE = "On a GPU: fractions of what the device can do"


def sync(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def median(call: Callable[[], object], device: str, turns: int = 7) -> float:
    """Median seconds of a call."""
    return interleaved({"it": call}, turns, sync=sync(device)).median("it")


def limits(device: str, quick: bool) -> dict[str, float]:
    """Bytes per second of a copy, and FLOP per second of products in several formats."""
    source = torch.empty(2**22 if quick else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy, B/s": 2 * len(source) / median(lambda: target.copy_(source), device)}
    n = 256 if quick else 8192
    for name, dtype, tf32 in (
        ("float16", torch.float16, False),
        ("tf32", torch.float32, True),
        ("float32", torch.float32, False),
        ("float64", torch.float64, False),
    ):
        A, B = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = tf32
        found[f"product in {name}, FLOP/s"] = 2 * n**3 / median(lambda A=A, B=B: A @ B, device, 5)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def digits(clients: int, device: str) -> sp.Cohort:
    """Softmax regression, 72 samples of 64 features a client."""
    random = np.random.default_rng(0)
    X = random.random((clients * 72, 64), dtype=np.float32)
    y = random.integers(0, 10, clients * 72)
    pairs = list(zip(np.split(X, clients), np.split(y, clients), strict=True))
    model = sp.Linear("softmax", l2=1e-4, intercept=True, classes=10)
    return sp.Cohort(pairs, model, device=device, dtype=torch.float32)


def simulators(device: str, quick: bool) -> list[Row]:
    """Local steps of clients per second, with and without recorded graphs, and host
    synchronisations in a round.
    """
    rows = []
    rounds = 3 if quick else 20
    for N in (20,) if quick else (20, 1000, 10_000):
        cohort = digits(N, device)
        method = sp.FedAvg(local_steps=50, batch_size=32, local_rate=0.1)
        call = partial(sp.train, method, cohort, rounds=rounds, progress=False)
        plain = GraphReplay.__call__
        recorded = median(call, device, 5)
        GraphReplay.__call__ = lambda self, *tensors: self.function(*tensors)  # type: ignore[method-assign]
        eager = median(call, device, 5)
        GraphReplay.__call__ = plain  # type: ignore[method-assign]
        steps = rounds * N * 50
        rows.append(
            {
                "what": f"FedAvg on digits-like data, N = {N:,}: local steps of clients per second",
                "value": steps / recorded,
                "limit": None,
                "fraction": None,
            }
        )
        rows.append(
            {
                "what": f"the same without graphs, N = {N:,}",
                "value": steps / eager,
                "limit": None,
                "fraction": None,
            }
        )
    return rows


def entk(device: str, quick: bool) -> list[Row]:
    """Features of single images against a plain forward and backward pass."""
    from experiments.images.speed import rates

    size, chunk, coordinates = (32, 2, 500) if quick else (224, 256, 50_000)
    found = rates("efficientnet-lite0", device, size, chunk, coordinates, "tf32")
    what = f"eNTK of EfficientNet-Lite0 ({size} px, {coordinates:,} coordinates): images per second"
    mine, theirs = found["sampled"], found["plain"]
    return [{"what": what, "value": mine, "limit": theirs, "fraction": mine / theirs}]


def reproduced(folder: Path) -> list[Row]:
    """(g) What the CIFAR-10 table took, from the folder of `python -m experiments.images cifar10`."""
    about = json.loads((folder / "about.json").read_text())
    seconds = about["seconds"]
    plan = about["plan"]
    runs = f"{plan['rounds']} rounds of eight methods, {plan['seeds']} partitions, {plan['tune']} configurations each"
    name = "CIFAR-10 table (experiments.images cifar10)"
    return [
        {
            "what": f"{name}, {runs}: seconds",
            "value": seconds["all"],
            "limit": None,
            "fraction": None,
        },
        {
            "what": f"{name}: seconds of them for images and features",
            "value": seconds["features"],
            "limit": None,
            "fraction": None,
        },
    ]


def measure(device: str, quick: bool) -> list[Row]:
    known = limits(device, quick)
    rows = [
        {"what": name, "value": value, "limit": None, "fraction": None}
        for name, value in known.items()
    ]
    for part in (
        partial(simulators, device, quick),
        partial(entk, device, quick),
    ):
        begun = time.perf_counter()
        rows += part()
        print(f"{time.perf_counter() - begun:.0f} s", *rows[-4:], sep="\n", flush=True)
    return rows


def sentences(rows: list[Row]) -> list[str]:
    by = {row["what"]: row for row in rows}
    images = next(row for what, row in by.items() if what.startswith("eNTK"))
    rate = 100 * images["fraction"]
    return [
        f"eNTK features come at {rate:.0f} % of the rate of a forward and backward pass (aim: 30 "
        "%).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--table", type=Path, help="the folder of `python -m experiments.images cifar10`"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = measure(given.device, given.quick) + (reproduced(given.table) if given.table else [])
    machine = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(table(rows), *sentences(rows), sep="\n")
    if given.out:
        about = {
            "title": TITLE,
            "command": "python benchmarks/speed/gpu.py --out benchmarks/speed/gpu.json",
            "machine": f"{machine}, torch {torch.__version__}",
        }
        given.out.write_text(
            json.dumps(about | {"rows": rows, "sentences": sentences(rows)}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
