"""Count the files of the package that three everyday walks pass, as docs/architecture.md draws
them.

    python docs/walks.py

A file counts once one of its functions has run, while modules are imported too.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import scaffpd as sp

ROOT = Path(sp.__file__).parent


def passed(walk: Callable[[], Any]) -> list[str]:
    """Run the walk and return the files of the package that it passes, in order."""
    files: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        function = (
            code.co_flags & inspect.CO_OPTIMIZED
        )  # not the body of a module or a class, which imports run
        if event == "call" and function and code.co_filename.startswith(str(ROOT)):
            files.setdefault(Path(code.co_filename).relative_to(ROOT).as_posix())

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        walk()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(files)


def a_row_of_a_csv_file(*options: str) -> list[str]:
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


def a_row_that_is_trained_on_and_no_more() -> list[str]:
    """Take the same rows through `scaffpd train` without comparing, and without the page."""
    return a_row_of_a_csv_file("--splits", "0", "--no-report")


def a_round_on_a_cohort() -> list[str]:
    """Make one round of Scaff-PD over clients in this process."""
    cohort = sp.Cohort(sp.data.synthetic(), sp.Linear("squared", l2=0.1))
    method = sp.ScaffPD(sp.ChiSquare(rho=0.1))
    state = method.round(cohort, method.init(cohort, 0))
    return passed(lambda: method.round(cohort, state))


def an_exchange_of_silos() -> list[str]:
    """Make a masked sum in a deployed run, as one of its silos does."""
    from scaffpd.deploy.coordinate import coordinate
    from scaffpd.deploy.hospitals import write_hospitals
    from scaffpd.deploy.local import LocalDeployment
    from scaffpd.deploy.messages import InProcess
    from scaffpd.deploy.silo import Silo
    from scaffpd.deploy.transcript import Session
    from scaffpd.run.settings.federation import FederationFile

    found: list[str] = []
    total = Session.total

    def watched(self: Session, *given: Any) -> Any:
        answers: list[Any] = []
        if self.name != "va":
            return total(self, *given)
        found[:] = passed(lambda: answers.append(total(self, *given)))
        return answers[0]

    with tempfile.TemporaryDirectory() as folder:
        file, places = write_hospitals(Path(folder))
        LocalDeployment(Path(folder), file, places).agree(FederationFile.read(file))
        silos = {name: Silo.open(path) for name, path in places.items()}
        Session.total = watched  # type: ignore[method-assign]
        try:
            coordinate(file, InProcess(silos))
        finally:
            Session.total = total  # type: ignore[method-assign]
    return found


WALKS = (
    a_row_of_a_csv_file,
    a_row_that_is_trained_on_and_no_more,
    a_round_on_a_cohort,
    an_exchange_of_silos,
)

if __name__ == "__main__":
    for walk in WALKS:
        with get_context("spawn").Pool(
            1
        ) as process:  # of its own, so that every walk sees the imports
            files = process.apply(walk)
        print(
            f"{walk.__name__.replace('_', ' ')}: {len(files)} files\n  " + "\n  ".join(files) + "\n"
        )
