r"""Questions whose weights clients make themselves: neither L_i nor λ_i leaves a client.

Where ψ and Λ separate, ψ(λ) = Σ ψ_i(λ_i) on 0 ≤ λ_i ≤ κ_i and Σ λ_i = 1, the objective is

    max_{λ∈Λ} ⟨L, λ⟩ − ψ(λ) = min_ν ν + Σ φ_i(L_i − ν),    φ_i(t) = max_{0≤l≤κ_i} l t − ψ_i(l),

and λ_i = φ_i'(L_i − ν) is the client's own. Off the simplex there is no ν: it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation.border import summed
from scaffpd.federation.plans import Vector
from scaffpd.federation.questions import ClientSide, GradientsAt, Question, Reply, Shapes, Vectors
from scaffpd.objectives.base import OUT_OF_REACH, Objective

LEAST = 0.9  # of Σ λ_i with which vectors are summed: nobody has more than κ_i/LEAST of a sum
NUMBERS = 6  # of `OwnSums`, before gradient and Hessian


@dataclass(frozen=True, eq=False)
class OwnWeights(Question):
    """How far Σ λ_i is from one at (x, ν): Σ λ_i, Σ φ_i'', and Σ of bounds on φ_i'' above ν."""

    kind = "own_weights"
    shows = (summed("terms", "how far the weights, which only silos know, are from a sum of one"),)

    x: Tensor
    level: Tensor  # ν, (1,); 0 off the simplex
    prior: Tensor  # p_i of every client
    objective: Objective  # (Λ, ψ), which separates

    def shapes(self, d: int) -> Shapes:
        return {"terms": (3,)}

    def down(self, d: int) -> int:
        return 1

    @cached_property
    def at(self) -> GradientsAt:
        """Question about losses and gradients at x, which clients put to themselves."""
        return GradientsAt(self.x)

    def alone(self, own: slice) -> OwnWeights:
        """Return the question to one client, about the same point."""
        other = replace(self, prior=self.prior[own])
        vars(other)["at"] = self.at  # clients evaluate a point once
        return other

    def answer(self, clients: ClientSide) -> Reply:
        losses = within_reach(clients.point(self.at).losses)
        found = self.objective._conjugate(losses - float(self.level), self.prior.numpy())
        rows = torch.from_numpy(np.stack(found[1:], 1))
        return Reply({}, {"terms": _summed(rows)})


@dataclass(frozen=True, eq=False)
class OwnSums(Question):
    r"""Gradients and Hessians in sums, with weights λ_i at the same x and another ν.

    A sum has, in this order: Σ λ_i; Σ φ_i(L_i + e_i − ν), Σ λ_i (L_i − e_i − ν) and Σ ψ_i(λ_i), for
    a certificate; Σ λ_i ε_i; sizes of all terms, for their rounding; Σ λ_i c_i; Σ λ_i H_i by rows.
    Where a loss is out of reach, which no point that is taken is, gradients and Hessians are zeros.
    """

    kind = "own_sums"
    shows = (
        summed(
            "sums",
            "losses, weights, gradients and Hessians, weighted as only silos know",
            tables=True,
        ),
    )

    first: OwnWeights  # the question before
    level: Tensor  # ν

    @property
    def at(self) -> GradientsAt:
        return self.first.at

    def shapes(self, d: int) -> Shapes:
        return {"sums": (NUMBERS + d + d * (d + 1) // 2,)}

    def down(self, d: int) -> int:
        return 1

    def answer(self, clients: ClientSide) -> Reply:
        """Weigh gradients and Hessians; all clients' Hessians at once only where each is sent."""
        point = clients.point(self.at)
        losses = within_reach(point.losses)
        far = bool(losses.max() >= OUT_OF_REACH)
        errors = np.zeros((2, len(losses)))
        if not far:
            errors = np.stack([part.double().cpu().numpy() for part in point.rounding()])
        loss_error, gradient_error = errors
        p = self.first.prior.numpy()
        weights, numbers = self._numbers(losses, loss_error, p)
        numbers[:, 4] = weights * gradient_error
        w = torch.from_numpy(weights).to(self.at.x)
        whole = torch.eye(len(self.at.x)).to(self.at.x)
        upper = torch.triu_indices(*whole.shape)
        shape = (NUMBERS + len(whole) + upper.shape[1],)
        if far:
            nothing = np.zeros((len(losses), *shape))
            nothing[:, 0], nothing[:, [1, 5]] = numbers[:, 0], OUT_OF_REACH
            return Reply({}, {"sums": _summed(torch.from_numpy(nothing))})
        table = torch.from_numpy(numbers)

        def total(ones: Tensor) -> Tensor:
            own = ones.to(w) * w
            H = point.hessian(own)
            parts = [ones.cpu().double() @ table, point.sum(own), H[upper[0], upper[1]]]
            return torch.cat([part.double().cpu() for part in parts])

        def each() -> Tensor:
            H = point.curvatures(whole)[:, upper[0], upper[1]]
            parts = [table, w[:, None] * point.each(), w[:, None] * H]
            return torch.cat([part.double().cpu() for part in parts], 1)

        return Reply({}, {"sums": Vectors(total, each, shape=shape)})

    def _numbers(self, losses: Vector, error: Vector, p: Vector) -> tuple[Vector, Vector]:
        """Return λ_i, and the first six numbers of every client but one."""
        objective = self.first.objective
        t = losses - float(self.level)
        weights = objective._conjugate(t, p)[1]
        value = np.where(losses < 0.0, OUT_OF_REACH, objective._conjugate(t + error, p)[0])
        gained = weights * (t - error)
        cost = objective._penalties(weights, p)
        size = np.abs(value) + np.abs(gained) + np.abs(cost) + weights * np.abs(losses)
        return weights, np.stack([weights, value, gained, cost, 0 * size, size], 1)


def within_reach(losses: Tensor) -> Vector:
    """Return losses that a sum has room for, whatever an exponential has made of them."""
    found = losses.double().cpu().numpy()
    return np.where(found < OUT_OF_REACH, found, OUT_OF_REACH)


def _summed(rows: Tensor) -> Vectors:
    return Vectors(lambda w: w.to(rows) @ rows, lambda: rows, shape=(rows.shape[1],))
