"""scikit-learn estimators: `fit(X, y, clients=...)`, and everything else as scikit-learn has it."""

from scaffpd.estimators.linear import FairFederatedClassifier, FairFederatedRegressor

__all__ = ["FairFederatedClassifier", "FairFederatedRegressor"]
