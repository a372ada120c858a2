r"""The decisive tables of a data set: which pieces there are, and how they are carried out side by
side.

    python -m experiments.images decisive cifar100 --device cuda --workers 16 --seconds 470

A call that is stopped, by `--seconds` or otherwise, is continued by the same command; `--tables`
only writes the page and the figures again. `--backbone`, `--kind`, `--loss`, `--alpha` and
`--balanced` pick single pieces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from experiments.images import findings
from experiments.images.divisions import LOSSES, Piece
from experiments.images.features import KINDS
from experiments.images.features import place as device_of
from experiments.images.networks import BACKBONES
from experiments.images.pieces import LANES, carry_out
from experiments.images.plans import PLANS, Plan, plan
from experiments.images.rows import MOST, TUNED
from experiments.images.study import Ground, Place, ground
from experiments.tables import check_small
from scaffpd.errors import unknown
from scaffpd.models.execution import pooled

COMMAND = "python -m experiments.images decisive"
# of the eNTK: as many rows as clients have samples
SEEDS = 10
COORDINATES = 4000
FEW = (
    "FedAvg, by clients",
    "FedAvg, by samples",
    "SCAFFOLD, by clients",
    "Scaff-PD, average",
    "Scaff-PD, Auto",
)
SOFTMAX = (*FEW[:3], "Scaff-PD, Auto")
SMALL = (*FEW[:2], "Scaff-PD, average", "Scaff-PD, Auto", TUNED)


def of(dataset: str, small: bool = False, backbone: str | None = None) -> list[Piece]:
    """The pieces: both networks, the paper's smallest and largest α, whole; eNTK, other losses and
    sizes in part.

    A small study is one piece, of the narrower network unless another one is asked for.
    """
    base = replace(
        plan(dataset, small), seeds=SEEDS, tune=MOST, stored="float32", kind="penultimate"
    )
    if small:
        base = replace(base, seeds=3, stops=(5, 10, 20), tune=6, backbone=backbone or BACKBONES[1])
        return [Piece(base, base.alphas[-1], choosing=2, rows=SMALL, l2s=(1e-4, 1e-2))]
    lite, resnet = (replace(base, backbone=name) for name in BACKBONES)
    # the same where there is one only
    first = base.alphas[0]
    last = base.alphas[-1]
    return [
        *(Piece(net, alpha) for net in (resnet, lite) for alpha in dict.fromkeys((first, last))),
        Piece(resnet, first, "softmax", rows=SOFTMAX, extras=False),
        Piece(replace(lite, balanced=True), first, rows=FEW, extras=False),
        Piece(lite, first, "tct", rows=FEW, extras=False),
        Piece(replace(base, kind="entk", coordinates=COORDINATES), first, rows=FEW),
    ]


def chosen(pieces: Sequence[Piece], **wanted: str | float | bool | None) -> list[Piece]:
    """Those pieces that have what a command line asks for."""
    for name, known in (("backbone", BACKBONES), ("kind", KINDS), ("loss", LOSSES)):
        if wanted.get(name) not in (None, *known):
            raise unknown(name, str(wanted[name]), known)

    def fits(piece: Piece) -> bool:
        has = {
            "backbone": piece.plan.backbone,
            "kind": piece.plan.kind,
            "loss": piece.loss,
            "alpha": piece.alpha,
        }
        has["balanced"] = piece.plan.balanced
        return all(value is None or has[name] == value for name, value in wanted.items())

    return [piece for piece in pieces if fits(piece)]


def decide(
    pieces: Sequence[Piece], place: Place, out: Path, workers: int = 1, seconds: float | None = None
) -> bool:
    """Carry out what is left of all pieces in so many processes and seconds; whether all is."""
    deadline = time.time() + (seconds or float("inf"))
    sources = dict[Plan, Ground]()
    for source in dict.fromkeys(replace(piece.plan, balanced=False) for piece in pieces):
        sources[source] = ground(source, place)
        print(
            f"features of {source.backbone}, {source.kind}: {sources[source].seconds:.0f} s",
            flush=True,
        )
    torch.cuda.empty_cache()  # the workers need it
    jobs = [
        (piece, replace(sources[replace(piece.plan, balanced=False)], plan=piece.plan), lanes)
        for piece in pieces
        for lanes in ([LANES] if workers == 1 else [[lane] for lane in LANES])
    ]
    work = partial(carry_out, device=place.device, out=out, deadline=deadline)
    return all([*pooled(work, jobs, workers)])


def main(words: Sequence[str] | None = None) -> int:
    """Carry out what a command line asks for, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", choices=PLANS, nargs="?", default="cifar100")
    parser.add_argument("--data", type=Path, help="folder of images and weights; else SCAFFPD_DATA")
    parser.add_argument(
        "--out", type=Path, help="folder for results; else runs/images/decisive/DATASET"
    )
    parser.add_argument("--cache", type=Path, default=Path("features"), help="folder for features")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1, help="processes, up to five for a piece")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument(
        "--small", action="store_true", help="one piece of few images: minutes on two cores"
    )
    parser.add_argument(
        "--tables", action="store_true", help="only write the page and the figures again"
    )
    parser.add_argument("--backbone", choices=BACKBONES)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--loss", choices=LOSSES)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--balanced", action=argparse.BooleanOptionalAction)
    given = parser.parse_args(words)
    wanted = {
        name: getattr(given, name) for name in ("backbone", "kind", "loss", "alpha", "balanced")
    }
    pieces = chosen(of(given.dataset, given.small, given.backbone), **wanted)
    if not pieces:
        parser.error("no piece of this study has all of that: leave out an option")
    out = given.out or Path("runs") / "images" / "decisive" / given.dataset
    if given.small:
        check_small(out)
    complete = True
    if not given.tables:
        place = Place(given.data, given.cache, str(device_of(given.device)), False)
        complete = decide(pieces, place, out, given.workers, given.seconds)
    command = " ".join(
        [COMMAND, given.dataset, *(["--small"] if given.small else [])]
    )  # the page has all pieces
    for path in findings.write(out, given.dataset, command):
        print(path)
    print("" if complete else "Time was up: the same command goes on.", end="\n" * (not complete))
    return 0


if __name__ == "__main__":
    sys.exit(main())
