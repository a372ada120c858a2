"""`scaffpd report` and `scaffpd predict`, and what the terminal shows of a run that has ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scaffpd.cli.commands import (
    PATH,
    argument,
    as_json,
    command,
    listed,
    option,
    print_json,
    quiet,
    switch,
)
from scaffpd.cli.screens import LINES, MOST, print_table, say, section, terminal
from scaffpd.errors import InputError, unknown
from scaffpd.files import csv_text, write_file
from scaffpd.numbers import brief, several, whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from scaffpd.report.predict import Predictions
    from scaffpd.report.record import RunRecord
    from scaffpd.tasks.base import ScoreRow

# of a CSV file, by name: arrays are of probabilities, NaN where there is none
Columns = Mapping[str, "Sequence[object] | NDArray[np.float64]"]
FORMATS = ("html", "png", "svg")


def end(folder: Path, report: bool, quiet: bool, as_json: bool) -> None:
    from scaffpd.report.page import available, write
    from scaffpd.report.page.verdict import answers, cautions, verdict
    from scaffpd.report.record import RunRecord

    sorry = available() if report else None
    page = write(folder) if report and sorry is None else None
    if as_json:
        run = RunRecord.read(folder)
        words = {"verdict": verdict(run), "cautions": cautions(run), "answers": answers(run)}
        places = {"folder": str(folder), "report": page and str(page)}
        print_json({**run.model_dump(mode="json"), **words, **places})
    elif not quiet:
        show(folder)
        if sorry is not None:
            click.echo(f"No report: {sorry}")
        click.echo(f"Run: {folder}" if page is None else f"Report: {page}")


def show(folder: Path) -> None:
    """Show the verdict, who is served how, and what is proven."""
    from scaffpd.report.page.tables import joining_table
    from scaffpd.report.page.verdict import QUESTIONS, cautions, promise, sure, verdict
    from scaffpd.report.record import RunRecord

    console = terminal()
    run = RunRecord.read(folder)
    first, *others = verdict(run)
    with console.capture() as above:
        # the page has all
        section(console, first, *(others[:3] if run.joining else others))
        console.print()
    with console.capture() as below:
        say(console, *cautions(run), promise(run.privacy) if run.privacy else "")
        if run.path:
            _show_points(console, run)
            say(console, f"{len(run.models)} models in {run.path.rounds} rounds.")
        else:
            say(console, f"{QUESTIONS['sure']} {sure(run)}")
    console.out(above.get(), end="")
    # heads, the caption, and where the page is
    most = max(6, min(MOST, LINES - 6 - above.get().count("\n") - below.get().count("\n")))
    if run.joining is not None:
        table = joining_table(run, run.joining)
        say(console, table.heading)
        # the page has intervals as well
        heads = [*table.names, *(head.replace(" over", "\nover") for head in table.heads[:-1])]
        rows = [[*names, *(cell.text for cell in cells[:-1])] for names, cells in table.rows]
        print_table(console, heads, rows, "joining.csv", most - 2)
    else:
        _show_clients(console, run, most)
    console.out(below.get(), end="")


def _show_points(console: Console, run: RunRecord) -> None:
    rows = [
        [
            model.name,
            *map(run.measure.written, (one.mean, one.worst_20, one.worst)),
            f"{model.rounds or 0:.0f}",
            "none" if model.certificate is None else f"{model.certificate:.1e}",
        ]
        for model in run.models
        if (one := model.overall)
    ]
    print_table(console, ("point", "mean", "worst 20 %", "worst", "rounds", "certified gap"), rows)


def _show_clients(console: Console, run: RunRecord, most: int) -> None:
    """Print a row per client, the one that gains most first."""
    from scaffpd.report.page.tables import client_lines, shown_models

    names = [model.name for model in shown_models(run)]
    if not names:
        return
    shown = [names.index(model.name) for model in run.pair or [run.main]]
    what = f"{'held-out' if run.split == 'test' else 'training'} {run.measure.name}"
    heads = [run.word, "rows", *(f"{what}\n{names[k]}" for k in shown)]
    if run.pair:
        heads.append("change")
    rows = []
    for line in client_lines(run, gaining=True):
        score = line.score
        cells = [line.values[k].text for k in shown] + [line.change.text] * bool(run.pair)
        weight = "" if score.weight is None else f"{score.weight:.3f}"
        counts = [score.train_rows, score.test_rows]
        count = ", ".join(str(own) for own in counts if own is not None)  # silos show none
        rows.append([f"{score.client}{' †' if line.few else ''}", count, *cells, weight])
    print_table(console, [*heads, "weight λ"], rows, "clients.csv", most)


@command()
@argument("run", type=PATH, help="Folder that train, path, demo or deploy wrote.")
@option(
    "--out", type=PATH, help="File of the page, or folder of the pictures.", show_default="in RUN"
)
@option("--format", "form", default="html", help="html: one page; png, svg: a picture per figure.")
def report(run: Path, out: Path | None, form: str) -> None:
    """One page that opens offline: the verdict, who gains, who pays, and how to do it again.

    Examples:
        scaffpd report runs/patients
        scaffpd report runs/patients --format svg --out figures
    """
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    from scaffpd.report import page as reports  # seconds, so not for --help

    html = form == "html"
    for path in (reports.write(run, out),) if html else reports.write_figures(run, form, out):
        click.echo(str(path))


@command()
@argument("run", type=PATH, help="Folder of a run, or a model.safetensors.")
@argument("table", type=PATH, help="Rows with the same columns, in any format.")
@option("--out", type=PATH, default=Path("predictions.csv"), help="The CSV file to write.")
@option(
    "--model",
    help="constant, alone, average, fair or personal.",
    show_default="the recommended one",
)
@option("--keep", help="Columns to copy, with commas: an id, say.")
@option("--sheet", help="Sheet of a workbook.", show_default="the first")
@switch("--overwrite", help="Replace an existing file.")
@as_json
@quiet
def predict(
    run: Path,
    table: Path,
    out: Path,
    model: str | None,
    keep: str | None,
    sheet: str | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Apply a trained model to new rows, in their order; score it if they have the target.

    Missing values are filled as in training, for new clients from the rows at hand. Scores by
    client are shown and written to a CSV file beside the predictions.

    Examples:
        scaffpd predict runs/patients new-patients.csv --keep age
    """
    from scaffpd.report.predict import predict as answer
    from scaffpd.report.predict import promise

    if out.resolve() == table.resolve():
        raise InputError(
            "out-is-table", f"{str(out)!r} is the table itself: choose another file with --out."
        )
    if out.exists() and not overwrite:
        raise InputError(
            "file-exists", f"{str(out)!r} already exists: choose another --out, or --overwrite."
        )
    copied = listed(keep)
    found = answer(run, table, model, copied, sheet)
    chances = {"probability": found.probability}
    if found.survival is not None:
        chances = {f"probability to survive {t:g}": own for t, own in found.survival.items()}
    trained = [] if found.trained is None else found.trained.tolist()
    columns: Columns = {
        "client": found.clients,
        **({"trained": ["yes" if one else "no" for one in trained]} if trained else {}),
        "predicted" if found.survival is None else "risk": found.predicted,
        **chances,
        **dict(zip((f"probability of {v}" for v in found.labels), found.shares.T, strict=False)),
    }
    for name in copied:
        if name in columns:
            raise InputError(
                "copied-column-clashes",
                f"--keep {name}: the predictions already have a column of that name.",
            )
    scored = found.scores()
    silent = as_json or quiet
    write_predictions(out, {name: found.copied[name] for name in copied} | {**columns}, silent)
    rows: list[dict[str, object]] = [
        {"by": row.by, "group": row.group, "rows": row.rows, **row.values} for row in scored
    ]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        write_file(out.with_suffix(".scores.csv"), csv_text(rows, names))
    if as_json:
        about = {"predictions": str(out), "model": found.model}
        print_json({**about, "remarks": list(found.remarks), "scores": rows})
    if silent:
        return
    if scored:
        _show_scores(terminal(), found, scored)
    say(terminal(errors=True), *found.remarks)
    click.echo(f"Predicted by the model “{found.model}”.")
    pair = promise(run)
    if pair is not None:
        click.echo(f"The model was trained with {pair} for every record.")


def _show_scores(console: Console, found: Predictions, rows: list[ScoreRow]) -> None:
    """Print a row per client, all rows together last."""
    known = {name for row in rows for name in row.values}
    shown = {name: one for name, one in found.task.columns.items() if one.screen and name in known}
    cells = [
        [row.group, whole(row.rows), *(own.written(row.values.get(n)) for n, own in shown.items())]
        for row in rows
    ]
    heads = ["client", "rows", *(own.title.replace(" ", "\n") for own in shown.values())]
    print_table(console, heads, cells, "the .scores.csv file")
    if len(found.labels) == 2 and any(own.label for own in shown.values()):
        label = brief(str(found.labels[1]), 16)
        say(console, f"Recall, precision, expected and true are of “{label}”.")


def write_predictions(out: Path, columns: Columns, quiet: bool = False) -> None:
    written = (
        own
        if isinstance(own, Sequence)
        else ["" if math.isnan(p) else f"{p:.6f}" for p in own.tolist()]
        for own in columns.values()
    )
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*written, strict=True)]
    write_file(out, csv_text(rows, [*columns]))
    if not quiet:
        click.echo(f"{several(len(rows), 'row')} written to {out}.")
