"""rounds.csv, of a trained run or of a deployed one."""

from __future__ import annotations

from pathlib import Path

from scaffpd.report.data import Round
from scaffpd.report.files import Row, megabytes, number, table, whole


def read_rounds(path: Path, measure: str, model: str | None = None) -> tuple[Round, ...]:
    """All rows; `model` names the one of a table without that column, and joins its segments.

    A segment of a deployed run counts its traffic from zero and repeats the point where the last one ended.
    """
    rows = table(path, "round", *(() if model else ("model",)))
    found: list[Round] = []
    segment, spent, last = "0", (0.0, 0.0), (0.0, 0.0)
    for row in rows:
        if row.get("segment", segment) != segment:
            segment, spent = row["segment"], last
            if found and found[-1].number == int(row["round"]):
                found.pop()
        one = _round(row, measure, model or row.get("model", ""), spent)
        last = (one.exchanges or 0.0, one.megabytes or 0.0)
        found.append(one)
    return tuple(found)


def _round(row: Row, measure: str, model: str, spent: tuple[float, float]) -> Round:
    exchanges, sent = number(row, "exchanges"), megabytes(row)
    return Round(
        model=model,
        number=whole(row, "round") or 0,
        certificate=number(row, "certificate"),
        exchanges=None if exchanges is None else exchanges + spent[0],
        megabytes=None if sent is None else sent + spent[1],
        absent=whole(row, "absent") or 0,
        mean=number(row, f"mean_{measure}"),
        worst_20=number(row, f"worst_20_{measure}"),
        losses=_of_clients(row, "loss["),
        weights=_of_clients(row, "weight["),
    )


def _of_clients(row: Row, start: str) -> dict[str, float]:
    """The columns loss[NAME] or weight[NAME] by client, without empty cells."""
    names = [name for name in row if name.startswith(start) and name.endswith("]")]
    values = {name[len(start) : -1]: number(row, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
