"""Rounds of local training of a network: clients side by side, a plain PyTorch loop, and one large
batch.

On two cores: 20 clients × 20 steps of 32 images through a small convolutional network. On a GPU:
100 clients × 20 steps through the network of `benchmarks/networks.py`. The loop trains one client
after the other with `torch.optim.SGD`; the large batch makes as many steps with all clients' images
of a step at once and a single model, which is what the device achieves without clients. Ratios are
of times in one run, turn by turn; loop and side by side reach the same models. On a CPU a last
column says which share of the speed of a plain matrix product ours has, by the multiplications and
additions that the network needs. `--processor` counts processor seconds, for machines that others
use too.

`--rounds` measures whole rounds of FedAvg instead: 100 clients with 100 images of CIFAR-10 each,
ten clients a round and 20 steps of 32 images, two convolutions and a ResNet-8 with group norm,
against a plain loop over the same clients and minibatches; test accuracies after the last round
stand beside each other.

    PYTHONPATH=src python benchmarks/speed/networks.py [--device cuda] [--clients 100] [--turns 5] [--rounds 20]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import scaffpd as sp
from scaffpd.federation import LocalPlan
from scaffpd.models.draws import Draws

sys.path.append(str(Path(__file__).resolve().parents[2]))
STEPS = 20
BATCH = 32
RATE = 0.05
EACH = 100
AIMS = {"cpu": (2.5, 0.0), "cuda": (15.0, 0.5)}  # times the loop, and share of the large batch


def small() -> nn.Module:
    """Two convolutions, for 28 × 28 images in grey."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(784, 10),
    )


class Contest:
    """The same local training in three ways.

    Args:
        network: whose parameters all start from.
        clients: how many.
        device: where.
        shape: of an image.
        precision: of products, see `Module`.
        clock: by which times are taken.
    """

    def __init__(
        self,
        network: nn.Module,
        clients: int,
        device: str,
        shape: tuple[int, ...],
        precision: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        random = np.random.default_rng(0)
        data = [
            (random.standard_normal((EACH, *shape)).astype("f4"), random.integers(0, 10, EACH))
            for _ in range(clients)
        ]
        self.cohort = sp.Cohort(data, sp.Module(network, precision=precision), device=device)
        self.network = copy.deepcopy(network).to(device)
        self.device = device
        self.X = torch.tensor(np.stack([X for X, _ in data]), device=device)
        self.y = torch.tensor(np.stack([y for _, y in data]), device=device)
        self.plan = LocalPlan(STEPS, RATE, batch_size=BATCH, key=(1, 2))
        draws = [
            Draws(self.plan.key, [name]).uniform(STEPS * BATCH)[0] for name in self.cohort.names
        ]
        self.rows = (torch.stack(draws) * EACH).long().view(clients, STEPS, BATCH).to(device)

    def beside(self) -> Tensor:
        """Ours: the models of all clients, (N, d)."""
        oracle = self.cohort._oracle
        x = oracle.start()
        return x - oracle.local_updates(x, None, None, self.plan).each()

    def loop(self) -> Tensor:
        """One client after the other, as everybody writes it first."""
        return torch.stack(
            [self._trained(self.X[i], self.y[i], self.rows[i]) for i in range(len(self.X))]
        )

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

    def operations(self) -> int:
        """Floating-point operations of an image's gradient."""
        network = copy.deepcopy(self.network)
        with FlopCounterMode(display=False) as counted:
            nn.functional.cross_entropy(network(self.X[0, :BATCH]), self.y[0, :BATCH]).backward()
        return counted.get_total_flops() // BATCH

    def seconds(self, turns: int) -> dict[str, float]:
        """The median time of each, in turn."""
        ways: dict[str, Callable[[], Tensor]] = {
            "beside": self.beside,
            "loop": self.loop,
            "large": self.large,
        }
        clock = self.clock
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


@functools.cache
def everything() -> Any:
    """All images of CIFAR-10, decoded once."""
    from experiments.images.loading import cifar10

    return cifar10()


class Rounds:
    """Rounds of FedAvg with ten of a hundred clients, ours and as a loop.

    Args:
        network: whose parameters all start from.
        device: where.
        clients: N, of which a tenth takes part in a round.
        precision: see `Module`.
        steps: J.
    """

    def __init__(
        self,
        network: nn.Module,
        device: str,
        clients: int = 100,
        precision: str | None = None,
        steps: int = STEPS,
    ) -> None:
        images = everything()
        random = np.random.default_rng(0)
        rows = random.permutation(len(images.train.y))[: clients * EACH].reshape(clients, EACH)
        X, V = (
            torch.tensor(part.x.transpose(0, 3, 1, 2) / np.float32(255) - np.float32(0.5))
            for part in (images.train, images.test)
        )
        y, w = (
            torch.tensor(np.asarray(part.y, dtype=np.int64)) for part in (images.train, images.test)
        )
        model = sp.Module(network, precision=precision)
        self.cohort = sp.Cohort([(X[p].numpy(), y[p].numpy()) for p in rows], model, device=device)
        self.X, self.y = (part[torch.from_numpy(rows)].to(device) for part in (X, y))
        self.test = (V[::5].to(device), w[::5].to(device))
        self.model = model
        self.device = device
        self.network = copy.deepcopy(network).to(device)
        self.steps = steps
        self.method = sp.FedAvg(
            local_steps=steps, batch_size=BATCH, local_rate=RATE, clients_per_round=clients // 10
        )

    def ours(self, rounds: int) -> Tensor:
        """The package's own rounds; losses, which a loop would not compute either, are not looked
        up.
        """
        state = dataclasses.replace(self.method.init(self.cohort), looks=False)
        return self._timed(lambda: self._ours(state, rounds))

    def _ours(self, state: Any, rounds: int) -> Tensor:
        for _ in range(rounds):
            state = self.method.round(self.cohort, state)
        return state.x

    def chosen(self, r: int) -> Any:
        """The clients of round r = 1, 2, …, as `FedAvg` draws them."""
        return np.sort(
            np.random.default_rng([0, r, 2]).choice(len(self.X), len(self.X) // 10, replace=False)
        )

    def minibatches(self, r: int, i: int) -> Tensor:
        """Which images client i uses in round r, (steps, batch), as `Module` draws them."""
        drawn = Draws((0, r, 1), [self.cohort.names[i]]).uniform(self.steps * BATCH)[0]
        return (drawn * EACH).long().view(self.steps, BATCH)

    def loop(self, rounds: int) -> Tensor:
        """One client after the other, with the clients and the minibatches of ours."""
        return self._timed(lambda: self._loop(rounds))

    def _loop(self, rounds: int) -> Tensor:
        own = copy.deepcopy(self.network)
        for r in range(1, rounds + 1):
            start = copy.deepcopy(own.state_dict())
            total = None
            for i in self.chosen(r):
                own.load_state_dict(start)
                optimizer = torch.optim.SGD(own.parameters(), RATE)
                for batch in self.minibatches(r, i).to(self.device):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(own(self.X[i][batch]), self.y[i][batch]).backward()
                    optimizer.step()
                reached = [p.detach().clone() for p in own.parameters()]
                total = (
                    reached
                    if total is None
                    else [a + b for a, b in zip(total, reached, strict=True)]
                )
            own.load_state_dict(start)
            with torch.no_grad():
                for p, value in zip(own.parameters(), total or [], strict=True):
                    p.copy_(value / len(self.chosen(r)))
        return torch.cat([p.detach().flatten() for p in own.parameters()])

    def _timed(self, work: Callable[[], Tensor]) -> Tensor:
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        began = clock()
        x = work()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds = clock() - began
        return x

    def accuracy(self, x: Tensor) -> float:
        """On test images."""
        with torch.no_grad():
            output = self.model.network(x.cpu()).to(self.device).eval()(self.test[0])
        return float((output.argmax(1) == self.test[1]).float().mean())

    def row(self, title: str, rounds: int, turns: int) -> str:
        """One line: seconds of a round, the median over turns, and the accuracies that came of it."""
        self.ours(2)  # graphs are recorded
        self.loop(1)
        times: dict[str, list[float]] = {"ours": [], "loop": []}
        found: dict[str, Tensor] = {}
        for _ in range(turns):
            for name, way in (("ours", self.ours), ("loop", self.loop)):
                found[name] = way(rounds)
                times[name].append(self.seconds / rounds)
        ours, loop = (float(np.median(times[name])) for name in ("ours", "loop"))
        scores = " | ".join(f"{self.accuracy(found[name]):.1%}" for name in ("ours", "loop"))
        return f"| {title} | {1000 * ours:,.1f} ms | {1000 * loop:,.1f} ms | {loop / ours:.1f} × | {scores} |"


def measure_rounds(device: str, rounds: int, turns: int, quick: bool) -> None:
    """Print the table of rounds."""
    from experiments.images.small_networks import NETWORKS, TITLES

    print(
        f"| a round of FedAvg on {device}, {rounds} rounds | ours | loop | ratio | accuracy, ours "
        "| loop |"
    )
    print("|---|---|---|---|---|---|")
    for key, make in NETWORKS.items():
        for precision in (None, "bf16") if device == "cuda" else (None,):
            torch.manual_seed(0)
            contest = Rounds(make(), device, 20 if quick else 100, precision)
            print(
                contest.row(TITLES[key] + (", bf16" if precision else ""), rounds, turns),
                flush=True,
            )


def row(title: str, contest: Contest, turns: int, exact: bool) -> str:
    """One line of the table, and a verdict against the aims."""
    if exact:  # rounding may turn a ReLU or a maximum of single clients: half of them have none
        ours = contest.beside()
        theirs = contest.loop()
        start = contest.cohort.start()
        off = float(((ours - theirs).norm(dim=1) / (theirs - start).norm(dim=1)).median())
        assert off < 1e-5, f"{title}: the models differ by {off}"
    found = contest.seconds(turns)
    images = len(contest.X) * STEPS * BATCH
    aims = AIMS[contest.device]
    ratio = found["loop"] / found["beside"]
    share = found["large"] / found["beside"]
    holds = ratio >= aims[0] and share >= aims[1]
    rates = " | ".join(f"{images / found[name]:,.0f}" for name in ("loop", "beside", "large"))
    aim = f"≥ {aims[0]:g} ×" + (f", ≥ {aims[1]:g}" if aims[1] else "")
    line = f"| {title} | {rates} | {ratio:.1f} × | {share:.2f} | {aim}: {'holds' if holds else 'DOES NOT HOLD'} |"
    if contest.device == "cuda":
        return line
    speed = images / found["beside"] * contest.operations() / 1e9
    bound = product_speed(contest.clock)
    return f"{line} {speed:.1f} of {bound:.1f} GFLOPS: {speed / bound:.0%} |"


def product_speed(clock: Callable[[], float], size: int = 1024) -> float:
    """GFLOPS of a product of large matrices, on as many threads as PyTorch has."""
    A = torch.ones(size, size)
    times = list[float]()
    for _ in range(6):
        began = clock()
        A @ A
        times.append(clock() - began)
    return 2 * size**3 / min(times) / 1e9


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
    from experiments.images.small_networks import ResNet8, two_convolutions

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(AIMS)
    )
    parser.add_argument("--clients", type=int)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few clients, to see that it runs")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    parser.add_argument("--processor", action="store_true", help="count processor seconds")
    parser.add_argument(
        "--rounds", type=int, help="whole rounds of FedAvg on CIFAR-10, so many of them"
    )
    given = parser.parse_args()
    if given.rounds:
        measure_rounds(given.device, given.rounds, 1 if given.quick else given.turns, given.quick)
        return
    torch.manual_seed(0)
    clients = given.clients or (3 if given.quick else 20 if given.device == "cpu" else 100)
    turns = 1 if given.quick else given.turns
    cpu = given.device == "cpu"
    clock = time.process_time if given.processor else time.perf_counter
    heading = "| images per second | loop | side by side | one large batch | × loop | share of large | aim |"
    print(heading + (f" of a matrix product, {torch.get_num_threads()} threads |" if cpu else ""))
    print("|---|---|---|---|---|---|---|" + ("---|" if cpu else ""))
    cases = [
        ("two convolutions of 28 px", small(), (1, 28, 28)),
        ("two convolutions of 32 px", two_convolutions(), (3, 32, 32)),
    ]
    if cpu and not given.quick:
        cases.append(
            ("ResNet-8 with group norm", ResNet8(10, 16, (0.0,) * 3, (1.0,) * 3), (3, 32, 32))
        )
    for name, network, shape in cases[: 1 if given.quick else 3]:
        contest = Contest(network, clients, given.device, shape, clock=clock)
        exact = (
            cpu and "ResNet" not in name
        )  # in 20 steps of a ResNet rounding grows a thousandfold, for all ways
        print(row(f"{name}, {clients} clients, {given.device}", contest, turns, exact), flush=True)
        if given.device == "cuda":
            half = Contest(network, clients, "cuda", shape, "bf16")
            print(row("the same, products in bf16 beside float32", half, turns, False), flush=True)
        if given.profile:
            print(profile(contest))


if __name__ == "__main__":
    main()
