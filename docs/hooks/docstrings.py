"""Griffe extension that converts the reStructuredText formulas in docstrings to Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

DIRECTIVE = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
ROLE = re.compile(r":math:`([^`]+)`")


def as_markdown(text: str) -> str:
    """Replace `.. math::` directives and `:math:` roles with formulas between dollar signs."""

    def block(match: re.Match[str]) -> str:
        indent, formula = match.groups()
        return f"\n{indent}$$\n{indent}{' '.join(formula.split())}\n{indent}$$\n"

    return ROLE.sub(lambda match: f"${' '.join(match.group(1).split())}$", DIRECTIVE.sub(block, text))


class Formulas(griffe.Extension):
    """Extension that converts the formulas in every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
