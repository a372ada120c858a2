"""`Task`: what is to be predicted. It reads targets, makes the model, scores it and names things.

Everything else asks the task: a new one is one file, and one line in `TASKS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.federation import ClientScores
from scaffpd.models import Linear
from scaffpd.numbers import NO_BREAK, NOTHING, plain

Matrix = NDArray[np.float64]
Texts = NDArray[np.object_]
Cells = NDArray[np.generic]  # numbers or places of labels
Answers: TypeAlias = Callable[[], Iterable[tuple[Matrix, Cells]]]  # outputs and targets
Pair: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64] | NDArray[np.int64]]
Scores: TypeAlias = dict[str, float | None]
EVERYONE = "all rows"  # in the place of a client or a group: all of them together
NEGLIGIBLE = 0.0005  # 0.05 points of accuracy, or this share of an error
# ties are rounded away from zero: sums in another order must not change the text
TIES = 1 + 1e-9


@dataclass(frozen=True)
class ScoreColumn:
    """A score, as tables show it."""

    title: str
    form: str = "share"  # "share" in percent, "decimal", or "unit" of the target
    label: bool = False  # of two labels, it is about the second
    screen: bool = True  # whether the terminal shows it, too

    def written(self, value: float | None) -> str:
        """Write a score as it is shown."""
        if value is None:
            return NOTHING
        if self.form == "unit":
            return plain(value)
        decimal = f"{value:.3f}".replace("-", "−")
        return decimal if self.form == "decimal" else f"{100 * value:.1f}{NO_BREAK}%"


@dataclass(frozen=True)
class Measure(ScoreColumn):
    """What clients are scored by: its direction, and how people read it."""

    form: str = "unit"
    name: str = "loss"  # in records, and of columns in CSV files
    upwards: bool = False  # whether more is better
    subject: str = "the loss of "  # what a sentence about clients begins with
    mean: str = "Typical error"  # how a mean over clients is introduced

    @property
    def points(self) -> bool:
        """Whether it is a share, read in percent."""
        return self.form == "share"

    @property
    def sign(self) -> int:
        """1 where more is better, −1 where less is."""
        return 1 if self.upwards else -1

    def brief(self, value: float) -> str:
        """Write a share as rows of a hundred, and anything else in its units."""
        return f"{100 * value:.0f}" if self.points else plain(value)

    def change(self, value: float | None) -> str:
        """Write a difference with its sign: points of shares."""
        if value is None:
            return NOTHING
        scaled = (100 * value if self.points else value) * TIES
        size = round(abs(scaled), 1) if self.points else abs(scaled)
        if not size:
            return "0.0" if self.points else "0"
        return ("+" if scaled > 0 else "−") + (f"{size:.1f}" if self.points else plain(size))

    def moved(self, before: float, after: float) -> str:
        """Say how it changes: in points of a share, or in percent of an error."""
        gain = self.sign * (after - before)
        scale = 1.0 if self.upwards else max(abs(before), abs(after))
        if abs(gain) < NEGLIGIBLE * scale:
            return "stays where it was"
        if self.points:
            return f"{'gains' if gain > 0 else 'loses'} {100 * abs(gain) * TIES:.1f} points"
        if self.upwards:
            return f"{'rises' if gain > 0 else 'falls'} by {abs(gain):.3f}"
        return f"{'falls' if gain > 0 else 'rises'} by {100 * abs(gain) / abs(before or 1.0):.1f} %"

    def step(self, gain: float) -> str:
        """Write a difference along a path, in a sentence."""
        points = f"{100 * gain * TIES:+.1f} points"
        return (points if self.upwards else f"{gain:+.3g} in error").replace("-", "−")


LOSS = Measure("loss")  # where a run has no other scores


RMSE = Measure("error (RMSE)", name="rmse", subject="the error of ")


class TargetColumn(Protocol):
    """A column without missing values, and what the operator should know about it (`note`).

    Its values are numbers, or places of `categories`, its different texts.
    """

    @property
    def name(self) -> str: ...
    @property
    def values(self) -> NDArray[np.float64] | NDArray[np.int32]: ...
    @property
    def categories(self) -> tuple[str, ...]: ...
    @property
    def note(self) -> str: ...


@dataclass(frozen=True)
class Target:
    """Target to predict."""

    task: Task
    # the place of each row's label in `labels`; without labels the numbers
    values: NDArray[np.float64] | NDArray[np.int64] = field(repr=False)
    labels: tuple[int, ...] | tuple[str, ...] = ()  # sorted: whole numbers or texts
    note: str = ""  # what the operator should know about it


@dataclass(frozen=True)
class ScoreRow:
    """Scores of one model on the held-out rows of one client, of one group, or of all; or a point
    of a curve about them.
    """

    model: str = field(default="", kw_only=True)
    by: str  # "client", or the column that makes groups
    group: str
    rows: int
    values: Scores

    def __post_init__(self) -> None:
        # JSON has neither NaN nor infinity
        known = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in self.values.items()
        }
        object.__setattr__(self, "values", known)


@dataclass(frozen=True)
class BinRow:
    """Rows of similar probability, and the share of them that came true, with its 95 % interval."""

    model: str = field(default="", kw_only=True)
    rows: int
    mean_probability: float
    base_rate: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOutScores:
    """What is measured on held-out rows beside every client's loss and measure."""

    scores: Sequence[ScoreRow] = field(default=(), repr=False)
    bins: Sequence[BinRow] = field(default=(), repr=False)
    curves: Sequence[ScoreRow] = field(default=(), repr=False)


class HeldOutRows(Protocol):
    """Rows that a model is judged on, client by client, and those that it was trained on.

    One unit of the encoded target is `unit`, and zero is `centre`. Scores are cut by `groups`: by
    column, its values in held-out rows, client by client.
    """

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def train(self) -> Sequence[Pair]: ...
    @property
    def test(self) -> Sequence[Pair]: ...
    @property
    def unit(self) -> float: ...
    @property
    def centre(self) -> float: ...
    @property
    def groups(self) -> Mapping[str, Sequence[Texts]]: ...


class Task:
    """One kind of target: numbers, unless class attributes and methods say otherwise."""

    name: ClassVar[str]
    measure: ClassVar[Measure] = RMSE
    losses: ClassVar[tuple[str, ...]] = ()  # of `Linear`, the usual one first
    labelled: ClassVar[bool] = False  # whether targets are labels
    scaled: ClassVar[bool] = False  # whether targets are trained on with deviation one
    exposed: ClassVar[bool] = False  # whether rows may have exposures
    counted: ClassVar[bool] = False  # whether clients count the measure while they find losses
    ordered: ClassVar[bool] = False  # whether labels have an order, which texts must be given
    roles: ClassVar[tuple[str, ...]] = ("target",)  # of the columns that make a target
    # scores, in the order of tables
    columns: ClassVar[Mapping[str, ScoreColumn]] = {
        "rmse": RMSE,
        "mae": ScoreColumn("mean |error|", "unit"),
        "r2": ScoreColumn("R²", "decimal"),
    }
    # words
    goal: ClassVar[str] = "target"
    adds_to: ClassVar[str] = "the target"  # what coefficients add to
    ratios: ClassVar[str] = ""  # what coefficients are logarithms of ratios of, if of any
    lost: ClassVar[str] = "loss"  # what sentences say is lower
    lower: ClassVar[str] = "loss"  # what tables say is lower, where people know a better unit
    serving: ClassVar[tuple[str, str]] = ("loss", "less")  # what tables show, and what is better
    # scores and their names, which stand in stars
    explained: ClassVar[str] = (
        "*R²*: the share of the target’s variance that is explained; 0 is as good as its mean, "
        "below 0 worse. *Error (RMSE)*: the root of the mean squared error; large errors count "
        "more than in the *mean |error|*."
    )
    unscored: ClassVar[str] = ""  # about clients that have no score

    def __repr__(self) -> str:
        return self.name

    @property
    def timed(self) -> bool:
        """Whether several columns make a target, of which the first is a time."""
        return len(self.roles) > 1

    def suits(self, column: TargetColumn) -> bool:
        """Return whether a column is read so where nobody says how."""
        return False

    def read(self, owner: str, column: TargetColumn) -> Target:
        """Read numbers; texts are refused."""
        texts = column.categories
        if texts:
            raise InputError(
                "texts-in-target",
                f"{owner} has {len(texts)} different texts such as {texts[0]!r} in its target "
                f"{column.name!r}: write numbers without units or thousands separators.",
            )
        return Target(self, np.asarray(column.values, dtype=np.float64), note=column.note)

    def loss(self, classes: int = 0, periods: Sequence[float] = ()) -> str:
        """Return the loss of so many labels, or of these periods."""
        return self.losses[0]

    def linear(
        self,
        l2: float | Sequence[float] | str,
        classes: int = 0,
        intercept: bool | None = None,
        *,
        periods: Sequence[float] = (),
        groups: Sequence[str] | None = None,
        weighted: bool = False,
        exposed: bool = False,
        entry: bool = False,
    ) -> Linear:
        return Linear(
            self.loss(classes, periods),
            l2,
            not self.timed if intercept is None else intercept,
            classes if classes > 2 else None,
            weighted,
            groups,
            exposed,
            entry=entry,
            periods=periods,
        )

    def said(self, periods: Sequence[float]) -> list[str]:
        """Say how targets are modelled, where that is not plain."""
        return []

    def client_score(self, model: Linear, z: Matrix, y: Cells, unit: float) -> float:
        """Return the measure of a client from the outputs z of its rows with targets y: RMSE."""
        own, exposure, w = model.parts(np.asarray(y))
        errors = exposure[:, None] * model.means(z) - own.reshape(len(z), -1)
        return float(unit * np.sqrt(np.mean(w * (errors**2).sum(1))))

    def client_scores(
        self,
        model: Linear,
        found: ClientScores,
        unit: float,
        answers: Answers,
    ) -> Matrix:
        """Return every client's measure; `answers` has outputs and targets. Of periods clients have
        counted rows, not pairs.
        """
        if self.counted and not model.periods:
            return found.score
        return np.array([self.client_score(model, z, y, unit) for z, y in answers()])

    def answers(self, model: Linear, z: Matrix) -> tuple[Cells, Matrix]:
        """Turn outputs into numbers, or indices of labels with the probability of each."""
        return model.means(z)[:, 0], np.empty((len(z), 0))

    def row_scores(self, y: Cells, guess: Cells, shares: Matrix, labels: int) -> Scores:
        """Score predictions of some rows; `labels` is how many there are at least. Of numbers these
        are RMSE, mean absolute error and R² = 1 − Σ(y − ŷ)²/Σ(y − ȳ)².
        """
        true = y.astype(np.float64)
        error = true - guess.astype(np.float64)
        spread = float(((true - true.mean()) ** 2).sum())
        return {
            "rmse": float(np.sqrt((error**2).mean())),
            "mae": float(np.abs(error).mean()),
            "r2": 1 - float((error**2).sum()) / spread if spread > 0 else None,
        }

    def by_group(
        self,
        y: Cells,
        guess: Cells,
        shares: Matrix,
        values: Texts,
        groups: Iterable[str],
        by: str = "client",
    ) -> Iterator[ScoreRow]:
        """Score the rows of every group, and all rows last."""
        labels = 1 + int(max(y.max(initial=1), guess.max(initial=1))) if self.labelled else 0
        parts = [(group, np.flatnonzero(values == group)) for group in groups]
        for group, rows in [*parts, (EVERYONE, np.arange(len(y)))]:
            found = self.row_scores(y[rows], guess[rows], shares[rows], labels)
            yield ScoreRow(by, group, len(rows), found)

    def judged(self, model: Linear, own: Sequence[Matrix], rows: HeldOutRows) -> HeldOutScores:
        """Score a model, given by every client's parameters, client by client and by groups."""
        outputs = [model.outputs(x, X) for x, (X, _) in zip(own, rows.test, strict=True)]
        guess, shares = self.answers(model, np.concatenate(outputs))
        split = [model.parts(np.asarray(y)) for _, y in rows.test]
        y, exposure = (np.concatenate([part[k] for part in split]) for k in (0, 1))
        if not self.labelled:
            y = y.astype(np.float64) * rows.unit + rows.centre
            guess = (guess.astype(np.float64) * rows.unit + rows.centre) * exposure
        owner = np.repeat(np.array(rows.names, dtype=object), [len(y) for _, y in rows.test])
        scores = [*self.by_group(y, guess, shares, owner, dict.fromkeys(owner))]
        for by, cells in rows.groups.items():
            values = np.concatenate(cells)
            scores += self.by_group(y, guess, shares, values, sorted(set(values)), by)
        return HeldOutScores(scores, self.bins(y, guess, shares))

    def bins(self, y: Cells, guess: Cells, shares: Matrix) -> Sequence[BinRow]:
        """Hold probabilities against what came true; numbers have none."""
        return ()

    def chances(
        self,
        model: Linear,
        own: Sequence[Matrix],
        risks: Matrix,
        hazards: Sequence[tuple[float, float] | None],
    ) -> dict[float, Matrix] | None:
        """Return the chance of every row to survive a time; `None` where targets are no times.

        Args:
            model: what was trained.
            own: the parameters of every row's model.
            risks: what was predicted.
            hazards: of every row's client, the cumulative hazard until a time, and that time.
        """
        return None

    def served(self, loss: float, score: float | None) -> float:
        """Return what tables show of a loss and a score: `serving` names it."""
        return loss

    def gained(self, gain: float) -> float:
        """Return how much lower what `lower` names is where the loss is lower by this share."""
        return gain
