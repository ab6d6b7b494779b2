r"""The default rule, which lowers the in-distribution log loss and trades part of the gain for caution far from the training data.

All losses are mean log losses on the validation data, each at its best temperature T. The choices of T and of the pooling coefficient
include a weak prior against T < 1 and c < 1 (`priors.py`), without which few data would decide by chance.

1. *Start.* Begin with the temperature-scaled ensemble: no covariance, pooling coefficient c = 1, distance exponent 0.
2. *Gain.* Find the best pooling coefficient c, then the best prior precision. Keep each change only if its paired gain, prior
   included, exceeds two standard errors.
3. *Spend.* Choose the largest distance exponent that raises the loss after step 2 by at most a budget. The budget is the larger of two
   amounts: half of the gain over the temperature-scaled ensemble, and `price` times the loss. Logits shrink only beyond the 90 %
   quantile of the validation data's distances.
4. *Add covariance.* If step 2 kept no covariance, choose the smallest prior precision that, at the same T, raises the loss by at most
   0.5 %, including one standard error. The covariance lowers confidence and adds the uncertainty within each network.

Because the temperature-scaled ensemble is among the candidates, the rule's validation loss exceeds the ensemble's by at most the price
plus 0.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from molaplace.errors import warned
from molaplace.options import check_number, counted
from molaplace.rules.held_out import HeldOut
from molaplace.rules.objective import Objective, paired
from molaplace.rules.priors import negative_log_prior
from molaplace.rules.rule import Rule, Tuning
from molaplace.rules.search import as_curve
from molaplace.settings import NO_COVARIANCE, Settings

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

ONSET = 0.9
"""Logits shrink beyond this quantile of the validation data's distances."""

SHARE = 0.5
"""Share of the gain over the temperature-scaled ensemble that may be spent on the distance exponent."""

FREE = 0.005
"""Largest relative increase in log loss, including one standard error, that the covariance added in step 4 may cause."""

TOO_SMALL = 1e-4
"""Largest relative difference in log loss that the summary describes as not measurable."""

FEW = 100
"""Number of independent validation data below which a warning says how much the prior decides."""

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
        check_number(self.price, "price", 0, 1, "With a price of 0.01, the validation log loss may rise by up to 1 %.")

    def __call__(self, objective: Objective) -> Tuning:
        """Choose the prior precision, temperature, pooling coefficient and distance exponent."""
        search = Search(objective)
        plain, scaled = search.ensembles()
        best = search.keep_gains(scaled)
        cautious = best
        budget = 0.0
        if objective.has_distances:
            budget = max(SHARE * (scaled.loss - best.loss), self.price * best.loss)
            cautious = search.most_cautious(best, best.loss + budget)
        chosen = cautious if cautious.has_covariance else search.free_covariance(cautious)
        return Tuning(
            f"Calibrated(price={self.price:g})",
            chosen.settings,
            _summary(chosen, cautious, best, scaled, plain, budget, objective.data),
            (*_notes_on_count(search.num_data, objective.num_networks), *_notes_on_temperature(chosen.temperature)),
            curve=search.curve(),
        )


@dataclass(frozen=True)
class Trial:
    """Settings that have been tried, with the log loss of each validation datum."""

    settings: Settings
    losses: Tensor

    @property
    def loss(self) -> float:
        """Mean log loss."""
        return float(self.losses.mean())

    @property
    def has_covariance(self) -> bool:
        """True if the prior precision leaves a covariance."""
        return self.settings.has_covariance

    @property
    def temperature(self) -> float:
        """Temperature of the settings."""
        return self.settings.temperature


class Search:
    """The steps of the rule for one mixture and its validation data, together with all settings tried so far."""

    objective: Objective
    num_data: float
    """Number of independent validation data."""
    tried: list[Trial]

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.num_data = objective.data.num_independent()
        self.tried = []

    def ensembles(self) -> tuple[Trial, Trial]:
        """Return the plain ensemble (T = 1) and the temperature-scaled ensemble, at the onset that every later trial keeps."""
        onset = distance_onset(self.objective) if self.objective.has_distances else 1.0
        ensemble = self.objective.settings.at_precision(NO_COVARIANCE, onset=onset)
        plain = Trial(ensemble, self.objective.scores([ensemble])["nll"][0])
        previous = plain
        rough = self._at_best_temperature(ensemble, 1.0, 2.0)
        while abs(math.log(rough.temperature / previous.temperature)) > 2:  # T left the range, so search again
            previous = rough
            rough = self._at_best_temperature(ensemble, rough.temperature, 2.0)
        return plain, self._at_best_temperature(ensemble, rough.temperature, 0.3)

    def keep_gains(self, best: Trial) -> Trial:
        """Improve the pooling coefficient and then the prior precision, keeping each change only if its gain is clear."""
        if self.objective.num_networks > 1:
            start = best
            pooled = [self._at_pooling(start, pooling) for pooling in POOLINGS]
            middle = min(pooled, key=self._penalised).settings.pooling
            neighbours = [pooling for pooling in (middle - 0.125, middle + 0.125) if 0 <= pooling < 1]
            pooled += [self._at_pooling(start, pooling) for pooling in neighbours]
            best = self._clearly_better(pooled, start)
        covariances = []
        for precision in PRECISIONS:
            covariances.append(self._at_best_temperature(best.settings.at_precision(precision), best.temperature))
        return self._clearly_better(covariances, best)

    def _at_pooling(self, start: Trial, pooling: float) -> Trial:
        return self._at_best_temperature(replace(start.settings, pooling=pooling), start.temperature)

    def most_cautious(self, best: Trial, largest_loss: float) -> Trial:
        """Return the trial with the largest distance exponent whose loss is at most `largest_loss` (coarse-to-fine search)."""
        chosen = best
        exponents = list(EXPONENTS)
        for _ in range(2):
            above = None
            for exponent in exponents:
                settings = replace(best.settings, distance_exponent=exponent)
                trial = self._at_best_temperature(settings, best.temperature, 0.7)
                if trial.loss > largest_loss:
                    above = exponent
                    break
                chosen = trial
            if above is None:
                break
            below = chosen.settings.distance_exponent
            exponents = [below + (above - below) * part / 6 for part in range(1, 6)]
        return chosen

    def free_covariance(self, chosen: Trial) -> Trial:
        """Return the trial with the smallest prior precision that, at the same temperature, raises the loss only negligibly."""
        for precision in FREE_PRECISIONS:
            settings = chosen.settings.at_precision(precision)
            trial = Trial(settings, self.objective.scores([settings])["nll"][0])
            self.tried.append(trial)
            cost, error = paired(trial.losses, chosen.losses, self.objective.data)
            if cost + error <= FREE * chosen.loss:
                return trial
        return chosen

    def curve(self) -> dict[str, tuple[float, ...]]:
        """Return the settings and the mean log loss of every trial."""
        rows = []
        for trial in self.tried:
            numbers = {name: value for name, value in vars(trial.settings).items() if isinstance(value, float)}
            # All networks have the same prior precision.
            rows.append({"prior_precision": trial.settings.prior_precision[0], **numbers, "nll": trial.loss})
        return as_curve(rows)

    def _penalised(self, trial: Trial) -> float:
        # Return the mean log loss, plus the share of each datum in the negative log prior of the temperature and the pooling.
        prior = negative_log_prior(math.log(trial.temperature), trial.settings.pooling)
        return trial.loss + float(prior) / self.num_data

    def _clearly_better(self, trials: Sequence[Trial], current: Trial) -> Trial:
        best = min(trials, key=self._penalised)
        _, error = paired(current.losses, best.losses, self.objective.data)
        return best if self._penalised(current) - self._penalised(best) > CLEAR * error else current

    def _at_best_temperature(self, settings: Settings, around: float, width: float = 1.0) -> Trial:
        # Return the settings at their best temperature, starting the search within a factor of e^width of `around`: five temperatures
        # in each round, with ever smaller steps around the best one.
        centre = math.log(around)
        for step in (width / 2, width / 6, width / 18):
            log_temperatures = np.clip(centre + step * np.arange(-2, 3), math.log(COLDEST), math.log(HOTTEST))
            candidates = [replace(settings, temperature=math.exp(log)) for log in log_temperatures]
            losses = self.objective.scores(candidates)["nll"]
            prior = negative_log_prior(log_temperatures)
            best = int((losses.mean(1).numpy() + prior / self.num_data).argmin())
            centre = float(log_temperatures[best])
        trial = Trial(replace(settings, temperature=math.exp(centre)), losses[best])
        self.tried.append(trial)
        return trial


def distance_onset(objective: Objective) -> float:
    """Return the distance, relative to the validation data's median, beyond which logits shrink."""
    quantile = float(np.quantile(objective.relative_log_distances().numpy(), ONSET))
    return math.exp(max(0.0, quantile))  # the log quantile is negative if the features of most inputs are all 0


def _notes_on_count(num_data: float, num_networks: int) -> tuple[str, ...]:
    if num_data >= FEW:
        return ()
    sharper = float(negative_log_prior(math.log(0.5))) / num_data
    changes = f"probabilities are sharpened (temperature 0.5) only if that lowers the mean log loss by more than {sharper:.2g}"
    if num_networks > 1:
        changes += f", and logits averaged (full pooling) only if by more than {float(negative_log_prior(0.0, 0.0)) / num_data:.2g}"
    count = counted(round(num_data), "independent validation datum", "independent validation data")
    return (warned(f"only {count}, too few to tune the posterior reliably: {changes}. Pass at least {FEW}."),)


def _notes_on_temperature(temperature: float) -> tuple[str, ...]:
    if 1.001 * COLDEST < temperature < 0.999 * HOTTEST:
        return ()
    return (
        warned(
            f"the temperature is {temperature:.3g}, at one end of its range: the networks' outputs are out of proportion to their "
            f"accuracy. Check that the inputs are preprocessed as in training."
        ),
    )


def _summary(
    chosen: Trial, cautious: Trial, best: Trial, scaled: Trial, plain: Trial, budget: float, data: HeldOut
) -> str:
    ensemble = "ensemble" if len(data.outputs) > 1 else "network"
    exponent = chosen.settings.distance_exponent
    if best is scaled and exponent == 0:
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
    used = {"pooling": best.settings.pooling < 1, "covariance": best.has_covariance}
    gained = " and ".join(name for name in used if used[name])
    parts = [f"{gained.capitalize()} lowered the log loss by {scaled.loss - best.loss:.2g}."] if gained else []
    if exponent > 0:
        cost = cautious.loss - best.loss
        effect = "had no measurable effect on the log loss"
        if abs(cost) > TOO_SMALL * best.loss:
            raised = f"raised the log loss by {cost:.2g} (allowed: {budget:.2g})"
            effect = raised if cost > 0 else f"lowered the log loss by {-cost:.2g}"
        parts.append(f"Caution far from the training data (distance exponent {exponent:.3g}) {effect}.")
    return f"The validation log loss is {chosen.loss:.4g}: {compared}. {' '.join(parts)}"


def _against(other: Trial, chosen: Trial, data: HeldOut, name: str) -> str:
    gain, error = paired(other.losses, chosen.losses, data)
    if abs(gain) <= TOO_SMALL * other.loss:
        return f"no measurable difference from the {name}"
    size = f"{abs(gain):.2g}{f' ± {error:.2g}' if math.isfinite(error) else ''} {'lower' if gain > 0 else 'higher'}"
    return f"no clear difference from the {name} ({size})" if abs(gain) <= CLEAR * error else f"{size} than the {name}"
