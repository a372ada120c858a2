"""Clients of a network side by side: the numbers of one after the other, whoever is computed beside whom."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import scaffpd as sp
from scaffpd.federation import LocalPlan
from scaffpd.models import network as network_module
from scaffpd.models import network_oracle

SIZES = (9, 14, 20, 7, 14)
STEPS = 3  # local ones, from which a momentum and its correction are known


def pictures(seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal((m, 1, 6, 6)).astype(dtype), random.integers(0, 3, m))
        for m in SIZES
    ]


def network(kind, dtype=torch.float64):
    torch.manual_seed(1)
    layers = {
        "plain": [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)],
        "dropout": [
            nn.Conv2d(1, 4, 3),
            nn.Dropout2d(0.3),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(64, 3),
        ],
        "batch norm": [
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 3),
        ],
        "group norm": [
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 3),
        ],
    }
    return nn.Sequential(*layers[kind]).to(dtype)


def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


OPTIMIZERS = {
    "sgd": sp.LocalSGD(),
    "nesterov": sp.LocalSGD(momentum=0.9, nesterov=True, weight_decay=0.01, clip=0.5),
    "adam": sp.LocalAdam(weight_decay=0.01),
}


def steps(oracle, batch_size, steps=STEPS, **more):
    x = oracle.start()
    return oracle.local_updates(
        x, None, None, LocalPlan(steps, 0.05, batch_size=batch_size, key=(3, 1), **more)
    ).each()


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", ["plain", "dropout", "batch norm", "group norm"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch_size", [4, None])
def test_side_by_side_is_one_after_the_other(kind, optimizer, batch_size, monkeypatch):
    model = sp.Module(network(kind), l2=0.01, optimizer=OPTIMIZERS[optimizer])
    oracle = sp.Cohort(pictures(), model)._oracle
    beside = steps(oracle, batch_size)
    assert oracle.function.together
    some = steps(oracle.only([3, 1]), batch_size)
    np.testing.assert_allclose(some, beside[[3, 1]], rtol=1e-9, atol=1e-11)
    monkeypatch.setitem(network_oracle.TOGETHER, "cpu", 1)  # every client a group of its own
    alone = steps(oracle, batch_size)
    np.testing.assert_allclose(beside, alone, rtol=1e-9, atol=1e-11)
    at = oracle.evaluate(oracle.start())
    own = [oracle.gradient(i, oracle.start()) for i in range(len(SIZES))]
    np.testing.assert_allclose(at.losses, [value for value, _ in own], rtol=1e-12)
    np.testing.assert_allclose(at.each(), torch.stack([g for _, g in own]), rtol=1e-9, atol=1e-12)


def test_threads_do_not_share_a_network():
    """A pass exchanges a module's parameters for a while, so that threads need copies of their own."""
    oracle = sp.Cohort(pictures() * 3, sp.Module(network("batch norm")))._oracle
    alone = steps(oracle, 4, 10)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for _ in range(3):
            found = steps(oracle, 4, 10)
            assert not found.requires_grad
            np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-11)
    finally:
        torch.set_num_threads(before)
    assert len(oracle.function._copies) > 1


def naive_steps(optimizer, make, X, y, rows, eta):
    """A client's local training in plain PyTorch."""
    own = network("plain")
    stepper = make(own.parameters(), eta)
    for batch in rows:
        stepper.zero_grad()
        nn.functional.cross_entropy(own(torch.tensor(X[batch])), torch.tensor(y[batch])).backward()
        if optimizer.clip is not None:
            nn.utils.clip_grad_norm_(own.parameters(), optimizer.clip)
        stepper.step()
    return torch.cat([p.detach().flatten() for p in own.parameters()])


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (sp.LocalSGD(weight_decay=0.1), lambda p, eta: torch.optim.SGD(p, eta, weight_decay=0.1)),
        (
            sp.LocalSGD(momentum=0.8, clip=0.3),
            lambda p, eta: torch.optim.SGD(p, eta * 0.2, momentum=0.8),
        ),
        (
            sp.LocalSGD(momentum=0.8, nesterov=True),
            lambda p, eta: torch.optim.SGD(p, eta * 0.2, momentum=0.8, nesterov=True),
        ),
        (
            sp.LocalAdam(weight_decay=0.1),
            lambda p, eta: torch.optim.AdamW(p, eta, weight_decay=0.1),
        ),
    ],
)
def test_optimisers_are_those_of_pytorch(optimizer, make):
    data = pictures()
    oracle = sp.Cohort(data, sp.Module(network("plain"), optimizer=optimizer))._oracle
    ours = oracle.start() - steps(oracle, 4)
    for i, (X, y) in enumerate(data):
        draws = network_oracle.Draws((3, 1), [oracle.names[i]])
        rows = [(draws.uniform(4)[0] * len(X)).long().numpy() for _ in range(STEPS)]
        theirs = naive_steps(optimizer, make, X, y, rows, 0.05)
        loose = optimizer.clip is not None  # PyTorch adds 1e-6 to the norm
        np.testing.assert_allclose(
            ours[i], theirs, rtol=1e-5 if loose else 1e-8, atol=1e-7 if loose else 1e-10
        )


def test_batch_norm_averages_its_statistics_as_part_of_x():
    model = sp.Module(network("batch norm"))
    cohort = sp.Cohort(pictures(), model)
    assert cohort.dimension == sum(p.numel() for p in model.module.parameters()) + 8
    result = sp.train(sp.FedAvg(local_steps=5, batch_size=4, local_rate=0.1), cohort, rounds=3)
    losses = result.history.losses
    assert losses[-1].mean() < losses[0].mean()
    trained = model.network(result.x).eval()
    X, y = pictures()[2]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(trained(torch.tensor(X)), torch.tensor(y))
    assert losses[-1][2] == pytest.approx(float(loss), rel=1e-10)
    assert float(trained[1].running_mean.abs().max()) > 0.01  # they have moved
    own = network("batch norm").train()  # one client by PyTorch's own layer
    draws = network_oracle.Draws((3, 1), [cohort.names[0]])
    stepper = torch.optim.SGD(own.parameters(), 0.05)
    for _ in range(STEPS):
        rows = (draws.uniform(4)[0] * SIZES[0]).long().numpy()
        stepper.zero_grad()
        X, y = pictures()[0]
        nn.functional.cross_entropy(own(torch.tensor(X[rows])), torch.tensor(y[rows])).backward()
        stepper.step()
    expected = [
        *(p.detach().flatten() for p in own.parameters()),
        own[1].running_mean,
        own[1].running_var,
    ]
    reached = cohort.start() - steps(cohort._oracle, 4)[0]
    np.testing.assert_allclose(reached, torch.cat(expected), rtol=1e-9, atol=1e-11)


def test_corrections_that_would_be_wrong_are_refused():
    normed = sp.Cohort(pictures(), sp.Module(network("batch norm")))
    with pytest.raises(sp.InputError, match="no corrected gradient"):
        sp.train(sp.ScaffPD(sp.ChiSquare(0.1), local_steps=3), normed, rounds=2)
    sp.train(
        sp.ScaffPD(sp.ChiSquare(0.1), local_steps=3, batch_size=4), normed, rounds=2
    )  # variates are means of steps
    adam = sp.Cohort(pictures(), sp.Module(network("plain"), optimizer=sp.LocalAdam()))
    with pytest.raises(sp.InputError, match="does not cancel drift"):
        sp.train(sp.Scaffold(local_steps=3, local_rate=0.01), adam, rounds=2)
    sp.train(sp.fair(sp.ChiSquare(0.1)), adam, rounds=2)


def test_dropout_is_off_in_losses_and_new_in_every_round():
    cohort = sp.Cohort(pictures(), sp.Module(network("dropout")))
    x = cohort.start()
    assert np.array_equal(cohort.evaluate(x).loss, cohort.evaluate(x).loss)
    eval_mode = sp.Cohort(pictures(), sp.Module(network("dropout").eval()))
    np.testing.assert_array_equal(cohort.evaluate(x).loss, eval_mode.evaluate(x).loss)
    first, second = (
        cohort._oracle.local_updates(x, None, None, LocalPlan(1, 0.1, key=(r, 0))).each()
        for r in (1, 2)
    )
    off = eval_mode._oracle.local_updates(x, None, None, LocalPlan(1, 0.1, key=(1, 0))).each()
    assert float((first - second).abs().max()) > 1e-4
    assert float((first - off).abs().max()) > 1e-4


def test_half_of_the_entries_are_dropped_and_the_mean_stays():
    from scaffpd.models.module import SeededDropout

    layer = SeededDropout(0.3, whole=False, layer=2)
    out = layer(torch.ones(100, 200))
    assert float((out == 0).double().mean()) == pytest.approx(0.3, abs=0.02)
    assert float(out.mean()) == pytest.approx(1, abs=0.03)
    assert torch.equal(out, layer(torch.ones(100, 200)))


class Branching(nn.Module):
    """Looks at a value, which cannot be batched."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3).double()

    def forward(self, X):
        out = self.layer(X.flatten(1))
        return out if float(out.detach().sum()) < 1e9 else -out


def test_what_does_not_batch_goes_one_after_the_other(caplog):
    with caplog.at_level(logging.INFO, logger="scaffpd"):
        oracle = sp.Cohort(pictures(), sp.Module(Branching()))._oracle
        found = steps(oracle, 4)
    assert not oracle.function.together
    assert "one after the other" in caplog.text
    same = nn.Sequential(nn.Flatten(), nn.Linear(36, 3).double())
    same.load_state_dict(
        {f"1.{k.partition('.')[2]}": v for k, v in oracle.network.state_dict().items()}
    )
    np.testing.assert_allclose(
        found, steps(sp.Cohort(pictures(), sp.Module(same))._oracle, 4), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("loss", ["cross_entropy", mean_loss])
def test_chunks_and_a_loss_of_ones_own(loss, monkeypatch):
    whole = sp.Cohort(pictures(), sp.Module(network("plain"), loss))._oracle
    x = whole.start()
    expected = whole.evaluate(x), steps(whole, None), whole.scores(x)
    monkeypatch.setattr(network_oracle, "CHUNK", 4)
    at = whole.evaluate(x)
    np.testing.assert_allclose(at.losses, expected[0].losses, rtol=1e-12)
    np.testing.assert_allclose(at.each(), expected[0].each(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(steps(whole, None), expected[1], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(whole.scores(x), expected[2], rtol=1e-12)


class Rows(Dataset):
    """A data set that counts what is read of it."""

    def __init__(self, X, y):
        self.X = X
        self.y = y
        self.read = 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        self.read += 1
        return torch.tensor(self.X[row]), int(self.y[row])


def test_data_sets_are_streamed_and_give_the_same_numbers():
    data = pictures()
    model = sp.Module(network("plain"), l2=0.01)
    arrays = sp.Cohort(data, model, test=data)
    streamed = sp.Cohort([Rows(X, y) for X, y in data], model, test=[Rows(X, y) for X, y in data])
    tensors = sp.Cohort([TensorDataset(torch.tensor(X), torch.tensor(y)) for X, y in data], model)
    method = sp.ScaffPD(sp.ChiSquare(0.1), local_steps=4, batch_size=4)
    results = [sp.train(method, cohort, rounds=2) for cohort in (arrays, streamed, tensors)]
    for other in results[1:]:
        np.testing.assert_allclose(other.x, results[0].x, rtol=1e-9, atol=1e-11)
    np.testing.assert_array_equal(
        streamed.evaluate(results[0].x, "test").accuracy,
        arrays.evaluate(results[0].x, "test").accuracy,
    )
    sources = streamed._oracle.rows.sources
    before = [source.read for source in sources]
    steps(streamed._oracle, 4)
    assert [source.read - old for source, old in zip(sources, before, strict=True)] == [
        4 * STEPS
    ] * 5
    with pytest.raises(sp.InputError, match="Datasets are for networks"):
        sp.Cohort([Rows(X, y) for X, y in data], sp.Linear("softmax"))
    with pytest.raises(sp.InputError, match="must be a Dataset"):
        sp.Cohort([Rows(*data[0]), data[1]], model)


class Tutorial(nn.Module):
    """A network that lays images out by hand, as given or after a convolution, in training mode alone if `trained`."""

    def __init__(self, channels, convolved, flat, trained=False):
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.fc = (
            nn.Conv2d(channels, 4, 3),
            nn.Linear(64 if convolved else 36 * channels, 3),
        )
        self.convolved = convolved
        self.flat = flat
        self.only_trained = trained
        self.double()

    def forward(self, X):
        X = self.conv(X).relu() if self.convolved else X
        return self.fc(X.flatten(1) if self.only_trained and not self.training else self.flat(X))


def colours(channels):
    return [
        (np.concatenate([(c + 1) * X + c for c in range(channels)], 1), y) for X, y in pictures()
    ]


@pytest.mark.cover(2)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("convolved", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_view_of_images_is_a_flatten(channels, convolved, trained):
    """`.view` needs images channel by channel, whereas others are stored with their channels last."""

    def numbers(flat, kind):
        data = [kind(X, y) for X, y in colours(channels)]
        oracle = sp.Cohort(data, sp.Module(Tutorial(channels, convolved, flat, trained)))._oracle
        x = oracle.start()
        return (
            oracle.losses(x),
            oracle.evaluate(x).gradients,
            steps(oracle, 4, 2),
            steps(oracle, None, 1),
        )

    expected = numbers(lambda X: X.flatten(1), lambda X, y: (X, y))
    for flat in (lambda X: X.view(len(X), -1), lambda X: X.view(-1, X[0].numel())):
        for kind in (lambda X, y: (X, y), Rows):
            for own, right in zip(numbers(flat, kind), expected, strict=True):
                np.testing.assert_allclose(own, right, rtol=1e-9, atol=1e-11)


def test_a_loss_may_view_outputs_and_targets_that_are_images():
    data = [(X, X[:, :2, 1:5, 1:5]) for X, _ in colours(3)]

    def numbers(flat):
        torch.manual_seed(0)
        net = nn.Conv2d(3, 2, 3).double()
        cohort = sp.Cohort(
            data, sp.Module(net, lambda out, y: (flat(out) - flat(y)).square().mean())
        )
        return cohort._oracle.losses(cohort.start()), steps(cohort._oracle, 4)

    for own, right in zip(
        numbers(lambda X: X.view(len(X), -1)), numbers(lambda X: X.flatten(1)), strict=True
    ):
        np.testing.assert_allclose(own, right, rtol=1e-9, atol=1e-11)


@pytest.fixture
def products(monkeypatch):
    """Convolutions as matrix products, on whatever processor."""
    monkeypatch.setattr(network_module, "PRODUCTS", True)


WINDOWS = [  # images (C, H, W), filters (m, C, k, k), and how they move
    ((1, 7, 9), (3, 1, 3, 3), {"padding": 1}),
    ((2, 8, 5), (3, 2, 3, 2), {"padding": (1, 0), "stride": (2, 1)}),
    ((3, 9, 8), (2, 3, 2, 3), {"dilation": (2, 1), "padding": (0, 2)}),
    ((2, 9, 9), (4, 2, 3, 3), {"stride": 2, "dilation": 2, "padding": 3}),
    ((2, 7, 6), (3, 2, 3, 3), {"stride": 3}),  # some pixels are not seen at all
    ((5, 6, 7), (2, 5, 1, 1), {}),
    ((5, 6, 7), (2, 5, 1, 1), {"stride": 2}),
    ((1, 5, 5), (2, 1, 5, 5), {}),
    ((2, 4, 4), (3, 2, 1, 2), {"padding": 2}),  # wider than the kernel
    ((2, 6, 6), (3, 2, 3, 3), {"padding": "same"}),
    ((2, 6, 6), (4, 1, 3, 3), {"groups": 2}),
]


@pytest.mark.parametrize(("shape", "filters", "how"), WINDOWS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_convolution_by_products_is_a_convolution(shape, filters, how, bias, last):
    random = torch.Generator().manual_seed(0)
    X, W = (
        torch.randn(3, *s, generator=random, dtype=torch.float64) for s in ((4, *shape), filters)
    )
    b = torch.randn(3, filters[0], generator=random, dtype=torch.float64)
    X = X.movedim(2, -1).contiguous().movedim(-1, 2) if last else X
    leaves = [part.requires_grad_() for part in ((X, W, b) if bias else (X, W))]
    plain = torch.stack(
        [nn.functional.conv2d(*(part[i] for part in leaves), **how) for i in range(3)]
    )
    with network_module.PatchProducts(3):
        beside = torch.vmap(lambda *parts: nn.functional.conv2d(*parts, **how))(*leaves)
        alone = torch.stack(
            [nn.functional.conv2d(*(part[i] for part in leaves), **how) for i in range(3)]
        )
    slope = torch.randn(plain.shape, generator=random, dtype=torch.float64)
    expected = torch.autograd.grad(plain, leaves, slope)
    for own in (beside, alone):
        torch.testing.assert_close(own, plain)
        for found, right in zip(torch.autograd.grad(own, leaves, slope), expected, strict=True):
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    "first", [nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 4, 3, padding=1, bias=False)]
)
def test_a_network_by_products_has_the_numbers_of_one_without(first, products, monkeypatch):
    """Ties of a pooling that does not divide the image too: one client's images are of a single colour."""
    data = [(X if i else np.ones_like(X), y) for i, (X, y) in enumerate(colours(3))]
    rest = (
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(4, 6, 2),
        nn.MaxPool2d(2, 1, 1),
        nn.Flatten(),
    )
    net = nn.Sequential(first, *rest, nn.LazyLinear(3)).double()
    net(torch.ones(1, 3, 6, 6, dtype=torch.float64))

    def numbers(by_products):
        oracle = sp.Cohort(data, sp.Module(net))._oracle
        some = steps(oracle, 4)
        everything = steps(oracle, None)
        alone = steps(oracle.only([1]), 4)
        assert oracle.function.products is by_products
        return oracle.evaluate(oracle.start()).gradients, some, everything, alone

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # groups of clients beside each other
    try:
        ours = numbers(True)
        assert not network_module.BUFFERS.free
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(network_module, "PRODUCTS", False)
    for own, right in zip(ours, numbers(False), strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-8, atol=1e-11)


def test_patches_that_take_too_much_memory_are_not_made(products, monkeypatch):
    monkeypatch.setattr(network_module, "PATCHES", 0)
    monkeypatch.setattr(network_module, "Convolution", None)
    oracle = sp.Cohort(
        colours(3), sp.Module(Tutorial(3, True, lambda X: X.view(len(X), -1)))
    )._oracle
    assert torch.isfinite(steps(oracle, 4)).all()
    assert oracle.function.products


class Slope(nn.Module):
    """A network whose output is a derivative, so that its gradient is a second one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Conv2d(1, 3, 6).double()

    def forward(self, X):
        with torch.enable_grad():
            X = X.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.layer(X).square().sum(), X, create_graph=True)
        return slope.flatten(1)[:, :3]


def test_a_convolution_that_is_derived_twice_is_left_alone(products):
    """Products have no second derivative; what is left of it without would be wrong."""
    oracle = sp.Cohort(pictures(), sp.Module(Slope()))._oracle
    found = oracle.evaluate(oracle.start()).gradients
    assert not oracle.function.products
    np.testing.assert_allclose(
        found[1], oracle.gradient(1, oracle.start())[1], rtol=1e-9, atol=1e-11
    )


def test_bytes_stay_bytes_until_they_are_transformed():
    random = np.random.default_rng(0)
    raw = [
        (random.integers(0, 256, (m, 1, 6, 6)).astype(np.uint8), random.integers(0, 3, m))
        for m in SIZES
    ]
    net = network("plain", torch.float32)
    cohort = sp.Cohort(raw, sp.Module(net, transform=lambda X: X.float() / 255))
    assert cohort._oracle.rows.all_X.dtype == torch.uint8
    scaled = sp.Cohort(
        [((X / np.float32(255)).astype(np.float32), y) for X, y in raw], sp.Module(net)
    )
    x = cohort.start()
    np.testing.assert_allclose(cohort.evaluate(x).loss, scaled.evaluate(x).loss, rtol=1e-6)
    np.testing.assert_allclose(
        steps(cohort._oracle, 4), steps(scaled._oracle, 4), rtol=1e-3, atol=1e-6
    )


def test_half_precision_is_near():
    net = network("plain", torch.float32)
    data = pictures(dtype=np.float32)
    exact, half = (sp.Cohort(data, sp.Module(net, precision=p))._oracle for p in (None, "bf16"))
    a = steps(exact, 4)
    b = steps(half, 4)
    assert half.function.together
    assert 0 < float((a - b).norm() / a.norm()) < 0.05


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sp.LocalSGD(momentum=1.0), "0 <= momentum < 1"),
        (lambda: sp.LocalSGD(nesterov=True), "momentum > 0"),
        (lambda: sp.LocalSGD(clip=0.0), "clip"),
        (lambda: sp.LocalAdam(second=-0.1), "0 <= second < 1"),
        (lambda: sp.LocalSGD(weight_decay=-1.0), "weight_decay >= 0"),
        (lambda: sp.Module(nn.Linear(2, 2), optimizer="adam"), "optimizer=LocalSGD"),
        (lambda: sp.Module(nn.Linear(2, 2), precision="int8"), "precision"),
        (lambda: sp.Module(nn.Linear(2, 2), statistics="mine"), "statistics"),
        (lambda: sp.Schedule(rounds=3, warmup=3), "rounds > warmup"),
        (lambda: sp.Schedule(drop=0.0), "0 < drop"),
        (lambda: sp.FedAvg(schedule="cosine"), "schedule=Schedule"),
        (
            lambda: sp.Module(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))),
            "requires a gradient|running",
        ),
        (
            lambda: sp.Module(nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.5))),
            "cannot be seeded",
        ),
    ],
)
def test_mistakes_get_a_sentence(make, words):
    with pytest.raises(sp.InputError, match=words):
        make()


def zoo():
    """Every method of the package, as short as it can be."""
    fair = sp.ChiSquare(0.1)
    short = {"local_steps": 3, "batch_size": 4}
    plain = [
        sp.FedAvg,
        sp.FedProx,
        sp.FedNova,
        sp.FedDyn,
        sp.FedAvgM,
        sp.FedAdam,
        sp.FedYogi,
        sp.DeltaFL,
        sp.QFFL,
    ]
    found = [
        *(kind(**short) for kind in (*plain, sp.Scaffold, sp.ProxSkip, sp.AFL, sp.DRFA)),
        sp.FedAvg(local_epochs=2),
    ]
    found += [
        sp.ScaffPD(fair, **short),
        sp.ScaffPD(sp.Average(), local_steps=3),
        sp.fair(fair, **short),
    ]
    found += [
        sp.GradientDescentAscent(fair),
        sp.Extragradient(fair),
        sp.AcceleratedPrimalDual(fair),
        sp.MinimaxGradient(fair),
    ]
    return [*found, sp.SubspaceSaddle(fair), sp.QuasiNewtonMinimax(fair)]


@pytest.mark.parametrize("method", zoo(), ids=lambda m: type(m).__name__)
def test_every_method_trains_a_network(method):
    cohort = sp.Cohort(pictures(), sp.Module(network("plain")), test=pictures(1))
    result = sp.train(method, cohort, rounds=3 if type(method) is sp.FedAvgM else 2)
    losses = result.history.losses
    assert np.isfinite(result.x).all()
    assert losses[-1].mean() < losses[0].mean()
    assert result.certificate == np.inf
    assert "no certificate" in result.message


def test_a_schedule_is_a_factor_on_the_rate_of_every_round():
    cosine = sp.Schedule(rounds=12, warmup=2, last=0.1)
    assert [cosine(r) for r in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert [cosine(r) for r in (8, 13, 40)] == pytest.approx([0.55, 0.1, 0.1])
    steps = sp.Schedule(at=(2, 4), drop=0.5)
    assert [steps(r) for r in range(1, 7)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    cohort = sp.Cohort(pictures(), sp.Module(network("plain")))
    whole = sp.train(
        sp.FedAvg(local_steps=2, batch_size=4, local_rate=0.1, schedule=steps), cohort, rounds=5
    ).x
    x = cohort.start()
    for r in range(1, 6):
        plan = LocalPlan(2, 0.1 * steps(r), batch_size=4, key=(0, r, 1))
        updates = cohort._oracle.local_updates(x, None, None, plan).each()
        x = x - torch.tensor(SIZES, dtype=x.dtype) @ updates / sum(SIZES)
    np.testing.assert_allclose(whole, x, rtol=1e-10, atol=1e-12)
    halved = sp.ScaffPD(sp.Average(), 3, 4, sp.Nonconvex(sp.Schedule(rounds=5)))
    ends = [
        np.linalg.norm(np.diff([p.x for p in path(halved, cohort, 6)], axis=0)[k]) for k in (0, -1)
    ]
    assert ends[1] < 0.1 * ends[0]  # the last rate is a hundredth


def path(method, cohort, rounds):
    states = []
    sp.train(
        method, cohort, rounds=rounds, callbacks=[lambda info: states.append(info.state) and None]
    )
    return states


@pytest.mark.parametrize("method", [sp.Scaffold, sp.ProxSkip])
def test_control_variates_stay_gradients_under_a_schedule(method):
    """One full step a round: c_i is the gradient at x, whatever the rate."""
    cohort = sp.Cohort(pictures(), sp.Module(network("plain")))
    states = path(
        method(local_steps=1, local_rate=0.1, schedule=sp.Schedule(rounds=3, last=0.2)), cohort, 3
    )
    kept = states[-1].variates if method is sp.Scaffold else states[-1].shifts
    c = cohort._oracle.evaluate(states[-2].x).each()
    if method is sp.ProxSkip:  # h_i are c_i less their mean
        c = c - c.mean(0)
    np.testing.assert_allclose(kept.vectors, c, rtol=1e-8, atol=1e-11)


def test_epochs_are_steps_of_each_clients_own_number():
    cohort = sp.Cohort(pictures(), sp.Module(network("plain")))
    states = path(sp.FedAvg(local_epochs=2, batch_size=4, local_rate=0.1), cohort, 1)
    np.testing.assert_array_equal(states[0].steps, [4, 7, 10, 4, 7])  # 2 n_i/4, rounded to even
    plan = LocalPlan(10, 0.1, batch_size=4, key=(0, 1, 1), each=(4, 7, 10, 4, 7))
    d = cohort._oracle.local_updates(cohort.start(), None, None, plan).each()
    expected = cohort.start() - torch.tensor(SIZES, dtype=d.dtype) @ d / sum(SIZES)
    np.testing.assert_allclose(states[0].x, expected, rtol=1e-12, atol=1e-13)
    with pytest.raises(sp.InputError, match="local_epochs"):
        sp.FedAvg(local_epochs=0)


def by_pytorch(x, model, rows, held):
    """The loss on `held` of a network whose batch norm has seen `rows` once."""
    own = model.network(x)
    for part in own.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
            part.momentum = None
    with torch.no_grad():
        own.train()(torch.tensor(rows[0]))
        return float(
            nn.functional.cross_entropy(own.eval()(torch.tensor(held[0])), torch.tensor(held[1]))
        )


def test_own_statistics_are_those_that_pytorch_sees_in_a_clients_rows():
    """FedBN: nothing of batch norm's statistics is sent, and test rows are scored with those of the training rows."""
    data = pictures()
    held = pictures(1)
    model = sp.Module(network("batch norm"), statistics="own")
    cohort = sp.Cohort(data, model, test=held)
    assert cohort.dimension == sum(p.numel() for p in model.module.parameters())
    x = sp.train(sp.FedAvg(local_steps=5, batch_size=4, local_rate=0.1), cohort, rounds=4).x
    for split, rows in (("train", data), ("test", held)):
        expected = [by_pytorch(x, model, *pair) for pair in zip(data, rows, strict=True)]
        np.testing.assert_allclose(cohort.evaluate(x, split).loss, expected, rtol=1e-9)
    single = cohort._oracle.only([2])
    assert float(single.losses(torch.tensor(x))[0]) == pytest.approx(
        cohort.evaluate(x).loss[2], rel=1e-12
    )
    loss, _ = cohort._oracle.gradient(2, torch.tensor(x))
    assert float(loss) == pytest.approx(cohort.evaluate(x).loss[2], rel=1e-12)
    averaged = sp.Cohort(data, sp.Module(network("batch norm")))
    first = averaged._oracle.local_updates(
        averaged.start(), None, None, LocalPlan(3, 0.1, key=(1, 1))
    ).each()
    own = cohort._oracle.local_updates(
        cohort.start(), None, None, LocalPlan(3, 0.1, key=(1, 1))
    ).each()
    np.testing.assert_allclose(
        own, first[:, : cohort.dimension], rtol=1e-12, atol=1e-14
    )  # local steps are the same


def test_own_statistics_in_chunks_are_nearly_those_of_all_rows(monkeypatch):
    cohort = sp.Cohort(pictures(), sp.Module(network("batch norm"), statistics="own"))
    x = cohort.start()
    whole = cohort._oracle.completed(x)
    monkeypatch.setattr(network_oracle, "SAMPLED", 5)
    parts = cohort._oracle.only([0, 1, 2, 3, 4]).completed(x)
    np.testing.assert_allclose(
        parts[:, -8:-4], whole[:, -8:-4], rtol=1e-9
    )  # means of the first layer are exact
    np.testing.assert_allclose(
        parts[:, -4:], whole[:, -4:], rtol=0.01
    )  # variances but for n/(n − 1)


def test_own_statistics_of_inputs_far_from_zero(monkeypatch):
    """Inputs of mean 2000 and deviation 0.1 in single precision, where E v² − (E v)² is noise."""
    data = [((2000 + 0.1 * X).astype(np.float32), y) for X, y in pictures()]
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3))
    monkeypatch.setattr(network_oracle, "SAMPLED", 5)
    oracle = sp.Cohort(data, sp.Module(net, statistics="own"), dtype=torch.float32)._oracle
    found = oracle.completed(oracle.start())[:, -2:]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[:, 0], [X.astype(float).mean() for X, _ in data], rtol=3e-7)
    np.testing.assert_allclose(
        found[:, 1], [X.astype(float).var() for X, _ in data], rtol=0.02
    )  # but for n/(n − 1)


def test_own_statistics_know_neither_dropout_nor_random_transforms():
    noise = [
        sp.Augment(lambda X, u: X + 9 * u[:, :, None, None]),
        nn.Dropout(0.5),
        *network("batch norm"),
    ]
    noisy, plain = (
        sp.Cohort(pictures(), sp.Module(net, statistics="own"))._oracle
        for net in (nn.Sequential(*noise), network("batch norm"))
    )
    x = noisy.start()
    np.testing.assert_array_equal(noisy.completed(x), plain.completed(x))
    assert (
        float((steps(noisy, 4) - steps(plain, 4)).abs().max()) > 1e-3
    )  # which are on in local steps


class Crossed(nn.Module):
    """Batch norms that are passed in another order than they are named in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.second, self.first = nn.BatchNorm2d(4), nn.BatchNorm2d(1)
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(64, 3)
        self.double()

    def forward(self, X):
        return self.fc(self.second(self.conv(self.first(3 + 2 * X))).flatten(1))


def test_statistics_belong_to_their_layers_whichever_comes_first():
    model = sp.Module(Crossed())
    cohort = sp.Cohort(pictures(), model)
    trained = model.network(cohort.start() - steps(cohort._oracle, 4, 40)[2])
    assert float(trained.first.running_mean) == pytest.approx(3, abs=0.2)


FLIP = sp.Augment(lambda X, u: torch.where(u[:, :1, None, None] < 0.5, X.flip(-1), X))


def test_random_transforms_follow_from_client_round_and_step(monkeypatch):
    oracle = sp.Cohort(pictures(), sp.Module(nn.Sequential(FLIP, network("plain"))))._oracle
    plain = sp.Cohort(pictures(), sp.Module(network("plain")))._oracle
    x = oracle.start()
    np.testing.assert_array_equal(
        oracle.losses(x), plain.losses(x)
    )  # losses see the rows as they are
    beside = steps(oracle, 4)
    assert oracle.function.together
    assert float((beside - steps(plain, 4)).abs().max()) > 1e-4
    np.testing.assert_allclose(steps(oracle.only([3, 1]), 4), beside[[3, 1]], rtol=1e-9, atol=1e-11)
    monkeypatch.setitem(network_oracle.TOGETHER, "cpu", 1)
    np.testing.assert_allclose(steps(oracle, 4), beside, rtol=1e-9, atol=1e-11)
    share = FLIP.train().uniform(4000, 1).lt(0.5).double().mean()
    assert float(share) == pytest.approx(0.5, abs=0.03)


class Made(Dataset):
    """Large rows that exist only while they are read."""

    def __len__(self):
        return 900

    def __getitem__(self, row):
        return np.full(40_000, row / 900, dtype=np.float32), row % 2


def test_a_client_may_be_larger_than_memory():
    """Losses and steps over 288 MB of rows hold some 35 MB of them at a time."""
    net = nn.Sequential(nn.Linear(40_000, 2), nn.Tanh())
    oracle = sp.Cohort([Made(), Made()], sp.Module(net), dtype=torch.float32)._oracle
    read = oracle.rows.read
    most = []
    oracle.rows.read = lambda source, rows: (most.append(len(rows)), read(source, rows))[1]
    x = oracle.start()
    oracle.losses(x)
    oracle.local_updates(x, None, None, LocalPlan(2, 0.1, batch_size=8, key=(1, 1)))
    assert (
        sum(most) == 2 * 900 + 2 * 2 * 8 + 5
    )  # five rows to find out how large they are, and whether they batch
    assert max(most) <= 220


def test_a_personal_head_is_fitted_and_the_rest_is_shared(monkeypatch):
    from scaffpd.models import personal

    usual = personal.pace
    monkeypatch.setattr(
        personal, "pace", lambda *parts: usual(*parts)._replace(steps=60)
    )  # to the minimum
    data = pictures()[:2]
    cohort = sp.Cohort(
        data, sp.Personal(sp.Module(network("plain"), l2=0.01), strength=20.0, columns="4")
    )
    x = cohort.start()
    head = network("plain")[4].weight.numel() + 3
    own = cohort._oracle.own(x)
    assert torch.equal(own[:, :-head], x[:-head].expand(len(data), -1))
    assert float((own[:, -head:] - x[-head:]).abs().min(0).values.max()) > 1e-4
    direction = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    h = 1e-5
    slope = (
        cohort._oracle.losses(x + h * direction) - cohort._oracle.losses(x - h * direction)
    ) / (2 * h)
    np.testing.assert_allclose(
        cohort._oracle.evaluate(x).each() @ direction, slope, rtol=1e-5, atol=1e-7
    )
    with pytest.raises(sp.InputError, match="Unknown layer 'fc'"):
        sp.Cohort(data, sp.Personal(sp.Module(network("plain")), 1.0, columns=["fc"]))


def test_personal_networks_serve_clients_that_disagree(monkeypatch):
    """Labels of a client are turned round: fine-tuning, Ditto, a personal head and pFedMe all help them."""
    from scaffpd.models import personal

    usual = personal.pace
    monkeypatch.setattr(
        personal, "pace", lambda *parts: usual(*parts)._replace(steps=8)
    )  # some of the way
    random = np.random.default_rng(0)
    data = []
    for i in range(2):
        X = random.standard_normal((60, 6))
        y = (X[:, 0] > 0).astype(int)
        data.append((X, 1 - y if i == 0 else y))
    torch.manual_seed(0)
    model = sp.Module(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    shared = sp.Cohort(data, model)
    x = sp.train(sp.fair(sp.ChiSquare(0.1)), shared, rounds=3).x
    before = shared.evaluate(x).loss
    for strength in (1e-6, 6.0):  # fine-tuning, and Ditto, after a run that knows of neither
        own = [sp.personalise(x, X, y, sp.Personal(model, strength)) for X, y in data]
        after = [shared._oracle.only([i]).losses(torch.tensor(u)).item() for i, u in enumerate(own)]
        assert np.all(np.array(after) < before)
    for columns in (None, ["2"]):  # pFedMe, and a personal head: x is trained for them
        cohort = sp.Cohort(data, sp.Personal(model, 0.6, columns))
        result = sp.train(sp.ScaffPD(sp.ChiSquare(0.1), local_steps=2), cohort, rounds=2)
        assert np.all(cohort.evaluate(result.x).accuracy > shared.evaluate(x).accuracy - 1e-9)
        assert cohort.evaluate(result.x).loss.max() < before.min()
