"""Show a silo's operator what would leave, what has left, and what runs have asked for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.data.tabular.agree import CLASSIFICATION, PREPARED, REGRESSION
from scaffpd.data.tabular.columns import CATEGORY, DataColumn, telling_columns
from scaffpd.data.tabular.encode import named_categories
from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.deploy.silo.guard import request_name
from scaffpd.deploy.silo.records import decisions, line_link
from scaffpd.errors import InputError
from scaffpd.files import JsonLines
from scaffpd.numbers import format_bytes, several
from scaffpd.run.settings.silo import SiloFile
from scaffpd.training.trackers import prometheus

SHOWN = 30  # names in a list before it is cut off
NAMED = 5  # columns that a warning names; more are counted
RECENT = 60.0  # seconds after a question for which a silo counts as answering
LEFT = {  # the answers to questions, in words
    "hello": "its name and version",
    "describe": "names of columns, categories and labels",
    "totals": "sums over columns",
    "setup": "curvature of its loss, and one loss",
    "start": "where a model begins",
    "losses": "losses",
    "gradients": "losses and gradients",
    "local_updates": "local updates",
    "thresholds": "weights for thresholds",
    "response": "weighted gradients",
    "weighed_steps": "weighted updates",
    "proximal_steps": "local updates",
    "curvature": "curvatures along directions",
    "diagonal": "diagonals of Hessians",
    "project": "gradients along directions",
    "optima": "smallest losses",
    "evaluate": "loss and accuracy",
    "held_out_loss": "losses of folds",
    "joining_scores": "scores alone and together",
    "card": "its public key",
    "meet": "keys for masks",
    "masked": "masked vectors",
    "sizes": "lengths of vectors",
    "spent": "ε so far",
}


def site_overview(file: SiloFile, data: Dataset) -> dict[str, Any]:
    """Return all that `scaffpd silo check` shows, as JSON values; nothing of it is sent."""
    train, test = data.rows
    width = encoded_width(data)
    y = data.target.values
    return {
        "silo": file.name,
        "task": data.target.task,
        "rows": {"train": train, "test": test, "without_target": data.dropped},
        "features": {"columns": data.table.width, "encoded": width},
        "labels": _labels(data),
        "target": {"smallest": float(y.min()), "mean": float(y.mean()), "largest": float(y.max())}
        if data.target.task == REGRESSION
        else None,
        "columns": [
            {
                "name": column.name,
                "kind": column.kind,
                "missing": int(column.missing.sum()),
                "categories": len(column.categories),
                "withheld": _withheld(file, data, column),
            }
            for column in data.table.columns
        ],
        "missing": int(np.isnan(data.table.block).sum()) if data.table.block is not None else None,
        "bytes": {"read": data.table.nbytes, "encoded": 8 * (train + test) * width},
        "warnings": list(warnings(file, data, width)),
        "leaves": leaves(file, data, width),
        "stays": stays(file, data),
        "dishonest": [dishonest(file)],
    }


def encoded_width(data: Dataset) -> int:
    """Return the number of encoded columns of this silo's features; other silos may add categories."""
    if data.table.block is not None:
        return data.table.width
    if data.cohort is not None:
        return data.cohort.dimension
    described = data.describe()["columns"]
    return sum(len(c["categories"]) + c["other"] if c["kind"] == CATEGORY else 1 for c in described)


def _withheld(file: SiloFile, data: Dataset, column: DataColumn) -> int:
    """Return the number of categories of a column whose names do not leave."""
    if column.kind != CATEGORY:
        return 0
    return len(column.categories) - len(named_categories(column, ~data.held, file.limits.rarest))


def _labels(data: Dataset) -> list[dict[str, Any]]:
    labels = data.target.labels
    if data.target.task != CLASSIFICATION:
        return []
    train, test = (
        np.bincount(data.target.values[rows], minlength=len(labels))
        for rows in (~data.held, data.held)
    )
    return [
        {"label": label, "train": int(train[k]), "test": int(test[k])}
        for k, label in enumerate(labels)
    ]


# --- warnings


def warnings(file: SiloFile, data: Dataset, width: int) -> Iterator[str]:
    """Yield warnings for the operator; only too few rows keep the silo from taking part."""
    train = data.rows[0]
    limits = file.limits
    if train < limits.rows:
        yield f"There are {train} training rows, and limits.rows asks for {limits.rows}: this silo would not take part."
    if file.secure.required and not file.secure.trusted:
        yield (
            "secure.required needs somebody else than the coordinator to vouch for the others' keys: without "
            "secure.pins, or a secure.authority that is not the coordinator's, this silo would not take part."
        )
    if data.dropped:
        rows = (
            "1 row without a target is"
            if data.dropped == 1
            else f"{data.dropped} rows without a target are"
        )
        yield f"{rows} left out."
    if data.target.task == PREPARED:
        return
    if width > limits.dimension:
        yield f"The features make {width} columns, and limits.dimension allows {limits.dimension}."
    found = _labels(data)
    for entry in found:
        if entry["train"] == 0:
            yield f"The label {entry['label']!r} has no training row."
        elif entry["train"] + entry["test"] == 1:
            yield f"The label {entry['label']!r} has one row only."
    if len(found) == 1:
        yield f"All rows have the label {found[0]['label']!r}."
    yield from _about_columns(file, data)


def _about_columns(file: SiloFile, data: Dataset) -> Iterator[str]:
    train = ~data.held
    rarest = file.limits.rarest
    present = list(_present(data))
    if empty := [name for name, values in present if len(values) == 0]:
        yield f"No training row has a value in {_named(empty)}: the mean over all silos takes its place."
    if constant := [
        name for name, values in present if len(values) and values.min() == values.max()
    ]:
        yield f"All values are the same in {_named(constant)}."
    if data.target.note:
        yield f"The target {data.target.note}."
    yield from telling_columns(
        data.table.columns, data.target.values, data.target.task == CLASSIFICATION
    )
    for column in data.table.columns:
        if column.note:
            yield f"Column {column.name!r} {column.note}."
        hidden = _withheld(file, data, column)
        all_of_them = len(column.categories)
        if hidden and hidden == all_of_them and column.counts(train).any():
            yield (
                f"Column {column.name!r} has {hidden} categories, each in fewer than {rarest} training rows: it says "
                "nothing and is better left out (data.columns)."
            )
        elif hidden:
            yield (
                f"Column {column.name!r} has {hidden} of {all_of_them} categories in fewer than {rarest} training "
                "rows: their names do not leave, and they count as one, “other”."
            )


def _present(data: Dataset) -> Iterator[tuple[str, Any]]:
    """Yield every column's name and training values: numbers, or codes of categories."""
    train = ~data.held
    if data.table.block is not None:
        for j, values in enumerate(data.table.block[train].T):
            yield f"x{j}", values[~np.isnan(values)]
    for column in data.table.columns:
        yield column.name, column.values[train & ~column.missing]


def _named(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMED]))
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more columns"


# --- what leaves, and what never does


def leaves(file: SiloFile, data: Dataset, width: int) -> list[str]:
    """List everything that a coordinator may get, in order."""
    train, test = data.rows
    limits = file.limits
    secure = file.secure
    privacy = file.privacy
    outputs = " times the number of outputs" if len(data.target.labels) > 2 else ""
    d = (
        str(width)
        if data.target.task == PREPARED
        else f"at least {width}{outputs} with a linear model"
    )
    rounded = (
        f", a multiple of {secure.quantum:g} where vectors are masked" if secure.quantum > 0 else ""
    )
    lines = [
        f"The name {file.name!r}, and how many rows there are: {train} to train on, {test} held out."
    ]
    if data.target.task == PREPARED:
        lines.append(f"The number of parameters of the model, {width}.")
    else:
        lines += _agreement(file, data, width)
    if not privacy.required:
        lines.append(
            "Once per process of this silo: how curved the loss is, as three numbers: most, least, and at the steepest "
            "single row; and the loss at one arbitrary point, which tells whether the data are still the same when a "
            "run is resumed."
        )
    if secure.losses == "hidden":
        rounded = ", in sums over all silos alone"
    lines.append(
        f"Per question: the loss (one number{rounded}), and a gradient or a local update (each a vector of d numbers; "
        f"d is {d}). They are over all {train} training rows or a random part of them, never fewer than {limits.rows} "
        "rows."
    )
    if not privacy.required:
        lines.append(
            "For methods of second order: the diagonal of the Hessian (a vector of d numbers), and a few numbers on "
            "how the loss curves along directions that are asked for."
        )
    lines.append(_masked(file))
    if privacy.required:
        most = (
            "what the agreement says"
            if privacy.epsilon is None
            else f"ε = {privacy.epsilon:g}, all runs together"
        )
        columns = (
            "Sums over columns leave exactly."
            if privacy.columns
            else "Sums over columns are refused."
        )
        lines.append(
            f"Losses, gradients and local updates carry noise, and cost at most {most}. Curvatures, scores and the "
            f"loss at an arbitrary point do not leave. {columns}"
        )
    else:
        held = " and on the held-out rows" if test >= limits.rows else ""
        lines.append(f"Loss and accuracy, each one number, on the training rows{held}.")
        if limits.choosing and data.target.task != PREPARED:
            lines.append(
                "Where strengths are chosen by folds: the same answers without some of the training rows, and the loss "
                f"on those (one number a fold), never of fewer than {limits.rows} rows."
            )
        if limits.joining and test >= limits.rows:
            lines.append(
                "At the end of a run, where it asks: losses and errors of a model alone and of the run's models on the "
                "held-out rows, and their covariances over rows; no row's own."
            )
    allowed = (
        "any algorithm of the package"
        if limits.algorithms is None
        else ", ".join(limits.algorithms)
    )
    return [
        *lines,
        f"All this is answered for these algorithms only: {allowed}.",
        "Sums and vectors are not anonymous: from enough of them one can compute how many rows have which label, and "
        "the fewer rows there are, the more about each.",
    ]


def _masked(file: SiloFile) -> str:
    """Describe what masks change about that."""
    secure = file.secure
    always = (
        "Every vector leaves masked"
        if secure.required
        else "In a federation with [secure], vectors leave masked"
    )
    along = (
        " and along directions that the coordinator chooses"
        if secure.projections
        else "; its gradient only as a length, where a run begins"
    )
    return (
        f"{always}: others see the sum over all silos, in which this one has a share of {secure.share:.0%} at most, "
        f"and of this silo alone how large its vector is, as a power of two{along}."
    )


def _agreement(file: SiloFile, data: Dataset, width: int) -> list[str]:
    columns = data.table.columns
    if data.table.block is not None:
        lines = [f"The shape of the features: {' × '.join(map(str, data.table.shape))}."]
    else:
        lines = [
            f"Names of the {len(columns)} columns, whether each holds numbers or categories, and whether it has any "
            f"value: {_cut([column.name for column in columns])}."
        ]
    for column in columns:
        if column.kind == CATEGORY and (
            named := named_categories(column, ~data.held, file.limits.rarest)
        ):
            lines.append(f"Categories of {column.name!r}: {_cut(named)}.")
    if data.target.task == CLASSIFICATION:
        lines.append(f"Labels: {_cut([str(label) for label in data.target.labels])}.")
    if not file.privacy.required or file.privacy.columns:
        lines.append(
            f"For each of about {width} encoded columns: the number of training rows, their sum, and the sum of their "
            "squared distances from the mean over all silos. The sum of a category (or of all that are not named) is "
            "how many rows have it."
        )
    return lines


def stays(file: SiloFile, data: Dataset) -> list[str]:
    """List what never leaves the silo."""
    lines = [
        "Rows, single values, and labels of single rows.",
        "Predictions for single rows.",
        "Which rows are held out.",
        "Names of files and folders, and all columns that are not used.",
    ]
    if data.target.task == PREPARED:
        return lines
    if data.table.columns:
        lines.append(
            f"Names of categories with fewer than {file.limits.rarest} training rows here, and how many rows have each."
        )
    return [
        *lines,
        "How many values are missing and where (they are filled in before anything is added up).",
    ]


def dishonest(file: SiloFile) -> str:
    """Describe what a dishonest coordinator could still learn (tests/security shows it)."""
    limits = file.limits
    secure = file.secure
    coarse = f", in multiples of {secure.quantum:g}," if secure.quantum else ""
    losses = (
        f"your loss{coarse} at {limits.points:,} points of its choice a run, none further than {limits.radius:g} from "
        f"the start and on a path of at most {limits.path:g}, in {limits.runs} runs; from losses at nearby points it "
        f"can compute your gradient there; your accuracy at {limits.scores} points a run"
    )
    if secure.losses == "hidden":
        losses = (
            f"the largest loss of all silos, without a name, at {limits.points:,} points of its choice a run, and from "
            "nearby points the gradient of the silo that has it; your loss and accuracy at "
            f"{min(limits.scores, 2)} points a run"
        )
    if not secure.required:
        return (
            f"A coordinator that breaks the rules learns {losses}; and your gradients and updates at those points, as "
            "they are. With secure.required = true and the others' keys in secure.pins it learns only sums of them."
        )
    helped = (
        "another silo helps" if secure.colluding == 1 else f"{secure.colluding} other silos help"
    )
    return (
        f"A coordinator that breaks the rules learns {losses}; the length of your gradient at a few points; and, of "
        f"vectors, sums over {secure.members} silos or more with weights of its choice, of which yours is up to "
        f"{secure.share:.0%}, or all that is left where {helped} it. It opens no sum over fewer silos, and none of "
        "which it told silos different things."
    )


def _cut(names: list[str]) -> str:
    short = [name if len(name) <= 40 else f"{name[:37]}..." for name in names[:SHOWN]]
    return ", ".join(short) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# --- what has left and what was asked for


def audit(file: Path, noted: str = "") -> dict[str, Any]:
    """Check every link of a silo's log and add up what has left; the link `noted` must be among them."""
    lines = list[dict[str, Any]]()
    links = set[str]()
    link = ""
    broken = ""
    try:
        for line in JsonLines(file).read():
            link = line_link(link, {name: value for name, value in line.items() if name != "link"})
            if line.get("link") != link or line.get("number") != len(lines) + 1:
                raise ValueError
            lines.append(line)
            links.add(link)
    except OSError as error:
        raise InputError("log-read", f"The log {str(file)!r} cannot be read: {error}.") from None
    except (ValueError, AttributeError):
        what = f"Line {len(lines) + 1} was changed, or a line before it is missing"
        broken = f"{what}: nothing from there on is proven."
    if not broken and noted and noted not in links:
        broken = "The link that was noted down is not in this log: its end was cut off, or it is another log."
    return {
        "file": str(file),
        "whole": not broken,
        "broken": broken,
        "lines": len(lines),
        "link": link,
        "from": lines[0]["time"] if lines else "",
        "to": lines[-1]["time"] if lines else "",
        "bytes": sum(line["bytes"] for line in lines),
        "runs": [_left(run, lines) for run in dict.fromkeys(line["run"] for line in lines)],
        "refused": dict(Counter(line["sentence"] for line in lines if line["reply"] == "refused")),
    }


def _left(run: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up one run's lines, question by question."""
    own = [line for line in lines if line["run"] == run]
    rows = []
    for question in dict.fromkeys(line["question"] for line in own):
        asked = [line for line in own if line["question"] == question]
        answers = [line for line in asked if line["reply"] == "answer"]
        numbers = sum(int(np.prod(shape)) for line in answers for shape in line["left"].values())
        rows.append(
            {
                "question": question,
                "what": LEFT.get(question, question),
                "asked": len(asked),
                "answered": len(answers),
                "repeated": sum(line["reply"] == "missing" for line in asked),
                "numbers": numbers,
                "bytes": sum(line["bytes"] for line in asked),
            }
        )
    spent = [line["epsilon"] for line in own if "epsilon" in line]
    return {
        "run": run,
        "algorithm": next((line["algorithm"] for line in own if line["algorithm"]), ""),
        "masked": any(line["masked"] for line in own),
        "private": any(line["private"] for line in own),
        "epsilon": spent[-1] if spent else None,
        "from": own[0]["time"],
        "to": own[-1]["time"],
        "questions": rows,
        "last": own[-1]["question"],
    }


def silo_status(file: SiloFile) -> dict[str, Any]:
    """Return the status of a silo: its last question, the run that asked, and what has left."""
    found = audit(file.limits.audit)
    quiet = (
        (datetime.now(UTC) - datetime.fromisoformat(found["to"])).total_seconds()
        if found["to"]
        else None
    )
    state = "not asked yet" if quiet is None else "answering" if quiet < RECENT else "quiet"
    last: dict[str, Any] = max(found["runs"], key=lambda run: str(run["to"]), default={})
    asked, answered = (
        sum(row[name] for row in last.get("questions", ())) for name in ("asked", "answered")
    )
    refused = sum(found["refused"].values())
    spent = last.get("epsilon")
    most = file.privacy.epsilon
    ago = (
        ""
        if quiet is None
        else f", last asked {quiet:.0f} s ago for {LEFT.get(last['last'], last['last'])}"
    )
    lost = sum(row["repeated"] for row in last.get("questions", ()))
    again = f", {lost} repeated to a new process" if lost else ""
    words = {
        "state": state + ago,
        "run": f"{last['run'][:12]}, {last['algorithm']}" if last.get("run") else "none",
        "this run": f"{answered} of {several(asked, 'question')} answered{again}",
        "refused": several(refused, "question"),
        "sent": f"{format_bytes(found['bytes'])} in {several(found['lines'], 'reply')}, all runs",
        "log": found["broken"] or "no line was changed",
    }
    if spent is not None:
        words["privacy"] = f"ε = {spent:.3g} spent" + ("" if most is None else f" of {most:g}")
    return {
        "silo": file.name,
        "state": state,
        "quiet_seconds": quiet,
        "run": last.get("run", ""),
        "algorithm": last.get("algorithm", ""),
        "asked": asked,
        "answered": answered,
        "refused": refused,
        "bytes": found["bytes"],
        "answers": found["lines"],
        "epsilon": spent,
        "broken": found["broken"],
        "words": words,
    }


def silo_metrics(found: Mapping[str, Any], now: float) -> str:
    """Return the status of a silo in Prometheus's format."""
    counts: Counter[tuple[tuple[str, str], ...]] = Counter()
    for run in found["runs"]:
        for row in run["questions"]:
            counts[("question", row["question"]), ("reply", "answer")] += row["answered"]
            counts[("question", row["question"]), ("reply", "other")] += (
                row["asked"] - row["answered"]
            )
    spent = [run["epsilon"] for run in found["runs"] if run["epsilon"] is not None]
    return prometheus(
        "scaffpd_silo",
        {
            "log_whole": float(found["whole"]),
            "bytes_total": found["bytes"],
            "answers_total": counts,
            "refused_total": sum(found["refused"].values()),
            "epsilon": spent[-1] if spent else None,
            "quiet_seconds": now - datetime.fromisoformat(found["to"]).timestamp()
            if found["to"]
            else None,
        },
    )


def silo_pages(file: SiloFile) -> dict[str, Callable[[], str]]:
    """Return what is served of a silo: that it is up, its state (a log that was changed is an error), and numbers."""

    def health() -> str:
        now = silo_status(file)
        if now["broken"]:
            raise InputError("broken-health", now["broken"])
        return f"{now['state']}\n"

    def metrics() -> str:
        return silo_metrics(audit(file.limits.audit), time.time())

    return {"/metrics": metrics, "/healthz": health, "/livez": lambda: "up\n"}


def requests(file: SiloFile) -> list[dict[str, Any]]:
    """Return every request in the silo's log, with its state."""
    found: dict[str, dict[str, Any]] = {}
    log = file.limits.audit
    decided = decisions(file.consent.file, whole=False)
    try:
        lines = list(JsonLines(log).read())
    except (OSError, ValueError):
        raise InputError(
            "log-read-scaffpd",
            f"The log {str(log)!r} cannot be read: `scaffpd silo audit` says where.",
        ) from None
    for line in lines:
        if "asks" in line:
            name = request_name(line["asks"])
            own = found.setdefault(
                name, {"request": name, "first": line["time"], "columns": [], "asks": line["asks"]}
            )
            own |= {
                "last": line["time"],
                "refused": line.get("sentence", ""),
                "waits": "waits" in line,
            }
            own |= {"columns": line["columns"]} if line.get("columns") else {}
    for name, own in found.items():
        own["decision"] = decided.get(name)
        own["state"] = _state(own, file)
    return list(found.values())


def _state(own: Mapping[str, Any], file: SiloFile) -> str:
    """Return the state of a request in words."""
    said = own["decision"]
    if said is not None:
        until = f", until {said['until']}" if said["until"] else ""
        return f"{'granted' if said['granted'] else 'withdrawn'} by {said['by']} on {said['time'][:10]}{until}"
    if own["waits"]:
        return "waits for consent at this site"
    return (
        f"refused: {own['refused']}"
        if own["refused"]
        else f'taken, as consent.policy = "{file.consent.policy}" says'
    )
