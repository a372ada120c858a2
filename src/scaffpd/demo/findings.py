"""The demo's findings in sentences, and as the folder of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from scaffpd.demo import NEGLIGIBLE, HospitalStudy, PairedChange
from scaffpd.federation import ClientScores
from scaffpd.runs.folder import client_rows, environment_file, tables, write_files
from scaffpd.runs.tables import csv_text
from scaffpd.runs.train import Trained


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
