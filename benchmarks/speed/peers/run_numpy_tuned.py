"""FedAvg of all clients at once in NumPy, tuned by hand for this one problem.

Minibatches of all clients are gathered by one `take`, the two products are batched matrix products,
and everything is written in place; classes come before rows, so that the softmax runs along
contiguous rows. The BLAS's default number of threads and one thread are both tried; the faster
counts. Differs: no maximum is taken off before `exp` (the outputs stay small here), which a library
could not afford.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import workload as w
from threadpoolctl import threadpool_limits

X, y, _, _ = w.data()
A = np.concatenate([X, np.ones((w.CLIENTS, w.ROWS, 1), np.float32)], axis=2).reshape(
    w.CLIENTS * w.ROWS, w.FEATURES + 1
)
TARGETS = np.eye(w.CLASSES, dtype=np.float32)[y.ravel()] * np.float32(w.RATE / w.BATCH)
FIRST = np.arange(w.CLIENTS)[:, None] * w.ROWS  # every client's first row


def train(one_thread: bool, rounds: int) -> w.Model:
    generator = np.random.default_rng(0)
    x = np.zeros((w.CLASSES, w.FEATURES + 1), np.float32)
    with threadpool_limits(1) if one_thread else nullcontext():
        for _ in range(rounds):
            x = one_round(x, generator)
    return x[:, : w.FEATURES].T, x[:, w.FEATURES]


def one_round(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """All clients' local steps from x, and their average."""
    draws = generator.integers(w.ROWS, size=(w.STEPS, w.CLIENTS, w.BATCH), dtype=np.int32) + FIRST
    u = np.repeat(x[None], w.CLIENTS, axis=0)
    step = np.empty_like(u)
    batch = np.empty((w.CLIENTS, w.BATCH, w.FEATURES + 1), np.float32)
    target = np.empty((w.CLIENTS, w.BATCH, w.CLASSES), np.float32)
    p = np.empty((w.CLIENTS, w.CLASSES, w.BATCH), np.float32)
    total = np.empty((w.CLIENTS, 1, w.BATCH), np.float32)
    for rows in draws:
        np.take(A, rows, axis=0, out=batch, mode="clip")
        np.take(TARGETS, rows, axis=0, out=target, mode="clip")
        np.matmul(u, batch.transpose(0, 2, 1), out=p)
        np.exp(p, out=p)
        np.sum(p, axis=1, keepdims=True, out=total)
        np.divide(w.RATE / w.BATCH, total, out=total, dtype=np.float32)
        p *= total
        p -= target.transpose(0, 2, 1)
        np.matmul(p, batch, out=step)
        u *= np.float32(1 - w.RATE * w.L2)
        u -= step
    return u.mean(axis=0)


if __name__ == "__main__":
    ways = {"threads: default": partial(train, False), "threads: 1": partial(train, True)}
    w.measure("numpy_tuned", np.__version__, ways)
