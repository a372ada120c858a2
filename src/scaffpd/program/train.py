"""What `train` and `path` do: from settings to a folder with models, tables and record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from scaffpd.algorithms import Fair
from scaffpd.algorithms.base import Algorithm
from scaffpd.errors import InputError
from scaffpd.federation import Federation
from scaffpd.files import load_or_create
from scaffpd.numbers import between
from scaffpd.objectives import Average
from scaffpd.pipeline.columns import Ready, settle
from scaffpd.pipeline.judging import (
    MOST_NUMBERS,
    Judged,
    effects,
    hazards,
    held_out_scores,
    reference_levels,
)
from scaffpd.pipeline.models import TOL, Contest, Trained
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.run import Record, Settings, Watcher, run
from scaffpd.pipeline.shapes import Shape, shapes
from scaffpd.privacy import Private
from scaffpd.privacy.counts import spent_on_counts
from scaffpd.program import path
from scaffpd.program.prepare import Source
from scaffpd.report.folder import SECRET, Kind, RunFolder, reading, title
from scaffpd.report.recording import record
from scaffpd.settings.run import RunConfig
from scaffpd.settings.tables import AUTO
from scaffpd.study.coefficients import CoefficientTable
from scaffpd.study.gains import Joining
from scaffpd.study.joining import joining, joint_mode
from scaffpd.study.newcomers import Newcomers
from scaffpd.study.verdict import AVERAGE, FAIR, PERSONAL
from scaffpd.training.loop import Status, uncertified

# rows × columns up to which a table is small, and its splits
SMALL = 50_000
SPLITS = 10


def contests(config: RunConfig, prepared: Prepared, ready: Ready, place: Path) -> list[Contest]:
    """List the models to train, the average one first; `ready` has one x for all."""
    tol = config.training.tol or None
    model = ready.asked
    others: float | str | None = tol
    if config.privacy is not None:
        drawn = None if prepared.counts is None else prepared.counts.secret
        secret = None if config.privacy.seed is not None else noise_secret(place, drawn)
        model = private(config, prepared, secret)
    elif tol is None and uncertified(config.method, ready.federation, config.training.seed):
        others = AUTO
    found = [
        Contest(name, model, algorithm, role, tol if role == "after" else others)
        for name, role, algorithm in contestants(config)
    ]
    if joins(config, prepared):
        sizes = [len(y) for _, y in prepared.train]
        personal = prepared.personal(config.model.kappa, config.model.personal)
        found.append(Contest(PERSONAL, personal, Fair(joint_mode(sizes)), "", others))
    return found


def check_asked(config: RunConfig, prepared: Prepared) -> None:
    """Refuse, before any work, settings of personal models where none are trained."""
    asked = config.model.kappa != AUTO or config.model.personal
    if asked and not joins(config, prepared):
        raise InputError(
            "no-personal-models",
            "--kappa and --personal are for personal models: they need several clients, a model "
            "without noise, and --splits above 0.",
        )
    if config.model.split_inference and (config.privacy is not None or config.table is None):
        raise InputError(
            "split-inference-without-table", "--split-inference needs a table, and no noise."
        )
    prepared.differing(config.model.personal)
    reference_levels(prepared.schema, config.model.reference)


def joins(config: RunConfig, prepared: Prepared) -> bool:
    """Return whether clients are given models of their own, and compared with staying alone."""
    return config.privacy is None and config.training.splits != 0 and len(prepared.names) > 1


def splits_of(config: RunConfig, prepared: Prepared) -> int:
    """Return the number of random splits: as asked, else 10 of a small table and 1 of others."""
    if config.training.splits is not None:
        return config.training.splits
    table = config.table
    drawn = table and table.split_by is None and isinstance(table.test, float)
    numbers = prepared.numbers + sum(X.shape[0] * X.shape[1] for X, _ in prepared.test)
    return SPLITS if drawn and numbers <= SMALL else 1


def joining_of(
    config: RunConfig,
    source: Source,
    prepared: Prepared,
    models: Sequence[Trained],
    phase: Callable[[str, float], None] = lambda *_: None,
) -> Joining | str:
    """Measure what joining brings on held-out rows; or say why not, nothing where nobody asks."""
    splits = splits_of(config, prepared)
    if not splits or not prepared.test or models[-1].result.status is Status.INTERRUPTED:
        return ""
    if config.privacy is not None:
        return "What joining brings is not measured for a private run."
    if not joins(config, prepared):
        return "What joining brings is not measured: there is one client."
    if prepared.numbers > MOST_NUMBERS:
        return (
            f"What joining brings is not measured: {prepared.numbers:,} numbers are more than the "
            f"{MOST_NUMBERS:,} it is for."
        )
    what = "Training every client alone, to see what joining brings"
    try:
        phase(what, 0.0)
        found = [_joining(config, prepared, models)]
        for k in range(1, splits):
            phase(f"{what}: split {k + 1} of {splits}", k / splits)
            other = source.prepared(config.training.seed + k)
            pairs = zip(prepared.test, other.test, strict=True)
            if all(np.array_equal(old[0], new[0]) for old, new in pairs):
                raise InputError(
                    "splits-all-alike",
                    "the held-out rows are the same for every seed, so --splits measures nothing.",
                )
            found.append(_joining(config, other))
    except InputError as error:
        return f"What joining brings is not known: {error}"
    return found[0] if splits == 1 else Joining.mean(found)


def _joining(config: RunConfig, prepared: Prepared, models: Sequence[Trained] = ()) -> Joining:
    training = config.training
    return joining(
        prepared.train,
        prepared.test,
        prepared.personal(config.model.kappa, config.model.personal),
        config.goal,
        names=prepared.names,
        tol=training.tol or TOL,
        rounds=training.rounds,
        unit=prepared.unit,
        word=prepared.word,
        task=prepared.task,
        known={one.name: one.result for one in models if one.name in (AVERAGE, FAIR, PERSONAL)},
    )


def inferred(
    config: RunConfig, prepared: Prepared, one: Prepared, rows: Prepared
) -> tuple[Prepared, CoefficientTable | None, Sequence[Trained]]:
    """Return rows that have chosen nothing, their effects, and an average model of them: columns,
    curves, pairs, strengths and the kind of effects are chosen by one half.
    """
    if one.exposure and prepared.exposure:  # effects are for the usual exposure of the run
        rows = replace(rows, centre=float(np.log(prepared.exposure[1] / one.exposure[1])))
    asked = config.model
    chosen = effects(one, asked, pairs=True)
    if asked.effects == AUTO and not asked.personal and chosen is not None:
        asked = asked.model_copy(update={"effects": chosen.kind})
    table = effects(rows, asked, pairs=True)
    if table is not None:
        n, m = (sum(len(y) for _, y in half.train) for half in (one, rows))
        said = f" Of {m:,} rows; {n:,} others chose columns, curves, pairs and which effects."
        table = replace(table, said=table.said + said)
    ready = settle(one.encoding, one.sites, one.model)
    contest = Contest(AVERAGE, ready.model, Fair(Average()), tol=AUTO)
    settings = Settings(one.encoding, [contest], rounds=config.training.rounds)
    return rows, table, run(settings, rows.sites, "scored").models


def contestants(config: RunConfig) -> list[tuple[str, str, Algorithm]]:
    """List name, role and algorithm of the models to train, the average one first."""
    asked = config.method
    objective = config.goal
    if isinstance(objective, Average):
        return [(AVERAGE, "", asked)]
    name = FAIR if objective is not None else type(asked).__name__
    if config.privacy is not None:
        return [(name, "", asked)]
    prior = None if objective is None else objective.prior
    return [(AVERAGE, "before", config.method_for(Average(prior=prior))), (name, "after", asked)]


def noise_secret(folder: Path, new: bytes | None = None) -> bytes:
    """Return what a private run draws its noise from: `new`, or a random one, if the run is new."""
    file = folder / SECRET
    if not file.exists() and any((folder / "checkpoint").glob("*.npz")):
        raise InputError(
            "noise-secret-lost",
            f"The run in {str(folder)!r} has lost {SECRET} and cannot continue: start "
            "over with --fresh.",
        )
    return load_or_create(file, new)


def private(config: RunConfig, prepared: Prepared, secret: bytes | None = None) -> Private:
    """Add noise to the run's model, such that ε covers all models that will be trained."""
    assert config.privacy is not None
    methods = [method for _, _, method in contestants(config)]
    before = 0.0
    if prepared.counts is not None:
        before = spent_on_counts(config.privacy.epsilon, config.privacy.delta)
    asked = config.privacy
    return Private.solved(
        prepared.model,
        asked.epsilon,
        methods,
        config.training.rounds,
        asked.delta,
        before=before,
        clip=asked.clip,
        loss_clip=asked.loss_clip,
        radius=asked.radius,
        smoothness=asked.smoothness,
        secret=secret if asked.seed is None else asked.seed,
    )


def settled(config: RunConfig, federation: Federation) -> RunConfig:
    """Settle tol: the one asked for, else 1e-6 where a gap can be proven and 0 where none can."""
    tol = config.training.tol
    if tol == 0:
        return config
    if config.privacy is not None:  # no client is asked before the privacy account is open
        if tol is not None:
            raise InputError(
                "tol-with-noise",
                "tol needs a certificate, and with noise there is none: leave it out.",
            )
        return config.with_tol(0.0)
    reason = uncertified(config.method, federation, config.training.seed)
    if reason is not None and tol is not None:
        raise InputError(
            "tol-without-certificate",
            f"tol needs a certificate, and there is none: {reason} Leave it out.",
        )
    found = TOL if tol is None else tol
    return config.with_tol(0.0 if reason is not None else found)


class Screen(Watcher, Protocol):
    """Where a run says what it does."""

    def phase(self, what: str, share: float = 0.0) -> None:
        """Begin with something that takes a while, or say how much of it is done."""

    def say(self, *lines: str) -> None:
        """Say something that stays."""


def one_run(kind: Kind, config: RunConfig, place: Path, fresh: bool, screen: Screen) -> Record:
    """Read, train, judge on held-out rows, and write all of it."""
    if kind == "path":
        path.walkable(config)
    folder = RunFolder(place)
    folder.check(kind, config, fresh)
    screen.phase(f"Reading {config.name}")
    going_on = not fresh and (place / SECRET).exists()
    source = Source(config)
    prepared = source.prepared(secret=noise_secret(place) if going_on else None)
    config = config.counting([len(y) for _, y in prepared.train])
    check_asked(config, prepared)
    halves = source.halves() if kind == "train" and config.model.split_inference else None
    ready = settle(prepared.encoding, prepared.sites, prepared.model)
    config = settled(config, ready.federation)
    screen.say(f"{prepared.about}; {len(prepared.names)} clients", *prepared.remarks)
    if config.privacy is not None:
        noise = private(config, prepared)
        screen.say(
            f"Noise for ε = {noise.budget:g} in {config.training.rounds} rounds: "
            f"z = {between(noise.noise or 0.0)} for gradients, "
            f"z_L = {between(noise.loss_noise or 0.0)} for losses."
        )

    def judge(found: Record) -> Record:
        joining: Joining | str = ""
        table = tested = None
        curves: Sequence[Shape] = ()
        late: Newcomers | None = None
        if kind == "path":
            if config.path.new_sites:
                late = path.new_sites(config, source, prepared, found.models, screen.phase)
            found = replace(found, models=path.suggested(found.models, prepared))
        else:
            joining = joining_of(config, source, prepared, found.models, screen.phase)
        screen.phase("Scoring the models on held-out rows")
        scores = held_out_scores(prepared, found.models, joining)
        if kind == "train" and config.privacy is None:
            rows, models = prepared, found.models
            if halves:
                screen.phase("Choosing by one half of the rows, and estimating on the other")
                rows, table, models = inferred(config, prepared, *halves)
            else:
                table = effects(rows, config.model)
            curves = shapes(rows, models, "" if halves else joining)
            tested = hazards(rows)
        own = Judged(prepared, joining, scores, table, curves, tested, late, bool(halves))
        return replace(found, own=own)

    with folder.opened(kind, config, fresh):
        found = run(
            Settings(
                prepared.encoding,
                path.walk(config, prepared, ready)
                if kind == "path"
                else contests(config, prepared, ready, place),
                rounds=config.training.rounds,
                seed=config.training.seed,
                checkpoint=folder.checkpoint,
                judge=judge,
            ),
            prepared.sites,
            watcher=screen,
            ready=ready,
        )
        folder.write(
            record(
                kind,
                title(config, prepared),
                folder.command(kind),
                found,
                config=folder.settings(kind, config),
                reading=reading(config),
                path=path.about(config, prepared, found.models) if kind == "path" else None,
            ),
            found,
        )
    return found
