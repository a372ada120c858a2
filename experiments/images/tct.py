r"""Train, convexify, train, end to end: a ResNet by FedAvg, its eNTK where it stands, and fair
training of that.

    python -m experiments.images tct cifar10 --alpha 0.1 [--device cuda] [--seconds 500] [--small]

1. FedAvg trains a ResNet-8 with group norm, from random weights, for `rounds` rounds. Its rate is
that of `RATES` with
   which half as many rounds on three quarters of every client's training images name most of the
   others right.
2. Every image becomes the gradient of the network at `coordinates` random parameters.
3. Scaff-PD trains a linear model on them for `final` rounds: average, χ², and personal models under
χ². l2, ρ and κ are
   chosen by the worst fifth of the clients on that quarter of the training images, which stage 1
   has seen by then.

Beside it: FedAvg that goes on for `final` rounds more, one network trained on everybody's images,
and naming every client's commonest class, which with small α is right for most of its images.
Classes are divided by Dirichlet(α) and 30 % of the clients lose 70 % of their images, as in the
other tables on images. The folder `--out` has a file per stage: a call that is stopped, by
`--seconds` or otherwise, is continued by the same command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.images.convexify import gradients, representation
from experiments.images.divisions import Division, OutOfTimeError, Piece, halves, shown, worst
from experiments.images.features import Features, place
from experiments.images.loading import LOADERS
from experiments.images.partition import like_training
from experiments.images.pieces import commit
from experiments.images.plans import TITLES, Plan
from experiments.images.small_networks import ResNet8
from experiments.images.spectral import Quadratics, federation, own_models
from experiments.images.study import Ground, hardware
from experiments.tables import append_csv, check_small, markdown_table, read_csv
from scaffpd.algorithms import FedAvg, ScaffPD
from scaffpd.models import Module
from scaffpd.objectives import Average, ChiSquare
from scaffpd.training.cohort import Cohort
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import RoundInfo, Status, train

STAGE_1 = "FedAvg, stage 1"
LONGER = "FedAvg, all rounds"
CENTRAL = "centralised"
COMMON = "every client's commonest class"
MEAN = "TCT + average"
FAIR = "TCT + fair"
OWN = "TCT + personal fair"
ROWS = (STAGE_1, LONGER, MEAN, FAIR, OWN, CENTRAL, COMMON)
RATES = (0.03, 0.1, 0.3, 1.0)
L2S = (1e-5, 1e-4, 1e-3)
RHOS = (0.1, 0.5)
KAPPAS = (1.0, 10.0, 100.0, 1000.0)
COLUMNS = (
    "dataset",
    "alpha",
    "seed",
    "row",
    "average",
    "worst_20",
    "rounds",
    "chosen",
    "seconds",
    "accuracies",
)


@dataclass(frozen=True)
class Setting:
    """One division of one data set, and how much of everything.

    Attributes:
        dataset: "cifar10" or "cifar100".
        alpha: of Dirichlet(α).
        seed: of the division and of the first weights.
        clients: N.
        width: channels of the first layers.
        rounds: of stage 1.
        final: of stage 3.
        local_steps: J of stage 1, and of stage 3.
        batch: images of a local step in stage 1.
        rate: η of the centralised network, with momentum 0.9.
        epochs: of the centralised network.
        coordinates: of the gradient.
        per_class: training and test images of a class; `None` for all.
    """

    dataset: str
    alpha: float
    seed: int = 0
    clients: int = 10
    width: int = 16
    rounds: int = 40
    final: int = 30
    local_steps: int = 50
    batch: int = 64
    rate: float = 0.3
    epochs: int = 30
    coordinates: int = 2000
    per_class: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The folder."""
        return f"{self.dataset}-alpha-{self.alpha:g}-seed-{self.seed}"


def setting(dataset: str, alpha: float, seed: int, small: bool) -> Setting:
    """The full size, or one for two processor cores."""
    clients, rate = (10, 0.3) if dataset == "cifar10" else (20, 0.1)
    full = Setting(dataset, alpha, seed, clients, rate=rate)
    if not small:
        return full
    few = (120, 60) if dataset == "cifar10" else (16, 10)
    return replace(
        full,
        clients=5,
        width=8,
        rounds=6,
        final=10,
        local_steps=12,
        batch=32,
        epochs=4,
        coordinates=400,
        per_class=few,
    )


@dataclass
class Study:
    """One setting under way.

    Attributes:
        setting: what.
        folder: its files.
        device: where to compute.
        data: where images are; `None` for SCAFFPD_DATA.
        deadline: when to stop.
        images: the data set, where it has been loaded.
    """

    setting: Setting
    folder: Path
    device: str
    data: Path | None = None
    deadline: float = float("inf")
    images: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.images is None:
            self.images = LOADERS[self.setting.dataset](self.data)
        if self.setting.per_class is not None:
            self.images = self.images.subset(*self.setting.per_class)
        self.plan = Plan(
            "tct", self.setting.dataset, self.setting.clients, balanced=True, kind="entk"
        )
        empty = Features(*(np.zeros((0, 1), dtype=np.float32) for _ in range(3)))
        labels = (self.images.train.y, self.images.test.y)
        self.ground = Ground(
            self.plan, empty, *map(np.asarray, labels), len(self.images.classes), "", 0.0
        )

    # ------------------------------------------------------------------ stage 1

    @cached_property
    def parts(self) -> tuple[list[Any], list[Any]]:
        """The numbers of every client's training and test images."""
        train = self.ground.cut(self.setting.alpha).parts(self.setting.seed)
        return train, like_training(train, self.ground.train, self.ground.test, self.setting.seed)

    @cached_property
    def pixels(self) -> tuple[Any, Any]:
        """All training and test images, (n, 3, h, w)."""
        train, test = (
            np.ascontiguousarray(part.x.transpose(0, 3, 1, 2))
            for part in (self.images.train, self.images.test)
        )
        return train, test

    def cohort(self, together: bool = False) -> Cohort:
        """The clients with their images, or all images as one client's; test images always by
        client.
        """
        (rows, held), (_, V), here = self.parts, self.pixels, self.ground
        if together:
            return self._cohort([np.sort(np.concatenate(rows))], None)
        return self._cohort(rows, [(V[p], here.test[p]) for p in held])

    def _cohort(self, rows: Sequence[Any], test: Any) -> Cohort:
        X = self.pixels[0]
        y = self.ground.train
        return Cohort(
            [(X[p], y[p]) for p in rows],
            self.model,
            test=test,
            device=self.device,
            dtype=torch.float32,
        )

    @cached_property
    def model(self) -> Module:
        """The network before any training."""
        x = self.images.train.x[::7]
        torch.manual_seed(self.setting.seed)
        net = ResNet8(
            self.ground.classes,
            self.setting.width,
            x.mean((0, 1, 2)).tolist(),
            x.std((0, 1, 2)).tolist(),
        )
        return Module(
            net,
            momentum=0.9,
            precision="bf16" if self.device.startswith("cuda") else None,
        )

    def fed_avg(self, rounds: int) -> Any:
        """Train up to this many rounds in all, from the last checkpoint; Σ n_i u_i/n, every client
        in every round.
        """
        return self._trained(self._method(self.rate), self._clients, rounds, "fed_avg.npz")

    def _method(self, rate: float) -> FedAvg:
        return FedAvg(
            local_steps=self.setting.local_steps, batch_size=self.setting.batch, local_rate=rate
        )

    @cached_property
    def rate(self) -> float:
        """η of stage 1, chosen once: the best mean accuracy over clients on images that were held
        out.
        """
        path = self.folder / "rates.json"
        s = self.setting
        scores = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if missing := [rate for rate in RATES if f"{rate:g}" not in scores]:
            X = self.pixels[0]
            y = self.ground.train
            fit, held = zip(
                *(halves(p, [s.seed, i, 8]) for i, p in enumerate(self.parts[0])), strict=True
            )
            trial = self._cohort(fit, [(X[p], y[p]) for p in held])
            for rate in missing:
                x = self._trained(
                    self._method(rate), trial, max(1, s.rounds // 2), f"rate-{rate:g}.npz"
                )
                scores[f"{rate:g}"] = float(trial.evaluate(x, "test").score.mean())
                path.write_text(json.dumps(scores) + "\n", encoding="utf-8")
        return max(RATES, key=lambda rate: scores[f"{rate:g}"])

    @cached_property
    def _clients(self) -> Cohort:
        return self.cohort()

    def _trained(self, method: Any, cohort: Cohort, rounds: int, file: str) -> Any:
        keeper = Checkpoint(self.folder / file, every=10)
        result = train(
            method,
            cohort,
            rounds,
            seed=self.setting.seed,
            progress=False,
            checkpoint=keeper,
            callbacks=[self._late],
            every_client=False,
        )
        if result.status is Status.STOPPED and result.rounds < rounds:
            raise OutOfTimeError
        return result.uninterrupted().x

    def _late(self, _: RoundInfo) -> bool:
        return time.time() > self.deadline

    def stage_1(self) -> Any:
        """Return x of the network whose gradients are taken."""
        path = self.folder / "stage_1.npy"
        if not path.exists():
            np.save(path, self.fed_avg(self.setting.rounds))
        return np.load(path)

    def central(self) -> Any:
        """One network on all clients' images, `epochs` passes over them, batches of 256."""
        s = self.setting
        batch = 256
        cohort = self.cohort(together=True)
        n = sum(map(len, self.parts[0]))
        method = FedAvg(local_steps=max(1, n // batch // 2), batch_size=batch, local_rate=s.rate)
        return self._trained(method, cohort, 2 * s.epochs, "central.npz")

    # ------------------------------------------------------------------ stages 2 and 3

    @cached_property
    def division(self) -> Division:
        """The same clients with rows of gradients, standardised by sums over all clients' training
        images.
        """
        s = self.setting
        device = torch.device(self.device)
        network, (rows, _), (X, V) = self.model.network(self.stage_1()), self.parts, self.pixels
        found = representation(
            network, [X[p] for p in rows], "fc", s.coordinates, self.device, None, s.seed
        )
        F = torch.empty(len(X) + len(V), found.entk.coordinates, dtype=torch.float64, device=device)
        first = 0
        for part in (X, V):
            for g in gradients(found.entk, part, found.chunk):
                F[first : first + len(g)] = (g - found.mean) / found.deviation
                first += len(g)
        labels = torch.from_numpy(
            np.concatenate([self.ground.train, self.ground.test]).astype(np.int64)
        ).to(device)
        return Division(
            self.ground, F * F.shape[1] ** -0.5, labels, Piece(self.plan, s.alpha), s.seed
        )

    def linear(self, part: str, values: dict[str, float]) -> tuple[Any, bool]:
        """Stage 3: one model, or every client's own, (N, d, C), where there is a κ; and whether it
        is their own.
        """
        if time.time() > self.deadline:
            raise OutOfTimeError
        s = self.setting
        division = self.division
        spectra = division.spectra(part)
        method = ScaffPD(
            ChiSquare(values["rho"]) if "rho" in values else Average(), local_steps=s.local_steps
        )
        own = "kappa" in values
        pull = division.pull(values["kappa"], part) if own else None
        losses = (
            Quadratics.shared(spectra, values["l2"])
            if pull is None
            else Quadratics.personal(spectra, values["l2"], pull)
        )
        found = train(method, federation(losses), s.final, seed=s.seed, progress=False)
        X = torch.as_tensor(found.x).to(division.F).view(division.F.shape[1], -1)
        return (X, False) if pull is None else (own_models(spectra, values["l2"], pull, X), True)

    def accuracy(self, model: Any, own: bool, part: str) -> Any:
        """By client."""
        return (
            self.division.own_accuracy(model, part)
            if own
            else self.division.accuracy(model, part)[0]
        )

    def chosen(self, **grid: Sequence[float]) -> dict[str, float]:
        """The values of which the worst fifth does best on held-out training images.

        `compare` has no part in it: it tunes rates, and l2, ρ and κ are tried here on losses
        decomposed once for all.
        """
        points = (
            dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
        )
        return max(
            points, key=lambda point: worst(self.accuracy(*self.linear("fit", point), "held"))
        )

    # ------------------------------------------------------------------ rows

    def steps(self) -> Iterator[tuple[str, Callable[[], tuple[Any, int, str]]]]:
        """Every row: its accuracies by client, its rounds and what was chosen."""
        s = self.setting
        whole = s.rounds + s.final
        fair = dict[str, float]()

        def network(x: Any, rounds: int, rate: float) -> tuple[Any, int, str]:
            return self._clients.evaluate(x, "test").score, rounds, f"rate={rate:g}"

        def linear(**grid: Sequence[float]) -> tuple[Any, int, str]:
            values = self.chosen(**grid)
            fair.update({k: v for k, v in values.items() if k == "rho"})
            return self.accuracy(*self.linear("all", values), "test"), whole, shown(values)

        def rho() -> Sequence[float]:
            if not fair:
                words = {row["row"]: row["chosen"] for row in self.done()}[FAIR]
                fair["rho"] = float(dict(word.split("=") for word in words.split())["rho"])
            return [fair["rho"]]

        yield STAGE_1, lambda: network(self.stage_1(), s.rounds, self.rate)
        yield MEAN, lambda: linear(l2=L2S)
        yield FAIR, lambda: linear(l2=L2S, rho=RHOS)
        yield OWN, lambda: linear(l2=L2S, rho=rho(), kappa=KAPPAS)
        yield LONGER, lambda: network(self.fed_avg(whole), whole, self.rate)
        yield CENTRAL, lambda: network(self.central(), 0, s.rate)
        yield COMMON, lambda: (self.commonest(), 0, "")

    def commonest(self) -> Any:
        """By client, the accuracy of always naming its commonest class."""
        pairs = zip(*self.parts, strict=True)
        named = [
            (np.bincount(self.ground.train[rows]).argmax(), self.ground.test[held])
            for rows, held in pairs
        ]
        return np.array([float((y == label).mean()) for label, y in named])

    def done(self) -> list[dict[str, str]]:
        """The rows that are written."""
        return read_csv(self.folder / "runs.csv")

    def carry_out(self) -> bool:
        """Make the rows that are missing; return whether all are there."""
        path = self.folder / "runs.csv"
        try:
            for name, make in self.steps():
                if name in {row["row"] for row in self.done()}:
                    continue
                begin = time.perf_counter()
                accuracy, rounds, chosen = make()
                s = self.setting
                seconds = f"{time.perf_counter() - begin:.1f}"
                numbers = [f"{100 * v:.3f}" for v in (accuracy.mean(), worst(accuracy))]
                line = [s.dataset, s.alpha, s.seed, name, *numbers, rounds, chosen, seconds]
                append_csv(path, COLUMNS, [[*line, " ".join(f"{100 * a:.2f}" for a in accuracy)]])
                print(*line, flush=True)
        except OutOfTimeError:
            return False
        about = self.folder / "about.json"
        if not about.exists():
            facts = {
                "setting": asdict(self.setting),
                "hardware": hardware(self.device),
                "commit": commit(),
            }
            facts |= {
                "sizes": [len(p) for p in self.parts[0]],
                "parameters": self._clients.dimension,
            }
            about.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return True


def page(out: Path) -> str:
    """Make one table of all settings: average and worst fifth of the clients' test accuracies, in
    per cent.
    """
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for path in sorted(out.glob("*/runs.csv")):
        for row in read_csv(path):
            here = found.setdefault((row["dataset"], row["alpha"]), {}).setdefault(row["row"], [])
            here.append((float(row["average"]), float(row["worst_20"])))
    header = ["average / worst 20 %", *(f"{TITLES[name]}, α = {alpha}" for name, alpha in found)]
    lines = []
    for name in ROWS:
        cells = [
            " / ".join(f"{np.mean(each):.1f}" for each in zip(*rows[name], strict=True))
            if name in rows
            else "not run"
            for rows in found.values()
        ]
        lines.append([name, *cells])
    return "\n".join(markdown_table(header, lines, words=len(header)))


def write(out: Path, command: str) -> str:
    """Write README.md beside the folders, and return the table."""
    table = page(out)
    facts = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(out.glob("*/about.json"))]
    said = [
        "; ".join(sorted({f["hardware"] for f in facts})),
        "commits " + ", ".join(sorted({f["commit"] for f in facts})),
    ]
    known = [(f["setting"], f["sizes"]) for f in facts]
    sizes = [f"{s['dataset']}, α = {s['alpha']:g}, seed {s['seed']}: {n}" for s, n in known]
    text = [
        "# Train, convexify, train, end to end\n",
        f"`{command}`; {', '.join(said) if facts else 'not complete'}.\n",
        "Per cent of test images in every client's own mixture of classes: the mean over clients, "
        "and over the worst "
        "fifth of them; means over seeds. `runs.csv` in each folder has every client, "
        "`rates.json` what FedAvg's rates "
        "gave, `about.json` the setting.\n",
        table,
        "",
        "Training images by client:\n",
        *(f"- {line}" for line in sizes),
    ]
    (out / "README.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    return table


def main(words: Sequence[str] | None = None) -> int:
    """Carry out what is left of what a command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", choices=("cifar10", "cifar100"))
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.1, 0.01])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder of images; else SCAFFPD_DATA")
    parser.add_argument("--out", type=Path, default=Path("runs") / "images" / "tct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--small", action="store_true", help="few images: minutes on two cores")
    given = parser.parse_args(words)
    if given.small:
        check_small(given.out)
    device = str(place(given.device))
    end = time.time() + given.seconds
    if device == "cpu":
        torch.set_num_threads(
            max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        )
    images = LOADERS[given.dataset](given.data)
    complete = True
    for seed in range(given.seeds):
        for alpha in given.alpha:
            what = setting(given.dataset, alpha, seed, given.small)
            complete &= Study(
                what, given.out / what.name, device, given.data, end, images
            ).carry_out()
    told = f" --seeds {given.seeds}" * (given.seeds > 1) + " --small" * given.small
    print(write(given.out, "python -m experiments.images tct cifar10|cifar100" + told))
    print("" if complete else "Time was up: the same command goes on.", end="\n" * (not complete))
    return 0


if __name__ == "__main__":
    sys.exit(main())
