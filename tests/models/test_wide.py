"""Features in a table: the same numbers as from copies of the rows, for every method, from a single copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from scaffpd import machine
from scaffpd.data import Table
from scaffpd.federation import LocalPlan, ProximalPlan
from scaffpd.models import linear
from scaffpd.models.layout import DoubleProducts
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.tables import TERMS, StoredMatrix, join_halves, split_halves
from scaffpd.models.wide import WideOracle
from scaffpd.study.comparison.setting import zoo

CLASSES = 4
FEATURES = 60
PARTS = [np.arange(0, 25), np.arange(25, 31), np.arange(31, 70), np.array([79])]


def table(kind=np.float32, scale=0.1):
    values = np.random.default_rng(3).normal(size=(80, FEATURES)).astype(kind)
    return Table(values, scale, "random")


def labels():
    return np.random.default_rng(4).integers(0, CLASSES, 80)


def cohorts(kind=np.float32, l2=1e-2):
    """The same clients twice: as rows of a table, and as copies."""
    rows = table(kind)
    y = labels()
    model = sp.Linear("squared", l2=l2, classes=CLASSES)
    test = [part[::-1] for part in PARTS]
    wide = sp.Cohort(
        [(rows.rows(p), y[p]) for p in PARTS], model, test=[(rows.rows(p), y[p]) for p in test]
    )
    pairs = [(np.asarray(rows.rows(p)), y[p]) for p in PARTS]
    copied = sp.Cohort(pairs, model, test=[(np.asarray(rows.rows(p)), y[p]) for p in test])
    return wide, copied


METHODS = zoo(sp.ChiSquare(0.1), local_steps=7) | {
    "FedAvg, few": sp.FedAvg(local_steps=3, clients_per_round=2, batch_size=4),
    "SCAFFOLD, few": sp.Scaffold(local_steps=3, clients_per_round=3),
    "SCAFFOLD I": sp.Scaffold(local_steps=3, option="I"),
    "Scaff-PD, batches": sp.ScaffPD(sp.CVaR(0.5), local_steps=3, batch_size=5),
    "Subspace saddle, few": sp.SampledSubspaceSaddle(sp.ChiSquare(0.1), clients_per_round=3),
}
del METHODS["Δ-FL"]  # picks clients by their losses, which are equal up to rounding at the start


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", [np.float16, np.float64])
@pytest.mark.parametrize("label", METHODS)
def test_every_method_gives_the_same_model(label, kind):
    wide, copied = cohorts(kind)
    assert isinstance(wide._oracle, WideOracle)
    assert isinstance(copied._oracle, QuadraticOracle)
    ours, theirs = (
        sp.train(METHODS[label], cohort, rounds=5, progress=False) for cohort in (wide, copied)
    )
    # A saddle point is found to the rounding of its value, and so x to the root of that.
    atol = 1e-8 if label == "Minimax Newton" else 1e-11
    np.testing.assert_allclose(ours.x, theirs.x, rtol=0, atol=atol * np.abs(theirs.x).max())
    np.testing.assert_allclose(
        ours.certificate, theirs.certificate, rtol=1e-4 if atol > 1e-11 else 1e-6
    )
    for split_ in ("train", "test"):
        a = wide.evaluate(ours.x, split_)
        b = copied.evaluate(theirs.x, split_)
        np.testing.assert_allclose(a.loss, b.loss, rtol=max(atol, 1e-10))
        np.testing.assert_array_equal(a.accuracy, b.accuracy)


def test_a_certified_optimum():
    wide, copied = cohorts()
    ours = sp.train(sp.ScaffPD(sp.ChiSquare(0.05)), wide, tol=1e-9, progress=False)
    theirs = sp.train(sp.fair(sp.ChiSquare(0.05)), copied, tol=1e-9, progress=False)
    assert ours.status == theirs.status == "converged"
    np.testing.assert_allclose(ours.x, theirs.x, atol=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize("prox", [0.0, 0.3])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("where", ["here", "elsewhere", "nowhere"])
def test_local_steps_one_by_one(steps, prox, correction, where):
    """Against a loop over clients and steps."""
    wide, _ = cohorts(np.float64)
    random = torch.Generator().manual_seed(0)
    x, other, c = (
        torch.randn(FEATURES * CLASSES, generator=random, dtype=torch.float64) for _ in range(3)
    )
    c = c if correction else None
    at = {"here": wide.gradients(x), "elsewhere": wide.gradients(other), "nowhere": None}[where]
    plan = LocalPlan(steps, 0.4, prox=prox)
    updates = wide.local_updates(x, at, c, plan)
    A = np.asarray(table(np.float64).rows(np.arange(80)))
    y = np.eye(CLASSES)[labels()]

    def gradient(rows, u):
        return 2 * A[rows].T @ (A[rows] @ u - y[rows]) / len(rows) + 1e-2 * u

    X, place = (t.numpy().reshape(FEATURES, CLASSES) for t in (x, x if where == "here" else other))
    each = []
    for rows in PARTS:
        own = 0 if where == "nowhere" else gradient(rows, place)
        push = (0 if c is None else c.numpy().reshape(X.shape)) - own
        u = X
        for _ in range(steps):
            u = u - 0.4 * (gradient(rows, u) + push + prox * (u - X))
        each.append((X - u).flatten())
    np.testing.assert_allclose(updates.each(), each, rtol=1e-9, atol=1e-11)
    weights = np.array([0.1, 0.5, 0.2, 0.3])
    np.testing.assert_allclose(updates.sum(weights), weights @ each, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("even", [False, True])
def test_second_order_answers(even):
    wide, copied = cohorts(np.float64)
    random = torch.Generator().manual_seed(1)
    x, c = (
        torch.randn(FEATURES * CLASSES, generator=random, dtype=torch.float64) for _ in range(2)
    )
    column = torch.ones(FEATURES) if even else torch.rand(FEATURES, generator=random) + 0.5
    D = column.double()[:, None].expand(FEATURES, CLASSES).flatten()
    plan = ProximalPlan(0.3, D)
    weights = np.array([0.4, 0.1, 0.3, 0.2])
    here = [cohort.gradients(x) for cohort in (wide, copied)]
    steps = [
        cohort.proximal_steps(at, c, plan).each()
        for cohort, at in zip((wide, copied), here, strict=True)
    ]
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(here[0].diagonals(), here[1].diagonals())
    torch.testing.assert_close(here[0].diagonal(weights), here[1].diagonal(weights))
    torch.testing.assert_close(here[0].each(), here[1].each())
    V = torch.linalg.qr(torch.randn(len(x), 3, generator=random, dtype=torch.float64)).Q
    ours, theirs = (at.restriction(V, weights, D) for at in here)
    for name in ("slopes", "curvature", "sizes"):
        np.testing.assert_allclose(
            getattr(ours, name), getattr(theirs, name), rtol=1e-9, atol=1e-11
        )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(-20, 20), st.integers(0, 10**6))
def test_two_halves_hold_a_single(rows, columns, exponent, seed):
    """h + 2⁻¹¹ l keeps 21 binary digits of numbers within 2⁻¹⁰ of the largest."""
    random = np.random.default_rng(seed)
    X = (
        random.uniform(2.0**-10, 1, (rows, columns))
        * random.choice([-1, 1], (rows, columns))
        * 2.0**exponent
    )
    single = torch.from_numpy(X).float()
    halves, factor = split_halves(single)
    assert halves.dtype == torch.float16
    back = join_halves(halves.float(), factor, columns)
    torch.testing.assert_close(back, single, rtol=2.0**-21, atol=0)


@pytest.mark.parametrize("zero", [True, False])
def test_halves_of_zero_and_of_tiny_numbers(zero):
    X = torch.zeros(3, 2) if zero else torch.tensor([[1e-30, 1e-38], [3e-39, 0.0]])
    halves, factor = split_halves(X)
    torch.testing.assert_close(join_halves(halves.float(), factor, 2), X, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("pieces", [1, 3])
def test_products_of_a_store(stored, pieces, monkeypatch):
    monkeypatch.setattr("scaffpd.models.tables.PIECE", 40)
    values = torch.randn(30, 12, generator=torch.Generator().manual_seed(0)).to(stored)
    A = values.double() * 0.5
    store = StoredMatrix(torch.split(values, 30 // pieces), 0.5, torch.float64)
    X = torch.randn(12, 3).double()
    V = torch.randn(30, 3).double()
    weight = torch.rand(12).double()
    torch.testing.assert_close(store @ X, A @ X)
    torch.testing.assert_close(store.T @ V, A.T @ V)
    torch.testing.assert_close(store.gram(), A @ A.T)
    torch.testing.assert_close(store.gram(weight), A * weight @ A.T)
    torch.testing.assert_close(store.squares(V), A.square().T @ V)
    torch.testing.assert_close(store.norm(dim=1), A.norm(dim=1))
    torch.testing.assert_close(
        store[torch.tensor([[3, 1], [29, 0]])], A[torch.tensor([[3, 1], [29, 0]])]
    )


def test_nothing_is_read_before_it_is_needed():
    rows = table()
    y = labels()
    cohort = sp.Cohort([(rows.rows(p), y[p]) for p in PARTS], sp.Linear("squared", classes=CLASSES))
    assert cohort.fingerprint
    assert cohort.start().shape == (FEATURES * CLASSES,)
    assert "rows" not in vars(cohort._oracle)
    cohort.gradients(cohort.start())
    assert "rows" in vars(cohort._oracle)
    assert "spectrum" not in vars(cohort._oracle)  # gradients alone need no decomposition


def test_fingerprints_tell_tables_and_rows_apart():
    rows = table()
    y = labels()
    model = sp.Linear("squared", classes=CLASSES)

    def mark(source, parts):
        return sp.Cohort([(source.rows(p), y[p]) for p in parts], model).fingerprint

    same = mark(rows, PARTS)
    other = Table(rows.values, rows.scale, "another")
    assert same == mark(table(), PARTS)
    scaled = Table(rows.values, 2.0, "random")
    half = Table(rows.values.astype(np.float16), rows.scale, "random")
    tables = (other, scaled, half, Table(rows.values), Table(2 * rows.values))
    assert len({same, mark(rows, PARTS[:3]), *(mark(each, PARTS) for each in tables)}) == 7


@pytest.mark.parametrize(
    "model",
    [sp.Linear("softmax", classes=CLASSES), sp.Linear("squared", classes=CLASSES, intercept=True)],
)
def test_other_models_take_copies(model):
    rows = table()
    y = labels()
    ours = sp.Cohort([(rows.rows(p), y[p]) for p in PARTS], model)
    theirs = sp.Cohort([(np.asarray(rows.rows(p)), y[p]) for p in PARTS], model)
    assert ours.fingerprint == theirs.fingerprint


def test_more_samples_than_features_take_copies():
    values = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    cohort = sp.Cohort(
        [(Table(values).rows(np.arange(50)), np.arange(50) % 2)], sp.Linear("squared", classes=2)
    )
    assert isinstance(cohort._oracle, QuadraticOracle)


def test_too_little_memory_is_refused_with_figures(monkeypatch):
    monkeypatch.setattr(linear, "free_memory", lambda device: 20_000)
    figures = r"71 samples × 60 features × 4 outputs in 4 clients need [0-9.]+ kB on cpu, of which 20 kB are free"
    with pytest.raises(sp.InputError, match=figures):
        cohorts()


def test_what_would_fit_is_named(monkeypatch):
    values = np.zeros((100, 1000), dtype=np.float32)
    y = np.arange(100) % 2
    need = linear.needed(1000, 4, [100], 2, 8)
    cases = [
        (need - 1, "float16 would fit"),
        (need // 2, "about [0-9]{3} features"),
        (10, "fewer samples"),
    ]
    for have, advice in cases:
        monkeypatch.setattr(linear, "free_memory", lambda device, have=have: have)
        with pytest.raises(sp.InputError, match=advice):
            sp.Cohort([(Table(values).rows(np.arange(100)), y)], sp.Linear("squared", classes=2))


def test_a_copy_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(linear, "free_memory", lambda device: 1300)
    few = table().rows([1, 2])
    many = table().rows(np.arange(20))
    assert linear.fits([few], 60, torch.device("cpu"), torch.float64)
    assert not linear.fits([many], 60, torch.device("cpu"), torch.float64)
    with pytest.raises(sp.InputError, match="This model copies its 20 × 60 features to cuda"):
        linear.fits([many], 60, torch.device("cuda"), torch.float64)


def test_test_rows_need_room_as_well(monkeypatch):
    one = table().rows(np.arange(79))
    need = linear.needed(FEATURES, 4, [1], 2, 8)
    monkeypatch.setattr(linear, "free_memory", lambda device: need)
    with pytest.raises(sp.InputError, match="test data cannot be used: 79 samples"):
        sp.Cohort(
            [(one[:1], [0])], sp.Linear("squared", classes=2), test=[(one, np.arange(79) % 2)]
        )


def test_room_on_this_machine():
    assert machine.free_memory(torch.device("cpu")) > 2**20


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("model", [sp.Linear("squared", classes=2), sp.Linear("softmax")])
def test_numbers_that_are_none(bad, model):
    values = np.zeros((6, 20), dtype=np.float32)
    values[4, 2] = bad

    def work():
        cohort = sp.Cohort(
            [(Table(values, key="k").rows([3, 4]), [0, 1])], model, ["spoilt"], dtype=torch.float32
        )
        cohort.gradients(cohort.start())

    with pytest.raises(
        sp.InputError,
        match="'spoilt' has a " + ("feature beyond" if bad == 1e30 else "NaN or infinite"),
    ):
        work()


def test_a_point_that_has_moved_is_another_point():
    wide, _ = cohorts()
    x = torch.zeros(FEATURES * CLASSES, dtype=torch.float64)
    before = wide.evaluate(x).loss
    x.add_(1.0)
    np.testing.assert_array_equal(wide.evaluate(x).loss, wide.evaluate(x.clone()).loss)
    assert (wide.evaluate(x).loss != before).all()


def test_double_precision_on_the_same_values():
    rows = table(np.float16)
    y = labels()
    model = sp.Linear("squared", l2=1e-2, classes=CLASSES)
    single = sp.Cohort([(rows.rows(p), y[p]) for p in PARTS], model, dtype=torch.float32)
    double = single.exact()
    same = cohorts(np.float16)[0]
    assert double._oracle.rows.A.parts[0] is single._oracle.rows.A.parts[0]
    x = torch.randn(FEATURES * CLASSES, dtype=torch.float64)
    np.testing.assert_allclose(double.gradients(x).losses, same.gradients(x).losses, rtol=1e-14)
    assert (
        double.gradients(x).rounding[1].max() < 1e-4 * single.gradients(x.float()).rounding[1].max()
    )


def test_matrix_units_are_not_trusted_with_long_sums(monkeypatch):
    """Each of their additions may err by as much as the largest term: n ε within a block."""
    store = StoredMatrix([torch.zeros(3, 50_000, dtype=torch.float16)], 1.0, torch.float32)
    assert DoubleProducts(store).slack(50_000) < 50_010 * 2.0**-53
    monkeypatch.setattr(StoredMatrix, "_split", lambda self, X: True)
    assert TERMS * 2.0**-23 < DoubleProducts(store).slack(50_000) < 1.1 * TERMS * 2.0**-23


def test_rows_of_several_parts():
    values = torch.randn(30, 4)
    one = StoredMatrix([values], 0.5, torch.float32)
    many = StoredMatrix(torch.split(values, [3, 20, 7]), 0.5, torch.float32)
    index = torch.randint(0, 30, (5, 6))
    torch.testing.assert_close(many[index], one[index])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Table(np.zeros(3)), "samples × features"),
        (lambda: Table(np.zeros((3, 2), dtype=int)), "float16, float32 or float64"),
        (lambda: table().rows([80]), "from 0 to 79"),
        (lambda: table().rows([-1]), "from 0 to 79"),
        (
            lambda: sp.Cohort([(table().rows([]), [])], sp.Linear("squared", classes=2)),
            "no samples",
        ),
        (
            lambda: sp.Cohort([(table().rows([1]), [7])], sp.Linear("squared", classes=2)),
            "label 7, but 2 classes",
        ),
        (
            lambda: sp.Cohort([(table().rows([1]), [0.5])], sp.Linear("squared", classes=2)),
            "whole numbers",
        ),
        (lambda: sp.Linear("logistic", classes=2), "logistic loss has two"),
    ],
)
def test_refusals(make, sentence):
    with pytest.raises(sp.InputError, match=sentence):
        make()


def test_a_table_in_a_few_words():
    assert (
        repr(table(np.float16)) == "Table of 80 × 60 in float16, scale 0.1; clients take .rows(…)"
    )


def test_a_selection_is_an_array_when_asked():
    rows = table(np.float16, 0.5)
    chosen = rows.rows([5, 2, 9])
    np.testing.assert_array_equal(np.asarray(chosen), 0.5 * rows.values[[5, 2, 9]].astype(float))
    np.testing.assert_array_equal(chosen[1:].numbers, [2, 9])
    np.testing.assert_array_equal(chosen[np.array([True, False, True])].numbers, [5, 9])
    assert chosen.shape == (3, FEATURES)
    assert np.asarray(chosen, dtype=np.float32).dtype == np.float32


def test_comparing_methods_on_rows_of_a_table(tmp_path):
    rows = table()
    y = labels()
    parts = [np.arange(0, 30), np.arange(30, 40), np.arange(40, 60)]
    train = [(rows.rows(p), y[p]) for p in parts]
    test = [(rows.rows(p + 20), y[p + 20]) for p in parts]
    model = sp.Linear("squared", classes=CLASSES)
    methods = {
        "FedAvg": sp.FedAvg(local_steps=5),
        "Scaff-PD": sp.ScaffPD(sp.ChiSquare(0.1), local_steps=5),
    }

    def table_of(pairs_train, pairs_test, folder):
        silos = sp.data.Silos(("a", "b", "c"), pairs_train, pairs_test, ())
        problem = sp.Problem(silos, model, "rows", dtype=torch.float64)
        return sp.compare(
            methods, problem, rounds=4, tune=2, processes=1, progress=False, out=folder
        )

    ours = table_of(train, test, tmp_path)
    again = table_of(train, test, tmp_path)  # all of it is in the journal
    theirs = table_of(
        [(np.asarray(X), b) for X, b in train], [(np.asarray(X), b) for X, b in test], None
    )
    for label in methods:
        assert ours.line(label).mean == again.line(label).mean
        for name, value in theirs.line(label).mean.items():
            if name != "seconds":
                assert ours.line(label).mean[name] == pytest.approx(value, rel=1e-6), name


def test_a_comparison_in_single_precision_proves_in_double():
    rows = table(np.float16)
    y = labels()
    parts = [np.arange(0, 30), np.arange(30, 40), np.arange(40, 60)]
    silos = sp.data.Silos(
        ("a", "b", "c"), *([(rows.rows(p), y[p]) for p in parts] for _ in range(2)), ()
    )
    methods = {"Scaff-PD": sp.ScaffPD(sp.ChiSquare(1.0)), "FedAvg": sp.FedAvg()}
    problem = sp.Problem(
        silos, sp.Linear("squared", l2=1e-2, classes=CLASSES), "rows", dtype=torch.float32
    )
    found = sp.compare(methods, problem, rounds=50, tune=1, processes=1, progress=False)
    ours, theirs = (next(run for run in found.finals if run.job.method == name) for name in methods)
    plain = sp.train(methods["Scaff-PD"], problem.cohort(0), rounds=50, progress=False)
    assert ours.certificate < 0.1 * plain.certificate
    assert theirs.certificate == np.inf
