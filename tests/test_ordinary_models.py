"""`coefficients(effects=…)` against statsmodels and lifelines; degrees of freedom by hand."""

import numpy as np
import pandas as pd
import pytest

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.algorithms.evidence import Evidence

sm = pytest.importorskip("statsmodels.api")
FAMILIES = {"squared": "Gaussian", "logistic": "Binomial"}


def made(loss, sizes=(30, 12, 40, 25, 33, 18), tau=0.0, seed=0):
    random = np.random.default_rng(seed)
    found = []
    for m in sizes:
        X = random.standard_normal((m, 2))
        z = X @ [0.8, -0.5] + 0.3 + np.sqrt(tau) * random.standard_normal()
        noise = random.logistic(size=m) if loss == "logistic" else random.standard_normal(m)
        found.append((X, (z + noise > 0).astype(float) if loss == "logistic" else z + noise))
    return found


def stacked(clients):
    X = np.concatenate([np.column_stack([X, np.ones(len(X))]) for X, _ in clients])
    y = np.concatenate([y for _, y in clients])
    return X, y, np.repeat(range(len(clients)), [len(y) for _, y in clients])


@pytest.mark.parametrize("loss", FAMILIES)
def test_fixed_effects_are_those_of_a_generalised_linear_model(loss):
    clients = made(loss)
    cohort = sp.Cohort(clients, sp.Linear(loss, intercept=True))
    X, y, owner = stacked(clients)
    peer = sm.GLM(y, X, family=getattr(sm.families, FAMILIES[loss])())
    found = sp.coefficients(cohort, effects="fixed")
    np.testing.assert_allclose(found.estimate, peer.fit().params, atol=1e-5)
    np.testing.assert_allclose(found.error, peer.fit().bse, rtol=1e-3)
    assert not found.between.any()
    assert list(found.freedom) == [len(y) - 3 if loss == "squared" else np.inf] * 3
    robust = sp.coefficients(cohort, effects="fixed", errors="robust")
    theirs = peer.fit(cov_type="cluster", cov_kwds={"groups": owner})
    np.testing.assert_allclose(robust.error, theirs.bse, rtol=1e-3)
    assert "fixed effects" in str(found)
    assert "clustered by client" in robust.said


@pytest.mark.parametrize("loss", FAMILIES)
def test_stratified_effects_are_those_with_an_indicator_for_every_client(loss):
    clients = made(loss, tau=1.0)
    cohort = sp.Cohort(clients, sp.Linear(loss, intercept=True))
    found = sp.coefficients(cohort, effects="stratified")
    X, y, owner = stacked(clients)
    dummies = (owner[:, None] == range(len(clients))).astype(float)
    design = np.column_stack([X[:, :2], dummies])
    peer = sm.GLM(y, design, family=getattr(sm.families, FAMILIES[loss])()).fit()
    np.testing.assert_allclose(found.estimate[:2], peer.params[:2], atol=1e-3)
    np.testing.assert_allclose(found.error[:2], peer.bse[:2], rtol=2e-3)
    assert found.estimate[2] == pytest.approx(peer.params[2:].mean(), abs=1e-3)
    wanted = np.sqrt(peer.cov_params()[2:, 2:].mean())
    assert found.error[2] == pytest.approx(wanted, rel=0.01)
    np.testing.assert_allclose(found.own[:, 2], peer.params[2:], atol=5e-3)


@pytest.mark.parametrize("seed", range(3))
def test_stratified_effects_of_several_labels_are_those_of_mnlogit(seed):
    """What changes no loss is no obstacle, and means of free intercepts have all digits."""
    random = np.random.default_rng(seed)
    clients = []
    for i in range(5):
        X = random.standard_normal((60 + 10 * i, 2))
        z = X @ [0.8, -0.5] + 0.7 * random.standard_normal()
        y = (np.outer(z, [0, 1, -1]) + random.gumbel(size=(len(z), 3))).argmax(1)
        clients.append((X, y))
    X, y, owner = stacked(clients)
    design = np.column_stack([X[:, :2], owner[:, None] == range(5)]).astype(float)
    peer = sm.MNLogit(y, design).fit(method="newton", maxiter=100, disp=0)
    linear = sp.Linear("softmax", intercept=True, classes=3)
    found = sp.coefficients(sp.Cohort(clients, linear), effects="stratified")
    np.testing.assert_allclose(found.estimate[:4], peer.params[:2].ravel(), atol=1e-4)
    np.testing.assert_allclose(found.error[:4], peer.bse[:2].ravel(), rtol=1e-4)
    np.testing.assert_allclose(found.estimate[4:], peer.params[2:].mean(0), atol=1e-3)
    covariance = np.asarray(peer.cov_params()).reshape(2, 7, 2, 7)
    wanted = [np.sqrt(covariance[k, 2:, k, 2:].mean()) for k in range(2)]
    np.testing.assert_allclose(found.error[4:], wanted, rtol=1e-4)


def times(sizes, seed=1):
    random = np.random.default_rng(seed)
    found = []
    for m in sizes:
        X = random.standard_normal((m, 2))
        T = random.exponential(size=m) * np.exp(-X @ [0.7, -0.3])
        C = 2 * random.exponential(size=m)
        found.append((X, np.column_stack([np.minimum(T, C), T <= C])))
    return found


@pytest.mark.filterwarnings("ignore")
def test_alike_centres_have_the_intervals_of_an_ordinary_stratified_cox_model():
    """The table's six alike centres of 40: half-widths were .320 in place of lifelines' .216."""
    lifelines = pytest.importorskip("lifelines")
    clients = times([40] * 6)
    cohort = sp.Cohort(clients, sp.Linear("cox"))
    X, y, owner = (
        np.concatenate(part)
        for part in zip(
            *((X, y, np.full(len(y), i)) for i, (X, y) in enumerate(clients)), strict=True
        )
    )
    table = pd.DataFrame(X, columns=["a", "b"]).assign(t=y[:, 0], e=y[:, 1], centre=owner)
    fitter = lifelines.CoxPHFitter()
    fitter.fit(table, "t", "e", strata=["centre"])
    found = sp.coefficients(cohort, effects="fixed")
    np.testing.assert_allclose(found.estimate, fitter.params_, atol=1e-4)
    rows = found.table()
    half = [(row["high"] - row["low"]) / 2 for row in rows]
    ends = fitter.confidence_intervals_.to_numpy()
    np.testing.assert_allclose(half, (ends[:, 1] - ends[:, 0]) / 2, rtol=1e-3)
    cohorts = [sp.Cohort(times([40] * 6, seed), sp.Linear("cox")) for seed in range(6)]
    said = [sp.coefficients(one).said for one in cohorts]
    fixed = "A baseline for every client, and fixed effects, chosen by evidence"
    assert sum(one.startswith(fixed) for one in said) >= 4
    robust = sp.coefficients(cohort, effects="fixed", errors="robust")
    table["cluster"] = owner
    fitter.fit(table, "t", "e", strata=["centre"], cluster_col="cluster")
    scale = np.sqrt(6 / 5 * 239 / 238)
    np.testing.assert_allclose(robust.error, scale * fitter.standard_errors_, rtol=1e-3)


@pytest.mark.parametrize(("spread", "truncated"), [(1.0, False), (0.0, True)])
def test_a_mean_of_equal_clients_has_the_interval_of_their_means(spread, truncated):
    """Exact: Student's interval of N means; Hartung and Knapp's, without a floor, where τ is 0."""
    random = np.random.default_rng(3)
    means = spread * random.standard_normal(7)
    if truncated:
        means = means + 0.1 * random.standard_normal(7)
    noise = random.standard_normal((7, 20))
    noise -= noise.mean(1, keepdims=True)
    y = means[:, None] + noise
    clients = [(np.ones((20, 1)), own) for own in y]
    found = sp.coefficients(sp.Cohort(clients, sp.Linear("squared")), effects="slopes")
    assert (found.between[0] < 0.01) == truncated
    assert found.error[0] == pytest.approx(means.std(ddof=1) / np.sqrt(7), rel=0.01)
    assert found.freedom[0] == pytest.approx(6, rel=0.02)


def test_a_column_of_clients_has_their_degrees_of_freedom():
    """One that is constant within clients, and one that varies within them."""
    random = np.random.default_rng(5)
    clients = []
    for i in range(10):
        X = np.column_stack([np.full(30, i % 2), random.standard_normal(30)])
        y = X @ [1.0, 1.0] + random.standard_normal() + random.standard_normal(30)
        clients.append((X, y))
    found = sp.coefficients(
        sp.Cohort(clients, sp.Linear("squared", intercept=True)), effects="intercepts"
    )
    assert found.freedom[0] == pytest.approx(8, abs=0.1)
    assert found.freedom[1] > 200
    assert found.between[2] > 0 == found.between[0]


def test_several_labels_have_the_errors_of_a_multinomial_model():
    random = np.random.default_rng(0)
    X = random.standard_normal((300, 2))
    z = np.column_stack([np.zeros(300), X @ [1.0, -0.5], 0.5 - X[:, 1]])
    y = (z + random.gumbel(size=z.shape)).argmax(1)
    parts = [(X[k::4], y[k::4]) for k in range(4)]
    model = sp.Linear("softmax", intercept=True)
    found = sp.coefficients(sp.Cohort(parts, model), effects="fixed")
    peer = sm.MNLogit(y, np.column_stack([X, np.ones(300)])).fit(disp=False)
    np.testing.assert_allclose(found.estimate, np.asarray(peer.params).ravel(), atol=1e-3)
    np.testing.assert_allclose(found.error, np.asarray(peer.bse).ravel(), rtol=1e-3)
    assert found.names[:2] == ("0: 1", "0: 2")
    assert sp.coefficients(sp.Cohort(parts, model)).own.shape == (4, 6)


@pytest.mark.filterwarnings("ignore")
def test_effects_that_change_with_time_are_found_as_lifelines_finds_them():
    lifelines = pytest.importorskip("lifelines")
    from lifelines.statistics import proportional_hazard_test

    clients = times([60, 60, 60], seed=2)
    for X, y in clients:  # the second column's effect turns around
        X[:, 1] = np.where(y[:, 0] < 0.5, X[:, 1] + 0.8 * y[:, 1], X[:, 1] - 0.8 * y[:, 1])
    found = sp.proportional_hazards(sp.Cohort(clients, sp.Linear("cox")))
    X, y, owner = (
        np.concatenate(part)
        for part in zip(
            *((X, y, np.full(len(y), i)) for i, (X, y) in enumerate(clients)), strict=True
        )
    )
    table = pd.DataFrame(X, columns=["a", "b"]).assign(t=y[:, 0], e=y[:, 1], centre=owner)
    fitter = lifelines.CoxPHFitter().fit(table, "t", "e", strata=["centre"])
    peer = proportional_hazard_test(fitter, table, time_transform="log").summary
    np.testing.assert_allclose(found.statistic, peer["test_statistic"], rtol=0.01)
    np.testing.assert_allclose(found.p, peer["p"], rtol=0.05, atol=1e-6)
    assert found.p[1] < 0.01
    assert "χ²" in str(found)
    with refuses("hazards-without-cox"):
        sp.proportional_hazards(sp.Cohort(made("squared"), sp.Linear("squared")))


AWKWARD = {
    "separated": ("logistic", lambda X, y: (X, (X[:, 0] > 0) * 1.0), ["0"]),
    "twins": ("logistic", lambda X, y: (X[:, [0, 0]], y), ["0", "1"]),
    "twins of numbers": ("squared", lambda X, y: (X[:, [0, 0]], y), ["0", "1"]),
    "order of times": (
        "cox",
        lambda X, y: (X, np.column_stack([1 + (-X[:, 0]).argsort().argsort(), y[:, 1]])),
        ["0"],
    ),
}


@pytest.mark.parametrize("errors", ["model", "robust"])
@pytest.mark.parametrize("effects", ["fixed", "stratified"])
@pytest.mark.parametrize("case", AWKWARD)
def test_what_rows_say_nothing_about_is_named_and_has_no_number(case, effects, errors):
    loss, change, names = AWKWARD[case]
    clients = times([30] * 5) if loss == "cox" else made(loss)
    clients = [change(X, y) for X, y in clients]
    model = sp.Linear(loss, intercept=loss != "cox")
    found = sp.coefficients(sp.Cohort(clients, model), effects=effects, errors=errors)
    unknown = np.isnan(found.estimate)
    assert set(names) <= {n for n, bad in zip(found.names, unknown, strict=True) if bad}
    assert (np.isnan(found.error) == unknown).all()
    assert "Not known: 0" in found.said
    if effects == "fixed" and case != "separated":
        assert not unknown[2:].any()


def test_a_deviation_that_rows_do_not_tell_is_said():
    clients = [(X, np.full(len(X), float(i % 2))) for i, (X, _) in enumerate(made("logistic"))]
    cohort = sp.Cohort(clients, sp.Linear("logistic", intercept=True))
    found = sp.coefficients(cohort, effects="intercepts")
    assert np.isnan(found.estimate).all()
    assert "do not tell how far clients differ" in found.said
    one = sp.Cohort(made("logistic")[:1], sp.Linear("logistic", intercept=True))
    alone = sp.coefficients(one, effects="fixed", errors="robust")
    assert "errors from the curvature" in alone.said  # one client has no robust ones
    nothing = [(X, np.zeros(len(X))) for X, _ in clients]
    for effects in ("fixed", "stratified", "slopes"):  # they had errors of 7e10
        with refuses("coefficients-without-maximum"):
            counts = sp.Cohort(nothing, sp.Linear("poisson", intercept=True))
            sp.coefficients(counts, effects=effects)


@pytest.mark.parametrize("kind", ["separated", "more columns than rows"])
def test_what_has_no_integral_ends_soon(kind, monkeypatch):
    """A lost climb went on for ever, and clients' own deviations were integrated over."""
    random = np.random.default_rng(0)
    separated = kind == "separated"
    clients = []
    for _ in range(10):
        X = random.standard_normal((50, 2) if separated else (8, 12))
        z = 1e9 * X[:, 0] if separated else X[:, 0] + random.logistic(size=8)
        clients.append((X, (z > 0) * 1.0))
    asked = []
    ask = Evidence.ask
    monkeypatch.setattr(Evidence, "ask", lambda self, *p: asked.append(1) or ask(self, *p))
    model = sp.Linear("logistic", intercept=True)
    found = sp.coefficients(sp.Cohort(clients, model), effects="slopes")
    assert np.isnan(found.estimate[0])
    assert len(asked) < 200
