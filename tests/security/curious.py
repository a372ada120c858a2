"""A coordinator that follows the protocol and looks at everything that it receives in one ordinary run.

    python tests/security/curious.py

prints how well it knows every silo's gradient afterwards.
"""

from __future__ import annotations

import csv
import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import InProcess, decode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.model_file import read_model
from scaffpd.secure.masking import Identity

NAMES = ("north", "south", "east", "west", "middle")
FILE = """name = "curious"
silos = {silos}

[model]
loss = "logistic"
l2 = 0.01
intercept = true

[algorithm]
kind = "{kind}"

[objective]
kind = "{objective}"
{strength}
[training]
rounds = 300
tol = {tol}

[secure]
losses = "{losses}"
"""


class Watched(InProcess):
    """Silos in this process, and everything that was said."""

    def __init__(self, silos):
        super().__init__(silos)
        self.log = []

    def ask(self, questions, timeout):
        replies = super().ask(questions, timeout)
        self.log += [(name, questions[name], reply) for name, reply in replies.items()]
        return replies


def ordinary_run(
    folder: Path, d: int, losses: str, kind="Fair", objective="ChiSquare", tol=1e-6, rows=60
):
    """Train over five silos with d parameters, and return what was said, the outcome, and the silos."""
    folder.mkdir(parents=True, exist_ok=True)
    strength = {"ChiSquare": "rho = 0.1\n", "CVaR": "alpha = 0.5\n"}.get(objective, "")
    path = folder / "federation.toml"
    about = {
        "kind": kind,
        "objective": objective,
        "strength": strength,
        "losses": losses,
        "tol": tol,
    }
    path.write_text(FILE.format(silos=list(NAMES), **about))
    for name in NAMES:
        (folder / name).mkdir(exist_ok=True)
    prints = {
        name: Identity.kept(name, folder / name / "identity.key").card.fingerprint for name in NAMES
    }
    pins = "[secure.pins]\n" + "".join(f'{name} = "{key}"\n' for name, key in prints.items())
    for k, name in enumerate(NAMES):
        rng = np.random.default_rng([d, k])
        X = rng.normal(size=(rows, d - 1)) + 0.5 * rng.normal(size=d - 1)
        y = X @ (1 + rng.normal(size=d - 1)) + rng.normal(size=rows) > 0
        with (folder / name / "rows.csv").open("w", newline="") as file:
            table = [
                [*map(repr, map(float, x)), "yes" if label else "no"]
                for x, label in zip(X, y, strict=True)
            ]
            csv.writer(file).writerows([[*(f"x{j}" for j in range(d - 1)), "sick"], *table])
        rules = f'\n[secure]\nrequired = true\nlosses = "{losses}"\n{pins}'
        (folder / name / "silo.toml").write_text(
            f'name = "{name}"\n[data]\nfile = "rows.csv"\ntarget = "sick"\n[split]\ntest = 0.0\n{rules}'
        )
    transport = Watched({name: Silo.open(folder / name / "silo.toml") for name in NAMES})
    return transport, coordinate(path, transport), FederationFile.read(path)


def losses_seen(log):
    """{silo: (points, losses)}: every loss of a single silo that left, and where it was asked for."""
    vectors = {}
    found = {}
    for name, question, reply in log:
        asked = decode(question, 2**31)
        told = decode(reply, 2**31)
        vectors |= {(name, label): array for label, array in asked.arrays.items()}
        label = asked.values.get("vectors", {}).get("x")
        if (
            told.kind == "answer"
            and asked.kind in ("gradients", "losses", "evaluate")
            and "scalars" in told.arrays
        ):
            points = found.setdefault(name, {})
            points[vectors[name, label].tobytes()] = float(told.arrays["scalars"][0])
    return {
        name: (np.array([np.frombuffer(x) for x in points]), np.array([*points.values()]))
        for name, points in found.items()
    }


def gradients_from_losses(log, x):
    """{silo: its gradient at x}, by least squares over all losses of single silos that left in a run.

    A Taylor polynomial of second order at x, the nearer points with the more weight; zero where there is no loss.
    """
    learnt = {}
    for name, (points, losses) in losses_seen(log).items():
        away = points - x
        far = np.linalg.norm(away, axis=1)
        keep = far > 0
        here = losses[~keep][0] if (~keep).any() else losses[np.argmin(far)]
        away = away[keep]
        rise = losses[keep] - here
        far = far[keep]
        if not len(rise):
            continue
        i, j = np.triu_indices(len(x))
        second = away[:, i] * away[:, j] * np.where(i == j, 0.5, 1.0)
        table = np.concatenate([away, second], 1) / far[:, None]
        learnt[name] = np.linalg.lstsq(table, rise / far, rcond=1e-13)[0][: len(x)]
    return {name: learnt.get(name, np.zeros(len(x))) for name in NAMES}


def errors(transport, found, x):
    """The relative error with which every silo's gradient at x is known."""
    off = []
    for name, guess in found.items():
        truth = transport.silos[name].cohort.gradients(torch.from_numpy(x)).each()[0].numpy()
        off.append(float(np.linalg.norm(guess - truth) / np.linalg.norm(truth)))
    return off


def table():
    """The table of docs/threat-model.md."""
    lines = [
        "| d | losses | method | rounds | points where a silo showed its loss | relative error of c_i |"
    ]
    lines.append("|---:|---|---|---:|---:|---|")
    for d, (kind, losses), tol in itertools.product(
        (5, 10), (("ScaffPD", "clear"), ("Fair", "hidden")), (1e-6, 1e-10)
    ):
        with tempfile.TemporaryDirectory() as folder:
            transport, outcome, file = ordinary_run(Path(folder), d, losses, kind, tol=tol)
            x = read_model(file.folder / "model.safetensors")[0]
            off = errors(transport, gradients_from_losses(transport.log, x), x)
            seen = max((len(found) for _, found in losses_seen(transport.log).values()), default=0)
        words = f"{min(off):.2%} to {max(off):.2%}" if losses == "clear" else f"{min(off):.0%}"
        lines.append(
            f"| {d} | {losses} | {kind}, tol = {tol:g} | {outcome.rounds} | {seen} | {words} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
