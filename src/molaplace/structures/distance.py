r"""Distances of features from the training classes, computed from additive sums.

Features h, without the constant 1, are normalised to :math:`g = h / |h|`. Given the class means :math:`\mu_c` and the within-class
covariance S, to which a small ridge is added, the distance of an input is :math:`d(x) = \min_c |S^{-1/2} (g - \mu_c)|`. Because the
distance depends only on the direction of the features, the norm :math:`|h|` is computed as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molaplace.sums import Sums

RIDGE = 1e-4
"""Ridge added to the within-class covariance, relative to the Frobenius norm of that covariance. For networks trained on MNIST and
CIFAR-10, every ridge from 1e-10 to 1e-3 gives the same ranking of inputs. Ridges smaller than this one are insufficient with few
data points or few features, for example on the two-moons data or with two images per class."""

ROUNDING = 16 * torch.finfo(torch.float64).eps
"""Rounding error of a sum of N unit vectors, divided by `sqrt(N)`."""

NORMAL_99 = 2.326
"""99 % quantile of the standard normal distribution."""

COUNTS = "class_counts"
DIRECTIONS = "class_directions"
GRAM = "direction_gram"
NORMS = "feature_norms"
"""Names of the sums, which are tensors of shapes (G,), (G, P), (P, P) and (3,). The last tensor contains the sum of the norms, the sum
of the squared norms, and the number of data points whose class was predicted."""


def distance_sums(features: Tensor, groups: Tensor, num_groups: int, *, predicted: bool) -> dict[str, Tensor]:
    """Return the float64 sums over one batch.

    Args:
        features: features (n, P), without the constant 1.
        groups: index (n,) of each datum's class.
        num_groups: number of classes.
        predicted: True if the data have no labels and the classes are the network's predictions.
    """
    norms = torch.linalg.vector_norm(features, dim=1)
    directions = features / torch.where(norms > 0, norms, 1)[:, None]
    # The sums are sparse because a batch contains only a few classes. With 32,000 classes, building dense tables would take most of
    # the time.
    shape = (num_groups, features.shape[1])
    sums = torch.sparse_coo_tensor(groups[None], directions, shape, device=features.device, check_invariants=False)
    count = norms.new_tensor(float(len(features) if predicted and num_groups > 1 else 0))
    return {
        COUNTS: torch.bincount(groups, minlength=num_groups).to(features),
        DIRECTIONS: sums,
        GRAM: directions.T @ directions,
        NORMS: torch.stack([norms.sum(), norms.square().sum(), count]),
    }


def semidefinite(sums: Sums) -> list[Tensor]:
    """Return the sums that are positive semi-definite for any data, as matrices."""
    return sums.present(GRAM)


def impossible(sums: Sums, tolerance: float) -> str | None:
    """Return what is impossible about the sums, such as a class with a negative count, or None if nothing is."""
    if COUNTS not in sums.tensors:
        return None
    counts, totals, norms = sums.present(COUNTS, DIRECTIONS, NORMS)
    # Counts of labels are whole numbers. A predicted class may change by rounding if the batch size does.
    count_tolerance = tolerance if sums.log_likelihood is None else min(tolerance, 0.5)
    negative = (counts < -count_tolerance).nonzero().flatten().tolist()
    if negative:
        return f"class {negative[0]} would have {float(counts[negative[0]]):,.6g} data"
    # The sum of m unit vectors has a norm of at most m.
    excess = torch.linalg.vector_norm(totals, dim=1) - counts
    if bool((excess > tolerance).any()):
        return f"the features left in class {int(excess.argmax())} would be longer than its data allow"
    return "the norms of the features would be negative" if bool((norms < -tolerance).any()) else None


@dataclass(frozen=True)
class ClassDistance:
    """Class means and the inverse of the within-class covariance, in float64."""

    root: Tensor
    """Matrix R (P, P) such that `R R'` is the inverse of the within-class covariance plus the ridge; 0 if `known` is False."""
    means: Tensor
    """Means of the classes that have data, multiplied by R."""
    squares: Tensor
    """Squared norms of `means`."""
    known: bool
    """False if the features do not vary within classes, in which case all distances are set to 1."""
    training_distance: float
    """Root mean square distance of the training data from their class means."""
    training_norm: float
    """Estimated 99 % quantile of the norms of the training features."""
    num_predicted: int
    """Number of training examples assigned to their predicted class because they had no label."""

    @staticmethod
    def from_sums(sums: Sums) -> ClassDistance | None:
        """Compute the class means and the inverse covariance from the sums; return None if the required sums are missing."""
        if COUNTS not in sums.tensors:
            return None
        counts, totals, gram, norms = (
            sums.tensors[name].cpu().to_dense() for name in (COUNTS, DIRECTIONS, GRAM, NORMS)
        )
        totals = totals[counts > 0]
        counts = counts[counts > 0]
        number = float(counts.sum())
        width = totals.shape[1]
        means = totals / counts[:, None]
        within = (gram - means.T @ totals) / number
        size = float(torch.linalg.matrix_norm(within))
        rounding = ROUNDING * math.sqrt(number)
        ridge = max(RIDGE * size, rounding)
        within.diagonal().add_(ridge)
        lower, failed = torch.linalg.cholesky_ex(within)
        known = size > rounding and not bool(failed)
        identity = torch.eye(width, dtype=torch.float64, device="cpu")
        root = torch.linalg.solve_triangular(lower, identity, upper=False).T if known else torch.zeros_like(within)
        # The mean squared distance of the data from their own class means is the trace of (S + ridge)^-1 S = 1 - ridge (S + ridge)^-1.
        square = width - ridge * float(root.square().sum()) if known else 0.0
        mean = float(norms[0]) / number
        deviation = math.sqrt(max(0.0, float(norms[1]) / number - mean**2))
        whitened = means @ root
        return ClassDistance(
            root=root.contiguous(),
            means=whitened,
            squares=whitened.square().sum(1),
            known=known,
            training_distance=math.sqrt(max(0.0, square)),
            training_norm=mean + NORMAL_99 * deviation,
            num_predicted=int(norms[2]),
        )

    @property
    def width(self) -> int:
        """Number of features, excluding the constant 1."""
        return len(self.root)

    def to(self, device: torch.device) -> ClassDistance:
        """Return the same distances on another device."""
        return replace(self, root=self.root.to(device), means=self.means.to(device), squares=self.squares.to(device))

    def logs(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log distances (n,) and the log norms (n,) of features (n, P), with or without the constant 1."""
        tiny = torch.finfo(phi.dtype).tiny
        features = phi[:, : self.width]
        # Divide by the largest absolute feature first, because the squares of features near 1e200 overflow in float64.
        largest = features.abs().amax(1, keepdim=True).clamp_min(tiny)
        scaled = features / largest
        norms = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(tiny)
        log_norm = (norms.log() + largest.log()).squeeze(1)
        if not self.known:
            return torch.zeros_like(log_norm), log_norm
        whitened = (scaled / norms) @ self.root
        squares = (self.squares - 2 * whitened @ self.means.T).amin(1) + whitened.square().sum(1)
        return squares.clamp_min(tiny).log() / 2, log_norm
