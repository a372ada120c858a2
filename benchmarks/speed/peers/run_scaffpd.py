"""scaffpd, by its public interface and as a user would write it.

The default number of threads. On digits every round's record in the history is counted. `train`
would look up the losses of all 100 clients after every round on images too; nobody else does, so
that rounds are made by the method itself. Differs: nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import images
import torch
import workload as w

import scaffpd as sp


def digits() -> Any:
    """From a number of rounds to the model that they end in."""
    linear = sp.Linear("softmax", l2=w.L2, intercept=True, classes=w.CLASSES)
    cohort = sp.Cohort(list(zip(*w.data()[:2], strict=True)), linear, dtype=torch.float32)
    method = sp.FedAvg(
        local_steps=w.STEPS, batch_size=w.BATCH, local_rate=w.RATE, weights="uniform"
    )
    return lambda rounds: linear.reshape(
        sp.train(method, cohort, rounds=rounds, progress=False).x, w.FEATURES
    )


def network(given: images.Images, tick: images.Tick) -> dict[str, Any]:
    """All rounds; clients and minibatches follow from the seed, and are those of the file."""
    from torch_problems import Pictures

    model = sp.Module(Pictures(given).model())
    cohort = sp.Cohort(list(zip(given.X, given.y, strict=True)), model)
    rounds, taking_part, steps, batch = given.rows.shape
    method = sp.FedAvg(
        local_steps=steps, batch_size=batch, local_rate=given.rate, clients_per_round=taking_part
    )
    state = dataclasses.replace(method.init(cohort), looks=False)
    tick()
    for _ in range(rounds):
        state = method.round(cohort, state)
        tick()
    return Pictures.numbers(model.network(state.x))


if __name__ == "__main__":
    if w.arguments().images:
        images.measure("scaffpd", sp.__version__, {"": network})
    else:
        w.measure("scaffpd", sp.__version__, {"": digits()})
