"""Cox's model: against loops over rows, other packages, and 150 digits."""

import numpy as np
import pytest
import torch

import cox_truth
import scaffpd as sp
from cases.refusals import refuses
from scaffpd.models.baseline import concordance
from scaffpd.models.risk_sets import TIES, PartialLikelihood, RiskSets
from scaffpd.models.samples import Ragged


def clients(seed=0, sizes=(40, 25, 60), d=3, ties=True, entry=False):
    """Clients with different baselines; times in few steps, so that many events are tied."""
    random = np.random.default_rng(seed)
    effect = random.standard_normal(d) / 2
    pairs = []
    for i, n in enumerate(sizes):
        X = random.standard_normal((n, d)) + 5
        own = random.exponential(np.exp(-(X - 5) @ effect)) * (i + 1)
        left = random.exponential(2 * (i + 1), n)
        time = np.minimum(own, left)
        time = np.ceil(4 * time) / 4 if ties else time
        # in odd sixteenths, which are no event times: packages differ in who enters there
        begin = (np.floor(8 * random.random(n) * (time - 0.125)) + 0.5) / 8
        begin = np.where(random.random(n) < 0.5, 0, np.maximum(begin, 0))
        pairs.append((X, np.column_stack([time, own <= left, *[begin] * entry])))
    return pairs


def naive(z, y, ties):
    time, event, entry, w = y.T
    total = torch.zeros((), dtype=torch.float64)
    weight = torch.from_numpy(w.copy())
    for t in np.unique(time[(event > 0) & (w > 0)]):
        D = np.flatnonzero((time == t) & (event > 0) & (w > 0))
        R = np.flatnonzero((time >= t) & (entry < t))
        for k in range(len(D)):
            less = k / len(D) if ties == "efron" else 0.0
            s = (weight[R] * z[R].exp()).sum() - less * (weight[D] * z[D].exp()).sum()
            total = total + w[D].mean() * s.log()
        total = total - (weight[D] * z[D]).sum()
    return total


@pytest.mark.parametrize("trial", range(8))
@pytest.mark.parametrize("ties", TIES)
def test_value_and_derivatives_of_the_likelihood(trial, ties):
    random = np.random.default_rng(trial)
    sizes = random.integers(1, 20, 3).tolist()
    n = sum(sizes)
    time = np.ceil(random.exponential(5, n))
    event = random.random(n) < random.random()
    entry = np.floor(random.random(n) * time) * (random.random(n) < 0.5) * (trial % 2)
    weight = random.choice([0.0, 0.5, 1.0, 2.0], n) if trial % 3 == 0 else np.ones(n)
    y = np.column_stack([time, event, entry, weight])
    risk = RiskSets(torch.from_numpy(y), Ragged(sizes, torch.device("cpu"), torch.float64), ties)
    z = torch.from_numpy(random.normal(0, 2, n))
    found = PartialLikelihood(risk, z)
    T = torch.from_numpy(random.standard_normal((n, 2)))
    bent = found.bend(T)
    start = 0
    for i, size in enumerate(sizes):
        own = slice(start, start + size)
        start += size

        def value(part, y=y[own]):
            return naive(part, y, ties)

        g = torch.autograd.functional.jacobian(value, z[own])
        H = torch.autograd.functional.hessian(value, z[own])
        torch.testing.assert_close(found.value[i], value(z[own]), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.residual[own], g, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(bent[own], H @ T[own], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("entry", [False, True])
def test_no_digits_are_lost_where_one_row_outweighs_all_others(entry):
    """The row with e^{800} leaves first; differences of sums would be nothing."""
    time = np.array([1.0, 2.0, 3.0, 4.0])
    begin = np.array([0.0, 0.5, 0.0, 0.5]) * entry
    y = torch.from_numpy(np.column_stack([time, np.ones(4), begin, np.ones(4)]))
    risk = RiskSets(y, Ragged([4], torch.device("cpu"), torch.float64), "efron")
    z = torch.tensor([800.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    found = PartialLikelihood(risk, z)
    rest = [np.exp(z[k:].numpy()).sum() for k in (1, 2, 3)]
    true = np.log(rest).sum() - 3.0
    assert float(found.value[0]) == pytest.approx(true, rel=1e-14)
    share = np.exp(1.0) * (1 / rest[0] + 1 / rest[1])
    assert float(found.q[2]) == pytest.approx(share, rel=1e-13)


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("ties", TIES)
def test_coefficients_are_those_of_a_stratified_fit(ties, entry):
    PHReg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    pairs = clients(1, sizes=(50, 50, 50), entry=entry)
    model = sp.Linear("cox", l2=1e-8, ties=ties, entry=entry)
    found = sp.train(sp.fair(sp.Average()), sp.Cohort(pairs, model), 20, 1e-9)
    X, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    owner = np.repeat(range(3), 50)
    begin = y[:, 2] if entry else None
    theirs = PHReg(y[:, 0], X, y[:, 1], entry=begin, strata=owner, ties=ties).fit()
    np.testing.assert_allclose(found.x, theirs.params, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_effects_of_one_client_and_their_errors_are_those_of_lifelines():
    import pandas as pd
    from lifelines import CoxPHFitter

    ((X, y),) = clients(2, sizes=(120,))
    fitter = CoxPHFitter()
    fitter.fit(pd.DataFrame(X, columns=list("abc")).assign(t=y[:, 0], e=y[:, 1]), "t", "e")
    found = sp.coefficients(sp.Cohort([(X, y)], sp.Linear("cox", l2=0.0)))
    np.testing.assert_allclose(found.estimate, fitter.params_, atol=1e-4)
    np.testing.assert_allclose(found.error, fitter.standard_errors_, rtol=1e-4)


def test_every_method_finds_the_same_optimum_and_a_loss_counts_from_knowing_nothing():
    pairs = clients(4, sizes=(12, 9), entry=True)
    model = sp.Linear("cox", l2=0.2, entry=True)
    for one in (model, sp.Personal(model, 2.0)):
        cohort = sp.Cohort(pairs, one)
        goal = sp.ChiSquare(rho=0.1)
        methods = sp.fair(goal), sp.SubspaceSaddle(goal), sp.ScaffPD(goal, local_steps=3)
        ends = [sp.train(m, cohort, 60, 1e-7) for m in methods]
        for end in ends:
            assert end.certificate <= 1e-7
            np.testing.assert_allclose(end.x, ends[0].x, atol=2e-3)
    shared = sp.Cohort(pairs, model)
    np.testing.assert_array_equal(shared.losses(shared.start()), 0)


def test_hessians_and_proximal_steps_are_those_of_differences():
    cohort = sp.Cohort(clients(6, entry=True), sp.Linear("cox", [0.1, 0.2, 0.3], entry=True))
    x = torch.tensor([0.1, -0.4, 0.2], dtype=torch.float64)
    point = cohort.channel.train.oracle.evaluate(x)
    H = point.curvatures(torch.eye(3, dtype=torch.float64))
    e = 1e-6
    for k in range(3):
        unit = e * torch.eye(3, dtype=torch.float64)[k]
        change = cohort.gradients(x + unit).each() - cohort.gradients(x - unit).each()
        torch.testing.assert_close(H[:, k], change / (2 * e), rtol=1e-6, atol=1e-8)
    L = torch.from_numpy(cohort.constants().smoothness)
    assert (torch.linalg.eigvalsh(H)[:, -1] <= L).all()
    torch.testing.assert_close(point.diagonals(), H.diagonal(dim1=1, dim2=2))
    w = torch.linspace(0.1, 0.9, len(H), dtype=torch.float64)
    torch.testing.assert_close(point.hessian(w), torch.tensordot(w, H, 1))


def test_the_strength_by_evidence_is_that_of_a_search():
    """log E = −min_x [n f(x) + |x|²/2ω] − ½ log det(I + ω n H), over a grid of ω."""
    pairs = clients(7, sizes=(80, 90, 70), ties=False)
    sizes = np.array([80.0, 90.0, 70.0])
    n = sizes.sum()
    found = sp.Cohort(pairs, sp.Linear("cox", l2="auto", groups=("all",) * 3)).strengths
    rows = []
    for omega in found.omega[0] * np.geomspace(0.2, 5, 9):
        cohort = sp.Cohort(pairs, sp.Linear("cox", l2=1 / (n * omega)))
        end = sp.train(sp.fair(sp.Average(prior=sizes)), cohort, 20, 1e-9)
        at = cohort.gradients(torch.from_numpy(end.x))
        H = n * np.tensordot(sizes / n, at.hessians().numpy(), 1)
        fit = float(sizes @ at.losses)
        rows.append(-fit - np.linalg.slogdet(omega * H)[1] / 2)
    assert np.argmax(rows) == 4


def test_powers_of_losses_below_zero_are_refused():
    cohort = sp.Cohort(clients(3), sp.Linear("cox", l2=0.05))
    for method in (sp.fair(sp.QFair(1.0)), sp.QFFL(local_rate=0.1), sp.MinimaxSums(sp.QFair(1.0))):
        with refuses("cox-below-zero"):
            sp.train(method, cohort, 5)
    sp.train(sp.QFFL(q=0.0, local_rate=0.1), cohort, 2)  # the average


def test_fair_ends_within_twenty_rounds_at_hard_points():
    rounds = []
    for seed in range(16):
        cohort = cox_truth.drawn(np.random.default_rng(seed)).cohort()
        found = sp.train(sp.fair(sp.ChiSquare(rho=0.1)), cohort, 20, 1e-6)
        assert found.status in ("converged", "precision"), seed
        rounds.append(found.rounds)
    assert np.median(rounds) <= 4


def test_certificates_hold_at_hard_points():
    for seed in range(5):
        broken, _ = cox_truth.judged(np.random.default_rng(seed))
        assert not broken


def test_concordance_counts_pairs():
    random = np.random.default_rng(0)
    time = np.ceil(random.exponential(5, 60))
    event = (random.random(60) < 0.6).astype(float)
    risk = np.round(random.standard_normal(60), 1)
    right = pairs = 0.0
    for i in range(60):
        for j in range(60):
            first = time[i] < time[j] or (time[i] == time[j] and not event[j])
            if event[i] and first and i != j:
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 * (risk[i] == risk[j])
    assert concordance(time, event, risk) == right / pairs
    assert np.isnan(concordance(time, 0 * event, risk))


def test_what_cannot_be_is_refused():
    X, y = clients()[0]
    cohort = sp.Cohort([(X, y)], sp.Linear("cox"))
    with refuses("cox-minibatches"):
        cohort.gradients(cohort.start(), 4)
    with refuses("cox-minibatches"):
        sp.train(sp.ScaffPD(sp.Average(), 3, batch_size=4), cohort, 2)
    with refuses("cox-intercept"):
        sp.Linear("cox", intercept=True)
    with refuses("entry-without-times"):
        sp.Linear("squared", entry=True)
    with refuses("private-cox"):
        sp.Private(sp.Linear("cox"))
    with refuses("unsupported-dtype"):
        sp.Cohort([(X, y)], sp.Linear("cox"), dtype=torch.float32)
    for column, value, code in (
        (0, 0.0, "time-not-positive"),
        (0, -3.0, "time-not-positive"),
        (1, 2.0, "event-not-binary"),
    ):
        wrong = y.copy()
        wrong[7, column] = value
        with refuses(code) as caught:
            sp.Cohort([(X, wrong)], sp.Linear("cox"))
        assert "row 7" in str(caught.value)
    late = np.column_stack([y, y[:, 0]])
    with refuses("entry-after-time"):
        sp.Cohort([(X, late)], sp.Linear("cox", entry=True))
    with refuses("survival-columns"):
        sp.Cohort([(X, y[:, 0])], sp.Linear("cox"))


def test_columns_that_say_nothing_at_a_client_have_no_strength_there():
    """Constant columns, and columns that are constant among those at risk, have no curvature."""
    X, y = clients(9, sizes=(30,))[0]
    last = y[:, 0] >= np.median(y[:, 0])
    more = np.column_stack([X, np.full(30, 0.1), np.where(last, 0.3, 0.1 * X[:, 0])])
    y[:, 1] *= last
    cohort = sp.Cohort([(more, y)], sp.Linear("cox", l2="auto"))
    assert np.isfinite(cohort.strengths.l2).all()
    at = cohort.gradients(cohort.start())
    H = at.hessians().numpy()[0] - np.diag(cohort.strengths.l2)
    np.testing.assert_allclose(H[3:], 0, atol=1e-15)
