"""`scaffpd features` and the benchmark, on pictures made up for the purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import scaffpd.data
from scaffpd import cli
from scaffpd.features import ResNet18Trunk
from scaffpd.features.store import VALUES


@dataclass(frozen=True)
class Half:
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Fake:
    train: Half
    test: Half
    name: str = "cifar10"
    digest: str = "fake"

    def subset(self, train, test, seed=0):
        cut = [
            Half(half.x[: 2 * n], half.y[: 2 * n])
            for half, n in ((self.train, train), (self.test, test))
        ]
        return replace(self, train=cut[0], test=cut[1], digest=f"fake {train} {test} {seed}")


def half(n):
    return Half(
        np.random.default_rng(n).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8), np.arange(n) % 2
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    torch.manual_seed(0)
    (tmp_path / "weights").mkdir()
    weights = {k: v.numpy() for k, v in ResNet18Trunk().state_dict().items()}
    np.savez(tmp_path / "weights" / "resnet18_imagenet_to_layer3_bnfolded.npz", **weights)
    monkeypatch.setattr(
        scaffpd.data, "cifar10", lambda folder=None: Fake(half(20), half(10)), raising=False
    )
    return tmp_path


def command(folder, *more):
    options = (
        "--data",
        str(folder),
        "--backbone",
        "resnet18-layer3",
        "--size",
        "32",
        "--coordinates",
        "50",
    )
    return [
        "features",
        "cifar10",
        *options,
        "--device",
        "cpu",
        "--cache",
        str(folder / "cache"),
        *more,
    ]


def test_a_table_and_its_folder_are_named(folder, capsys):
    assert cli.run(command(folder)) == 0
    out = capsys.readouterr().out.splitlines()
    assert (
        out[0]
        == "cifar10: 20 training and 10 test images of 8 × 8 pixels; resnet18-layer3 at 32 × 32."
    )
    assert out[1].startswith("30 × 50 in float16 (3 kB), computed at ")
    assert (Path(out[2]) / VALUES).exists()
    assert cli.run(command(folder, "--verify")) == 0
    assert capsys.readouterr().out.splitlines()[2] == out[2]


@pytest.mark.parametrize(("gpu", "precision"), [(True, "tf32"), (False, "float32")])
def test_the_table_is_the_one_that_reproduce_looks_for(gpu, precision, folder, monkeypatch):
    import inspect

    import scaffpd.features
    from experiments.reproduce import app

    asked = {}

    def noted(*_, **options):
        asked.update(options)
        raise scaffpd.InputError("enough-noted", "Enough.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(scaffpd.features, "features", noted)
    line = command(folder)
    for option in ("--device", "--cache"):
        del line[line.index(option) : line.index(option) + 2]
    assert cli.run(line) == 2
    (other,) = [c for c in app.registered_commands if c.name == "cifar100"]
    assert asked["cache"] == inspect.signature(other.callback).parameters["cache"].default
    assert asked["precision"] == precision
    assert asked["device"].type == ("cuda" if gpu else "cpu")
    assert asked["verify"] is None
    assert cli.run([*line, "--precision", "bfloat16", "--verify"]) == 2
    assert asked["precision"] == "bfloat16"
    assert asked["verify"] is True


def test_fewer_images_and_no_words(folder, capsys):
    assert cli.run(command(folder, "--images-per-class", "3", "--quiet", "--memory", "1GB")) == 0
    assert capsys.readouterr().out == ""
    (table,) = (folder / "cache").iterdir()
    assert np.load(table / VALUES).shape == (12, 50)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--kind", "ntk"), "did you mean 'entk'"),
        (("--memory", "lots"), "such as '4GB'"),
        (("--backbone", "resnet"), "Unknown backbone"),
        (("--backbone", "efficientnet-lite0"), "There is no file"),
    ],
)
def test_one_sentence(more, words, folder, capsys):
    assert cli.run(command(folder, *more)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_unknown_datasets(capsys):
    assert cli.run(["features", "cifar"]) == 2
    assert "did you mean 'cifar10'" in capsys.readouterr().err


def test_help_is_light():
    code = "import sys; from scaffpd.cli import run; run(['features', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--images-per-class" in done.stdout


def test_the_benchmark(tmp_path, monkeypatch, capsys):
    import features as benchmark

    file = tmp_path / "rates.json"
    words = "--backbone resnet18-layer3 --size 32 --chunk 2 --coordinates 100 --repeats 1 --device cpu --vmap-chunk 2"
    monkeypatch.setattr(sys, "argv", ["features.py", *words.split(), "--json", str(file)])
    benchmark.main()
    assert "| sampled |" in capsys.readouterr().out
    rates = json.loads(file.read_text())["rates"]
    assert set(rates) == {"plain", "sampled", "forward", "vmap"}
    assert all(row["images_per_second"] > 0 for row in rates.values())
