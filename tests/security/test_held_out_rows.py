"""Which rows are held out follows from a stored secret, and from nothing that is in a row."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cases.posts import small_federation, write_table
from cases.refusals import refuses
from cases.silos import run, wanted
from scaffpd import cli
from scaffpd.deploy.dataset import Dataset, row_marks
from scaffpd.deploy.split import BLOCK, drawn_marks, held_rows, row_places
from scaffpd.deploy.tables import Wanted
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.silo import SiloFile

SECRET = bytes(range(32))


def people(number=240, seed=0):
    draw = np.random.default_rng(seed)
    return [
        {
            "who": f"p{k // 3}",
            "age": int(draw.integers(30, 80)),
            "dose": int(draw.integers(1, 4)),
            "ill": int(draw.random() < 0.5),
        }
        for k in range(number)
    ]


def site(folder, rows, data="", rest=""):
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "rows.csv", rows)
    path = folder / "silo.toml"
    path.write_text(
        f'name = "a"\n[data]\nfile = "rows.csv"\ntarget = "ill"\ntest = 0.25\n{data}\n{rest}'
    )
    return SiloFile.read(path)


def dealt(folder, rows, *given, **more):
    return Dataset.read(site(folder, rows, *given), **more).held


def test_a_row_moves_itself_alone(tmp_path):
    """One row re-dealt all others, by a seed and then by its contents; now not even itself."""
    rows = people()
    before = dealt(tmp_path, rows)
    assert before.sum() == 60
    for k, cells in ((0, {"age": 99}), (77, {"ill": 1 - rows[77]["ill"]}), (5, {"dose": ""})):
        changed = [dict(row) for row in rows]
        changed[k] |= cells
        np.testing.assert_array_equal(dealt(tmp_path, changed), before)
    # appended rows get marks of their own
    np.testing.assert_array_equal(dealt(tmp_path, rows + people(80, 1))[:240], before)
    # a row without a target keeps its place
    changed = [dict(row) for row in rows]
    changed[30]["ill"] = ""
    np.testing.assert_array_equal(dealt(tmp_path, changed), np.delete(before, 30))


def test_equal_rows_do_not_move_together(tmp_path):
    rows = [{"age": 50, "dose": 1, "ill": k // 120} for k in range(240)]
    held = dealt(tmp_path, rows)
    assert held[:120].sum() == held[120:].sum() == 30
    # every block of rows gives as many as any other, and who they are is drawn
    assert set(held.reshape(-1, BLOCK).sum(1).tolist()) == {5}
    assert len({tuple(block) for block in held.reshape(-1, BLOCK).tolist()}) > 6


def test_no_set_of_columns_deals_rows_anew(tmp_path):
    rows = people()
    whole = Dataset.read(site(tmp_path, rows))
    schema = {"task": "classification", "labels": [0, 1], "shape": None}
    number = lambda name: {"name": name, "kind": "number"}
    for names in (["age"], ["dose"], ["dose", "age"]):
        agreed = {**schema, "columns": [number(name) for name in names]}
        data = Dataset.read(site(tmp_path, rows), Wanted.of(agreed, whole.target.task))
        np.testing.assert_array_equal(data.held, whole.held)
        noisy = {**agreed, "columns": [{**number(name), "range": [0.0, 9.0]} for name in names]}
        read = Wanted.of(noisy, whole.target.task, noisy=True)
        np.testing.assert_array_equal(Dataset.read(site(tmp_path, rows), read).held, whole.held)


def test_all_rows_of_a_subject_are_on_one_side(tmp_path):
    rows = people(600)
    held = dealt(tmp_path, rows, 'subject = "who"')
    by = {}
    for row, out in zip(rows, held, strict=True):
        assert by.setdefault(row["who"], out) == out
    assert 0.15 < held.mean() < 0.35
    # in any order, and whoever is removed
    order = np.random.default_rng(4).permutation(600)[:500]
    again = dealt(tmp_path, [rows[k] for k in order], 'subject = "who"')
    np.testing.assert_array_equal(again, held[order])
    # a row about nobody is dealt by its place
    rows = [{**row, "who": ""} for row in rows]
    np.testing.assert_array_equal(
        dealt(tmp_path, rows, 'subject = "who"'), dealt(tmp_path, rows, "")
    )
    assert "who" not in [
        column.name
        for column in Dataset.read(site(tmp_path, rows, 'subject = "who"')).table.columns
    ]


def test_few_rows_are_not_held_out(tmp_path):
    """Scores of one held-out row are that row."""
    assert dealt(tmp_path, people(60)).sum() == 0  # fifteen would be
    assert dealt(tmp_path, people(60), "", "[limits]\nrows = 15\n").sum() == 15
    assert dealt(tmp_path, people(100)).sum() == 25
    marks = row_places(SECRET, 1000)
    for share in (0.0, 0.01, 0.2, 0.33, 0.9):
        held = held_rows(marks, share, 20)
        expected = 1000 * share if share >= 0.1 else 0
        assert abs(held.sum() - expected) < 20


def test_a_split_outlives_keys_and_records(tmp_path):
    rows = people()
    first = dealt(tmp_path, rows)
    for file in tmp_path.glob("*.key"):
        if file.name != "split.key":
            file.unlink()
    np.testing.assert_array_equal(dealt(tmp_path, rows), first)
    (tmp_path / "split.key").unlink()
    assert (dealt(tmp_path, rows) != first).any()


def test_marks_are_uniform_and_told_apart():
    marks = row_places(SECRET, 10_000)
    assert np.abs(np.sort(marks) - (np.arange(10_000) + 0.5) / 10_000).max() < 0.01
    assert not np.array_equal(marks, row_places(bytes(32), 10_000))
    names = [f"p{k}" for k in range(10_000)]
    drawn = drawn_marks(SECRET, 10_000, names)
    assert np.abs(np.sort(drawn) - (np.arange(10_000) + 0.5) / 10_000).max() < 0.03
    assert drawn_marks(SECRET, 0).shape == (0,)
    np.testing.assert_array_equal(drawn_marks(SECRET, 3, [None] * 3), marks[:3])


def test_check_shows_the_split_that_a_run_has(tmp_path, capsys, fake_clock):
    tables = {name: people(240, k) for k, name in enumerate("abc")}
    columns = 'age = "number"\ndose = "number"\n'
    path, places = small_federation(
        tmp_path, tables, columns, silo='test = 0.2\nsubject = "who"\n', rest=""
    )
    places["c"].write_text(places["c"].read_text().replace('subject = "who"\n', ""))
    shown = {}
    for name, place in places.items():
        assert cli.run(["silo", "check", str(place), "--json"]) == 0
        shown[name] = json.loads(capsys.readouterr().out)
    assert (shown["a"]["dealt"], shown["c"]["dealt"]) == ("by who", "by place")
    outcome, _ = run(path, places)
    assert outcome.final
    file = FederationFile.read(path)
    for name, place in places.items():
        (folder,) = (place.parent / "runs").iterdir()
        own = RunRecord.read(folder).joining.by_client[name]["alone"]
        data = Dataset.read(SiloFile.read(place), wanted(file))
        rows = shown[name]["rows"]
        assert (own.train_rows, own.test_rows) == (rows["train"], rows["test"]) == data.rows


def test_a_commitment_holds_rows_and_split(tmp_path):
    rows = people()
    data = Dataset.read(site(tmp_path, rows))
    assert Dataset.read(site(tmp_path, rows)).commitment(b"s") == data.commitment(b"s")
    rows[3]["age"] += 1
    changed = Dataset.read(site(tmp_path, rows))
    assert changed.commitment(b"salt") != data.commitment(b"salt")
    marks = row_marks(data.table, data.target, b"key")
    assert len(np.unique(marks)) > 0.8 * len(marks)


def test_a_subject_needs_a_column(tmp_path):
    with refuses("unknown-name"):
        Dataset.read(site(tmp_path, people(), 'subject = "patient"'))
    (tmp_path / "mine_of_b.py").write_text(
        "import numpy as np\ndef load():\n    return np.eye(40), np.arange(40) % 2\n"
    )
    path = tmp_path / "b.toml"
    path.write_text('name = "b"\n[data]\nentry = "mine_of_b:load"\nsubject = "who"\n')
    with refuses("subject-without-columns"):
        Dataset.read(SiloFile.read(path))


@pytest.mark.parametrize("rows", [1, 19, 20, 21, 500])
def test_tables_of_any_length_have_marks(tmp_path, rows):
    marks = row_places(SECRET, rows)
    assert marks.shape == (rows,)
    assert ((marks >= 0) & (marks < 1)).all()
    np.testing.assert_array_equal(marks, row_places(SECRET, 2 * rows)[:rows])
