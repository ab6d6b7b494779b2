"""Formulas as MathML, made when the site is built: browsers show it by themselves, and nothing is fetched."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

LONG = 60
"""Characters of LaTeX from which a formula within a line may be wider than a phone."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def as_mathml(latex: str, *, block: bool) -> str:
    """One formula as MathML, with its source for readers of another kind.

    Args:
        latex: the formula, without dollars.
        block: whether it stands on a line of its own.

    Returns:
        An element.
    """
    element = convert(latex, display="block" if block else "inline")
    label = html.escape(" ".join(latex.split()), quote=True)
    element = element.replace("<math ", f'<math aria-label="{label}" ', 1)
    if block:
        return f'<div class="formula">{element}</div>'
    return f'<span class="long-formula">{element}</span>' if len(latex) > LONG else element


def on_page_content(content: str, **_: Any) -> str:
    """Replace what `pymdownx.arithmatex` marked as formulas."""

    def replaced(match: re.Match[str]) -> str:
        latex = html.unescape(match.group(2)).strip()
        return as_mathml(latex[2:-2].strip(), block=match.group(1) == "div")

    return FORMULA.sub(replaced, content)
