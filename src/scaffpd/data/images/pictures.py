"""What every loader of images returns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.seeds import generator
from scaffpd.errors import InputError, count

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Pictures:
    """Images of one size and their labels.

    Attributes:
        x: (n, height, width, 3) in uint8, red, green and blue from 0 to 255.
        y: n labels, counted from zero.
    """

    x: Pixels
    y: Labels

    def __post_init__(self) -> None:
        if self.x.ndim != 4 or self.x.shape[-1] != 3 or self.x.dtype != np.uint8:
            raise InputError(f"Pictures need x as uint8 of shape (n, h, w, 3), got {self.x.dtype} of {self.x.shape}.")
        if self.y.shape != self.x.shape[:1] or self.y.dtype != np.int64:
            raise InputError(
                f"Pictures need an int64 label per image, got {self.y.dtype} of shape {self.y.shape} for {len(self.x)}."
            )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Pictures({len(self):,} of {self.x.shape[2]}×{self.x.shape[1]} pixels)"


@dataclass(frozen=True, eq=False)
class Images:
    """A classification problem whose samples are images.

    Attributes:
        name: of the dataset, such as "CIFAR-10".
        train: the images to train on.
        test: those held out by the dataset's authors.
        classes: what the labels 0, 1, … mean.
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
                raise InputError(f"{self.name} needs at least one {part} image, got none.")
            low, high = int(pictures.y.min()), int(pictures.y.max())
            if low < 0 or high >= len(self.classes):
                raise InputError(
                    f"{self.name} has {len(self.classes)} classes, so labels go from 0 to {len(self.classes) - 1}, "
                    f"but those of its {part} images go from {low} to {high}."
                )

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) over shapes, pixels, labels and the number of classes: other content, other digest."""
        running = hashlib.sha256(f"{len(self.classes)} classes".encode())
        for pictures in (self.train, self.test):
            running.update(f"; {pictures.x.shape}".encode())
            running.update(np.ascontiguousarray(pictures.x).data)
            running.update(pictures.y.astype("<i8").tobytes())
        return running.hexdigest()

    def subset(self, train_per_class: int, test_per_class: int, seed: int = 0) -> Images:
        """As many random images of every class as asked for, in their old order.

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
        return replace(self, train=train, test=test, source=f"{self.source.removesuffix('.')}; of these {words}.")


def _some(images: Images, pictures: Pictures, number: int, part: str, random: np.random.Generator) -> Pictures:
    """`number` pictures of every class, drawn without replacement."""
    chosen: list[Any] = []
    for label, name in enumerate(images.classes):
        rows = np.flatnonzero(pictures.y == label)
        if len(rows) < number:
            raise InputError(f"subset cannot take {number} {part} images of class {name!r}: there are {len(rows)}.")
        chosen.append(random.choice(rows, size=number, replace=False))
    rows = np.sort(np.concatenate(chosen))
    return Pictures(pictures.x[rows], pictures.y[rows])
