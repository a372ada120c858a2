"""Which curves each figure shows, in panels; pictures and CSV files are both made from this."""

from __future__ import annotations

from dataclasses import dataclass

from scaffpd.experiments.synthetic import grids
from scaffpd.experiments.synthetic.study import FAN, SHORT_RATE, Curve, Study, fan, sampled


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it.
        curves: what it shows, what matters most last.
        far: where the axis ends.
    """

    title: str
    curves: tuple[Curve, ...]
    far: int

    @property
    def near(self) -> int:
        """Where the axis is cut: at a tenth."""
        return max(2, self.far // 10)


def rho(study: Study) -> list[Panel]:
    """Scaff-PD against DRFA as ρ varies."""
    labels = (*(fan(k) for k in FAN), sampled(), grids.DRFA_, grids.CONSTANTS, grids.SCAFF_PD)
    return [
        Panel(f"ρ = {setting.rho:g}", tuple(study.find(setting, label) for label in labels), study.plan.rounds)
        for setting in study.plan.rho_settings
    ]


def heterogeneity(study: Study) -> list[Panel]:
    """The same and AFL as σ varies."""
    labels = (grids.DRFA_, grids.AFL_, grids.CONSTANTS, grids.SCAFF_PD)
    return [
        Panel(f"σ = {setting.sigma:g}", tuple(study.find(setting, label) for label in labels), study.plan.rounds)
        for setting in study.plan.sigma_settings
    ]


def local_steps(study: Study) -> list[Panel]:
    """Scaff-PD as J varies."""
    plan = study.plan
    return [
        Panel(title, tuple(study.find(setting, name, J) for J in plan.local_steps), plan.limit(setting))
        for title, setting, name in (
            ("One short local rate", plan.paper, SHORT_RATE),
            ("Automatic steps", plan.paper, grids.SCAFF_PD),
            ("Badly scaled, automatic steps", plan.hard, grids.SCAFF_PD),
        )
    ]


def badly_scaled(study: Study) -> list[Panel]:
    """Everybody on badly scaled data."""
    plan = study.plan
    order = (
        *(grids.EXTRA, grids.GDA, grids.DRFA_, grids.AFL_, grids.APD_CONSTANTS, grids.APD, grids.MINIMAX),
        *(grids.CONSTANTS, grids.SCAFF_PD),
    )
    return [Panel("", tuple(study.find(plan.hard, name) for name in order), plan.scaled_rounds)]


FIGURES = {"rho": rho, "heterogeneity": heterogeneity, "local_steps": local_steps, "badly_scaled": badly_scaled}
