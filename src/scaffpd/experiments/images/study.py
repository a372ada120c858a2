"""Carry out a plan: images, features, and a comparison of all methods for every α."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaffpd import data
from scaffpd.comparison import Comparison, compare
from scaffpd.errors import InputError
from scaffpd.experiments.images.problem import Cut, problem
from scaffpd.experiments.images.settings import Plan, methods
from scaffpd.features import backbone, features

LOADERS = {"cifar10": data.cifar10, "cifar100": data.cifar100, "tinyimagenet": data.tiny_imagenet}
BACKBONE = "efficientnet-lite0"
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tinyimagenet": "Tiny-ImageNet"}


@dataclass(frozen=True)
class Place:
    """Where things are.

    Attributes:
        data: the folder of images and weights; `None` for SCAFFPD_DATA.
        cache: the folder of features.
        device: to compute on.
        progress: whether to show progress; `None` where somebody looks.
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
    table: data.Table
    train: Any = field(repr=False)
    test: Any = field(repr=False)
    classes: int
    source: str
    seconds: float

    @property
    def title(self) -> str:
        """The data set's name."""
        return TITLES[self.plan.dataset]

    def cut(self, alpha: float) -> Cut:
        """The same, ready to be cut into clients."""
        return Cut(self.table, self.train, self.test, self.plan.clients, alpha, self.plan.balanced)

    def problem(self, alpha: float, device: str) -> Any:
        """What methods are compared on."""
        return problem(self.cut(alpha), self.plan, self.title, self.classes, device)


@dataclass(frozen=True)
class Study:
    """What came of a plan.

    Attributes:
        plan: what was asked for.
        ground: images and features.
        comparisons: by α.
        seconds: from images to tables.
        hardware: in words.
    """

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
        images, backbone(BACKBONE, place.data, size=plan.size), coordinates=plan.coordinates, device=place.device,
        dtype=plan.stored, precision="tf32" if place.device.startswith("cuda") else "float32", cache=place.cache,
        progress=place.progress,
    )  # fmt: skip
    labels = (np.asarray(images.train.y), np.asarray(images.test.y))
    return Ground(plan, table, *labels, len(images.classes), images.source, time.perf_counter() - start)


def _try_out(plan: Plan, labels: Any) -> None:
    """Cut the labels before features are computed, so that too few images are noticed at once."""
    nothing = data.Table(np.zeros((0, 1), dtype=np.float16))
    try:
        for alpha in plan.alphas:
            for seed in range(plan.seeds):
                Cut(nothing, labels, labels, plan.clients, alpha, plan.balanced).parts(seed)
    except InputError as error:
        raise InputError(f"There are too few images for {plan.clients} clients (--train-per-class): {error}") from None


def _fewer(images: data.Images, plan: Plan) -> data.Images:
    """As many images of every class as the plan says; of the part that it leaves open, all that every class has."""
    wanted = ((images.train, plan.train_per_class), (images.test, plan.test_per_class))
    if all(number is None for _, number in wanted):
        return images
    common = [int(np.bincount(part.y, minlength=len(images.classes)).min()) for part, _ in wanted]
    return images.subset(*(k if number is None else number for k, (_, number) in zip(common, wanted, strict=True)))


def study(plan: Plan, place: Place, out: Path) -> Study:
    """All methods, for every α; a folder that has some of the runs already is gone on with."""
    start = time.perf_counter()
    here = ground(plan, place)
    found = {alpha: comparison(here, alpha, place, out) for alpha in plan.alphas}
    return Study(plan, here, found, time.perf_counter() - start, hardware(place.device))


def comparison(here: Ground, alpha: float, place: Place, out: Path) -> Comparison:
    """All methods for one α."""
    plan = here.plan
    return compare(
        methods(plan.local_steps), here.problem(alpha, place.device), seeds=range(plan.seeds), rounds=plan.rounds,
        tune=plan.tune, out=out / f"alpha-{alpha:g}", progress=place.progress, strengths=True, choosing=1,
        climb=plan.climb,
    )  # fmt: skip


def hardware(device: str) -> str:
    """What computed."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} processor, {torch.get_num_threads()} threads"
