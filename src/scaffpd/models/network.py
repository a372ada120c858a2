r"""The loss of a network as a function of one vector, and its gradients for many clients at once.

A step of n clients is one call of vmap(∇f)(U, X, y) with U (n, d) and a minibatch each, (n, b, …),
in place of n calls: small operations cost as much as their launch, so that n of them cost little
more than one. If an operation does not batch, or gives other numbers batched, clients go one after
the other, and the log says why.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from scaffpd.errors import first_line
from scaffpd.models.draws import uniform_at
from scaffpd.models.losses import Loss

log = logging.getLogger(__name__)
MeanLoss = Callable[[Tensor, Tensor], Tensor]
ROOM = 4  # numbers for every output of a layer: it, its derivative, and saved tensors
ALIKE = 1e-3  # of single precision: largest difference batched, relative to the largest entry
LOCK = threading.Lock()


class SeededDropout(nn.Module):
    """Dropout of entries, or whole channels, by a seed of the client and the step.

    A client's masks do not depend on who is computed beside it.
    """

    def __init__(self, p: float, whole: bool, layer: int) -> None:
        super().__init__()
        self.p = p
        self.whole = whole
        self.layer = layer
        self.seed: Tensor
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, X: Tensor) -> Tensor:
        shape = (*X.shape[:2], *(1 for _ in X.shape[2:])) if self.whole else X.shape
        # a stream for every layer: layers of one network must not share their masks
        numbers = uniform_at(self.seed + self.layer * 1_000_003, shape)
        return X * (numbers >= self.p).to(X.dtype) / (1 - self.p)


def training_copy(network: nn.Module) -> nn.Module:
    """Copy the network for local steps, with seeded dropout."""
    trained = copy.deepcopy(network)
    for number, (path, part) in enumerate(list(trained.named_modules())):
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            seeded = SeededDropout(part.p, not isinstance(part, nn.Dropout), number)
            if not path:
                return seeded
            parent, _, name = path.rpartition(".")
            setattr(trained.get_submodule(parent), name, seeded)
    return trained


class NetworkFunction:
    """Loss of a network as a function of its parameters in one vector x.

    Args:
        network: holds x⁰; used for losses, with dropout off.
        loss: the mean loss over a batch.
        named: loss per sample, for a loss known by name.
        precision: number format of products on matrix units; `None` for that of x.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: MeanLoss,
        named: Loss | None,
        precision: torch.dtype | None = None,
    ) -> None:
        self.trained = training_copy(network)
        self.network = network.eval()
        self.loss = loss
        self.named = named
        self.precision = precision
        self.parameters = {k: p for k, p in network.named_parameters() if p.requires_grad}
        self.sizes = [p.numel() for p in self.parameters.values()]
        self.seeds = [
            f"{k}.seed" if k else "seed"
            for k, part in self.trained.named_modules()
            if isinstance(part, SeededDropout)
        ]
        # `functional_call` exchanges a module's parameters for a while: threads need copies
        self.copies: dict[int, tuple[nn.Module, nn.Module]] = {}
        self.width: int | None = None
        self.together: bool | None = None  # whether clients are batched; `None` until tried

    def start(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        parts = zip(self.parameters.items(), torch.split(x, self.sizes), strict=True)
        return {name: part.view(p.shape) for (name, p), part in parts}

    def _own(self) -> tuple[nn.Module, nn.Module]:
        """Return the networks for losses and for local steps; threads have copies of their own."""
        if threading.current_thread() is threading.main_thread():
            return self.network, self.trained
        thread = threading.get_ident()
        if thread not in self.copies:
            with LOCK:
                self.copies[thread] = copy.deepcopy(self.network), copy.deepcopy(self.trained)
        return self.copies[thread]

    def outputs(self, x: Tensor, X: Tensor, seed: Tensor | None = None) -> Tensor:
        """Evaluate the network at x; with a `seed` as in local steps."""
        network, trained = self._own()
        named = self.unflatten(x)
        if seed is not None:
            network = trained
            named = named | dict.fromkeys(self.seeds, seed)
        if self.precision is None:
            return functional_call(network, named, (X,))  # type: ignore[no-any-return]
        with torch.autocast(X.device.type, self.precision, cache_enabled=False):
            output: Tensor = functional_call(network, named, (X,))
        return output.to(x.dtype)

    def weighted(self, output: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return Σ_j w_j ℓ_j of outputs; if the loss is a function, all weights are equal."""
        if self.named is None:
            return self.loss(output, y).squeeze() * weight.sum()
        return (self.named.value(output.reshape(len(y), -1), y) * weight).sum()

    def value(
        self, x: Tensor, X: Tensor, y: Tensor, weight: Tensor, seed: Tensor | None = None
    ) -> Tensor:
        return self.weighted(self.outputs(x, X, seed), y, weight)

    def gradients(
        self, x: Tensor, X: Tensor, y: Tensor, weight: Tensor, seeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return values and gradients of n clients at one x, (d,), or each at its own, (n, d)."""
        parts = (X, y, weight) if seeds is None else (X, y, weight, seeds)
        n = len(X)
        together = self.together and n > 1
        if together and x.is_cuda:
            dims = (None if x.ndim == 1 else 0, *(0 for _ in parts))
            slopes, values = vmap(grad_and_value(self.value), in_dims=dims)(x, *parts)
            return values.detach(), slopes
        points = x.expand(n, x.shape[-1])
        if together:
            # the gradient of the sum of all values, by every client's own point: plain
            # autograd has less overhead on a processor than torch.func's
            return _derived(vmap(self.value), points, parts)
        each = zip(points, *parts, strict=True)
        found = [_derived(self.value, u, tuple(own)) for u, *own in each]
        return torch.stack([v for v, _ in found]), torch.stack([g for _, g in found])

    def room(self, X: Tensor) -> int:
        """Estimate how many numbers a gradient of one sample needs, from the layers' outputs."""
        if self.width is None:
            counted: list[int] = []

            def count(_layer: nn.Module, _inputs: object, out: object) -> None:
                counted.append(out.numel() if isinstance(out, Tensor) else 0)

            layers = [part for part in self.network.modules() if not list(part.children())]
            hooks = [layer.register_forward_hook(count) for layer in layers]
            try:
                with torch.no_grad():
                    self.outputs(self.start(), X[:1])
            finally:
                for hook in hooks:
                    hook.remove()
            self.width = ROOM * (sum(counted) + X[0].numel())
        return self.width

    def settle(self, x: Tensor, X: Tensor, y: Tensor) -> None:
        """Decide how to compute clients: two of them at once, compared with one after the other."""
        points = x.expand(2, len(x))
        weight = x.new_full(y.shape[:2], 1 / y.shape[1])
        seeds = torch.arange(2, device=x.device)

        def both() -> tuple[Tensor, Tensor]:
            losses, steps = (
                self.gradients(points, X, y, weight, given)[1] for given in (None, seeds)
            )
            return losses, steps

        allowed = ALIKE if self.precision is None else ALIKE**0.5
        self.together = True
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                beside = both()
            slow = [str(w.message) for w in heard if "batching rule" in str(w.message)]
            self.together = False
            pairs = zip(beside, both(), strict=True)
            off = max(float((a - b).abs().max() - allowed * b.abs().max()) for a, b in pairs)
            reason = slow[0] if slow else "it gives other numbers" if off > 0 else ""
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            reason = first_line(error)
        self.together = not reason
        if reason:
            log.info("The network's clients are computed one after the other: %s", reason)


def _derived(
    function: Callable[..., Tensor], x: Tensor, parts: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return a function's values, and the gradient of their sum by x, by plain autograd."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        values = function(leaf, *parts)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient
