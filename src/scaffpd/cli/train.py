"""`scaffpd train` and `scaffpd path`: models from a settings file, a table or a data set known by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd.cli import typer_ext, usage_errors
from scaffpd.cli.typer_ext import OBJECTIVES, PROBLEMS, completing
from scaffpd.cli.usage_errors import nearest
from scaffpd.errors import InputError, unknown

if TYPE_CHECKING:
    from scaffpd.cli.screens import TrainingScreen
    from scaffpd.cohort import Cohort
    from scaffpd.config.run import RunConfig
    from scaffpd.runs.folder import RunFolder
    from scaffpd.runs.prepare import Prepared


STRENGTHS: dict[str, tuple[str, float | None]] = {  # the argument of each objective, and its value where none is given
    "ChiSquare": ("rho", 0.1), "Tilted": ("rho", 0.1), "ChiSquareBall": ("delta", 0.5), "CVaR": ("alpha", 0.2),
    "QFair": ("q", 1.0), "Nash": ("b", None),
}  # fmt: skip
NICKNAMES = {"heart-disease": "hospitals"}


@dataclass(frozen=True)
class RunRequest:
    """The options, by the table of the settings file that they belong to."""

    data: Mapping[str, Any]
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    objective: str | None = None
    strength: float | None = None
    needs_strength: bool = True
    path: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Mapping[str, Any] = field(default_factory=dict)

    def config(self, what: str) -> RunConfig:
        """The settings: what the file says, with the options in its place where they are given."""
        from scaffpd.config.run import RunConfig
        from scaffpd.tabular.read import is_table

        self._check()
        tables = ("data", "model", "training", "path", "privacy", "algorithm")
        changes = {name: _given(getattr(self, name)) for name in tables}
        if changes["privacy"] and "epsilon" not in changes["privacy"] and not what.lower().endswith(".toml"):
            given = next(iter(changes["privacy"])).replace("_", "-")
            raise InputError(f"--{given.replace('seed', 'noise-seed')} goes with --epsilon: how private is it to be?")
        plain = what.lower().replace("_", "-")
        what = NICKNAMES.get(plain, plain if plain in PROBLEMS else what)
        changes["objective"] = self._objective(file=what.lower().endswith(".toml"))
        if what.lower().endswith(".toml"):
            return RunConfig.read(Path(what), {name: new for name, new in changes.items() if new})
        if is_table(Path(what)):
            changes["data"] = {"file": str(Path(what).absolute()), **_columns(Path(what), changes["data"])}
        elif what in PROBLEMS:
            for key in ("client", "target", "columns", "categories", "task"):
                if key in changes["data"]:
                    raise InputError(f"{what!r} brings its own clients and columns: leave --{key} out.")
            changes["data"] = {"source": what, **changes["data"]}
        else:
            raise _neither(what)
        return RunConfig.of({name: new for name, new in changes.items() if new}, Path(what).name)

    def _check(self) -> None:
        """Refuse numbers in the words of the options."""
        for name, given, below in (
            ("test", self.data.get("test"), 1.0),
            ("l2", self.model.get("l2"), float("inf")),
            ("tol", self.training.get("tol"), float("inf")),
        ):
            if given is not None and not 0 <= given < below:
                limits = "from 0 to below 1" if below == 1 else ">= 0 and finite"
                raise InputError(f"--{name} needs a number {limits}, got {given:g}.")
        for name in ("epsilon", "clip", "loss_clip", "radius", "delta"):
            given, below = self.privacy.get(name), 1.0 if name == "delta" else float("inf")
            if given is not None and not 0 < given < below:
                limits = "between 0 and 1" if name == "delta" else "above 0"
                raise InputError(f"--{name.replace('_', '-')} needs a number {limits}, got {given:g}.")

    def _objective(self, file: bool) -> dict[str, Any]:
        if self.objective is None and self.strength is None:
            return {}
        if self.objective is None and file:
            raise InputError("--strength needs --objective: which of them is it the strength of?")
        wanted = self.objective or "ChiSquare"
        names = {name.lower(): name for name in OBJECTIVES}
        kind = names.get(wanted.lower().replace("-", "").replace("_", ""))
        if kind is None:
            raise unknown("objective", wanted, OBJECTIVES)
        if kind not in STRENGTHS:
            if self.strength is not None:
                raise InputError(f"{kind} has no strength: leave --strength out.")
            return {"kind": kind}
        name, usual = STRENGTHS[kind]
        value = usual if self.strength is None else self.strength
        if value is None and self.needs_strength:
            raise InputError(f"{kind} needs --strength: its {name}, the loss that a client could fall back to.")
        made = {"kind": kind, name: 1.0 if value is None else value}
        getattr(import_module("scaffpd.objectives"), kind)(made[name])  # refuses what is no strength
        return made


def _columns(file: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Refuse a table without a word on whose rows they are, with the names of its columns."""
    for key, means in (("client", "says whose a row is"), ("target", "is to be predicted")):
        if key not in given:
            raise InputError(f"train needs --{key}: which column of {file.name!r} {means}?{_known(file)}")
    return given


def _known(file: Path) -> str:
    from scaffpd.tabular.read import column_names

    names = [name for name in column_names(file) if name]
    return f" There are {', '.join(map(repr, names[:12]))}{' and others' if len(names) > 12 else ''}."


def _neither(what: str) -> InputError:
    if Path(what).is_dir():
        return InputError(f"{what!r} is a folder: name its config.toml, or a table in it.")
    if Path(what).exists():
        return InputError(f"{what!r} is neither a settings file (.toml) nor a table (.csv, .csv.gz, .parquet).")
    hint = nearest(what, list(PROBLEMS)) or f" (known: {', '.join(PROBLEMS)})."
    return InputError(f"{what!r} is no file, and no data set of that name is known{hint}")


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def listed(text: str | None) -> list[str] | None:
    """Names between commas."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def free(folder: Path, fits: Any) -> Path:
    """The folder, or the first of folder-2, folder-3, … that holds no other run."""
    place, k = folder, 1
    while not fits(place):
        k += 1
        place = folder.with_name(f"{folder.name}-{k}")
    return place


What = Annotated[
    str, typer.Argument(help="CONFIG.toml, a table (.csv, .csv.gz, .parquet), or hospitals, digits, breast-cancer.")
]
Client = Annotated[str | None, typer.Option(help="Column that says whose a row is.")]
Target = Annotated[str | None, typer.Option(help="Column to be predicted: labels or numbers.")]
Goal = Annotated[
    str | None,
    typer.Option(
        help="What is optimised: " + ", ".join(typer_ext.OBJECTIVES) + ".", show_default="ChiSquare",
        autocompletion=completing(*typer_ext.OBJECTIVES),
    ),
]  # fmt: skip
Method = Annotated[
    str | None,
    typer.Option(
        help="How it is trained: a name such as ScaffPD, or module:Class of your own.",
        show_default="chosen for the problem", autocompletion=completing(*typer_ext.ALGORITHMS),
    ),
]  # fmt: skip
Columns = Annotated[str | None, typer.Option(help="Columns to learn from, with commas.", show_default="all others")]
Categories = Annotated[str | None, typer.Option(help="Columns of numbers that are names of categories.")]
Task = Annotated[str | None, typer.Option(help="classification or regression.", show_default="goes by the target")]
Test = Annotated[float | None, typer.Option(help="Share of rows held out at every client.", show_default="0.2")]
L2 = Annotated[float | None, typer.Option("--l2", help="The regulariser.", show_default="0.001")]
Rounds = Annotated[int | None, typer.Option(min=1, help="The most rounds.", show_default="1000")]
Tol = Annotated[float | None, typer.Option(help="Certified gap to stop at.", show_default="1e-6, where one is proven")]
Seed = Annotated[int | None, typer.Option(min=0, help="Chooses held-out rows and all else.", show_default="0")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cpu")]
Out = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew where the folder holds a run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")]


def train(
    what: What,
    client: Client = None,
    target: Target = None,
    objective: Goal = None,
    strength: Annotated[
        float | None, typer.Option(help="Its ρ, δ, α, q or b.", show_default="ρ 0.1, δ 0.5, α 0.2, q 1")
    ] = None,
    algorithm: Method = None,
    columns: Columns = None,
    categories: Categories = None,
    task: Task = None,
    test: Test = None,
    l2: L2 = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The most rounds.", show_default="1000; 30 with --epsilon")
    ] = None,
    tol: Tol = None,
    seed: Seed = None,
    device: Device = None,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Train the average model too.",
            show_default="baseline; no-baseline with --epsilon",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy: ε of every row, over the whole run.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Its δ.", show_default="1e-5")] = None,
    clip: Annotated[float | None, typer.Option(help="C, the longest gradient of a row.", show_default="1")] = None,
    loss_clip: Annotated[float | None, typer.Option(help="B, the largest loss of a row.", show_default="4")] = None,
    radius: Annotated[float | None, typer.Option(help="R, the longest row, once scaled.", show_default="3")] = None,
    noise_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Noise that can be repeated; protects nobody.", show_default="a secret"),
    ] = None,
    out: Out = None,
    fresh: Fresh = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train one model that serves every client, and the average model to compare it with.

    A table needs two options, --client and --target. Texts become categories, missing values are filled client by
    client, and columns are scaled by sums over clients. The folder has settings, tables, model and report; the same
    command again goes on where it was interrupted. With --epsilon every client clips and adds noise before it answers.

    Examples:
        scaffpd train hospitals
        scaffpd train hospitals --epsilon 4
        scaffpd train patients.csv --client hospital --target ill
    """
    asked = RunRequest(
        data={
            "client": client, "target": target, "columns": listed(columns), "categories": listed(categories),
            "task": task, "test": test, "seed": seed,
        },
        model={"l2": l2},
        training={"rounds": rounds, "tol": tol, "seed": seed, "device": device, "baseline": baseline},
        objective=objective,
        strength=strength,
        algorithm={"kind": algorithm},
        privacy={
            "epsilon": epsilon, "delta": delta, "clip": clip, "loss_clip": loss_clip, "radius": radius,
            "seed": noise_seed,
        },
    )  # fmt: skip
    from scaffpd.runs.folder import RunFolder  # seconds, so not for --help

    config = asked.config(what)
    folder = RunFolder(place(config, out, fresh))
    folder.check("train", config, fresh)
    _carry_out(config, folder, fresh, report, quiet, as_json)


def place(config: RunConfig, out: Path | None, fresh: bool, kind: str = "train") -> Path:
    """Where the run goes: where it is told to, or to a folder of its own below runs/."""
    from scaffpd.runs.folder import RunFolder

    if out is not None or config.folder is not None:
        return Path(out or config.folder or "")
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.name)
    folder = Path("runs") / (safe if kind == "train" else f"{safe}-{kind}")
    return folder if fresh else free(folder, lambda place: RunFolder(place).fits(kind, config))


def begin(config: RunConfig, screen: TrainingScreen) -> tuple[RunConfig, Prepared, Cohort]:
    """Read the data, say what was found, and settle what was left open."""
    from scaffpd.runs.prepare import prepare
    from scaffpd.runs.train import private, settled

    screen.say(f"Reading {config.name}")
    prepared = prepare(config)
    cohort = prepared.cohort(config)
    config = settled(config, cohort)
    noise = None if config.privacy is None else noise_of(private(config, prepared), config.training.rounds)
    screen.say(f"{prepared.about}; {len(prepared.names)} clients")
    for remark in prepared.remarks:
        screen.say(remark)
    if noise is not None:
        screen.say(noise)
    return config, prepared, cohort


def _carry_out(config: RunConfig, folder: RunFolder, fresh: bool, report: bool, quiet: bool, as_json: bool) -> None:
    from scaffpd.cli.results import end
    from scaffpd.cli.screens import TrainingScreen
    from scaffpd.runs.train import carry_out
    from scaffpd.training import Status

    with TrainingScreen(quiet or as_json) as screen:
        config, prepared, cohort = begin(config, screen)
        with folder.opened("train", config, fresh):
            models = carry_out(config, prepared, cohort, folder.path, screen)
            folder.write("train", config, prepared, models)
    interrupted = models[-1].result.status is Status.INTERRUPTED
    end(folder.path, report and not interrupted, quiet, as_json)
    if interrupted:
        if not (quiet or as_json):
            typer.echo("Interrupted; the same command goes on.", err=True)
        raise typer.Exit(usage_errors.INTERRUPTED)


def noise_of(model: Any, rounds: int) -> str:
    """Say in a sentence how much noise was found."""
    z, z_L = _range(model.noise), _range(model.loss_noise)
    return f"Noise for ε = {model.budget:g} in {rounds} rounds: z = {z} for gradients, z_L = {z_L} for losses."


def _range(noise: float | tuple[float, ...] | None) -> str:
    several = noise if isinstance(noise, tuple) else (noise or 0.0,)
    low, high = min(several), max(several)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
