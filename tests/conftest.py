"""One thread everywhere: on small problems and busy machines, more threads only fight each other."""

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import torch  # noqa: E402 - after the environment is set

torch.set_num_threads(1)
