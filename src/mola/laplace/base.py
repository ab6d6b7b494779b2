r"""The contracts of a curvature structure, in the order in which data pass through them.

`Structure` turns batches of features into `Factors`: sums over data that know no prior and merge with ``a + b``.
A `Spectrum` is the eigendecomposition of factors, made once; everything that depends on the prior precision
:math:`\lambda` follows from it in closed form. A `Posterior` is a spectrum at one :math:`\lambda`, ready to predict: a
module whose small buffers live in the network's precision and on its device.

Notation: n data, P features (the constant 1 included), C outputs, of which R directions are visible to the likelihood
(C - 1 for a softmax, which ignores a common shift). ``contrast`` names what remains of a logit covariance after the
projection on the visible directions. The invisible rest is known to the prior alone, and each structure treats it
exactly instead of reading it off an eigenvalue that should be zero.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from mola.errors import DataError, OptionError
from mola.laplace.distance import ClassDistance
from mola.laplace.moments import DRAWS_AT_ONCE, Spread, draws_at_once
from mola.likelihood import CATEGORICAL, Likelihood, OutputCurvature
from mola.numerics import exact, exact_device

GATHERED = (128, 4096, 2**18 + 2**12)
"""Rows that are summed together: least, most, and how many features they may have. Many, because each sum costs something
besides its products; not too many, because they wait in memory. A little more than a power of two: the constant 1 joins the
features, and batches whose sizes are powers of two are to fit all the same."""

LOGITS_AT_ONCE = 2**19
"""Logits of the rows that are summed together: 4 MB in float64. More took longer (new memory for every batch), and so did less."""

SMALLEST, LARGEST = 1e-30, 1e30
"""Prior precisions that can be used: float32, whose range is 1e-38 to 1e38, holds variances and features' squares."""

SPARE = 2.0**24
"""Room that is kept at both ends of a precision's range, for sums at the upper one and for digits at the lower one."""

OUTLIER_RIDGE = 1e-10
"""Ridge of the feature covariance in the outlier score, relative to its largest eigenvalue: the outlier score's own,
vanishing prior precision. Small enough to leave every direction seen in training alone, large enough that a direction
never seen (a feature that was always zero) counts as very far and not as infinitely far."""


def check_precision(value: float) -> float:
    """A prior precision as a float.

    Args:
        value: the candidate.

    Returns:
        The same number.
    """
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several numbers
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise OptionError(
            f"prior_precision must be a finite number above 0, got {value!r}. It is the precision of a Gaussian prior."
        )
    if not SMALLEST <= number <= LARGEST:
        raise OptionError(
            f"prior_precision must lie between {SMALLEST:g} and {LARGEST:g}, got {value!r}: beyond, variances leave the range of "
            f"float32. Near either end nothing depends on it any more; for no spread at all use mola.ensemble."
        )
    return number


@dataclass(frozen=True)
class Factors:
    """Sums over data, free of any prior. Tensor fields are float64 and add up."""

    count: int
    """Number of data N."""
    log_likelihood: float | None
    """Sum of the log-likelihoods of the labels, or None if there were none."""
    label_sums: Tensor | None = field(default=None, kw_only=True)
    """What else a likelihood sums of labels, as `Likelihood.label_sums` gives it; None where it needs nothing else."""

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        merged: dict[str, Any] = self.tensors()
        for name, tensor in other.tensors().items():
            merged[name] = merged[name] + tensor if name in merged else tensor.clone()  # what is not given is zero
        return replace(self.grown(other.count, other.log_likelihood), **merged)

    def grown(self, count: int, log_likelihood: float | None) -> Self:
        """The same sums with so many more data, and their log-likelihood: None if either is not known."""
        known = None
        if self.log_likelihood is not None and log_likelihood is not None:
            known = self.log_likelihood + log_likelihood
        return replace(self, count=self.count + count, log_likelihood=known)

    def tensors(self) -> dict[str, Tensor]:
        """The additive tensors by name."""
        given = {one.name: getattr(self, one.name) for one in fields(self)[2:]}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def with_labels(self, sums: Tensor | None) -> Self:
        """The same with more sums of labels."""
        if sums is None:
            return self
        return replace(self, label_sums=sums if self.label_sums is None else self.label_sums + sums)

    def weighted(self, weights: Tensor) -> Self:
        """The factors of outputs whose own curvature is multiplied by `weights` (C,), as by a noise that is chosen after the sums.

        Args:
            weights: above 0.

        Returns:
            New factors; only for likelihoods whose outputs do not interact.
        """
        changes: dict[str, Any] = {}
        for name in ("separate", "diagonal"):
            tensor = getattr(self, name, None)
            if isinstance(tensor, Tensor) and name in self.tensors():
                changes[name] = tensor * weights.to(tensor).view(-1, *[1] * (tensor.dim() - 1))
        return replace(self, **changes)

    def saved(self) -> dict[str, Tensor]:
        """What is written to disk, in shapes that `Structure.empty` names; `Structure.restore` reads it."""
        return self.tensors()

    def cpu(self) -> Self:
        """The same sums in main memory, where the eigenproblem is solved."""
        moved: dict[str, Any] = {name: tensor.cpu() for name, tensor in self.tensors().items()}
        return type(self)(self.count, self.log_likelihood, **moved)


class Structure(ABC):
    """A way to approximate the Hessian of the last layer."""

    name: str

    def rows(self, features: int, outputs: int) -> int | None:
        """Rows of P features and C logits that are summed at once: smaller batches are gathered, larger ones divided.

        Args:
            features: P.
            outputs: C.

        Returns:
            How many; None: batch by batch.
        """
        least, most, numbers = GATHERED
        return max(1, min(max(least, min(most, numbers // features)), LOGITS_AT_ONCE // outputs))

    @abstractmethod
    def sums(self, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> Factors:
        """Factors of one batch: features (n, P) with the constant 1, and their output curvature, in float64.

        Both belong to the caller, who uses their memory again for the next batch: keep no view of them.
        """

    @abstractmethod
    def empty(self, features: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the saved tensors for P features and C outputs."""

    @abstractmethod
    def restore(self, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> Factors:
        """Factors from what `Factors.saved` gave."""

    @abstractmethod
    def spectrum(self, factors: Any, likelihood: Likelihood = CATEGORICAL) -> Spectrum:
        """Solve the eigenproblem of the factors."""

    def merge(self, total: Any, batch: Any) -> Any:
        """Take one more batch into the total, which is None before the first."""
        return batch if total is None else total + batch

    def absorb(self, total: Any, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> Any:
        """Take one more batch into a total that nobody else holds, in place where the structure can.

        Args:
            total: of the batches before; None before the first.
            features: (n, P), as for `sums`.
            curvature: as for `sums`.
            log_likelihood: as for `sums`.

        Returns:
            The new total; the old one must not be used again.
        """
        return self.merge(total, self.sums(features, curvature, log_likelihood))

    def check_size(self, features: Sequence[int], outputs: int) -> None:  # noqa: B027  (most structures are small)
        """Raise `StructureTooLargeError` if the factors of networks with so many features each would not fit in memory."""

    def settings(self) -> dict[str, Any]:
        """What it takes to rebuild the structure, as JSON."""
        return {}


class Spectrum(ABC):
    """The curvature in its eigenbasis: all that follows for any prior precision. Float64, on the CPU."""

    outputs: int
    features: int

    def __init_subclass__(cls, **keywords: Any) -> None:
        # Where a class has its own `variance`, a faster way to many of a class above is not its own.
        super().__init_subclass__(**keywords)
        if "variance" in vars(cls) and "variances" not in vars(cls):
            cls.variances = Spectrum.variances  # type: ignore[method-assign]

    @property
    def projection_size(self) -> int:
        """Numbers that `project` makes of one datum."""
        return self.features

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """What the variance of the logits at features (n, P) needs, free of the prior; made once for all candidates."""

    @abstractmethod
    def variance(self, projected: Tensor, precision: float, *, contrast: bool = False) -> Tensor:
        """Variance (n, C) of each logit, from projected features; of the centred logits with `contrast`."""

    def variances(self, projected: Tensor, precisions: Sequence[float], *, contrast: bool = False) -> Tensor:
        """Variances at L prior precisions at once, the data last: (L, C, n), in memory of its own."""
        return torch.stack([self.variance(projected, one, contrast=contrast).T for one in precisions])

    @abstractmethod
    def log_determinant(self, precision: Tensor) -> Tensor:
        """Log determinant of the posterior precision matrix; differentiable in the prior precision."""

    @abstractmethod
    def deviations(self, precision: float, count: int, generator: torch.Generator | None) -> Tensor:
        """Samples (count, C, P) of the weights' deviation from the trained ones, in float64."""

    @abstractmethod
    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Marginal covariance (P, P) of one class's weights."""

    @abstractmethod
    def smallest_class_variance(self, precision: float) -> Tensor:
        """Smallest eigenvalue (C,) of each class's marginal covariance."""

    @abstractmethod
    def posterior(self, precision: float) -> Posterior:
        """The posterior at one prior precision, ready to predict."""

    def divided(self, by: float) -> Self:
        """The spectrum of the curvature divided by a number, as by a noise that is larger; the eigenvectors are the same.

        Args:
            by: above 0.
        """
        raise OptionError(
            f"{type(self).__name__} has no `divided`: a structure needs it for a noise that is chosen after the fit."
        )

    def variance_range(self, precision: float) -> tuple[float, float]:
        """Bounds on the variance of a visible logit at features of length 1; the lower one is 1 where it is not known."""
        return 1.0, 1 / precision


class Posterior(nn.Module, ABC):
    """A spectrum at one prior precision. Buffers follow the network's device and precision, but never below float32."""

    noise_size: int
    """Number of independent normals that one draw of the logits takes."""
    distance: ClassDistance | None = None
    """How far features are from the training classes, where that is known; it follows the posterior."""
    _reach: tuple[float, float] | None

    def __init__(self, spectrum: Spectrum, precision: float) -> None:
        # Bind `spectrum` to a prior `precision`; buffers start in float64 on the CPU.
        super().__init__()
        self.spectrum = spectrum
        self.precision = check_precision(precision)
        self._twin: tuple[torch.device, Posterior] | None = None  # in a tuple: not a part of this module
        self._set(torch.device("cpu"), torch.float64)

    @abstractmethod
    def constants(self) -> dict[str, Tensor]:
        """The small tensors that prediction needs, in float64."""

    @abstractmethod
    def variance(self, features: Tensor) -> Tensor:
        """Variance (n, C) of each logit at features (n, P)."""

    @abstractmethod
    def contrast_variance(self, features: Tensor) -> Tensor:
        """Variance (n, C) of each centred logit."""

    @abstractmethod
    def covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the logits."""

    @abstractmethod
    def contrast_covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""

    @abstractmethod
    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift, driven by standard normals (S, noise_size)."""

    def driver(self, noise: Tensor) -> Tensor:
        """What draws of the logits need of standard normals (S, noise_size), and no features: the same for all data."""
        return noise

    def driven(self, features: Tensor, driver: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits by what `driver` made: with it, what `perturb` gives."""
        return self.perturb(features, driver)

    @abstractmethod
    def mahalanobis(self, features: Tensor) -> Tensor:
        """Length (n,) of each feature vector relative to the training features, in the structure's own resolution."""

    def at(self, features: Tensor) -> FeatureSpread:
        """How the logits spread at features (n, P)."""
        return FeatureSpread(self, features)

    def difference_variances(self, features: Tensor) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits, by data, first and second logits."""
        return Spread.difference_variances(FeatureSpread(self, features))

    def average_contrast_variance(self) -> Tensor:
        """Variance (C,) of each centred logit, averaged over all directions of the features.

        Where the covariance is one number for each datum times a fixed matrix, its ratios are those at any features.
        """
        place, dtype = self._place
        return self.contrast_variance(torch.eye(self.spectrum.features, dtype=dtype, device=place)).mean(0)

    def exactly(self) -> Posterior:
        """The same in float64: itself, or another that is made when it is first asked for."""
        if self.dtype == torch.float64:
            return self
        device = exact_device(self._place[0])
        if self._twin is None or self._twin[0] != device:
            twin = self.spectrum.posterior(self.precision)
            twin.follow(device, torch.float64)
            self._twin = (device, twin.measured_by(self.distance))
        return self._twin[1]

    @property
    def reach(self) -> tuple[float, float]:
        """Least and most that the largest feature of a datum may be, 0 apart: between, variances and lengths keep their digits.

        Squared features and their sums must stay in the range of the precision, whatever their weights.
        """
        if self._reach is None:
            variances = self.spectrum.variance_range(self.precision)
            known: Tensor | None = getattr(self.spectrum, "feature_values", None)
            lengths = [] if known is None else [float(end) for end in mahalanobis_weights(known).aminmax()]
            # The squares themselves have weight 1; those of lengths are infinite where all features were 0 in training.
            weights = (1.0, *variances, *filter(math.isfinite, lengths))
            least, most = min(weights), max(weights)
            info = torch.finfo(self.dtype)
            if info.tiny * SPARE <= least and most <= info.max / SPARE:
                self._reach = math.sqrt(info.tiny * SPARE / least), math.sqrt(info.max / SPARE / most)
            else:  # the weights themselves leave it
                self._reach = math.inf, 0.0
        return self._reach

    def _set(self, device: torch.device, dtype: torch.dtype) -> None:
        for name, tensor in self.constants().items():
            self.register_buffer(name, tensor.to(device, dtype), persistent=False)
        # Kept apart: asking a module for its buffers takes as long as a small matrix product, for every batch.
        self._place = (next(self.buffers()).device, dtype)
        self._reach = None

    def measured_by(self, distance: ClassDistance | None) -> Self:
        """This posterior, which measures distances from now on."""
        self.distance = None if distance is None else distance.to(*self._place)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Rebuilt from float64 rather than cast: .half() must not lose the posterior, and .double() must gain it.
        probe = fn(next(self.buffers()).detach()[:0])
        self.follow(probe.device, probe.dtype)
        return self

    def follow(self, device: torch.device, dtype: torch.dtype) -> None:
        """Be on a device, in a precision of at least float32."""
        if not self.is_at(device, dtype):
            self._set(device, torch.promote_types(dtype, torch.float32))
            self.measured_by(self.distance)

    def is_at(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it is on a device, in a precision, or in float32 where that is lower."""
        return self._place == (device, torch.promote_types(dtype, torch.float32))

    def as_it_is(self) -> Self:
        """The same posterior, which stays where it is when this one is moved."""
        twin = copy.copy(self)
        twin._buffers = dict(self._buffers)
        return twin

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the computation: float64, or float32 for everything below."""
        return self._place[1]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._place[0]


class FeatureSpread(Spread):
    """How the logits of a last layer spread at features.

    Args:
        posterior: of the last layer.
        features: (n, P), the constant 1 included.
    """

    has_length = True

    def __init__(self, posterior: Posterior, features: Tensor) -> None:
        self.posterior, self.features = posterior, features

    @property
    def width(self) -> int:
        """Number of features P."""
        return self.features.shape[1]

    @property
    def noise_size(self) -> int:
        """Number of independent normals that one draw of the logits takes."""
        return self.posterior.noise_size

    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.posterior.variance(self.features)

    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self.posterior.contrast_variance(self.features)

    def contrast_covariance(self) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""
        return self.posterior.contrast_covariance(self.features)

    def average_contrast_variance(self) -> Tensor:
        """Variance (C,) of each centred logit, averaged over all directions of the features."""
        return self.posterior.average_contrast_variance()

    def difference_variances(self) -> Callable[[slice, slice, slice], Tensor]:
        """As the structure makes them fastest."""
        return self.posterior.difference_variances(self.features)

    def perturb(self, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift."""
        return self.posterior.perturb(self.features, noise)

    def __getitem__(self, rows: slice) -> FeatureSpread:
        return self.posterior.at(self.features[rows])

    def deviations(self, count: int, generator: torch.Generator, over: str, like: Tensor) -> Iterator[Tensor]:
        """Deviations of the logits in portions (n, s, C); those of weights are features times drawn weights.

        Args:
            count: number of draws in all.
            generator: source of the random numbers, on the CPU.
            over: "logits", or "weights" of the last layer.
            like: the mean (n, C).

        Yields:
            Portions whose sizes s add up to count.
        """
        if over == "logits":
            yield from super().deviations(count, generator, over, like)
            return
        spectrum, precision = self.posterior.spectrum, self.posterior.precision
        at_once = max(1, DRAWS_AT_ONCE // (spectrum.outputs * spectrum.features))
        for start in range(0, count, at_once):
            weights = spectrum.deviations(precision, min(at_once, count - start), generator).to(like)
            for some in torch.split(weights, draws_at_once(like)):
                yield torch.einsum("np,scp->nsc", self.features, some)

    def length(self) -> Tensor:
        """Length (n,) of each feature vector relative to the training features."""
        return self.posterior.mahalanobis(self.features)

    @property
    def has_distance(self) -> bool:
        """Whether `log_distance` and `log_length` are known."""
        return self.posterior.distance is not None

    @cached_property
    def _logs(self) -> tuple[Tensor, Tensor]:
        assert self.posterior.distance is not None  # has_distance
        # Where the posterior computes in float64 whatever it is given, features may come in more than its own precision.
        return self.posterior.distance.to(self.features.device, self.features.dtype).logs(self.features)

    def log_distance(self) -> Tensor:
        """Logarithm (n,) of each datum's distance from the training classes."""
        return self._logs[0]

    def log_length(self) -> Tensor:
        """Logarithm (n,) of the length of each datum's features."""
        return self._logs[1]

    def fits(self) -> bool:
        """Whether the posterior's precision holds the squares of the features."""
        if not len(self.features):
            return True
        least, most = self.posterior.reach
        largest = max(abs(float(end)) for end in self.features.aminmax())
        if self.features.dtype != torch.float64:
            # No datum is too small where the last of its features, mostly the constant 1, is large enough: one look at one column.
            return largest <= most and (
                float(self.features[:, -1].min()) >= least or not bool(_smaller(self.features, least).any())
            )
        if largest > most:
            raise DataError(
                f"features are as large as {largest:.3g}, and their squares leave the range of float64. "
                f"Check the inputs, or scale them."
            )
        return True

    def exactly(self) -> FeatureSpread:
        """The same in float64."""
        return self.posterior.exactly().at(exact(self.features))

    def kept(self) -> FeatureSpread:
        """The same with its own features, and a posterior that stays where it is."""
        twin = self.posterior.as_it_is().at(self.features.clone())
        vars(twin).update({name: value for name, value in vars(self).items() if name not in vars(twin)})
        return twin


class Candidate(FeatureSpread):
    """A posterior tried on features that are projected already: variances cost one small product, the rest is made on demand.

    Args:
        spectrum: the curvature.
        precision: prior precision.
        projected: the features, as `spectrum.project` gives them.
        features: (n, P).
    """

    def __init__(self, spectrum: Spectrum, precision: float, projected: Tensor, features: Tensor) -> None:
        self.spectrum, self.precision, self.projected, self.features = spectrum, precision, projected, features

    @cached_property
    def posterior(self) -> Posterior:  # type: ignore[override]
        """The posterior at this prior precision."""
        return self.spectrum.posterior(self.precision)

    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.spectrum.variance(self.projected, self.precision)

    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self.spectrum.variance(self.projected, self.precision, contrast=True)


def _smaller(features: Tensor, least: float) -> Tensor:
    # Which data (n,) have a largest feature below a number, 0 apart.
    size = features.abs().amax(1)
    return (size < least) & (size > 0)


def beside_tables(precisions: Sequence[float]) -> Tensor:
    """Prior precisions as (L, 1, 1), to go with tables (C, P)."""
    return torch.tensor(precisions, dtype=torch.float64, device="cpu")[:, None, None]


def mahalanobis_weights(values: Tensor) -> Tensor:
    """Inverse of the feature covariance's eigenvalues (P,), with the outlier score's own vanishing ridge."""
    return 1 / (values + OUTLIER_RIDGE * values.max().clamp_min(torch.finfo(values.dtype).tiny))
