"""Evaluate predictors on test data, shifted data and outliers, and tabulate metrics with their standard errors.

The standard errors (`mola.evaluation.estimates`) treat inputs as independent draws. The positions of a dense output form one group, as do
the labels of a multi-label input. For differences between predictors evaluated on the same data, these errors usually overstate the
uncertainty.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from molaplace import __version__
from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, located
from molaplace.evaluation.columns import DenseRows, PredictionColumns, outlier_scores, regression_scores
from molaplace.evaluation.comparison import Evaluation, Role
from molaplace.evaluation.results import compare, set_info
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import Likelihood
from molaplace.likelihoods.base import pooled
from molaplace.mixture import Mixture, as_probabilities, prediction_of
from molaplace.network import (
    IGNORE_INDEX,
    Batch,
    Captured,
    Passes,
    batch_count,
    capture,
    check_inputs,
    check_loader,
    evaluating,
    labels_of_logits,
    named_batches,
    with_rows_in_use,
)
from molaplace.numerics import as_tensor
from molaplace.options import counted, whole_number
from molaplace.posterior import MoLA
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.predictor import Predictor

THIS = "mola.evaluate"


def evaluate(
    predictors: Any,
    test_loader: Iterable[Any],
    *,
    ood: Mapping[str, Iterable[Any]] | None = None,
    shifted: Mapping[str, Iterable[Any]] | None = None,
    likelihood: str | Likelihood | None = None,
    positions: str | int = "all",
    ignore_index: int = IGNORE_INDEX,
    classes: Sequence[str] | None = None,
    progress: bool = True,
    team: Team | None = None,
) -> Evaluation:
    """Evaluate one or more predictors on test data, shifted data and outliers, and return metrics with standard errors.

    Every loader is read once, and each network runs once on each batch, however many posteriors and ensembles share it. Add
    `mola.baselines(posterior, val_loader)` to compare a posterior with other methods for the same networks, and write a page with tables,
    figures and a verdict with `evaluate(...).save("folder")`.

    For classification, the metrics are accuracy, log loss (nll), Brier score, expected calibration error (ece), area under the
    risk-coverage curve (aurc) and mean confidence. For multi-label data, these metrics are computed over all known labels, and auroc is
    the mean AUROC of the labels. For regression, the metrics are rmse, nll, crps, the mean standard deviation (std) and the coverage of
    90 % intervals (coverage_90). For outliers, auroc and fpr95 measure how well low confidence (auroc_max_probability), or in regression
    a high predicted variance (auroc_variance), a high `ood_score` (auroc_ood_score) and other scores separate outliers from the test data.

    Args:
        predictors: a posterior, an ensemble, an exported model, or any callable that maps inputs to probabilities of shape (n, C); or
            a dict that maps names to predictors. A single one is named by its type, or "network" or "ensemble" if it has no covariance.
            The verdict compares the first one with the others.
        test_loader: batches of (inputs, labels).
        ood: loaders of outliers, keyed by name; labels are ignored.
        shifted: loaders keyed by name, with labelled data that differ from the test data, such as corrupted images.
        likelihood: likelihood for callables that do not come from this library; by default, "categorical".
        positions: for dense outputs, the number of positions to draw from each input, or "all" for every position.
        ignore_index: label that marks positions to ignore.
        classes: names of the classes, or of the outputs of a regression; by default, their indices.
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
    for name, loader in loaders.items():
        check_loader(loader, f"{name} loader")
    if positions != "all":
        positions = whole_number(positions, "positions")
    started = time.perf_counter()
    columns = {
        name: collect(
            predictors,
            loader,
            f"{name} loader",
            labelled=name in labelled,
            likelihood=likelihood,
            positions=positions,
            ignore_index=ignore_index,
            progress=progress,
            team=team,
        )
        for name, loader in loaders.items()
    }
    roles: dict[str, Role] = {"test": "test", **dict.fromkeys(shifted_loaders, "shift")}
    sets = [
        set_info(name, name, roles.get(name, "outlier"), next(iter(by_predictor.values())))
        for name, by_predictor in columns.items()
    ]
    return compare(
        THIS,
        sets,
        columns,
        predictors,
        subject=next(iter(predictors)),
        classes=classes,
        made=made_by(THIS, time.perf_counter() - started),
    )


def made_by(by: str, seconds: float, **details: Any) -> dict[str, Any]:
    """Return the provenance of an evaluation: what made it, in how many seconds, and with which versions."""
    versions = {"molaplace": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"by": by, **details, "seconds": seconds, "versions": versions}


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


def collect(
    predictors: Mapping[str, Any],
    loader: Iterable[Any],
    where: str,
    *,
    labelled: bool,
    likelihood: str | Likelihood | None = None,
    positions: str | int = "all",
    ignore_index: int = IGNORE_INDEX,
    guarantees: Mapping[str, Callable[[Any], Mapping[str, Any]]] | None = None,
    progress: bool = False,
    team: Team | None = None,
) -> dict[str, PredictionColumns]:
    """Predict every batch of a loader with every predictor, and return the scores of the data from all processes, by predictor.

    `guarantees` maps the names of predictors to functions of a prediction that return further arguments of `PredictionColumns.add`. The
    other arguments have the same meaning as in `evaluate`.
    """
    team = team or Team.single()
    columns = {name: PredictionColumns() for name in predictors}
    functions = {
        name: _prepare(predictor, likelihood, labelled, positions, ignore_index)
        for name, predictor in sorted(predictors.items(), key=lambda item: not _has_heads(item[1]))
    }
    reader = named_batches(
        (),
        loader,
        where,
        labelled=labelled,
        progress=progress,
        total=batch_count(loader),
        required=team.size == 1,  # with several processes, a shard may be empty
    )
    for batch_name, batch in reader:
        passes: Passes = {}
        for name, function in functions.items():
            with located(f"predictor {name!r} on the {where}"), located(batch_name), torch.no_grad():
                prediction, more = function(batch, batch_name, passes, columns[name].count)
                extra = guarantees[name](prediction) if guarantees and name in guarantees else {}
                columns[name].add(prediction, detail=True, where=batch_name, **more, **extra)
        with located(batch_name):
            check_inputs(batch.inputs)
    columns = {name: part.gather(team) for name, part in columns.items()}
    if labelled and any(not len(part.data) for part in columns.values()):
        raise DataError(f"the {where} contains no known labels. At least one label is needed.")
    return columns


def _has_heads(predictor: Any) -> bool:
    return isinstance(predictor, MoLA) and predictor.structure is not None


def _prepare(
    predictor: Any, likelihood: str | Likelihood | None, labelled: bool, positions: str | int, ignore_index: int
) -> Callable[[Batch, str, Passes, int], tuple[Any, dict[str, Any]]]:
    # Return a function that predicts a batch, and that also returns its labels and other arguments of `PredictionColumns.add`.
    if isinstance(predictor, MoLA):
        return partial(_predict_mola, predictor, positions, ignore_index)
    predict = predictor.predict_batch if isinstance(predictor, Predictor) else _predict_with(predictor, likelihood)

    def predict_batch(batch: Batch, batch_name: str, passes: Passes, first: int) -> tuple[Any, dict[str, Any]]:
        prediction = predict(batch.inputs).cpu()
        labels = batch.labels
        if labels is not None and isinstance(predictor, nn.Module) and isinstance(prediction, Prediction):
            labels = labels_of_logits([predictor], batch, prediction.probs.shape, ignore_index, batch_name)
        return prediction, {"labels": labels}

    return predict_batch


def _predict_mola(
    mixture: MoLA,
    positions: str | int,
    ignore_index: int,
    batch: Batch,
    batch_name: str,
    passes: Passes,
    first: int,
) -> tuple[Any, dict[str, Any]]:
    # Predict with the passes of the networks that other predictors share; of dense outputs, only the positions that count.
    networks = mixture.networks
    heads = [component.head for component in mixture.components]
    with evaluating(*networks):
        captured = capture(networks, heads, batch.inputs, mixture.likelihood, passes)
    captured.check_logits(networks, batch.inputs, mixture.likelihood)
    shape = captured.layout.shape(captured.outputs[0].shape[-1])
    labels = labels_of_logits(networks, batch, shape, ignore_index, batch_name)
    dense_rows = None
    if captured.layout.sizes:
        captured = with_rows_in_use(
            captured, networks, batch, mixture.likelihood, batch_name, positions, ignore_index, first
        )
        labels = captured.labels
        dense_rows = DenseRows(captured.row_numbers // captured.layout.count, captured.layout.inputs)
        captured.check_finite()
        if not len(captured):  # every position is ignored
            return None, {"dense_rows": dense_rows}
        captured = captured.used()
    captured.check_finite()
    prediction = mixture.make_prediction(captured).cpu()
    return prediction, {"labels": labels, "scores": _scores(mixture, prediction, captured), "dense_rows": dense_rows}


def _scores(mixture: MoLA, prediction: Any, captured: Captured) -> dict[str, Tensor]:
    if isinstance(prediction, RegressionPrediction):
        return regression_scores(prediction)
    likelihood: Any = mixture.likelihood
    logits = prediction.logit_mean
    if mixture.structure is None:  # the energies of a scaled ensemble are those of its scaled logits
        scaled = [outputs.cpu() / mixture.temperature for outputs in captured.outputs]
        logits = torch.stack(list(pooled(scaled, mixture.weights, mixture.pooling)), 1)
    return outlier_scores(prediction.probs, logits, mixture.weights, prediction.ood_score, likelihood)
