"""Files as they come: each ends in columns, with what was found out said, or in one sentence with the remedy."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from datetime import date, datetime, timedelta, timezone

import numpy as np
import pytest

from scaffpd.data.tabular.clients import TableFile, read_clients
from scaffpd.errors import InputError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

N = 24  # rows, at two sites
PLAIN = [("ab"[k % 2], k * 1.25, k % 3 % 2) for k in range(N)]


def text(rows=PLAIN, header=("site", "x", "ill"), mark=",", decimal="."):
    lines = [mark.join(header)] + [mark.join(str(cell) for cell in row) for row in rows]
    return (
        "\n".join(line.replace(".", decimal) if k else line for k, line in enumerate(lines)) + "\n"
    )


def with_column(cell, name="x"):
    """The plain table with `cell(k)` in place of x."""
    return text(
        [(site, cell(k), ill) for k, (site, _, ill) in enumerate(PLAIN)], ("site", name, "ill")
    )


def zipped(**files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{name}.csv", content)
    return packed.getvalue()


def as_parquet(**columns):
    given = {"site": [row[0] for row in PLAIN], "ill": [row[2] for row in PLAIN], **columns}
    packed = io.BytesIO()
    parquet.write_table(arrow.table(given), packed)
    return packed.getvalue()


def as_lines(make=lambda k: {"x": k * 1.25}):
    return "\n".join(
        json.dumps({"site": "ab"[k % 2], "ill": k % 3 % 2, **make(k)}) for k in range(N)
    )


def opened(folder, name, content, **more):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_clients(TableFile(path, **{"client": "site", "target": "ill", **more}))


X = [k * 1.25 for k in range(N)]
EUROPE = text(mark=";", decimal=",").replace("site", "Größe")
CLEAN = {  # file, content, arguments: x comes out as 0, 1.25, 2.5, …, and this is said
    "comma": ("a.csv", text(), {}, ""),
    "semicolon and decimal comma": (
        "a.csv",
        text(mark=";", decimal=","),
        {},
        "semicolons between columns",
    ),
    "tab": ("a.tsv", text(mark="\t"), {}, ""),
    "tab in csv": ("a.csv", text(mark="\t"), {}, "tabs between columns"),
    "pipe in txt": ("a.txt", text(mark="|"), {}, "pipes between columns"),
    "bom": ("a.csv", text().encode("utf-8-sig"), {}, ""),
    "utf-16": ("a.csv", text().encode("utf-16"), {}, "UTF-16 text"),
    "utf-16 without a mark": ("a.csv", text().encode("utf-16-le"), {}, "UTF-16 text"),
    "utf-16 big-endian": ("a.csv", text().encode("utf-16-be"), {}, "UTF-16 text"),
    "european": (
        "a.csv",
        EUROPE.encode("cp1252"),
        {"client": "Größe"},
        "Windows-1252 (Latin-1) text with semicolons",
    ),
    "gzip": ("a.csv.gz", gzip.compress(text().encode()), {}, ""),
    "zip": ("a.zip", zipped(a=text()), {}, ""),
    "json lines": ("a.jsonl", as_lines(), {}, ""),
    "json list": ("a.json", "[" + as_lines().replace("\n", ",") + "]", {}, ""),
    "parquet": ("a.parquet", as_parquet(x=X), {}, ""),
    "windows line ends": ("a.csv", text().replace("\n", "\r\n"), {}, ""),
    "blank lines first": ("a.csv", "\n\n" + text(), {}, ""),
    "spaces around": ("a.csv", text().replace(",", " , "), {}, ""),
    "quotes": (
        "a.csv",
        "".join(f'"{line}"\n'.replace(",", '","') for line in text().splitlines()),
        {},
        "",
    ),
    "euro": ("a.csv", with_column(lambda k: f"€{k * 1.25}"), {}, "is read as numbers: '€0.0' is 0"),
    "euro behind": ("a.csv", with_column(lambda k: f"{k * 1.25} €"), {}, "'0.0 €' is 0"),
    "percent": ("a.csv", with_column(lambda k: f"{k * 1.25} %"), {}, "'0.0 %' is 0"),
    "thousands": (
        "a.csv",
        with_column(lambda k: f'"{4e4 + k * 1.25:,.2f}"'),
        {},
        "'40,000.00' is 40000",
    ),
    "european thousands": (
        "a.csv",
        text(
            [(s, f"{4e4 + x:,.2f}".translate({44: ".", 46: ","}), y) for s, x, y in PLAIN], mark=";"
        ),
        {},
        "'40.000,00' is 40000",
    ),
    "swiss thousands": (
        "a.csv",
        with_column(lambda k: f"CHF {4e4 + k * 1.25:,.2f}".replace(",", "'")),
        {},
        "is 40000",
    ),
    "clock": (
        "a.csv",
        with_column(lambda k: f"{k * 5 // 4:02}:{k * 75 % 60:02}"[:5] if k < 19 else ""),
        {},
        "hours",
    ),
}


@pytest.mark.parametrize("case", CLEAN)
def test_a_file_ends_in_a_table_and_what_was_found_out_is_said(tmp_path, case):
    name, content, more, said = CLEAN[case]
    found = opened(tmp_path, name, content, standardise=False, **more)
    assert found.encoded[0].features == ("x",)
    rows = {own.name: own.table.columns[0].values for own in found.rows}
    wanted = np.array(X) + (4e4 if "thousands" in case else 0)
    for k, site in enumerate("ab"):
        values = wanted[k::2]
        values = (
            np.where(np.arange(len(values)) * 2 + k < 19, values, np.nan)
            if case == "clock"
            else values
        )
        np.testing.assert_allclose(rows[site], values, rtol=1e-12)
    assert any(said in remark for remark in found.remarks) if said else not found.remarks


LONG = [10**24 + 997 * 10**18 * k * k for k in range(60)]
WIDE = [("ab"[k % 2], k % 9, k % 3 % 2) for k in range(60)]


def labelled(cell, mark=","):
    return text([(site, x, cell(k)) for k, (site, x, _) in enumerate(PLAIN)], mark=mark)


SAID = {  # file, content, arguments, features that are left, what is said
    "count target": (
        labelled(lambda k: k % 10),
        {},
        ("x",),
        "is read as numbers, 0 to 9; --task counts or classification otherwise",
    ),
    "few labels": (
        labelled(lambda k: k % 3),
        {},
        ("x",),
        "is read as 3 labels; --task regression otherwise",
    ),
    "long identifier": (
        text([(*row, LONG[k]) for k, row in enumerate(WIDE)], ("site", "x", "ill", "key")),
        {},
        ("x",),
        "Column 'key' left out: a name for every row",
    ),
    "six digits": (
        text(
            [(*row, 100_000 + 7919 * k) for k, row in enumerate(WIDE)],
            ("site", "x", "ill", "number"),
        ),
        {},
        ("x",),
        "Column 'number' left out: a name for every row",
    ),
    "called an identifier": (
        text([(*row, 7 * k) for k, row in enumerate(WIDE)], ("site", "x", "ill", "patient_id")),
        {},
        ("x",),
        "Column 'patient_id' left out",
    ),
    "unique texts": (
        text([(*row, f"n{k}") for k, row in enumerate(PLAIN)], ("site", "x", "ill", "name")),
        {},
        ("x",),
        "Column 'name' left out: 24 different texts in 24 rows",
    ),
    "true and false": (
        text(
            [(*row, str(k % 2 == 0)) for k, row in enumerate(PLAIN)], ("site", "x", "ill", "smoker")
        ),
        {},
        ("x", "smoker"),
        "Column 'smoker' is read as one number: 'True' is 1",
    ),
    "dates": (
        text(
            [(*row, f"2024-01-{k + 1:02}") for k, row in enumerate(PLAIN)],
            ("site", "x", "ill", "day"),
        ),
        {},
        ("x",),
        "Column 'day' left out: it holds dates such as '2024-01-01'; --dates",
    ),
    "german dates": (
        text(
            [(*row, f"{k + 1}.1.2024") for k, row in enumerate(PLAIN)], ("site", "x", "ill", "day")
        ),
        {"dates": True},
        (
            "x",
            "day (day of year)",
            *(
                f"day (weekday)={day}"
                for day in (
                    "1 Monday",
                    "2 Tuesday",
                    "3 Wednesday",
                    "4 Thursday",
                    "5 Friday",
                    "6 Saturday",
                    "7 Sunday",
                )
            ),
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_columns_are_understood_or_left_out_by_name(tmp_path, case):
    content, more, features, said = SAID[case]
    found = opened(tmp_path, "a.csv", content, **more)
    assert set(found.encoded[0].features) == set(features)
    assert any(said in remark for remark in found.remarks) if said else not found.remarks


REFUSED = {
    "empty": ("a.csv", "", {}, "is empty; a line with column names is expected first"),
    "names alone": ("a.csv", "site,x,ill\n", {}, "has column names but no rows"),
    "short row": ("a.csv", text() + "a,1\n", {}, "has 2 values in line 26, but 3 columns"),
    "unclear thousands": (
        "a.csv",
        text([(s, f"{k},500", y) for k, (s, _, y) in enumerate(PLAIN)], mark=";"),
        {},
        "say --decimal , or",
    ),
    "constant number": (
        "a.csv",
        labelled(lambda _: 1.5),
        {},
        "All rows have the target 1.5: is 'ill' the right",
    ),
    "constant label": (
        "a.csv",
        labelled(lambda _: 1),
        {},
        "have the label 1: is it the right target?",
    ),
    "two in a zip": (
        "a.zip",
        zipped(a=text(), b=text()),
        {},
        "holds 2 files: unpack it and name the folder",
    ),
    "not a zip": ("a.zip", b"PK nonsense", {}, "is no zip file, or is cut off"),
    "no gzip": ("a.csv.gz", b"site,x", {}, "is no gzip file, or is cut off"),
    "binary": ("a.csv", bytes(range(256)) * 20, {}, "is no text: save it as .csv"),
    "broken json": ("a.jsonl", '{"site": "a"', {}, "cannot be read as JSON"),
    "json without rows": ("a.json", "[1, 2]", {}, "one JSON object a line is expected"),
    "nested json": ("a.jsonl", as_lines(lambda k: {"x": [k]}), {}, "has values of type list"),
    "no parquet": ("a.parquet", b"PAR1", {}, "cannot be read as Parquet"),
    "word document": ("a.docx", b"PK", {}, "is no table that can be read: save it as .csv"),
    "one group": ("a.csv", text(), {"split_by": "site"}, "has a single value in 'site'"),
    "unknown split": ("a.csv", text(), {"split_by": "day"}, "Unknown column of 'a.csv', 'day'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_used_ends_in_one_sentence(tmp_path, case):
    name, content, more, sentence = REFUSED[case]
    with pytest.raises(InputError) as caught:
        opened(tmp_path, name, content, **more)
    assert sentence in str(caught.value)
    assert str(caught.value)[-1] in ".?"


def test_excel_with_dates_and_truth_values(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["site", "x", "smoker", "day", "ill"])
    for k, (site, x, ill) in enumerate(PLAIN):
        book.active.append([site, x, k % 2 == 0, datetime(2024, 3, 1 + k), ill])
    book.save(tmp_path / "a.xlsx")
    found = read_clients(TableFile(tmp_path / "a.xlsx", "site", "ill", standardise=False))
    assert found.encoded[0].features == ("x", "smoker")
    np.testing.assert_array_equal(found.rows[0].table.columns[0].values, X[::2])
    assert found.remarks == (
        "Column 'day' left out: it holds dates such as '2024-03-01 00:00:00.000000'; --dates learns from weekday and "
        "season.",
    )


def test_marks_of_missing_values_among_numbers_are_no_texts(tmp_path):
    """In JSON lines and in Excel as in CSV; other texts still make categories."""
    openpyxl = pytest.importorskip("openpyxl")
    cells = ["n/a" if k % 6 == 0 else None if k % 6 == 1 else k % 7 for k in range(N)]
    book = openpyxl.Workbook()
    book.active.append(["site", "x", "mixed", "ill"])
    for (site, _, ill), cell in zip(PLAIN, cells, strict=True):
        book.active.append([site, cell, cell or "zero", ill])
    book.save(tmp_path / "a.xlsx")
    (tmp_path / "a.jsonl").write_text(
        as_lines(lambda k: {"x": cells[k], "mixed": cells[k] or "zero"})
    )
    for name in ("a.xlsx", "a.jsonl"):
        x, mixed = (
            read_clients(TableFile(tmp_path / name, "site", "ill", columns=("x", "mixed")))
            .rows[0]
            .table.columns
        )
        assert (x.kind, mixed.kind, mixed.categories) == ("number", "category", (*"123456", "zero"))
        np.testing.assert_array_equal(
            x.values, [k if isinstance(k, int) else np.nan for k in cells[::2]]
        )


def test_parts_of_dates_are_those_of_the_calendar(tmp_path):
    days = [datetime(2023, 12, 20 + k % 12, k % 24, 30) for k in range(N)]
    rows = [(*row, day.isoformat(" ")) for row, day in zip(PLAIN, days, strict=True)]
    (tmp_path / "a.csv").write_text(text(rows, ("site", "x", "ill", "at")))
    source = TableFile(tmp_path / "a.csv", "site", "ill", dates=True)
    first = read_clients(source).rows[0].table.columns
    assert [c.name for c in first] == ["x", "at (day of year)", "at (weekday)", "at (hour)"]
    own = days[::2]
    assert first[1].values.tolist() == [day.timetuple().tm_yday for day in own]
    assert [first[2].categories[k] for k in first[2].values] == [
        f"{d.isoweekday()} {d:%A}" for d in own
    ]
    assert first[3].values.tolist() == [day.hour + 0.5 for day in own]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_with_a_zone_mean_the_hour_of_that_zone(tmp_path, unit):
    """In CSV as in Parquet: half past midnight in Berlin is no hour of the day before."""
    begin = datetime(2024, 7, 1, 0, 30, tzinfo=timezone(timedelta(hours=2)))
    days = [begin + timedelta(hours=7 * k) for k in range(N)]
    at = arrow.array(days, arrow.timestamp(unit, "+02:00"))
    rows = [(*row, day.isoformat()) for row, day in zip(PLAIN, days, strict=True)]
    header = ("site", "x", "ill", "at")
    for name, content in (("a.csv", text(rows, header)), ("a.parquet", as_parquet(x=X, at=at))):
        found = {
            c.name: c for c in opened(tmp_path, name, content, dates=True).rows[0].table.columns
        }
        assert found["at (hour)"].values.tolist() == [day.hour + 0.5 for day in days[::2]]
        weekday = found["at (weekday)"]
        assert [weekday.categories[k] for k in weekday.values] == [
            f"{d.isoweekday()} {d:%A}" for d in days[::2]
        ]


def test_a_folder_is_a_table_with_a_file_for_every_client(tmp_path):
    for name, rows in (("north", PLAIN[:12]), ("south", PLAIN[12:])):
        (tmp_path / f"{name}.csv").write_text(text([row[1:] for row in rows], ("x", "ill")))
    (tmp_path / "notes.md").write_text("nothing")
    found = read_clients(TableFile(tmp_path, "file", "ill"))
    assert [own.name for own in found.rows] == ["north", "south"]
    assert [len(own.held) for own in found.rows] == [12, 12]
    assert found.remarks == (f"2 files in {tmp_path.name!r}.",)
    np.testing.assert_array_equal(found.rows[1].table.columns[0].values, X[12:])
    (tmp_path / "west.csv").write_text("x,sick\n1,1\n")
    with pytest.raises(
        InputError, match=r"'west.csv' has no column 'ill', which 'north.csv' has\."
    ):
        read_clients(TableFile(tmp_path, "file", "ill"))
    (tmp_path / "west.csv").write_text("x,ill\n1,1\ninf,0\n")
    with pytest.raises(
        InputError, match=r"an infinite value in column 'x', line 3 of 'west.csv'\."
    ):
        read_clients(TableFile(tmp_path, "file", "ill"))


@pytest.mark.parametrize("kind", ["date", "number", "group"])
def test_rows_are_split_by_a_column(tmp_path, kind):
    cell = {
        "date": lambda k: date(2024, 1, 1 + k),
        "number": lambda k: k,
        "group": lambda k: f"g{k % 12 // 2}",
    }[kind]
    rows = [(*row, cell(N - 1 - k)) for k, row in enumerate(PLAIN)]
    (tmp_path / "a.csv").write_text(text(rows, ("site", "x", "ill", "by")))
    found = read_clients(TableFile(tmp_path / "a.csv", "site", "ill", split_by="by", test=0.25))
    assert found.encoded[0].features == ("x",)
    for own in found.rows:
        by = np.array([row[3] for row in rows if row[0] == own.name])
        assert own.held.sum() == (4 if kind == "group" else 3)
        assert not set(by[own.held]) & set(by[~own.held])
        if kind != "group":
            assert by[own.held].min() > by[~own.held].max()
    how = "whole groups drawn at random" if kind == "group" else "the latest rows of every client"
    assert f"Held out by 'by': {how}." in found.remarks


@pytest.mark.parametrize("written", ["%Y/%m/%d", "%Y/%m/%d %H:%M", "%d-%b-%Y", "%d %B %Y"])
def test_the_latest_rows_are_held_out_however_a_clear_date_is_written(tmp_path, written):
    days = [datetime(2024, 3 + k % 3, 1 + k, k) for k in range(N)]  # of March, April and May
    content = text(
        [(*row, f"{day:{written}}") for row, day in zip(PLAIN, days, strict=True)],
        ("site", "x", "ill", "by"),
    )
    found = opened(tmp_path, "a.csv", content, split_by="by", test=0.25)
    assert "Held out by 'by': the latest rows of every client." in found.remarks
    for k, own in enumerate(found.rows):
        by = np.array(days[k::2])
        assert by[own.held].min() > by[~own.held].max()


def test_held_out_rows_may_come_from_a_file_of_their_own(tmp_path):
    (tmp_path / "train.csv").write_text(text(PLAIN[:16]))
    (tmp_path / "test.csv").write_text(text(PLAIN[16:]))
    source = TableFile(
        tmp_path / "train.csv", "site", "ill", test_file=tmp_path / "test.csv", standardise=False
    )
    found = read_clients(source)
    assert [own.rows for own in found.rows] == [(8, 4), (8, 4)]
    np.testing.assert_array_equal(found.encoded[1].test[0][:, 0], X[17::2])
    (tmp_path / "test.csv").write_text(text(PLAIN[16::2]))
    with pytest.raises(InputError, match=r"Client 'b' has no rows in 'test.csv'"):
        read_clients(source)


def test_a_target_of_broken_numbers_needs_no_word_on_the_task(tmp_path):
    found = opened(tmp_path, "a.csv", labelled(lambda k: k / 2))
    assert not any("--task" in remark for remark in found.remarks)


@pytest.mark.parametrize("cell", ["${:,.2f}", "{:.2f} %"])
def test_a_target_of_money_or_percent_is_a_number_unless_labels_are_asked_for(tmp_path, cell):
    content = labelled(lambda k: f'"{cell.format(950 + 12.25 * k)}"')
    amounts = 950 + 12.25 * np.arange(N)
    found = opened(tmp_path, "a.csv", content)
    np.testing.assert_array_equal(found.rows[0].target.values, amounts[::2])
    assert f"Target 'ill' is read as numbers: {cell.format(950)!r} is 950." in found.remarks
    labels = opened(tmp_path, "a.csv", content, task="classification").schema["labels"]
    assert set(labels) == {cell.format(amount) for amount in amounts}


def test_a_category_without_a_value_anywhere_may_be_asked_for(tmp_path):
    content = text([(*row, "") for row in PLAIN], ("site", "x", "ill", "ward"))
    found = opened(tmp_path, "a.csv", content, columns=("x", "ward"), categories=("ward",))
    assert found.schema["columns"][1]["categories"] == []


@pytest.mark.parametrize(
    "cells", ["true false", "07:30 08:15", "2024-01-01 2024-01-02", "1% high", "$1 €2"]
)
def test_other_texts_in_a_target_stay_labels(tmp_path, cells):
    found = opened(tmp_path, "a.csv", labelled(lambda k: cells.split()[k % 2]))
    assert found.schema["labels"] == sorted(cells.split())


def test_several_files_are_one_table_and_each_a_client(tmp_path):
    """In any order of columns; a column that one lacks, a file that is not there and one named twice are said."""
    a, b, c = (tmp_path / f"{name}.csv" for name in "abc")
    rows = "".join(f"{i},{i % 3},{i % 2}\n" for i in range(12))
    a.write_text("age,visits,ill\n" + rows)
    b.write_text("ill,age,visits\n" + "".join(f"{i % 2},{i},{i % 3}\n" for i in range(12)))
    c.write_text("age,ill\n" + "".join(f"{i},{i % 2}\n" for i in range(12)))
    found = read_clients(TableFile(a, "file", "ill", more_files=(b,), test=0.0))
    assert [own.name for own in found.rows] == ["a", "b"]
    one, other = (np.sort(own.train[0], axis=0) for own in found.encoded)
    assert one.shape == other.shape == (12, 2)
    np.testing.assert_array_equal(one, other)
    assert any(remark == "2 files: a, b." for remark in found.remarks)
    for more, words in (
        ((c,), "'c.csv' has no column 'visits', which 'a.csv' has."),
        ((tmp_path / "d.csv",), "There is no file"),
        ((a,), "'a.csv' is named twice."),
        ((tmp_path,), "is a folder: name one folder, or several files."),
    ):
        with pytest.raises(InputError, match=words):
            read_clients(TableFile(a, "file", "ill", more_files=more))


@pytest.mark.parametrize("above", ["# exported 2024", "Report of ward 7,,"])
def test_a_line_above_the_names_is_told(tmp_path, above):
    file = tmp_path / "a.csv"
    file.write_text(
        f"{above}\nsite,ill,age\n" + "".join(f"{'ab'[i % 2]},{i % 2},{i}\n" for i in range(9))
    )
    with pytest.raises(InputError, match="delete what stands above the column names"):
        read_clients(TableFile(file, "site", "ill"))


def test_labels_that_differ_in_case_only_are_told(tmp_path):
    file = tmp_path / "a.csv"
    labels = ["yes", "no", "No", "yes"]
    file.write_text(
        "site,ill,x\n" + "".join(f"{'ab'[i % 2]},{labels[i % 4]},{i % 5}.5\n" for i in range(40))
    )
    found = read_clients(TableFile(file, "site", "ill"))
    assert (
        "Labels 'No' and 'no' of 'ill' are read as different ones: write them alike."
        in found.remarks
    )
