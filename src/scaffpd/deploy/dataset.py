"""A silo's own table: read it as agreed, split it, commit to it, and predict its rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.tabular.agree import ColumnPair, Schema
from scaffpd.data.tabular.cellwise import TRUTHS
from scaffpd.data.tabular.columns import CATEGORY, DataColumn, FeatureTable, Mask, Matrix, spelt
from scaffpd.data.tabular.encode import SIDES, ClientRows
from scaffpd.deploy.messages import Array
from scaffpd.deploy.rare import recoded
from scaffpd.deploy.split import drawn_marks, held_rows
from scaffpd.deploy.tables import ANYTHING, Found, Wanted, cell_by_cell, column_by_column
from scaffpd.errors import InputError
from scaffpd.files import load_or_create, make_folder
from scaffpd.secure.keys import derived
from scaffpd.settings.model_file import Setup, own_model, predict_encoded
from scaffpd.settings.silo import SiloFile, SiloLimits
from scaffpd.tasks.base import Target


@dataclass(frozen=True)
class Dataset(ClientRows):
    """All rows of a silo that have a target."""

    goal: DataColumn = field(kw_only=True, repr=False)  # as it is read with nothing agreed
    # m, which everybody knows: with noise that of the table, whatever its cells are, and else how
    # many rows there are to train on
    records: int = field(kw_only=True)
    length: int = field(kw_only=True)  # of the table
    cell: int = field(default=1, kw_only=True)  # the fewest training rows of a cell of its own
    subject: str | None = field(default=None, kw_only=True)  # the column by which rows are dealt

    @classmethod
    def read(cls, file: SiloFile, wanted: Wanted = ANYTHING) -> Dataset:
        """Read the data that a `silo.toml` names, as it may have a part in sums."""
        found = cell_by_cell(file, wanted) if wanted.noisy else column_by_column(file, wanted)
        if found.features.width == 0:
            raise InputError("no-columns", f"Silo {file.name!r} has no columns besides its target.")
        held, records = _dealt(file, found, wanted.noisy)
        if held.all():
            raise InputError("no-training-rows", f"Silo {file.name!r} has no training rows.")
        features = found.features
        if wanted.schema is not None and not wanted.noisy:  # noise covers what few rows have
            cell = file.limits.cell
            features = recoded(features, ~held, wanted.schema, cell, wanted.curved)
        return cls(
            file.name,
            features,
            found.target,
            held,
            int((~found.there).sum()),
            extra=found.extra,
            goal=found.goal,
            records=records,
            length=len(found.there),
            cell=file.limits.cell,
            subject=file.data.subject,
        )

    def acts(self, schema: Schema, pair: ColumnPair) -> bool:
        """Return whether each cell that a pair cuts has `cell` training rows, or none.

        Sums have the other values of a product's rows, as they have those of a category's.
        """
        Z = self.indicators(schema, [pair[side] for side in SIDES])
        _, counts = np.unique(Z, axis=0, return_counts=True)
        return bool(counts.min() >= self.cell)

    def check(self, limits: SiloLimits) -> None:
        """Refuse to take part with too few rows: sums over few rows reveal much about each."""
        train = self.records
        labels = len(self.target.labels)
        if train < limits.rows:
            rows = f"{train} training row{'s' * (train != 1)}"
            raise InputError(
                "too-few-rows",
                f"Silo {self.name!r} has {rows}, and its limits.rows asks for {limits.rows}.",
            )
        if labels > max(2, train // 2):
            raise InputError(
                "label-per-row",
                f"Silo {self.name!r} has {labels} labels for {train} training rows: that is a name "
                "for every row, not a class; choose another target.",
            )

    def commitment(self, salt: bytes) -> str:
        """Return what shows later that the rows are the same, and nothing else."""
        marks = row_marks(self.table, self.target, derived(salt, b"rows"), self.extra)
        content = np.sort(marks).tobytes() + bytes(np.packbits(self.held))
        return hashlib.sha256(salt + content).hexdigest()

    def marks(self, secret: bytes) -> bytes:
        """Return what names the rows, whatever an agreement has read of them or how: targets.

        Labels or numbers, columns and held-out rows are the document's choice, and the same rows
        under another choice have the same gradients.
        """
        found = Counter[str]()
        distinct, counts = np.unique(self.goal.values, return_counts=True)
        for value, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            text = self.goal.categories[value] if self.goal.kind == CATEGORY else spelt(value)
            # files of other formats have numbers for truth values
            found[spelt(TRUTHS.get(text.lower(), text))] += count
        return hashlib.blake2b(repr(sorted(found.items())).encode(), key=secret).digest()


def _dealt(file: SiloFile, found: Found, noisy: bool) -> tuple[Mask, int]:
    """Return which rows with a target are held out, and m.

    With noise both follow from the table's length, and from whom a row is about: a row that is left
    out adds zero to sums that are divided by the same m.
    """
    make_folder(file.folder)
    marks = drawn_marks(load_or_create(file.split), len(found.there), found.subjects)
    share = file.data.test
    least = file.limits.rows
    if not noisy:
        held = held_rows(marks[found.there], share, least)
        return held, int((~held).sum())
    out = round(share * len(marks))
    held = held_rows(marks, share if out >= least else 0.0, 0)
    return held[found.there], len(marks) - (out if out >= least else 0)


def row_marks(
    features: FeatureTable, goal: Target, secret: bytes, extra: Sequence[Matrix] = ()
) -> NDArray[np.uint64]:
    """Return a keyed hash of every row's content: a sum of those of its values."""

    def marked(name: str, values: Array) -> NDArray[np.uint64]:
        distinct, place = np.unique(values, return_inverse=True)
        found = [
            hashlib.blake2b(f"{name}\0{value!r}".encode(), key=secret, digest_size=8).digest()
            for value in distinct.tolist()
        ]
        return np.frombuffer(b"".join(found), np.uint64)[place.ravel()]

    labels = np.array(list(goal.labels), dtype=object)
    total = marked("target", labels[goal.values].astype(str) if len(labels) else goal.values)
    for k, values in enumerate(extra):
        total = total + marked(f"target {k}", values)
    if features.block is not None:
        found = [
            hashlib.blake2b(row.tobytes(), key=secret, digest_size=8).digest()
            for row in features.block
        ]
        total = total + np.frombuffer(b"".join(found), np.uint64)
    for column in features.columns:
        cells: Array = column.values
        if column.kind == CATEGORY:
            cells = np.array([*column.categories, ""])[cells.astype(np.int64)]
        total = total + marked(column.name, cells)
    return total


def predict(data: Dataset, x: Array, setup: Setup) -> dict[str, Sequence[object] | Array]:
    """Predict all rows of a silo with a target, in the file's order, and return columns.

    It takes the linear model x, or the silo's personal model near x.
    """
    if setup.model.get("kind", "linear") != "linear":
        raise InputError(
            "not-a-linear-model",
            "Only linear models can predict from tables: run a network with its own code.",
        )
    scale = setup.mean, setup.deviation
    separate = bool(setup.privacy)
    own = own_model(setup.model, x, *data.encoded(setup.schema, *scale, separate).train)
    X = data.matrix(setup.schema, *scale, np.ones(len(data.held), dtype=bool), separate)
    predicted, shares = predict_encoded(X, own, setup)
    labels = data.target.labels
    places = data.target.values.tolist()
    return {
        "target": [labels[k] for k in places] if labels else places,
        "predicted": predicted,
        "probability": shares.max(1) if shares.shape[1] else np.full(len(X), np.nan),
        "held out": data.held.tolist(),
    }
