r"""CIFAR-100 as the paper cuts it: alone, one model, one fair model, and models of one's own.

    python -m experiments.personal_images --data D --device cuda [--seeds 5] [--alpha 0.1] [--small]

Last features of an ImageNet network (`kind="penultimate"`), squared loss on one-hot labels, 20 clients by Dirichlet(α)
over classes of whom 30 % lose 70 % of their images, tested on test images in each client's own class proportions.
Everything is chosen on a quarter of every client's training images, by the accuracy of the worst fifth of the clients:
l2 of every row, κ of personal models, the objective of fair ones. The rows are then trained on all training images.

Candidates are compared by fits that are good enough to rank them: of one model in float32, from zero, to a gap of 1e-5;
of personal models in float64 to 1e-4, because rounding in float32 hides how their losses depend on x. l2 and κ of
personal models are searched one after the other: l2 at κ = 10, then κ at the best l2. Fair rows keep l2 and κ of the
average ones. Rows of the table are trained in float64 to 1e-6.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import scaffpd as sp
from experiments.image_plans import Cut, plan
from experiments.image_study import BACKBONE, LOADERS, Place, _fewer, hardware
from scaffpd.features import backbone, features
from scaffpd.metrics import half_interval, worst_fifth

L2S = {"alone": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "one": (1e-5, 3e-5, 1e-4), "personal": (1e-5, 3e-5, 1e-4)}
STRENGTHS, FIRST_STRENGTH = (10.0, 3.0, 30.0), 10.0
OBJECTIVES = (sp.CVaR(0.2), sp.CVaR(0.5), sp.ChiSquare(0.01), sp.ChiSquare(0.03), sp.ChiSquare(0.1))
PERSONAL_OBJECTIVES = (sp.CVaR(0.5), sp.ChiSquare(0.03), sp.ChiSquare(0.1))
VALIDATION, ROUNDS = 0.25, 60
Accuracy = NDArray[np.float64]
Pairs = list[tuple[Any, Any]]


def worst(accuracy: Accuracy) -> float:
    """The mean over the worst fifth of the clients."""
    return float(worst_fifth(-accuracy) @ accuracy)


class Trainer:
    """One partition: trains on some rows of every client and scores on others."""

    def __init__(
        self,
        train: Pairs,
        test: Pairs,
        classes: int,
        device: str,
        dtype: torch.dtype = torch.float64,
        tol: float = 1e-6,
    ) -> None:
        self.train, self.test, self.classes, self.device = train, test, classes, device
        self.dtype, self.tol = dtype, tol
        self._last: dict[bool, Any] = {}
        self._cohort: tuple[Any, Any] = None, None

    def shared(self, l2: float, objective: Any, strength: float | None = None) -> Accuracy:
        """One model for all, or with a strength models of the clients' own.

        In float64 the last solution of its kind starts it. In float32 that could already be within rounding error.
        """
        cohort, kind = self._prepared(l2, strength), strength is None
        x0 = self._last.get(kind) if self.dtype == torch.float64 else None
        found = sp.train(sp.fair(objective), cohort, rounds=ROUNDS, tol=self.tol, x0=x0, progress=False)
        self._last[kind] = found.x
        return cohort.evaluate(found.x, "test").accuracy

    def _prepared(self, l2: float, strength: float | None) -> Any:
        """The clients with this model; the last ones are kept, with their decompositions."""
        if self._cohort[0] != (l2, strength):
            model: Any = sp.Linear("squared", l2=l2, classes=self.classes)
            model = model if strength is None else sp.Personal(model, strength)
            cohort = sp.Cohort(self.train, model, device=self.device, dtype=self.dtype, test=self.test)
            self._cohort = (l2, strength), cohort
        return self._cohort[1]

    def alone(self, l2: float) -> Accuracy:
        """Every client's own ridge regression."""
        right = []
        for (A, y), (B, z) in zip(self.train, self.test, strict=True):
            X, T = (torch.as_tensor(np.asarray(rows), dtype=torch.float64, device=self.device) for rows in (A, B))
            Y = torch.nn.functional.one_hot(torch.as_tensor(y, device=self.device), self.classes).double()
            H = 2 / len(X) * X.T @ X + l2 * torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
            W = torch.linalg.solve(H, 2 / len(X) * X.T @ Y)
            right.append(float(((T @ W).argmax(1).cpu().numpy() == z).mean()))
        return np.array(right)


def halves(train: Pairs, seed: int) -> tuple[Pairs, Pairs]:
    """Every client's training rows, but for a quarter, and that quarter."""
    fit: Pairs = []
    held: Pairs = []
    for i, (X, y) in enumerate(train):
        order = np.random.default_rng([seed, i, 8]).permutation(len(y))
        cut = max(1, round(VALIDATION * len(y)))
        for part, rows in ((held, np.sort(order[:cut])), (fit, np.sort(order[cut:]))):
            part.append((X[rows], y[rows]))
    return fit, held


def best(options: Sequence[Any], score: Callable[[Any], Accuracy]) -> Any:
    """The option with the best worst fifth, by validation."""
    return max(options, key=lambda option: worst(score(option)))


def rows(train: Pairs, test: Pairs, classes: int, device: str, seed: int) -> dict[str, tuple[Accuracy, str]]:
    """Every row of the table: test accuracies by client, and what was chosen."""
    parts, final = halves(train, seed), Trainer(train, test, classes, device)
    quick, trial = Trainer(*parts, classes, device, torch.float32, 1e-5), Trainer(*parts, classes, device, tol=1e-4)
    average, out = sp.Average(), dict[str, tuple[Accuracy, str]]()

    lonely, tested = (np.array([one.alone(l2) for l2 in L2S["alone"]]) for one in (trial, final))  # (l2, clients)
    out["alone"] = tested[lonely.argmax(0), np.arange(len(train))], "l2 of its own at every client"

    l2 = best(L2S["one"], lambda l2: quick.shared(l2, average))
    out["one model, average"] = final.shared(l2, average), f"l2 = {l2:g}"
    fair = best(OBJECTIVES, lambda o: quick.shared(l2, o))
    out["one model, fair"] = final.shared(l2, fair), f"l2 = {l2:g}, {fair!r}"

    tried = cache(lambda k, s: trial.shared(k, average, s))
    k = best(L2S["personal"], lambda k: tried(k, FIRST_STRENGTH))
    s = best(STRENGTHS, lambda s: tried(k, s))
    out["personal, average"] = final.shared(k, average, s), f"l2 = {k:g}, κ = {s:g}"
    o = best(PERSONAL_OBJECTIVES, lambda o: trial.shared(k, o, s))
    out["personal, fair"] = final.shared(k, o, s), f"l2 = {k:g}, κ = {s:g}, {o!r}"
    return out


def main(words: Sequence[str] | None = None) -> None:
    """Run, and write all runs as CSV beside a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/personal"))
    given = parser.parse_args(words)
    start, chosen = time.perf_counter(), plan("cifar100", given.small)
    place = Place(given.data, given.out / "features", given.device)
    images = _fewer(LOADERS["cifar100"](place.data), chosen)
    table = features(
        images, backbone(BACKBONE, place.data, size=chosen.size), kind="penultimate", device=place.device,
        dtype="float32", precision="tf32" if given.device.startswith("cuda") else "float32",
    )  # fmt: skip
    labels = np.asarray(images.train.y), np.asarray(images.test.y)
    cut = Cut(table, *labels, chosen.clients, given.alpha)
    print(f"features after {time.perf_counter() - start:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        silos = cut(seed)
        for name, (accuracy, words_) in rows(silos.train, silos.test, len(images.classes), given.device, seed).items():
            found.append({
                "alpha": given.alpha, "seed": seed, "row": name, "mean": 100 * accuracy.mean(),
                "worst_fifth": 100 * worst(accuracy), "chosen": words_,
            })  # fmt: skip
            print(*found[-1].values(), f"{time.perf_counter() - start:.0f} s", flush=True)
        write(found, given.out / f"images-alpha{given.alpha:g}", hardware(given.device))


def write(found: list[dict[str, Any]], path: Path, machine: str) -> None:
    """Write all runs so far as CSV, and the table beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    path.with_name(f"{path.name}.md").write_text(markdown(found, found[0]["alpha"], machine))


def markdown(found: list[dict[str, Any]], alpha: float, machine: str) -> str:
    """The table: means over seeds, paired differences to the last row (95 % intervals), and what was chosen."""
    names = list(dict.fromkeys(row["row"] for row in found))
    values = {n: np.array([[r["mean"], r["worst_fifth"]] for r in found if r["row"] == n]) for n in names}
    seeds, last = len(values[names[0]]), values[names[-1]]
    lines = [
        "# Models of one's own, on images",
        "",
        f"CIFAR-100, 20 clients, Dirichlet({alpha:g}), {seeds} partitions, on {machine}; accuracy in per cent",
        "on test images that no run chose by. The grids of l2 and κ were narrowed once after the first "
        "partition had been seen.",
        "",
        f"`python -m experiments.personal_images --data D --device cuda --seeds {seeds} --alpha {alpha:g}`",
        "",
        f"| | mean | worst fifth | worst fifth of “{names[-1]}” minus this (95 %) |",
        "|---|---|---|---|",
    ]
    for name in names:
        mean, low = values[name].mean(0)
        apart = last[:, 1] - values[name][:, 1]
        half = half_interval(apart)
        words = "" if name == names[-1] else f"{apart.mean():+.2f} ± {half:.2f}"
        lines.append(f"| {name} | {mean:.1f} | {low:.1f} | {words} |")
    lines += ["", f"l2 of one model is one of {L2S['one']}, of personal models of {L2S['personal']}; κ of {STRENGTHS}."]
    lines += ["Chosen, partition by partition:", ""]
    lines += [f"- **{n}**: {'; '.join(r['chosen'] for r in found if r['row'] == n)}." for n in names[1:]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
