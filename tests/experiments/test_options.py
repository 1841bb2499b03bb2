"""Configurations: choices that agree with what the library knows, checks, and JSON."""

import dataclasses
import json
import math
from typing import get_args

import pytest

from laplace_invariance import AffineImage, datasets, variational
from laplace_invariance.augmentations.box import DRAWS
from laplace_invariance.autoencoder import LAYER_KINDS
from laplace_invariance.cli import VERBS
from laplace_invariance.curvature import BACKENDS
from laplace_invariance.datasets.synthetic import PAIR_TASKS
from laplace_invariance.experiments import choices
from laplace_invariance.experiments.learn import LEARN_NETWORKS
from laplace_invariance.experiments.options import (
    CompareConfig,
    DemoConfig,
    ImagesConfig,
    LayersConfig,
    LearnConfig,
    MeasureConfig,
    PairsConfig,
    ProfileConfig,
    SuggestConfig,
    VariationalConfig,
)
from laplace_invariance.layers.paths import PATHS
from laplace_invariance.marglik.estimators import ESTIMATORS
from laplace_invariance.marglik.settings import STRUCTURES, SUBSETS

KNOWN = {
    "Activation": variational.ACTIVATIONS,
    "Average": choices.AVERAGES,
    "Draws": DRAWS,
    "Curvature": BACKENDS,
    "EstimatorName": ESTIMATORS,
    "LayersMethod": choices.LAYERS_METHODS,
    "LayersTask": choices.LAYERS_TASKS,
    "LayersRanges": choices.LAYERS_RANGES,
    "LearnMethod": choices.LEARN_METHODS,
    "MeasureMethod": choices.MEASURE_METHODS,
    "NetworkName": LEARN_NETWORKS,
    "PairsCode": datasets.FOURIER_CODES,
    "PairsLayer": LAYER_KINDS,
    "PairsPart": choices.PAIRS_PARTS,
    "PairsTask": PAIR_TASKS,
    "PlaneBy": choices.PLANE_BY,
    "PlaneLabels": choices.PLANE_LABELS,
    "PlaneMethod": choices.PLANE_METHODS,
    "PriorStructure": choices.LAYERS_PRIORS,
    "RangesPrior": choices.RANGES_PRIORS,
    "Structure": STRUCTURES,
    "Switch": choices.SEARCH,
    "Transform": datasets.TRANSFORM_KINDS,
    "VariationalMethod": choices.VARIATIONAL_METHODS,
    "WeightsSubset": SUBSETS,
}
CONFIGS = [verb.config for verb in VERBS.values()]


@pytest.mark.parametrize("name", KNOWN)
def test_choices_are_those_that_the_library_knows(name):
    assert get_args(getattr(choices, name)) == tuple(KNOWN[name])


def test_choices_of_parts_are_known():
    assert get_args(choices.PairsTask) == tuple(choices.PAIRS_TASKS)
    assert get_args(choices.EstimatorName) == tuple(choices.ESTIMATORS)
    assert get_args(choices.WeightsSubset) == tuple(choices.SUBSETS_OF_WEIGHTS)
    assert get_args(choices.Curvature) == tuple(choices.CURVATURES)
    assert get_args(choices.Structure) == tuple(choices.STRUCTURES)
    assert get_args(choices.RangeName) == AffineImage().names
    assert {"plain", *datasets.QUADRANT_TASKS} == set(choices.LAYERS_TASKS)
    assert all(source in ImagesConfig.__doc__ for source in datasets.IMAGE_SOURCES)
    assert all(path in LayersConfig.__doc__ for path in PATHS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations_are_frozen_and_survive_json(kind):
    config = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert kind(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_hyphens_may_stand_for_underscores():
    assert LearnConfig(transform="fully-rotated") == LearnConfig(transform="fully_rotated")
    assert LearnConfig(method="trivial_augment").method == "trivial-augment"
    assert CompareConfig(transforms=["partially-rotated"]).transforms == ("partially_rotated",)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (LearnConfig, {"method": "map"}, "unknown method 'map'; choose from evidence, none"),
        (LearnConfig, {"net": "vit"}, "unknown net 'vit'; choose from mlp, cnn, lenet, resnet"),
        (
            LearnConfig,
            {"estimator": "fast"},
            "unknown estimator 'fast'; choose from running, refit, kernel",
        ),
        (
            LearnConfig,
            {"subset_of_weights": "first_layer"},
            "unknown subset_of_weights 'first_layer'; choose from all, last_layer",
        ),
        (LearnConfig, {"subset_of_weights": None}, "unknown subset_of_weights None"),
        (
            CompareConfig,
            {"estimator": "kernel", "subset_of_weights": "last_layer"},
            "the kernel bound is that of all weights",
        ),
        (LearnConfig, {"structure": "blocks"}, "unknown structure 'blocks'; choose from kron"),
        (LearnConfig, {"prior_structure": "diag"}, "Kronecker factors take one prior precision"),
        (
            LearnConfig,
            {"prior_structure": "diag", "structure": "diag", "estimator": "kernel"},
            "the kernel bound takes one prior precision",
        ),
        (LearnConfig, {"learn": ()}, "learn must be some of x_translation, .*, got none"),
        (LearnConfig, {"learn": ["twist"]}, r"learn must be some of .* got \['twist'\]"),
        (LearnConfig, {"lr_aug": 0.0}, "lr_aug must be positive and finite, got 0.0"),
        (LearnConfig, {"init": {"shear": -1.0}}, "init: shear must be finite and not negative"),
        (
            LearnConfig,
            {"init": {"rotation": 90}},
            r"init: rotation must be at most pi .*got 90 .*rotation=90deg",
        ),
        (
            CompareConfig,
            {"fixed": {"rotation": 3.5}},
            r"fixed: rotation must be at most pi \(180 degrees\), .*got 3.5 \(200.5 degrees\)$",
        ),
        (
            LearnConfig,
            {"search": "on", "init": {"rotation": 1.0}},
            "a search finds where rotation should start, and init says it; leave out one",
        ),
        (
            LearnConfig,
            {"search": "on", "method": "fixed"},
            "method 'fixed' learns no range by evidence, so that there is nothing to search for",
        ),
        (LearnConfig, {"size": 0}, "size must be positive and finite, got 0"),
        (LearnConfig, {"test_share": 1.0}, "test_share must be between 0 and 1, got 1.0"),
        (ProfileConfig, {"learn": ["shear"]}, "rotation is not learnt, .* choose from shear"),
        (LearnConfig, {"transform": None}, "unknown transform None; choose from fully_rotated"),
        (CompareConfig, {"methods": []}, "methods must be some of evidence, .*, got none"),
        (CompareConfig, {"transforms": ["bent"]}, r"transforms must be some of .* got \['bent'\]"),
        (CompareConfig, {"seeds": ()}, "nothing to compare: give at least one seed"),
        (LayersConfig, {"task": "place"}, "unknown task 'place'; choose from plain, digit, both"),
        (LayersConfig, {"method": "none"}, "unknown method 'none'; choose from evidence, map"),
        (LayersConfig, {"transform": "bent"}, "unknown transform 'bent'"),
        (LayersConfig, {"width": 0}, "width must be positive and finite, got 0"),
        (LayersConfig, {"lr": math.nan}, "lr must be positive and finite, got nan"),
        (LayersConfig, {"n_hypersteps": -1}, "n_hypersteps must be finite and not negative"),
        (
            LayersConfig,
            {"prior_structure": "paths"},
            "unknown prior_structure 'paths'; choose from layerwise, path, scalar",
        ),
        (MeasureConfig, {"group": "p4"}, "unknown group 'p4'; choose from quarter-turns, rotatio"),
        (MeasureConfig, {"n_epochs": 0}, "n_epochs must be positive and finite, got 0"),
        (MeasureConfig, {"n_samples": 0}, "n_samples must be positive and finite, got 0"),
        (MeasureConfig, {"strength": math.nan}, "strength must be finite and not negative"),
        (MeasureConfig, {"methods": ()}, "methods must be some of plain, augmented.*got none"),
        (MeasureConfig, {"methods": ["magic"]}, r"methods must be some of .*got \['magic'\]"),
        (PairsConfig, {"task": "turn"}, "unknown task 'turn'"),
        (PairsConfig, {"networks": ["gelu-2"]}, "'gelu-2'; write layer-depth, .* of rich, selu"),
        (PairsConfig, {"networks": ["rich"]}, "unknown network 'rich'"),
        (PairsConfig, {"networks": []}, "at least one"),
        (PairsConfig, {"networks": ["rich-1", "rich-1"]}, "different ones"),
        (PairsConfig, {"n_train": 0}, "n_train must be positive and finite, got 0"),
        (PairsConfig, {"lr": math.nan}, "lr must be positive and finite, got nan"),
        (
            VariationalConfig,
            {"learn": ("zoom",)},
            r"learn must be some of x_translation, .*shear, got \['zoom'\]",
        ),
        (
            VariationalConfig,
            {"learnt": (5, 200)},
            r"ranges of learnt must be between 0 and 180 degrees, got \(5.0, 200.0\)",
        ),
        (VariationalConfig, {"learnt": ()}, "give at least one of learnt, fixed, point"),
        (VariationalConfig, {"n_epochs": 0}, "n_epochs must be positive and finite, got 0"),
        (VariationalConfig, {"n_epochs": 1}, "n_epochs must be above the 1 of burn-in"),
        (VariationalConfig, {"lr_hyper": -1.0}, "lr_hyper must be positive and finite, got -1.0"),
        (LearnConfig, {"fixed": {"shear": 1e30}}, r"fixed: shear must be at most 10, got 1e\+30"),
        (ProfileConfig, {"values": [1e30]}, "values: rotation must be at most pi"),
        (SuggestConfig, {"ranges": {"x_scale": 11}}, "ranges: x_scale must be at most 10, got 11"),
        (LearnConfig, {"seed": 9 * 10**22}, "seed must have at most 63 bits, got 9000000"),
        (CompareConfig, {"seeds": (0, 10**30)}, "seeds must have at most 63 bits"),
        (LearnConfig, {"n_samples": 10**30}, "n_samples must have at most 63 bits"),
        (LearnConfig, {"n_epochs": 2.0}, "n_epochs must be a whole number, got 2.0"),
        (LearnConfig, {"n_epochs": "2"}, "n_epochs must be a whole number, got '2'"),
        (LearnConfig, {"lr_augerino": 1e300}, r"lr_augerino must be at most 3.4e\+38"),
        (LearnConfig, {"strength": "much"}, "strength must be a number, got 'much'"),
        (LearnConfig, {"size": 10**9}, "size must be at most 10000, got 1000000000"),
        (DemoConfig, {"name": "cubes"}, "unknown name 'cubes'; choose from points"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_impossible_configurations_are_refused(kind, options, match):
    with pytest.raises(ValueError, match=match):
        kind(**options)


def test_a_start_is_run_once():
    config = VariationalConfig(learnt=[5, 5.0, 90], fixed=(0,))
    assert config.plan == [("learnt", 5.0), ("learnt", 90.0), ("fixed", 0.0)]


def test_a_search_is_left_out_where_learnt_ranges_are_given():
    assert LearnConfig().searches
    assert not LearnConfig(search="off").searches
    assert not LearnConfig(init={"rotation": 1.0}).searches
    # a range that stays where it is does not say where others start
    assert LearnConfig(init={"shear": 0.2}, learn=["rotation"]).searches
