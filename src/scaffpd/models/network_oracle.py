r"""Networks of N clients in batches: the parameters of a group of clients in one stack, one vectorised pass a step.

A memory budget sets how many clients go together. On a GPU all J steps become one recorded graph.
Minibatches, dropout and every other number of a client depend only on its name and the round's key, never on the other
clients of its batch. Losses and gradients of all samples are summed in chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Restriction, Vector
from scaffpd.models.local_steps import LocalModel, pace
from scaffpd.models.network import (
    BUFFERS,
    PRODUCTS,
    ROOM,
    NetworkFunction,
    StackedRows,
    StreamedRows,
)
from scaffpd.models.numerics import (
    Draws,
    GraphReplay,
    parallel_map,
    random_direction,
    streams,
    thread_count,
)
from scaffpd.models.oracle import StackedDisplacements, StackedPoint, shift

Correct = Callable[[Tensor, Tensor], Tensor | None]
CHUNK = 8192  # samples of one client at a time
TOGETHER = {
    "cpu": 2**25 if PRODUCTS else 2**23,
    "cuda": 2**31,
}  # numbers that a group of clients may need in one step
WASTE = 1.5  # largest ratio of sizes within a group, the smaller ones padded
SAMPLED = 1024  # samples of a client for the estimate of its L_i
# of the power iteration
ITERATIONS = 20
CLOSE = 0.01
DROPOUT = 3  # stream of a round's random numbers


class RowGroup(NamedTuple):
    """Rows of some clients that are processed at once, padded to the longest.

    Attributes:
        who: the clients, (n,).
        positions: rows within a client, (n, c).
        weight: 1/m_i, and 0 for padding, (n, c).
    """

    who: Tensor
    positions: Tensor
    weight: Tensor


class ModulePoint(StackedPoint):
    """All clients at one x: losses and the stacked (N, d) gradients, over the given rows of each client."""

    def __init__(
        self,
        oracle: ModuleOracle,
        x: Tensor,
        rows: list[Tensor | None],
        losses: Tensor,
        gradients: Tensor,
    ) -> None:
        super().__init__(x, losses, gradients)
        self.oracle = oracle
        self.rows = rows

    def norms(self, scale: Tensor | None = None) -> Tensor:
        """Return Σ_k s_k c_ik² per client."""
        return torch.stack([c @ (c if scale is None else scale * c) for c in self.gradients])

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Restriction:
        """Use k Hessian-vector products of every client with a weight."""
        Q = V.new_zeros(V.shape[1], V.shape[1])
        for i, w in enumerate(weights.tolist()):
            if w != 0:
                Q += w * self.oracle.curvature(i, self.x, V, self.rows[i])
        return Restriction(self.project(V), Q, self.norms(1 / metric))

    def curvatures(self, V: Tensor) -> Tensor:
        """Use k Hessian-vector products of every client."""
        return torch.stack(
            [self.oracle.curvature(i, self.x, V, rows) for i, rows in enumerate(self.rows)]
        )

    def diagonal(self, weights: Tensor) -> Tensor:
        """Refuse: it would take d Hessian-vector products."""
        raise InputError(
            "diagonal-network-hessian",
            "The diagonal of a network's Hessian is not known; take D = I instead.",
        )

    def diagonals(self) -> Tensor:
        """Refuse as `diagonal` does."""
        return self.diagonal(self.losses)


class ModuleOracle:
    """N clients that share a network's architecture.

    Args:
        function: the network and its loss.
        correct: marks correctly classified samples.
        rows: the clients' samples.
        names: the clients.
        optimizer: how local steps use a gradient (`LocalSGD`, `LocalAdam`).
        fed_bn: whether statistics of batch norm are each client's own, from its rows at x, and not part of x.
        like: the clients' training rows, if these are held out and use their statistics.
    """

    most_rows: float | None = None

    def __init__(
        self,
        function: NetworkFunction,
        correct: Correct,
        rows: StackedRows | StreamedRows,
        names: list[str],
        optimizer: Any,
        fed_bn: bool = False,
        like: ModuleOracle | None = None,
    ) -> None:
        self.function = function
        self.correct = correct
        self.rows = rows
        self.names = names
        self.optimizer = optimizer
        self.fed_bn = fed_bn and function.momenta is not None
        self.like = like
        self.dimension = function.length if self.fed_bn else sum(function.sizes)
        self._seen: tuple[Tensor, Tensor] | None = None
        self.device = next(iter(function.parameters.values())).device
        self.dtype = function.start().dtype
        self._smoothness: Vector | None = None
        self._twice = True  # whether every operation has a second derivative, as far as is known
        self._replays: dict[Any, GraphReplay] = {}  # shared with the oracles of some of the clients
        self._streams = streams(names, self.device)

    @property
    def l2(self) -> float:
        """Regulariser."""
        return self.function.l2

    @property
    def network(self) -> nn.Module:
        """Network as used in losses."""
        return self.function.network

    def clients(self) -> list[tuple[Tensor, Tensor]]:
        """Features and targets of every client."""
        return [self.rows.part(i, 0, m) for i, m in enumerate(self.rows.sizes)]

    def start(self) -> Tensor:
        """Return x⁰: the network's own parameters, flattened."""
        return self.function.start()[: self.dimension]

    def contents(self) -> list[Tensor]:
        """Return the network's parameters and buffers, and the samples."""
        return [*self.network.state_dict().values(), *self.rows.contents()]

    def only(self, clients: list[int]) -> ModuleOracle:
        """Select some of the clients."""
        chosen = copy.copy(self)
        chosen.rows = self.rows.only(clients)
        chosen.names = [self.names[i] for i in clients]
        chosen._streams = self._streams[clients]
        chosen._seen = None
        chosen.like = None if self.like is None else self.like.only(clients)
        if self._smoothness is not None:
            chosen._smoothness = self._smoothness[clients]
        return chosen

    def constants(self) -> Constants:
        """Estimate L_i by power iteration on the Hessian at x⁰ (gradient differences); no convexity is claimed."""
        if self._smoothness is None:
            self._smoothness = self._largest_curvatures(self.start())
        samples = np.array(self.rows.sizes)
        corrects = bool(self.optimizer.corrects)
        return Constants(
            self._smoothness,
            np.zeros(len(samples)),
            False,
            self._smoothness,
            samples,
            corrects=corrects,
        )

    def _largest_curvatures(self, x: Tensor) -> Vector:
        """Estimate |λ|_max of every client's Hessian, on its first samples; all clients iterate at once."""
        few = [torch.arange(min(m, SAMPLED), device=self.device) for m in self.rows.sizes]
        step = float(torch.finfo(x.dtype).eps) ** 0.5 * (1 + float(x.norm()))
        g = self._sums(x, few)[1]
        v = random_direction(x).expand(len(few), -1).clone()
        value = x.new_zeros(len(few))
        going = torch.ones(
            len(few), dtype=torch.bool, device=x.device
        )  # estimates do not depend on each other
        for _ in range(ITERATIONS):
            w = (self._sums(x + step * v, few)[1] - g) / step
            last = value
            value = torch.where(going, w.norm(dim=1), value)
            going = going & ((value - last).abs() > CLOSE * value)
            if not bool(going.any()):
                break
            v = w / value.clamp_min(torch.finfo(x.dtype).tiny)[:, None]
        found: Vector = 1.02 * value.double().cpu().numpy()
        return np.maximum(found, max(self.l2, 1e-6))

    def completed(self, x: Tensor) -> Tensor:
        """Return x, or [x, s_i(x)] of every client, (N, ·), with the batch norm statistics of its training rows."""
        if not self.fed_bn:
            return x
        if self.like is not None:
            return self.like.completed(x)
        if (
            self._seen is None
            or self._seen[0].shape != x.shape
            or not torch.equal(self._seen[0], x)
        ):
            each = x.detach().expand(len(self.names), self.dimension)
            found = [self._statistics(i, u) for i, u in enumerate(each)]
            self._seen = x.detach().clone(), torch.cat([each, torch.stack(found)], 1)
        return self._seen[1]

    def _statistics(self, client: int, x: Tensor) -> Tensor:
        """Return means and variances of every layer's input over the client's rows, by Chan's formula over chunks."""
        chunks = [
            (share, self.function.seen(x, X)) for X, _, share in self._chunks(client, None, SAMPLED)
        ]
        shares = x.new_tensor([share for share, _ in chunks], dtype=torch.float64)[:, None]
        found: list[Tensor] = []
        for layer in zip(*(seen for _, seen in chunks), strict=True):
            means, variances = (torch.stack(part).double() for part in zip(*layer, strict=True))
            mean = (shares * means).sum(0)
            found += [mean, (shares * (variances + (means - mean).square())).sum(0)]
        return torch.cat(found).to(x)

    # ------------------------------------------------------------------ which rows go together

    def _draw(self, client: int, batch_size: int | None, draws: Draws) -> Tensor | None:
        """Draw the client's next batch like `Ragged.minibatch`; `None` for all rows."""
        m = self.rows.sizes[client]
        if batch_size is None or batch_size >= m:
            return None
        return (draws.uniform(batch_size)[0] * m).long().to(self.device)

    def _drawn(self, batch_size: int | None, key: tuple[int, ...]) -> list[Tensor | None]:
        """Draw a batch of every client."""
        if batch_size is None:
            return [None] * len(self.names)
        uniform = Draws(key, self._streams).uniform(batch_size)
        pairs = zip(uniform, self.rows.sizes, strict=True)
        return [None if batch_size >= m else (own * m).long() for own, m in pairs]

    def _settle(self, x: Tensor) -> None:
        """Decide whether clients can be batched, before threads start."""
        if self.function.together is None:
            few = min(2, *self.rows.sizes)
            who = torch.arange(2, device=self.device) % len(self.names)
            X, y = self.rows.take(who, torch.arange(few, device=self.device).expand(2, few))
            self.function.try_together(x, (X, y, x.new_full((2, few), 1 / few)))

    def _room(self) -> int:
        """Return about how many numbers a gradient of one sample needs."""
        return self.function.width or self.function.room(self.rows.part(0, 0, 1)[0])

    @property
    def _budget(self) -> int:
        return TOGETHER.get(self.device.type, TOGETHER["cuda"])

    @property
    def _chunk(self) -> int:
        """Samples of one client at a time; if rows are streamed, as many as a group of clients may take."""
        return CHUNK if self.rows.stored else max(1, min(CHUNK, self._budget // self._room()))

    def _groups(self, lengths: Sequence[int], passes: int = 1) -> Iterator[list[int]]:
        """Yield groups of clients with about equally many rows each, as large as memory allows."""
        waste = WASTE if self.function.named is not None and self.function.momenta is None else 1.0
        budget = self._budget
        room = self._room()
        cores = thread_count() if self.device.type == "cpu" and passes > 1 else 1
        most = -(-len(lengths) // cores)
        group = list[int]()
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            longest = lengths[group[0]] if group else lengths[i]
            numbers = (len(group) + 1) * (min(longest, self._chunk) * room + ROOM * self.dimension)
            if group and (numbers > budget or longest > waste * lengths[i] or len(group) >= most):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _pieces(self, rows: Sequence[Tensor | None]) -> Iterator[RowGroup]:
        """Yield the given rows of every client (`None`: all), a group of clients and a chunk of rows at a time."""
        sizes = self.rows.sizes
        lengths = [sizes[i] if own is None else len(own) for i, own in enumerate(rows)]
        for group in self._groups(lengths):
            longest = lengths[group[0]]
            exact = len({lengths[i] for i in group}) == 1
            positions = torch.zeros(len(group), longest, dtype=torch.int64, device=self.device)
            weight = torch.zeros(len(group), longest, dtype=self.dtype, device=self.device)
            for k, i in enumerate(group):
                own = rows[i]
                positions[k, : lengths[i]] = (
                    torch.arange(lengths[i], device=self.device) if own is None else own
                )
                weight[k, : lengths[i]] = 1 / lengths[i]
            who = torch.tensor(group, device=self.device)
            step = self._chunk if exact or self.function.named else longest
            for first in range(0, longest, step):
                yield RowGroup(
                    who, positions[:, first : first + step], weight[:, first : first + step]
                )

    def _sums(self, x: Tensor, rows: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return f_i and ∇f_i of all clients over the given rows, at one x or at each client's own, (N, d)."""
        n = len(rows)
        flat = x.detach()
        self._settle(flat if x.ndim == 1 else flat[0])
        losses = flat.new_zeros(n)
        gradients = flat.new_zeros(n, self.dimension)
        points = self.completed(flat)
        for who, positions, weight in self._pieces(rows):
            X, y = self.rows.take(who, positions)
            values, own = self.function.gradient(
                points if points.ndim == 1 else points[who], (X, y, weight)
            )
            losses.index_add_(0, who, values)
            gradients.index_add_(0, who, own[:, : self.dimension])
        BUFFERS.free.clear()
        return losses + self.function.penalty(flat), gradients + self.function.pull(flat)

    # ------------------------------------------------------------------ answers of the clients

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> ModulePoint:
        """Evaluate losses and gradients of all clients at x."""
        rows = self._drawn(batch_size, key)
        return ModulePoint(self, x, rows, *self._sums(x, rows))

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        """Return f_i(x) without the gradients."""
        values = x.new_zeros(len(self.names))
        for i, output, y, share in self._predicted(x, self._drawn(batch_size, key)):
            values[i] += self._mean(output, y) * share
        return values + self.function.penalty(x)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(x), and the accuracy if there are classes (else NaN)."""
        values = x.new_zeros(len(self.names))
        right = torch.zeros(len(self.names), dtype=torch.float64, device=x.device)
        for i, output, y, share in self._predicted(x, [None] * len(right)):
            correct = self.correct(output, y)
            values[i] += self._mean(output, y) * share
            right[i] += float("nan") if correct is None else correct.sum()
        losses = (values + self.function.penalty(x)).double().cpu().numpy()
        return losses, right.cpu().numpy() / np.array(self.rows.sizes)

    def _mean(self, output: Tensor, y: Tensor) -> Tensor:
        weight = output.new_full((len(y),), 1 / len(y))
        return self.function.weighed(output, y, weight)

    def _predicted(
        self, x: Tensor, rows: Sequence[Tensor | None]
    ) -> Iterator[tuple[int, Tensor, Tensor, float]]:
        """Yield every client's outputs and targets, and their share of its rows, in as few passes as chunks allow."""
        together: list[tuple[int, Tensor, Tensor, float]] = []
        for i, own in enumerate(rows):
            for X, y, share in self._chunks(i, own):
                if together and sum(len(part[1]) for part in together) + len(X) > self._chunk:
                    yield from self._passed(x, together)
                    together = []
                together.append((i, X, y, share))
        yield from self._passed(x, together)

    def _passed(
        self, x: Tensor, parts: list[tuple[int, Tensor, Tensor, float]]
    ) -> list[tuple[int, Tensor, Tensor, float]]:
        points = self.completed(x)
        with torch.no_grad():
            if points.ndim == 2:
                return [
                    (i, self.function.outputs(points[i], X), y, share) for i, X, y, share in parts
                ]
            outputs = self.function.outputs(x, torch.cat([X for _, X, _, _ in parts]))
        split = torch.split(outputs, [len(X) for _, X, _, _ in parts])
        return [
            (i, output, y, share) for output, (i, _, y, share) in zip(split, parts, strict=True)
        ]

    def local_updates(
        self, x: Tensor, at: ModulePoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        """Take J local steps of every client, a group of clients at a time."""
        n = len(self.names)
        if self.function.momenta is not None and isinstance(at, ModulePoint):
            raise InputError(
                "batch-norm-normalises",
                "Batch norm normalises local steps by their batch and c_i = ∇f_i(x) by the statistics of x, so that "
                "g_i(u) − c_i + c is no corrected gradient: use GroupNorm, freeze the layers with .eval(), or take a "
                "method without such c_i (FedAvg, SCAFFOLD's option II, DRFA).",
            )
        if not self.optimizer.corrects and (at is not None or correction is not None):
            raise InputError(
                "divides-size-gradients",
                f"{self.optimizer!r} divides by the size of gradients, so that c − c_i does not cancel drift: "
                "take LocalSGD(...), or a method without corrections, such as FedAvg or fair.",
            )
        rates = (
            plan.scale / self.constants().smoothness if plan.rate is None else np.full(n, plan.rate)
        )
        each = x.new_zeros(n, len(x))
        pull = each + shift(at, correction)
        pull[:, self.function.length :] = 0
        eta = torch.from_numpy(rates).to(x)[:, None]
        b = plan.batch_size
        lengths = [m if b is None else min(b, m) for m in self.rows.sizes]
        seeds = Draws((*plan.key, DROPOUT), self._streams).seeds

        def work(group: list[int]) -> None:
            who = torch.tensor(group, device=self.device)
            drawn = [lengths[i] < self.rows.sizes[i] for i in group]
            positions, weight = self._batches(group, lengths, plan, drawn)
            own = replace(plan, each=plan.each and tuple(plan.each[i] for i in group))
            each[who] = self._steps(x, pull[who], eta[who], who, positions, weight, seeds[who], own)

        self._settle(x)
        groups = [
            part
            for group in self._groups(lengths, plan.steps)
            for part in self._alike(group, lengths)
        ]
        parallel_map(work, groups, self.device)
        return StackedDisplacements(each)

    def _alike(self, group: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """Split a group into clients that draw, and clients that use all their rows."""
        drawing = [i for i in group if lengths[i] < self.rows.sizes[i]]
        return [part for part in (drawing, [i for i in group if i not in set(drawing)]) if part]

    def _batches(
        self, group: list[int], lengths: Sequence[int], plan: LocalPlan, drawn: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of every step, (J, n, c), or (1, n, c) if all steps have the same; and 1/c, 0 for padding."""
        c = max(lengths[i] for i in group)
        n = len(group)
        device = self.device
        count = torch.tensor([lengths[i] for i in group], device=device)[:, None]
        inside = torch.arange(c, device=device) < count
        weight = inside.to(self.dtype) / count
        if not drawn[0]:
            return torch.where(inside, torch.arange(c, device=device), 0)[None], weight
        m = torch.tensor([self.rows.sizes[i] for i in group], device=device)
        uniform = (
            Draws(plan.key, self._streams[group]).uniform(plan.steps * c).view(n, plan.steps, c)
        )
        return (uniform * m[:, None, None]).long().transpose(0, 1).contiguous(), weight

    def _steps(
        self,
        x: Tensor,
        pull: Tensor,
        eta: Tensor,
        who: Tensor,
        positions: Tensor,
        weight: Tensor,
        seeds: Tensor,
        plan: LocalPlan,
    ) -> Tensor:
        """Return d_i after J steps of some clients; on a GPU by a recorded graph."""
        counts = torch.tensor(plan.each or [plan.steps] * len(who), device=self.device)[:, None]
        parts = (
            x,
            pull,
            eta,
            self._first(who),
            positions,
            weight,
            seeds,
            counts,
            x.new_full((), plan.prox),
        )
        if not (x.is_cuda and isinstance(self.rows, StackedRows) and len(positions) == plan.steps):
            return self._run(plan.steps, *parts)
        key = plan.steps, positions.shape
        if key not in self._replays:
            self._replays[key] = GraphReplay(partial(self._run, plan.steps))
        return cast(Tensor, self._replays[key](*parts))

    def _first(self, who: Tensor) -> Tensor:
        """Return a client's first row in the stack, or its number if rows are streamed."""
        return self.rows.starts[who] if isinstance(self.rows, StackedRows) else who

    def _rows(
        self, first: Tensor, positions: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(self.rows, StackedRows):
            rows = first[:, None] + positions
            return self.rows.all_X[rows], self.rows.all_y[rows], weight
        return *self.rows.take(first, positions), weight

    def _run(
        self,
        steps: int,
        x: Tensor,
        pull: Tensor,
        eta: Tensor,
        first: Tensor,
        positions: Tensor,
        weight: Tensor,
        seeds: Tensor,
        counts: Tensor,
        prox: Tensor,
    ) -> Tensor:
        """Take J steps u ← u − η direction(g_i(u) − c_i + c + μ(u − x)), from d = x − u = 0."""
        D = torch.zeros_like(pull)
        function = self.function
        state = self.optimizer.start(D)
        length = function.length
        chunk = self._chunk if function.named is not None else positions.shape[2]
        for j in range(steps):
            U = x - D
            g = torch.zeros_like(D)
            seen = None
            for k in range(0, positions.shape[2], chunk):
                part = slice(k, k + chunk)
                piece = self._rows(
                    first, positions[min(j, len(positions) - 1)][:, part], weight[:, part]
                )
                own, found = function.local_gradient(U, piece, seeds + j)
                g = g + own
                seen = (
                    found
                    if seen is None
                    else torch.lerp(seen, found, piece[2].sum(1, keepdim=True))
                )
            g = self.optimizer.clipped(g + function.pull(U)) + pull - prox * D
            direction, state = self.optimizer.direction(g, U, state, j)
            made = (counts > j).to(D)  # clients may take unequal numbers of steps
            D = D + made * eta * direction
            if function.momenta is not None and not self.fed_bn and seen is not None:
                D = torch.cat(
                    [
                        D[:, :length],
                        D[:, length:] - made * function.momenta * (seen - U[:, length:]),
                    ],
                    1,
                )
        BUFFERS.free.clear()
        return D

    def proximal_steps(
        self, at: ModulePoint, correction: Tensor, plan: ProximalPlan
    ) -> StackedDisplacements:
        """Take the accelerated steps of `LinearOracle.proximal_steps`, one client after the other."""
        go = pace(plan, self.constants().smoothness, self.l2)
        each = torch.empty_like(at.gradients)
        for i, (c, rows) in enumerate(zip(at.gradients, at.rows, strict=True)):
            gradient = partial(self.gradient, i, rows=rows)
            model = LocalModel(gradient, at.x, float(at.losses[i]), correction - c, plan)
            each[i] = model.approach(float(go.rates[i]), float(go.momenta[i]), go.steps)
        return StackedDisplacements(each)

    # ------------------------------------------------------------------ one client

    def gradient(self, client: int, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return f_i(x) and ∇f_i(x), over all samples of the client or the given rows."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            total = x.new_zeros(())
            gradient = torch.zeros_like(x)
            for value in self._values(client, leaf, rows):
                gradient += torch.autograd.grad(value, leaf)[0]
                total += value.detach()
        return total + self.function.penalty(x), gradient + self.function.pull(x)

    def curvature(self, client: int, x: Tensor, V: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return VᵀH_iV for the columns of V, (d, k), by k Hessian-vector products, without storing them."""
        if self._twice:
            try:
                return self._differentiated(client, x, V, rows) + self.l2 * (V.mT @ V)
            except (
                RuntimeError
            ):  # an operation without a second derivative, such as fused attention
                self._twice = False
        Q = V.new_zeros(V.shape[1], V.shape[1])
        for row, v in zip(Q, V.mT, strict=True):
            row += self._differences(client, x, v, rows) @ V
        return Q

    def _differentiated(self, client: int, x: Tensor, V: Tensor, rows: Tensor | None) -> Tensor:
        """Differentiate ⟨∇f_i, v⟩."""
        Q = V.new_zeros(V.shape[1], V.shape[1])
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            for value in self._values(client, leaf, rows):
                if _has_own_function(value):
                    raise RuntimeError("a function of the user's own")
                slope = torch.autograd.grad(value, leaf, create_graph=True)[0]
                for row, v in zip(Q, V.mT, strict=True):
                    row += torch.autograd.grad(slope, leaf, v, retain_graph=True)[0] @ V
        return Q

    def _differences(self, client: int, x: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
        """Return H_i v ≈ (∇f_i(x + hv) − ∇f_i(x − hv))/2h with h = ε^⅓ (1 + ‖x‖)/‖v‖, where rounding (ε/h) meets h²."""
        h = (
            torch.finfo(x.dtype).eps ** (1 / 3)
            * (1 + float(x.norm()))
            / max(float(v.norm()), 1e-30)
        )
        ahead, behind = (self.gradient(client, x + s * v, rows)[1] for s in (h, -h))
        slope: Tensor = (ahead - behind) / (2 * h)
        return slope

    def _values(self, client: int, x: Tensor, rows: Tensor | None) -> Iterator[Tensor]:
        """Yield the mean loss in parts, one per chunk of samples, that add up to f_i without the regulariser."""
        here = (
            torch.cat([x, self.only([client]).completed(x)[0, self.dimension :]])
            if self.fed_bn
            else x
        )
        for X, y, share in self._chunks(client, rows):
            yield share * self._mean(self.function.outputs(here, X), y)

    def _chunks(
        self, client: int, rows: Tensor | None, size: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        m = self.rows.sizes[client] if rows is None else len(rows)
        size = size or self._chunk
        for first in range(0, m, size):
            last = min(first + size, m)
            if rows is None:
                X, y = self.rows.part(client, first, last)
            else:
                who = torch.tensor([client], device=self.device)
                X, y = (part[0] for part in self.rows.take(who, rows[None, first:last]))
            yield X, y, (last - first) / m


def _has_own_function(value: Tensor) -> bool:
    """Return whether the value depends on a user's own `Function`.

    If its gradient cannot be differentiated, autograd silently leaves that part of the Hessian out.
    """
    nodes: list[Any] = [value.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False
