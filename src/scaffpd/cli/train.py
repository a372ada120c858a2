"""`scaffpd train` and `scaffpd path`: models from settings, a table or a data set known by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scaffpd.cli.names import ALGORITHMS, OBJECTIVES
from scaffpd.cli.requests import objective_table, requested
from scaffpd.cli.results import end
from scaffpd.cli.screens import RoundsScreen
from scaffpd.cli.typer_ext import INTERRUPTED, AsJson, Quiet, Tables, completing, takes
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.run.settings.tables import (
    ModelSettings,
    PathSettings,
    PrivacyBudget,
    TrainingSettings,
)

if TYPE_CHECKING:
    from scaffpd.run.settings.run import RunConfig
    from scaffpd.study.gains import Joining

TABLES: Tables = {
    "data": TableSettings,
    "model": ModelSettings,
    "training": TrainingSettings,
    "privacy": PrivacyBudget,
}
PATH: Tables = {
    "data": TableSettings,
    "model": ModelSettings,
    "training": TrainingSettings,
    "path": PathSettings,
}
What = Annotated[
    list[str],
    typer.Argument(
        help="CONFIG.toml, a table (CSV, Excel, Parquet), several, a folder, or hospitals, digits, "
        "breast-cancer (for folders of such names, ./digits)."
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(
        help=f"What is optimised: {', '.join(OBJECTIVES)}, or module:Class of your own.",
        show_default="ChiSquare",
        autocompletion=completing(*OBJECTIVES),
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew where the folder holds a run.")]
Page = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")]


@takes(TABLES)
def train(
    what: What,
    *,
    objective: Goal = None,
    strength: Annotated[
        float | None,
        typer.Option(
            help="Its ρ, δ, α, q or b.",
            show_default="of a table, chosen by folds; else ρ 0.1, δ 0.5, α 0.2, q 1",
        ),
    ] = None,
    choose: Annotated[
        bool | None,
        typer.Option(
            "--choose/--no-choose",
            help="Choose l2, strength and κ by folds of training rows.",
            show_default="choose, of a table",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="How it is trained: a name such as ScaffPD, or module:Class of your own.",
            show_default="chosen for the problem",
            autocompletion=completing(*ALGORITHMS),
        ),
    ] = None,
    out: Out = None,
    fresh: Fresh = False,
    report: Page = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **given: object,
) -> None:
    """Train one model that serves every client, and the average model to compare it with.

    A table needs two options, --client and --target. Texts become categories, missing values are
    filled client by client, and columns are scaled by sums over clients. The folder has settings,
    tables, model and report; the same command again goes on where it was interrupted. With
    --epsilon every client clips and adds noise before it answers. To compare objectives, train each
    and give all folders to `scaffpd report`.

    Examples:
        scaffpd train hospitals
        scaffpd train hospitals --epsilon 4
        scaffpd train patients.csv --client hospital --target ill
        scaffpd train hospitals --objective CVaR
    """
    method: dict[str, dict[str, object]] = {}
    if algorithm is not None:
        method["algorithm"] = {"kind": algorithm}
    table = objective_table(objective, strength, what[0])
    if table:
        method["objective"] = table
    config = requested(what, TABLES, given, method)
    with RoundsScreen(quiet or as_json) as screen:
        folder, interrupted = _one_run("train", config, out, fresh, screen, choose)
    end(folder, report and not interrupted, quiet, as_json)
    if interrupted:
        if not (quiet or as_json):
            typer.echo("Interrupted; the same command goes on.", err=True)
        raise typer.Exit(INTERRUPTED)


@takes(PATH, but=("kappa", "splits", "groups"))
def path(
    what: What,
    *,
    objective: Goal = None,
    out: Out = None,
    fresh: Fresh = False,
    report: Page = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **given: object,
) -> None:
    """Show the cost of fairness: models from the average to the worst case, with a suggestion.

    Goes along ρ of ChiSquare, or along Tilted, ChiSquareBall, CVaR or QFair; every point starts
    from what the last one has learnt, which takes far fewer rounds than training each alone.

    Examples:
        scaffpd path hospitals --points 5
        scaffpd path patients.csv --client hospital --target ill --objective CVaR
    """
    table = objective_table(objective, None, what[0], path=True)
    config = requested(what, PATH, given, {"objective": table} if table else {})
    with RoundsScreen(quiet or as_json) as screen:
        folder, _ = _one_run("path", config, out, fresh, screen, choose=False)
    end(folder, report, quiet, as_json)


def _one_run(
    kind: Literal["train", "path"],
    config: RunConfig,
    out: Path | None,
    fresh: bool,
    screen: RoundsScreen,
    choose: bool | None,
) -> tuple[Path, bool]:
    """Train, score and write one run; return its folder and whether it was interrupted."""
    from scaffpd.numbers import between
    from scaffpd.run import joint, path, prepare, scores, train  # seconds, so not for --help
    from scaffpd.run.folder import RunFolder, reading, title
    from scaffpd.run.recording import record
    from scaffpd.run.strengths import Choosing, choosable, strengthened
    from scaffpd.training.loop import Status

    if kind == "path":
        path.walkable(config)
    out = out or config.folder
    if out is not None:
        RunFolder(out).usable(kind)
    screen.say(f"Reading {config.name}")
    prepared = prepare.prepare(config)
    joint.check_asked(config, prepared)
    choosing = None
    if choosable(config, prepared) if choose is None else choose:
        choosing = Choosing()
        screen.say(f"Choosing strengths by folds, in at most {choosing.budget} rounds")
    config, prepared, choice = strengthened(config, prepared, choosing)
    folder = RunFolder(_place(config, out, fresh, kind))
    folder.check(kind, config, fresh)
    cohort = prepared.cohort(config)
    config = train.settled(config, cohort)
    noise = None if config.privacy is None else train.private(config, prepared)
    for line in (f"{prepared.about}; {len(prepared.names)} clients", *prepared.remarks):
        screen.say(line)
    if noise is not None:
        screen.say(
            f"Noise for ε = {noise.budget:g} in {config.training.rounds} rounds: "
            f"z = {between(noise.noise or 0.0)} for gradients, "
            f"z_L = {between(noise.loss_noise or 0.0)} for losses."
        )
    with folder.opened(kind, config, fresh):
        found: Joining | str = ""
        points = None
        if kind == "path":
            models = path.walk(config, prepared, cohort, screen)
            points = path.about(config, prepared, models)
        else:
            models = train.carry_out(config, prepared, cohort, folder.path, screen)
            screen.say("Training every client alone, to see what joining brings")
            found = joint.joining_of(config, prepared, models, choice)
        scored = scores.held_out_scores(prepared, models, found)
        run = record(
            kind,
            title(config, prepared),
            folder.command(kind),
            prepared,
            models,
            config=folder.settings(kind, config),
            reading=reading(config),
            path=points,
            joining=found,
            scored=scored,
        )
        folder.write(run, prepared, models, found)
    return folder.path, kind == "train" and models[-1].result.status is Status.INTERRUPTED


def _place(
    config: RunConfig, out: Path | None, fresh: bool, kind: Literal["train", "path"]
) -> Path:
    """Return the folder asked for, or the first of runs/NAME, NAME-2, … that holds no other run."""
    from scaffpd.run.folder import RunFolder

    if out is not None:
        return out
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.name)
    first = folder = Path("runs") / (safe if kind == "train" else f"{safe}-{kind}")
    k = 1
    while not fresh and not RunFolder(folder).fits(kind, config):
        k += 1
        folder = first.with_name(f"{first.name}-{k}")
    return folder
