"""Wrong inputs: each is refused before any work, with one sentence that says what is wrong and names where."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn

import scaffpd as sp

NAN = float("nan")
INF = float("inf")
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 3))
Y = np.array([0, 1, 1, 0])
SQUARED = sp.Linear("squared")
LOGISTIC = sp.Linear("logistic")
SOFTMAX = sp.Linear("softmax")


def cohort(x=X, y=Y, model=LOGISTIC, **options):
    """Two hospitals, the second with x and y."""
    return sp.Cohort({"Basel": (X, Y), "Bern": (x, y)}, model, **options)


def changed(array, place, value):
    array = np.array(array, dtype=float)
    array[place] = value
    return array


def net(*layers):
    return nn.Sequential(*layers)


def train(algorithm=None, federation=None, rounds=3, **options):
    algorithm = sp.ScaffPD(sp.ChiSquare(0.1)) if algorithm is None else algorithm
    return sp.train(algorithm, cohort() if federation is None else federation, rounds, **options)


def flat():
    """Fewer samples than features and no regulariser: nothing is strongly convex."""
    wide = RANDOM.standard_normal((4, 9))
    return sp.Cohort({"Basel": (wide, Y), "Bern": (wide, Y)}, sp.Linear("squared", l2=0.0))


def network_cohort():
    return sp.Cohort([(X, Y)], sp.Module(nn.Linear(3, 2)))


def frame(**columns):
    import pandas

    return pandas.DataFrame(
        {"age": [1.0, 2, 3, 4], "height": [5.0, 6, 7, 8], "sex": [0, 1, 0, 1]} | columns
    )


FEATURES = {
    "NaN": (
        lambda: cohort(changed(X, (2, 1), NAN)),
        "'Bern' has a NaN or infinite value in column 1 (first in row 2)",
    ),
    "infinity": (
        lambda: cohort(changed(X, (0, 2), -INF)),
        "'Bern' has a NaN or infinite value in column 2",
    ),
    "NaN in a tensor": (lambda: cohort(torch.tensor(changed(X, (1, 0), NAN))), "'Bern' has a NaN"),
    "NaN in a frame": (
        lambda: cohort(frame(height=[1, 2, NAN, 4])),
        "'Bern' has a NaN or infinite value in column h",
    ),
    "missing in a frame": (
        lambda: cohort(frame(sex=[0, None, 1, 1]).astype({"sex": "Int64"})),
        "in column sex",
    ),
    "None": (
        lambda: cohort([[1, 2, 3], [1, None, 3], [1, 2, 3], [1, 2, 3]]),
        "in column 1 (first in row 1)",
    ),
    "columns in another order": (
        lambda: sp.Cohort(
            {"Basel": (frame(), Y), "Bern": (frame()[["age", "sex", "height"]], Y)}, LOGISTIC
        ),
        "'Bern' has column 'sex' where others have 'height'",
    ),
    "masked": (lambda: cohort(np.ma.masked_greater(X, 0)), "'Bern' has masked features"),
    "NaN in a picture": (
        lambda: sp.Cohort(
            [(changed(np.ones((4, 1, 2, 2)), (3, 0, 1, 1), NAN), Y)], sp.Module(nn.Conv2d(1, 2, 2))
        ),
        "'client-0' has a NaN or infinite value in feature (0, 1, 1) (first in row 3)",
    ),
    "no samples": (lambda: cohort(np.empty((0, 3)), []), "'Bern' has no samples"),
    "no features": (lambda: cohort(np.empty((4, 0))), "'Bern' has no features"),
    "one axis": (lambda: cohort(np.ones(4)), "'Bern' has features of shape (4,)"),
    "a single number": (lambda: cohort(3.0), "'Bern' has features of shape ()"),
    "None for features": (lambda: cohort(None), "'Bern' has features of shape ()"),
    "another number of features": (
        lambda: cohort(np.ones((4, 5))),
        "'Bern' has 5 features, but others have 3",
    ),
    "rows of unequal length": (
        lambda: cohort([[1, 2, 3], [1, 2], [1], [2]]),
        "'Bern' has features that do not form",
    ),
    "strings": (lambda: cohort(X.astype(str)), "'Bern' has features that are not numbers"),
    "a category": (
        lambda: cohort(frame(sex=["m", "f", "f", "m"])),
        "such as 'm' in column sex: encode them first",
    ),
    "a list of strings": (
        lambda: cohort([["a", "b", "c"]] * 4),
        "'Bern' has features that are not numbers, such as a",
    ),
    "objects": (
        lambda: cohort(np.full((4, 3), {}, dtype=object)),
        "that are not numbers, such as {}",
    ),
    "dates": (
        lambda: cohort(np.full((4, 3), np.datetime64("2024-05-01"))),
        "not numbers, such as 2024-05-01",
    ),
    "complex numbers": (lambda: cohort(X + 1j), "'Bern' has features that are not numbers"),
    "a sparse matrix": (
        lambda: cohort(scipy.sparse.csr_matrix(X)),
        "'Bern' has sparse features; dense ones",
    ),
    "a sparse array": (lambda: cohort(scipy.sparse.coo_array(X)), "call .toarray()"),
    "a sparse tensor": (lambda: cohort(torch.tensor(X).to_sparse()), "call .to_dense()"),
    "pictures for Linear": (
        lambda: sp.Cohort([(np.ones((4, 1, 2, 2)), Y)], LOGISTIC),
        "samples have the shape (1, 2, 2)",
    ),
    "too large to square": (
        lambda: cohort(changed(X, (3, 1), 1e200)),
        "'Bern' has a feature beyond ±1e+150 in col",
    ),
    "too large for float32": (
        lambda: cohort(changed(X, (3, 1), 1e30), dtype=torch.float32),
        "too large for float32",
    ),
}

LABELS = {
    "another length": (lambda: cohort(y=[0, 1]), "'Bern' has 4 samples but 2 labels"),
    "a single label": (lambda: cohort(y=1), "'Bern' has 4 samples but a single label"),
    "None": (lambda: cohort(y=None), "'Bern' has 4 samples but a single label"),
    "NaN": (lambda: cohort(y=[0, 1, NAN, 0]), "'Bern' has a NaN or infinite label in row 2"),
    "NaN in regression": (
        lambda: cohort(y=[0, 1, 2, INF], model=SQUARED),
        "'Bern' has a NaN or infinite label",
    ),
    "a missing label": (lambda: cohort(y=[0, 1, None, 0]), "label in row 2"),
    "2 for logistic": (
        lambda: cohort(y=[0, 1, 2, 1]),
        "'Bern' has the label 2; logistic loss takes labels 0 and 1",
    ),
    "−1 for logistic": (lambda: cohort(y=[-1, 1, 1, -1]), "'Bern' has the label -1; logistic"),
    "−1 for softmax": (
        lambda: cohort(y=[0, 1, -1, 0], model=SOFTMAX),
        "'Bern' has the label -1; softmax loss",
    ),
    "1.5 for softmax": (
        lambda: cohort(y=[0, 1, 1.5, 0], model=SOFTMAX),
        "'Bern' has the label 1.5",
    ),
    "beyond the classes": (
        lambda: cohort(y=[0, 1, 3, 0], model=sp.Linear("softmax", classes=3)),
        "'Bern' has the label 3, but 3 classes allow 0 to 2",
    ),
    "a year as a class": (
        lambda: cohort(y=[0, 1, 20240, 0], model=SOFTMAX),
        "'Bern' has the label 20240, more than",
    ),
    "strings": (
        lambda: cohort(y=["yes", "no", "no", "yes"]),
        "'Bern' has labels that are not numbers, such as yes",
    ),
    "strings in regression": (
        lambda: cohort(y=list("abcd"), model=SQUARED),
        "'Bern' has labels that are not numbers",
    ),
    "numbers as strings": (
        lambda: cohort(y=list("0110")),
        "'Bern' has labels that are not numbers",
    ),
    "objects": (lambda: cohort(y=np.array([0, 1, "x", 0], dtype=object)), "such as 'x'"),
    "two columns": (
        lambda: cohort(y=np.ones((4, 2))),
        "'Bern' has labels of shape (4, 2); one label per sample",
    ),
    "another number of columns": (
        lambda: cohort(y=np.ones((4, 2)), model=SQUARED),
        "'Bern' has 2 target columns, but",
    ),
    "three axes": (
        lambda: cohort(y=np.ones((4, 2, 2)), model=SQUARED),
        "'Bern' has targets of shape (4, 2, 2)",
    ),
    "no columns": (
        lambda: cohort(y=np.ones((4, 0)), model=SQUARED),
        "'Bern' has targets of shape (4, 0)",
    ),
    "sparse": (lambda: cohort(y=scipy.sparse.csr_matrix(Y[:, None])), "'Bern' has sparse labels"),
    "too large to square": (
        lambda: cohort(y=[1, 2, 3, 1e200], model=SQUARED),
        "'Bern' has a target beyond",
    ),
}

COHORTS = {
    "no clients": (lambda: sp.Cohort([], LOGISTIC), "at least one client"),
    "no clients by name": (lambda: sp.Cohort({}, LOGISTIC), "at least one client"),
    "not a list": (lambda: sp.Cohort(5, LOGISTIC), "needs a list of pairs (X, y), got int"),
    "a dataset": (
        lambda: sp.Cohort(sp.data.breast_cancer(), LOGISTIC),
        "needs a list of pairs (X, y), got Silos",
    ),
    "a pair instead of a list": (
        lambda: sp.Cohort((X, Y), LOGISTIC),
        "'client-0' must be a pair (X, y), got ndarray",
    ),
    "triples": (lambda: sp.Cohort([(X, Y, Y)], LOGISTIC), "'client-0' must be a pair (X, y)"),
    "a string": (lambda: sp.Cohort("ab", LOGISTIC), "'client-0' must be a pair (X, y), got str"),
    "the same name twice": (
        lambda: sp.Cohort([(X, Y)] * 3, LOGISTIC, ["a", "b", "a"]),
        "Two clients are named 'a'",
    ),
    "too few names": (
        lambda: sp.Cohort([(X, Y)] * 3, LOGISTIC, ["a", "b"]),
        "3 clients but 2 names",
    ),
    "a string of names": (lambda: sp.Cohort([(X, Y)] * 2, LOGISTIC, "ab"), "names must be a list"),
    "a number of names": (lambda: sp.Cohort([(X, Y)] * 2, LOGISTIC, 2), "names must be a list"),
    "names twice": (lambda: sp.Cohort({"a": (X, Y)}, LOGISTIC, ["a"]), "leave `names` out"),
    "no model": (lambda: sp.Cohort([(X, Y)], "logistic"), "needs a model such as Linear(...)"),
    "a class for a model": (
        lambda: sp.Cohort([(X, Y)], sp.Linear),
        "needs a model such as Linear(...)",
    ),
    "a bare network": (
        lambda: sp.Cohort([(X, Y)], nn.Linear(3, 2)),
        "needs a model such as Linear(...)",
    ),
    "an unknown device": (lambda: cohort(device="gpu"), "Device 'gpu' cannot be used here"),
    "a number for a device": (lambda: cohort(device=3.5), "Device 3.5 cannot be used here"),
    "an unknown dtype": (lambda: cohort(dtype="float32"), "dtype must be a floating-point type"),
    "whole numbers": (lambda: cohort(dtype=torch.int64), "dtype must be a floating-point type"),
    "half precision": (lambda: cohort(dtype=torch.float16), "torch.float32 or torch.float64"),
    "an unknown split": (
        lambda: cohort().evaluate(np.zeros(3), "tset"),
        "Unknown split 'tset': did you mean 'test'?",
    ),
    "no test data": (lambda: cohort().evaluate(np.zeros(3), "test"), "no test data"),
    "x too long": (
        lambda: cohort().evaluate(np.zeros(4)),
        "x has shape (4,), but the model has 3 parameters",
    ),
    "x no numbers": (lambda: cohort().evaluate("abc"), "x must be an array of 3 numbers"),
    "test data of others": (lambda: cohort(test={"Bern": (X, Y), "Genf": (X, Y)}), "'Genf'"),
    "too little test data": (lambda: cohort(test=[(X, Y)]), "1 clients but 2 names"),
    "NaN in test data": (
        lambda: cohort(test=[(X, Y), (X * NAN, Y)]),
        "The test data cannot be used: Client 'Bern'",
    ),
    "other features in test data": (
        lambda: cohort(test=[(np.ones((4, 2)), Y)] * 2),
        "'Basel' has 2 features, but",
    ),
    "an unseen class in test data": (
        lambda: cohort(model=SOFTMAX, test=[(X, Y), (X, Y + 2)]),
        "'Bern' has the label 3, but 2 classes",
    ),
    "other outputs in test data": (
        lambda: cohort(model=SQUARED, test=[(X, np.ones((4, 2)))] * 2),
        "another number of outputs",
    ),
}

MODELS = {
    "an unknown loss": (
        lambda: sp.Linear("logistc"),
        "Unknown loss 'logistc': did you mean 'logistic'?",
    ),
    "a loss far from all": (
        lambda: sp.Linear("hinge"),
        "choose one of 'squared', 'logistic', 'softmax'",
    ),
    "a list for a loss": (lambda: sp.Linear(["squared"]), "Unknown loss"),
    "negative l2": (lambda: sp.Linear(l2=-1e-3), "Linear needs a finite l2 >= 0, got -0.001"),
    "NaN for l2": (lambda: sp.Linear(l2=NAN), "Linear needs a number for l2, got NaN"),
    "infinite l2": (lambda: sp.Linear(l2=INF), "a finite l2 >= 0"),
    "a string for l2": (lambda: sp.Linear(l2="0.1"), "Linear needs a number for l2, got '0.1'"),
    "a list for l2": (lambda: sp.Linear(l2=[0.1]), "Linear needs a number for l2"),
    "intercept": (lambda: sp.Linear(intercept="yes"), "True or False for intercept, got 'yes'"),
    "one class": (lambda: sp.Linear("softmax", classes=1), "classes >= 2"),
    "half a class": (
        lambda: sp.Linear("softmax", classes=2.5),
        "whole number classes >= 1, got 2.5",
    ),
    "classes for logistic": (
        lambda: sp.Linear("logistic", classes=2),
        "classes with loss='softmax' or 'squared'",
    ),
    "reshape": (
        lambda: SQUARED.reshape(np.zeros(7), 3),
        "x has shape (7,), which does not fit 3 features",
    ),
    "reshape to nothing": (lambda: SQUARED.reshape(np.zeros(7), 0), "whole number features >= 1"),
    "no network": (lambda: sp.Module("resnet"), "Module needs a torch.nn.Module, got str"),
    "a network class": (lambda: sp.Module(nn.Linear), "Module needs a torch.nn.Module, got type"),
    "an unknown network loss": (
        lambda: sp.Module(nn.Linear(3, 1), "cross-entropy"),
        "did you mean 'cross_entropy'?",
    ),
    "negative network l2": (lambda: sp.Module(nn.Linear(3, 1), l2=-1), "Module needs l2 >= 0"),
    "nothing to learn": (
        lambda: sp.Module(nn.Linear(3, 1).requires_grad_(False)),
        "at least one parameter",
    ),
    "batch norm without memory": (
        lambda: sp.Module(
            net(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
        ),
        "normalises by its batch",
    ),
    "instance norm with memory": (
        lambda: sp.Module(net(nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True))),
        "running statistics",
    ),
    "noise of another kind": (
        lambda: sp.Module(net(nn.Linear(3, 4), nn.AlphaDropout(0.1))),
        "layer '1' has noise",
    ),
    "dropout inside a layer": (
        lambda: sp.Module(nn.LSTM(3, 4, 2, dropout=0.5)),
        "layer '' has noise",
    ),
    "a random slope": (lambda: sp.Module(net(nn.Linear(3, 2), nn.RReLU())), "layer '1' has noise"),
    "hidden noise": (
        lambda: sp.Cohort([(X, Y)], sp.Module(Noisy(3, 2))),
        "differ from call to call",
    ),
    "lazy layers": (lambda: sp.Module(lazy(3)), "run it once first"),
    "a network for other features": (
        lambda: sp.Cohort([(X, Y)], sp.Module(nn.Linear(5, 2))),
        "The network cannot take samples of shape (3,)",
    ),
    "whole numbers for a linear layer": (
        lambda: sp.Cohort([(X.astype(int), Y)], sp.Module(nn.Linear(3, 2))),
        "and type int64",
    ),
    "too few outputs": (
        lambda: sp.Cohort([(X, [0, 1, 2, 3])], sp.Module(nn.Linear(3, 2))),
        "has the label 3, but 2 classes",
    ),
    "too many outputs": (
        lambda: sp.Cohort([(X, Y)], sp.Module(nn.Linear(3, 2), "logistic")),
        "'logistic' needs 1 outputs",
    ),
    "network label 1.5": (
        lambda: sp.Cohort([(X, Y + 0.5)], sp.Module(nn.Linear(3, 2))),
        "has the label 0.5",
    ),
    "network label −1": (
        lambda: sp.Cohort([(X, Y - 1)], sp.Module(nn.Linear(3, 2))),
        "has the label -1",
    ),
    "a target column short": (
        lambda: sp.Cohort([(X, np.ones((4, 2)))], sp.Module(nn.Linear(3, 3), "squared")),
        "'squared' needs 2 outputs",
    ),
    "outputs with axes": (
        lambda: sp.Cohort([(np.ones((4, 1, 2, 2)), Y)], sp.Module(nn.Conv2d(1, 2, 1))),
        "a vector of outputs",
    ),
    "a loss per sample": (
        lambda: sp.Cohort(
            [(X, Y)], sp.Module(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"))
        ),
        "single number",
    ),
    "a loss that fails": (
        lambda: sp.Cohort([(X, Y.astype(float))], sp.Module(nn.Linear(3, 2), nn.NLLLoss())),
        "The loss function fails",
    ),
    "a tuple of outputs": (
        lambda: sp.Cohort([(np.ones((4, 5, 3)), Y)], sp.Module(nn.GRU(3, 2))),
        "return one tensor",
    ),
}


class Noisy(nn.Linear):
    def forward(self, X):
        return super().forward(X) + torch.randn(len(X), 1)


def lazy(outputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.LazyLinear(outputs)


OBJECTIVES = {
    "negative ρ": (lambda: sp.ChiSquare(rho=-1), "ChiSquare needs rho"),
    "a string for ρ": (lambda: sp.ChiSquare(rho="0.1"), "ChiSquare needs a number for rho"),
    "true for ρ": (lambda: sp.ChiSquare(rho=True), "ChiSquare needs a number for rho, got True"),
    "true for a cap": (
        lambda: sp.ChiSquare(rho=0.1, cap=True),
        "ChiSquare needs a number for cap, got True",
    ),
    "a true offset": (lambda: sp.Excess(sp.ChiSquare(0.1), True), "Excess needs numbers in offset"),
    "a zero among many priors": (
        lambda: sp.ChiSquare(0.1, prior=np.arange(1500)[::-1]),
        "positive, but client 1499 has 0.0.",
    ),
    "many priors of words": (lambda: sp.Average(prior=["a"] * 1500), "numbers in prior, got ["),
    "NaN for ρ": (lambda: sp.Tilted(rho=NAN), "Tilted needs a number for rho, got NaN"),
    "ρ = 0 for KL": (lambda: sp.Tilted(rho=0), "Tilted needs rho > 0"),
    "α = 0": (lambda: sp.CVaR(alpha=0), "CVaR needs alpha > 0"),
    "α > 1": (lambda: sp.CVaR(alpha=1.5), "CVaR needs 0 < alpha <= 1, got 1.5"),
    "q = 0": (lambda: sp.QFair(q=0), "QFair needs q > 0"),
    "infinite q": (lambda: sp.QFair(q=INF), "QFair needs q > 0 and finite"),
    "δ < 0": (lambda: sp.ChiSquareBall(delta=-0.1), "ChiSquareBall needs delta > 0"),
    "NaN for b": (lambda: sp.Nash(b=NAN), "Nash needs finite b"),
    "a string for b": (lambda: sp.Nash(b="high"), "Nash needs numbers in b"),
    "negative prior": (
        lambda: sp.ChiSquare(0.1, prior=[0.5, -0.5]),
        "prior weights that are positive",
    ),
    "a prior of strings": (lambda: sp.Average(prior=["a", "b"]), "Average needs numbers in prior"),
    "a prior with two axes": (
        lambda: sp.Agnostic(prior=[[1, 2]]),
        "one number per client in prior",
    ),
    "a prior for three": (
        lambda: train(sp.ScaffPD(sp.ChiSquare(0.1, prior=[1, 2, 3]))),
        "prior for 3 clients, but there are 2",
    ),
    "b for three": (
        lambda: train(sp.ScaffPD(sp.Nash(b=[9, 9, 9]))),
        "b for 3 clients, but there are 2",
    ),
    "b below a loss": (
        lambda: train(sp.ScaffPD(sp.Nash(b=[9, 0.1]))),
        "Nash needs every loss below b, but client Bern has loss 0.69",
    ),
    "b below all losses": (
        lambda: train(sp.ScaffPD(sp.Nash(b=0.1))),
        "Nash needs every loss below b",
    ),
}

ALGORITHMS = {
    "no objective": (
        lambda: sp.ScaffPD("chi-square"),
        "an objective such as ChiSquare(rho=0.1), got 'chi-square'",
    ),
    "an objective's class": (
        lambda: sp.ScaffPD(sp.ChiSquare),
        "needs an objective such as ChiSquare(rho=0.1)",
    ),
    "no local steps": (lambda: sp.ScaffPD(sp.Agnostic(), local_steps=0), "local_steps >= 1, got 0"),
    "half a local step": (
        lambda: sp.ScaffPD(sp.Agnostic(), local_steps=1.5),
        "whole number local_steps >= 1, got 1.5",
    ),
    "True local steps": (
        lambda: sp.ScaffPD(sp.Agnostic(), local_steps=True),
        "whole number local_steps",
    ),
    "empty batches": (lambda: sp.ScaffPD(sp.Agnostic(), batch_size=0), "batch_size >= 1, got 0"),
    "half a sample": (lambda: sp.ScaffPD(sp.Agnostic(), batch_size=0.5), "whole number batch_size"),
    "no steps": (
        lambda: sp.ScaffPD(sp.Agnostic(), steps="auto"),
        "needs steps such as Auto(), Fixed(...)",
    ),
    "a class of steps": (
        lambda: sp.ScaffPD(sp.Agnostic(), steps=sp.Auto),
        "needs steps such as Auto(), Fixed(...)",
    ),
    "τ = 0": (lambda: sp.Fixed(tau=0, sigma=1), "Fixed needs tau > 0"),
    "negative σ": (lambda: sp.Fixed(tau=1, sigma=-1), "Fixed needs sigma > 0"),
    "θ = 2": (lambda: sp.Fixed(tau=1, sigma=1, theta=2), "Fixed needs theta between 0 and 1"),
    "NaN rate": (
        lambda: sp.Fixed(tau=1, sigma=1, local_rate=NAN),
        "Fixed needs a number for local_rate",
    ),
    "an unknown condition": (lambda: sp.Theory("sc-cs"), "Unknown condition 'sc-cs'"),
    "factor < 1": (lambda: sp.Theory(factor=0.5), "factor >= 1"),
    "theory off the simplex": (
        lambda: train(sp.ScaffPD(sp.QFair(1.0), steps=sp.Theory())),
        "needs weights on the s",
    ),
    "theory without convexity": (
        lambda: train(sp.ScaffPD(sp.ChiSquare(0.1), steps=sp.Theory()), flat()),
        "give the model l2 > 0",
    ),
    "theory without strong ψ": (
        lambda: train(sp.ScaffPD(sp.Agnostic(), steps=sp.Theory("sc-sc"))),
        "needs a strongly convex ψ",
    ),
    "extrapolation": (lambda: sp.Auto(extrapolation=7), "extrapolation between 0 and 1"),
}

TRAINING = {
    "no rounds": (lambda: train(rounds=0), "whole number rounds >= 1, got 0"),
    "half a round": (lambda: train(rounds=2.5), "whole number rounds >= 1, got 2.5"),
    "tol = 0": (lambda: train(tol=0), "tol > 0 and finite, got 0"),
    "negative tol": (lambda: train(tol=-1), "tol > 0"),
    "NaN for tol": (lambda: train(tol=NAN), "a number for tol, got NaN"),
    "a string for tol": (lambda: train(tol="1e-6"), "a number for tol"),
    "x0 too long": (
        lambda: train(x0=np.zeros(4)),
        "x0 has shape (4,), but the model has 3 parameters",
    ),
    "NaN in x0": (lambda: train(x0=[0, NAN, 0]), "x0 has a NaN"),
    "x0 no numbers": (lambda: train(x0="start"), "x0 must be an array of 3 numbers"),
    "negative seed": (lambda: train(seed=-1), "seed"),
    "a string for a seed": (lambda: train(seed="lucky"), "seed"),
    "no algorithm": (
        lambda: train("scaff-pd"),
        "needs an algorithm such as fair(ChiSquare(rho=0.1))",
    ),
    "an objective for an algorithm": (
        lambda: train(sp.ChiSquare(0.1)),
        "needs an algorithm such as fair",
    ),
    "an algorithm's class": (lambda: train(sp.ScaffPD), "needs an algorithm such as fair"),
    "no federation": (
        lambda: train(federation=[(X, Y)]),
        "needs a federation such as Cohort(clients, model)",
    ),
    "a federation's class": (
        lambda: train(federation=sp.Cohort),
        "needs a federation such as Cohort(clients, model)",
    ),
    "callbacks": (lambda: train(callbacks=[3]), "callables in callbacks"),
    "a bare callback": (lambda: train(callbacks=print), "callbacks"),
    "tol without convexity": (
        lambda: train(federation=flat(), tol=1e-3),
        "tol needs a certificate, and there is none",
    ),
    "tol for a network": (
        lambda: train(federation=network_cohort(), tol=1e-3),
        "not known to be convex",
    ),
    "tol with noisy losses": (
        lambda: train(
            sp.ScaffPD(sp.Agnostic(), batch_size=2, full_gradients=False, steps=sp.Fixed(0.1, 0.1)),
            tol=1e-3,
        ),
        "come from minibatches",
    ),
    "checkpoint": (lambda: train(checkpoint=5), "checkpoint"),
    "checkpoint every": (lambda: sp.Checkpoint("run.npz", every=0), "whole number every >= 1"),
    "a missing folder": (
        lambda: train(checkpoint="no/such/folder/run.npz"),
        "folder 'no/such/folder' does not exist",
    ),
}

TABLES = {
    "features": FEATURES,
    "labels": LABELS,
    "cohort": COHORTS,
    "model": MODELS,
    "objective": OBJECTIVES,
}
TABLES |= {"algorithm": ALGORITHMS, "training": TRAINING}
WRONG = {
    f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()
}


def one_sentence(error, fragment):
    message = str(error)
    assert fragment in message, message
    assert "\n" not in message
    assert message[-1] in ".?", message
    assert (
        message[0].isupper()
        or message[0] in "'`"
        or message.split()[0] in ("x", "x0", "tol", "dtype", "names", "train")
    )
    assert len(message) < 300, message


@pytest.fixture
def no_rounds(monkeypatch):
    """Whoever is refused must not have made clients work."""

    def work(*_):
        raise AssertionError("local steps were made before the input was refused")

    monkeypatch.setattr(sp.Cohort, "local_updates", work)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("no_rounds")
def test_wrong_input_is_refused_in_one_sentence(name):
    make, fragment = WRONG[name]
    with pytest.raises(sp.InputError) as caught:
        make()
    one_sentence(caught.value, fragment)


def test_the_table_is_long_enough():
    assert len(WRONG) >= 40


def valid_checkpoint(path):
    train(rounds=2, checkpoint=path)
    return path.read_bytes()


GARBAGE = {
    "text": lambda path: path.write_text("not a checkpoint\nat all"),
    "nothing": lambda path: path.write_bytes(b""),
    "half of one": lambda path: path.write_bytes(valid_checkpoint(path)[:700]),
    "flipped bytes": lambda path: path.write_bytes(flipped(valid_checkpoint(path))),
    "a bare array": lambda path: np.save(path.open("wb"), np.ones(3)),
    "a pickle": lambda path: np.save(
        path.open("wb"), np.array([{}], dtype=object), allow_pickle=True
    ),
    "other arrays": lambda path: np.savez(path.open("wb"), x=np.ones(3)),
    "no description": lambda path: np.savez(path.open("wb"), about=np.array("[1, 2]")),
    "another format": lambda path: np.savez(path.open("wb"), about=np.array('{"format": 99}')),
    "a folder": lambda path: path.mkdir(),
}


def flipped(data):
    """Sixty-four bytes in the middle turned over: enough to hit something that a checksum covers."""
    start = len(data) // 3
    return (
        data[:start] + bytes(255 - byte for byte in data[start : start + 64]) + data[start + 64 :]
    )


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_broken_checkpoint_is_named_and_left_alone(name, tmp_path):
    path = tmp_path / "run.npz"
    GARBAGE[name](path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(sp.InputError) as caught:
        train(checkpoint=path)
    one_sentence(caught.value, "run.npz")
    assert before is None or path.read_bytes() == before


def test_a_checkpoint_of_another_problem_is_named(tmp_path):
    path = tmp_path / "run.npz"
    valid_checkpoint(path)
    for options in (
        {"federation": cohort(x=X + 1)},
        {"algorithm": sp.ScaffPD(sp.ChiSquare(0.2))},
        {"seed": 5},
        {"federation": sp.Cohort([(X, Y)] * 2, LOGISTIC)},
    ):
        with pytest.raises(sp.InputError) as caught:
            train(checkpoint=path, **options)
        one_sentence(caught.value, "is of another")
