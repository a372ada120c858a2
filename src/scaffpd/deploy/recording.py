"""The `RunRecord` of a deployed run, for page and terminal: the coordinator's, and every silo's."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

import scaffpd
import scaffpd.training.history as disk
from scaffpd.algorithms import MinimaxSums
from scaffpd.deploy.deployed_run import DeployedRun, Outcome
from scaffpd.deploy.flare.serving import expiry_warning
from scaffpd.deploy.judging import named
from scaffpd.deploy.messages import Json
from scaffpd.deploy.program import Finished
from scaffpd.numbers import capital
from scaffpd.objectives.base import LARGEST
from scaffpd.report.record import ClientScore, ModelRecord, Overall, PrivacyRecord, RunRecord
from scaffpd.report.recording import round_records
from scaffpd.settings.federation import FederationFile, FederationTerms
from scaffpd.study.gains import Joining
from scaffpd.tasks.base import LOSS
from scaffpd.training.history import History


def outcome_of(terms: FederationTerms, done: Finished) -> Outcome:
    """Say how a run has ended."""
    result = done.model.result
    proven = float(result.certificate) if np.isfinite(result.certificate) else None
    sentence = str(result)
    if proven is not None:
        sentence += " The certified gap holds if all silos keep to the protocol."
    if terms.privacy is not None:
        pair = f"({max(done.spent.values()):.2f}, {terms.privacy.delta:g})"
        sentence += f" Every record is protected with (ε, δ) = {pair}, as the silos count."
    return Outcome(str(result.status), sentence, result.rounds, proven)


def record_of(
    file: FederationFile, folder: DeployedRun, outcome: Outcome, done: Finished | None = None
) -> RunRecord:
    """Return the coordinator's record of a run that has ended, or of one that pauses, which has no
    scores.
    """
    history = None
    if done is not None:
        history = done.model.result.history
    elif folder.checkpoint.exists():
        arrays, about = disk.read(folder.checkpoint)
        history = History.unpack(about["names"], arrays)
    made = common(file, outcome, done, history)
    remarks = [*made.remarks, *filter(None, [expiry_warning(file.path)])]
    return made.model_copy(
        update={
            "command": "" if outcome.final else f"scaffpd deploy run {file.path.name}",
            "remarks": remarks,
            "events": folder.entries()[1],
            "config": file.path.read_text(encoding="utf-8"),
        }
    )


def silo_record(terms: FederationTerms, done: Finished) -> RunRecord:
    """Return a silo's record: what all have, and what it has measured on its own rows."""
    made = common(terms, outcome_of(terms, done), done, done.model.result.history)
    own = done.record.own
    if own is None:
        return made
    brings = own.joining
    return made.model_copy(
        update={
            **{name: list(part) for name, part in vars(own.scores).items()},
            "joining": brings.verdict if isinstance(brings, Joining) else None,
            "cautions": [brings] if isinstance(brings, str) and brings else [],
            "settings": made.settings | {"Data": own.rows.about},
        }
    )


def common(
    terms: FederationTerms, outcome: Outcome, done: Finished | None, history: History | None
) -> RunRecord:
    """Return the record of what everybody has."""
    scores = {} if done is None else done.model.scores
    rated = any(np.isfinite(part.score).any() for part in scores.values())
    measure = terms.task.measure if rated else LOSS
    tested = "test" in scores
    privacy = None
    if done is not None and terms.privacy is not None:
        privacy = PrivacyRecord(
            epsilon=max(done.spent.values()),
            delta=terms.privacy.delta,
            clients=done.spent,
            scored=False,
        )
    clients = [] if done is None else _clients(terms, done, rated)
    values = {one.client: one.test_score if tested else one.train_score for one in clients}
    rounds = [] if history is None else round_records(history)
    last = rounds[-1].model_dump() if rounds else {}
    method = terms.method
    objective = getattr(method, "objective", None)
    model = ModelRecord(
        name=named(terms),
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
        title=f"{terms.name}: {len(terms.silos)} silos",
        command="",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=scaffpd.__version__,
        task=terms.task,
        measure=measure,
        split="test" if tested else "train",
        labels=list(map(str, terms.labels or ())),
        word="silo",
        clients=list(terms.silos),
        models=[model],
        remarks=[capital(outcome.sentence)],
        privacy=privacy,
        settings={
            "Model": ", ".join(f"{key} = {value}" for key, value in terms.linear().items()),
            "Method": repr(method),
            "Rounds at most": str(terms.rounds),
            "Tolerance": str(terms.tol),
            "Vectors": "masked: everybody saw sums over silos",
        },
    )


def _clients(terms: FederationTerms, done: Finished, rated: bool) -> list[ClientScore]:
    """Return every silo's scores; under privacy its last noisy loss, and the ε spent."""
    result = done.model.result
    scores = done.model.scores
    weights = result.weights
    method = terms.method
    if isinstance(method, MinimaxSums) and terms.model.kappa is None and "train" in scores:
        shown = scores["train"].loss
        sane = bool(np.all(np.abs(shown) < LARGEST))  # what one silo says fails no run
        weights = method.objective.maximizer(shown) if sane else weights  # of the last losses
    found = []
    for i, name in enumerate(terms.silos):
        own: Json = {"weight": float(weights[i]), "epsilon": done.spent.get(name)}
        for split, part in scores.items():
            if terms.rows is not None and split == "train":
                own["train_rows"] = terms.rows[name]
            own[f"{split}_loss"] = float(part.loss[i])
            own[f"{split}_score"] = float(part.score[i] if rated else part.loss[i])
        if not scores:
            own["train_loss"] = own["train_score"] = float(result.history[f"loss[{name}]"][-1])
        found.append(ClientScore(client=name, **own))
    return found
