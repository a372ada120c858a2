"""A plain PyTorch loop over clients, as papers' code has it: an `nn.Module`, autograd and
`torch.optim.SGD`.

All of a client's minibatches of a round are drawn by one call.
"""

from __future__ import annotations

import images
import torch
import torch_problems as p
from torch import nn


def train(problem: p.Problem, rounds: int, tick: images.Tick) -> nn.Module:
    model = problem.model()
    x = [parameter.detach().clone() for parameter in model.parameters()]
    tick()
    for r in range(rounds):
        total = [torch.zeros_like(part) for part in x]
        clients = problem.clients(r)
        for i in clients:
            put(x, model)
            p.local(model, problem, r, i)
            for part, parameter in zip(total, model.parameters(), strict=True):
                part += parameter.data
        x = [part / len(clients) for part in total]
        tick()
    put(x, model)
    return model


@torch.no_grad()
def put(x: list[torch.Tensor], model: nn.Module) -> None:
    """Let the model have parameters x."""
    for parameter, part in zip(model.parameters(), x, strict=True):
        parameter.copy_(part)


if __name__ == "__main__":
    p.measure("loop", torch.__version__, train)
