r"""Evaluate predictors on test data, shifted data and outliers: a table of metrics with standard errors.

Standard errors treat the inputs as independent draws, and the positions of dense outputs or the labels of multi-label
data as one cluster for each input. Every metric is written as a mean of one value per datum, or (AURC, FPR95) has one
influence value per datum, so that the variance of the metric is the variance of a mean. Differences between predictors
on the same data vary less than these errors suggest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from mola import metrics
from mola.distributed import Team
from mola.errors import DataError, OptionError, importing
from mola.likelihoods import Gaussian, Likelihood, RegressionPredictive
from mola.mixture import Mixture
from mola.network import (
    IGNORE_INDEX,
    Layout,
    batch_count,
    batches,
    check_loader,
    check_positions,
    drawn_positions,
    evaluating,
)
from mola.outliers import max_probability_score
from mola.prediction import Prediction, RegressionPrediction

INTERVAL = 0.9
"""Probability of the intervals whose coverage is measured."""

TPR = 0.95
"""Share of the test data that pass, for FPR95."""

WIDTH = 0.025
"""Half-width, in shares of the test data, of the step from which the slope of the ROC curve at `TPR` is estimated."""


class Estimate(NamedTuple):
    """A metric and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        if not 0 < self.error < math.inf:
            return f"{self.value:.4g}"
        digits = min(max(1 - math.floor(math.log10(self.error)), 0), 6)  # two significant digits of the error
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


@dataclass(frozen=True)
class Evaluation:
    """A table of metrics. `table[predictor, data]` maps names of metrics to an `Estimate`, a value and its standard error."""

    rows: Mapping[tuple[str, str], Mapping[str, Estimate]]
    counts: Mapping[tuple[str, str], int]
    """Number of inputs of each row."""
    bins: Mapping[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)
    """Labelled classes: (15, 3), number of predictions, sum of confidences and correct predictions in each bin of confidence."""

    def __getitem__(self, place: tuple[str, str]) -> Mapping[str, Estimate]:
        if place not in self.rows:
            listed = ", ".join(map(str, self.rows))
            raise KeyError(f"no row {place!r}: expected (predictor, data), one of {listed}")
        return self.rows[place]

    def to_frame(self) -> Any:
        """Convert to a pandas data frame: a row for each predictor and data set, a column for each metric and its error (`_se`)."""
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
        # One table for labelled data and one for outliers, with the header first.
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
    """Evaluate one or several predictors on test data, shifted data and outliers: metrics with standard errors.

    Labelled data: accuracy, log loss (nll), Brier score, calibration error (ece), area under the risk-coverage curve
    (aurc) and mean confidence; for multi-label data these are means over all known labels. Regression: rmse, nll, crps,
    and coverage of 90 % intervals. Outliers: auroc and fpr95 of low confidence (regression: of the predicted standard
    deviation) and of `ood_score`, against the test data.

    Args:
        predictors: a posterior, an ensemble, an exported model, or any callable from inputs to probabilities (n, C); or
            several, by name.
        test_loader: batches of (inputs, labels). Every loader is read once for each predictor.
        ood: loaders of outliers by name; labels are ignored.
        shifted: loaders of labelled data by name, such as corrupted images.
        likelihood: likelihood of callables that are not objects of this library; None is "categorical".
        positions: for dense outputs, the number of positions to draw from each input; "all" uses every position.
        ignore_index: label of ignored positions.
        progress: show a progress bar on stderr, if that is a terminal.
        team: processes that evaluate together, each with its own shard.
    """
    if not isinstance(predictors, Mapping) and not callable(predictors):
        raise OptionError(
            f"predictors: expected one predictor or a dict of names to predictors, such as {{'a': a, 'b': b}}; got "
            f"{type(predictors).__name__}."
        )
    name = getattr(predictors, "__name__", type(predictors).__name__)
    named = dict(predictors) if isinstance(predictors, Mapping) else {name: predictors}
    moved, outliers = _by_name(shifted, "shifted", "blur"), _by_name(ood, "ood", "noise")
    labelled = {"test": test_loader, **moved}
    if not named or "test" in moved or labelled.keys() & outliers.keys():
        raise OptionError(
            f"expected at least one predictor, and a different name for each data set ('test' is the test data); got the "
            f"predictors {list(named)} and the data {[*moved, *outliers]}."
        )
    for name, loader in {**labelled, **outliers}.items():
        check_loader(loader, f"{name} loader")
    check_positions(positions)
    reader = _Reader(positions, ignore_index, progress, Team.single() if team is None else team)
    rows: dict[tuple[str, str], Mapping[str, Estimate]] = {}
    counts: dict[tuple[str, str], int] = {}
    bins: dict[tuple[str, str], Tensor] = {}
    for predictor, one in named.items():
        mixture = one if isinstance(one, Mixture) else _Callable([one], likelihood=likelihood)
        spread = "confidence" if mixture.likelihood.classification else "std"
        inliers = None
        for data, loader in {**labelled, **outliers}.items():
            try:
                read = reader.read(mixture, loader, f"{data} loader", labelled=data in labelled)
            except DataError as error:
                found = str(error).removeprefix("predictors[0]: ")  # the only one of a `_Callable`
                raise DataError(f"predictor {predictor!r} on the {data} loader: {found}") from error
            inliers = read if inliers is None else inliers
            counts[predictor, data] = read.inputs
            rows[predictor, data] = _metrics(read) if data in labelled else _against(inliers, read, spread)
            if "confidence" in read.scores:
                bins[predictor, data] = metrics.bin_sums(read.scores["confidence"], read.scores["correct"])
    return Evaluation(rows, counts, bins)


def _by_name(loaders: Any, argument: str, example: str) -> dict[str, Iterable[Any]]:
    if loaders is not None and not isinstance(loaders, Mapping):
        raise OptionError(
            f"{argument}: expected a dict of names to loaders, such as {{{example!r}: loader}}, got {type(loaders).__name__}."
        )
    return dict(loaders or {})


class _Callable(Mixture):
    # A predictor from elsewhere. It may return outputs by name, as exported models do.

    def predict_batch(self, inputs: Any, seed: int | None, place: str) -> Any:
        with evaluating(*self.children()), torch.no_grad():
            found = self.predictors[0](inputs)
        named = found if isinstance(found, Mapping) else {"probs": found}
        if "probs" not in named:
            raise DataError(
                f"{place}: expected probabilities, or outputs with the name 'probs'; got {', '.join(named)}."
            )
        checked = Mixture([lambda _: named["probs"]], likelihood=self.likelihood).predict_batch(inputs, seed, place)
        if "ood_score" not in named:
            return checked
        fields: dict[str, Any] = {"probs": checked.probs, "ood_score": torch.as_tensor(named["ood_score"])}
        return Prediction(fields, likelihood=self.likelihood)


# --- reading --------------------------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    # Scores (m,) of each labelled datum, question or position; outlier scores (r,) of each input or position; and the
    # input that each belongs to.
    scores: dict[str, Tensor]
    score_inputs: Tensor
    outlier_scores: dict[str, Tensor]
    outlier_inputs: Tensor
    inputs: int


@dataclass(frozen=True)
class _Reader:
    positions: str | int
    ignore_index: int
    progress: bool
    team: Team

    def read(self, mixture: Any, loader: Iterable[Any], where: str, *, labelled: bool) -> _Read:
        scores: list[dict[str, Tensor]] = []
        outliers: list[dict[str, Tensor]] = []
        count = 0
        empty = self.team.size > 1 and batch_count(loader) == 0  # the shard of this process
        shown = {"desc": where, "total": batch_count(loader), "disable": None if self.progress else True}
        for index, batch in enumerate(() if empty else tqdm(batches(loader, where), **shown, leave=False)):
            place = f"batch {index} of the {where}"
            if labelled and batch.labels is None:
                raise DataError(f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'.")
            prediction = mixture.predict_batch(batch.inputs, None, place).cpu()
            scored, found = self._batch(prediction, batch.labels if labelled else None, count, place)
            scores.append(scored)
            outliers.append(found)
            count += len(prediction)
        counts = self.team.collect(count)
        before = sum(counts[: self.team.rank])
        scored = self._joined(scores, before) if labelled else {"inputs": torch.zeros(0)}
        found = self._joined(outliers, before)
        if labelled and not len(scored["inputs"]):
            raise DataError(f"the {where}: no datum has a label.")
        return _Read(scored, scored.pop("inputs").long(), found, found.pop("inputs").long(), sum(counts))

    def _joined(self, parts: list[dict[str, Tensor]], before: int) -> dict[str, Tensor]:
        names = next(filter(None, self.team.collect(list(parts[0]) if parts else None)), None)
        if names is None:
            raise DataError("a loader is empty on every rank.")
        own = torch.stack([torch.cat([part[name] for part in parts]) for name in names], 1) if parts else None
        if own is not None:
            own[:, names.index("inputs")] += before
        return dict(zip(names, self.team.gather(own).T.contiguous(), strict=True))

    def _batch(
        self, prediction: Any, labels: Tensor | None, first: int, place: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        regression = isinstance(prediction, RegressionPrediction)
        outputs = prediction.component_mean if regression else prediction.probs[None]
        layout = Layout.of(outputs[0], prediction.axis) if outputs.dim() > 3 else None
        inputs = torch.arange(len(prediction))
        if layout is not None:
            inputs = inputs.repeat_interleave(layout.count)
            labels = None if labels is None else layout.labels(labels.cpu(), outputs[0].shape[prediction.axis], place)
        kept = self._kept(layout, labels, first)
        labels = None if labels is None else _without(labels, self.ignore_index, layout)[kept]

        def rows(values: Tensor) -> Tensor:  # (K, n, ...) as (K, r, C) in float64
            flat = values if layout is None else torch.stack([layout.by_position(one).flatten(0, 1) for one in values])
            return flat.double()[:, kept]

        numbers = (first + inputs)[kept].double()
        found = {"ood_score": prediction.ood_score.flatten().double()[kept], "inputs": numbers}
        if regression:
            variance = rows(prediction.variance[None])[0]
            found["spread"] = variance.log().mean(1)
            variances, noises = (rows(one) for one in (prediction.component_variance, prediction.component_noise))
            mixture = prediction.likelihood.mixture_type(prediction.weights.double(), rows(outputs), variances, noises)
            scored = {} if labels is None else _regression_scores(mixture, prediction.likelihood, labels, place)
            return {**scored, "inputs": numbers}, found
        (probs,), likelihood = rows(outputs), prediction.likelihood
        found["spread"] = max_probability_score(probs, likelihood)
        if labels is None:
            return {}, found
        # A batch may be ignored altogether.
        checked = likelihood.check_labels(labels, probs, place) if len(labels) else labels
        predictive = likelihood.distribution(probs)
        if not likelihood.mutually_exclusive:  # one score for each known question
            numbers = numbers[:, None].expand_as(checked)[~checked.isnan()]
        return {**predictive.scores(checked), "inputs": numbers}, found

    def _kept(self, layout: Layout | None, labels: Tensor | None, first: int) -> Tensor | slice:
        # Positions of dense outputs that count: neither ignored nor left out by the draw.
        if layout is None:
            return slice(None)
        kept = torch.ones(layout.inputs * layout.count, dtype=torch.bool)
        if labels is not None:
            known = labels != self.ignore_index
            kept = known if known.dim() == 1 else known.any(1)
        rows = [own.nonzero().flatten() for own in kept.view(layout.inputs, layout.count)]
        if isinstance(self.positions, int):
            rows = [own[drawn_positions(len(own), self.positions, first + index)] for index, own in enumerate(rows)]
        return torch.cat([own + index * layout.count for index, own in enumerate(rows)])


def _without(labels: Tensor, ignore_index: int, layout: Layout | None) -> Tensor:
    # Where each output has its own label, single labels may be ignored.
    if layout is None or labels.dim() == 1 or not bool((labels == ignore_index).any()):
        return labels.cpu()
    return torch.where(labels == ignore_index, torch.nan, labels.double())


def _regression_scores(
    mixture: RegressionPredictive, likelihood: Likelihood, labels: Tensor, place: str
) -> dict[str, Tensor]:
    if isinstance(likelihood, Gaussian):  # the predicted means have one output for each target
        likelihood = replace(likelihood, heteroscedastic=False)
    targets = likelihood.check_labels(labels, mixture.means[0], place)
    tail = (1 - INTERVAL) / 2
    below = mixture.cdf(targets)
    return {
        **mixture.scores(targets),
        "square": (mixture.point() - targets).square().mean(1),
        "covered": ((below >= tail) & (below <= 1 - tail)).double().mean(1),
    }


# --- metrics and their standard errors ------------------------------------------------------------------------------------


def standard_error(values: Tensor, inputs: Tensor) -> float:
    """Return the standard error of the mean of values (m,) that are independent between inputs (m,) only; nan for a single input."""
    totals = values.new_zeros(int(inputs.max()) + 1).index_add_(0, inputs, values - values.mean())
    count = int((torch.bincount(inputs) > 0).sum())
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * float(totals.square().sum())) / len(values)


def _metrics(read: _Read) -> dict[str, Estimate]:
    scores, inputs = read.scores, read.score_inputs

    def mean(values: Tensor) -> Estimate:
        return Estimate(float(values.mean()), standard_error(values, inputs))

    if "square" in scores:
        square = mean(scores["square"])
        root = math.sqrt(square.value)
        rmse = Estimate(root, square.error / (2 * root) if root > 0 else 0.0)
        return {
            "rmse": rmse,
            **{name: mean(scores[name]) for name in ("nll", "crps")},
            "coverage": mean(scores["covered"]),
        }
    confidence, correct = scores["confidence"], scores["correct"]
    return {
        "accuracy": mean(correct),
        "nll": mean(scores["nll"]),
        "brier": mean(scores["brier"]),
        "ece": mean(signed_gaps(confidence, correct)),
        "aurc": Estimate(
            metrics.area_under_risk_coverage(1 - confidence, correct),
            standard_error(_risk_influence(1 - confidence, correct), inputs),
        ),
        "confidence": mean(confidence),
    }


def signed_gaps(confidence: Tensor, correct: Tensor, bins: int = 15) -> Tensor:
    """Return confidence minus correctness (n,), with the sign of the gap of each datum's bin: their mean is the calibration error."""
    sums = metrics.bin_sums(confidence, correct, bins)
    return (confidence - correct) * (sums[:, 1] - sums[:, 2]).sign()[metrics.bin_index(confidence, bins)]


def _risk_influence(uncertainty: Tensor, correct: Tensor) -> Tensor:
    r"""Return the influence (n,) of each datum on the AURC, plus the AURC.

    The area is :math:`E_t[R(t)]` with :math:`R(t) = E[e 1(u \le t)] / F(t)`, where e is the error, u the uncertainty
    and t is distributed as u. Adding a datum changes the thresholds, the errors and the shares F: :math:`R(u_i) + e_i
    E_t[1(u_i \le t) / F(t)] - E_t[1(u_i \le t) R(t) / F(t)]`.
    """
    _, place, counts = torch.unique(uncertainty, return_inverse=True, return_counts=True)
    _, risk = metrics.risk_coverage_curve(uncertainty, correct)
    accepted = torch.arange(1, len(risk) + 1, dtype=risk.dtype)

    def from_here(values: Tensor) -> Tensor:  # sums of this and all later values
        return values.flip(0).cumsum(0).flip(0)

    curves = torch.stack([risk, from_here(1 / accepted), from_here(risk / accepted)])
    # Data of equal uncertainty share the mean of their places.
    order = torch.arange(len(counts)).repeat_interleave(counts)
    own, share, weighted = (curves.new_zeros(3, len(counts)).index_add_(1, order, curves) / counts)[:, place]
    return own + (1 - correct) * share - weighted


def _against(inliers: _Read, outliers: _Read, spread: str) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    groups = inliers.outlier_inputs, outliers.outlier_inputs
    for name, key in ((spread, "spread"), ("ood_score", "ood_score")):
        pair = inliers.outlier_scores[key], outliers.outlier_scores[key]
        for metric, terms in (("auroc", placements), ("fpr95", passing)):
            function: Callable[[Tensor, Tensor], float] = metrics.auroc if metric == "auroc" else metrics.fpr_at_tpr
            errors = [standard_error(values, own) for values, own in zip(terms(*pair), groups, strict=True)]
            found[f"{metric}_{name}"] = Estimate(function(*pair), math.hypot(*errors))
    return found


def placements(inliers: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of the outliers above each inlier (n,), and of the inliers below each outlier (m,), ties counting half.

    Both means are the AUROC, and the variances of these means add up to its variance (DeLong et al., 1988; in clusters,
    Obuchowski, 1997).
    """

    def below(values: Tensor, others: Tensor) -> Tensor:
        ordered = others.sort().values
        ends = [torch.searchsorted(ordered, values, right=right) for right in (False, True)]
        return (ends[0] + ends[1]).double() / (2 * len(others))

    return 1 - below(inliers, outliers), below(outliers, inliers)


def passing(inliers: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the influence (n,) of each inlier on FPR95, through the threshold, and which outliers (m,) pass."""
    ends = [metrics.fpr_at_tpr(inliers, outliers, TPR + side * WIDTH) for side in (-1, 1)]
    threshold = metrics.passing_threshold(inliers, TPR)
    slope = (ends[1] - ends[0]) / (2 * WIDTH)
    return slope * (inliers <= threshold).double(), (outliers <= threshold).double()
