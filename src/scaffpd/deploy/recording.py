"""The `RunRecord` of a deployed run: what its folder and its silos say, for page and terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import numpy as np

import scaffpd
from scaffpd.algorithms import MinimaxSums
from scaffpd.deploy.deployed_run import DeployedRun, Outcome
from scaffpd.deploy.flare.serving import expiry_warning
from scaffpd.deploy.messages import Json
from scaffpd.federation import ClientScores
from scaffpd.run.record import (
    ClientScore,
    ModelRecord,
    Overall,
    PrivacyRecord,
    RunRecord,
)
from scaffpd.run.recording import round_records
from scaffpd.run.settings.federation import FederationFile
from scaffpd.training.loop import Result

MODEL = "deployed"  # the model's name


def record_of(
    file: FederationFile,
    folder: DeployedRun,
    outcome: Outcome,
    result: Result | None = None,
    scores: Mapping[str, ClientScores] | None = None,
    spent: Mapping[str, Mapping[str, float]] | None = None,
) -> RunRecord:
    """Return the record of a run that has ended, or of one that pauses, which has no scores."""
    history = folder.history() if result is None else result.history
    known = scores or {}
    split: Literal["train", "test"] = "test" if "test" in known else "train"
    measure: Literal["accuracy", "loss"] = "loss"
    if split in known and np.isfinite(known[split].accuracy).any():
        measure = "accuracy"
    clients = _clients(file, known, measure, result, spent or {})
    values = {one.client: one.test_score if split == "test" else one.train_score for one in clients}
    last = [] if history is None else round_records(history)
    setup = folder.setup()
    method = file.method
    objective = getattr(method, "objective", None)
    model = ModelRecord(
        name=MODEL,
        role="after",
        objective="" if objective is None else repr(objective),
        algorithm=type(method).__name__,
        status=outcome.status,
        message=outcome.sentence,
        certificate=outcome.certificate,
        rounds=outcome.rounds,
        exchanges=last[-1].exchanges if last else None,
        bytes_up=last[-1].bytes_up if last else None,
        bytes_down=last[-1].bytes_down if last else None,
        seconds=last[-1].seconds if last else None,
        overall=Overall.of(values, measure == "accuracy"),
        clients=clients,
        history=last,
    )
    return RunRecord(
        kind="deploy",
        title=f"{file.name}: {len(file.silos)} silos",
        command="" if outcome.final else f"scaffpd deploy run {file.path.name}",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=scaffpd.__version__,
        task="" if setup is None else str(setup.schema.get("task", "")),
        measure=measure,
        split=split,
        labels=[] if setup is None else list(map(str, setup.schema.get("labels") or ())),
        word="silo",
        clients=list(file.silos),
        models=[model],
        remarks=[
            outcome.sentence[:1].upper() + outcome.sentence[1:],
            *filter(None, [expiry_warning(file.path)]),
        ],
        privacy=None
        if outcome.privacy is None
        else PrivacyRecord(
            epsilon=outcome.privacy["epsilon"],
            delta=outcome.privacy["delta"],
            clients={name: own["epsilon"] for name, own in (spent or {}).items()},
            scored=False,
        ),
        events=folder.entries()[1],
        settings={
            "Silos": ", ".join(file.silos),
            "Model": ", ".join(f"{key} = {value}" for key, value in file.linear().items()),
            "Method": repr(method),
            "Rounds at most": str(file.rounds),
            "Tolerance": str(file.tol),
            "Seed": str(file.training.seed),
            "Vectors": "masked: everybody saw sums over silos",
        },
        config=file.path.read_text(encoding="utf-8"),
    )


def _clients(
    file: FederationFile,
    scores: Mapping[str, ClientScores],
    measure: str,
    result: Result | None,
    spent: Mapping[str, Mapping[str, float]],
) -> list[ClientScore]:
    """Return every silo's scores; under privacy its last noisy loss, and the ε spent."""
    if result is None:
        return []
    found = []
    weights = result.weights
    method = file.method
    if isinstance(method, MinimaxSums) and file.model.kappa is None and "train" in scores:
        weights = method.objective.maximizer(scores["train"].loss)  # of the last losses, as shown
    for i, name in enumerate(file.silos):
        own: Json = {}
        for split, part in scores.items():
            own[f"{split}_rows"] = int(part.counts[i])
            own[f"{split}_loss"] = float(part.loss[i])
            own[f"{split}_score"] = float(
                part.accuracy[i] if measure == "accuracy" else part.loss[i]
            )
        if not scores:
            own["train_loss"] = own["train_score"] = float(result.history[f"loss[{name}]"][-1])
        epsilon = spent.get(name, {}).get("epsilon")
        weight = float(weights[i])
        found.append(ClientScore(client=name, weight=weight, epsilon=epsilon, **own))
    return found
