r"""How far features are from the classes of the training data.

For features h without the constant 1, let :math:`g = h / |h|` be their direction. Over the training data

.. math:: n_c, \qquad s_c = \sum_{y_n = c} g_n, \qquad G = \sum_n g_n g_n^\top

add up like all other sums (`ClassSums`). They give the means of the classes, :math:`\mu_c = s_c / n_c`, the covariance within
classes, :math:`S = (G - \sum_c n_c \mu_c \mu_c^\top) / N`, and with a small ridge the distance of a datum (`ClassDistance`),

.. math:: d(x) = \min_c |(S + \epsilon I)^{-1/2} (g - \mu_c)|,

the Mahalanobis distance to the nearest class on normalised features (Mueller and Hein, 2025). Directions do not see how long
features are: an input may be far along a familiar direction. So the length |h| is kept beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mola.laplace.symmetric import add_gram, packed_size, unpack
from mola.numerics import exact_device

RIDGE = 1e-4
"""Ridge of the covariance within classes, relative to its Frobenius norm: on networks for MNIST and CIFAR-10 anything from 1e-10 to
1e-3 gives the same ranking, on few data or few features (two moons, two images a class) less is too little, and float32 holds
distances with this much."""

ROUNDING = 16 * torch.finfo(torch.float64).eps
"""What sums of directions, whose length is 1, lose to rounding, over the root of the number of data."""

KEPT = 2**23
"""Numbers of a table of class means that is kept ready in the precision of predictions; larger ones are made in portions when they
are needed, so that no second table of C x P numbers is held."""

AT_ONCE = 2**22
"""Numbers of such a portion."""

FEW = 16
"""Classes up to which their sums are faster as a product with a table of zeros and ones than row by row."""

CPU = torch.device("cpu")

USUAL = 2.326
"""Standard deviations above the mean where 99 % of a normal distribution lie below."""


@dataclass(frozen=True)
class ClassSums:
    """Sums over data of what distances need. All in float64, all additive."""

    counts: Tensor
    """(C,): data of each class."""
    directions: Tensor
    """(C, P): their normalised features, without the constant 1."""
    gram: Tensor
    """Packed (P, P): outer products of the normalised features."""
    lengths: Tensor
    """(3,): sum of the features' lengths, of their squares, and number of data whose class was predicted, not given."""

    @staticmethod
    def shapes(features: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors for P features, without the constant 1, and C outputs."""
        return {
            "counts": (outputs,),
            "directions": (outputs, features),
            "gram": (packed_size(features),),
            "lengths": (3,),
        }

    @staticmethod
    def empty(features: int, outputs: int, device: torch.device) -> ClassSums:
        """Sums over nothing."""
        shapes = ClassSums.shapes(features, outputs)
        place = exact_device(device)
        return ClassSums(
            **{name: torch.zeros(shape, dtype=torch.float64, device=place) for name, shape in shapes.items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        """The sums by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __add__(self, other: ClassSums) -> ClassSums:
        theirs = other.tensors()
        return ClassSums(**{name: one + theirs[name] for name, one in self.tensors().items()})

    def to(self, device: torch.device | str) -> ClassSums:
        """The same sums on another device."""
        return ClassSums(**{name: one.to(device) for name, one in self.tensors().items()})

    def scaled(self, share: float) -> ClassSums:
        """The same sums as if each datum were a share of one."""
        return ClassSums(**{name: share * one for name, one in self.tensors().items()})

    @property
    def count(self) -> int:
        """Number of data."""
        return round(float(self.counts.sum()))

    @property
    def predicted(self) -> int:
        """Number of data whose class was predicted by the network, for lack of a label."""
        return int(self.lengths[2])

    def absorb(self, features: Tensor, classes: Tensor, *, predicted: bool) -> None:
        """Take more data, in place.

        Args:
            features: (n, P) in float64, without the constant 1; normalised in place.
            classes: (n,).
            predicted: whether the network said the classes, not the data.
        """
        lengths = normalise(features)
        outputs = len(self.counts)
        self.counts.add_(torch.bincount(classes, minlength=outputs))
        if outputs <= FEW:
            chosen = torch.zeros(len(features), outputs, dtype=features.dtype, device=features.device)
            chosen.scatter_(1, classes[:, None], 1.0)
            self.directions.addmm_(chosen.T, features)
        else:
            self.directions.index_add_(0, classes, features)
        add_gram(self.gram, features)
        more = [lengths.sum(), lengths.square().sum(), lengths.new_tensor(float(len(features) * predicted))]
        self.lengths.add_(torch.stack(more))


def normalise(features: Tensor) -> Tensor:
    """Divide each row by its length, in place; rows of 0 stay.

    Args:
        features: (n, P).

    Returns:
        The lengths (n,).
    """
    lengths = torch.linalg.vector_norm(features, dim=1)
    features /= torch.where(lengths > 0, lengths, 1)[:, None]
    return lengths


def directions_and_log_lengths(features: Tensor) -> tuple[Tensor, Tensor]:
    """Directions (n, P) of features, and the logarithms (n,) of their lengths; also where squares of features leave the precision.

    Args:
        features: (n, P), finite; also 0, which has no direction and as small a length as there is.

    Returns:
        Directions, in memory of their own, and logarithms. A datum's are the same in any batch, to the last bit.
    """
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    precision = torch.finfo(features.dtype)
    # From here on, what squares below the range would add is lost in rounding.
    reach = math.sqrt(precision.tiny) / precision.eps
    tracing = torch.compiler.is_compiling()
    if not tracing and features.device == CPU and len(features):  # elsewhere, a look costs more than it saves
        least, most = length.aminmax()
        if float(least) >= reach and float(most) < math.inf:  # as nearly always
            return features / length, length.log().squeeze(1)
    unit = features.abs().amax(1, keepdim=True).clamp_min_(precision.tiny)
    if not tracing:
        # A power of two: what it divides is not rounded, so that data in range do not notice those beside them.
        unit = _power_of_two(unit)
    directions = features / unit
    scaled = torch.linalg.vector_norm(directions, dim=1, keepdim=True).clamp_min_(precision.tiny)
    logs = scaled.log() + unit.log()
    if not tracing:
        logs = torch.where((length >= reach) & (length < math.inf), length.log(), logs)
    return directions.div_(scaled), logs.squeeze(1)


def _power_of_two(values: Tensor) -> Tensor:
    # The largest power of two that is not above each number, which is positive and not subnormal: its bits without the
    # digits.
    whole, exponent = (torch.int64, 0x7FF << 52) if values.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    return (values.view(whole) & exponent).view(values.dtype)


class Scale(NamedTuple):
    """What is usual of one network's features."""

    distance: float
    """The distance that counts as 1."""
    length: float
    """The length up to which features are not long."""


@dataclass(frozen=True)
class ClassGeometry:
    """Class means and the covariance within classes, solved once. In float64, on the CPU."""

    sums: ClassSums

    @cached_property
    def centre(self) -> Tensor:
        """Mean (P,) of all directions."""
        return self.sums.directions.sum(0) / self.sums.counts.sum()

    @cached_property
    def _solved(self) -> tuple[Tensor, float]:
        # R (P, P) with `R R'` the inverse of the covariance within classes with its ridge, and the ridge.
        counts, within = self.sums.counts, unpack(self.sums.gram)
        for part in self.portions():
            some = self.sums.directions[part]
            within -= (some / counts[part, None].clamp_min(1)).T @ some
        within /= counts.sum()
        size, rounding = float(torch.linalg.matrix_norm(within)), ROUNDING * math.sqrt(float(counts.sum()))
        ridge = max(RIDGE * size, rounding)
        within.diagonal().add_(ridge)
        lower, failed = torch.linalg.cholesky_ex(within)
        if size <= rounding or bool(failed):  # all that is left is what the sums have lost
            return torch.zeros_like(within), 0.0
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, identity, upper=False).T.contiguous(), ridge

    @property
    def root(self) -> Tensor:
        """R (P, P) with `R R'` the inverse of the covariance within classes, ridge included; 0 where all features are alike."""
        return self._solved[0]

    @property
    def known(self) -> bool:
        """Whether features vary at all within classes: without, nothing can be said of distances."""
        return self._solved[1] > 0

    @property
    def width(self) -> int:
        """Number of features, without the constant 1."""
        return self.sums.directions.shape[1]

    def portions(self) -> list[slice]:
        """Classes, so many at a time that a table of their means is small."""
        outputs, features = self.sums.directions.shape
        step = max(1, AT_ONCE // features)
        return [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]

    def means(self, part: slice | Tensor) -> Tensor:
        """Means (c, P) of some classes, a slice or by number, less the centre; 0 for classes without data."""
        counts = self.sums.counts[part, None]
        return torch.where(counts > 0, self.sums.directions[part] / counts.clamp_min(1) - self.centre, 0)

    @cached_property
    def squares(self) -> Tensor:
        """Squared lengths (C,) of the class means in units of the covariance; infinite for classes without data."""
        squares = torch.cat([(self.means(part) @ self.root).square().sum(1) for part in self.portions()])
        return torch.where(self.sums.counts > 0, squares, math.inf)

    @cached_property
    def training_scale(self) -> Scale:
        """What is usual of the training data: the root mean square of their distances, and a length that about 99 % stay below.

        The mean square of the distances to the own class is the trace of `(S + ridge)^-1 S`, and so of `1 - ridge (S + ridge)^-1`.
        """
        root, ridge = self._solved
        square_distance = self.width - ridge * float(root.square().sum()) if self.known else 0.0
        count = float(self.sums.counts.sum())
        mean, square = (float(one) / count for one in self.sums.lengths[:2])
        usual = mean + USUAL * math.sqrt(max(0.0, square - mean**2))
        return Scale(math.sqrt(max(0.0, square_distance)), usual)


@dataclass(frozen=True)
class ClassDistance:
    """Distances of features from the training classes, in some precision and on some device.

    Args:
        geometry: of the training classes.
        device: where to compute.
        dtype: precision to compute in.
    """

    geometry: ClassGeometry
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64

    def to(self, device: torch.device, dtype: torch.dtype) -> ClassDistance:
        """The same elsewhere: made from float64, and not cast."""
        there = (device, torch.promote_types(dtype, torch.float32))
        return self if there == (self.device, self.dtype) else ClassDistance(self.geometry, *there)

    def _here(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).to(self.device)

    def _table(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        # A table, made once; in a trace, whose tensors are of no use outside of it, each time.
        found: Tensor | None = vars(self).get(name)
        if found is None:
            found = make()
            if not torch.compiler.is_compiling():
                vars(self)[name] = found
        return found

    @property
    def _root(self) -> Tensor:
        return self._table("root", lambda: self._here(self.geometry.root))

    @property
    def _shift(self) -> Tensor:
        return self._table("shift", lambda: self._here(-self.geometry.centre @ self.geometry.root))

    @property
    def _squares(self) -> Tensor:
        return self._table("squares", lambda: self._here(self.geometry.squares))

    @property
    def _steps(self) -> Tensor:
        # -2 over the number of data of each class (C,): what makes a product with a mean of one with a sum, as squares
        # ask for it.
        return self._table("steps", lambda: self._here(-2 / self.geometry.sums.counts.clamp_min(1)))

    @property
    def _means(self) -> Tensor | None:
        # The whitened class means (C, P), where they are small enough to be kept.
        if self.geometry.sums.directions.numel() > KEPT:
            return None
        return self._all_means()

    def _all_means(self) -> Tensor:
        geometry = self.geometry
        parts = geometry.portions()
        return self._table(
            "means", lambda: torch.cat([self._here(geometry.means(part) @ geometry.root) for part in parts])
        )

    def logs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of distance and length of features (n, P), the constant 1 included or not.

        Args:
            features: finite; also 0: these have no length, and a direction of which nothing is known.

        Returns:
            (n,) and (n,). Distances are 1 where all training features are alike: nothing is known of them.
        """
        directions, log_length = directions_and_log_lengths(features[:, : self.geometry.width])
        if not self.geometry.known:
            return torch.zeros_like(log_length), log_length
        least = torch.finfo(self.dtype).tiny
        return self._distances(directions).clamp_min_(least).log_(), log_length

    def _distances(self, directions: Tensor) -> Tensor:
        # Distance (n,) of normalised features to the nearest class. Squares and products find the class, and
        # differences from its mean give the distance: where classes are tight, the squares are so much larger than the
        # distance that float32 would lose it between them.
        whitened = torch.addmm(self._shift, directions, self._root)
        means = self._means
        if means is not None:
            nearest = torch.addmm(self._squares, whitened, means.T, alpha=-2).argmin(1)
            return torch.linalg.vector_norm(whitened.sub_(means.index_select(0, nearest)), dim=1)
        turned = whitened @ self._root.T
        least = torch.full_like(whitened[:, 0], math.inf)
        which = torch.zeros_like(least, dtype=torch.int64)
        for part in self.geometry.portions():
            # Sums and not means, and the centre left out, which all classes share: a table is cast, and nothing else is made of it.
            products = turned @ self._here(self.geometry.sums.directions[part]).T
            found = products.mul_(self._steps[part]).add_(self._squares[part]).min(1)
            which = torch.where(found.values < least, found.indices + part.start, which)
            least = torch.minimum(found.values, least)
        own = self.geometry.means(which.to(self.geometry.centre.device))
        return torch.linalg.vector_norm((directions - self._here(self.geometry.centre + own)) @ self._root, dim=1)
