"""Check a silo's log link by link, and add up what has left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scaffpd.deploy.messages import Json, JsonMapping
from scaffpd.deploy.silo.records import line_link
from scaffpd.errors import InputError
from scaffpd.files import JsonLines

LEFT = {  # the answers to questions, in words
    "hello": "its name and version",
    "describe": "names of columns, categories and labels",
    "totals": "sums over columns",
    "setup": "curvature of its loss, and one loss",
    "start": "where a model begins",
    "losses": "losses",
    "gradients": "losses and gradients",
    "local_updates": "local updates",
    "proximal_steps": "local updates",
    "curvature": "curvatures along directions",
    "diagonal": "diagonals of Hessians",
    "project": "gradients along directions",
    "optima": "smallest losses",
    "evaluate": "loss and accuracy",
    "card": "its public key",
    "meet": "keys for masks",
    "masked": "masked vectors",
    "sizes": "lengths of vectors",
    "spent": "ε so far",
}


def audit(file: Path, noted: str = "") -> Json:
    """Check every link of a log and add up what has left; `noted` must be among the links."""
    lines = list[Json]()
    links = set[str]()
    link = ""
    broken = ""
    try:
        for line in JsonLines(file).read():
            link = line_link(link, {name: value for name, value in line.items() if name != "link"})
            if line.get("link") != link or line.get("number") != len(lines) + 1:
                raise ValueError
            lines.append(line)
            links.add(link)
    except OSError as error:
        raise InputError(
            "log-unreadable", f"The log {str(file)!r} cannot be read: {error}."
        ) from None
    except (ValueError, AttributeError):
        what = f"Line {len(lines) + 1} was changed, or a line before it is missing"
        broken = f"{what}: nothing from there on is proven."
    if not broken and noted and noted not in links:
        broken = (
            "The link that was noted down is not in this log: its end was cut off, or it is "
            "another log."
        )
    return {
        "file": str(file),
        "whole": not broken,
        "broken": broken,
        "lines": len(lines),
        "link": link,
        "from": lines[0]["time"] if lines else "",
        "to": lines[-1]["time"] if lines else "",
        "bytes": sum(line["bytes"] for line in lines),
        "runs": [_left(run, lines) for run in dict.fromkeys(line["run"] for line in lines)],
        "refused": dict(Counter(line["sentence"] for line in lines if line["reply"] == "refused")),
    }


def _left(run: str, lines: Sequence[JsonMapping]) -> Json:
    """Add up one run's lines, question by question."""
    own = [line for line in lines if line["run"] == run]
    rows = []
    for question in dict.fromkeys(line["question"] for line in own):
        asked = [line for line in own if line["question"] == question]
        answers = [line for line in asked if line["reply"] == "answer"]
        numbers = sum(int(np.prod(shape)) for line in answers for shape in line["left"].values())
        rows.append(
            {
                "question": question,
                "what": LEFT.get(question, question),
                "asked": len(asked),
                "answered": len(answers),
                "numbers": numbers,
                "bytes": sum(line["bytes"] for line in asked),
            }
        )
    spent = [line["epsilon"] for line in own if "epsilon" in line]
    return {
        "run": run,
        "algorithm": next((line["algorithm"] for line in own if line["algorithm"]), ""),
        "masked": any(line["masked"] for line in own),
        "private": any(line["private"] for line in own),
        "epsilon": spent[-1] if spent else None,
        "from": own[0]["time"],
        "to": own[-1]["time"],
        "questions": rows,
    }
