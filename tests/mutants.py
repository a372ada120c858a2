"""Break lines of the package, one at a time, and see whether the tests notice.

    python tests/mutants.py                 # all of them, on two cores; writes tests/MUTANTS.md
    python tests/mutants.py saddle secure   # those whose file or line holds one of these words; writes nothing

`mutants.csv` has a row per mutant: the line, what it is broken into, the tests that should fail, and what became of it
before the package was redesigned. A line is looked up by its text, so that it may move from file to file.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.csv")
PAGE = Path(__file__).with_name("MUTANTS.md")
LIMIT = 600  # seconds; a mutant that makes the tests hang is caught


def place(src: Path, line: str) -> Path:
    """Return the one file that has this line."""
    found = [
        f
        for f in sorted(src.rglob("*.py"))
        if any(t.strip() == line for t in f.read_text("utf-8").splitlines())
    ]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} files have the line {line!r}")
    return found[0]


def outcome(row: dict[str, str]) -> tuple[str, str]:
    """Return the mutant's file and whether it was caught."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(shutil.copytree(ROOT / "src", Path(folder, "src")))
        file = place(src, row["line"])
        text = file.read_text("utf-8")
        if text.count(row["line"]) != 1:
            raise SystemExit(f"{file.name} has the line {row['line']!r} more than once")
        file.write_text(text.replace(row["line"], row["broken"]), "utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *row["tests"].split(),
        ]
        environment = os.environ | {
            "PYTHONPATH": str(src),
            "CI": "true",
        }  # the same random examples each time
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return file.relative_to(src).as_posix(), "caught"
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        return file.relative_to(src).as_posix(), "survived" if done.returncode == 0 else "caught"


def main(words: list[str]) -> None:
    """Run the mutants and print one line each; write the table if they were all."""
    with LIST.open(encoding="utf-8", newline="") as lines:
        rows = [
            r
            for r in csv.DictReader(lines)
            if not words or any(w in r["line"] + r["tests"] for w in words)
        ]
    table = []
    with ThreadPoolExecutor(2) as pool:
        for row, (file, now) in zip(rows, pool.map(outcome, rows), strict=True):
            worse = (
                " <- was caught before" if (row["before"], now) == ("caught", "survived") else ""
            )
            print(f"{now:9} {file}: {row['line']}{worse}", flush=True)
            table.append(
                f"| `{file}` | `{row['line']}` | `{row['broken']}` | {row['before']} | {now} |"
            )
    caught = sum(line.endswith("| caught |") for line in table)
    print(f"{caught} of {len(rows)} caught")
    if not words:
        head = (
            "# Mutants\n\nOne line broken at a time, by `make mutants`; the tests of that part are then run. "
            f"{caught} of {len(rows)} are caught.\n\n| file | line | broken | before the redesign | now |\n"
            "|---|---|---|---|---|\n"
        )
        PAGE.write_text(head + "\n".join(table) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
