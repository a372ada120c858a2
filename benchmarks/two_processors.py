"""Do silos on two processors finish a run together?

    python benchmarks/two_processors.py --other "COMMAND"

COMMAND is a Python with scaffpd on another processor. In DEPLOY.md it was an emulated one, `env
PYTHONPATH=src:SITE qemu-aarch64-static -cpu neoverse-n1 -L ROOT ROOT/usr/bin/python3.11`, with
Debian's packages for aarch64 under ROOT and wheels for aarch64 under SITE. Kernels for older
processors round differently, too: `env ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Prescott
MKL_CBWR=COMPATIBLE python`.

Of the four hospitals two are silos here and two there, behind pipes to one interpreter on each; the
coordinator is here. Every silo compares its own numbers with those that the first one proposes, and
adopts these. *Proposed* counts them; *adopted* counts those of which some bit was another, at the
second, third and fourth silo and at the coordinator; *difference* is the largest, as a share of the
largest number beside it, and above *allowed* the silo would refuse. *Same* says whether transcripts
and models are the same to the bit at all silos and the coordinator; *from one* is the largest
difference of the model from that of a run on the processor here alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.local import agree_for_all, write_hospitals
from scaffpd.deploy.messages import InProcess
from scaffpd.deploy.silo import Silo
from scaffpd.deploy.transcript import Session
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import read_model

sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.tables import markdown_table, versions

TWO_PROCESSORS = "\n## Two processors\n"  # the head of the section in DEPLOY.md
KINDS = {
    "Fair": {},
    "ScaffPD": {"[objective]": '[algorithm]\nkind = "ScaffPD"\n[objective]'},
    "personal, by evidence": {"l2 = 0.03": 'kappa = "auto"'},
    "with curves and pairs": {
        "l2 = 0.03": 'kappa = "auto"',
        "[columns]": 'curves = "on"\n[columns]',
    },
}
TITLES = [
    "method",
    "silos in their order",
    "outcome",
    "rounds",
    "gap",
    "proposed",
    "adopted",
    "difference",
    "allowed",
    "same",
    "from one",
]


@dataclass
class Compared:
    """What a silo found in comparing its numbers with the first silo's."""

    numbers: int = 0
    others: int = 0
    largest: float = 0.0
    where: str = ""

    def note(self, kind: str, own: np.ndarray, theirs: np.ndarray) -> None:
        """Compare two arrays."""
        self.numbers += own.size
        differ = own != theirs
        size = float(np.abs(own[np.isfinite(own)]).max(initial=0))
        if differ.any():
            self.others += int(differ.sum())
            share = float(np.abs(own - theirs)[differ].max()) / size if size else np.inf
            if share > self.largest:
                self.largest = share
                self.where = kind


FOUND: dict[str, Compared] = {}
AGREED = Session.propose


def compared(
    session: Session, kind: str, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Any:
    """Take the next proposal, as sessions do, and compare it first."""
    if not session.proposes:
        asked = session.upcoming()
        found = FOUND.setdefault(session.name, Compared())
        pairs = [(own, asked.arrays.get(name)) for name, own in arrays.items()]
        pairs += [(np.array([a]), np.array([b])) for a, b in floats(values, asked.values)]
        for own, theirs in pairs:
            if theirs is not None and own.shape == theirs.shape:
                found.note(kind, own, theirs)
    return AGREED(session, kind, values, arrays)


def floats(own: object, theirs: object) -> Iterator[tuple[float, float]]:
    """Yield the numbers that stand at the same place of two JSON values."""
    if isinstance(own, float) and isinstance(theirs, float):
        yield own, theirs
    elif isinstance(own, Mapping) and isinstance(theirs, Mapping):
        for name in own.keys() & theirs.keys():
            yield from floats(own[name], theirs[name])
    elif isinstance(own, list | tuple) and isinstance(theirs, list | tuple):
        for a, b in zip(own, theirs, strict=False):
            yield from floats(a, b)


def serve() -> None:
    """Answer for silos, by the path of silo.toml; an empty question asks what was compared."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed is not an answer
    silos: dict[str, Silo] = {}
    while head := sys.stdin.buffer.readline():
        place, size = json.loads(head)
        question = sys.stdin.buffer.read(size)
        if size and place not in silos:
            silos[place] = Silo.open(Path(place))
        if size:
            reply = silos[place].answer(question)
        else:
            about = {name: vars(found) for name, found in FOUND.items()}
            known = {"machine": platform.machine(), "versions": versions()}
            reply = json.dumps(known | {"found": about}).encode()
            FOUND.clear()
            silos.clear()
        out.write(len(reply).to_bytes(8, "big") + reply)
        out.flush()


class Interpreter:
    """Another Python that answers for silos."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            [*command, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, place: Path | None, question: bytes) -> bytes:
        """Send a question and wait for the reply."""
        into, out = self.process.stdin, self.process.stdout
        assert into is not None
        assert out is not None
        into.write(json.dumps([str(place), len(question)]).encode() + b"\n" + question)
        into.flush()
        return out.read(int.from_bytes(out.read(8), "big"))

    def compared(self) -> dict[str, Any]:
        """Return the machine, and what its silos have compared."""
        about: dict[str, Any] = json.loads(self.ask(None, b""))
        return about

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Elsewhere:
    """A silo behind a pipe."""

    there: Interpreter
    place: Path
    answered: int = field(default=0, init=False)

    def answer(self, question: bytes) -> bytes:
        """Return its reply."""
        self.answered += 1
        return self.there.ask(self.place, question)


def written(folder: Path, kind: str) -> tuple[Path, dict[str, Path]]:
    """Write the hospitals with a method, to which all agree."""
    path, places = write_hospitals(folder)
    text = path.read_text()
    for old, new in KINDS[kind].items():
        text = text.replace(old, new, 1)
    path.write_text(text)
    for number, place in enumerate(places.values()):  # the same rows are held out every time
        for key in ("identity.key", "split.key"):
            (place.parent / key).write_text(f"{number:064x}\n")
            (place.parent / key).chmod(0o600)
    agree_for_all(FederationFile.read(path), places)
    return path, places


def together(kind: str, by: list[Interpreter]) -> list[str]:
    """Make a run in which the silos are at these interpreters, in turns; return its row."""
    start = time.perf_counter()
    FOUND.clear()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        path, places = written(Path(one), kind)
        silos = {n: Elsewhere(by[i % len(by)], p) for i, (n, p) in enumerate(places.items())}
        outcome = coordinate(path, InProcess(silos))
        about = [there.compared() for there in by]
        seen = {n: Compared(**own) for one in about for n, own in one["found"].items()}
        found = [seen[name] for name in [*places][1:]] + [FOUND[""]]
        assert all(silo.answered for silo in silos.values())
        file = FederationFile.read(path)
        row = [
            kind,
            ", ".join(about[i % len(by)]["machine"] for i in range(len(places))),
            str(outcome.status) if outcome.final else f"{outcome.status}: {outcome.sentence}",
            str(outcome.rounds),
            "" if outcome.certificate is None else f"{outcome.certificate:.1e}",
            f"{max(own.numbers for own in found):,}",
            ", ".join(f"{own.others:,}" for own in found),
            f"{max(own.largest for own in found):.1e}",
            f"{file.method.tolerance:g}",
        ]
        worst = max(found, key=lambda own: own.largest)
        if outcome.final:
            homes = [file.folder, *(next((p.parent / "runs").iterdir()) for p in places.values())]
            files = ("model.safetensors", "states.json")
            same = [len({(home / name).read_bytes() for home in homes}) == 1 for name in files]
            x = read_model(file.folder / files[0])[0]
            models = [read_model(home / files[0])[0] for home in homes]
            apart = max(float(np.abs(own - x).max()) for own in models)
            path, places = written(Path(two), kind)
            coordinate(path, InProcess({n: Silo.open(p) for n, p in places.items()}))
            alone = read_model(FederationFile.read(path).folder / files[0])[0]
            row += [
                "yes" if all(same) else f"{same}, {apart:.1e}",
                f"{np.abs(x - alone).max():.1e}",
            ]
        else:
            row += ["", ""]
    print(row, worst.where, f"{time.perf_counter() - start:.0f} s", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", default=sys.executable, help="the command of another Python")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS][:3])
    parser.add_argument("--serve", action="store_true", help="be that one")
    parser.add_argument("--out", type=Path, help="the page to write the table into")
    given = parser.parse_args()
    Session.propose = compared  # type: ignore[method-assign, assignment]
    if given.serve:
        serve()
        return
    with ExitStack() as stack:
        here = stack.enter_context(Interpreter([sys.executable]))
        there = stack.enter_context(Interpreter(shlex.split(given.other)))
        rows = [together(k, by) for k in given.kinds for by in ([here, there], [there, here])]
        about = [one.compared() for one in (here, there)]
    paragraphs = __doc__.split("\n\n")
    named = [
        f"{one['machine']} (" + ", ".join(map(" ".join, one["versions"].items())) + ")"
        for one in about
    ]
    text = (
        f"{TWO_PROCESSORS}\n`python benchmarks/two_processors.py --other COMMAND`: here on {named[0]}, "
        f"the other Python on {named[1]}.\n\n"
        + "\n".join(markdown_table(TITLES, rows, 3))
        + f"\n\n{paragraphs[2]}\n\n{paragraphs[3].strip()}\n"
    )
    if given.out is None:
        print(text)
    else:
        before = given.out.read_text(encoding="utf-8").partition(TWO_PROCESSORS)[0]
        given.out.write_text(before + text, encoding="utf-8")


if __name__ == "__main__":
    main()
