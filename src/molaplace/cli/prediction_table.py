"""Convert predictions to tables with one row for each input, or to arrays named after the fields of a prediction.

Tables have the columns of `Prediction.to_frame`, with the names of classes and outputs instead of their indices. For dense
outputs, tables contain means over positions. Arrays have the same layout as the prediction's fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molaplace.cli.decisions import Decisions
from molaplace.evaluation.columns import INTERVAL
from molaplace.likelihoods import Likelihood

FIELDS = ("label", "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance")
REGRESSION_FIELDS = ("mean", "std", "lower", "upper", "epistemic", "aleatoric", "ood_score", "distance")

ORDER = ("label", "class", *FIELDS[1:3], *REGRESSION_FIELDS, "outlying", "answer", "set", "prob")
"""Fields in the order of their columns."""

AVERAGED = ("confidence", "std", "entropy", "epistemic", "outlying", "answer")
"""Fields whose means the summary contains."""

SEPARATOR = "|"
"""Separator between labels in the "class" column of multi-label predictions."""


@dataclass(frozen=True)
class PredictionTable:
    """Converter from a posterior's predictions to tables, arrays and sums."""

    names: tuple[str, ...]
    """Names of the classes, labels or targets."""
    likelihood: Likelihood
    decisions: Decisions
    probabilities: bool = False

    def fields(self, prediction: Any) -> dict[str, Tensor]:
        """Return the fields and decisions of a prediction, keyed by name, omitting fields that are None."""
        fields: dict[str, Tensor | None] = {}
        if self.likelihood.classification:
            fields |= {name: getattr(prediction, name) for name in FIELDS}
        else:
            intervals = self.decisions.intervals
            lower, upper = prediction.interval(INTERVAL) if intervals is None else intervals(prediction)
            ends = {"lower": lower, "upper": upper}
            fields |= {name: ends[name] if name in ends else getattr(prediction, name) for name in REGRESSION_FIELDS}
        fields |= self.decisions.apply(prediction)
        if self.probabilities:
            fields["probs"] = prediction.probs
        return {name: values for name, values in fields.items() if values is not None}

    def arrays(self, fields: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Return the fields as arrays, with labels as 32-bit integers and Booleans as 8-bit integers."""
        arrays = {name: np.ascontiguousarray(values.cpu().numpy()) for name, values in fields.items()}
        kinds = {"label": np.int32, "outlying": np.int8, "answer": np.int8, "set": np.int8}
        return {name: values.astype(kinds.get(name, values.dtype), copy=False) for name, values in arrays.items()}

    def table(self, prediction: Any, fields: dict[str, Tensor]) -> Any:
        """Return a data frame with one row for each input."""
        if fields["ood_score"].dim() > 1:
            return self._means_over_positions(fields, prediction.axis)
        frame = prediction.to_frame()
        for name in ("lower", "upper"):
            if name in fields:
                ends = fields[name].double().cpu().numpy()
                single = fields[name].shape[1] == 1
                frame[[name] if single else [f"{name}_{index}" for index in range(len(self.names))]] = ends
        for name in ("outlying", "answer"):
            if name in fields:
                frame[name] = fields[name].cpu().numpy()
        if "set" in fields:
            frame["set"] = [[self.names[index] for index in row.nonzero().flatten()] for row in fields["set"]]
        if self.likelihood.classification:
            frame["class"] = self._classes(prediction.label)
        shown = [name for name in frame if self.probabilities or _field(name) != "prob"]
        return frame[sorted(shown, key=lambda name: ORDER.index(_field(name)))].rename(columns=self._named)

    def _classes(self, label: Tensor) -> list[str]:
        if self.likelihood.mutually_exclusive:
            return [self.names[index] for index in label.tolist()]
        return [SEPARATOR.join(self.names[index] for index in row.nonzero().flatten()) for row in label]

    def _named(self, column: str) -> str:
        field = _field(column)
        return column if field == column else f"{field}_{self.names[int(column.removeprefix(f'{field}_'))]}"

    def _means_over_positions(self, fields: dict[str, Tensor], axis: int) -> Any:
        import pandas

        positions = fields["ood_score"][0].numel()
        table: dict[str, Any] = {"positions": [positions] * len(fields["ood_score"])}
        for name, values in fields.items():
            if name == "label":
                shares = self._shares(values, axis)
                table |= {f"share_{output}": shares[:, index] for index, output in enumerate(self.names)}
            elif (
                not self.likelihood.classification and values.dim() > fields["ood_score"].dim() and len(self.names) > 1
            ):
                means = values.movedim(axis, 1).flatten(2).double().mean(2).numpy()
                table |= {f"{name}_{output}": means[:, index] for index, output in enumerate(self.names)}
            elif name != "probs":
                table[name] = values.flatten(1).double().mean(1).numpy()
        return pandas.DataFrame(table)

    def _shares(self, label: Tensor, axis: int) -> NDArray[Any]:
        # Return the fraction of positions (n, C) at which each class or label is predicted.
        if self.likelihood.mutually_exclusive:
            label = torch.nn.functional.one_hot(label, len(self.names)).flatten(1, -2)
        else:
            label = label.movedim(axis, -1).flatten(1, -2)
        return label.double().mean(1).numpy()

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


def _field(column: str) -> str:
    # Return the field to which a column belongs, such as "prob" for "prob_3".
    field, _, index = column.rpartition("_")
    return field if index.isdecimal() else column
