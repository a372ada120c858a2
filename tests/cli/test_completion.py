"""Shell completion: names that are right, for three shells, without loading anything heavy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from forked import command
from scaffpd import algorithms, cli, objectives
from scaffpd.cli.train import ALGORITHMS, OBJECTIVES


@pytest.fixture
def offered(monkeypatch, capsys):
    """What a shell that sets these variables is offered, in this process;
    `test_nothing_heavy_is_loaded` starts one.
    """

    def ask(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            cli.app([], prog_name="scaffpd")
        found = capsys.readouterr()
        assert found.err == ""
        return found.out

    return ask


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("scaffpd de", {"demo", "deploy"}),
        ("scaffpd pr", {"predict"}),
        ("scaffpd train hospitals --algorithm Sc", {"ScaffPD", "Scaffold"}),
        ("scaffpd train --kap", {"--kappa"}),
        ("scaffpd silo a", {"agree", "audit"}),
    ],
)
def test_bash(offered, line, found):
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    assert set(offered(_SCAFFPD_COMPLETE="complete_bash", **words).split()) == found


def test_zsh_and_fish(offered):
    line = "scaffpd train --objective CV"
    zsh = offered(_SCAFFPD_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    assert '"CVaR"' in zsh
    fish = {"_SCAFFPD_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    out = offered(_TYPER_COMPLETE_ARGS="scaffpd train --objective Ti", **fish)
    assert out.strip() == "Tilted"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_shown_and_installed(shell, tmp_path):
    variables = {
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        "HOME": str(tmp_path),
        "PYTHONUTF8": "1",
    }
    done = command("--show-completion", shell, env=variables)
    assert f"_SCAFFPD_COMPLETE=complete_{shell}" in done.stdout
    assert command("--install-completion", shell, env=variables).returncode == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("complete_" in path.read_text() for path in written)


def test_nothing_heavy_is_loaded():
    code = (
        "import sys\n"
        "from scaffpd.cli import app\n"
        "try:\n    app([], prog_name='scaffpd', standalone_mode=False)\n"
        "except SystemExit:\n    pass\n"
        "print(*sorted({'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib'} & set(sys.modules)), "
        "file=sys.stderr)\n"
    )
    variables = {
        "_SCAFFPD_COMPLETE": "complete_bash",
        "COMP_WORDS": "scaffpd train --objective CV",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | variables,
    )
    assert done.stdout.split() == ["CVaR"]
    assert done.stderr.strip() == ""


def test_the_names_are_those_of_their_homes():
    assert set(OBJECTIVES) == set(objectives.OBJECTIVES) == {*objectives.__all__} - {"Objective"}
    said = next(
        o for o in typer.main.get_command(cli.app).commands["train"].params if o.name == "strength"
    )
    for kind in (kind for kind in objectives.OBJECTIVES.values() if kind.parameter):
        assert (kind.symbol or kind.parameter) in said.help
        assert kind.usual is None or f"{kind.symbol} {kind.usual:g}" in said.show_default
    assert set(ALGORITHMS) == set(algorithms.ALGORITHMS)
