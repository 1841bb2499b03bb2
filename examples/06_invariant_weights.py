"""Learn invariant weights by a lower bound on the evidence.

The network has one hidden layer, whose weights are rotated instead of the images; the ELBO of
its last layer learns how far, from five degrees on. The figure shows rows of the first layer,
as images, under the transformations at the start and as learnt. This takes under a minute.
"""

import math
from pathlib import Path

import torch

import laplace_invariance as li
from laplace_invariance import plots
from laplace_invariance.datasets import load, transformed
from laplace_invariance.variational import ShallowNetwork, fit

torch.manual_seed(0)
split = load("digits")
x_train = transformed(split.x_train, "fully_rotated")
x_test = transformed(split.x_test, "fully_rotated")

augmentation = li.AffineImage(init={"rotation": math.radians(5)}, learn="rotation")
model = ShallowNetwork(augmentation, split.in_shape, split.n_classes, length_scale=1.5)
banks = {"at the start": model.filter_bank(4)}
history = fit(
    model,
    x_train,
    split.y_train,
    n_epochs=25,
    batch_size=50,
    lr_hyper=0.2,
    progress_bar=True,
)
banks["as learnt"] = model.filter_bank(4)

figure = plots.figure((10, 3.4))
for ax, (title, bank) in zip(figure.subplots(1, 2), banks.items(), strict=True):
    plots.filter_bank(bank, ax).set_title(title)
path = Path("demo", "invariant_weights.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"figure: {path}")

with torch.no_grad():
    accuracy = (model(x_test).argmax(-1) == split.y_test).float().mean()
bound = history[-1]["objective"]
rotation = augmentation.ranges()["rotation"]
print(f"learnt rotation {rotation}, ELBO {bound:.2f} per image, test accuracy {accuracy:.1%}")
