"""The public names, and the modules they are in; `__init__.py` reads them from here."""

from scaffpd import data as data
from scaffpd.algorithms import AFL as AFL
from scaffpd.algorithms import DRFA as DRFA
from scaffpd.algorithms import QFFL as QFFL
from scaffpd.algorithms import DeltaFL as DeltaFL
from scaffpd.algorithms import FedAvg as FedAvg
from scaffpd.algorithms import FedOpt as FedOpt
from scaffpd.algorithms import FedProx as FedProx
from scaffpd.algorithms import MinimaxNewton as MinimaxNewton
from scaffpd.algorithms import MinimaxSums as MinimaxSums
from scaffpd.algorithms import ProxSkip as ProxSkip
from scaffpd.algorithms import Scaffold as Scaffold
from scaffpd.algorithms import ScaffPD as ScaffPD
from scaffpd.algorithms import SubspaceSaddle as SubspaceSaddle
from scaffpd.algorithms.fair import fair as fair
from scaffpd.algorithms.steps import Auto as Auto
from scaffpd.algorithms.steps import Fixed as Fixed
from scaffpd.algorithms.steps import Theory as Theory
from scaffpd.errors import InputError as InputError
from scaffpd.estimators import FairFederatedClassifier as FairFederatedClassifier
from scaffpd.estimators import FairFederatedRegressor as FairFederatedRegressor
from scaffpd.estimators import FairFederatedSurvival as FairFederatedSurvival
from scaffpd.federation import Federation as Federation
from scaffpd.models import Linear as Linear
from scaffpd.models import Module as Module
from scaffpd.models import Personal as Personal
from scaffpd.models import personalise as personalise
from scaffpd.objectives import Agnostic as Agnostic
from scaffpd.objectives import Average as Average
from scaffpd.objectives import ChiSquare as ChiSquare
from scaffpd.objectives import ChiSquareBall as ChiSquareBall
from scaffpd.objectives import CVaR as CVaR
from scaffpd.objectives import Nash as Nash
from scaffpd.objectives import QFair as QFair
from scaffpd.objectives import Tilted as Tilted
from scaffpd.pipeline.curves import Curves as Curves
from scaffpd.privacy import Private as Private
from scaffpd.privacy import Spent as Spent
from scaffpd.secure.aggregation import SecureAggregation as SecureAggregation
from scaffpd.study.coefficients import CoefficientTable as CoefficientTable
from scaffpd.study.coefficients import coefficients as coefficients
from scaffpd.study.comparison import Comparison as Comparison
from scaffpd.study.comparison import Problem as Problem
from scaffpd.study.comparison import compare as compare
from scaffpd.study.gains import Joining as Joining
from scaffpd.study.joining import joining as joining
from scaffpd.study.path import path as path
from scaffpd.training.cohort import Cohort as Cohort
from scaffpd.training.history import Checkpoint as Checkpoint
from scaffpd.training.history import History as History
from scaffpd.training.loop import Result as Result
from scaffpd.training.loop import Status as Status
from scaffpd.training.loop import train as train

__version__: str
_HOME: dict[str, str]  # the module of every name
