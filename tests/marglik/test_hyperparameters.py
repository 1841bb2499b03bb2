"""Steps of hyperparameters, and which of them are taken."""

import torch
from builders import invariant_network

from laplace_invariance.marglik.hyperparameters import CLEAR, Hyperparameters


def stepped(gradients, only_clear):
    """Return ``eta`` after every step along gradients ``[n, 6]``."""
    model = invariant_network()
    torch.nn.init.zeros_(model.augmentation.eta)
    hyperparameters = Hyperparameters(model, lr=0.01)
    (eta,) = hyperparameters.tensors
    found = []
    for gradient in gradients:
        eta.grad = gradient.clone()
        hyperparameters.step(only_clear)
        found.append(eta.detach().clone())
    return torch.stack(found)


def test_noise_does_not_move_what_a_clear_gradient_does():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(60, 6, generator=generator)
    gradients[:, 2] -= 2.0  # the only one with a mean
    plain, gated = stepped(gradients, only_clear=False), stepped(gradients, only_clear=True)
    noise = [0, 1, 3, 4, 5]
    moves = torch.cat([gated[:1], gated.diff(dim=0)])
    # two standard errors: about one step in twenty
    assert (moves[:, noise] != 0).double().mean() < 0.12
    assert gated[-1, noise].abs().max() < 0.5 * plain[-1, noise].abs().max()
    assert gated[-1, 2] > 0.8 * plain[-1, 2] > 0.3


def test_the_first_steps_wait_for_a_mean():
    """However large, one gradient says nothing of its noise: one of four in a row is the first."""
    gradients = torch.full((6, 6), 5.0)
    moved = stepped(gradients, only_clear=True).abs().sum(1) > 0
    assert moved.tolist() == [False, False, False, False, True, True]
    assert CLEAR == 2.0


def test_a_tensor_without_a_gradient_stays():
    model = invariant_network()
    hyperparameters = Hyperparameters(model, lr=0.01)
    before = hyperparameters.tensors[0].clone()
    hyperparameters.step(only_clear=True)
    torch.testing.assert_close(hyperparameters.tensors[0].detach(), before.detach())
