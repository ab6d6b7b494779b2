"""Columns: scores of each datum, computed from predictions and collected from all batches and processes.

Every evaluation turns predictions into losses and outlier scores here: `mola.evaluate`, the command, the demo and the laboratory.
Memory use grows with the number of rows, but not with the number of features or classes. Rows that belong to the same input are not
independent, so for multi-label data and dense outputs, each row holds the index of its input.

For regression, let u be the predicted distribution function evaluated at a target. A central interval of probability p covers the
target if and only if |2 u - 1| <= p. One number per target, |2 u - 1|, therefore determines the coverage of intervals of any
probability. The log-likelihood is computed jointly over all D outputs. Every other score is averaged over the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from molaplace.distributed import Team
from molaplace.errors import DataError
from molaplace.likelihoods import CATEGORICAL, ClassificationLikelihood, ClassificationPredictive
from molaplace.outliers import max_logit_score
from molaplace.prediction import Prediction, RegressionPrediction

INPUT = "input"
"""Name of the column that holds the index of each row's input, in tables in which an input can have several rows."""

CLASSIFICATION_SCORES = ("max probability", "entropy", "energy", "maximum logit", "ood score")
"""Names of the outlier scores for classifiers; every score is higher for outliers."""

OUTLIER_SCORES = (*CLASSIFICATION_SCORES, "variance")
"""Names of all outlier scores: those for classifiers, and the predictive variance for regression."""

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Coverage probabilities of the intervals shown in tables."""

NOMINAL_LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Coverage probabilities of the intervals shown in figures, including all `LEVELS`."""

INTERVAL = 0.9
"""Nominal coverage of the intervals whose actual coverage `mola.evaluate` measures, and of those in tables of predictions."""

MOST_OUTPUTS = 16
"""Maximum number of regression outputs for which separate columns are stored."""


@dataclass
class Columns:
    """A table of float64 numbers that grows batch by batch."""

    names: tuple[str, ...] = ()
    parts: list[Tensor] = field(default_factory=list)
    """Rows of each batch, of shape (n, columns)."""

    def add(self, batch: Mapping[str, Tensor]) -> None:
        """Append the columns of a batch, each of shape (n,)."""
        self.names = tuple(batch)
        self.parts.append(torch.stack([column.detach().double().cpu() for column in batch.values()], dim=1))

    def gather(self, team: Team) -> Columns:
        """Return, in every process, a table that contains the rows of all processes."""
        if team.size == 1:
            return self
        # A process without data has no columns, so it takes the column names from another process.
        names = next((names for names in team.collect(list(self.names)) if names), None)
        if names is None:
            raise DataError("no process has any data. Pass at least one batch.")
        rows = torch.cat(self.parts) if self.parts else None
        if rows is not None and INPUT in names:  # make the indices unique across processes
            index = names.index(INPUT)
            rows[:, index] = rows[:, index] * team.size + team.rank
        return Columns(tuple(names), [team.gather(rows)])

    @property
    def groups(self) -> Tensor | None:
        """Index of each row's input, of shape (n,), or None if each row is a separate input."""
        return self[INPUT].long() if INPUT in self else None

    def select(self, rows: slice | Tensor) -> Columns:
        """Return a table with some of the rows, as a slice or a mask."""
        return Columns(self.names, [torch.cat(self.parts)[rows]])

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        index = self.names.index(name)
        return torch.cat([part[:, index] for part in self.parts])


class DenseRows(NamedTuple):
    """The inputs to which the rows of a flattened dense prediction belong."""

    inputs: Tensor
    """Index of each row's input in the batch, shape (n,)."""
    num_inputs: int
    """Number of inputs in the batch."""


@dataclass
class PredictionColumns:
    """What an evaluation keeps of a predictor's predictions for a data set: scores of each datum, collected batch by batch."""

    data: Columns = field(default_factory=Columns)
    """One row per input, or per position of dense outputs, or per known label of multi-label data. The columns are, for classification,
    "confidence" and "predicted"; for labelled data also "label", "nll", "brier" and "correct"; for multi-label data also "yes" (the
    probability) and "output" (the index of the label). For regression: "std", and for labelled data "square", "nll", "crps" and
    "covered[0.9]"."""
    scores: Columns = field(default_factory=Columns)
    """Outlier scores, with one row per input or position."""
    outputs: Columns = field(default_factory=Columns)
    """With detail: scores of each of the first `MOST_OUTPUTS` regression outputs, one row per datum and output. The column "output" is
    the index of the output; the others are named as in `data`, with "target", "mean", "lower" and "upper" (the 90 % interval)."""
    count: int = 0
    """Number of inputs."""
    width: int = 0
    """Number of classes or outputs."""
    parts: str = ""
    """What the rows of `data` are if they are not inputs: "label" or "position"."""

    def add(
        self,
        prediction: Any,
        labels: Tensor | None = None,
        *,
        scores: Mapping[str, Tensor] | None = None,
        sets: Tensor | None = None,
        intervals: Mapping[float, tuple[Tensor, Tensor]] | None = None,
        dense_rows: DenseRows | None = None,
        detail: bool = False,
        where: str = "the labels",
    ) -> None:
        """Add the predictions for a batch.

        Args:
            prediction: a `mola.Prediction` or `mola.RegressionPrediction` with one row per datum.
            labels: labels or targets of the batch, if known.
            scores: outlier scores (n,) by name; by default, the score of the largest probability or of the predictive variance, and
                the prediction's own score.
            sets: prediction sets as masks, shape (n, C).
            intervals: calibrated intervals by coverage; lower and upper ends, each of shape (n, D).
            dense_rows: for dense outputs, the inputs to which the rows belong.
            detail: whether to add the columns of figures for regression: intervals at all levels, and the scores of each output.
            where: name of the batch, used in error messages.
        """
        if dense_rows is not None and not len(dense_rows.inputs):  # every position is ignored
            self.count += dense_rows.num_inputs
            return
        if isinstance(prediction, RegressionPrediction):
            scores = regression_scores(prediction) if scores is None else scores
            data, outputs = _regression_columns(prediction, labels, intervals, where, detail=detail)
            self.width = prediction.mean.shape[-1]
        else:
            if scores is None:
                scores = {"max probability": _max_probability(prediction), "ood score": prediction.ood_score}
            data = _classification_columns(prediction, labels, sets, where, dense=dense_rows is not None)
            outputs = {}
            self.width = prediction.probs.shape[-1]
        if dense_rows is not None or INPUT in data:
            self.parts = "label" if dense_rows is None else "position"
        # Outlier scores have one row for each input or position. If an input or position has several rows in `data`, the column INPUT
        # refers each to its row of scores in this batch. It is replaced by the index of the input in the data set.
        if dense_rows is None:
            if INPUT in data:
                data[INPUT] = data[INPUT] + self.count
            self.count += len(prediction)
        else:
            inputs = dense_rows.inputs + self.count
            scores = {INPUT: inputs, **scores}
            data[INPUT] = inputs[data[INPUT]] if INPUT in data else inputs
            if outputs:
                outputs[INPUT] = inputs.repeat_interleave(len(outputs["output"]) // len(inputs))
            self.count += dense_rows.num_inputs
        self.data.add(data)
        self.scores.add({name: score.flatten() for name, score in scores.items()})
        if outputs:
            self.outputs.add(outputs)

    def add_probabilities(
        self,
        probs: Tensor,
        labels: Tensor | None = None,
        scores: Mapping[str, Tensor] | None = None,
        likelihood: ClassificationLikelihood = CATEGORICAL,
    ) -> None:
        """Add a batch of predicted probabilities (n, C), in the data type in which they were computed; see `add`."""
        prediction = Prediction({"probs": probs}, likelihood=likelihood)
        scores = {"max probability": _max_probability(prediction)} if scores is None else scores
        self.add(prediction, labels, scores=scores)

    def gather(self, team: Team) -> PredictionColumns:
        """Return, in every process, the columns of all processes."""
        outputs = self.outputs.gather(team) if any(team.collect(len(self.outputs))) else self.outputs
        count = sum(team.collect(self.count))
        width, parts = max(team.collect((self.width, self.parts)))
        return PredictionColumns(self.data.gather(team), self.scores.gather(team), outputs, count, width, parts)


def _max_probability(prediction: Prediction) -> Tensor:
    distribution: ClassificationPredictive = prediction.likelihood.distribution(prediction.probs.double())
    return distribution.outlier_score()


def _classification_columns(
    prediction: Prediction, labels: Tensor | None, sets: Tensor | None, where: str, *, dense: bool
) -> dict[str, Tensor]:
    probs = prediction.probs.detach().cpu()
    likelihood = prediction.likelihood
    exact = likelihood.distribution(probs.double())
    columns = {"confidence": exact.confidence(), "predicted": exact.predicted()}
    truth = None if labels is None else likelihood.check_labels(labels.cpu(), probs, where)
    if truth is not None:
        columns["label"] = truth
    if columns["confidence"].dim() == 2:  # one row for each known label
        known = torch.ones_like(probs, dtype=torch.bool) if truth is None else ~truth.isnan()
        count, outputs = probs.shape
        columns |= {"yes": probs, "output": torch.arange(outputs, device="cpu").expand_as(known)}
        if outputs > 1 or dense:
            columns[INPUT] = torch.arange(count, device="cpu")[:, None].expand_as(known)
        columns = {name: column[known] for name, column in columns.items()}
    # The losses come from the probabilities as they are, because the smallest probability depends on their data type.
    if truth is not None:
        columns |= likelihood.distribution(probs).scores(truth)
    if sets is not None:
        columns["set size"] = sets.cpu().sum(1)
        if truth is not None:
            columns["covered"] = sets.cpu().gather(1, truth[:, None]).squeeze(1)
    return columns


def _regression_columns(
    prediction: RegressionPrediction,
    labels: Tensor | None,
    intervals: Mapping[float, tuple[Tensor, Tensor]] | None,
    where: str,
    *,
    detail: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    # Return the columns of `data` and, with detail, those of `outputs`.
    likelihood = prediction.likelihood
    names = ("component_mean", "component_variance", "component_noise")
    moments = [getattr(prediction, name).double() for name in names]
    distribution = likelihood.mixture_type(prediction.weights, *moments)
    mean = distribution.point()
    std = distribution.variance().sqrt()
    if labels is None:
        return {"std": std.mean(1)}, {}
    targets = likelihood.check_targets(labels, mean, where)
    squares = (mean - targets).square()
    smallest_level = (2 * distribution.cdf(targets) - 1).abs()
    levels = NOMINAL_LEVELS if detail else (INTERVAL,)
    columns = {"std": std.mean(1), "square": squares.mean(1), **distribution.scores(targets)}
    columns |= {f"covered[{level}]": (smallest_level <= level).double().mean(1) for level in levels}
    for level, (lower, upper) in (intervals or {}).items():
        covered = (targets >= lower.to(targets)) & (targets <= upper.to(targets))
        columns[f"calibrated[{level}]"] = covered.double().mean(1)
        columns[f"calibrated width[{level}]"] = (upper - lower).mean(1)
    if not detail:
        return columns, {}
    ends = {level: [distribution.quantile((1 + sign * level) / 2) for sign in (-1, 1)] for level in LEVELS}
    columns |= {f"width[{level}]": (upper - lower).mean(1) for level, (lower, upper) in ends.items()}
    width = min(MOST_OUTPUTS, targets.shape[1])
    marginals = [
        likelihood.mixture_type(prediction.weights, *(values[..., [output]] for values in moments))
        for output in range(width)
    ]
    outputs = {
        "output": torch.arange(width, device="cpu").expand(len(targets), width),
        "target": targets,
        "mean": mean,
        "std": std,
        "lower": ends[INTERVAL][0],
        "upper": ends[INTERVAL][1],
        "square": squares,
        "nll": torch.stack([-marginal.log_density(targets[:, [k]]) for k, marginal in enumerate(marginals)], 1),
        "crps": distribution.crps(targets),
        f"covered[{INTERVAL}]": (smallest_level <= INTERVAL).double(),
    }
    return columns, {name: values[:, :width].flatten() for name, values in outputs.items()}


# --- outlier scores --------------------------------------------------------------------------------------------------


def outlier_scores(
    probs: Tensor,
    logits: Tensor | None = None,
    weights: Tensor | None = None,
    ood_score: Tensor | None = None,
    likelihood: ClassificationLikelihood = CATEGORICAL,
) -> dict[str, Tensor]:
    """Return the available `CLASSIFICATION_SCORES`, each of shape (n,), in float64.

    Scores computed from logits (n, K, C) are averaged over the K networks with the given `weights` (K,).
    """
    distribution = likelihood.distribution(probs.double())
    scores = {
        "max probability": distribution.outlier_score(),
        "entropy": distribution.per_datum(distribution.entropy()),
    }
    if logits is not None:
        count = logits.shape[1]
        shares = torch.full((count,), 1 / count, device="cpu") if weights is None else weights
        for name, score in (("energy", likelihood.energy), ("maximum logit", max_logit_score)):
            scores[name] = score(logits.double()) @ shares.to(logits.double())
    return scores if ood_score is None else {**scores, "ood score": ood_score.double()}


def regression_scores(prediction: RegressionPrediction, *, ood_score: bool = True) -> dict[str, Tensor]:
    """Return the outlier scores (n,) for regression: the predictive variance and, if `ood_score` is True, the prediction's score."""
    # Outputs may have different units, but a ranking by the mean logarithm does not depend on the units.
    scores = {"variance": prediction.variance.double().log().mean(-1)}
    return {**scores, "ood score": prediction.ood_score} if ood_score else scores
