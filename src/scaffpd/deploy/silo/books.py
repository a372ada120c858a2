r"""A silo's differential privacy: what it has released, in a file that outlives runs and processes.

Noise comes from a secret that only this silo has, and the books are written before an answer leaves. So a restarted
silo, or a process for every message, neither forgets what was spent nor gives the same answer with other noise.

privacy.key        the secret, readable for its owner only
privacy-spent.npz  every release so far; with an agreement's own name in it where the silo has no budget of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.checkpoint import replacing
from scaffpd.cohort import Cohort
from scaffpd.deploy.protocol.setup import PRIVACY
from scaffpd.errors import InputError, unknown
from scaffpd.privacy import Private
from scaffpd.secret import kept


@dataclass(frozen=True)
class PrivacyRules:
    """What a silo's file says about differential privacy.

    Attributes:
        required: whether the silo takes part with noise only.
        epsilon: the largest ε that its rows may ever cost, all runs together; `None` leaves it to every agreement.
        delta: δ of its own budget; `None` takes the agreement's.
        columns: whether sums over columns may leave exactly: they are no part of ε.
        secret: the file that noise is drawn from.
        spent: the file of the books.
    """

    required: bool
    epsilon: float | None
    delta: float | None
    columns: bool
    secret: Path
    spent: Path


class Books:
    """The privacy of one silo under one agreement.

    Args:
        rules: of the silo.
        agreed: what the agreement says, see `Private`.
        digest: the agreement's name.
    """

    def __init__(self, rules: PrivacyRules, agreed: Mapping[str, Any], digest: str) -> None:
        for name in agreed:
            if name not in PRIVACY:
                raise unknown("privacy setting", name, PRIVACY)
        self.rules, self.agreed = rules, dict(agreed)
        alone = rules.epsilon is not None
        self.file = rules.spent if alone else rules.spent.with_stem(f"{rules.spent.stem}-{digest[:12]}")
        self._written = 0

    def private(self, model: Any) -> Private:
        """The model with the agreement's noise, this silo's secret and the smaller budget of the two."""
        about = dict(self.agreed)
        epsilon, delta = about.pop("epsilon", None), about.pop("delta", None)
        budget = epsilon if self.rules.epsilon is None else self.rules.epsilon
        if epsilon is None or delta is None or (self.rules.delta is not None and delta > self.rules.delta):
            raise InputError(
                f"This silo needs an agreement on ε, and on δ of {self.rules.delta or 'any size'} at most."
            )
        about |= {"secret": kept(self.rules.secret), "budget": budget, "delta": self.rules.delta or delta}
        return Private(model, **about)

    def open(self, cohort: Cohort) -> None:
        """Begin with what was released before."""
        if cohort.account is None:
            raise InputError("The silo's own Cohort is not private: make it of a Private model.")
        if self.file.exists():
            try:
                with np.load(self.file, allow_pickle=False) as before:
                    cohort.account.merge(dict(before))
            except (OSError, ValueError, KeyError):
                raise InputError(f"The books {str(self.file)!r} cannot be read.") from None
        self._written = cohort.account.total

    def write(self, cohort: Cohort) -> None:
        """Keep what is new."""
        account = cohort.account
        if account is None or account.total == self._written:
            return
        with replacing(self.file) as file:
            np.savez(file, **account.pack())  # type: ignore[arg-type]
        self._written = account.total


def spent(cohort: Cohort) -> dict[str, float]:
    """(ε, δ) so far: how often a silo was asked, and no fact about its rows."""
    found = cohort.privacy
    assert found is not None
    return {"epsilon": found.worst, "delta": found.delta}
