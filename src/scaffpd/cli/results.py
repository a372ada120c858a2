"""`scaffpd report` and `scaffpd predict`, and what the terminal shows of a run that has ended."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scaffpd.cli.screens import MOST, WIDEST, fill, plain_table, say
from scaffpd.cli.typer_ext import AsJson, checked, listed, print_json
from scaffpd.errors import InputError
from scaffpd.files import csv_text, write_file
from scaffpd.numbers import format_bytes, several

if TYPE_CHECKING:
    from scaffpd.run.page.data import JoiningReport, ModelSummary, ReportData

NUMBERS = 52  # columns that losses of five models and the gain take
FORMATS = ("html", "png", "svg")


def end(folder: Path, report: bool, quiet: bool, as_json: bool, runs: Sequence[Path] = ()) -> None:
    """Write the report, and show the result to whoever wants to see it; of several runs in a folder, one for all."""
    from scaffpd.run.page import available, write

    sorry = available() if report else None
    page = write(folder) if report and sorry is None else None
    if as_json:
        print_json(
            as_values(*(runs or [folder])) | {"folder": str(folder), "report": page and str(page)}
        )
    elif not quiet:
        show(*(runs or [folder]))
        typer.echo(f"\nRun:    {folder}")
        if page is not None or sorry is not None:
            typer.echo(f"Report: {page}" if page is not None else f"No report: {sorry}")


def show(*folders: Path) -> None:
    """Show who is served how, the verdict, and what is proven; several runs side by side."""
    from scaffpd.run.page import opened
    from scaffpd.run.page.predictions import in_short
    from scaffpd.run.page.verdict import answers, cautions, optimised, verdict

    console = Console(highlight=False)
    run = opened(folders)
    console.print(f"\n{run.title}", style="bold", markup=False)
    if len(folders) > 1:
        console.print(_runs(run, console.width))
        say(console, *(f"{question} {answer}" for question, answer in answers(run)), *run.remarks)
        return
    if run.joining is not None:
        console.print(_joining(run.joining, run.word, console.width))
        why = (
            f"Why be in it (one split, no intervals): {run.coalition.sentence}"
            if run.coalition
            else ""
        )
        say(
            console,
            run.joining.sentence,
            run.joining.details,
            f"Intervals: {run.joining.interval}.",
            why,
        )
        console.print()
    console.print(_clients(run, console.width))
    said = () if run.joining is not None and run.verdict else verdict(run)
    say(console, *said, in_short(run), *cautions(run))
    if (loss := optimised(run)) is not None:
        moved = f"from {loss.before:.3f} to {loss.after:.3f}"
        say(console, f"What was optimised, their loss on training rows, goes {moved}.")
    console.print()
    if run.privacy is not None:
        say(console, run.privacy.sentence)
    if run.path:
        console.print(_points(run, run.path))
        say(console, f"Suggested: {run.path['why']}" if run.pair else "")
        warm = run.path["rounds_warm"]
        cold = run.path["rounds_cold"]
        alone = "" if cold is None else f"; each alone, {cold}: {cold / warm:.1f} times as many"
        say(console, f"{len(run.models)} models in {warm} rounds{alone}.")
    else:
        say(console, *map(_proof, run.models))
    if any(model.certificate is not None and not model.useless for model in run.models):
        say(
            console,
            "Certified gap: no model of this kind has an objective that is smaller by more than this.",
        )


def as_values(*folders: Path) -> dict[str, Any]:
    """Return a run, or several together and each by itself, for `--json`."""
    from scaffpd.run.page import opened
    from scaffpd.run.page.data import PredictionReport
    from scaffpd.run.page.verdict import answers, cautions, verdict

    run, (folder, *others) = opened(folders), folders
    said = {
        "verdict": list(verdict(run)),
        "cautions": list(cautions(run)),
        "answers": dict(answers(run)),
    }
    if others:
        totals = {name: asdict(one) for name, one in run.overall.items()}
        alone = {place.name: as_values(place) for place in folders}
        return said | {"differences": dict(run.differences), "overall": totals, "runs": alone}
    if run.joining is not None:
        rows = [row for own in run.joining.rows.values() for row in own.values()]
        said |= {"joining": run.written["joining"] | {"clients": rows}}
    found = run.predictions or PredictionReport({}, [], [])
    tables = {
        "scores": [*found.scores.values()],
        "reliability": found.bins,
        "coefficients": found.coefficients,
    }
    return {**run.written, **said, "folder": str(folder), "report": None, "predictions": tables}


def _runs(run: ReportData, width: int) -> Table:
    """Make a table with a row per run: mean, worst fifth and worst."""
    from scaffpd.numbers import measured

    table = plain_table("run", "mean", "worst fifth", "worst", "served worst", gap=1)
    rows = [
        [
            name,
            *(measured(value, run.measure) for value in (one.mean, one.worst_20, one.worst)),
            one.worst_client,
        ]
        for name, one in run.overall.items()
    ]
    fill(table, rows, width)
    return table


def _clients(run: ReportData, width: int) -> Table:
    """Make a table with a row per client, the one that gains most first."""
    from scaffpd.run.page import client_rows

    names = run.pair or [run.role("after") or run.role("before") or run.names[-1]]
    what = f"{'held-out' if run.split == 'test' else 'training'} {run.measure}"
    scores = [f"{what}\n{names[0]}", f"\n{names[-1]}", "\nchange"] if run.pair else [what]
    heads = ["trained on,\nheld out", *scores, "weight\nλ"]
    table = plain_table("\n" * bool(run.pair) + run.word, *heads, gap=0 if width < WIDEST else 2)
    rows: list[tuple[float, list[str | Text]]] = []
    for row in client_rows(run):
        score, values, (moved, told, tone) = row["score"], dict(row["values"]), row["gain"]
        found = [values[run.names.index(name)] for name in names]
        cells: list[str | Text] = [shown for _, shown in found]
        if run.pair:
            cells.append(Text(told, style={"gain": "green", "loss": "red"}.get(tone, "dim")))
        first = f"{score.client}{' †' if row['few'] else ''}"
        better = (moved or 0.0) if run.pair else -(found[0][0] or 0.0)
        line = [first, f"{score.train_rows}, {score.test_rows}", *cells, f"{score.weight:.3f}"]
        rows.append((-run.sign * better, line))
    fill(table, [line for _, line in sorted(rows, key=lambda row: row[0])], width, "clients.csv")
    return table


def _joining(found: JoiningReport, word: str, width: int) -> Table:
    """Make a table with a row per client: its held-out loss under every model, and whether joining pays.

    Where long names would be cut, the constant answer is left to joining.csv.
    """
    from scaffpd.numbers import plain

    narrow = width < WIDEST
    long = max(map(len, found.rows), default=0) > width - NUMBERS
    models = [model for model in found.models if not (narrow and long and model == "constant")]
    last = (f"gain of\n{found.shown}", "does it\npay?")
    table = plain_table(
        f"held-out loss\n{word}", *(f"\n{m}" for m in models), *last, gap=0 if narrow else 2
    )
    rows: list[list[str | Text]] = []
    styles = {"yes": "green", "no": "red"}
    for client in found.order:
        gain, pays = found.gain(client)
        losses = [plain(found.rows[client][model]["test_loss"]) for model in models]
        share = f"{100 * gain:+.1f} %".replace("-", "−")
        told = pays.removeprefix("within ")
        rows.append([client, *losses, share, Text(told, style=styles.get(pays, "dim"))])
    fill(table, rows, width, "joining.csv")
    return table


def _points(run: ReportData, path: dict[str, Any]) -> Table:
    """Make a table with a row per point of a path, the suggested one in bold."""
    from scaffpd.numbers import measured

    table = plain_table("point", "mean", "worst 20 %", "rounds", "certified gap")
    for model in run.models:
        one = run.overall[model.name]
        scores = [measured(value, run.measure) for value in (one.mean, one.worst_20)]
        gap = "none" if model.certificate is None else f"{model.certificate:.1e}"
        style = "bold" if model.name == path["knee"] else None
        table.add_row(model.name, *scores, f"{model.rounds:.0f}", gap, style=style)
    return table


def _proof(model: ModelSummary) -> str:
    gap = model.certificate
    proven = "nothing is certified" if gap is None else f"certified gap {gap:.1e}"
    if model.useless:
        proven += f", which is useless: the objective itself is {model.value:.2g}"
    goal = f" ({model.objective})" if model.objective else ""
    rounds = several(round(model.rounds or 0), "round")
    sent = format_bytes(1e6 * (model.megabytes or 0.0))
    return f"{model.name}{goal}: {model.status} after {rounds}, {proven}, {sent} of messages"


def report(
    run: Annotated[
        list[Path],
        typer.Argument(
            help="Folder that train, path, demo, compare or deploy wrote; or several of these."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File of the page, or folder of the pictures.", show_default="in RUN"),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="html: one page; png, svg: a picture per figure.")
    ] = "html",
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """One page that opens offline: the verdict, who gains and who pays, what it cost, how to do it again.

    Several runs on the same clients are compared on one page, with intervals where they hold out the same rows.

    Examples:
        scaffpd report runs/patients
        scaffpd report runs/patients --format svg --out figures
    """
    checked("format", form, FORMATS)
    from scaffpd.run import page as reports  # seconds, so not for --help

    written = (
        [reports.write(run, out)] if form == "html" else list(reports.write_figures(run, form, out))
    )
    for path in written:
        typer.echo(str(path))
    if show and typer.launch(written[0].resolve().as_uri()) != 0:
        typer.echo("No browser could be opened: open the file yourself.", err=True)


def predict(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, or a model.safetensors.", show_default=False)
    ],
    table: Annotated[
        Path, typer.Argument(help="Rows with the same columns, in any format.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path("predictions.csv"),
    model: Annotated[
        str | None,
        typer.Option(
            help="average, fair or personal.", show_default="the one that the run is about"
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Columns to copy, with commas: an id, say.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="Columns to score by, beside clients: sex,race.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Probabilities as trained, where the run recalibrates.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Apply a trained model to new rows, in their order; score it where the target is there.

    Missing values are filled as in training, for new clients from the rows at hand. Scores by client, and by the
    columns of --groups, go to the terminal and to a CSV file beside the predictions.

    Examples:
        scaffpd predict runs/patients new-patients.csv --keep age
    """
    from scaffpd.run.predict import predict as answer
    from scaffpd.run.predict import promise

    if out.resolve() == table.resolve():
        raise InputError(
            "table-itself-choose",
            f"{str(out)!r} is the table itself: choose another file with --out.",
        )
    if out.exists() and not overwrite:
        raise InputError(
            "already-choose-another",
            f"{str(out)!r} is there already: choose another file with --out, or give --overwrite.",
        )
    copied = listed(keep)
    cut = listed(groups)
    found = answer(run, table, model, [*copied, *(name for name in cut if name not in copied)], raw)
    if cut and found.truth is None:
        raise InputError(
            "groups-scores-rows",
            f"--groups scores rows, and {table.name!r} has no target to score by.",
        )
    kept = {name: values for name, values in found.kept.items() if name in copied}
    for name in ("client", "predicted", "probability"):
        if name in kept:
            raise InputError(
                "keep-predictions-column",
                f"--keep {name}: the predictions have a column of that name; rename it in the table.",
            )
    columns = kept | {
        "client": found.clients,
        "predicted": found.predicted,
        "probability": found.probability,
    }
    scored = (
        {by: found.scores(None if by == "client" else by) for by in ("client", *cut)}
        if found.truth
        else {}
    )
    write_predictions(out, columns, quiet=as_json)
    rows = [
        {"by": by, "group": row[by], **{k: v for k, v in row.items() if k != by}}
        for by in scored
        for row in scored[by]
    ]
    if rows:
        write_file(out.with_suffix(".scores.csv"), csv_text(rows))
    if as_json:
        print_json({"predictions": str(out), "remarks": list(found.remarks), "scores": rows})
        return
    for by, own in scored.items():
        Console(highlight=False).print(_scores(by, own))
    say(Console(highlight=False, stderr=True), *found.remarks)
    if (pair := promise(run)) is not None:
        typer.echo(f"The model was trained with {pair} for every record.")


HEADS = (  # what the terminal shows of the scores
    *(
        "rows",
        "accuracy",
        "auc",
        "recall",
        "precision",
        "false_positive_rate",
        "mean_probability",
        "base_rate",
    ),
    *("rmse", "mae", "r2"),
)


def _scores(by: str, rows: list[dict[str, Any]]) -> Table:
    """Make a table with a row per group, all rows together last."""
    from scaffpd.run.page.predictions import COLUMNS, written

    shown = [name for name in HEADS if name in rows[0]]
    table = plain_table(by, *(COLUMNS[name].replace(" ", "\n") for name in shown), gap=1)
    for row in rows if len(rows) <= MOST else [*rows[: MOST - 1], rows[-1]]:
        table.add_row(Text(str(row[by])), *(written(name, row[name]) for name in shown))
    if len(rows) > MOST:
        table.caption = f"the first {MOST - 1} of {len(rows) - 1}; all are in the .scores.csv file"
    return table


def write_predictions(out: Path, columns: dict[str, Any], quiet: bool = False) -> None:
    """Write a CSV file of predictions, whole or not at all; probabilities that do not exist are left out."""
    probability = ["" if p != p else f"{p:.6f}" for p in columns["probability"]]
    cells = zip(*(columns | {"probability": probability}).values(), strict=True)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(
        [list(columns), *cells]
    )  # texts as they are: they are compared with those of the table
    write_file(out, text.getvalue())
    if not quiet:
        typer.echo(f"{several(len(probability), 'row')} written to {out}.")
