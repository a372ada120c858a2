"""Every client under every model: the rows of the table on the page and on the terminal."""

from __future__ import annotations

from typing import NamedTuple

from scaffpd.numbers import change, measured, plain
from scaffpd.run.record import ClientScore, ModelRecord, RunRecord

FEW = 30  # test rows: with fewer, one row moves an accuracy by more than three points
MOST_MODELS = 4  # that are shown side by side


class Cell(NamedTuple):
    """A number to sort by, how it is shown, and its tone: gain, loss or none."""

    value: float | None
    text: str
    tone: str = ""


class ClientLine(NamedTuple):
    """One client: its scores under every shown model, and the change from before to after."""

    score: ClientScore  # under the model that the run is about
    values: list[Cell]
    change: Cell
    few: bool  # whether its scores are uncertain


def shown_models(run: RunRecord) -> list[ModelRecord]:
    """Return the models that are shown side by side, before and after first.

    All of up to four, else those that are compared.
    """
    scored = [model for model in run.models if model.overall]
    order = {"before": 0, "after": 1, "": 2}
    ranked = sorted(scored, key=lambda model: order[model.role])
    if len(ranked) <= MOST_MODELS:
        return ranked
    return [model for model in ranked if model.role] or ranked[:MOST_MODELS]


def client_lines(run: RunRecord) -> list[ClientLine]:
    """Return a line for every client."""
    models = shown_models(run)
    gains = run.gains(*run.pair) if run.pair else {}
    tested = run.tested
    main = run.main.by_client
    lines = []
    for client in run.clients:
        gain = gains.get(client)
        clear = tested.get(client)
        moved = None if gain is None else run.sign * gain
        text = change(moved, run.measure)
        tone = "" if gain is None or clear is False else tone_of(gain, text)
        score = main.get(client) or ClientScore(client=client)
        lines.append(
            ClientLine(
                score,
                [_cell(run, model.by_client.get(client)) for model in models],
                Cell(moved, f"{text}*" if clear else text, tone),
                uncertain(run, score),
            )
        )
    return lines


def tone_of(gain: float, text: str) -> str:
    """Return the colour of a change: none where it is written as zero."""
    if not text.startswith(("+", "−")):
        return ""
    return "gain" if gain > 0 else "loss"


def uncertain(run: RunRecord, score: ClientScore) -> bool:
    """Return whether a client has too few held-out rows for its number to mean much."""
    return run.split == "test" and score.test_rows is not None and score.test_rows < FEW


def _cell(run: RunRecord, score: ClientScore | None) -> Cell:
    """Show a score, with its standard deviation over seeds where there is one."""
    value = run.value(score) if score else None
    text = measured(value, run.measure)
    if score is not None and score.deviation is not None:
        spread = f"{100 * score.deviation:.1f}" if run.upwards else plain(score.deviation)
        text = f"{text} ± {spread}"
    return Cell(value, text)
