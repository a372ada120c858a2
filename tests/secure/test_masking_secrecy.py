"""What the server sees: uniform numbers, whatever the data; and what a client refuses so that it
stays like that.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from masking_cases import exchange, parties
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

import scaffpd.secure.masking as party_module
from cases.refusals import refuses
from scaffpd.errors import InputError
from scaffpd.secure.keys import add_stream, derive_key
from scaffpd.secure.masking import Card, FixedPoint, Identity, Party, Terms
from scaffpd.secure.parties import DisclosureGuard, GuardedParty
from scaffpd.secure.terms import Forgotten

NAMES = ["a", "b", "c", "d", "e"]
ALARM = 1e-9  # keys are random: a false alarm once in a thousand million runs


def uniform_enough(numbers):
    """The smallest p-value of four tests for independent uniform 64-bit numbers."""
    data = np.ascontiguousarray(numbers).view(np.uint8)
    ones = int(np.unpackbits(data).sum())
    high = numbers.astype(np.float64) / 2.0**64
    pairs = stats.pearsonr(high[:-1], high[1:])
    return min(
        stats.chisquare(np.bincount(data, minlength=256)).pvalue,
        stats.binomtest(ones, 8 * len(data)).pvalue,
        stats.kstest(high, "uniform").pvalue,
        pairs.pvalue,
    )


VECTORS = {
    "zeros": lambda rng, n: np.zeros(n),
    "ones": lambda rng, n: np.ones(n),
    "small": lambda rng, n: 1e-9 * rng.normal(size=n),
    "at the clip": lambda rng, n: np.full(n, 2.0**10),
    "a pattern": lambda rng, n: np.tile([1.0, -1.0, 0.0, 0.0], n // 4),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_every_client_s_masked_vector_is_uniform(kind):
    rng = np.random.default_rng(0)
    vectors = {name: VECTORS[kind](rng, 20_000) for name in NAMES}
    view = exchange(parties(NAMES), vectors)
    for name in NAMES:
        assert uniform_enough(view.masked[name]) > ALARM
    for first, second in itertools.pairwise(NAMES):
        assert uniform_enough(view.masked[first] - view.masked[second]) > ALARM
        assert uniform_enough(view.masked[first] + view.masked[second]) > ALARM


def test_these_tests_would_notice(monkeypatch):
    """Without masks they fire."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(party_module, "add_stream", lambda total, key, sign: None)
    view = exchange(parties(NAMES), {name: rng.normal(size=20_000) for name in NAMES})
    assert uniform_enough(view.masked["a"]) < ALARM


def test_all_but_one_of_the_clients_together_are_still_uniform():
    """Whatever a server does: a sum over fewer than all clients is as random as each of them, for
    good.
    """
    vectors = {name: np.full(20_000, 3.0) for name in NAMES}
    view = exchange(parties(NAMES), vectors)
    for left_out in NAMES:
        assert uniform_enough(sum(view.masked[name] for name in NAMES if name != left_out)) > ALARM
    assert np.array_equal(
        sum(view.masked.values()), sum(FixedPoint.finest(5, 10).encode(v) for v in vectors.values())
    )


def test_all_but_the_colluding_are_still_uniform_without_one_of_them():
    """t clients show the server their secrets: it can take their streams away, and is left with the
    others' sum.
    """
    clients = parties(NAMES)
    numbers = FixedPoint.finest(5, 10)
    view = exchange(clients, {name: np.full(20_000, 3.0) for name in NAMES}, numbers, 2)
    terms = Terms(tuple(NAMES), 2)
    bad = NAMES[:2]
    good = NAMES[2:]

    def without(names):
        total = sum(view.masked[name] for name in names)
        for name in names:
            for other in {*terms.neighbours(name)} & {*bad}:
                salt = terms.digest + repr(numbers).encode() + b"one question"
                key = derive_key(clients[other]._shared(name), salt, "stream")
                add_stream(total, key, -party_module.sign(name, other))
        return total

    assert np.array_equal(without(good), 3 * numbers.encode(np.full(20_000, 3.0)))
    for names in itertools.chain(itertools.combinations(good, 1), itertools.combinations(good, 2)):
        assert uniform_enough(without(names)) > ALARM


@pytest.mark.parametrize("liar", NAMES)
def test_a_server_that_asks_somebody_something_else_gets_noise(liar):
    view = exchange(
        parties(NAMES), {name: np.zeros(20_000) for name in NAMES}, told={liar: b"another question"}
    )
    assert uniform_enough(view.total) > ALARM


def test_no_stream_is_used_twice():
    """Not for another question, and not by another process of the same client."""
    clients = parties(NAMES)
    numbers = FixedPoint.finest(5, 3)
    terms = Terms(tuple(NAMES), 1)
    ones = np.ones(20_000)
    first = clients["a"].mask(terms, b"x", numbers, ones)
    assert np.array_equal(first, clients["a"].mask(terms, b"x", numbers, ones))  # asked once more
    assert uniform_enough(first - clients["a"].mask(terms, b"x + 1e-12", numbers, ones)) > ALARM
    later = Party(Identity("a", clients["a"].identity._key))
    later.meet([clients[name].identity.card for name in NAMES[1:]])
    assert uniform_enough(first - later.mask(terms, b"x", numbers, ones)) > ALARM


def test_a_key_that_is_stolen_later_opens_nothing():
    """Long-term keys alone do not give the secret of two processes that are gone."""
    clients = parties(["a", "b"])
    cards = {}
    for name, client in clients.items():
        cards[name] = client.identity.card
    secret = clients["a"]._shared("b")
    later = Identity("a", clients["a"].identity._key)  # the thief's process has keys of its own
    assert later.card.key == cards["a"].key
    assert later.agreed(cards["b"]) != secret


def bits(view):
    """Everything that the server has received, as one row of features."""
    return np.concatenate([np.unpackbits(view.masked[name].view(np.uint8)) for name in NAMES])


def test_flipping_one_client_s_data_changes_nothing_that_the_server_sees_of_the_others():
    """Two worlds with the same sum: a's data flipped, and b's with it. Nobody can tell the views
    apart better than by tossing a coin, and every client's view has the same distribution in both.
    """
    rng = np.random.default_rng(1)
    clients = parties(NAMES)
    base = {name: rng.normal(size=4) for name in NAMES}
    flip = {**base, "a": -base["a"], "b": base["b"] + 2 * base["a"]}
    rounds = 150
    views = [
        exchange(clients, world, asked=bytes([r, k]))
        for r in range(rounds)
        for k, world in enumerate((base, flip))
    ]
    assert all(np.array_equal(view.total, views[0].total) for view in views[::2])
    assert (
        np.abs((views[0].total - views[1].total).view(np.int64)).max() <= 2
    )  # the sum is the same, but for rounding
    X = np.stack([bits(view) for view in views])
    y = np.arange(2 * rounds) % 2
    score = cross_val_score(LogisticRegression(C=0.01, max_iter=200), X, y, cv=5).mean()
    assert abs(score - 0.5) < 6 * np.sqrt(0.25 / (2 * rounds))
    for name in NAMES:
        first, second = (np.concatenate([v.masked[name] for v in views[k::2]]) for k in (0, 1))
        assert stats.ks_2samp(first.astype(float), second.astype(float)).pvalue > ALARM


def test_a_client_wants_to_be_safe_from_as_many_as_it_says():
    wary = Party(Identity("a"), least=3)
    with pytest.raises(InputError, match="tolerate 3 colluding clients, not 1"):
        wary.mask(Terms(tuple(NAMES), 1), b"", FixedPoint.finest(5, 3), np.ones(2))
    with pytest.raises(InputError, match="not for this client"):
        wary.mask(Terms(("x", "y", "z"), 1), b"", FixedPoint.finest(5, 3), np.ones(2))
    with pytest.raises(InputError, match="for fewer clients"):
        wary.mask(Terms(tuple(NAMES), 3), b"", FixedPoint.finest(4, 3), np.ones(2))
    with pytest.raises(Forgotten, match="has not met"):
        wary.mask(Terms(tuple(NAMES), 3), b"", FixedPoint.finest(5, 3), np.ones(2))


def test_a_restarted_client_has_to_be_met_again():
    clients = parties(NAMES)
    vectors = {name: np.ones(2) for name in NAMES}
    clients["a"] = Party(Identity("a", clients["a"].identity._key))
    for other in NAMES[1:]:
        clients[other].meet([clients["a"].identity.card])
        clients["a"].meet([clients[other].identity.card])
    assert np.allclose(FixedPoint.finest(5, 10).decode(exchange(clients, vectors).total), 5)


def test_what_is_printed_of_a_client_has_no_secret():
    clients = parties("abc")
    exchange(clients, {name: np.ones(2) for name in clients})
    secret, *_ = clients["a"]._agreed.values()
    shown = repr(GuardedParty(clients["a"], DisclosureGuard(), 0.9))
    assert not any(
        text in shown for text in (repr(secret), secret.hex(), clients["a"].identity.secret().hex())
    )


def test_strangers_and_too_many_cards():
    north = Identity("north")
    south = Identity("south")
    wary = Party(north, pins={"south": south.card.fingerprint})
    wary.meet([south.card])
    with refuses("key-not-pinned"):
        wary.meet([Identity("sybil").card])
    many = [Card(str(i), bytes(32), bytes(32)) for i in range(party_module.MOST_CARDS + 1)]
    with refuses("too-many-clients"):
        Party(north).meet(many)


def test_a_key_of_small_order_is_refused():
    client = Party(Identity("a"))
    client.meet([Card("b", bytes(32), Identity("b").card.once), Identity("c").card])
    with pytest.raises(InputError, match="cannot be used"):
        client.mask(Terms(("a", "b", "c"), 1), b"", FixedPoint.finest(3, 3), np.ones(2))


def test_pins_and_keys_that_change():
    north = Identity("north")
    south = Identity("south")
    wary = Party(north, pins={"south": south.card.fingerprint})
    wary.meet([north.card, south.card])
    with pytest.raises(InputError, match="not the one that is pinned"):
        Party(north, pins={"south": "0" * 64}).meet([south.card])
    with pytest.raises(InputError, match="another key than before"):
        wary.meet([Identity("south").card])
    with pytest.raises(InputError, match="in the name of 'north'"):
        wary.meet([Identity("north").card])


def test_a_key_is_kept_in_a_file_of_its_owner(tmp_path):
    path = tmp_path / "identity.key"
    first = Identity.stored("north", path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.stored("north", path).card.fingerprint == first.card.fingerprint
    path.chmod(0o644)
    with pytest.raises(InputError, match="others can read"):
        Identity.stored("north", path)
    path.chmod(0o600)
    path.write_text("nonsense")
    with pytest.raises(InputError, match="cannot be read"):
        Identity.stored("north", path)


@pytest.mark.parametrize(
    "broken",
    [None, {}, {"name": "a", "key": "00", "once": "00"}],
)
def test_cards_from_the_wire_are_checked(broken):
    with pytest.raises(InputError, match="cannot be read"):
        Card.of(broken)


def test_a_client_that_was_restarted_after_it_showed_its_card_says_so():
    before = Identity("a")
    other = Identity("b")
    shown = before.card
    later = Party(Identity("a", before._key))
    with pytest.raises(Forgotten, match="restarted after it showed that card"):
        later.meet([shown, other.card])
    later.meet([later.identity.card, other.card])
    assert set(later.known) == {"b"}
