"""What the pictures say: names, headlines made from the numbers, and captions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scaffpd.experiments.synthetic import grids
from scaffpd.experiments.synthetic.settings import L2, RHO, SIGMA, TARGET, D, J, M, N, Setting
from scaffpd.experiments.synthetic.study import SHORT, Curve, Study
from scaffpd.experiments.synthetic.tables import cell, text

PROBLEM = f"Regression, χ² penalty, N = {N}, d = {D}, m = {M}, l2 = {L2:g}"
ENDS = f"Numbers: rounds to {text(TARGET)}. Runs end at rounding error; the shaded part of the axis is squeezed."
LABELS = {
    grids.SCAFF_PD: "Scaff-PD, untuned",
    grids.CONSTANTS: "Scaff-PD, best constants",
    grids.DRFA_: "DRFA, tuned",
    grids.AFL_: "AFL, tuned",
    grids.GDA: "GDA, tuned",
    grids.EXTRA: "extragradient, tuned",
    grids.APD: "APD, untuned",
    grids.APD_CONSTANTS: "APD, best constants",
    grids.MINIMAX: "minimax gradient, untuned",
}


def label(curve: Curve) -> str:
    """The name in a legend."""
    return LABELS.get(curve.label, curve.label)


def title(study: Study, figure: str) -> str:
    """The headline of a figure."""
    return TITLES[figure](study)


def caption(study: Study, figure: str) -> str:
    """What is shown, under the headline."""
    return f"{CAPTIONS[figure](study)} {ENDS}"


def span(curves: Iterable[Curve]) -> str:
    """Rounds to the target, from the fewest to the most."""
    cells = sorted({cell(curve) for curve in curves}, key=lambda c: (c.startswith(">"), int(c.lstrip("> "))))
    return cells[0] if len(cells) == 1 else f"{cells[0]} to {cells[-1]}"


def _versus(study: Study, settings: Iterable[Setting]) -> str:
    places = list(settings)
    ours, theirs = (span(study.find(s, name) for s in places) for name in (grids.SCAFF_PD, grids.DRFA_))
    return f"Scaff-PD is at ‖x − x*‖² ≤ {text(TARGET)} after {ours} rounds, tuned DRFA after {theirs}"


def _rho_caption(study: Study) -> str:
    return (
        f"{PROBLEM}, σ = {SIGMA:g}, J = {J} local steps. DRFA, tuned: the best of {_size(study)} pairs of rates, "
        "all clients in every round, full gradients; with longer local steps it is faster at first and stops farther "
        "from x*."
    )


def _sigma_caption(study: Study) -> str:
    return (
        f"{PROBLEM}, ρ = {RHO:g}, J = {J} local steps. DRFA and AFL (with local steps): the best of {_size(study)} "
        "pairs of rates for each σ, all clients in every round, full gradients. σ is how much clients differ."
    )


def _steps_title(study: Study) -> str:
    few, many = study.plan.local_steps[0], J
    hard = [cell(study.find(study.plan.hard, grids.SCAFF_PD, steps)) for steps in (few, many)]
    easy = [cell(study.find(study.plan.paper, grids.SCAFF_PD, steps)) for steps in (few, many)]
    rounds = f"{hard[0]} → {hard[1]} rounds for J = {few} → {many}; {easy[0]} → {easy[1]} on the paper's"
    return f"Local steps pay on badly scaled data: {rounds}"


def _steps_caption(study: Study) -> str:
    return (
        f"Scaff-PD. {PROBLEM}, σ = {SIGMA:g}, ρ = {RHO:g}. Left: one η_ℓ = {SHORT:g}/max L_i and η_g = 1 for all J "
        f"(dual step tuned). Middle, right: nothing tuned."
    )


def _scaled_title(study: Study) -> str:
    ours = cell(study.find(study.plan.hard, grids.SCAFF_PD))
    return f"Badly scaled features: Scaff-PD is at ‖x − x*‖² ≤ {text(TARGET)} after {ours} rounds, without tuning"


def _scaled_caption(study: Study) -> str:
    return (
        f"{PROBLEM}, columns times 10^U(−1, 1), σ = {SIGMA:g}, ρ = {RHO:g}; J = {J} for Scaff-PD, DRFA and AFL, no "
        f"local steps for others. Tuned, or best constants: of {_size(study)} configurations. FedAvg, SCAFFOLD, q-FFL "
        "and others solve another problem, whose optimum is not x*: left out."
    )


def _size(study: Study) -> int:
    return len(range(0, grids.SIZE, study.plan.stride))


TITLES: dict[str, Callable[[Study], str]] = {
    "rho": lambda study: _versus(study, study.plan.rho_settings),
    "heterogeneity": lambda study: _versus(study, study.plan.sigma_settings),
    "local_steps": _steps_title,
    "badly_scaled": _scaled_title,
}
CAPTIONS: dict[str, Callable[[Study], str]] = {
    "rho": _rho_caption,
    "heterogeneity": _sigma_caption,
    "local_steps": _steps_caption,
    "badly_scaled": _scaled_caption,
}
