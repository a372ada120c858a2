"""Four hospitals, one model, and a proof: an engineer's day with scaffpd, from four CSV files to
predictions.

Run it whole (`python examples/certified_fairness_across_hospitals.py`, a few seconds), or cell by
cell in an editor that knows `# %%`. Everything that it writes goes to the folder hospitals/, which
must not be there yet.

The silos are objects in this process, but all that passes between them and the coordinator are the
bytes of a real deployment; `scaffpd deploy local --engine flare` does the same with a process and a
certificate for everyone.
"""

# %%
# What there is
# -------------
# Four hospitals with patients of their own (UCI heart disease). Each has a table and a file,
# silo.toml, that says what the table is and what may be asked of it. The coordinator has
# federation.toml and no table at all.

import csv
from pathlib import Path

import numpy as np

from scaffpd.cli import run as scaffpd
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.hospitals import write_hospitals
from scaffpd.deploy.messages import Failure, InProcess
from scaffpd.deploy.silo.silo import Silo
from scaffpd.run.record import RunRecord

HOME = Path("hospitals")
federation, silos = write_hospitals(HOME)
print((silos["va"]).read_text())

# %%
# Every operator looks first at what would leave the site. It is a command, and it sends nothing.

assert scaffpd(["silo", "check", str(silos["va"])]) == 0

# %%
# Which objective?
# ----------------
# The one choice that no software can make. We try three, each a line in federation.toml, and look
# at every hospital. Silos agree on columns, categories, labels and scale by themselves, by names
# and sums.


def written(name, **changes):
    """A federation.toml of that name, with its own folder for results and some lines changed."""
    text = federation.read_text().replace('folder = "run"', f'folder = "{name}"')
    for old, new in changes.values():
        assert old in text, old
        text = text.replace(old, new)
    path = HOME / f"{name}.toml"
    path.write_text(text)
    return path


def opened():
    """The four silos, ready to answer."""
    return {name: Silo.open(path) for name, path in silos.items()}


def clients(name):
    """How a run's model serves every hospital, by the run's own record."""
    return RunRecord.read(HOME / name).main.by_client


CHI = 'kind = "ChiSquare"\nrho = 0.1'
objectives = {
    "average": 'kind = "Average"',
    "fair": CHI,
    "worst-case": 'kind = "Agnostic"',
}
for name, text in objectives.items():
    outcome = coordinate(written(name, objective=(CHI, text)), InProcess(opened()))
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
# Every round is on disk before the next one begins. Here a run stops after three rounds; asked
# again for more, it goes on from there, and ends with the very numbers of a run that was never
# interrupted.

short = written("resumed", rounds=("rounds = 500", "rounds = 3"))
print("\nstopped:", coordinate(short, InProcess(opened())).status)
outcome = coordinate(written("resumed"), InProcess(opened()))
print("resumed:", outcome.status, "after", outcome.rounds, "rounds")
same = (HOME / "resumed" / "model.safetensors").read_bytes() == (
    HOME / "fair" / "model.safetensors"
).read_bytes()
print("the same model, bit for bit:", same)
assert same

# %%
# A hospital goes away
# --------------------
# Hungary stops answering in the middle. The run waits for it, and then pauses: going on without it
# from the same point would show its gradient, as the difference of two sums. Once it is back, the
# run goes on with the same numbers.


class WithoutHungary(InProcess):
    """A line to the silos that loses one of them after some exchanges."""

    left = 18

    def sites(self):
        """Who can be reached."""
        return tuple(site for site in super().sites() if site != "hungarian" or self.left > 0)

    def ask(self, questions, timeout):
        """Answers of those who are there."""
        self.left -= 1
        there = {site: question for site, question in questions.items() if site in self.sites()}
        gone = {site: Failure("nobody answers") for site in questions if site not in there}
        return super().ask(there, timeout) | gone


hasty = ("[training]", "[faults]\nstart_timeout = 1.0\n\n[training]")
print(f"\n{coordinate(written('paused', faults=hasty), WithoutHungary(opened())).sentence}")
outcome = coordinate(written("paused", faults=hasty), InProcess(opened()))
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
