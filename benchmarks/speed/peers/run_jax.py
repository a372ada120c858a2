"""JAX, written by hand: `scan` over local steps and `vmap` over clients, a round compiled as one
function.

Drawing is part of the compiled round. Differs: nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import workload as w

X, y = (jnp.asarray(part) for part in w.data()[:2])


def loss(u: tuple[jax.Array, jax.Array], A: jax.Array, labels: jax.Array) -> jax.Array:
    outputs = jax.nn.log_softmax(A @ u[0] + u[1])
    penalty = sum((part**2).sum() for part in u)
    return -jnp.take_along_axis(outputs, labels[:, None], axis=1).mean() + w.L2 / 2 * penalty


def local(x: tuple[jax.Array, jax.Array], key: jax.Array, A: jax.Array, labels: jax.Array) -> tuple:
    """One client's steps from x."""

    def step(u: tuple, rows: jax.Array) -> tuple:
        gradient = jax.grad(loss)(u, A[rows], labels[rows])
        return jax.tree.map(lambda part, slope: part - w.RATE * slope, u, gradient), None

    return jax.lax.scan(step, x, jax.random.randint(key, (w.STEPS, w.BATCH), 0, w.ROWS))[0]


@jax.jit
def one_round(x: tuple, key: jax.Array) -> tuple:
    u = jax.vmap(local, in_axes=(None, 0, 0, 0))(x, jax.random.split(key, w.CLIENTS), X, y)
    return jax.tree.map(lambda part: part.mean(axis=0), u)


def train(rounds: int) -> w.Model:
    x = jnp.zeros((w.FEATURES, w.CLASSES)), jnp.zeros(w.CLASSES)
    for key in jax.random.split(jax.random.key(0), rounds):
        x = one_round(x, key)
    return jax.device_get(x)


if __name__ == "__main__":
    w.measure("jax", jax.__version__, {"": train})
