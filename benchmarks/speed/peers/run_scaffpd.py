"""scaffpd, by its public interface and as a user would write it.

The default number of threads; every round's record in the history is counted. Differs: nothing.
"""

from __future__ import annotations

import torch
import workload as w

import scaffpd as sp

linear = sp.Linear("softmax", l2=w.L2, intercept=True, classes=w.CLASSES)
cohort = sp.Cohort(list(zip(*w.data()[:2], strict=True)), linear, dtype=torch.float32)
method = sp.FedAvg(local_steps=w.STEPS, batch_size=w.BATCH, local_rate=w.RATE, weights="uniform")


def train(rounds: int) -> w.Model:
    result = sp.train(method, cohort, rounds=rounds, progress=False)
    return linear.reshape(result.x, w.FEATURES)


if __name__ == "__main__":
    w.measure("scaffpd", sp.__version__, {"": train})
