"""(b) Seconds of a whole Scaff-PD round against one gradient of all data, for growing J and N.

The data is the same whatever N is: 100,000 samples × 100 features (fewer where J steps would take
minutes), cut into N clients of equal size. The gradient is that of the average loss by two matrix
products on the stacked samples, written by hand and as fast as we can write it. A round is
everything between two states: losses, gradients, local steps, dual step, step-size control and
certificate. One thread, in double precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from harness import Call, Row, exponent, interleaved, table

import scaffpd as sp

TITLE = "A Scaff-PD round against one full gradient"
SAMPLES = 100_000
FEATURES = 100
CLASSES = 10
FEWER = {100: 20_000, 1000: 10_000}  # samples, where local steps go one by one
STEPS = (1, 10, 100, 1000)
CLIENTS = (5, 20, 100, 1000, 10_000)
LIMITS = {"squared": 2.5, "logistic": 1.3, "softmax": 1.3}  # of one gradient; of J + 1 of them
L2 = 1e-2


def problem(loss: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples and targets of a linear model with noise."""
    random = np.random.default_rng(0)
    X = random.standard_normal((samples, FEATURES))
    z = X @ random.standard_normal(
        (FEATURES, CLASSES)
    ) / FEATURES**0.5 + 0.5 * random.standard_normal((samples, CLASSES))
    return X, {"squared": z[:, 0], "logistic": (z[:, 0] > 0).astype(float), "softmax": z.argmax(1)}[
        loss
    ]


def gradient(
    loss: str, X: np.ndarray, y: np.ndarray, x: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """∇ of the average loss at x, over stacked samples."""
    A = torch.from_numpy(X)
    target = torch.from_numpy(y)
    if loss == "softmax":
        target = torch.nn.functional.one_hot(target.long(), CLASSES).to(A.dtype).T.contiguous()

    def call() -> torch.Tensor:
        if loss == "softmax":
            r = torch.softmax((A @ x.view(FEATURES, CLASSES)).T.contiguous(), 0).sub_(target)
            return (r @ A).T.flatten().div_(len(A)).add_(x, alpha=L2)
        z = A @ x
        r = (z - target).mul_(2) if loss == "squared" else torch.sigmoid(z).sub_(target)
        return (r @ A).div_(len(A)).add_(x, alpha=L2)

    return call


def rounds(
    loss: str, X: np.ndarray, y: np.ndarray, clients: int, steps: int
) -> tuple[Call, torch.Tensor]:
    """A call that makes one more round of the same run, and a point to compare gradients at."""
    pairs = list(zip(np.array_split(X, clients), np.array_split(y, clients), strict=True))
    cohort = sp.Cohort(
        pairs, sp.Linear(loss, l2=L2, classes=CLASSES if loss == "softmax" else None)
    )
    method = sp.ScaffPD(sp.ChiSquare(rho=0.1), local_steps=steps)
    state = method.round(cohort, method.init(cohort))
    check(loss, X, y, cohort, state.x)
    return (lambda: method.round(cohort, state)), state.x


def check(loss: str, X: np.ndarray, y: np.ndarray, cohort: sp.Cohort, x: torch.Tensor) -> None:
    """Both sides compute the same gradient."""
    mean = np.full(len(cohort.names), 1 / len(cohort.names))
    ours = cohort.gradients(x).sum(mean)
    theirs = gradient(loss, X, y, x)()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    out = []
    for loss in LIMITS:
        for J in STEPS[:2] if quick else STEPS:
            samples = 4_000 if quick else SAMPLES if loss == "squared" else FEWER.get(J, SAMPLES)
            X, y = problem(loss, samples)
            for N in CLIENTS[:2] if quick else CLIENTS:
                out.append(
                    compared(
                        loss, X, y, N, J, 3 if quick or (J >= 100 and loss != "squared") else 7
                    )
                )
                print(out[-1], file=sys.stderr, flush=True)
    return out


def compared(loss: str, X: np.ndarray, y: np.ndarray, N: int, J: int, turns: int) -> Row:
    """One line: a round against a gradient."""
    call, x = rounds(loss, X, y, N, J)
    timing = interleaved({"round": call, "gradient": gradient(loss, X, y, x)}, turns)
    ratio, low, high = timing.ratio("round", "gradient")
    unit = 1 if loss == "squared" else J + 1
    return {
        "loss": loss,
        "samples": len(X),
        "N": N,
        "J": J,
        "round, ms": 1e3 * timing.median("round"),
        "gradient, ms": 1e3 * timing.median("gradient"),
        "round/gradient": ratio,
        "middle half": f"{low:.3g}–{high:.3g}",
        "of its unit": ratio / unit,
        "at most": LIMITS[loss],
    }


def sentences(rows: list[Row]) -> list[str]:
    out = []
    for loss, limit in LIMITS.items():
        mine = [row for row in rows if row["loss"] == loss]
        unit = "one full gradient" if loss == "squared" else "J + 1 full gradients"
        most = max(row["N"] for row in mine)
        for rows_of, where in (
            (mine, "a round"),
            ([r for r in mine if r["N"] == most], f"with {most:,} clients a round"),
        ):
            worst = max(rows_of, key=lambda row: row["of its unit"])
            held = "holds" if worst["of its unit"] <= limit else "DOES NOT HOLD"
            out.append(
                f"{loss}: {where} takes at most {worst['of its unit']:.2f} times {unit} "
                f"(N = {worst['N']:,}, J = {worst['J']}); the aim of {limit} {held}."
            )
        by_steps = {
            J: np.median([r["round/gradient"] for r in mine if r["J"] == J])
            for J in {r["J"] for r in mine}
        }
        if len(by_steps) > 2:
            out.append(
                f"{loss}: a round's cost grows like J^{exponent(by_steps, by_steps.values()):.2f}."
            )
    return out


if __name__ == "__main__":
    found = measure("--quick" in sys.argv)
    print(table(found), *sentences(found), sep="\n")
