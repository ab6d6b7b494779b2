r"""Outlier detectors on the features of a trained network, to stand beside the scores that a posterior gives.

Each is fitted on training features and labels, `detector = Mahalanobis.fit(features, labels)`, and called on features,
`detector(features) -> (n,)` scores, higher for what is more outlying. They are frozen values; nothing is trained.

Members of an ensemble have features of their own, and distances in one member's features have another zero and another
unit than in the next one's: a plain mean would listen mostly to the member whose scores happen to spread most.
`DetectorEnsemble` therefore standardises each member's scores by their mean and spread on in-distribution data, held out
from what the detectors were fitted on, and averages those. It matters where architectures or detectors differ; between
networks of one architecture the spreads agree to a few per cent, and so do the two means.
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
"""Features (n, d) in, scores (n,) out, higher for what is more outlying."""

PAIRS_AT_ONCE = 2**23
"""Distances held at once by a detector; more are taken in turns."""

BANK_AT_ONCE = 2**14
"""Training points compared at once with each input."""


def _checked(features: Tensor, labels: Tensor | None = None, width: int | None = None) -> Tensor:
    if features.ndim != 2 or not features.is_floating_point() or (width is not None and features.shape[1] != width):
        wanted = "(n, d)" if width is None else f"(n, {width})"
        raise DataError(
            f"features must be floating-point of shape {wanted}, got {tuple(features.shape)} of {features.dtype}."
        )
    if not torch.isfinite(features).all():
        raise DataError(
            f"features must be finite; {int((~torch.isfinite(features)).any(1).sum())} of {len(features)} rows are not."
        )
    if labels is not None and (
        labels.shape != features.shape[:1] or labels.is_floating_point() or not len(labels) or int(labels.min()) < 0
    ):
        raise DataError(
            f"labels must be one class number, 0 or more, for each of the {len(features)} rows of features (at least "
            f"one row), got shape {tuple(labels.shape)} of {labels.dtype}."
        )
    return features.detach()


def _scores(values: Tensor, like: Tensor) -> Tensor:
    # In the user's precision, but not in half: squared distances exceed its range.
    return values.to(like.device, torch.promote_types(like.dtype, torch.float32))


def _whitening(covariance: Tensor) -> Tensor:
    # A (d, r) whose A A' is the pseudo-inverse of the covariance. Directions in which training data never moved (dead
    # ReLUs) have no scale to measure a distance by: left out.
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    if not kept.any():
        raise DataError(
            "features do not vary within the classes, so they have no covariance to measure distances by. "
            "Give more than one example of each class."
        )
    return vectors[:, kept] * values[kept].rsqrt()


def _rows(features: Tensor, numbers_per_row: int) -> tuple[Tensor, ...]:
    # The features in turns, so that what is computed from each row stays bounded.
    return torch.split(features, max(1, PAIRS_AT_ONCE // numbers_per_row))


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    r"""Squared Mahalanobis distance to the nearest class mean, one covariance for all classes (Lee et al., 2018).

    .. math:: \min_c\, (\phi - \mu_c)^\top \Sigma^{-1} (\phi - \mu_c)

    with :math:`\Sigma` the covariance within classes. The relative form (Ren et al., 2021) subtracts the distance to the
    mean of all data under the covariance of all data: what is far from everything is no sign of a foreign class. Mahalanobis++
    (Mueller and Hein, 2025) measures the same distance between features that were scaled to length 1: lengths vary between
    classes and with contrast, and one Gaussian covariance for all describes directions better.

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
    def fit(cls, features: Tensor, labels: Tensor, *, relative: bool = False, normalised: bool = False) -> Mahalanobis:
        """Estimate means and covariance.

        Args:
            features: (n, d) of the training data.
            labels: (n,), class numbers.
            relative: subtract the distance under the covariance of all data.
            normalised: scale features to length 1 first.

        Returns:
            The detector, in float64.
        """
        width = _checked(features, labels).shape[1]
        return cls.fit_parts(lambda: _rows(features.detach(), width), labels, relative=relative, normalised=normalised)

    @classmethod
    def fit_parts(
        cls,
        parts: Callable[[], Iterable[Tensor]],
        labels: Tensor,
        *,
        relative: bool = False,
        normalised: bool = False,
    ) -> Mahalanobis:
        """The same in bounded memory, reading the features three times.

        Args:
            parts: gives the features of the training data, some rows at a time.
            labels: (n,), class numbers of all of them.
            relative: as for `fit`.
            normalised: as for `fit`.

        Returns:
            The detector, in float64.
        """
        count = len(labels)

        def prepared(part: Tensor) -> Tensor:
            values = to_float64(part.detach())
            return _directions(values) if normalised else values

        centre = sum(prepared(_checked(part)).sum(0) / count for part in parts())
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
            # Not total minus between: where classes lie far apart, the difference would be rounding.
            residuals = values - means[owner]
            within += residuals.T @ residuals / count
        whitening = _whitening(within)
        return cls(centre, whitening, means @ whitening, _whitening(total) if relative else None, normalised)

    def __call__(self, features: Tensor) -> Tensor:
        """Scores (n,) of features (n, d), higher for what is more outlying."""
        parts = _rows(_checked(features, width=len(self.centre)), max(len(self.means), len(self.centre)))
        return _scores(torch.cat([self._distances(to_float64(part)) for part in parts]), features)

    def _distances(self, features: Tensor) -> Tensor:
        centred = (_directions(features) if self.normalised else features).to(self.centre.device) - self.centre
        whitened = centred @ self.whitening
        squares = whitened.square().sum(1, keepdim=True) - 2 * whitened @ self.means.T + self.means.square().sum(1)
        nearest = squares.min(1).values.clamp_min(0)
        return nearest if self.background is None else nearest - (centred @ self.background).square().sum(1)


@dataclass(frozen=True, eq=False)
class NearestNeighbours:
    """Distance to the k-th nearest training point, features scaled to length 1 (Sun et al., 2022).

    Distances are found in the features' precision: about 4 digits for close neighbours in float32. A feature vector of
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

        Returns:
            The detector, as large as the features.
        """
        values = _checked(features, labels)
        if not 1 <= k <= len(values):
            raise OptionError(f"k must be between 1 and the {len(values)} training points, got {k}.")
        return cls(_directions(values), k)

    def __call__(self, features: Tensor) -> Tensor:
        """Scores (n,) of features (n, d), higher for what is more outlying."""
        values = _directions(_checked(features, width=self.bank.shape[1])).to(self.bank.device, self.bank.dtype)
        parts = _rows(values, BANK_AT_ONCE + self.k)
        return _scores(torch.cat([self._distances(part) for part in parts]), features)

    def _distances(self, directions: Tensor) -> Tensor:
        lengths = directions.square().sum(1, keepdim=True)
        nearest = directions.new_empty(len(directions), 0)
        for part in torch.split(self.bank, BANK_AT_ONCE):
            squares = torch.addmm(lengths + part.square().sum(1), directions, part.T, alpha=-2)
            closest = squares.topk(min(self.k, squares.shape[1]), dim=1, largest=False, sorted=False).values
            nearest = torch.cat([nearest, closest], dim=1)
            nearest = nearest.topk(min(self.k, nearest.shape[1]), dim=1, largest=False, sorted=False).values
        return nearest.max(1).values.clamp_min(0).sqrt()


def _directions(features: Tensor) -> Tensor:
    return functional.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=1)


@dataclass(frozen=True, eq=False)
class VirtualLogit:
    r"""ViM, virtual-logit matching (Wang et al., 2022): how far features leave the training data's subspace, against the logits.

    .. math:: \alpha\, \lVert R^\top (\phi - o) \rVert - \log \sum_c \exp f_c(\phi), \qquad
        \alpha = \frac{\sum_i \max_c f_c(\phi_i)}{\sum_i \lVert R^\top (\phi_i - o) \rVert}

    with :math:`f(\phi) = W \phi + b`, the origin :math:`o = -W^+ b`, and R the directions in which training features from o have
    the least second moment. The sums are over the training data. The paper's score is the probability of the virtual logit
    among the others; it is a monotone function of this one.

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
        cls, features: Tensor, weight: Tensor, bias: Tensor | None = None, *, dimension: int | None = None
    ) -> VirtualLogit:
        """Find the subspace and the scale.

        Args:
            features: (n, d) of the training data.
            weight: (C, d), of the last linear layer.
            bias: (C,), of the last linear layer; None is none.
            dimension: of the training data's subspace, below d; None is the authors' choice: 1000 from d = 2048 on, 512 from
                d = 768 on, d / 2 below.

        Returns:
            The detector, in float64.
        """
        width = _checked(features).shape[1]
        return cls.fit_parts(lambda: _rows(features.detach(), width), weight, bias, dimension=dimension)

    @classmethod
    def fit_parts(
        cls,
        parts: Callable[[], Iterable[Tensor]],
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dimension: int | None = None,
    ) -> VirtualLogit:
        """The same in bounded memory, reading the features twice.

        Args:
            parts: gives the features of the training data, some rows at a time.
            weight: as for `fit`.
            bias: as for `fit`.
            dimension: as for `fit`.

        Returns:
            The detector, in float64.
        """
        linear = to_float64(weight.detach())
        width = linear.shape[1]
        kept = _principal(width) if dimension is None else dimension
        if not 1 <= kept < width:
            raise OptionError(f"dimension must be at least 1 and below the {width} of the features, got {kept}.")
        offset = linear.new_zeros(len(linear)) if bias is None else to_float64(bias.detach())
        origin = -torch.linalg.pinv(linear) @ offset
        moment, count = linear.new_zeros(width, width), 0
        for part in parts():
            values = to_float64(_checked(part, width=width)).to(origin) - origin
            moment += values.T @ values
            count += len(values)
        spread, directions = torch.linalg.eigh(moment)
        if not spread[: width - kept].sum() > spread[-1] * width * torch.finfo(spread.dtype).eps:
            raise DataError(
                f"the {count} training features lie in a subspace of {kept} of their {width} dimensions: no distance from it "
                f"was seen to compare logits with. Choose a lower dimension."
            )
        unscaled = cls(origin, directions[:, : width - kept].contiguous(), 1.0, linear, offset)
        largest = norms = 0.0
        for part in parts():
            residual, logits = unscaled._parts(to_float64(part.detach()))
            norms += float(residual.sum())
            largest += float(logits.amax(1).sum())
        return replace(unscaled, scale=largest / norms)

    def __call__(self, features: Tensor) -> Tensor:
        """Scores (n,) of features (n, d), higher for what is more outlying."""
        parts = _rows(_checked(features, width=len(self.origin)), max(len(self.weight), len(self.origin)))
        return _scores(torch.cat([self._distances(to_float64(part)) for part in parts]), features)

    def _distances(self, features: Tensor) -> Tensor:
        residual, logits = self._parts(features)
        return self.scale * residual - logits.logsumexp(1)

    def _parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        # Lengths (n,) outside the subspace, and logits (n, C).
        values = features.to(self.origin)
        residual = torch.linalg.vector_norm((values - self.origin) @ self.residual, dim=1)
        return residual, values @ self.weight.T + self.bias


def _principal(width: int) -> int:
    return 1000 if width >= 2048 else 512 if width >= 768 else width // 2


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
    def fit(cls, members: Sequence[Detector], reference: Sequence[Tensor]) -> DetectorEnsemble:
        """Measure each member's zero and unit.

        Args:
            members: fitted detectors, one for each network.
            reference: features (n, d_k) of in-distribution data, one tensor for each network; validation data, since the
                detectors know their training data (each is its own nearest neighbour).

        Returns:
            The ensemble, called with one tensor of features for each network; `DataError` if a member gives all reference data the
            same score, or there are not as many tensors as members.
        """
        return cls.standardised(members, _member_scores(members, reference))

    @classmethod
    def standardised(cls, members: Sequence[Detector], scores: Tensor) -> DetectorEnsemble:
        """The same from the members' scores (K, n) of the reference data."""
        centres, scales = scores.mean(1), scores.std(1, correction=0)
        if not (scales > 0).all():
            raise DataError(
                f"member {int((scales > 0).int().argmin())} gives all {scores.shape[1]} reference data the same score, "
                f"so it has no unit. Give more, and more varied, reference data."
            )
        return cls(tuple(members), centres, scales)

    def __call__(self, features: Sequence[Tensor]) -> Tensor:
        """Scores (n,) of features (n, d_k), one tensor for each member; higher for what is more outlying."""
        scores = _member_scores(self.members, features)
        return ((scores - self.centres[:, None]) / self.scales[:, None]).mean(0)


def _member_scores(members: Sequence[Detector], features: Sequence[Tensor]) -> Tensor:
    counts = {len(values) for values in features}
    if len(members) != len(features) or len(members) == 0 or len(counts) != 1 or counts == {0}:
        raise DataError(
            f"expected features of the same inputs (at least one) from each of the {len(members)} networks; got "
            f"{len(features)} tensors with {[len(values) for values in features]} rows."
        )
    return torch.stack([to_float64(member(values)) for member, values in zip(members, features, strict=True)])


BANK = 10_000
"""Training points that nearest neighbours are looked for among, evenly spaced: more would cost much and change little."""


def feature_scores(train: Stored, validation: Stored) -> dict[str, Callable[[Seen], Tensor]]:
    """Outlier scores of bare logits and features, averaged over networks.

    Energy and largest logit are in nats for every network and are averaged as they are. The others have units of their own: of
    each network's scores the mean on the validation data is subtracted, the rest is divided by the standard deviation there, and
    the mean over networks is taken (`DetectorEnsemble`).

    Args:
        train: what the networks see of the training set, read in slices.
        validation: what they see of the validation set.

    Returns:
        The scores by name, of what the networks see of other data.
    """
    stride = max(1, train.count // BANK)

    def parts(network: int) -> Iterator[Tensor]:
        return (seen.features[:, 0] for seen in train.only(network).slices())

    def bank(network: int) -> Iterator[Tensor]:
        start = 0
        for part in parts(network):
            yield part[-start % stride :: stride].clone()
            start += len(part)

    numbers = range(len(train.files))
    relative = [Mahalanobis.fit_parts(partial(parts, one), train.labels, relative=True) for one in numbers]
    kinds: dict[str, list[Detector]] = {
        "Mahalanobis": [replace(one, background=None) for one in relative],
        "relative Mahalanobis": list(relative),
        "Mahalanobis++": [Mahalanobis.fit_parts(partial(parts, one), train.labels, normalised=True) for one in numbers],
        "nearest neighbours": [
            NearestNeighbours.fit(torch.cat(list(bank(one))), k=min(50, train.count)) for one in numbers
        ],
    }
    try:
        kinds["ViM"] = [
            VirtualLogit.fit_parts(partial(parts, one), head.head.weight, head.head.bias)
            for one, head in enumerate(train.heads)
        ]
    except (DataError, OptionError) as error:
        warn(f"ViM is left out of the scores: {error}")

    def ensemble(members: list[Detector]) -> Callable[[Seen], Tensor]:
        found = [_member_scores(members, seen.by_network()) for seen in validation.slices()]
        detector = DetectorEnsemble.standardised(members, torch.cat(found, dim=1))
        return lambda seen: detector(seen.by_network())

    return {
        "energy": lambda seen: energy_score(seen.logits).mean(1),
        "maximum logit": lambda seen: max_logit_score(seen.logits).mean(1),
        **{name: ensemble(members) for name, members in kinds.items()},
    }
