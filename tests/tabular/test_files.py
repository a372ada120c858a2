"""Files as they come: each ends in a table, with what was detected said, or in a refusal."""

import gzip
import io
from datetime import date, datetime

import numpy as np
import pytest

from cases.refusals import refuses
from cases.tables import PLAIN, N, X, labelled, opened, read, text, with_column, write
from scaffpd.data.tabular.formats import open_table
from scaffpd.errors import InputError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def as_parquet(**columns):
    given = {"site": [row[0] for row in PLAIN], "ill": [row[2] for row in PLAIN], **columns}
    packed = io.BytesIO()
    parquet.write_table(arrow.table(given), packed)
    return packed.getvalue()


def quoted(plain):
    return "".join(f'"{line}"\n'.replace(",", '","') for line in plain.splitlines())


EUROPE = text(mark=";", decimal=",").replace("site", "Größe").encode("cp1252")
CLEAN = {  # file, content, arguments: x comes out as 0, 1.25, 2.5, …, and this is said
    "comma": ("a.csv", text(), {}, ""),
    "semicolon": ("a.csv", text(mark=";", decimal=","), {}, "semicolons between columns"),
    "tab": ("a.tsv", text(mark="\t"), {}, ""),
    "tab in csv": ("a.csv", text(mark="\t"), {}, "tabs between columns"),
    "pipe in txt": ("a.txt", text(mark="|"), {}, "pipes between columns"),
    "bom": ("a.csv", text().encode("utf-8-sig"), {}, ""),
    "utf-16": ("a.csv", text().encode("utf-16"), {}, "UTF-16 text"),
    "european": ("a.csv", EUROPE, {"client": "Größe"}, "Windows-1252 (Latin-1) text with semi"),
    "gzip": ("a.csv.gz", gzip.compress(text().encode()), {}, ""),
    "parquet": ("a.parquet", as_parquet(x=X), {}, ""),
    "windows line ends": ("a.csv", text().replace("\n", "\r\n"), {}, ""),
    "blank lines first": ("a.csv", "\n\n" + text(), {}, ""),
    "spaces around": ("a.csv", text().replace(",", " , "), {}, ""),
    "quotes": ("a.csv", quoted(text()), {}, ""),
}


@pytest.mark.parametrize("case", CLEAN)
def test_a_file_ends_in_a_table_and_what_was_detected_is_said(tmp_path, case):
    name, content, more, said = CLEAN[case]
    found = opened(tmp_path, content, name, **more)
    assert found.encoded[0].features == ("x",)
    for k, own in enumerate(found.rows):
        np.testing.assert_array_equal(own.table.columns[0].values, X[k::2])
    assert any(said in remark for remark in found.remarks) if said else not found.remarks


LONG = [10**24 + 997 * 10**18 * k * k for k in range(60)]
WIDE = [("ab"[k % 2], k % 9, k % 3 % 2) for k in range(60)]
NAMES = "names, not quantities"
SAID = {  # content, features that are left, what is said
    "count target": (labelled(lambda k: k % 10), ("x",), "--task counts or classification"),
    "few labels": (labelled(lambda k: k % 3), ("x",), "is read as 3 labels; --task regression"),
    "long identifier": (with_column(LONG.__getitem__, rows=WIDE), ("x",), NAMES),
    "six digits": (with_column(lambda k: 100_000 + 7919 * k, rows=WIDE), ("x",), NAMES),
    "called so": (with_column(lambda k: 7 * k, "patient_id", WIDE), ("x",), NAMES),
    "consecutive": (with_column(lambda k: k + 1000, rows=WIDE), ("x",), NAMES),
    "an index": (
        with_column(lambda k: k // 2, "age_at_index", 2 * WIDE),
        ("x", "age_at_index"),
        "",
    ),
    "paid": (with_column(lambda k: k // 2, "paid", 2 * WIDE), ("x", "paid"), ""),
    "subjects": (with_column(lambda k: k // 2, "ID", 2 * WIDE), ("x",), "--split-by ID keeps"),
    "unique texts": (with_column(lambda k: f"n{k}"), ("x",), "24 different texts in 24 rows"),
    "constant": (with_column(lambda k: "u"), ("x",), "the same value everywhere"),
    "empty": (with_column(lambda k: ""), ("x",), "no values"),
    "money": (with_column(lambda k: f"€{k}"), ("x", "z"), "'z' is read as numbers in €"),
    "per cent": (with_column(lambda k: f"{k / 8} %"), ("x", "z"), "'z' is read as numbers in %"),
    "two marks": (with_column(lambda k: f"{'€$'[k % 2]}{k}"), ("x",), "24 different texts"),
    "truth": (with_column(lambda k: k % 2 == 0), ("x", "z=False", "z=True"), ""),
    "dates": (with_column(lambda k: f"2024-01-{k + 1:02}"), ("x",), "holds dates such as '2024-01"),
    "german": (with_column(lambda k: f"{k + 1}.1.2024"), ("x",), "holds dates such as '1.1.2024'"),
    "american": (with_column(lambda k: f"1/{k + 1}/2024"), ("x",), "holds dates such as '1/1/2024"),
    "an odd cell": (
        with_column(lambda k: "odd" if k == 8 else k % 5),
        ("x", "z=0", "z=1", "z=2", "z=3", "z=4", "z=odd"),
        "is read as categories because of 'odd' in line 10",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_columns_are_understood_or_left_out_by_name(tmp_path, case):
    content, features, said = SAID[case]
    found = opened(tmp_path, content)
    assert set(found.encoded[0].features) == set(features)
    assert any(said in remark for remark in found.remarks) if said else not found.remarks


def test_what_is_asked_for_by_name_is_learnt_from(tmp_path):
    found = opened(tmp_path, with_column(lambda k: f"n{k}"), columns=("x", "z"), test=0.0)
    assert len(found.encoded[0].features) == 1 + N
    empty = opened(tmp_path, with_column(lambda k: ""), columns=("x", "z"), categories=("z",))
    assert empty.schema["columns"][1]["categories"] == []


def test_amounts_with_one_mark_are_numbers_and_dropped_columns_are_not_learnt_from(tmp_path):
    rows = [(site, f"{x:.2f}%", k) for k, (site, x, _) in enumerate(PLAIN)]
    found = opened(tmp_path, with_column(lambda k: k, "y", rows), target="x", drop=("y",))
    assert found.task.name == "regression"
    np.testing.assert_array_equal(found.rows[0].target.values, X[::2])
    assert [column.name for column in found.rows[0].table.columns] == ["ill"]
    assert "Target 'x' is read as numbers in %." in found.remarks


REFUSED = [
    ("a.csv", "", "empty-file", {}),
    ("a.csv", "site,x,ill\n", "no-rows", {}),
    ("a.csv", text() + "a,1\n", "row-length", {}),
    ("a.csv", text() + " \n", "row-length", {}),
    ("a.csv", text() + 'a,"1,0\n', "line-unreadable", {}),
    ("a.csv", text() + 'a,"1"2,0\n', "line-unreadable", {}),
    ("a.csv", text().encode() + b"a,\0,1\n", "not-a-text", {}),
    ("a.csv", bytes(range(256)) * 20, "not-a-text", {}),
    ("a.csv", "# exported 2024\n" + text(), "row-length", {}),
    ("a.csv", text(header=("site", "x", "x")), "column-named-twice", {}),
    ("a.csv", text(header=("site", "", "ill")), "column-without-name", {}),
    (
        "a.csv",
        text([(site, f"{k},500", y) for k, (site, _, y) in enumerate(PLAIN)], mark=";"),
        "decimal-mark-unclear",
        {},
    ),
    ("a.csv", text() + "a,inf,1\n", "infinite-value", {}),
    (
        "a.csv",
        text([(*row[:2], f"{'$€'[k % 2]}{k}.5") for k, row in enumerate(3 * PLAIN)]),
        "texts-in-target",
        {},
    ),
    ("a.csv", labelled(lambda k: "uv"[k % 2]), "texts-in-target", "regression"),
    (
        "a.csv",
        text([(*row[:2], f"n{k}") for k, row in enumerate(3 * PLAIN)]),
        "too-many-labels",
        "classification",
    ),
    ("a.csv", text(), "no-workbook", {"sheet": "one"}),
    ("a.csv", text(), "unknown-name", {"drop": ("y",)}),
    ("a.csv", labelled(lambda k: k / 2), "labels-not-whole", "classification"),
    ("a.csv", labelled(lambda _: 1.5), "constant-target", {}),
    ("a.csv", labelled(lambda _: 1), "constant-target", {}),
    ("a.csv.gz", b"site,x", "file-cut-off", {}),
    ("a.csv.gz", gzip.compress(text().encode())[:-9], "file-cut-off", {}),
    ("a.parquet", b"PAR1", "parquet-unreadable", {}),
    ("a.parquet", as_parquet(x=[[k] for k in range(N)]), "column-type", {}),
    ("a.parquet", as_parquet(x=[b"x"] * N), "column-type", {}),
    ("a.docx", b"PK", "not-a-table", {}),
    ("a.csv", text(), "nothing-to-split-by", {"split_by": "site"}),
    ("a.csv", text(), "unknown-name", {"columns": ("z",)}),
    ("a.csv", labelled(lambda _: ""), "column-without-values", {}),
    ("a.csv", text([("a", *row[1:]) for row in PLAIN]), "too-few-clients", {}),
    ("a.csv", text(), "client-is-target", {"client": "ill"}),
    ("a.csv", text(), "column-of-two-roles", {"columns": ("ill",)}),
    (
        "a.csv",
        text([(site, "", ill) for site, _, ill in PLAIN]),
        "nothing-to-learn-from",
        {},
    ),
]


@pytest.mark.parametrize(("name", "content", "code", "more"), REFUSED)
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, name, content, code, more):
    with refuses(code) as caught:
        opened(tmp_path, content, name, **({"task": more} if isinstance(more, str) else more))
    assert str(caught.value)[-1] in ".?"
    assert "\n" not in str(caught.value)


def test_excel_with_dates_truth_values_and_marks_of_missing_values(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    cells = ["n/a" if k % 6 == 0 else None if k % 6 == 1 else k % 7 for k in range(N)]
    book = openpyxl.Workbook()
    book.active.append(["site", "x", "smoker", "day", "gaps", "mixed", "ill"])
    for k, (site, x, ill) in enumerate(PLAIN):
        row = [site, x, k % 2 == 0, datetime(2024, 3, 1 + k), cells[k], cells[k] or "zero", ill]
        book.active.append(row)
    book.create_sheet("notes").append(["a", "b"])
    book.save(tmp_path / "a.xlsx")
    found = read(tmp_path / "a.xlsx")
    assert any("Sheet 'Sheet' is read, not 'notes'" in remark for remark in found.remarks)
    assert not any("Sheet" in one for one in read(tmp_path / "a.xlsx", sheet="Sheet").remarks)
    for sheet, what in (("notes", "column"), ("x", "sheet")):
        with pytest.raises(InputError, match=f"Unknown {what} of"):
            read(tmp_path / "a.xlsx", sheet=sheet)
    x, smoker, gaps, mixed = found.rows[0].table.columns
    np.testing.assert_array_equal(x.values, X[::2])
    assert (smoker.kind, gaps.kind, mixed.categories) == ("number", "number", (*"123456", "zero"))
    wanted = [cell if isinstance(cell, int) else np.nan for cell in cells[::2]]
    np.testing.assert_array_equal(gaps.values, wanted)
    assert any("'day' left out: it holds dates" in remark for remark in found.remarks)


def test_a_folder_is_a_table_with_a_file_for_every_client(tmp_path):
    for name, rows in (("north", PLAIN[:12]), ("south", PLAIN[12:])):
        write(tmp_path, text([row[1:] for row in rows], ("x", "ill")), f"{name}.csv")
    write(tmp_path, "nothing", "notes.md")
    found = read(tmp_path, client="file")
    assert [(own.name, len(own.held)) for own in found.rows] == [("north", 12), ("south", 12)]
    assert found.remarks == (f"2 files in {tmp_path.name!r}.",)
    np.testing.assert_array_equal(found.rows[1].table.columns[0].values, X[12:])
    write(tmp_path, "x,sick\n1,1\n", "west.csv")
    with refuses("column-missing"):
        read(tmp_path, client="file")
    write(tmp_path, "x,ill\n1,1\ninf,0\n", "west.csv")
    with refuses("infinite-value") as caught:
        read(tmp_path, client="file")
    assert "line 3 of 'west.csv'" in str(caught.value)
    for name in ("config.toml", "run.json"):
        write(tmp_path, "", name)
    with refuses("folder-of-a-run"):
        read(tmp_path, client="file")


def test_columns_without_a_name_do_not_keep_files_from_each_other(tmp_path):
    lines = ["x,ill,,", *(f"{x},{ill},," for _, x, ill in PLAIN)]
    a, b = (write(tmp_path, "\n".join(lines) + "\n", f"{name}.csv") for name in "ab")
    found = read(a, b, client="file", columns=["x"])
    assert [own.name for own in found.rows] == ["a", "b"]
    with refuses("column-without-name"):
        read(a, b, client="file")


def test_several_files_are_one_table_in_any_order_of_columns(tmp_path):
    a = write(tmp_path, text([row[1:] for row in PLAIN], ("x", "ill")))
    b = write(tmp_path, text([row[:0:-1] for row in PLAIN], ("ill", "x")), "b.csv")
    found = read(a, b, client="file", test=0.0)
    assert [own.name for own in found.rows] == ["a", "b"]
    np.testing.assert_array_equal(found.encoded[0].train[0], found.encoded[1].train[0])
    assert "2 files: a, b." in found.remarks
    other = write(tmp_path, as_parquet(x=X), "c.parquet")
    refused = {
        "data-file-unreadable": tmp_path / "d.csv",
        "file-named-twice": a,
        "folder-among-files": tmp_path,
        "two-formats": other,
    }
    for code, more in refused.items():
        with refuses(code):
            read(a, more, client="file")


def test_files_of_one_name_are_called_by_their_folders(tmp_path):
    files = [tmp_path / name for name in ("koeln/rows.csv", "genf/rows.csv", "genf/more.csv")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text())
    labels = [
        sorted(set(open_table(*some).columns["file"].to_pylist()))
        for some in (files[:2], files[1:])
    ]
    assert labels == [["genf", "koeln"], ["more", "rows"]]
    with refuses("file-named-twice"):
        open_table(*files)


@pytest.mark.parametrize("kind", ["date", "number", "group"])
def test_rows_are_split_by_a_column(tmp_path, kind):
    cell = {
        "date": lambda k: date(2024, 1, N - k),
        "number": lambda k: N - k,
        "group": lambda k: f"g{k % 12 // 2}",
    }[kind]
    found = opened(tmp_path, with_column(cell, "by"), split_by="by", test=0.25)
    assert found.encoded[0].features == ("x",)
    for k, own in enumerate(found.rows):
        by = np.array([cell(row) for row in range(k, N, 2)])
        assert own.held.sum() == (4 if kind == "group" else 3)
        assert not set(by[own.held]) & set(by[~own.held])
        if kind != "group":
            assert by[own.held].min() > by[~own.held].max()
    how = "whole groups drawn at random" if kind == "group" else "the latest rows of every client"
    assert f"Held out by 'by': {how}." in found.remarks


@pytest.mark.parametrize("written", ["%Y-%m-%d %H:%M", "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y"])
def test_the_latest_rows_are_held_out_however_a_clear_date_is_written(tmp_path, written):
    days = [datetime(2024, 3 + k % 3, 1 + k, k) for k in range(N)]  # of March, April and May
    content = with_column(lambda k: f"{days[k]:{written}}", "by")
    for k, own in enumerate(opened(tmp_path, content, split_by="by", test=0.25).rows):
        by = np.array(days[k::2])
        assert by[own.held].min() > by[~own.held].max()


def test_dates_without_a_clear_order_are_refused(tmp_path):
    for cell in (
        lambda k: f"{1 + k % 7}/{1 + k % 12}/2023",
        lambda k: "31.02.2024" if k == 7 else f"{1 + k}.01.2024",
    ):
        with refuses("dates-without-order"):
            opened(tmp_path, with_column(cell, "tag"), split_by="tag")


def test_held_out_rows_may_come_from_a_file_of_their_own(tmp_path):
    train = write(tmp_path, text(PLAIN[:16]))
    test = write(tmp_path, text(PLAIN[16:]), "test.csv")
    found = read(train, test=test)
    assert [own.rows for own in found.rows] == [(8, 4), (8, 4)]
    held = found.encoded[1].test[0][:, 0] * found.deviation[0] + found.mean[0]
    np.testing.assert_allclose(held, X[17::2], rtol=1e-12)
    with refuses("two-splits"):
        read(train, test=test, split_by="x")
    write(tmp_path, text(PLAIN[16::2]), "test.csv")
    with refuses("client-without-rows"):
        read(train, test=test)


def test_texts_in_a_target_stay_labels(tmp_path):
    for cells in ("true false", "07:30 08:15", "2024-01-01 2024-01-02", "1% high", "$1 €2"):
        found = opened(tmp_path, labelled(lambda k, cells=cells: cells.split()[k % 2]))
        assert found.schema["labels"] == sorted(cells.split())
