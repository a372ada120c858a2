"""A task of one class, defined here, goes through reading, training, scores, page and predict."""

import csv
from pathlib import Path

import numpy as np
import pytest

from cases.commands import ran, refusal
from cases.refusals import refuses
from scaffpd import tasks
from scaffpd.errors import InputError
from scaffpd.report.page.verdict import verdict
from scaffpd.report.predict import predict
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile
from scaffpd.tasks.base import LOSS, Measure, ScoreColumn, Target, Task

LINE = "train beds.csv --client ward --target used --splits 1 --curves off --quiet --out run"


class Shares(Task):
    """Numbers from 0 to 1, by least squares, scored by their mean distance."""

    name = "shares"
    measure = Measure("mean distance", name="distance", subject="the distance of ", mean="Distance")
    losses = ("squared",)
    roles = ("share",)
    columns = {  # noqa: RUF012
        "distance": ScoreColumn("mean distance", "decimal"),
        "above": ScoreColumn("guessed too high"),
    }
    adds_to = "the share"
    explained = "*Mean distance*: of guessed shares from the true ones."

    def read(self, owner, column):
        found = super().read(owner, column)
        if found.values.min() < 0 or found.values.max() > 1:
            raise InputError("no-share", f"{owner} has something else than shares.")
        return Target(self, found.values, note="is read as shares")

    def client_score(self, model, z, y, unit):
        return float(np.abs(np.clip(z[:, 0], 0, 1) - y).mean())

    def answers(self, model, z):
        return np.clip(z[:, 0], 0, 1), np.empty((len(z), 0))

    def row_scores(self, y, guess, shares, labels):
        return {"distance": float(np.abs(guess - y).mean()), "above": float((guess > y).mean())}


@pytest.fixture
def beds(tmp_path, monkeypatch):
    """A table of shares, in the working directory."""
    draw = np.random.default_rng(5)
    monkeypatch.chdir(tmp_path)
    with Path("beds.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ward", "staff", "used"])
        for k in range(150):
            staff = draw.normal()
            share = 1 / (1 + np.exp(-2 * staff - draw.normal()))
            writer.writerow(["ABC"[k % 3], round(staff, 4), round(share, 4)])


def rows_of(name):
    with Path(name).open() as file:
        return list(csv.DictReader(file))


def test_a_task_is_one_class_and_one_line(beds, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "TASKS", [*tasks.TASKS, Shares()])
    ran(f"{LINE} --task shares", capsys)
    run = RunRecord.read(Path("run"))
    assert (run.task.name, run.measure.name) == ("shares", "distance")
    assert "Target 'used' is read as shares." in run.remarks
    # scores are those of the predictions, client by client
    table = rows_of("run/clients.csv")
    assert {"train_distance", "test_distance"} <= table[0].keys()
    found = predict(Path("run"), Path("beds.csv"), "average")
    guess = np.array(found.predicted)
    assert 0 <= guess.min() < 0.2
    assert guess.max() == 1
    truth = np.array([float(row["used"]) for row in rows_of("beds.csv")])
    scored = {row.group: row.values for row in found.scores()}
    assert scored["all rows"]["distance"] == pytest.approx(np.abs(guess - truth).mean())
    rows = [row for row in table if row["model"] == "average"]
    whole = sum(float(r["train_distance"]) * int(r["train_rows"]) for r in rows)
    whole += sum(float(r["test_distance"]) * int(r["test_rows"]) for r in rows)
    assert whole / len(truth) == pytest.approx(scored["all rows"]["distance"])
    assert run.joining is not None
    assert verdict(run)[1].startswith("Distance in the mean over ")
    page = Path("run/report.html").read_text(encoding="utf-8")
    for words in ("guessed too high", "<em>Mean distance</em>: of guessed shares", "to the share"):
        assert words in page
    told = ran("predict run beds.csv", capsys).out
    assert "guessed\ntoo" not in told
    assert "distance" in told
    header = Path("predictions.csv").read_text().splitlines()[0]
    assert header == "client,trained,predicted,probability"


def test_a_task_refuses_what_it_cannot_read(beds, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", [*tasks.TASKS, Shares()])
    assert (
        refusal(f"{LINE} --task shares --target staff".replace("--target used ", "")) == "no-share"
    )


def test_a_task_that_is_not_there_is_refused(beds):
    assert refusal(f"{LINE} --task shares") == "unknown-name"


def test_tasks_differ_and_are_found():
    names = [task.name for task in tasks.TASKS]
    assert len(set(names)) == len(names)
    for task in tasks.TASKS:
        assert tasks.named(task.name) is task
        assert tasks.measuring(task.measure.name) == task.measure
        for loss in task.losses:
            assert tasks.solving(loss, task.labelled) is task
    assert tasks.solving("mine", labelled=True).labelled
    assert not tasks.solving("mine", labelled=False).labelled
    assert tasks.measuring("loss") is LOSS
    with refuses("unknown-name"):
        tasks.named("clasification")


def test_a_federation_goes_by_its_loss_and_labels(tmp_path):
    """Deployed concordances are called so, whatever else a silo's scores are."""
    path = tmp_path / "federation.toml"
    found = {}
    for kind, labels in (("", "[0, 1]"), ("cox", ""), ("squared", "[0, 1]"), ("poisson", "")):
        terms = 'silos = ["a", "b", "c"]\n' + (f"labels = {labels}\n" if labels else "")
        model = f'[model]\nkind = "{kind}"\n' if kind else ""
        path.write_text(f'{terms}{model}[objective]\nkind = "Average"\n[columns]\nage = "number"\n')
        file = FederationFile.read(path)
        found[kind] = file.task.name, file.task.measure.name, file.linear()["loss"]
    assert found == {
        "": ("classification", "accuracy", "logistic"),
        "cox": ("survival", "concordance", "cox"),
        "squared": ("classification", "accuracy", "squared"),
        "poisson": ("counts", "rmse", "poisson"),
    }
