"""Figures of tables: lines against numbers, and predictions over the plane."""

from laplace_invariance import plots


def test_lines_are_means_and_runs_are_dots():
    ax = plots.figure((4, 3)).subplots()
    values = {"a": {100: [1.0, 3.0], 10: [5.0]}, "b": {10: [4.0]}}
    assert plots.against(values, ax, x="images", y="accuracy", log_y=True) is ax
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.get_lines()]
    assert lines == [([10, 100], [5, 2]), ([100, 100], [1, 3]), ([10], [4])]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["10", "100"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_predictions_and_points_are_drawn():
    ax = plots.figure((4, 3)).subplots()
    picture = {
        "reach": 2.0,
        "probabilities": [[0.0, 1.0], [0.5, 0.5]],
        "points": {"0": [[1.0, 0.5]], "1": [[0.0, -1.0], [0.0, 1.0]]},
    }
    plots.predictive(picture, ax)
    (image,) = ax.get_images()
    assert image.get_array().tolist() == [[0, 1], [0.5, 0.5]]
    assert list(image.get_extent()) == [-2, 2, -2, 2]
    assert image.origin == "lower"
    assert [line.get_marker() for line in ax.get_lines()] == ["x", "o"]
    assert list(ax.get_lines()[1].get_ydata()) == [-1, 1]
