"""RESULTS.md, results.csv and results.png from stored measurements, the same files for the same measurements."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from harness import table

GPU = "gpu"
MODULES = ("simulators", "round_cost", "certified", "memory", "dual_prox", "scale", "streaming", GPU)
INTRODUCTION = """# Speed

All of this is written by one command, `python benchmarks/speed/run.py`; `--only NAME` measures one part again,
`--quick` rehearses on tiny sizes, and `--from-stored` only writes these files again. Candidates take turns, so a ratio
is the number to read; seconds belong to the machine named at the end. The numbers are in `results.csv` as well.

![Four of the measurements](results.png)"""

Found = dict[str, Any]


def publish(folder: Path) -> None:
    """Write all three files."""
    from picture import draw

    found = stored(folder)
    (folder / "RESULTS.md").write_text(page(found), encoding="utf-8")
    (folder / "results.csv").write_text(long(found), encoding="utf-8", newline="")
    draw({name: part["rows"] for name, part in found.items()}, folder / "results.png")


def stored(folder: Path) -> dict[str, Found]:
    """What has been measured, by module; a GPU's results are a file of their own."""
    files = {name: folder / "results" / f"{name}.json" for name in MODULES} | {GPU: folder / "gpu.json"}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def page(found: dict[str, Found]) -> str:
    """RESULTS.md."""
    parts = [INTRODUCTION, *(section(name, part) for name, part in found.items())]
    missing = [f"`{name}`" for name in MODULES if name not in found]
    if missing:
        parts.append(f"## Not measured yet\n\n{', '.join(missing)}.")
    return "\n\n".join([*parts, machines(found)]) + "\n"


def section(name: str, part: Found) -> str:
    """A module's heading, what is measured, the findings and the table."""
    about = re.sub(r"^\([a-z]\) ", "", " ".join((part.get("docstring") or "").strip().split("\n\n")[0].split()))
    if name == GPU:
        about = f"On {part['machine']}, by `{part['command']}`."
    elif part.get("quick"):
        about += " **A rehearsal on tiny sizes.**"
    lines = "\n".join(f"- {sentence}" for sentence in part["sentences"])
    return "\n\n".join(text for text in (f"## {part['title']}", about, lines, table(part["rows"])) if text)


def machines(found: dict[str, Found]) -> str:
    """Which module was measured where, and how long that took; a GPU's results name their machine themselves."""
    lines = ["## Machine", ""]
    by_machine: dict[str, list[str]] = {}
    for name, part in found.items():
        if name != GPU:
            words = f"{part['machine']['CPU']}, {part['machine']['cores']} cores; " + ", ".join(
                f"{key} {value}" for key, value in part["machine"].items() if key not in ("CPU", "cores")
            )
            by_machine.setdefault(words, []).append(f"{name} ({part['seconds']:,.0f} s)")
    return "\n".join(lines + [f"- {words}: {', '.join(names)}." for words, names in by_machine.items()])


def long(found: dict[str, Found]) -> str:
    """results.csv: one line per number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("module", "row", "column", "value"))
    for name, part in found.items():
        for number, row in enumerate(part["rows"]):
            writer.writerows((name, number, column, "" if value is None else value) for column, value in row.items())
    return file.getvalue()
