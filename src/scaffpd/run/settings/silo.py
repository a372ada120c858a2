"""`silo.toml`: the settings of a silo's operator, in a file that stays at the site."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

import scaffpd.fields as key
from scaffpd.algorithms import ALGORITHMS
from scaffpd.algorithms.base import VECTORS
from scaffpd.data.tabular.formats import ACCEPTED, is_table
from scaffpd.data.tabular.settings import ColumnSettings
from scaffpd.errors import InputError, unknown
from scaffpd.fields import Needs, SettingsTable, validated
from scaffpd.run.settings.methods import algorithm_kind
from scaffpd.run.settings.reading import read_toml

FEDERATION = {"silos": "a coordinator's federation.toml; a silo's silo.toml is needed"}
Fingerprint = Annotated[
    str,
    StringConstraints(strip_whitespace=True, pattern="^[0-9a-f]{64}$"),
    Needs("a fingerprint of 64 digits, as `scaffpd silo key` shows it at that silo,"),
]


class SiloData(ColumnSettings):
    """[data]: the source of the data."""

    file: key.FileName | None = None  # a table; `None` with an entry
    entry: key.Entry | None = None  # "module:function"; `None` with a file
    target: Annotated[key.Text, Needs("the name of the column to be predicted")] = "y"

    @model_validator(mode="after")
    def _keys_go_together(self, info: ValidationInfo[Path]) -> Self:
        name = repr(info.context.name)
        given = self.model_fields_set
        table = self.file
        code = ""
        if (self.file is None) == (self.entry is None):
            code = "file-or-entry"
            found = "both" if self.file else "neither"
            sentence = f"needs either file or entry in [data], and has {found}"
        elif table and not is_table(table):
            code = "not-a-table"
            sentence = f"needs a table ({ACCEPTED}) for data.file, got {table.name!r}"
        elif "missing" in given and not table:
            code = "missing-without-table"
            sentence = "names data.missing, which only tables have: return NaN instead"
        elif "target" in given and self.entry is not None:
            code = "target-of-entry"
            sentence = "names data.target, but an entry returns the target itself; leave it out"
        elif "target" not in given and table:
            code = "setting-missing"
            sentence = "needs the column to be predicted for data.target, but it is missing"
        elif table and self.target in self.columns:
            code = "learning-from-target"
            sentence = f"names the target {self.target!r} in data.columns as well; leave it out"
        if code:
            raise InputError(code, f"{name} {sentence}.")
        return self


class SplitSettings(SettingsTable):
    """[split]: the share of rows held out, stratified by label."""

    test: key.Share = 0.2


class SiloLimits(SettingsTable):
    """[limits]: what the silo allows."""

    # names of algorithms; `None` for all; left out, those that need only sums and scalars
    algorithms: key.Texts | None = tuple(
        name for name, kind in ALGORITHMS.items() if VECTORS not in kind.needs
    )
    dimension: key.Count = 1_000_000  # the largest d
    rarest: key.Count = 5  # names of categories with fewer training rows do not leave
    rows: key.Count = 20  # the fewest training rows to take part
    runs: key.Count = 20  # the most agreements that the silo ever accepts
    points: key.Count = 20_000  # the most points x at which it answers in a run
    # the largest distance of x from the start, unless the loss is quadratic
    radius: key.Positive = 50.0

    @field_validator("algorithms", mode="before")
    @classmethod
    def _all(cls, given: object) -> object:
        return None if given == "all" else given

    @field_validator("algorithms")
    @classmethod
    def _known(
        cls, given: tuple[str, ...] | None, info: ValidationInfo[Path]
    ) -> tuple[str, ...] | None:
        for name in given or ():
            algorithm_kind(
                name, info.context.parent, f"algorithm in {info.context.name!r},", keep=False
            )
        return given


class SecureRules(SettingsTable):
    """[secure]: rules for masking the silo's vectors."""

    required: key.Switch = False  # whether the silo takes part only with masked vectors
    # fingerprints of the other silos' keys; with any, no other silo may take part
    pins: dict[str, Fingerprint] = Field(default_factory=dict)
    members: key.Count = 3  # the fewest silos in a sum
    colluding: key.Count = 1  # the fewest colluding silos that a sum has to bear
    # the largest share of a sum that its vector may have
    share: Annotated[float, Field(ge=1e-6, le=1), Needs("a share above 0, up to 1")] = 0.9
    # whether its gradient along directions chosen by the coordinator may leave
    projections: key.Switch = False


def _exact(given: object, info: ValidationInfo[Path]) -> bool:
    if given not in ("exact", "never"):
        raise unknown(f"privacy.columns in {info.context.name!r},", given, ("exact", "never"))
    return bool(given == "exact")


class PrivacyRules(SettingsTable):
    """[privacy]: the silo's own privacy budget."""

    # whether the silo takes part only with noise; left out, whether it has a budget
    required: key.Switch = False
    # the largest ε over all runs together; `None` leaves it to every agreement
    epsilon: key.Positive | None = None
    delta: key.Between | None = None  # δ of its own budget; `None` takes the agreement's
    # whether sums over columns may leave without noise ("exact", not "never"), which ε does not
    # cover
    columns: Annotated[bool, BeforeValidator(_exact), Needs('"exact" or "never"')] = False

    @model_validator(mode="before")
    @classmethod
    def _budgets_need_noise(cls, given: object) -> object:
        """Require noise if there is a budget, as plain answers would not count against it."""
        return {"required": "epsilon" in given, **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _budgets_have_both(self, info: ValidationInfo[Path]) -> Self:
        if self.epsilon is not None and self.delta is None:
            raise InputError(
                "delta-missing",
                f"{info.context.name!r} needs privacy.delta with privacy.epsilon, such as 1e-5.",
            )
        if self.required and self.epsilon is None:
            raise InputError(
                "epsilon-missing",
                f"{info.context.name!r} needs privacy.epsilon and privacy.delta with "
                "privacy.required: without them a coordinator could agree on an ε of any size.",
            )
        return self


class ConsentRules(SettingsTable):
    """[consent]: whether a person has to agree to every run."""

    # "always" takes part in all that the file allows, "ask" once a person has agreed
    policy: Annotated[str, key.one_of(("always", "ask"))] = "always"


class SiloFile(SettingsTable):
    """A silo's own settings."""

    name: key.Name  # the silo's name in the federation
    # where its keys and its records of answers are written; one folder is for one silo
    folder: key.FileName = Field(default=".", validate_default=True)
    data: SiloData = Field(default_factory=dict, validate_default=True)
    split: SplitSettings = SplitSettings()
    limits: SiloLimits = SiloLimits()
    secure: SecureRules = SecureRules()
    privacy: PrivacyRules = PrivacyRules()
    consent: ConsentRules = ConsentRules()
    # entries "module:function" of networks, by the names that a coordinator uses
    models: dict[str, key.Entry] = Field(default_factory=dict)
    _path: Path

    def model_post_init(self, context: Path) -> None:
        """Store the file's path."""
        self._path = context

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SiloFile:
        """Read and check a `silo.toml`, but not its data."""
        file = Path(path).resolve()
        return validated(cls, read_toml(file, FEDERATION), file)

    @property
    def answered(self) -> Path:
        """The file of its answers so far, which limit further ones."""
        return self.folder / "answered.jsonl"

    @property
    def audit(self) -> Path:
        """The log of all that has left."""
        return self.folder / "audit.jsonl"

    @property
    def consents(self) -> Path:
        """The decisions of `scaffpd silo consent`; write access to it is the right to grant."""
        return self.folder / "consents.jsonl"

    @property
    def identity(self) -> Path:
        """The long-term key for secure sums; made if missing."""
        return self.folder / "identity.key"

    @property
    def noise_secret(self) -> Path:
        """The secret that noise is drawn from; made if missing."""
        return self.folder / "privacy.key"

    @property
    def spent(self) -> Path:
        """All releases under differential privacy so far."""
        return self.folder / "privacy-spent.npz"
