"""[model], [training], … of a run's settings; no PyTorch, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

import scaffpd
import scaffpd.fields as key
from scaffpd.errors import InputError
from scaffpd.fields import Needs, SettingsTable
from scaffpd.numbers import AUTO as AUTO

HOSPITALS = "hospitals"
COUNTED = ("alike", "rows")
EFFECTS = (AUTO, "fixed", "stratified", "intercepts", "slopes")
ERRORS = ("model", "robust")
LARGEST = 1e12  # of a strength
# names of the package's methods and objectives, without the seconds that PyTorch takes
HOMES = ("scaffpd.algorithms", "scaffpd.objectives")
NAMES = {"Fair", *(name for name, home in scaffpd._HOME.items() if home in HOMES)}
MOST_CLASSES = 1000  # of one's own
Tolerance = Annotated[key.NonNegative, Needs("a number >= 0 (0: make all rounds)")]


AutoRidge = Annotated[
    Literal["auto"] | Annotated[float, Field(ge=0, le=LARGEST)], Needs('"auto" or a number >= 0')
]
AutoKappa = Annotated[
    Literal["auto"] | Annotated[float, Field(ge=1e-12, le=LARGEST)],
    Needs('"auto" or a number above 0'),
]


def _own(given: dict[str, str]) -> dict[str, str]:
    """Refuse an own class under a name that the package has given."""
    for name in given:
        if name in NAMES:
            raise InputError(
                "name-of-the-package",
                f"The package has a {name!r} of its own: give your class another name.",
            )
    return given


OwnClasses = Annotated[
    dict[key.Name, key.Entry], Field(max_length=MOST_CLASSES), AfterValidator(_own)
]


class OwnCode(SettingsTable):
    """Entries "module:Class" of one's own classes, by the names that an agreement uses."""

    methods: OwnClasses = Field(default_factory=dict)
    objectives: OwnClasses = Field(default_factory=dict)


class SourceSettings(SettingsTable):
    """[data]: the data set that is part of the package."""

    source: Annotated[str, key.one_of((HOSPITALS,))]
    test: key.Share = 0.2  # of rows held out

    @property
    def name(self) -> str:
        return self.source


class ModelSettings(SettingsTable):
    """[model]: strengths of a linear model."""

    l2: AutoRidge = "auto"
    """Ridge on the coefficients, not on the intercept; auto: by evidence."""
    kappa: AutoKappa = "auto"
    """κ of personal models, which ties them to the shared one; auto: by evidence."""
    dispersion: AutoRidge | None = None
    """α of counts, whose variance is μ + αμ²: a number, or auto: by likelihood; left out, 0."""
    personal: key.Texts = ()
    """Columns that may differ between clients: age,intercept; left out, all."""
    effects: Annotated[str, key.one_of(EFFECTS)] = AUTO
    """What differs in the table of effects: nothing (fixed), free intercepts (stratified), random
    intercepts, or slopes as well; auto: by evidence."""
    errors: Annotated[str, key.one_of(ERRORS)] = "model"
    """Standard errors of effects: by the model, or robust, clustered by client."""
    reference: key.Texts = ()
    """Categories that others are compared with: sex=f,stage=I; left out, the mean over rows."""
    split_inference: bool = False
    """Choose curves, pairs and strengths on one half of the rows, and estimate effects and errors
    on the other."""


class TrainingSettings(SettingsTable):
    """[training]: how long, how exactly and where."""

    rounds: key.Count = 1000
    """The most rounds; with --epsilon, 30."""
    tol: Tolerance | None = None
    """Certified gap to stop at; left out, 1e-6 where one is proven."""
    seed: key.Whole = 0
    """Chooses held-out rows and all else."""
    device: key.Text = "cpu"
    """cpu or cuda."""
    splits: key.Whole | None = None
    """Splits that tell what joining brings; 0: none; left out, 10 of small tables."""
    count_clients: Annotated[str, key.one_of(COUNTED)] = "alike"
    """How clients count in one model for all: alike, or by their rows."""


class PrivacyBudget(SettingsTable):
    """[privacy]: differential privacy of every training row against all who see the messages."""

    epsilon: key.Epsilon
    """Differential privacy: ε of every row, over the whole run."""
    delta: key.Delta = 1e-5
    """Its δ, at most 0.001."""
    clip: key.Strength = 1.0  # C, the largest norm of a row's gradient
    loss_clip: key.Strength = 4.0  # B, the largest loss of a row
    # R, the longest row once columns are scaled; longer ones are shortened. Not for networks.
    radius: key.Strength | None = None
    smoothness: key.Strength | None = None  # a public L; left out, it follows from R


class PrivacySettings(PrivacyBudget):
    """[privacy] of a run on one machine."""

    seed: key.Whole | None = None  # repeatable noise, for experiments; left out, a secret


class PathSettings(SettingsTable):
    """[path]: a fairness path from the average to the worst case."""

    points: key.Count = 9
    """Points between the average and the worst case."""
    new_sites: bool = False
    """Leave every client out as well: which one model serves a site that joins later?"""
