"""`scaffpd compare`: many methods on one problem."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaffpd.cli.train import ALGORITHMS, PROBLEMS, known_name
from scaffpd.cli.typer_ext import AsJson, Quiet, completing, listed, print_json
from scaffpd.errors import InputError, positive, unknown
from scaffpd.files import make_folder, write_file

if TYPE_CHECKING:
    from scaffpd.training.loop import Algorithm


def compare(
    problem: Annotated[
        str,
        typer.Argument(
            help="digits, hospitals, breast-cancer or synthetic.",
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
    out: Annotated[Path | None, typer.Option(help="Folder for the table and all runs.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="one per core")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Many methods on one problem: who serves whom, in one table.

    All have the same partitions, starts, rounds and tuning budget, and are scored on test rows. For
    rows of your own, see `sp.compare` in Python.

    Examples:
        scaffpd compare hospitals --methods FedAvg,Scaff-PD --rounds 20 --tune 1
        scaffpd compare synthetic --clients 5 --tune 1 --rounds 5 --out comparison
    """
    positive("compare", "--rho", rho)
    if alpha is not None:
        positive("compare", "--alpha", alpha)
    from scaffpd.run.problems import problem as known_problem  # seconds, so not for --help
    from scaffpd.study.comparison import compare as compete

    chosen = known_problem(known_name(problem), clients, alpha)
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
        comparison.to_csv(make_folder(out) / "runs.csv")
        write_file(out / "table.txt", f"{comparison.problem}\n\n{comparison}\n")
    if as_json:
        about = {"problem": chosen.name, "ranked_by": comparison.criterion, "folder": out}
        print_json(about | {"methods": [asdict(line) for line in comparison.table]})
    elif not quiet:
        typer.echo(f"{comparison.problem}\n\n{comparison}")
        if out is not None:
            typer.echo(f"\nWritten to {out}")


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
