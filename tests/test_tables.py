"""Plain-text tables."""

from laplace_invariance.tables import labelled, table


def test_columns_are_aligned_and_lines_end_without_spaces():
    rows = [["name", "n", "words"], ["a", "10", ""], ["longer", "5", "b"]]
    assert table(rows, right=[1]) == "name     n  words\na       10\nlonger   5  b"
    assert table(rows[:2], gap=3) == "name   n    words\na      10"


def test_labels_are_padded():
    assert labelled("time", "3 s") == "time            3 s"
