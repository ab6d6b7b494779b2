"""The demo as one HTML page that needs nothing else: styles and figures inside, no script, no request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mola.compare.demo_result import DemoResult
from mola.compare.report.figures import Drawn
from mola.compare.report.markup import document, figure_markup, table_markup
from mola.compare.report.style import COLOURS
from mola.compare.report.tables import demo_tables
from mola.compare.report.words import CAPTIONS, TITLES, Headline, headlines, tuning_words

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
        *[f"<h2>{escape(table.title)}</h2>{table_markup(table)}" for table in demo_tables(result)],
        *[_figure(figure) for figure in figures],
        _fine_print(result),
    ]
    return document("mola demo: how sure should a network be?", "page.css", "\n".join(parts))


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


def _figure(figure: Drawn) -> str:
    return figure_markup(figure, TITLES[figure.name], CAPTIONS[figure.name])


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
