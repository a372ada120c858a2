"""Find, count and load CIFAR-10, CIFAR-100 and Tiny-ImageNet, from whichever layout of files lies in the data folder.

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

from scaffpd.data import images
from scaffpd.data.folder import Files, data_root, reading
from scaffpd.data.images import SUFFIXES, Images, Raw, class_folders, is_class_folders, tiny_published
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
    accepted="'cifar-10-batches-py' with the python batches, or 'cifar10' with class folders in train and test",
)
CIFAR100 = Published(
    *("CIFAR-100", 100, 32, 500, 100),
    folders=("cifar100", "cifar100python", "cifar100images"),
    accepted="'cifar-100-python' with the files train, test and meta, or 'cifar100' with class folders in train and "
    "test",
)
TINY = Published(
    *("Tiny-ImageNet", 200, 64, 500, 50),
    folders=("tinyimagenet200", "tinyimagenet"),
    accepted="'tiny-imagenet-200' as published with wnids.txt, train and val",
)


def cifar10(folder: Folder = None) -> Images:
    """CIFAR-10: 32×32 pixels, ten classes; 50,000 images to train on and 10,000 to test on where all are there.

    Read are, in this order: the python batches (`cifar-10-batches-py`), class folders (`cifar10/train/<class>/*.png`
    and `cifar10/test/<class>/*.png`, or jpg).
    """
    return load_images(CIFAR10, folder)


def cifar100(folder: Folder = None) -> Images:
    """CIFAR-100: 32×32 pixels, a hundred fine classes; 50,000 images to train on and 10,000 to test on.

    Read are, in this order: the python files (`cifar-100-python`), class folders as for `cifar10`.
    """
    return load_images(CIFAR100, folder)


def tiny_imagenet(folder: Folder = None) -> Images:
    """Tiny-ImageNet: 64×64 pixels, 200 classes; 100,000 images to train on, the 10,000 for validation to test on.

    Read is the published layout (`tiny-imagenet-200`, its `val` as published or sorted into class folders). Classes are
    sorted by WordNet number.
    """
    return load_images(TINY, folder)


def load_images(which: Published, folder: Folder, more: Sequence[Layout] = ()) -> Images:
    """Read the first layout that any place has, after ours those of `more`, and check it against what was published."""
    root = data_root(folder, which.name)
    with reading(root):
        place, read = located(which, root, [*((there, read) for there, read, _ in LAYOUTS[which.name]), *more])
        raw = read(place, Files.between(root, place))
    _check_classes(which, len(raw.classes), place)
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


Counting = Callable[[Published, Path], "Counts"]


@dataclass(frozen=True)
class Counts:
    """What was found, and where."""

    train: int
    test: int
    classes: int
    place: Path


def inspect(which: Published, root: Path) -> Counts:
    """What the loader would read, or the sentence with which it would refuse."""
    with reading(root):
        place, count = located(which, root, [(there, count) for there, _, count in LAYOUTS[which.name]])
        counts = count(which, place)
    _check_classes(which, counts.classes, place)
    return counts


def _check_classes(which: Published, found: int, place: Path) -> None:
    if found != which.classes:
        raise InputError(f"{which.name} has {which.classes} classes, but the files in {str(place)!r} name {found}.")


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


LAYOUTS: dict[str, list[tuple[Callable[[Path], bool], Callable[[Path, Files], Raw], Counting]]] = {  # the first wins
    CIFAR10.name: [
        (images.is_cifar10, images.cifar10_batches, _batches),
        (is_class_folders, partial(class_folders, side=CIFAR10.side), partial(_folders, test="test")),
    ],
    CIFAR100.name: [
        (images.is_cifar100, images.cifar100_batches, _batches),
        (is_class_folders, partial(class_folders, side=CIFAR100.side), partial(_folders, test="test")),
    ],
    TINY.name: [(is_class_folders, partial(tiny_published, side=TINY.side), partial(_folders, test="val"))],
}
