"""What features are computed of, and with: checked before any work."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.errors import InputError, unknown
from scaffpd.features.backbones import Backbone
from scaffpd.features.job import Images

KINDS = ("entk", "penultimate")
DTYPES = ("float16", "float32")
FORMAT = 1  # of what is stored; another number makes old caches unknown


@dataclass(frozen=True)
class _Rows:
    x: NDArray[np.uint8]


@dataclass(frozen=True)
class _Array:
    train: _Rows
    test: _Rows
    name: str
    digest: str


def pictures(images: Any) -> Images:
    """Images, or an array that is taken for training images; refused where they are no pictures."""
    if isinstance(images, np.ndarray):
        sha = hashlib.sha256(f"{images.shape} {images.dtype}".encode())
        sha.update(np.ascontiguousarray(images).tobytes())
        images = _Array(_Rows(images), _Rows(images[:0]), "images", sha.hexdigest())
    for part in ("train", "test"):
        x = getattr(getattr(images, part, None), "x", None)
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3:
            found = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            raise InputError(f"Images need uint8 of shape (n, height, width, 3) for {part}, got {found}.")
    if len(images.train.x) == 0:
        raise InputError("Features need at least one training image: their mean and deviation are taken of those.")
    checked: Images = images
    return checked


def place(device: str | torch.device) -> torch.device:
    """The device; "auto" is a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"Unknown device {str(device)!r}: choose 'auto', 'cpu' or 'cuda'.") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError("There is no CUDA device here: choose the device 'cpu'.")
    return chosen


def options(kind: str, dtype: str) -> None:
    """Refuse names that are none."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)


def about(images: Images, backbone: Backbone, **chosen: Any) -> tuple[dict[str, Any], str]:
    """Everything on which the values depend, and a hash of it."""
    if chosen["kind"] == "penultimate":
        chosen |= {"coordinates": None, "seed": 0}  # neither matters
    fields = {
        "format": FORMAT, "images": images.name, "images_digest": images.digest, "backbone": backbone.name,
        "backbone_digest": backbone.digest, "size": backbone.size, "mean": list(backbone.mean),
        "std": list(backbone.std), **chosen,
    }  # fmt: skip
    text = json.dumps(fields, sort_keys=True)
    return json.loads(text), hashlib.sha256(text.encode()).hexdigest()[:24]
