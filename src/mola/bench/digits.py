"""Four methods on handwritten digits: as they are, rotated, and against inputs that are no digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mola import metrics
from mola.bench.demo_result import TEST, Array, Detection, DigitsResult, Examples, Scores
from mola.bench.methods import Contestants, four_methods
from mola.data.digits import CLASSES, SIDE, Digits
from mola.data.labelled import Labelled
from mola.data.outliers import natural_patches, uniform_noise
from mola.data.rotation import rotate
from mola.models.mlp import digits_mlp
from mola.posterior import MoLA

__all__ = ["ANGLES", "FAR", "build_network", "compare_on_digits", "outlier_sets"]

ANGLES = tuple(range(0, 181, 15))
"""Degrees, as for the paper's rotated MNIST."""

FAR = 1000.0
"""How many times farther from the origin than the data the far-away sets lie."""

TIMES = "\N{MULTIPLICATION SIGN}"

EXAMPLES = 8


def build_network() -> nn.Sequential:
    """The network of the demo."""
    return digits_mlp(CLASSES)


@dataclass(frozen=True)
class OutlierSets:
    """Inputs that are no digits, by name."""

    near: dict[str, Tensor]
    """In the digits' own value range."""
    far: dict[str, Tensor]
    """Scaled away from the data."""

    def items(self) -> list[tuple[str, Tensor]]:
        """All of them."""
        return [*self.near.items(), *self.far.items()]


def outlier_sets(test: Labelled, count: int, seed: int) -> OutlierSets:
    """Natural patches and noise; far away, the same noise and the test digits themselves."""
    noise = uniform_noise(count, SIDE, seed=seed)
    return OutlierSets(
        near={"natural patches": natural_patches(count, SIDE, seed=seed), "noise": noise},
        far={f"noise {TIMES}{FAR:.0f}": FAR * noise, f"digits {TIMES}{FAR:.0f}": FAR * test.inputs},
    )


def compare_on_digits(
    networks: Sequence[nn.Module], digits: Digits, outliers: OutlierSets
) -> tuple[DigitsResult, Contestants]:
    """Fit, tune and score the four methods.

    Args:
        networks: trained on `digits.train`.
        digits: the data.
        outliers: inputs that are no digits.

    Returns:
        The comparison, and the methods themselves for what else one would ask them.
    """
    contestants = four_methods(networks, digits.train.batches(), digits.val.batches())
    methods, tuned = contestants.predictors, contestants.tuned()
    rotated: dict[int, dict[str, Scores]] = {}
    reliability: dict[int, dict[str, Array]] = {}
    turned = {angle: rotate(digits.test.inputs, angle) for angle in ANGLES}
    for angle, inputs in turned.items():
        probs = {name: method(inputs) for name, method in methods.items()}
        rotated[angle] = {name: _scores(values, digits.test.labels) for name, values in probs.items()}
        reliability[angle] = {
            name: metrics.bin_confidences(values, digits.test.labels, bins=10).numpy() for name, values in probs.items()
        }
    sets = dict([(TEST, digits.test.inputs), *outliers.items()])
    confidences = {
        kind: {name: _confidence(method, inputs) for name, method in methods.items()} for kind, inputs in sets.items()
    }
    inlier_scores = {name: posterior.predict(digits.test.inputs).ood_score for name, posterior in tuned.items()}
    shown = {TEST: digits.test.inputs, "rotated by 45°": turned[45], "rotated by 90°": turned[90], **outliers.near}
    result = DigitsResult(
        sizes={"train": len(digits.train), "val": len(digits.val), "test": len(digits.test)},
        parameters=sum(parameter.numel() for parameter in networks[0].parameters()),
        prior_precision={name: posterior.prior_precision[0] for name, posterior in tuned.items()},
        rule={name: posterior.tuning.rule for name, posterior in tuned.items() if posterior.tuning is not None},
        notes=contestants.notes,
        rotated=rotated,
        reliability=reliability,
        detection={
            kind: {name: _detection(confidences[TEST][name], confidences[kind][name]) for name in methods}
            for kind, _ in outliers.items()
        },
        ood_score_auroc={
            kind: {
                name: metrics.auroc(inlier_scores[name], posterior.predict(inputs).ood_score)
                for name, posterior in tuned.items()
            }
            for kind, inputs in outliers.items()
        },
        confidences=confidences,
        examples={kind: _examples(methods, inputs) for kind, inputs in shown.items()},
    )
    return result, contestants


def _scores(probs: Tensor, labels: Tensor) -> Scores:
    return Scores(
        accuracy=metrics.accuracy(probs, labels),
        nll=metrics.negative_log_likelihood(probs, labels),
        ece=metrics.expected_calibration_error(probs, labels),
        brier=metrics.brier(probs, labels),
        confidence=metrics.mean_confidence(probs),
    )


def _confidence(method: MoLA, inputs: Tensor) -> Array:
    return np.asarray(method(inputs).double().max(1).values.numpy())


def _detection(inliers: Array, outliers: Array) -> Detection:
    auroc = metrics.auroc(-torch.from_numpy(inliers), -torch.from_numpy(outliers))
    return Detection(float(outliers.mean()), auroc)


def _examples(methods: dict[str, MoLA], inputs: Tensor) -> Examples:
    few = inputs[:EXAMPLES]
    confidence = {name: _confidence(method, few) for name, method in methods.items()}
    return Examples(few.squeeze(1).double().numpy(), confidence)
