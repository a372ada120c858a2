"""`silo.toml`: the settings of a silo's operator, in a file that stays at the site."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, ValidationInfo, model_validator

import scaffpd.fields as key
from scaffpd.data.tabular.formats import ACCEPTED, is_table
from scaffpd.data.tabular.settings import DECIMALS
from scaffpd.errors import InputError
from scaffpd.fields import Needs, SettingsTable, read_toml, validated
from scaffpd.secure import SHARE
from scaffpd.settings.tables import OwnCode

FEDERATION = {"silos": "a coordinator's federation.toml; a silo's silo.toml is needed"}
ALWAYS = "always"
ASK = "ask"
Fingerprint = Annotated[
    str,
    StringConstraints(strip_whitespace=True, pattern="^[0-9a-f]{64}$"),
    Needs("a fingerprint of 64 digits, as `scaffpd silo check` shows it at that silo,"),
]


class SiloData(SettingsTable):
    """[data]: the source of the data; what columns are is in the agreement."""

    file: key.FileName | None = None  # a table; `None` with an entry
    entry: key.Entry | None = None  # "module:function"; `None` with a file
    # the column to be predicted; time, event and entry, if there is one, of times to an event
    target: Annotated[
        key.Text | Annotated[list[key.Text], Field(min_length=2, max_length=3)],
        Needs('the column to be predicted, or a time and an event such as ["days", "died"],'),
    ] = "y"
    # the column with the logarithm of what a count was exposed to (hours, persons); without one all
    # exposures are one
    offset: key.Text | None = None
    decimal: Annotated[str, key.one_of(DECIMALS)] | None = None  # of CSV; else detected
    missing: key.Codes = ()  # values that mean missing
    # the share of rows held out, by marks from a stored secret; `limits.rows` of them, or none
    test: key.Share = 0.2
    # the column that says whom a row is about: all rows of one are held out, or none; by default
    # every row is dealt by its place in the table
    subject: key.Text | None = None
    # the folder of the lock and the ledger of these rows; `None`: beside the table, or the entry's
    ledger: key.FileName | None = None

    @model_validator(mode="after")
    def _keys_go_together(self, info: ValidationInfo[Path]) -> Self:
        given = self.model_fields_set
        table = self.file
        code = ""
        if (self.file is None) == (self.entry is None):
            code = "data-source-unclear"
            found = "both" if self.file else "neither"
            sentence = f"needs either file or entry in [data], and has {found}"
        elif table and not is_table(table):
            code = "not-a-table"
            sentence = f"needs a table ({ACCEPTED}) for data.file, got {table.name!r}"
        elif "missing" in given and not table:
            code = "missing-without-table"
            sentence = "names data.missing, which only tables have: return NaN instead"
        elif "target" in given and self.entry is not None:
            code = "target-with-entry"
            sentence = "names data.target, but an entry returns the target itself; leave it out"
        elif "target" not in given and table:
            code = "setting-missing"
            sentence = "needs the column to be predicted for data.target, but it is missing"
        if code:
            raise InputError(code, f"{info.context.name!r} {sentence}.")
        return self


class SiloLimits(SettingsTable):
    """[limits]: what the silo allows."""

    rows: key.Count = 20  # the fewest to train on, held out, or of a network's minibatch
    # the fewest training rows of a category, or of other numbers than the commonest, that have
    # cells of their own in sums without noise; with 1 all have
    cell: key.Count = 10
    runs: key.Count = 20  # the most agreements that the silo ever takes part in
    # the largest share that one silo's vector may have of a sum from which colluding silos have
    # subtracted theirs; 1 allows all weight on one silo
    share: Annotated[float, Field(ge=1e-6, le=1), Needs("a share above 0, up to 1")] = SHARE
    # the largest ε over all runs together, at δ = 1e-5: then only runs with noise are taken part in
    epsilon: key.Positive | None = None


class SiloFile(OwnCode):
    """A silo's own settings."""

    name: key.Name  # the silo's name in the federation
    # where its key, its records and its models are written; one folder is for one silo
    folder: key.FileName = Field(default=".", validate_default=True)
    data: SiloData = Field(default_factory=dict, validate_default=True)
    limits: SiloLimits = SiloLimits()
    # "ask": a person agrees to every run (`scaffpd silo agree`); "always" takes part in all runs
    # that the limits allow, with the members below
    agree: Annotated[str, key.one_of((ALWAYS, ASK))] = ASK
    # fingerprints of the other silos' keys, compared outside the system
    members: dict[str, Fingerprint] = Field(default_factory=dict)
    # entries "module:function" of networks, by the names that an agreement uses
    models: dict[key.Name, key.Entry] = Field(default_factory=dict)
    _path: Path

    def model_post_init(self, context: Path) -> None:
        self._path = context

    @model_validator(mode="after")
    def _always_needs_keys(self, info: ValidationInfo[Path]) -> Self:
        if self.agree == ALWAYS and not self.members:
            raise InputError(
                "members-missing",
                f'{info.context.name!r} has agree = "always", which needs [members]: '
                "the fingerprints of the other silos' keys, from their operators.",
            )
        return self

    @property
    def path(self) -> Path:
        return self._path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SiloFile:
        file = Path(path).resolve()
        return validated(cls, read_toml(file, FEDERATION), file)

    @property
    def records(self) -> Path:
        """What was asked for, agreed to, and has left."""
        return self.folder / "records.jsonl"

    @property
    def identity(self) -> Path:
        """The silo's secret, from which its keys are made; made if missing."""
        return self.folder / "identity.key"

    @property
    def split(self) -> Path:
        """The secret from which rows have their marks; made if missing."""
        return self.folder / "split.key"

    @property
    def ledger(self) -> Path:
        """The folder of the lock and the ledger of the rows, which all their silos share.

        It belongs to the table, by whatever path a silo.toml names it.
        """
        if self.data.ledger is not None:
            return self.data.ledger.resolve()
        if self.data.file is None:
            return self.folder.resolve() / "ledger"
        table = self.data.file.resolve()
        return table.with_name(f".{table.name}.scaffpd")

    @property
    def noted(self) -> Path:
        """The last link that this silo has written to the ledger."""
        return self.folder / "ledger.link"

    def run(self, digest: str) -> Path:
        """The folder of a run under an agreement: two of them never share one."""
        return self.folder / "runs" / digest
