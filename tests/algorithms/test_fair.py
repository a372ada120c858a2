"""`fair`: which method is chosen, that it is then run as if it had been named, and what is refused."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.algorithms import Fair
from scaffpd.errors import InputError

FAIR = sys.modules[Fair.__module__]
CHI = sp.ChiSquare(rho=0.1)
COLUMNS = ("certificate", "exchanges", "bytes_up", "bytes_down")


def rows():
    random = np.random.default_rng(0)
    return [
        (random.standard_normal((m, 3)) + i, random.integers(0, 2, m))
        for i, m in enumerate((9, 14, 20))
    ]


def cohort(loss="logistic"):
    return sp.Cohort(
        rows(), sp.Linear(loss, l2=0.1, intercept=True, classes=2 if loss == "softmax" else None)
    )


def network():
    torch.manual_seed(0)
    return sp.Cohort(rows(), sp.Module(torch.nn.Linear(3, 2).double()))


def same_run(one, other):
    assert np.array_equal(one.x, other.x)
    assert np.array_equal(one.weights, other.weights)
    for column in COLUMNS:
        assert np.array_equal(one.history[column], other.history[column]), column


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_linear_models_go_to_minimax_newton(loss):
    result = sp.train(sp.fair(CHI), cohort(loss), tol=1e-8)
    assert result.status is sp.Status.CONVERGED
    assert result.certificate <= 1e-8
    assert result.message == (
        f"{sp.Status.CONVERGED.sentence} "
        "Solved by the minimax Newton method: the losses are convex, gradients are full, and d is small."
    )
    same_run(result, sp.train(sp.MinimaxNewton(CHI), cohort(loss), tol=1e-8))


def test_many_parameters_go_to_the_subspace_saddle_method(monkeypatch):
    monkeypatch.setattr(FAIR, "WIDEST", 3)
    result = sp.train(sp.fair(CHI), cohort(), tol=1e-8)
    assert result.message.endswith(
        "subspace saddle method: the losses are convex and gradients are full."
    )
    same_run(result, sp.train(sp.SubspaceSaddle(CHI), cohort(), tol=1e-8))


def test_a_module_is_not_known_to_be_convex():
    method = sp.fair(CHI, local_steps=3)
    result = sp.train(method, network(), rounds=3)
    assert result.message.endswith("Solved by Scaff-PD: the losses are not known to be convex.")
    same_run(result, sp.train(sp.ScaffPD(CHI, local_steps=3, batch_size=32), network(), rounds=3))
    with pytest.raises(InputError, match="not known to be convex"):
        sp.train(method, network(), rounds=3, tol=1e-3)
    noisy = sp.train(sp.fair(CHI, local_steps=3, batch_size=4), network(), rounds=2)
    assert noisy.message.endswith("not known to be convex.")


def test_minibatches_go_to_scaff_pd():
    result = sp.train(sp.fair(CHI, local_steps=3, batch_size=4), cohort(), rounds=5, seed=1)
    assert result.message.endswith("Solved by Scaff-PD: local gradients are of minibatches.")
    same_run(
        result, sp.train(sp.ScaffPD(CHI, local_steps=3, batch_size=4), cohort(), rounds=5, seed=1)
    )


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    sp.train(sp.fair(CHI), cohort(), rounds=2, checkpoint=tmp_path / "run")
    for other in (sp.SubspaceSaddle(CHI), sp.fair(CHI, batch_size=4), sp.fair(sp.Average())):
        with pytest.raises(InputError, match="is of another algorithm"):
            sp.train(other, cohort(), rounds=4, checkpoint=tmp_path / "run")


def test_it_is_a_plain_value():
    method = sp.fair(CHI, local_steps=7)
    assert (
        repr(pickle.loads(pickle.dumps(method))) == repr(method) == repr(Fair(CHI, local_steps=7))
    )
    assert isinstance(method.choice(cohort()), sp.MinimaxNewton)
    assert method.choice(network()).local_steps == 7


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sp.fair(None), "Fair needs an objective such as ChiSquare"),
        (lambda: sp.fair(0.1), "Fair needs an objective"),
        (lambda: sp.fair(sp.ChiSquare), "Fair needs an objective"),
        (lambda: sp.fair(sp.ScaffPD(CHI)), "Fair needs an objective"),
        (lambda: sp.fair(CHI, local_steps=0), "local_steps >= 1"),
        (lambda: sp.ScaffPD(CHI, local_steps=None), "local_steps >= 1"),
        (lambda: sp.fair(CHI, batch_size=2.5), "batch_size >= 1"),
        (lambda: sp.train(sp.fair, cohort()), "needs an algorithm such as fair"),
        (
            lambda: sp.train(sp.fair(sp.ChiSquare(0.1, prior=[1, 2])), cohort()),
            "prior for 2 clients",
        ),
    ],
)
def test_mistakes_get_a_sentence(make, words):
    with pytest.raises(InputError, match=words):
        make()
