"""`RunRecord`: what a run was, how it ended and how every client is served, as one JSON file.

`train`, `path`, the demo and deployed runs write it as `run.json` into their folder. The page, the
terminal, `--json` and `predict` read nothing else about a run. The models lie beside it, and CSV
files are exports that no command reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)

import scaffpd
from scaffpd.errors import InputError
from scaffpd.files import write_file
from scaffpd.numbers import plural
from scaffpd.pipeline.judging import CoefficientRow
from scaffpd.pipeline.shapes import Shape
from scaffpd.study.newcomers import Newcomers
from scaffpd.study.verdict import Verdict
from scaffpd.tasks import measured_by, measuring, named
from scaffpd.tasks.base import LOSS, BinRow, CutRow, Measure, ScoreRow, Task
from scaffpd.training.metrics import NO, NOISE, YES, Spread, a_fifth

NAME = "run.json"
Kind = TypeVar("Kind")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measure(given: object) -> Measure:
    return given if isinstance(given, Measure) else _known(measuring, given)


def _task(given: object, info: ValidationInfo[None]) -> Task:
    if isinstance(given, Task):
        return given
    measure = info.data.get("measure", LOSS)
    return _known(named, given) if given else measured_by(measure)


def _known(find: Callable[[str], Kind], name: object) -> Kind:
    try:
        return find(str(name))
    except InputError as error:  # of a run of another version
        raise ValueError(str(error)) from None


# A number that may be missing. JSON has neither NaN nor infinity: both are written as null.
Number = Annotated[float | None, BeforeValidator(_finite)]


class RecordPart(BaseModel):
    """A part of a record: its fields never change, and a field that is not known is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClientScore(RecordPart):
    """One model at one client."""

    client: str
    weight: Number = None  # λ_i
    train_rows: int | None = None
    test_rows: int | None = None
    train_loss: Number = None  # without the regulariser, where clients are in this process
    test_loss: Number = None
    train_score: Number = None  # the run's measure
    test_score: Number = None
    epsilon: Number = None  # ε_i that the client has spent


class Overall(RecordPart):
    """A score over all clients: the mean, the mean of the ⌈N/5⌉ worst-served, and the worst."""

    mean: float
    worst_20: float
    worst: float
    worst_client: str = ""

    @classmethod
    def of(cls, values: Mapping[str, float | None], upwards: bool) -> Self | None:
        """Summarise scores by client; `None` where no client has one."""
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            return None
        found = Spread.of([*known], np.array([*known.values()]), upwards)
        return cls.model_validate(found, from_attributes=True)


class RoundRecord(RecordPart):
    """One communication round; `losses` and `weights` are in the order of the record's clients."""

    round: int
    certificate: Number = None
    accepted: bool = True
    exchanges: int = 0  # since the start of the run, as are bytes and seconds
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    losses: list[Number] = []  # f_i; null where a client was not a member or hides its loss
    weights: list[Number] = []  # λ_i


class ModelRecord(RecordPart):
    """One trained model: how its training ended, how it serves every client, and its rounds."""

    name: str
    role: Literal["before", "after", ""] = ""  # of the two that are compared
    objective: str = ""
    algorithm: str = ""
    status: str = ""
    message: str = ""
    certificate: Number = None  # the proven gap
    rounds: Number = None
    exchanges: Number = None
    bytes_up: Number = None
    bytes_down: Number = None
    seconds: Number = None
    strength: Number = None  # the objective's parameter, on a path
    overall: Overall | None = None
    clients: list[ClientScore] = []
    history: list[RoundRecord] = []

    @property
    def megabytes(self) -> float | None:
        """Messages up and down, all clients, in units of 10⁶ bytes."""
        if self.bytes_up is None or self.bytes_down is None:
            return None
        return (self.bytes_up + self.bytes_down) / 1e6

    @property
    def value(self) -> float | None:
        """Σ λ_i f_i after the last round, which bounds the objective, for ψ ≥ 0 (not for Nash)."""
        pairs = [
            (weight, loss)
            for weight, loss in zip(self.last.weights, self.last.losses, strict=False)
            if weight is not None and loss is not None
        ]
        if not pairs or self.objective.startswith("Nash"):
            return None
        return sum(weight * loss for weight, loss in pairs)

    @property
    def vacuous(self) -> bool:
        """Whether the proven gap says nothing: it exceeds the loss, which is at least zero."""
        value = self.value
        return self.certificate is not None and value is not None and self.certificate >= value > 0

    @property
    def last(self) -> RoundRecord:
        known = [one for one in self.history if one.losses]
        return known[-1] if known else RoundRecord(round=0)

    @property
    def by_client(self) -> dict[str, ClientScore]:
        return {score.client: score for score in self.clients}


class PrivacyRecord(RecordPart):
    """(ε, δ) for every training row, over all models together."""

    epsilon: float  # the largest ε_i
    delta: float
    budget: Number = None
    clients: dict[str, float] = {}  # ε_i
    clips: dict[str, float] = {}  # by name: clip, loss_clip, radius, smoothness
    noise: dict[str, list[float]] = {}  # multipliers by name, one or one per client
    seeded: bool = False  # noise that can be repeated protects nobody
    models: int = 1
    scored: bool = True  # false: scores are the noisy losses that silos have sent

    def __str__(self) -> str:
        return f"(ε, δ) = ({self.epsilon:.2f}, {self.delta:g})"


class PathRecord(RecordPart):
    """A fairness path: the parameter that it goes along, and the point that is suggested."""

    parameter: str
    objective: str
    knee: str
    why: str
    rounds: int


class HazardRow(RecordPart):
    """The effect of a column over time, on the logarithm of a hazard, and the test of a change."""

    column: str
    statistic: float
    p: float
    times: list[float]
    effects: list[float]
    errors: list[float]


class EventRecord(RecordPart):
    """Something that happened to a silo of a deployed run."""

    round: int
    client: str
    what: str
    sentence: str


class TableReading(RecordPart):
    """How a run has read its table, so that `predict` reads new rows alike."""

    client: str
    target: str
    decimal: str | None = None
    missing: list[str | int | float] = []  # codes such as -999


class RunRecord(RecordPart):
    """One run of `train`, `path`, the demo, or across organisations."""

    format: Literal[2] = 2
    kind: Literal["train", "path", "demo", "deploy"]
    title: str
    command: str = ""  # makes the run again, or goes on with it
    made: str = ""  # when, in UTC
    version: str = ""
    measure: Annotated[
        Measure, PlainValidator(_measure), PlainSerializer(lambda one: one.name, return_type=str)
    ]
    task: Annotated[
        Task, PlainValidator(_task), PlainSerializer(lambda one: one.name, return_type=str)
    ] = Field(default="", validate_default=True)  # by the measure where it is left out
    split: Literal["train", "test"]  # the rows that scores are about
    labels: list[str] = []
    word: str = "client"  # what a client is called
    clients: list[str]
    models: list[ModelRecord] = Field(min_length=1)
    remarks: list[str] = []
    cautions: list[str] = []
    path: PathRecord | None = None
    privacy: PrivacyRecord | None = None
    joining: Verdict | None = None
    newcomers: Newcomers | None = None
    scores: list[ScoreRow] = []
    bins: list[BinRow] = []
    cuts: list[CutRow] = []  # of two labels: right and wrong at thresholds
    curves: list[ScoreRow] = []  # time, observed and predicted survival, by client or third
    coefficients: list[CoefficientRow] = []
    # in units of the columns: estimate, error, low, high, and the deviation between clients
    effects: list[CoefficientRow] = []
    effects_said: str = ""  # which model they are of, and whose errors
    between_share: Number = None  # of the variance around the effects, for numbers
    shapes: list[Shape] = []  # curves of columns, those that are spread most first
    shapes_said: str = ""  # which rows have chosen them
    # of Cox's model, part by part of the events: the effects of columns over time, and their test
    hazards: list[HazardRow] = []
    events: list[EventRecord] = []
    settings: dict[str, str] = {}  # for people, by name: data, model, rounds, ..
    config: str = ""  # the settings file
    environment: dict[str, JsonValue] = {}
    reading: TableReading | None = None
    fills: dict[str, dict[str, float | str]] = {}  # for missing values, by client and column

    @classmethod
    def now(cls, **parts: object) -> Self:
        made = datetime.now(UTC).isoformat(timespec="seconds")
        return cls.model_validate({"made": made, "version": scaffpd.__version__, **parts})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record in a folder, or refuse it with one sentence."""
        file = folder / NAME
        try:
            return cls.model_validate_json(file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise _no_run(folder) from None
        except OSError as error:
            raise InputError("run-unreadable", f"{str(file)!r} cannot be read: {error}.") from None
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"])) or "its text"
            raise InputError(
                "run-damaged",
                f"{str(file)!r} is not the record of a run of this version ({where}: "
                f"{wrong['msg']}): run it again.",
            ) from None

    def write(self, folder: Path) -> Path:
        """Write it into a folder, all of it or nothing."""
        write_file(folder / NAME, self.model_dump_json(exclude_none=True) + "\n")
        return folder / NAME

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models)

    def model(self, name: str) -> ModelRecord:
        return next(model for model in self.models if model.name == name)

    def role(self, role: str) -> ModelRecord | None:
        """Return the model with this role that has scores."""
        return next((m for m in self.models if m.role == role and m.overall), None)

    @property
    def main(self) -> ModelRecord:
        """The model that the run is about: the one recommended or compared, else the last."""
        if self.joining is not None and self.joining.shown in self.names:
            return self.model(self.joining.shown)
        return self.role("after") or self.role("before") or self.models[-1]

    @property
    def pair(self) -> tuple[ModelRecord, ModelRecord] | None:
        """The model before and the main one; `None` where there is nothing to compare."""
        before = self.role("before")
        after = self.role("after") if self.main is before else self.main
        return (before, after) if before and after else None

    @property
    def scored(self) -> bool:
        return any(model.overall for model in self.models)

    def value(self, score: ClientScore) -> float | None:
        return score.test_score if self.split == "test" else score.train_score

    @property
    def paying(self) -> dict[str, list[str]]:
        """The clients for which the shown model pays ("yes"), costs ("no"), or is within noise."""
        found: dict[str, list[str]] = {YES: [], NO: [], NOISE: []}
        if self.joining is not None:
            for client in self.joining.order:
                found[self.joining.pays(client)].append(client)
        return found

    @property
    def scored_rows(self) -> str:
        return "held-out rows" if self.split == "test" else "rows trained on"

    @property
    def bottom(self) -> str:
        """'worst-served fifth of clients', or 'worst-served client' where that is one."""
        one = a_fifth(len(self.clients)) <= 1
        return f"worst-served {self.word if one else f'fifth of {plural(self.word)}'}"

    def score_rows(self, model: str, by: str = "client") -> dict[str, ScoreRow]:
        """Return the scores of a model by client or group, all rows together last."""
        return {row.group: row for row in self.scores if (row.model, row.by) == (model, by)}

    @property
    def scored_models(self) -> tuple[str, ...]:
        """The models that have scores beyond the measure."""
        return tuple(dict.fromkeys(row.model for row in self.scores))


def is_run(folder: Path) -> bool:
    return (folder / NAME).is_file()


def _no_run(folder: Path) -> InputError:
    if not folder.exists():
        return InputError("no-such-folder", f"There is no folder {str(folder)!r}.")
    if not folder.is_dir():
        sentence = f"{str(folder)!r} is a file; name the folder of a run: {str(folder.parent)!r}?"
        return InputError("run-is-file", sentence)
    below = sorted(folder.glob(f"*/{NAME}"))
    hint = f": did you mean {str(below[0].parent)!r}?" if below else f": it has no {NAME}."
    return InputError("not-a-run", f"{str(folder)!r} is not the folder of a run{hint}")
