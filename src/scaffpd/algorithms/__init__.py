"""Algorithms: one paper, one file; `base` and `minimax` hold what they share and say about themselves."""

from scaffpd.algorithms.afl import AFL
from scaffpd.algorithms.base import Algorithm
from scaffpd.algorithms.central import Extragradient, GradientDescentAscent
from scaffpd.algorithms.drfa import DRFA
from scaffpd.algorithms.fair import Fair, fair
from scaffpd.algorithms.fed_avg import QFFL, DeltaFL, FedAvg, FedProx
from scaffpd.algorithms.fed_dyn import FedDyn
from scaffpd.algorithms.fed_nova import FedNova
from scaffpd.algorithms.fed_opt import FedAdam, FedAvgM, FedYogi
from scaffpd.algorithms.minimax_newton import MinimaxNewton
from scaffpd.algorithms.minimax_sums import MinimaxSums
from scaffpd.algorithms.quasi_newton_minimax import MinimaxGradient, QuasiNewtonMinimax
from scaffpd.algorithms.scaff_pd import AcceleratedPrimalDual, ScaffPD
from scaffpd.algorithms.scaffold import ProxSkip, Scaffold
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle
from scaffpd.algorithms.subspace_sampled import SampledSubspaceSaddle

ALGORITHMS: dict[str, type[Algorithm]] = {  # by the names of their classes, in the order of tables
    kind.__name__: kind
    for kind in (
        *(
            FedAvg,
            FedProx,
            FedNova,
            FedAvgM,
            FedAdam,
            FedYogi,
            Scaffold,
            FedDyn,
            ProxSkip,
            AFL,
            DRFA,
            QFFL,
        ),
        *(DeltaFL, GradientDescentAscent, Extragradient),
        *(
            AcceleratedPrimalDual,
            MinimaxGradient,
            QuasiNewtonMinimax,
            MinimaxNewton,
            ScaffPD,
            SubspaceSaddle,
        ),
        *(SampledSubspaceSaddle, MinimaxSums, Fair),
    )
}

__all__ = [
    "AFL",
    "ALGORITHMS",
    "DRFA",
    "QFFL",
    "AcceleratedPrimalDual",
    "Algorithm",
    "DeltaFL",
    "Extragradient",
    "Fair",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedNova",
    "FedProx",
    "FedYogi",
    "GradientDescentAscent",
    "MinimaxGradient",
    "MinimaxNewton",
    "MinimaxSums",
    "ProxSkip",
    "QuasiNewtonMinimax",
    "SampledSubspaceSaddle",
    "ScaffPD",
    "Scaffold",
    "SubspaceSaddle",
    "fair",
]
