"""Help: every argument has its text, every command an example that runs, every line fits in 80
columns.
"""

import re
import shlex
import shutil

import click
import pytest

from cases.silos import ROUGH, federation, run
from scaffpd import cli
from scaffpd.cli import EXIT_CODES
from scaffpd.settings.federation import FederationFile

COLOURFUL = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "SCAFFPD_DATA")
# Examples that start an engine's processes: their command lines are parsed, and no more. What they
# do is tested
# elsewhere (tests/deploy with the mark `deploy`; --provision in tests/deploy/test_flare.py).
HEAVY = (
    "scaffpd deploy local",
    "scaffpd deploy provision",
    "scaffpd deploy run",
    "scaffpd silo start",
)


# Examples that are run with a little less work: fewer splits, and without processes of their own.
LESS = {
    "scaffpd demo": ("--splits", "2"),
    "scaffpd train": ("--splits", "0"),
}


def commands(command=None, path=("scaffpd",)):
    """All commands and groups, with the words that call them."""
    command = command or cli.app
    yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, (*path, name))


ALL = dict(commands())
LEAVES = {path: command for path, command in ALL.items() if not isinstance(command, click.Group)}
EXAMPLES = [example for command in ALL.values() for example in command.examples]
RUN = [e for e in dict.fromkeys(EXAMPLES) if not e.startswith(HEAVY) and "--provision" not in e]
PARSED = [e for e in dict.fromkeys(EXAMPLES) if e not in RUN]


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in COLOURFUL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def shown(path, capsys):
    assert cli.run([*path.split()[1:], "--help"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def help_of(capsys):
    """A command's help in 80 columns without colours, asked for once."""
    return lambda path: HELPS.get(path) or HELPS.setdefault(path, shown(path, capsys))


HELPS = {}


@pytest.mark.parametrize("path", ALL)
def test_every_argument_and_option_has_its_help_on_screen(path, help_of):
    flat = " ".join(help_of(path).split())
    for parameter in ALL[path].get_params(click.Context(ALL[path])):
        assert parameter.help, f"{path}: {parameter.name}"
        assert " ".join(parameter.help.split()) in flat, f"{path}: {parameter.name}"


@pytest.mark.parametrize("path", ALL)
def test_help_is_legible_in_80_columns(path, help_of):
    out = help_of(path)
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out.replace("…,", "")
    assert "\x1b" not in out


@pytest.mark.parametrize("path", ALL)
def test_every_command_has_an_example_and_the_help_shows_it(path, help_of):
    assert ALL[path].examples
    out = help_of(path)
    for example in ALL[path].examples:
        assert f"   {example}\n" in out
        assert example.startswith("scaffpd ")


def test_colour_changes_no_word(capsys, monkeypatch):
    plain = shown("scaffpd train", capsys)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = shown("scaffpd train", capsys)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_the_top_groups_its_commands_and_names_the_exit_codes(capsys):
    out = shown("scaffpd", capsys)
    headings = re.findall(r"\n\n([A-Z].*)\n  ", out)
    assert headings == ["Options", "Start here", "Across organisations", "Examples"]
    flat = " ".join(out.split())
    for code, words in EXIT_CODES.items():
        assert f"{code} {words}" in flat
        assert f"{code} " in cli.__doc__


@pytest.mark.parametrize(
    "group", [path for path, command in ALL.items() if isinstance(command, click.Group)]
)
def test_a_group_alone_shows_its_help(group, capsys):
    assert cli.run(group.split()[1:]) == 0
    captured = capsys.readouterr()
    assert f"Usage: {group}" in captured.out
    assert captured.err == ""


# --- the examples run


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with all that examples name: a silo and its data, a federation of two, a run's
    model.
    """
    folder = tmp_path_factory.mktemp("site")
    path, places = federation(folder / "hospitals", 3, replacing=ROUGH)
    assert run(path, places)[0].status == "converged"
    for name, place in zip("abc", places.values(), strict=True):
        text = place.read_text().replace(
            'file = "patients.csv"', f'file = "{place.parent / "patients.csv"}"'
        )
        (folder / f"{name}.toml").write_text(text)
    shutil.copy(folder / "a.toml", folder / "silo.toml")
    shutil.copy(path, folder / "federation.toml")
    rows = (f"{k % 3},{k % 7},{'ab'[k % 2]},{int(k % 7 > 3)}" for k in range(120))
    (folder / "patients.csv").write_text("\n".join(["hospital,age,sex,ill", *rows]) + "\n")
    rows = (f"{k % 3},{k % 7},{1 + k % 40},{int(k % 7 > 3)}" for k in range(120))
    (folder / "trial.csv").write_text("\n".join(["hospital,age,days,died", *rows]) + "\n")
    (folder / "run").mkdir()
    shutil.copy(
        FederationFile.read(path).folder / "model.safetensors", folder / "run" / "model.safetensors"
    )
    shutil.copy(folder / "patients.csv", folder / "new-patients.csv")
    table = [
        "train",
        str(folder / "patients.csv"),
        "--client",
        "hospital",
        "--target",
        "ill",
        "--quiet",
        "--splits",
        "0",
    ]
    assert cli.run([*table, "--out", str(folder / "runs" / "patients")]) == 0
    return folder


DEMO = "scaffpd demo"  # tests/test_cli.py has it


@pytest.mark.parametrize(
    "example", [pytest.param(e, marks=pytest.mark.long) if e.startswith(DEMO) else e for e in RUN]
)
def test_examples_run(example, site, tmp_path, monkeypatch, capsys):
    shutil.copytree(site, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    less = next((more for start, more in LESS.items() if example.startswith(start)), ())
    code = cli.run([*shlex.split(example)[1:], *less])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out


@pytest.mark.parametrize("example", PARSED)
def test_heavy_examples_are_parsed(example):
    words = shlex.split(example)[1:]
    command = ALL["scaffpd"]
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    with command.make_context(command.name, words) as context:
        assert context.params


def test_some_examples_are_run_and_few_are_only_parsed():
    assert len(RUN) > 10
    assert not any(example.startswith(("scaffpd demo", "scaffpd silo a")) for example in PARSED)
