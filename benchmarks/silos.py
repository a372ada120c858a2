"""Many silos, slow silos: what a round costs with 30 and 100 of them, 1,000 through regions, and what waiting costs.

    python benchmarks/silos.py scale      # 10, 30 and 100 deployed silos in this process, messages late and lost
    python benchmarks/silos.py regions    # 1,000 clients by way of 1, 10, 32 and 100 regional aggregators
    python benchmarks/silos.py slow       # one silo 1 to 100 times as slow as the median: wait for it, or a deadline

prints the tables of docs/deploy/scale.md. Seconds of a coordinator that waits are those of a simulated clock; seconds
of work are CPU seconds of this process, which carries all silos.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "deploy")]

from cases.silos import FakeClock, encoded, federation, model_of  # noqa: E402 - silos are those of the tests

import scaffpd as sp  # noqa: E402
from cases.reference import reference_optimum  # noqa: E402
from scaffpd.deploy.coordinate import coordinate  # noqa: E402
from scaffpd.deploy.deployed_run import DeployedRun  # noqa: E402
from scaffpd.deploy.messages import Failure, InProcess, decode  # noqa: E402
from scaffpd.deploy.session import Membership  # noqa: E402
from scaffpd.deploy.silo.silo import Silo  # noqa: E402
from scaffpd.federation import Constants, Federation  # noqa: E402
from scaffpd.federation.questions import GradientsAt, LocalSteps, ProximalSteps, Reply, Vectors  # noqa: E402
from scaffpd.run.settings.federation import FederationFile  # noqa: E402

# --- a federation whose members are federations


class RegionalChannel:
    """Regions, each with clients of its own; a `Channel`.

    A region hands questions on to its clients and answers for all of them: their numbers one by one, and for a sum
    Σ_i w_i v_i its own part Σ_{i in region} w_i v_i, which is one vector. So the coordinator takes one vector a region
    and one row of numbers a client, and x goes down once a region.
    """

    keeps = True
    here = False
    account = None
    absent = 0

    def __init__(self, regions: Sequence[Federation]) -> None:
        self.regions = list(regions)
        self.names = tuple(name for region in self.regions for name in region.names)
        places = np.cumsum([0, *(len(region.names) for region in self.regions)])
        self._place = [
            (r, i) for r, region in enumerate(self.regions) for i in range(len(region.names))
        ]
        assert places[-1] == len({*self.names}), "two regions have a client of the same name"

    @property
    def work(self) -> float:
        """Of all regions."""
        return sum(region.channel.work for region in self.regions)

    @property
    def fingerprint(self) -> str:
        """Of all regions."""
        return hashlib.sha256(
            "".join(region.fingerprint for region in self.regions).encode()
        ).hexdigest()

    def constants(self) -> Constants:
        """Every client's own, region after region."""
        told = [region.channel.constants() for region in self.regions]
        joined = {}
        for item in fields(Constants):
            values = [getattr(own, item.name) for own in told]
            whole = isinstance(values[0], np.ndarray)
            joined[item.name] = (
                np.concatenate(values)
                if whole
                else all(values)
                if item.name in ("convex", "quadratic")
                else any(values)
            )
        return Constants(**joined)

    def start(self) -> torch.Tensor:
        """The same everywhere."""
        return self.regions[0].channel.start()

    def own(self, x):
        """Nothing: clients make their own models where they are."""
        return

    def masked(self):
        """See docs/deploy/scale.md."""
        raise sp.InputError(
            "masks-made-among",
            "Masks are made among the clients of a region, and among regions: see docs/deploy/scale.md.",
        )

    def ask(self, question, chosen: Sequence[int]) -> Reply:
        """Ask every region about its clients, and put the answers in order."""
        groups: dict[int, list[int]] = {}
        for k, i in enumerate(chosen):
            groups.setdefault(self._place[i][0], []).append(k)
        if isinstance(question, ProximalSteps):  # what only the coordinator knows of all clients
            steepest = float(self.constants().smoothness[list(chosen)].max())
            question = replace(
                question,
                plan=replace(question.plan, steepest=max(question.plan.steepest, steepest)),
            )
        replies = {
            r: self.regions[r].channel.ask(
                self._part(question, ks), [self._place[chosen[k]][1] for k in ks]
            )
            for r, ks in groups.items()
        }
        order = torch.tensor([k for ks in groups.values() for k in ks]).argsort()
        first = next(iter(replies.values()))
        numbers = {
            n: lambda n=n: torch.cat([reply.numbers[n]() for reply in replies.values()])[order]
            for n in first.numbers
        }
        vectors = {}
        for part, handle in first.vectors.items():
            summed = lambda w, part=part: sum(
                replies[r].vectors[part].sum(w[ks]) for r, ks in groups.items()
            )
            each = lambda part=part: torch.cat(
                [reply.vectors[part].each() for reply in replies.values()]
            )[order]
            vectors[part] = Vectors(summed, each, shape=handle.shape, fine=handle.fine)
        return Reply(numbers, vectors)

    @staticmethod
    def _part(question, ks):
        if isinstance(question, LocalSteps) and isinstance(question.at, torch.Tensor):
            return replace(question, at=question.at[ks])
        return question


def regional(clients: dict, model, regions: int) -> Federation:
    """Clients in so many regions."""
    groups = np.array_split(np.array(list(clients), dtype=object), regions)
    return Federation(
        RegionalChannel([sp.Cohort({n: clients[n] for n in names}, model) for names in groups])
    )


def drawn(n, m=40, d=20, seed=0):
    """Clients whose rows and labels differ from one to the next."""
    rng = np.random.default_rng(seed)
    found = {}
    common = np.random.default_rng(seed + 1).standard_normal(d)
    for i in range(n):
        X = rng.standard_normal((m, d)) + 0.3 * rng.standard_normal(d)
        own = common + 0.5 * rng.standard_normal(d)
        found[f"silo-{i:04d}"] = X, (X @ own + 0.5 * rng.standard_normal(m) > 0).astype(int)
    return found


def regions_table(clients=1000):
    """Flat and through regions: the same numbers, and what the coordinator has to take."""
    data = drawn(clients)
    model = sp.Linear("logistic", l2=0.01)
    rows = []
    d = 20
    objective = sp.ChiSquare(0.1)
    print(f"{clients:,} clients of 40 rows, d = {d}, ChiSquare(0.1), tol 1e-6\n")
    print(
        "| method | regions | rounds | certificate | largest difference of x from the flat run "
        "| vectors up an exchange | numbers up an exchange |"
    )
    print("|---|---|---|---|---|---|---|")
    for method in (sp.ScaffPD(objective, local_steps=5), sp.SubspaceSaddle(objective)):
        flat = sp.train(method, sp.Cohort(data, model), rounds=100, tol=1e-6, progress=False)
        for regions in (0, 10, 32, 100):
            run = (
                flat
                if not regions
                else sp.train(
                    method, regional(data, model, regions), rounds=100, tol=1e-6, progress=False
                )
            )
            off = f"{np.abs(run.x - flat.x).max():.0e}" if regions else ""
            vectors = regions or clients
            rows.append(
                (
                    type(method).__name__,
                    regions or "flat",
                    run.rounds,
                    f"{run.certificate:.1e}",
                    off,
                    vectors,
                    vectors * d + 3 * clients,
                )
            )
            print(
                "| "
                + " | ".join(
                    f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in rows[-1]
                )
                + " |",
                flush=True,
            )


# --- deployed silos in this process


class Late(InProcess):
    """Silos whose answers take seconds, by a simulated clock, and get lost; who is late has not answered."""

    def __init__(self, silos, clock, seconds, loss=0.0, seed=0):
        super().__init__(silos)
        self.clock, self.seconds, self.loss, self.random = (
            clock,
            seconds,
            loss,
            np.random.default_rng(seed),
        )
        self.exchanges = self.late = 0

    def ask(self, questions, timeout):
        """One exchange takes as long as its slowest answer, or the timeout."""
        took = [0.0]
        replies = {}
        self.exchanges += 1
        for site, asked in questions.items():
            kind = decode(asked, 2**31).kind
            seconds = 0.05 if kind == "hello" else self.seconds(site, self.random)
            if seconds > timeout or (kind != "hello" and self.random.random() < self.loss):
                took.append(timeout)
                self.late += 1
                replies[site] = Failure(f"No reply within {timeout:g} seconds.")
            else:
                took.append(seconds)
                replies[site] = self.silos[site].answer(asked)
        self.clock.sleep(max(took))
        return replies


def simulated(path, places, seconds, loss=0.0, seed=0):
    """A run on the simulated clock: its outcome, transport, clock and CPU seconds before and in training."""
    clock = import_module("scaffpd.deploy.coordinate").time = FakeClock()
    silos = {name: Silo.open(place) for name, place in places.items()}
    transport = Late(silos, clock, seconds, loss, seed)
    began = time.process_time()
    try:
        return coordinate(path, transport), transport, clock.now, time.process_time() - began
    finally:
        import_module("scaffpd.deploy.coordinate").time = time


def scaled(folder, silos, more=""):
    """So many silos with tables of their own."""
    places = {}
    for name, (X, y) in drawn(silos, m=60, d=10).items():
        home = folder / name
        home.mkdir(parents=True)
        rows = [
            "a,b,c,d,e,f,g,h,i,j,y",
            *(
                ",".join(f"{v:.5g}" for v in row) + f",{label}"
                for row, label in zip(X, y, strict=True)
            ),
        ]
        (home / "rows.csv").write_text("\n".join(rows) + "\n")
        places[name] = home / "silo.toml"
        places[name].write_text(f'name = "{name}"\n\n[data]\nfile = "rows.csv"\ntarget = "y"\n')
    path = folder / "federation.toml"
    names = ", ".join(f'"{name}"' for name in places)
    path.write_text(
        f'name = "many"\nsilos = [{names}]\n\n[model]\nl2 = 0.03\nintercept = true\n\n[objective]\nkind = "ChiSquare"\n'
        f"rho = 0.1\n\n[training]\nrounds = 200\ntol = 1e-6\n\n[faults]\nquorum = {silos // 2}\n"
        "timeout = 5.0\nprobe = 1.0\nmax_age = 8\n" + more
    )
    return path, places


def usual(site, random):
    """An answer takes a second, give or take."""
    return float(random.lognormal(0.0, 0.3))


def scale_table():
    """10, 30 and 100 silos, without and with losses."""
    print(
        "| silos | sums | messages lost | outcome | rounds | exchanges | members at the end | start-up, CPU s "
        "| CPU s a round | clock, s | MB a silo | kB up a round and silo |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    alive = []  # so that no row has the memory of an earlier one
    with tempfile.TemporaryDirectory() as folder:
        simulated(*scaled(Path(folder), 3), usual)  # what is loaded once
    for silos, more, loss in (
        (10, "", 0.0),
        (30, "", 0.0),
        (30, "", 0.01),
        (30, "\n[secure]\n", 0.0),
        (100, "", 0.0),
        (100, "", 0.002),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path, places = scaled(Path(folder), silos, more)
            before = psutil.Process().memory_info().rss
            outcome, transport, waited, cpu = simulated(path, places, usual, loss, seed=1)
            alive.append(transport)
            grown = (psutil.Process().memory_info().rss - before) / silos / 1e6
            lines = DeployedRun(FederationFile.read(path).folder).status()
            begin = _until_first_round(path, places)
            each = (cpu - begin) / max(outcome.rounds, 1)
            up = lines["messages_up"] / 1e3 / max(outcome.rounds, 1) / silos
            told = f"{outcome.status}, {outcome.certificate or 0:.0e}"
            cells = (
                silos,
                "masked" if more else "clear",
                f"{loss:.1%}",
                told,
                outcome.rounds,
                transport.exchanges,
                len(outcome.members),
                f"{begin:.1f}",
                f"{each:.2f}",
                f"{waited:.0f}",
                f"{grown:.2f}",
                f"{up:.1f}",
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _until_first_round(path, places):
    """CPU seconds of a run that only begins."""
    again = path.with_name("again.toml")
    again.write_text(
        path.read_text()
        .replace("rounds = 200", "rounds = 1")
        .replace('name = "many"', 'name = "many"\nfolder = "again"')
    )
    for place in places.values():
        (place.parent / "answered.jsonl").unlink(missing_ok=True)
    return simulated(again, places, usual)[3]


# --- a slow silo


RULES = {"wait": "timeout = 1000.0", "stale": "timeout = 1000.0", "drop": "timeout = 3.0"}
DEADLINE = 3.0


class Stale(Membership):
    """Bounded staleness, tried and not kept: rounds go on with the last answers of silos that miss the deadline.

    The rule for absent silos makes up their parts; every max_age + 1 rounds everybody waits for their gradients.
    """

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        # nothing can stand in for anybody yet
        self.slow = set()
        self.turn = True

    @property
    def present(self):
        """Those who answer, and the slow."""
        return [name for name in self.members if name not in self.absent - self.slow]

    def ask(self, question, names, check=lambda _: {}):
        """Wait for slow silos in their turn, and for nobody beyond the deadline otherwise."""
        if self.ending or (self.turn and question.kind == GradientsAt.kind):
            self.absent -= self.slow
            answers = super().ask(question, names, check)
            self.absent |= self.slow
            self.age |= dict.fromkeys(self.slow & {*answers}, -1)
            return answers
        patient = self.policy
        self.policy = self.policy.model_copy(update={"timeout": DEADLINE})
        before = {*self.absent}
        try:
            return super().ask(question, names, check)
        finally:
            self.policy = patient
            self.slow |= self.absent - before

    def finish_round(self, number):
        """Grow older; whose last answer is max_age rounds old is waited for."""
        self.round = number
        self.age = {name: age + 1 if name in self.absent else 0 for name, age in self.age.items()}
        self.turn = any(self.age[name] >= self.policy.max_age for name in self.slow)


def slow_table():
    """Wait for a slow silo, go on with its last answers, or without it."""
    print(
        "8 silos of the hospitals, an answer takes 1 s (median); one silo takes `factor` times as long."
    )
    print(
        "wait: timeout = 1000 s; stale: 3 s and then its last answers, but every fourth round is waited for; "
        "drop: timeout = 3 s, max_age = 3.\n"
    )
    print(
        "| method | factor | rule | clock, s | rounds | outcome | members | true gap, all 8 silos |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for method in METHODS:
        for factor in (1, 3, 10, 30, 100):
            for rule in RULES:
                print(
                    "| " + " | ".join(map(str, slow_row(method, factor, rule))) + " |", flush=True
                )


METHODS = {
    "Fair": {},
    "ScaffPD": {"[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 5\n\n[objective]'},
}


def slow_row(method, factor, rule):
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        faults = f"\n[faults]\nquorum = 2\n{RULES[rule]}\nprobe = 1.0\nmax_age = 3\nstart_timeout = 2000.0\n"
        path, places = federation(Path(folder), 8, replacing=METHODS[method], more=faults)
        slow = sorted(places)[0]

        def seconds(site, random):
            return usual(site, random) * (factor if site == slow else 1)

        module = import_module("scaffpd.deploy.coordinate")
        module.Membership = Stale if rule == "stale" else Membership
        outcome, _, waited, _ = simulated(path, places, seconds, seed=factor)
        module.Membership = Membership
        rows, model = encoded(path, places)
        objective = FederationFile.read(path).method.objective
        clients = [rows[n].train for n in places]
        best = reference_optimum(clients, model.loss, model.l2, objective, model.intercept)
        losses = sp.Cohort({n: rows[n].train for n in places}, model).evaluate(model_of(path)).loss
        gap = objective.support(losses) - best.value
    told = f"{outcome.status}, {outcome.certificate:.0e}" if outcome.certificate else outcome.status
    return (
        method,
        factor,
        rule,
        f"{waited:.0f}",
        outcome.rounds,
        told,
        len(outcome.members),
        f"{gap:.0e}",
    )


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    {"scale": scale_table, "regions": regions_table, "slow": slow_table}[
        sys.argv[1] if sys.argv[1:] else "slow"
    ]()
