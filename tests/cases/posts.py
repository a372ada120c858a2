"""Federations of small tables, and what one silo puts into its posts before masks hide it."""

from __future__ import annotations

import csv

import numpy as np

from cases.silos import agree
from scaffpd.deploy.transcript import Session

FILE = """\
name = "posts"
silos = [{silos}]
folder = "run"
labels = [0, 1]
{more}
[columns]
{columns}
[model]
kind = "logistic"
{model}
[objective]
kind = "ChiSquare"
rho = 0.1
"""


def write_table(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def small_federation(folder, tables, columns, model="l2 = 0.03", more="", rest="", silo=""):
    """Write silos with these rows, and agree; `rest` ends federation.toml, `silo` every file."""
    places = {}
    for number, (name, rows) in enumerate(tables.items()):
        home = folder / name
        home.mkdir(parents=True)
        write_table(home / "rows.csv", rows)
        for key in ("identity.key", "split.key"):
            (home / key).write_text(f"{number:064x}\n")
            (home / key).chmod(0o600)
        places[name] = home / "silo.toml"
        places[name].write_text(
            f'name = "{name}"\n[data]\nfile = "rows.csv"\ntarget = "ill"\n{silo}'
        )
    path = folder / "federation.toml"
    silos = ", ".join(f'"{name}"' for name in tables)
    path.write_text(
        FILE.format(silos=silos, columns=columns, model=model, more=more) + rest, encoding="utf-8"
    )
    agree(path, places)
    return path, places


class Posts:
    """Notes all numbers that one silo posts, part by part and in order, as they are unmasked."""

    def __init__(self, monkeypatch, silo):
        self.noted = []
        for name in ("clear", "total"):
            monkeypatch.setattr(Session, name, self._noting(getattr(Session, name), silo))

    def _noting(self, original, silo):
        def post(session, shown, own, *given):
            if session.name == silo:
                parts = [shown] if hasattr(shown, "key") else shown
                self.noted.append((tuple(one.key for one in parts), np.array(own)))
            return original(session, shown, own, *given)

        return post

    def taken(self):
        """Return what was noted, and begin anew."""
        found = list(self.noted)
        self.noted.clear()
        return found


def same(first, second, but=()):
    """Whether two lists of posts have the same parts, and the same numbers but in some parts."""
    assert [key for key, _ in first] == [key for key, _ in second]
    for (key, one), (_, other) in zip(first, second, strict=True):
        if not set(key) & set(but):
            assert one.shape == other.shape
            np.testing.assert_array_equal(one, other, err_msg=str(key))
    return True
