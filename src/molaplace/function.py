"""One function drawn from a posterior."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from molaplace.likelihoods import ClassificationLikelihood
from molaplace.network import Inputs, Rows, one_batch


class PosteriorFunction(nn.Module):
    """One function drawn from a posterior: a component, and an offset of its weights; returned by `posterior.function`.

    The weights are drawn once, so every call evaluates the same function, and the values at an input do not depend on the rest of its
    batch. Calling the function returns what calling the posterior returns: probabilities (n, C) or, for regression, targets (n, D)
    without noise. `latent` returns the logits. Both are differentiable if an input requires gradients.

    Args:
        posterior: the mixture from which the function was drawn.
        component: index of the component.
        draw: offset of the component's weights, or None for a plain ensemble.
    """

    draw: Tensor | None

    def __init__(self, posterior: Any, component: int, draw: Tensor | None) -> None:
        super().__init__()
        self.posterior: Any = posterior
        self.component: int = component
        self.register_buffer("draw", draw)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of this module only. The networks keep their own modes, but always predict in evaluation mode."""
        self.training = mode
        return self

    def forward(self, inputs: Inputs) -> Tensor:
        """Return probabilities (n, C) or, for regression, the targets (n, D) without noise, in the targets' units."""
        likelihood = self.posterior.likelihood
        if not isinstance(likelihood, ClassificationLikelihood):
            return self.latent(inputs)
        return self._by_rows(inputs, lambda rows: likelihood.probabilities(self._latent_of(rows)))

    def latent(self, inputs: Inputs) -> Tensor:
        """Return the logits (n, C) before the softmax or sigmoid or, for regression, the same values as a call.

        The logits include temperature, distance and pooling. Their distribution over many functions is that of `posterior.joint`.
        """
        return self._by_rows(inputs, self._latent_of)

    def _by_rows(self, inputs: Inputs, compute: Any) -> Tensor:
        captured = self.posterior.capture(one_batch(inputs))
        return self.posterior.by_rows(captured, lambda rows: {"values": compute(rows)})["values"]

    def _latent_of(self, rows: Rows) -> Tensor:
        members = self.posterior.members(self.posterior.project(rows))
        latent = self.posterior.likelihood.latent(members)
        mean = latent.means[self.component]
        spread = members.spreads[self.component]
        if self.draw is None or spread is None:
            return mean
        deviation = spread.curvature.deviations(spread.z, self.draw)[:, 0]
        return mean + latent.factors[self.component] * latent.scale * deviation

    def extra_repr(self) -> str:
        """Return the index of the component as text."""
        return f"component={self.component}"


def drawn_from(posterior: Any, seed: int) -> PosteriorFunction:
    """Draw a component and an offset of its weights. Unless outputs are pooled or distances matter, the function runs one network only."""
    generator = torch.Generator("cpu").manual_seed(seed)
    index = int(torch.multinomial(posterior.weights.cpu(), 1, generator=generator))
    component = posterior.components[index]
    precision = posterior.prior_precision[index]
    layer = component.layer
    draw = None
    if layer is not None:
        draw = layer.curvature_at(posterior.settings.noise_factors[index]).offsets(precision, 1, generator)
    if posterior.pooling == 1 and not posterior.settings.uses_distance:
        return PosteriorFunction(posterior.alone(index), 0, draw)
    return PosteriorFunction(posterior, index, draw)
