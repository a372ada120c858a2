"""The style of all figures, and the picture of a partition: the number of samples per client and class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, needed

INK = "#222222"
QUIET = "#6b6b6b"
RULE = "#d9d9d9"
# Okabe and Ito's colours, which people with any colour vision can tell apart
BLUE, ORANGE, GREEN, PINK, RED, SKY, BLACK = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#d55e00", "#56b4e9", "#222222"),
)
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "xtick.color": QUIET,
    "xtick.labelsize": 9,
    "ytick.color": QUIET,
    "ytick.labelsize": 9,
}
NAMED = 30  # classes: more names do not fit side by side
WRITTEN = 15  # classes: more columns are too narrow for numbers
SHOWN = 60  # clients: more rows are not named
SMALL = 8.5


def partition_picture(
    parts: Sequence[ArrayLike],
    y: ArrayLike,
    classes: Sequence[str] | None = None,
    title: str | None = None,
) -> Any:
    """Draw a map of clients × classes, darker for more samples, with the clients' sizes beside it.

    Colour grows with the square root of the number, so that few samples are visible next to many; white is none.

    Args:
        parts: the row numbers of each client.
        y: the labels of all rows.
        classes: names of the labels 0, 1, …; without them the labels themselves.
        title: by default the numbers of samples, clients and classes.

    Returns:
        A matplotlib figure; `.savefig("partition.png")` writes it.
    """
    matplotlib = needed("matplotlib", "matplotlib", "images")
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    try:
        labels = np.asarray(y)
    except ValueError:
        raise InputError(
            "partition-picture-vector",
            "partition_picture needs a vector of labels as its second argument.",
        ) from None
    counts, names = _counts(parts, labels, classes)
    clients, K = counts.shape
    with matplotlib.rc_context(STYLE):
        columns = min(12.0, max(5.0, 0.5 * K if K <= NAMED else 0.085 * K))
        size = columns + 3.0, 1.4 + min(10.0, max(1.6, 0.3 * clients))
        figure = Figure(size, facecolor="white", layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(columns, 1.1))
        words = title or f"{counts.sum():,} samples of {K} classes at {clients} clients"
        figure.suptitle(words, x=0.02, ha="left", fontsize=13, fontweight="bold")
        _map(left, counts, names)
        _sizes(right, counts)
        for axes in (left, right):
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
    return figure


def _counts(
    parts: Sequence[ArrayLike], y: NDArray[Any], classes: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Count samples of each class (columns) at each client (rows), and name the columns."""
    if not len(parts) or y.ndim != 1 or not len(y):
        raise InputError(
            "partition-picture-rows",
            "partition_picture needs the rows of at least one client and a vector of labels.",
        )
    if isinstance(classes, str):
        raise InputError(
            "partition-picture-list",
            "partition_picture needs a list of class names; to save the picture, call .savefig(file).",
        )
    labels, code = np.unique(y, return_inverse=True)
    names = tuple(map(str, labels))
    if classes is not None:
        if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(classes):
            raise InputError(
                "partition-picture-labels",
                f"partition_picture needs labels from 0 to {len(classes) - 1} for {len(classes)} classes.",
            )
        code = y
        names = tuple(classes)
    for i, part in enumerate(parts):
        try:
            rows = np.asarray(part)
        except ValueError:
            rows = np.empty(0)
        if (
            rows.ndim != 1
            or not rows.size
            or rows.dtype.kind not in "iu"
            or rows.min() < 0
            or rows.max() >= len(y)
        ):
            raise InputError(
                "partition-picture-row",
                f"partition_picture needs row numbers from 0 to {len(y) - 1} at client {i}.",
            )
    return np.array(
        [np.bincount(code[np.asarray(part)], minlength=len(names)) for part in parts]
    ), names


def _map(axes: Any, counts: NDArray[np.int64], names: Sequence[str]) -> None:
    """Draw the map: with numbers if they fit, or else with a colour bar above it."""
    from matplotlib import colors, ticker

    clients, K = counts.shape
    cells = axes.pcolormesh(
        np.arange(K),
        np.arange(clients),
        np.ma.masked_equal(counts, 0),
        edgecolors=RULE,
        cmap=colors.LinearSegmentedColormap.from_list("ink", ["#d7e8f3", BLUE, "#00263d"]),
        norm=colors.PowerNorm(0.5, 1, max(counts.max(), 2)),
        linewidth=0.6 if K <= NAMED and clients <= SHOWN else 0.0,
    )
    axes.set(xlim=(-0.5, K - 0.5), ylim=(clients - 0.5, -0.5), xlabel="class", ylabel="client")
    if K <= NAMED:
        axes.set_xticks(range(K), names, rotation=90 if any(len(name) > 5 for name in names) else 0)
    if clients <= SHOWN:
        axes.set_yticks(range(clients), range(clients), fontsize=SMALL)
    if K > WRITTEN or clients > SHOWN:
        scale = {
            "location": "top",
            "shrink": 0.4,
            "aspect": 25,
            "anchor": (1.0, 0.0),
            "pad": 0.01,
            "ticks": ticker.MaxNLocator(integer=True),
        }
        axes.figure.colorbar(
            cells, ax=axes, label="samples of a class", **scale
        ).outline.set_visible(False)
        return
    for i, k in zip(*np.nonzero(counts), strict=True):
        dark = cells.norm(counts[i, k]) > 0.4
        look = {
            "ha": "center",
            "va": "center",
            "fontsize": SMALL - 1,
            "color": "white" if dark else INK,
        }
        axes.text(k, i, f"{counts[i, k]:,}", **look)


def _sizes(axes: Any, counts: NDArray[np.int64]) -> None:
    """Draw a bar for every client's size, and write how many samples of how many classes it has."""
    sizes = counts.sum(1)
    held = (counts > 0).sum(1)
    bars = axes.barh(range(len(sizes)), sizes, height=0.62, color=BLUE)
    axes.set_xticks([])
    heading = f"{sizes.min():,} to {sizes.max():,} samples"
    if len(sizes) <= SHOWN:
        axes.bar_label(
            bars,
            [f"{n:,} ({k})" for n, k in zip(sizes, held, strict=True)],
            padding=4,
            fontsize=SMALL,
        )
        heading = "samples (classes)"
    axes.set_title(heading, fontsize=SMALL, fontweight="normal", color=QUIET, pad=5)
