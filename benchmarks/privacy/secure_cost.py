"""What secure sums cost: bytes and CPU seconds of a client in a round of Scaff-PD, against plain
sums.

    python benchmarks/privacy/secure_cost.py
    python benchmarks/privacy/secure_cost.py --quick --no-write
    python benchmarks/privacy/secure_cost.py --losses    # the last table alone

Writes SECURE.md, secure.csv and secure.png beside it. Bytes are those of real messages, encoded as
they travel. Of N clients a few mask vectors of length d and are timed; the server adds N vectors.
Seconds are of this process' CPU, on one thread.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from secure_picture import draw

import scaffpd as sp
from scaffpd.data import digits, heart_disease
from scaffpd.deploy.messages import Message, encode
from scaffpd.deploy.remote import SiloRequest
from scaffpd.deploy.secure import SiloParties
from scaffpd.secure.masking import FixedPoint, Identity, Party, Terms
from scaffpd.secure.parties import (
    DisclosureGuard,
    GuardedParty,
    MaskedReply,
    Sketch,
    SumRequest,
    Weighting,
)

CLIENTS = (4, 10, 32, 100)
LENGTHS = (10**3, 10**5, 10**6, 5 * 10**6)
TIMED = 3  # clients whose masks are timed
ALL = 98  # t of 100 clients for which everybody is everybody's neighbour
SUMS = 2  # in a round of Scaff-PD: Σ λ_i d_i and Σ λ_i c_i
BYTES_GOAL = 2.2
SECONDS_GOAL = 1.0
GOAL_LENGTH = 5 * 10**6
NAMES = {"question": "0" * 16, "setup": "0" * 32}


@dataclass(frozen=True)
class Row:
    """One measurement: bytes of a round, seconds of one sum."""

    clients: int
    length: int
    neighbours: int
    numbers: str
    plain_up: int
    plain_down: int
    secure_up: int
    secure_down: int
    client_seconds: float
    server_seconds: float

    @property
    def ratio(self) -> float:
        """Bytes of a secure round over those of a plain one, both ways."""
        return (self.secure_up + self.secure_down) / (self.plain_up + self.plain_down)


def parties(n: int) -> dict[str, Party]:
    """Clients who know each other."""
    found = {f"silo-{i:03}": Party(Identity(f"silo-{i:03}")) for i in range(n)}
    cards = [party.identity.card for party in found.values()]
    for party in found.values():
        party.meet(cards)
    return found


class Overheard(SiloParties):
    """Silos that answer nothing; the question is remembered."""

    def __init__(self) -> None:
        self.session = self
        self.seen: list[SiloRequest] = []

    def ask(self, question: SiloRequest, names: Any, check: Any) -> dict[str, Message]:
        """Remember the question."""
        self.seen.append(question)
        return {}


def size(question: SiloRequest) -> int:
    """Bytes of a question to one client, without the vectors that plain sums send as well."""
    return len(encode(Message(question.kind, {**question.values, **NAMES}, question.arrays)))


def reply(name: str, values: dict[str, Any], **arrays: Any) -> int:
    """Bytes of an answer."""
    return len(
        encode(Message("answer", {**values, "question": NAMES["question"], "silo": name}, arrays))
    )


def secure_sum(n: int, length: int, colluding: int | None) -> dict[str, Any]:
    """Bytes up and down of a client, and seconds of a client and of the server, for one sum."""
    everyone = parties(n)
    first = [f"silo-{i:03}" for i in range(TIMED)]
    weights = Weighting(Terms.usual(tuple(everyone), colluding), np.full(n, 1 / n))
    numbers = FixedPoint.finest(n, 3)
    vector = np.random.default_rng(0).standard_normal(length)
    about = SiloRequest("gradients", {"batch_size": None, "key": [0, 1, 0], "parts": ["c"]})
    silos = Overheard()
    silos.mask(SumRequest(about, weights, numbers), length)
    question = silos.seen[0]
    up = 0
    seconds = []
    sketch = Sketch()
    sketch(vector)  # its random signs are drawn once a run
    for name in first:
        start = time.process_time()
        found = GuardedParty(everyone[name], DisclosureGuard(sketch=sketch), 0.9).answer(
            weights, numbers, vector, bytes(32)
        )
        seconds.append(time.process_time() - start)
        up += (
            reply(name, {"exponent": found.exponent}, masked=_taken(found).view(np.int64)) // TIMED
        )
    start = time.process_time()
    total = np.zeros(length, dtype=np.uint64)
    for _ in range(n):
        np.add(total, _taken(found), out=total)
    numbers.decode(total)
    server = time.process_time() - start
    return {
        "up": up,
        "down": size(question),
        "client": min(seconds),
        "server": server,
        "neighbours": weights.terms.degree,
    }


def _taken(found: MaskedReply) -> Any:
    assert found.vector is not None
    return found.vector


def plain(length: int, numbers: str) -> tuple[int, int]:
    """Bytes of a client in a plain round: c_i and d_i up, x and the correction down."""
    vector = np.zeros(length, dtype=numbers)
    scalars = np.zeros(3)
    up = reply("silo-000", {}, c=vector, scalars=scalars) + reply("silo-000", {}, d=vector)
    down = 2 * len(
        encode(Message("gradients", {"batch_size": None, "key": [0, 1, 0], **NAMES}, {"x": vector}))
    )
    return up, down


def measure(clients: Sequence[int], lengths: Sequence[int]) -> list[Row]:
    """All of it."""
    rows = []
    cases: list[tuple[int, int | None]] = [(n, None) for n in clients] + [
        (n, ALL) for n in clients if n == 100
    ]
    for n, colluding in cases:
        for length in lengths:
            cost = secure_sum(n, length, colluding)
            for numbers in ("float64", "float32"):
                up, down = plain(length, numbers)
                scalars = reply("silo-000", {}, scalars=np.zeros(3))
                rows.append(
                    Row(
                        n,
                        length,
                        cost["neighbours"],
                        numbers,
                        up,
                        down,
                        SUMS * cost["up"] + scalars,
                        down + SUMS * cost["down"],
                        cost["client"],
                        cost["server"],
                    )
                )
            print(rows[-2], flush=True)
    return rows


def trainings() -> list[tuple[str, str, int, int, float, float, str]]:
    """Whole trainings: rounds, exchanges and megabytes of all clients."""
    found = []
    problems = {
        "heart disease": (heart_disease().train, sp.Linear("logistic", l2=0.03, intercept=True)),
        "digits": (digits().train, sp.Linear("softmax", l2=0.03, intercept=True, classes=10)),
    }
    for name, (data, model) in problems.items():
        for way in ("plain", "secure"):
            cohort = sp.Cohort(data, model)
            federation: Any = cohort if way == "plain" else sp.SecureAggregation(cohort)
            method = sp.ScaffPD(sp.ChiSquare(rho=0.1), local_steps=20)
            result = sp.train(method, federation, rounds=500, tol=1e-6, progress=False)
            sent = federation.traffic
            found.append(
                (
                    f"{name}, N = {len(federation.names)}, d = {cohort.dimension}",
                    way,
                    result.rounds,
                    sent.exchanges,
                    sent.bytes_up / 1e6,
                    sent.bytes_down / 1e6,
                    f"{result.certificate:.1e}",
                )
            )
    return found


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Which goals hold, plainly."""
    usual = [row for row in rows if row.neighbours < 99]
    broken = [row for row in usual if row.ratio > BYTES_GOAL]
    words = ", ".join(
        f"N = {r.clients}, d = {r.length:,}, {r.numbers}: {r.ratio:.1f}" for r in broken
    )
    beyond = f" Beyond it: {words}; there weights and names outweigh the vectors." if broken else ""
    long = [row for row in usual if row.length == GOAL_LENGTH and row.numbers == "float64"]
    slow = ", ".join(f"N = {r.clients}: {r.client_seconds:.2f} s" for r in long)
    fine = [str(r.clients) for r in long if r.client_seconds <= SECONDS_GOAL]
    missed = [str(r.clients) for r in long if r.client_seconds > SECONDS_GOAL]
    held = f"holds for N = {', '.join(fine)}" if fine else "holds nowhere"
    return [
        f"- Bytes, both ways: at most {BYTES_GOAL} times those of plain sums in "
        f"{len(usual) - len(broken)} of "
        f"{len(usual)} cases.{beyond}",
        f"- CPU of a client for one sum of {GOAL_LENGTH:,} numbers ({slow}): the goal of "
        f"{SECONDS_GOAL:g} s {held}"
        + (f", and is missed for N = {', '.join(missed)}." if missed else "."),
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """The measurements."""
    head = "| N | neighbours | d | numbers | plain up, MB | secure up, MB | plain down, MB | secure down, MB | ratio |"
    lines = [f"{head} client, s | server, s |", "|" + "---:|" * 11]
    for r in rows:
        sent = " | ".join(
            f"{b / 1e6:.3g}" for b in (r.plain_up, r.secure_up, r.plain_down, r.secure_down)
        )
        seconds = f"{r.client_seconds:.3g} | {r.server_seconds:.3g}"
        about = f"{r.clients} | {r.neighbours} | {r.length:,} | {r.numbers}"
        lines.append(f"| {about} | {sent} | {r.ratio:.2f} | {seconds} |")
    return lines


def report(rows: Sequence[Row], runs: Sequence[tuple[Any, ...]], command: str) -> str:
    """The Markdown file."""
    versions = f"scaffpd {sp.__version__}, torch {torch.__version__}, NumPy {np.__version__}"
    lines = [
        "# What secure sums cost",
        "",
        f"Written by `{command}` ({versions}, Python {sys.version.split()[0]}); the numbers are "
        "in `secure.csv` too.",
        "",
        "Bytes are of one client in one round of Scaff-PD (two sums), in real messages. Seconds "
        "are CPU "
        f"time of one thread for one sum. Of N clients {TIMED} are timed, and the fastest is "
        "shown: other work on the "
        "machine only adds. t is the usual one, a "
        "third of the clients and 10 at most; with 99 neighbours, t = 98, everybody shares masks "
        "with everybody.",
        "",
        *verdicts(rows),
        "",
        "![Bytes and seconds](secure.png)",
        "",
        *table(rows),
        "",
        "## Whole trainings",
        "",
        "Scaff-PD, χ² with ρ = 0.1, 20 local steps, to a certified gap of 1e-6; all clients "
        "together, as `traffic` "
        "counts. A secure sum is one exchange; the first of its kind is two, and so is one whose "
        "vectors have "
        "outgrown, or shrunk far below, the last one's number format.",
        "",
        "| problem | sums | rounds | exchanges | up, MB | down, MB | certified gap |",
        "|---|---|---:|---:|---:|---:|---:|",
        *(
            "| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in run) + " |"
            for run in runs
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    here = Path(__file__).parent
    rows = measure(
        CLIENTS[:2] if options.quick else CLIENTS, LENGTHS[:2] if options.quick else LENGTHS
    )
    runs = trainings()
    print("\n".join(verdicts(rows)))
    if options.no_write:
        return
    command = shlex.join(["python", "benchmarks/privacy/secure_cost.py", *sys.argv[1:]])
    (here / "SECURE.md").write_text(report(rows, runs, command), encoding="utf-8")
    with (here / "secure.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    draw(rows, here / "secure.png")


if __name__ == "__main__":
    main()
