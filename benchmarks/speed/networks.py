"""Rounds of local training of a network: clients side by side, a plain PyTorch loop, and one large batch.

On two cores: 20 clients × 20 steps of 32 images through a small convolutional network. On a GPU: 100 clients × 20 steps
through the network of `benchmarks/networks.py`. The loop trains one client after the other with `torch.optim.SGD`; the
large batch makes as many steps with all clients' images of a step at once and a single model, which is what the
device achieves without clients. Ratios are of times in one run, turn by turn; loop and side by side reach the same
models.

    PYTHONPATH=src python benchmarks/speed/networks.py [--device cuda] [--clients 100] [--turns 5] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import scaffpd as sp
from scaffpd.federation import LocalPlan
from scaffpd.models.numerics import Draws

STEPS, BATCH, RATE, EACH = 20, 32, 0.05, 100
AIMS = {"cpu": (2.5, 0.0), "cuda": (15.0, 0.5)}  # times the loop, and share of the large batch


def small() -> nn.Module:
    """Two convolutions, for 28 × 28 images in grey."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 10),
    )  # fmt: skip


def larger() -> nn.Module:
    """Two convolutions, for 32 × 32 images in colour."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip


class Contest:
    """The same local training in three ways.

    Args:
        network: whose parameters all start from.
        clients: how many.
        device: where.
        shape: of an image.
        precision: of products, see `Module`.
    """

    def __init__(
        self, network: nn.Module, clients: int, device: str, shape: tuple[int, ...], precision: str | None = None
    ) -> None:
        random = np.random.default_rng(0)
        data = [
            (random.standard_normal((EACH, *shape)).astype("f4"), random.integers(0, 10, EACH)) for _ in range(clients)
        ]
        self.cohort = sp.Cohort(data, sp.Module(network, precision=precision), device=device)
        self.network, self.device = copy.deepcopy(network).to(device), device
        self.X = torch.tensor(np.stack([X for X, _ in data]), device=device)
        self.y = torch.tensor(np.stack([y for _, y in data]), device=device)
        self.plan = LocalPlan(STEPS, RATE, batch_size=BATCH, key=(1, 2))
        draws = [Draws(self.plan.key, [name]).uniform(STEPS * BATCH)[0] for name in self.cohort.names]
        self.rows = (torch.stack(draws) * EACH).long().view(clients, STEPS, BATCH).to(device)

    def beside(self) -> Tensor:
        """Ours: the models of all clients, (N, d)."""
        oracle = self.cohort._oracle
        x = oracle.start()
        return x - oracle.local_updates(x, None, None, self.plan).each()

    def loop(self) -> Tensor:
        """One client after the other, as everybody writes it first."""
        return torch.stack([self._trained(self.X[i], self.y[i], self.rows[i]) for i in range(len(self.X))])

    def large(self) -> Tensor:
        """A single model, with everybody's images of a step in one batch."""
        n = len(self.X)
        offsets = EACH * torch.arange(n, device=self.device)[:, None, None]
        rows = (self.rows + offsets).transpose(0, 1).reshape(STEPS, n * BATCH)
        return self._trained(self.X.flatten(0, 1), self.y.flatten(), rows)

    def _trained(self, X: Tensor, y: Tensor, batches: Tensor) -> Tensor:
        network = copy.deepcopy(self.network)
        optimizer = torch.optim.SGD(network.parameters(), RATE)
        for rows in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(X[rows]), y[rows]).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    def seconds(self, turns: int) -> dict[str, float]:
        """The median time of each, in turn; on a CPU of processor seconds, for machines that others use too."""
        ways: dict[str, Callable[[], Tensor]] = {"beside": self.beside, "loop": self.loop, "large": self.large}
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(turns + 3):  # the first ones warm up, and record graphs
            for name, way in ways.items():
                if turn < 3 and name == "loop" and turn > 0:
                    continue
                began = clock()
                way()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(clock() - began)
        return {name: float(np.median(found[-turns:])) for name, found in times.items()}


def row(title: str, contest: Contest, turns: int, exact: bool) -> str:
    """One line of the table, and a verdict against the aims."""
    if exact:  # rounding may turn a ReLU or a maximum of single clients: half of them have none
        ours, theirs, start = contest.beside(), contest.loop(), contest.cohort.start()
        off = float(((ours - theirs).norm(dim=1) / (theirs - start).norm(dim=1)).median())
        assert off < 1e-5, f"{title}: the models differ by {off}"
    found = contest.seconds(turns)
    images, aims = len(contest.X) * STEPS * BATCH, AIMS[contest.device]
    ratio, share = found["loop"] / found["beside"], found["large"] / found["beside"]
    holds = ratio >= aims[0] and share >= aims[1]
    rates = " | ".join(f"{images / found[name]:,.0f}" for name in ("loop", "beside", "large"))
    aim = f"≥ {aims[0]:g} ×" + (f", ≥ {aims[1]:g}" if aims[1] else "")
    return f"| {title} | {rates} | {ratio:.1f} × | {share:.2f} | {aim}: {'holds' if holds else 'DOES NOT HOLD'} |"


def profile(contest: Contest) -> str:
    """Where the time of our way goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    cuda = contest.device == "cuda"
    with recorded(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        contest.beside()
    order = "cuda_time_total" if cuda else "self_cpu_time_total"
    return str(found.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=60))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(AIMS))
    parser.add_argument("--clients", type=int)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few clients, to see that it runs")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    given = parser.parse_args()
    torch.manual_seed(0)
    clients = given.clients or (3 if given.quick else 20 if given.device == "cpu" else 100)
    turns = 1 if given.quick else given.turns
    print("| images per second | loop | side by side | one large batch | × loop | share of large | aim |")
    print("|---|---|---|---|---|---|---|")
    cases = [("two convolutions of 28 px", small(), (1, 28, 28)), ("two convolutions of 32 px", larger(), (3, 32, 32))]
    for name, network, shape in cases[: 1 if given.quick else 2]:
        contest = Contest(network, clients, given.device, shape)
        print(row(f"{name}, {clients} clients, {given.device}", contest, turns, given.device == "cpu"), flush=True)
        if given.device == "cuda":
            half = Contest(network, clients, "cuda", shape, "bf16")
            print(row("the same, products in bf16 beside float32", half, turns, False), flush=True)
        if given.profile:
            print(profile(contest))


if __name__ == "__main__":
    main()
