"""Packed files and mosaics of images, which only the paper's experiments read: fabricated, damaged, and real ones.

The real ones are read where SCAFFPD_DATA names a folder that has them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import image_layouts as layouts
import numpy as np
import pytest
from image_layouts import check, refused

from experiments import packed

TINY_NAMES = {
    "wnids": np.array(layouts.WNIDS),
    "words": np.array([f"beast {k}, Latin" for k in range(200)]),
}
ROOT = Path(os.environ.get("SCAFFPD_DATA") or "nowhere")


def test_packed_cifar10(tmp_path):
    made = layouts.packed(tmp_path / "cifar10", 32, {"names": np.array(layouts.CIFAR10)})
    check(
        packed.cifar10(tmp_path), made, layouts.CIFAR10, "Packed JPEG images (lossy) in 'cifar10'"
    )


def test_packed_tiny_imagenet(tmp_path):
    made = layouts.packed(tmp_path / "tiny_imagenet", 64, TINY_NAMES, "train2.npz", "val.npz")
    images = packed.tiny_imagenet(tmp_path)
    check(images, made, [f"beast {k}" for k in range(200)], "Packed JPEG images in 'tiny_imagenet'")
    assert (
        "a subset, 400 of 100,000 training images (2 a class) and 200 of 10,000 test images"
        in images.source
    )


def test_a_mosaic(tmp_path):
    made = layouts.mosaic(tmp_path / "cifar100")
    check(packed.cifar100(tmp_path), made, layouts.CIFAR100, "A lossy JPEG mosaic in 'cifar100'")


def test_the_better_layout_wins_and_the_root_comes_last(tmp_path, monkeypatch):
    layouts.class_folders(tmp_path, ("another", "dataset"), 32)
    layouts.packed(tmp_path / "cifar10", 32, {"names": np.array(layouts.CIFAR10)})
    monkeypatch.setenv("SCAFFPD_DATA", str(tmp_path))
    assert packed.cifar10().source.startswith("Packed")
    layouts.cifar10_batches(tmp_path / "cifar-10-batches-py")
    assert packed.cifar10().source.startswith("The python batches")


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (packed.cifar10, "no CIFAR-10 in .*cifar-10-batches-py.*class folders.*train.npz"),
        (packed.cifar100, "no CIFAR-100 in .*cifar-100-python.*class folders.*train_mosaic.jpg"),
        (packed.tiny_imagenet, "no Tiny-ImageNet in .*tiny-imagenet-200.*wnids.txt.*val.npz"),
    ],
)
def test_no_data(tmp_path, load, words):
    refused(load, tmp_path, words)


class TestPacked:
    @pytest.fixture
    def place(self, tmp_path):
        layouts.packed(tmp_path / "cifar10", 32, {"names": np.array(layouts.CIFAR10)})
        return tmp_path / "cifar10"

    def change(self, place, **changes):
        with np.load(place / "test.npz") as archive:
            arrays = {**archive, **changes}
        np.savez(
            place / "test.npz",
            **{name: value for name, value in arrays.items() if value is not None},
        )

    def test_missing_and_truncated_archives(self, place):
        content = (place / "test.npz").read_bytes()
        for keep in (0, 100, len(content) // 2):
            (place / "test.npz").write_bytes(content[:keep])
            refused(packed.cifar10, place.parent, "test.npz' is truncated or damaged")
        (place / "test.npz").unlink()
        refused(packed.cifar10, place.parent, "test.npz' is missing")
        shutil.copy(place / "train.npz", place / "train9.npz")
        refused(
            packed.cifar10,
            place.parent,
            "several files of training images, 'train.npz' and 'train9.npz'",
        )

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"labels": None}, "has no 'labels'"),
            ({"labels": np.arange(3)}, "one whole label for each of its 10 images"),
            ({"labels": np.zeros(10)}, "one whole label"),
            ({"names": None}, "does not name its classes"),
            ({"names": np.array([f"c{k}" for k in range(10)])}, "differ in their classes"),
            ({"offsets": np.array([0, 5])}, "offsets do not fit"),
            ({"header_offsets": np.array([0.5])}, "offsets do not fit"),
            ({"header_id": np.full(10, 7)}, "do not fit together"),
            ({"header": None}, "has no 'header'"),
            ({"labels": np.array([None] * 10)}, "no archive of plain arrays"),
        ],
    )
    def test_archives_with_other_content(self, place, changes, words):
        self.change(place, **changes)
        refused(packed.cifar10, place.parent, words)

    @pytest.mark.parametrize("number", [0, 5])
    def test_a_damaged_image_is_named_by_its_number(self, place, number):
        with np.load(place / "test.npz") as archive:
            data = archive["data"].copy()
            offsets = archive["offsets"].copy()
        gone = slice(offsets[number] + 20, offsets[number + 1])
        offsets[number + 1 :] -= gone.stop - gone.start
        self.change(place, data=np.delete(data, gone), offsets=offsets)
        refused(packed.cifar10, place.parent, f"Image {number} of .*test.npz' is no readable image")

    def test_images_of_another_size(self, place):
        arrays, _ = layouts.packed_arrays(*layouts.pictures(10, 1, 16))
        self.change(place, **arrays)
        refused(
            packed.cifar10, place.parent, "Image 0 of .*test.npz' has 16×16 pixels, expected 32×32"
        )


class TestMosaic:
    @pytest.fixture
    def place(self, tmp_path):
        layouts.mosaic(tmp_path / "cifar100")
        return tmp_path / "cifar100"

    def test_damage(self, place):
        content = (place / "test_mosaic.jpg").read_bytes()
        (place / "test_mosaic.jpg").write_bytes(content[: len(content) // 2])
        refused(packed.cifar100, place.parent, "test_mosaic.jpg' is no readable image")
        (place / "test_mosaic.jpg").unlink()
        refused(packed.cifar100, place.parent, "test_mosaic.jpg' is missing")
        (place / "labels.npz").unlink()
        refused(packed.cifar100, place.parent, "labels.npz' is missing")

    @pytest.mark.parametrize("shape", [(320, 310), (320, 288)])
    def test_tiles_that_do_not_fit(self, place, shape):
        (place / "test_mosaic.jpg").write_bytes(
            layouts.written(np.zeros((*shape, 3), np.uint8), "JPEG")
        )
        refused(
            packed.cifar100,
            place.parent,
            f"{shape[1]}×320 pixels, which is no mosaic of 32×32 tiles",
        )


def needs(file):
    return pytest.mark.skipif(
        not (ROOT / file).is_file(), reason=f"SCAFFPD_DATA names no folder with {file}"
    )


def statistics(x, step=10):
    """Mean and standard deviation of every channel, from every `step`-th image."""
    pixels = x[::step].reshape(-1, 3).astype(np.float32) / 255
    return pixels.mean(0, dtype=np.float64), pixels.std(0, dtype=np.float64)


def balanced(pictures, classes, each):
    return np.bincount(pictures.y, minlength=classes).tolist() == [each] * classes


@pytest.mark.long
@needs("cifar10/train.npz")
def test_cifar10():
    images = packed.cifar10()
    assert balanced(images.train, 10, 5000)
    assert balanced(images.test, 10, 1000)
    assert images.train.x.shape == (50000, 32, 32, 3)
    assert (images.classes[0], images.classes[9]) == ("airplane", "truck")
    mean, deviation = statistics(images.train.x)
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=0.005)
    np.testing.assert_allclose(deviation, [0.2452, 0.2428, 0.2606], atol=0.003)


@pytest.mark.long
@needs("cifar100/train_mosaic.jpg")
def test_cifar100():
    images = packed.cifar100()
    assert balanced(images.train, 100, 500)
    assert balanced(images.test, 100, 100)
    assert (images.classes[0], images.classes[99]) == ("apple", "worm")
    assert "lossy JPEG mosaic" in images.source
    mean, deviation = statistics(images.train.x)
    np.testing.assert_allclose(mean, [0.5071, 0.4865, 0.4409], atol=0.005)
    np.testing.assert_allclose(deviation, [0.2673, 0.2564, 0.2762], atol=0.003)


@pytest.mark.long
@needs("tiny_imagenet/train150.npz")
def test_tiny_imagenet():
    images = packed.tiny_imagenet()
    assert balanced(images.train, 200, 150)
    assert balanced(images.test, 200, 50)
    assert images.train.x.shape == (30000, 64, 64, 3)
    assert images.classes[0] == "goldfish"
    assert "a subset, 30,000 of 100,000 training images (150 a class)" in images.source
    mean, deviation = statistics(images.train.x)
    np.testing.assert_allclose(mean, [0.480, 0.448, 0.398], atol=0.01)
    np.testing.assert_allclose(deviation, [0.277, 0.269, 0.282], atol=0.01)
    grey = (images.train.x[::10, ..., 0] == images.train.x[::10, ..., 2]).all((1, 2))
    assert 0 < grey.mean() < 0.05  # a few are greyscale, and read all the same
