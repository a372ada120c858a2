"""Comparisons of methods: on the clients of a run, and as a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import numpy as np

import scaffpd
from scaffpd.data import Silos
from scaffpd.errors import InputError
from scaffpd.machine import environment
from scaffpd.numbers import several
from scaffpd.run.prepare import prepare
from scaffpd.run.record import ClientScore, ModelRecord, Overall, RunRecord
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.settings.tables import AUTO

if TYPE_CHECKING:
    from scaffpd.study.comparison import Comparison, MethodRun, MethodSummary, Problem

# what a fair method is compared with: the first that took part
PLAIN = ("FedAvg", "SCAFFOLD", "FedProx")
SAME_ROWS = "Scores of single clients are means over {seeds} seeds."
OTHER_ROWS = (
    "Clients are other groups of rows under every seed, so scores of single clients are those of "
    "seed {seed}; the totals are means over {seeds} seeds."
)


def problem_of(config: RunConfig, seeds: Sequence[int]) -> Problem:
    """Return what methods are compared on: a run's clients, with other held-out rows by seed."""
    from scaffpd.study.comparison import Problem  # which training does without

    if config.privacy is not None:
        raise InputError("compare-with-noise", "compare takes models without differential privacy.")
    if config.table is not None and config.table.curves == AUTO:  # methods of first order crawl
        lines = config.table.model_copy(update={"curves": "off"})
        config = config.model_copy(update={"data": lines})
    first = prepare(config)
    if not first.test:
        raise InputError(
            "compare-without-test",
            "compare scores methods on held-out rows: leave --test out, or give a share above 0.",
        )
    silos = {}
    for seed in seeds:
        own = first if seed == config.training.seed else prepare(config, seed)
        silos[seed] = Silos(own.names, own.train, own.test, own.columns)
    name = f"{config.name}, {several(len(first.names), 'client')}"
    model = first.cohort(config).model  # strengths by evidence, the same for all methods
    assert model is not None
    return Problem(lambda seed: silos[seed], model, name, config.training.device)


def comparison_record(found: Comparison, command: str) -> RunRecord:
    """Make the record of a comparison: a model per method, means over seeds."""
    measure: Literal["accuracy", "loss"] = "accuracy" if found.classification else "loss"
    runs = [run for run in found.finals if run.scores]
    sizes = {tuple(run.scores["train"].counts.tolist()) for run in runs}
    same = len(sizes) < 2  # a client is the same under every seed
    shown = [run for run in runs if same or run.seed == found.seeds[0]]
    clients = list(dict.fromkeys(name for run in shown for name in run.scores["test"].names))
    remarks = []
    if len(found.seeds) > 1:
        note = SAME_ROWS if same else OTHER_ROWS
        remarks.append(note.format(seeds=len(found.seeds), seed=found.seeds[0]))
    tuned = f"{found.tune} configurations a method, chosen on validation rows"
    settings = {
        "Problem": found.problem,
        "Model": found.model,
        "Rounds": str(found.rounds),
        "Seeds": ", ".join(map(str, found.seeds)),
        "Tuning": "none: automatic rates" if found.tune == 1 else tuned,
    }
    roles = _roles(found, measure)
    count = len(found.methods)
    return RunRecord(
        kind="compare",
        title=found.problem if count == 1 else f"{found.problem}: {count} methods",
        command=command,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=scaffpd.__version__,
        measure=measure,
        split="test",
        clients=clients,
        models=[_method(found, line, measure, shown, roles) for line in found.table],
        remarks=remarks,
        settings=settings,
        environment=environment(),
    )


def _roles(found: Comparison, measure: str) -> dict[str, str]:
    """Call a plain method "before", and the one that serves the worst-served best "after"."""
    names = [line.method for line in found.table if not line.failures]
    before = next((name for name in PLAIN if name in names), names[-1] if names else "")
    after = next((name for name in names if name != before), "")
    return {before: "before", after: "after"}


def _method(
    found: Comparison,
    line: MethodSummary,
    measure: str,
    runs: Sequence[MethodRun],
    roles: Mapping[str, str],
) -> ModelRecord:
    """Describe a method over all seeds, and its clients over those of `runs`."""
    clients = _clients([run for run in runs if run.method == line.method], measure)
    worst = Overall.of({one.client: one.test_score for one in clients}, measure == "accuracy")
    overall = None
    start = f"test_{measure}_"
    if worst is not None:
        overall = Overall(
            mean=line.mean[f"{start}mean"],
            worst_20=line.mean[f"{start}worst_20"],
            worst=line.mean[f"{start}worst"],
            worst_client=worst.worst_client,
            mean_sd=line.deviation[f"{start}mean"],
            worst_20_sd=line.deviation[f"{start}worst_20"],
        )
    costs = ("rounds", "exchanges", "bytes_up", "bytes_down", "seconds")
    return ModelRecord.model_validate(
        {
            "name": line.method,
            "role": roles.get(line.method, ""),
            "algorithm": repr(found.methods[line.method]),
            "status": several(line.seeds, "seed"),
            "failure": line.failures,
            "overall": overall,
            "clients": clients,
            **{name: line.mean.get(name) for name in costs},
        }
    )


def _clients(runs: Sequence[MethodRun], measure: str) -> list[ClientScore]:
    """Take the mean over seeds of every client's scores."""
    if not runs:
        return []
    train = runs[0].scores["train"]
    test = runs[0].scores["test"]
    scores = np.array([getattr(run.scores["test"], measure) for run in runs])
    spread = scores.std(0, ddof=1) if len(runs) > 1 else np.full(len(test.names), np.nan)
    weights = np.mean([run.weights for run in runs], axis=0)
    losses = np.mean([run.scores["test"].loss for run in runs], axis=0)
    return [
        ClientScore(
            client=name,
            weight=float(weights[i]),
            train_rows=int(train.counts[i]),
            test_rows=int(test.counts[i]),
            test_loss=float(losses[i]),
            test_score=float(scores[:, i].mean()),
            deviation=float(spread[i]),
        )
        for i, name in enumerate(test.names)
    ]
