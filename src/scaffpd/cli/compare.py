"""`scaffpd compare`: many methods on one problem, and a table of who is served."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaffpd.cli import typer_ext
from scaffpd.cli.typer_ext import Quiet, argument, listed, option, print_json
from scaffpd.errors import InputError, positive

if TYPE_CHECKING:
    from scaffpd.comparison import Comparison
    from scaffpd.training import Algorithm

OURS = ("Scaff-PD", "Subspace saddle")
WIDEST = 120  # columns: beyond, lines are hard to follow


def compare(
    problem: Annotated[str, argument("digits, hospitals, breast-cancer or synthetic.", typer_ext.PROBLEMS)] = "digits",
    methods: Annotated[
        str, option("All, or names such as FedAvg,AFL,module:Class.", typer_ext.METHODS, several=True)
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Communication rounds of every run.")] = 100,
    local_steps: Annotated[int, typer.Option(min=1, help="Local steps a round, of methods that have them.")] = 10,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per local gradient.", show_default="all")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many partitions to average over.")] = 1,
    tune: Annotated[
        int, typer.Option(min=1, help="Configurations that every method may try; 1: the automatic one.")
    ] = 5,
    rho: Annotated[float, typer.Option(help="ρ > 0 of the χ² penalty: the smaller, the fairer.")] = 0.1,
    clients: Annotated[
        int | None, typer.Option(min=1, help="How many clients.", show_default="20; 10 for breast-cancer")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="The smaller, the more labels differ.", show_default="0.05; 0.5 for breast-cancer"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all runs; there, the same command goes on.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="one per core")] = None,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, and nothing else.")] = False,
) -> None:
    """Many methods on one problem: who serves whom, in one table.

    All have the same partitions, starts, rounds and tuning budget, and are scored on test rows.

    Examples:
        scaffpd compare hospitals --methods FedAvg,Scaff-PD --rounds 20 --tune 1
        scaffpd compare synthetic --clients 5 --tune 1 --rounds 5 --out comparison
    """
    positive("compare", "--rho", rho)
    if alpha is not None:
        positive("compare", "--alpha", alpha)
    from scaffpd.comparison import compare as compete  # seconds, so not for --help
    from scaffpd.comparison.problem import problem as known

    choose_methods, contestants = known(problem, clients, alpha), _methods(methods, rho, local_steps, batch_size)
    try:
        comparison = compete(
            contestants, choose_methods, seeds=range(seeds), rounds=rounds, tune=tune, out=out, processes=processes,
            progress=False if quiet else None, strengths=True,
        )  # fmt: skip
    except KeyboardInterrupt:
        if out is not None and not quiet:
            typer.echo(f"Interrupted; what is done is in {out}, and the same command goes on there.", err=True)
        raise
    if out is not None:
        options: dict[str, object] = {
            "methods": methods, "rounds": rounds, "local-steps": local_steps, "batch-size": batch_size, "seeds": seeds,
            "tune": tune, "rho": rho, "clients": clients, "alpha": alpha,
        }  # fmt: skip
        given = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        (out / "command.txt").write_text(shlex.join(["scaffpd", "compare", problem, *given]) + "\n", encoding="utf-8")
    if as_json:
        print_json(_as_json(comparison, out))
    elif not quiet:
        _show(comparison, out)


def _methods(names: str, rho: float, local_steps: int, batch_size: int | None) -> dict[str, Algorithm]:
    from scaffpd.comparison.setting import choose_methods, zoo
    from scaffpd.config.reading import algorithm_kind
    from scaffpd.objectives import ChiSquare

    settings = (ChiSquare(rho), local_steps, batch_size)
    methods = zoo(*settings)
    own: dict[str, Algorithm] = {}
    wanted = listed(names)
    if not wanted:
        raise InputError("compare needs --methods such as FedAvg,Scaff-PD, or all.")
    for name in (name for name in wanted if ":" in name):
        found = algorithm_kind(name, Path.cwd())
        own |= found.usual(*settings) if isinstance(found, type) else {name: found}
    ours = [name for name in wanted if ":" not in name]
    return (methods if [name.lower() for name in ours] == ["all"] else choose_methods(methods, ours)) | own


def _show(comparison: Comparison, out: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    console.print(f"{comparison.setting.problem.name}\n", style="bold", markup=False)
    console.print(comparison, width=width)
    methods = comparison.setting.methods
    for label in (ours for ours in OURS if ours in methods and len(methods) > 1):
        console.print(f"\n{comparison.verdict(label)}", markup=False, width=width)
    if out is not None:
        console.print(f"\nWritten to {out}; to look at: scaffpd report {out}", markup=False, soft_wrap=True)


def _as_json(comparison: Comparison, out: Path | None) -> dict[str, object]:
    methods = comparison.setting.methods
    return {
        "problem": comparison.setting.problem.name,
        "ranked_by": comparison.criterion,
        "methods": [asdict(line) for line in comparison.table],
        "verdicts": [comparison.verdict(ours) for ours in OURS if ours in methods and len(methods) > 1],
        "folder": out,
    }
