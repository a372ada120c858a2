"""The parts of a study on images: cuts, plans, tables, verdicts, causes, pictures."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from image_study_cases import pictures, size_of_png

import scaffpd as sp
import scaffpd.study.comparison as compete
from experiments import image_curves as curves
from experiments import image_figures as figures
from experiments import image_plans as settings
from experiments import image_study as study
from experiments import image_tables as tables
from experiments.image_curves import Curve
from experiments.image_plans import METHODS, NUMBERS, PLANS, Cut, Plan
from scaffpd import data
from scaffpd.data import Table
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores
from scaffpd.models import Linear
from scaffpd.study.comparison import compare
from scaffpd.study.comparison.tables import MethodSummary
from scaffpd.training.loop import Status

TRAIN = np.repeat(np.arange(10), 60)
TEST = np.repeat(np.arange(10), 30)


def made_up_table(features=7, dtype=np.float32):
    """Row j holds j in its first column."""
    values = (
        np.random.default_rng(0).standard_normal((len(TRAIN) + len(TEST), features)).astype(dtype)
    )
    values[:, 0] = np.arange(len(values))
    return values


@pytest.fixture(scope="module")
def cut():
    return Cut(Table(made_up_table(), 1.0, "key"), TRAIN, TEST, 10, 0.1)


# ------------------------------------------------------------------ cuts


def test_training_rows_are_disjoint_and_some_clients_are_thinned(cut):
    whole = data.dirichlet(TRAIN, TRAIN, 10, 0.1, 3, 10)
    parts = cut.parts(3)
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    lost = [len(all_) - len(kept) for all_, kept in zip(whole, parts, strict=True)]
    assert all(set(kept) <= set(all_) for all_, kept in zip(whole, parts, strict=True))
    assert sum(n > 0 for n in lost) == 3  # of ten, 30 %
    for all_, kept, n in zip(whole, parts, lost, strict=True):
        if n:
            assert len(kept) == max(len(all_) - round(0.7 * len(all_)), 5)
    assert min(map(len, parts)) >= 5


def test_rows_of_the_table_are_those_of_the_labels(cut):
    silos = cut(3)
    assert silos.names == tuple(f"client {i}" for i in range(10))
    labels = np.concatenate([TRAIN, TEST])
    for (X, y), part in zip(silos.train, cut.parts(3), strict=True):
        numbers = np.asarray(X)[:, 0].astype(int)
        assert numbers.tolist() == part.tolist()
        assert numbers.max() < len(TRAIN)
        np.testing.assert_array_equal(labels[numbers], y)
    for X, y in silos.test:
        numbers = np.asarray(X)[:, 0].astype(int)
        assert numbers.min() >= len(TRAIN)
        np.testing.assert_array_equal(labels[numbers], y)


def test_test_rows_have_the_proportions_of_the_training_rows(cut):
    silos = cut(3)
    for (_, y), (_, t) in zip(silos.train, silos.test, strict=True):
        share = np.bincount(y, minlength=10) / len(y)
        assert np.abs(np.bincount(t, minlength=10) - share * len(t)).max() < 1
        assert len(t) >= 30 or np.bincount(t).max() >= 29  # as many as there are


def test_a_seed_decides_everything(cut):
    same = [np.concatenate([X.numbers for X, _ in pairs]) for pairs in (cut(4).train, cut(4).train)]
    assert same[0].tolist() == same[1].tolist()
    assert same[0].tolist() != np.concatenate([X.numbers for X, _ in cut(5).train]).tolist()


def test_a_cut_of_a_mapped_table_travels_light(tmp_path):
    np.save(tmp_path / "values.npy", made_up_table(features=2000))
    mapped = np.load(tmp_path / "values.npy", mmap_mode="r")
    cut = Cut(Table(mapped, 0.5, "key"), TRAIN, TEST, 10, 0.1)
    sent = pickle.dumps(cut)
    assert mapped.nbytes > 7e6
    assert len(sent) < 20_000
    arrived = pickle.loads(sent)
    assert isinstance(arrived.table.values, np.memmap)
    assert (arrived.table.scale, arrived.table.key, arrived.alpha) == (0.5, "key", 0.1)
    for (X, y), (Z, w) in zip(
        (*cut(1).train, *cut(1).test), (*arrived(1).train, *arrived(1).test), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(X), np.asarray(Z))
        np.testing.assert_array_equal(y, w)


def test_a_table_in_memory_travels_whole(cut):
    arrived = pickle.loads(pickle.dumps(cut))
    np.testing.assert_array_equal(arrived.table.values, cut.table.values)


# ------------------------------------------------------------------ plans


def test_plans_are_the_papers():
    assert {name: (p.clients, p.alphas) for name, p in PLANS.items()} == {
        "cifar100": (20, (0.01, 0.05, 0.1)),
        "cifar10": (20, (0.05,)),
        "tinyimagenet": (20, (0.01, 0.05, 0.1)),
        "cifar100-50clients": (50, (0.01,)),
    }
    assert {(p.name, alpha) for p in PLANS.values() for alpha in p.alphas} == set(NUMBERS)


def test_a_small_plan_has_the_same_clients_and_fewer_images():
    for name, full in PLANS.items():
        small = settings.plan(name, small=True)
        assert (small.dataset, small.clients, small.alphas) == (
            full.dataset,
            full.clients,
            full.alphas,
        )
        assert (small.train_per_class, small.test_per_class) == settings.PER_CLASS[full.dataset]
        assert (full.train_per_class, full.test_per_class) == (None, None)


def test_a_misspelt_plan():
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        settings.plan("cifer10")


def test_the_eight_methods_take_the_steps_they_are_told():
    assert tuple(settings.methods(7)) == METHODS
    assert {method.local_steps for method in settings.methods(7).values()} == {7}
    assert settings.methods(7)["Scaff-PD"].objective.rho == settings.RHO


@pytest.mark.parametrize(("train", "test"), [(4, None), (None, 2), (None, None), (4, 2)])
def test_a_plan_may_leave_one_part_open(train, test):
    """`--train-per-class` counts without `--small` as well."""
    parts = (data.Pictures(*pictures(10, each, 8, each)) for each in (6, 3))
    images = data.Images("made up", *parts, tuple("abcdefghij"), "Made up.")
    fewer = study._fewer(
        images, Plan("cifar10", "cifar10", train_per_class=train, test_per_class=test)
    )
    assert (len(fewer.train), len(fewer.test)) == (10 * (train or 6), 10 * (test or 3))
    assert (fewer is images) == (train is None and test is None)


def test_numbers_of_the_paper():
    """All were compared with its LaTeX source by a script; these stand for the rest."""
    assert sum(map(len, NUMBERS.values())) == 60
    assert NUMBERS["cifar100", 0.01]["Scaff-PD"] == (49.03, 29.30)
    assert NUMBERS["tinyimagenet", 0.1]["Δ-FL"] == (36.47, 20.13)
    assert NUMBERS["cifar10", 0.05]["q-FFL"] == (68.52, 41.26)
    assert NUMBERS["cifar100-50clients", 0.01]["AFL"] == (49.93, 31.87)
    assert all(
        0 < worst < average < 100 for table in NUMBERS.values() for average, worst in table.values()
    )


# ------------------------------------------------------------------ tables and verdicts


def line(method, average, worst, deviation=0.01, failures=""):
    means = {} if failures else {tables.AVERAGE: average, tables.WORST: worst, tables.BEST: 0.9}
    return MethodSummary(
        method, 0 if failures else 2, failures, 5, None, means, dict.fromkeys(means, deviation)
    )


def made_up_run(entry, seed, gap):
    names = tuple(map(str, range(20)))
    counts = np.full(20, 5)
    rising = np.linspace(0.1, 0.2, 20)
    test = ClientScores(names, rising, np.full(20, entry.mean.get(tables.WORST, np.nan)), counts)
    scores = {"train": ClientScores(names, rising[::-1], 1 - rising, counts), "test": test}
    job = SimpleNamespace(method=entry.method, seed=seed)
    return SimpleNamespace(job=job, failed=bool(entry.failures), certificate=gap, scores=scores)


def fake(lines, name="cifar10", alphas=(0.05,), gap=1e-3):
    """A study of which only the tables' needs are there: two partitions on which every client fares the same."""
    found = {entry.method: entry for entry in lines}
    runs = tuple(made_up_run(entry, seed, gap) for entry in lines for seed in range(2))
    comparison = SimpleNamespace(
        table=tuple(lines), line=found.__getitem__, finals=runs, clients=20
    )
    return SimpleNamespace(
        plan=replace(PLANS[name], alphas=alphas), comparisons=dict.fromkeys(alphas, comparison)
    )


def eight(**changed):
    usual = {name: line(name, 0.6 + 0.01 * k, 0.3 + 0.01 * k) for k, name in enumerate(METHODS)}
    return list((usual | {entry.method: entry for entry in changed.values()}).values())


def test_the_best():
    (said,) = tables.verdict(fake(eight(a=line("Scaff-PD", 0.67, 0.37, deviation=0.02))))
    assert said == (
        "α = 0.05: Scaff-PD's worst 20 % (37.00 ± 2.00) is the best, 1.0 points above Δ-FL (36.00 ± 1.00; by "
        "partition +1.0, +1.0). Against FedAvg, which counts clients by their samples, it is +7.0 points for the worst "
        "20 % and +7.0 on average. Of its 8 worst clients on test images (all partitions), 8 are among the 8 with the "
        "largest training loss, which is what it weighs clients by; the lowest training accuracy of a client is 80 %. "
        "Its certified gap is at most 1.0e-03."
    )


def test_far_ahead_and_uncertified():
    (said,) = tables.verdict(fake(eight(a=line("Scaff-PD", 0.5, 0.5)), gap=np.inf))
    assert "is the best, 14.0 points above Δ-FL (36.00 ± 1.00; by partition +14.0, +14.0)." in said
    assert "-10.0 on average" in said
    assert "certified" not in said


def test_not_the_best():
    (said,) = tables.verdict(fake(eight(a=line("Scaff-PD", 0.6, 0.335))))
    assert "Scaff-PD's worst 20 % (33.50 ± 1.00) is number 4, 2.5 points below Δ-FL" in said
    assert "; by partition -2.5, -2.5)" in said


def test_a_gap_that_says_nothing():
    (said,) = tables.verdict(fake(eight(), gap=4.7))
    assert said.endswith(
        "Its certified gap is at most 4.7e+00, more than the losses at the start: nothing is proven."
    )


def test_one_seed_has_no_deviation():
    (said,) = tables.verdict(fake([line(name, 0.5, 0.4, np.nan) for name in METHODS]))
    assert (
        "Scaff-PD's worst 20 % (40.00) is the best, 0.0 points above FedAvg (40.00; by partition"
        in said
    )
    assert "nan" not in said


def test_failures_are_named():
    (said,) = tables.verdict(fake(eight(a=line("Scaff-PD", 0, 0, failures="It diverged."))))
    assert said == "α = 0.05: It diverged."
    (said,) = tables.verdict(fake(eight(a=line("FedAvg", 0, 0, failures="It diverged."))))
    assert "FedAvg failed." in said
    others = {name: line(name, 0, 0, failures="It diverged.") for name in METHODS[:-1]}
    (said,) = tables.verdict(
        fake(eight(**{f"m{k}": entry for k, entry in enumerate(others.values())}))
    )
    assert said == "α = 0.05: no other method is ranked"


def test_a_group_of_columns_for_every_alpha():
    place = fake(eight(a=line("DRFA", 0, 0, failures="It diverged.")), "cifar100", (0.01, 0.1))
    header = tables.header(place)
    assert header[:5] == [
        "method",
        "α = 0.01: average",
        "α = 0.01: worst 20 %",
        "α = 0.01: average (paper)",
        "α = 0.01: worst 20 % (paper)",
    ]
    assert header[5] == "α = 0.1: average"
    rows = {row[0]: row[1:] for row in tables.rows(place)}
    assert list(rows) == list(METHODS)
    assert all(len(row) == len(header) - 1 for row in rows.values())
    assert rows["Scaff-PD"] == [
        *("**67.00 ± 1.00**", "**37.00 ± 1.00**", "49.03", "29.30"),
        *("**67.00 ± 1.00**", "**37.00 ± 1.00**", "43.69", "32.77"),
    ]
    assert rows["FedAvg"][:4] == ["60.00 ± 1.00", "30.00 ± 1.00", "38.77", "15.93"]
    assert rows["DRFA"][:4] == ["failed", "failed", "46.47", "26.77"]


def test_where_the_paper_has_no_number_and_nothing_is_left():
    rows = {row[0]: row[1:] for row in tables.rows(fake(eight()))}
    assert rows["FedProx"][2:] == ["–", "–"]
    lost = [line(name, 0, 0, failures="It diverged.") for name in METHODS]
    assert [row[1] for row in tables.rows(fake(lost))] == ["failed"] * 8


# ------------------------------------------------------------------ a real comparison with a method that diverges


@dataclass(frozen=True)
class Wild(sp.FedAvg):
    """FedAvg with a rate beyond all bounds."""

    knobs: ClassVar[tuple[str, ...]] = ()

    def init(self, federation, seed=0, x0=None):
        return replace(super().init(federation, seed, x0), local_rate=1e9)


@pytest.fixture(scope="module")
def ground():
    random = np.random.default_rng(0)
    labels = np.concatenate([TRAIN, TEST])
    values = (np.eye(10)[labels] + 0.4 * random.standard_normal((len(labels), 10))).astype(
        np.float32
    )
    plan = replace(
        settings.plan("cifar10", small=True),
        clients=10,
        alphas=(0.1,),
        rounds=4,
        tune=1,
        local_steps=2,
        l2=1e-2,
    )
    return study.Ground(plan, Table(values, 1.0, "made up"), TRAIN, TEST, 10, "Made up.", 0.5)


@pytest.fixture(scope="module")
def wild(ground):
    """FedProx diverges; nothing is tuned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compete, "cores", lambda: 1)
        found = compare(
            settings.methods(2) | {"FedProx": Wild(local_steps=2)},
            ground.problem(0.1, "cpu"),
            seeds=(0, 1),
            rounds=4,
            tune=1,
            progress=False,
        )
    return study.Study(ground.plan, ground, {0.1: found}, 3.0, "a machine")


def test_a_diverged_method_is_in_all_files(wild, tmp_path):
    written = tables.save(wild, tmp_path, "command")
    assert [path.name for path in written] == ["table.csv", "about.json", "README.md"]
    text = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    (row,) = [entry for entry in text if ",FedProx," in entry]
    assert row.split(",")[3:6] == ["0", "nan", "nan"]
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| FedProx | failed | failed | – | – |" in page
    assert "on a machine in 3 s, of which 0 s" in page


def test_the_first_calls_seconds_stay(wild, tmp_path):
    tables.save(wild, tmp_path, "command")
    before = (tmp_path / "README.md").read_bytes()
    tables.save(replace(wild, seconds=0.1), tmp_path, "command")
    assert (tmp_path / "README.md").read_bytes() == before
    tables.save(replace(wild, seconds=0.1), tmp_path, "another command")
    assert " in 0 s, of which" in (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "about.json").write_text("[]")
    tables.save(wild, tmp_path, "command")
    assert (tmp_path / "README.md").read_bytes() == before


def test_the_picture_leaves_out_who_failed(wild, tmp_path, monkeypatch):
    import matplotlib.figure as mf

    seen = []
    real = mf.Figure.savefig
    monkeypatch.setattr(
        mf.Figure, "savefig", lambda self, *a, **k: (seen.append(self), real(self, *a, **k))[1]
    )
    path = figures.tradeoff(wild.comparisons[0.1], tmp_path / "tradeoff.png", "title")
    assert size_of_png(path)[0] > 1000
    labels = [text.get_text() for text in seen[0].axes[1].get_legend().get_texts()]
    assert labels == [name for name in METHODS if name != "FedProx"]
    points = {entry.get_label(): entry for entry in seen[0].axes[0].lines}
    ours = wild.comparisons[0.1].line("Scaff-PD")
    assert points["Scaff-PD"].get_xdata() == pytest.approx(100 * ours.mean[tables.AVERAGE])
    assert points["Scaff-PD"].get_ydata() == pytest.approx(100 * ours.mean[tables.WORST])


# ------------------------------------------------------------------ curves and causes


def test_a_curve_has_every_round_even_where_the_run_ends_early(ground, monkeypatch):
    cohort = ground.problem(0.1, "cpu").cohort(0)
    diverged = curves.follow(Wild(local_steps=2), cohort, 6, 0)
    assert diverged.shape == (7, 3)
    assert np.isfinite(diverged[0]).all()
    assert np.isnan(diverged[-1]).all()
    whole = curves.follow(sp.FedAvg(local_steps=2), cohort, 6, 0)
    np.testing.assert_array_equal(whole[0], diverged[0])
    real = curves.train

    def stalls(*args, rounds, **more):
        return replace(real(*args, rounds=3, **more), status=Status.STALLED)

    monkeypatch.setattr(curves, "train", stalls)
    stalled = curves.follow(sp.FedAvg(local_steps=2), cohort, 6, 0)
    np.testing.assert_array_equal(stalled[:4], whole[:4])
    np.testing.assert_array_equal(stalled[4:], np.stack([whole[3]] * 3))


def test_an_interruption_is_not_taken_for_a_result(ground, monkeypatch):
    monkeypatch.setattr(curves, "_scores", lambda cohort, x: (0.1, 0.1, 0.1))
    real = curves.train

    def interrupted(*args, **more):
        return replace(real(*args, **more), status=Status.INTERRUPTED)

    monkeypatch.setattr(curves, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        curves.follow(sp.FedAvg(local_steps=2), ground.problem(0.1, "cpu").cohort(0), 2, 0)


def scores(rounds, level):
    return np.stack([np.linspace(0.1, level, rounds + 1)] * 3, 1) * [1.0, 0.5, 1.2]


def test_the_table_of_causes():
    found = [
        Curve(label, seed, scores(30, level + 0.1 * seed), l2)
        for l2, level in ((1e-3, 0.5), (3e-3, 0.7))
        for seed in (0, 1)
        for label in "ab"
    ]
    header, rows = curves.cause_table(found)
    assert header == [
        "method",
        "l2 = 0.001, 10 rounds",
        "l2 = 0.001, 30 rounds",
        "l2 = 0.003, 10 rounds",
        "l2 = 0.003, 30 rounds",
    ]
    assert rows == [
        [label, "12.5 (25.0)", "27.5 (55.0)", "15.8 (31.7)", "37.5 (75.0)"] for label in "ab"
    ]
    assert len(list(curves.lines(found, with_l2=True))) == 2 * 2 * 2 * 31
    assert next(curves.lines(found, with_l2=True)) == (
        "a",
        "0.001",
        0,
        0,
        "0.100000",
        "0.050000",
        "0.120000",
    )
    page = curves.causes_page(found, "Title", "command", "a machine")
    assert page.startswith("# Title\n\nWritten by `command` on a machine.")
    assert "mean over 2 partitions" in page
    assert "| b | 12.5 (25.0) |" in page


def test_causes_of_few_rounds_and_of_failures():
    broken = scores(3, 0.5)
    broken[2:] = np.nan
    found = [Curve("a", 0, scores(3, 0.5), 1e-3), Curve("b", 0, broken, 1e-3)]
    assert curves.cause_table(found) == (
        ["method", "l2 = 0.001, 3 rounds"],
        [["a", "25.0 (50.0)"], ["b", "failed"]],
    )


def test_contestants_differ_in_one_thing_at_a_time():
    methods = curves.contestants(4)
    assert len(methods) == 8
    assert {method.local_steps for method in methods.values()} == {4}
    assert len({repr(method) for method in methods.values()}) == 8
    assert [m.objective.rho for name, m in methods.items() if "ρ" in name] == [0.1, 1.0, 10.0]


# ------------------------------------------------------------------ pictures


def test_the_picture_over_rounds(tmp_path):
    labels = ["Scaff-PD, ρ = 0.1", "Scaff-PD, ρ = 0.2", "Scaff-PD, ρ = 0.5", "SCAFFOLD"]
    found = [
        Curve(name, s, scores(9, 0.4 + 0.1 * k + 0.02 * s))
        for s in (0, 1)
        for k, name in enumerate(labels)
    ]
    found[-1].scores[5:] = np.nan
    path = figures.over_rounds(found, tmp_path / "rho.png", "title")
    assert size_of_png(path)[0] > 1000


def test_the_picture_of_a_partition(cut, tmp_path):
    assert min(size_of_png(figures.partition(cut, tmp_path / "partition.png", "title"))) > 400


def test_no_picture_stays_open(cut, tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    figures.partition(cut, tmp_path / "partition.png", "title")
    assert plt.get_fignums() == before


# ------------------------------------------------------------------ problems


def test_the_problem_is_squared_loss_on_the_labels(ground):
    problem = ground.problem(0.1, "cpu")
    assert problem.name == "CIFAR-10, 10 clients, Dirichlet(0.1)"
    assert repr(problem.model) == repr(Linear("squared", l2=1e-2, classes=10))
    assert problem.cohort(0).start().shape == (100,)


def test_hardware_in_words():
    assert study.hardware("cpu").endswith("threads")


# ------------------------------------------------------------------ ridge regression


def test_ridge_regression_by_conjugate_gradients():
    random = np.random.default_rng(0)
    values = random.normal(size=(30, 50)).astype(np.float32)
    labels = random.integers(0, 3, 30)
    A = values.astype(float) * 0.1
    Y = np.eye(3)[labels]
    X = study.ridge(torch.from_numpy(A), torch.from_numpy(Y), 1e-2, steps=200)
    exact = np.linalg.solve(2 * A.T @ A / 30 + 1e-2 * np.eye(50), 2 * A.T @ Y / 30)
    np.testing.assert_allclose(X, exact, atol=1e-5)
