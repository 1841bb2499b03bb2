"""From a folder of images to an exported transform, in a few lines.

The folder is made here: colour images of two kinds of bars, in two subfolders, each bar at a
random angle of up to 60 degrees to either side. Nothing tells the network so; from the images
alone it opens the range of rotations, and no other. These classes are easily told apart, so the
evidence hardly says how wide the range should be, and it stays about where the search put it.
This takes under half a minute.
"""

import math
import tempfile
from pathlib import Path

import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2.functional import to_pil_image

import laplace_invariance as li
from laplace_invariance.datasets import transformed
from laplace_invariance.layers import cnn

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
shapes = torch.zeros(2, 3, 16, 16)
shapes[0, 0, 2:14, 7:9] = 1  # a red bar
shapes[0, :, 2:5, 5:11] = 1  # with a white head
shapes[1, 0, 2:14, 7:9] = 1
shapes[1, :, 11:14, 5:11] = 1  # with a white foot
for kind, name in enumerate(("head", "foot")):
    (folder / name).mkdir()
    bars = transformed(shapes[kind].expand(120, -1, -1, -1), {"rotation": math.pi / 3})
    noisy = (bars + 0.2 * torch.rand_like(bars)).clamp(0, 1)
    for i, image in enumerate(noisy):
        to_pil_image(image).save(folder / name / f"{i}.png")

# from here on, with a folder of one's own
dataset = ImageFolder(folder)
learnt = li.learn_augmentation(
    cnn((3, 16, 16), 2), dataset, n_epochs=20, search=li.marglik.Search(n_steps=15)
)
print(learnt)
transform = learnt.to_transform()
torch.save(learnt.augmentation.state_dict(), folder / "augmentation.pt")

image, label = ImageFolder(folder, transform=transform)[0]
print(
    f"learnt rotation {learnt.ranges()['rotation']}, exported to "
    f"{type(transform).__name__} for images of {image.size[0]} x {image.size[1]} pixels"
)
