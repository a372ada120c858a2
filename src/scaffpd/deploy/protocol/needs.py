"""What every algorithm asks of a silo: a silo answers these questions and no others.

A silo that has agreed to federated averaging will not hand out a gradient. `evaluate` (a loss, an accuracy, a count) is
part of every run.
"""

from __future__ import annotations

from scaffpd.errors import unknown

GRADIENTS, LOSSES, UPDATES = "gradients", "losses", "local_updates"
PROXIMAL, CURVATURE, DIAGONAL, EVALUATE = "proximal_steps", "curvature", "diagonal", "evaluate"
SPENT = "spent"  # (ε, δ) so far
PROJECT = "project"  # ⟨c_i, v⟩: a scalar in place of a vector, for servers that do not see c_i
CARD, MEET, OPEN, MASKED, REVEAL, SIZES = "card", "meet", "open", "masked", "reveal", "sizes"  # see `masks`
SECRET = frozenset({CARD, MEET, OPEN, MASKED, REVEAL, SIZES})

NEEDS: dict[str, frozenset[str]] = {
    "AFL": frozenset({GRADIENTS, LOSSES, UPDATES}),
    "AcceleratedPrimalDual": frozenset({GRADIENTS}),
    "DRFA": frozenset({GRADIENTS, LOSSES, UPDATES}),
    "DeltaFL": frozenset({LOSSES, UPDATES}),
    "Extragradient": frozenset({GRADIENTS}),
    "Fair": frozenset({GRADIENTS, UPDATES, PROXIMAL, CURVATURE, DIAGONAL}),
    "FedAvg": frozenset({UPDATES}),
    "FedProx": frozenset({UPDATES}),
    "GradientDescentAscent": frozenset({GRADIENTS}),
    "MinimaxGradient": frozenset({GRADIENTS}),
    "ProxSkip": frozenset({UPDATES}),
    "QFFL": frozenset({LOSSES, UPDATES}),
    "QuasiNewtonMinimax": frozenset({GRADIENTS, DIAGONAL}),
    "SampledSubspaceSaddle": frozenset({GRADIENTS, PROXIMAL, CURVATURE, DIAGONAL}),
    "ScaffPD": frozenset({GRADIENTS, UPDATES}),
    "Scaffold": frozenset({GRADIENTS, UPDATES}),
    "SubspaceSaddle": frozenset({GRADIENTS, PROXIMAL, CURVATURE, DIAGONAL}),
}
LOOKING = ("MinimaxGradient", "QuasiNewtonMinimax")  # the server looks at every silo's own vectors, not only at sums
KEEPING = ("ProxSkip", "SampledSubspaceSaddle", "Scaffold")  # vectors are kept from round to round, by the server


def needs(algorithm: str) -> frozenset[str]:
    """The questions of an algorithm, by its name."""
    if algorithm not in NEEDS:
        raise unknown("algorithm", algorithm, NEEDS)
    return NEEDS[algorithm] | {EVALUATE}
