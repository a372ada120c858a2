"""How exactly a network is computed on a GPU, for as long as a `with` lasts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from scaffpd.errors import unknown

PRECISIONS = ("float32", "tf32", "bfloat16")


def check(precision: str) -> None:
    """Refuse a name that is none."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)


@contextmanager
def tensor_cores(device: torch.device, allowed: bool) -> Iterator[None]:
    """Whether single-precision products may be rounded to TF32; PyTorch's own default for convolutions is yes."""
    if device.type != "cuda":
        yield
        return
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases prefer another spelling
        before = [place.allow_tf32 for place in places]
        for place in places:
            place.allow_tf32 = allowed
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for place, value in zip(places, before, strict=True):
                place.allow_tf32 = value


def mixed(device: torch.device, precision: str) -> torch.autocast:
    """Forward passes in bfloat16 where that was asked for."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
