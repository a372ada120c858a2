"""Command lines in this process: what they print, and why they are refused."""

import shlex

import click
import numpy as np
import pytest

from scaffpd import cli
from scaffpd.errors import InputError

COLOURFUL = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "SCAFFPD_DATA")
TABLE = "train patients.csv --client hospital --target ill"
QUICK = f"{TABLE} --splits 0 --pairs 0"  # without what joining brings, or pairs of columns


def ran(line, capsys, code=0):
    assert cli.run(shlex.split(line)) == code
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found


def refusal(line):
    """The code of the refusal that a command line meets, or the class of click's own error."""
    with pytest.raises((InputError, click.ClickException)) as caught:
        cli.app(shlex.split(line), prog_name="scaffpd", standalone_mode=False)
    error = caught.value
    if isinstance(error, click.ClickException):
        return type(error).__name__
    assert "\n" not in str(error)
    assert str(error)[-1] in ".?"
    return error.code


def patients(rows=150, seed=1):
    """A table of three hospitals, one of which differs, with notes that nothing is learnt from."""
    random = np.random.default_rng(seed)
    lines = ["hospital,age,sex,note,ill"]
    for k in range(rows):
        site = ["North", "South", "West"][k % 3]
        age = random.normal(60, 10)
        sex = random.choice(["f", "m", ""])
        shift = 12 * (sex == "m") * (-1 if site == "West" else 1)
        lines.append(
            f"{site},{age:.1f},{sex},note {k},{int(age + shift + random.normal(0, 9) > 63)}"
        )
    return "\n".join(lines) + "\n"
