"""Part (a): the gradient of KronLaplace's evidence with respect to the observation noise."""

from pathlib import Path

from edits import Edit, Part

MATRIX = "laplace/utils/matrix.py"

PART = Part(
    Path(__file__).parent,
    edits=(
        Edit(MATRIX, "from math import pow\n", ""),
        Edit(MATRIX, "using `pow(scalar, 1 / len(F))`.", "using `scalar ** (1 / len(F))`."),
        Edit(MATRIX, "[[pow(scalar, 1 / len(F)) * Hi", "[[scalar ** (1 / len(F)) * Hi"),
        Edit(MATRIX, "[pow(scalar, 1 / len(ls)) * eigval", "[scalar ** (1 / len(ls)) * eigval"),
    ),
)
