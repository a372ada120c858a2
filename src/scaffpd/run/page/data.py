"""Contents of a run folder as plain data (models, clients, rounds, privacy), and the formats of its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaffpd.numbers import measured, plural
from scaffpd.run import EVERYONE, Row
from scaffpd.training.metrics import NO, NOISE, YES, RelativeGain, a_fifth

FEW = 30  # test rows: with fewer, one row more or less moves an accuracy by more than three points
SEEDED = "Noise was drawn from a seed, to be repeated: whoever knows the seed can take it off, so nobody is protected."
NOT_COVERED = (
    "ε counts what was sent in training. The scores here, counts of rows and labels, categories, and the means, "
    "deviations and fills of columns (where no ranges are declared) are exact and not covered."
)
SENT = (
    "The losses here are those that silos have sent, and carry noise. Names and numbers of rows, labels, columns and "
    "categories, and sums over columns where no ranges are declared, are exact and not covered by ε."
)


@dataclass(frozen=True)
class PrivacyStatement:
    """(ε, δ) for every training row."""

    epsilon: float  # the largest ε_i, of all models together
    delta: float  # δ
    clients: Mapping[str, float] = field(default_factory=dict, repr=False)  # ε_i by client
    models: int = 1  # how many models share it
    seeded: bool = False  # whether noise can be repeated
    settings: tuple[tuple[str, str], ...] = ()  # (name, value) pairs of clips and noise
    # whether clients were scored as well; otherwise the scores are the noisy losses that they have sent
    scored: bool = True

    @property
    def pair(self) -> str:
        """Both numbers."""
        return f"(ε, δ) = ({self.epsilon:.2f}, {self.delta:g})"

    @property
    def scope(self) -> str:
        """Unit that the numbers protect."""
        together = "" if self.models < 2 else "both" if self.models == 2 else f"all {self.models}"
        return f"for every record, {together} models together" if together else "for every record"

    @property
    def sentence(self) -> str:
        """The promise, with the smallest ε_i where clients differ."""
        low = min(self.clients.values(), default=self.epsilon)
        least = (
            "" if f"{low:.2f}" == f"{self.epsilon:.2f}" else f"; the least of a client is {low:.2f}"
        )
        return f"{self.pair} {self.scope}{least}."

    def cautions(self, rows: Mapping[str, int | None]) -> tuple[str, ...]:
        """List what the promise does not cover, given the number of training rows of each client."""
        many = [(name, n) for name, n in rows.items() if n and self.delta * n >= 1]
        doubt = [
            f"δ = {self.delta:g} is no less than one over the {n} rows of {name}: one of them may be given away."
            for name, n in many[:1]
        ]
        return (*([SEEDED] if self.seeded else []), *doubt, NOT_COVERED if self.scored else SENT)


@dataclass(frozen=True)
class ModelSummary:
    """One trained model, and how its run ended."""

    name: str  # as in every table
    role: str = ""  # "before", "after" or ""
    objective: str = ""  # what was minimised
    algorithm: str = ""  # how
    status: str = ""  # converged, round limit, ..
    message: str = ""  # the same in a sentence
    certificate: float | None = None  # the proven gap; `None` where nothing is proven
    value: float | None = (
        None  # of the objective at the end, or a bound above it; `None` where it is not known
    )
    rounds: float | None = (
        None  # communication rounds made (a mean over seeds for comparisons, as all costs are)
    )
    exchanges: float | None = None  # request-reply turns
    megabytes: float | None = None  # up and down, all clients
    seconds: float | None = None  # duration of the run
    strength: float | None = None  # the path's parameter
    failure: str = ""  # why a comparison does not rank it

    @property
    def useless(self) -> bool:
        """Return whether the proven gap is vacuous: wider than the loss itself, which is at least zero."""
        return (
            self.certificate is not None
            and self.value is not None
            and self.certificate >= self.value > 0
        )


@dataclass(frozen=True)
class Score:
    """One model at one client."""

    client: str  # its name
    value: float | None  # the run's measure on the run's split; `None` where there is none
    train_rows: int | None = None  # rows trained on
    test_rows: int | None = None  # rows held out
    weight: float | None = None  # λ_i, how much the client counts
    deviation: float | None = None  # standard deviation of the value over splits or seeds
    # whether the change from the model before is clear of noise; `None` where that was not tested
    clear: bool | None = None


@dataclass(frozen=True)
class Overall:
    """A model over all clients: the mean, the mean of the ⌈N/5⌉ worst-served, the worst-served and its name."""

    mean: float
    worst_20: float
    worst: float
    worst_client: str
    mean_sd: float | None = None
    worst_20_sd: float | None = None


@dataclass(frozen=True)
class Round:
    """One row of rounds.csv; empty cells are `None`."""

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
class JoiningReport:
    """Every client's gain from joining: the sentences of the summary, and joining.csv by client and model."""

    recommendation: str  # alone, average, fair or personal
    sentence: str
    details: str
    interval: str  # how intervals were made
    models: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(
        repr=False
    )  # client → model → its row
    overall: Mapping[str, RelativeGain] = field(
        default_factory=dict
    )  # model → its gain over alone, all clients
    splits: int = 1  # random splits that intervals are over

    @property
    def shown(self) -> str:
        """The model that clients are told about: the one recommended, else the last."""
        return self.recommendation if self.recommendation != "alone" else self.models[-1]

    @property
    def paying(self) -> dict[str, list[str]]:
        """The clients for which the shown model pays ("yes"), costs ("no") or is within noise."""
        found: dict[str, list[str]] = {YES: [], NO: [], NOISE: []}
        for client in self.order:
            found.setdefault(self.gain(client)[1], []).append(client)
        return found

    def gain(self, client: str) -> tuple[float, str]:
        """Return the share by which the shown model's loss is below that alone, and whether that pays."""
        row = self.rows[client][self.shown]
        return float(row.get("gain_over_alone") or 0.0), str(row.get("pays") or "")

    @property
    def order(self) -> list[str]:
        """The clients, the one that gains most first."""
        return sorted(self.rows, key=lambda client: -self.gain(client)[0])


@dataclass(frozen=True)
class StrengthPoint:
    """A strength κ of personal models, and the losses on rows left out by folds."""

    strength: float  # κ; infinite for one model for all, 0 for everybody alone
    mean: float
    worst: float  # of the worst fifth
    mean_error: float = 0.0
    worst_error: float = 0.0
    chosen: bool = (
        False  # whether folds choose it: the simplest that is not clearly behind the best
    )
    personal: bool = False  # whether it is that of the run's personal models

    @property
    def label(self) -> str:
        """Label of an axis."""
        ends = {math.inf: "one for all", 0.0: "alone"}
        return ends.get(self.strength) or f"{float(f'{self.strength:.2g}'):g}"


@dataclass(frozen=True)
class CoalitionReport:
    """The game of joining: coalition.csv by client, and what the summary says of it."""

    rows: Mapping[str, Mapping[str, float]] = field(
        repr=False
    )  # client → its part in the game, by name
    effects: Mapping[str, Mapping[str, float]] = field(
        repr=False
    )  # client → who leaves → how much its loss rises
    sentence: str = ""
    peace: str = ""  # whether a group would do better by itself

    @property
    def names(self) -> tuple[str, ...]:
        """The clients."""
        return tuple(self.rows)

    @property
    def saved(self) -> float:
        """Saving of all clients together against each alone."""
        return sum(row["gets"] for row in self.rows.values())

    @property
    def unit(self) -> str:
        """Unit of `share`."""
        return "share of everything that is saved" if self.saved > 0 else "loss"

    def share(self, value: float) -> float:
        """Return a part of what is saved; the value itself where nothing is."""
        return value / self.saved if self.saved > 0 else value

    def effect(self, client: str, other: str) -> float:
        """Return the share by which a client's loss rises when another leaves."""
        return self.effects[client].get(other, 0.0) / max(self.rows[client]["together"], 1e-300)

    def missed(self, client: str) -> float:
        """Return how much the others' losses rise together when a client leaves."""
        return sum(row.get(client, 0.0) for name, row in self.effects.items() if name != client)


@dataclass(frozen=True)
class PredictionReport:
    """scores.csv, reliability.csv and coefficients.csv of a run."""

    scores: Mapping[tuple[str, str, str], Row] = field(
        repr=False
    )  # by model, column of groups, and group
    bins: Sequence[Row] = field(repr=False)
    coefficients: Sequence[Row] = field(repr=False)
    label: str = ""  # what probabilities are of, of two labels

    @property
    def models(self) -> tuple[str, ...]:
        """The models, in the order of the table."""
        return tuple(dict.fromkeys(model for model, _, _ in self.scores))

    @property
    def groups(self) -> tuple[str, ...]:
        """The columns, beside clients, whose values are scored."""
        return tuple(dict.fromkeys(by for _, by, _ in self.scores if by != "client"))

    def of(self, model: str, by: str = "client") -> dict[str, Row]:
        """Return the rows of a model by client or group, without that of all rows."""
        return {
            group: row
            for (m, b, group), row in self.scores.items()
            if (m, b) == (model, by) and group != EVERYONE
        }

    def total(self, model: str) -> Row:
        """Return the row for all held-out rows under a model."""
        return self.scores[model, "client", EVERYONE]


@dataclass(frozen=True)
class ReportData:
    """Everything that a report shows."""

    kind: str  # "train", "path", "demo", "compare" or "deploy"
    title: str
    command: str
    measure: str  # "accuracy" (a share), "rmse" or "loss"
    split: str  # "test" or "train"
    word: str  # what a client is, singular
    models: tuple[ModelSummary, ...]
    scores: dict[str, tuple[Score, ...]]  # per model, one `Score` per client
    overall: dict[str, Overall]  # per model that has scores
    rounds: tuple[Round, ...] = ()
    partition: Sequence[
        Row
    ] = ()  # partition.csv: rows of one label at one client; no label for regression
    events: Sequence[Row] = ()  # events.csv: what happened to silos of a deployed run
    settings: tuple[tuple[str, str], ...] = ()  # (name, value) pairs for "how it was made"
    files: tuple[tuple[str, str], ...] = ()  # (name, text) of files to show whole
    remarks: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()  # sentences that the folder states itself
    answers: Mapping[str, str] = field(
        default_factory=dict
    )  # likewise, to questions of `verdict.QUESTIONS`
    path: dict[str, Any] | None = None  # as in summary.json
    note: str = ""  # a sentence that belongs beneath the figure of clients
    privacy: PrivacyStatement | None = None  # the promise of a private run
    joining: JoiningReport | None = None  # what joining brings, where that was measured
    strengths: tuple[StrengthPoint, ...] = ()  # from one model for all to everybody alone
    coalition: CoalitionReport | None = None  # who gains from whom, where that was measured
    differences: tuple[
        tuple[str, tuple[str, ...]], ...
    ] = ()  # settings of several runs that are not the same
    against: Mapping[str, str] = field(
        default_factory=dict
    )  # of several runs: their mean loss against that before
    predictions: PredictionReport | None = (
        None  # scores beyond accuracy, calibration and coefficients
    )
    written: Mapping[str, Any] = field(
        default_factory=dict
    )  # summary.json with clients.csv in it, for --json

    @property
    def upwards(self) -> bool:
        """Return whether more is better."""
        return self.measure == "accuracy"

    @property
    def sign(self) -> int:
        """1 where more is better, −1 where less is."""
        return 1 if self.upwards else -1

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names."""
        return tuple(model.name for model in self.models)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, from whichever table has them."""
        if self.scores:
            return tuple(score.client for score in next(iter(self.scores.values())))
        named = [row["client"] for row in self.partition] or [
            c for r in self.rounds for c in r.losses
        ]
        return tuple(dict.fromkeys(named))

    @property
    def bottom(self) -> str:
        """'worst-served fifth of clients', or 'worst-served client' where that is one."""
        return f"worst-served {self.word if a_fifth(len(self.clients)) <= 1 else f'fifth of {plural(self.word)}'}"

    def moved(self, before: str, after: str) -> tuple[str, str]:
        """Write how the worst-served fifth and the mean change from one model to another."""
        ends = [
            (getattr(self.overall[before], it), getattr(self.overall[after], it))
            for it in ("worst_20", "mean")
        ]
        fifth, mean = (
            f"{measured(a, self.measure)} → {measured(b, self.measure)}" for a, b in ends
        )
        return fifth, mean

    def role(self, role: str) -> str | None:
        """Return the name of the model with this role that has scores."""
        return next(
            (m.name for m in self.models if m.role == role and m.name in self.overall), None
        )

    @property
    def pair(self) -> tuple[str, str] | None:
        """The names of the models before and after; `None` where there is nothing to compare."""
        before = self.role("before")
        after = self.role("after")
        return (before, after) if before and after else None

    @property
    def tested(self) -> dict[str, bool]:
        """Return whether each client's change exceeds noise; empty if that was not tested."""
        return (
            {s.client: s.clear for s in self.scores[self.pair[1]] if s.clear is not None}
            if self.pair
            else {}
        )

    def gains(self, before: str, after: str) -> dict[str, float]:
        """Return how much better the second model serves every client that both have scores of."""
        old, new = (
            {s.client: s.value for s in self.scores[name] if s.value is not None}
            for name in (before, after)
        )
        return {client: self.sign * (new[client] - old[client]) for client in old if client in new}

    @property
    def shown(self) -> tuple[str, ...]:
        """The models that are shown at first: all of up to four, else those before and after."""
        main = tuple(m.name for m in self.models if m.role)
        return self.names if len(self.models) <= 4 or not main else main


def overall(scores: Sequence[Score], upwards: bool) -> Overall | None:
    """Summarise a model's scores; `None` where no client has a value."""
    known = [
        (float(s.value), s.client) for s in scores if s.value is not None and math.isfinite(s.value)
    ]
    if not known:
        return None
    ordered = sorted(known, key=lambda one: one[0] if upwards else -one[0])
    fifth = [value for value, _ in ordered[: a_fifth(len(ordered))]]
    mean = sum(value for value, _ in known) / len(known)
    return Overall(mean, sum(fifth) / len(fifth), ordered[0][0], ordered[0][1])


def brief(name: str, most: int = 48) -> str:
    """Shorten a name that would take over the sentence it is in."""
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def capital(sentence: str) -> str:
    """Return a sentence with its first letter as a capital."""
    return sentence[:1].upper() + sentence[1:]
