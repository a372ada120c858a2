"""What a run's folder holds, as plain data: models, clients, rounds, privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaffpd.errors import InputError
from scaffpd.metrics import a_fifth
from scaffpd.report.files import number
from scaffpd.report.formats import plain

SEEDED = "Noise was drawn from a seed, to be repeated: whoever knows the seed can take it off, so nobody is protected."
SYMBOLS = {"clip": "gradient C", "loss_clip": "loss B", "radius": "length of a row R", "smoothness": "smoothness L"}
NOISE = {"noise": "of gradients z", "loss_noise": "of losses z_L"}
NOT_COVERED = (
    "ε counts what was sent in training. The scores here, counts of rows and labels, and the means, deviations, "
    "categories and fills of columns are exact and not covered."
)

SENT = (
    "The losses here are those that silos have sent, and carry noise. Names and numbers of rows, labels, columns and "
    "categories, and sums over columns, are exact and not covered by ε."
)


@dataclass(frozen=True)
class PrivacyStatement:
    """(ε, δ) for every training row.

    Attributes:
        epsilon: the largest ε_i, of all models together.
        delta: δ.
        clients: ε_i by client.
        models: how many models share it.
        seeded: whether noise can be repeated.
        settings: (what, how) pairs.
        scored: whether scores were made besides; else they are losses that clients have sent, noise and all.
    """

    epsilon: float
    delta: float
    clients: Mapping[str, float] = field(default_factory=dict, repr=False)
    models: int = 1
    seeded: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    scored: bool = True

    @property
    def pair(self) -> str:
        """Both numbers."""
        return f"(ε, δ) = ({self.epsilon:.2f}, {self.delta:g})"

    @property
    def whom(self) -> str:
        """What the numbers are about."""
        all_of_them = "" if self.models < 2 else "both" if self.models == 2 else f"all {self.models}"
        return f"for every record, {all_of_them} models together" if all_of_them else "for every record"

    @property
    def sentence(self) -> str:
        """The promise; ε_i as well where clients differ."""
        low = min(self.clients.values(), default=self.epsilon)
        least = "" if f"{low:.2f}" == f"{self.epsilon:.2f}" else f"; the least of a client is {low:.2f}"
        return f"{self.pair} {self.whom}{least}."

    def cautions(self, rows: Mapping[str, int | None]) -> tuple[str, ...]:
        """What the promise leaves open, for clients with so many training rows."""
        many = [(name, n) for name, n in rows.items() if n and self.delta * n >= 1]
        doubt = [
            f"δ = {self.delta:g} is no less than one over the {n} rows of {name}: one of them may be given away."
            for name, n in many[:1]
        ]
        return (*([SEEDED] if self.seeded else []), *doubt, NOT_COVERED if self.scored else SENT)


def read_privacy(found: Any) -> PrivacyStatement | None:
    """From "privacy" of a summary; `None` where there is none."""
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("clients") or {}, dict):
        raise InputError("The summary has no table of its privacy; the run has to be made again.")
    epsilon, delta = number(found, "epsilon"), number(found, "delta")
    if epsilon is None or delta is None:
        raise InputError("The summary has a privacy without ε and δ; the run has to be made again.")
    clients = {str(name): float(value) for name, value in (found.get("clients") or {}).items()}
    models = len(found.get("models") or [1])
    return PrivacyStatement(epsilon, delta, clients, models, bool(found.get("seeded")), _settings(found))


def _settings(found: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Clips and noise in words."""
    clips = [f"{name} = {found[key]:g}" for key, name in SYMBOLS.items() if found.get(key) is not None]
    noise = [f"{name} = {_reach(found[key])}" for key, name in NOISE.items() if found.get(key) is not None]
    pairs = (("Privacy: clips", ", ".join(clips)), ("Privacy: noise multipliers", ", ".join(noise)))
    return tuple((name, text) for name, text in pairs if text)


def _reach(value: Any) -> str:
    several = value if isinstance(value, list) else [value]
    low, high = plain(min(several)), plain(max(several))
    return low if low == high else f"{low} to {high}"


FEW = 30  # test rows: below, one row more or less moves an accuracy by more than three points


@dataclass(frozen=True)
class ModelSummary:
    """One trained model, and how its run ended.

    Attributes:
        name: as in every table.
        role: "before", "after" or "".
        objective: what was minimised.
        algorithm: how.
        status: converged, round limit, ...
        message: the same in a sentence.
        certificate: the proven gap; `None` where nothing is proven.
        rounds: communication rounds made (a mean over seeds for comparisons, as all costs are).
        exchanges: request-reply turns.
        megabytes: up and down, all clients.
        seconds: of the run.
        strength: of the path's parameter.
        failure: why a comparison does not rank it.
    """

    name: str
    role: str = ""
    objective: str = ""
    algorithm: str = ""
    status: str = ""
    message: str = ""
    certificate: float | None = None
    rounds: float | None = None
    exchanges: float | None = None
    megabytes: float | None = None
    seconds: float | None = None
    strength: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Score:
    """One model at one client.

    Attributes:
        client: its name.
        value: the story's measure on the story's split; `None` where there is none.
        train_rows: trained on.
        test_rows: held out.
        weight: λ_i, how much the client counts.
        deviation: of the value, over splits or seeds.
        clear: whether the change against the model before is clear of noise; `None` where nobody has looked.
    """

    client: str
    value: float | None
    train_rows: int | None = None
    test_rows: int | None = None
    weight: float | None = None
    deviation: float | None = None
    clear: bool | None = None


@dataclass(frozen=True)
class Overall:
    """A model over all clients: the mean, the mean over the ⌈N/5⌉ worst-served, the worst-served and its name."""

    mean: float
    worst_20: float
    worst: float
    worst_client: str
    mean_sd: float | None = None
    worst_20_sd: float | None = None


@dataclass(frozen=True)
class Round:
    """One row of rounds.csv; what a cell does not have is `None`."""

    model: str
    number: int
    certificate: float | None
    exchanges: float | None
    megabytes: float | None
    absent: int
    mean: float | None
    worst_20: float | None
    losses: dict[str, float] = field(repr=False)
    weights: dict[str, float] = field(repr=False)


@dataclass(frozen=True)
class Share:
    """Rows of one label at one client; the label is empty for regression."""

    client: str
    label: str
    train_rows: int
    test_rows: int


@dataclass(frozen=True)
class Event:
    """Something that happened to a silo of a deployed run."""

    round: int
    silo: str
    what: str
    sentence: str


@dataclass(frozen=True)
class ReportData:
    """Everything that a page says.

    Attributes:
        kind: "train", "path", "demo", "compare" or "deploy".
        measure: "accuracy" (a share), "rmse" or "loss".
        split: "test" or "train".
        word: what a client is, singular.
        scores: per model, one `Score` a client.
        overall: per model that has scores.
        settings: (what, how) pairs for "how it was made".
        files: (name, text) of files worth showing whole.
        verdict: sentences that the folder brings itself.
        path: as in summary.json.
        notes: (figure, sentence) pairs that belong beneath a figure.
        privacy: the promise of a private run.
    """

    kind: str
    title: str
    command: str
    measure: str
    split: str
    word: str
    models: tuple[ModelSummary, ...]
    scores: dict[str, tuple[Score, ...]]
    overall: dict[str, Overall]
    rounds: tuple[Round, ...] = ()
    partition: tuple[Share, ...] = ()
    events: tuple[Event, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    path: dict[str, Any] | None = None
    notes: tuple[tuple[str, str], ...] = ()
    privacy: PrivacyStatement | None = None

    @property
    def upwards(self) -> bool:
        """Whether more is better."""
        return self.measure == "accuracy"

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names."""
        return tuple(model.name for model in self.models)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, of whatever part of the folder has them."""
        if self.scores:
            return tuple(score.client for score in next(iter(self.scores.values())))
        named = [share.client for share in self.partition] or [c for r in self.rounds for c in r.losses]
        return tuple(dict.fromkeys(named))

    def role(self, role: str) -> ModelSummary | None:
        """The model before, or after; only one that has scores can be compared."""
        return next((m for m in self.models if m.role == role and m.name in self.overall), None)

    @property
    def shown(self) -> tuple[str, ...]:
        """The models that a reader sees first: all of a few, else those before and after."""
        main = tuple(m.name for m in self.models if m.role)
        return self.names if len(self.models) <= 4 or not main else main


def overall(scores: Sequence[Score], upwards: bool) -> Overall | None:
    """A model's scores in a few numbers, `None` without any; clients without a value do not count."""
    known = [s for s in scores if s.value is not None and math.isfinite(s.value)]
    if not known:
        return None
    values = {id(s): float(s.value or 0.0) for s in known}
    order = sorted(known, key=lambda s: values[id(s)] if upwards else -values[id(s)])
    fifth = order[: a_fifth(len(order))]
    return Overall(
        mean=sum(values.values()) / len(known),
        worst_20=sum(values[id(s)] for s in fifth) / len(fifth),
        worst=values[id(order[0])],
        worst_client=order[0].client,
    )
