"""Datasets whose rows belong to clients, and ways to cut one dataset into clients.

Names are imported when they are first used: `scaffpd --help` reads the settings of tables, and
needs neither NumPy nor SciPy for that.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaffpd.data.datasets import beijing_air as beijing_air
    from scaffpd.data.datasets import breast_cancer as breast_cancer
    from scaffpd.data.datasets import digits as digits
    from scaffpd.data.datasets import synthetic as synthetic
    from scaffpd.data.flamby import flamby_heart as flamby_heart
    from scaffpd.data.flamby import tcga_brca as tcga_brca
    from scaffpd.data.hospitals import heart_disease as heart_disease
    from scaffpd.data.silos import Silos as Silos
    from scaffpd.data.silos import dirichlet as dirichlet

_NAMES = {
    "datasets": "beijing_air breast_cancer digits synthetic",
    "flamby": "flamby_heart tcga_brca",
    "hospitals": "heart_disease",
    "silos": "Silos dirichlet",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return globals()[name]
