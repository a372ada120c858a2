"""The four losses against their definitions and autograd, far out on the real line as well."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy.stats import poisson

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.federation import LocalPlan
from scaffpd.models.losses import LOSSES, SHORT, Poisson, Squared, loss_named

NAMES = [name for name in LOSSES if name != "ordinal"]  # whose rows are terms (test_ordinal.py)


def encoded(loss, labels, classes=None):
    targets = loss.encode([np.asarray(labels)], ["a"], classes)
    return torch.as_tensor(targets.arrays[0]), targets.outputs


def exact(name, z, y):
    z = [mpf(float(v)) for v in z]
    if name == "squared":
        return float(
            sum((v - mpf(float(t))) ** 2 for v, t in zip(z, np.atleast_1d(y), strict=True))
        )
    if name == "logistic":
        return float(mp.log(1 + mp.exp(z[0])) - int(y) * z[0])
    if name == "poisson":
        mu = mp.exp(z[0])
        y = mpf(int(y))
        return float((y * mp.log(y / mu) if y else 0) + mu - y)
    return float(mp.log(sum(mp.exp(v) for v in z)) - z[int(y)])


def sample(name, random, size=30, outputs=4):
    if name == "squared":
        return random.standard_normal((size, outputs)), random.standard_normal((size, outputs))
    if name == "poisson":
        return random.standard_normal((size, 1)), random.integers(0, 9, size)
    k = 1 if name == "logistic" else outputs
    return random.standard_normal((size, k)), random.integers(0, max(2, k), size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 300.0])
def test_values_match_arithmetic_in_two_thousand_digits(name, scale):
    random = np.random.default_rng(0)
    z, labels = sample(name, random, size=8)
    loss = loss_named(name)
    y, _ = encoded(loss, labels, None if name != "softmax" else 4)
    values = loss.value(torch.tensor(scale * z), y).numpy()
    with mp.workdps(2000 if scale > 100 else 300):
        reference = [exact(name, scale * a, b) for a, b in zip(z, labels, strict=True)]
    # Softmax may lose what is below one rounding unit of the number one; nothing more.
    # So may Poisson of y log y.
    atol = {"softmax": 3e-16, "poisson": 1e-14}.get(name, 1e-300)
    np.testing.assert_allclose(values, reference, rtol=1e-13, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_residuals_are_the_derivatives(name):
    random = np.random.default_rng(1)
    for outputs in (4, SHORT + 1):
        z, labels = sample(name, random, outputs=outputs)
        loss = loss_named(name)
        y, _ = encoded(loss, labels, None if name != "softmax" else outputs)
        z = torch.tensor(z, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss.value(z, y).sum(), z)
        torch.testing.assert_close(loss.residual(z.detach(), y), gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_the_residual_is_new_memory(name):
    random = np.random.default_rng(3)
    z, labels = sample(name, random)
    loss = loss_named(name)
    y, _ = encoded(loss, labels, None if name != "softmax" else 4)
    z = torch.tensor(z)
    before = z.clone(), y.clone()
    loss.residual(z, y).zero_()
    assert torch.equal(z, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_outputs_neither_overflow_nor_lose_their_size(dtype):
    logistic = loss_named("logistic")
    softmax = loss_named("softmax")
    y, _ = encoded(logistic, [0, 0, 1, 1])
    z = torch.tensor([[1e4], [-1e4], [1e4], [-1e4]], dtype=dtype)
    assert logistic.value(z, y.to(dtype)).tolist() == [1e4, 0.0, 0.0, 1e4]
    assert logistic.residual(z, y.to(dtype)).flatten().tolist() == [1.0, 0.0, 0.0, -1.0]
    y, _ = encoded(softmax, [0, 1, 2])
    z = torch.tensor([[1e4, -1e4, 0.0]] * 3, dtype=dtype)
    assert softmax.value(z, y).tolist() == [0.0, 2e4, 1e4]
    assert softmax.residual(z, y).tolist() == [[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [1.0, 0.0, -1.0]]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    z=st.lists(st.floats(-50, 50), min_size=3, max_size=3),
    label=st.integers(0, 1),
)
def test_curvature_bounds_the_second_derivative(name, z, label):
    loss = loss_named(name)
    k = 1 if name in ("logistic", "poisson") else 3
    label = 40 * label if name == "poisson" else label
    labels = np.array([[label] * 3]) if name == "squared" else np.array([label])
    y, _ = encoded(loss, labels, 3 if name == "softmax" else None)
    # autograd multiplies zero by infinity where e^z has swallowed one
    highest = 30.0 if name == "poisson" else 50.0
    point = torch.tensor([z[:k]], dtype=torch.float64).clamp(max=highest)
    columns = torch.autograd.functional.jacobian(
        lambda v: loss.value(v, y).sum(), point, create_graph=False
    )
    assert torch.isfinite(columns).all()
    H = torch.autograd.functional.hessian(lambda v: loss.value(v, y).sum(), point).reshape(k, k)
    top = torch.linalg.eigvalsh(H)
    if loss.smooth:
        assert float(top[-1]) <= float(loss.steepness(y)[0]) * (1 + 1e-12)
    bent = loss.bend(point, y, torch.eye(k, dtype=torch.float64)[None])[0]
    torch.testing.assert_close(bent, H, rtol=1e-6, atol=1e-9)
    assert float(top[0]) >= -1e-12


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.3, 50.0])
def test_counts_have_curvature_that_bends_no_faster_than_itself(alpha):
    """0 <= |ℓ‴| <= ℓ″, by differences in 100 digits, and they are derivatives of a likelihood."""
    loss = Poisson(alpha)
    with mp.workdps(100):
        step = mpf(10) ** -15
        for y in (0, 1, 7, 3000):
            targets = torch.tensor([[y, 1.0]][:1], dtype=torch.float64)
            targets = targets if alpha else targets[:, :1]

            def value(v, y=y):
                mu, k = mp.exp(v), (1 / mpf(alpha) if alpha else None)
                if k is None:
                    return mu - y * v
                return (y + k) * mp.log(k + mu) - y * v

            for z in (-9.0, -1.0, 0.0, 2.0, 8.0):
                v = mpf(z)
                at = [value(v + i * step) for i in (-2, -1, 0, 1, 2)]
                second = (at[1] - 2 * at[2] + at[3]) / step**2
                third = (at[4] - 2 * at[3] + 2 * at[1] - at[0]) / (2 * step**3)
                assert abs(third) <= second * (1 + mpf(10) ** -8)
                point = torch.tensor([[z]], dtype=torch.float64)
                assert float(loss.bends(point, targets)) == pytest.approx(float(second), rel=1e-8)
                first = (at[3] - at[1]) / (2 * step)
                assert float(loss.residual(point, targets)) == pytest.approx(
                    float(first), rel=1e-9, abs=1e-9 * (1 + y)
                )


@pytest.mark.parametrize(
    "z", [-690.0, -60.0, -15.1, -1.0, 0.0, 1.9459101, 3.0, 11.51292546, 40.0, 690.0]
)
@pytest.mark.parametrize("y", [0, 1, 7, 100_000])
@pytest.mark.parametrize("alpha", [0.0, 1e-5, 0.7, 300.0])
def test_poisson_is_as_accurate_as_it_says(z, y, alpha):
    """The errors of value and slope are within a tenth of what the certificate allows for."""
    loss = Poisson(alpha)
    targets, _ = encoded(loss, [y])
    allowed = loss.accuracy(1)
    point = torch.tensor([[z]], dtype=torch.float64)
    with mp.workdps(500):
        v = mpf(z)
        mu = mp.exp(v)
        a = mpf(alpha)
        value = (y * (mp.log(y) - v) if y else 0) + mu - y
        if a:
            value += (y + 1 / a) * mp.log1p(a * (mu - y) / (1 + a * y)) - (mu - y)
        slope = (mu - y) / (1 + a * mu)
        unit = mpf(2) ** -53 / 10
        off = abs(mpf(float(loss.value(point, targets))) - value)
        assert off <= unit * (allowed.value * abs(value) + allowed.offset) + mpf(10) ** -300
        off = abs(mpf(float(loss.residual(point, targets))) - slope)
        assert off <= unit * (allowed.slope * abs(slope) + allowed.jump)


@pytest.mark.parametrize("name", NAMES)
def test_whole_weights_are_repeated_rows(name):
    """Losses, gradients, local steps and certificates; a common factor and zeros do nothing."""
    random = np.random.default_rng(5)
    weighted = {}
    repeated = {}
    for i in range(3):
        X = random.standard_normal((9 + i, 2)) + i
        w = random.integers(0, 4, 9 + i)
        w[0] = 2
        kinds = {
            "squared": X @ [1.0, 2.0] + random.standard_normal(len(w)),
            "poisson": random.poisson(3, len(w)),
        }
        y = kinds.get(name, random.integers(0, 3 if name == "softmax" else 2, len(w)))
        weighted[f"c{i}"] = X, np.column_stack([y, 0.7 * w])
        repeated[f"c{i}"] = np.repeat(X, w, 0), np.repeat(y, w)
    model = {"l2": 0.05, "intercept": True, "classes": 3 if name == "softmax" else None}
    a = sp.Cohort(weighted, sp.Linear(name, weighted=True, **model))
    b = sp.Cohort(repeated, sp.Linear(name, **model))
    x = torch.tensor(random.standard_normal(a.dimension))
    w = np.array([0.5, 0.3, 0.2])
    at = [cohort.gradients(x) for cohort in (a, b)]
    np.testing.assert_allclose(at[0].losses, at[1].losses, rtol=1e-13)
    torch.testing.assert_close(at[0].sum(w), at[1].sum(w), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(a.constants().smoothness, b.constants().smoothness, rtol=1e-9)
    for held in ((None, None), at):
        steps = [
            f.local_updates(x, g, g and g.sum(w), LocalPlan(4, 0.02))
            for f, g in zip((a, b), held, strict=True)
        ]
        torch.testing.assert_close(steps[0].sum(w), steps[1].sum(w), rtol=1e-11, atol=1e-13)
    one, other = (sp.train(sp.fair(sp.CVaR(0.5)), cohort, 8) for cohort in (a, b))
    assert one.certificate < 1e-8
    np.testing.assert_allclose(one.x, other.x, rtol=1e-7, atol=1e-9)
    assert one.certificate == pytest.approx(other.certificate, rel=0.1, abs=1e-10)
    for wrong, code in (
        (-1.0, "weight-out-of-range"),
        (np.nan, "not-finite"),
        (0.0, "client-without-weight"),
    ):
        X, y = weighted["c0"]
        with refuses(code):
            sp.Cohort(
                [(X, np.column_stack([y[:, 0], np.full(len(y), wrong)]))],
                sp.Linear(name, weighted=True),
            )


def test_an_exposure_is_as_many_rows():
    """Counts of E hours are E counts of an hour, up to a constant in x; a weight is one among rows,
    an exposure is not.
    """
    random = np.random.default_rng(4)
    X = random.standard_normal((8, 2))
    hours = random.integers(1, 5, 8)
    y = random.poisson(hours * 2.0)
    weights = random.random(8)
    each = np.repeat(X, hours, 0), np.repeat(y / hours, hours)
    both = sp.Linear("poisson", l2=0.0, exposed=True)
    by_hour = sp.Cohort([each], sp.Linear("poisson", l2=0.0))
    exposed = sp.Cohort([(X, np.column_stack([y, hours]))], both)
    many = len(each[1]) / 8
    start = torch.zeros(2, dtype=torch.float64)

    def likelihood(x):
        rate = np.exp(X @ x.numpy()) * hours
        return -poisson.logpmf(y, rate) + poisson.logpmf(y, hours)

    for x in torch.tensor(random.standard_normal((3, 2))):
        ours, theirs = exposed.gradients(x), by_hour.gradients(x)
        np.testing.assert_allclose(ours.losses, many * theirs.losses, rtol=1e-4)
        torch.testing.assert_close(ours.each(), many * theirs.each(), rtol=1e-11, atol=1e-13)
        gained = ours.losses - exposed.losses(start)
        np.testing.assert_allclose(gained, likelihood(x).mean(), rtol=1e-9)
    w = weights / weights.mean()
    rows = X, np.column_stack([y, hours, weights])
    model = sp.Linear("poisson", l2=0.0, exposed=True, weighted=True)
    cohort = sp.Cohort([rows], model)
    found = cohort.losses(x) - cohort.losses(start)
    np.testing.assert_allclose(found, (w * likelihood(x)).mean(), rtol=1e-9)
    for wrong, code in (([0.0] * 8, "exposure-not-positive"), ([], "target-columns-missing")):
        with refuses(code):
            sp.Cohort([(X, np.column_stack([y, wrong] if wrong else [y]))], both)
    with refuses("exposure-without-counts"):
        sp.Linear("squared", exposed=True)


@pytest.mark.parametrize(
    "labels", [[0, 1, 1], [False, True, True], [0.0, 1.0, 1.0], [[0], [1], [1]]]
)
@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_labels_may_be_whole_numbers_truth_values_or_a_column(name, labels):
    loss = loss_named(name)
    y, outputs = encoded(loss, labels)
    reference, _ = encoded(loss, [0, 1, 1])
    assert torch.equal(y, reference)
    assert outputs == (1 if name == "logistic" else 2)


def test_the_number_of_classes_comes_from_all_clients_or_from_the_user():
    loss = loss_named("softmax")
    labels = [np.array([0, 1]), np.array([4]), np.array([0])]
    assert loss.encode(labels, ["a", "b", "c"], None).outputs == 5
    assert loss.encode(labels, ["a", "b", "c"], 9).outputs == 9
    with refuses("label-beyond-classes"):
        loss.encode(labels, ["a", "b", "c"], 3)
    with refuses("label-beyond-samples"):
        loss.encode([np.array([0, 1]), np.array([20240101])], ["a", "b"], None)


def test_accuracy_of_one_hot_regression_and_of_none():
    loss = loss_named("squared")
    y = torch.eye(3, dtype=torch.float64)
    z = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.5, 0.0], [0.0, 0.0, 0.1]], dtype=torch.float64)
    assert loss.correct(z, y).tolist() == [True, False, True]
    assert loss.correct(z[:, :1], y[:, :1]) is None
    assert loss.correct(z, 2 * y) is None


class Tried(Squared):
    """A loss r ↦ ℓ(r) of r = z − y, given by two functions."""

    name = "tried"

    def value(self, z, y):
        return self.of(z - y).squeeze(-1)

    def residual(self, z, y):
        return self.slope(z - y)


@pytest.mark.parametrize(
    ("of", "slope", "curvature", "why"),
    [
        (torch.sin, torch.cos, 1.0, "it is not convex in z"),
        (lambda r: r**2, lambda r: 2 * r, 1.0, "its second derivative exceeds curvature = 1"),
        (lambda r: r**2, lambda r: r, 2.0, "`residual` is not the derivative of `value`"),
        (lambda r: r**2, lambda r: 2 * r, 2.0, None),
        (torch.abs, torch.sign, 5.0, "its second derivative exceeds curvature"),
        (lambda r: torch.logaddexp(r, -r), torch.tanh, 1.0, None),
    ],
)
def test_a_loss_of_ones_own_is_tried_before_anything_is_certified(
    monkeypatch, of, slope, curvature, why
):
    members = {"of": staticmethod(of), "slope": staticmethod(slope), "curvature": curvature}
    monkeypatch.setitem(LOSSES, "tried", type("Mine", (Tried,), members))
    data = [(np.eye(3) + k, np.arange(3.0) - k) for k in range(2)]
    if why is None:
        result = sp.train(
            sp.fair(sp.Agnostic()),
            sp.Cohort(data, sp.Linear("tried", l2=0.1)),
            tol=1e-6,
        )
        assert result.certificate <= 1e-6
        return
    with pytest.raises(sp.InputError, match=f"The loss 'tried' cannot be certified: {why}"):
        sp.Cohort(data, sp.Linear("tried", l2=0.1))


class Unequal(Squared):
    """ℓ = Σ_k (k + 1)(z_k − y_k)²/4: quadratic, and steeper in later outputs."""

    name = "unequal"

    def _factors(self, z):
        return torch.arange(1, z.shape[-1] + 1).to(z) / 4

    def value(self, z, y):
        return (self._factors(z) * (z - y).square()).sum(-1)

    def residual(self, z, y):
        return 2 * self._factors(z) * (z - y)

    def bends(self, z, y):
        return (2 * self._factors(z)).expand_as(z)


@pytest.mark.parametrize("personal", [False, True])
def test_a_quadratic_loss_may_be_steeper_in_some_outputs(personal, monkeypatch):
    monkeypatch.setitem(LOSSES, "unequal", Unequal)
    random = np.random.default_rng(3)
    pairs = [(random.standard_normal((9, 3)), random.standard_normal((9, 2))) for _ in range(3)]
    model = sp.Linear("unequal", l2=0.1)
    cohort = sp.Cohort(pairs, sp.Personal(model, strength=2.0) if personal else model)
    x = torch.from_numpy(random.standard_normal(6))
    at = cohort.gradients(x)
    w = np.array([0.2, 0.5, 0.3])
    step = 1e-5 * torch.eye(6, dtype=torch.float64)
    ends = [[cohort.gradients(x + s * e).sum(w) for e in step] for s in (1, -1)]
    expected = (torch.stack(ends[0]) - torch.stack(ends[1])) / 2e-5
    torch.testing.assert_close(at.hessian(w), expected, rtol=1e-6, atol=1e-7)


def counted(random, low=11.0, clients=3):
    """Counts of some 10⁵, of columns with other scales."""
    found = []
    for _ in range(clients):
        X = random.standard_normal((60, 3)) * [1.0, 0.1, 3.0]
        found.append((X, random.poisson(np.exp(low + X @ [0.5, -1.0, 0.1]))))
    return found


@pytest.mark.parametrize("batch", [None, 7])
@pytest.mark.parametrize("far", [0.0, -6.0, 8.0, 40.0])
def test_local_steps_of_counts_never_leap(far, batch):
    """From anywhere every step of full gradients lowers the client's own loss, whatever the rate
    asked for; with minibatches they stay finite.
    """
    cohort = sp.Cohort(
        counted(np.random.default_rng(0)), sp.Linear("poisson", l2=1e-3, intercept=True)
    )
    x = torch.tensor([0.3, 0.2, -0.1, 11.0 + far], dtype=torch.float64)
    for rate in (None, 1e-7, 10.0):
        before = cohort.losses(x)
        for steps in (1, 5, 40):
            plan = LocalPlan(steps, rate, batch_size=batch, key=(1,))
            d = cohort.local_updates(x, None, None, plan).reply.vectors["d"].each()
            assert torch.isfinite(d).all()
            if batch is None:
                after = np.array([cohort.losses(x - own)[i] for i, own in enumerate(d)])
                assert np.all(after < before)
                before = after


def test_counts_are_fitted_from_afar_as_a_generalised_linear_model_is():
    """Poisson and negative binomial regressions of statsmodels, exposures included."""
    sm = pytest.importorskip("statsmodels.api")
    random = np.random.default_rng(2)
    clients = []
    for _ in range(4):
        X = random.standard_normal((150, 2))
        E = np.exp(random.normal(3.0, 0.5, 150))
        mu = E * np.exp(0.4 + X @ [np.log(2.2), -0.3])
        y = random.negative_binomial(1 / 0.5, 1 / (1 + 0.5 * mu))
        clients.append((X, np.column_stack([y, E])))
    X, y = (np.concatenate(part) for part in zip(*clients, strict=True))
    A = np.column_stack([X, np.ones(len(X))])
    for alpha in (0.0, 0.5):
        family = sm.families.NegativeBinomial(alpha=alpha) if alpha else sm.families.Poisson()
        known = sm.GLM(y[:, 0], A, family=family, offset=np.log(y[:, 1])).fit(tol=1e-14)
        model = sp.Linear("poisson", 0.0, True, exposed=True, dispersion=alpha)
        cohort = sp.Cohort(clients, model)
        for x0 in (None, np.array([2.0, -2.0, 9.0])):
            for method in (sp.fair(sp.Average()), sp.MinimaxSums(sp.Average())):
                found = sp.train(method, cohort, 60, 1e-9, x0=x0)
                assert found.certificate <= 1e-6
                np.testing.assert_allclose(found.x, known.params, atol=1e-4)
    settled = sp.Cohort(clients, sp.Linear("poisson", 1e-9, True, exposed=True, dispersion="auto"))
    likelihood = sm.NegativeBinomial(y[:, 0], A, offset=np.log(y[:, 1])).fit(disp=0, maxiter=300)
    assert settled.model.dispersion == pytest.approx(likelihood.params[-1], rel=0.03)
    calm = [
        (X, np.column_stack([random.poisson(E * 2.0), E]))
        for X, (_, E) in ((X, t.T) for X, t in clients)
    ]
    even = sp.Cohort(calm, sp.Linear("poisson", 1e-9, True, exposed=True, dispersion="auto"))
    assert even.model.dispersion < 0.01


@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_beyond_all_numbers_are_not_counted_as_less(alpha, dtype):
    """e^z is no number there: Poisson's loss is none, and the negative binomial's goes on as z/α,
    where it stood still, and certificates with it.
    """
    loss = Poisson(alpha)
    y, _ = encoded(loss, np.array([3.0]), None)
    z = torch.tensor([[80.0, 800.0, 1600.0]], dtype=dtype).T[:, None]
    values = loss.value(z, y.to(dtype))[:, 0]
    if not alpha:
        assert torch.isinf(values[1:]).all()
        return
    known = z[:, 0, 0] / alpha
    np.testing.assert_allclose(values - values[0], known - known[0], rtol=1e-6)
