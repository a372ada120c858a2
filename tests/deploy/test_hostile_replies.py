"""A silo that lies is quarantined with a named event, and the model is that of the others alone."""

from __future__ import annotations

import numpy as np
import pytest
from deploy_cases import QUICK, Faulty, events, model_of, opened, rough
from hostile_cases import Liar, array, attacked, is_quarantined, loss, stale
from test_faults import SCAFF_PD

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import InProcess, Message, decode, encode
from scaffpd.run.settings.federation import FederationFile

pytestmark = pytest.mark.usefixtures("fake_clock")


def federation(folder, silos=3, **how):
    return rough(folder, silos, **how)


ATTACKS = {
    "absurd gradient": ("absurd size", {"gradients": array("c", lambda c: 1e9 * c, 2)}),
    "large gradient": ("length of rows", {"gradients": array("c", lambda c: 1e2 * c)}),
    "steep gradient": (
        "size of the gradient",
        {"gradients": array("c", lambda c: 2 * c / np.linalg.norm(c))},
    ),
    "loss three times": ("loss at zero", {"gradients": loss(lambda f: 3 * f)}),
    "loss three times later": ("consistency", {"gradients": loss(lambda f: 3 * f, 2)}),
    "loss a third": ("consistency", {"gradients": loss(lambda f: f / 3, 2)}),
    "loss negative": ("sign of the loss", {"gradients": loss(lambda f: -f, 2)}),
    "loss larger once": ("consistency", {"gradients": loss(lambda f: f + 0.1, 3, 3)}),
    "loss larger and larger": ("consistency", {"gradients": loss(lambda f: f + 0.1, 2)}),
    "gradient flipped": ("consistency", {"gradients": array("c", np.negative)}),
    "gradient flipped later": ("consistency", {"gradients": array("c", np.negative, 4)}),
    "gradient zero": ("consistency", {"gradients": array("c", np.zeros_like)}),
    "gradient of noise": (
        "consistency",
        {"gradients": array("c", lambda c: c + 0.3 * np.cos(np.arange(len(c))), 3)},
    ),
    "nothing new": ("consistency", {"gradients": stale(3)}),
    "wrong in the tables": ("consistency", {"evaluate": loss(lambda f: f - 0.05)}),
}
STEPS = {
    "absurd update": ("absurd size", {"local_updates": array("d", lambda d: 1e9 * d, 2)}),
    "long update": ("length of the update", {"local_updates": array("d", lambda d: 20 * d)}),
    "update flipped": ("direction of the update", {"local_updates": array("d", np.negative, 2)}),
}
SECOND_ORDER = {
    "long solution": ("length of the update", {"proximal_steps": array("d", lambda d: 1e4 * d)}),
    "bent down": ("curvature", {"curvature": array("curvature", np.negative)}),
    "bent too much": ("curvature", {"curvature": array("curvature", lambda Q: 1e3 * Q, 2)}),
}
CASES = [
    *((name, *case, change) for name, case in ATTACKS.items() for change in ({}, SCAFF_PD)),
    *((name, *case, SCAFF_PD) for name, case in STEPS.items()),
    *((name, *case, {}) for name, case in SECOND_ORDER.items()),
    (
        "bent down everywhere",
        "curvature",
        {"diagonal": array("diagonal", np.negative)},
        {'"logistic"': '"squared"'},
    ),
]


def test_a_silo_that_knows_nothing_before_there_is_an_agreement_was_started_anew(tmp_path):
    path, places = federation(tmp_path, more='\n[faults]\nmissing = "pause"\nstart_timeout = 0.2\n')
    missing = [
        ("lie", "va", lambda answer: encode(Message("missing", decode(answer, 2**20).values)))
    ]
    outcome = coordinate(path, Faulty(places, {2: missing}))
    assert outcome.status == "paused"
    assert [event["sentence"] for event in events(path)] == [
        "Silo 'va' did not answer: it was started anew."
    ]


REPEATED = {
    (name, i % 2) for i, name in enumerate(ATTACKS)
}  # by the other method: every attack is made once
ALIKE = {"loss a third", "loss larger once", "loss larger and larger"}  # found by the same test
ALIKE |= {"loss three times later", "gradient flipped later", "gradient zero", "gradient of noise"}


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    ("name", "test", "lies", "change"),
    [
        pytest.param(
            *case,
            id=f"{case[0]} {len(case[3])}",
            marks=pytest.mark.long
            if case[0] in ALIKE or (case[0], len(case[3])) in REPEATED
            else (),
        )
        for case in CASES
    ],
)
def test_a_liar_is_quarantined_and_the_others_get_their_model(tmp_path, name, test, lies, change):
    path, places = federation(tmp_path, replacing=change, more=QUICK)
    outcome, liar = attacked(path, places, **lies)
    is_quarantined(path, places, outcome, test)
    assert liar.lied is not None
    assert liar.heard[-1] in lies  # nothing was asked of it after that


def test_a_lie_is_found_before_it_is_used(tmp_path):
    """The new segment starts where the last honest round ended: x of the run that has no liar."""
    path, places = federation(tmp_path / "a", replacing=SCAFF_PD, more=QUICK)
    outcome, _ = attacked(path, places, gradients=loss(lambda f: f + 0.1, 4, 4))
    other, elsewhere = federation(
        tmp_path / "b", replacing={**SCAFF_PD, "rounds = 500": "rounds = 2"}, more=QUICK
    )
    honest = coordinate(other, InProcess(opened(elsewhere)))
    assert honest.rounds == 2
    start = np.load(FederationFile.read(path).folder / "start-1.npy")
    np.testing.assert_array_equal(start, model_of(other))
    assert outcome.rounds > 2


@pytest.mark.cover(1)
@pytest.mark.parametrize("numbers", ["float32", "float64"])
@pytest.mark.parametrize("change", [{}, SCAFF_PD])
def test_gradients_of_other_data_from_some_round_on(tmp_path, numbers, change):
    path, places = federation(
        tmp_path / "a", replacing=change, more=QUICK + f'[features]\nnumbers = "{numbers}"\n'
    )
    _, others = federation(tmp_path / "b")
    table = others["va"].parent / "patients.csv"
    head, *rows = table.read_text().splitlines()
    table.write_text("\n".join([head, *(row[:-1] + str(1 - int(row[-1])) for row in rows)]) + "\n")

    class Switching(Liar):
        other = opened(others)["va"]

        def answer(self, question):
            told = super().answer(question)
            new = self.other.answer(question)
            return new if self.heard.count("gradients") >= 4 else told

    silos = opened(places)
    silos["va"] = Switching(silos["va"])
    outcome = coordinate(path, InProcess(silos))
    assert outcome.status in ("converged", "precision")
    assert set(outcome.members) == set(places) - {"va"}
    assert "(consistency)" in events(path)[0]["sentence"]
    if numbers == "float64":
        is_quarantined(path, places, outcome, "consistency")
