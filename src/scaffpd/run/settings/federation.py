"""`federation.toml`: the coordinator's settings."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.algorithms.base import MEMORY, VECTORS
from scaffpd.data.tabular.agree import EXPANSIONS
from scaffpd.errors import InputError
from scaffpd.models import Linear
from scaffpd.privacy import LOCAL_STEPS, ROUNDS
from scaffpd.run.settings import reading as key
from scaffpd.run.settings.reading import (
    SettingsTable,
    algorithm_of,
    called,
    kind_of,
    read_toml,
    validated,
)
from scaffpd.run.settings.run import LinearSettings, Loss, PrivacyBudget, Tolerance

SILO = {"data": "a silo's silo.toml; a coordinator's federation.toml is needed"}
Port = Annotated[int, Field(ge=1, le=65535, description="a whole number from 1 to 65535")]


class FederationModel(LinearSettings):
    """[model] of a federation: a linear model, or the silos' name of a network."""

    kind: key.Text = "linear"
    loss: Loss = "logistic"
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
                "model-goes-linear",
                f"{info.context.name!r} has model.{min(more)}, which goes with a linear model, but not with "
                f"{self.kind!r}: silos know that network by its name.",
            )
        return self

    def values(self) -> dict[str, Any]:
        """Return the values that silos get."""
        return self.model_dump(exclude_none=True) if self.kind == "linear" else {"kind": self.kind}


class FeatureSettings(SettingsTable):
    """[features]: standardisation, expansions, the number format and declared ranges of columns."""

    standardise: key.Switch = True
    expand: Annotated[str, key.one_of(EXPANSIONS)] | None = None
    numbers: key.Numbers | None = None
    # [least, largest] of numeric columns by name, "*" for all others; columns are then scaled by these alone
    ranges: dict[str, key.Range] = Field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Return the settings that identify a run."""
        more = {
            name: value
            for name, value in (("ranges", self.ranges), ("expand", self.expand))
            if value
        }
        return {"standardise": self.standardise, "numbers": self.numbers or "", **more}


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

    # with noise shared under masks, how many silos may collude or add none; left out, each silo adds all of its noise
    colluding: key.Whole | None = None


class FaultPolicy(SettingsTable):
    """[faults]: how long a run waits for a silo. It never goes on without one."""

    timeout: key.Positive = 60.0  # seconds that a silo has for an answer
    start_timeout: key.Positive = 120.0  # seconds to wait for all silos before the run pauses


class Server(SettingsTable):
    """[server]: where silos reach the coordinator; FLARE's administrators have a separate port."""

    host: key.Text = "localhost"
    port: Port = 8002
    admin_port: Port = 8003

    @model_validator(mode="after")
    def _ports_differ(self, info: ValidationInfo[Path]) -> Self:
        if self.port == self.admin_port:
            raise InputError(
                "same-server-port",
                f"{info.context.name!r} has the same server.port and server.admin_port: FLARE needs two.",
            )
        return self


class FederationFile(SettingsTable):
    """A coordinator's settings; `read` completes those whose defaults depend on others."""

    name: key.Text = "federation"
    silos: key.Names  # its members, in the order of the results
    folder: key.FileName = Field(
        default="run", validate_default=True
    )  # of the run: checkpoints, tables, the model
    model: FederationModel = Field(default_factory=dict, validate_default=True)
    features: FeatureSettings = FeatureSettings()
    algorithm: dict[str, Any] = Field(default_factory=dict)
    objective: dict[str, Any] | None = None
    training: FederationTraining = FederationTraining()
    secure: MaskingSettings | None = None
    privacy: DeployedPrivacy | None = None
    faults: FaultPolicy = FaultPolicy()
    server: Server = Field(default_factory=dict, validate_default=True)
    _path: Path
    _method: Any

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
                method = replace(method, local_steps=LOCAL_STEPS)
        certified = method.proves and private is None
        if tol and not certified:
            kind = type(method).__name__ if private is None else "A run with noise"
            raise InputError(
                "certifies-nothing-leave",
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
    def method(self) -> Any:
        """Algorithm with its objective."""
        return self._method

    @property
    def masking(self) -> dict[str, Any]:
        """Settings of masked sums; empty without masks."""
        return {} if self.secure is None else self.secure.model_dump()

    def request(self) -> dict[str, Any]:
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

    def identity(self) -> dict[str, Any]:
        """Return the settings that identify a run: all but its length and its treatment of faults."""
        about: dict[str, Any] = {
            "algorithm or objective": repr(self.method),
            "model": self.model.values(),
            "features": self.features.values(),
            "seed": self.training.seed,
            "list of silos": list(self.silos),
        }
        budget = {} if self.privacy is None else self.privacy.model_dump(exclude_none=True)
        more = {"way of masking": self.masking, "budget of privacy": budget}
        return about | {name: part for name, part in more.items() if part}


def _check_shared(tables: FederationFile, algorithm: Any, file: Path) -> None:
    """Refuse shared noise if a silo's part of it could be seen."""
    plain = (
        getattr(algorithm, "local_steps", 1) > 1
        or getattr(algorithm, "batch_size", None) is not None
    )
    if tables.secure is None or tables.model.kind != "linear" or plain:
        raise InputError(
            "privacy-colluding-secure",
            f"[privacy] colluding of {file.name!r} needs [secure], a linear model, one local step and all rows: noise "
            "that silos share is in sums of their gradients alone.",
        )


def _check_private(algorithm: Algorithm, file: Path) -> None:
    if not algorithm.asks_losses:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if kind.asks_losses)
        raise InputError(
            "privacy-method-asks",
            f"[privacy] of {file.name!r} needs a method that asks for losses itself, for nothing else may leave "
            f"silos: {able}, not {type(algorithm).__name__}.",
        )


def _check_masking(
    secure: MaskingSettings, tables: FederationFile, algorithm: Algorithm, file: Path
) -> None:
    from scaffpd.secure.masking import Terms  # needs the optional package cryptography

    if algorithm.needs & {VECTORS, MEMORY}:
        raise InputError(
            "looks-silo-own",
            f"{type(algorithm).__name__} looks at every silo's own vectors, or keeps them: take [secure] out of "
            f"{file.name!r}, or use another algorithm, such as ScaffPD.",
        )
    try:
        Terms.usual([str(i) for i in range(len(tables.silos))], secure.colluding)
    except InputError as error:
        raise InputError("secure-check-masking", f"[secure] of {file.name!r}: {error}") from None
