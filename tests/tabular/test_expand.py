"""Splines, interactions and random directions: what they are, the same at every client, in training and afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.interpolate import CubicSpline

from scaffpd import cli
from scaffpd.data.tabular.agree import checked_schema
from scaffpd.data.tabular.clients import TableFile, read_clients
from scaffpd.data.tabular.encode import DIRECTIONS, KNOTS, expanded, expanded_names, with_expansion
from scaffpd.errors import InputError
from scaffpd.run.predict import predict

SCHEMA = {
    "version": 1,
    "task": "regression",
    "standardise": True,
    "labels": [],
    "shape": None,
    "dimension": None,
    "columns": [
        {"name": "a", "kind": "number"},
        {"name": "c", "kind": "category", "categories": ["u", "v"], "other": True},
        {"name": "b", "kind": "number"},
    ],
}


def rows(n=500):
    return np.random.default_rng(0).standard_normal((n, 5))


def test_splines_span_the_natural_cubic_splines_of_every_number():
    schema = with_expansion(SCHEMA, "splines")
    X = rows()
    found = expanded(X, schema)
    assert expanded_names(schema)[5:] == tuple(
        f"{name} (bend {k})" for name in "ab" for k in (1, 2, 3)
    )
    assert np.array_equal(found[:, :5], X)
    for at, (column, block) in enumerate(((0, found[:, 5:8]), (4, found[:, 8:]))):
        z = X[:, column]
        values = np.random.default_rng(at).normal(size=len(KNOTS))
        curve = CubicSpline(KNOTS, values, bc_type="natural")
        inside = np.clip(z, KNOTS[0], KNOTS[-1])
        truth = curve(inside) + curve(inside, 1) * (z - inside)  # linear beyond the outer knots
        basis = np.column_stack([np.ones_like(z), z, block])
        coefficients = np.linalg.lstsq(basis, truth, rcond=None)[0]
        np.testing.assert_allclose(basis @ coefficients, truth, atol=1e-9)
    dense = np.random.default_rng(1).standard_normal((400_000, 5))
    bends = expanded(dense, schema)[:, 5:8]
    np.testing.assert_allclose(bends.std(0), 1, atol=0.02)
    np.testing.assert_allclose(bends.mean(0), 0, atol=0.01)
    np.testing.assert_allclose((bends * dense[:, :1]).mean(0), 0, atol=0.02)


def test_interactions_and_random_directions():
    X = rows()
    schema = with_expansion(SCHEMA, "interactions")
    assert expanded_names(schema)[5:] == ("a × b",)
    np.testing.assert_array_equal(expanded(X, schema)[:, 5], X[:, 0] * X[:, 4])
    schema = with_expansion(SCHEMA, "rff")
    found = expanded(X, schema)
    assert found.shape[1] == 5 + DIRECTIONS == len(expanded_names(schema))
    kernel = found[:40, 5:] @ found[:40, 5:].T
    distances = ((X[:40, None] - X[None, :40]) ** 2).sum(-1)
    assert np.abs(kernel - np.exp(-distances / 10)).max() < 0.35  # exp(−‖z − z'‖²/(2d)), up to 1/√D
    np.testing.assert_array_equal(found, expanded(X, schema))


def test_what_cannot_be_made_is_refused():
    for schema, kind, words in (
        ({**SCHEMA, "standardise": False}, "splines", "leave standardise on"),
        (
            {**SCHEMA, "columns": SCHEMA["columns"][1:2]},
            "splines",
            "are made of columns of numbers, and there are 0",
        ),
        (
            {**SCHEMA, "columns": SCHEMA["columns"][:1]},
            "interactions",
            "columns of numbers, and there are 1",
        ),
        ({**SCHEMA, "columns": [], "shape": [4]}, "rff", "need columns with names"),
        (
            {**SCHEMA, "columns": [{"name": f"x{k}", "kind": "number"} for k in range(300)]},
            "interactions",
            "would make 45,150 columns",
        ),
    ):
        with pytest.raises(InputError, match=words):
            with_expansion(schema, kind)
    with pytest.raises(InputError, match="expand: Input should be 'splines'"):
        checked_schema({**SCHEMA, "expand": "magic"})
    assert with_expansion(SCHEMA, None) is SCHEMA


@pytest.fixture
def curved(tmp_path):
    """Two sites whose target is a bent function of two numbers."""
    random = np.random.default_rng(3)
    lines = ["site,a,b,y"]
    for k in range(300):
        a, b = random.normal(size=2)
        lines.append(
            f"{'north' if k % 2 else 'south'},{a:.4f},{b:.4f},{np.sin(2 * a) + b**2 + 0.1 * random.normal():.4f}"
        )
    (tmp_path / "p.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_bent_truth_is_learnt_and_new_rows_are_expanded_alike(curved, monkeypatch, capsys):
    monkeypatch.chdir(curved)
    error = {}
    for name, more in (
        ("plain", []),
        ("splines", ["--features", "splines"]),
        ("rff", ["--features", "rff"]),
    ):
        command = [
            "train",
            "p.csv",
            "--client",
            "site",
            "--target",
            "y",
            "--out",
            name,
            "--splits",
            "0",
            "--quiet",
        ]
        assert cli.run([*command, "--no-report", "--no-choose", "--l2", "0.001", *more]) == 0
        found = predict(curved / name, curved / "p.csv")
        error[name] = found.scores()[-1]["rmse"]
    assert error["splines"] < 0.35 < 0.9 < error["plain"]
    assert error["rff"] < 0.5
    assert (
        cli.run(["train", "p.csv", "--client", "site", "--target", "y", "--features", "spline"])
        == 2
    )
    assert "spline" in capsys.readouterr().err
    source = TableFile(curved / "p.csv", "site", "y", features="interactions")
    assert read_clients(source).encoded[0].features == ("a", "b", "a × b")
