"""What is seen, in plain words."""

from __future__ import annotations

import math

from mola.app.explore.opinions import METHODS, Opinions
from mola.app.explore.subject import Subject

__all__ = ["ODD", "percent", "verdict"]

FULL_NAMES = {"MAP": "the single network", "DE": "the ensemble", "MoLA": "MoLA"}
RARE, ODD = 0.99, 0.95
"""Shares of the validation data that a picture must exceed to be called unlike them, or unusual."""

SURE = 0.9
MOST, LITTLE = 0.6, 0.15
"""Shares of the doubt that are called most of it, or little."""


def percent(value: float) -> str:
    """A probability in percent, never rounded to a certainty that it is not."""
    if value >= 0.9995 and value < 1:
        return "> 99.9 %"
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.1f} %"


def verdict(opinions: Opinions, subject: Subject) -> list[str]:
    """A few sentences on what the methods say and why.

    Args:
        opinions: of one picture.
        subject: names the classes, and has scores to compare with.

    Returns:
        Sentences, the first the most important.
    """
    return [
        _chosen(opinions, subject.classes),
        *_strange(opinions, subject),
        *_why(opinions, subject.posterior.link.name),
    ]


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


def _why(opinions: Opinions, link: str) -> list[str]:
    total = opinions.aleatoric + opinions.epistemic
    if opinions.confidence("MoLA") >= SURE or total < 0.05 * math.log(len(opinions.probs["MoLA"])):
        return []
    share = opinions.epistemic / total
    much = "Most" if share >= MOST else "Little" if share < LITTLE else "Part"
    alone = sum(max(member.network) for member in opinions.members) / len(opinions.members)
    reasons = []
    if share >= LITTLE:
        reasons.append(
            "weights that fit the training data equally well disagree here, and more data like this would settle it"
        )
    if alone < SURE:
        reasons.append(
            f"{'also, ' if reasons else ''}each network by itself is unsure ({percent(alone)} on average): the picture looks like "
            f"more than one class"
        )
    why = f"{much} of MoLA's doubt is epistemic ({100 * share:.0f} %), the other {100 * (1 - share):.0f} % aleatoric"
    said = [f"{why}: {'; '.join(reasons)}." if reasons else f"{why}."]
    if alone >= SURE and link == "probit":
        said.append(
            f"Each network by itself is sure ({percent(alone)} on average). The probit link also lowers confidence by the variance "
            f"that the logits of all classes share, which is neither of the two; the link probit-centered leaves it out."
        )
    return said
