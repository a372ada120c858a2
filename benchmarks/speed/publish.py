"""RESULTS.md, results.csv and results.png from stored measurements, the same files for the same
measurements.

The page of all benchmarks, docs/benchmarks.md, has one sentence about them between marks, and
docs/networks.md a table of simulators that train networks; both are written as well.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from harness import shown, table

GPU = "gpu"
MODULES = (
    "simulators",
    "network_simulators",
    "round_cost",
    "certified",
    "memory",
    "dual_prox",
    "scale",
    GPU,
)
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
    if folder == Path(__file__).parent:
        tell(found)


DOCS = Path(__file__).resolve().parents[2] / "docs"
TIMES = "time ÷ scaffpd's"
MARKS = "<!-- speed -->", "<!-- /speed -->"


def tell(found: dict[str, Found], folder: Path = DOCS) -> None:
    """Write what docs/ says of the measurements anew."""
    insert(folder / "benchmarks.md", headline(found))
    insert(folder / "networks.md", beside(found.get("network_simulators")))


def insert(file: Path, text: str) -> None:
    """Replace what stands between the marks."""
    before, rest = file.read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1])
    file.write_text(f"{before}{MARKS[0]}{text}{MARKS[1]}{after}", encoding="utf-8")


def beside(part: Found | None) -> str:
    """Simulators that train networks, a line for each, with the networks beside each other."""
    if part is None:
        return "Not measured yet."
    titles = list(dict.fromkeys(row["network"] for row in part["rows"]))
    head = [
        "",
        *(column for title in titles for column in (f"{title}, s a round", "÷ ours", "accuracy")),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in dict.fromkeys(row["candidate"] for row in part["rows"]):
        here = {row["network"]: row for row in part["rows"] if row["candidate"] == name}
        cells = [f"{name} {here[titles[0]]['version'] or ''}".strip()]
        for row in (here[title] for title in titles):
            accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
            cells += [
                row["note"] if row["s a round"] is None else shown(row["s a round"]),
                shown(row[TIMES]),
                accuracy,
            ]
        lines.append("| " + " | ".join(cells) + " |")
    here = part["machine"]
    where = f"On {here['cores']} cores ({here['CPU']}, torch {here['torch']}), {part['seconds']:,.0f} s in all:"
    return "\n".join(["\n", where, "", *lines, "\n"])


def headline(found: dict[str, Found]) -> str:
    """The measurements in one sentence."""
    peers = {row["candidate"]: row for row in found["simulators"]["rows"]}
    fedjax = peers["FedJAX"]
    flower = peers["Flower (Ray)"]
    solvers = [row for row in found["certified"]["rows"] if row["N"] == 100]
    ours, cones = (
        next(row for row in solvers if name in row["candidate"])
        for name in ("fair", "CVXPY + Clarabel, QR")
    )
    return (
        f"{fedjax[TIMES]:.1f} times the local steps a second of FedJAX ({fedjax['from']:.1f} to "
        f"{fedjax['to']:.1f}) and {flower[TIMES]:.0f} times those of Flower's simulation; a "
        "certified 1e-8 "
        f"in {ours['seconds']:.2f} s where CVXPY with Clarabel takes {cones['times ours']:.0f} "
        "times as long in the "
        "best form we found"
    )


def stored(folder: Path) -> dict[str, Found]:
    """What has been measured, by module; a GPU's results are a file of their own."""
    files = {name: folder / "results" / f"{name}.json" for name in MODULES} | {
        GPU: folder / "gpu.json"
    }
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


def page(found: dict[str, Found]) -> str:
    """RESULTS.md."""
    parts = [INTRODUCTION, *(section(name, part) for name, part in found.items())]
    missing = [f"`{name}`" for name in MODULES if name not in found]
    if missing:
        parts.append(f"## Not measured yet\n\n{', '.join(missing)}.")
    return "\n\n".join([*parts, machines(found)]) + "\n"


def section(name: str, part: Found) -> str:
    """A module's heading, what is measured, the findings and the table."""
    about = re.sub(
        r"^\([a-z]\) ", "", " ".join((part.get("docstring") or "").strip().split("\n\n")[0].split())
    )
    if name == GPU:
        about = f"On {part['machine']}, by `{part['command']}`."
    elif part.get("quick"):
        about += " **A rehearsal on tiny sizes.**"
    lines = "\n".join(f"- {sentence}" for sentence in part["sentences"])
    return "\n\n".join(
        text for text in (f"## {part['title']}", about, lines, table(part["rows"])) if text
    )


def machines(found: dict[str, Found]) -> str:
    """Which module was measured where, and how long that took; a GPU's results name their machine
    themselves.
    """
    lines = ["## Machine", ""]
    by_machine: dict[str, list[str]] = {}
    for name, part in found.items():
        if name != GPU:
            words = f"{part['machine']['CPU']}, {part['machine']['cores']} cores; " + ", ".join(
                f"{key} {value}"
                for key, value in part["machine"].items()
                if key not in ("CPU", "cores")
            )
            by_machine.setdefault(words, []).append(f"{name} ({part['seconds']:,.0f} s)")
    return "\n".join(
        lines + [f"- {words}: {', '.join(names)}." for words, names in by_machine.items()]
    )


def long(found: dict[str, Found]) -> str:
    """results.csv: one line per number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("module", "row", "column", "value"))
    for name, part in found.items():
        for number, row in enumerate(part["rows"]):
            writer.writerows(
                (name, number, column, "" if value is None else value)
                for column, value in row.items()
            )
    return file.getvalue()
