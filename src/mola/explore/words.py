"""What is seen, in plain words."""

from __future__ import annotations

import math

from mola.explore.opinions import METHODS, Opinions
from mola.explore.subject import Subject

__all__ = ["percent", "verdict"]

FULL_NAMES = {"MAP": "the single network", "DE": "the ensemble", "MoLA": "MoLA"}
RARE, ODD = 0.99, 0.95
"""Shares of the validation data that a picture must exceed to be called unlike them, or unusual."""

SURE, DOUBTFUL = 0.9, 0.6


def percent(value: float) -> str:
    """A probability in percent, never rounded to a certainty that it is not."""
    if value >= 0.9995 and value < 1:
        return "> 99.9 %"
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.1f} %"


def verdict(opinions: Opinions, subject: Subject) -> list[str]:
    """Two or three sentences on what the methods say and why.

    Args:
        opinions: of one picture.
        subject: names the classes, and has scores to compare with.

    Returns:
        Sentences, the first the most important.
    """
    return [_chosen(opinions, subject.classes), *_strange(opinions, subject), *_why(opinions)]


def _chosen(opinions: Opinions, classes: tuple[str, ...]) -> str:
    said = {method: classes[opinions.label(method)] for method in METHODS}
    sure = {method: percent(opinions.confidence(method)) for method in METHODS}
    if len(set(said.values())) == 1:
        return (
            f"All say {said['MoLA']}: the single network with {sure['MAP']}, the ensemble with {sure['DE']}, "
            f"MoLA with {sure['MoLA']}."
        )
    parts = [f"{FULL_NAMES[method]} says {said[method]} with {sure[method]}" for method in METHODS]
    return f"They disagree: {', '.join(parts)}."


def _strange(opinions: Opinions, subject: Subject) -> list[str]:
    if subject.reference is None:
        return []
    share = subject.reference.share_below(opinions.score)
    compared = subject.reference.words(opinions.score)
    if share >= RARE:
        known = "This is unlike what the networks know"
        if opinions.confidence("MAP") >= SURE:
            known += ", however sure the single network is"
        return [f"{known}: it is {compared}."]
    if share >= ODD:
        return [f"It is unusual: {compared}."]
    return [f"As pictures go, it is not unusual: {compared}."]


def _why(opinions: Opinions) -> list[str]:
    total = opinions.aleatoric + opinions.epistemic
    if opinions.confidence("MoLA") >= SURE or total < 0.05 * math.log(len(opinions.probs["MoLA"])):
        return []
    share = opinions.epistemic / total
    much = "Most" if share >= DOUBTFUL else "Some" if share >= 1 - DOUBTFUL else "Little"
    return [
        f"{much} of MoLA's doubt ({100 * share:.0f} %) is epistemic: weights that fit the training data equally well disagree here, "
        f"and more data like this would settle it."
        if much != "Little"
        else f"{much} of MoLA's doubt ({100 * share:.0f} %) is epistemic: the picture itself looks like more than one class."
    ]
