r"""`coalition`: why be in it? Groups of clients train together, and their members' held-out losses
make a game.

    L_i(S)   held-out loss of client i ∈ S under the model that the group S trains
    v(S)     Σ_{i∈S} L_i({i}) − L_i(S), what the group saves against everybody alone; v(∅) = v({i})
    = 0 φ_i      Σ_{S∌i} |S|!(N−1−|S|)!/N! (v(S∪{i}) − v(S)), the value of Shapley (1953); Σ_i φ_i =
    v(all) core     no group S has L_i(S) < L_i(all) for all of its members i, so that none would
    leave

φ_i is a mean over all orders in which clients may join; where there are many clients, over some
that are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.fair import fair
from scaffpd.errors import InputError, count
from scaffpd.models import Linear, Module, Personal
from scaffpd.numbers import several
from scaffpd.objectives import Average, Objective
from scaffpd.study.folds import AnyModel, Group, among, base_of, held_out_losses, with_classes
from scaffpd.training.cohort import Cohort, Pair, in_order, named_pairs
from scaffpd.training.loop import train as run

Array = NDArray[np.float64]
Orders = NDArray[np.int64]
MARGIN = 0.01  # the share of a loss below which a difference counts as none


class BlockingCoalition(NamedTuple):
    """A group whose members would all do better by themselves, and the least of their gains as a
    share of the loss.
    """

    names: tuple[str, ...]
    gain: float


@dataclass(frozen=True)
class Coalition:
    """Contribution and gain of every client, and groups that would leave; arrays are in the order
    of `names`.

    Attributes:
        names: the clients.
        alone: L_i({i}), a client's held-out loss by itself, without a regulariser.
        together: L_i(all).
        gets: alone − together.
        brings: the mean of the others' losses without a client, less the same with it.
        matrix: (N × N), by how much client i's loss rises when j leaves; on the diagonal, when i is
            left alone.
        shapley: φ_i, a client's share of what all save together. What it gets is less or more:
            shapley − gets is what others would owe it if losses could be paid for.
        errors: standard errors of `shapley`; zero where all groups were trained.
        leaving: groups in which everybody would do better by more than the margin, the most eager
            first; `None` where not all groups were trained.
        losses: L_i(S) of the members of every trained group, which is the tuple of their numbers.
        word: what a client is called.
    """

    names: tuple[str, ...]
    alone: Array
    together: Array
    gets: Array
    brings: Array
    matrix: Array = field(repr=False)
    shapley: Array
    errors: Array = field(repr=False)
    leaving: tuple[BlockingCoalition, ...] | None
    losses: Mapping[Group, Array] = field(repr=False)
    word: str = "client"

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        losses: Mapping[Group, Array],
        orders: Orders | None = None,
        word: str = "client",
    ) -> Self:
        """Make the game from the losses of all groups, or of those on the way of some orders of
        joining, (M × N).
        """
        everybody = tuple(range(len(names)))
        alone = np.array([losses[(i,)][0] for i in everybody])
        together = losses[everybody]
        gets = alone - together
        matrix = np.diag(gets)
        for others in itertools.combinations(everybody, len(names) - 1):
            (j,) = set(everybody) - set(others)
            matrix[list(others), j] = losses[others] - together[list(others)]
        brings = (matrix.sum(0) - gets) / (len(names) - 1)
        value = {g: float((alone[list(g)] - own).sum()) for g, own in losses.items()} | {(): 0.0}
        shapley, errors = _exact(value, everybody) if orders is None else _drawn(value, orders)
        found = cls(
            tuple(names),
            alone,
            together,
            gets,
            brings,
            matrix,
            shapley,
            errors,
            None,
            losses,
            word,
        )
        return found if orders is not None else replace(found, leaving=found._would_leave())

    def table(self) -> list[dict[str, Any]]:
        """Return rows of `coalition.csv`: the rise of a client's loss when another, or all others,
        are not there.
        """
        pairs = itertools.product(enumerate(self.names), enumerate(self.names))
        return [
            {"client": a, "leaving": b, "rise": float(self.matrix[i, j])}
            for (i, a), (j, b) in pairs
        ]

    def summary(self) -> dict[str, Any]:
        """Return what a run's summary says of it."""
        columns = ("alone", "together", "gets", "brings", "shapley", "errors")
        rows = zip(self.names, *(getattr(self, name).tolist() for name in columns), strict=True)
        clients = [dict(zip(("client", *columns), row, strict=True)) for row in rows]
        first = [
            {"clients": list(one.names), "gain": one.gain} for one in (self.leaving or ())[:10]
        ]
        groups = None if self.leaving is None else len(self.leaving)
        return {
            "sentence": str(self),
            "peace": self._peace,
            "clients": clients,
            "would_leave": groups,
            "first": first,
            "margin": MARGIN,
        }

    def _would_leave(self) -> tuple[BlockingCoalition, ...]:
        found = []
        for group, own in self.losses.items():
            now = self.together[list(group)]
            gain = float(((now - own) / np.maximum(now, 1e-300)).min())
            found.append(BlockingCoalition(tuple(self.names[i] for i in group), gain))
        return tuple(sorted((one for one in found if one.gain > MARGIN), key=lambda one: -one.gain))

    def __str__(self) -> str:
        less = _change(self.together.mean() - self.alone.mean(), self.alone.mean())
        gain, lose = (int((sign * self.gets > MARGIN * self.alone).sum()) for sign in (1, -1))
        most = int(self.brings.argmax())
        least = int(self.brings.argmin())
        more, fewer = (
            _change(self.brings[j], np.delete(self.together, j).mean()) for j in (most, least)
        )
        a = self.names[most]
        b = self.names[least]
        most_and_least = f"{a} brings the most: the others' loss is {more} without it; {b} brings the least: {fewer} without it."
        if more.endswith("lower") or more.startswith("0.0 "):
            most_and_least = f"Nobody brings the others anything: their loss is {more} without {a}, {fewer} without {b}."
        return (
            f"Together, the mean held-out loss of {several(len(self.names), self.word)} is {less} than alone: "
            f"{gain or 'none'} gain{'' if gain > 1 else 's'} and {lose or 'none'} lose{'' if lose > 1 else 's'} "
            f"more than {100 * MARGIN:.3g} %. {most_and_least} {self._peace}"
        )

    @property
    def _peace(self) -> str:
        found = self.leaving
        tried = ""
        if found is None:
            found = self._would_leave()
            tried = f" of the {len(self.losses)} that were tried"
        if not found:
            return f"No group{tried} would do better by itself by as much."
        n, (names, gain) = len(found), found[0]
        who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        would = (
            "group{} would do better by itself:"
            if n == 1
            else "groups{} would do better by themselves, first"
        )
        return f"{n} {would.format(tried)} {who} (loss at least {100 * gain:.1f} % lower)."


def _change(difference: float, base: float) -> str:
    share = 100 * difference / max(abs(base), 1e-300)
    return f"{abs(share):.{0 if abs(share) >= 9.95 else 1}f} % {'higher' if share > 0 else 'lower'}"


def _exact(value: Mapping[Group, float], everybody: Group) -> tuple[Array, Array]:
    """Return φ by its definition, over all groups that a client is in."""
    N = len(everybody)
    found = np.zeros(len(everybody))
    for group, i in ((g, i) for g in value for i in g):
        before = value[tuple(k for k in group if k != i)]
        found[i] += (value[group] - before) / (N * math.comb(N - 1, len(group) - 1))
    return found, np.zeros(N)


def _drawn(value: Mapping[Group, float], orders: Orders) -> tuple[Array, Array]:
    """Return φ as the mean over orders of joining of what each adds when it comes, and its standard
    error.
    """
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
    word: str = "client",
    alone: Sequence[float] | None = None,
) -> Coalition:
    """Train groups of clients and tell what each client brings, what it gets, and whether a group
    had better leave.

    Args:
        train: one (X, y) per client, or a mapping from names to them.
        test: the same of held-out rows.
        model: what a group trains; with `Personal(...)`, members are scored with models of their
            own.
        objective: of every group, `Average()` if not given; its prior is cut to the group.
        names: the clients' names.
        most: up to so many clients, all 2^N − 1 groups are trained, for exact Shapley values and
            the core.
        permutations: how many orders of joining are drawn where there are more.
        seed: of these, and of training.
        tol: the proven gap at which a training stops, where there is a proof.
        rounds: the most rounds of a training.
        word: what a client is called.
        alone: L_i({i}) where they are known, such as those of `joining`; else clients train alone
            with this model.
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
    if test is None or len(test) == 0:
        raise InputError(
            "coalition-without-test-rows",
            "coalition needs held-out rows: give test= as one (X, y) per client.",
        )
    pairs, known = named_pairs(train, names)
    if len(pairs) < 2:
        raise InputError(
            "coalition-of-one", "coalition needs at least two clients: one has nobody to join."
        )
    if count("coalition", "permutations", permutations) < 2:
        raise InputError(
            "one-permutation", "coalition needs permutations >= 2, to know their error."
        )
    if alone is not None and len(alone) != len(pairs):
        raise InputError(
            "coalition-losses-alone",
            f"coalition needs one loss per client in alone=, got {len(alone)} for {len(pairs)} clients.",
        )
    Cohort(train, model, names, test=test)  # refuses what does not fit together
    held = in_order(test, known)
    groups, orders = _groups(len(pairs), count("coalition", "most", most), permutations, seed)
    clients = list(zip(known, pairs, held, strict=True))
    found: dict[Group, Array] = {
        (i,): np.array([loss]) for i, loss in enumerate(() if alone is None else alone)
    }
    rest = [group for group in groups if group not in found]
    full = with_classes(model, [*pairs, *held])
    found |= dict(_runs(rest, clients, full, goal, seed, tol, rounds))
    return Coalition.of(known, found, orders, word)


def _groups(
    N: int, most: int, permutations: int, seed: int
) -> tuple[Iterable[Group], Orders | None]:
    """List who trains together, neighbours differing by one client; and the orders that are drawn."""
    everybody = tuple(range(N))
    if most >= N:
        gray = (k ^ (k >> 1) for k in range(1, 2**N))
        return (tuple(i for i in everybody if code >> i & 1) for code in gray), None
    random = np.random.default_rng(seed)
    orders = np.array([random.permutation(N) for _ in range(permutations)])
    joining = (tuple(sorted(order[:k])) for order in orders.tolist() for k in range(1, N + 1))
    some = [*((i,) for i in everybody), *itertools.combinations(everybody, N - 1), *joining]
    return dict.fromkeys(some), orders


def _runs(
    groups: Iterable[Group],
    clients: Sequence[tuple[str, Pair, Pair]],
    model: AnyModel,
    goal: Objective,
    seed: int,
    tol: float,
    rounds: int,
) -> Iterator[tuple[Group, Array]]:
    """Yield the members' held-out losses; each group starts where the last ended, if a proof says
    when to stop.
    """
    base = base_of(model)
    x = None
    proven = None if base.l2 == 0 or isinstance(base, Module) else tol
    for group in groups:
        names, train, test = zip(*(clients[i] for i in group), strict=True)
        cohort = Cohort(train, model, names, test=test)
        found = run(
            fair(among(goal, group)), cohort, rounds, proven, seed, x, progress=False
        ).uninterrupted()
        x = None if proven is None else found.x
        yield group, held_out_losses(cohort, found.x, base.l2)
