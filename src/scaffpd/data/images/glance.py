"""How many images lie in the data folder, at a glance: names, sizes and labels are read, and no image is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.folder import reading
from scaffpd.data.images import batches
from scaffpd.data.images.class_folders import SUFFIXES, is_class_folders
from scaffpd.data.images.loaders import CIFAR10, CIFAR100, TINY, Published, located
from scaffpd.data.images.packed import ENTRIES, is_mosaic, is_packed
from scaffpd.errors import InputError

Glance = Callable[[Published, Path], "Counts"]


@dataclass(frozen=True)
class Counts:
    """What was found, and where."""

    train: int
    test: int
    classes: int
    place: Path


def glance(which: Published, root: Path) -> Counts:
    """What the loader would read, or the sentence with which it would refuse."""
    with reading(root):
        place, look = located(which, root, LAYOUTS[which.name])
        counts = look(which, place)
    if counts.classes != which.classes:
        raise InputError(
            f"{which.name} has {which.classes} classes, but the files in {str(place)!r} name {counts.classes}."
        )
    return counts


def _batches(which: Published, place: Path) -> Counts:
    """Python batches: what was published, if the files are large enough to hold it."""
    if which is CIFAR10:
        train, test = [place / f"data_batch_{k}" for k in range(1, 6)], place / "test_batch"
    else:
        train, test = [place / "train"], place / "test"
    rows = which.train * which.classes // len(train)
    for file, number in [*((file, rows) for file in train), (test, which.test * which.classes)]:
        if not file.is_file():
            raise InputError(f"{str(file)!r} is missing.")
        if file.stat().st_size < number * 3 * which.side**2:
            raise InputError(f"{str(file)!r} is truncated or damaged: it is too small for {number:,} images.")
    return Counts(which.train * which.classes, which.test * which.classes, which.classes, place)


def _folders(which: Published, place: Path, test: str) -> Counts:
    classes = [entry for entry in (place / "train").iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return Counts(_images(place / "train"), _images(place / test), len(classes), place)


def _images(folder: Path) -> int:
    """Image files in the folders below, or in a folder `images` of those."""
    patterns = ("*/*", "*/images/*")
    number = sum(file.suffix.lower() in SUFFIXES for pattern in patterns for file in folder.glob(pattern))
    if not number:
        raise InputError(f"{str(folder)!r} has no images that end in {', '.join(SUFFIXES)}.")
    return number


def _packed(which: Published, place: Path) -> Counts:
    test = place / ("val.npz" if (place / "val.npz").is_file() else "test.npz")
    train = next(iter(sorted(place.glob("train*.npz"))), place / "train.npz")
    first, second = (_labels(file) for file in (train, test))
    return Counts(len(first["labels"]), len(second["labels"]), len(first["classes"]), place)


def _labels(file: Path) -> dict[str, NDArray[Any]]:
    """Labels and names of classes of one packed file; arrays that are not asked for stay on disk."""
    with _archive(file) as arrays:
        missing = [name for name in ENTRIES if name not in arrays.files]
        names = next((name for name in ("names", "wnids") if name in arrays.files), None)
        if missing or names is None:
            raise InputError(f"{str(file)!r} has no {missing[0] if missing else 'names'!r}.")
        found: dict[str, NDArray[Any]] = _read(file, lambda: {"labels": arrays["labels"], "classes": arrays[names]})
    return found


def _mosaic(which: Published, place: Path) -> Counts:
    with _archive(place / "labels.npz") as arrays:
        if "fine_names" not in arrays.files:
            raise InputError(f"{str(place / 'labels.npz')!r} has no 'fine_names'.")
        classes = len(_read(place / "labels.npz", lambda: arrays["fine_names"]))
    train, test = (_tiles(place / f"{part}_mosaic.jpg", which.side) for part in ("train", "test"))
    return Counts(train, test, classes, place)


def _tiles(file: Path, side: int) -> int:
    from PIL import Image

    try:
        with Image.open(file) as image:
            width, height = image.size
    except FileNotFoundError:
        raise InputError(f"{str(file)!r} is missing.") from None
    except Exception:  # Pillow's plugins raise nearly everything for damaged files
        raise InputError(f"{str(file)!r} is no readable image.") from None
    return (width // side) * (height // side)


def _archive(file: Path) -> Any:
    if not file.is_file():
        raise InputError(f"{str(file)!r} is missing.")
    return _read(file, lambda: np.load(file, allow_pickle=False))


def _read(file: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except PermissionError:
        raise
    except Exception:  # zipfile, zlib and numpy each have their own
        raise InputError(f"{str(file)!r} is truncated or damaged: it is no archive of plain arrays.") from None


_common: list[tuple[Callable[[Path], bool], Glance]] = [
    (is_class_folders, partial(_folders, test="test")),
    (is_packed, _packed),
]
LAYOUTS: dict[str, list[tuple[Callable[[Path], bool], Glance]]] = {  # in the order of the loaders
    CIFAR10.name: [(batches.is_cifar10, _batches), *_common],
    CIFAR100.name: [(batches.is_cifar100, _batches), *_common, (is_mosaic, _mosaic)],
    TINY.name: [(is_class_folders, partial(_folders, test="val")), (is_packed, _packed)],
}
