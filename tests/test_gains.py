"""`joining`: numpy and scikit-learn for the models, naive loops for intervals, known answers."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import scaffpd as sp
from cases.refusals import refuses
from scaffpd import descent
from scaffpd.study import alone
from scaffpd.study.gains import Joining, pooling
from scaffpd.study.joining import constants
from scaffpd.study.verdict import MODELS, Gain
from scaffpd.tasks.regression import Regression
from scaffpd.training.metrics import (
    HeldOutMoments,
    RelativeGain,
    SplitTables,
    clearly,
    every,
    worst_fifth,
)

RIDGE = [1e-2] * 5 + [1e-6]


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


def test_shared_and_personal_models_are_those_of_train():
    train, test = made(np.random.default_rng(6), clients=4, rows=30, apart=0.5)
    model = sp.Linear("squared", RIDGE, True)
    goal = sp.ChiSquare(0.1)
    found = sp.joining(train, test, sp.Personal(model, 20.0), goal, tol=1e-9)
    for row, objective, wanted in (
        (2, sp.Average(), model),
        (3, goal, model),
        (4, sp.Average(prior=[30] * 4), sp.Personal(model, 20.0)),
    ):
        cohort = sp.Cohort(train, wanted, test=test)
        result = sp.train(sp.fair(objective), cohort, tol=1e-9)
        own = [result.x] * 4 if result.personal is None else result.personal
        errors = [
            ((A @ u[:-1] + u[-1] - b) ** 2).mean() for u, (A, b) in zip(own, test, strict=True)
        ]
        np.testing.assert_allclose(found.loss[row], errors, rtol=1e-4)
        name = found.models[row]
        assert found.results[name].certificate <= 1e-9
        np.testing.assert_allclose(found.parameters[name], [result.x, *own], atol=1e-4)


def alone_by_likelihood(A, y, unit):
    """A client's ridge regression whose ω and σ² have the highest marginal likelihood.

    y ~ N(0, σ²I + A Ω Aᵀ), by SciPy over two logarithms; the intercept is as good as free.
    """
    rows = np.column_stack([A, np.ones(len(A))])

    def prior(t):
        return np.append(np.full(A.shape[1], np.exp(t[0])), 1e6 * unit)

    def cost(t):
        return -stats.multivariate_normal.logpdf(
            y, cov=np.exp(t[1]) * np.eye(len(y)) + (rows * prior(t)) @ rows.T
        )

    t = optimize.minimize(cost, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-7}).x
    return np.linalg.solve(rows.T @ rows + np.diag(np.exp(t[1]) / prior(t)), rows.T @ y)


def test_a_client_alone_has_the_ridge_of_its_own_evidence(monkeypatch):
    monkeypatch.setattr(alone, "ROUGH", (1e-9, 0.0))
    rng = np.random.default_rng(4)
    train = made(rng, clients=3, rows=25, apart=1.0)[0] + made(rng, clients=2, rows=9, d=5)[0]
    unit = np.concatenate([y for _, y in train]).var()
    model = sp.Linear("squared", "auto", True, groups=("all",) * 5)
    found, gaps = alone.fit_alone(model, train)
    assert (gaps < 1e-12 * unit).all()
    for (A, y), u in zip(train, found, strict=True):
        np.testing.assert_allclose(u, alone_by_likelihood(A, y, unit), atol=2e-3)
    # whatever others there are beside it, as long as columns and targets are as large
    twice, _ = alone.fit_alone(model, train * 2)
    np.testing.assert_allclose(twice, np.tile(found, (2, 1)), atol=1e-4)


@pytest.mark.parametrize("loss", ["logistic", "softmax", "poisson"])
def test_alone_finds_the_mode_and_stays_moderate_where_all_labels_are_one(loss, monkeypatch):
    rng = np.random.default_rng(5)
    train = made(rng, clients=3, rows=30, labels=True)[0]
    train[1] = (train[1][0], np.ones(30, dtype=int))
    model = sp.Linear(loss, "auto", True, 2 if loss == "softmax" else None)
    found, gaps = alone.fit_alone(model, train)
    assert (gaps >= 0).all()
    assert (gaps < 1e-9).all()
    monkeypatch.setattr(descent, "STEPS", 2)  # stops sooner, which the gaps say
    assert alone.fit_alone(model, train)[1].max() > 10 * gaps.max()
    assert found.shape == (3, 12 if loss == "softmax" else 6)
    output = model.outputs(found[1], train[1][0])
    margin = output[:, -1] - (output[:, 0] if loss == "softmax" else 0)
    if loss == "poisson":
        np.testing.assert_allclose(np.exp(margin), 1.0, atol=0.1)
    else:  # ones + 1 to none + 1, by Laplace's rule
        assert 0.7 * np.log(31) < margin.min() < margin.max() < 1.3 * np.log(31)


def test_a_column_that_hardly_varies_at_a_client_gets_no_large_variance_there():
    rng = np.random.default_rng(6)
    train = made(rng, clients=4, rows=200, noise=0.5)[0]
    A = rng.normal(size=(20, 5))
    A[:, 0] *= 0.01
    train.append((A, A[:, 1] + rng.normal(size=20)))
    found, _ = alone.fit_alone(sp.Linear("squared", "auto", True), train)
    assert abs(found[-1][0]) < 0.05


# --- a constant answer


def test_constants_lie_between_the_clients_and_the_mean_of_all():
    """The estimate of a random intercept by moments (one-way analysis of variance), by a loop."""
    random = np.random.default_rng(0)
    parts = [random.normal(m, 1.0, n) for m, n in ((0.0, 4), (1.0, 9), (3.0, 30), (0.5, 2))]
    found = constants(sp.Linear("squared", 0.1, True), parts)[:, 0]
    n = np.array([len(part) for part in parts])
    everything = np.concatenate(parts)
    within = sum(((part - part.mean()) ** 2).sum() for part in parts) / (n.sum() - 4)
    between = sum(len(part) * (part.mean() - everything.mean()) ** 2 for part in parts)
    tau = (between - 3 * within) / (n.sum() - (n**2).sum() / n.sum())
    assert found[0] == pytest.approx(everything.mean())
    for part, value in zip(parts, found[1:], strict=True):
        w = tau / (tau + within / len(part))
        assert value == pytest.approx(w * part.mean() + (1 - w) * everything.mean())


@pytest.mark.parametrize("loss", ["logistic", "softmax", "squared", "poisson"])
def test_constants_of_clients_that_are_alike_or_strangers(loss):
    model = sp.Linear(loss, 0.1, True, 3 if loss == "softmax" else None)
    same = [np.tile([0, 1, 1, 0], 3)] * 3
    apart = [np.repeat([0, 1], pair) for pair in ((900, 100), (100, 900))]
    if loss == "softmax":
        apart = [np.append(y, [2] * 5) for y in apart]
    alike = constants(model, same)
    np.testing.assert_allclose(alike, np.tile(alike[0], (4, 1)), atol=1e-12)
    own = constants(model, apart)[1:]
    share = 0.1 if loss != "softmax" else 100 / 1005
    mean = {
        "logistic": lambda z: 1 / (1 + np.exp(-z[:, 0])),
        "softmax": lambda z: (np.exp(z) / np.exp(z).sum(1, keepdims=True))[:, 1],
        "squared": lambda z: z[:, 0],
        "poisson": lambda z: np.exp(z[:, 0]),
    }[loss](own)
    assert mean == pytest.approx([share, 1 - share - (5 / 1005) * (loss == "softmax")], abs=2e-3)


# --- what is recommended


def told(noise=0.05, splits=10, **gains):
    """Ten clients' losses, 1 with a constant; `gains` by model, of all or of (the worst two, the
    others); rows vary, and so do splits.
    """
    random = np.random.default_rng(0)
    level = np.array([1.5, 1.4, *[1.0] * 8])
    several = []
    for _ in range(splits):
        rows = []
        for i in range(10):
            own = noise * random.normal(size=(5, 60))
            for k, model in enumerate(MODELS):
                gain = gains.get(model, 0.0)
                own[k] += level[i] - (gain if isinstance(gain, float) else gain[i >= 2])
            rows.append(own)
        evidence = HeldOutMoments.of(rows)
        names = tuple(f"c{i}" for i in range(10))
        sizes = ((240, 60),) * 10
        means = evidence.means
        several.append(Joining(names, MODELS, means, means, Regression(), sizes, evidence))
    return Joining.mean(several) if splits > 1 else several[0]


@pytest.mark.parametrize(
    ("gains", "best", "outcome"),
    [
        ({}, "constant", "as good"),
        ({"alone": -0.3, "fair": -0.1}, "constant", "as good"),
        ({"alone": 0.4, "personal": 0.4, "average": 0.1}, "alone", "as good"),
        ({"alone": 0.5, "personal": 0.4, "average": 0.1}, "alone", "as good"),
        ({"alone": 0.1, "average": 0.4, "fair": 0.4, "personal": 0.4}, "average", "joining pays"),
        ({"alone": 0.1, "average": 0.2, "fair": 0.2, "personal": 0.5}, "personal", "joining pays"),
        (
            {"alone": 0.1, "average": 0.3, "fair": (0.5, 0.3), "personal": 0.3},
            "fair",
            "joining pays",
        ),
        # what helps the worst-served and costs the others more
        (
            {"alone": 0.1, "average": 0.4, "fair": (0.6, 0.3), "personal": 0.4},
            "average",
            "joining pays",
        ),
        # 1 % of the loss is a margin, and the simpler model is expected to cost less than .5 %
        ({"alone": 0.5, "average": 0.502, "fair": 0.502, "personal": 0.502}, "alone", "as good"),
        (
            {"alone": 0.5, "average": 0.51, "fair": 0.51, "personal": 0.51},
            "average",
            "joining pays",
        ),
    ],
)
@pytest.mark.parametrize("splits", [1, 10])
def test_the_least_expected_loss_is_recommended_or_what_is_simpler(gains, best, outcome, splits):
    found = told(0.02, splits, **gains)
    assert found.recommendation == best
    assert found.verdict.outcome == outcome
    assert found.verdict.shown == (
        best if best in ("average", "fair", "personal") else found.verdict.shown
    )


def test_few_rows_have_a_best_guess_and_show_nothing():
    """A null hypothesis is nobody's default: the least mean is recommended, and not sure."""
    found = told(8.0, average=0.1)
    losses = dict(zip(MODELS, found.loss.mean(1), strict=True))
    assert found.recommendation == min(losses, key=losses.get)
    assert found.verdict.outcome == "too few rows"
    assert "best guess" in str(found)


def test_what_is_shown_is_a_corrected_one_sided_test():
    """Nadeau and Bengio's t by SciPy, of both pairs, times three joint models to choose from."""
    found = told(0.5, average=0.1, fair=0.05, personal=0.08)
    assert found.recommendation == "average"
    means = np.array([one.means.mean(1) for one in found.evidence.splits])
    chances = []
    for base in (0, 1):
        d = means[:, base] - means[:, 2]
        t = d.mean() / (d.std(ddof=1) * math.sqrt(1 / 10 + 60 / 240))
        chances.append(stats.t.sf(t, 9))
    assert found.chance == pytest.approx(min(3 * max(chances), 1.0), rel=1e-6)
    same = told(0.5, alone=0.5, average=0.5, fair=0.4, personal=0.45)
    assert same.recommendation in ("alone", "average")
    one = told(0.02, alone=0.5, average=0.505, fair=0.4, personal=0.45)
    means = np.array([own.means.mean(1) for own in one.evidence.splits])
    d = means[:, 1] - means[:, 2]
    t = (0.02 * means[:, 1].mean() - d.mean()) / (d.std(ddof=1) * math.sqrt(0.35))
    assert one.recommendation == "alone" or one.recommendation == "average"
    if one.recommendation == "alone":
        assert one.chance == pytest.approx(stats.t.sf(t, 9), rel=1e-6)


def test_clients_of_few_rows_count_less_where_clients_are_alike():
    """Weights of random effects by a naive loop, after DerSimonian and Laird."""
    rng = np.random.default_rng(1)
    for apart in (0.0, 2.0):
        gains = 0.3 + apart * rng.normal(size=7)
        noise = 0.2 / np.array([2, 3, 40, 50, 60, 80, 100.0])
        w = 1 / noise
        mean = sum(w * gains) / sum(w)
        q = sum(w * (gains - mean) ** 2)
        tau = max(0.0, (q - 6) / (sum(w) - sum(w**2) / sum(w)))
        wanted = 1 / (noise + tau)
        found = pooling(gains, noise)
        np.testing.assert_allclose(found, wanted / wanted.sum())
        assert (found.max() < 1.2 * found.min()) == (apart > 0)
    assert pooling(gains, np.full(7, math.nan)) == pytest.approx(np.full(7, 1 / 7))
    assert pooling(gains[:1], noise[:1]) == [1.0]


# --- intervals


def test_intervals_of_rows_are_paired_t_intervals():
    rng = np.random.default_rng(0)
    rows = [rng.gamma(2.0, size=(3, n)) for n in (9, 20, 33)]
    evidence = HeldOutMoments.of(rows)
    for i, own in enumerate(rows):
        found = evidence.difference(0, 2, lambda _, i=i: np.eye(3)[i])
        low, high = stats.ttest_rel(own[0], own[2]).confidence_interval(0.95)
        ends = (found.mean, found.mean - found.half, found.mean + found.half)
        assert ends == pytest.approx(((own[0] - own[2]).mean(), low, high))
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


def test_blocks_of_rows_that_resemble_each_other_widen_the_interval():
    slow = np.repeat(np.random.default_rng(1).normal(size=(2, 40)), 7, axis=1) + np.array(
        [[2.0], [1.9]]
    )
    plain, blocked = (HeldOutMoments.of([slow], block).difference(0, 1, every) for block in (1, 7))
    assert plain.mean == pytest.approx(blocked.mean)
    assert blocked.half / plain.half == pytest.approx(math.sqrt(7), rel=0.1)


def test_marks_are_those_of_benjamini_and_hochberg():
    """Against SciPy's adjusted p-values; of equal models nobody is named in 95 % of cases."""
    random = np.random.default_rng(0)
    for effect in (0.0, 0.3, 1.0):
        shift = effect * (np.arange(8) < 4)
        losses = [1 + random.normal(size=(2, 30)) * 0.5 - [[0], [s]] for s in shift]
        found = HeldOutMoments.of(losses)
        ones = [found.difference(0, 1, lambda _, i=i: np.eye(8)[i]) for i in range(8)]
        adjusted = stats.false_discovery_control([one.chance for one in ones])
        pays = [RelativeGain.of(one).pays for one in ones]
        assert clearly(ones) == np.where(adjusted <= 0.05, pays, "within noise").tolist()


def test_too_few_rows_are_within_noise():
    alone = RelativeGain.of(HeldOutMoments.of([np.array([[2.0], [1.0]])]).difference(0, 1, every))
    assert alone.pays == "within noise"
    assert alone.value == 0.5
    assert Gain(alone.value).range == "too few rows for an interval"


def test_intervals_of_splits_are_corrected_t_intervals():
    rng = np.random.default_rng(2)
    splits = [HeldOutMoments.of(list(rng.gamma(3.0, size=(6, 2, 8)))) for _ in range(5)]
    found = SplitTables(splits, 0.25).difference(0, 1, worst_fifth)
    worst = np.array([[one.level(k, worst_fifth) for k in (0, 1)] for one in splits])
    d = worst[:, 0] - worst[:, 1]
    reach = stats.t.ppf(0.975, 4) * d.std(ddof=1) * math.sqrt(1 / 5 + 0.25)
    assert (found.mean, found.half) == pytest.approx((d.mean(), reach))
    assert found.base == pytest.approx(worst[:, 0].mean())


def test_a_mean_over_splits_has_intervals_over_splits():
    model = sp.Linear("squared", RIDGE, True)
    data = [made(np.random.default_rng(8 + k), clients=3, rows=30, held=10) for k in range(3)]
    several = [sp.joining(train, test, sp.Personal(model, 100.0)) for train, test in data]
    found = Joining.mean(several)
    assert found.splits == 3
    assert found.rows == ((30, 10),) * 3
    assert found.evidence.splits[0] is several[0].evidence
    np.testing.assert_allclose(found.loss, np.mean([one.loss for one in several], 0))
    gains = [one.loss[1].mean() - one.loss[2].mean() for one in several]
    reach = stats.t.ppf(0.975, 2) * np.std(gains, ddof=1) * math.sqrt(1 / 3 + 1 / 3)
    difference = found.evidence.difference(1, 2, every)
    assert (difference.mean, difference.half) == pytest.approx((np.mean(gains), reach))
    assert found.gain("average").value == pytest.approx(np.mean(gains) / found.loss[1].mean())
    with refuses("too-few-splits"):
        Joining.mean(several[:1])
    for one in (found, several[0]):
        each = one.evidence.each(1, 2)
        for k, wanted in enumerate(np.eye(len(one.names))):
            alone = one.evidence.difference(1, 2, lambda _, only=wanted: only)
            assert each[k] == pytest.approx(alone)


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
        sp.Personal(sp.Linear("softmax", 1e-2, True), 9.0),
        sp.Average(),
    )
    assert found.models == ("constant", "alone", "average", "personal")
    assert found.names == ("site 0", "site 1", "site 2", "site 3")
    y = test["site 1"][1]
    z = constants(sp.Linear("softmax", 1e-2, True, 3), [own for _, own in train.values()])[2]
    assert found.score[0, 1] == pytest.approx((y == z.argmax()).mean())
    assert found.loss[0, 1] == pytest.approx(np.log(np.exp(z).sum()) - z[y].mean())


PAIR = (np.ones((4, 2)), np.arange(4.0))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("joining-without-test-rows", {"test": []}),
        ("joining-not-linear", {"model": sp.Module(torch.nn.Linear(2, 1))}),
        ("not-an-objective", {"objective": "fair"}),
        ("test-data-unusable", {"test": [PAIR]}),
    ],
)
def test_refusals(code, change):
    given = {"train": [PAIR, PAIR], "test": [PAIR, PAIR], "model": sp.Linear("squared", 0.1)}
    with refuses(code):
        sp.joining(**given | change)


def test_clients_whose_losses_are_unknown_change_nothing():
    """Neither means nor intervals know of a client of NaN; of all splits neither."""
    random = np.random.default_rng(3)

    def drawn(more):
        splits = []
        for seed in range(3):
            own = np.random.default_rng(seed)
            rows = [own.gamma(3.0, size=(2, 8)) for _ in range(5)]
            splits.append(HeldOutMoments.of([*rows, *more]))
        return [splits[0], SplitTables(splits, 0.25)]

    weights = random.random(6)
    given = (
        every,
        worst_fifth,
        lambda L: weights[: len(L)] * ~np.isnan(L) / weights[:5].sum(),
    )
    for one, other in zip(drawn([]), drawn([np.full((2, 1), np.nan)]), strict=True):
        for of in given:
            assert one.level(0, of) == pytest.approx(other.level(0, of), rel=1e-12)
            pair = [parts.difference(0, 1, of) for parts in (one, other)]
            np.testing.assert_allclose(*pair, rtol=1e-10)
        *known, unknown = other.each(0, 1)
        assert known == one.each(0, 1)
        assert RelativeGain.of(unknown).pays == "within noise"
        assert clearly([*known, unknown])[:-1] == clearly(known)
