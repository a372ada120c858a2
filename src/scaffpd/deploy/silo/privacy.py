r"""A silo's noise: its part of shared noise, and the ledger of its releases.

Noise comes from a secret of this silo, and the ledger is written before an answer leaves. So a
restarted silo neither forgets what was spent nor repeats an answer with other noise.

privacy.key             the secret, readable for its owner only
privacy-spent-NAME.npz  every release under the agreement of that name, up to the agreed ε
privacy-spent.npz       every release under any agreement, up to the ε of the silo's own file
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.deploy.messages import SCALE, Json, JsonMapping, names_of, number
from scaffpd.errors import InputError, unknown
from scaffpd.federation.questions import Reply
from scaffpd.files import atomic_write, load_or_create, lock_file
from scaffpd.privacy import Private
from scaffpd.privacy.accountant import Account
from scaffpd.privacy.noise import digest
from scaffpd.privacy.oracle import SumTerms
from scaffpd.run.settings.model_file import PRIVACY
from scaffpd.run.settings.silo import SecureRules, SiloFile
from scaffpd.training.cohort import Cohort


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
            account = cohort.account
            accounts = {} if account is None else {self.file: account}
            if account is not None and account.wider is not None:  # that of all agreements first
                accounts = {self._all: account.wider, **accounts}
            for file, account in accounts.items():
                self._read(file, account)
            try:
                yield
            finally:
                for file, account in accounts.items():
                    if account.total > (self._written.get(file, 0) if file.exists() else 0):
                        self._write(file, account)

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
