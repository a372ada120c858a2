"""Messages: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from scaffpd.deploy import messages
from scaffpd.deploy.messages import (
    PROTOCOL,
    Failure,
    InProcess,
    Message,
    WireError,
    decode,
    digest,
    encode,
)
from scaffpd.deploy.session import Session
from scaffpd.errors import InputError

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
numbers = st.one_of(
    *(
        arrays(t, array_shapes(max_dims=2, max_side=5, min_side=0))
        for t in (np.float64, np.float32, np.int64)
    )
)
names = st.text(min_size=1).filter(lambda name: name not in ("header", "__metadata__"))


@given(
    st.text(),
    st.dictionaries(st.text(), values, max_size=4),
    st.dictionaries(names, numbers, max_size=4),
)
def test_what_goes_in_comes_out(kind, said, carried):
    message = decode(encode(Message(kind, said, carried)), 2**20)
    assert message.kind == kind
    assert message.values == said
    assert set(message.arrays) == set(carried)
    for name, array in carried.items():
        assert message.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(message.arrays[name], array)


SOUND = encode(Message("gradients", {"key": [0, 1], "x": "abc"}, {"c": np.arange(5.0)}))


@settings(max_examples=300)
@given(st.integers(0, len(SOUND) - 1), st.integers(0, 255), st.integers(0, len(SOUND)))
def test_garbled_bytes_are_refused_or_read_never_worse(place, byte, length):
    garbled = bytearray(SOUND)
    garbled[place] = byte
    for data in (bytes(garbled), bytes(garbled)[:length]):
        try:
            message = decode(data, 2**20)
        except WireError:
            continue
        assert all(array.dtype.kind in "fi" for array in message.arrays.values())


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(WireError):
        decode(data, 2**20)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (pickle.dumps({"kind": "gradients"}), "not a message"),
        (b"", "not a message"),
        ("text", "A message is bytes, not str"),
        (SOUND + b"\0" * 2**20, "longer than"),
    ],
)
def test_refusals_say_why(data, sentence):
    with pytest.raises(WireError, match=sentence):
        decode(data, 2**20)


def with_header(header):
    from safetensors.numpy import save

    return save({"header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)})


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"protocol": 0, "kind": "a", "values": {}}, r"an unknown version \(protocol 0\)"),
        ({"protocol": PROTOCOL, "kind": 3, "values": {}}, "no readable header"),
        ({"protocol": PROTOCOL, "kind": "a", "values": []}, "no readable header"),
        ({"kind": "a"}, "not a message"),
        ([1, 2], "not a message"),
    ],
)
def test_headers_are_checked(header, sentence):
    with pytest.raises(WireError, match=sentence):
        decode(with_header(header), 2**20)


def test_arrays_of_other_kinds_are_refused():
    from safetensors.numpy import save

    header = np.frombuffer(
        json.dumps({"protocol": PROTOCOL, "kind": "a", "values": {}}).encode(), dtype=np.uint8
    )
    with pytest.raises(WireError, match="holds bool"):
        decode(save({"header": header, "c": np.array([True])}), 2**20)


def test_numbers_that_json_has_not_are_refused_before_they_leave():
    with pytest.raises(ValueError, match="JSON"):
        encode(Message("a", {"x": float("nan")}))


@given(numbers, numbers)
def test_the_digest_names_contents_shape_and_format(a, b):
    same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    assert (digest(a) == digest(b)) == same


@pytest.mark.parametrize("what", [True, "gone", None])
def test_a_failure_is_one_of_three(what):
    with pytest.raises(InputError, match="'absent', 'garbage' or 'refused', not "):
        Failure("nobody answers", what)


def test_a_message_costs_its_numbers_and_little_more():
    x = np.random.default_rng(0).standard_normal(100_000)
    assert len(encode(Message("gradients", {}, {"x": x}))) < 1.01 * x.nbytes


def test_a_vector_is_hashed_once_until_it_changes(monkeypatch):
    """A name always is that of the contents, however the vector was changed by PyTorch, and costs one hash."""
    hashed = []
    monkeypatch.setattr(
        messages, "digest", lambda array: hashed.append(array.copy()) or digest(array)
    )
    session = Session(InProcess({}))
    x = torch.arange(6.0)

    def name_of(vector):
        name, array = session._named({"x": vector})["x"]
        assert name.endswith(digest(array))
        assert np.array_equal(array, vector.numpy())
        return name

    first = [name_of(x) for _ in range(3)]
    assert len(hashed) == 1
    assert len(set(first)) == 1
    assert name_of(x.clone()) == first[0]  # another tensor of the same contents
    assert len(hashed) == 2
    for change in (
        lambda: x.add_(1),
        lambda: x[:2].zero_(),
        lambda: x.detach().mul_(2),
        lambda: x.view(2, 3).sub_(1),
    ):
        before = name_of(x)
        done = len(hashed)
        change()
        assert name_of(x) != before
        assert name_of(x)
        assert len(hashed) == done + 1
    with torch.inference_mode():
        y = torch.ones(3)
        before = name_of(y)
        y.add_(1)  # no version is counted here
    assert name_of(y) != before


def test_a_vector_is_hashed_again_once_it_has_changed():
    """Inference tensors have no version to see a change by, so none of their hashes is kept."""
    for made in (torch.zeros(3), torch.inference_mode()(torch.zeros)(3)):
        messages._HASHED.clear()
        before = messages.vector_digest(made)
        assert len(messages._HASHED) == (not made.is_inference())
        with torch.inference_mode(made.is_inference()):
            made += 1
        assert messages.vector_digest(made) == digest(np.ones(3, np.float32)) != before
