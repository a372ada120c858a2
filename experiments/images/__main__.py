"""`python -m experiments.images`: the paper's tables and figures on images, and ours; each command
has --help.

    cifar100, cifar10, tinyimagenet, cifar100-50clients    accuracies of eight methods
    rho, tradeoff, causes, regulariser    figures beside them, and what differences are due to
    all                                   all of these, each in a folder of its own
    decisive                              tables that decide between methods
    tct                                   train, convexify, train, from random weights

Nothing is written into results/ unless --out says so, and with --small never.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.images import curves, decisive, figures, plans, study, tables, tct
from experiments.images.features import place as device_of
from experiments.tables import check_small, write_csv

NAME = "python -m experiments.images"
ALPHA = 0.01  # of `rho`, `tradeoff` and `causes`


@dataclass(frozen=True)
class Request:
    """What a command line asked for: where things are, `--small`, changes to the plan."""

    place: study.Place
    small: bool
    changes: dict[str, Any]

    def plan(self, name: str) -> plans.Plan:
        """Return the plan of that name with these changes."""
        return replace(plans.plan(name, self.small), **self.changes)

    def command(self, name: str, out: Path) -> str:
        """Return the command line, without the folders that are this machine's."""
        options = [
            f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
            for key, value in self.changes.items()
        ]
        size = ["--small"] if self.small else []
        return " ".join([NAME, name, *size, *options, f"--out {shlex.quote(out.as_posix())}"])


Work = Callable[[Request, Path], list[Path]]


def _table(name: str) -> Work:
    def work(asked: Request, out: Path) -> list[Path]:
        done = study.study(asked.plan(name), asked.place, out)
        alpha = done.plan.alphas[0]
        here = done.ground
        path = out / f"partition-alpha-{alpha:g}.png"
        picture = figures.partition(here.cut(alpha), path, f"{here.where(alpha)}, thinned")
        print("\n".join(tables.verdict(done)))
        return [*tables.save(done, out, asked.command(name, out)), picture]

    return work


def _rho(asked: Request, out: Path) -> list[Path]:
    here = study.ground(asked.plan("cifar100"), asked.place)
    found = curves.curves(here, ALPHA, asked.place, out)
    path = write_csv(out / "rho.csv", curves.COLUMNS, curves.lines(found))
    title = here.where(ALPHA)
    page = out / "README.md"
    hardware = study.hardware(asked.place.device)
    text = curves.curves_page(found, title, asked.command("rho", out), hardware)
    page.write_text(text, encoding="utf-8")
    bands = f"{title}; bands: {here.plan.seeds} partitions"
    return [page, path, figures.over_rounds(found, out / "rho.png", bands)]


def _tradeoff(asked: Request, out: Path) -> list[Path]:
    here = study.ground(asked.plan("tinyimagenet"), asked.place)
    found = study.comparison(here, ALPHA, asked.place, out / "runs")
    (out / "command.txt").write_text(f"{asked.command('tradeoff', out)}\n", encoding="utf-8")
    points = write_csv(out / "tradeoff.csv", figures.POINTS, figures.points(found))
    return [figures.tradeoff(found, out / "tradeoff.png", here.where(ALPHA)), points]


def _regulariser(asked: Request, out: Path) -> list[Path]:
    rows: list[tuple[Any, ...]] = []
    for name, title in plans.TITLES.items():
        here = study.ground(asked.plan(name), asked.place)
        found = study.regularisers(here, asked.place.device)
        rows += [(name, f"{l2:.3g}", f"{accuracy:.4f}") for l2, accuracy in found.items()]
        best = max(found, key=lambda l2: (found[l2], l2))
        print(f"{title}: l2 = {best:.2g}, {100 * found[best]:.1f} % of a held-out fifth.")
    (out / "command.txt").write_text(f"{asked.command('regulariser', out)}\n", encoding="utf-8")
    return [write_csv(out / "regulariser.csv", ("dataset", "l2", "accuracy"), rows)]


def _causes(asked: Request, out: Path) -> list[Path]:
    here = study.ground(asked.plan("tinyimagenet"), asked.place)
    found = curves.causes(here, ALPHA, asked.place)
    title = f"{here.where(ALPHA)}: what differences are due to"
    hardware = study.hardware(asked.place.device)
    text = curves.causes_page(found, title, asked.command("causes", out), hardware)
    page = out / "README.md"
    page.write_text(text, encoding="utf-8")
    lines = curves.lines(found, with_l2=True)
    return [page, write_csv(out / "causes.csv", curves.CAUSE_COLUMNS, lines)]


WORK: dict[str, Work] = {
    **{name: _table(name) for name in plans.PLANS},
    "rho": _rho,
    "tradeoff": _tradeoff,
    "causes": _causes,
    "regulariser": _regulariser,
}
OTHERS = {"decisive": decisive.main, "tct": tct.main}


def main(words: Sequence[str] | None = None) -> int:
    """Carry out a command line."""
    given = list(sys.argv[1:] if words is None else words)
    if given and given[0] in OTHERS:
        return OTHERS[given[0]](given[1:])
    parser = argparse.ArgumentParser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*WORK, "all", *OTHERS])
    parser.add_argument("--data", type=Path, help="folder of images and weights; else SCAFFPD_DATA")
    parser.add_argument("--out", type=Path, help="folder for results; else runs/images/…")
    parser.add_argument("--cache", type=Path, default=Path("features"), help="folder for features")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: a GPU if there is one"
    )
    parser.add_argument("--small", action="store_true", help="few images: minutes on two cores")
    parser.add_argument("--quiet", "-q", action="store_true")
    for name in (
        "seeds",
        "rounds",
        "local-steps",
        "tune",
        "coordinates",
        "size",
        "train-per-class",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--l2", type=float, help="of the regulariser")
    parser.add_argument(
        "--balanced",
        action="store_const",
        const=True,
        help="deal classes as in the code of Li et al. (2022)",
    )
    options = vars(parser.parse_args(given))
    what = options.pop("what")
    out = options.pop("out") or Path("runs") / "images" / what
    small = options.pop("small")
    if small:
        check_small(out)
    progress = False if options.pop("quiet") else None
    device = str(device_of(options.pop("device")))
    place = study.Place(options.pop("data"), options.pop("cache"), device, progress)
    changes = {name: value for name, value in options.items() if value is not None}
    asked = Request(place, small, changes)
    for name in WORK if what == "all" else [what]:
        folder = out / name if what == "all" else out
        folder.mkdir(parents=True, exist_ok=True)
        for path in WORK[name](asked, folder):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
