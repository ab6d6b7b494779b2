r"""Algorithm 1 for very many classes: the class factor by its diagonal, and never a C x C matrix.

A softmax's class factor :math:`A = \frac1N \sum_n \mathrm{diag}(p_n) - p_n p_n^\top` is the Laplacian of a graph whose nodes are
the classes and whose edges measure how often two classes are confused. Its diagonal :math:`d_c = \frac1N \sum_n p_{nc} (1 - p_{nc})`
holds the degrees of the nodes, C numbers that add up like every sum here. Among all graphs with these degrees we take the graph in
which no two classes are confused more than their degrees imply: edges :math:`T q_i q_j`, with :math:`q \ge 0`, :math:`\sum_c q_c =
1` and T
settled by the degrees,

.. math:: A_d = T\, (\mathrm{diag}(q) - q q^\top), \qquad T\, q_c (1 - q_c) = d_c .

It has the diagonal of A and, like A, no curvature along the direction 1, which the softmax ignores. It *is* A where C = 2,
where there is one datum, and where the outputs' curvature is the same for all data. In general, with :math:`\nu_2` and
:math:`\nu_{\max}` the second smallest and the largest eigenvalue of :math:`\mathrm{diag}(d)^{-1/2} A\,
\mathrm{diag}(d)^{-1/2}` (0 and 2 bound them),

.. math:: \nu_2 (1 - q_{\max})\, A_d \preceq A \preceq \nu_{\max}\, A_d ,
   \qquad \frac{U_d}{\nu_{\max}} \preceq U \preceq \frac{U_d}{\nu_2 (1 - q_{\max})},

so that a logit's variance under `kron` is never less than half of the one here, and is more only as far as the classes fall
into groups that are confused among themselves. (The second line follows from the first because :math:`\nu_2 (1 - q_{\max}) \le
1 \le \nu_{\max}`.) docs/speed.md has the effect on probabilities.

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

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from mola.laplace.base import (
    Curvature,
    Precision,
    Structure,
    as_column,
    centred_diagonal,
    centred_variance,
    eigensystem,
)
from mola.laplace.kron import FactoredCurvature
from mola.laplace.sums import Sums
from mola.likelihoods.base import OutputCurvature
from mola.numerics import Generator, standard_normals

HALVINGS = 80
"""Steps of the bisection for T: enough for float64."""


@dataclass(frozen=True)
class KronDiag(Structure):
    """Algorithm 1 with only the diagonal of the class factor: memory O(C + P^2), for vocabularies."""

    name = "kron-diag"

    def sums(self, phi: Tensor, curvature: OutputCurvature) -> dict[str, Tensor]:
        """Return the diagonals (C,) of the coupled and of the separate curvature, and the outer products of the features."""
        sums = {"gram": phi.T @ phi}
        if curvature.coupling is not None:
            # The difference of two sums: u_c (sum(u) - u_c) loses as much to rounding by itself, and takes longer. No square (n, C)
            # is made, which takes three times as long at 32,000 classes.
            coupling = curvature.coupling
            sums["degrees"] = coupling.sum(1) @ coupling - torch.einsum("nc,nc->c", coupling, coupling)
        if curvature.separate is not None:
            sums["separate"] = curvature.separate.sum(0)
        return sums

    def solve(self, sums: Sums) -> Curvature:
        """Eigendecompose B, and find the graph with these degrees."""
        values, vectors = eigensystem(sums.tensors["gram"] / sums.count)
        degrees, separate = (sums.tensors.get(name) for name in ("degrees", "separate"))
        separate = None if separate is None else separate.cpu() / sums.count
        given = degrees if degrees is not None else separate
        assert given is not None
        total, nodes = graph_of_degrees(torch.zeros_like(given) if degrees is None else degrees.cpu() / sums.count)
        return KronDiagCurvature(len(given), len(values), sums.count, values, vectors, total, nodes, separate)

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory of sums, eigenvectors and workspace of the feature factor."""
        return 8 * (4 * features**2 + 8 * outputs)


def graph_of_degrees(degrees: Tensor) -> tuple[float, Tensor]:
    """Find the graph with edges `T q_i q_j` whose nodes have these degrees: `T q_c (1 - q_c) = d_c` and `sum q = 1`.

    Each q_c is the smaller root of its quadratic, except that of the largest degree where the smaller ones do not reach 1. In any
    graph the largest degree is at most the sum of the others; where it equals the sum (a star), q approaches the limits of float64.

    Returns:
        T, and q (C,).
    """
    degrees = degrees.clamp_min(0)
    largest = int(degrees.argmax())
    most = float(degrees[largest])
    if most <= 0:
        return 0.0, torch.full_like(degrees, 1 / len(degrees))
    shares = degrees / most

    def roots(part: float, *, other: bool) -> Tensor:
        # The smaller roots at part = 4 max(d) / T; the larger one for the largest degree with `other`.
        discriminant = (1 - part * shares).clamp_min(0).sqrt()
        found = part * shares / (2 * (1 + discriminant))
        if other:
            found[largest] = (1 + discriminant[largest]) / 2
        return found

    other = float(roots(1.0, other=False).sum()) < 1
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        # With smaller roots alone the sum grows with the part. With the larger one it is 1 at 0, grows, and then falls for good.
        if (float(roots(middle, other=other).sum()) < 1) != other:
            low = middle
        else:
            high = middle
    found = roots(high, other=other)
    return 4 * most / high, found / found.sum()


@dataclass(frozen=True)
class KronDiagCurvature(FactoredCurvature):
    """U from the graph of A's degrees: a diagonal and rank one."""

    total: float
    """T"""
    nodes: Tensor
    """q (C,)"""
    separate: Tensor | None
    """Mean separate curvature (C,); None if a shift common to all outputs changes nothing."""

    def own(self, precision: Precision) -> tuple[Tensor, Tensor]:
        """Return the vector gamma (..., C), and its inverse without the graph, `sqrt(N) s + sqrt(lambda)` (..., C)."""
        root = self.count**0.5
        floor = torch.zeros_like(self.nodes) if self.separate is None else root * self.separate
        rest = floor + as_column(precision, self.nodes, 1) ** 0.5
        return 1 / (rest + root * self.total * self.nodes), rest

    def shared(self, precision: Precision) -> Tensor:
        """Return k (..., C) of the rank-one part: `U = diag(gamma) + k k'`, between two centrings if a shift is hidden."""
        gamma, rest = self.own(precision)
        edge, prior = self.count**0.5 * self.total, as_column(precision, self.nodes, 1) ** 0.5
        if self.separate is not None:
            return (edge / (self.nodes * gamma * rest).sum(-1, keepdim=True)).sqrt() * self.nodes * gamma
        learned = edge * self.nodes * gamma  # 1 - sqrt(lambda) gamma
        total = learned.sum(-1, keepdim=True)
        some = torch.where(total > 0, total, torch.ones_like(total))
        # The smaller of the two loses less to rounding where its mean is taken away; their differences are the same.
        by_learned = (learned.mean(-1, keepdim=True) - learned) / (prior * some).sqrt()
        by_gamma = (prior / some).sqrt() * (gamma - gamma.mean(-1, keepdim=True))
        smaller = learned.amax(-1, keepdim=True) < prior * gamma.amax(-1, keepdim=True)
        return torch.where(total > 0, torch.where(smaller, by_learned, by_gamma), 0.0)

    def class_variance(self, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the diagonal (..., C) of U, or of its centred part."""
        gamma, extra = self.own(precision)[0], self.shared(precision).square()
        if self.separate is not None:
            return gamma + extra
        visible = centred_variance(gamma) + extra
        return visible if centred else visible + self._shift(precision)

    def _shift(self, precision: Precision) -> Tensor:
        return 1 / (self.outputs * as_column(precision, self.nodes, 1) ** 0.5)

    def class_matrix(self, precision: float, *, centred: bool = False) -> Tensor:
        """Return U (C, C), or its centred part: only for links that need covariances."""
        gamma, shared = self.own(precision)[0], self.shared(precision)
        if self.separate is not None:
            return torch.diag(gamma) + shared[:, None] * shared
        visible = centred_diagonal(gamma) + shared[:, None] * shared
        return visible if centred else visible + self._shift(precision)

    @property
    def noise_size(self) -> int:
        """One standard normal for each logit, and one for all."""
        return self.outputs + 1

    def class_draws(self, precision: float, noise: Tensor) -> Tensor:
        """Return `sqrt(gamma) * noise + k * z`, with z a further normal."""
        return noise[:, :-1] * self.own(precision)[0].sqrt() + noise[:, -1:] * self.shared(precision)

    def class_log_determinant(self, precision: Tensor) -> Tensor:
        """Return `log(sum_c q_c gamma_c (sqrt(N) s_c + sqrt(lambda))) - sum log(gamma)`, by the matrix determinant lemma."""
        gamma, rest = self.own(precision)
        return (self.nodes * gamma * rest).sum().log() - gamma.log().sum()

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw independent normals for each class and a common normal, times a root of V."""
        root = self.feature_vectors * self.feature_inverse(precision).sqrt()
        noise = standard_normals((count, self.outputs + 2, self.features), generator).to(root.device) @ root.T
        drawn = self.own(precision)[0].sqrt()[:, None] * noise[:, :-2]
        drawn = drawn + self.shared(precision)[:, None] * noise[:, -2:-1]
        if self.separate is not None:
            return drawn
        return drawn - drawn.mean(1, keepdim=True) + noise[:, -1:] * self._shift(precision).sqrt()

    def divided(self, by: float) -> Self:
        """Return the curvature divided by a number: the graph's and each output's own."""
        separate = None if self.separate is None else self.separate / by
        return replace(self, total=self.total / by, separate=separate)
