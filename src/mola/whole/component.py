"""One component: a trained network whose weights are Gaussian, all of them or some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mola.errors import DataError, OptionError
from mola.laplace import SPARE, LogitMoments, check_precision
from mola.likelihood import CATEGORICAL
from mola.network import Inputs, call, check_finite, check_logits, without_autocast
from mola.network.calling import WithTensors
from mola.network.fingerprint import Watch
from mola.whole.jacobians import Directions, JacobianRows, WeightLayout, jacobian_rows, portions
from mola.whole.spectra import Dense, WeightSpectrum
from mola.whole.spread import logit_moments, seen_and_shift

__all__ = ["WholeComponent", "WholeCurvature"]


@dataclass(frozen=True)
class WholeCurvature:
    """What the passes over the training data left."""

    layout: WeightLayout
    spectrum: WeightSpectrum
    mean: Tensor
    """Trained weights (D,), in the layout's order."""
    classes: int
    count: int
    """Number of training data."""
    log_likelihood: float | None
    """Of the training labels, or None if there were none."""
    watch: Watch
    """The network as it was."""


class WholeComponent(nn.Module):
    """A network, the curvature of its weights, and a prior precision.

    Args:
        network: the trained classifier, shared and never changed.
        curvature: of its weights.
        precision: prior precision.
    """

    def __init__(self, network: nn.Module, curvature: WholeCurvature, precision: float) -> None:
        """Bind them."""
        super().__init__()
        self.network, self.curvature = network, curvature
        self.precision = check_precision(precision)
        self._near: tuple[torch.device, torch.dtype, WeightSpectrum] | None = None

    def at(self, precision: float) -> WholeComponent:
        """The same network and curvature at another prior precision."""
        return WholeComponent(self.network, self.curvature, precision)

    def _spectrum(self, like: Tensor) -> WeightSpectrum:
        """The spectrum where the network is, in its precision, but never below float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self._near is None or self._near[:2] != (like.device, dtype):
            self._near = (like.device, dtype, self.curvature.spectrum.to(like.new_zeros(0, dtype=dtype)))
        return self._near[2]

    def check_network(self, *, thorough: bool = False) -> None:
        """Notice a network that was trained further: the old curvature is not its own. Call it outside of `undisturbed(network)`.

        Args:
            thorough: compare every number, and not only a few of each tensor where PyTorch has counted no change.

        Raises:
            OptionError: if its weights are not those that were fitted.
        """
        changed = self.curvature.watch.changed(thorough=thorough)
        if changed:
            message = (
                f"the network's weights changed since the posterior was fitted ({', '.join(changed[:3])}"
                f"{', ...' if len(changed) > 3 else ''}). Fit again: mola.fit_whole(...)."
            )
            raise OptionError(message)

    def _explicit(self) -> int:
        spectrum = self.curvature.spectrum
        return len(spectrum.values) if isinstance(spectrum, Dense) else 0

    def moments(self, inputs: Inputs) -> LogitMoments:
        """Gaussian over the linearised logits of a batch. Call it inside `undisturbed(network)`."""
        means, joints = [], []
        for logits, rows, spectrum in self.rows(inputs, seen_and_shift):
            means.append(logits)
            joints.append(self.covariance(rows, spectrum, self.precision))
        if not means:
            like, classes = next(self.network.parameters()), self.curvature.classes
            nothing = torch.zeros(0, classes, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
            return logit_moments(nothing, nothing[:, :, None].expand(-1, -1, classes))
        place = means[0].device, means[0].dtype
        joint = torch.cat(joints)  # in float64, where one is
        if joint.dtype == place[1]:
            return logit_moments(torch.cat(means), joint)
        return logit_moments(torch.cat(means).to(joint), joint, place)

    def covariance(self, rows: JacobianRows, spectrum: WeightSpectrum, precision: float) -> Tensor:
        """Covariance (n, R, R) of the linearised logits along the rows' directions, in a precision that holds it."""
        return self._held(rows, spectrum, lambda rows, own: own.covariance(rows, precision))

    def variances(self, inputs: Inputs, precisions: Tensor, directions: Directions) -> tuple[Tensor, Tensor]:
        """Logits (n, C), and variances (L, n, R) along some directions at several prior precisions."""
        means, found = [], []
        for logits, rows, spectrum in self.rows(inputs, directions):
            means.append(logits)
            found.append(self._held(rows, spectrum, lambda rows, own: own.variances(rows, precisions.to(rows.logits))))
        return torch.cat(means), torch.cat(found, dim=1)

    def _held(
        self, rows: JacobianRows, spectrum: WeightSpectrum, work: Callable[[JacobianRows, WeightSpectrum], Tensor]
    ) -> Tensor:
        """What follows from rows: in float64, where their squares leave the range of the network's precision, or nearly vanish."""
        found = work(rows, spectrum)
        limits = torch.finfo(found.dtype)
        largest = found.abs().flatten(1).amax(1) if found.dim() == 3 else found.abs().amax((0, 2))
        if not len(largest) or (float(largest.max()) <= limits.max and float(largest.min()) >= limits.tiny * SPARE):
            return found
        lifted = rows.exactly()
        return work(lifted, self.curvature.spectrum.to(lifted.logits))

    def rows(self, inputs: Inputs, directions: Directions) -> Iterator[tuple[Tensor, JacobianRows, WeightSpectrum]]:
        """Portions of the data: logits, rows of the Jacobian, and the spectrum beside them."""
        layout, classes = self.curvature.layout, self.curvature.classes
        for _, some in portions(inputs, layout, classes, self._explicit()):
            with without_autocast(self.curvature.mean.device):
                rows = jacobian_rows(self.network, layout, some, directions)
            self._check_logits(rows.logits)
            spectrum = self._spectrum(rows.logits)
            with torch.no_grad(), torch.inference_mode(False):
                yield rows.logits.to(torch.promote_types(rows.logits.dtype, torch.float32)), rows, spectrum

    def _check_logits(self, logits: Tensor) -> None:
        check_logits(logits)
        check_finite(logits)
        if logits.shape[1] != self.curvature.classes:
            message = f"expected logits of {self.curvature.classes} classes, got {logits.shape[1]}."
            raise DataError(message)

    def draws(self, inputs: Inputs, samples: int, seed: int, precision: float | None = None) -> Tensor:
        """Probabilities (S, n, C) of networks with drawn weights: not linearised.

        All components draw from the same standard normals, and a draw does not depend on the data.

        Args:
            inputs: one batch.
            samples: S.
            seed: of the draws.
            precision: prior precision; None is the component's own.

        Returns:
            Probabilities of each draw.
        """
        precision = self.precision if precision is None else precision
        generator = torch.Generator("cpu").manual_seed(seed)
        layout, spectrum, probs = self.curvature.layout, self.curvature.spectrum, []
        for _ in range(samples):
            noise = torch.randn(len(spectrum.values), generator=generator, dtype=torch.float64, device="cpu")
            drawn = layout.tensors(self.network, self.curvature.mean + spectrum.deviation(noise, precision))
            logits = call(WithTensors(self.network, drawn), inputs)
            self._check_logits(logits)
            probs.append(CATEGORICAL.probabilities(logits.to(torch.promote_types(logits.dtype, torch.float32))))
        return torch.stack(probs)

    def log_evidence(self, precision: Tensor) -> Tensor:
        r"""Log marginal likelihood of the training labels at a prior precision; differentiable in it.

        .. math:: \sum_n \log p(y_n) - \tfrac\lambda2 \|\theta\|^2 + \tfrac D2 \log\lambda - \tfrac12 \log\det(H + \lambda I)

        over the weights that are not fixed.

        Args:
            precision: lambda, a scalar in float64.

        Returns:
            A scalar.

        Raises:
            OptionError: if the training data had no labels.
        """
        if self.curvature.log_likelihood is None:
            message = "the log evidence needs training labels: fit with batches of (inputs, labels)."
            raise OptionError(message)
        spectrum = self.curvature.spectrum
        chosen = spectrum.chosen if isinstance(spectrum, Dense) else None
        weights = self.curvature.mean if chosen is None else self.curvature.mean[chosen]
        prior = len(weights) * precision.log() - precision * weights.square().sum()
        return self.curvature.log_likelihood + (prior - (spectrum.values + precision).log().sum()) / 2
