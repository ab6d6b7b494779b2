"""Evaluate predictors on test data, shifted data and outliers, and tabulate metrics with their standard errors.

The standard errors (`mola.evaluation.estimates`) treat inputs as independent draws. The positions of a dense output form one group, as do
the labels of a multi-label input. For differences between predictors evaluated on the same data, these errors usually overstate the
uncertainty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, importing, located
from molaplace.evaluation.columns import PredictionColumns
from molaplace.evaluation.estimates import Estimate, Measurement, measured, separation
from molaplace.evaluation.positions import flatten_positions
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import Likelihood
from molaplace.mixture import Mixture, as_probabilities, prediction_of
from molaplace.network import IGNORE_INDEX, batch_count, check_loader, evaluating, labels_of_logits, named_batches
from molaplace.numerics import as_tensor
from molaplace.options import counted, whole_number
from molaplace.prediction import Prediction
from molaplace.predictor import Predictor


@dataclass(frozen=True)
class Evaluation:
    """A table of metrics. `table[predictor, data]` maps the name of each metric to an `Estimate`: a value and its standard error."""

    entries: Mapping[tuple[str, str], Mapping[str, Estimate]]
    counts: Mapping[tuple[str, str], int]
    """Number of inputs evaluated for each row of the table."""

    def __getitem__(self, key: tuple[str, str]) -> Mapping[str, Estimate]:
        if key not in self.entries:
            listed = ", ".join(map(str, self.entries))
            raise KeyError(f"there is no row {key!r}; expected (predictor, data) to be one of {listed}")
        return self.entries[key]

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per predictor and data set, and columns for each metric and its error (`_se`)."""
        with importing("to_frame", "pandas", "cli"):
            import pandas
        records = [
            {"count": self.counts[key]}
            | {name: estimate.value for name, estimate in estimates.items()}
            | {f"{name}_se": estimate.error for name, estimate in estimates.items()}
            for key, estimates in self.entries.items()
        ]
        return pandas.DataFrame(records, index=pandas.MultiIndex.from_tuples(self.entries, names=["predictor", "data"]))

    def __repr__(self) -> str:
        # Labelled data and outliers are shown in separate tables, each with its own header.
        tables: dict[tuple[str, ...], list[list[str]]] = {}
        for key, estimates in self.entries.items():
            table = tables.setdefault(tuple(estimates), [["predictor", "data", "count", *estimates]])
            table.append([*key, f"{self.counts[key]:,}", *map(str, estimates.values())])
        return "\n\n".join(_aligned(table) for table in tables.values())


def _aligned(table: Sequence[Sequence[str]]) -> str:
    # The first two columns are aligned on the left, the numbers on the right.
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        padded = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def evaluate(
    predictors: Any,
    test_loader: Iterable[Any],
    *,
    ood: Mapping[str, Iterable[Any]] | None = None,
    shifted: Mapping[str, Iterable[Any]] | None = None,
    likelihood: str | Likelihood | None = None,
    positions: str | int = "all",
    ignore_index: int = IGNORE_INDEX,
    progress: bool = False,
    team: Team | None = None,
) -> Evaluation:
    """Evaluate one or more predictors on test data, shifted data and outliers, and return metrics with standard errors.

    For classification, the metrics are accuracy, log loss (nll), Brier score, expected calibration error (ece), area under the
    risk-coverage curve (aurc) and mean confidence. For multi-label data, these metrics are computed over all known labels, and auroc is
    the mean AUROC of the labels. For regression, the metrics are rmse, nll, crps, the mean standard deviation (std) and the coverage of
    90 % intervals (coverage_90). For outliers, auroc and fpr95 measure how well low confidence (auroc_max_probability), or in regression
    a high predicted variance (auroc_variance), and a high `ood_score` (auroc_ood_score) separate outliers from the test data.

    Args:
        predictors: a posterior, an ensemble, an exported model, or any callable that maps inputs to probabilities of shape (n, C); or
            a dict that maps names to predictors. A single one is named by its type, or "network" or "ensemble" if it has no covariance.
        test_loader: batches of (inputs, labels). Every loader is read once per predictor.
        ood: loaders of outliers, keyed by name; labels are ignored.
        shifted: loaders keyed by name, with labelled data that differ from the test data, such as corrupted images.
        likelihood: likelihood for callables that do not come from this library; by default, "categorical".
        positions: for dense outputs, the number of positions to draw from each input, or "all" for every position.
        ignore_index: label that marks positions to ignore.
        progress: whether to show a progress bar when stderr is a terminal.
        team: processes that share the evaluation, each reading its own shard of the data.
    """
    if not isinstance(predictors, Mapping) and not callable(predictors):
        raise OptionError(
            f"must be one predictor or a dict that maps names to predictors, such as {{'a': a, 'b': b}}; got "
            f"{type(predictors).__name__}.",
            argument="predictors",
        )
    if not isinstance(predictors, Mapping):
        predictors = {_name_of(predictors): predictors}
    shifted_loaders = _by_name(shifted, "shifted", "blur")
    outlier_loaders = _by_name(ood, "ood", "noise")
    labelled = {"test": test_loader, **shifted_loaders}
    if not predictors or "test" in shifted_loaders or labelled.keys() & outlier_loaders.keys():
        raise OptionError(
            f"expected at least one predictor, and a different name for each data set ('test' is reserved for the test "
            f"data); got the predictors {list(predictors)} and the data sets {[*shifted_loaders, *outlier_loaders]}."
        )
    loaders = {**labelled, **outlier_loaders}
    for set_name, loader in loaders.items():
        check_loader(loader, f"{set_name} loader")
    if positions != "all":
        positions = whole_number(positions, "positions")
    collect = partial(
        _collect, positions=positions, ignore_index=ignore_index, progress=progress, team=team or Team.single()
    )
    entries: dict[tuple[str, str], Mapping[str, Estimate]] = {}
    counts: dict[tuple[str, str], int] = {}
    for name, predictor in predictors.items():
        predict = predictor.predict_batch if isinstance(predictor, Predictor) else _predict_with(predictor, likelihood)
        inliers = None
        for set_name, loader in loaders.items():
            with located(f"predictor {name!r} on the {set_name} loader"):
                columns = collect(predictor, predict, loader, f"{set_name} loader", labelled=set_name in labelled)
            inliers = columns if inliers is None else inliers
            measurements = measured(columns) if set_name in labelled else _separation(inliers, columns)
            entries[name, set_name] = {metric: measurement.estimate for metric, measurement in measurements.items()}
            counts[name, set_name] = columns.count
    return Evaluation(entries, counts)


def _name_of(predictor: Any) -> str:
    if isinstance(predictor, LaplaceMixture) and predictor.structure is None:
        return "network" if len(predictor.networks) == 1 else "ensemble"
    return getattr(predictor, "__name__", type(predictor).__name__)


def _by_name(loaders: Any, argument: str, example: str) -> dict[str, Iterable[Any]]:
    if loaders is not None and not isinstance(loaders, Mapping):
        raise OptionError(
            f"must be a dict that maps names to loaders, such as {{{example!r}: loader}}; got {type(loaders).__name__}.",
            argument=argument,
        )
    return dict(loaders or {})


def _predict_with(predictor: Callable[[Any], Any], likelihood: str | Likelihood | None) -> Callable[[Any], Any]:
    # Return a function that predicts a batch with a predictor from elsewhere, which returns probabilities or, as exported models do, a
    # mapping of named outputs.
    mixture = Mixture([predictor], likelihood=likelihood)

    def predict(inputs: Any) -> Any:
        with evaluating(*mixture.children()), torch.no_grad():
            output = predictor(inputs)
        outputs = output if isinstance(output, Mapping) else {"probs": output}
        if "probs" not in outputs:
            raise DataError(
                f"expected probabilities, or a mapping of outputs with the key 'probs'; got {', '.join(outputs)}."
            )
        probs = as_probabilities(outputs["probs"], mixture.likelihood, "the output")
        if "ood_score" not in outputs:
            return prediction_of(probs[:, None], mixture.weights, mixture.likelihood)
        ood_score = as_tensor(outputs["ood_score"]).flatten()
        if len(ood_score) != len(probs) or bool(ood_score.isnan().any()):
            raise DataError(
                f"expected one ood_score for each of {counted(len(probs), 'input')}, none of them NaN; got {len(ood_score)} with "
                f"{int(ood_score.isnan().sum())} NaN."
            )
        return Prediction({"probs": probs, "ood_score": ood_score}, likelihood=mixture.likelihood)

    return predict


def _collect(
    predictor: Any,
    predict: Callable[[Any], Any],
    loader: Iterable[Any],
    where: str,
    *,
    labelled: bool,
    positions: str | int,
    ignore_index: int,
    progress: bool,
    team: Team,
) -> PredictionColumns:
    # Predict every batch of a loader, and return the scores of its data from all processes.
    columns = PredictionColumns()
    empty = team.size > 1 and batch_count(loader) == 0  # this process has an empty shard
    reader = named_batches(
        (), loader, where, labelled=labelled, progress=progress, total=batch_count(loader), required=not empty
    )
    for batch_name, batch in reader:
        with located(batch_name):
            prediction = predict(batch.inputs).cpu()
        labels = batch.labels
        if labelled and isinstance(predictor, nn.Module) and isinstance(prediction, Prediction):
            labels = labels_of_logits([predictor], batch, prediction.probs.shape, ignore_index, batch_name)
        prediction, labels, dense_rows = flatten_positions(
            prediction,
            labels,
            batch_name,
            ignore_index=ignore_index,
            positions=positions,
            first=columns.count,
        )
        columns.add(prediction, labels, dense_rows=dense_rows, where=batch_name)
    columns = columns.gather(team)
    if labelled and not len(columns.data):
        raise DataError(f"the {where} contains no known labels. At least one label is needed.")
    return columns


def _separation(inliers: PredictionColumns, outliers: PredictionColumns) -> dict[str, Measurement]:
    return {
        f"{metric}_{score.replace(' ', '_')}": measurement
        for score, measurements in separation(inliers, outliers).items()
        for metric, measurement in measurements.items()
    }
