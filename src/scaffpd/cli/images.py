"""`scaffpd reproduce cifar100` and its like: the paper's tables and figures on images, one command each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from scaffpd.cli.images_request import (
    L2,
    Balanced,
    Cache,
    Climb,
    Coordinates,
    Data,
    Device,
    Out,
    PerClass,
    Quiet,
    Request,
    Rounds,
    Seeds,
    Size,
    Small,
    Steps,
    Tune,
    request,
)
from scaffpd.cli.images_screen import show
from scaffpd.cli.reproduce import reproduce as reproduce
from scaffpd.cli.reproduce import section
from scaffpd.cli.typer_ext import add, prepare
from scaffpd.errors import InputError, positive

TABLES = {
    "cifar100": "CIFAR-100, 20 clients, α = 0.01, 0.05 and 0.1: average and worst-20 % accuracy of eight methods.",
    "cifar10": "CIFAR-10, 20 clients, α = 0.05: average and worst-20 % accuracy of eight methods.",
    "tinyimagenet": "Tiny-ImageNet, 20 clients, α = 0.01, 0.05 and 0.1: the same for 200 classes.",
    "cifar100-50clients": "CIFAR-100, 50 clients, α = 0.01: average and worst-20 % accuracy of eight methods.",
}
RHO_ALPHA = TRADEOFF_ALPHA = 0.01

Work = Callable[[Request, Path], list[Path]]


def _register(name: str, words: str, work: Work, folder: str) -> None:
    """One command with the options that all of them have."""

    def command(
        data: Data = None,
        out: Out = Path("results") / folder,
        cache: Cache = Path("features"),
        device: Device = "auto",
        small: Small = False,
        seeds: Seeds = None,
        rounds: Rounds = None,
        local_steps: Steps = None,
        tune: Tune = None,
        coordinates: Coordinates = None,
        size: Size = None,
        train_per_class: PerClass = None,
        l2: L2 = None,
        balanced: Balanced = False,
        climb: Climb = False,
        quiet: Quiet = False,
    ) -> None:
        asked = request(
            data, cache, device, small, quiet, seeds=seeds, rounds=rounds, local_steps=local_steps, tune=tune,
            coordinates=coordinates, size=size, train_per_class=train_per_class, climb=climb or None,
            l2=None if l2 is None else positive("reproduce", "--l2", l2), balanced=balanced or None,
        )  # fmt: skip
        prepare(out)
        written = work(asked, out)
        if not quiet:
            from rich.console import Console

            section(Console(highlight=False), "Written", *map(str, written))

    command.__doc__ = f"{words}\n\nExamples:\n    scaffpd reproduce {name} --small --data ~/data\n"
    add(reproduce, command, name)


def _table(name: str) -> Work:
    def work(asked: Request, out: Path) -> list[Path]:
        from scaffpd.experiments.images import figures, files
        from scaffpd.experiments.images import study as runs

        done = runs.study(asked.plan(name), asked.place, out)
        alpha = done.plan.alphas[0]
        title = f"{done.ground.title}, {done.plan.clients} clients, Dirichlet({alpha:g}), thinned"
        picture = figures.partition(done.ground.cut(alpha), out / f"partition-alpha-{alpha:g}.png", title)
        if not asked.quiet:
            show(done)
        return [*files.save(done, out, asked.command(name, out)), picture]

    return work


def _rho(asked: Request, out: Path) -> list[Path]:
    from scaffpd.experiments.images import curves, figures
    from scaffpd.experiments.images import study as runs
    from scaffpd.experiments.writing import csv_file

    here = runs.ground(asked.plan("cifar100"), asked.place)
    found = curves.curves(here, RHO_ALPHA, asked.place, out)
    path = csv_file(out / "rho.csv", curves.COLUMNS, curves.lines(found))
    title, page = f"CIFAR-100, {here.plan.clients} clients, Dirichlet({RHO_ALPHA:g})", out / "README.md"
    hardware = runs.hardware(asked.place.device)
    page.write_text(curves.markdown(found, title, asked.command("rho", out), hardware), encoding="utf-8")
    if not asked.quiet:
        from rich.console import Console

        section(Console(highlight=False), title, *curves.verdict(found))
    picture = figures.over_rounds(found, out / "rho.png", f"{title}; bands: {here.plan.seeds} partitions")
    return [page, path, picture]


def _tradeoff(asked: Request, out: Path) -> list[Path]:
    from scaffpd.experiments.images import figures
    from scaffpd.experiments.images import study as runs
    from scaffpd.experiments.writing import csv_file

    here, study = runs.ground(asked.plan("tinyimagenet"), asked.place), out.parent / "tinyimagenet"
    found = runs.comparison(here, TRADEOFF_ALPHA, asked.place, study if study.is_dir() else out / "runs")
    (out / "command.txt").write_text(f"{asked.command('tradeoff', out)}\n", encoding="utf-8")
    title = f"Tiny-ImageNet, {here.plan.clients} clients, Dirichlet({TRADEOFF_ALPHA:g})"
    points = csv_file(out / "tradeoff.csv", figures.POINTS, figures.points(found))
    return [figures.tradeoff(found, out / "tradeoff.png", title), points]


def _regulariser(asked: Request, out: Path) -> list[Path]:
    from scaffpd.experiments.images import regulariser
    from scaffpd.experiments.images import study as runs
    from scaffpd.experiments.writing import csv_file

    lines: list[tuple[Any, ...]] = []
    for name in ("cifar10", "cifar100", "tinyimagenet"):
        try:
            here = runs.ground(asked.plan(name), asked.place)
        except InputError as error:
            typer.echo(f"{runs.TITLES[name]} is left out: {error}", err=True)
            continue
        found = regulariser.choices(here, asked.place.device)
        lines += [(name, f"{choice.l2:.3g}", f"{choice.accuracy:.4f}") for choice in found]
        if not asked.quiet:
            choice = regulariser.best(found)
            typer.echo(f"{runs.TITLES[name]}: l2 = {choice.l2:.2g}, {100 * choice.accuracy:.1f} % of a held-out fifth.")
    (out / "command.txt").write_text(f"{asked.command('regulariser', out)}\n", encoding="utf-8")
    return [csv_file(out / "regulariser.csv", ("dataset", "l2", "accuracy"), lines)]


def _causes(asked: Request, out: Path) -> list[Path]:
    from scaffpd.experiments.images import causes
    from scaffpd.experiments.images import study as runs
    from scaffpd.experiments.writing import csv_file

    here = runs.ground(asked.plan("tinyimagenet"), asked.place)
    found = causes.causes(here, TRADEOFF_ALPHA, asked.place)
    title = f"Tiny-ImageNet, {here.plan.clients} clients, Dirichlet({TRADEOFF_ALPHA:g}): what differences are due to"
    page, command = out / "README.md", asked.command("causes", out)
    text = causes.markdown(found, title, command, runs.hardware(asked.place.device))
    page.write_text(text, encoding="utf-8")
    if not asked.quiet:
        typer.echo(text)
    return [page, csv_file(out / "causes.csv", causes.COLUMNS, causes.lines(found))]


WORK: dict[str, tuple[str, Work]] = {name: (words, _table(name)) for name, words in TABLES.items()} | {
    "rho": ("CIFAR-100: accuracy over rounds for ρ = 0.1, 0.2 and 0.5, with SCAFFOLD.", _rho),
    "tradeoff": ("Tiny-ImageNet: worst-20 % against average and best-20 % accuracy, all methods.", _tradeoff),
    "causes": ("Tiny-ImageNet: what the differences between methods are due to.", _causes),
    "regulariser": ("All data sets: which l2 a held-out fifth of the training images would choose.", _regulariser),
}


def _all(asked: Request, out: Path) -> list[Path]:
    written = []
    for name, (_, work) in WORK.items():
        prepare(out / name)
        written += work(asked, out / name)
    return written


for _name, (_words, _work) in WORK.items():
    _register(_name, _words, _work, _name)
_register("all", "All tables and figures on images, each in a folder of its own.", _all, "")
