"""Random faults thrown at deployed runs, each judged: a right, certified answer, or a stop with a reason and a resume.

    python benchmarks/faults.py --trials 40 --seed 1             # silos in this process, faults on the way to them
    python benchmarks/faults.py --trials 0 --flare 10 --seed 2   # FLARE's own processes, killed and stopped

writes benchmarks/FAULTS.md and faults.csv (`--out` says where). What is right is decided by the second-order
solver of `tests/cases/reference.py`, which shares nothing with the silos. In this process a clock stands in for waiting, so
that the table says for how long a run would have waited; on FLARE it is the clock on the wall.
"""

from __future__ import annotations

import argparse
import csv
import errno
import json
import logging
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/deploy", "benchmarks")]

from cases.silos import (  # noqa: E402
    FakeClock,
    Faulty,
    Killed,
    encoded,
    events,
    federation,
    model_of,
    opened,
)
from cases.silos import secured  # noqa: E402 - silos and faults are those of the tests

from cases.reference import reference_optimum  # noqa: E402
from scaffpd.deploy.coordinate import coordinate  # noqa: E402
from scaffpd.deploy.messages import Failure, InProcess, Message, decode, encode  # noqa: E402
from scaffpd.deploy.silo.disclosure import audit  # noqa: E402
from scaffpd.files import JsonLines  # noqa: E402
from scaffpd.run.settings.federation import FederationFile  # noqa: E402

TIMEOUT = 5.0
START = 30.0
TOL = 1e-6
EPSILON = 8.0
PLACE = re.compile(r"(?<=')/\S*/(?=run/)")  # where temporary folders are
LIMIT = 240  # seconds on the wall, after which a trial hangs
FAULTS = f"\n[faults]\nquorum = 2\nstart_timeout = {START}\nprobe = 1.0\ntimeout = {TIMEOUT}\nmax_age = 2\n"
METHODS = {
    "Fair": {},
    "ScaffPD": {"[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 5\n\n[objective]'},
}
NOISY = {
    "rounds = 500\ntol = 1e-6\n": "rounds = 6\n",
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 1\n\n[objective]',
}
KINDS = (
    "silo killed",
    "silo killed and back",
    "two silos killed and back",
    "silo paused",
    "messages lost",
    "answer delayed",
    "question duplicated",
    "answers swapped",
    "answer corrupted",
    "NaN",
    "scaled by 1e6",
    "scaled by 10",
    "wrong schema",
    "checkpoint truncated",
    "checkpoint corrupted",
    "coordinator's disk full",
    "silo's disk full",
    "coordinator killed",
    "data changed",
)
WHOLE = {
    "question duplicated",
    "coordinator killed",
    "checkpoint truncated",
    "checkpoint corrupted",
}
STOPPING = {"checkpoint truncated", "checkpoint corrupted", "coordinator killed", "data changed"}


@dataclass
class Trial:
    """What is thrown at which run, and what became of it."""

    number: int
    engine: str
    mode: str  # clear, secure or private
    method: str
    missing: str
    fault: str
    silo: str
    exchange: int
    verdict: str = ""
    stops: int = 0
    why: str = ""
    members: int = 0
    rounds: int = 0
    certificate: float | None = None
    gap: float | None = None
    waited: float = 0.0
    seconds: float = 0.0


class Network(Faulty):
    """Silos, and what happens on the way to them; `trial.exchange` is when it begins."""

    def __init__(self, places, trial, random, clock):
        super().__init__(places)
        self.trial = trial
        self.random = random
        self.clock = clock
        self.over = False
        self.last, self.paused = {}, set()
        self.victims = [trial.silo]
        if trial.fault.startswith("two"):
            self.victims.append(next(name for name in sorted(places) if name != trial.silo))

    def sites(self):
        """Those that are not dead."""
        return tuple(sorted(set(self.silos) - self.dead))

    def ask(self, questions, timeout):
        """Carry questions and answers, as far as the fault lets them."""
        self.count += 1
        since = self.count - self.trial.exchange
        fault = self.trial.fault
        if since >= 0 and not self.over:
            self._begin(fault, since)
        replies = {
            site: self._one(site, asked, since, fault, timeout) for site, asked in questions.items()
        }
        if fault == "answers swapped" and since == 0 and len(replies) > 1:
            first, second = sorted(replies)[:2]
            replies[first], replies[second] = replies[second], replies[first]
        if any(
            isinstance(reply, Failure) and site not in self.dead for site, reply in replies.items()
        ):
            self.clock.sleep(timeout)
        return replies

    def _begin(self, fault, since):
        if since == 0 and fault in STOPPING:
            raise Killed
        if fault.startswith(("silo killed", "two")):
            for name in self.victims:
                if since == 0:
                    self.kill(name)
                elif since == 6 and fault.endswith("back"):
                    self.restart(name)
        if fault == "silo paused":
            self.paused = {self.trial.silo} if since < 5 else set()

    def _one(self, site, asked, since, fault, timeout):
        if site in self.dead:
            return Failure("nobody answers")
        lost = Failure(f"No reply within {timeout:g} seconds.")
        mine = site == self.trial.silo and since >= 0 and not self.over
        loses = fault == "messages lost" and since >= 0 and not self.over
        if site in self.paused or (loses and self.random.random() < 0.04):
            return lost
        if fault == "question duplicated" and mine:
            self.silos[site].answer(asked)
        answer = self.silos[site].answer(asked)
        self.log.append((site, asked, answer))
        if loses and self.random.random() < 0.04:
            return lost
        if fault == "answer delayed" and mine and since in (0, 3):
            answer, self.last[site] = self.last.get(site, answer), answer
        self.last[site] = answer
        return self._mangled(answer, fault) if mine and since < 40 else answer

    def _mangled(self, answer, fault):
        if fault == "answer corrupted" and self.random.random() < 0.3:
            place = int(self.random.integers(len(answer)))
            return (
                answer[:place]
                + bytes([answer[place] ^ int(self.random.integers(1, 256))])
                + answer[place + 1 :]
            )
        factor = {"NaN": np.nan, "scaled by 1e6": 1e6, "scaled by 10": 10.0}.get(fault)
        message = decode(answer, 2**31)
        if factor is None or message.kind != "answer" or "constants" in message.arrays:
            return answer
        arrays = {
            n: array * factor if array.dtype.kind == "f" else array
            for n, array in message.arrays.items()
        }
        return encode(Message(message.kind, message.values, arrays))


@contextmanager
def full_disk(trial, random):
    """Let the coordinator's files, or a silo's, find no room from some write on; a line stops in the middle."""
    if trial.fault not in ("coordinator's disk full", "silo's disk full"):
        yield
        return
    modules = {
        "c": ["scaffpd.files", "scaffpd.training.history", "scaffpd.deploy.deployed_run"]
    }.get(trial.fault[0])
    name = "atomic_write" if modules else "append"
    places = [import_module(m) for m in modules] if modules else [JsonLines]
    real = getattr(places[0], name)
    left = [int(random.integers(3, 12)) if modules else trial.exchange]

    def bounded(file, *rest):
        if modules or trial.silo in str(file.file):
            left[0] -= 1
            if left[0] < 0:
                if not modules:
                    with file.file.open("ab") as half:
                        half.write(json.dumps(*rest).encode()[:9])
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, *rest)

    for place in places:
        setattr(place, name, bounded)
    try:
        yield
    finally:
        for place in places:
            setattr(place, name, real)


def written(folder, trial):
    """The files of a trial's federation."""
    if trial.mode == "private":
        path, places = federation(
            folder, more=f"[privacy]\nepsilon = {EPSILON:g}\n", replacing=NOISY
        )
        for place in places.values():
            place.write_text(
                place.read_text() + '\n[privacy]\nepsilon = 20\ndelta = 1e-5\ncolumns = "exact"\n'
            )
    elif trial.mode == "secure":
        path, places = secured(
            folder, drop=trial.missing == "drop", replacing=METHODS[trial.method]
        )
        return path, places
    else:
        path, places = federation(folder, replacing=METHODS[trial.method])
    path.write_text(path.read_text() + FAULTS + f'missing = "{trial.missing}"\n')
    return path, places


def damage(trial, path, places, random):
    """What happens while the coordinator is down; return how to put it right."""
    folder = FederationFile.read(path).folder
    table = places[trial.silo].parent / "patients.csv"
    if trial.fault.startswith("checkpoint") and (files := sorted(folder.glob("segment-*.npz"))):
        data = bytearray(files[-1].read_bytes())
        place = int(random.integers(1, len(data)))
        if trial.fault == "checkpoint corrupted":
            data[place] ^= 0xFF
        files[-1].write_bytes(data[:place] if trial.fault == "checkpoint truncated" else data)
        return files[-1].unlink
    if trial.fault in ("data changed", "wrong schema"):
        before = table.read_text()
        lines = before.splitlines()
        cut = (
            [line.partition(",")[2] for line in lines]
            if trial.fault == "wrong schema"
            else lines[:-5]
        )
        table.write_text("\n".join(cut) + "\n")
        return lambda: table.write_text(before)
    return lambda: None


def play(trial, folder, random, clock):
    """Run, stop, put right, resume; return the outcome and where it is."""
    path, places = written(folder, trial)
    if trial.mode == "private":
        for name, place in places.items():
            shutil.copyfile(TWIN / name / "privacy.key", place.parent / "privacy.key")
            (place.parent / "privacy.key").chmod(0o600)
    mend = damage(trial, path, places, random) if trial.fault == "wrong schema" else lambda: None
    over = False
    outcome = None
    for _ in range(5):
        network = Network(places, trial, random, clock)
        network.over = over
        try:
            with full_disk(trial, random) if not over else full_disk(Trial(*[0] * 8), random):
                outcome = coordinate(path, network)
            if outcome.final and outcome.status != "failed":
                break
            trial.why += f" Then: {outcome.sentence}" if trial.why else outcome.sentence
            over = True  # whoever is in charge puts it right, and goes on without a silo that is quarantined
            mend()
            if "is quarantined" in outcome.sentence:
                path.write_text(path.read_text().replace('missing = "pause"', 'missing = "drop"'))
        except Killed:
            trial.why += "The coordinator was killed."
            mend = damage(trial, path, places, random)
            over = True
        except OSError as error:
            trial.why = f"{trial.why} {error}".strip()
            over = True
        trial.stops += 1
    return path, places, outcome


def judge(trial, path, places, outcome):
    """Say whether the answer is right, by means of its own."""
    trial.members = len(outcome.members)
    trial.rounds = outcome.rounds
    trial.certificate = outcome.certificate
    wrong = []
    innocent = {*places} - {trial.silo}
    fellow = {sorted(places)[0]} if trial.fault.startswith("two") else set()
    if missing := {n for n in innocent if n not in outcome.members} - fellow:
        allowed = trial.fault in ("messages lost", "answers swapped") and trial.missing == "drop"
        wrong += [] if allowed else [f"{', '.join(sorted(missing))} is not in the result"]
    if trial.mode == "private":
        if outcome.status != "round limit":
            wrong.append(f"ended {outcome.status}")
        spent = [
            run["epsilon"]
            for p in places.values()
            for run in audit(p.parent / "audit.jsonl")["runs"]
        ]
        if any(epsilon is not None and epsilon > EPSILON + 1e-9 for epsilon in spent):
            wrong.append("more than the agreed ε was spent")
        if trial.fault in WHOLE and not np.array_equal(
            model_of(path), model_of(TWIN / "federation.toml")
        ):
            wrong.append("x differs from that of the undisturbed run")
    else:
        rows, model = encoded(path, places)
        clients = [rows[n].train for n in outcome.members]
        objective = FederationFile.read(path).method.objective
        best = reference_optimum(clients, model.loss, model.l2, objective, model.intercept)
        X = [np.column_stack([X, np.ones(len(X))]) if model.intercept else X for X, _ in clients]
        x = np.asarray(model_of(path), dtype=float)
        y = [y for _, y in clients]
        penalty = model.l2 / 2 * x @ x
        losses = (
            np.array(
                [np.mean(np.logaddexp(0, A @ x) - b * (A @ x)) for A, b in zip(X, y, strict=True)]
            )
            + penalty
        )
        trial.gap = float(objective.support(losses) - best.value)
        if (
            outcome.status != "converged"
            or not -1e-10 <= trial.gap <= outcome.certificate + 1e-12 <= TOL + 1e-12
        ):
            wrong.append(f"ended {outcome.status} with a gap of {trial.gap:.1e}")
    for place in places.values():
        if not audit(place.parent / "audit.jsonl")["whole"]:
            wrong.append(f"the log of {place.parent.name} is broken")
    return (
        "WRONG: " + "; ".join(wrong)
        if wrong
        else "right"
        if not trial.stops
        else "stopped, resumed, right"
    )


def hang(*_):
    raise TimeoutError("hangs")


def in_process(trial, random):
    """One trial with silos in this process."""
    clock = FakeClock()
    began = time.perf_counter()
    import_module("scaffpd.deploy.coordinate").time = clock
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path, places, outcome = play(trial, Path(folder), random, clock)
            if outcome is None or not outcome.final or outcome.status == "failed":
                trial.verdict = "WRONG: never ended"
                trial.why = trial.why if outcome is None else outcome.sentence
            else:
                trial.verdict = judge(trial, path, places, outcome)
            trial.why = trial.why or "; ".join(event["sentence"] for event in events(path)[:1])
    except TimeoutError:
        trial.verdict = f"WRONG: no end within {LIMIT} seconds"
    finally:
        signal.alarm(0)
        import_module("scaffpd.deploy.coordinate").time = time
    trial.waited, trial.seconds = clock.now, time.perf_counter() - began
    return trial


def drawn(number, random):
    """Draw a trial; every kind of fault comes before one comes again."""
    mode = str(random.choice(["clear", "clear", "secure", "private"]))
    method = "ScaffPD" if mode == "private" else str(random.choice(sorted(METHODS)))
    missing = "pause" if mode == "private" else str(random.choice(["drop", "pause"]))
    silo = str(random.choice(["cleveland", "hungarian", "switzerland", "va"]))
    order = np.random.default_rng(number // len(KINDS)).permutation(len(KINDS))
    fault = KINDS[order[number % len(KINDS)]]
    first = 10 if fault in STOPPING else 3
    last = 12 if mode == "private" else 24
    return Trial(
        number + 1,
        "in process",
        mode,
        method,
        missing,
        fault,
        silo,
        int(random.integers(first, last)),
    )


# --- FLARE's own processes


def on_flare(trials, random):
    """Trials on one FLARE: sites, job processes and the server are killed or stopped."""
    from hurting import kill_job, kill_server, kill_silo, pause_silo, wake_silo
    from test_engines import FAULTS as PATIENCE
    from test_engines import SLOWLY, Deployed, wait_for

    def server(engine, _):
        kill_server(engine)
        engine.start_server()

    def back(engine, name):
        kill_silo(engine, name)
        engine.start_silo(name)

    acts = {
        "site killed": kill_silo,
        "site killed and back": back,
        "job process killed": kill_job,
        "server killed and back": server,
        "site stopped for 20 s": pause_silo,
    }
    deployed = Deployed("flare", Path(tempfile.mkdtemp()))
    try:
        deployed.engine.start()
        for number in range(trials):
            fault = list(acts)[number % len(acts)]
            mode = "secure" if number % 3 == 2 else "clear"
            silo = str(random.choice(list(deployed.places)))
            when = int(random.integers(1, 8))
            missing = "drop" if mode == "clear" else "pause"
            trial = Trial(number + 1, "FLARE", mode, "ScaffPD", missing, fault, silo, when)
            folder = deployed.write(SLOWLY, PATIENCE + ("\n[secure]\n" if mode == "secure" else ""))
            state = []

            def look(trial=trial, folder=folder, state=state):
                if not state and folder.seen() >= trial.exchange:
                    state.append(time.monotonic())
                    acts[trial.fault](deployed.engine, trial.silo)
                elif len(state) == 1 and time.monotonic() - state[0] > 20:
                    state.append(True)
                    if "stopped" in trial.fault:
                        wake_silo(deployed.engine, trial.silo)
                    elif trial.fault == "site killed" and trial.mode == "secure":
                        deployed.engine.start_silo(trial.silo)

            began = time.monotonic()
            outcome, said = deployed.supervise(folder, look)
            trial.waited = trial.seconds = time.monotonic() - began
            trial.stops = sum("anew" in sentence for sentence in said)
            trial.verdict = judge(trial, deployed.path, deployed.places, outcome)
            trial.why = "; ".join(
                event["sentence"] for event in events(deployed.path)[:1]
            ) or " ".join(said[-1:])
            print(line(trial), flush=True)
            yield trial
            if "stopped" in trial.fault:
                wake_silo(deployed.engine, trial.silo)
            for name in deployed.places:
                if name not in deployed.engine.connected():
                    kill_silo(deployed.engine, name)
                    deployed.engine.start_silo(name)
            wait_for(lambda: deployed.engine.connected() == set(deployed.places), 90)
    finally:
        deployed.engine.stop()
        print(f"processes left behind: {len(deployed.engine.processes.pids())}")
        shutil.rmtree(deployed.folder, ignore_errors=True)


def line(trial):
    """A row of the table."""
    why = PLACE.sub("", " ".join(trial.why.split()).replace("|", "/"))
    cut = why if len(why) <= 110 else why[:107] + "…"
    gap = "" if trial.gap is None else f"{max(trial.gap, 0):.0e} ≤ {trial.certificate:.0e}"
    cells = (
        trial.number,
        trial.engine,
        trial.mode,
        trial.method,
        trial.missing,
        trial.fault,
        trial.silo,
        trial.verdict,
        trial.stops,
        trial.members,
        gap,
        f"{trial.waited:.0f}",
        cut,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| | engine | sums | method | missing | fault | silo | verdict | stops | members | gap ≤ certificate | waited, s "
    "| what was said |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--flare", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this trial alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    global TWIN
    with tempfile.TemporaryDirectory() as twin:
        TWIN = Path(twin)
        path, places = written(TWIN, Trial(0, "", "private", "ScaffPD", "pause", "", "va", 0))
        coordinate(path, InProcess(opened(places)))
        trials = []
        print(HEAD)
        for number in range(given.trials):
            random = np.random.default_rng([given.seed, number])
            trial = drawn(number, random)
            if given.only in (None, number + 1):
                trials.append(in_process(trial, random))
                print(line(trials[-1]), flush=True)
        trials += on_flare(given.flare, np.random.default_rng(given.seed)) if given.flare else []
    if given.only is None:
        write(given.out, trials)


def write(out, trials):
    """Write both files; trials of the engine that was not asked for now stay as they are."""
    table = out / "faults.csv"
    engines = {trial.engine for trial in trials}
    rows = [asdict(trial) for trial in trials]
    for row in rows:
        row["why"] = PLACE.sub("", row["why"])
    if table.exists():
        with table.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["engine"] not in engines]
    rows.sort(key=lambda row: row["engine"], reverse=True)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    read = [
        Trial(
            **{
                **row,
                **{
                    n: float(row[n]) if row[n] not in ("", None) else None
                    for n in ("certificate", "gap", "waited", "seconds")
                },
            }
        )
        for row in rows
    ]
    wrong = sum(trial.verdict.startswith("WRONG") for trial in read)
    counts = {
        engine: sum(trial.engine == engine for trial in read)
        for engine in dict.fromkeys(t.engine for t in read)
    }
    longest = (
        max(trial.waited for trial in read if trial.engine == "in process")
        if "in process" in counts
        else 0
    )
    words = ", ".join(
        f"{count} {'on FLARE' if engine == 'FLARE' else engine}" for engine, count in counts.items()
    )
    modes = ", ".join(
        f"{sum(trial.mode == mode for trial in read)} {mode}"
        for mode in ("clear", "secure", "private")
    )
    text = f"""# Random faults

`python benchmarks/faults.py --trials 40 --seed 1` and `python benchmarks/faults.py --trials 0 --flare 10 --seed 2`:
{words}; {modes}. {wrong} wrong results.

A run waits {TIMEOUT:g} s for an answer and {START:g} s for silos to come back; the longest that one waited in all, by
its own clock, was {longest:.0f} s in process (messages lost to the end of the run). *stopped, resumed, right*: it ended
with the reason under "what was said", whoever is in charge put that right, and the resumed run gave the certified
answer. On FLARE "silo" is the site that was affected, in a round that was drawn, and seconds are those on the wall.

{HEAD}
"""
    text += "\n".join(map(line, read)) + "\n"
    (out / "FAULTS.md").write_text(text)


if __name__ == "__main__":
    main()
