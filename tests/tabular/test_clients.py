"""A file that a column cuts into clients, held against what each client could have done alone."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaffpd.data.tabular.clients import TableFile, read_clients
from scaffpd.errors import InputError


def table(path, rows, columns=("site", "age", "smoker", "ill")):
    path.write_text(
        "\n".join(",".join(map(str, row)) for row in [columns, *rows]) + "\n", encoding="utf-8"
    )
    return path


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    made = []
    for site, n in (("north", 30), ("south", 18), ("west", 9)):
        for _ in range(n):
            age = (
                ""
                if random.random() < 0.2
                else round(random.normal(50 if site == "north" else 70, 9), 1)
            )
            made.append((site, age, random.choice(["yes", "no", "?"]), int(random.random() < 0.4)))
    return made


def read(path, **more):
    return read_clients(TableFile(path, "site", "ill", **more))


def test_missing_values_come_from_the_client_s_own_training_rows(tmp_path, rows):
    found = read(table(tmp_path / "a.csv", rows), test=0.3, standardise=False)
    assert [own.name for own in found.rows] == ["north", "south", "west"]
    for own, ready in zip(found.rows, found.encoded, strict=True):
        mine = np.array(
            [np.nan if row[1] == "" else row[1] for row in rows if row[0] == own.name], dtype=float
        )
        filled = np.where(np.isnan(mine), np.nanmedian(mine[~own.held]), mine)
        assert ready.train[0][:, 0] == pytest.approx(filled[~own.held])
        assert ready.test[0][:, 0] == pytest.approx(filled[own.held])
        smokes = [row[2] for row in rows if row[0] == own.name]
        often = max(
            ("no", "yes"), key=[s for s, out in zip(smokes, own.held, strict=True) if not out].count
        )
        expected = [
            (often if s == "?" else s) == "no"
            for s, out in zip(smokes, own.held, strict=True)
            if not out
        ]
        assert ready.train[0][:, 1].tolist() == expected


def test_columns_are_scaled_by_sums_over_training_rows(tmp_path, rows):
    plain = read(table(tmp_path / "a.csv", rows), standardise=False)
    scaled = read(tmp_path / "a.csv")
    pooled = np.concatenate([e.train[0] for e in plain.encoded])
    for a, b in zip(plain.encoded, scaled.encoded, strict=True):
        assert b.train[0] == pytest.approx((a.train[0] - pooled.mean(0)) / pooled.std(0))
        assert b.test[0] == pytest.approx((a.test[0] - pooled.mean(0)) / pooled.std(0))


def test_held_out_rows_change_nothing_that_is_trained_on(tmp_path, rows):
    before = read(table(tmp_path / "a.csv", rows))
    changed = []
    seen = dict.fromkeys(("north", "south", "west"), 0)
    held = {own.name: own.held for own in before.rows}
    for row in rows:
        out = held[row[0]][seen[row[0]]]
        seen[row[0]] += 1
        changed.append((row[0], 999, "yes", row[3]) if out else row)
    after = read(table(tmp_path / "b.csv", changed))
    for a, b in zip(before.encoded, after.encoded, strict=True):
        assert np.array_equal(a.train[0], b.train[0])


def test_the_same_rows_as_gzip_and_as_parquet(tmp_path, rows):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    first = read(table(tmp_path / "a.csv", rows))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    pandas.read_csv(tmp_path / "a.csv", na_values=["?"]).to_parquet(tmp_path / "a.parquet")
    for other in (read(tmp_path / "a.csv.gz"), read(tmp_path / "a.parquet")):
        assert other.schema == first.schema
        for a, b in zip(first.encoded, other.encoded, strict=True):
            assert np.array_equal(a.train[0], b.train[0])
            assert np.array_equal(a.test[1], b.test[1])


def test_what_is_left_out_is_said(tmp_path, rows):
    odd = [*rows, ("", 40, "no", 1), ("east", 40, "no", 1), ("north", 41, "no", "")]
    found = read(table(tmp_path / "a.csv", odd))
    assert found.remarks == (
        "1 row without 'ill' left out.",
        "1 row without 'site' left out.",
        "1 client with a single row left out.",
    )
    assert [own.name for own in found.rows] == ["north", "south", "west"]
    assert "east" in [own.name for own in read(tmp_path / "a.csv", test=0.0).rows]


def test_names_of_rows_are_no_categories_unless_asked_for(tmp_path):
    rows = [("ab"[k % 2], k % 60, f"patient {k}", k % 3 % 2) for k in range(120)]
    path = table(tmp_path / "a.csv", rows, ("site", "age", "name", "ill"))
    found = read(path)
    assert found.remarks == ("Column 'name' left out: 120 different texts in 120 rows.",)
    assert found.encoded[0].features == ("age",)
    assert len(read(path, columns=("age", "name"), test=0.0).encoded[0].features) == 121


def test_columns_that_teach_nothing_are_left_out_and_named(tmp_path):
    rows = [
        ("ab"[k % 2], k + 1000, f"2024-0{1 + k % 9}-1{k % 8}", "x", "", k % 7, k % 3 % 2)
        for k in range(90)
    ]
    path = table(
        tmp_path / "a.csv", rows, ("site", "id", "admitted", "country", "empty", "age", "ill")
    )
    found = read(path)
    assert found.encoded[0].features == ("age",)
    assert found.remarks == (
        "Column 'id' left out: a name for every row, not a quantity.",
        "Column 'admitted' left out: it holds dates such as '2024-01-10'; --dates learns from weekday and season.",
        "Column 'country' left out: the same value everywhere.",
        "Column 'empty' left out: no values.",
    )


def test_labels_of_rows_that_are_left_out_are_no_labels(tmp_path, rows):
    named = [(site, age, smoker, "yes" if ill else "no") for site, age, smoker, ill in rows]
    found = read(table(tmp_path / "a.csv", [*named, ("", 1, "no", "perhaps")]))
    assert found.schema["labels"] == ["no", "yes"]


def test_a_client_may_be_called_infinity(tmp_path):
    rows = [(("inf", "nord")[k % 2], k % 5, k % 3 % 2) for k in range(40)]
    found = read(table(tmp_path / "a.csv", rows, ("site", "x", "ill")))
    assert [own.name for own in found.rows] == ["inf", "nord"]


def test_what_does_not_fit_into_memory_is_refused(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("scaffpd.data.tabular.clients.free_memory", lambda device: 1000)
    with pytest.raises(
        InputError, match="which is more than there is room for: choose fewer --columns"
    ):
        read(table(tmp_path / "a.csv", rows))


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        ("site,ill\na,1\nb,0\na,0\nb,1\n", {}, "no columns besides 'site' and 'ill'"),
        (
            "site,x,ill\na,1,1\na,2,0\n",
            {},
            "Column 'site' has 1 client with at least 2 rows; at least two are needed.",
        ),
        ("site,x,ill\n,1,1\n,2,0\n", {}, "no row with a value in its client column 'site'"),
        ("site,x,ill\na,1,\nb,2,\n", {}, "no row with a value in its target column 'ill'"),
        ("size,x,ill\na,1,1\n", {}, "Unknown column of 'a.csv', 'site': did you mean 'size'?"),
        (
            "site,x,ill\na,1,1\na,2,1\nb,3,1\nb,4,1\n",
            {},
            "All rows of all clients have the label 1",
        ),
        (
            "site,x,ill\na,1,u\na,2,v\nb,3,u\nb,4,v\n",
            {"task": "regression"},
            "regression needs numbers",
        ),
        (
            "site,x,ill\na,1,1\na,2,0\nb,3,1\nb,4,0\n",
            {"columns": ("z",)},
            "Unknown column of 'a.csv', 'z'",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_sentence(tmp_path, text, more, sentence):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        read(tmp_path / "a.csv", **more)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_client_and_target_differ(tmp_path, rows):
    with pytest.raises(InputError, match="cannot be both the client and the target"):
        read_clients(TableFile(table(tmp_path / "a.csv", rows), "ill", "ill"))


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.one_of(st.none(), st.floats(-1e6, 1e6)),
            st.sampled_from(["", "u", "v", "w"]),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([0.0, 0.2, 0.5]),
)
def test_any_table_is_either_read_whole_or_refused_in_one_sentence(tmp_path, rows, test):
    path = table(tmp_path / "h.csv", [("" if x is None else x for x in row) for row in rows])
    found = refused = None
    try:
        found = read(path, test=test, task="classification")
    except InputError as error:
        refused = str(error)
    assert refused is None or "\n" not in refused
    if found is None:
        return
    assert (
        sum(sum(own.rows) for own in found.rows)
        + len(set("abc") - {own.name for own in found.rows})
        >= 2
    )
    for ready in found.encoded:
        assert np.isfinite(ready.train[0]).all()
        assert ready.train[0].shape[1] == len(ready.features)
        assert ready.test is None or np.isfinite(ready.test[0]).all()
