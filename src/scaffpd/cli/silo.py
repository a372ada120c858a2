"""`scaffpd silo`: what the operator of a site needs before joining a federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from scaffpd.cli.results import write_predictions
from scaffpd.cli.screens import bullets, facts, plain_table, printable, say
from scaffpd.cli.typer_ext import AsJson, group, tell, write_template
from scaffpd.errors import InputError
from scaffpd.numbers import several

if TYPE_CHECKING:
    from scaffpd.run.settings.silo import SiloFile

SiloToml = Annotated[Path, typer.Argument(help="The silo.toml of this site.", show_default=False)]

MOST = 40  # columns of data that are listed


def _settings(file: Path) -> SiloFile:
    from scaffpd.run.settings.silo import SiloFile

    return SiloFile.read(file)


def init(
    out: Annotated[
        Path, typer.Option(help="The file to write; one that is there is left alone.")
    ] = Path("silo.toml"),
) -> None:
    """Write a silo.toml to fill in.

    Examples:
        scaffpd silo init --out silo.toml
    """
    write_template("silo.toml", out, "Fill it in, then run: scaffpd silo check")


def check(file: SiloToml, as_json: AsJson = False) -> None:
    """Read the data, show what was found, what would leave this site and what never does; nothing is sent.

    Examples:
        scaffpd silo check silo.toml
        scaffpd silo check silo.toml --json
    """
    from scaffpd.deploy.silo.check import site_overview
    from scaffpd.deploy.silo.dataset import Dataset

    settings = _settings(file)
    data = Dataset.read(settings)
    found = site_overview(settings, data)
    tell(found, show_check, as_json)
    data.check(settings.limits)


def key(file: SiloToml) -> None:
    """Make this silo's key for secure sums, if it has none, and show the print by which others can pin it.

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
    """Check this site's log link by link, and show what has left in every run and what was refused.

    Examples:
        scaffpd silo audit silo.toml
        scaffpd silo audit silo.toml --json
    """
    from scaffpd.deploy.silo import records as log

    found = log.audit(_settings(file).audit, noted)
    tell(found, show_audit, as_json)
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
    """Show what runs ask of this site and what became of each; agree to one, or withdraw, from any shell.

    Examples:
        scaffpd silo consent silo.toml
        scaffpd silo consent silo.toml --json
    """
    from scaffpd.deploy.silo.records import SHOWN, decide, requests

    settings = _settings(file)
    wanted = grant or revoke
    known = requests(settings)
    if grant and revoke:
        raise InputError("give-grant-revoke", "Give --grant or --revoke, not both.")
    if wanted:
        matching = [own["request"] for own in known if own["request"].startswith(wanted.lower())]
        if len(matching) != 1:
            names = (
                ", ".join(matching or (own["request"][:SHOWN] for own in known))
                or "none has come yet"
            )
            raise InputError(
                "beginning-request", f"{wanted!r} is not the beginning of one request: {names}."
            )
        decide(settings.consents, matching[0], bool(grant), _account())
        known = [own for own in requests(settings) if own["request"] == matching[0]]
    tell(known, show_requests, as_json)


def _account() -> str:
    """Name the account that runs this command, whatever the environment says."""
    import os
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # an account without a name, as containers may have
        return f"user {os.getuid()}"


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
    columns: dict[str, Any] = {
        "target": found.targets,
        "predicted": found.predicted,
        "probability": found.probability,
    }
    write_predictions(out, columns | {"held out": found.held.tolist()})


silo = group(
    """Prepare a site: write its file, and see what would leave it.

    Examples:
        scaffpd silo init
    """,
    *(init, check, key, consent, audit, predict),
)


def show_check(found: dict[str, Any]) -> None:
    """Show what was found in the data, and what would leave the site."""
    console = Console(highlight=False)
    console.print(f"Silo {found['silo']}", style="bold", markup=False)
    facts(console, _facts(found))
    if found["labels"]:
        console.print("\nLabels", style="bold")
        table = plain_table("label", "training", "held out", gap=1)
        for entry in found["labels"][:MOST]:
            table.add_row(printable(str(entry["label"])), str(entry["train"]), str(entry["test"]))
        console.print(table)
    if found["columns"]:
        console.print("\nColumns", style="bold")
        table = plain_table("column", "kind", "missing", "categories", "withheld", gap=1)
        table.columns[1].justify = "left"
        for entry in found["columns"][:MOST]:
            counts = [str(entry["missing"] or ""), "", str(entry["withheld"] or "")]
            if entry["kind"] == "category":
                counts[1] = str(entry["categories"])
            table.add_row(
                printable(entry["name"]), entry["kind"].replace("unknown", "no values"), *counts
            )
        console.print(table)
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
            console.print(f"\n{title}", style="bold yellow" if part == "warnings" else "bold")
            bullets(console, found[part])


def show_audit(found: dict[str, Any]) -> None:
    """Show what has left, run by run."""
    from scaffpd.numbers import format_bytes

    console = Console(highlight=False)
    for run in found["runs"]:
        how = " and ".join(
            word for word, is_so in (("masked", run["masked"]), ("noisy", run["private"])) if is_so
        )
        title = f"Run {run['run'][:12]}, {run['algorithm']}" if run["run"] else "Before a run"
        console.print(title, style="bold", markup=False)
        spent = f", ε = {run['epsilon']:.3g} spent" if run["epsilon"] is not None else ""
        vectors = (
            f"; vectors were {how}" if how else "; vectors were in the clear" if run["run"] else ""
        )
        say(console, f"{run['from'][:19]} to {run['to'][:19]} UTC{vectors}{spent}.")
        table = plain_table("what left", "asked", "answered", "numbers", "bytes", gap=1)
        for row in run["questions"]:
            counts = (
                f"{row['asked']:,}",
                f"{row['answered']:,}",
                f"{row['numbers']:,}",
                format_bytes(row["bytes"]),
            )
            table.add_row(printable(row["what"]), *counts)
        console.print(table)
        console.print()
    if found["refused"]:
        console.print("Refused", style="bold")
        bullets(
            console, [f"{several(count, 'time')}: {why}" for why, count in found["refused"].items()]
        )
        console.print()
    if not found["lines"]:
        say(console, "Nothing has left this site yet.")
    elif found["whole"]:
        say(
            console,
            f"All {several(found['lines'], 'reply')}, {format_bytes(found['bytes'])} in all, are accounted for, and "
            "no line was changed. The last link is below: note it down, and --noted will show later that nothing "
            "before it was removed.",
        )
        typer.echo(found["link"])


def show_requests(known: list[dict[str, Any]]) -> None:
    """Show what every run asks for, and what became of that."""
    from scaffpd.deploy.silo.records import SHOWN

    console = Console(highlight=False)
    if not known:
        say(console, "No run has asked anything of this site yet.")
    for own in known:
        asks = own["asks"]
        loss = asks["model"].get("loss", "")
        lines = {
            "is": own["state"],
            "federation": f"{asks['federation']}, with {', '.join(asks['silos'])}",
            "model": f"{asks['model'].get('kind', 'linear')} {loss}".strip(),
            "columns": ", ".join(own["columns"]) or "not agreed on yet: at most those of silo.toml",
            "method": f"{asks['algorithm']}, {asks['rounds']} rounds at most",
            "objective": asks["objective"] or "none",
            "vectors": "masked" if asks["secure"] else "in the clear",
            "noise": "none"
            if asks["epsilon"] is None
            else f"ε = {asks['epsilon']}, δ = {asks['delta']}",
            "asked": f"{own['first'][:19]} to {own['last'][:19]} UTC",
        }
        console.print(f"Request {own['request'][:SHOWN]}", style="bold", markup=False)
        facts(console, {name: printable(text) for name, text in lines.items()})
        console.print()


def _facts(found: dict[str, Any]) -> dict[str, str]:
    from scaffpd.numbers import format_bytes

    rows = found["rows"]
    features = found["features"]
    size = found["bytes"]
    prepared = found["task"] == "prepared"
    lines = {
        "task": "the entry's own Cohort" if prepared else found["task"],
        "rows": f"{rows['train']} to train on, {rows['test']} held out",
        "features": f"a model of {several(features['encoded'], 'parameter')}",
    }
    if not prepared:
        lines["features"] = (
            f"{several(features['columns'], 'column')}, {features['encoded']} once encoded"
        )
        lines["memory"] = (
            f"{format_bytes(size['read'])} as read, {format_bytes(size['encoded'])} encoded"
        )
    if found["missing"] is not None:
        lines["missing"] = f"{found['missing']} values"
    if found["target"] is not None:
        lines["target"] = ", ".join(
            f"{name} {value:.6g}" for name, value in found["target"].items()
        )
    return lines
