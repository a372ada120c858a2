"""Show a silo's operator what was found in the data; nothing is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from scaffpd.data.tabular.columns import CATEGORY, leaking_columns
from scaffpd.deploy.dataset import Dataset
from scaffpd.deploy.flare.serving import expiry_warning
from scaffpd.deploy.messages import Array
from scaffpd.fields import Json
from scaffpd.numbers import brief
from scaffpd.secure.keys import Identity
from scaffpd.settings.silo import SiloFile

SHOWN = 30  # names in a list before it is cut off


def site_overview(file: SiloFile, data: Dataset) -> Json:
    train, test = data.rows
    y = data.target.values
    return {
        "silo": file.name,
        "fingerprint": Identity.stored(file.identity).card.fingerprint,
        "task": data.target.task.name,
        "rows": {"train": train, "test": test, "without_target": data.dropped},
        "dealt": "by place" if data.subject is None else f"by {brief(data.subject)}",
        "labels": _labels(data),
        "target": {"smallest": float(y.min()), "mean": float(y.mean()), "largest": float(y.max())}
        if not data.target.labels
        else None,
        "columns": [
            {
                "name": column.name,
                "kind": column.kind,
                "missing": int(column.missing.sum()),
                "categories": len(column.categories),
            }
            for column in data.table.columns
        ],
        "missing": int(np.isnan(data.table.block).sum()) if data.table.block is not None else None,
        "warnings": list(warnings(file, data)),
        "dictionary": dictionary(data),
    }


def dictionary(data: Dataset) -> list[str]:
    """Return these columns as federation.toml declares them, for the consortium to agree on."""
    lines = []
    if data.target.labels:
        lines.append(f"labels = {json.dumps(list(data.target.labels))}")
    if data.table.block is not None:
        return [*lines, f"columns = {json.dumps(list(data.table.shape))}"]
    lines += ["", "[columns]"]
    for column in data.table.columns:
        kind = '"number"'
        if column.kind == CATEGORY:
            kind = json.dumps(list(column.categories), ensure_ascii=False)
        lines.append(f"{json.dumps(column.name, ensure_ascii=False)} = {kind}")
    return lines


def _labels(data: Dataset) -> list[Json]:
    labels = data.target.labels
    if not labels:
        return []
    train, test = (
        np.bincount(data.target.values[rows].astype(np.int64), minlength=len(labels))
        for rows in (~data.held, data.held)
    )
    return [
        {"label": label, "train": int(train[k]), "test": int(test[k])}
        for k, label in enumerate(labels)
    ]


def warnings(file: SiloFile, data: Dataset) -> Iterator[str]:
    if ending := expiry_warning(file.path):
        yield ending
    if data.dropped:
        yield f"Rows without a target are left out: {data.dropped}."
    least = file.limits
    if file.data.test and not data.held.any():
        yield f"Nothing is held out: it would be fewer than {least.rows} rows."
    yield from rare(data, least.cell)
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
    yield from leaking_columns(data.table.columns, data.target.values, bool(data.target.labels))
    for column in data.table.columns:
        if column.note:
            yield f"Column {column.name!r} {column.note}."


def rare(data: Dataset, least: int) -> Iterator[str]:
    """Yield what few training rows have: categories, which are recoded, and labels, which stay."""
    for column in data.table.columns:
        if column.kind == CATEGORY:
            counts = column.counts(~data.held)
            few = [
                name
                for name, count in zip(column.categories, counts, strict=True)
                if 0 < count < least
            ]
            if few:
                yield (
                    f'Fewer than {least} rows have {_cut(few)} in {column.name!r}: "other" or '
                    "unknown, in runs without noise."
                )
    few = [str(one["label"]) for one in _labels(data) if 0 < one["train"] < least]
    if few:
        yield (
            f"Fewer than {least} rows have the label {_cut(few)}: sums over so few rows are in "
            "gradients."
        )


def _present(data: Dataset) -> Iterator[tuple[str, Array]]:
    """Yield every column's name and training values: numbers, or codes of categories."""
    train = ~data.held
    if data.table.block is not None:
        for j, values in enumerate(data.table.block[train].T):
            yield f"x{j}", values[~np.isnan(values)]
    for column in data.table.columns:
        yield column.name, column.values[train & ~column.missing]


def _cut(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(brief, names[:SHOWN])) + more
