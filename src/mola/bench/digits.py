"""Four methods on handwritten digits: as they are, rotated, and against inputs that are no digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from mola import metrics
from mola.bench.demo_result import TEST, Array, Detection, DigitsResult, Examples, Scores
from mola.bench.methods import Contestants, four_methods
from mola.compare import Answer, Lead, Measured, Tally, area_between, lead, mean_of
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
    leads: dict[int, dict[str, Lead]] = {}
    reliability: dict[int, dict[str, Array]] = {}
    turned = {angle: rotate(digits.test.inputs, angle) for angle in ANGLES}
    for angle, inputs in turned.items():
        probs = {name: method(inputs) for name, method in methods.items()}
        measured = {name: _measured(values, digits.test.labels) for name, values in probs.items()}
        rotated[angle] = {name: _scores(found) for name, found in measured.items()}
        leads[angle] = {
            score: lead({(name,): found[score] for name, found in measured.items()}, "low")
            for score in ("nll", "brier", "ece")
        }
        reliability[angle] = {
            name: metrics.bin_confidences(values, digits.test.labels, bins=10).numpy() for name, values in probs.items()
        }
    sets = dict([(TEST, digits.test.inputs), *outliers.items()])
    tallies = {
        kind: {name: _tally(method, inputs, own=name in tuned) for name, method in methods.items()}
        for kind, inputs in sets.items()
    }
    detection = {kind: _detection(tallies[TEST], tallies[kind]) for kind, _ in outliers.items()}
    shown = {TEST: digits.test.inputs, "rotated by 45°": turned[45], "rotated by 90°": turned[90], **outliers.near}
    result = DigitsResult(
        sizes={"train": len(digits.train), "val": len(digits.val), "test": len(digits.test)},
        parameters=sum(parameter.numel() for parameter in networks[0].parameters()),
        prior_precision={name: posterior.prior_precision[0] for name, posterior in tuned.items()},
        rule={name: posterior.tuning.rule for name, posterior in tuned.items() if posterior.tuning is not None},
        notes=contestants.notes,
        rotated=rotated,
        reliability=reliability,
        detection={kind: found for kind, (found, _) in detection.items()},
        leads=leads,
        detection_leads={kind: found for kind, (_, found) in detection.items()},
        confidences={
            kind: {name: tally["confidence"].numpy() for name, tally in by_method.items()}
            for kind, by_method in tallies.items()
        },
        examples={kind: _examples(methods, inputs) for kind, inputs in shown.items()},
    )
    return result, contestants


def _measured(probs: Tensor, labels: Tensor) -> dict[str, Measured]:
    tally = Tally()
    tally.add(Answer(probs), labels)
    return tally.measured()


def _scores(found: dict[str, Measured]) -> Scores:
    return Scores(
        **{name: one.value for name, one in found.items()}, errors={name: one.error for name, one in found.items()}
    )


def _tally(method: MoLA, inputs: Tensor, *, own: bool) -> Tally:
    """A method on unlabelled inputs, with the outlier score that it has of its own, if it has one."""
    found, tally = method.predict(inputs), Tally()
    tally.add(Answer(found.probs, found.logit_mean, method.weights, found.ood_score if own else None))
    return tally


def _confidence(method: MoLA, inputs: Tensor) -> Array:
    return np.asarray(method(inputs).double().max(1).values.numpy())


def _detection(inside: dict[str, Tally], outside: dict[str, Tally]) -> tuple[dict[str, Detection], dict[str, Lead]]:
    """Every method by every score that it has, and who leads."""
    sure = {name: mean_of(tally["confidence"]) for name, tally in outside.items()}
    areas: dict[tuple[str, ...], Measured] = {
        (name, score): area_between(inside[name][score], far)
        for name, tally in outside.items()
        for score, far in tally.scores.items()
    }
    found = {
        name: Detection(
            sure[name].value,
            sure[name].error,
            areas[name, "max probability"].value,
            {score: (areas[name, score].value, areas[name, score].error) for score in tally.scores},
        )
        for name, tally in outside.items()
    }
    leads = {
        "confidence": lead({(name,): one for name, one in sure.items()}, "low"),
        "auroc": lead({(name,): areas[name, "max probability"] for name in outside}, "high"),
        "any": lead(areas, "high"),
    }
    return found, leads


def _examples(methods: dict[str, MoLA], inputs: Tensor) -> Examples:
    few = inputs[:EXAMPLES]
    confidence = {name: _confidence(method, few) for name, method in methods.items()}
    return Examples(few.squeeze(1).double().numpy(), confidence)
