"""`scaffpd report` and `scaffpd predict`, and what the terminal shows of a run that has ended."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
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
from scaffpd.numbers import format_bytes, measured, plain, several, whole

if TYPE_CHECKING:
    from scaffpd.run.record import JoiningRecord, ModelRecord, RunRecord, ScoreRow

NUMBERS = 52  # columns that losses of five models and the gain take
FORMATS = ("html", "png", "svg")


def end(runs: Sequence[Path], base: Path | None, report: bool, quiet: bool, as_json: bool) -> None:
    """Write the page, one for several runs in a folder `base`, and show the result."""
    from scaffpd.run.page import available, write

    folder = base if base is not None and len(runs) > 1 else runs[0]
    sorry = available() if report else None
    page = write(folder) if report and sorry is None else None
    if as_json:
        print_json(as_values(*runs) | {"folder": str(folder), "report": page and str(page)})
    elif not quiet:
        show(*runs)
        typer.echo(f"\nRun:    {folder}")
        if page is not None or sorry is not None:
            typer.echo(f"Report: {page}" if page is not None else f"No report: {sorry}")


def show(*folders: Path) -> None:
    """Show who is served how, the verdict, and what is proven; several runs side by side."""
    from scaffpd.run.page import opened
    from scaffpd.run.page.tables import in_short
    from scaffpd.run.page.verdict import cautions, one_for_all, promise, verdict

    console = Console(highlight=False)
    run = opened(folders)
    console.print(f"\n{run.title}", style="bold", markup=False)
    if len(folders) > 1:
        console.print(_runs(run, console.width))
        say(console, *verdict(run), *run.remarks)
        return
    if run.joining is not None:
        console.print(_joining(run.joining, run.word, console.width))
        say(
            console,
            run.joining.sentence,
            run.joining.details,
            f"Intervals: {run.joining.interval}.",
        )
        console.print()
    console.print(_clients(run, console.width))
    told = [] if run.joining is not None and run.verdict else one_for_all(run)
    say(console, *told, in_short(run), *cautions(run))
    console.print()
    if run.privacy is not None:
        say(console, promise(run.privacy))
    if run.path:
        console.print(_points(run))
        say(console, f"Suggested: {run.path.why}" if run.pair else "")
        say(console, f"{len(run.models)} models in {run.path.rounds} rounds.")
    else:
        say(console, *map(_proof, run.models))
    if any(model.certificate is not None and not model.vacuous for model in run.models):
        say(
            console,
            "Certified gap: no model of this kind has an objective that is smaller "
            "by more than this.",
        )


def as_values(*folders: Path) -> dict[str, Any]:
    """Return a run, or several together and each by itself, for `--json`."""
    from scaffpd.run.page import opened
    from scaffpd.run.page.verdict import answers, cautions, verdict

    shown = opened(folders)
    found = shown.model_dump(mode="json")
    found |= {
        "verdict": verdict(shown),
        "cautions": cautions(shown),
        "answers": answers(shown),
    }
    if len(folders) > 1:
        alone = {folder.name: as_values(folder) for folder in folders}
        return found | {"runs": alone}
    return found | {"folder": str(folders[0]), "report": None}


def _runs(run: RunRecord, width: int) -> Table:
    """Make a table with a row per run: mean, worst fifth and worst."""
    table = plain_table("run", "mean", "worst fifth", "worst", "served worst", gap=1)
    rows = []
    for model in run.models:
        if model.overall is not None:
            one = model.overall
            values = [measured(v, run.measure) for v in (one.mean, one.worst_20, one.worst)]
            rows.append([model.name, *values, one.worst_client])
    fill(table, rows, width)
    return table


def _clients(run: RunRecord, width: int) -> Table:
    """Make a table with a row per client, the one that gains most first."""
    from scaffpd.run.page.tables import client_lines, shown_models

    names = [model.name for model in shown_models(run)]
    shown = [names.index(model.name) for model in run.pair or [run.main]] if names else []
    what = f"{'held-out' if run.split == 'test' else 'training'} {run.measure}"
    heads = [what]
    if run.pair:
        heads = [f"{what}\n{run.pair[0].name}", f"\n{run.pair[1].name}", "\nchange"]
    first = "\n" * bool(run.pair) + run.word
    table = plain_table(
        first, "trained on,\nheld out", *heads, "weight\nλ", gap=0 if width < WIDEST else 2
    )
    rows: list[tuple[float, list[str | Text]]] = []
    for line in client_lines(run) if names else ():
        score = line.score
        cells: list[str | Text] = [line.values[k].text for k in shown]
        better = -(line.values[shown[0]].value or 0.0)
        if run.pair:
            better = line.change.value or 0.0
            style = {"gain": "green", "loss": "red"}.get(line.change.tone, "dim")
            cells.append(Text(line.change.text, style=style))
        weight = "" if score.weight is None else f"{score.weight:.3f}"
        name = f"{score.client}{' †' if line.few else ''}"
        row = [name, f"{score.train_rows}, {score.test_rows}", *cells, weight]
        rows.append((-run.sign * better, row))
    rows.sort(key=lambda row: row[0])
    fill(table, [line for _, line in rows], width, "clients.csv")
    return table


def _joining(found: JoiningRecord, word: str, width: int) -> Table:
    """Make a table with a row per client: its held-out loss under every model, and its gain.

    Where long names would be cut, the constant answer is left to joining.csv.
    """
    narrow = width < WIDEST
    long = max(map(len, found.by_client), default=0) > width - NUMBERS
    models = [model for model in found.models if not (narrow and long and model == "constant")]
    last = (f"gain of\n{found.shown}", "does it\npay?")
    table = plain_table(
        f"held-out loss\n{word}", *(f"\n{m}" for m in models), *last, gap=0 if narrow else 2
    )
    rows: list[list[str | Text]] = []
    styles = {"yes": "green", "no": "red"}
    for client in found.order:
        gain = found.gain(client)
        losses = [plain(found.by_client[client][model].test_loss) for model in models]
        share = f"{100 * gain.value:+.1f} %".replace("-", "−")
        pays = Text(gain.pays.removeprefix("within "), style=styles.get(gain.pays, "dim"))
        rows.append([client, *losses, share, pays])
    fill(table, rows, width, "joining.csv")
    return table


def _points(run: RunRecord) -> Table:
    """Make a table with a row per point of a path, the suggested one in bold."""
    table = plain_table("point", "mean", "worst 20 %", "rounds", "certified gap")
    for model in run.models:
        one = model.overall
        scores = [measured(v, run.measure) for v in (one.mean, one.worst_20)] if one else ["", ""]
        gap = "none" if model.certificate is None else f"{model.certificate:.1e}"
        style = "bold" if run.path and model.name == run.path.knee else None
        table.add_row(model.name, *scores, f"{model.rounds:.0f}", gap, style=style)
    return table


def _proof(model: ModelRecord) -> str:
    gap = model.certificate
    proven = "nothing is certified" if gap is None else f"certified gap {gap:.1e}"
    if model.vacuous:
        proven += f", which says nothing: the objective itself is {model.value:.2g}"
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

    Several runs on the same clients are put side by side on one page.

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
    found = answer(run, table, model, [*copied, *(name for name in cut if name not in copied)])
    if cut and found.truth is None:
        raise InputError(
            "groups-scores-rows",
            f"--groups scores rows, and {table.name!r} has no target to score by.",
        )
    columns: dict[str, Any] = {name: found.copied[name] for name in copied}
    for name in ("client", "predicted", "probability"):
        if name in columns:
            raise InputError(
                "copied-column-clashes",
                f"--keep {name}: the predictions have a column of that name; "
                "rename it in the table.",
            )
    columns |= {
        "client": found.clients,
        "predicted": found.predicted,
        "probability": found.probability,
    }
    scored = {by: found.scores(by) for by in ("client", *cut)} if found.truth else {}
    write_predictions(out, columns, quiet=as_json)
    rows: list[dict[str, Any]] = [
        {"by": row.by, "group": row.group, "rows": row.rows, **row.values}
        for own in scored.values()
        for row in own
    ]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        write_file(out.with_suffix(".scores.csv"), csv_text(rows, names))
    if as_json:
        print_json({"predictions": str(out), "remarks": list(found.remarks), "scores": rows})
        return
    for by, own in scored.items():
        Console(highlight=False).print(_scores(by, own))
    say(Console(highlight=False, stderr=True), *found.remarks)
    if (pair := promise(run)) is not None:
        typer.echo(f"The model was trained with {pair} for every record.")


HEADS = (  # what the terminal shows of the scores
    "accuracy",
    "auc",
    "recall",
    "precision",
    "false_positive_rate",
    "mean_probability",
    "base_rate",
    "rmse",
    "mae",
    "r2",
)


def _scores(by: str, rows: list[ScoreRow]) -> Table:
    """Make a table with a row per group, all rows together last."""
    from scaffpd.run.page.tables import COLUMNS, written

    shown = [name for name in HEADS if any(name in row.values for row in rows)]
    heads = [COLUMNS[name].replace(" ", "\n") for name in shown]
    table = plain_table(by, "rows", *heads, gap=1)
    for row in rows if len(rows) <= MOST else [*rows[: MOST - 1], rows[-1]]:
        cells = [written(name, row.values.get(name)) for name in shown]
        table.add_row(Text(row.group), whole(row.rows), *cells)
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
