"""Learn how far shapes of 2-D points may be rotated.

Shapes of six points are rotated by up to 120 degrees to either side; rotated further, they
belong to another class. The evidence finds that range on the training data alone, while the
network trains. This takes under half a minute.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import laplace_invariance as li
from laplace_invariance.datasets import rotated_shapes

torch.manual_seed(0)
train = rotated_shapes(200)
test = rotated_shapes(2000)
net = nn.Sequential(nn.Flatten(), nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 11))
augmentation = li.AffinePoints(init={"rotation": 0.1}, learn="rotation", draws="independent")
model = li.InvariantModel(net, augmentation, n_samples=16)

result = li.marglik_training(
    model,
    DataLoader(train, batch_size=200),
    n_epochs=240,
    n_epochs_burnin=10,
    n_hypersteps=1,
    marglik_frequency=2,
    optimizer_kwargs={"lr": 1e-2},
    progress_bar=True,
)

x, y = test.tensors
with torch.no_grad():
    accuracy = (model(x).argmax(-1) == y).float().mean()
rotation = augmentation.ranges()["rotation"]
print(f"learnt rotation {rotation} (true ±120.0), test accuracy {accuracy:.1%}")
