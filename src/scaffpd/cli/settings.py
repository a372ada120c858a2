"""Options made of settings: the tables of a settings file, on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_origin

from pydantic.fields import FieldInfo

from scaffpd.cli.commands import OPTIONS, Option, listed
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.fields import SettingsTable, parts
from scaffpd.settings.tables import ModelSettings, PathSettings, PrivacyBudget, TrainingSettings

Tables = Mapping[str, type[SettingsTable]]  # by their names in a settings file
COMMON: Tables = {"data": TableSettings, "model": ModelSettings, "training": TrainingSettings}
SETTINGS: Mapping[str, Tables] = {  # by command
    "train": {**COMMON, "privacy": PrivacyBudget},
    "path": {**COMMON, "path": PathSettings},
}
# settings that a command has no option for
BUT: Mapping[str, Sequence[str]] = {
    "path": (
        *("kappa", "personal", "splits", "groups"),
        *("effects", "errors", "reference", "split_inference"),
    )
}


def options(command: str) -> list[Option]:
    """Return an option for every setting of a command that has a help text.

    The command receives `None` where an option is not given.
    """
    return [
        _option(title, name, setting)
        for title, table in SETTINGS[command].items()
        for name, setting in _settings(table)
        if name not in BUT.get(command, ())
    ]


def _settings(table: type[SettingsTable]) -> list[tuple[str, FieldInfo]]:
    return [(name, one) for name, one in table.model_fields.items() if one.description]


def _option(title: str, name: str, setting: FieldInfo) -> Option:
    inside = list(parts(setting.annotation))
    # names with commas, and a number or "auto" or a file, are texts
    text = _is_list(setting) or Path in inside or any(isinstance(one, str) for one in inside)
    kind = str if text else next(one for one in (str, bool, float, int) if one in inside)
    flag = name.replace("_", "-")
    both = kind is bool and setting.default is None
    plain = isinstance(setting.default, int | float | str) and setting.default is not False
    return Option(
        [f"--{flag}/--no-{flag}" if both else f"--{flag}", name],
        type=kind,
        is_flag=kind is bool,
        default=None,
        help=setting.description,
        show_default=str(setting.default) if plain else False,
        heading=f"{OPTIONS}: {title}",
    )


def _is_list(setting: FieldInfo) -> bool:
    return any(get_origin(part) is tuple for part in parts(setting.annotation))


def given_settings(
    tables: Tables, given: Mapping[str, object]
) -> tuple[dict[str, dict[str, object]], dict[str, str]]:
    """Return the values of options by table, and by key, such as "data.test", its option."""
    values: dict[str, dict[str, object]] = {}
    names: dict[str, str] = {}
    for title, table in tables.items():
        for name, setting in _settings(table):
            value = given.get(name)
            if value is None:
                continue
            if isinstance(value, str) and _is_list(setting):
                value = listed(value)
            elif isinstance(value, str) and float in parts(setting.annotation):
                try:
                    value = float(value)
                except ValueError:
                    if Path in parts(setting.annotation):
                        value = str(Path(str(value)).absolute())
            values.setdefault(title, {})[name] = value
            names[f"{title}.{name}"] = f"--{name.replace('_', '-')}"
    return values, names
