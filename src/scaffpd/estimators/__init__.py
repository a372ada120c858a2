"""scikit-learn estimators: `fit(X, y, clients=...)`, and everything else as scikit-learn has it."""

from scaffpd.estimators.classifier import FairFederatedClassifier
from scaffpd.estimators.regressor import FairFederatedRegressor

__all__ = ["FairFederatedClassifier", "FairFederatedRegressor"]
