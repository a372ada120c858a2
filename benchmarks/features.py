"""Images per second: sampled gradients of single images against what the same network costs anyway.

    python benchmarks/features.py --device cuda --size 224 --chunk 256 --weights FOLDER

(i) plain     forward and backward pass with the gradient of all weights, summed over the chunk
(ii) sampled  ours: some coordinates of every image's own gradient
(iii) vmap    torch.func: every image's whole gradient, then the same coordinates
(iv) forward  forward pass only

Rounds go through all four in turn; medians are reported. Without --weights the network has random ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scaffpd.features import BACKBONES, Backbone, EfficientNetLite0, Entk, ResNet18Trunk, backbone
from scaffpd.features.layers import PRECISIONS, mixed
from scaffpd.models.numerics import tensor_cores

Call = Callable[[], object]


def network(arguments: argparse.Namespace) -> Backbone:
    if arguments.weights:
        return backbone(arguments.backbone, arguments.weights, arguments.size)
    torch.manual_seed(0)
    if arguments.backbone == "efficientnet-lite0":
        return Backbone.of(
            EfficientNetLite0(), lambda net, x: net.forward_features(x), size=arguments.size
        )
    return Backbone.of(ResNet18Trunk(), size=arguments.size)


def plain(trunk: torch.nn.Module, x: Tensor, precision: str) -> Call:
    def call() -> None:
        for p in trunk.parameters():
            p.requires_grad_(True)
            p.grad = None
        with tensor_cores(x.device, precision != "float32"):
            with mixed(x.device, precision):
                h = trunk(x)
            h.float().sum().backward()
        for p in trunk.parameters():
            p.requires_grad_(False)
            p.grad = None

    return call


def forward(trunk: torch.nn.Module, x: Tensor, precision: str) -> Call:
    def call() -> None:
        with (
            torch.no_grad(),
            tensor_cores(x.device, precision != "float32"),
            mixed(x.device, precision),
        ):
            trunk(x)

    return call


def seconds(call: Call, device: torch.device) -> tuple[float, int]:
    """Time of one call, and the peak of memory: of the device, or of the process so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter() - started, torch.cuda.max_memory_allocated(device)
    return time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(
    calls: dict[str, tuple[Call, int]], device: torch.device, repeats: int
) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks = dict.fromkeys(calls, 0)
    for round_ in range(repeats + 1):
        for name, (call, _) in calls.items():
            took, peak = seconds(call, device)
            if round_:  # the first warms up
                times[name].append(took)
                peaks[name] = max(peaks[name], peak)
    rates = {name: calls[name][1] / statistics.median(times[name]) for name in calls}
    return {
        name: {
            "images_per_second": rate,
            "of_plain": rate / rates["plain"],
            "peak_bytes": peaks[name],
        }
        for name, rate in rates.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", choices=BACKBONES, default="efficientnet-lite0")
    parser.add_argument("--weights", help="folder that has weights/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--coordinates", type=int, default=50_000)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument(
        "--vmap-chunk", type=int, default=8, help="images of the vmap reference; 0 leaves it out"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    a = parse()
    torch.set_num_threads(a.threads)
    device = torch.device(a.device)
    net = network(a).to(device)
    images = torch.randint(
        0, 256, (a.chunk, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    x = net.preprocess(images.to(device))
    trunk = net.trunk
    if a.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
        trunk = trunk.to(memory_format=torch.channels_last)
    ours = Entk(trunk, x, a.coordinates, precision=a.precision)
    calls: dict[str, tuple[Call, int]] = {
        "plain": (plain(trunk, x, a.precision), a.chunk),
        "sampled": (lambda: ours(x), a.chunk),
        "forward": (forward(trunk, x, a.precision), a.chunk),
    }
    if a.vmap_chunk:
        few = x[: a.vmap_chunk]
        reference = Entk(trunk, few, a.coordinates, precision=a.precision, method="vmap")
        calls["vmap"] = (lambda: reference(few), len(few))
    result = measure(calls, device, a.repeats)
    title = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {a.threads} thread(s)"
    )
    what = (
        f"{a.backbone}, {a.size} px, chunk {a.chunk}, {ours.coordinates} coordinates, {a.precision}"
    )
    print(f"{what}, {ours.method}; {title}")
    print(f"estimated memory of a chunk: {ours.room * a.chunk / 1e9:.2f} GB")
    print("| | images/s | of plain | peak memory, GB |\n|---|---|---|---|")
    for name, row in result.items():
        print(
            f"| {name} | {row['images_per_second']:.1f} | {row['of_plain']:.2f} | {row['peak_bytes'] / 1e9:.2f} |"
        )
    if a.json:
        setting = {k: v for k, v in vars(a).items() if k != "json"} | {
            "machine": title,
            "torch": torch.__version__,
        }
        a.json.write_text(
            json.dumps({"setting": setting, "rates": result}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
