"""What a round of the subspace saddle method costs its server: writes SERVER.md.

Run with `OMP_NUM_THREADS=1 python benchmarks/server.py [rounds]` (20 unless told). Real runs on synthetic regression;
the time of everything that the federation is asked for is taken off, and what is left is the server's.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import scaffpd as sp
from problems import OBJECTIVES, Family, objectives
from scaffpd.algorithms import subspace_saddle
from scaffpd.algorithms.subspace import SubspaceModel
from scaffpd.data import synthetic

CASES = (  # clients, samples each, features, objectives
    (50, 20, 10_000, OBJECTIVES),
    (1000, 4, 1_000, OBJECTIVES),
    (50, 1, 1_000_000, ("Agnostic",)),
)
PARTS = ("basis", "model", "merit")
WARM = 10  # rounds until there are as many columns as the subspace takes
HEAD = ("N", "d", "objective", "rounds", *PARTS, "server, median", "server, most")

Times = dict[str, float]


def timed(times: Times, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, its seconds added to those of `part`."""

    def run(*args: Any, **options: Any) -> Any:
        begin = perf_counter()
        try:
            return call(*args, **options)
        finally:
            times[part] += perf_counter() - begin

    return run


class Asked:
    """A federation, or its answers, with the time that they take."""

    def __init__(self, inner: Any, times: Times) -> None:
        self._inner = inner
        self._times = times

    def __getattr__(self, name: str) -> Any:
        value = timed(self._times, "clients", getattr)(self._inner, name)
        return self._ask(value) if callable(value) else value

    def _ask(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            plain = [a._inner if isinstance(a, Asked) else a for a in args]
            answer = timed(self._times, "clients", method)(*plain, **options)
            return Asked(answer, self._times) if hasattr(answer, "norms") else answer

        return ask


def measure(cohort: sp.Cohort, objective: Any, rounds: int) -> list[Times]:
    """Seconds by part of every round in which the subspace is full."""
    times: Times = defaultdict(float)
    federation = Asked(cohort, times)
    method = sp.SubspaceSaddle(objective, memory=20)
    seen = []
    plain = subspace_saddle.orthonormal, SubspaceModel.solve, SubspaceModel.merit
    try:
        for place, name, part, call in zip(
            (subspace_saddle, SubspaceModel, SubspaceModel),
            ("orthonormal", "solve", "merit"),
            PARTS,
            plain,
            strict=True,
        ):
            setattr(place, name, timed(times, part, call))
        state = method.init(federation)
        while len(seen) < rounds:
            times.clear()
            begin = perf_counter()
            state = method.round(federation, state)
            seen.append({**times, "server": perf_counter() - begin - times["clients"]})
    finally:
        subspace_saddle.orthonormal, SubspaceModel.solve, SubspaceModel.merit = plain
    return [times for times in seen if "basis" in times][
        WARM:
    ]  # a retry at the same place needs no new basis


def row(family: Family, name: str, rounds: int) -> str:
    cohort = family.cohort()
    seen = measure(cohort, objectives(family)[name], rounds)
    by_part = {part: 1e3 * np.array([times[part] for times in seen]) for part in (*PARTS, "server")}
    medians = [f"{np.median(by_part[part]):.1f}" for part in (*PARTS, "server")]
    cells = [f"{len(cohort.names):,}", f"{len(cohort.start()):,}", name, str(len(seen)), *medians]
    return "| " + " | ".join([*cells, f"{by_part['server'].max():.1f}"]) + " |"


def table(rounds: int) -> list[str]:
    """One Markdown row per problem and objective."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for N, m, d, names in CASES:
        family = Family(
            "synthetic", synthetic(N=N, d=d, m=m, sigma=0.3), sp.Linear("squared", l2=0.1)
        )
        lines += [row(family, name, rounds if d < 1e6 else min(rounds, WARM + 4)) for name in names]
    return lines


def main(rounds: int = 20) -> None:
    torch.set_num_threads(1)
    versions = f"scaffpd {sp.__version__}, torch {torch.__version__}, NumPy {np.__version__}"
    about = (
        f"Written by `OMP_NUM_THREADS=1 python benchmarks/server.py {rounds}`, one thread ({versions}): medians over "
        f"the rounds of a real run with k = 20 columns, after the first {WARM}. The server's time is that of the round "
        "less that of everything the clients are asked for, sums of their vectors included; basis, model and merit are "
        "parts of it."
    )
    text = "\n".join(
        [
            "# Milliseconds of the server in a round of SubspaceSaddle",
            "",
            about,
            "",
            *table(rounds),
            "",
        ]
    )
    print(text)
    Path(__file__).with_name("SERVER.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
