"""A classifier's predictions for a batch, as columns of a `mola.evaluation.tally.Tally`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from molaplace.evaluation.tally import INPUT, Tally
from molaplace.likelihoods import CATEGORICAL, ClassificationLikelihood
from molaplace.outliers import energy_score, label_energy_score, max_logit_score, max_probability_score
from molaplace.uncertainty import entropy

SCORES = ("max probability", "entropy", "energy", "maximum logit", "ood score")
"""Names of the outlier scores for classifiers; every score is higher for outliers."""

ALL_SCORES = (*SCORES, "variance")
"""Names of all outlier scores: those for classifiers, and the predictive variance for regression models."""

FIXED = (INPUT, "confidence", "predicted", "question", "label", "correct", "yes", "nll", "brier", "set size", "held")
"""Columns that are not outlier scores. For multi-label data, "question" is the index of the label. Columns with brackets, such as
"held[0.9]" in `mola.evaluation.regression`, are not outlier scores either."""


def outlier_columns(tally: Tally) -> dict[str, Tensor]:
    """Return the columns that are outlier scores, keyed by name."""
    return {name: tally[name] for name in tally.columns if name not in FIXED and not name.endswith("]")}


def gen_score(probs: Tensor, exponent: float = 0.1, largest: int = 100) -> Tensor:
    r"""Return the generalised entropy (GEN; Liu et al., 2023) of each row of probabilities (n, C); it is higher for outliers.

    .. math:: \sum_{m=1}^{M} p_{(m)}^\gamma (1 - p_{(m)})^\gamma

    The sum runs over the M largest probabilities. Because gamma is small, the score responds to small probabilities even when a
    network is almost certain. The defaults for gamma and M are the authors' choices for 1000 classes.
    """
    # The complement of the largest probability is computed as the sum of all others, because 1 - p
    # rounds to 0 for float32 numbers near 1.
    ordered = probs.double().sort(dim=1, descending=True).values.clamp(0, 1)
    rest = 1 - ordered
    rest[:, 0] = ordered[:, 1:].sum(1)
    return (ordered * rest)[:, :largest].pow(exponent).sum(1)


def outlier_scores(
    probs: Tensor,
    logits: Tensor | None = None,
    weights: Tensor | None = None,
    ood_score: Tensor | None = None,
    likelihood: ClassificationLikelihood = CATEGORICAL,
) -> dict[str, Tensor]:
    """Return the available `SCORES`, each of shape (n,), in float64.

    Scores computed from logits (K, n, C) are averaged over the K networks with the given `weights` (K,).
    """
    exact = probs.double()
    uncertain = entropy(likelihood.choices(exact))
    found = {
        "max probability": max_probability_score(exact, likelihood),
        "entropy": uncertain if likelihood.mutually_exclusive else uncertain.mean(-1),
    }
    if logits is not None:
        shares = torch.full((len(logits),), 1 / len(logits)) if weights is None else weights
        energy = energy_score if likelihood.mutually_exclusive else label_energy_score
        for name, score in (("energy", energy), ("maximum logit", max_logit_score)):
            found[name] = torch.einsum("k,kn->n", shares.to(logits.double()), score(logits.double()))
    return found if ood_score is None else {**found, "ood score": ood_score.double()}


@dataclass(frozen=True)
class Answer:
    """Predictions of a classifier for a batch."""

    probs: Tensor
    """Probabilities, shape (n, C)."""
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    """Outlier scores by name, each of shape (n,)."""
    sets: Tensor | None = None
    """Prediction sets as masks, shape (n, C)."""
    likelihood: ClassificationLikelihood = CATEGORICAL
    inputs: Tensor | None = None
    """Index of each row's input, shape (n,), if the rows are positions; None if each row is an input."""

    def columns(self, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the columns of a tally; `labels`, if known, are class indices (n,) or, for multi-label data, 0s and 1s (n, C)."""
        probs, labels = self.probs.detach().cpu(), None if labels is None else labels.cpu()
        limits = torch.finfo(probs.dtype)
        if not self.likelihood.mutually_exclusive:  # clamp both ends, because 1 - p may also round to 0
            return self._by_label(probs.double().clamp(limits.eps, 1 - limits.eps), labels)
        # A probability that has underflowed to 0 is replaced by the smallest positive normal number of its data type.
        probs = probs.clamp_min(limits.tiny).double()
        confidence, predicted = probs.max(1)
        row = {} if self.inputs is None else {INPUT: self.inputs}
        row |= {"confidence": confidence, "predicted": predicted}
        if labels is not None:
            row |= {"label": labels, **self.likelihood.distribution(probs).scores(labels)}
        if self.sets is not None:
            row["set size"] = self.sets.cpu().sum(1)
            if labels is not None:
                row["held"] = self.sets.cpu().gather(1, labels[:, None]).squeeze(1)
        return {**row, **self.scores}

    def _by_label(self, probs: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        known, scored = torch.ones_like(probs, dtype=torch.bool), {}
        if labels is not None:
            truth = self.likelihood.check_labels(labels, probs, "the labels")
            known = ~truth.isnan()
            scored = {"label": truth[known], "yes": probs[known]}
            scored |= self.likelihood.distribution(probs).scores(truth)
        count, outputs = probs.shape
        own = torch.arange(count) if self.inputs is None else self.inputs.cpu()
        return {
            **({INPUT: own[:, None].expand_as(known)[known]} if outputs > 1 or self.inputs is not None else {}),
            "confidence": torch.maximum(probs, 1 - probs)[known],
            "predicted": (probs > 0.5)[known],
            "question": torch.arange(outputs).expand_as(known)[known],
            **scored,
            **{name: one.cpu()[:, None].expand_as(known)[known] for name, one in self.scores.items()},
        }
