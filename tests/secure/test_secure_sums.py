"""Every masked sum is the plain one, and costs what messages would carry; what cannot be is said in
a sentence.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_cases import SIZES, clients, cohort, network, off, secure

import scaffpd as sp
from scaffpd.errors import InputError
from scaffpd.federation import LocalPlan, ProximalPlan
from scaffpd.secure.masking import Identity, Party, Terms
from scaffpd.secure.parties import PRECISE, DisclosureGuard, GuardedParty, Weighting

N = len(SIZES)
D = 4
PLAN = LocalPlan(3, snapshot=2)
WEIGHTS = st.one_of(
    st.just(0.0),
    st.floats(1e-3, 1),
    st.floats(-1, -1e-3),
    st.floats(1e-30, 1e-20),
    st.floats(1e20, 1e30),
)
SCALES = st.lists(st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e12]), min_size=D, max_size=D)


def close(seen, terms, weights):
    """To 1e-12 of the largest of all terms w_i v_i."""
    expected = (np.asarray(weights)[:, None] * terms).sum(0)
    largest = np.abs(np.asarray(weights)[:, None] * terms).max()
    assert np.abs(np.asarray(seen) - expected).max() <= 1e-12 * largest + 1e-200


PLAIN = cohort()
MASKED = secure(cohort(), projections=True)
POINT = torch.tensor([0.3, -2.0, 1e-6, 5.0], dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(WEIGHTS, min_size=N, max_size=N), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_gradients_updates_and_snapshots(weights, scale):
    w = np.array(weights)
    x = scale * POINT
    at = PLAIN.gradients(x)
    seen = MASKED.gradients(x)
    np.testing.assert_array_equal(seen.losses, at.losses)
    close(seen.sum(w), at.each().numpy(), w)
    np.testing.assert_array_equal(seen.project(POINT), at.project(POINT))
    np.testing.assert_array_equal(seen.norms(), at.norms())
    close(seen.diagonal(w), at.diagonals().numpy(), w)
    work = PLAIN.local_updates(x, at, POINT, PLAN)
    masked = MASKED.local_updates(x, seen, POINT, PLAN)
    close(masked.sum(w), work.each().numpy(), w)
    close(masked.snapshot(w), work.reply.vectors["snapshot"].each().numpy(), w)
    np.testing.assert_array_equal(masked.norms(), work.norms())


@settings(max_examples=15, deadline=None)
@given(weights=st.lists(WEIGHTS, min_size=N, max_size=N), k=st.integers(1, 3))
def test_curvature_and_local_models(weights, k):
    w = np.array(weights)
    metric = torch.full((D,), 2.0, dtype=torch.float64)
    V = torch.from_numpy(np.random.default_rng(k).standard_normal((D, k)))
    at = PLAIN.gradients(POINT)
    seen = MASKED.gradients(POINT)
    terms = np.stack([at.restriction(V, np.eye(N)[i], metric).curvature.ravel() for i in range(N)])
    plain = at.restriction(V, w, metric)
    masked = seen.restriction(V, w, metric)
    close(masked.curvature.ravel(), terms, w)
    np.testing.assert_array_equal(masked.slopes, plain.slopes)
    np.testing.assert_array_equal(masked.sizes, plain.sizes)
    plan = ProximalPlan(0.5, metric)
    work = PLAIN.proximal_steps(at, POINT, plan)
    close(MASKED.proximal_steps(seen, POINT, plan).sum(w), work.each().numpy(), w)


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(WEIGHTS, min_size=N, max_size=N),
    scales=st.lists(
        st.sampled_from([0.0, 1e-300, 1e-12, 1.0, 1e12, 1e100]), min_size=N, max_size=N
    ),
)
def test_vectors_that_clients_keep_may_be_of_any_size(weights, scales):
    w = np.array(weights)
    own = np.array(scales)[:, None] * np.random.default_rng(0).standard_normal((N, D))
    memory = MASKED.memory()
    for i in range(N):
        memory = memory.plus(1.0, torch.from_numpy(own[i]), [i])
    close(memory.sum(w), own, w)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), scales=SCALES)
def test_some_clients_and_columns_of_very_different_sizes(data, scales):
    chosen = sorted(data.draw(st.sets(st.integers(0, N - 1), min_size=3)))
    rows = [(X * scales, y) for X, y in clients()]
    model = sp.Linear("squared", l2=0.1)
    plain = sp.Cohort(rows, model)
    masked = secure(sp.Cohort(rows, model))
    w = np.zeros(N)
    w[chosen] = np.random.default_rng(0).random(len(chosen))
    seen = masked.gradients(POINT, clients=chosen)
    close(seen.sum(w), plain.gradients(POINT).each().numpy(), w)
    assert np.isnan(seen.losses).sum() == N - len(chosen)


def test_vectors_that_grow_and_shrink_find_their_clip():
    federation = secure(cohort())
    exchanges = []
    for power in (0, 8, -40, 60, 60, 60, -200):
        x = POINT * 2.0**power
        before = federation.traffic.exchanges
        sum_ = federation.gradients(x).sum(np.full(N, 0.2))
        exchanges.append(federation.traffic.exchanges - before)
        assert off(sum_, cohort().gradients(x).sum(np.full(N, 0.2))) <= 1e-12
    assert exchanges[4] == exchanges[5] == 2  # losses, masked vectors
    assert max(exchanges) <= 7


def test_the_same_sum_is_not_asked_for_twice():
    federation = secure(cohort())
    at = federation.gradients(POINT)
    first = at.sum(np.full(N, 0.2))
    before = federation.traffic.snapshot()
    assert at.sum(np.full(N, 0.2)) is first
    assert federation.traffic == before


@pytest.mark.parametrize("up", [True, False])
def test_weights_that_differ_by_a_last_digit_are_the_same_weights(up):
    """λ is computed anew for the same point, and may round to the other side; clients would refuse
    the second sum.
    """
    federation = secure(cohort(), share=0.9)
    weights = np.linspace(0.1, 0.3, N)
    unit = 2.0 ** (-2 - PRECISE)  # between the numbers next to 0.2 of so many digits
    weights[1] = (round(0.2 / unit) + 0.5) * unit
    at = federation.gradients(POINT)
    first, second = (np.nextafter(weights, end) for end in ((1.0, 0.0) if up else (0.0, 1.0)))
    close(at.sum(first), PLAIN.gradients(POINT).each().numpy(), first)
    close(at.sum(second), PLAIN.gradients(POINT).each().numpy(), second)
    with pytest.raises(InputError, match="sums with other weights"):
        at.sum(weights + 1e-9 * (np.arange(N) == 1))


class Weighed:
    """A channel whose messages are weighed: what arrays of the wire's own format would carry."""

    def __init__(self, channel):
        self._channel = channel
        self.up = 0
        self.down = 0
        self.messages = 0

    def __getattr__(self, name):
        return getattr(self._channel, name)

    def mask(self, wanted, length):
        replies = self._channel.mask(wanted, length)
        self.messages += len(replies)
        for reply in replies.values():
            self.up += 0 if reply.vector is None else reply.vector.nbytes
            self.down += wanted.weights.values.nbytes
        return replies


@pytest.mark.parametrize(
    "method", [sp.ScaffPD(sp.ChiSquare(0.05), local_steps=2), sp.FedAvg(), sp.DRFA(sp.Average())]
)
@pytest.mark.parametrize("clients_", [3, 5, 12])
def test_traffic_is_what_messages_would_carry(method, clients_):
    federation = secure(cohort(sizes=SIZES * 3 if clients_ > 5 else SIZES[:clients_]))
    secure_sums = federation.sums.sums
    secure_sums.parties = weighed = Weighed(secure_sums.parties)
    before = federation.traffic.snapshot()
    federation.count = lambda **_: None  # x, losses and corrections are counted as in plain runs
    sp.train(method, federation, rounds=5, seed=3)
    up = federation.traffic.bytes_up - before.bytes_up
    down = federation.traffic.bytes_down - before.bytes_down
    assert weighed.up <= up <= weighed.up + 32 * weighed.messages
    assert weighed.down <= down <= weighed.down + 32 * weighed.messages
    assert weighed.messages > 15


def test_record_sees_every_masked_vector():
    seen = []
    federation = secure(
        cohort(),
        record=lambda kind, client, array: seen.append((kind, client, array.dtype, len(array))),
    )
    sp.train(sp.ScaffPD(sp.ChiSquare(0.05), local_steps=2), federation, rounds=4)
    assert {kind for kind, *_ in seen} == {"c", "d"}
    for kind, sums in (("c", 5), ("d", 4)):
        of_kind = [client for k, client, *_ in seen if k == kind]
        assert {of_kind.count(name) for name in federation.names} == {sums}
    assert {(dtype, length) for *_, dtype, length in seen} == {(np.dtype(np.uint64), D)}


@pytest.mark.parametrize("share", [0.9, 0.3])
def test_nobody_is_nearly_all_of_a_sum(share):
    federation = sp.SecureAggregation(cohort(), share=share)
    at = federation.gradients(POINT)
    w = np.array([share + 0.05, 0.0, 0.0, 0.0, 0.95 - share])
    with pytest.raises(
        InputError, match=r"'client-0' would make up .* of a sum.*allow a larger share"
    ):
        at.sum(w)
    with pytest.raises(InputError, match="'client-4'"):
        at.sum(np.array([0, 0, 0, 0, -1.0]))
    at.sum(np.zeros(N))
    if share == 0.9:
        at.sum(np.array([0.9, 0.1, 0, 0, 0]))
    else:
        with pytest.raises(InputError, match="caps weights"):
            sp.train(sp.ScaffPD(sp.Agnostic(), local_steps=5), federation, rounds=300, tol=1e-9)


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_clients(n):
    with pytest.raises(InputError, match=f"at least 3 clients with different names, got {n}"):
        secure(cohort(sizes=SIZES[:n]))


@pytest.mark.parametrize("drawn", [1, 2])
def test_too_few_clients_in_a_round(drawn):
    with pytest.raises(InputError, match=f"at least 3 clients with different names, got {drawn}"):
        sp.train(sp.FedAvg(clients_per_round=drawn), secure(cohort()), rounds=2)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"colluding": 0}, "1 <= colluding"),
        ({"colluding": -1}, "1 <= colluding"),
        ({"colluding": 4}, "1 <= colluding <= 3, got 4"),
        ({"share": 0}, "0 < share <= 1"),
        ({"share": 1.01}, "0 < share <= 1"),
        ({"share": float("nan")}, "share"),
        ({"share": "half"}, "share"),
    ],
)
def test_settings_that_cannot_be(limits, sentence):
    with pytest.raises(InputError, match=sentence):
        sp.SecureAggregation(cohort(), **limits)


@pytest.mark.parametrize("value", [1.5, "one", True])
def test_numbers_of_clients_are_whole(value):
    with pytest.raises(InputError, match="colluding"):
        sp.SecureAggregation(cohort(), colluding=value)


@pytest.mark.parametrize("thing", [None, [cohort()], "cohort", secure(cohort())])
def test_only_a_cohort_or_a_deployed_federation(thing):
    with pytest.raises(InputError, match="takes a Cohort or a deployed federation"):
        sp.SecureAggregation(thing)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_vectors_that_are_no_numbers(bad):
    federation = secure(cohort())
    x = POINT.clone()
    x[1] = bad
    with pytest.raises(InputError, match="NaN or infinite"):
        federation.gradients(x).sum(np.full(N, 0.2))
    w = np.full(N, 0.2)
    w[2] = bad
    with pytest.raises(InputError, match=r"NaN or infinite|share"):
        federation.gradients(POINT).sum(w)


def test_weights_of_those_who_were_not_asked():
    at = secure(cohort()).gradients(POINT, clients=[0, 1, 2])
    with pytest.raises(InputError, match="zero for clients that were not asked"):
        at.sum(np.full(N, 0.2))


def test_what_servers_must_not_see_is_refused():
    federation = secure(cohort())
    at = federation.gradients(POINT)
    for question in (at.each, at.diagonals, lambda: at.project(POINT)):
        with pytest.raises(InputError, match="hide every client's own vector"):
            question()
    with pytest.raises(InputError, match="several directions"):
        at.restriction(
            torch.eye(D, dtype=torch.float64), np.full(N, 0.2), torch.ones(D, dtype=torch.float64)
        )
    with pytest.raises(InputError, match="hide every client's own vector"):
        federation.local_updates(POINT, at, None, LocalPlan(1)).each()
    with pytest.raises(InputError, match="no snapshot"):
        federation.local_updates(POINT, at, None, LocalPlan(1)).snapshot(np.full(N, 0.2))


def test_the_certificate_allows_for_the_number_format():
    """A sum is off by less than the bound that the certificate is told of."""
    federation = secure(cohort())
    plain = cohort()
    w = np.full(N, 0.2)
    at = federation.gradients(POINT)
    before = at.rounding[1]
    c = at.sum(w)
    added = at.rounding[1] - before
    assert (added > 0).all()
    assert np.linalg.norm(c.numpy() - plain.gradients(POINT).sum(w).numpy()) <= w @ at.rounding[1]
    assert (
        added.max() <= 1e-13 * float(c.norm()) * N**2
    )  # weights have 46 digits, of which the last may differ


def test_the_federation_says_what_it_is():
    federation = secure(cohort())
    assert federation.fingerprint == cohort().fingerprint
    assert repr(federation).startswith("Secure sums over ")
    assert federation.constants().first_order
    assert not secure(cohort(), projections=True).constants().first_order
    assert federation.channel.absent == 0
    assert isinstance(federation, sp.federation.Federation)
    np.testing.assert_array_equal(federation.start(), cohort().start())
    assert secure(network()).dimension == network().dimension


@settings(max_examples=60, deadline=None)
@given(weight=st.floats(1e-6, 1.0), largest=st.floats(1e-3, 1e3))
def test_a_vector_shows_one_size_whatever_its_weight(weight, largest):
    """Or a server could bisect weights until it knows the largest entry to all digits."""
    party = GuardedParty(Party(Identity("a")), DisclosureGuard(), 1.0)
    terms = Terms(("a", "b", "c"), 1)
    shown, alone = (
        party.answer(
            Weighting(terms, np.array([own, 1.0, 1.0])), None, np.array([largest, 0.0]), b""
        ).exponent
        for own in (weight, 1.0)
    )
    assert shown - alone == int(np.ceil(np.log2(weight)))
    assert weight * largest <= 2.0**shown
