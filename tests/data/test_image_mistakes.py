"""Missing, damaged and foreign image files: one sentence each, that names the file."""

from __future__ import annotations

import os
import pickle
import shutil

import image_layouts as layouts
import numpy as np
import pytest
from image_layouts import refused

import scaffpd as sp


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (sp.data.cifar10, "no CIFAR-10 in .*cifar-10-batches-py.*class folders"),
        (sp.data.cifar100, "no CIFAR-100 in .*cifar-100-python.*class folders"),
        (sp.data.tiny_imagenet, "no Tiny-ImageNet in .*tiny-imagenet-200.*wnids.txt"),
    ],
)
def test_no_data(tmp_path, monkeypatch, load, words):
    refused(load, tmp_path, words)
    refused(load, tmp_path / "nowhere", "no data folder '.*nowhere'")
    monkeypatch.delenv("SCAFFPD_DATA", raising=False)
    refused(
        load, None, "not part of the package: name its folder by --data, folder= or SCAFFPD_DATA"
    )


@pytest.mark.parametrize("stray", ["test", "train"])
def test_a_stray_file_is_no_data(tmp_path, stray):
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / stray).write_text("mine")
    refused(sp.data.cifar100, tmp_path, "There is no CIFAR-100 in")


class TestBatches:
    @pytest.fixture
    def place(self, tmp_path):
        layouts.cifar10_batches(tmp_path / "cifar-10-batches-py")
        return tmp_path / "cifar-10-batches-py"

    def test_a_missing_batch(self, place):
        (place / "data_batch_3").unlink()
        refused(sp.data.cifar10, place.parent, "data_batch_3' is missing")

    def test_an_unreadable_batch(self, place):
        (place / "data_batch_3").unlink()
        (place / "data_batch_3").mkdir()
        refused(sp.data.cifar10, place.parent, "data_batch_3' cannot be read: Is a directory")

    @pytest.mark.parametrize("keep", [0, 10, 500])
    def test_a_truncated_batch(self, place, keep):
        (place / "test_batch").write_bytes((place / "test_batch").read_bytes()[:keep])
        refused(sp.data.cifar10, place.parent, "test_batch' is truncated or damaged")

    @pytest.mark.parametrize("attack", [os.getcwd, eval, np.load, np.random.default_rng])
    def test_a_pickle_that_asks_for_more_than_arrays(self, place, attack):
        (place / "test_batch").write_bytes(pickle.dumps({"data": attack}))
        refused(
            sp.data.cifar10,
            place.parent,
            rf"test_batch' asks for [\w.]+{attack.__name__}, which no CIFAR file needs",
        )

    def test_a_codec_that_no_batch_needs(self, place):
        (place / "test_batch").write_bytes(b"c_codecs\nencode\n(Vx\nVrot13\ntR.")
        refused(sp.data.cifar10, place.parent, "test_batch' encodes text as 'rot13'")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ([1, 2], "holds a list"),
            ({"data": np.zeros((2, 3072), np.uint8)}, "has no 'labels'"),
            ({"labels": [0]}, "has no 'data'"),
            (
                {"data": np.zeros((2, 3000), np.uint8), "labels": [0, 1]},
                r"shape \(n, 3072\), got uint8 of shape \(2, 3000\)",
            ),
            ({"data": np.zeros((2, 3072)), "labels": [0, 1]}, "got float64"),
            ({"data": "pixels", "labels": [0, 1]}, "got str"),
            (
                {"data": np.zeros((2, 3072), np.uint8), "labels": [0]},
                "one whole label for each of its 2 images",
            ),
            ({"data": np.zeros((2, 3072), np.uint8), "labels": [0.5, 1]}, "one whole label"),
            (
                {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]},
                "test images go from 0 to 10",
            ),
            ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "at least one test image"),
        ],
    )
    def test_a_batch_with_other_content(self, place, content, words):
        (place / "test_batch").write_bytes(pickle.dumps(content))
        refused(sp.data.cifar10, place.parent, words)

    def test_names_of_other_classes(self, place):
        (place / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat", "dog"] * 6}))
        refused(
            sp.data.cifar10, place.parent, "CIFAR-10 has 10 classes, but the files in .* name 12"
        )
        (place / "batches.meta").write_bytes(pickle.dumps({"label_names": "cats"}))
        refused(sp.data.cifar10, place.parent, "list of class names")


class TestFolders:
    @pytest.fixture
    def place(self, tmp_path):
        layouts.class_folders(tmp_path / "cifar10", layouts.CIFAR10, 32)
        return tmp_path / "cifar10"

    @pytest.mark.parametrize(
        "content", [b"", b"no image", layouts.written(np.zeros((32, 32, 3), np.uint8))[:60]]
    )
    def test_an_unreadable_image(self, place, content):
        (place / "train" / "cat" / "x.jpg").write_bytes(content)
        refused(sp.data.cifar10, place.parent, "cat/x.jpg' is no readable image")

    def test_an_image_of_another_size(self, place):
        (place / "train" / "cat" / "x.png").write_bytes(
            layouts.written(np.zeros((32, 30, 3), np.uint8))
        )
        refused(sp.data.cifar10, place.parent, "cat/x.png' has 30×32 pixels, expected 32×32")

    def test_classes_that_differ(self, place):
        (place / "test" / "zebra").mkdir()
        refused(sp.data.cifar10, place.parent, "test' has a folder 'zebra' that is no class")
        (place / "test" / "zebra").rmdir()
        shutil.rmtree(place / "test" / "dog")
        refused(sp.data.cifar10, place.parent, "test' has no folder for the class 'dog'")
        (place / "test" / "dog").mkdir()
        refused(sp.data.cifar10, place.parent, "test/dog' has no images")
        shutil.rmtree(place / "test")
        refused(
            sp.data.cifar10,
            place.parent,
            "no folder .*test': expected one with a folder of images per class",
        )

    def test_another_dataset(self, place):
        refused(sp.data.cifar100, place, "CIFAR-100 has 100 classes, but the files in .* name 10")


class TestTiny:
    @pytest.fixture
    def place(self, tmp_path):
        layouts.tiny_published(tmp_path / "tiny-imagenet-200")
        return tmp_path / "tiny-imagenet-200"

    def test_missing_pieces(self, place):
        (place / "val" / "images" / "val_7.JPEG").unlink()
        refused(sp.data.tiny_imagenet, place.parent, "val_7.JPEG' is missing")
        (place / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99999999\t0\n")
        refused(
            sp.data.tiny_imagenet,
            place.parent,
            "gives 'val_0.JPEG' the label 'n99999999', which is no class",
        )
        (place / "val" / "val_annotations.txt").write_bytes(b"\xff\xfe\xff")
        refused(sp.data.tiny_imagenet, place.parent, "no text in UTF-8")
        (place / "val" / "val_annotations.txt").unlink()
        refused(
            sp.data.tiny_imagenet,
            place.parent,
            "val_annotations.txt' is missing, and .*val' is not sorted",
        )
