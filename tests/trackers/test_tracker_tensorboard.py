"""Runs written as event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import numpy as np
import pytest
from tracked import NAMES, cohort, minibatches

import scaffpd as sp
from cases.refusals import refuses
from forked import forked
from scaffpd.training.trackers import labels

# the reader behind the board itself, which takes later files of a folder for restarts
accumulators = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")


def read(folder):
    """(tag → [(step, value)]) of all event files of a folder."""
    events = accumulators.EventAccumulator(str(folder), size_guidance={accumulators.TENSORS: 0})
    events.Reload()
    return {
        tag: [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def rows(values, first=0):
    """Steps with values in single precision, which is what the board keeps."""
    return [(first + k, float(np.float32(value))) for k, value in enumerate(values)]


def test_every_number_of_a_run(tmp_path):
    people = cohort()
    with sp.TensorBoard(tmp_path / "a") as tracker:
        result = sp.train(sp.fair(sp.Agnostic()), people, rounds=5, callbacks=[tracker])
    found = read(tmp_path / "a")
    history = result.history
    for i, label in enumerate(labels(NAMES)):
        assert found[f"loss by client/{label}"] == rows(history.losses[:, i])
        assert found[f"weight by client/{label}"] == rows(history.weights[:, i])
    for name in ("exchanges", "bytes_up", "bytes_down", "seconds"):
        assert found[name] == rows(history[name])
    finite = [(k, v) for k, v in rows(history["certificate"]) if np.isfinite(v)]
    assert found["certificate"] == finite
    assert found["loss/worst"] == rows(history.losses.max(axis=1))
    assert found["loss/mean"] == rows(history.losses.mean(axis=1))
    assert len(found) == 5 + 2 + 2 * 6


def test_the_numbers_of_a_run_stay_the_same(tmp_path):
    plain = sp.train(minibatches(), cohort(), rounds=6)
    people = cohort()
    with sp.TensorBoard(tmp_path) as tracker:
        shown = sp.train(minibatches(), people, rounds=6, callbacks=[tracker])
    np.testing.assert_array_equal(plain.x, shown.x)
    np.testing.assert_array_equal(plain.history.losses, shown.history.losses)
    assert plain.history["bytes_up"].tolist() == shown.history["bytes_up"].tolist()


def test_a_resumed_run_goes_on(tmp_path):
    """Killed after round 5 with a checkpoint of round 3: rounds 4 and 5 are there once."""
    people = cohort(["a", "b"])
    keep = sp.Checkpoint(tmp_path / "c.npz", every=3)

    def killed(moment):
        if moment.rounds == 5:
            (tmp_path / "kept.npz").write_bytes((tmp_path / "c.npz").read_bytes())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), sp.TensorBoard(tmp_path / "runs") as tracker:
        sp.train(minibatches(), people, rounds=8, checkpoint=keep, callbacks=[tracker, killed])
    (tmp_path / "kept.npz").replace(tmp_path / "c.npz")
    with sp.TensorBoard(tmp_path / "runs") as tracker:
        result = sp.train(minibatches(), people, rounds=8, checkpoint=keep, callbacks=[tracker])
    found = read(tmp_path / "runs")
    assert found["loss by client/b"] == rows(result.history.losses[:, 1])


def test_a_killed_process_leaves_its_rows(tmp_path):
    code = (
        "import os, scaffpd as sp\n"
        "people = sp.Cohort(sp.data.synthetic(N=3, d=4, m=20), sp.Linear('squared', l2=0.1))\n"
        "die = lambda m: os._exit(9) if m.rounds == 4 else None\n"
        f"tracker = sp.TensorBoard({str(tmp_path)!r})\n"
        "sp.train(sp.ScaffPD(sp.Agnostic()), people, rounds=9, callbacks=[tracker, die])\n"
    )
    assert forked(code).returncode == 9
    found = read(tmp_path)
    assert [step for step, _ in found["loss/worst"]] == [0, 1, 2, 3, 4]


def test_a_tracker_for_every_run(tmp_path):
    people = cohort(["a", "b"])
    with sp.TensorBoard(tmp_path) as tracker:
        sp.train(minibatches(), people, rounds=2, callbacks=[tracker])
        with refuses("tracker-used-twice"):
            sp.train(minibatches(), people, rounds=2, callbacks=[tracker])


def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch):
    people = cohort(["a", "b"])
    tracker = sp.TensorBoard(tmp_path)

    def full(step, values):
        raise OSError("No space left on device")

    monkeypatch.setattr(tracker, "write", full)
    with pytest.warns(
        RuntimeWarning, match=r"Round \d is not shown, and the run goes on. No space left"
    ):
        assert sp.train(minibatches(), people, rounds=2, callbacks=[tracker]).rounds == 2
    tracker.close()


def test_labels_differ():
    assert labels(["a/b", "a:b", "A_B", "", ".", "..", "ok", "Łódź 2"]) == [
        "a_b",
        "a_b-2",
        "A_B-3",
        "_",
        "_-2",
        "_-3",
        "ok",
        "Łódź 2",
    ]
    assert labels(["a_b-2", "a/b", "a:b"]) == ["a_b-2", "a_b", "a_b-3"]
