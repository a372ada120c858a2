"""Fair objectives, each a set Λ of client weights and a penalty ψ on them.

| objective | Λ | ψ(λ) | x minimises |
|---|---|---|---|
| `Average` | {p} | 0 | Σ p_i f_i |
| `Agnostic` | simplex | 0 | max_i f_i |
| `ChiSquare(rho)` | simplex | (ρ/2) Σ (λ_i − p_i)²/p_i | mean + variance/(2ρ), clipped |
| `ChiSquareBall(delta)` | simplex, Σ (λ_i − p_i)²/p_i ≤ δ | 0 | mean + √(δ·variance), clipped |
| `CVaR(alpha)` | simplex, λ_i ≤ p_i/α | 0 | mean of the worst share α |
| `Tilted(rho)` | simplex | ρ Σ λ_i log(λ_i/p_i) | ρ log Σ p_i exp(f_i/ρ) |
| `QFair(q)` | λ ≥ 0 | Σ p_i (q/(q+1)) (λ_i/p_i)^{(q+1)/q} | Σ p_i f_i^{q+1}/(q+1) |
| `Nash(b)` | λ > 0 | Σ λ_i b_i − p_i − p_i log(λ_i/p_i) | −Σ p_i log(b_i − f_i) |
"""

from scaffpd.errors import unknown
from scaffpd.objectives.base import Objective
from scaffpd.objectives.chi_square import Agnostic, Average, ChiSquare
from scaffpd.objectives.chi_square_ball import ChiSquareBall
from scaffpd.objectives.cvar import CVaR
from scaffpd.objectives.nash import Nash
from scaffpd.objectives.q_fair import QFair
from scaffpd.objectives.tilted import Tilted

OBJECTIVES: dict[str, type[Objective]] = {
    kind.__name__: kind
    for kind in (Average, Agnostic, ChiSquare, ChiSquareBall, CVaR, Tilted, QFair, Nash)
}


def named(name: str) -> Objective:
    """Return an objective by name, in any spelling ("cvar", "chi-square"), of usual strength."""
    kinds = {name.lower(): kind for name, kind in OBJECTIVES.items() if kind is not Nash}
    kind = kinds.get(name.lower().replace("-", "").replace("_", "").replace(" ", ""))
    if kind is None:
        raise unknown("objective", name, [known.__name__ for known in kinds.values()])
    return kind(**{kind.parameter: kind.usual}) if kind.parameter else kind()


__all__ = [
    "Agnostic",
    "Average",
    "CVaR",
    "ChiSquare",
    "ChiSquareBall",
    "Nash",
    "Objective",
    "QFair",
    "Tilted",
]
