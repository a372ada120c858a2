"""A file that a column cuts into clients, held against what each client could have done alone."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.refusals import refuses
from cases.tables import read, text
from scaffpd.errors import InputError


def table(path, rows, columns=("site", "age", "smoker", "ill")):
    path.write_text(text(rows, columns), encoding="utf-8")
    return path


def unscaled(found):
    """Every client's rows before they were scaled: (training, held out)."""
    return [
        [part[0] * found.deviation + found.mean for part in (own.train, own.test)]
        for own in found.encoded
    ]


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


def test_missing_values_come_from_the_client_s_own_training_rows(tmp_path, rows):
    found = read(table(tmp_path / "a.csv", rows), test=0.3)
    assert [own.name for own in found.rows] == ["north", "south", "west"]
    for own, (train, test) in zip(found.rows, unscaled(found), strict=True):
        ages = [row[1] for row in rows if row[0] == own.name]
        mine = np.array([np.nan if age == "" else age for age in ages], dtype=float)
        filled = np.where(np.isnan(mine), np.nanmedian(mine[~own.held]), mine)
        assert train[:, 0] == pytest.approx(filled[~own.held])
        assert test[:, 0] == pytest.approx(filled[own.held])
        smokes = np.array([row[2] for row in rows if row[0] == own.name])[~own.held]
        often = max(("no", "yes"), key=smokes.tolist().count)
        no = np.where(smokes == "?", often, smokes) == "no"
        assert train[:, 1] == pytest.approx(no.astype(float))


def test_columns_are_scaled_by_sums_over_training_rows(tmp_path, rows):
    found = read(table(tmp_path / "a.csv", rows))
    pooled = np.concatenate([train for train, _ in unscaled(found)])
    assert found.mean == pytest.approx(pooled.mean(0))
    assert found.deviation == pytest.approx(pooled.std(0))


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


def test_labels_of_rows_that_are_left_out_are_no_labels(tmp_path, rows):
    named = [(site, age, smoker, "yes" if ill else "no") for site, age, smoker, ill in rows]
    found = read(table(tmp_path / "a.csv", [*named, ("", 1, "no", "perhaps")]))
    assert found.schema["labels"] == ["no", "yes"]


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


def test_weights_follow_targets_and_are_no_features(tmp_path, rows):
    weighted = [(*row, k % 5) for k, row in enumerate(rows)]
    columns = ("site", "age", "smoker", "ill", "w")
    found = read(table(tmp_path / "a.csv", weighted, columns), weight="w")
    assert [column["name"] for column in found.schema["columns"]] == ["age", "smoker"]
    for own, encoded in zip(found.rows, found.encoded, strict=True):
        mine = np.array([row[3:] for row in weighted if row[0] == own.name], dtype=float)
        mine[:, 1] /= mine[~own.held, 1].mean()
        assert encoded.train[1] == pytest.approx(mine[~own.held])
        assert encoded.test[1] == pytest.approx(mine[own.held])
    weighted[3] = (*rows[3], "much")
    with refuses("texts-for-numbers"):
        read(table(tmp_path / "a.csv", weighted, columns), weight="w")


def test_exposures_are_in_units_of_their_mean(tmp_path):
    random = np.random.default_rng(1)
    exposure = random.uniform(0.5, 40, 60)
    made = [("ab"[k % 2], random.normal(), np.log(exposure[k]), k % 7) for k in range(60)]
    file = table(tmp_path / "a.csv", made, ("site", "x", "log_days", "ill"))
    found = read(file, task="counts", offset="log_days", test=0.0)
    assert [column["name"] for column in found.schema["columns"]] == ["x"]
    assert found.exposure == pytest.approx(exposure.mean())
    counts, shares = np.concatenate([own.train[1] for own in found.encoded]).T
    order = np.argsort(np.arange(60) % 2, kind="stable")
    assert counts.tolist() == (order % 7).tolist()
    assert shares == pytest.approx(exposure[order] / exposure.mean())
    with refuses("offset-without-counts"):
        read(file, task="regression", offset="log_days")
