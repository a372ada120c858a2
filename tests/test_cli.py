"""The command line: exit codes, one sentence for what cannot work, and the demo as the README
starts it.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import scaffpd
from scaffpd import cli
from scaffpd.algorithms import MinimaxNewton
from scaffpd.errors import InputError
from scaffpd.program import demo as studies

ROOT = Path(__file__).parents[1]
SCRIPT = [sys.executable, "-c", "from scaffpd.cli import main; main()"]
RUN = {
    "clients.csv",
    "joining.csv",
    "report.html",
    "rounds.csv",
    "run.json",
}


COLOURFUL = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in COLOURFUL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def surroundings(**more):
    return {name: value for name, value in os.environ.items() if name not in COLOURFUL} | more


def files_in(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# --- the frame


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help(arguments, capsys):
    assert cli.run(arguments) == 0
    out = capsys.readouterr().out
    assert "Usage: scaffpd" in out
    assert "demo" in out
    assert "--version" in out


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"scaffpd {scaffpd.__version__}\n"


def test_help_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from scaffpd.cli import run\n"
        "assert run(['--help']) == run(['demo', '--help']) == run(['silo', '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'pandas', 'rich'}\n"
        "assert not (heavy | {'pydantic', 'filelock'}) & set(sys.modules)\n"
        "assert run(['train', '--help']) == 0\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "stations", lambda *_, **__: pytest.fail("worked in vain"))
    (tmp_path / "taken").write_text("")
    assert cli.run(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert (
        capsys.readouterr().err
        == f"Cannot write to the folder {str(tmp_path / 'taken')!r}: it is a file.\n"
    )
    assert cli.run(["demo", "--out", str(tmp_path / "taken" / "below")]) == 2


def test_an_input_error_is_a_red_sentence_without_a_traceback(capsys, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise InputError("moon-full", "The moon is full.")

    monkeypatch.setattr(studies, "stations", refuse)
    assert cli.run(["demo", "--quiet", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "The moon is full.\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cli.run(["demo", "--quiet", "--out", str(tmp_path)])
    assert capsys.readouterr().err == "\x1b[31mThe moon is full.\x1b[0m\n"


def test_control_c_in_the_middle_of_a_round_ends_with_130(capsys, tmp_path, monkeypatch):
    calls = []
    real = MinimaxNewton.round
    handler = signal.getsignal(signal.SIGINT)

    def interrupted(self, federation, state):
        calls.append(state.rounds)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(self, federation, state)

    monkeypatch.setattr(MinimaxNewton, "round", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.run(["demo", "--out", str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(calls) == 2
    assert capsys.readouterr().err == (
        "Interrupted: nothing was saved; the same command starts anew.\n"
    )
    assert files_in(tmp_path) == []


def test_other_errors_are_not_hidden(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(studies, "stations", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(["demo", "--quiet", "--out", str(tmp_path)])


def test_main_exits_with_the_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaffpd", "--nothing"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err


# --- the demo


def made(arguments, ready):
    """`make demo` of the README, with its set-up skipped, because that is what runs the test;
    through a pipe.
    """
    (ready / "bin").mkdir()
    for name in ("python", "scaffpd"):
        (ready / "bin" / name).symlink_to(Path(sys.executable).parent / name)
    (ready / ".demo").touch()
    make = ["make", "--silent", "demo", f"VENV={ready}", f"DEMO={shlex.join(arguments)}"]
    done = subprocess.run(
        make if shutil.which("make") else [*SCRIPT, "demo", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
        env=surroundings(PYTHONIOENCODING="utf-8", COLUMNS="80"),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_make_demo_is_the_command(tmp_path):
    assert "Usage: scaffpd demo" in made(["--help"], tmp_path)[0]


@pytest.mark.long
def test_the_demo_through_a_pipe_writes_its_files_in_plain_text(tmp_path):
    (tmp_path / "venv").mkdir()
    folder = tmp_path / "new" / "folder"
    out, err = made(["--seed", "5", "--out", str(folder)], tmp_path / "venv")
    assert set(files_in(folder)) >= RUN
    assert (folder / "report.html").stat().st_size > 10_000
    assert "\x1b" not in out + err
    assert (
        err.replace("Matplotlib is building the font cache; this may take a moment.", "").strip()
        == ""
    )
    joined = out.replace("\n", "")
    table = out[: out.index("Report")]
    assert str(folder / "report.html") in joined
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "scaffpd", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert scaffpd.__version__ in done.stdout
