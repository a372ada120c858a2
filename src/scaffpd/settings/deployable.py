"""What runs across organisations cannot have: refused from the terms, before any number leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scaffpd.algorithms import ALGORITHMS, Algorithm, Fair
from scaffpd.algorithms.base import SLOPES, VECTORS
from scaffpd.errors import InputError
from scaffpd.federation.border import shown
from scaffpd.settings.tables import PrivacyBudget

LEAST_ROWS = 20  # that a number or a sum is over


@dataclass(frozen=True)
class Deployed:
    """Terms of a federation, as far as they matter here.

    Attributes:
        file: its name.
        method: the agreed method.
        network: whether the model is a network.
        silos: their names.
        rows: what they count for, if that is agreed.
        rate: the agreed rate of local steps.
        private: [privacy].
        shared: whether silos share its noise.
    """

    file: str
    method: Algorithm
    network: bool
    silos: Sequence[str]
    rows: Mapping[str, int] | None
    rate: float | None
    private: PrivacyBudget | None
    shared: bool


def refuse_shown(terms: Deployed) -> None:
    """Refuse what would show more of a silo than its operator can read about beforehand."""
    method = terms.method
    file = terms.file
    name = type(method).__name__
    network = terms.network
    if method.needs & {VECTORS, SLOPES}:
        raise InputError(
            "method-needs-vectors",
            f"{name} needs every silo's own vectors, but only sums leave silos: use another "
            f"algorithm in {file!r}, such as Fair.",
        )
    if getattr(method, "clients_per_round", None) is not None:
        raise InputError(
            "clients-per-round-fixed",
            f"All silos take part in every sum: leave clients_per_round out of {file!r}.",
        )
    asked = method.asks(convex=not network)
    if more := shown(method.simulated(asked)):
        raise InputError(
            "method-for-simulation",
            f"{name} is for simulation as {file!r} has it: it shows {more[0].words}; of AFL "
            "and DRFA give dual_rate, or take ScaffPD.",
        )
    batch = getattr(method, "batch_size", None)
    if batch is not None and not network:
        raise InputError(
            "minibatch-of-a-table",
            f"batch_size is for simulation and for networks: leave it out of {file!r}, because "
            "few rows of a table are known by their answers.",
        )
    if batch is not None and batch < LEAST_ROWS:
        raise InputError(
            "minibatch-too-small",
            f"Silos answer no question about fewer than {LEAST_ROWS} rows: raise batch_size in "
            f"{file!r}.",
        )
    public = terms.private is not None or terms.rate is not None
    if method.measures(convex=not network) and not public:
        raise InputError(
            "rate-missing",
            f"{name} needs to know how curved losses are, which stays at silos: agree on "
            f"training.rate in {file!r}, such as 0.1, or use another method.",
        )
    if terms.rows is not None and sorted(terms.rows) != sorted(terms.silos):
        raise InputError(
            "rows-of-other-silos", f"[rows] of {file!r} needs a number for every silo."
        )
    by_rows = getattr(method, "weights", None) == "samples"
    by_rows |= terms.shared
    by_rows |= network and isinstance(method, Fair) and method.local_steps is None
    if by_rows and terms.rows is None:
        raise InputError(
            "rows-missing",
            f"{name} counts silos by their rows, which only the agreement says: add [rows] to "
            f'{file!r}, or take weights = "uniform", local_steps and noise that is not shared.',
        )


def refuse_noisy(terms: Deployed, ranged: bool, auto: bool) -> None:
    """Refuse what does not go with noise.

    Args:
        terms: those of the federation.
        ranged: whether all numbers have ranges, or columns no names.
        auto: whether κ is left to the rows.
    """
    private = terms.private
    file = terms.file
    assert private is not None
    if not terms.method.asks_losses:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if kind.asks_losses)
        raise InputError(
            "method-not-private",
            f"[privacy] of {file!r} needs a method that asks for losses itself, because "
            f"nothing else may leave silos: {able}, not {type(terms.method).__name__}.",
        )
    several = (
        getattr(terms.method, "local_steps", 1) not in (None, 1)
        or getattr(terms.method, "batch_size", None) is not None
    )
    if terms.shared and (terms.network or several):
        raise InputError(
            "shared-noise-visible",
            f"[privacy] shared of {file!r} needs a linear model, one local step and all rows: "
            "shared noise only covers sums of gradients.",
        )
    if not ranged:
        raise InputError(
            "range-missing",
            f"[privacy] of {file!r} needs the range of every numeric column, such as "
            "age = [0, 100]: means and deviations carry no noise.",
        )
    if auto:
        raise InputError(
            "evidence-with-noise",
            f'{file!r} has model.kappa = "auto" with [privacy]: evidence would cost ε. Give κ '
            "as a number, such as 10: personal models are made after the run and cost nothing.",
        )
    if not 1e-6 <= private.clip <= 1e6 or not 1e-6 <= private.loss_clip <= 1e6:
        raise InputError("clip-out-of-range", f"{file!r} needs clips from 1e-6 to 1e6.")
