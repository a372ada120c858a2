"""The operators' pages name every key of silo.toml and federation.toml, no other key, and true defaults."""

from __future__ import annotations

import re
import tomllib

from scaffpd.algorithms import ALGORITHMS
from scaffpd.data.tabular.encode import GUESSED
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.reading import SettingsTable, _inside
from scaffpd.run.settings.silo import SiloFile
from snippets import ROOT, blocks

DEPLOY = ROOT / "docs" / "deploy"


def fields(kind, above=""):
    """{dotted key: its field} of all tables; a table whose keys are free stands for them."""
    found = {}
    for name, field in kind.model_fields.items():
        inner = [
            one
            for one in _inside(field.annotation)
            if isinstance(one, type) and issubclass(one, SettingsTable)
        ]
        found |= fields(inner[0], f"{above}{name}.") if inner else {above + name: field}
    return found


def test_the_silos_page_has_every_key_and_its_default():
    table = (
        (DEPLOY / "silo.md")
        .read_text("utf-8")
        .split("| key |")[1]
        .split("\n\n")[0]
        .splitlines()[2:]
    )
    keys = [key for line in table for key in re.findall(r"`(\w+(?:\.\w+)?)`", line.split(" | ")[0])]
    known = fields(SiloFile)
    assert sorted(key.replace("models.NAME", "models") for key in keys) == sorted(known)
    lines = {key: line for line in table for key in keys if f"`{key}`" in line.split(" | ")[0]}
    for key, line in lines.items():
        default = None if key == "models.NAME" else known[key].default
        if isinstance(default, bool | int | float) and key != "privacy.columns":
            shown = f"{default:g}" if isinstance(default, float) else f"{default:,}"
            shown = str(default).lower() if isinstance(default, bool) else shown
            assert re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d.])", line.split(" | ")[-1]), (
                key,
                shown,
            )
        elif isinstance(default, str):
            assert default in line.split(" | ")[-1], (key, default)
    allowed = known["limits.algorithms"].default
    named = re.findall(r"`(\w+)`", lines["limits.algorithms"].split(" | ")[-1])
    assert sorted(named) == sorted(set(ALGORITHMS) - set(allowed))
    assert f"up to {GUESSED} different" in lines["data.task"]


def test_the_coordinators_page_has_every_key():
    (block,) = blocks(DEPLOY / "coordinator.md", "toml")
    shown = tomllib.loads(re.sub(r"^# (?=\[?\w)", "", block, flags=re.MULTILINE))
    found = set()
    for name, value in shown.items():
        free = name in ("algorithm", "objective") or not isinstance(value, dict)
        found |= {name} if free else {f"{name}.{key}" for key in value}
    assert found == set(fields(FederationFile))
