"""The picture of the measurements: four panels, each of one module's rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from harness import Row, shown
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.style import BLUE, GREEN, ORANGE, PINK, QUIET, RULE, STYLE

LOSSES = {"squared": BLUE, "logistic": ORANGE, "softmax": GREEN}


def draw(rows: dict[str, list[Row]], file: Path) -> None:
    """Write the picture; a panel whose module was not measured says so."""
    panels = {
        "simulators": simulators,
        "round_cost": round_cost,
        "certified": certified,
        "scale": scale,
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 8.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        for axes, (name, panel) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
            if rows.get(name):
                panel(axes, rows[name])
            else:
                axes.set_axis_off()
                axes.text(
                    0.5,
                    0.5,
                    f"{name}: not measured yet",
                    ha="center",
                    color=QUIET,
                    transform=axes.transAxes,
                )
        figure.savefig(file, dpi=130, metadata={"Software": None})


def bars(axes: Any, names: list[str], values: list[float], texts: list[str], left: float) -> None:
    """Horizontal bars on a logarithmic axis, the first on top, with their numbers beside them; ours
    in blue.
    """
    axes.barh(
        names,
        values,
        color=[BLUE if name.startswith("scaffpd") else "#b5b5b5" for name in names],
        height=0.65,
    )
    axes.set_xscale("log")
    for place, (value, text) in enumerate(zip(values, texts, strict=True)):
        axes.annotate(
            text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axes.invert_yaxis()
    axes.set_xlim(left, 4 * max(values))
    axes.tick_params(axis="y", length=0)
    axes.minorticks_off()


def simulators(axes: Any, rows: list[Row]) -> None:
    """Steps a second of those who have a speed."""
    rows = sorted(
        (row for row in rows if row["steps/s"] is not None), key=lambda row: -row["steps/s"]
    )
    names = [row["candidate"] for row in rows]
    speeds = [row["steps/s"] for row in rows]
    bars(axes, names, speeds, [shown(speed) for speed in speeds], 0.6 * min(speeds))
    axes.set_title("Simulators: FedAvg on digits")
    axes.set_xlabel("local steps of clients a second (more is better)")


def round_cost(axes: Any, rows: list[Row]) -> None:
    """The dearest N for every J, and the limit as a dashed line."""
    for loss, colour in LOSSES.items():
        here = [row for row in rows if row["loss"] == loss]
        steps = sorted({row["J"] for row in here})
        if not steps:
            continue
        worst = [
            max((row for row in here if row["J"] == J), key=lambda row: row["round/gradient"])
            for J in steps
        ]
        limits = [row["at most"] * row["round/gradient"] / row["of its unit"] for row in worst]
        axes.loglog(steps, [row["round/gradient"] for row in worst], "o-", color=colour, label=loss)
        axes.loglog(steps, limits, "--", color=colour, linewidth=1)
    axes.plot([], [], "--", color=QUIET, linewidth=1, label="aim (softmax as logistic)")
    axes.set_title("A Scaff-PD round in full gradients")
    axes.set_xlabel("J, local steps a round")
    axes.set_ylabel("round ÷ one gradient of all data, at the dearest N")
    finish(axes)


def certified(axes: Any, rows: list[Row]) -> None:
    """Seconds at the largest size; who was stopped or failed has words in place of a bar."""
    size = max((row["N"], row["m"], row["d"]) for row in rows)
    here = [row for row in rows if (row["N"], row["m"], row["d"]) == size]
    times = {row["candidate"]: row["seconds"] for row in here if isinstance(row["seconds"], float)}
    here.sort(key=lambda row: times.get(row["candidate"], float("inf")))
    least = min(times.values())
    values = [times.get(row["candidate"], 0.6 * least) for row in here]
    texts = [" ".join(filter(None, (_seconds(row["seconds"]), _short(row)))) for row in here]
    bars(axes, [row["candidate"] for row in here], values, texts, 0.6 * least)
    axes.set_title("To a certified gap of 1e-8")
    axes.set_xlabel(f"seconds for N = {size[0]}, m = {size[1]}, d = {size[2]} (less is better)")


def _seconds(value: Any) -> str:
    return value if isinstance(value, str) else f"{shown(value)} s"


def _short(row: Row) -> str:
    return f"({row['note']})" if row["note"].startswith("at gap") else ""


def scale(axes: Any, rows: list[Row]) -> None:
    """Seconds of a round against the number of clients."""
    for method, colour in (("FedAvg", PINK), ("Scaffold", GREEN)):
        here = [row for row in rows if (row["part"], row["method"]) == ("many clients", method)]
        line(axes, here, colour, f"{method}, 1,000 clients a round")
    for loss in ("squared", "logistic"):
        here = [row for row in rows if (row["part"], row["loss"]) == ("growth in N", loss)]
        line(axes, here, LOSSES[loss], f"Scaff-PD, everybody, {loss} loss")
    axes.set_title("More clients")
    axes.set_xlabel("N, clients")
    axes.set_ylabel("seconds a round")
    axes.set_ylim(top=8 * axes.get_ylim()[1])  # room for the legend
    finish(axes)


def line(axes: Any, rows: list[Row], colour: str, label: str) -> None:
    """Time against N."""
    if rows:
        axes.loglog(
            [row["N"] for row in rows],
            [row["round, s"] for row in rows],
            "o-",
            color=colour,
            label=label,
        )


def finish(axes: Any) -> None:
    """A quiet grid and a legend."""
    axes.grid(color=RULE, linewidth=0.6)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8.5)
