r"""Outlier detectors on the features of a trained network, to compare with the scores of a posterior.

Each is fitted on training features, `detector = Mahalanobis.fit(features, labels)`, and called on features,
`detector(features) -> (n,)` scores, higher for outliers. Training features are a tensor (n, d), or a function that returns them some
rows at a time, for bounded memory.

The members of an ensemble have features of their own, with other zeros and units of distance: a plain mean would weigh the member
whose scores spread most. `DetectorEnsemble` therefore standardises each member's scores by their mean and spread on held-out
in-distribution data, and averages those.
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
"""Distances in memory at once."""

BANK_AT_ONCE = 2**14
"""Training points that are compared with each input at once."""


def _check(features: Tensor, width: int | None = None) -> Tensor:
    if features.ndim != 2 or not features.is_floating_point() or (width is not None and features.shape[1] != width):
        wanted = "(n, d)" if width is None else f"(n, {width})"
        raise DataError(
            f"features must be floating-point of shape {wanted}, got {tuple(features.shape)} of {features.dtype}."
        )
    if not torch.isfinite(features).all():
        raise DataError(
            f"features must be finite; {int((~torch.isfinite(features)).any(1).sum())} of {len(features)} rows are not."
        )
    return features.detach()


def _as_parts(features: Tensor | Parts) -> Parts:
    if not isinstance(features, Tensor):
        return features
    values = _check(features)
    return lambda: _chunks(values, values.shape[1])


def _chunks(features: Tensor, numbers_per_row: int) -> tuple[Tensor, ...]:
    return torch.split(features, max(1, PAIRS_AT_ONCE // numbers_per_row))


def _like(values: Tensor, features: Tensor) -> Tensor:
    # In the user's precision, but not in half precision: squared distances exceed its range.
    return values.to(features.device, torch.promote_types(features.dtype, torch.float32))


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
        count, parts = len(labels), _as_parts(features)
        fits = isinstance(features, Tensor) and labels.shape != features.shape[:1]
        if fits or labels.ndim != 1 or labels.is_floating_point() or not count or int(labels.min()) < 0:
            raise DataError(
                f"labels must be one class index, 0 or more, for each row of features, got shape {tuple(labels.shape)} of "
                f"{labels.dtype}."
            )

        def prepared(part: Tensor) -> Tensor:
            values = to_float64(part.detach())
            return _directions(values) if normalised else values

        centre = sum(prepared(_check(part)).sum(0) / count for part in parts())
        assert isinstance(centre, Tensor)  # there are data
        _, index = torch.unique(labels.to(centre.device), return_inverse=True)
        counts = torch.bincount(index)

        def owned() -> Iterator[tuple[Tensor, Tensor]]:
            start = 0
            for part in parts():
                yield prepared(part) - centre, index[start : start + len(part)]
                start += len(part)

        width = len(centre)
        means, total = centre.new_zeros(len(counts), width), centre.new_zeros(width, width)
        for values, owner in owned():
            means.index_add_(0, owner, values / counts[owner, None])
            if relative:
                total += values.T @ values / count
        within = torch.zeros_like(total)
        for values, owner in owned():
            # Not total minus between: where classes are far apart, the difference would be rounding.
            residuals = values - means[owner]
            within += residuals.T @ residuals / count
        whitening = _whitening(within)
        return cls(centre, whitening, means @ whitening, _whitening(total) if relative else None, normalised)

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores (n,) of features (n, d), higher for outliers."""
        parts = _chunks(_check(features, len(self.centre)), max(len(self.means), len(self.centre)))
        return _like(torch.cat([self._distances(to_float64(part)) for part in parts]), features)

    def _distances(self, features: Tensor) -> Tensor:
        centred = (_directions(features) if self.normalised else features).to(self.centre.device) - self.centre
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
        values = _check(features)
        if not 1 <= k <= len(values):
            raise OptionError(f"k must be between 1 and the {len(values)} training points, got {k}.")
        return cls(_directions(values), k)

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores (n,) of features (n, d), higher for outliers."""
        values = _directions(_check(features, self.bank.shape[1])).to(self.bank.device, self.bank.dtype)
        parts = _chunks(values, BANK_AT_ONCE + self.k)
        return _like(torch.cat([self._distances(part) for part in parts]), features)

    def _distances(self, directions: Tensor) -> Tensor:
        lengths = directions.square().sum(1, keepdim=True)
        nearest = directions.new_empty(len(directions), 0)
        for part in torch.split(self.bank, BANK_AT_ONCE):
            squares = torch.addmm(lengths + part.square().sum(1), directions, part.T, alpha=-2)
            nearest = torch.cat([nearest, squares], dim=1)
            nearest = nearest.topk(min(self.k, nearest.shape[1]), dim=1, largest=False, sorted=False).values
        return nearest.max(1).values.clamp_min(0).sqrt()


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
            values = to_float64(_check(part, width)).to(origin) - origin
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
            residual, logits = unscaled._parts(to_float64(part.detach()))
            norms += float(residual.sum())
            largest += float(logits.amax(1).sum())
        return replace(unscaled, scale=largest / norms)

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores (n,) of features (n, d), higher for outliers."""
        found = []
        for part in _chunks(_check(features, len(self.origin)), max(len(self.weight), len(self.origin))):
            residual, logits = self._parts(to_float64(part))
            found.append(self.scale * residual - logits.logsumexp(1))
        return _like(torch.cat(found), features)

    def _parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        # Distances (n,) from the subspace, and logits (n, C).
        values = features.to(self.origin)
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
            DataError: a member gives all reference data the same score, or a batch lacks a network's features.
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
    counts = {len(values) for values in features}
    if len(members) != len(features) or len(counts) != 1 or counts == {0}:
        raise DataError(
            f"expected features of the same inputs from each of the {len(members)} networks; got {len(features)} tensors with "
            f"{[len(values) for values in features]} rows."
        )
    return torch.stack([to_float64(member(values)) for member, values in zip(members, features, strict=True)])


BANK = 10_000
"""Training points for nearest neighbours, evenly spaced: more would cost much and change little."""


def feature_scores(train: Stored, validation: Stored) -> dict[str, Callable[[Seen], Tensor]]:
    """Return outlier scores of bare logits and features by name, averaged over networks.

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
