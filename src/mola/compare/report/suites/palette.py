"""Colours and strokes of methods: the demo's for the four of them, others that can be told apart from these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mola.compare.report.style import COLOURS

__all__ = ["colours", "crossed_strokes", "strokes"]

DASHED = (0, (3.2, 1.6))

KNOWN: dict[str, tuple[str, Any]] = {
    **{method: (colour, "-") for method, colour in COLOURS.items()},
    "MAP-T": (COLOURS["MAP"], DASHED),
    "DE-T": (COLOURS["DE"], DASHED),
    "MoLA (NLL)": (COLOURS["MoLA"], DASHED),
    "SWAG": ("#cc79a7", DASHED),
    "MultiSWAG": ("#cc79a7", "-"),
    "MIMO": ("#9467bd", DASHED),
    "MIMO-MoLA": ("#9467bd", "-"),
}
"""Relatives share a colour: the one that the paper does not stress is dashed."""

OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd", "#8c8c8c", "#a6761d", "#b8a900")

PATTERNS: tuple[Any, ...] = ("-", DASHED, (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)), (0, (4, 1.2, 1, 1.2, 1, 1.2)))


def strokes(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What a line of each method is drawn with, by method."""
    methods = list(methods)
    taken = [KNOWN[method] for method in methods if method in KNOWN]
    free = (pair for pattern in PATTERNS for colour in OTHERS if (pair := (colour, pattern)) not in taken)
    # With more methods than pairs, the last ones cannot be told apart by their lines.
    pairs = {method: KNOWN[method] if method in KNOWN else next(free, (OTHERS[0], PATTERNS[-1])) for method in methods}
    return {method: {"color": colour, "linestyle": pattern} for method, (colour, pattern) in pairs.items()}


def crossed_strokes(kinds: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Lines of methods that vary in two ways: one colour for each of the first, one pattern for each of the second."""
    first = list(dict.fromkeys(one for one, _ in kinds.values()))
    second = list(dict.fromkeys(two for _, two in kinds.values()))
    return {
        method: {
            "color": OTHERS[first.index(one) % len(OTHERS)],
            "linestyle": PATTERNS[second.index(two) % len(PATTERNS)],
        }
        for method, (one, two) in kinds.items()
    }


def colours(methods: Iterable[str]) -> dict[str, str]:
    """The colour of each method."""
    return {method: stroke["color"] for method, stroke in strokes(methods).items()}
