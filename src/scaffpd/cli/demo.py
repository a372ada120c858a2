"""`scaffpd demo`: twelve stations with and without the others, or four hospitals with an average and a fair model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from scaffpd.cli.screens import WIDEST, plain_table, section
from scaffpd.cli.typer_ext import Quiet, prepare
from scaffpd.errors import InputError, positive

if TYPE_CHECKING:
    from rich.progress import Progress

    from scaffpd.demo import HospitalStudy, PairedChange

AIR = (
    "Beijing air quality (UCI): twelve stations predict the fine dust of a day from its weather. Eight have three "
    "years of days, four are new and have forty. They train alone, with one average model, with one fair model (the "
    "worst fifth counts), and with personal, fair models: a shared one that every station makes its own. Tested on the "
    "following year, on {draws} draws of which stations are new."
)
INTRODUCTION = (
    "Heart disease (UCI): Cleveland, Hungary, Switzerland and Long Beach keep their patients to themselves "
    "and train one logistic model, once for the average hospital and once fairly (χ² penalty, ρ = {rho:g}: who "
    "is served worse counts more), on {splits} random splits into patients to train on (70 %) and patients "
    "held out (30 %)."
)
LEGEND = (
    "Accuracy in % and log-loss on held-out patients, mean over {splits} splits, changes ± standard "
    "deviation; mean and worst are over the hospitals of each split. Log-loss is −log of the probability "
    "given to the truth: 0 is best, 0.69 a coin flip. * marks a change that is clear of noise (t-test at "
    "95 %, corrected for splits that share patients); all others are within noise."
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report, picture and tables.")] = Path("scaffpd-demo"),
    rho: Annotated[
        float | None, typer.Option(help="ρ > 0 of the hospitals' fair model: small is fair.", show_default="0.1")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses new stations and days, or patients held out.")] = 0,
    splits: Annotated[
        int | None,
        typer.Option(min=2, help="How many draws or splits to average over.", show_default="8; 20 of hospitals"),
    ] = None,
    hospitals: Annotated[
        bool, typer.Option("--hospitals", help="Four hospitals, one model: the average way and the fair way.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Twelve stations, four of them new: alone, one model for all, or models of their own, in less than a minute.

    Examples:
        scaffpd demo
        scaffpd demo --splits 2 --seed 1 --out other-stations
        scaffpd demo --hospitals --splits 2 --rho 0.3 --out fairer
    """
    if rho is not None:
        positive("demo", "--rho", rho)
        if not hospitals:
            raise InputError("--rho goes with --hospitals: the stations' fair model has CVaR(alpha=0.2).")
    prepare(out)
    console = Console(quiet=quiet, highlight=False)
    if hospitals:
        _hospitals(console, out, 0.1 if rho is None else rho, seed, splits or 20, quiet)
    else:
        _stations(console, out, seed, splits or 8, quiet)


def _stations(console: Console, out: Path, seed: int, draws: int, quiet: bool) -> None:
    section(console, None, AIR.format(draws=draws))
    from scaffpd import demo as studies  # seconds, so not before words
    from scaffpd.cli.results import show
    from scaffpd.report import available, write, write_picture

    with _progress(quiet) as progress:
        task = progress.add_task("training", total=draws)
        study = studies.stations(seed, draws, lambda done: progress.update(task, completed=done))
    command = f"scaffpd demo --seed {seed} --splits {draws} --out {shlex.quote(out.as_posix())}"
    written, sorry = studies.write_stations(study, out, command), available()
    pages = [write(out), write_picture(out, "joining", out / "demo.png")] if sorry is None else []
    if not quiet:
        show(out)
    shown = [str(page) for page in pages] if sorry is None else [f"No report: {sorry}"]
    section(console, "Written", *shown, f"and {len(written)} tables in {out}")


def _hospitals(console: Console, out: Path, rho: float, seed: int, splits: int, quiet: bool) -> None:
    section(console, "Four hospitals, one model", INTRODUCTION.format(splits=splits, rho=rho))
    from scaffpd import demo as hospitals  # seconds, so not before words
    from scaffpd.report import available, write, write_picture

    with _progress(quiet) as progress:
        task = progress.add_task("training", total=splits)
        study = hospitals.study(rho, seed, splits, progress=lambda done: progress.update(task, completed=done))
    command = (
        f"scaffpd demo --hospitals --rho {rho:g} --seed {seed} --splits {splits} --out {shlex.quote(out.as_posix())}"
    )
    written = hospitals.write(study, out, command)
    sorry = available()
    pages = [write(out), write_picture(out, "clients", out / "demo.png")] if sorry is None else []
    shown = [str(page) for page in pages] if sorry is None else [f"No report: {sorry}"]
    _show(console, study, shown, len(written), out)


def _progress(quiet: bool) -> Progress:
    from rich import progress

    console = Console(stderr=True)
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    return progress.Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def _show(console: Console, study: HospitalStudy, pages: list[str], tables: int, out: Path) -> None:
    from scaffpd import demo as words

    console.print()
    console.print(_table(study, gap=0 if console.width < WIDEST else 2))
    section(console, None, LEGEND.format(splits=len(study.seeds)), words.baseline(study) or "")
    section(console, "Verdict", *words.findings(study))
    section(console, "Proven", study.method, *words.certificates(study))
    section(console, "Written", *pages, f"and {tables} tables in {out}")


def _table(study: HospitalStudy, gap: int) -> Table:
    table = plain_table(
        *("\nhospital", "patients\n(ill)", "accuracy\naverage", "\nfair", "\nchange "),
        *("log-loss\naverage", "\nfair", "\nchange "),
        gap=gap,
    )
    for i in study.order:
        about = (study.names[i], f"{study.patients[i]} ({round(study.patients[i] * study.ill[i])})")
        table.add_row(*about, *_cells(study.accuracy, i, True), *_cells(study.log_loss, i, False))
    table.add_section()
    for i, name in enumerate(("mean", "worst")):
        table.add_row(name, "", *_cells(study.overall_accuracy, i, True), *_cells(study.overall_log_loss, i, False))
    return table


def _cells(of: PairedChange, i: int, points: bool) -> tuple[str, str, str]:
    """Average, fair, and the change: green or red where it is clear of noise."""
    from scaffpd import demo as words

    average, fair = (100 * m[:, i].mean() if points else m[:, i].mean() for m in (of.average, of.fair))
    better = (of.mean_change[i] > 0) == points
    text = words.change(of, i, points) + ("*" if of.clear[i] else " ")
    style = "dim" if not of.clear[i] else "green" if better else "red"
    digits = 1 if points else 3
    return f"{average:.{digits}f}", f"{fair:.{digits}f}", f"[{style}]{text}[/{style}]"
