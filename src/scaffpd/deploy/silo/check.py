"""Show a silo's operator what was found in the data, and what would leave; nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scaffpd.data.tabular.agree import PREPARED
from scaffpd.data.tabular.columns import CATEGORY, DataColumn, leaking_columns
from scaffpd.data.tabular.encode import named_categories
from scaffpd.data.tabular.settings import CLASSIFICATION, REGRESSION
from scaffpd.deploy.messages import Array, Json
from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.deploy.silo.guard import PATH, SCORES
from scaffpd.run.settings.silo import SiloFile

SHOWN = 30  # names in a list before it is cut off


def site_overview(file: SiloFile, data: Dataset) -> Json:
    """Return all that `scaffpd silo check` shows, as JSON values."""
    train, test = data.rows
    width = encoded_width(data)
    y = data.target.values
    return {
        "silo": file.name,
        "task": data.target.task,
        "rows": {"train": train, "test": test, "without_target": data.dropped},
        "features": {"columns": data.table.width, "encoded": width},
        "labels": _labels(data),
        "target": {"smallest": float(y.min()), "mean": float(y.mean()), "largest": float(y.max())}
        if data.target.task == REGRESSION
        else None,
        "columns": [
            {
                "name": column.name,
                "kind": column.kind,
                "missing": int(column.missing.sum()),
                "categories": len(column.categories),
                "withheld": _withheld(file, data, column),
            }
            for column in data.table.columns
        ],
        "missing": int(np.isnan(data.table.block).sum()) if data.table.block is not None else None,
        "bytes": {"read": data.table.nbytes, "encoded": 8 * (train + test) * width},
        "warnings": list(warnings(file, data, width)),
        "leaves": leaves(file, data, width),
        "stays": [
            "Rows, single values, labels and predictions of single rows, and which are held out.",
            "Names of files and folders, and columns that are not used.",
            f"Names and counts of categories with fewer than {file.limits.rarest} training rows.",
            "How many values are missing, and where.",
        ],
        "dishonest": [dishonest(file)],
    }


def encoded_width(data: Dataset) -> int:
    """Return the number of encoded columns here; other silos may add categories."""
    if data.table.block is not None:
        return data.table.width
    if data.cohort is not None:
        return data.cohort.dimension
    described = data.describe()["columns"]
    return sum(len(c["categories"]) + c["other"] if c["kind"] == CATEGORY else 1 for c in described)


def _withheld(file: SiloFile, data: Dataset, column: DataColumn) -> int:
    """Return the number of categories of a column whose names do not leave."""
    if column.kind != CATEGORY:
        return 0
    return len(column.categories) - len(named_categories(column, ~data.held, file.limits.rarest))


def _labels(data: Dataset) -> list[Json]:
    labels = data.target.labels
    if data.target.task != CLASSIFICATION:
        return []
    train, test = (
        np.bincount(data.target.values[rows], minlength=len(labels))
        for rows in (~data.held, data.held)
    )
    return [
        {"label": label, "train": int(train[k]), "test": int(test[k])}
        for k, label in enumerate(labels)
    ]


def warnings(file: SiloFile, data: Dataset, width: int) -> Iterator[str]:
    """Yield warnings for the operator."""
    limits = file.limits
    train = ~data.held
    if data.rows[0] < limits.rows:
        yield (
            f"There are {data.rows[0]} training rows, and limits.rows asks for {limits.rows}: this "
            "silo would not take part."
        )
    if file.secure.required and not file.secure.pins:
        yield (
            "secure.required needs the others' keys in secure.pins: this silo would not take part."
        )
    if data.dropped:
        yield f"Rows without a target are left out: {data.dropped}."
    if data.target.task == PREPARED:
        return
    if width > limits.dimension:
        yield f"The features make {width} columns, and limits.dimension allows {limits.dimension}."
    found = _labels(data)
    for entry in found:
        if entry["train"] == 0:
            yield f"The label {entry['label']!r} has no training row."
        elif entry["train"] + entry["test"] == 1:
            yield f"The label {entry['label']!r} has one row only."
    if len(found) == 1:
        yield f"All rows have the label {found[0]['label']!r}."
    present = dict(_present(data))
    empty = [name for name, values in present.items() if len(values) == 0]
    constant = [
        name for name, values in present.items() if len(values) and values.min() == values.max()
    ]
    if empty:
        yield f"No training row has a value in {_cut(empty)}: the mean over all silos is used."
    if constant:
        yield f"All values are the same in {_cut(constant)}."
    if data.target.note:
        yield f"The target {data.target.note}."
    yield from leaking_columns(
        data.table.columns, data.target.values, data.target.task == CLASSIFICATION
    )
    for column in data.table.columns:
        if column.note:
            yield f"Column {column.name!r} {column.note}."
        hidden = _withheld(file, data, column)
        if hidden and hidden == len(column.categories) and column.counts(train).any():
            yield (
                f"Column {column.name!r} has {hidden} categories, each in fewer than "
                f"{limits.rarest} training rows: leave it out (data.columns)."
            )
        elif hidden:
            yield (
                f"Column {column.name!r} has {hidden} of {len(column.categories)} categories in "
                f"fewer than {limits.rarest} training rows: they count as one, “other”."
            )


def _present(data: Dataset) -> Iterator[tuple[str, Array]]:
    """Yield every column's name and training values: numbers, or codes of categories."""
    train = ~data.held
    if data.table.block is not None:
        for j, values in enumerate(data.table.block[train].T):
            yield f"x{j}", values[~np.isnan(values)]
    for column in data.table.columns:
        yield column.name, column.values[train & ~column.missing]


def leaves(file: SiloFile, data: Dataset, width: int) -> list[str]:
    """List everything that a coordinator may get, in order."""
    train, test = data.rows
    limits = file.limits
    privacy = file.privacy
    secure = file.secure
    exact = not privacy.required
    lines = [
        f"The name {file.name!r}, and the number of rows: {train} to train on, {test} held out."
    ]
    if data.target.task != PREPARED:
        lines += _agreement(file, data, width, exact or privacy.columns)
    lines.append(
        f"Per question: the loss, and a gradient or a local update (at least {width} numbers), "
        f"over all training rows or a random part, never fewer than {limits.rows} rows."
    )
    along = " and along directions that the coordinator chooses" if secure.projections else ""
    lines.append(
        f"{'V' if secure.required else 'In a federation with [secure], v'}ectors leave masked: "
        f"others see the sum over all silos, in which this one has a share of {secure.share:.0%} "
        f"at most, and of this silo alone how large its vector is, as a power of two{along}."
    )
    if exact:
        held = " and on the held-out rows" if test >= limits.rows else ""
        lines.append(
            "Three numbers on how curved the loss is, and the loss at one arbitrary point, which "
            "identifies the data; for methods of second order the diagonal of the Hessian and "
            f"curvatures along directions; loss and accuracy on the training rows{held}."
        )
    else:
        lines.append(
            "Losses, gradients and local updates carry noise, and cost at most ε = "
            f"{privacy.epsilon:g}, all runs together. Curvatures and scores do not leave. Sums "
            f"over columns {'leave exactly' if privacy.columns else 'are refused'}."
        )
    allowed = "any algorithm" if limits.algorithms is None else ", ".join(limits.algorithms)
    return [
        *lines,
        f"All this for these algorithms only: {allowed}.",
        "Sums and vectors are not anonymous: from enough of them one can compute how many rows "
        "have which label, and the fewer rows there are, the more about each.",
    ]


def _agreement(file: SiloFile, data: Dataset, width: int, sums: bool) -> list[str]:
    """List what leaves before training."""
    columns = data.table.columns
    if data.table.block is not None:
        lines = [f"The shape of the features: {' × '.join(map(str, data.table.shape))}."]
    else:
        names = _cut([column.name for column in columns])
        lines = [f"Names and kinds of the {len(columns)} columns, and which are empty: {names}."]
    for column in columns:
        if column.kind == CATEGORY:
            named = named_categories(column, ~data.held, file.limits.rarest)
            if named:
                lines.append(f"Categories of {column.name!r}: {_cut(named)}.")
    if data.target.task == CLASSIFICATION:
        lines.append(f"Labels: {_cut([str(label) for label in data.target.labels])}.")
    if sums:
        lines.append(
            f"For each of about {width} encoded columns: the number of training rows, their sum "
            "(of a category, how many rows have it), and the sum of their squared distances from "
            "the mean over all silos."
        )
    return lines


def dishonest(file: SiloFile) -> str:
    """Describe what a dishonest coordinator could still learn (tests/security shows it)."""
    limits = file.limits
    secure = file.secure
    losses = (
        f"A coordinator that breaks the rules learns your loss at {limits.points:,} points of its "
        f"choice a run, within {limits.radius:g} of the start and on a path of at most {PATH:g}, "
        f"in {limits.runs} runs, and so gradients; your accuracy at {SCORES} points a run;"
    )
    if not secure.required:
        return (
            f"{losses} and your gradients and updates at those points, as they are, from which "
            "rows can be computed. With secure.required = true and the others' keys in secure.pins "
            "it learns only sums of them."
        )
    return (
        f"{losses} the length of your gradient at a few points; and, of vectors, sums over "
        f"{secure.members} silos or more with weights of its choice, of which yours is up to "
        f"{secure.share:.0%}, or all that is left if {secure.colluding} other silos help it. It "
        "opens no sum over fewer silos, and none for which it asked silos different things."
    )


def _cut(names: list[str]) -> str:
    short = [name if len(name) <= 40 else f"{name[:37]}..." for name in names[:SHOWN]]
    return ", ".join(short) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
