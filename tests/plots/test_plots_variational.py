"""Figures of the variational experiment: filters, ranges from several starts, bounds."""

import pytest
import torch

from laplace_invariance import plots


def test_filter_bank_has_a_row_for_every_feature():
    ax = plots.figure((4, 3)).subplots()
    filters = torch.randn(2, 3, 2, 5, 7)
    assert plots.filter_bank(filters, ax) is ax
    mosaic = (
        torch.as_tensor(ax.get_images()[0].get_array().filled(0))
        .view(2, 7, 3, 9)
        .permute(0, 2, 1, 3)
    )
    torch.testing.assert_close(mosaic[:, :, 1:-1, 1:-1], filters.mean(2))
    with pytest.raises(ValueError, match=r"got shape \[3, 5, 7\]"):
        plots.filter_bank(torch.randn(3, 5, 7), ax)


def test_ranges_and_bounds_are_drawn_with_the_truth():
    left, right = plots.figure((8, 3)).subplots(1, 2)
    plots.ranges_from_starts({"learnt": [[5, 60], [175, 80]], "point": [[5, 6]]}, 90, left)
    drawn = [list(line.get_ydata()) for line in left.get_lines()]
    assert drawn == [[5, 60], [175, 80], [5, 6], [90, 90]]
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "learnt",
        "point",
        "true",
    ]
    plots.bound_by_range({"fixed": [(90, -0.5), (0, -0.9)], "learnt": [(80, -0.4)]}, 90, right)
    drawn = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in right.get_lines()
    }
    assert drawn["fixed"] == ([0, 90], [-0.9, -0.5])
    assert drawn["learnt"] == ([80], [-0.4])
