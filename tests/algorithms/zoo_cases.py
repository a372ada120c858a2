"""Problems for the tests of the methods, and a proxy that notes what a method asks."""

import inspect
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch
from naive_zoo import Setting, losses_at

import scaffpd as sp
from naive import Client, relative, unequal_clients
from scaffpd.models.draws import Draws

OUTPUTS = {"squared": 1, "logistic": 1, "softmax": 3}
SEED = 3


@dataclass(frozen=True)
class Case:
    """The same clients twice: as a cohort and as naive loops, with a start that is not zero."""

    cohort: sp.Cohort
    clients: dict[str, Client]
    x0: np.ndarray

    @property
    def names(self):
        return list(self.clients)

    @cached_property
    def rate(self):
        return 0.8 / max(f.smoothness for f in self.clients.values())

    @cached_property
    def dual_rate(self):
        """A dual rate that moves λ visibly and not at once into a corner."""
        return 0.1 / np.ptp(losses_at(self.clients, self.x0))

    def weights(self, kind):
        """p_i = n_i/n or 1/N."""
        sizes = {name: len(f.A) if kind == "samples" else 1 for name, f in self.clients.items()}
        return {name: m / sum(sizes.values()) for name, m in sizes.items()}

    def setting(self, rounds, weights="uniform", **more):
        known = {"rate": self.rate, "p": self.weights(weights)}
        return Setting(self.clients, self.x0, rounds, **known | more)

    def rows(self, question, name, step=0):
        b = question.batch_size
        m = len(self.clients[name].A)
        if b is None or m <= b:
            return None
        uniform = Draws(question.key, [name]).uniform((step + 1) * b)[0, step * b :].numpy()
        return np.minimum(np.floor(uniform * m).astype(int), m - 1)


def case(loss="squared", data=None, l2=0.02, seed=5):
    """Clients of very unequal size, unless others are given."""
    outputs = OUTPUTS[loss]
    data = unequal_clients(loss, outputs) if data is None else data
    classes = {"classes": outputs} if loss == "softmax" else {}
    cohort = sp.Cohort(data, sp.Linear(loss, l2=l2, **classes))
    clients = {name: Client(X, y, loss, l2, outputs) for name, (X, y) in data.items()}
    x0 = 0.3 * np.random.default_rng(seed).standard_normal(cohort.dimension)
    return Case(cohort, clients, x0)


class Recorder:
    """A cohort that notes every question: clients, key, steps, and with which weights summed."""

    def __init__(self, cohort):
        self._cohort = cohort
        self.asked = []
        self.round = None

    def __getattr__(self, name):
        return getattr(self._cohort, name)

    def gradients(self, *args, **kwargs):
        return self._ask("gradients", *args, **kwargs)

    def losses(self, *args, **kwargs):
        return self._ask("losses", *args, **kwargs)

    def local_updates(self, *args, **kwargs):
        return self._ask("local_updates", *args, **kwargs)

    def _ask(self, kind, *args, **kwargs):
        question = getattr(self._cohort, kind)
        arguments = inspect.signature(question).bind(*args, **kwargs)
        arguments.apply_defaults()
        about = dict(arguments.arguments)
        names = list(self._cohort.names)
        chosen = about["clients"]
        about["clients"] = names if chosen is None else [names[int(i)] for i in chosen]
        note = SimpleNamespace(kind=kind, round=self.round, sums=[], **about)
        self.asked.append(note)
        answer = question(*args, **kwargs)
        if kind == "local_updates":
            plain = answer.sum
            answer.sum = lambda weights: (note.sums.append(np.array(weights)), plain(weights))[1]
        return answer


@dataclass(frozen=True)
class Run:
    """What a method did: its states (the first before any round), and what it asked."""

    states: list
    asked: list
    problem: Case

    @property
    def x(self):
        return [state.x.numpy() for state in self.states[1:]]

    @property
    def weights(self):
        return [state.weights for state in self.states[1:]]

    def questions(self, *kinds):
        """Those of every round, one list per round."""
        rounds = range(len(self.states) - 1)
        return [[q for q in self.asked if q.kind in kinds and q.round == r] for r in rounds]

    @cached_property
    def local(self):
        """The one call of `local_updates` of every round."""
        found = self.questions("local_updates")
        assert all(len(calls) == 1 for calls in found), "one local update a round"
        return [calls[0] for calls in found]

    @property
    def participants(self):
        return [call.clients for call in self.local]

    @property
    def asked_for_losses(self):
        return [calls[0].clients for calls in self.questions("losses")]

    def rows(self, r, name, j):
        return self.problem.rows(self.local[r].plan, name, j)

    def loss_rows(self, r, name):
        return self.problem.rows(self.questions("losses", "gradients")[r][0], name)


def play(method, problem, rounds, seed=SEED):
    """Make `rounds` rounds from x0, with everything noted."""
    recorder = Recorder(problem.cohort)
    states = [method.init(recorder, seed, torch.tensor(problem.x0))]
    for r in range(rounds):
        recorder.round = r
        states.append(method.round(recorder, states[-1]))
    return Run(states, recorder.asked, problem)


def agree(seen, expected, tolerance=1e-10):
    """Every pair of vectors agrees to relative `tolerance`."""
    expected = [pair[0] if isinstance(pair, tuple) else pair for pair in expected]
    assert len(seen) == len(expected)
    for r, (a, b) in enumerate(zip(seen, expected, strict=True)):
        assert relative(a, b) <= tolerance, f"round {r}: off by {relative(a, b):.1e}"


def compare(run, expected, tolerance=1e-10):
    """The run is the naive one, in x and in λ where there is one, and has moved."""
    expected = list(expected)
    agree(run.x, expected, tolerance)
    assert relative(expected[-1][0], run.problem.x0) > 1e-3, "points that stay prove nothing"
    if expected[0][1] is not None:
        agree(run.weights, [weights for _, weights in expected], tolerance)
