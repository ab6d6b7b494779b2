r"""The default rule, which lowers the in-distribution log loss and trades part of the gain for caution far from the training data.

All losses are mean log losses on the validation data, each at the temperature T that minimises it, under a weak prior against T < 1
(`SHARPENING`).

1. *Start.* Begin with the temperature-scaled ensemble: no covariance, pooling coefficient c = 1, distance exponent 0.
2. *Gain.* Find the best pooling coefficient c, then the best prior precision. Keep each change only if its paired gain exceeds two
   standard errors.
3. *Spend.* Choose the largest distance exponent at which the loss stays within a budget. The budget is the loss after step 2 plus the
   larger of two amounts: half of the gain over the temperature-scaled ensemble, and `price` times the loss. Logits shrink only beyond
   the 90 % quantile of the validation data's distances.
4. *Add covariance.* If step 2 kept no covariance, choose the smallest prior precision that, at the same T, raises the loss by at most
   0.5 %, including one standard error. The covariance lowers confidence and adds the uncertainty within each network.

Because the temperature-scaled ensemble is among the candidates, the rule's validation loss exceeds the ensemble's by at most the price
plus 0.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.options import is_real
from molaplace.rules.held_out import HeldOut
from molaplace.rules.rule import Rule, Tuning, warned
from molaplace.rules.scores import paired, scores
from molaplace.scaling import NO_COVARIANCE

if TYPE_CHECKING:
    from molaplace.posterior import MoLA

PRECISIONS = (1e2, 1e1, 1.0, 1e-1, 1e-2)
"""Prior precisions tried in step 2."""

FREE_PRECISIONS = tuple(10 ** (step / 2) for step in range(-6, 13))
"""Prior precisions tried in step 4, which keeps the smallest one that raises the loss only negligibly."""

POOLINGS = (0.75, 0.5, 0.25, 0.0)
"""Pooling coefficients tried first. The neighbours of the best coefficient are tried next."""

EXPONENTS = (0.25, 0.5, 1.0, 1.5, 2.0)
"""Distance exponents tried. With a larger exponent, confidence would drop sharply for inputs that differ only slightly from the
validation data, and the validation data could not reveal this."""

COLDEST, HOTTEST = 0.01, 100.0
"""Smallest and largest temperatures tried."""

SHARPENING = 0.5
"""Standard deviation of a Gaussian prior on `log T`, applied only where `log T` is negative. Without this prior, logits would be
sharpened without limit whenever all validation data are classified correctly, as is common with a few hundred examples. The prior has
no effect above T = 1, and little effect with thousands of examples."""

ONSET = 0.9
"""Logits shrink beyond this quantile of the validation data's distances."""

SHARE = 0.5
"""Share of the gain over the temperature-scaled ensemble that may be spent on the distance exponent."""

FREE = 0.005
"""Largest relative increase in log loss, including one standard error, that the covariance added in step 4 may cause."""

TOO_SMALL = 1e-4
"""Largest relative difference in log loss that the summary describes as not measurable."""

CLEAR = 2.0
"""Number of standard errors that the gain from pooling or covariance must exceed for the change to be kept."""


@dataclass(frozen=True)
class Calibrated(Rule):
    """The default rule, which lowers the log loss by pooling and trades part of the gain for caution far from the training data.

    It chooses the prior precision, temperature, pooling coefficient and distance exponent in one pass over the validation data.

    Args:
        price: largest relative increase in validation log loss that the distance exponent may cause. The loss may rise by more if the
            increase is at most half of the gain from pooling and covariance.
    """

    price: float = 0.01
    fixes_weights = True
    """True, since evidence-based weights depend on the prior precision. Without covariance, they would give nearly all
    the weight to one network."""

    def __post_init__(self) -> None:
        if not (is_real(self.price) and 0 <= self.price <= 1):
            raise OptionError(
                f"must be a number between 0 and 1, got {self.price!r}. With a price of 0.01, the validation log loss may rise "
                f"by up to 1 %.",
                argument="price",
            )

    def __call__(self, posterior: MoLA, data: HeldOut) -> Tuning:
        """Choose the prior precision, temperature, pooling coefficient and distance exponent."""
        search = Search(posterior, data)
        plain, scaled = search.ensembles()
        best = search.keep_gains(scaled)
        cautious, budget = best, 0.0
        if posterior.has_distances:
            budget = max(SHARE * (scaled.loss - best.loss), self.price * best.loss)
            cautious = search.most_cautious(best, best.loss + budget)
        chosen = search.free_covariance(cautious) if cautious.precision == NO_COVARIANCE else cautious
        return Tuning(
            f"Calibrated(price={self.price:g})",
            (chosen.precision,) * len(posterior.components),
            _summary(chosen, cautious, best, scaled, plain, budget, search.data),
            _notes(chosen.temperature),
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
    """A prior precision, pooling coefficient, distance exponent and temperature, with the log loss of each validation datum."""

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
    """The steps of the rule for one mixture and its validation data, together with all settings tried so far."""

    posterior: MoLA
    data: HeldOut
    onset: float

    def __init__(self, posterior: MoLA, data: HeldOut) -> None:
        self.posterior, self.data = posterior, data
        self.onset = distance_onset(posterior, data) if posterior.has_distances else 1.0
        self.tried: list[Setting] = []

    def ensembles(self) -> tuple[Setting, Setting]:
        """Return the settings of the plain ensemble (T = 1) and of the temperature-scaled ensemble."""
        settings = [(NO_COVARIANCE, 1.0, 0.0)]
        plain = Setting(*settings[0], 1.0, self._losses(settings, np.ones((1, 1)))[0, 0])
        before, (rough,) = plain, self._at_best_temperature(settings, 1.0, 2.0)
        while abs(math.log(rough.temperature / before.temperature)) > 2:  # T left the range, so search again
            before, (rough,) = rough, self._at_best_temperature(settings, rough.temperature, 2.0)
        return plain, self._at_best_temperature(settings, rough.temperature, 0.3)[0]

    def keep_gains(self, best: Setting) -> Setting:
        """Improve the pooling coefficient and then the prior precision, keeping each change only if its gain is clear."""
        if len(self.posterior.components) > 1:
            pooled = self._at_best_temperature([(best.precision, c, 0.0) for c in POOLINGS], best.temperature)
            middle = min(pooled, key=lambda one: one.loss).pooling
            beside = [(best.precision, c, 0.0) for c in (middle - 0.125, middle + 0.125) if 0 <= c < 1]
            best = self._clearly_better(pooled + self._at_best_temperature(beside, best.temperature), best)
        covariances = [(precision, best.pooling, 0.0) for precision in PRECISIONS]
        return self._clearly_better(self._at_best_temperature(covariances, best.temperature), best)

    def most_cautious(self, best: Setting, most: float) -> Setting:
        """Return the setting with the largest distance exponent at which the loss is at most `most` (coarse-to-fine search)."""
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
        """Return the setting with the smallest prior precision that, at the same temperature, raises the loss only negligibly."""
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
        # Return each setting (precision, pooling, exponent) at its best temperature. The search starts within a factor of e^width of
        # `around`.
        low, high = math.log(COLDEST), math.log(HOTTEST)
        centres, rows = np.full(len(settings), math.log(around)), np.arange(len(settings))
        for step in (
            width / 2,
            width / 6,
            width / 18,
        ):  # try five temperatures in each round, with ever smaller steps around the best one
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
        # Return the log losses (S, t, n) of S settings (precision, pooling, exponent), each at its own t temperatures.
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
    """Return the distance, relative to the validation data's median, beyond which logits shrink."""
    parts = [
        posterior.scaling.log_distance(posterior.log_distances(rows)[0], posterior.weights)
        for rows, _ in data.chunks(4096)
    ]
    found = float(np.quantile(data.gather(torch.cat(parts) if parts else None).numpy(), ONSET))
    return math.exp(max(0.0, found))  # the log quantile is negative if the features of most inputs are all 0


def _notes(temperature: float) -> tuple[str, ...]:
    if 1.001 * COLDEST < temperature < 0.999 * HOTTEST:
        return ()
    return (
        warned(
            f"the temperature is {temperature:.3g}, at one end of its range: the networks' outputs are out of proportion to their "
            f"accuracy. Check that the inputs are preprocessed as in training."
        ),
    )


def _summary(
    chosen: Setting, cautious: Setting, best: Setting, scaled: Setting, plain: Setting, budget: float, data: HeldOut
) -> str:
    ensemble = "ensemble" if len(data.outputs) > 1 else "network"
    if best is scaled and chosen.exponent == 0:
        return (
            f"Nothing but temperature scaling clearly lowered the validation log loss, so the posterior equals the "
            f"temperature-scaled {ensemble}, apart from a covariance that barely changes the log loss (temperature "
            f"{chosen.temperature:.3g}, log loss {chosen.loss:.4g}, "
            f"{_against(plain, chosen, data, f'plain {ensemble}')})."
        )
    compared = (
        f"{_against(scaled, chosen, data, f'temperature-scaled {ensemble}')}, "
        f"{_against(plain, chosen, data, f'plain {ensemble}')}"
    )
    used = {"pooling": best.pooling < 1, "covariance": best.precision < NO_COVARIANCE}
    gained = " and ".join(name for name in used if used[name])
    parts = [f"{gained.capitalize()} lowered the log loss by {scaled.loss - best.loss:.2g}."] if gained else []
    if chosen.exponent > 0:
        cost = cautious.loss - best.loss
        effect = "had no measurable effect on the log loss"
        if abs(cost) > TOO_SMALL * best.loss:
            raised = f"raised the log loss by {cost:.2g} (allowed: {budget:.2g})"
            effect = raised if cost > 0 else f"lowered the log loss by {-cost:.2g}"
        parts.append(f"Caution far from the training data (distance exponent {chosen.exponent:.3g}) {effect}.")
    return f"The validation log loss is {chosen.loss:.4g}: {compared}. {' '.join(parts)}"


def _against(other: Setting, own: Setting, data: HeldOut, name: str) -> str:
    gain, error = paired(other.losses, own.losses, data)
    if abs(gain) <= TOO_SMALL * other.loss:
        return f"no measurable difference from the {name}"
    size = f"{abs(gain):.2g}{f' ± {error:.2g}' if math.isfinite(error) else ''} {'lower' if gain > 0 else 'higher'}"
    return f"no clear difference from the {name} ({size})" if abs(gain) <= CLEAR * error else f"{size} than the {name}"
