r"""A silo's differential privacy: what it has released, in a file that outlives runs and processes.

Noise comes from a secret that only this silo has, and the ledger is written before an answer leaves. So a restarted
silo, or a process for every message, neither forgets what was spent nor gives the same answer with other noise.

privacy.key             the secret, readable for its owner only
privacy-spent-NAME.npz  every release under the agreement of that name, which may cost the ε that is agreed
privacy-spent.npz       every release under any agreement, which may cost the ε of the silo's own file
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.cohort import Cohort
from scaffpd.config.model_file import PRIVACY
from scaffpd.config.silo import PrivacyRules, SecureRules
from scaffpd.deploy.messages import SCALE, names_of, number
from scaffpd.errors import InputError, unknown
from scaffpd.federation.questions import Reply
from scaffpd.privacy import Private
from scaffpd.privacy.accountant import Account
from scaffpd.privacy.noise import digest
from scaffpd.privacy.oracle import SumTerms
from scaffpd.system import atomic_write, load_or_create, lock_file


def check_shared(rules: SecureRules, agreed: Mapping[str, Any], own: bool) -> None:
    """Refuse to share noise where somebody might see this silo's part of it, or where more silos might show theirs."""
    if (colluding := agreed.get("colluding")) is None:
        return
    if not (rules.required and rules.trusted) or own:
        raise InputError(
            "This silo shares noise with others only where nobody sees its part: its file has to require masks "
            "(secure.required) and to pin the others' keys (secure.pins), and the model has to be the agreement's."
        )
    if type(colluding) is not int or colluding < rules.colluding:
        raise InputError(f"Shared noise has to bear {rules.colluding} colluding silos, as this silo's file has it.")


def shared_parts(name: str, reply: Reply, values: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return what this silo adds to a sum with shared noise: its weighted vector, in units, with its part of the noise.

    One more entry, the same for everybody and as large as any may be, keeps the size of a vector from being told.
    """
    found = {}
    for part, vectors in reply.vectors.items():
        if vectors.shares is not None:
            names, weights, scale = names_of(values, "names"), values["weights"], number(values, SCALE)
            if not 0 < scale < np.inf:
                raise InputError("The question does not say in which units the sum is.")
            own = torch.tensor([weights[names.index(name)]], dtype=torch.float64)
            terms = SumTerms(len(names), scale, digest(*names, torch.tensor(weights, dtype=torch.float64), scale))
            made = vectors.shares(own, terms)
            found[part] = np.append(made.parts[0].double().numpy(), made.most)
    return found


class PrivacyLedger:
    """The releases of one silo under one agreement: its own rules, what is agreed (see `Private`) and its digest."""

    def __init__(self, rules: PrivacyRules, agreed: Mapping[str, Any], digest: str) -> None:
        for name in agreed:
            if name not in PRIVACY:
                raise unknown("privacy setting", name, PRIVACY)
        self.rules, self.agreed = rules, dict(agreed)
        self.file = rules.spent.with_stem(f"{rules.spent.stem}-{digest[:12]}")
        self._known: dict[Path, tuple[int, ...]] = {}  # files as they were read or written last

    def private(self, model: Any) -> Private:
        """Return the model with the agreement's noise and ε, and with this silo's secret."""
        about = {name: value for name, value in self.agreed.items() if name not in ("epsilon", "delta")}
        epsilon, delta = self._agreed()
        return Private(model, **about, secret=load_or_create(self.rules.secret), budget=epsilon, delta=delta)

    def _agreed(self) -> tuple[float, float]:
        """Return ε and δ of the agreement, or refuse an agreement that this silo's file does not allow."""
        epsilon, delta, own = self.agreed.get("epsilon"), self.agreed.get("delta"), self.rules
        if epsilon is None or delta is None or (own.delta is not None and delta > own.delta):
            raise InputError(f"This silo needs an agreement on ε, and on δ of {own.delta or 'any size'} at most.")
        if own.epsilon is not None and epsilon > own.epsilon:
            raise InputError(
                f"The agreement may cost ε = {epsilon:g}, more than the {own.epsilon:g} of this silo's file."
            )
        return float(epsilon), float(delta)

    def open(self, cohort: Cohort) -> None:
        """Hold the cohort to both budgets, also one that the silo's own code has made: no answer may exceed either."""
        account = cohort.account
        if account is None:
            raise InputError("The silo's own Cohort is not private: make it of a Private model.")
        epsilon, delta = self._agreed()
        account.budget = epsilon if account.budget is None else min(account.budget, epsilon)
        account.delta = min(account.delta, delta)
        if self.rules.epsilon is not None and self.rules.delta is not None:
            account.wider = Account(account.names, self.rules.delta, self.rules.epsilon)

    @contextmanager
    def while_answering(self, cohort: Cohort) -> Iterator[None]:
        """Begin with what was released before, and write down what is new before it leaves, one process at a time."""
        with lock_file(self.rules.spent.with_suffix(".lock")):
            accounts = self._accounts(cohort)
            for file, account in accounts.items():
                self._read(file, account)
            before = {file: account.total for file, account in accounts.items()}
            try:
                yield
            finally:
                for file, account in accounts.items():
                    if account.total > before[file]:
                        self._write(file, account)

    def _accounts(self, cohort: Cohort) -> dict[Path, Account]:
        """Return the accounts by their files, the one of all agreements first."""
        account = cohort.account
        if account is None:
            return {}
        wider = {} if account.wider is None else {self.rules.spent: account.wider}
        return {**wider, self.file: account}

    @staticmethod
    def _state(file: Path) -> tuple[int, ...]:
        """Tell whether somebody else has written: a file that is replaced is another one."""
        about = file.stat()
        return about.st_ino, about.st_mtime_ns, about.st_size

    def _read(self, file: Path, account: Account) -> None:
        if file.exists() and self._state(file) != self._known.get(file):
            try:
                with np.load(file, allow_pickle=False) as earlier:
                    account.merge(dict(earlier))
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                raise InputError(f"The privacy ledger {str(file)!r} cannot be read.") from None
            self._known[file] = self._state(file)

    def _write(self, file: Path, account: Account) -> None:
        packed: dict[str, Any] = account.pack()
        with atomic_write(file) as written:
            np.savez(written, **packed)
        self._known[file] = self._state(file)
