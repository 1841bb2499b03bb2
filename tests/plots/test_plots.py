"""Pictures: what is on them, and on which Axes."""

import io
import math

import pytest
import torch

import laplace_invariance as li
from laplace_invariance import datasets, plots
from laplace_invariance.layers import PATHS
from laplace_invariance.marglik import Profile
from laplace_invariance.metrics import (
    Invariance,
    InvarianceReport,
    JacobianSpectrum,
    LayerReport,
    PathReport,
)


@pytest.fixture
def ax():
    figure = plots.figure((6.4, 4.8))
    yield figure.add_subplot()
    figure.savefig(io.BytesIO())  # what cannot be drawn fails here


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def lines(ax):
    return {line.get_label(): line for line in ax.get_lines()}


VALUES = {"rotation": [0.0, 1.0, 3.0], "x_scale": [0.0, 0.1, 0.2], "shear": [0.0, 0.0, 0.1]}


def test_ranges_have_their_true_value_in_their_colour(ax):
    assert (
        plots.ranges_over_epochs([0, 1, 2], VALUES, datasets.true_ranges("fully_rotated"), ax) is ax
    )
    assert labels(ax) == ["rotation", "x scale", "shear", "true value"]
    rotation = lines(ax)["rotation"]
    assert list(rotation.get_ydata()) == VALUES["rotation"]
    (dashed,) = [line for line in ax.get_lines() if list(line.get_ydata()) == [math.pi, math.pi]]
    assert dashed.get_color() == rotation.get_color()
    assert dashed.is_dashed()
    assert rotation.get_linewidth() > 1.5 * lines(ax)["x scale"].get_linewidth()
    assert lines(ax)["shear"].get_alpha() < 1
    for unit in ("radians", "half-widths", "log factors"):
        assert unit in ax.get_ylabel()


def test_a_true_value_that_two_share_is_dashed_in_turn(ax):
    values = {"x_scale": [0.0, 0.5], "y_scale": [0.0, 0.6]}
    plots.ranges_over_epochs([0, 1], values, datasets.true_ranges("scaled"), ax)
    dashed = [line for line in ax.get_lines() if list(line.get_ydata()) == [math.log(2)] * 2]
    assert [line.get_color() for line in dashed] == [
        lines(ax)[name].get_color() for name in ("x scale", "y scale")
    ]


def test_without_a_truth_all_ranges_are_alike(ax):
    plots.ranges_over_epochs([0, 1, 2], VALUES, None, ax)
    assert labels(ax) == ["rotation", "x scale", "shear"]
    assert len({line.get_linewidth() for line in ax.get_lines()}) == 1
    assert len({line.get_color() for line in ax.get_lines()}) == 3


@pytest.mark.parametrize("channels", [1, 3])
def test_samples_show_the_original_first(ax, channels):
    images = torch.rand(2, channels, 5, 7)
    augmentation = li.AffineImage(init={"rotation": 1.0})
    state = torch.get_rng_state()
    assert plots.samples(augmentation, images, 3, ax, "turned") is ax
    assert torch.equal(torch.get_rng_state(), state)
    mosaic = torch.as_tensor(ax.get_images()[0].get_array().filled())
    assert mosaic.shape[:2] == (2 * 5, 4 * 7)
    mosaic = mosaic.view(2, 5, 4, 7, channels).permute(0, 2, 4, 1, 3)
    torch.testing.assert_close(mosaic[:, 0], images)
    draws = augmentation.sample(2, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(mosaic[:, 1:], augmentation.transform(images, draws))
    assert ax.get_title() == "turned"
    assert len(ax.get_xticks()) == len(ax.get_yticks()) == 0
    assert len(ax.get_lines()) == 3 + 1
    assert {text.get_text() for text in ax.texts} == {"original", "samples"}


def test_samples_of_a_finite_group_are_its_elements(ax):
    plots.samples(li.FiniteGroup("flips"), torch.rand(2, 1, 5, 5), 9, ax)
    assert ax.get_images()[0].get_array().shape == (10, 5 * (1 + 4))


def test_samples_refuses_what_has_no_colour(ax):
    with pytest.raises(ValueError, match=r"1 or 3.*\[2, 4, 5, 5\]"):
        plots.samples(li.AffineImage(), torch.rand(2, 4, 5, 5), 3, ax)


def test_evidence_terms_put_the_evidence_first(ax):
    terms = {
        "log evidence": [-3.0, -2.0],
        "log likelihood": [-2.0, -0.5],
        "half scatter": [-1.0, -1.5],
    }
    assert plots.evidence_terms([0, 5], terms, ax) is ax
    assert labels(ax) == list(terms)
    for name, values in terms.items():
        assert list(lines(ax)[name].get_xdata()) == [0, 5]
        assert list(lines(ax)[name].get_ydata()) == values
    assert lines(ax)["log evidence"].get_linewidth() > lines(ax)["log likelihood"].get_linewidth()
    assert "per datum" in ax.get_ylabel()


def test_flow_of_rotations_keeps_radii_and_ends_where_the_transformation_does(ax):
    augmentation = li.AffineImage(init={"rotation": 1.0})
    assert plots.flow(augmentation, ax, n_paths=3, n_points=2) is ax
    paths = [
        torch.as_tensor(line.get_xydata()) for line in ax.get_lines() if len(line.get_xdata()) > 5
    ]
    assert len(paths) == 3 * 2 * 2
    for path in paths:
        torch.testing.assert_close(path.norm(dim=-1), path[0].norm().expand(len(path)))
    matrices = augmentation.matrices(augmentation.fixed(3)[0])[:, :2, :2]
    for path, matrix in zip(paths, matrices.repeat(4, 1, 1), strict=True):
        torch.testing.assert_close(path[-1], matrix @ path[0])
    assert ax.yaxis_inverted()
    assert ax.get_aspect() == 1


def test_flow_of_points_has_y_upwards_and_of_others_is_refused(ax):
    plots.flow(li.AffinePoints(init={"shear": 0.3}), ax, n_paths=2, n_points=2)
    assert not ax.yaxis_inverted()
    with pytest.raises(ValueError, match=r"got matrices \[4, 4\]"):
        plots.flow(li.AffinePoints(3), ax)
    with pytest.raises(ValueError, match="got FiniteGroup"):
        plots.flow(li.FiniteGroup(), ax)


def test_accuracies_are_grouped_by_kind(ax):
    table = {"fully_rotated": {"plain": 0.686, "evidence": 0.88}, "original": {"evidence": 0.928}}
    assert plots.accuracies(table, ax) is ax
    assert labels(ax) == ["plain", "evidence"]
    assert [text.get_text() for text in ax.texts] == ["68.6", "88.0", "92.8"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["fully rotated", "original"]
    plain, evidence = ax.containers
    assert plain[0].get_height() == pytest.approx(68.6)
    assert 0 < evidence[0].get_x() - plain[0].get_x() < 0.5  # side by side
    assert round(evidence[1].get_x() - evidence[0].get_x(), 6) == 1
    assert ax.get_ylim()[0] == 60
    assert ax.get_ylim()[1] > 95


@pytest.mark.parametrize("table", [{}, {"original": {"plain": 92.8}}])
def test_accuracies_are_fractions(ax, table):
    with pytest.raises(ValueError, match="between 0 and 1"):
        plots.accuracies(table, ax)


# Layers.


def path(place, name, kind, relative, precision, **precisions):
    precisions = precisions or {"weight": precision, "bias": 1000.0}
    return PathReport(
        place, name, kind, 9, precision, precisions, 1.0, 1.0, 0.1, relative, relative > 0.5
    )


@pytest.fixture
def report():
    rows = [
        path("layer1", "conv", "CONV", 0.75, 2.0),
        path(
            "layer1",
            "f_fc",
            "F-FC",
            0.25,
            300.0,
            **{"theta_1.weight": 300.0, "theta_2.weight": 5.0, "theta_1.bias": 7e4},
        ),
        path("layer2", "conv", "CONV", 0.03, 50.0),
        path("layer2", "f_fc", "F-FC", 0.97, 0.5),
        path("last", "own", "Strange", 1.0, 0.1),
    ]
    return LayerReport(rows)


def test_shares_of_a_layer_are_stacked_up_to_all(ax, report):
    assert plots.layer_shares(report, ax) is ax
    bars = [bar for container in ax.containers for bar in container]
    found = [
        (round(bar.get_x() + bar.get_width() / 2, 6), bar.get_y(), bar.get_height()) for bar in bars
    ]
    expected = [(0, 0, 75), (0, 75, 25), (1, 0, 3), (1, 3, 97), (2, 0, 100)]
    assert found == [pytest.approx(one) for one in expected]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["layer1", "layer2", "last"]
    assert [text.get_text() for text in ax.texts] == [
        "75",
        "25",
        "97",
        "100",
    ]  # no room for the others
    assert labels(ax) == ["Strange", "F-FC", "CONV"]
    colours = [bar.get_facecolor() for bar in bars]
    assert colours[0] == colours[2] != colours[1] == colours[3]
    assert len(set(colours)) == 3


def test_precisions_are_lines_over_layers_on_a_logarithmic_scale(ax, report):
    assert plots.layer_precisions(report, ax) is ax
    assert ax.get_yscale() == "log"
    drawn = [
        (list(line.get_xdata()), list(line.get_ydata()))
        for line in ax.get_lines()
        if len(line.get_xdata())
    ]
    assert ([0, 1], [2.0, 50.0]) in drawn
    assert ([0, 1], [300.0, 0.5]) in drawn
    assert ([2], [0.1]) in drawn
    assert ([0, 0, 1], [300.0, 5.0, 0.5]) in drawn  # every weight's, and no bias's
    assert all(value < 1000 for _, values in drawn for value in values)
    assert labels(ax) == ["Strange", "F-FC", "CONV"]
    assert "prior precision" in ax.get_ylabel()


def test_kinds_have_the_same_colours_in_every_picture(ax, report):
    plots.layer_shares(report, ax)
    other = plots.layer_shares(
        LayerReport([row for row in report.rows if row.kind == "F-FC"]),
        plots.figure((3, 3)).subplots(),
    )
    assert {lines(axes)["F-FC"].get_color() for axes in (ax, other)} == {PATHS["f_fc"].colour}


def test_invariances_have_a_mark_for_each_data_set():
    axes = plots.figure((9, 3)).subplots(1, 3)
    here, there = Invariance(0.5, 0.25, 0.75), Invariance(0.0, 1.0, -1.0)
    assert (
        plots.invariances(
            InvarianceReport({"a": {"in": here, "out": there}, "b": {"in": here}}), axes
        )
        is axes
    )
    assert [list(lines(ax)["in"].get_ydata()) for ax in axes] == [
        [0.5, 0.5],
        [0.25, 0.25],
        [0.25, 0.25],
    ]
    assert [list(lines(ax)["out"].get_ydata()) for ax in axes] == [[1e-6], [1.0], [2.0]]
    assert labels(axes[-1]) == ["in", "out"]
    assert [text.get_text() for text in axes[0].get_xticklabels()] == ["a", "b"]


def test_spectra_have_singular_values_and_the_orbit(ax):
    found = [JacobianSpectrum((3.0, 2.0), 0.5), JacobianSpectrum((4.0, 1.0), 0.0)]
    assert plots.spectra([1, 5], found, ax) is ax
    assert [list(line.get_ydata()) for line in ax.get_lines()] == [
        [3.0, 4.0],
        [2.0, 1.0],
        [0.5, 1e-3],
    ]
    assert labels(ax) == ["singular values", "along orbits"]
    assert ax.get_yscale() == "log"


def test_errors_are_on_a_logarithmic_scale_from_the_first_epoch(ax):
    assert plots.errors({"rich-1": [1e-1, 1e-4], "selu-4": [1e-1, 1e-2, 1e-3]}, "error", ax) is ax
    assert ax.get_yscale() == "log"
    assert labels(ax) == ["rich-1", "selu-4"]
    assert list(lines(ax)["selu-4"].get_xdata()) == [1, 2, 3]
    assert list(lines(ax)["rich-1"].get_ydata()) == [1e-1, 1e-4]


def test_codes_have_a_line_for_every_entry(ax):
    codes = torch.randn(7, 3)
    assert plots.orbit_codes(codes, ax) is ax
    for line, values in zip(ax.get_lines(), codes.T, strict=True):
        assert list(line.get_ydata()) == values.tolist()


def test_evidence_by_range_marks_what_was_learnt_and_what_is_true(ax):
    repeats = ((-1.0, -0.5, -0.51), (-1.2, -0.6, -0.59))
    found = Profile("rotation", (0.0, 1.0, 2.0), repeats, 1.0)
    assert plots.evidence_by_range(found, 1.5, ax) is ax
    assert labels(ax) == ["nearly the best", "learnt: ±1.000", "true: ±1.500"]
    assert list(lines(ax)["learnt: ±1.000"].get_xdata()) == [1.0, 1.0]
    curve = next(line for line in ax.get_lines() if len(line.get_xdata()) == 3)
    assert list(curve.get_ydata()) == pytest.approx([-1.1, -0.55, -0.55])
    assert len(ax.collections) == 1  # the band of errors
    assert ax.get_xlabel() == "rotation, radians"


def test_evidence_by_range_needs_neither_errors_nor_a_truth(ax):
    plots.evidence_by_range(Profile("shear", (0.0, 1.0), ((-1.0, -0.5),), 1.0), None, ax)
    assert labels(ax) == ["nearly the best", "learnt: ±1.000"]
    assert not ax.collections


def test_gains_are_sorted_and_grey_where_they_are_not_clear(ax):
    names = ["shear", "x_scale", "rotation", "hue"]
    values, errors = [-0.2, 0.01, 0.3, -math.inf], [0.02, 0.03, 0.01, 0.0]
    assert plots.gains(names, values, errors, [True, False, True, True], ax) is ax
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == ["rotation", "x scale", "shear", "hue"]
    bars = [bar for bar in ax.patches if bar.get_width()]
    assert [bar.get_width() for bar in bars] == [0.3, 0.01, -0.2]
    red, green, blue, _ = zip(*(bar.get_facecolor() for bar in bars), strict=True)
    are_grey = [len(set(one)) == 1 for one in zip(red, green, blue, strict=True)]
    assert are_grey == [False, True, False]
    assert green[0] > red[0]
    assert red[2] > green[2]
    low, high = ax.get_ylim()
    assert low > high  # the first one is on top
