"""Features that stay on disk: the same numbers as from a copy, for every loss and every question."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.data import Table
from scaffpd.federation import LocalPlan, ProximalPlan
from scaffpd.models import linear, tables
from scaffpd.models.tables import MappedMatrix

ROWS = 400
FEATURES = 9
CUTS = [100, 130, 139, 140, 260]
LOSSES = ("squared", "logistic", "softmax")


def labels(loss):
    random = np.random.default_rng(4)
    return {
        "squared": random.normal(size=(ROWS, 2)),
        "logistic": random.integers(0, 2, ROWS),
        "softmax": np.arange(ROWS) % 3,
    }[loss]


def parts(order):
    """Numbers of rows: clients one after the other, or scattered, with a row that two of them have."""
    numbers = np.arange(ROWS) if order == "in a row" else np.random.default_rng(5).permutation(ROWS)
    found = np.split(numbers, CUTS)
    if order == "scattered":
        found[1] = np.append(found[1], found[0][:2])
    return found


def table(folder, kind=np.float64, scale=0.5):
    file = folder / "table.npy"
    np.save(file, np.random.default_rng(3).normal(size=(ROWS, FEATURES)).astype(kind))
    return Table(np.load(file, mmap_mode="r"), scale, "random")


@pytest.fixture
def cohorts(tmp_path, monkeypatch):
    """The same clients twice: read from disk, a few rows at a time, and copied."""

    def make(
        loss, order="scattered", intercept=False, kind=np.float64, scale=0.5, dtype=None, small=True
    ):
        rows = table(tmp_path, kind, scale)
        y = labels(loss)
        model = sp.Linear(loss, 1e-2, intercept)
        pairs = [(rows.rows(p), y[p]) for p in parts(order)]
        test = [(x[::-1][:50], b[::-1][:50]) for x, b in pairs]
        copied = sp.Cohort(pairs, model, dtype=dtype, test=test)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "free_memory", lambda device: 1)
            patch.setattr("scaffpd.models.linear.check_compressed_memory", lambda *args: None)
            disk = sp.Cohort(pairs, model, dtype=dtype, test=test)
        return disk, copied

    for name, value in {"LYING": 200, "COPIED": 100, "RUN": 40}.items():
        monkeypatch.setattr(tables, name, value)
    monkeypatch.setattr(tables, "HELD", 900)  # some clients are large
    return make


def close(ours, theirs, tolerance=1e-10):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def answers(cohort):
    """Everything that a cohort can be asked."""
    random = torch.Generator().manual_seed(0)
    x, other, c = (
        torch.randn(cohort.dimension, generator=random, dtype=torch.float64) for _ in range(3)
    )
    x, other, c = (t.to(cohort.start()) for t in (x, other, c))
    weights = np.linspace(0.1, 0.3, len(cohort.names))
    D = torch.full_like(x, 1.5)
    V = torch.linalg.qr(torch.stack([other, c], 1)).Q
    at = cohort.gradients(x)
    batch = cohort.gradients(x, 5, (1,))
    k = cohort.constants()
    seen = at.restriction(V, weights, D)
    some = cohort.gradients(x, clients=[4, 1])
    yield from (
        at.losses,
        at.sum(weights),
        at.each(),
        at.project(other),
        at.diagonal(weights),
        at.diagonals(),
    )
    yield from (
        seen.slopes,
        seen.curvature,
        seen.sizes,
        batch.losses,
        batch.each(),
        some.losses,
        some.each(),
    )
    yield from (k.smoothness, k.strong_convexity, k.steepest)
    for plan in (
        LocalPlan(1, 0.1),
        LocalPlan(4, 0.1),
        LocalPlan(30),
        LocalPlan(4, 0.1, batch_size=3),
    ):
        updates = cohort.local_updates(x, at, c, plan)
        yield from (
            updates.each(),
            updates.sum(weights),
            cohort.local_updates(x, None, None, plan).each(),
        )
        yield cohort.local_updates(x, some, c, plan, clients=[4, 1]).each()
    yield cohort.proximal_steps(at, c, ProximalPlan(0.3, D)).each()
    for split in ("train", "test"):
        scores = cohort.evaluate(x, split)
        yield from (scores.loss, scores.accuracy)


@pytest.mark.cover(2)
@pytest.mark.parametrize("order", ["in a row", "scattered"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_answer_is_the_same(cohorts, loss, intercept, order):
    disk, copied = cohorts(loss, order, intercept)
    assert isinstance(disk._oracle.rows.A, MappedMatrix)
    assert isinstance(disk.channel.test.oracle.rows.A, MappedMatrix)
    assert isinstance(copied._oracle.rows.A, torch.Tensor)
    close(answers(disk), answers(copied))
    assert not disk._oracle.rows._copies


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_format(cohorts, loss, kind, scale, dtype):
    disk, copied = cohorts(loss, "in a row", False, kind, scale, dtype)
    close(answers(disk), answers(copied), 1e-10 if dtype == torch.float64 else 2e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_certified_optimum(cohorts, loss):
    disk, copied = cohorts(loss, intercept=True)
    ours, theirs = (
        sp.train(sp.fair(sp.ChiSquare(0.1)), c, tol=1e-8, progress=False) for c in (disk, copied)
    )
    assert ours.status == theirs.status == "converged"
    np.testing.assert_allclose(ours.x, theirs.x, atol=1e-3)
    rounds = [
        sp.train(sp.ScaffPD(sp.ChiSquare(0.1)), c, rounds=5, progress=False) for c in (disk, copied)
    ]
    np.testing.assert_allclose(rounds[0].x, rounds[1].x, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(rounds[0].certificate, rounds[1].certificate, rtol=1e-6)


def test_more_than_one_table_and_arrays(tmp_path, monkeypatch):
    one, two = (Table(np.random.default_rng(k).normal(size=(40, 3)), k + 1.0) for k in range(2))
    X = [
        one.rows([39, 3, 38]),
        two.rows(np.arange(40)),
        np.arange(12).reshape(4, 3),
        one.rows([1, 0]),
        np.eye(3),
    ]
    pairs = [(x, np.arange(len(x)) % 2) for x in X]
    copied = sp.Cohort(pairs, sp.Linear("logistic", intercept=True))
    monkeypatch.setattr(linear, "free_memory", lambda device: 1)
    disk = sp.Cohort(pairs, sp.Linear("logistic", intercept=True))
    x = torch.arange(4.0, dtype=torch.float64) / 4
    close([disk.gradients(x).each()], [copied.gradients(x).each()])


def test_fingerprints_tell_rows_apart(cohorts):
    a = cohorts("logistic")[0]
    b = cohorts("logistic")[0]
    c = cohorts("logistic", "in a row")[0]
    assert a.fingerprint == b.fingerprint != c.fingerprint


def test_another_process_maps_the_file(cohorts):
    A = cohorts("logistic")[0]._oracle.rows.A
    V = torch.ones(len(A), 1, dtype=torch.float64)
    known = A.T @ V
    sent = pickle.dumps(A.tables)
    assert len(sent) < 1000
    torch.testing.assert_close(pickle.loads(pickle.dumps(A)).T @ V, known)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_numbers_that_are_none(monkeypatch, bad):
    values = np.zeros((6, 20), dtype=np.float32)
    values[4, 2] = bad
    monkeypatch.setattr(linear, "free_memory", lambda device: 1)
    what = "feature beyond" if bad == 1e30 else "NaN or infinite"
    pairs = [(Table(values).rows([0]), [1]), (Table(values).rows([3, 4]), [0, 1])]
    with pytest.raises(sp.InputError, match=f"'spoilt' has a {what}.* in column 2"):
        sp.Cohort(pairs, sp.Linear("softmax"), ["fine", "spoilt"], dtype=torch.float32)


def test_refusals(tmp_path, monkeypatch):
    rows = table(tmp_path)
    pairs = [(rows.rows(p), labels("squared")[p]) for p in parts("scattered")]
    monkeypatch.setattr(linear, "free_memory", lambda device: 1000)
    with pytest.raises(
        sp.InputError, match="keeps up to 10 rows of 10 numbers for each of 6 clients"
    ):
        sp.Cohort(pairs, sp.Linear("squared", intercept=True))
    disk = sp.Cohort([(x, y[:, 0] > 0) for x, y in pairs], sp.Linear("logistic"))
    monkeypatch.setattr(tables, "CHECKED", 0)
    monkeypatch.setattr(tables, "free_memory", lambda device: 1000)
    with pytest.raises(sp.InputError, match="rows of features are needed at a time"):
        disk.local_updates(disk.start(), None, None, LocalPlan(3)).each()


LIMITED = """
import resource, sys
import numpy as np, torch, scaffpd as sp
from scaffpd.data import Table
from scaffpd.models import linear as room
table, loss = Table(np.load(sys.argv[1], mmap_mode="r"), key="large"), sys.argv[2]
y = np.arange(len(table)) % 2
clients = [(table.rows(np.arange(k, len(table), 30)), y[k::30] * 1.0) for k in range(30)]
torch.ones(500, 500) @ torch.ones(500, 500)
status = open("/proc/self/status").read()
used = 1024 * int(status.split("VmData:")[1].split()[0])
room.free_memory = lambda device: 50 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (used + 200 * 2**20,) * 2)
cohort = sp.Cohort(clients, sp.Linear(loss, intercept=True), dtype=torch.float32)
result = sp.train(sp.ScaffPD(sp.ChiSquare(0.1), local_steps=2), cohort, rounds=2, progress=False)
assert np.isfinite(result.x).all()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_a_table_of_three_times_the_memory(tmp_path, loss):
    """The process may take 200 MB besides what it starts with, for a table of 600 MB."""
    file = tmp_path / "large.npy"
    values = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(500_000, 300))
    some = np.random.default_rng(0).standard_normal((10_000, 300), dtype=np.float32)
    for k in range(0, len(values), 10_000):
        values[k : k + 10_000] = some + k / len(values)
    values.flush()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(file), loss],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
