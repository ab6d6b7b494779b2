r"""The default rule: gain log loss in distribution, and spend part of the gain on caution far from the training data.

All losses are mean log losses on the validation data, each at the temperature T that is best for it under a weak prior against T < 1
(`SHARPENING`).

1. *Start.* The temperature-scaled ensemble: no covariance, pooling c = 1, distance exponent 0.
2. *Gain.* The best pooling c, then the best prior precision. Each is kept only if its paired gain exceeds two standard errors.
3. *Spend.* The largest distance exponent whose loss stays within a budget: the loss after step 2, plus half of the gain over the
   temperature-scaled ensemble, or plus `price` times the loss if that is more. Distance counts from the 90 % quantile of the
   validation data.
4. *Add covariance at next to no cost.* Where the covariance did not gain, the smallest prior precision that costs at most 0.5 % of the
   loss, with one standard error to spare and at the same T: it lowers confidence, and each network keeps an uncertainty of its own.

The temperature-scaled ensemble is among the candidates, so the rule never does worse than it on the validation data by more than the
price and that 0.5 %.
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
from mola.options import is_real
from mola.scaling import NO_COVARIANCE
from mola.tuning.held_out import HeldOut
from mola.tuning.scores import paired, scores
from mola.tuning.tuning import Rule, Tuning

if TYPE_CHECKING:
    from mola.posterior import MoLA

PRECISIONS = (1e2, 1e1, 1.0, 1e-1, 1e-2)
"""Prior precisions of which the best may gain."""

FREE_PRECISIONS = tuple(10 ** (step / 2) for step in range(-6, 13))
"""Prior precisions of which the smallest that costs next to nothing is kept."""

POOLINGS = (0.75, 0.5, 0.25, 0.0)
"""Poolings tried first; then the neighbours of the best."""

EXPONENTS = (0.25, 0.5, 1.0, 1.5, 2.0)
"""Distance exponents. Beyond 2 logits would fall faster with the distance than with the norm of the features, and inputs that differ a
little from the validation data would lose more than the validation data can show."""

COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures that are tried."""

SHARPENING = 0.5
"""Standard deviation of a Gaussian prior on `log T` below 0. Without it, logits would be sharpened without end on validation data that
are all classified correctly, as a few hundred often are. The prior has no effect above T = 1, and little with thousands of data."""

ONSET = 0.9
"""Quantile of the validation data's distances from which distance counts."""

SHARE = 0.5
"""Share of the gain over the temperature-scaled ensemble that the distance may spend."""

FREE = 0.005
"""Share of the log loss that covariance may cost where it does not gain, with one standard error to spare."""

TOO_SMALL = 1e-4
"""Share of the log loss below which the summary gives no number for a difference."""

CLEAR = 2.0
"""Standard errors by which pooling, and the covariance, must gain."""


@dataclass(frozen=True)
class Calibrated(Rule):
    """The default: gain log loss by pooling, and spend part of the gain on caution far from the training data.

    Chooses prior precision, temperature, pooling and distance exponent on one pass over the validation data.

    Args:
        price: share of the validation log loss that caution may cost where pooling gained less than twice as much.
    """

    price: float = 0.01
    fixes_weights = True
    """Weights by evidence depend on the prior precision, and would be those of one network without covariance."""

    def __post_init__(self) -> None:
        if not (is_real(self.price) and 0 <= self.price <= 1):
            raise OptionError(
                f"price must be a number between 0 and 1, got {self.price!r}. At most 1 % more validation log loss is 0.01."
            )

    def __call__(self, posterior: MoLA, data: HeldOut) -> Tuning:
        """Choose prior precision, temperature, pooling and distance exponent."""
        search = Search(posterior, data)
        plain, scaled = search.ensembles()
        best = search.keep_gains(scaled)
        cautious = best
        if posterior.has_distances:
            budget = max(SHARE * (scaled.loss - best.loss), self.price * best.loss)
            cautious = search.most_cautious(best, best.loss + budget)
        chosen = search.free_covariance(cautious) if cautious.precision == NO_COVARIANCE else cautious
        return Tuning(
            f"Calibrated(price={self.price:g})",
            (chosen.precision,) * len(posterior.components),
            _summary(chosen, cautious, best, scaled, plain, search.data),
            curve={
                "prior_precision": tuple(one.precision for one in search.tried),
                "temperature": tuple(one.temperature for one in search.tried),
                "pooling": tuple(one.pooling for one in search.tried),
                "distance_exponent": tuple(one.exponent for one in search.tried),
                "nll": tuple(one.loss for one in search.tried),
            },
            temperature=chosen.temperature,
            pooling=chosen.pooling,
            distance_exponent=chosen.exponent,
            onset=search.onset,
        )


@dataclass(frozen=True)
class Setting:
    """Prior precision, pooling, distance exponent and temperature, and the log loss of each validation datum."""

    precision: float
    pooling: float
    exponent: float
    temperature: float
    losses: Tensor

    @property
    def loss(self) -> float:
        """Mean log loss."""
        return float(self.losses.mean())


class Search:
    """The steps of the rule on one mixture and its validation data, and all settings that they tried."""

    posterior: MoLA
    data: HeldOut
    onset: float

    def __init__(self, posterior: MoLA, data: HeldOut) -> None:
        self.posterior, self.data = posterior, data
        self.onset = distance_onset(posterior, data) if posterior.has_distances else 1.0
        self.tried: list[Setting] = []

    def ensembles(self) -> tuple[Setting, Setting]:
        """The plain ensemble, at T = 1, and the temperature-scaled ensemble."""
        settings = [(NO_COVARIANCE, 1.0, 0.0)]
        plain = Setting(*settings[0], 1.0, self._losses(settings, np.ones((1, 1)))[0, 0])
        before, (rough,) = plain, self._at_best_temperature(settings, 1.0, 2.0)
        while abs(math.log(rough.temperature / before.temperature)) > 2:  # until T is within the range searched
            before, (rough,) = rough, self._at_best_temperature(settings, rough.temperature, 2.0)
        return plain, self._at_best_temperature(settings, rough.temperature, 0.3)[0]

    def keep_gains(self, best: Setting) -> Setting:
        """The best pooling, then the best prior precision, each kept if its gain is clear."""
        if len(self.posterior.components) > 1:
            pooled = self._at_best_temperature([(best.precision, c, 0.0) for c in POOLINGS], best.temperature)
            middle = min(pooled, key=lambda one: one.loss).pooling
            beside = [(best.precision, c, 0.0) for c in (middle - 0.125, middle + 0.125) if 0 <= c < 1]
            best = self._clearly_better(pooled + self._at_best_temperature(beside, best.temperature), best)
        covariances = [(precision, best.pooling, 0.0) for precision in PRECISIONS]
        return self._clearly_better(self._at_best_temperature(covariances, best.temperature), best)

    def most_cautious(self, best: Setting, most: float) -> Setting:
        """The largest distance exponent up to which the loss stays below `most`: on a coarse grid, then on a finer one."""
        chosen, exponents = best, list(EXPONENTS)
        for _ in range(2):
            settings = [(best.precision, best.pooling, exponent) for exponent in exponents]
            above = None
            for one in self._at_best_temperature(settings, best.temperature, 0.7):
                if one.loss > most:
                    above = one.exponent
                    break
                chosen = one
            if above is None:
                break
            exponents = [chosen.exponent + (above - chosen.exponent) * part / 6 for part in range(1, 6)]
        return chosen

    def free_covariance(self, chosen: Setting) -> Setting:
        """The smallest prior precision that costs next to nothing at the same temperature."""
        settings = [(precision, chosen.pooling, chosen.exponent) for precision in FREE_PRECISIONS]
        losses = self._losses(settings, np.full((len(settings), 1), chosen.temperature))[:, 0]
        found = [Setting(*setting, chosen.temperature, each) for setting, each in zip(settings, losses, strict=True)]
        self.tried += found
        for one in found:
            cost, error = paired(one.losses, chosen.losses, self.data)
            if cost + error <= FREE * chosen.loss:
                return one
        return chosen

    def _clearly_better(self, settings: Sequence[Setting], current: Setting) -> Setting:
        best = min(settings, key=lambda one: one.loss)
        gain, error = paired(current.losses, best.losses, self.data)
        return best if gain > CLEAR * error else current

    def _at_best_temperature(
        self, settings: Sequence[tuple[float, float, float]], around: float, width: float = 1.0
    ) -> list[Setting]:
        # Each (precision, pooling, exponent) at its best temperature, searched first within a factor of e^width of `around`.
        low, high = math.log(COLDEST), math.log(HOTTEST)
        centres, rows = np.full(len(settings), math.log(around)), np.arange(len(settings))
        for step in (width / 2, width / 6, width / 18):  # five temperatures at a time, closer around the best
            logs = np.clip(centres[:, None] + step * np.arange(-2, 3), low, high)
            losses = self._losses(settings, np.exp(logs))
            prior = (np.minimum(logs, 0) / SHARPENING) ** 2 / (2 * losses.shape[2])
            places = (losses.mean(2).numpy() + prior).argmin(1)
            centres = logs[rows, places]
        best = losses[torch.as_tensor(rows), torch.as_tensor(places)]
        found = [
            Setting(*setting, float(np.exp(log)), each)
            for setting, log, each in zip(settings, centres, best, strict=True)
        ]
        self.tried += found
        return found

    def _losses(self, settings: Sequence[tuple[float, float, float]], temperatures: np.ndarray) -> Tensor:
        # Log losses (S, t, n) of S settings (precision, pooling, exponent) at temperatures (S, t).
        precision, pooling, exponent = (np.repeat(one, temperatures.shape[1]) for one in zip(*settings, strict=True))
        found = scores(
            self.posterior,
            self.data,
            precision=precision.tolist(),
            temperature=temperatures.flatten().tolist(),
            pooling=pooling.tolist(),
            exponent=exponent.tolist(),
            onset=self.onset,
        )
        return found["nll"].view(*temperatures.shape, -1)


def distance_onset(posterior: MoLA, data: HeldOut) -> float:
    """The distance, relative to the median of the validation data, from which distance counts."""
    parts = [
        posterior.scaling.log_distance(posterior.log_distances(rows)[0], posterior.weights)
        for rows, _ in data.chunks(4096)
    ]
    found = float(np.quantile(data.gather(torch.cat(parts) if parts else None).numpy(), ONSET))
    return math.exp(max(0.0, found))  # below 0 where most features are all 0


def _summary(chosen: Setting, cautious: Setting, best: Setting, scaled: Setting, plain: Setting, data: HeldOut) -> str:
    ensemble = "ensemble" if len(data.outputs) > 1 else "network"
    if best is scaled and chosen.exponent == 0:
        return (
            f"The posterior equals the temperature-scaled {ensemble} here, up to a covariance that costs next to nothing: no more "
            f"could be gained on the validation data (temperature {chosen.temperature:.3g}, log loss {chosen.loss:.4g}, "
            f"{_against(plain, chosen, data, f'plain {ensemble}')})."
        )
    compared = (
        f"{_against(scaled, chosen, data, f'temperature-scaled {ensemble}')}, "
        f"{_against(plain, chosen, data, f'plain {ensemble}')}"
    )
    used = {"pooling": best.pooling < 1, "covariance": best.precision < NO_COVARIANCE}
    gained = " and ".join(name for name in used if used[name])
    parts = [f"{gained.capitalize()} lowered it by {scaled.loss - best.loss:.2g}."] if gained else []
    if chosen.exponent > 0:
        cost = cautious.loss - best.loss
        cost_words = f"raised it by {cost:.2g}" if cost > TOO_SMALL * best.loss else "cost too little to measure"
        parts.append(f"Caution far from the training data {cost_words}.")
    return f"Validation log loss {chosen.loss:.4g}: {compared}. {' '.join(parts)}"


def _against(other: Setting, own: Setting, data: HeldOut, name: str) -> str:
    gain, error = paired(other.losses, own.losses, data)
    if abs(gain) <= TOO_SMALL * other.loss:
        return f"difference from the {name} too small to measure"
    size = f"{abs(gain):.2g}{f' ± {error:.1g}' if math.isfinite(error) else ''} {'lower' if gain > 0 else 'higher'}"
    return f"no clear difference from the {name} ({size})" if abs(gain) <= error else f"{size} than the {name}"
