r"""Carry out one piece of the decisive tables: one data set, network, kind of features, α and loss;
all rows.

Ten partitions, as the paper cuts them. What a row chooses (l2, rates, strengths, rounds) is chosen
on a quarter of every client's training images, by the mean of the worst fifth over the first three
partitions; then it is trained on all training images of all ten, and scored on test images. Clients
alone choose their own l2. A piece is a folder:

    runs.csv      every row on every partition: accuracies, certificate, what was chosen
    tuning.csv    every point that was tried
    fit.csv       Scaff-PD by l2, rounds and ρ, and the optimum (rounds 0)
    held.csv      exact fair models whose λ answers training or held-out losses, by l2 and ρ

Files grow row by row, and the same command goes on where the last one stopped. Rows that do not
wait for one another are lanes: several processes may work on one piece.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.images import rows as table
from experiments.images.divisions import (
    FIT_RHO,
    RUNS,
    Division,
    OutOfTimeError,
    Piece,
    Work,
    line,
    rank,
    shown,
    worst,
)
from experiments.images.exact import exact_row, exact_rows
from experiments.images.rows import Axis, Row, Values, climbed
from experiments.images.spectral import (
    Quadratics,
    dual_value,
    equilibrium,
    fine_tuned,
    saddle,
    with_weights,
)
from experiments.images.study import Ground, hardware
from scaffpd.algorithms import ScaffPD
from scaffpd.federation import Federation
from scaffpd.objectives import Average, ChiSquare
from scaffpd.training.loop import RoundInfo, Status, train

HERE = Path(__file__).parent
# l2 up to which held.csv goes, and its ρ
WEAK = 1e-3
ASIDE_RHO = (0.1, 0.5)
FIT = (
    "objective",
    "l2",
    "partition",
    "rounds",
    "average",
    "worst_20",
    "train_accuracy",
    "correlation",
    "largest",
)
HELD = (
    "weigh_by",
    "l2",
    "rho",
    "partition",
    "average",
    "worst_20",
    "train_accuracy",
    "correlation",
    "largest",
    "gap",
)


def followed(
    row: Row, values: Values, clients: Federation, stops: Sequence[int], seed: int
) -> tuple[Any, Any]:
    """Return x and λ at every stop (none once it has diverged), and the result of the run."""
    seen: dict[int, tuple[Tensor, Any]] = {}

    def look(moment: RoundInfo) -> None:
        if moment.rounds in stops:
            seen[moment.rounds] = moment.state.x, moment.state

    with np.errstate(all="ignore"):
        result = train(
            row.make(values, clients),
            clients,
            rounds=max(stops),
            seed=seed,
            progress=False,
            callbacks=[look],
        ).uninterrupted()
    if result.status is Status.DIVERGED:
        seen = {r: v for r, v in seen.items() if r < result.rounds}
    elif result.rounds < max(stops):  # no step is taken any more
        last = torch.as_tensor(result.x, device=clients.start().device, dtype=clients.start().dtype)
        seen |= {r: (last, None) for r in stops if r > result.rounds}
    return seen, result


def chosen_values(work: Work) -> dict[str, Values]:
    """What the rows that are written have chosen."""
    found: dict[str, Values] = {}
    for name, words in work.there("runs.csv", "row", "chosen"):
        pairs = [word.split("=") for word in words.split() if "=" in word]
        found[name] = {key: float(value) for key, value in pairs}
    return found


def tuned(work: Work, row: Row) -> table.Found:
    """Choose a row's values and rounds on validation images, from where rows like it ended."""
    stops = work.piece.plan.stops
    row = row.starting(chosen_values(work))

    def score(values: Values) -> tuple[float, Any]:
        work.check()
        found = np.full((len(work.choosing), len(stops)), -1.0)
        for i, division in enumerate(work.choosing):
            seen, _ = followed(
                row, values, division.clients("fit", values["l2"]), stops, division.seed
            )
            for k, stop in enumerate(stops):
                if stop in seen:
                    found[i, k] = worst(division.accuracy(seen[stop][0], "held")[0])
        mean = found.mean(0)
        return float(mean.max()), stops[int(mean.argmax())]

    return climbed(row.axes, score, work.piece.plan.tune)


def with_rounds(work: Work, row: Row) -> table.Found:
    """Tune a row, train it on every partition, write its lines."""
    found = tuned(work, row)
    rounds = found.extra
    chosen = shown(found.values) + ("".join(f" open:{name}" for name in found.open))
    lines = []
    for division in work.divisions:
        begin = time.perf_counter()
        clients = division.clients("all", found.values["l2"])
        seen, result = followed(row, found.values, clients, (rounds,), division.seed)
        x = seen[rounds][0] if rounds in seen else clients.start()
        accuracy, fitted = division.accuracy(x, "test", "all")
        losses = clients.evaluate(x, score=False).loss
        seconds = time.perf_counter() - begin
        gap = proven(row.make(found.values, clients), division, found.values["l2"], losses, result)
        lines.append(
            line(row.name, division, accuracy, fitted, losses, gap, rounds, seconds, chosen)
        )
    best = (found.values, rounds)
    work.append(
        "tuning.csv",
        ("row", "values", "rounds", "worst_20", "chosen"),
        [(row.name, shown(v), r, f"{100 * s:.4f}", int((v, r) == best)) for v, s, r in found.tried],
    )
    work.append("runs.csv", RUNS, lines)
    return found


def proven(method: Any, division: Division, l2: float, losses: Any, result: Any) -> float:
    """Bound how far x is from the optimum: by the dual value of the run's own λ, exactly, where
    losses are squared.
    """
    if (
        not isinstance(method, ScaffPD)
        or division.loss == "softmax"
        or result.status is Status.DIVERGED
    ):
        return float(result.certificate)
    q = Quadratics.shared(division.spectra("all"), l2)
    return method.objective.support(losses) - dual_value(q, method.objective, result.weights)


def fit_lines(work: Work) -> None:
    """Scaff-PD by l2, ρ and rounds, and the optimum, for fit.csv."""
    plan = work.piece.plan
    done = work.there("fit.csv", "objective", "l2")
    objectives = {"average": Average()} | {f"{rho:g}": ChiSquare(rho) for rho in FIT_RHO}
    for l2 in work.piece.l2s:
        for label, objective in objectives.items():
            if (label, f"{l2:g}") in done:
                continue
            row = Row(label, {}, lambda v, f, o=objective: ScaffPD(o, local_steps=plan.local_steps))
            lines = []
            for division in work.divisions:
                work.check()
                clients = division.clients("all", l2)
                seen, _ = followed(row, {}, clients, plan.stops, division.seed)
                if work.piece.loss != "softmax":
                    best = saddle(Quadratics.shared(division.spectra("all"), l2), objective)
                    seen[0] = best.X.flatten(), best
                for rounds, (x, state) in seen.items():
                    accuracy, fitted = division.accuracy(x, "test", "all")
                    losses = clients.evaluate(x, score=False).loss
                    largest = float(state.weights.max()) if state is not None else float("nan")
                    lines.append(
                        (
                            label,
                            f"{l2:g}",
                            division.seed,
                            rounds,
                            *(
                                f"{100 * t:.4f}"
                                for t in (accuracy.mean(), worst(accuracy), fitted.mean())
                            ),
                            f"{rank(losses, accuracy):.4f}",
                            f"{largest:.4f}",
                        )
                    )
            work.append("fit.csv", FIT, lines)


def held_lines(work: Work) -> None:
    """Exact fair models whose λ answers training or held-out losses, for held.csv."""
    done = work.there("held.csv", "l2", "rho")
    for l2 in (l2 for l2 in work.piece.l2s if l2 <= WEAK):
        for rho in ASIDE_RHO:
            if (f"{l2:g}", f"{rho:g}") in done:
                continue
            lines = []
            for division in work.divisions:
                work.check()
                fit, whole = (Quadratics.shared(division.spectra(p), l2) for p in ("fit", "all"))
                objective = ChiSquare(rho)
                for kind in ("average", "training", "held-out"):
                    if kind == "held-out":
                        found = with_weights(
                            equilibrium(fit, objective, division.held_losses), whole
                        )
                    else:
                        found = saddle(whole, objective if kind == "training" else Average())
                    accuracy, fitted = division.accuracy(found.X, "test", "all")
                    losses = whole.losses(found.X, whole.spectra.W @ found.X).cpu().numpy()
                    lines.append(
                        (
                            kind,
                            f"{l2:g}",
                            f"{rho:g}",
                            division.seed,
                            *(
                                f"{100 * t:.4f}"
                                for t in (accuracy.mean(), worst(accuracy), fitted.mean())
                            ),
                            f"{rank(losses, accuracy):.4f}",
                            f"{found.weights.max():.4f}",
                            f"{found.gap:.2e}",
                        )
                    )
            work.append("held.csv", HELD, lines)


FIRST = (
    "FedAvg, by clients",
    "FedAvg, by samples",
    "SCAFFOLD, by clients",
    "SCAFFOLD, by samples",
    "Scaff-PD, Auto",
)
LANES = ("exact", table.CLIENTS, table.SAMPLES, "Scaff-PD", "curves")


def lane(name: str) -> str:
    """Where a row with rounds belongs: beside the rows that its climb starts from."""
    return (
        "Scaff-PD"
        if name.startswith("Scaff-PD")
        else table.SAMPLES
        if name.endswith(table.SAMPLES)
        else LANES[1]
    )


def steps(work: Work, lanes: Sequence[str] = LANES) -> Iterator[Callable[[], Any]]:
    """What is left of some lanes of a piece, the most telling first."""
    piece = work.piece
    rows = table.rows(work.piece.plan.local_steps, work.piece.loss)
    order = (*FIRST, *(name for name in reversed(rows) if name not in FIRST))
    wanted = [
        name for name in order if (piece.rows is None or name in piece.rows) and lane(name) in lanes
    ]
    done = {name for (name,) in work.there("runs.csv", "row")}
    exact = piece.loss != "softmax"
    tuning = exact and (piece.rows is None or table.TUNED in piece.rows) and table.TUNED not in done

    def row(name: str) -> Callable[[], Any]:
        def make() -> None:
            found = tuned(work, rows[name]) if name in done else with_rounds(work, rows[name])
            if name == FIRST[0] and tuning:
                fine_tuning(work, rows[name], found)

        return make

    if exact and "exact" in lanes and not {*table.EXACT} - {table.TUNED} <= done:
        yield lambda: exact_rows(work)
    yield from (
        row(n) for n in wanted if n in FIRST and (n not in done or (n == FIRST[0] and tuning))
    )
    if piece.extras and "curves" in lanes:
        if len(work.there("fit.csv", "objective", "l2")) < len(piece.l2s) * (1 + len(FIT_RHO)):
            yield lambda: fit_lines(work)
        weak = [l2 for l2 in piece.l2s if l2 <= WEAK]
        if exact and len(work.there("held.csv", "l2", "rho")) < len(weak) * len(ASIDE_RHO):
            yield lambda: held_lines(work)
    yield from (row(name) for name in wanted if name not in FIRST and name not in done)


def fine_tuning(work: Work, row: Row, found: table.Found) -> None:
    """FedAvg as it was chosen, then gradient steps of every client's own; their number is chosen on
    validation.
    """
    starts: dict[tuple[int, str], Tensor] = {}

    def fit(division: Division, part: str, v: Values) -> tuple[Any, Any, float, bool]:
        l2 = found.values["l2"]
        rounds = found.extra
        key = (division.seed, part)
        if key not in starts:
            seen, _ = followed(
                row, found.values, division.clients(part, l2), (rounds,), division.seed
            )
            starts[key] = seen[rounds][0].view(division.F.shape[1], -1)
        U = fine_tuned(division.spectra(part), l2, starts[key], max(1, round(v["steps"])))
        return U, None, float("nan"), True

    exact_row(work, table.TUNED, {"steps": Axis(16.0, 2.0, 1.0, 2.0**20)}, fit)


def carry_out(
    job: tuple[Piece, Ground, Sequence[str]], device: str, out: Path, deadline: float = float("inf")
) -> bool:
    """Do what is left of some lanes of a piece; whether all of that is done now."""
    piece, here, lanes = job
    if not device.startswith("cuda"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1)))
    folder = out / piece.name
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    work = Work(piece, [], folder, deadline)
    if next(steps(work, lanes), None) is None:
        return True
    complete = False
    log = folder / "log.txt"
    try:
        work.check()
        work.divisions = divided(piece, here, device)
        for k, step in enumerate(steps(work, lanes)):
            work.check()
            step()
            with log.open("a", encoding="utf-8") as file:
                file.write(
                    f"{' and '.join(lanes)}, step {k}: {time.perf_counter() - begin:.1f} s\n"
                )
        complete = True
    except OutOfTimeError:
        pass
    except torch.OutOfMemoryError:
        print(
            f"{piece.name}, {' and '.join(lanes)}: out of GPU memory; take fewer --workers.",
            flush=True,
        )
    about(work, here, device, complete, time.perf_counter() - begin)
    work.divisions = []
    torch.cuda.empty_cache()
    return complete


def divided(piece: Piece, here: Ground, device: str) -> list[Division]:
    """All partitions, over one copy of the features."""
    rows = here.table.rows(np.arange(len(here.table.values)))
    F = torch.from_numpy(rows).to(device, torch.float64)
    labels = torch.from_numpy(np.concatenate([here.train, here.test]).astype(np.int64)).to(device)
    return [Division(here, F, labels, piece, seed) for seed in range(piece.plan.seeds)]


def commit() -> str:
    """The commit that runs: by git, or without a repository by SCAFFPD_COMMIT."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    )
    return os.environ.get("SCAFFPD_COMMIT") or done.stdout.strip() or "unknown"


def about(work: Work, here: Ground, device: str, complete: bool, seconds: float) -> None:
    """Write how the numbers came about; commits and seconds add up over the processes and calls
    that it took.
    """
    path = work.folder / "about.json"
    piece = work.piece
    with work.locked():
        before = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.exists()
            else {"seconds": 0.0, "commit": ""}
        )
        commits = [*filter(None, before["commit"].split(", ")), commit()]
        facts = {
            "piece": asdict(piece),
            "complete": complete and next(steps(work), None) is None,
            "seconds": round(before["seconds"] + seconds, 1),
            "hardware": hardware(device),
            "commit": ", ".join(dict.fromkeys(commits)),
            "images": here.source,
            "features": list(here.table.values.shape),
            "precision": "features in TF32 on a GPU, softmax in float32, all else in float64",
        }
        path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
