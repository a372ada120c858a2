"""Image loaders: each layout yields the images, labels and names that were put into it."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import image_layouts as layouts
import numpy as np
import pytest
from image_layouts import check

import scaffpd as sp
from scaffpd.errors import InputError


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_cifar10_python_batches_of_any_age(tmp_path, protocol):
    made = layouts.cifar10_batches(tmp_path / "cifar-10-batches-py", protocol)
    images = sp.data.cifar10(tmp_path)
    check(
        images,
        made,
        layouts.CIFAR10,
        "The python batches in 'cifar-10-batches-py': a subset, 100 of 50,000",
    )
    assert images.name == "CIFAR-10"
    assert sp.data.cifar10(tmp_path / "cifar-10-batches-py").digest == images.digest


def test_loaders_are_listed_before_their_first_use():
    code = "import scaffpd as sp; print(set(sp.data.__all__) <= set(dir(sp.data)), 'cifar10' in vars(sp.data))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "True False\n"
    )


def test_cifar100_python_files_have_fine_labels(tmp_path):
    made = layouts.cifar100_batches(tmp_path / "cifar100" / "cifar-100-python")
    check(
        sp.data.cifar100(tmp_path),
        made,
        layouts.CIFAR100,
        "The python batches in 'cifar-100-python'",
    )


@pytest.mark.parametrize("name", ["cifar10", "CIFAR-10", "cifar-10-images", "."])
def test_class_folders(tmp_path, name):
    place = tmp_path / name
    made = layouts.class_folders(place, layouts.CIFAR10, 32)
    (place / "train" / "bird" / "notes.txt").write_text("no image")
    (place / "train" / ".hidden").mkdir()
    check(sp.data.cifar10(tmp_path), made, layouts.CIFAR10, "Class folders of image files in")


def test_tiny_imagenet_as_published(tmp_path):
    made = layouts.tiny_published(tmp_path / "tiny-imagenet-200")
    names = [f"crane ({wnid})" for wnid in layouts.WNIDS[:2]] + [
        f"beast {k}" for k in range(2, 199)
    ]
    images = sp.data.tiny_imagenet(tmp_path)
    check(
        images,
        made,
        [*names, layouts.WNIDS[199]],
        "The published layout in 'tiny-imagenet-200', validation images as",
    )
    assert "200 of 100,000 training images (1 a class)" in images.source


@pytest.mark.parametrize("inner", ["", "images"])
def test_tiny_imagenet_with_sorted_validation_images(tmp_path, inner):
    place = tmp_path / "tiny-imagenet-200"
    made = layouts.class_folders(place, layouts.WNIDS, 64, ("train", "val"), inner, each=(1, 1))
    (place / "val" / "images").mkdir()  # what is left after sorting
    check(sp.data.tiny_imagenet(tmp_path), made, layouts.WNIDS, "The published layout")


def test_the_better_layout_wins_and_the_root_comes_last(tmp_path, monkeypatch):
    layouts.class_folders(tmp_path, ("another", "dataset"), 32)
    layouts.class_folders(tmp_path / "cifar10", layouts.CIFAR10, 32)
    monkeypatch.setenv("SCAFFPD_DATA", str(tmp_path))
    assert sp.data.cifar10().source.startswith("Class folders")
    layouts.cifar10_batches(tmp_path / "cifar-10-batches-py")
    assert sp.data.cifar10().source.startswith("The python batches")


def test_checksums_are_respected(tmp_path):
    place = tmp_path / "cifar10" / "cifar-10-batches-py"
    layouts.cifar10_batches(place)
    right = hashlib.sha256((place / "data_batch_2").read_bytes()).hexdigest()
    (tmp_path / "SHA256SUMS").write_text(
        f"{right}  cifar10/cifar-10-batches-py/data_batch_2\n{'0' * 64}  other/file\n"
    )
    (place / "SHA256SUMS").write_text(f"{right.upper()} *data_batch_2\n\n")
    assert len(sp.data.cifar10(tmp_path).train) == 100
    (place.parent / "SHA256SUMS").write_text(f"{'ab' * 32}  cifar-10-batches-py/test_batch\n")
    found = hashlib.sha256((place / "test_batch").read_bytes()).hexdigest()[:12]
    with pytest.raises(
        InputError,
        match=f"test_batch' is damaged or another file: .* expects abababababab…, found {found}…",
    ):
        sp.data.cifar10(tmp_path)
    (tmp_path / "SHA256SUMS").write_text("\nabc  file\n")
    with pytest.raises(
        InputError, match=r"SHA256SUMS' has the line 'abc  file': expected 64 digits"
    ):
        sp.data.cifar10(tmp_path)


# ------------------------------------------------------------------ images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    layouts.cifar10_batches(root / "cifar-10-batches-py")
    return sp.data.cifar10(root)


def test_the_digest_sees_every_pixel_label_and_class(images):
    def variant(x=images.train.x, y=images.train.y, classes=images.classes):
        return sp.data.Images(
            "CIFAR-10", sp.data.Pictures(x, y), images.test, classes, "Elsewhere."
        )

    assert variant().digest == images.digest
    assert len(images.digest) == 64
    pixel = images.train.x.copy()
    label = images.train.y.copy()
    pixel[3, 4, 5, 1] ^= 1
    label[7] = (label[7] + 1) % 10
    others = [variant(x=pixel), variant(y=label), variant(classes=(*images.classes, "more"))]
    assert len({images.digest, *(other.digest for other in others)}) == 4


def test_a_subset_is_balanced_and_fixed_by_its_seed(images):
    small = images.subset(3, 1, seed=4)
    assert np.bincount(small.train.y).tolist() == [3] * 10
    assert np.bincount(small.test.y).tolist() == [1] * 10
    assert small.source.endswith(
        "; of these 3 training and 1 test images a class, drawn with seed 4."
    )
    assert small.digest == images.subset(3, 1, seed=4).digest != images.subset(3, 1, seed=5).digest
    everything = {
        pixels.tobytes(): label
        for pixels, label in zip(images.train.x, images.train.y, strict=True)
    }
    assert all(
        everything[p.tobytes()] == k for p, k in zip(small.train.x, small.train.y, strict=True)
    )
    assert images.subset(10, 1).digest == images.digest  # all of them, in their old order
    with pytest.raises(
        InputError, match="cannot take 11 training images of class 'airplane': there are 10"
    ):
        images.subset(11, 1)
    with pytest.raises(InputError, match="whole number test_per_class >= 1"):
        images.subset(1, 0)


def test_images_describe_themselves_briefly(images):
    assert "Pictures(100 of 32×32 pixels)" in repr(images)
    assert len(repr(images)) < 300


def test_images_refuse_what_does_not_fit_together(images):
    x = images.train.x
    y = images.train.y
    with pytest.raises(InputError, match="uint8 of shape"):
        sp.data.Pictures(x.astype(float), y)
    with pytest.raises(InputError, match="int64 labels"):
        sp.data.Pictures(x, y[1:])
    with pytest.raises(
        InputError, match="labels go from 0 to 4, but those of its training images go from 0 to 9"
    ):
        sp.data.Images("Mine", images.train, images.test, images.classes[:5], "")
    with pytest.raises(InputError, match="at least one test image"):
        sp.data.Images("Mine", images.train, sp.data.Pictures(x[:0], y[:0]), images.classes, "")


def test_the_data_module_loads_neither_pillow_nor_scikit_learn():
    code = "import sys, scaffpd.data; print(*sorted({'PIL', 'sklearn', 'matplotlib', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
