r"""Total, aleatoric and epistemic uncertainty of a classification.

Total uncertainty is the entropy of the prediction. Its aleatoric part is the mean entropy of the members of the mixture, which no
further data would remove. The rest is epistemic: the mutual information between label and weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mola.laplace.base import Spread
from mola.likelihoods.base import ClassificationLikelihood, mixed
from mola.numerics import sobol_normals

MOST_DRAWS, FEWEST_DRAWS = 64, 8
"""Draws of the logits behind the epistemic share: powers of two, and at least two in each quarter."""

DRAWN_LOGITS = 2**13
"""Draws times classes: with many classes, fewer draws are needed and affordable."""

SLOWEST_GAIN = 0.75
"""Largest factor by which a doubling of the draws brings the entropy of their mean closer to its limit: 1/2 with
many draws, more where each draw is certain of a different class."""

NODES = 96
"""Nodes of the integrals over one logit: at most 0.7 apart, where the sigmoid's poles are at a distance of pi."""

WIDE, FLAT = 9.0, 33.0
"""Standard deviations, and logits, beyond which an integrand vanishes in float64."""


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy in nats over the last axis, accurate to relative rounding even if nearly all mass is on one class."""
    plain = -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
    top = probs.amax(-1, keepdim=True)
    rest = torch.where(probs < top, probs, 0).sum(-1)
    # The logarithm of the largest has lost the digits of what is missing to 1. Above one half, no other can be as large.
    largest = top[..., 0]
    return torch.where(largest > 0.5, plain + largest * (largest.log() - _log1p(-rest)), plain)


def _log1p(values: Tensor) -> Tensor:
    # Kahan's formula: ONNX has no log1p.
    whole = 1 + values
    return torch.where(whole == 1, values, whole.log() * (values / (whole - 1)))


def softmax_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities over the last axis, and their entropy in nats to relative rounding."""
    below = logits - logits.amax(-1, keepdim=True)
    raised = below.exp()
    total = raised.sum(-1, keepdim=True)
    # The largest term is 1. Without its integer part the others are summed with all their digits; from 2 on there may be several.
    rest = torch.where(total < 2, (raised - raised.floor()).sum(-1, keepdim=True), total - 1)
    entropies = _log1p(rest) - (raised * below).sum(-1, keepdim=True) / total
    return raised / total, entropies.squeeze(-1)


def mutual_information(member_probs: Tensor, weights: Tensor, likelihood: ClassificationLikelihood) -> Tensor:
    """Return the epistemic part of the entropy, `H[sum_k w_k p_k] - sum_k w_k H[p_k]`, from (K, n, C): (n,), or (n, C) for labels."""
    between = entropy(likelihood.choices(torch.einsum("k,knc->nc", weights.to(member_probs), member_probs)))
    within = torch.einsum("k,k...->...", weights.to(member_probs), entropy(likelihood.choices(member_probs)))
    return (between - within).clamp_min(0)


def epistemic_share(
    likelihood: ClassificationLikelihood,
    means: Sequence[Tensor],
    spreads: Sequence[Spread | None],
    weights: Tensor,
    seed: int = 0,
) -> Tensor:
    """Return the share of a mixture's entropy that is mutual information between label and weights: (n,), or (n, C) for labels.

    Within a component it has no closed form for classes, so it is measured on Sobol draws. As a share of the draws'
    own entropy it lies between 0 and 1 whatever the link, and it is exact where components have no covariance.

    Args:
        likelihood: likelihood of the mixture.
        means: logits (n, C) of each component.
        spreads: spread of each component; None without covariance.
        weights: (K,).
        seed: seed of the draws, the same for every component.
    """
    if not likelihood.mutually_exclusive:
        return _label_share(means, spreads, weights)
    classes, quarters, within = means[0].shape[1], [], []
    for mean, spread in zip(means, spreads, strict=True):
        if spread is None:
            probs, entropies = softmax_and_entropy(mean)
            quarters.append(probs[:, None].expand(-1, 4, -1))
            within.append(entropies)
        else:
            affordable = max(FEWEST_DRAWS, min(MOST_DRAWS, DRAWN_LOGITS // classes))
            draws = 2 ** (affordable.bit_length() - 1)
            noise = sobol_normals(draws, spread.noise_size, seed).to(mean)
            probs, entropies = softmax_and_entropy(mean[:, None] + spread.perturb(noise))
            quarters.append(probs.view(mean.shape[0], 4, draws // 4, classes).mean(2))
            within.append(entropies.mean(1))
    return _share(_entropy_limit(mixed(weights, quarters)), mixed(weights, within))


def _share(total: Tensor, within: Tensor) -> Tensor:
    return (1 - torch.where(total <= 0, 1.0, within / total)).clamp(0, 1)


def _entropy_limit(quarters: Tensor) -> Tensor:
    # Entropy of the mean over all draws there could be, from the means (n, 4, C) over quarters of a few. The entropy of a mean of S
    # draws is too small by an amount that falls as S grows. It is taken of the quarters, the halves and the whole, and the gains of
    # these two doublings are continued as a geometric series.
    halves = (quarters[:, 0::2] + quarters[:, 1::2]) / 2
    whole = entropy(halves.mean(1))
    half, quarter = entropy(halves).mean(1), entropy(quarters).mean(1)
    last, before = (whole - half).clamp_min(0), (half - quarter).clamp_min(0)
    factor = (last / before.clamp_min(torch.finfo(before.dtype).tiny)).clamp(0.5, SLOWEST_GAIN)
    limit = whole + last * factor / (1 - factor)
    return torch.maximum(whole, limit.clamp_max(math.log(quarters.shape[-1])))


def expected_sigmoid(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the means of the sigmoid and of its binary entropy under Gaussian logits, by one-dimensional quadrature.

    The trapezoidal rule over the part of the line where the integrand does not vanish converges exponentially for analytic
    integrands. The sigmoid does not vanish on one side, but its difference from the normal distribution function
    :math:`\Phi(z \sqrt{\pi/8})` does, and the mean of that is known.

    Returns:
        Both to about 1e-12 in float64.
    """
    spread = variance.clamp_min(0).sqrt()
    # In standard deviations; of a wide Gaussian only where the entropy, and the difference, are not 0.
    clipped = (WIDE * spread > FLAT) & (mean.abs() < FLAT + WIDE * spread)
    width = torch.where(clipped, spread, 1.0)
    low = torch.where(clipped, ((-FLAT - mean) / width).clamp_min(-WIDE), -WIDE)
    high = torch.where(clipped, ((FLAT - mean) / width).clamp_max(WIDE), WIDE)
    places = torch.linspace(0, 1, NODES, dtype=mean.dtype, device=mean.device)
    steps = low[..., None] + (high - low)[..., None] * places
    mass = (-steps.square() / 2).exp() * ((high - low) / ((NODES - 1) * math.sqrt(2 * math.pi)))[..., None]
    nodes = mean[..., None] + spread[..., None] * steps
    yes, no = torch.sigmoid(nodes), torch.sigmoid(-nodes)
    softplus = torch.nn.functional.softplus
    entropies = yes * softplus(-nodes) + no * softplus(nodes)
    narrow = math.sqrt(math.pi / 8)
    rest = ((yes - _normal_cdf(narrow * nodes)) * mass).sum(-1)
    probit = _normal_cdf(mean * narrow / (1 + math.pi / 8 * spread.square()).sqrt())
    return (probit + rest).clamp(0, 1), (entropies * mass).sum(-1)


def _normal_cdf(values: Tensor) -> Tensor:
    # By erf: ONNX has neither ndtr nor erfc.
    return (1 + torch.erf(values / math.sqrt(2))) / 2


def _label_share(means: Sequence[Tensor], spreads: Sequence[Spread | None], weights: Tensor) -> Tensor:
    # Each logit is one Gaussian number, so nothing has to be drawn.
    pairs = [
        expected_sigmoid(mean, torch.zeros_like(mean) if spread is None else spread.variance())
        for mean, spread in zip(means, spreads, strict=True)
    ]
    yes = mixed(weights, [one for one, _ in pairs])
    return _share(entropy(torch.stack([1 - yes, yes], -1)), mixed(weights, [two for _, two in pairs]))
