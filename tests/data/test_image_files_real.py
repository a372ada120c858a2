"""The packed files themselves, where SCAFFPD_DATA names a folder that has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp

ROOT = Path(os.environ.get("SCAFFPD_DATA") or "nowhere")


def needs(file):
    return pytest.mark.skipif(not (ROOT / file).is_file(), reason=f"SCAFFPD_DATA names no folder with {file}")


def statistics(x, step=10):
    """Mean and standard deviation of every channel, from every `step`-th image."""
    pixels = x[::step].reshape(-1, 3).astype(np.float32) / 255
    return pixels.mean(0, dtype=np.float64), pixels.std(0, dtype=np.float64)


def balanced(pictures, classes, each):
    return np.bincount(pictures.y, minlength=classes).tolist() == [each] * classes


@needs("cifar10/train.npz")
def test_cifar10():
    images = sp.data.cifar10()
    assert balanced(images.train, 10, 5000)
    assert balanced(images.test, 10, 1000)
    assert images.train.x.shape == (50000, 32, 32, 3)
    assert (images.classes[0], images.classes[9]) == ("airplane", "truck")
    mean, deviation = statistics(images.train.x)
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=0.005)
    np.testing.assert_allclose(deviation, [0.2452, 0.2428, 0.2606], atol=0.003)


@needs("cifar100/train_mosaic.jpg")
def test_cifar100():
    images = sp.data.cifar100()
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
    images = sp.data.tiny_imagenet()
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
