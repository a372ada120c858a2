"""Curves: thresholds from sums over clients, against exact counts and quantiles of all rows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from cases.refusals import refuses
from cases.tables import opened, text
from scaffpd.data.curves import MOST, Limits, counted, thresholds, with_steps
from scaffpd.data.tabular.agree import encoded_features, features
from scaffpd.data.tabular.schemas import checked_schema


def agreed(parts, **more):
    own = [[np.sort(np.asarray(part, dtype=float))] for part in parts]
    return thresholds(1, lambda edges: sum(counted(part, edges) for part in own), Limits(**more))[0]


def exact(values):
    """Quantiles of distinct values, each weighted by the root of its count."""
    distinct, counts = np.unique(values, return_counts=True)
    share = np.cumsum(np.sqrt(counts)) / np.sqrt(counts).sum()
    return distinct, share


def test_counts_are_those_of_a_loop():
    random = np.random.default_rng(0)
    columns = [np.sort(random.normal(size=40).round(1)), np.sort(random.integers(0, 4, 40) * 1.0)]
    edges = [np.array([-1.0, 0.0, 0.5]), np.array([0.0, 1.0, 2.0, 9.0])]
    rows, there = counted(columns, edges)
    naive = []
    for values, own in zip(columns, edges, strict=True):
        ends = [-np.inf, *own, np.inf]
        naive += [sum(a < v <= b for v in values) for a, b in pairwise(ends)]
    assert rows.tolist() == naive
    assert there.tolist() == [n > 0 for n in naive]


def test_few_values_are_told_apart_exactly():
    ages = np.repeat(np.arange(20, 40), 30)
    assert agreed([ages[::2], ages[1::2]]).tolist() == list(range(20, 39))
    hundredths = np.repeat([-0.25, 0.0, 0.03, 7.5], 40)
    assert agreed([hundredths, hundredths]).tolist() == [-0.25, 0.0, 0.03]
    assert agreed([np.repeat([0, 1], 50)] * 2).tolist() == [0]
    two = [(np.repeat([[0.0], [1.0]], 50, 0), None)] * 2
    assert sp.Curves().fit(two).names == ("x0",)  # a line says it all
    assert not len(agreed([np.full(50, 3.0)] * 2))


@pytest.mark.parametrize("offset", [0, 1900, -3])
def test_thresholds_are_near_exact_quantiles(offset):
    """Each ends within a cell's weight of the exact quantile of distinct values by √count."""
    random = np.random.default_rng(1)
    ages = np.clip(random.gamma(6, 7, 30_000).round() + 17, 17, 99) + offset
    found = agreed(np.array_split(random.permutation(ages), 5))
    distinct, share = exact(ages)
    assert len(found) == MOST
    at = share[np.searchsorted(distinct, found, side="right") - 1]
    assert np.abs(at - np.arange(1, MOST + 1) / (MOST + 1)).max() < 0.03


def test_a_column_that_is_mostly_zero_keeps_its_tail():
    random = np.random.default_rng(2)
    gains = np.where(random.random(20_000) < 0.9, 0, random.lognormal(8, 1, 20_000).round())
    found = agreed(np.array_split(gains, 4))
    assert found[0] == 0
    assert len(found) > 20
    assert np.quantile(gains[gains > 0], 0.95) < found[-1]  # those of rows end at 69 %


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.sampled_from(["normal", "gamma", "whole"]))
@settings(max_examples=30, deadline=None)
def test_every_cell_has_ten_rows_of_two_clients_and_short_edges(seed, clients, kind):
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-4, 7)
    parts = []
    for _ in range(clients):
        n = random.integers(5, 200)
        draw = {
            "normal": random.normal(3, 1, n) * scale,
            "gamma": random.gamma(0.5, scale, n),
            "whole": random.poisson(3, n) * 1.0,
        }
        parts.append(draw[kind])
    found = agreed(parts)
    assert len(found) <= MOST
    assert np.all(np.diff(found) > 0)
    assert [float(f"{t:.5g}") for t in found] == found.tolist()
    if len(found):
        for low, high in pairwise([-np.inf, *found, np.inf]):
            inside = [((part > low) & (part <= high)).sum() for part in parts]
            assert sum(inside) >= 10
            assert np.count_nonzero(inside) >= 2


def test_one_client_s_values_are_no_thresholds():
    """Where no cell has rows of both, nobody hears where the rows of either lie."""
    random = np.random.default_rng(3)
    assert not len(agreed([random.normal(10, 1, 400), random.normal(1000, 1, 400)]))


def test_noise_that_cells_must_exceed_does_not_make_thresholds():
    random = np.random.default_rng(4)
    own = [np.sort(random.normal(50, 10, 5000).round())]

    def noisy(edges):
        rows, _ = counted(own, edges)
        rows = rows + random.normal(0, 4, len(rows))
        return np.array([np.where(rows > 20, rows, 0.0)] * 2)

    found = thresholds(1, noisy, Limits(rows=20, clients=0))[0]
    assert len(found) > 20
    assert 20 < found[0] < found[-1] < 80
    cells = np.histogram(own[0], [-np.inf, *found, np.inf])[0]
    assert cells.min() > 5


def test_steps_are_those_of_a_loop_and_gaps_stay():
    lines = np.array([[1.0, 5.0], [2.0, np.nan], [3.0, 6.0]])
    made = with_steps(lines, [[1.0, 2.0], []])
    nan = np.nan
    naive = [[1, 0, 0, 5], [2, 1, 0, nan], [3, 1, 1, 6]]
    np.testing.assert_array_equal(made, naive)
    gap = with_steps(lines[:, 1:], [[5.0]])
    np.testing.assert_array_equal(gap, [[5, 0], [nan, nan], [6, 1]])


def bent(n, seed=0, clients=3):
    """Clients whose target bends: |x₀|, plus a line in x₁."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(clients):
        X = random.normal(size=(n, 2)).round(2)
        made.append((X, np.abs(X[:, 0]) + 0.3 * X[:, 1] + 0.05 * random.normal(size=n)))
    return made


def test_curves_fit_what_lines_cannot():
    train, test = bent(400), bent(200, seed=1)
    curves = sp.Curves().fit(train)
    assert curves.names[0] == "x0"
    assert curves.names[1].startswith("x0 > -")
    assert set(curves.groups) == {"x0", "x0 steps", "x1", "x1 steps"}
    made = curves.transform(train)
    pooled = np.concatenate([X for X, _ in made])
    assert pooled.mean(0) == pytest.approx(np.zeros(len(curves.names)), abs=1e-12)
    steps = ["steps" in group for group in curves.groups]
    assert np.ptp(pooled[:, steps], axis=0) == pytest.approx(np.ones(sum(steps)))
    errors = {}
    for name, encode in (("lines", lambda pairs: pairs), ("curves", curves.transform)):
        model = sp.Linear("squared", 1e-4, intercept=True)
        cohort = sp.Cohort(encode(train), model, test=encode(test))
        result = sp.train(sp.fair(sp.Average()), cohort, 200, 1e-6)
        errors[name] = cohort.evaluate(result.x, "test").loss.mean()
    assert errors["curves"] < 0.1 * errors["lines"]


def test_curves_know_the_names_of_frames_and_keep_mappings():
    pandas = pytest.importorskip("pandas")
    train = {
        name: (pandas.DataFrame(X, columns=["age", "dose"]), y)
        for name, (X, y) in zip("abc", bent(100), strict=True)
    }
    curves = sp.Curves().fit(train)
    assert {"age", "dose", "dose steps"} <= set(curves.groups)
    made = curves.transform(train)
    assert list(made) == ["a", "b", "c"]
    assert made["b"][1] is train["b"][1]
    with refuses("features-differ"):
        curves.encode(np.ones((3, 5)))
    with refuses("features-differ"):
        sp.Curves().fit([(np.ones((3, 2)), None), (np.ones((3, 3)), None)])


def test_a_table_s_curves_are_agreed_scaled_and_encoded(tmp_path):
    random = np.random.default_rng(5)
    rows = [
        (
            "abc"[k % 3],
            "" if k % 11 == 0 else round(random.normal(50, 12)),
            "xy"[k % 2],
            int(random.random() < 0.5),
        )
        for k in range(600)
    ]
    content = text(rows, ("site", "age", "smoker", "ill"))
    found = opened(tmp_path, content, curves="on")
    age = found.schema["columns"][0]
    names = features(found.schema)
    assert names[:2] == ("age", f"age > {age['steps'][0]:g}")
    groups = [feature.group for feature in encoded_features(found.schema)]
    assert groups == ["age", *["age steps"] * len(age["steps"]), "smoker", "smoker"]
    for own, encoded in zip(found.rows, found.encoded, strict=True):
        mine = np.array([row[1] or np.nan for row in rows if row[0] == own.name], dtype=float)
        filled = np.where(np.isnan(mine), np.nanmedian(mine[~own.held]), mine)[~own.held]
        plain = encoded.train[0] * found.deviation + found.mean
        assert plain[:, 0] == pytest.approx(filled)
        for j, t in enumerate(age["steps"]):
            assert plain[:, 1 + j] == pytest.approx((filled > t).astype(float))
    assert found.deviation[1 : 1 + len(age["steps"])].tolist() == [1.0] * len(age["steps"])
    plain = opened(tmp_path, content, curves="off")
    assert features(plain.schema) == ("age", "smoker=x", "smoker=y")


def test_an_agreement_with_falling_steps_is_refused(tmp_path):
    found = opened(tmp_path, text([("ab"[k % 2], k / 4, k % 2) for k in range(80)]), curves="on")
    column = {**found.schema["columns"][0], "steps": [3.0, 2.0]}
    with refuses("agreement-unusable"):
        checked_schema({**found.schema, "columns": [column]})
