"""pfl (pfl-research): its `FederatedAveraging` on its `SimulatedBackend`, PyTorch models, one process.

pfl passes over a user's rows in order, so every time that a user is sampled it is given 50 × 32 rows drawn with
replacement: one pass is the same 50 steps. No evaluation between rounds but the first, which pfl always makes.
PyTorch's default number of threads and one thread are both tried; the faster counts. Differs: nothing.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import torch
import workload as w
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

X, y = (torch.from_numpy(part) for part in w.data()[:2])


class Softmax(nn.Linear):
    """What pfl asks of a model: its loss and its metrics."""

    def loss(self, A: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over a minibatch."""
        return nn.functional.cross_entropy(self(A), labels)

    def metrics(self, A: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        """The accuracy."""
        return {"accuracy": Weighted(int((self(A).argmax(1) == labels).sum()), len(labels))}


def train(threads: int, rounds: int) -> w.Model:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def user(i: int) -> PyTorchTensorDataset:
        rows = torch.randint(w.ROWS, (w.STEPS * w.BATCH,), generator=generator)
        return PyTorchTensorDataset((X[i, rows], y[i, rows]))

    users = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(w.CLIENTS))))
    module = Softmax(w.FEATURES, w.CLASSES)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    server = torch.optim.SGD(module.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=w.CLIENTS, val_cohort_size=None
        ),
        SimulatedBackend(training_data=users, val_data=users),
        PyTorchModel(module, partial(torch.optim.SGD, weight_decay=w.L2), server),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=w.RATE, local_batch_size=w.BATCH),
        NNEvalHyperParams(local_batch_size=None),
        send_metrics_to_platform=False,
    )
    weight, bias = (parameter.detach() for parameter in module.parameters())
    return weight.T.numpy(), bias.numpy()


if __name__ == "__main__":
    ways = {f"threads: {threads}": partial(train, threads) for threads in {1, torch.get_num_threads()}}
    w.measure("pfl", version("pfl"), ways)
