"""The package as a whole: the README's program, the examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laplace_invariance import __version__, datasets

ROOT = Path(__file__).parent.parent


def programs():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_program_of_the_readme_runs_and_learns(capsys):
    torch.set_default_dtype(torch.float32)
    program, *more = programs()
    assert len([line for line in program.splitlines() if line.strip()]) < 30
    names = {}
    exec(compile(program, "README.md", "exec"), names)
    degrees = float(re.search(r"±([\d.]+) degrees", capsys.readouterr().out)[1])
    assert degrees > 160
    for program in more:  # they go on from there
        exec(compile(program, "README.md", "exec"), names)
    assert names["augmentation"].eta.grad is not None


def predicted_lines():
    rows = re.findall(
        r"^\| \[(\d\d_\w+\.py)\]\(examples/\1\) \|[^|]*\| `([^`]*)` \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    return dict(rows)


def test_readme_has_every_example():
    assert sorted(predicted_lines()) == sorted(
        path.name for path in (ROOT / "examples").glob("*.py")
    )


def numbers(line):
    return [float(number) for number in re.findall(r"[\d.]+", line)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n.startswith("04") else pytest.mark.slow)
        for n in sorted(predicted_lines())
    ],
)
def test_example_ends_as_the_readme_predicts(name):
    """The same words, and numbers within a tenth, since threads change the order of sums."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line, predicted = done.stdout.splitlines()[-1], predicted_lines()[name]
    assert re.sub(r"[-+\d.]+", "", line) == re.sub(r"[-+\d.]+", "", predicted)
    assert numbers(line) == pytest.approx(numbers(predicted), rel=0.1, abs=0.05)


def test_the_table_of_the_readme_is_what_check_model_prints():
    from torch import nn

    from laplace_invariance.curvature import check_model

    torch.set_default_dtype(torch.float32)
    table = str(check_model(nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))))
    assert table in (ROOT / "README.md").read_text()


def test_shapes_are_labelled_by_how_far_they_are_turned():
    x, y = datasets.rotated_shapes(500, 1.0, n_shapes=3, noise=0.0).tensors
    assert x.shape == (500, 6, 2)
    assert set(y.tolist()) == {0, 1, 2, 3}
    assert (y == 0).double().mean().item() == pytest.approx(1 - 1 / torch.pi, abs=0.07)
    upright, labels = datasets.rotated_shapes(
        500, 1.0, n_shapes=3, noise=0.0, angles=torch.zeros(500)
    ).tensors
    assert labels.min() == 1
    first = upright[labels == 1]
    torch.testing.assert_close(first, first[:1].expand_as(first))
    with pytest.raises(ValueError, match="max_angle"):
        datasets.rotated_shapes(5, 4.0)


def test_the_version_stands_in_one_place():
    assert "version =" not in (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", __version__)
