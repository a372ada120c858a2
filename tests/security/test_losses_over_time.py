"""What a passive silo works out about the others' losses from all sums of a run, by least squares.

At one point the sums leave losses open where five or more silos do not collude
(`test_what_sums_say_about_losses`). Over a run they do not: a squared loss with d parameters is
d(d + 1)/2 + d + 1 numbers, and every point brings about as many new sums. So this prints what an
attack gets, and the agreement says it.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from scipy.optimize import least_squares

import scaffpd as sp
from scaffpd.federation import Federation
from scaffpd.federation.own_weights import NUMBERS, OwnSums, OwnWeights

D = 2
UPPER = np.triu_indices(D)
OBJECTIVE = sp.ChiSquare(0.3, cap=0.43)


class Eavesdropper:
    """Silo 0 of a run by `MinimaxSums`: all questions, all sums, and its own part of them."""

    def __init__(self, n, monkeypatch, rounds=12):
        random = np.random.default_rng(1)
        rows = [random.standard_normal((20 + 5 * i, D)) for i in range(n)]
        noise = [0.5 * random.standard_normal(len(X)) for X in rows]
        slopes = [random.standard_normal(D) + i / n for i in range(n)]
        goals = [X @ s + e for X, s, e in zip(rows, slopes, noise, strict=True)]
        self.cohort = sp.Cohort(list(zip(rows, goals, strict=True)), sp.Linear("squared", l2=0.02))
        self.p = OBJECTIVE.weights(n)
        self.asked = []
        ask = Federation.ask

        def watched(federation, question, *given):
            if isinstance(question, OwnWeights | OwnSums):
                self.asked.append(question)
            return ask(federation, question, *given)

        monkeypatch.setattr(Federation, "ask", watched)
        sp.train(sp.MinimaxSums(OBJECTIVE), sp.SecureAggregation(self.cohort), rounds)
        monkeypatch.undo()
        at = self.cohort.gradients(torch.zeros(D).double())
        H = at.hessians().numpy()[:, UPPER[0], UPPER[1]]
        losses = self.cohort.evaluate(torch.zeros(D)).loss
        self.truth = np.column_stack([H, at.each().numpy(), losses])  # (N, d(d + 1)/2 + d + 1)
        everything = self.sums(self.truth, self.p)
        self.rest = everything - self.sums(self.truth[:1], self.p[:1])

    def losses(self, silos, x):
        """f_i, c_i and H_i at x of quadratic losses."""
        H = np.zeros((len(silos), D, D))
        H[:, *UPPER] = H[:, *UPPER[::-1]] = silos[:, : len(UPPER[0])]
        c = silos[:, -D - 1 : -1] + H @ x
        return silos[:, -1] + (c + silos[:, -D - 1 : -1]) @ x / 2, c, silos[:, : len(UPPER[0])]

    def sums(self, silos, p):
        """All sums of the run over these silos."""
        found = []
        for question in self.asked:
            f, c, H = self.losses(silos, question.at.x.numpy())
            if isinstance(question, OwnWeights):
                parts = question.objective._conjugate(f - float(question.level), p)[1:]
                found += [part.sum() for part in parts]
                continue
            weights, numbers = question._numbers(f, 0 * f, p)
            found += [*numbers[:, : NUMBERS - 2].sum(0), *(weights @ c), *(weights @ H)]
        return np.array(found)

    def missed(self, guess):
        """By how much sums over guessed silos are not those that were seen."""
        return self.sums(guess.reshape(-1, self.truth.shape[1]), self.p[1:]) - self.rest

    def error(self, guess):
        """The largest error of a loss at the last point, as a share; nobody has a name."""
        x = self.asked[-1].at.x.numpy()
        found = np.sort(self.losses(guess.reshape(-1, self.truth.shape[1]), x)[0])
        wanted = np.sort(self.losses(self.truth[1:], x)[0])
        return float(np.abs(found / wanted - 1).max())


def say(capsys, sentence):
    with capsys.disabled():
        sys.stdout.write(f"\n  {sentence}\n")


def test_two_others_are_found_from_the_sums_of_a_run(capsys, monkeypatch):
    """From starts that know nothing but the mean."""
    spy = Eavesdropper(3, monkeypatch)
    random = np.random.default_rng(0)
    middle = spy.truth.mean(0)
    for _ in range(8):
        guess = middle * (1 + 0.3 * random.standard_normal(spy.truth[1:].shape))
        found = least_squares(spy.missed, guess.ravel(), max_nfev=60)
        if found.cost < 1e-14:
            break
    say(capsys, f"two others' losses: to {spy.error(found.x):.0e}")
    assert spy.error(found.x) < 1e-5


def test_five_others_are_determined_though_hard_to_find(capsys, monkeypatch):
    """All unknown numbers are fixed by the sums; a search that begins nearby finds them."""
    n = 6
    spy = Eavesdropper(n, monkeypatch, 20)
    truth = spy.truth[1:].ravel()
    steps = 1e-6 * np.eye(len(truth))
    slopes = np.array([spy.missed(truth + s) - spy.missed(truth - s) for s in steps]) / 2e-6
    rank = int(np.linalg.matrix_rank(slopes, tol=1e-6))
    random = np.random.default_rng(0)
    near = least_squares(spy.missed, truth * (1 + 0.01 * random.standard_normal(len(truth))))
    far = np.tile(spy.truth.mean(0), n - 1) * (1 + 0.3 * random.standard_normal(len(truth)))
    found = least_squares(spy.missed, far, max_nfev=12)
    say(
        capsys,
        f"{n - 1} others: {rank} of {len(truth)} numbers determined by {len(spy.rest)} sums; "
        f"losses to {spy.error(near.x):.0e} from nearby, to {spy.error(found.x):.0e} from far",
    )
    assert rank == len(truth)
    assert spy.error(near.x) < 1e-6
