r"""The rule that gains in distribution by pooling, and spends half of the gain on caution far from the training data.

1. Prior precision, pooling c and temperature T by validation log loss. Pooling is kept only if its paired gain over c = 1 exceeds two
   standard errors.
2. The largest distance exponent, with T tuned again for it, whose validation log loss stays within a budget: half of the gain over the
   temperature-scaled ensemble, or `price` times the log loss if that is more. The distance counts from the 90 % quantile of the
   validation data on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mola.errors import OptionError
from mola.likelihoods import Likelihood
from mola.options import is_real
from mola.tuning.held_out import HeldOut
from mola.tuning.scores import Candidates, paired, scores
from mola.tuning.tuning import Tuning

if TYPE_CHECKING:
    from mola.posterior import MoLA

NO_COVARIANCE = 1e12
"""A prior precision at which the posterior is the plain ensemble."""

PRECISIONS = (NO_COVARIANCE, 1e2, 1e1, 1.0, 1e-1, 1e-2, 1e-3)
POOLINGS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
EXPONENTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures that are tried: on data without any error the log loss falls for ever as logits are sharpened."""

ONSET = 0.9
"""Quantile of the validation data's distances from which the distance counts."""

SHARE = 0.5
"""Share of the gain over the temperature-scaled ensemble that the distance may spend."""

CLEAR = 2.0
"""Standard errors by which pooling must gain."""


@dataclass(frozen=True)
class Setting:
    """One candidate and its log loss on each validation datum."""

    precision: float
    temperature: float
    pooling: float
    exponent: float
    losses: Tensor

    @property
    def loss(self) -> float:
        """Mean log loss."""
        return float(self.losses.mean())


class Search:
    """Candidates of one mixture, scored on validation data by their log loss at the best temperature."""

    def __init__(self, posterior: MoLA, data: HeldOut, onset: float) -> None:
        self.posterior, self.data, self.onset = posterior, data, onset
        self.curve: list[tuple[float, ...]] = []

    def best_temperatures(
        self, settings: Sequence[tuple[float, float, float]], around: float, width: float = 1.0
    ) -> list[Setting]:
        """Each (precision, pooling, exponent) at its best temperature within a factor of `e^width` of `around`."""
        low, high = [math.log(around) - width] * len(settings), [math.log(around) + width] * len(settings)
        found: list[Setting] = []
        points = 7
        for _ in range(4):  # narrower around the best temperature, or moved on where that is at an end
            grids = [np.exp(np.linspace(one, two, points)) for one, two in zip(low, high, strict=True)]
            rows = [(*setting, float(t)) for setting, grid in zip(settings, grids, strict=True) for t in grid]
            precision, pooling, exponent, temperature = zip(*rows, strict=True)
            candidates = Candidates.of(
                self.posterior,
                precision=precision,
                temperature=temperature,
                pooling=pooling,
                exponent=exponent,
                onset=self.onset,
            )
            losses = scores(self.posterior, self.data, candidates)["nll"].view(len(settings), points, -1)
            places = losses.mean(2).argmin(1)
            found = []
            for index, (setting, grid, place) in enumerate(zip(settings, grids, places.tolist(), strict=True)):
                one, two, three = setting
                found.append(Setting(one, float(grid[place]), two, three, losses[index, place].clone()))
                if place in (0, points - 1):
                    half = (high[index] - low[index]) / 2
                    low[index] = max(math.log(grid[place]) - half, math.log(COLDEST))
                    high[index] = min(math.log(grid[place]) + half, math.log(HOTTEST))
                else:
                    low[index], high[index] = math.log(grid[place - 1]), math.log(grid[place + 1])
        self.curve += [(one.precision, one.temperature, one.pooling, one.exponent, one.loss) for one in found]
        return found


def choose(posterior: MoLA, data: HeldOut, price: float) -> tuple[Setting, Setting, Setting, Search]:
    """The chosen setting, the best one without distance, the temperature-scaled ensemble, and all that was tried."""
    search = Search(posterior, data, _onset(posterior, data) if posterior.has_distances else 1.0)
    (scaled,) = search.best_temperatures([(NO_COVARIANCE, 1.0, 0.0)], 1.0, 2.0)
    poolings = POOLINGS if len(posterior.components) > 1 else (1.0,)
    tried = search.best_temperatures([(one, c, 0.0) for one in PRECISIONS for c in poolings], scaled.temperature)
    scaled = min([scaled, tried[0]], key=lambda one: one.loss)
    best = min(tried, key=lambda one: one.loss)
    if best.pooling != 1:
        step = 0.5 * (best.pooling - POOLINGS[POOLINGS.index(best.pooling) + 1]) if best.pooling > 0 else 0.05
        near = [(best.precision, min(1.0, max(0.0, best.pooling + one * step)), 0.0) for one in (-1, 1)]
        best = min([best, *search.best_temperatures(near, best.temperature, 0.3)], key=lambda one: one.loss)
        mixed = min((one for one in tried if one.pooling == 1), key=lambda one: one.loss)
        gain, error = paired(mixed.losses, best.losses, data)
        if gain <= CLEAR * error:
            best = mixed
    if not posterior.has_distances:
        return best, best, scaled, search
    most = best.loss + max(SHARE * (scaled.loss - best.loss), price * best.loss)
    chosen, exponents = best, list(EXPONENTS[1:])
    for _ in range(3):
        rows = search.best_temperatures(
            [(best.precision, best.pooling, one) for one in exponents], best.temperature, 0.7
        )
        above = math.inf
        for one in rows:
            if one.loss > most:
                above = one.exponent
                break
            chosen = one
        if above == math.inf:
            break
        exponents = [chosen.exponent + (above - chosen.exponent) * part / 6 for part in range(1, 6)]
    return chosen, best, scaled, search


def _onset(posterior: MoLA, data: HeldOut) -> float:
    parts = [
        posterior.scaling.log_distance(posterior.log_distances(rows)[0], posterior.weights)
        for rows, _ in data.chunks(4096)
    ]
    return math.exp(float(np.quantile(data.gather(torch.cat(parts) if parts else None).numpy(), ONSET)))


def check_price(price: float) -> float:
    """Return a price, or raise `OptionError` unless it is a number from 0 to 1."""
    if not (is_real(price) and 0 <= price <= 1):
        raise OptionError(
            f"price must be a number between 0 and 1, got {price!r}. At most 1 % more validation log loss is 0.01."
        )
    return float(price)


@dataclass(frozen=True)
class Calibrated:
    """Gain in distribution by pooling, and spend at most half of the gain on caution far from the training data.

    Args:
        price: share of the validation log loss that the distance may cost beyond what pooling gained.
    """

    price: float = 0.01
    needs_data = True

    def __post_init__(self) -> None:
        check_price(self.price)

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Whether the rule means anything for a likelihood."""
        return likelihood.discrete

    def __call__(self, posterior: MoLA, data: HeldOut | None) -> Tuning:
        """Choose prior precision, temperature, pooling and distance exponent."""
        if not posterior.likelihood.discrete:
            raise OptionError("Calibrated is about probabilities and does not apply to regression: use rule='nll'.")
        if data is None:
            raise OptionError("Calibrated needs validation data: posterior.tune(val_loader, rule='calibrated').")
        chosen, best, scaled, search = choose(posterior, data, self.price)
        names = ("prior_precision", "temperature", "pooling", "distance_exponent", "nll")
        return Tuning(
            f"Calibrated(price={self.price:g})",
            (chosen.precision,) * len(posterior.components),
            _summary(chosen, best, scaled, data),
            curve=dict(zip(names, map(tuple, zip(*search.curve, strict=True)), strict=True)),
            temperature=chosen.temperature,
            pooling=chosen.pooling,
            distance_exponent=chosen.exponent,
            onset=search.onset,
        )


def _summary(chosen: Setting, best: Setting, scaled: Setting, data: HeldOut) -> str:
    gain, error = paired(scaled.losses, chosen.losses, data)
    if chosen.pooling == 1 and chosen.exponent == 0 and chosen.precision == NO_COVARIANCE:
        return (
            f"Nothing could be gained on the validation data: the posterior equals the temperature-scaled ensemble here (log loss "
            f"{scaled.loss:.4g}, temperature {chosen.temperature:.3g})."
        )
    change = f"{abs(gain):.2g} +- {error:.1g} {'lower' if gain >= 0 else 'higher'}"
    spent = f", of which the distance spends {chosen.loss - best.loss:.2g}" if chosen.exponent else ""
    return (
        f"On the validation data the log loss is {chosen.loss:.4g}, {change} than the temperature-scaled "
        f"ensemble's {scaled.loss:.4g}: pooling and prior precision gain {scaled.loss - best.loss:.2g}{spent}."
    )
