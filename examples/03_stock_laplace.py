"""Use the backend in unmodified laplace-torch: its training function, one evidence, one gradient.

Nothing of laplace-torch is replaced: ``backend=AugmentedGGN`` makes the evidence differentiable
in the range of rotations, and ``li.learning`` takes a step on it whenever
``laplace.marglik_training`` differentiates. This takes under half a minute.
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
augmentation = li.AffinePoints(init={"rotation": 0.1}, learn="rotation", draws="independent")
model = li.InvariantModel(net, augmentation, n_samples=16)

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

# la is laplace-torch's own object; the gradient of its evidence reaches the range of rotations
evidence = la.log_marginal_likelihood()
evidence.backward()
assert model.augmentation.eta.grad[2] != 0
steps = learner.steps["augmentation.eta"]
rotation = model.augmentation.ranges()["rotation"]
print(f"{steps} steps to rotation {rotation}, log evidence {evidence / 200:.2f} per datum")
