r"""One partition of images as the decisive tables see it: clients' rows, their losses, the accuracy
of models on them.

A client's training rows are all, or fit and held (a quarter), and fit is inner and aside. Choices
are made on held rows. Weights that answer held-out losses look at held rows where the model is for
all of them, at aside ones while choosing.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

from experiments.images.partition import like_training
from experiments.images.plans import Plan
from experiments.images.rows import Values
from experiments.images.spectral import Quadratics, Spectra, decompose, federation
from experiments.images.study import Ground
from experiments.tables import append_csv, read_csv
from scaffpd.federation import Federation
from scaffpd.models import Linear
from scaffpd.models.glm import LinearOracle
from scaffpd.training.cohort import Cohort, LocalChannel, Split
from scaffpd.training.metrics import worst_fifth

LOSSES = ("squared", "tct", "softmax")
HELD_OUT = 0.25
FIT_L2 = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
FIT_RHO = (0.03, 0.1, 0.5)
RUNS = (
    *(
        "row",
        "partition",
        "average",
        "worst_20",
        "best_20",
        "train_accuracy",
        "correlation",
        "certificate",
        "rounds",
    ),
    *("seconds", "chosen", "accuracies"),
)
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
        words = [
            plan.backbone,
            plan.kind,
            f"alpha-{self.alpha:g}",
            "" if self.loss == "squared" else self.loss,
        ]
        return "-".join([*filter(None, words), *(["balanced"] if plan.balanced else [])])


def worst(accuracy: Accuracy) -> float:
    """The mean over the worst fifth of the clients."""
    return float(worst_fifth(-accuracy) @ accuracy)


def halves(rows: NDArray[np.int64], seed: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All but a quarter, and that quarter."""
    order = np.random.default_rng(seed).permutation(len(rows))
    cut = max(1, round(HELD_OUT * len(rows)))
    return np.sort(rows[order[cut:]]), np.sort(rows[order[:cut]])


class Division:
    """One partition: its clients' rows, their losses, and the accuracy of models on them."""

    def __init__(self, here: Ground, F: Tensor, labels: Tensor, piece: Piece, seed: int) -> None:
        self.F = F
        self.labels = labels
        self.classes = here.classes
        self.loss = piece.loss
        self.seed = seed
        self.n, cut = len(here.train), here.cut(piece.alpha)
        parts = cut.parts(seed)
        tests = [p + self.n for p in like_training(parts, here.train, here.test, seed)]
        fit, held = zip(*(halves(p, [seed, i, 8]) for i, p in enumerate(parts)), strict=True)
        inner, aside = zip(*(halves(p, [seed, i, 9]) for i, p in enumerate(fit)), strict=True)
        named = {
            "all": parts,
            "test": tests,
            "fit": fit,
            "held": held,
            "inner": inner,
            "aside": aside,
        }
        self.rows = {
            name: [torch.from_numpy(np.ascontiguousarray(p)).to(F.device) for p in chosen]
            for name, chosen in named.items()
        }
        self._kept: dict[Any, Any] = {}

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
            pairs = [
                (A.cpu().numpy().astype(np.float32), y.cpu().numpy()) for A, y in self.pairs(part)
            ]
            model = Linear("softmax", l2=1.0, classes=self.classes)
            self._kept[key] = Cohort(
                pairs, model, device=self.F.device, dtype=torch.float32
            ).channel
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
        return np.array(
            [float(((self.F[p] @ u).argmax(1) == self.labels[p]).double().mean()) for p, u in pairs]
        )

    def held_losses(self, X: Tensor, part: str = "held") -> NDArray[np.float64]:
        """Every client's loss on the rows kept aside, without the regulariser."""
        index, owner, sizes = self._spans[part]
        scale, shift = (0.5, 1 / self.classes) if self.loss == "tct" else (1.0, 0.0)
        Y = torch.nn.functional.one_hot(self.labels[index], self.classes).to(X) - shift
        each = (self.F[index] @ X - Y).square().sum(1)
        out = torch.zeros(len(sizes), dtype=torch.float64, device=X.device).index_add_(
            0, owner, each
        )
        return (scale * out / sizes).cpu().numpy()

    def pull(self, kappa: float, part: str) -> Tensor:
        """γ_i = κ/n_i."""
        return kappa / torch.tensor(
            [len(p) for p in self.rows[part]], device=self.F.device, dtype=torch.float64
        )

    def common_pull(self, kappa: float, part: str) -> Tensor:
        """One γ for all: κ over the mean number of rows."""
        return torch.full_like(
            self.pull(kappa, part), kappa * len(self.rows[part]) / sum(map(len, self.rows[part]))
        )


@dataclass
class Work:
    """A piece under way: divisions, files, the deadline.

    Its files are not `compare`'s journal: several processes write them, and they are the tables
    that are published.
    """

    piece: Piece
    divisions: list[Division]
    folder: Path
    deadline: float = float("inf")

    def check(self) -> None:
        """Stop where the time is up."""
        if time.time() > self.deadline:
            raise OutOfTimeError

    @property
    def choosing(self) -> list[Division]:
        """The partitions that choices are made on."""
        return self.divisions[: self.piece.choosing]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder's files."""
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def append(self, file: str, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
        """Add lines to a CSV file, all or none of them."""
        with self.locked():
            append_csv(self.folder / file, header, lines)

    def there(self, file: str, *columns: str) -> set[tuple[str, ...]]:
        """What a file has already, by some of its columns."""
        return {tuple(row[name] for name in columns) for row in read_csv(self.folder / file)}


def shown(values: Values) -> str:
    """Such as "l2=3e-05 rate=1.5"."""
    return " ".join(f"{name}={value:.3g}" for name, value in values.items())


def line(
    name: str,
    division: Division,
    accuracy: Accuracy,
    fitted: Accuracy,
    losses: Any,
    certificate: float,
    rounds: Any,
    seconds: float,
    chosen: str,
) -> list[Any]:
    """One line of runs.csv, in per cent."""
    best = -worst(-accuracy)
    numbers = [100 * accuracy.mean(), 100 * worst(accuracy), 100 * best, 100 * fitted.mean()]
    each = " ".join(f"{100 * a:.2f}" for a in accuracy)
    return [
        name,
        division.seed,
        *(f"{v:.4f}" for v in numbers),
        f"{rank(losses, accuracy):.4f}",
        f"{certificate:.3g}",
        rounds,
        f"{seconds:.2f}",
        chosen,
        each,
    ]


def rank(losses: Any, accuracy: Accuracy) -> float:
    """Spearman's correlation of training loss and test accuracy over clients; −1 where losses know
    who is badly off.
    """
    if losses is None or not np.ptp(losses) > 0 or not np.ptp(accuracy) > 0:
        return float("nan")
    return float(spearmanr(losses, accuracy).statistic)
