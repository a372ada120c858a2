"""Find, count and load CIFAR-10, CIFAR-100 and Tiny-ImageNet, from any known layout of files in the data folder.

Nothing is downloaded. The data root is `folder`, or the environment variable SCAFFPD_DATA; the dataset may be
in it, or in a folder with the dataset's usual name one or two levels down (upper or lower case, with or without
hyphens). If there are several layouts, the first of each loader's list is read. Files in a `SHA256SUMS` of the
data root or of the dataset's folder are checked against it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from scaffpd.data.folder import Files, data_root, reading
from scaffpd.data.images import ClassFolders, Images, PickledBatches, Published, Raw, TinyFolders
from scaffpd.errors import InputError

T = TypeVar("T")
Folder = str | os.PathLike[str] | None
Layout = tuple[Callable[[Path], bool], Callable[[Path, Files], Raw]]


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
    """Load CIFAR-10: 32×32 pixels, ten classes; 50,000 images to train on and 10,000 to test on if complete.

    Layouts, in this order: the python batches (`cifar-10-batches-py`), class folders (`cifar10/train/<class>/*.png`
    and `cifar10/test/<class>/*.png`, or jpg).
    """
    return load_images(CIFAR10, folder)


def cifar100(folder: Folder = None) -> Images:
    """Load CIFAR-100: 32×32 pixels, a hundred fine classes; 50,000 images to train on and 10,000 to test on.

    Layouts, in this order: the python files (`cifar-100-python`), class folders as for `cifar10`.
    """
    return load_images(CIFAR100, folder)


def tiny_imagenet(folder: Folder = None) -> Images:
    """Load Tiny-ImageNet: 64×64 pixels, 200 classes; 100,000 images to train on, the 10,000 for validation to test on.

    The layout is the published one (`tiny-imagenet-200`, `val` as published or sorted into class folders). Classes are
    sorted by WordNet number.
    """
    return load_images(TINY, folder)


def load_images(which: Published, folder: Folder, more: Sequence[Layout] = ()) -> Images:
    """Read the first layout found, ours before those of `more`, and check it against the published numbers."""
    root = data_root(folder, which.name)
    with reading(root):
        place, read = located(
            which, root, [*((one.there, one.read) for one in LAYOUTS[which.name]), *more]
        )
        raw = read(place, Files.between(root, place))
    _check_classes(which, len(raw.classes), place)
    return Images(
        which.name, raw.train, raw.test, raw.classes, f"{raw.words}: {_share(which, raw)}."
    )


def located(
    which: Published, root: Path, layouts: Sequence[tuple[Callable[[Path], bool], T]]
) -> tuple[Path, T]:
    """Return the folder of the first layout found in `root`, and its reader."""
    groups = (_inside(root, which.folders), [root])
    found = [
        (place, read)
        for group in groups
        for there, read in layouts
        for place in group
        if there(place)
    ]
    if not found:
        raise InputError(
            "expected-located",
            f"There is no {which.name} in {str(root)!r}: expected {which.accepted}.",
        )
    return found[0]


def _inside(root: Path, names: tuple[str, ...]) -> list[Path]:
    """List folders of the usual names in `root` and those in them, the deepest first."""
    outer = _named(root, names)
    inner = [inner for place in outer for inner in _named(place, names)]
    for place in inner:
        os.scandir(place).close()
    return [*inner, *outer]


def _named(place: Path, names: tuple[str, ...]) -> list[Path]:
    folders = sorted(entry for entry in place.iterdir() if entry.is_dir())
    return [entry for entry in folders if re.sub(r"[^a-z0-9]", "", entry.name.lower()) in names]


def _share(which: Published, raw: Raw) -> str:
    """Describe the share of the published images that is there."""
    found = (len(raw.train), len(raw.test))
    full = (which.train * which.classes, which.test * which.classes)
    if found == full:
        return f"all {full[0]:,} training and {full[1]:,} test images"
    each = np.bincount(raw.train.y, minlength=which.classes)
    balanced = f" ({each[0]} a class)" if len(set(each.tolist())) == 1 else ""
    return f"a subset, {found[0]:,} of {full[0]:,} training images{balanced} and {found[1]:,} of {full[1]:,} test images"


def inspect(which: Published, root: Path) -> tuple[int, int, Path]:
    """Count images to train on and to test on, and say where they are; refuse them as the loader would."""
    with reading(root):
        place, layout = located(which, root, [(one.there, one) for one in LAYOUTS[which.name]])
        train, test, classes = layout.count(place, Files.between(root, place), which)
    _check_classes(which, classes, place)
    return train, test, place


def _check_classes(which: Published, found: int, place: Path) -> None:
    if found != which.classes:
        raise InputError(
            "classes-files-name",
            f"{which.name} has {which.classes} classes, but the files in {str(place)!r} name {found}.",
        )


BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
LAYOUTS: dict[str, list[PickledBatches | ClassFolders]] = {  # the first wins
    CIFAR10.name: [
        PickledBatches(BATCHES, "test_batch", "batches.meta", "labels", "label_names"),
        ClassFolders(CIFAR10.side),
    ],
    CIFAR100.name: [
        PickledBatches(("train",), "test", "meta", "fine_labels", "fine_label_names"),
        ClassFolders(CIFAR100.side),
    ],
    TINY.name: [TinyFolders(TINY.side)],
}
