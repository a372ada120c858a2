r"""A silo's differential privacy: what it has released, in a file that outlives runs and processes.

Noise comes from a secret that only this silo has, and the ledger is written before an answer leaves. So a restarted
silo, or a process for every message, neither forgets what was spent nor gives the same answer with other noise.

privacy.key        the secret, readable for its owner only
privacy-spent.npz  every release so far; with an agreement's own name in it where the silo has no budget of its own
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from scaffpd.cohort import Cohort
from scaffpd.config.model_file import PRIVACY
from scaffpd.config.silo import PrivacyRules
from scaffpd.errors import InputError, unknown
from scaffpd.privacy import Private
from scaffpd.system import atomic_write, load_or_create, lock_file


class PrivacyLedger:
    """The releases of one silo under one agreement: its own rules, what is agreed (see `Private`) and its digest."""

    def __init__(self, rules: PrivacyRules, agreed: Mapping[str, Any], digest: str) -> None:
        for name in agreed:
            if name not in PRIVACY:
                raise unknown("privacy setting", name, PRIVACY)
        self.rules, self.agreed = rules, dict(agreed)
        alone = rules.epsilon is not None
        self.file = rules.spent if alone else rules.spent.with_stem(f"{rules.spent.stem}-{digest[:12]}")
        self._known: tuple[int, ...] = ()  # the file as it was read or written last

    def private(self, model: Any) -> Private:
        """Return the model with the agreement's noise, this silo's secret and its own budget, if it has one."""
        about = {name: value for name, value in self.agreed.items() if name not in ("epsilon", "delta")}
        budget, delta = self._limits()
        return Private(model, **about, secret=load_or_create(self.rules.secret), budget=budget, delta=delta)

    def _limits(self) -> tuple[float, float]:
        """Return ε and δ: of all runs together where the silo's file has them, else of this agreement."""
        epsilon, delta, own = self.agreed.get("epsilon"), self.agreed.get("delta"), self.rules
        if epsilon is None or delta is None or (own.delta is not None and delta > own.delta):
            raise InputError(f"This silo needs an agreement on ε, and on δ of {own.delta or 'any size'} at most.")
        if own.epsilon is not None and epsilon > own.epsilon:
            raise InputError(
                f"The agreement may cost ε = {epsilon:g}, more than the {own.epsilon:g} of this silo's file."
            )
        return float(epsilon if own.epsilon is None else own.epsilon), float(own.delta or delta)

    def open(self, cohort: Cohort) -> None:
        """Hold the cohort to the budget, also one that the silo's own code has made."""
        if cohort.account is None:
            raise InputError("The silo's own Cohort is not private: make it of a Private model.")
        budget, delta = self._limits()
        own = cohort.account.budget
        cohort.account.budget = budget if own is None else min(own, budget)
        cohort.account.delta = min(cohort.account.delta, delta)

    @contextmanager
    def while_answering(self, cohort: Cohort) -> Iterator[None]:
        """Begin with what was released before, and write down what is new before it leaves, one process at a time."""
        with lock_file(self.file.with_suffix(".lock")):
            self._read(cohort)
            before = 0 if cohort.account is None else cohort.account.total
            try:
                yield
            finally:
                self._write(cohort, before)

    def _state(self) -> tuple[int, ...]:
        """Tell whether somebody else has written: a file that is replaced is another one."""
        about = self.file.stat()
        return about.st_ino, about.st_mtime_ns, about.st_size

    def _read(self, cohort: Cohort) -> None:
        if self.file.exists() and cohort.account is not None and self._state() != self._known:
            try:
                with np.load(self.file, allow_pickle=False) as earlier:
                    cohort.account.merge(dict(earlier))
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                raise InputError(f"The privacy ledger {str(self.file)!r} cannot be read.") from None
            self._known = self._state()

    def _write(self, cohort: Cohort, before: int) -> None:
        account = cohort.account
        if account is not None and account.total > before:
            with atomic_write(self.file) as file:
                np.savez(file, **account.pack())
            self._known = self._state()
