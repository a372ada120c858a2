"""`scaffpd deploy`: a federation's parts for FLARE, and the whole of it on this machine."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd.cli.typer_ext import AsJson, group, print_json
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.cli.screens import RoundsScreen
    from scaffpd.deploy.deployed_run import Outcome
    from scaffpd.deploy.local import LocalDeployment
    from scaffpd.run.settings.federation import FederationFile

QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but what goes wrong.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the engine's own files and logs.")]
Seconds = Annotated[float, typer.Option(min=1, help="Give up after so many seconds.")]

NEXT = """
1. Send every silo its folder over a channel that you trust: it holds a private key
  {parts}

2. At every silo, NAME being its own, beside its data
  cp silo.toml NAME/
  scaffpd silo check NAME/silo.toml
  scaffpd silo key NAME/silo.toml      # compare fingerprints with the other operators
  scaffpd deploy start NAME
  scaffpd silo agree NAME/silo.toml    # once the run has asked

3. At the server
  scaffpd deploy start {own}
  scaffpd deploy resume {own}"""


def local(
    federation: Annotated[
        Path | None,
        typer.Argument(help="A federation.toml; left out, four hospitals are deployed."),
    ] = None,
    silo: Annotated[
        list[Path] | None, typer.Option(help="A silo.toml of that federation; once for each silo.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the deployment; results go to the federation's own `folder`."),
    ] = Path("scaffpd-deployment"),
    write: Annotated[
        bool, typer.Option("--write", help="Write the hospitals' files, and start nothing.")
    ] = False,
    keep: Keep = False,
    seconds: Seconds = 3600.0,
    quiet: QuietOption = False,
) -> None:
    """Start real processes on this machine with TLS, train, and stop everything again.

    Examples:
        scaffpd deploy local
        scaffpd deploy local federation.toml --silo a.toml --silo b.toml
    """
    from scaffpd.deploy.local import LocalDeployment, flare_module
    from scaffpd.run.settings.federation import FederationFile

    flare_module("local")  # before anything is written
    if federation is None:
        if silo:
            raise InputError(
                "silo-without-federation",
                "--silo files belong to a federation.toml: give that as well.",
            )
        deployment = LocalDeployment.hospitals(out)
    else:
        deployment = LocalDeployment.of(out, federation, silo or [])
    if write:
        deployment.agree(FederationFile.read(deployment.federation))
    else:
        _run_here(deployment, seconds, keep, quiet)


def resume(
    folder: Annotated[
        Path,
        typer.Argument(help="The folder of an earlier `deploy local`, or the coordinator's part."),
    ],
    seconds: Seconds = 3600.0,
    keep: Keep = False,
    quiet: QuietOption = False,
) -> None:
    """Start a run, or go on with it from its last round, and follow it to its end.

    Examples:
        scaffpd deploy resume scaffpd-deployment
    """
    from scaffpd.deploy.deployed_run import PROGRESS, DeployedRun
    from scaffpd.deploy.local import LocalDeployment, flare_module, follower
    from scaffpd.run.settings.federation import FederationFile

    if not (folder / "admin").is_dir():
        _run_here(LocalDeployment.read(folder), seconds, keep, quiet)
        return
    admin = flare_module("admin")
    file = FederationFile.read(folder / "federation.toml")
    with _screen(file, quiet) as screen:
        follow = follower(DeployedRun(file.folder).path / PROGRESS, screen.watch)
        outcome = admin.resume(folder, file, seconds, screen.say, follow)
    _end(screen, outcome, file.folder)


def start(
    folder: Annotated[
        Path, typer.Argument(help="Folder with kit and federation.toml, or kit and silo.toml.")
    ],
) -> None:
    """Run FLARE's server or a silo in the foreground, for containers and service managers.

    Examples:
        scaffpd deploy start flare/parts/coordinator
    """
    from scaffpd.deploy.local import flare_module
    from scaffpd.run.settings.federation import FederationFile
    from scaffpd.run.settings.silo import SiloFile

    flare = flare_module("local")
    options = {}
    if not (folder / "kit" / "startup").is_dir():
        raise InputError(
            "no-startup-kit",
            f"There is no startup kit in {str(folder / 'kit')!r}: the coordinator sends it.",
        )
    file = folder / "federation.toml"
    if file.is_file():
        FederationFile.read(file)  # a mistake shows here, not in FLARE's log
        variable = flare.server.VARIABLE
    else:
        file = folder / "silo.toml"
        variable = flare.client.VARIABLE
        options = {"uid": SiloFile.read(file).name}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = flare.serve(folder / "kit", options, file, variable)
    except KeyboardInterrupt:
        code = 0  # whoever ends a service wants it to end
    raise typer.Exit(code)


def flare(
    federation: Annotated[Path, typer.Argument(help="The coordinator's federation.toml.")],
    out: Annotated[Path, typer.Option(help="Folder for the files; it is made if need be.")] = Path(
        "flare"
    ),
) -> None:
    """Make keys and startup kits with FLARE, a folder for every part, and show what to do next.

    Examples:
        scaffpd deploy flare federation.toml --out provisioned
    """
    from scaffpd.deploy.local import checked_folder, flare_module
    from scaffpd.run.settings.federation import FederationFile

    project = flare_module("provision")
    file = FederationFile.read(federation)
    host, port = file.address
    checked_folder(out)
    if host == "localhost":
        typer.secho(
            "The server is localhost: only silos on this machine can reach it.",
            fg="yellow",
            err=True,
        )
    described = project.FlareProject(file.name, list(file.silos), host, port, port + 1)
    parts = project.write_parts(described, out, file.path)
    own = parts / project.COORDINATOR
    typer.echo(
        NEXT.format(parts="\n  ".join(str(parts / name) for name in file.silos), own=own),
    )


def status(
    folder: Annotated[Path, typer.Argument(help="The run's folder, or its federation.toml.")],
    as_json: AsJson = False,
) -> None:
    """Say how a run goes, from another shell while it does.

    Examples:
        scaffpd deploy status scaffpd-deployment/run
        scaffpd deploy status scaffpd-deployment/run --json
    """
    from scaffpd.deploy.deployed_run import DeployedRun
    from scaffpd.deploy.local import NOTE, LocalDeployment
    from scaffpd.run.settings.federation import FederationFile

    if (folder / NOTE).is_file():
        folder = LocalDeployment.read(folder).federation
    place = FederationFile.read(folder).folder if folder.is_file() else folder
    if not place.is_dir():
        raise InputError("no-such-run", f"There is no run in {str(place)!r}.")
    found = DeployedRun(place).status()
    if as_json:
        print_json(found)
    else:
        _show_status(found)


def _show_status(now: Mapping[str, Any]) -> None:
    from rich.console import Console

    from scaffpd.cli.screens import bullets, facts, section
    from scaffpd.numbers import format_bytes

    console = Console(highlight=False)
    gap = now["certificate"]
    quiet = now["quiet_seconds"]
    lines = {
        "state": now["state"] + ("" if quiet is None else f", last heard of {quiet:.0f} s ago"),
        "round": str(now["round"]),
        "certified gap": "none" if gap is None else f"{gap:.2e}",
        "silos": ", ".join(now["members"]) or "none yet",
        "exchanges": str(now["exchanges"]),
        "sent": f"{format_bytes(now['messages_up'])} up, {format_bytes(now['messages_down'])} down",
    }
    facts(console, lines)
    if now["events"]:
        section(console, "What happened last")
        bullets(console, [f"round {one['round']}: {one['sentence']}" for one in now["events"]])
    section(console, None, now["sentence"] or "")


deploy = group(
    """Across real organisations, on NVIDIA FLARE.

    Examples:
        scaffpd deploy local
    """,
    *(local, resume, status, start, flare),
)


def _run_here(deployment: LocalDeployment, seconds: float, keep: bool, quiet: bool) -> None:
    from scaffpd.deploy.deployed_run import DeployedRun
    from scaffpd.run.settings.federation import FederationFile

    file = FederationFile.read(deployment.federation)
    # whoever ends this ends the processes as well
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _screen(file, quiet) as screen:
        try:
            outcome = deployment.run(screen.watch, screen.say, seconds, keep)
        except KeyboardInterrupt:
            done = DeployedRun(file.folder).rounds()
            screen.say(
                f"Stopped after round {done}. Go on with: scaffpd deploy resume {deployment.folder}"
            )
            raise
    _end(screen, outcome, file.folder)


def _screen(file: FederationFile, quiet: bool) -> RoundsScreen:
    from scaffpd.cli.screens import RoundsScreen

    screen = RoundsScreen(quiet, errors=False, pause=0.0)
    screen.begin("", file.silos, file.rounds, file.tol)
    return screen


def _end(screen: RoundsScreen, outcome: Outcome, folder: Path) -> None:
    """Show the result; exit code 1 where there is none."""
    if screen.last:
        screen.say(screen.last)
    screen.say(outcome.sentence)
    if outcome.status != "failed":
        screen.say(f"Results: {folder}\nTo look at: scaffpd report {folder}")
    if outcome.status in ("failed", "paused", "diverged"):
        raise typer.Exit(1)
