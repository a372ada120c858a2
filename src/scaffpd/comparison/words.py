"""What a comparison found, in sentences."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from scaffpd.metrics import a_fifth

if TYPE_CHECKING:
    from scaffpd.comparison.tables import Comparison, Line


def verdict(comparison: Comparison, line: Line) -> str:
    """Whether a method's worst 20 % is the best, or within one standard deviation of the best."""
    what = f"worst-20 % test {'accuracy' if comparison.classification else 'loss'}"
    ranked = [other for other in comparison.table if not other.failures]
    if line.failures:
        return f"{line.method} is not ranked: {line.failures}"
    own, best, name = _value(comparison, line), ranked[0], comparison.criterion
    if len(ranked) == 1:
        return f"{line.method} is the only method that is ranked, with a {what} of {own}."
    if line.mean[name] == best.mean[name]:
        other = ranked[1] if line is best else best
        return f"{line.method} has the best {what}: {own}, with {other.method} at {_value(comparison, other)}."
    gap, deviation = abs(best.mean[name] - line.mean[name]), best.deviation[name]
    opening = f"{line.method}'s {what} of {own} is"
    closing = f"the best, {best.method} ({_value(comparison, best)})"
    if math.isnan(deviation):
        size = f"{100 * gap:.1f} points below" if comparison.classification else f"{gap:{digits(gap)}} above"
        return f"{opening} {size} {closing}; a single seed has no standard deviation to judge that by."
    distance = "within one standard deviation of" if gap <= deviation else "more than one standard deviation from"
    return f"{opening} {distance} {closing}."


def caption(comparison: Comparison, headings: Collection[str]) -> list[str]:
    """What the numbers in columns with these headings are, and who has none."""
    setting, N, seeds = comparison.setting, comparison.clients, len(comparison.setting.seeds)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else f"seed {setting.seeds[0]}"
    tuned = "rates and strengths (ρ, q, θ, μ)" if setting.strengths else "rates"
    most = 2 * setting.tune if setting.climb else setting.tune
    chosen = f"{tuned} chosen among at most {most} on validation rows"
    if setting.choosing is not None:
        chosen += f" of {'the first seed' if len(setting.choosers) == 1 else f'{len(setting.choosers)} seeds'}"
    rates = chosen if setting.tune > 1 else "automatic rates"
    ends = "worst and best" if "best 20 %" in headings else "worst"
    spreads = " and ".join(name for name in ("sd", "Gini") if name in headings)
    sentences = [
        f"On test rows, {over}, after {setting.rounds} rounds; {rates}.",
        f"{ends.capitalize()} 20 %: mean over the {a_fifth(N)} of {N} clients that fare {ends}"
        + (f"; {spreads}: over all clients." if spreads else "."),
        "J: local steps a round (–: not a setting), on so many samples each; exchanges and MB (up and down, all "
        "clients): of the whole run.",
    ]
    failed = [f"{line.method} is not ranked: {line.failures}" for line in comparison.table if line.failures]
    return [" ".join(sentences), *failed] if N else failed


def _value(comparison: Comparison, line: Line) -> str:
    name = comparison.criterion
    words = with_deviation(line.mean[name], line.deviation[name], comparison.classification)
    return f"{words} %" if comparison.classification else words


def with_deviation(mean: float, deviation: float, percent: bool) -> str:
    """Mean ± deviation, with as many digits, or the mean alone where there is no deviation."""
    form, factor = (".1f", 100) if percent else (digits(mean), 1)
    first = f"{factor * mean:{form}}"
    return first if math.isnan(deviation) else f"{first} ± {factor * deviation:{form}}"


def digits(value: float) -> str:
    """Three digits behind the point, or powers of ten where they would say nothing."""
    return ".3f" if value == 0 or 1e-2 <= abs(value) < 1e3 else ".1e"
