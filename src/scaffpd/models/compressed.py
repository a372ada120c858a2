r"""Squared loss needs no more rows than features: a client with many samples replaces them once by d others.

From the QR decomposition [A y] = Q [[R ỹ], [0 ρ]] of a client's samples and targets,

    (1/m)‖A x − y‖² = (1/m)‖R x − ỹ‖² + (1/m)‖ρ‖²

for every x, with R of d rows. Householder's method is as exact as the data: R and ỹ belong to A + E and y + e with
‖E‖ ≤ noise·‖A‖ and ‖e‖ ≤ noise·‖y‖, which the bounds on rounding errors take into account.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from scaffpd.models.glm import LinearPoint
from scaffpd.models.losses import Loss
from scaffpd.models.mapped import Mapped
from scaffpd.models.ragged import Block, Ragged
from scaffpd.models.rows import Rows
from scaffpd.models.threads import shared

WORTH = 1.2  # as many times the features must a client's samples be
TOGETHER = 4  # times as many rows as columns are decomposed at a time where rows are read piece by piece


@dataclass(frozen=True)
class Compressed:
    """The same losses on fewer rows.

    Attributes:
        rows: R and ỹ, or the samples themselves where those are few.
        constant: ‖ρ‖²/m per client.
        noise: what ‖E‖/‖A‖ and ‖e‖/‖y‖ are at most, per client.
    """

    rows: Rows
    constant: Tensor
    noise: Tensor

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """Bounds on S = ‖A‖/√m and ‖y‖/√m of every client."""
        _, squares, _, targets = self.rows.levers
        return squares.sqrt(), (targets + self.constant).sqrt()

    def only(self, clients: list[int]) -> Compressed:
        """The same for some of the clients."""
        return Compressed(self.rows.only(clients), self.constant[clients], self.noise[clients])


def compress(rows: Rows) -> Compressed:
    """Fewer rows for every client that has more than enough of them (once, when the data is bound)."""
    features, sizes, constant = rows.A.shape[1], rows.layout.sizes, rows.share.new_zeros(len(rows.layout))
    tall = [block for block in rows.blocks if block.rows.shape[1] >= WORTH * features]
    if not tall:
        return Compressed(rows, constant, torch.zeros_like(constant))
    shorter = torch.zeros_like(sizes, dtype=torch.bool)
    for block in tall:
        shorter[block.clients] = True
    layout = Ragged(torch.where(shorter, sizes.clamp_max(features), sizes).tolist(), rows.A.device, rows.A.dtype)
    A, y = rows.A.new_empty(len(layout.owner), features), rows.y.new_empty(len(layout.owner), rows.y.shape[1])
    same = ~shorter
    A[same[layout.owner]], y[same[layout.owner]] = rows.A[same[rows.layout.owner]], rows.y[same[rows.layout.owner]]

    def work(block: Block) -> None:
        if (large := rows.large(block)) is not None:
            R = triangle(large, block.of(rows.y)[0])[None]
        else:
            both = torch.cat(rows.alone(block), -1)
            R = torch.geqrf(both)[0][:, : both.shape[2]].triu()
        own, inside = layout.places(block.clients, features)
        A[own], y[own] = R[:, :features, :features][inside], R[:, :features, features:][inside]
        constant[block.clients] = R[:, features:, features:].square().sum((1, 2)) / sizes[block.clients]

    shared(work, tall, A.device)
    noise = 4 * torch.finfo(A.dtype).eps * sizes.to(A.dtype).sqrt()
    share = 1 / sizes[layout.owner].to(A.dtype)
    return Compressed(Rows(A, y, layout, share), constant, torch.where(shorter, noise, 0))


def triangle(A: Mapped, y: Tensor) -> Tensor:
    """The upper triangle of the decomposition of [A y], from one pass: that of a part goes before the next part."""
    width = A.shape[1] + y.shape[1]
    R, rows = A.new_zeros(0, width), 0
    waiting: list[Tensor] = []

    def taken_in() -> Tensor:
        return torch.geqrf(torch.cat([R, *waiting]))[0][:width].triu()

    for at, values in A.stream():
        waiting.append(torch.cat([values, y[at]], 1))
        rows += len(values)
        if rows >= TOGETHER * width:
            R, waiting, rows = taken_in(), [], 0
    return taken_in() if waiting else R


class CompressedPoint(LinearPoint):
    """All clients at one x, from fewer rows."""

    def __init__(self, data: Compressed, loss: Loss, l2: float, x: Tensor, outputs: int) -> None:
        super().__init__(data.rows, loss, l2, x, outputs, data.constant)
        self.data = data

    def rounding(self) -> tuple[Tensor, Tensor]:
        """What arithmetic adds, and what the decomposition has added before.

        With ρ = ‖A x − y‖/√m, S = ‖A‖/√m and δ = noise·(S‖x‖ + ‖y‖/√m), the decomposition is off by at most
        2ρδ + δ² in L_i and by 2 noise S ρ + 2 S δ in c_i.
        """
        loss, gradient = super().rounding()
        data, size = self.data, self.x.norm()
        rho = (self.losses - self.l2 / 2 * size.square()).clamp_min(0).sqrt()
        top, y = data.sizes
        delta = data.noise * (top * size + y)
        return loss + (2 * rho + delta) * delta, gradient + 2 * top * (data.noise * rho + delta)
