"""`silo.toml`: everything that the operator of a silo has to say, in one file that stays at the site."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scaffpd.algorithms import ALGORITHMS
from scaffpd.config.errors import NAME, Section
from scaffpd.config.objects import algorithm_kind, glimpse
from scaffpd.deploy.silo.privacy_ledger import PrivacyRules
from scaffpd.deploy.silo.secure_rules import SecureRules
from scaffpd.errors import InputError, unknown
from scaffpd.tabular.schema import TASKS

ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
FINGERPRINT = re.compile(r"[0-9a-f]{64}")
FEDERATION = {"silos": "a coordinator's federation.toml; a silo's silo.toml is needed"}
FORMATS = (".csv", ".parquet", ".npz")


@dataclass(frozen=True)
class SiloData:
    """Where the data is.

    Attributes:
        file: a CSV, Parquet or NPZ file; `None` where there is an entry.
        entry: "module:function"; `None` where there is a file.
        target: the column, or the array of an NPZ file, that is to be predicted.
        features: the array of an NPZ file that holds the features.
        columns: which columns to use; `None` for all others than the target.
        categories: columns of numbers that are to be read as categories.
        task: "classification" or "regression"; `None` to go by the target.
    """

    file: Path | None
    entry: str | None
    target: str
    features: str
    columns: tuple[str, ...] | None
    categories: tuple[str, ...]
    task: str | None


@dataclass(frozen=True)
class SiloLimits:
    """What the silo agrees to.

    Attributes:
        algorithms: names of algorithms; `None` for all that the package has.
        dimension: the largest d.
        local_steps: the most local steps per question.
        message_mb: the largest message taken, in megabytes.
        rarest: a category with fewer training rows than this is not named to others.
        rows: the fewest training rows with which the silo takes part.
    """

    algorithms: tuple[str, ...] | None
    dimension: int = 1_000_000
    local_steps: int = 10_000
    message_mb: int = 512
    rarest: int = 5
    rows: int = 20


@dataclass(frozen=True)
class SiloFile:
    """A silo's own settings.

    Attributes:
        path: the file itself.
        name: the silo's name in the federation.
        source: where the data is.
        test: the share of rows held out, label by label.
        seed: chooses those rows.
        limits: what the silo agrees to.
        secure: how its vectors are masked.
        privacy: how much its rows may cost.
        models: entries "module:function" of networks, by the names under which a coordinator may ask for them.
    """

    path: Path
    name: str
    source: SiloData
    test: float
    seed: int
    limits: SiloLimits
    secure: SecureRules
    privacy: PrivacyRules
    models: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SiloFile:
        """Read and check a `silo.toml`; the data is not looked at."""
        top = Section.read(
            Path(path).resolve(), ("name", "data", "split", "limits", "secure", "privacy", "models"), FEDERATION
        )
        name = top.text("name", needs="the silo's name in quotes")
        if not NAME.fullmatch(name):
            raise top.refusal("name", "up to 63 letters, digits, - and _ (the first a letter or digit)")
        split = top.section("split", ("test", "seed"))
        return cls(
            top.file,
            name,
            _source(top),
            split.number("test", 0.2, "a share from 0 to below 1", 0, 1),
            split.whole("seed", 0),
            _limits(top),
            _secure(top),
            _privacy(top),
            _models(top),
        )


def _source(top: Section) -> SiloData:
    data = top.section("data", ("file", "entry", "target", "features", "columns", "categories", "task"))
    file, entry = data.maybe("file", needs="a CSV, Parquet or NPZ file"), data.maybe("entry", needs="module:function")
    if (file is None) == (entry is None):
        found = "both" if file else "neither"
        raise InputError(f"{top.file.name!r} needs either file or entry in [data], and has {found}.")
    if entry is not None and not ENTRY.fullmatch(entry):
        raise data.refusal("entry", "module:function")
    place = None if file is None else top.file.parent / Path(file).expanduser()
    kind = "" if place is None else place.suffix.lower()
    if place is not None and kind not in FORMATS:
        raise data.refusal("file", "a name that ends in .csv, .parquet or .npz")
    if "features" in data and kind != ".npz":
        raise InputError(f"{top.file.name!r} names data.features, which only NPZ files have; use data.columns.")
    if "target" in data and entry is not None:
        raise InputError(f"{top.file.name!r} names data.target, but an entry returns the target itself; leave it out.")
    task = data.maybe("task")
    if task is not None and task not in TASKS:
        raise unknown(f"data.task in {top.file.name!r},", task, TASKS)
    target = data.text("target", "y" if kind in (".npz", "") else None, "the name of the column to be predicted")
    columns = data.texts("columns")
    if kind != ".npz" and entry is None and target in (columns or ()):
        raise InputError(f"{top.file.name!r} names the target {target!r} in data.columns as well; leave it out there.")
    return SiloData(
        place,
        entry,
        target,
        data.text("features", "X"),
        columns,
        data.texts("categories") or (),
        task,
    )


def _models(top: Section) -> dict[str, str]:
    models = top.section("models", top.values.get("models", {}) or ())
    for name in models.values:
        if not ENTRY.fullmatch(models.text(name)):
            raise models.refusal(name, "module:function")
    return dict(models.values)


def _secure(top: Section) -> SecureRules:
    known = ("required", "identity", "pins", "authority", "certificate", "certificate_key", "colluding", "share")
    secure = top.section("secure", (*known, "quantum", "projections", "changing"))
    home = top.file.parent
    named = {key: secure.maybe(key, "the name of a file") for key in ("authority", "certificate", "certificate_key")}
    files = {key: None if name is None else home / Path(name).expanduser() for key, name in named.items()}
    if (files["certificate"] is None) != (files["certificate_key"] is None):
        raise InputError(f"{top.file.name!r} needs secure.certificate and secure.certificate_key, or neither.")
    own = None
    if files["certificate"] is not None and files["certificate_key"] is not None:
        own = files["certificate"], files["certificate_key"]
    pins = secure.section("pins", secure.values.get("pins", {}) or ())
    for name in pins.values:
        if not FINGERPRINT.fullmatch(pins.text(name)):
            raise pins.refusal(name, "a fingerprint of 64 digits, as `scaffpd silo key` shows it at that silo,")
    return SecureRules(
        secure.boolean("required", False),
        home / Path(secure.text("identity", "identity.key")).expanduser(),
        {name: pins.text(name) for name in pins.values},
        files["authority"],
        own,
        secure.whole("colluding", 1, 1),
        secure.number("share", 0.9, "a share above 0, up to 1", 1e-6, 1 + 1e-12),
        secure.number("quantum", 0.0, "a number >= 0", 0, float("inf")),
        secure.boolean("projections", False),
        secure.boolean("changing", False),
    )


def _privacy(top: Section) -> PrivacyRules:
    known = ("required", "epsilon", "delta", "columns", "secret", "spent")
    privacy, home, most = top.section("privacy", known), top.file.parent, float("inf")
    columns = privacy.maybe("columns", '"exact" or "never"') or "never"
    if columns not in ("exact", "never"):
        raise unknown(f"privacy.columns in {top.file.name!r},", columns, ("exact", "never"))
    epsilon = privacy.number("epsilon", None, "a number > 0", 1e-9, most) if "epsilon" in privacy else None
    delta = privacy.number("delta", None, "a number between 0 and 1", 1e-300, 1) if "delta" in privacy else None
    if epsilon is not None and delta is None:
        raise InputError(f"{top.file.name!r} needs privacy.delta with privacy.epsilon, such as 1e-5.")
    return PrivacyRules(
        privacy.boolean("required", epsilon is not None),  # a budget that plain answers would not count is none
        epsilon,
        delta,
        columns == "exact",
        home / Path(privacy.text("secret", "privacy.key")).expanduser(),
        home / Path(privacy.text("spent", "privacy-spent.npz")).expanduser(),
    )


def _limits(top: Section) -> SiloLimits:
    known = ("algorithms", "dimension", "local_steps", "message_mb", "rarest", "rows")
    limits = top.section("limits", known)
    return SiloLimits(
        _algorithms(limits),
        limits.whole("dimension", SiloLimits.dimension, 1),
        limits.whole("local_steps", SiloLimits.local_steps, 1),
        limits.whole("message_mb", SiloLimits.message_mb, 1),
        limits.whole("rarest", SiloLimits.rarest, 1),
        limits.whole("rows", SiloLimits.rows, 1),
    )


def _algorithms(limits: Section) -> tuple[str, ...] | None:
    """The names given, "all" as `None`; by default all that ask for no more than sums and scalars."""
    if limits.values.get("algorithms") == "all":
        return None
    names = limits.texts("algorithms")
    for name in names or ():
        algorithm_kind(name, limits.file.parent, f"algorithm in {limits.file.name!r},", glimpse)
    return tuple(name for name, kind in ALGORITHMS.items() if not kind.sees_vectors) if names is None else names
