"""Weights on disk: found, checked against their checksums, and read as tensors."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from scaffpd.data.folder import Files, data_root, reading
from scaffpd.errors import InputError


def load(network: nn.Module, file: str, folder: str | os.PathLike[str] | None) -> nn.Module:
    """The network with the weights of `folder`/weights/`file`, or one sentence about why not."""
    root = data_root(folder, f"weights/{file}")
    path = root / "weights" / file
    with reading(path):
        there = path.is_file()
    if not there:
        raise InputError(
            f"There is no file {str(path)!r}: name a folder with weights/{file} by --data or SCAFFPD_DATA."
        )
    with reading(path):
        given = _read(path, Files.between(root, path.parent).read(path))
    wanted = {name: value for name, value in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    _agree(path, given, wanted)
    network.load_state_dict(given, strict=False)
    return network


def digest(module: nn.Module) -> str:
    """Tells a network's architecture and weights from any other's."""
    sha = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        sha.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _read(path: Path, content: bytes) -> dict[str, Tensor]:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}
    except (OSError, ValueError, EOFError, KeyError, AttributeError, TypeError, zipfile.BadZipFile):
        raise InputError(f"{str(path)!r} is not a complete file of weights; copy it once more.") from None


def _agree(path: Path, given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    odd = sorted(wanted.keys() ^ given.keys())
    if odd:
        which = "lacks" if odd[0] in wanted else "has an unknown"
        more = f" ({len(odd) - 1} more names differ)" if len(odd) > 1 else ""
        raise InputError(f"{str(path)!r} {which} {odd[0]!r}{more}: it holds weights of another network.")
    for name, value in wanted.items():
        if given[name].shape != value.shape:
            raise InputError(
                f"{str(path)!r} has {name!r} of shape {tuple(given[name].shape)} in place of {tuple(value.shape)}: it "
                "holds weights of another network."
            )
