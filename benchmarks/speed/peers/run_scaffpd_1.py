"""scaffpd as in `run_scaffpd.py`, with one thread, as a user on a busy machine might have it: OpenMP's threads wait for
each other at every step, and steps this small have little to share.
"""

from __future__ import annotations

import torch
import workload as w
from run_scaffpd import train

import scaffpd as sp

if __name__ == "__main__":
    torch.set_num_threads(1)
    rounds, startup = w.rounds_wanted(), w.since_start()
    took, model = w.seconds(train, rounds)
    w.report("scaffpd_1", sp.__version__, rounds, took, model, startup, "threads: 1")
