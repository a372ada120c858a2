"""Twenty real tables whose rows belong to groups: what statsmodels, lifelines, scikit-survival,
scikit-learn and scaffpd carry, and schools, Adult and wages from SCAFFPD_DATA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from lifelines import datasets as lives
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from sksurv import datasets as survivals
from statsmodels import datasets as models

import scaffpd as sp

sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.datasets import data_file, school

Rows = list[tuple[NDArray[np.float64], NDArray[np.float64]]]
FEWEST = 15  # rows of a client
MOST_CLIENTS = 40
TRAINED = 60  # rows of a client that train, at most
SHARE = 0.4  # of a client's rows that train


class Table(NamedTuple):
    """Rows, the column of their clients, and what is predicted."""

    frame: pd.DataFrame
    client: str
    y: pd.Series
    loss: str


def of(frame: pd.DataFrame, client: str, goal: str, loss: str, *left: str) -> Table:
    """Take a column as what is predicted, and leave some out."""
    frame = frame.dropna().reset_index(drop=True)
    return Table(frame.drop(columns=[goal, *left]), client, frame[goal].astype(float), loss)


def silos(data: sp.data.Silos, loss: str) -> Table:
    """Join what is cut into clients already."""
    frames = [
        pd.DataFrame(X, columns=list(data.features)).assign(who=name, y=y)
        for name, (X, y) in zip(data.names, data.train, strict=True)
    ]
    return of(pd.concat(frames), "who", "y", loss)


@cache
def people() -> pd.DataFrame:
    """Adult's first file; label: more than 50,000 dollars."""
    frame = pd.read_csv(data_file(None, "adult/adult.data.csv.gz"), skipinitialspace=True)
    frame = frame[(frame != "?").all(axis=1)]
    return frame.assign(rich=frame["classification"].str.startswith(">50K"))


def adult(client: str) -> Table:
    left = {"classification", "fnlwgt", "education-num", "native-country"} - {client}
    return of(people(), client, "rich", "logistic", *left)


def wages(client: str) -> Table:
    frame = pd.read_csv(data_file(None, "wages/wages.csv.gz"))
    industry = frame.columns[frame.columns.str.startswith("ind_code_")]
    years = frame.columns[frame.columns.str.startswith("year_")]
    frame["industry"] = frame[industry].to_numpy() @ np.arange(1, len(industry) + 1)
    frame["year"] = frame[years].to_numpy() @ np.arange(1, len(years) + 1)
    left = {"idcode", "t", "industry"} - {client}
    return of(frame, client, "ln_wage", "squared", *industry, *years, *(left & {*frame}))


def affairs() -> Table:
    frame = models.fair.load_pandas().data
    return of(frame.assign(any=frame["affairs"] > 0), "occupation", "any", "logistic", "affairs")


def deaths() -> Table:
    frame, end = survivals.load_flchain()
    frame = frame.drop(columns="chapter").assign(died=end["death"])  # of the cause of death
    return of(frame, "flc.grp", "died", "logistic")


def relapses() -> Table:
    frame, end = survivals.load_gbsg2()
    return of(frame.assign(back=end["cens"]), "tgrade", "back", "logistic")


def firms() -> Table:
    frame = models.grunfeld.load_pandas().data
    logs = np.log(frame[["invest", "value", "capital"]])
    return of(frame.assign(**logs), "firm", "invest", "squared")


def senators() -> Table:
    frame = lives.load_canadian_senators()
    frame["year"] = pd.to_datetime(frame["start_date"]).dt.year.astype(float)
    frame["years"] = np.sqrt(frame["diff_days"].clip(lower=0) / 365)
    kept = ["Province / Territory", "Political Affiliation at Appointment", "year", "years"]
    return of(frame[kept], kept[0], "years", "squared")


def decades() -> Table:
    frame = load_diabetes(as_frame=True, scaled=False).frame
    return of(frame.assign(decade=frame["age"] // 10), "decade", "target", "squared")


def reigns() -> Table:
    frame = lives.load_dd()
    kept = ["un_region_name", "democracy", "regime", "start_year", "duration"]
    return of(frame[kept], kept[0], "duration", "poisson")


TABLES: dict[str, Callable[[], Table]] = {
    "heart disease, hospitals": lambda: silos(sp.data.heart_disease(test_fraction=0), "logistic"),
    "affairs, occupations": affairs,
    "votes, opinions": lambda: of(models.anes96.load_pandas().data, "selfLR", "vote", "logistic"),
    "travel, modes": lambda: of(
        models.modechoice.load_pandas().data, "mode", "choice", "logistic", "individual"
    ),
    "deaths, light chains": deaths,
    "relapses, grades": relapses,
    "income, occupations": lambda: adult("occupation"),
    "income, countries": lambda: adult("native-country"),
    "income, educations": lambda: adult("education"),
    "particles, stations": lambda: silos(sp.data.beijing_air(), "squared"),
    "marriages, occupations": lambda: of(
        models.fair.load_pandas().data, "occupation_husb", "rate_marriage", "squared"
    ),
    "investment, firms": firms,
    "years of senators, provinces": senators,
    "diabetes, decades of age": decades,
    "exams, schools": lambda: silos(school(test_fraction=0), "squared"),
    "wages, industries": lambda: wages("industry"),
    "wages, women": lambda: wages("idcode"),
    "visits, insurance": lambda: of(
        models.randhie.load_pandas().data, "lncoins", "mdvis", "poisson", "idp"
    ),
    "lymph nodes, grades": lambda: of(lives.load_gbsg2(), "tgrade", "pnodes", "poisson", "cens"),
    "years of reign, regions": reigns,
}


def drawn(name: str, rng: np.random.Generator) -> tuple[Rows, Rows, str]:
    """Draw every client's rows to train on, at most 60, and return the others, and the loss."""
    frame, client, y, loss = TABLES[name]()
    who = frame.pop(client)
    sizes = who.value_counts()
    kept = sizes.index[sizes >= FEWEST]
    if len(kept) > MOST_CLIENTS:
        kept = rng.choice(kept, MOST_CLIENTS, replace=False)
    X = pd.get_dummies(frame, drop_first=True).to_numpy(float)
    train: Rows = []
    rest: Rows = []
    for one in kept:
        rows = rng.permutation(np.flatnonzero(who == one))
        cut = min(TRAINED, int(SHARE * len(rows)))
        for part, own in ((train, rows[:cut]), (rest, rows[cut:])):
            part.append((X[own], y.to_numpy()[own]))
    seen = np.concatenate([A for A, _ in train])
    mean, scale = seen.mean(0), seen.std(0)
    varies = scale > 1e-9
    level = np.concatenate([b for _, b in train]).std() if loss == "squared" else 1.0
    train, rest = (
        [((A - mean)[:, varies] / scale[varies], b / level) for A, b in part]
        for part in (train, rest)
    )
    return train, rest, loss
