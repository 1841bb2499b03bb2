"""Singular values of the Jacobian, and the sensitivity along orbits."""

import pytest
import torch
from builders import averaged_cnn, bright_or_dark, images, quarter_turned, small_cnn

import laplace_invariance as li
from laplace_invariance.marglik import MAP
from laplace_invariance.metrics import (
    SpectrumRecorder,
    jacobian_spectrum,
)


def test_spectrum_is_that_of_the_jacobian():
    model, x = small_cnn(), images()
    jacobians = [torch.autograd.functional.jacobian(model, one[None]).view(3, 50) for one in x]
    expected = torch.stack([torch.linalg.svd(one)[1] for one in jacobians]).square().mean(0).sqrt()
    sensitivities = [
        (model(y) - model(x)).norm(dim=1) / (y - x).flatten(1).norm(dim=1)
        for y in quarter_turned(x)
    ]
    orbit = torch.stack(sensitivities).square().mean().sqrt().item()
    found = jacobian_spectrum(model, x, "p4", batch_size=6)
    torch.testing.assert_close(torch.tensor(found.singular_values), expected)
    assert found.orbit == pytest.approx(orbit)
    assert found.relative == pytest.approx(orbit / expected.square().mean().sqrt().item())


def test_spectrum_tells_invariance_from_insensitivity():
    model, x = small_cnn(), images()
    before = jacobian_spectrum(model, x, "p4")
    model[-1].weight.data /= 100
    insensitive, invariant = (
        jacobian_spectrum(model, x, "p4"),
        jacobian_spectrum(averaged_cnn(), x, "p4"),
    )
    assert insensitive.orbit == pytest.approx(before.orbit / 100)
    assert insensitive.relative == pytest.approx(before.relative)
    assert invariant.relative < 1e-10 < 1e-2 < invariant.singular_values[0]


def test_nothing_is_sensitive_to_rotations_of_symmetric_images():
    assert jacobian_spectrum(small_cnn(), torch.ones(2, 2, 5, 5), "p4").orbit == 0


def test_recorder_is_a_callback():
    loader, x = bright_or_dark()
    recorder = SpectrumRecorder(x[:5], "p4", every=2)
    model = small_cnn(n_out=2)
    li.marglik_training(model, loader, objective=MAP(), n_epochs=5, callbacks=[recorder])
    assert recorder.epochs == [1, 3, 5]
    assert recorder.spectra[-1] == jacobian_spectrum(model, x[:5], "p4")
    assert recorder.spectra[0] != recorder.spectra[-1]


def test_sensitivity_to_no_change_is_none():
    x = images() + torch.zeros(7, 2, 5, 5)
    x = (
        x + x.rot90(1, (-2, -1)) + x.rot90(2, (-2, -1)) + x.rot90(3, (-2, -1))
    ) / 4  # up to rounding, turns do nothing
    assert jacobian_spectrum(small_cnn(), x, "p4").orbit == 0
