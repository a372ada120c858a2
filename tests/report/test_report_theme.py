"""Words and marks stand out from their paper in both themes, and no two models look alike."""

from __future__ import annotations

import pytest

from scaffpd.run.page.vega import THEMES, look, places


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_contrast(theme):
    palette = THEMES[theme]
    for paper in (palette["paper"], palette["card"]):
        for word in ("ink", "soft", "gain", "loss", "accent"):
            assert contrast(palette[word], paper) >= 4.5, word
        for mark in palette["series"]:
            assert contrast(mark, paper) >= 3, mark
    assert contrast(palette["caution"], palette["caution-paper"]) >= 4.5
    for word in ("gain", "loss", "ink", "soft"):
        assert contrast(palette[word], "#ffffff" if theme == "light" else palette["card"]) >= 4.5


def test_thirty_models_look_different():
    looks = [look(place)[:2] for place in places(["before", "after", *[""] * 28])]
    assert len(set(looks)) == 30
    assert places(["", "before", "", "after"]) == [2, 0, 3, 1]
    assert places([""]) == [0]
