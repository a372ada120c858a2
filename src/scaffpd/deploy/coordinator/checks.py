"""Whether answers can be used: the parts that were asked for, of the right shape and format, and finite if squared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from scaffpd.deploy.protocol.wire import Message

Shapes = Mapping[str, tuple[int, ...]]
HUGE = np.float64(1e100)  # from here on products of two numbers overflow sooner or later, and nothing can be compared
DOUBLE = ("scalars", "curvature", "slopes")
SCALARS = "scalars"  # float64 whatever the model's numbers are; the first is a loss or a size, and finite


def troubles(answers: Mapping[str, Message], shapes: Shapes, like: Tensor) -> dict[str, str]:
    """Why some silos' answers cannot be used.

    Numbers that are not finite are a silo's fault as long as others have finite ones; where nobody has, the run is
    diverging, and the training loop will say so.
    """
    malformed = {name: why for name, answer in answers.items() if (why := _malformed(answer, shapes, like))}
    infinite = {name: why for name, answer in answers.items() if name not in malformed and (why := _infinite(answer))}
    everybody = len(infinite) > 1 and len(malformed) + len(infinite) == len(answers)
    return malformed if everybody else malformed | infinite


def _malformed(answer: Message, shapes: Shapes, like: Tensor) -> str | None:
    if set(answer.arrays) != set(shapes):
        return "its answer has other parts than were asked for"
    for name, shape in shapes.items():
        array = answer.arrays[name]
        if array.shape != shape:
            return f"its {name!r} has shape {array.shape}, not {shape}"
        if array.dtype != (np.float64 if name in DOUBLE else like.numpy().dtype):
            return f"its {name!r} holds {array.dtype}"
    return None


def _infinite(answer: Message) -> str | None:
    """Bounds on rounding may be infinite and an accuracy unknown: only the first scalar has to be a number."""
    for name, array in answer.arrays.items():
        if not np.all(np.abs(array[:1] if name == SCALARS else array) <= HUGE):
            return f"its {name!r} has an entry that is NaN, infinite or beyond {HUGE:g}"
    return None
