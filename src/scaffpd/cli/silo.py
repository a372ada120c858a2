"""`scaffpd silo`: what the operator of a site needs before joining a federation."""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scaffpd.cli.commands import (
    PATH,
    ExitCode,
    argument,
    as_json,
    command,
    group,
    option,
    print_json,
)
from scaffpd.cli.results import write_predictions
from scaffpd.cli.screens import bullets, facts, print_table, printable, say, section, terminal
from scaffpd.errors import InputError
from scaffpd.numbers import several

if TYPE_CHECKING:
    from scaffpd.deploy.processes import Processes
    from scaffpd.fields import Json
    from scaffpd.settings.silo import SiloFile

silo_file = argument("file", type=PATH, help="The silo.toml of this site, or its folder.")
MOST = 40  # columns of data that are listed
SHOWN = 12  # digits of a hash
WAIT = 15.0  # seconds without a connection, after which to say why
REGISTERED = b"Successfully registered client"  # in FLARE's log


def _settings(file: Path) -> SiloFile:
    from scaffpd.settings.silo import SiloFile

    return SiloFile.read(file / "silo.toml" if file.is_dir() else file)


@command()
@silo_file
@as_json
def check(file: Path, as_json: bool) -> None:
    """Read the data; show what was found, how to declare it, and this silo's key. Send nothing.

    The fingerprint of the key is for the other operators to compare.

    Examples:
        scaffpd silo check silo.toml
        scaffpd silo check silo.toml --json
    """
    from scaffpd.deploy.check import site_overview
    from scaffpd.deploy.dataset import Dataset
    from scaffpd.files import load_or_create

    settings = _settings(file)
    data = Dataset.read(settings)
    load_or_create(settings.identity)  # what cannot be read leaves no file behind
    found = site_overview(settings, data)
    print_json(found) if as_json else _show_check(found)
    data.check(settings.limits)


@command()
@silo_file
def start(file: Path) -> None:
    """Connect this site to its server and take part in the runs that it agrees to, until ended.

    It runs in the foreground, for a service manager or a shell, and says what happens.

    Examples:
        scaffpd silo start silo.toml
    """
    from scaffpd.deploy.flare.kit import address
    from scaffpd.deploy.flare.serving import CONSOLE, KIT, expiry_warning, log_file, served

    settings = _settings(file)
    kit = settings.path.parent / KIT
    log = log_file(settings.path, settings.name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with served(settings.path, settings.name) as processes:
            say = partial(print, flush=True)
            host, port = address(kit)
            say(f"Silo {settings.name!r} connects to {host}:{port}; FLARE's log is {log}.")
            if warning := expiry_warning(settings.path):
                say(warning)
            _report(settings, processes, say)
    except KeyboardInterrupt:
        return  # whoever ends a service wants it to end
    click.secho(f"FLARE has ended; {log} and {CONSOLE} say why.", fg="red", err=True)
    raise click.exceptions.Exit(ExitCode.FAILED)


def _report(settings: SiloFile, processes: Processes, say: Callable[[str], object]) -> None:
    """Say what FLARE's log and the silo's records say, until FLARE ends."""
    from scaffpd.deploy.flare.serving import KIT, log_file, trouble
    from scaffpd.deploy.records import ASKED, BEGUN, SiloRecords
    from scaffpd.files import JsonLines
    from scaffpd.settings.silo import ASK

    records = JsonLines(settings.records)
    records.skip()
    log = log_file(settings.path, settings.name)
    place = log.stat().st_size if log.exists() else 0
    sentences = {
        ASKED: f"A run asks this silo: scaffpd silo agree {settings.path} --grant ",
        BEGUN: "This silo takes part in run ",
    }
    connected = False
    why = ""
    look = time.monotonic() + WAIT
    while processes.alive():
        time.sleep(1.0)
        if not connected and time.monotonic() > look:
            look = time.monotonic() + WAIT
            found = trouble(settings.path.parent / KIT)
            if found != why:
                say(found or "The server answers.")
            why = found
        if log.exists():
            with log.open("rb") as lines:
                lines.seek(min(place, log.stat().st_size))  # FLARE begins anew at some size
                if REGISTERED in lines.read():
                    connected = True
                    say("Connected.")
                place = lines.tell()
        new = [(line["what"], line["agreement"]) for line in records.read()]
        waiting = SiloRecords(settings.records).known().waiting if new else set()
        for what, digest in new:
            if what == BEGUN or (what == ASKED and settings.agree == ASK and digest in waiting):
                say(f"{sentences[what]}{digest[:SHOWN]}")


@command()
@silo_file
@option("--grant", default="", help="Agree to this run; the first digits of its hash are enough.")
@option("--revoke", default="", help="Withdraw from this run before its next epoch.")
@as_json
def agree(file: Path, grant: str, revoke: str, as_json: bool) -> None:
    """Show what runs ask of this site and what would leave; agree to one, or withdraw.

    Compare the fingerprints with what the other operators say on the telephone.

    Examples:
        scaffpd silo agree silo.toml
        scaffpd silo agree silo.toml --json
    """
    from scaffpd.deploy.agreement import Agreement
    from scaffpd.deploy.records import GRANTED, REVOKED, SiloRecords

    settings = _settings(file)
    records = SiloRecords(settings.records)
    known = records.known()
    documents = known.documents
    wanted = grant or revoke
    if grant and revoke:
        raise InputError("grant-and-revoke", "Give --grant or --revoke, not both.")
    if wanted:
        matching = [digest for digest in documents if digest.startswith(wanted.lower())]
        if len(matching) != 1:
            names = ", ".join(digest[:SHOWN] for digest in matching or documents)
            raise InputError(
                "no-such-agreement",
                f"{len(matching) or 'No'} agreement{'s' * (len(matching) > 1)} "
                f"begin{'s' * (len(matching) < 2)} with {wanted!r}: "
                f"there are {names or 'none yet'}.",
            )
        records.note(GRANTED if grant else REVOKED, matching[0], by=_account())
        known = records.known()
        documents = {matching[0]: documents[matching[0]]}
    states = {True: "agreed to", False: "withdrawn from", None: "waiting"}
    shown = []
    for digest, document in documents.items():
        own = {"agreement": digest, "state": states[known.granted.get(digest)]}
        try:
            shown.append(own | Agreement(document).summary(settings, known.begun))
        except InputError as error:  # of another version, or of other limits
            shown.append(own | {"unusable": str(error)})
    print_json(shown) if as_json else show_agreements(shown)


def _account() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name  # whatever the environment says
    except KeyError:  # an account without a name, as containers may have
        return f"user {os.getuid()}"


@command()
@silo_file
@option("--noted", default="", help="A link that was noted earlier and must be in the records.")
@as_json
def audit(file: Path, noted: str, as_json: bool) -> None:
    """Check this site's records link by link; show what has left in every run.

    Examples:
        scaffpd silo audit silo.toml
        scaffpd silo audit silo.toml --json
    """
    from scaffpd.deploy.records import SiloRecords
    from scaffpd.deploy.records import audit as audited

    lines = SiloRecords(_settings(file).records).read()
    found = {"runs": audited(lines, noted), "link": lines[-1]["link"] if lines else ""}
    print_json(found) if as_json else _show_audit(found)


@command()
@silo_file
@argument("model", type=PATH, help="A run's model.safetensors.")
@option("--out", type=PATH, default=Path("predictions.csv"), help="The CSV file to write.")
def predict(file: Path, model: Path, out: Path) -> None:
    """Apply a trained model to this site's own rows; nothing is sent.

    Examples:
        scaffpd silo predict silo.toml run/model.safetensors --out predictions.csv
    """
    from scaffpd.deploy.dataset import Dataset
    from scaffpd.deploy.dataset import predict as predicted
    from scaffpd.deploy.tables import Wanted
    from scaffpd.settings.model_file import read_model

    x, setup = read_model(model)
    curved = any("steps" in column for column in setup.schema["columns"])
    loss = str(setup.model.get("loss", ""))
    wanted = Wanted.of(setup.schema, setup.task, bool(setup.privacy), curved, loss)
    data = Dataset.read(_settings(file), wanted)
    write_predictions(out, {**predicted(data, x, setup)})


silo = group(
    "silo",
    """At a site: check its data, start it, agree to runs, and see what has left.

    Examples:
        scaffpd silo check silo.toml
    """,
    *(check, start, agree, audit, predict),
)


def _show_check(found: Json) -> None:
    console = terminal()
    console.print(f"Silo {found['silo']}", style="bold", markup=False)
    rows = found["rows"]
    lines = {
        "task": found["task"],
        "rows": f"{rows['train']} to train on, {rows['test']} held out, {found['dealt']}",
        "key": found["fingerprint"],
    }
    if found["missing"] is not None:
        lines["missing"] = f"{found['missing']} values"
    if found["target"] is not None:
        values = (f"{name} {value:.6g}" for name, value in found["target"].items())
        lines["target"] = ", ".join(values)
    facts(console, lines)
    heads = {
        "labels": ("label", "training", "held out"),
        "columns": ("column", "kind", "missing", "categories"),
    }
    for name, head in heads.items():
        if entries := found[name]:
            console.print()
            print_table(console, head, [[*map(str, one.values())] for one in entries[:MOST]])
            if len(entries) > MOST:
                console.print(f"and {len(entries) - MOST} more (--json lists all)")
    if found["warnings"]:
        section(console, "Look at this")
        bullets(console, found["warnings"])
    if found["dictionary"]:
        section(console, "These columns in federation.toml, for all silos to agree on")
        click.echo("\n".join(found["dictionary"]))


def _show_audit(found: Json) -> None:
    from scaffpd.numbers import format_bytes

    console = terminal()
    for run in found["runs"]:
        section(
            console,
            f"Agreement {run['agreement'][:SHOWN]}",
            f"{run['from'][:19]} to {run['to'][:19]} UTC, {several(run['epochs'], 'epoch')}, "
            f"{run.get('decision', 'no decision')}.",
        )
        posts = run["posts"].items()
        rows = [[kind, f"{count:,}", format_bytes(size)] for kind, (count, size) in posts]
        print_table(console, ("what left", "posts", "bytes"), rows)
    if not found["runs"]:
        say(console, "Nothing has left this site yet.")
    else:
        more = "--noted will show later that nothing before it was removed."
        section(console, None, f"No line was changed. Note down the last link, below: {more}")
        click.echo(found["link"])


def show_agreements(known: Sequence[Json]) -> None:
    """Show what every run asks for, and what became of that."""
    console = terminal()
    if not known:
        say(console, "No run has asked anything of this site yet.")
    for own in known:
        section(console, f"Agreement {own['agreement'][:SHOWN]}")
        if "unusable" in own:
            facts(console, {"is": own["state"], "unusable": printable(own["unusable"])})
            continue
        noise = own["noise"]
        lines = {
            "is": own["state"],
            "federation": own["federation"],
            "columns": ", ".join(own["columns"]),
            "model": own["model"],
            "method": f"{own['method']}, {own['rounds']} rounds at most",
            "objective": own["objective"] or "the method's own",
            "noise": "none" if noise is None else f"ε = {noise[0]}, δ = {noise[1]}",
            "code": ", ".join(own["code"]) or "the package's own",
        }
        facts(console, {name: printable(text) for name, text in lines.items()})
        section(console, "Members and fingerprints of their keys")
        facts(console, own["silos"])
        section(console, "What leaves this site")
        bullets(console, own["leaves"])
