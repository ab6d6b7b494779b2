"""Scores of candidates on held-out data: one loop over chunks of rows, with many candidates at once where the link allows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mola.metrics import bin_sums, calibration_gaps
from mola.scaling import scale_factors
from mola.tuning.held_out import HeldOut

if TYPE_CHECKING:
    from mola.component import MixtureRows
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

    def __getitem__(self, part: slice) -> Candidates:
        return Candidates(*(getattr(self, one.name)[part] for one in fields(self)))


def predictives(posterior: MoLA, data: HeldOut, candidates: Candidates) -> Iterator[tuple[list[Any], Tensor | None]]:
    """Predictive distributions of held-out data, chunk by chunk: parts of the candidates in order, and the chunk's labels."""
    vectorised = (
        posterior.link.variance_only or not posterior.likelihood.discrete
    ) and posterior.weighting != "evidence"
    size, outputs = (len(candidates) if vectorised else 1), data.outputs[0].shape[1]
    row = max(size * posterior.link.row_size(outputs), max(phi.shape[1] for phi in data.phi))
    for rows, labels in data.chunks(NUMBERS_AT_ONCE // row):
        parts = (candidates[start : start + size] for start in range(0, len(candidates), size))
        yield [predictive_at(posterior, rows, part) for part in parts], labels


def scores(posterior: MoLA, data: HeldOut, candidates: Candidates) -> dict[str, Tensor]:
    """Scores (L, m) of every candidate for each datum, or for each known question of multi-label data, over all processes.

    Args:
        posterior: the mixture; its own prior precision and scaling are not used.
        data: with labels.
        candidates: to score.
    """
    parts: list[dict[str, Tensor]] = []
    for found, labels in predictives(posterior, data, candidates):
        assert labels is not None
        scored = [one.scores(labels) for one in found]
        parts.append({name: torch.cat([one[name] for one in scored]) for name in scored[0]})
    names = team_names(data, parts)
    return {
        name: data.gather(torch.cat([part[name] for part in parts], 1).T.contiguous() if parts else None).T
        for name in names
    }


def confidence_and_uniformity(posterior: MoLA, data: HeldOut, candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Mean confidence (L,) of every candidate, and mean cross-entropy (L,) of the uniform distribution to its predictions."""
    likelihood: Any = posterior.likelihood
    tiny, rows = torch.finfo(torch.float64).tiny, []
    for found, _ in predictives(posterior, data, candidates):
        choices = likelihood.choices(torch.cat([one.point() for one in found]))
        each = [choices.amax(-1), -choices.clamp_min(tiny).log().mean(-1)]
        rows.append(torch.stack([one.flatten(1) for one in each], -1).movedim(1, 0))  # (m, L, 2)
    confidence, uniform = data.gather(torch.cat(rows) if rows else None).mean(0).unbind(-1)
    return confidence, uniform


def team_names(data: HeldOut, parts: Sequence[dict[str, Tensor]]) -> list[str]:
    """Names of the scores, also on a rank without data."""
    return next(names for names in data.team.collect(list(parts[0]) if parts else None) if names)


def predictive_at(posterior: MoLA, rows: MixtureRows, candidates: Candidates) -> Any:
    """The predictive distribution of n rows under L candidates: with a leading dimension L, also for one."""
    likelihood, weights = posterior.likelihood, posterior.weights
    if posterior.weighting == "evidence":
        weights = posterior.with_prior_precision(candidates.precision[0].tolist()).weights
    single = len(candidates) == 1
    spreads = []
    for index, (component, phi) in enumerate(zip(posterior.components, rows.phi, strict=True)):
        precision = candidates.precision[:, index]
        spreads.append(component.spread(phi, float(precision[0]) if single else precision))
    scale = None
    if bool((candidates.temperature != 1).any() or (candidates.exponent != 0).any()):
        factors = _factors(posterior, rows, candidates, weights)  # (L, K, n, 1)
        scale = list((factors[0] if single else factors.movedim(1, 0)).unbind(0))
    pooling: Any = candidates.pooling[:, None, None]
    if bool((candidates.pooling == 1).all()):
        pooling = 1.0
    elif single:
        pooling = float(candidates.pooling[0])
    options: dict[str, Any] = {} if likelihood.discrete else {"noises": posterior.noise_variances(rows)}
    found = likelihood.predictive(
        rows.outputs, spreads, weights, posterior.link, scale=scale, pooling=pooling, **options
    )
    if not single:
        return found
    # A leading dimension of size 1; a mixture of normals has its components first.
    tensors = {one.name: getattr(found, one.name) for one in fields(found) if one.name != "weights"}  # type: ignore[arg-type]
    return replace(
        found, **{name: value[None] if likelihood.discrete else value[:, None] for name, value in tensors.items()}
    )  # type: ignore[type-var]


def _factors(posterior: MoLA, rows: MixtureRows, candidates: Candidates, weights: Tensor) -> Tensor:
    count, number = len(rows.outputs[0]), len(posterior.components)
    if not bool((candidates.exponent != 0).any()):
        return candidates.temperature[:, None, None, None].expand(-1, number, count, 1)
    log_distance, log_norm = posterior.log_distances(rows)
    relative = posterior.scaling.log_distance(log_distance, weights)
    discrete = posterior.likelihood.discrete
    excess = posterior.scaling.log_excess(log_norm) if discrete else torch.zeros_like(log_norm)
    onset = candidates.onset.log()
    if bool((onset == onset[0]).all()):
        return scale_factors(relative - onset[0], excess, candidates.temperature, candidates.exponent)
    return torch.cat(
        [
            scale_factors(relative - one, excess, candidates.temperature[i : i + 1], candidates.exponent[i : i + 1])
            for i, one in enumerate(onset)
        ]
    )


def averages(scored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean of each score over the data (L,), and the calibration error "ece" where there are confidences."""
    found = {name: values.mean(1) for name, values in scored.items()}
    if "confidence" in scored:
        found["ece"] = calibration_gaps(bin_sums(scored["confidence"], scored["correct"]))
    return found


def paired(first: Tensor, second: Tensor, independent: float = 1.0) -> tuple[float, float]:
    """Mean difference of two scores (m,) of the same data, and its standard error."""
    gap = first - second
    count = max(1.0, independent * len(gap))
    # At least 1 / (count + 2), as for a share: a few data are still a few where all are alike.
    return float(gap.mean()), max(float(gap.std(unbiased=False)) / math.sqrt(count), 1 / (count + 2))
