"""Learn that digits were rotated, and use what was learnt elsewhere.

The data are scikit-learn's digits, each rotated by a random angle. The ranges of all six
generators of the affine group start at zero; the evidence opens rotation and closes the others.
The learnt distribution becomes a transform of torchvision. This takes under half a minute.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.datasets import load, transformed
from laplace_invariance.layers import Standardise, mlp

torch.manual_seed(0)
split = load("digits")
x_train = transformed(split.x_train, "fully_rotated")
x_test = transformed(split.x_test, "fully_rotated")
net = nn.Sequential(Standardise.of(x_train), *mlp(split.in_shape, split.n_classes))
augmentation = li.AffineImage()  # learns translations, rotation, scales and shear
model = li.InvariantModel(net, augmentation, n_samples=8)

result = li.marglik_training(
    model,
    DataLoader(TensorDataset(x_train, split.y_train), batch_size=100, shuffle=True),
    search=True,
    n_epochs=100,
    n_epochs_burnin=4,
    marglik_frequency=2,
    marglik_batch_size=300,
    optimizer_kwargs={"lr": 2e-3},
    progress_bar=True,
)

# a transform that draws from the learnt distribution, for ordinary training elsewhere
transform = augmentation.to_transform()
assert transform(split.x_train[0]).shape == split.x_train[0].shape

with torch.no_grad():
    accuracy = (model(x_test).argmax(-1) == split.y_test).float().mean()
others = max(value for name, value in augmentation.magnitudes().items() if name != "rotation")
print(
    f"learnt rotation {augmentation.ranges()['rotation']}, others below {others + 0.005:.2f}, "
    f"test accuracy {accuracy:.1%}"
)
