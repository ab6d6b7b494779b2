"""Evaluate predictors on test data, shifted data and outliers, and tabulate metrics with their standard errors.

The standard errors (`mola.evaluation.measurement`) treat inputs as independent draws. The positions of a dense output form one group, as do
the labels of a multi-label input. For differences between predictors evaluated on the same data, these errors usually overstate the
uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from molaplace import metrics
from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, importing
from molaplace.evaluation.measurement import Measurement, area_between, pass_rate, risk_area, root_mean_of
from molaplace.evaluation.tally import INPUT, Tally, rows_of
from molaplace.likelihoods import Gaussian, Likelihood
from molaplace.mixture import Mixture
from molaplace.network import IGNORE_INDEX, batch_count, batches, check_loader, check_positions, evaluating
from molaplace.outliers import max_probability_score
from molaplace.prediction import Prediction, RegressionPrediction

INTERVAL = 0.9
"""Nominal coverage of the intervals whose actual coverage is measured."""


class Estimate(NamedTuple):
    """A metric and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, found: Measurement) -> Estimate:
        """Convert a measurement to an estimate; for a single input, the standard error is NaN."""
        return cls(found.value, math.nan if found.error is None else found.error)

    def __str__(self) -> str:
        if not 0 < self.error < math.inf:
            return f"{self.value:.4g}"
        digits = min(max(1 - math.floor(math.log10(self.error)), 0), 6)  # show two significant digits of the error
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


@dataclass(frozen=True)
class Evaluation:
    """A table of metrics. `table[predictor, data]` maps the name of each metric to an `Estimate`: a value and its standard error."""

    rows: Mapping[tuple[str, str], Mapping[str, Estimate]]
    counts: Mapping[tuple[str, str], int]
    """Number of inputs evaluated for each row of the table."""
    bins: Mapping[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)
    """For labelled classification data, a (15, 3) tensor: the number of predictions, the summed confidence and the number of correct
    predictions in each of 15 confidence bins."""

    def __getitem__(self, place: tuple[str, str]) -> Mapping[str, Estimate]:
        if place not in self.rows:
            listed = ", ".join(map(str, self.rows))
            raise KeyError(f"there is no row {place!r}; expected (predictor, data) to be one of {listed}")
        return self.rows[place]

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per predictor and data set, and columns for each metric and its error (`_se`)."""
        with importing("to_frame", "pandas", "bench"):
            import pandas
        records = [
            {"count": self.counts[place]}
            | {name: one.value for name, one in row.items()}
            | {f"{name}_se": one.error for name, one in row.items()}
            for place, row in self.rows.items()
        ]
        return pandas.DataFrame(records, index=pandas.MultiIndex.from_tuples(self.rows, names=["predictor", "data"]))

    def __repr__(self) -> str:
        # Labelled data and outliers are shown in separate tables, each with its own header.
        tables: dict[tuple[str, ...], list[list[str]]] = {}
        for place, row in self.rows.items():
            table = tables.setdefault(tuple(row), [["predictor", "data", "count", *row]])
            table.append([*place, f"{self.counts[place]:,}", *map(str, row.values())])
        texts = []
        for table in tables.values():
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for cells in table:
                names = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
                numbers = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
                texts.append("  ".join([*names, *numbers]).rstrip())
            texts.append("")
        return "\n".join(texts[:-1])


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
    risk-coverage curve (aurc) and mean confidence. For multi-label data, these metrics are computed over all known labels. For
    regression, the metrics are rmse, nll, crps and the coverage of 90 % intervals. The metrics auroc and fpr95 measure how well
    low confidence (in regression, a high predicted standard deviation) and a high `ood_score` separate outliers from the test data.

    Args:
        predictors: a posterior, an ensemble, an exported model, or any callable that maps inputs to probabilities of shape (n, C); or
            a dict that maps names to predictors.
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
    name = getattr(predictors, "__name__", type(predictors).__name__)
    named = dict(predictors) if isinstance(predictors, Mapping) else {name: predictors}
    moved, outliers = _by_name(shifted, "shifted", "blur"), _by_name(ood, "ood", "noise")
    labelled = {"test": test_loader, **moved}
    if not named or "test" in moved or labelled.keys() & outliers.keys():
        raise OptionError(
            f"expected at least one predictor, and a different name for each data set ('test' is reserved for the test "
            f"data); got the predictors {list(named)} and the data sets {[*moved, *outliers]}."
        )
    for name, loader in {**labelled, **outliers}.items():
        check_loader(loader, f"{name} loader")
    check_positions(positions)
    read = partial(_read, positions=positions, ignore_index=ignore_index, progress=progress, team=team or Team.single())
    rows: dict[tuple[str, str], Mapping[str, Estimate]] = {}
    counts: dict[tuple[str, str], int] = {}
    bins: dict[tuple[str, str], Tensor] = {}
    for predictor, one in named.items():
        mixture = one if isinstance(one, Mixture) else _Callable([one], likelihood=likelihood)
        inliers = None
        for data, loader in {**labelled, **outliers}.items():
            try:
                scored, found, counts[predictor, data] = read(
                    mixture, loader, f"{data} loader", labelled=data in labelled
                )
            except DataError as error:
                location = f"predictor {predictor!r} on the {data} loader"
                # A `_Callable` has only one predictor, whose index says nothing.
                error.place = location if error.place in (None, "predictors[0]") else f"{location}, {error.place}"
                raise
            inliers = found if inliers is None else inliers
            measured = _metrics(scored) if data in labelled else _against(inliers, found)
            rows[predictor, data] = {name: Estimate.of(one) for name, one in measured.items()}
            if "confidence" in scored.columns:
                bins[predictor, data] = metrics.bin_sums(scored["confidence"], scored["correct"])
    return Evaluation(rows, counts, bins)


def _by_name(loaders: Any, argument: str, example: str) -> dict[str, Iterable[Any]]:
    if loaders is not None and not isinstance(loaders, Mapping):
        raise OptionError(
            f"must be a dict that maps names to loaders, such as {{{example!r}: loader}}; got {type(loaders).__name__}.",
            argument=argument,
        )
    return dict(loaders or {})


class _Callable(Mixture):
    # A predictor that does not come from this library. It may return a mapping of named outputs, as exported models do.

    def predict_batch(self, inputs: Any, seed: int | None, place: str) -> Any:
        with evaluating(*self.children()), torch.no_grad():
            found = self.predictors[0](inputs)
        named = found if isinstance(found, Mapping) else {"probs": found}
        if "probs" not in named:
            raise DataError(
                f"expected probabilities, or a mapping of outputs with the key 'probs'; got {', '.join(named)}.",
                place=place,
            )
        checked = Mixture([lambda _: named["probs"]], likelihood=self.likelihood).predict_batch(inputs, seed, place)
        if "ood_score" not in named:
            return checked
        fields: dict[str, Any] = {"probs": checked.probs, "ood_score": torch.as_tensor(named["ood_score"])}
        return Prediction(fields, likelihood=self.likelihood)


def _read(
    mixture: Any,
    loader: Iterable[Any],
    where: str,
    *,
    labelled: bool,
    positions: str | int,
    ignore_index: int,
    progress: bool,
    team: Team,
) -> tuple[Tally, Tally, int]:
    # Return the scores for each label, the outlier scores for each input or position, and the number of inputs.
    scored, found, count = Tally(), Tally(), 0
    empty = team.size > 1 and batch_count(loader) == 0  # this process has an empty shard
    shown = {"desc": where, "total": batch_count(loader), "disable": None if progress else True}
    for index, batch in enumerate(() if empty else tqdm(batches(loader, where), **shown, leave=False)):
        place = f"batch {index} of the {where}"
        if labelled and batch.labels is None:
            raise DataError(
                f"{place} has no labels. Make the loader yield (inputs, labels), or a mapping with the key 'labels'."
            )
        prediction = mixture.predict_batch(batch.inputs, None, place).cpu()
        size, labels = len(prediction), batch.labels if labelled else None
        prediction, labels, inputs = rows_of(
            prediction, labels, place, ignore_index=ignore_index, positions=positions, first=count
        )
        count += size
        inputs = torch.arange(size) if inputs is None else inputs
        if isinstance(prediction, RegressionPrediction):
            spread = {"std": prediction.variance.double().log().mean(1)}
        else:
            spread = {"confidence": max_probability_score(prediction.probs.double(), prediction.likelihood)}
        found.add({INPUT: inputs, **spread, "ood_score": prediction.ood_score.flatten()})
        if labels is not None:
            scored.add(_scores(prediction, labels.cpu(), inputs, place))
    found, count = found.gather(team), sum(team.collect(count))
    scored = scored.gather(team) if labelled else scored
    if labelled and not scored.count:
        raise DataError(f"the {where} contains no known labels. At least one label is needed.")
    return scored, found, count


def _scores(prediction: Any, labels: Tensor, inputs: Tensor, place: str) -> dict[str, Tensor]:
    # Return the scores for each datum, or for each known label of multi-label data.
    likelihood = prediction.likelihood
    if not isinstance(prediction, RegressionPrediction):
        probs = prediction.probs
        checked = (
            likelihood.check_labels(labels, probs, place) if len(labels) else labels
        )  # there are no labels if every position is ignored
        if not likelihood.mutually_exclusive:
            inputs = inputs[:, None].expand_as(checked)[~checked.isnan()]
        return {INPUT: inputs, **likelihood.distribution(probs).scores(checked)}
    parts = (prediction.weights, prediction.component_mean, prediction.component_variance, prediction.component_noise)
    mixture = likelihood.mixture_type(*(part.double() for part in parts))
    if isinstance(
        likelihood, Gaussian
    ):  # predicted variances are separate here, so the means have one column per target
        likelihood = replace(likelihood, heteroscedastic=False)
    targets = likelihood.check_labels(labels, mixture.means[0], place)
    below = mixture.cdf(targets)
    return {
        INPUT: inputs,
        **mixture.scores(targets),
        "square": (mixture.point() - targets).square().mean(1),
        "covered": ((2 * below - 1).abs() <= INTERVAL).double().mean(1),
    }


def _metrics(tally: Tally) -> dict[str, Measurement]:
    if "square" in tally.columns:
        rmse = root_mean_of(tally["square"], tally.groups)
        return {"rmse": rmse, "nll": tally.mean("nll"), "crps": tally.mean("crps"), "coverage": tally.mean("covered")}
    found = tally.classified()
    confidence = found.pop("confidence")
    aurc = risk_area(1 - tally["confidence"], tally["correct"], tally.groups)
    return {**found, "aurc": aurc, "confidence": confidence}


def _against(inliers: Tally, outliers: Tally) -> dict[str, Measurement]:
    groups = inliers.groups, outliers.groups
    return {
        f"{name}_{score}": measure(inliers[score], outliers[score], groups)
        for score in outliers.columns
        if score != INPUT
        for name, measure in (("auroc", area_between), ("fpr95", pass_rate))
    }
