"""What `train` and `path` do: one run, from settings to a folder with models, tables and record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from scaffpd.numbers import between
from scaffpd.run import path
from scaffpd.run.folder import RunFolder, reading, title
from scaffpd.run.prepare import Prepared, prepare
from scaffpd.run.recording import record
from scaffpd.run.scores import effects, held_out_scores
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import (
    SECRET,
    Trained,
    Watcher,
    carry_out,
    check_asked,
    joining_of,
    noise_secret,
    private,
    settled,
)
from scaffpd.study.gains import Joining
from scaffpd.training.loop import Status


class Screen(Watcher, Protocol):
    """Where a run says what it does."""

    def phase(self, what: str, share: float = 0.0) -> None:
        """Begin with something that takes a while, or say how much of it is done."""

    def say(self, *lines: str) -> None:
        """Say something that stays."""


@dataclass(frozen=True)
class Done:
    """What a run has found."""

    prepared: Prepared
    models: Sequence[Trained]
    joining: Joining | str  # or why it is not known

    @property
    def interrupted(self) -> bool:
        """Whether it goes on with the same command."""
        return self.models[-1].result.status is Status.INTERRUPTED


def one_run(
    kind: Literal["train", "path"], config: RunConfig, place: Path, fresh: bool, screen: Screen
) -> Done:
    """Read, train, judge on held-out rows, and write all of it."""
    if kind == "path":
        path.walkable(config)
    folder = RunFolder(place)
    folder.check(kind, config, fresh)
    screen.phase(f"Reading {config.name}")
    going_on = not fresh and (place / SECRET).exists()
    prepared = prepare(config, secret=noise_secret(place) if going_on else None)
    config = config.counting([len(y) for _, y in prepared.train])
    check_asked(config, prepared)
    screen.phase("Setting the strength of every column by evidence")
    cohort = prepared.cohort(config)
    config = settled(config, cohort)
    screen.say(f"{prepared.about}; {len(prepared.names)} clients", *prepared.remarks)
    if config.privacy is not None:
        noise = private(config, prepared)
        screen.say(
            f"Noise for ε = {noise.budget:g} in {config.training.rounds} rounds: "
            f"z = {between(noise.noise or 0.0)} for gradients, "
            f"z_L = {between(noise.loss_noise or 0.0)} for losses."
        )
    with folder.opened(kind, config, fresh):
        found: Joining | str = ""
        points = None
        if kind == "path":
            models = path.walk(config, prepared, cohort, screen)
            points = path.about(config, prepared, models)
        else:
            models = carry_out(config, prepared, cohort, place, screen)
            found = joining_of(config, prepared, models, screen.phase)
        screen.phase("Scoring the models on held-out rows")
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
            scored=held_out_scores(prepared, models),
            effects=effects(config, prepared) if kind == "train" else None,
        )
        folder.write(run, prepared, models, found)
    return Done(prepared, models, found)
