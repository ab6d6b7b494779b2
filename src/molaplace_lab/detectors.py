r"""Outlier detectors that use the features of a trained network, for comparison with the scores of a posterior.

Each function fits a detector on training features and returns a function that maps features (n, d) to scores (n,), which are higher
for outliers. Training features are read in chunks of rows to limit memory use.

Each network in an ensemble has its own features, so its distances have their own scale. In a plain mean, the network with the most
widely spread scores would dominate. Before averaging, `feature_scores` therefore standardises each network's scores by their mean and
standard deviation on held-out in-distribution data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from molaplace.errors import DataError, warn
from molaplace.likelihoods import Categorical
from molaplace.outliers import max_logit_score
from molaplace_lab.activations_file import ActivationSlice, StoredActivations

Detector = Callable[[Tensor], Tensor]
"""Function that maps features (n, d) to scores (n,), which are higher for outliers."""

Parts = Callable[[], Iterable[Tensor]]
"""Function that returns features in chunks of rows; every call starts again at the first row."""

PAIRS_AT_ONCE = 2**23
"""Maximum number of distances to training points that are held in memory at once."""

NEIGHBOUR = 50
"""Default k of the nearest-neighbour score, which is the distance to the k-th nearest training point. The authors of the
score use this value for CIFAR-10."""

BANK = 10_000
"""Number of evenly spaced training points that are searched for nearest neighbours. More points would take longer but hardly change
the scores."""


def _directions(features: Tensor) -> Tensor:
    return functional.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=1)


def _whitening(covariance: Tensor) -> Tensor:
    # Return A (d, r) such that A A' is the pseudo-inverse of the covariance, excluding directions in which the training features never
    # vary (dead ReLUs).
    values, vectors = torch.linalg.eigh(covariance)
    varying = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    if not varying.any():
        raise DataError("the features do not vary within the classes. Pass more than one example of each class.")
    return vectors[:, varying] * values[varying].rsqrt()


def mahalanobis(features: Parts, labels: Tensor, *, normalised: bool = False) -> tuple[Detector, Detector]:
    r"""Fit two detectors based on the squared Mahalanobis distance to the nearest class mean.

    .. math:: \min_c\, (\phi - \mu_c)^\top \Sigma^{-1} (\phi - \mu_c)

    The score of the first detector is this distance, where :math:`\Sigma` is the within-class covariance (Lee et al., 2018). The score
    of the second is the relative distance (Ren et al., 2021), which subtracts the squared distance to the overall mean, computed with
    the overall covariance. If `normalised` is True, features are first scaled to length 1, as in Mahalanobis++ (Mueller and Hein,
    2025).
    """

    def prepared(part: Tensor) -> Tensor:
        return _directions(part.detach().double()) if normalised else part.detach().double()

    centre = torch.stack([prepared(part).sum(0) / len(labels) for part in features()]).sum(0)
    _, index = torch.unique(labels.to(centre.device), return_inverse=True)
    counts = torch.bincount(index)
    width = len(centre)

    def centred() -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for part in features():
            yield prepared(part) - centre, index[start : start + len(part)]
            start += len(part)

    means, total, within = (centre.new_zeros(rows, width) for rows in (len(counts), width, width))
    for values, owner in centred():
        means.index_add_(0, owner, values / counts[owner, None])
        total += values.T @ values / len(labels)
    for values, owner in centred():
        # Do not subtract the between-class covariance from the total: for classes far apart, only rounding errors would remain.
        residuals = values - means[owner]
        within += residuals.T @ residuals / len(labels)
    whitening = _whitening(within)
    background = _whitening(total)
    means = means @ whitening

    def nearest(features: Tensor) -> Tensor:
        whitened = (prepared(features).to(centre.device) - centre) @ whitening
        squares = whitened.square().sum(1, keepdim=True) - 2 * whitened @ means.T + means.square().sum(1)
        return squares.min(1).values.clamp_min(0)

    def relative(features: Tensor) -> Tensor:
        return nearest(features) - ((prepared(features).to(centre.device) - centre) @ background).square().sum(1)

    return nearest, relative


def nearest_neighbours(features: Tensor, k: int = NEIGHBOUR) -> Detector:
    """Return a detector that scales features to length 1 and uses the distance to the k-th nearest training point (Sun et al., 2022).

    Distances are computed in the precision of the features. In float32, distances to close neighbours are accurate to about 4 digits.
    A feature vector of length 0 stays 0, and its distance to all other points is 1.
    """
    training_directions = _directions(features.detach())
    bank_squares = training_directions.square().sum(1)
    rows_at_once = max(1, PAIRS_AT_ONCE // len(training_directions))

    def score(batch: Tensor) -> Tensor:
        distances = []
        for part in torch.split(_directions(batch.detach()).to(training_directions), rows_at_once):
            squares = torch.addmm(
                part.square().sum(1, keepdim=True) + bank_squares, part, training_directions.T, alpha=-2
            )
            distances.append(squares.topk(k, dim=1, largest=False, sorted=False).values.max(1).values)
        return torch.cat(distances).clamp_min(0).sqrt()

    return score


def virtual_logit(features: Parts, weight: Tensor, bias: Tensor | None, dimension: int | None = None) -> Detector:
    r"""Fit virtual-logit matching (ViM; Wang et al., 2022), which treats the scaled distance from the training subspace as a logit.

    .. math:: \alpha\, \lVert R^\top (\phi - o) \rVert - \log \sum_c \exp f_c(\phi), \qquad
        \alpha = \frac{\sum_i \max_c f_c(\phi_i)}{\sum_i \lVert R^\top (\phi_i - o) \rVert}

    Here, :math:`f(\phi) = W \phi + b` is the head, :math:`o = -W^+ b` is the origin, and R contains the directions in which training
    features relative to o have the smallest second moments. The sums are over the training data. The paper's score, the probability of
    the virtual logit, is a monotone function of this score. The default dimension of the subspace is the authors' choice.
    """
    linear = weight.detach().double()
    width = linear.shape[1]
    principal = dimension or (1000 if width >= 2048 else 512 if width >= 768 else width // 2)
    offset = linear.new_zeros(len(linear)) if bias is None else bias.detach().double()
    origin = -torch.linalg.pinv(linear) @ offset
    moment = linear.new_zeros(width, width)
    for part in features():
        values = part.detach().double().to(origin) - origin
        moment += values.T @ values
    spread, directions = torch.linalg.eigh(moment)
    if not spread[: width - principal].sum() > spread[-1] * width * torch.finfo(spread.dtype).eps:
        raise DataError(
            f"the training features span at most {principal} of their {width} dimensions, so all distances from it are 0."
        )

    def parts(features: Tensor) -> tuple[Tensor, Tensor]:
        # Return two tensors: the distances (n,) from the subspace, and the logits (n, C).
        values = features.detach().double().to(origin)
        residual = torch.linalg.vector_norm((values - origin) @ directions[:, : width - principal], dim=1)
        return residual, values @ linear.T + offset

    distance_sum = 0.0
    logit_sum = 0.0
    for part in features():
        residual, logits = parts(part)
        distance_sum += float(residual.sum())
        logit_sum += float(logits.amax(1).sum())
    scale = logit_sum / distance_sum

    def score(features: Tensor) -> Tensor:
        residual, logits = parts(features)
        return scale * residual - logits.logsumexp(1)

    return score


def standardised(
    members: Sequence[Detector], reference: Iterable[Sequence[Tensor]]
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that averages the networks' standardised scores; its argument contains the features (n, d_k) of each network.

    `reference` contains batches of held-out in-distribution data, on which each network's standardised scores have mean 0 and standard
    deviation 1.
    """

    def scores(batch: Sequence[Tensor]) -> Tensor:
        return torch.stack([member(values).double() for member, values in zip(members, batch, strict=True)])

    known = torch.cat([scores(batch) for batch in reference], dim=1)
    centres = known.mean(1, keepdim=True)
    scales = known.std(1, correction=0, keepdim=True)
    if not (scales > 0).all():
        raise DataError("a network gives all reference data the same score. Pass more varied reference data.")
    return lambda batch: ((scores(batch) - centres) / scales).mean(0)


def feature_scores(
    train: StoredActivations, validation: StoredActivations
) -> dict[str, Callable[[ActivationSlice], Tensor]]:
    """Return OOD scores that use only logits or features, averaged over networks and keyed by name.

    The energy and the largest logit are measured in nats for every network, so they are averaged directly. The other scores are
    standardised on the validation data before they are averaged.
    """
    stride = max(1, train.count // BANK)

    def parts(network: int) -> Iterator[Tensor]:
        return (activations.features[:, 0] for activations in train.only(slice(network, network + 1)).slices())

    def bank(network: int) -> Tensor:
        start = 0
        rows = []
        for part in parts(network):
            rows.append(part[-start % stride :: stride].clone())
            start += len(part)
        return torch.cat(rows)

    readers = [partial(parts, index) for index in range(len(train.files))]
    pairs = [mahalanobis(reader, train.labels) for reader in readers]
    kinds: dict[str, list[Detector]] = {
        "Mahalanobis": [nearest for nearest, _ in pairs],
        "relative Mahalanobis": [relative for _, relative in pairs],
        "Mahalanobis++": [mahalanobis(reader, train.labels, normalised=True)[0] for reader in readers],
        "nearest neighbours": [
            nearest_neighbours(bank(index), min(NEIGHBOUR, train.count)) for index in range(len(readers))
        ],
    }
    try:
        heads = [head_only.head for head_only in train.heads]
        kinds["ViM"] = [
            virtual_logit(reader, head.weight, head.bias) for reader, head in zip(readers, heads, strict=True)
        ]
    except DataError as error:
        warn(f"ViM is left out: {error}")

    def ensemble(members: list[Detector]) -> Callable[[ActivationSlice], Tensor]:
        score = standardised(members, (activations.by_network() for activations in validation.slices()))
        return lambda activations: score(activations.by_network())

    return {
        "energy": lambda activations: Categorical().energy(activations.logits).mean(1),
        "maximum logit": lambda activations: max_logit_score(activations.logits).mean(1),
        **{name: ensemble(members) for name, members in kinds.items()},
    }


def gen_score(probs: Tensor, exponent: float = 0.1, largest: int = 100) -> Tensor:
    r"""Return the generalised entropy (GEN; Liu et al., 2023) of each row of probabilities (n, C); it is higher for outliers.

    .. math:: \sum_{m=1}^{M} p_{(m)}^\gamma (1 - p_{(m)})^\gamma

    The sum runs over the M largest probabilities. Because gamma is small, the score responds to small probabilities even when a
    network is almost certain. The defaults for gamma and M are the authors' choices for 1000 classes.
    """
    # The complement of the largest probability is computed as the sum of all others, because 1 - p
    # rounds to 0 for float32 numbers near 1.
    ordered = probs.double().sort(dim=1, descending=True).values.clamp(0, 1)
    rest = 1 - ordered
    rest[:, 0] = ordered[:, 1:].sum(1)
    return (ordered * rest)[:, :largest].pow(exponent).sum(1)
