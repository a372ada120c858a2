r"""A silo's account of its releases, over all runs, in a file.

Noise comes from the operating system, and neither it nor what it is drawn from is ever stored: a
question that is repeated after a restart is another release. Counts for curves are stored with
their noise, so that the same bytes are posted again. All releases are on disk before a post leaves.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from scaffpd.deploy.messages import Json
from scaffpd.errors import InputError
from scaffpd.files import atomic_write, lock_file
from scaffpd.privacy.accountant import Account

DELTA = 1e-5  # of a silo's own budget


class PrivacyLedger:
    """Releases of one silo under an agreement, and under all of them within its own budget.

    Args:
        file: of all releases; those under the agreement are beside it.
        digest: the agreement's.
        epsilon: the silo's own budget; `None` leaves it to every agreement.
    """

    def __init__(self, file: Path, digest: str, epsilon: float | None) -> None:
        self._all = file
        self._file = file.with_stem(f"{file.stem}-{digest[:12]}")
        self._epsilon = epsilon
        self._written: dict[Path, int] = {}

    def open(self, account: Account | None) -> Account:
        """Bind an account to both budgets, with what was released before."""
        if account is None:
            raise InputError(
                "cohort-not-private",
                "The silo's own Cohort is not private: build it from a Private model.",
            )
        if self._epsilon is not None:
            account.wider = Account(account.names, DELTA, self._epsilon)
        with lock_file(self._all.with_suffix(".lock")):
            for file, own in self._accounts(account).items():
                self._read(file, own)
        return account

    def _accounts(self, account: Account) -> dict[Path, Account]:
        wider = {} if account.wider is None else {self._all: account.wider}
        return {**wider, self._file: account}

    def write(self, opened: Account) -> None:
        """Write down what is new, before a post leaves."""
        for file, account in self._accounts(opened).items():
            if account.total > self._written.get(file, 0):
                packed: Json = account.pack()
                with atomic_write(file) as written:
                    np.savez(written, **packed)
                self._written[file] = account.total

    def _read(self, file: Path, account: Account) -> None:
        if not file.exists():
            return
        try:
            with np.load(file, allow_pickle=False) as earlier:
                account.merge(dict(earlier))
            self._written[file] = account.total
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            raise InputError(
                "ledger-unreadable", f"The privacy ledger {str(file)!r} cannot be read."
            ) from None
