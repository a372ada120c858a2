"""Carry out a plan: load images, compute features, and compare all methods for every α."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.images.features import Features, features
from experiments.images.loading import LOADERS, Images
from experiments.images.networks import backbone
from experiments.images.plans import TITLES, Cut, Plan, methods
from scaffpd.errors import InputError
from scaffpd.files import make_folder
from scaffpd.models import Linear
from scaffpd.study.comparison import Comparison, Problem, compare

# of `regularisers`
L2S = tuple(10**k for k in np.arange(-6, -1.9, 0.5).tolist())
HELD_OUT = 0.2


@dataclass(frozen=True)
class Place:
    """Where images and weights are (`None` for SCAFFPD_DATA), where features go, and where to
    compute.
    """

    data: Path | None
    cache: Path
    device: str
    progress: bool | None = None


@dataclass(frozen=True)
class Ground:
    """Images whose features are at hand.

    Attributes:
        plan: what for.
        table: the features, training images first.
        train: labels of the training images.
        test: labels of the test images.
        classes: how many.
        source: where the images came from, in a sentence.
        seconds: that it took.
    """

    plan: Plan
    table: Features
    train: Any = field(repr=False)
    test: Any = field(repr=False)
    classes: int
    source: str
    seconds: float

    @property
    def title(self) -> str:
        """The name of the data set."""
        return TITLES[self.plan.dataset]

    def where(self, alpha: float) -> str:
        """The data set, the number of clients and the partition."""
        return f"{self.title}, {self.plan.clients} clients, Dirichlet({alpha:g})"

    def cut(self, alpha: float) -> Cut:
        """The images, ready to be cut into clients."""
        return Cut(self.table, self.train, self.test, self.plan.clients, alpha, self.plan.balanced)

    def problem(self, alpha: float, device: str) -> Problem:
        """What methods are compared on: squared loss on one-hot labels."""
        model = Linear("squared", l2=self.plan.l2, classes=self.classes)
        return Problem(self.cut(alpha), model, self.where(alpha), device, torch.float32)


@dataclass(frozen=True)
class Study:
    """The comparisons of a plan by α, the seconds from images to tables, the hardware in words."""

    plan: Plan
    ground: Ground
    comparisons: dict[float, Comparison]
    seconds: float
    hardware: str


def ground(plan: Plan, place: Place) -> Ground:
    """Load the images and compute their features, or find them in the cache."""
    start = time.perf_counter()
    images = _fewer(LOADERS[plan.dataset](place.data), plan)
    _try_out(plan, np.asarray(images.train.y))
    table = features(
        images,
        backbone(plan.backbone, place.data, size=plan.size),
        plan.kind,
        plan.coordinates,
        device=place.device,
        dtype=plan.stored,
        cache=place.cache,
        progress=place.progress,
    )
    labels = (np.asarray(images.train.y), np.asarray(images.test.y))
    return Ground(
        plan, table, *labels, len(images.classes), images.source, time.perf_counter() - start
    )


def _try_out(plan: Plan, labels: Any) -> None:
    """Cut the labels before features are computed, so that too few images are noticed at once."""
    nothing = Features(*(np.zeros((0, 1), dtype=np.float32) for _ in range(3)))
    try:
        for alpha in plan.alphas:
            for seed in range(plan.seeds):
                Cut(nothing, labels, labels, plan.clients, alpha, plan.balanced).parts(seed)
    except InputError as error:
        raise InputError(
            "too-few-images",
            f"There are too few images for {plan.clients} clients (--train-per-class): {error}",
        ) from None


def _fewer(images: Images, plan: Plan) -> Images:
    """As many images of every class as the plan says; of the part that it leaves open, all that
    every class has.
    """
    wanted = ((images.train, plan.train_per_class), (images.test, plan.test_per_class))
    if all(number is None for _, number in wanted):
        return images
    common = [int(np.bincount(part.y, minlength=len(images.classes)).min()) for part, _ in wanted]
    return images.subset(
        *(k if number is None else number for k, (_, number) in zip(common, wanted, strict=True))
    )


def study(plan: Plan, place: Place, out: Path) -> Study:
    """Compare all methods for every α."""
    start = time.perf_counter()
    here = ground(plan, place)
    found = {alpha: comparison(here, alpha, place, out) for alpha in plan.alphas}
    return Study(plan, here, found, time.perf_counter() - start, hardware(place.device))


def comparison(here: Ground, alpha: float, place: Place, out: Path) -> Comparison:
    """Compare all methods for one α."""
    plan = here.plan
    found = compare(
        methods(plan.local_steps),
        here.problem(alpha, place.device),
        seeds=range(plan.seeds),
        rounds=plan.rounds,
        tune=plan.tune,
        progress=place.progress,
        strengths=True,
        one_choice=True,
    )
    found.to_csv(make_folder(out / f"alpha-{alpha:g}") / "runs.csv")
    return found


def hardware(device: str) -> str:
    """The GPU, or the processor and its threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} processor, {torch.get_num_threads()} threads"


def regularisers(here: Ground, device: str, seed: int = 0) -> dict[float, float]:
    """By l2, the accuracy of ridge regression on a held-out fifth of the training images; no
    client, no test image.
    """
    order = np.random.default_rng([seed, 4]).permutation(len(here.train))
    cut = round(HELD_OUT * len(order))
    place = torch.device(device)
    kind = torch.float32
    A, V = (
        torch.from_numpy(here.table.rows(rows)).to(place) for rows in (order[cut:], order[:cut])
    )
    y, truth = (torch.from_numpy(here.train[rows]).to(place) for rows in (order[cut:], order[:cut]))
    Y = torch.nn.functional.one_hot(y, here.classes).to(kind)
    return {l2: float(((V @ ridge(A, Y, l2)).argmax(1) == truth).float().mean()) for l2 in L2S}


def ridge(A: Tensor, Y: Tensor, l2: float, steps: int = 100) -> Tensor:
    r"""Minimise (1/m)‖A X − Y‖² + (l2/2)‖X‖² over X.

    By conjugate gradients from zero on (2/m) AᵀA X + l2 X = (2/m) AᵀY, all columns at once.
    """
    r = (A.T @ Y) * (2 / len(A))
    X = torch.zeros_like(r)
    p = r.clone()
    size = r.square().sum(0)
    start = size.clone()
    for _ in range(steps):
        if bool((size <= 1e-12 * start).all()):
            break
        q = (A.T @ (A @ p)) * (2 / len(A)) + l2 * p
        rate = size / (p * q).sum(0).clamp_min(torch.finfo(q.dtype).tiny)
        X += rate * p
        r -= rate * q
        last = size
        size = r.square().sum(0)
        p = r + size / last.clamp_min(torch.finfo(q.dtype).tiny) * p
    return X
