r"""Rows of the decisive tables without rounds: optima, clients alone, and models of one's own, in
closed form.

A row maps a partition, a part of its rows and values to models, their losses, a duality gap, and
whether every client has a model of its own. `by_other_means` solves the personal, fair row without
any decomposition, as a check.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from experiments.images import rows as table
from experiments.images.divisions import RUNS, Division, Work, line, shown, worst
from experiments.images.rows import L2, PULL, RHO, Axis, Values, climbed
from experiments.images.spectral import Quadratics, equilibrium, own_models, saddle, with_weights
from scaffpd.objectives import Average, ChiSquare

ALONE_L2 = tuple(10**k for k in np.arange(-7, 2.1, 0.5).tolist())
CHECKED = 2  # partitions on which personal rows are solved for by other means as well
Fitted = Callable[
    [Division, str, Values], tuple[Any, Any, float, bool]
]  # model(s), losses, gap, whether own models


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
    return (
        own_models(division.spectra(part), v["l2"], division.common_pull(v["pull"], part), X),
        losses,
        gap,
        True,
    )


def personal(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
    """Solve for the losses of the clients' own models, γ_i = κ/n_i; χ² where there is a ρ."""
    s = division.spectra(part)
    pull = division.pull(v["kappa"], part)
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
            found.append(
                worst(
                    division.own_accuracy(model, "held")
                    if own
                    else division.accuracy(model, "held")[0]
                )
            )
        return float(np.mean(found)), None

    found = climbed(axes, score)
    work.append(
        "tuning.csv",
        ("row", "values", "rounds", "worst_20", "chosen"),
        [(name, shown(v), "", f"{100 * s:.4f}", int(v == found.values)) for v, s, _ in found.tried],
    )
    write_exact(work, name, found.values, fit, "".join(f" open:{axis}" for axis in found.open))
    return found


def write_exact(
    work: Work, name: str, values: Values, fit: Fitted, more: str = "", few: int | None = None
) -> None:
    """Solve for a row on every partition (or on a few of them) and write the lines."""
    lines = []
    for division in work.divisions[:few]:
        begin = time.perf_counter()
        model, losses, gap, own = fit(division, "all", values)
        parts = (
            [division.own_accuracy(model, p) for p in ("test", "all")]
            if own
            else division.accuracy(model, "test", "all")
        )
        seconds = time.perf_counter() - begin
        lines.append(line(name, division, *parts, losses, gap, "", seconds, shown(values) + more))
    work.append("runs.csv", RUNS, lines)


def alone(work: Work) -> None:
    """Every client's own ridge regression with an l2 of its own choice."""
    lines = []
    for division in work.divisions:
        work.check()
        begin = time.perf_counter()
        N = len(division.rows["all"])
        zero = division.F.new_zeros(division.F.shape[1], division.classes)

        def models(
            part: str, l2: float, division: Division = division, zero: Tensor = zero, N: int = N
        ) -> Tensor:
            return own_models(division.spectra(part), l2, zero.new_zeros(N), zero)

        held = np.array([division.own_accuracy(models("fit", l2), "held") for l2 in ALONE_L2])
        pick = np.array(
            [int(np.median(np.flatnonzero(h == h.max()))) for h in held.T]
        )  # of equals the middle one
        tested = np.zeros(N)
        fitted = np.zeros(N)
        for k in set(pick.tolist()):
            U = models("all", ALONE_L2[k])
            for out, part in ((tested, "test"), (fitted, "all")):
                out[pick == k] = division.own_accuracy(U, part)[pick == k]
        chosen = " ".join(f"{ALONE_L2[k]:.0e}" for k in pick)
        lines.append(
            line(
                table.ALONE,
                division,
                tested,
                fitted,
                None,
                0.0,
                "",
                time.perf_counter() - begin,
                f"l2 {chosen}",
            )
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
            axes = {
                k: replace(axis, start=chosen[table.OWN].get(k, axis.start))
                for k, axis in axes.items()
            }
        chosen[name] = exact_row(work, name, axes, fit).values
        if name == table.OWN_FAIR:
            write_exact(work, f"{name} (other means)", chosen[name], by_other_means, few=CHECKED)


def by_other_means(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
    """The personal, fair row without any decomposition: normal equations, Cholesky, and L-BFGS on
    max_λ.
    """
    objective = ChiSquare(v["rho"])
    pull = division.pull(v["kappa"], part)
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
        return torch.stack(values), torch.stack(
            [g * (X - u) for u, (_, _, _, g, _) in zip(own, stored, strict=True)]
        )

    def value(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        F, G = envelope(torch.from_numpy(x).to(pull).view(shape))
        losses = F.cpu().numpy()
        lam = torch.from_numpy(objective.maximizer(losses)).to(pull)
        return objective.support(losses), torch.tensordot(lam, G, 1).flatten().cpu().numpy()

    options = {"maxiter": 300, "maxfun": 350, "ftol": 1e-13, "gtol": 1e-9}
    found = minimize(value, np.zeros(shape.numel()), jac=True, method="L-BFGS-B", options=options)
    X = torch.from_numpy(found.x).to(pull).view(shape)
    return torch.stack(models(X)), envelope(X)[0].cpu().numpy(), float("nan"), True
