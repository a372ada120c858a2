"""One table of features on its way: provisional statistics, all rows, the last correction."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import scaffpd
from scaffpd.data.folder import checksum
from scaffpd.errors import InputError
from scaffpd.features import room
from scaffpd.features.backbones import Backbone
from scaffpd.features.per_sample import Entk
from scaffpd.features.probe import Penultimate
from scaffpd.features.statistics import Sums, correction, scales
from scaffpd.features.store import STATE, State, Store, corrupt
from scaffpd.features.writer import Writer
from scaffpd.progress import Tally

SAMPLE = 256  # training images that fix the provisional mean and deviation
COMMIT = 20.0  # seconds between notes of how far it is
PROBED = 2  # images on which the network is tried out
NAMES = ("mean", "deviation", "first", "second", "largest")


class Part(Protocol):
    """Pictures, uint8 (n, height, width, 3)."""

    @property
    def x(self) -> NDArray[np.uint8]:
        """The pictures."""


class Images(Protocol):
    """Training and test pictures, a name, and a digest that tells their content from any other."""

    @property
    def train(self) -> Part:
        """What the statistics are of."""

    @property
    def test(self) -> Part:
        """The rest."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def digest(self) -> str:
        """Tells the content."""


class Job:
    """One table on its way."""

    def __init__(
        self, images: Images, backbone: Backbone, folder: Path | None, fields: dict[str, Any],
        memory: int | None, chunk: int | None,
    ) -> None:  # fmt: skip
        self.images, self.backbone, self.fields, self.device = images, backbone, fields, backbone.device
        self.train, self.rows = len(images.train.x), len(images.train.x) + len(images.test.x)
        example = backbone.preprocess(self._upload(np.arange(min(PROBED, self.train))))
        kind, seed, precision = fields["kind"], fields["seed"], fields["precision"]
        self.map: Entk | Penultimate
        if kind == "entk":
            self.map = Entk(backbone.trunk, example, fields["coordinates"], seed, precision)
        else:
            self.map = Penultimate(backbone.trunk, example, precision)
        self.columns = self.map.coordinates
        self.chunk = room.chunk(self.map.room + 48 * backbone.size**2, memory, self.device, chunk)
        self.store = Store(folder, self.rows, self.columns, fields["dtype"])
        self.sums = Sums.zeros(self.columns, self.device)

    def run(self, progress: bool | None) -> NDArray[Any]:
        """All rows, standardised; with a folder, mapped from there."""
        values, state = self.store.create()
        with Tally(progress, self.rows, "image") as bar:
            if state is None:
                self._provisional()
            done = 0 if state is None else self._resume(state)
            bar.advance("going on" if done else "starting", done)
            started = time.perf_counter()
            self._fill(values, done, bar, started)
            rate = (self.rows - done) / (time.perf_counter() - started) if done < self.rows else None
            bar.advance("standardising", 0)
            before = [] if state is None else [str(name) for name in state["sums"]]
            m, s, sums = self._correct(values, before)
        meta = self.fields | {
            "train": self.train, "method": self.map.method, "chunk": self.chunk, "device": str(self.device),
            "samples_per_second": rate, "versions": {"scaffpd": scaffpd.__version__, "torch": torch.__version__},
        }  # fmt: skip
        chosen = self.map.chosen if isinstance(self.map, Entk) else np.arange(self.columns)
        mean, deviation = self.mean + self.deviation * m, self.deviation * s
        self.store.finish(
            values,
            meta,
            sums,
            not before,
            coordinates=chosen,
            mean=mean.cpu().numpy(),
            deviation=deviation.cpu().numpy(),
        )
        return values if self.store.folder is None else self.store.open()

    # ------------------------------------------------------------------ rows

    def _upload(self, numbers: NDArray[np.int64]) -> Tensor:
        """Images by row number, uint8 on the device."""
        first, second = numbers[numbers < self.train], numbers[numbers >= self.train] - self.train
        parts = [
            torch.from_numpy(np.array(x[k]))
            for x, k in ((self.images.train.x, first), (self.images.test.x, second))
            if len(k)
        ]
        return torch.cat([part.to(self.device, non_blocking=True) for part in parts])

    def _raw(self, numbers: NDArray[np.int64]) -> Tensor:
        """G of some images; where memory runs out, of fewer at a time from now on."""
        try:
            return self.map(self.backbone.preprocess(self._upload(numbers)))
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise InputError(
                    "Memory ran out on a single image: take smaller images or fewer coordinates."
                ) from None
        torch.cuda.empty_cache()
        self.chunk = max(1, len(numbers) // 2)
        return torch.cat([self._raw(numbers[: self.chunk]), self._raw(numbers[self.chunk :])])

    def _provisional(self) -> None:
        """m⁰ and s⁰ from a few training images."""
        numbers = np.arange(self.train)
        if self.train > SAMPLE:
            numbers = np.sort(np.random.default_rng(self.fields["seed"]).choice(self.train, SAMPLE, replace=False))
        few = Sums.zeros(self.columns, self.device)
        for k in range(0, len(numbers), self.chunk):
            few.add(self._raw(numbers[k : k + self.chunk]))
        self.mean, self.deviation = scales(few, self.map.groups)

    def _fill(self, values: NDArray[Any], done: int, bar: Tally, started: float) -> None:
        """Z = (g - m⁰) / s⁰ of every image that is not there yet."""
        kind, first, noted, begin = getattr(torch, self.fields["dtype"]), done, time.monotonic(), done
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
                bar.advance(f"{(done - begin) / (time.perf_counter() - started):.3g} images/s", len(numbers))
                if done == self.rows or time.monotonic() - noted >= COMMIT:
                    writer.wait()
                    self._refuse(flags, first, done)
                    self._commit(values, done)
                    first, noted = done, time.monotonic()

    def _refuse(self, flags: Tensor, first: int, done: int) -> None:
        broken, overflow = flags.tolist()
        if broken:
            raise InputError(f"The network's features of images {first} to {done - 1} are not all finite numbers.")
        if overflow:
            raise InputError(
                f"Features of images {first} to {done - 1} exceed float16, which holds up to 65504 deviations: use "
                "dtype='float32'."
            )

    # ------------------------------------------------------------------ state and the last correction

    def _commit(self, values: NDArray[Any], done: int, sums: list[str] | None = None) -> None:
        s = self.sums
        kept = (self.mean, self.deviation, s.first, s.second, s.largest)
        self.store.commit(
            values, rows=np.array([done, s.rows]), sums=np.array(sums or [], dtype="U64"),
            **{name: value.cpu().numpy() for name, value in zip(NAMES, kept, strict=True)},
        )  # fmt: skip

    def _resume(self, state: State) -> int:
        """How many rows are there, after a look at whether the state can be one of this table."""
        if not self._fits(state):
            assert self.store.folder is not None
            raise corrupt(self.store.folder, f"{STATE} is not one of this table")
        self.mean, self.deviation, first, second, largest = (torch.from_numpy(state[n]).to(self.device) for n in NAMES)
        self.sums = Sums(first, second, largest, int(state["rows"][1]))
        return int(state["rows"][0])

    def _fits(self, state: State) -> bool:
        if not {*NAMES, "rows", "sums"} <= state.keys():
            return False
        rows, sums, columns = state["rows"], state["sums"], [state[name] for name in NAMES]
        if rows.shape != (2,) or rows.dtype.kind not in "iu" or not 0 <= rows[0] <= self.rows:
            return False
        if sums.ndim != 1 or sums.dtype.kind != "U" or len(sums) > len(self.store.pieces):
            return False
        complete = rows[1] == min(rows[0], self.train) and (rows[0] == self.rows or not len(sums))
        return bool(complete) and all(c.shape == (self.columns,) and c.dtype == np.float64 for c in columns)

    def _correct(self, values: NDArray[Any], sums: list[str]) -> tuple[Tensor, Tensor, list[str]]:
        """Z ← (z - m¹) / s¹ in place, piece by piece, of those that do not have a checksum yet."""
        m, s = correction(self.sums, self.mean, self.deviation, self.map.groups)
        sums, shift, factor = list(sums), m.float(), (1 / s).float()
        for start in self.store.pieces[len(sums) :]:
            if not self.store.restore(values, start):
                piece = torch.from_numpy(np.array(values[start : start + self.store.piece])).to(self.device)
                piece = ((piece.float() - shift) * factor).to(piece.dtype)
                self._finite(piece, start)
                self.store.replace(values, start, piece.cpu().numpy())
            sums.append(checksum(values[start : start + self.store.piece]))
            self._commit(values, self.rows, sums)
            self.store.forget(start)
        return m, s, sums

    def _finite(self, piece: Tensor, start: int) -> None:
        if not bool(torch.isfinite(piece).all()):
            self._refuse(torch.tensor([False, True]), start, start + len(piece))
