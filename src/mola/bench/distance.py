"""How sure the methods are of inputs that are scaled away from the data, and what theory says about it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mola.bench.demo_result import Array, DistanceResult
from mola.bench.methods import Contestants
from mola.metrics import mean_confidence
from mola.posterior import MoLA

__all__ = ["walk_away"]

SCALES = np.logspace(0, 6, 25)
PRECISIONS = np.logspace(-16, 4, 41)


def walk_away(contestants: Contestants, kinds: Mapping[str, Tensor], test: Tensor, probe: str) -> DistanceResult:
    """Scale inputs by up to a million, and compare with the exact limit and the Theorem's bound.

    Args:
        contestants: the four methods, of networks without biases.
        kinds: inputs to scale, by name.
        test: in-distribution inputs.
        probe: which of `kinds` to follow over the prior precisions.

    Returns:
        Confidence by distance, and far away by prior precision.
    """
    methods, tuned = contestants.predictors, contestants.tuned()
    curves = {
        kind: {name: _curve(method, inputs) for name, method in methods.items()} for kind, inputs in kinds.items()
    }
    limits = {kind: {name: _limit(method, inputs) for name, method in tuned.items()} for kind, inputs in kinds.items()}
    bounds = {kind: {name: _bound(method, inputs) for name, method in tuned.items()} for kind, inputs in kinds.items()}
    at = [methods["MoLA"].with_prior_precision(float(precision)) for precision in PRECISIONS]
    return DistanceResult(
        scales=SCALES,
        curves=curves,
        limits=limits,
        bounds=bounds,
        precisions=PRECISIONS,
        test_confidence=np.array([mean_confidence(posterior(test)) for posterior in at]),
        limit=np.array([_limit(posterior, kinds[probe]) for posterior in at]),
        bound=np.array([_bound(posterior, kinds[probe]) for posterior in at]),
    )


def _curve(method: MoLA, inputs: Tensor) -> Array:
    return np.array([mean_confidence(method(float(scale) * inputs)) for scale in SCALES])


def _limit(method: MoLA, inputs: Tensor) -> float:
    return mean_confidence(method.far_field_limit(inputs))


def _bound(method: MoLA, inputs: Tensor) -> float:
    return float(torch.mean(method.confidence_bound(inputs)))
