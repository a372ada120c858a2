"""What a layout of files yields before it becomes `Images`, and the decoding of single images."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.images.pictures import Labels, Pictures, Pixels
from scaffpd.errors import InputError


@dataclass(frozen=True)
class Raw:
    """Both parts, the names of the classes and words on the layout."""

    train: Pictures
    test: Pictures
    classes: tuple[str, ...]
    words: str


def decoded(content: bytes, what: str) -> Pixels:
    """The pixels (h, w, 3) of an image file of any format that Pillow reads; `what` names it in a sentence."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception:  # Pillow's plugins raise nearly everything for damaged files
        raise InputError(
            f"{what} is no readable image: it is damaged, or of a format that Pillow does not know."
        ) from None


def sized(pixels: Pixels, side: int, what: str) -> Pixels:
    """`pixels`, or a sentence where they are not side × side."""
    if pixels.shape[:2] != (side, side):
        raise InputError(f"{what} has {pixels.shape[1]}×{pixels.shape[0]} pixels, expected {side}×{side}.")
    return pixels


def whole_labels(values: object, number: int, what: str) -> Labels:
    """Labels as int64, or a sentence unless there are `number` whole ones."""
    labels: NDArray[np.generic] = np.asarray(values)
    if labels.shape != (number,) or (number and labels.dtype.kind not in "iu"):
        raise InputError(
            f"{what} needs one whole label for each of its {number} images, got {labels.dtype} of shape {labels.shape}."
        )
    return labels.astype(np.int64)
