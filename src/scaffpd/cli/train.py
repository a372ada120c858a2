"""`scaffpd train`, `path` and `demo`: models from settings, a table, or data of the package."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import scaffpd
from scaffpd.cli.commands import PATH, argument, as_json, command, completing, option, quiet, switch
from scaffpd.cli.results import end
from scaffpd.cli.screens import RoundsScreen, say, terminal
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.cli.commands import Option
    from scaffpd.cli.settings import Tables
    from scaffpd.report.folder import Kind
    from scaffpd.settings.run import RunConfig

# names that options take, without PyTorch, so that shells complete them quickly
ALGORITHM_NAMES = (
    "Fair",
    *(name for name, home in scaffpd._HOME.items() if home == "scaffpd.algorithms"),
)
OBJECTIVE_NAMES = tuple(
    name for name, home in scaffpd._HOME.items() if home == "scaffpd.objectives"
)


def _settings(command: str) -> Sequence[Option]:
    from scaffpd.cli.settings import options

    return options(command)


what = argument(
    "what",
    nargs=-1,
    required=True,
    help="CONFIG.toml, a table (CSV, Excel, Parquet), several, a folder, or hospitals, "
    "which is part of the package (for a folder of that name, ./hospitals).",
)
goal = option(
    "--objective",
    help=f"What is optimised: {', '.join(OBJECTIVE_NAMES)}, or module:Class of your own.",
    show_default="ChiSquare",
    shell_complete=completing(*OBJECTIVE_NAMES),
)
where = option("--out", type=PATH, help="Folder of the run.", show_default="runs/NAME")
anew = switch("--fresh", help="Start anew where the folder holds a run.")
page = option("--report/--no-report", help="Write report.html.", default=True)


@command(partial(_settings, "train"))
@what
@goal
@option(
    "--strength",
    type=float,
    help="Its ρ, δ, α, q or b; scaffpd path shows what others do.",
    show_default="ρ 0.1, δ 0.5, α 0.2, q 1",
)
@option(
    "--algorithm",
    help="How it is trained: a name such as ScaffPD, or module:Class of your own.",
    show_default="chosen for the problem",
    shell_complete=completing(*ALGORITHM_NAMES),
)
@where
@anew
@page
@quiet
@as_json
def train(
    what: Sequence[str],
    objective: str | None,
    strength: float | None,
    algorithm: str | None,
    **given: object,
) -> None:
    """Train an average, a fair and personal models, and say on held-out rows which one to use.

    A table needs two options, --client and --target. Texts become categories, missing values are
    filled client by client, columns are scaled by sums over clients, and strengths are set by the
    evidence of the rows. The folder has settings, tables, models and report; the same command again
    goes on where it was interrupted. With --epsilon every client clips and adds noise before it
    answers.

    Examples:
        scaffpd train hospitals
        scaffpd train hospitals --epsilon 4
        scaffpd train patients.csv --client hospital --target ill
        scaffpd train trial.csv --client hospital --time days --event died
        scaffpd train hospitals --objective CVaR
    """
    method = {"objective": objective_table(objective, strength, what[0])}
    if algorithm is not None:
        method["algorithm"] = {"kind": algorithm}
    _one_run("train", what, given, method)


@command(partial(_settings, "path"))
@what
@goal
@where
@anew
@page
@quiet
@as_json
def path(what: Sequence[str], objective: str | None, **given: object) -> None:
    """Show the cost of fairness: models from the average to the worst case, with a suggestion.

    Goes along ρ of ChiSquare, or along Tilted, ChiSquareBall, CVaR or QFair; every point starts
    from what the last one has learnt, which takes far fewer rounds than training each alone.

    Examples:
        scaffpd path hospitals --points 5
        scaffpd path patients.csv --client hospital --target ill --objective CVaR
    """
    method = {"objective": objective_table(objective, None, what[0], path=True)}
    _one_run("path", what, given, method)


AIR = "Twelve stations predict a day's fine dust; four are new, with thirty days."


@command()
@option("--out", type=PATH, default=Path("scaffpd-demo"), help="Folder for report and tables.")
@option("--seed", type=click.IntRange(min=0), default=0, help="Chooses new stations and days.")
@quiet
def demo(out: Path, seed: int, quiet: bool) -> None:
    """Twelve stations, four of them new: alone, one model for all, or models of their own.

    Examples:
        scaffpd demo
        scaffpd demo --seed 1 --out other-stations
    """
    from scaffpd.files import make_folder, write_file

    # refused before the work, not after it
    probe = make_folder(out) / ".writable"
    write_file(probe, "")
    probe.unlink()
    say(terminal(quiet=quiet), AIR)
    from scaffpd.program import demo as studies  # seconds, so not before words

    with RoundsScreen(quiet) as screen:
        study = studies.stations(seed, screen.phase)
    command = f"scaffpd demo --seed {seed} --out {shlex.quote(out.as_posix())}"
    studies.write_stations(study, out, command)
    end(out, report=True, quiet=quiet, as_json=False)


def requested(
    what: Sequence[str],
    tables: Tables,
    given: Mapping[str, object],
    method: Mapping[str, dict[str, object]] | None = None,
) -> RunConfig:
    """Return the settings: what a file says, with the options in its place where they are given."""
    from scaffpd.cli.settings import given_settings
    from scaffpd.data.tabular.formats import is_table  # seconds, so not for --help
    from scaffpd.settings.run import RunConfig
    from scaffpd.settings.tables import HOSPITALS

    changes, options = given_settings(tables, given)
    changes |= {name: table for name, table in (method or {}).items() if table}
    if "algorithm" in changes:
        options["algorithm.kind"] = "--algorithm"
    name, *more = what
    if "privacy" in changes and "epsilon" not in changes["privacy"] and not is_settings(name):
        raise InputError("delta-without-epsilon", "--delta needs --epsilon.")
    if more and (is_settings(name) or name == HOSPITALS):
        raise InputError(
            "name-goes-alone", f"{name!r} cannot be combined with others: leave {more[0]!r} out."
        )
    if is_settings(name):
        return RunConfig.read(Path(name), changes, options)
    if name == HOSPITALS:
        data: dict[str, object] = {"source": name}
        label = name
    else:
        for one in what:
            if not is_table(Path(one)) and not Path(one).exists():
                raise InputError(
                    "no-such-file", f"{one!r} is neither a file nor the data set {HOSPITALS!r}."
                )
        data = {"file": [str(Path(one).absolute()) for one in what]}
        data |= {"client": "file"} if more else {}
        label = Path(name).name
        _check_columns(what, data | changes.get("data", {}))
    return RunConfig.of({**changes, "data": data | changes.get("data", {})}, label, options)


def is_settings(what: str) -> bool:
    return what.lower().endswith(".toml")


def objective_table(
    wanted: str | None, strength: float | None, what: str, path: bool = False
) -> dict[str, object]:
    """Return [objective] of --objective and --strength; a path goes along all strengths."""
    from scaffpd.objectives.base import Objective
    from scaffpd.settings.methods import class_of

    if wanted is None and strength is None:
        return {}
    if wanted is None and is_settings(what):
        raise InputError(
            "strength-without-objective", "--strength needs --objective: the strength of which one?"
        )
    wanted = wanted or "ChiSquare"
    known = {name.lower(): name for name in OBJECTIVE_NAMES}
    known |= {"chi2": "ChiSquare", "worst": "Agnostic"}
    name = known.get(wanted.lower().replace("-", "").replace("_", ""), wanted)
    folder = Path(what).parent if is_settings(what) else Path.cwd()
    kind = class_of(Objective, name, "objective", folder)  # type: ignore[type-abstract]
    if strength is None and (not kind.parameter or kind.usual is not None):
        return {"kind": name}  # the usual one, or one that goes by the clients' losses
    if not kind.parameter:
        raise InputError(
            "objective-without-strength", f"{kind.__name__} has no strength: leave --strength out."
        )
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
        if key in data or (key == "target" and "time" in data):
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


def _one_run(
    kind: Kind,
    what: Sequence[str],
    given: Mapping[str, object],
    method: Mapping[str, dict[str, object]],
) -> None:
    from scaffpd.cli.settings import SETTINGS
    from scaffpd.program.train import one_run  # seconds, so not for --help
    from scaffpd.report.folder import RunFolder

    config = requested(what, SETTINGS[kind], given, method)
    fresh, report, quiet, as_json = (
        bool(given[name]) for name in ("fresh", "report", "quiet", "as_json")
    )
    out = given["out"]
    assert out is None or isinstance(out, Path)
    folder = out or config.folder or _place(config, fresh, kind)
    with RoundsScreen(quiet or as_json) as screen:
        stopped = one_run(kind, config, folder, fresh, screen).interrupted and kind == "train"
    end(folder, report and not stopped, quiet, as_json)
    if stopped:
        raise RunFolder(folder).interruption()


def _place(config: RunConfig, fresh: bool, kind: Kind) -> Path:
    """Return the first of runs/NAME, NAME-2, … that holds no other run."""
    from scaffpd.report.folder import RunFolder

    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.name)
    first = folder = Path("runs") / (safe if kind == "train" else f"{safe}-{kind}")
    k = 1
    while not fresh and not RunFolder(folder).fits(kind, config):
        k += 1
        folder = first.with_name(f"{first.name}-{k}")
    return folder
