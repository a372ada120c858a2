"""What the tests of deployed secure sums share."""

from __future__ import annotations

import numpy as np
from deploy_cases import QUICK, Faulty, federation
from scipy.stats import chi2

from scaffpd.deploy.messages import decode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.secure.masking import Identity

OBJECTIVE = '[objective]\nkind = "ChiSquare"\nrho = 0.1\n'
SCAFF_PD = {
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 5\n\n[objective]',
    "1e-6": "1e-3",
}
SECURE = QUICK + "\n[secure]\n"
REQUIRED = "\n[secure]\nrequired = true\n"


def secured(folder, silos=4, more="", rules="", drop=False, **how):
    """A federation with [secure]; `rules` are added to every silo's own file.

    With `drop` it goes on without silos that leave, and every silo agrees to that.
    """
    secure = SECURE.replace("[faults]", '[faults]\nmissing = "drop"') if drop else SECURE
    rules += "\n[secure]\nchanging = true\n" if drop else ""
    path, places = federation(
        folder, silos, replacing=how.pop("replacing", SCAFF_PD), more=secure + more, **how
    )
    for place in places.values():
        place.write_text(place.read_text() + rules)
    if REQUIRED in rules:
        pinned(places)
    return path, places


def pinned(places):
    """Every silo pins everybody's key."""
    prints = {
        name: Identity.kept(name, place.parent / "identity.key").card.fingerprint
        for name, place in places.items()
    }
    for place in places.values():
        table = "".join(f'{name} = "{key}"\n' for name, key in prints.items())
        place.write_text(f"{place.read_text()}\n[secure.pins]\n{table}")


def uncertified(kind, drawn="", rounds=6):
    """Changes to federation.toml for a method without a certificate."""
    return {
        OBJECTIVE: f'[algorithm]\nkind = "{kind}"\n{drawn}',
        "rounds = 500\ntol = 1e-6": f"rounds = {rounds}",
    }


ALLOWED = {
    "hello": {},
    "describe": {},
    "card": {},
    "meet": {},
    "setup": {"constants"},
    "start": {"x"},
    "masked": {"masked"},
    "sizes": {"scalars"},
    "gradients": {"scalars"},
    "losses": {"scalars"},
    "evaluate": {"scalars"},
}


def uniform(data):
    """The p-value of Pearson's test that these bytes are uniform."""
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    expected = len(data) / 256
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 255))


def leaks(log):
    """Everything in the answers of silos that secure sums do not let out, in words."""
    found = []
    masked = {}
    for site, question, answer in log:
        asked = decode(question, 2**31).kind
        told = decode(answer, 2**31)
        if told.kind != "answer":
            found += [f"{asked} has arrays in a {told.kind}"] * bool(told.arrays)
            continue
        if not set(told.arrays) <= set(ALLOWED.get(asked, ())):
            found.append(f"{asked} has {set(told.arrays)}")
        for name, array in told.arrays.items():
            if array.dtype.kind == "f" and array.size > 4 and (asked, name) != ("start", "x"):
                found.append(f"{asked} has {array.size} numbers {name!r}")
            if name == "masked":
                masked.setdefault(site, []).append(array.tobytes())
    found += [  # the same question again has the same answer
        f"{site}'s masked vectors are not uniform"
        for site, data in masked.items()
        if uniform(b"".join({*data})) < 1e-9
    ]
    if not masked:
        found.append("nothing was masked")
    return found


class EveryTime(Faulty):
    """A new process of the silo for every question: it is handed what the last one kept, as Flower's engine does."""

    def __init__(self, places, script=None):
        super().__init__(places, script)
        self.kept = {}

    def ask(self, questions, timeout):
        for site in questions:
            self.silos[site] = Silo.open(self.places[site])
            if site in self.kept:
                self.silos[site].restore(self.kept[site])
        replies = super().ask(questions, timeout)
        self.kept |= {site: self.silos[site].kept() for site in questions}
        return replies
