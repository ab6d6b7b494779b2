r"""Outlier detectors on the features of a trained network, to compare with the scores of a posterior.

Each is fitted on training features, `detector = Mahalanobis.fit(features, labels)`, and called on features,
`detector(features) -> (n,)` scores, higher for outliers. Training features are a tensor (n, d), or a function that returns them some
rows at a time, for bounded memory.

The networks of an ensemble have their own features, and distances in their own units: a plain mean would weigh the network
whose scores spread most. `DetectorEnsemble` therefore standardises each network's scores by their mean and standard deviation on
held-out in-distribution data before it averages them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mola.compare.activations_file import Seen, Stored
from mola.errors import DataError, OptionError, warn
from mola.numerics import to_float64
from mola.outliers import energy_score, max_logit_score

Detector = Callable[[Tensor], Tensor]
"""Features (n, d) in, scores (n,) out, higher for outliers."""

Parts = Callable[[], Iterable[Tensor]]
"""Returns features some rows at a time, from the first row every time."""

PAIRS_AT_ONCE = 2**23
"""Distances to training points in memory at once."""


def _as_parts(features: Tensor | Parts) -> Parts:
    return (lambda: [features]) if isinstance(features, Tensor) else features


def _whitening(covariance: Tensor) -> Tensor:
    # A (d, r) whose A A' is the pseudo-inverse of the covariance, without directions that training data never take (dead ReLUs).
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    if not kept.any():
        raise DataError("features do not vary within the classes: give more than one example of each class.")
    return vectors[:, kept] * values[kept].rsqrt()


def _directions(features: Tensor) -> Tensor:
    return functional.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=1)


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    r"""Squared Mahalanobis distance to the nearest class mean, one covariance for all classes (Lee et al., 2018).

    .. math:: \min_c\, (\phi - \mu_c)^\top \Sigma^{-1} (\phi - \mu_c)

    with :math:`\Sigma` the covariance within classes. The relative form (Ren et al., 2021) subtracts the distance to the mean of all
    data under the covariance of all data. Mahalanobis++ (Mueller and Hein, 2025) scales features to length 1 first.

    Args:
        centre: (d,), mean of all training features.
        whitening: (d, r), a square root of the (pseudo-)inverse covariance within classes.
        means: (C, r), class means from the centre, whitened; only of classes that have data.
        background: (d, s), the same square root for all data; only in the relative form.
        normalised: whether features are scaled to length 1 first (Mahalanobis++).
    """

    centre: Tensor
    whitening: Tensor
    means: Tensor
    background: Tensor | None = None
    normalised: bool = False

    @classmethod
    def fit(
        cls, features: Tensor | Parts, labels: Tensor, *, relative: bool = False, normalised: bool = False
    ) -> Mahalanobis:
        """Estimate means and covariance in float64; the features are read three times.

        Args:
            features: (n, d) of the training data.
            labels: (n,), class indices.
            relative: subtract the distance under the covariance of all data.
            normalised: scale features to length 1 first.
        """

        def prepared() -> Iterator[Tensor]:
            for part in _as_parts(features)():
                values = to_float64(part.detach())
                yield _directions(values) if normalised else values

        centre = torch.stack([values.sum(0) / len(labels) for values in prepared()]).sum(0)
        _, index = torch.unique(labels.to(centre.device), return_inverse=True)
        counts, width = torch.bincount(index), len(centre)

        def centred() -> Iterator[tuple[Tensor, Tensor]]:
            start = 0
            for values in prepared():
                yield values - centre, index[start : start + len(values)]
                start += len(values)

        means, total = centre.new_zeros(len(counts), width), centre.new_zeros(width, width)
        for values, owner in centred():
            means.index_add_(0, owner, values / counts[owner, None])
            if relative:
                total += values.T @ values / len(labels)
        within = torch.zeros_like(total)
        for values, owner in centred():
            # Not total minus between: where classes are far apart, the difference would be rounding.
            residuals = values - means[owner]
            within += residuals.T @ residuals / len(labels)
        whitening = _whitening(within)
        return cls(centre, whitening, means @ whitening, _whitening(total) if relative else None, normalised)

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores (n,) of features (n, d), higher for outliers."""
        values = to_float64(features.detach())
        centred = (_directions(values) if self.normalised else values).to(self.centre.device) - self.centre
        whitened = centred @ self.whitening
        squares = whitened.square().sum(1, keepdim=True) - 2 * whitened @ self.means.T + self.means.square().sum(1)
        nearest = squares.min(1).values.clamp_min(0)
        return nearest if self.background is None else nearest - (centred @ self.background).square().sum(1)


@dataclass(frozen=True, eq=False)
class NearestNeighbours:
    """Distance to the k-th nearest training point, features scaled to length 1 (Sun et al., 2022).

    Distances are computed in the features' precision: about 4 digits for close neighbours in float32. A feature vector of
    length 0 stays 0 and has distance 1 from everything.

    Args:
        bank: (n, d), the training features, each of length 1.
        k: which neighbour.
    """

    bank: Tensor
    k: int = 50

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor | None = None, *, k: int = 50) -> NearestNeighbours:
        """Keep the training features.

        Args:
            features: (n, d) of the training data.
            labels: not used; every detector takes them.
            k: which neighbour; 50 is the authors' choice for CIFAR-10.
        """
        if not 1 <= k <= len(features):
            raise OptionError(f"k must be between 1 and the {len(features)} training points, got {k}.")
        return cls(_directions(features.detach()), k)

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores (n,) of features (n, d), higher for outliers."""
        values, sizes = _directions(features.detach()).to(self.bank), self.bank.square().sum(1)
        found = []
        for part in torch.split(values, max(1, PAIRS_AT_ONCE // len(self.bank))):
            lengths = part.square().sum(1, keepdim=True)
            squares = torch.addmm(lengths + sizes, part, self.bank.T, alpha=-2)
            found.append(squares.topk(self.k, dim=1, largest=False, sorted=False).values.max(1).values)
        return torch.cat(found).clamp_min(0).sqrt()


@dataclass(frozen=True, eq=False)
class VirtualLogit:
    r"""ViM, virtual-logit matching (Wang et al., 2022): how far features leave the training data's subspace, against the logits.

    .. math:: \alpha\, \lVert R^\top (\phi - o) \rVert - \log \sum_c \exp f_c(\phi), \qquad
        \alpha = \frac{\sum_i \max_c f_c(\phi_i)}{\sum_i \lVert R^\top (\phi_i - o) \rVert}

    with :math:`f(\phi) = W \phi + b`, the origin :math:`o = -W^+ b`, and R the directions in which training features from o have
    the least second moment. The sums are over the training data. The paper's score, the probability of the virtual logit, is a
    monotone function of this score.

    Args:
        origin: (d,), where all logits are 0, or as nearly so as the head allows.
        residual: (d, r), the directions R, orthonormal.
        scale: alpha.
        weight: (C, d), of the head.
        bias: (C,), of the head.
    """

    origin: Tensor
    residual: Tensor
    scale: float
    weight: Tensor
    bias: Tensor

    @classmethod
    def fit(
        cls, features: Tensor | Parts, weight: Tensor, bias: Tensor | None = None, *, dimension: int | None = None
    ) -> VirtualLogit:
        """Find the subspace and the scale in float64; the features are read twice.

        Args:
            features: (n, d) of the training data.
            weight: (C, d), of the last linear layer.
            bias: (C,), of the last linear layer, or None.
            dimension: of the training data's subspace, below d; None is the authors' choice: 1000 from d = 2048 on, 512 from
                d = 768 on, d / 2 below.
        """
        linear, parts = to_float64(weight.detach()), _as_parts(features)
        width = linear.shape[1]
        default = 1000 if width >= 2048 else 512 if width >= 768 else width // 2
        kept = default if dimension is None else dimension
        if not 1 <= kept < width:
            raise OptionError(f"dimension must be at least 1 and below the {width} of the features, got {kept}.")
        offset = linear.new_zeros(len(linear)) if bias is None else to_float64(bias.detach())
        origin = -torch.linalg.pinv(linear) @ offset
        moment = linear.new_zeros(width, width)
        for part in parts():
            values = to_float64(part.detach()).to(origin) - origin
            moment += values.T @ values
        spread, directions = torch.linalg.eigh(moment)
        if not spread[: width - kept].sum() > spread[-1] * width * torch.finfo(spread.dtype).eps:
            raise DataError(
                f"the training features lie in a subspace of {kept} of their {width} dimensions, so that no distance from it can be "
                f"compared with logits. Choose a lower dimension."
            )
        unscaled = cls(origin, directions[:, : width - kept].contiguous(), 1.0, linear, offset)
        largest = norms = 0.0
        for part in parts():
            residual, logits = unscaled._parts(part)
            norms += float(residual.sum())
            largest += float(logits.amax(1).sum())
        return replace(unscaled, scale=largest / norms)

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores (n,) of features (n, d), higher for outliers."""
        residual, logits = self._parts(features)
        return self.scale * residual - logits.logsumexp(1)

    def _parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        # Distances (n,) from the subspace, and logits (n, C).
        values = to_float64(features.detach()).to(self.origin)
        residual = torch.linalg.vector_norm((values - self.origin) @ self.residual, dim=1)
        return residual, values @ self.weight.T + self.bias


@dataclass(frozen=True, eq=False)
class DetectorEnsemble:
    r"""Mean over members of their standardised scores, :math:`\frac1K \sum_k (s_k(\phi_k) - m_k) / \sigma_k`.

    Args:
        members: one detector for each network.
        centres: (K,), mean score of each on the reference data.
        scales: (K,), standard deviation of each there.
    """

    members: tuple[Detector, ...]
    centres: Tensor
    scales: Tensor

    @classmethod
    def fit(cls, members: Sequence[Detector], reference: Iterable[Sequence[Tensor]]) -> DetectorEnsemble:
        """Measure each member's mean and standard deviation.

        Args:
            members: fitted detectors, one for each network.
            reference: batches of features of held-out in-distribution data, each one tensor (n, d_k) for each network.

        Raises:
            DataError: a member gives all reference data the same score.
        """
        scores = torch.cat([_member_scores(members, batch) for batch in reference], dim=1)
        centres, scales = scores.mean(1), scores.std(1, correction=0)
        if not (scales > 0).all():
            raise DataError(
                f"member {int((scales > 0).int().argmin())} gives all {scores.shape[1]} reference data the same score: give more "
                f"varied reference data."
            )
        return cls(tuple(members), centres, scales)

    def __call__(self, features: Sequence[Tensor]) -> Tensor:
        """Return scores (n,) of features (n, d_k), one tensor for each member; higher for outliers."""
        scores = _member_scores(self.members, features)
        return ((scores - self.centres[:, None]) / self.scales[:, None]).mean(0)


def _member_scores(members: Sequence[Detector], features: Sequence[Tensor]) -> Tensor:
    return torch.stack([to_float64(member(values)) for member, values in zip(members, features, strict=True)])


BANK = 10_000
"""Training points for nearest neighbours, evenly spaced: more would cost much and change little."""


def feature_scores(train: Stored, validation: Stored) -> dict[str, Callable[[Seen], Tensor]]:
    """Return the outlier scores of bare logits and features by name, averaged over networks.

    Energy and largest logit are in nats for every network; the other scores are standardised on the validation data first
    (`DetectorEnsemble`).

    Args:
        train: activations of the training set.
        validation: activations of the validation set.
    """
    stride = max(1, train.count // BANK)

    def parts(network: int) -> Iterator[Tensor]:
        return (seen.features[:, 0] for seen in train.only(network).slices())

    def bank(network: int) -> Tensor:
        start, found = 0, []
        for part in parts(network):
            found.append(part[-start % stride :: stride].clone())
            start += len(part)
        return torch.cat(found)

    indices = range(len(train.files))
    relative = [Mahalanobis.fit(partial(parts, one), train.labels, relative=True) for one in indices]
    kinds: dict[str, list[Detector]] = {
        "Mahalanobis": [replace(one, background=None) for one in relative],
        "relative Mahalanobis": list(relative),
        "Mahalanobis++": [Mahalanobis.fit(partial(parts, one), train.labels, normalised=True) for one in indices],
        "nearest neighbours": [NearestNeighbours.fit(bank(one), k=min(50, train.count)) for one in indices],
    }
    try:
        kinds["ViM"] = [
            VirtualLogit.fit(partial(parts, one), head.head.weight, head.head.bias)
            for one, head in enumerate(train.heads)
        ]
    except (DataError, OptionError) as error:
        warn(f"ViM is left out of the scores: {error}")

    def ensemble(members: list[Detector]) -> Callable[[Seen], Tensor]:
        detector = DetectorEnsemble.fit(members, (seen.by_network() for seen in validation.slices()))
        return lambda seen: detector(seen.by_network())

    return {
        "energy": lambda seen: energy_score(seen.logits).mean(1),
        "maximum logit": lambda seen: max_logit_score(seen.logits).mean(1),
        **{name: ensemble(members) for name, members in kinds.items()},
    }
