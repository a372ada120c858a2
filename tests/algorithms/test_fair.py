"""`fair`: which method is chosen, that it is run as if it had been named, and what is refused."""

import sys

import numpy as np
import pytest

import scaffpd as sp
from cases.cohorts import cohort, network
from cases.refusals import refuses
from scaffpd.algorithms import Fair
from scaffpd.secure.aggregation import SecureAggregation

FAIR = sys.modules[Fair.__module__]
CHI = sp.ChiSquare(rho=0.1)


def same_run(one, other):
    assert np.array_equal(one.x, other.x)
    assert np.array_equal(one.weights, other.weights)
    for column in ("certificate", "exchanges", "bytes_up", "bytes_down"):
        assert np.array_equal(one.history[column], other.history[column]), column


CHOICES = [  # `fair`, clients, the method that it chooses, and what it says
    (sp.fair(CHI), lambda: cohort("squared"), sp.MinimaxNewton(CHI), "a Hessian is affordable."),
    (sp.fair(CHI), lambda: cohort("softmax"), sp.MinimaxNewton(CHI), "a Hessian is affordable."),
    (
        sp.fair(CHI),
        lambda: SecureAggregation(cohort("logistic"), projections=True),
        sp.SubspaceSaddle(CHI),
        "subspace saddle method: the losses are convex and gradients are full.",
    ),
    (
        sp.fair(CHI, local_steps=3, batch_size=4),
        lambda: cohort("logistic"),
        sp.ScaffPD(CHI, 3, 4),
        "Solved by Scaff-PD: local gradients are of minibatches.",
    ),
    (
        sp.fair(CHI),
        lambda: SecureAggregation(cohort("logistic")),
        sp.ScaffPD(CHI),
        "clients answer no questions about curvature.",
    ),
    (
        sp.fair(CHI, local_steps=3),
        network,
        sp.ScaffPD(CHI, 3, 32),
        "the losses are not known to be convex.",
    ),
]


@pytest.mark.parametrize(("method", "clients", "choice", "words"), CHOICES)
def test_the_first_method_whose_needs_are_met_is_run(method, clients, choice, words):
    assert method.choice(clients()) == choice
    found = sp.train(method, clients(), rounds=3)
    assert found.message.endswith(words)
    same_run(found, sp.train(choice, clients(), rounds=3))


def test_many_parameters_go_to_the_subspace_saddle_method(monkeypatch):
    monkeypatch.setattr(FAIR, "NUMBERS", 2)
    assert sp.fair(CHI).choice(cohort()) == sp.SubspaceSaddle(CHI)
    monkeypatch.undo()
    monkeypatch.setattr(FAIR, "AFFORDABLE", 26)  # d³ = 27
    assert sp.fair(CHI).choice(cohort()) == sp.SubspaceSaddle(CHI)


def test_a_network_has_an_epoch_of_minibatches_a_round():
    """52 rows of four clients: 13 on average."""
    assert sp.fair(CHI, batch_size=5).choice(network()).local_steps == 3
    assert sp.fair(CHI, local_steps=7).choice(network()).local_steps == 7


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    sp.train(sp.fair(CHI), cohort(), rounds=1, checkpoint=tmp_path / "run")
    for other in (sp.SubspaceSaddle(CHI), sp.fair(CHI, batch_size=4), sp.fair(sp.Average())):
        with pytest.raises(sp.InputError, match="belongs to another algorithm"):
            sp.train(other, cohort(), rounds=4, checkpoint=tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: sp.fair(0.1), "not-an-objective"),
        (lambda: sp.fair(sp.ChiSquare), "not-an-objective"),
        (lambda: sp.fair(CHI, local_steps=0), "not-a-count"),
        (lambda: sp.fair(CHI, batch_size=2.5), "not-a-count"),
    ],
)
def test_mistakes_are_refused(make, code):
    with refuses(code):
        make()
