"""The `RunRecord` of a deployed run: what its folder and its silos say, for page and terminal."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

import scaffpd
import scaffpd.training.history as disk
from scaffpd.algorithms import MinimaxSums
from scaffpd.deploy.deployed_run import DeployedRun, Outcome
from scaffpd.deploy.flare.serving import expiry_warning
from scaffpd.deploy.messages import Json
from scaffpd.deploy.program import MODEL, Finished
from scaffpd.numbers import capital
from scaffpd.objectives.base import LARGEST
from scaffpd.report.record import ClientScore, ModelRecord, Overall, PrivacyRecord, RunRecord
from scaffpd.report.recording import round_records
from scaffpd.settings.federation import FederationFile
from scaffpd.tasks.base import LOSS
from scaffpd.training.history import History


def record_of(
    file: FederationFile, folder: DeployedRun, outcome: Outcome, done: Finished | None = None
) -> RunRecord:
    """Return the record of a run that has ended, or of one that pauses, which has no scores."""
    history = None
    if done is not None:
        history = done.model.result.history
    elif folder.checkpoint.exists():
        arrays, about = disk.read(folder.checkpoint)
        history = History.unpack(about["names"], arrays)
    scores = {} if done is None else done.model.scores
    rated = any(np.isfinite(part.score).any() for part in scores.values())
    measure = file.task.measure if rated else LOSS
    tested = "test" in scores
    privacy = None
    if done is not None and file.privacy is not None:
        privacy = PrivacyRecord(
            epsilon=max(done.spent.values()),
            delta=file.privacy.delta,
            clients=done.spent,
            scored=False,
        )
    clients = [] if done is None else _clients(file, done, rated)
    values = {one.client: one.test_score if tested else one.train_score for one in clients}
    rounds = [] if history is None else round_records(history)
    last = rounds[-1].model_dump() if rounds else {}
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
        overall=Overall.of(values, measure.upwards),
        clients=clients,
        history=rounds,
        **{name: last.get(name) for name in ("exchanges", "bytes_up", "bytes_down", "seconds")},
    )
    return RunRecord(
        kind="deploy",
        title=f"{file.name}: {len(file.silos)} silos",
        command="" if outcome.final else f"scaffpd deploy run {file.path.name}",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=scaffpd.__version__,
        task=file.task,
        measure=measure,
        split="test" if tested else "train",
        labels=list(map(str, file.labels or ())),
        word="silo",
        clients=list(file.silos),
        models=[model],
        remarks=[
            capital(outcome.sentence),
            *filter(None, [expiry_warning(file.path)]),
        ],
        privacy=privacy,
        events=folder.entries()[1],
        settings={
            "Model": ", ".join(f"{key} = {value}" for key, value in file.linear().items()),
            "Method": repr(method),
            "Rounds at most": str(file.rounds),
            "Tolerance": str(file.tol),
            "Vectors": "masked: everybody saw sums over silos",
        },
        config=file.path.read_text(encoding="utf-8"),
    )


def _clients(file: FederationFile, done: Finished, rated: bool) -> list[ClientScore]:
    """Return every silo's scores; under privacy its last noisy loss, and the ε spent."""
    result = done.model.result
    scores = done.model.scores
    weights = result.weights
    method = file.method
    if isinstance(method, MinimaxSums) and file.model.kappa is None and "train" in scores:
        shown = scores["train"].loss
        sane = bool(np.all(np.abs(shown) < LARGEST))  # what one silo says fails no run
        weights = method.objective.maximizer(shown) if sane else weights  # of the last losses
    found = []
    for i, name in enumerate(file.silos):
        own: Json = {"weight": float(weights[i]), "epsilon": done.spent.get(name)}
        for split, part in scores.items():
            if file.rows is not None and split == "train":
                own["train_rows"] = file.rows[name]
            own[f"{split}_loss"] = float(part.loss[i])
            own[f"{split}_score"] = float(part.score[i] if rated else part.loss[i])
        if not scores:
            own["train_loss"] = own["train_score"] = float(result.history[f"loss[{name}]"][-1])
        found.append(ClientScore(client=name, **own))
    return found
