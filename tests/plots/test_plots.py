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


@pytest.fixture
def draw_ranges():
    """Return a function that draws ranges on as many axes as they have units."""

    def draw(epochs, values, truth, **options):
        n_units = len(plots.by_unit(values, options.get("size")))
        figure = plots.figure((9, 3))
        axes = figure.subplots(1, n_units, squeeze=False)[0]
        assert plots.ranges_over_epochs(epochs, values, truth, axes, **options) is axes
        figure.savefig(io.BytesIO())
        return axes

    return draw


def test_ranges_of_different_units_never_share_axes(draw_ranges):
    degrees, factors = draw_ranges([0, 1, 2], VALUES, datasets.true_ranges("fully_rotated"))
    assert (degrees.get_ylabel(), factors.get_ylabel()) == ("± degrees", "factor, up to")
    assert labels(degrees) == ["rotation", "true"]
    assert labels(factors) == ["x scale", "shear"]
    rotation = lines(degrees)["rotation"]
    assert list(rotation.get_ydata()) == pytest.approx([0, 57.29578, 171.88734])
    assert list(lines(factors)["x scale"].get_ydata()) == pytest.approx([1, 1.10517, 1.2214], 1e-4)
    assert list(lines(degrees)["true"].get_ydata()) == [180, 180]
    assert lines(degrees)["true"].is_dashed()
    assert rotation.get_linewidth() > 1.5 * lines(factors)["x scale"].get_linewidth()
    assert factors.get_ylim()[0] < 1 < 1.2 < factors.get_ylim()[1]


def test_an_axis_is_never_filled_by_noise(draw_ranges):
    (degrees,) = draw_ranges([0, 1], {"rotation": [0.0, 1e-4]}, None)
    assert degrees.get_ylim()[1] > 30


def test_translations_are_in_pixels_of_the_own_axis(draw_ranges):
    values = {"x_translation": [0.0, 0.5], "y_translation": [0.0, 0.5]}
    (ax,) = draw_ranges([0, 1], values, None, size=(5, 9))
    assert ax.get_ylabel() == "± pixels"
    assert list(lines(ax)["x translation"].get_ydata()) == [0, 2]
    assert list(lines(ax)["y translation"].get_ydata()) == [0, 1]
    (ax,) = draw_ranges([0, 1], values, None)
    assert ax.get_ylabel() == "± half-widths of the image"


def test_true_values_that_differ_have_the_colours_of_their_ranges(draw_ranges):
    values = {"x_scale": [0.0, 0.5], "y_scale": [0.0, 0.6]}
    (ax,) = draw_ranges([0, 1], values, datasets.true_ranges("scaled"))
    assert labels(ax) == ["x scale", "y scale", "true"]
    assert list(lines(ax)["true"].get_ydata()) == pytest.approx([2, 2])
    (ax,) = draw_ranges([0, 1], values, {"x_scale": 0.1, "y_scale": 0.2})
    for name in ("x scale", "y scale"):
        assert lines(ax)[f"true {name}"].get_color() == lines(ax)[name].get_color()


def test_without_a_truth_all_ranges_are_alike(draw_ranges):
    (ax,) = draw_ranges([0, 1, 2], {name: VALUES[name] for name in ("x_scale", "shear")}, None)
    assert labels(ax) == ["x scale", "shear"]
    assert len({line.get_linewidth() for line in ax.get_lines()}) == 1
    assert len({line.get_color() for line in ax.get_lines()}) == 2


def test_the_epoch_that_is_kept_and_the_last_phase_are_marked(draw_ranges):
    (ax,) = draw_ranges([1, 2, 3], {"rotation": [0.0, 1, 1]}, None, best_epoch=3, settled=2)
    assert [text.get_text().strip() for text in ax.texts] == ["only\nweights", "kept: 3"]
    assert [3, 3] in [list(line.get_xdata()) for line in ax.get_lines()]
    (ax,) = draw_ranges([1, 2, 3], {"rotation": [0.0, 1, 1]}, None, settled=3)
    assert not ax.texts


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
    assert plots.evidence_terms([0, 5], terms, ax, best_epoch=6, exact=-1.8765) is ax
    first, *others = terms
    assert labels(ax) == [*others, first, "exact evidence: -1.877"]
    assert lines(ax)["exact evidence: -1.877"].get_xydata().tolist() == [[6, -1.8765]]
    assert [text.get_text().strip() for text in ax.texts] == ["kept: 6"]
    for name, values in terms.items():
        assert list(lines(ax)[name].get_xdata()) == [0, 5]
        assert list(lines(ax)[name].get_ydata()) == values
    assert lines(ax)["log evidence"].get_linewidth() > lines(ax)["log likelihood"].get_linewidth()
    assert "per datum" in ax.get_ylabel()


def arcs(ax):
    """Return the arcs ``[arc, time, 2]`` of a flow, those of single ranges."""
    found = [line.get_xydata() for line in ax.get_lines() if len(line.get_xdata()) == 129]
    return [torch.as_tensor(one) for one in found]


def test_flow_of_rotations_has_an_arc_for_each_point_at_its_own_distance(ax):
    augmentation = li.AffineImage(init={"rotation": 1.0})
    assert plots.flow(augmentation, ax) is ax
    found = arcs(ax)
    radii = [path.norm(dim=-1) for path in found]
    assert len(found) == 4
    assert len({round(radius[0].item(), 3) for radius in radii}) == 4
    for path, radius in zip(found, radii, strict=True):
        torch.testing.assert_close(radius, radius[0].expand(len(radius)))
        cosine = (path[0] @ path[-1]) / radius[0] ** 2
        assert cosine.item() == pytest.approx(math.cos(2.0))  # from -1 to 1 radians
    assert labels(ax) == ["rotation ±57.3 degrees", "points"]
    assert ax.yaxis_inverted()
    assert ax.get_aspect() == 1


def test_flow_has_an_arc_for_every_open_range_and_a_cloud_for_all(ax):
    plots.flow(li.AffineImage(init={"rotation": 1.0, "shear": 0.2}), ax, n_samples=7)
    assert len(arcs(ax)) == 2 * 4
    assert [len(line.get_xdata()) for line in ax.get_lines()].count(7 * 4) == 1


def test_flow_shows_an_image_behind_and_nothing_of_the_identity(ax):
    plots.flow(li.AffineImage(), ax, torch.rand(3, 5, 7))
    assert ax.get_images()[0].get_array().shape == (5, 7, 3)
    assert not arcs(ax)
    assert labels(ax) == ["points"]


def test_flow_of_points_has_y_upwards_and_of_others_is_refused(ax):
    plots.flow(li.AffinePoints(init={"shear": 0.3}), ax)
    assert not ax.yaxis_inverted()
    with pytest.raises(ValueError, match=r"got matrices \[4, 4\]"):
        plots.flow(li.AffinePoints(3), ax)
    with pytest.raises(ValueError, match="got FiniteGroup"):
        plots.flow(li.FiniteGroup(), ax)


def test_methods_have_a_dot_per_run_and_an_interval(ax):
    assert plots.by_method({"plain": [70.0, 74.0, 75.0], "evidence": [88.0]}, "{:.1f}", ax) is ax
    assert [text.get_text() for text in ax.texts] == ["73.0", "88.0"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["plain", "evidence"]
    interval, dots, mean, other = [line.get_xydata() for line in ax.get_lines()]
    assert interval[:, 0] == pytest.approx([73 - 7**0.5, 73 + 7**0.5])
    assert dots[:, 0].tolist() == [70, 74, 75]
    assert (mean.tolist(), other.tolist()) == ([[73, 0]], [[88, 1]])
    low, high = ax.get_ylim()
    assert low > high  # the first is on top


@pytest.mark.parametrize("values", [{}, {"plain": []}])
def test_every_method_needs_a_value(ax, values):
    with pytest.raises(ValueError, match="every method needs a value"):
        plots.by_method(values, "{:.1f}", ax)


def test_search_trials_are_bars_from_zero_by_length(ax):
    names, losses, steps = ["a", "b", "c"], [0.5, 0.0, 0.2], [40, 80, 40]
    assert plots.search_trials(names, losses, steps, ax, best=1) is ax
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == ["after 80 steps", "b", "after 40 steps", "c", "a"]
    assert [bar.get_width() for bar in ax.patches] == [0.0, 0.2, 0.5]
    assert all(bar.get_x() == 0 for bar in ax.patches)
    assert [text.get_text() for text in ax.texts] == [
        "0.000  training starts here",
        "0.200",
        "0.500",
    ]


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
    assert plots.evidence_by_range(found, ax, 1.5) is ax
    assert labels(ax) == ["nearly the best", "learnt: ±1.000", "true: ±1.500"]
    assert list(lines(ax)["learnt: ±1.000"].get_xdata()) == pytest.approx([57.29578] * 2)
    curve = next(line for line in ax.get_lines() if len(line.get_xdata()) == 3)
    assert list(curve.get_ydata()) == pytest.approx([-1.1, -0.55, -0.55])
    assert len(ax.collections) == 1  # the band of errors
    assert ax.get_xlabel() == "rotation, ± degrees"


def test_evidence_by_range_needs_neither_errors_nor_a_truth(ax):
    plots.evidence_by_range(Profile("shear", (0.0, 1.0), ((-1.0, -0.5),), 1.0), ax)
    assert labels(ax) == ["nearly the best", "learnt: ±1.000"]
    assert not ax.collections


def test_gains_are_sorted_and_grey_where_they_are_not_clear(ax):
    names = ["shear", "x_scale", "rotation", "hue"]
    values, errors = [-0.2, 0.01, 0.3, -math.inf], [0.02, 0.03, 0.01, 0.0]
    assert plots.gains(names, values, errors, [True, False, True, True], ax) is ax
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == ["rotation", "x scale", "shear", "hue"]
    assert [text.get_text() for text in ax.texts] == ["+0.300", "+0.010", "-0.200"]
    bars = [bar for bar in ax.patches if bar.get_width()]
    assert [bar.get_width() for bar in bars] == [0.3, 0.01, -0.2]
    red, green, blue, _ = zip(*(bar.get_facecolor() for bar in bars), strict=True)
    are_grey = [len(set(one)) == 1 for one in zip(red, green, blue, strict=True)]
    assert are_grey == [False, True, False]
    assert green[0] > red[0]
    assert red[2] > green[2]
    low, high = ax.get_ylim()
    assert low > high  # the first one is on top
