"""With noise, tables that differ in one record have the same posts, but for the noised ones.

A record may say anything: a label that nobody agreed on, a number that no computer has, a text
where all others are numbers. None of it may end a run, and none may show in a number without noise.
"""

from __future__ import annotations

import copy
import csv
import io
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import scaffpd as sp
from cases.posts import Posts, same, small_federation, write_table
from cases.refusals import refuses
from cases.silos import mostly_long, opened, run, wanted
from scaffpd.data.tabular.agree import scale_of
from scaffpd.data.tabular.cellwise import as_number, as_text, open_cells
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.dataset import Dataset
from scaffpd.deploy.ledger import TableLedger
from scaffpd.deploy.rows import SiloRows
from scaffpd.pipeline.sites import Encoding
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.silo import SiloFile

ROWS = 120
COLUMNS = (
    'age = [20, 90]\nchol = [0, 600]\ncp = ["p", "q", "*"]\nsex = ["f", "m"]\nsmokes = [0, 1]\n'
)
PRIVATE = "[privacy]\nepsilon = 4.0\n[training]\nrounds = 2\n"
SUBJECT = 'subject = "who"\n'
UGLY = ("1e400", "3,5", "2", "x", "", "NA", "-1e308", "nan", "inf", "é\n", 'a"b', "0x10", "1_0")
NOISED = {
    ("counts", "noisy"),
    *(("gradients", part) for part in ("loss", "loss_error", "gradient_error", "norm", "c")),
    *(("losses", "loss"), ("local_updates", "norm"), ("local_updates", "d"), ("memory", "memory")),
}


def people(seed=0):
    draw = np.random.default_rng(seed)
    return [
        {
            "who": f"patient {int(draw.integers(60))}",
            "age": int(draw.integers(30, 80)),
            "chol": round(float(draw.normal(220, 40)), 1),
            "cp": "pqr"[int(draw.integers(3))],
            "sex": "fm"[int(draw.random() < 0.5)],
            "smokes": int(draw.random() < 0.3),
            "ill": int(draw.random() < 0.5),
        }
        for _ in range(ROWS)
    ]


def prepared(folder, more="", silo="", rest=PRIVATE):
    tables = {name: people(k) for k, name in enumerate("abc")}
    return small_federation(
        folder, tables, COLUMNS, more=more, model="", rest=rest, silo=silo + "test = 0.25\n"
    )


def neighbours(number, rows):
    """Tables in which one record is another one: a cell, several, or all of it."""
    draw = np.random.default_rng(17)
    for k in range(number):
        other = copy.deepcopy(rows)
        record = other[int(draw.integers(len(rows)))]
        names = list(record)
        cells = draw.choice(names, int(draw.integers(1, len(names) + 1)), replace=False)
        for name in cells if k else names:
            record[name] = str(draw.choice(UGLY))
        yield other


def facts(rows):
    """All that a silo says without noise, and what it decides by: from its rows."""
    schema = rows.terms.encoding()
    encoding = Encoding(schema, *scale_of(schema, None))
    cohort = rows.cohort(encoding, rows.terms.modelled(schema))
    oracle = cohort.channel.train.oracle
    found = cohort.constants()
    public = (
        *(np.ravel(found.smoothness), np.ravel(found.strong_convexity), np.ravel(found.steepest)),
        *(np.ravel(found.samples), found.convex, found.quadratic, found.noisy),
        *(rows.data.records, oracle.clips, rows.data.length),
    )
    return repr(public), oracle


@pytest.mark.parametrize("silo", mostly_long(["", SUBJECT], SUBJECT))
def test_two_hundred_pairs_of_tables_say_the_same(tmp_path, silo):
    path, places = prepared(tmp_path, silo=silo)
    file = FederationFile.read(path)
    own = SiloFile.read(places["a"])
    agreement = Agreement.made(file, {n: s.identity.card for n, s in opened(places).items()})
    ledger = TableLedger(own.ledger)
    ledger.take()

    def read():
        rows = SiloRows(own, agreement, file, ledger)
        rows.data.check(own.limits)
        rows.noise = {k: v for k, v in rows.noise.items() if k != "counts"}
        return rows, *facts(rows)

    with ledger:
        base = people(0)
        rows, public, oracle = read()
        x = torch.linspace(-1, 1, oracle.dimension).double()
        sums = oracle.sums.gradients(x), oracle.sums.losses(x)
        clips = [clip.most / clip.unit for clip in oracle.clips]  # in units
        place = own.data.file
        for other in neighbours(200, base):
            write_table(place, other)
            now, said, changed = read()
            assert said == public
            # no other record moved, and this one moved the sums by no more than it may
            for before, after, most in zip(
                sums, (changed.sums.gradients(x), changed.sums.losses(x)), clips, strict=True
            ):
                assert float((after - before).norm()) <= 2 * most
            differ = ~np.isin(_marks(now), _marks(rows))
            assert differ.sum() <= 1


def _marks(rows):
    """Encoded rows with their targets, and whether they are held out."""
    schema = rows.terms.encoding()
    every = np.ones(len(rows.data.held), dtype=bool)
    X = rows.data.matrix(schema, *scale_of(schema, None), every, separate=True)
    return np.array(
        [
            hash((row.tobytes(), float(y), bool(out)))
            for row, y, out in zip(X, rows.data.target.values, rows.data.held, strict=True)
        ]
    )


MODES = {
    "lines": ("", PRIVATE, set()),
    "curves": ('curves = "on"\n', PRIVATE, set()),
    # what a sum with shared noise costs depends on weights, which follow from noised losses
    "shared": (
        "",
        PRIVATE.replace("4.0", "4.0\nshared = true") + "[rows]\na = 20\nb = 20\nc = 20\n",
        {("spent", "epsilon")},
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_whole_runs_of_adjacent_tables_differ_in_noised_numbers_alone(
    tmp_path, monkeypatch, fake_clock, mode
):
    more, rest, following = MODES[mode]
    posts = Posts(monkeypatch, "a")
    found = []
    for k, other in enumerate([people(0), *neighbours(4, people(0))]):
        path, places = prepared(tmp_path / f"{k}", more, SUBJECT, rest)
        write_table(places["a"].with_name("rows.csv"), other)
        outcome, _ = run(path, places)
        assert outcome.final, outcome.sentence
        found.append(posts.taken())
    assert {part for key, _ in found[0] for part in key} & NOISED
    assert all(same(found[0], other, NOISED | following) for other in found[1:])


TARGETS = {
    "labels": "",
    "numbers": 'kind = "squared"',
    "numbers of a binary loss": 'kind = "logistic"',
}


@pytest.mark.parametrize("kind", TARGETS)
def test_no_target_ends_a_run(tmp_path, kind):
    """Beyond all numbers, negative, a text, or the only one of its kind: each is that record's."""
    path, places = prepared(tmp_path)
    text = path.read_text().replace('kind = "logistic"', TARGETS[kind])
    path.write_text(text if kind == "labels" else text.replace("labels = [0, 1]\n", ""))
    file = FederationFile.read(path)
    own = SiloFile.read(places["a"])
    agreement = Agreement.made(file, {n: s.identity.card for n, s in opened(places).items()})
    ledger = TableLedger(own.ledger)
    ledger.take()
    said = set()
    with ledger:
        for target in ("1", *UGLY, "1e200", "-3", "0.5"):
            rows = people(0)
            for row in rows:
                row["ill"] = "0"
            rows[50]["ill"] = target
            write_table(own.data.file, rows)
            found, oracle = facts(SiloRows(own, agreement, file, ledger))
            x = torch.ones(oracle.dimension).double()
            assert torch.isfinite(oracle.sums.gradients(x)).all()
            said.add(found)
    assert len(said) == 1


FORMS = ("csv", "semicolons", "latin", "parquet", "xlsx")


def written(folder, form, rows):
    """The same table in another format."""
    names = list(rows[0])
    if form == "parquet":
        file = folder / "rows.parquet"
        pa.parquet.write_table(pa.table({n: [str(r[n]) for r in rows] for n in names}), file)
        return file
    if form == "xlsx":
        openpyxl = pytest.importorskip("openpyxl")
        book = openpyxl.Workbook()
        for row in [names, *([row[n] for n in names] for row in rows)]:
            book.active.append(row)
        book.save(folder / "rows.xlsx")
        return folder / "rows.xlsx"
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, delimiter=";" if form == "semicolons" else ",")
    writer.writeheader()
    writer.writerows(rows)
    file = folder / "rows.csv"
    file.write_bytes(text.getvalue().encode("cp1252" if form == "latin" else "utf-8"))
    return file


@pytest.mark.parametrize("form", FORMS)
def test_formats_read_every_cell_by_itself(tmp_path, form):
    rows = [{"a": k, "b": "é" if k % 2 else "e", "y": k % 2} for k in range(40)]
    before = open_cells(written(tmp_path, form, rows))
    for ugly in (*UGLY, ";", "a,b", "\t", True, None):
        other = copy.deepcopy(rows)
        other[7]["b"] = ugly
        after = open_cells(written(tmp_path, form, other))
        assert list(after) == list(before)
        for name in before:
            assert len(after[name]) == 40
            for k, (one, two) in enumerate(zip(before[name], after[name], strict=True)):
                assert k == 7 or (as_number(one) == as_number(two) or one == two), (name, k)
                assert k == 7 or as_text(one) == as_text(two)


def test_a_line_that_is_broken_is_a_row_without_values(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n3,5,7\n4\n5,6\n")
    assert open_cells(file) == {"a": ("1", None, None, "5"), "b": ("2", None, None, "6")}
    file.write_bytes(b"a,b\n1,caf\xe9\n2,\xc3\xa9\n")  # of two encodings
    assert open_cells(file)["b"] == ("café", "é")


def test_records_that_lack_a_label_add_zero():
    """The same sums, with the same noise, over the number of records that everybody knows."""
    draw = np.random.default_rng(2)
    rows = {"a": (draw.normal(size=(12, 3)), draw.integers(0, 2, 12))}
    x = torch.tensor([0.3, -0.2, 0.1]).double()
    made = {}
    for records in (None, 20):
        private = sp.Private(
            sp.Linear("logistic", l2=0.01), secret=1, radius=3.0, together=20, records=records
        )
        cohort = sp.Cohort(rows, private)
        at = cohort.gradients(x)
        made[records] = at.each()[0] - 0.01 * x, at.losses[0], cohort.constants().samples
    assert (made[None][2], made[20][2]) == ([12], [20])
    torch.testing.assert_close(20 * made[20][0], 12 * made[None][0], rtol=0, atol=1e-12)
    with refuses("not-a-count"):
        sp.Private(sp.Linear("logistic", l2=0.01), records=0)


def test_empty_cells_at_the_end_of_a_sheet(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["a", "b"], [1, 2], [3], [None, None], [5, 6]):
        book.active.append(row)
    book.save(tmp_path / "rows.xlsx")
    assert open_cells(tmp_path / "rows.xlsx") == {"a": (1, 3, None, 5), "b": (2, None, None, 6)}


def test_numbers_of_single_cells():
    read = [as_number(cell) for cell in ("1", " 2.5 ", "true", True, 3, "1e400", "3,5", None, "x")]
    assert read[:5] == [1, 2.5, 1, 1, 3]
    assert np.isnan(read[5:]).all()
    assert as_number("3,5", ",") == 3.5
    assert np.isnan(as_number(-999, ".", [-999]))
    assert np.isnan(as_number(10**400))
    assert [as_text(cell) for cell in ("1.0", 1, "NA", None, " p ")] == ["1", "1", None, None, "p"]


def test_a_silo_of_an_entry_reads_cells_by_themselves(tmp_path):
    path, places = prepared(tmp_path)
    shutil.copy(places["a"].with_name("rows.csv"), places["a"].with_name("entry.csv"))
    places["a"].with_name("mine_of_a.py").write_text(
        "import csv\nfrom pathlib import Path\n"
        "class Frame(dict):\n"
        "    @property\n    def columns(self):\n        return list(self)\n"
        "class Cells(list):\n    def tolist(self):\n        return list(self)\n"
        "def load():\n"
        "    with (Path(__file__).parent / 'entry.csv').open() as file:\n"
        "        rows = list(csv.DictReader(file))\n"
        "    frame = Frame({n: Cells(r[n] for r in rows) for n in rows[0] if n != 'ill'})\n"
        "    return frame, [r['ill'] for r in rows]\n"
    )
    own = SiloFile.read(places["a"])
    table = Dataset.read(own, wanted(FederationFile.read(path)))
    text = places["a"].read_text()
    text = text.replace('file = "rows.csv"\ntarget = "ill"', 'entry = "mine_of_a:load"')
    places["a"].write_text(text)
    entry = Dataset.read(SiloFile.read(places["a"]), wanted(FederationFile.read(path)))
    np.testing.assert_array_equal(entry.held, table.held)
    np.testing.assert_array_equal(entry.target.values, table.target.values)
    for one, other in zip(entry.table.columns, table.table.columns, strict=True):
        np.testing.assert_array_equal(one.values, other.values)
