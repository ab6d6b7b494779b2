"""Draws of last-layer weights from a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mola.choices import whole_number
from mola.component import Component
from mola.errors import StructureTooLargeError
from mola.laplace.memory import free_memory
from mola.randomness import check_generator

__all__ = ["WeightSamples", "draw_weights"]


class WeightSamples(NamedTuple):
    """Draws of the last layer's weights from the mixture."""

    weights: Tensor | list[Tensor]
    """(S, C, P), the bias as last column where the head has one; a list of (C, P) where the networks' widths differ."""
    component: Tensor
    """(S,): which component, and so which network's features, each draw belongs to."""


def draw_weights(
    components: Sequence[Component], weights: Tensor, count: int, generator: torch.Generator | None
) -> WeightSamples:
    """Draw from the mixture: a component by its weight, then weights from its posterior.

    Args:
        components: with curvature.
        weights: (K,) of the mixture.
        count: number of draws.
        generator: on the CPU; None draws from torch's own.

    Returns:
        Weights in float64, and the component of each; `OptionError` if count is no whole number above 0, a component has no
        curvature, or the generator is not on the CPU.

    Raises:
        StructureTooLargeError: if there are so many that memory does not hold them.
    """
    count = whole_number(count, "n")
    check_generator(generator)
    curvatures = [component.require_curvature("sampling weights")[1] for component in components]
    needed = 8 * count * max(curvature.weights.numel() for curvature in curvatures)
    free = free_memory()
    if free is not None and needed > free:
        message = f"{count} draws of the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: draw fewer at a time."
        raise StructureTooLargeError(message)
    choice = torch.multinomial(weights, count, replacement=True, generator=generator)
    drawn: list[Tensor] = [torch.empty(0)] * count
    for index, (component, curvature) in enumerate(zip(components, curvatures, strict=True)):
        places = (choice == index).nonzero().flatten().tolist()
        if places:
            deviations = curvature.spectrum.deviations(component.precision, len(places), generator)
            for place, deviation in zip(places, deviations, strict=True):
                drawn[place] = curvature.weights + deviation
    alike = len({one.shape for one in drawn}) == 1
    return WeightSamples(torch.stack(drawn) if alike else drawn, choice)
