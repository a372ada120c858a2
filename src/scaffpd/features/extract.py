r"""Features of many images as one table, computed once and kept on disk.

    a_j = z_j / √d,    z_j: gradients (kind "entk") or last features (kind "penultimate") of image j, standardised with
                       mean and deviation of the training rows (see `statistics`), so that ‖a_j‖ is about one

Rows are the training images, then the test images. The folder's name is a hash of everything on which the values
depend; neither device nor chunk size is part of it (they change values by rounding only).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from scaffpd.data.silos import checked_seed
from scaffpd.data.table import Table
from scaffpd.errors import InputError, count
from scaffpd.features import inputs, room
from scaffpd.features.backbones import Backbone
from scaffpd.features.job import Job
from scaffpd.features.precision import check
from scaffpd.features.store import finished
from scaffpd.lock import alone


def features(
    images: Any,
    backbone: Backbone,
    kind: str = "entk",
    coordinates: int = 50_000,
    seed: int = 0,
    *,
    chunk: int | None = None,
    memory: int | float | str | None = None,
    device: str | torch.device = "cpu",
    dtype: str = "float16",
    precision: str = "float32",
    cache: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    verify: bool | None = None,
) -> Table:
    """The table of features, from the cache where it is complete there, else computed (on from where it stopped).

    Args:
        images: has `train.x`, `test.x` (uint8, n × h × w × 3), `name` and `digest`; or an array of training images.
        backbone: the network.
        kind: "entk" or "penultimate".
        coordinates: how many of the gradient's are kept.
        seed: of the random head, the coordinates and the provisional sample.
        chunk: images at a time, or as many as fit into `memory` if those are fewer.
        memory: bytes, or "4GB"; None: a share of what is free.
        device: "auto", "cpu", "cuda".
        dtype: "float16" or "float32", of storage.
        precision: "float32", "tf32" or "bfloat16", of the network on a GPU.
        cache: folder; None keeps the table in memory.
        progress: a bar on standard error; None where a person looks.
        verify: compare a cached table with its checksums: True, now; False, not; None, if the file of values is not
            the one (by size and time of change) for which that was done last, or at all. A table that was computed here
            needs it no more. It reads all values and hashes 0.3 to 1.5 GB/s on each core.
    """
    if not isinstance(backbone, Backbone):
        raise InputError(
            f"features needs a Backbone such as backbone('efficientnet-lite0') or Backbone.of(network, 'fc'), got "
            f"{type(backbone).__name__}."
        )
    inputs.options(kind, dtype)
    check(precision)
    budget, where, given = room.parse(memory), inputs.place(device), inputs.pictures(images)
    coordinates, seed = count("features", "coordinates", coordinates), checked_seed("features", seed)
    if chunk is not None:
        count("features", "chunk", chunk)
    fields, key = inputs.about(
        given, backbone, kind=kind, coordinates=coordinates, seed=seed, dtype=dtype, precision=precision
    )
    rows = len(given.train.x) + len(given.test.x)
    folder = None if cache is None else prepare(Path(cache) / key)
    done = finished(folder, fields, rows)
    if done is None:
        busy = f"Another process is writing the features in {str(folder)!r}: wait until it is done."
        with alone(folder, busy):
            job = Job(given, backbone.to(where), folder, fields, budget, chunk)
            return _table(job.run(progress), key)
    store, meta = done
    values = store.open()
    if verify is not False:
        store.verify(values, meta["sha256"], again=bool(verify))
    return _table(values, key)


def _table(values: NDArray[Any], key: str) -> Table:
    return Table(values, values.shape[1] ** -0.5, key)


def prepare(folder: Path) -> Path:
    """The folder, made; or one sentence about why it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot write to the folder {str(folder)!r}: {error.strerror}.") from None
    return folder
