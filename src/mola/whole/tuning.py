"""Candidates for the prior precision, where every pass takes Jacobians: they are made once for all candidates of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from tqdm.auto import tqdm

from mola.errors import DataError, located
from mola.float64 import exact
from mola.laplace import LogitMoments, Posterior
from mola.likelihood import CATEGORICAL
from mola.links import Link
from mola.network import Inputs, as_batch, batch_count, call, peek, undisturbed
from mola.network.calling import copied
from mola.tuning.candidates import HeldOut, Problem
from mola.whole.component import WholeComponent
from mola.whole.jacobians import Directions
from mola.whole.links import WeightDraws
from mola.whole.spread import JointSpread, contrasts, plain, seen_and_shift

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
        tried = _Tried(component, inputs, precisions)
        mean = tried.mean(self.link)
        rows = torch.arange(len(mean), device="cpu")  # in the features' place: which data a link asks about
        return [self.link(LogitMoments(mean, rows, tried.at(index))) for index in range(len(precisions))]


class _Tried:
    """One component at one batch under every candidate. What a link asks for is made then, for all candidates at once.

    In float64 on the CPU.
    """

    def __init__(self, component: WholeComponent, inputs: Inputs, precisions: Sequence[float]) -> None:
        self.component, self.inputs, self.precisions = component, inputs, precisions

    def mean(self, link: Link) -> Tensor:
        """Logits (n, C), from the pass that makes what the link will ask for, as far as it says."""
        if link.needs_covariance:
            return self.joints[0]
        return (self.variances if link.cooled_by == "variance" else self.contrast_variances)[0]

    def at(self, index: int) -> Posterior:
        """What a link sees of the posterior at one candidate."""
        return cast("Posterior", _AtCandidate(self, index))  # a link asks no more of a posterior than this has

    @cached_property
    def variances(self) -> tuple[Tensor, Tensor]:
        """Logits (n, C), and variances (L, n, C) of the logits."""
        return self._along(plain)

    @cached_property
    def contrast_variances(self) -> tuple[Tensor, Tensor]:
        """Logits (n, C), and variances (L, n, C) of the centred logits."""
        return self._along(contrasts)

    def _along(self, directions: Directions) -> tuple[Tensor, Tensor]:
        grid = torch.tensor(self.precisions, dtype=torch.float64, device="cpu")
        mean, variances = self.component.variances(self.inputs, grid, directions)
        return exact(mean).cpu(), exact(variances).cpu()

    @cached_property
    def joints(self) -> tuple[Tensor, list[Tensor]]:
        """Logits (n, C), and for each candidate their covariance (n, C, C) along `seen_and_shift`."""
        portions = [
            (
                exact(logits).cpu(),
                [exact(self.component.covariance(rows, spectrum, one)).cpu() for one in self.precisions],
            )
            for logits, rows, spectrum in self.component.rows(self.inputs, seen_and_shift)
        ]
        mean = torch.cat([logits for logits, _ in portions])
        return mean, [torch.cat(parts) for parts in zip(*(found for _, found in portions), strict=True)]


class _AtCandidate:
    """One candidate's moments of some rows, read off `_Tried`."""

    def __init__(self, tried: _Tried, index: int) -> None:
        self.tried, self.index = tried, index

    def variance(self, rows: Tensor) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.tried.variances[1][self.index, rows]

    def contrast_variance(self, rows: Tensor) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self.tried.contrast_variances[1][self.index, rows]

    @property
    def _joint(self) -> JointSpread:
        return JointSpread(self.tried.joints[0].shape[1])

    def _of(self, rows: Tensor) -> Tensor:
        return self.tried.joints[1][self.index][rows].flatten(1)

    @property
    def noise_size(self) -> int:
        """Number of independent normals that one draw of the logits takes."""
        return self._joint.noise_size

    def average_contrast_variance(self) -> Tensor:
        """Ones (C,), as for `JointSpread`."""
        return torch.ones(self.tried.component.curvature.classes, dtype=torch.float64, device="cpu")

    def covariance(self, rows: Tensor) -> Tensor:
        """Covariance (n, C, C) of the logits."""
        return self._joint.covariance(self._of(rows))

    def contrast_covariance(self, rows: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""
        return self._joint.contrast_covariance(self._of(rows))

    def perturb(self, rows: Tensor, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift."""
        return self._joint.perturb(self._of(rows), noise)
