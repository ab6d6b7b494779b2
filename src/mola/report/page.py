"""The demo as one HTML page that needs nothing else: styles and figures inside, no script, no request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import groupby

from mola.bench.demo_result import DemoResult
from mola.report.figures import Drawn
from mola.report.style import COLOURS, INK
from mola.report.tables import Table, demo_tables
from mola.report.words import CAPTIONS, TITLES, Headline, headlines, tuning_words

__all__ = ["render_page"]

METHOD_WORDS = {
    "MAP": "one trained network as it is: the first of the ensemble",
    "DE": "the deep ensemble: the mean of all the networks' probabilities",
    "LLLA": "the first network again, with a Laplace approximation on its last layer",
    "MoLA": "all the networks, each with a Laplace approximation on its last layer",
}


def render_page(result: DemoResult, figures: Sequence[Drawn]) -> str:
    """Everything the demo found, for a reader who was not there.

    Args:
        result: what it found.
        figures: in the order in which they are to stand.

    Returns:
        A complete HTML document.
    """
    style = files("mola.report").joinpath("page.css").read_text(encoding="utf-8")
    sizes, settings = result.digits.sizes, result.settings
    parts = [
        "<h1>How sure should a network be?</h1>",
        f'<p class="lead">An ensemble of {settings.members} small networks, trained on {sizes["train"]} handwritten digits, '
        f"then given honest confidence after the fact: <code>mola</code> read the training data once, tuned one number on "
        f"{sizes['val']} validation digits, and retrained nothing.</p>",
        _methods(),
        '<div class="cards">',
        *[_card(headline) for headline in headlines(result)],
        "</div>",
        '<p class="caption">Each card: MAP, then MoLA. Lower is better on all four.</p>',
        *[_table(table) for table in demo_tables(result)],
        *[_figure(figure) for figure in figures],
        _fine_print(result),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>mola demo: how sure should a network be?</title>\n<style>\n{style}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def _methods() -> str:
    rows = [
        f'<dt><span class="swatch" style="background:{COLOURS[name]}"></span>{name}</dt><dd>{words}</dd>'
        for name, words in METHOD_WORDS.items()
    ]
    return '<dl class="methods">' + "".join(rows) + "</dl>"


def _card(headline: Headline) -> str:
    return (
        f'<section class="card"><h3>{escape(headline.title)}</h3><p class="change">{escape(headline.before)}'
        f'<span class="arrow">&rarr;</span><span class="to">{escape(headline.after)}</span></p>'
        f"<p>{escape(headline.sentence)}</p></section>"
    )


def _table(table: Table) -> str:
    groups = [(name, len(list(columns))) for name, columns in groupby(column.group for column in table.columns)]
    grouped = any(name for name, _ in groups)
    starts = {sum(size for _, size in groups[:index]) for index in range(len(groups))} if grouped else set()

    def mark(index: int, *classes: str) -> str:
        names = [*classes, *(["first"] if index in starts else [])]
        return f' class="{" ".join(names)}"' if names else ""

    head = ""
    if grouped:
        cells = "".join(f'<th colspan="{size}" scope="colgroup">{escape(name)}</th>' for name, size in groups)
        head = f'<tr class="groups"><th></th>{cells}</tr>'
    names = "".join(
        f'<th scope="col"{mark(index)}>{escape(column.name)}</th>' for index, column in enumerate(table.columns)
    )
    rows = []
    for row in table.rows:
        cells = "".join(
            f"<td{mark(index, *(['best'] if cell.best else []))}>{escape(cell.text)}</td>"
            for index, cell in enumerate(row.cells)
        )
        aside = ' class="aside"' if row.aside else ""
        rows.append(f'<tr{aside}><th scope="row">{escape(row.name)}</th>{cells}</tr>')
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table><thead>{head}<tr><th></th>{names}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="caption">{escape(table.caption)}</p>'
    )


def _figure(figure: Drawn) -> str:
    title, caption = TITLES[figure.name], CAPTIONS[figure.name]
    shapes = "".join(
        f'<div class="{kind}">{_inline(svg, title)}</div>'
        for kind, svg in (("wide", figure.wide), ("narrow", figure.narrow))
    )
    return f'<h2>{escape(title)}</h2><figure id="{figure.name}">{shapes}<figcaption>{escape(caption)}</figcaption></figure>'


def _inline(svg: str, label: str) -> str:
    """An SVG element as part of the page: sized by it, in its text colour, and named for those who cannot see it."""
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(label, quote=True)}">{rest}'.replace(INK, "currentColor")


def _fine_print(result: DemoResult) -> str:
    digits, settings = result.digits, result.settings
    remarks = [
        f"Data: scikit-learn's 1797 handwritten digits, 8 by 8 pixels, split at random into {digits.sizes['train']} for "
        f"training, {digits.sizes['val']} for tuning and {digits.sizes['test']} for testing; patches of its two sample "
        f"photographs; uniform noise.",
        f"Networks: two hidden layers, no biases, {digits.parameters} weights, {settings.epochs} epochs, hardly regularised and so "
        f"overconfident, as networks usually are. Strong weight decay makes them modest by itself: the tuning rule then finds "
        f"little to do, and MoLA comes close to the ensemble.",
        *tuning_words(result),
        "One run of one seed on a small data set: differences of a few tenths of a point between neighbouring methods "
        "may turn around with another seed.",
    ]
    listed = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    spent = sum(result.seconds.values())
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.seconds.items())
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"<h2>Small print</h2><ul>{listed}</ul><footer>Made by <code>mola demo --seed {settings.seed}</code> in "
        f"{spent:.0f} seconds ({escape(parts)}), with {escape(versions)}.</footer>"
    )
