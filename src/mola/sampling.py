"""Draws of last-layer weights from a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mola.component import Component
from mola.errors import OptionError
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
        Weights in float64, and the component of each.

    Raises:
        OptionError: if count is below 1; also without curvature, or with a generator that is not on the CPU.
    """
    if count < 1:
        message = f"n must be at least 1, got {count!r}."
        raise OptionError(message)
    check_generator(generator)
    curvatures = [component.require_curvature("sampling weights")[1] for component in components]
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
