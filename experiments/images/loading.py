"""CIFAR-10, CIFAR-100 and Tiny-ImageNet from files on disk; nothing is downloaded.

The data set lies in a folder with its usual name ("cifar10", "cifar-10-batches-py",
"tiny-imagenet-200", …) in the data root, or one level deeper. Layouts, the first one found is read:

    python batches     CIFAR as its authors publish it
    class folders      train/<class>/*.png and test/<class>/*.png (or jpg)
    published          Tiny-ImageNet: wnids.txt, train/<wnid>/images, val/val_annotations.txt
    packed             train*.npz, and test.npz or val.npz: JPEG images whose common beginnings are
                       stored once. Image i is header[header_offsets[h] : header_offsets[h+1]],
                       h = header_id[i], then data[offsets[i] : offsets[i+1]]
    mosaic             train_mosaic.jpg, test_mosaic.jpg, labels.npz: tiles, sorted by class
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from experiments.datasets import data_root
from scaffpd.errors import InputError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Folder = str | os.PathLike[str] | None
SIDE = 32  # pixels a side of CIFAR's images
SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images (n, height, width, 3) in uint8, and their labels counted from zero."""

    x: Pixels = field(repr=False)
    y: Labels = field(repr=False)

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: images to train on, images to test on, the names of its classes, where it came
    from.
    """

    name: str
    train: Pictures
    test: Pictures
    classes: tuple[str, ...] = field(repr=False)
    source: str = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) over shapes, pixels, labels and the number of classes."""
        running = hashlib.sha256(f"{len(self.classes)} classes".encode())
        for pictures in (self.train, self.test):
            running.update(f"; {pictures.x.shape}".encode())
            running.update(np.ascontiguousarray(pictures.x).data)
            running.update(pictures.y.astype("<i8").tobytes())
        return running.hexdigest()

    def subset(self, train_per_class: int, test_per_class: int, seed: int = 0) -> Images:
        """Draw so many random images of every class, in their old order."""
        random = np.random.default_rng(seed)
        train = self._some(self.train, train_per_class, random)
        test = self._some(self.test, test_per_class, random)
        words = f"{train_per_class} training and {test_per_class} test images a class, seed {seed}"
        return replace(self, train=train, test=test, source=f"{self.source}; of these {words}")

    def _some(self, pictures: Pictures, number: int, random: np.random.Generator) -> Pictures:
        chosen: list[Any] = []
        for label, name in enumerate(self.classes):
            rows = np.flatnonzero(pictures.y == label)
            if len(rows) < number:
                raise InputError(
                    "too-few-images",
                    f"There are {len(rows)} images of class {name!r}, not {number}.",
                )
            chosen.append(random.choice(rows, size=number, replace=False))
        rows = np.sort(np.concatenate(chosen))
        return Pictures(pictures.x[rows], pictures.y[rows])


Raw = tuple[Pictures, Pictures, tuple[str, ...], str]  # both parts, classes, the layout in words
Layout = tuple[Callable[[Path], bool], Callable[[Path], Raw]]  # whether it is there; its reader


def cifar10(folder: Folder = None) -> Images:
    """Load CIFAR-10: 32 × 32 pixels, 50,000 + 10,000 images of ten classes."""
    train = tuple(f"data_batch_{k}" for k in range(1, 6))
    batches = _batches(train, "test_batch", "batches.meta", "labels", "label_names")
    return _load("CIFAR-10", 10, folder, [batches, _class_folders(SIDE), _packed(SIDE)])


def cifar100(folder: Folder = None) -> Images:
    """Load CIFAR-100: 32 × 32 pixels, 50,000 + 10,000 images of a hundred fine classes."""
    batches = _batches(("train",), "test", "meta", "fine_labels", "fine_label_names")
    layouts = [batches, _class_folders(SIDE), _packed(SIDE), _mosaic(SIDE)]
    return _load("CIFAR-100", 100, folder, layouts)


def tiny_imagenet(folder: Folder = None) -> Images:
    """Load Tiny-ImageNet: 64 × 64 pixels, 200 classes by WordNet number; val serves as test."""
    return _load("Tiny-ImageNet", 200, folder, [_published(64), _packed(64)])


LOADERS = {"cifar10": cifar10, "cifar100": cifar100, "tinyimagenet": tiny_imagenet}


def _load(name: str, classes: int, folder: Folder, layouts: Sequence[Layout]) -> Images:
    root = data_root(folder, name)
    usual = re.sub("[^a-z0-9]", "", name.lower())  # such folders are "cifar-10-batches-py", …
    endings = r"(batchespy|python|images|200)?"

    def named(place: Path) -> list[Path]:
        inside = sorted(entry for entry in place.iterdir() if entry.is_dir())
        plain = [(re.sub("[^a-z0-9]", "", entry.name.lower()), entry) for entry in inside]
        return [entry for words, entry in plain if re.fullmatch(usual + endings, words)]

    outer = named(root)
    places = [*(inner for place in outer for inner in named(place)), *outer, root]
    for there, read in layouts:
        for place in places:
            if there(place):
                train, test, found, words = read(place)
                if len(found) != classes:
                    raise InputError(
                        "number-of-classes", f"{place} has {len(found)} classes, {name} {classes}."
                    )
                size = f"{len(train):,} training and {len(test):,} test images"
                return Images(name, train, test, found, f"{words} in {place.name!r}: {size}")
    raise InputError("no-images", f"There is no {name} in {str(root)!r}: see docs/images.md.")


# ------------------------------------------------------------------ CIFAR's python files


def _batches(train: Sequence[str], test: str, meta: str, labels: str, names: str) -> Layout:
    """Read rows of 1,024 red values, 1,024 green ones, 1,024 blue ones."""

    def part(place: Path, files: Sequence[str]) -> Pictures:
        found = [_unpickled(place / file) for file in files]
        x = np.concatenate([batch["data"] for batch in found]).reshape(-1, 3, SIDE, SIDE)
        y = np.concatenate([np.asarray(batch[labels], dtype=np.int64) for batch in found])
        return Pictures(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), y)

    def read(place: Path) -> Raw:
        classes = _unpickled(place / meta)[names]
        plain = tuple(n.decode() if isinstance(n, bytes) else str(n) for n in classes)
        return part(place, train), part(place, [test]), plain, "The python batches"

    return lambda place: (place / meta).is_file(), read


class _Arrays(pickle.Unpickler):
    """Unpickler of arrays, lists, dictionaries, text and numbers: anything else could run code."""

    ALLOWED = (
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",
        "multiarray._reconstruct",
        "numeric._frombuffer",
    )

    def find_class(self, module: str, name: str) -> Any:
        if name == "dtype":  # the files say 0 and 1 where NumPy now wants False and True
            return lambda kind, *_: np.dtype(kind)
        if not f"{module}.{name}".endswith(self.ALLOWED):
            raise InputError(
                "unsafe-pickle", f"A batch asks for {module}.{name}: no CIFAR file does."
            )
        return super().find_class(module, name)


def _unpickled(file: Path) -> dict[str, Any]:
    batch = _Arrays(io.BytesIO(file.read_bytes()), encoding="latin1").load()
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in batch.items()}


# ------------------------------------------------------------------ files of single images


def _class_folders(side: int) -> Layout:
    def read(place: Path) -> Raw:
        classes = _folders(place / "train")
        train, test = (_pictures(_by_class(place / p, classes), side) for p in ("train", "test"))
        return train, test, tuple(classes), "Class folders of image files"

    return lambda place: bool(_folders(place / "train")), read


def _published(side: int) -> Layout:
    """Tiny-ImageNet's own layout; its test images have no labels, so validation images serve."""

    def read(place: Path) -> Raw:
        wnids = sorted((place / "wnids.txt").read_text().split())
        lines = (place / "words.txt").read_text(encoding="utf-8").splitlines()
        words = dict(line.split("\t", 1) for line in lines if "\t" in line)
        val = place / "val"
        if (val / "val_annotations.txt").is_file():
            rows = [line.split("\t") for line in (val / "val_annotations.txt").open()]
            test = [(val / "images" / row[0], wnids.index(row[1])) for row in rows]
        else:
            test = _by_class(val, wnids)
        train = _pictures(_by_class(place / "train", wnids), side)
        names = _short(wnids, [words.get(wnid, wnid) for wnid in wnids])
        return train, _pictures(test, side), names, "The published layout"

    return lambda place: (place / "wnids.txt").is_file(), read


def _folders(place: Path) -> list[str]:
    return (
        sorted(entry.name for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
    )


def _by_class(part: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    found = []
    for label, name in enumerate(classes):
        inner = part / name / "images"
        files = sorted((inner if inner.is_dir() else part / name).iterdir())
        found += [(file, label) for file in files if file.suffix.lower() in SUFFIXES]
    return found


def _pictures(labelled: Sequence[tuple[Path, int]], side: int) -> Pictures:
    x = np.empty((len(labelled), side, side, 3), dtype=np.uint8)
    for i, (file, _) in enumerate(labelled):
        with Image.open(file) as image:
            x[i] = np.asarray(image.convert("RGB"))
    return Pictures(x, np.array([label for _, label in labelled], dtype=np.int64))


def _short(wnids: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """Name classes by the first of their words; with the WordNet number where two share it."""
    first = [text.split(",")[0].strip() or wnid for wnid, text in zip(wnids, words, strict=True)]
    often = Counter(first)
    pairs = zip(wnids, first, strict=True)
    return tuple(name if often[name] == 1 else f"{name} ({wnid})" for wnid, name in pairs)


# ------------------------------------------------------------------ images packed into a few files


def _packed(side: int) -> Layout:
    def part(file: Path) -> tuple[Pictures, tuple[str, ...]]:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if "names" in arrays:
            classes = tuple(map(str, arrays["names"]))
        else:
            classes = _short(list(map(str, arrays["wnids"])), list(map(str, arrays["words"])))
        return Pictures(_jpegs(arrays, side), arrays["labels"].astype(np.int64)), classes

    def read(place: Path) -> Raw:
        test = place / ("val.npz" if (place / "val.npz").is_file() else "test.npz")
        (first, classes), (second, _) = (part(f) for f in (next(place.glob("train*.npz")), test))
        return first, second, classes, "Packed JPEG images"

    return lambda place: any(place.glob("train*.npz")), read


def _jpegs(arrays: dict[str, NDArray[Any]], side: int) -> Pixels:
    """Decode all images: Pillow reads a beginning once, then decodes each image directly."""

    def pieces(values: NDArray[Any], offsets: NDArray[Any]) -> list[bytes]:
        content = values.tobytes()
        return [content[start:stop] for start, stop in pairwise(offsets.tolist())]

    headers = pieces(arrays["header"], arrays["header_offsets"])
    ends = pieces(arrays["data"], arrays["offsets"])
    modes: dict[int, str] = {}
    x = np.empty((len(ends), side, side, 3), dtype=np.uint8)
    for i, (h, end) in enumerate(zip(arrays["header_id"].tolist(), ends, strict=True)):
        content = headers[h] + end
        if h not in modes:
            modes[h] = Image.open(io.BytesIO(content)).mode
        image = Image.frombytes(modes[h], (side, side), content, "jpeg", modes[h], "")
        x[i] = np.asarray(image.convert("RGB"))
    return x


def _mosaic(side: int) -> Layout:
    def part(file: Path, classes: int) -> Pictures:
        pixels = np.asarray(Image.open(file).convert("RGB"))
        rows = pixels.shape[0] // side
        columns = pixels.shape[1] // side
        x = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        return Pictures(x, np.repeat(np.arange(classes), len(x) // classes))

    def read(place: Path) -> Raw:
        with np.load(place / "labels.npz", allow_pickle=False) as archive:
            names = tuple(map(str, archive["fine_names"]))
        train, test = (part(place / f"{p}_mosaic.jpg", len(names)) for p in ("train", "test"))
        return train, test, names, "A lossy JPEG mosaic"

    return lambda place: (place / "train_mosaic.jpg").is_file(), read
