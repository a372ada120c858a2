"""FedJAX: its FedAvg (`fedjax.algorithms.fed_avg`) on its own in-memory federated data, `jit` back end (its default).

Differs: `shuffle_repeat_batch` deals minibatches from shuffled passes over the rows instead of drawing with
replacement; clients count by their number of rows, which is the plain average here. Its diagnostics (the norm of each
client's update) cannot be turned off.
"""

from __future__ import annotations

from importlib.metadata import version

import fedjax
import jax
import jax.numpy as jnp
import workload as w
from fedjax.algorithms import fed_avg

X, y, _, _ = w.data()
federated = fedjax.InMemoryFederatedData({str(i): {"x": X[i], "y": y[i].astype("int32")} for i in range(w.CLIENTS)})


def loss(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
    outputs = batch["x"] @ params["w"] + params["b"]
    penalty = sum((part**2).sum() for part in params.values())
    return jnp.mean(fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], outputs)) + w.L2 / 2 * penalty


algorithm = fed_avg.federated_averaging(
    grad_fn=jax.grad(loss),
    client_optimizer=fedjax.optimizers.sgd(learning_rate=w.RATE),
    server_optimizer=fedjax.optimizers.sgd(learning_rate=1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=w.BATCH, num_epochs=None, num_steps=w.STEPS),
)


def train(rounds: int) -> w.Model:
    sampler = fedjax.client_samplers.UniformGetClientSampler(federated, num_clients=w.CLIENTS, seed=0)
    state = algorithm.init({"w": jnp.zeros((w.FEATURES, w.CLASSES)), "b": jnp.zeros(w.CLASSES)})
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
    return jax.device_get((state.params["w"], state.params["b"]))


if __name__ == "__main__":
    w.measure("fedjax", version("fedjax"), {"": train})
