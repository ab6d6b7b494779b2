"""How well a predictor does on a named test set: the numbers and the bins that a model card shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mola import metrics
from mola.errors import DataError, OptionError
from mola.features import peek
from mola.likelihood import CATEGORICAL
from mola.networks import as_batch

__all__ = ["METRICS", "Measured", "measure"]

METRICS: Mapping[str, tuple[str, Callable[[Tensor, Tensor], float]]] = {
    "accuracy": ("accuracy", metrics.accuracy),
    "nll": ("negative log-likelihood", metrics.negative_log_likelihood),
    "brier": ("Brier score", metrics.brier),
    "ece": ("expected calibration error, 15 bins", metrics.expected_calibration_error),
    "confidence": ("mean confidence", lambda probs, _: metrics.mean_confidence(probs)),
}
"""What is measured: a title and a function, by the short name."""


@dataclass(frozen=True)
class Measured:
    """Numbers measured on a test set.

    Args:
        dataset: its name, as a reader should see it.
        count: number of data in it.
        values: metrics by name.
        bins: for each bin of the confidence, (count, mean confidence, accuracy); empty bins left out. Without, there is no
            calibration table.

    Raises:
        OptionError: if a name is empty or a number is not finite.
    """

    dataset: str
    count: int
    values: Mapping[str, float]
    bins: tuple[tuple[int, float, float], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check names and numbers.

        Raises:
            OptionError: if one cannot be used.
        """
        numbers = torch.tensor([float(value) for value in self.values.values()], dtype=torch.float64)
        if not self.dataset.strip() or self.count < 1 or not bool(torch.isfinite(numbers).all()):
            message = (
                f"expected the name of the test set, at least 1 datum and finite numbers; got {self.dataset!r}, "
                f"{self.count}, {dict(self.values)}."
            )
            raise OptionError(message)


def measure(predictor: Callable[[Any], Tensor], loader: Iterable[Any], dataset: str, *, bins: int = 10) -> Measured:
    """Measure a predictor on labelled data, read once.

    Args:
        predictor: from inputs to probabilities (n, C), such as a posterior.
        loader: batches with labels that were used neither for training nor for tuning.
        dataset: name of the test set.
        bins: number of equal-width bins of the confidence in the calibration table.

    Returns:
        The numbers.

    Raises:
        DataError: if a batch has no labels.
    """
    _, batches = peek(loader, "the test loader")
    probs, labels = [], []
    for index, raw in enumerate(batches):
        place = f"batch {index} of the test loader"
        batch = as_batch(raw, place)
        if batch.labels is None:
            message = f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'."
            raise DataError(message)
        probs.append(predictor(batch.inputs).cpu())
        labels.append(CATEGORICAL.check_labels(batch.labels.cpu(), probs[-1], place))
    every, known = torch.cat(probs), torch.cat(labels)
    binned = metrics.bin_confidences(every, known, bins)
    rows = [(int(count), total / count, right / count) for count, total, right in binned.tolist() if count]
    values = {name: function(every, known) for name, (_, function) in METRICS.items()}
    return Measured(dataset, len(known), values, tuple(rows))
