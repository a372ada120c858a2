"""One thread everywhere: on small problems and busy machines, more threads only fight each other."""

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import torch  # noqa: E402 - after the environment is set

torch.set_num_threads(1)

try:
    import hypothesis
except ImportError:  # machines with nothing but the run-time dependencies
    hypothesis = None

# A landing must not hang on luck: with CI set, every run draws the same examples. Elsewhere they are new each time.
if hypothesis is not None and os.environ.get("CI"):
    hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("ci")
