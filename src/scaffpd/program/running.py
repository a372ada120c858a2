"""What `train` and `path` do: one run, from settings to a folder with models, tables and record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from scaffpd.numbers import between
from scaffpd.pipeline.columns import settle
from scaffpd.pipeline.judging import Judged, effects, held_out_scores
from scaffpd.pipeline.run import Record, Settings, Watcher, run
from scaffpd.program import path
from scaffpd.program.prepare import Source
from scaffpd.program.train import (
    check_asked,
    contests,
    joining_of,
    noise_secret,
    private,
    settled,
)
from scaffpd.report.folder import SECRET, RunFolder, reading, title
from scaffpd.report.recording import record
from scaffpd.settings.run import RunConfig
from scaffpd.study.gains import Joining
from scaffpd.study.newcomers import Newcomers


class Screen(Watcher, Protocol):
    """Where a run says what it does."""

    def phase(self, what: str, share: float = 0.0) -> None:
        """Begin with something that takes a while, or say how much of it is done."""

    def say(self, *lines: str) -> None:
        """Say something that stays."""


def one_run(
    kind: Literal["train", "path"], config: RunConfig, place: Path, fresh: bool, screen: Screen
) -> Record:
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
    screen.phase("Setting the strength of every column by evidence")
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
        table = None
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
            table = effects(prepared, config.model.personal)
        return replace(found, own=Judged(prepared, joining, scores, table, late))

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
