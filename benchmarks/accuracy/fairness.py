r"""Does a fair objective help personal models on new rows? Rule by rule, on fifteen tables.

Strengths are set by evidence. The shared x is then trained for

    clients        the mean over clients, not over rows
    chi2, cvar,    χ² (ρ = .1, prior: rows), CVaR (.2) and the largest of the losses F_i(x)
    worst
    reducible …    the same of F_i(x) − b_i, with the noise b_i that is expected if the client's own
                   model is right: the mean entropy of its labels, or σ_i² = RSS_i/(n_i − freedom),
                   to which ten rows of everybody's σ² are added
    shrunk         χ² of s_i (F_i − b_i), s_i = V/(V + v_i): v_i is the variance that chance gives
                   F_i, V what is left of the variance between clients

and compared with training for all rows, which is what `Personal` gets. Printed is by how much the
held-out loss is lower, in per cent, in the mean over clients and for the worst-served fifth (one half
of the rows names it, the other judges it), with * where that is clear of noise. The rule is chosen
on the first half of the tables, and judged on the second.

    OMP_NUM_THREADS=1 SCAFFPD_DATA=... python benchmarks/accuracy/fairness.py
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np
import torch
from ours import read
from scipy.special import expit
from tables import TABLES, Array, Split

import scaffpd as sp
from experiments.excess import Excess
from scaffpd.models import regulariser
from scaffpd.objectives.base import Objective
from scaffpd.study.joining import start_of
from scaffpd.training.metrics import NOISE, HeldOutMoments, RelativeGain, every, worst_fifth

CHOSEN_ON = ("lung", "hedonic", "contraception", "exam", "hospitals", "prenatal", "produc")
JUDGED_ON = ("star", "maths", "radon", "schools", "simulated", "wages", "adult", "flights")
SPLITS = 5  # at most: folds that hold out every row once
EVERYBODY = 10.0  # rows of everybody's σ² that are added to a client's


def noise(
    model: sp.Linear, own: Array, clients: list[tuple[Array, Array]], cohort: sp.Cohort
) -> tuple[Array, Array]:
    """Return b_i, and the variance v_i of a client's loss, if its own model is right."""
    levels = []
    spread = []
    kappa = np.asarray(cohort.model.strength)
    common = cohort.strengths.sigma2
    for (X, y), u in zip(clients, own, strict=True):
        z = model.outputs(u, X)[:, 0]
        if model.loss == "logistic":
            p = expit(z)
            levels.append(np.mean(np.logaddexp(0, z) - p * z))
            spread.append(np.mean(p * (1 - p) * z**2) / len(y))
            continue
        rows = np.column_stack([X, np.ones(len(X))])[:, np.isfinite(kappa)]
        H = rows.T @ rows
        free = np.trace(np.linalg.solve(H + np.diag(kappa[np.isfinite(kappa)] / 2), H))
        rss = float(((z - y) ** 2).sum())
        levels.append((rss + EVERYBODY * common) / (max(len(y) - free, 0.0) + EVERYBODY))
        spread.append(2 * levels[-1] ** 2 / len(y))
    return np.array(levels), np.array(spread)


def rules(losses: Array, b: Array, v: Array, n: Array) -> Mapping[str, Objective]:
    """Return the objectives; `losses` are the clients' at the mode."""
    left = losses - b
    between = max(float(np.var(left, ddof=1) - v.mean()), 0.0)
    s = between / (between + v)
    base = {
        "chi2": sp.ChiSquare(0.1, prior=n),
        "cvar": sp.CVaR(0.2, prior=n),
        "worst": sp.Agnostic(),
    }
    return {
        "rows": sp.Average(prior=n),
        "clients": sp.Average(),
        **base,
        **{f"reducible {name}": Excess(goal, b) for name, goal in base.items()},
        # its excess at the mode is s_i (F_i − b_i)
        "shrunk": Excess(base["chi2"], losses - s * left),
    }


def held_out(split: Split, curves: str) -> dict[str, list[Array]]:
    """Return the losses of every client's held-out rows, rule by rule."""
    prepared = read(split, curves)
    model = prepared.model
    cohort = sp.Cohort(prepared.train, sp.Personal(model), prepared.names)
    n = np.array([len(y) for _, y in prepared.train], dtype=float)

    def trained(goal: Objective, x0: Array | None) -> sp.Result:
        return sp.train(sp.fair(goal), cohort, tol=1e-6, rounds=60, x0=x0, progress=False)

    first = trained(sp.Average(prior=n), start_of(cohort))
    clients = [(np.asarray(X), np.asarray(y)) for X, y in prepared.train]
    losses = np.asarray(cohort.losses(torch.from_numpy(first.x)))
    losses = losses - regulariser(cohort.model, first.x)
    b, v = noise(model, np.asarray(first.personal), clients, cohort)
    found = {}
    for name, goal in rules(losses, b, v, n).items():
        own = trained(goal, first.x).personal
        found[name] = [
            model.row_losses(model.outputs(u, np.asarray(X)), np.asarray(y))[0]
            for u, (X, y) in zip(own, prepared.test, strict=True)
        ]
    return found


def table(name: str) -> dict[str, tuple[RelativeGain, RelativeGain]]:
    """Return what every rule gains over training for all rows: mean, and worst fifth."""
    parts = [held_out(split, "off") for split in islice(TABLES[name].splits(), SPLITS)]
    names = list(parts[0])
    rows = _rows(parts, names)
    moments = HeldOutMoments.of(rows)
    return {
        rule: tuple(RelativeGain.of(moments.difference(0, k, of)) for of in (every, worst_fifth))
        for k, rule in enumerate(names)
        if k
    }


def _rows(parts: list[dict[str, list[Array]]], names: list[str]) -> list[Array]:
    """Return every client's losses, (rules × rows of all splits)."""
    number = range(len(parts[0][names[0]]))
    return [np.stack([np.concatenate([p[r][i] for p in parts]) for r in names]) for i in number]


def main() -> None:
    shown = False
    kept: dict[str, list[tuple[RelativeGain, RelativeGain]]] = {}
    for half in (CHOSEN_ON, JUDGED_ON):
        gains: dict[str, list[tuple[RelativeGain, RelativeGain]]] = {}
        for name in half:
            found = table(name)
            if not shown:
                print(f"| | {' | '.join(found)} |\n|---|{'--:|' * len(found)}")
                shown = True
            print(f"| {name} | {' | '.join(map(cell, found.values()))} |", flush=True)
            for rule, pair in found.items():
                gains.setdefault(rule, []).append(pair)
        kept = kept or gains
        print(f"| **mean** | {' | '.join(mean(pairs) for pairs in gains.values())} |")
    best = max(kept, key=lambda rule: np.mean([pair[1].value for pair in kept[rule]]))
    print(f"\nChosen on the first {len(CHOSEN_ON)} tables: {best}.")


def cell(pair: tuple[RelativeGain, RelativeGain]) -> str:
    """Return both gains in per cent, with * where clear of noise."""
    return " / ".join(f"{100 * g.value:+.1f}{'' if g.pays == NOISE else '*'}" for g in pair)


def mean(pairs: list[tuple[RelativeGain, RelativeGain]]) -> str:
    return " / ".join(f"{100 * np.mean([p[k].value for p in pairs]):+.2f}" for k in (0, 1))


if __name__ == "__main__":
    main()
