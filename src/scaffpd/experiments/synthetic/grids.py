r"""Who competes, and the same number of configurations for everybody that has something to tune: `SIZE`.

- DRFA and AFL: η_ℓ = 2^−k / max_i L_i for k = 0 and for k = 4, 4.5 … 13; dual rate 0.01, 0.1 or 1 times the automatic
  one for that η_ℓ. As published, the server averages the clients' models (server rate 1), every client takes part in
  every round, and gradients are full: nothing but drift stands in their way.
- DRFA, server rate free: η_ℓ = 2^−k / max_i L_i, k = 4, 5 … 13; server rate η_g such that η_g J η_ℓ is 0.5, 1 or 2
  times 1/max_i L_i; dual rate 1 or 10 times the automatic one. Not DRFA as published: with small η_ℓ it becomes GDA.
- GDA, extragradient: τ = 2^k / (2 max_i L_i), k = −2, −1.5 … 2.5; σ = 10^k times the automatic one for that τ,
  k = −2, −1 … 3 (with χ² penalty, a large σ is the best response).
- Scaff-PD and APD with constants: η_ℓ = 1/max_i L_i; τ = η_g J η_ℓ with η_g = 0.5, 0.7, 1, 1.4, 2 or 2.8 (J = 1 for
  APD); σ = 10^k times the automatic one of GDA, k = −2, −1 … 2; θ = 0 or 1.

Scaff-PD, APD (accelerated primal-dual: Scaff-PD without local steps) and minimax gradient have nothing to tune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from scaffpd.algorithms import (
    AFL,
    DRFA,
    AcceleratedPrimalDual,
    Extragradient,
    GradientDescentAscent,
    MinimaxGradient,
    ScaffPD,
)
from scaffpd.experiments.synthetic.settings import Bench
from scaffpd.steps import Fixed

SIZE = 60
HALVINGS = (*sorted((k / 2 for k in range(8, 27)), key=lambda k: abs(k - 10)), 0.0)  # likely ones first: quicker
DUAL = (0.1, 1.0, 0.01)  # the middle first: of equals, the first is chosen
FREE_HALVINGS, FREE_REACH, FREE_DUAL = tuple(range(4, 14)), (2.0, 1.0, 0.5), (1.0, 10.0)
CENTRAL = tuple(2.0 ** (k / 2) for k in range(5, -5, -1))
CENTRAL_DUAL = (1.0, 10.0, 0.1, 100.0, 0.01, 1000.0)
GLOBAL, SIGMAS, THETA = (2.8, 2.0, 1.4, 1.0, 0.7, 0.5), (1.0, 10.0, 0.1, 100.0, 0.01), (0.0, 1.0)

SCAFF_PD, CONSTANTS = "Scaff-PD", "Scaff-PD, constants"
DRFA_, FREE, AFL_ = "DRFA", "DRFA, server rate free", "AFL, local steps"
GDA, EXTRA = "GDA", "extragradient"
APD, APD_CONSTANTS, MINIMAX = "APD", "APD, constants", "minimax gradient"


@dataclass(frozen=True)
class Candidate:
    """A method at one point of its grid.

    Attributes:
        method: ready to run.
        knobs: where on the grid it is.
    """

    method: Any
    knobs: dict[str, float]


def candidates(name: str, bench: Bench, local_steps: int) -> list[Candidate]:
    """The grid of a method; a single point where there is nothing to tune."""
    return list(METHODS[name](bench, local_steps))


def drifting(base: DRFA | AFL, own: dict[str, float], halvings: float, dual: float) -> Candidate:
    """DRFA or AFL at one point of their grid; `own` are the automatic rates of `base`, the dual one ∝ 1/η_ℓ."""
    factor = 2.0**-halvings
    rates = {"local_rate": factor * own["local_rate"], "dual_rate": dual * own["dual_rate"] / factor}
    return Candidate(replace(base, **rates), {"local_rate": factor, "dual_rate": dual})


def _drifting(kind: type[DRFA] | type[AFL]) -> Callable[[Bench, int], Iterator[Candidate]]:
    def points(bench: Bench, local_steps: int) -> Iterator[Candidate]:
        base = kind(bench.objective, local_steps=local_steps)
        own = base.automatic(bench.cohort)
        for dual, halvings in product(DUAL, HALVINGS):
            yield drifting(base, own, halvings, dual)

    return points


def _free(bench: Bench, local_steps: int) -> Iterator[Candidate]:
    """The server rate η_g = reach/(J 2^−k); the automatic dual rate is ∝ 1/η_g too."""
    base = DRFA(bench.objective, local_steps=local_steps)
    own = base.automatic(bench.cohort)
    for halvings, reach, dual in product(FREE_HALVINGS, FREE_REACH, FREE_DUAL):
        server = reach * 2.0**halvings / local_steps
        point = drifting(replace(base, server_rate=server), own, halvings, dual / server)
        yield replace(point, knobs={"local_rate": 2.0**-halvings, "reach": reach, "dual_rate": dual})


def _central(kind: type[GradientDescentAscent] | type[Extragradient]) -> Callable[[Bench, int], Iterator[Candidate]]:
    def points(bench: Bench, _: int) -> Iterator[Candidate]:
        base = kind(bench.objective)
        own = base.automatic(bench.cohort)
        for server, dual in product(CENTRAL, CENTRAL_DUAL):
            rates = {"server_rate": server * own["server_rate"], "dual_rate": dual * own["dual_rate"] / server}
            yield Candidate(replace(base, **rates), {"server_rate": server, "dual_rate": dual})

    return points


def constants(
    bench: Bench, local_steps: int, local_rate: float, points: Iterable[tuple[float, float, float]]
) -> Iterator[Candidate]:
    """Scaff-PD with τ = η_g J η_ℓ, σ and θ from triples (η_g, σ / automatic, θ)."""
    automatic = GradientDescentAscent(bench.objective).automatic(bench.cohort)["dual_rate"]
    for eta, sigma, theta in points:
        steps = Fixed(eta * local_steps * local_rate, sigma * automatic, theta, local_rate)
        method = ScaffPD(bench.objective, local_steps=local_steps, steps=steps)
        yield Candidate(method, {"eta_g": eta, "sigma": sigma, "theta": theta})


def longest(bench: Bench) -> float:
    """η_ℓ = 1/max_i L_i."""
    return 1 / float(bench.cohort.constants().smoothness.max())


def _scaff_pd(bench: Bench, local_steps: int) -> Iterator[Candidate]:
    return constants(bench, local_steps, longest(bench), product(GLOBAL, SIGMAS, THETA))


def _apd(bench: Bench, _: int) -> Iterator[Candidate]:
    for point in constants(bench, 1, longest(bench), product(GLOBAL, SIGMAS, THETA)):
        yield replace(point, method=AcceleratedPrimalDual(bench.objective, steps=point.method.steps))


METHODS: dict[str, Callable[[Bench, int], Iterator[Candidate]]] = {
    SCAFF_PD: lambda bench, J: iter([Candidate(ScaffPD(bench.objective, local_steps=J), {})]),
    CONSTANTS: _scaff_pd,
    DRFA_: _drifting(DRFA),
    FREE: _free,
    AFL_: _drifting(AFL),
    GDA: _central(GradientDescentAscent),
    EXTRA: _central(Extragradient),
    APD: lambda bench, _: iter([Candidate(AcceleratedPrimalDual(bench.objective), {})]),
    APD_CONSTANTS: _apd,
    MINIMAX: lambda bench, _: iter([Candidate(MinimaxGradient(bench.objective), {})]),
}
