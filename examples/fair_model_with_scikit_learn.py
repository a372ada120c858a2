"""Four hospitals, one fair model, as scikit-learn has it."""

# %% [markdown]
# # A fair model with scikit-learn
#
# Four hospitals, one model of heart disease. `sp.FairFederatedClassifier` is an estimator like any
# other: it goes into a `Pipeline` and a `GridSearchCV`, and beside X and y it takes `clients`, who
# owns each row.
#
# Run it as a script, `python examples/fair_model_with_scikit_learn.py`, or cell by cell in an
# editor that knows `# %%`.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import sklearn
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.metrics import accuracy_score, log_loss, make_scorer
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder

import scaffpd as sp
from scaffpd.data.hospitals import COLUMNS, HOSPITALS, read

sklearn.set_config(enable_metadata_routing=True)

# %% [markdown]
# ## The patients
#
# Thirteen columns as the hospitals sent them, with gaps, and who sent them.

# %%
parts = [read(name) for name in HOSPITALS]
X = pd.DataFrame(np.concatenate([rows for rows, _ in parts]), columns=list(COLUMNS))
ill = np.concatenate([labels for _, labels in parts])
hospital = np.repeat(HOSPITALS, [len(rows) for rows, _ in parts])
print(
    f"{len(X)} patients of {len(HOSPITALS)} hospitals; {X.isna().mean().mean():.0%} of the cells "
    "are empty"
)

# %% [markdown]
# ## The pipeline
#
# Gaps are filled and categories encoded by scikit-learn, on all training rows together: this is one
# computer that may see them all. (Where hospitals keep their rows, `scaffpd deploy` prepares them
# from sums.) The estimator standardises the columns by itself.

# %%
categories = ["cp", "restecg", "slope", "thal"]
prepare = make_column_transformer(
    (
        SimpleImputer(strategy="median", add_indicator=True),
        [name for name in COLUMNS if name not in categories],
    ),
    (
        make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(sparse_output=False)),
        categories,
    ),
)


def pipeline(objective):
    """The whole model, for one idea of fairness."""
    return Pipeline(
        [("prepare", prepare), ("model", sp.FairFederatedClassifier(objective, l2=0.03))]
    )


for objective in (sp.Average(), sp.ChiSquare(rho=0.1)):
    model = pipeline(objective).fit(X, ill, clients=hospital)["model"]
    print(
        f"{objective}: training loss at the worst-served hospital "
        f"{max(model.client_losses_.values()):.3f}"
    )
print(
    f"{model.status_} after {model.n_rounds_} rounds: at most {model.certificate_:.0e} from the "
    "optimum, proven"
)
print(
    "weights in the worst mixture:",
    {name: round(weight, 3) for name, weight in model.client_weights_.items()},
)

# %% [markdown]
# ## How fair should it be?
#
# ρ runs from the average (large) to the worst case (small). The search scores every ρ by the
# log-loss at the hospital that is served worst: any measure that takes `clients` will do. (For
# accuracy none has to be written: the estimator's own `score`, told to by
# `set_score_request(clients=True)`, is that of the fifth of the clients that is served worst.)


# %%
def by_hospital(measure, y, p, clients):
    """One number per hospital."""
    return np.array([measure(y[clients == name], p[clients == name]) for name in HOSPITALS])


def loss(y, p):
    """The mean log-loss."""
    return log_loss(y, p, labels=[0, 1])


def worst_loss(y, p, clients):
    """At the hospital that is served worst."""
    return by_hospital(loss, y, p, clients).max()


rhos = [1.0, 0.1, 0.01]
scorer = make_scorer(worst_loss, greater_is_better=False, response_method="predict_proba")
search = GridSearchCV(
    pipeline(None),
    {"model__objective": [sp.ChiSquare(rho) for rho in rhos]},
    scoring=scorer.set_score_request(clients=True),
    cv=StratifiedKFold(3, shuffle=True, random_state=0),
)
search.fit(X, ill, clients=hospital)
worst = -search.cv_results_["mean_test_score"]
for rho, value in zip(rhos, worst, strict=True):
    print(f"ρ = {rho:<5} log-loss at the worst-served hospital, held out: {value:.3f}")
print("chosen:", search.best_params_["model__objective"])

# %% [markdown]
# ## Before and after
#
# Every patient is diagnosed by a model that has not seen them: three outer folds, and the search
# inside each of them.

# %%
outer = StratifiedKFold(3, shuffle=True, random_state=1)
table = pd.DataFrame(
    {"patients": [int((hospital == name).sum()) for name in HOSPITALS]}, index=HOSPITALS
)
for kind, estimator in {"average": pipeline(sp.Average()), "fair": search}.items():
    p = cross_val_predict(
        estimator, X, ill, cv=outer, params={"clients": hospital}, method="predict_proba"
    )[:, 1]
    table[f"{kind} accuracy"] = by_hospital(accuracy_score, ill, p > 0.5, hospital)
    table[f"{kind} log-loss"] = by_hospital(loss, ill, p, hospital)
print(table.round(3).to_string())
for measure, extreme in (("accuracy", "min"), ("log-loss", "max")):
    before = table[f"average {measure}"]
    after = table[f"fair {measure}"]
    print(
        f"{measure}: worst hospital {before.agg(extreme):.3f} → {after.agg(extreme):.3f}, "
        f"mean of the hospitals {before.mean():.3f} → {after.mean():.3f}"
    )
print(
    "Accuracy among 200 patients has a standard error of some 3 points: read small differences as "
    "none."
)

# %% [markdown]
# ## The picture

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
at = np.arange(len(HOSPITALS))
for shift, kind, colour in ((-0.2, "average", "#8a8a8a"), (0.2, "fair", "#0072b2")):
    left.bar(at + shift, table[f"{kind} log-loss"], width=0.38, color=colour, label=kind)
left.set(
    xticks=at,
    xticklabels=HOSPITALS,
    ylabel="log-loss, held out",
    title="every hospital, before and after",
)
left.legend(frameon=False)
right.semilogx(rhos, worst, "o-", color="#0072b2")
right.set(xlabel="ρ (to the left: the worst case)", title="the hospital that is served worst")
figure.savefig("fair_model_with_scikit_learn.png", dpi=120)
print("picture: fair_model_with_scikit_learn.png")
