r"""The rows of the decisive tables: every method with what it may choose, and the climb that
chooses it.

A row's choices lie on a lattice: value = start · step^k along every axis, k a whole number, between
natural ends (a tail is at most 1). The climb starts at k = 0, tries the neighbours of the best
point along every axis and goes on from the best of them, until no neighbour is better: what is
chosen has a tried value on either side, or is a natural end. Rounds are chosen with it, for
nothing: a run is scored at every stop. 100 rounds are everybody's budget, and the tables say who
would use more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scaffpd.algorithms import AFL, DRFA, QFFL, DeltaFL, FedAvg, FedProx, Scaffold, ScaffPD
from scaffpd.algorithms.steps import Fixed
from scaffpd.federation import Federation
from scaffpd.objectives import Average, ChiSquare

STOPS = (5, 10, 20, 50, 100)
MOST = 60  # points of one climb
Values = dict[str, float]
Point = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """start · step^k within [low, high]."""

    start: float
    step: float
    low: float = 0.0
    high: float = float("inf")

    def at(self, k: int) -> float | None:
        """The value, or `None` beyond a natural end."""
        value = self.start * self.step**k
        return value if self.low <= value <= self.high * (1 + 1e-9) else None


@dataclass(frozen=True)
class Found:
    """What a climb found: the values, their score with what came with it, and all points that were
    tried.

    `open` names the axes along which a neighbour was not tried, because the climb ran out of
    points.
    """

    values: Values
    score: float
    extra: Any
    tried: list[tuple[Values, float, Any]] = field(repr=False)
    open: tuple[str, ...] = ()


def climbed(
    axes: Mapping[str, Axis], score: Callable[[Values], tuple[float, Any]], most: int = MOST
) -> Found:
    """Climb a row's lattice from its middle until no neighbour scores more, or `most` points were
    tried.
    """
    tried: dict[Point, tuple[float, Any]] = {}

    def values(point: Point) -> Values:
        found = {name: axis.at(k) for (name, axis), k in zip(axes.items(), point, strict=True)}
        return {} if None in found.values() else found  # type: ignore[return-value]

    def near(point: Point) -> list[Point]:
        """Return the points one step away along one axis, one axis after the other."""
        all_ = [
            (*point[:k], step + s, *point[k + 1 :]) for k, step in enumerate(point) for s in (1, -1)
        ]
        return [other for other in all_ if values(other)]

    best: Point = (0,) * len(axes)
    new = [best]
    while new:
        tried |= {point: score(values(point)) for point in new}
        best = max(tried, key=lambda point: tried[point][0])  # the first of equals
        new = [point for point in near(best) if point not in tried][: max(0, most - len(tried))]
    missing = [other for other in near(best) if other not in tried]
    open_ = {
        name for other in missing for name, a, b in zip(axes, best, other, strict=True) if a != b
    }
    return Found(
        values(best),
        *tried[best],
        [(values(point), *found) for point, found in tried.items()],
        tuple(sorted(open_)),
    )


Make = Callable[[Values, Federation], Any]


@dataclass(frozen=True)
class Row:
    """A method that makes rounds.

    Attributes:
        name: in the table.
        axes: what it chooses, l2 first.
        make: the algorithm, from values and clients (whose constants its rates are factors on).
        after: rows whose choices its climb starts from, where those have been made.
    """

    name: str
    axes: dict[str, Axis]
    make: Make
    after: tuple[str, ...] = ()

    def starting(self, known: Mapping[str, Values]) -> Row:
        """The same with axes that start at what rows before it have chosen."""
        values = {name: value for row in self.after for name, value in known.get(row, {}).items()}
        return replace(
            self,
            axes={
                k: replace(axis, start=values.get(k, axis.start)) for k, axis in self.axes.items()
            },
        )


L2 = Axis(3e-5, 10**0.5, 1e-9)
RATE = Axis(1.0, 1.5)
RHO = Axis(0.1, 10**0.5)
SAMPLES = "by samples"
CLIENTS = "by clients"
COUNTED = {SAMPLES: "samples", CLIENTS: "uniform"}


def safe_rate(clients: Federation) -> float:
    """Return 1/max_i L_i."""
    return float(1 / clients.constants().smoothness.max())


def rows(local_steps: int, loss: str = "squared") -> dict[str, Row]:
    """All rows with rounds: the averaging methods under both weightings, the fair ones, Scaff-PD
    with both steps.

    The smoothness of softmax is bounded, not known, and its rates are sought from further up.
    """
    J = local_steps
    speed = Axis(10.0, 2.0) if loss == "softmax" else RATE

    def rate(v: Values, f: Federation) -> float:
        return v["rate"] * safe_rate(f)

    def prox(v: Values, f: Federation, weights: str) -> FedProx:
        smooth = 1 / safe_rate(f)
        mu = v["mu"] * smooth
        return FedProx(local_steps=J, mu=mu, weights=weights, local_rate=v["rate"] / (smooth + mu))

    def dual(kind: Any) -> Make:
        def make(v: Values, f: Federation) -> Any:
            own = kind(local_steps=J, local_rate=rate(v, f))
            return kind(
                local_steps=J,
                local_rate=own.local_rate,
                dual_rate=v["dual"] * own.automatic(f)["dual_rate"],
            )

        return make

    def constant(v: Values, f: Federation) -> ScaffPD:
        """σ = (1 − θ)/(θ μ_λ), as the paper's SC-SC setting has it, and τ = J η_ℓ."""
        objective = ChiSquare(v["rho"])
        local = rate(v, f)
        sigma = v["odds"] / objective.strong_convexity(len(f.names))
        steps = Fixed(tau=J * local, sigma=sigma, theta=1 / (1 + v["odds"]), local_rate=local)
        return ScaffPD(objective, local_steps=J, steps=steps)

    found = []
    for words, w in COUNTED.items():
        plain = {"l2": L2, "rate": speed}
        first = (f"FedAvg, {words}",)
        found += [
            Row(
                f"FedAvg, {words}",
                plain,
                lambda v, f, w=w: FedAvg(local_steps=J, local_rate=rate(v, f), weights=w),
            ),
            Row(
                f"FedProx, {words}",
                {**plain, "mu": Axis(0.03, 10**0.5)},
                lambda v, f, w=w: prox(v, f, w),
                first,
            ),
            Row(
                f"SCAFFOLD, {words}",
                plain,
                lambda v, f, w=w: Scaffold(local_steps=J, local_rate=rate(v, f), weights=w),
                first,
            ),
            Row(
                f"q-FFL, {words}",
                {**plain, "q": Axis(1.0, 3.0)},
                lambda v, f, w=w: QFFL(local_steps=J, local_rate=rate(v, f), q=v["q"], weights=w),
                first,
            ),
            Row(
                f"Δ-FL, {words}",
                {**plain, "tail": Axis(0.5, 2.0, 0.05, 1.0)},
                lambda v, f, w=w: DeltaFL(
                    local_steps=J, local_rate=rate(v, f), tail=v["tail"], weights=w
                ),
                first,
            ),
        ]
    both = {"l2": L2, "rate": speed, "dual": Axis(1.0, 3.0)}
    alike = (f"FedAvg, {CLIENTS}",)
    auto = "Scaff-PD, Auto"
    fixed = {"l2": L2, "rho": RHO, "rate": speed, "odds": Axis(0.3, 10**0.5)}
    found += [
        Row("AFL", both, dual(AFL), alike),
        Row("DRFA", both, dual(DRFA), alike),
        Row(
            "Scaff-PD, average", {"l2": L2}, lambda v, f: ScaffPD(Average(), local_steps=J), (auto,)
        ),
        Row(auto, {"l2": L2, "rho": RHO}, lambda v, f: ScaffPD(ChiSquare(v["rho"]), local_steps=J)),
        Row("Scaff-PD, Fixed", fixed, constant, (*alike, auto)),
    ]
    return {row.name: row for row in found}


ALONE = "alone"
ONE = "one model, average"
ONE_FAIR = "one model, χ²"
HELD = "one model, χ² on held-out rows"
TUNED = "FedAvg + fine-tuning"
DITTO = "Ditto"
OWN = "personal, average"
OWN_FAIR = "personal, χ²"
EXACT = (ALONE, ONE, ONE_FAIR, HELD, TUNED, DITTO, OWN, OWN_FAIR)
PULL = Axis(10.0, 10**0.5)  # κ of γ_i = κ/n_i, and N κ/n of Ditto's common γ
