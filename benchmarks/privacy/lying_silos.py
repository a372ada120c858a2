"""What one silo of four gains by lying about its loss, without and with what losses are for any rows.

    python benchmarks/privacy/lying_silos.py

prints the tables of docs/deploy/hostile-silos.md: the liar's loss on its true rows, and the worst loss of another.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("deploy", "security")]

from lies import LIES, REGRESSION_LIES, attack  # noqa: E402 - the attacks are those of the tests


def table(lies, objectives, **how):
    """Print a table: lies down, objectives across, each with the liar's loss and the worst other's."""
    print(
        "| lie | noticed, before → now | "
        + " | ".join(f"{o}: before | now" for o in objectives)
        + " |"
    )
    print("|---|---|" + "---|" * 2 * len(objectives))
    for name, lie in lies.items():
        cells = []
        seen = []
        for objective in objectives:
            for anchored in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    gain = attack(Path(folder), lie, objective, anchored, **how)
                cells.append(f"{gain.own:.3f}, {gain.worst:.3f}")
                seen.append(
                    (anchored, "no" if gain.round is None else f"{gain.why}, round {gain.round}")
                )
        words = [
            " / ".join(dict.fromkeys(word for anchored, word in seen if anchored is side))
            for side in (False, True)
        ]
        print(f"| {name} | {words[0]} → {words[1]} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    logging.disable()
    table(LIES, ["Average", "χ²", "χ², cap .4"])
    print()
    for more in ("", "influence = 1\n"):
        print(more or "no limit of influence")
        table(REGRESSION_LIES, ["Average", "χ², cap .4"], more=more, age=True)
