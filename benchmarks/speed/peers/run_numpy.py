"""FedAvg of all clients at once in NumPy, as one would write it: batched products, a softmax that
cannot overflow.

The BLAS's default number of threads and one thread are both tried; the faster counts. Differs:
nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import workload as w
from threadpoolctl import threadpool_limits

X, y, _, _ = w.data()
A = np.concatenate([X, np.ones((w.CLIENTS, w.ROWS, 1), np.float32)], axis=2)
TARGETS = np.eye(w.CLASSES, dtype=np.float32)[y]
EVERYONE = np.arange(w.CLIENTS)[:, None]


def train(one_thread: bool, rounds: int) -> w.Model:
    generator = np.random.default_rng(0)
    x = np.zeros((w.FEATURES + 1, w.CLASSES), np.float32)
    with threadpool_limits(1) if one_thread else nullcontext():
        for _ in range(rounds):
            u = np.repeat(x[None], w.CLIENTS, axis=0)
            for _ in range(w.STEPS):
                step(u, generator.integers(w.ROWS, size=(w.CLIENTS, w.BATCH)))
            x = u.mean(axis=0)
    return x[: w.FEATURES], x[w.FEATURES]


def step(u: np.ndarray, drawn: np.ndarray) -> None:
    """One local step of every client."""
    batch = A[EVERYONE, drawn]
    z = batch @ u
    z -= z.max(axis=-1, keepdims=True)
    p = np.exp(z, out=z)
    p /= p.sum(axis=-1, keepdims=True)
    p -= TARGETS[EVERYONE, drawn]
    gradient = batch.transpose(0, 2, 1) @ p
    u *= np.float32(1 - w.RATE * w.L2)
    u -= np.float32(w.RATE / w.BATCH) * gradient


if __name__ == "__main__":
    ways = {"threads: default": partial(train, False), "threads: 1": partial(train, True)}
    w.measure("numpy", np.__version__, ways)
