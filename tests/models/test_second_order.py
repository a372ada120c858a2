"""Second derivatives of networks, against dense Hessians and linear models; local models that need not be convex."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.functional import hessian
from torch.func import functional_call

import scaffpd as sp
from naive import relative, unequal_clients
from scaffpd.errors import InputError
from scaffpd.federation import ProximalPlan
from scaffpd.models import network_oracle as module_file
from scaffpd.models.local_steps import LocalModel, pace


def tanh_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def linear_layer(outputs=3):
    torch.manual_seed(0)
    return nn.Linear(6, outputs, bias=False).double()


def cohort_of(network, l2=0.05, loss="softmax", outputs=3, **options):
    return sp.Cohort(unequal_clients(loss, outputs), sp.Module(network, loss, l2=l2), **options)


def directions(cohort, k=4, seed=0):
    """V with k columns, weights of which one is zero, a diagonal D."""
    random = np.random.default_rng(seed)
    weights = random.random(len(cohort.names))
    D = random.random(cohort.dimension) + 0.1
    weights[2] = 0
    V = torch.from_numpy(random.standard_normal((k, cohort.dimension))).mT
    return V, weights, torch.from_numpy(D)


# ------------------------------------------------------------------ slopes and curvature


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [linear_layer, tanh_network])
@pytest.mark.parametrize("chunk", [8192, 3])
def test_a_restriction_is_what_a_dense_hessian_says(make, chunk, monkeypatch):
    monkeypatch.setattr(module_file, "CHUNK", chunk)
    network = make()
    l2 = 0.05
    cohort = cohort_of(network, l2)
    x, (V, w, D) = cohort.start(), directions(cohort)

    def value(x, X, y):
        parts = torch.split(x, [p.numel() for p in network.parameters()])
        named = {
            k: part.view_as(p)
            for (k, p), part in zip(network.named_parameters(), parts, strict=True)
        }
        loss = nn.functional.cross_entropy(
            functional_call(network, named, (torch.tensor(X),)), torch.tensor(y)
        )
        return loss + l2 / 2 * x @ x

    at = cohort.gradients(x)
    seen = at.restriction(V, w, D)
    data = unequal_clients("softmax", 3).values()
    H = sum(
        wi * hessian(lambda x, X=X, y=y: value(x, X, y), x)
        for wi, (X, y) in zip(w, data, strict=True)
    )
    assert relative(seen.curvature, V.mT @ H @ V) < 1e-12
    assert relative(seen.slopes, at.each() @ V) < 1e-12
    assert relative(seen.sizes, (at.each().square() / D).sum(1)) < 1e-12
    assert cohort._oracle._twice


def turned(x, outputs):
    """The (features × outputs) vectors of a linear model, in columns or alone, as those of an `nn.Linear`."""
    x = np.asarray(x)
    return torch.from_numpy(x.reshape(6, outputs, -1).swapaxes(0, 1).reshape(x.shape).copy())


@pytest.mark.parametrize(("loss", "outputs"), [("squared", 1), ("logistic", 1), ("softmax", 3)])
def test_a_linear_layer_sees_what_a_linear_model_sees(loss, outputs):
    network = cohort_of(linear_layer(outputs), loss=loss, outputs=outputs)
    classes = 3 if loss == "softmax" else None
    linear = sp.Cohort(unequal_clients(loss, outputs), sp.Linear(loss, l2=0.05, classes=classes))
    V, w, D = directions(linear)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(linear.dimension))
    a = linear.gradients(x).restriction(V, w, D)
    b = network.gradients(turned(x, outputs)).restriction(turned(V, outputs), w, turned(D, outputs))
    for name in ("slopes", "curvature", "sizes"):
        assert relative(getattr(b, name), getattr(a, name)) < 1e-12


def test_some_clients_answer_as_they_do_among_all():
    cohort = cohort_of(tanh_network())
    V, _, D = directions(cohort)
    chosen = [5, 0, 3]
    w = np.zeros(8)
    w[chosen] = [0.2, 0.3, 0.5]
    some = cohort.gradients(cohort.start(), clients=chosen).restriction(V, w, D)
    everybody = cohort.gradients(cohort.start()).restriction(V, w, D)
    assert relative(some.curvature, everybody.curvature) < 1e-12
    assert relative(some.slopes[chosen], everybody.slopes[chosen]) < 1e-12
    assert np.isnan(some.slopes[1]).all()


def test_the_curvature_of_a_minibatch_is_of_the_same_samples():
    cohort = cohort_of(tanh_network())
    step = 1e-6
    V, w, D = directions(cohort)
    x = cohort.start()
    seen = cohort.gradients(x, 3, (7,)).restriction(V, w, D)
    up, down = (cohort.gradients(x + s * step * V[:, 0], 3, (7,)).sum(w) for s in (1, -1))
    assert relative(seen.curvature[0], (up - down) @ V / (2 * step)) < 1e-7


# ------------------------------------------------------------------ operations without a second derivative


class OnceTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class HiddenTanh(torch.autograd.Function):
    """Its gradient passes through NumPy, and autograd does not see what it depends on."""

    @staticmethod
    def forward(ctx, z):
        ctx.z = z.detach().numpy()
        return z.tanh()

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(g.detach().numpy() * (1 - np.tanh(ctx.z) ** 2))


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, X):
        return self.function.apply(X)


@pytest.mark.parametrize("function", [OnceTanh, HiddenTanh])
@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-8), (torch.float32, 1e-2)])
def test_differences_where_autograd_cannot(function, dtype, accuracy):
    exact = cohort_of(tanh_network())
    first, _, last = tanh_network()
    cohort = cohort_of(nn.Sequential(first, Applied(function), last), dtype=dtype)
    V, w, D = directions(exact)
    expected = exact.gradients(exact.start()).restriction(V, w, D)
    seen = cohort.gradients(cohort.start()).restriction(V.to(dtype), w, D.to(dtype))
    assert not cohort._oracle._twice
    assert relative(seen.curvature, expected.curvature) < accuracy


def test_fused_attention_has_curvature_too():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.head = nn.Linear(3, 12), nn.Linear(4, 3)

        def forward(self, X):
            q, k, v = self.rows(X.view(-1, 1, 2, 3)).split(4, -1)
            return self.head(nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2)))

    torch.manual_seed(0)
    cohort = cohort_of(Attention().double())
    V, w, D = directions(cohort)
    x = cohort.start()
    step = 1e-5
    up, down = (cohort.gradients(x + s * step * V[:, 0]).sum(w) for s in (1, -1))
    seen = cohort.gradients(x).restriction(V, w, D)
    assert relative(seen.curvature[0], (up - down) @ V / (2 * step)) < 1e-6
    assert not cohort._oracle._twice


def test_the_diagonal_of_a_network_is_refused():
    at = cohort_of(tanh_network()).gradients(cohort_of(tanh_network()).start())
    for ask in (lambda: at.diagonal(np.ones(8)), at.diagonals):
        with pytest.raises(InputError, match="take D = I"):
            ask()


# ------------------------------------------------------------------ local models


@pytest.mark.parametrize(("loss", "outputs"), [("logistic", 1), ("softmax", 3)])
def test_local_models_of_a_linear_layer_are_approached_as_those_of_a_linear_model(loss, outputs):
    network = cohort_of(linear_layer(outputs), loss=loss, outputs=outputs)
    classes = 3 if loss == "softmax" else None
    linear = sp.Cohort(unequal_clients(loss, outputs), sp.Linear(loss, l2=0.05, classes=classes))
    network._oracle._smoothness = (
        linear.constants().smoothness
    )  # a network knows no more than an estimate
    random = np.random.default_rng(1)
    x, c = (torch.from_numpy(0.1 * random.standard_normal(linear.dimension)) for _ in range(2))
    D = torch.from_numpy(random.random(len(x)) + 0.5)
    for pull in (1e-4, 1.0):
        a = linear.proximal_steps(linear.gradients(x), c, ProximalPlan(pull, D))
        plan = ProximalPlan(pull, turned(D, outputs))
        b = network.proximal_steps(network.gradients(turned(x, outputs)), turned(c, outputs), plan)
        for weights in np.eye(8):
            assert relative(b.sum(weights), turned(a.sum(weights), outputs)) < 1e-10


def test_with_enough_steps_a_local_model_is_solved():
    """Even where the smoothness that the steps are told is too small."""
    H = torch.logspace(-2, 1, 7, dtype=torch.float64)
    c = torch.linspace(1, 2, 7).double()
    x = torch.ones(7).double()
    D = torch.linspace(0.5, 2, 7).double()
    for L in (20.0, 10.0, 1.0):
        plan = ProximalPlan(0.1, D)
        model = LocalModel(lambda u: (H @ u**2 / 2, H * u), x, float(H.sum() / 2), c - H, plan)
        go = pace(plan, np.array([L]), 0.0)
        d = model.approach(float(go.rates[0]), float(go.momenta[0]), 1000)
        assert relative(d, c / (H + 0.1 * D)) < 1e-6


@pytest.mark.sample(40)
@pytest.mark.parametrize("steps", [1, 2, 5, 30])
@pytest.mark.parametrize(
    "factor", [1e-3, 0.1, 0.6, 1.0]
)  # on the smoothness that the steps are told
@pytest.mark.parametrize("name", ["bowl", "waves", "saddle", "cliff", "quartic"])
def test_local_steps_never_end_above_their_start(name, factor, steps):
    scales = torch.logspace(-2, 1, 7, dtype=torch.float64)
    functions = {
        "bowl": lambda u: (scales * u * u).sum() / 2,
        "waves": lambda u: (scales * torch.cos(3 * u)).sum(),
        "saddle": lambda u: (
            torch.tanh(scales[:3] * u[:3] ** 2).sum() - torch.tanh(scales[3:] * u[3:] ** 2).sum()
        ),
        "cliff": lambda u: (
            (scales * u * u).sum() / 2 if float(u.detach().norm()) < 3 else u.sum() * float("nan")
        ),
        "quartic": lambda u: (scales * u**4).sum(),
    }

    def evaluate(u):
        leaf = u.detach().requires_grad_()
        value = functions[name](leaf)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    random = np.random.default_rng(0)
    x, c = (torch.from_numpy(random.standard_normal(7)) for _ in range(2))
    L = np.array([factor * float(torch.linalg.eigvalsh(hessian(functions[name], x)).abs().max())])
    plan = ProximalPlan(0.01 * float(L[0]), torch.ones_like(x))
    loss, gradient = evaluate(x)
    model = LocalModel(evaluate, x, float(loss), c - gradient, plan)
    go = pace(plan, L, 0.0)
    d = model.approach(float(go.rates[0]), float(go.momenta[0]), steps)
    assert torch.isfinite(d).all()
    assert model.descent(d)[0] <= float(loss) + 1e-12
    if steps > 20:
        assert model.descent(d)[0] < float(loss)  # and they do find something


def test_losses_that_are_flat_do_not_move():
    plan = ProximalPlan(0.0, torch.ones(3))
    go = pace(plan, np.array([0.0, 2.0]), 0.0)
    assert go.rates.tolist() == [0.0, 0.5]
    assert go.steps == plan.limit


# ------------------------------------------------------------------ many parameters


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["squared", "logistic", "network"])
def test_nothing_is_quadratic_in_the_number_of_parameters(model):
    """With d = 200 000, a d × d matrix would be 320 GB."""
    d = 200_000
    random = np.random.default_rng(0)
    data = [(random.standard_normal((3, d)) / d**0.5, np.array([0, 1, 1])) for _ in range(2)]
    layer = nn.Linear(d, 1, bias=False).double()
    kind = sp.Module(layer, "logistic", l2=0.1) if model == "network" else sp.Linear(model, l2=0.1)
    result = sp.train(sp.SubspaceSaddle(sp.Agnostic()), sp.Cohort(data, kind), rounds=3)
    assert result.history.losses[-1].max() < result.history.losses[0].max()
