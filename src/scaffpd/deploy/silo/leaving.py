"""What leaves a silo, and what never does, in words: shown by `scaffpd silo check` before anything is joined."""

from __future__ import annotations

from scaffpd.deploy.silo.reading import Dataset
from scaffpd.deploy.silo.silo_file import SiloFile
from scaffpd.tabular.encode import named_categories
from scaffpd.tabular.read import CATEGORY
from scaffpd.tabular.schema import CLASSIFICATION, PREPARED

SHOWN = 30  # names in a list before it is cut off


def leaves(file: SiloFile, data: Dataset, width: int) -> list[str]:
    """Everything that a coordinator may get, in the order in which it gets it."""
    train, test = data.rows
    held = " and on the held-out rows" if test >= file.limits.rows else ""
    lines = [f"The name {file.name!r}, and how many rows there are: {train} to train on, {test} held out."]
    if data.target.task == PREPARED:
        lines.append(f"The number of parameters of the model, {width}.")
    else:
        lines += _agreement(file, data, width)
    once, second, scores = (
        "Once: how curved the loss is, as three numbers: most, least, and at the steepest single row; and the loss at "
        "one arbitrary point, which tells whether the data are still the same when a run is resumed.",
        "For methods of second order: the diagonal of the Hessian (a vector of d numbers), and a few numbers on how "
        "the loss curves along directions that are asked for.",
        f"Loss and accuracy, each one number, on the training rows{held}.",
    )
    per_question = (
        f"Per question: the loss (one number{_rounded(file)}), and a gradient or a local update (each a vector of d "
        f"numbers; d is {_d(data, width)}). They are over all {train} training rows or a random part of them, never "
        f"fewer than {file.limits.rows} rows."
    )
    private = file.privacy.required
    lines += [per_question] if private else [once, per_question, second]
    lines += [*_masked(file), *_noisy(file)] if private else [*_masked(file), scores]
    allowed = "any algorithm of the package" if file.limits.algorithms is None else ", ".join(file.limits.algorithms)
    return [
        *lines,
        f"All this is answered for these algorithms only: {allowed}.",
        "Sums and vectors are not anonymous: from enough of them one can work out how many rows have which label, and "
        "the fewer rows there are, the more about each.",
    ]


def _masked(file: SiloFile) -> list[str]:
    """What masks change about that."""
    always = (
        "Every vector leaves masked" if file.secure.required else "In a federation with [secure], vectors leave masked"
    )
    along = (
        " and along directions that the coordinator chooses"
        if file.secure.projections
        else "; its gradient only as a length and along the way that x has gone"
    )
    return [
        f"{always}: others see the sum over all silos, in which this one has a share of {file.secure.share:.0%} at "
        f"most, and of this silo alone how large its vector is, as a power of two{along}."
    ]


def _noisy(file: SiloFile) -> list[str]:
    """What noise changes about that."""
    rules = file.privacy
    if not rules.required:
        return []
    most = "what the agreement says" if rules.epsilon is None else f"ε = {rules.epsilon:g}, all runs together"
    columns = "Sums over columns leave exactly." if rules.columns else "Sums over columns are refused."
    return [
        f"Losses, gradients and local updates carry noise, and cost at most {most}. Curvatures, scores and the loss at "
        f"an arbitrary point do not leave. {columns}"
    ]


def _rounded(file: SiloFile) -> str:
    return f", a multiple of {file.secure.quantum:g} where vectors are masked" if file.secure.quantum > 0 else ""


def _d(data: Dataset, width: int) -> str:
    if data.target.task == PREPARED:
        return str(width)
    outputs = " times the number of outputs" if len(data.target.labels) > 2 else ""
    return f"at least {width}{outputs} with a linear model"


def _agreement(file: SiloFile, data: Dataset, width: int) -> list[str]:
    lines = []
    if data.table.block is not None:
        lines.append(f"The shape of the features: {' × '.join(map(str, data.table.shape))}.")
    else:
        names = _cut([column.name for column in data.table.columns])
        lines.append(
            f"Names of the {len(data.table.columns)} columns, whether each holds numbers or categories, and whether "
            f"it has any value: {names}."
        )
    for column in data.table.columns:
        named = named_categories(column, ~data.held, file.limits.rarest) if column.kind == CATEGORY else []
        if named:
            lines.append(f"Categories of {column.name!r}: {_cut(named)}.")
    if data.target.task == CLASSIFICATION:
        lines.append(f"Labels: {_cut([str(label) for label in data.target.labels])}.")
    if file.privacy.required and not file.privacy.columns:
        return lines
    lines.append(
        f"For each of about {width} encoded columns: the number of training rows, their sum, and the sum of their "
        "squared distances from the mean over all silos. The sum of a category (or of all that are not named) is how "
        "many rows have it."
    )
    return lines


def stays(file: SiloFile, data: Dataset) -> list[str]:
    """What nobody else gets to see."""
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
    return [*lines, "How many values are missing and where (they are filled in before anything is added up)."]


def _cut(names: list[str]) -> str:
    short = [name if len(name) <= 40 else f"{name[:37]}..." for name in names[:SHOWN]]
    return ", ".join(short) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
