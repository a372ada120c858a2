"""The discrete Gaussian: its law by exact sums and by counting, the comparison that decides, and
what it costs."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import chisquare, kstest

from scaffpd.privacy import noise
from scaffpd.privacy.accountant import epsilon
from scaffpd.privacy.noise import below, bits_of, discrete_gaussians, exp_bounds, key_stream


def stream(seed=0):
    """Bits for a test; production has no other source than a secret of the operating system."""
    return key_stream(seed.to_bytes(32, "big"))


def scripted(*words):
    """A source that gives these words, and then no more."""
    left = list(words)

    def source(size):
        given = left[:size]
        left[:] = left[size:]
        assert len(given) == size
        return np.array(given, dtype=np.uint64)

    return source


def law(sigma, reach=14):
    """All y within some σ, and their probabilities, by direct summation."""
    y = np.arange(-reach * sigma, reach * sigma + 1)
    weights = np.exp(-(y**2) / (2 * sigma**2))
    return y, weights / weights.sum()


@pytest.mark.parametrize("sigma", [1, 2, 3, 7, 50])
def test_counts_are_those_of_the_law(sigma):
    y, p = law(sigma)
    drawn = discrete_gaussians(stream(1), sigma, 200_000)
    counts = np.bincount(drawn + y[-1], minlength=len(y))
    common = 200_000 * p > 20
    seen, expected = (np.append(v[common], v[~common].sum()) for v in (counts, 200_000 * p))
    assert chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("sigma", [2**30 + 12345, 3 * 2**40 + 7])
def test_fine_grids_look_gaussian_and_have_every_residue(sigma):
    drawn = discrete_gaussians(stream(2), sigma, 50_000)
    assert kstest(drawn / sigma, "norm").pvalue > 1e-3
    assert chisquare(np.bincount(drawn % 16, minlength=16)).pvalue > 1e-3


def proposal(size, V, k, negative, u):
    return [size & (2**k - 1) | negative << 63, 1 << V, u]


@pytest.mark.parametrize("negative", [0, 1])
@pytest.mark.parametrize(("V", "low"), [(0, 0), (0, 5), (1, 3), (2, 0)])
def test_a_proposal_is_accepted_exactly_below_its_probability(V, low, negative):
    """The words around the threshold, one by one: first 64 bits decide where they can, and more
    bits where not."""
    sigma = 7
    k = bits_of(7)
    size = low + (V << k)
    with localcontext() as context:
        context.prec = 80
        a = (Decimal(-(size**2)) / Decimal(2 * sigma**2)).exp() * 2 ** (64 + V)
    at = int(a)
    beyond = int((a - int(a)) * 2**64)
    cases = [
        (at - 2, [], True),
        (at - 2**20, [], True),
        (at + 1, [], False),
        (at + 2**20, [], False),
    ]
    cases += [(at, [beyond - 2], True), (at, [beyond + 2], False)]
    for u, more, accepted in cases:
        if not 0 <= u < 2**64:
            continue
        found = noise._proposed(scripted(*proposal(size, V, k, negative, u), *more), sigma, k, 1)
        never = size == 0 and negative
        assert found.tolist() == ([] if never or not accepted else [-size if negative else size])


def test_bounds_of_the_exponential_hold_and_are_tight():
    random = np.random.default_rng(0)
    with localcontext() as context:
        context.prec = 120
        for _ in range(300):
            q = int(random.integers(1, 2**62)) ** int(random.integers(1, 3))
            p = int(random.uniform(0, 60) * q)
            bits = int(random.choice([64, 70, 128, 200]))
            low, high = exp_bounds(p, q, bits)
            assert low <= (-(Decimal(p) / Decimal(q))).exp() * 2**bits <= high
            assert high - low <= 2


def test_a_certain_event_is_below():
    assert below(scripted(5), 2**64 - 1, 0, 0, 1)  # u < 1 = exp(0)


def test_sigma_is_a_whole_number_in_range():
    for sigma in (0, -1, 2**51):
        with pytest.raises(ValueError, match="whole sigma"):
            discrete_gaussians(stream(), sigma, 1)
    assert len(discrete_gaussians(stream(), 3, 0)) == 0


# --- what it costs, by direct summation of privacy losses


def direct_epsilon(sigma, shift, times, delta):
    """ε of `times` releases of a number that one record moves by `shift`, from the law itself."""
    y, p = law(sigma, 12)
    loss = (shift**2 - 2 * y * shift) / (
        2 * sigma**2
    )  # log P(y)/P(y − shift), on a grid of shift/σ²
    whole = p
    step = shift / sigma**2
    for _ in range(times - 1):
        whole = np.convolve(whole, p)
    first = times * loss[-1]
    losses = first + step * np.arange(len(whole))

    def short(e):
        return (
            float((whole * np.maximum(0, -np.expm1(e - losses[::-1])))[losses[::-1] > e].sum())
            - delta
        )

    return brentq(short, 0, 60)


@pytest.mark.parametrize(
    ("sigma", "shift", "times"), [(20, 20, 1), (40, 10, 1), (40, 20, 3), (64, 8, 5), (30, 1, 1)]
)
def test_the_account_is_that_of_the_direct_sum(sigma, shift, times):
    """Up to 1/σ², on grids far coarser than the package's, which have σ above 2²⁴ and noise to
    spare."""
    accounted = epsilon(times * (shift / sigma) ** 2, 1e-5)
    assert direct_epsilon(sigma, shift, times, 1e-5) == pytest.approx(accounted, abs=1 / sigma**2)
