"""Silos with models of their own near a shared one: the cohort's numbers, and what leaves."""

from __future__ import annotations

import numpy as np
import pytest

import scaffpd as sp
from cases.silos import (
    MODEL,
    SCAFF_PD,
    Faulty,
    cohort,
    encoded,
    federation,
    model_of,
    opened,
    secured,
)
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import InProcess, decode
from scaffpd.deploy.silo.dataset import predict
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.model_file import read_model

KAPPA = 20.0
OWN = {MODEL: MODEL + f"strength = {KAPPA}\n"}


def personal(path, places):
    """The same silos in one process, and their personal model."""
    rows, model = encoded(path, places)
    own = sp.Personal(model, KAPPA)
    train, test = ({n: getattr(rows[n], split) for n in places} for split in ("train", "test"))
    return sp.Cohort(train, own, test=test), own


def test_silos_give_the_numbers_of_a_personal_cohort(tmp_path):
    path, places = federation(tmp_path, replacing=OWN)
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "converged", outcome.sentence
    here, _ = personal(path, places)
    file = FederationFile.read(path)
    method = sp.SubspaceSaddle(file.method.objective)  # what `Fair` is across organisations
    wanted = sp.train(method, here, rounds=file.training.rounds, tol=1e-6, seed=file.training.seed)
    assert outcome.rounds == wanted.rounds
    np.testing.assert_allclose(model_of(path), wanted.x, rtol=0, atol=1e-8)
    shared = cohort(path, places).evaluate(model_of(path), "train").loss
    assert (here.evaluate(model_of(path), "train").loss < shared).all()


def test_a_silo_predicts_with_its_own_model(tmp_path):
    path, places = federation(tmp_path, replacing=OWN)
    coordinate(path, InProcess(opened(places)))
    x, setup = read_model(FederationFile.read(path).folder / "model.safetensors")
    here, model = personal(path, places)
    name, silo = next(iter(opened(places).items()))
    found = predict(silo.data, x, setup)
    rows = encoded(path, places)[0][name]
    u = sp.personalise(x, *rows.train, model)
    np.testing.assert_allclose(u, here.personal(x)[name], atol=1e-9)
    labels = setup.schema["labels"]
    expected = [labels[int(z > 0)] for z in model.model.outputs(u, rows.test[0])[:, 0]]
    assert [p for p, held in zip(found.predicted, found.held, strict=True) if held] == expected
    other = [labels[int(z > 0)] for z in model.model.outputs(x, rows.test[0])[:, 0]]
    assert other != expected


def test_with_masks_no_message_has_an_own_model_in_it(tmp_path):
    """Plain sums would show u_i = x − c_i/γ_i; masked ones show neither c_i nor u_i."""
    path, places = secured(tmp_path, replacing={**SCAFF_PD, **OWN})
    transport = Faulty(places)
    outcome = coordinate(path, transport)
    assert outcome.status == "converged", outcome.sentence
    here, _ = personal(path, places)
    own = here.personal(model_of(path))
    for site, _, answer in transport.log:
        for name, array in decode(answer, 2**31).arrays.items():
            if array.dtype.kind == "f" and array.size > 4:
                assert name in ("x",), (site, name)
            if array.shape == own[site].shape and array.dtype.kind == "f":
                assert np.abs(array - own[site].numpy()).max() > 1e-3


@pytest.mark.parametrize("strength", ["0", "-1.0", '"auto"', "nan"])
def test_strengths_that_cannot_be(tmp_path, strength):
    path, _ = federation(tmp_path, replacing={MODEL: MODEL + f"strength = {strength}\n"})
    with pytest.raises(InputError, match=r"model\.strength"):
        FederationFile.read(path)
