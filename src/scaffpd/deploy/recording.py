"""The `RunRecord` of a deployed run, for page and terminal: the coordinator's, and every silo's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

import scaffpd.training.history as disk
from scaffpd.algorithms import MinimaxSums
from scaffpd.deploy.deployed_run import DeployedRun, Outcome
from scaffpd.deploy.flare.serving import expiry_warning
from scaffpd.deploy.judging import named
from scaffpd.deploy.program import Finished
from scaffpd.fields import Json
from scaffpd.numbers import capital
from scaffpd.objectives.base import LARGEST
from scaffpd.pipeline.judging import agreed_units, lines_of
from scaffpd.report.record import ClientScore, ModelRecord, Overall, PrivacyRecord, RunRecord
from scaffpd.report.recording import effect_parts, judged_parts, round_records
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.terms import FederationTerms
from scaffpd.tasks.base import LOSS
from scaffpd.training.history import History


def outcome_of(terms: FederationTerms, done: Finished) -> Outcome:
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
    return common(
        file,
        outcome,
        done,
        history,
        command="" if outcome.final else f"scaffpd deploy run {file.path.name}",
        remarks=[capital(outcome.sentence), *filter(None, [expiry_warning(file.path)])],
        events=folder.entries()[1],
        config=file.path.read_text(encoding="utf-8"),
    )


def silo_record(terms: FederationTerms, done: Finished) -> RunRecord:
    own = done.record.own
    more = {} if own is None else judged_parts(own)
    about = {} if own is None else {"Data": own.rows.about}
    history = done.model.result.history
    return common(terms, outcome_of(terms, done), done, history, about, **more)


def common(
    terms: FederationTerms,
    outcome: Outcome,
    done: Finished | None,
    history: History | None,
    about: Mapping[str, str] = MappingProxyType({}),
    **more: object,
) -> RunRecord:
    """Return the record of what everybody has, and more."""
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
    made = {
        "kind": "deploy",
        "title": f"{terms.name}: {len(terms.silos)} silos",
        "task": terms.task,
        "measure": measure,
        "split": "test" if tested else "train",
        "labels": list(map(str, terms.labels or ())),
        "word": "silo",
        "clients": list(terms.silos),
        "models": [model],
        "remarks": [capital(outcome.sentence)],
        "privacy": privacy,
        "settings": {
            "Model": ", ".join(f"{key} = {value}" for key, value in terms.linear().items()),
            "Method": repr(method),
            "Rounds at most": str(terms.rounds),
            "Tolerance": str(terms.tol),
            "Vectors": "masked: everybody saw sums over silos",
            **about,
        },
    }
    if done is not None and done.effects is not None:
        steps = agreed_units(lines_of(done.record.encoding)[0])
        made |= effect_parts(done.effects, terms.task, steps)
    return RunRecord.now(**made | more)


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
