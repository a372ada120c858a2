"""scikit-learn estimators: `fit(X, y, clients=...)`, and everything else as scikit-learn has it."""

from importlib.util import find_spec

from scaffpd.errors import not_installed

if find_spec("sklearn") is None:
    raise not_installed("scikit-learn", "sklearn")

from scaffpd.estimators.linear import FairFederatedClassifier, FairFederatedRegressor

__all__ = ["FairFederatedClassifier", "FairFederatedRegressor"]
