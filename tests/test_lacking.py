"""Tests that need an absent package are skipped; mistakes of our own are not hidden."""

import os
import subprocess
import sys
from pathlib import Path

import scaffpd

TESTS = Path(__file__).parent
NEEDY = """
import pytest

def test_in_the_middle():
    import pydantic

@pytest.fixture
def table():
    import pyarrow

def test_of_a_fixture(table):
    pass

def test_refused():
    from scaffpd.errors import needed
    needed("cryptography", "cryptography", "privacy")

def test_in_a_process():
    import subprocess, sys
    command = [sys.executable, "-c", "import sys; sys.exit(\\"No module named 'pydantic'\\")"]
    subprocess.run(command, check=True, capture_output=True, text=True)

def test_without():
    import numpy
"""
FILES = {
    "test_needy.py": NEEDY,
    "test_whole_file.py": "import rich\n\ndef test_it():\n    pass\n",
    "folder/conftest.py": "import safetensors\n",
    "folder/test_below.py": "def test_it():\n    pass\n",
    "test_typo.py": "import scaffpd.no_such_module\n",
    "test_other.py": "import no_such_module_of_tests\n",
}


def test_on_a_machine_with_the_cores_dependencies_only(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    home = os.pathsep.join([str(TESTS), str(Path(scaffpd.__file__).parents[1])])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "bare", "-p", "lacking", "-rsE"),
            *("--continue-on-collection-errors", "-p", "no:cacheprovider", tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": home, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    lines = done.stdout.splitlines()
    for package in ("pydantic", "pyarrow", "cryptography", "rich", "safetensors"):
        assert any(
            line.startswith("SKIPPED") and f"{package} is not installed" in line for line in lines
        ), package
    assert {line.split()[1] for line in lines if line.startswith("ERROR")} == {
        "test_typo.py",
        "test_other.py",
    }
    assert "1 passed, 6 skipped, 2 errors" in lines[-1], (done.stderr, done.returncode)
