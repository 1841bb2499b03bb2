"""Small models and data that many tests share."""

import torch
from torch import nn


class Gain(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        return self.gain * x


def seeded_generator(seed=0):
    return torch.Generator().manual_seed(seed)
