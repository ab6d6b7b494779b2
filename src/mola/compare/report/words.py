"""What the demo's numbers say, in sentences. Each states both numbers and leaves the verdict to the reader."""

from __future__ import annotations

from dataclasses import dataclass

from mola.compare.demo_result import DemoResult, Detection

__all__ = ["CAPTIONS", "TITLES", "Headline", "headlines", "near_one", "tuning_words"]

TITLES = {
    "examples": "What the networks were shown",
    "histograms": "How sure they are of what is not a digit",
    "reliability": "Whether confidence can be taken at its word",
    "rotation": "As the digits turn",
    "distance": "Far away from the data",
    "moons": "Where a classifier should not be sure",
}

CAPTIONS = {
    "examples": (
        "The first inputs of each kind, as they came. Patches and noise have the size and the value range of the "
        "digits, so neither gives them away."
    ),
    "histograms": (
        "Share of inputs (square-root scale) by confidence. Confidence is useful where the filled histogram, of inputs "
        "that are not digits, stays left of the outline, the test digits. A thousandfold farther out, each network "
        "alone is certain, and the ensemble's confidence only counts its votes."
    ),
    "reliability": (
        "Below the dashed line a method is surer than it is right. Areas show how many predictions a point stands for; "
        "bins of fewer than five are not drawn, but count in the ECE."
    ),
    "rotation": (
        "Accuracy is nearly the same for all four methods, so only MoLA's is drawn. The last layer is the only one that "
        "is uncertain here: beyond 45° every method is far surer than it is right, and what differs is by how much "
        "they pay for it in log loss."
    ),
    "distance": (
        "First two panels: inputs multiplied by δ (vertical axes are cut). The networks have no biases, so theory is "
        "exact: a single network becomes certain, while LLLA and MoLA stop at the dotted limits. No curve crosses the "
        "Theorem's bound. Last panel: where that bound bites. It must hold for every input at once, and drops below 1 "
        "only at prior precisions at which the test digits, too, are no longer recognised with confidence. Scaling a digit "
        "leaves its direction as it was: no method here grows less sure of it."
    ),
    "moons": (
        "Confidence in a window six times wider than the data, on one scale. MAP is sure everywhere but on a thin line; "
        "the ensemble is unsure where its members disagree; LLLA is unsure in wide sectors around the boundary; MoLA is "
        "both. These networks have biases."
    ),
}


@dataclass(frozen=True)
class Headline:
    """One finding: MAP's number, MoLA's number, and a sentence with its circumstances."""

    title: str
    before: str
    after: str
    sentence: str


def headlines(result: DemoResult) -> list[Headline]:
    """The findings that the page and the terminal open with: the cost first, then the gains."""
    digits = result.digits
    plain, mixed = digits.clean["MAP"], digits.clean["MoLA"]
    angle = 30
    turned_plain, turned = digits.rotated[angle]["MAP"], digits.rotated[angle]["MoLA"]
    patches, far = "natural patches", next(kind for kind in digits.detection if kind.startswith("noise "))
    found_plain, found = digits.detection[patches]["MAP"], digits.detection[patches]["MoLA"]
    far_plain, far_mixed = digits.detection[far]["MAP"], digits.detection[far]["MoLA"]
    bound = result.distance.bounds["noise"]["MoLA"]
    return [
        Headline(
            "log loss, test digits",
            f"{plain.nll:.3f}",
            f"{mixed.nll:.3f}",
            f"Accuracy {100 * plain.accuracy:.1f} and {100 * mixed.accuracy:.1f}%, calibration error "
            f"{100 * plain.ece:.1f} and {100 * mixed.ece:.1f}%.",
        ),
        Headline(
            f"log loss, rotated by {angle}°",
            f"{turned_plain.nll:.2f}",
            f"{turned.nll:.2f}",
            f"Accuracy {100 * turned_plain.accuracy:.0f} and {100 * turned.accuracy:.0f}%, calibration error "
            f"{100 * turned_plain.ece:.0f} and {100 * turned.ece:.0f}%.",
        ),
        Headline(
            "confidence in natural patches",
            f"{100 * found_plain.confidence:.0f}%",
            f"{100 * found.confidence:.0f}%",
            f"AUROC by confidence {100 * found_plain.auroc:.0f} and {100 * found.auroc:.0f}%; by the best score of each "
            f"{_best_score(found_plain)} and {_best_score(found)}.",
        ),
        Headline(
            "confidence in noise, far away",
            f"{100 * far_plain.confidence:.0f}%",
            f"{100 * far_mixed.confidence:.0f}%",
            f"MoLA's exact limit is {100 * result.distance.limits['noise']['MoLA']:.1f}%. The Theorem's bound at the tuned "
            f"prior precision is {near_one(bound)}.",
        ),
    ]


def _best_score(found: Detection) -> str:
    best = max(found.scores, key=lambda score: found.scores[score][0])
    return f"{100 * found.scores[best][0]:.0f}% ({best})"


def near_one(value: float) -> str:
    """A probability, telling 1 apart from what only rounds to it."""
    if value < 0.9995:
        return f"{value:.3f}"
    return f"1 - {1 - value:.0e}" if value < 1 else "1 to machine precision"


def tuning_words(result: DemoResult) -> list[str]:
    """How the prior precisions came about, and what tuning remarked."""
    digits = result.digits
    words = [
        f"{name}: prior precision {value:.3g}, by {digits.rule[name]}."
        for name, value in digits.prior_precision.items()
    ]
    return words + list(digits.notes) + [f"two moons, {note}" for note in result.moons.notes]
