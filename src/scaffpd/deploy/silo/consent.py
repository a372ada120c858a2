r"""A site's consent to a run.

A coordinator describes its run with the first question and with the agreement (`asks`: model,
method, objective, rounds, ε, masks). The SHA-256 of that names the request, so another objective,
or more rounds, is another request. Decisions are lines of a file that only `scaffpd silo consent`
writes; write access to it is the right to grant. The silo reads it before every answer, so a
withdrawal takes effect with the next question.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from scaffpd.deploy.messages import ASKING, Json, JsonMapping, MissingAgreement
from scaffpd.deploy.written import read_values
from scaffpd.errors import InputError
from scaffpd.files import JsonLines
from scaffpd.run.settings.model_file import Setup
from scaffpd.run.settings.silo import SiloFile

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
SHOWN = 20  # digits of a request's name in sentences and lists; decisions use all of them
SLACK = 20  # points beyond two a round, for starts and restarts


class AwaitsConsent(InputError):
    """The run still awaits consent at this site."""


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
        self._decided(request_name(self.asks))

    def _decided(self, name: str) -> None:
        """Refuse a request that was withdrawn, or without a decision apply the policy."""
        decision = decisions(self._file).get(name)
        short = name[:SHOWN]
        if decision is None and self._ask:
            raise AwaitsConsent(
                "consent-awaited",
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
