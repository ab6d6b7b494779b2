"""One component: a trained network whose weights are Gaussian, all of them or some, and how its logits spread.

Logits are linearised around the trained weights, so that they are Gaussian too: `JointSpread` is their covariance at some
inputs. Or the network is run with drawn weights (`WeightDraws`), and nothing is linearised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mola.component import LaplaceComponent
from mola.errors import DataError, OptionError
from mola.laplace import SPARE, LogitMoments, Spread
from mola.likelihood import CATEGORICAL
from mola.links import LINKS, Link, MonteCarlo, as_link
from mola.network import Inputs, call, check_finite, without_autocast
from mola.network.calling import WithTensors
from mola.network.fingerprint import Watch
from mola.numerics import check_seed, exact
from mola.options import one_of, whole_number
from mola.whole.jacobians import Directions, JacobianRows, WeightLayout, jacobian_rows, portions
from mola.whole.spectra import Dense, WeightSpectrum

JITTER = 1e-6
"""Added to the contrast covariance's diagonal before its root is taken, relative to its mean: at least so much, and more
than what rounding takes away from a large one of low rank."""


def plain(logits: Tensor) -> Tensor:
    """Directions (C, n, C): each logit."""
    return torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)[:, None].expand(-1, len(logits), -1)


def contrasts(logits: Tensor) -> Tensor:
    """Directions (C, n, C): each logit less the mean of all."""
    return plain(logits) - 1 / logits.shape[1]


def basis(classes: int) -> Tensor:
    """Orthonormal directions (C, C) of logit space, as columns: those that the softmax sees, and last the common shift."""
    shift = torch.full((classes, 1), classes**-0.5, dtype=torch.float64, device="cpu")
    return torch.cat([CATEGORICAL.visible(classes), shift], dim=1)


def seen_and_shift(logits: Tensor) -> Tensor:
    """Directions (C, n, C): the orthonormal `basis`.

    The prior alone holds the common shift, which may vary far more than all that the softmax sees: apart, neither is lost
    in the other.
    """
    return basis(logits.shape[1]).T.to(logits)[:, None].expand(-1, len(logits), -1)


class JointSpread(Spread):
    """How linearised logits spread, read off their covariance along `seen_and_shift`.

    Args:
        joint: covariance (n, C, C).
    """

    def __init__(self, joint: Tensor) -> None:
        self.joint = joint
        self.classes = joint.shape[2]

    @property
    def width(self) -> int:
        """Numbers of each covariance."""
        return self.classes**2

    @property
    def noise_size(self) -> int:
        """One normal for each direction that the softmax sees."""
        return self.classes - 1

    def _seen(self) -> tuple[Tensor, Tensor]:
        # Covariance (n, C-1, C-1) of what the softmax sees, and its directions (C, C-1).
        return self.joint[:, :-1, :-1], basis(self.classes)[:, :-1].to(self.joint)

    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""
        columns = basis(self.classes).to(self.joint)
        return (columns @ self.joint @ columns.T).diagonal(dim1=1, dim2=2)

    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self.contrast_covariance().diagonal(dim1=1, dim2=2)

    def contrast_covariance(self) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""
        seen, columns = self._seen()
        return columns @ seen @ columns.T

    def average_contrast_variance(self) -> Tensor:
        """Ones (C,): without a Jacobian no logit has more variance than another."""
        return torch.ones(self.classes, device="cpu")

    def perturb(self, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift, driven by standard normals (S, C - 1)."""
        seen, columns = self._seen()
        scale = seen.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(seen.dtype).tiny)
        unit = torch.eye(self.noise_size, dtype=seen.dtype, device=seen.device)
        # In units of its own size: neither a prior that says all nor one that says nothing leaves the range of numbers.
        jitter = max(JITTER, 4 * self.noise_size * torch.finfo(seen.dtype).eps)
        root = torch.linalg.cholesky(seen / scale[:, None, None] + jitter * unit) * scale.sqrt()[:, None, None]
        return (noise @ root.mT) @ columns.T

    def __getitem__(self, rows: slice) -> JointSpread:
        return JointSpread(self.joint[rows])

    def exactly(self) -> JointSpread:
        """The same in float64."""
        return JointSpread(exact(self.joint))


@dataclass(frozen=True)
class WeightDraws:
    """Average the probabilities of networks with drawn weights: nothing is linearised.

    Args:
        samples: number of draws.
        seed: of the draws, unless a generator is passed with the call.
    """

    samples: int = 30
    seed: int = 0
    name = "samples"

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_number(self.samples, "samples"))  # plain, for files
        check_seed(self.seed)

    def settings(self) -> dict[str, Any]:
        """What it takes to rebuild the link, as JSON."""
        return asdict(self)


def as_whole_link(link: str | Link | WeightDraws, samples: int = 30, seed: int = 0) -> Link | WeightDraws:
    """The link of that name, or the link itself.

    Args:
        link: "samples", a name of `mola.links.LINKS`, or an object.
        samples: number of draws of "samples".
        seed: of these draws.

    Returns:
        The link.
    """
    draws = WeightDraws(samples, seed)
    if isinstance(link, WeightDraws):
        return link
    if isinstance(link, str) and link == draws.name:
        return draws
    if not isinstance(link, Link):
        one_of(link, (*LINKS, draws.name), "link", "a Link object")
    chosen = as_link(link)
    if isinstance(chosen, MonteCarlo) and chosen.over == "weights":
        raise OptionError(
            "MonteCarlo(over='weights') draws a last layer's weights; for all weights of a network use link='samples'."
        )
    return chosen


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

    @property
    def chosen(self) -> Tensor | None:
        """Places of the uncertain weights in the vector of all; None: all of them."""
        return self.spectrum.chosen if isinstance(self.spectrum, Dense) else None

    @property
    def weights(self) -> Tensor:
        """The trained weights that are uncertain."""
        return self.mean if self.chosen is None else self.mean[self.chosen]

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Log determinant of the posterior precision matrix; differentiable in the prior precision."""
        return (self.spectrum.values + precision).log().sum()


class WholeComponent(LaplaceComponent):
    """A network, the curvature of its weights, and a prior precision.

    Args:
        network: the trained classifier, shared and never changed.
        curvature: of its weights.
        precision: prior precision.
    """

    curvature: WholeCurvature

    def __init__(self, network: nn.Module, curvature: WholeCurvature, precision: float) -> None:
        super().__init__(network, curvature, precision)
        self._near: tuple[torch.device, torch.dtype, WeightSpectrum] | None = None

    def at(self, precision: float) -> WholeComponent:
        """The same network and curvature at another prior precision."""
        return WholeComponent(self.network, self.curvature, precision)

    def _spectrum(self, like: Tensor) -> WeightSpectrum:
        # The spectrum where the network is, in its precision, but never below float32.
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self._near is None or self._near[:2] != (like.device, dtype):
            self._near = (like.device, dtype, self.curvature.spectrum.to(like.new_zeros(0, dtype=dtype)))
        return self._near[2]

    def _changed(self, names: Sequence[str]) -> OptionError:
        return OptionError(
            f"the network's weights changed since the posterior was fitted ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}). Fit again: mola.fit_whole(...)."
        )

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
            return LogitMoments(nothing, JointSpread(nothing[:, :, None].expand(-1, -1, classes)))
        place = means[0].device, means[0].dtype
        joint = torch.cat(joints)  # in float64, where one is
        if joint.dtype == place[1]:
            return LogitMoments(torch.cat(means), JointSpread(joint))
        return LogitMoments(torch.cat(means).to(joint), JointSpread(joint), place)

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
        # What follows from rows: in float64, where their squares leave the range of the network's precision, or nearly
        # vanish.
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
        CATEGORICAL.check_outputs(logits)
        check_finite(logits)
        if logits.shape[1] != self.curvature.classes:
            raise DataError(f"expected logits of {self.curvature.classes} classes, got {logits.shape[1]}.")

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
