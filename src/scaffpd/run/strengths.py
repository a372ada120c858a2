"""l2, the objective's strength and κ of a run, where its settings leave them out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from scaffpd.algorithms import Fair
from scaffpd.errors import InputError
from scaffpd.models import Linear
from scaffpd.numbers import several
from scaffpd.objectives import Average
from scaffpd.run.prepare import Prepared
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import TOL
from scaffpd.study.choosing import FOLDS, WORST, Choice, Folds, search, short
from scaffpd.study.coalitions import among
from scaffpd.study.joining import PATH
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import train

FOLDED = 2_000_000  # rows × columns up to which folds choose unasked
BUDGET = 300  # rounds of choosing


@dataclass(frozen=True)
class Choosing:
    """Choice of strengths by folds: the measure, and the number of rounds."""

    by: str = WORST
    budget: int = BUDGET

    def choice(self, config: RunConfig, prepared: Prepared) -> Choice:
        """Choose by folds of the training rows."""
        seed = config.training.seed
        rows, who = Folds.where_possible(prepared.train, prepared.model, prepared.names, seed)
        rows = replace(rows, device=config.training.device)
        goal = among(config.goal or Average(), who)
        free = "strength" in config.left_out
        l2 = None if "l2" in config.left_out else config.model.l2
        kappas = [short(rows.scale() * value) for value in PATH]
        if "kappa" not in config.left_out:
            kappas = [math.inf, float(config.model.kappa or math.inf)]
        return search(rows, [goal], l2, kappas, self.by, seed, self.budget, free)


def choosable(config: RunConfig, prepared: Prepared) -> bool:
    """Return whether folds choose unasked: of a table that is not too large, with enough rows."""
    enough = sum(len(y) >= FOLDS for _, y in prepared.train) >= min(2, len(prepared.train))
    return (
        _able(config, prepared)
        and bool(config.table)
        and bool(config.left_out - {"kappa"})
        and prepared.numbers <= FOLDED
        and enough
    )


def _able(config: RunConfig, prepared: Prepared) -> bool:
    return isinstance(prepared.model, Linear) and config.privacy is None


def strengthened(
    config: RunConfig, prepared: Prepared, choosing: Choosing | None = None
) -> tuple[RunConfig, Prepared, Choice | None]:
    """Fill in what settings leave out: by folds (`choosing`), or the usual values of a table."""
    able = _able(config, prepared)
    if choosing is not None and not able:
        raise InputError(
            "choose-not-linear",
            "--choose takes linear models without differential privacy, "
            "whose ε the folds would spend.",
        )
    if choosing is not None and not config.left_out:
        raise InputError(
            "nothing-to-choose",
            "--choose finds nothing to choose: leave --l2, --strength or --kappa out.",
        )
    if not able or not config.left_out or (choosing is None and not config.table):
        return config, prepared, None
    if choosing is None:
        choice = None
        filled = _usual(config, prepared)
    else:
        choice = choosing.choice(config, prepared)
        filled = _chosen(config, prepared, choice)
    model = replace(prepared.model, l2=filled.l2)
    prepared = replace(prepared, model=model, remarks=(*prepared.remarks, *filled.remarks))
    return config.with_strengths(filled.l2, filled.objective, filled.kappa), prepared, choice


class FilledIn(NamedTuple):
    """Strengths that the settings left out, and sentences on them."""

    l2: float
    objective: dict[str, object] | None
    kappa: float | None
    remarks: list[str]


def _chosen(config: RunConfig, prepared: Prepared, choice: Choice) -> FilledIn:
    """Take what folds have chosen."""
    goal = config.objective
    if "strength" in config.left_out and choice.objective.strengths is not None:
        goal = {**(goal or {}), choice.objective.parameter: choice.objective.strength}
    folded = len(choice.point.losses)
    sentence = choice.sentence
    if folded < len(prepared.names):
        whose = f"folds of the {several(folded, 'client')} with rows enough"
        sentence = sentence.replace("folds", whose, 1)
    # with a small budget no finite κ may have been tried
    return FilledIn(choice.l2, goal, choice.personal, [sentence])


def _usual(config: RunConfig, prepared: Prepared) -> FilledIn:
    """Take the usual strengths of a table.

    l2 = 0.3 d/n, at least 0.001: with as many columns as rows, 0.001 fits the noise of all of them.
    ρ is the standard deviation of L_i under the average model: one deviation worse off than the
    mean is about twice the weight.
    """
    l2 = config.model.l2
    goal = config.objective
    remarks = []
    if "l2" in config.left_out:
        n = sum(len(y) for _, y in prepared.train)
        l2 = max(1e-3, short(0.3 * prepared.train[0][0].shape[1] / n))
        remarks.append(f"l2 = {l2:g}, by the numbers of rows and columns.")
    scaled = goal is not None and goal["kind"] in ("ChiSquare", "Tilted")
    if "strength" in config.left_out and goal is not None and scaled:
        model = replace(prepared.model, l2=l2)
        cohort = Cohort(prepared.train, model, prepared.names, device=config.training.device)
        tol = 1e-4 if l2 > 0 else None
        found = train(Fair(Average()), cohort, 100, tol, progress=False).uninterrupted()
        rho = short(float(found.history.last_losses.std()))
        if rho > TOL:
            goal = {**goal, "rho": rho}
            remarks.append(
                f"ρ = {rho:g}, the standard deviation of the clients' losses "
                "under the average model."
            )
    return FilledIn(l2, goal, None, remarks)
