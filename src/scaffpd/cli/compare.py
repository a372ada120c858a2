"""`scaffpd compare`: many methods on one problem."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaffpd.cli.train import ALGORITHMS, PROBLEMS, known_name, requested
from scaffpd.cli.typer_ext import (
    AsJson,
    Quiet,
    Tables,
    completing,
    given_settings,
    listed,
    print_json,
    takes,
)
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.errors import InputError, positive, unknown
from scaffpd.files import make_folder
from scaffpd.run.settings.tables import ModelSettings

if TYPE_CHECKING:
    from scaffpd.study.comparison import Problem
    from scaffpd.training.loop import Algorithm

TABLES: Tables = {"data": TableSettings, "model": ModelSettings}


@takes(TABLES, but=("kappa", "personal", "groups"))
def compare(
    problem: Annotated[
        str,
        typer.Argument(
            help="digits, hospitals, breast-cancer, synthetic, a table or a CONFIG.toml.",
            autocompletion=completing(*PROBLEMS),
        ),
    ] = "digits",
    *,
    methods: Annotated[
        str,
        typer.Option(
            help="All, or names such as FedAvg,AFL,module:Class.",
            autocompletion=completing("all", *ALGORITHMS, several=True),
        ),
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Communication rounds of every run.")] = 100,
    local_steps: Annotated[
        int, typer.Option(min=1, help="Local steps a round, of methods that have them.")
    ] = 10,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per local gradient.", show_default="all")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many partitions to average over.")] = 1,
    tune: Annotated[
        int,
        typer.Option(min=1, help="Configurations that every method may try; 1: the automatic one."),
    ] = 5,
    rho: Annotated[
        float, typer.Option(help="ρ > 0 of the χ² penalty: the smaller, the fairer.")
    ] = 0.1,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="How many clients.", show_default="20; 10 for breast-cancer"),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="The smaller, the more labels differ.", show_default="0.05; 0.5 for breast-cancer"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all runs.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="one per core")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **given: object,
) -> None:
    """Many methods on one problem: who serves whom, in one table.

    All have the same partitions, starts, rounds and tuning budget, and are scored on test rows. A
    table is read as by `scaffpd train`; with --seeds, every seed holds out other rows of it.

    Examples:
        scaffpd compare hospitals --methods FedAvg,Scaff-PD --rounds 20 --tune 1
        scaffpd compare synthetic --clients 5 --tune 1 --rounds 5 --out comparison
        scaffpd compare patients.csv --client hospital --target ill --tune 1
    """
    options = dict(locals()) | given
    for passing in ("problem", "out", "processes", "quiet", "as_json", "given"):
        del options[passing]
    positive("compare", "--rho", rho)
    if alpha is not None:
        positive("compare", "--alpha", alpha)
    from scaffpd.study.comparison import compare as compete  # seconds, so not for --help

    chosen = _problem(problem, clients, alpha, seeds, given)
    contestants = _methods(methods, rho, local_steps, batch_size)
    comparison = compete(
        contestants,
        chosen,
        seeds=range(seeds),
        rounds=rounds,
        tune=tune,
        processes=processes,
        progress=False if quiet else None,
        strengths=True,
    )
    if out is not None:
        from scaffpd.run.compared import comparison_record
        from scaffpd.run.folder import write_files
        from scaffpd.run.recording import exports

        words = [
            word
            for name, value in options.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
        ]
        command = shlex.join(["scaffpd", "compare", problem, *words])
        record = comparison_record(comparison, command)
        record.write(make_folder(out))
        write_files(out, exports(record))
        comparison.to_csv(out / "runs.csv")
    if as_json:
        about = {"problem": chosen.name, "ranked_by": comparison.criterion, "folder": out}
        print_json(about | {"methods": [asdict(line) for line in comparison.table]})
    elif not quiet:
        typer.echo(f"{comparison.problem}\n\n{comparison}")
        if out is not None:
            typer.echo(f"\nWritten to {out}; to look at: scaffpd report {out}")


def _problem(
    what: str, clients: int | None, alpha: float | None, seeds: int, given: Mapping[str, object]
) -> Problem:
    """Return the problem of that name, or that of a table."""
    name = known_name(what)
    if name in PROBLEMS:
        from scaffpd.run.problems import TEST_FRACTION, problem

        values, options = given_settings(TABLES, given)
        test = values.get("data", {}).get("test", TEST_FRACTION)
        for key, option in options.items():
            if key != "data.test":
                raise InputError(
                    "option-not-applicable",
                    f"{name!r} brings its own clients and model: leave {option} out.",
                )
        if not isinstance(test, float):
            raise InputError(
                "test-not-a-share", f"--test needs a share for {name!r}, got {test!r}."
            )
        return problem(name, clients, alpha, test)
    for key, value in (("clients", clients), ("alpha", alpha)):
        if value is not None:
            raise InputError(
                "option-not-applicable",
                f"--{key} splits a built-in data set; a table already has its clients.",
            )
    from scaffpd.run.compared import problem_of

    return problem_of(requested([what], TABLES, given), range(seeds))


def _methods(
    names: str, rho: float, local_steps: int, batch_size: int | None
) -> dict[str, Algorithm]:
    from scaffpd.algorithms import ALGORITHMS, Algorithm, published
    from scaffpd.objectives import ChiSquare
    from scaffpd.run.settings.methods import algorithm_kind

    settings = (ChiSquare(rho), local_steps, batch_size)
    usual = published(*settings)
    asked = listed(names)
    if not asked:
        raise InputError(
            "methods-missing", "compare needs --methods such as FedAvg,Scaff-PD, or all."
        )
    # by class, and by label: "ScaffPD" as well as "scaff-pd"
    known = {_plain(type(method).__name__): label for label, method in usual.items()}
    known |= {_plain(label): label for label in usual}
    found: dict[str, Algorithm] = {}
    for name in asked:
        if ":" in name or (name in ALGORITHMS and not ALGORITHMS[name].published):
            own = algorithm_kind(name, Path.cwd())
            found |= {name: own} if isinstance(own, Algorithm) else own.usual(*settings)
        elif name.lower() == "all":
            found |= usual
        elif _plain(name) in known:
            label = known[_plain(name)]
            found[label] = usual[label]
        else:
            raise unknown("method", name, usual)
    return found


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().replace("δ", "delta") if c.isalnum())
