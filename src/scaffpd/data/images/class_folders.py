"""Image files in a folder per class, and the layout in which Tiny-ImageNet is published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from scaffpd.data.images.files import Files
from scaffpd.data.images.names import short
from scaffpd.data.images.pictures import Pictures
from scaffpd.data.images.raw import Raw, decoded, sized
from scaffpd.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg")
Labelled = list[tuple[Path, int]]


def is_class_folders(place: Path) -> bool:
    """Whether there is a folder `train` with folders in it."""
    return bool(_folders(place / "train"))


def class_folders(place: Path, files: Files, side: int) -> Raw:
    """train/<class>/* and test/<class>/*; labels count the sorted names of the classes."""
    classes = _folders(place / "train")
    train, test = (_by_class(place / part, classes) for part in ("train", "test"))
    return Raw(
        train=_pictures(files, train, side),
        test=_pictures(files, test, side),
        classes=tuple(classes),
        words=f"Class folders of image files in {place.name!r}",
    )


def tiny_published(place: Path, files: Files, side: int) -> Raw:
    """train/<wnid>/images/*, and val/ with annotations or sorted into folders; labels count the sorted WordNet numbers.

    The test images are published without labels, so the validation images serve as test images.
    """
    listed = place / "wnids.txt"
    wnids = sorted(line.strip() for line in files.lines(listed)) if listed.is_file() else _folders(place / "train")
    notes = place / "val" / "val_annotations.txt"
    folders = set(_folders(place / "val")) - {"images"}
    if not notes.is_file() and not folders:
        raise InputError(f"{str(notes)!r} is missing, and {str(place / 'val')!r} is not sorted into class folders.")
    val = _by_class(place / "val", wnids) if folders else _annotated(files, notes, wnids)
    return Raw(
        train=_pictures(files, _by_class(place / "train", wnids), side),
        test=_pictures(files, val, side),
        classes=_words(files, place / "words.txt", wnids),
        words=f"The published layout in {place.name!r}, validation images as test images",
    )


def _words(files: Files, file: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """Names by words.txt (number, tab, words), or the numbers where there is no such file."""
    lines = files.lines(file) if file.is_file() else []
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return short(wnids, [words.get(wnid, wnid) for wnid in wnids])


def _annotated(files: Files, notes: Path, wnids: Sequence[str]) -> Labelled:
    """(file, label) of each line `name<tab>wnid<tab>…`."""
    number = {wnid: label for label, wnid in enumerate(wnids)}
    found = []
    for line in files.lines(notes):
        name, wnid = (*line.split("\t"), "")[:2]
        if wnid not in number:
            raise InputError(
                f"{str(notes)!r} gives {name!r} the label {wnid!r}, which is no class of the training images."
            )
        found.append((notes.parent / "images" / name, number[wnid]))
    return found


def _by_class(part: Path, classes: Sequence[str]) -> Labelled:
    """(file, label) of the images of each class's folder, or of a folder `images` in it."""
    if not part.is_dir():
        raise InputError(f"There is no folder {str(part)!r}: expected one with a folder of images per class.")
    found = {*_folders(part)} - {"images"}
    for name in sorted(found ^ {*classes}):
        wrong = f"a folder {name!r} that is no class" if name in found else f"no folder for the class {name!r}"
        raise InputError(f"{str(part)!r} has {wrong}: training and test images need the same {len(classes)} classes.")
    return [(file, label) for label, name in enumerate(classes) for file in _images(part / name)]


def _images(folder: Path) -> Iterable[Path]:
    inner = folder / "images"
    entries = sorted((inner if inner.is_dir() else folder).iterdir())
    files = [file for file in entries if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
    if not files:
        raise InputError(f"{str(folder)!r} has no images: expected files that end in {', '.join(SUFFIXES)}.")
    return files


def _folders(place: Path) -> list[str]:
    if not place.is_dir():
        return []
    return sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _pictures(files: Files, labelled: Labelled, side: int) -> Pictures:
    x = np.empty((len(labelled), side, side, 3), dtype=np.uint8)
    for i, (file, _) in enumerate(labelled):
        what = repr(str(file))
        x[i] = sized(decoded(files.read(file), what), side, what)
    return Pictures(x, np.array([label for _, label in labelled], dtype=np.int64))
