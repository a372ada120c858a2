"""`Linear`: f_i(x) = (1/m_i) Σ_j ℓ(⟨a_j, x⟩, y_j) + ½ Σ_k l2_k x_k², as users describe it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, count, real, shortened, unknown
from scaffpd.federation import Vector
from scaffpd.models import losses
from scaffpd.models.arrays import Array, check_range
from scaffpd.models.cox import COX, HAZARD, TIMES, CoxOracle, survival_targets
from scaffpd.models.glm import LinearOracle
from scaffpd.models.losses import BUILT_IN, Loss, Poisson, Softmax, Squared, check_loss, loss_named
from scaffpd.models.oracle import ClientData, Oracle
from scaffpd.models.ordinal import DISTANCE, ORDINAL, TERMS, chances, residuals, terms
from scaffpd.models.periods import at_risk, person_periods
from scaffpd.models.point import Ridge
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.risk_sets import EFRON, TIES
from scaffpd.models.rows import RowsOracle
from scaffpd.models.samples import Ragged, StackedSamples, stack
from scaffpd.models.weighted_loss import Weighted
from scaffpd.numbers import AUTO as AUTO

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
FLAT = 1e-6  # ridge of an intercept: it changes nothing, and the certificate needs one everywhere


class Coefficients(NamedTuple):
    """Parameters of a linear model in their natural shapes."""

    weights: NDArray[np.float64]
    intercept: NDArray[np.float64] | None


@dataclass(frozen=True)
class Linear:
    """Description of a linear model; bind it to data with a `Cohort`.

    Args:
        loss: "squared" (one or several target columns), "logistic" (labels 0/1), "softmax" (labels
            0, 1, …), "poisson" (counts, with mean e^z: f_i is half the mean deviance above the
            client's own optimum), or of times to an event, with the columns time and event, and
            entry and weight if there are such: "cox", or "hazard", a logistic hazard in each of the
            `periods`, which is a sum over rows; or "ordinal", proportional odds of the ordered
            `classes` 0, 1, …, with the distances of cut points behind the features' coefficients.
        l2: the regulariser (l2/2)‖x‖² on *all* of x, the intercept included; the certificate rests
            on it. Or ½ Σ_k l2_k x_k²: one number for each feature, and a last one for the
            intercept, or one for each level of `periods`; the same for all outputs. "auto": by
            evidence, when a cohort is made; the intercept is then not shrunk.
        intercept: append a constant feature 1 (as the last one).
        classes: the number of softmax outputs, if the clients at hand might not have seen every
            class; with squared loss, labels 0, 1, … become one-hot targets of `classes` columns,
            and models are scored by accuracy.
        weighted: the last column of y is the weight of a row among its client's rows: f_i is a
            weighted mean.
        exposed: the last column of y, or the one before the weights, is the exposure E of a count
            (hours, persons; e^offset): its mean is E e^z. "poisson" only.
        dispersion: α of counts with the variance μ + αμ², the negative binomial's of size 1/α; 0 is
            Poisson's μ. "auto": by likelihood, when a cohort is made. "poisson" only.
        groups: the group of each feature, by name: features of one group share the strengths that
            the evidence sets. Without groups every feature is one; so is the intercept.
        ties: of events at the same time: "efron" or "breslow". "cox" only.
        entry: the third column of y is the time from which on a row is at risk.
        periods: their ends, of "hazard"; the first begins at 0. x ends with a level for each. With
            differential privacy they must not be chosen from rows.
    """

    loss: str = "squared"
    l2: float | Sequence[float] | str = 1e-3
    intercept: bool = False
    classes: int | None = None
    weighted: bool = False
    groups: Sequence[str] | None = None
    exposed: bool = False
    ties: str = EFRON
    entry: bool = False
    periods: Sequence[float] = ()
    dispersion: float | str = 0.0

    def __post_init__(self) -> None:
        if not self.timed:
            loss_named(self.loss)
        elif self.intercept:
            raise InputError(
                "cox-intercept",
                "Times to an event need no intercept: every client, or every period, has a "
                "baseline of its own.",
            )
        ends = tuple(real("Linear", "periods", end) for end in self.periods)
        object.__setattr__(self, "periods", ends)
        lengths = np.diff(self.periods, prepend=0.0)
        rise = bool(np.all((lengths > 0) & np.isfinite(lengths)))
        if (self.loss == HAZARD) != bool(self.periods) or not rise:
            raise InputError(
                "periods-not-rising",
                "Periods need ends that rise from above zero, such as 365 and 730; in Python they "
                'belong to Linear("hazard").',
            )
        if self.ties not in TIES:
            raise unknown("way with ties", self.ties, TIES)
        if self.entry and not self.timed:
            raise InputError(
                "entry-without-times", "Linear takes entries with times to an event only."
            )
        # tuples, so that models compare, hash and print by their numbers
        object.__setattr__(self, "l2", numbers("Linear", "l2", self.l2))
        if not all(0 <= l2 < float("inf") for l2 in each_of(self.l2)):
            raise InputError("l2-out-of-range", f"Linear needs a finite l2 >= 0, got {self.l2!r}.")
        if self.groups is not None:
            object.__setattr__(self, "groups", _names(self.groups))
        if not isinstance(self.intercept, bool):
            raise InputError(
                "intercept-not-boolean",
                f"Linear needs True or False for intercept, got {self.intercept!r}.",
            )
        if (self.exposed or self.dispersion) and self.loss != "poisson":
            raise InputError(
                "exposure-without-counts",
                "Linear takes exposures, and a dispersion, only with loss='poisson'.",
            )
        object.__setattr__(self, "dispersion", numbers("Linear", "dispersion", self.dispersion))
        if not all(0 <= alpha < float("inf") for alpha in each_of(self.dispersion)):
            raise InputError(
                "dispersion-out-of-range",
                f"Linear needs a finite dispersion >= 0, got {self.dispersion!r}.",
            )
        if self.ordered and not (self.classes and self.intercept is True):
            raise InputError(
                "ordinal-without-classes",
                'Linear("ordinal") needs the number of categories, classes=, three at least, and '
                "intercept=True; two labels are classification.",
            )
        if self.classes is None:
            return
        if count("Linear", "classes", self.classes) < 2:
            raise InputError("too-few-classes", f"Linear needs classes >= 2, got {self.classes}.")
        if self.timed or self.loss in ("logistic", "poisson"):
            have = "logistic loss has two" if self.loss == "logistic" else "there are none"
            raise InputError(
                "loss-without-classes",
                f"Linear takes classes with loss='softmax' or 'squared'; {have}.",
            )

    @property
    def timed(self) -> bool:
        """Whether targets are times to an event."""
        return self.loss in TIMES

    @property
    def ordered(self) -> bool:
        """Whether targets are categories in an order."""
        return self.loss == ORDINAL

    @property
    def outputs_each(self) -> int:
        """Parameters of a feature; 1 where targets say how many."""
        return 1 if self.ordered else self.classes or 1

    @property
    def called(self) -> str:
        """Its name in words."""
        if not self.timed:
            return loss_named(self.loss).called or self.loss
        if self.periods:
            return "logistic hazards of periods"
        return "Cox's model, risk sets within clients"

    @property
    def summed(self) -> bool:
        """Whether a client's loss is a sum over its rows; Cox's is one over sets of rows."""
        return self.loss != COX

    @property
    def smooth(self) -> bool:
        """Whether the curvature of a row's loss has a bound, unlike that of counts."""
        return self.timed or loss_named(self.loss).smooth

    @property
    def beyond(self) -> tuple[str, ...]:
        """Names of the coefficients behind those of the features."""
        cuts = range(1, (self.classes or 2) - 1) if self.ordered else ()
        return (
            *(f"cut {k} to {k + 1}" for k in cuts),
            *("intercept",) * self.intercept,
            *(f"until {end:g}" for end in self.periods),
        )

    def by_periods(self, data: ClientData, whole: bool = False) -> tuple[Linear, ClientData]:
        """Return a logistic model and its data: a row for every person and period at risk.

        `whole` keeps the periods without risk, as zeros: then a person has one row for each.
        """
        self._check_groups(data.features[0].shape[1])
        rows: list[Array] = []
        labels: list[Array] = []
        persons = survival_targets(data.labels, data.names, self.entry, self.weighted)
        for name, X, y in zip(data.names, data.features, persons, strict=True):
            there, seen = at_risk(y, self.periods)
            if not there.any():
                raise InputError(
                    "nobody-at-risk",
                    f"Client {name!r} has nobody at risk until the middle of a period: begin with "
                    "a shorter one, or leave the client out.",
                )
            who, when = np.nonzero(there | whole)
            rows.append(person_periods(np.asarray(X, dtype=np.float64), there, who, when))
            own = seen[who, when]
            labels.append(np.column_stack([own, y[who, 3]]) if self.weighted else own)
        model = replace(self, loss="logistic", periods=(), entry=False, groups=None)
        return model, replace(data, features=rows, labels=labels, columns=None)

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        if self.periods and data.features[0].ndim == 2:
            model, data = self.by_periods(data)
            return model.oracle(data, like)
        if self.ordered and data.features[0].ndim == 2:
            data = self._by_terms(data)
        features = data.features
        names = data.names
        device = data.device
        dtype = data.dtype or torch.float64
        if dtype not in DTYPES:
            raise InputError(
                "dtype-unsupported",
                "Linear computes in torch.float32 (features may be in torch.bfloat16) or "
                f"torch.float64, not in {dtype}.",
            )
        if features[0].ndim != 2:
            raise InputError(
                "samples-not-flat",
                f"Linear takes samples × features, but samples have the shape "
                f"{features[0].shape[1:]}: flatten them, or use Module.",
            )
        if self.loss == COX:
            return self._cox(data, dtype)
        classes = self.classes
        if like is not None and self.loss == "softmax":
            classes = like.dimension // (features[0].shape[1] + self.intercept)
        loss = self._loss()
        targets = loss.encode(data.labels, names, classes)
        y = torch.as_tensor(np.concatenate(targets.arrays), device=device)
        form = torch.float32 if dtype == torch.bfloat16 else dtype
        y = y.to(form) if y.is_floating_point() else y
        sizes = [len(a) for a in features]
        check_range(names, sizes, y.to(form), "target")
        if type(loss_named(self.loss)) not in BUILT_IN:
            check_loss(loss, y, targets.outputs)
        A = stack(features, self.intercept and not self.ordered, device, dtype)
        check_range(names, sizes, A, "feature")
        self._check_groups(features[0].shape[1] - len(self.beyond) * self.ordered)
        layout = Ragged(sizes, device, form)
        rows = StackedSamples(A, y, layout, 1 / layout.sizes[layout.owner].to(form))
        # A subclass of Squared may be any function: only this one has a closed form.
        kind = QuadraticOracle if type(loss) is Squared else LinearOracle
        ridge = self.ridge(A.shape[1], targets.outputs, device)
        oracle = kind(rows, loss, ridge, targets.outputs, names)
        oracle.held = like is not None
        return oracle

    def _by_terms(self, data: ClientData) -> ClientData:
        """Return rows of the terms that a person's loss is a sum of."""
        classes = self.classes or 0
        labels = [y[:, 0] if self.weighted and y.ndim == 2 else y for y in data.labels]
        known = Softmax().encode(labels, data.names, classes).arrays
        rows: list[Array] = []
        kinds: list[Array] = []
        for X, y, given in zip(data.features, known, data.labels, strict=True):
            own, kind = terms(np.asarray(X, dtype=np.float64), y[:, 0], classes)
            rows.append(own)
            w = np.repeat(given[:, -1:], TERMS) if self.weighted else None
            kinds.append(kind if w is None else np.column_stack([kind, w]))
        return replace(data, features=rows, labels=kinds, columns=None)

    def _check_groups(self, width: int) -> None:
        if self.groups is not None and len(self.groups) != width:
            raise InputError(
                "groups-length",
                f"Linear has {len(self.groups)} groups for {width} features; the intercept is not "
                "counted.",
            )

    def _cox(self, data: ClientData, dtype: torch.dtype) -> CoxOracle:
        """Bind Cox's model: columns are centred client by client."""
        if dtype != torch.float64:
            raise InputError(
                "unsupported-dtype", f"Cox's model computes in torch.float64, not in {dtype}."
            )
        self._check_groups(data.features[0].shape[1])
        y = np.concatenate(survival_targets(data.labels, data.names, self.entry, self.weighted))
        A = stack(data.features, False, data.device, dtype)
        sizes = [len(a) for a in data.features]
        check_range(data.names, sizes, A, "feature")
        for part in torch.split(A, sizes):
            # a constant column says nothing, and must not say rounding
            part -= torch.where(part.amax(0) == part.amin(0), part[0], part.mean(0))
        layout = Ragged(sizes, data.device, dtype)
        share = 1 / layout.sizes[layout.owner].to(dtype)
        rows = StackedSamples(A, torch.as_tensor(y, device=data.device), layout, share)
        return CoxOracle(rows, self.ties, self.ridge(A.shape[1], 1, data.device), data.names)

    def _loss(self) -> Loss:
        inner = loss_named(self.loss)
        if isinstance(inner, Poisson):
            # until it is settled, one is a guess as good as any
            alpha = 1.0 if isinstance(self.dispersion, str) else self.dispersion
            inner = type(inner)(alpha, self.exposed)
        if not (self.weighted or self.exposed):
            return inner
        return Weighted(inner, self.weighted, self.exposed)

    def parts(self, y: Array) -> tuple[Vector, Vector, Vector]:
        """Return targets, exposures and weights of mean one; ones where there are none."""
        ones = np.ones(len(y))
        exposure = np.asarray(y[:, 1], dtype=np.float64) if self.exposed else ones
        w = np.asarray(y[:, -1], dtype=np.float64) if self.weighted else ones
        own = y[:, 0] if self.weighted or self.exposed or self.timed else y
        return cast("Vector", own), exposure, w / (w.mean() or 1.0)

    def ridge(self, width: int, outputs: int, device: torch.device) -> Ridge:
        """Return the regulariser of an x with `width` features, the intercept among them."""
        if not isinstance(self.l2, tuple):
            return Ridge(0.0 if self.l2 == AUTO else float(self.l2))  # type: ignore[arg-type]
        each = fitted("Linear", "l2", self.l2, width, self.intercept)
        l2 = torch.tensor(each, dtype=torch.float64, device=device)
        return Ridge(l2.repeat_interleave(outputs))

    def widening(self, x: Tensor) -> tuple[float, Vector]:
        """Return R of a certificate (`algorithms/concordant.py`), and by how much more coordinates
        of x that are distances of cut points count by themselves; infinite if unknown.
        """
        rates = np.zeros(len(x))
        if self.loss == COX:
            return np.inf, rates
        loss = loss_named("logistic" if self.periods else self.loss)
        if self.ordered:
            cuts = slice(len(x) - len(self.beyond), len(x) - 1)
            z = x.double().cpu()[cuts, None]
            rates[cuts] = loss.widening(z, torch.full_like(z, DISTANCE))
        return losses.concordance(loss), rates

    def using(
        self,
        l2: float | Sequence[float] | None = None,
        strength: float | Sequence[float] | None = None,
    ) -> Linear:
        if strength is not None:
            raise InputError(
                "model-without-strength",
                "Linear is one model for all, without a strength: use Personal(model, strength).",
            )
        return self if l2 is None else replace(self, l2=l2)

    def rebound(self, oracle: Oracle, like: Oracle | None = None) -> Oracle:
        assert isinstance(oracle, RowsOracle)
        return oracle.using(
            self.ridge(oracle.rows.A.shape[1], oracle.outputs, oracle.rows.A.device)
        )

    def with_classes(self, labels: Sequence[Array]) -> Linear:
        """Return the model with its number of classes: a group of clients may not have all."""
        if self.loss != "softmax" or self.classes is not None:
            return self
        return replace(self, classes=max(2, 1 + max(int(np.max(y)) for y in labels)))

    def reshape(self, x: NDArray[np.float64] | Tensor, features: int) -> Coefficients:
        """Reshape a flat x to (features × outputs) weights and, if any, the outputs' offsets."""
        flat = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
        rows = count("Linear.reshape", "features", features) + len(self.beyond)
        if flat.ndim != 1 or flat.size == 0 or flat.size % rows:
            raise InputError(
                "point-length",
                f"x has shape {flat.shape}, which does not fit {features} features.",
            )
        table = flat.reshape(rows, -1)
        return Coefficients(table[:features], table[-1] if self.intercept else None)

    def predict(
        self, x: NDArray[np.float64] | Tensor, rows: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the expectation of every row, a count's mean; of times ⟨a_j, x⟩."""
        return self.means(self.outputs(x, rows))[:, 0]

    def means(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return expectations for outputs z; z itself for times."""
        return z if self.timed else loss_named(self.loss).mean(z)

    def row_losses(self, z: NDArray[np.float64], y: Array) -> tuple[Vector, Vector | None]:
        """Return the loss of every row with outputs z, and whether its label is right; `None` for
        numbers. Of counts with exposures y are rates, beside these.
        """
        loss = Softmax() if self.ordered else self._loss()
        loss = loss.inner if isinstance(loss, Weighted) else loss
        outputs = torch.from_numpy(np.ascontiguousarray(z))
        target = torch.from_numpy(np.asarray(loss.encode([y], ["rows"], self.classes).arrays[0]))
        hit = loss.correct(outputs, target)
        return loss.value(outputs, target).numpy(), None if hit is None else hit.double().numpy()

    def outputs(
        self, x: NDArray[np.float64] | Tensor, rows: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return ⟨a_j, x⟩ of every row, (rows × outputs); log P(y = k) of ordered categories."""
        if self.ordered:
            return chances(*self._brackets(x, rows))
        weights, intercept = self.reshape(x, rows.shape[1])
        z: NDArray[np.float64] = rows @ weights + (0.0 if intercept is None else intercept)
        return z

    def slopes(
        self, x: NDArray[np.float64] | Tensor, rows: NDArray[np.float64], y: Array
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return ∂ℓ/∂z and ∂²ℓ/∂z² at z = ⟨a_j, x⟩ of every row, each (rows × outputs)."""
        if self.ordered:
            return residuals(*self._brackets(x, rows), self.parts(y)[0])
        loss = self._loss()
        targets = torch.as_tensor(loss.encode([y], ["rows"], self.classes).arrays[0])
        z = torch.as_tensor(self.outputs(x, rows))
        return loss.residual(z, targets).numpy(), loss.bends(z, targets).numpy()

    def _brackets(
        self, x: NDArray[np.float64] | Tensor, rows: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return ⟨a_j, x⟩ + b of every row, and the distances of cut points."""
        weights, b = self.reshape(x, rows.shape[1])
        flat = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
        return rows @ weights[:, 0] + (0.0 if b is None else b[0]), flat[rows.shape[1] : -1]


def numbers(owner: str, name: str, value: object) -> float | tuple[float, ...] | str:
    """Return a number, a vector as a tuple of numbers, or "auto"; refuse anything else."""
    if isinstance(value, str) and value == AUTO:
        return value
    value = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    array = np.asarray(value, dtype=object)
    if array.ndim == 0:
        return real(owner, name, value)
    if array.ndim > 1 or array.size == 0:
        raise InputError(
            "not-a-vector",
            f"{owner} needs a number or a list of numbers for {name}, got {shortened(value)}.",
        )
    return tuple(real(owner, name, one) for one in array.tolist())


def each_of(value: float | Sequence[float] | str) -> Sequence[float]:
    """Return a vector's numbers, or one number as a vector; "auto" has none."""
    if isinstance(value, str):
        return ()
    return (value,) if isinstance(value, int | float) else value


def nearly_free(l2: float, features: int, levels: int = 1) -> list[float]:
    """Return l2 for every feature, and next to none for the intercept or the levels of periods."""
    return [l2] * features + [min(l2, FLAT)] * levels


def fitted(
    owner: str, name: str, value: float | Sequence[float], width: int, intercept: bool
) -> list[float]:
    """Return a strength for each of `width` features, the intercept included."""
    each = each_of(value)
    if not isinstance(value, Sequence):
        return [float(value)] * width
    if len(each) != width:
        last = " and the intercept" if intercept else ""
        raise InputError(
            f"{name}-length",
            f"{owner} has {len(each)} numbers for {name}, but there are {width - intercept} "
            f"features{last}.",
        )
    return list(each)


def _names(groups: object) -> tuple[str, ...]:
    found = list(groups) if isinstance(groups, Iterable) else []
    if isinstance(groups, str) or not found or not all(isinstance(name, str) for name in found):
        raise InputError(
            "groups-not-names", f"Linear needs a list of names for groups, got {shortened(groups)}."
        )
    return tuple(found)
