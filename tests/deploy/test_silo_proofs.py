"""Certificates across organisations without a ridge, and beyond what a ridge proves."""

import pytest

from cases.refusals import refuses
from cases.silos import MODEL, agree, entries, federation, is_right, run
from scaffpd.deploy.announcing import announced
from scaffpd.settings.federation import FederationFile

PRODUCTS = ("products", "products")


def few_columns(folder, silos=4, l2="0.0"):
    """Columns of which none follows from others: categories add up to an intercept."""
    model = {MODEL: f'[model]\nkind = "logistic"\nl2 = {l2}\n', "tol = 1e-6": "tol = 1e-7"}
    path, places = federation(folder, silos, model, granted=False)
    before, columns = path.read_text().split("[columns]\n")
    columns, after = columns.split("\n\n", 1)
    kept = [c for c in columns.splitlines() if c.split()[0] in ("age", "sex", "trestbps")]
    path.write_text("\n".join([before, "[columns]", *kept, "", after]))
    agree(path, places)
    return path, places


def test_silos_prove_maximum_likelihood(tmp_path, fake_clock):
    """One sum more, before training, and the certificate is that of one process."""
    path, places = few_columns(tmp_path)
    outcome, _ = run(path, places)
    assert outcome.certificate <= 1e-7
    is_right(path, places, outcome)
    assert PRODUCTS in announced(FederationFile.read(path))


@pytest.mark.parametrize("silos", [3, 4])
def test_evidence_has_asked_for_as_much(tmp_path, fake_clock, silos):
    """Products are summed with the weights of evidence: at zero no weighting more is written."""
    path, places = few_columns(tmp_path, silos, '"auto"')
    outcome, _ = run(path, places)
    assert outcome.certificate <= 1e-7
    lines = [line for place in places.values() for line in entries(place)]
    found = {own for line in lines for where, own in line["weightings"] if where == "vectors "}
    assert len(found) == 1


def test_three_silos_need_a_ridge_or_evidence(tmp_path):
    """A weighting more at zero would be solved for a silo's own sums."""
    with refuses("ridge-missing"):
        few_columns(tmp_path / "none", 3)
    path, _ = few_columns(tmp_path / "small", 3, "0.01")
    assert PRODUCTS not in announced(FederationFile.read(path))
