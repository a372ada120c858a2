"""Fair methods on a small network, with nothing tuned: who is served, and after how many rounds.

5,000 images of CIFAR-10, ten label-skewed clients (Dirichlet(0.3), some 500 images each), two
convolutions, batches of 32, 62 local steps a round. FedAvg makes 8 rounds with its automatic rate;
the others make 12 with theirs, and the table says after how many rounds each has had FedAvg's last
mean loss. Losses are over all training images of a client, accuracies over test images with its
mixture of labels; mean and worst are over clients, then averaged over seeds.

`--full` takes all 50,000 images, Dirichlet(0.1) and as many rounds for everyone, and compares the
worst fifth of the clients on test images, method by method in pairs over seeds; a network that has
just visited other clients swings from round to round, so the mean over the last five rounds stands
beside the last one. Every run is a file in the folder `--out`: what is there is not run again, so
that a call that was stopped goes on, and two calls may split the seeds.

    python benchmarks/networks.py [--device cuda] [--seeds 0 1 2 3 4] [--images 5000] [--full --out results/networks]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import scaffpd as sp
from scaffpd.training.metrics import half_interval, worst_fifth

sys.path.append(str(Path(__file__).resolve().parents[1]))
CLIENTS = 10
STEPS = 62
BATCH = 32
ROUNDS = 8
LONGER = 1.5
LAST = 5
METHODS: dict[str, Callable[[], Any]] = {
    "FedAvg": lambda: sp.FedAvg(local_steps=STEPS, batch_size=BATCH),
    "SCAFFOLD": lambda: sp.Scaffold(local_steps=STEPS, batch_size=BATCH),
    "DRFA": lambda: sp.DRFA(sp.ChiSquare(rho=0.1), local_steps=STEPS, batch_size=BATCH),
    "Scaff-PD, χ² 0.1": lambda: sp.ScaffPD(
        sp.ChiSquare(rho=0.1), local_steps=STEPS, batch_size=BATCH
    ),
    "Scaff-PD, worst client": lambda: sp.ScaffPD(
        sp.Agnostic(), local_steps=STEPS, batch_size=BATCH
    ),
}


@functools.cache
def everything() -> Any:
    """All images, decoded once."""
    from experiments.images.loading import cifar10

    return cifar10()


def images(number: int, seed: int, alpha: float = 0.3) -> tuple[list[Any], list[Any]]:
    """The clients' training and test images."""
    random = np.random.default_rng(seed)
    from experiments.images.partition import divided, like_training

    loaded = everything()
    X = loaded.train.x
    y = loaded.train.y
    some = np.sort(random.choice(len(y), number, replace=False))
    parts = divided(y[some], CLIENTS, alpha, seed, 2, balanced=True)
    mean = X[some].mean((0, 1, 2)) / 255
    deviation = X[some].std((0, 1, 2)) / 255

    def scaled(pictures: Any) -> Any:
        return np.ascontiguousarray(
            ((pictures / 255 - mean) / deviation).transpose(0, 3, 1, 2), dtype=np.float32
        )

    held = like_training(parts, y[some], loaded.test.y, seed=seed, limit=500)
    train = [(scaled(X[some][rows]), y[some][rows]) for rows in parts]
    return train, [(scaled(loaded.test.x[rows]), loaded.test.y[rows]) for rows in held]


def network(seed: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


def _keep(points: list[Any], info: Any) -> None:
    points.append(info.state.x)


def one_seed(seed: int, number: int, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Every method on the same clients from the same start."""
    train, test = images(number, seed)
    cohort = sp.Cohort(train, sp.Module(network(seed)), test=test, device=device)
    goal = np.inf
    rows = {}
    for name, method in METHODS.items():
        began = time.perf_counter()
        most = rounds if name == "FedAvg" else int(LONGER * rounds)
        points: list[Any] = []
        keep = functools.partial(_keep, points)
        result = sp.train(method(), cohort, rounds=most, seed=seed, callbacks=[keep])
        losses = result.history.losses
        goal = float(losses[-1].mean()) if name == "FedAvg" else goal
        reached = np.flatnonzero(losses.mean(1) <= goal)
        at = int(reached[0]) if len(reached) else most
        equal = losses[rounds]
        scores = cohort.evaluate(points[rounds - 1], "test").score
        rows[name] = {
            "mean": float(equal.mean()),
            "worst": float(equal.max()),
            "reached": at if len(reached) else np.inf,
            "mean then": float(losses[at].mean()),
            "worst then": float(losses[at].max()),
            "accuracy": float(scores.mean()),
            "worst accuracy": float(scores.min()),
            "seconds": (time.perf_counter() - began) / most,
        }
        print(
            f"seed {seed}  {name:24s}",
            "  ".join(f"{k} {v:.3f}" for k, v in rows[name].items()),
            flush=True,
        )
    return rows


def in_full(seeds: list[int], device: str, rounds: int, number: int, out: Path) -> str:
    """Run FedAvg, DRFA and Scaff-PD on all images, and compare what is in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in METHODS if name != "SCAFFOLD"]
    for seed in seeds:
        missing = {
            name: path
            for i, name in enumerate(names)
            if not (path := out / f"{seed}-{i}.json").exists()
        }
        if not missing:
            continue
        train, test = images(number, seed, alpha=0.1)
        cohort = sp.Cohort(train, sp.Module(network(seed)), test=test, device=device)
        for name, path in missing.items():
            points: list[Any] = []
            callbacks = [functools.partial(_keep, points)]
            sp.train(
                METHODS[name](),
                cohort,
                rounds,
                seed=seed,
                progress=False,
                every_client=False,
                callbacks=callbacks,
            )
            scores = [
                (100 * cohort.evaluate(x, "test").score).round(3).tolist() for x in points[-LAST:]
            ]
            run = {
                "seed": seed,
                "method": name,
                "rounds": rounds,
                "images": number,
                "accuracies": scores,
            }
            path.write_text(json.dumps(run) + "\n", encoding="utf-8")
            print(f"seed {seed}  {name:24s}", *scores[-1], flush=True)
    return in_pairs(
        [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))], names
    )


def in_pairs(runs: list[dict[str, Any]], names: list[str]) -> str:
    """Make the table: seed by seed, means, and differences of the worst fifth over the seeds that
    all methods have.
    """
    if len({(run["rounds"], run["images"]) for run in runs}) != 1:
        raise SystemExit(
            "The folder has runs of different lengths or numbers of images; take another --out."
        )
    found = {(run["seed"], run["method"]): np.array(run["accuracies"]) for run in runs}
    seeds = sorted({seed for seed, _ in found if all((seed, name) in found for name in names)})

    def fifth(each: Any) -> list[float]:
        return [float(worst_fifth(-a) @ a) for a in each]

    mean = {name: np.array([found[s, name][-1].mean() for s in seeds]) for name in names}
    worst = {
        "the last round": {
            name: np.array([fifth(found[s, name])[-1] for s in seeds]) for name in names
        },
        f"the last {LAST} rounds": {
            name: np.array([np.mean(fifth(found[s, name])) for s in seeds]) for name in names
        },
    }
    columns = {name: np.stack([mean[name], *(w[name] for w in worst.values())]) for name in names}
    lines = [
        f"| {runs[0]['rounds']} rounds | {' | '.join(names)} |",
        "|---" * (1 + len(names)) + "|",
    ]
    for title, which in [
        *((f"seed {s}", [i]) for i, s in enumerate(seeds)),
        ("mean", range(len(seeds))),
    ]:
        cells = [" / ".join(f"{v:.1f}" for v in columns[name][:, which].mean(1)) for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for (when, of), other in itertools.product(worst.items(), ("FedAvg", "DRFA")):
        apart = {name: of[name] - of[other] for name in names}
        cells = [
            f"{d.mean():+.1f} ± {half_interval(d):.1f}" if n != other else ""
            for n, d in apart.items()
        ]
        lines.append(f"| worst 20 % in {when}, less {other}'s | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(found: list[dict[str, dict[str, float]]], rounds: int) -> str:
    """The table over seeds, and whether what must hold does."""
    lines = [
        f"| method | mean loss after {rounds} rounds | worst | rounds to FedAvg's mean | worst "
        "then "
        "| test accuracy, mean | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in METHODS:
        mean = {k: float(np.mean([seed[name][k] for seed in found])) for k in found[0][name]}
        lines.append(
            f"| {name} | {mean['mean']:.2f} | {mean['worst']:.2f} | {mean['reached']:.1f} | "
            f"{mean['worst then']:.2f} | "
            f"{mean['accuracy']:.1%} | {mean['worst accuracy']:.1%} |"
        )
    for name in list(METHODS)[3:]:
        quick = [seed[name]["reached"] <= LONGER * rounds for seed in found]
        fairer = [seed[name]["worst then"] < seed["FedAvg"]["worst"] for seed in found]
        verdict = "HOLDS" if all(quick) and all(fairer) else "DOES NOT HOLD"
        lines.append(
            f"\n{name}: FedAvg's mean loss within {LONGER:g} × its rounds in {sum(quick)} of "
            f"{len(found)} seeds, "
            f"a better worst client by then in {sum(fairer)}: {verdict}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--out", type=Path, help="folder of runs with --full, else a file for the table"
    )
    parser.add_argument("--full", action="store_true", help="all images, Dirichlet(0.1)")
    given = parser.parse_args()
    if given.full:
        number = 50_000 if given.images == 5000 else given.images
        rounds = 30 if given.rounds == ROUNDS else given.rounds
        print(
            in_full(
                given.seeds, given.device, rounds, number, given.out or Path("results") / "networks"
            )
        )
        return
    text = report(
        [one_seed(s, given.images, given.device, given.rounds) for s in given.seeds], given.rounds
    )
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
