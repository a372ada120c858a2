"""Why a private run has the defaults that it has: writes DEFAULTS.md.

    OMP_NUM_THREADS=1 python benchmarks/privacy/defaults.py

`fair` with a χ² objective at ε = 4 on two small federations, one setting changed at a time.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import scaffpd as sp
from scaffpd.models import regulariser
from scaffpd.privacy import LOCAL_STEPS, RADIUS, ROUNDS
from scaffpd.privacy.noise import discrete_gaussians, key_stream
from scaffpd.privacy.private import INTERCEPT, RIDGE
from scaffpd.training.metrics import a_fifth

sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.methods import problem
from experiments.tables import markdown_table

HERE = Path(__file__).parent
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/privacy/defaults.py"
NAMES = ("hospitals", "breast-cancer")
SEEDS = range(8)
EPSILON = 4.0


class Setting(NamedTuple):
    """What a private run can choose."""

    rounds: int = ROUNDS
    local_steps: int = LOCAL_STEPS
    radius: float = RADIUS
    clip: float = 1.0
    loss_clip: float = 4.0
    l2: float = RIDGE  # NaN: by evidence, as if it cost no ε
    kappa: float = np.inf  # of personal models around the private one, made after the run; the same

    def __str__(self) -> str:
        names = ("R", "J", "radius", "C", "B", "l2", "κ")
        shown = (f"{v:g}" if v == v else "by evidence" for v in self)
        return ", ".join(
            f"{s} = {v}" for s, v in zip(names, shown, strict=True) if (s, v) != ("κ", "inf")
        )


SETTINGS = (
    Setting(),
    *(Setting(rounds=r) for r in (10, 60, 100)),
    *(Setting(local_steps=j) for j in (2, 4, 10)),
    *(Setting(radius=r) for r in (2.0, 5.0)),
    *(Setting(clip=c) for c in (0.5, 2.0)),
    *(Setting(loss_clip=b) for b in (2.0,)),
    *(Setting(l2=l2) for l2 in (1e-3, 0.01, 0.03, 0.3, 1.0, np.nan)),
    *(Setting(kappa=k) for k in (1.0, 10.0, 100.0, np.nan)),
)


@lru_cache
def data(name: str, seed: int) -> sp.data.Silos:
    """Clients with a fifth of their rows held out."""
    return problem(name, test=0.2).silos(seed)


@lru_cache
def evidence(name: str, seed: int) -> tuple[list[float], list[float]]:
    """Return l2 and κ by evidence, from rows without noise."""
    free = sp.Linear("logistic", l2="auto", intercept=True)
    model = sp.Cohort(data(name, seed).train, sp.Personal(free)).model
    return list(model.model.l2), list(model.strength)


def ridge(name: str, seed: int, l2: float) -> list[float]:
    """Return l2 of every coefficient."""
    if np.isnan(l2):
        return evidence(name, seed)[0]
    return [l2] * data(name, seed).train[0][0].shape[1] + [INTERCEPT]


def scores(name: str, seed: int, setting: Setting | None) -> tuple[float, float, float]:
    """Test accuracy, the mean over clients and that of the worst fifth, and the mean log loss;
    without privacy where there is no setting.
    """
    silos = data(name, seed)
    bare = sp.Linear("logistic", ridge(name, seed, 1e-3 if setting is None else setting.l2), True)
    plain = sp.Cohort(silos.train, bare, silos.names, test=silos.test)
    if setting is None:
        result = sp.train(sp.fair(sp.ChiSquare(0.1)), plain, tol=1e-6, progress=False)
    else:
        method = sp.fair(sp.ChiSquare(0.1), setting.local_steps)
        private = sp.Private.solved(
            bare,
            EPSILON,
            method,
            setting.rounds,
            radius=setting.radius,
            clip=setting.clip,
            loss_clip=setting.loss_clip,
            secret=seed,
        )
        cohort = sp.Cohort(silos.train, private, silos.names, test=silos.test)
        result = sp.train(method, cohort, setting.rounds, progress=False)
        assert result.privacy is not None
        assert result.privacy.worst <= EPSILON
        if setting.kappa < np.inf or np.isnan(setting.kappa):
            own = evidence(name, seed)[1] if np.isnan(setting.kappa) else setting.kappa
            plain = sp.Cohort(silos.train, sp.Personal(bare, own), silos.names, test=silos.test)
    scored = plain.evaluate(result.x, "test")
    penalty = regulariser(plain.model, result.x)
    right = np.sort(scored.score)
    log_loss = float(scored.loss.mean()) - penalty
    return float(right.mean()), float(right[: a_fifth(len(right))].mean()), log_loss


def line(label: str, setting: Setting | None) -> list[str]:
    """A row of the table."""
    cells = []
    for name in NAMES:
        found = np.array([scores(name, seed, setting) for seed in SEEDS])
        mean, deviation = found.mean(0), found.std(0, ddof=1)
        cells += [f"{100 * mean[k]:.1f} ± {100 * deviation[k]:.1f}" for k in (0, 1)]
        cells += [f"{mean[2]:.3f} ± {deviation[2]:.3f}"]
    print(label, cells, flush=True)
    return [label, *cells]


def speed(sigma: int, size: int = 1_000_000) -> float:
    """How many whole numbers of noise are drawn a second."""
    started = time.process_time()
    discrete_gaussians(key_stream(bytes(32)), sigma, size)
    return size / (time.process_time() - started)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    head = [
        "",
        *(
            f"{name}, {what}"
            for name in NAMES
            for what in ("mean, %", "worst fifth, %", "log loss")
        ),
    ]
    rows = [line("no privacy", None), *(line(str(setting), setting) for setting in SETTINGS)]
    text = [
        "# Defaults of private runs",
        "",
        f"Written by `{COMMAND}`.",
        "",
        f"Test accuracy at ε = {EPSILON:g}, δ = 1e-5, over {len(SEEDS)} splits, mean ± standard "
        "deviation, and the mean log loss. The first "
        "private row has the defaults of `scaffpd train --epsilon`; the others change one of "
        "them. R rounds, J local "
        "steps, clips C and B, l2 of all but the intercept, κ of personal models around the result. "
        "This choice has seen these data, and not yours.",
        "",
        *markdown_table(head, rows, words=1),
        "",
        f"Noise is drawn at {speed(2**40) / 1e6:.1f} million numbers a second on one core where σ "
        "is a power of two, "
        f"the slowest case, and at {speed(13 * 2**36) / 1e6:.1f} million where it is 0.81 of one.",
        "",
    ]
    (HERE / "DEFAULTS.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
