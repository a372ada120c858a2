r"""A silo's records in files that outlive runs and processes: answers, the audit log, releases.

Line n of the log (audit.jsonl) records a question and what left, with a link: the SHA-256 of the
previous link and the line. So changing, removing or inserting a line changes every later link. A
link noted down elsewhere proves that the end was not cut off.

Noise comes from a secret of this silo, and the ledger of releases is written before an answer
leaves. So a restarted silo neither forgets what was spent nor repeats an answer with other noise.

answered.jsonl          the answers so far, which limit further ones (`guard`)
audit.jsonl             every question and what left, linked
privacy.key             the secret, readable for its owner only
privacy-spent-NAME.npz  every release under the agreement of that name, up to the agreed ε
privacy-spent.npz       every release under any agreement, up to the ε of the silo's own file
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.deploy.messages import SCALE, Json, JsonMapping, Message
from scaffpd.deploy.written import names_of, number
from scaffpd.errors import InputError, unknown
from scaffpd.federation import Vector
from scaffpd.federation.questions import Reply
from scaffpd.files import JsonLines, atomic_write, load_or_create, lock_file
from scaffpd.privacy import Private
from scaffpd.privacy.accountant import Account
from scaffpd.privacy.noise import digest
from scaffpd.privacy.oracle import SumTerms
from scaffpd.run.settings.model_file import PRIVACY
from scaffpd.run.settings.silo import SecureRules, SiloFile
from scaffpd.training.cohort import Cohort

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


def check_shared(rules: SecureRules, agreed: JsonMapping, own: bool) -> None:
    """Refuse to share noise if this silo's part might be seen, or too few silos may collude."""
    colluding = agreed.get("colluding")
    if colluding is None:
        return
    if not (rules.required and rules.pins) or own:
        raise InputError(
            "shared-noise-visible",
            "This silo shares noise with others only if nobody sees its part: its file has to "
            "require masks (secure.required) and to pin the others' keys (secure.pins), and the "
            "model has to be the agreement's.",
        )
    if type(colluding) is not int or colluding < rules.colluding:
        raise InputError(
            "shared-noise-too-weak",
            f"Shared noise has to tolerate {rules.colluding} colluding silos, as this silo's file "
            "says.",
        )


def shared_parts(name: str, reply: Reply, values: JsonMapping) -> dict[str, NDArray[np.float64]]:
    """Return this silo's term of a sum with shared noise: its weighted vector plus its share.

    It is in the sum's units. One more entry, the same for all silos and as large as any entry may
    be, hides the vector's size.
    """
    found = {}
    for part, vectors in reply.vectors.items():
        if vectors.addends is not None:
            names = names_of(values, "names")
            weights = values["weights"]
            scale = number(values, SCALE)
            if not 0 < scale < np.inf:
                raise InputError(
                    "sum-without-units", "The question does not say in which units the sum is."
                )
            own = torch.tensor([weights[names.index(name)]], dtype=torch.float64)
            terms = SumTerms(
                len(names), scale, digest(*names, torch.tensor(weights, dtype=torch.float64), scale)
            )
            made = vectors.addends(own, terms)
            assert isinstance(made.parts, torch.Tensor)
            found[part] = np.append(made.parts[0].double().numpy(), made.most)
    return found


class PrivacyLedger:
    """Ledger of one silo's releases under one agreement, within the silo's own budget."""

    def __init__(self, silo: SiloFile, agreed: JsonMapping, digest: str) -> None:
        for name in agreed:
            if name not in PRIVACY:
                raise unknown("privacy setting", name, PRIVACY)
        self.rules = silo.privacy
        self.agreed = dict(agreed)
        self._secret = silo.noise_secret
        self._all = silo.spent
        self.file = silo.spent.with_stem(f"{silo.spent.stem}-{digest[:12]}")
        self._known: dict[Path, tuple[int, ...]] = {}  # identity of files when last read or written
        self._written: dict[Path, int] = {}  # releases in them then

    def private(self, model: Any) -> Private:
        """Return the model with the agreed noise and ε, and with this silo's secret."""
        about = {
            name: value for name, value in self.agreed.items() if name not in ("epsilon", "delta")
        }
        epsilon, delta = self._agreed()
        return Private(
            model, **about, secret=load_or_create(self._secret), budget=epsilon, delta=delta
        )

    def _agreed(self) -> tuple[float, float]:
        """Return the agreed ε and δ, or refuse what this silo's file does not allow."""
        epsilon = self.agreed.get("epsilon")
        delta = self.agreed.get("delta")
        own = self.rules
        if epsilon is None or delta is None or (own.delta is not None and delta > own.delta):
            raise InputError(
                "delta-too-large",
                f"This silo needs an agreement on ε, and on δ of {own.delta or 'any size'} at "
                "most.",
            )
        if own.epsilon is not None and epsilon > own.epsilon:
            raise InputError(
                "epsilon-too-large",
                f"The agreement may cost ε = {epsilon:g}, more than the {own.epsilon:g} of this "
                "silo's file.",
            )
        return float(epsilon), float(delta)

    def open(self, cohort: Cohort) -> None:
        """Bind the cohort, even one of the silo's own code, to both budgets."""
        account = cohort.account
        if account is None:
            raise InputError(
                "cohort-not-private",
                "The silo's own Cohort is not private: make it of a Private model.",
            )
        epsilon, delta = self._agreed()
        account.budget = epsilon if account.budget is None else min(account.budget, epsilon)
        account.delta = min(account.delta, delta)
        if self.rules.epsilon is not None and self.rules.delta is not None:
            account.wider = Account(account.names, self.rules.delta, self.rules.epsilon)

    @contextmanager
    def while_answering(self, cohort: Cohort) -> Iterator[None]:
        """Load earlier releases, and record new ones before an answer leaves.

        One process at a time does so.
        """
        with lock_file(self._all.with_suffix(".lock")):
            accounts = self._accounts(cohort)
            for file, account in accounts.items():
                self._read(file, account)
            try:
                yield
            finally:
                for file, account in accounts.items():
                    if account.total > (self._written.get(file, 0) if file.exists() else 0):
                        self._write(file, account)

    def _accounts(self, cohort: Cohort) -> dict[Path, Account]:
        """Return the accounts by file, that of all agreements first."""
        account = cohort.account
        if account is None:
            return {}
        wider = {} if account.wider is None else {self._all: account.wider}
        return {**wider, self.file: account}

    @staticmethod
    def _state(file: Path) -> tuple[int, ...]:
        """Return the file's identity, which changes when another process replaces it."""
        about = file.stat()
        return about.st_ino, about.st_mtime_ns, about.st_size

    def _read(self, file: Path, account: Account) -> None:
        if file.exists() and self._state(file) != self._known.get(file):
            try:
                with np.load(file, allow_pickle=False) as earlier:
                    account.merge(dict(earlier))
                    self._written[file] = int(earlier["privacy.times"].sum())
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                raise InputError(
                    "ledger-unreadable", f"The privacy ledger {str(file)!r} cannot be read."
                ) from None
            self._known[file] = self._state(file)

    def _write(self, file: Path, account: Account) -> None:
        packed: Json = account.pack()
        with atomic_write(file) as written:
            np.savez(written, **packed)
        self._known[file] = self._state(file)
        self._written[file] = account.total
