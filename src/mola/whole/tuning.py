"""Candidates for the prior precision, where every pass takes Jacobians: they are made once for all candidates of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from mola.errors import DataError, located
from mola.features import batch_count, peek
from mola.likelihood import CATEGORICAL
from mola.links import Probit
from mola.networks import Inputs, as_batch, call, undisturbed
from mola.networks.habits import copied
from mola.tuning import HeldOut, Problem
from mola.whole.component import WholeComponent
from mola.whole.links import WeightDraws
from mola.whole.spread import contrasts, logit_moments, plain, seen_and_shift, variance_moments

__all__ = ["HeldInputs", "WholeProblem", "read_inputs"]


@dataclass(frozen=True)
class HeldInputs(HeldOut):
    """Held-out data with their inputs, which stay in memory while candidates are compared."""

    batches: Sequence[Inputs] = field(default_factory=tuple)


def read_inputs(
    components: Sequence[WholeComponent], loader: Iterable[Any], *, where: str, labelled: bool, progress: bool
) -> HeldInputs:
    """Read a loader once: inputs, logits and labels, in main memory.

    Args:
        components: whose networks look at the data.
        loader: any iterable of batches.
        where: what the loader is for.
        labelled: whether every batch must carry labels.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        The data.

    Raises:
        DataError: if labels are missing, or logits are not finite.
    """
    _, batches = peek(loader, f"the {where}")
    inputs: list[Inputs] = []
    logits: list[list[Tensor]] = [[] for _ in components]
    labels: list[Tensor] = []
    bar = tqdm(batches, desc=where, total=batch_count(loader), disable=None if progress else True, leave=False)
    with undisturbed(*(component.network for component in components)):
        for index, raw in enumerate(bar):
            place = f"batch {index} of the {where}"
            batch = as_batch(raw, place)
            if batch.labels is None and labelled:
                message = f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'."
                raise DataError(message)
            inputs.append(copied(batch.inputs))  # a loader may use its memory again for the next batch
            for own, component in zip(logits, components, strict=True):
                with located(place):
                    own.append(call(component.network, batch.inputs).cpu().clone())
            if batch.labels is not None:
                labels.append(CATEGORICAL.check_labels(batch.labels, logits[0][-1], place).cpu().clone())
    if labels and len(labels) < len(inputs):
        message = f"the {where}: {len(labels)} of {len(inputs)} batches have labels. Give them to all, or to none."
        raise DataError(message)
    joined = [torch.cat(own) for own in logits]
    nothing = [torch.zeros(len(joined[0]), 0) for _ in components]
    return HeldInputs(nothing, joined, torch.cat(labels) if labels else None, batches=inputs)


@dataclass(frozen=True)
class WholeProblem(Problem):
    """A mixture over whole networks whose prior precision is to be chosen.

    The Jacobians of a batch are made once for all candidates of a grid, and again for those by which it grows.
    """

    components: Sequence[WholeComponent] = ()
    sampling: WeightDraws | None = None

    def _tried(self, data: HeldOut, precisions: Sequence[float]) -> Iterator[tuple[slice, slice, Tensor]]:
        assert isinstance(data, HeldInputs)
        mixing, start = torch.stack([self.weights_at(precision) for precision in precisions]), 0
        bar = tqdm(data.batches, desc="candidates", disable=None if self.progress else True, leave=False)
        for inputs in bar:
            networks = [component.network for component in self.components]
            with undisturbed(*networks), torch.no_grad():
                members = [self._members(component, inputs, precisions) for component in self.components]
            for index, probs in enumerate(zip(*members, strict=True)):
                mixed = sum(weight * one for weight, one in zip(mixing[index], probs, strict=True))
                assert isinstance(mixed, Tensor)
                yield slice(index, index + 1), slice(start, start + len(mixed)), mixed.T[None]
            start += len(mixed)

    def _members(self, component: WholeComponent, inputs: Inputs, precisions: Sequence[float]) -> list[Tensor]:
        """Probabilities (n, C) of one component at every candidate, in float64 on the CPU."""
        if self.sampling is not None:
            drawn = [
                component.draws(inputs, self.sampling.samples, self.sampling.seed, precision).mean(0)
                for precision in precisions
            ]
            return [probs.cpu().double() for probs in drawn]
        grid = torch.tensor(precisions, dtype=torch.float64, device="cpu")
        if self.link.needs_covariance:
            portions = [
                (logits, [spectrum.covariance(rows, precision) for precision in precisions])
                for logits, rows, spectrum in component.rows(inputs, seen_and_shift)
            ]
            mean = torch.cat([logits for logits, _ in portions])
            joints = [torch.cat(parts) for parts in zip(*(found for _, found in portions), strict=True)]
            return [self.link(logit_moments(mean, joint)).cpu().double() for joint in joints]
        # The plain probit alone asks for the variance of the logits; the others see what the softmax sees.
        directions = plain if isinstance(self.link, Probit) else contrasts
        mean, variances = component.variances(inputs, grid, directions)
        mean, variances = mean.cpu().double(), variances.cpu().double()
        return [self.link(variance_moments(mean, variance)) for variance in variances]
