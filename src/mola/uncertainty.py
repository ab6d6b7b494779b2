r"""How uncertain, of which kind, and how outlying. Outlier scores are higher for what is more outlying, always.

Total uncertainty is the entropy of the prediction. Its aleatoric part is the mean entropy of the members of the mixture
(what no further data would remove), its epistemic part the rest: the mutual information between label and weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mola.errors import OptionError
from mola.laplace import LogitMoments
from mola.likelihood import CATEGORICAL, Likelihood

SPREAD_DRAWS = 64
"""Most draws of the logits behind the aleatoric-epistemic split of a prediction."""

LEAST_DRAWS = 8
"""Fewest: their quarters must still be means of several."""

DRAWN_LOGITS = 2**13
"""Draws times classes that are always affordable, and worth it: with few classes, the error of few draws is large."""

PRODUCTS_A_DRAW = 150
"""Multiplications of a matrix product that take as long as drawing one logit, times its share of the time of a prediction: with
so many for each logit in the last layer and in the variance, one more draw is affordable."""

SLOWEST = 0.75
"""Factor by which each doubling of the draws brings the entropy of their mean closer to its limit, at most. With many draws it
is 1/2; where each draw is sure of another of many classes, the first doublings gain nearly as much each."""

CERTAIN = 1.1
"""A softmax's normaliser, relative to its largest term, below which the entropy is computed with more care."""

IN_CACHE = 2**19
"""Logits that are drawn at once: what leaves the processor's cache takes several times as long."""


def entropy(probs: Tensor) -> Tensor:
    """Entropy in nats over the last axis."""
    return torch.special.entr(probs).sum(-1)


def fine_entropy(probs: Tensor) -> Tensor:
    """Entropy in nats over the last axis, to relative rounding: `entropy` is off by 1e-7 where nearly all lies on one class.

    Args:
        probs: (..., C), each class but the largest to relative rounding.

    Returns:
        (...).
    """
    plain = -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
    top = probs.amax(-1, keepdim=True)
    if not torch.compiler.is_compiling() and bool((top < 0.9).all()):
        return plain
    rest = torch.where(probs < top, probs, 0).sum(-1)
    # The logarithm of the largest has lost the digits of what is missing to 1. Above one half, no other can be as large.
    largest = top[..., 0]
    return torch.where(largest > 0.5, plain + largest * (largest.log() - _log_of_one_plus(-rest)), plain)


def _log_of_one_plus(values: Tensor) -> Tensor:
    # `log1p` by Kahan's formula, for graphs: ONNX has none, and atanh in its place was slower in onnxruntime.
    whole = 1 + values
    return torch.where(whole == 1, values, whole.log() * (values / (whole - 1)))


def softmax_and_entropy(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Probabilities, and their entropy in nats to relative rounding, however sure they are.

    Args:
        logits: finite.
        dim: the axis of the classes.

    Returns:
        As the logits, and without the axis.
    """
    # Written out: in a graph, torch's softmax over rows of a few classes took 2.4 times as long.
    below = logits - logits.amax(dim, keepdim=True)
    raised = below.exp()
    scale = raised.sum(dim, keepdim=True)
    # The largest is 1: without its whole part, the others are summed with all their digits. From 2 on there may be several.
    rest = torch.where(scale < 2, (raised - raised.floor()).sum(dim, keepdim=True), scale - 1)
    entropies = _log_of_one_plus(rest) - (raised * below).sum(dim, keepdim=True) / scale
    return raised / scale, entropies.squeeze(dim)


def mutual_information(member_probs: Tensor, weights: Tensor, likelihood: Likelihood = CATEGORICAL) -> Tensor:
    """Epistemic part (n,) of the entropy of a mixture: `H[sum_k w_k p_k] - sum_k w_k H[p_k]`.

    Args:
        member_probs: (K, n, C).
        weights: (K,), non-negative, summing to 1.
        likelihood: what the probabilities are of.

    Returns:
        (n,), never below 0; (n, C) for yes or no.
    """
    mixed = torch.einsum("k,knc->nc", weights, member_probs)
    entropies = entropy(likelihood.answer_probabilities(member_probs))
    within = torch.einsum("k,k...->...", weights, entropies)
    return (entropy(likelihood.answer_probabilities(mixed)) - within).clamp_min(0)


def max_probability_score(probs: Tensor, likelihood: Likelihood = CATEGORICAL) -> Tensor:
    """One minus the largest probability (n,), of yes and no on average over labels."""
    if likelihood.competing:
        return 1 - probs.max(-1).values
    return 1 - likelihood.answer_probabilities(probs).max(-1).values.mean(-1)


def entropy_score(probs: Tensor) -> Tensor:
    """Entropy of the prediction."""
    return entropy(probs)


def max_logit_score(logits: Tensor) -> Tensor:
    """Minus the largest logit (Hendrycks et al., 2022), over the last axis."""
    return -logits.max(-1).values


def energy_score(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Free energy of the logits, :math:`-T \log \sum_c \exp(f_c / T)` (Liu et al., 2020), over the last axis.

    Unlike the probabilities it changes with a shift common to all logits, so members of an ensemble differ in its zero.
    As T goes to 0 it becomes `max_logit_score`.

    Args:
        logits: (..., C).
        temperature: T, positive.

    Returns:
        (...), higher = more outlying.
    """
    if not 0 < temperature < float("inf"):
        raise OptionError(f"temperature must be positive and finite, got {temperature!r}.")
    return -temperature * torch.logsumexp(logits / temperature, dim=-1)


def label_energy_score(logits: Tensor) -> Tensor:
    r"""Free energy of labels that are yes or no, over the last axis.

    Of several labels the sum of their energies, :math:`-\sum_c \log(1 + e^{f_c})` (Wang et al., 2021): where no label is found, an
    input is unlike the training data. Of one label a sure no is as good as a sure yes, so its energy is that of two classes with the
    logits :math:`(-f/2, f/2)`.

    Args:
        logits: (..., C).

    Returns:
        (...), higher = more outlying.
    """
    energy = -torch.nn.functional.softplus(logits)
    return (energy + logits / 2).squeeze(-1) if logits.shape[-1] == 1 else energy.sum(-1)


def far_field_score(
    logit_mean: Tensor, length: Tensor, weights: Tensor, likelihood: Likelihood = CATEGORICAL
) -> Tensor:
    r"""How little the mixture would say in this direction, however far one goes: the far-field limit, read as a score.

    .. math:: -\max_c \sum_k \pi_k\, \frac{m^{(k)}_c - \bar m^{(k)}}{\sqrt{\phi_k^\top B_k^{-1} \phi_k}}

    As the prior precision goes to 0, Algorithm 1's variance of every logit becomes one constant times
    :math:`\phi^\top B^{-1} \phi`, the probit link becomes linear, and ranking inputs by the mixture's largest probability
    becomes ranking by this. It needs no prior precision, and the lengths of the feature vectors cancel.

    A logit that stands for yes is one of two classes, the other of which has the logit 0: of these, the mean over labels.

    Args:
        logit_mean: (K, n, C).
        length: (K, n), each feature vector's length relative to the training features.
        weights: (K,).
        likelihood: what the logits mean.

    Returns:
        (n,), higher = more outlying.
    """
    # A feature vector of length 0 has all its logits at the bias: nothing is known there.
    factors = torch.where(length > 0, weights[:, None] / length, 0)
    if not likelihood.competing:
        return -torch.einsum("kn,knc->nc", factors, logit_mean).abs().mean(-1) / 2
    centred = logit_mean - logit_mean.mean(-1, keepdim=True)
    return -torch.einsum("kn,knc->nc", factors, centred).max(-1).values


def outlier_terms(
    logit_mean: Tensor,
    length: Tensor,
    log_distance: Tensor,
    excess: Tensor,
    weights: Tensor,
    likelihood: Likelihood = CATEGORICAL,
    energy: Tensor | None = None,
) -> Tensor:
    """What the outlier score is made of (3, n), each higher for what is more outlying.

    The energy is that of logits divided by the square of what features are longer than usual, as cooling by distance divides them:
    logits that are large because an input was scaled up say nothing for it.

    Args:
        logit_mean: (K, n, C).
        length: (K, n), each feature vector's length relative to the training features.
        log_distance: (n,), of the mixture's distance from the training classes.
        excess: (K, n), how many times longer than usual features are, at least 1.
        weights: (K,).
        likelihood: what the logits mean.
        energy: (K, n), of each network, where `energies` made it before.

    Returns:
        The far-field score, the mean energy of the networks, and the logarithm of the distance.
    """
    own = energies(logit_mean, excess, likelihood) if energy is None else energy
    mean = torch.einsum("k,kn->n", weights, own)
    return torch.stack([far_field_score(logit_mean, length, weights, likelihood), mean, log_distance])


def energies(logit_mean: Tensor, excess: Tensor, likelihood: Likelihood) -> Tensor:
    """Energy (K, n) of each network's logits, what they owe to long features left out; arguments as for `outlier_terms`."""
    of_logits = energy_score if likelihood.competing else label_energy_score
    return of_logits(logit_mean / excess.square()[..., None])


def outlier_score(terms: Tensor, usual: Sequence[tuple[float, float]]) -> Tensor:
    r"""The far-field score, the energy and the distance in one: each in units of its spread on validation data.

    .. math:: z_\text{far field} + z_\text{energy} + \max(0, z_\text{distance} - 1)

    What only the distance tells counts once it is more than a standard deviation above its mean: usual inputs are ranked by far field
    and energy alone. Of 16 such sums this is second by mean rank, 0.05 behind the one with `max(0, z_distance)`, on the networks that
    were to choose, and level with it, ahead of all others, on those that were to confirm (docs/outliers.md).

    Args:
        terms: (3, n), as `outlier_terms` gives them.
        usual: mean and standard deviation of each on validation data.

    Returns:
        (n,), higher = more outlying.
    """
    far_field, energy, distance = ((term - mean) / spread for term, (mean, spread) in zip(terms, usual, strict=True))
    return far_field + energy + (distance - 1).clamp_min(0)


def spread_draws(classes: int, features: int) -> int:
    """How many draws the split of a component's prediction takes: a power of two.

    The split is to cost about as much as the probabilities: more draws are affordable with few classes, whose logits are few,
    and with many features, which make the probabilities costly.

    Args:
        classes: C.
        features: P.

    Returns:
        How many.
    """
    affordable = max(DRAWN_LOGITS // classes, int(features * (1 + features / classes)) // PRODUCTS_A_DRAW, LEAST_DRAWS)
    return 2 ** (min(affordable, SPREAD_DRAWS).bit_length() - 1)


def entropy_of_all(by_quarter: Tensor) -> Tensor:
    r"""Entropy of the mean over all draws there could be, from the means over the quarters of a few.

    The entropy of a mean of S draws is too small, by an amount that falls as S grows: to a half with each doubling where S is
    large, and more slowly where each draw is sure of another class. So it is taken of the quarters, the halves and the whole,
    and the gains of these two doublings are continued as a geometric series.

    Args:
        by_quarter: (n, 4, C), probabilities.

    Returns:
        (n,), at least the entropy of the mean of the quarters and at most `log C`.
    """
    halves = (by_quarter[:, 0::2] + by_quarter[:, 1::2]) / 2
    whole = fine_entropy(halves.mean(1))
    half, quarter = fine_entropy(halves).mean(1), fine_entropy(by_quarter).mean(1)
    last, before = (whole - half).clamp_min(0), (half - quarter).clamp_min(0)
    factor = (last / before.clamp_min(torch.finfo(before.dtype).tiny)).clamp(0.5, SLOWEST)
    limit = whole + last * factor / (1 - factor)
    return torch.maximum(whole, limit.clamp_max(math.log(by_quarter.shape[-1])))


def share_of(total: Tensor, within: Tensor) -> Tensor:
    """Share (n,) of a total entropy that is not within the draws; 0 where there is no entropy to share, NaN where it is NaN."""
    return (1 - torch.where(total <= 0, 1.0, within / total)).clamp(0, 1)


def epistemic_share(moments: Sequence[LogitMoments], weights: Sequence[float], seed: int) -> Tensor:
    """Share (n,) of a mixture's entropy that is mutual information between label and weights.

    Within a component it has no closed form, so it is measured on evenly spread draws (`even_normals`); as a share of the
    draws' own entropy it lies between 0 and 1 whatever the link, and it is exact where the components have no covariance.

    Args:
        moments: of the logits under each component.
        weights: of the components.
        seed: of the draws, the same for every component.

    Returns:
        (n,), between 0 and 1; (n, C) for yes or no.
    """
    mean = moments[0].mean
    if not moments[0].likelihood.competing:
        return _share_of_each_label(moments, weights)
    count, classes = mean.shape
    draws = [spread_draws(classes, 0 if one.spread is None else one.spread.width) for one in moments]
    made = [
        None if one.spread is None else one.even_draws(number, seed) for one, number in zip(moments, draws, strict=True)
    ]
    rows = max(1, IN_CACHE // (max(draws) * classes))
    shares = []
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        size = min(rows, count - start)
        mixed, within = mean.new_zeros(size, 4, classes), mean.new_zeros(size)
        for weight, one, draw in zip(weights, moments, made, strict=True):
            if draw is None:
                probs, entropies = softmax_and_entropy(one.mean[part], -1)
                mixed += weight * probs[:, None]
                within += weight * entropies
            else:
                _add_draws(draw(part), weight, mixed, within)
        shares.append(share_of(entropy_of_all(mixed), within))
    return torch.cat(shares) if shares else mean.new_zeros(0)


NODES = 96
"""Of the integrals over one logit: at most 0.7 apart, where the sigmoid's poles are at a distance of pi."""

WIDE, FLAT = 9.0, 33.0
"""Standard deviations, and logits, beyond which an integrand is nothing in float64."""


def expected_sigmoid(mean: Tensor, variance: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    r"""Means of the sigmoid, and of the entropy of yes or no, under Gaussian logits: integrals over one number, by quadrature.

    The trapezoidal rule over the part of the line where the integrand is not negligible converges exponentially for analytic
    integrands. The sigmoid itself does not vanish on one side. Its difference from the normal distribution function
    :math:`\Phi(z \sqrt{\pi/8})` does, and the mean of that is known: it is what the probit link gives, up to the logistic's shape.

    Args:
        mean: of the logits, any shape.
        variance: likewise, not negative.
        dtype: to compute in.

    Returns:
        Both in that precision; in float64 to about 1e-12.
    """
    centre, spread = mean.to(dtype), variance.to(dtype).clamp_min(0).sqrt()
    # In standard deviations. Of a wide Gaussian only where the entropy, and the difference, are not 0.
    clipped = (WIDE * spread > FLAT) & (centre.abs() < FLAT + WIDE * spread)
    width = torch.where(clipped, spread, 1.0)
    low = torch.where(clipped, ((-FLAT - centre) / width).clamp_min(-WIDE), -WIDE)
    high = torch.where(clipped, ((FLAT - centre) / width).clamp_max(WIDE), WIDE)
    places = torch.linspace(0, 1, NODES, dtype=dtype, device=mean.device)
    steps = low[..., None] + (high - low)[..., None] * places
    mass = (-steps.square() / 2).exp() * ((high - low) / ((NODES - 1) * math.sqrt(2 * math.pi)))[..., None]
    nodes = centre[..., None] + spread[..., None] * steps
    yes, no = torch.sigmoid(nodes), torch.sigmoid(-nodes)
    softplus = torch.nn.functional.softplus
    entropies = yes * softplus(-nodes) + no * softplus(nodes)
    narrow = math.sqrt(math.pi / 8)
    rest = ((yes - _normal_below(narrow * nodes)) * mass).sum(-1)
    probit = _normal_below(centre * narrow / (1 + math.pi / 8 * spread.square()).sqrt())
    return (probit + rest).clamp(0, 1), (entropies * mass).sum(-1)


def _normal_below(values: Tensor) -> Tensor:
    # The normal distribution function; ONNX has no `erfc`, without which small values lose their digits.
    if torch.compiler.is_compiling():
        return (1 + torch.erf(values / math.sqrt(2))) / 2
    return torch.special.ndtr(values)


def _share_of_each_label(moments: Sequence[LogitMoments], weights: Sequence[float]) -> Tensor:
    # The epistemic share (n, C) of labels that are yes or no: each logit is one Gaussian number, and nothing has to be
    # drawn.
    mean = moments[0].mean
    shares = []
    rows = max(1, IN_CACHE // (NODES * mean.shape[1]))
    for start in range(0, len(mean), rows):
        mixed, within = (mean.new_zeros(mean[start : start + rows].shape, dtype=torch.float64) for _ in range(2))
        for weight, one in zip(weights, moments, strict=True):
            yes, entropies = expected_sigmoid(one.mean[start : start + rows], one.variance[start : start + rows])
            mixed, within = mixed + weight * yes, within + weight * entropies
        shares.append(share_of(fine_entropy(torch.stack([1 - mixed, mixed], -1)), within))
    return (torch.cat(shares) if shares else torch.zeros_like(mean)).to(mean.dtype)


def _add_draws(drawn: Tensor, weight: float, mixed: Tensor, within: Tensor) -> None:
    # Add what draws (n, S, C) of the logits say to (n, 4, C) and (n,): probabilities by quarters, and entropies. As
    # `softmax_and_entropy`, which graphs use, with fewer passes over memory; the draws are overwritten.
    count, draws, classes = drawn.shape
    below = drawn.sub_(drawn.amax(-1, keepdim=True))
    raised = below.exp()
    scale = raised.sum(-1)
    rest = scale - 1
    if bool((scale < CERTAIN).any()):
        # Of a sure prediction, rounding of 1e-7 times the link's larger entropy would show as 3e-5: without the largest, which
        # is 1, the others are summed with all their digits.
        rest = torch.where(scale < CERTAIN, (raised - raised.floor()).sum(-1), rest)
    entropies = rest.log1p() - torch.linalg.vecdot(raised, below) / scale
    within += weight * entropies.mean(1)
    shares = (4 * weight / draws / scale).view(count, 4, 1, draws // 4)
    mixed += (shares @ raised.view(count, 4, draws // 4, classes))[:, :, 0]
