r"""Networks of N clients: the parameters of a group of clients in one stack, one pass a step.

A memory budget sets how many clients go together. On a GPU all J steps become one recorded graph.
Minibatches, dropout and every other number of a client depend only on its name and the round's key,
never on the other clients of its group. Losses and gradients of all samples are summed in chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scaffpd.federation import Constants, LocalPlan, Vector
from scaffpd.models.draws import Draws, streams
from scaffpd.models.execution import GraphReplay, parallel_map, thread_count
from scaffpd.models.network import ROOM, NetworkFunction
from scaffpd.models.numerics import random_direction
from scaffpd.models.oracle import (
    Held,
    Oracle,
    StackedDisplacements,
    StackedPoint,
    shift,
    step_sizes,
)
from scaffpd.models.samples import PaddedBlock

Correct = Callable[[Tensor, Tensor], Tensor | None]
Rows = Sequence[Tensor | None]  # of every client: numbers of its rows, or `None` for all
CHUNK = 8192  # samples of one client at a time
# numbers that a group of clients may need in one step
TOGETHER = {"cpu": 2**23, "cuda": 2**31}
WASTE = 1.5  # largest ratio of sizes within a group, the smaller ones padded
SAMPLED = 1024  # samples of a client for the estimate of its L_i
ITERATIONS = 20  # of the power iteration, at most
CLOSE = 0.01  # relative change of an estimate at which it stops
DROPOUT = 3  # stream of a round's random numbers


class StackedRows:
    """Samples of all clients in one stack, X and y, (M, …); selecting clients does not copy it.

    Args:
        sizes: number of rows of every client.
        starts: first row of every client; one client after the other, if not given.
    """

    def __init__(
        self, X: Tensor, y: Tensor, sizes: Sequence[int], starts: Tensor | None = None
    ) -> None:
        self.X = X
        self.y = y
        self.sizes = list(sizes)
        if starts is None:
            starts = torch.tensor([0, *np.cumsum(self.sizes)[:-1]], device=X.device)
        self.starts = starts

    def only(self, clients: list[int]) -> StackedRows:
        sizes = [self.sizes[i] for i in clients]
        return StackedRows(self.X, self.y, sizes, self.starts[clients])

    def each(self) -> list[tuple[Tensor, Tensor]]:
        spans = zip(self.starts.tolist(), self.sizes, strict=True)
        return [(self.X[i : i + m], self.y[i : i + m]) for i, m in spans]

    def numbers(self, client: int, own: Tensor | None) -> Tensor:
        inside = torch.arange(self.sizes[client], device=self.X.device) if own is None else own
        return self.starts[client] + inside


class StepInputs(NamedTuple):
    """What J steps of some clients depend on: tensors alone, so that a GPU can record the steps.

    Attributes:
        x: where they start, (d,).
        pull: c − c_i, (n, d).
        rates: η_i, (n, 1).
        starts: the clients' first rows in the stack, (n,).
        positions: rows of every step, (J, n, c), or (1, n, c) if all steps have the same.
        weight: 1/c, and 0 for padding, (n, c).
        seeds: of dropout, (n,).
        prox: μ.
    """

    x: Tensor
    pull: Tensor
    rates: Tensor
    starts: Tensor
    positions: Tensor
    weight: Tensor
    seeds: Tensor
    prox: Tensor


class ModuleOracle(Oracle):
    """N clients that share a network's architecture; momentum and clip are those of `Module`."""

    most_rows: float | None = None

    def __init__(
        self,
        function: NetworkFunction,
        l2: float,
        correct: Correct,
        rows: StackedRows,
        names: list[str],
        momentum: float = 0.0,
        clip: float | None = None,
    ) -> None:
        self.function = function
        self.l2 = l2
        self.correct = correct
        self.rows = rows
        self.names = names
        self.momentum = momentum
        self.clip = clip
        start = function.start()
        self.dimension = len(start)
        self.device = start.device
        self.dtype = start.dtype
        self._smoothness: Vector | None = None
        # recorded graphs, shared with the oracles of some of the clients
        self._replays: dict[tuple[int, torch.Size], GraphReplay] = {}
        self.streams = streams(names, self.device)

    @property
    def network(self) -> nn.Module:
        return self.function.network

    def start(self) -> Tensor:
        return self.function.start()

    def contents(self) -> list[Tensor]:
        rows = self.rows.each()
        return [*self.network.state_dict().values(), *(X for X, _ in rows), *(y for _, y in rows)]

    def only(self, clients: list[int]) -> ModuleOracle:
        chosen = copy.copy(self)
        chosen.rows = self.rows.only(clients)
        chosen.names = [self.names[i] for i in clients]
        chosen.streams = self.streams[clients]
        if self._smoothness is not None:
            chosen._smoothness = self._smoothness[clients]
        return chosen

    def constants(self) -> Constants:
        """Estimate L_i by power iteration on the Hessian at x⁰; no convexity is claimed."""
        if self._smoothness is None:
            self._smoothness = self._largest_curvatures(self.start())
        L = self._smoothness
        return Constants(L, np.zeros(len(L)), False, L, np.array(self.rows.sizes))

    def _largest_curvatures(self, x: Tensor) -> Vector:
        """Estimate |λ|_max of every client's Hessian by differences of gradients."""
        few = [torch.arange(min(m, SAMPLED), device=self.device) for m in self.rows.sizes]
        # √ε is where the rounding of gradients, ε/h, meets the error of the difference, h
        step = float(torch.finfo(x.dtype).eps) ** 0.5 * (1 + float(x.norm()))
        g = self.sums(x, few)[1]
        v = random_direction(x).expand(len(few), -1).clone()
        value = x.new_zeros(len(few))
        # every client stops by itself, so that its estimate does not depend on the others
        going = torch.ones(len(few), dtype=torch.bool, device=x.device)
        for _ in range(ITERATIONS):
            w = (self.sums(x + step * v, few)[1] - g) / step
            last = value
            value = torch.where(going, w.norm(dim=1), value)
            going = going & ((value - last).abs() > CLOSE * value)
            if not bool(going.any()):
                break
            v = w / value.clamp_min(torch.finfo(x.dtype).tiny)[:, None]
        found: Vector = 1.02 * value.double().cpu().numpy()
        return np.maximum(found, max(self.l2, 1e-6))

    # ------------------------------------------------------------------ which rows go together

    def drawn(self, batch_size: int | None, draws: Draws) -> list[Tensor | None]:
        if batch_size is None:
            return [None] * len(self.names)
        uniform = draws.uniform(batch_size)
        pairs = zip(uniform, self.rows.sizes, strict=True)
        return [None if batch_size >= m else (own * m).long() for own, m in pairs]

    def _settle(self, x: Tensor) -> None:
        if self.function.together is None:
            few = min(2, *self.rows.sizes)
            first = self.rows.starts[torch.arange(2, device=self.device) % len(self.names)]
            rows = first[:, None] + torch.arange(few, device=self.device)
            self.function.settle(x, self.rows.X[rows], self.rows.y[rows])

    def _groups(self, lengths: Sequence[int], passes: int = 1) -> Iterator[list[int]]:
        """Yield groups of clients with about equally many rows each, as large as memory allows.

        Rows are padded only if the loss is known by name, so that it can be weighted row by row.
        Several passes over the same clients are spread over the processor's cores.
        """
        waste = WASTE if self.function.named is not None else 1.0
        budget = TOGETHER.get(self.device.type, TOGETHER["cuda"])
        room = self.function.room(self.rows.X[:1])
        cores = thread_count() if self.device.type == "cpu" and passes > 1 else 1
        most = -(-len(lengths) // cores)
        group = list[int]()
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            longest = lengths[group[0]] if group else lengths[i]
            numbers = (len(group) + 1) * (min(longest, CHUNK) * room + ROOM * self.dimension)
            if group and (numbers > budget or longest > waste * lengths[i] or len(group) >= most):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _pieces(self, rows: Rows) -> Iterator[PaddedBlock]:
        """Yield the given rows, a group of clients and a chunk of rows at a time."""
        pairs = zip(self.rows.sizes, rows, strict=True)
        lengths = [m if own is None else len(own) for m, own in pairs]
        for group in self._groups(lengths):
            longest = lengths[group[0]]
            numbers = self.rows.starts[group][:, None].repeat(1, longest)
            weight = torch.zeros(len(group), longest, dtype=self.dtype, device=self.device)
            for k, i in enumerate(group):
                numbers[k, : lengths[i]] = self.rows.numbers(i, rows[i])
                weight[k, : lengths[i]] = 1 / lengths[i]
            who = torch.tensor(group, device=self.device)
            exact = len({lengths[i] for i in group}) == 1
            step = CHUNK if exact or self.function.named is not None else longest
            for first in range(0, longest, step):
                part = slice(first, first + step)
                yield PaddedBlock(who, numbers[:, part], weight[:, part])

    def sums(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return f_i and ∇f_i over the given rows, at one x or at each client's own, (N, d)."""
        flat = x.detach()
        self._settle(flat if x.ndim == 1 else flat[0])
        losses = flat.new_zeros(len(rows))
        gradients = flat.new_zeros(len(rows), self.dimension)
        for piece in self._pieces(rows):
            points = flat if flat.ndim == 1 else flat[piece.clients]
            X, y = self.rows.X[piece.rows], self.rows.y[piece.rows]
            values, own = self.function.gradients(points, X, y, piece.weight)
            losses.index_add_(0, piece.clients, values)
            gradients.index_add_(0, piece.clients, own)
        return losses + self.l2 / 2 * flat.square().sum(-1), gradients + self.l2 * flat

    # ------------------------------------------------------------------ answers of the clients

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> StackedPoint:
        rows = self.drawn(batch_size, Draws(key, self.streams))
        return StackedPoint(x, *self.sums(x, rows))

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        values = x.new_zeros(len(self.names))
        rows = self.drawn(batch_size, Draws(key, self.streams))
        for i, output, y, weight in self._predicted(x, rows):
            values[i] += self.function.weighted(output, y, weight)
        return values + self.l2 / 2 * x.square().sum()

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        values = x.new_zeros(len(self.names))
        right = torch.zeros(len(self.names), dtype=torch.float64, device=x.device)
        for i, output, y, weight in self._predicted(x, [None] * len(right)):
            correct = self.correct(output, y)
            values[i] += self.function.weighted(output, y, weight)
            right[i] += float("nan") if correct is None else correct.sum()
        losses = (values + self.l2 / 2 * x.square().sum()).double().cpu().numpy()
        return losses, right.cpu().numpy() / np.array(self.rows.sizes)

    @torch.no_grad()
    def _predicted(self, x: Tensor, rows: Rows) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield outputs, targets and weights 1/m_i of a client's rows, many clients in a pass."""
        numbers = [self.rows.numbers(i, own) for i, own in enumerate(rows)]
        parts = [(i, part) for i, own in enumerate(numbers) for part in torch.split(own, CHUNK)]
        first = 0
        for end in range(1, len(parts) + 1):
            if end < len(parts) and sum(len(n) for _, n in parts[first : end + 1]) <= CHUNK:
                continue
            lengths = [len(part) for _, part in parts[first:end]]
            picked = torch.cat([part for _, part in parts[first:end]])
            outputs = torch.split(self.function.outputs(x, self.rows.X[picked]), lengths)
            targets = torch.split(self.rows.y[picked], lengths)
            for (i, part), output, y in zip(parts[first:end], outputs, targets, strict=True):
                yield i, output, y, output.new_full((len(part),), 1 / len(numbers[i]))
            first = end

    def local_updates(
        self, x: Tensor, at: Held, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        n = len(self.names)
        each = x.new_zeros(n, len(x))
        pull = each + shift(at, correction)
        eta = step_sizes(plan, n, lambda: self.constants().smoothness, x)
        seeds = Draws((*plan.key, DROPOUT), self.streams).seeds
        prox = x.new_full((), plan.prox)
        b = plan.batch_size
        lengths = [m if b is None else min(b, m) for m in self.rows.sizes]

        def work(group: list[int]) -> None:
            who = torch.tensor(group, device=self.device)
            positions, weight = self._batches(group, [lengths[i] for i in group], plan)
            starts = self.rows.starts[who]
            given = StepInputs(x, pull[who], eta[who], starts, positions, weight, seeds[who], prox)
            each[who] = self._steps(plan.steps, given)

        self._settle(x)
        parallel_map(work, list(self._groups(lengths, plan.steps)), self.device)
        return StackedDisplacements(each)

    def _batches(
        self, group: list[int], lengths: list[int], plan: LocalPlan
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of every step, (J, n, c), or (1, n, c) if all have the same, and 1/c."""
        c = max(lengths)
        count = torch.tensor(lengths, device=self.device)[:, None]
        place = torch.arange(c, device=self.device)
        weight = (place < count).to(self.dtype) / count
        whole = torch.where(place < count, place, 0)[None]
        if plan.batch_size is None:
            return whole, weight
        m = torch.tensor([self.rows.sizes[i] for i in group], device=self.device)[:, None, None]
        uniform = Draws(plan.key, self.streams[group]).uniform(plan.steps * c)
        drawn = (uniform.view(len(group), plan.steps, c) * m).long().transpose(0, 1)
        # a client with no more rows than a batch uses all of them
        return torch.where(count < m[:, 0], drawn, whole).contiguous(), weight

    def _steps(self, steps: int, given: StepInputs) -> Tensor:
        if not given.x.is_cuda or len(given.positions) != steps:
            return self._run(steps, *given)
        key = steps, given.positions.shape
        if key not in self._replays:
            self._replays[key] = GraphReplay(partial(self._run, steps))
        return self._replays[key](*given)

    def _run(self, steps: int, *given: Tensor) -> Tensor:
        """Take J steps u ← u − ηv, v ← βv + (1 − β)(g_i(u) − c_i + c + μ(u − x)), from u = x."""
        own = StepInputs(*given)
        function = self.function
        beta = self.momentum
        D = torch.zeros_like(own.pull)
        v = torch.zeros_like(D)
        batch = own.positions.shape[2]
        chunk = CHUNK if function.named is not None else batch
        for j in range(steps):
            U = own.x - D
            g = self.l2 * U
            rows = own.starts[:, None] + own.positions[min(j, len(own.positions) - 1)]
            for k in range(0, batch, chunk):
                some = rows[:, k : k + chunk]
                weight = own.weight[:, k : k + chunk]
                seeds = own.seeds + j
                piece = self.rows.X[some], self.rows.y[some], weight, seeds
                g = g + function.gradients(U, *piece)[1]
            if self.clip is not None:
                size = g.norm(dim=1, keepdim=True).clamp_min(1e-30)
                g = g * (self.clip / size).clamp_max(1)
            g = g + own.pull - own.prox * D
            v = beta * v + (1 - beta) * g if beta else g
            D = D + own.rates * v
        return D
