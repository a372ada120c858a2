"""FedLab: its FedAvg server and serial client trainer in its stand-alone pipeline.

FedLab leaves data loading to the user: a client's minibatches are drawn by one call per round and
cut from its tensors, which is faster than a `DataLoader`. The optimiser is set up anew with a
weight decay, which FedLab's own has no argument for. PyTorch's default number of threads and one
thread are both tried; the faster counts. Differs: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.metadata import version

import torch
import workload as w
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch import nn

X, y = (torch.from_numpy(part) for part in w.data()[:2])


class Digits(FedDataset):
    """The clients' minibatches."""

    def __init__(self) -> None:
        super().__init__()
        self.num, self.generator = w.CLIENTS, torch.Generator().manual_seed(0)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Iterator:
        """A round's worth of client id's minibatches."""
        for rows in torch.randint(w.ROWS, (w.STEPS, batch_size), generator=self.generator):
            yield X[id, rows], y[id, rows]


class Trainer(FedAvgSerialClientTrainer):
    """FedLab's own, with weight decay."""

    def setup_optim(self, epochs: int, batch_size: int, lr: float) -> None:
        """As FedLab does."""
        super().setup_optim(epochs, batch_size, lr)
        self.optimizer = torch.optim.SGD(self._model.parameters(), lr, weight_decay=w.L2)


class Pipeline(StandalonePipeline):
    """FedLab's own, without evaluation between rounds."""

    def evaluate(self) -> None:
        """Nothing: the model is judged at the end."""


def train(threads: int, rounds: int) -> w.Model:
    torch.set_num_threads(threads)
    model = nn.Linear(w.FEATURES, w.CLASSES)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    handler = FedAvgServerHandler(model, global_round=rounds, sample_ratio=1.0)
    trainer = Trainer(model, w.CLIENTS)
    trainer.setup_dataset(Digits())
    trainer.setup_optim(epochs=1, batch_size=w.BATCH, lr=w.RATE)
    Pipeline(handler, trainer).main()
    weight, bias = (parameter.detach() for parameter in handler.model.parameters())
    return weight.T.numpy(), bias.numpy()


if __name__ == "__main__":
    ways = {
        f"threads: {threads}": partial(train, threads) for threads in {1, torch.get_num_threads()}
    }
    w.measure("fedlab", version("fedlab"), ways)
