"""Colours and strokes of methods: the demo's for the four of them, others that can be told apart from these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mola.report.style import COLOURS

__all__ = ["colours", "strokes"]

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

PATTERNS: tuple[Any, ...] = ("-", DASHED, (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))


def strokes(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What a line of each method is drawn with, by method."""
    found, unknown = {}, 0
    for method in methods:
        if method in KNOWN:
            colour, pattern = KNOWN[method]
        else:
            colour = OTHERS[unknown % len(OTHERS)]
            pattern = PATTERNS[unknown // len(OTHERS) % len(PATTERNS)]
            unknown += 1
        found[method] = {"color": colour, "linestyle": pattern}
    return found


def colours(methods: Iterable[str]) -> dict[str, str]:
    """The colour of each method."""
    return {method: stroke["color"] for method, stroke in strokes(methods).items()}
