r"""Is the advice right, and is what is called shown true? Simulated tables whose truth is known.

Five kinds of tables, labels and numbers in turn, 4 columns, ten random splits that hold out a fifth
of every client's rows. The truth is the mean over clients of the losses on 2,000 new rows each, of
the five models of the first split, which are those that a run writes.

noise    the columns say nothing                              6 clients × 40 rows
many     one model for all                                    4 × 600
alike    one model for all                                    12 × 20
slopes   every client has slopes of its own                   8 × 40
odd      one client of six has the opposite slopes            6 × 60

regret   by how much the loss of the recommended model is above that of the best, as a share
shown    tables whose outcome is shown, not a best guess: the power
wrong    tables whose outcome is shown and false
misnamed clients that are said to gain or lose clearly, and do not

    OMP_NUM_THREADS=1 python benchmarks/verdicts.py [--tables 40] [--workers 1]

and twenty real tables, at most 60 of every client's rows drawn five times; the truth is their
losses on all other rows:

    OMP_NUM_THREADS=1 SCAFFPD_DATA=... python benchmarks/verdicts.py --real --tables 5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import scaffpd as sp
from scaffpd.study.gains import Joining
from scaffpd.study.verdict import ALONE, CONSTANT, EQUAL, JOINT, PAYS, TOO_FEW
from spread import measured, options

Array = NDArray[np.float64]
Rows = list[tuple[Array, Array]]
KINDS = {"noise": (6, 40), "many": (4, 600), "alike": (12, 20), "slopes": (8, 40), "odd": (6, 60)}
COLUMNS = 4
SPLITS = 10
FRESH = 2000


def truth(kind: str, rng: np.random.Generator) -> Array:
    """Draw every client's coefficients."""
    clients = KINDS[kind][0]
    x = rng.normal(size=COLUMNS)
    if kind == "noise":
        return np.zeros((clients, COLUMNS))
    if kind == "slopes":
        return x + rng.normal(size=(clients, COLUMNS))
    found = np.tile(x, (clients, 1))
    if kind == "odd":
        found[0] *= -1
    return found


def drawn(rng: np.random.Generator, models: Array, rows: int, labels: bool) -> Rows:
    """Draw rows of every client: labels, or numbers with noise of variance one."""
    found = []
    for u in models:
        X = rng.normal(size=(rows, COLUMNS))
        z = X @ u
        y = rng.random(rows) < 1 / (1 + np.exp(-z)) if labels else z + rng.normal(size=rows)
        found.append((X, y.astype(int) if labels else y))
    return found


def splits(rng: np.random.Generator, rows: Rows, model: sp.Linear, many: int) -> list[Joining]:
    """Compare the models on random splits."""
    found = []
    for _ in range(many):
        orders = [rng.permutation(len(y)) for _, y in rows]
        cuts = [len(order) // 5 for order in orders]
        test, train = (
            [
                (X[o[part(c)]], y[o[part(c)]])
                for (X, y), o, c in zip(rows, orders, cuts, strict=True)
            ]
            for part in (lambda c: slice(c), lambda c: slice(c, None))
        )
        found.append(sp.joining(train, test, model))
    return found


def true_losses(found: Joining, fresh: Rows, model: sp.Linear) -> Array:
    """Return the loss of every model at every client, (models × clients)."""
    own = (found.parameters[name][1:] for name in found.models)  # the first is for others
    return np.array(
        [
            [
                model.row_losses(model.outputs(u, X), y)[0].mean()
                for u, (X, y) in zip(each, fresh, strict=True)
            ]
            for each in own
        ]
    )


class Outcome(NamedTuple):
    """What became of a table."""

    regret: float
    shown: bool
    wrong: bool
    named: int
    misnamed: int


def judged(found: Joining, true: Array) -> Outcome:
    """Compare what is said with the truth."""
    said = found.verdict
    best = said.recommendation
    loss = dict(zip(found.models, true.mean(1).tolist(), strict=True))
    others = JOINT if best == ALONE else [m for m in found.models if m != best]
    holds = min(loss[m] for m in others) >= (1 - EQUAL) * loss[best]
    if said.outcome == PAYS:
        holds = loss[best] < min(loss[ALONE], loss[CONSTANT])
    base, model = (found.models.index(name) for name in (said.base, said.shown))
    pays = found.pays(said.shown, said.base)
    wrong = [(p == "yes") != b for p, b in zip(pays, true[base] > true[model], strict=True)]
    named = [w for p, w in zip(pays, wrong, strict=True) if p != "within noise"]
    shown = said.outcome != TOO_FEW
    return Outcome(
        loss[best] / min(loss.values()) - 1, shown, shown and not holds, len(named), sum(named)
    )


def table(kind: str, seed: int) -> Outcome:
    """Draw a table, compare the models on it, and look at new rows."""
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    labels = seed % 2 == 0
    model = sp.Linear("logistic" if labels else "squared", "auto", True)
    models = truth(kind, rng)
    several = splits(rng, drawn(rng, models, KINDS[kind][1], labels), model, SPLITS)
    true = true_losses(several[0], drawn(rng, models, FRESH, labels), model)
    return judged(Joining.mean(several), true)


def real(name: str, seed: int) -> Outcome:
    """Draw rows of a real table, compare the models on them, and look at the others."""
    import real_tables  # needs packages that simulations do not

    rng = np.random.default_rng([seed, *name.encode()])
    rows, rest, loss = real_tables.drawn(name, rng)
    model = sp.Linear(loss, "auto", True)
    several = splits(rng, rows, model, SPLITS)
    return judged(Joining.mean(several), true_losses(several[0], rest, model))


def line(kind: str, found: Sequence[Outcome]) -> str:
    """Return a line of the table."""
    regret, shown, wrong = (100 * float(np.mean([one[k] for one in found])) for k in range(3))
    named, misnamed = (sum(one[k] for one in found) for k in (3, 4))
    share = f"{100 * misnamed / named:.1f} of {named}" if named else "none"
    most = 100 * max(one.regret for one in found)
    return f"| {kind} | {len(found)} | {regret:.2f} | {most:.1f} | {shown:.0f} | {wrong:.1f} | {share} |"


HEAD = """| kind | tables | regret, % | largest | shown, % | wrong, % | clients misnamed, % |
|---|---:|---:|---:|---:|---:|---:|"""


def main() -> None:
    """Print a line per kind."""
    given = options(__doc__, tables=40).parse_args()
    if given.real:
        from real_tables import TABLES

        found = measured(real, list(TABLES), given)
    else:
        found = measured(table, list(KINDS), given)
    print(HEAD)
    for kind, rows in found.items():
        print(line(kind, [Outcome(*row) for row in rows]))


if __name__ == "__main__":
    main()
