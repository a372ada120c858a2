"""`scaffpd deploy`: a federation's files for FLARE, and the whole of it on this machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd.cli import typer_ext
from scaffpd.cli.typer_ext import AsJson, group
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.cli.screens import RoundsScreen
    from scaffpd.deploy.deployed_run import DeployedRun, Outcome
    from scaffpd.run.settings.federation import FederationFile, Server

QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but what goes wrong.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the engine's own files and logs.")]
Seconds = Annotated[float, typer.Option(help="Give up after so many seconds.")]
FederationFileArgument = Annotated[Path, typer.Argument(help="The coordinator's federation.toml.")]
Serve = Annotated[
    int | None,
    typer.Option(help="Serve /metrics, /healthz and /livez on this port.", min=0, max=65535),
]
Host = Annotated[str, typer.Option(help="The address to serve on; other machines reach 0.0.0.0.")]
REFRESH = 5  # seconds between two looks of a browser at a run
Out = Annotated[Path, typer.Option(help="Folder for the files; it is made if need be.")]


def local(
    federation: Annotated[
        Path | None,
        typer.Argument(help="A federation.toml; left out, four hospitals are deployed."),
    ] = None,
    silo: Annotated[
        list[Path] | None, typer.Option(help="A silo.toml of that federation; once for each silo.")
    ] = None,
    silos: Annotated[
        int, typer.Option(help="How many hospitals (more than four: their wards).")
    ] = 4,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the deployment, to resume it by; results go to the federation's own `folder`."
        ),
    ] = Path("scaffpd-deployment"),
    write: Annotated[
        bool, typer.Option("--write", help="Write the hospitals' files, and start nothing.")
    ] = False,
    keep: Keep = False,
    seconds: Seconds = 3600.0,
    quiet: QuietOption = False,
) -> None:
    """Bring up real processes on this machine with TLS, train, and take everything down again.

    Examples:
        scaffpd deploy local --silos 4
        scaffpd deploy local federation.toml --silo a.toml --silo b.toml
    """
    _positive(seconds)
    from scaffpd.deploy.local import LocalDeployment, engine_module

    engine_module("flare", "local")  # before anything is written
    if federation is None:
        if silo:
            raise InputError(
                "silo-files-belong", "--silo files belong to a federation.toml: name that as well."
            )
        deployment = LocalDeployment.hospitals(out, "flare", silos)
    else:
        deployment = LocalDeployment.of(out, "flare", federation, silo or [])
    if not write:
        _see_through(deployment, seconds, keep, quiet)


def resume(
    folder: Annotated[
        Path,
        typer.Argument(
            help="The folder of an earlier `deploy local`, of a coordinator, or a federation.toml."
        ),
    ],
    kit: Annotated[
        Path | None, typer.Option(help="FLARE in production: the administrator's startup kit.")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="FLARE in production: the job folder of `deploy flare`.")
    ] = None,
    seconds: Seconds = 3600.0,
    keep: Keep = False,
    quiet: QuietOption = False,
) -> None:
    """Start a run, or go on with it from its last round, and see it through to its end.

    Examples:
        scaffpd deploy resume scaffpd-deployment
    """
    _positive(seconds)
    from scaffpd.deploy.local import LocalDeployment

    if kit is None and job is None and (folder / "admin").is_dir():
        job = next((folder / "job").glob("*/"), None)
        if job is None:
            raise InputError(
                "job-deploy-flare",
                f"There is no job in {str(folder / 'job')!r}: `deploy flare --provision` writes it.",
            )
        folder, kit = folder / "federation.toml", folder / "admin"
    if kit is None and job is None:
        _see_through(LocalDeployment.read(folder), seconds, keep, quiet)
        return
    if kit is None or job is None:
        raise InputError("run-flare-both", "A run on FLARE needs both --kit and --job.")
    _supervise(folder, kit, job, seconds, quiet)


def start(
    folder: Annotated[
        Path, typer.Argument(help="Folder with kit and federation.toml, or kit and silo.toml.")
    ],
    serve: Serve = None,
    host: Host = "127.0.0.1",
) -> None:
    """Run FLARE's server or a silo in the foreground, for containers and service managers, until it is ended.

    Examples:
        scaffpd deploy start flare/parts/coordinator --serve 9464
    """
    from scaffpd.deploy.deployed_run import DeployedRun
    from scaffpd.deploy.local import engine_module
    from scaffpd.deploy.silo.disclosure import silo_pages
    from scaffpd.run.settings.federation import FederationFile
    from scaffpd.run.settings.silo import SiloFile
    from scaffpd.training.trackers import page_server

    flare = engine_module("flare", "local")
    pages = dict[str, Callable[[], str]]()
    options = {}
    if not (folder / "kit" / "startup").is_dir():
        raise InputError(
            "startup-kit-coordinator",
            f"There is no startup kit in {str(folder / 'kit')!r}: the coordinator sends it.",
        )
    if (file := folder / "federation.toml").is_file():
        variable = flare.server.VARIABLE
        pages = run_pages(DeployedRun(FederationFile.read(file).folder))
    else:
        settings = SiloFile.read(file := folder / "silo.toml")
        variable = flare.client.VARIABLE
        options = {"uid": settings.name}
        pages = silo_pages(settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = None if serve is None else page_server(pages, host, serve)
    if server is not None:
        threading.Thread(target=server.serve_forever, daemon=True, name="pages").start()
    try:
        code = flare.serve(folder / "kit", options, file, variable)
    except KeyboardInterrupt:
        code = 0  # whoever ends a service wants it to end
    raise typer.Exit(code)


def flare(
    federation: FederationFileArgument,
    out: Out = Path("flare"),
    provision: Annotated[
        bool,
        typer.Option("--provision", help="Make keys and kits at once, a folder for every part."),
    ] = False,
) -> None:
    """Write FLARE's project and job files, and show the commands that bring them to life.

    Examples:
        scaffpd deploy flare federation.toml --out flare
        scaffpd deploy flare federation.toml --out provisioned --provision
    """
    from scaffpd.deploy.local import engine_module
    from scaffpd.run.settings.federation import FederationFile

    project = engine_module("flare", "provision")
    file = FederationFile.read(federation)
    server = _server(file, out)
    described = project.FlareProject(
        file.name, list(file.silos), server.host, server.port, server.admin_port, file.faults.quorum
    )
    written = project.write_project(described, out, file.path)
    if provision:
        parts = project.write_parts(described, out, file.path)
        own = project.COORDINATOR
        _steps(
            "1. Send every silo its folder over a channel that you trust: it holds a private key",
            tuple(str(parts / name) for name in file.silos),
        )
        _steps(
            "2. At every silo, NAME being its own, beside its data",
            (
                "cp silo.toml NAME/",
                "scaffpd silo check NAME/silo.toml",
                "scaffpd deploy start NAME --serve 9465",
            ),
        )
        _steps(
            "3. At the server",
            (
                f"scaffpd deploy start {parts / own} --serve 9464",
                f"scaffpd deploy resume {parts / own}",
            ),
        )
        return
    *before, last = written.coordinator
    _steps("1. At the coordinator", tuple(before))
    _steps("2. At every silo, NAME being its own", written.silo)
    _steps("3. At the server, to start the run or to go on with it", (last,))


def status(
    folder: Annotated[Path, typer.Argument(help="The run's folder, or its federation.toml.")],
    serve: Serve = None,
    host: Host = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Say how a run goes, from another shell while it does; or serve that, with its report at /, refreshed.

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
        raise InputError("run-status", f"There is no run in {str(place)!r}.")
    run = DeployedRun(place)
    if serve is not None:
        serve_pages(run_pages(run), host, serve)
    else:
        typer_ext.tell(run.status(), _show_status, as_json)


def run_pages(run: DeployedRun) -> dict[str, Callable[[], str]]:
    """Return what is served of a run: its report, numbers for Prometheus, its state in a word, and that this is up."""
    from scaffpd.deploy.deployed_record import deployed_record
    from scaffpd.deploy.deployed_run import run_metrics
    from scaffpd.run import page as report
    from scaffpd.run.page.several import SideBySide

    def page() -> str:
        text = report.page(SideBySide(deployed_record(run)), report.library())
        again = f'<head><meta http-equiv="refresh" content="{REFRESH}">'
        return text if run.final() else text.replace("<head>", again, 1)

    health = {"/healthz": lambda: run.status()["state"] + "\n", "/livez": lambda: "up\n"}
    return {"/": page, "/metrics": lambda: run_metrics(run.status()), **health}


def serve_pages(pages: Mapping[str, Callable[[], str]], host: str, port: int) -> None:
    """Serve pages until somebody ends it."""
    from scaffpd.training.trackers import page_server

    with page_server(pages, host, port) as server:
        paths = " and ".join(f"http://{host}:{server.server_port}{path}" for path in pages)
        typer.echo(f"Serving {paths}. Ctrl-C ends it.", err=True)
        server.serve_forever()


def _show_status(now: Mapping[str, Any]) -> None:
    from rich.console import Console

    from scaffpd.cli.screens import bullets, facts
    from scaffpd.numbers import format_bytes

    console = Console(highlight=False)
    gap = now["certificate"]
    quiet = (
        "" if now["quiet_seconds"] is None else f", last heard of {now['quiet_seconds']:.0f} s ago"
    )
    each = now["seconds_per_exchange"]
    lines = {
        "state": f"{now['state']}{quiet}",
        "round": str(now["round"]),
        "certified gap": "none" if gap is None else f"{gap:.2e}",
        "silos": ", ".join(now["members"]) or "none yet",
        "away": ", ".join(now["absent"]) or "nobody",
        "exchanges": str(now["exchanges"]) + ("" if each is None else f", {each:.2g} s each"),
        "bytes": f"{format_bytes(now['messages_up'])} up, {format_bytes(now['messages_down'])} down",
    }
    facts(console, lines)
    if now["events"]:
        console.print("\nWhat happened last", style="bold")
        bullets(
            console, [f"round {event['round']}: {event['sentence']}" for event in now["events"]]
        )
    if now["sentence"]:
        console.print(f"\n{now['sentence']}", markup=False)


deploy = group(
    """Across real organisations, on NVIDIA FLARE.

    Examples:
        scaffpd deploy local
    """,
    *(local, resume, status, start, flare),
)


def _positive(seconds: float) -> None:
    if not seconds > 0:
        raise InputError("deploy-seconds", f"deploy needs --seconds > 0, got {seconds!r}.")


def _server(file: FederationFile, out: Path) -> Server:
    """Return the server's address, and warn where only this machine can reach it."""
    from scaffpd.deploy.local import checked_folder

    checked_folder(out)
    if file.server.host == "localhost":
        typer.secho(
            "[server] host is localhost: only silos on this machine can reach it.",
            fg="yellow",
            err=True,
        )
    return file.server


def _steps(title: str, lines: tuple[str, ...]) -> None:
    typer.secho(f"\n{title}", bold=True)
    for line in lines:
        typer.echo(f"  {line}")


def _see_through(deployment: Any, seconds: float, keep: bool, quiet: bool) -> None:
    from scaffpd.deploy.deployed_run import DeployedRun
    from scaffpd.run.settings.federation import FederationFile

    file = FederationFile.read(deployment.federation)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # whoever ends this ends the processes as well
    with _screen(file, quiet) as screen:
        try:
            outcome = deployment.run(screen.watch, screen.say, seconds, keep)
        except KeyboardInterrupt:
            done = DeployedRun(file.folder).seen()
            screen.say(
                f"Stopped after round {done}. Go on with: scaffpd deploy resume {deployment.folder}"
            )
            raise
    _end(screen, outcome, file.folder)


def _supervise(federation: Path, kit: Path, job: Path, seconds: float, quiet: bool) -> None:
    from scaffpd.deploy.deployed_run import PROGRESS, DeployedRun
    from scaffpd.deploy.local import engine_module, follower
    from scaffpd.run.settings.federation import FederationFile

    production = engine_module("flare", "admin")
    file = FederationFile.read(federation)
    with _screen(file, quiet) as screen:
        follow = follower(DeployedRun(file.folder).path / PROGRESS, screen.watch)
        outcome = production.resume(kit, job, file, seconds, screen.say, follow)
        follow()
    _end(screen, outcome, file.folder)


def _screen(file: FederationFile, quiet: bool) -> RoundsScreen:
    from scaffpd.cli.screens import RoundsScreen

    screen = RoundsScreen(quiet, errors=False, pause=0.0)
    screen.begin("", file.silos, file.training.rounds, file.training.tol)
    return screen


def _end(screen: RoundsScreen, outcome: Outcome, folder: Path) -> None:
    """Show the result; exit code 1 where there is none."""
    if screen.line:
        screen.console.print(screen.picture())
    screen.say(outcome.sentence)
    if outcome.status != "failed":
        screen.say(f"Results: {folder}\nTo look at: scaffpd report {folder}")
    if outcome.status in ("failed", "paused", "diverged"):
        raise typer.Exit(1)
