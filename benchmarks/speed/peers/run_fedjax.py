"""FedJAX: its FedAvg (`fedjax.algorithms.fed_avg`) on its own in-memory data sets.

On digits with the `jit` back end (its default). Networks are written in JAX (`jax_networks.py`); of
the back ends `jit`, whose convolutions use all cores, and `pmap`, with a client per core, the
faster one counts. Differs: on digits, `shuffle_repeat_batch` deals minibatches from shuffled passes
over the rows instead of drawing with replacement; on images every client that takes part is a data
set of the rows of its minibatches, which are not shuffled. Clients count by their number of rows,
which is the plain average here. Its diagnostics (the norm of each client's update) cannot be turned
off.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(os.sched_getaffinity(0))}"

from functools import partial
from importlib.metadata import version
from typing import Any

import fedjax
import images
import jax
import jax.numpy as jnp
import numpy as np
import workload as w
from fedjax.algorithms import fed_avg


def algorithm(loss: Any, rate: float, **batches: Any) -> fedjax.FederatedAlgorithm:
    """FedAvg with plain SGD, on the back end that is set."""
    return fed_avg.federated_averaging(
        grad_fn=jax.grad(loss),
        client_optimizer=fedjax.optimizers.sgd(learning_rate=rate),
        server_optimizer=fedjax.optimizers.sgd(learning_rate=1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(**batches),
    )


def digits() -> Any:
    """From a number of rounds to the model that they end in."""
    X, y, _, _ = w.data()
    federated = fedjax.InMemoryFederatedData(
        {str(i): {"x": X[i], "y": y[i].astype("int32")} for i in range(w.CLIENTS)}
    )

    def loss(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
        outputs = batch["x"] @ params["w"] + params["b"]
        penalty = sum((part**2).sum() for part in params.values())
        return (
            jnp.mean(fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], outputs))
            + w.L2 / 2 * penalty
        )

    fed = algorithm(loss, w.RATE, batch_size=w.BATCH, num_epochs=None, num_steps=w.STEPS)

    def train(rounds: int) -> w.Model:
        sampler = fedjax.client_samplers.UniformGetClientSampler(
            federated, num_clients=w.CLIENTS, seed=0
        )
        state = fed.init({"w": jnp.zeros((w.FEATURES, w.CLASSES)), "b": jnp.zeros(w.CLASSES)})
        for _ in range(rounds):
            state, _ = fed.apply(state, sampler.sample())
        return jax.device_get((state.params["w"], state.params["b"]))

    return train


def network(backend: str, given: images.Images, tick: images.Tick) -> dict[str, Any]:
    """All rounds."""
    from jax_networks import NETWORKS, to_jax, to_numpy

    forward = NETWORKS[given.network]
    X = np.ascontiguousarray(given.X.transpose(0, 1, 3, 4, 2))
    y = given.y.astype("int32")

    def loss(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
        return jnp.mean(
            fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], forward(params, batch["x"]))
        )

    def client(r: int, i: int) -> tuple[str, fedjax.ClientDataset, jax.Array]:
        rows = given.minibatches(r, i).ravel()
        return (
            str(i),
            fedjax.ClientDataset({"x": X[i][rows], "y": y[i][rows]}),
            jax.random.PRNGKey(0),
        )

    with fedjax.for_each_client_backend(backend):
        fed = algorithm(loss, given.rate, batch_size=given.rows.shape[-1], skip_shuffle=True)
    state = fed.init(to_jax(given.start))
    tick()
    for r, clients in enumerate(given.clients):
        state = jax.block_until_ready(fed.apply(state, [client(r, i) for i in clients])[0])
        tick()
    return to_numpy(state.params)


if __name__ == "__main__":
    if w.arguments().images:
        images.measure(
            "fedjax", version("fedjax"), {name: partial(network, name) for name in ("jit", "pmap")}
        )
    else:
        w.measure("fedjax", version("fedjax"), {"": digits()})
