"""The picture of a partition draws every client, says the sizes, and refuses what cannot be drawn."""

from __future__ import annotations

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.errors import InputError
from scaffpd.figures import partition_picture


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_few_classes_have_numbers_and_names(tmp_path):
    y = np.repeat([0, 1, 2], [5, 1200, 7])
    parts = [np.arange(5), np.arange(5, 1212)]
    figure = partition_picture(parts, y, ["cat", "dog", "elephant"], "A title")
    map_, sizes = figure.axes
    assert texts(map_) == ["5", "1,200", "7"]
    assert [label.get_text() for label in map_.get_xticklabels()] == ["cat", "dog", "elephant"]
    assert texts(sizes) == ["5 (1)", "1,207 (2)"]
    assert [bar.get_width() for bar in sizes.patches] == [5, 1207]
    assert figure.texts[0].get_text() == "A title"
    figure.savefig(tmp_path / "picture.png", dpi=40)


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (20, 20), (20, 100), (5, 200), (100, 10)])
def test_any_shape_can_be_drawn(tmp_path, clients, classes):
    y = np.repeat(np.arange(classes), 200 // min(classes, 100))
    parts = sp.data.quantity_skew(y, clients, 1.0, minimum=1)
    figure = partition_picture(parts, y)
    assert (
        figure.texts[0].get_text()
        == f"{len(y):,} samples of {classes} classes at {clients} clients"
    )
    mesh = figure.axes[0].collections[-1].get_array()
    np.testing.assert_array_equal(np.ma.filled(mesh, 0).sum(1), [len(rows) for rows in parts])
    figure.savefig(tmp_path / "picture.png", dpi=40)


@pytest.mark.parametrize("most", [1, 2, 9, 5000])
def test_the_colour_bar_counts_in_whole_numbers(most):
    y = np.repeat(np.arange(30), most)
    scale = partition_picture([np.arange(len(y)), [0]], y).axes[-1]
    ticks = [
        tick for tick in scale.get_xticks() if scale.get_xlim()[0] <= tick <= scale.get_xlim()[1]
    ]
    assert ticks == [int(tick) for tick in ticks]
    assert 0 < min(ticks) <= max(ticks) <= max(most, 2)


def test_labels_name_themselves():
    figure = partition_picture([[0, 1], [2]], np.array(["b", "a", "b"]))
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["a", "b"]


@pytest.mark.parametrize(
    ("parts", "y", "classes", "words"),
    [
        ([], [0], None, "at least one client"),
        ([[0]], [[0]], None, "a vector of labels"),
        ([[0], []], [0, 1], None, "from 0 to 1 at client 1"),
        ([[0, 2]], [0, 1], None, "from 0 to 1 at client 0"),
        ([[0]], [0, 1], ["one"], "labels from 0 to 0 for 1 classes"),
        ([[0]], [0, 1], "picture.png", "call .savefig"),
        ([0, 1], [[0], [1, 2]], None, "a vector of labels as its second argument"),
        ([(np.zeros((2, 3)), np.zeros(2))], [0, 1], None, "row numbers from 0 to 1 at client 0"),
        ((["a"], [np.array([0])]), [0, 1], None, "row numbers from 0 to 1 at client 0"),
    ],
)
def test_mistakes(parts, y, classes, words):
    with pytest.raises(InputError, match=words):
        partition_picture(parts, y, classes)
