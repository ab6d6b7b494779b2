"""What a predictor says about each input: probabilities, and how much to trust them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mola.distributed import Team
from mola.errors import DataError
from mola.uncertainty import entropy

__all__ = ["Prediction"]


@dataclass(frozen=True, repr=False)
class Prediction:
    """Probabilities of n inputs over C classes, with their uncertainty taken apart."""

    probs: Tensor
    """(n, C)"""
    mutual_information: Tensor
    """(n,): the epistemic part of the entropy, in nats."""
    ood_score: Tensor
    """(n,): higher = more outlying."""
    ood_score_name: str
    """Which score it is: "far-field" where there is curvature, else "max-probability"."""
    logit_mean: Tensor | None = None
    """(K, n, C), where the members have logits."""
    logit_variance: Tensor | None = None
    """(K, n, C)"""

    @property
    def label(self) -> Tensor:
        """Most probable class (n,)."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Largest probability (n,)."""
        return self.probs.max(-1).values

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty (n,) in nats: aleatoric and epistemic together."""
        return entropy(self.probs)

    total = entropy

    @property
    def epistemic(self) -> Tensor:
        """What more data would remove (n,): the mutual information."""
        return self.mutual_information

    @property
    def aleatoric(self) -> Tensor:
        """What no data would remove (n,)."""
        return self.entropy - self.mutual_information

    def __len__(self) -> int:
        """Number of inputs."""
        return len(self.probs)

    def __repr__(self) -> str:
        """Size and averages, not the numbers."""
        count, classes = self.probs.shape
        return (
            f"Prediction({count} inputs, {classes} classes, mean confidence {float(self.confidence.mean()):.3f}, "
            f"mean entropy {float(self.entropy.mean()):.3f} of which epistemic {float(self.epistemic.mean()):.3f})"
        )

    def cpu(self) -> Prediction:
        """The same in main memory."""
        return Prediction(
            self.probs.cpu(),
            self.mutual_information.cpu(),
            self.ood_score.cpu(),
            self.ood_score_name,
            None if self.logit_mean is None else self.logit_mean.cpu(),
            None if self.logit_variance is None else self.logit_variance.cpu(),
        )

    @staticmethod
    def concatenate(parts: Sequence[Prediction]) -> Prediction:
        """Predictions of several batches as one."""

        def joined(name: str, axis: int) -> Tensor | None:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else torch.cat(values, dim=axis)

        return Prediction(
            torch.cat([part.probs for part in parts]),
            torch.cat([part.mutual_information for part in parts]),
            torch.cat([part.ood_score for part in parts]),
            parts[0].ood_score_name,
            joined("logit_mean", 1),
            joined("logit_variance", 1),
        )

    @staticmethod
    def gather(parts: Sequence[Prediction], team: Team) -> Prediction:
        """Predictions of all processes as one, in the order of the ranks, on every rank. Call it inside `team.work(...)`.

        Args:
            parts: of this process; there may be none, if others have some.
            team: the processes.

        Returns:
            All predictions.

        Raises:
            DataError: if no process has any.
        """
        own = Prediction.concatenate(parts) if parts else None
        kinds = team.collect(None if own is None else [own.ood_score_name, own.logit_mean is not None])
        kind = next((one for one in kinds or () if one is not None), None)
        if team.first and kind is None:
            message = "the prediction loader is empty on every rank: it yielded no batch."
            raise DataError(message)
        name, has_logits = team.share(kind)

        def joined(values: Tensor | None, axis: int = 0) -> Tensor:
            return team.rows(None if values is None else values.transpose(0, axis)).transpose(0, axis)

        return Prediction(
            joined(None if own is None else own.probs),
            joined(None if own is None else own.mutual_information),
            joined(None if own is None else own.ood_score),
            name,
            joined(None if own is None else own.logit_mean, 1) if has_logits else None,
            joined(None if own is None else own.logit_variance, 1) if has_logits else None,
        )
