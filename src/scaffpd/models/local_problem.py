"""Start of the local steps of all clients of a linear model, and their minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from scaffpd.federation import LocalPlan
from scaffpd.models.draws import Draws
from scaffpd.models.losses import Loss
from scaffpd.models.samples import PaddedBlock, StackedSamples

# Numbers that are drawn and collected at a time.
SLAB = {"cpu": 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class LocalProblem:
    """Start of the local steps of all clients.

    Attributes:
        rows: the samples.
        loss: ℓ.
        z: the predictions at x, (M, k).
        r: r₀ = ∂ℓ/∂z there; `None` for minibatches.
        c: pushed by every step, one for all, (features, k), or each client's own.
        rest: c without `l2` x, in the same shapes; `None` for zero. Full gradients: c.
        rates: η_i, (N, 1, 1).
        l2: the regulariser, (1, 1) or (k, features).
        plan: J and the minibatches.
        seeds: seeds of the clients' minibatches, (N,).
    """

    rows: StackedSamples
    loss: Loss
    z: Tensor
    r: Tensor | None
    c: Tensor
    rest: Tensor | None
    rates: Tensor
    l2: Tensor
    plan: LocalPlan
    seeds: Tensor

    @property
    def keep(self) -> Tensor:
        """1 − η(l2 + μ), (N, 1, 1) or (N, k, features)."""
        return 1 - self.rates * (self.l2 + self.plan.prox)

    def slabs(self, who: Tensor, numbers: int) -> Iterator[tuple[int, int, PaddedBlock | None]]:
        """Yield the first and the last step of each part of the J steps, and its minibatches.

        Args:
            who: the clients.
            numbers: that one client needs for a step.
        """
        J = self.plan.steps
        b = self.plan.batch_size
        draws = Draws.of(self.seeds[who])
        most = max(1, SLAB.get(who.device.type, SLAB["cuda"]) // (len(who) * numbers))
        # The first step with full gradients changes nothing, because r(x − d) = r₀.
        for first in range(1 if b is None else 0, J, most):
            last = min(first + most, J)
            if b is None:
                yield first, last, None
                continue
            uniform = draws.uniform((last - first) * b).view(len(who), last - first, b)
            yield first, last, self.rows.layout.minibatch(uniform, who)
