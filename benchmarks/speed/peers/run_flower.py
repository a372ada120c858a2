"""Flower: its FedAvg strategy and its simulation engine (Ray), one core per client and so as many clients at a time
as there are cores.

A client is the plain loop in PyTorch, as in Flower's first tutorial, with one thread (its share of the cores). Rounds
are timed inside one long-lived simulation, after two rounds to warm up: starting Ray and its workers is start-up.
Differs: clients count by their number of rows, which is the plain average here.
"""

from __future__ import annotations

import os

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1")

import contextlib
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
import workload as w
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

client_app, server_app = ClientApp(), ServerApp()
found: dict[str, Any] = {}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A client's local steps. The data are read once per worker, and do not travel."""
    torch.set_num_threads(1)
    i = int(context.node_config["partition-id"])
    X, y = (torch.from_numpy(part[i]) for part in w.data()[:2])
    generator = torch.Generator().manual_seed(w.CLIENTS * int(message.content["config"]["server-round"]) + i)
    model, loss = nn.Linear(w.FEATURES, w.CLASSES), nn.CrossEntropyLoss()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=w.RATE, weight_decay=w.L2)
    for rows in torch.randint(w.ROWS, (w.STEPS, w.BATCH), generator=generator):
        optimiser.zero_grad()
        loss(model(X[rows]), y[rows]).backward()
        optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": w.ROWS})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Two rounds to warm up, then those that are timed."""
    everyone = {"min_train_nodes": w.CLIENTS, "min_available_nodes": w.CLIENTS}
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, **everyone)
    zero = {"weight": torch.zeros(w.CLASSES, w.FEATURES), "bias": torch.zeros(w.CLASSES)}
    strategy.start(grid=grid, initial_arrays=ArrayRecord(zero), num_rounds=2)
    found["startup"] = w.since_start()
    begun = time.perf_counter()
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(zero), num_rounds=rounds)
    found["took"] = time.perf_counter() - begun
    found["model"] = result.arrays.to_torch_state_dict()


if __name__ == "__main__":
    rounds = w.rounds_wanted()
    cores = len(os.sched_getaffinity(0))
    backend = {"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1}}
    with contextlib.redirect_stdout(sys.stderr):
        run_simulation(server_app, client_app, num_supernodes=w.CLIENTS, backend_config=backend)
    model = found["model"]["weight"].T.numpy(), found["model"]["bias"].numpy()
    w.report("flower", version("flwr"), rounds, found["took"], model, found["startup"], f"{cores} clients at a time")
