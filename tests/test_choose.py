"""Strengths chosen by folds: against sums written out, on problems whose answer is known, and the rule itself."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from scaffpd import cli
from scaffpd.data.silos import fold_numbers
from scaffpd.errors import InputError
from scaffpd.study.choosing import GridPoint, _chosen, search
from scaffpd.study.folds import Folds

SQUARED = sp.Linear("squared")


def clients(N=4, n=60, d=3, apart=0.0, noise=1.0, seed=0, useless=0):
    """Linear regression; the clients' coefficients lie `apart`, and some columns say nothing."""
    random = np.random.default_rng(seed)
    common = random.normal(size=d)
    made = []
    for _ in range(N):
        X = random.normal(size=(n, d + useless))
        made.append(
            (X, X[:, :d] @ (common + apart * random.normal(size=d)) + noise * random.normal(size=n))
        )
    return made


def envelope_minimiser(pairs, l2, kappa):
    """The joint problem in (x, u_1 … u_N) of the average objective, as one linear system."""
    N = len(pairs)
    d = pairs[0][0].shape[1]
    A = np.zeros(((N + 1) * d,) * 2)
    b = np.zeros((N + 1) * d)
    for i, (X, y) in enumerate(pairs, 1):
        own = slice(i * d, (i + 1) * d)
        gamma = kappa / len(y)
        A[own, own] = 2 * X.T @ X / len(y) + (l2 + gamma) * np.eye(d)
        A[own, :d] = A[:d, own] = -gamma * np.eye(d)
        A[:d, :d] += gamma * np.eye(d)
        b[own] = 2 * X.T @ y / len(y)
    return np.linalg.solve(A, b).reshape(N + 1, d)[1:]


def test_losses_of_a_point_are_those_of_models_solved_for_directly():
    """Squared loss is (⟨a, u⟩ − y)², and N·K of them make a point."""
    pairs = clients(apart=0.7)
    K = 3
    seed = 5
    choice = sp.choose(
        pairs, SQUARED, sp.Average(), 0.3, [math.inf, 20.0], folds=K, tol=1e-10, seed=seed
    )
    numbers = [fold_numbers(f"client-{i}", y, K, seed) for i, (_, y) in enumerate(pairs)]
    for point in choice.points:
        expected = np.empty((len(pairs), K))
        for k in range(K):
            kept = [(X[m != k], y[m != k]) for (X, y), m in zip(pairs, numbers, strict=True)]
            if math.isinf(point.strength):
                H = sum(2 * X.T @ X / len(y) for X, y in kept) / len(kept) + 0.3 * np.eye(3)
                x = np.linalg.solve(H, sum(2 * X.T @ y / len(y) for X, y in kept) / len(kept))
                models = [x] * len(kept)
            else:
                models = envelope_minimiser(kept, 0.3, point.strength)
            for i, ((X, y), m, u) in enumerate(zip(pairs, numbers, models, strict=True)):
                expected[i, k] = np.mean((X[m == k] @ u - y[m == k]) ** 2)
        np.testing.assert_allclose(point.losses, expected, rtol=1e-4)
        assert point.score("mean") == pytest.approx(expected.mean())
        assert point.score("worst fifth") == pytest.approx(expected.mean(1).max())


def test_clients_that_are_alike_share_a_model_and_others_have_their_own():
    alike = sp.choose(clients(apart=0.0, seed=2), SQUARED, sp.Average(), l2=0.01)
    assert math.isinf(alike.strength)
    assert isinstance(alike.model, sp.Linear)
    different = sp.choose(clients(apart=2.0), SQUARED, sp.Average(), l2=0.01)
    assert different.strength < 100
    assert isinstance(different.model, sp.Personal)
    assert different.model == sp.Personal(sp.Linear("squared", l2=0.01), different.strength)


def test_columns_that_say_nothing_ask_for_a_larger_l2():
    one = {"objective": sp.Average(), "strength": math.inf, "errors": 0, "tol": 1e-9}
    clean = sp.choose(clients(noise=0.1), SQUARED, **one)
    noisy = sp.choose(clients(n=20, noise=2.0, useless=80), SQUARED, **one)
    assert clean.l2 < 0.02
    assert noisy.l2 > 10 * clean.l2
    assert noisy.model.l2 == noisy.l2
    scaled = sp.choose([(10 * X, y) for X, y in clients(noise=0.1)], SQUARED, **one)
    assert scaled.l2 == pytest.approx(100 * clean.l2, rel=0.06)  # goes by the features' mean square


def test_the_worst_fifth_asks_for_fairness_where_a_client_is_outvoted():
    pairs = [
        *clients(N=4, noise=0.1),
        (clients(N=1, noise=0.1)[0][0], clients(N=1, noise=0.1, seed=9)[0][1]),
    ]
    X, _ = pairs[-1]
    pairs[-1] = (X, X @ np.array([3.0, -3.0, 3.0]))
    options = {"l2": 0.01, "strength": math.inf}
    worst = sp.choose(pairs, SQUARED, "CVaR", by="worst fifth", **options)
    assert isinstance(worst.objective, sp.CVaR)
    mean = worst.among(lambda point: True, by="mean")
    assert isinstance(mean.objective, sp.Average)
    assert (worst.by, mean.by) == ("worst fifth", "mean")
    assert len(worst.points) == 4  # the average and three strengths


def made(losses, l2):
    return GridPoint(l2, sp.Average(), math.inf, np.array(losses, dtype=float), 1)


def test_the_rule_takes_the_simplest_within_one_standard_error():
    far = made([[3, 3.1], [3, 3.2]], 1.0)
    near = made(
        [[1.1, 1.3], [1.2, 0.9]], 0.1
    )  # behind by 0.1 at one client, by 0.3 and −0.2 at the other
    best = made([[1.0, 1.2], [0.9, 1.1]], 0.01)
    choice = _chosen([far, near, best], "mean", 1.0, SQUARED)
    differences = np.array([[0.1, 0.1], [0.3, -0.2]]) / 2
    assert choice.points[1].behind == pytest.approx(0.075)
    assert choice.points[1].error == pytest.approx(
        math.sqrt((differences.var(1, ddof=1) / 2).sum())
    )
    assert choice.l2 == 0.1
    assert choice.best.l2 == 0.01
    assert "within one standard error" in choice.sentence
    assert "l2 = 0.1, the average, one model for all" in str(choice)
    strict = _chosen([far, near, best], "mean", 0.0, SQUARED)
    assert strict.l2 == 0.01
    assert strict.sentence.endswith("is the lowest of 3 points tried in 3 rounds.")
    one = sp.Average()
    same = [
        GridPoint(l2, one, math.inf, point.losses, 1)
        for l2, point in ((1.0, far), (0.1, near), (0.01, best))
    ]
    strict = _chosen(same, "mean", 0.0, SQUARED)
    assert strict.matters == {"l2": pytest.approx(3.075 / 1.05 - 1)}
    assert "in 3 rounds; it moves with l2 by up to 193 %." in strict.sentence


def test_the_table_has_a_row_for_every_point():
    choice = sp.choose(
        clients(n=12), SQUARED, [sp.Average(), sp.CVaR(0.5)], [0.1, 1.0], [math.inf, 10], folds=2
    )
    assert len(choice.table) == 8
    assert [row["chosen"] for row in choice.table].count(True) == 1
    first = choice.table[0]
    assert (first["kappa"], first["l2"], first["objective"]) == (
        math.inf,
        1.0,
        "Average()",
    )  # the simplest
    own = choice.points[0].losses
    assert first["validation_loss_mean_se"] == pytest.approx(
        np.sqrt((own.var(1, ddof=1) / 2).sum()) / len(own)
    )
    assert min(row["behind"] for row in choice.table) == 0
    line = choice.kappa_path
    assert [row["kappa"] for row in line] == [math.inf, 10.0]
    assert {(row["l2"], row["objective"]) for row in line} == {(choice.l2, repr(choice.objective))}
    assert [row["chosen"] for row in line] == [row["kappa"] == choice.strength for row in line]
    assert choice.rounds == sum(point.rounds for point in choice.points) > 0
    again = sp.choose(
        clients(n=12), SQUARED, [sp.Average(), sp.CVaR(0.5)], [0.1, 1.0], [math.inf, 10], folds=2
    )
    assert again.table == choice.table


@pytest.mark.parametrize("frames", [False, True])
def test_labels_in_every_form(frames):
    """A label that a fold lacks is known all the same, and data frames and named clients are fine."""
    random = np.random.default_rng(0)
    pandas = pytest.importorskip("pandas")
    pairs = {f"site {k}": (random.normal(size=(12, 2)), np.arange(12) % 2) for k in range(2)}
    pairs["site 1"][1][:1] = 2
    if frames:
        pairs = {
            name: (pandas.DataFrame(X, columns=["a", "b"]), pandas.Series(y))
            for name, (X, y) in pairs.items()
        }
    own = sp.Personal(sp.Linear("softmax", intercept=True), 1.0, ["intercept"])
    choice = sp.choose(pairs, own, sp.ChiSquare(0.1), 0.1, [3.0, 30.0])
    assert choice.model.columns == ("intercept",)
    assert choice.model.model.classes == 3
    assert choice.point.losses.shape == (2, 3)


def test_folds_are_even_in_size_and_labels():
    y = np.array([0] * 9 + [1] * 3)
    number = fold_numbers("a", y, 3, 0)
    assert [np.bincount(y[number == k]).tolist() for k in range(3)] == [[3, 1]] * 3
    z = np.random.default_rng(1).normal(size=11)
    assert sorted(np.bincount(fold_numbers("a", z, 4, 2))) == [2, 3, 3, 3]
    assert (
        fold_numbers("a", z, 4, 2) != fold_numbers("b", z, 4, 2)
    ).any()  # of their own at every client


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"by": "third"}, "choose one of 'mean', 'worst fifth'"),
        ({"errors": -1}, "errors >= 0"),
        ({"folds": 1}, "folds >= 2"),
        ({"l2": -1.0}, "l2 >= 0 and finite"),
        ({"l2": math.inf}, "l2 >= 0 and finite"),
        ({"l2": []}, "a number or numbers for l2"),
        ({"strength": 0.0}, "strength > 0"),
        ({"objective": "ChiSqare"}, "did you mean 'ChiSquare'"),
        ({"objective": [3]}, "needs objectives such as"),
        ({"model": "linear"}, "needs a model such as"),
        ({"clients": []}, "at least one client"),
        ({"clients": sp.Cohort(clients(), SQUARED)}, "needs the clients' rows"),
        ({"folds": 61}, "Client 'client-0' has 60 rows, too few for 61 folds: give folds=60"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(wrong, message):
    with pytest.raises(InputError, match=message):
        sp.choose(**{"clients": clients(), "model": SQUARED} | wrong)


def test_a_client_without_rows_for_folds_is_named():
    pairs = {"big": clients()[0], "small": tuple(part[:1] for part in clients()[0])}
    with pytest.raises(
        InputError, match="Client 'small' has 1 row, too few for 3 folds: leave it out"
    ):
        sp.choose(pairs, SQUARED)


def test_warm_starts_are_cheaper_than_training_every_point_anew():
    silos = sp.data.heart_disease()
    model = sp.Linear("logistic", intercept=True)
    choice = sp.choose(silos.train, model, "ChiSquare", [0.1, 0.03], math.inf, tol=1e-5)
    cold = 0
    for point in choice.points:
        cohort = sp.Cohort(silos.train, sp.Linear("logistic", l2=point.l2, intercept=True))
        cold += 3 * sp.train(sp.fair(point.objective), cohort, tol=1e-5).rounds
    assert choice.rounds < 0.75 * cold  # the run that finds the spread of losses included


# ------------------------------------------------------------------ scaffpd train


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Three sites, of which one is noisier; forty columns that say nothing."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    lines = [",".join(["site", *(f"x{k}" for k in range(42)), "y"])]
    for site, noise in (("a", 0.3), ("b", 0.3), ("c", 2.0)):
        for row in random.normal(size=(40, 42)):
            y = row[0] - 2 * row[1] + noise * random.normal()
            lines.append(",".join([site, *(f"{v:.3f}" for v in row), f"{y:.3f}"]))
    (tmp_path / "table.csv").write_text("\n".join(lines))
    return ["train", "table.csv", "--client", "site", "--target", "y", "--no-report", "--quiet"]


def trained(*words):
    assert cli.run(list(words)) == 0
    return tomllib.loads(Path("runs/table/config.toml").read_text())


def summary():
    return json.loads(Path("runs/table/summary.json").read_text())


def test_a_table_chooses_l2_fairness_and_kappa_together(table):
    found = trained(*table, "--splits", "1", "--no-coalition")
    l2 = found["model"]["l2"]
    rho = found["objective"]["rho"]
    kappa = found["model"]["strength"]
    assert l2 > 0.05  # not 0.001: columns are many, rows are few
    (said,) = [remark for remark in summary()["remarks"] if remark.startswith("Chosen by 3 folds")]
    assert f"l2 = {l2:.3g}, ChiSquare with ρ = {rho:.3g}" in said
    assert "worst fifth of held-out losses" in said
    rounds = int(said.split(" points tried in ")[1].split(" rounds")[0])
    assert 30 < rounds <= 300  # the budget
    assert summary()["joining"]["kappa"] == kappa
    rows = list(csv.DictReader(Path("runs/table/kappa_path.csv").read_text().splitlines()))
    assert len(rows) == 8
    assert {row["l2"] for row in rows[:-1]} == {str(l2)}
    again = trained(*table, "--splits", "1", "--no-coalition")  # the same run goes on
    assert again == found
    assert not Path("runs/table-2").exists()


def test_without_choosing_strengths_go_by_rows_columns_and_the_spread_of_losses(table):
    found = trained(*table, "--no-choose", "--splits", "0")
    l2 = found["model"]["l2"]
    rho = found["objective"]["rho"]
    assert l2 == pytest.approx(0.3 * 42 / 96, rel=0.05)
    assert any(f"ρ = {rho:g}, the standard deviation" in remark for remark in summary()["remarks"])
    rows = csv.DictReader(Path("runs/table/clients.csv").read_text().splitlines())
    losses = [float(row["train_loss"]) for row in rows if row["model"] == "average"]
    assert rho == pytest.approx(np.std(losses), rel=0.06)


def test_what_is_given_stays(table):
    found = trained(
        *table,
        "--l2",
        "0.02",
        "--strength",
        "0.7",
        "--kappa",
        "20",
        "--splits",
        "1",
        "--no-coalition",
    )
    assert (found["model"]["l2"], found["objective"]["rho"], found["model"]["strength"]) == (
        0.02,
        0.7,
        20.0,
    )
    assert not any(remark.startswith("Chosen") for remark in summary()["remarks"])
    given = (
        "--l2",
        "0.02",
        "--objective",
        "CVaR",
        "--by",
        "mean",
        "--budget",
        "60",
        "--splits",
        "0",
    )
    found = trained(*table, *given, "--fresh", "--out", "runs/table")
    assert found["model"]["l2"] == 0.02
    assert found["objective"]["kind"] == "CVaR"
    (said,) = [remark for remark in summary()["remarks"] if remark.startswith("Chosen by 3 folds")]
    assert "mean of held-out losses" in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--choose", "--l2", "0.1", "--strength", "1", "--kappa", "3"), "nothing to choose"),
        (("--choose", "--epsilon", "1"), "without differential privacy"),
        (("--no-choose", "--by", "mean"), "--by goes with choosing"),
        (("--by", "median"), "Unknown measure 'median'"),
        (("--kappa", "0"), "--kappa needs a number above 0, got 0."),
        (("--kappa", "-1"), "--kappa needs a number above 0, got -1."),
        (("--kappa", "3", "--epsilon", "1"), "--kappa"),
        (("--kappa", "3", "--test", "0"), "--kappa"),
        (("--coalition", "--test", "0"), "--coalition"),
        (("--budget", "5"), "a budget of at least 21 rounds"),
    ],
)
def test_refusals_of_the_command(table, more, words, capsys):
    assert cli.run([*table, *more]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()  # refused before any work


def test_clients_without_rows_for_folds_train_and_are_not_chosen_by(table):
    lines = Path("table.csv").read_text().splitlines()
    few = [line.replace("c,", "d,", 1) for line in lines if line.startswith("c,")][:2]
    Path("table.csv").write_text("\n".join([*lines, *few]))
    found = trained(*table, "--splits", "1", "--no-coalition")
    (said,) = [remark for remark in summary()["remarks"] if remark.startswith("Chosen by")]
    assert said.startswith("Chosen by 3 folds of the 3 clients with rows enough: l2 =")
    clients = csv.DictReader(Path("runs/table/clients.csv").read_text().splitlines())
    assert {row["client"] for row in clients} == {"a", "b", "c", "d"}
    path = list(csv.DictReader(Path("runs/table/kappa_path.csv").read_text().splitlines()))
    assert {float(row["l2"]) for row in path if row["l2"]} == {found["model"]["l2"]}


def test_where_nobody_has_rows_for_folds_the_usual_strengths_are_taken(table, capsys):
    head, *lines = Path("table.csv").read_text().splitlines()
    Path("table.csv").write_text(
        "\n".join([head, *(f"{k % 40}{line[1:]}" for k, line in enumerate(lines))])
    )
    assert cli.run([*table, "--choose", "--splits", "0"]) == 2
    assert "nobody has the 3 rows to train on that folds need." in capsys.readouterr().err
    trained(*table, "--splits", "1")
    assert any("by the numbers of rows and columns" in remark for remark in summary()["remarks"])
    (caution,) = summary()["cautions"]
    assert (
        caution
        == "What joining brings is not known: nobody has the 3 rows to train on that folds need."
    )
    assert not Path("runs/table/joining.csv").exists()


@pytest.mark.long
def test_one_model_for_all_says_why_personal_models_are_shown(table):
    trained(*table, "--columns", "x0,x1,x2,x3", "--splits", "1", "--no-coalition")
    said = " ".join(summary()["remarks"])
    assert ", one model for all. Its worst fifth" in said
    kappa = summary()["joining"]["kappa"]
    assert (
        f"Personal models are shown too, to compare, with the best κ that is finite, {kappa:.4g}."
        in said
    )
    trained(*table, "--columns", "x0,x1,x2,x3", "--splits", "0", "--fresh")
    assert "Personal models are shown" not in " ".join(
        summary()["remarks"]
    )  # where nothing is compared


def test_noise_columns_do_not_drown_the_worst_client(tmp_path, monkeypatch):
    """360 rows, 300 columns that say nothing: chosen or not, l2 is one that still learns."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    X = random.normal(size=(360, 303))
    y = (2 * X[:, :3].sum(1) + random.logistic(size=360) > 0).astype(int)
    lines = [",".join(["site", *(f"x{k}" for k in range(303)), "y"])]
    lines += [
        ",".join([f"s{i % 3}", *(f"{v:.2f}" for v in x), str(label)])
        for i, (x, label) in enumerate(zip(X, y, strict=True))
    ]
    Path("table.csv").write_text("\n".join(lines))
    command = [
        "train",
        "table.csv",
        "--client",
        "site",
        "--target",
        "y",
        "--no-report",
        "--quiet",
        "--splits",
        "0",
    ]
    losses = {}
    for name, more in (("usual", ["--no-choose"]), ("small", ["--no-choose", "--l2", "0.001"])):
        trained(*command, *more, "--fresh", "--out", "runs/table")
        rows = csv.DictReader(Path("runs/table/clients.csv").read_text().splitlines())
        losses[name] = max(float(row["test_loss"]) for row in rows if row["model"] == "average")
    assert losses["usual"] < math.log(2) < losses["small"]  # better than a coin, and worse than one


def test_private_tables_spend_nothing_on_strengths(table):
    found = trained(*table, "--epsilon", "5", "--noise-seed", "1", "--rounds", "2")
    assert (found["model"]["l2"], found["objective"]["rho"]) == (0.001, 0.1)


@pytest.mark.parametrize("budget", [None, 60])
def test_free_strengths_keep_the_prior_and_the_cap(budget):
    rows = Folds.of(clients(apart=1.0), SQUARED, None, 2, 0)
    goal = sp.ChiSquare(0.1, prior=[1, 1, 1, 2], cap=0.3)
    choice = search(
        rows, goal, 0.1, math.inf, "mean", 1.0, 20, None, 0, budget, fairly=True, free=True
    )
    assert {type(one.objective) for one in choice.tried} == {sp.Average, sp.ChiSquare}
    for point in choice.tried:
        assert np.array_equal(point.objective.prior, goal.prior)
        assert getattr(point.objective, "cap", 0.3) == 0.3
    assert len({one.objective.strength for one in choice.tried}) == 4  # the average has none
    assert choice.objective.cap == 0.3
    fixed = search(rows, goal, 0.1, math.inf, "mean", 1.0, 20, None, 0, budget, fairly=True)
    assert [one.objective for one in fixed.tried] == [goal]


def test_a_table_that_chooses_keeps_the_cap_of_its_settings(table):
    """Of three clients nobody gets more than 0.4, whether ρ is chosen, goes by losses, or is given by an option."""
    place = Path("capped.toml")
    data = f'[data]\nfile = "{table[1]}"\nclient = "site"\ntarget = "y"\n'
    place.write_text(data + '[objective]\nkind = "ChiSquare"\ncap = 0.4\n')
    quick = ("--splits", "0", "--no-coalition", "--no-report", "--quiet", "--fresh")
    for k, more in enumerate(
        (
            ["--choose", "--budget", "60"],
            ["--no-choose"],
            ["--objective", "chi2", "--strength", "0.01"],
        )
    ):
        assert cli.run(["train", str(place), *more, *quick, "--out", f"capped-{k}"]) == 0
        objective = tomllib.loads(Path(f"capped-{k}/config.toml").read_text())["objective"]
        assert objective["cap"] == 0.4
        assert (objective["rho"] == 0.01) == (k == 2)
        assert largest(f"capped-{k}") <= 0.4 + 1e-9
    assert (
        cli.run(
            ["path", str(place), "--points", "3", "--no-report", "--quiet", "--out", "capped-path"]
        )
        == 0
    )
    assert largest("capped-path") <= 0.4 + 1e-9


def largest(folder):
    """The largest weight of a client in any model of a run."""
    rows = csv.DictReader(Path(folder, "clients.csv").read_text().splitlines())
    return max(float(row["weight"]) for row in rows if row["weight"])
