"""Names that arguments can take, for shell completion: spelt out here, because their homes take seconds to import.

A test holds each of them against its home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scaffpd.errors import unknown

PROBLEMS = ("digits", "hospitals", "breast-cancer", "synthetic")
METHODS = (  # without blanks, which a shell would have to quote
    *("all", "FedAvg", "FedProx", "SCAFFOLD", "ProxSkip", "AFL", "AFL+local-steps", "DRFA", "q-FFL", "Δ-FL", "GDA"),
    *("Extragradient", "APD", "Quasi-Newton-minimax", "Scaff-PD", "Subspace-saddle"),
)
OBJECTIVES = ("Agnostic", "Average", "ChiSquare", "ChiSquareBall", "CVaR", "Nash", "QFair", "Tilted")
ENGINES = ("flare", "flower")
IMAGES = {"cifar10": "cifar10", "cifar100": "cifar100", "tiny-imagenet": "tiny_imagenet"}  # and their loaders
BACKBONES = ("efficientnet-lite0", "resnet18-layer3")
KINDS = ("entk", "penultimate")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float16", "float32")
PRECISIONS = ("float32", "tf32", "bfloat16")


def checked(what: str, given: str, names: Iterable[str]) -> None:
    """Refuse a name that is none of them, before anything takes time."""
    if given not in names:
        raise unknown(what, given, names)


def completing(*names: str) -> Callable[[str], list[str]]:
    """What `autocompletion=` wants: the names that begin as the word does."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def completing_list(*names: str) -> Callable[[str], list[str]]:
    """The same for names joined by commas: the last of them is completed, and none is offered twice."""

    def complete(incomplete: str) -> list[str]:
        *before, last = incomplete.split(",")
        left = [name for name in names if name not in before]
        return [",".join([*before, name]) for name in left if name.startswith(last)]

    return complete
