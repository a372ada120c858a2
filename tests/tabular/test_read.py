"""Files become columns: separators and decimal marks, and what a cell means."""

import csv
import sys
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.refusals import refuses
from cases.tables import write
from scaffpd.data.tabular.formats import open_table
from scaffpd.data.tabular.read import read_columns as columns_of

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def read_columns(path, names, *more, **others):
    return columns_of(open_table(path), names, *more, **others)


def read_features(path, target):
    names = [target, *(name for name in open_table(path).names if name != target)]
    (goal, *features), dropped = read_columns(path, names, (), {target: "target"})
    return features, goal, dropped[target]


def values(path, *names, **more):
    found, _ = read_columns(path, names or open_table(path).names, **more)
    return {
        c.name: [c.categories[k] for k in c.values] if c.kind == "category" else c.values.tolist()
        for c in found
    }


def test_the_separator_that_cuts_rows_alike_wins(tmp_path):
    path = write(tmp_path, 'size, cm;who;"a;b"\n1;x, y;2\n3;"u;v";4\n')
    assert values(path) == {"size, cm": [1, 3], "who": ["x, y", "u;v"], "a;b": [2, 4]}
    assert values(write(tmp_path, "only\n1\n2\n")) == {"only": [1, 2]}


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_decimal_comma_is_found_out_where_it_is_certain(tmp_path, mark):
    path = write(
        tmp_path, f"x{mark}n{mark}t\n1,5{mark}1{mark}a\n2,250{mark}2{mark}b\n{mark}3{mark}c\n"
    )
    assert values(path, "n", "t") == {"n": [1, 2, 3], "t": ["a", "b", "c"]}
    np.testing.assert_array_equal(values(path, "x")["x"], [1.5, 2.25, np.nan])
    unsure = write(tmp_path, f"x{mark}y\n1,500{mark}1\n12,250{mark}2\n")
    with refuses("decimal-mark-unclear"):
        values(unsure)
    assert values(unsure, decimal=",")["x"] == [1.5, 12.25]


def test_two_decimal_marks_in_one_file_are_refused(tmp_path):
    path = write(tmp_path, "x;y;z\n1,5;1.5;1\n2,5;2.5;2\n")
    for names in (("x", "z", "y"), ("y", "x")):
        with refuses("two-decimal-marks"):
            values(path, *names)
    assert values(path, "y", "z") == {"y": [1.5, 2.5], "z": [1, 2]}


def test_lines_are_counted_as_an_editor_does(tmp_path):
    text = '\n\nx,"long\nname",y\n1,"two\nlines",2\n\n2,b,3\n1,c,4\nodd,d,5\n'
    found, _ = read_columns(write(tmp_path, text), ["x", "long\nname"])
    assert found[0].note == "is read as categories because of 'odd' in line 10"
    assert found[1].categories == ("b", "c", "d", "two\nlines")
    with refuses("infinite-value"):
        values(write(tmp_path, text.replace("odd", "-inf")), "x")


def test_rows_longer_than_pyarrow_s_blocks_are_read(tmp_path):
    """pyarrow gives up on three of these: it says that an object straddles two blocks."""
    wide, cell = 5000, "1" * 300
    header = ",".join(f"c{k}" for k in range(wide))
    path = write(tmp_path, header + "\n" + (",".join([cell] * wide) + "\n") * 3)
    last = f"c{wide - 1}"
    assert values(path, "c0", last) == {"c0": [float(cell)] * 3, last: [float(cell)] * 3}


CELLS = [
    *(
        "1",
        "2.5",
        "-3",
        "+4",
        "1e5",
        "1.",
        " 7 ",
        "12345678901234567890123",
        "007",
        "1.0",
        "1_0",
        "0x10",
    ),
    *("  ", "", "NA", "na", "N/a", "NaN", "?", "Null", "<NA>", "\xa0"),
    *("abc", "ü", "a,b", 'a"b', "line\nbreak", "2020-13-01", "a;b"),
]


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.sampled_from(CELLS), min_size=1, max_size=4).flatmap(
        lambda pool: st.lists(
            st.tuples(st.sampled_from(pool), st.sampled_from(["1", "", "?"])),
            min_size=1,
            max_size=9,
        )
    )
)
def test_every_cell_means_what_python_says(tmp_path, rows):
    with (tmp_path / "h.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("x", "y"), *rows])
    cells = [x for x, y in rows if y == "1"]
    missing = [
        cell.strip().lower() in {"", "na", "n/a", "nan", "?", "null", "<na>"} for cell in cells
    ]
    try:
        numbers = [
            np.nan if gone else float(cell.replace("_", "no"))
            for cell, gone in zip(cells, missing, strict=True)
        ]
    except ValueError:
        numbers = None
    if not cells:
        with refuses("column-without-values"):
            read_features(tmp_path / "h.csv", "y")
        return
    features, _, dropped = read_features(tmp_path / "h.csv", "y")
    (x,) = features
    assert dropped == len(rows) - len(cells)
    if numbers is not None:
        np.testing.assert_array_equal(x.values, numbers)
        return
    names = [None if k < 0 else x.categories[k] for k in x.values]
    whole = {"1.": "1", "1.0": "1"}
    assert names == [
        None if gone else whole.get(cell.strip(), cell.strip())
        for cell, gone in zip(cells, missing, strict=True)
    ]
    assert list(x.categories) == sorted(set(names) - {None})


def test_parquet_columns_of_every_type(tmp_path):
    table = {
        "PM2.5": arrow.array([1, None, 2**60]),
        "flag": arrow.array([True, False, None]),
        "price": arrow.array([Decimal("1.5"), None, Decimal("2.25")]),
        "float": arrow.array([1.0, float("nan"), 2.5], arrow.float32()),
        "text": ["a", "NA", None],
        "digits": ["1.0", "2", "1"],
        "levels": arrow.array(["u", None, "v"]).dictionary_encode(),
        "none": arrow.nulls(3),
    }
    parquet.write_table(arrow.table(table), tmp_path / "a.parquet")
    found, _ = read_columns(tmp_path / "a.parquet", list(table), ["float"])
    shown = [
        (c.kind, [None if v != v or v == -1 else v for v in c.values.tolist()], c.categories)
        for c in found
    ]
    assert shown == [
        ("number", [1, None, 2**60], ()),
        ("number", [1, 0, None], ()),
        ("number", [1.5, None, 2.25], ()),
        ("category", [0, None, 1], ("1", "2.5")),
        ("category", [0, None, None], ("a",)),
        ("category", [0, 1, 0], ("1", "2")),
        ("category", [0, None, 1], ("u", "v")),
        ("unknown", [None, None, None], ()),
    ]


def test_what_a_parquet_file_calls_clients_keeps_its_name(tmp_path):
    """Whole numbers beyond 2⁵³, dates, hours and pandas' categories, of texts and of numbers."""
    far = [1_764_000_000_000_000_001 + k for k in range(3)]
    days = [datetime(2020, 1, 1), datetime(2020, 1, 2, 5), None]
    given = {
        "id": (arrow.array([*far, None]), [*map(str, far)]),
        "decimal": (arrow.array([*map(Decimal, far), None]), [*map(str, far)]),
        "day": (
            arrow.array([date(2020, 1, 1), None, date(2021, 1, 1), None]),
            ["2020-01-01", "2021-01-01"],
        ),
        "time": (arrow.array([*days, days[0]]), ["2020-01-01", "2020-01-02 05:00:00"]),
        "levels": (arrow.array(["u", None, "v", "u"]).dictionary_encode(), ["u", "v"]),
        "numbers": (arrow.array([7, None, 8, 7]).dictionary_encode(), ["7", "8"]),
    }
    parquet.write_table(
        arrow.table({name: cells for name, (cells, _) in given.items()}), tmp_path / "a.parquet"
    )
    for name, (cells, names) in given.items():
        (found,), dropped = read_columns(tmp_path / "a.parquet", [name], [name], {name: "client"})
        assert (found.kind, list(found.categories), dropped) == (
            "category",
            names,
            {name: cells.null_count},
        )


def test_a_table_is_read_without_pandas_and_numbers_are_the_same(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    x = random.standard_normal(2000) * 10.0 ** random.integers(-20, 20, 2000)
    lines = "".join(f"{v!r},{k % 2}\n" for k, v in enumerate(x.tolist()))
    monkeypatch.setitem(sys.modules, "pandas", None)
    features, goal, dropped = read_features(write(tmp_path, "x,y\n" + lines + ",1\n5,\n"), "y")
    np.testing.assert_array_equal(features[0].values, [*x, np.nan])
    assert (goal.values.tolist(), dropped) == ([k % 2 for k in range(2000)] + [1], 1)
