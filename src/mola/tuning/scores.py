"""Scores of candidates on held-out data: one loop over chunks of rows, with many candidates at once where the link allows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mola.likelihoods import ClassificationLikelihood, Predictive
from mola.metrics import bin_sums, calibration_gaps
from mola.scaling import scale_factors
from mola.tuning.held_out import HeldOut

if TYPE_CHECKING:
    from mola.network import Rows
    from mola.posterior import MoLA

NUMBERS_AT_ONCE = 2**21
"""Candidates times rows times outputs that are held at once: 16 MB in float64."""


@dataclass(frozen=True)
class Candidates:
    """L settings of a mixture of K networks, in float64."""

    precision: Tensor
    """(L, K)"""
    temperature: Tensor
    """(L,), as all below."""
    pooling: Tensor
    exponent: Tensor
    onset: Tensor

    @staticmethod
    def of(
        posterior: MoLA,
        *,
        precision: Sequence[Any] | None = None,
        temperature: Sequence[float] | float = 1.0,
        pooling: Sequence[float] | float = 1.0,
        exponent: Sequence[float] | float = 0.0,
        onset: Sequence[float] | float = 1.0,
    ) -> Candidates:
        """Broadcast settings against each other. A precision is one number, or one for each component; None is the posterior's."""
        count = len(posterior.components)
        given = [posterior.prior_precision] if precision is None else precision
        rows = torch.stack([torch.as_tensor(one, dtype=torch.float64, device="cpu").expand(count) for one in given])
        others = [
            torch.as_tensor(one, dtype=torch.float64, device="cpu").flatten()
            for one in (temperature, pooling, exponent, onset)
        ]
        size = max(len(rows), *(len(one) for one in others))
        return Candidates(rows.expand(size, count), *(one.expand(size) for one in others))

    def __len__(self) -> int:
        return len(self.temperature)

    def applied(self, posterior: MoLA, index: int) -> MoLA:
        """The posterior with the settings of one candidate."""
        scaling = replace(
            posterior.scaling,
            temperature=float(self.temperature[index]),
            pooling=float(self.pooling[index]),
            exponent=float(self.exponent[index]),
            onset=float(self.onset[index]),
        )
        return posterior.with_prior_precision(self.precision[index].tolist())._with(scaling=scaling)


def scores(posterior: MoLA, data: HeldOut, candidates: Candidates) -> dict[str, Tensor]:
    """Scores (L, m) of every candidate for each datum, or for each known question of multi-label data, over all processes.

    Args:
        posterior: the mixture; its own prior precision and scaling are not used.
        data: with labels.
        candidates: to score.
    """

    def scored(predictive: Predictive, labels: Tensor | None) -> dict[str, Tensor]:
        assert labels is not None
        return predictive.scores(labels)

    return _gathered(posterior, data, candidates, scored)


def confidence_and_uniformity(posterior: MoLA, data: HeldOut, candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Mean confidence (L,) of every candidate, and mean cross-entropy (L,) of the uniform distribution to its predictions."""
    likelihood, tiny = posterior.likelihood, torch.finfo(torch.float64).tiny
    assert isinstance(likelihood, ClassificationLikelihood)

    def scored(predictive: Predictive, _: Tensor | None) -> dict[str, Tensor]:
        choices = likelihood.choices(predictive.point())
        uniform = -choices.clamp_min(tiny).log().mean(-1)
        confidence = choices.amax(-1)
        if not likelihood.mutually_exclusive:  # a row for each question
            confidence, uniform = confidence.flatten(-2), uniform.flatten(-2)
        return {"confidence": confidence, "uniform": uniform}

    found = _gathered(posterior, data, candidates, scored)
    return found["confidence"].mean(1), found["uniform"].mean(1)


def _gathered(
    posterior: MoLA,
    data: HeldOut,
    candidates: Candidates,
    scored: Callable[[Predictive, Tensor | None], dict[str, Tensor]],
) -> dict[str, Tensor]:
    # What `scored` makes of every candidate's predictive distribution, (L, m) by name. Links that use variances alone take all
    # candidates at once; with the others, or with weights that depend on the candidate, each is a posterior of its own.
    together = (
        posterior.link.variance_only or not posterior.likelihood.classification
    ) and posterior.weighting != "evidence"
    each = [] if together else [candidates.applied(posterior, index) for index in range(len(candidates))]
    outputs, features = data.outputs[0].shape[1], max(phi.shape[1] for phi in data.phi)
    row = max((len(candidates) if together else 1) * posterior.link.row_size(outputs), features)
    parts: list[dict[str, Tensor]] = []
    for rows, labels in data.chunks(NUMBERS_AT_ONCE // row):
        if together:
            parts.append(scored(predictive_at(posterior, rows, candidates), labels))
        else:
            found = [scored(one.predictive(rows), labels) for one in each]
            parts.append({name: torch.stack([one[name] for one in found]) for name in found[0]})
    # A rank without data does not know the names.
    names = next(names for names in data.team.collect(list(parts[0]) if parts else None) if names)
    return {
        name: data.gather(torch.cat([part[name] for part in parts], 1).T.contiguous() if parts else None).T
        for name in names
    }


def predictive_at(posterior: MoLA, rows: Rows, candidates: Candidates) -> Predictive:
    """The predictive distribution of n rows under L candidates, with a leading dimension L: for links that use variances alone."""
    precisions = candidates.precision.unbind(1)
    parts = zip(posterior.components, rows.phi, precisions, strict=True)
    scale = None
    if bool((candidates.temperature != 1).any() or (candidates.exponent != 0).any()):
        scale = list(_factors(posterior, rows, candidates).unbind(1))
    plain = bool((candidates.pooling == 1).all())
    return posterior.likelihood.predictive(
        rows.outputs,
        [component.spread(phi, precision) for component, phi, precision in parts],
        posterior.weights,
        posterior.link,
        scale=scale,
        pooling=1.0 if plain else candidates.pooling[:, None, None],
        members=posterior.likelihoods,
    )


def _factors(posterior: MoLA, rows: Rows, candidates: Candidates) -> Tensor:
    # What logits are divided by (L, K, n, 1).
    if not bool((candidates.exponent != 0).any()):
        return candidates.temperature[:, None, None, None].expand(-1, len(posterior.components), 1, 1)
    log_distance, log_norm = posterior.log_distances(rows)
    relative = posterior.scaling.log_distance(log_distance, posterior.weights) - candidates.onset.log()[:, None]
    excess = (
        posterior.scaling.log_excess(log_norm) if posterior.likelihood.classification else torch.zeros_like(log_norm)
    )
    return scale_factors(relative, excess, candidates.temperature, candidates.exponent)


def averages(scored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean of each score over the data (L,), and the calibration error "ece" where there are confidences."""
    found = {name: values.mean(1) for name, values in scored.items()}
    if "confidence" in scored:
        found["ece"] = calibration_gaps(bin_sums(scored["confidence"], scored["correct"]))
    return found


def paired(first: Tensor, second: Tensor, data: HeldOut, *, least: float = 0.0) -> tuple[float, float]:
    """Mean difference of two scores (m,) of the same data, and its standard error over inputs, which is at least `least`."""
    gap, group = first - second, data.score_groups()
    mean = gap.mean()
    # The questions of one input are not independent: their differences are added up first.
    total = torch.zeros(int(group.max()) + 1, dtype=gap.dtype).index_add_(0, group, gap - mean)
    if len(total) == 1:
        return float(mean), math.inf  # one input has no spread
    error = float(total.square().sum().sqrt()) / len(gap) / math.sqrt(data.independent)
    return float(mean), max(error, least)


def share_error(data: HeldOut) -> float:
    """Smallest standard error of a share: where all data are alike, a few are still a few."""
    return 1 / (data.independent * (int(data.score_groups().max()) + 1) + 2)
