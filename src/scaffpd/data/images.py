"""Images with labels, and their usual file layouts."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.folder import Files
from scaffpd.data.silos import generator
from scaffpd.errors import InputError, count, not_installed

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Pictures:
    """Images of one size and their labels."""

    x: Pixels  # (n, height, width, 3) in uint8, red, green and blue from 0 to 255
    y: Labels  # n labels, counted from zero

    def __post_init__(self) -> None:
        if self.x.ndim != 4 or self.x.shape[-1] != 3 or self.x.dtype != np.uint8:
            raise InputError(
                "pictures-uint8-shape",
                f"Pictures need x as uint8 of shape (n, h, w, 3), got {self.x.dtype} of {self.x.shape}.",
            )
        if self.y.shape != self.x.shape[:1] or self.y.dtype != np.int64:
            raise InputError(
                "pictures-int64-labels",
                f"Pictures need {len(self.x)} int64 labels, got {self.y.dtype} of shape {self.y.shape}.",
            )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Pictures({len(self):,} of {self.x.shape[2]}×{self.x.shape[1]} pixels)"


@dataclass(frozen=True, eq=False)
class Images:
    """A classification problem whose samples are images.

    Attributes:
        name: name of the dataset, such as "CIFAR-10".
        train: the images to train on.
        test: images held out by the dataset's authors.
        classes: names of the labels 0, 1, ….
        source: one sentence on the files that were read.
    """

    name: str
    train: Pictures
    test: Pictures
    classes: tuple[str, ...] = field(repr=False)
    source: str

    def __post_init__(self) -> None:
        for part, pictures in (("training", self.train), ("test", self.test)):
            if not len(pictures):
                raise InputError(
                    "least-image-none", f"{self.name} needs at least one {part} image, got none."
                )
            low = int(pictures.y.min())
            high = int(pictures.y.max())
            if low < 0 or high >= len(self.classes):
                raise InputError(
                    "classes-labels-go",
                    f"{self.name} has {len(self.classes)} classes, so labels go from 0 to {len(self.classes) - 1}, "
                    f"but those of its {part} images go from {low} to {high}.",
                )

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
        """Draw random images of every class, in their old order.

        Args:
            train_per_class: number of training images of each class.
            test_per_class: the same for test images.
            seed: the same seed, the same images.
        """
        count("subset", "train_per_class", train_per_class)
        count("subset", "test_per_class", test_per_class)
        random = generator("subset", seed)
        train = _some(self, self.train, train_per_class, "training", random)
        test = _some(self, self.test, test_per_class, "test", random)
        words = f"{train_per_class} training and {test_per_class} test images a class, drawn with seed {seed}"
        return replace(
            self,
            train=train,
            test=test,
            source=f"{self.source.removesuffix('.')}; of these {words}.",
        )


def _some(
    images: Images, pictures: Pictures, number: int, part: str, random: np.random.Generator
) -> Pictures:
    """Draw `number` pictures of every class, without replacement."""
    chosen: list[Any] = []
    for label, name in enumerate(images.classes):
        rows = np.flatnonzero(pictures.y == label)
        if len(rows) < number:
            raise InputError(
                "subset-take-images",
                f"subset cannot take {number} {part} images of class {name!r}: there are {len(rows)}.",
            )
        chosen.append(random.choice(rows, size=number, replace=False))
    rows = np.sort(np.concatenate(chosen))
    return Pictures(pictures.x[rows], pictures.y[rows])


@dataclass(frozen=True)
class Raw:
    """Both parts, the names of the classes and a description of the layout."""

    train: Pictures
    test: Pictures
    classes: tuple[str, ...]
    words: str


def decoded(content: bytes, what: str) -> Pixels:
    """Return the pixels (h, w, 3) of an image in any format that Pillow reads; a refusal calls it `what`."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise not_installed("Pillow", "images") from None
    try:
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception:  # Pillow's plugins raise nearly everything for damaged files
        raise InputError(
            "readable-image-damaged",
            f"{what} is no readable image: it is damaged, or Pillow does not know its format.",
        ) from None


def sized(pixels: Pixels, side: int, what: str) -> Pixels:
    """Return the pixels, or refuse them where they are not side × side."""
    if pixels.shape[:2] != (side, side):
        raise InputError(
            "pixels-expected",
            f"{what} has {pixels.shape[1]}×{pixels.shape[0]} pixels, expected {side}×{side}.",
        )
    return pixels


def whole_labels(values: object, number: int, what: str) -> Labels:
    """Return labels as int64, or refuse them unless there are `number` whole ones."""
    labels: NDArray[np.generic] = np.asarray(values)
    if labels.shape != (number,) or (number and labels.dtype.kind not in "iu"):
        got = f"{labels.dtype} of shape {labels.shape}"
        raise InputError(
            "whole-label-images",
            f"{what} needs one whole label for each of its {number} images, got {got}.",
        )
    return labels.astype(np.int64)


def short(wnids: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """Name classes by the first of their words; with the WordNet number where two share it.

    "goldfish, Carassius auratus" is goldfish; a class without words has its number.
    """
    first = [text.split(",")[0].strip() or wnid for wnid, text in zip(wnids, words, strict=True)]
    often = Counter(first)
    return tuple(
        name if often[name] == 1 else f"{name} ({wnid})"
        for wnid, name in zip(wnids, first, strict=True)
    )


SIDE = 32  # of CIFAR's images


@dataclass(frozen=True)
class Published:
    """Published properties of a dataset: classes, pixels a side, images a class, and names of its folders."""

    name: str
    classes: int
    side: int
    train: int
    test: int
    folders: tuple[str, ...]
    accepted: str


@dataclass(frozen=True)
class PickledBatches:
    """CIFAR's python files in one folder: batches for training, one to test, and the names of classes by two keys."""

    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str

    def there(self, place: Path) -> bool:
        """Return whether this looks like such a folder; a single file "train" or "test" is not enough."""
        parts = [(place / name).is_file() for name in (self.train[0], self.test)]
        return (place / self.meta).is_file() or (any if len(self.train) > 1 else all)(parts)

    def read(self, place: Path, files: Files) -> Raw:
        """Read all images and labels."""
        meta = place / self.meta
        classes = _entry(_unpickled(files, meta), self.names, meta)
        if not isinstance(classes, list):
            raise InputError(
                "list-class-names",
                f"{str(meta)!r} needs a list of class names under {self.names!r}.",
            )
        words = tuple(
            name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
            for name in classes
        )
        parts = [_batch(files, place / name, self.labels) for name in self.train]
        joined = Pictures(
            np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
        )
        test = _batch(files, place / self.test, self.labels)
        return Raw(joined, test, words, f"The python batches in {place.name!r}")

    def count(self, place: Path, files: Files, which: Published) -> tuple[int, int, int]:
        """Count images to train on, to test on, and classes: as published, if the files are large enough."""
        train = which.train * which.classes
        test = which.test * which.classes
        for name, number in [
            *((name, train // len(self.train)) for name in self.train),
            (self.test, test),
        ]:
            file = place / name
            if not file.is_file():
                raise InputError("missing-count", f"{str(file)!r} is missing.")
            if file.stat().st_size < number * 3 * SIDE**2:
                raise InputError(
                    "truncated-damaged-too",
                    f"{str(file)!r} is truncated or damaged: it is too small for {number:,} images.",
                )
        return train, test, which.classes


def _batch(files: Files, file: Path, key: str) -> Pictures:
    """Read a batch, which stores each image as a row: 1,024 red values, 1,024 green ones, 1,024 blue ones."""
    batch = _unpickled(files, file)
    data = _entry(batch, "data", file)
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.shape[1:] != (3 * SIDE * SIDE,)
    ):
        got = (
            f"{data.dtype} of shape {data.shape}"
            if isinstance(data, np.ndarray)
            else type(data).__name__
        )
        raise InputError(
            "images-uint8-shape",
            f"{str(file)!r} needs its images as uint8 of shape (n, {3 * SIDE * SIDE}), got {got}.",
        )
    labels = whole_labels(_entry(batch, key, file), len(data), repr(str(file)))
    return Pictures(
        np.ascontiguousarray(data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)), labels
    )


def _entry(batch: dict[str, Any], key: str, file: Path) -> Any:
    if key not in batch:
        raise InputError(
            "file-cifar-authors",
            f"{str(file)!r} has no {key!r}: it is not the file that CIFAR's authors publish.",
        )
    return batch[key]


def _unpickled(files: Files, file: Path) -> dict[str, Any]:
    content = files.read(file)
    try:
        batch = _Arrays(io.BytesIO(content), encoding="latin1").load()
    except InputError as refusal:
        raise InputError("unpickled", f"{str(file)!r} {refusal}") from None
    except Exception:  # a damaged pickle can raise nearly everything
        raise InputError(
            "truncated-damaged-unpickled",
            f"{str(file)!r} is truncated or damaged: it cannot be unpickled.",
        ) from None
    if not isinstance(batch, dict):
        raise InputError(
            "holds-expected-cifar",
            f"{str(file)!r} holds a {type(batch).__name__}, expected CIFAR's dictionary.",
        )
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): value
        for key, value in batch.items()
    }


def _latin1(text: str, encoding: str) -> bytes:
    """Return bytes as Python 3 writes them for older readers."""
    if encoding not in ("latin1", "latin-1"):
        raise InputError(
            "encodes-text-cifar",
            f"encodes text as {encoding!r}, which no CIFAR file does; download it again.",
        )
    return text.encode("latin1")


def _dtype(name: str, align: object = False, copy: object = True) -> np.dtype[Any]:
    """Return a dtype by name; the published files say 0 and 1 where NumPy now wants False and True."""
    return np.dtype(name)


_ALLOWED: dict[str, Any] = {  # all that a pickled array needs, from any version of NumPy
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": _dtype,
    "_codecs.encode": _latin1,
    "core.multiarray._reconstruct": np.zeros(1).__reduce__()[0],
    "core.numeric._frombuffer": np.zeros(1).__reduce_ex__(5)[0],
}


class _Arrays(pickle.Unpickler):
    """Unpickler of arrays, lists, dictionaries, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that the pickle names, or refuse it: anything else could run code."""
        known = f"{module}.{name}".replace("numpy._core.", "core.").replace("numpy.core.", "core.")
        if known not in _ALLOWED:
            raise InputError(
                "asks-cifar-file",
                f"asks for {module}.{name}, which no CIFAR file needs; download it again.",
            )
        return _ALLOWED[known]


SUFFIXES = (".png", ".jpg", ".jpeg")
Labelled = list[tuple[Path, int]]


@dataclass(frozen=True)
class ClassFolders:
    """Layout train/<class>/* and test/<class>/*; labels count the sorted names of the classes."""

    side: int  # of the images, in pixels

    def there(self, place: Path) -> bool:
        """Return whether there is a folder `train` with folders in it."""
        return bool(_folders(place / "train"))

    def listed(self, place: Path, files: Files) -> tuple[Labelled, Labelled, tuple[str, ...], str]:
        """List files to train on and to test on with their labels, the classes, and a description of the layout."""
        classes = _folders(place / "train")
        train, test = (_by_class(place / part, classes) for part in ("train", "test"))
        return train, test, tuple(classes), f"Class folders of image files in {place.name!r}"

    def read(self, place: Path, files: Files) -> Raw:
        """Read all images and labels."""
        train, test, classes, words = self.listed(place, files)
        return Raw(
            _pictures(files, train, self.side), _pictures(files, test, self.side), classes, words
        )

    def count(self, place: Path, files: Files, which: Published) -> tuple[int, int, int]:
        """Count images to train on, to test on, and classes, without opening an image."""
        train, test, classes, _ = self.listed(place, files)
        return len(train), len(test), len(classes)


class TinyFolders(ClassFolders):
    """Layout train/<wnid>/images/*, and val/ with annotations or sorted into folders; labels count the sorted numbers.

    The test images are published without labels, so the validation images serve as test images.
    """

    def listed(self, place: Path, files: Files) -> tuple[Labelled, Labelled, tuple[str, ...], str]:
        """List files, labels, classes and a description of this layout."""
        known = place / "wnids.txt"
        wnids = (
            sorted(line.strip() for line in files.lines(known))
            if known.is_file()
            else _folders(place / "train")
        )
        notes = place / "val" / "val_annotations.txt"
        folders = set(_folders(place / "val")) - {"images"}
        if not notes.is_file() and not folders:
            raise InputError(
                "missing-sorted-class",
                f"{str(notes)!r} is missing, and {str(place / 'val')!r} is not sorted into class folders.",
            )
        val = _by_class(place / "val", wnids) if folders else _annotated(files, notes, wnids)
        words = f"The published layout in {place.name!r}, validation images as test images"
        return (
            _by_class(place / "train", wnids),
            val,
            _words(files, place / "words.txt", wnids),
            words,
        )


def _words(files: Files, file: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """Name classes by words.txt (number, tab, words), or by their numbers where there is no such file."""
    lines = files.lines(file) if file.is_file() else []
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return short(wnids, [words.get(wnid, wnid) for wnid in wnids])


def _annotated(files: Files, notes: Path, wnids: Sequence[str]) -> Labelled:
    """Return (file, label) for each line `name<tab>wnid<tab>…`."""
    number = {wnid: label for label, wnid in enumerate(wnids)}
    found = []
    for line in files.lines(notes):
        name, wnid = (*line.split("\t"), "")[:2]
        if wnid not in number:
            raise InputError(
                "gives-label-class",
                f"{str(notes)!r} gives {name!r} the label {wnid!r}, which is no class in training.",
            )
        found.append((notes.parent / "images" / name, number[wnid]))
    return found


def _by_class(part: Path, classes: Sequence[str]) -> Labelled:
    """Return (file, label) for the images in each class's folder, or in a folder `images` in it."""
    if not part.is_dir():
        raise InputError(
            "folder-expected-folder",
            f"There is no folder {str(part)!r}: expected one with a folder of images per class.",
        )
    found = {*_folders(part)} - {"images"}
    for name in sorted(found ^ {*classes}):
        wrong = (
            f"a folder {name!r} that is no class"
            if name in found
            else f"no folder for the class {name!r}"
        )
        raise InputError(
            "training-test-images",
            f"{str(part)!r} has {wrong}: training and test images need the same {len(classes)} classes.",
        )
    return [(file, label) for label, name in enumerate(classes) for file in _images(part / name)]


def _images(folder: Path) -> Iterable[Path]:
    inner = folder / "images"
    entries = sorted((inner if inner.is_dir() else folder).iterdir())
    files = [
        file
        for file in entries
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    ]
    if not files:
        raise InputError(
            "images-expected-files",
            f"{str(folder)!r} has no images: expected files that end in {', '.join(SUFFIXES)}.",
        )
    return files


def _folders(place: Path) -> list[str]:
    if not place.is_dir():
        return []
    return sorted(
        entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _pictures(files: Files, labelled: Labelled, side: int) -> Pictures:
    x = np.empty((len(labelled), side, side, 3), dtype=np.uint8)
    for i, (file, _) in enumerate(labelled):
        what = repr(str(file))
        x[i] = sized(decoded(files.read(file), what), side, what)
    return Pictures(x, np.array([label for _, label in labelled], dtype=np.int64))
