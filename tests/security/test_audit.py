"""What an audit broke where a coordinator asked, put to the design in which it cannot ask.

Each had one cause: the coordinator chose the question. Every old attack ends in a refusal, or has
no way to be written down.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.boards import GoneError, facts_of, lockstep, sessions, singles, together, trained
from cases.refusals import refuses
from cases.silos import ROUGH, Faulty, agreement, federation
from runtimes import NAMES, cohort_of, point_of
from scaffpd.deploy.board import BEGIN, NEWS
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import REFUSED, Message, decode, encode
from scaffpd.deploy.replica import question_parts, replica
from scaffpd.deploy.silo import Silo
from scaffpd.deploy.transcript import FIRST, Tampered
from scaffpd.federation import LocalPlan
from scaffpd.federation.questions import GradientsAt, LocalSteps, Losses
from scaffpd.secure.keys import SIGNATURE, Identity

X = torch.linspace(-3, 3, 3).double()
FAR = LocalSteps(X, None, 1e6 * torch.ones(3).double(), LocalPlan(1, 1.0))
QUESTIONS = {
    "a correction that carries u far away": FAR,
    "a minibatch of its choice": GradientsAt(X, 1, (7, 7)),
    "a point of its choice": GradientsAt(1e3 * X),
    "a prox term of its choice": LocalSteps(X, None, None, LocalPlan(1, 0.1, prox=5.0)),
    "losses at a point of its choice": Losses(X),
}


@pytest.mark.parametrize("what", QUESTIONS)
@pytest.mark.parametrize("keys", [False, True], ids=["without keys", "with the first silo's"])
def test_questions_of_the_coordinators_own(what, keys):
    """In place of any proposal of the first silo; a silo that does not expect it posts nothing."""
    values, tensors = question_parts(QUESTIONS[what])
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    values |= {"clients": [0, 1, 2, 3], "part": ""}
    body = encode(Message(QUESTIONS[what].kind, values, arrays))
    identities = {name: Identity() for name in NAMES}
    signer = identities["a"] if keys else Identity()
    at = []

    def tamper(name, step, senders, posts, log):
        if name != "c" or senders != FIRST or step < 6:
            return posts
        at.append(step)
        said = made["c"].digest + step.to_bytes(8, "big") + b"first proposal"
        return {"a": signer.sign(said + body) + body}

    made, board = sessions(NAMES, tamper, identities)
    facts = facts_of(singles(lambda names: cohort_of("logistic", names), NAMES))

    def action(name, session):
        session.open({})
        own = cohort_of("logistic", [name]).channel if name else None
        return sp.train(sp.ScaffPD(sp.ChiSquare(rho=0.1), 3), replica(session, own, 1, facts), 5)

    found = together(made, board, action)
    assert isinstance(found["c"], Tampered), found["c"]
    assert found["c"].code == ("proposal-differs" if keys else "post-not-signed")
    assert all("c" not in board.log.get(step, {}) for step in range(at[0], at[0] + 3))


def test_a_board_that_changes_a_proposal_gets_no_answer(tmp_path, fake_clock):
    """The same over bytes: news with a proposal of the coordinator's own."""
    path, places = federation(tmp_path, replacing=ROUGH)
    transport = Faulty(places)
    asked = {}

    class Lying:
        def ask(self, questions, timeout):
            sent = {}
            for site, question in questions.items():
                message = decode(question)
                if site == "va" and message.kind == NEWS and message.values["end"] > 9:
                    arrays = dict(message.arrays)
                    for name, array in arrays.items():
                        if name.endswith(":cleveland") and len(array) > SIGNATURE:
                            changed = np.array(array)
                            changed[-1] ^= 1
                            arrays[name] = changed
                            asked[site] = message.values["end"]
                    question = encode(Message(NEWS, message.values, arrays))
                sent[site] = question
            return transport.ask(sent, timeout)

    outcome = coordinate(path, Lying())
    assert asked
    assert outcome.status in ("paused", "failed")
    assert "is not the one that it made" in outcome.sentence
    assert not list(tmp_path.rglob("model.safetensors"))


def test_many_weightings_of_one_vector():
    """N weightings of one vector, made different by offsets that the coordinator knows."""
    silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES))
    x = point_of(silos)
    known = []
    with refuses("too-many-weightings"):
        for k, l2 in enumerate((0.05, 0.1, 0.2, 0.4)):
            weights = np.roll([0.7, 0.1, 0.1, 0.1], k)
            silos.using(l2=l2).gradients(x).sum(weights)
            known.append(weights)
    assert len(known) == 2  # of four unknown vectors
    plan = LocalPlan(1, 0.5, prox=3.0)
    with refuses("too-many-weightings"):
        silos.local_updates(x, None, None, plan).sum(np.array([0.1, 0.1, 0.1, 0.7]))


def test_one_weighting_where_two_would_isolate():
    three = NAMES[:3]
    silos = lockstep(singles(lambda names: cohort_of("logistic", names), three))
    at = silos.gradients(point_of(silos))
    at.sum(np.array([0.5, 0.3, 0.2]))
    with refuses("too-many-weightings"):
        at.sum(np.array([0.2, 0.3, 0.5]))


def test_what_colluding_silos_learn():
    """From the public sum and its own vector: that of the others, and no single one."""
    silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES))
    x = point_of(silos)
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    total = silos.gradients(x).sum(weights)
    each = cohort_of("logistic").gradients(x).each()
    rest = total - weights[0] * each[0]
    np.testing.assert_allclose(rest, torch.from_numpy(weights[1:]) @ each[1:], rtol=0, atol=1e-12)


def test_an_active_silo_gets_a_gradient(capsys):
    """What masks do not protect from: claimed losses that leave one honest silo in the sum."""
    seen = []

    def meddle(name, method, federation):
        rows = federation.channel.rows
        if name == "a" and rows is not None:
            ask = rows.ask

            def lie(question, chosen):
                reply = ask(question, chosen)
                if isinstance(question, Losses):
                    loss = torch.tensor([1.2]).double()  # a little above those of others
                    return type(reply)({**reply.numbers, "loss": lambda: loss}, reply.vectors)
                return reply

            rows.ask = lie
            add = federation.sums.sum

            def look(part, vectors, asked, weights):
                found = add(part, vectors, asked, weights)
                if part == "d":
                    seen.append((vectors.asked.question.x.clone(), np.array(weights), found))
                return found

            federation.sums.sum = look
        return method

    three = NAMES[:3]
    trained(
        singles(lambda names: cohort_of("logistic", names), three),
        sp.AFL(sp.Agnostic(), dual_rate=0.1),
        meddle=meddle,
        rounds=30,
        tol=None,
    )
    x, weights, total = next(one for one in seen if one[1][1:].min() < 1e-12 < one[1][1:].max())
    each = cohort_of("logistic", three).gradients(x).each()
    victim = 1 + int(np.argmax(weights[1:]))
    rate = 1 / cohort_of("logistic", three).constants().smoothness.max()
    rest = (total / rate - weights[0] * each[0]) / weights[victim]  # without its own part
    error = float((rest - each[victim]).norm() / each[victim].norm())
    with capsys.disabled():
        sys.stdout.write(f"\n  an active silo has a gradient to {error:.0e}: only noise helps\n")
    assert error < 1e-9


@pytest.mark.parametrize("size", [1e9, 1e155, 1e300])
def test_no_scale_comes_from_outside(tmp_path, size):
    """A deviation near overflow made silos refuse, or not, by their rows; now nobody sends one."""
    path, places = federation(tmp_path)
    silo = Silo.open(places["va"])
    document = agreement(path, places).values
    for terms in ({"mean": [size]}, {"deviation": [size]}, {"scale": size}):
        values = {**document, "terms": {**document["terms"], **terms}}
        asked = encode(Message(BEGIN, {"agreement": values, "epoch": "1", "states": []}))
        reply = decode(silo.answer(asked))
        assert (reply.kind, reply.values["code"]) == (REFUSED, "agreement-unusable")


def test_nobody_goes_on_without_a_silo():
    """The difference of a sum over four and one over three would be a gradient."""

    def withheld(name, step, senders, posts, log):
        return {who: post for who, post in posts.items() if who != "d"} if step > 8 else posts

    found, made, _ = trained(
        singles(lambda names: cohort_of("logistic", names), NAMES),
        sp.ScaffPD(sp.ChiSquare(rho=0.1), 3),
        tamper=withheld,
        patience=5.0,
    )
    assert all(isinstance(one, Tampered | GoneError) for one in found.values())
    assert all(session.step <= 11 for session in made.values())
