r"""Kronecker-factored curvature: :math:`H \approx N\, A \otimes B`, with the prior as Algorithm 1 of the paper reads it.

.. math:: A = \tfrac1N \sum_n \Lambda_n \;(C \times C), \qquad B = \tfrac1N \sum_n \phi_n \phi_n^\top \;(P \times P).

With :math:`A = Q_A\, \mathrm{diag}(a)\, Q_A^\top` and :math:`B = Q_B\, \mathrm{diag}(b)\, Q_B^\top`, the posterior
precision of `Kron`, the paper's Algorithm 1, has eigenvalues :math:`(\sqrt N a_i + \sqrt\lambda)(\sqrt N b_j +
\sqrt\lambda)`. The covariance stays a Kronecker product :math:`U \otimes V` with :math:`V = (\sqrt N B + \sqrt\lambda I)^{-1}`, so
the covariance of the logits is one number times a fixed matrix, :math:`(\phi^\top V \phi)\, U`, and the variance of logit c is
:math:`(\phi^\top V \phi)\, U_{cc}`. The last column of :math:`Q_A` is the direction that the likelihood cannot see, with eigenvalue
exactly 0.

The side of the features is the same for every class factor and comes first in this file; `Kron` has the whole class factor,
`KronDiag` its diagonal. `KronExact` adds the prior exactly instead: another posterior at the same :math:`\lambda`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from mola.errors import OptionError, StructureTooLargeError
from mola.laplace.base import Factors, FeatureSpread, Posterior, Spectrum, Structure, mahalanobis_weights
from mola.laplace.memory import free_memory
from mola.laplace.symmetric import (
    add_gram,
    eigensystem,
    pack,
    packed_size,
    quadratic,
    quadratic_root,
    seen_basis,
    unpack,
)
from mola.likelihood import CATEGORICAL, Likelihood, OutputCurvature, laplacian
from mola.options import is_real


class Damped(Spectrum):
    """B's eigensystem, and U by what it says of each class."""

    count: int
    feature_values: Tensor
    """(P,), of B."""
    feature_vectors: Tensor
    """(P, P), of B."""

    @abstractmethod
    def class_variance(self, precision: float, *, contrast: bool = False) -> Tensor:
        """Diagonal (C,) of U, or of its visible part."""

    @abstractmethod
    def class_log_determinant(self, precision: Tensor) -> Tensor:
        """Log determinant of U's inverse; differentiable in the prior precision."""

    def feature_inverse(self, precision: float | Tensor) -> Tensor:
        """Eigenvalues (P,) of V."""
        return 1 / (self.count**0.5 * self.feature_values + precision**0.5)

    @abstractmethod
    def smallest_visible(self, precision: float) -> float:
        """A lower bound on the eigenvalues of U's visible part."""

    def variance_range(self, precision: float) -> tuple[float, float]:
        """Those of `U x V`, and of V, which is multiplied by the features first."""
        features = float(self.feature_inverse(precision).min())
        return features * min(1.0, self.smallest_visible(precision)), max(1 / precision, precision**-0.5)

    def feature_root(self, precision: float) -> Tensor:
        """A root (P, P) of V."""
        return self.feature_vectors * self.feature_inverse(precision).sqrt()

    def project(self, features: Tensor) -> Tensor:
        """Squared coordinates (n, P) of the features in B's eigenbasis."""
        return (features @ self.feature_vectors).square_()

    def variance(self, projected: Tensor, precision: float, *, contrast: bool = False) -> Tensor:
        """`(phi' V phi) U_cc`."""
        return (projected @ self.feature_inverse(precision))[:, None] * self.class_variance(
            precision, contrast=contrast
        )

    def variances(self, projected: Tensor, precisions: Sequence[float], *, contrast: bool = False) -> Tensor:
        """The same at several precisions, with one product."""
        features = self.feature_inverse(projected.new_tensor(precisions)[:, None]) @ projected.T
        classes = torch.stack([self.class_variance(one, contrast=contrast) for one in precisions])
        return features[:, None, :] * classes[:, :, None]

    def log_determinant(self, precision: Tensor) -> Tensor:
        """`P log det U^-1 + C sum log(sqrt(N) b + sqrt(lambda))`."""
        features = -self.feature_inverse(precision).log().sum()
        return self.features * self.class_log_determinant(precision) + self.outputs * features

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """`U_cc V`."""
        value = (self.feature_vectors * self.feature_inverse(precision)) @ self.feature_vectors.T
        return self.class_variance(precision)[output] * value

    def smallest_class_variance(self, precision: float) -> Tensor:
        """`U_cc / (sqrt(N) b_max + sqrt(lambda))`."""
        return self.class_variance(precision) * self.feature_inverse(precision).min()


class DampedFeatures(Posterior):
    """Logit variance `(phi' V phi) U_cc`: one number for each datum times one for each class."""

    spectrum: Damped
    feature_root: Tensor
    outlier_root: Tensor
    class_variance: Tensor
    contrast_class_variance: Tensor

    def constants(self) -> dict[str, Tensor]:
        """Roots of V and of B's inverse, and the diagonal of U."""
        spectrum, precision = self.spectrum, self.precision
        vectors, known = spectrum.feature_vectors, mahalanobis_weights(spectrum.feature_values)
        return {
            "feature_root": quadratic_root(vectors, spectrum.feature_inverse(precision)),
            "outlier_root": quadratic_root(vectors, known),
            "class_variance": spectrum.class_variance(precision),
            "contrast_class_variance": spectrum.class_variance(precision, contrast=True),
        }

    def scale(self, features: Tensor) -> Tensor:
        """`phi' V phi` (n,)."""
        return quadratic(features, self.feature_root)

    @abstractmethod
    def class_differences(self) -> Tensor:
        """`U_ii + U_jj - 2 U_ij` (C, C)."""

    def difference_variances(self, features: Tensor) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits, by data, first and second logits: a fixed matrix times `phi' V phi`."""
        scale, table = self.scale(features)[:, None, None], self.class_differences()
        return lambda rows, first, second: scale[rows] * table[first, second]

    def mahalanobis(self, features: Tensor) -> Tensor:
        """`sqrt(phi' B^-1 phi)`."""
        return quadratic(features, self.outlier_root).sqrt()

    @abstractmethod
    def class_draws(self, noise: Tensor) -> Tensor:
        """Draws (S, C) with covariance U, up to a common shift, driven by standard normals (S, noise_size)."""

    def at(self, features: Tensor) -> DampedSpread:
        """How the logits spread at features (n, P)."""
        return DampedSpread(self, features)

    def driver(self, noise: Tensor) -> Tensor:
        """Draws (S, C) with covariance U."""
        return self.class_draws(noise)

    def driven(self, features: Tensor, driver: Tensor) -> Tensor:
        """`sqrt(phi' V phi)` times draws of covariance U."""
        return self.scale(features).sqrt()[:, None, None] * driver

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """`sqrt(phi' V phi)` times draws of covariance U."""
        return self.driven(features, self.class_draws(noise))

    def variance(self, features: Tensor) -> Tensor:
        """`(phi' V phi) U_cc`."""
        return self.at(features).variance()

    def contrast_variance(self, features: Tensor) -> Tensor:
        """The same with the visible part of U."""
        return self.at(features).contrast_variance()


class DampedSpread(FeatureSpread):
    """One number for each datum times a fixed covariance: the number is most of the work of every moment, and is kept."""

    posterior: DampedFeatures

    @cached_property
    def scale(self) -> Tensor:
        """`phi' V phi` (n,)."""
        return self.posterior.scale(self.features)

    def variance(self) -> Tensor:
        """`(phi' V phi) U_cc`."""
        return self.scale[:, None] * self.posterior.class_variance

    def contrast_variance(self) -> Tensor:
        """The same with the visible part of U."""
        return self.scale[:, None] * self.posterior.contrast_class_variance

    def perturb(self, noise: Tensor) -> Tensor:
        """`sqrt(phi' V phi)` times draws of covariance U."""
        return self.scale.sqrt()[:, None, None] * self.posterior.class_draws(noise)

    def around(self, mean: Tensor, noise: Tensor) -> Callable[[slice], Tensor]:
        """The mean plus one number for each datum, times draws that are fixed."""
        lengths, fixed = self.scale.sqrt(), self.posterior.class_draws(noise)
        return lambda rows: torch.addcmul(mean[rows, None], lengths[rows, None, None], fixed)


KEPT = 512
"""Diagonals of U, of C numbers each, that are kept for prior precisions that were asked for."""


@dataclass(frozen=True)
class KronFactors(Factors):
    """Sums of the output curvature and of the features' outer products, both symmetric: lower halves are kept."""

    coupling: Tensor
    """Of the couplings' outer products, packed: the output curvature is their Laplacian."""
    feature_sum: Tensor
    """Of the features' outer products, packed."""
    separate: Tensor | None = None
    """Of what outputs have for themselves (C,)."""

    @property
    def output(self) -> Tensor:
        """Sum (C, C) of the output curvatures."""
        coupled = laplacian(unpack(self.coupling))
        return coupled if self.separate is None else coupled + torch.diag(self.separate)

    @property
    def gram(self) -> Tensor:
        """Sum (P, P) of the features' outer products."""
        return unpack(self.feature_sum)

    def saved(self) -> dict[str, Tensor]:
        """The two matrices."""
        return {"output": self.output, "gram": self.gram}


@dataclass(frozen=True)
class RunningKronFactors(KronFactors):
    """A running average over batches, scaled by N: it depends on their order, so two of them do not add up."""

    def __add__(self, other: object) -> RunningKronFactors:
        raise OptionError(
            "factors of a running average depend on the order of the batches and cannot be added. "
            "Use Kron() without running_average: its sums are exact and merge."
        )


@dataclass(frozen=True)
class Kron(Structure):
    """Algorithm 1 of the paper: the prior is split evenly between the two Kronecker factors.

    Args:
        running_average: the paper's beta in `A <- beta A + (1 - beta) A_batch`, from 0; None sums exactly.
    """

    running_average: float | None = None
    name = "kron"

    def __post_init__(self) -> None:
        if self.running_average is not None and not (is_real(self.running_average) and 0 < self.running_average < 1):
            raise OptionError(f"running_average must lie between 0 and 1, or be None; got {self.running_average!r}.")

    def check_size(self, features: Sequence[int], outputs: int) -> None:
        """Refuse factors that would not fit: those of a vocabulary.

        Args:
            features: P of each network.
            outputs: C.
        """
        largest = max(outputs, *features)
        # Half of each matrix is summed; the largest is then unpacked and decomposed.
        needed = 8 * (sum((outputs**2 + width**2) // 2 for width in features) + 2 * largest**2)
        free = free_memory()
        if free is not None and needed > free:
            together = f" for each of {len(features)} networks" if len(features) > 1 else ""
            raise StructureTooLargeError(
                f"structure {self.name!r} keeps a {outputs} x {outputs} and a {max(features)} x {max(features)} matrix{together}, "
                f"which takes {needed / 1e9:.1f} GB to fit, and {free / 1e9:.1f} GB are free. Use structure "
                f"{'kron-diag' if outputs >= max(features) else 'diag'!r}."
            )

    def sums(self, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> KronFactors:
        """Factors of one batch."""
        coupling, separate = curvature.coupling, curvature.separate
        given = next((part for part in (coupling, separate) if part is not None), None)
        if given is None:
            raise OptionError("a likelihood must give separate or coupled curvature")
        coupled = features.new_zeros(packed_size(given.shape[1]))
        if coupling is not None:
            add_gram(coupled, coupling)
        products = features.new_zeros(packed_size(features.shape[1]))
        add_gram(products, features)
        kind = KronFactors if self.running_average is None else RunningKronFactors
        return kind(len(features), log_likelihood, coupled, products, None if separate is None else separate.sum(0))

    def absorb(self, total: Any, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> Any:
        """Add the batch to the sums in place: no other matrix of their size is made."""
        if total is None or self.running_average is not None or curvature.coupling is None:
            return super().absorb(total, features, curvature, log_likelihood)
        add_gram(total.coupling, curvature.coupling)
        add_gram(total.feature_sum, features)
        if curvature.separate is not None:
            total.separate.add_(curvature.separate.sum(0))
        return total.grown(len(features), log_likelihood)

    def rows(self, features: int, outputs: int) -> int | None:
        """Many, or a batch at a time where the average runs over batches."""
        return super().rows(features, outputs) if self.running_average is None else None

    def merge(self, total: Any, batch: Any) -> Any:
        """Add the batch, or move the running average towards it."""
        beta = self.running_average
        if beta is None:
            return super().merge(total, batch)
        if total is None:  # Algorithm 1 starts from zero
            nothing = {name: torch.zeros_like(tensor) for name, tensor in batch.tensors().items()}
            total = RunningKronFactors(0, 0.0, **nothing)
        count = total.count + batch.count
        means = {
            name: beta * (tensor / max(total.count, 1)) + (1 - beta) * getattr(batch, name) / batch.count
            for name, tensor in total.tensors().items()
            if name != "label_sums"  # which are sums, whatever the order of the batches
        }
        labelled = total.log_likelihood is not None and batch.log_likelihood is not None
        log_likelihood = total.log_likelihood + batch.log_likelihood if labelled else None
        scaled = {name: count * mean for name, mean in means.items()}
        return RunningKronFactors(count, log_likelihood, **scaled, label_sums=total.label_sums)

    def empty(self, features: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the saved tensors."""
        return {"output": (outputs, outputs), "gram": (features, features)}

    def restore(self, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> KronFactors:
        """Factors from their saved parts."""
        kind = KronFactors if self.running_average is None else RunningKronFactors
        output = tensors["output"]
        # A Laplacian is known by what lies off its diagonal; its diagonal is made again, from the same numbers in the same
        # order: what is left beyond the rounding of another machine is what outputs have for themselves.
        coupling = torch.diag(output.diagonal()) - output
        separate = output.diagonal() - laplacian(coupling).diagonal()
        rounding = len(output) * torch.finfo(output.dtype).eps * output.diagonal()
        own = separate if bool((separate > rounding).any()) else None
        return kind(count, log_likelihood, pack(coupling), pack(tensors["gram"]), own)

    def spectrum(self, factors: KronFactors, likelihood: Likelihood = CATEGORICAL) -> Spectrum:
        """Eigendecompose both factors."""
        return DampedSpectrum(factors, likelihood)

    def settings(self) -> dict[str, Any]:
        """The running average, where there is one."""
        return {} if self.running_average is None else {"running_average": self.running_average}


class KronSpectrum(Spectrum):
    """Eigenvalues a (C,) and b (P,) with their vectors; what both readings of the prior share."""

    def __init__(self, factors: KronFactors, likelihood: Likelihood) -> None:
        self.count = factors.count
        output, gram = factors.output, factors.gram
        self.outputs, self.features = len(output), len(gram)
        seen, unseen = seen_basis(likelihood, self.outputs)
        values, vectors = eigensystem(seen.T @ (output / self.count) @ seen)
        self.visible = len(values)
        self.class_values = torch.cat([values, values.new_zeros(unseen.shape[1])])
        self.class_vectors = torch.cat([seen @ vectors, unseen], dim=1)
        self.feature_values, self.feature_vectors = eigensystem(gram / self.count)
        self._class_variances: dict[tuple[float, bool], Tensor] = {}

    def divided(self, by: float) -> Self:
        """The spectrum of the curvature divided by a number."""
        twin = copy.copy(self)
        twin.class_values = self.class_values / by
        twin._class_variances = {}
        return twin

    def project(self, features: Tensor) -> Tensor:
        """Squared coordinates (n, P) of the features in B's eigenbasis."""
        return (features @ self.feature_vectors).square_()


class KronPosterior(Posterior):
    """What both readings of the prior share at prediction time."""

    spectrum: KronSpectrum

    @property
    def noise_size(self) -> int:  # type: ignore[override]
        """One normal for each visible direction of output space."""
        return self.spectrum.visible


class DampedSpectrum(Damped, KronSpectrum):
    """Algorithm 1: precision eigenvalues `(sqrt(N) a + sqrt(lambda)) (sqrt(N) b + sqrt(lambda))`."""

    def class_inverse(self, precision: float | Tensor) -> Tensor:
        """Eigenvalues (C,) of U."""
        return 1 / (self.count**0.5 * self.class_values + precision**0.5)

    def class_variance(self, precision: float, *, contrast: bool = False) -> Tensor:
        """Diagonal (C,) of U, or of its visible part."""
        # Kept: C^2 numbers are read for it, and every portion of the validation data asks for that of every candidate.
        if (precision, contrast) not in self._class_variances:
            if len(self._class_variances) >= KEPT:
                self._class_variances.clear()
            seen = self.visible if contrast else self.outputs
            found = self.class_vectors[:, :seen].square() @ self.class_inverse(precision)[:seen]
            self._class_variances[precision, contrast] = found
        return self._class_variances[precision, contrast]

    def smallest_visible(self, precision: float) -> float:
        """A lower bound on the eigenvalues of U's visible part."""
        return float(self.class_inverse(precision).min())

    def class_log_determinant(self, precision: Tensor) -> Tensor:
        """`sum log(sqrt(N) a + sqrt(lambda))`."""
        return -self.class_inverse(precision).log().sum()

    def deviations(self, precision: float, count: int, generator: torch.Generator | None) -> Tensor:
        """`U^1/2 E V^1/2` for standard normal E."""
        noise = torch.randn(count, self.outputs, self.features, generator=generator, dtype=torch.float64, device="cpu")
        left = self.class_vectors * self.class_inverse(precision).sqrt()
        return left @ noise @ self.feature_root(precision).T

    def posterior(self, precision: float) -> Posterior:
        """The posterior at one prior precision."""
        return DampedPosterior(self, precision)


class DampedPosterior(DampedFeatures, KronPosterior):
    """Logit covariance `(phi' V phi) U`: one number for each datum times a fixed matrix."""

    spectrum: DampedSpectrum
    class_root: Tensor
    _differences: tuple[Tensor, Tensor] | None = None

    def constants(self) -> dict[str, Tensor]:
        """What variances need, and a root of U with the visible directions first."""
        spectrum = self.spectrum
        return super().constants() | {
            "class_root": spectrum.class_vectors * spectrum.class_inverse(self.precision).sqrt()
        }

    def covariance(self, features: Tensor) -> Tensor:
        """`(phi' V phi) U`."""
        return self.scale(features)[:, None, None] * (self.class_root @ self.class_root.T)

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """The same with the visible part of U."""
        root = self.class_root[:, : self.noise_size]
        return self.scale(features)[:, None, None] * (root @ root.T)

    def class_differences(self) -> Tensor:
        """`U_ii + U_jj - 2 U_ij` (C, C), made once: C^3 products."""
        if self._differences is not None and self._differences[0] is self.class_root:
            return self._differences[1]
        root = self.class_root[:, : self.noise_size]
        visible = root @ root.T
        own = visible.diagonal()
        made = (own[:, None] + own - 2 * visible).clamp_min(0)
        if not torch.compiler.is_compiling():  # a trace has its own tensors, which are nothing to keep
            self._differences = (self.class_root, made)
        return made

    def class_draws(self, noise: Tensor) -> Tensor:
        """`U^1/2 noise`."""
        return noise @ self.class_root[:, : self.noise_size].T
