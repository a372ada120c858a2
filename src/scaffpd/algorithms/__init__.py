"""Algorithms: one paper, one file; `base` and `central` hold what several share."""

from scaffpd.algorithms.accelerated_primal_dual import AcceleratedPrimalDual
from scaffpd.algorithms.afl import AFL
from scaffpd.algorithms.delta_fl import DeltaFL
from scaffpd.algorithms.drfa import DRFA
from scaffpd.algorithms.extragradient import Extragradient
from scaffpd.algorithms.fair import Fair, fair
from scaffpd.algorithms.fed_avg import FedAvg
from scaffpd.algorithms.fed_prox import FedProx
from scaffpd.algorithms.gradient_descent_ascent import GradientDescentAscent
from scaffpd.algorithms.minimax_gradient import MinimaxGradient
from scaffpd.algorithms.prox_skip import ProxSkip
from scaffpd.algorithms.q_ffl import QFFL
from scaffpd.algorithms.quasi_newton_minimax import QuasiNewtonMinimax
from scaffpd.algorithms.scaff_pd import ScaffPD
from scaffpd.algorithms.scaffold import Scaffold
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle
from scaffpd.algorithms.subspace_sampled import SampledSubspaceSaddle

__all__ = [
    "AFL",
    "DRFA",
    "QFFL",
    "AcceleratedPrimalDual",
    "DeltaFL",
    "Extragradient",
    "Fair",
    "FedAvg",
    "FedProx",
    "GradientDescentAscent",
    "MinimaxGradient",
    "ProxSkip",
    "QuasiNewtonMinimax",
    "SampledSubspaceSaddle",
    "ScaffPD",
    "Scaffold",
    "SubspaceSaddle",
    "fair",
]
