"""Count the files of the package that three everyday walks pass, as docs/architecture.md draws
them.

    python docs/walks.py [--write]

A file counts once one of its functions has run, while modules are imported too. `--write` puts the
table into docs/architecture.md.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import scaffpd as sp

ROOT = Path(sp.__file__).parent
PAGE = Path(__file__).with_name("architecture.md")
BEGIN = "<!-- walks: python docs/walks.py --write -->"
END = "<!-- end of walks -->"
LONGEST = 500  # lines of a file, as tests/test_architecture.py has it


class Walk(NamedTuple):
    """What a walk passes.

    Attributes:
        files: those of which a function has run, in order.
        imported: those among them that ran nothing but while modules were imported.
        lines: of all these files.
    """

    files: list[str]
    imported: list[str]
    lines: int


def passed(walk: Callable[[], Any]) -> Walk:
    """Run the walk and return what it passes of the package."""
    files: dict[str, None] = {}
    used: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # not the body of a module or a class, which imports run
        function = code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and function and code.co_filename.startswith(str(ROOT)):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            files.setdefault(file)
            if file not in used and not _importing(frame):
                used.add(file)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        walk()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    return Walk(list(files), [file for file in files if file not in used], lines)


def _importing(frame: FrameType | None) -> bool:
    """Return whether the body of a module of the package is being run for an import."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(str(ROOT)):
            return True
        frame = frame.f_back
    return False


def a_row_of_a_csv_file(*options: str) -> Walk:
    """Take the rows of a CSV file through `scaffpd train`, from the command line to the model on
    disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "table.csv")
        lines = [f"{'ab'[i % 2]},{i % 7},{i % 3},{'yes' if i % 5 > 1 else 'no'}" for i in range(60)]
        table.write_text("\n".join(["client,x,y,target", *lines]))
        words = [
            str(table),
            "--client",
            "client",
            "--target",
            "target",
            "--out",
            f"{folder}/run",
            "--quiet",
            *options,
        ]

        def run() -> None:
            from scaffpd.cli import main

            sys.argv = ["scaffpd", "train", *words]
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                main()

        found = passed(run)
        assert Path(folder, "run", "model.safetensors").exists()
        return found


def a_row_that_is_trained_on_and_no_more() -> Walk:
    """Take the same rows through `scaffpd train` without comparing, and without the page."""
    return a_row_of_a_csv_file("--splits", "0", "--no-report")


def a_round_on_a_cohort() -> Walk:
    """Make one round of Scaff-PD over clients in this process."""
    cohort = sp.Cohort(sp.data.synthetic(), sp.Linear("squared", l2=0.1))
    method = sp.ScaffPD(sp.ChiSquare(rho=0.1))
    state = method.round(cohort, method.init(cohort, 0))
    return passed(lambda: method.round(cohort, state))


def an_exchange_of_silos() -> Walk:
    """Make a masked sum in a deployed run, as one of its silos does."""
    from scaffpd.deploy.coordinate import coordinate
    from scaffpd.deploy.local import agree_for_all, write_hospitals
    from scaffpd.deploy.messages import InProcess
    from scaffpd.deploy.silo import Silo
    from scaffpd.deploy.transcript import Session
    from scaffpd.settings.federation import FederationFile

    found = Walk([], [], 0)
    total = Session.total

    def watched(self: Session, *given: Any) -> Any:
        nonlocal found
        answers: list[Any] = []
        if self.name != "va":
            return total(self, *given)
        found = passed(lambda: answers.append(total(self, *given)))
        return answers[0]

    with tempfile.TemporaryDirectory() as folder:
        file, places = write_hospitals(Path(folder))
        agree_for_all(FederationFile.read(file), places)
        silos = {name: Silo.open(path) for name, path in places.items()}
        Session.total = watched  # type: ignore[method-assign]
        try:
            coordinate(file, InProcess(silos))
        finally:
            Session.total = total  # type: ignore[method-assign]
    return found


WALKS = {
    a_row_of_a_csv_file: "A row of a CSV file through `scaffpd train`, from the command line to "
    "model and page",
    a_row_that_is_trained_on_and_no_more: "The same with `--splits 0 --no-report`: no comparison, "
    "no page",
    a_round_on_a_cohort: "One round of Scaff-PD over clients in this process",
    an_exchange_of_silos: "A masked sum at a silo of a deployed run",
}


def table(found: Mapping[str, Walk]) -> str:
    """Return what the walks pass as a table in Markdown."""
    lines = [
        f"| walk | files | only while importing | lines | at {LONGEST} lines a file |",
        "|---|---|---|---|---|",
    ]
    for name, walk in found.items():
        least = -(-walk.lines // LONGEST)
        counts = f"{len(walk.files)} | {len(walk.imported)} | {walk.lines:,} | {least}"
        lines.append(f"| {name} | {counts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = {}
    for walk, name in WALKS.items():
        # a process of its own, so that every walk sees the imports
        with get_context("spawn").Pool(1) as process:
            found[name] = process.apply(walk)
        print(f"{name}:\n  " + "\n  ".join(found[name].files) + "\n")
    print(table(found))
    if "--write" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")
