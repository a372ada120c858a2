"""Codes for missing values and columns that give the target away: said, if there is reason."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cases.tables import opened
from cases.tables import read as read_table
from scaffpd import cli
from scaffpd.data.tabular.columns import suspected_codes

SAID = ("far from all others", "alone tells", "decimal commas")


def rows(n=120, seed=0, **columns):
    """A table of n rows at three clients, with columns made of (k, random)."""
    random = np.random.default_rng(seed)
    made = {"h": lambda k, r: f"h{k % 3}", "age": lambda k, r: 20 + int(70 * r), **columns}
    lines = [[str(own(k, random.random())) for own in made.values()] for k in range(n)]
    return "\n".join(",".join(cells) for cells in [list(made), *lines]) + "\n"


def label(k, r):
    return (k // 3) % 2


def read(folder, text, target="y", name="a.csv", **more):
    return opened(folder, text, name, client="h", target=target, **more)


def said(found):
    return [remark for remark in found.remarks if any(part in remark for part in SAID)]


# --- codes for missing values


def test_a_code_is_named_and_then_missing(tmp_path):
    text = rows(chol=lambda k, r: "-999.00" if k % 10 == 0 else f"{3 + 4 * r:.2f}", y=label)
    (remark,) = said(read(tmp_path, text))
    assert remark.startswith("Column 'chol' has -999 in 12 rows, far from all others")
    for missing in (("-999",), (-999,), (-999.0, "unknown")):
        found = read(tmp_path, text, missing=missing)
        assert not said(found)
        assert sum(np.isnan(own.table.columns[1].values).sum() for own in found.rows) == 12
    empty = read(tmp_path, text.replace("-999.00", ""))
    for ours, theirs in zip(found.encoded, empty.encoded, strict=True):
        np.testing.assert_array_equal(ours.train[0], theirs.train[0])


def test_a_code_is_no_target_and_a_client_may_be_called_like_one(tmp_path):
    text = rows(h=lambda k, r: 99 - k % 3, cost=lambda k, r: 99 if k % 12 == 0 else 1000 + 500 * r)
    assert said(read(tmp_path, text.replace(",99\n", ",-999\n"), "cost"))[0].startswith(
        "Target 'cost' has -999 in 10"
    )
    found = read(tmp_path, text, "cost", missing=("99",))
    assert "10 rows without 'cost' left out." in found.remarks
    assert [own.name for own in found.rows] == ["97", "98", "99"]


def test_codes_of_typed_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table(
        {
            "h": ["a", "b"] * 20,
            "x": [-999, *range(39)],
            "z": [-999.0, *np.linspace(0, 1, 39).tolist()],
            "t": pyarrow.array(["unknown", *"uv" * 19, "u"]).dictionary_encode(),
            "y": [0, 0, 1, 1] * 10,
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    found = read_table(tmp_path / "a.parquet", client="h", target="y", missing=(-999, "unknown"))
    gaps = {
        c.name: sum(int(own.table.columns[j].missing.sum()) for own in found.rows)
        for j, c in enumerate(found.rows[0].table.columns)
    }
    assert gaps == {"x": 1, "z": 1, "t": 1}


@settings(max_examples=80, deadline=None)
@given(st.integers(-120, 40), st.integers(1, 130), st.data())
def test_whole_numbers_without_a_gap_have_no_code(least, many, data):
    seldom = data.draw(st.lists(st.integers(0, many), max_size=40))
    there = np.concatenate(
        [np.repeat(np.arange(least, least + many + 1), 3), least + np.array(seldom, dtype=int)]
    )
    assert suspected_codes(there.astype(float)) == []


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(0, 90), min_size=20, max_size=200).filter(lambda v: len({*v} - {-1.0}) > 3),
    st.sampled_from([-9.0, -99.0, -99.9, -999.0, 9999.0, 99999.0]),
    st.integers(3, 20),
)
@example([0.0, 1.0, 2.0, 3.0] * 6, -9.0, 3)
def test_a_code_among_other_numbers_is_found(others, code, many):
    assert code in suspected_codes(np.array([*others, *[code] * many]))
    assert suspected_codes(np.array([*others, code])) == []  # once may be an odd row


@pytest.mark.parametrize(
    "values",
    [
        [0, 1] * 30,
        [-1, 1] * 30,
        [-1, 0, 1] * 30,
        [0] * 90 + [-1] * 5 + [1] * 5,
        [*range(1, 100)] * 2,
        [1, 2, 3, 9] * 9,
    ],
)
def test_labels_counts_and_ages_have_no_code(values):
    assert suspected_codes(np.array(values, dtype=float)) == []


# --- columns that tell the target

LEAKS = {
    "copy": lambda k, r: 2 * label(k, r) + 1,
    "noisy": lambda k, r: label(k, r) + 0.3 * r,
    "text": lambda k, r: ["healthy", "ill"][label(k, r)],
    "patient": lambda k, r: f"p{k % 18}",  # the same label whenever he comes
    "own": lambda k, r: (
        1000 * (k % 3) + (-1) ** (k % 3) * (100 * label(k, r) + r)
    ),  # another threshold at every client
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_column_that_tells_labels_is_named(tmp_path, name):
    own = label if name != "patient" else (lambda k, r: (k % 18) % 2)
    text = rows(180, **{name: LEAKS[name]}, b=lambda k, r: r, y=own)
    assert said(read(tmp_path, text)) == [
        f"Column {name!r} alone tells the target: is it known beforehand?"
    ]
    swapped = text.splitlines()
    swapped[5] = swapped[5][:-1] + str(1 - int(swapped[5][-1]))
    assert not said(read(tmp_path, "\n".join(swapped)))


def test_a_column_that_tells_numbers_is_named(tmp_path):
    names = {"euro": lambda k, r: 7 * k + 1, "code": lambda k, r: f"c{k % 9}", "b": lambda k, r: r}
    assert said(read(tmp_path, rows(**names, y=lambda k, r: f"{k + 1e-4 * r:.6f}"))) == [
        "Column 'euro' alone tells the target: is it known beforehand?"
    ]
    assert said(read(tmp_path, rows(**names, y=lambda k, r: k % 9))) == [
        "Column 'code' alone tells the target: is it known beforehand?"
    ]


def test_codes_in_two_columns_make_no_line(tmp_path):
    text = rows(
        b=lambda k, r: -99999 if k % 9 == 0 else r, y=lambda k, r: -99999 if k % 9 == 0 else 1 + r
    )
    assert [remark[:10] for remark in said(read(tmp_path, text))] == ["Column 'b'", "Target 'y'"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([6, 12, 18, 30, 60]), st.integers(2, 8))
def test_columns_drawn_at_random_tell_nothing(seed, n, kinds):
    import tempfile

    columns = {f"n{j}": lambda k, r: f"{r:.3f}" for j in range(6)} | {
        f"t{j}": lambda k, r: f"t{int(kinds * r)}" for j in range(6)
    }
    with tempfile.TemporaryDirectory() as folder:
        assert not said(read(Path(folder), rows(n, seed, **columns, y=label)))


def test_small_tables_are_left_in_peace(tmp_path):
    assert not said(read(tmp_path, rows(18, copy=label, b=lambda k, r: r, y=label)))


def test_real_tables_have_one_code_and_no_leak(tmp_path):
    data = os.environ.get("SCAFFPD_DATA")
    if not data:
        pytest.skip("needs SCAFFPD_DATA")
    file = Path(data) / "adult" / "adult.data.csv.gz"
    adult = read_table(file, client="occupation", target="classification")
    assert [remark[:51] for remark in said(adult)] == [
        "Column 'capital-gain' has 99999 in 155 rows, far fr"
    ]
    air = Path(data) / "beijing_air" / "daily.csv"
    assert not said(read_table(air, client="station", target="pm25"))


def test_a_silos_own_check_says_both(tmp_path, capsys):
    text = rows(copy=label, chol=lambda k, r: -999 if k % 10 == 0 else 3 + r, y=label)
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    settings_file = tmp_path / "silo.toml"
    asked = 'name = "a"\n[data]\nfile = "a.csv"\ntarget = "y"\n'
    settings_file.write_text(asked, encoding="utf-8")
    assert cli.run(["silo", "check", str(settings_file), "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert "Column 'copy' alone tells the target: is it known beforehand?" in warnings
    assert any(line.startswith("Column 'chol' has -999 in 12 rows") for line in warnings)
    settings_file.write_text(asked + "missing = [-999]\n", encoding="utf-8")
    assert cli.run(["silo", "check", str(settings_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [column["missing"] for column in found["columns"]] == [0, 0, 0, 12]
    assert not any("-999" in line for line in found["warnings"])


# --- names and decimal marks


def test_decimal_commas_are_said_once(tmp_path):
    cells = {"b": lambda k, r: f"{r:.1f}", "c": lambda k, r: f"{r:.2f}"}
    text = rows(**cells, y=label).replace(",", ";").replace(".", ",")
    assert said(read(tmp_path, text)) == [
        "Column 'b' is read with decimal commas, as the rest of the file is."
    ]
    assert not said(read(tmp_path, text, decimal=","))
