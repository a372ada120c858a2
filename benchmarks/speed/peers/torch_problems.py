"""The two problems for candidates that train with PyTorch: digits (`workload.py`) and images
(`images.py`).

Both have `rate`, `l2`, X and y by client, `model()`, `clients(r)` and `rows(r, i)`: the minibatches
(steps, batch) of client i in round r = 0, 1, …
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import images
import torch
import workload as w
from torch import Tensor, nn

sys.path.append(
    str(Path(__file__).resolve().parents[3])
)  # for experiments/images/small_networks.py


class Digits:
    """Softmax regression; minibatches are drawn by one call per client and round."""

    rate = w.RATE
    l2 = w.L2

    def __init__(self) -> None:
        self.X, self.y = (torch.from_numpy(part) for part in w.data()[:2])

    def model(self) -> nn.Module:
        """A linear layer of zeros."""
        model = nn.Linear(w.FEATURES, w.CLASSES)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    def clients(self, r: int) -> Sequence[int]:
        """Everybody."""
        return range(w.CLIENTS)

    def rows(self, r: int, i: int) -> Tensor:
        """With replacement."""
        generator = torch.Generator().manual_seed(w.CLIENTS * r + i)
        return torch.randint(w.ROWS, (w.STEPS, w.BATCH), generator=generator)

    @staticmethod
    def numbers(model: nn.Module) -> w.Model:
        """Weights and intercept."""
        weight, bias = (parameter.detach() for parameter in model.parameters())
        return weight.T.numpy(), bias.numpy()


class Pictures:
    """A network; clients and minibatches are those of the file."""

    l2 = 0.0

    def __init__(self, given: images.Images) -> None:
        self.given = given
        self.rate = given.rate
        self.X, self.y = torch.from_numpy(given.X), torch.from_numpy(given.y)

    def model(self) -> nn.Module:
        """The network, with the parameters to start from."""
        from experiments.images.small_networks import NETWORKS

        model = NETWORKS[self.given.network]()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(self.given.start[name]))
        return model

    def clients(self, r: int) -> Sequence[int]:
        """Those of round r."""
        return [int(i) for i in self.given.clients[r]]

    def rows(self, r: int, i: int) -> Tensor:
        """As given."""
        return torch.from_numpy(self.given.minibatches(r, i))

    @staticmethod
    def numbers(model: nn.Module) -> dict[str, Any]:
        """All parameters by name."""
        return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


Problem = Digits | Pictures
Train = Callable[[Problem, int, images.Tick], nn.Module]  # so many rounds of the problem


@cache
def problem(file: str | None) -> Problem:
    """Images where there is a file, digits otherwise; once in a process."""
    return Pictures(images.load(file)) if file else Digits()


def local(model: nn.Module, problem: Problem, r: int, i: int) -> None:
    """Client i's steps in round r, as papers' code has them; the model is left where they end."""
    X = problem.X[i]
    y = problem.y[i]
    loss = nn.CrossEntropyLoss()
    optimiser = torch.optim.SGD(model.parameters(), lr=problem.rate, weight_decay=problem.l2)
    for rows in problem.rows(r, i):
        optimiser.zero_grad()
        loss(model(X[rows]), y[rows]).backward()
        optimiser.step()


def measure(name: str, version: str, train: Train) -> None:
    """Time `train` on the problem of the command line; of one thread and PyTorch's default the
    faster counts.
    """
    choices = {f"threads: {threads}": threads for threads in {1, torch.get_num_threads()}}
    if w.arguments().images:
        images.measure(
            name,
            version,
            {way: partial(network, train, threads) for way, threads in choices.items()},
        )
    else:
        w.measure(
            name,
            version,
            {way: partial(digits, train, threads) for way, threads in choices.items()},
        )


def digits(train: Train, threads: int, rounds: int) -> w.Model:
    """So many rounds on digits."""
    torch.set_num_threads(threads)
    return Digits.numbers(train(Digits(), rounds, lambda: None))


def network(train: Train, threads: int, given: images.Images, tick: images.Tick) -> dict[str, Any]:
    """All rounds on images."""
    torch.set_num_threads(threads)
    return Pictures.numbers(train(Pictures(given), len(given.clients), tick))
