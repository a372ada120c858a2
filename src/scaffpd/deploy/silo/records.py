r"""A silo's records in files that outlive runs and processes: answers, the audit log, consents.

answered.jsonl   the answers so far, which limit further ones (`guard`)
audit.jsonl      every question and what left, linked
consents.jsonl   decisions about runs, which only `scaffpd silo consent` writes

Line n of the log records a question and what left, with a link: the SHA-256 of the previous link
and the line. So changing, removing or inserting a line changes every later link. A link noted down
elsewhere proves that the end was not cut off.

A coordinator describes its run with the first question and with the agreement (`asks`: model,
method, objective, rounds, ε, masks). The SHA-256 of that names the request, so another objective,
or more rounds, is another request. Write access to the file of consents is the right to grant. The
silo reads it before every answer, so a withdrawal takes effect with the next question.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.deploy.messages import (
    ASKING,
    Json,
    JsonMapping,
    Message,
    MissingAgreement,
    read_values,
)
from scaffpd.errors import InputError
from scaffpd.federation import Vector
from scaffpd.files import JsonLines
from scaffpd.run.settings.model_file import Setup
from scaffpd.run.settings.silo import SiloFile

LONGEST_TEXT = 2000  # characters of a sentence in the log


class AnswerJournal:
    """An append-only file of lines [run, what, name, more], shared by the silo's processes.

    An entry is on disk before its answer leaves. So the answer to a line that a crash or a full
    disk has cut off has not left and counts as neither given nor spent: the line is removed. Any
    other line that cannot be read may stand for an answer that has left, and stops the silo.
    """

    def __init__(self, file: Path) -> None:
        self._lines = JsonLines(file)
        self._held = False
        self._trouble = f"The silo's file of earlier answers, {file.name!r}, cannot be {{}}."
        self._known: defaultdict[tuple[str, str], Json] = defaultdict(dict)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lock out other processes of this silo and read their lines."""
        if self._held:
            yield
            return
        with self._lines.lock():
            self._refresh()
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _refresh(self) -> None:
        try:
            for run, what, name, more in self._lines.read():
                self._known[run, what][name] = more
        except (OSError, ValueError, TypeError):
            raise InputError("journal-unreadable", self._trouble.format("read")) from None

    def known(self, run: str, what: str) -> Json:
        """Return the entries of a kind by name, the oldest first."""
        with self.turn():
            return self._known[run, what]

    def note(self, run: str, what: str, name: str, more: Any = None) -> None:
        """Append an entry before an answer leaves."""
        with self.turn():
            if name in self._known[run, what]:
                return
            try:
                self._lines.append([run, what, name, more])
            except OSError:
                raise InputError("journal-not-writable", self._trouble.format("written")) from None
            self._refresh()


def as_text(numbers: Vector) -> str:
    """Encode numbers for the journal."""
    return base64.b64encode(np.asarray(numbers, dtype="<f8").tobytes()).decode()


def as_numbers(text: str) -> Vector:
    """Decode what `as_text` wrote."""
    return np.frombuffer(base64.b64decode(text), dtype="<f8")


class AuditLog:
    """A silo's log of questions and answers; an answer that cannot be logged does not leave."""

    def __init__(self, file: Path) -> None:
        self._lines = JsonLines(file)

    def note(self, asked: Message | None, reply: Message, size: int, about: JsonMapping) -> None:
        """Append a line: the question, what leaves (`size` bytes), and further facts, `about`."""
        left = {name: list(array.shape) for name, array in reply.arrays.items()}
        stated = {
            name: value[:LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in reply.values.items()
            if name in ("sentence", "waits", "epsilon", "delta")
        }
        try:
            with self._lines.lock():  # shared by the silo's processes
                before = self._lines.last({"number": 0, "link": ""})
                line = {
                    "number": before["number"] + 1,
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "question": "unreadable" if asked is None else asked.kind[:LONGEST_TEXT],
                    "reply": reply.kind,
                    "bytes": size,
                    "left": left,
                    **stated,
                    **about,
                }
                self._lines.append({**line, "link": line_link(before["link"], line)})
        except OSError:
            raise InputError(
                "log-not-writable", f"The silo's log {self._lines.file.name!r} cannot be written."
            ) from None
        except (ValueError, KeyError, TypeError):
            raise InputError(
                "log-unreadable",
                f"The last line of the silo's log {self._lines.file.name!r} cannot be read.",
            ) from None


def line_link(before: str, line: JsonMapping) -> str:
    """Return the link of a line."""
    return hashlib.sha256((before + json.dumps(line, sort_keys=True)).encode()).hexdigest()


# --- the log, checked and added up

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


# --- consent

ASKS = {
    "federation": str,
    "silos": list[str],
    "algorithm": str,
    "objective": str,
    "model": Json,
    "rounds": int,
    "secure": Json,
    "epsilon": float | int | None,
    "delta": float | None,
}
LONGEST = 20_000  # characters of a request
AWAITED = "consent-awaited"  # code of the refusal until somebody at the site has decided
SHOWN = 20  # digits of a request's name in sentences and lists; decisions use all of them
SLACK = 20  # points beyond two a round, for starts and restarts


def request_name(asks: JsonMapping) -> str:
    """Return the name of a request, the 64 digits of its SHA-256."""
    return hashlib.sha256(json.dumps(asks, sort_keys=True).encode()).hexdigest()


class SiloConsent:
    """Decide whether a silo takes part in a run; `asks` is the run's request."""

    def __init__(self, file: SiloFile) -> None:
        self._file = file.consents
        self._ask = file.consent.policy == "ask"
        self.asks: Json | None = None

    def check(self, kind: str, given: object) -> None:
        """Refuse a question unless the site has consented to its run; `given` is its request."""
        if given is not None:
            self.asks = None  # the log must not record a refused question as a request
            asks = read_values(
                ASKS, given, "What the run asks for is not complete, or cannot be read."
            )
            if len(json.dumps(asks)) > LONGEST:
                raise InputError("request-too-long", "What the run asks for is too long.")
            noisy = asks["epsilon"] is not None
            if noisy and not (0 < asks["epsilon"] < 1e300 and 0 < (asks["delta"] or 0) < 1):
                raise InputError(
                    "request-without-budget",
                    "What the run asks for has an ε that is not above 0, or no δ between 0 and 1.",
                )
            self.asks = asks
        if not self._ask and not self._file.exists():
            return
        if self.asks is None and kind not in ASKING:
            raise MissingAgreement  # a new process of this silo, which gets the agreement again
        if self.asks is None:
            raise InputError(
                "run-without-request",
                "This silo takes part with consent, and the coordinator does not say what its run "
                "asks for.",
            )
        name = request_name(self.asks)
        short = name[:SHOWN]
        decision = decisions(self._file).get(name)
        if decision is None and self._ask:
            raise InputError(
                AWAITED,
                f"Nobody at this silo has agreed to the run yet (request {short}): "
                "`scaffpd silo consent` shows it.",
            )
        if decision is not None and not decision["granted"]:
            raise InputError(
                "consent-withdrawn",
                f"Consent to this run ({short}) was withdrawn on {decision['time'][:10]}.",
            )

    def match(self, setup: Setup) -> int | None:
        """Refuse an agreement that differs from the request; return the most points it may use."""
        if self.asks is None or not self._ask:
            return None
        same = {
            "method": setup.algorithm == self.asks["algorithm"],
            "masks": dict(setup.secure) == self.asks["secure"],
            "ε": setup.privacy.get("epsilon") == self.asks["epsilon"],
            "δ": setup.privacy.get("delta") == self.asks["delta"],
            "model": _fixed(setup.model) == _fixed(self.asks["model"]),
        }
        wrong = [name for name, is_same in same.items() if not is_same]
        if wrong:
            raise InputError(
                "agreement-not-requested",
                f"The agreement has another {wrong[0]} than this silo was asked to consent to.",
            )
        return 2 * int(self.asks["rounds"]) + SLACK


def _fixed(model: JsonMapping) -> Json:
    """Return the settings of a model that the request fixes; silos find out the classes."""
    return {"kind": "linear", **{name: v for name, v in model.items() if name != "classes"}}


def decisions(file: Path, whole: bool = True) -> dict[str, Json]:
    """Return the last decision about every request, by its name.

    A last line that was cut off may be a withdrawal: a `whole` file must have none. The next
    `decide` removes it.
    """
    lines = JsonLines(file)
    default = {"granted": False, "by": "", "time": ""}
    try:
        found = {str(line["request"]): {**default, **line} for line in lines.read()}
        if whole and file.exists() and file.stat().st_size > lines.place:
            raise ValueError
        return found
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "consents-unreadable", f"The silo's file of consents, {file.name!r}, cannot be read."
        ) from None


def decide(file: Path, request: str, granted: bool, by: str) -> None:
    """Append a decision."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        JsonLines(file).append({"request": request, "granted": granted, "by": by, "time": now})
    except OSError as error:
        raise InputError(
            "consents-not-writable",
            f"Cannot write {str(file)!r}: {error.strerror}. You may not decide here.",
        ) from None


def requests(file: SiloFile) -> list[Json]:
    """Return every request in the silo's log, with its state."""
    found: dict[str, Json] = {}
    decided = decisions(file.consents, whole=False)
    try:
        lines = list(JsonLines(file.audit).read())
    except (OSError, ValueError):
        raise InputError(
            "log-unreadable",
            f"The log {str(file.audit)!r} cannot be read: `scaffpd silo audit` says where.",
        ) from None
    for line in lines:
        if "asks" not in line:
            continue
        name = request_name(line["asks"])
        new = {"request": name, "first": line["time"], "columns": [], "asks": line["asks"]}
        own = found.setdefault(name, new)
        own["last"] = line["time"]
        own["columns"] = line.get("columns") or own["columns"]
        decision = decided.get(name)
        if decision is not None:
            verb = "granted" if decision["granted"] else "withdrawn"
            own["state"] = f"{verb} by {decision['by']} on {decision['time'][:10]}"
        elif "waits" in line:
            own["state"] = "waits for consent at this site"
        elif line.get("sentence"):
            own["state"] = f"refused: {line['sentence']}"
        else:
            own["state"] = f'taken, as consent.policy = "{file.consent.policy}" says'
    return list(found.values())
