"""(f) A GPU: how near to what the device can do a round of training and the extraction of features
come.

Limits are measured in the same run, not read from a data sheet: bytes per second of a large copy
(read and written), floating-point operations per second of large square products. A round of
Scaff-PD with squared loss reads the table four times (A x, Aᵀr, A c, AᵀR), and what that takes at
the speed of the copy is its limit. Other losses take J local steps with the inner products of the
clients' samples besides, m² numbers a client and step, which their limit reads at that speed too.

    PYTHONPATH=src python benchmarks/speed/gpu.py --out gpu.json [--quick] [--device cpu] [--only rounds]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Row, interleaved, table

import scaffpd as sp
from scaffpd.models.execution import GraphReplay

sys.path += [str(Path(__file__).resolve().parents[k]) for k in (1, 2)]
TITLE = "On a GPU: fractions of what the device can do"
PASSES = 4  # of a round of Scaff-PD over the table
STEPS = 100  # J


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


@dataclass(frozen=True)
class Table:
    """A federation of equal clients."""

    clients: int
    features: int
    loss: str = "squared"
    dtype: torch.dtype = torch.float32
    rows: int = 500

    def __str__(self) -> str:
        size = f"{self.clients} clients × {self.rows} rows × {self.features:,} columns"
        return f"{self.loss}, {size}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def bytes(self) -> int:
        return self.clients * self.rows * self.features * self.dtype.itemsize

    def least(self) -> int:
        """Bytes that a round reads."""
        steps = 0 if self.loss == "squared" else STEPS - 1
        return PASSES * self.bytes + steps * self.clients * self.rows**2 * 4

    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        def one(client: int) -> tuple[np.ndarray, np.ndarray]:
            random = np.random.default_rng(client)
            X = random.random((self.rows, self.features), dtype=np.float32)
            X -= np.float32(0.5)
            X *= np.float32((12 / self.features) ** 0.5)
            z = X[:, :50].sum(1, dtype=np.float64)
            if self.loss == "softmax":
                return X, random.integers(0, 10, self.rows)
            if self.loss == "poisson":
                return X, random.poisson(np.exp(z))
            return X, z > 0 if self.loss == "logistic" else z + random.standard_normal(self.rows)

        with ThreadPoolExecutor() as pool:
            return list(pool.map(one, range(self.clients)))

    def model(self) -> sp.Linear:
        return sp.Linear(self.loss, l2=1e-3, classes=10 if self.loss == "softmax" else None)


TABLES = [
    *(Table(100, 50_000, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(Table(10, 20_000, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(Table(10, 20_000, loss) for loss in ("softmax", "logistic", "poisson")),
    Table(100, 50_000, "logistic"),
]


def seconds(call: Callable[[], object], device: str) -> float:
    sync(device)()
    begun = time.perf_counter()
    call()
    sync(device)()
    return time.perf_counter() - begun


def rounds(device: str, quick: bool, copy: float) -> list[Row]:
    """Whole rounds of Scaff-PD, and what binding takes."""
    rows = []
    small = Table(2, 8, rows=4)
    sp.Cohort(small.pairs(), small.model(), device=device)  # what is loaded once
    for one in TABLES:
        which = replace(one, clients=3, features=64, rows=20) if quick else one
        pairs = which.pairs()
        held: list[sp.Cohort] = []

        def bind(which: Table = which, pairs: list = pairs, held: list = held) -> None:
            held.append(sp.Cohort(pairs, which.model(), device=device, dtype=which.dtype))

        bound = seconds(bind, device)
        cohort = held[0]
        method = sp.ScaffPD(sp.ChiSquare(0.1), local_steps=STEPS)
        state = []

        def begin(
            method: sp.ScaffPD = method, cohort: sp.Cohort = cohort, state: list = state
        ) -> None:
            state.append(method.round(cohort, method.init(cohort)))

        def go(
            method: sp.ScaffPD = method, cohort: sp.Cohort = cohort, state: list = state
        ) -> None:
            state[0] = method.round(cohort, state[0])

        once = seconds(begin, device)
        for _ in range(4):
            go()
        took = statistics.median(seconds(go, device) for _ in range(3 if quick else 15))
        least = which.least() / copy
        rows += [
            {
                "what": f"round of Scaff-PD (J = {STEPS}), {which}: seconds",
                "value": took,
                "limit": least,
                "fraction": least / took,
            },
            {
                "what": f"binding, {which}: seconds; with all that is computed once, {bound + once:.2f}",
                "value": bound,
                "limit": None,
                "fraction": None,
            },
        ]
        print(*rows[-2:], sep="\n", flush=True)
        del cohort, held, state, pairs
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def certified(device: str, quick: bool) -> list[Row]:
    """`fair` to a certificate of 1e-8, here and on the CPU."""
    rows = []
    sizes = ((3, 30, 5),) if quick else ((100, 1000, 100), (20, 5000, 500), (20, 20_000, 1000))
    for N, m, d in sizes:
        pairs = Table(N, d, "logistic", torch.float64, m).pairs()

        def fit(where: str, pairs: list = pairs) -> None:
            cohort = sp.Cohort(pairs, sp.Linear("logistic", l2=1e-3), device=where)
            found = sp.train(sp.fair(sp.ChiSquare(0.1)), cohort, tol=1e-8, progress=False)
            assert found.status == "converged"

        fit(device)
        took = statistics.median(seconds(partial(fit, device), device) for _ in range(3))
        there = seconds(partial(fit, "cpu"), device)
        rows.append(
            {
                "what": f"`fair`, logistic, {N} clients × {m:,} rows × {d:,} columns, certified to 1e-8: seconds; limit: on the CPU",
                "value": took,
                "limit": there,
                "fraction": there / took,
            }
        )
        print(rows[-1], flush=True)
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


def measure(device: str, quick: bool, only: list[str]) -> dict[str, list[Row]]:
    """Rows of the parts that are asked for; limits are measured with any of them."""
    known = limits(device, quick)
    parts: dict[str, Callable[[], list[Row]]] = {
        "limits": lambda: [
            {"what": name, "value": value, "limit": None, "fraction": None}
            for name, value in known.items()
        ],
        "rounds": partial(rounds, device, quick, known["copy, B/s"]),
        "fair": partial(certified, device, quick),
        "simulators": partial(simulators, device, quick),
        "images": partial(entk, device, quick),
    }
    found = {}
    for name, part in parts.items():
        if name == "limits" or name in (only or parts):
            begun = time.perf_counter()
            found[name] = part()
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def sentences(rows: list[Row]) -> list[str]:
    said = [
        f"A round of {row['what'].split(', ', 1)[1].removesuffix(': seconds')}: "
        f"{1e3 * row['value']:.3g} ms, {row['fraction']:.0%} of its limit."
        for row in rows
        if row["what"].startswith("round")
    ]
    said += [
        f"{row['what'].partition(', certified')[0]}: {row['fraction']:.1f} times as fast as on the CPU."
        for row in rows
        if row["what"].startswith("`fair`")
    ]
    return said + [
        f"eNTK features come at {row['fraction']:.0%} of the rate of a forward and backward pass "
        "(aim: 30 %)."
        for row in rows
        if row["what"].startswith("eNTK")
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
    parser.add_argument(
        "--only", nargs="*", default=[], help="rounds, fair, simulators, images; others stay"
    )
    given = parser.parse_args()
    machine = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    machine += f", torch {torch.__version__}"
    found = measure(given.device, given.quick, given.only)
    if given.table:
        found["table"] = reproduced(given.table)
    stored = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    if stored.get("machine") == machine:  # what was not measured now stays
        found = stored.get("parts", {}) | found
    rows = [row for part in found.values() for row in part]
    print(table(rows), *sentences(rows), sep="\n")
    if given.out:
        about = {
            "title": TITLE,
            "command": "python benchmarks/speed/gpu.py --out benchmarks/speed/gpu.json",
            "machine": machine,
            "parts": found,
        }
        given.out.write_text(
            json.dumps(about | {"rows": rows, "sentences": sentences(rows)}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
