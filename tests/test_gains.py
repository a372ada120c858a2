"""`joining`: scikit-learn for models alone, naive loops for intervals, data with known answers."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.data.silos import fold_numbers
from scaffpd.study.choosing import FOLDS
from scaffpd.study.gains import MODELS, Joining
from scaffpd.study.joining import RIDGES
from scaffpd.training.metrics import (
    HeldOutMoments,
    RelativeGain,
    SplitTables,
    every,
    worst_fifth,
)

linear_model = pytest.importorskip("sklearn.linear_model")


def made(rng, clients=6, rows=40, held=200, d=5, apart=0.0, noise=1.0, labels=False):
    """Clients whose true models are `apart` from a common one."""
    common = rng.normal(size=d)
    train = []
    test = []
    for _ in range(clients):
        w = common + apart * rng.normal(size=d)
        X = rng.normal(size=(rows + held, d))
        z = X @ w + noise * rng.normal(size=len(X))
        y = (z > 0).astype(int) if labels else z
        train.append((X[:rows], y[:rows]))
        test.append((X[rows:], y[rows:]))
    return train, test


@cache
def alike():
    """Few rows of the same truth."""
    return sp.joining(
        *made(np.random.default_rng(1), rows=12), sp.Linear("squared", 1e-2, True), sp.CVaR(0.4)
    )


@cache
def strangers():
    """Many rows of truths that have nothing in common."""
    data = made(np.random.default_rng(2), rows=150, apart=3.0)
    return sp.joining(*data, sp.Linear("squared", 1e-2, True), sp.ChiSquare(0.1))


def test_joining_is_recommended_where_all_have_few_rows_of_the_same_truth():
    found = alike()
    assert found.models == MODELS
    assert found.recommendation in ("average", "fair", "personal")
    assert found.gain("average").pays == found.gain("personal").pays == "yes"
    assert found.losers("average") == 0
    assert "lower than alone (95 % interval" in found.sentence
    assert "of 6 clients clearly gain, none clearly loses." in found.sentence


def test_staying_alone_is_recommended_among_strangers():
    found = strangers()
    assert found.recommendation == "alone"
    assert found.gain("average").pays == "no"
    assert found.losers("average") == 6
    assert found.sentence.startswith(("Stay alone", "Joining brings no clear gain"))
    assert (
        found.gain("personal").value > -0.05 > found.gain("average").value
    )  # a model of one's own is nearly alone


def test_a_difference_within_noise_is_called_no_difference():
    """Many rows of the same truth: whoever joins has what it has alone."""
    data = made(np.random.default_rng(3), clients=3, rows=3000, held=100)
    found = sp.joining(*data, sp.Linear("squared", 1e-4, True), sp.ChiSquare(10.0), strength=3000.0)
    assert found.recommendation == "alone"
    assert "no different from alone" in found.sentence
    assert {gain.pays for gain in found.gains("personal")} == {"within noise"}


def naive_folds(X, y, fit, seed, client, loss):
    """The chosen κ by a loop over κ and folds, with the largest within one standard error."""
    fold = fold_numbers(f"client-{client}", y, FOLDS, seed)
    tried = []
    for kappa in RIDGES:
        rows = [
            loss(fit(X[fold != k], y[fold != k], kappa), X[fold == k], y[fold == k])
            for k in range(FOLDS)
        ]
        tried.append(np.concatenate(rows))
    best = min(tried, key=np.mean)
    near = [np.mean(t - best) <= np.std(t - best, ddof=1) / math.sqrt(len(y)) for t in tried]
    return max(kappa for kappa, ok in zip(RIDGES, near, strict=True) if ok)


def test_alone_is_scikit_learns_ridge_with_its_own_regulariser():
    train, test = made(np.random.default_rng(4), clients=3, rows=25, apart=1.0)
    found = sp.joining(
        train, test, sp.Linear("squared", 1e-2), sp.ChiSquare(0.1), seed=7, strength=10.0
    )

    def fit(X, y, kappa):  # Σ (⟨a, u⟩ − y)² + (κ/2)‖u‖²
        return linear_model.Ridge(alpha=kappa / 2, fit_intercept=False).fit(X, y)

    def loss(ridge, X, y):
        return (ridge.predict(X) - y) ** 2

    for i, ((X, y), (A, b)) in enumerate(zip(train, test, strict=True)):
        kappa = naive_folds(X, y, fit, 7, i, loss)
        assert found.ridges[i] == kappa
        error = loss(fit(X, y, kappa), A, b).mean()
        assert found.loss[1, i] == pytest.approx(error, rel=1e-9)
        assert found.score[1, i] == pytest.approx(math.sqrt(error), rel=1e-9)
        assert found.loss[0, i] == pytest.approx(((b - y.mean()) ** 2).mean())


def test_alone_is_scikit_learns_logistic_regression():
    train, test = made(np.random.default_rng(5), clients=3, rows=40, apart=1.0, labels=True)
    found = sp.joining(train, test, sp.Linear("logistic", 1e-2), sp.ChiSquare(0.1), strength=10.0)

    def fit(X, y, kappa):
        return linear_model.LogisticRegression(C=1 / kappa, fit_intercept=False, tol=1e-10).fit(
            X, y
        )

    def loss(model, X, y):
        return -np.log(model.predict_proba(X)[np.arange(len(y)), y])

    for i, ((X, y), (A, b)) in enumerate(zip(train, test, strict=True)):
        kappa = naive_folds(X, y, fit, 0, i, loss)
        assert found.ridges[i] == kappa
        assert found.loss[1, i] == pytest.approx(loss(fit(X, y, kappa), A, b).mean(), rel=1e-5)
        assert found.score[1, i] == pytest.approx(fit(X, y, kappa).score(A, b), abs=1e-12)
        share = (y.sum() + 0.5) / (len(y) + 1)
        assert found.loss[0, i] == pytest.approx(
            -np.where(b == 1, np.log(share), np.log(1 - share)).mean()
        )


def test_shared_and_personal_models_are_those_of_train():
    train, test = made(np.random.default_rng(6), clients=4, rows=30, apart=0.5)
    model = sp.Linear("squared", 1e-2, True)
    goal = sp.ChiSquare(0.1)
    found = sp.joining(train, test, model, goal, strength=20.0, tol=1e-8)
    for row, objective, wanted in (
        (2, sp.Average(), model),
        (3, goal, model),
        (4, goal, sp.Personal(model, 20.0)),
    ):
        cohort = sp.Cohort(train, wanted, test=test)
        result = sp.train(sp.fair(objective), cohort, tol=1e-8, progress=False)
        own = [result.x] * 4 if result.personal is None else result.personal
        errors = [
            ((A @ u[:-1] + u[-1] - b) ** 2).mean() for u, (A, b) in zip(own, test, strict=True)
        ]
        np.testing.assert_allclose(found.loss[row], errors, rtol=1e-4)


def test_intervals_of_rows_are_paired_t_intervals():
    rng = np.random.default_rng(0)
    rows = [rng.gamma(2.0, size=(3, n)) for n in (9, 20, 33)]
    evidence = HeldOutMoments.of(rows)
    for i, own in enumerate(rows):
        found = evidence.difference(0, 2, lambda _, i=i: np.eye(3)[i])
        low, high = stats.ttest_rel(own[0], own[2]).confidence_interval(0.95)
        assert found.ends == pytest.approx(((own[0] - own[2]).mean(), low, high))
        ratio = own[2].mean() / own[0].mean()  # and of the ratio, by its linearisation
        reach = stats.ttest_rel(ratio * own[0], own[2]).confidence_interval(0.95).high
        reach /= own[0].mean()
        assert RelativeGain.of(found) == pytest.approx(
            (1 - ratio, 1 - ratio * math.exp(reach / ratio), 1 - ratio + reach)
        )
    total = evidence.difference(0, 1, every)
    d = [own[0] - own[1] for own in rows]
    error = math.sqrt(sum(x.var(ddof=1) / len(x) for x in d)) / 3
    assert total.mean == pytest.approx(np.mean([x.mean() for x in d]))
    assert total.base == pytest.approx(np.mean([own[0].mean() for own in rows]))
    assert 1.9 * error < total.half < 2.3 * error


def test_the_worst_served_are_named_by_rows_that_do_not_judge_them():
    rng = np.random.default_rng(7)
    rows = [rng.gamma(2.0, size=(2, n)) for n in (9, 20, 33, 14, 8, 10, 12)]
    evidence = HeldOutMoments.of(rows)
    for k in (0, 1):
        level = 0.0
        for h in (0, 1):
            named = sorted(range(7), key=lambda i: -rows[i][k, 1 - h :: 2].mean())[:2]
            level += sum(rows[i][k, h::2].sum() / rows[i].shape[1] for i in named) / 2
        assert evidence.level(k, worst_fifth) == pytest.approx(level)
        assert evidence.level(k, every) == pytest.approx(np.mean([own[k].mean() for own in rows]))


def test_intervals_of_rows_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        rows = [np.stack([2 + rng.normal(size=n), 1 + rng.normal(size=n)]) for n in (12, 30)]
        found = HeldOutMoments.of(rows).difference(0, 1, every)
        assert found.base == pytest.approx(np.mean([r[0].mean() for r in rows]))
        hits += abs(found.mean - 1) <= found.half
    assert 0.92 <= hits / 400 <= 0.98


def test_blocks_of_rows_that_resemble_each_other_widen_the_interval():
    slow = np.repeat(np.random.default_rng(1).normal(size=(2, 40)), 7, axis=1) + np.array(
        [[2.0], [1.9]]
    )
    plain, blocked = (HeldOutMoments.of([slow], block).difference(0, 1, every) for block in (1, 7))
    assert plain.mean == pytest.approx(blocked.mean)
    assert blocked.half / plain.half == pytest.approx(math.sqrt(7), rel=0.1)


def test_too_few_rows_are_within_noise():
    alone = RelativeGain.of(HeldOutMoments.of([np.array([[2.0], [1.0]])]).difference(0, 1, every))
    assert alone.pays == "within noise"
    assert alone.value == 0.5
    assert alone.range == "too few rows for an interval"


def test_intervals_of_splits_are_corrected_t_intervals():
    rng = np.random.default_rng(2)
    splits = [HeldOutMoments.of(list(rng.gamma(3.0, size=(6, 2, 8)))) for _ in range(5)]
    found = SplitTables(splits, 0.25).difference(0, 1, worst_fifth)
    worst = np.array([[one.level(k, worst_fifth) for k in (0, 1)] for one in splits])
    d = worst[:, 0] - worst[:, 1]
    reach = stats.t.ppf(0.975, 4) * d.std(ddof=1) * math.sqrt(1 / 5 + 0.25)
    assert found.ends == pytest.approx((d.mean(), d.mean() - reach, d.mean() + reach))
    assert found.base == pytest.approx(worst[:, 0].mean())


def test_a_mean_over_splits_has_intervals_over_splits():
    model = sp.Linear("squared", 1e-2, True)
    data = [made(np.random.default_rng(8 + k), clients=3, rows=30, held=10) for k in range(3)]
    several = [sp.joining(train, test, model, strength=100.0) for train, test in data]
    found = Joining.mean(several)
    assert found.splits == 3
    assert found.rows == ((30, 10),) * 3
    assert found.evidence.splits[0] is several[0].evidence
    np.testing.assert_allclose(found.loss, np.mean([one.loss for one in several], 0))
    gains = [one.loss[1].mean() - one.loss[2].mean() for one in several]
    reach = stats.t.ppf(0.975, 2) * np.std(gains, ddof=1) * math.sqrt(1 / 3 + 1 / 3)
    difference = found.evidence.difference(1, 2, every)
    assert difference.ends[2] == pytest.approx(np.mean(gains) + reach)
    assert found.gain("average").value == pytest.approx(np.mean(gains) / found.loss[1].mean())
    with refuses("one-split"):
        Joining.mean(several[:1])


@pytest.mark.parametrize("labels", [False, True])
def test_accuracy_and_error_have_paired_intervals_too(labels):
    """Accuracies against scipy's paired t-test; errors against resampled rows."""
    train, test = made(np.random.default_rng(11), clients=2, rows=30, held=300, labels=labels)
    model = sp.Linear("logistic" if labels else "squared", 1e-2, True)
    found = sp.joining(train, test, model, sp.Average(), strength=10.0)
    result = sp.train(sp.fair(sp.Average()), sp.Cohort(train, model), tol=1e-6, progress=False)
    X, y = test[0]
    z = model.outputs(result.x, X)[:, 0]
    own = found.errors.means[:, 0]
    first = found.change("average", "constant", lambda _: np.array([1.0, 0.0]))
    assert first.mean == pytest.approx(own[0] - own[2])
    if labels:
        wrong = (z > 0) != y
        constant = (train[0][1].mean() > 0.5) != y
        low, high = stats.ttest_rel(
            constant.astype(float), wrong.astype(float)
        ).confidence_interval(0.95)
        assert (first.mean - first.half, first.mean + first.half) == pytest.approx(
            (low, high), abs=1e-9
        )
        assert found.score[2, 0] == pytest.approx(1 - wrong.mean())
    else:
        random = np.random.default_rng(0)
        draws = []
        for _ in range(2000):
            rows = random.integers(len(y), size=len(y))
            roots = [
                np.sqrt(np.mean((a[rows] - y[rows]) ** 2))
                for a in (np.full_like(y, train[0][1].mean()), z)
            ]
            draws.append(roots[0] - roots[1])
        assert first.half == pytest.approx(1.97 * np.std(draws), rel=0.08)


def test_several_labels_names_and_the_average_alone():
    rng = np.random.default_rng(9)
    X = rng.normal(size=(4, 60, 3))
    centre = 2 * rng.normal(size=(3, 3))
    train = {}
    test = {}
    for k in range(4):
        y = (X[k] @ centre.T + rng.gumbel(size=(60, 3))).argmax(1)
        train[f"site {k}"], test[f"site {k}"] = (X[k][:40], y[:40]), (X[k][40:], y[40:])
    found = sp.joining(
        train,
        dict(reversed(test.items())),
        sp.Linear("softmax", 1e-2, True),
        sp.Average(),
        strength=9,
    )
    assert found.models == ("constant", "alone", "average", "personal")
    assert found.names == ("site 0", "site 1", "site 2", "site 3")
    y = test["site 1"][1]
    shares = np.bincount(train["site 1"][1], minlength=3) + 0.5
    assert found.score[0, 1] == (y == shares.argmax()).mean()
    assert found.loss[0, 1] == pytest.approx(-np.log(shares / shares.sum())[y].mean())


def test_the_table_says_what_the_object_says():
    found = alike()
    rows = found.table()
    assert len(rows) == 6 * 5
    one = next(row for row in rows if row["client"] == "client-2" and row["model"] == "personal")
    gain = found.gains("personal")[2]
    assert (one["gain_over_alone"], one["gain_over_alone_low"], one["pays"]) == (
        gain.value,
        gain.low,
        gain.pays,
    )
    assert one["test_loss"] == found.loss[4, 2]
    assert next(row for row in rows if row["model"] == "alone")["gain_over_alone"] == ""
    assert str(found) == f"{found.sentence} {found.details}"


def test_gains_are_written_as_one_says_them():
    assert RelativeGain(0.123, 0.05, 0.2).than("alone") == "12 % lower than alone"
    assert RelativeGain(0.123, 0.05, 0.2).range == "95 % interval 5.0 to 20 %"
    assert RelativeGain(-0.02, -0.03, -0.01).words == "2.0 % higher"
    assert RelativeGain(-0.02, -0.03, -0.01).range == "95 % interval 1.0 to 3.0 %"
    assert RelativeGain(0.02, -0.01, 0.05).than("alone") == "no different from alone"
    assert RelativeGain(0.02, -0.01, 0.05).range == "95 % interval 1.0 % higher to 5.0 % lower"


PAIR = (np.ones((4, 2)), np.arange(4.0))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("joining-without-test-rows", {"test": []}),
        ("joining-not-linear", {"model": sp.Module(torch.nn.Linear(2, 1))}),
        ("not-an-objective", {"objective": "fair"}),
        ("too-few-rows-for-folds", {"train": [(np.ones((1, 2)), np.ones(1))] * 2}),
        ("test-data-unusable", {"test": [PAIR]}),
    ],
)
def test_refusals(code, change):
    given = {"train": [PAIR, PAIR], "test": [PAIR, PAIR], "model": sp.Linear("squared", 0.1)}
    with refuses(code):
        sp.joining(**given | change)


def test_a_client_with_too_few_rows_for_folds_takes_nothing_from_the_others():
    """It trains with the others and is not compared; the others hear what they would have heard."""
    train, test = made(np.random.default_rng(4), clients=4, rows=20)
    train[1] = tuple(part[:2] for part in train[1])
    model = sp.Linear("squared", 1e-2, True)
    names = ["a", "few", "b", "c"]
    goal = sp.CVaR(0.5, prior=[1, 2, 3, 4])
    found = sp.joining(train, test, model, goal, names=names, word="site")
    assert (found.names, found.without, found.rows) == (("a", "b", "c"), ("few",), ((20, 200),) * 3)
    assert found.own.shape == (5, 6)  # the shared model, and a personal one for each of the four
    kept = [0, 2, 3]
    rest = [[part[i] for i in kept] for part in (train, test)]
    others = sp.joining(*rest, model, sp.CVaR(0.5), names=found.names, strength=found.strength)
    k = found.models.index("alone")
    np.testing.assert_array_equal(found.loss[k], others.loss[k])
    for name, objective in (
        ("average", sp.Average(prior=goal.prior)),
        ("fair", goal),
    ):  # of all four
        cohort = sp.Cohort(train, model, names, test=test)
        x = sp.train(sp.fair(objective), cohort, tol=1e-9).x
        mine = [np.mean((test[i][0] @ x[:-1] + x[-1] - test[i][1]) ** 2) for i in kept]
        np.testing.assert_allclose(found.loss[found.models.index(name)], mine, rtol=1e-3)
    assert "not known at few" in found.caution
    assert others.caution == ""
    with refuses("splits-differ"):
        Joining.mean([found, others, sp.joining([rest[0][0]], [rest[1][0]], model, strength=30.0)])
