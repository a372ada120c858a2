"""`scaffpd silo`: what the operator of a site needs before joining a federation."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from scaffpd.cli.results import Columns, write_predictions
from scaffpd.cli.screens import bullets, facts, print_table, printable, say, section
from scaffpd.cli.typer_ext import AsJson, group, print_json
from scaffpd.errors import InputError
from scaffpd.files import write_file
from scaffpd.numbers import several

if TYPE_CHECKING:
    from scaffpd.run.settings.silo import SiloFile

SiloToml = Annotated[Path, typer.Argument(help="The silo.toml of this site.", show_default=False)]

MOST = 40  # columns of data that are listed
Overview = Mapping[str, Any]  # JSON values that `deploy.silo` has checked and written


def _settings(file: Path) -> SiloFile:
    from scaffpd.run.settings.silo import SiloFile

    return SiloFile.read(file)


def init(
    out: Annotated[
        Path, typer.Option(help="The file to write; an existing one is left alone.")
    ] = Path("silo.toml"),
) -> None:
    """Write a silo.toml to fill in.

    Examples:
        scaffpd silo init --out silo.toml
    """
    if out.exists():
        raise InputError("file-exists", f"{str(out)!r} already exists: choose another --out.")
    template = files("scaffpd.run.settings").joinpath("silo.toml")
    write_file(out, template.read_text(encoding="utf-8"))
    typer.echo(f"Written to {out}. Fill it in, then run: scaffpd silo check {out}")


def check(file: SiloToml, as_json: AsJson = False) -> None:
    """Read the data, and show what would leave this site and what never does; nothing is sent.

    Examples:
        scaffpd silo check silo.toml
        scaffpd silo check silo.toml --json
    """
    from scaffpd.deploy.silo.check import site_overview
    from scaffpd.deploy.silo.dataset import Dataset

    settings = _settings(file)
    data = Dataset.read(settings)
    found = site_overview(settings, data)
    print_json(found) if as_json else _show_check(found)
    data.check(settings.limits)


def key(file: SiloToml) -> None:
    """Make this silo's key for secure sums if it has none; show the fingerprint for others to pin.

    Examples:
        scaffpd silo key silo.toml
    """
    from scaffpd.secure.masking import Identity

    settings = _settings(file)
    typer.echo(Identity.stored(settings.name, settings.identity).card.fingerprint)


def audit(
    file: SiloToml,
    noted: Annotated[
        str, typer.Option(help="A link that was noted down earlier and must be in the log.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check this site's log link by link; show what has left in every run and what was refused.

    Examples:
        scaffpd silo audit silo.toml
        scaffpd silo audit silo.toml --json
    """
    from scaffpd.deploy.silo import records as log

    found = log.audit(_settings(file).audit, noted)
    print_json(found) if as_json else _show_audit(found)
    if not found["whole"]:
        raise InputError("broken-audit", found["broken"])


def consent(
    file: SiloToml,
    grant: Annotated[
        str, typer.Option(help="Agree to this request; its first digits are enough.")
    ] = "",
    revoke: Annotated[
        str, typer.Option(help="Withdraw consent to this request, also while its run goes on.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show what runs ask of this site; agree to one, or withdraw, from any shell.

    Examples:
        scaffpd silo consent silo.toml
        scaffpd silo consent silo.toml --json
    """
    from scaffpd.deploy.silo.records import SHOWN, decide, requests

    settings = _settings(file)
    wanted = grant or revoke
    known = requests(settings)
    if grant and revoke:
        raise InputError("grant-and-revoke", "Give --grant or --revoke, not both.")
    if wanted:
        matching = [own["request"] for own in known if own["request"].startswith(wanted.lower())]
        if len(matching) != 1:
            names = ", ".join(matching or (own["request"][:SHOWN] for own in known))
            raise InputError(
                "no-such-request",
                f"{wanted!r} is not the beginning of one request: {names or 'none has come yet'}.",
            )
        try:
            account = pwd.getpwuid(os.getuid()).pw_name  # whatever the environment says
        except KeyError:  # an account without a name, as containers may have
            account = f"user {os.getuid()}"
        decide(settings.consents, matching[0], bool(grant), account)
        known = [own for own in requests(settings) if own["request"] == matching[0]]
    print_json(known) if as_json else show_requests(known)


def predict(
    file: SiloToml,
    model: Annotated[Path, typer.Argument(help="A run's model.safetensors.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path("predictions.csv"),
) -> None:
    """Apply a trained model to this site's own rows; nothing is sent.

    Examples:
        scaffpd silo predict silo.toml run/model.safetensors --out predictions.csv
    """
    from scaffpd.deploy.silo import dataset
    from scaffpd.run.settings.model_file import read_model

    x, setup = read_model(model)
    found = dataset.predict(dataset.Dataset.read(_settings(file)), x, setup)
    columns: Columns = {
        "target": found.targets,
        "predicted": found.predicted,
        "probability": found.probability,
        "held out": found.held.tolist(),
    }
    write_predictions(out, columns)


silo = group(
    """Prepare a site: write its file, and see what would leave it.

    Examples:
        scaffpd silo init
    """,
    *(init, check, key, consent, audit, predict),
)


def _show_check(found: Overview) -> None:
    """Show what was found in the data, and what would leave the site."""
    console = Console(highlight=False)
    console.print(f"Silo {found['silo']}", style="bold", markup=False)
    rows = found["rows"]
    features = found["features"]
    prepared = found["task"] == "prepared"
    size = f"{several(features['columns'], 'column')}, {features['encoded']} once encoded"
    lines = {
        "task": "the entry's own Cohort" if prepared else found["task"],
        "rows": f"{rows['train']} to train on, {rows['test']} held out",
        "features": f"a model of {several(features['encoded'], 'parameter')}" if prepared else size,
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
        print_table(console, ("column", "kind", "missing", "categories", "withheld"), columns)
        if len(found["columns"]) > MOST:
            console.print(f"and {len(found['columns']) - MOST} more (--json lists all)")
    titles = {
        "warnings": "Look at this",
        "leaves": "What leaves this site",
        "stays": "What never leaves",
        "dishonest": "If the coordinator is dishonest",
    }
    for part, title in titles.items():
        if found[part]:
            section(console, title)
            bullets(console, found[part])


def _show_audit(found: Overview) -> None:
    """Show what has left, run by run."""
    from scaffpd.numbers import format_bytes

    console = Console(highlight=False)
    for run in found["runs"]:
        title = f"Run {run['run'][:12]}, {run['algorithm']}" if run["run"] else "Before a run"
        how = [word for word, key in (("masked", "masked"), ("noisy", "private")) if run[key]]
        vectors = f"; vectors were {' and '.join(how) or 'in the clear'}" if run["run"] else ""
        spent = f", ε = {run['epsilon']:.3g} spent" if run["epsilon"] is not None else ""
        section(console, title, f"{run['from'][:19]} to {run['to'][:19]} UTC{vectors}{spent}.")
        rows = []
        for row in run["questions"]:
            counts = (f"{row[name]:,}" for name in ("asked", "answered", "numbers"))
            rows.append([row["what"], *counts, format_bytes(row["bytes"])])
        print_table(console, ("what left", "asked", "answered", "numbers", "bytes"), rows)
    if found["refused"]:
        section(console, "Refused")
        refused = found["refused"].items()
        bullets(console, [f"{several(count, 'time')}: {why}" for why, count in refused])
    if not found["lines"]:
        say(console, "Nothing has left this site yet.")
    elif found["whole"]:
        section(
            console,
            None,
            f"All {several(found['lines'], 'reply')}, {format_bytes(found['bytes'])} in all, are "
            "accounted for, and no line was changed. Note down the last link, below: --noted will "
            "show later that nothing before it was removed.",
        )
        typer.echo(found["link"])


def show_requests(known: Sequence[Overview]) -> None:
    """Show what every run asks for, and what became of that."""
    from scaffpd.deploy.silo.records import SHOWN

    console = Console(highlight=False)
    if not known:
        say(console, "No run has asked anything of this site yet.")
    for own in known:
        asks = own["asks"]
        noise = f"ε = {asks['epsilon']}, δ = {asks['delta']}"
        lines = {
            "is": own["state"],
            "federation": f"{asks['federation']}, with {', '.join(asks['silos'])}",
            "model": f"{asks['model'].get('kind', 'linear')} {asks['model'].get('loss', '')}",
            "columns": ", ".join(own["columns"]) or "not agreed on yet: at most those of silo.toml",
            "method": f"{asks['algorithm']}, {asks['rounds']} rounds at most",
            "objective": asks["objective"] or "none",
            "vectors": "masked" if asks["secure"] else "in the clear",
            "noise": "none" if asks["epsilon"] is None else noise,
            "asked": f"{own['first'][:19]} to {own['last'][:19]} UTC",
        }
        section(console, f"Request {own['request'][:SHOWN]}")
        facts(console, {name: printable(text) for name, text in lines.items()})
