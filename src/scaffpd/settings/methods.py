"""Methods, objectives and the user's own code, by the names that settings give them.

Settings of a run on one machine name a class by its `kind`, and the user's own class or function by
`module:name`. What comes from elsewhere, a federation's [algorithm] and [objective], is data of a
closed grammar: it names classes of the package, or those that every file of this kind gives to its
owner's own, and imports nothing. A setting there is a number in a range, a word or a list of
numbers; further rules are the methods' own.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

import scaffpd.algorithms.steps as steps
import scaffpd.fields as key
from scaffpd.algorithms import ALGORITHMS, Algorithm, Fair
from scaffpd.errors import InputError, unknown
from scaffpd.fields import Json, Needs, SettingsTable, plain_name
from scaffpd.objectives import OBJECTIVES, Objective
from scaffpd.settings.tables import OwnCode

Made = TypeVar("Made")


class Find(Protocol):
    """Returns a class by its base, its name, and words for the setting that names it."""

    def __call__(self, base: type[Made], kind: object, what: str, /) -> type[Made]: ...


log = logging.getLogger("scaffpd.settings")
LOADING = threading.RLock()

RULES = {rule.__name__: rule for rule in (steps.Auto, steps.Fixed, steps.Nonconvex, steps.Theory)}


def kind_of(algorithm: Algorithm) -> str:
    """Return an algorithm's name in settings: its class, with the module of a user's own one."""
    kind = type(algorithm)
    if ALGORITHMS.get(kind.__name__) is kind:
        return kind.__name__
    return f"{kind.__module__}:{kind.__qualname__}"


def listed(
    base: type[Made], kind: object, what: str, own: Mapping[type, type] | None = None
) -> type[Made]:
    """Return one of our algorithms or objectives by its name, or else that of `own`, which has
    classes by their bases; import nothing.
    """
    known: Mapping[str, type] = ALGORITHMS if base is Algorithm else OBJECTIVES
    if isinstance(kind, str) and kind in known:
        return known[kind]
    if own and base in own:
        return own[base]
    raise unknown(what, kind, known)


def class_of(base: type[Made], kind: object, what: str, folder: Path) -> type[Made]:
    """Return one of our algorithms or objectives by its name, or the user's own class."""
    if not isinstance(kind, str) or ":" not in kind:
        return listed(base, kind, what)
    return _checked(base, kind, _imported(kind, folder))


def own_class(base: type[Made], entry: str, folder: Path) -> type[Made]:
    """Return the class of an entry that a file of this machine names, searched in `folder` first.

    Several silos of one process may each have a module of the same name.
    """
    log.warning("This runs code that is not the package's own: %s", entry)
    with _searching(folder, entry):
        return _checked(base, entry, _named(folder, entry))


def _checked(base: type[Made], kind: str, found: object) -> type[Made]:
    if isinstance(found, type) and issubclass(found, base):
        return found
    word = base.__name__.lower()
    raise InputError(
        "wrong-class",
        f"{kind!r} is no {word}: it must be a subclass of scaffpd.{word}s.{base.__name__}, "
        f"got {found!r}.",
    )


def _imported(kind: str, folder: Path) -> object:
    """Import `module:name`, and say so; it stays importable, so that other processes can load its
    objects.
    """
    if kind.partition(":")[0] not in sys.modules:
        log.warning("This runs code that is not the package's own: %s", kind)
    sys.path += [place for place in (str(folder), str(Path.cwd())) if place not in sys.path]
    importlib.invalidate_caches()
    found = _named(folder, kind)
    if found is None:
        module, _, name = kind.partition(":")
        public = [own for own in vars(sys.modules[module]) if own[0] != "_"]
        raise unknown(f"name in {module!r},", name, public)
    return found


def algorithm_of(
    given: Mapping[str, object], objective: Mapping[str, object] | None, file: Path, find: Find
) -> Algorithm:
    values = dict(given)
    kind = values.pop("kind", "Fair")
    chosen = find(Algorithm, kind, f"algorithm.kind in {file.name!r},")
    if "objective" in values:  # it has a table of its own
        raise InputError(
            "objective-of-its-own",
            f"[algorithm] of {file.name!r} has an objective, which belongs in [objective].",
        )
    given_rule = values.get("steps")
    if isinstance(given_rule, dict):
        rule = dict(given_rule)
        name = rule.pop("kind", None)
        if name not in RULES:
            raise unknown(f"algorithm.steps.kind in {file.name!r},", name, RULES)
        values["steps"] = called(RULES[name], "algorithm.steps", rule, file)
    if objective is not None:
        if "objective" not in inspect.signature(chosen).parameters:
            raise InputError(
                "objective-of-its-own",
                f"{kind} has its own objective: leave out [objective] or --objective.",
            )
        values["objective"] = objective_of(objective, file, find)
    elif chosen.needs_objective():
        raise InputError(
            "objective-missing",
            f"{kind} needs an [objective] in {file.name!r}, such as "
            'kind = "ChiSquare" and rho = 0.1.',
        )
    return called(chosen, "algorithm", values, file)


def changed(method: Made, **values: object) -> Made:
    """Return an algorithm, which is a dataclass where it has these settings, with other values."""
    return replace(method, **values)  # type: ignore[type-var]


def objective_of(given: Mapping[str, object], file: Path, find: Find) -> Objective:
    values = dict(given)
    kind = find(Objective, values.pop("kind", None), f"objective.kind in {file.name!r},")  # type: ignore[type-abstract]
    return called(kind, "objective", values, file)


def with_usual(objective: Json | None, file: Path, find: Find) -> Json | None:
    """Return [objective] with the default strength if it has none."""
    if objective is None:
        return None
    kind = find(Objective, objective.get("kind"), f"objective.kind in {file.name!r},")  # type: ignore[type-abstract]
    if kind.usual is None:
        return objective
    return {**objective, kind.parameter: objective.get(kind.parameter, kind.usual)}


def called(made: Callable[..., Made], table: str, values: Mapping[str, object], file: Path) -> Made:
    """Make an object from the keys of a table; prefix its error messages with the table's name."""
    takes = [name for name in inspect.signature(made).parameters if name != "kind"]
    for name in values:
        if name not in takes:
            raise unknown(f"key in [{table}] of {file.name!r},", name, takes)
    try:
        return made(**values)
    except InputError as error:
        raise InputError(error.code, f"[{table}] of {file.name!r}: {error}") from None
    except TypeError as error:
        raise InputError(
            "settings-incomplete",
            f"[{table}] of {file.name!r} is not complete: {str(error).split(') ')[-1]}.",
        ) from None


def load(folder: Path, entry: str) -> Any:
    """Call the user's own function, searched in `folder` first; name the line if it fails."""
    with _searching(folder, entry):
        function = _named(folder, entry)
        if not callable(function):
            module, _, name = entry.partition(":")
            raise InputError(
                "entry-not-found",
                f"The module {module!r} has no function {name!r}, which the entry {entry!r} names.",
            )
        try:
            return function()
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                "entry-failed", f"The entry {entry!r} failed with {_cause(error)}."
            ) from error


def _named(folder: Path, entry: str) -> object:
    module_name, _, name = entry.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                "entry-not-found",
                f"There is no module {error.name!r} for the entry {entry!r}, neither in "
                f"{str(folder)!r} nor installed.",
            ) from None
        raise InputError(
            "entry-needs-module",
            f"The entry {entry!r} needs the module {error.name!r}, which is not installed.",
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            "entry-failed", f"The module of the entry {entry!r} failed with {_cause(error)}."
        ) from error


@contextmanager
def _searching(folder: Path, entry: str) -> Iterator[None]:
    """Search a folder first, and forget its modules afterwards."""
    top = entry.partition(":")[0].partition(".")[0]
    with LOADING:  # silos of one process load in threads of their own
        own = [n for n in [*sys.modules] if _holds(folder, top) and f"{n}.".startswith(f"{top}.")]
        taken = {name: sys.modules.pop(name) for name in own}
        before = set(sys.modules)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(folder))
            for name in sys.modules.keys() - before:
                if _holds(folder, name.partition(".")[0]):
                    del sys.modules[name]
            sys.modules.update(taken)


def _holds(folder: Path, module: str) -> bool:
    return (folder / module).is_dir() or (folder / f"{module}.py").is_file()


def _cause(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


PACKAGE: Mapping[str, Mapping[str, type]] = {"method": ALGORITHMS, "objective": OBJECTIVES}
BASES: Mapping[str, type] = {"method": Algorithm, "objective": Objective}
MOST = 1000  # numbers of a list: one for every silo
LARGEST = 1e12  # of a number without a range of its own
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,62}")


def _plain(given: object) -> object:
    """Accept a number, a word, true or false, or a list of numbers."""
    if isinstance(given, list):
        fits = len(given) <= MOST and all(_number(one) for one in given)
    elif isinstance(given, str):
        fits = WORD.fullmatch(given) is not None
    else:
        fits = isinstance(given, bool) or _number(given)
    if fits:
        return given
    raise PydanticCustomError("no_setting", "no setting")


def _number(given: object) -> bool:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return -LARGEST <= given <= LARGEST


Setting = Annotated[
    object,
    BeforeValidator(_plain),
    Needs(f"a number of at most {LARGEST:g}, a word, or a list of such numbers"),
]
Times = Annotated[int, Field(ge=1, le=10**6), Needs("a whole number from 1 to 1000000")]
Rate = Annotated[float, Field(ge=1e-12, le=1e6), Needs("a number from 1e-12 to 1e6")]
Amount = Annotated[float, Field(ge=0, le=1e6), Needs("a number from 0 to 1e6")]
Power = Annotated[float, Field(ge=0, le=1000), Needs("a number from 0 to 1000")]
Part = Annotated[float, Field(ge=1e-12, le=1), Needs("a number above 0, up to 1")]
Portion = Annotated[float, Field(ge=0, le=1), Needs("a number from 0 to 1")]
Level = Annotated[float, Field(ge=-LARGEST, le=LARGEST), Needs("a number of at most 1e12")]
Word = Annotated[str, StringConstraints(max_length=20), Needs("a word")]


class StepTable(SettingsTable):
    """[algorithm.steps]: a step rule of the package."""

    kind: Annotated[str, key.one_of(RULES)]
    tau: Rate | None = None
    sigma: Rate | None = None
    theta: Portion | None = None
    local_rate: Rate | None = None
    extrapolation: Portion | None = None
    noise: Amount | None = None
    accuracy: key.Strength | None = None


class ExtensibleTable(SettingsTable):
    """A table that may have settings of other names, which the class that takes them checks."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Setting] = Field(init=False)

    @model_validator(mode="after")
    def _names_are_plain(self, info: ValidationInfo[Path]) -> Self:
        for name in self.model_extra or {}:
            if not plain_name(name):
                raise InputError(
                    "setting-name", f"{info.context.name!r} has a setting whose name is none."
                )
        return self

    @property
    def given(self) -> Json:
        return self.model_dump(exclude_unset=True)


class MethodTable(ExtensibleTable):
    """[algorithm] of a federation."""

    kind: key.Name = Fair.__name__
    steps: StepTable | None = None
    local_steps: Times | None = None
    batch_size: Times | None = None
    clients_per_round: Times | None = None
    memory: Times | None = None
    local_rate: Rate | None = None
    server_rate: Rate | None = None
    dual_rate: Rate | None = None
    adaptivity: Rate | None = None
    momentum: Portion | None = None
    second_momentum: Portion | None = None
    mu: Amount | None = None
    q: Power | None = None
    tail: Part | None = None
    full_gradients: key.Switch | None = None
    weights: Word | None = None
    optimizer: Word | None = None


class ObjectiveTable(ExtensibleTable):
    """[objective] of a federation."""

    kind: key.Name
    rho: key.Strength | None = None
    cap: Part | None = None
    alpha: Part | None = None
    delta: key.Strength | None = None
    q: Power | None = None
    b: Level | Annotated[list[Level], Field(min_length=1, max_length=MOST)] | None = None
    prior: Annotated[list[key.Strength], Field(min_length=1, max_length=MOST)] | None = None


def entries(lists: OwnCode) -> dict[str, dict[str, str]]:
    return {"method": lists.methods, "objective": lists.objectives}


def found_classes(names: Mapping[str, str], lists: OwnCode, folder: Path) -> dict[type, type]:
    """Import the classes of these names, which a file in a folder of this machine lists; return
    them by their bases.
    """
    found: dict[type, type] = {}
    for what, name in names.items():
        own = entries(lists)[what]
        if name not in own:
            raise unknown(what, name, [*PACKAGE[what], *own])
        found[BASES[what]] = own_class(BASES[what], own[name], folder)
    return found
