"""What several runs of the same rows would show together, and noise that no file gives away."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cases.boards import lockstep, singles
from cases.refusals import refuses
from cases.silos import QUICK, RANGES, ROUGH, agree, agreement, federation, run
from runtimes import NAMES, cohort_of, point_of
from scaffpd import cli
from scaffpd.data.tabular.agree import curved
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.ledger import Entrant, TableLedger
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.rows import SiloRows
from scaffpd.deploy.silo import BEGIN, READY, Silo
from scaffpd.deploy.transcript import OBJECTIVE, Journal, Weightings
from scaffpd.privacy.counts import CountNoise
from scaffpd.settings.silo import SiloFile


def another(path, places, old, new, folder):
    """The same silos with another agreement, or the same one in another folder."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new).replace('folder = "', f'folder = "{folder}'))
    agree(path, places)
    return run(path, places)[0]


def test_agreements_with_other_weightings_of_the_same_rows(tmp_path, fake_clock):
    """All begin at the same x⁰: with three silos a second objective would isolate a gradient."""
    path, places = federation(tmp_path, 3, replacing=ROUGH | QUICK)
    assert run(path, places)[0].status == "converged"
    assert another(path, places, "rho = 0.1", "rho = 0.1", "b").status == "converged"  # again
    assert another(path, places, "l2 = 0.03", "l2 = 0.05", "c").status == "converged"
    for old, new in (
        ("rho = 0.1", "rho = 0.2"),
        ("rho = 0.2", "rho = 0.1\nprior = [0.4, 0.3, 0.3]"),
    ):
        outcome = another(path, places, old, new, "d")
        assert outcome.status == "paused"
        assert "with more weightings than are safe" in outcome.sentence
    assert "go on with an objective that an earlier agreement had" in outcome.sentence


def test_two_objectives_of_four_silos_and_no_third(tmp_path):
    ledger = TableLedger(tmp_path / "ledger")
    ledger.take()
    who = Entrant("run", "silo", "members", "rows")

    def journal(objective):
        return Journal(None, Weightings(ledger.weightings(who), objective))

    weights = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
    for count, own in enumerate(weights, 1):
        found = {name: journal(f"objective {count}") for name in NAMES}
        assert found["a"].weightings.objectives == count  # before anything is asked
        silos = lockstep(singles(lambda names: cohort_of("logistic", names), NAMES), found)
        at = silos.gradients(0 * point_of(silos))
        if count < 3:
            at.sum(np.array(own))
        else:
            with refuses("too-many-weightings"):
                at.sum(np.array(own))
        ledger.write(who, found["a"].weightings.new)
    ledger.leave()
    ledger = TableLedger(tmp_path / "ledger")
    ledger.take(lambda: ledger.link)
    counted = {
        "rows": [],  # other rows
        "run": [1, 2, 3],
        "members": [1, 2, 3],  # sums are a person's decision, objectives are not
        "silo": [1, 2, 3],  # with another key, whoever the members are
    }
    for name, found in counted.items():
        other = replace(who, **{name: "other"})
        objectives = {own for place, own in ledger.weightings(other) if place == OBJECTIVE}
        assert len(objectives) == len(found), name
    assert len(ledger.weightings(replace(who, silo="other", members="other"))) == 6
    assert len(ledger.weightings(replace(who, members="other"))) == 3
    ledger.leave()


def began(place, document):
    asked = Message(BEGIN, {"agreement": document.values, "epoch": "1", "states": []})
    silo = Silo.open(place)
    reply = decode(silo.answer(encode(asked)))
    silo.close()
    return reply


def test_a_run_without_a_silo_needs_a_person_who_has_read_whose_gradient_it_shows(tmp_path, capsys):
    path, places = federation(tmp_path, granted=False)
    four = agreement(path, places)
    pins = "".join(f'{name} = "{card.fingerprint}"\n' for name, card in four.cards.items())
    place = places["va"]
    text = place.read_text()
    place.write_text(f'agree = "always"\n{text}\n[members]\n{pins}')
    assert began(place, four).kind == READY
    places.pop("hungarian")
    path.write_text(path.read_text().replace('"hungarian", ', ""))
    three = agreement(path, places)
    reply = began(place, three)
    assert (reply.values["code"], reply.values["waits"]) == ("agreement-awaited", True)
    digest = three.digest.hex()
    assert cli.run(["silo", "agree", str(place), "--json"]) == 0
    shown = {own["agreement"]: own["leaves"] for own in json.loads(capsys.readouterr().out)}
    words = " ".join(shown[digest])
    assert f"Agreement {four.digest.hex()[:12]} had other members" in words
    assert "compute the gradient of silo 'hungarian' at the model's own start" in words
    assert "If rows of a single silo have changed since an earlier run" in words
    assert not any("other members" in line for line in shown[four.digest.hex()])
    assert cli.run(["silo", "agree", str(place), "--grant", digest]) == 0
    assert began(place, three).kind == READY
    # with noise, a difference of two sums has the noise of both
    noisy = Agreement({**three.values, "noise": {"noise": 1.0}})
    assert noisy.with_others({four.digest.hex(): four.values}) == []


PRIVATE = {
    'folder = "run"': 'folder = "run"\ncurves = "on"',
    "[training]\nrounds = 500\ntol = 1e-6": "[privacy]\nepsilon = 8.0\n[training]\nrounds = 2",
}


def counts_of(place, document):
    """What a silo posts for its first counts, in a process of its own."""
    file = SiloFile.read(place)
    terms = document.terms(place)
    ledger = TableLedger(file.ledger)
    ledger.take()
    rows = SiloRows(file, document, terms, ledger)
    noise = CountNoise(document.values["noise"]["counts"], terms.numbers, len(terms.silos))
    found = []

    def once(edges):
        found.append(rows.noisy_counts(terms.encoding(), edges, noise))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        curved(terms.encoding(), once, noise.limits)
    rows.written_down()
    ledger.leave()
    return found[0], rows.account


def test_no_stored_secret_removes_the_noise_of_counts(tmp_path):
    path, places = federation(tmp_path, replacing=PRIVATE | RANGES)
    place = places["va"]
    document = agreement(path, places)
    first, account = counts_of(place, document)
    assert account.total == 1
    again, account = counts_of(place, document)  # after a restart
    np.testing.assert_array_equal(again, first)
    assert account.total == 1
    (stored,) = (place.parent / "runs").glob("*/counts.jsonl")
    stored.unlink()  # the key, the rows and all other files are the same
    other, account = counts_of(place, document)
    assert account.total == 2
    differs = (other - first) / 2.0**24
    noise = document.values["noise"]["counts"] * len(RANGES) ** 0.5
    assert 0.8 < differs.std() / (2**0.5 * noise) < 1.25
    assert not np.array_equal(other, first)


def test_with_noise_no_hash_of_rows_leaves(tmp_path, fake_clock):
    """A commitment under a stored key would confirm a guess of the last row."""
    path, places = federation(
        tmp_path, replacing=PRIVATE | RANGES | {'curves = "on"': 'curves = "off"\ntimeout = 3.0'}
    )
    outcome, transport = run(path, places, {15: [("kill", "va")]})
    assert outcome.status == "paused"
    for folder in (tmp_path / "run", *(tmp_path / "cleveland" / "runs").iterdir()):
        known = json.loads((folder / "rows.json").read_text())
        assert [name for name, own in known.items() if own] == ["cleveland"] * (
            folder.name != "run"
        )
    table = tmp_path / "va" / "patients.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")
    transport.restart("va")
    assert "not those that this run began with" in coordinate(path, transport).sentence
