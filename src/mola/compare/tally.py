"""What methods say of a set of data, in one pass: a row of numbers for each input, added up over batches and processes.

Memory grows with the number of data times a handful of scores, never with the features or the number of classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mola.compare.measured import Measurement, calibration_error, mean_of
from mola.distributed import Team
from mola.errors import DataError
from mola.likelihood import CATEGORICAL, Likelihood
from mola.metrics import auroc_of_labels, average_precision_of_labels, bin_sums, calibration_error_of_labels
from mola.uncertainty import energy_score, entropy_score, label_energy_score, max_logit_score, max_probability_score

__all__ = ["BINS", "SCORES", "Answer", "Tally", "gen_score", "tally_set"]

BINS = 15

SCORES = ("max probability", "entropy", "energy", "maximum logit", "ood score")
"""Outlier scores by which every method is shown that has what they are made from, higher for what is more outlying."""

FIXED = ("confidence", "predicted", "question", "label", "correct", "yes", "nll", "brier", "set size", "held")
"""Columns of a tally that are not outlier scores. Those from "label" on are there where there are labels; "question", which of
several labels of an input it is, and "yes", its probability, only where inputs have several; the last two where there are sets."""


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
    likelihood: Likelihood = CATEGORICAL
    """What the probabilities are of."""

    def scores(self) -> dict[str, Tensor]:
        """The scores that are given, or every one of `SCORES` that the answer allows, (n,) in float64.

        Energy and largest logit of several networks are the weighted means over them.
        """
        if self.given is not None:
            return {name: score.double() for name, score in self.given.items()}
        probs = self.probs.double()
        if not self.likelihood.competing:
            answers = self.likelihood.answer_probabilities(probs)
            found = {
                "max probability": max_probability_score(probs, self.likelihood),
                "entropy": entropy_score(answers).mean(-1),
            }
        else:
            found = {"max probability": max_probability_score(probs), "entropy": entropy_score(probs)}
        if self.logits is not None:
            logits = self.logits.double()
            count = len(logits)
            weights = torch.full((count,), 1 / count) if self.weights is None else self.weights
            competing = self.likelihood.competing
            energy = energy_score if competing else label_energy_score
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

    def add(self, answer: Answer, labels: Tensor | None = None) -> None:
        """Take a batch.

        Args:
            answer: what the method says of it.
            labels: (n,), where there are any.
        """
        if not answer.likelihood.competing:
            self._add_questions(answer, labels)
            return
        probs = answer.probs
        exact = probs.double()
        confidence, predicted = exact.max(1)
        row = {"confidence": confidence, "predicted": predicted}
        if labels is not None:
            chosen = probs.gather(1, labels[:, None]).squeeze(1)
            one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
            row["label"], row["correct"] = labels, predicted == labels
            row["nll"] = -chosen.clamp_min(torch.finfo(probs.dtype).tiny).double().log()
            row["brier"] = (exact - one_hot).square().sum(1)
        if answer.sets is not None:
            row["set size"] = answer.sets.sum(1)
            if labels is not None:
                row["held"] = answer.sets.gather(1, labels.to(answer.sets.device)[:, None]).squeeze(1)
        row |= answer.scores()
        self.columns = tuple(row)
        self.parts.append(torch.stack([column.double() for column in row.values()], dim=1))

    def _add_questions(self, answer: Answer, labels: Tensor | None) -> None:
        """Take a batch of inputs with several labels each: a row for each label that is known, or for all where none is given."""
        count, outputs = answer.probs.shape
        (table,) = answer.likelihood.table(answer.probs.double().T[None])
        confidence, predicted = table.max(0)
        row = {
            "confidence": confidence,
            "predicted": predicted,
            "question": torch.arange(outputs).repeat_interleave(count),
        }
        keep = torch.ones(count * outputs, dtype=torch.bool)
        if labels is not None:
            asked = answer.likelihood.asked(answer.likelihood.check_labels(labels, answer.probs, "the labels"))
            keep = asked >= 0
            own = table.gather(0, asked.clamp_min(0)[None])[0]
            row |= {"label": asked, "correct": predicted == asked, "yes": table[1]}
            # Probabilities of single precision: 1 - p may have rounded to 0.
            row["nll"] = -own.clamp_min(torch.finfo(answer.probs.dtype).eps).log()
            row["brier"] = 2 * (1 - own).square()
        row |= {name: score.repeat(outputs) for name, score in answer.scores().items()}
        self.columns = tuple(row)
        self.parts.append(torch.stack([column.double() for column in row.values()], dim=1)[keep])

    def __add__(self, other: Tally) -> Tally:
        """Of both sets of data, those of the first one first."""
        return Tally(self.columns or other.columns, self.parts + other.parts)

    def dealt(self, place: int, count: int) -> Tally:
        """Of the inputs place, place + count, place + 2 count, ... alone."""
        return Tally(self.columns, [torch.cat(self.parts)[place::count]])

    def together(self, team: Team) -> Tally:
        """What all processes counted, on every one. Call it inside `team.work(...)`."""
        if team.size == 1:
            return self
        # A process without data does not know the columns.
        everyone = team.collect(list(self.columns))
        columns = team.share(next((one for one in everyone or () if one), []))
        return Tally(tuple(columns), [team.rows(torch.cat(self.parts) if self.parts else None)])

    @property
    def count(self) -> int:
        """How many inputs there were."""
        return sum(len(part) for part in self.parts)

    def __getitem__(self, column: str) -> Tensor:
        """One number of each input (n,), by its name."""
        index = self.columns.index(column)
        return torch.cat([part[:, index] for part in self.parts])

    @property
    def scores(self) -> dict[str, Tensor]:
        """Outlier scores of each input, by name."""
        return {name: self[name] for name in self.columns if name not in FIXED}

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
        return {
            "accuracy": mean_of(self["correct"]),
            "nll": mean_of(self["nll"]),
            "brier": mean_of(self["brier"]),
            "ece": calibration_error(self["confidence"], self["correct"], BINS),
            "confidence": mean_of(self["confidence"]),
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

    def by_class(self, classes: int) -> tuple[list[int], list[float], list[float]]:
        """Number of data, correct predictions and sum of confidences of each class."""
        labels = self["question" if "question" in self.columns else "label"].long()
        counts = torch.bincount(labels, minlength=classes)
        right, sure = (torch.bincount(labels, self[name], classes) for name in ("correct", "confidence"))
        return counts.tolist(), right.tolist(), sure.tolist()


def tally_set(
    answers: Iterable[tuple[Mapping[str, Answer], Tensor | None]], team: Team | None = None, what: str = "the set"
) -> dict[str, Tally]:
    """One pass over a set of data: for every batch, every method answers and its tally takes it.

    Args:
        answers: for each batch, what every method says of it, by name, and the labels, where there are any.
        team: the processes that do it together, each with its own part of the set; call it inside `team.work(...)`. None is this
            one alone.
        what: the set, in words for messages.

    Returns:
        By method, the tally of all the data, the same for every process.

    Raises:
        DataError: if there are no data.
    """
    tallies: dict[str, Tally] = {}
    for by_method, labels in answers:
        for method, answer in by_method.items():
            tallies.setdefault(method, Tally()).add(answer, labels)
        if team is not None:
            team.check()
    methods = list(tallies)
    if team is not None and team.size > 1:
        everyone = team.collect(methods)  # a process without data does not know the methods
        methods = team.share(next((one for one in everyone or () if one), []))
        tallies = {method: tallies.get(method, Tally()).together(team) for method in methods}
    if not methods:
        message = f"{what} holds no input that can be used."
        raise DataError(message)
    return tallies
