"""What the server sees: uniform numbers, whatever the data; and what a client refuses so that it stays like that."""

from __future__ import annotations

import copy
import datetime
import itertools

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from masking_cases import exchange, parties
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from scaffpd.errors import InputError
from scaffpd.masking import Aggregator, Card, FixedPoint, Identity, Opened, Party, Terms, keys
from scaffpd.masking import exchange as party_module
from scaffpd.masking.keys import Authority, add_stream

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
    """Without any one kind of mask they fire: on the vectors, or on what is left of them in the sum."""
    rng = np.random.default_rng(0)
    vectors = {name: rng.normal(size=20_000) for name in NAMES}
    monkeypatch.setattr(party_module, "add_stream", lambda total, key, sign: None)
    clients = parties(NAMES)
    terms = Terms.usual("bare", NAMES, None, None)
    server = Aggregator(terms, {name: clients[name].share(terms) for name in NAMES}, 20_000)
    bare = clients["a"].mask("bare", server.around("a"), FixedPoint.finest(5, 10), vectors["a"])
    assert uniform_enough(bare) < ALARM


def test_all_but_one_of_the_clients_together_are_still_uniform():
    """What a server can do without shares: any sum over fewer than all clients is as random as each of them."""
    vectors = {name: np.full(20_000, 3.0) for name in NAMES}
    view = exchange(parties(NAMES), vectors)
    for left_out in NAMES:
        assert uniform_enough(sum(view.masked[name] for name in NAMES if name != left_out)) > ALARM
    assert uniform_enough(sum(view.masked.values())) > ALARM  # the masks b_i are still on it


def test_a_vector_that_comes_late_stays_hidden():
    """The others were told that a has left, and gave shares of its key: its own mask b still covers its vector."""
    clients, numbers = parties(NAMES), FixedPoint.finest(5, 10)
    terms = Terms("late", tuple(NAMES), 2, 1)
    server = Aggregator(terms, {name: clients[name].share(terms) for name in NAMES}, 20_000)
    sent = {name: clients[name].mask("late", server.around(name), numbers, np.ones(20_000)) for name in NAMES}
    for name in NAMES[1:]:
        server.take(name, sent[name])
    total = server.open({name: clients[name].reveal("late", NAMES[1:]) for name in NAMES[1:]})
    assert np.allclose(numbers.decode(total), 4.0)
    late = copy.copy(sent["a"])
    key = party_module.private_key(clients["a"]._open["late"].key, terms)  # as the server can put it together
    for other in terms.neighbours("a"):
        seen = server._opened[other].key
        add_stream(late, party_module.pair_seed(key, seen, terms, "a", other), -party_module.sign("a", other))
    assert uniform_enough(late) > ALARM
    add_stream(late, party_module.mask_seed(clients["a"]._open["late"].mask, terms), -1)
    assert np.array_equal(late, numbers.encode(np.ones(20_000)))  # nothing else was on it


def bits(view):
    """Everything that the server has received, as one row of features."""
    parts = [view.masked[name].view(np.uint8) for name in NAMES]
    parts += [np.frombuffer(o.key + o.mark + b"".join(o.sealed.values()), np.uint8) for o in view.opened.values()]
    for shares in view.shares.values():
        parts += [np.frombuffer(share.to_bytes(32, "big"), np.uint8) for share in shares.values()]
    return np.concatenate([np.unpackbits(part[:40]) for part in parts])


def test_flipping_one_client_s_data_changes_nothing_that_the_server_sees_of_the_others():
    """Two worlds with the same sum: a's data flipped, and b's with it. Nobody can tell the views apart better than
    by tossing a coin, and every client's view has the same distribution in both."""
    rng, clients = np.random.default_rng(1), parties(NAMES)
    base = {name: rng.normal(size=4) for name in NAMES}
    flip = {**base, "a": -base["a"], "b": base["b"] + 2 * base["a"]}
    rounds = 150
    views = [exchange(clients, world) for _ in range(rounds) for world in (base, flip)]
    assert all(np.array_equal(view.total, views[0].total) for view in views[::2])
    assert np.abs((views[0].total - views[1].total).view(np.int64)).max() <= 2  # the sum is the same, but for rounding
    X, y = np.stack([bits(view) for view in views]), np.arange(2 * rounds) % 2
    score = cross_val_score(LogisticRegression(C=0.01, max_iter=200), X, y, cv=5).mean()
    assert abs(score - 0.5) < 6 * np.sqrt(0.25 / (2 * rounds))
    for name in NAMES:
        first, second = (np.concatenate([v.masked[name] for v in views[k::2]]) for k in (0, 1))
        assert stats.ks_2samp(first.astype(float), second.astype(float)).pvalue > ALARM


def opened(names=tuple(NAMES), exchange_name="e"):
    clients, terms = parties(names), Terms.usual(exchange_name, names, None, None)
    return clients, terms, {name: clients[name].share(terms) for name in names}


def test_a_client_opens_an_exchange_once_and_masks_once():
    clients, terms, shown = opened()
    server, numbers = Aggregator(terms, shown, 2), FixedPoint.finest(5, 3)
    with pytest.raises(InputError, match="opened before"):
        clients["a"].share(terms)
    clients["a"].mask("e", server.around("a"), numbers, np.ones(2))
    with pytest.raises(InputError, match="over"):
        clients["a"].mask("e", server.around("a"), numbers, np.zeros(2))


def test_a_sum_is_opened_for_one_set_of_clients_only():
    clients, terms, shown = opened()
    server, numbers = Aggregator(terms, shown, 2), FixedPoint.finest(5, 3)
    with pytest.raises(InputError, match="not in that sum"):
        clients["a"].reveal("e", NAMES)
    clients["a"].mask("e", server.around("a"), numbers, np.ones(2))
    first = clients["a"].reveal("e", NAMES[:4])
    assert clients["a"].reveal("e", NAMES[:4]) == first  # the same question again gets the same answer
    with pytest.raises(InputError, match="other clients before"):
        clients["a"].reveal("e", NAMES)
    with pytest.raises(InputError, match="not in that sum"):
        clients["a"].reveal("e", NAMES[1:])


def test_shares_that_were_tampered_with_are_refused():
    clients, terms, shown = opened()
    server, numbers = Aggregator(terms, shown, 2), FixedPoint.finest(5, 3)
    around = server.around("a")
    other = next(iter(around))
    for broken in (
        Opened(bytes(32), around[other].mark, around[other].sealed),
        Opened(around[other].key, bytes(32), around[other].sealed),
        Opened(around[other].key, around[other].mark, {"a": bytes(80)}),
        Opened(around[other].key, around[other].mark, {}),
    ):
        with pytest.raises(InputError, match="are not from"):
            clients["a"].mask("e", {**around, other: broken}, numbers, np.ones(2))
    with pytest.raises(InputError, match="not complete"):
        clients["a"].mask("e", {o: v for o, v in around.items() if o != other}, numbers, np.ones(2))
    assert clients["a"].mask("e", around, numbers, np.ones(2)).dtype == np.uint64


def test_wrong_shares_give_the_right_sum_or_none():
    """As long as a threshold of honest shares is left, they are found; else there is no sum."""
    clients, terms, shown = opened()
    server, numbers = Aggregator(terms, shown, 2), FixedPoint.finest(5, 3)
    for name in NAMES:
        server.take(name, clients[name].mask("e", server.around(name), numbers, np.ones(2)))
    shares = {name: clients[name].reveal("e", NAMES) for name in NAMES}

    def false(*liars):
        changed = {n: {o: (share + 1) % 2**254 for o, share in shares[n].items()} for n in liars}
        return server.open({**shares, **changed})

    assert terms.threshold == 3
    for liar in NAMES:
        assert np.allclose(numbers.decode(false(liar)), 5)
    for liars in itertools.combinations(NAMES, 2):
        with pytest.raises(InputError, match="stays closed"):
            false(*liars)
    with pytest.raises(InputError, match="does not belong"):
        server.take("a", np.zeros(2, dtype=np.uint64))


def test_who_colludes_knows_too_little():
    """The shares that t clients hold of everybody's secrets, put together, do not open a single one."""
    names = [f"c{i}" for i in range(9)]
    clients, terms, shown = opened(tuple(names))
    server, numbers = Aggregator(terms, shown, 2), FixedPoint.finest(9, 3)
    for name in names:
        clients[name].mask("e", server.around(name), numbers, np.ones(2))
    for victim in names:
        neighbours = terms.neighbours(victim)
        held = {names.index(n) + 1: clients[n]._open["e"].held[victim] for n in neighbours}
        places, secret = list(held), clients[victim]._open["e"]
        few, enough = places[: terms.colluding], places[: terms.threshold]
        for k, whole in enumerate((secret.key, secret.mask)):
            assert keys.join_shares({place: held[place][k] for place in few}) != whole
            assert keys.join_shares({place: held[place][k] for place in enough}) == whole


def test_a_client_wants_to_be_safe_from_as_many_as_it_says():
    wary = Party(Identity("a"), least=3)
    with pytest.raises(InputError, match="bear 3 colluding clients, not 1"):
        wary.share(Terms("e", tuple(NAMES), 1, 0))
    with pytest.raises(InputError, match="not for this client"):
        wary.share(Terms("e", ("x", "y", "z"), 1, 0))


def test_another_process_of_a_client_goes_on():
    clients, terms, shown = opened()
    server, numbers = Aggregator(terms, shown, 2), FixedPoint.finest(5, 3)
    for name in NAMES:
        again = Party(clients[name].identity)
        again.restore(clients[name].kept())
        server.take(name, again.mask("e", server.around(name), numbers, np.ones(2)))
        clients[name] = Party(again.identity)
        clients[name].restore(again.kept())
    total = server.open({name: clients[name].reveal("e", NAMES) for name in NAMES})
    assert np.allclose(numbers.decode(total), 5)
    with pytest.raises(InputError, match="opened before"):
        clients["a"].share(terms)


def test_pins_and_keys_that_change():
    north, south = Identity("north"), Identity("south")
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
    first = Identity.kept("north", path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.kept("north", path).card == first.card
    path.write_text("nonsense")
    with pytest.raises(InputError, match="cannot be read"):
        Identity.kept("north", path)


@pytest.mark.parametrize("broken", [None, {}, {"name": "a", "key": "00", "certificate": "", "signature": ""}])
def test_cards_from_the_wire_are_checked(broken):
    with pytest.raises(InputError, match="cannot be read"):
        Card.of(broken)


class Office:
    """A certificate authority."""

    def __init__(self):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.root = self.issue("root", self.key.public_key())

    def issue(self, name, key, days=1):
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
        made = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=9)).not_valid_after(now + datetime.timedelta(days))
        return made.sign(self.key, SHA256())

    def identity(self, name, called=None, days=1):
        key = ec.generate_private_key(ec.SECP256R1())
        shown = self.issue(name, key.public_key(), days).public_bytes(Encoding.PEM)
        return Identity(
            called or name,
            None,
            (shown, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())),
        )


def test_cards_signed_by_the_deployment_s_certificates():
    office = Office()
    wary = Party(office.identity("north"), authority=Authority(office.root))
    good = office.identity("south")
    wary.meet([Card.of(good.card.values())])
    forged = Card("east", Identity("east").card.key, good.card.certificate, good.card.signature)
    refused = {
        "not signed by a site": [Identity("east").card, Office().identity("east").card, forged],
        "in the name of 'west'": [office.identity("west", called="east").card],
        "not valid today": [office.identity("east", days=-1).card],
    }
    for match, cards in refused.items():
        for card in cards:
            with pytest.raises(InputError, match=match):
                wary.meet([card])
