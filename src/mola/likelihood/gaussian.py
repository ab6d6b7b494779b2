r"""Numbers: D outputs are the means of independent normal distributions, whose noise is a parameter of its own.

.. math:: y_d \sim \mathcal N(\ell_d + s_d f_d,\; \sigma_d^2), \qquad \Lambda = \mathrm{diag}(s_d^2 / \sigma_d^2).

The curvature does not depend on the outputs: the Laplace approximation of the last layer is its exact posterior. Sums over data
are made at unit noise, so the noise can be chosen after the pass: the curvature of output d is then divided by its variance, and
the log-likelihood follows from a few sums over the targets (`label_sums`).

A network with two numbers for each target, trained by the Gaussian log-likelihood, says its noise itself: the first is the mean,
the second gives the variance :math:`v_d(x)`, and :math:`\sigma_d` is a factor of its root, 1 as it was trained. Only the means are
uncertain.

Targets may have been standardised in training. With `location` and `scale` everything that goes in and comes out is in the user's
units; sums, weights and curvature are in the network's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mola.errors import DataError, HeadError, OptionError
from mola.likelihood.base import Likelihood, OutputCurvature, Ran, matrix_of
from mola.numerics import exact, exact_device
from mola.options import counted, is_real, one_of

ORDERS = ("stacked", "interleaved")
"""Means first and then what says the variances; or mean and variance of one target after the other."""

VARIANCES = ("log-variance", "log-deviation", "softplus")
"""What the second number of a target is: a logarithm of the variance, of its root, or what a softplus makes the variance."""

FLOOR = 1e-6
"""Least variance that a network may say, as in `torch.nn.GaussianNLLLoss`."""

CONSTANT = 1e-12
"""Variance of targets, relative to their mean square, that is rounding alone."""

SMALLEST, LARGEST = 1e-12, 1e12
"""Noise that can be used, in units of the network's outputs: its square and the square's inverse stay in the range of float32."""

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """D numbers with normal noise, one standard deviation for each output.

    Args:
        noise: standard deviation of the targets around the mean, in the targets' units: one number, or one for each output. None
            estimates it from the residuals of the training data, and rules choose it on. For heteroscedastic networks it is a factor
            of the standard deviation that they say, and None is 1.
        shared: whether all outputs have the same noise, where it is estimated.
        location: mean that was taken from the targets in training, one number or D; None is 0.
        scale: standard deviation that they were divided by, one number or D; None is 1.
        heteroscedastic: whether the networks say the variance of each target, too: 2 D outputs.
        order: "stacked", all means before all variances, or "interleaved", mean and variance of one target after the other.
        variance: what the second number is: "log-variance", "log-deviation", or "softplus", whose softplus is the variance.
        estimated: whether the noise was estimated, so that rules may choose another; set by the fit.
    """

    noise: float | Sequence[float] | None = None
    shared: bool = False
    location: float | Sequence[float] | None = None
    scale: float | Sequence[float] | None = None
    heteroscedastic: bool = False
    order: str = "stacked"
    variance: str = "log-variance"
    estimated: bool = False
    name = "gaussian"
    discrete = False
    rules = ("nll", "crps", "evidence", "distance")
    default_rule = "nll"

    def __post_init__(self) -> None:
        given = None if self.noise is None else _numbers(self.noise, "noise", positive=True)
        object.__setattr__(self, "noise", given)
        object.__setattr__(
            self, "location", _numbers(0.0 if self.location is None else self.location, "location", positive=False)
        )
        object.__setattr__(self, "scale", _numbers(1.0 if self.scale is None else self.scale, "scale", positive=True))
        one_of(self.order, ORDERS, "order")
        one_of(self.variance, VARIANCES, "variance")

    def settings(self) -> dict[str, Any]:
        """What it takes to rebuild it, as JSON; what is as usual is left out."""
        noise: Any = self.noise
        given = {
            "noise": None if noise is None else list(noise),
            "shared": self.shared,
            "location": list(self.location),  # type: ignore[arg-type]
            "scale": list(self.scale),  # type: ignore[arg-type]
            "heteroscedastic": self.heteroscedastic,
            "order": self.order,
            "variance": self.variance,
            "estimated": self.estimated,
        }
        usual = {"noise": None, "location": [0.0], "scale": [1.0], "order": "stacked", "variance": "log-variance"}
        return {name: value for name, value in given.items() if value != usual.get(name, False)}

    # --- what outputs are -------------------------------------------------------------------------------------------

    def latent(self, outputs: int) -> int:
        """How many of a network's outputs are uncertain, D: all, or those that are means."""
        return outputs // 2 if self.heteroscedastic else outputs

    def rows(self, outputs: int) -> slice:
        """Which of a network's outputs these are."""
        if not self.heteroscedastic:
            return slice(outputs)
        return slice(outputs // 2) if self.order == "stacked" else slice(0, outputs, 2)

    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Means (n, D), or means and what says the variances (n, 2 D).

        Args:
            outputs: a network's output; (n,) is taken as (n, 1).
            ran: names and output shapes of the linear layers that ran, to name the last.

        Returns:
            The same numbers as a matrix.
        """
        matrix = (
            outputs[:, None] if outputs.dim() == 1 else matrix_of(outputs, ran, "outputs of shape (batch, outputs)")
        )
        width = matrix.shape[1]
        if self.heteroscedastic and width % 2:
            raise HeadError(
                f"expected two outputs for each target, its mean and its variance, as heteroscedastic=True says; got {width}."
            )
        for name in ("noise", "location", "scale"):
            given: Any = getattr(self, name)
            if given is not None and len(given) not in (1, self.latent(width)):
                have, each = counted(width, "output"), "output"
                if self.heteroscedastic:
                    have, each = f"{have}, means and variances of {counted(self.latent(width), 'target')}", "target"
                message = f"the networks have {have}, and {name} has {len(given)} numbers. Pass one number, or one for each {each}."
                if self.heteroscedastic and len(given) == width:
                    message += " If every output is a mean, leave heteroscedastic out."
                elif not self.heteroscedastic and 2 * len(given) == width:
                    message += " If half of the outputs say the variance of the others, pass heteroscedastic=True."
                raise HeadError(message)
        return matrix

    def means(self, outputs: Tensor) -> Tensor:
        """Means (n, D) of outputs, in the network's units."""
        return outputs[:, self.rows(outputs.shape[1])]

    def relative_variance(self, outputs: Tensor) -> Tensor | None:
        """The variance (n, D) that the network says at unit noise, in its own units; None where it says nothing."""
        if not self.heteroscedastic:
            return None
        width = outputs.shape[1] // 2
        told = outputs[:, width:] if self.order == "stacked" else outputs[:, 1::2]
        if self.variance == "softplus":
            return functional.softplus(told).clamp_min(FLOOR)
        return (told if self.variance == "log-variance" else 2 * told).exp().clamp_min(FLOOR)

    def noise_variance(self, outputs: Tensor) -> Tensor:
        """Variance (n, D) of the noise at outputs, in the network's units."""
        means, told = self.means(outputs), self.relative_variance(outputs)
        variance = self.deviation(means.shape[1]).to(means).square()
        return variance.expand_as(means) if told is None else told * variance

    def deviation(self, width: int) -> Tensor:
        """Noise (D,) in the network's units, in float64: a factor where networks say their own."""
        if self.noise is None:
            if self.heteroscedastic:
                return torch.ones(width, dtype=torch.float64, device="cpu")
            raise OptionError(
                "the noise is not known: pass mola.Gaussian(noise=...), or fit with batches of (inputs, targets), from whose "
                "residuals it is estimated. For an ensemble, mola.scale_noise(ensemble, val_loader) chooses it."
            )
        noise = _wide(self.noise, width, "noise")
        return noise if self.heteroscedastic else noise / self.widths(width)[1]

    def widths(self, width: int) -> tuple[Tensor, Tensor]:
        """Location (D,) and scale (D,), in float64."""
        return _wide(self.location, width, "location"), _wide(self.scale, width, "scale")

    def in_units(self, means: Tensor) -> Tensor:
        """Means (..., D) of the network in the targets' units."""
        location, scale = (one.to(means) for one in self.widths(means.shape[-1]))
        return location + scale * means

    def variance_in_units(self, variance: Tensor) -> Tensor:
        """Variances (..., D) in the network's units, in the targets'."""
        return variance * self.widths(variance.shape[-1])[1].square().to(variance)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """What a network predicts: the mean (n, D), in the targets' units."""
        return self.in_units(self.means(outputs))

    # --- labels -----------------------------------------------------------------------------------------------------

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Targets as the network was trained on them.

        Args:
            labels: what the loader yielded, in the user's units: (n, D), or (n,) where D is 1.
            outputs: of the network for the same data.
            where: words for the error message, such as "batch 3 of the training loader".

        Returns:
            (n, D) in float64 on the device of `outputs`, less `location` and over `scale`.
        """
        count, width = len(outputs), self.latent(outputs.shape[1])
        given = labels[:, None] if labels.dim() == 1 and width == 1 else labels
        if given.shape != (count, width):
            remedy = ""
            if labels.shape == (count,):
                remedy = f" The networks have {width} outputs: give as many targets for each input."
                if width > 1:
                    remedy += " For class indices, use likelihood='categorical'."
            elif (
                labels.dim() == 2 and len(labels) == count and labels.shape[1] * 2 == width and not self.heteroscedastic
            ):
                remedy = " If every second output says a variance, use mola.Gaussian(heteroscedastic=True)."
            expected = f"({count}, {width})" + (f" or ({count},)" if width == 1 else "")
            raise DataError(f"{where}: expected targets of shape {expected}, got {tuple(labels.shape)}.{remedy}")
        if given.is_complex():
            raise DataError(f"{where}: expected real targets, got {labels.dtype}.")
        targets = given.to(exact_device(outputs.device), torch.float64)
        if not bool(torch.isfinite(targets).all()):
            bad = int((~torch.isfinite(targets)).any(1).nonzero()[0])
            raise DataError(
                f"{where}: targets must be finite, got {targets[bad].tolist()}. Leave out rows without a target."
            )
        location, scale = (one.to(targets) for one in self.widths(width))
        return (targets - location) / scale

    def label_sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What the noise and the log-likelihood at any noise need of the targets: additive.

        Args:
            outputs: of the network.
            labels: as `check_labels` gives them.

        Returns:
            (4, D) in float64: squared residuals at unit noise, logarithms of the variances that networks say, targets and their
            squares.
        """
        means, told = exact(self.means(outputs)), self.relative_variance(outputs)
        targets = labels.to(means.device)
        squares = (targets - means).square()
        logs = squares.new_zeros(squares.shape[1])
        if told is not None:
            told = exact(told)
            squares, logs = squares / told, told.log().sum(0)
        return torch.stack([squares.sum(0), logs, targets.sum(0), targets.square().sum(0)])

    def settled(self, sums: Tensor | None, count: int) -> Gaussian:
        """The same with its noise known: as given, or from the residuals of the training data.

        Args:
            sums: as `label_sums` gives them, over all training data; None where these had no targets.
            count: number of training data.

        Returns:
            A likelihood whose noise is known.
        """
        if self.noise is not None:
            return self
        if self.heteroscedastic:
            return replace(self, noise=1.0, estimated=True)
        if sums is None:
            self.deviation(1)  # says what to do
        assert sums is not None
        squares, _, total, power = sums
        constant = (power / count - (total / count).square() <= CONSTANT * power / count).nonzero().flatten().tolist()
        if constant:
            which = "the target is" if len(total) == 1 else f"target {constant[0]} is"
            value = float(self.in_units((total / count)[None])[0, constant[0]])
            raise DataError(
                f"{which} the same, {value:.6g}, for all {count:,} training data: there is nothing to learn. "
                f"Check the targets, or pass mola.Gaussian(noise=...)."
            )
        variance = (squares.sum() / squares.numel()).expand_as(squares) / count if self.shared else squares / count
        if bool((variance.sqrt() <= SMALLEST).any()):
            raise DataError(
                "the network fits the training targets exactly: their residuals say nothing of the noise. Pass "
                "mola.Gaussian(noise=...)."
            )
        return replace(self.with_deviation(variance.sqrt()), estimated=True)

    def with_deviation(self, deviation: Tensor) -> Gaussian:
        """The same with another noise (D,), in the network's units."""
        noise = deviation if self.heteroscedastic else deviation * self.widths(len(deviation))[1]
        return replace(self, noise=tuple(noise.tolist()))

    def scaled(self, factor: float, width: int) -> Gaussian:
        """The same with all noise multiplied by a factor, within what noise may be.

        Few data may ask for none at all, where the weights' uncertainty explains every error.
        """
        scales = self.widths(width)[1] if not self.heteroscedastic else torch.ones_like(self.deviation(width))
        return self.with_deviation((factor * self.deviation(width)).clamp(SMALLEST / scales, LARGEST / scales))

    # --- the log-likelihood and its curvature -----------------------------------------------------------------------

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Log density (n,) of each datum's targets, in their own units.

        Args:
            outputs: of the network.
            labels: as `check_labels` gives them.

        Returns:
            The sum over outputs.
        """
        means, variance = exact(self.means(outputs)), exact(self.noise_variance(outputs))
        each = -0.5 * ((labels.to(means) - means).square() / variance + variance.log()) - HALF_LOG_TAU
        return (each - self.widths(means.shape[1])[1].log().to(means)).sum(1)

    def training_score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Less half the squared error (n,), in the network's units; of networks that say their variance, the log-likelihood."""
        means, told = self.means(outputs), self.relative_variance(outputs)
        squares = (labels.to(means) - means).square()
        return -0.5 * (squares if told is None else squares / told + told.log()).sum(1)

    def loss_of_guessing(self, outputs: Tensor, labels: Tensor) -> float:
        """Of whoever says the standardised mean: half of 1 for each output, or of this batch's mean square, if that is larger."""
        return 0.5 * max(float(labels.square().mean()), 1.0) * labels.shape[1]

    def total_log_likelihood(self, sums: Tensor, count: int) -> float:
        """The same, summed over the data whose `label_sums` these are.

        Args:
            sums: (4, D).
            count: number of data.

        Returns:
            At this noise.
        """
        squares, logs = sums[0].cpu(), sums[1].cpu()
        variance = self.deviation(len(squares)).square()
        each = -0.5 * (squares / variance + logs + count * variance.log()) - count * HALF_LOG_TAU
        return float((each - count * self.widths(len(squares))[1].log()).sum())

    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """1 for each output, or one over the variance that the network says: at unit noise, so that the noise can be chosen later."""
        told = self.relative_variance(outputs)
        means = self.means(outputs)
        return OutputCurvature(separate=torch.ones_like(means) if told is None else 1 / told, coupling=None)

    def scored_curvature(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, OutputCurvature]:
        """Log density (n,) of each datum's targets, and the curvature, both at unit noise: for sums, from which any other follows."""
        plain = replace(self, noise=None if self.heteroscedastic else self.scale)
        return plain.log_likelihood(outputs, labels), self.curvature(outputs)

    def output_scale(self, width: int) -> Tensor:
        """What the curvature of each output is multiplied by (D,) for the noise that there is."""
        return 1 / self.deviation(width).square()

    def visible(self, outputs: int) -> Tensor:
        """All directions: every output is seen."""
        return torch.eye(outputs, dtype=torch.float64, device="cpu")

    # --- groups of training data, for distances ---------------------------------------------------------------------

    def groups(self, outputs: int) -> int:
        """One: targets have no classes."""
        return 1

    def group_of(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """0 for every datum."""
        return torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)


def _numbers(value: Any, argument: str, *, positive: bool) -> tuple[float, ...]:
    # One number or several, as a tuple.
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu().tolist()
        listed = [value] if is_real(value) else list(value.tolist() if hasattr(value, "tolist") else value)
        numbers = tuple(math.nan if isinstance(one, (bool, str, bytes)) else float(one) for one in listed)
    except (TypeError, ValueError, OverflowError):
        numbers = (math.nan,)
    low, high = (SMALLEST, LARGEST) if positive else (-math.inf, math.inf)
    if not numbers or not all(math.isfinite(one) and low <= one <= high for one in numbers):
        above = f" between {SMALLEST:g} and {LARGEST:g}" if positive else ""
        raise OptionError(f"{argument} must be a finite number{above}, or one for each output; got {value!r}.")
    return numbers


def _wide(values: Any, width: int, argument: str) -> Tensor:
    # Values (D,) in float64.
    if len(values) not in (1, width):
        raise OptionError(
            f"{argument}: expected one number, or {width} of them (one for each output); got {len(values)}."
        )
    return torch.tensor(values, dtype=torch.float64, device="cpu").expand(width)


GAUSSIAN = Gaussian()
