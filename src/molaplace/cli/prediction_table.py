"""Convert predictions to tables with one row for each input, or to arrays named after the fields of a prediction.

Tables have the columns of `Prediction.to_frame`, with the names of classes and outputs instead of their indices. For dense
outputs, tables contain means over positions. Arrays have the same layout as the prediction's fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from molaplace.cli.decisions import Decisions
from molaplace.evaluation.columns import INTERVAL
from molaplace.prediction import RegressionPrediction

SHARED_FIELDS = ("epistemic", "aleatoric", "ood_score", "distance")

AVERAGED = ("confidence", "std", "entropy", "epistemic", "outlying", "answer")
"""Fields whose means the summary contains."""

SEPARATOR = "|"
"""Separator between labels in the "class" column of multi-label predictions."""


@dataclass(frozen=True)
class PredictionTable:
    """Converter from a posterior's predictions to tables, arrays and sums."""

    names: tuple[str, ...]
    """Names of the classes, labels or targets."""
    decisions: Decisions
    probabilities: bool = False

    def fields(self, prediction: Any) -> dict[str, Tensor]:
        """Return the fields and decisions of a prediction, keyed by name in the order of the columns, omitting fields that are None."""
        if isinstance(prediction, RegressionPrediction):
            intervals = self.decisions.intervals
            lower, upper = prediction.interval(INTERVAL) if intervals is None else intervals(prediction)
            fields = {"mean": prediction.mean, "std": prediction.std, "lower": lower, "upper": upper}
        else:
            fields = {name: getattr(prediction, name) for name in ("label", "confidence", "entropy")}
        fields |= {name: getattr(prediction, name) for name in SHARED_FIELDS} | self.decisions.apply(prediction)
        if self.probabilities:
            fields["probs"] = prediction.probs
        return {name: values.cpu() for name, values in fields.items() if values is not None}

    def arrays(self, fields: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Return the fields as arrays, with labels as 32-bit integers and Booleans as 8-bit integers."""
        arrays = {name: np.ascontiguousarray(values.numpy()) for name, values in fields.items()}
        kinds = {"label": np.int32, "outlying": np.int8, "answer": np.int8, "set": np.int8}
        return {name: values.astype(kinds.get(name, values.dtype), copy=False) for name, values in arrays.items()}

    def table(self, fields: dict[str, Tensor], axis: int) -> Any:
        """Return a data frame with one row for each input; `axis` is the axis of the outputs in dense fields."""
        import pandas

        columns: dict[str, Any] = {}
        if fields["ood_score"].dim() > 1:
            columns["positions"] = [fields["ood_score"][0].numel()] * len(fields["ood_score"])
            fields = self._means_over_positions(fields, axis)
        for name, values in fields.items():
            if name == "set":
                columns[name] = [[self.names[index] for index in row.nonzero().flatten()] for row in values]
            elif values.dim() == 1 or (values.shape[1] == 1 and name != "probs"):
                columns[name] = values.flatten().numpy()
            else:
                prefix = "prob" if name == "probs" else name
                columns |= {f"{prefix}_{output}": values[:, index].numpy() for index, output in enumerate(self.names)}
            if name == "label":
                columns["class"] = self._classes(values)
        return pandas.DataFrame(columns)

    def _classes(self, label: Tensor) -> list[str]:
        if label.dim() == 1:
            return [self.names[index] for index in label.tolist()]
        return [SEPARATOR.join(self.names[index] for index in row.nonzero().flatten()) for row in label]

    def _means_over_positions(self, fields: dict[str, Tensor], axis: int) -> dict[str, Tensor]:
        # Return means (n,), or (n, D) of fields with a value for each output, and the share of each class or label instead of labels.
        num_axes = fields["ood_score"].dim()
        means = {}
        for name, values in fields.items():
            if name == "label" and values.dim() == num_axes:
                means["share"] = one_hot(values, len(self.names)).flatten(1, -2).double().mean(1)
            elif values.dim() > num_axes:
                means["share" if name == "label" else name] = values.movedim(axis, -1).flatten(1, -2).double().mean(1)
            else:
                means[name] = values.flatten(1).double().mean(1)
        return means

    def sums(self, fields: dict[str, Tensor]) -> dict[str, Any]:
        """Return the number of inputs ("count") and of positions ("positions"), and the sum of each quantity over all positions.

        If there are several labels or targets, each quantity is first averaged over them.
        """
        values = {name: fields[name] for name in AVERAGED if name in fields}
        if "lower" in fields:
            values["width"] = fields["upper"] - fields["lower"]
        if "set" in fields:
            values["set_size"] = fields["set"].sum(1)
        positions = fields["ood_score"].numel()
        sums = {name: float(field.double().mean()) * positions for name, field in values.items()}
        return {"count": len(fields["ood_score"]), "positions": positions, **sums}
