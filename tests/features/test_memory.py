"""Free memory inside containers, whose limits /proc/meminfo does not know."""

from __future__ import annotations

import pytest
import torch

from scaffpd import system

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "CGROUPS", tmp_path)
    monkeypatch.setattr(system, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(system, "_of_machine", lambda: 100 * GIB)
    monkeypatch.setattr(system, "physical_memory", lambda: 128 * GIB)
    return tmp_path


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_no_container(groups):
    assert system.free_memory(CPU) == 100 * GIB


def test_version_two(groups):
    write(groups, max=8 * GIB, current=3 * GIB)
    assert system.free_memory(CPU) == 5 * GIB
    write(groups, stat=f"anon 5\nfile 7\ninactive_file {GIB}\nactive_file {GIB}")
    assert system.free_memory(CPU) == 7 * GIB  # the page cache gives way
    write(groups, current=9 * GIB, stat="")
    assert system.free_memory(CPU) == 0
    for limit in ("max", 200 * GIB, "?"):
        write(groups, max=limit)
        assert system.free_memory(CPU) == 100 * GIB


def test_version_one(groups):
    write(
        groups / "memory",
        limit_in_bytes=4 * GIB,
        usage_in_bytes=GIB,
        stat=f"total_inactive_file {GIB}\ncache 3",
    )
    assert system.free_memory(CPU) == 4 * GIB
    write(groups / "memory", limit_in_bytes=2**63 - 4096)
    assert system.free_memory(CPU) == 100 * GIB


def test_the_smallest_group_around_us_counts(groups):
    write(groups / "user" / "job", max="max", current=GIB)
    write(groups / "user", max=6 * GIB, current=2 * GIB)
    write(groups / "others", max=GIB, current=GIB)
    (groups / "own").write_text("1:name=systemd:/others\n0::/user/job\n")
    assert system.free_memory(CPU) == 4 * GIB
    write(groups / "user" / "job", max=3 * GIB)
    assert system.free_memory(CPU) == 2 * GIB
    write(groups / "memory" / "b", limit_in_bytes=2 * GIB, usage_in_bytes=GIB)
    (groups / "own").write_text("4:cpu,memory:/b\n")
    assert system.free_memory(CPU) == GIB


def test_here():
    assert 2**20 < system.free_memory(CPU) <= (system.physical_memory() or float("inf"))
