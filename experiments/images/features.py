r"""Features of many images as rows of one file, computed once.

    a_j = z_j / √d,    z_j: gradients ("entk") or last features ("penultimate") of image j,
                       standardised by mean and deviation of the training rows: ‖a_j‖ ≈ 1

Gradients of different layers differ by orders of magnitude, more than half precision can hold. So a
few training images fix a provisional mean m⁰ and deviation s⁰ of every coordinate, and (g − m⁰) /
s⁰ is stored. The sums of these and of their squares over *all* training rows, in double precision,
give the exact correction

    z ← (z − m¹) / s¹,    m¹ = mean z,    s¹² = mean z² − m¹²,

which is applied when rows are read. Two kinds of coordinates would be blown up by their own
deviation s⁰ s¹: those that are constant on the training rows, and those that hardly ever vary (a
unit that one training image activates barely, and a test image fully, lies millions of deviations
out). So a deviation is at least a hundredth of the median of its parameter's coordinates, and that
median is the deviation of a constant one. The same floor applies to s⁰, which keeps z within half
precision.

Rows are the training images, then the test images. The folder's name is a hash of everything on
which the values depend; neither device nor chunk size is part of it (they change values by rounding
only):

    values.npy   z, by a memory map
    state.npz    rows done and the sums; the same call goes on from there
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.images.entk import Entk, tensor_cores
from experiments.images.loading import Images
from experiments.images.networks import Backbone
from scaffpd.errors import InputError

KINDS = ("entk", "penultimate")
FLOOR = 1 / 100
STILL = 1e-7  # deviations below this share of the largest |z| are rounding
SAMPLE = 256  # training images that fix the provisional mean and deviation
CHUNK = {"cpu": 32, "cuda": 256}  # images at a time; halved where memory runs out
COMMIT = 20.0  # seconds between two saved states


@dataclass(frozen=True)
class Features:
    """Stored rows z and what turns them into features (z − shift) · factor."""

    values: NDArray[Any] = field(repr=False)
    shift: NDArray[np.float32] = field(repr=False)
    factor: NDArray[np.float32] = field(repr=False)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the features of some images, (images, d)."""
        rows = self.values[numbers].astype(np.float32)
        rows -= self.shift
        rows *= self.factor
        return rows


@dataclass
class ColumnMoments:
    """Column sums Σ z, Σ z², max |z|, and the number of rows; double precision."""

    first: Tensor
    second: Tensor
    largest: Tensor
    rows: int = 0

    @classmethod
    def zeros(cls, columns: int, device: torch.device) -> ColumnMoments:
        """Start with no rows."""
        zero = torch.zeros(columns, dtype=torch.float64, device=device)
        return cls(zero, zero.clone(), zero.clone())

    def add(self, z: Tensor) -> None:
        """Add rows."""
        if len(z):
            z = z.double()
            self.first += z.sum(0)
            self.second += z.square().sum(0)
            self.largest = torch.maximum(self.largest, z.abs().amax(0))
            self.rows += len(z)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation; zero for a column that does not vary."""
        mean = self.first / max(self.rows, 1)
        deviation = (self.second / max(self.rows, 1) - mean.square()).clamp_min(0).sqrt()
        return mean, torch.where(deviation > STILL * self.largest, deviation, 0)


def scales(sums: ColumnMoments, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and floored deviation of every column."""
    mean, deviation = sums.moments()
    return mean, floored(deviation, groups)


def correction(
    sums: ColumnMoments, mean: Tensor, deviation: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute m¹ and s¹ from the sums of all z; g = m⁰ + s⁰ z is constant if it varies by rounding
    only.
    """
    m, s = sums.moments()
    size = mean.abs() + deviation * sums.largest
    exact = torch.where(s * deviation > 10 * STILL * size, s * deviation, 0)
    return m, floored(exact, groups) / deviation


def floored(deviation: Tensor, groups: Tensor) -> Tensor:
    """Raise deviations to FLOOR times the median positive one of their group, those of constants to
    it.

    A group without any positive deviation takes the median of all; one, if there is none at all.
    """
    moving = deviation > 0
    overall = deviation[moving].median() if moving.any() else deviation.new_ones(())
    result = deviation.clone()
    for group in sorted(set(groups.tolist())):
        inside = groups == group
        alive = deviation[inside & moving]
        usual = alive.median() if len(alive) else overall
        own = deviation[inside]
        result[inside] = torch.where(own > 0, own.clamp_min(FLOOR * usual), usual)
    return result


class Penultimate:
    """Last features x ↦ h(x), with the interface of `Entk`."""

    def __init__(self, trunk: torch.nn.Module, example: Tensor, precision: str) -> None:
        self.trunk = trunk
        self.precision = precision
        self.coordinates = self(example[:1]).shape[1]
        self.groups = torch.zeros(self.coordinates, dtype=torch.int64, device=example.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return features (B, dim) in single precision."""
        with torch.no_grad(), tensor_cores(self.precision != "float32"):
            h: Tensor = self.trunk(x)
            return h.float()


def place(device: str) -> torch.device:
    """Return the device; "auto" is a GPU if there is one."""
    gpu = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if gpu else "cpu")
    if device.startswith("cuda") and not gpu:
        raise InputError("no-cuda", "There is no CUDA device here: choose the device 'cpu'.")
    return torch.device(device)


def features(
    images: Images,
    backbone: Backbone,
    kind: str = "entk",
    coordinates: int = 50_000,
    seed: int = 0,
    *,
    device: str = "cpu",
    dtype: str = "float16",
    cache: str | os.PathLike[str],
    progress: bool | None = None,
) -> Features:
    """Return the features of all images, from the cache as far as they are there.

    Args:
        images: training and test images.
        backbone: the network.
        kind: "entk" or "penultimate".
        coordinates: number of the gradient's coordinates.
        seed: of the random head, the coordinates and the provisional sample.
        device: "auto", "cpu" or "cuda"; on a GPU the network computes in TF32.
        dtype: "float16" or "float32", of storage.
        cache: folder for all tables.
        progress: whether to print the rate now and then; None: yes.
    """
    where = place(device)
    precision = "tf32" if where.type == "cuda" else "float32"
    about: dict[str, Any] = {
        "images": images.digest,
        "backbone": backbone.digest,
        "input": [backbone.size, *backbone.mean, *backbone.std],
        "kind": kind,
        "dtype": dtype,
        "precision": precision,
        **({"coordinates": coordinates, "seed": seed} if kind == "entk" else {}),
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    folder = Path(cache) / key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    pixels = (images.train.x, images.test.x)
    return _Extraction(pixels, backbone.to(where), folder, about, seed).run(progress is not False)


class _Extraction:
    def __init__(
        self,
        pixels: tuple[NDArray[np.uint8], NDArray[np.uint8]],
        backbone: Backbone,
        folder: Path,
        about: dict[str, Any],
        seed: int,
    ) -> None:
        self.pixels = pixels
        self.backbone = backbone
        self.folder = folder
        self.device = backbone.device
        self.train = len(pixels[0])
        self.total = self.train + len(pixels[1])
        self.dtype = about["dtype"]
        self.chunk = CHUNK.get(self.device.type, 32)
        self.seed = seed
        example = backbone.preprocess(torch.from_numpy(pixels[0][:1]).to(self.device))
        self.map: Entk | Penultimate
        if about["kind"] == "entk":
            self.map = Entk(backbone.trunk, example, about["coordinates"], seed, about["precision"])
        else:
            self.map = Penultimate(backbone.trunk, example, about["precision"])
        self.columns = self.map.coordinates

    def run(self, progress: bool) -> Features:
        file = self.folder / "values.npy"
        state = self._state()
        if state is None:
            self.done = 0
            self.sums = ColumnMoments.zeros(self.columns, self.device)
            self.mean, self.deviation = self._provisional()
            values = np.lib.format.open_memmap(file, "w+", self.dtype, (self.total, self.columns))
        else:
            self.done, rows = state["rows"].tolist()
            names = ("mean", "deviation", "first", "second", "largest")
            self.mean, self.deviation, *sums = (
                torch.from_numpy(state[name]).to(self.device) for name in names
            )
            self.sums = ColumnMoments(*sums, rows)
            values = np.load(file, mmap_mode="r+" if self.done < self.total else "r")
        self._fill(values, progress)
        m, s = correction(self.sums, self.mean, self.deviation, self.map.groups)
        factor = self.columns**-0.5 / s
        return Features(values, m.float().cpu().numpy(), factor.float().cpu().numpy())

    def _raw(self, numbers: NDArray[np.int64]) -> Tensor:
        """Compute g of some images; if memory runs out, use smaller chunks from now on."""
        first = numbers[numbers < self.train]
        second = numbers[numbers >= self.train] - self.train
        images = np.concatenate([self.pixels[0][first], self.pixels[1][second]])
        try:
            return self.map(self.backbone.preprocess(torch.from_numpy(images).to(self.device)))
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise
        torch.cuda.empty_cache()
        self.chunk = len(numbers) // 2
        return torch.cat([self._raw(numbers[: self.chunk]), self._raw(numbers[self.chunk :])])

    def _provisional(self) -> tuple[Tensor, Tensor]:
        """Find m⁰ and s⁰ from a few training images."""
        numbers = np.arange(self.train)
        if self.train > SAMPLE:
            random = np.random.default_rng(self.seed)
            numbers = np.sort(random.choice(self.train, SAMPLE, replace=False))
        few = ColumnMoments.zeros(self.columns, self.device)
        for k in range(0, len(numbers), self.chunk):
            few.add(self._raw(numbers[k : k + self.chunk]))
        return scales(few, self.map.groups)

    def _fill(self, values: NDArray[Any], progress: bool) -> None:
        """Write z = (g − m⁰) / s⁰ of every image that is still missing; disk and network work side
        by side.
        """
        begin = self.done
        started = saved = time.monotonic()

        def write(start: int, rows: Tensor) -> None:
            values[start : start + len(rows)] = rows.cpu().numpy()

        with ThreadPoolExecutor(1) as disk:
            written = disk.submit(int)
            while self.done < self.total:
                numbers = np.arange(self.done, min(self.done + self.chunk, self.total))
                z = ((self._raw(numbers) - self.mean) / self.deviation).float()
                stored = z.to(getattr(torch, self.dtype))
                if not torch.isfinite(stored).all():
                    raise InputError(
                        "features-out-of-range",
                        f"Features of images {numbers[0]} to {numbers[-1]} are not finite in "
                        f"{self.dtype}.",
                    )
                self.sums.add(stored[: max(self.train - self.done, 0)])
                written.result()
                written = disk.submit(write, self.done, stored)
                self.done += len(numbers)
                now = time.monotonic()
                if self.done == self.total or now - saved >= COMMIT:
                    saved = now
                    written.result()
                    self._save(values)
                    if progress:
                        rate = (self.done - begin) / (now - started)
                        print(f"{self.done} of {self.total} images, {rate:.3g}/s", flush=True)

    def _save(self, values: NDArray[Any]) -> None:
        if isinstance(values, np.memmap):
            values.flush()
        sums = self.sums
        parts = {
            "mean": self.mean,
            "deviation": self.deviation,
            "first": sums.first,
            "second": sums.second,
            "largest": sums.largest,
        }
        draft = self.folder / "draft.npz"
        arrays = {name: value.cpu().numpy() for name, value in parts.items()}
        np.savez(draft, rows=np.array([self.done, sums.rows]), **arrays)
        draft.replace(self.folder / "state.npz")

    def _state(self) -> dict[str, NDArray[Any]] | None:
        file = self.folder / "state.npz"
        if not file.exists():
            return None
        with np.load(file) as state:
            return {name: state[name] for name in state.files}
