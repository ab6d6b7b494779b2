"""Held-out features and outputs, which are read once, checked, and used to score every candidate in a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from molaplace.distributed import Team
from molaplace.errors import DataError, warned
from molaplace.likelihoods import ClassificationLikelihood, Gaussian, Likelihood
from molaplace.network import (
    IGNORE_INDEX,
    Captured,
    Head,
    Layout,
    Rows,
    batch_count,
    check_loader,
    evaluating,
    stream,
    unwrapped,
)
from molaplace.options import counted
from molaplace.outliers import OutlierTerms
from molaplace.rules.label_checks import check_accuracy, check_class_order, check_units
from molaplace.settings import FeatureScale, Reference
from molaplace.structures.distance import ClassDistance

POSITIONS_PER_INPUT = 256
"""Number of positions drawn from each input if the outputs are dense. Neighbouring positions are similar, so more positions would add
little."""

NORM_QUANTILE = 0.99
"""Feature norms up to this quantile of the validation data's norms count as typical."""

LEAST_DISTANCE = 0.1
"""Lower bound on the validation data's median distance, relative to the distance of the training data. A smaller median means that
most validation data are copies of training data and do not represent new data."""

NORM_RATIO = 4.0
"""Validation and training data seem to be preprocessed differently if their feature norms differ by at least this factor."""

TINY = 1e-300

NO_SPREAD = 1e-6
"""Relative spread below which outlier scores are treated as identical."""


@dataclass(frozen=True, kw_only=True)
class HeldOut(Captured):
    """Features, outputs and labels of all held-out data, on the CPU and without positions."""

    networks: Sequence[nn.Module]
    """The networks whose features and outputs these are."""
    likelihood: Likelihood
    independent_share: float
    """Ratio of the number of independent data points to the number of rows. The ratio is below 1 for dense outputs, because the
    positions of one input are correlated."""
    where: str = "validation loader"

    def by_rows(self, compute: Callable[[Rows], Tensor]) -> Tensor:
        """Return the results (n, ...) of a function of rows, which is applied to chunks."""
        return torch.cat([compute(rows) for rows in self.chunks()])

    def of_first(self, count: int) -> HeldOut:
        """Return the data as the first `count` networks alone see them."""
        parts = {name: getattr(self, name)[:count] for name in ("networks", "heads", "features", "outputs")}
        return replace(self, **parts)

    def check_networks(self, networks: Sequence[nn.Module], likelihood: Likelihood) -> None:
        """Raise `DataError` unless the data were read with these networks and for a likelihood with the same name."""
        pairs = zip(self.networks, networks, strict=False)
        differences = [index for index, (own, other) in enumerate(pairs) if unwrapped(own) is not unwrapped(other)]
        reason = None
        if len(self.networks) != len(networks):
            reason = f"with {counted(len(self.networks), 'network')}, but the posterior has {len(networks)}"
        elif differences:
            reason = f"with other networks than those of the posterior (networks[{differences[0]}])"
        elif self.likelihood.name != likelihood.name:
            reason = f"for likelihood {self.likelihood.name!r}, but the posterior has {likelihood.name!r}"
        if reason is not None:
            raise DataError(f"these data were read {reason}. Pass the loader itself.", place=f"the {self.where}")

    def check_labels(self) -> None:
        """Raise `DataError` if labels and outputs order the classes differently; warn if predictions are no better than chance."""
        likelihood = self.likelihood
        if self.labels is None:
            return
        if isinstance(likelihood, ClassificationLikelihood):
            targets = likelihood.targets(self.labels)
            predicted = [likelihood.predicted(outputs) for outputs in self.outputs]
            if likelihood.mutually_exclusive:
                check_class_order(targets, predicted, self.where)
            chance = 1 / likelihood.num_choices(self.outputs[0].shape[1])
            check_accuracy(targets, predicted, chance, self.independent_share, self.where)
        elif isinstance(likelihood, Gaussian):
            means = [likelihood.in_units(likelihood.means(outputs)) for outputs in self.outputs]
            check_units(torch.stack(means).mean(0), self.labels, self.where)

    def score_groups(self) -> Tensor:
        """Return the index (m,) of the row to which each score belongs.

        Multi-label data have a score for each known label of a row, and dense data have a row for each position of an input.
        """
        rows = torch.arange(len(self), device="cpu")
        if self.labels is not None:
            rows = self.likelihood.rows_of_scores(self.labels)
        groups: Tensor = torch.unique(rows, return_inverse=True)[1]
        return groups

    def num_independent(self) -> float:
        """Return the number of independent data: the number of inputs, however many positions or labels they have."""
        return self.independent_share * (int(self.score_groups().max()) + 1)

    def accuracy(self) -> tuple[float, float]:
        """Return the mean accuracy of the networks on these data, and its standard error."""
        likelihood = self.likelihood
        assert isinstance(likelihood, ClassificationLikelihood)
        if self.labels is None:
            raise DataError("this rule needs labels. Pass batches of (inputs, labels).")
        targets = likelihood.targets(self.labels)
        known = targets >= 0
        correct = [(likelihood.predicted(outputs) == targets) & known for outputs in self.outputs]
        # Sum over the labels of each input first, because they are not independent.
        width = math.prod(targets.shape[1:])
        num_correct = torch.stack(correct).double().mean(0).view(len(self), width).sum(1)
        num_known = known.double().view(len(self), width).sum(1)
        total = float(num_known.sum())
        accuracy = float(num_correct.sum()) / total
        spread = float((num_correct - accuracy * num_known).square().sum()) / self.independent_share
        # The error is at least 1 / (count + 2), because the spread is 0 if all predictions are correct, however few they are.
        return accuracy, max(math.sqrt(spread) / total, 1 / (self.independent_share * total + 2))

    def notes_on_norms(self, reference: Reference, distances: Sequence[ClassDistance]) -> tuple[str, ...]:
        """Warn, and return a note, if feature norms differ greatly from those of the training data."""
        logs = [
            math.log(max(scale.norm, TINY) / max(distance.training_norm, TINY))
            for scale, distance in zip(reference.scales, distances, strict=True)
        ]
        largest = max(logs, key=abs)
        if abs(largest) < math.log(NORM_RATIO):
            return ()
        return (
            warned(
                f"the features of the {self.where} are {math.exp(largest):.3g} times as large as those of the training data. Check "
                f"that both are preprocessed in the same way."
            ),
        )


def joined(parts: Sequence[HeldOut]) -> HeldOut:
    """Return the held-out data of several mixtures as those of one, in the order of the mixtures."""
    if len(parts) == 1:
        return parts[0]
    outputs = [torch.cat(values) for values in zip(*(part.outputs for part in parts), strict=True)]
    labels = [part.labels for part in parts if part.labels is not None]
    return replace(
        parts[0],
        features=[torch.cat(values) for values in zip(*(part.features for part in parts), strict=True)],
        outputs=outputs,
        layout=Layout.of(outputs[0], -1),
        labels=torch.cat(labels) if labels else None,
    )


def feature_scales(log_distances: Tensor, log_norms: Tensor, distances: Sequence[ClassDistance]) -> Reference:
    """Return each network's median distance and 99 % quantile of the norms, given log distances (K, n) and log norms (K, n)."""
    medians = np.quantile(log_distances.numpy(), 0.5, axis=1)
    norms = np.quantile(log_norms.numpy(), NORM_QUANTILE, axis=1)
    scales = []
    for distance, median, norm in zip(distances, medians, norms, strict=True):
        scales.append(FeatureScale(max(math.exp(median), LEAST_DISTANCE * distance.training_distance), math.exp(norm)))
    return Reference(tuple(scales))


def with_scores(reference: Reference, terms: OutlierTerms) -> Reference:
    """Return the reference plus statistics of the score's terms: the mean and spread of each, and the mean energies."""
    score = []
    for term in (terms.far_field, terms.energy, terms.departure):
        mean = float(term.mean())
        spread = float(term.std()) if len(term) > 1 else 0.0
        score.append((mean, spread if spread > NO_SPREAD * (1 + abs(mean)) else 1.0))
    return replace(reference, score=tuple(score), energies=tuple(terms.energies.mean(1).tolist()))


def read_held_out(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | None],
    loader: Iterable[Any],
    likelihood: Likelihood,
    *,
    where: str,
    labelled: bool | None,
    progress: bool = False,
    team: Team | None = None,
) -> HeldOut:
    """Run every network once on each batch of a loader, and keep the features, outputs and labels of all processes.

    Heads are None if only outputs are needed. Labels are required if `labelled` is True, ignored if it is False, and otherwise read if
    present. `where` names the loader in messages.
    """
    check_loader(loader, where)
    team = Team.single() if team is None else team
    num_inputs = 0
    parts = []
    batches = stream(
        networks,
        heads,
        loader,
        where=where,
        likelihood=likelihood,
        labelled=labelled,
        required=team.size == 1,
        progress=progress,
        total=batch_count(loader),
        positions=POSITIONS_PER_INPUT,
        first_input=team.unique(0),  # each process draws different positions
        ignore_index=IGNORE_INDEX if heads[0] is None else heads[0].ignore_index,
    )
    with evaluating(*networks):
        for batch in batches:
            num_inputs += batch.used_inputs
            captured = batch.on_cpu()
            labels = [] if captured.labels is None else [captured.labels]
            parts.append([*captured.features, *captured.outputs, *labels])
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    ranks = [(inputs, rank_columns) for inputs, rank_columns in team.collect((num_inputs, columns)) if rank_columns]
    if not ranks:
        raise DataError(f"the {where} is empty on every rank. Pass at least one batch.")
    columns = [torch.cat(column) for column in zip(*(rank_columns for _, rank_columns in ranks), strict=True)]
    count = len(networks)
    outputs = columns[count : 2 * count]
    return HeldOut(
        networks=networks,
        heads=heads,
        features=columns[:count],
        outputs=outputs,
        layout=Layout.of(outputs[0], -1),
        labels=columns[2 * count] if len(columns) > 2 * count else None,
        likelihood=likelihood,
        independent_share=sum(inputs for inputs, _ in ranks) / len(outputs[0]),
        where=where,
    )
