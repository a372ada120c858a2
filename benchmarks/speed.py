"""What a round costs as J grows, closed form against explicit steps, and what `import scaffpd` costs: writes SPEED.md.

python benchmarks/speed.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import scaffpd as sp
from scaffpd.federation import LocalPlan
from scaffpd.models.glm import LinearOracle

SHAPES = ((20, 100, 50), (20, 500, 2000), (100, 50, 200))  # clients, samples each, features


def best_of(call: Callable[[], object], repeats: int = 5) -> float:
    """The fastest of a few calls, in milliseconds (the machine may be busy with other things)."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def local_steps() -> list[str]:
    lines = [
        "| N | m_i | d | J | closed form, ms | explicit steps, ms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for N, m, d in SHAPES:
        for J in (10, 100, 1000):
            if J * N * m * d <= 3e10:
                closed, loop = both_ways(N, m, d, J)
                lines.append(f"| {N} | {m} | {d} | {J} | {closed:.2f} | {loop:.1f} | {loop / closed:.0f}× |")
    return lines


def both_ways(N: int, m: int, d: int, J: int) -> tuple[float, float]:
    """Milliseconds of all clients' J local steps, in closed form and one by one."""
    cohort = sp.Cohort(sp.data.synthetic(N=N, m=m, d=d), sp.Linear("squared", l2=0.1))
    oracle, x, plan = cohort._oracle, cohort.start(), LocalPlan(J)
    weights = torch.full((N,), 1 / N, dtype=torch.float64)
    rotated, plain = oracle.evaluate(x), LinearOracle.evaluate(oracle, x)
    c = plain.sum(weights)
    closed = best_of(lambda: oracle.local_updates(x, rotated, c, plan).sum(weights))
    repeats = 3 if J * N * m * d < 1e9 else 1
    loop = best_of(lambda: LinearOracle.local_updates(oracle, x, plain, c, plan).sum(weights), repeats)
    return closed, loop


def import_seconds(code: str, repeats: int = 5) -> float:
    return best_of(lambda: subprocess.run([sys.executable, "-c", code], check=True), repeats) / 1e3


def main() -> None:
    torch.set_num_threads(1)
    bare = import_seconds("pass")
    package, engine = (
        import_seconds("import scaffpd") - bare,
        import_seconds("import scaffpd; scaffpd.train") - bare,
    )
    text = "\n".join(
        [
            "# Speed",
            "",
            "Written by `python benchmarks/speed.py`, one thread "
            f"(scaffpd {sp.__version__}, torch {torch.__version__}, NumPy {np.__version__}).",
            "",
            "## Local work of all clients in one round, squared loss",
            "",
            *local_steps(),
            "",
            "## Import",
            "",
            f"`import scaffpd` takes {1e3 * package:.0f} ms (best of five, the interpreter's own start taken off); "
            f"the first use of `scaffpd.train` loads PyTorch: {engine:.1f} s.",
            "",
        ]
    )
    print(text)
    Path(__file__).with_name("SPEED.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
