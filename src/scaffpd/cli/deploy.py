"""`scaffpd deploy`: the coordinator's commands, and a whole federation on this machine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scaffpd.cli.commands import (
    PATH,
    Decorator,
    ExitCode,
    argument,
    as_json,
    command,
    group,
    option,
    print_json,
    switch,
)
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.deployed_run import Outcome
    from scaffpd.fields import Json
    from scaffpd.settings.federation import FederationFile

HOUR = 3600.0
WEEK = 7 * 24 * HOUR  # operators take their time to agree
NOT_DONE = {"failed": ExitCode.FAILED, "diverged": ExitCode.FAILED, "paused": ExitCode.PAUSED}

NEXT = """\
Send every silo its folder over a channel that you trust: there is a private key in it.
  {parts}
There, NAME being the folder: put the data into it and fill in NAME/silo.toml, then
  scaffpd silo check NAME
  scaffpd silo start NAME
Here
  scaffpd deploy run {file}
Move {authority} away from this machine."""


file_argument = argument("federation", type=PATH, help="The federation.toml, or its folder.")
silent = switch("--quiet", "-q", help="Print nothing but what goes wrong.")


def _seconds(usual: float) -> Decorator:
    words = "Pause after so many seconds."
    return option("--seconds", type=click.FloatRange(min=1), default=usual, help=words)


@command()
@file_argument
@switch("--renew", help="Replace the kits of all, with new certificates.")
def provision(federation: Path, renew: bool) -> None:
    """Make keys and startup kits with FLARE, in a folder for every silo, and say what is next.

    Examples:
        scaffpd deploy provision federation.toml
    """
    from scaffpd.deploy.local import HOST
    from scaffpd.deploy.local import provision as provisioned

    file = _read(federation)
    if file.address[0] == HOST:
        words = "The server is localhost: only silos on this machine can reach it."
        click.secho(words, fg="yellow", err=True)
    provisioned(file, file.address, renew)
    home = federation if federation.is_dir() else federation.parent
    parts = "\n  ".join(str(home / name) for name in file.silos)
    click.echo(NEXT.format(parts=parts, file=federation, authority=home / "authority"))


@command()
@file_argument
@_seconds(WEEK)
@silent
def run(federation: Path, seconds: float, quiet: bool) -> None:
    """Run FLARE's server and the run, or go on with it from its last round, until it ends.

    It waits for silos and for their operators. A run that pauses exits with code 3: see to what
    its last line says, and start it again.

    Examples:
        scaffpd deploy run federation.toml
    """
    from scaffpd.deploy.flare.admin import run as carried
    from scaffpd.deploy.flare.serving import check_installed, checked_kit, expiry_warning

    check_installed()
    file = _read(federation)
    checked_kit(file.path)
    _follow(file, quiet, seconds, carried, expiry_warning(file.path))


@command()
@argument(
    "folder",
    type=PATH,
    default=Path("scaffpd-deployment"),
    help="With federation.toml and NAME/silo.toml of every silo; a new one gets hospitals.",
)
@switch("--write", help="Write the hospitals and agree; start nothing.")
@_seconds(HOUR)
@silent
def local(folder: Path, write: bool, seconds: float, quiet: bool) -> None:
    """Run a whole federation on this machine, by the same processes and with TLS; try it first.

    Operators' agreement is given for all silos.

    Examples:
        scaffpd deploy local
        scaffpd deploy local trial
    """
    from scaffpd.deploy.flare.serving import check_installed
    from scaffpd.deploy.local import agree_for_all, run_here, silo_files, write_hospitals

    check_installed()  # before anything is written
    if not folder.exists():
        write_hospitals(folder)
    file = _read(folder)
    if write:
        agree_for_all(file, silo_files(file))
    else:
        _follow(file, quiet, seconds, run_here)


@command()
@file_argument
@as_json
def status(federation: Path, as_json: bool) -> None:
    """Say how a run goes, from another shell while it does.

    Examples:
        scaffpd deploy status federation.toml
        scaffpd deploy status federation.toml --json
    """
    from scaffpd.deploy.deployed_run import DeployedRun
    from scaffpd.deploy.flare.serving import expiry_warning

    file = _read(federation)
    if not file.folder.is_dir():
        raise InputError("no-such-run", f"There is no run in {str(file.folder)!r} yet.")
    found = DeployedRun(file.folder).status() | {"warning": expiry_warning(file.path)}
    if as_json:
        print_json(found)
    else:
        _show_status(found)


def _show_status(now: Json) -> None:
    from scaffpd.cli.screens import bullets, facts, section, terminal
    from scaffpd.numbers import format_bytes

    console = terminal()
    gap = now["certificate"]
    quiet = now["quiet_seconds"]
    lines = {
        "state": now["state"] + ("" if quiet is None else f", last heard of {quiet:.0f} s ago"),
        "round": str(now["round"]),
        "certified gap": "none" if gap is None else f"{gap:.2e}",
        "exchanges": str(now["exchanges"]),
        "sent": f"{format_bytes(now.get('messages_up', 0))} up, "
        f"{format_bytes(now.get('messages_down', 0))} down",
    }
    facts(console, lines)
    if now["events"]:
        section(console, "What happened last")
        bullets(console, [f"round {one['round']}: {one['sentence']}" for one in now["events"]])
    section(console, None, " ".join(filter(None, (now["warning"], now["sentence"]))))


deploy = group(
    "deploy",
    """Across real organisations, on NVIDIA FLARE: the coordinator's part.

    Examples:
        scaffpd deploy local
    """,
    *(provision, run, status, local),
)


def _read(path: Path) -> FederationFile:
    from scaffpd.settings.federation import FederationFile

    return FederationFile.read(path / "federation.toml" if path.is_dir() else path)


def _follow(
    file: FederationFile,
    quiet: bool,
    seconds: float,
    carry: Callable[..., Outcome],
    warning: str = "",
) -> None:
    """Carry a run to its end, show it, and exit with its code: why it pauses is the last line."""
    from scaffpd.cli.screens import RoundsScreen
    from scaffpd.deploy.deployed_run import DeployedRun

    # whoever ends this ends the processes as well
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    screen = RoundsScreen(quiet, errors=False, pause=0.0)
    screen.begin("", file.silos, file.rounds, file.tol)
    with screen:
        if warning:
            screen.say(warning)
        try:
            outcome = carry(file, screen.watch, screen.say, seconds)
        except KeyboardInterrupt:
            done = DeployedRun(file.folder).rounds()
            screen.say(f"Stopped after round {done}; the same command goes on from there.")
            raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
    if screen.done:
        screen.say(screen.last)
    code = NOT_DONE.get(outcome.status, ExitCode.DONE)
    if not code:
        screen.say(f"Results: {file.folder}\nTo look at: scaffpd report {file.folder}")
    screen.say(outcome.sentence)
    raise click.exceptions.Exit(code)
