r"""A mixture of Laplace approximations for numbers: each network has a normal distribution, and no link is needed.

With mean :math:`m_k(x)`, variance :math:`v_k(x)` that the weights leave open and noise :math:`\sigma_k`, the prediction is

.. math:: p(y \mid x) = \sum_k \pi_k\, \mathcal N\big(y;\; m_k(x),\; T^2 \rho(x)^{2\gamma} (v_k(x) + \sigma_k^2)\big),

exactly, since the last layer's posterior is normal and so is the noise. :math:`\rho` is how much farther than usual the features
are from the training data (`cooling.py`); :math:`\gamma` is 0 unless `rule="distance"` chose another. Long features need no factor of
their own: the variance grows with the square of their length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from mola import normal_mixtures
from mola.component import per_component
from mola.cooling import Usual
from mola.distributed import Team
from mola.errors import OptionError, located, warn
from mola.laplace import LogitMoments, in_range
from mola.likelihood import Gaussian
from mola.mixture import describe_numbers, stacked_in_turn, stacking_weights, uniform_weights
from mola.network import Inputs, one_batch, undisturbed, without_autocast
from mola.numerics import exact
from mola.positions import DenseBatch
from mola.posterior import MoLA
from mola.prediction import later
from mola.regression_prediction import RegressionPrediction
from mola.tuning.candidates import NOT_HELD_OUT, SAME, HeldOut, Tuning
from mola.tuning.regression import RegressionProblem

DISTANCE, LENGTH, VARIANCE = "distance", "length", "variance"
"""Names of outlier scores."""

ENOUGH = 30
"""Validation data from which on their squared errors tell whether they were trained on."""


class RegressionMoLA(MoLA):
    """A mixture of last-layer Laplace approximations for numbers. Made by `mola.fit(..., likelihood="gaussian")`.

    Calling it gives means (n, D) in the targets' units; `predict` gives a `RegressionPrediction`.
    """

    @property
    def likelihoods(self) -> tuple[Gaussian, ...]:
        """Of each component, with its noise."""
        return tuple(component.likelihood for component in self.components)  # type: ignore[misc]

    @property
    def noise(self) -> Tensor:
        """Standard deviation (K, D) of the noise in the targets' units; for networks that say their own, a factor of it."""
        rows = []
        for component, likelihood in zip(self.components, self.likelihoods, strict=True):
            given: Any = likelihood.noise
            if given is None:  # 1, or it is not known, which is said
                given = likelihood.deviation(1).tolist()
            width = len(given) if component.curvature is None else len(component.curvature.weights)
            rows.append(torch.tensor(given, dtype=torch.float64, device="cpu").expand(width).clone())
        return torch.stack(rows)

    def with_noise(self, noise: float | Sequence[float] | Tensor) -> Self:
        """The same mixture with another noise.

        Args:
            noise: standard deviation in the targets' units: one number, one for each output, or (K, D), one for each component, too.
                For networks that say their own, a factor of it.

        Returns:
            A new posterior, whose noise rules leave as it is.
        """
        count = len(self.components)
        given: Any = noise.detach().cpu().numpy() if isinstance(noise, Tensor) else noise
        given = given.tolist() if isinstance(given, (np.ndarray, np.generic)) else given
        if given is None:
            raise OptionError(
                "noise: expected one number, or one for each output; got None. posterior.tune(val_loader) chooses it."
            )
        table = isinstance(given, (list, tuple)) and any(hasattr(row, "__len__") for row in given)
        rows = per_component(given, count, "noise") if table else [given] * count
        moved = []
        for component, likelihood, row in zip(self.components, self.likelihoods, rows, strict=True):
            meant = replace(likelihood, noise=row, estimated=False)
            if component.curvature is not None:
                meant.deviation(len(component.curvature.weights))  # refuses another number of them
            moved.append(component.of_likelihood(meant))
        return self._with(components=moved, tuning=None)

    def _described_link(self) -> str:
        noise = "; ".join(dict.fromkeys(describe_numbers(row.tolist()) for row in self.noise))
        how = "chosen" if self.tuning is not None and self.tuning.noise_factors else None
        how = how or ("from the training data's residuals" if self.likelihoods[0].estimated else "as given")
        if self.likelihoods[0].heteroscedastic:
            how = "chosen" if how == "chosen" else "as given" if how == "as given" else "as they were trained"
            return f"  noise: as the networks say, times {noise}, {how}\n"
        return f"  noise: {noise}, {how}\n"

    def _described_cooling(self) -> str:
        parts = [f"by {self.temperature:.4g}"] if self.temperature != 1 else []
        if self.distance_exponent > 0:
            parts.append(f"by distance, with exponent {self.distance_exponent:.4g}")
        return f"  standard deviations multiplied: {' and '.join(parts)}\n" if parts else ""

    def _with_noise_scaled(self, factors: Sequence[float]) -> Self:
        pairs = zip(self.components, factors, strict=True)
        return self._with(components=[component.rescaled(factor) for component, factor in pairs])

    def _at(self, tuning: Tuning) -> Self:
        moved = self.with_prior_precision(tuning.prior_precision)
        return moved._with_noise_scaled(tuning.noise_factors) if tuning.noise_factors else moved

    # --- predict ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Means (n, D) in the targets' units.

        Args:
            inputs: a tensor, a tuple of positional or a mapping of keyword arguments of the networks.
            generator: not used: nothing is drawn.

        Returns:
            In float64 for networks in float64, else in float32.
        """
        self._look()
        with undisturbed(*self.networks, passes_only=True):
            moments = self._moments(one_batch(inputs))
        if isinstance(moments, DenseBatch):
            return moments.gather(lambda some: [self._mean(some)])[0]
        return self._mean(moments)

    def _mean(self, moments: Sequence[LogitMoments]) -> Tensor:
        with without_autocast(moments[0].mean.device):
            return moments[0].returned(self._mix(self._means(moments)))

    def _means(self, moments: Sequence[LogitMoments]) -> list[Tensor]:
        pairs = zip(self.likelihoods, moments, strict=True)
        return [likelihood.probabilities(one.mean) for likelihood, one in pairs]

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Any:
        self._look()
        with located(place), undisturbed(*self.networks, passes_only=True):
            moments = self._moments(inputs)
        return moments.prediction(self._own) if isinstance(moments, DenseBatch) else self._own(moments)

    def _own(self, moments: Sequence[LogitMoments]) -> RegressionPrediction:
        kept = [one.kept(one.mean.clone()) for one in moments]
        with without_autocast(moments[0].mean.device):
            return self._prediction(kept)

    def _prediction(self, moments: Sequence[LogitMoments]) -> RegressionPrediction:
        back, device, weights = moments[0].returned, moments[0].mean.device, self.weights
        pairs = list(zip(self.likelihoods, moments, strict=True))
        noises = [self.temperature**2 * likelihood.noise_variance(one.mean) for likelihood, one in pairs]
        units = self.likelihoods[0].variance_in_units
        name = self._score_name(moments)

        def variance() -> Tensor:
            growth = self._growth(moments).square()
            left = [
                noise if one.spread is None else noise + self.temperature**2 * one.variance
                for noise, one in zip(noises, moments, strict=True)
            ]
            return units(exact(torch.stack(left)) * exact(growth))

        def squares(values: Tensor) -> Tensor:
            # As the network's numbers are, or in float64 where these do not hold them: their roots they do hold.
            returned = back(values.to(means))
            return returned if bool(torch.isfinite(returned).all()) else values

        means = torch.stack(self._means(moments))

        def score() -> Tensor:
            if name != VARIANCE:
                return self._score(moments, name)
            wide = exact(means)
            between = torch.einsum("k,knd->nd", weights.to(wide), (wide - self._mix(list(wide))).square())
            noise = torch.einsum("k,knd->nd", weights.to(wide), units(exact(torch.stack(noises))))
            return (between / noise).log1p().mean(1).to(means)

        return RegressionPrediction(
            back(means),
            later(lambda: squares(variance()), device),
            squares(units(exact(torch.stack(noises))).contiguous()),
            weights,
            later(lambda: back(score()), device),
            name,
            later(lambda: back(self.cooling.log_distance(moments, weights).exp()), device)
            if self.has_distances
            else None,
            held=means.nbytes + sum(one.nbytes for one in moments),
            likelihood=self.likelihood,
        )

    def _growth(self, moments: Sequence[LogitMoments]) -> Tensor:
        # What standard deviations are multiplied by (n, 1), or by for all (1, 1): how much farther than usual inputs
        # are.
        if self.distance_exponent == 0:
            return moments[0].mean.new_ones(1, 1)
        return self.cooling.growth(moments, self.weights)[:, None]

    @staticmethod
    def _score_name(moments: Sequence[LogitMoments]) -> str:
        spreads = [one.spread for one in moments]
        if all(one is not None and one.has_distance for one in spreads):
            return DISTANCE
        return LENGTH if all(one is not None and one.has_length for one in spreads) else VARIANCE

    def _score(self, moments: Sequence[LogitMoments], name: str) -> Tensor:
        # How outlying inputs are (n,): far in direction, or long.
        if name == DISTANCE:
            weights = self.weights.to(moments[0].mean)
            return self.cooling.log_distance(moments, self.weights) + weights @ self.cooling.excess(moments).log()
        lengths = torch.stack([one.spread.length() for one in moments if one.spread is not None])
        return self.weights.to(lengths) @ lengths.log()

    def predict_proba(self, inputs: Any) -> NoReturn:
        """Refuse: numbers have no probabilities."""
        raise OptionError(
            "numbers have no probabilities: use posterior.predict(inputs), whose mean, interval(0.9) and log_prob say it all."
        )

    def on_held_out(self, data: HeldOut) -> RegressionPrediction:
        """What `predict` says of data that the networks have seen already, without running them again.

        Args:
            data: as read with these networks and heads.

        Returns:
            The prediction, in float64.
        """
        with torch.no_grad():
            return self._prediction(in_range(self._moments_on(data)))

    def _moments_on(self, data: HeldOut) -> list[LogitMoments]:
        moments = []
        for component, features, outputs in zip(self.components, data.features, data.logits, strict=True):
            curvature, spread = component.curvature, None
            if curvature is not None:
                posterior = curvature.spectrum.posterior(component.precision).measured_by(component.distance)
                spread = posterior.at(features.double())
            moments.append(LogitMoments(outputs.double(), spread, None, component.likelihood))
        return moments

    # --- tune -------------------------------------------------------------------------------------------------------

    def _problem(self, **shared: Any) -> RegressionProblem:  # type: ignore[override]
        curvatures = [component.curvature for component in self.components if component.curvature is not None]
        return RegressionProblem(
            spectra=[one.spectrum for one in curvatures],
            likelihoods=self.likelihoods,
            likelihood=self.likelihood,
            link=self.link,
            geometries=self._geometries(),
            evidence_at=lambda factor: [one.rescaled(factor).log_evidence for one in self.components],
            **shared,
        )

    def _usual_on(self, data: HeldOut) -> Usual:
        return data.usual(self._geometries() or ())

    def reweight(self, val_loader: Iterable[Any] | HeldOut, *, progress: bool = True, team: Team | None = None) -> Self:
        """Stacking: the weights that maximise the mixture's log-likelihood on validation data.

        With caution by distance, variances and weights are found in turn, as for classes: the result is no worse than these weights,
        nor than uniform ones.

        Args:
            val_loader: validation data with targets, read once, or what was read of them.
            progress: whether to show a progress bar on stderr, if that is a terminal.
            team: the processes that do it together, each with its own shard; None is this one alone.

        Returns:
            A new posterior.
        """
        together = Team.alone() if team is None else team
        with together.work("reweight"), torch.no_grad():
            data = self._read(val_loader, "validation loader", labelled=True, progress=progress, team=together)
            self._doubts(data)
            targets = self.likelihoods[0].in_units(data.labels)  # type: ignore[arg-type]

            def densities(posterior: Self) -> tuple[Tensor, float]:
                # Of each component (n, K), relative to the best one of each datum, and the mean logarithm of the best.
                said = posterior.on_held_out(data)
                logs = normal_mixtures.normal_log_density(said.component_mean, said.component_variance, targets).sum(2)
                # Densities have no scale of their own: relative to the best component, none underflows.
                best = logs.amax(0)
                relative = (logs - best).exp().T.contiguous()
                sums = torch.stack([best.sum(), best.new_tensor(float(len(data)))])
                total, count = together.sum([sums.cpu()])[0].tolist()
                return together.rows(relative if len(data) else None), total / count

            def judged(weights: Tensor) -> tuple[Tensor, float]:
                # One process speaks for all, of the score too: they take the same number of turns.
                at = self.with_weights(together.share(weights.tolist()))
                found, best = densities(at)
                return found, together.share(float((found.double() @ at.weights.cpu()).log().mean()) + best)

            if self.distance_exponent == 0:
                weights = stacking_weights(densities(self)[0])
            else:  # variances grow with the mixture's distance, which depends on the weights
                weights = stacked_in_turn(judged, [self.weights.cpu(), uniform_weights(len(self.components))])
            return self.with_weights(together.share(weights.tolist()))

    def _doubts(self, data: HeldOut) -> tuple[str, ...]:
        found = self._squares(data)
        if found is None:
            return ()
        (count, here, spread), trained = found
        words = None
        if trained is not None and all(size == count and abs(one - mine) <= SAME * one for size, one, mine in trained):
            words = (
                f"{NOT_HELD_OUT}: as many, with the same squared errors to five digits. Networks look better on these than they are, "
                f"and the noise smaller. Pass data that they were not trained on."
            )
        elif here >= spread > 0:
            words = (
                f"the networks predict the validation targets no better than a constant does: their mean squared error is "
                f"{here / spread:.3g} times the targets' variance. Are the targets in the units that the networks were trained on, or "
                f"location= and scale= those of their standardisation?"
            )
        elif (
            trained is not None
            and count >= ENOUGH
            and all(mine / count < one / size / 4 for size, one, mine in trained)
        ):
            words = (
                "the networks do far better on the validation data than on the training data: less than half the error. Have the two "
                "been swapped?"
            )
        if words is None:
            return ()
        warn(words)
        return (words,)

    def _squares(self, data: HeldOut) -> tuple[tuple[int, float, float], list[tuple[int, float, float]] | None] | None:
        # Count of the held-out data, mean squared error and variance of the targets, in the networks' units; and for
        # each network the number of training data, and its summed squares there and here.
        if data.labels is None:
            return None
        targets, pairs = data.labels.double(), list(zip(self.likelihoods, data.logits, strict=True))
        means = [likelihood.means(outputs.double()) for likelihood, outputs in pairs]
        own = [likelihood.label_sums(outputs.double(), targets)[0].sum() for likelihood, outputs in pairs]
        error = (self._mix(means) - targets).square().sum()
        moments = torch.stack([targets.sum(0), targets.square().sum(0)]).flatten()
        head = torch.stack([targets.new_tensor(float(len(data))), error, *own])
        sums, moments = data.team.sum([head.cpu(), moments.cpu()])
        count, error, *squares = sums.tolist()
        total, power = moments.view(2, -1)
        spread = float((power / count - (total / count).square()).clamp_min(0).sum())
        curvatures = [component.curvature for component in self.components if component.curvature is not None]
        trained = None
        if all(one.factors.label_sums is not None for one in curvatures) and curvatures:
            trained = [
                (one.count, float(one.factors.label_sums[0].sum()), mine)  # type: ignore[index]
                for one, mine in zip(curvatures, squares, strict=True)
            ]
        return (int(count), error / count, spread), trained

    # --- what means nothing here ------------------------------------------------------------------------------------

    def confidence_bound(self, inputs: Inputs, *, lemma: bool = False) -> NoReturn:
        """Refuse: the paper's bounds are on the confidence in a class."""
        raise OptionError(
            "the paper's bounds are on the confidence in a class, and numbers have none: their variance grows without bound."
        )

    def far_field_limit(self, inputs: Tensor) -> NoReturn:
        """Refuse: far away from the data a normal distribution has no limit."""
        raise OptionError(
            "far away from the data the standard deviation of a number grows without bound: there is no limit to compute."
        )
