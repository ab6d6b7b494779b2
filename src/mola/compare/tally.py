"""What methods say of a set of data, in one pass: a row of numbers for each input, added up over batches and processes.

Memory grows with the number of data times a handful of scores, never with the features or the number of classes. Inputs with
several labels have a row for each label, and those with outputs at many positions one for each position: which rows are of the same
input is kept, since these are no independent data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mola.compare.measured import Measurement, calibration_error, mean_area_of_labels, mean_of
from mola.distributed import Team
from mola.errors import DataError
from mola.likelihoods import CATEGORICAL, DiscreteLikelihood
from mola.metrics import auroc_of_labels, average_precision_of_labels, bin_sums, calibration_error_of_labels
from mola.outliers import energy_score, label_energy_score, max_logit_score, max_probability_score
from mola.uncertainty import entropy

BINS = 15

SCORES = ("max probability", "entropy", "energy", "maximum logit", "ood score")
"""Outlier scores by which every method is shown that has what they are made from, higher for what is more outlying."""

ALL_SCORES = (*SCORES, "variance")
"""The same, with that of numbers: the variance of the prediction."""

INPUT = "input"
"""Column of a tally that says which rows are of the same input, where inputs have several."""

FIXED = (INPUT, "confidence", "predicted", "question", "label", "correct", "yes", "nll", "brier", "set size", "held")
"""Columns of a tally that are not outlier scores. Those from "label" on are there where there are labels; "question", which of
several labels of an input it is, and "yes", its probability, only where inputs have several; the last two where there are sets.
What is told of numbers is in `mola.compare.numbers`; a column with brackets, as "held[0.9]", is not a score either."""


class Said(Protocol):
    """What a method says of a batch, as rows for a tally."""

    def columns(self, labels: Tensor | None) -> dict[str, Tensor]:
        """Numbers (rows,) by name, outlier scores among them; `INPUT` counts the inputs of the batch from 0.

        Args:
            labels: of the batch, where there are any.
        """


def gen_score(probs: Tensor, exponent: float = 0.1, largest: int = 100) -> Tensor:
    r"""GEN, the generalised entropy (Liu et al., 2023): higher for what is more outlying.

    .. math:: \sum_{m=1}^{M} p_{(m)}^\gamma (1 - p_{(m)})^\gamma

    over the M largest probabilities. The small exponent makes it sensitive to what little probability other classes have where
    a network is all but certain.

    Args:
        probs: (n, C).
        exponent: gamma; 0.1 is the authors' choice.
        largest: M, the authors' choice for 1000 classes; fewer classes are all taken.

    Returns:
        (n,) in float64.
    """
    # All classes, since what the largest leaves is the sum of the others: 1 - p would be 0 for single-precision numbers near 1.
    ordered = probs.double().sort(dim=1, descending=True).values.clamp(0, 1)
    rest = 1 - ordered
    rest[:, 0] = ordered[:, 1:].sum(1)
    return (ordered * rest)[:, :largest].pow(exponent).sum(1)


@dataclass(frozen=True)
class Answer:
    """What a method says of a batch."""

    probs: Tensor
    """(n, C)"""
    logits: Tensor | None = None
    """(K, n, C), of the networks it is made of, where it has logits."""
    weights: Tensor | None = None
    """(K,) of these networks; None is 1 / K each."""
    ood_score: Tensor | None = None
    """(n,), where the method has a score of its own."""
    sets: Tensor | None = None
    """(n, C), which classes the prediction set of each input holds, where there are such sets."""
    given: Mapping[str, Tensor] | None = None
    """Outlier scores (n,) by name, where the method computes them itself; None derives `SCORES`."""
    likelihood: DiscreteLikelihood = CATEGORICAL
    """What the probabilities are of."""
    inputs: Tensor | None = None
    """(n,), which input of the batch each row is of, where rows are positions; None: each is an input."""

    def columns(self, labels: Tensor | None = None) -> dict[str, Tensor]:
        """What is kept of each row.

        Args:
            labels: (n,), or (n, C) where each output is yes or no; None where there are none.

        Returns:
            Numbers by name.
        """
        if not self.likelihood.mutually_exclusive:
            return self._by_question(labels)
        probs = self.probs
        exact = probs.double()
        confidence, predicted = exact.max(1)
        row = {} if self.inputs is None else {INPUT: self.inputs}
        row |= {"confidence": confidence, "predicted": predicted}
        if labels is not None:
            chosen = probs.gather(1, labels[:, None]).squeeze(1)
            one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
            row["label"], row["correct"] = labels, predicted == labels
            row["nll"] = -chosen.clamp_min(torch.finfo(probs.dtype).tiny).double().log()
            row["brier"] = (exact - one_hot).square().sum(1)
        if self.sets is not None:
            row["set size"] = self.sets.sum(1)
            if labels is not None:
                row["held"] = self.sets.gather(1, labels.to(self.sets.device)[:, None]).squeeze(1)
        return row | self.scores()

    def _by_question(self, labels: Tensor | None) -> dict[str, Tensor]:
        count, outputs = self.probs.shape
        # Questions label by label: (C n, 2), first all data's first label.
        table = self.likelihood.choices(self.probs.double()).transpose(0, 1).flatten(0, 1)
        confidence, predicted = table.max(1)
        own = torch.arange(count) if self.inputs is None else self.inputs
        row = {INPUT: own.repeat(outputs)} if outputs > 1 or self.inputs is not None else {}
        row |= {
            "confidence": confidence,
            "predicted": predicted,
            "question": torch.arange(outputs).repeat_interleave(count),
        }
        keep = torch.ones(count * outputs, dtype=torch.bool)
        if labels is not None:
            targets = self.likelihood.targets(
                self.likelihood.check_labels(labels, self.probs, "the labels")
            ).T.flatten()
            keep = targets >= 0
            mine = table.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
            row |= {"label": targets, "correct": predicted == targets, "yes": table[:, 1]}
            # Probabilities of single precision: 1 - p may have rounded to 0.
            row["nll"] = -mine.clamp_min(torch.finfo(self.probs.dtype).eps).log()
            row["brier"] = 2 * (1 - mine).square()
        row |= {name: score.repeat(outputs) for name, score in self.scores().items()}
        return {name: column[keep] for name, column in row.items()}

    def scores(self) -> dict[str, Tensor]:
        """The scores that are given, or every one of `SCORES` that the answer allows, (n,) in float64.

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
    """What a method said so far."""

    columns: tuple[str, ...] = ()
    """Names of the numbers: those of `FIXED`, then outlier scores."""
    parts: list[Tensor] = field(default_factory=list)
    """(n, columns) of each batch, in float64."""
    inputs: int = 0
    """How many inputs there were, where rows say which they are of."""

    def add(self, answer: Said, labels: Tensor | None = None) -> None:
        """Take a batch.

        Args:
            answer: what the method says of it.
            labels: where there are any.
        """
        row = answer.columns(labels)
        if (own := row.get(INPUT)) is not None and len(own):
            row[INPUT] = own + self.inputs
            self.inputs += int(own.max()) + 1
        self.columns = tuple(row)
        self.parts.append(torch.stack([column.double() for column in row.values()], dim=1))

    def __add__(self, other: Tally) -> Tally:
        columns = self.columns or other.columns
        parts = [other._renumbered(part, lambda own: own + self.inputs, columns) for part in other.parts]
        return Tally(columns, self.parts + parts, self.inputs + other.inputs)

    @staticmethod
    def _renumbered(part: Tensor, number: Callable[[Tensor], Tensor], columns: Sequence[str]) -> Tensor:
        # The same rows, their inputs counted otherwise.
        if INPUT not in columns:
            return part
        place, changed = columns.index(INPUT), part.clone()
        changed[:, place] = number(part[:, place])
        return changed

    def dealt(self, place: int, count: int) -> Tally:
        """Of the inputs place, place + count, place + 2 count, ... alone."""
        return Tally(self.columns, [torch.cat(self.parts)[place::count]])

    def together(self, team: Team) -> Tally:
        """What all processes counted, on every one."""
        if team.size == 1:
            return self
        # A process without data does not know the columns.
        columns: list[str] = next((one for one in team.collect(list(self.columns)) if one), [])
        own = torch.cat(self.parts) if self.parts else None
        if own is not None:  # no two processes have the same input
            own = self._renumbered(own, lambda inputs: inputs * team.size + team.rank, columns)
        return Tally(tuple(columns), [team.gather(own)], sum(team.collect(self.inputs)))

    @property
    def groups(self) -> Tensor | None:
        """Which input (n,) each row is of; None where each is an input by itself."""
        return self[INPUT].long() if INPUT in self.columns else None

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(len(part) for part in self.parts)

    def __getitem__(self, column: str) -> Tensor:
        # One number of each input (n,), by its name.
        index = self.columns.index(column)
        return torch.cat([part[:, index] for part in self.parts])

    @property
    def scores(self) -> dict[str, Tensor]:
        """Outlier scores of each input, by name."""
        return {name: self[name] for name in self.columns if name not in FIXED and not name.endswith("]")}

    @property
    def score(self) -> NDArray[np.float64] | None:
        """The method's own outlier score of each input, if it has one."""
        return self["ood score"].numpy() if "ood score" in self.columns else None

    @property
    def bins(self) -> Tensor:
        """For each bin of confidence: count, sum of confidences, correct predictions."""
        return bin_sums(self["confidence"], self["correct"], BINS)

    def measured(self) -> dict[str, Measurement]:
        """The numbers on labelled data, with what each datum contributes to them."""
        groups = self.groups
        area = None
        if "question" in self.columns:
            area = mean_area_of_labels(self["yes"], self["label"], self["question"].long(), groups)
        return {
            "accuracy": mean_of(self["correct"], groups),
            "nll": mean_of(self["nll"], groups),
            "brier": mean_of(self["brier"], groups),
            "ece": calibration_error(self["confidence"], self["correct"], BINS, groups),
            "confidence": mean_of(self["confidence"], groups),
            **({} if area is None else {"auroc": area}),
        }

    def labelled(self) -> dict[str, float]:
        """The numbers on labelled data, as `mola.metrics` defines them."""
        return {name: one.value for name, one in self.measured().items()}

    def by_label(self) -> dict[str, list[float]]:
        """Area under the ROC curve, average precision and calibration error of each label that is yes or no; nan where not defined."""
        labels = self["question"].long()
        each = [(self["yes"][labels == one], self["label"][labels == one]) for one in sorted(set(labels.tolist()))]
        measures = {
            "auroc": auroc_of_labels,
            "average_precision": average_precision_of_labels,
            "ece": calibration_error_of_labels,
        }
        return {
            name: [float(measure(probs[:, None], truth[:, None])[0]) for probs, truth in each]
            for name, measure in measures.items()
        }

    def overlaps(self, classes: int) -> list[float]:
        """Intersection over union of each class: of the rows that are of it and those that are called so; nan where there are none."""
        truth, called = self["label"].long(), self["predicted"].long()
        both = torch.bincount(truth[truth == called], minlength=classes)
        either = torch.bincount(truth, minlength=classes) + torch.bincount(called, minlength=classes) - both
        found: list[float] = torch.where(either > 0, both.double() / either, math.nan).tolist()
        return found

    def by_class(self, classes: int) -> tuple[list[int], list[float], list[float]]:
        """Number of data, correct predictions and sum of confidences of each class."""
        labels = self["question" if "question" in self.columns else "label"].long()
        counts = torch.bincount(labels, minlength=classes)
        right, sure = (torch.bincount(labels, self[name], classes) for name in ("correct", "confidence"))
        return counts.tolist(), right.tolist(), sure.tolist()


def tally_set(
    answers: Iterable[tuple[Mapping[str, Said], Tensor | None]], team: Team | None = None, what: str = "the set"
) -> dict[str, Tally]:
    """One pass over a set of data: for every batch, every method answers and its tally takes it.

    Args:
        answers: for each batch, what every method says of it, by name, and the labels, where there are any.
        team: the processes that do it together, each with its own part of the set. None is this one alone.
        what: the set, in words for messages.

    Returns:
        By method, the tally of all the data, the same for every process.
    """
    tallies: dict[str, Tally] = {}
    for by_method, labels in answers:
        for method, answer in by_method.items():
            tallies.setdefault(method, Tally()).add(answer, labels)
    methods = list(tallies)
    if team is not None and team.size > 1:
        methods = next((one for one in team.collect(methods) if one), [])  # a process without data does not know them
        tallies = {method: tallies.get(method, Tally()).together(team) for method in methods}
    if not methods:
        raise DataError(f"{what} holds no input that can be used.")
    return tallies
