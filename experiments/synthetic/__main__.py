"""`python -m experiments.synthetic`: distance to the optimum against rounds, on the paper's
synthetic problem.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.synthetic import figures, problem, study, tables
from scaffpd.machine import cores

NAME = "python -m experiments.synthetic"


def main(words: Sequence[str] | None = None) -> int:
    """Carry out a command line; nothing is written into results/ unless --out says so."""
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs") / "synthetic")
    parser.add_argument("--seed", type=int, default=0, help="draws the data")
    parser.add_argument("--quick", action="store_true", help="seconds; the numbers mean nothing")
    parser.add_argument("--processes", type=int, help="runs at a time; else one per core")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    plan = problem.quick(given.seed) if given.quick else problem.Plan(given.seed)
    command = f"{NAME} --seed {given.seed}{' --quick' if given.quick else ''}"
    done = study.study(plan, given.processes or (1 if given.quick else cores()))
    written = figures.draw(done, given.out, command)
    written += tables.save(done, given.out, f"{command} --out {given.out.as_posix()}")
    for sentence in (*tables.verdict(done), *tables.edges(done), *map(str, written)):
        print(sentence)
    return 0


if __name__ == "__main__":
    sys.exit(main())
