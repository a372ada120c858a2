"""Algorithms: one paper, one file.

`base` and `minimax` hold what they share, `saddle` and `subspace` the server's small problems, and
`steps` the step rules of Scaff-PD.
"""

from scaffpd.algorithms.afl import AFL
from scaffpd.algorithms.base import Algorithm
from scaffpd.algorithms.delta_fl import DeltaFL
from scaffpd.algorithms.drfa import DRFA
from scaffpd.algorithms.fair import Fair, fair
from scaffpd.algorithms.fed_avg import FedAvg
from scaffpd.algorithms.fed_opt import FedOpt
from scaffpd.algorithms.fed_prox import FedProx
from scaffpd.algorithms.minimax_newton import MinimaxNewton
from scaffpd.algorithms.minimax_sums import MinimaxSums
from scaffpd.algorithms.prox_skip import ProxSkip
from scaffpd.algorithms.q_ffl import QFFL
from scaffpd.algorithms.scaff_pd import ScaffPD
from scaffpd.algorithms.scaffold import Scaffold
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle
from scaffpd.objectives.base import Objective

# in the order of tables
ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.__name__: kind
    for kind in (
        *(FedAvg, FedProx, FedOpt, Scaffold, ProxSkip, AFL, DRFA, QFFL, DeltaFL),
        *(MinimaxNewton, MinimaxSums, ScaffPD, SubspaceSaddle, Fair),
    )
}


def published(
    objective: Objective, local_steps: int = 10, batch_size: int | None = None
) -> dict[str, Algorithm]:
    """Return all published methods by name, with the settings that they take.

    A method of one objective keeps it; of ProxSkip `local_steps` is the expected number.
    """
    listed: dict[str, Algorithm] = {}
    for kind in ALGORITHMS.values():
        listed |= kind.usual(objective, local_steps, batch_size) if kind.published else {}
    return listed


__all__ = [
    "AFL",
    "ALGORITHMS",
    "DRFA",
    "QFFL",
    "Algorithm",
    "DeltaFL",
    "Fair",
    "FedAvg",
    "FedOpt",
    "FedProx",
    "MinimaxNewton",
    "MinimaxSums",
    "ProxSkip",
    "ScaffPD",
    "Scaffold",
    "SubspaceSaddle",
    "fair",
    "published",
]
