"""Deployed silos that share the noise of their sums: its size, what each counts, and what they do
not go along with.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.refusals import refuses
from cases.silos import QUICK, REQUIRED, Faulty, cohort, federation, model_of, opened, pinned
from scaffpd.deploy.agreement import negotiate, settle
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import InProcess, Message, decode
from scaffpd.deploy.remote import Remote, Session, SiloRequest
from scaffpd.deploy.secure import MaskedRemote
from scaffpd.errors import InputError
from scaffpd.federation.questions import GradientsAt
from scaffpd.privacy.accountant import epsilon
from scaffpd.run.settings.federation import FederationFile

pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")
pytestmark = pytest.mark.usefixtures("fake_clock")
STEPS = 'steps = {kind = "Fixed", tau = 1.0, sigma = 0.25, theta = 0.0, local_rate = 1.0}\n'
METHOD = {
    "rounds = 500\ntol = 1e-6\n": "rounds = 6\n",
    "[objective]": f'[algorithm]\nkind = "ScaffPD"\nlocal_steps = 1\n{STEPS}\n[objective]',
}
NOISE = "\n[secure]\n\n[privacy]\nepsilon = 4\ncolluding = 1\n"
RANGES = '\n[features.ranges]\n"*" = [0, 300]\n'
OWN = "\n[privacy]\nepsilon = 20\ndelta = 1e-5\n"
SILOS = ("cleveland", "hungarian", "switzerland", "va")


def shared(folder, noise=NOISE, own=OWN, rules=REQUIRED, more=QUICK, pins=True, **how):
    path, places = federation(folder, replacing=METHOD, more=more + noise + RANGES, **how)
    for place in places.values():
        place.write_text(place.read_text() + own + rules)
    if pins:
        pinned(places)
    return path, places


def met(path, places):
    """The silos after an agreement, as a federation with masks; and the session, to ask them what
    one likes.
    """
    file = FederationFile.read(path)
    session = Session(InProcess(opened(places)))
    session.greet(5.0)
    setup = negotiate(session, SILOS, file)
    facts = settle(session, SILOS, setup)
    remote = Remote(session, facts, MaskedRemote)
    return sp.SecureAggregation(remote, **file.masking), session, setup, facts


def ledgers(places):
    """Every silo's releases under the agreement."""
    found = {}
    for name, place in places.items():
        (file,) = place.parent.glob("privacy-spent-*.npz")
        with np.load(file) as kept:
            pairs = zip(kept["privacy.noise"], kept["privacy.times"], strict=True)
            found[name] = [noise for noise, times in pairs for _ in range(int(times))]
    return found


def test_a_run_shares_its_noise_and_every_silo_counts_its_part(tmp_path):
    path, places = shared(tmp_path)
    transport = Faulty(places)
    outcome = coordinate(path, transport)
    assert (outcome.status, outcome.rounds) == ("round limit", 6)
    assert 0 < outcome.privacy["epsilon"] <= 4
    noise = DeployedRun(FederationFile.read(path).folder).setup().privacy
    told = ledgers(places)
    for own in told.values():
        assert epsilon(sum(z**-2 for z in own), 1e-5) <= 4
        sums = [z for z in own if z != noise["loss_noise"]]
        assert 1 <= len(sums) <= 7  # a silo without weight adds noise, and pays nothing
        assert min(sums) >= noise["noise"] * (1 - 1e-9)
    every = [z for own in told.values() for z in own if z != noise["loss_noise"]]
    assert max(every) > 1.2 * min(every)  # silos with less weight per row pay less for a sum
    assert (
        cohort(path, places).evaluate(model_of(path), "test").loss.max() < 5
    )  # a model, whatever the noise was
    for (
        _,
        question,
        answer,
    ) in transport.log:  # no gradient, no size of one, and exponents that say nothing
        asked = decode(question, 2**31)
        reply = decode(answer, 2**31)
        assert asked.kind != "sizes"
        assert asked.kind != "gradients" or set(reply.arrays) <= {"scalars"}
    said = [
        decode(a, 2**31).values.get("exponent")
        for _, q, a in transport.log
        if is_sum(decode(q, 2**31))
    ]
    assert len(set(said)) == 1


def is_sum(asked):
    return asked.kind == "masked" and asked.values["about"] == "gradients"


def test_the_sum_has_the_noise_of_one_silo_and_no_bias(tmp_path):
    path, places = shared(
        tmp_path, noise=NOISE.replace("epsilon = 4", "epsilon = 400"), own=OWN.replace("20", "9000")
    )
    masked, _, setup, facts = met(path, places)
    noise = setup.privacy
    m = facts.constants.samples
    silos = opened(places)
    rows = {
        name: silos[name]
        .data.encoded(dict(setup.schema), setup.mean, setup.deviation, separate=True)
        .train
        for name in SILOS
    }
    bare = sp.Private(
        sp.Linear("logistic", l2=0.03, intercept=True),
        noise=1e-6,
        clip=noise["clip"],
        loss_clip=noise["loss_clip"],
        radius=noise["radius"],
    )
    exact = sp.Cohort(rows, bare)
    w = np.array([0.3, 0.2, 0.1, 0.4])
    off = []
    for k in range(6):
        x = torch.full((len(facts.start),), 0.01 * k, dtype=torch.float64)
        off.append(masked.gradients(x).sum(w) - exact.gradients(x).sum(w))
    found = torch.stack(off) / (noise["noise"] * noise["clip"] * float((w / m).max()))
    assert float(found.std()) == pytest.approx(
        (4 / 3) ** 0.5, rel=0.2
    )  # of four, one of whom may add none
    assert abs(float(found.mean())) < 0.4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rules": ""}, "require masks"),
        ({"rules": REQUIRED + "colluding = 2\n"}, "tolerate 2 colluding"),
        ({"noise": NOISE.replace("colluding = 1\n", "colluding = 0\n")}, "tolerate 1 colluding"),
    ],
    ids=["no masks required", "more may collude", "none may collude"],
)
def test_silos_that_cannot_rely_on_it_do_not_share(tmp_path, change, words):
    path, places = shared(tmp_path, pins="rules" not in change or change["rules"] != "", **change)
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "failed"
    assert words in outcome.sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[secure]\n\n", ""),
        ("local_steps = 1", "local_steps = 2"),
        ("local_steps = 1", "local_steps = 1\nbatch_size = 8"),
    ],
)
def test_a_federation_that_could_not_share_is_refused_when_it_is_read(tmp_path, old, new):
    path, _ = shared(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match="one local step and all rows"):
        FederationFile.read(path)


def test_units_that_would_not_cover_a_silo_s_part_are_refused(tmp_path):
    path, places = shared(tmp_path)
    masked, session, _, facts = met(path, places)
    at = GradientsAt(torch.zeros(len(facts.start), dtype=torch.float64))
    masked.gradients(at.x)
    asked = SiloRequest.of(at)

    def put(**more):
        values = {
            **asked.values,
            "about": asked.kind,
            "parts": ["c"],
            "names": list(SILOS),
            "colluding": 1,
            "weights": [0.25] * 4,
            "numbers": None,
            **more,
        }
        return session.ask(SiloRequest("masked", values, asked.arrays), ["va"])["va"]

    true = 0.25 / facts.constants.samples[3]
    for scale, words in (
        (true / 2, "noise would not cover"),
        (0.0, "in which units"),
        ("x", "a number scale"),
    ):
        with pytest.raises(InputError, match=words):
            put(scale=scale)
    with refuses("silo-refuses"):
        put()
    assert isinstance(put(scale=true), Message)
    values = {**asked.values, "about": asked.kind, "parts": ["c"]}
    with refuses("silo-refuses"):
        session.ask(SiloRequest("sizes", values, asked.arrays), ["va"])
