"""Collect the predictions of methods on a data set over batches and processes, as one row of numbers for each input.

Memory grows with the number of inputs times a few scores, never with the features or the number of classes. Multi-label data have a
row for each label, dense outputs a row for each position, and each row has the number of its input: rows of one input are
not independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mola.compare.measured import Measurement, calibration_error, mean_area_of_labels, mean_of
from mola.distributed import Team
from mola.errors import DataError
from mola.likelihoods import CATEGORICAL, ClassificationLikelihood
from mola.metrics import bin_sums
from mola.outliers import energy_score, label_energy_score, max_logit_score, max_probability_score
from mola.uncertainty import entropy

BINS = 15
"""Bins of confidence in reliability diagrams and in the ECE."""

SCORES = ("max probability", "entropy", "energy", "maximum logit", "ood score")
"""Outlier scores of every method that has what they need; higher for outliers."""

ALL_SCORES = (*SCORES, "variance")
"""Those and the score of regression: the variance of the prediction."""

INPUT = "input"
"""Column with the number of each row's input, where inputs have several rows."""

FIXED = (INPUT, "confidence", "predicted", "question", "label", "correct", "yes", "nll", "brier", "set size", "held")
"""Columns that are not outlier scores: from "label" on for labelled data; "question" (the label's place) and "yes" (its probability)
for multi-label data; the last two for prediction sets. Columns with brackets, such as "held[0.9]", are not scores either: see
`mola.compare.regression`."""


class TallyRows(Protocol):
    """Predictions for a batch, as rows of a tally."""

    def columns(self, labels: Tensor | None) -> dict[str, Tensor]:
        """Return numbers (rows,) by name, outlier scores among them; `INPUT` counts the inputs of the batch from 0."""


def gen_score(probs: Tensor, exponent: float = 0.1, largest: int = 100) -> Tensor:
    r"""Return GEN, the generalised entropy (Liu et al., 2023): higher for outliers.

    .. math:: \sum_{m=1}^{M} p_{(m)}^\gamma (1 - p_{(m)})^\gamma

    over the M largest probabilities. The small exponent makes it sensitive to the small probabilities of the other classes where a
    network is almost certain.

    Args:
        probs: (n, C).
        exponent: gamma; 0.1 is the authors' choice.
        largest: M, the authors' choice for 1000 classes; all of fewer classes.

    Returns:
        (n,) in float64.
    """
    # The rest of the largest probability is the sum of the others: 1 - p would be 0 for single-precision numbers near 1.
    ordered = probs.double().sort(dim=1, descending=True).values.clamp(0, 1)
    rest = 1 - ordered
    rest[:, 0] = ordered[:, 1:].sum(1)
    return (ordered * rest)[:, :largest].pow(exponent).sum(1)


@dataclass(frozen=True)
class Answer:
    """Predictions of a classifier for a batch."""

    probs: Tensor
    """(n, C)"""
    logits: Tensor | None = None
    """Logits (K, n, C) of the networks, if the method has logits."""
    weights: Tensor | None = None
    """Weights (K,) of these networks; None is 1 / K each."""
    ood_score: Tensor | None = None
    """Outlier scores (n,), if the method has its own."""
    sets: Tensor | None = None
    """Classes (n, C) in each prediction set."""
    given: Mapping[str, Tensor] | None = None
    """Outlier scores (n,) by name, computed by the method; None derives `SCORES`."""
    likelihood: ClassificationLikelihood = CATEGORICAL
    inputs: Tensor | None = None
    """(n,), input of each row, where rows are positions; None: each row is an input."""

    def columns(self, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return columns of a tally.

        Args:
            labels: class indices (n,), or 0 and 1 (n, C) for multi-label data; None for unlabelled data.
        """
        limits, probs = torch.finfo(self.probs.dtype), self.probs.detach().cpu()
        labels = None if labels is None else labels.cpu()
        if self.likelihood.mutually_exclusive:
            # A probability that underflowed to 0 counts as the smallest positive number of its precision.
            return self._by_input(probs.clamp_min(limits.tiny).double(), labels)
        return self._by_label(probs.double().clamp(limits.eps, 1 - limits.eps), labels)  # 1 - p may round to 0

    def _by_input(self, probs: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        confidence, predicted = probs.max(1)
        row = {} if self.inputs is None else {INPUT: self.inputs}
        row |= {"confidence": confidence, "predicted": predicted}
        if labels is not None:
            row |= {"label": labels, **self.likelihood.distribution(probs).scores(labels)}
        if self.sets is not None:
            sets = self.sets.cpu()
            row["set size"] = sets.sum(1)
            if labels is not None:
                row["held"] = sets.gather(1, labels[:, None]).squeeze(1)
        return row | self.scores()

    def _by_label(self, probs: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        count, outputs = probs.shape
        known = torch.ones_like(probs, dtype=torch.bool)
        scored: dict[str, Tensor] = {}
        if labels is not None:
            truth = self.likelihood.check_labels(labels, probs, "the labels")
            known = ~truth.isnan()
            scored = {
                "label": truth[known],
                "yes": probs[known],
                **self.likelihood.distribution(probs).scores(truth),
            }
        own = torch.arange(count) if self.inputs is None else self.inputs.cpu()
        row = {INPUT: own[:, None].expand_as(known)[known]} if outputs > 1 or self.inputs is not None else {}
        row |= {
            "confidence": torch.maximum(probs, 1 - probs)[known],
            "predicted": (probs > 0.5)[known],
            "question": torch.arange(outputs).expand_as(known)[known],
        }
        return row | scored | {name: one.cpu()[:, None].expand_as(known)[known] for name, one in self.scores().items()}

    def scores(self) -> dict[str, Tensor]:
        """Return outlier scores (n,) in float64: the given ones, or all of `SCORES` that the predictions allow.

        Energy and largest logit of several networks are the weighted means over them.
        """
        if self.given is not None:
            return {name: score.double() for name, score in self.given.items()}
        probs = self.probs.double()
        uncertain = entropy(self.likelihood.choices(probs))
        found = {
            "max probability": max_probability_score(probs, self.likelihood),
            "entropy": uncertain if self.likelihood.mutually_exclusive else uncertain.mean(-1),
        }
        if self.logits is not None:
            logits = self.logits.double()
            count = len(logits)
            weights = torch.full((count,), 1 / count) if self.weights is None else self.weights
            energy = energy_score if self.likelihood.mutually_exclusive else label_energy_score
            for name, score in (("energy", energy), ("maximum logit", max_logit_score)):
                found[name] = torch.einsum("k,kn->n", weights.to(logits), score(logits))
        if self.ood_score is not None:
            found["ood score"] = self.ood_score.double()
        return found


@dataclass
class Tally:
    """Rows of a method so far."""

    columns: tuple[str, ...] = ()
    """Names of the numbers: those of `FIXED`, then outlier scores."""
    parts: list[Tensor] = field(default_factory=list)
    """(n, columns) of each batch, in float64."""
    inputs: int = 0
    """Number of inputs, where rows have the number of theirs."""

    def add(self, answer: TallyRows, labels: Tensor | None = None) -> None:
        """Add a batch, with its labels, if any."""
        row = answer.columns(labels)
        if (own := row.get(INPUT)) is not None and len(own):
            row[INPUT] = own + self.inputs
            self.inputs += int(own.max()) + 1
        self.columns = tuple(row)
        self.parts.append(torch.stack([column.detach().double().cpu() for column in row.values()], dim=1))

    def dealt(self, place: int, count: int) -> Tally:
        """Return the rows place, place + count, place + 2 count, ..."""
        return Tally(self.columns, [torch.cat(self.parts)[place::count]])

    def together(self, team: Team) -> Tally:
        """Return the rows of all processes, on each of them."""
        if team.size == 1:
            return self
        # A process without data has no columns.
        columns: list[str] = next((one for one in team.collect(list(self.columns)) if one), [])
        own = torch.cat(self.parts) if self.parts else None
        if own is not None and INPUT in columns:  # no two processes have the same input
            place = columns.index(INPUT)
            own[:, place] = own[:, place] * team.size + team.rank
        return Tally(tuple(columns), [team.gather(own)], sum(team.collect(self.inputs)))

    @property
    def groups(self) -> Tensor | None:
        """Input (n,) of each row; None if each row is an input."""
        return self[INPUT].long() if INPUT in self.columns else None

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(len(part) for part in self.parts)

    def __getitem__(self, column: str) -> Tensor:
        index = self.columns.index(column)
        return torch.cat([part[:, index] for part in self.parts])

    @property
    def scores(self) -> dict[str, Tensor]:
        """Outlier scores of each row, by name."""
        return {name: self[name] for name in self.columns if name not in FIXED and not name.endswith("]")}

    @property
    def bins(self) -> Tensor:
        """Count, sum of confidences and correct predictions of each bin of confidence."""
        return bin_sums(self["confidence"], self["correct"], BINS)

    def measured(self) -> dict[str, Measurement]:
        """Return metrics of labelled data, with the contribution of each row."""
        groups = self.groups
        area = None
        if "question" in self.columns:
            area = mean_area_of_labels(self["yes"], self["label"], self["question"], groups)
        return {
            "accuracy": mean_of(self["correct"], groups),
            "nll": mean_of(self["nll"], groups),
            "brier": mean_of(self["brier"], groups),
            "ece": calibration_error(self["confidence"], self["correct"], BINS, groups),
            "confidence": mean_of(self["confidence"], groups),
            **({} if area is None else {"auroc": area}),
        }

    def labelled(self) -> dict[str, float]:
        """Return metrics of labelled data."""
        return {name: one.value for name, one in self.measured().items()}


def tally_set(
    answers: Iterable[tuple[Mapping[str, TallyRows], Tensor | None]], team: Team | None = None, what: str = "the set"
) -> dict[str, Tally]:
    """Collect the rows of every method in one pass over a set of data.

    Args:
        answers: for each batch, the predictions by method, and the labels, if any.
        team: processes that each read their own part of the set; None is this process alone.
        what: the set, for messages.

    Returns:
        By method the rows of all data, the same in every process.
    """
    tallies: dict[str, Tally] = {}
    for by_method, labels in answers:
        for method, answer in by_method.items():
            tallies.setdefault(method, Tally()).add(answer, labels)
    methods = list(tallies)
    if team is not None and team.size > 1:
        methods = next((one for one in team.collect(methods) if one), [])  # a process without data has no methods
        tallies = {method: tallies.get(method, Tally()).together(team) for method in methods}
    if not methods:
        raise DataError(f"{what} holds no input that can be used.")
    return tallies
