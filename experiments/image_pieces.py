r"""Carry out one piece of the decisive tables: one data set, network, kind of features, α and loss; all rows.

Ten partitions, as the paper cuts them. What a row chooses (l2, rates, strengths, rounds) is chosen on a quarter of
every client's training images, by the mean of the worst fifth over the first three partitions; then it is trained on
all training images of all ten, and scored on test images. Clients alone choose their own l2. A piece is a folder:

    runs.csv      every row on every partition: accuracies, training accuracy, correlation, certificate, what was chosen
    tuning.csv    every point that was tried
    fit.csv       Scaff-PD by l2, rounds and ρ, and the optimum (rounds 0): who gains from fairness, and when
    held.csv      exact fair models whose λ answers training losses or losses on held-out rows, by l2 and ρ

Files grow row by row, and the same command goes on where the last one stopped.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import spearmanr
from torch import Tensor

from experiments import image_rows as table
from experiments.image_plans import Plan
from experiments.image_rows import L2, PULL, RHO, Axis, Row, Values, search
from experiments.image_study import Ground, hardware
from experiments.spectral import (
    Quadratics,
    Spectra,
    decompose,
    equilibrium,
    federation,
    fine_tuned,
    own_models,
    saddle,
    with_weights,
)
from scaffpd.algorithms import ScaffPD
from scaffpd.cohort import Cohort, LocalChannel, Split
from scaffpd.data import like_training
from scaffpd.federation import Federation
from scaffpd.metrics import worst_fifth
from scaffpd.models import Linear
from scaffpd.models.glm import LinearOracle
from scaffpd.objectives import Average, ChiSquare
from scaffpd.training import RoundInfo, Status, train

HERE = Path(__file__).parent
LOSSES = ("squared", "tct", "softmax")
HELD_OUT = 0.25
ALONE_L2 = tuple(10**k for k in np.arange(-7, 2.1, 0.5).tolist())
FIT_L2, FIT_RHO = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2), (0.03, 0.1, 0.5)
WEAK, ASIDE_RHO = 1e-3, (0.1, 0.5)  # l2 up to which held.csv goes, and its ρ
CHECKED = 2  # partitions on which personal rows are solved for by other means as well
RUNS = (
    *("row", "partition", "average", "worst_20", "best_20", "train_accuracy", "correlation", "certificate", "rounds"),
    *("seconds", "chosen", "accuracies"),
)
FIT = ("objective", "l2", "partition", "rounds", "average", "worst_20", "train_accuracy", "correlation", "largest")
HELD = ("weigh_by", "l2", "rho", "partition", "average", "worst_20", "train_accuracy", "correlation", "largest", "gap")
Accuracy = NDArray[np.float64]


class OutOfTimeError(Exception):
    """The deadline has passed; what is written stays."""


@dataclass(frozen=True)
class Piece:
    """What one folder holds.

    Attributes:
        plan: data set, network, features, partitions, local steps.
        alpha: of Dirichlet(α).
        loss: "squared" (one-hot targets), "tct" (targets e_y − 1/C, factor ½) or "softmax".
        choosing: on how many partitions choices are made.
        rows: names of the rows, or all of them; softmax has no exact ones.
        extras: whether fit.csv and held.csv are made.
        l2s: the regularisers of those.
    """

    plan: Plan
    alpha: float
    loss: str = "squared"
    choosing: int = 3
    rows: tuple[str, ...] | None = None
    extras: bool = True
    l2s: tuple[float, ...] = FIT_L2

    @property
    def name(self) -> str:
        """The folder."""
        plan = self.plan
        words = [plan.backbone, plan.kind, f"alpha-{self.alpha:g}", "" if self.loss == "squared" else self.loss]
        return "-".join([*filter(None, words), *(["balanced"] if plan.balanced else [])])


def worst(accuracy: Accuracy) -> float:
    """The mean over the worst fifth of the clients."""
    return float(worst_fifth(-accuracy) @ accuracy)


class Division:
    """One partition: its clients' rows, their losses, and the accuracy of models on them."""

    def __init__(self, here: Ground, F: Tensor, labels: Tensor, piece: Piece, seed: int) -> None:
        self.F, self.labels, self.classes, self.loss, self.seed = F, labels, here.classes, piece.loss, seed
        self.n, cut = len(here.train), here.cut(piece.alpha)
        parts = cut.parts(seed)
        tests = [p + self.n for p in like_training(parts, here.train, here.test, seed)]
        fit, held = zip(*(self._halves(p, [seed, i, 8]) for i, p in enumerate(parts)), strict=True)
        inner, aside = zip(*(self._halves(p, [seed, i, 9]) for i, p in enumerate(fit)), strict=True)
        named = {"all": parts, "test": tests, "fit": fit, "held": held, "inner": inner, "aside": aside}
        self.rows = {
            name: [torch.from_numpy(np.ascontiguousarray(p)).to(F.device) for p in chosen]
            for name, chosen in named.items()
        }
        self._kept: dict[Any, Any] = {}

    @staticmethod
    def _halves(rows: NDArray[np.int64], seed: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All but a quarter, and that quarter."""
        order = np.random.default_rng(seed).permutation(len(rows))
        cut = max(1, round(HELD_OUT * len(rows)))
        return np.sort(rows[order[cut:]]), np.sort(rows[order[:cut]])

    def pairs(self, part: str) -> list[tuple[Tensor, Tensor]]:
        """(features, labels) of every client."""
        return [(self.F[p], self.labels[p]) for p in self.rows[part]]

    def spectra(self, part: str) -> Spectra:
        """The decomposed squared losses, made once."""
        if part not in self._kept:
            targets = "tct" if self.loss == "tct" else "one-hot"
            self._kept[part] = decompose(self.pairs(part), self.classes, targets)
        found: Spectra = self._kept[part]
        return found

    def clients(self, part: str, l2: float) -> Federation:
        """The clients for the package's algorithms."""
        if self.loss != "softmax":
            return federation(Quadratics.shared(self.spectra(part), l2))
        key = part, "softmax"
        if key not in self._kept:
            pairs = [(A.cpu().numpy().astype(np.float32), y.cpu().numpy()) for A, y in self.pairs(part)]
            model = Linear("softmax", l2=1.0, classes=self.classes)
            self._kept[key] = Cohort(pairs, model, device=self.F.device, dtype=torch.float32).channel
        channel = self._kept[key]
        whole = channel.train.oracle
        oracle = LinearOracle(whole.rows, whole.loss, l2, whole.outputs, list(channel.names))
        split = Split(oracle, channel.train.counts, channel.train.shape, None)
        return Federation(LocalChannel(channel.names, "softmax", split, None))

    @cached_property
    def _spans(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Row numbers of all clients in a row, whose they are, and how many everybody has."""
        out = {}
        for name, rows in self.rows.items():
            sizes = torch.tensor([len(r) for r in rows], device=self.F.device)
            out[name] = torch.cat(rows), torch.repeat_interleave(sizes), sizes
        return out

    def accuracy(self, X: Tensor, *parts: str) -> list[Accuracy]:
        """By client, of one model on several parts."""
        X = X.view(self.F.shape[1], -1).to(self.F.dtype)
        right = dict[bool, Tensor]()
        out = []
        for part in parts:
            test = part == "test"
            span = slice(self.n, None) if test else slice(0, self.n)
            if test not in right:
                right[test] = ((self.F[span] @ X).argmax(1) == self.labels[span]).double()
            index, owner, sizes = self._spans[part]
            hits = torch.zeros(len(sizes), dtype=torch.float64, device=X.device)
            hits.index_add_(0, owner, right[test][index - (self.n if test else 0)])
            out.append((hits / sizes).cpu().numpy())
        return out

    def own_accuracy(self, U: Tensor, part: str) -> Accuracy:
        """By client, of models of their own (N, d, C)."""
        pairs = zip(self.rows[part], U, strict=True)
        return np.array([float(((self.F[p] @ u).argmax(1) == self.labels[p]).double().mean()) for p, u in pairs])

    def held_losses(self, X: Tensor, part: str = "held") -> NDArray[np.float64]:
        """Every client's loss on the rows kept aside, without the regulariser."""
        index, owner, sizes = self._spans[part]
        scale, shift = (0.5, 1 / self.classes) if self.loss == "tct" else (1.0, 0.0)
        Y = torch.nn.functional.one_hot(self.labels[index], self.classes).to(X) - shift
        each = (self.F[index] @ X - Y).square().sum(1)
        out = torch.zeros(len(sizes), dtype=torch.float64, device=X.device).index_add_(0, owner, each)
        return (scale * out / sizes).cpu().numpy()

    def pull(self, kappa: float, part: str) -> Tensor:
        """γ_i = κ/n_i."""
        return kappa / torch.tensor([len(p) for p in self.rows[part]], device=self.F.device, dtype=torch.float64)

    def common_pull(self, kappa: float, part: str) -> Tensor:
        """One γ for all: κ over the mean number of rows."""
        return torch.full_like(self.pull(kappa, part), kappa * len(self.rows[part]) / sum(map(len, self.rows[part])))


@dataclass
class Work:
    """A piece under way: divisions, files, the deadline."""

    piece: Piece
    divisions: list[Division]
    folder: Path
    deadline: float = float("inf")
    start: float = field(default_factory=time.perf_counter)

    def check(self) -> None:
        """Stop where the time is up."""
        if time.time() > self.deadline:
            raise OutOfTimeError

    @property
    def choosing(self) -> list[Division]:
        """The partitions that choices are made on."""
        return self.divisions[: self.piece.choosing]

    def append(self, file: str, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
        """Add lines to a CSV file, all or none of them."""
        path = self.folder / file
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerows([header, *lines] if fresh else lines)

    def there(self, file: str, *columns: str) -> set[tuple[str, ...]]:
        """What a file has already, by some of its columns."""
        path = self.folder / file
        if not path.exists():
            return set()
        with path.open(newline="", encoding="utf-8") as rows:
            return {tuple(row[name] for name in columns) for row in csv.DictReader(rows)}


def shown(values: Values) -> str:
    """Such as "l2=3e-05 rate=1.5"."""
    return " ".join(f"{name}={value:.3g}" for name, value in values.items())


def followed(row: Row, values: Values, clients: Federation, stops: Sequence[int], seed: int) -> tuple[Any, Any]:
    """Return x and λ at every stop (none once it has diverged), and the result of the run."""
    seen: dict[int, tuple[Tensor, Any]] = {}

    def look(moment: RoundInfo) -> None:
        if moment.rounds in stops:
            seen[moment.rounds] = moment.state.x, moment.state

    with np.errstate(all="ignore"):
        result = train(
            row.make(values, clients), clients, rounds=max(stops), seed=seed, progress=False, callbacks=[look]
        )
    if result.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    if result.status is Status.DIVERGED:
        seen = {r: v for r, v in seen.items() if r < result.rounds}
    elif result.rounds < max(stops):  # no step is taken any more
        last = torch.as_tensor(result.x, device=clients.start().device, dtype=clients.start().dtype)
        seen |= {r: (last, None) for r in stops if r > result.rounds}
    return seen, result


def line(
    name: str, division: Division, accuracy: Accuracy, fitted: Accuracy, losses: Any, certificate: float, rounds: Any,
    seconds: float, chosen: str,
) -> list[Any]:  # fmt: skip
    """One line of runs.csv, in per cent."""
    best = -worst(-accuracy)
    numbers = [100 * accuracy.mean(), 100 * worst(accuracy), 100 * best, 100 * fitted.mean()]
    each = " ".join(f"{100 * a:.2f}" for a in accuracy)
    return [
        name, division.seed, *(f"{v:.4f}" for v in numbers), f"{rank(losses, accuracy):.4f}", f"{certificate:.3g}",
        rounds, f"{seconds:.2f}", chosen, each,
    ]  # fmt: skip


def rank(losses: Any, accuracy: Accuracy) -> float:
    """Spearman's correlation of training loss and test accuracy over clients; −1 where losses know who is badly off."""
    if losses is None or not np.ptp(losses) > 0 or not np.ptp(accuracy) > 0:
        return float("nan")
    return float(spearmanr(losses, accuracy).statistic)


def chosen_values(work: Work) -> dict[str, Values]:
    """What the rows that are written have chosen."""
    found: dict[str, Values] = {}
    for name, words in work.there("runs.csv", "row", "chosen"):
        pairs = [word.split("=") for word in words.split() if "=" in word]
        found[name] = {key: float(value) for key, value in pairs}
    return found


def tuned(work: Work, row: Row) -> table.Found:
    """Choose a row's values and rounds on validation images, from where rows like it ended."""
    stops, row = work.piece.plan.stops, row.starting(chosen_values(work))

    def score(values: Values) -> tuple[float, Any]:
        work.check()
        found = np.full((len(work.choosing), len(stops)), -1.0)
        for i, division in enumerate(work.choosing):
            seen, _ = followed(row, values, division.clients("fit", values["l2"]), stops, division.seed)
            for k, stop in enumerate(stops):
                if stop in seen:
                    found[i, k] = worst(division.accuracy(seen[stop][0], "held")[0])
        mean = found.mean(0)
        return float(mean.max()), stops[int(mean.argmax())]

    return search(row.axes, score, work.piece.plan.tune)


def with_rounds(work: Work, row: Row) -> table.Found:
    """Tune a row, train it on every partition, write its lines."""
    found = tuned(work, row)
    rounds, chosen = found.extra, shown(found.values) + ("".join(f" open:{name}" for name in found.open))
    lines = []
    for division in work.divisions:
        begin, clients = time.perf_counter(), division.clients("all", found.values["l2"])
        seen, result = followed(row, found.values, clients, (rounds,), division.seed)
        x = seen[rounds][0] if rounds in seen else clients.start()
        accuracy, fitted = division.accuracy(x, "test", "all")
        losses = clients.evaluate(x, accuracy=False).loss
        lines.append(line(
            row.name, division, accuracy, fitted, losses, result.certificate, rounds, time.perf_counter() - begin,
            chosen,
        ))  # fmt: skip
    best = (found.values, rounds)
    work.append("tuning.csv", ("row", "values", "rounds", "worst_20", "chosen"), [
        (row.name, shown(v), r, f"{100 * s:.4f}", int((v, r) == best)) for v, s, r in found.tried
    ])  # fmt: skip
    work.append("runs.csv", RUNS, lines)
    return found


Fitted = Callable[[Division, str, Values], tuple[Any, Any, float, bool]]  # model(s), losses, gap, whether own models


def averaged(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
    """One model, all clients alike, or χ² where there is a ρ; exactly."""
    q = Quadratics.shared(division.spectra(part), v["l2"])
    found = saddle(q, ChiSquare(v["rho"]) if "rho" in v else Average())
    return found.X, q.losses(found.X, q.spectra.W @ found.X).cpu().numpy(), found.gap, False


def held_out(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
    """λ from losses on rows kept aside; the model then from all rows with that λ."""
    fit, held = ("fit", "held") if part == "all" else ("inner", "aside")
    q = Quadratics.shared(division.spectra(fit), v["l2"])
    found = equilibrium(q, ChiSquare(v["rho"]), lambda X: division.held_losses(X, held))
    whole = Quadratics.shared(division.spectra(part), v["l2"])
    X = with_weights(found, whole).X
    return X, whole.losses(X, whole.spectra.W @ X).cpu().numpy(), found.gap, False


def ditto(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
    """Solve for the average loss, then every client's own model, held to x by one γ for all."""
    X, losses, gap, _ = averaged(division, part, {"l2": v["l2"]})
    return own_models(division.spectra(part), v["l2"], division.common_pull(v["pull"], part), X), losses, gap, True


def personal(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
    """Solve for the losses of the clients' own models, γ_i = κ/n_i; χ² where there is a ρ."""
    s, pull = division.spectra(part), division.pull(v["kappa"], part)
    q = Quadratics.personal(s, v["l2"], pull)
    found = saddle(q, ChiSquare(v["rho"]) if "rho" in v else Average())
    losses = q.losses(found.X, s.W @ found.X).cpu().numpy()
    return own_models(s, v["l2"], pull, found.X), losses, found.gap, True


def exact_row(work: Work, name: str, axes: dict[str, Axis], fit: Fitted) -> table.Found:
    """Choose on validation images, solve on every partition, write the lines."""

    def score(v: Values) -> tuple[float, Any]:
        work.check()
        found = []
        for division in work.choosing:
            model, _, _, own = fit(division, "fit", v)
            found.append(worst(division.own_accuracy(model, "held") if own else division.accuracy(model, "held")[0]))
        return float(np.mean(found)), None

    found = search(axes, score)
    work.append("tuning.csv", ("row", "values", "rounds", "worst_20", "chosen"), [
        (name, shown(v), "", f"{100 * s:.4f}", int(v == found.values)) for v, s, _ in found.tried
    ])  # fmt: skip
    write_exact(work, name, found.values, fit, "".join(f" open:{axis}" for axis in found.open))
    return found


def write_exact(work: Work, name: str, values: Values, fit: Fitted, more: str = "", few: int | None = None) -> None:
    """Solve for a row on every partition (or on a few of them) and write the lines."""
    lines = []
    for division in work.divisions[:few]:
        begin = time.perf_counter()
        model, losses, gap, own = fit(division, "all", values)
        parts = [division.own_accuracy(model, p) for p in ("test", "all")] if own else division.accuracy(
            model, "test", "all"
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        lines.append(line(name, division, *parts, losses, gap, "", seconds, shown(values) + more))
    work.append("runs.csv", RUNS, lines)


def alone(work: Work) -> None:
    """Every client's own ridge regression with an l2 of its own choice."""
    lines = []
    for division in work.divisions:
        work.check()
        begin, N = time.perf_counter(), len(division.rows["all"])
        zero = division.F.new_zeros(division.F.shape[1], division.classes)

        def models(part: str, l2: float, division: Division = division, zero: Tensor = zero, N: int = N) -> Tensor:
            return own_models(division.spectra(part), l2, zero.new_zeros(N), zero)

        held = np.array([division.own_accuracy(models("fit", l2), "held") for l2 in ALONE_L2])
        pick = np.array([int(np.median(np.flatnonzero(h == h.max()))) for h in held.T])  # of equals the middle one
        tested, fitted = np.zeros(N), np.zeros(N)
        for k in set(pick.tolist()):
            U = models("all", ALONE_L2[k])
            for out, part in ((tested, "test"), (fitted, "all")):
                out[pick == k] = division.own_accuracy(U, part)[pick == k]
        chosen = " ".join(f"{ALONE_L2[k]:.0e}" for k in pick)
        lines.append(
            line(table.ALONE, division, tested, fitted, None, 0.0, "", time.perf_counter() - begin, f"l2 {chosen}")
        )
    work.append("runs.csv", RUNS, lines)


def exact_rows(work: Work) -> None:
    """All rows that have a closed form or an exact optimum."""
    done = {name for (name,) in work.there("runs.csv", "row")}
    chosen: dict[str, Values] = {}
    if table.ALONE not in done:
        alone(work)
    plans: list[tuple[str, dict[str, Axis], Fitted]] = [
        (table.ONE, {"l2": L2}, averaged),
        (table.ONE_FAIR, {"l2": L2, "rho": RHO}, averaged),
        (table.HELD, {"l2": L2, "rho": RHO}, held_out),
        (table.DITTO, {"l2": L2, "pull": PULL}, ditto),
        (table.OWN, {"l2": L2, "kappa": PULL}, personal),
        (table.OWN_FAIR, {"l2": L2, "kappa": PULL, "rho": RHO}, personal),
    ]
    for name, axes, fit in plans:
        if name in done:
            continue
        if name == table.OWN_FAIR and table.OWN in chosen:  # from where the average ended
            axes = {k: replace(axis, start=chosen[table.OWN].get(k, axis.start)) for k, axis in axes.items()}
        chosen[name] = exact_row(work, name, axes, fit).values
        if name == table.OWN_FAIR:
            write_exact(work, f"{name} (other means)", chosen[name], by_other_means, few=CHECKED)


def by_other_means(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
    """The personal, fair row without any decomposition: normal equations, Cholesky, and L-BFGS on max_λ."""
    objective, pull = ChiSquare(v["rho"]), division.pull(v["kappa"], part)
    scale, shift = (0.5, 1 / division.classes) if division.loss == "tct" else (1.0, 0.0)
    stored = []
    for (A, y), g in zip(division.pairs(part), pull, strict=True):
        Y = torch.nn.functional.one_hot(y, division.classes).to(A) - shift
        H = 2 * scale / len(A) * A.mT @ A
        H.diagonal().add_(v["l2"])
        b = 2 * scale / len(A) * A.mT @ Y
        K = H.clone()
        K.diagonal().add_(g)
        stored.append((H, b, scale / len(A) * Y.square().sum(), g, torch.linalg.cholesky(K)))
    shape = stored[0][1].shape

    def models(X: Tensor) -> list[Tensor]:
        return [torch.cholesky_solve(b + g * X, L) for _, b, _, g, L in stored]

    def envelope(X: Tensor) -> tuple[Tensor, Tensor]:
        own = models(X)
        values = [
            (u * (H @ u)).sum() / 2 - (b * u).sum() + k + g / 2 * (u - X).square().sum()
            for u, (H, b, k, g, _) in zip(own, stored, strict=True)
        ]
        return torch.stack(values), torch.stack([g * (X - u) for u, (_, _, _, g, _) in zip(own, stored, strict=True)])

    def value(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        F, G = envelope(torch.from_numpy(x).to(pull).view(shape))
        losses = F.cpu().numpy()
        lam = torch.from_numpy(objective.maximizer(losses)).to(pull)
        return objective.support(losses), torch.tensordot(lam, G, 1).flatten().cpu().numpy()

    options = {"maxiter": 300, "maxfun": 350, "ftol": 1e-13, "gtol": 1e-9}
    found = minimize(value, np.zeros(shape.numel()), jac=True, method="L-BFGS-B", options=options)
    X = torch.from_numpy(found.x).to(pull).view(shape)
    return torch.stack(models(X)), envelope(X)[0].cpu().numpy(), float("nan"), True


def fit_lines(work: Work) -> None:
    """Scaff-PD by l2, ρ and rounds, and the optimum, for fit.csv."""
    plan, done = work.piece.plan, work.there("fit.csv", "objective", "l2")
    objectives = {"average": Average()} | {f"{rho:g}": ChiSquare(rho) for rho in FIT_RHO}
    for l2 in work.piece.l2s:
        for label, objective in objectives.items():
            if (label, f"{l2:g}") in done:
                continue
            row = Row(label, {}, lambda v, f, o=objective: ScaffPD(o, local_steps=plan.local_steps))
            lines = []
            for division in work.divisions:
                work.check()
                clients = division.clients("all", l2)
                seen, _ = followed(row, {}, clients, plan.stops, division.seed)
                if work.piece.loss != "softmax":
                    best = saddle(Quadratics.shared(division.spectra("all"), l2), objective)
                    seen[0] = best.X.flatten(), best
                for rounds, (x, state) in seen.items():
                    accuracy, fitted = division.accuracy(x, "test", "all")
                    losses = clients.evaluate(x, accuracy=False).loss
                    largest = float(state.weights.max()) if state is not None else float("nan")
                    lines.append((
                        label, f"{l2:g}", division.seed, rounds,
                        *(f"{100 * t:.4f}" for t in (accuracy.mean(), worst(accuracy), fitted.mean())),
                        f"{rank(losses, accuracy):.4f}", f"{largest:.4f}",
                    ))  # fmt: skip
            work.append("fit.csv", FIT, lines)


def held_lines(work: Work) -> None:
    """Exact fair models whose λ answers training losses, or losses on held-out rows, for held.csv."""
    done = work.there("held.csv", "l2", "rho")
    for l2 in (l2 for l2 in work.piece.l2s if l2 <= WEAK):
        for rho in ASIDE_RHO:
            if (f"{l2:g}", f"{rho:g}") in done:
                continue
            lines = []
            for division in work.divisions:
                work.check()
                fit, whole = (Quadratics.shared(division.spectra(p), l2) for p in ("fit", "all"))
                objective = ChiSquare(rho)
                for kind in ("average", "training", "held-out"):
                    if kind == "held-out":
                        found = with_weights(equilibrium(fit, objective, division.held_losses), whole)
                    else:
                        found = saddle(whole, objective if kind == "training" else Average())
                    accuracy, fitted = division.accuracy(found.X, "test", "all")
                    losses = whole.losses(found.X, whole.spectra.W @ found.X).cpu().numpy()
                    lines.append((
                        kind, f"{l2:g}", f"{rho:g}", division.seed,
                        *(f"{100 * t:.4f}" for t in (accuracy.mean(), worst(accuracy), fitted.mean())),
                        f"{rank(losses, accuracy):.4f}", f"{found.weights.max():.4f}", f"{found.gap:.2e}",
                    ))  # fmt: skip
            work.append("held.csv", HELD, lines)


FIRST = ("FedAvg, by clients", "FedAvg, by samples", "SCAFFOLD, by clients", "SCAFFOLD, by samples", "Scaff-PD, Auto")


def steps(work: Work) -> Iterator[Callable[[], Any]]:
    """What a piece consists of, the most telling first."""
    piece, rows = work.piece, table.rows(work.piece.plan.local_steps, work.piece.loss)
    order = (*FIRST, *(name for name in reversed(rows) if name not in FIRST))
    wanted = [name for name in order if piece.rows is None or name in piece.rows]
    done = {name for (name,) in work.there("runs.csv", "row")}

    tuning = piece.loss != "softmax" and (piece.rows is None or table.TUNED in piece.rows) and table.TUNED not in done

    def row(name: str) -> Callable[[], Any]:
        def make() -> None:
            found = tuned(work, rows[name]) if name in done else with_rounds(work, rows[name])
            if name == FIRST[0] and tuning:
                fine_tuning(work, rows[name], found)

        return make

    if piece.loss != "softmax":
        yield lambda: exact_rows(work)
    yield from (row(n) for n in wanted if n in FIRST and (n not in done or (n == FIRST[0] and tuning)))
    if piece.extras:
        yield lambda: fit_lines(work)
        if piece.loss != "softmax":
            yield lambda: held_lines(work)
    yield from (row(name) for name in wanted if name not in FIRST and name not in done)


def fine_tuning(work: Work, row: Row, found: table.Found) -> None:
    """FedAvg as it was chosen, then gradient steps of every client's own; their number is chosen on validation."""
    starts: dict[tuple[int, str], Tensor] = {}

    def fit(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
        l2, rounds, key = found.values["l2"], found.extra, (division.seed, part)
        if key not in starts:
            seen, _ = followed(row, found.values, division.clients(part, l2), (rounds,), division.seed)
            starts[key] = seen[rounds][0].view(division.F.shape[1], -1)
        U = fine_tuned(division.spectra(part), l2, starts[key], max(1, round(v["steps"])))
        return U, None, float("nan"), True

    exact_row(work, table.TUNED, {"steps": Axis(16.0, 2.0, 1.0, 2.0**20)}, fit)


def carry_out(piece: Piece, here: Ground, device: str, out: Path, deadline: float = float("inf")) -> bool:
    """Do what is left of a piece; whether all of it is done now."""
    if not device.startswith("cuda"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1)))
    folder = out / piece.name
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    values = np.asarray(here.table.values, dtype=np.float64)
    F = torch.from_numpy(values).to(device) * here.table.scale
    labels = torch.from_numpy(np.concatenate([here.train, here.test]).astype(np.int64)).to(device)
    divisions = [Division(here, F, labels, piece, seed) for seed in range(piece.plan.seeds)]
    work = Work(piece, divisions, folder, deadline)
    complete, log = False, folder / "log.txt"
    try:
        for k, step in enumerate(steps(work)):
            work.check()
            step()
            with log.open("a", encoding="utf-8") as file:
                file.write(f"step {k}: {time.perf_counter() - begin:.1f} s\n")
        complete = True
    except OutOfTimeError:
        pass
    seconds = time.perf_counter() - begin
    about(piece, here, device, folder, complete, seconds)
    return complete


def commit() -> str:
    """The commit that runs: by git, or where the repository did not travel along by SCAFFPD_COMMIT."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return os.environ.get("SCAFFPD_COMMIT") or done.stdout.strip() or "unknown"


def about(piece: Piece, here: Ground, device: str, folder: Path, complete: bool, seconds: float) -> None:
    """Write how the numbers came about; seconds add up over the calls that it took."""
    path = folder / "about.json"
    before = json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.exists() else 0.0
    facts = {
        "piece": asdict(piece), "complete": complete, "seconds": round(before + seconds, 1),
        "hardware": hardware(device), "commit": commit(), "images": here.source,
        "features": list(here.table.values.shape),
        "precision": "features in TF32 on a GPU, all else in double precision",
    }  # fmt: skip
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
