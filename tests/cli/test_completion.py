"""Shell completion: names that are right, for three shells, without loading anything heavy."""

import os
import shutil
import subprocess
import sys

import pytest

from forked import command
from scaffpd import cli


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
    lines = offered(_SCAFFPD_COMPLETE="bash_complete", **words).split()
    assert {line.removeprefix("plain,") for line in lines} == found


def test_zsh_and_fish(offered):
    line = "scaffpd train --objective CV"
    zsh = offered(_SCAFFPD_COMPLETE="zsh_complete", COMP_WORDS=line, COMP_CWORD="3")
    assert zsh.split() == ["plain", "CVaR", "_"]
    words = {"COMP_WORDS": "scaffpd train --objective Ti", "COMP_CWORD": "Ti"}
    assert offered(_SCAFFPD_COMPLETE="fish_complete", **words).strip() == "plain,Tilted"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_shown_and_installed(shell, tmp_path):
    start = tmp_path / f".{shell}rc"
    start.write_text("export MINE=1")
    variables = {"HOME": str(tmp_path), "PYTHONUTF8": "1", "SHELL": f"/bin/{shell}"}
    done = command("--show-completion", shell, env=variables)
    assert f"_SCAFFPD_COMPLETE={shell}_complete" in done.stdout
    assert command("--show-completion", env=variables).stdout == done.stdout
    for _ in range(2):  # the second changes nothing
        assert command("--install-completion", env=variables).returncode == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != start]
    assert [path.read_text() for path in written] == [done.stdout.removesuffix("\n")]
    mine, *more = start.read_text().splitlines()
    assert mine == "export MINE=1"
    if shell != "fish":  # which looks for itself
        assert more == [f". ~/{written[0].relative_to(tmp_path)}"]


def test_shells_that_are_not_known_are_refused():
    done = command("--show-completion", "tcsh")
    assert done.returncode == 2
    assert done.stderr.startswith("There is no completion for 'tcsh'")


@pytest.mark.parametrize("shell", [name for name in ("bash", "zsh") if shutil.which(name)])
def test_shells_can_read_what_is_installed(shell, tmp_path):
    script = tmp_path / "script"
    script.write_text(command("--show-completion", shell).stdout)
    done = subprocess.run([shell, "-n", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_nothing_heavy_is_loaded():
    code = (
        "import sys\n"
        "from scaffpd.cli import app\n"
        "try:\n    app([], prog_name='scaffpd', standalone_mode=False)\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'rich'}\n"
        "print(*sorted(heavy & set(sys.modules)), "
        "file=sys.stderr)\n"
    )
    variables = {
        "_SCAFFPD_COMPLETE": "bash_complete",
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
    assert done.stdout.split() == ["plain,CVaR"]
    assert done.stderr.strip() == ""
