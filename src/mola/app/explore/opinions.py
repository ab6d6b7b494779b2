r"""What MAP, the deep ensemble and MoLA say of one picture, and of the same picture turned.

One pass of the networks gives all three: with :math:`f_k` the logits of network k,

.. math:: p_{MAP} = \sigma(f_1), \qquad p_{DE} = \sum_k \pi_k\, \sigma(f_k), \qquad p_{MoLA} = \sum_k \pi_k\, \ell(f_k, v_k),

the link :math:`\ell` being that of the posterior, of logits that it may have cooled by distance. They are
`mola.ensemble([network])`, `mola.ensemble(networks, weights)` with the posterior's weights, so that only the Laplace
approximations differ, and the posterior.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mola.app.explore.changes import Changes, apply
from mola.app.explore.subject import Subject
from mola.component import MixtureRows
from mola.likelihoods import CATEGORICAL
from mola.network import capture, evaluating
from mola.prediction import Prediction
from mola.scaling import LogitScaling

METHODS = ("MAP", "DE", "MoLA")

PATIENCE = 1.5
"""Seconds that a curve over angles may take."""

STEPS = (10, 15, 30, 45)
"""Degrees between the angles of a curve: the finest for which patience lasts."""

Probabilities = tuple[float, ...]


@dataclass(frozen=True)
class Member:
    """One component of the mixture: its weight, the network alone, and the network with its Laplace approximation."""

    weight: float
    network: Probabilities
    laplace: Probabilities


@dataclass(frozen=True)
class Opinions:
    """Of one picture.

    Attributes:
        probs: of each method, in the order of `METHODS`.
        aleatoric: part of MoLA's entropy, in nats.
        epistemic: the other part.
        score: the outlier score.
        members: the components of the mixture.
        distance: from the training classes, 1 being usual; None where it is not known.
        uncooled: MoLA's confidence if logits were not cooled by distance; None where they are not.
    """

    probs: Mapping[str, Probabilities]
    aleatoric: float
    epistemic: float
    score: float
    members: tuple[Member, ...]
    distance: float | None = None
    uncooled: float | None = None

    def confidence(self, method: str) -> float:
        """The largest probability."""
        return max(self.probs[method])

    def label(self, method: str) -> int:
        """The most probable class."""
        return self.probs[method].index(self.confidence(method))


@dataclass(frozen=True)
class Turned:
    """Confidence of each method against the angle of rotation, and the class that MoLA chooses."""

    angles: tuple[float, ...]
    confidence: Mapping[str, tuple[float, ...]]
    labels: tuple[int, ...]


class Explorer:
    """A subject that can be asked, by several people at once: it keeps nothing of what it was asked.

    Args:
        subject: what is explored.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.step = self._affordable_step()

    def values(self, pixels: Tensor, changes: Changes) -> Tensor:
        """Bytes (channels, height, width), changed: (1, channels, height, width) between 0 and 1."""
        return apply(pixels[None].to(torch.float32) / 255, changes)

    def look(self, pixels: Tensor, changes: Changes) -> Opinions:
        """What everybody says of a picture.

        Args:
            pixels: bytes (channels, height, width).
            changes: what is done to it first.

        Returns:
            The opinions.
        """
        inputs = self.subject.sight.inputs(self.values(pixels, changes))
        prediction = self._predict(inputs)
        rows = self._rows(inputs)
        laplace = self._each(rows, self.subject.posterior.scaling)
        plain = _plain(prediction)
        members = [
            Member(weight, _row(network), _row(whole))
            for weight, network, whole in zip(
                self.subject.posterior.weights.tolist(), plain[:, 0], [one[0] for one in laplace], strict=True
            )
        ]
        return Opinions(
            probs={
                name: _row(probs[0])
                for name, probs in _methods(prediction, plain, self.subject.posterior.weights).items()
            },
            aleatoric=max(0.0, float(prediction.aleatoric[0])),
            epistemic=float(prediction.epistemic[0]),
            score=float(prediction.ood_score[0]),
            members=tuple(members),
            distance=None if prediction.distance is None else float(prediction.distance[0]),
            uncooled=self._uncooled(rows),
        )

    def turn(self, pixels: Tensor, changes: Changes) -> Turned | None:
        """Confidence against the angle, all else as it is.

        Args:
            pixels: bytes (channels, height, width).
            changes: their rotation is one of the angles.

        Returns:
            The curve, or None where the networks are too slow for it.
        """
        if self.step is None:
            return None
        angles = sorted({*(float(angle) for angle in range(-180, 181, self.step)), float(changes.rotation)})
        turned = torch.cat([self.values(pixels, replace(changes, rotation=angle)) for angle in angles])
        prediction = self._predict(self.subject.sight.inputs(turned))
        methods = _methods(prediction, _plain(prediction), self.subject.posterior.weights)
        return Turned(
            angles=tuple(angles),
            confidence={name: _row(probs.max(-1).values) for name, probs in methods.items()},
            labels=tuple(prediction.label.tolist()),
        )

    def _rows(self, inputs: Tensor) -> MixtureRows:
        components, placed = self.subject.posterior.components, self._placed(inputs)
        with torch.no_grad(), evaluating(*self.subject.posterior.networks):
            captured = [capture(one.network, one.head, placed, one.likelihood) for one in components]
            (parts,) = zip(*(one.chunks(len(inputs)) for one in captured), strict=True)
        return MixtureRows([phi for _, phi, _ in parts], [outputs for _, _, outputs in parts])

    def _each(self, rows: MixtureRows, scaling: LogitScaling) -> list[Tensor]:
        # Probabilities (n, C) of every component: with their weights they make up the mixture.
        posterior, outputs = self.subject.posterior, rows.outputs
        with torch.no_grad():
            distance, norm = posterior.log_distances(rows) if scaling.exponent > 0 else (None, None)
            weights, pooling = posterior.weights.to(outputs[0]), scaling.pooling
            scale = list(scaling.factors(distance, norm, weights, norms=True))
            spreads = [one.spread(phi) for one, phi in zip(posterior.components, rows.phi, strict=True)]
            each = CATEGORICAL.member_probabilities(
                outputs, spreads, weights, posterior.link, scale=scale, pooling=pooling
            )
        return [one.cpu() for one in each]

    def _uncooled(self, rows: MixtureRows) -> float | None:
        posterior = self.subject.posterior
        if posterior.distance_exponent == 0:
            return None
        each = torch.stack(self._each(rows, replace(posterior.scaling, exponent=0.0)))
        return float(torch.einsum("k,knc->nc", posterior.weights.to(each), each).max())

    def _predict(self, inputs: Tensor) -> Prediction:
        return self.subject.posterior.predict(self._placed(inputs)).cpu()

    def _placed(self, inputs: Tensor) -> Tensor:
        like = next(self.subject.posterior.networks[0].parameters(), None)
        return inputs if like is None else inputs.to(like.device)

    def _affordable_step(self) -> int | None:
        blank = self.subject.sight.inputs(torch.zeros(4, *self.subject.sight.shape))
        self._predict(blank)  # the first pass prepares
        began = time.perf_counter()
        self._predict(blank)
        each = (time.perf_counter() - began) / len(blank)
        return affordable(each, STEPS)


def affordable(seconds: float, steps: Sequence[int]) -> int | None:
    """The finest of these steps that a full turn can be made in, at so many seconds an angle; None if there is none."""
    return next((step for step in steps if 360 / step * seconds <= PATIENCE), None)


def _plain(prediction: Prediction) -> Tensor:
    # Probabilities (K, n, C) of the networks without their Laplace approximations.
    assert prediction.logit_mean is not None  # a mixture of Laplace approximations has logits
    return CATEGORICAL.probabilities(prediction.logit_mean)


def _methods(prediction: Prediction, plain: Tensor, weights: Tensor) -> dict[str, Tensor]:
    # Probabilities (n, C) by method: the first network, the networks with the mixture's weights, and the mixture.
    ensemble = torch.einsum("k,knc->nc", weights.to(plain), plain)
    return dict(zip(METHODS, (plain[0], ensemble, prediction.probs), strict=True))


def _row(values: Tensor) -> Probabilities:
    return tuple(values.double().tolist())
