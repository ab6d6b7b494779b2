r"""How candidates for the prior precision, the noise and the distance exponent score where outputs are numbers.

A candidate gives each of K networks a normal distribution of each output, with variance

.. math:: \big(v_k(x; \lambda, c) + c^2 \sigma_k^2\big)\, \rho(x)^{2 \gamma},

where :math:`\sigma_k` is the noise that the posterior has now, c a factor that all noise is multiplied by, and v what the weights
leave open. Held-out features are projected on the eigenbases of the curvature once; a larger noise only scales their eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mola import normal_mixtures
from mola.cooling import Cooling
from mola.errors import OptionError
from mola.laplace import ClassGeometry, Spectrum
from mola.likelihood import Gaussian
from mola.tuning.candidates import PROJECTED_AT_ONCE, HeldOut, Problem

NUMBERS_AT_ONCE = 2**20
"""Log densities, of one or several candidates, made together."""


@dataclass(frozen=True, kw_only=True)
class RegressionProblem(Problem):
    """A mixture over last layers whose outputs are numbers."""

    spectra: Sequence[Spectrum]
    likelihoods: Sequence[Gaussian]
    """Of each network, with its noise."""
    evidence_at: Callable[[float], Sequence[Callable[[Tensor], Tensor]]]
    """Log evidence of each component at a prior precision, for a factor of the noise."""
    geometries: Sequence[ClassGeometry] | None = None
    _kept: dict[int, tuple[HeldOut, list[Any]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def has_noise(self) -> bool:
        """Whether outputs have a noise."""
        return True

    @property
    def noise_is_free(self) -> bool:
        """Whether rules may choose the noise: it was estimated, and not given."""
        return all(one.estimated for one in self.likelihoods)

    def _tried(self, data: HeldOut, precisions: Sequence[float]) -> Iterator[tuple[slice, slice, Tensor]]:
        # Refuse: numbers have no probabilities.
        raise OptionError("likelihood 'gaussian' has numbers as outputs, and no probabilities that a rule could score.")

    def curve(
        self, data: HeldOut, precisions: Sequence[float], factor: float = 1.0, *, only: str | None = None
    ) -> dict[str, Tensor]:
        """What each prior precision scores on held-out data.

        Args:
            data: features, outputs and targets.
            precisions: the candidates.
            factor: what all noise is multiplied by.
            only: "nll", in nats for a datum, as None; or "crps", in the targets' units, averaged over outputs.

        Returns:
            One value of it for each candidate.
        """
        score = only or "nll"
        spectra = [spectrum if factor == 1 else spectrum.divided(factor**2) for spectrum in self.spectra]
        mixing = torch.stack([self.weights_at(one) for one in precisions])
        total = torch.zeros(len(precisions), dtype=torch.float64, device="cpu")
        for part, projected, means, noises in self._portions(data):
            targets = self._targets(data, part)
            together = max(1, NUMBERS_AT_ONCE // max(1, len(means) * means[0].numel()))
            for start in range(0, len(precisions), together):
                which = slice(start, start + together)
                pairs = zip(spectra, projected, noises, strict=True)
                variances = [
                    spectrum.variances(some, precisions[which]).movedim(1, 2) + factor**2 * noise
                    for spectrum, some, noise in pairs
                ]
                total[which] += self._summed(score, mixing[which], means, variances, targets)
        return {score: self._over_all(data, total, score)}

    def noise_curve(self, data: HeldOut, precision: float, factors: Sequence[float], *, score: str) -> Tensor:
        """What each factor of the noise scores at one prior precision, as `curve` does."""
        return torch.cat([self.curve(data, [precision], one, only=score)[score] for one in factors])

    def exponent_curve(
        self, data: HeldOut, precisions: Sequence[float], factors: Sequence[float], exponents: Sequence[float]
    ) -> Tensor:
        """Negative log-likelihood (L,) for each distance exponent.

        Args:
            data: as for `curve`.
            precisions: one for each component.
            factors: of the noise, one for each component.
            exponents: the candidates.

        Returns:
            In nats for a datum.
        """
        assert self.geometries is not None
        distances, _ = data.measured(self.geometries)
        mixing = self.weights_at(precisions)
        logs = Cooling(usual=self.usual[0]).mean_log(distances, mixing).clamp_min(0)
        total = torch.zeros(len(exponents), dtype=torch.float64, device="cpu")
        spectra = [one.divided(factor**2) for one, factor in zip(self.spectra, factors, strict=True)]
        for part, projected, means, noises in self._portions(data):
            rows = zip(spectra, projected, noises, precisions, factors, strict=True)
            plain = [
                spectrum.variance(some, precision) + factor**2 * noise
                for spectrum, some, noise, precision, factor in rows
            ]
            targets = self._targets(data, part)
            for index, exponent in enumerate(exponents):
                growth = (2 * exponent * logs[part]).exp()[:, None]
                grown = [(one * growth)[None] for one in plain]
                total[index] += self._summed("nll", mixing[None], means, grown, targets)[0]
        return self._over_all(data, total, "nll")

    def first_factor(self, data: HeldOut) -> float:
        """How much larger the mixture's errors on held-out data are than the noise: where the search for a factor begins."""
        mixing = self.weights_at(1.0)
        sums = torch.zeros(2, dtype=torch.float64, device="cpu")
        for part, _, means, noises in self._portions(data):
            mean = torch.einsum("k,knd->nd", mixing, torch.stack(means))
            noise = torch.einsum("k,knd->nd", mixing, torch.stack(noises))
            relative = (self._targets(data, part) - mean).square() / noise
            sums += torch.tensor([float(relative.sum()), float(relative.numel())], dtype=torch.float64, device="cpu")
        (sums,) = data.team.sum([sums])
        return min(max(math.sqrt(float(sums[0] / sums[1])), 1e-3), 1e6)

    def _targets(self, data: HeldOut, part: slice) -> Tensor:
        assert data.labels is not None
        return data.labels[part]

    def _portions(self, data: HeldOut) -> Iterator[tuple[slice, list[Tensor], list[Tensor], list[Tensor]]]:
        # Which rows, and of each network what the variances need of their features, their means and their noise (n, D).
        rows = max(1, PROJECTED_AT_ONCE // sum(spectrum.projection_size for spectrum in self.spectra))
        if rows >= len(data) and id(data) in self._kept:
            yield from self._kept[id(data)][1]
            return
        made = []
        for part, features, outputs in data.portions(rows):
            projected = [spectrum.project(some) for spectrum, some in zip(self.spectra, features, strict=True)]
            pairs = list(zip(self.likelihoods, outputs, strict=True))
            means = [likelihood.means(some) for likelihood, some in pairs]
            noises = [likelihood.noise_variance(some) for likelihood, some in pairs]
            made = [(part, projected, means, noises)]
            yield made[0]
        if rows >= len(data):
            self._kept[id(data)] = (data, made)  # with the data, so that nothing else gets their id

    def _summed(
        self, score: str, mixing: Tensor, means: Sequence[Tensor], variances: Sequence[Tensor], targets: Tensor
    ) -> Tensor:
        # Sum (L,) of a score over data: weights (L, K), means (n, D) and variances (L, n, D) of each network.
        if score == "nll":
            logs = [
                normal_mixtures.normal_log_density(mean, variance, targets).sum(2)
                for mean, variance in zip(means, variances, strict=True)
            ]
            return -torch.logsumexp(torch.stack(logs, 2) + mixing.log()[:, None], dim=2).sum(1)
        stacked, spread = torch.stack(list(means)), torch.stack(list(variances), 1)
        scale = self.likelihoods[0].widths(targets.shape[1])[1]
        each = [
            normal_mixtures.crps(weights, stacked, own, targets) for weights, own in zip(mixing, spread, strict=True)
        ]
        return torch.stack([(one * scale).mean(1).sum() for one in each])

    def _over_all(self, data: HeldOut, total: Tensor, score: str) -> Tensor:
        count = torch.tensor(float(len(data)), dtype=torch.float64, device="cpu")
        total, count = data.team.sum([total, count])
        if score != "nll":
            return total / count
        width = self.spectra[0].outputs
        return total / count + float(self.likelihoods[0].widths(width)[1].log().sum())
