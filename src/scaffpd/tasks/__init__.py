"""Tasks: what is to be predicted, one file each."""

from __future__ import annotations

from scaffpd.errors import unknown
from scaffpd.tasks.base import LOSS, Measure, TargetColumn, Task
from scaffpd.tasks.classification import Classification
from scaffpd.tasks.counts import EventCounts
from scaffpd.tasks.ordinal import OrderedCategories
from scaffpd.tasks.regression import Regression
from scaffpd.tasks.survival import Survival

# where nobody says how a column is to be read, the first that suits it reads it
TASKS: list[Task] = [Classification(), Regression(), EventCounts(), OrderedCategories(), Survival()]


def named(name: str) -> Task:
    for task in TASKS:
        if task.name == name:
            return task
    raise unknown("task", name, [task.name for task in TASKS])


def choices() -> list[str]:
    """Return the names that a column can be read by; times to an event have several."""
    return [task.name for task in TASKS if not task.timed]


def timed() -> Task:
    return next(task for task in TASKS if task.timed)


def suiting(column: TargetColumn) -> Task:
    """Return the task of a column that nobody has named one for."""
    return next(task for task in TASKS if task.suits(column))


def solving(loss: str, labelled: bool) -> Task:
    """Return the task of a loss; of one of your own by whether targets are labels."""
    alike = [task for task in TASKS if task.timed or task.labelled == labelled]
    return next((task for task in alike if loss in task.losses), alike[0])


def measuring(name: str) -> Measure:
    known = {measure.name: measure for measure in (LOSS, *(task.measure for task in TASKS))}
    if name not in known:
        raise unknown("measure", name, known)
    return known[name]


def measured_by(measure: Measure) -> Task:
    """Return the first task with a measure; that of numbers for a loss."""
    return next((task for task in TASKS if task.measure == measure), TASKS[1])
