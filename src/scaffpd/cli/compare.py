"""`scaffpd compare`: many methods on one problem."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd.cli.names import ALGORITHMS, PROBLEMS
from scaffpd.cli.requests import known_name, requested
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
from scaffpd.errors import InputError, positive
from scaffpd.run.settings.tables import ModelSettings

if TYPE_CHECKING:
    from scaffpd.study.comparison import Comparison
    from scaffpd.study.comparison.problem import Problem
    from scaffpd.training.loop import Algorithm

TABLES: Tables = {"data": TableSettings, "model": ModelSettings}
OURS = ("Scaff-PD", "Subspace saddle")
WIDEST = 120  # columns: beyond, lines are hard to follow


@takes(TABLES, but=("kappa", "groups"))
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
    **given: Any,
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
    mine = OURS if len(contestants) > 1 else ()
    verdicts = [comparison.verdict(name) for name in mine if name in contestants]
    if out is not None:
        from scaffpd.run.compared import comparison_record

        comparison.to_csv(out)
        words = [
            word
            for name, value in options.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
        ]
        command = shlex.join(["scaffpd", "compare", problem, *words])
        comparison_record(comparison, command, verdicts).write(out)
    if as_json:
        about = {
            "problem": chosen.name,
            "ranked_by": comparison.criterion,
            "verdicts": verdicts,
            "folder": out,
        }
        print_json(about | {"methods": [asdict(line) for line in comparison.table]})
    elif not quiet:
        _show(comparison, verdicts, out)


def _problem(
    what: str, clients: int | None, alpha: float | None, seeds: int, given: Mapping[str, Any]
) -> Problem:
    """Return the problem of that name, or that of a table."""
    name = known_name(what)
    if name in PROBLEMS:
        from scaffpd.study.comparison.problem import TEST_FRACTION, problem

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
                f"--{key} cuts a data set that is known by name; a table has its own clients.",
            )
    from scaffpd.run.compared import problem_of

    return problem_of(requested([what], TABLES, given), range(seeds))


def _methods(
    names: str, rho: float, local_steps: int, batch_size: int | None
) -> dict[str, Algorithm]:
    from scaffpd.algorithms import ALGORITHMS, Algorithm
    from scaffpd.objectives import ChiSquare
    from scaffpd.run.settings.methods import algorithm_kind
    from scaffpd.study.comparison.grid import choose_methods, zoo

    settings = (ChiSquare(rho), local_steps, batch_size)
    published = zoo(*settings)
    own: dict[str, Algorithm] = {}
    ours = []
    for name in listed(names):
        if ":" in name or (name in ALGORITHMS and not ALGORITHMS[name].published):
            found = algorithm_kind(name, Path.cwd())
            own |= {name: found} if isinstance(found, Algorithm) else found.usual(*settings)
        else:
            ours.append(name)
    if not ours and not own:
        raise InputError(
            "methods-missing", "compare needs --methods such as FedAvg,Scaff-PD, or all."
        )
    everyone = [name.lower() for name in ours] == ["all"]
    return (published if everyone else choose_methods(published, ours)) | own


def _show(comparison: Comparison, verdicts: list[str], out: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    console.print(f"{comparison.problem}\n", style="bold", markup=False)
    console.print(comparison, width=width)
    for sentence in verdicts:
        console.print(f"\n{sentence}", markup=False, width=width)
    if out is not None:
        console.print(
            f"\nWritten to {out}; to look at: scaffpd report {out}", markup=False, soft_wrap=True
        )
