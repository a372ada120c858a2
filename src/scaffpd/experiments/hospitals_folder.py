"""The study of the four hospitals as the folder of a run: means over splits for `scaffpd report`, all splits beside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.checkpoint import replacing
from scaffpd.data import heart_disease
from scaffpd.environment import environment
from scaffpd.experiments import hospitals_words as words
from scaffpd.experiments.hospitals import TEST_FRACTION, Study, prepared, save
from scaffpd.federation import ClientScores
from scaffpd.runs import tables
from scaffpd.runs.trained import Trained

MEASURE = "accuracy"


def write(study: Study, folder: Path, command: str) -> list[Path]:
    """Write what the report is made from, and the tables of every split."""
    problem = prepared(heart_disease(TEST_FRACTION, seed=study.seeds[0]))
    models = [_mean(runs) for runs in study.models.values()]
    verdict = (f"{words.headline(study)}.", words.caveat(study))
    about = ("demo", "Four hospitals, one model", command, problem, models)
    files = {
        "summary.json": tables.summary(*about, verdict=verdict, remarks=_remarks(study)),
        "environment.json": json.dumps(environment(), indent=1) + "\n",
        "rounds.csv": tables.csv_text(tables.rounds(models, MEASURE)),
        "clients.csv": tables.csv_text(_clients(study, models)),
        "partition.csv": tables.csv_text(tables.partition(problem)),
    }
    for name, text in files.items():
        with replacing(folder / name) as file:
            file.write(text.encode())
    return [*(folder / name for name in files), *save(study, folder)]


def _mean(runs: tuple[Trained, ...]) -> Trained:
    """The run on the first split, with scores and weights that are means over all splits."""
    weights = np.mean([run.result.weights for run in runs], axis=0)
    train, test = _mean_scores([run.train for run in runs]), _mean_scores([run.shown for run in runs])
    return replace(runs[0], result=replace(runs[0].result, weights=weights), train=train, test=test)


def _mean_scores(scores: list[ClientScores]) -> ClientScores:
    loss, accuracy = (np.mean([getattr(one, name) for one in scores], axis=0) for name in ("loss", "accuracy"))
    return replace(scores[0], loss=loss, accuracy=accuracy)


def _clients(study: Study, models: list[Trained]) -> list[dict[str, Any]]:
    rows = tables.clients(models, MEASURE)
    deviation = {
        one.name: np.std([run.shown.accuracy for run in runs], axis=0, ddof=1)
        for one, runs in zip(models, study.models.values(), strict=True)
    }
    place = {name: i for i, name in enumerate(study.names)}
    return [
        row
        | {
            f"test_{MEASURE}_sd": float(deviation[row["model"]][place[row["client"]]]),
            "change_clear": bool(study.accuracy.clear[place[row["client"]]]),
        }
        for row in rows
    ]


def _remarks(study: Study) -> list[str]:
    splits = len(study.seeds)
    return [
        f"Every score is a mean over {splits} random splits into patients to train on and patients held out; the "
        "curves over rounds are those of the first split.",
        *filter(None, [words.baseline(study)]),
        *words.certificates(study)[-1:],
    ]
