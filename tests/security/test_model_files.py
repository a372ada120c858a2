"""A model's file comes from others: whatever stands in it, rows are predicted or it is refused."""

import copy
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cases.runs import asked, patients, trained
from scaffpd.errors import InputError
from scaffpd.report.predict import predict
from scaffpd.settings.model_file import Setup, read_model

ODD = [None, True, -1, 0, 1e308, float("nan"), "", "x" * 600, [], {}, [[1.0]], [None], {"a": 1}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A file of every kind of model, and the table that they predict."""
    folder = tmp_path_factory.mktemp("run")
    table = patients(folder / "p.csv", 120)
    numbers = patients(folder / "n.csv", 120, number=True)
    trained(asked(table), folder / "labels")
    trained(asked(numbers), folder / "numbers")
    return table, [folder / name / "model.safetensors" for name in ("labels", "numbers")]


def places(value, at=()):
    """Where something stands in a JSON value."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def twisted(random, setup, x):
    """One thing in the agreement or in the parameters is another."""
    setup = copy.deepcopy(setup)
    if random.random() < 0.15:
        shapes = [x[:-1], np.append(x, 1.0), x[None, None], np.full_like(x, np.inf), x[:0]]
        return setup, shapes[random.integers(len(shapes))]
    *path, last = list(places(setup))[1:][random.integers(len(list(places(setup))) - 1)]
    inside = setup
    for key in path:
        inside = inside[key]
    if random.random() < 0.3:
        del inside[last]
    else:
        inside[last] = ODD[random.integers(len(ODD))]
    return setup, x


@pytest.mark.parametrize("seed", range(4))
def test_a_twisted_model_file_predicts_or_is_refused(model, tmp_path, seed):
    random = np.random.default_rng(seed)
    table, files = model
    refused = 0
    for file in files:
        x = load_file(file)["x"]
        setup = read_model(file)[1].values()
        assert Setup.of(setup).values() == setup
        for _ in range(40):
            values, other = twisted(random, setup, x)
            save_file({"x": other}, tmp_path / "m.safetensors", {"setup": json.dumps(values)})
            try:
                assert len(predict(tmp_path / "m.safetensors", table).predicted) == 120
            except InputError:
                refused += 1
    assert refused > 20  # what changes a word, such as a column's name, may be another model
