"""`federation.toml`: the coordinator's settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationInfo, model_validator

import scaffpd.fields as key
from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.algorithms.base import MEMORY, VECTORS
from scaffpd.errors import InputError
from scaffpd.fields import Json, SettingsTable, validated
from scaffpd.models import Linear
from scaffpd.models.losses import LOSSES
from scaffpd.privacy import LOCAL_STEPS, ROUNDS
from scaffpd.run.settings.methods import algorithm_of, called, changed, kind_of
from scaffpd.run.settings.reading import read_toml
from scaffpd.run.settings.tables import PrivacyBudget, Tolerance

SILO = {"data": "a silo's silo.toml; a coordinator's federation.toml is needed"}


class FederationModel(SettingsTable):
    """[model] of a federation: a linear model, or the silos' name of a network."""

    kind: key.Text = "linear"
    loss: Annotated[str, key.one_of(LOSSES)] = "logistic"
    l2: key.NonNegative = 1e-3
    classes: key.Count | None = None
    strength: key.Positive | None = None  # κ of personal models near the shared one

    @model_validator(mode="after")
    def _networks_have_a_name_only(self, info: ValidationInfo[Path]) -> Self:
        if self.kind == "linear":
            called(
                Linear,
                "model",
                self.model_dump(exclude={"kind", "strength"}, exclude_none=True),
                info.context,
            )
        elif more := self.model_fields_set - {"kind"}:
            raise InputError(
                "network-with-settings",
                f"{info.context.name!r} has model.{min(more)}, which goes with a linear model, but "
                f"not with {self.kind!r}: silos know that network by its name.",
            )
        return self

    def values(self) -> Json:
        """Return the values that silos get; every linear model has an intercept."""
        if self.kind != "linear":
            return {"kind": self.kind}
        return {**self.model_dump(exclude_none=True), "intercept": True}


class FeatureSettings(SettingsTable):
    """[features]: standardisation and declared ranges of columns."""

    standardise: key.Switch = True
    # [least, largest] of numeric columns by name, "*" for all others; columns are then scaled by
    # these alone
    ranges: dict[str, key.Range] = Field(default_factory=dict)


class FederationTraining(SettingsTable):
    """[training]: the most rounds, the certified gap to stop at, and the seed."""

    rounds: key.Count = 1000  # by default fewer with [privacy]
    tol: Tolerance | None = None
    seed: key.Whole = 0


class MaskingSettings(SettingsTable):
    """[secure]: how many silos may collude, and whether projections of gradients leave."""

    colluding: key.Count | None = None
    projections: key.Switch = False


class DeployedPrivacy(PrivacyBudget):
    """[privacy] of a federation."""

    # with noise shared under masks, how many silos may collude or add none; left out, each silo
    # adds all of its noise
    colluding: key.Whole | None = None


class FaultPolicy(SettingsTable):
    """[faults]: how long a run waits for a silo. It never goes on without one."""

    timeout: key.Positive = 60.0  # seconds that a silo has for an answer
    start_timeout: key.Positive = 120.0  # seconds to wait for all silos before the run pauses


class Server(SettingsTable):
    """[server]: where silos reach the coordinator; FLARE's administrators use the next port."""

    host: key.Text = "localhost"
    port: key.Port = 8002


class FederationFile(SettingsTable):
    """A coordinator's settings; `read` completes those whose defaults depend on others."""

    name: key.Text = "federation"
    silos: key.Names  # its members, in the order of the results
    # of the run: checkpoints, tables, the model
    folder: key.FileName = Field(default="run", validate_default=True)
    model: FederationModel = Field(default_factory=dict, validate_default=True)
    features: FeatureSettings = FeatureSettings()
    algorithm: Json = Field(default_factory=dict)
    objective: Json | None = None
    training: FederationTraining = FederationTraining()
    secure: MaskingSettings | None = None
    privacy: DeployedPrivacy | None = None
    faults: FaultPolicy = FaultPolicy()
    server: Server = Server()
    _path: Path
    _method: Algorithm

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FederationFile:
        """Read and check a `federation.toml`."""
        file = Path(path).absolute()
        found = validated(cls, read_toml(file, SILO), file)
        method = algorithm_of(found.algorithm, found.objective, file)
        private = found.privacy
        tol = found.training.tol
        if private is not None:
            _check_private(method, file)
            if hasattr(method, "local_steps") and "local_steps" not in found.algorithm:
                method = changed(method, local_steps=LOCAL_STEPS)  # each costs privacy
        certified = method.proves and private is None
        if tol and not certified:
            kind = type(method).__name__ if private is None else "A run with noise"
            raise InputError(
                "tol-without-certificate",
                f"{kind} certifies nothing: leave training.tol out of {file.name!r}.",
            )
        if found.secure is not None:
            _check_masking(found.secure, found, method, file)
        if private is not None and private.colluding is not None:
            _check_shared(found, method, file)
        given = private is None or "rounds" in found.training.model_fields_set
        tol = (1e-6 if certified else None) if tol is None else tol or None
        training = found.training.model_copy(
            update={"rounds": found.training.rounds if given else ROUNDS, "tol": tol}
        )
        made = found.model_copy(update={"training": training})
        made._path = file
        made._method = method
        return made

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    @property
    def method(self) -> Algorithm:
        """Algorithm with its objective."""
        return self._method

    @property
    def masking(self) -> Json:
        """Settings of masked sums; empty without masks."""
        return {} if self.secure is None else self.secure.model_dump()

    def request(self) -> Json:
        """Return the run's request, for silos to consent to."""
        objective = getattr(self.method, "objective", None)
        private = self.privacy
        return {
            "federation": self.name,
            "silos": list(self.silos),
            "algorithm": kind_of(self.method),
            "objective": "" if objective is None else repr(objective),
            "model": self.model.values(),
            "rounds": self.training.rounds,
            "secure": self.masking,
            "epsilon": private and private.epsilon,
            "delta": private and private.delta,
        }

    def identity(self) -> Json:
        """Return the settings that identify a run: all but its length and how long it waits."""
        about: Json = {
            "algorithm or objective": repr(self.method),
            "model": self.model.values(),
            "features": self.features.model_dump(exclude_none=True),
            "seed": self.training.seed,
            "list of silos": list(self.silos),
        }
        budget = {} if self.privacy is None else self.privacy.model_dump(exclude_none=True)
        more = {"way of masking": self.masking, "budget of privacy": budget}
        return about | {name: part for name, part in more.items() if part}


def _check_shared(tables: FederationFile, algorithm: Algorithm, file: Path) -> None:
    """Refuse shared noise if a silo's part of it could be seen."""
    plain = (
        getattr(algorithm, "local_steps", 1) > 1
        or getattr(algorithm, "batch_size", None) is not None
    )
    if tables.secure is None or tables.model.kind != "linear" or plain:
        raise InputError(
            "shared-noise-visible",
            f"[privacy] colluding of {file.name!r} needs [secure], a linear model, one local step "
            "and all rows: noise that silos share is in sums of their gradients alone.",
        )


def _check_private(algorithm: Algorithm, file: Path) -> None:
    if not algorithm.asks_losses:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if kind.asks_losses)
        raise InputError(
            "method-not-private",
            f"[privacy] of {file.name!r} needs a method that asks for losses itself, for nothing "
            f"else may leave silos: {able}, not {type(algorithm).__name__}.",
        )


def _check_masking(
    secure: MaskingSettings, tables: FederationFile, algorithm: Algorithm, file: Path
) -> None:
    from scaffpd.secure.masking import Terms  # needs the optional package cryptography

    if algorithm.needs & {VECTORS, MEMORY}:
        raise InputError(
            "method-sees-vectors",
            f"{type(algorithm).__name__} looks at every silo's own vectors, or stores them: take "
            f"[secure] out of {file.name!r}, or use another algorithm, such as ScaffPD.",
        )
    try:
        Terms.usual([str(i) for i in range(len(tables.silos))], secure.colluding)
    except InputError as error:
        raise InputError(error.code, f"[secure] of {file.name!r}: {error}") from None
