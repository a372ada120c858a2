r"""Compute a table of features: columns of mean zero and deviation one, in one pass over the images.

Gradients of different layers differ by orders of magnitude, more than half precision can hold. So a few training
images fix a provisional mean m⁰ and deviation s⁰ of every coordinate, z = (g - m⁰) / s⁰ is stored, and the sums
of z and z² over *all* training rows, in double precision, give the exact correction

    z ← (z - m¹) / s¹,    m¹ = mean z,    s¹² = mean z² - m¹²,

which is applied in place after the last row. Two kinds of coordinates would be blown up by their own deviation
s⁰ s¹: those that are constant on the training rows, and those that hardly ever vary (a unit that one training image
activates barely, and a test image fully, lies millions of deviations out). So a deviation is at least a hundredth
of the median of its parameter's coordinates, and that median is the deviation of a constant one. All other
columns have mean zero and deviation one on the training rows to the precision of storage. The same floor applies to
s⁰, which keeps z within half precision.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import scaffpd
from scaffpd.data.folder import checksum
from scaffpd.errors import InputError
from scaffpd.features import store
from scaffpd.features.backbones import Backbone
from scaffpd.features.layers import Penultimate
from scaffpd.features.per_sample import Entk
from scaffpd.features.store import STATE, FeatureStore, State, corrupt
from scaffpd.training.progress import Tally

FLOOR = 1 / 100
STILL = 1e-7  # deviations below this share of the largest |z| are rounding


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
        first, second, largest = (
            torch.zeros(columns, dtype=torch.float64, device=device) for _ in range(3)
        )
        return cls(first, second, largest)

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
        return mean, torch.where(
            deviation > STILL * self.largest, deviation, torch.zeros_like(deviation)
        )


def scales(sums: ColumnMoments, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and floored deviation of every column."""
    mean, deviation = sums.moments()
    return mean, floored(deviation, groups)


def correction(
    sums: ColumnMoments, mean: Tensor, deviation: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute m¹ and s¹ from the sums of all z; treat g = m⁰ + s⁰ z as constant if it varies by rounding only."""
    m, s = sums.moments()
    size = mean.abs() + deviation * sums.largest
    exact = torch.where(s * deviation > 10 * STILL * size, s * deviation, torch.zeros_like(s))
    return m, floored(exact, groups) / deviation


def floored(deviation: Tensor, groups: Tensor) -> Tensor:
    """Raise deviations to FLOOR times the median positive one of their group, those of constants to that median.

    A group without any positive deviation takes the median of all; one, if there is none at all.
    """
    moving = deviation > 0
    overall = deviation[moving].median() if moving.any() else deviation.new_ones(())
    result = deviation.clone()
    for group in sorted(set(groups.tolist())):
        inside = groups == group
        alive = deviation[inside & moving]
        usual = alive.median() if len(alive) else overall
        result[inside] = torch.where(
            deviation[inside] > 0, deviation[inside].clamp_min(FLOOR * usual), usual
        )
    return result


UNDER_WAY = 2  # chunks that may wait to be written


class Writer(AbstractContextManager["Writer"]):
    """Write chunks of rows in order, in a thread if they come from a GPU."""

    def __init__(self, values: NDArray[Any], device: torch.device) -> None:
        self.values, self.thread = values, ThreadPoolExecutor(1) if device.type == "cuda" else None
        self.waiting: list[Future[None]] = []

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)

    def put(self, start: int, rows: Tensor) -> None:
        """Write rows from `start` on, at once or in the background."""
        if self.thread is None:
            self.values[start : start + len(rows)] = rows.numpy()
            return
        while len(self.waiting) >= UNDER_WAY:
            self.waiting.pop(0).result()
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(rows.device))
        self.waiting.append(self.thread.submit(self._write, start, host, copied))

    def _write(self, start: int, host: Tensor, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        self.values[start : start + len(host)] = host.numpy()

    def wait(self) -> None:
        """Wait until everything is written."""
        while self.waiting:
            self.waiting.pop(0).result()


SAMPLE = 256  # training images that fix the provisional mean and deviation
COMMIT = 20.0  # seconds between two saved states
PROBED = 2  # images on which the network is tried out
NAMES = ("mean", "deviation", "first", "second", "largest")


class Extraction:
    """Computation of one table."""

    def __init__(
        self,
        images: Any,
        backbone: Backbone,
        folder: Path | None,
        fields: dict[str, Any],
        memory: int | None,
        chunk: int | None,
    ) -> None:
        self.images = images
        self.backbone = backbone
        self.fields = fields
        self.device = backbone.device
        self.train, self.rows = len(images.train.x), len(images.train.x) + len(images.test.x)
        example = backbone.preprocess(self._upload(np.arange(min(PROBED, self.train))))
        kind = fields["kind"]
        seed = fields["seed"]
        precision = fields["precision"]
        self.map: Entk | Penultimate = (
            Entk(backbone.trunk, example, fields["coordinates"], seed, precision)
            if kind == "entk"
            else Penultimate(backbone.trunk, example, precision)
        )
        self.columns = self.map.coordinates
        self.chunk = store.chunk(self.map.room + 48 * backbone.size**2, memory, self.device, chunk)
        self.store = FeatureStore(folder, self.rows, self.columns, fields["dtype"])
        self.sums = ColumnMoments.zeros(self.columns, self.device)

    def run(self, progress: bool | None) -> NDArray[Any]:
        """Compute all rows, standardised; with a folder, map them from there."""
        values, state = self.store.create()
        with Tally(progress, self.rows, "image") as bar:
            if state is None:
                self._provisional()
            done = 0 if state is None else self._resume(state)
            bar.advance("going on" if done else "starting", done)
            started = time.perf_counter()
            self._fill(values, done, bar, started)
            rate = (
                (self.rows - done) / (time.perf_counter() - started) if done < self.rows else None
            )
            bar.advance("standardising", 0)
            before = [] if state is None else [str(name) for name in state["sums"]]
            m, s, sums = self._correct(values, before)
        meta = self.fields | {
            "train": self.train,
            "method": self.map.method,
            "chunk": self.chunk,
            "device": str(self.device),
            "samples_per_second": rate,
            "versions": {"scaffpd": scaffpd.__version__, "torch": torch.__version__},
        }
        chosen = self.map.chosen if isinstance(self.map, Entk) else np.arange(self.columns)
        mean, deviation = (
            t.cpu().numpy() for t in (self.mean + self.deviation * m, self.deviation * s)
        )
        self.store.finish(
            values, meta, sums, not before, coordinates=chosen, mean=mean, deviation=deviation
        )
        return self.store.open() if self.store.stored else values

    def _upload(self, numbers: NDArray[np.int64]) -> Tensor:
        """Copy images, by row number, to the device."""
        first = numbers[numbers < self.train]
        second = numbers[numbers >= self.train] - self.train
        parts = ((self.images.train.x, first), (self.images.test.x, second))
        some = [torch.from_numpy(np.array(x[k])) for x, k in parts if len(k)]
        return torch.cat([part.to(self.device, non_blocking=True) for part in some])

    def _raw(self, numbers: NDArray[np.int64]) -> Tensor:
        """Compute g of some images; if memory runs out, use smaller batches from now on."""
        try:
            return self.map(self.backbone.preprocess(self._upload(numbers)))
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise InputError(
                    "memory-ran-image",
                    "Memory ran out on one image: take smaller images or fewer coordinates.",
                ) from None
        torch.cuda.empty_cache()
        self.chunk = max(1, len(numbers) // 2)
        return torch.cat([self._raw(numbers[: self.chunk]), self._raw(numbers[self.chunk :])])

    def _provisional(self) -> None:
        """Find m⁰ and s⁰ from a few training images."""
        numbers = np.arange(self.train)
        if self.train > SAMPLE:
            numbers = np.sort(
                np.random.default_rng(self.fields["seed"]).choice(self.train, SAMPLE, replace=False)
            )
        few = ColumnMoments.zeros(self.columns, self.device)
        for k in range(0, len(numbers), self.chunk):
            few.add(self._raw(numbers[k : k + self.chunk]))
        self.mean, self.deviation = scales(few, self.map.groups)

    def _fill(self, values: NDArray[Any], done: int, bar: Tally, started: float) -> None:
        """Write z = (g - m⁰) / s⁰ of every image that is still missing."""
        kind = getattr(torch, self.fields["dtype"])
        first = done
        noted = time.monotonic()
        begin = done
        flags = torch.zeros(2, dtype=torch.bool, device=self.device)
        with Writer(values, self.device) as writer:
            while done < self.rows:
                numbers = np.arange(done, min(done + self.chunk, self.rows))
                z = ((self._raw(numbers) - self.mean) / self.deviation).float()
                stored = z.to(kind)
                flags |= torch.stack([~torch.isfinite(z).all(), ~torch.isfinite(stored).all()])
                self.sums.add(stored[: max(self.train - done, 0)])
                writer.put(done, stored)
                done += len(numbers)
                bar.advance(
                    f"{(done - begin) / (time.perf_counter() - started):.3g} images/s", len(numbers)
                )
                if done == self.rows or time.monotonic() - noted >= COMMIT:
                    writer.wait()
                    self._refuse(flags, first, done)
                    self._commit(values, done)
                    first = done
                    noted = time.monotonic()

    def _refuse(self, flags: Tensor, first: int, done: int) -> None:
        broken, overflow = flags.tolist()
        if broken:
            raise InputError(
                "network-features-images",
                f"The network's features of images {first} to {done - 1} are not all finite numbers.",
            )
        if overflow:
            raise InputError(
                "features-images-exceed",
                f"Features of images {first} to {done - 1} exceed float16, which holds up to 65504 deviations: use "
                "dtype='float32'.",
            )

    def _commit(self, values: NDArray[Any], done: int, sums: list[str] | None = None) -> None:
        s = self.sums
        kept = (self.mean, self.deviation, s.first, s.second, s.largest)
        self.store.commit(
            values,
            rows=np.array([done, s.rows]),
            sums=np.array(sums or [], dtype="U64"),
            **{name: value.cpu().numpy() for name, value in zip(NAMES, kept, strict=True)},
        )

    def _resume(self, state: State) -> int:
        """Check that the state belongs to this table and return how many rows are done."""
        if not self._fits(state):
            raise corrupt(self.store.folder, f"{STATE} is not one of this table")
        self.mean, self.deviation, first, second, largest = (
            torch.from_numpy(state[n]).to(self.device) for n in NAMES
        )
        self.sums = ColumnMoments(first, second, largest, int(state["rows"][1]))
        return int(state["rows"][0])

    def _fits(self, state: State) -> bool:
        if not {*NAMES, "rows", "sums"} <= state.keys():
            return False
        rows = state["rows"]
        sums = state["sums"]
        columns = [state[name] for name in NAMES]
        if rows.shape != (2,) or rows.dtype.kind not in "iu" or not 0 <= rows[0] <= self.rows:
            return False
        if sums.ndim != 1 or sums.dtype.kind != "U" or len(sums) > len(self.store.pieces):
            return False
        complete = rows[1] == min(rows[0], self.train) and (rows[0] == self.rows or not len(sums))
        return bool(complete) and all(
            c.shape == (self.columns,) and c.dtype == np.float64 for c in columns
        )

    def _correct(self, values: NDArray[Any], sums: list[str]) -> tuple[Tensor, Tensor, list[str]]:
        """Replace z by (z - m¹) / s¹, piece by piece, in pieces without a checksum."""
        m, s = correction(self.sums, self.mean, self.deviation, self.map.groups)
        sums = list(sums)
        shift = m.float()
        factor = (1 / s).float()
        for start in self.store.pieces[len(sums) :]:
            if not self.store.restore(values, start):
                piece = torch.from_numpy(np.array(values[start : start + self.store.piece])).to(
                    self.device
                )
                piece = ((piece.float() - shift) * factor).to(piece.dtype)
                if not bool(torch.isfinite(piece).all()):
                    self._refuse(torch.tensor([False, True]), start, start + len(piece))
                self.store.replace(values, start, piece.cpu().numpy())
            sums.append(checksum(values[start : start + self.store.piece]))
            self._commit(values, self.rows, sums)
            self.store.forget(start)
        return m, s, sums
