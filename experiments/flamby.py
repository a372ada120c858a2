"""FLamby's two tabular benchmarks: its published rows, its baselines run here, and our models.

    python -m experiments.flamby                         # into runs/flamby
    python -m experiments.flamby --out results/flamby    # the page in results/ anew

Baselines are ours, in FLamby's budget: 100 local updates a round, 6 rounds for TCGA-BRCA (full
gradients, for Cox's likelihood has no minibatches) and 15 for heart disease (minibatches of 4).
Their rates are the best of a grid on a fifth of FLamby's training rows. Our models are untuned:
strengths by evidence, certified. Over fresh splits differences are paired, with Student's t
corrected for the rows that splits share (Nadeau and Bengio 2003).
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binomtest

import scaffpd as sp
from experiments.tables import check_small
from scaffpd.data.silos import carve
from scaffpd.models.baseline import concordance
from scaffpd.models.concordance import interval
from scaffpd.models.numerics import student

ROUNDS = {"tcga": 6, "heart": 15}
STEPS = 100
RATES = (0.01, 0.1, 1.0)
OURS = ("alone", "average", "fair", "personal")
PUBLISHED = Path(__file__).parents[1] / "results" / "flamby" / "published.csv"
SPLITS = 20
LOAD = {"tcga": sp.data.tcga_brca, "heart": sp.data.flamby_heart}


def model_of(data, l2):
    """The model that both sides train."""
    if data == "tcga":
        return sp.Linear("cox", l2=l2)
    return sp.Linear("logistic", l2=l2, intercept=True)


def baselines(data):
    """FLamby's methods by name, as functions of a rate (of clients, or of the server)."""
    given = {"local_steps": STEPS, "batch_size": None if data == "tcga" else 4}
    found = {
        "FedAvg": lambda rate: sp.FedAvg(local_rate=rate, **given),
        "FedProx": lambda rate: sp.FedProx(local_rate=rate, mu=0.1, **given),
        "SCAFFOLD": lambda rate: sp.Scaffold(local_rate=rate, **given),
    }
    for name in ("adam", "yogi", "adagrad"):
        found[f"Fed{name.capitalize()}"] = lambda rate, name=name: sp.FedOpt(
            optimizer=name, server_rate=rate, local_rate=0.01, adaptivity=1e-3, **given
        )
    return found


def score(data, models, pairs):
    """Concordance or accuracy of every site, NaN where no pair of rows can be compared."""
    found = []
    for x, (X, y) in zip(models, pairs, strict=True):
        if data == "tcga":
            found.append(concordance(y[:, 0], y[:, 1], X @ x))
        else:
            found.append(float(np.mean((X @ x[:-1] + x[-1] > 0) == y)))
    return np.array(found)


def trained(data, method, train, seed=0):
    """The model of a baseline after FLamby's rounds."""
    cohort = sp.Cohort(train, model_of(data, 0.0))
    return sp.train(method, cohort, ROUNDS[data], seed=seed, progress=False).x


def best_rate(job):
    """The rate with the best mean score on a fifth of the training rows."""
    torch.set_num_threads(1)
    data, name = job
    random = np.random.default_rng(0)
    parts = []
    for X, y in LOAD[data]().train:
        label = (y[:, 1] if data == "tcga" else y).astype(np.int64)
        (rows, _), (held, _) = carve((np.arange(len(y))[:, None].astype(float), label), 0.2, random)
        places = [part[:, 0].astype(int) for part in (rows, held)]
        parts.append([(X[k], y[k]) for k in places])
    train, held = ([one[k] for one in parts] for k in (0, 1))
    means = []
    for rate in RATES:
        x = trained(data, baselines(data)[name](rate), train)
        means.append(np.nanmean(score(data, [x] * len(held), held)) if np.isfinite(x).all() else 0)
    return RATES[int(np.argmax(means))]


def one_split(job):
    """Scores of all methods on one split, and the gaps that are proven for ours."""
    torch.set_num_threads(1)
    data, seed, rates = job
    silos = LOAD[data](seed)
    found = {}
    for name, rate in rates.items():
        x = trained(data, baselines(data)[name](rate), silos.train, seed or 0)
        found[name] = score(data, [x] * len(silos.test), silos.test)
    joined = sp.joining(silos.train, silos.test, model_of(data, "auto"), names=silos.names)
    for name in OURS:
        found[name] = score(data, joined.parameters[name][1:], silos.test)
    gaps = {name: joined.results[name].certificate for name in OURS if name in joined.results}
    ends = {}
    for name in OURS if seed is None else ():
        pairs = zip(joined.parameters[name][1:], silos.test, strict=True)
        ends[name] = [reach(data, x, X, y) for x, (X, y) in pairs]
    return found, gaps, ends


def reach(data, x, X, y):
    """The 95 % interval of a site's score over its test rows; `None` without a pair of them."""
    if data == "tcga":
        found = interval(y, X @ x, model_of(data, 0.0))
        return None if found is None else found[1:]
    right = int(((X @ x[:-1] + x[-1] > 0) == y).sum())
    return binomtest(right, len(y)).proportion_ci(method="wilson")


def published():
    """{data: {method: means of sites}} of FLamby's own results."""
    rows = defaultdict(lambda: defaultdict(dict))
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file):
            if row["Test"].startswith("client_test_"):
                rows[row["dataset"]][row["Method"]][int(row["Test"][-1])] = float(row["mean"])
    return {
        data: {m: np.array([own[k] for k in sorted(own)]) for m, own in by.items()}
        for data, by in rows.items()
    }


def numbers(values):
    """A site's scores, and the mean and the lowest of those that there are."""
    cells = ["–" if math.isnan(v) else f"{v:.3f}" for v in values]
    return " | ".join([*cells, f"**{np.nanmean(values):.3f}**", f"{np.nanmin(values):.3f}"])


def split_table(theirs, found, sites):
    """FLamby's split: published rows, baselines run here, ours."""
    lines = [f"| method | {' | '.join(sites)} | mean | lowest |", "|---" * (len(sites) + 3) + "|"]
    for name in sorted(theirs):
        if not name.startswith("Local"):
            lines.append(f"| {name.removesuffix('100')}, published | {numbers(theirs[name])} |")
    own = [theirs[f"Local {k}"][k] for k in range(len(sites)) if f"Local {k}" in theirs]
    if len(own) == len(sites):
        lines.append(f"| each site alone, published | {numbers(np.array(own))} |")
    for name, values in found.items():
        whose = "ours" if name in OURS else "run here"
        lines.append(f"| {name}, {whose} | {numbers(values)} |")
    return lines


def paired(ours, other, overlap):
    """Mean difference over splits, of the sites that both have, with half of its interval."""
    both = [np.isfinite(a) & np.isfinite(b) for a, b in zip(ours, other, strict=True)]
    gaps = [float(np.mean(a[k]) - np.mean(b[k])) for a, b, k in zip(ours, other, both, strict=True)]
    half = student(len(gaps) - 1) * np.std(gaps, ddof=1) * math.sqrt(1 / len(gaps) + overlap)
    return float(np.mean(gaps)), float(half)


def fresh_table(many, overlap):
    """Means over fresh splits, and how far ours are from each baseline."""
    names = list(many[0])
    means = {name: np.array([np.nanmean(one[name]) for one in many]) for name in names}
    lows = {name: np.array([np.nanmin(one[name]) for one in many]) for name in names}
    lines = [
        "| method | mean of sites (sd over splits) | lowest site | average − it | personal − it |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        cells = [f"{means[name].mean():.3f} ({means[name].std(ddof=1):.3f})"]
        cells.append(f"{lows[name].mean():.3f}")
        for mine in ("average", "personal"):
            a, b = ([one[key] for one in many] for key in (mine, name))
            gap, half = paired(a, b, overlap)
            cells.append("" if mine == name else f"{gap:+.3f} ± {half:.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page(data, theirs, first, many, sites, rates):
    """The part of the page about one data set."""
    found, gaps, ends = first
    silos = LOAD[data]()
    held, kept = (sum(len(y) for _, y in part) for part in (silos.test, silos.train))
    what = "concordance" if data == "tcga" else "accuracy"
    lines = [f"## {data}: {what}", "", "On FLamby's split:", ""]
    lines += split_table(theirs, found, sites)
    chosen = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    proven = ", ".join(f"{name} {gap:.0e}" for name, gap in gaps.items())
    lines += ["", f"Rates of the baselines run here: {chosen}. Proven gaps of ours: {proven}.", ""]
    lines += ["95 % intervals of ours, over a site's test rows:", ""]
    lines += [f"| method | {' | '.join(sites)} |", "|---" * (len(sites) + 1) + "|"]
    for name, own in ends.items():
        texts = ["–" if e is None else f"{e[0]:.2f} to {e[1]:.2f}" for e in own]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    lines.append("")
    if many:
        undefined = np.mean([np.isnan(one["average"]) for one in many], axis=0)
        named = [f"{s} in {u:.0%}" for s, u in zip(sites, undefined, strict=True) if u > 0]
        lines += [f"Over {len(many)} fresh splits:", "", *fresh_table(many, held / kept), ""]
        if named:
            lines += [
                f"Splits without a comparable pair, left out of both: {', '.join(named)}.",
                "",
            ]
    return lines


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/flamby"))
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", nargs="+", choices=list(LOAD), default=list(LOAD))
    given = parser.parse_args()
    if given.splits < SPLITS or len(given.data) < len(LOAD):
        check_small(given.out)
    start = time.time()
    theirs = published()
    lines = [Path(__file__).with_suffix(".md").read_text().rstrip(), ""]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for data in given.data:
            names = list(baselines(data))
            chosen = pool.map(best_rate, [(data, name) for name in names])
            rates = dict(zip(names, chosen, strict=True))
            jobs = [(data, seed, rates) for seed in (None, *range(given.splits))]
            first, *rest = pool.map(one_split, jobs)
            key = next(name for name in theirs if data in name)
            sites = LOAD[data]().names
            lines += page(data, theirs[key], first, [one[0] for one in rest], sites, rates)
    lines.append(f"Made in {(time.time() - start) / 60:.1f} minutes, {given.processes} processes.")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
