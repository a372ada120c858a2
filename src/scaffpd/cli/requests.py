"""What a command line asks for, as the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from scaffpd.cli.names import OBJECTIVES, PROBLEMS
from scaffpd.cli.typer_ext import Tables, given_settings
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.run.settings.run import RunConfig


def requested(
    what: Sequence[str],
    tables: Tables,
    given: Mapping[str, object],
    method: Mapping[str, dict[str, object]] | None = None,
) -> RunConfig:
    """Return the settings: what a file says, with the options in its place where they are given.

    Args:
        what: a settings file, tables, or a data set known by name.
        tables: of settings that are options.
        given: the values of the options, `None` where they are not given.
        method: [objective] and [algorithm].
    """
    from scaffpd.data.tabular.formats import is_table  # seconds, so not for --help
    from scaffpd.run.settings.run import RunConfig

    changes, options = given_settings(tables, given)
    changes |= method or {}
    if "algorithm" in changes:
        options["algorithm.kind"] = "--algorithm"
    if "privacy" in changes and "epsilon" not in changes["privacy"] and not is_settings(what[0]):
        raise InputError("delta-without-epsilon", "--delta goes with --epsilon: how private?")
    name, *more = what
    known = known_name(name)
    if more and (is_settings(name) or known in PROBLEMS):
        raise InputError("named-with-others", f"{name!r} goes alone: leave {more[0]!r} out.")
    if is_settings(name):
        return RunConfig.read(Path(name), changes, options)
    if known in PROBLEMS:
        data: dict[str, object] = {"source": known}
        label = known
    else:
        for one in what:
            if not is_table(Path(one)):
                raise _neither(one)
        data = {"file": [str(Path(one).absolute()) for one in what]}
        if more:
            data["client"] = "file"
        label = Path(name).name
        _check_columns(what, data | changes.get("data", {}))
    return RunConfig.of({**changes, "data": data | changes.get("data", {})}, label, options)


def is_settings(what: str) -> bool:
    """Return whether a name is that of a settings file."""
    return what.lower().endswith(".toml")


def known_name(what: str) -> str:
    """Return how a data set known by name is called, before any folder of that name."""
    plain = what.lower().replace("_", "-").replace("heart-disease", "hospitals")
    return plain if plain in PROBLEMS else what


def objective_table(
    wanted: str | None, strength: float | None, what: str, path: bool = False
) -> dict[str, object]:
    """Return [objective] of --objective and --strength; a path goes along all strengths."""
    from scaffpd.run.settings.methods import objective_kind

    if wanted is None and strength is None:
        return {}
    if wanted is None and is_settings(what):
        raise InputError(
            "strength-without-objective",
            "--strength needs --objective: which of them is it the strength of?",
        )
    wanted = wanted or "ChiSquare"
    known = {name.lower(): name for name in OBJECTIVES} | {"chi2": "ChiSquare", "worst": "Agnostic"}
    name = known.get(wanted.lower().replace("-", "").replace("_", ""), wanted)
    kind = objective_kind(name, Path(what).parent if is_settings(what) else Path.cwd())
    if strength is None and (not kind.parameter or kind.usual is not None):
        return {"kind": name}  # the usual one, or one that goes by the clients' losses
    if not kind.parameter:
        raise InputError("no-strength", f"{kind.__name__} has no strength: leave --strength out.")
    if strength is None and not path:
        raise InputError(
            "strength-missing",
            f"{kind.__name__} needs --strength: {kind.meaning or kind.parameter}.",
        )
    made = {kind.parameter: 1.0 if strength is None else strength}
    kind(**made)  # refuses what is no strength
    return {"kind": name, **made}


def _check_columns(files: Sequence[str], data: Mapping[str, object]) -> None:
    """Refuse a table without its client and target, and name its columns."""
    for key, means in (("client", "has every row's client"), ("target", "is to be predicted")):
        if key in data:
            continue
        from scaffpd.data.tabular.formats import open_table

        table = open_table(*map(Path, files))
        names = [name for name in table.names if name]
        more = " and others" if len(names) > 12 else ""
        raise InputError(
            f"{key}-missing",
            f"A table needs --{key}: which column of {table.path.name!r} {means}? "
            f"There are {', '.join(map(repr, names[:12]))}{more}.",
        )


def _neither(what: str) -> InputError:
    from scaffpd.data.tabular.formats import ACCEPTED

    if Path(what).is_dir():
        return InputError(
            "folder-without-tables",
            f"{what!r} is a folder without tables: name a config.toml or a table.",
        )
    if Path(what).exists():
        return InputError(
            "not-a-table",
            f"{what!r} is neither a settings file (.toml) nor a table ({ACCEPTED}).",
        )
    near = get_close_matches(what, PROBLEMS, n=1)
    hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(PROBLEMS)})."
    return InputError(
        "no-such-file", f"{what!r} is no file, and no data set of that name is known{hint}"
    )
