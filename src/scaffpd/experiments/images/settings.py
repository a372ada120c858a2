r"""What is run for each of the paper's tables on images, and in which size.

As in the paper: Dirichlet(α) over classes, then 30 % of the clients lose 70 % of their samples; eNTK features of an
ImageNet network at random coordinates (50,000 in full size); a linear classifier with squared loss on one-hot labels;
accuracy of each client on test images in its own class proportions, then the mean over clients and over the worst
fifth of them.
Where the paper is silent: full-gradient local steps, the same (l2/2)‖x‖² for all methods, FedAvg, FedProx, q-FFL and
Δ-FL count clients by their samples and SCAFFOLD counts them alike, as published. Every method may try the same number
of configurations (rates, and ρ, q, θ or μ), judged by the worst 20 % on a quarter of the training images of the first
partition. Class shares are those of Li et al.'s text; their code also keeps clients from growing beyond the mean
(`--balanced`), which ours does not by default, so that clients differ more in size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scaffpd.algorithms import AFL
from scaffpd.comparison.zoo import zoo
from scaffpd.errors import unknown
from scaffpd.objectives import ChiSquare
from scaffpd.training import Algorithm

RHO = 0.1  # of Scaff-PD as it is, before tuning
METHODS = ("FedAvg", "SCAFFOLD", "q-FFL", "AFL", "DRFA", "FedProx", "Δ-FL", "Scaff-PD")
RHOS = (0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Plan:
    """One table.

    Attributes:
        name: of the command and of its folder.
        dataset: "cifar10", "cifar100" or "tinyimagenet".
        clients: N.
        alphas: of Dirichlet(α), one block of columns each.
        seeds: partitions.
        rounds: of every run.
        local_steps: J.
        tune: configurations that every method may try.
        coordinates: of the eNTK features.
        size: pixels that images are resized to.
        train_per_class: training images; `None` takes all.
        test_per_class: test images; `None` takes all.
        stored: the number format of the features.
        l2: of the regulariser.
        balanced: whether classes are dealt as in the code of Li et al. (2022), which lets no client grow far beyond
            the mean; their text does not say so.
        climb: whether the best configuration is followed beyond the edge of the grid.
    """

    name: str
    dataset: str
    clients: int = 20
    alphas: tuple[float, ...] = (0.01, 0.05, 0.1)
    seeds: int = 3
    rounds: int = 100
    local_steps: int = 10
    tune: int = 9
    coordinates: int = 50_000
    size: int = 224
    train_per_class: int | None = None
    test_per_class: int | None = None
    stored: str = "float16"
    l2: float = 3e-5
    balanced: bool = False
    climb: bool = False


PLANS = {
    plan.name: plan
    for plan in (
        Plan("cifar100", "cifar100"),
        Plan("cifar10", "cifar10", alphas=(0.05,)),
        Plan("tinyimagenet", "tinyimagenet"),
        Plan("cifar100-50clients", "cifar100", clients=50, alphas=(0.01,)),
    )
}
FEWEST = 10  # samples of a client, as Li et al. (2022) have it
PER_CLASS = {"cifar10": (150, 50), "cifar100": (20, 10), "tinyimagenet": (15, 10)}


def plan(name: str, small: bool = False) -> Plan:
    """The plan of that name, or one that two processor cores can carry out in minutes."""
    if name not in PLANS:
        raise unknown("table", name, PLANS)
    full = PLANS[name]
    if not small:
        return full
    train, test = PER_CLASS[full.dataset]
    return replace(
        full, seeds=2, rounds=30, tune=3, coordinates=4000, size=64, train_per_class=train, test_per_class=test,
        stored="float32", l2=1e-3,
    )  # fmt: skip


def methods(local_steps: int) -> dict[str, Algorithm]:
    """The paper's eight methods; AFL with local steps, as the paper has it."""
    known = zoo(ChiSquare(RHO), local_steps) | {"AFL": AFL(local_steps=local_steps)}
    return {name: known[name] for name in METHODS}
