"""A dishonest board: what it forges, replays, moves, withholds or splits is noticed by silos.

It has all posts, and none of the silos' keys. Whatever it shows, a silo ends in a refusal, at that
exchange or at the next one, and no sum opens but the one over all silos.
"""

from __future__ import annotations

import numpy as np
import pytest

from cases.boards import AGREEMENT, ALL, GoneError, ThreadBoard, sessions, together
from cases.silos import agreement, federation
from scaffpd.deploy.board import (
    BEGIN,
    LEAVE,
    LOST,
    NEWS,
    Board,
    Mailbox,
    SiloTrouble,
    read_news,
)
from scaffpd.deploy.messages import REFUSED, Message, decode, encode
from scaffpd.deploy.silo import Silo
from scaffpd.deploy.transcript import FIRST, Session, Tampered
from scaffpd.errors import InputError
from scaffpd.federation.questions import GradientsAt, Losses
from scaffpd.secure.keys import SIGNATURE, Identity
from scaffpd.secure.ring import Places

NAMES = ("north", "south", "east", "west")
D = 6
ROWS = {name: np.random.default_rng(k).standard_normal(D) for k, name in enumerate(NAMES)}
CASES = 2500


def program(name, session, rounds=3):
    """What every silo does: points that the first one proposes, and sums of all."""
    session.open({"rows": name})
    places = Places.usual(D, len(NAMES))
    sums = []
    for k in range(rounds):
        _, arrays = session.propose("point", {"round": k}, {"x": np.full(3, float(k))})
        own = None if not name else ROWS[name] * (1 + arrays["x"][0])
        sums.append(session.total(GradientsAt.named("c"), own, places))
        session.clear(Losses.shows, np.array([k + len(name) / 10]))
    session.confirm()
    return np.array(sums)


def played(tamper=None, identities=None, **options):
    made, board = sessions(NAMES, tamper, identities, **options)
    return together(made, board, program), made, board


def at_step(number, change, victim="south"):
    """A board that shows one silo something else at one step."""

    def tamper(name, step, senders, posts, log):
        return change(posts, log, step) if (name, step) == (victim, number) else posts

    return tamper


def test_an_honest_board_and_an_onlooker():
    found, made, _ = played()
    wanted = sum(ROWS.values())
    for one in found.values():
        np.testing.assert_allclose(one[0], wanted, rtol=0, atol=1e-14)
        np.testing.assert_array_equal(one, found[""])
    assert len({session.digest for session in made.values()}) == 1
    assert {kind: count for kind, (count, _) in made["west"].sent.items()} == {
        "epoch": 1,
        "masked gradients c": 3,
        "clear losses": 3,
        "confirm": 1,
    }


# steps: 0 epoch; then proposal, sum, loss for every round
SUM = 5


def forged(posts, log, step):
    return {**posts, "west": posts["west"][:SIGNATURE] + bytes(len(posts["west"]) - SIGNATURE)}


def replayed(posts, log, step):
    return {**posts, "west": log[step - 3]["west"]}


def of_another(posts, log, step):
    return {**posts, "west": posts["east"]}


def left_out(posts, log, step):
    return {name: post for name, post in posts.items() if name != "west"}


def invented(posts, log, step):
    return {**posts, "centre": posts["west"]}


def own_changed(posts, log, step):
    return {**posts, "south": log[step - 3]["south"]}


def longer(posts, log, step):
    return {**posts, "west": posts["west"] + bytes(16)}


def shorter(posts, log, step):
    return {**posts, "west": posts["west"][: SIGNATURE - 4]}


LIES = (forged, replayed, of_another, left_out, invented, own_changed, longer, shorter)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("step", [SUM, SUM + 1], ids=["masked", "clear"])
def test_what_is_not_the_post_is_noticed_at_once(lie, step):
    found, made, _ = played(at_step(step, lie))
    assert isinstance(found["south"], Tampered), found["south"]
    assert made["south"].step == step  # nothing of it was taken


def test_a_proposal_of_the_boards_own_gets_no_answer():
    mallory = Identity()

    def proposed(posts, log, step):
        body = encode(Message("point", {"round": 1}, {"x": np.full(3, 1e3)}))
        return {"north": mallory.sign(body) + body}

    found, _, board = played(at_step(SUM - 1, proposed))
    assert found["south"].code == "post-not-signed"
    assert "south" not in board.log.get(SUM, {})


def test_two_views_of_a_step_are_noticed_at_the_next():
    """Only a silo's own keys make two posts of one step: with them, the views differ afterwards."""
    identities = {name: Identity() for name in NAMES}

    def split(name, step, senders, posts, log):
        if name != "south" or step != SUM + 1:
            return posts
        # a second, validly signed post of a silo whose keys the board has
        said = made["south"].digest + step.to_bytes(8, "big") + b"all clear losses"
        body = np.array([99.0]).tobytes()
        return {**posts, "west": identities["west"].sign(said + body) + body}

    made, board = sessions(NAMES, split, identities)
    found = together(made, board, program)
    assert isinstance(found["south"], Tampered)
    assert made["south"].step == SUM + 2  # the split step was taken, and not the one after it
    assert all(isinstance(one, Tampered | GoneError) for one in found.values())


def test_withheld_posts_pause_the_run():
    def withheld(name, step, senders, posts, log):
        if name == "south" and step == SUM:
            raise GoneError
        return posts

    found, made, _ = played(withheld, patience=1.0)
    assert all(isinstance(one, GoneError) for name, one in found.items() if name != "")
    assert made["north"].step <= SUM + 1  # nobody goes on without south


def test_an_epoch_of_other_keys_or_another_agreement():
    identities = {name: Identity() for name in NAMES}
    _, _, earlier = played(identities=identities)

    def old(posts, log, step):
        return {**posts, "west": earlier.log[0]["west"]}

    found, made, _ = played(at_step(0, old), identities)
    # an old key is validly signed: the masks do not cancel, and signatures do not fit
    assert isinstance(found["south"], InputError)
    assert made["south"].step <= 2
    stranger = Identity()
    made, board = sessions(NAMES, None, {**identities, "west": stranger})
    for name in ("north", "south", "east", ""):
        made[name].cards = {**made[name].cards, "west": identities["west"].card}
    found = together(made, board, program)
    assert all(isinstance(found[name], Tampered | GoneError) for name in ("north", "south", "east"))
    made, board = sessions(NAMES)
    made["west"].agreement = bytes(32)
    found = together(made, board, program)
    codes = {one.code for one in found.values() if isinstance(one, Tampered)}
    assert codes == {"agreement-differs"}


def test_silos_that_were_shown_different_proposals_add_up_to_noise():
    """Even with the first silo's keys: the proposal is in the masks."""
    identities = {name: Identity() for name in NAMES}

    def two(name, step, senders, posts, log):
        if senders != FIRST or name not in ("south", ""):
            return posts
        said = made[name].digest + step.to_bytes(8, "big") + b"first proposal"
        body = encode(Message("point", {"round": step // 3}, {"x": np.full(3, 1e-12 + step // 3)}))
        return {"north": identities["north"].sign(said + body) + body}

    made, board = sessions(NAMES, two, identities)
    for session in made.values():
        session.tolerance = 1e-6
    found = together(made, board, program)
    assert all(isinstance(one, InputError | GoneError) for one in found.values())
    assert all(session.step <= 2 for session in made.values())
    posts = [np.frombuffer(post[SIGNATURE:], np.uint64) for post in board.log[2].values()]
    high = sum(post.reshape(2, -1)[1] for post in posts).view(np.int64)
    assert np.abs(high.astype(float)).mean() > 2**58


class Recorded:
    """A link that replays a log, somewhere changed."""

    def __init__(self, log):
        self.log = log

    def exchange(self, step, senders, own):
        return self.log[step]


@pytest.fixture(scope="module")
def logs():
    """Two honest runs under the same keys, and their cards."""
    identities = {name: Identity() for name in NAMES}
    cards = {name: one.card for name, one in identities.items()}
    return [played(identities=identities)[2].log for _ in range(2)], cards


def changed(random, log, other):
    """One random change of a stream of posts."""
    log = {step: dict(posts) for step, posts in log.items()}
    step = int(random.integers(len(log)))
    name = str(random.choice(list(log[step])))
    post = bytearray(log[step][name])
    kind = int(random.integers(9))
    if kind == 0:
        place = int(random.integers(len(post)))
        post[place] ^= 1 << int(random.integers(8))
    elif kind == 1:
        place = int(random.integers(len(post)))
        post[place:] = random.bytes(len(post) - place)
    elif kind == 2:
        post = post[: int(random.integers(len(post)))]
    elif kind == 3:
        post += random.bytes(int(random.integers(1, 40)))
    elif kind == 4:  # of another step
        post = bytearray(log[int(random.integers(len(log)))].get(name, b""))
    elif kind == 5:  # of another silo
        post = bytearray(log[step][str(random.choice(list(log[step])))])
    elif kind == 6:  # of another epoch under the same keys
        post = bytearray(other[step][name])
    elif kind == 7:
        del log[step][name]
        return log
    else:  # two steps change places
        to = int(random.integers(len(log)))
        log[step], log[to] = log[to], log[step]
        return log
    log[step][name] = bytes(post)
    return log


def test_no_change_of_the_stream_is_accepted(logs):
    """Random tampering: 2,500 cases, 0 accepted."""
    (log, other), cards = logs
    random = np.random.default_rng(0)
    honest = program("", Session(Recorded(log), cards, AGREEMENT, **ALL))
    cases = 0
    while cases < CASES:
        lied = changed(random, log, other)
        if lied == log:
            continue
        cases += 1
        with pytest.raises(InputError):
            program("", Session(Recorded(lied), cards, AGREEMENT, **ALL))
    assert honest.shape == (3, D)


def test_a_silo_without_the_others_learns_nothing_but_the_sum(logs):
    """Any three posts of four, added up, are noise as wide as the ring."""
    (log, _), _ = logs
    posts = [np.frombuffer(p[SIGNATURE:], np.uint64).reshape(2, -1) for p in log[2].values()]
    for without in range(4):
        high = sum(post[1] for k, post in enumerate(posts) if k != without).view(np.int64)
        assert np.abs(high.astype(float)).mean() > 2**58


def test_nobody_begins_while_an_operator_decides():
    asked = []

    class Waiting:
        def ask(self, questions, timeout):
            asked.append("".join(questions))
            answers = {name: Message("ready") for name in questions}
            if len(asked) < 4:
                answers["b"] = Message(REFUSED, {"sentence": "Not yet.", "waits": True})
            return {name: encode(answer) for name, answer in answers.items()}

    board = Board(Waiting(), ["a", "b", "c"], 1.0)
    for _ in range(3):
        with pytest.raises(SiloTrouble):
            board.begin({}, [])
    board.begin({}, [])
    board.begin({}, [])
    assert asked == ["abc", "b", "b", "b", "ac", "abc"]


def test_a_step_is_answered_once():
    board = ThreadBoard(NAMES)
    identities = {name: Identity() for name in NAMES}
    cards = {name: one.card for name, one in identities.items()}
    sent = []

    class Eager:
        def exchange(self, step, senders, own):
            sent.append((step, own))
            return board.exchange("north", step, senders, own)

    made, _ = sessions(NAMES, None, identities)
    for name, session in made.items():
        session.link = board.link(name)
    made["north"] = Session(Eager(), cards, AGREEMENT, "north", identities["north"], **ALL)
    together(made, board, program)
    steps = [step for step, _ in sent]
    assert steps == sorted(set(steps))


def test_news_without_posts_takes_no_memory():
    """Messages of 180 bytes that named a million steps took 100 MB each."""
    with pytest.raises(InputError):
        read_news(Message(NEWS, {"start": 0, "end": 10**6}))
    post = np.zeros(1, np.uint8)
    for name in ("9" * 5000 + ":a", "٣:a", "1e3:a", "-1:a", ":a", "7:a"):
        with pytest.raises(InputError):
            read_news(Message(NEWS, {"start": 0, "end": 1}, {name: post}))
    mailbox = Mailbox()
    mailbox.show(0, [{"a": b"1"}])
    mailbox.close()
    mailbox.show(1, [{"a": b"2"}])
    assert len(mailbox._log) == 1


def test_a_silo_that_was_left_says_so_in_few_bytes(tmp_path, caplog):
    """The same failure, raised again and again, had a longer traceback every time."""
    path, places = federation(tmp_path, 3)
    values = {"agreement": agreement(path, places).values, "epoch": "1", "states": []}
    silo = Silo.open(places["va"])
    news = encode(Message(NEWS, {"epoch": "1", "start": 0, "end": 0}))
    silo.answer(encode(Message(BEGIN, values)))
    silo.answer(encode(Message(LEAVE, {"epoch": "1"})))
    silo.close()
    caplog.clear()
    assert {decode(silo.answer(news)).kind for _ in range(20)} == {LOST}
    assert sum(len(record.exc_text or "") for record in caplog.records) < 1000
