"""Wrong inputs: each is refused before any work, by its code and in one line."""

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn

import scaffpd as sp
from cases.refusals import refuses

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


FEATURES = [
    ("not-finite", lambda: cohort(changed(X, (2, 1), NAN))),
    ("not-finite", lambda: cohort(changed(X, (0, 2), -INF))),
    (
        "columns-differ",
        lambda: sp.Cohort(
            {"Basel": (frame(), Y), "Bern": (frame()[["age", "sex", "height"]], Y)}, LOGISTIC
        ),
    ),
    ("masked-array", lambda: cohort(np.ma.masked_greater(X, 0))),
    ("client-without-samples", lambda: cohort(np.empty((0, 3)), [])),
    ("client-without-features", lambda: cohort(np.empty((4, 0)))),
    ("features-not-a-table", lambda: cohort(np.ones(4))),
    ("features-differ", lambda: cohort(np.ones((4, 5)))),
    ("not-an-array", lambda: cohort([[1, 2, 3], [1, 2], [1], [2]])),
    ("not-numbers", lambda: cohort(X.astype(str))),
    ("sparse-array", lambda: cohort(scipy.sparse.csr_matrix(X))),
    (
        "samples-not-flat",
        lambda: sp.Cohort([(np.ones((4, 1, 2, 2)), Y)], LOGISTIC),
    ),
    ("number-too-large", lambda: cohort(changed(X, (3, 1), 1e200))),
    (
        "number-too-large",
        lambda: cohort(changed(X, (3, 1), 1e30), dtype=torch.float32),
    ),
]

LABELS = [
    ("labels-length", lambda: cohort(y=[0, 1])),
    ("not-finite", lambda: cohort(y=[0, 1, NAN, 0])),
    ("not-finite", lambda: cohort(y=[0, 1, 2, INF], model=SQUARED)),
    ("label-not-binary", lambda: cohort(y=[0, 1, 2, 1])),
    ("label-not-binary", lambda: cohort(y=[-1, 1, 1, -1])),
    ("label-not-a-class", lambda: cohort(y=[0, 1, -1, 0], model=SOFTMAX)),
    ("label-not-a-class", lambda: cohort(y=[0, 1, 1.5, 0], model=SOFTMAX)),
    (
        "label-beyond-classes",
        lambda: cohort(y=[0, 1, 3, 0], model=sp.Linear("softmax", classes=3)),
    ),
    (
        "label-beyond-samples",
        lambda: cohort(y=[0, 1, 20240, 0], model=SOFTMAX),
    ),
    ("not-numbers", lambda: cohort(y=["yes", "no", "no", "yes"])),
    ("labels-shape", lambda: cohort(y=np.ones((4, 2)))),
    (
        "targets-differ",
        lambda: cohort(y=np.ones((4, 2)), model=SQUARED),
    ),
    ("targets-shape", lambda: cohort(y=np.ones((4, 2, 2)), model=SQUARED)),
    ("sparse-array", lambda: cohort(y=scipy.sparse.csr_matrix(Y[:, None]))),
    ("number-too-large", lambda: cohort(y=[1, 2, 3, 1e200], model=SQUARED)),
]

COHORTS = [
    ("no-clients", lambda: sp.Cohort([], LOGISTIC)),
    ("not-pairs", lambda: sp.Cohort(5, LOGISTIC)),
    ("not-pairs", lambda: sp.Cohort(sp.data.breast_cancer(), LOGISTIC)),
    ("client-not-a-pair", lambda: sp.Cohort((X, Y), LOGISTIC)),
    ("client-not-a-pair", lambda: sp.Cohort([(X, Y, Y)], LOGISTIC)),
    (
        "client-name-twice",
        lambda: sp.Cohort([(X, Y)] * 3, LOGISTIC, ["a", "b", "a"]),
    ),
    ("names-length", lambda: sp.Cohort([(X, Y)] * 3, LOGISTIC, ["a", "b"])),
    ("names-not-a-list", lambda: sp.Cohort([(X, Y)] * 2, LOGISTIC, "ab")),
    ("names-given-twice", lambda: sp.Cohort({"a": (X, Y)}, LOGISTIC, ["a"])),
    ("not-a-model", lambda: sp.Cohort([(X, Y)], "logistic")),
    ("device-unusable", lambda: cohort(device="gpu")),
    ("dtype-not-floating", lambda: cohort(dtype="float32")),
    ("dtype-not-floating", lambda: cohort(dtype=torch.int64)),
    ("dtype-unsupported", lambda: cohort(dtype=torch.float16)),
    ("unknown-name", lambda: cohort().evaluate(np.zeros(3), "tset")),
    ("cohort-without-test-rows", lambda: cohort().evaluate(np.zeros(3), "test")),
    ("point-length", lambda: cohort().evaluate(np.zeros(4))),
    ("point-not-numbers", lambda: cohort().evaluate("abc")),
    (
        "test-data-unusable",
        lambda: cohort(test={"Bern": (X, Y), "Genf": (X, Y)}),
    ),
    ("test-data-unusable", lambda: cohort(test=[(X, Y)])),
]

MODELS = [
    ("unknown-name", lambda: sp.Linear("logistc")),
    ("l2-out-of-range", lambda: sp.Linear(l2=-1e-3)),
    ("not-a-number", lambda: sp.Linear(l2=NAN)),
    ("not-a-number", lambda: sp.Linear(l2="0.1")),
    ("not-a-vector", lambda: sp.Linear(l2=[[0.1]])),
    ("l2-out-of-range", lambda: sp.Linear(l2=[0.1, -0.1])),
    (
        "l2-length",
        lambda: sp.Cohort([(np.ones((4, 2)), np.ones(4))], sp.Linear(l2=[0.1, 0.1, 0.1])),
    ),
    (
        "groups-length",
        lambda: sp.Cohort([(np.ones((4, 2)), np.ones(4))], sp.Linear(groups=["age"])),
    ),
    ("groups-not-names", lambda: sp.Linear(groups=[1, 2])),
    (
        "model-without-strength",
        lambda: sp.Cohort([(np.ones((4, 2)), np.ones(4))], sp.Linear()).using(strength=1.0),
    ),
    ("intercept-not-boolean", lambda: sp.Linear(intercept="yes")),
    ("too-few-classes", lambda: sp.Linear("softmax", classes=1)),
    ("loss-without-classes", lambda: sp.Linear("logistic", classes=2)),
    ("point-length", lambda: SQUARED.reshape(np.zeros(7), 3)),
    ("not-a-network", lambda: sp.Module("resnet")),
    (
        "nothing-to-train",
        lambda: sp.Module(nn.Linear(3, 1).requires_grad_(False)),
    ),
    (
        "layer-with-statistics",
        lambda: sp.Module(
            net(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
        ),
    ),
    (
        "layer-with-statistics",
        lambda: sp.Module(net(nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True))),
    ),
    (
        "layer-with-noise",
        lambda: sp.Module(net(nn.Linear(3, 4), nn.AlphaDropout(0.1))),
    ),
    (
        "layer-with-noise",
        lambda: sp.Module(nn.LSTM(3, 4, 2, dropout=0.5)),
    ),
    ("random-outputs", lambda: sp.Cohort([(X, Y)], sp.Module(Noisy(3, 2)))),
    ("lazy-layers", lambda: sp.Module(lazy(3))),
    (
        "samples-do-not-fit",
        lambda: sp.Cohort([(X, Y)], sp.Module(nn.Linear(5, 2))),
    ),
    (
        "samples-do-not-fit",
        lambda: sp.Cohort([(X.astype(int), Y)], sp.Module(nn.Linear(3, 2))),
    ),
    (
        "label-beyond-classes",
        lambda: sp.Cohort([(X, [0, 1, 2, 3])], sp.Module(nn.Linear(3, 2))),
    ),
    (
        "wrong-number-of-outputs",
        lambda: sp.Cohort([(X, Y)], sp.Module(nn.Linear(3, 2), "logistic")),
    ),
    (
        "label-not-a-class",
        lambda: sp.Cohort([(X, Y + 0.5)], sp.Module(nn.Linear(3, 2))),
    ),
    (
        "wrong-number-of-outputs",
        lambda: sp.Cohort([(X, np.ones((4, 2)))], sp.Module(nn.Linear(3, 3), "squared")),
    ),
    (
        "outputs-not-vectors",
        lambda: sp.Cohort([(np.ones((4, 1, 2, 2)), Y)], sp.Module(nn.Conv2d(1, 2, 1))),
    ),
    (
        "loss-not-a-mean",
        lambda: sp.Cohort(
            [(X, Y)], sp.Module(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"))
        ),
    ),
    (
        "loss-fails",
        lambda: sp.Cohort([(X, Y.astype(float))], sp.Module(nn.Linear(3, 2), nn.NLLLoss())),
    ),
    (
        "outputs-not-rows",
        lambda: sp.Cohort([(np.ones((4, 5, 3)), Y)], sp.Module(nn.GRU(3, 2))),
    ),
]


class Noisy(nn.Linear):
    def forward(self, X):
        return super().forward(X) + torch.randn(len(X), 1)


def lazy(outputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.LazyLinear(outputs)


OBJECTIVES = [
    ("not-a-number", lambda: sp.ChiSquare(rho=True)),
    (
        "prior-not-positive",
        lambda: sp.ChiSquare(0.1, prior=np.arange(1500)[::-1]),
    ),
    ("not-numbers", lambda: sp.Average(prior=["a"] * 1500)),
    (
        "prior-length",
        lambda: train(sp.ScaffPD(sp.ChiSquare(0.1, prior=[1, 2, 3]))),
    ),
    ("nash-length", lambda: train(sp.ScaffPD(sp.Nash(b=[9, 9, 9])))),
    ("nash-loss-too-large", lambda: train(sp.ScaffPD(sp.Nash(b=[9, 0.1])))),
    ("nash-loss-too-large", lambda: train(sp.ScaffPD(sp.Nash(b=0.1)))),
]

ALGORITHMS = [
    ("not-a-step-rule", lambda: sp.ScaffPD(sp.Agnostic(), steps="auto")),
    ("number-not-positive", lambda: sp.Fixed(tau=0, sigma=1)),
    ("setting-out-of-range", lambda: sp.Fixed(tau=1, sigma=1, theta=2)),
    ("not-a-number", lambda: sp.Fixed(tau=1, sigma=1, local_rate=NAN)),
    (
        "not-on-the-simplex",
        lambda: train(sp.ScaffPD(sp.QFair(1.0), steps=sp.Theory())),
    ),
    (
        "not-strongly-convex",
        lambda: train(sp.ScaffPD(sp.ChiSquare(0.1), steps=sp.Theory()), flat()),
    ),
]

TRAINING = [
    ("not-a-count", lambda: train(rounds=0)),
    ("number-not-positive", lambda: train(tol=0)),
    ("not-a-number", lambda: train(tol=NAN)),
    ("point-length", lambda: train(x0=np.zeros(4))),
    ("x0-not-finite", lambda: train(x0=[0, NAN, 0])),
    ("point-not-numbers", lambda: train(x0="start")),
    ("seed-out-of-range", lambda: train(seed=-1)),
    ("not-an-algorithm", lambda: train("scaff-pd")),
    ("not-a-federation", lambda: train(federation=[(X, Y)])),
    (
        "tol-without-certificate",
        lambda: train(federation=flat(), tol=1e-3),
    ),
    (
        "tol-without-certificate",
        lambda: train(federation=network_cohort(), tol=1e-3),
    ),
    ("not-a-checkpoint", lambda: train(checkpoint=5)),
    (
        "checkpoint-folder-missing",
        lambda: train(checkpoint="no/such/folder/run.npz"),
    ),
]

WRONG = [*FEATURES, *LABELS, *COHORTS, *MODELS, *OBJECTIVES, *ALGORITHMS, *TRAINING]


@pytest.fixture
def no_rounds(monkeypatch):
    """Whoever is refused must not have made clients work."""

    def work(*_):
        raise AssertionError("local steps were made before the input was refused")

    monkeypatch.setattr(sp.Cohort, "local_updates", work)


@pytest.mark.parametrize(("code", "make"), WRONG)
@pytest.mark.usefixtures("no_rounds")
def test_wrong_input_is_refused_before_any_work(code, make):
    with refuses(code) as caught:
        make()
    assert "\n" not in str(caught.value)


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
    """Sixty-four bytes in the middle turned over: enough to hit what a checksum covers."""
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
    with pytest.raises(sp.InputError, match=r"run\.npz"):
        train(checkpoint=path)
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
        with refuses("checkpoint-of-another-run"):
            train(checkpoint=path, **options)
