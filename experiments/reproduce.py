"""`python -m experiments.reproduce`: the paper's tables and figures, one command each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd import cli
from scaffpd.cli.typer_ext import add, completing, group, prepare
from scaffpd.errors import InputError, positive

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.image_plans import Plan
    from experiments.image_study import Place
    from experiments.image_study import Study as ImageStudy
    from experiments.synthetic_study import Study as SyntheticStudy

NAME = "python -m experiments.reproduce"
WIDEST = 100  # columns: longer lines of prose are hard to read
RHO_ALPHA = TRADEOFF_ALPHA = 0.01
TABLES = {
    "cifar100": "CIFAR-100, 20 clients, α = 0.01, 0.05 and 0.1: average and worst-20 % accuracy of eight methods.",
    "cifar10": "CIFAR-10, 20 clients, α = 0.05: average and worst-20 % accuracy of eight methods.",
    "tinyimagenet": "Tiny-ImageNet, 20 clients, α = 0.01, 0.05 and 0.1: the same for 200 classes.",
    "cifar100-50clients": "CIFAR-100, 50 clients, α = 0.01: average and worst-20 % accuracy of eight methods.",
}
option = typer.Option
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")]

app = group(
    f"Run the paper's experiments again.\n\nExamples:\n    {NAME} synthetic --quick --out synthetic\n"
)


def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for pictures and numbers.")] = Path(
        "results/synthetic"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Draws the data.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds; the numbers mean nothing.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="one per core")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Distance to the optimum against rounds: Scaff-PD, DRFA and others, tuned, on the paper's synthetic problem.

    Examples:
        python -m experiments.reproduce synthetic --quick --out synthetic
    """
    prepare(out)
    from experiments import (
        synthetic_figures,
        synthetic_problem,
        synthetic_study,
        synthetic_tables,
    )  # takes seconds
    from scaffpd.machine import cores

    plan = synthetic_problem.quick(seed) if quick else synthetic_problem.Plan(seed)
    command = f"{NAME} synthetic --seed {seed}{' --quick' if quick else ''}"
    done = synthetic_study.study(
        plan, processes or (1 if quick else cores()), False if quiet else None
    )
    written = [
        *synthetic_figures.draw(done, out, command),
        *synthetic_tables.save(done, out, f"{command} --out {out.as_posix()}"),
    ]
    if not quiet:
        _show_synthetic(done, written)


add(app, synthetic)


def _show_synthetic(study: SyntheticStudy, written: list[Path]) -> None:
    from experiments import synthetic_tables as tables

    console = _console()
    console.print("Rounds until ‖x − x*‖² ≤ 1e-6\n", style="bold")
    columns = ["\nmethod", *("\n".join(tables.heading(setting)) for setting in study.plan.settings)]
    _print_table(
        console, columns, [[name, *cells] for name, cells in tables.rows(study)], bold="Scaff-PD"
    )
    _section(console, "Verdict", *tables.verdict(study))
    _section(console, "Best at the edge of its grid", *tables.edges(study))
    _section(console, "Written", *map(str, written))


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _section(console: Console, title: str, *lines: str) -> None:
    """Print a heading and what stands under it; nothing where there is nothing."""
    if lines:
        console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(line, markup=False, width=min(console.width, WIDEST))


def _print_table(
    console: Console, columns: list[str], rows: list[list[str]], bold: str = "\0"
) -> None:
    """Rows that begin with `bold`, and cells between asterisks, are set in bold."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left", no_wrap=True)
    for cells in rows:
        shown = [f"[bold]{cell.strip('*')}[/]" if cell.startswith("**") else cell for cell in cells]
        table.add_row(*shown, style="bold" if cells[0].startswith(bold) else None)
    console.print(table)


@dataclass(frozen=True)
class Request:
    """What a command line on images asked for: where things are, `--small`, changes to the plan, `--quiet`."""

    place: Place
    small: bool
    changes: dict[str, Any]
    quiet: bool

    def plan(self, name: str) -> Plan:
        """The plan of that name with these changes."""
        from experiments import image_plans

        return replace(image_plans.plan(name, self.small), **self.changes)

    def command(self, name: str, out: Path) -> str:
        """The command line, without the folders that are this machine's."""
        options = [
            f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
            for key, value in self.changes.items()
        ]
        size = ["--small"] if self.small else []
        return " ".join([NAME, name, *size, *options, f"--out {shlex.quote(out.as_posix())}"])


def _request(
    data: Path | None, cache: Path, device: str, small: bool, quiet: bool, **changes: float | None
) -> Request:
    """Find the device; options that were left out change nothing."""
    from experiments.image_study import Place
    from scaffpd.features import extract

    chosen = extract.place(device)
    if chosen.type not in (
        "cpu",
        "cuda",
    ):  # others are known to PyTorch, and no number was ever computed there
        raise InputError(
            "unknown-device-choose", f"Unknown device {device!r}: choose 'auto', 'cpu' or 'cuda'."
        )
    place = Place(data, cache, str(chosen), False if quiet else None)
    return Request(
        place, small, {name: value for name, value in changes.items() if value is not None}, quiet
    )


Work = Callable[[Request, Path], list[Path]]


def _table(name: str) -> Work:
    def work(asked: Request, out: Path) -> list[Path]:
        from experiments import image_figures, image_study, image_tables

        done = image_study.study(asked.plan(name), asked.place, out)
        alpha = done.plan.alphas[0]
        here = done.ground
        path = out / f"partition-alpha-{alpha:g}.png"
        picture = image_figures.partition(here.cut(alpha), path, f"{here.where(alpha)}, thinned")
        if not asked.quiet:
            _show_images(done)
        return [*image_tables.save(done, out, asked.command(name, out)), picture]

    return work


def _show_images(study: ImageStudy) -> None:
    """One table for every α, and a verdict."""
    from experiments import image_tables as tables

    console = _console()
    plan = study.plan
    console.print(
        f"{study.ground.title}, {plan.clients} clients: test accuracy in %, mean ± standard deviation over "
        f"{plan.seeds} partitions, {plan.rounds} rounds\n",
        width=min(console.width, WIDEST),
    )
    columns = ["method", "average", "worst 20 %", "average (paper)", "worst 20 % (paper)"]
    for k, alpha in enumerate(study.plan.alphas):
        console.print(f"α = {alpha:g}\n", style="bold")
        _print_table(
            console, columns, [[row[0], *row[1 + 4 * k : 5 + 4 * k]] for row in tables.rows(study)]
        )
        console.print()
    _section(console, "Verdict", *tables.verdict(study))
    console.print(f"\n{tables.BACKBONE}.", width=min(console.width, WIDEST))


def _rho(asked: Request, out: Path) -> list[Path]:
    from experiments import image_curves as curves
    from experiments import image_figures, image_study
    from experiments.csv_files import write_csv

    here = image_study.ground(asked.plan("cifar100"), asked.place)
    found = curves.curves(here, RHO_ALPHA, asked.place, out)
    path = write_csv(out / "rho.csv", curves.COLUMNS, curves.lines(found))
    title = here.where(RHO_ALPHA)
    page = out / "README.md"
    hardware = image_study.hardware(asked.place.device)
    page.write_text(
        curves.curves_page(found, title, asked.command("rho", out), hardware), encoding="utf-8"
    )
    if not asked.quiet:
        _section(_console(), title, *curves.verdict(found))
    picture = image_figures.over_rounds(
        found, out / "rho.png", f"{title}; bands: {here.plan.seeds} partitions"
    )
    return [page, path, picture]


def _tradeoff(asked: Request, out: Path) -> list[Path]:
    from experiments import image_figures, image_study
    from experiments.csv_files import write_csv

    here = image_study.ground(asked.plan("tinyimagenet"), asked.place)
    beside = out.parent / "tinyimagenet"
    found = image_study.comparison(
        here, TRADEOFF_ALPHA, asked.place, beside if beside.is_dir() else out / "runs"
    )
    (out / "command.txt").write_text(f"{asked.command('tradeoff', out)}\n", encoding="utf-8")
    points = write_csv(out / "tradeoff.csv", image_figures.POINTS, image_figures.points(found))
    return [image_figures.tradeoff(found, out / "tradeoff.png", here.where(TRADEOFF_ALPHA)), points]


def _regulariser(asked: Request, out: Path) -> list[Path]:
    from experiments import image_plans, image_study
    from experiments.csv_files import write_csv

    rows: list[tuple[Any, ...]] = []
    for name, title in image_plans.TITLES.items():
        try:
            here = image_study.ground(asked.plan(name), asked.place)
        except InputError as error:
            typer.echo(f"{title} is left out: {error}", err=True)
            continue
        found = image_study.regularisers(here, asked.place.device)
        rows += [(name, f"{l2:.3g}", f"{accuracy:.4f}") for l2, accuracy in found.items()]
        if not asked.quiet:
            best = max(found, key=lambda l2: (found[l2], l2))
            typer.echo(f"{title}: l2 = {best:.2g}, {100 * found[best]:.1f} % of a held-out fifth.")
    (out / "command.txt").write_text(f"{asked.command('regulariser', out)}\n", encoding="utf-8")
    return [write_csv(out / "regulariser.csv", ("dataset", "l2", "accuracy"), rows)]


def _causes(asked: Request, out: Path) -> list[Path]:
    from experiments import image_curves as curves
    from experiments import image_study
    from experiments.csv_files import write_csv

    here = image_study.ground(asked.plan("tinyimagenet"), asked.place)
    found = curves.causes(here, TRADEOFF_ALPHA, asked.place)
    title = f"{here.where(TRADEOFF_ALPHA)}: what differences are due to"
    page = out / "README.md"
    text = curves.causes_page(
        found, title, asked.command("causes", out), image_study.hardware(asked.place.device)
    )
    page.write_text(text, encoding="utf-8")
    if not asked.quiet:
        typer.echo(text)
    return [
        page,
        write_csv(out / "causes.csv", curves.CAUSE_COLUMNS, curves.lines(found, with_l2=True)),
    ]


WORK: dict[str, tuple[str, Work]] = {
    name: (words, _table(name)) for name, words in TABLES.items()
} | {
    "rho": ("CIFAR-100: accuracy over rounds for ρ = 0.1, 0.2 and 0.5, with SCAFFOLD.", _rho),
    "tradeoff": (
        "Tiny-ImageNet: worst-20 % against average and best-20 % accuracy, all methods.",
        _tradeoff,
    ),
    "causes": ("Tiny-ImageNet: what the differences between methods are due to.", _causes),
    "regulariser": (
        "All data sets: which l2 a held-out fifth of the training images would choose.",
        _regulariser,
    ),
}


def _all(asked: Request, out: Path) -> list[Path]:
    written = []
    for name, (_, work) in WORK.items():
        prepare(out / name)
        written += work(asked, out / name)
    return written


def _register(name: str, words: str, work: Work, folder: str) -> None:
    """Add one command with the options that all of them have."""

    def command(
        data: Annotated[
            Path | None, option(help="Folder of images and weights.", show_default="SCAFFPD_DATA")
        ] = None,
        out: Annotated[
            Path, option(help="Folder for results; there, the same command continues.")
        ] = (Path("results") / folder),
        cache: Annotated[Path, option(help="Folder for features.")] = Path("features"),
        device: Annotated[
            str,
            option(
                help="cpu, cuda, or auto: a GPU if there is one.",
                autocompletion=completing("auto", "cpu", "cuda"),
            ),
        ] = "auto",
        small: Annotated[
            bool,
            option("--small", help="Minutes on two processor cores; few images and coordinates."),
        ] = False,
        seeds: Annotated[
            int | None, option(min=1, help="Partitions.", show_default="3; small 2")
        ] = None,
        rounds: Annotated[
            int | None, option(min=1, help="Rounds of every run.", show_default="100; small 30")
        ] = None,
        local_steps: Annotated[
            int | None, option(min=1, help="Local steps a round.", show_default="10")
        ] = None,
        tune: Annotated[
            int | None, option(min=1, help="Configurations a method.", show_default="9; small 3")
        ] = None,
        coordinates: Annotated[
            int | None, option(min=1, help="eNTK coordinates.", show_default="50000; small 4000")
        ] = None,
        size: Annotated[
            int | None, option(min=16, help="Pixels.", show_default="224; small 64")
        ] = None,
        train_per_class: Annotated[
            int | None,
            option(min=2, help="Training images a class.", show_default="all; small few"),
        ] = None,
        l2: Annotated[
            float | None, option(help="l2 > 0 of the regulariser.", show_default="3e-5; small 1e-3")
        ] = None,
        balanced: Annotated[
            bool, option("--balanced", help="Deal classes as in the code of Li et al. (2022).")
        ] = False,
        climb: Annotated[
            bool,
            option("--climb", help="Follow the best rates beyond the grid, with twice the budget."),
        ] = False,
        quiet: Quiet = False,
    ) -> None:
        asked = _request(
            data,
            cache,
            device,
            small,
            quiet,
            seeds=seeds,
            rounds=rounds,
            local_steps=local_steps,
            tune=tune,
            coordinates=coordinates,
            size=size,
            train_per_class=train_per_class,
            climb=climb or None,
            l2=None if l2 is None else positive("reproduce", "--l2", l2),
            balanced=balanced or None,
        )
        prepare(out)
        written = work(asked, out)
        if not quiet:
            _section(_console(), "Written", *map(str, written))

    command.__doc__ = f"{words}\n\nExamples:\n    {NAME} {name} --small --data ~/data\n"
    add(app, command, name)


for _name, (_words, _work) in WORK.items():
    _register(_name, _words, _work, _name)
_register("all", "All tables and figures on images, each in a folder of its own.", _all, "")


def run(arguments: list[str]) -> int:
    """Carry out a command line and return its exit code, as `scaffpd` does."""
    return cli.run(arguments, app, NAME)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
