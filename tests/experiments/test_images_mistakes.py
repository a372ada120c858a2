"""What `experiments.reproduce` cannot do on images: one sentence, exit code 2, and nothing half done."""

from __future__ import annotations

import os
import shutil

import pytest
from image_study_cases import WEIGHTS, contents, reproduce, sentence

from experiments import image_study
from experiments import reproduce as commands

COMMANDS = (
    "cifar100",
    "cifar10",
    "tinyimagenet",
    "cifar100-50clients",
    "rho",
    "tradeoff",
    "causes",
    "all",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_folder_of_data(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.run([command, "--small"]) == 2
    assert "SCAFFPD_DATA" in sentence(capsys)
    assert contents(tmp_path) == {}


def test_a_folder_of_data_that_is_not_there(tmp_path, capsys):
    assert reproduce(tmp_path / "nowhere", "cifar10", tmp_path / "out") == 2
    assert str(tmp_path / "nowhere") in sentence(capsys)


def test_a_folder_without_the_images(root, tmp_path, capsys):
    shutil.copytree(root / "weights", tmp_path / "weights")
    assert reproduce(tmp_path, "cifar10", tmp_path / "out") == 2
    assert "There is no CIFAR-10 in" in sentence(capsys)


def test_a_folder_without_the_weights(root, tmp_path, capsys):
    shutil.copytree(root / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py")
    assert reproduce(tmp_path, "cifar10", tmp_path / "out", network=None) == 2
    assert f"weights/{WEIGHTS}" in sentence(capsys)


def test_weights_of_another_network(root, tmp_path, capsys):
    shutil.copytree(root / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / WEIGHTS).write_bytes(b"no archive")
    assert reproduce(tmp_path, "cifar10", tmp_path / "out", network=None) == 2
    assert "not a complete file of weights" in sentence(capsys)


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", ""])
def test_an_unknown_device(device, root, tmp_path, capsys):
    assert reproduce(root, "cifar10", tmp_path / "out", "--device", device) == 2
    assert f"Unknown device {device!r}: choose 'auto', 'cpu' or 'cuda'." in sentence(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_here(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(image_study.torch.cuda, "is_available", lambda: False)
    assert reproduce(root, "cifar10", tmp_path / "out", "--device", "cuda") == 2
    assert "no CUDA device" in sentence(capsys)


@pytest.mark.parametrize("command", ["cifar10", "tradeoff", "all"])
def test_a_folder_that_is_a_file(command, root, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert reproduce(root, command, tmp_path / "out") == 2
    assert "it is a file" in sentence(capsys)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_folder_that_may_not_be_written_to(root, tmp_path, capsys):
    tmp_path.chmod(0o500)
    try:
        assert reproduce(root, "cifar10", tmp_path / "out") == 2
    finally:
        tmp_path.chmod(0o700)
    assert "Cannot write to the folder" in sentence(capsys)


def test_a_folder_in_the_device_of_nothing(root, capsys):
    assert reproduce(root, "cifar10", "/dev/null/out") == 2
    assert "Cannot write to the folder '/dev/null/out'" in sentence(capsys)


def test_a_folder_with_somebody_elses_runs(root, tmp_path, capsys):
    (tmp_path / "alpha-0.05").mkdir()
    (tmp_path / "alpha-0.05" / "runs.csv").write_text("mine")
    assert reproduce(root, "cifar10", tmp_path, "--quiet") == 2
    assert "has a runs.csv of something else" in sentence(capsys)
    assert (tmp_path / "alpha-0.05" / "runs.csv").read_text() == "mine"


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (10, "cannot give 20 clients 10 samples each out of 100"),
        pytest.param(21, "found no partition", marks=pytest.mark.long),
        (999, "there are 100"),
    ],
)
def test_too_few_images_for_the_clients(each, words, root, tmp_path, capsys):
    assert reproduce(root, "cifar10", tmp_path, "--train-per-class", str(each), "--quiet") == 2
    assert words in sentence(capsys)
    assert not (tmp_path / "table.csv").exists()


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--l2", "0", "--l2 > 0"),
        ("--l2", "-1e-3", "--l2 > 0"),
        ("--l2", "nan", "--l2"),
        ("--l2", "much", "'much' is not a valid float"),
        ("--rounds", "0", "--rounds"),
        ("--seeds", "0", "--seeds"),
        ("--tune", "0", "--tune"),
        ("--local-steps", "0", "--local-steps"),
        ("--coordinates", "0", "--coordinates"),
        ("--size", "8", "--size"),
        ("--train-per-class", "1", "--train-per-class"),
        ("--loud", "1", "--loud"),
        ("--smal", "1", "No such option '--smal'. Did you mean '--small'?"),
    ],
)
def test_options_that_cannot_be(option, value, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.run(["cifar10", option, value]) == 2
    assert words in sentence(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "meant"), [("cifer10", "cifar10"), ("tiny-imagenet", "tinyimagenet")]
)
def test_a_misspelt_table(given, meant, capsys):
    assert commands.run([given]) == 2
    assert f"No such command {given!r}. Did you mean {meant!r}?" in sentence(capsys)


def test_help_names_every_table_and_option(capsys):
    assert commands.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    for name in COMMANDS:
        assert commands.run([name, "--help"]) == 0
        out = capsys.readouterr().out
        assert all(
            option in out
            for option in ("--data", "--out", "--cache", "--small", "--train-per-class", "--l2")
        )
