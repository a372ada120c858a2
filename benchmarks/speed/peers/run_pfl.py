"""pfl (pfl-research): its `FederatedAveraging` on its `SimulatedBackend`, PyTorch models.

pfl passes over a user's rows in order, so every time that a user is sampled it is given the rows of
its minibatches one after the other: one pass is the same steps. No evaluation between rounds but
the first, which pfl always makes. Digits in one process; networks in one process per core with a
thread each, as pfl's guide to fast simulations has it (PFL_WORKER_ADDRESSES). Differs: nothing.
"""

# ruff: noqa: E402 (pfl connects its processes where it is imported)

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial
from importlib.metadata import version

import workload as w

WORKERS = "PFL_WORKER_ADDRESSES"
RANK = "PFL_WORKER_RANK"
cores = len(os.sched_getaffinity(0))


def colleagues() -> list[subprocess.Popen[bytes]]:
    """Start the other processes of this simulation; has to happen before pfl is imported."""
    if not w.arguments().images or RANK in os.environ or cores < 2:
        return []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {WORKERS: ",".join(f"localhost:{port + k}" for k in range(cores)), RANK: "0"}
    command = [sys.executable, *sys.argv, "--into"]
    quiet = subprocess.DEVNULL
    return [
        subprocess.Popen(
            [*command, f"{w.arguments().into}-{k}"], env=os.environ | {RANK: str(k)}, stdout=quiet
        )
        for k in range(1, cores)
    ]


others = colleagues() if __name__ == "__main__" else []

import images
import torch
import torch_problems as p
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn


class Learner(nn.Module):
    """What pfl asks of a model: its loss and its metrics."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, A: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over a minibatch."""
        return nn.functional.cross_entropy(self.network(A), labels)

    def metrics(self, A: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        """The accuracy."""
        return {"accuracy": Weighted(int((self.network(A).argmax(1) == labels).sum()), len(labels))}


class Ticks(TrainingProcessCallback):
    """Say that a round is over."""

    def __init__(self, tick: images.Tick) -> None:
        self.tick = tick

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: object, *, central_iteration: int
    ) -> tuple:
        """Go on, and have no metrics."""
        self.tick()
        return False, Metrics()


def train(problem: p.Problem, rounds: int, tick: images.Tick) -> nn.Module:
    def user(who: tuple[int, int]) -> PyTorchTensorDataset:
        rows = problem.rows(*who).flatten()
        return PyTorchTensorDataset((problem.X[who[1]][rows], problem.y[who[1]][rows]))

    order = iter([(r, i) for r in range(rounds) for i in problem.clients(r)])
    users = FederatedDataset(user, order.__next__)
    learner = Learner(problem.model())
    rows = problem.rows(0, problem.clients(0)[0])
    server = torch.optim.SGD(learner.parameters(), lr=1.0)
    tick()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=len(problem.clients(0)),
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        PyTorchModel(learner, partial(torch.optim.SGD, weight_decay=problem.l2), server),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=problem.rate, local_batch_size=rows.shape[1]
        ),
        NNEvalHyperParams(local_batch_size=rows.shape[1]),
        callbacks=[Ticks(tick)],
        send_metrics_to_platform=False,
    )
    return learner.network


if __name__ == "__main__":
    if w.arguments().images:
        way = f"{cores} processes with a thread each"
        images.measure("pfl", version("pfl"), {way: partial(p.network, train, 1)})
    else:
        p.measure("pfl", version("pfl"), train)
    for other in others:
        other.wait()
