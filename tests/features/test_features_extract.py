"""Tables of features: the same for any chunk, standardised exactly, resumed, and refused when damaged."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from scaffpd.errors import InputError
from scaffpd.features import Backbone, Entk, compute, extract, features, store
from scaffpd.features.compute import ColumnMoments, scales
from scaffpd.files import DRAFT, lock_folder


@dataclass
class Rows:
    x: np.ndarray


@dataclass
class Pictures:
    train: Rows
    test: Rows
    name: str = "noise"
    digest: str = "abc"


class Net(nn.Module):
    """Layers whose gradients differ by orders of magnitude, and a unit that never lives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm = nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6)
        self.b, self.fc = nn.Conv2d(6, 10, 3), nn.Linear(10, 3)
        with torch.no_grad():
            self.norm.bias[0] = -100

    def forward(self, x):
        return self.fc(1e-4 * torch.tanh(self.b(torch.relu(self.norm(self.a(x))))).mean((2, 3)))


def pictures(train=70, test=15, seed=0):
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (train + test, 10, 10, 3), dtype=np.uint8)
    x[::3] //= 4
    return Pictures(Rows(x[:train]), Rows(x[train:]))


@pytest.fixture
def net():
    return Backbone.of(Net(), "fc", size=12)


def raw(images, net, coordinates, seed=0):
    x = net.preprocess(torch.from_numpy(np.concatenate([images.train.x, images.test.x])))
    return Entk(net.trunk, x, coordinates, seed)(x).double().numpy()


def groups(images, net, coordinates):
    x = net.preprocess(torch.from_numpy(images.train.x[:2]))
    return Entk(net.trunk, x, coordinates).groups.numpy()


def standardised(images, net, coordinates):
    g = raw(images, net, coordinates)
    some = g[: len(images.train.x)]
    deviation = np.where(some.std(0) > 1e-6 * np.abs(some).max(0), some.std(0), 0)
    usual = np.ones(coordinates)
    group = groups(images, net, coordinates)
    for k in np.unique(group):
        moving = deviation[(group == k) & (deviation > 0)]
        usual[group == k] = np.sort(moving)[(len(moving) - 1) // 2] if len(moving) else np.nan
    return (g - some.mean(0)) / np.maximum(deviation, usual / 100), deviation > usual / 100


def folder_of(cache):
    (folder,) = cache.iterdir()
    return folder


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("sample", [8, 1000])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_are_standardised_gradients(dtype, sample, net, monkeypatch):
    monkeypatch.setattr(compute, "SAMPLE", sample)
    images = pictures()
    table = features(images, net, coordinates=300, dtype=dtype)
    expected, alive = standardised(images, net, 300)
    assert 20 < alive.sum() < 300  # some units never live
    assert table.values.dtype == dtype
    assert table.scale == pytest.approx(300**-0.5)
    step = 2e-3 if dtype == "float16" else 1e-4
    np.testing.assert_allclose(table.values[:, alive], expected[:, alive], rtol=step, atol=step)
    train = table.values[:70].astype(np.float64)
    np.testing.assert_allclose(train[:, alive].mean(0), 0, atol=step / 3)
    np.testing.assert_allclose(train[:, alive].std(0), 1, atol=step / 3)
    assert train[:, ~alive].std(0).max() < 1 - step


def test_a_coordinate_that_hardly_ever_moves_is_not_blown_up(net, monkeypatch):
    """One training image touches it barely, a test image fully: millions of deviations, if nobody looked."""
    images = pictures()
    real = Entk.__call__
    images.train.x[3] = 0
    images.test.x[2] = 255

    def spiked(self, x):
        rows = real(self, x)
        usual = 1e-5
        sums = x.mean((1, 2, 3))
        rows[:, 299] = torch.where(sums < -2, 1e-6 * usual, 0) + torch.where(sums > 2, usual, 0)
        rows[:, 298] = 3.5  # and one that never does
        return rows

    monkeypatch.setattr(Entk, "__call__", spiked)
    table = features(images, net, coordinates=300)
    assert 0.01 < abs(float(table.values[72, 299])) < 1000
    np.testing.assert_array_equal(table.values[:, 298], 0)


def test_mean_and_floored_deviation_of_sums():
    z = torch.tensor([[0.0, 1.0, 5.0, 0.0], [2.0, 1.0, 5.0, 1e-6], [4.0, 1.0, 5.0, 0.0]])
    sums = ColumnMoments.zeros(4, torch.device("cpu"))
    sums.add(z)
    mean, deviation = scales(sums, torch.tensor([0, 0, 1, 0]))
    torch.testing.assert_close(mean, z.double().mean(0))
    usual = float(
        torch.median(z.double().std(0, correction=0)[[0, 3]])
    )  # of those that move: the lower of two
    alone = [(8 / 3) ** 0.5, usual, usual, z[:, 3].double().std(correction=0)]
    torch.testing.assert_close(deviation, torch.tensor(alone, dtype=torch.float64))


def test_the_last_features(net, tmp_path):
    images = pictures()
    table = features(images, net, "penultimate", dtype="float32", cache=tmp_path)
    x = net.preprocess(torch.from_numpy(np.concatenate([images.train.x, images.test.x])))
    h = net.features(x).double().numpy()
    np.testing.assert_allclose(
        table.values, (h - h[:70].mean(0)) / h[:70].std(0), rtol=1e-3, atol=1e-3
    )
    assert table.values.shape == (85, 10)


@pytest.mark.parametrize("chunk", [1, 7, 70, 1000])
def test_chunks_do_not_matter(chunk, net):
    images = pictures()
    whole = features(images, net, coordinates=200, dtype="float32")
    cut = features(images, net, coordinates=200, dtype="float32", chunk=chunk)
    np.testing.assert_allclose(cut.values, whole.values, rtol=1e-4, atol=1e-4)


def test_an_array_of_images(net):
    images = pictures(20, 0)
    a = features(images, net, coordinates=50)
    b = features(images.train.x, net, coordinates=50)
    np.testing.assert_array_equal(a.values, b.values)
    images.train.x.setflags(write=False)
    np.testing.assert_array_equal(features(images, net, coordinates=50).values, a.values)


# ------------------------------------------------------------------ the cache


def test_the_second_time_nothing_is_computed(net, tmp_path, monkeypatch, capsys):
    first = features(pictures(), net, coordinates=100, cache=tmp_path, chunk=9, progress=True)
    assert "image 85/85" in capsys.readouterr().err
    monkeypatch.setattr(extract, "Extraction", None)
    again = features(pictures(), net, coordinates=100, cache=tmp_path, memory="1GB", verify=True)
    np.testing.assert_array_equal(first.values, again.values)
    assert isinstance(again.values, np.memmap)
    assert first.key == again.key == folder_of(tmp_path).name
    files = ["lock", "meta.json", "normalisation.npz", "values.npy", "verified.json"]
    assert sorted(os.listdir(folder_of(tmp_path))) == files
    meta = json.loads((folder_of(tmp_path) / "meta.json").read_text())
    assert meta["samples_per_second"] > 0
    assert meta["method"] == "layers"


def test_the_normalisation_is_kept(net, tmp_path):
    images = pictures()
    table = features(images, net, coordinates=100, cache=tmp_path, dtype="float32")
    with np.load(folder_of(tmp_path) / "normalisation.npz") as n:
        z = (raw(images, net, 100) - n["mean"]) / n["deviation"]
        assert len(n["coordinates"]) == 100
    np.testing.assert_allclose(table.values, z, rtol=1e-3, atol=1e-3)


def test_the_key_tells_what_matters(net, tmp_path):
    images = pictures()
    same = {"coordinates": 20, "chunk": 50}
    other = pictures()
    other.digest = "other"
    keys = [
        features(*what, cache=tmp_path, **same | more).key
        for what, more in [
            ((images, net), {}),
            ((images, net), {"seed": 1}),
            ((images, net), {"coordinates": 21}),
            ((images, net), {"dtype": "float32"}),
            ((images, net), {"kind": "penultimate"}),
            ((other, net), {}),
            ((images, Backbone.of(Net(), "fc", size=13)), {}),
        ]
    ]
    assert len(set(keys)) == len(keys) == len(list(tmp_path.iterdir()))
    assert features(images, net, cache=tmp_path, coordinates=20, chunk=3).key == keys[0]


class StopError(Exception):
    pass


@pytest.mark.parametrize("at", [1, 4, 9, 12])
def test_an_interrupted_run_goes_on(at, net, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "COMMIT", 0.0)
    monkeypatch.setattr(compute, "SAMPLE", 10)
    images = pictures()
    options = {"coordinates": 60, "chunk": 10, "dtype": "float32"}
    expected = features(images, net, **options).values
    calls = []
    real = Entk.__call__

    def counted(self, x):
        calls.append(len(x))
        if len(calls) == at:
            raise StopError
        return real(self, x)

    monkeypatch.setattr(Entk, "__call__", counted)
    if at <= 10:  # one chunk for the provisional statistics, nine for all rows
        with pytest.raises(StopError):
            features(images, net, cache=tmp_path, **options)
    table = features(images, net, cache=tmp_path, **options)
    np.testing.assert_allclose(table.values, expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == (10 if at > 10 else 11)


@pytest.mark.parametrize(
    "moment", ["before the copy", "after the copy", "half way", "after the note"]
)
def test_the_correction_in_place_survives_interruptions(moment, net, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PIECE", 60 * 4 * 20)  # twenty rows
    monkeypatch.setattr(compute, "SAMPLE", 10)
    images = pictures()
    options = {"coordinates": 60, "dtype": "float32", "chunk": 85}
    expected = features(images, net, **options).values
    replace = store.FeatureStore.replace
    commit = store.FeatureStore.commit
    seen = []

    def broken(self, values, start, piece):
        if start != 40:
            return replace(self, values, start, piece)
        if moment in ("after the copy", "half way"):
            np.save(self.folder / f"piece-40-{store.checksum(piece)}.npy", piece)
        if moment == "half way":
            values[40:47] = piece[:7]
        raise StopError

    def noted(self, values, **state):
        commit(self, values, **state)
        seen.append(len(state["sums"]))
        if seen[-1] == 3:
            raise StopError

    name, substitute = ("commit", noted) if moment == "after the note" else ("replace", broken)
    with monkeypatch.context() as patch:
        patch.setattr(store.FeatureStore, name, substitute)
        with pytest.raises(StopError):
            features(images, net, cache=tmp_path, **options)
    with monkeypatch.context() as patch:
        patch.setattr(Entk, "__call__", None)
        table = features(images, net, cache=tmp_path, **options)
    np.testing.assert_array_equal(table.values, expected)
    assert not list(folder_of(tmp_path).glob("piece*"))
    features(images, net, cache=tmp_path, verify=True, **options)


def damage_meta(folder):
    (folder / "meta.json").write_text("{")


def damage_fields(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"seed": 5}))


def damage_size(folder):
    os.truncate(folder / "values.npy", 1000)


def damage_bits(folder):
    with (folder / "values.npy").open("r+b") as file:
        file.seek(2000)
        byte = file.read(1)
        file.seek(2000)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(folder / "values.npy")  # clocks of files may tick slowly


def damage_missing(folder):
    (folder / "values.npy").unlink()


@pytest.mark.parametrize(
    "damage", [damage_meta, damage_fields, damage_size, damage_bits, damage_missing]
)
def test_damage_is_found(damage, net, tmp_path):
    features(pictures(), net, coordinates=40, cache=tmp_path)
    damage(folder_of(tmp_path))
    with pytest.raises(
        InputError, match=r"are damaged .*: delete that folder and run again"
    ) as error:
        features(pictures(), net, coordinates=40, cache=tmp_path)
    assert str(folder_of(tmp_path)) in str(error.value)
    shutil.rmtree(folder_of(tmp_path))
    features(pictures(), net, coordinates=40, cache=tmp_path)


def counted(monkeypatch):
    """The numbers of pieces that were hashed to verify a table."""
    seen = []
    real = store.checksums

    def noted(values, starts, size):
        seen.append(len(starts))
        return real(values, starts, size)

    monkeypatch.setattr(store, "checksums", noted)
    return seen


def test_tables_are_verified_once_and_again_when_their_file_changes(net, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PIECE", 40 * 2 * 20)  # twenty rows
    seen = counted(monkeypatch)
    options = {"coordinates": 40, "cache": tmp_path}
    expected = features(pictures(), net, **options).values
    features(pictures(), net, **options)
    assert seen == []  # what has just been computed is known to be right
    folder = folder_of(tmp_path)
    os.utime(folder / "values.npy", ns=(1, 1))
    for _ in range(3):
        features(pictures(), net, **options)
    assert seen == [5]
    assert json.loads((folder / "verified.json").read_text())["mtime_ns"] == 1
    features(pictures(), net, verify=True, **options)
    assert seen == [5, 5]
    for content in ("{", "[]", '{"size": 1}', None):
        (folder / "verified.json").unlink() if content is None else (
            folder / "verified.json"
        ).write_text(content)
        np.testing.assert_array_equal(features(pictures(), net, **options).values, expected)
    assert seen == [5] * 6
    damage_bits(folder)
    features(pictures(), net, verify=False, **options)
    assert seen == [5] * 6
    for _ in range(2):  # damage is never taken for verified
        with pytest.raises(InputError, match="checksum"):
            features(pictures(), net, **options)


def test_a_cache_that_may_only_be_read(net, tmp_path, monkeypatch):
    features(pictures(), net, coordinates=40, cache=tmp_path)
    (folder_of(tmp_path) / "verified.json").unlink()

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("scaffpd.files.atomic_write", denied)
    assert len(features(pictures(), net, coordinates=40, cache=tmp_path)) == 85


def interrupted(net, cache, monkeypatch, at=40, **options):
    """A run that stops while it corrects the piece from row `at` on, after the copy has been written."""
    monkeypatch.setattr(store, "PIECE", 60 * 4 * 20)  # twenty rows
    monkeypatch.setattr(compute, "SAMPLE", 10)
    real = store.FeatureStore.replace

    def broken(self, values, start, piece):
        real(self, values, start, piece)
        if start == at:
            raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(store.FeatureStore, "replace", broken)
        with pytest.raises(StopError):
            features(pictures(), net, cache=cache, coordinates=60, dtype="float32", **options)
    return folder_of(cache)


def test_pieces_of_an_earlier_run_are_not_restored(net, tmp_path, monkeypatch):
    folder = interrupted(net, tmp_path, monkeypatch)
    options = {"coordinates": 60, "dtype": "float32"}
    expected = features(pictures(), net, **options).values
    (folder / "state.npz").unlink()
    (copy,) = folder.glob("piece-*.npy")
    other = np.load(copy) + 1
    np.save(folder / "piece-0.npy", other)
    np.save(folder / f"piece-20-{store.checksum(other)}.npy", other)
    (folder / f".piece-20.npy.abc{DRAFT}").touch()
    np.testing.assert_array_equal(
        features(pictures(), net, cache=tmp_path, **options).values, expected
    )
    assert not [*folder.glob("piece-*"), *folder.glob(".*")]


@pytest.mark.parametrize("damage", ["bits", "cut", "empty", "shape", "dtype", "pickle", "nameless"])
def test_a_damaged_copy_of_a_piece(damage, net, tmp_path, monkeypatch):
    folder = interrupted(net, tmp_path, monkeypatch)
    (copy,) = folder.glob("piece-40-*.npy")
    piece = np.load(copy)
    if damage == "bits":
        np.save(copy, np.where(np.arange(60) == 7, piece + 1, piece))
    elif damage == "shape":
        np.save(copy, piece.reshape(40, 30))
    elif damage == "dtype":
        np.save(copy, piece.view(np.int32))
    elif damage == "pickle":
        np.save(copy, np.array([{}]), allow_pickle=True)
    elif damage == "nameless":
        copy.rename(folder / "piece-40.npy")
    else:
        os.truncate(copy, 1000 if damage == "cut" else 0)
    with pytest.raises(
        InputError, match=r"are damaged \(the copy of rows from 40 on does not have its checksum\)"
    ):
        features(pictures(), net, cache=tmp_path, coordinates=60, dtype="float32")


def test_one_copy_at_a_time_takes_room(net, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PIECE", 60 * 2 * 20)
    copies = []
    real = store.FeatureStore.commit

    def counted(self, values, **state):
        real(self, values, **state)
        copies.append(len(list(self.folder.glob("piece-*"))))

    monkeypatch.setattr(store.FeatureStore, "commit", counted)
    features(pictures(), net, cache=tmp_path, coordinates=60)
    assert copies == [0, 1, 1, 1, 1, 1]


def test_what_lay_on_disk_between_two_runs_is_verified(net, tmp_path, monkeypatch):
    folder = interrupted(net, tmp_path, monkeypatch)
    with (folder / "values.npy").open("r+b") as file:
        file.seek(2000)  # a row that had its checksum
        file.write(b"\0\0\0\0")
    options = {"coordinates": 60, "dtype": "float32", "cache": tmp_path}
    features(pictures(), net, **options)
    with pytest.raises(InputError, match="rows from 0 on do not have their checksum"):
        features(pictures(), net, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {},
        lambda state: {k: v for k, v in state.items() if k != "rows"},
        lambda state: {k: v for k, v in state.items() if k != "largest"},
        lambda state: state | {"rows": np.array(3)},
        lambda state: state | {"rows": np.array([100, 70])},
        lambda state: state | {"rows": np.array([30, 30])},
        lambda state: state | {"mean": np.zeros(3)},
        lambda state: state | {"sums": np.array(["a"] * 9)},
        lambda state: state | {"sums": np.zeros(2)},
    ],
)
def test_a_state_that_is_not_one_of_the_table(change, net, tmp_path, monkeypatch):
    folder = interrupted(net, tmp_path, monkeypatch)
    with np.load(folder / "state.npz") as file:
        state = dict(file)
    np.savez(folder / "state.npz", **change(state))
    with pytest.raises(
        InputError, match=r"are damaged \(state\.npz is not one of this table\): delete that folder"
    ):
        features(pictures(), net, cache=tmp_path, coordinates=60, dtype="float32")


def test_a_damaged_state(net, tmp_path, monkeypatch):
    monkeypatch.setattr(
        store.FeatureStore, "finish", lambda *_, **__: (_ for _ in ()).throw(StopError)
    )
    with pytest.raises(StopError):
        features(pictures(), net, coordinates=40, cache=tmp_path)
    os.truncate(folder_of(tmp_path) / "state.npz", 100)
    with pytest.raises(InputError, match=r"state\.npz cannot be read"):
        features(pictures(), net, coordinates=40, cache=tmp_path)


def test_one_writer_at_a_time(net, tmp_path):
    features(pictures(), net, coordinates=40, cache=tmp_path)
    folder = folder_of(tmp_path)
    (folder / "meta.json").unlink()
    with lock_folder(folder, "busy"), pytest.raises(InputError, match="Another process is writing"):
        features(pictures(), net, coordinates=40, cache=tmp_path)


# ------------------------------------------------------------------ room


def test_a_full_disk_is_refused_before_any_work(net, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=85 * 2 * 60)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage)
    with monkeypatch.context() as patch:
        patch.setattr(compute.Extraction, "_provisional", None)
        with pytest.raises(
            InputError, match=r"34 kB and 10\.2 kB are free .*: coordinates=30 would fit"
        ):
            features(pictures(), net, coordinates=100, cache=tmp_path)
        with pytest.raises(InputError, match=r"dtype='float16', or coordinates=15 would fit"):
            features(pictures(), net, coordinates=30, cache=tmp_path, dtype="float32")
    assert len(features(pictures(), net, coordinates=30, cache=tmp_path)) == 85


def test_the_disk_needs_all_rows_and_one_piece(tmp_path, monkeypatch):
    def full(free, columns=1000):
        monkeypatch.setattr(
            store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free)
        )
        store.check_table(tmp_path, 500, columns, 2, piece=100_000)

    full(1_100_000)  # and not twice a million
    with pytest.raises(
        InputError, match=r"need 1\.1 MB and 1\.1 MB are free .*: coordinates=999 would fit"
    ):
        full(1_099_999)
    full(1_099_999, 999)
    with pytest.raises(InputError, match="coordinates=50 would fit"):
        full(100_000)
    full(100_000, 50)


def test_too_little_memory(net, monkeypatch):
    with pytest.raises(
        InputError, match=r"One image at a time needs about .* set memory='1MB' or more"
    ):
        features(pictures(), net, coordinates=40, memory=1000)
    monkeypatch.setattr(store, "free_memory", lambda _: 10_000)
    with pytest.raises(InputError, match="a cache folder on a disk"):
        features(pictures(), net, coordinates=40, memory="1GB", chunk=5, dtype="float32")


def test_the_smaller_of_chunk_and_memory_counts(net):
    with pytest.raises(
        InputError, match=r"One image at a time needs about .* and 10 B may be used"
    ):
        features(pictures(), net, coordinates=40, memory=10, chunk=40)
    cpu = torch.device("cpu")
    assert store.chunk(1000, 5999, cpu, 40) == 5
    assert store.chunk(1000, 10**9, cpu, 400) == store.chunk(1000, None, cpu, 400) == 400


def test_chunks_grow_with_memory():
    cpu = torch.device("cpu")
    assert [store.chunk(1000, memory, cpu) for memory in (1000, 5999, 10**9)] == [
        1,
        5,
        store.LARGEST["cpu"],
    ]
    assert store.chunk(1000, None, cpu) == store.LARGEST["cpu"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4e9), ("512MiB", 2**29), ("1.5 kB", 1500), ("100", 100), (7, 7), (None, None)],
)
def test_sizes(text, size):
    assert store.parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4XB", "1.2.3MB", "-1GB", 0, -5, float("inf")])
def test_what_is_no_size(text):
    with pytest.raises(InputError, match="such as '4GB'"):
        store.parse_memory(text)


def test_memory_that_runs_out_halves_the_chunk(net, monkeypatch):
    expected = features(pictures(), net, coordinates=40, dtype="float32").values
    real = Entk.__call__

    def small(self, x):
        if len(x) > 6:
            raise torch.OutOfMemoryError
        return real(self, x)

    monkeypatch.setattr(Entk, "__call__", small)
    table = features(pictures(), net, coordinates=40, dtype="float32", chunk=50)
    np.testing.assert_allclose(table.values, expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ what cannot work


def test_half_precision_that_overflows_is_refused(net, monkeypatch):
    monkeypatch.setattr(compute, "SAMPLE", 4)
    images = pictures()
    images.test.x[:] = 255
    real = Entk.__call__

    def loud(self, x):
        rows = real(self, x)
        return rows * torch.where(x.mean((1, 2, 3)) > 2, 1e8, 1.0)[:, None]

    monkeypatch.setattr(Entk, "__call__", loud)
    with pytest.raises(
        InputError, match="exceed float16, which holds up to 65504 deviations: use dtype='float32'"
    ):
        features(images, net, coordinates=40)
    features(images, net, coordinates=40, dtype="float32")
    monkeypatch.setattr(Entk, "__call__", lambda self, x: real(self, x) * float("nan"))
    with pytest.raises(InputError, match="not all finite"):
        features(images, net, coordinates=40)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "ntk"}, "did you mean 'entk'"),
        ({"dtype": "float64"}, "Unknown dtype"),
        ({"coordinates": 0}, "coordinates >= 1"),
        ({"chunk": 0}, "chunk >= 1"),
        ({"seed": -1}, "features needs a whole number seed >= 0, got -1"),
        ({"seed": "a"}, "features needs a whole number seed >= 0, got 'a'"),
        ({"precision": "half"}, "Unknown precision"),
        ({"device": "gpu"}, "choose 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_options_that_cannot_work(change, words, net):
    with pytest.raises(InputError, match=words):
        features(pictures(), net, **change)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_gpu(net):
    with pytest.raises(InputError, match="no CUDA device"):
        features(pictures(), net, device="cuda")


def test_images_that_are_none(net):
    with pytest.raises(InputError, match="uint8 of shape"):
        features(np.zeros((3, 8, 8, 3)), net)
    with pytest.raises(InputError, match="got NoneType"):
        features("cifar10", net)
    with pytest.raises(InputError, match="at least one training image"):
        features(pictures(0, 5), net)


def test_a_cache_that_is_a_file(net, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="Cannot write to the folder"):
        features(pictures(), net, cache=tmp_path / "file")


@pytest.mark.parametrize("wrong", ["efficientnet-lite0", torch.nn.Linear(3, 2)])
def test_a_network_is_no_backbone(wrong):
    with pytest.raises(InputError, match=r"features needs a Backbone such as .* got (str|Linear)"):
        features(np.zeros((2, 8, 8, 3), dtype=np.uint8), wrong)
