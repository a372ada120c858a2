"""`federation.toml`: the coordinator's settings."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from scaffpd.algorithms import ALGORITHMS, Algorithm, Fair, MinimaxSums
from scaffpd.algorithms.base import MEMORY, VECTORS
from scaffpd.algorithms.minimax_sums import able
from scaffpd.data.tabular.agree import EXPANSIONS
from scaffpd.errors import InputError
from scaffpd.models import Linear
from scaffpd.objectives import Objective
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
DROP = "drop"
PAUSE = "pause"
STRIKES = 3  # unusable answers, failures or refusals after which a silo is not asked again
CLEAR, HIDDEN = LOSSES = ("clear", "hidden")
BY = ("mean", "worst fifth")
WORST = "worst fifth"
FOLDS = 3
LIST = "a list of numbers such as [0.1, 0.01]"
Pull = Annotated[float, Field(ge=1e-12, allow_inf_nan=True, description="a number above 0")]
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
    """[training]: the most rounds, the certified gap to stop at, the seed, and whether to measure gains of joining."""

    rounds: key.Count = 1000  # by default fewer with [privacy]
    tol: Tolerance | None = None
    seed: key.Whole = 0
    joining: key.Switch = (
        False  # at the end, ask every silo for its scores alone and with the run's models
    )


class ChoosingSettings(SettingsTable):
    """[choosing]: choose l2, the objective's strength and κ by folds of the silos' training rows, before the run."""

    l2: (
        Annotated[tuple[key.NonNegative, ...], Field(strict=False, min_length=1, description=LIST)]
        | None
    ) = None
    # κ of personal models; inf is one model for all
    strength: (
        Annotated[tuple[Pull, ...], Field(strict=False, min_length=1, description=LIST)] | None
    ) = None
    by: Annotated[str, key.one_of(BY)] = WORST
    folds: Annotated[int, Field(ge=2, le=20, description="a whole number from 2 to 20")] = FOLDS
    budget: key.Count = 300  # the most rounds over all points and folds


class MaskingSettings(SettingsTable):
    """[secure]: how many silos may collude, and whether projections of gradients, and losses, leave in the clear."""

    colluding: key.Count | None = None
    projections: key.Switch = False
    losses: Annotated[str, key.one_of(LOSSES)] = (
        CLEAR  # "hidden": silos find their own weights, and no loss leaves
    )


class DeployedPrivacy(PrivacyBudget):
    """[privacy] of a federation."""

    # with noise shared under masks, how many silos may collude or add none; left out, each silo adds all of its noise
    colluding: key.Whole | None = None


class FaultPolicy(SettingsTable):
    """[faults]: how a federation treats silos that do not answer."""

    quorum: key.Count = 2  # the fewest silos of a run
    timeout: key.Positive = 60.0  # seconds that a silo has for an answer
    max_age: key.Whole = 3  # rounds for which an absent silo's last answers replace it
    missing: Annotated[str, key.one_of((DROP, PAUSE))] = DROP  # what follows, "drop" or "pause"
    # seconds to wait for all silos before a run starts or continues without some
    start_timeout: key.Positive = 120.0
    probe: key.Positive = 10.0  # seconds that an absent silo has to answer a probe
    # the largest ratio of a gradient or an update to the median of the others'
    outlier: Annotated[
        float, Field(ge=10, allow_inf_nan=False, description="a number >= 10 (honest silos differ)")
    ] = 1e4
    # the largest ratio of weight times gradient to the others' median; it caps a silo's weight
    influence: (
        Annotated[float, Field(ge=1, allow_inf_nan=False, description="a number >= 1")] | None
    ) = None


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
    choosing: ChoosingSettings | None = None
    secure: MaskingSettings | None = None
    privacy: DeployedPrivacy | None = None
    faults: FaultPolicy = FaultPolicy()
    server: Server = Field(default_factory=dict, validate_default=True)
    log: key.LogSettings | None = None
    _path: Path
    _method: Any

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FederationFile:
        """Read and check a `federation.toml`."""
        file = Path(path).absolute()
        found = validated(cls, read_toml(file, SILO), file)
        objective = (
            found.objective if found.choosing is None else key.with_usual(found.objective, file)
        )
        method = algorithm_of(found.algorithm, objective, file)
        private = found.privacy
        tol = found.training.tol
        if private is not None:
            _check_private(method, file)
            if hasattr(method, "local_steps") and "local_steps" not in found.algorithm:
                method = replace(method, local_steps=LOCAL_STEPS)
        _check_comparing(found, method, file)
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
        made = found.model_copy(update={"training": training, "faults": _policy(found, file)})
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

    def with_objective(self, objective: Objective) -> FederationFile:
        """Return the same run with another objective."""
        made = self.model_copy()
        made._method = replace(self._method, objective=objective)
        return made

    def request(self) -> dict[str, Any]:
        """Return the run's request, for silos to consent to."""
        trials = 0 if self.choosing is None else self.choosing.budget
        objective = getattr(self.method, "objective", None)
        private = self.privacy
        return {
            "federation": self.name,
            "silos": list(self.silos),
            "algorithm": kind_of(self.method),
            "objective": "" if objective is None else repr(objective),
            "model": self.model.values(),
            "rounds": self.training.rounds * (3 if self.training.joining else 1) + trials,
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
        choosing = (
            {}
            if self.choosing is None
            else self.choosing.model_dump(mode="json", exclude_none=True)
        )
        budget = {} if self.privacy is None else self.privacy.model_dump(exclude_none=True)
        more = {"way of masking": self.masking, "budget of privacy": budget}
        more["way of choosing"] = {name: str(value) for name, value in choosing.items()}
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


def _check_comparing(tables: FederationFile, algorithm: Algorithm, file: Path) -> None:
    """Refuse folds and comparisons for a run without a linear model, with noise or without an objective."""
    asked = {"[choosing]": tables.choosing is not None, "training.joining": tables.training.joining}
    for name in (name for name, wanted in asked.items() if wanted):
        if tables.model.kind != "linear" or tables.privacy is not None:
            private = "a run without [privacy], whose ε it would spend"
            what = "a linear model" if tables.model.kind != "linear" else private
            raise InputError("check-comparing", f"{file.name!r} has {name}, which needs {what}.")
        if getattr(algorithm, "objective", None) is None:
            kind = type(algorithm).__name__
            raise InputError(
                "method-objective",
                f"{file.name!r} has {name}, which needs a method with an objective, not {kind}.",
            )


def _check_private(algorithm: Algorithm, file: Path) -> None:
    if not algorithm.asks_losses:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if kind.asks_losses)
        raise InputError(
            "privacy-method-asks",
            f"[privacy] of {file.name!r} needs a method that asks for losses itself, for nothing else may leave "
            f"silos: {able}, not {type(algorithm).__name__}.",
        )


def _shown(tables: FederationFile, algorithm: Algorithm, twice: bool) -> str | None:
    """Say why losses cannot be hidden; `None` if they can."""
    if not isinstance(algorithm, Fair | MinimaxSums):
        return f"{type(algorithm).__name__} needs losses: use Fair or MinimaxSums"
    if not able(algorithm.objective):
        return f"{type(algorithm.objective).__name__} has no threshold by which silos could find their own weights"
    if isinstance(getattr(algorithm.objective, "offset", None), str):
        return 'offset = "own" shows the optimum of every silo'
    if getattr(algorithm, "batch_size", None) is not None or tables.model.kind != "linear":
        return "minibatches and networks need losses"
    if tables.privacy is not None:
        return "[privacy] has noise on losses already"
    if tables.choosing is not None:
        return "[choosing] compares losses of silos"
    few = not twice and not algorithm.objective.threshold_form(len(tables.silos)).curved
    return f"with so few silos {type(algorithm.objective).__name__} needs them" if few else None


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
        terms = Terms.usual([str(i) for i in range(len(tables.silos))], secure.colluding)
    except InputError as error:
        raise InputError("secure-check-masking", f"[secure] of {file.name!r}: {error}") from None
    shown = "projections show more than losses" if secure.projections else None
    twice = (
        len(terms.names) - terms.colluding > 2
    )  # whether silos admit one vector to two sums, see `weightings`
    if secure.losses == HIDDEN and (shown := shown or _shown(tables, algorithm, twice)) is not None:
        raise InputError(
            "secure-losses", f"[secure] of {file.name!r} cannot have losses = {HIDDEN!r}: {shown}."
        )


def _policy(tables: FederationFile, file: Path) -> FaultPolicy:
    """Complete [faults]; masked sums wait for a silo that leaves, as sums without it would reveal its vector."""
    silos = len(tables.silos)
    given = tables.faults.model_fields_set
    fewest = 1 if tables.secure is None else (tables.secure.colluding or 1) + 2  # as in `Terms`
    quorum = max(tables.faults.quorum if "quorum" in given else max(1, silos - 1), fewest)
    if quorum > silos:
        raise InputError(
            "quorum-silos", f"{file.name!r} has a quorum of {quorum}, but only {silos} silos."
        )
    missing = tables.faults.missing if "missing" in given else PAUSE if fewest > 1 else DROP
    return tables.faults.model_copy(update={"quorum": quorum, "missing": missing})
