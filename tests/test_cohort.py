"""`Cohort`: N clients together are N clients alone; bytes, fingerprints and scores."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

import scaffpd as sp
from naive import relative, unequal_clients
from scaffpd.data import digits
from scaffpd.errors import InputError
from scaffpd.federation import LocalPlan
from scaffpd.phases import hear

torch.manual_seed(0)
MODELS = {
    "squared": (sp.Linear("squared", l2=0.02), 1),
    "several outputs": (sp.Linear("squared", l2=0.02, intercept=True), 3),
    "logistic": (sp.Linear("logistic", l2=0.02), 1),
    "softmax": (sp.Linear("softmax", l2=0.02, classes=3), 3),
    "module": (sp.Module(nn.Linear(6, 3).double(), "cross_entropy", l2=0.02), 3),
}


def data_for(name):
    model, outputs = MODELS[name]
    loss = "squared" if model.loss == "squared" else ("logistic" if outputs == 1 else "softmax")
    return model, unequal_clients(loss, outputs)


# --- together and alone


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_cohort_of_all_equals_cohorts_of_one(name, batch_size):
    model, data = data_for(name)
    together = sp.Cohort(data, model)
    alone = [sp.Cohort({key: pair}, model) for key, pair in data.items()]
    n = len(alone)
    x = together.start() + torch.randn(
        together.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    weights = np.linspace(0.1, 1, n)
    at = together.gradients(x, batch_size, (1, 5))
    ats = [cohort.gradients(x, batch_size, (1, 5)) for cohort in alone]
    np.testing.assert_allclose(at.losses, [a.losses[0] for a in ats], rtol=1e-12)
    np.testing.assert_allclose(at.norms(), [a.norms()[0] for a in ats], rtol=1e-11)
    c = at.sum(weights)
    assert relative(c, sum(a.sum(np.array([w])) for a, w in zip(ats, weights, strict=True))) < 1e-12
    # A network's L_i come from differences of gradients, with half of the digits, and so would
    # η_i = 1/L_i: its steps are compared at a given rate, and L_i below.
    rate = 1e-2 if name == "module" else None
    for plan in (LocalPlan(4, rate, key=(8,)), LocalPlan(4, 1e-3, batch_size=2, key=(8,))):
        d = together.local_updates(x, at, c, plan).sum(weights)
        parts = [
            cohort.local_updates(x, a, c, plan).sum(np.array([w]))
            for cohort, a, w in zip(alone, ats, weights, strict=True)
        ]
        assert relative(d, sum(parts)) < 1e-11
    # Gradients rounded at 1e-16 differ over a step of about 1e-8 by 1e-8 of their size.
    digits = 1e-7 if name == "module" else 1e-10
    L = [cohort.constants().smoothness[0] for cohort in alone]
    np.testing.assert_allclose(together.constants().smoothness, L, rtol=digits)
    scores = together.evaluate(x)
    np.testing.assert_allclose(
        scores.loss, [cohort.evaluate(x).loss[0] for cohort in alone], rtol=1e-12
    )
    np.testing.assert_array_equal(scores.score, [cohort.evaluate(x).score[0] for cohort in alone])


def test_gradients_of_another_cohort_are_refused():
    model, data = data_for("logistic")
    one = sp.Cohort(data, model)
    other = sp.Cohort(data, model)
    x = one.start()
    with pytest.raises(InputError, match="gradients of these clients"):
        one.local_updates(x, other.gradients(x), x, LocalPlan(1))


# --- bytes


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
@pytest.mark.parametrize("name", ["squared", "softmax", "module"])
def test_traffic_is_what_a_hand_counts(dtype, size, name):
    model, data = data_for(name)
    cohort = sp.Cohort(data, model, dtype=dtype)
    n = 8
    d = cohort.dimension
    seen = []

    def sent():
        now = (cohort.traffic.exchanges, cohort.traffic.bytes_up, cohort.traffic.bytes_down)
        change = tuple(b - a for a, b in zip(seen[-1], now, strict=True)) if seen else now
        seen.append(now)
        return change

    assert sent() == (0, 0, 0)
    cohort.constants()
    assert sent() == (1, n * 4 * size, 0)  # L_i, μ_i, max_j L_ij and n_i
    at = cohort.gradients(cohort.start())
    assert sent() == (
        1,
        n * (d + 3) * size,
        n * d * size,
    )  # x down; c_i, L_i and bounds on their rounding up
    c = at.sum(np.ones(n))
    assert at.rounding()[0].shape == at.rounding()[1].shape == (n,)
    assert sent() == (0, 0, 0)  # all that is there already
    at.norms()
    assert sent() == (1, n * size, 0)
    cohort.local_updates(cohort.start(), at, c, LocalPlan(3)).sum(np.ones(n))
    assert sent() == (1, n * d * size, n * d * size)  # c down, d_i up
    cohort.evaluate(cohort.start())
    cohort.fingerprint  # noqa: B018
    assert sent() == (0, 0, 0)


# --- fingerprints


def small(value=0.0, label=0, name="b", split=3):
    random = np.random.default_rng(0)
    X = random.standard_normal((6, 2))
    y = np.array([0, 1, 1, 0, 1, 1])
    X[4, 1] += value
    y[5] += label
    return {"a": (X[:split], y[:split]), name: (X[split:], y[split:])}


def test_fingerprints_tell_problems_apart():
    model = sp.Linear("softmax", l2=0.1, classes=3)
    cohorts = {
        "itself": sp.Cohort(small(), model),
        "a value": sp.Cohort(small(value=1e-15), model),
        "a label": sp.Cohort(small(label=1), model),
        "a name": sp.Cohort(small(name="c"), model),
        "a row's owner": sp.Cohort(small(split=2), model),
        "the order": sp.Cohort(dict(reversed(small().items())), model),
        "l2": sp.Cohort(small(), sp.Linear("softmax", l2=0.2, classes=3)),
        "the classes": sp.Cohort(small(), sp.Linear("softmax", l2=0.1, classes=4)),
        "the intercept": sp.Cohort(
            small(), sp.Linear("softmax", l2=0.1, classes=3, intercept=True)
        ),
        "the loss": sp.Cohort(small(), sp.Linear("logistic", l2=0.1)),
        "regression": sp.Cohort(small(), sp.Linear("squared", l2=0.1)),
        "the precision": sp.Cohort(small(), model, dtype=torch.float32),
    }
    assert len({cohort.fingerprint for cohort in cohorts.values()}) == len(cohorts)
    again = sp.Cohort({k: (X.tolist(), y.astype(float)) for k, (X, y) in small().items()}, model)
    assert again.fingerprint == cohorts["itself"].fingerprint
    with_test = sp.Cohort(small(), model, test=small(value=3.0))
    assert with_test.fingerprint == cohorts["itself"].fingerprint


def network(width=4, seed=0, shift=0.0):
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, 3)
    ).eval()
    layers[2].running_mean += shift
    return layers


def test_fingerprints_tell_networks_apart():
    models = [
        sp.Module(network()),
        sp.Module(network(seed=1)),
        sp.Module(network(width=5)),
        sp.Module(network(shift=1.0)),
        sp.Module(network(), l2=0.1),
        sp.Module(network(), lambda output, target: nn.functional.cross_entropy(output, target)),
    ]
    prints = [sp.Cohort(small(), model).fingerprint for model in models]
    assert len(set(prints)) == len(models)
    assert sp.Cohort(small(), sp.Module(network())).fingerprint == prints[0]


PRINTS = """
import numpy as np, scaffpd as sp, torch
from torch import nn
def own(output, target): return nn.functional.cross_entropy(output, target)
torch.manual_seed(0)
models = sp.Linear("softmax"), sp.Module(nn.Linear(2, 2)), sp.Module(nn.Linear(2, 2), own)
prints = [sp.Cohort([(np.eye(2), [0, 1])], model).fingerprint for model in models]
"""


@pytest.mark.long
def test_fingerprints_are_the_same_in_another_process():
    here = {}
    exec(PRINTS, here)
    there = subprocess.run(
        [sys.executable, "-c", PRINTS + "print(*prints)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert there == here["prints"]
    assert len(set(there)) == 3


# --- scores


def test_softmax_scores_are_those_of_scikit_learn():
    silos = digits(clients=4, alpha=1.0, test_fraction=0.3)
    cohort = sp.Cohort(silos.train, sp.Linear("softmax", l2=0.0, intercept=True), test=silos.test)
    X, y = (np.concatenate(part) for part in zip(*silos.train, strict=True))
    sklearn = LogisticRegression(C=0.1, max_iter=1000).fit(X, y)
    x = np.vstack([sklearn.coef_.T, sklearn.intercept_]).ravel()
    for split, pairs in (("train", silos.train), ("test", silos.test)):
        scores = cohort.evaluate(torch.tensor(x), split)
        for i, (X, y) in enumerate(pairs):
            assert scores.score[i] == accuracy_score(y, sklearn.predict(X))
            assert scores.loss[i] == pytest.approx(
                log_loss(y, sklearn.predict_proba(X), labels=range(10)), rel=1e-9
            )


def test_all_right_is_exactly_one_whatever_the_count():
    for m in range(1, 60):
        cohort = sp.Cohort(
            [(np.ones((m, 1)), np.ones(m))], sp.Linear("logistic"), dtype=torch.float32
        )
        assert cohort.evaluate([5.0]).score[0] == 1.0


def test_test_data_may_lack_classes_and_come_in_any_order():
    X = np.random.default_rng(0).standard_normal((6, 2))
    train = {"a": (X, [0, 1, 2, 0, 1, 2]), "b": (X[:3], [2, 1, 0])}
    cohort = sp.Cohort(train, sp.Linear("softmax"), test={"b": (X[:1], [0]), "a": (X[:2], [0, 1])})
    scores = cohort.evaluate(cohort.start(), "test")
    assert scores.names == ("a", "b")
    assert scores.counts.tolist() == [2, 1]
    np.testing.assert_allclose(scores.loss, np.log(3))


# --- what users hand over


def test_arrays_of_every_kind_give_the_same_cohort():
    pandas = pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    X = random.integers(-5, 5, (7, 3))
    y = np.array([0, 1, 1, 0, 1, 0, 0])
    frozen = X.astype(float), y.copy()
    for array in frozen:
        array.setflags(write=False)
    frame = pandas.DataFrame(X, columns=["age", "height", "weight"])
    kinds = {
        "integers": (X, y),
        "floats": (X.astype(float), y.astype(float)),
        "lists": (X.tolist(), y.tolist()),
        "tuples of rows": (tuple(map(tuple, X)), tuple(y)),
        "small integers": (X.astype(np.int8), y.astype(np.uint8)),
        "half precision": (X.astype(np.float16), y),
        "extended precision": (X.astype(np.longdouble), y.astype(np.longdouble)),
        "objects": (X.astype(object), y.astype(object)),
        "truth values": (X, y.astype(bool)),
        "a column of labels": (X, y[:, None]),
        "read-only": frozen,
        "strided": (np.repeat(X, 2, axis=0)[::2], np.repeat(y, 2)[::2]),
        "Fortran order": (np.asfortranarray(X), y),
        "tensors": (torch.tensor(X), torch.tensor(y)),
        "tensors with a gradient": (
            torch.tensor(X, dtype=torch.float32, requires_grad=True),
            torch.tensor(y),
        ),
        "brain floats": (torch.tensor(X, dtype=torch.bfloat16), torch.tensor(y)),
        "a data frame": (frame, pandas.Series(y)),
        "an index of its own": (
            frame.set_index(pandas.Index(range(10, 17))),
            pandas.Series(y, index=range(20, 27)),
        ),
        "nullable columns": (frame.astype("Int64"), pandas.Series(y, dtype="boolean")),
        "mixed columns": (frame.astype({"age": float, "height": "int8", "weight": object}), y),
        "a masked array with nothing masked": (np.ma.masked_array(X), y),
    }
    for model in (
        sp.Linear("logistic", l2=0.1),
        sp.Linear("squared", intercept=True),
        sp.Linear("softmax"),
    ):
        reference = sp.Cohort([(X, y)], model)
        for kind, pair in kinds.items():
            assert sp.Cohort([pair], model).fingerprint == reference.fingerprint, kind


def test_a_cohort_keeps_its_own_copy_of_the_data():
    for model in (
        sp.Linear("squared"),
        sp.Linear("squared", intercept=True),
        sp.Module(nn.Linear(2, 1).double(), "squared"),
    ):
        X = np.random.default_rng(0).standard_normal((5, 2))
        y = np.ones(5)
        cohort = sp.Cohort([(X, y)], model)
        before = cohort.gradients(cohort.start()).losses
        X[:] = 9.0
        y[:] = 9.0
        assert np.array_equal(cohort.gradients(cohort.start()).losses, before)


def test_names_are_made_up_or_taken_over():
    pair = (np.eye(2), [0.0, 1.0])
    model = sp.Linear("squared")
    assert sp.Cohort([pair] * 3, model).names == ("client-0", "client-1", "client-2")
    assert sp.Cohort([pair] * 2, model, names=["Basel", 7]).names == ("Basel", "7")
    assert sp.Cohort({"x": pair, "y": list(pair)}, model).names == ("x", "y")
    assert sp.Cohort((pair for _ in range(2)), model).names == ("client-0", "client-1")


def test_long_steps_say_how_far_they_are():
    heard = []
    hear(lambda *said: heard.append(said))
    try:
        rows = sp.data.synthetic(N=4, d=3, m=20)
        sp.joining(rows, rows, sp.Linear("squared", "auto", intercept=True))
    finally:
        hear(None)
    said = {what: [share for one, share in heard if one == what] for what, _ in heard}
    assert len(said) == 2  # strengths, and clients alone
    for shares in said.values():
        assert shares[0] == 0 < shares[-1] <= 1
