"""A private run as a folder: what it promises is what was spent, also after it was interrupted."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

import scaffpd as sp
from cases.refusals import refuses
from cases.runs import Nobody, asked, patients, trained
from scaffpd.errors import InputError
from scaffpd.report.folder import RunFolder
from scaffpd.program.path import walkable
from scaffpd.program.prepare import prepare
from scaffpd.report.record import RunRecord
from scaffpd.settings.run import RunConfig
from scaffpd.program.train import SECRET, noise_secret, private

SEEDED = {"epsilon": 4, "seed": 7}


def config(folder, **tables):
    return asked(patients(folder / "p.csv"), **{"privacy": {"epsilon": 4}, **tables})


def run(settings, place, watcher=None, fresh=False):
    return trained(settings, place, watcher, fresh)[:2]


def spent(folder):
    return RunRecord.read(folder).privacy


def delta_of(epsilon, releases):
    """δ of Gaussian releases (how many, z), as Balle and Wang have it."""
    sigma = sum(n / z**2 for n, z in releases) ** -0.5
    a = 1 / (2 * sigma)
    b = epsilon * sigma
    return norm.cdf(a - b) - np.exp(epsilon) * norm.cdf(-a - b)


def test_the_folder_says_what_was_spent(tmp_path):
    models, _ = run(config(tmp_path), tmp_path / "run")
    found = spent(tmp_path / "run")
    assert [m.name for m in models] == ["fair"]
    assert 3.99 < found.epsilon <= 4 == found.budget
    points = models[0].result.rounds + 1  # of losses and gradients; the one local gradient is known
    assert points == 31
    cost = delta_of(
        found.epsilon, [(points, found.noise["noise"][0]), (points, found.noise["loss_noise"][0])]
    )
    assert cost == pytest.approx(1e-5, rel=1e-3)
    assert found.noise["loss_noise"][0] / found.noise["noise"][0] == pytest.approx(
        np.sqrt(0.7 / 0.3)
    )
    assert (found.clips["clip"], found.clips["loss_clip"], found.clips["radius"], found.seeded) == (
        1,
        4,
        3,
        False,
    )
    scores = RunRecord.read(tmp_path / "run").models[0].clients
    assert {score.client: score.epsilon for score in scores} == found.clients
    assert max(found.clients.values()) == found.epsilon


def test_the_secret_is_for_its_owner_and_nowhere_else(tmp_path):
    run(config(tmp_path), tmp_path / "run")
    secret = tmp_path / "run" / SECRET
    assert secret.stat().st_mode & 0o777 == 0o600
    value = noise_secret(tmp_path / "run")
    assert len(value) == 32
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file != secret:
            assert value not in file.read_bytes()
            assert value.hex() not in file.read_text(errors="ignore")


def test_the_numbers_are_those_of_the_library(tmp_path):
    models, prepared = run(config(tmp_path, privacy=SEEDED), tmp_path / "run")
    method = sp.fair(sp.ChiSquare(0.1), local_steps=1)
    linear = sp.Linear("logistic", [0.1] * prepared.train[0][0].shape[1] + [1e-3], intercept=True)
    private = sp.Private.solved(linear, 4, method, rounds=30, radius=3.0, secret=7)
    by_hand = sp.train(
        method, sp.Cohort(prepared.train, private, prepared.names), rounds=30, progress=False
    )
    assert np.array_equal(by_hand.x, models[0].result.x)
    assert not (tmp_path / "run" / SECRET).exists()
    assert spent(tmp_path / "run").seeded


def test_an_interrupted_run_goes_on_with_the_same_noise_and_the_same_account(tmp_path):
    settings = config(tmp_path)
    run(settings, tmp_path / "a")
    parts, _ = run(settings, tmp_path / "b", Nobody(after=9))
    early = spent(tmp_path / "b").epsilon
    again, _ = run(RunConfig.read(tmp_path / "b" / "config.toml"), tmp_path / "b")
    assert parts[0].result.rounds == 9
    assert again[0].result.rounds == 30
    late = spent(tmp_path / "b").epsilon
    assert early < late <= 4
    assert late == spent(tmp_path / "a").epsilon
    prepared = prepare(settings)
    model = private(settings, prepared, noise_secret(tmp_path / "b"))
    straight = sp.train(
        settings.method, prepared.cohort(settings, model), rounds=30, progress=False
    )
    assert np.array_equal(straight.x, again[0].result.x)
    run(
        settings, tmp_path / "b"
    )  # a finished one once more: nothing is asked that was not asked before
    assert spent(tmp_path / "b").epsilon == late


def test_minibatches_are_refused_before_any_work(tmp_path):
    tables = {"algorithm": {"batch_size": 10, "local_steps": 2}, "training": {"rounds": 3}}
    with refuses("private-minibatch"):
        run(config(tmp_path, **tables), tmp_path / "run")
    assert not (tmp_path / "run" / SECRET).exists()


def test_more_rounds_are_another_run_and_fresh_noise_another_model(tmp_path):
    settings = config(tmp_path)
    folder = RunFolder(tmp_path / "run")
    first, _ = run(settings, folder.path)
    assert folder.fits("train", settings)
    assert not folder.fits("train", config(tmp_path, training={"rounds": 31}))
    assert not folder.fits("train", config(tmp_path, privacy={"epsilon": 5}))
    before = (folder.path / SECRET).read_bytes()
    second, _ = run(settings, folder.path, fresh=True)
    assert (folder.path / SECRET).read_bytes() != before
    assert not np.array_equal(first[0].result.x, second[0].result.x)


def test_a_secret_that_is_lost_or_open_stops_the_run(tmp_path):
    settings = config(tmp_path)
    run(settings, tmp_path / "run")
    (tmp_path / "run" / SECRET).chmod(0o644)
    with refuses("secret-readable-by-others"):
        run(settings, tmp_path / "run")
    (tmp_path / "run" / SECRET).unlink()
    with refuses("noise-secret-lost"):
        run(settings, tmp_path / "run")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / SECRET).write_bytes(b"few")
    (tmp_path / "short" / SECRET).chmod(0o600)
    with pytest.raises(InputError, match="cannot be read or written"):
        noise_secret(tmp_path / "short")


def test_the_model_is_of_use(tmp_path):
    """Far better than one label for everybody, on data that is easy to learn from."""
    random = np.random.default_rng(0)
    lines = ["hospital,a,b,outcome"]
    for k in range(900):
        a, b = random.normal(size=2)
        lines.append(f"h{k % 3},{a:.3f},{b:.3f},{int(a + b + 0.3 * random.normal() > 0)}")
    (tmp_path / "p.csv").write_text("\n".join(lines) + "\n")
    models, _ = run(asked(tmp_path / "p.csv", privacy=SEEDED), tmp_path / "run")
    assert models[0].test.score.min() > 0.85


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"privacy": {}}, "needs a number from 1e-6 to 1e6 for privacy.epsilon, but it is missing"),
        ({"privacy": {"epsilon": 0}}, "needs a number from 1e-6 to 1e6 for privacy.epsilon"),
        (
            {"privacy": {"epsilon": 1, "delta": 0.002}},
            "needs a number from 1e-30 to 0.001 for privacy.delta",
        ),
        ({"privacy": {"epsilon": 1, "clipp": 1}}, "did you mean 'clip'"),
        ({"privacy": {"epsilon": 1, "seed": -1}}, "privacy.seed"),
        ({"training": {"tol": 1e-6}}, "with noise there is none"),
        (
            {"algorithm": {"kind": "SubspaceSaddle"}},
            "How often SubspaceSaddle asks a client is not known",
        ),
    ],
)
def test_what_cannot_be_private_is_refused(tmp_path, tables, sentence):
    with pytest.raises(InputError) as caught:
        run(config(tmp_path, **tables), tmp_path / "run")
    assert sentence in str(caught.value)


def test_no_path(tmp_path):
    with refuses("path-with-privacy"):
        walkable(config(tmp_path))
