"""The style of all figures, and the picture of a partition: which client has how many samples of which class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, needed

INK, QUIET, RULE = "#222222", "#6b6b6b", "#d9d9d9"
# Okabe and Ito's colours, which every kind of eye can tell apart
BLUE, ORANGE, GREEN, PINK, RED, SKY, BLACK = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#d55e00", "#56b4e9", "#222222"),
)
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK,
    "axes.edgecolor": RULE, "axes.labelcolor": QUIET, "axes.labelsize": 9,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlepad": 14, "axes.titlesize": 11, "axes.titleweight": "bold",
    "xtick.color": QUIET, "xtick.labelsize": 9, "ytick.color": QUIET, "ytick.labelsize": 9,
}  # fmt: skip
NAMED = 30  # classes: more names than that do not fit side by side
WRITTEN = 15  # classes: more columns than that are too narrow for numbers
SHOWN = 60  # clients: more rows than that are not named
TOP, BOTTOM = 1.0, 0.55  # inches above and below the map
SMALL = 8.5


def partition_picture(
    parts: Sequence[ArrayLike], y: ArrayLike, classes: Sequence[str] | None = None, title: str | None = None
) -> Any:
    """A map of clients × classes, darker where a client has more samples of a class, and the clients' sizes beside it.

    Colour grows with the square root of the number, so that few samples are seen next to many; white is none.

    Args:
        parts: the row numbers of each client.
        y: the labels of all rows.
        classes: names of the labels 0, 1, …; without them the labels that occur name themselves.
        title: by default the numbers of samples, clients and classes.

    Returns:
        A matplotlib figure; `.savefig("partition.png")` writes it.
    """
    matplotlib = needed("matplotlib", "matplotlib", "images")
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    try:
        labels = np.asarray(y)
    except ValueError:
        raise InputError("partition_picture needs a vector of labels as its second argument.") from None
    counts, names = _counts(parts, labels, classes)
    clients, K = counts.shape
    with matplotlib.rc_context(STYLE):
        rows = min(10.0, max(1.6, 0.3 * clients))
        columns = min(12.0, max(5.0, 0.5 * K if K <= NAMED else 0.085 * K))
        names = names if K <= NAMED else ()
        bottom = BOTTOM + (0.062 * max(map(len, names)) if _upright(names) else 0.0)
        width, height = 0.95 + columns + 2.75, TOP + rows + bottom
        figure = Figure(figsize=(width, height), facecolor="white")
        left = figure.add_axes((0.95 / width, bottom / height, columns / width, rows / height))
        right = figure.add_axes(((1.1 + columns) / width, bottom / height, 1.1 / width, rows / height))
        top = 1 - 0.42 / height
        words = title or f"{counts.sum():,} samples of {K} classes at {clients} clients"
        figure.text(0.2 / width, top, words, fontsize=13, fontweight="bold", va="center")
        _map(left, counts, names)
        _sizes(right, counts)
    return figure


def _counts(
    parts: Sequence[ArrayLike], y: NDArray[Any], classes: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Samples of each class (columns) at each client (rows), and the names of the columns."""
    if not len(parts) or y.ndim != 1 or not len(y):
        raise InputError("partition_picture needs the rows of at least one client and a vector of labels.")
    if isinstance(classes, str):
        raise InputError("partition_picture needs a list of class names; to save the picture, call .savefig(file).")
    labels, code = np.unique(y, return_inverse=True)
    names = tuple(map(str, labels))
    if classes is not None:
        if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(classes):
            raise InputError(f"partition_picture needs labels from 0 to {len(classes) - 1} for {len(classes)} classes.")
        code, names = y, tuple(classes)
    for i, part in enumerate(parts):
        try:
            rows = np.asarray(part)
        except ValueError:
            rows = np.empty(0)
        if rows.ndim != 1 or not rows.size or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= len(y):
            raise InputError(f"partition_picture needs row numbers from 0 to {len(y) - 1} at client {i}.")
    return np.array([np.bincount(code[np.asarray(part)], minlength=len(names)) for part in parts]), names


def _upright(names: Sequence[str]) -> bool:
    """Whether names are too long to stand side by side."""
    return any(len(name) > 5 for name in names)


def _map(axes: Any, counts: NDArray[np.int64], names: Sequence[str]) -> None:
    """The map itself; numbers in it, or else what its colours mean above it."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    clients, K = counts.shape
    look = {
        "cmap": LinearSegmentedColormap.from_list("ink", ["#d7e8f3", BLUE, "#00263d"]),
        "norm": PowerNorm(0.5, 0, counts.max()),
    }
    if clients <= SHOWN:
        axes.hlines(np.arange(clients + 1) - 0.5, -0.5, K - 0.5, color=RULE, lw=0.6)
    edges = {"edgecolors": RULE, "linewidth": 0.6 if K <= NAMED and clients <= SHOWN else 0.0}
    axes.pcolormesh(np.arange(K), np.arange(clients), np.ma.masked_equal(counts, 0), **look, **edges)
    axes.set(xlim=(-0.5, K - 0.5), ylim=(clients - 0.5, -0.5), xlabel="class", ylabel="client")
    if K <= WRITTEN and clients <= SHOWN:
        _numbers(axes, counts)
    else:
        _scale(axes, int(counts.max()), look)
    if names:
        axes.set_xticks(range(K), names, rotation=90 if _upright(names) else 0)
    _clients(axes, clients)


def _numbers(axes: Any, counts: NDArray[np.int64]) -> None:
    for i, k in zip(*np.nonzero(counts), strict=True):
        dark = np.sqrt(counts[i, k] / counts.max()) > 0.4
        look = {"ha": "center", "va": "center", "fontsize": SMALL - 1, "color": "white" if dark else INK}
        axes.text(k, i, f"{counts[i, k]:,}", **look)


def _scale(axes: Any, most: int, look: dict[str, Any]) -> None:
    """A strip of all colours between the smallest and the largest number."""
    box = axes.get_position()
    width, height = axes.figure.get_size_inches()
    strip = axes.figure.add_axes((box.x1 - 2.1 / width, box.y1 + 0.1 / height, 1.0 / width, 0.1 / height))
    strip.pcolormesh(np.linspace(1, max(2, most), 129), [0, 1], np.linspace(1, most, 128)[None], **look)
    strip.set_axis_off()
    words = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center", "fontsize": SMALL}
    words |= {"color": QUIET}
    strip.annotate("1", (0, 0.5), (-4, 0), ha="right", **words)
    strip.annotate(f"{most:,} of a class", (1, 0.5), (4, 0), ha="left", **words)


def _clients(axes: Any, clients: int) -> None:
    if clients <= SHOWN:
        axes.set_yticks(range(clients), [str(i) for i in range(clients)], fontsize=SMALL)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _sizes(axes: Any, counts: NDArray[np.int64]) -> None:
    """Bars of the clients' sizes, with the size and the number of classes as numbers."""
    sizes, held = counts.sum(1), (counts > 0).sum(1)
    axes.barh(range(len(sizes)), sizes, height=0.62, color=BLUE)
    axes.set(xlim=(0, sizes.max()), ylim=(len(sizes) - 0.5, -0.5), xticks=[], yticks=[])
    _clients(axes, SHOWN + 1)
    words = {"textcoords": "offset points", "fontsize": SMALL, "annotation_clip": False}
    if len(sizes) > SHOWN:
        summary = f"{sizes.min():,} to {sizes.max():,} samples"
        axes.annotate(summary, (0, 1), (0, 5), xycoords="axes fraction", color=QUIET, **words)
        return
    for x, heading, values, colour in ((1.6, "samples", sizes, INK), (2.15, "classes", held, QUIET)):
        axes.annotate(heading, (x, 1), (0, 5), xycoords="axes fraction", ha="right", color=QUIET, **words)
        for i, value in enumerate(values):
            place = (x, 1 - (i + 0.5) / len(values))
            look = {"xycoords": "axes fraction", "ha": "right", "va": "center", "color": colour}
            axes.annotate(f"{value:,}", place, (0, 0), **look, **words)
