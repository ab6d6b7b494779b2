r"""Algorithm 1 for a very large number of classes: only the diagonal of the class factor is stored, not a C x C matrix.

A softmax's class factor :math:`A = \frac1N \sum_n \mathrm{diag}(p_n) - p_n p_n^\top` is the Laplacian of a graph whose nodes are the
classes and whose edges measure how often two classes are confused. The diagonal of A, :math:`d_c = \frac1N \sum_n p_{nc} (1 -
p_{nc})`, contains the degrees of the nodes: C numbers, each an average over the data. Among all graphs with these degrees, we
choose the one in which no two classes are confused more often than their degrees imply. The edge weights of this graph are
:math:`T q_i q_j`, with :math:`q \ge 0` and :math:`\sum_c q_c = 1`; the degrees determine q and T:

.. math:: A_d = T\, (\mathrm{diag}(q) - q q^\top), \qquad T\, q_c (1 - q_c) = d_c .

:math:`A_d` has the same diagonal as A and, like A, no curvature along the all-ones vector, a direction that the softmax ignores.
:math:`A_d` *equals* A if C = 2, if there is only one datum, or if the outputs' curvature is the same for all data. In general, let
:math:`\nu_2` and :math:`\nu_{\max}` be the second smallest and the largest eigenvalue of :math:`\mathrm{diag}(d)^{-1/2} A\,
\mathrm{diag}(d)^{-1/2}`, which lie between 0 and 2. Then

.. math:: \nu_2 (1 - q_{\max})\, A_d \preceq A \preceq \nu_{\max}\, A_d ,
   \qquad \frac{U_d}{\nu_{\max}} \preceq U \preceq \frac{U_d}{\nu_2 (1 - q_{\max})},

so a logit's variance under `kron` is at least half its variance under this structure. The variance under `kron` is larger only to
the extent that the classes form groups whose members are confused with one another. The second pair of bounds follows from the first
because :math:`\nu_2 (1 - q_{\max}) \le 1 \le \nu_{\max}`. docs/speed.md describes the effect on probabilities.

The inverse has a closed form. With :math:`\gamma_c = 1 / (\sqrt N T q_c + \sqrt\lambda)`, the centring matrix :math:`\Pi` and
:math:`\kappa = \sqrt\lambda / \sum_c (1 - \sqrt\lambda \gamma_c)`,

.. math:: U = (\sqrt N A_d + \sqrt\lambda I)^{-1} = \Pi\, (\mathrm{diag}(\gamma) + \kappa\, \gamma \gamma^\top)\, \Pi
   + \tfrac{1}{\sqrt\lambda}\, \tfrac{1 1^\top}{C}.

All terms are positive, and the only subtraction removes the mean of :math:`\gamma`. If the prior outweighs the data, all
:math:`\gamma_c` are close to :math:`1 / \sqrt\lambda`. The mean of :math:`1 - \sqrt\lambda \gamma` is then subtracted instead, so that
no digits are lost.

If the outputs have separate curvature s, it is added to the diagonal, and no direction is hidden. In this case, :math:`U =
\mathrm{diag}(\gamma) + \sqrt N T h h^\top / \sum_c h_c (\sqrt N s_c + \sqrt\lambda)` with :math:`\gamma_c = 1 / (\sqrt N (s_c + T
q_c) + \sqrt\lambda)` and :math:`h = q \gamma`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.likelihoods.base import OutputCurvature
from molaplace.numerics import Generator, square_root, standard_normals
from molaplace.structures.base import (
    EVERY_OUTPUT,
    FeatureFactor,
    LayerCurvature,
    Structure,
    centred_variance,
)
from molaplace.sums import Sums

HALVINGS = 80
"""Number of bisection steps for T, enough for float64 precision."""


@dataclass(frozen=True)
class KronDiag(Structure):
    """Algorithm 1 with only the diagonal of the class factor. It needs O(C + P^2) memory, so it suits large vocabularies."""

    name = "kron-diag"

    def sums(self, phi: Tensor, curvature: OutputCurvature) -> dict[str, Tensor]:
        """Return the diagonals (C,) of the coupled and separate curvature, and the sum (P, P) of the features' outer products."""
        sums = {"gram": phi.T @ phi}
        if curvature.coupling is not None:
            # This difference of two sums loses no more digits than u_c (sum(u) - u_c) and is faster to compute. It also avoids
            # an (n, C) table of squares, which would triple the time with 32,000 classes.
            coupling = curvature.coupling
            sums["degrees"] = coupling.sum(1) @ coupling - torch.einsum("nc,nc->c", coupling, coupling)
        if curvature.separate is not None:
            sums["separate"] = curvature.separate.sum(0)
        return sums

    def solve(self, sums: Sums) -> GraphCurvature:
        """Eigendecompose B and find the graph whose degrees are given by the sums."""
        means = {
            name: tensor.cpu() / sums.count for name, tensor in sums.tensors.items() if name in ("degrees", "separate")
        }
        separate = means.get("separate")
        degrees = means["degrees"] if separate is None else means.get("degrees", torch.zeros_like(separate))
        feature_factor = FeatureFactor.from_gram(sums.tensors["gram"], sums.count)
        outputs = len(degrees)
        features = len(feature_factor.values)
        total, nodes = graph_of_degrees(degrees)
        return GraphCurvature(
            outputs=outputs,
            features=features,
            feature_factor=feature_factor,
            count=sums.count,
            total=total,
            nodes=nodes,
            separate=separate,
        )

    def semidefinite(self, sums: Sums) -> Sequence[Tensor]:
        """Return the feature factor."""
        return sums.present("gram")

    def nonnegative(self, sums: Sums) -> Sequence[Tensor]:
        """Return the degrees and the separate curvature."""
        return sums.present("degrees", "separate")

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums, eigenvectors and workspace of the feature factor."""
        return 8 * (4 * features**2 + 8 * outputs)


def graph_of_degrees(degrees: Tensor) -> tuple[float, Tensor]:
    """Find the graph with edges `T q_i q_j` and the given degrees (C,), i.e. solve `T q_c (1 - q_c) = d_c` and `sum q = 1`.

    Each q_c is the smaller root of its quadratic equation. If the smaller roots cannot sum to 1, the larger root is used for the
    largest degree. In any graph, the largest degree is at most the sum of the other degrees. If the two are equal, as in a star, the
    exact T is infinite, and a very large T is returned.

    Returns:
        The scale T of the edge weights and the node weights q (C,).
    """
    degrees = degrees.clamp_min(0)
    largest = int(degrees.argmax())
    largest_degree = float(degrees[largest])
    if largest_degree <= 0:
        return 0.0, torch.full_like(degrees, 1 / len(degrees))
    relative = degrees / largest_degree

    def roots(part: float, *, larger: bool) -> Tensor:
        # Return the smaller root of each quadratic equation, given part = 4 max(d) / T. If `larger` is True, use the larger root for
        # the largest degree.
        discriminant = (1 - part * relative).clamp_min(0).sqrt()
        nodes = part * relative / (2 * (1 + discriminant))
        if larger:
            nodes[largest] = (1 + discriminant[largest]) / 2
        return nodes

    larger = float(roots(1.0, larger=False).sum()) < 1
    low = 0.0
    high = 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        # If only the smaller roots are used, their sum increases with `part`. If the larger root is used, the sum is 1 at part = 0,
        # increases at first, and then decreases.
        if (float(roots(middle, larger=larger).sum()) < 1) != larger:
            low = middle
        else:
            high = middle
    nodes = roots(high, larger=larger)
    return 4 * largest_degree / high, nodes / nodes.sum()


@dataclass(frozen=True, kw_only=True)
class GraphCurvature(LayerCurvature):
    """A curvature whose covariance is `U x V`, with `V = (sqrt(N) B + sqrt(lambda) I)^-1`; U is a diagonal plus a rank-one matrix."""

    feature_factor: FeatureFactor
    """Eigensystem of B."""
    count: int
    """Number N of training data."""
    total: float
    """Scale T of the edge weights `T q_i q_j`."""
    nodes: Tensor
    """Node weights q (C,) of the graph."""
    separate: Tensor | None
    """Mean separate curvature (C,), or None if adding the same number to all outputs has no effect."""

    def _separate_precision(self, precision: float | Tensor) -> Tensor:
        # Return `sqrt(N) s + sqrt(lambda)` (C,), the part of 1/gamma that does not depend on the graph.
        separate = torch.zeros_like(self.nodes) if self.separate is None else self.scale * self.separate
        return self.count**0.5 * separate + precision**0.5

    @property
    def _edge(self) -> float:
        return self.count**0.5 * self.scale * self.total

    def gamma(self, precision: float | Tensor) -> Tensor:
        """Return gamma (C,), the diagonal part of U."""
        return 1 / (self._separate_precision(precision) + self._edge * self.nodes)

    def rank_one(self, precision: float | Tensor) -> Tensor:
        """Return the vector k (C,) in `U = diag(gamma) + k k'`. If a direction is hidden, U must be centred afterwards."""
        gamma = self.gamma(precision)
        if self.separate is not None:
            total = (self.nodes * gamma * self._separate_precision(precision)).sum()
            return (self._edge / total).sqrt() * self.nodes * gamma
        prior = precision**0.5
        learned = self._edge * self.nodes * gamma  # 1 - sqrt(lambda) gamma
        total = learned.sum()
        positive = torch.where(total > 0, total, torch.ones_like(total))
        # Both formulas give the same k. Subtracting the mean from the smaller vector loses fewer digits.
        by_learned = (learned.mean() - learned) / (prior * positive).sqrt()
        by_gamma = (prior / positive).sqrt() * (gamma - gamma.mean())
        smaller = learned.max() < prior * gamma.max()
        return torch.where(total > 0, torch.where(smaller, by_learned, by_gamma), 0.0)

    def _shift_variance(self, precision: float) -> float:
        # Return the prior variance, divided by C, of the hidden direction.
        return 1 / (self.outputs * precision**0.5)

    def _output_variance(self, precision: float, *, centred: bool = False) -> Tensor:
        # Return the diagonal (C,) of U or, if `centred`, of its centred part.
        gamma = self.gamma(precision)
        squares = self.rank_one(precision).square()
        if self.separate is not None:
            return gamma + squares
        visible = centred_variance(gamma) + squares
        return visible if centred else visible + self._shift_variance(precision)

    def _output_covariance(self, precision: float, *, centred: bool = False, outputs: slice = EVERY_OUTPUT) -> Tensor:
        # Return the block of U, or of its centred part, that belongs to some outputs.
        every = self.gamma(precision)
        gamma = every[outputs]
        rank_one = self.rank_one(precision)[outputs]
        block = torch.diag(gamma) + rank_one[:, None] * rank_one
        if self.separate is not None:
            return block
        visible = block - (gamma[:, None] + gamma - every.mean()) / self.outputs
        return visible if centred else visible + self._shift_variance(precision)

    def _feature_inverse(self, precision: float | Tensor) -> Tensor:
        # Return the eigenvalues (P,) of V.
        return 1 / (self.count**0.5 * self.feature_factor.values + precision**0.5)

    def project(self, phi: Tensor) -> Tensor:
        """Return `R' phi`, of shape (n, P)."""
        return self.feature_factor.project(phi)

    def variance(self, z: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `(z' V z) U_cc`."""
        along = z.square() @ self._feature_inverse(precision)
        return along[:, None] * self._output_variance(precision, centred=centred)

    def cross(
        self,
        z: Tensor,
        other: Tensor,
        precision: float,
        *,
        centred: bool = False,
        outputs: slice = EVERY_OUTPUT,
    ) -> Tensor:
        """Return `(z V other) U` for all pairs of data points."""
        of_outputs = self._output_covariance(precision, centred=centred, outputs=outputs)
        return torch.einsum("...nm,cd->...ncmd", (z * self._feature_inverse(precision)) @ other.mT, of_outputs)

    def kronecker_factors(self, z: Tensor, precision: float) -> tuple[Tensor, Tensor]:
        """Return `z V z'` (n, n) and U (C, C)."""
        return (z * self._feature_inverse(precision)) @ z.mT, self._output_covariance(precision)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `P log det U^-1 + C sum_j log(sqrt(N) b_j + sqrt(lambda))`, by the matrix determinant lemma."""
        gamma = self.gamma(precision)
        of_outputs = (self.nodes * gamma * self._separate_precision(precision)).sum().log() - gamma.log().sum()
        return self.features * of_outputs - self.outputs * self._feature_inverse(precision).log().sum()

    def offsets(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw independent normals for each class and normals shared by all classes, then multiply both by a square root of V."""
        size = (count, self.outputs + 2, self.features)
        noise = standard_normals(size, generator).to(self.nodes) * self._feature_inverse(precision).sqrt()
        draws = self.gamma(precision).sqrt()[:, None] * noise[:, :-2]
        draws = draws + self.rank_one(precision)[:, None] * noise[:, -2:-1]
        if self.separate is not None:
            return draws
        return draws - draws.mean(1, keepdim=True) + noise[:, -1:] * self._shift_variance(precision) ** 0.5

    @property
    def noise_size(self) -> int:
        """Number of outputs plus one: one standard normal variable for each logit and one shared by all logits."""
        return self.outputs + 1

    def marginal_deviations(self, z: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `sqrt(z' V z) (sqrt(gamma) noise + k noise')`, where noise' is an additional standard normal variable."""
        draws = noise[:, :-1] * self.gamma(precision).sqrt() + noise[:, -1:] * self.rank_one(precision)
        return square_root(z.square() @ self._feature_inverse(precision))[:, None, None] * draws

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return `U_cc / (sqrt(N) b_max + sqrt(lambda))`."""
        return self._output_variance(precision) * self._feature_inverse(precision).min()
