"""Tables whose answer is known: what `scaffpd train` advises, and what it points out."""

import csv
import json

import numpy as np
import pytest

from scaffpd import cli

JOINT = {"average", "fair", "personal"}
USEFUL = JOINT | {"alone"}  # the columns predict the target


def clients(random, many, rows):
    return np.repeat([f"c{i:02d}" for i in range(many)], rows)


def drawn(random, z):
    return np.where(random.random(len(z)) < 1 / (1 + np.exp(-z)), "yes", "no")


def table(many, rows, target, columns=2, seed=0):
    """A table of `many` clients: columns x0, x1, .. of noise and a target of them and the client.

    `target(random, X, i)` makes the target, i the number of every row's client.
    """
    random = np.random.default_rng(seed)
    owner = clients(random, many, rows)
    X = random.normal(size=(len(owner), columns)).round(3)
    i = np.repeat(np.arange(many), rows)
    found = {"client": owner, **{f"x{j}": X[:, j] for j in range(columns)}}
    return found | {"target": target(random, X, i)}


def alike(random, X, i):
    return drawn(random, 2 * X[:, 0] - X[:, 1])


def one_differs(random, X, i):
    return drawn(random, np.where(i == 0, -3, 3) * X[:, 0])


def strangers(random, X, i):
    slopes = np.random.default_rng(7).normal(size=(i.max() + 1, X.shape[1]))
    return (3 * (X * slopes[i]).sum(1) + random.normal(size=len(i))).round(4)


def levels(random, X, i):
    return (X[:, 0] + 3 * np.random.default_rng(8).normal(size=i.max() + 1)[i]).round(3)


def bent(random, X, i):
    return (X[:, 0] ** 2 + 0.3 * random.normal(size=len(i))).round(3)


def three_labels(random, X, i):
    return np.array(["a", "b", "c"])[(X + 0.5 * random.normal(size=X.shape)).argmax(1)]


def one_class_at_a_client(random, X, i):
    return np.where(i == 0, "no", drawn(random, 3 * X[:, 0]))


def heavy(random, X, i):
    return random.standard_t(2, size=len(i)).round(3)


def with_columns(found, **columns):
    return {**found, **{name: make(found) for name, make in columns.items()}}


BASE = table(5, 60, alike)
CASES = {
    "random labels": (table(5, 60, lambda r, X, i: drawn(r, 0 * i)), {"constant"}, ""),
    "heavy tails": (table(6, 60, heavy), {"constant"}, ""),
    "base rates only": (
        table(6, 80, lambda r, X, i: drawn(r, 2.0 * (i % 3 - 1))),
        {"constant"},
        "",
    ),
    "all alike": (table(20, 30, alike, columns=6), JOINT, ""),
    "all alike, many rows": (table(3, 400, alike), {"alone", "average"}, ""),
    "one client differs": (table(6, 80, one_differs, columns=1), {"personal", "alone"}, ""),
    "strangers": (table(5, 80, strangers), {"personal", "alone"}, ""),
    "tiny clients": (table(60, 10, alike), JOINT, ""),
    "other levels": (table(10, 12, levels), {"personal"}, ""),
    "a curve": (table(6, 60, bent, columns=1), USEFUL, "steps: x0"),
    "three labels": (table(5, 50, three_labels, columns=3), USEFUL, ""),
    "one class at a client": (table(5, 60, one_class_at_a_client), USEFUL, ""),
    "counts": (
        table(6, 120, lambda r, X, i: r.poisson(np.exp(1 + 0.7 * X[:, 0]))),
        USEFUL,
        "",
    ),
    "the target's twin": (
        with_columns(BASE, copy=lambda t: np.where(t["target"] == "yes", 1, 0)),
        USEFUL,
        "Column 'copy' alone tells the target",
    ),
    "a time and an event": (
        with_columns(
            BASE,
            followUp=lambda t: np.random.default_rng(5).integers(1, 900, 300),
            status=lambda t: np.where(t["target"] == "yes", "dead", "alive"),
        ),
        USEFUL,
        "'followUp' and 'status' look like times to an event: use --time followUp --event status",
    ),
}


def trained(found, folder, capsys, splits=1):
    """Train on the table as a user would; return what --json and the other stream say."""
    file = folder / "t.csv"
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerows([list(found), *zip(*found.values(), strict=True)])
    target = "status" if "status" in found else "target"
    words = f"--client client --target {target} --splits {splits} --no-report --json --out"
    assert cli.run(["train", str(file), *words.split(), str(folder / "run")]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CASES)
def test_the_advice_is_right(tmp_path, capsys, name):
    found, wanted, remark = CASES[name]
    run = trained(found, tmp_path, capsys)
    advised = run["joining"]["recommendation"]
    # of noise, whatever is guessed is called a guess
    guess = wanted == {"constant"} and run["joining"]["outcome"] == "too few rows"
    assert advised in wanted or guess, run["verdict"]
    assert remark in " ".join(run["remarks"])
    if advised == "constant":
        assert "predict the target" in run["verdict"][0]
        assert "Clear gains: nobody." in run["answers"]["Who gains or loses?"]
