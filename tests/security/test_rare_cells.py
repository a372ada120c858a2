"""Honest sums over all silos, read for the one person whom a rare category singles out."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cases.posts import Posts, same, small_federation
from cases.silos import federation, mostly_long, run, wanted
from scaffpd.data.tabular.agree import features
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, DataColumn, FeatureTable
from scaffpd.deploy.agreement import leaves
from scaffpd.deploy.announcing import phases
from scaffpd.deploy.dataset import Dataset
from scaffpd.deploy.rare import grouped, recoded, without_few
from scaffpd.deploy.replica import ReplicaSums
from scaffpd.federation.border import QUESTIONS
from scaffpd.federation.own_weights import NUMBERS
from scaffpd.federation.questions import Question
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import read_model
from scaffpd.settings.silo import SiloFile, SiloLimits

SILOS = ("a", "b", "c", "d", "e")
ROWS = 60
VICTIM = 333.25  # the cholesterol of the one person with the category z
L2 = 0.03
COLUMNS = 'chol = "number"\nage = "number"\nsmokes = "number"\n'
WITH = f'{COLUMNS}cp = ["p", "q", "z", "*"]\nsex = ["f", "m"]\n'
WITHOUT = f'{COLUMNS}cp = ["p", "q", "z"]\nsex = ["f", "m"]\n'
CELL = "[limits]\ncell = 1\n"


def person(draw):
    return {
        "chol": round(float(draw.normal(220, 40)), 1),
        "age": int(draw.integers(30, 80)),
        "smokes": int(draw.random() < 0.4),
        "cp": "pq"[int(draw.random() < 0.4)],
        "sex": "fm"[int(draw.random() < 0.5)],
        "ill": int(draw.random() < 0.5),
    }


def tables(rare="z"):
    """Five silos of sixty rows; at the first, the second person has a category that nobody has."""
    draw = np.random.default_rng(3)
    found = {name: [person(draw) for _ in range(ROWS)] for name in SILOS}
    found["a"][1] |= {"cp": rare, "chol": VICTIM, "ill": 1}
    return found


class Listener:
    """A passive silo, which keeps the honest sums that it is shown."""

    def __init__(self, monkeypatch, silo):
        self.sums = []
        original = ReplicaSums.sum

        def total(sums, part, vectors, asked, weights):
            found = original(sums, part, vectors, asked, weights)
            if sums.session.name == silo and isinstance(vectors.asked.question, Question):
                self.sums.append((vectors.asked.question, found.numpy()))
            return found

        monkeypatch.setattr(ReplicaSums, "sum", total)

    def table(self, path):
        """Read Σ aaᵀ of the columns as they are in tables, a constant last, from one `OwnSums`.

        At x = 0 all losses are log 2, all weights the same, and every second derivative is 1/4,
        whatever the rows.
        """
        at, numbers = next((q, s) for q, s in self.sums if q.kind == "own_sums")
        assert not at.at.x.any()
        setup = read_model(FederationFile.read(path).folder / "model.safetensors")[1]
        d = len(setup.mean) + 1
        H = np.zeros((d, d))
        H[np.triu_indices(d)] = numbers[NUMBERS + d :]
        H = (np.triu(H) + np.triu(H, 1).T) / numbers[0] - L2 * np.eye(d)  # over Σ λ
        raw = np.diag([*setup.deviation, 1.0])
        raw[:-1, -1] = setup.mean
        return 4 * len(SILOS) * ROWS * raw @ H @ raw.T


def heard(tmp_path, monkeypatch, columns, silo=""):
    """What the last silo makes of an honest run of five; all rows are trained on: none are out."""
    path, places = small_federation(tmp_path, tables(), columns, silo=silo)
    listener = Listener(monkeypatch, "e")
    outcome, _ = run(path, places)
    assert outcome.final, outcome.sentence
    return listener.table(path), path, places


@pytest.mark.parametrize("columns", [WITH, WITHOUT], ids=["with other", "without"])
def test_one_sum_reads_the_person_with_a_rare_category(tmp_path, monkeypatch, columns, capsys):
    """The attack as it was, against silos whose operators have switched recoding off."""
    table, _, _ = heard(tmp_path, monkeypatch, columns, CELL)
    assert table[-1, 5] == pytest.approx(1, abs=1e-6)  # one row of all has the category
    error = abs(table[0, 5] / VICTIM - 1)
    with capsys.disabled():
        sys.stdout.write(f"\n  without recoding, the person's value to {error:.0e}\n")
    assert error < 1e-9


@pytest.mark.parametrize("columns", [WITH, WITHOUT], ids=["with other", "without"])
def test_no_cell_of_a_silos_own_rare_category_is_in_a_sum(tmp_path, monkeypatch, columns, capsys):
    table, path, places = heard(tmp_path, monkeypatch, columns)
    assert np.abs(table[5]).max() < 1e-6  # the category is in no product of any two columns
    file = FederationFile.read(path)
    least = ROWS
    two = []
    for place in places.values():
        data = Dataset.read(SiloFile.read(place), wanted(file))
        schema = file.encoding()
        nothing = np.zeros(len(table) - 1)
        X = data.matrix(schema, nothing, nothing + 1, ~data.held)[:, 3:]
        counts = X.sum(0)
        least = min([least, *counts[counts > 0]])
        two += [*(X.T @ X)[np.triu_indices(X.shape[1], 1)]]
    assert least >= 10  # every one-way cell of every silo is 0, or this at least
    # what remains: two-way cells, which everybody reads
    whole = sum(
        X.T @ X
        for place in places.values()
        for data in [Dataset.read(SiloFile.read(place), wanted(file))]
        for X in [data.matrix(schema, nothing, nothing + 1, ~data.held)[:, 3:]]
    )
    np.testing.assert_allclose(table[3:-1, 3:-1], whole, atol=1e-6)
    small = [cell for cell in two if 0 < cell < 10]
    with capsys.disabled():
        sys.stdout.write(
            f"\n  smallest one-way cell of a silo: {least:.0f}; two-way cells of a silo below 10: "
            f"{len(small)} of {sum(cell > 0 for cell in two)}\n"
        )


def test_cells_of_the_hospitals(tmp_path):
    """What the threat model says of them: one-way cells of silos, and two-way ones below ten."""
    path, places = federation(tmp_path, granted=False)
    file = FederationFile.read(path)
    schema = file.encoding()
    named = np.array(["=" in name for name in features(schema)])
    found = {}
    for cell in (1, 10):
        one, two = [], []
        for place in places.values():
            silo = SiloFile.read(place)
            silo = silo.model_copy(update={"limits": SiloLimits(cell=cell)})
            data = Dataset.read(silo, wanted(file))
            nothing = np.zeros(len(named))
            X = data.matrix(schema, nothing, nothing + 1, ~data.held)[:, named]
            table = np.nan_to_num(X).T @ np.nan_to_num(X)
            one += [*np.diag(table)]
            two += [*table[np.triu_indices(len(table), 1)]]
        two = np.array(two)
        least = min(count for count in one if count)
        found[cell] = int(least), int(((two > 0) & (two < 10)).sum()), int((two > 0).sum())
    assert found == {1: (2, 114, 194), 10: (11, 47, 121)}


WAYS = {
    "own sums": {},
    "evidence": {"model": 'kappa = "auto"'},
    "curves and pairs": {"model": "", "more": 'curves = "on"\npairs = 4\n'},
    "one silo's gradient": {"rest": '[algorithm]\nkind = "ScaffPD"\n'},
}


@pytest.mark.parametrize("way", mostly_long(WAYS, "own sums", "curves and pairs"))
@pytest.mark.parametrize(
    "columns", mostly_long([WITH, WITHOUT], WITHOUT), ids=["with other", "without"]
)
def test_posts_are_those_of_a_person_whose_category_is_unknown(tmp_path, monkeypatch, columns, way):
    """To the bit, in every number that the silo puts into a sum or shows."""
    posts = Posts(monkeypatch, "a")
    found = []
    for rare in ("z", ""):
        given = {"rest": "", **WAYS[way]}
        given["rest"] += "[training]\nrounds = 2\n"
        folder = tmp_path / f"with {rare}"
        path, places = small_federation(folder, tables(rare), columns, **given)
        outcome, _ = run(path, places)
        assert outcome.final, outcome.sentence
        found.append(posts.taken())
    assert same(*found)
    if way == "curves and pairs":
        shapes = [own for key, own in found[0] if key == (("counts", "rows"),)]
        counts = np.concatenate([np.ravel(own)[: own.size // 2] for own in shapes])
        assert len(shapes) > 1
        assert not np.any((counts > 0) & (counts < 10))


def test_the_agreement_says_where_two_way_tables_become_known(tmp_path):
    """Wherever d × d numbers are summed, in words of the questions themselves."""
    path, _ = small_federation(tmp_path, tables(), WITH)
    file = FederationFile.read(path)
    flagged = {one.words for phase in phases(file) for one in phase.shown if one.tables}
    assert flagged
    (line,) = (line for line in leaves(file) if "two-way tables" in line)
    assert all(words in line for words in flagged)
    text = path.read_text() + '[algorithm]\nkind = "ScaffPD"\n'  # sums of gradients alone
    path.write_text(text)
    assert not any("two-way tables" in line for line in leaves(FederationFile.read(path)))
    # all questions whose sums are as large as a Hessian, or symmetric: only directions are fewer
    large = {
        (kind, part)
        for kind, question in QUESTIONS.items()
        for part in getattr(question, "symmetric", ())
    } | {("own_sums", "sums"), ("pairs", "cells")}
    told = {one.key for question in QUESTIONS.values() for one in question.shows if one.tables}
    assert told == large - {("curvature", "curvature")}


# ------------------------------------------------------------------ the recoding itself


@pytest.mark.parametrize("few", [0, 9, 10])
def test_products_of_a_pair_have_no_rare_cell(tmp_path, few):
    """A product is a column, and the one person in it has every value, as with a category."""
    tables_ = tables("q")
    for k, row in enumerate(tables_["a"]):
        row |= {"cp": "pq"[k < 30], "sex": "fm"[k < 30 - few], "ill": k % 2}
    path, places = small_federation(tmp_path, tables_, WITHOUT)
    file = FederationFile.read(path)
    data = Dataset.read(SiloFile.read(places["a"]), wanted(file))
    schema = file.encoding()
    sides = {column["name"]: column for column in schema["columns"]}
    left = {**sides["cp"], "categories": ["q"], "other": False}
    right = {**sides["sex"], "categories": ["m"], "other": False}
    schema = {**schema, "pairs": [{"left": left, "right": right}]}
    nothing = np.zeros(len(features(schema)))
    encoded = data.matrix(schema, nothing, nothing + 1, ~data.held)[:, -1]
    rows, sums = data.totals(schema)[:, -1]
    if few == 9:  # nine have q, and are no m: the difference of a column and the product
        assert (rows, sums) == (0, 0)
        assert not encoded.any()  # the mean over all silos
    else:
        assert (rows, sums) == (ROWS, 30 - few)
        assert encoded.sum() == 30 - few


def category(*texts):
    names = sorted({text for text in texts if text})
    codes = [names.index(text) if text else -1 for text in texts]
    return DataColumn("c", CATEGORY, np.array(codes, dtype=np.int32), tuple(names))


def texts_of(column):
    return [column.categories[k] if k >= 0 else "" for k in column.values]


def recode(column, categories, other, train=None):
    agreed = {"name": "c", "kind": "category", "categories": categories, "other": other}
    schema = {"task": "classification", "labels": [0, 1], "columns": [agreed], "shape": None}
    rows = len(column.values)
    train = np.ones(rows, dtype=bool) if train is None else train
    return texts_of(recoded(FeatureTable(rows, (column,)), train, schema, 3, False).columns[0])


def test_rare_categories_become_other_or_unknown():
    column = category(*"aaaabbccx", "")
    assert recode(column, ["a", "b", "c"], True) == [*"aaaa*****", ""]
    assert recode(column, ["a", "b", "c"], False) == [*"aaaa", *[""] * 6]
    two = category(*"aaaabb")  # too few for an "other" of their own
    assert recode(two, ["a", "b"], True) == [*"aaaa", "", ""]
    # training rows alone count, and held-out rows follow
    train = np.array([True] * 4 + [False] * 5 + [True])
    assert recode(category(*"aaaabbbba", ""), ["a", "b"], False, train) == [
        *"aaaa",
        *[""] * 4,
        "a",
        "",
    ]


def test_numbers_that_few_rows_have_beside_all_others(tmp_path):
    column = np.array([0, 0, 0, 0, 0, 1, 7, np.nan])
    train = np.ones(8, dtype=bool)
    np.testing.assert_array_equal(without_few(column[:, None], train, 3)[:, 0], [0] * 7 + [np.nan])
    np.testing.assert_array_equal(without_few(column[:, None], train, 2)[:, 0], column)


def test_groups_of_numbers_are_large_wherever_they_are_cut():
    draw = np.random.default_rng(0)
    for values in (
        draw.normal(size=200),
        draw.integers(0, 12, 200).astype(float),
        np.where(draw.random(200) < 0.02, 5.0, 0.0),
        np.arange(9.0),
        np.full(30, 4.0),
    ):
        train = draw.random(len(values)) < 0.8
        found = grouped(values, train, 10)
        order = np.argsort(values, kind="stable")
        assert np.all(np.diff(found[order]) >= 0)
        _, counts = np.unique(found[train], return_counts=True)
        assert counts.min() >= min(10, train.sum())
    gaps = np.array([1.0, np.nan, 2.0])
    np.testing.assert_array_equal(np.isnan(grouped(gaps, ~np.isnan(gaps), 2)), np.isnan(gaps))
    assert DataColumn("n", NUMBER, gaps).missing.sum() == 1
