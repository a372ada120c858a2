r"""Does training work on this machine? A problem small enough to be solved by hand.

Two clients with f_1(x) = x²/2 and f_2(x) = (2x − 3)²/2. The worst of the two is smallest where they are equal and their
slopes cancel: x = 1, both losses 1/2, λ = (2/3, 1/3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

X, VALUE, WEIGHTS = 1.0, 0.5, (2 / 3, 1 / 3)
TOL = 1e-8


def self_check() -> dict[str, str]:
    """By method, "ok" or what is wrong; whatever is raised is caught and said."""
    return {name: _outcome(make) for name, make in _methods().items()}


def _methods() -> dict[str, Callable[[], Any]]:
    from scaffpd.algorithms import ScaffPD, fair
    from scaffpd.objectives import Agnostic

    return {"subspace saddle": lambda: fair(Agnostic()), "Scaff-PD": lambda: ScaffPD(Agnostic())}


def _outcome(make: Callable[[], Any]) -> str:
    try:
        return _difference(make()) or "ok"
    except Exception as error:  # this is where whatever is broken has to be said
        return f"{type(error).__name__}: {error}"


def _difference(algorithm: Any) -> str:
    """What is not as it should be; nothing where all is well."""
    from scaffpd.cohort import Cohort
    from scaffpd.models import Linear
    from scaffpd.training import train

    clients = [(np.array([[1.0]]), np.array([0.0])), (np.array([[2.0]]), np.array([3.0]))]
    result = train(algorithm, Cohort(clients, Linear("squared")), rounds=1000, tol=TOL)
    x = float(result.x[0])
    gap = max(x**2 / 2, (2 * x - 3) ** 2 / 2) - VALUE
    if result.certificate is None or not result.certificate <= TOL:
        return f"no certified gap of {TOL:g}: {result.message}"
    if gap > result.certificate:
        return f"the certificate says {result.certificate:.1e}, and the optimum is {gap:.1e} away"
    if abs(x - X) > 1e-4 or not np.allclose(result.weights, WEIGHTS, atol=1e-3):
        return f"x = {x:.6f} and λ = {np.round(result.weights, 4).tolist()}, expected {X:g} and (2/3, 1/3)"
    return ""
