"""The comparison of simulators: who learns badly or is not there gets no speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SPEED = Path(__file__).parents[2] / "benchmarks" / "speed"


@pytest.fixture
def simulators(monkeypatch):
    monkeypatch.syspath_prepend(str(SPEED))
    import simulators

    return simulators


def answer(speed, accuracy=0.87, rounds=20):
    values = {
        "version": "1",
        "rounds": rounds,
        "train_accuracy": accuracy,
        "startup_seconds": 1.0,
        "setting": "",
    }
    return {"steps_per_second": speed, "accuracy": accuracy, **values}


def three(speed, accuracy=0.87):
    return [answer(speed, accuracy) for _ in range(3)]


def test_ratios_are_taken_within_turns(simulators):
    ours = [answer(100.0), answer(10.0), answer(1.0)]
    loop = [answer(50.0), answer(5.0), answer(0.5)]
    rows = simulators.judged({"scaffpd": ours, "loop": loop})
    assert [row["time ÷ scaffpd's"] for row in rows] == pytest.approx([1, 2])
    assert "scaffpd is 2× as fast as plain PyTorch loop 1" in simulators.sentences(rows)[1]


@pytest.mark.parametrize("accuracy", [0.84, float("nan")])
def test_who_learns_worse_than_the_loop_has_no_speed(simulators, accuracy):
    rows = simulators.judged(
        {"scaffpd": three(9.0), "loop": three(3.0), "pfl": [*three(9e9)[:2], answer(9e9, accuracy)]}
    )
    assert rows[2]["steps/s"] is None
    assert rows[2]["time ÷ scaffpd's"] is None
    assert "failed: accuracy" in rows[2]["note"]
    assert "pfl 1 has no speed here" in simulators.sentences(rows)[2]


def test_a_little_noise_is_no_failure(simulators):
    rows = simulators.judged(
        {"scaffpd": three(9.0), "loop": three(3.0), "pfl": three(3.0, accuracy=0.86)}
    )
    assert rows[2]["time ÷ scaffpd's"] == pytest.approx(3)


def test_who_is_slow_makes_later_turns_shorter_and_is_judged_by_the_first(simulators, monkeypatch):
    """After five rounds nobody has to be as good as the loop after twenty; without an accuracy a turn has failed."""

    def judged(first, later):
        slow = [answer(3.0, first), *[answer(3.0, later, rounds=5) for _ in range(2)]]
        return simulators.judged({"scaffpd": three(9.0), "loop": three(3.0), "pfl": slow})[2]

    assert judged(0.87, 0.7)["time ÷ scaffpd's"] == pytest.approx(3)
    assert judged(0.87, float("nan"))["steps/s"] is None
    assert judged(0.7, 0.87)["steps/s"] is None
    monkeypatch.setattr(simulators, "LONG", -1.0)
    monkeypatch.setattr(simulators, "ask", lambda name, python, rounds: answer(3.0, rounds=rounds))
    made = simulators.turns(("scaffpd", "loop"), 3, 20, {})
    assert [[one["rounds"] for one in answers] for answers in made.values()] == [[20, 5, 5]] * 2


def test_we_may_not_fail_silently(simulators):
    with pytest.raises(RuntimeError, match="scaffpd: failed: accuracy"):
        simulators.judged({"scaffpd": three(9.0, accuracy=0.5), "loop": three(3.0)})


def test_an_absent_peer_is_a_row_with_the_reason(simulators, tmp_path):
    (tmp_path / "run_pfl.py").write_text("import a_library_that_is_not_there\n", encoding="utf-8")
    absent = simulators.ask("pfl", sys.executable, 1, folder=tmp_path)
    rows = simulators.judged({"scaffpd": three(9.0), "loop": three(3.0), "pfl": [absent]})
    assert (
        rows[2]["note"]
        == "not installed: ModuleNotFoundError: No module named 'a_library_that_is_not_there'"
    )
    assert rows[2]["steps/s"] is None


def test_a_peer_is_run_by_its_own_interpreter(simulators, tmp_path, monkeypatch):
    own = tmp_path / "pfl" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setenv("SCAFFPD_PEERS", str(tmp_path))
    assert simulators.interpreter("pfl", {}) == str(own)
    assert simulators.interpreter("jax", {}) == sys.executable
    assert simulators.interpreter("pfl", {"pfl": "other"}) == "other"


def test_threads_are_left_to_the_candidates(simulators, tmp_path, monkeypatch):
    script = "import json, os; print(json.dumps({'threads': os.environ.get('OMP_NUM_THREADS')}))"
    (tmp_path / "run_pfl.py").write_text(script, encoding="utf-8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert simulators.ask("pfl", sys.executable, 1, folder=tmp_path) == {"threads": None}
