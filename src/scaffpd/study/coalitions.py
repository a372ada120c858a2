r"""`coalition`: what does each client bring? Groups train together, and held-out losses make a
game.

    L_i(S)   held-out loss of client i ∈ S under the model that the group S trains
    v(S)     Σ_{i∈S} L_i({i}) − L_i(S), what the group saves against everybody alone
    φ_i      Σ_{S∌i} |S|!(N−1−|S|)!/N! (v(S∪{i}) − v(S)), the value of Shapley (1953)

v(∅) = v({i}) = 0 and Σ_i φ_i = v(all). φ_i is a mean over all orders in which clients may join;
where there are many clients, over some that are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.fair import fair
from scaffpd.errors import InputError, count
from scaffpd.models import Linear, Module, Personal, regulariser
from scaffpd.objectives import Average, Excess, Objective
from scaffpd.study.joining import AnyModel, provable, with_classes
from scaffpd.training.cohort import Cohort, Pair, in_order, named_pairs
from scaffpd.training.loop import train as run

Array = NDArray[np.float64]
Orders = NDArray[np.int64]
Group = tuple[int, ...]  # numbers of clients
Client = tuple[str, Pair, Pair]  # its name, training rows and held-out rows


@dataclass(frozen=True)
class Coalition:
    """Contribution and gain of every client; arrays are in the order of `names`.

    Attributes:
        names: the clients.
        alone: L_i({i}), a client's held-out loss by itself, without a regulariser.
        together: L_i(all).
        matrix: (N × N), by how much client i's loss rises when j leaves; on the diagonal, when i is
            left alone.
        shapley: φ_i, a client's share of what all save together. What it gets is less or more:
            shapley − gets is what others would owe it if losses could be paid for.
        errors: standard errors of `shapley`; zero where all groups were trained.
        losses: L_i(S) of the members of every trained group, which is the tuple of their numbers.
    """

    names: tuple[str, ...]
    alone: Array
    together: Array
    matrix: Array = field(repr=False)
    shapley: Array
    errors: Array = field(repr=False)
    losses: Mapping[Group, Array] = field(repr=False)

    @classmethod
    def of(
        cls, names: Sequence[str], losses: Mapping[Group, Array], orders: Orders | None = None
    ) -> Self:
        """Make the game from the losses of all groups.

        With `orders` of joining, (M × N), those of the groups on their way are enough.
        """
        everybody = tuple(range(len(names)))
        alone = np.array([losses[(i,)][0] for i in everybody])
        together = losses[everybody]
        matrix = np.diag(alone - together)
        for others in itertools.combinations(everybody, len(names) - 1):
            (j,) = set(everybody) - set(others)
            matrix[list(others), j] = losses[others] - together[list(others)]
        value = {g: float((alone[list(g)] - own).sum()) for g, own in losses.items()} | {(): 0.0}
        shapley, errors = _exact(value, len(names)) if orders is None else _drawn(value, orders)
        return cls(tuple(names), alone, together, matrix, shapley, errors, losses)

    @property
    def gets(self) -> Array:
        """L_i({i}) − L_i(all)."""
        return self.alone - self.together

    @property
    def brings(self) -> Array:
        """The mean of the others' losses without a client, less the same with it."""
        brought: Array = (self.matrix.sum(0) - self.gets) / (len(self.names) - 1)
        return brought

    def __str__(self) -> str:
        before, now = self.alone.mean(), self.together.mean()
        most, least = self.names[int(self.shapley.argmax())], self.names[int(self.shapley.argmin())]
        return (
            f"The mean held-out loss of {len(self.names)} clients is {now:.4g} together and "
            f"{before:.4g} alone; {int((self.gets > 0).sum())} of them gain. "
            f"{most} contributes the most, {least} the least."
        )


def _exact(value: Mapping[Group, float], N: int) -> tuple[Array, Array]:
    """Return φ by its definition, over all groups that a client is in."""
    found = np.zeros(N)
    for group in value:
        for i in group:
            before = value[tuple(k for k in group if k != i)]
            found[i] += (value[group] - before) / (N * math.comb(N - 1, len(group) - 1))
    return found, np.zeros(N)


def _drawn(value: Mapping[Group, float], orders: Orders) -> tuple[Array, Array]:
    """Return φ and its standard error: the mean over orders of what each adds when it joins."""
    added = np.zeros(orders.shape)
    for row, order in zip(added, orders.tolist(), strict=True):
        row[order] = np.diff([value[tuple(sorted(order[:k]))] for k in range(len(order) + 1)])
    return added.mean(0), added.std(0, ddof=1) / math.sqrt(len(orders))


def coalition(
    train: Sequence[Pair] | Mapping[str, Pair],
    test: Sequence[Pair] | Mapping[str, Pair],
    model: AnyModel,
    objective: Objective | None = None,
    *,
    names: Sequence[str] | None = None,
    most: int = 12,
    permutations: int = 100,
    seed: int = 0,
    tol: float = 1e-6,
    rounds: int = 200,
) -> Coalition:
    """Train groups of clients, and return what each client brings and gets.

    Args:
        train: one (X, y) per client, or a mapping from names to them.
        test: the same of held-out rows.
        model: what a group trains; with `Personal(...)`, members are scored with models of their
            own.
        objective: of every group, `Average()` if not given; its prior is cut to the group.
        names: the clients' names.
        most: up to so many clients, all 2^N − 1 groups are trained, for exact Shapley values.
        permutations: how many orders of joining are drawn where there are more.
        seed: of these, and of training.
        tol: the proven gap at which a training stops, where there is a proof.
        rounds: the most rounds of a training.
    """
    goal = Average() if objective is None else objective
    if not isinstance(model, Linear | Module | Personal):
        raise InputError(
            "not-a-model",
            f"coalition needs a model such as Linear(...) or Personal(...), got {model!r}.",
        )
    if not isinstance(goal, Objective):
        raise InputError(
            "not-an-objective",
            f"coalition needs an objective such as Average(), got {objective!r}.",
        )
    pairs, known = named_pairs(train, names)
    if len(pairs) < 2:
        raise InputError("too-few-clients", "coalition needs at least two clients.")
    if count("coalition", "permutations", permutations) < 2:
        raise InputError(
            "too-few-permutations", "coalition needs permutations >= 2, to estimate its error."
        )
    Cohort(train, model, names, test=test, settle=False)  # refuses what does not fit together
    held = in_order(test, known)
    groups, orders = _groups(len(pairs), count("coalition", "most", most), permutations, seed)
    clients = list(zip(known, pairs, held, strict=True))
    full = with_classes(model, [*pairs, *held])
    found = dict(_runs(groups, clients, full, goal, seed, tol, rounds))
    return Coalition.of(known, found, orders)


def _groups(
    N: int, most: int, permutations: int, seed: int
) -> tuple[Iterable[Group], Orders | None]:
    """List who trains together, and the orders that are drawn."""
    everybody = tuple(range(N))
    if most >= N:
        # a Gray code: neighbours differ by one client, so that warm starts are close
        gray = (k ^ (k >> 1) for k in range(1, 2**N))
        return (tuple(i for i in everybody if code >> i & 1) for code in gray), None
    random = np.random.default_rng(seed)
    orders = np.array([random.permutation(N) for _ in range(permutations)])
    joining = (tuple(sorted(order[:k])) for order in orders.tolist() for k in range(1, N + 1))
    some = [*((i,) for i in everybody), *itertools.combinations(everybody, N - 1), *joining]
    return dict.fromkeys(some), orders


def _runs(
    groups: Iterable[Group],
    clients: Sequence[Client],
    model: AnyModel,
    goal: Objective,
    seed: int,
    tol: float,
    rounds: int,
) -> Iterator[tuple[Group, Array]]:
    """Yield the members' held-out losses.

    Each group starts where the last ended, if a proof says when to stop: without one, the result
    would depend on the start.
    """
    x = None
    for group in groups:
        names, train, test = zip(*(clients[i] for i in group), strict=True)
        cohort = Cohort(train, model, names, test=test)
        proven = tol if provable(cohort.model) else None
        method = fair(among(goal, group))
        found = run(method, cohort, rounds, proven, seed, x, progress=False).uninterrupted()
        x = None if proven is None else found.x
        yield group, held_out_losses(cohort, found.x)


def held_out_losses(clients: Cohort, x: Array) -> Array:
    """Return the mean losses of held-out rows, without a regulariser."""
    return clients.evaluate(x, "test").loss - regulariser(clients.model, x)


def among(objective: Objective, group: Group) -> Objective:
    """Return the objective with the prior of some clients, and a cap that so few can meet."""
    if isinstance(objective, Excess):
        return Excess(among(objective.objective, group), objective.offset)
    changes: dict[str, object] = {}
    if objective.prior is not None:
        changes["prior"] = objective.prior[list(group)]
    cap = getattr(objective, "cap", None)
    if cap is not None:
        changes["cap"] = max(cap, 1 / len(group))
    return objective.with_arguments(**changes) if changes else objective
