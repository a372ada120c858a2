"""Any folder of results as a `ReportData`, or one sentence on why it is none."""

from __future__ import annotations

from pathlib import Path

from scaffpd.errors import InputError
from scaffpd.report import compared, deployed, trained
from scaffpd.report.data import ReportData


def read(folder: Path) -> ReportData:
    """The story of a folder that `train`, `path`, `demo`, `compare` or `deploy` wrote."""
    if not folder.exists():
        raise InputError(f"There is no folder {str(folder)!r}.")
    if not folder.is_dir():
        raise InputError(
            f"{str(folder)!r} is a file; report needs the folder of a run, such as {str(folder.parent)!r}."
        )
    for mark, reader in (
        (trained.MARK, trained.read_trained),
        (compared.MARK, compared.read_compared),
        (deployed.MARK, deployed.read_deployed),
    ):
        if (folder / mark).is_file():
            return reader(folder)
    raise InputError(f"{str(folder)!r} is not the folder of a run{_hint(folder)}")


def _hint(folder: Path) -> str:
    """A run that is one floor below, or what would make this a run."""
    marks = (trained.MARK, compared.MARK, deployed.MARK)
    below = sorted({file.parent for mark in marks for file in folder.glob(f"*/{mark}")})
    if below:
        return f": did you mean {str(below[0])!r}?"
    return (
        f": it has neither {trained.MARK} (train, path, demo), nor {compared.MARK} (compare), "
        f"nor {deployed.MARK} (deploy)."
    )
