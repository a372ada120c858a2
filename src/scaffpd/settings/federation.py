"""`federation.toml`: the coordinator's settings, and which terms no run across organisations has.

What cannot be is refused from the terms, before any number leaves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

import scaffpd.fields as key
from scaffpd.algorithms import ALGORITHMS, Fair, MinimaxSums
from scaffpd.algorithms.base import SLOPES, VECTORS
from scaffpd.errors import InputError
from scaffpd.federation.border import shown
from scaffpd.fields import Needs, read_toml, validated
from scaffpd.models.cox import refuse_noise, refuse_powers
from scaffpd.pipeline.judging import reference_levels
from scaffpd.secure.aggregation import FEWEST, most_weightings
from scaffpd.settings.tables import AUTO, ERRORS, OwnCode
from scaffpd.settings.terms import DeployedPrivacy, FederationTerms

SILO = {"data": "a silo's silo.toml; a coordinator's federation.toml is needed"}
LEAST_ROWS = 20  # that a number or a sum is over


class FederationFile(FederationTerms, OwnCode):
    """A coordinator's settings; its own classes are copies of silos', and not of the agreement."""

    # of the run: checkpoints, tables, the model
    folder: key.FileName = Field(default="run", validate_default=True)
    # where silos reach it; FLARE's administrators use the next port
    server: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z0-9.-]+(:[1-9][0-9]{0,4})?$"),
        Needs("a host, or host:port"),
    ] = "localhost:8002"
    timeout: key.Positive = 120.0  # seconds to wait for a silo before the run pauses

    def model_post_init(self, context: Path) -> None:
        """Make the method; this is the user's own file, with code of this machine."""
        super().model_post_init(context)
        if self.own:
            self.settle(self, context.parent)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FederationFile:
        file = Path(path).absolute()
        found = validated(cls, read_toml(file, SILO), file)
        check(found)
        return found

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.partition(":")
        return host, int(port or 8002)


HONEST = 3  # silos, of which squares do not tell each


def check(terms: FederationTerms) -> None:
    """Refuse settings that do not go together, as far as the method is known."""
    file = terms.path.name
    terms.encoding()
    terms.linear()
    if terms.curves == "on" and not terms.curved:
        raise InputError(
            "curves-without-columns",
            f"{file!r} asks for curves, which go with a linear model of columns of numbers.",
        )
    n = len(terms.silos)
    few = n >= FEWEST and most_weightings(n, terms.colluders) < 2
    if few and terms.curved and (terms.paired or terms.plan().evidence):
        raise InputError(
            "curves-with-few-silos",
            f"{file!r} asks for pairs, or for strengths by evidence, beside curves: at one "
            "point these make more sums than are safe with so few silos. Take pairs = 0 and "
            "l2 and kappa as numbers, or more silos.",
        )
    if terms.task.timed and terms.labels:
        raise InputError(
            "loss-without-classes",
            f"{file!r} has a model of times to an event, which needs columns and no labels.",
        )
    _check_effects(terms)
    if not terms.settled:
        return
    if terms.training.tol and not terms.certified:
        kind = type(terms.method).__name__ if terms.privacy is None else "A run with noise"
        kind = "A network" if terms.model.network else kind
        raise InputError(
            "tol-without-certificate",
            f"{kind} certifies nothing: leave training.tol out of {file!r}.",
        )
    sums = isinstance(terms.method, MinimaxSums)
    if sums and terms.tol and terms.model.l2 == 0 and not terms.reaching:
        raise InputError(
            "ridge-missing",
            f"Without a ridge nothing is proven of personal models, or with so few silos: give "
            f"model.l2 of {file!r} a number above 0, or leave it out.",
        )
    if terms.task.timed and terms.method.positive:
        refuse_powers()
    _refuse_shown(terms)
    if terms.privacy is not None:
        _refuse_noisy(terms, terms.privacy)


def _check_effects(terms: FederationTerms) -> None:
    """Refuse a table of effects that would show too much, or that nobody has asked for."""
    model, file = terms.model, terms.path.name
    reference_levels(terms.encoding(), model.reference)
    if model.effects is None:
        if model.errors != ERRORS[0] or model.reference:
            raise InputError(
                "effects-missing",
                f"{file!r} has model.errors or model.reference, which are of a table of effects: "
                'add model.effects, such as "fixed".',
            )
        return
    if terms.privacy is not None:
        raise InputError(
            "effects-with-noise",
            f"Effects are sums without noise: leave model.effects or [privacy] out of {file!r}.",
        )
    n = len(terms.silos)
    if n - terms.colluders < HONEST and (model.effects != "fixed" or model.errors != ERRORS[0]):
        raise InputError(
            "effects-with-few-silos",
            f"Effects that differ, and robust errors, are sums of squares, from which "
            f"the numbers of {n - terms.colluders} silos that do not collude follow: with so few, "
            f'{file!r} may have effects = "fixed" with errors by the model.',
        )
    if most_weightings(n, terms.colluders) < 2 and not terms.plan().evidence:
        raise InputError(
            "effects-without-evidence",
            f"At the start effects make one sum more than is safe with so few silos: leave "
            f"model.l2 out of {file!r}, for strengths by evidence, which ask for the same one.",
        )


def _refuse_shown(terms: FederationTerms) -> None:
    """Refuse what would show more of a silo than its operator can read about beforehand."""
    method = terms.method
    file = terms.path.name
    name = type(method).__name__
    network = terms.model.network is not None
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
    public = terms.privacy is not None or terms.training.rate is not None
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
    by_rows |= terms.privacy is not None and terms.privacy.shared
    by_rows |= network and isinstance(method, Fair) and method.local_steps is None
    if by_rows and terms.rows is None:
        raise InputError(
            "rows-missing",
            f"{name} counts silos by their rows, which only the agreement says: add [rows] to "
            f'{file!r}, or take weights = "uniform", local_steps and noise that is not shared.',
        )


def _refuse_noisy(terms: FederationTerms, private: DeployedPrivacy) -> None:
    """Refuse what does not go with noise."""
    file = terms.path.name
    if terms.task.timed:
        refuse_noise()
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
    if private.shared and (terms.model.network or several):
        raise InputError(
            "shared-noise-visible",
            f"[privacy] shared of {file!r} needs a linear model, one local step and all rows: "
            "shared noise only covers sums of gradients.",
        )
    if isinstance(terms.columns, dict) and not terms.encoding().get("declared"):
        raise InputError(
            "range-missing",
            f"[privacy] of {file!r} needs the range of every numeric column, such as "
            "age = [0, 100]: means and deviations carry no noise.",
        )
    if terms.model.kappa == AUTO:
        raise InputError(
            "evidence-with-noise",
            f'{file!r} has model.kappa = "auto" with [privacy]: evidence would cost ε. Give κ '
            "as a number, such as 10: personal models are made after the run and cost nothing.",
        )
    if not 1e-6 <= private.clip <= 1e6 or not 1e-6 <= private.loss_clip <= 1e6:
        raise InputError("clip-out-of-range", f"{file!r} needs clips from 1e-6 to 1e6.")
