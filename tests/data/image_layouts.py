"""Every layout that the image loaders read, fabricated with a few random images."""

from __future__ import annotations

import io
import pickle
import struct

import numpy as np
import pytest
from PIL import Image

from scaffpd.errors import InputError

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = tuple(f"thing {k:02}" for k in range(100))
WNIDS = tuple(f"n{1000 + 7 * k:08}" for k in range(200))


def pictures(classes, each, side, seed=0):
    """(x, y): `each` random images of every class, sorted by class."""
    y = np.repeat(np.arange(classes), each)
    return np.random.default_rng(seed).integers(0, 256, (len(y), side, side, 3), dtype=np.uint8), y


def written(x, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(x).save(file, kind)
    return file.getvalue()


def read(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def rows(x):
    """Images as CIFAR stores them: red, green, blue."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def python2(data, labels):
    """A batch as Python 2 and an old NumPy pickled it: the published files are of this kind."""
    n, d = data.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        b"(K\x01K" + bytes([n]) + b"M" + struct.pack("<H", d) + b"\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", n * d) + data.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([int(k)]) for k in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def cifar10_batches(place, protocol=2):
    """Five batches of two images a class and one to test; returns (x, y) of both."""
    place.mkdir(parents=True)
    (x, y), test = pictures(10, 10, 32), pictures(10, 1, 32, seed=1)
    order = np.random.default_rng(2).permutation(100)
    x = x[order]
    y = y[order]
    for k in range(5):
        own = slice(20 * k, 20 * k + 20)
        batch = {b"data": rows(x[own]), b"labels": y[own].tolist(), b"batch_label": b"x"}
        (place / f"data_batch_{k + 1}").write_bytes(pickle.dumps(batch, protocol))
    (place / "test_batch").write_bytes(python2(rows(test[0]), test[1]))
    (place / "batches.meta").write_bytes(
        pickle.dumps({b"label_names": [name.encode() for name in CIFAR10]}, 2)
    )
    return (x, y), test


def cifar100_batches(place):
    place.mkdir(parents=True)
    parts = pictures(100, 2, 32), pictures(100, 1, 32, seed=1)
    for name, (x, y) in zip(("train", "test"), parts, strict=True):
        batch = {"data": rows(x), "fine_labels": y.tolist(), "coarse_labels": [0] * len(y)}
        (place / name).write_bytes(pickle.dumps(batch, 5))
    (place / "meta").write_bytes(pickle.dumps({"fine_label_names": list(CIFAR100)}))
    return parts


def class_folders(place, classes, side, parts=("train", "test"), inner="", each=(2, 1)):
    """<part>/<class>/<inner>/<number>.png; returns (x, y) of both parts."""
    made = []
    for seed, (part, number) in enumerate(zip(parts, each, strict=True)):
        x, y = pictures(len(classes), number, side, seed)
        for i, (pixels, label) in enumerate(zip(x, y, strict=True)):
            folder = place / part / classes[label] / inner
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i:04}.png").write_bytes(written(pixels))
        made.append((x, y))
    return made


def tiny_published(place):
    """Images are PNG under a JPEG's name, so that pixels can be compared; wnids.txt is not sorted, as published."""
    train = pictures(200, 1, 64)
    val = pictures(200, 1, 64, seed=1)
    for i, pixels in enumerate(train[0]):
        folder = place / "train" / WNIDS[i] / "images"
        folder.mkdir(parents=True)
        (folder / f"{WNIDS[i]}_0.JPEG").write_bytes(written(pixels))
    (place / "val" / "images").mkdir(parents=True)
    (place / "test" / "images").mkdir(parents=True)
    order = np.random.default_rng(3).permutation(200)
    for i in order:
        (place / "val" / "images" / f"val_{i}.JPEG").write_bytes(written(val[0][i]))
    notes = [f"val_{i}.JPEG\t{WNIDS[i]}\t0\t32\t44\t62" for i in order]
    (place / "val" / "val_annotations.txt").write_text("\n".join(notes) + "\n")
    (place / "wnids.txt").write_text("\n".join(reversed(WNIDS)) + "\n")
    words = [
        f"{wnid}\t{'crane' if k < 2 else f'beast {k}'}, Latin name"
        for k, wnid in enumerate(WNIDS[:199])
    ]
    (place / "words.txt").write_text("\n".join(words) + "\n")
    return train, (val[0][order], val[1][order])


def packed_arrays(x, y, grey=()):
    """JPEG images whose common beginnings are stored once, and the pixels they decode to; some are greyscale."""
    whole = [written(pixels[..., 0] if i in grey else pixels, "JPEG") for i, pixels in enumerate(x)]
    cut = [content.index(b"\xff\xda") for content in whole]
    headers = sorted({content[:k] for content, k in zip(whole, cut, strict=True)})
    ends = [content[k:] for content, k in zip(whole, cut, strict=True)]
    arrays = {
        "data": np.frombuffer(b"".join(ends), np.uint8),
        "offsets": np.cumsum([0, *map(len, ends)]),
        "labels": y.astype(np.uint8),
        "header": np.frombuffer(b"".join(headers), np.uint8),
        "header_offsets": np.cumsum([0, *map(len, headers)]),
        "header_id": np.array(
            [headers.index(c[:k]) for c, k in zip(whole, cut, strict=True)], np.uint8
        ),
    }
    return arrays, np.stack([read(content) for content in whole])


def packed(place, side, names, train="train.npz", test="test.npz"):
    """Two packed files; returns (x, y) of both as JPEG leaves them."""
    place.mkdir(parents=True)
    classes = len(next(iter(names.values())))
    made = []
    for seed, (file, each) in enumerate(((train, 2), (test, 1))):
        x, y = pictures(classes, each, side, seed)
        arrays, seen = packed_arrays(x, y, grey=(1, 4))
        np.savez(place / file, **arrays, **names)
        made.append((seen, y))
    return made


def mosaic(place):
    """20 × 10 tiles to train on, 10 × 10 to test on."""
    place.mkdir(parents=True)
    made = []
    for name, shape, each in (("train", (20, 10), 2), ("test", (10, 10), 1)):
        x, y = pictures(100, each, 32, each)
        large = x.reshape(*shape, 32, 32, 3).swapaxes(1, 2).reshape(32 * shape[0], 32 * shape[1], 3)
        content = written(large, "JPEG")
        (place / f"{name}_mosaic.jpg").write_bytes(content)
        seen = (
            read(content)
            .reshape(shape[0], 32, shape[1], 32, 3)
            .swapaxes(1, 2)
            .reshape(-1, 32, 32, 3)
        )
        made.append((seen, y))
    np.savez(place / "labels.npz", fine_names=np.array(CIFAR100))
    return made


def check(images, made, classes, source):
    for pictures, (x, y) in zip((images.train, images.test), made, strict=True):
        np.testing.assert_array_equal(pictures.x, x)
        np.testing.assert_array_equal(pictures.y, y)
        assert pictures.x.dtype == np.uint8
        assert pictures.y.dtype == np.int64
    assert images.classes == tuple(classes)
    assert images.source.startswith(source)
    assert images.source.endswith("test images.")


def refused(load, folder, match):
    with pytest.raises(InputError, match=match) as caught:
        load(folder)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert caught.value.__cause__ is None
