"""Pairs: their gain against a dense evidence, their cells against loops, what is found and not."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import multivariate_normal

import scaffpd as sp
from cases.refusals import refuses
from cases.tables import agreed_on, opened, text
from scaffpd.data.pairs import Indicators, _cells_gain, _gain, chosen_pairs, pair_sums
from scaffpd.data.tabular.agree import encoded_features, features
from scaffpd.data.tabular.clients import read_clients
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.pipeline.columns import Plan, agreed
from scaffpd.pipeline.sites import SitesHere

COLUMNS = (Indicators((1, 2, 3), True), Indicators((4, 5), False), Indicators((6, 7, 8), True))


def indicators(n, seed=0):
    """Three columns: numbers, categories (two of three are named), numbers."""
    random = np.random.default_rng(seed)
    a = random.normal(size=n)
    kind = random.integers(0, 3, n)
    b = random.normal(size=n)
    steps = [-0.5, 0.0, 0.8]
    Z = np.column_stack([a[:, None] > steps, kind[:, None] == [0, 1], b[:, None] > steps])
    return Z.astype(float), a, kind, b


def test_a_gain_is_the_evidence_of_effects_of_cells():
    """With squared loss and σ = 1 it is the log marginal likelihood of residuals, gained."""
    random = np.random.default_rng(0)
    cell = random.integers(0, 5, 60)
    residual = random.normal(size=60) + random.normal(size=5)[cell]
    onehot = np.equal(cell[:, None], np.arange(5)).astype(float)

    def against(log_variance):
        covariance = np.eye(60) + np.exp(log_variance) * onehot @ onehot.T
        return -multivariate_normal(cov=covariance).logpdf(residual)

    best = minimize_scalar(against, bounds=(-8, 3), method="bounded")
    naive = multivariate_normal(cov=np.eye(60)).logpdf(residual)
    found = _gain((onehot.T @ -residual)[None], onehot.sum(0)[None])
    assert found == pytest.approx(-best.fun - naive, abs=0.1)  # ω of a grid


def test_cells_are_those_of_a_loop():
    Z, a, kind, _ = indicators(200)
    random = np.random.default_rng(1)
    g, h = random.normal(size=(200, 2)), random.random((200, 2))
    sums = pair_sums(Z, g, h)
    assert sums.shape == (2, 2, 9, 9)
    G, H = [], []
    for low, high in pairwise([-np.inf, -0.5, 0.8, np.inf]):
        for names in ([0], [1, 2]):
            rows = (a > low) & (a <= high) & np.isin(kind, names)
            G.append(g[rows].sum(0))
            H.append(h[rows].sum(0))
    naive = _gain(np.array(G).T, np.array(H).T)
    assert _cells_gain(COLUMNS[:2], sums, ((1, 3), (4,))) == pytest.approx(float(naive))


def test_the_pair_that_acts_is_found_and_nothing_else():
    Z, a, kind, b = indicators(4000)
    random = np.random.default_rng(2)
    wanted = np.where((a > 0) & (kind == 1), 0.7, -0.1)
    noise = random.normal(size=4000)
    ones = np.ones((4000, 1))

    def found(effect):
        halves = [slice(None, 1500), slice(1500, None)]  # of two clients
        additive = np.column_stack([ones, Z])
        left = noise + effect
        left -= additive @ np.linalg.lstsq(additive, left, rcond=None)[0]
        parts = [pair_sums(Z[k], -left[k, None], ones[k]) for k in halves]
        return chosen_pairs(COLUMNS, sum(parts), 5)

    (pair,) = found(wanted)
    assert pair.columns == (0, 1)
    assert pair.cuts == ((2,), (5,))
    assert found(0 * b) == []
    assert len(found(0.5 * np.sign(a) * np.sign(b) + wanted)) == 2


def test_derivatives_are_those_of_the_loss():
    random = np.random.default_rng(3)
    X = random.normal(size=(6, 3))
    labels = {"squared": random.normal(size=6), "logistic": np.arange(6) % 2}
    labels |= {"softmax": np.arange(6) % 3, "poisson": np.arange(6.0)}
    for loss, y in labels.items():
        model = sp.Linear(loss, 0.0, classes=3 if loss == "softmax" else None)
        x = 0.3 * random.normal(size=3 * (3 if loss == "softmax" else 1))
        g, h = model.slopes(x, X, y)
        seen = sp.Cohort([(X, y)], model).gradients(torch.tensor(x)).sum(np.ones(1))
        assert X.T @ g / 6 == pytest.approx(seen.numpy().reshape(3, -1), rel=1e-6)
        ahead, behind = (model.slopes(x + s * 1e-5, X, y)[0] for s in (1, -1))
        if loss != "softmax":
            slope = (ahead - behind) / 2e-5
            assert slope == pytest.approx(h * X.sum(1, keepdims=True), rel=1e-4, abs=1e-6)


def product(n, seed, sites="abc"):
    random = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        age = int(random.integers(20, 80))
        smoker = "yes" if random.random() < 0.4 else "no"
        dose = round(random.normal(), 1)
        y = dose + (2.0 if age > 50 and smoker == "yes" else 0.0) + random.normal()
        rows.append((sites[k % len(sites)], age, smoker, dose, round(y, 3)))
    return text(rows, ("site", "age", "smoker", "dose", "ill"))


@pytest.fixture
def paired(tmp_path):
    found = opened(tmp_path, product(1500, 4), curves="on")
    source = TableSettings(file=[tmp_path / "a.csv"], client="site", target="ill")
    table = read_clients(source).clients()
    return found, agreed_on(table, True, 3, modelled)


def modelled(schema):
    groups = [feature.group for feature in encoded_features(schema)]
    return sp.Linear("squared", "auto", True, groups=groups)


def groups(found):
    return encoded_features(found.schema)


def test_a_table_s_pair_is_agreed_on_and_encoded(paired):
    before, found = paired
    (pair,) = found.schema["pairs"]
    assert {pair["left"]["name"], pair["right"]["name"]} == {"age", "smoker"}
    assert any(abs(t - 50) <= 2 for t in pair["left"]["steps"])
    new = [f for f in groups(found) if "×" in f.name]
    assert {f.group for f in new} == {"age × smoker"}
    first = pair["left"]["steps"][0], pair["right"]["categories"][0]
    assert new[0].name == f"age > {first[0]:g} × smoker={first[1]}"
    base = len(features(before.schema))
    for own, encoded in zip(found.rows, found.encoded, strict=True):
        plain = encoded.train[0] * found.deviation + found.mean
        age, smoker = (c.values[~own.held] for c in own.table.columns[:2])
        names = np.array(own.table.columns[1].categories)[smoker]
        naive = [
            (age > t) & (names == name)
            for t in pair["left"]["steps"]
            for name in pair["right"]["categories"]
        ]
        assert plain[:, base:] == pytest.approx(np.array(naive, dtype=float).T)
    assert found.deviation[base:].tolist() == [1.0] * len(new)


def test_nothing_is_looked_for_where_nothing_can_be(paired, monkeypatch):
    before, found = paired
    sites = SitesHere.of(found.rows)
    monkeypatch.setattr(SitesHere, "federation", None)  # no model is fitted
    for plan in (Plan(modelled, True, 0), Plan(modelled, False, 3)):
        assert "pairs" not in agreed(before.schema, sites, plan).schema
    monkeypatch.setattr("scaffpd.pipeline.columns.MOST_INDICATORS", 10)
    assert "pairs" not in agreed(before.schema, sites, Plan(modelled, True, 3)).schema


def acting_together(n=450, seed=5):
    """Three clients; a column of zeros and ones, and one without thresholds, are among the four."""
    random = np.random.default_rng(seed)
    found = {}
    for site in "abc":
        X = np.column_stack(
            [random.normal(size=n), random.integers(0, 2, n), np.ones(n), random.normal(size=n)]
        )
        together = (X[:, 0] > 0.3) & (X[:, 1] == 1)
        found[site] = X, X[:, 3] + 2 * together + 0.5 * random.normal(size=n)
    return found


def test_curves_of_arrays_have_the_pair_too():
    clients = acting_together()
    model = sp.Linear("squared", intercept=True)
    curves = sp.Curves(pairs=3).fit(clients, ["age", "smoker", "one", "dose"], model)
    (pair,) = curves.products
    assert (pair.left, pair.right) == (0, 1)
    assert any(abs(t - 0.3) < 0.1 for t in pair.above_left)
    added = [name for name in curves.names if "×" in name]
    assert added[0] == f"age > {pair.above_left[0]:.15g} × smoker > {pair.above_right[0]:.15g}"
    assert set(curves.groups[-len(added) :]) == {"age × smoker"}
    X, _ = clients["b"]
    naive = [
        (X[:, 0] > left) & (X[:, 1] > right)
        for left in pair.above_left
        for right in pair.above_right
    ]
    assert curves.encode(X)[:, -len(added) :] == pytest.approx(np.array(naive, dtype=float).T)
    with refuses("pairs-without-model"):
        sp.Curves(pairs=3).fit(clients)


def test_an_estimator_with_pairs_predicts_by_them_and_for_every_client():
    pytest.importorskip("sklearn")
    clients = acting_together()
    X = np.concatenate([rows for rows, _ in clients.values()])
    own = np.repeat([0.0, 1.0, -1.0], 450)  # a level of every client's own
    y = np.concatenate([target for _, target in clients.values()]) + own
    names = np.repeat(list(clients), 450)
    additive, paired = (
        sp.FairFederatedRegressor(curves=True, pairs=pairs, personal=True).fit(X, y, clients=names)
        for pairs in (0, 3)
    )
    errors = [np.mean((m.predict(X, clients=names) - y) ** 2) for m in (additive, paired)]
    assert errors[1] < 0.27  # the noise is 0.25
    assert errors[0] > 1.1 * errors[1]
    assert "x0 × x1" in paired.curves_.groups
    b = paired.curves_.encode(X[:2]) @ paired.client_coef_["b"][0] + paired.client_intercept_["b"]
    assert paired.predict(X[:2], clients=["b", "b"]) == pytest.approx(b)
    assert paired.predict(X[:2], clients=["z", "z"]) == pytest.approx(paired.predict(X[:2]))
