"""The Monte Carlo link, which averages probabilities over random draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from molaplace.likelihoods.base import ClassificationLikelihood
from molaplace.links.base import Link
from molaplace.numerics import check_seed, standard_normals
from molaplace.options import one_of, whole_number
from molaplace.structures.base import Spread

DRAWS_AT_ONCE = 2**16
"""Maximum number of values (draws times classes) held in memory at once for each datum."""


@dataclass(frozen=True)
class MonteCarlo(Link):
    """The mean of the probabilities over draws of the logits.

    All data share the same standard normal draws, so a prediction does not depend on the rest of its batch. The same seed gives the
    same probabilities. The estimate for each datum is unbiased.

    Args:
        samples: number of draws.
        over: whether to draw the "logits" or the "weights" of the last layer. The logits of each datum have the same distribution in
            both cases.
        seed: seed for the draws, used unless a generator is passed to the call.
    """

    samples: int = 100
    over: Literal["logits", "weights"] = "logits"
    seed: int = 0
    name = "mc"
    variance_only = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_number(self.samples, "samples"))
        one_of(self.over, ("logits", "weights"), "over")
        check_seed(self.seed)

    def row_size(self, outputs: int) -> int:
        """Return the number of drawn values that are held in memory at once for each datum."""
        return outputs * min(self.samples, max(1, DRAWS_AT_ONCE // outputs))

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: ClassificationLikelihood, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (..., n, C)."""
        if spread is None:
            return likelihood.probabilities(mean)
        # Draw with NumPy, so that tracing stores the draws as constants.
        generator = np.random.default_rng(self.seed if seed is None else seed)
        total, step = torch.zeros_like(mean), max(1, DRAWS_AT_ONCE // mean.shape[-1])
        if self.over == "weights":
            for start in range(0, self.samples, step):
                deviations = spread.by_weights(min(step, self.samples - start), generator)
                total = total + likelihood.probabilities(mean[..., None, :] + deviations).sum(-2)
            return total / self.samples
        noise = standard_normals((self.samples, spread.noise_size), generator).to(mean)
        for part in torch.split(noise, step):
            total = total + likelihood.probabilities(mean[..., None, :] + spread.perturb(part)).sum(-2)
        return total / self.samples
