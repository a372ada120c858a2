"""Flower: its FedAvg strategy and its simulation engine (Ray), one core per client and so as many
clients at a time as there are cores.

A client is the plain loop in PyTorch, as in Flower's first tutorial, with one thread (its share of
the cores). Rounds are timed inside one long-lived simulation, on digits after two rounds to warm
up: starting Ray and its workers is start-up. Flower draws clients itself; here they are those of
the problem, so that nodes are asked once who they are. Differs: clients count by their number of
rows, which is the plain average here.
"""

from __future__ import annotations

import os

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1"
)

import contextlib
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import images
import torch
import torch_problems as p
import workload as w
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()
server_app = ServerApp()
file = w.arguments().images if __name__ == "__main__" else None
found: dict[str, Any] = {"tick": lambda: None}


@client_app.query()
def who(message: Message, context: Context) -> Message:
    """The number of a client."""
    number = MetricRecord({"client": int(context.node_config["partition-id"])})
    return Message(content=RecordDict({"who": number}), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A client's local steps. The data are read once per worker, and do not travel."""
    torch.set_num_threads(1)
    problem = p.problem(file)
    i = int(context.node_config["partition-id"])
    model = problem.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    p.local(model, problem, int(message.content["config"]["server-round"]) - 1, i)
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": 1}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class Chosen(FedAvg):
    """Flower's own, with the clients of the problem."""

    nodes: dict[int, int]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round."""
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        nodes = [self.nodes[i] for i in p.problem(file).clients(server_round - 1)]
        return [
            Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in nodes
        ]


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Find out who is who, then make the rounds that are timed."""
    strategy = Chosen(fraction_evaluate=0.0)
    start = ArrayRecord(p.problem(file).model().state_dict())
    questions = [
        Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node)
        for node in grid.get_node_ids()
    ]
    answers = grid.send_and_receive(questions)
    strategy.nodes = {
        int(answer.content["who"]["client"]): answer.metadata.src_node_id for answer in answers
    }
    if not file:
        strategy.start(grid=grid, initial_arrays=start, num_rounds=2)
    found["startup"], begun = w.since_start(), time.perf_counter()
    evaluate = (
        (lambda r, arrays: found["tick"]()) if file else None
    )  # which Flower calls before and after every round
    result = strategy.start(
        grid=grid, initial_arrays=start, num_rounds=found["rounds"], evaluate_fn=evaluate
    )
    found["took"] = time.perf_counter() - begun
    found["state"] = result.arrays.to_torch_state_dict()


def simulate(clients: int, rounds: int, tick: images.Tick) -> Any:
    """The model after so many rounds."""
    found.update(rounds=rounds, tick=tick)
    backend = {
        "init_args": {"num_cpus": cores, "include_dashboard": False},
        "client_resources": {"num_cpus": 1},
    }
    try:
        with contextlib.redirect_stdout(sys.stderr):
            run_simulation(server_app, client_app, num_supernodes=clients, backend_config=backend)
    except Exception as failure:  # Flower's own threads would go on waiting for clients
        while failure.__cause__ is not None:
            failure = failure.__cause__
        print(repr(failure), file=sys.stderr, flush=True)
        os._exit(1)
    problem = p.problem(file)
    model = problem.model()
    model.load_state_dict(found["state"])
    return problem.numbers(model)


if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    rounds = w.arguments().rounds
    name = ("flower", version("flwr"))
    setting = f"{cores} clients at a time"
    if file:
        images.measure(
            *name, {setting: lambda given, tick: simulate(len(given.X), len(given.clients), tick)}
        )
    else:
        model = simulate(w.CLIENTS, rounds, lambda: None)
        w.report(*name, rounds, found["took"], model, found["startup"], setting)
