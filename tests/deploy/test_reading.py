"""A silo's data: CSV, data frames and entries; what is missing, held out and refused."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

from cases.refusals import refuses
from scaffpd.data.tabular.columns import spelt
from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.errors import InputError
from scaffpd.run.settings.silo import SiloFile


def silo(folder: Path, data: str, rest: str = "", name: str = "a") -> Dataset:
    path = folder / "silo.toml"
    path.write_text(f'name = "{name}"\n[data]\n{data}\n{rest}', encoding="utf-8")
    return Dataset.read(SiloFile.read(path))


def from_csv(
    folder: Path, text: str | bytes, data: str = "", rest: str = "[split]\ntest = 0\n"
) -> Dataset:
    (folder / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return silo(folder, f'file = "a.csv"\ntarget = "y"\n{data}', rest)


def from_entry(
    folder: Path, code: str, data: str = "", rest: str = "[split]\ntest = 0\n"
) -> Dataset:
    (folder / "hospital.py").write_text(code, encoding="utf-8")
    return silo(folder, f'entry = "hospital:load"\n{data}', rest)


def column(data: Dataset, name: str):
    return next(column for column in data.table.columns if column.name == name)


# ------------------------------------------------------------------ CSV


def test_numbers_categories_and_missing_values(tmp_path):
    text = (
        '\ufeffage, colour ,"odd, name",y\n1.5,red,3,0\n?,NA,null,1\n\n"2",blue,NaN,1\n,red,4,0\n'
    )
    data = from_csv(tmp_path, text)
    assert [c.name for c in data.table.columns] == ["age", "colour", "odd, name"]
    np.testing.assert_array_equal(column(data, "age").values, [1.5, np.nan, 2, np.nan])
    np.testing.assert_array_equal(column(data, "odd, name").values, [3, np.nan, np.nan, 4])
    colour = column(data, "colour")
    assert (colour.kind, colour.categories, colour.values.tolist()) == (
        "category",
        ("blue", "red"),
        [1, -1, 0, 1],
    )
    assert (data.target.labels, data.target.values.tolist()) == ((0, 1), [0, 1, 1, 0])


def test_rows_without_a_target_are_dropped_and_counted(tmp_path):
    data = from_csv(tmp_path, "x,y\n1,a\n2,\nfoo,?\n4,b\n")
    assert (data.dropped, data.target.labels) == (2, ("a", "b"))
    assert column(data, "x").kind == "number"  # the odd cell is in a row that is not used
    np.testing.assert_array_equal(column(data, "x").values, [1, 4])


def test_columns_can_be_chosen_and_numbers_read_as_categories(tmp_path):
    data = from_csv(
        tmp_path, "a,b,c,y\n1.0,x,2,0\n2,y,3,1\n", 'columns = ["c", "a"]\ncategories = ["a"]'
    )
    assert [(c.name, c.kind) for c in data.table.columns] == [("c", "number"), ("a", "category")]
    assert column(data, "a").categories == ("1", "2")


def test_one_way_to_spell_a_category():
    assert {spelt(v) for v in (1, 1.0, "1.0", " 1 ", np.int32(1), np.float32(1), "1.")} == {"1"}
    assert (spelt(2.5), spelt("2.5"), spelt("007"), spelt(True), spelt("-3.00")) == (
        "2.5",
        "2.5",
        "007",
        "True",
        "-3",
    )


def test_an_almost_numeric_column_is_pointed_out(tmp_path):
    data = from_csv(tmp_path, "x,y\n1,0\n2,1\n3,0\nabc,1\n")
    assert column(data, "x").note == "is read as categories because of 'abc' in line 5"


def test_a_column_without_a_value_has_no_kind(tmp_path):
    data = from_csv(tmp_path, "x,z,c,y\n1,,NA,0\n2,?,,1\n", 'categories = ["c"]')
    assert [c.kind for c in data.table.columns] == ["number", "unknown", "category"]


@pytest.mark.parametrize(
    ("text", "data", "code"),
    [
        ("", "", "empty-file"),
        ("x,y\n", "", "no-rows"),
        ("x,x,y\n1,2,3\n", "", "column-named-twice"),
        ("x,z\n1,2\n", "", "unknown-name"),
        ("x;y\n1;2\n3\n", "", "row-length"),
        ("x,y\n1,2\n1\n", "", "row-length"),
        ("x,y\n1,2\ninf,2\n", "", "infinite-value"),
        ("x,y\n1,\n2,?\n", "", "column-without-values"),
        ('x,y\n"1,2\n', "", "broken-line"),
        ("x,y\n1,2\n", 'columns = ["z"]', "unknown-name"),
        (b"x,y\n\x00,1\n", "", "not-a-text"),
        ("y\n1\n2\n", "", "no-columns"),
        ("x,y\n1,a\n2,b\n", 'task = "regression"', "texts-in-target"),
        ("x,y\n1,0.5\n2,1\n", 'task = "classification"', "labels-not-whole"),
    ],
)
def test_csv_mistakes_get_one_sentence(tmp_path, text, data, code):
    with refuses(code) as caught:
        from_csv(tmp_path, text, data)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ the target and the split


def test_the_task_goes_by_the_target(tmp_path):
    many = "\n".join(f"{k},{k}" for k in range(60))
    assert from_csv(tmp_path, "x,y\n1,0\n2,1\n").target.task == "classification"
    assert from_csv(tmp_path, "x,y\n1,0.5\n2,1\n").target.task == "regression"
    assert from_csv(tmp_path, f"x,y\n{many}\n").target.task == "regression"
    assert from_csv(tmp_path, f"x,y\n{many}\n", 'task = "classification"').target.labels == tuple(
        range(60)
    )


def test_the_split_is_label_by_label_and_fixed_by_the_name(tmp_path):
    text = "x,y\n" + "".join(f"{k},{'ill' if k % 4 == 0 else 'well'}\n" for k in range(100))
    (tmp_path / "a.csv").write_text(text)

    def held(name: str):
        data = silo(tmp_path, 'file = "a.csv"\ntarget = "y"', "[split]\ntest = 0.2\n", name)
        assert np.bincount(data.target.values[data.held]).tolist() == [5, 15]
        assert data.rows == (80, 20)
        return data.held

    np.testing.assert_array_equal(held("a"), held("a"))
    assert (held("a") != held("b")).any()
    # the same in every process: by a digest of seed and name, not by Python's hash
    random = np.random.default_rng(int.from_bytes(hashlib.sha256(b"0/a").digest()[:16], "big"))
    ill = np.arange(100) % 4 == 0
    expected = np.zeros(100, dtype=bool)
    for rows, share in ((ill, 5), (~ill, 15)):
        expected[random.permutation(np.flatnonzero(rows))[:share]] = True
    np.testing.assert_array_equal(held("a"), expected)


def test_a_single_row_cannot_be_split(tmp_path):
    with pytest.raises(InputError, match="use test = 0"):
        from_csv(tmp_path, "x,y\n1,0\n", rest="[split]\ntest = 0.5\n")


# ------------------------------------------------------------------ arrays and frames


def test_an_entry_beside_the_file_is_found_and_nothing_is_left_behind(tmp_path):
    before = list(sys.path)
    for k in (1, 2):  # two sites with modules of the same name in one process
        folder = tmp_path / str(k)
        folder.mkdir()
        (folder / "helper.py").write_text(f"K = {k}\n")
        code = (
            "import numpy as np\nimport helper\ndef load():\n    return helper.K * np.ones((3, "
            "2)), [0, 1, 1]\n"
        )
        data = from_entry(folder, code)
        assert data.table.block is not None
        assert data.table.block[0, 0] == k
    assert sys.path == before
    assert not {"hospital", "helper"} & set(sys.modules)


def test_an_entry_may_split_for_itself(tmp_path):
    code = (
        "import numpy as np\ndef load():\n    return np.ones((3, 2)), [0, 1, 1], np.zeros((2, "
        "2)), ['nan', 0]\n"
    )
    with pytest.raises(InputError):  # texts here and numbers there
        from_entry(tmp_path, code.replace("'nan', 0", "'x', 'y', 'z'"))
    data = from_entry(tmp_path, code.replace("'nan'", "float('nan')"))
    assert (data.rows, data.dropped, data.held.tolist()) == ((3, 1), 1, [False, False, False, True])


def test_frames(tmp_path):
    pytest.importorskip("pandas")
    code = (
        "import pandas as pd\n"
        "def load():\n"
        "    X = pd.DataFrame({'age': [1, None, 3], 'c': ['a', None, 'b'], 'k': [1.0, 2.0, None],\n"
        "                      'b': [True, False, True],\n"
        "                      'i': pd.array([1, None, 2], dtype='Int64'), 'g': "
        "pd.Categorical(['u', 'v', None])})\n"
        "    return X, pd.Series(['n', 'm', 'n'])\n"
    )
    data = from_entry(tmp_path, code, 'categories = ["k"]')
    assert [c.kind for c in data.table.columns] == [
        "number",
        "category",
        "category",
        "number",
        "number",
        "category",
    ]
    assert column(data, "k").categories == ("1", "2")
    np.testing.assert_array_equal(column(data, "i").values, [1, np.nan, 2])
    np.testing.assert_array_equal(column(data, "b").values, [1, 0, 1])
    assert column(data, "g").values.tolist() == [0, 1, -1]
    assert data.target.labels == ("m", "n")
    chosen = from_entry(tmp_path, code, 'columns = ["age"]')
    assert [c.name for c in chosen.table.columns] == ["age"]
    dates = code.replace("'b': [True, False, True]", "'b': pd.to_datetime(['2020-01-01'] * 3)")
    with pytest.raises(InputError, match="Column 'b' of silo 'a' holds dates"):
        from_entry(tmp_path, dates)
    with pytest.raises(InputError, match="did you mean 'age'"):
        from_entry(tmp_path, code, 'columns = ["agee"]')


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def load():\n    return 3\n", "entry-of-other-type"),
        ("def load():\n    return 1, 2, 3\n", "entry-of-other-type"),
        ("def load():\n    raise ValueError('no\\ndata')\n", "entry-failed"),
        ("def other():\n    pass\n", "entry-not-found"),
        ("import nothing_of_this_name\n", "entry-needs-module"),
        ("1 / 0\n", "entry-failed"),
        ("def load():\n    return [[1, 2], [3, 4]], [0]\n", "rows-do-not-match"),
        ("def load():\n    return [[1, 2], [3]], [0, 1]\n", "not-an-array"),
        (
            "import numpy as np\ndef load():\n    return np.array([[np.inf], [1]]), [0, 1]\n",
            "infinite-value",
        ),
    ],
)
def test_entries_that_fail_are_refused(tmp_path, text, code):
    with refuses(code) as caught:
        from_entry(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_an_entry_may_return_a_cohort_of_one(tmp_path):
    code = (
        "import numpy as np, scaffpd as sp\n"
        "def load():\n"
        "    return sp.Cohort({'a': (np.ones((5, 3)), np.ones(5))}, sp.Linear('squared', l2=1.0))\n"
    )
    data = from_entry(tmp_path, code)
    assert data.cohort is not None
    assert data.rows == (5, 0)
    assert data.describe() == {
        "version": 1,
        "task": "prepared",
        "train": 5,
        "test": 0,
        "labels": [],
        "columns": [],
        "shape": None,
        "dimension": 3,
    }
    with pytest.raises(InputError, match="a Cohort of one client named 'a', got one of 'b'"):
        from_entry(tmp_path, code.replace("'a'", "'b'"))


def test_too_few_rows_to_take_part(tmp_path):
    data = from_csv(tmp_path, "x,y\n1,0\n2,1\n")
    file = SiloFile.read(tmp_path / "silo.toml")
    with pytest.raises(InputError, match=r"has 2 training rows, and its limits\.rows asks for 20"):
        data.check(file.limits)
