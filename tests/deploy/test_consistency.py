"""The tests of answers: the theorem that they are from, no false alarm on honest silos, and lies that are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from scaffpd.deploy.byzantine import (
    KEPT,
    LARGER,
    Consistency,
    Judge,
    LossBounds,
    absurd,
    contradict_each_other,
    troubles,
)
from scaffpd.deploy.messages import Facts, Message
from scaffpd.federation import Constants, LocalPlan, ProximalPlan
from scaffpd.federation.questions import (
    Curvature,
    Diagonal,
    GradientsAt,
    LocalSteps,
    Losses,
    ProximalSteps,
)
from scaffpd.run.settings.model_file import Setup

LOSSES = ("squared", "logistic", "softmax")
FORMATS = (torch.float32, torch.float64)
ONE = np.ones(1)


def silo(random, loss, offset, scale=3.0, width=None):
    """Rows and columns of all sizes up to 10^±2·scale, sometimes of rank one, or fitted exactly."""
    n = int(random.integers(1, 60))
    d = width or int(random.integers(1, 20))
    A = random.standard_normal((n, d)) * 10.0 ** random.uniform(-scale, scale)
    A *= 10.0 ** random.uniform(-scale, scale, d) if random.random() < 0.5 else 1.0
    if random.random() < 0.2:
        A = A[:, :1] @ random.standard_normal((1, d))
    noise = random.choice([0.0, 1.0]) * 10.0 ** random.uniform(-scale, scale)
    targets = A @ random.standard_normal(d) + noise * random.standard_normal(n) + offset
    y = {
        "squared": targets,
        "logistic": random.integers(0, 2, n),
        "softmax": random.integers(0, 3, n),
    }[loss]
    return A, y


def model(random, loss):
    l2 = float(random.choice([0.0, 1e-6, 1e-2, 1.0, 100.0]))
    classes = 3 if loss == "softmax" else None
    return sp.Linear(loss, l2=l2, intercept=bool(random.random() < 0.3), classes=classes)


def path(random, cohorts, points):
    """Points far away and near, on the way down to a minimum, where everything cancels, and beyond."""
    L = max(float(c.constants().smoothness[0]) for c in cohorts)
    like = cohorts[0].start()
    far = 10.0 ** random.uniform(-4, 4) / max(L, 1e-9) ** 0.5
    x = torch.from_numpy(far * random.standard_normal(len(like))).to(like)
    for _ in range(points):
        if not torch.isfinite(x).all():
            return
        yield x
        g = sum(c.gradients(x).sum(ONE) for c in cohorts) / len(cohorts)
        x = x - g / max(L, 1e-30) * float(random.choice([1.0, 1.0, 1.9, 1e-3]))
        if random.random() < 0.15:
            x = x + torch.from_numpy(
                random.standard_normal(len(x)) * 10.0 ** random.uniform(-8, 4)
            ).to(x)


def probe_point(like):
    return torch.from_numpy(
        np.random.default_rng(0).standard_normal(len(like)) / np.sqrt(len(like))
    ).to(like)


def told(cohort, x):
    at = cohort.gradients(x)
    return {
        "c": at.each()[0].numpy(),
        "scalars": np.array([at.losses[0], at.rounding[0][0], at.rounding[1][0]]),
    }


def history(cohort):
    known = cohort.constants()
    like = cohort.start()
    l2 = cohort.model.l2
    shape = LossBounds(
        float(known.smoothness[0]),
        float(known.strong_convexity[0]),
        int(known.samples[0]),
        len(like),
        float(torch.finfo(like.dtype).eps),
        l2,
    )
    point = probe_point(like)
    return Consistency(
        shape, shape.claim(point.double().numpy(), float(cohort.evaluate(point).loss[0]))
    )


@given(seed=st.integers(0, 2**32 - 1), loss=st.sampled_from(LOSSES), dtype=st.sampled_from(FORMATS))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_honest_answers_are_never_accused(seed, loss, dtype):
    """Gradients against up to eight earlier ones in both directions, `losses`, and `evaluate` of the same rows."""
    random = np.random.default_rng(seed)
    cohort = sp.Cohort(
        {"a": silo(random, loss, random.choice([0.0, 1e4]))}, model(random, loss), dtype=dtype
    )
    before = history(cohort)
    for x in path(random, [cohort], 14):
        answer = told(cohort, x)
        point = x.double().numpy()
        values = float(cohort.evaluate(x).loss[0]), float(cohort.losses(x)[0])
        if not np.isfinite([*answer["c"], answer["scalars"][0], *values]).all():
            continue
        f, *rounding = answer["scalars"].tolist()
        assert (
            before.trouble(before.shape.claim(point, f, answer["c"].astype(float), tuple(rounding)))
            is None
        )
        for value in values:
            assert before.trouble(before.shape.claim(point, value)) is None


def judge_of(cohorts):
    each = [cohort.constants() for cohort in cohorts]
    columns = {
        name: np.concatenate([getattr(k, name) for k in each])
        for name in ("smoothness", "strong_convexity")
    }
    steepest, samples = (
        np.concatenate([getattr(k, name) for k in each]) for name in ("steepest", "samples")
    )
    known = Constants(**columns, convex=True, steepest=steepest, samples=samples)
    like = cohorts[0].start()
    description = cohorts[0].model
    probes = np.array([c.evaluate(probe_point(like)).loss[0] for c in cohorts])
    setup = Setup(
        "ScaffPD", {"kind": "linear", "loss": description.loss, "l2": description.l2}, {}, ONE, ONE
    )
    return Judge(Facts(known, like.numpy(), probes, samples), setup, 1e4)


@given(seed=st.integers(0, 2**32 - 1), loss=st.sampled_from(LOSSES), dtype=st.sampled_from(FORMATS))
@settings(deadline=None, max_examples=9, derandomize=True)
def test_no_question_of_the_waist_accuses_an_honest_silo(seed, loss, dtype):
    """Silos whose rows differ in size, but by less than `outlier`."""
    random = np.random.default_rng(seed)
    linear = model(random, loss)
    width = int(random.integers(1, 12))
    offset = float(random.choice([0.0, 1e4]))
    linear = sp.Linear(loss, l2=max(linear.l2, 1e-6), classes=linear.classes)
    cohorts = [
        sp.Cohort({"a": silo(random, loss, offset, 0.7, width)}, linear, dtype=dtype)
        for _ in range(4)
    ]
    judge = judge_of(cohorts)
    steps = int(random.integers(1, 30))
    for x in path(random, cohorts, 5):
        at = [cohort.gradients(x) for cohort in cohorts]
        got = {i: told(cohort, x) for i, cohort in enumerate(cohorts)}
        if not all(np.isfinite([*parts["c"], parts["scalars"][0]]).all() for parts in got.values()):
            continue
        assert judge.verdicts(GradientsAt(x), got) == {}
        c = sum(point.sum(ONE) for point in at) / 4 * float(random.choice([1.0, 1e-6]))
        plan = LocalPlan(steps, None, float(random.choice([1.0, 0.1])))
        d = {
            i: {"d": cohorts[i].local_updates(x, at[i], c, plan).sum(ONE).numpy()} for i in range(4)
        }
        assert judge.verdicts(LocalSteps(x, GradientsAt(x), c, plan), d) == {}
        plain = {
            i: {"d": cohorts[i].local_updates(x, None, None, plan).sum(ONE).numpy()}
            for i in range(4)
        }
        assert judge.verdicts(LocalSteps(x, None, None, plan), plain) == {}
        L = float(judge.known.smoothness.max())
        metric = torch.from_numpy(10.0 ** random.uniform(-1, 1, len(x))).to(x)
        solved = ProximalPlan(L * 10.0 ** random.uniform(-4, 0), metric, 30, L)
        d = {
            i: {"d": cohorts[i].proximal_steps(at[i], c, solved).sum(ONE).numpy()} for i in range(4)
        }
        assert judge.verdicts(ProximalSteps(GradientsAt(x), c, solved), d) == {}
        V = torch.from_numpy(random.standard_normal((len(x), min(3, len(x))))).to(x)
        bent = {i: {"curvature": at[i].restriction(V, ONE, metric).curvature} for i in range(4)}
        assert judge.verdicts(Curvature(GradientsAt(x), V, x), bent) == {}
        assert (
            judge.verdicts(
                Diagonal(GradientsAt(x)),
                {i: {"diagonal": at[i].diagonal(ONE).numpy()} for i in range(4)},
            )
            == {}
        )


def printed(f, g, x, mu, L, i, j):
    """The right side of Theorem 4's inequality, as it is printed."""
    dg = g[i] - g[j]
    dx = x[i] - x[j]
    inside = dg @ dg / L + mu * dx @ dx - 2 * mu / L * ((g[j] - g[i]) @ (x[j] - x[i]))
    return f[j] + g[j] @ dx + inside / (2 * (1 - mu / L))


@pytest.mark.parametrize("seed", range(50))
def test_the_test_is_the_theorem_as_printed(seed):
    """Two arbitrary answers pass if and only if both inequalities hold, at a margin as small as one likes."""
    random = np.random.default_rng(seed)
    d = int(random.integers(1, 5))
    mu = float(random.uniform(0, 1))
    L = float(random.uniform(2, 5))
    x = random.standard_normal((2, d))
    g = random.standard_normal((2, d))
    f = np.zeros(2)
    shape = LossBounds(L / LARGER, mu, 10, d, 2.0**-52, None)
    least = printed(
        f, g, x, mu, L, 0, 1
    )  # f_0 = least + f_1 is the smallest that one direction allows
    for f0 in (least, -printed(f, g, x, mu, L, 1, 0)):  # and the largest that the other does
        for shift in (-1e-9, 1e-9):
            f = np.array([f0 + shift, 0.0])
            holds = all(f[i] >= printed(f, g, x, mu, L, i, j) for i, j in ((0, 1), (1, 0)))
            claims = [shape.claim(x[i], float(f[i]), g[i], (0.0, 0.0)) for i in (0, 1)]
            assert (contradict_each_other(shape, *claims) is None) == holds


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_small_lies_are_found_as_well(loss, dtype):
    """A thousandth on one loss, between answers at points that are close: convexity leaves no room for it."""
    random = np.random.default_rng(1)
    A = random.standard_normal((50, 6))
    y = {
        "squared": A @ np.arange(6.0),
        "logistic": A[:, 0] > 0,
        "softmax": random.integers(0, 3, 50),
    }[loss]
    linear = sp.Linear(loss, l2=0.01, classes=3 if loss == "softmax" else None)
    cohort = sp.Cohort({"a": (A, y)}, linear, dtype=dtype)
    x = 0.1 * torch.ones_like(cohort.start())
    for factor in (0.999, 1.001):
        before = history(cohort)
        for i, point in enumerate([x, x + 0.001, x + 0.002]):
            answer = told(cohort, point)
            f, *rounding = answer["scalars"].tolist()
            f *= factor if i == 2 else 1.0
            new = before.shape.claim(
                point.double().numpy(), f, answer["c"].astype(float), tuple(rounding)
            )
            assert (before.trouble(new) is None) == (i < 2)


def test_a_silo_cannot_excuse_itself_with_rounding():
    """Errors that it claims count up to what its number format explains."""
    random = np.random.default_rng(0)
    cohort = sp.Cohort(
        {"a": (random.standard_normal((40, 4)), random.integers(0, 2, 40))},
        sp.Linear("logistic", 0.1),
    )
    before = history(cohort)
    x = cohort.start()
    f = float(cohort.gradients(x).losses[0])
    c = cohort.gradients(x).each()[0].numpy()
    assert before.trouble(before.shape.claim(x.numpy(), f, c)) is None
    for excuse in (np.inf, 1e300, 1.0):
        assert (
            before.trouble(before.shape.claim(x.numpy(), f + 1e-6, c, (excuse, excuse))) is not None
        )
    most = before.shape.rounding(x.numpy(), f)
    assert most[0] < 1e-12
    for excuse in (np.inf, 1e-20):  # an answer is taken for twice as far off as both of them allow
        claim = before.shape.claim(x.numpy(), f, c, (excuse, excuse))
        assert (claim.loose, claim.slack) == tuple(2 * min(bound, excuse) for bound in most)


def test_a_lie_is_not_kept_and_the_last_eight_answers_are():
    cohort = sp.Cohort({"a": (np.eye(3), np.ones(3))}, sp.Linear("squared", 0.1))
    before = history(cohort)
    for i in range(20):
        x = torch.full_like(cohort.start(), 0.1 * i)
        answer = told(cohort, x)
        f = float(answer["scalars"][0])
        c = answer["c"]
        assert before.trouble(before.shape.claim(x.numpy(), f + 1.0, c)) is not None
        assert before.trouble(before.shape.claim(x.numpy(), f, c)) is None
    assert len(before._points) == KEPT
    assert before._points[-1].loss == f


def test_absurd_is_beside_the_others_and_their_usual_size():
    usual = dict.fromkeys(range(4), 1.0)
    assert absurd({0: 1e5, 1: 1.0, 2: 1.0, 3: 1.0}, usual, 1e4) == {0: 1.0}
    assert (
        absurd({0: 1.0, 1: 1e-9, 2: 0.0, 3: 1e-9}, usual, 1e4) == {}
    )  # others at their optimum accuse nobody
    assert absurd({0: 1e5, 1: 1.0}, usual, 1e4) == {}  # two silos have no median
    assert absurd({0: 1e5, 1: 1e5, 2: 1.0, 3: 1.0}, usual, 1e4) == {0: 1.0, 1: 1.0}
    assert absurd({0: np.inf, 1: 1.0, 2: 2.0}, usual, 1e4) == {0: 1.5}


def test_large_models_are_compared_with_fewer_answers():
    samples = np.full(200, 10)
    known = Constants(np.ones(200), np.zeros(200), True, np.ones(200), samples)
    for d, kept in ((10, KEPT), (10**5, 2)):
        judge = Judge(Facts(known, np.zeros(d, dtype=np.float32), np.ones(200), samples), None, 1e4)
        assert judge.histories[0]._points.maxlen == kept


@pytest.mark.parametrize("huge", [1e20, 1e60, 1e100])
def test_any_number_that_can_be_compared_is(huge):
    """With two silos there is no median; the other tests have to bear whatever `checks` lets through."""
    random = np.random.default_rng(0)
    linear = sp.Linear("logistic", 0.1)
    rows = random.standard_normal((2, 30, 4))
    cohorts = [sp.Cohort({"a": (A, A[:, 0] > 0)}, linear) for A in rows]
    judge = judge_of(cohorts)
    x = 0.1 * torch.ones(4, dtype=torch.float64)
    honest = {i: told(cohort, x) for i, cohort in enumerate(cohorts)}
    assert judge.verdicts(GradientsAt(x), honest) == {}
    wrong = huge * np.array([1.0, -1.0, 1.0, 1.0])
    steep = np.array([huge, 0.0, 0.0])
    assert list(judge.verdicts(GradientsAt(x), {**honest, 0: {**honest[0], "c": wrong}})) == [0]
    assert list(judge.verdicts(GradientsAt(x), {**honest, 0: {**honest[0], "scalars": steep}})) == [
        0
    ]
    assert list(judge.verdicts(Losses(x), {0: {"scalars": steep}})) == [0]
    c = x + 1
    V = torch.eye(4, dtype=torch.float64)
    assert list(
        judge.verdicts(LocalSteps(x, GradientsAt(x), c, LocalPlan(5)), {0: {"d": wrong}})
    ) == [0]
    assert list(
        judge.verdicts(
            ProximalSteps(GradientsAt(x), c, ProximalPlan(0.1, torch.ones_like(x))),
            {0: {"d": wrong}},
        )
    ) == [0]
    for bent in (np.diag(wrong), np.diag(-wrong)):
        assert list(judge.verdicts(Curvature(GradientsAt(x), V, x), {0: {"curvature": bent}})) == [
            0
        ]
    assert list(judge.verdicts(Diagonal(GradientsAt(x)), {0: {"diagonal": wrong}})) == [0]


def test_numbers_whose_squares_overflow_cannot_be_used():
    like = torch.zeros(2, dtype=torch.float64)
    shapes = {"c": (2,), "scalars": (1,)}
    fine = Message("answer", {}, {"c": np.array([1e99, -1e99]), "scalars": np.ones(1)})
    for c, f in (
        ([1e101, 0.0], 1.0),
        ([0.0, -1e300], 1.0),
        ([0.0, 0.0], 1e200),
        ([np.nan, 0.0], 1.0),
    ):
        wrong = Message("answer", {}, {"c": np.array(c), "scalars": np.array([f])})
        assert list(troubles({"a": fine, "b": wrong}, shapes, {"scalars"}, like)) == ["b"]
        assert (
            troubles({"a": wrong, "b": wrong}, shapes, {"scalars"}, like) == {}
        )  # everybody: the run diverges
    single = Message(
        "answer", {}, {"c": np.array([3e38, 0.0], dtype=np.float32), "scalars": np.ones(1)}
    )
    assert troubles({"a": single}, shapes, {"scalars"}, like.float()) == {}
