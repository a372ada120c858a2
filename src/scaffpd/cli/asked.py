"""What `train` and `path` are asked for: a settings file, a table or a data set that is known by name, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaffpd.cli.choices import OBJECTIVES, PROBLEMS
from scaffpd.cli.mistakes import nearest
from scaffpd.errors import InputError, unknown

if TYPE_CHECKING:
    from scaffpd.runs.config import RunConfig

STRENGTHS: dict[str, tuple[str, float | None]] = {  # the argument of each objective, and its value where none is given
    "ChiSquare": ("rho", 0.1), "Tilted": ("rho", 0.1), "ChiSquareBall": ("delta", 0.5), "CVaR": ("alpha", 0.2),
    "QFair": ("q", 1.0), "Nash": ("b", None),
}  # fmt: skip
NICKNAMES = {"heart-disease": "hospitals"}


@dataclass(frozen=True)
class Asked:
    """The options, by the table of the settings file that they belong to."""

    data: Mapping[str, Any]
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    objective: str | None = None
    strength: float | None = None
    needs_strength: bool = True
    path: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)

    def config(self, what: str) -> RunConfig:
        """The settings: what the file says, with the options in its place where they are given."""
        from scaffpd.runs.config import RunConfig
        from scaffpd.tabular.clients import is_table

        self._check()
        changes = {name: _given(getattr(self, name)) for name in ("data", "model", "training", "path", "privacy")}
        if changes["privacy"] and "epsilon" not in changes["privacy"] and not what.lower().endswith(".toml"):
            given = next(iter(changes["privacy"])).replace("_", "-")
            raise InputError(f"--{given.replace('seed', 'noise-seed')} goes with --epsilon: how private is it to be?")
        plain = what.lower().replace("_", "-")
        what = NICKNAMES.get(plain, plain if plain in PROBLEMS else what)
        changes["objective"] = self._objective(file=what.lower().endswith(".toml"))
        if what.lower().endswith(".toml"):
            return RunConfig.read(Path(what), {name: new for name, new in changes.items() if new})
        if is_table(Path(what)):
            changes["data"] = {"file": str(Path(what).absolute()), **_columns(Path(what), changes["data"])}
        elif what in PROBLEMS:
            for key in ("client", "target", "columns", "categories", "task"):
                if key in changes["data"]:
                    raise InputError(f"{what!r} brings its own clients and columns: leave --{key} out.")
            changes["data"] = {"source": what, **changes["data"]}
        else:
            raise _neither(what)
        return RunConfig.of({name: new for name, new in changes.items() if new}, Path(what).name)

    def _check(self) -> None:
        """Refuse numbers in the words of the options."""
        for name, given, below in (
            ("test", self.data.get("test"), 1.0),
            ("l2", self.model.get("l2"), float("inf")),
            ("tol", self.training.get("tol"), float("inf")),
        ):
            if given is not None and not 0 <= given < below:
                limits = "from 0 to below 1" if below == 1 else ">= 0 and finite"
                raise InputError(f"--{name} needs a number {limits}, got {given:g}.")
        for name in ("epsilon", "clip", "loss_clip", "radius", "delta"):
            given, below = self.privacy.get(name), 1.0 if name == "delta" else float("inf")
            if given is not None and not 0 < given < below:
                limits = "between 0 and 1" if name == "delta" else "above 0"
                raise InputError(f"--{name.replace('_', '-')} needs a number {limits}, got {given:g}.")

    def _objective(self, file: bool) -> dict[str, Any]:
        if self.objective is None and self.strength is None:
            return {}
        if self.objective is None and file:
            raise InputError("--strength needs --objective: which of them is it the strength of?")
        wanted = self.objective or "ChiSquare"
        names = {name.lower(): name for name in OBJECTIVES}
        kind = names.get(wanted.lower().replace("-", "").replace("_", ""))
        if kind is None:
            raise unknown("objective", wanted, OBJECTIVES)
        if kind not in STRENGTHS:
            if self.strength is not None:
                raise InputError(f"{kind} has no strength: leave --strength out.")
            return {"kind": kind}
        name, usual = STRENGTHS[kind]
        value = usual if self.strength is None else self.strength
        if value is None and self.needs_strength:
            raise InputError(f"{kind} needs --strength: its {name}, the loss that a client could fall back to.")
        made = {"kind": kind, name: 1.0 if value is None else value}
        getattr(import_module("scaffpd.objectives"), kind)(made[name])  # refuses what is no strength
        return made


def _columns(file: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Refuse a table without a word on whose rows they are, with the names of its columns."""
    for key, means in (("client", "says whose a row is"), ("target", "is to be predicted")):
        if key not in given:
            raise InputError(f"train needs --{key}: which column of {file.name!r} {means}?{_known(file)}")
    return given


def _known(file: Path) -> str:
    from scaffpd.tabular.clients import CSV
    from scaffpd.tabular.read import column_names

    if not file.name.lower().endswith(CSV):
        return ""

    names = [name for name in column_names(file) if name]
    return f" There are {', '.join(map(repr, names[:12]))}{' and others' if len(names) > 12 else ''}."


def _neither(what: str) -> InputError:
    if Path(what).is_dir():
        return InputError(f"{what!r} is a folder: name its config.toml, or a table in it.")
    if Path(what).exists():
        return InputError(f"{what!r} is neither a settings file (.toml) nor a table (.csv, .csv.gz, .parquet).")
    hint = nearest(what, list(PROBLEMS)) or f" (known: {', '.join(PROBLEMS)})."
    return InputError(f"{what!r} is no file, and no data set of that name is known{hint}")


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def listed(text: str | None) -> list[str] | None:
    """Names between commas."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def free(folder: Path, fits: Any) -> Path:
    """The folder, or the first of folder-2, folder-3, … that holds no other run."""
    place, k = folder, 1
    while not fits(place):
        k += 1
        place = folder.with_name(f"{folder.name}-{k}")
    return place
