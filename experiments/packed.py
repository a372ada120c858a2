r"""Images packed into a few files.

- `train*.npz`, and `test.npz` or `val.npz`: JPEG images whose common beginnings are stored once. Image i is
  header[header_offsets[h] : header_offsets[h+1]], with h = header_id[i], followed by data[offsets[i] : offsets[i+1]];
  `labels`, and `names` or `wnids` with `words`, say what it shows.
- `train_mosaic.jpg`, `test_mosaic.jpg` and `labels.npz` (`fine_names`): all images as tiles of one large image, row by
  row, sorted by class, equally many of each.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.folder import Files
from scaffpd.data.image_loaders import CIFAR10, CIFAR100, TINY, Folder, Layout, load_images
from scaffpd.data.images import (
    Images,
    Pictures,
    Pixels,
    Published,
    Raw,
    decoded,
    short,
    sized,
    whole_labels,
)
from scaffpd.errors import InputError

ENTRIES = ("data", "offsets", "labels", "header", "header_offsets", "header_id")


def cifar10(folder: Folder = None) -> Images:
    """CIFAR-10, from a layout of `scaffpd.data.cifar10` or from packed files."""
    return _load(CIFAR10, folder, [], "'cifar10' with train.npz and test.npz")


def cifar100(folder: Folder = None) -> Images:
    """CIFAR-100, from a layout of `scaffpd.data.cifar100`, from packed files or from a mosaic."""
    tiles: Layout = (is_mosaic, partial(mosaic, side=CIFAR100.side))
    return _load(
        CIFAR100,
        folder,
        [tiles],
        "'cifar100' with train_mosaic.jpg, test_mosaic.jpg and labels.npz",
    )


def tiny_imagenet(folder: Folder = None) -> Images:
    """Tiny-ImageNet, from a layout of `scaffpd.data.tiny_imagenet` or from packed files."""
    return _load(TINY, folder, [], "'tiny_imagenet' with train*.npz and val.npz")


def _load(which: Published, folder: Folder, more: list[Layout], accepted: str) -> Images:
    """The pixels of Tiny-ImageNet were published as JPEG, CIFAR's were not."""
    jpeg: Layout = (is_packed, partial(packed, side=which.side, lossy=which is not TINY))
    return load_images(
        replace(which, accepted=f"{which.accepted}, or {accepted}"), folder, [jpeg, *more]
    )


def is_packed(place: Path) -> bool:
    """Whether there is a packed training or test file."""
    return any(any(place.glob(name)) for name in ("train*.npz", "test.npz", "val.npz"))


def packed(place: Path, files: Files, side: int, lossy: bool) -> Raw:
    """Packed JPEG images; `lossy` says whether JPEG changed what was published."""
    test = place / ("val.npz" if (place / "val.npz").is_file() else "test.npz")
    train = sorted(place.glob("train*.npz")) or [place / "train.npz"]
    if len(train) > 1:
        names = " and ".join(repr(file.name) for file in train)
        raise InputError(
            "several-files-training",
            f"{str(place)!r} has several files of training images, {names}: keep one of them.",
        )
    (first, classes), (second, others) = (_unpacked(files, file, side) for file in (train[0], test))
    if classes != others:
        raise InputError(
            "differ-classes-dataset",
            f"{str(train[0])!r} and {str(test)!r} differ in their classes: they are not of one dataset.",
        )
    return Raw(
        first, second, classes, f"Packed JPEG images{' (lossy)' if lossy else ''} in {place.name!r}"
    )


def is_mosaic(place: Path) -> bool:
    """Whether there is a mosaic."""
    return any((place / name).is_file() for name in ("train_mosaic.jpg", "test_mosaic.jpg"))


def mosaic(place: Path, files: Files, side: int) -> Raw:
    """Tiles of two large images."""
    names = _arrays(files, place / "labels.npz", ("fine_names",))["fine_names"]
    classes = tuple(map(str, names))
    train, test = (
        _tiles(files, place / f"{part}_mosaic.jpg", side, len(classes))
        for part in ("train", "test")
    )
    return Raw(train, test, classes, f"A lossy JPEG mosaic in {place.name!r}")


def _tiles(files: Files, file: Path, side: int, classes: int) -> Pictures:
    pixels = decoded(files.read(file), repr(str(file)))
    rows = pixels.shape[0] // side
    columns = pixels.shape[1] // side
    if pixels.shape[:2] != (rows * side, columns * side) or not classes or rows * columns % classes:
        raise InputError(
            "pixels-mosaic-tiles",
            f"{str(file)!r} has {pixels.shape[1]}×{pixels.shape[0]} pixels, which is no mosaic of {side}×{side} tiles "
            f"with equally many of {classes} classes.",
        )
    x = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    return Pictures(x, np.repeat(np.arange(classes), rows * columns // classes))


def _unpacked(files: Files, file: Path, side: int) -> tuple[Pictures, tuple[str, ...]]:
    arrays = _arrays(files, file, ENTRIES)
    labels = whole_labels(arrays["labels"], len(arrays["header_id"]), repr(str(file)))
    return Pictures(_pixels(arrays, file, side), labels), _classes(arrays, file)


def _classes(arrays: dict[str, NDArray[Any]], file: Path) -> tuple[str, ...]:
    if "names" in arrays:
        return tuple(map(str, arrays["names"]))
    if "wnids" in arrays and "words" in arrays and len(arrays["wnids"]) == len(arrays["words"]):
        return short(list(map(str, arrays["wnids"])), list(map(str, arrays["words"])))
    raise InputError(
        "name-classes-expected",
        f"{str(file)!r} does not name its classes: expected 'names', or 'wnids' and 'words'.",
    )


def _pixels(arrays: dict[str, NDArray[Any]], file: Path, side: int) -> Pixels:
    """All images: Pillow reads the beginning once, then its decoder is handed each image without more ado."""
    from PIL import Image

    headers = _pieces(arrays["header"], arrays["header_offsets"], file)
    ends = _pieces(arrays["data"], arrays["offsets"], file)
    chosen = arrays["header_id"].tolist()
    if len(chosen) != len(ends) or not set(chosen) <= set(range(len(headers))):
        raise InputError(
            "damaged-numbers-images",
            f"{str(file)!r} is damaged: its numbers of images and of beginnings do not fit together.",
        )
    modes: dict[int, str] = {}
    x = np.empty((len(ends), side, side, 3), dtype=np.uint8)
    for i, (h, end) in enumerate(zip(chosen, ends, strict=True)):
        content = headers[h] + end
        what = f"Image {i} of {str(file)!r}"
        if h not in modes:
            sized(decoded(content, what), side, what)
            modes[h] = Image.open(io.BytesIO(content)).mode
        try:
            image = Image.frombytes(modes[h], (side, side), content, "jpeg", modes[h], "")
        except (ValueError, OSError):
            raise InputError(
                "readable-image-damaged", f"{what} is no readable image: it is damaged."
            ) from None
        x[i] = np.asarray(image.convert("RGB"))
    return x


def _pieces(values: NDArray[Any], offsets: NDArray[Any], file: Path) -> list[bytes]:
    """values[offsets[i] : offsets[i+1]] for all i, as bytes."""
    fits = (
        values.dtype == np.uint8
        and offsets.ndim == 1
        and offsets.dtype.kind in "iu"
        and len(offsets) > 1
    )
    if (
        not fits
        or offsets[0] != 0
        or offsets[-1] != values.size
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise InputError(
            "damaged-offsets-fit", f"{str(file)!r} is damaged: its offsets do not fit its data."
        )
    content = values.tobytes()
    cuts = offsets.tolist()
    return [content[start:stop] for start, stop in pairwise(cuts)]


def _arrays(files: Files, file: Path, needed: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    content = files.read(file)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception:  # zipfile, zlib and numpy each have their own
        raise InputError(
            "truncated-damaged-archive",
            f"{str(file)!r} is truncated or damaged: it is no archive of plain arrays.",
        ) from None
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise InputError(
            "arrays", f"{str(file)!r} has no {missing[0]!r}: it needs {', '.join(needed)}."
        )
    return arrays
