"""Seconds of a round of FedAvg on networks: scaffpd, a plain PyTorch loop, FedJAX, Flower's
simulation and pfl.

CIFAR-10 (SCAFFPD_DATA names its folder), 100 clients with 100 images each, ten a round, 20 steps of
32 images at rate 0.05, float32: two convolutions, and a ResNet-8 with group norm. All start from
the same parameters and use the same clients and minibatches (`peers/images.py`), so that all have
to reach the plain loop's test accuracy, and its model up to rounding. Each is a process of its own,
in the environment that `simulators.py --prepare` has made; nobody's number of threads is set from
outside. The first round compiles and warms up: it is told beside the median of the others.

    python benchmarks/speed/network_simulators.py [--only cnn] [--rounds 3] [--quick]
    # the same, into RESULTS.md and docs/networks.md
    python benchmarks/speed/run.py --only network_simulators
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Row, table
from simulators import CANDIDATES, PEERS, Answer, interpreter, said

from networks import BATCH, RATE, STEPS, Rounds

sys.path.append(str(PEERS))
from images import Images

from experiments.images.small_networks import NETWORKS, TITLES

TITLE = f"Networks: seconds of a round of FedAvg on CIFAR-10 (10 of 100 clients, J = {STEPS}, minibatches of {BATCH})"
NAMES = ("scaffpd", "loop", "fedjax", "flower", "pfl")
ROUNDS = {"cnn": 3, "resnet": 2}  # that count; one more goes before
TOLERANCE = 0.01  # by how much an accuracy may differ from the plain loop's
TIMES = "time ÷ scaffpd's"

Models = dict[str, dict[str, Any]]  # the parameters that every candidate has ended with


def measure(
    quick: bool, only: Sequence[str] = tuple(NETWORKS), rounds: int | None = None
) -> list[Row]:
    """A row per network and candidate."""
    rows = []
    for network in only:
        torch.manual_seed(0)
        contest = Rounds(NETWORKS[network](), "cpu", *((20, None, 3) if quick else ()))
        rows += judged(
            network,
            contest,
            *answers(network, contest, 1 + (rounds or (1 if quick else ROUNDS[network]))),
        )
    return rows


def problem(network: str, contest: Rounds, rounds: int) -> Images:
    """What every candidate is given."""
    clients = np.stack([contest.chosen(r) for r in range(1, rounds + 1)])
    rows = [
        [contest.minibatches(r, i).numpy() for i in chosen]
        for r, chosen in enumerate(clients, start=1)
    ]
    start = {name: value.detach().numpy() for name, value in contest.network.named_parameters()}
    return Images(
        network, contest.X.numpy(), contest.y.numpy(), clients, np.array(rows), start, RATE
    )


def answers(network: str, contest: Rounds, rounds: int) -> tuple[dict[str, Answer], Models]:
    """Let one candidate after the other train; what each says, and its model."""
    found: dict[str, Answer] = {}
    models: Models = {}
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "problem.npz")
        problem(network, contest, rounds).save(given)
        for name in NAMES:
            into = Path(folder, f"{name}.npz")
            for _ in range(
                2
            ):  # Ray gives up starting after half a minute, which a busy machine may need
                found[name] = said(
                    name, interpreter(name, {}), "--images", str(given), "--into", str(into)
                )
                if "timed out during startup" not in str(found[name]):
                    break
            if not isinstance(found[name], str):
                with np.load(into) as stored:
                    models[name] = {key: stored[key] for key in stored.files}
            print(f"{network}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found, models


def judged(network: str, contest: Rounds, found: Mapping[str, Answer], models: Models) -> list[Row]:
    """Answers as rows, with speeds where the model is as good as the plain loop's."""
    vectors = {name: vector(contest, model) for name, model in models.items()}
    scores = {name: contest.accuracy(x) for name, x in vectors.items()}
    start = torch.cat([p.detach().flatten() for p in contest.network.parameters()])
    for name in ("scaffpd", "loop"):
        if reason := problem_of(found[name], scores.get(name), scores.get("loop")):
            raise RuntimeError(f"{CANDIDATES[name]}: {reason}")
    rows = []
    for name, answer in found.items():
        reason = problem_of(answer, scores.get(name), scores["loop"])
        timings: Row = {} if reason else speeds(answer, found["scaffpd"])
        off = (
            (vectors[name] - vectors["loop"]).norm() / (vectors["loop"] - start).norm()
            if name in vectors
            else None
        )
        rows.append(
            {
                "network": TITLES[network],
                "candidate": CANDIDATES[name],
                "version": None if isinstance(answer, str) else answer["version"],
                **{
                    key: timings.get(key)
                    for key in ("s a round", TIMES, "from", "to", "first round, s", "start-up, s")
                },
                "accuracy": scores.get(name),
                "model off the loop's": None if off is None else float(off),
                "note": reason or answer["setting"],
            }
        )
    return rows


def vector(contest: Rounds, model: Mapping[str, Any]) -> torch.Tensor:
    """Parameters as the package orders them."""
    return torch.cat(
        [torch.from_numpy(model[name]).flatten() for name, _ in contest.network.named_parameters()]
    )


def problem_of(answer: Answer, accuracy: float | None, loop: float | None) -> str:
    """Why an answer does not count; empty if it does."""
    if isinstance(answer, str):
        return answer
    if loop is not None and not abs((accuracy or 0.0) - loop) <= TOLERANCE:
        return f"failed: accuracy {accuracy:.3f}, the plain loop's is {loop:.3f}"
    return ""


def speeds(answer: Any, ours: Any) -> Row:
    """Medians over rounds but the first; the range of a ratio is that of any two rounds."""
    theirs = answer["seconds"][1:]
    own = ours["seconds"][1:]
    return {
        "s a round": statistics.median(theirs),
        TIMES: statistics.median(theirs) / statistics.median(own),
        "from": min(theirs) / max(own),
        "to": max(theirs) / min(own),
        "first round, s": answer["seconds"][0],
        "start-up, s": answer["startup_seconds"],
    }


def sentences(rows: list[Row]) -> list[str]:
    """Who is how much faster than whom, by network."""
    told = []
    for title in dict.fromkeys(row["network"] for row in rows):
        here = [row for row in rows if row["network"] == title]
        parts = [
            f"{row['candidate']} takes {row[TIMES]:.2f} times as long"
            for row in here[1:]
            if row[TIMES]
        ]
        parts += [
            f"{row['candidate']} has no speed ({row['note']})" for row in here[1:] if not row[TIMES]
        ]
        told.append(
            f"{title}, {here[0]['s a round']:.3g} s a round by scaffpd: {'; '.join(parts)}."
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--only", choices=list(NETWORKS), help="one network")
    parser.add_argument("--rounds", type=int, help=f"how many count; by default {ROUNDS}")
    parser.add_argument(
        "--quick", action="store_true", help="a rehearsal: two of 20 clients, three steps"
    )
    given = parser.parse_args()
    rows = measure(given.quick, [given.only] if given.only else tuple(NETWORKS), given.rounds)
    print(table(rows), "", *sentences(rows), sep="\n")


if __name__ == "__main__":
    main()
