"""Four hospitals, one model, and a proof: an engineer's day with scaffpd, from four CSV files to
predictions.

Run it whole (`python examples/certified_fairness_across_hospitals.py`, a few seconds), or cell by
cell in an editor that knows `# %%`. Everything that it writes goes to the folder hospitals/, which
must not be there yet.

The silos are objects in this process, but all that passes between them and the coordinator are the
bytes of a real deployment; `scaffpd deploy local` does the same with a process and a
certificate for everyone.
"""

# %%
# What there is
# -------------
# Four hospitals with patients of their own (UCI heart disease). Each has a table and a file,
# silo.toml, that says where the table is and what is allowed. The coordinator has
# federation.toml and no table at all.

import csv
from pathlib import Path

import numpy as np

from scaffpd.cli import run as scaffpd
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.local import agree_for_all, write_hospitals
from scaffpd.deploy.messages import Failure, InProcess
from scaffpd.deploy.silo import Silo
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile

HOME = Path("hospitals")
federation, silos = write_hospitals(HOME)
print((silos["va"]).read_text())

# %%
# Every operator looks first at the data. It is a command, and it sends nothing.

assert scaffpd(["silo", "check", str(silos["va"])]) == 0

# %%
# Which objective?
# ----------------
# The one choice that no software can make. We try two, each a line in federation.toml, and look
# at every hospital. Columns are declared in that file; their scale comes from masked sums. Every
# operator agrees to every run (`scaffpd silo agree`), which `agree_for_all` does here for all.


def written(name, **changes):
    """A federation.toml of that name, with its own folder for results and some lines changed."""
    text = federation.read_text().replace('folder = "run"', f'folder = "{name}"')
    for old, new in changes.values():
        assert old in text, old
        text = text.replace(old, new)
    path = HOME / f"{name}.toml"
    path.write_text(text)
    agree_for_all(FederationFile.read(path), silos)
    return path


# The four silos, ready to answer. They outlive the coordinators below, as they would elsewhere.
hospitals = {name: Silo.open(path) for name, path in silos.items()}


def clients(name):
    """How a run's model serves every hospital, by the run's own record."""
    return RunRecord.read(HOME / name).main.by_client


CHI = 'kind = "ChiSquare"\nrho = 0.1'
objectives = {"average": 'kind = "Average"', "fair": CHI}
for name, text in objectives.items():
    outcome = coordinate(written(name, objective=(CHI, text)), InProcess(hospitals))
    assert outcome.status == "converged", outcome
    print(f"{name:10} {outcome.rounds:3} rounds, certified gap {outcome.certificate:.1e}")

# %%
# What the certificate says: no model at all has a smaller value of that objective by more than this
# gap, on these training rows. It does not say that held-out patients gain. Those are measured, so
# look at both.

print(f"\n{'training loss':14}" + "".join(f"{name:>12}" for name in objectives))
for hospital in silos:
    losses = [clients(name)[hospital].train_loss for name in objectives]
    print(f"{hospital:14}" + "".join(f"{loss:12.3f}" for loss in losses))
print(f"\n{'held-out, %':14}" + "".join(f"{name:>12}" for name in objectives))
for hospital in silos:
    right = [clients(name)[hospital].test_score for name in objectives]
    print(f"{hospital:14}" + "".join(f"{100 * share:12.1f}" for share in right))

# %%
# The coordinator's machine goes down
# -----------------------------------
# Every round is on disk before the next one begins, at the coordinator and at every silo. Here the
# coordinator is stopped in the middle; started again, the run goes on from there, and ends with the
# very numbers of a run that was never interrupted.


class Lost(InProcess):
    """A line to the silos that is cut after some exchanges."""

    left = 25

    def ask(self, questions, timeout):
        """Answers, as long as there is a line."""
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().ask(questions, timeout)


resumed = written("resumed")
try:
    coordinate(resumed, Lost(hospitals))
except KeyboardInterrupt:
    print("\nstopped")
outcome = coordinate(resumed, InProcess(hospitals))
print("resumed:", outcome.status, "after", outcome.rounds, "rounds")
models = [(HOME / name / "model.safetensors").read_bytes() for name in ("resumed", "fair")]
print("the same model, bit for bit:", models[0] == models[1])
assert models[0] == models[1]

# %%
# A hospital goes away
# --------------------
# Hungary stops answering in the middle. The run waits for it, and then pauses: going on without it
# from the same point would show its gradient, as the difference of two sums. Once it is back, the
# run goes on with the same numbers.


class WithoutHungary(InProcess):
    """A line to the silos that loses one of them after some exchanges."""

    left = 18

    def ask(self, questions, timeout):
        """Answers of those who are there."""
        self.left -= 1
        away = {"hungarian"} if self.left <= 0 else set()
        there = {site: asked for site, asked in questions.items() if site not in away}
        gone = {site: Failure("nobody answers") for site in questions if site not in there}
        return super().ask(there, timeout) | gone


hasty = ('name = "hospitals"', 'name = "hospitals"\ntimeout = 1.0')
print(f"\n{coordinate(written('paused', faults=hasty), WithoutHungary(hospitals)).sentence}")
outcome = coordinate(written("paused", faults=hasty), InProcess(hospitals))
print("with Hungary again:", outcome.status, f"; certified gap {outcome.certificate:.1e}")

# %%
# The model goes to work
# ----------------------
# One file, with columns, categories, labels and scale in it. Each hospital predicts at home.

predictions = HOME / "va" / "predictions.csv"
model = HOME / "fair" / "model.safetensors"
assert scaffpd(["silo", "predict", str(silos["va"]), str(model), "--out", str(predictions)]) == 0
with predictions.open(encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
print(f"\n{len(rows)} predictions, the first: {rows[0]}")
assert len(rows) == 200
assert np.isfinite(float(clients("fair")["va"].weight))
