"""Messages: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from scaffpd.deploy.messages import PROTOCOL, Message, WireError, decode, digest, encode

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


def test_a_message_costs_its_numbers_and_little_more():
    x = np.random.default_rng(0).standard_normal(100_000)
    assert len(encode(Message("gradients", {}, {"x": x}))) < 1.01 * x.nbytes
