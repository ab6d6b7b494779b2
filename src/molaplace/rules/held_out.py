"""Held-out features and outputs, which are read once, checked, and used to score every candidate in a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from molaplace.distributed import Team
from molaplace.errors import DataError, warn, warned
from molaplace.likelihoods import ClassificationLikelihood, Gaussian, Likelihood
from molaplace.network import IGNORE_INDEX, Head, Rows, batch_count, check_loader, evaluating, rows_at_once, stream
from molaplace.numerics import to_float64
from molaplace.rules.class_order import check_class_order, check_label_order
from molaplace.settings import FeatureScale, Reference
from molaplace.structures.distance import ClassDistance

POSITIONS_KEPT = 256
"""Number of positions drawn from each input if the outputs are dense. Neighbouring positions are similar, so more positions would add
little."""

LONG = 0.99
"""Feature norms up to this quantile of the validation data's norms count as typical."""

COPIES = 0.1
"""Lower bound on the validation data's median distance, relative to the distance of the training data. A smaller median means that
most validation data are copies of training data and do not represent new data."""

FAR_OFF = 2.0
"""Root mean squared error, in standard deviations of the targets, above which the targets seem to be in the wrong units."""

UNLIKE = 4.0
"""Validation and training data seem to be preprocessed differently if their feature norms differ by at least this factor."""

TINY = 1e-300

NO_SPREAD = 1e-6
"""Relative spread below which outlier scores are treated as identical."""


@dataclass(frozen=True)
class HeldOut:
    """Features, outputs and labels of held-out data, on the CPU."""

    phi: Sequence[Tensor]
    """Features (n, P) of each network, including the constant 1 if the head has a bias, in the network's precision."""
    outputs: Sequence[Tensor]
    """Outputs (n, C) of each network, in float64."""
    labels: Tensor | None
    likelihood: Likelihood
    independent: float
    """Ratio of the number of independent data points to the number of rows. The ratio is below 1 for dense outputs, because the
    positions of one input are correlated."""
    where: str = "validation loader"
    team: Team = field(default_factory=Team.single)
    """Processes among which the data are divided. Results are computed from the data of all processes."""

    def __len__(self) -> int:
        return len(self.outputs[0])

    def chunks(self, row_size: int = 512) -> Iterator[Rows]:
        """Yield the rows in float64, in chunks of bounded size; `row_size` has the same meaning as for `Captured`."""
        size = rows_at_once(self.phi, row_size)
        for start in range(0, max(len(self), 1), size):  # on a rank without data, one empty chunk
            part = slice(start, start + size)
            labels = None if self.labels is None else self.labels[part]
            yield Rows([to_float64(phi[part]) for phi in self.phi], [values[part] for values in self.outputs], labels)

    def checked(self, *, labelled: bool | None) -> HeldOut:
        """Return these data; raise `DataError` if labels are required but missing."""
        if labelled and self.labels is None:
            raise DataError("no labels were read. Pass batches of (inputs, labels).", place=f"the {self.where}")
        return self

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes, in order of rank."""
        return self.team.gather(rows)

    def gather_from_chunks(self, compute: Callable[[Rows], Tensor]) -> Tensor:
        """Return the results (n, ...) of a function of rows for the data of all processes."""
        return self.gather(torch.cat([compute(rows) for rows in self.chunks()]))

    def check_labels(self) -> None:
        """Raise `DataError` if labels and outputs order the classes differently; warn if predictions are no better than chance."""
        if self.labels is not None and isinstance(self.likelihood, Gaussian):
            self._check_targets(self.likelihood, self.gather(self.labels))
        if self.labels is None or not isinstance(self.likelihood, ClassificationLikelihood):
            return
        targets = self.gather(self.likelihood.targets(self.labels))
        predicted = [self.gather(self.likelihood.predicted(outputs)) for outputs in self.outputs]
        if not bool((targets >= 0).any()):
            raise DataError("every label is missing. At least one label is needed.", place=f"the {self.where}")
        if self.likelihood.mutually_exclusive:
            check_class_order(targets, predicted, self.where)
        else:
            probs = torch.stack([self.likelihood.probabilities(outputs) for outputs in self.outputs]).mean(0)
            check_label_order(self.gather(self.labels), self.gather(probs), self.where)
        known = targets >= 0
        accuracies = [float(((classes == targets) & known).sum() / known.sum()) for classes in predicted]
        chance = 1 / self.likelihood.num_choices(self.outputs[0].shape[1])
        error = math.sqrt(chance * (1 - chance) / max(1.0, self.independent * int(known.sum())))
        guessing = [index for index, accuracy in enumerate(accuracies) if accuracy < chance + 2 * error]
        if chance + 2 * error >= 1:
            warn(
                f"the {self.where} has too few labels ({int(known.sum())}) to distinguish the networks from guessing. Tune on more "
                "data, or use rule='evidence', which needs no validation data."
            )
        elif guessing:
            which = (
                "the networks" if len(guessing) == len(predicted) else ", ".join(f"networks[{one}]" for one in guessing)
            )
            warn(
                f"only {max(accuracies[one] for one in guessing):.1%} of the labels in the {self.where} agree with {which}, whereas "
                f"chance alone would give {chance:.1%}. Check that the networks are trained, that the labels belong to these inputs, "
                f"and that the inputs are preprocessed as in training."
            )
        elif len(found := torch.unique(targets[known])) == 1:
            warn(
                f"every label in the {self.where} is {int(found)}. Settings tuned for one class may not suit the others. Pass "
                "validation data from every class."
            )

    def _check_targets(self, likelihood: Gaussian, targets: Tensor) -> None:
        means = [self.gather(likelihood.in_units(likelihood.means(outputs))) for outputs in self.outputs]
        error = (torch.stack(means).mean(0) - targets).square().mean(0).sqrt()
        deviation = targets.std(0, correction=0)
        if len(targets) > 1 and bool((error > FAR_OFF * deviation).any()):
            place = int((error / deviation).argmax())
            warn(
                f"the root mean squared error on the {self.where} is {float(error[place]):.3g}, but the standard deviation of the "
                f"targets is only {float(deviation[place]):.3g}. If the targets were standardised in training, pass "
                "mola.likelihoods.Gaussian(location=..., scale=...)."
            )

    def score_groups(self) -> Tensor:
        """Return the index (m,) of the input to which each score belongs. Multi-label data have a score for each known label."""
        own = torch.arange(len(self), device="cpu")
        if self.labels is not None and isinstance(self.likelihood, ClassificationLikelihood):
            targets = self.likelihood.targets(self.labels)
            if targets.dim() == 2:
                own = (targets >= 0).nonzero()[:, 0]
        found: Tensor = torch.unique(self.gather(own + (self.team.rank << 40)), return_inverse=True)[1]
        return found

    def accuracy(self) -> tuple[float, float]:
        """Return the mean accuracy of the networks on these data, and its standard error."""
        likelihood = self.likelihood
        assert isinstance(likelihood, ClassificationLikelihood)
        if self.labels is None:
            raise DataError("this rule needs labels. Pass batches of (inputs, labels).")
        targets = likelihood.targets(self.labels)
        known = targets >= 0
        right = torch.stack([(likelihood.predicted(one) == targets) & known for one in self.outputs]).double().mean(0)
        right, counted = (
            self.gather(one.double().reshape(len(self), math.prod(one.shape[1:])).sum(1)) for one in (right, known)
        )
        total = float(counted.sum())
        accuracy = float(right.sum()) / total
        # Sum the errors within each input first, because the labels of one input are not independent.
        spread = float((right - accuracy * counted).square().sum()) / self.independent
        # The error is at least 1 / (count + 2), because the spread is 0 if all predictions are correct, however few they are.
        return accuracy, max(math.sqrt(spread) / total, 1 / (self.independent * total + 2))

    def feature_scales(self, distances: Sequence[ClassDistance | None]) -> Reference:
        """Return, for each network, the median distance and the 99 % quantile of the feature norms."""
        scales = []
        for distance, phi in zip(distances, self.phi, strict=True):
            assert distance is not None
            parts = [distance.logs(to_float64(rows)) for rows in torch.split(phi, 4096)]
            rows = torch.stack([torch.cat([part[field] for part in parts]) for field in (0, 1)], 1) if parts else None
            logs = self.gather(rows).numpy()
            median = max(math.exp(np.quantile(logs[:, 0], 0.5)), COPIES * distance.training_distance)
            scales.append(FeatureScale(median, math.exp(np.quantile(logs[:, 1], LONG))))
        return Reference(tuple(scales))

    def notes_on_norms(self, reference: Reference, distances: Sequence[ClassDistance | None]) -> tuple[str, ...]:
        """Warn, and return a note, if feature norms differ greatly from those of the training data."""
        pairs = [(scale.norm, one.training_norm) for scale, one in zip(reference.scales, distances, strict=True) if one]
        ratios = [max(norm, TINY) / max(trained, TINY) for norm, trained in pairs]
        widest = max(ratios, key=lambda ratio: abs(math.log(ratio)))
        if 1 / UNLIKE < widest < UNLIKE:
            return ()
        return (
            warned(
                f"the features of the {self.where} are {widest:.3g} times as large as those of the training data. Check that both are "
                f"preprocessed in the same way."
            ),
        )

    def with_scores(self, reference: Reference, terms: Tensor | None) -> Reference:
        """Return the reference plus statistics of `terms` (n, 3 + K): the mean and spread of each score term, and mean energies."""
        rows = self.gather(terms)
        middle, spread = rows.mean(0), rows.std(0) if len(rows) > 1 else torch.zeros_like(rows[0])
        spread = torch.where(spread > NO_SPREAD * (1 + middle.abs()), spread, 1)
        pairs = list(zip(middle.tolist(), spread.tolist(), strict=True))
        return replace(reference, score=tuple(pairs[:3]), energies=tuple(mean for mean, _ in pairs[3:]))


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
    """Run every network once on each batch of a loader, and keep the features, outputs and labels.

    Args:
        networks: the trained networks.
        heads: the networks' last layers; None if only outputs are needed.
        loader: any iterable of batches.
        likelihood: likelihood of the outputs.
        where: name of the loader, for messages.
        labelled: True to require labels in every batch, False to ignore labels, None to read labels if present.
        progress: show a progress bar.
        team: processes among which the data are divided; by default, only this process.
    """
    check_loader(loader, where)
    team = Team.single() if team is None else team
    phi: list[list[Tensor]] = [[] for _ in networks]
    outputs: list[list[Tensor]] = [[] for _ in networks]
    labels: list[Tensor] = []
    inputs = 0
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
        positions=POSITIONS_KEPT,
        ignore_index=IGNORE_INDEX if heads[0] is None else heads[0].ignore_index,
    )
    with evaluating(*networks):
        for batch in batches:
            inputs += batch.used_inputs
            for rows in batch.chunks():
                for index in range(len(networks)):
                    # Copy the tensors, because the network may reuse their memory for the next batch.
                    precision = batch.features[index].dtype
                    phi[index].append(rows.phi[index].cpu().to(precision, copy=True))
                    outputs[index].append(rows.outputs[index].cpu().clone())
                if rows.labels is not None:
                    labels.append(rows.labels.cpu())
    # A rank without data stores tensors with no rows but otherwise the same shapes as on other ranks.
    mine = bool(outputs[0])
    if not any(team.collect(mine)):
        raise DataError(f"the {where} is empty on every rank. Pass at least one batch.")
    kept = [*(parts[0] for parts in (*phi, *outputs)), *labels[:1]] if mine else []
    shapes = next(one for one in team.collect([(one.dtype, one.shape[1:]) for one in kept]) if one)
    if not mine:
        empty = [[torch.zeros((0, *shape), dtype=dtype, device="cpu")] for dtype, shape in shapes]
        count = len(networks)
        phi, outputs, labels = (
            empty[:count],
            empty[count : 2 * count],
            [one for part in empty[2 * count :] for one in part],
        )
    joined = [torch.cat(parts) for parts in outputs]
    counts = team.sum([torch.tensor([inputs, len(joined[0])], dtype=torch.float64, device="cpu")])[0]
    return HeldOut(
        [torch.cat(parts) for parts in phi],
        joined,
        torch.cat(labels) if labels else None,
        likelihood,
        float(counts[0] / counts[1]),
        where,
        team,
    )
