"""One hostile silo in a secure run: which of its messages end it, and which only end its own part."""

from __future__ import annotations

import numpy as np
import pytest
from deploy_cases import events, is_right
from hostile_messages import WHO, Changing, cases, fuzzed
from secure_silos import secured

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import Message, decode, encode

GOES_ON = [
    ("nothing", 24, True),
    ("noise", 23, True),
    pytest.param("another format", 8, True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("change", "moment", "always"), GOES_ON)
def test_a_run_goes_on_without_a_silo_that_sends_nonsense(tmp_path, change, moment, always):
    ended = fuzzed(tmp_path, change, moment, always)
    assert ended.status == "converged", ended
    assert ended.event in ("garbage", "quarantined", "absent")
    assert WHO not in ended.members


@pytest.mark.long
def test_how_many_runs_a_hostile_silo_ends(tmp_path):
    """An audit ended 180 of 203; every run that ends here does so in a sentence, and none has a wrong model."""
    found = [fuzzed(tmp_path / str(k), *case) for k, case in enumerate(cases())]
    ended = [one for one in found if one.status != "converged"]
    assert all(one.sentence.endswith(".") for one in ended)
    assert len(ended) <= 20, [
        (case, one) for case, one in zip(cases(), found, strict=True) if one in ended
    ]


def test_a_silo_that_spoils_real_sums_alone_ends_the_run_in_a_sentence(tmp_path):
    """It answers the same each time, and adds up when ones are masked: nobody can say who it was."""
    path, places = secured(tmp_path, drop=True)

    def spoil(answer, random):
        message = decode(answer, 2**31)
        vector = message.arrays.get("masked")
        if vector is None or len(vector) == 8:
            return answer
        return encode(Message(message.kind, message.values, {"masked": vector * 3 + 1}))

    outcome = coordinate(path, Changing(places, spoil, 20, always=True))
    assert outcome.status == "failed"
    assert "Which one cannot be told" in outcome.sentence
    assert not any(event["what"] == "quarantined" for event in events(path))


def test_ones_find_a_silo_with_false_masks(tmp_path):
    path, places = secured(tmp_path, drop=True)

    def wrong(answer, random):
        message = decode(answer, 2**31)
        arrays = {
            name: array * 3 + 1 if array.dtype == np.int64 else array
            for name, array in message.arrays.items()
        }
        return encode(Message(message.kind, message.values, arrays))

    outcome = coordinate(path, Changing(places, wrong, 20, always=True))
    is_right(path, places, outcome)
    assert WHO not in outcome.members
    first = next(event for event in events(path) if event["what"] == "quarantined")
    assert first["client"] == WHO
    assert "sums of ones" in first["sentence"]
