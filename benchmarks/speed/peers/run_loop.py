"""A plain PyTorch loop over clients, as papers' code has it: `nn.Linear`, autograd and `torch.optim.SGD`.

All of a client's minibatches of a round are drawn by one call. PyTorch's default number of threads and one thread are
both tried; the faster counts.
"""

from __future__ import annotations

from functools import partial

import torch
import workload as w
from torch import nn

X, y = (torch.from_numpy(part) for part in w.data()[:2])


def train(threads: int, rounds: int) -> w.Model:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    model, loss = nn.Linear(w.FEATURES, w.CLASSES), nn.CrossEntropyLoss()
    x = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(rounds):
        total = [torch.zeros_like(part) for part in x]
        for i in range(w.CLIENTS):
            local(model, loss, x, i, generator)
            for part, parameter in zip(total, model.parameters(), strict=True):
                part += parameter.data
        x = [part / w.CLIENTS for part in total]
    return x[0].T.numpy(), x[1].numpy()


def local(model: nn.Module, loss: nn.Module, x: list[torch.Tensor], i: int, generator: torch.Generator) -> None:
    """Client i's steps from x; the model is left where they end."""
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), x, strict=True):
            parameter.copy_(part)
    optimiser = torch.optim.SGD(model.parameters(), lr=w.RATE, weight_decay=w.L2)
    for rows in torch.randint(w.ROWS, (w.STEPS, w.BATCH), generator=generator):
        optimiser.zero_grad()
        loss(model(X[i, rows]), y[i, rows]).backward()
        optimiser.step()


if __name__ == "__main__":
    ways = {f"threads: {threads}": partial(train, threads) for threads in {1, torch.get_num_threads()}}
    w.measure("loop", torch.__version__, ways)
