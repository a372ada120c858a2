r"""The pages and figures of the decisive tables, from the CSV files of their pieces and nothing
else.

    README.md        what was compared, differences with their 95 % intervals, one table a piece
    contrasts.csv    those differences, partition by partition
    rows.png         who is served: the worst fifth under every row
    fit.png          what fairness gains, against how well clients are fitted
    rounds.png       the same after 5 to 100 rounds, by ρ

A difference is paired: the same partitions under both rows. Its interval is Student's over
partitions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.images import rows as table
from experiments.images.plans import NUMBERS, TITLES
from experiments.style import BLACK, BLUE, GREEN, ORANGE, PINK, QUIET, RED, RULE, SKY, STYLE
from experiments.tables import markdown_table, read_csv, write_csv
from scaffpd.training.metrics import half_interval

OURS = "Scaff-PD, Auto"
PLAIN = "Scaff-PD, average"
NETWORKS = {"efficientnet-lite0": "EfficientNet-Lite0", "resnet18-layer3": "ResNet-18 trunk"}
CONTRASTS: dict[str, tuple[tuple[str, str], ...]] = {
    "Fairness": (
        (table.ONE_FAIR, table.ONE),
        (OURS, PLAIN),
        (OURS, "SCAFFOLD, by clients"),
        (OURS, "Scaff-PD, Fixed"),
        (table.HELD, table.ONE),
        (table.HELD, table.ONE_FAIR),
        ("AFL", OURS),
        ("DRFA", OURS),
        ("Δ-FL, by samples", "FedAvg, by samples"),
        ("Δ-FL, by clients", "FedAvg, by clients"),
        *(
            (f"{name}, {words}", f"FedAvg, {words}")
            for words in table.COUNTED
            for name in ("FedProx", "q-FFL")
        ),
    ),
    "Whose average": (
        ("FedAvg, by clients", "FedAvg, by samples"),
        ("SCAFFOLD, by clients", "SCAFFOLD, by samples"),
        ("SCAFFOLD, by clients", "FedAvg, by clients"),
        (OURS, "FedAvg, by clients"),
        (OURS, "FedAvg, by samples"),
    ),
    "Alone, and models of one's own": (
        (table.ALONE, OURS),
        (table.OWN, table.ALONE),
        (table.OWN_FAIR, table.OWN),
        (table.TUNED, table.OWN),
        (table.DITTO, table.OWN),
    ),
}
ORDER = (
    *(
        f"{name}, {words}"
        for words in table.COUNTED
        for name in ("FedAvg", "FedProx", "SCAFFOLD", "q-FFL", "Δ-FL")
    ),
    *("AFL", "DRFA", PLAIN, OURS, "Scaff-PD, Fixed"),
    *(
        table.ONE,
        table.ONE_FAIR,
        table.HELD,
        table.ALONE,
        table.TUNED,
        table.DITTO,
        table.OWN,
        table.OWN_FAIR,
    ),
)
CHECK = f"{table.OWN_FAIR} (other means)"
FILES = ("runs.csv", "fit.csv", "held.csv")
DPI = 130
Lines = list[dict[str, str]]


@dataclass(frozen=True)
class Made:
    """One piece as its folder has it."""

    folder: Path
    about: dict[str, Any] = field(repr=False)
    runs: dict[str, Lines] = field(repr=False)
    fit: Lines = field(repr=False)
    held: Lines = field(repr=False)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, as it was written down."""
        found: dict[str, Any] = self.about["piece"]["plan"]
        return found

    @property
    def alpha(self) -> float:
        """Of Dirichlet(α)."""
        return float(self.about["piece"]["alpha"])

    @property
    def kind(self) -> str:
        """The network and its features."""
        features = (
            ""
            if self.plan["kind"] == "penultimate"
            else f", {self.plan['coordinates']:,} eNTK coordinates"
        )
        return NETWORKS[self.plan["backbone"]] + features

    @property
    def title(self) -> str:
        """Everything that sets it apart."""
        loss = {"squared": "", "tct": ", TCT's targets", "softmax": ", softmax"}[
            self.about["piece"]["loss"]
        ]
        sizes = ", balanced sizes" if self.plan["balanced"] else ""
        return f"{self.kind}{loss}{sizes}, α = {self.alpha:g}"

    @property
    def main(self) -> bool:
        """Whether it is one of the whole pieces."""
        piece = self.about["piece"]
        return piece["rows"] is None

    def values(self, row: str, column: str) -> NDArray[np.float64]:
        """By partition."""
        return np.array([float(line[column]) for line in self.runs[row]])

    def difference(self, a: str, b: str, column: str) -> NDArray[np.float64] | None:
        """Row a minus row b by partition; `None` where one of them is missing."""
        if a not in self.runs or b not in self.runs:
            return None
        both = [
            {line["partition"]: float(line[column]) for line in self.runs[name]} for name in (a, b)
        ]
        return np.array([both[0][p] - both[1][p] for p in both[0] if p in both[1]])


def load(folder: Path) -> list[Made]:
    """All pieces, whole ones first."""
    found = []
    for path in sorted(folder.glob("*/about.json")):
        runs: dict[str, Lines] = {}
        for line in read_csv(path.with_name("runs.csv")):
            runs.setdefault(line["row"], []).append(line)
        about = json.loads(path.read_text(encoding="utf-8"))
        if not runs:  # the time was up before its first row
            continue
        found.append(
            Made(path.parent, about, runs, *(read_csv(path.with_name(name)) for name in FILES[1:]))
        )
    return sorted(
        found,
        key=lambda made: (not made.main, made.alpha, made.plan["backbone"] == "efficientnet-lite0"),
    )


def shown(values: NDArray[np.float64] | None, sign: bool = True) -> str:
    """Mean ± half of the 95 % interval; bold where it is clear of zero."""
    if values is None or not len(values):
        return "–"
    mean = values.mean()
    half = half_interval(values)
    text = f"{mean:+.1f} ± {half:.1f}".replace("-", "−") if sign else f"{mean:.1f} ± {half:.1f}"
    return f"**{text}**" if sign and abs(mean) > half else text


def contrasts(pieces: Sequence[Made]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """For every question a table: differences of the worst fifth (and of the average) by piece."""
    for question, pairs in CONTRASTS.items():
        header = ["worst 20 % (average)", *(made.title for made in pieces)]
        rows = []
        for a, b in pairs:
            cells = [
                "–"
                if (low := made.difference(a, b, "worst_20")) is None
                else f"{shown(low)} ({shown(made.difference(a, b, 'average')).strip('*')})"
                for made in pieces
            ]
            if any(cell != "–" for cell in cells):
                rows.append([f"{a} − {b}", *cells])
        yield question, header, rows


def contrast_lines(pieces: Sequence[Made]) -> Iterator[tuple[Any, ...]]:
    """The same for a file, partition by partition."""
    for made in pieces:
        for question, pairs in CONTRASTS.items():
            for a, b in pairs:
                low, mean = (made.difference(a, b, column) for column in ("worst_20", "average"))
                if low is not None and mean is not None:
                    numbers = [
                        round(float(v), 3)
                        for d in (low, mean)
                        for v in (d.mean(), half_interval(d))
                    ]
                    each = " ".join(f"{d:.2f}" for d in low)
                    yield (made.folder.name, question, a, b, *numbers, each)


CONTRAST_COLUMNS = (
    "piece",
    "question",
    "row",
    "minus",
    "worst_20",
    "half",
    "average",
    "average_half",
    "partitions",
)


def piece_table(made: Made, dataset: str) -> tuple[list[str], list[list[str]]]:
    """All rows of a piece: accuracies, the distance to Scaff-PD, fit, correlation, choices, the
    paper's numbers.
    """
    paper = NUMBERS.get((dataset, made.alpha), {})
    header = [
        *(
            "row",
            "average",
            "worst 20 %",
            f"worst 20 %, minus {OURS}",
            "trained",
            "loss against accuracy",
            "rounds",
        ),
        *("chosen", "paper: average", "paper: worst 20 %"),
    ]
    rows = []
    for name in (n for n in ORDER if n in made.runs):
        first = made.runs[name][0]
        reported = paper.get("Scaff-PD" if name.startswith("Scaff-PD") else name.split(",")[0])
        if name == PLAIN:
            reported = None
        correlation = made.values(name, "correlation")
        rows.append(
            [
                name,
                shown(made.values(name, "average"), False),
                shown(made.values(name, "worst_20"), False),
                "" if name == OURS else shown(made.difference(name, OURS, "worst_20")),
                f"{made.values(name, 'train_accuracy').mean():.1f}",
                ""
                if np.isnan(correlation).all()
                else f"{np.nanmean(correlation):+.2f}".replace("-", "−"),
                first["rounds"],
                "an l2 for every client" if name == table.ALONE else _greek(first["chosen"]),
                *(("", "") if reported is None else (f"{reported[0]:.1f}", f"{reported[1]:.1f}")),
            ]
        )
    return header, rows


def _greek(words: str) -> str:
    """Letters as in the text."""
    return words.replace("kappa", "κ").replace("rho", "ρ").replace("mu=", "μ=")


def missing(made: Made) -> list[str]:
    """Rows that a later run of the same command adds."""
    rows = made.about["piece"]["rows"]
    wanted = [
        n for n in ORDER if rows is None or n in rows or (n in table.EXACT and n != table.TUNED)
    ]
    return [
        n
        for n in wanted
        if n not in made.runs and (made.about["piece"]["loss"] != "softmax" or n in (rows or ()))
    ]


def certificates(made: Made) -> str:
    """What is proven of the optima, in a sentence."""
    exact = [n for n in (table.ONE, table.ONE_FAIR, table.OWN, table.OWN_FAIR) if n in made.runs]
    if not exact:
        return ""
    most = max(float(made.values(n, "certificate").max()) for n in exact)
    said = f"Duality gaps of the exact rows, in double precision: at most {max(most, 1e-16):.0e}."
    if table.HELD in made.runs:
        gap = float(made.values(table.HELD, "certificate").max())
        said += f" With held-out losses, λ could gain at most {gap:.0e} by another answer."
    if OURS in made.runs:
        ours = made.values(OURS, "certificate")
        said += f" {OURS} ends at most {np.median(ours):.1g} (median; {ours.max():.1g})"
        said += " above the optimum, by its own λ."
    if CHECK in made.runs:
        low, mean = (made.difference(table.OWN_FAIR, CHECK, c) for c in ("worst_20", "average"))
        assert low is not None
        assert mean is not None
        said += (
            f" “{table.OWN_FAIR}” by other means (normal equations and L-BFGS, {len(low)} "
            "partitions) differs"
            f" by at most {np.abs(low).max():.2f} points in the worst fifth and "
            f"{np.abs(mean).max():.2f} on average."
        )
    return said


def made_by(pieces: Sequence[Made]) -> str:
    """Which commits, on what."""
    commits, machines = (
        dict.fromkeys(word for made in pieces for word in made.about[key].split(", "))
        for key in ("commit", "hardware")
    )
    return f"commit {', '.join(commits)}, {', '.join(machines)}"


def page(pieces: Sequence[Made], dataset: str, command: str) -> str:
    """The README of the folder."""
    plan = pieces[0].plan
    whole = [made for made in pieces if made.main]
    others = [made for made in pieces if not made.main]
    title = f"{TITLES[plan['dataset']]}, {plan['clients']} clients: the settings that decide"
    lines = [
        f"# {title}",
        "",
        f"`{command}`",
        "",
        f"Test accuracy in per cent over {plan['seeds']} partitions (Dirichlet(α), then 30 % of "
        "the clients lose 70 % "
        "of their images), mean ± half of the 95 % interval. l2, rates, strengths and rounds "
        f"({', '.join(map(str, plan['stops']))}) were chosen for every row by itself, on a "
        "quarter of every client's "
        f"training images, on the first {pieces[0].about['piece']['choosing']} partitions; no "
        "choice lies at the edge "
        "of what was tried (one that does says `open`), but for rounds, of which nobody has more "
        "or fewer. "
        "“By samples” and “by clients” say what a client counts for. Rows without rounds are "
        "exact optima.",
        "",
        "![Who is served](rows.png)",
        "",
        f"From `*/runs.csv`; {made_by(pieces)}. `--tables` writes this page and its figures again.",
        "",
    ]
    several = [made for made in others if len(made.runs) > 1]
    for some in filter(None, (whole, several)):
        for question, header, rows in contrasts(some):
            if rows:
                lines += [f"## {question}{'' if some is whole else ', other settings'}", ""]
                lines += [*markdown_table(header, rows), ""]
    if any(made.fit for made in pieces):
        lines += [
            "## What explains it",
            "",
            "Scaff-PD after 5 to 100 rounds, and the optimum, for five l2: what χ² gains over the "
            "average.",
            "",
            "![Gain against fit](fit.png)",
            "",
            "![After 5 to 100 rounds](rounds.png)",
            "",
            f"From `*/fit.csv`; {made_by(pieces)}.",
            "",
        ]
    for made in pieces:
        about = made.about
        lines += [f"## {made.title}", "", *markdown_table(*piece_table(made, dataset), words=8), ""]
        lines += [line for line in (certificates(made),) if line]
        gone = missing(made)
        if gone:
            lines += ["", f"Not run yet: {', '.join(gone)}."]
        lines += [
            "",
            f"`{made.folder.name}/`, {about['seconds']:.0f} s of processes on "
            f"{about['hardware']}, commit "
            f"{about['commit']}; {about['images']}",
            "",
        ]
    return "\n".join(lines)


def write(folder: Path, dataset: str, command: str) -> list[Path]:
    """Write the page, the differences and the figures."""
    pieces = load(folder)
    if not pieces or not pieces[0].runs:
        return []
    readme = folder / "README.md"
    readme.write_text(page(pieces, dataset, command), encoding="utf-8")
    done = [readme, write_csv(folder / "contrasts.csv", CONTRAST_COLUMNS, contrast_lines(pieces))]
    done.append(rows_figure(pieces, dataset, folder / "rows.png"))
    fitted = [made for made in pieces if made.fit]
    if fitted:
        done += [
            fit_figure(fitted, folder / "fit.png"),
            rounds_figure(fitted, folder / "rounds.png"),
        ]
    return done


GROUPS = {"by samples": QUIET, "by clients": BLUE, "fair": RED, "own": GREEN}


def group(name: str) -> str:
    """The colour that a row is drawn in."""
    if name.endswith(table.SAMPLES):
        return "by samples"
    if name in (table.ALONE, table.TUNED, table.DITTO, table.OWN, table.OWN_FAIR):
        return "own"
    return "by clients" if name.endswith(table.CLIENTS) or name in (PLAIN, table.ONE) else "fair"


MARKS = ("o", "s", "^")  # networks


def rows_figure(pieces: Sequence[Made], dataset: str, path: Path) -> Path:
    """Worst fifth of every row with its interval, the paper's number beside it; a panel for every
    α.
    """
    import matplotlib.pyplot as plt

    chosen = [made for made in pieces if made.main] or list(pieces)[:1]
    names = [name for name in reversed(ORDER) if any(name in made.runs for made in chosen)]
    alphas, kinds = (
        list(dict.fromkeys(part)) for part in ((m.alpha for m in chosen), (m.kind for m in chosen))
    )
    size = 3 + 3 * len(alphas), 1.2 + 0.3 * len(names)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, len(alphas), figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        panels = dict(zip(alphas, grid[0], strict=True))
        for made in chosen:
            for y, name in enumerate(names):
                if name in made.runs:
                    low = made.values(name, "worst_20")
                    colour = GROUPS[group(name)]
                    look = {"color": colour, "markersize": 6, "capsize": 2, "linewidth": 1.2}
                    look["markerfacecolor"] = colour if kinds.index(made.kind) == 0 else "white"
                    mark = MARKS[kinds.index(made.kind)]
                    panels[made.alpha].errorbar(
                        low.mean(), y, xerr=half_interval(low), fmt=mark, **look
                    )
        for alpha, panel in panels.items():
            paper = NUMBERS.get((dataset, alpha), {})
            for y, name in enumerate(names):
                key = "Scaff-PD" if name == OURS else name.split(",")[0]
                if key in paper and not (name.startswith("Scaff-PD") and name != OURS):
                    panel.plot(paper[key][1], y, "x", color=BLACK, markersize=6)
            panel.set_title(f"α = {alpha:g}", fontsize=10)
            panel.set_xlabel("worst 20 % of the clients, test accuracy in %", fontsize=9)
            panel.grid(axis="x", color=RULE, linewidth=0.5)
        first = grid[0][0]
        first.set_yticks(range(len(names)), names, fontsize=9)
        for label, name in zip(first.get_yticklabels(), names, strict=True):
            label.set_color(GROUPS[group(name)])
        for k, kind in enumerate(kinds):
            first.plot(
                [],
                [],
                MARKS[k],
                color=QUIET,
                markerfacecolor=QUIET if k == 0 else "white",
                label=kind,
            )
        if any((dataset, alpha) in NUMBERS for alpha in alphas):
            first.plot([], [], "x", color=BLACK, label="the paper's number, with a whole ResNet-18")
        names_of = first.get_legend_handles_labels()
        columns = len(names_of[0]) if len(alphas) > 1 else 1
        figure.legend(
            *names_of, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
    return _save(figure, path)


def gains(made: Made, rho: str) -> list[dict[str, Any]]:
    """For every l2 and number of rounds: what χ² gains over the average, and how the average model
    stands.
    """
    by: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for line in made.fit:
        by.setdefault((line["objective"], line["l2"], line["rounds"]), {})[line["partition"]] = line
    out = []
    for (objective, l2, rounds), plain in by.items():
        fair = by.get((rho, l2, rounds), {})
        if objective != "average" or set(fair) != set(plain):
            continue
        gain = np.array([float(fair[p]["worst_20"]) - float(plain[p]["worst_20"]) for p in plain])
        out.append(
            {
                "l2": float(l2),
                "rounds": int(rounds),
                "gain": gain.mean(),
                "half": half_interval(gain),
                "fitted": np.mean([float(v["train_accuracy"]) for v in plain.values()]),
                "correlation": np.nanmean([float(v["correlation"]) for v in plain.values()]),
            }
        )
    return out


SHADES = (RED, ORANGE, GREEN, SKY, PINK)


def fit_figure(pieces: Sequence[Made], path: Path) -> Path:
    """What χ² gains in the worst fifth, and how training loss and test accuracy agree, against
    training accuracy.
    """
    import matplotlib.pyplot as plt

    alphas = sorted({made.alpha for made in pieces})
    kinds = list(dict.fromkeys(made.kind for made in pieces))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            2,
            len(alphas),
            figsize=(1 + 4 * max(1.5, len(alphas)), 6),
            sharex=True,
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for k, alpha in enumerate(alphas):
            for made in (m for m in pieces if m.alpha == alpha):
                colour = SHADES[kinds.index(made.kind)]
                for rho, mark in (("0.5", "^"), ("0.1", "o"), ("0.03", "v")):
                    points = gains(made, rho)
                    if not points:
                        continue
                    x, y, half, corr = (
                        np.array([point[key] for point in points])
                        for key in ("fitted", "gain", "half", "correlation")
                    )
                    look = {"color": colour, "markersize": 4, "linewidth": 0.6, "alpha": 0.7}
                    panels[0][k].errorbar(x, y, half, fmt=mark, **look)
                    panels[1][k].plot(x, corr, "o", color=colour, markersize=4, alpha=0.7)
            panels[0][k].axhline(0, color=BLACK, linewidth=0.8)
            panels[0][k].set_title(f"α = {alpha:g}")
            panels[1][k].set_xlabel("training accuracy of the average model, %")
        panels[0][0].set_ylabel("worst 20 %: χ² minus average, points")
        panels[1][0].set_ylabel("rank correlation of training loss\nand test accuracy over clients")
        for panel in panels.flat:
            panel.grid(color=RULE, linewidth=0.5)
            panel.xaxis.label.set_size(8)
        last = panels[1][-1]
        for kind in kinds:
            last.plot([], [], "s", color=SHADES[kinds.index(kind)], label=kind)
        for rho, mark in (("0.5", "^"), ("0.1", "o"), ("0.03", "v")):
            last.plot([], [], mark, color=QUIET, label=f"χ² with ρ = {rho} (above)")
        figure.legend(
            *last.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
        )
        words = (
            "What fairness gains, over l2 and 5 to 100 rounds, "
            "and what training losses know of who is badly off"
        )
        figure.suptitle(
            words, fontsize=10 if len(alphas) > 1 else 8, color=QUIET, x=0.01, ha="left"
        )
    return _save(figure, path)


CURVES: Mapping[str, tuple[str, str]] = {
    "average": (BLACK, "average (ρ = ∞)"),
    "0.5": (SKY, "ρ = 0.5"),
    "0.1": (ORANGE, "ρ = 0.1"),
    "0.03": (RED, "ρ = 0.03"),
}


def rounds_figure(pieces: Sequence[Made], path: Path) -> Path:
    """Worst fifth after 5 to 100 rounds of Scaff-PD and at the optimum, by ρ, smallest l2."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        columns = min(3, len(pieces))
        lines = -(-len(pieces) // columns)
        size = 0.6 + (2.9 if columns > 2 else 3.4) * columns, 0.4 + 2.9 * lines
        figure, panels = plt.subplots(
            lines, columns, figsize=size, squeeze=False, layout="constrained"
        )
        for panel in panels.flat[len(pieces) :]:
            panel.set_visible(False)
        for panel, made in zip(panels.flat, pieces, strict=False):
            l2 = min({line["l2"] for line in made.fit}, key=float)
            stops = sorted({int(line["rounds"]) for line in made.fit} - {0})
            places = [*stops, 0] if any(line["rounds"] == "0" for line in made.fit) else stops
            for objective, (colour, label) in CURVES.items():
                found = [
                    np.array(
                        [
                            float(line["worst_20"])
                            for line in made.fit
                            if (line["objective"], line["l2"], line["rounds"])
                            == (objective, l2, str(r))
                        ]
                    )
                    for r in places
                ]
                if all(map(len, found)):
                    y = np.array([v.mean() for v in found])
                    half = np.array([half_interval(v) for v in found])
                    panel.plot(
                        range(len(places)),
                        y,
                        "o-",
                        color=colour,
                        label=label,
                        markersize=4,
                        linewidth=1.4,
                    )
                    panel.fill_between(
                        range(len(places)),
                        y - half,
                        y + half,
                        color=colour,
                        alpha=0.12,
                        linewidth=0,
                    )
            panel.set_xticks(range(len(places)), ["∞" if r == 0 else str(r) for r in places])
            panel.set_xlabel("rounds")
            panel.set_title(
                made.title.replace(", α", "\nα").replace(" coordinates", ""), fontsize=9
            )
            panel.grid(color=RULE, linewidth=0.5)
            panel.set_ylabel("worst 20 %, accuracy in %", fontsize=8)
        figure.suptitle(
            f"Scaff-PD, l2 = {l2}; ∞: the optimum", fontsize=10, color=QUIET, x=0.01, ha="left"
        )
        names = panels[0][0].get_legend_handles_labels()
        figure.legend(
            *names, loc="outside lower center", ncols=len(CURVES), frameon=False, fontsize=8
        )
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path
