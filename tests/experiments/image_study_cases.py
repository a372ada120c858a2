"""A data root without any real data: a few coloured squares of every class, and weights drawn at random."""

from __future__ import annotations

import csv
import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import scaffpd.study.comparison as compete
from experiments import image_plans, image_study
from experiments import reproduce as commands
from scaffpd.data import dirichlet
from scaffpd.features import Backbone, EfficientNetLite0

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
EACH = {
    "cifar10": (100, 50),
    "cifar100": (20, 10),
    "tinyimagenet": (3, 1),
}  # training and test images of a class
WEIGHTS = "efficientnet_lite0_imagenet.npz"


def pictures(classes, each, side, seed):
    """Every class has a colour of its own, blurred by noise; sorted by class."""
    random = np.random.default_rng(seed)
    shades = np.linspace(20, 235, 6)
    colours = np.stack(np.meshgrid(shades, shades, shades), -1).reshape(-1, 3)
    colours = colours[np.linspace(0, len(colours) - 1, classes).astype(int)]
    y = np.repeat(np.arange(classes), each)
    x = colours[y][:, None, None] + random.normal(0, 15, (len(y), side, side, 3))
    return x.clip(0, 255).astype(np.uint8), y


def python_batches(root):
    """CIFAR-10 and CIFAR-100 as their authors publish them."""
    ten = root / "cifar-10-batches-py"
    hundred = root / "cifar-100-python"
    ten.mkdir()
    hundred.mkdir()
    for k in range(5):
        (ten / f"data_batch_{k + 1}").write_bytes(_batch(10, EACH["cifar10"][0] // 5, k, "labels"))
    (ten / "test_batch").write_bytes(_batch(10, EACH["cifar10"][1], 5, "labels"))
    (ten / "batches.meta").write_bytes(pickle.dumps({"label_names": list(NAMES)}))
    for seed, (name, each) in enumerate(zip(("train", "test"), EACH["cifar100"], strict=True)):
        (hundred / name).write_bytes(_batch(100, each, seed, "fine_labels"))
    (hundred / "meta").write_bytes(
        pickle.dumps({"fine_label_names": [f"thing {k}" for k in range(100)]})
    )


def _batch(classes, each, seed, key):
    x, y = pictures(classes, each, 32, seed)
    return pickle.dumps({"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), key: y.tolist()})


def packed_tiny(root):
    """Tiny-ImageNet as JPEG files whose common beginnings are stored once."""
    place = root / "tiny_imagenet"
    place.mkdir()
    wnids = np.array([f"n{k:08}" for k in range(200)])
    words = np.array([f"beast {k}" for k in range(200)])
    for seed, (name, each) in enumerate(zip(("train4", "val"), EACH["tinyimagenet"], strict=True)):
        x, y = pictures(200, each, 64, seed)
        files = []
        for pixels in x:
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            files.append(file.getvalue())
        cut = files[0].index(b"\xff\xda")
        assert len({file[:cut] for file in files}) == 1
        ends = [file[cut:] for file in files]
        np.savez(
            place / f"{name}.npz",
            data=np.frombuffer(b"".join(ends), np.uint8),
            offsets=np.cumsum([0, *map(len, ends)]),
            labels=y.astype(np.uint8),
            header=np.frombuffer(files[0][:cut], np.uint8),
            header_offsets=np.array([0, cut]),
            header_id=np.zeros(len(y), np.uint8),
            wnids=wnids,
            words=words,
        )


def random_weights(root, seed=0):
    """EfficientNet-Lite0 as it is before any training, its matrices in half precision."""
    torch.manual_seed(seed)
    state = {name: value.numpy() for name, value in EfficientNetLite0().state_dict().items()}
    kept = {
        name: value for name, value in state.items() if not name.endswith("num_batches_tracked")
    }
    (root / "weights").mkdir(exist_ok=True)
    np.savez(
        root / "weights" / WEIGHTS,
        **{k: v.astype(np.float16) if v.ndim > 1 else v for k, v in kept.items()},
    )


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    """Every file's bytes, by its name."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def size_of_png(path):
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


# ------------------------------------------------------------------ commands, as small as they can be

SMALLER = {"cifar10": (100, 5), "cifar100": (5, 2), "tinyimagenet": (2, 1)}
OPTIONS = (
    "--size",
    "16",
    "--coordinates",
    "300",
    "--rounds",
    "3",
    "--tune",
    "2",
    "--seeds",
    "2",
    "--local-steps",
    "2",
)


def light(name="efficientnet-lite0", folder=None, size=224, seed=0):
    """A network of two layers in the place of EfficientNet-Lite0, for tests that are not about features."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (
            nn.Conv2d(3, 16, 3, stride=3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 16),
        )
        return Backbone.of(nn.Sequential(*layers), name="light", size=size)


_CUTS = {}


def remembered(labels, *rest, **more):
    """`dirichlet`, which draws hundreds of times until each client has enough of so few images: once per partition."""
    key = (labels.tobytes(), *rest[1:], *more.items())
    if key not in _CUTS:
        _CUTS[key] = dirichlet(labels, *rest, **more)
    return [part.copy() for part in _CUTS[key]]


def reproduce(root, what, out, *more, network=light, each=SMALLER, options=OPTIONS):
    """The command's exit code; in one process, with as few images of a class as `each` says.

    Without a network, EfficientNet-Lite0 is read from the data folder.
    """
    where = (
        "--data",
        str(root),
        "--cache",
        str(root / "features"),
        "--out",
        str(out),
        "--device",
        "cpu",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compete, "cores", lambda: 1)
        patch.setattr(image_plans, "PER_CLASS", each)
        patch.setattr(image_plans, "dirichlet", remembered)
        if network is not None:
            patch.setattr(image_study, "backbone", network)
        return commands.run([what, "--small", *where, *options, *more])


def sentence(capsys):
    """What went to standard error, which must be one line without a traceback; nothing else is printed."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(".\n") or captured.err.endswith("?\n")
    assert "Traceback" not in captured.err
    return captured.err
