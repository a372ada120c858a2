"""What silos agree on: the part of `federation.toml` that an agreement has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, StringConstraints, ValidationInfo, model_validator

import scaffpd.fields as key
from scaffpd.algorithms import Algorithm, Fair, MinimaxSums
from scaffpd.algorithms.fair import BATCH
from scaffpd.data.tabular.agree import (
    LARGEST,
    LONGEST,
    MOST_CATEGORIES,
    REST,
    Column,
    Schema,
    encoded_features,
    width,
)
from scaffpd.data.tabular.columns import CATEGORY, NUMBER
from scaffpd.data.tabular.schemas import MOST_COLUMNS, MOST_FEATURES, checked_schema
from scaffpd.data.tabular.settings import CURVES
from scaffpd.errors import InputError, unknown
from scaffpd.fields import Json, Needs, SettingsTable
from scaffpd.models import Personal
from scaffpd.models.losses import LOSSES, loss_named
from scaffpd.objectives.floored import Floored, floor_of
from scaffpd.pipeline.columns import Plan
from scaffpd.pipeline.sites import Model, NamedModel
from scaffpd.privacy import LOCAL_STEPS, ROUNDS
from scaffpd.privacy.private import private_ridge
from scaffpd.secure import SHARE
from scaffpd.secure.aggregation import FEWEST, cap_of, colluding_of, most_weightings
from scaffpd.settings.methods import (
    PACKAGE,
    Amount,
    MethodTable,
    ObjectiveTable,
    Portion,
    Rate,
    Times,
    algorithm_of,
    changed,
    found_classes,
    listed,
)
from scaffpd.settings.model_file import linear, strength_of
from scaffpd.settings.tables import (
    AUTO,
    EFFECTS,
    ERRORS,
    AutoKappa,
    AutoRidge,
    OwnCode,
    PrivacyBudget,
)
from scaffpd.tasks import solving, timed
from scaffpd.tasks.base import Task

MOST_LABELS = 1000  # a softmax has a coefficient of every column for each
USUAL_TOL = 1e-6
LARGEST_SUMS = 2**18  # N d² up to which Hessians are summed: 2 MB to every silo
NUMBERS = "number"  # the kind of a column without a range
Title = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST)]
Size = Annotated[int, Field(ge=1, le=MOST_FEATURES)]
Rows = Annotated[int, Field(ge=1, le=10**9), Needs("a whole number from 1 to 1000000000")]
Label = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Categories = Annotated[list[Title], Field(min_length=1, max_length=MOST_CATEGORIES)]
ColumnKind = Annotated[
    Title | key.Range | Categories,
    Needs('"number", [least, largest] or a list of categories such as ["f", "m", "*"]'),
]


def _names(given: object) -> object:
    """Read numbers among categories as texts, as tables have them."""
    if not isinstance(given, dict):
        return given
    return {
        name: [str(one) if isinstance(one, int | float) else one for one in kind]
        if isinstance(kind, list) and any(isinstance(one, str) for one in kind)
        else kind
        for name, kind in given.items()
    }


def _kinds() -> tuple[str, ...]:
    """Return the losses of linear models; of times to an event, that without periods."""
    return *LOSSES, timed().loss()


class FederationModel(SettingsTable):
    """[model] of a federation: a linear model by its loss, or the silos' name of a network."""

    # a loss; left out, it goes by the labels: squared, logistic or softmax
    kind: key.Name | None = None
    l2: AutoRidge = "auto"  # by evidence, from masked sums; 0.1 with noise
    # κ of personal models near the shared one; left out, there is one
    kappa: AutoKappa | None = None
    # α of counts, whose variance is μ + αμ²; left out, 0
    dispersion: AutoRidge | None = None

    # what differs in a table of effects, as `train` has it; left out, there is none
    effects: Annotated[str, key.one_of(EFFECTS[1:])] | None = None
    errors: Annotated[str, key.one_of(ERRORS)] = ERRORS[0]
    reference: key.Texts = ()

    @property
    def network(self) -> str | None:
        return None if self.kind is None or self.kind in _kinds() else self.kind

    @model_validator(mode="after")
    def _networks_have_a_name_only(self, info: ValidationInfo[Path]) -> Self:
        more = self.model_fields_set - {"kind"}
        if self.network is not None and get_close_matches(self.network, [*_kinds(), "linear"]):
            raise unknown(f"model.kind in {info.context.name!r},", self.network, _kinds())
        if self.network is not None and more:
            raise InputError(
                "network-with-settings",
                f"{info.context.name!r} has model.{min(more)}, which only linear models "
                f"take: silos know the network {self.kind!r} by its name.",
            )
        return self


class FederationTraining(SettingsTable):
    """[training]: the most rounds, the certified gap to stop at, and the seed."""

    # by default fewer with [privacy]
    rounds: Times = 1000
    tol: Amount | None = None
    seed: key.Whole = 0
    # η of local steps, where a method's server needs to know how curved losses are
    rate: Rate | None = None


class DeployedPrivacy(PrivacyBudget):
    """[privacy] of a federation."""

    # a run with a larger ε would be another weighting of the same rows, that nobody counts
    epsilon: Annotated[float, Field(ge=1e-6, le=20), Needs("a number from 1e-6 to 20")]
    # whether silos share the noise of gradients under their masks: then a silo's is smaller, and
    # protects as long as no more than `colluding` silos leave theirs out
    shared: key.Switch = False


class FederationTerms(SettingsTable):
    """What all silos agree on; everything in it is part of the agreement's hash."""

    name: Annotated[key.Text, Field(max_length=100), Needs("up to 100 characters")] = "federation"
    silos: key.Names  # in the order of the results; the first one proposes the next point
    # the data dictionary: "number", a range, or the categories of every column ("*": all others);
    # a list of numbers is the shape of features without names
    columns: Annotated[
        Annotated[dict[Title, ColumnKind], Field(min_length=1, max_length=MOST_COLUMNS)]
        | Annotated[list[Size], Field(min_length=1, max_length=8)],
        BeforeValidator(_names),
        Needs('a table such as age = "number"'),
    ]
    # of a classification; left out, the target is a number
    labels: (
        Annotated[
            list[Label] | list[Title],
            Field(min_length=2, max_length=MOST_LABELS),
            Needs(f"2 to {MOST_LABELS} labels"),
        ]
        | None
    ) = None
    # numbers have steps beside lines, at thresholds from masked histograms: as `train` has it
    curves: Annotated[str, key.one_of(CURVES)] = "off"
    # with curves and without noise, the most pairs of columns that act together
    pairs: Annotated[int, Field(ge=0, le=1000), Needs("a whole number from 0 to 1000")] = 8
    model: FederationModel = Field(default_factory=dict, validate_default=True)
    algorithm: MethodTable = MethodTable()
    objective: ObjectiveTable | None = None
    training: FederationTraining = FederationTraining()
    # training rows of every silo, rounded down by its operator; left out, silos count alike
    rows: dict[Title, Rows] | None = None
    # t, how many silos may show others all that they know; a third of them if left out
    colluding: Annotated[int, Field(ge=1, le=1000), Needs("a whole number >= 1")] | None = None
    # c, the average's share of the objective: every silo keeps c p_i of the weight, whatever others
    # claim; left out, what the usual limits.share of silos takes
    floor: Annotated[float, Field(ge=0, le=0.9), Needs("a number from 0 to 0.9")] | None = None
    # points nearer than this count as one; left out, the root of training.tol over 100,000
    near: Portion | None = None
    privacy: DeployedPrivacy | None = None
    _path: Path
    _method: Algorithm | None = None

    def model_post_init(self, context: Path) -> None:
        self._path = context
        if not self.own:
            self._make({})

    @property
    def path(self) -> Path:
        return self._path

    @property
    def own(self) -> dict[str, str]:
        """Names of a method and of an objective that are not the package's own."""
        tables = {"method": self.algorithm, "objective": self.objective}
        return {
            what: table.kind
            for what, table in tables.items()
            if table is not None and table.kind not in PACKAGE[what]
        }

    @property
    def settled(self) -> bool:
        return self._method is not None

    def settle(self, lists: OwnCode, folder: Path) -> None:
        """Load own classes that a file of this machine lists."""
        self._make(found_classes(self.own, lists, folder))

    def _make(self, own: Mapping[type, type]) -> None:
        """Make the method, and complete the settings whose defaults depend on it."""
        given = self.algorithm.given
        objective = None if self.objective is None else self.objective.given
        method = algorithm_of(given, objective, self._path, partial(listed, own=own))
        fixed = "local_steps" in given or not hasattr(method, "local_steps")
        if self.privacy is not None and not fixed:
            steps = 1 if self.privacy.shared else LOCAL_STEPS  # each costs privacy
            method = changed(method, local_steps=steps)
        self._method = self._floored(self._safe(method))

    def _safe(self, method: Algorithm) -> Algorithm:
        """Cap what one silo may weigh; take the method whose losses stay at silos, if there is one.

        It is decided here, from the terms alone, for silos agree to what leaves them.
        """
        objective = getattr(method, "objective", None)
        n = len(self.silos)
        if objective is None or n < FEWEST:
            return method
        if "cap" in objective.arguments() and objective.cap is None:
            cap = cap_of(n, self.colluders)
            objective = objective.with_arguments(cap=cap)
            method = changed(method, objective=objective)
        if method != Fair(objective) or self.privacy is not None or not objective.separable:
            return method
        if self.model.network is not None:
            return method
        model = self.linear()
        d = (width(self.encoding()) + 1) * model.get("classes", 1)  # and more with curves
        if self.task.timed or d * d * n > LARGEST_SUMS:
            return method
        loss = loss_named(model["loss"])
        return MinimaxSums(objective, steep=not loss.smooth) if loss.not_negative else method

    def _floored(self, method: Algorithm) -> Algorithm:
        """Put a floor under every weight, so that nobody's claims leave one silo in a sum."""
        objective = getattr(method, "objective", None)
        n = len(self.silos)
        if objective is None or not objective.simplex or n < FEWEST:
            return method
        floor = floor_of(objective, n, self.colluders, SHARE) if self.floor is None else self.floor
        return changed(method, objective=Floored(objective, floor)) if floor else method

    @property
    def method(self) -> Algorithm:
        """Algorithm with its objective; own code has to be loaded first, by `settle`."""
        assert self._method is not None
        return self._method

    @property
    def counted(self) -> dict[str, int]:
        """What silos count for, in their order: their agreed rows, or 1."""
        return {name: (self.rows or {}).get(name, 1) for name in self.silos}

    @property
    def task(self) -> Task:
        """What is predicted: it goes by the loss, and by whether there are labels."""
        loss = "" if self.model.network else self.model.kind or ""
        return solving(loss, self.labels is not None)

    @property
    def certified(self) -> bool:
        return self.method.proves and self.privacy is None and self.model.network is None

    @property
    def reaching(self) -> bool:
        """Whether sums of products are asked for, to prove what a ridge does not: where evidence
        has asked as much, or where there is no ridge, and room for one more weighting.
        """
        asked = isinstance(self.method, MinimaxSums) and self.model.kappa is None
        room = most_weightings(len(self.silos), self.colluders) > 1
        return asked and (self.model.l2 == AUTO or (self.model.l2 == 0 and room))

    @property
    def batch(self) -> int | None:
        """The rows of a minibatch; `None` where every question is about all of them."""
        given = self.algorithm.batch_size
        fair = self.model.network and not self.privacy and self.algorithm.kind == Fair.__name__
        return BATCH if given is None and fair else given

    @property
    def curved(self) -> bool:
        """Whether numbers have curves, or may have them while the method is not known."""
        able = not self.settled or isinstance(self.method, Fair | MinimaxSums)
        plain = self.privacy is None and able
        wanted = self.curves == "on" or (self.curves == AUTO and plain)
        return wanted and self.model.network is None and self.numbers > 0

    @property
    def paired(self) -> bool:
        return self.curved and self.pairs > 0 and self.privacy is None and not self.task.timed

    @property
    def numbers(self) -> int:
        return sum(column["kind"] != CATEGORY for column in self.encoding()["columns"])

    @property
    def rounds(self) -> int:
        given = self.privacy is None or "rounds" in self.training.model_fields_set
        return self.training.rounds if given else ROUNDS

    @property
    def tol(self) -> float | None:
        """The certified gap to stop at; `None` makes all rounds."""
        given = self.training.tol
        return (USUAL_TOL if self.certified else None) if given is None else given or None

    @property
    def colluders(self) -> int:
        return colluding_of(len(self.silos), self.colluding)

    @property
    def distance(self) -> float:
        """What points have to differ by to count as two: near an optimum within `tol` they do."""
        if self.near is not None:
            return self.near
        return 1e-5 * math.sqrt(min(self.tol or USUAL_TOL, USUAL_TOL))

    def encoding(self) -> Schema:
        shape = self.columns if isinstance(self.columns, list) else None
        named = self.columns if isinstance(self.columns, dict) else {}
        columns = [_column(name, kind, self._path.name) for name, kind in named.items()]
        made: Json = {
            "task": "regression" if self.labels is None else "classification",
            "labels": list(self.labels or ()),
            "shape": shape,
            "columns": columns,
        }
        if columns and all(one["kind"] == CATEGORY or "range" in one for one in columns):
            made["declared"] = True
        return checked_schema(made)

    def linear(self) -> Json:
        """Return the model as its file has it; every linear model has an intercept."""
        if self.model.network is not None:
            return {"kind": self.model.network}
        classes = len(self.labels or ())
        loss = self.model.kind or self.task.loss(classes)
        times = self.task.timed
        binary = not times and LOSSES[loss].binary
        if binary and classes not in (0, 2):
            raise InputError(
                "logistic-of-many-labels",
                f'Logistic loss has two classes, but there are {classes} labels: use "softmax".',
            )
        made: Json = {"kind": "linear", "loss": loss, "l2": self.model.l2, "intercept": not times}
        if times:  # y is time, event and entry, which is 0 where a silo has none
            made["entry"] = True
        if self.task.exposed:  # y is counts and exposures, which are 1 where a silo has none
            made["exposed"] = True
        if self.model.dispersion is not None:
            made["dispersion"] = self.model.dispersion
        if self.model.kappa is not None:
            made["strength"] = self.model.kappa
        return made | ({"classes": classes} if classes and not binary else {})

    def modelled(self, schema: Schema) -> Model:
        """Return the model of encoded columns; its strengths may be "auto"."""
        if self.model.network is not None:
            return NamedModel(self.model.network)
        made = self.linear()
        if self.privacy is not None:  # evidence would cost ε
            ridge = private_ridge(width(schema)) if made["l2"] == AUTO else made["l2"]
            return linear(made | {"l2": ridge})
        groups = [feature.group for feature in encoded_features(schema)]
        model = replace(linear(made), groups=groups)
        strength = strength_of(made)
        return model if strength is None else Personal(model, strength)

    def plan(self) -> Plan:
        strengths = () if self.model.network is not None else (self.model.l2, self.model.kappa)
        return Plan(
            self.modelled,
            self.curved,
            self.pairs if self.paired else 0,
            self.privacy is not None,
            bool(self.encoding().get("declared")),
            AUTO in strengths and self.privacy is None,
            self.model.dispersion == AUTO,
        )

    def terms(self) -> Json:
        names = {*FederationTerms.model_fields}
        return self.model_dump(mode="json", include=names, exclude_none=True, exclude_unset=True)


def _column(name: str, kind: object, file: str) -> Column:
    if isinstance(kind, list) and all(isinstance(one, float) for one in kind):
        return {"name": name, "kind": NUMBER, "range": kind}
    if isinstance(kind, list):
        named = [category for category in kind if category != REST]
        return {"name": name, "kind": CATEGORY, "categories": named, "other": REST in kind}
    if kind != NUMBERS:
        raise InputError(
            "column-kind-unknown",
            f'{file!r} has {kind!r} for column {name!r}: write "number", or a list.',
        )
    return {"name": name, "kind": NUMBER}
