"""Images per second: gradients of single images at sampled coordinates against the network's own
passes.

    python -m experiments.images.speed --device cuda --size 224 --chunk 256

plain      forward and backward pass with the gradient of all weights, summed over the chunk
sampled    ours: some coordinates of every image's own gradient
vmap       torch.func: every image's whole gradient, then the same coordinates
forward    forward pass only

Rounds go through all four in turn, on random weights; medians are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from experiments.images.entk import PRECISIONS, Entk, tensor_cores
from experiments.images.networks import BACKBONES, backbone
from experiments.tables import markdown_table


def plain(trunk: nn.Module, x: Tensor, precision: str, backward: bool = True) -> None:
    """Make the network's own passes."""
    trunk.requires_grad_(backward)
    autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16")
    with tensor_cores(precision != "float32"), torch.set_grad_enabled(backward):
        with autocast:
            h = trunk(x)
        if backward:
            h.float().sum().backward()
    trunk.requires_grad_(False)
    for p in trunk.parameters():
        p.grad = None


def measure(calls: dict[str, tuple[Callable[[], object], int]], repeats: int) -> dict[str, float]:
    """Return images per second by name, from medians; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, (call, _) in calls.items():
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return {name: calls[name][1] / statistics.median(taken[1:]) for name, taken in times.items()}


def rates(
    name: str,
    device: str,
    size: int,
    chunk: int,
    coordinates: int,
    precision: str,
    repeats: int = 5,
) -> dict[str, float]:
    """Measure one network."""
    torch.manual_seed(0)
    net = backbone(name, size=size, random=True).to(device)
    images = torch.randint(0, 256, (chunk, 32, 32, 3), dtype=torch.uint8)
    x = net.preprocess(images.to(device))
    ours = Entk(net.trunk, x, coordinates, precision=precision)
    whole = Entk(net.trunk, x, coordinates, precision=precision)
    whole.rules = None
    few = x[:8]
    return measure(
        {
            "plain": (lambda: plain(net.trunk, x, precision), chunk),
            "sampled": (lambda: ours(x), chunk),
            "vmap": (lambda: whole(few), len(few)),
            "forward": (lambda: plain(net.trunk, x, precision, backward=False), chunk),
        },
        repeats,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", choices=BACKBONES, default=BACKBONES[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--coordinates", type=int, default=50_000)
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    found = rates(
        given.backbone, given.device, given.size, given.chunk, given.coordinates, given.precision
    )
    rows = [(name, f"{rate:.0f}", f"{rate / found['plain']:.2f}") for name, rate in found.items()]
    print("\n".join(markdown_table(("", "images/s", "of plain"), rows)))


if __name__ == "__main__":
    main()
