"""What clients compute for a question: losses and derivatives at a point, and local steps."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from scaffpd.federation.plans import Restriction


class EvaluatedPoint(Protocol):
    """Losses, gradients and second derivatives of all clients at one x."""

    losses: Tensor

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i."""

    def project(self, direction: Tensor) -> Tensor:
        """Return ⟨c_i, v⟩ per client."""

    def norms(self) -> Tensor:
        """Return ‖c_i‖² per client."""

    def each(self) -> Tensor:
        """Return the c_i themselves, (N, d)."""

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Restriction[Tensor]:
        """Return slopes, curvature and norms along the columns of V, (d, k), for weights w and the
        diagonal D.
        """

    def curvatures(self, V: Tensor) -> Tensor:
        """Return every client's VᵀH_iV, (N, k, k)."""

    def diagonal(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i diag H_i; raise `InputError` if it is not available."""

    def diagonals(self) -> Tensor:
        """Return every client's diag H_i, (N, d); raise `InputError` if it is not available."""

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the rounding errors of L_i and of c_i (its norm); infinite if unknown."""


class Displacements(Protocol):
    """d_i = x − u_{i,J} of all clients after one batch of local steps."""

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i."""

    def each(self) -> Tensor:
        """Return the d_i themselves, (N, d)."""
