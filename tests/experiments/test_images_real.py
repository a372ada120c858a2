"""`experiments.reproduce cifar10` on real images with ImageNet weights, where SCAFFPD_DATA names a folder of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from image_study_cases import WEIGHTS, rows

from experiments import reproduce as commands
from experiments.image_plans import METHODS

ROOT = Path(os.environ.get("SCAFFPD_DATA") or "nowhere")
NEEDED = ("cifar10/train.npz", "cifar10/test.npz", f"weights/{WEIGHTS}")
OPTIONS = (
    *(
        "--size",
        "64",
        "--coordinates",
        "1000",
        "--rounds",
        "10",
        "--local-steps",
        "5",
        "--tune",
        "2",
        "--seeds",
        "2",
    ),
    *("--train-per-class", "100", "--device", "cpu", "--quiet"),
)


@pytest.mark.long
@pytest.mark.skipif(
    not all((ROOT / name).is_file() for name in NEEDED),
    reason="SCAFFPD_DATA names no folder with CIFAR-10 and weights",
)
def test_real_images_are_learnt_and_the_same_command_gives_the_same_numbers(tmp_path):
    """Chance is 10 %; the two runs share nothing."""
    for name in ("first", "second"):
        folders = (
            "--data",
            str(ROOT),
            "--cache",
            str(tmp_path / name / "features"),
            "--out",
            str(tmp_path / name),
        )
        assert commands.run(["cifar10", "--small", *folders, *OPTIONS]) == 0
    first, second = (tmp_path / name / "alpha-0.05" / "clients.csv" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    lines = {line["method"]: line for line in rows(tmp_path / "first" / "table.csv")}
    assert list(lines) == list(METHODS)
    averages = {name: float(line["average"]) for name, line in lines.items()}
    assert min(averages.values()) > 0.25, averages
    assert (
        min(averages[name] for name in ("FedAvg", "SCAFFOLD", "AFL", "DRFA", "Scaff-PD")) > 0.35
    ), averages
    assert "Packed JPEG images (lossy)" in (tmp_path / "first" / "README.md").read_text(
        encoding="utf-8"
    )
