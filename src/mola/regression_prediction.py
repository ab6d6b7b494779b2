"""What a predictor of numbers says about each input: a mixture of normal distributions, and where its variance comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mola import normal_mixtures
from mola.errors import DataError, OptionError
from mola.likelihood import GAUSSIAN, Gaussian, Likelihood
from mola.numerics import exact, exact_device
from mola.options import is_real
from mola.prediction import Later, LazyFields


class RegressionPrediction(LazyFields):
    """A mixture of K normal distributions for each of n inputs and D outputs, in the targets' units.

    The variance is a sum: `aleatoric`, the noise, which no data would remove, and `epistemic`, which more data would; the latter is
    what each network does not know of its own weights (`within`) and how much the networks disagree (`between`). What is costly is
    computed when it is first read, and then kept.

    Args:
        component_mean: (K, n, D).
        component_variance: (K, n, D) of all there is, noise included, or what computes it.
        component_noise: (K, n, D), the noise's share in it.
        weights: (K,) of the mixture.
        ood_score: (n,), or what computes it.
        ood_score_name: which score it is.
        distance: (n,), where it is known, or what computes it.
        held: bytes that fields keep in memory until they are computed.
        axis: of the outputs in (n, D): the last, or 1 where there are many positions, as in (n, D, H, W).
        likelihood: of the first component.
    """

    axes: ClassVar[dict[str, int | None]] = {
        "component_mean": 1,
        "component_variance": 1,
        "component_noise": 1,
        "weights": None,
        "ood_score": 0,
        "ood_score_name": None,
        "distance": 0,
        "axis": None,
    }

    def __init__(
        self,
        component_mean: Tensor,
        component_variance: Later,
        component_noise: Tensor,
        weights: Tensor,
        ood_score: Later,
        ood_score_name: str,
        distance: Later | None = None,
        *,
        held: int = 0,
        axis: int = -1,
        likelihood: Likelihood = GAUSSIAN,
    ) -> None:
        given = (component_mean, component_variance, component_noise, weights, ood_score, ood_score_name, distance)
        self._keep(dict(zip(self.axes, (*given, axis), strict=True)), held, likelihood)

    @classmethod
    def of_means(cls, means: Tensor, weights: Tensor, likelihood: Gaussian) -> RegressionPrediction:
        """What members say who know nothing but a mean, with the likelihood's noise.

        Args:
            means: (K, n, D) in the targets' units.
            weights: (K,).
            likelihood: with its noise, in the targets' units.

        Returns:
            The prediction, whose outlier score is how much the members disagree.
        """
        variance = likelihood.variance_in_units(likelihood.deviation(means.shape[2]).square()).to(means)
        wide, shares = exact(means), exact(weights.to(means))
        between = torch.einsum("k,knd->nd", shares, (wide - torch.einsum("k,knd->nd", shares, wide)).square())
        score = (between / exact(variance)).log1p().mean(1).to(means)
        noise = variance.expand_as(means).contiguous()
        return cls(means, noise, noise, weights, score, "variance", likelihood=likelihood)

    @classmethod
    def mixed(cls, parts: Sequence[RegressionPrediction], weights: Tensor) -> RegressionPrediction:
        """The mixture of several predictions for the same inputs: all of their components, each with its share.

        Args:
            parts: at least one.
            weights: (M,), of each.

        Returns:
            The prediction; its outlier score and distance are averages.
        """

        def averaged(name: str) -> Tensor:
            return torch.einsum(
                "m,m...->...", weights.to(parts[0].component_mean), torch.stack([part._read(name) for part in parts])
            )

        shares = torch.cat([weight * part.weights for weight, part in zip(weights, parts, strict=True)])
        names = dict.fromkeys(part.ood_score_name for part in parts)
        known = all(part.distance is not None for part in parts)
        return cls(
            torch.cat([part.component_mean for part in parts]),
            torch.cat([part.component_variance for part in parts]),
            torch.cat([part.component_noise for part in parts]),
            shares,
            averaged("ood_score"),
            " + ".join(names),
            averaged("distance") if known else None,
            axis=parts[0].axis,
            likelihood=parts[0].likelihood,
        )

    @classmethod
    def _common(cls, name: str, value: Any) -> Any:
        if name == "weights":
            return torch.tensor(value, dtype=torch.float64, device="cpu")
        return super()._common(name, value)

    # --- what it is made of -----------------------------------------------------------------------------------------

    @property
    def component_mean(self) -> Tensor:
        """(K, n, D): what each network predicts."""
        return self._read("component_mean")

    @property
    def component_variance(self) -> Tensor:
        """(K, n, D): the variance of each component's prediction, noise included."""
        return self._read("component_variance")

    @property
    def component_noise(self) -> Tensor:
        """(K, n, D): the variance of each component's noise."""
        return self._read("component_noise")

    @property
    def weights(self) -> Tensor:
        """(K,) of the mixture."""
        return self._read("weights")

    @property
    def ood_score(self) -> Tensor:
        """(n,): higher = more outlying."""
        return self._read("ood_score")

    @property
    def ood_score_name(self) -> str:
        """Which score it is: "distance" where distances are known, else "length" of the features, or "variance" without curvature."""
        return self._read("ood_score_name")

    @property
    def distance(self) -> Tensor | None:
        """How far (n,) the networks' features are from the training data: 1 is the median of the validation data.

        A geometric mean over networks; before anything was tuned on validation data, 1 is the training data's root mean square.
        None where it is not known.
        """
        return self._read("distance")

    def _mixed(self, values: Tensor) -> Tensor:
        return torch.einsum("k,k...->...", self.weights.to(values), values)

    def _between(self) -> Tensor:
        # Variance of the means, in float64: squares leave the range of float32 where their roots do not.
        means = exact(self.component_mean)
        return self._mixed((means - self._mixed(means)).square())

    def _variance(self) -> Tensor:
        return self._mixed(exact(self.component_variance)) + self._between()

    def _in_range(self, values: Tensor) -> Tensor:
        # As the means are, or in float64 where that does not hold them.
        returned = values.to(self.component_mean)
        return returned if bool(torch.isfinite(returned).all()) else values

    # --- moments ----------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """(n, D)."""
        return self._mixed(self.component_mean)

    @property
    def between(self) -> Tensor:
        """Variance (n, D) of the networks' means: how much they disagree."""
        return self._in_range(self._between())

    @property
    def aleatoric(self) -> Tensor:
        """Variance (n, D) of the noise: what no data would remove."""
        return self._in_range(self._mixed(exact(self.component_noise)))

    @property
    def within(self) -> Tensor:
        """Variance (n, D) beside the noise: what each network does not know of its own weights, and caution by distance."""
        return self._in_range(self._mixed(exact(self.component_variance) - exact(self.component_noise)))

    @property
    def epistemic(self) -> Tensor:
        """Variance (n, D) that more data would remove: `within` and `between`."""
        within = self._mixed(exact(self.component_variance) - exact(self.component_noise))
        return self._in_range(within + self._between())

    @property
    def variance(self) -> Tensor:
        """Variance (n, D) of the prediction: `aleatoric` and `epistemic`."""
        return self._in_range(self._variance())

    @property
    def std(self) -> Tensor:
        """Standard deviation (n, D) of the prediction."""
        return self._variance().sqrt().to(self.component_mean)

    # --- its distribution -------------------------------------------------------------------------------------------

    def _asked(self, function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        found = function(self.weights, self.component_mean, self.component_variance, *arguments, **options)
        return found.to(self.component_mean)

    def _targets(self, targets: Any, *, broadcast: bool = False) -> Tensor:
        # Targets as (n, D) in float64.
        try:
            read = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"expected targets as a tensor, an array or numbers, got {type(targets).__name__}."
            ) from error
        if read.is_complex():
            raise DataError(f"expected real targets, got {read.dtype}.")
        given = exact(read).to(exact_device(self.component_mean.device))
        shape = self.component_mean.shape[1:]
        if given.dim() == len(shape) - 1 and shape[self.axis] == 1:
            given = given.unsqueeze(self.axis)
        if broadcast and given.dim() == 0:
            given = given.expand(shape)
        if given.shape != shape:
            raise DataError(
                f"expected targets of shape {tuple(shape)}, got {tuple(read.shape)}: one for each input and output."
            )
        return given

    def log_prob(self, targets: Any) -> Tensor:
        """Log density (n,) of each input's targets, all outputs together: these are independent in each component.

        Args:
            targets: (n, D), or (n,) where D is 1, in their own units.

        Returns:
            In nats.
        """
        given, axis = self._targets(targets), self.axis
        # Outputs last: they are summed.
        place = axis if axis == -1 else axis + 1
        means, variances = (values.movedim(place, -1) for values in (self.component_mean, self.component_variance))
        found = normal_mixtures.log_density(self.weights, means, variances, given.movedim(axis, -1), joint=True)
        return found.to(self.component_mean)

    def cdf(self, values: Any) -> Tensor:
        """Probability (n, D) that a target is at most so large.

        Args:
            values: one number, or (n, D), or (n,) where D is 1.

        Returns:
            Between 0 and 1.
        """
        return self._asked(normal_mixtures.cdf, self._targets(values, broadcast=True))

    def crps(self, targets: Any) -> Tensor:
        """Continuous ranked probability score (n, D) of targets, in their units: lower is better."""
        return self._asked(normal_mixtures.crps, self._targets(targets))

    def quantile(self, level: float) -> Tensor:
        """What targets (n, D) stay below with probability `level`, by the mixture's own distribution function.

        Args:
            level: between 0 and 1.

        Returns:
            Exact to rounding.
        """
        if not (is_real(level) and 0 < level < 1):
            raise OptionError(f"level must lie between 0 and 1, got {level!r}. The median is 0.5.")
        return self._asked(normal_mixtures.quantile, float(level))

    def interval(self, probability: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends (n, D) between which targets lie with that probability, as many below as above.

        Args:
            probability: between 0 and 1.

        Returns:
            The quantiles at (1 - probability) / 2 and (1 + probability) / 2.
        """
        if not (is_real(probability) and 0 < probability < 1):
            raise OptionError(f"probability must lie between 0 and 1, got {probability!r}. 90 % is 0.9.")
        return self.quantile((1 - probability) / 2), self.quantile((1 + probability) / 2)

    def __len__(self) -> int:
        return self.component_mean.shape[1]

    def __repr__(self) -> str:
        count, *sizes, outputs = self.component_mean[0].movedim(self.axis, -1).shape
        at = f" at {' x '.join(map(str, sizes))} positions" if sizes else ""
        size = f"{count} inputs{at}, {outputs} {'output' if outputs == 1 else 'outputs'}"
        if not count:
            return f"RegressionPrediction({size})"
        share = float((self.epistemic / self.variance).mean())
        mean = float(self.std.mean())
        return (
            f"RegressionPrediction({size}, mean standard deviation {mean:.4g}, epistemic {share:.0%} of the variance)"
        )
