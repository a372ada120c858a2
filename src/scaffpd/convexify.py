r"""Train, convexify, train (Yu, Wei, Karimireddy, Ma, Jordan, 2022): a network for its features, then a convex problem.

1. *Train* a network by FedAvg, or take one that is trained.
2. *Convexify*: stay at its parameters θ and represent every sample by the gradient of a random output of its last
   features h there, a_j = ∂⟨w, h(x_j)⟩/∂(θ, w), at random coordinates: the network made linear in its parameters.
   Columns are standardised by sums that clients add up; nobody sees anybody else's rows.
3. *Train* a linear model on them, with squared loss on one-hot labels,

       min_X max_{λ∈Λ} Σ_i λ_i [ (1/m_i) Σ_j ‖Xᵀa_j − e_{y_j}‖² + (l2/2)‖X‖² ] − ψ(λ),

   which is convex: any method of this package applies, and the result comes with a certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scaffpd.algorithms import FedAvg, ScaffPD
from scaffpd.data import Table
from scaffpd.errors import InputError, count
from scaffpd.features import Entk, trunk
from scaffpd.features.compute import ColumnMoments, scales
from scaffpd.features.store import check_table
from scaffpd.features.store import chunk as fitting
from scaffpd.models import Linear, Module
from scaffpd.models.arrays import read_features, read_labels
from scaffpd.objectives import ChiSquare
from scaffpd.training.cohort import Cohort, checked_device, in_order, named_pairs
from scaffpd.training.loop import Algorithm, Result, train

Clients = Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]]
Head = str | Callable[[nn.Module, Tensor], Tensor] | None
Pairs = list[tuple[NDArray[Any], NDArray[Any]]]


@dataclass(frozen=True)
class Representation:
    """x ↦ (g(x) − mean) / deviation, g the gradient at the chosen coordinates."""

    entk: Entk = field(repr=False)
    chunk: int
    mean: Tensor = field(repr=False)
    deviation: Tensor = field(repr=False)

    def __call__(self, X: Any, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return standardised rows, (samples, coordinates), in `out` where that is given."""
        X = np.asarray(X)
        shape = tuple(self.entk.example.shape[1:])
        if X.shape[1:] != shape:
            whole = f"({', '.join(map(str, ('n', *shape)))})"
            raise InputError(
                "array-shape-expected",
                f"An array of shape {whole} is expected, n samples, got one of shape {X.shape}.",
            )
        rows = np.empty((len(X), self.entk.coordinates), dtype=np.float32) if out is None else out
        for k, g in enumerate(gradients(self.entk, X, self.chunk)):
            rows[k * self.chunk : k * self.chunk + len(g)] = (
                ((g - self.mean) / self.deviation).float().cpu().numpy()
            )
        return rows


@dataclass(frozen=True)
class Convexified:
    """Results of the three stages.

    Attributes:
        network: the network whose features are used.
        trained: how stage 1 went; `None` where the network was trained before.
        represent: samples ↦ rows of the linear model.
        cohort: the clients of the convex problem, with test rows where there are any.
        result: how stage 3 went: x, λ, certificate.
        classes: the number of labels.
    """

    network: nn.Module = field(repr=False)
    trained: Result | None
    represent: Representation = field(repr=False)
    cohort: Cohort
    result: Result
    classes: int

    def scores(self, X: Any) -> NDArray[np.float64]:
        """Return Xᵀa of every sample, (samples, classes): about one for the right class and zero for the others."""
        a = self.represent(X).astype(np.float64)
        scores: NDArray[np.float64] = (
            a @ self.result.x.reshape(-1, self.classes) * a.shape[1] ** -0.5
        )
        return scores

    def predict(self, X: Any) -> NDArray[np.int64]:
        """Return the label of every sample."""
        labels: NDArray[np.int64] = self.scores(X).argmax(1)
        return labels


def tct(
    module: nn.Module,
    clients: Clients,
    head: Head,
    *,
    method: Algorithm | None = None,
    rounds: int = 100,
    tol: float | None = None,
    network_method: Algorithm | None = None,
    network_rounds: int = 20,
    coordinates: int = 50_000,
    l2: float = 1e-3,
    classes: int | None = None,
    test: Clients | None = None,
    names: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    chunk: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Convexified:
    """Train a network, make it linear where it stands, and train that with a guarantee for every client.

    Args:
        module: from a batch of features to one output per class.
        clients: one (X, y) per site, as for a `Cohort`; y are labels 0, 1, …
        head: the name of the last layer ("fc"), which stage 2 takes away; or a function (module, x) → features (B,
            dim); or `None` where the outputs themselves are the features.
        method: of stage 3; by default `ScaffPD(ChiSquare(rho=0.1))`.
        rounds: of stage 3.
        tol: stop stage 3 at this certified gap.
        network_method: of stage 1; by default FedAvg with minibatches.
        network_rounds: of stage 1; 0 takes the network as it is.
        coordinates: of the gradient that are kept (all, where the network has fewer).
        l2: of the convex problem.
        classes: number of labels; by default the largest one, plus one.
        test: held-out pairs; `found.cohort.evaluate(found.result.x, "test")` scores on them.
        names: of the clients.
        device: where to compute.
        chunk: samples at a time in stage 2; by default what fits into memory.
        seed: seeds all randomness.
        progress: show progress bars; by default where standard error is a terminal.
    """
    pairs, labels = _read(*named_pairs(clients, names))
    held = None if test is None else _read_test(test, labels)
    known = _classes(classes, [*pairs, *(held or [])])
    place = checked_device(device)
    trained = None
    network = module
    linear = Linear("squared", l2=l2, classes=known)
    trunk(module, head)  # what is wrong with the head is said before any work
    if chunk is not None:
        count("tct", "chunk", chunk)
    if network_rounds:
        count("tct", "network_rounds", network_rounds)
        model = Module(module, "cross_entropy")
        federation = Cohort(pairs, model, names=labels, device=place)
        first = FedAvg(local_steps=10, batch_size=32) if network_method is None else network_method
        trained = train(
            first, federation, rounds=network_rounds, seed=seed, progress=progress
        ).uninterrupted()
        network = model.network(trained.x)
    represent = representation(
        network, [X for X, _ in pairs], head, coordinates, place, chunk, seed
    )
    cohort = linearised(represent, pairs, held, labels, linear, place)
    last = ScaffPD(ChiSquare(rho=0.1)) if method is None else method
    result = train(last, cohort, rounds=rounds, tol=tol, seed=seed, progress=progress)
    return Convexified(network, trained, represent, cohort, result, known)


def representation(
    network: nn.Module,
    features: Sequence[Any],
    head: Head,
    coordinates: int = 50_000,
    device: str | torch.device = "cpu",
    chunk: int | None = None,
    seed: int = 0,
) -> Representation:
    """Make stage 2: the gradient at random coordinates, with the mean and deviation that all clients' sums give."""
    body = trunk(network, head).to(device)
    kind = next(body.parameters()).dtype
    example = torch.as_tensor(np.asarray(features[0][:2])).to(device, kind)
    entk = Entk(body, example, coordinates, seed)
    size = chunk or fitting(entk.room, None, torch.device(device))
    sums = ColumnMoments.zeros(entk.coordinates, torch.device(device))
    for X in features:  # each client adds its own n, Σ g and Σ g²
        for g in gradients(entk, X, size):
            sums.add(g)
    return Representation(entk, size, *scales(sums, entk.groups))


def gradients(entk: Entk, X: Any, chunk: int) -> Iterator[Tensor]:
    """Yield the kept derivatives, so many samples at a time."""
    for k in range(0, len(X), chunk):
        yield entk(torch.as_tensor(np.asarray(X[k : k + chunk])).to(entk.w))


def linearised(
    represent: Representation,
    pairs: Pairs,
    test: Pairs | None,
    names: Sequence[str],
    model: Linear,
    device: torch.device,
) -> Cohort:
    """Bind the clients of the convex problem: rows of one table, training rows first."""
    everything = [*pairs, *(test or [])]
    ends = np.cumsum([len(y) for _, y in everything])
    parts = [np.arange(end - len(y), end) for end, (_, y) in zip(ends, everything, strict=True)]
    check_table(None, int(ends[-1]), represent.entk.coordinates, 4)
    values = np.empty((ends[-1], represent.entk.coordinates), dtype=np.float32)
    for part, (X, _) in zip(parts, everything, strict=True):
        represent(X, values[part[0] : part[-1] + 1])
    table = Table(values, represent.entk.coordinates**-0.5)
    rows = [(table.rows(part), y) for part, (_, y) in zip(parts, everything, strict=True)]
    held = rows[len(pairs) :] if test is not None else None
    return Cohort(rows[: len(pairs)], model, names=names, device=device, test=held)


def _read(given: list[tuple[Any, Any]], names: list[str]) -> tuple[Pairs, list[str]]:
    pairs: Pairs = []
    for name, (X, y) in zip(names, given, strict=True):
        features = np.asarray(read_features(name, X))
        pairs.append((features, np.asarray(read_labels(name, y, len(features)))))
    return pairs, names


def _read_test(test: Clients, names: list[str]) -> Pairs:
    try:
        return _read(in_order(test, names), names)[0]
    except InputError as error:
        raise InputError("test-data-used", f"The test data cannot be used: {error}") from None


def _classes(given: int | None, pairs: Pairs) -> int:
    if given is not None:
        return count("tct", "classes", given)
    return max(2, 1 + int(max(y.max() for _, y in pairs)))
