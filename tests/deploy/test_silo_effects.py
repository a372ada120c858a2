"""Effects across organisations: those of the same rows in one process, and what takes part."""

import numpy as np
import pytest

import scaffpd as sp
from cases.refusals import refuses
from cases.silos import (
    MODEL,
    Faulty,
    Killed,
    agree,
    federation,
    mostly_long,
    patients_who_die,
    rows,
    run,
)
from scaffpd.deploy.coordinate import coordinate
from scaffpd.pipeline.judging import estimated, lines_of
from scaffpd.pipeline.sites import Encoding
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import read_model
from scaffpd.settings.silo import SiloFile

SHORT = {"rounds = 500": "rounds = 2", "tol = 1e-6\n": ""}
WAYS = [
    ("fixed", "model"),
    ("stratified", "model"),
    ("stratified", "robust"),
    ("intercepts", "model"),
    ("slopes", "robust"),
]


def asking(effects, errors="model", kind="logistic", more=""):
    return f'[model]\nkind = "{kind}"\neffects = "{effects}"\nerrors = "{errors}"\n{more}'


def alone(path, places):
    """The table of the silos' rows in one process."""
    file = FederationFile.read(path)
    setup = read_model(file.folder / "model.safetensors")[1]
    encoded, model = rows(path, places)
    lines, chosen = lines_of(Encoding(setup.schema, setup.mean, setup.deviation))

    def bound(shape):
        pairs = {name: (own.train[0][:, chosen], own.train[1]) for name, own in encoded.items()}
        return sp.Cohort(pairs, shape)

    labels = tuple(map(str, file.labels or ()))
    return estimated(bound, lines, range(len(lines.mean)), model, labels, file.model)


def alike(path, places):
    """Coefficients, errors and deviations of the coordinator's record, and of every silo's."""
    record = RunRecord.read(FederationFile.read(path).folder)
    wanted = alone(path, places)
    assert [row.column for row in record.effects] == list(wanted.names)
    for name in ("estimate", "error", "between"):
        found = [row.values[name] for row in record.effects]
        np.testing.assert_allclose(found, getattr(wanted, name), atol=1e-6, rtol=1e-6)
    assert record.effects_said == wanted.said
    for place in places.values():
        (folder,) = SiloFile.read(place).folder.glob("runs/*")
        assert RunRecord.read(folder).effects == record.effects
    return record, wanted


@pytest.mark.parametrize(("effects", "errors"), mostly_long(WAYS, WAYS[2], WAYS[3]))
def test_silos_have_the_effects_of_one_process(tmp_path, fake_clock, effects, errors):
    """The mean of free intercepts has the digits that their variance of 10⁴ units leaves it."""
    curves = {"labels = [0, 1]\n": 'labels = [0, 1]\ncurves = "on"\npairs = 0\n'}
    more = 'reference = ["cp=4"]\n'
    changes = {MODEL: asking(effects, errors, more=more), **SHORT}
    path, places = federation(tmp_path, 4, changes | (curves if effects == "intercepts" else {}))
    outcome, _ = run(path, places)
    assert outcome.final, outcome.sentence
    record, wanted = alike(path, places)
    levels = {row.column: row.values for row in record.effects}
    assert levels["cp=4"]["estimate"] == pytest.approx(0, abs=1e-12)
    assert levels["age"]["unit"] > 5
    assert levels["sex"]["unit"] == 1.0
    # from squares alone, at most what the products of slopes give
    low = np.array([row.values["low"] for row in record.effects])
    whole = np.array([row["low"] for row in wanted.table()])
    assert (low <= whole + 1e-6).all()
    assert (next((tmp_path / "va").glob("runs/*")) / "effects.csv").exists()


@pytest.mark.parametrize(
    "kind", mostly_long(["squared", "poisson", "softmax", "ordinal"], "poisson")
)
def test_effects_of_other_outcomes(tmp_path, fake_clock, kind):
    labels = {} if kind in ("softmax", "ordinal") else {"labels = [0, 1]\n": ""}
    changes = {MODEL: asking("intercepts", kind=kind), **SHORT, **labels}
    path, places = federation(tmp_path, replacing=changes)
    outcome, _ = run(path, places)
    assert outcome.final, outcome.sentence
    alike(path, places)


@pytest.mark.long
def test_hazards_of_silos(tmp_path, fake_clock):
    path, places = patients_who_die(tmp_path, model='effects = "fixed"\nerrors = "robust"')
    path.write_text(path.read_text().replace("rounds = 500\ntol = 1e-6", "rounds = 2"))
    agree(path, places)
    outcome, _ = run(path, places)
    assert outcome.final, outcome.sentence
    alike(path, places)


FEW = {
    "squares": ("effects-with-few-silos", 3, asking("intercepts")),
    "robust": ("effects-with-few-silos", 3, asking("fixed", "robust")),
    "at the start": ("effects-without-evidence", 3, asking("fixed", more="l2 = 0.1\n")),
    "nothing": ("effects-missing", 4, '[model]\nkind = "logistic"\nerrors = "robust"\n'),
    "a level": ("unknown-name", 4, asking("fixed", more='reference = ["cp=9"]\n')),
    "noise": (
        "effects-with-noise",
        4,
        asking("fixed").replace("errors", "l2 = 0.1\nerrors") + "[privacy]\nepsilon = 1.0\n",
    ),
}


@pytest.mark.parametrize("what", FEW)
def test_what_is_refused_from_the_agreement(tmp_path, what):
    code, silos, model = FEW[what]
    with refuses(code):
        federation(tmp_path, silos, {MODEL: model})


def test_three_silos_have_fixed_effects(tmp_path, fake_clock):
    path, places = federation(tmp_path, 3, {MODEL: asking("fixed"), **SHORT})
    outcome, _ = run(path, places)
    assert outcome.final, outcome.sentence
    alike(path, places)


@pytest.mark.long
def test_a_coordinator_that_is_killed_over_effects_goes_on(tmp_path):
    changes = {MODEL: asking("intercepts"), **SHORT}
    whole, places = federation(tmp_path / "whole", replacing=changes)
    last = run(whole, places)[1].count
    wanted = RunRecord.read(FederationFile.read(whole).folder).effects
    path, places = federation(tmp_path / "killed", replacing=changes)
    transport = Faulty(places, {last - 15: [("crash",)]})
    with pytest.raises(Killed):
        coordinate(path, transport)
    outcome = coordinate(path, transport)
    assert outcome.final, outcome.sentence
    found = RunRecord.read(FederationFile.read(path).folder).effects
    for one, other in zip(found, wanted, strict=True):
        assert one.values["estimate"] == pytest.approx(other.values["estimate"], abs=1e-6)
