"""What a user would try otherwise: scikit-learn and statsmodels on everybody's rows together.

Every method takes a `Split` and returns a prediction for each of its test rows: a number, or the
probability of label 1. `None`: the method does not apply or did not converge.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, SplineTransformer, StandardScaler
from tables import Array, Split

from scaffpd.errors import InputError

CLIENT = "(client)"
MOST_SLOPES = 12  # statsmodels takes minutes beyond
Method = Callable[[Split], Array | None]


def constant(split: Split) -> Array:
    """Each client's mean; of labels (ones + 1)/(rows + 2)."""
    sums = np.bincount(split.owner, split.y, len(split.names))
    rows = np.bincount(split.owner, minlength=len(split.names))
    means = (sums + 1) / (rows + 2) if split.labels else sums / rows
    return means[split.owner_test]


def with_client(split: Split) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the columns and the client as one more category."""
    levels = pd.CategoricalDtype(range(len(split.names)))
    return (
        split.train.assign(**{CLIENT: pd.Categorical(split.owner, dtype=levels)}),
        split.test.assign(**{CLIENT: pd.Categorical(split.owner_test, dtype=levels)}),
    )


def encoder(splines: bool = False, drop: str | None = None) -> ColumnTransformer:
    """Fill gaps with medians and mark them, scale numbers, write categories as 0/1 columns."""
    numbers = [SimpleImputer(strategy="median", add_indicator=True), StandardScaler()]
    if splines:
        curve = SplineTransformer(n_knots=6, knots="quantile", extrapolation="linear")
        numbers = [SimpleImputer(strategy="median"), StandardScaler(), curve]
    hot = OneHotEncoder(handle_unknown="ignore", drop=drop, sparse_output=False)
    return ColumnTransformer(
        [
            ("numbers", make_pipeline(*numbers), make_column_selector(dtype_include=float)),
            ("categories", hot, make_column_selector(dtype_include="category")),
        ]
    )


def penalised(split: Split, client: bool, splines: bool = False) -> Array:
    """Ridge or logistic regression, the penalty by (leave-one-out or five-fold) cross-validation."""
    train, test = with_client(split) if client else (split.train, split.test)
    if not split.labels:
        model = make_pipeline(encoder(splines), RidgeCV(np.logspace(-3, 4, 22)))
        return model.fit(train, split.y).predict(test)
    logistic = LogisticRegressionCV(
        Cs=np.logspace(-3, 2, 11),
        cv=5,
        scoring="neg_log_loss",
        l1_ratios=(0,),
        use_legacy_attributes=False,
        max_iter=1000,
    )
    model = make_pipeline(encoder(splines), logistic)
    return model.fit(train, split.y).predict_proba(test)[:, 1]


def pooled(split: Split) -> Array:
    """Ridge or logistic regression that does not know the clients."""
    return penalised(split, client=False)


def linear(split: Split) -> Array:
    """Ridge or logistic regression with the client as a column."""
    return penalised(split, client=True)


def splines(split: Split) -> Array:
    """The same with a cubic spline (six knots) of every number."""
    return penalised(split, client=True, splines=True)


def boosting(split: Split) -> Array:
    """Gradient boosting with the client as a category; size of trees and their number by three
    folds, among them the defaults.

    Beyond 255 clients, scikit-learn has no categories left, and the client is a number.
    """
    train, test = with_client(split)
    if len(split.names) > 255:
        train, test = (
            part.assign(**{CLIENT: part[CLIENT].astype(float)}) for part in (train, test)
        )
    grid = [
        {"max_leaf_nodes": [3], "max_iter": [100, 300]},
        {"max_leaf_nodes": [8, 31], "max_iter": [30, 100]},
    ]
    if split.labels:
        model = HistGradientBoostingClassifier(categorical_features="from_dtype", random_state=0)
        search = GridSearchCV(model, grid, scoring="neg_log_loss", cv=3)
        return search.fit(train, split.y).predict_proba(test)[:, 1]
    model = HistGradientBoostingRegressor(categorical_features="from_dtype", random_state=0)
    search = GridSearchCV(model, grid, scoring="neg_root_mean_squared_error", cv=3)
    return search.fit(train, split.y).predict(test)


def independent(train: Array, test: Array) -> tuple[Array, Array]:
    """Leave out columns that others determine, and add the constant: mixed models have no ridge."""
    both = [np.column_stack([np.ones(len(part)), part]) for part in (train, test)]
    kept: list[int] = []
    basis = np.empty((len(train), 0))
    for j in range(both[0].shape[1]):
        column = both[0][:, j]
        rest = column - basis @ (basis.T @ column)
        rest -= basis @ (basis.T @ rest)
        if np.linalg.norm(rest) > 1e-6 * max(np.linalg.norm(column), 1e-12):
            basis = np.column_stack([basis, rest / np.linalg.norm(rest)])
            kept.append(j)
    return both[0][:, kept], both[1][:, kept]


def mixed(split: Split) -> Array | None:
    """A mixed model with a random intercept for every client: REML, or variational for labels."""
    return _mixed(split, slopes=False)


def mixed_slopes(split: Split) -> Array | None:
    """The same, and independent random slopes of numbers; not for labels."""
    return None if split.labels else _mixed(split, slopes=True)


def _mixed(split: Split, slopes: bool) -> Array | None:
    from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

    form = encoder(drop="first").fit(split.train)
    X, Z = independent(form.transform(split.train), form.transform(split.test))
    if split.labels:
        return _mixed_labels(split, X, Z)
    numbers = [j for j in range(1, X.shape[1]) if len(np.unique(X[:, j])) > 2] if slopes else []
    if slopes and not 0 < len(numbers) <= MOST_SLOPES:
        return None
    own = [0, *numbers]
    scale = split.y.std()
    model = MixedLM(split.y / scale, X, split.owner, X[:, own])
    free = MixedLMParams.from_components(np.ones(X.shape[1]), np.eye(len(own)))
    fitted = model.fit(free=free, method="bfgs", maxiter=100)
    if not np.isfinite(fitted.llf):
        return None
    rest = split.y / scale - X @ fitted.fe_params
    found = Z @ fitted.fe_params
    for i in range(len(split.names)):  # statsmodels refuses to predict where a variance is zero
        mine, tested = split.owner == i, split.owner_test == i
        A = X[mine][:, own]
        C = A @ fitted.cov_re @ A.T + fitted.scale * np.eye(len(A))
        found[tested] += Z[tested][:, own] @ fitted.cov_re @ A.T @ np.linalg.solve(C, rest[mine])
    return scale * found


def _mixed_labels(split: Split, X: Array, Z: Array) -> Array | None:
    from scipy.sparse import csr_array
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    rows = np.arange(len(split.y))
    hot = csr_array((np.ones(len(rows)), (rows, split.owner)), (len(rows), len(split.names)))
    ident = np.zeros(len(split.names), dtype=int)
    model = BinomialBayesMixedGLM(split.y, X, hot, ident, vcp_p=1.0, fe_p=2.0)
    np.random.seed(0)  # noqa: NPY002 - its starting point comes from there
    fitted = model.fit_vb(minim_opts={"maxiter": 500})
    logit = Z @ fitted.fe_mean + fitted.vc_mean[split.owner_test]
    return 1 / (1 + np.exp(-logit))


def quietly(method: Method, split: Split) -> Array | None:
    """Run a method without the warnings of others' packages; a failure is no answer."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            found = method(split)
        except InputError:  # ours must not fail
            raise
        except (np.linalg.LinAlgError, ValueError) as error:
            print(f"    {method.__name__}: {error}")
            return None
    return None if found is None or not np.isfinite(found).all() else found


PEERS: dict[str, Method] = {
    "client's constant": constant,
    "pooled linear": pooled,
    "linear, client as column": linear,
    "splines, client as column": splines,
    "mixed model, intercepts": mixed,
    "mixed model, slopes": mixed_slopes,
    "boosting, client as column": boosting,
}
