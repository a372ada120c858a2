"""What runs at a site; and here its consent: what a run asks for, and whether somebody at the site has agreed to it.

A coordinator says what its run is with the first question and with the agreement (`asks`: model, method, objective,
rounds, ε, masks). The name of a request is the SHA-256 of that, so another objective, or more rounds, is another
request. Decisions are lines of a file that `scaffpd silo consent` alone writes: whoever may write that file may grant.
The silo reads it before every answer, so that a consent that is withdrawn ends its part with the next question.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaffpd.config.model_file import Setup, read_values
from scaffpd.config.silo import SiloFile
from scaffpd.deploy.messages import ASKING, MissingVectors
from scaffpd.errors import InputError
from scaffpd.system import append_line

if TYPE_CHECKING:
    from scaffpd.deploy.silo.guard import AnswerJournal

ASKS = {
    "federation": str, "silos": list[str], "algorithm": str, "objective": str, "model": dict[str, Any], "rounds": int,
    "secure": dict[str, Any], "epsilon": float | int | None, "delta": float | None,
}  # fmt: skip
FREE = ("l2", "strength", "classes", "fold", "folds", "seed")  # settings of a model that silos find out together
LONGEST = 20_000  # characters of a request
SHOWN = 20  # digits of a request's name in sentences and lists: enough for people, never for a decision
SLACK = 20  # points beyond two a round: where a run begins, and begins anew


class AwaitsConsent(InputError):
    """Nobody at this site has agreed to the run yet."""


def request_name(asks: Mapping[str, Any]) -> str:
    """Return the name of a request: 64 digits, so that nobody can make two requests with one name."""
    return hashlib.sha256(json.dumps(asks, sort_keys=True).encode()).hexdigest()


def decisions(file: Path) -> dict[str, dict[str, Any]]:
    """Read what was decided last about every request, by its name."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        return {str(line["request"]): {"granted": False, "until": "", "by": "", "time": "", **line} for line in lines}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"The silo's file of consents, {file.name!r}, cannot be read.") from None


def decide(file: Path, request: str, granted: bool, by: str, until: date | None = None) -> None:
    """Append a decision."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = {"request": request, "granted": granted, "until": until.isoformat() if until else "", "by": by, "time": now}
    try:
        append_line(file, json.dumps(line))
    except OSError as error:
        raise InputError(f"Cannot write {str(file)!r}: {error.strerror}. You may not decide here.") from None


class SiloConsent:
    """Decides whether one silo takes part in a run at all; `asks` is what the run said that it asks for."""

    def __init__(self, file: SiloFile, journal: AnswerJournal) -> None:
        self.rules, self.journal = file.consent, journal
        self.asks: dict[str, Any] | None = None

    def check(self, kind: str, given: Any) -> None:
        """Refuse a question unless the site has agreed to its run; `given` is what the question says of that."""
        if given is not None:
            self.asks = None  # what is refused here is nobody's request: the log must not have it
            asks = read_values(ASKS, given, "What the run asks for is not complete, or cannot be read.")
            if len(json.dumps(asks)) > LONGEST:
                raise InputError("What the run asks for is too long.")
            if asks["epsilon"] is not None and not (0 < asks["epsilon"] < 1e300 and 0 < (asks["delta"] or 0) < 1):
                raise InputError("What the run asks for has an ε that is not above 0, or no δ between 0 and 1 with it.")
            self.asks = asks
        if not self.rules.strict and not self.rules.file.exists():
            return
        if self.asks is None and kind not in ASKING:
            raise MissingVectors(["setup"])  # a new process of this silo: the agreement comes with it
        if self.asks is None:
            raise InputError(
                "This silo takes part with consent ([consent] in its file), and the coordinator does not say what its "
                "run asks for: it needs version 0.2 or later."
            )
        self._within_rules(self.asks)
        self._decided(request_name(self.asks))

    def _within_rules(self, asks: Mapping[str, Any]) -> None:
        """Refuse what the silo's file rules out, whoever has agreed."""
        rules = self.rules
        if rules.expires is not None and _today() > rules.expires:
            raise InputError(f"This silo's consent to all runs ended on {rules.expires}.")
        if rules.federations is not None and asks["federation"] not in rules.federations:
            known = ", ".join(rules.federations)
            raise InputError(f"This silo takes part in {known}, not in a federation {asks['federation']!r}.")
        if rules.rounds is not None and asks["rounds"] > rules.rounds:
            raise InputError(f"The run asks for {asks['rounds']} rounds, and consent.rounds is {rules.rounds}.")
        if rules.epsilon is not None and not 0 < (asks["epsilon"] or 0) <= rules.epsilon:
            cost = "no noise" if asks["epsilon"] is None else f"ε = {asks['epsilon']:g}"
            raise InputError(f"The run asks for {cost}, and consent.epsilon is {rules.epsilon:g}.")

    def _decided(self, name: str) -> None:
        """Refuse what was withdrawn or has ended; where nobody has decided, go by the policy."""
        said, short = decisions(self.rules.file).get(name), name[:SHOWN]
        if said is not None and not said["granted"]:
            raise InputError(f"Consent to this run ({short}) was withdrawn on {said['time'][:10]}.")
        if said is not None and said["until"] and _today().isoformat() > said["until"]:
            raise InputError(f"Consent to this run ({short}) ended on {said['until']}.")
        if said is not None or self.rules.policy == "always" or (self.rules.policy == "once" and self._first(name)):
            return
        raise AwaitsConsent(
            f"Nobody at this silo has agreed to the run yet (request {short}): `scaffpd silo consent` shows it."
        )

    def _first(self, name: str) -> bool:
        """Whether a request is the first that has ever come while the policy was "once"."""
        with self.journal.turn():
            taken = self.journal.known("", "consent")
            if not taken:
                self.journal.note("", "consent", name)
            return name in taken

    def match(self, setup: Setup) -> int | None:
        """Refuse an agreement on something else than the run has asked for; return the most points that it may ask."""
        if self.asks is None or not self.rules.strict:
            return None
        same = {
            "method": setup.algorithm == self.asks["algorithm"], "masks": dict(setup.secure) == self.asks["secure"],
            "ε": setup.privacy.get("epsilon") == self.asks["epsilon"],
            "δ": setup.privacy.get("delta") == self.asks["delta"],
            "model": _fixed(setup.model) == _fixed(self.asks["model"]),
        }  # fmt: skip
        if wrong := [name for name, is_same in same.items() if not is_same]:
            raise InputError(f"The agreement has another {wrong[0]} than this silo was asked to consent to.")
        return 2 * int(self.asks["rounds"]) + SLACK


def _fixed(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model silos do not find out together; one without a kind is linear."""
    return {"kind": "linear", **{name: value for name, value in model.items() if name not in FREE}}


def _today() -> date:
    return datetime.now(UTC).date()


def requests(file: SiloFile) -> list[dict[str, Any]]:
    """Return every request that has come, by the silo's log: what it asks, and what became of it."""
    found: dict[str, dict[str, Any]] = {}
    log, decided = file.limits.audit, decisions(file.consent.file)
    try:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    except (OSError, ValueError):
        raise InputError(f"The log {str(log)!r} cannot be read: `scaffpd silo audit` says where.") from None
    for line in lines:
        if "asks" in line:
            name = request_name(line["asks"])
            own = found.setdefault(name, {"request": name, "first": line["time"], "columns": [], "asks": line["asks"]})
            own |= {"last": line["time"], "refused": line.get("sentence", ""), "waits": "waits" in line}
            own |= {"columns": line["columns"]} if line.get("columns") else {}
    for name, own in found.items():
        own["decision"] = decided.get(name)
        own["state"] = _state(own, file)
    return list(found.values())


def _state(own: Mapping[str, Any], file: SiloFile) -> str:
    """Say what became of a request."""
    said = own["decision"]
    if said is not None:
        until = f", until {said['until']}" if said["until"] else ""
        return f"{'granted' if said['granted'] else 'withdrawn'} by {said['by']} on {said['time'][:10]}{until}"
    if own["waits"]:
        return "waits for somebody here to agree"
    return (
        f"refused: {own['refused']}" if own["refused"] else f'taken, as consent.policy = "{file.consent.policy}" says'
    )
