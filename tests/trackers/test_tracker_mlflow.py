"""Runs written to a local MLflow store, read back with MLflow's own client."""

from __future__ import annotations

import numpy as np
import pytest
from tracked import NAMES, cohort, minibatches

import scaffpd as sp
from scaffpd.training.trackers import labels


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder of files: no server, and nothing that leaves this machine."""
    for name, value in [("MLFLOW_ALLOW_FILE_STORE", "true"), ("MLFLOW_DISABLE_TELEMETRY", "true")]:
        monkeypatch.setenv(name, value)
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path / 'store'}")
    yield mlflow
    mlflow.set_tracking_uri(before)


def column(mlflow, run_id, name):
    return [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run_id, name)]


def test_every_number_of_a_run(store):
    people = cohort()
    with sp.MLflow(experiment="wards", run_name="fair") as tracker:
        result = sp.train(sp.fair(sp.Agnostic()), people, rounds=4, callbacks=[tracker])
        assert store.MlflowClient().get_run(tracker.run_id).info.status == "RUNNING"
    run = store.MlflowClient().get_run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "fair")
    assert store.MlflowClient().get_experiment(run.info.experiment_id).name == "wards"
    history = result.history
    for i, label in enumerate(labels(NAMES)):
        assert column(store, tracker.run_id, f"loss by client/{label}") == list(
            enumerate(history.losses[:, i])
        )
        assert column(store, tracker.run_id, f"weight by client/{label}") == list(
            enumerate(history.weights[:, i])
        )
    assert column(store, tracker.run_id, "bytes_up") == list(enumerate(history["bytes_up"]))


def test_the_numbers_of_a_run_stay_the_same(store):
    plain = sp.train(minibatches(), cohort(), rounds=3)
    people = cohort()
    with sp.MLflow() as tracker:
        shown = sp.train(minibatches(), people, rounds=3, callbacks=[tracker])
    np.testing.assert_array_equal(plain.x, shown.x)


def test_the_run_that_is_open_is_used_and_left_open(store):
    with store.start_run() as run:
        sp.train(minibatches(), cohort(["a", "b"]), rounds=2, callbacks=[sp.MLflow()])
        assert store.active_run().info.run_id == run.info.run_id
        assert store.MlflowClient().get_run(run.info.run_id).info.status == "RUNNING"
    assert [step for step, _ in column(store, run.info.run_id, "loss/worst")] == [0, 1, 2]


def test_a_resumed_run_goes_on(store, tmp_path):
    """The first part is killed after its last checkpoint: round 3 is made twice, logged once."""
    people = cohort(["a", "b"])
    with sp.MLflow() as first:
        sp.train(
            minibatches(),
            people,
            checkpoint=tmp_path / "c.npz",
            callbacks=[first, lambda m: m.rounds == 2],
        )
    saved = (tmp_path / "c.npz").read_bytes()
    with sp.MLflow(run_id=first.run_id) as lost:
        sp.train(minibatches(), people, rounds=3, checkpoint=tmp_path / "c.npz", callbacks=[lost])
    (tmp_path / "c.npz").write_bytes(saved)
    with sp.MLflow(run_id=first.run_id) as second:
        result = sp.train(
            minibatches(), people, rounds=5, checkpoint=tmp_path / "c.npz", callbacks=[second]
        )
    assert column(store, first.run_id, "loss/worst") == list(
        enumerate(result.history.losses.max(axis=1))
    )
    assert store.MlflowClient().get_run(first.run_id).info.status == "FINISHED"


def test_how_a_run_ends(store):
    people = cohort(["a", "b"])

    def broken(moment):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), sp.MLflow("failed") as tracker:
        sp.train(minibatches(), people, rounds=1, callbacks=[tracker, broken])
    assert store.MlflowClient().get_run(tracker.run_id).info.status == "FAILED"


def test_a_server_that_is_lost_does_not_end_a_run(store, monkeypatch):
    def lost(*arguments, **named):
        raise store.exceptions.MlflowException("no answer")

    with sp.MLflow() as tracker:
        monkeypatch.setattr(tracker._client, "log_batch", lost)
        with pytest.warns(RuntimeWarning, match="the run goes on. no answer"):
            assert (
                sp.train(minibatches(), cohort(["a", "b"]), rounds=1, callbacks=[tracker]).rounds
                == 1
            )
