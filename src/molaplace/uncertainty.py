r"""Total, aleatoric and epistemic uncertainty in classification.

Total uncertainty is the entropy of the prediction. Its aleatoric part, which more data would not remove, is the mean entropy of the
mixture's members. The rest is epistemic: the mutual information between the label and the weights.

A distance exponent adds entropy but no mutual information. Let H be the entropy of the prediction, and let :math:`H_0` and
:math:`I_0` be the entropy and the mutual information at distance exponent 0. The aleatoric part is then :math:`\min(H, H_0 - I_0)`.
The remaining entropy is epistemic, because training data near the input would remove it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

MOST_DRAWS = 64
"""Largest number of draws used to estimate the epistemic share, a power of two."""

FEWEST_DRAWS = 8
"""Smallest number of draws, a power of two and at least 8, because each quarter of the draws is averaged separately."""

DRAWN_LOGITS = 2**13
"""Largest number of drawn logits (draws times classes). With many classes, fewer draws are needed, and fewer are affordable."""

SLOWEST_GAIN = 0.75
"""Upper bound on the ratio used to extrapolate the entropy gains from successive doublings of the number of draws. The ratio tends to
1/2 as the number of draws grows, and is larger if each draw is certain of a different class."""

NODES = 96
"""Number of nodes for the integrals over one logit. Nodes are at most 0.7 apart, and the sigmoid's poles lie at a distance of pi from
the real line."""

REACH = 9.0
"""Distance from the mean, in standard deviations, beyond which the integrands vanish in float64."""

FLAT = 33.0
"""Absolute value of a logit beyond which the integrands vanish in float64."""


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy along the last axis in nats, with full relative precision even if one class has nearly all the mass."""
    plain = -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
    top = probs.amax(-1, keepdim=True)
    rest = torch.where(probs < top, probs, 0).sum(-1)
    # The logarithm of a probability near 1 loses precision, so this term is computed from the other probabilities. If a probability
    # exceeds one half, no other probability can be as large.
    largest = top[..., 0]
    return torch.where(largest > 0.5, plain + largest * (largest.log() - _log1p(-rest)), plain)


def _log1p(values: Tensor) -> Tensor:
    # Use Kahan's formula, because ONNX has no log1p.
    whole = 1 + values
    return torch.where(whole == 1, values, whole.log() * (values / (whole - 1)))


def softmax_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax probabilities along the last axis, and their entropy in nats with full relative precision."""
    below = logits - logits.amax(-1, keepdim=True)
    raised = below.exp()
    total = raised.sum(-1, keepdim=True)
    # The largest term is 1. Removing the integer parts gives the sum of the other terms to full precision. If the total is at least 2,
    # several terms may be 1, and subtracting 1 loses no precision.
    rest = torch.where(total < 2, (raised - raised.floor()).sum(-1, keepdim=True), total - 1)
    entropies = _log1p(rest) - (raised * below).sum(-1, keepdim=True) / total
    return raised / total, entropies.squeeze(-1)


def mutual_information(total: Tensor, member_entropies: Tensor, weights: Tensor) -> Tensor:
    """Return the epistemic part of the entropy, `H[sum_k w_k p_k] - sum_k w_k H[p_k]`.

    Args:
        total: entropies (n, ...) of the mixture.
        member_entropies: entropies (n, K, ...) of the members.
        weights: mixture weights (K,).
    """
    within = torch.einsum("k,nk...->n...", weights.to(member_entropies), member_entropies)
    return (total - within).clamp_min(0)


def unexplained_share(total: Tensor, within: Tensor) -> Tensor:
    """Return the share of the entropy of a mean that the mean of the entropies does not explain, clamped to [0, 1]."""
    return (1 - torch.where(total <= 0, 1.0, within / total)).clamp(0, 1)


def num_draws(classes: int) -> int:
    """Return the number of draws of C logits from which an epistemic share is estimated, a power of two."""
    affordable = max(FEWEST_DRAWS, min(MOST_DRAWS, DRAWN_LOGITS // classes))
    return int(2 ** (affordable.bit_length() - 1))


def entropy_limit(quarters: Tensor) -> Tensor:
    """Estimate the entropy of the mean over infinitely many draws, given the means (n, 4, C) over the four quarters of the draws.

    The entropy of a mean of S draws is too small by an amount that falls as S grows. The entropy is therefore computed for the
    quarters, the halves and all draws, and the gains from the two doublings are extrapolated as a geometric series.
    """
    halves = (quarters[:, 0::2] + quarters[:, 1::2]) / 2
    by_quarters = entropy(quarters).mean(1)
    by_halves = entropy(halves).mean(1)
    by_all = entropy(halves.mean(1))
    first_gain = (by_halves - by_quarters).clamp_min(0)
    second_gain = (by_all - by_halves).clamp_min(0)
    ratio = (second_gain / first_gain.clamp_min(torch.finfo(first_gain.dtype).tiny)).clamp(0.5, SLOWEST_GAIN)
    limit = by_all + second_gain * ratio / (1 - ratio)
    return torch.maximum(by_all, limit.clamp_max(math.log(quarters.shape[-1])))


def expected_sigmoid(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute the means of the sigmoid and of its binary entropy under Gaussian logits, by one-dimensional quadrature.

    The trapezoidal rule converges exponentially for analytic integrands that vanish at both ends. The sigmoid vanishes at only one
    end, but its difference from the normal distribution function :math:`\Phi(z \sqrt{\pi/8})` vanishes at both. The mean of
    :math:`\Phi` has a closed form.

    Returns:
        Both means, accurate to about 1e-12 in float64.
    """
    spread = variance.clamp_min(0).sqrt()
    # The integration limits are given in standard deviations. For a wide Gaussian, they enclose only the logits at which the
    # integrands are not 0.
    clipped = (REACH * spread > FLAT) & (mean.abs() < FLAT + REACH * spread)
    width = torch.where(clipped, spread, 1.0)
    low = torch.where(clipped, ((-FLAT - mean) / width).clamp_min(-REACH), -REACH)
    high = torch.where(clipped, ((FLAT - mean) / width).clamp_max(REACH), REACH)
    fractions = torch.linspace(0, 1, NODES, dtype=mean.dtype, device=mean.device)
    steps = low[..., None] + (high - low)[..., None] * fractions
    mass = (-steps.square() / 2).exp() * ((high - low) / ((NODES - 1) * math.sqrt(2 * math.pi)))[..., None]
    nodes = mean[..., None] + spread[..., None] * steps
    yes = torch.sigmoid(nodes)
    no = torch.sigmoid(-nodes)
    entropies = yes * functional.softplus(-nodes) + no * functional.softplus(nodes)
    narrow = math.sqrt(math.pi / 8)
    rest = ((yes - _normal_cdf(narrow * nodes)) * mass).sum(-1)
    probit = _normal_cdf(mean * narrow / (1 + math.pi / 8 * spread.square()).sqrt())
    return (probit + rest).clamp(0, 1), (entropies * mass).sum(-1)


def _normal_cdf(values: Tensor) -> Tensor:
    # Use erf, because ONNX has neither ndtr nor erfc.
    return (1 + torch.erf(values / math.sqrt(2))) / 2
