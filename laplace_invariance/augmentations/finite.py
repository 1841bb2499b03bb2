"""Finite groups: every element is applied, and their weights are learnt instead of sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laplace_invariance.augmentations.base import Augmentation, Openings, Shape, check_draws
from laplace_invariance.draws import generator_of_draws
from laplace_invariance.precision import single

__all__ = ["FiniteGroup"]

ELEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "horizontal_flip": lambda x: x.flip(-1),
    "vertical_flip": lambda x: x.flip(-2),
    "quarter_turn": lambda x: x.rot90(1, (-2, -1)),
    "half_turn": lambda x: x.rot90(2, (-2, -1)),
    "three_quarter_turn": lambda x: x.rot90(3, (-2, -1)),
}
NEED_SQUARES = {"quarter_turn", "three_quarter_turn"}
ELEMENT_SETS = {
    "flips": ("horizontal_flip", "vertical_flip", "half_turn"),
    "quarter_turns": ("quarter_turn", "half_turn", "three_quarter_turn"),
    "all": tuple(name for name in ELEMENTS if name != "identity"),
}


class FiniteGroup(Augmentation):
    """Flips and quarter turns of images ``[n, channels, height, width]``, with learnt weights.

    The network is averaged over the identity and the given elements with weights ``1 / z`` and
    ``eta_i / z``, ``z = 1 + sum_i eta_i``, where ``eta_i`` goes from 0, the identity alone, to 1,
    full invariance. All elements are always applied, so that ``n_samples`` of the model is ignored.

    Args:
        elements: ``"flips"``, ``"quarter_turns"``, ``"all"``, or names: horizontal_flip,
            vertical_flip, quarter_turn, half_turn, three_quarter_turn (counter-clockwise).
        init: Initial ``eta`` of all elements, one number between 0 and 1.

    Attributes:
        names: Names of the elements, the identity first.
    """

    eta: Tensor
    input_ndims = (3,)

    def __init__(self, elements: str | Sequence[str] = "all", init: float = 0.0) -> None:
        super().__init__()
        if isinstance(elements, str):
            elements = ELEMENT_SETS.get(elements, (elements,))
        for name in elements:
            if name not in ELEMENT_SETS["all"]:
                known = ", ".join([*ELEMENT_SETS, *ELEMENT_SETS["all"]])
                raise ValueError(
                    f"FiniteGroup has no element {name!r}; choose from {known} "
                    "(the identity is always there)"
                )
        if not 0 <= init <= 1:
            raise ValueError(
                f"init must be between 0, the identity alone, and 1, full invariance, got {init}"
            )
        self.names = ("identity", *dict.fromkeys(elements))
        self.register_hyperparameter("eta", torch.full((len(self.names) - 1,), float(init)))

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the indices of all elements, ``[1, elements]``; nothing is random."""
        return self.fixed(n_samples)

    def fixed(self, n_samples: int) -> Tensor:
        """Return the indices of all elements, ``[1, elements]``."""
        return torch.arange(len(self.names), device=self.eta.device).unsqueeze(0)

    def count(self, n_samples: int) -> int:
        """Return the number of elements, whatever ``n_samples`` is."""
        return len(self.names)

    def weights(self, n_samples: int) -> Tensor:
        """Return the weights of the elements, of which there must be ``n_samples``."""
        if n_samples != len(self.names):
            raise ValueError(
                f"FiniteGroup has {len(self.names)} elements, so as many samples, got {n_samples}"
            )
        eta = single(self.hyperparameter("eta"))
        weights = torch.cat([torch.ones_like(eta[:1]), eta])
        return weights / weights.sum()

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Apply to images ``x`` the elements whose indices are ``draws``, ``[n or 1, samples]``."""
        check_draws(draws, len(x), (), self)
        if x.ndim != 4:
            raise ValueError(
                "FiniteGroup transforms images [n, channels, height, width], "
                f"got shape {list(x.shape)}"
            )
        if x.shape[-1] != x.shape[-2] and NEED_SQUARES.intersection(self.names):
            raise ValueError(
                f"quarter turns need square images, got {list(x.shape)}; choose elements='flips'"
            )
        # the same elements for all images; on a GPU, to ask which would be to wait for it
        if len(draws) == 1 and draws.device.type == "cpu":
            return torch.stack([ELEMENTS[self.names[i]](x) for i in draws[0].tolist()], dim=1)
        elements = torch.stack([ELEMENTS[name](x) for name in self.names], dim=1)
        if len(draws) == 1:
            return elements.index_select(1, draws[0])
        return elements[torch.arange(len(x), device=x.device).unsqueeze(1), draws]

    def draw_one(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return for each of ``n`` images one element, drawn by weight, ``[n, 1]``."""
        weights = self.weights(len(self.names)).detach()
        generator = generator_of_draws(generator)
        device = weights.device if generator is None else generator.device
        draws = torch.multinomial(weights.to(device), n, replacement=True, generator=generator)
        return draws.to(weights.device).unsqueeze(1)

    @torch.no_grad()
    def magnitudes(self) -> dict[str, float]:
        """Return the weight of each element, by name."""
        return dict(zip(self.names, self.weights(len(self.names)).tolist(), strict=True))

    def ranges(self, shape: Shape | None = None) -> dict[str, str]:
        """Return the weight of each element, by name, in words."""
        return {name: f"weight {weight:.3f}" for name, weight in self.magnitudes().items()}

    def openings(self) -> Openings:
        """Return sets of elements that make a group with the identity, each to be opened fully.

        All that were given are one of the sets, whether or not they make a group.
        """
        if not self.eta.requires_grad:
            return {}
        elements = self.names[1:]
        found: Openings = {(name,): (1.0,) for name in elements if name not in NEED_SQUARES}
        sets = (*ELEMENT_SETS.values(), elements)
        found |= {names: (1.0,) for names in sets if len(names) > 1 and set(names) <= set(elements)}
        return found or ({elements: (1.0,)} if elements else {})

    def largest(self, name: str) -> float:
        """Return the ``eta`` of full invariance."""
        return 1.0

    @torch.no_grad()
    def open_(self, widths: Mapping[str, float]) -> None:
        """Set the ``eta`` of elements, in place, and that of others to zero."""
        for name, width in widths.items():
            if name not in self.names[1:]:
                raise ValueError(f"there is no element {name!r} among {', '.join(self.names[1:])}")
            if not 0 <= width <= 1:
                raise ValueError(f"{name} must be between 0 and 1, its limit, got {width}")
        values = [float(widths.get(name, 0.0)) for name in self.names[1:]]
        self.eta.copy_(self.eta.new_tensor(values))

    def widths(self) -> dict[str, float]:
        """Return the ``eta`` of every element, by name; nothing if they are not learnt."""
        if not self.eta.requires_grad:
            return {}
        return dict(zip(self.names[1:], self.eta.tolist(), strict=True))

    def resize_(self, name: str, width: float) -> None:
        """Set the ``eta`` of one element, in place; all others stay as they are."""
        widths = dict(zip(self.names[1:], self.eta.tolist(), strict=True))
        self.open_(widths | {name: width})

    def entries(self, name: str) -> list[Tensor]:
        """Return the ``eta`` of an element."""
        return [self.eta.detach()[self.names[1:].index(name)]]

    def in_words(self, name: str, magnitude: float, shape: Shape | None = None) -> str:
        """Return the ``eta`` of an element in words."""
        return f"{magnitude:.3f} of the identity's weight"

    def project_(self) -> None:
        """Clamp ``eta`` to between 0 and 1, in place."""
        self.eta.data.clamp_(0, 1)
