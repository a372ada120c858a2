"""CIFAR-10, CIFAR-100 and Tiny-ImageNet, from whichever layout of files lies in the data folder.

Nothing is downloaded. The data root is `folder`, or what the environment variable SCAFFPD_DATA names; the dataset may
lie in it, or in a folder with the dataset's usual name one or two levels down (upper or lower case, with or without
hyphens). Where several layouts lie there, the first of each loader's list is read. Files that a `SHA256SUMS` in the
data root or in the dataset's folder names are checked against it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from scaffpd.data.folder import data_root, reading
from scaffpd.data.images import batches
from scaffpd.data.images.class_folders import class_folders, is_class_folders, tiny_published
from scaffpd.data.images.files import Files
from scaffpd.data.images.packed import is_mosaic, is_packed, mosaic, packed
from scaffpd.data.images.pictures import Images
from scaffpd.data.images.raw import Raw
from scaffpd.errors import InputError

T = TypeVar("T")
Folder = str | os.PathLike[str] | None
Layout = tuple[Callable[[Path], bool], Callable[[Path, Files], Raw]]


@dataclass(frozen=True)
class Published:
    """What the authors published: classes, pixels a side, images a class, and names of its folders."""

    name: str
    classes: int
    side: int
    train: int
    test: int
    folders: tuple[str, ...]
    accepted: str


CIFAR10 = Published(
    *("CIFAR-10", 10, 32, 5000, 1000),
    folders=("cifar10", "cifar10batchespy", "cifar10python", "cifar10images"),
    accepted="'cifar-10-batches-py' with the python batches, 'cifar10' with class folders in train and test, or "
    "'cifar10' with train.npz and test.npz",
)
CIFAR100 = Published(
    *("CIFAR-100", 100, 32, 500, 100),
    folders=("cifar100", "cifar100python", "cifar100images"),
    accepted="'cifar-100-python' with the files train, test and meta, 'cifar100' with class folders in train and test, "
    "or 'cifar100' with train_mosaic.jpg, test_mosaic.jpg and labels.npz",
)
TINY = Published(
    *("Tiny-ImageNet", 200, 64, 500, 50),
    folders=("tinyimagenet200", "tinyimagenet"),
    accepted="'tiny-imagenet-200' as published with wnids.txt, train and val, or 'tiny_imagenet' with train*.npz and "
    "val.npz",
)


def cifar10(folder: Folder = None) -> Images:
    """CIFAR-10: 32×32 pixels, ten classes; 50,000 images to train on and 10,000 to test on where all are there.

    Read are, in this order: the python batches (`cifar-10-batches-py`), class folders (`cifar10/train/<class>/*.png`
    and `cifar10/test/<class>/*.png`, or jpg), packed JPEG files (`cifar10/train.npz` and `test.npz`).
    """
    python: Layout = (batches.is_cifar10, batches.cifar10_batches)
    return _load(CIFAR10, folder, [python, *_common(CIFAR10)])


def cifar100(folder: Folder = None) -> Images:
    """CIFAR-100: 32×32 pixels, a hundred fine classes; 50,000 images to train on and 10,000 to test on.

    Read are, in this order: the python files (`cifar-100-python`), class folders as for `cifar10`, packed JPEG files, a
    mosaic (`cifar100/train_mosaic.jpg`, `test_mosaic.jpg` and `labels.npz`).
    """
    python: Layout = (batches.is_cifar100, batches.cifar100_batches)
    return _load(CIFAR100, folder, [python, *_common(CIFAR100), (is_mosaic, partial(mosaic, side=CIFAR100.side))])


def tiny_imagenet(folder: Folder = None) -> Images:
    """Tiny-ImageNet: 64×64 pixels, 200 classes; 100,000 images to train on, the 10,000 for validation to test on.

    Read are, in this order: the published layout (`tiny-imagenet-200`, its `val` as published or sorted into class
    folders), packed JPEG files (`tiny_imagenet/train*.npz` and `val.npz`). Classes are sorted by WordNet number.
    """
    published: Layout = (is_class_folders, partial(tiny_published, side=TINY.side))
    return _load(TINY, folder, [published, _common(TINY)[1]])


def _common(which: Published) -> list[Layout]:
    """Class folders and packed files; the pixels of Tiny-ImageNet were published as JPEG, CIFAR's were not."""
    jpeg = partial(packed, side=which.side, lossy=which is not TINY)
    return [(is_class_folders, partial(class_folders, side=which.side)), (is_packed, jpeg)]


def _load(which: Published, folder: Folder, layouts: list[Layout]) -> Images:
    """The first layout that any place has, checked against what was published."""
    root = data_root(folder, which.name)
    with reading(root):
        place, read = located(which, root, layouts)
        raw = read(place, Files.between(root, place))
    if len(raw.classes) != which.classes:
        raise InputError(
            f"{which.name} has {which.classes} classes, but the files in {str(place)!r} name {len(raw.classes)}."
        )
    return Images(which.name, raw.train, raw.test, raw.classes, f"{raw.words}: {_share(which, raw)}.")


def located(which: Published, root: Path, layouts: Sequence[tuple[Callable[[Path], bool], T]]) -> tuple[Path, T]:
    """Where the first layout is that any place in `root` has, and what reads it."""
    groups = (_inside(root, which.folders), [root])
    found = [(place, read) for group in groups for there, read in layouts for place in group if there(place)]
    if not found:
        raise InputError(f"There is no {which.name} in {str(root)!r}: expected {which.accepted}.")
    return found[0]


def _inside(root: Path, names: tuple[str, ...]) -> list[Path]:
    """Folders of the usual names in `root` and those in them, the deepest first; all of them can be listed."""
    outer = _named(root, names)
    inner = [inner for place in outer for inner in _named(place, names)]
    for place in inner:
        os.scandir(place).close()
    return [*inner, *outer]


def _named(place: Path, names: tuple[str, ...]) -> list[Path]:
    folders = sorted(entry for entry in place.iterdir() if entry.is_dir())
    return [entry for entry in folders if re.sub(r"[^a-z0-9]", "", entry.name.lower()) in names]


def _share(which: Published, raw: Raw) -> str:
    """How much of what was published is there."""
    found = (len(raw.train), len(raw.test))
    full = (which.train * which.classes, which.test * which.classes)
    if found == full:
        return f"all {full[0]:,} training and {full[1]:,} test images"
    each = np.bincount(raw.train.y, minlength=which.classes)
    balanced = f" ({each[0]} a class)" if len(set(each.tolist())) == 1 else ""
    return (
        f"a subset, {found[0]:,} of {full[0]:,} training images{balanced} and {found[1]:,} of {full[1]:,} test images"
    )
