"""`Verdict`: what joining brings, in fields, and in sentences that are made of nothing else.

`tests/test_sentences.py` draws fields by chance and reads the sentences back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scaffpd.numbers import called, plain, several
from scaffpd.tasks.base import Task
from scaffpd.training.metrics import NO, NOISE, YES, a_fifth

CONSTANT = "constant"
ALONE = "alone"
AVERAGE = "average"
FAIR = "fair"
PERSONAL = "personal"
JOINT = (AVERAGE, FAIR, PERSONAL)
MODELS = (CONSTANT, ALONE, *JOINT)  # the simplest first
CALLED = {
    AVERAGE: "one average model",
    FAIR: "one fair model",
    PERSONAL: "personal models",
    ALONE: "alone",
    CONSTANT: "a constant answer",
}
# outcomes
PAYS = "joining pays"
AS_GOOD = "as good"
TOO_FEW = "too few rows"
LEVEL = 0.01  # at which an outcome is shown
MARGIN = 0.01  # of the least loss: a simpler model within it may be taken
EQUAL = 0.02  # of the loss: a model is as good where no other is better by as much
TIMES = 10  # a loss that rises by more is said as a multiple
NAMED = 3  # clients that a sentence names


@dataclass(frozen=True)
class Gain:
    """A share by which a loss is lower, with its 95 % interval; no ends where rows are too few."""

    value: float
    low: float | None = None
    high: float | None = None

    def than(self, other: str = "") -> str:
        """Say it, as in "12 % lower than alone (95 % interval: 8.2 to 15 % lower)"."""
        return f"{sided(self.value, other)} ({self.range})"

    @property
    def range(self) -> str:
        """The interval with its level, and its sides where there are two."""
        if self.low is None or self.high is None:
            return "too few rows for an interval"
        ends = [sided(self.low), sided(self.high)]
        for side in (" lower", " higher"):
            if all(end.endswith(side) for end in ends):  # the smaller number first, one unit
                ends = [end.removesuffix(side) for end in sorted(ends, key=size_of)]
                ends[0] = ends[0].removesuffix(" %")
        return f"95 % interval: {' to '.join(ends)}"


def size_of(said: str) -> float:
    """Return the number that a share begins with."""
    return float(said.split()[0])


def sided(share: float, than: str = "") -> str:
    """Say by which share a loss is lower or higher, or how many times as high it is."""
    if share < -TIMES:
        return f"{plain(1 - share)} times as high{f' as {than}' if than else ''}"
    size = 100 * abs(share)
    side = "higher" if share < 0 else "lower"
    return f"{size:.{size < 9.95:d}f} % {side}{f' than {than}' if than else ''}"


@dataclass(frozen=True)
class ClientRow:
    """One model on a client's held-out rows, against a constant, alone and the average model."""

    client: str
    model: str
    train_rows: int
    test_rows: int
    test_loss: float
    test_score: float | None = None
    gains: Mapping[str, Gain] = field(default_factory=dict)  # by the model that they are over
    pays: Mapping[str, str] = field(default_factory=dict)  # whether they are clear


@dataclass(frozen=True)
class ModelRow:
    """One model over all clients, with the gains in the mean and for the worst-served fifth."""

    model: str
    loss: float  # expected on new rows
    score: float | None = None
    gains: Mapping[str, Gain] = field(default_factory=dict)
    worst: Mapping[str, Gain] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether it pays for a client to train with the others.

    Attributes:
        recommendation: constant, alone, average, fair or personal.
        outcome: "joining pays" or "as good", which are shown, or "too few rows".
        chance: the p-value of what is to be shown of the recommended model.
        overall: every model over the clients.
        rows: every model client by client.
        weights: of the clients in means.
        loss: what models minimise.
        interval: how intervals were made.
        splits: how many random splits this is the mean of.
        certificates: the proven gap of every model, of alone the largest.
    """

    recommendation: str
    outcome: str
    chance: float
    overall: Sequence[ModelRow]
    rows: Sequence[ClientRow] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    loss: str = ""
    interval: str = ""
    splits: int = 1
    certificates: Mapping[str, float | None] = field(default_factory=dict)

    @cached_property
    def by_client(self) -> dict[str, dict[str, ClientRow]]:
        """Client → model → its row."""
        found: dict[str, dict[str, ClientRow]] = {}
        for row in self.rows:
            found.setdefault(row.client, {})[row.model] = row
        return found

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are compared, the simplest first."""
        return tuple(self.by_model)

    @cached_property
    def by_model(self) -> dict[str, ModelRow]:
        """Model → its row."""
        return {row.model: row for row in self.overall}

    @property
    def least(self) -> ModelRow:
        """The model of the least expected loss."""
        return min(self.overall, key=lambda row: row.loss)

    @property
    def shown(self) -> str:
        """The joint model that is compared: the one recommended, else that of the least loss."""
        joint = [row for row in self.overall if row.model in JOINT]
        ours = self.recommendation in JOINT
        return self.recommendation if ours else min(joint, key=lambda row: row.loss).model

    @property
    def base(self) -> str:
        """What the joint model is compared with: alone, or a constant where that is advised."""
        return CONSTANT if self.recommendation == CONSTANT else ALONE

    def gain(self, client: str) -> float:
        """Return how much lower a client's loss is with the shown model than with the base."""
        gains = self.by_client[client][self.shown].gains
        return gains[self.base].value if self.base in gains else 0.0

    def pays(self, client: str) -> str:
        """Return whether that is clear: yes, no, or within noise."""
        return self.by_client[client][self.shown].pays.get(self.base, NOISE)

    @property
    def order(self) -> list[str]:
        """The clients, the one that gains most first."""
        return sorted(self.by_client, key=lambda client: -self.gain(client))

    def marked(self, outcome: str, model: str, over: str) -> list[str]:
        """Return the clients whose gain has this outcome."""
        rows = (row for row in self.rows if row.model == model)
        return [row.client for row in rows if row.pays.get(over, NOISE) == outcome]

    def advice(self, task: Task, word: str) -> str:
        """Say what to do, and whether that is shown."""
        best = self.recommendation
        several = len(self.by_client) > 1
        alone = f"every {word} trains alone" if several else f"the {word} trains alone"
        if self.outcome == PAYS:
            return f"Use {CALLED[best]}: joining pays (shown)."
        if self.outcome == TOO_FEW:
            what = f"whether these columns predict the {task.goal}"
            what = what if best == CONSTANT else "whether joining pays"
            guess = f"that {alone}" if best == ALONE else CALLED[best]
            return f"Too few rows to tell {what}: the best guess is {guess}."
        if best == CONSTANT:
            return f"These columns do not predict the {task.goal}: a constant is as good (shown)."
        return f"Let {alone.replace('trains', 'train')}: that is as good as joining (shown)."

    def sentences(self, task: Task, word: str) -> list[str]:
        """Return the advice, and what it rests on: in units of the target, then in losses."""
        found = [self.advice(task, word), self.scored(task, word), self.compared(task, word)]
        found += [self.fairness(task, word)] if self.fair else []
        found += [self.chosen, self.tested]
        if AVERAGE in self.by_model and self.shown == PERSONAL:
            against = f"Against one average model the {task.lost} of personal ones is"
            found.append(f"{against} {self._over(AVERAGE, word)}.")
        return found

    def scored(self, task: Task, word: str) -> str:
        """Give the mean scores of the models that matter."""
        named = dict.fromkeys([self.shown, AVERAGE, ALONE, CONSTANT])
        known = {name: self.by_model[name].score for name in named if name in self.by_model}
        scores = [f"{CALLED[m]} {task.measure.brief(v)}" for m, v in known.items() if v is not None]
        return f"{task.measure.mean}{self._mean(word)}: {', '.join(scores) or 'not known'}."

    def compared(self, task: Task, word: str) -> str:
        """Say how the shown model's loss compares with the base, and for how many it is clear."""
        said = self.much(task, word)
        if len(self.by_client) == 1:
            return f"{said}."
        gain, lose = (len(self.marked(one, self.shown, self.base)) for one in (YES, NO))
        said += f"; {gain or 'none'} of {several(len(self.by_client), word)} clearly "
        return f"{said}{verb('gain', gain)}, {lose or 'none'} clearly {verb('lose', lose)}."

    def much(self, task: Task, word: str) -> str:
        """Say how the shown model's loss compares with the base."""
        return f"With {CALLED[self.shown]} the {task.lost} is {self._over(self.base, word)}"

    def _over(self, other: str, word: str) -> str:
        """Say how the shown model's loss compares, in the mean and for the worst-served fifth."""
        row = self.by_model[self.shown]
        many = len(self.by_client)
        said = (
            f"{row.gains[other].than('' if other == AVERAGE else CALLED[other])}{self._mean(word)}"
        )
        if many == 1:
            return said
        fifth = word if a_fifth(many) == 1 else "fifth"
        return f"{said}, for the worst-served {fifth} {row.worst[other].than()}"

    def _mean(self, word: str) -> str:
        many = len(self.by_client)
        return "" if many == 1 else f" in the mean over {several(many, word)}"

    @property
    def chosen(self) -> str:
        """Say why this model and no other."""
        own, least = self.by_model[self.recommendation], self.least
        if own.loss <= least.loss:
            return "No other model has a lower expected loss on new rows."
        lower = sided(1 - least.loss / own.loss)
        return (
            f"On new rows the loss expected with {CALLED[least.model]} is {lower}: within the "
            f"margin of {100 * MARGIN:.0f} %, the simpler model is taken."
        )

    @property
    def tested(self) -> str:
        """Say what is shown, or is not."""
        joint = sum(row.model in JOINT for row in self.overall)
        none = "no other" if self.recommendation == CONSTANT else "no joint"
        what = f"that {none} model has a loss that is lower by {100 * EQUAL:.0f} % or more"
        if self.recommendation in JOINT:
            what = "that its loss is lower than alone and than that of a constant answer"
            what += f", {several(joint, 'joint model')} to choose from" if joint > 1 else ""
        shows = "does not show" if self.outcome == TOO_FEW else "shows"
        chance = "p < 0.0001" if self.chance < 1e-4 else f"p = {self.chance:.2g}"
        return f"A one-sided test at {100 * LEVEL:.0f} % {shows} {what} ({chance})."

    @property
    def fair(self) -> bool:
        """Whether a fair and an average model are there to be compared."""
        return FAIR in self.by_model and AVERAGE in self.by_model and len(self.by_client) > 1

    def fairness(self, task: Task, word: str) -> str:
        """Say whom the fair model serves clearly better than the average one, and who pays.

        Personal models have one objective, the mean over rows: none of eight others served new rows
        reliably better on fifteen tables (`benchmarks/accuracy/fairness.py`).
        """
        many = several(len(self.by_client), word)
        clear = {one: self.marked(one, FAIR, AVERAGE) for one in (YES, NO)}
        row = self.by_model[FAIR]
        said = "Against one average model, the fair one serves"
        if not any(clear.values()):
            over = f"{row.gains[AVERAGE].than()} in the mean over them"
            return f"{said} none of {many} clearly better or worse; its {task.lost} is {over}."
        better, worse = (self._some(clear[one], word) for one in (YES, NO))
        both = f"{better or f'none of {many}'} clearly better and {worse or 'none'} clearly worse"
        rest = [self.by_client[c] for c in self.by_client if c not in clear[YES] + clear[NO]]
        if not rest:
            return f"{said} {both} ({task.lost})."
        fair, before = (sum(own[m].test_loss for own in rest) for m in (FAIR, AVERAGE))
        share = sided(1 - fair / before if before else 0.0)
        others = f"in the mean over the other {several(len(rest), word)}"
        others = others if len(rest) > 1 else f"at the other {word}"
        return f"{said} {both}; {others} its {task.lost} is {share}."

    def _some(self, names: Sequence[str], word: str) -> str:
        gains = {c: self.by_client[c][FAIR].gains[AVERAGE].value for c in names}
        ranked = sorted(gains, key=lambda c: -abs(gains[c]))
        return some([f"{called(c, word)} ({sided(gains[c])})" for c in ranked])


def some(names: Sequence[str]) -> str:
    """Name the first of them, and count the others."""
    shown = [*names[: NAMED if len(names) > NAMED + 1 else NAMED + 1]]
    shown += [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def verb(word: str, count: int) -> str:
    """Return a verb for nobody, one or several."""
    return word if count > 1 else f"{word}s"
