r"""Features of many images as one table, computed once and cached on disk.

    a_j = z_j / √d,    z_j: gradients (kind "entk") or last features (kind "penultimate") of image j, standardised by
                       mean and deviation of the training rows (see `compute`), so that ‖a_j‖ is about one

Rows are the training images, then the test images. The folder's name is a hash of everything on which the values
depend; neither device nor chunk size is part of it (they change values by rounding only).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scaffpd.data.silos import checked_seed
from scaffpd.data.table import Table
from scaffpd.errors import InputError, count, unknown
from scaffpd.features.backbones import Backbone
from scaffpd.features.compute import Extraction
from scaffpd.features.layers import PRECISIONS
from scaffpd.features.store import finished, parse_memory
from scaffpd.files import lock_folder, make_folder

KINDS = ("entk", "penultimate")
DTYPES = ("float16", "float32")
FORMAT = 1  # version of the stored format; another number invalidates old caches


def pictures(images: Any) -> Any:
    """Check that images have pictures as `train.x` and `test.x`; treat an array as training images."""
    if isinstance(images, np.ndarray):
        sha = hashlib.sha256(f"{images.shape} {images.dtype}".encode())
        sha.update(np.ascontiguousarray(images).tobytes())
        train = SimpleNamespace(x=images)
        test = SimpleNamespace(x=images[:0])
        images = SimpleNamespace(train=train, test=test, name="images", digest=sha.hexdigest())
    for part in ("train", "test"):
        x = getattr(getattr(images, part, None), "x", None)
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3:
            found = (
                f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            )
            raise InputError(
                "images-uint8-shape",
                f"Images need uint8 of shape (n, height, width, 3) for {part}, got {found}.",
            )
    if len(images.train.x) == 0:
        raise InputError(
            "features-least-training",
            "Features need at least one training image: their mean and deviation come from those.",
        )
    return images


def place(device: str | torch.device) -> torch.device:
    """Return the device; "auto" is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(
            "unknown-device-choose",
            f"Unknown device {str(device)!r}: choose 'auto', 'cpu' or 'cuda'.",
        ) from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "cuda-device-choose", "There is no CUDA device here: choose the device 'cpu'."
        )
    return chosen


def about(images: Any, backbone: Backbone, **chosen: Any) -> tuple[dict[str, Any], str]:
    """Return all that the values depend on, and a hash of it."""
    if chosen["kind"] == "penultimate":
        chosen |= {"coordinates": None, "seed": 0}  # neither matters
    fields = {
        "format": FORMAT,
        "images": images.name,
        "images_digest": images.digest,
        "backbone": backbone.name,
        "backbone_digest": backbone.digest,
        "size": backbone.size,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        **chosen,
    }
    text = json.dumps(fields, sort_keys=True)
    return json.loads(text), hashlib.sha256(text.encode()).hexdigest()[:24]


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
    """Return the table of features: from the cache if complete, else computed (resuming where it stopped).

    Args:
        images: has `train.x`, `test.x` (uint8, n × h × w × 3), `name` and `digest`; or an array of training images.
        backbone: the network.
        kind: "entk" or "penultimate".
        coordinates: number of the gradient's coordinates to keep.
        seed: seed of the random head, the coordinates and the provisional sample.
        chunk: images at a time, or as many as fit into `memory` if those are fewer.
        memory: bytes, or "4GB"; None: a share of the free memory.
        device: "auto", "cpu", "cuda".
        dtype: "float16" or "float32", of storage.
        precision: "float32", "tf32" or "bfloat16", of the network on a GPU.
        cache: folder; None keeps the table in memory.
        progress: a bar on standard error; None: only on a terminal.
        verify: compare a cached table with its checksums: always (True), never (False), or only if the file of values
            has changed (by size and time) since the last check (None). It hashes 0.3 to 1.5 GB/s on each core.
    """
    if not isinstance(backbone, Backbone):
        raise InputError(
            "features-backbone-such",
            f"features needs a Backbone such as backbone('efficientnet-lite0') or Backbone.of(network, 'fc'), got "
            f"{type(backbone).__name__}.",
        )
    for what, given, known in (
        ("kind", kind, KINDS),
        ("dtype", dtype, DTYPES),
        ("precision", precision, PRECISIONS),
    ):
        if given not in known:
            raise unknown(what, given, known)
    budget = parse_memory(memory)
    where = place(device)
    data = pictures(images)
    coordinates = count("features", "coordinates", coordinates)
    seed = checked_seed("features", seed)
    if chunk is not None:
        count("features", "chunk", chunk)
    fields, key = about(
        data,
        backbone,
        kind=kind,
        coordinates=coordinates,
        seed=seed,
        dtype=dtype,
        precision=precision,
    )
    rows = len(data.train.x) + len(data.test.x)
    folder = None if cache is None else make_folder(Path(cache) / key)
    done = finished(folder, fields, rows)
    if done is None:
        busy = f"Another process is writing the features in {str(folder)!r}: wait until it is done."
        with lock_folder(folder, busy):
            values = Extraction(data, backbone.to(where), folder, fields, budget, chunk).run(
                progress
            )
    else:
        store, meta = done
        values = store.open()
        if verify is not False:
            store.verify(values, meta["sha256"], again=bool(verify))
    return Table(values, values.shape[1] ** -0.5, key)
