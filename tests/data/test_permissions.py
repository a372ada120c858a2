"""Data that may not be read: one sentence that names the folder or file."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import image_layouts as layouts
import numpy as np
import pytest

import scaffpd as sp
from scaffpd.errors import InputError
from scaffpd.features import backbone, store
from scaffpd.files import lock_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of another kind")
NOBODY = 65534


@contextmanager
def nobody():
    """Root may read everything, so be somebody else."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def root():
    """A folder that everybody may list, which pytest's own is not."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    yield place
    for folder, _, _ in os.walk(place, topdown=True):
        os.chmod(folder, 0o755)
    shutil.rmtree(place)


def refused(act, words):
    with nobody(), pytest.raises(InputError, match=words) as caught:
        act()
    text = str(caught.value)
    assert text.endswith("Permission denied.")
    assert "\n" not in text
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
@pytest.mark.parametrize("which", [".", "cifar10", "cifar10/train", "cifar10/train/class 0"])
def test_a_folder_of_images(root, which, mode):
    layouts.class_folders(root / "cifar10", [f"class {k}" for k in range(10)], 32)
    (root / which).chmod(mode)
    refused(lambda: sp.data.cifar10(root), f"{root.name}.* cannot be read")


def test_a_folder_in_a_folder(root):
    layouts.cifar10_batches(root / "cifar10" / "cifar-10-batches-py")
    (root / "cifar10" / "cifar-10-batches-py").chmod(0)
    refused(lambda: sp.data.cifar10(root), "cifar-10-batches-py' cannot be read")


def test_files(root):
    layouts.cifar10_batches(root / "cifar-10-batches-py")
    (root / "cifar-10-batches-py" / "data_batch_2").chmod(0)
    refused(lambda: sp.data.cifar10(root), "data_batch_2' cannot be read")
    (root / "SHA256SUMS").touch(0)
    refused(lambda: sp.data.cifar10(root), "SHA256SUMS' cannot be read")


def test_the_way_there(root):
    (root / "data").mkdir()
    root.chmod(0o600)
    for load in (
        sp.data.cifar10,
        sp.data.tiny_imagenet,
        lambda folder: sp.data.adult(folder=folder),
    ):
        refused(lambda load=load: load(root / "data"), "data' cannot be read")
    refused(lambda: backbone(folder=root / "data"), "data' cannot be read")


@pytest.mark.parametrize("which", ["weights", "weights/efficientnet_lite0_imagenet.npz"])
def test_weights(root, which):
    (root / "weights").mkdir()
    (root / "weights" / "efficientnet_lite0_imagenet.npz").touch()
    (root / which).chmod(0)
    refused(lambda: backbone(folder=root), "efficientnet_lite0_imagenet.npz' cannot be read")


@pytest.mark.parametrize("which", [".", "adult", "adult/adult.data.csv.gz"])
def test_tables_of_people(root, which):
    (root / "adult").mkdir()
    (root / "adult" / "adult.data.csv.gz").touch()
    (root / which).chmod(0)
    refused(lambda: sp.data.adult(folder=root), "cannot be read")


def test_tables_of_people_that_are_cut_off(root):
    (root / "adult").mkdir()
    content = gzip.compress(bytes(np.random.default_rng(0).integers(32, 100, 5000, dtype=np.uint8)))
    (root / "adult" / "adult.data.csv.gz").write_bytes(content[:2000])
    with pytest.raises(InputError, match=r"adult.data.csv.gz' is cut off or damaged"):
        sp.data.adult(folder=root)


def test_cached_features(root):
    (root / "meta.json").write_text("{}")
    (root / "values.npy").touch(0)
    refused(
        lambda: store.FeatureStore(root, 3, 3, "float16").open(),
        "cached features .* cannot be read",
    )
    (root / "meta.json").chmod(0)
    refused(lambda: store.finished(root, {}, 3), "cached features .* cannot be read")
    root.chmod(0)
    refused(lambda: store.finished(root, {}, 3), "cached features .* cannot be read")
    refused(lambda: lock_folder(root, "busy").__enter__(), "Cannot write to the folder")
