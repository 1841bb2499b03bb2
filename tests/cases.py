"""Layers to test every rule and engine on: how to build one, and the shape of its inputs."""

from torch import nn

from laplace_invariance.layers import (
    FactoredLinear2d,
    Linear2d,
    OnGroup,
    ResidualPathway,
    ScalarBias,
    ScalarScale,
    SlotLinear,
    SparseGroupConv2d,
    SparseLiftingConv2d,
    SparseLinear2d,
)
from laplace_invariance.layers.group import GroupConv2d, LiftingConv2d
from laplace_invariance.layers.sparse import FromBasis, OntoBasis, SparseConv2d
from laplace_invariance.layers.symmetry import Group

THREE = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def hue():
    """Three elements that leave positions alone."""
    return Group("hue", THREE)


def cycle():
    """Three elements that move three positions in a circle."""
    return Group("cycle", THREE, permutations={(3, 1): THREE})


def _with_statistics(norm):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm.eval()


TORCH = [
    (lambda: nn.Linear(3, 5), (2, 3)),
    (lambda: nn.Linear(3, 5, bias=False), (2, 7, 3)),
    (lambda: nn.Linear(3, 5), (2, 7, 4, 3)),
    (lambda: nn.Conv1d(3, 5, 4, stride=2, padding=1), (2, 3, 9)),
    (lambda: nn.Conv1d(3, 5, 3, padding=2, padding_mode="circular", dilation=2), (2, 3, 9)),
    (lambda: nn.Conv2d(3, 5, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (2, 3, 6, 7)),
    (lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular", bias=False), (2, 3, 5, 7)),
    (lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"), (2, 3, 5, 7)),
    (lambda: nn.Conv2d(3, 5, (2, 4), padding="same"), (2, 3, 5, 7)),
    (lambda: nn.Conv2d(3, 5, 3, padding="valid"), (2, 3, 5, 7)),
    (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 7)),
    (lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1, padding_mode="circular"), (2, 3, 5, 7)),
    (lambda: nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(0, 1, 0)), (2, 2, 4, 5, 3)),
    (lambda: nn.Conv3d(2, 4, 2, groups=2), (2, 2, 3, 4, 3)),
    (lambda: nn.Embedding(11, 3), (2, 5)),
    (lambda: nn.Embedding(11, 3, padding_idx=4), (2, 5, 2)),
    (lambda: _with_statistics(nn.BatchNorm1d(3)), (2, 3)),
    (lambda: _with_statistics(nn.BatchNorm1d(3)), (2, 3, 5)),
    (lambda: _with_statistics(nn.BatchNorm2d(3)), (2, 3, 5, 4)),
    (lambda: _with_statistics(nn.BatchNorm3d(3)), (2, 3, 5, 4, 2)),
    (lambda: nn.GroupNorm(2, 6), (2, 6, 5)),
    (lambda: nn.LayerNorm(5), (2, 3, 5)),
    (lambda: nn.LayerNorm((3, 5)), (2, 4, 3, 5)),
    (lambda: nn.LayerNorm(5), (2, 5)),
    (lambda: nn.RMSNorm(5), (2, 3, 5)),
    (lambda: ScalarBias(), (2, 3, 5, 4)),
    (lambda: ScalarScale(), (2, 3, 5, 4)),
    (lambda: SlotLinear(3, 5, 7), (2, 3, 5)),
    (lambda: SlotLinear(1, 5, 7, bias=False), (2, 1, 5)),
]

GROUP = [
    (lambda: LiftingConv2d(3, 5, 3), (2, 3, 4, 6)),
    (lambda: LiftingConv2d(3, 2, 2, group="p4m", bias=False, padding=1), (2, 3, 4, 5)),
    (
        lambda: LiftingConv2d(
            3, 2, (2, 3), group="pm", padding=(0, 1), padding_mode="reflect", dilation=(2, 1)
        ),
        (2, 3, 4, 5),
    ),
    (lambda: LiftingConv2d(2, 5, (3, 1), group=cycle()), (2, 2, 3, 1)),
    (lambda: LiftingConv2d(4, 6, 3, groups=2, group="p2"), (2, 4, 5, 4)),
    (lambda: GroupConv2d(3, 5, 3, padding=1, padding_mode="circular"), (2, 3, 4, 5, 6)),
    (lambda: GroupConv2d(3, 2, 2, group="p4m"), (2, 3, 8, 4, 5)),
    (lambda: GroupConv2d(4, 6, 3, groups=2, padding="same", dilation=2), (2, 4, 4, 5, 6)),
    (
        lambda: GroupConv2d(2, 5, (1, 3), group=hue(), padding=(0, 2), padding_mode="replicate"),
        (2, 2, 3, 4, 6),
    ),
    (lambda: GroupConv2d(3, 5, 3, kernel="pointwise"), (2, 3, 4, 5, 6)),
    (
        lambda: GroupConv2d(
            4, 6, 3, kernel="pointwise", groups=2, group="p4m", bias=False, padding=1
        ),
        (2, 4, 8, 3, 5),
    ),
    (lambda: GroupConv2d(3, 5, 3, kernel="separable").mixing, (2, 3, 4, 2, 6)),
    (
        lambda: (
            GroupConv2d(3, 5, 3, kernel="separable", padding=1, padding_mode="circular").spatial
        ),
        (2, 3, 4, 3, 6),
    ),
    (lambda: GroupConv2d(2, 3, 3, kernel="pairwise").spatial, (2, 2, 4, 3, 5)),
    (lambda: GroupConv2d(2, 3, 3, kernel="pairwise").mixing, (2, 6, 4, 2, 3)),
    (lambda: GroupConv2d(3, 5, 3, kernel="depthwise").elements, (2, 3, 4, 2, 6)),
]

SPARSE = [
    (lambda: OntoBasis((3, 4)), (2, 5, 12)),
    (lambda: OntoBasis((3, 4), learn_omega="weight"), (2, 5, 12)),
    (
        lambda: OntoBasis((3, 4), kind="exponential", learn_omega="weight", anchors="learnt"),
        (2, 5, 12),
    ),
    (lambda: FromBasis((3, 4), 5, n_anchors=7, learn_omega="weight"), (2, 5, 7)),
    (lambda: FromBasis((3, 4), 5, bias=False, kind="exponential", learn_omega="weight"), (2, 5, 6)),
    (lambda: FromBasis((3, 4), 5, learn_omega="hyperparameter"), (2, 5, 6)),
    (lambda: SparseConv2d(3, 5, 3), (2, 3, 6, 7)),
    (
        lambda: SparseConv2d(3, 5, (2, 3), (2, 1), (1, 2), (1, 2), learn_omega="weight"),
        (2, 3, 6, 7),
    ),
    (
        lambda: SparseConv2d(
            4, 6, 3, groups=2, padding=1, padding_mode="circular", learn_omega="weight"
        ),
        (2, 4, 5, 7),
    ),
    (
        lambda: SparseConv2d(
            3, 5, (2, 4), padding="same", bias=False, kind="exponential", learn_omega="weight"
        ),
        (2, 3, 5, 7),
    ),
    (
        lambda: SparseConv2d(3, 5, (2, 4), padding="same", padding_mode="circular", n_anchors=3),
        (2, 3, 5, 7),
    ),
    (
        lambda: SparseConv2d(
            3, 5, 3, padding="valid", padding_mode="reflect", learn_omega="hyperparameter"
        ),
        (2, 3, 5, 7),
    ),
    (lambda: OntoBasis((8, 3), group=Group.of("p4"), learn_omega="weight"), (2, 5, 24)),
    (lambda: SparseLiftingConv2d(3, 5, 3, learn_omega="weight"), (2, 3, 4, 6)),
    (lambda: SparseGroupConv2d(3, 5, 3, learn_omega="weight"), (2, 3, 4, 5, 6)),
    (
        lambda: SparseGroupConv2d(
            4,
            6,
            2,
            group="p4m",
            groups=2,
            padding=1,
            padding_mode="circular",
            kind="exponential",
            learn_omega="weight",
        ),
        (2, 4, 8, 3, 5),
    ),
    (
        lambda: SparseGroupConv2d(
            3, 5, 3, kernel="pointwise", bias=False, n_anchors=4, learn_omega="hyperparameter"
        ),
        (2, 3, 4, 5, 6),
    ),
]

# layers made of layers that have rules
COMPOSED = [
    (lambda: FactoredLinear2d(2, 3, (3, 4), (2, 2)), (2, 2, 3, 4)),
    (lambda: Linear2d(2, 3, (3, 4)), (2, 2, 3, 4)),
    (lambda: SparseLinear2d(2, 3, (3, 4), learn_omega="weight"), (2, 2, 3, 4)),
    (lambda: GroupConv2d(3, 5, 3, kernel="separable"), (2, 3, 4, 5, 6)),
    (lambda: GroupConv2d(2, 3, 3, kernel="pairwise"), (2, 2, 4, 5, 6)),
    (lambda: GroupConv2d(2, 3, 3, kernel="depthwise"), (2, 2, 4, 5, 6)),
    (lambda: OnGroup(FactoredLinear2d(2, 3, (12, 2), (4, 1)), 4, "positions"), (2, 2, 4, 3, 2)),
    (
        lambda: OnGroup(
            SparseLinear2d(2, 3, (8, 3), 4, group=Group.of("p4"), learn_omega="weight"),
            4,
            "positions",
        ),
        (2, 2, 4, 2, 3),
    ),
    (
        lambda: ResidualPathway(
            f_fc=FactoredLinear2d(2, 3, 4, 4), conv=nn.Conv2d(2, 3, 3, padding=1)
        ),
        (2, 2, 4, 4),
    ),
]

WITH_RULES = TORCH + GROUP + SPARSE  # every type in the registry must be here


def name_of(case):
    """Return the id of a case in a parametrised test."""
    if callable(case):
        return type(case()).__name__
    return "x".join(map(str, case))
