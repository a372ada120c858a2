"""The paper's synthetic experiments: what the figures claim, on fewer rounds; tuning; and the command."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import reproduce
from experiments import synthetic_figures as figures
from experiments import synthetic_study as study
from experiments import synthetic_tuning as tuning
from experiments.synthetic_problem import DEEP, L2, TARGET, Plan, bench, quick
from experiments.synthetic_tuning import (
    Candidate,
    Trace,
    at_edge,
    best_in_hindsight,
    candidates,
    decided,
    drifting,
    settled,
    trace,
)
from scaffpd.algorithms import AFL, DRFA, GradientDescentAscent, ScaffPD

PLAN = Plan()
SHIPPED = Path(__file__).parents[1] / "results" / "synthetic"
FIGURES = ("badly_scaled", "heterogeneity", "local_steps", "rho")


@cache
def scaff_pd(setting, rounds=120):
    place = bench(setting)
    return trace(Candidate(ScaffPD(place.objective, local_steps=100), {}), place, rounds, settled)


# ------------------------------------------------------------------ x*


def exact_optimum(setting, solution):
    """Newton's method on the optimality conditions of the active clients, with 50 digits."""
    mp = pytest.importorskip("mpmath").mp
    rho = mp.mpf(setting.rho)
    clients = setting.clients()
    active = [i for i, weight in enumerate(solution.weights) if weight > 0]
    n = len(clients)
    k = len(active)
    d = len(solution.x)
    with mp.workdps(50):
        A = [(mp.matrix(X.tolist()), mp.matrix(y.tolist()), mp.mpf(2) / len(X)) for X, y in clients]
        H = [X.T * X * share + mp.mpf(L2) * mp.eye(d) for X, _, share in A]
        b = [X.T * y * share for X, y, share in A]
        c = [(y.T * y)[0] * share / 2 for _, y, share in A]
        z = mp.matrix([*solution.x.tolist(), *(solution.weights[i] for i in active), 0])
        for _ in range(5):
            x = z[:d]
            F = mp.zeros(d + k + 1, 1)
            M = mp.zeros(d + k + 1, d + k + 1)
            for a, i in enumerate(active):
                g = H[i] * x - b[i]
                F[:d] = F[:d] + z[d + a] * g
                M[:d, :d] = M[:d, :d] + z[d + a] * H[i]
                M[:d, d + a] = g
                M[d + a, :d] = g.T
                loss = (x.T * H[i] * x)[0] / 2 - (b[i].T * x)[0] + c[i]
                F[d + a] = loss - rho * (n * z[d + a] - 1) - z[d + k]
                M[d + a, d + a] = -rho * n
                M[d + a, d + k] = -1
                M[d + k, d + a] = 1
            F[d + k] = sum(z[d : d + k]) - 1
            step = mp.lu_solve(M, -F)
            z += step
        assert mp.norm(step) < mp.mpf(10) ** -45
        assert min(z[d : d + k]) > 0
        return z[:d]


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(s, marks=() if s in (PLAN.rho_settings[0], PLAN.hard) else pytest.mark.long)
        for s in PLAN.settings
    ],
    ids=lambda s: s.name,
)
def test_the_optimum_is_right_to_the_last_digits(setting):
    from cases.reference import reference_optimum

    place = bench(setting)
    solution = reference_optimum(setting.clients(), "squared", L2, place.objective)
    exact = exact_optimum(setting, solution)
    assert sum((a - b) ** 2 for a, b in zip(exact, place.optimum.tolist(), strict=True)) < 1e-29


# ------------------------------------------------------------------ what the figures claim


@pytest.mark.sample(4)
@pytest.mark.parametrize("setting", PLAN.settings, ids=lambda s: s.name)
def test_scaff_pd_converges_linearly_to_rounding(setting):
    run = scaff_pd(setting)
    assert run.rounds_to(TARGET) <= 20
    assert run.rounds_to(DEEP) <= 70
    assert run.errors.min() < 1e-27
    r = np.arange(run.rounds_to(DEEP) + 1)
    slope, start = np.polyfit(r, np.log10(run.errors[r]), 1)
    assert slope < -0.25
    assert (
        np.abs(np.log10(run.errors[r]) - start - slope * r).max() < 4
    )  # a straight line, of some twenty decades


@pytest.mark.parametrize(
    "setting",
    [PLAN.rho_settings[0], pytest.param(PLAN.sigma_settings[0], marks=pytest.mark.long)],
    ids=lambda s: s.name,
)
def test_drfa_needs_more_than_ten_times_the_rounds_at_every_local_rate(setting):
    """Every fifth local rate of the grid, at its middle dual rate; all are in `results/`."""
    place = bench(setting)
    limit = 10 * scaff_pd(setting).rounds_to(TARGET)
    base = DRFA(place.objective, local_steps=100)
    for halvings in tuning.HALVINGS[::5]:
        point = drifting(base, base.automatic(place.cohort), halvings, tuning.DUAL[0])
        run = trace(point, place, limit, lambda errors: decided(errors, limit, TARGET))
        assert run.rounds_to(TARGET) is None, halvings


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [DRFA, AFL])
def test_drift_leaves_a_floor_that_falls_with_the_local_rate(kind):
    place = bench(PLAN.paper)
    base = kind(place.objective, local_steps=100)
    ends = []
    for halvings, rounds in ((0, 60), (7, 80), (9, 120)):
        run = trace(drifting(base, base.automatic(place.cohort), halvings, 1.0), place, rounds)
        assert run.errors[-20:].min() / run.errors[-20:].max() > 0.9  # flat
        ends.append(run.errors[-1])
    assert ends[0] > ends[1] > 4 * ends[2] > 4 * TARGET


def test_local_steps_pay_where_the_local_rate_or_the_scaling_holds_a_round_back():
    rounds = {}
    for setting, J in (
        (PLAN.paper, 1),
        (PLAN.paper, 100),
        (PLAN.hard, 10),
        (PLAN.hard, 100),
        (PLAN.hard, 500),
    ):
        place = bench(setting)
        run = trace(
            Candidate(ScaffPD(place.objective, local_steps=J), {}),
            place,
            100,
            lambda e: e[-1] <= TARGET,
        )
        rounds[setting.scaled, J] = run.rounds_to(TARGET)
    assert rounds[False, 1] <= rounds[False, 100] + 3  # the paper's problem is easy
    assert rounds[True, 10] > 3 * rounds[True, 100] > 3 * rounds[True, 500]


# ------------------------------------------------------------------ tuning


@pytest.mark.parametrize("name", tuning.METHODS)
def test_everybody_has_a_grid_of_the_same_size_or_nothing_to_tune(name):
    grid = candidates(name, bench(PLAN.paper), 100)
    assert len(grid) == (1 if name in (tuning.SCAFF_PD, tuning.APD) else tuning.SIZE)
    assert len({tuple(sorted(c.knobs.items())) for c in grid}) == len(grid)
    assert len({repr(c.method) for c in grid}) == len(grid)


@pytest.mark.parametrize("name", [tuning.DRFA_, tuning.AFL_, tuning.FREE, tuning.GDA, tuning.EXTRA])
def test_dual_rates_are_relative_to_the_automatic_one_for_the_same_primal_rates(name):
    place = bench(PLAN.paper)
    for point in candidates(name, place, 100)[::7]:
        own = replace(point.method, dual_rate=None).automatic(place.cohort)["dual_rate"]
        assert point.method.dual_rate == pytest.approx(point.knobs["dual_rate"] * own)
        primal = "server_rate" if name in (tuning.GDA, tuning.EXTRA) else "local_rate"
        longest = type(point.method)(place.objective).automatic(place.cohort)[primal]
        assert getattr(point.method, primal) == pytest.approx(point.knobs[primal] * longest)


def test_drfa_with_a_free_server_rate_is_gda_in_the_limit():
    """100 tiny local steps, times a server rate that makes up for it."""
    place = bench(PLAN.paper)
    halvings = 30
    tau = 0.5 * tuning.longest(place)
    gda = GradientDescentAscent(place.objective, server_rate=tau, dual_rate=3.0)
    free = DRFA(
        place.objective,
        local_steps=100,
        local_rate=2.0**-halvings * tuning.longest(place),
        server_rate=2.0**halvings / 200,
        dual_rate=0.03,
    )
    runs = [trace(Candidate(method, {}), place, 5) for method in (gda, free)]
    np.testing.assert_allclose(
        runs[0].errors[1], runs[1].errors[1], rtol=1e-6
    )  # the same step of x


def curve(*errors):
    return lambda rounds, enough: next(
        (
            errors[: r + 1]
            for r in range(1, len(errors))
            if r == rounds or enough(list(errors[: r + 1]))
        ),
        errors,
    )


def test_the_best_reaches_the_target_first_or_else_ends_nearest(monkeypatch):
    made = {
        "slow": curve(1.0, *(10.0**-k for k in range(9))),
        "fast": curve(1.0, 1e-3, 1e-7, 1e-7),
        "as fast": curve(1.0, 1e-5, 1e-8, 1e-9),
        "floor": curve(1.0, 1e-2, 1e-3, 1e-3),
        "lower": curve(1.0, 1e-1, 1e-4, 1e-4),
        "wild": curve(1.0, 1e3, 1e9, np.inf),
    }

    def fake(candidate, bench, rounds, enough=None):
        errors = np.array(made[candidate.method](rounds, enough))
        return Trace(errors, np.arange(len(errors)))

    monkeypatch.setattr(tuning, "trace", fake)
    for names, best in (
        (("slow", "floor", "fast", "as fast", "wild"), "fast"),
        (("as fast", "fast"), "as fast"),
        (("floor", "wild", "lower"), "lower"),
    ):
        chosen, attempts = best_in_hindsight([Candidate(name, {}) for name in names], None, 9)
        assert chosen.candidate.method == best
        assert len(attempts) == len(names)


def test_a_run_is_given_up_only_where_it_is_decided():
    falling = [10.0 * 0.9**r for r in range(100)]
    assert not decided(falling, 500, TARGET)
    assert decided(falling, 150, 1e-12)  # even at twice the pace
    assert not decided(falling, 150, 1e-5)
    assert decided([*falling, *[falling[-1]] * 60], 500, TARGET)  # a floor
    assert not decided([1.0] * 45, 500, TARGET)  # too early to tell
    assert decided([1.0, np.nan], 500, np.inf)
    assert decided([1.0, 1e5], 500, np.inf)
    assert decided([1.0, 1e-7], 500, np.inf)
    assert settled([1.0, *[1e-28] * 60])
    assert not settled([1.0, *[1e-4] * 60])


def test_edges_are_reported():
    grid = [
        Candidate(None, {"a": a, "theta": t, "only": 1.0})
        for a in (1.0, 2.0, 3.0)
        for t in (0.0, 1.0)
    ]
    assert at_edge(grid[0], grid) == ("a",)
    assert at_edge(grid[2], grid) == ()
    assert at_edge(Candidate(None, {}), grid) == ()


def test_tuning_with_and_without_giving_up_chooses_the_same(monkeypatch):
    """A few points of AFL's grid near its best."""
    place = bench(PLAN.sigma_settings[0])
    base = AFL(place.objective, local_steps=100)
    own = base.automatic(place.cohort)
    grid = [drifting(base, own, k, 0.1) for k in (6, 8, 7, 12)]
    quickly, _ = best_in_hindsight(grid, place, 150)
    monkeypatch.setattr(tuning, "decided", lambda errors, limit, goal: errors[-1] <= TARGET)
    slowly, _ = best_in_hindsight(grid, place, 150)
    assert quickly.candidate.knobs == slowly.candidate.knobs
    assert quickly.trace.rounds_to(TARGET) == slowly.trace.rounds_to(TARGET) > 60


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def done():
    return study.study(replace(quick(3), rounds=5, scaled_rounds=5), processes=1, progress=False)


@pytest.fixture(scope="module")
def folder(done, tmp_path_factory):
    """The command's folder; the runs behind it are made only once."""
    out = tmp_path_factory.mktemp("out") / "synthetic"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            study, "study", lambda plan, processes, progress: done if plan == quick(3) else None
        )
        assert (
            reproduce.run(["synthetic", "--quick", "--quiet", "--seed", "3", "--out", str(out)])
            == 0
        )
    return out


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_command_writes_pictures_numbers_and_where_they_come_from(folder):
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(
        [
            *(f"{name}.{kind}" for name in FIGURES for kind in ("png", "csv")),
            "README.md",
            "about.json",
            "rounds.csv",
            "tuning.csv",
        ]
    )
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    assert about["seed"] == 3
    assert (
        about["command"]
        == f"python -m experiments.reproduce synthetic --seed 3 --quick --out {folder.as_posix()}"
    )
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert about["command"] in readme
    assert "mean nothing" in readme


def test_the_pictures_can_be_read_at_800_pixels(folder):
    for name in FIGURES:
        head = (folder / f"{name}.png").read_bytes()[16:24]
        width = int.from_bytes(head[:4])
        height = int.from_bytes(head[4:])
        assert width >= 1500
        assert 0.4 < height / width < 0.7


def test_every_curve_is_in_the_csv_and_is_right(folder):
    place = bench(replace(PLAN.paper, seed=3))
    own = scaff_pd(place.setting, 5).errors
    for name, panels in (("rho", 2), ("heterogeneity", 1), ("local_steps", 3), ("badly_scaled", 1)):
        rows = read(folder / f"{name}.csv")
        starts = [row for row in rows if row["round"] == "0"]
        assert (
            len(starts)
            == panels * {"rho": 6, "heterogeneity": 4, "local_steps": 2, "badly_scaled": 8}[name]
        )
        if name != "badly_scaled":
            mine = [
                float(row["squared_distance"])
                for row in rows
                if (row["method"], row["rho"], row["badly_scaled"], row["local_steps"])
                == ("Scaff-PD", "0.1", "False", "100")
            ]
            np.testing.assert_allclose(mine, own, rtol=1e-5)


def test_the_table_and_the_verdict_are_on_the_screen(done, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "study", lambda *_: done)
    monkeypatch.setattr(figures, "draw", lambda *_: [])
    monkeypatch.setenv("COLUMNS", "80")
    assert reproduce.run(["synthetic", "--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in tuning.METHODS)
    row = next(line for line in out.splitlines() if line.startswith("Scaff-PD "))
    assert figures.cell(done.find(replace(PLAN.paper, seed=3), tuning.SCAFF_PD)) in row
    assert "Verdict" in out
    assert str(tmp_path / "rho.csv") in out.replace("\n", "")
    assert max(map(len, out[: out.index("Written")].splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [["--seed", "-1"], ["--processes", "0"], ["--rounds", "5"], ["more"]]
)
def test_what_cannot_work_is_said_in_one_sentence(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reproduce.run(["synthetic", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert reproduce.run(["synthetic", "--out", str(tmp_path / "file")]) == 2
    assert "it is a file" in capsys.readouterr().err


def test_help(capsys):
    assert reproduce.run(["--help"]) == 0
    assert "synthetic" in capsys.readouterr().out
    assert reproduce.run(["synthetic", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(
        option in out
        for option in ("--out", "--seed", "--quick", "--processes", "results/synthetic")
    )


# ------------------------------------------------------------------ the numbers in the repository


@pytest.fixture(scope="module")
def shipped():
    rows = read(SHIPPED / "rounds.csv")
    return {
        (float(r["sigma"]), float(r["rho"]), r["badly_scaled"] == "True", r["method"]): r
        for r in rows
        if r["local_steps"] == "100"
    }


@pytest.mark.sample(4)
@pytest.mark.parametrize("setting", PLAN.settings, ids=lambda s: s.name)
def test_the_shipped_numbers_are_what_is_claimed(shipped, setting):
    where = (setting.sigma, setting.rho, setting.scaled)
    ours, drfa, afl = (
        shipped[*where, name] for name in (tuning.SCAFF_PD, tuning.DRFA_, tuning.AFL_)
    )
    own = scaff_pd(setting)
    assert int(ours["rounds_to_1e-6"]) == own.rounds_to(TARGET)
    for other in (drfa, afl):
        assert int(other["configurations"]) == tuning.SIZE
        assert int(other["rounds_to_1e-6"] or other["rounds"]) >= 10 * own.rounds_to(TARGET)
        assert float(other["least_squared_distance"]) > 1e-8


@pytest.mark.long
def test_the_numbers_do_not_depend_on_the_number_of_processes():
    alone, together = (study.study(quick(), processes, progress=False) for processes in (1, 2))
    assert [c.label for c in alone.curves] == [c.label for c in together.curves]
    for one, other in zip(alone.curves, together.curves, strict=True):
        np.testing.assert_array_equal(one.trace.errors, other.trace.errors)
        assert one.knobs == other.knobs


assert torch.get_num_threads() == 1
