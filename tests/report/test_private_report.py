"""What the page of a private run promises, and what it says that it does not."""

from __future__ import annotations

import json

import pytest
import run_folders

from scaffpd.errors import InputError
from scaffpd.run.page import write
from scaffpd.run.page.data import NOT_COVERED, SEEDED
from scaffpd.run.page.read import read
from scaffpd.run.page.verdict import cautions

PRIVACY = {
    "epsilon": 3.9996,
    "delta": 1e-5,
    "budget": 4,
    "clip": 1.0,
    "loss_clip": 4.0,
    "radius": 3.0,
    "smoothness": None,
    "noise": [6.5, 7.25],
    "loss_noise": 11.0,
    "seeded": False,
    "models": ["average", "fair"],
    "clients": {"cleveland": 3.9996, "hungarian": 3.5, "switzerland": 3.5, "va": 3.25},
}


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    return run_folders.hospitals(tmp_path_factory.mktemp("private") / "run", privacy=PRIVACY)


def changed(folder, into, **about):
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    summary = json.loads((folder / "summary.json").read_text())
    (into / "summary.json").write_text(json.dumps(summary | {"privacy": about or None}))
    return into


def test_the_page_has_the_promise_and_its_limits(private):
    page = write(private).read_text(encoding="utf-8")
    plain = page.replace("\u00a0", " ")
    assert (
        "<dt>Differential privacy</dt><dd>(ε, δ) = (4.00, 1e-05)<small>for every record, both models"
        in plain
    )
    assert NOT_COVERED in page
    assert "of gradients z = 6.50 to 7.25, of losses z_L = 11.00" in page
    assert "gradient C = 1, loss B = 4, length of a row R = 3" in page
    assert "Losses that clients have sent carry their noise." in page
    assert "what was optimised" not in page  # nobody knows the losses without noise
    assert page.count('data-v="3.25"') == 1  # ε of va, in the table of clients


def test_the_sentence_names_the_least_where_clients_differ(private, tmp_path):
    assert read(private).privacy.sentence == (
        "(ε, δ) = (4.00, 1e-05) for every record, both models together; the least of a client is 3.25."
    )
    same = changed(private, tmp_path / "same", epsilon=1.0, delta=1e-6, clients={"va": 1.0})
    assert read(same).privacy.sentence == "(ε, δ) = (1.00, 1e-06) for every record."


def test_seeds_and_a_large_delta_are_warned_of(private, tmp_path):
    folder = changed(private, tmp_path / "open", **PRIVACY | {"seeded": True, "delta": 0.005})
    found = cautions(read(folder))
    assert SEEDED in found
    assert any(
        s.startswith("δ = 0.005 is no less than one over the 212 rows of cleveland") for s in found
    )
    assert found[-1] == NOT_COVERED
    assert SEEDED not in cautions(read(private))
    assert not any("δ =" in s for s in cautions(read(private)))


def test_without_privacy_the_page_has_no_word_of_it(private, tmp_path):
    folder = changed(private, tmp_path / "plain")
    page = write(folder).read_text(encoding="utf-8")
    assert "ε" not in page.split("<script", 1)[0]
    assert read(folder).privacy is None


@pytest.mark.parametrize(
    "about", [{"epsilon": 1.0}, {"epsilon": "much", "delta": 1}, {"clients": [1]}]
)
def test_what_is_no_promise_is_refused(private, tmp_path, about):
    with pytest.raises(InputError):
        read(changed(private, tmp_path / "bad", **about))
