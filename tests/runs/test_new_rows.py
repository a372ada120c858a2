"""New rows get what the model says of them, whatever file they come in."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest

from cases.refusals import refuses
from cases.runs import asked, patients
from cases.runs import trained as run_whole
from cases.tables import read as read_table
from scaffpd import cli
from scaffpd.errors import InputError
from scaffpd.report.predict import predict
from scaffpd.settings.run import RunConfig


def run(config, place):
    return run_whole(config, place)[:2]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    return folder, *run(asked(patients(folder / "p.csv"), data_test=0.0), folder / "run")


@pytest.fixture
def trained(once, tmp_path):
    """A copy of a run's folder, its models and its data."""
    shutil.copytree(once[0], tmp_path, dirs_exist_ok=True)
    return tmp_path, *once[1:]


def lines(folder):
    return (folder / "p.csv").read_text().splitlines()


def test_rows_that_were_trained_on_get_what_the_cohort_says(trained):
    folder, models, prepared = trained
    found = predict(folder / "run", folder / "p.csv")
    truth = [line.split(",")[-1] for line in lines(folder)[1:]]
    for name, accuracy in zip(prepared.names, models[1].scores["train"].score, strict=True):
        mine = [
            str(p) == t
            for c, p, t in zip(found.clients, found.predicted, truth, strict=True)
            if c == name
        ]
        assert np.mean(mine) == pytest.approx(accuracy)
    assert (found.probability >= 0.5).all()


def test_neither_target_nor_client_need_be_there_and_order_is_kept(trained):
    folder, _, _ = trained
    rows = [line.split(",") for line in lines(folder)]
    whole = [row for row in rows if all(row)]
    (folder / "all.csv").write_text("\n".join(",".join(row) for row in whole) + "\n")
    (folder / "bare.csv").write_text("\n".join(",".join(row[3:0:-1]) for row in whole) + "\n")
    known, bare = (predict(folder / "run", folder / name) for name in ("all.csv", "bare.csv"))
    assert bare.predicted == known.predicted
    assert bare.clients == [""] * len(bare.predicted)
    assert known.clients == [row[0] for row in whole[1:]]
    model = predict(folder / "run" / "model.safetensors", folder / "all.csv")
    assert model.predicted == known.predicted


def test_held_out_rows_get_what_the_run_has_scored(tmp_path):
    """Also those with gaps, or with a category that their client never had in training."""
    random = np.random.default_rng(5)
    lines = ["hospital,ward,age,outcome"]
    for k in range(400):
        ward = random.integers(12)
        age = random.normal(50, 9)
        gap = random.random() < 0.15
        lines.append(f"h{k % 20:02d},ward {ward},{'' if gap else round(age, 1)},{int(ward > 5)}")
    (tmp_path / "p.csv").write_text("\n".join(lines) + "\n")
    models, _ = run(asked(tmp_path / "p.csv"), tmp_path / "run")
    found = predict(tmp_path / "run", tmp_path / "p.csv")
    truth = np.array([int(line.split(",")[-1]) for line in lines[1:]])
    right = np.array(found.predicted) == truth
    owner = np.array(found.clients)
    rows = read_table(tmp_path / "p.csv", client="hospital", target="outcome").rows
    for own, accuracy in zip(rows, models[1].scores["test"].score, strict=True):
        assert right[owner == own.name][own.held].mean() == pytest.approx(accuracy)
    assert models[1].scores["test"].score.mean() > 0.95


def test_gaps_of_known_clients_are_filled_as_in_training_whatever_else_is_in_the_file(trained):
    folder, _, _ = trained
    rows = lines(folder)
    gaps = [k for k, row in enumerate(rows) if k and row.split(",")[3] == ""]
    whole = predict(folder / "run", folder / "p.csv")
    (folder / "one.csv").write_text(f"{rows[0]}\n{rows[gaps[0]]}\n")
    one = predict(folder / "run", folder / "one.csv")
    assert one.probability[0] == pytest.approx(whole.probability[gaps[0] - 1], abs=1e-12)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("hospital,sex,pressure\nnorth,f,1\n", "column-missing"),
        ("age,sex,pressure\nold,f,1\n", "texts-for-numbers"),
    ],
)
def test_what_does_not_fit_is_refused(trained, text, code):
    folder, _, _ = trained
    (folder / "new.csv").write_text(text)
    with refuses(code):
        predict(folder / "run", folder / "new.csv")


def test_numbers_come_in_the_units_of_the_file(tmp_path):
    models, prepared = run(
        asked(patients(tmp_path / "p.csv", number=True), data_test=0.0), tmp_path / "run"
    )
    found = predict(tmp_path / "run", tmp_path / "p.csv")
    truth = np.array([float(line.split(",")[-1]) for line in lines(tmp_path)[1:]])
    for name, error in zip(prepared.names, models[1].scores["train"].score, strict=True):
        mine = np.array([c == name for c in found.clients])
        assert np.sqrt(
            np.mean((np.array(found.predicted)[mine] - truth[mine]) ** 2)
        ) == pytest.approx(error)


@pytest.mark.parametrize("given", [{}, {"decimal": ","}])
def test_semicolons_and_decimal_commas_change_nothing(trained, given):
    folder, models, _ = trained
    text = (folder / "p.csv").read_text()
    (folder / "q.csv").write_text(text.replace(",", ";").replace(".", ","))
    data = {
        "file": str(folder / "q.csv"),
        "client": "hospital",
        "target": "outcome",
        "test": 0.0,
        **given,
    }
    others, _ = run(RunConfig.of({"data": data}, "q.csv"), folder / "other")
    np.testing.assert_array_equal(others[1].result.x, models[1].result.x)
    assert (
        predict(folder / "other", folder / "q.csv").predicted
        == predict(folder / "run", folder / "p.csv").predicted
    )


def test_the_average_model_is_kept_beside_the_fair_one(trained):
    folder, models, prepared = trained
    fair, average = (
        predict(folder / "run", folder / "p.csv", model) for model in ("fair", "average")
    )
    assert (
        predict(folder / "run", folder / "p.csv").probability.tolist() == fair.probability.tolist()
    )
    assert fair.probability.tolist() != average.probability.tolist()
    for model, found in ((models[0], average), (models[1], fair)):
        scores = {row.group: row for row in found.scores()}
        for name, accuracy in zip(prepared.names, model.scores["train"].score, strict=True):
            assert scores[name].values["accuracy"] == pytest.approx(accuracy)
        assert scores["all rows"].rows == sum(scores[name].rows for name in prepared.names)
    with pytest.raises(InputError, match="Unknown model 'fare': did you mean 'fair'"):
        predict(folder / "run", folder / "p.csv", "fare")
    with refuses("model-without-run"):
        predict(folder / "run" / "model.safetensors", folder / "p.csv", "average")


def test_what_training_did_not_have_is_said(trained):
    folder, _, _ = trained
    rows = lines(folder)
    first = rows[1].split(",")
    second = rows[2].split(",")
    text = next(
        k for k, cell in enumerate(first[1:-1], 1) if cell and not cell.replace(".", "").isdigit()
    )
    first[text] = second[text] = "unheard of"
    (folder / "new.csv").write_text(
        "\n".join([rows[0], ",".join(first), ",".join(["Nowhere", *second[1:]])]) + "\n"
    )
    found = predict(folder / "run", folder / "new.csv")
    assert len(found.remarks) == 2
    assert found.remarks[0].startswith(
        f"2 rows with {rows[0].split(',')[text]} = 'unheard of', which training did not"
    )
    assert (
        found.remarks[1]
        == "Not trained on: 'Nowhere'; their gaps are filled from the rows at hand."
    )


def test_predictions_keep_negative_numbers_and_escape_formulas(tmp_path, monkeypatch):
    """As all tables that are written do: a label is what a stranger wrote into a file."""
    table = patients(tmp_path / "p.csv").read_text().replace("north", "-1").replace("south", "-low")
    rows = [line.rsplit(",", 1) for line in table.splitlines()]
    labels = {"1": "-yes", "0": "=cmd|' /C calc'!A0"}
    made = [f"{left},-{k}.5,{labels[label]}" for k, (left, label) in enumerate(rows[1:])]
    (tmp_path / "p.csv").write_text("\n".join([f"{rows[0][0]},depth,outcome", *made]) + "\n")
    monkeypatch.chdir(tmp_path)
    words = "train p.csv --client hospital --target outcome --splits 1 --out run"
    assert cli.run(words.split()) == 0
    assert cli.run(["predict", "run", "p.csv", "--model", "fair", "--keep", "depth,hospital"]) == 0
    with open("predictions.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["depth"] for row in found] == [f"-{k}.5" for k in range(240)]
    assert all(row["hospital"] == row["client"] for row in found)
    assert {row["client"] for row in found} == {"-1", "'-low", "west"}
    assert {row["predicted"] for row in found} == {"'-yes", "'=cmd|' /C calc'!A0"}


def test_the_command_keeps_columns_scores_clients_and_overwrites_nothing(
    trained, monkeypatch, capsys
):
    folder, _, _ = trained
    monkeypatch.chdir(folder)
    name = lines(folder)[0].split(",")[1]
    assert cli.run(["predict", "run", "p.csv", "--keep", name]) == 0
    shown = capsys.readouterr().out
    assert "AUC" in shown
    assert "all rows" in shown
    header, first, *rest = (folder / "predictions.csv").read_text().splitlines()
    start, *labels = header.split(",probability of ")
    assert start == f"{name},client,trained,predicted,probability"
    *_, answer, sure, no, yes = first.split(",")
    assert float(no) + float(yes) == pytest.approx(1, abs=2e-6)
    assert float(sure) == max(float(no), float(yes))
    assert labels[float(yes) > float(no)] == answer
    assert first.split(",")[0] == lines(folder)[1].split(",")[1]
    assert len(rest) + 1 == len(lines(folder)) - 1
    scores = (folder / "predictions.scores.csv").read_text().splitlines()
    assert scores[0].startswith("by,group,rows,accuracy,selection_rate,recall,")
    assert sum(line.startswith("client,") for line in scores) > 2
    assert cli.run(["predict", "run", "p.csv"]) == 2
    assert "already" in capsys.readouterr().err
    assert cli.run(["predict", "run", "p.csv", "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][-1]["group"] == "all rows"
    assert cli.run(["predict", "run", "p.csv", "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.run(["predict", "run", "p.csv", "--overwrite", "--keep", "client_"]) == 2


def test_rows_that_were_trained_on_are_marked(tmp_path):
    config = asked(patients(tmp_path / "p.csv"), data_test=0.3, training={"splits": 0})
    run_whole(config, tmp_path / "run")
    found = predict(tmp_path / "run", tmp_path / "p.csv")
    rows = read_table(tmp_path / "p.csv", client="hospital", target="outcome", test=0.3).rows
    mine = np.array(found.clients)
    for client in rows:
        np.testing.assert_array_equal(found.trained[mine == client.name], ~client.held)
    assert any("were trained on (column trained)" in remark for remark in found.remarks)
    others = [line.replace("north,", "nowhere,") for line in lines(tmp_path)]
    (tmp_path / "q.csv").write_text("\n".join(others[:1] + [o for o in others if "nowhere" in o]))
    assert predict(tmp_path / "run", tmp_path / "q.csv").trained is None
    (tmp_path / "p.csv").unlink()
    assert predict(tmp_path / "run", tmp_path / "q.csv").trained is None


def test_clients_get_their_own_models_and_strangers_the_shared_one(tmp_path):
    config = asked(patients(tmp_path / "p.csv"), data_test=0.3, training={"splits": 1})
    _, _, found = run_whole(config, tmp_path / "run")
    own = predict(tmp_path / "run", tmp_path / "p.csv", "personal")
    rows = read_table(tmp_path / "p.csv", client="hospital", target="outcome", test=0.3).rows
    right = np.array([str(a) == str(b) for a, b in zip(own.predicted, own.truth, strict=True)])
    place = found.models.index("personal")
    for k, client in enumerate(rows):
        mine = np.array(own.clients) == client.name
        assert right[mine][client.held].mean() == pytest.approx(found.score[place, k])
    strangers = (tmp_path / "p.csv").read_text().replace("north,", "nowhere,")
    (tmp_path / "q.csv").write_text(strangers)
    other = predict(tmp_path / "run", tmp_path / "q.csv", "personal")
    there = np.array(own.clients) != "north"
    np.testing.assert_allclose(other.shares[there], own.shares[there], rtol=1e-12)
    assert not np.allclose(other.shares[~there], own.shares[~there], rtol=1e-3)


def rewritten(folder, name, change):
    """Write p.csv anew, with every row's cells as `change` returns them."""
    header, *rows = (line.split(",") for line in lines(folder))
    made = [header, *(change(row) for row in rows)]
    (folder / name).write_text("\n".join(",".join(row) for row in made) + "\n")
    return folder / name


def test_a_blank_target_is_none(trained, monkeypatch, capsys):
    folder, _, _ = trained
    blank = rewritten(folder, "blank.csv", lambda row: [*row[:4], ""])
    found = predict(folder / "run", blank)
    assert found.truth is None
    assert found.scores() == []
    monkeypatch.chdir(folder)
    assert cli.run(["predict", "run", "blank.csv"]) == 0
    assert not (folder / "predictions.scores.csv").exists()
    assert "all rows" not in capsys.readouterr().out


def test_a_text_among_labels_that_are_numbers_changes_no_other_row(trained):
    folder, _, _ = trained
    whole = predict(folder / "run", folder / "p.csv")
    text = (folder / "p.csv").read_text().rstrip()
    (folder / "new.csv").write_text(text[: text.rindex(",")] + ",pending\n")
    found = predict(folder / "run", folder / "new.csv")
    assert found.truth == [*whole.truth[:-1], None]
    assert found.remarks == (
        *whole.remarks,
        "1 row with outcome = 'pending', which is no number: not scored.",
    )
    assert found.scores()[-1].values["accuracy"] > 0.5


def test_clients_whose_labels_are_all_new_are_scored_beside_the_others(trained, monkeypatch):
    folder, _, _ = trained
    monkeypatch.chdir(folder)
    rewritten(folder, "new.csv", lambda row: [*row[:4], "7"] if row[0] == "north" else row)
    assert cli.run(["predict", "run", "new.csv"]) == 0
    with open("predictions.scores.csv", newline="") as file:
        north, south, *_ = csv.DictReader(file)
    assert (north["group"], float(north["accuracy"]), north["base_rate"]) == ("north", 0.0, "")
    assert float(south["accuracy"]) > 0.5
    new = predict(folder / "run", folder / "new.csv").remarks[-1]
    assert (
        new
        == f"{north['rows']} rows with outcome = 7, which training did not have: counted as wrong."
    )


def test_a_text_among_numbers_to_predict_is_not_scored(tmp_path):
    run(asked(patients(tmp_path / "p.csv", number=True), data_test=0.0), tmp_path / "run")
    rest = predict(tmp_path / "run", tmp_path / "p.csv")
    new = rewritten(
        tmp_path, "new.csv", lambda row: [*row[:4], "pending" if row[0] == "north" else row[4]]
    )
    found = predict(tmp_path / "run", new)
    assert [row for row in found.scores() if row.group == "south"] == [rest.scores()[1]]
    assert sum(value is None for value in found.truth) == found.clients.count("north")
    blank = predict(tmp_path / "run", rewritten(tmp_path, "blank.csv", lambda row: [*row[:4], ""]))
    assert blank.truth is None


def test_kept_cells_that_mean_missing_are_empty(trained, monkeypatch):
    folder, _, _ = trained
    words = {"north": "NA", "south": "", "west": " None"}
    rows = [[words[line.split(",")[0]], *line.split(",")] for line in lines(folder)[1:]]
    text = [",".join(row) for row in (["country", *lines(folder)[0].split(",")], *rows)]
    (folder / "new.csv").write_text("\n".join(text) + "\n")
    monkeypatch.chdir(folder)
    assert cli.run(["predict", "run", "new.csv", "--keep", "country"]) == 0
    with open("predictions.csv", newline="") as file:
        assert [row["country"] for row in csv.DictReader(file)] == [
            row[0].replace("NA", "") for row in rows
        ]


def test_a_run_with_other_settings_leaves_nothing_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patients(tmp_path / "p.csv")
    words = [
        "train",
        "p.csv",
        "--client",
        "hospital",
        "--target",
        "outcome",
        "--no-report",
        "--quiet",
    ]
    folder = tmp_path / "run"
    assert cli.run([*words, "--splits", "1", "--out", "run"]) == 0
    (folder / "notes.csv").write_text("mine")
    before = {file.name for file in folder.iterdir()}
    assert cli.run([*words, "--splits", "0", "--out", "run"]) == 0
    gone = {"joining.csv", *(f"{name}.safetensors" for name in ("constant", "alone", "personal"))}
    assert gone <= before
    assert {file.name for file in folder.iterdir()} == before - gone
    assert cli.run([*words, "--splits", "0", "--out", "other"]) == 0
    one, other = (predict(tmp_path / name, tmp_path / "p.csv") for name in ("run", "other"))
    np.testing.assert_array_equal(one.shares, other.shares)
