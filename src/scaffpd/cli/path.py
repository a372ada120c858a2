"""`scaffpd path`: from the average model to the worst case, and what fairness costs on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from scaffpd.cli import train as command
from scaffpd.cli.train import RunRequest, listed

if TYPE_CHECKING:
    from scaffpd.config.run import RunConfig
    from scaffpd.runs.folder import RunFolder


def path(
    what: command.What,
    client: command.Client = None,
    target: command.Target = None,
    objective: command.Goal = None,
    points: Annotated[
        int | None, typer.Option(min=1, help="Points between the average and the worst case.", show_default="9")
    ] = None,
    columns: command.Columns = None,
    categories: command.Categories = None,
    task: command.Task = None,
    test: command.Test = None,
    l2: command.L2 = None,
    rounds: command.Rounds = None,
    tol: command.Tol = None,
    seed: command.Seed = None,
    device: command.Device = None,
    cold: Annotated[bool, typer.Option("--cold", help="Also train each point alone, to see what that costs.")] = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True,
    quiet: command.Quiet = False,
    as_json: command.AsJson = False,
) -> None:
    """What fairness costs: models from the average to the worst case, and the one that is suggested.

    Goes along ρ of ChiSquare, or along Tilted, ChiSquareBall, CVaR or QFair; every point starts from what the last
    one has learnt, which takes far fewer rounds than training each alone.

    Examples:
        scaffpd path hospitals --points 5
        scaffpd path patients.csv --client hospital --target ill --objective CVaR
    """
    asked = RunRequest(
        data={
            "client": client, "target": target, "columns": listed(columns), "categories": listed(categories),
            "task": task, "test": test, "seed": seed,
        },
        model={"l2": l2},
        training={"rounds": rounds, "tol": tol, "seed": seed, "device": device},
        objective=objective,
        needs_strength=False,
        path={"points": points},
    )  # fmt: skip
    from scaffpd.runs.folder import RunFolder  # seconds, so not for --help
    from scaffpd.runs.path import walkable

    config = asked.config(what)
    walkable(config)
    folder = RunFolder(command.place(config, out, fresh, "path"))
    folder.check("path", config, fresh)
    from scaffpd.cli.results import end

    _walk(config, folder, fresh, cold, quiet or as_json)
    end(folder.path, report, quiet, as_json)


def _walk(config: RunConfig, folder: RunFolder, fresh: bool, cold: bool, quiet: bool) -> None:
    from scaffpd.cli.screens import TrainingScreen
    from scaffpd.runs import path as walking

    with TrainingScreen(quiet) as screen:
        config, prepared, cohort = command.begin(config, screen)
        with folder.opened("path", config, fresh):
            models = walking.walk(config, prepared, cohort, screen)
            alone = walking.cold_rounds(config, cohort, models) if cold else None
            folder.write("path", config, prepared, models, walking.about(config, prepared, models, alone))
