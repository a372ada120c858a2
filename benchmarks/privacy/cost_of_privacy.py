"""What differential privacy costs in accuracy: writes DIFFERENTIAL.md, differential.csv and
differential.png.

    OMP_NUM_THREADS=1 python benchmarks/privacy/cost_of_privacy.py

Scaff-PD with a χ² objective and FedAvg, at ε = 1, 4, 8 (δ = 1e-5, every record of every client) and
without privacy, on handwritten digits of 20 clients with label skew and on four hospitals; each
with noise of every client's own, and with noise that clients share under secure sums, of whom a
third may add none. Settings are chosen per ε, on splits that are not reported; that choice is not
accounted for. `compare` tunes rates alone: rounds and clips set the noise as well.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import scaffpd as sp
from scaffpd.data.silos import Silos
from scaffpd.files import csv_text, write_file
from scaffpd.training.metrics import Summary, a_fifth

sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.style import BLUE, ORANGE, QUIET, STYLE
from experiments.tables import markdown_table

HERE = Path(__file__).parent
EPSILONS = (1.0, 4.0, 8.0, np.inf)
DELTA = 1e-5
SCAFF_PD = "Scaff-PD, χ²"
FED_AVG = "FedAvg"
MAJORITY = "the most frequent label"
SHARED = ", shared noise"
METHODS = (SCAFF_PD, SCAFF_PD + SHARED, FED_AVG, FED_AVG + SHARED)
TUNING = (100, 101)
REPORTED = range(8)
LENGTHS = ((10, 1), (30, 1), (100, 1), (10, 4), (30, 4))  # rounds R, local steps J
CLIPS = (0.3, 1.0)
RATES = (1.0, 3.0)
RHOS = (0.1, 1.0)
LOSS_SHARE = 0.3
HEAD = (
    *("data", "epsilon", "method", "seed", "mean", "worst_fifth", "loss", "cosine", "spent"),
    *("rounds", "local_steps", "clip", "rate", "rho"),
)


@dataclass(frozen=True)
class Case:
    """A data set, its model and its public bounds."""

    name: str
    model: sp.Linear
    radius: float
    loss_clip: float
    curvature: float

    def silos(self, seed: int) -> Silos:
        """Clients with 30 % of their rows held out."""
        return _silos(self.name, seed)

    @property
    def smoothness(self) -> float:
        """The public L_i."""
        return self.curvature * self.radius**2 + self.model.l2


CASES = (
    Case("digits", sp.Linear("softmax", l2=1e-3, intercept=True, classes=10), 2.0, 2.5, 0.5),
    Case("heart disease", sp.Linear("logistic", l2=0.03, intercept=True), 3.0, 1.5, 0.25),
)


class Setting(NamedTuple):
    """A point of the grid."""

    rounds: int
    local_steps: int
    clip: float
    rate: float
    rho: float | None = None


@lru_cache
def _silos(name: str, seed: int) -> Silos:
    if name == "digits":
        return sp.data.digits(clients=20, alpha=0.3, seed=seed, test_fraction=0.3, minimum=20)
    return sp.data.heart_disease(test_fraction=0.3, seed=seed)


def grid(method: str, epsilon: float) -> list[Setting]:
    """All settings; without privacy there is nothing to clip, and shared noise is for single local
    steps.
    """
    rhos = RHOS if method.startswith(SCAFF_PD) else (None,)
    clips = CLIPS if np.isfinite(epsilon) else (np.inf,)
    lengths = [length for length in LENGTHS if length[1] == 1 or not method.endswith(SHARED)]
    points = itertools.product(lengths, clips, RATES, rhos)
    return [Setting(*length, clip, rate, rho) for length, clip, rate, rho in points]


def algorithm(case: Case, setting: Setting, clients: int) -> Any:
    """The method, with rates from public numbers alone."""
    eta = setting.rate / case.smoothness
    if setting.rho is None:
        return sp.FedAvg(local_steps=setting.local_steps, local_rate=eta, weights="uniform")
    sigma = 0.1 / (setting.rho * clients)
    steps = sp.Fixed(tau=setting.local_steps * eta, sigma=sigma, theta=0.0, local_rate=eta)
    return sp.ScaffPD(sp.ChiSquare(rho=setting.rho), local_steps=setting.local_steps, steps=steps)


class Run(NamedTuple):
    """What came of a run: test accuracy and loss, the model, and ε as accounted."""

    mean: float
    worst: float
    loss: float
    x: np.ndarray
    spent: float


def measure(
    case: Case, epsilon: float, setting: Setting, seed: int, shared: bool = False, other: int = 0
) -> Run:
    """One run; `other` noise is drawn where that is not zero."""
    silos = case.silos(seed)
    colluding = len(silos.names) // 3 if shared else None
    method = algorithm(case, setting, len(silos.names))
    model = case.model
    if np.isfinite(epsilon):
        model = sp.Private.solved(
            case.model,
            epsilon,
            method,
            setting.rounds,
            delta=DELTA,
            loss_share=LOSS_SHARE,
            clip=setting.clip,
            loss_clip=case.loss_clip,
            radius=case.radius,
            secret=seed + 1000 * other,
            colluding=colluding,
        )
    cohort = sp.Cohort(silos.train, model, names=silos.names, test=silos.test)
    result = sp.train(method, cohort, rounds=setting.rounds, seed=seed, progress=False)
    scores = Summary.of(cohort.evaluate(result.x, "test"))
    spent = np.inf if result.privacy is None else result.privacy.worst
    return Run(scores.score.mean, scores.score.worst_20, scores.loss.mean, result.x, spent)


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Of the angle between two models: 1 where noise has no part in them."""
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def chosen(case: Case, epsilon: float, method: str) -> Setting:
    """The setting with the highest mean of both accuracies on the splits for tuning; each leaves
    the better half.
    """
    left = grid(method, epsilon)
    scores = {}
    shared = method.endswith(SHARED)
    for seed in TUNING:
        for setting in left:
            found = sum(measure(case, epsilon, setting, seed, shared)[:2])
            scores[setting] = scores.get(setting, 0.0) + found
        left = sorted(left, key=lambda setting: -scores[setting])[: (len(left) + 1) // 2]
    return left[0]


def majority(case: Case, seed: int) -> tuple[float, float]:
    """The accuracies of whoever answers with the most frequent label of all training rows."""
    silos = case.silos(seed)
    label = np.bincount(np.concatenate([y for _, y in silos.train])).argmax()
    shares = np.sort([np.mean(y == label) for _, y in silos.test])
    return float(shares.mean()), float(shares[: a_fifth(len(shares))].mean())


def picture(rows: Sequence[tuple[Any, ...]], path: Path) -> None:
    """Accuracy over ε; error bars are standard deviations over splits."""
    import matplotlib.pyplot as plt

    lines = zip(
        METHODS,
        (BLUE, BLUE, ORANGE, ORANGE),
        ("-", "--") * 2,
        (-0.06, -0.02, 0.02, 0.06),
        strict=True,
    )
    looks = {method: look for method, *look in lines}
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(9, 6.4), sharex=True, sharey=True)
        for (row, case), (column, what) in itertools.product(
            enumerate(CASES), enumerate(("mean of clients", "worst fifth"))
        ):
            axis = grid[row, column]
            for method, (colour, line, shift) in looks.items():
                found = {
                    e: [r[4 + column] for r in rows if r[:3] == (case.name, e, method)]
                    for e in EPSILONS
                }
                places = [k for k, e in enumerate(EPSILONS) if found[e]]
                own = [found[EPSILONS[k]] for k in places]
                axis.errorbar(
                    np.array(places) + shift,
                    np.mean(own, 1),
                    np.std(own, 1, ddof=1),
                    color=colour,
                    linestyle=line,
                    marker="o",
                    markersize=4,
                    capsize=2,
                    linewidth=1.5,
                    label=method,
                )
            level = np.mean([majority(case, seed)[column] for seed in REPORTED])
            axis.axhline(level, color=QUIET, linewidth=1, linestyle=":", label=MAJORITY)
            axis.set_xticks(range(len(EPSILONS)), ["1", "4", "8", "no privacy"])
            axis.set(title=f"{case.name}, {what}", ylim=(0, 1))
        for axis in grid[1]:
            axis.set_xlabel("ε per record, δ = 1e-5")
        for axis in grid[:, 0]:
            axis.set_ylabel("test accuracy")
        figure.legend(
            *grid[0, 0].get_legend_handles_labels(),
            loc="lower center",
            ncols=5,
            frameon=False,
            fontsize=8,
        )
        figure.tight_layout(rect=(0, 0.05, 1, 1))
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)


def table(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """Means and standard deviations over splits."""
    lines = []
    for name, epsilon, method in dict.fromkeys(r[:3] for r in rows):
        own = [r for r in rows if r[:3] == (name, epsilon, method)]
        s = Setting(*own[0][9:])
        numbers = np.array([r[4:8] for r in own])
        means = 100 * numbers.mean(0)
        spreads = 100 * numbers.std(0, ddof=1)
        cells = [f"{mean:.1f} ± {sd:.1f}" for mean, sd in zip(means[:2], spreads[:2], strict=True)]
        cells += [f"{value:.2f}" for value in means[2:] / 100]
        clip = f"{s.clip:g}" if np.isfinite(s.clip) else "–"
        rho = "–" if s.rho is None else f"{s.rho:g}"
        where = [str(s.rounds), str(s.local_steps), clip, f"{s.rate:g}", rho]
        lines.append([name, "∞" if np.isinf(epsilon) else f"{epsilon:g}", method, *cells, *where])
    for case in CASES:
        found = 100 * np.array([majority(case, seed) for seed in REPORTED]).mean(0)
        lines.append([case.name, "0", MAJORITY, *(f"{value:.1f}" for value in found), *("–",) * 7])
    head = (
        "data",
        "ε",
        "method",
        "mean accuracy, %",
        "worst fifth, %",
        "loss",
        "cosine",
        "R",
        "J",
        "C",
        "η_ℓ L",
        "ρ",
    )
    return markdown_table(head, lines, words=3)


def shown(values: Sequence[Any]) -> str:
    """A list of choices."""
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def reading(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """What the rows say, in words."""
    said = []
    for case, method in itertools.product(CASES, METHODS):
        bare = method.removesuffix(SHARED)
        means = {}
        for e in EPSILONS:
            name = method if np.isfinite(e) else bare
            means[e] = 100 * np.mean(
                [r[4:6] for r in rows if r[:3] == (case.name, e, name)], axis=0
            )
        alike = np.mean([r[7] for r in rows if r[:3] == (case.name, 1.0, method)])
        lost = [
            f"{mean:.1f} and {worst:.1f} points at ε = {e:g}"
            for e, (mean, worst) in ((e, means[np.inf] - means[e]) for e in EPSILONS[:-1])
        ]
        said.append(
            f"- {case.name}, {method}: privacy takes {', '.join(lost)} off the two accuracies "
            "(less than nothing is "
            "luck of the splits); at ε = 1 two models that differ in noise alone have a cosine "
            f"of {alike:.2f}."
        )
    return said


def report(rows: Sequence[tuple[Any, ...]], lines: list[str], command: str, seconds: float) -> str:
    """The Markdown file."""
    versions = f"scaffpd {sp.__version__}, torch {torch.__version__}, NumPy {np.__version__}"
    sizes = {case.name: [len(y) for _, y in case.silos(0).train] for case in CASES}
    counts = "; ".join(
        f"{name}: {min(m)} to {max(m)} training records a client" for name, m in sizes.items()
    )
    return "\n".join(
        [
            "# What differential privacy costs",
            "",
            f"Written by `{command}` in {seconds / 60:.0f} minutes of one core ({versions}).",
            "",
            "![Accuracy over ε](differential.png)",
            "",
            f"Test accuracy over {len(REPORTED)} random splits (and, for digits, partitions), "
            "mean ± standard deviation: "
            "the mean over clients and the mean of the worst fifth of them, which is one hospital "
            "of four. (ε, 1e-5) "
            f"protects every record of every client; {counts}. Digits: 20 clients, label skew "
            "Dirichlet(0.3), softmax "
            "loss. Heart disease: four hospitals, logistic loss. Both methods count clients alike "
            "and take all records in "
            f"every step. Where losses are asked for they get {LOSS_SHARE:.0%} of the budget.",
            "",
            "Without another word every client hides its own vectors from everybody. With shared "
            "noise (`colluding=`, a "
            "third of the clients) gradients leave in secure sums alone, of which every client "
            "adds a part of the noise; "
            "the same (ε, 1e-5) then holds against whoever sees sums, and losses, with the help "
            "of up to a third of the "
            "clients. Losses carry noise of every client's own in both cases. Shared noise is for "
            "single local steps, "
            "J = 1.",
            "",
            "R rounds, J local steps, clip C, local rate η_ℓ (over the public 1/L) and ρ of χ² "
            "were chosen for every row "
            f"from (R, J) among {shown(LENGTHS)}, C among {shown(CLIPS)}, η_ℓ L among "
            f"{shown(RATES)} and ρ among "
            f"{shown(RHOS)}, by both accuracies on {len(TUNING)} other splits, the better half of "
            "the first one's on the "
            "second. Choosing is not accounted for: these are "
            "costs of privacy for somebody who knows good settings. Scaling of the columns is not "
            "private here either.",
            "",
            *lines,
            "",
            "Loss: of test records, the mean over clients, regulariser included. Cosine: between "
            "two models that were "
            "trained alike but for the noise; 1 without privacy. R rounds, J local steps, and so "
            "on: as chosen.",
            "",
            "## In words",
            "",
            *reading(rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    started = time.process_time()
    rows = []
    for case, epsilon, method in itertools.product(CASES, EPSILONS, METHODS):
        shared = method.endswith(SHARED)
        if shared and np.isinf(epsilon):
            continue
        setting = chosen(case, epsilon, method)
        for seed in REPORTED:
            run, again = (measure(case, epsilon, setting, seed, shared, other) for other in (0, 1))
            assert run.spent <= epsilon
            about = (
                case.name,
                epsilon,
                method,
                seed,
                run.mean,
                run.worst,
                run.loss,
                cosine(run.x, again.x),
                run.spent,
            )
            rows.append((*about, *setting))
        print(
            f"[{time.process_time() - started:4.0f} s] {case.name}, ε = {epsilon:g}, {method}: "
            f"{setting}",
            flush=True,
        )
    write_file(
        HERE / "differential.csv",
        csv_text([dict(zip(HEAD, row, strict=True)) for row in rows], HEAD),
    )
    picture(rows, HERE / "differential.png")
    command = shlex.join(["python", "benchmarks/privacy/cost_of_privacy.py", *sys.argv[1:]])
    lines = table(rows)
    print("\n".join(lines))
    text = report(rows, lines, f"OMP_NUM_THREADS=1 {command}", time.process_time() - started)
    (HERE / "DIFFERENTIAL.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
