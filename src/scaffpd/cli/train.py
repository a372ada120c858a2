"""`scaffpd train`: one fair model from a settings file or a table, and a folder with everything about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaffpd.cli import choices, ending
from scaffpd.cli.asked import Asked, free, listed
from scaffpd.cli.choices import completing

if TYPE_CHECKING:
    from scaffpd.cli.training_screen import TrainingScreen
    from scaffpd.cohort import Cohort
    from scaffpd.runs.config import RunConfig
    from scaffpd.runs.folder import RunFolder
    from scaffpd.runs.prepare import Prepared

What = Annotated[
    str, typer.Argument(help="CONFIG.toml, a table (.csv, .csv.gz, .parquet), or hospitals, digits, breast-cancer.")
]
Client = Annotated[str | None, typer.Option(help="Column that says whose a row is.")]
Target = Annotated[str | None, typer.Option(help="Column to be predicted: labels or numbers.")]
Goal = Annotated[
    str | None,
    typer.Option(
        help="What is optimised: " + ", ".join(choices.OBJECTIVES) + ".", show_default="ChiSquare",
        autocompletion=completing(*choices.OBJECTIVES),
    ),
]  # fmt: skip
Columns = Annotated[str | None, typer.Option(help="Columns to learn from, with commas.", show_default="all others")]
Categories = Annotated[str | None, typer.Option(help="Columns of numbers that are names of categories.")]
Task = Annotated[str | None, typer.Option(help="classification or regression.", show_default="goes by the target")]
Test = Annotated[float | None, typer.Option(help="Share of rows held out at every client.", show_default="0.2")]
L2 = Annotated[float | None, typer.Option("--l2", help="The regulariser.", show_default="0.001")]
Rounds = Annotated[int | None, typer.Option(min=1, help="The most rounds.", show_default="1000")]
Tol = Annotated[float | None, typer.Option(help="Certified gap to stop at.", show_default="1e-6, where one is proven")]
Seed = Annotated[int | None, typer.Option(min=0, help="Chooses held-out rows and all else.", show_default="0")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cpu")]
Out = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew where the folder holds a run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")]


def train(
    what: What,
    client: Client = None,
    target: Target = None,
    objective: Goal = None,
    strength: Annotated[
        float | None, typer.Option(help="Its ρ, δ, α, q or b.", show_default="ρ 0.1, δ 0.5, α 0.2, q 1")
    ] = None,
    columns: Columns = None,
    categories: Categories = None,
    task: Task = None,
    test: Test = None,
    l2: L2 = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The most rounds.", show_default="1000; 30 with --epsilon")
    ] = None,
    tol: Tol = None,
    seed: Seed = None,
    device: Device = None,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Train the average model too.",
            show_default="baseline; no-baseline with --epsilon",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy: ε of every row, over the whole run.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Its δ.", show_default="1e-5")] = None,
    clip: Annotated[float | None, typer.Option(help="C, the longest gradient of a row.", show_default="1")] = None,
    loss_clip: Annotated[float | None, typer.Option(help="B, the largest loss of a row.", show_default="4")] = None,
    radius: Annotated[float | None, typer.Option(help="R, the longest row, once scaled.", show_default="3")] = None,
    noise_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Noise that can be repeated; protects nobody.", show_default="a secret"),
    ] = None,
    out: Out = None,
    fresh: Fresh = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train one model that serves every client, and the average model to compare it with.

    A table needs two options, --client and --target. Texts become categories, missing values are filled client by
    client, and columns are scaled by sums over clients. The folder has settings, tables, model and report; the same
    command again goes on where it was interrupted. With --epsilon every client clips and adds noise before it answers.

    Examples:
        scaffpd train hospitals
        scaffpd train hospitals --epsilon 4
        scaffpd train patients.csv --client hospital --target ill
    """
    asked = Asked(
        data={
            "client": client, "target": target, "columns": listed(columns), "categories": listed(categories),
            "task": task, "test": test, "seed": seed,
        },
        model={"l2": l2},
        training={"rounds": rounds, "tol": tol, "seed": seed, "device": device, "baseline": baseline},
        objective=objective,
        strength=strength,
        privacy={
            "epsilon": epsilon, "delta": delta, "clip": clip, "loss_clip": loss_clip, "radius": radius,
            "seed": noise_seed,
        },
    )  # fmt: skip
    from scaffpd.runs.folder import RunFolder  # seconds, so not for --help

    config = asked.config(what)
    folder = RunFolder(place(config, out, fresh))
    folder.check("train", config, fresh)
    _carry_out(config, folder, fresh, report, quiet, as_json)


def place(config: RunConfig, out: Path | None, fresh: bool, kind: str = "train") -> Path:
    """Where the run goes: where it is told to, or to a folder of its own below runs/."""
    from scaffpd.runs.folder import RunFolder

    if out is not None or config.folder is not None:
        return Path(out or config.folder or "")
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.name)
    folder = Path("runs") / (safe if kind == "train" else f"{safe}-{kind}")
    return folder if fresh else free(folder, lambda place: RunFolder(place).fits(kind, config))


def begin(config: RunConfig, screen: TrainingScreen) -> tuple[RunConfig, Prepared, Cohort]:
    """Read the data, say what was found, and settle what was left open."""
    from scaffpd.runs.prepare import prepare
    from scaffpd.runs.privacy import noise_of
    from scaffpd.runs.train import private, settled

    screen.say(f"Reading {config.name}")
    prepared = prepare(config)
    cohort = prepared.cohort(config)
    config = settled(config, cohort)
    noise = None if config.privacy is None else noise_of(private(config, prepared), config.training.rounds)
    screen.say(f"{prepared.about}; {len(prepared.names)} clients")
    for remark in prepared.remarks:
        screen.say(remark)
    if noise is not None:
        screen.say(noise)
    return config, prepared, cohort


def _carry_out(config: RunConfig, folder: RunFolder, fresh: bool, report: bool, quiet: bool, as_json: bool) -> None:
    from scaffpd.cli.outcome import end
    from scaffpd.cli.training_screen import TrainingScreen
    from scaffpd.runs.train import carry_out
    from scaffpd.training import Status

    with TrainingScreen(quiet or as_json) as screen:
        config, prepared, cohort = begin(config, screen)
        with folder.opened("train", config, fresh):
            models = carry_out(config, prepared, cohort, folder.path, screen)
            folder.write("train", config, prepared, models)
    interrupted = models[-1].result.status is Status.INTERRUPTED
    end(folder.path, report and not interrupted, quiet, as_json)
    if interrupted:
        if not (quiet or as_json):
            typer.echo("Interrupted; the same command goes on.", err=True)
        raise typer.Exit(ending.INTERRUPTED)
