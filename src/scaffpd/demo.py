"""Two studies on real data: twelve stations with and without the others, four hospitals with one fair model.

Beijing's twelve air-quality stations predict the dust of a day from its weather, tested on the following year. Four of
them are new and have forty days. They train alone, with one average or fair model, and with personal, fair models.

UCI Heart Disease has four hospitals that differ in patients, in habits of measuring and in how many are
ill. One logistic model is trained for all of them in two ways: for the average hospital, min_x Σ p_i f_i(x)
with p_i = 1/N, and fairly,

    min_x max_{λ∈simplex}  Σ λ_i f_i(x) − (ρ/2) Σ (λ_i − p_i)²/p_i,

where λ_i = p_i (1 + (f_i − f̄)/ρ) while no λ_i is zero: a hospital whose loss is ρ above the mean counts
twice, one whose loss is ρ below it counts nothing. Both are trained to a proven optimality gap, by the method that
`fair` chooses, on the same random splits into patients to train on and patients held out.

Neither ρ nor l2 was chosen by how held-out patients fare under the fair model. ρ = 0.1 is the value that both
of the paper's sweeps have in common. l2 = 0.03 is what cross-validation within training patients picks for the
*average* model (a test repeats that): if it favours anybody, it is the baseline.

The hospitals are small, so every number is a mean over splits, and every change is tested for being more
than noise. Splits share patients, which makes the plain t-test far too sure of itself; the one used here is
corrected for that (Nadeau and Bengio 2003, "Inference for the generalization error"): with J splits that
hold out n₂ patients and train on n₁, the standard error of a mean change is  sd·√(1/J + n₂/n₁).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms import Fair
from scaffpd.coalitions import Coalition, coalition
from scaffpd.cohort import Cohort
from scaffpd.comparison.runs import one_thread
from scaffpd.data import beijing_air, heart_disease
from scaffpd.data.silos import Silos
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores, Vector
from scaffpd.gains import ALONE, AVERAGE, FAIR, PERSONAL, Joining, joining
from scaffpd.metrics import NEGLIGIBLE, NOISE, YES, RelativeGain, half_interval
from scaffpd.models import Linear, Personal
from scaffpd.objectives import Average, ChiSquare, CVaR
from scaffpd.report.data import capital
from scaffpd.runs.folder import client_rows, environment_file, tables, write_files
from scaffpd.runs.prepare import Prepared
from scaffpd.runs.train import Trained, train_model
from scaffpd.system import csv_text
from scaffpd.training import Status

NAMES = ("Cleveland", "Hungary", "Switzerland", "Long Beach")  # in the order of `heart_disease()`
RHO, L2, TOL, SPLITS, TEST_FRACTION = 0.1, 0.03, 1e-8, 20, 0.3
MOST_ROUNDS = 2000
STATIONS, NEW, DAYS, DRAWS, WEEK = 12, 4, 40, 8, 7
ORDERS = 8  # of joining, for Shapley values
FAIRLY = CVaR(alpha=0.2)  # the worst fifth of the stations


@dataclass(frozen=True)
class PairedChange:
    """One measure of both models, (splits × columns), and how it changed from one to the other."""

    average: NDArray[np.float64]  # of the average model
    fair: NDArray[np.float64]  # of the fair model
    overlap: float  # n₂/n₁, held-out patients per patient trained on

    @property
    def mean_change(self) -> Vector:
        """Fair minus average, mean over splits."""
        mean: Vector = (self.fair - self.average).mean(0)
        return mean

    @property
    def deviation(self) -> Vector:
        """Standard deviation of the change over splits."""
        deviation: Vector = (self.fair - self.average).std(0, ddof=1)
        return deviation

    @property
    def clear(self) -> NDArray[np.bool_]:
        """Whether each mean change is more than noise, by the corrected t-test, and not negligible."""
        least = np.maximum(half_interval(self.fair - self.average, self.overlap), NEGLIGIBLE)
        clear: NDArray[np.bool_] = np.abs(self.mean_change) > least
        return clear


@dataclass(frozen=True)
class HospitalStudy:
    """Both models on all splits."""

    problem: Prepared  # hospitals and model on the first split
    rho: float  # ρ of the fair model
    tol: float  # the optimality gap that was asked for
    seeds: tuple[int, ...]  # one per split
    average: tuple[Trained, ...] = field(repr=False)  # the average model, split by split
    fair: tuple[Trained, ...] = field(repr=False)  # the fair model, split by split
    names: tuple[str, ...] = NAMES

    @cached_property
    def accuracy(self) -> PairedChange:
        """Share of right diagnoses of held-out patients, per hospital."""
        return self._compare(lambda run: run.shown.accuracy)

    @cached_property
    def log_loss(self) -> PairedChange:
        """Log-loss on held-out patients, per hospital."""
        return self._compare(lambda run: run.shown.loss)

    @cached_property
    def overall_accuracy(self) -> PairedChange:
        """Mean over hospitals, and worst, of the held-out accuracies of each split."""
        return self._compare(lambda run: np.array([run.shown.accuracy.mean(), run.shown.accuracy.min()]))

    @cached_property
    def overall_log_loss(self) -> PairedChange:
        """Mean over hospitals, and worst, of the held-out log-losses of each split."""
        return self._compare(lambda run: _mean_and_worst_loss(run.shown))

    @cached_property
    def training_log_loss(self) -> PairedChange:
        """Mean over hospitals, and worst, of the log-losses on the patients trained on."""
        return self._compare(lambda run: _mean_and_worst_loss(run.train))

    @cached_property
    def patients(self) -> NDArray[np.int64]:
        """How many patients each hospital has."""
        found: NDArray[np.int64] = self.average[0].train.counts + self.average[0].shown.counts
        return found

    @cached_property
    def ill(self) -> Vector:
        """The share of each hospital's patients that is ill."""
        pairs = zip(self.problem.train, self.problem.test, strict=True)
        return np.array([np.concatenate([train[1], test[1]]).mean() for train, test in pairs])

    @property
    def majority(self) -> Vector:
        """Accuracy of giving every patient of a hospital the answer that is more often right there."""
        return np.maximum(self.ill, 1 - self.ill)

    @property
    def order(self) -> NDArray[np.intp]:
        """The hospitals by held-out accuracy of the average model, the one served worst first."""
        return np.argsort(self.accuracy.average.mean(0), kind="stable")

    @property
    def certified(self) -> bool:
        """Whether every run reached `tol`."""
        return all(run.result.status is Status.CONVERGED for run in (*self.average, *self.fair))

    @property
    def method(self) -> str:
        """Which method trained all models, and why: what it says depends on the losses alone."""
        result = self.fair[0].result
        return result.message.removeprefix(result.status.sentence).strip()

    def _compare(self, measure: Callable[[Trained], Vector]) -> PairedChange:
        average, fair = (np.array([measure(run) for run in runs]) for runs in (self.average, self.fair))
        first = self.average[0]
        return PairedChange(average, fair, overlap=float(first.shown.counts.sum() / first.train.counts.sum()))


def _mean_and_worst_loss(scores: ClientScores) -> Vector:
    return np.array([scores.loss.mean(), scores.loss.max()])


def study(
    rho: float = RHO,
    seed: int = 0,
    splits: int = SPLITS,
    tol: float = TOL,
    progress: Callable[[int], None] | None = None,
) -> HospitalStudy:
    """Train the average and the fair model on every split.

    Args:
        rho: ρ > 0: small is fair, large is the average.
        seed: chooses the splits; different seeds have different ones.
        splits: how many, at least two.
        tol: the optimality gap to prove in every run.
        progress: called with the number of splits done after each one.
    """
    fair = ChiSquare(rho)
    if seed < 0:
        raise InputError(f"The seed must be a whole number >= 0, got {seed}.")
    if splits < 2:
        raise InputError(f"At least two splits are needed to tell a change from noise, got {splits}.")
    seeds = tuple(range(seed * splits, (seed + 1) * splits))
    problems, average, fairly = [], [], []
    with one_thread():
        for k in seeds:
            problems.append(prepared(heart_disease(TEST_FRACTION, seed=k)))
            average.append(_train("average", "before", problems[-1], Fair(Average()), tol))
            fairly.append(_train("fair", "after", problems[-1], Fair(fair), tol))
            if progress is not None:
                progress(len(fairly))
    return HospitalStudy(problems[0], fair.rho, tol, seeds, tuple(average), tuple(fairly))


def prepared(silos: Silos) -> Prepared:
    """Return the four hospitals and their model."""
    model, rows = Linear("logistic", L2, intercept=True), sum(len(y) for _, y in [*silos.train, *silos.test])
    about = f"heart disease (UCI): {rows} patients, {len(silos.features)} columns"
    task, labels = "classification", ("healthy", "ill")
    return Prepared(NAMES, silos.train, silos.test, model, task, labels, about, "hospital")


def _train(name: str, role: str, problem: Prepared, algorithm: Fair, tol: float) -> Trained:
    cohort = Cohort(problem.train, problem.model, NAMES, test=problem.test)
    found = train_model(name, role, algorithm, problem, cohort, MOST_ROUNDS, tol)
    if found.result.status is Status.INTERRUPTED:  # half a study is none
        raise KeyboardInterrupt
    return found


@dataclass(frozen=True)
class StationStudy:
    """Twelve stations, four of them new, on several draws of which ones and which days."""

    problem: Prepared  # stations and model on the first draw
    seeds: tuple[int, ...]  # one per draw
    found: tuple[Joining, ...] = field(repr=False)  # draw by draw
    models: tuple[Trained, ...] = field(repr=False)  # average and fair on the first draw
    game: Coalition = field(repr=False)  # who gains from whom on the first draw

    def gain(self, model: str, over: str, new: bool) -> RelativeGain:
        """By how much a model's loss is lower for the new stations, or the others: the mean over draws.

        The interval's reach is √(r² + s²): r that of Student's t over draws, s the root mean square of those over
        weeks of the test year, which all draws share.
        """
        gains = [one.gain(model, over, partial(_among, one, new)) for one in self.found]
        values = np.array([gain.value for gain in gains])
        reach = float(
            np.sqrt(half_interval(values) ** 2 + np.mean([((gain.high - gain.low) / 2) ** 2 for gain in gains]))
        )
        mean = float(values.mean())
        return RelativeGain(mean, mean - reach, mean + reach)

    def cost(self, model: str) -> float:
        """The most that joining costs a station, as a share of its loss alone: the mean over draws."""
        k = self.found[0].models.index(model)
        return float(np.mean([max((one.loss[k] / one.loss[1]).max() - 1, 0.0) for one in self.found]))

    @property
    def recommendation(self) -> str:
        """What most draws recommend."""
        return Counter(one.recommendation for one in self.found).most_common(1)[0][0]

    @property
    def verdict(self) -> tuple[str, str]:
        """Who gains what, with the interval; and what one model for all costs."""
        new, old = (self.gain(PERSONAL, ALONE, which) for which in (True, False))
        average = self.gain(AVERAGE, ALONE, True)
        costs = {model: f"{100 * self.cost(model):.0f} %" for model in (AVERAGE, FAIR, PERSONAL)}
        first = (
            f"With personal, fair models the loss of the {NEW} new stations is {new.than('alone')} ({new.range}); "
            f"that of the {STATIONS - NEW} others is {old.words} ({old.range})."
        )
        return first, (
            f"With one average model that of the new ones is {average.than('alone')}; the station "
            f"that pays most for joining loses {costs[AVERAGE]} by it, {costs[FAIR]} by one fair model, and "
            f"{costs[PERSONAL]} with models of their own. Means over {len(self.seeds)} draws of new stations and their "
            f"{DAYS} days, tested on the following year; table and charts are those of the first draw."
        )

    @property
    def answers(self) -> dict[str, str]:
        """Who gains, how much, and whom it costs, over all draws; the first draw says the rest."""
        groups = {f"the {NEW} new stations": True, f"the {STATIONS - NEW} others": False}
        gains = {who: self.gain(PERSONAL, ALONE, new) for who, new in groups.items()}
        clear = [who for who, gain in gains.items() if gain.pays == YES]
        noise = [f"for {who} it is within noise" for who, gain in gains.items() if gain.pays == NOISE]
        who = f"{' and '.join(clear) or 'nobody'}, clearly, against training alone"
        sure = {who: NOISE if gain.pays == NOISE else "clear of noise" for who, gain in gains.items()}
        much = [f"the loss of {w} is {g.than('alone')} ({g.range}), {sure[w]}" for w, g in gains.items()]
        costs = [f"{100 * self.cost(model):.0f} %" for model in (PERSONAL, FAIR, AVERAGE)]
        return {
            "who": f"{capital('; '.join([who, *noise]))}.",
            "much": f"{capital('; '.join(much))}.",
            "cost": (
                f"The station that pays most loses {costs[0]} with personal models, {costs[1]} with one fair model and "
                f"{costs[2]} with one average model; means over {len(self.seeds)} draws."
            ),
        }


def _among(one: Joining, new: bool, _: Vector) -> Vector:
    """Weights of the new stations, or of the others."""
    chosen = np.array([(trained <= DAYS) == new for trained, _ in one.rows], dtype=float)
    weights: Vector = chosen / chosen.sum()
    return weights


def stations(
    seed: int = 0, draws: int = DRAWS, progress: Callable[[int], None] | None = None, orders: int = ORDERS
) -> StationStudy:
    """Train alone, average, fair and personal models on so many draws of new stations; on the first one, groups too."""
    if draws < 2:
        raise InputError(f"stations needs at least two draws, got {draws}.")
    seeds = tuple(range(seed * draws, (seed + 1) * draws))
    problems = [_stations(draw) for draw in seeds]
    first, found = problems[0], []
    with one_thread():
        cohort = Cohort(first.train, first.model, first.names, test=first.test)
        goals = (("average", "before", Average()), ("fair", "after", FAIRLY))
        models = [train_model(name, role, Fair(goal), first, cohort, MOST_ROUNDS, TOL) for name, role, goal in goals]
        if any(one.result.status is Status.INTERRUPTED for one in models):
            raise KeyboardInterrupt
        known = {one.name: one.result.x for one in models}
        for draw, problem in zip(seeds, problems, strict=True):
            found.append(joining(
                problem.train, problem.test, problem.model, FAIRLY, names=problem.names, seed=draw, block=WEEK,
                word="station", known=known if problem is first else None,
            ))  # fmt: skip
            if progress is not None:
                progress(len(found))
        own = Personal(first.model, found[0].strength)
        game = coalition(
            first.train, first.test, own, FAIRLY, names=first.names, most=1, permutations=orders, seed=seed,
            word="station",
        )  # fmt: skip
    return StationStudy(first, seeds, tuple(found), tuple(models), game)


def _stations(seed: int) -> Prepared:
    silos = beijing_air(NEW, DAYS, seed)
    names = tuple(
        f"{name} (new)" if len(y) <= DAYS else name for name, (_, y) in zip(silos.names, silos.train, strict=True)
    )
    rows = sum(len(y) for _, y in [*silos.train, *silos.test])
    about = f"Beijing air quality (Chen 2017, UCI, CC BY 4.0): {rows} days, {len(silos.features)} columns"
    model = Linear("squared", L2, intercept=True)
    return Prepared(names, silos.train, silos.test, model, "regression", (), about, "station")


def write_stations(study: StationStudy, folder: Path, command: str) -> list[Path]:
    """Write the folder of the first draw's run with the words of all draws, and the losses of every draw."""
    files = tables(
        "demo", "Twelve stations, four of them new", command, study.problem, study.models, verdict=study.verdict,
        joining=study.found[0], coalition=study.game,
    )  # fmt: skip
    summary = json.loads(files["summary.json"]) | {"answers": study.answers}
    summary["joining"]["recommendation"] = study.recommendation
    files["summary.json"] = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
    rows = [{"draw": seed, **row} for seed, one in zip(study.seeds, study.found, strict=True) for row in one.table()]
    files |= environment_file() | {"draws.csv": csv_text(rows)}
    write_files(folder, files)
    return [folder / name for name in files]


def percent(share: float) -> str:
    """Write a share, such as 73.9 %."""
    return f"{100 * share:.1f} %"


def signed(value: float, digits: int) -> str:
    """Write a change with its sign, such as +1.7 or −3.2; without one where it rounds to zero."""
    text = f"{value * (1 + 1e-9):+.{digits}f}"  # ties go away from zero, whoever adds up
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def change(of: PairedChange, column: int, points: bool) -> str:
    """Write a mean change and its standard deviation over splits, such as +1.7 ± 3.0."""
    scale, digits = (100, 1) if points else (1, 3)
    return f"{signed(scale * of.mean_change[column], digits)} ± {scale * of.deviation[column]:.{digits}f}"


def findings(study: HospitalStudy) -> tuple[str, str]:
    """State what changed for the hospital that is served worst, and for all of them."""
    worst = int(study.order[0])
    right, loss = study.accuracy, study.log_loss
    first = (
        f"{study.names[worst]}, which the average model serves worst, goes {_from_to(right, worst, share=True)} "
        f"right diagnoses of held-out patients ({change(right, worst, points=True)} points, "
        f"{_noise(right, worst)}), and its log-loss {_from_to(loss, worst)} ({_noise(loss, worst)})."
    )
    second = (
        f"The mean over hospitals goes {_from_to(study.overall_accuracy, 0, share=True)} right diagnoses and "
        f"{_from_to(study.overall_log_loss, 0)} in log-loss; {_clear_changes(study)}."
    )
    return first, second


def headline(study: HospitalStudy) -> str:
    """State in one line what changed for the hospital served worst and the one that pays most, and how sure that is."""
    right, worst = study.accuracy, int(study.order[0])
    payer = int(right.mean_change.argmin())
    visible = np.abs(right.mean_change) >= NEGLIGIBLE
    if not visible[worst] and not visible[payer]:
        return f"{study.names[worst]}, served worst, is served as before"
    hospitals = {worst: f"{study.names[worst]}, served worst, {_moved(right, worst)}"}
    if right.mean_change[payer] < 0 and visible[payer]:
        hospitals.setdefault(payer, f"{study.names[payer]} {_moved(right, payer)}")
    sure = {_noise(right, i) for i in hospitals}
    if len(sure) == 1:
        both = "both " if len(hospitals) == 2 else ""
        return f"{'; '.join(hospitals.values())}: {both}{sure.pop()}"
    return "; ".join(f"{text} ({_noise(right, i)})" for i, text in hospitals.items())


def caveat(study: HospitalStudy) -> str:
    """State everything else that was measured, in one line."""
    return f"One model for four hospitals, average against fair. On held-out patients {_clear_changes(study)}."


def baseline(study: HospitalStudy) -> str | None:
    """Name hospitals where the same answer for every patient is about as often right as the average model."""
    right = study.accuracy.average
    little = right.mean(0) - study.majority < right.std(0, ddof=1)
    places = [f"{percent(study.majority[i])} in {study.names[i]}" for i in study.order if little[i]]
    if not places:
        return None
    return f"The same answer for every patient is right for {_list(places)}: accuracy alone says little there."


def certificates(study: HospitalStudy) -> list[str]:
    """State what is proven of each model, and in how many rounds."""
    lines = []
    for model, runs in (("average", study.average), ("fair", study.fair)):
        rounds, gap = [run.result.rounds for run in runs], max(run.result.certificate for run in runs)
        missed = "" if gap <= study.tol else f", NOT the {study.tol:.0e} asked for"
        spread = f"{min(rounds)} to {max(rounds)}"
        lines.append(f"{model:8} {rounds[0]} rounds on the first split, {spread} on all; gap ≤ {gap:.1e}{missed}")
    lines.append(
        "The proof is about the patients trained on: there the worst hospital's log-loss goes "
        f"{_from_to(study.training_log_loss, 1)}. Held-out patients are a measurement, not a proof."
    )
    return lines


def _from_to(of: PairedChange, column: int, share: bool = False) -> str:
    before, after = (table[:, column].mean() for table in (of.average, of.fair))
    return f"from {percent(before)} to {percent(after)}" if share else f"from {before:.3f} to {after:.3f}"


def _moved(of: PairedChange, column: int) -> str:
    points = 100 * of.mean_change[column]
    return f"{'gains' if points > 0 else 'loses'} {signed(abs(points), 1).lstrip('+')} points"


def _noise(of: PairedChange, column: int) -> str:
    return "clear of noise" if of.clear[column] else "within noise"


def _clear_changes(study: HospitalStudy) -> str:
    owners, mean = tuple(f"{name}'s" for name in study.names), ("the mean",)
    clear = [
        *_clear(study.accuracy, owners, "accuracy"),
        *_clear(study.log_loss, owners, "log-loss"),
        *_clear(study.overall_accuracy, mean, "accuracy"),
        *_clear(study.overall_log_loss, mean, "log-loss"),
    ]
    if not clear:
        return "no change is clear of noise"
    one = len(clear) == 1
    return f"the only {'change' if one else 'changes'} clear of noise {'is' if one else 'are'} {_list(clear)}"


def _clear(of: PairedChange, owners: tuple[str, ...], measure: str) -> list[str]:
    found = []
    for i in np.flatnonzero(of.clear[: len(owners)]):
        size, higher = abs(of.mean_change[i]), of.mean_change[i] > 0
        text = f"{100 * size:.1f} points" if measure == "accuracy" else f"{size:.3f}"
        found.append(f"{owners[i]} {measure} ({text} {'better' if higher == (measure == 'accuracy') else 'worse'})")
    return found


def _list(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def write(study: HospitalStudy, folder: Path, command: str) -> list[Path]:
    """Write the folder of a run whose scores are means over splits, and the scores of every split."""
    models = [_mean(study.average), replace(_mean(study.fair), clear=tuple(study.accuracy.clear.tolist()))]
    remarks = [
        f"Every score is a mean over {len(study.seeds)} random splits into patients to train on and patients held out; "
        "the curves over rounds are those of the first split.",
        *filter(None, [baseline(study)]),
        certificates(study)[-1],
    ]
    verdict = (f"{headline(study)}.", caveat(study))
    files = tables(
        "demo", "Four hospitals, one model", command, study.problem, models, verdict=verdict, remarks=remarks
    )
    runs = zip(study.seeds, study.average, study.fair, strict=True)
    splits = [{"split": seed, **row} for seed, *pair in runs for row in client_rows(pair, study.problem.measure)]
    files |= environment_file() | {"splits.csv": csv_text(splits)}
    write_files(folder, files)
    return [folder / name for name in files]


def _mean(runs: tuple[Trained, ...]) -> Trained:
    """The run on the first split, with scores and weights that are means over all splits."""
    weights = np.mean([run.result.weights for run in runs], axis=0)
    deviation = np.std([run.shown.accuracy for run in runs], axis=0, ddof=1)
    train, test = _mean_scores([run.train for run in runs]), _mean_scores([run.shown for run in runs])
    result = replace(runs[0].result, weights=weights)
    return replace(runs[0], result=result, train=train, test=test, deviation=deviation)


def _mean_scores(scores: list[ClientScores]) -> ClientScores:
    loss, accuracy = (np.mean([getattr(one, name) for one in scores], axis=0) for name in ("loss", "accuracy"))
    return replace(scores[0], loss=loss, accuracy=accuracy)
