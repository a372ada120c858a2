"""`config.toml`: everything that a run depends on, complete, so that the run can be repeated from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from scaffpd.algorithms import Fair
from scaffpd.config.errors import Section
from scaffpd.config.objects import algorithm_kind, algorithm_of, kind_of
from scaffpd.errors import InputError, unknown
from scaffpd.models.losses import LOSSES
from scaffpd.objectives import Objective
from scaffpd.privacy import Private
from scaffpd.privacy.private import LOCAL_STEPS, LOSS_SHARE, RADIUS, ROUNDS
from scaffpd.tabular.schema import TASKS

FORMATS = ("float32", "float64")


def toml_text(values: Mapping[str, Any], heading: str = "") -> str:
    """TOML of texts, numbers, booleans, lists of these, and tables of them; what is `None` is left out."""
    lines = [f"# {line}" for line in heading.splitlines()]
    lines += _table((), values)
    return "\n".join(lines).strip() + "\n"


def _table(path: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    if path and (lines or not values):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += _table((*path, key), value)
    return lines


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, float) and abs(value) == float("inf"):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{type(value).__name__} has no place in a settings file")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


DATA = (
    *("file", "client", "target", "columns", "categories", "task", "test", "seed", "standardise"),
    *("source", "clients", "alpha", "entry"),
)
BY_FILE = ("client", "target", "columns", "categories", "task", "standardise")
HELD_OUT = 0.2


def read_data(top: Section) -> dict[str, Any]:
    """Where the data is, and how it is read; keys that do not go together are refused."""
    section = top.section("data", (*DATA, "beside"))
    chosen = [key for key in ("file", "source", "entry") if key in section]
    if len(chosen) != 1:
        raise InputError(f"{top.file.name!r} needs exactly one of file, source and entry in [data].")
    text = section.text(chosen[0])
    found: dict[str, Any] = {chosen[0]: text}
    for key in BY_FILE:
        if key in section and chosen[0] != "file":
            raise InputError(f"{top.file.name!r} has data.{key}, which goes with data.file, but not with {chosen[0]}.")
    if chosen[0] == "file":
        found |= _columns(section)
    if chosen[0] != "source" and ("clients" in section or "alpha" in section):
        raise InputError(f"{top.file.name!r} has data.clients or data.alpha, which go with data.source.")
    if chosen[0] == "source":
        found |= {"clients": section.whole("clients", None, 2)} if "clients" in section else {}
        needs = "a number above 0"
        found |= {"alpha": section.number("alpha", None, needs, 1e-9, float("inf"))} if "alpha" in section else {}
    if chosen[0] == "entry" and ("test" in section or "seed" in section):
        raise InputError(f"{top.file.name!r} has data.test or data.seed, but an entry returns held-out rows itself.")
    if chosen[0] != "entry":
        found["test"] = section.number("test", HELD_OUT, "a share from 0 to below 1", 0, 1)
        found["seed"] = section.whole("seed", 0)
    if "beside" in section:
        found["beside"] = section.text("beside")
    return found


def _columns(section: Section) -> dict[str, Any]:
    found: dict[str, Any] = {key: section.text(key, needs="the name of a column") for key in ("client", "target")}
    for key in ("columns", "categories"):
        given = section.texts(key)
        found |= {key: list(given)} if given else {}
    task = section.maybe("task")
    if task is not None and task not in TASKS:
        raise unknown(f"data.task in {section.file.name!r},", task, TASKS)
    found |= {"task": task} if task else {}
    return found | {"standardise": section.boolean("standardise", True)}


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy of every training row, whoever sees what the clients send.

    Attributes:
        epsilon: ε of all models of the run together.
        delta: δ.
        clip: C, the largest norm of a row's gradient.
        loss_clip: B, the largest loss of a row.
        radius: R, the longest row once columns are scaled; longer ones are shortened. Not for networks.
        smoothness: a public L; left out, it follows from R.
        loss_share: the share of the budget that losses get.
        seed: of noise that can be repeated, for experiments; left out, a secret from the operating system.
    """

    epsilon: float
    delta: float = Private.delta
    clip: float = Private.clip
    loss_clip: float = Private.loss_clip
    radius: float | None = RADIUS
    smoothness: float | None = None
    loss_share: float = LOSS_SHARE
    seed: int | None = None

    @classmethod
    def read(cls, top: Section) -> PrivacySettings | None:
        """What [privacy] says; `None` where there is no such table."""
        if "privacy" not in top:
            return None
        section = top.section("privacy", [item.name for item in fields(cls)])
        above, share = "a number above 0", "a number between 0 and 1"
        known = {"epsilon": section.number("epsilon", None, above, 1e-9, float("inf"))}
        for key in ("clip", "loss_clip", "radius", "smoothness"):
            if key in section:
                known[key] = section.number(key, None, above, 1e-9, float("inf"))
        for key in ("delta", "loss_share"):
            if key in section:
                known[key] = section.number(key, None, share, 1e-300, 1)
        if "radius" not in section and _network(top):
            known["radius"] = None  # type: ignore[assignment]
        return cls(**known, seed=section.whole("seed", None) if "seed" in section else None)

    def table(self) -> dict[str, Any]:
        """The same as [privacy] of a `config.toml`."""
        return asdict(self)

    def model(
        self, bare: Any, methods: Sequence[Any], rounds: int, samples: Sequence[int], secret: bytes | None = None
    ) -> Private:
        """The model with the noise that makes ε of these methods, so many rounds each."""
        if self.radius is None and self.smoothness is None:
            raise InputError(
                "How smooth the losses of a network are is a fact about the data: give [privacy] a public smoothness."
            )
        return Private.solved(
            bare, self.epsilon, list(methods), rounds, samples, self.delta, self.loss_share, clip=self.clip,
            loss_clip=self.loss_clip, radius=self.radius, smoothness=self.smoothness,
            secret=secret if self.seed is None else self.seed,
        )  # fmt: skip


def _network(top: Section) -> bool:
    model = top.values.get("model", {})
    return isinstance(model, dict) and "network" in model


def settle(top: Section) -> None:
    """Defaults of other tables that are good ones where noise is added: fewer rounds, one local step, one model."""
    if "privacy" not in top:
        return
    training, algorithm = (
        dict(top.section(name, top.values.get(name, {}) or ()).values) for name in ("training", "algorithm")
    )
    top.values["training"] = {"rounds": ROUNDS, "baseline": False, **training}
    if algorithm.get("kind", "Fair") == "Fair":
        top.values["algorithm"] = {"local_steps": LOCAL_STEPS, **algorithm}


def noise_of(model: Private, rounds: int) -> str:
    """The noise that was found, in a sentence."""
    z, z_L = _reach(model.noise), _reach(model.loss_noise)
    return f"Noise for ε = {model.budget:g} in {rounds} rounds: z = {z} for gradients, z_L = {z_L} for losses."


def _reach(noise: float | tuple[float, ...] | None) -> str:
    """One z, or how far they reach."""
    several = noise if isinstance(noise, tuple) else (noise or 0.0,)
    low, high = min(several), max(several)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


TABLES = ("data", "model", "objective", "algorithm", "training", "privacy", "path")
POINTS = 9
OTHERS = {"silos": "a federation.toml; `scaffpd deploy` takes it", "limits": "a silo.toml; `scaffpd silo` takes it"}
OBJECTIVE = {"kind": "ChiSquare", "rho": 0.1}


@dataclass(frozen=True)
class Training:
    """How long, how exactly and where.

    Attributes:
        rounds: the most rounds; 30 where they are left out with [privacy].
        tol: the certified gap to stop at; 0 to make all rounds; left out, 1e-6 where something can be certified.
        seed: of all randomness.
        device: such as "cpu" or "cuda".
        numbers: "float32" or "float64"; empty leaves it to the model.
        baseline: whether the average model is trained as well, to compare with; with [privacy] only where asked for.
    """

    rounds: int = 1000
    tol: float | None = None
    seed: int = 0
    device: str = "cpu"
    numbers: str = ""
    baseline: bool = True


@dataclass(frozen=True)
class RunConfig:
    """A run, described.

    Attributes:
        place: the folder that relative paths start from.
        name: of the run.
        folder: where the run is kept.
        data: what [data] has, checked.
        model: what [model] has, checked.
        algorithm: what is run, with its objective.
        training: how long, how exactly and where.
        values: [objective] and [algorithm] as they were written.
        points: of a fairness path, between the average and the worst case.
        privacy: what [privacy] has, checked; `None` where there is none.
    """

    place: Path
    name: str
    folder: Path | None
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    algorithm: Any
    training: Training
    values: Mapping[str, Any] = field(repr=False)
    points: int = POINTS
    privacy: PrivacySettings | None = None

    @classmethod
    def read(cls, path: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> RunConfig:
        """Read a settings file; `changes` (by table) take the place of what it says."""
        file = path.absolute()
        return cls._of(Section.read(file, ("name", "folder", *TABLES), OTHERS), changes or {})

    @classmethod
    def of(cls, values: Mapping[str, Any], label: str) -> RunConfig:
        """From what a command line says; `label` is what messages call it."""
        return cls._of(Section(Path.cwd() / label, dict(values), ("name", "folder", *TABLES)), {})

    @classmethod
    def _of(cls, top: Section, changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        for table, new in changes.items():
            old = top.section(table, top.values.get(table, {}) or ()).values
            top.values[table] = dict(new) if "kind" in new else {**old, **new}  # another kind has other arguments
        data, privacy = read_data(top), PrivacySettings.read(top)
        settle(top)
        chosen = top.section("algorithm", top.values.get("algorithm", {}) or ()).values.get("kind", "Fair")
        kind = algorithm_kind(chosen, top.file.parent, f"algorithm.kind in {top.file.name!r},")
        if "objective" not in top and isinstance(kind, type) and kind.needs_objective():
            top.values["objective"] = dict(OBJECTIVE)
        algorithm = algorithm_of(top)
        values = {name: top.values[name] for name in ("objective", "algorithm") if name in top}
        folder = top.maybe("folder")
        place = top.file.parent
        return cls(
            place, top.text("name", _name(data, top)), None if folder is None else place / Path(folder).expanduser(),
            data, _model(top), algorithm, _training(top), values,
            top.section("path", ("points",)).whole("points", POINTS, 1), privacy,
        )  # fmt: skip

    @property
    def objective(self) -> Objective | None:
        """The objective, of algorithms that are given one."""
        return getattr(self.algorithm, "objective", None)

    def algorithm_for(self, objective: Objective) -> Any:
        """The same algorithm with another objective; the one of our choice where it is given none."""
        if self.objective is not None:
            return replace(self.algorithm, objective=objective)
        return Fair(objective) if self.privacy is None else Fair(objective, LOCAL_STEPS)

    def complete(self, folder: Path) -> dict[str, Any]:
        """All settings, for a `config.toml` in that folder: what was left out has its default."""
        data = dict(self.data)
        if "file" in data:
            data["file"] = _relative(self.place / data["file"], folder)
        if ("entry" in data or "network" in self.model) and self.place.resolve() != folder.resolve():
            data["beside"] = _relative(self.place / data.get("beside", "."), folder)
        training = {item.name: getattr(self.training, item.name) for item in fields(Training)}
        training["numbers"] = self.training.numbers or None
        return {
            "name": self.name, "folder": ".", "data": data, "model": dict(self.model),
            "objective": dict(self.values.get("objective", {})) or None,
            "algorithm": {"kind": kind_of(self.algorithm), **self.values.get("algorithm", {})},
            "training": training, "privacy": None if self.privacy is None else self.privacy.table(),
            "path": {"points": self.points},
        }  # fmt: skip


def _model(top: Section) -> dict[str, Any]:
    section = top.section("model", ("loss", "l2", "intercept", "network"))
    found: dict[str, Any] = {}
    if "network" in section:
        found["network"] = section.text("network", needs='a function such as "networks:small"')
        if "intercept" in section:
            raise InputError(f"{top.file.name!r} has model.intercept, which a network has not.")
    loss = section.maybe("loss")
    if loss is not None and loss not in LOSSES:
        raise unknown(f"model.loss in {top.file.name!r},", loss, LOSSES)
    found |= {"loss": loss} if loss else {}
    found["l2"] = section.number("l2", 0.0 if "network" in found else 1e-3, "a number >= 0", 0, float("inf"))
    return found if "network" in found else found | {"intercept": section.boolean("intercept", True)}


def _training(top: Section) -> Training:
    section = top.section("training", [item.name for item in fields(Training)])
    numbers = section.maybe("numbers")
    if numbers is not None and numbers not in FORMATS:
        raise unknown(f"training.numbers in {top.file.name!r},", numbers, FORMATS)
    return Training(
        section.whole("rounds", Training.rounds, 1),
        section.number("tol", 0, "a number >= 0 (0: make all rounds)", 0, float("inf")) if "tol" in section else None,
        section.whole("seed", Training.seed),
        section.text("device", Training.device),
        numbers or "",
        section.boolean("baseline", Training.baseline),
    )


def _name(data: Mapping[str, Any], top: Section) -> str:
    if "file" in data:
        return Path(data["file"]).name.split(".")[0] or "run"
    return str(data.get("source") or top.file.stem)


def _relative(path: Path, folder: Path) -> str:
    """From the run's folder where both lie below here, so that they can move together; in full elsewhere."""
    here, place = Path.cwd().resolve(), path.resolve()
    if place.is_relative_to(here) and folder.resolve().is_relative_to(here):
        return Path(os.path.relpath(place, folder.resolve())).as_posix()
    return place.as_posix()
