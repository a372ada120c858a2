"""Messages that would cost a silo more than they cost whoever sends them."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from dishonest import NAMES, NUMBERS, Coordinator, meet, point

from scaffpd.deploy.messages import BYTES_EACH, ELEMENTS, Message, WireError, decode, encode
from scaffpd.deploy.remote import SiloRequest
from scaffpd.federation.questions import GradientsAt

X = np.array([0.1, -0.2, 0.3, 0.05])
SMALL = 40 * 2**20  # bytes that any message may take


def cost(silo, question):
    """CPU seconds and bytes at the peak that a question costs a silo."""
    start = time.process_time()
    silo.answer(question)
    seconds = time.process_time() - start
    tracemalloc.start()
    silo.answer(question)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


@pytest.fixture(scope="module")
def silo(tmp_path_factory):
    coordinator = Coordinator(tmp_path_factory.mktemp("attacked"))
    meet(coordinator)
    at = GradientsAt(point(X))
    coordinator.ask("north", at)
    values = {
        **SiloRequest.of(at).values,
        "about": "gradients",
        "parts": ["c"],
        "names": list(NAMES),
        "colluding": 1,
        "weights": [0.25] * 4,
        "numbers": NUMBERS.values(),
        "setup": coordinator.setup.digest,
        "question": "1",
        "cards": [],
    }
    return coordinator.silos["north"], values


def lists(n):
    """Values of about n bytes."""
    return {
        "names": [f"s{k}" for k in range(n // 8)],
        "weights": [1.0] * (n // 5),
        "parts": ["c"] * (n // 5),
        "split": "x" * n,
        "unknown": [[1]] * (n // 6),
        "cards": [{"name": f"s{k}"} for k in range(n // 20)],
        "key": [1] * (n // 4),
    }


@pytest.mark.parametrize(
    "kind", ["masked", "meet", "gradients", pytest.param("setup", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("size", [10**5, pytest.param(10**7, marks=pytest.mark.long)])
def test_no_message_hangs_a_silo_or_takes_more_memory_than_it_is_worth(silo, kind, size):
    """Before: lists within lists took 28 times their size, and names of arrays 17 times."""
    own, values = silo
    questions = [
        Message(kind, {**values, name: value}, {"x": X}) for name, value in lists(size).items()
    ]
    arrays = [
        {"x": np.zeros(size // 8)},
        {"x": np.zeros(size, dtype=np.int8)},
        {"x": X, "V": np.zeros((4, size // 32))},
    ]
    for message in [*questions, *(Message(kind, values, more) for more in arrays)]:
        question = encode(message)
        seconds, peak = cost(own, question)
        assert seconds < 1.0 + size / 10**7
        assert peak <= 4 * len(question) + SMALL


def test_messages_of_many_values_or_arrays_are_refused_before_they_are_read():
    with pytest.raises(WireError, match="too many values"):
        decode(encode(Message("losses", {"x": [[]] * (ELEMENTS // 2 + 1)})), 2**30)
    with pytest.raises(WireError, match="too many arrays"):
        decode(encode(Message("losses", {}, {f"a{k}": np.zeros(1) for k in range(2000)})), 2**30)
    columns = [0.123456789012345] * (
        ELEMENTS // 2
    )  # the means of that many columns are well within
    assert (
        len(decode(encode(Message("setup", {"mean": columns})), 2**30).values["mean"])
        == ELEMENTS // 2
    )
    assert BYTES_EACH * 4 >= 80
