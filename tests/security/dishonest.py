"""A coordinator that lies: it makes an honest agreement with the silos, and then asks what it
likes.

Every attack is a function that returns what it has learnt. `RefusedError` is a silo's sentence.
"""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import torch

from scaffpd.deploy.agreement import negotiate, settle
from scaffpd.deploy.messages import InProcess, Message
from scaffpd.deploy.remote import Session, SiloRequest, SiloTrouble
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.federation import LocalPlan
from scaffpd.federation.questions import GradientsAt, LocalSteps, Project, Scores
from scaffpd.run.settings.federation import FederationFile
from scaffpd.secure.masking import FixedPoint, Identity

NAMES = ("north", "south", "east", "west")
ROWS = 40
FEATURES = 3
L2 = 1e-3
NUMBERS = FixedPoint.finest(len(NAMES), 4)
FEDERATION = """name = "attacked"
silos = {silos}

[model]
loss = "logistic"
l2 = {l2}

[algorithm]
kind = "{kind}"
{objective}
[training]
rounds = 3

[secure]
"""


class RefusedError(Exception):
    """A silo does not answer, and says why."""


def rows_of(seed, rows=ROWS):
    """A silo's own rows: generic numbers, and labels that go with them."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, FEATURES))
    return X, (X @ rng.normal(size=FEATURES) + rng.normal(size=rows) > 0).astype(int)


def written(
    folder: Path, kind="ScaffPD", rules="", names=NAMES, required=True, rows=ROWS, secure=""
):
    """The files of a federation whose silos require masks: a federation.toml, and a silo.toml for
    each.
    """
    objective = (
        '\n[objective]\nkind = "ChiSquare"\nrho = 0.1\n' if kind in ("ScaffPD", "Fair") else ""
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "federation.toml"
    path.write_text(FEDERATION.format(silos=list(names), l2=L2, kind=kind, objective=objective))
    places = {}
    pins = ""
    if required:
        for name in names:
            (folder / name).mkdir(exist_ok=True)
        prints = {
            name: Identity.stored(name, folder / name / "identity.key").card.fingerprint
            for name in names
        }
        pins = "[secure.pins]\n" + "".join(f'{name} = "{key}"\n' for name, key in prints.items())
    for k, name in enumerate(names):
        place = folder / name
        place.mkdir(exist_ok=True)
        X, y = rows_of(k, rows)
        with (place / "rows.csv").open("w", newline="") as file:
            table = [
                [*map(repr, map(float, x)), "yes" if label else "no"]
                for x, label in zip(X, y, strict=True)
            ]
            csv.writer(file).writerows([["a", "b", "c", "sick"], *table])
        rest = f"\n[secure]\nrequired = {str(required).lower()}\n{secure}{pins}"
        (place / "silo.toml").write_text(
            f'name = "{name}"\n[data]\nfile = "rows.csv"\ntarget = "sick"\n[split]\ntest = '
            f"0.0\n{rules}{rest}"
        )
        places[name] = place / "silo.toml"
    return path, places


AGREED = {}  # what silos have agreed on, by their settings: the same rows make the same agreement


class Coordinator:
    """Silos in this process, an agreement with them, and questions of any kind to any of them."""

    def __init__(self, folder, kind="ScaffPD", rules="", names=NAMES, **how):
        path, self.places = written(folder, kind, rules, names, **how)
        self.silos = {name: Silo.open(place) for name, place in self.places.items()}
        self.session, self.file = Session(InProcess(self.silos)), FederationFile.read(path)
        self.session.greet(5.0)
        self.setup = AGREED.get(about := repr((kind, rules, names, how))) or negotiate(
            self.session, names, self.file
        )
        AGREED[about] = self.setup
        self.facts = settle(self.session, names, self.setup)
        self.names = list(names)
        self.asked = 0

    def put(self, name: str, request: SiloRequest) -> Message:
        """One question to one silo."""
        self.asked += 1
        try:
            return self.session.ask(request, [name])[name]
        except (InputError, SiloTrouble) as refusal:
            raise RefusedError(str(refusal)) from None

    def restart(self, name: str) -> None:
        """Start another process of a silo."""
        self.silos[name] = self.session.transport.silos[name] = Silo.open(self.places[name])

    def ask(self, name, question, **values):
        """A question of the waist; further values change its message."""
        request = SiloRequest.of(question)
        return self.put(
            name, SiloRequest(request.kind, {**request.values, **values}, request.arrays)
        )

    def truth(self, name):
        """The silo's encoded rows and labels, and the cohort that computes with them; for the tests
        alone.
        """
        silo = self.silos[name]
        ready = silo.data.encoded(dict(self.setup.schema), self.setup.mean, self.setup.deviation)
        return *ready.train, silo.cohort

    def gradient(self, name, x):
        """c_i itself, for the tests alone."""
        return self.truth(name)[2].gradients(x).each()[0].numpy()


def point(values):
    return torch.from_numpy(np.asarray(values, dtype=np.float64))


# --- reading rows from losses far out


def hinge(coordinator, name, scale):
    """g(v, b) = mean max(0, −y (a·v + b)): what a logistic loss is at scale·(v, b)."""

    def value(v, b):
        x = scale * np.append(v, b)
        loss = float(coordinator.ask(name, Scores(point(x))).arrays["scalars"][0])
        return (loss - L2 / 2 * float(x @ x)) / scale

    return value


def kinks(g, v, n, low, high, marks=None):
    """Where g(v, ·), which is convex and made of n + 1 lines of slopes (k − n₊)/n, bends; and the
    lines' places.
    """
    step = 1e-4

    def line(b):
        left = g(v, b)
        right = g(v, b + step)
        slope = np.round((right - left) / step * n) / n
        return slope, left - slope * b

    lines = {}
    if marks is not None:
        for b in marks:
            lines[line(b)[0]] = (b, line(b)[1])
    else:
        todo = [(low, high)]
        ends = {b: line(b) for b in (low, high)}
        while todo:
            a, b = todo.pop()
            (s, p), (t, q) = ends[a], ends[b]
            lines |= {s: (a, p), t: (b, q)}
            middle = (p - q) / (t - s) if t > s else b
            if t - s > 1.5 / n and min(middle - a, b - middle) > 2 * step:
                ends[middle] = line(middle)
                todo += [(a, middle), (middle, b)]
    slopes = sorted(lines)
    bends = [(lines[s][1] - lines[t][1]) / (t - s) for s, t in itertools.pairwise(slopes)]
    places = [(a + b) / 2 for a, b in zip([low, *bends], [*bends, high], strict=True)]
    return np.array(bends), places


def read_rows(coordinator, name, scale=1e6):
    """Rows of a silo, from losses alone: (m, d) numbers, or none where it refuses.

    The loss at scale·(v, b) bends where the plane a·v + b = 0 passes a row. The bends along one
    direction u, and along u + η e_j for every j, give every row's entries: n + 1 lines a direction.
    """
    n = ROWS
    u = np.random.default_rng(5).normal(size=FEATURES)
    eta = 1e-4
    g = hinge(coordinator, name, scale)
    try:
        first, places = kinks(g, u, n, -20.0, 20.0)
        found = [
            (kinks(g, u + eta * e, n, -20.0, 20.0, places)[0] - first) / -eta
            for e in np.eye(FEATURES)
        ]
    except (RefusedError, ValueError):
        return np.zeros((0, FEATURES))
    return np.stack(found, 1)


def rows_read(found, X, within=0.01):
    """How many of the true rows are among those found."""
    return sum(bool(len(found)) and bool((np.abs(found - row).max(1) < within).any()) for row in X)


# --- single gradients from scalars


def project_own_way(coordinator, name, x):
    """⟨c_i, e_j⟩ for every j, by pretending that x went along e_j."""
    found = []
    at = GradientsAt(point(x))
    for e in np.eye(len(x)):
        other = GradientsAt(point(x + e))
        try:
            coordinator.ask(name, at)
            coordinator.ask(name, other)
            found.append(
                float(coordinator.ask(name, Project(at, other.x - at.x)).arrays["scalars"][0])
            )
        except RefusedError:
            return np.full(len(x), np.nan)
    return np.array(found)


def sizes_of_corrections(coordinator, name, x, scale=10.0):
    """c_i from the lengths ‖η(c_i + s e_j)‖² of local work with the correction s e_j."""
    plan = LocalPlan(1, 1.0)
    c = np.zeros(len(x))

    def size(correction):
        asked = SiloRequest.of(LocalSteps(point(x), None, point(correction), plan))
        about = {**asked.values, "about": asked.kind, "parts": ["d"]}
        reply = coordinator.put(name, SiloRequest("sizes", about, asked.arrays))
        return float(reply.arrays["scalars"][0])

    try:
        for j, e in enumerate(np.eye(len(x))):
            c[j] = (size(scale * e) - size(-scale * e)) / (4 * scale)
    except RefusedError:
        return np.full(len(x), np.nan)
    return c


# --- single vectors from masked sums


def masked(coordinator, name, question, part, weights, numbers=None, names=None, **more):
    """One silo's answer to a question for its masked vector, with weights that only it is told."""
    asked = SiloRequest.of(question)
    values = {
        **asked.values,
        "about": asked.kind,
        "parts": [part],
        "names": list(names or coordinator.names),
        "colluding": 1,
        "weights": [float(w) for w in weights],
        "numbers": None if numbers is None else numbers.values(),
        **more,
    }
    return coordinator.put(name, SiloRequest("masked", values, asked.arrays))


def summed(coordinator, told, part="c", numbers=NUMBERS, **more):
    """What a server makes of the answers; `told` has the question and the weights that each silo is
    told.
    """
    total = np.zeros(1, dtype=np.uint64)
    for name, (question, weights) in told.items():
        reply = masked(coordinator, name, question, part, weights, numbers, **more)
        if "masked" not in reply.arrays:
            raise RefusedError(reply.values)
        total = total + reply.arrays["masked"].view(np.uint64)
    return numbers.decode(total)


def meet(coordinator, swap=None):
    """Hand everybody's cards around; `swap(cards)` changes what silos are shown."""
    cards = {
        name: coordinator.put(name, SiloRequest("card")).values["card"]
        for name in coordinator.names
    }
    shown = cards if swap is None else swap(dict(cards))
    for name in coordinator.names:
        coordinator.put(name, SiloRequest("meet", {"cards": list(shown.values())}))


def learn(attack, *given):
    """What an attack returns; `None` where a silo refuses."""
    try:
        return attack(*given)
    except RefusedError:
        return None


def single_out(coordinator, victim, x):
    """c of the victim, by telling everybody else that the others' weights are zero."""
    at = GradientsAt(point(x))
    told = {}
    for name in coordinator.names:
        coordinator.ask(name, at)
        own = [
            0.5 if other == name else 0.5 / (len(coordinator.names) - 1)
            for other in coordinator.names
        ]
        none = [
            float(other == victim) * 0.5 + 1e-300 * (other != victim) for other in coordinator.names
        ]
        told[name] = (at, own if name == victim else none)
    return summed(coordinator, told) / 0.5


def single_point(coordinator, victim, x):
    """c of the victim, by asking the others at a point where the server knows their sum."""
    here = GradientsAt(point(x))
    there = GradientsAt(point(x + 1.0))
    weights = np.full(len(coordinator.names), 0.25)
    for name in coordinator.names:
        coordinator.ask(name, here)
        coordinator.ask(name, there)
    return summed(
        coordinator,
        {name: (here if name == victim else there, weights) for name in coordinator.names},
    )


def weightings(coordinator, x, nudge):
    """Everybody's c, from as many weightings of (nearly) the same vectors as there are silos."""
    n = len(coordinator.names)
    sums = []
    tables = 0.1 + 0.6 * np.eye(n)
    for k, weights in enumerate(tables):
        at = GradientsAt(point(x + k * nudge))
        for name in coordinator.names:
            coordinator.ask(name, at)
        sums.append(summed(coordinator, dict.fromkeys(coordinator.names, (at, weights))))
    return np.linalg.solve(tables, np.array(sums))


def subset(coordinator, x):
    """c of the last silo, from the sum over all and the sum over all but the last."""
    at = GradientsAt(point(x))
    names = coordinator.names
    for name in names:
        coordinator.ask(name, at)
    whole = summed(coordinator, dict.fromkeys(names, (at, np.full(len(names), 1.0))))
    total = np.zeros(1, dtype=np.uint64)
    fewer = names[:-1]
    for name in fewer:
        reply = masked(coordinator, name, at, "c", np.full(len(fewer), 1.0), NUMBERS, fewer)
        total = total + reply.arrays["masked"].view(np.uint64)
    return whole - NUMBERS.decode(total)


def digits_beyond(coordinator, x):
    """Everybody's c, from the remainders beyond ever fewer binary digits: in base 4, a digit of
    each silo per sum.
    """
    at = GradientsAt(point(x))
    weights = 4.0 ** np.arange(len(coordinator.names))
    low = 0.0
    for name in coordinator.names:
        coordinator.ask(name, at)
    for b in range(58, -3, -1):
        numbers = FixedPoint.finest(len(weights), -b + 5)
        found = _total(coordinator, at, weights, numbers, beyond=float(b))
        left = np.rint(
            (found - weights @ np.broadcast_to(low, (len(weights), len(x)))) * 2.0 ** (b + 1)
        ).astype(int)
        digits = []
        for _ in weights:
            digits.append((left + 1) % 4 - 1)
            left = (left - digits[-1]) // 4
        low = low + np.array(digits) * 2.0 ** -(b + 1)
    return low


def bisect_factor(coordinator, x, nudge=0.0):
    """c of the first silo: in whole numbers the others vanish, and a common factor of the weights
    is searched.
    """
    n = len(coordinator.names)
    found = []
    weights = np.array([0.85, *[0.15 / (n - 1)] * (n - 1)])
    numbers = FixedPoint(n, 20, 0)
    for j in range(len(x)):
        low = 1e-3
        high = 1e3
        sign = 1.0
        s = 1.0
        for k in range(45):
            at = GradientsAt(point(x + nudge * (45 * j + k)))
            s = np.sqrt(low * high)
            for name in coordinator.names:
                coordinator.ask(name, at)
            got = _total(coordinator, at, s * weights, numbers)[j]
            low, high, sign = (low, s, np.sign(got)) if abs(got) >= 1 else (s, high, sign)
        found.append(sign * 0.5 / (0.85 * s))
    return np.array(found)


def two_weightings(coordinator, x, change):
    """c of the first silo, from two sums in which the others have equal weights."""
    at = GradientsAt(point(x))
    n = len(coordinator.names)
    for name in coordinator.names:
        coordinator.ask(name, at)
    one = np.full(n, 1 / n)
    other = np.full(n, 1 / n) + change * np.eye(n)[0]
    sums = [_total(coordinator, at, weights, NUMBERS) for weights in (one, other)]
    return (sums[1] - sums[0]) / (other - one)[0]


def _total(coordinator, at, weights, numbers, **more):
    return summed(
        coordinator, dict.fromkeys(coordinator.names, (at, weights)), "c", numbers, **more
    )


def bisect_exponent(coordinator, name, x):
    """c_1 to many digits, from sizes (powers of two) of local work with correction s e_1."""
    low = -(2.0**20) - 8
    high = -(2.0**20) + 8
    plan = LocalPlan(1, 1.0)
    for _ in range(40):
        middle = (low + high) / 2
        correction = middle * np.eye(len(x))[0]
        question = LocalSteps(point(x), None, point(correction), plan)
        reply = masked(coordinator, name, question, "d", np.full(len(coordinator.names), 1.0))
        low, high = (low, middle) if reply.values["exponent"] > 20 else (middle, high)
    return -(low + high) / 2 - 2.0**20


def losses_nearby(coordinator, name, x, step=1e-4):
    """c_i from losses at x and at d points near it: the honest answers of a run that goes there."""
    values = [
        float(coordinator.ask(name, GradientsAt(point(x + move))).arrays["scalars"][0])
        for move in [np.zeros(len(x)), *(step * np.eye(len(x)))]
    ]
    return (np.array(values[1:]) - values[0]) / step
