"""CIFAR's own python files: pickled dictionaries, read by an unpickler that can build arrays and nothing else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.data.images.files import Files
from scaffpd.data.images.pictures import Pictures
from scaffpd.data.images.raw import Raw, whole_labels
from scaffpd.errors import InputError

SIDE = 32


def is_cifar10(place: Path) -> bool:
    """Whether this looks like `cifar-10-batches-py`."""
    return any((place / name).is_file() for name in ("data_batch_1", "test_batch", "batches.meta"))


def cifar10_batches(place: Path, files: Files) -> Raw:
    """data_batch_1 … data_batch_5, test_batch and batches.meta."""
    train = [place / f"data_batch_{k}" for k in range(1, 6)]
    return _raw(files, train, place / "test_batch", place / "batches.meta", "labels", "label_names")


def is_cifar100(place: Path) -> bool:
    """Whether this looks like `cifar-100-python`."""
    return (place / "meta").is_file() or all((place / name).is_file() for name in ("train", "test"))


def cifar100_batches(place: Path, files: Files) -> Raw:
    """The files train, test and meta; the hundred fine labels."""
    return _raw(files, [place / "train"], place / "test", place / "meta", "fine_labels", "fine_label_names")


def _raw(files: Files, train: Sequence[Path], test: Path, meta: Path, labels: str, names: str) -> Raw:
    classes = _entry(_unpickled(files, meta), names, meta)
    if not isinstance(classes, list):
        raise InputError(f"{str(meta)!r} needs a list of class names under {names!r}.")
    words = tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in classes)
    parts = [_pictures(files, file, labels) for file in train]
    joined = Pictures(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    return Raw(joined, _pictures(files, test, labels), words, f"The python batches in {meta.parent.name!r}")


def _pictures(files: Files, file: Path, key: str) -> Pictures:
    """A batch stores each image as a row: 1,024 red values, 1,024 green ones, 1,024 blue ones."""
    batch = _unpickled(files, file)
    data = _entry(batch, "data", file)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * SIDE * SIDE,):
        got = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise InputError(f"{str(file)!r} needs its images as uint8 of shape (n, {3 * SIDE * SIDE}), got {got}.")
    labels = whole_labels(_entry(batch, key, file), len(data), repr(str(file)))
    return Pictures(np.ascontiguousarray(data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)), labels)


def _entry(batch: dict[str, Any], key: str, file: Path) -> Any:
    if key not in batch:
        raise InputError(f"{str(file)!r} has no {key!r}: it is not the file that CIFAR's authors publish.")
    return batch[key]


def _unpickled(files: Files, file: Path) -> dict[str, Any]:
    content = files.read(file)
    try:
        batch = _Arrays(io.BytesIO(content), encoding="latin1").load()
    except InputError as refusal:
        raise InputError(f"{str(file)!r} {refusal}") from None
    except Exception:  # a damaged pickle can raise nearly everything
        raise InputError(f"{str(file)!r} is truncated or damaged: it cannot be unpickled.") from None
    if not isinstance(batch, dict):
        raise InputError(f"{str(file)!r} holds a {type(batch).__name__}, expected CIFAR's dictionary.")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in batch.items()}


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for older readers."""
    if encoding not in ("latin1", "latin-1"):
        raise InputError(f"encodes text as {encoding!r}, which no CIFAR file does; download it again.")
    return text.encode("latin1")


def _dtype(name: str, align: object = False, copy: object = True) -> np.dtype[Any]:
    """A dtype by name; the published files say 0 and 1 where NumPy now wants False and True."""
    return np.dtype(name)


def _allowed() -> dict[tuple[str, str], Callable[..., Any]]:
    """All that a pickled array needs, whichever NumPy wrote it."""
    array = np.zeros(1)
    reconstruct: Any
    from_buffer: Any
    reconstruct, from_buffer = array.__reduce__()[0], array.__reduce_ex__(5)[0]
    table: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): _dtype,
        ("_codecs", "encode"): _latin1,
    }
    for core in ("numpy.core", "numpy._core"):
        table[f"{core}.multiarray", "_reconstruct"] = reconstruct
        table[f"{core}.numeric", "_frombuffer"] = from_buffer
    return table


class _Arrays(pickle.Unpickler):
    """An unpickler of arrays, lists, dictionaries, text and numbers."""

    allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle asks for by name, or a refusal: anything else could run code."""
        if (module, name) not in self.allowed:
            raise InputError(f"asks for {module}.{name}, which no CIFAR file needs; download it again.")
        return self.allowed[module, name]
