r"""Algorithm 1 for very many classes: the class factor by its diagonal, and never a C x C matrix.

A softmax's class factor :math:`A = \frac1N \sum_n \mathrm{diag}(p_n) - p_n p_n^\top` is the Laplacian of a graph whose nodes are
the classes and whose edges say how much two classes are confused. Its diagonal :math:`d_c = \frac1N \sum_n p_{nc} (1 - p_{nc})`
holds the degrees of the nodes, C numbers that add up like every sum here. Of all graphs with these degrees we take the one in
which no two classes are confused in particular: edges :math:`T q_i q_j`, with :math:`q \ge 0`, :math:`\sum_c q_c = 1` and T
settled by the degrees,

.. math:: A_d = T\, (\mathrm{diag}(q) - q q^\top), \qquad T\, q_c (1 - q_c) = d_c .

It has the diagonal of A and, like A, no curvature along the direction 1 that the softmax does not see. It *is* A where C = 2,
where there is one datum, and where the outputs' curvature is the same for all data. In general, with :math:`\nu_2` and
:math:`\nu_{\max}` the second smallest and the largest eigenvalue of :math:`\mathrm{diag}(d)^{-1/2} A\,
\mathrm{diag}(d)^{-1/2}` (0 and 2 bound them),

.. math:: \nu_2 (1 - q_{\max})\, A_d \preceq A \preceq \nu_{\max}\, A_d ,
   \qquad \frac{U_d}{\nu_{\max}} \preceq U \preceq \frac{U_d}{\nu_2 (1 - q_{\max})},

so that a logit's variance under `kron` is never less than half of the one here, and is more only as far as the classes fall
into groups that are confused among themselves. (The second line follows from the first because :math:`\nu_2 (1 - q_{\max}) \le
1 \le \nu_{\max}`.) What that does to probabilities is measured in docs/speed.md.

The inverse is known, too: with :math:`\gamma_c = 1 / (\sqrt N T q_c + \sqrt\lambda)`, the centring matrix :math:`\Pi` and
:math:`\kappa = \sqrt\lambda / \sum_c (1 - \sqrt\lambda \gamma_c)`,

.. math:: U = (\sqrt N A_d + \sqrt\lambda I)^{-1} = \Pi\, (\mathrm{diag}(\gamma) + \kappa\, \gamma \gamma^\top)\, \Pi
   + \tfrac{1}{\sqrt\lambda}\, \tfrac{1 1^\top}{C}.

All terms are positive. Only the mean of :math:`\gamma` is taken away; where the prior outweighs the data and all of
:math:`\gamma` is near :math:`1 / \sqrt\lambda`, that of :math:`1 - \sqrt\lambda \gamma` is taken instead, so that nothing is lost.

Likelihoods whose outputs have curvature s of their own add s to the diagonal, see nothing hidden, and have
:math:`U = \mathrm{diag}(\gamma) + \sqrt N T h h^\top / \sum_c h_c (\sqrt N s_c + \sqrt\lambda)` with
:math:`\gamma_c = 1 / (\sqrt N (s_c + T q_c) + \sqrt\lambda)` and :math:`h = q \gamma`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mola.laplace.base import Factors, Posterior, Spectrum, Structure
from mola.laplace.kron import Damped, DampedFeatures
from mola.laplace.symmetric import add_gram, centred_diagonal, centred_variance, eigensystem, pack, packed_size, unpack
from mola.likelihood import CATEGORICAL, Likelihood, OutputCurvature

HALVINGS = 80
"""Of the interval in which T is looked for: more than float64 can tell apart."""


@dataclass(frozen=True)
class KronDiagFactors(Factors):
    """Sums of the output curvature's diagonal, and of the features' outer products."""

    degrees: Tensor
    """Of the coupling's share in the diagonal (C,)."""
    feature_sum: Tensor
    """Of the features' outer products, packed."""
    separate: Tensor | None = None
    """Of what outputs have for themselves (C,)."""

    @property
    def gram(self) -> Tensor:
        """Sum (P, P) of the features' outer products."""
        return unpack(self.feature_sum)

    @property
    def diagonal(self) -> Tensor:
        """Sum (C,) of the output curvatures' diagonals."""
        return self.degrees if self.separate is None else self.degrees + self.separate

    def saved(self) -> dict[str, Tensor]:
        """The diagonal and the coupling's share in it (all of it for a softmax), and the matrix."""
        return {"degrees": self.degrees, "diagonal": self.diagonal.clone(), "gram": self.gram}


@dataclass(frozen=True)
class KronDiag(Structure):
    """Algorithm 1 with the class factor known by its diagonal: memory O(C + P^2), for vocabularies."""

    name = "kron-diag"

    def sums(self, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> KronDiagFactors:
        """Factors of one batch."""
        products = features.new_zeros(packed_size(features.shape[1]))
        add_gram(products, features)
        degrees, separate = _diagonals(curvature)
        return KronDiagFactors(len(features), log_likelihood, degrees, products, separate)

    def absorb(self, total: Any, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> Any:
        """Add the batch to the sums in place."""
        degrees, separate = _diagonals(curvature)
        if total is None or (total.separate is None) != (separate is None):
            return super().absorb(total, features, curvature, log_likelihood)
        add_gram(total.feature_sum, features)
        total.degrees.add_(degrees)
        if separate is not None:
            total.separate.add_(separate)
        return total.grown(len(features), log_likelihood)

    def empty(self, features: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the saved tensors."""
        return {"degrees": (outputs,), "diagonal": (outputs,), "gram": (features, features)}

    def restore(self, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> KronDiagFactors:
        """Factors from their saved parts."""
        separate = tensors["diagonal"] - tensors["degrees"]
        own = separate if bool(separate.any()) else None
        return KronDiagFactors(count, log_likelihood, tensors["degrees"], pack(tensors["gram"]), own)

    def spectrum(self, factors: KronDiagFactors, likelihood: Likelihood = CATEGORICAL) -> Spectrum:
        """Eigendecompose B, and find the graph of the degrees."""
        return KronDiagSpectrum(factors)


def _diagonals(curvature: OutputCurvature) -> tuple[Tensor, Tensor | None]:
    # Sums (C,) of the coupling's share in the diagonal, and of the separate part.
    degrees, separate = curvature.degrees(), curvature.separate
    if degrees is None:
        own = curvature.diagonal().sum(0)
        return torch.zeros_like(own), own
    return degrees, None if separate is None else separate.sum(0)


def graph_of_degrees(degrees: Tensor) -> tuple[float, Tensor]:
    """The graph with edges `T q_i q_j` whose nodes have these degrees: `T q_c (1 - q_c) = d_c` and `sum q = 1`.

    Each q_c is the smaller root of its quadratic, except that of the largest degree where the smaller ones do not reach 1. The
    degrees of any graph are such that the largest is at most the sum of the others; where it is just that (a star), q goes to
    the edge of what float64 tells apart.

    Args:
        degrees: (C,), not negative.

    Returns:
        T, and q (C,).
    """
    largest = int(degrees.argmax())
    most = float(degrees[largest])
    if most <= 0:  # nothing is confused with anything, or not so that it could be told
        return 0.0, torch.full_like(degrees, 1 / len(degrees))
    shares = degrees / most

    def roots(part: float, *, other: bool) -> Tensor:
        # The smaller roots at `part = 4 max(d) / T`, between 0 and 1; the larger one for the largest degree with
        # `other`.
        discriminant = (1 - part * shares).clamp_min(0).sqrt()
        found = part * shares / (2 * (1 + discriminant))
        if other:
            found[largest] = (1 + discriminant[largest]) / 2
        return found

    other = float(roots(1.0, other=False).sum()) < 1
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        # With smaller roots alone the sum grows with the part. With the larger one it is 1 at 0, grows, and then falls for good:
        # it is above 1 up to the part that is looked for, and below it from there on.
        if (float(roots(middle, other=other).sum()) < 1) != other:
            low = middle
        else:
            high = middle
    part = high
    found = roots(part, other=other)
    return 4 * most / part, found / found.sum()


class KronDiagSpectrum(Damped):
    """B's eigensystem, and the graph of A's diagonal."""

    def __init__(self, factors: KronDiagFactors) -> None:
        self.count = factors.count
        self.feature_values, self.feature_vectors = eigensystem(factors.gram / self.count)
        self.outputs, self.features = len(factors.degrees), len(self.feature_values)
        self.total, self.nodes = graph_of_degrees(factors.degrees.clamp_min(0) / self.count)
        self.separate = None if factors.separate is None else factors.separate / self.count

    @property
    def hidden(self) -> bool:
        """Whether a shift common to all outputs is invisible: a Laplacian has no curvature there."""
        return self.separate is None

    def own(self, precision: float | Tensor) -> tuple[Tensor, Tensor]:
        """The vector gamma (C,), and what is left of its inverse without the graph: `sqrt(N) s + sqrt(lambda)` (C,)."""
        root = self.count**0.5
        floor = torch.zeros_like(self.nodes) if self.separate is None else root * self.separate
        rest = floor + precision**0.5
        return 1 / (rest + root * self.total * self.nodes), rest

    def shared(self, precision: float) -> Tensor:
        """The vector k (C,) of the rank-one part: `U = diag(gamma) + k k'`, between two centrings where a shift is hidden."""
        gamma, rest = self.own(precision)
        edge, prior = self.count**0.5 * self.total, precision**0.5
        if not self.hidden:
            return (edge / (self.nodes * gamma * rest).sum()).sqrt() * self.nodes * gamma
        learned = edge * self.nodes * gamma  # 1 - sqrt(lambda) gamma
        total = learned.sum()
        some = torch.where(total > 0, total, torch.ones_like(total))
        # Whichever of the two is smaller loses less where its mean is taken away: their differences are the same. Both are
        # computed, for graphs, which cannot choose by a number.
        by_learned = (learned.mean() - learned) / (prior**0.5 * some.sqrt())
        by_gamma = (prior / some).sqrt() * (gamma - gamma.mean())
        found = torch.where(learned.max() < prior * gamma.max(), by_learned, by_gamma)
        # Of 0: nothing is confused, or less than float64 can hold.
        return torch.where(total > 0, found, torch.zeros_like(found))

    def class_variance(self, precision: float, *, contrast: bool = False) -> Tensor:
        """Diagonal (C,) of U, or of its visible part."""
        gamma, _ = self.own(precision)
        extra = self.shared(precision).square()
        if not self.hidden:
            return gamma + extra
        visible = centred_variance(gamma) + extra
        return visible if contrast else visible + 1 / (self.outputs * precision**0.5)

    def smallest_visible(self, precision: float) -> float:
        """A lower bound on the eigenvalues of U's visible part."""
        return float(self.own(precision)[0].min())

    def class_matrix(self, precision: float) -> Tensor:
        """The visible part of U (C, C): for those who ask for covariances, and nobody else."""
        gamma, _ = self.own(precision)
        shared = self.shared(precision)
        diagonal = centred_diagonal(gamma) if self.hidden else torch.diag(gamma)
        return diagonal + shared[:, None] * shared

    def class_log_determinant(self, precision: Tensor) -> Tensor:
        """`log(sum_c q_c gamma_c (sqrt(N) s_c + sqrt(lambda))) - sum log(gamma)`, by the matrix determinant lemma."""
        gamma, rest = self.own(precision)
        nodes = self.nodes.clone()  # autograd keeps it, and would not keep what was made in inference mode
        return (nodes * gamma * rest).sum().log() - gamma.log().sum()

    def deviations(self, precision: float, count: int, generator: torch.Generator | None) -> Tensor:
        """Independent normals for each class and a common one, times a root of V."""
        size = (count, self.outputs + 2, self.features)
        noise = (
            torch.randn(size, generator=generator, dtype=torch.float64, device="cpu") @ self.feature_root(precision).T
        )
        gamma, _ = self.own(precision)
        drawn = gamma.sqrt()[:, None] * noise[:, :-2] + self.shared(precision)[:, None] * noise[:, -2:-1]
        if not self.hidden:
            return drawn
        return drawn - drawn.mean(1, keepdim=True) + noise[:, -1:] / (self.outputs * precision**0.5) ** 0.5

    def divided(self, by: float) -> Self:
        """The spectrum of the curvature divided by a number: the graph's and each output's own."""
        twin = copy.copy(self)
        twin.total = self.total / by
        twin.separate = None if self.separate is None else self.separate / by
        return twin

    def posterior(self, precision: float) -> Posterior:
        """The posterior at one prior precision."""
        return KronDiagPosterior(self, precision)


class KronDiagPosterior(DampedFeatures):
    """Logit covariance `(phi' V phi) U`, with U a diagonal and rank one."""

    spectrum: KronDiagSpectrum
    own: Tensor
    shared: Tensor

    @property
    def noise_size(self) -> int:  # type: ignore[override]
        """One normal for each logit, and one for all."""
        return self.spectrum.outputs + 1

    def constants(self) -> dict[str, Tensor]:
        """What variances need, and the two parts of U."""
        gamma, _ = self.spectrum.own(self.precision)
        return super().constants() | {"own": gamma, "shared": self.spectrum.shared(self.precision)}

    def covariance(self, features: Tensor) -> Tensor:
        """`(phi' V phi) U`."""
        hidden = 1 / (self.spectrum.outputs * self.precision**0.5) if self.spectrum.hidden else 0.0
        return self.contrast_covariance(features) + hidden * self.scale(features)[:, None, None]

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """The same with the visible part of U."""
        matrix = self.spectrum.class_matrix(self.precision).to(self.own)
        return self.scale(features)[:, None, None] * matrix

    def class_differences(self) -> Tensor:
        """`gamma_i + gamma_j + (k_i - k_j)^2`, and 0 for a logit and itself: what is centred away cancels."""
        found = self.own[:, None] + self.own + (self.shared[:, None] - self.shared).square()
        return found.fill_diagonal_(0)

    def class_draws(self, noise: Tensor) -> Tensor:
        """`sqrt(gamma) * noise + k * one more`."""
        return noise[:, :-1] * self.own.sqrt() + noise[:, -1:] * self.shared
