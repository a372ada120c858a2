"""`scaffpd train` and `scaffpd path`: models from a settings file, a table or a data set known by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scaffpd.cli import typer_ext
from scaffpd.cli.results import end
from scaffpd.cli.screens import RoundsScreen
from scaffpd.cli.typer_ext import (
    OBJECTIVES,
    PROBLEMS,
    AsJson,
    Quiet,
    listed,
    nearest,
    option,
    takes,
)
from scaffpd.errors import InputError, unknown

if TYPE_CHECKING:
    from scaffpd.run.prepare import Prepared
    from scaffpd.run.settings.run import RunConfig
    from scaffpd.study.gains import Joining

COUNTS = "counts"  # a task of its own to users: numbers with Poisson loss
LEAST_ZERO = ("test", "l2", "tol")
ABOVE_ZERO = ("kappa", "epsilon", "clip", "loss_clip", "radius", "delta")
BY = ("mean", "worst-fifth")
SHARES = {"test": "from 0 to below 1", "delta": "between 0 and 1"}
What = Annotated[
    list[str],
    typer.Argument(
        help="CONFIG.toml, a table (CSV, Excel, JSON, Parquet), several, a folder, or hospitals, digits, breast-cancer "
        "(for folders of such names, ./digits)."
    ),
]
GOAL = f"What is optimised: {', '.join(OBJECTIVES)}, or module:Class of your own; several in turn."
METHOD = "How it is trained: a name such as ScaffPD, or module:Class of your own."


class DataOptions:
    """Options for reading a table."""

    client: Annotated[
        str | None,
        typer.Option(help="Column with every row's client; file: each file is a client."),
    ]
    target: Annotated[str | None, typer.Option(help="Column to be predicted: labels or numbers.")]
    columns: Annotated[
        str | None,
        typer.Option(help="Columns to learn from, with commas.", show_default="all others"),
    ]
    categories: Annotated[
        str | None, typer.Option(help="Columns of numbers that are names of categories.")
    ]
    task: Annotated[
        str | None,
        typer.Option(
            help="classification, regression or counts.", show_default="goes by the target"
        ),
    ]
    separator: Annotated[
        str | None, typer.Option(help="Between columns of CSV.", show_default="found out")
    ]
    decimal: Annotated[
        str | None, typer.Option(help="Decimal mark of CSV: . or ,", show_default="found out")
    ]
    missing: Annotated[
        str | None, typer.Option(help="Values that mean missing, with commas: -999,unknown.")
    ]
    test: Annotated[
        str | None,
        typer.Option(help="Share of rows held out, or a table of them.", show_default="0.2"),
    ]
    split_by: Annotated[
        str | None,
        typer.Option(help="Hold out the latest rows by this column, or whole groups of it."),
    ]
    dates: Annotated[
        bool | None, typer.Option("--dates", help="Learn from weekday, season and hour of dates.")
    ]
    features: Annotated[
        str | None,
        typer.Option(
            "--features", help="Nonlinear, still certified: splines, interactions or rff."
        ),
    ]


class SolverOptions:
    """Options of the objective and the rounds."""

    objective: Annotated[str | None, option(GOAL, OBJECTIVES, "ChiSquare", several=True)]
    l2: Annotated[
        float | None,
        typer.Option(
            "--l2", help="The regulariser.", show_default="by folds for a table, else 0.001"
        ),
    ]
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The most rounds.", show_default="1000; 30 if private")
    ]
    tol: Annotated[
        float | None,
        typer.Option(help="Certified gap to stop at.", show_default="1e-6, where one is proven"),
    ]
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Chooses held-out rows and all else.", show_default="0"),
    ]
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cpu")]


class OutputOptions:
    """Options of the output."""

    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME")]
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew where the folder holds a run.")
    ] = False
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True
    quiet: Quiet = False
    as_json: AsJson = False


OF_TABLE = tuple(name for name in DataOptions.__annotations__ if name != "test")
OF_TRAINING = (
    "rounds",
    "tol",
    "seed",
    "device",
    "baseline",
    "splits",
    "groups",
)
TABLES: dict[str, dict[str, str]] = {  # of a settings file: the options that stand for its keys
    "data": {name: name for name in (*OF_TABLE, "test", "test_file", "seed")},
    "model": {"l2": "l2", "strength": "kappa"},
    "training": {name: name for name in OF_TRAINING},
    "privacy": {name: name for name in ("epsilon", "delta", "clip", "loss_clip", "radius")}
    | {"seed": "noise_seed"},
    "algorithm": {"kind": "algorithm"},
    "path": {"points": "points"},
}


@takes(DataOptions, SolverOptions, ..., OutputOptions)
def train(
    what: What,
    *,
    strength: Annotated[
        float | None,
        option(
            "Its ρ, δ, α, q or b.", (), "of a table, chosen by folds; else ρ 0.1, δ 0.5, α 0.2, q 1"
        ),
    ] = None,
    choose: Annotated[
        bool | None,
        option(
            "Choose l2, strength and κ by folds of training rows; those that are given stay.",
            (),
            "choose, of a table",
            "--choose/--no-choose",
        ),
    ] = None,
    by: Annotated[
        str | None,
        option("Choose by the mean of held-out losses, or their worst fifth.", BY, "worst-fifth"),
    ] = None,
    budget: Annotated[int | None, option("The most rounds of choosing.", (), "300", min=1)] = None,
    kappa: Annotated[
        float | None,
        option("κ of personal models, to compare with one for all.", (), "chosen by folds"),
    ] = None,
    algorithm: Annotated[
        str | None, option(METHOD, typer_ext.ALGORITHMS, "chosen for the problem")
    ] = None,
    baseline: Annotated[
        bool | None,
        option(
            "Train the average model too.",
            (),
            "baseline; no-baseline with --epsilon",
            "--baseline/--no-baseline",
        ),
    ] = None,
    splits: Annotated[
        int | None,
        option(
            "Random splits that tell what joining brings; 0: leave it out.",
            (),
            "5 of small tables, else 1",
            min=0,
        ),
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="Columns to score by, beside clients: sex,race.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy: ε of every row, over the whole run.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Its δ.", show_default="1e-5")] = None,
    clip: Annotated[
        float | None, typer.Option(help="C, the longest gradient of a row.", show_default="1")
    ] = None,
    loss_clip: Annotated[
        float | None, typer.Option(help="B, the largest loss of a row.", show_default="4")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="R, the longest row, once scaled.", show_default="3")
    ] = None,
    noise_seed: Annotated[
        int | None, option("Noise that can be repeated; protects nobody.", (), "a secret", min=0)
    ] = None,
    **given: Any,
) -> None:
    """Train one model that serves every client, and the average model to compare it with.

    A table needs two options, --client and --target. Texts become categories, missing values are filled client by
    client, and columns are scaled by sums over clients. The folder has settings, tables, model and report; the same
    command again goes on where it was interrupted. With --epsilon every client clips and adds noise before it answers.

    Examples:
        scaffpd train hospitals
        scaffpd train hospitals --epsilon 4
        scaffpd train patients.csv --client hospital --target ill
        scaffpd train hospitals --objective average,chi2,cvar
    """
    _run("train", locals())


@takes(DataOptions, SolverOptions, ..., OutputOptions)
def path(
    what: What,
    *,
    points: Annotated[
        int | None,
        typer.Option(
            min=1, help="Points between the average and the worst case.", show_default="9"
        ),
    ] = None,
    **given: Any,
) -> None:
    """Show the cost of fairness: models from the average to the worst case, with a suggestion.

    Goes along ρ of ChiSquare, or along Tilted, ChiSquareBall, CVaR or QFair; every point starts from what the last
    one has learnt, which takes far fewer rounds than training each alone.

    Examples:
        scaffpd path hospitals --points 5
        scaffpd path patients.csv --client hospital --target ill --objective CVaR
    """
    _run("path", locals())


def _run(kind: Literal["train", "path"], options: dict[str, Any]) -> None:
    """Train one model, or those of a fairness path, with the options of the command line."""
    options = options | options.pop("given")
    (what, *more), asked = (
        options.pop("what"),
        {name: value for name, value in options.items() if value is not None},
    )
    asked |= {"more_files": more} if more else {}
    asked |= {"path": True} if kind == "path" else {}
    wanted = list(dict.fromkeys(listed(options["objective"])))
    configs = [requested(what, asked | {"objective": one}) for one in wanted] or [
        requested(what, asked)
    ]
    if len(configs) > 1:
        _check_several(kind, options)
    base = options["out"] or configs[0].folder
    places = [options["out"]]
    if len(configs) > 1:
        base = Path(base or Path("runs") / f"{_safe(configs[0].name)}-objectives")
        places = [base / type(config.goal).__name__.lower() for config in configs]
    quiet = options["quiet"]
    as_json = options["as_json"]
    folders = list[Path]()
    prepared = None
    interrupted = False
    for config, out in zip(configs, places, strict=True):
        if not interrupted:
            with RoundsScreen(quiet or as_json) as screen:
                folder, prepared, interrupted = _one_run(
                    kind, config, prepared, options | {"out": out}, screen
                )
            folders.append(folder)
    several = len(folders) > 1
    page = options["report"] and not interrupted
    end(
        Path(base) if base and several else folders[0],
        page,
        quiet,
        as_json,
        folders if several else (),
    )
    if interrupted:
        if not (quiet or as_json):
            typer.echo("Interrupted; the same command goes on.", err=True)
        raise typer.Exit(typer_ext.INTERRUPTED)


def _check_several(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse what several objectives cannot share."""
    if kind != "train":
        raise InputError(
            "fairness-path-goes", "A fairness path goes along one objective: name one."
        )
    for name in ("strength", "epsilon"):
        if options.get(name) is not None:
            raise InputError(
                "goes-objective-several",
                f"--{name} goes with one objective, and several are named: leave it out, or name one.",
            )
    for base in filter(None, [options["out"]]):
        if (Path(base) / "config.toml").exists():
            raise InputError(
                "holds-run-choose",
                f"{str(base)!r} holds a run: choose another folder for several with --out.",
            )


def _one_run(
    kind: Literal["train", "path"],
    config: RunConfig,
    prepared: Prepared | None,
    options: Mapping[str, Any],
    screen: RoundsScreen,
) -> tuple[Path, Prepared, bool]:
    """Train, score and write one run; return its folder, what was read, and whether it was interrupted."""
    from scaffpd.run import joint, path, prepare, scores, train  # seconds, so not for --help
    from scaffpd.run.folder import RunFolder, reading, title
    from scaffpd.run.recording import record
    from scaffpd.run.strengths import strengthened
    from scaffpd.training.loop import Status

    if kind == "path":
        path.walkable(config)
    fresh = options["fresh"]
    out = options["out"] or config.folder
    if out is not None:
        RunFolder(Path(out)).usable(kind)
    screen.say(
        f"Reading {config.name}"
        if prepared is None
        else f"\nObjective {type(config.goal).__name__}"
    )
    plain = prepared = prepared or prepare.prepare(config)
    joint.check_asked(config, prepared)
    choosing = _choosing(config, prepared, options, kind, screen)
    config, prepared, choice = strengthened(config, prepared, choosing)
    folder = RunFolder(_place(config, out, fresh, kind))
    folder.check(kind, config, fresh)
    cohort = prepared.cohort(config)
    config = train.settled(config, cohort)
    noise = None if config.privacy is None else train.private(config, prepared)
    for line in (f"{prepared.about}; {len(prepared.names)} clients", *prepared.remarks):
        screen.say(line)
    if noise is not None:
        screen.say(noise_of(noise, config.training.rounds))
    with folder.opened(kind, config, fresh):
        found: Joining | str = ""
        points = None
        if kind == "path":
            models = path.walk(config, prepared, cohort, screen)
            points = path.about(config, prepared, models)
        else:
            models = train.carry_out(config, prepared, cohort, folder.path, screen)
            screen.say("Training every client alone, to see what joining brings")
            found = joint.joining_of(config, prepared, models, choice)
        scored = scores.held_out_scores(prepared, models, found)
        run = record(
            kind,
            title(config, prepared),
            folder.command(kind),
            prepared,
            models,
            config=folder.settings(kind, config),
            reading=reading(config),
            path=points,
            joining=found,
            scored=scored,
        )
        folder.write(run, prepared, models, found, scored)
    return folder.path, plain, kind == "train" and models[-1].result.status is Status.INTERRUPTED


def _choosing(
    config: RunConfig, prepared: Any, options: Mapping[str, Any], kind: str, screen: RoundsScreen
) -> Any:
    """Return how strengths are chosen; `None` where they are not: a fairness path goes along all of them."""
    from scaffpd.run.strengths import BUDGET, Choosing, choosable
    from scaffpd.study.choosing import MEAN, WORST

    asked = options.get("choose")
    by = options.get("by")
    more = [name for name in ("by", "budget") if options.get(name) is not None]
    if asked is False and more:
        raise InputError(
            "goes-choosing-leave", f"--{more[0]} goes with choosing: leave it or --no-choose out."
        )
    if kind != "train" or not (asked or (asked is None and (more or choosable(config, prepared)))):
        return None
    if by is not None and by not in BY:
        raise unknown("measure", by, BY)
    found = Choosing(MEAN if by == BY[0] else WORST, options.get("budget") or BUDGET)
    screen.say(f"Choosing strengths by folds of training rows, in at most {found.budget} rounds")
    return found


def requested(what: str, options: Mapping[str, Any], command: str = "train") -> RunConfig:
    """Return the settings: what the file says, with the options in its place where they are given."""
    from scaffpd.data.tabular.formats import is_table
    from scaffpd.run.settings.run import RunConfig

    options = with_test(options)
    if counts := options.get("task") == COUNTS:
        options["task"] = "regression"
    _check_numbers(options)
    known = known_name(what)
    file = Path(what)
    is_file = what.lower().endswith(".toml")
    changes = {
        table: {name: options[given] for name, given in names.items() if given in options}
        for table, names in TABLES.items()
    }
    private = [given for given in TABLES["privacy"].values() if given in options]
    if private and "epsilon" not in private and not is_file:
        raise InputError(
            "goes-epsilon-how",
            f"--{private[0].replace('_', '-')} goes with --epsilon: how private is it to be?",
        )
    for table, name in (
        ("data", "columns"),
        ("data", "categories"),
        ("data", "missing"),
        ("training", "groups"),
    ):
        if name in options:
            changes[table][name] = listed(options[name])
    if counts:
        changes["model"]["loss"] = "poisson"
    changes["objective"] = _objective(options, file.parent if is_file else None)
    given = {table: new for table, new in changes.items() if new}
    if is_file:
        return RunConfig.read(file, given)
    source: dict[str, Any] = {"source": known}
    if known in PROBLEMS:
        refuse_columns(what, options)
    elif is_table(file):
        source = {"file": str(file.absolute())}
        if more := options.get("more_files"):
            if strange := [name for name in more if not is_table(Path(name))]:
                raise _neither(strange[0])
            changes["data"].setdefault("client", "file")
            source["more_files"] = [str(Path(name).absolute()) for name in more]
        _check_columns(file, options | changes["data"], command)
    elif "more_files" in options:
        raise InputError(
            "table-several-files",
            f"{what!r} is no table; several files are trained on only where all of them are tables.",
        )
    else:
        raise _neither(what)
    label = known if known in PROBLEMS else file.name
    try:
        return RunConfig.of(given | {"data": source | changes["data"]}, label)
    except InputError as error:
        wrong = str(error)
        for table, names in TABLES.items():
            for key, given_by in names.items():
                wrong = wrong.replace(
                    f"{table}.{key} in {label!r},", f"--{given_by.replace('_', '-')}"
                )
        raise InputError("requested", wrong) from None


def known_name(what: str) -> str:
    """Return how a data set is called that is known by name, before any folder of that name; else `what` as it is."""
    plain = what.lower().replace("_", "-").replace("heart-disease", "hospitals")
    return plain if plain in PROBLEMS else what


def refuse_columns(what: str, options: Mapping[str, Any]) -> None:
    """Refuse options on the reading of tables for a data set that is known by name."""
    path = f", or write ./{what} for the folder here" if Path(what).is_dir() else ""
    if "more_files" in options:
        raise InputError("data-set-own", f"{what!r} is a data set of its own: name it alone{path}.")
    for given in OF_TABLE:
        if options.get(given) is not None:
            option = given.replace("_", "-")
            raise InputError(
                "brings-own-clients",
                f"{what!r} brings its own clients and columns: leave --{option} out{path}.",
            )


def with_test(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tell a share of rows from a table of them."""
    made = dict(options)
    given = options.get("test")
    if isinstance(given, str):
        try:
            made["test"] = float(given)
        except ValueError:
            if not Path(given).exists():
                raise InputError(
                    "test-share-below",
                    f"--test needs a share from 0 to below 1, or a table: no file {given!r}.",
                ) from None
            del made["test"]
            made["test_file"] = str(Path(given).absolute())
    return made


def _check_numbers(options: Mapping[str, Any]) -> None:
    """Refuse numbers in the words of the options."""
    for name in (*LEAST_ZERO, *ABOVE_ZERO):
        given = options.get(name)
        below = 1.0 if name in SHARES else float("inf")
        if given is not None and not (
            0 <= given < below if name in LEAST_ZERO else 0 < given < below
        ):
            limits = SHARES.get(name) or (">= 0 and finite" if name in LEAST_ZERO else "above 0")
            raise InputError(
                "number-check-numbers",
                f"--{name.replace('_', '-')} needs a number {limits}, got {given:g}.",
            )


def _objective(options: Mapping[str, Any], beside: Path | None) -> dict[str, Any]:
    """Return [objective] of --objective and --strength; a path needs no strength, for it goes along all of them."""
    from scaffpd.run.settings.reading import objective_kind

    wanted = options.get("objective")
    strength = options.get("strength")
    if wanted is None and strength is None:
        return {}
    if wanted is None and beside is not None:
        raise InputError(
            "strength-objective-strength",
            "--strength needs --objective: which of them is it the strength of?",
        )
    wanted = wanted or "ChiSquare"
    known = {name.lower(): name for name in OBJECTIVES} | {"chi2": "ChiSquare", "worst": "Agnostic"}
    name = known.get(wanted.lower().replace("-", "").replace("_", ""), wanted)
    kind = objective_kind(name, beside or Path.cwd())
    if strength is None and (not kind.parameter or kind.usual is not None):
        return {"kind": name}  # the usual one, or one that goes by the clients' losses
    if not kind.parameter:
        raise InputError(
            "strength-leave-strength", f"{kind.__name__} has no strength: leave --strength out."
        )
    if strength is None and "path" not in options:
        raise InputError(
            "strength-objective",
            f"{kind.__name__} needs --strength: {kind.meaning or kind.parameter}.",
        )
    made = {kind.parameter: 1.0 if strength is None else strength}
    kind(**made)  # refuses what is no strength
    return {"kind": name, **made}


def _check_columns(file: Path, options: Mapping[str, Any], command: str) -> None:
    """Refuse a table without a word on whose rows they are, with the names of its columns."""
    for key, means in (("client", "has every row's client"), ("target", "is to be predicted")):
        if key not in options:
            from scaffpd.data.tabular.formats import open_table

            names = [name for name in open_table(file).names if name]
            there = f"There are {', '.join(map(repr, names[:12]))}{' and others' if len(names) > 12 else ''}."
            raise InputError(
                "column-check-columns",
                f"{command} needs --{key}: which column of {file.name!r} {means}? {there}",
            )


def _neither(what: str) -> InputError:
    from scaffpd.data.tabular.formats import ACCEPTED

    if Path(what).is_dir():
        return InputError(
            "folder-without-tables",
            f"{what!r} is a folder without tables: name a config.toml or a table.",
        )
    if Path(what).exists():
        return InputError(
            "neither-settings-file",
            f"{what!r} is neither a settings file (.toml) nor a table ({ACCEPTED}).",
        )
    hint = nearest(what, list(PROBLEMS)) or f" (known: {', '.join(PROBLEMS)})."
    return InputError(
        "file-data-set", f"{what!r} is no file, and no data set of that name is known{hint}"
    )


def _place(
    config: RunConfig, out: Path | None, fresh: bool, kind: Literal["train", "path"]
) -> Path:
    """Return the folder that was asked for, or the first of runs/NAME, runs/NAME-2, … that holds no other run."""
    from scaffpd.run.folder import RunFolder

    if out is not None or config.folder is not None:
        return Path(out or config.folder or "")
    safe = _safe(config.name)
    first = folder = Path("runs") / (safe if kind == "train" else f"{safe}-{kind}")
    k = 1
    while not fresh and not RunFolder(folder).fits(kind, config):
        k += 1
        folder = first.with_name(f"{first.name}-{k}")
    return folder


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def noise_of(model: Any, rounds: int) -> str:
    """Say in a sentence how much noise was found."""
    from scaffpd.numbers import between

    z = between(model.noise or 0.0)
    z_L = between(model.loss_noise or 0.0)
    return f"Noise for ε = {model.budget:g} in {rounds} rounds: z = {z} for gradients, z_L = {z_L} for losses."
