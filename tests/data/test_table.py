"""Tables and selections: rows by number or mask, one sentence for all else, and an identity that tells content."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from scaffpd.data import Table, table
from scaffpd.errors import InputError

VALUES = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def refused(act, match):
    with pytest.raises(InputError, match=match) as caught:
        act()
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert caught.value.__cause__ is None


def test_a_mask_chooses_its_rows():
    mask = np.array([True, False, False, True, True, False])
    assert Table(VALUES).rows(mask).numbers.tolist() == [0, 3, 4]
    assert Table(VALUES).rows(list(mask)).numbers.tolist() == [0, 3, 4]
    assert Table(VALUES).rows(np.uint8([5, 0, 5])).numbers.tolist() == [5, 0, 5]
    assert len(Table(VALUES).rows([])) == 0


@pytest.mark.parametrize(
    "numbers",
    [
        [True, False],
        np.ones((6, 1), dtype=bool),
        [1.9],
        [1.0],
        ["a"],
        [[0, 1]],
        [[0], [1, 2]],
        3,
        None,
        [-1],
        [6],
        np.array([2**63], dtype=np.uint64),
        np.ma.masked_array([1, 2], [False, True]),
    ],
)
def test_what_are_no_rows(numbers):
    refused(
        lambda: Table(VALUES).rows(numbers),
        "table of 6 rows takes row numbers from 0 to 5 or a mask",
    )


def test_selections_are_cut_like_arrays():
    whole = Table(VALUES).rows([5, 3, 1])
    assert whole[1:].numbers.tolist() == [3, 1]
    assert whole[-1].numbers.tolist() == [1]
    assert whole[np.int64(0)].numbers.tolist() == [5]
    assert whole[[2, 0, 2]].numbers.tolist() == [1, 5, 1]
    assert whole[np.array([True, False, True])].numbers.tolist() == [5, 1]
    assert [row.numbers.tolist() for row in whole] == [[5], [3], [1]]
    np.testing.assert_array_equal(np.asarray(whole, np.float32), VALUES[[5, 3, 1]])


@pytest.mark.parametrize(
    "chosen",
    [
        [True],
        np.ones(4, bool),
        3,
        -4,
        [0, 3],
        (slice(None), 0),
        (0, 1),
        1.0,
        "a",
        None,
        ...,
        slice("a"),
        [[0]],
    ],
)
def test_what_is_no_part_of_a_selection(chosen):
    refused(
        lambda: Table(VALUES).rows([5, 3, 1])[chosen], "selection of 3 rows takes a slice, a mask"
    )


def test_values_that_are_no_table():
    refused(lambda: Table([[1.0, 2.0]]), "NumPy array, got list")
    refused(lambda: Table(np.ma.masked_array(VALUES, VALUES > 1)), "some of these are masked")
    refused(lambda: Table(VALUES, scale="a"), "number for scale")
    plain = Table(np.ma.masked_array(VALUES)).values
    assert type(plain) is np.ndarray
    np.testing.assert_array_equal(plain, VALUES)


# ------------------------------------------------------------------ files


@pytest.fixture
def mapped(tmp_path):
    np.save(tmp_path / "values.npy", VALUES)
    return Table(
        np.load(tmp_path / "values.npy", mmap_mode="r"), 0.5, "key"
    ), tmp_path / "values.npy"


def test_a_file_that_is_gone(mapped):
    rows, file = mapped
    sent = pickle.dumps(rows)
    np.testing.assert_array_equal(pickle.loads(sent).values, VALUES)
    file.unlink()
    refused(
        lambda: pickle.loads(sent),
        "values.npy' of a table's values cannot be read any more: No such file",
    )
    refused(lambda: np.asarray(rows.rows([1])), "cannot be read any more")


def test_a_file_that_was_cut_off(mapped):
    rows, file = mapped
    sent = pickle.dumps(rows)
    os.truncate(file, 150)
    refused(lambda: pickle.loads(sent), "it has been cut off")
    refused(lambda: np.asarray(rows.rows([1])), "it has been cut off")


def test_maps_that_are_not_their_file_are_sent_whole(tmp_path):
    np.save(tmp_path / "columns.npy", np.asfortranarray(VALUES))
    np.save(tmp_path / "rows.npy", VALUES)
    by_columns = np.load(tmp_path / "columns.npy", mmap_mode="r")
    changed = np.load(tmp_path / "rows.npy", mmap_mode="c")
    changed[0] = 7
    for values in (by_columns, changed, np.load(tmp_path / "rows.npy", mmap_mode="r")[2:]):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(Table(values))).values, values)


# ------------------------------------------------------------------ identity


def test_the_identity_tells_content():
    first = Table(VALUES).identity
    assert first[0].startswith("sha256:")
    assert first[1:] == (1.0, "float32", (6, 3))
    assert Table(VALUES.copy()).identity == Table(np.asfortranarray(VALUES)).identity == first
    assert Table(VALUES, key="known").identity == ("known", 1.0, "float32", (6, 3))
    other = VALUES.copy()
    other[5, 2] = np.nextafter(other[5, 2], np.float32(9))
    tables = [
        Table(other),
        Table(VALUES, 2.0),
        Table(VALUES.astype(np.float64)),
        Table(VALUES[:5]),
        Table(VALUES[::-1]),
    ]
    assert len({first, *(t.identity for t in tables)}) == 6


def test_values_are_hashed_once_and_in_pieces(monkeypatch):
    seen = []
    real = table.checksums

    def counted(values, starts, size):
        seen.append((list(starts), size))
        return real(values, starts, size)

    monkeypatch.setattr(table, "checksums", counted)
    monkeypatch.setattr(table, "HASHED", 2 * 12)
    one = Table(VALUES)
    assert one.identity == one.identity
    assert seen == [([0, 2, 4], 2)]
    _ = Table(VALUES, key="known").identity
    assert len(seen) == 1
