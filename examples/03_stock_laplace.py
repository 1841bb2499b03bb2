"""Use the backend in unmodified laplace-torch: one evidence, its gradient, and stock ``marglik_training``.

Nothing of laplace-torch is replaced: ``backend=AugmentedGGN`` makes the evidence differentiable in the range of rotations, and
``li.learning`` steps it whenever ``laplace.marglik_training`` differentiates. Under half a minute.
"""

import laplace
import torch
from torch import nn
from torch.utils.data import DataLoader

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.datasets import rotated_shapes

torch.manual_seed(0)
loader = DataLoader(rotated_shapes(200), batch_size=200)
net = nn.Sequential(nn.Flatten(), nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 11))
model = li.InvariantModel(
    net, li.AffinePoints(init={"rotation": 0.1}, learn="rotation"), n_samples=16
)

with li.learning(model, lr=0.1) as learner:
    la, model, margliks, losses = laplace.marglik_training(
        model,
        loader,
        backend=AugmentedGGN,
        n_epochs=240,
        n_epochs_burnin=10,
        n_hypersteps=1,
        marglik_frequency=2,
        optimizer_kwargs={"lr": 1e-2},
        progress_bar=True,
    )

evidence = (
    la.log_marginal_likelihood()
)  # laplace-torch's own object; its gradient reaches the range of rotations
evidence.backward()
assert model.augmentation.eta.grad[2] != 0
steps = learner.steps["augmentation.eta"]
print(
    f"{steps} steps to rotation {model.augmentation.ranges()['rotation']}, log evidence {evidence / 200:.2f} per datum"
)
