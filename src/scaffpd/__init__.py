"""Federated learning that serves every site: certified, tuning-free, distributionally robust training.

Everything public is a name of this module; what is heavy is imported when it is first used.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaffpd.algorithms import AFL as AFL
    from scaffpd.algorithms import DRFA as DRFA
    from scaffpd.algorithms import QFFL as QFFL
    from scaffpd.algorithms import AcceleratedPrimalDual as AcceleratedPrimalDual
    from scaffpd.algorithms import DeltaFL as DeltaFL
    from scaffpd.algorithms import Extragradient as Extragradient
    from scaffpd.algorithms import FedAdam as FedAdam
    from scaffpd.algorithms import FedAvg as FedAvg
    from scaffpd.algorithms import FedAvgM as FedAvgM
    from scaffpd.algorithms import FedDyn as FedDyn
    from scaffpd.algorithms import FedNova as FedNova
    from scaffpd.algorithms import FedProx as FedProx
    from scaffpd.algorithms import FedYogi as FedYogi
    from scaffpd.algorithms import GradientDescentAscent as GradientDescentAscent
    from scaffpd.algorithms import MinimaxGradient as MinimaxGradient
    from scaffpd.algorithms import MinimaxNewton as MinimaxNewton
    from scaffpd.algorithms import MinimaxSums as MinimaxSums
    from scaffpd.algorithms import ProxSkip as ProxSkip
    from scaffpd.algorithms import QuasiNewtonMinimax as QuasiNewtonMinimax
    from scaffpd.algorithms import SampledSubspaceSaddle as SampledSubspaceSaddle
    from scaffpd.algorithms import Scaffold as Scaffold
    from scaffpd.algorithms import ScaffPD as ScaffPD
    from scaffpd.algorithms import SubspaceSaddle as SubspaceSaddle
    from scaffpd.algorithms.fair import fair as fair
    from scaffpd.algorithms.steps import Auto as Auto
    from scaffpd.algorithms.steps import Fixed as Fixed
    from scaffpd.algorithms.steps import Nonconvex as Nonconvex
    from scaffpd.algorithms.steps import Schedule as Schedule
    from scaffpd.algorithms.steps import Theory as Theory
    from scaffpd.convexify import Convexified as Convexified
    from scaffpd.convexify import tct as tct
    from scaffpd.errors import InputError as InputError
    from scaffpd.estimators import FairFederatedClassifier as FairFederatedClassifier
    from scaffpd.estimators import FairFederatedRegressor as FairFederatedRegressor
    from scaffpd.federation import Federation as Federation
    from scaffpd.figures import partition_picture as partition_picture
    from scaffpd.models import Augment as Augment
    from scaffpd.models import Linear as Linear
    from scaffpd.models import LocalAdam as LocalAdam
    from scaffpd.models import LocalSGD as LocalSGD
    from scaffpd.models import Module as Module
    from scaffpd.models import Personal as Personal
    from scaffpd.models import personalise as personalise
    from scaffpd.objectives import Agnostic as Agnostic
    from scaffpd.objectives import Average as Average
    from scaffpd.objectives import ChiSquare as ChiSquare
    from scaffpd.objectives import ChiSquareBall as ChiSquareBall
    from scaffpd.objectives import CVaR as CVaR
    from scaffpd.objectives import Excess as Excess
    from scaffpd.objectives import Nash as Nash
    from scaffpd.objectives import QFair as QFair
    from scaffpd.objectives import Tilted as Tilted
    from scaffpd.privacy import Private as Private
    from scaffpd.privacy import Spent as Spent
    from scaffpd.secure import SecureAggregation as SecureAggregation
    from scaffpd.study.choosing import Choice as Choice
    from scaffpd.study.choosing import choose as choose
    from scaffpd.study.coalitions import Coalition as Coalition
    from scaffpd.study.coalitions import coalition as coalition
    from scaffpd.study.comparison import Comparison as Comparison
    from scaffpd.study.comparison import Problem as Problem
    from scaffpd.study.comparison import compare as compare
    from scaffpd.study.joining import Joining as Joining
    from scaffpd.study.joining import joining as joining
    from scaffpd.study.path import path as path
    from scaffpd.training.cohort import Cohort as Cohort
    from scaffpd.training.history import Checkpoint as Checkpoint
    from scaffpd.training.history import History as History
    from scaffpd.training.loop import Result as Result
    from scaffpd.training.loop import Status as Status
    from scaffpd.training.loop import train as train
    from scaffpd.training.trackers import MLflow as MLflow
    from scaffpd.training.trackers import TensorBoard as TensorBoard

__version__ = "0.2.0"

_HOME = {
    "scaffpd.algorithms": (
        "AFL",
        "DRFA",
        "QFFL",
        "AcceleratedPrimalDual",
        "DeltaFL",
        "Extragradient",
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
    ),
    "scaffpd.study.choosing": ("Choice", "choose"),
    "scaffpd.study.coalitions": ("Coalition", "coalition"),
    "scaffpd.training.cohort": ("Cohort",),
    "scaffpd.study.comparison": ("Comparison", "Problem", "compare"),
    "scaffpd.errors": ("InputError",),
    "scaffpd.estimators": ("FairFederatedClassifier", "FairFederatedRegressor"),
    "scaffpd.figures": ("partition_picture",),
    "scaffpd.study.path": ("path",),
    "scaffpd.federation": ("Federation",),
    "scaffpd.study.joining": ("Joining", "joining"),
    "scaffpd.training.history": ("Checkpoint", "History"),
    "scaffpd.models": (
        "Augment",
        "Linear",
        "LocalAdam",
        "LocalSGD",
        "Module",
        "Personal",
        "personalise",
    ),
    "scaffpd.objectives": (
        "Agnostic",
        "Average",
        "ChiSquare",
        "ChiSquareBall",
        "CVaR",
        "Excess",
        "Nash",
        "QFair",
        "Tilted",
    ),
    "scaffpd.privacy": ("Private", "Spent"),
    "scaffpd.secure": ("SecureAggregation",),
    "scaffpd.algorithms.steps": ("Auto", "Fixed", "Nonconvex", "Schedule", "Theory"),
    "scaffpd.convexify": ("Convexified", "tct"),
    "scaffpd.training.trackers": ("MLflow", "TensorBoard"),
    "scaffpd.training.loop": ("Result", "Status", "train"),
}
_MODULES = ("data", "features")
_WHERE = {name: home for home, names in _HOME.items() for name in names}

__all__ = [*sorted(_WHERE), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = import_module(f"scaffpd.{name}")
    else:
        near = get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'scaffpd' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
