"""What the fields of configurations may be: types, and the meanings of their values.

Like :mod:`.options` this imports neither torch nor numpy. A test compares the types with what data
sets, layers and augmentations know.
"""

from __future__ import annotations

from typing import Literal

Transform = Literal[
    "fully_rotated",
    "partially_rotated",
    "translated",
    "scaled",
    "original",
    "rotated_translated",
    "rotated_scaled",
    "translated_scaled",
]
RangeName = Literal["x_translation", "y_translation", "rotation", "x_scale", "y_scale", "shear"]
NetworkName = Literal["mlp", "cnn", "lenet", "resnet", "wide-resnet"]
EstimatorName = Literal["running", "refit", "kernel"]
LayersEstimator = Literal["running", "refit"]
WeightsSubset = Literal["all", "last_layer"]
LearnMethod = Literal[
    "evidence", "none", "augerino", "augerino-published", "fixed", "trivial-augment"
]
Average = Literal["outputs", "losses"]
Switch = Literal["on", "off"]
Curvature = Literal["ggn", "ef", "backpack-ggn", "backpack-ef", "asdl-ggn", "asdl-ef"]
Structure = Literal["kron", "diag", "full"]
RangesPrior = Literal["layerwise", "scalar", "diag"]
LayersMethod = Literal["evidence", "map"]
LayersRanges = Literal["none", "rotation", "affine"]
PathsStart = Literal["closed", "search", "off", "half-open", "open"]
LayersTask = Literal["plain", "digit", "both"]
PriorStructure = Literal["layerwise", "path", "scalar"]
MeasureMethod = Literal[
    "plain", "augmented", "regularised", "regularised-saliency", "tied", "evidence"
]
MeasureGroup = Literal["quarter-turns", "rotations"]
PairsTask = Literal["dft", "shift", "two-part", "permutation", "scaled-shift"]
PairsCode = Literal["sines", "phase"]
PairsPart = Literal["both", "encoder", "decoder"]
PairsLayer = Literal["rich", "selu", "relu", "tanh", "sigmoid"]
PlaneLabels = Literal["radius", "angle"]
PlaneMethod = Literal["none", "learnt", "all"]
PlaneBy = Literal["evidence", "elbo"]
VariationalMethod = Literal["learnt", "fixed", "point"]
Activation = Literal["cosine", "relu"]
Draws = Literal["independent", "sobol", "grid"]
DemoName = Literal["points"]
Scale = Literal["small", "large", "paper"]
Omega = Literal["fixed", "weight"]
GroupKernel = Literal["pointwise", "full", "separable", "pairwise", "depthwise"]
GroupElements = Literal["channels", "positions"]
TableName = Literal[
    "input-mlp",
    "quadrants",
    "layers-cifar",
    "input-cifar",
    "layers-groups",
    "layers-kernels",
    "input-cnn",
    "input-all",
    "input-ablation",
    "input-sizes",
    "shallow",
    "shallow-affine",
    "codes",
    "pairs",
    "genuine",
    "both",
    "plane",
    "input-losses",
]

LEARN_METHODS: dict[LearnMethod, str] = {
    "evidence": "ranges learnt by evidence",
    "none": "no invariance, priors learnt by evidence",
    "augerino": "ranges learnt by the loss and a reward for wide ones, priors by evidence",
    "augerino-published": (
        "the same with a reward of 0.01, from zero, and a fixed weight decay instead of priors"
    ),
    "fixed": "fixed ranges, as many samples, priors learnt by evidence",
    "trivial-augment": (
        "torchvision's TrivialAugmentWide on training images, priors learnt by evidence"
    ),
}
SCALES: dict[Scale, str] = {
    "small": "minutes, on images that come with scikit-learn",
    "large": "hours, on some thousand images",
    "paper": "that of the paper, days on a GPU",
}
OMEGAS: dict[Omega, str] = {
    "fixed": "stays",
    "weight": "learnt with the weights, under a prior of its own",
}
KERNELS: dict[GroupKernel, str] = {
    "pointwise": "each element of the group on its own",
    "full": "a weight for channels, elements and positions",
    "separable": "a product of positions per channel, and of elements and channels",
    "pairwise": "a product of positions and of elements, for each pair of channels",
    "depthwise": "a product of positions, of elements, and of channels",
}
ELEMENTS: dict[GroupElements, str] = {
    "channels": "further channels",
    "positions": "further positions, with fewer weights",
}
AVERAGES: dict[Average, str] = {
    "outputs": "outputs of the network, which becomes invariant by it",
    "losses": "losses, as data augmentation does: one transformation per image and pass, and none "
    "in predictions",
}
SEARCH: dict[Switch, str] = {
    "on": "many are tried in short trainings, and the best is where ranges start",
    "off": "ranges start at zero or at --init, with steps by gradient alone",
}
CURVATURES: dict[Curvature, str] = {
    "ggn": "generalised Gauss-Newton",
    "ef": "empirical Fisher, from gradients alone",
    "backpack-ggn": "the first, with BackPACK as the engine",
    "backpack-ef": "the second, with BackPACK as the engine",
    "asdl-ggn": "the first, with ASDL as the engine",
    "asdl-ef": "the second, with ASDL as the engine",
}
STRUCTURES: dict[Structure, str] = {
    "kron": "Kronecker-factored",
    "diag": "diagonal",
    "full": "all entries, of small networks",
}
RANGES_PRIORS: dict[RangesPrior, str] = {
    "layerwise": "each tensor has its own",
    "scalar": "all weights share one",
    "diag": "each weight has its own, not with kron",
}
ESTIMATORS: dict[EstimatorName, str] = {
    "running": "from some of the minibatches that the weights are trained on",
    "refit": "from passes through all training images",
    "kernel": "a lower bound, from tangent kernels of single minibatches",
}
LAYERS_ESTIMATORS: dict[LayersEstimator, str] = {
    "running": ESTIMATORS["running"],
    "refit": ESTIMATORS["refit"],
}
SUBSETS_OF_WEIGHTS: dict[WeightsSubset, str] = {
    "all": "of the whole network",
    "last_layer": "of the last layer, cheaper, blind to the others",
}
LAYERS_METHODS: dict[LayersMethod, str] = {
    "evidence": "prior precisions learnt by evidence",
    "map": "prior precisions fixed at 1, the evidence estimated once at the end",
}
LAYERS_RANGES: dict[LayersRanges, str] = {
    "none": "nothing, so that layers alone decide on symmetries",
    "rotation": "rotations",
    "affine": "rotations, translations, scales and shears",
}
PATHS_STARTS: dict[PathsStart, str] = {
    "closed": "nearly switched off, by --scale and --free-precision",
    "search": "where short trainings of several starts have the highest evidence",
    "off": "at zero",
    "half-open": "at unit scale, the first factor of factored paths held by a narrow prior",
    "open": "at unit scale, with prior precisions of 1",
}
LAYERS_TASKS: dict[LayersTask, str] = {
    "plain": "images as they are",
    "digit": "images in random quadrants, labelled by class",
    "both": "images in random quadrants, labelled by class and quadrant",
}
LAYERS_PRIORS: dict[PriorStructure, str] = {
    "layerwise": "each tensor has its own",
    "path": "each path has its own",
    "scalar": "all weights share one",
}
MEASURE_METHODS: dict[MeasureMethod, str] = {
    "plain": "trained on images as they are",
    "augmented": "every image transformed at random in every epoch",
    "regularised": "the same, and the invariance error added to the loss",
    "regularised-saliency": "the same, and the change of saliency maps added as well",
    "tied": "averaged over the group, so invariant by construction",
    "evidence": (
        "averaged with weights or a range learnt by evidence, from images transformed once"
    ),
}
PAIRS_TASKS: dict[PairsTask, str] = {
    "dft": "circular shifts; the code, moduli and phases of the Fourier transform, is taught",
    "shift": "circular shifts, learnt from pairs",
    "two-part": "circular shifts of each half, learnt from pairs",
    "permutation": "shifts along a hidden cycle of the entries, learnt from pairs",
    "scaled-shift": "circular shifts and multiplication by 1/2 to 2, learnt from pairs",
}
PAIRS_CODES: dict[PairsCode, str] = {
    "sines": "moduli, and sines and cosines of phases",
    "phase": "moduli and phases",
}
PAIRS_PARTS: dict[PairsPart, str] = {
    "both": "encoder and decoder",
    "encoder": "the encoder alone, from vectors to the code",
    "decoder": "the decoder alone, from the true code to vectors",
}
PLANE_LABELS: dict[PlaneLabels, str] = {
    "radius": "a disc and a ring about it, which rotations keep",
    "angle": "halves of the plane, which rotations exchange",
}
PLANE_METHODS: dict[PlaneMethod, str] = {
    "none": "no invariance",
    "learnt": "a range that is learnt",
    "all": "all rotations",
}
PLANE_BY: dict[PlaneBy, str] = {
    "evidence": "evidence of a Laplace approximation",
    "elbo": "lower bound on the evidence of a shallow network",
}
VARIATIONAL_METHODS: dict[VariationalMethod, str] = {
    "learnt": "ranges learnt by the ELBO",
    "fixed": "ranges fixed, all else learnt by the ELBO",
    "point": "ranges learnt by the likelihood at a point estimate",
}
