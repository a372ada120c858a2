"""The reader of run folders: `train`, `path`, `demo`, `compare` and deployed runs, today's and those of version 0.1.

The page, the summary on the terminal and `--json` all start from `read`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scaffpd.errors import InputError
from scaffpd.numbers import between
from scaffpd.run import Row, megabytes, new_name, number, read_json, read_table, read_text, whole
from scaffpd.run.page import data
from scaffpd.run.page.data import (
    ModelSummary,
    Overall,
    PrivacyStatement,
    ReportData,
    Round,
    Score,
    overall,
)
from scaffpd.run.page.predictions import read_predictions
from scaffpd.training.metrics import RelativeGain

FORMAT = 1
# the file that tells which kind it is
TRAINED = "summary.json"
COMPARED = "table.csv"
DEPLOYED = "settings.json"
MARKS = (TRAINED, COMPARED, DEPLOYED)
PLAIN = (
    "FedAvg",
    "SCAFFOLD",
    "FedProx",
)  # what a fair method is compared with: the first that took part
SAME_ROWS = "Every dot is a mean over {seeds} seeds."
OTHER_ROWS = (
    "Clients are other groups of rows under every seed, so this chart and the table of clients are seed {seed} alone; "
    "the verdict and the trade-off are means over {seeds} seeds."
)
CLIPS = {
    "clip": "gradient C",
    "loss_clip": "loss B",
    "radius": "length of a row R",
    "smoothness": "smoothness L",
}
NOISE = {"noise": "of gradients z", "loss_noise": "of losses z_L"}
GAME = ("alone", "together", "gets", "brings", "shapley", "errors")  # of every client in the game
WORDS = ("role", "objective", "algorithm", "status", "message")
Pairs = tuple[tuple[str, str], ...]


def read(folder: Path) -> ReportData:
    """Read the folder of a run, or refuse it with one sentence."""
    if not folder.exists():
        raise InputError("folder-read", f"There is no folder {str(folder)!r}.")
    if not folder.is_dir():
        raise InputError(
            "file-report-folder",
            f"{str(folder)!r} is a file; report needs the folder of a run: {str(folder.parent)!r}?",
        )
    for mark, reader in {TRAINED: _trained, COMPARED: _compared, DEPLOYED: _deployed}.items():
        if (folder / mark).is_file():
            return reader(folder)
    below = runs_below(folder)
    hint = (
        f": did you mean {str(below[0])!r}?"
        if below
        else (
            f": it has neither {TRAINED} (train, path, demo), nor {COMPARED} (compare), nor {DEPLOYED} (deploy)."
        )
    )
    raise InputError("folder-run", f"{str(folder)!r} is not the folder of a run{hint}")


def is_run(folder: Path) -> bool:
    """Return whether the folder has a file that a run, a comparison or a deployed run writes."""
    return any((folder / mark).is_file() for mark in MARKS)


def runs_below(folder: Path) -> list[Path]:
    """Return the runs in a folder, in the order in which they were written."""
    found = {
        file.parent: file.stat().st_mtime for mark in MARKS for file in folder.glob(f"*/{mark}")
    }
    return sorted(found, key=lambda place: (found[place], place))


def _trained(folder: Path) -> ReportData:
    """Read a run of `train`, `path` or `demo`."""
    summary = read_json(folder / TRAINED)
    if (form := summary.get("format")) != FORMAT:
        raise InputError(
            "run-format-version",
            f"The run in {str(folder)!r} has format {form!r}; this version reads {FORMAT}.",
        )
    for name, kind, what in (
        *((name, list, f"list of {name}") for name in ("models", "remarks", "verdict", "labels")),
        *((name, dict, f"table of its {name}") for name in ("path", "answers")),
    ):
        if not isinstance(summary.get(name) or kind(), kind):
            raise InputError(
                "run-made-again",
                f"{str(folder / TRAINED)!r} has no {what}; the run has to be made again.",
            )
    models = tuple(_model(folder, entry) for entry in summary.get("models") or [])
    if not models:
        raise InputError(
            "run-models-yet", f"The run in {str(folder)!r} has no models yet: was it interrupted?"
        )
    measure = str(summary.get("measure", "accuracy"))
    split = str(summary.get("split", "test"))
    score = f"{split}_{measure}"
    rows = read_table(folder / "clients.csv", "model", "client")
    names = [model.name for model in models]
    if strange := [row["model"] for row in rows if row["model"] not in names]:
        path = str(folder / "clients.csv")
        raise InputError(
            "model-name", f"{path!r} has a model {strange[0]!r} that {TRAINED} does not name."
        )
    scores = _scores(rows, score, names)
    privacy = _privacy(summary.get("privacy"))
    joining = _joining(folder, summary.get("joining"))
    rounds = _joined(read_table(folder / "rounds.csv", "model", "round", split=split), score)
    return ReportData(
        kind=str(summary.get("kind", "train")),
        title=str(summary.get("title") or folder.resolve().name),
        command=str(summary.get("command", "")),
        measure=measure,
        split=split,
        word=" ".join(str(summary.get("clients_word") or "client").split()) or "client",
        models=_with_values(models, rounds),
        scores=_with_tests(models, scores, joining),
        overall=_totals(scores, measure),
        rounds=rounds,
        partition=_counts(folder / "partition.csv", ("train_rows", "test_rows"), "client", "label"),
        settings=_trained_settings(summary) + (() if privacy is None else privacy.settings),
        files=tuple(
            (name, text)
            for name in ("config.toml", "environment.json")
            if (text := read_text(folder / name))
        ),
        remarks=tuple(map(str, summary.get("remarks") or [])),
        verdict=tuple(map(str, summary.get("verdict") or [])),
        answers={str(name): str(said) for name, said in (summary.get("answers") or {}).items()},
        path=summary.get("path"),
        privacy=privacy,
        joining=joining,
        strengths=_strengths(folder / "kappa_path.csv"),
        coalition=_coalition(folder / "coalition.csv", summary.get("coalition") or {}),
        predictions=read_predictions(folder, [str(label) for label in summary.get("labels") or []]),
        written=summary | {"clients": rows},
    )


def _joining(folder: Path, found: Any) -> data.JoiningReport | None:
    """Read joining.csv and what the summary says of it; `None` of older folders, which have neither."""
    rows: dict[str, dict[str, Row]] = {}
    for row in read_table(folder / "joining.csv", "client", "model", "test_loss"):
        rows.setdefault(row["client"], {})[row["model"]] = row
    if not rows or not isinstance(found, dict):
        return None
    models = tuple(next(iter(rows.values())))
    if (
        any(tuple(own) != models for own in rows.values())
        or found.get("recommendation") not in models
    ):
        raise InputError(
            "lacks-models-some",
            f"{str(folder / 'joining.csv')!r} lacks models of some clients; the run has to be made again.",
        )
    said = ("recommendation", "sentence", "details", "interval")
    words: dict[str, Any] = {name: str(found.get(name) or "") for name in said}
    overall = [
        {new_name(name): value for name, value in one.items()} for one in found.get("models") or []
    ]
    ends = {str(one["model"]): one.get("gain_over_alone_mean", [None]) for one in overall}
    gains = {model: RelativeGain(*three) for model, three in ends.items() if None not in three}
    return data.JoiningReport(
        **words, models=models, rows=rows, overall=gains, splits=whole(found, "splits") or 1
    )


def _strengths(path: Path) -> tuple[data.StrengthPoint, ...]:
    """Read kappa_path.csv: a row for every κ that was tried, and κ = 0 for everybody alone."""
    mean = "validation_loss_mean"
    worst = "validation_loss_worst_20"
    return tuple(
        data.StrengthPoint(
            float(row["kappa"]),
            float(row[mean]),
            float(row[worst]),
            number(row, f"{mean}_se") or 0.0,
            number(row, f"{worst}_se") or 0.0,
            bool(row.get("chosen")),
            bool(row.get("personal")),
        )
        for row in read_table(path, "kappa", mean, worst)
    )


def _coalition(path: Path, said: Any) -> data.CoalitionReport | None:
    """Read coalition.csv, by how much every client's loss rises when another leaves, and the summary's words on it."""
    rows = read_table(path, "client", "leaving", "rise")
    if not rows or not isinstance(said, dict) or not isinstance(said.get("clients"), list):
        return None
    cells = {
        str(row["client"]): {name: number(row, name) or 0.0 for name in GAME}
        for row in said["clients"]
    }
    effects: dict[str, dict[str, float]] = {name: {} for name in cells}
    for row in rows:
        effects.setdefault(row["client"], {})[row["leaving"]] = number(row, "rise") or 0.0
    return data.CoalitionReport(
        cells, effects, str(said.get("sentence") or ""), str(said.get("peace") or "")
    )


def _with_values(
    models: Sequence[ModelSummary], rounds: Sequence[Round]
) -> tuple[ModelSummary, ...]:
    """Give every model Σ λ_i f_i of its last round: the objective is at most that, because ψ ≥ 0 (not for Nash)."""
    last = {r.model: r for r in rounds if r.losses and r.weights}
    value = {
        name: sum(w * r.losses.get(c, 0.0) for c, w in r.weights.items())
        for name, r in last.items()
    }
    return tuple(
        m if m.objective.startswith("Nash") else replace(m, value=value.get(m.name)) for m in models
    )


def _with_tests(
    models: Sequence[ModelSummary],
    scores: dict[str, tuple[Score, ...]],
    joining: data.JoiningReport | None,
) -> dict[str, tuple[Score, ...]]:
    """Mark the fair model's changes that are clear of noise by the intervals of joining.csv, where nothing else has."""
    fair = "fair"
    roles = {m.role: m.name for m in models}
    if (
        roles.get("after") != fair
        or roles.get("before") != "average"
        or joining is None
        or joining.splits > 1
    ):
        return scores
    if fair not in joining.models or any(score.clear is not None for score in scores.get(fair, ())):
        return scores
    ends = {
        client: [number(own[fair], f"gain_over_average_{end}") for end in ("low", "high")]
        for client, own in joining.rows.items()
    }
    clear = {client: (low or 0.0) > 0 or (high or 0.0) < 0 for client, (low, high) in ends.items()}
    return scores | {
        fair: tuple(replace(s, clear=clear.get(s.client)) for s in scores.get(fair, ()))
    }


def _model(folder: Path, entry: Any) -> ModelSummary:
    if not isinstance(entry, dict) or "name" not in entry:
        raise InputError("model-name", f"A model in {str(folder / TRAINED)!r} has no name.")
    numbers: dict[str, Any] = {
        key: number(entry, key)
        for key in ("certificate", "rounds", "exchanges", "seconds", "strength")
    }
    words: dict[str, Any] = {key: str(entry.get(key) or "") for key in WORDS}
    return ModelSummary(str(entry["name"]), **words, **numbers, megabytes=megabytes(entry))


def _trained_settings(summary: Mapping[str, Any]) -> Pairs:
    labels = [str(label) for label in summary.get("labels") or []]
    shown = ", ".join(labels[:12]) + (f" and {len(labels) - 12} more" if len(labels) > 12 else "")
    version = summary.get("version")
    return _pairs(
        ("Data", summary.get("data")),
        ("Model", summary.get("model")),
        ("Task", summary.get("task")),
        ("Labels", shown),
        ("Made", summary.get("made")),
        ("Version", version and f"scaffpd {version}"),
    )


def _compared(folder: Path) -> ReportData:
    """Read a comparison: many methods, several seeds."""
    lines = read_table(folder / COMPARED, "model", "seeds", "failures")
    if not lines:
        raise InputError("comparison-methods", f"The comparison in {str(folder)!r} has no methods.")
    measure = _measure(lines, "test_accuracy_mean_mean")
    about = read_json(folder / "about.json")
    setting: dict[str, Any] = about.get("setting") or {}
    totals = {
        line["model"]: found
        for line in lines
        if (found := _mean_over_seeds(line, measure)) is not None
    }
    models = _with_roles(
        [_method(line, setting.get("methods") or {}) for line in lines], totals, measure
    )
    rows = read_table(folder / "clients.csv", "model", "seed", "client")
    seeds = sorted({row["seed"] for row in rows})
    sizes: dict[str, set[Any]] = {}
    for row in rows:
        sizes.setdefault(row["client"], set()).add(row.get("train_rows"))
    same = all(len(found) == 1 for found in sizes.values())
    chosen = [row for row in rows if same or row["seed"] == seeds[0]]
    scores = _scores(chosen, f"test_{measure}", [model.name for model in models])
    worst = (
        _totals(scores, measure) if same and len(seeds) > 1 else {}
    )  # a client is the same under every seed
    note = (
        (SAME_ROWS if same else OTHER_ROWS).format(seeds=len(seeds), seed=seeds[0])
        if len(seeds) > 1
        else ""
    )
    title = str(setting.get("problem") or folder.resolve().name)
    tuned = setting.get("tune")
    tuning = (
        "none: automatic rates"
        if tuned == 1
        else f"{tuned} configurations a method, chosen on validation rows"
    )
    versions = ", ".join(f"{name} {value}" for name, value in (about.get("versions") or {}).items())
    return ReportData(
        kind="compare",
        title=title if len(models) == 1 else f"{title}: {len(models)} methods",
        command=read_text(folder / "command.txt").strip(),
        measure=measure,
        split="test",
        word="client",
        models=models,
        scores=scores,
        overall={
            n: replace(t, worst_client=worst[n].worst_client) if n in worst else t
            for n, t in totals.items()
        },
        settings=_pairs(
            ("Problem", setting.get("problem")),
            ("Model", setting.get("model")),
            ("Rounds", setting.get("rounds")),
            ("Seeds", ", ".join(map(str, setting.get("seeds") or []))),
            ("Tuning", tuning if tuned else ""),
            ("Versions", versions),
        ),
        note=note,
    )


def _mean_over_seeds(line: Row, measure: str) -> Overall | None:
    mean, fifth, worst = (
        number(line, f"test_{measure}_{name}_mean") for name in ("mean", "worst_20", "worst")
    )
    if mean is None or fifth is None or worst is None:
        return None
    deviations = (number(line, f"test_{measure}_{name}_sd") for name in ("mean", "worst_20"))
    return Overall(mean, fifth, worst, "", *deviations)


def _method(line: Row, algorithms: Mapping[str, Any]) -> ModelSummary:
    costs: dict[str, Any] = {
        name: number(line, f"{name}_mean") for name in ("rounds", "exchanges", "seconds")
    }
    status = f"{line['seeds']} seeds" if line["seeds"] != 1 else "1 seed"
    costs["megabytes"], name = megabytes(line, "_mean"), line["model"]
    return ModelSummary(
        name,
        algorithm=str(algorithms.get(name, "")),
        status=status,
        **costs,
        failure=line["failures"],
    )


def _with_roles(
    models: list[ModelSummary], totals: Mapping[str, Overall], measure: str
) -> tuple[ModelSummary, ...]:
    """Call a plain method "before", and the one that serves the worst-served best "after"."""
    sign = 1 if measure == "accuracy" else -1
    fit = [model.name for model in models if not model.failure and model.name in totals]
    ranked = sorted(fit, key=lambda name: -sign * totals[name].worst_20)
    best = max(ranked, key=lambda name: sign * totals[name].mean, default=None)
    before = next((name for name in PLAIN if name in ranked), best)
    after = next((name for name in ranked if name != before), None)
    given = {before: "before", after: "after"}
    return tuple(replace(model, role=given.get(model.name, "")) for model in models)


def _deployed(folder: Path) -> ReportData:
    """Read a run across organisations, finished or not: one model, silos that come and go."""
    settings = read_json(folder / DEPLOYED)
    outcome = read_json(folder / "outcome.json")
    about: dict[str, Any] = settings.get("about") or {}
    rows = read_table(folder / "clients.csv", "client")
    split = "test" if any(number(row, "test_loss") is not None for row in rows) else "train"
    measure = _measure(rows, f"{split}_accuracy") if rows else "accuracy"
    name = "deployed"
    scores = _scores([{**row, "model": name} for row in rows], f"{split}_{measure}", [name])
    live = [] if outcome else _live_rows(folder / "progress.jsonl")
    rounds = _joined(live or read_table(folder / "rounds.csv", "round"), f"{split}_{measure}", name)
    sentence = str(outcome.get("sentence") or _so_far(rounds))
    silos = about.get("list of silos") or []
    shape = ", ".join(f"{key} = {value}" for key, value in (about.get("model") or {}).items())
    method = about.get("algorithm or objective")
    masked = about.get("way of masking")
    place = folder.resolve()  # named after the federation around a folder that is merely called run
    title = place.parent.name if place.name == "run" and place.parent.name else place.name
    return ReportData(
        kind="deploy",
        title=f"{title}: {len(silos or rows)} silos",
        command="scaffpd deploy resume federation.toml" if not outcome.get("final") else "",
        measure=measure,
        split=split,
        word="silo",
        models=_with_values(
            [_deployed_model(name, str(method or ""), outcome, rounds, sentence)], rounds
        ),
        scores=scores,
        overall=_totals(scores, measure),
        rounds=rounds,
        events=_counts(folder / "events.csv", ("round",), "client", "what", "sentence"),
        settings=_pairs(
            ("Silos", ", ".join(silos)),
            ("Model", shape),
            ("Method", method),
            ("Rounds at most", settings.get("rounds")),
            ("Tolerance", settings.get("tol")),
            ("Seed", about.get("seed")),
            ("Vectors", "masked: the coordinator saw sums over silos" if masked else None),
        ),
        files=((DEPLOYED, json.dumps(settings, indent=2, ensure_ascii=False)),) if settings else (),
        privacy=_spent(outcome.get("privacy"), rows),
        joining=_joining(folder, read_json(folder / "joining.json") or None),
        remarks=(sentence[:1].upper() + sentence[1:],),
    )


def _live_rows(path: Path) -> list[Row]:
    """Read the rounds of a run that goes on, as rounds.csv will have them; of one that was made twice, the later."""
    found: dict[int, Row] = {}
    for text in read_text(path).split("\n")[:-1]:  # the last line may be half of one
        line = json.loads(text)
        if "round" in line:
            parts = {"loss": line["losses"], "weight": line["weights"]}
            cells = {
                f"{what}[{m}]": v
                for what in parts
                for m, v in zip(line["members"], parts[what], strict=True)
            }
            found[line["round"]] = line | cells | {"absent": len(line["absent"])}
    return [found[number] for number in sorted(found)]


def _so_far(rounds: Sequence[Round]) -> str:
    last = rounds[-1] if rounds else None
    if last is None:
        return "The run has made no round yet."
    gap = (
        "nothing is certified yet"
        if last.certificate is None
        else f"the certified gap is {last.certificate:.1e}"
    )
    return f"The run has no outcome yet: round {last.number} is done, {gap}."


def _deployed_model(
    name: str, algorithm: str, outcome: Mapping[str, Any], rounds: Sequence[Round], sentence: str
) -> ModelSummary:
    objective = re.search(r"objective=(\w+\([^()]*\))", algorithm)
    last = rounds[-1] if rounds else None
    return ModelSummary(
        name,
        objective=objective.group(1) if objective else "",
        algorithm=algorithm,
        status=str(outcome.get("status") or "running"),
        message=sentence,
        certificate=number(outcome, "certificate"),
        rounds=number(outcome, "rounds") if outcome else float(last.number) if last else None,
        exchanges=last.exchanges if last else None,
        megabytes=last.megabytes if last else None,
    )


def _pairs(*found: tuple[str, Any]) -> Pairs:
    """Return settings to show, without those that are missing."""
    return tuple((name, str(value)) for name, value in found if value not in (None, ""))


def _counts(path: Path, counts: Sequence[str], *texts: str) -> list[Row]:
    """Read a table with columns of whole numbers; an empty cell is 0."""
    return [
        row | {name: whole(row, name) or 0 for name in counts}
        for row in read_table(path, *counts, *texts)
    ]


def _scores(rows: Iterable[Row], column: str, names: Sequence[str]) -> dict[str, tuple[Score, ...]]:
    """Return scores by model; several rows of a client (one per seed) become their mean and standard deviation."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row["model"], {}).setdefault(row["client"], []).append(row)
    return {
        name: tuple(_score(client, found, column) for client, found in groups[name].items())
        for name in names
        if name in groups
    }


def _score(client: str, rows: Sequence[Row], column: str) -> Score:
    values, weights = (
        [v for row in rows if (v := number(row, name)) is not None] for name in (column, "weight")
    )
    first = rows[0]
    return Score(
        client,
        value=fmean(values) if values else None,
        train_rows=whole(first, "train_rows"),
        test_rows=whole(first, "test_rows"),
        weight=fmean(weights) if weights else None,
        deviation=stdev(values) if len(values) > 1 else number(first, f"{column}_sd"),
        clear=first.get("change_clear"),
    )


def _totals(scores: Mapping[str, Sequence[Score]], measure: str) -> dict[str, Overall]:
    found = {name: overall(rows, measure == "accuracy") for name, rows in scores.items()}
    return {name: one for name, one in found.items() if one is not None}


def _measure(rows: Sequence[Row], accuracies: str) -> str:
    """Return "accuracy" where any row has one, in the column of that name; else "loss"."""
    return "accuracy" if any(number(row, accuracies) is not None for row in rows) else "loss"


def _joined(rows: Iterable[Row], score: str, model: str | None = None) -> tuple[Round, ...]:
    """Return the rounds in rows of rounds.csv; `model` names that of rows without one, and its segments are joined.

    A segment of a deployed run counts its traffic from zero and repeats the point where the last one ended.
    """
    found: list[Round] = []
    segment = 0
    spent = (0.0, 0.0)
    for row in rows:
        if found and row.get("segment", segment) != segment:
            segment = row["segment"]
            spent = (found[-1].exchanges or 0.0, found[-1].megabytes or 0.0)
            if found[-1].number == row["round"]:
                found.pop()
        exchanges = number(row, "exchanges")
        sent = megabytes(row)
        one = Round(
            model=model or row["model"],
            number=whole(row, "round") or 0,
            certificate=number(row, "certificate"),
            exchanges=None if exchanges is None else exchanges + spent[0],
            megabytes=None if sent is None else sent + spent[1],
            absent=whole(row, "absent") or 0,
            mean=number(row, f"{score}_mean"),
            worst_20=number(row, f"{score}_worst_20"),
            losses=_of_clients(row, "loss["),
            weights=_of_clients(row, "weight["),
        )
        found.append(one)
    return tuple(found)


def _of_clients(row: Row, start: str) -> dict[str, float]:
    """Return the columns loss[NAME] or weight[NAME] by client, without empty cells."""
    found = {
        name[len(start) : -1]: number(row, name)
        for name in row
        if name.startswith(start) and name[-1] == "]"
    }
    return {name: value for name, value in found.items() if value is not None}


def _privacy(found: Any) -> PrivacyStatement | None:
    """Read "privacy" of a summary."""
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("clients") or {}, dict):
        raise InputError(
            "summary-table-privacy",
            "The summary has no table of its privacy; the run has to be made again.",
        )
    epsilon = number(found, "epsilon")
    delta = number(found, "delta")
    if epsilon is None or delta is None:
        raise InputError(
            "summary-privacy-without",
            "The summary has a privacy without ε and δ; the run has to be made again.",
        )
    clients = {str(name): float(value) for name, value in (found.get("clients") or {}).items()}
    clips = [
        f"{name} = {found[key]:g}" for key, name in CLIPS.items() if found.get(key) is not None
    ]
    noise = [
        f"{name} = {between(found[key])}"
        for key, name in NOISE.items()
        if found.get(key) is not None
    ]
    settings = _pairs(
        ("Privacy: clips", ", ".join(clips)), ("Privacy: noise multipliers", ", ".join(noise))
    )
    models = len(found.get("models") or [1])
    return PrivacyStatement(epsilon, delta, clients, models, bool(found.get("seeded")), settings)


def _spent(stated: Any, rows: Iterable[Row]) -> PrivacyStatement | None:
    """Read what a deployed run has cost, by its silos' own statements."""
    epsilon, delta = (
        number(stated, name) if isinstance(stated, dict) else None for name in ("epsilon", "delta")
    )
    if epsilon is None or delta is None:
        return None
    clients = {row["client"]: own for row in rows if (own := number(row, "epsilon")) is not None}
    return PrivacyStatement(epsilon, delta, clients, scored=False)
