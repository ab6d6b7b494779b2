r"""Cross-fitting: one objective for several mixtures, each of which has its own held-out data.

With few data, a validation set that is large enough to tune on leaves too few data for training. Cross-fitting divides the data into F
parts and fits F mixtures, each to all parts but one. Each candidate theta is then scored on every datum, by the mixture that has not
seen it:

    L(theta) = 1/n sum_f sum_{i in part f} -log p_f(y_i | x_i, theta)

The chosen settings are applied to a mixture that was fitted to all data. They are slightly cautious for this mixture, because each of
the F mixtures has seen fewer data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from molaplace.network import Layout
from molaplace.rules.held_out import HeldOut
from molaplace.rules.objective import Objective, ScoreFunction, label_scores
from molaplace.settings import Settings


@dataclass(frozen=True, kw_only=True)
class JoinedHeldOut(HeldOut):
    """The held-out data of all mixtures."""

    parts: Sequence[HeldOut]
    """The held-out data of each mixture."""


@dataclass(frozen=True, kw_only=True)
class CrossFitted(Objective):
    """The objectives of all mixtures as one."""

    parts: Sequence[Objective]
    """The objective of each mixture."""

    def scores(
        self, settings: Settings, score: ScoreFunction = label_scores, data: HeldOut | None = None
    ) -> dict[str, Tensor]:
        """Return the scores (L, m) of L candidates on the data of all mixtures, in the order of the mixtures."""
        joined = self.data if data is None else data
        assert isinstance(joined, JoinedHeldOut)
        pairs = zip(self.parts, joined.parts, strict=True)
        scores = [objective.scores(settings, score, part) for objective, part in pairs]
        return {name: torch.cat([part[name] for part in scores], 1) for name in scores[0]}


def cross_fitted(objectives: Sequence[Objective]) -> CrossFitted:
    """Join the objectives of several mixtures of the same form, each with held-out data of its own."""
    first = objectives[0]
    distances = first.distances
    if distances is not None:
        distances = replace(distances, relative_logs=lambda: _relative_logs(objectives))
    values = vars(first) | {
        "held_out": _join([objective.data for objective in objectives]),
        "log_evidence": [partial(_log_evidence, objectives, index) for index in range(first.num_networks)],
        "with_noise": lambda factors: cross_fitted([objective.with_noise(factors) for objective in objectives]),
        "read": lambda loader, where: _join([objective.read(loader, where) for objective in objectives]),
        "distances": distances,
    }
    return CrossFitted(**values, parts=objectives)


def _join(parts: Sequence[HeldOut]) -> JoinedHeldOut:
    first = parts[0]
    outputs = [torch.cat(values) for values in zip(*(part.outputs for part in parts), strict=True)]
    labels = [part.labels for part in parts if part.labels is not None]
    values = vars(first) | {
        "features": [torch.cat(values) for values in zip(*(part.features for part in parts), strict=True)],
        "outputs": outputs,
        "layout": Layout.of(outputs[0], -1),
        "labels": torch.cat(labels) if labels else None,
    }
    return JoinedHeldOut(**values, parts=parts)


def _relative_logs(objectives: Sequence[Objective]) -> Tensor:
    return torch.cat([objective.distances.relative_logs() for objective in objectives if objective.distances])


def _log_evidence(objectives: Sequence[Objective], index: int, precision: Tensor) -> Tensor:
    return torch.stack([objective.log_evidence[index](precision) for objective in objectives]).sum(0)
