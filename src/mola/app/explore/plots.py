"""Figures with axes, as SVG in the page's own colours: outlier scores of the validation data, and confidence against the angle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mola.app.explore.bars import card, legend
from mola.app.explore.opinions import METHODS, Opinions, Turned
from mola.app.explore.reference import Reference
from mola.app.explore.words import percent

__all__ = ["score_card", "turned_card"]

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 34, 12, 14, 26
BINS = 36


def score_card(opinions: Opinions, reference: Reference | None) -> str:
    """The outlier score as a marker on the distribution of the validation data's."""
    title = "How outlying it is"
    if reference is None:
        body = f'<p class="missing">Score <b data-score>{opinions.score:.3f}</b>, with no validation scores to hold it against.</p>'
        return card("score", title, body, "Name data with --reference to see how unusual a picture is.")
    low, high = _span(reference, opinions.score)
    edges = [low + (high - low) * index / BINS for index in range(BINS + 1)]
    shares = reference.histogram(edges)
    tallest = max(shares) or 1.0

    def across(score: float) -> float:
        return LEFT / 2 + (WIDTH - LEFT / 2 - RIGHT) * (score - low) / (high - low)

    base = HEIGHT - BOTTOM
    bars = "".join(
        f'<rect class="{"beyond" if edges[index] >= opinions.score else "within"}" x="{across(edges[index]) + 0.5:.1f}" '
        f'y="{base - (base - 2 * TOP) * share / tallest:.1f}" width="{across(edges[1]) - across(edges[0]) - 1:.1f}" '
        f'height="{(base - 2 * TOP) * share / tallest:.1f}"/>'
        for index, share in enumerate(shares)
        if share > 0
    )
    at = across(opinions.score)
    side = "end" if at > 0.6 * WIDTH else "start"
    nudge = -6 if side == "end" else 6
    marker = (
        f'<line class="marker" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{base}"/>'
        f'<circle class="marker" cx="{at:.1f}" cy="{TOP}" r="4"/>'
        f'<text class="now" x="{at + nudge:.1f}" y="{TOP + 4}" text-anchor="{side}">this picture</text>'
    )
    limit, alarm, red = reference.alarm, "", ""
    if limit is not None:
        alarm = (
            f'<line class="alarm" data-alarm="{limit:.6g}" x1="{across(limit):.1f}" x2="{across(limit):.1f}" '
            f'y1="{2 * TOP}" y2="{base}"/>'
        )
        red = f" Red: the line of the alarm, {limit:.3f}; what lies above it is called outlying."
    axis = (
        f'<line class="axis" x1="{LEFT / 2}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
        f'<text x="{LEFT / 2}" y="{HEIGHT - 8}">more typical</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">more outlying</text>'
    )
    words = reference.words(opinions.score)
    figure = _svg(bars + axis + alarm + marker, f"Outlier score {opinions.score:.3f}: {words}")
    body = f'{figure}<p class="words" data-compared>{words.capitalize()}</p>'
    hint = (
        f"Bars: outlier scores of {reference.count:,} validation images. This picture's: <b data-score>{opinions.score:.3f}</b>."
        f"{red}"
    )
    return card("score", title, body, hint)


def _span(reference: Reference, score: float) -> tuple[float, float]:
    """What the axis shows: the distribution, and the score, which may lie far outside."""
    low, high = min(reference.scores[0], score), max(reference.scores[-1], score)
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def turned_card(turned: Turned | None, rotation: float) -> str:
    """Confidence of each method against the angle, the present one marked."""
    title = f"Confidence at every angle {legend()}"
    if turned is None:
        body = '<p class="missing">Left out: these networks take too long for a curve while you wait.</p>'
        return card("turned", title, body)

    def across(angle: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (angle + 180) / 360

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value

    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(share):.1f}" y2="{up(share):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{up(share) + 4:.1f}" text-anchor="end">{100 * share:.0f}%</text>'
        for share in (0.0, 0.5, 1.0)
    ) + "".join(
        f'<text x="{across(angle):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{angle}°</text>'
        for angle in (-180, -90, 0, 90, 180)
    )
    curves = "".join(
        f'<polyline class="{method}" points="{_points(turned.angles, turned.confidence[method], across, up)}"/>'
        for method in METHODS
    )
    here = turned.angles.index(rotation) if rotation in turned.angles else None
    marker = f'<line class="marker" x1="{across(rotation):.1f}" x2="{across(rotation):.1f}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}"/>'
    if here is not None:
        marker += "".join(
            f'<circle class="{method}" cx="{across(rotation):.1f}" cy="{up(turned.confidence[method][here]):.1f}" r="4"/>'
            for method in METHODS
        )
    told = "Confidence against the angle of rotation; now at {:g} degrees: {}".format(
        rotation,
        ", ".join(f"{method} {percent(turned.confidence[method][here])}" for method in METHODS)
        if here is not None
        else "",
    )
    return card(
        "turned",
        title,
        _svg(grid + curves + marker, told),
        "The same picture, turned all the way round; the line marks the present angle.",
    )


def _points(
    angles: Sequence[float], values: Sequence[float], across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    return " ".join(f"{across(angle):.1f},{up(value):.1f}" for angle, value in zip(angles, values, strict=True))


def _svg(inside: str, told: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told}">{inside}</svg>'
