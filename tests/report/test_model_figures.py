"""What a page shows of a model: curves are its predictions' differences, a forest its effects."""

import numpy as np
import pytest

from scaffpd import cli
from scaffpd.pipeline import run as training
from scaffpd.pipeline.columns import settle
from scaffpd.pipeline.shapes import Shape, _covariance
from scaffpd.program.prepare import Source
from scaffpd.program.train import contests
from scaffpd.report import page as report
from scaffpd.report.page.figures import figures
from scaffpd.report.page.model import MOST_SHAPES, REACH, about_hazards, about_shapes
from scaffpd.report.page.tables import cut_table, effect_table
from scaffpd.report.predict import predict
from scaffpd.report.record import RunRecord
from scaffpd.settings.run import RunConfig

SITES = ["North", "South", "West"]


def rows(n=600):
    random = np.random.default_rng(5)
    for k in range(n):
        age, dose = random.normal(60, 9), random.gamma(2, 10)
        sex, stage = random.choice(["f", "m"]), random.choice(["I", "II", "III"])
        log_odds = (dose > 20) * 2 - 1 + 0.05 * (age - 60) * (k % 3) + 0.6 * (stage == "III")
        ill = random.random() < 1 / (1 + np.exp(-log_odds))
        own, left = random.exponential(300 * np.exp(-log_odds / 2)), random.uniform(50, 900)
        yield (
            *(SITES[k % 3], round(age, 1), round(dose, 2), sex, stage, "yes" if ill else "no"),
            *(max(1, int(min(own, left))), int(own <= left), round(log_odds + random.normal(), 3)),
        )


HEADER = ("site", "age", "dose", "sex", "stage", "ill", "days", "died", "score")


def written(file, left_out, table):
    lines = [HEADER, *table]
    wanted = [j for j, name in enumerate(HEADER) if name not in left_out]
    file.write_text("\n".join(",".join(str(line[j]) for j in wanted) for line in lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on labels, one on numbers and one on times, by name."""
    home = tmp_path_factory.mktemp("model")
    asked = {
        "labels": (["--target", "ill", "--reference", "stage=II"], ("days", "died", "score")),
        "numbers": (["--target", "score"], ("days", "died", "ill")),
        "times": (["--time", "days", "--event", "died"], ("ill", "score")),
    }
    for name, (options, left_out) in asked.items():
        file = home / f"{name}.csv"
        written(file, left_out, rows())
        line = ["train", str(file), "--client", "site", *options, "--splits", "1", "--quiet"]
        assert cli.run([*line, "--no-report", "--out", str(home / name)]) == 0
    return home


def record(runs, name):
    return RunRecord.read(runs / name)


def drawn(run):
    return {figure.name: figure for figure in figures(run)}


def curve(shape, values, at):
    """Read a curve off its points, in the cell that holds a value."""
    cell = np.searchsorted(shape.edges[1:-1], at, side="left")
    ends = values[2 * cell : 2 * cell + 2]
    return np.interp(at, shape.edges[cell : cell + 2], ends)


@pytest.mark.parametrize("name", ["labels", "numbers"])
def test_a_curve_is_the_difference_of_predictions(runs, tmp_path, name):
    run = record(runs, name)
    shape = next(one for one in run.shapes if one.column == "dose")
    file = runs / name / f"{shape.model}.safetensors"
    random = np.random.default_rng(0)
    doses = random.uniform(shape.edges[0], shape.edges[-1], 12).round(3)
    test = tmp_path / "new.csv"
    owner = SITES[1] if shape.own else "nobody"
    written(test, (), [(owner, 60, dose, "f", "I", "no", 1, 1, 0) for dose in doses])
    found = predict(file, test)
    outputs = np.array(found.predicted, dtype=float) if name == "numbers" else None
    if outputs is None:
        yes = found.shares[:, found.labels.index("yes")]
        outputs = np.log(yes / (1 - yes))
    values = shape.own.get(owner, shape.shared)
    expected = np.array([curve(shape, values, dose) for dose in doses])
    assert outputs - outputs[0] == pytest.approx(expected - expected[0], abs=1e-6)
    figure = drawn(run)[f"shape-{1 + [one.column for one in run.shapes].index('dose')}"]
    assert [row["value"] for row in figure.data[figure.name]] == pytest.approx(shape.shared)


@pytest.mark.parametrize("name", ["labels", "numbers", "times"])
def test_counts_below_a_curve_add_up_to_the_training_rows(runs, name):
    run = record(runs, name)
    trained = sum(client.train_rows for client in run.main.clients)
    assert run.shapes
    figure = drawn(run)["shape-1"]
    assert sum(row["rows"] for row in figure.data["shape-1-rows"]) == trained
    ages = {float(row[1]) for row in rows()}
    for shape in run.shapes:
        assert sum(shape.rows) == trained
        assert min(shape.rows) >= 10
        # thresholds are short decimals, and the ends are no row's value
        assert len(shape.edges) == len(shape.rows) + 1 == len(shape.shared) / 2 + 1
        if shape.column == "age":
            assert not {shape.edges[0], shape.edges[-1]} & {min(ages), max(ages)}
    spreads = [one.spread for one in run.shapes]
    assert spreads == sorted(spreads, reverse=True)


def test_a_band_is_the_ridge_regression_s(runs):
    """The average model of numbers: C = 2σ²(2 Σ a aᵀ + n diag(l2))⁻¹, by NumPy alone."""
    data = {"file": [str(runs / "numbers.csv")], "client": "site", "target": "score"}
    config = RunConfig.of({"data": data}, "numbers")
    prepared = Source(config).prepared()
    ready = settle(prepared.encoding, prepared.sites, prepared.model)
    asked = contests(config, prepared, ready, runs)[:1]
    settings = training.Settings(prepared.encoding, asked)
    one = training.run(settings, prepared.sites, "scored", ready=ready).models[0]
    X = np.concatenate([X for X, _ in prepared.train])
    y = np.concatenate([y for _, y in prepared.train])
    A = np.column_stack([X, np.ones(len(X))])
    ridge = len(X) * np.append(one.model.l2, 0.0)[: A.shape[1]]
    H = 2 * A.T @ A + np.diag(ridge)
    used = np.trace(np.linalg.solve(H, 2 * A.T @ A))
    residual = y - A @ one.result.x
    C = 2 * (residual @ residual) / (len(X) - used) * np.linalg.inv(H)
    assert _covariance(one, prepared) == pytest.approx(C, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["labels", "numbers", "times"])
def test_a_forest_has_the_effects(runs, name):
    run = record(runs, name)
    effects = {one.column: one.values for one in run.effects}
    figure = drawn(run)["forest"]
    shown = {str(row["client"]).split(", per ")[0]: row for row in figure.data["forest"]}
    assert shown.keys() == {
        f"{name} (reference)" if not own["error"] else name
        for name, own in effects.items()
        if name != "intercept"
    }
    for column, row in shown.items():
        own = effects[column.removesuffix(" (reference)")]
        unit = own["unit"]
        ends = [own[end] * unit for end in ("low", "estimate", "high")]
        ends = np.exp(ends) if run.task.ratios else ends
        assert [row[end] for end in ("low", "value", "high")] == pytest.approx(ends, rel=1e-6)
    assert effects["age"]["unit"] == pytest.approx(np.std([r[1] for r in rows()]), rel=0.1)
    assert effects["sex=f"]["unit"] == 1
    scale = figure.layers[1]["encoding"]["x"]["scale"].get("type")
    assert scale == ("log" if run.task.ratios else None)
    assert ("stage=II" in figure.caption) == (name == "labels")
    assert ("ratio" in effect_table(run).heads[0]) == bool(run.task.ratios)
    assert "coefficients" not in drawn(run)  # the forest stands in its place


def test_thresholds_count_right_and_wrong(runs):
    run = record(runs, "labels")
    best = run.joining.recommendation
    cuts = [one for one in run.cuts if one.model == best]
    everyone = run.score_rows(best)["all rows"]
    assert [one.rows for one in cuts] == [everyone.rows] * 2
    half, prevalence = cuts
    assert half.threshold == 0.5
    assert (half.found + half.left_alone) / half.rows == pytest.approx(everyone.values["accuracy"])
    sick = half.found + half.missed
    assert half.found / sick == pytest.approx(everyone.values["recall"])
    assert prevalence.found + prevalence.missed == sick
    assert prevalence.threshold == pytest.approx(sick / half.rows, abs=0.1)
    table = cut_table(run)
    assert table.rows[0][1][0].value == 1
    assert table.rows[0][1][5].value == pytest.approx(100 * half.false_alarms / half.rows)
    assert best in {row.model for row in run.bins}


def test_hazards_over_time(runs):
    run = record(runs, "times")
    assert {one.column for one in run.hazards} == {"age", "dose", "sex=m", "stage=II", "stage=III"}
    assert drawn(run).keys() >= {f"hazard-{k}" for k in range(1, 6)}
    for one in run.hazards:
        assert 0 < one.p <= 1
        assert one.times == sorted(one.times)
    age = next(one for one in run.hazards if one.column == "age")
    effect = next(one for one in run.effects if one.column == "age").values
    assert np.mean(age.effects) == pytest.approx(effect["estimate"] * effect["unit"], abs=0.1)
    assert "corrected for 5" in about_hazards(run)


def test_the_page_says_how_to_read_curves(runs):
    run = record(runs, "labels")
    words = about_shapes(run)
    assert "log-odds of “yes”" in words
    assert ("Bands" in words) == bool(run.shapes[0].errors)
    many = [Shape(f"c{k}", [0, 1, 2], [9, 9], [0.0] * 4) for k in range(14)]
    more = run.model_copy(update={"shapes": many})
    assert about_shapes(more).endswith("not drawn: c12, c13.")
    assert sum(name.startswith("shape-") for name in drawn(more)) == MOST_SHAPES
    text = report.page(run, "")
    assert "What has it learnt?" in text
    assert 'id="figure-shape-1"' in text
    assert pytest.approx(1.96) == REACH
