"""Learn layer by layer whether shifts matter.

The data are digits in one of four quadrants of a black image. Every layer is a convolution plus
a fully connected path (F-FC); the evidence learns how much of each is used. If the label is the
digit alone, convolutions suffice; if it is digit and quadrant, some layer must know where
things are, and convolutions do not: fully connected paths stay in use. This takes about a
minute.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.datasets import load, quadrants
from laplace_invariance.layers import Standardise, closed_paths, pathway
from laplace_invariance.metrics import LayerReport, layer_report

SIZE = 16  # of the images
WIDTH = 4  # channels of the first layer
EPOCHS = 40
split = load("digits")  # 8 x 8 pixels, a quadrant of 16 x 16


def network(images: Tensor, n_classes: int) -> nn.Sequential:
    """Return a network of four layers, each of which halves the size of its input.

    ``layers.equivariant_cnn`` has eight, for images of 32 x 32.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(standardise=Standardise.of(images))
    size, n_in = SIZE, 1
    for i in range(1, 5):
        n_out = WIDTH * 2 ** (i - 1)
        layers[f"layer{i}"] = pathway("f_fc+conv", n_in, n_out, (size, size), pool=2)
        layers[f"relu{i}"] = nn.ReLU()
        size, n_in = size // 2, n_out
    layers["head"] = nn.Conv2d(n_in, n_classes, 1)
    layers["flatten"] = nn.Flatten()
    return nn.Sequential(layers)


def learn(task: str) -> tuple[LayerReport, float]:
    """Train on a task, and return how much of each path is used, and the test accuracy."""
    n_classes = {"digit": 10, "both": 40}[task]
    torch.manual_seed(0)
    x_train, y_train = quadrants(split.x_train, split.y_train, task, size=SIZE)
    x_test, y_test = quadrants(split.x_test, split.y_test, task, size=SIZE)
    model = network(x_train, n_classes)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=50, shuffle=True)
    result = li.marglik_training(
        model,
        loader,
        n_epochs=EPOCHS,
        n_epochs_burnin=4,
        marglik_frequency=2,
        n_hypersteps=30,
        marglik_batch_size=600,
        prior_prec_init=closed_paths(model),
        backend_kwargs={"stochastic": True},
        optimizer_kwargs={"lr": 5e-3},
        scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR,
        scheduler_kwargs={"T_max": EPOCHS * len(loader), "eta_min": 1e-5},
        progress_bar=True,
    )
    with torch.no_grad():
        accuracy = (model(x_test).argmax(-1) == y_test).float().mean().item()
    return layer_report(result.la), accuracy


def shares(report: LayerReport) -> dict[str, float]:
    """Return the share of the fully connected path by layer."""
    return {row.place: row.relative for row in report.rows if row.path == "f_fc"}


found = {task: learn(task) for task in ("digit", "both")}
for task, (report, _) in found.items():
    chosen = ", ".join(f"{place} {kind}" for place, kind in report.chosen.items())
    print(f"\ntask {task!r}: {chosen}\n{report}\n")
digit, both = (shares(report) for report, _ in found.values())
late = all(both[layer] > 2 * digit[layer] for layer in ("layer3", "layer4"))
accuracies = " and ".join(f"{accuracy:.1%}" for _, accuracy in found.values())
print(f"test accuracy {accuracies}")
print(f"late layers use twice as much of F-FC if the quadrant counts: {late}")
