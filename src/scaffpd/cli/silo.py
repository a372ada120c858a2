"""`scaffpd silo`: what the operator of a site needs before joining a federation."""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from scaffpd.cli.results import write_predictions
from scaffpd.cli.screens import bullets, facts, print_table, printable, say, section
from scaffpd.cli.typer_ext import FAILED, AsJson, group, print_json
from scaffpd.errors import InputError
from scaffpd.numbers import several

if TYPE_CHECKING:
    from scaffpd.deploy.processes import Processes
    from scaffpd.run.settings.silo import SiloFile

SiloToml = Annotated[
    Path, typer.Argument(help="The silo.toml of this site, or its folder.", show_default=False)
]

MOST = 40  # columns of data that are listed
SHOWN = 12  # digits of a hash
WAIT = 15.0  # seconds without a connection, after which to say why
REGISTERED = b"Successfully registered client"  # in FLARE's log
Overview = Mapping[str, Any]  # JSON values that `deploy.silo` has checked and written


def _settings(file: Path) -> SiloFile:
    from scaffpd.run.settings.silo import SiloFile

    return SiloFile.read(file / "silo.toml" if file.is_dir() else file)


def check(file: SiloToml, as_json: AsJson = False) -> None:
    """Read the data; show what was found, how to declare it, and this silo's key. Send nothing.

    The fingerprint of the key is for the other operators to compare.

    Examples:
        scaffpd silo check silo.toml
        scaffpd silo check silo.toml --json
    """
    from scaffpd.deploy.check import site_overview
    from scaffpd.deploy.dataset import Dataset
    from scaffpd.files import SECRET_BYTES, load_or_create

    settings = _settings(file)
    made = settings.identity.exists()
    secret = load_or_create(settings.identity) if made else token_bytes(SECRET_BYTES)
    data = Dataset.read(settings, secret)
    load_or_create(settings.identity, secret)  # what cannot be read leaves no file behind
    found = site_overview(settings, data)
    print_json(found) if as_json else _show_check(found)
    data.check(settings.limits)


def start(file: SiloToml) -> None:
    """Connect this site to its server and take part in the runs that it agrees to, until ended.

    It runs in the foreground, for a service manager or a shell, and says what happens.

    Examples:
        scaffpd silo start silo.toml
    """
    from scaffpd.deploy.flare.serving import CONSOLE, KIT, address, expiry_warning, served

    settings = _settings(file)
    kit = settings.path.parent / KIT
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with served(settings.path, settings.name) as processes:
            say = partial(print, flush=True)
            host, port = address(kit)
            say(f"Silo {settings.name!r} connects to {host}:{port}; FLARE's log is {kit}/log.txt.")
            if warning := expiry_warning(settings.path):
                say(warning)
            _report(settings, processes, kit, say)
    except KeyboardInterrupt:
        return  # whoever ends a service wants it to end
    typer.secho(f"FLARE has ended; {kit}/log.txt and {CONSOLE} say why.", fg="red", err=True)
    raise typer.Exit(FAILED)


def _report(
    settings: SiloFile, processes: Processes, kit: Path, say: Callable[[str], object]
) -> None:
    """Say what FLARE's log and the silo's records say, until FLARE ends."""
    from scaffpd.deploy.flare.serving import trouble
    from scaffpd.deploy.records import ASKED, BEGUN, SiloRecords
    from scaffpd.files import JsonLines
    from scaffpd.run.settings.silo import ASK

    records = JsonLines(settings.records)
    records.skip()
    log = kit / "log.txt"
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
            found = trouble(kit)
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
        for line in records.read():
            digest = line["agreement"]
            waits = settings.agree == ASK and SiloRecords(settings.records).granted(digest) is None
            if line["what"] in sentences and (waits or line["what"] == BEGUN):
                say(f"{sentences[line['what']]}{digest[:SHOWN]}")


def agree(
    file: SiloToml,
    grant: Annotated[
        str, typer.Option(help="Agree to this run; the first digits of its hash are enough.")
    ] = "",
    revoke: Annotated[str, typer.Option(help="Withdraw from this run before its next epoch.")] = "",
    as_json: AsJson = False,
) -> None:
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
    known = records.documents()
    wanted = grant or revoke
    if grant and revoke:
        raise InputError("grant-and-revoke", "Give --grant or --revoke, not both.")
    if wanted:
        matching = [digest for digest in known if digest.startswith(wanted.lower())]
        if len(matching) != 1:
            names = ", ".join(matching or (digest[:SHOWN] for digest in known))
            raise InputError(
                "no-such-agreement",
                f"{wanted!r} does not name a single agreement: {names or 'none has arrived'}.",
            )
        records.note(GRANTED if grant else REVOKED, matching[0], by=_account())
        known = {matching[0]: known[matching[0]]}
    states = {True: "agreed to", False: "withdrawn from", None: "waiting"}
    shown = [
        {
            "agreement": digest,
            "state": states[records.granted(digest)],
            **Agreement(document).summary(settings.path, records.begun()),
        }
        for digest, document in known.items()
    ]
    print_json(shown) if as_json else show_agreements(shown)


def _account() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name  # whatever the environment says
    except KeyError:  # an account without a name, as containers may have
        return f"user {os.getuid()}"


def audit(
    file: SiloToml,
    noted: Annotated[
        str, typer.Option(help="A link that was noted down earlier and must be in the records.")
    ] = "",
    as_json: AsJson = False,
) -> None:
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


def predict(
    file: SiloToml,
    model: Annotated[Path, typer.Argument(help="A run's model.safetensors.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path("predictions.csv"),
) -> None:
    """Apply a trained model to this site's own rows; nothing is sent.

    Examples:
        scaffpd silo predict silo.toml run/model.safetensors --out predictions.csv
    """
    from scaffpd.deploy.dataset import Dataset, Wanted
    from scaffpd.deploy.dataset import predict as predicted
    from scaffpd.files import load_or_create
    from scaffpd.run.settings.model_file import read_model

    x, setup = read_model(model)
    settings = _settings(file)
    secret = load_or_create(settings.identity)
    data = Dataset.read(settings, secret, Wanted.of(setup.schema, setup.task))
    write_predictions(out, {**predicted(data, x, setup)})


silo = group(
    """At a site: check its data, start it, agree to runs, and see what has left.

    Examples:
        scaffpd silo check silo.toml
    """,
    *(check, start, agree, audit, predict),
)


def _show_check(found: Overview) -> None:
    console = Console(highlight=False)
    console.print(f"Silo {found['silo']}", style="bold", markup=False)
    rows = found["rows"]
    lines = {
        "task": found["task"],
        "rows": f"{rows['train']} to train on, {rows['test']} held out",
        "key": found["fingerprint"],
    }
    if found["missing"] is not None:
        lines["missing"] = f"{found['missing']} values"
    if found["target"] is not None:
        values = (f"{name} {value:.6g}" for name, value in found["target"].items())
        lines["target"] = ", ".join(values)
    facts(console, lines)
    if found["labels"]:
        console.print()
        labels = [[str(v) for v in entry.values()] for entry in found["labels"][:MOST]]
        print_table(console, ("label", "training", "held out"), labels)
    if found["columns"]:
        console.print()
        columns = [[str(v) for v in entry.values()] for entry in found["columns"][:MOST]]
        print_table(console, ("column", "kind", "missing", "categories"), columns)
        if len(found["columns"]) > MOST:
            console.print(f"and {len(found['columns']) - MOST} more (--json lists all)")
    if found["warnings"]:
        section(console, "Look at this")
        bullets(console, found["warnings"])
    if found["dictionary"]:
        section(console, "These columns in federation.toml, for all silos to agree on")
        typer.echo("\n".join(found["dictionary"]))


def _show_audit(found: Overview) -> None:
    from scaffpd.numbers import format_bytes

    console = Console(highlight=False)
    for run in found["runs"]:
        section(
            console,
            f"Agreement {run['agreement'][:SHOWN]}",
            f"{run['from'][:19]} to {run['to'][:19]} UTC, {several(run['epochs'], 'epoch')}, "
            f"{run.get('decision', 'no decision')}.",
        )
        rows = [
            [kind, f"{count:,}", format_bytes(size)] for kind, (count, size) in run["posts"].items()
        ]
        print_table(console, ("what left", "posts", "bytes"), rows)
    if not found["runs"]:
        say(console, "Nothing has left this site yet.")
    else:
        section(
            console,
            None,
            "No line was changed. Note down the last link, below: --noted will show later that "
            "nothing before it was removed.",
        )
        typer.echo(found["link"])


def show_agreements(known: Sequence[Overview]) -> None:
    """Show what every run asks for, and what became of that."""
    console = Console(highlight=False)
    if not known:
        say(console, "No run has asked anything of this site yet.")
    for own in known:
        noise = own["noise"]
        lines = {
            "is": own["state"],
            "federation": own["federation"],
            "columns": ", ".join(own["columns"]),
            "model": own["model"],
            "method": f"{own['method']}, {own['rounds']} rounds at most",
            "noise": "none" if noise is None else f"ε = {noise[0]}, δ = {noise[1]}",
            "code": ", ".join(own["code"]) or "the package's own",
        }
        section(console, f"Agreement {own['agreement'][:SHOWN]}")
        facts(console, {name: printable(text) for name, text in lines.items()})
        section(console, "Members and fingerprints of their keys")
        facts(console, own["silos"])
        section(console, "What leaves this site")
        bullets(console, own["leaves"])
