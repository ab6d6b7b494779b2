"""MkDocs hook that converts formulas to MathML when the site is built, so that the pages need no scripts."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

LONG = 60
"""Number of LaTeX characters beyond which an inline formula may be wider than a phone screen."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def as_mathml(latex: str, *, block: bool) -> str:
    """Convert a LaTeX formula, given without dollar signs, to MathML that has the LaTeX source as its label."""
    element = convert(latex, display="block" if block else "inline")
    label = html.escape(" ".join(latex.split()), quote=True)
    element = element.replace("<math ", f'<math aria-label="{label}" ', 1)
    if block:
        return f'<div class="formula">{element}</div>'
    return f'<span class="long-formula">{element}</span>' if len(latex) > LONG else element


def on_page_content(content: str, **_: Any) -> str:
    """Convert the formulas that `pymdownx.arithmatex` has marked to MathML."""

    def replaced(match: re.Match[str]) -> str:
        latex = html.unescape(match.group(2)).strip()
        return as_mathml(latex[2:-2].strip(), block=match.group(1) == "div")

    return FORMULA.sub(replaced, content)
