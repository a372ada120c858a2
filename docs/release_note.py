"""Print what the changelog says of this version, for a release; fail if it has no date yet."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_note(version: str, changelog: str) -> str:
    """Return the section of a version; refuse one that is unreleased."""
    found = re.search(
        rf"^## {re.escape(version)} \(([^)]+)\)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    if found is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise SystemExit(f"CHANGELOG.md needs a heading '## {version} (YYYY-MM-DD)' first.")
    return found[2].strip()


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sys.stdout.write(release_note(project["version"], (ROOT / "CHANGELOG.md").read_text()) + "\n")
