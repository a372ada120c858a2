"""`scaffpd report` and `scaffpd predict`, and what the terminal shows of a run that has ended."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd.cli.screens import plain_table
from scaffpd.errors import InputError, unknown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


WIDEST, MOST = 100, 30  # columns of prose, and clients in a table


def end(folder: Path, report: bool, quiet: bool, as_json: bool) -> None:
    """Write the report, and show the result to whoever wants to see it."""
    from scaffpd.cli.typer_ext import print_json
    from scaffpd.report import available, write

    sorry = available() if report else None
    page = write(folder) if report and sorry is None else None
    if as_json:
        print_json(as_values(folder, page))
    elif not quiet:
        show(folder)
        typer.echo(f"\nRun:    {folder}")
        if page is not None or sorry is not None:
            typer.echo(f"Report: {page}" if page is not None else f"No report: {sorry}")


def show(folder: Path) -> None:
    """Who is served how, the verdict, and what is proven."""
    from rich.console import Console

    from scaffpd.report.reading import read
    from scaffpd.report.verdict import cautions, optimised, verdict

    console, summary, story = Console(highlight=False), values(folder), read(folder)
    console.print()
    console.print(summary["title"], style="bold", markup=False)
    console.print(_clients(summary, rows(folder / "clients.csv")))
    for sentence in (*verdict(story), *cautions(story)):
        _say(console, sentence)
    if (loss := optimised(story)) is not None:
        moved = f"from {loss.before:.3f} to {loss.after:.3f}"
        _say(console, f"What was optimised, their loss on training rows, goes {moved}.")
    console.print()
    if story.privacy is not None:
        _say(console, story.privacy.sentence)
    if summary["path"]:
        console.print(_points(summary, rows(folder / "path.csv")))
        _say(console, f"Suggested: {summary['path']['why']}")
        _say(console, _cheaper(summary["path"], len(summary["models"])))
    else:
        for model in summary["models"]:
            _say(console, _proof(model))
    if summary["models"][-1]["certificate"] is not None:
        _say(console, "Certified gap: no model of this kind has an objective that is smaller by more than this.")


def values(folder: Path) -> dict[str, Any]:
    """The summary of a run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def as_values(folder: Path, page: Path | None) -> dict[str, Any]:
    """The summary, the clients and the folder, for `--json`."""
    from scaffpd.report.reading import read
    from scaffpd.report.verdict import cautions, verdict

    story = read(folder)
    return values(folder) | {
        "verdict": list(verdict(story)), "cautions": list(cautions(story)), "folder": str(folder),
        "report": None if page is None else str(page), "clients": rows(folder / "clients.csv"),
    }  # fmt: skip


def rows(file: Path) -> list[dict[str, Any]]:
    """A table of a run's folder, with its numbers as numbers."""
    with file.open(newline="", encoding="utf-8") as handle:
        return [
            {key: value if key in ("model", "client", "label") else _number(value) for key, value in row.items()}
            for row in csv.DictReader(handle)
        ]


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return None if text == "" else float(text) if any(c in text for c in ".en") else int(text)


def _clients(summary: dict[str, Any], clients: list[dict[str, Any]]) -> Table:
    """A row per client, the one that gains most first."""
    from rich.text import Text

    from scaffpd.report.data import FEW
    from scaffpd.report.formats import change, measured

    measure, held = summary["measure"], summary["split"] == "test"
    score, sign = f"{summary['split']}_{measure}", 1 if measure == "accuracy" else -1
    before, after = _shown(summary)
    at = {(row["model"], row["client"]): row for row in clients}
    gain = {n: sign * (row[score] - at[before, n][score]) for (m, n), row in at.items() if m == after}
    two, what = before != after, f"{'held-out ' if held else 'training '}{measure}"
    scores = [f"{what}\n{before}", f"\n{after}", "\nchange"] if two else [what]
    lines = "\n" if two else ""
    table = plain_table(f"{lines}{summary['clients_word']}", "trained on,\nheld out", *scores, "weight\nλ")
    order = sorted(gain, key=lambda n: (-gain[n], sign * at[after, n][score]))
    for name in order if len(order) <= MOST else [*order[: MOST // 2], *order[-MOST // 2 :]]:
        row = at[after, name]
        cells: list[str | Text] = [measured(row[score], measure)]
        if two:
            sure = "*" if row.get("change_clear") else ""
            moved = Text(f"{change(sign * gain[name], measure)}{sure}", style=_style(gain[name]))
            cells = [measured(at[before, name][score], measure), *cells, moved]
        few = " †" if held and row["test_rows"] < FEW else ""
        table.add_row(Text(f"{name}{few}"), f"{row['train_rows']}, {row['test_rows']}", *cells, f"{row['weight']:.3f}")
    if len(order) > MOST:
        table.caption = f"the first and last {MOST // 2} of {len(order)}; all are in clients.csv"
    return table


def _points(summary: dict[str, Any], points: list[dict[str, Any]]) -> Table:
    """A row per point of a path, the suggested one marked."""
    from scaffpd.report.formats import measured

    table, measure = plain_table("point", "mean", "worst 20 %", "rounds", "certified gap"), summary["measure"]
    for row in points:
        scores = [measured(row[f"{name}_{measure}"], measure) for name in ("mean", "worst_20")]
        gap = "none" if row["certificate"] is None else f"{row['certificate']:.1e}"
        style = "bold" if row["model"] == summary["path"]["knee"] else None
        table.add_row(row["model"], *scores, str(row["rounds"]), gap, style=style)
    return table


def _shown(summary: dict[str, Any]) -> tuple[str, str]:
    """The models to compare: before and after, or the same one twice."""
    roles = {model["role"]: model["name"] for model in summary["models"]}
    after = roles.get("after") or roles.get("before") or summary["models"][-1]["name"]
    return roles.get("before", after), after


def _style(gain: float) -> str:
    return "dim" if abs(gain) < 5e-4 else "green" if gain > 0 else "red"


def _proof(model: dict[str, Any]) -> str:
    gap = model["certificate"]
    proven = "nothing is certified" if gap is None else f"certified gap {gap:.1e}"
    goal = "" if model["objective"] is None else f" ({model['objective']})"
    rounds = f"{model['rounds']} round{'' if model['rounds'] == 1 else 's'}"
    sent = model["bytes_up"] + model["bytes_down"]
    size = f"{sent / 1e6:.1f} MB" if sent >= 1e6 else f"{sent / 1e3:.0f} kB"
    return f"{model['name']}{goal}: {model['status']} after {rounds}, {proven}, {size} of messages"


def _cheaper(path: dict[str, Any], points: int) -> str:
    warm, cold = path["rounds_warm"], path["rounds_cold"]
    alone = "" if cold is None else f"; each alone, {cold}: {cold / warm:.1f} times as many"
    return f"{points} models in {warm} rounds{alone}."


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, width=min(console.width, WIDEST))


FORMATS = ("html", "png", "svg")


def report(
    run: Annotated[Path, typer.Argument(help="Folder that train, path, demo, compare or deploy wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="File of the page, or folder of the pictures.", show_default="in RUN")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="html: one page; png, svg: a picture per figure.")] = "html",
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """One page that opens offline: the verdict, who gains and who pays, what it cost, how to do it again.

    Examples:
        scaffpd report runs/patients
        scaffpd report runs/patients --format svg --out figures
    """
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    from scaffpd import report as reports  # seconds, so not for --help

    written = [reports.write(run, out)] if form == "html" else list(reports.write_figures(run, form, out))
    for path in written:
        typer.echo(str(path))
    if show and typer.launch(written[0].resolve().as_uri()) != 0:
        typer.echo("No browser could be opened: open the file yourself.", err=True)


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or its model.safetensors.", show_default=False)],
    table: Annotated[Path, typer.Argument(help="Rows with the same columns: CSV or Parquet.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path("predictions.csv"),
) -> None:
    """Apply a trained model to new rows, in their order.

    Missing values are filled as in training, for new clients from the rows at hand; no target column is needed.

    Examples:
        scaffpd predict runs/patients new-patients.csv
    """
    import csv
    import io

    from scaffpd.checkpoint import atomic_write
    from scaffpd.runs.predict import predict as answer
    from scaffpd.runs.predict import promise

    if out.resolve() == table.resolve():
        raise InputError(f"{str(out)!r} is the table itself: choose another file with --out.")
    found, text = answer(run, table), io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["client", "predicted", "probability"])
    probability = ["" if p != p else f"{p:.6f}" for p in found.probability]
    writer.writerows(zip(found.clients, found.predicted, probability, strict=True))
    try:
        with atomic_write(out) as file:
            file.write(text.getvalue().encode())
    except OSError as error:
        raise InputError(f"Cannot write {str(out)!r}: {error.strerror}.") from None
    typer.echo(f"{len(found.predicted)} rows written to {out}.")
    if (pair := promise(run)) is not None:
        typer.echo(f"The model was trained with {pair} for every record.")
