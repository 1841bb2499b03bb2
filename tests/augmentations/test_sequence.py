"""Shifts and stretches of signals, against a slow twin."""

import math

import numpy as np
import pytest
import torch

from laplace_invariance.augmentations import Sequence

SAMPLES = 4


def slow_sequence(signal, shift, stretch, padding):
    """One signal [channels, length], position by position, with numpy's interpolation."""
    length = signal.shape[-1]
    centre, known = (length - 1) / 2, np.arange(-1, length + 1)
    result = np.zeros(signal.shape)
    for channel, values in enumerate(signal.numpy()):
        for i in range(length):
            position = centre + math.exp(stretch) * (i - centre) + shift * length / 2
            if padding == "circular":
                result[channel, i] = np.interp(position, known[1:-1], values, period=length)
            else:
                result[channel, i] = np.interp(position, known, np.pad(values, 1), left=0, right=0)
    return torch.from_numpy(result)


@pytest.mark.parametrize("length", [11, 6, 1])
@pytest.mark.parametrize(
    "init", [[0.3, -0.4], [0.9, 0.5], [-5.0, 2.0]], ids=["longer", "shorter", "far outside"]
)
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_sequence_equals_interpolation(padding, init, length):
    sequence, x = Sequence(init=init, padding=padding), torch.randn(2, 3, length)
    draws = sequence.sample(len(x), SAMPLES)
    coefficients = draws * sequence.eta.detach()
    samples = sequence.transform(x, draws)
    for n, s in torch.cartesian_prod(torch.arange(len(x)), torch.arange(SAMPLES)).tolist():
        expected = slow_sequence(x[n], *coefficients[n, s].tolist(), padding)
        torch.testing.assert_close(samples[n, s], expected)


def test_a_shift_of_one_is_half_the_signal():
    x, draws = torch.randn(2, 3, 10), torch.ones(1, 1, 2)
    circular = Sequence(init={"shift": 1.0}, padding="circular").transform(x, draws).squeeze(1)
    torch.testing.assert_close(circular, x.roll(-5, -1))
    zeros = Sequence(init={"shift": 1.0}).transform(x, draws).squeeze(1)
    torch.testing.assert_close(zeros, torch.cat([x[..., 5:], torch.zeros(2, 3, 5)], dim=-1))


@pytest.mark.parametrize(("padding", "expected"), [("circular", [1.0, 3.0]), ("zeros", [3.0, 3.0])])
def test_only_circular_shifts_are_limited(padding, expected):
    sequence = Sequence(init=3.0, padding=padding)
    sequence.project_()
    assert sequence.eta.tolist() == expected


def test_ranges_of_sequence_speak_in_units():
    words = Sequence(init={"shift": -0.25, "stretch": math.log(2)}).ranges()
    assert words == {"shift": "±0.250 half-lengths", "stretch": "factor 0.50 to 2.00"}


REJECTED = {
    "padding": (lambda: Sequence(padding="reflect"), ValueError, "unknown padding 'reflect'"),
    "no batch": (lambda: Sequence()(torch.rand(3, 7)), ValueError, r"\[n, channels, length\]"),
    "init beyond tanh": (
        lambda: Sequence(init=1.5, padding="circular", constraint="tanh"),
        ValueError,
        "below",
    ),
    "integers": (lambda: Sequence()(torch.zeros(2, 3, 11).long()), TypeError, "floating point"),
}


@pytest.mark.parametrize(("build", "error", "match"), REJECTED.values(), ids=REJECTED)
def test_bad_input_is_explained(build, error, match):
    with pytest.raises(error, match=match):
        build()
