"""Columns, categories, labels and scales agreed by sums: the same as one computation over pooled
rows.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections import Counter
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.refusals import refuses
from scaffpd.data.tabular.agree import agree, deviation_of, mean_of
from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.errors import InputError
from scaffpd.run.settings.silo import SiloFile

heart = import_module("scaffpd.data.hospitals")
RAREST = 3


def write(
    folder: Path,
    name: str,
    header: list[str],
    rows: list[list[str]],
    data: str = "",
    rarest: int = RAREST,
) -> Dataset:
    """A silo with its own CSV file, read."""
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    path = folder / f"{name}.toml"
    path.write_text(
        f'name = "{name}"\n[data]\nfile = "{name}.csv"\ntarget = "y"\n{data}\n[split]\ntest = 0.3\n'
        f"[limits]\nrarest = {rarest}\n",
        encoding="utf-8",
    )
    return Dataset.read(SiloFile.read(path))


def agreed(silos: dict[str, Dataset], standardise: bool = True):
    """The whole exchange; what travels is turned into JSON and back."""
    told = {
        name: json.loads(json.dumps(data.describe(), allow_nan=False))
        for name, data in silos.items()
    }
    schema = json.loads(json.dumps(agree(told, standardise), allow_nan=False))
    mean = mean_of({name: data.totals(schema) for name, data in silos.items()}, schema)
    deviation = deviation_of(
        {name: data.totals(schema, mean) for name, data in silos.items()}, mean
    )
    return schema, mean, deviation


# ------------------------------------------------------------------ one computation over pooled
# rows, written once more


class Pooled:
    """All rows in one place, with plain loops: what the agreement has to come to."""

    def __init__(self, tables, held, categories, order):
        self.tables = tables
        self.held = held
        self.order = order
        self.blocks = {name: [] for name in tables}
        self.known = []
        for column in order:
            if column in categories:
                self._category(column)
            else:
                self._number(column)
        whole = {
            name: np.array(list(map(list, zip(*blocks, strict=True))))
            for name, blocks in self.blocks.items()
        }
        train = {name: X[~held[name]] for name, X in whole.items()}
        self.mean = []
        self.deviation = []
        for j in range(len(self.known)):
            pool = np.concatenate(
                [X[:, j] for name, X in train.items() if self.known[j][name]] or [np.zeros(1)]
            )
            deviation = pool.std()
            self.mean.append(pool.mean())
            self.deviation.append(
                1.0 if deviation <= 1e-12 * max(1, abs(pool.mean())) else deviation
            )
        self.X = {}
        for name, X in whole.items():
            filled = np.where(np.isnan(X), np.array(self.mean), X)
            self.X[name] = (filled - np.array(self.mean)) / np.array(self.deviation)

    def _cells(self, name, column):
        return [None if row[column] == "" else row[column] for row in self.tables[name]]

    def _training(self, name, column):
        pairs = zip(self._cells(name, column), self.held[name], strict=True)
        return [cell for cell, out in pairs if cell is not None and not out]

    def _number(self, column):
        known = {}
        for name in self.tables:
            there = [float(cell) for cell in self._training(name, column)]
            known[name] = bool(there)
            fill = statistics.median(there) if there else np.nan
            self.blocks[name].append(
                [fill if c is None else float(c) for c in self._cells(name, column)]
            )
        self.known.append(known)

    def _category(self, column):
        named = set()
        other = False
        own = {}
        for name in self.tables:
            counts = Counter(self._training(name, column))
            mine = own[name] = {cell for cell, count in counts.items() if count >= RAREST}
            other = other or any(
                cell is not None and cell not in mine for cell in self._cells(name, column)
            )
            named |= mine
        places = [*sorted(named), *([None] if other else [])]
        known = {name: bool(self._training(name, column)) for name in self.tables}
        for name in self.tables:
            counts = Counter(self._training(name, column))
            fill = min(counts, key=lambda cell: (-counts[cell], cell)) if counts else None
            cells = [fill if cell is None else cell for cell in self._cells(name, column)]
            for place in places:
                known_here = [named if out else own[name] for out in self.held[name]]
                pairs = zip(cells, known_here, strict=True)
                hit = [
                    np.nan if c is None else float(place == (c if c in there else None))
                    for c, there in pairs
                ]
                self.blocks[name].append(hit)
        self.known += [known] * len(places)


def compare(silos, pooled, schema, mean, deviation, labels):
    size = np.maximum(
        1, np.abs(pooled.mean)
    )  # of a column's numbers: they, not their differences, carry rounding
    assert (np.abs(mean - pooled.mean) <= 1e-12 * size).all()
    assert (np.abs(deviation - pooled.deviation) <= 1e-12 * size).all()
    for name, data in silos.items():
        encoded = data.encoded(schema, mean, deviation)
        parts = [(encoded.train, ~data.held)] + (
            [(encoded.test, data.held)] if encoded.test is not None else []
        )
        assert (encoded.test is None) == (not data.held.any())
        for (X, y), rows in parts:
            expected = pooled.X[name][rows]
            assert (
                np.abs(X - expected) * deviation <= 1e-12 * size * np.maximum(1, np.abs(expected))
            ).all()
            assert [labels[k] for k in y] == [
                str(row["y"]) for row, r in zip(pooled.tables[name], rows, strict=True) if r
            ]
        assert len(encoded.features) == encoded.train[0].shape[1] == len(mean)


number = st.one_of(st.just(""), st.floats(-100, 100, width=32).map(lambda x: repr(round(x, 3))))
letter = st.sampled_from(["", "a", "a", "a", "b", "b", "c", "d", "é x", 'q,"'])


@st.composite
def federations(draw):
    """Tables of two to four silos: numbers u and v, categories c, each silo with its own order and
    empty columns.
    """
    tables = {}
    for name in draw(st.lists(st.sampled_from("pqrs"), min_size=2, max_size=4, unique=True)):
        empty = draw(st.sets(st.sampled_from(["u", "v", "c"]), max_size=2))
        rows = draw(
            st.lists(
                st.fixed_dictionaries(
                    {"u": number, "v": number, "c": letter, "y": st.sampled_from(["no", "yes"])}
                ),
                min_size=4,
                max_size=25,
            )
        )
        tables[name] = [{k: "" if k in empty else v for k, v in row.items()} for row in rows]
        tables[name][0]["y"] = "yes"
        tables[name][1]["y"] = "no"
    orders = {name: draw(st.permutations(["u", "v", "c", "y"])) for name in tables}
    return tables, orders


@settings(max_examples=25, deadline=None)
@given(federations())
def test_the_agreement_equals_one_computation_over_pooled_rows(federation):
    tables, orders = federation
    with TemporaryDirectory() as folder:
        silos = {
            name: write(
                Path(folder),
                name,
                orders[name],
                [[row[k] for k in orders[name]] for row in rows],
                "",
            )
            for name, rows in tables.items()
        }
    order = [k for k in orders[next(iter(tables))] if k != "y"]
    has_letters = any(row["c"] for rows in tables.values() for row in rows)
    schema, mean, deviation = agreed(silos)
    pooled = Pooled(
        tables, {n: d.held for n, d in silos.items()}, ["c"] if has_letters else [], order
    )
    compare(silos, pooled, schema, mean, deviation, ["no", "yes"])


def hospitals(folder: Path) -> tuple[dict[str, Dataset], dict[str, list[dict[str, str]]]]:
    silos = {}
    tables = {}
    for name in heart.HOSPITALS:
        raw, y = heart.read(name)
        cells = [["" if np.isnan(v) else f"{v:g}" for v in row] for row in raw]
        data = f"categories = {list(heart.CATEGORIES)}"
        silos[name] = write(
            folder,
            name,
            [*heart.COLUMNS, "y"],
            [[*c, str(k)] for c, k in zip(cells, y, strict=True)],
            data,
        )
        tables[name] = [
            dict(zip([*heart.COLUMNS, "y"], [*c, str(k)], strict=True))
            for c, k in zip(cells, y, strict=True)
        ]
    return silos, tables


def test_the_hospitals_agree(tmp_path):
    silos, tables = hospitals(tmp_path)
    schema, mean, deviation = agreed(silos)
    pooled = Pooled(
        tables, {n: d.held for n, d in silos.items()}, list(heart.CATEGORIES), list(heart.COLUMNS)
    )
    compare(silos, pooled, schema, mean, deviation, ["0", "1"])
    features = silos["va"].encoded(schema, mean, deviation).features
    assert features[:6] == ("age", "sex", "cp=1", "cp=2", "cp=3", "cp=4")
    assert silos["switzerland"].totals(schema)["n"][features.index("chol")] == 0
    X = silos["switzerland"].encoded(schema, mean, deviation).train[0]
    assert (X[:, features.index("chol")] == 0).all()
    everyone = np.concatenate(
        [data.encoded(schema, mean, deviation).train[0] for data in silos.values()]
    )
    no_hole = [j for j, name in enumerate(features) if name not in ("chol", "slope (other)")]
    # one hospital has no value of chol; what is rare of slope is only among held-out patients
    np.testing.assert_allclose(everyone.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(everyone[:, no_hole].std(0), 1, atol=1e-12)


def test_without_standardising_values_stay_as_they_are(tmp_path):
    silos, _ = hospitals(tmp_path)
    schema, mean, _ = agreed(silos, standardise=False)
    data = silos["cleveland"]
    X = data.encoded(schema, mean, None).train[0]
    np.testing.assert_array_equal(X[:, 0], data.table.columns[0].values[~data.held])
    chol = silos["switzerland"].encoded(schema, mean, None)
    assert np.allclose(
        chol.train[0][:, chol.features.index("chol")], mean[chol.features.index("chol")]
    )


def test_unnamed_arrays_keep_their_shape(tmp_path):
    random = np.random.default_rng(0)
    silos = {}
    for k, name in enumerate("ab"):
        X = random.normal(size=(30, 2, 3)) + k
        X[0, 0, 0] = np.nan
        np.save(tmp_path / f"{name}.npy", X)
        (tmp_path / f"rows_{name}.py").write_text(
            "import numpy as np\nfrom pathlib import Path\ndef load():\n"
            f"    X = np.load(Path(__file__).parent / '{name}.npy')\n"
            "    return X, np.arange(len(X)) % 2\n"
        )
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\n[data]\nentry = "rows_{name}:load"\n[split]\ntest = 0\n'
        )
        silos[name] = Dataset.read(SiloFile.read(tmp_path / f"{name}.toml"))
    schema, mean, deviation = agreed(silos)
    parts = [data.encoded(schema, mean, deviation) for data in silos.values()]
    assert parts[0].train[0].shape == (30, 2, 3)
    assert parts[0].test is None
    pool = np.concatenate([part.train[0] for part in parts]).reshape(60, 6)
    np.testing.assert_allclose(pool.mean(0), 0, atol=1e-14)
    np.testing.assert_allclose(pool.std(0), 1, atol=1e-14)


def test_a_description_says_no_more_than_it_has_to(tmp_path):
    rows = [[str(k), "often" if k < 20 else "SECRET", "", str(k % 2)] for k in range(22)]
    data = write(tmp_path, "a", ["x", "c", "e", "y"], rows, rarest=5)
    about = data.describe()
    assert about == {
        "version": 1,
        "task": "classification",
        "train": data.rows[0],
        "test": data.rows[1],
        "labels": [0, 1],
        "columns": [
            {"name": "x", "kind": "number"},
            {"name": "c", "kind": "category", "categories": ["often"], "other": True},
            {"name": "e", "kind": "unknown"},
        ],
        "shape": None,
        "dimension": None,
    }
    assert "SECRET" not in json.dumps(about)
    schema, mean, deviation = agreed({"a": data})
    assert data.encoded(schema, mean, deviation).features == ("x", "c=often", "c (other)", "e")
    hidden = {
        **schema,
        "columns": [{**c, "other": False} for c in schema["columns"] if c["name"] == "c"],
    }
    assert (
        data.totals(hidden)["sum"].sum() == data.rows[0] - data.totals(schema)["sum"][2]
    )  # none of the categories
    guessed = {
        **schema,
        "columns": [
            {**c, "categories": ["SECRET", "often"]} for c in schema["columns"] if c["name"] == "c"
        ],
    }
    assert data.totals(guessed)["sum"][0] == 0  # guessing its name does not tell how many there are


# ------------------------------------------------------------------ refusals


def about(columns=None, **changes):
    columns = [{"name": "x", "kind": "number"}] if columns is None else columns
    return {
        "version": 1,
        "task": "classification",
        "labels": [0, 1],
        "train": 9,
        "test": 1,
        "columns": columns,
    } | changes


def column(name, kind="number", **more):
    return (
        {"name": name, "kind": kind}
        | ({"categories": ["p"], "other": False} if kind == "category" else {})
        | more
    )


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (about([column("age"), column("chol")]), about([column("age")]), "column-missing"),
        (about([column("age")]), about([column("age"), column("chol")]), "column-missing"),
        (about([column("chol")]), about([column("Chol.")]), "column-missing"),
        (about([column("cp")]), about([column("cp", "category")]), "column-of-two-kinds"),
        (about(), about(task="regression"), "different-task"),
        (about(), about(labels=["no", "yes"]), "labels-of-two-kinds"),
        (about(shape=[3]), about(shape=[4]), "different-shape"),
        (about(shape=[3]), about(), "different-shape"),
        (about(labels=[1]), about(labels=[1]), "constant-target"),
        (
            about(task="prepared", dimension=3),
            about(task="prepared", dimension=4),
            "different-dimension",
        ),
        (about(task="prepared", dimension=3), about(), "different-task"),
    ],
)
def test_silos_that_differ_are_refused(first, second, code):
    with refuses(code):
        agree({"a": first, "b": second})


def test_what_may_differ():
    first = about(
        [column("x"), column("c", "category", categories=["10", "2", "b"])], labels=[3, 1]
    )
    second = about([column("c", "unknown"), column("x", "unknown")], labels=[2])
    third = about([column("c", "category", categories=["a"], other=True), column("x")], labels=[1])
    schema = agree({"a": first, "b": second, "c": third})
    assert schema["labels"] == [1, 2, 3]
    assert schema["columns"] == [
        {"name": "x", "kind": "number"},
        {"name": "c", "kind": "category", "categories": ["2", "10", "a", "b"], "other": True},
    ]
    prepared = about(task="prepared", dimension=3)
    assert agree({"a": prepared, "b": prepared})["dimension"] == 3


GARBLED = [
    None,
    "x",
    {},
    about(task=["regression"]),
    about(labels=[]),
    about(labels=[True, False]),
    about(labels=[1.5]),
    about(labels=[2**70]),
    about(labels=["x" * 501]),
    about(train="9"),
    about(train=0),
    about(columns=3),
    about([3]),
    about([column("")]),
    about([column(3)]),
    about([column("x", "thing")]),
    about([column("x", "category", categories=[1])]),
    about([column("x", "category", other=1)]),
    about([column("\ud800")]),
    about(shape=[0]),
    about(shape="3"),
    about(task="prepared"),
    about(labels=[[1], [2]]),
]


@pytest.mark.parametrize("given", GARBLED, ids=range(len(GARBLED)))
def test_garbled_descriptions_name_the_silo(given):
    with pytest.raises(InputError, match="Silo 'b' sent a description"):
        agree({"a": about(), "b": given})


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["number", "category"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*about(), "shape", "dimension"]), anything),
    st.booleans(),
    anything,
)
def test_whatever_a_silo_sends_there_is_a_schema_or_a_sentence(changes, inside, value):
    broken = about([column("x") | {"kind": value} if inside else value]) | changes
    for description in (broken, changes):
        try:
            json.dumps(agree({"a": about(), "b": description}), allow_nan=False)
        except InputError as error:
            named = "'b'" in str(error)
        else:
            named = True
        assert named


@pytest.mark.parametrize(
    "sums",
    [
        None,
        {},
        {"n": np.ones(2)},
        {"n": [1, 1], "sum": [1, 1]},
        {"n": np.ones(3), "sum": np.ones(3)},
        {"n": np.ones(2), "sum": np.ones(3)},
        {"n": -np.ones(2), "sum": np.ones(2)},
        {"n": np.ones(2) / 2, "sum": np.ones(2)},
        {"n": np.ones(2), "sum": np.array([np.nan, 1])},
        {"n": np.ones(2), "sum": np.array([np.inf, 1])},
        {"n": np.zeros(2), "sum": np.ones(2)},
        {"n": np.ones((2, 1)), "sum": np.ones(2)},
        {"n": np.array(["1", "1"]), "sum": np.ones(2)},
        {"n": np.full(2, 1e300), "sum": np.ones(2)},
    ],
)
def test_garbled_sums_name_the_silo(sums):
    schema = agree({"a": about([column("x"), column("z")])})
    right = {"n": np.ones(2, dtype=np.int64), "sum": np.ones(2)}
    with pytest.raises(InputError, match="Silo 'b' sent sums"):
        mean_of({"a": right, "b": sums}, schema)
    with pytest.raises(InputError, match="Silo 'b' sent sums"):
        deviation_of({"b": {"n": np.ones(2), "squares": -np.ones(2)}}, np.zeros(2))
    with pytest.raises(InputError, match="too large"):
        mean_of(
            {"a": right | {"sum": np.full(2, 1.7e308)}, "b": right | {"sum": np.full(2, 1.7e308)}},
            schema,
        )


def test_a_silo_checks_what_the_coordinator_sends(tmp_path):
    rows = [[str(k), "p" if k % 2 else "q", str(k % 2)] for k in range(12)]
    data = write(tmp_path, "a", ["x", "c", "y"], rows)
    schema, mean, deviation = agreed({"a": data})
    for wrong in (
        None,
        {},
        {**schema, "version": 0},
        {**schema, "task": "regression"},
        {**schema, "labels": [0]},
        {**schema, "shape": [2]},
        {**schema, "standardise": "yes"},
        {**schema, "columns": schema["columns"] * 2},
        {**schema, "columns": [{"name": "nothing", "kind": "number"}]},
        {**schema, "columns": [{"name": "c", "kind": "number"}]},
        {**schema, "columns": []},
        {**schema, "task": "prepared", "dimension": 3},
    ):
        with pytest.raises(InputError):
            data.encoded(wrong, mean, deviation)  # type: ignore[arg-type]
    for vector in (None, "x", mean[:-1], mean * np.nan, mean[None], mean.astype(str), {}):
        with pytest.raises(InputError):
            data.encoded(schema, vector, deviation)
        with pytest.raises(InputError):
            data.encoded(schema, mean, vector)
    with pytest.raises(InputError, match="above zero"):
        data.encoded(schema, mean, 0 * deviation)
    with pytest.raises(InputError, match="no list of"):
        data.totals(schema, mean[:1])


def test_numbers_too_large_to_be_added_are_refused(tmp_path):
    rows = [["1.7e308" if k else "-1.7e308", str(k % 2)] for k in range(12)]
    data = write(tmp_path, "a", ["x", "y"], rows)
    with pytest.raises(InputError, match="column 'x' that are too large"):
        data.totals(agree({"a": data.describe()}))
