"""The page, in gradio: a pad, examples and sliders on one side, what the networks say on the other.

Nothing about a user is kept on the server: the picture, in the networks' size, lies in the user's own page and comes along with
every question. Several users cannot see each other's.
"""

from __future__ import annotations

import os
from importlib import resources
from typing import Any

from mola.app.explore.answers import SLIDERS, Answers, heading, message, thumbnails
from mola.app.explore.changes import NEUTRAL, RANGES
from mola.app.explore.opinions import Explorer
from mola.app.explore.pictures import LARGEST_FILE, to_data_url
from mola.errors import DataError, MissingExtraError, MolaError

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported, and later
try:
    import gradio as gr
except ImportError as error:
    raise MissingExtraError(feature="the explorer", package=error.name or "gradio", extra="explore") from error

PAD = 280
"""Pixels of the drawing pad."""

PEN = 1.15
"""A stroke's width, in pixels of the networks."""

THINNEST = 20
"""Of a stroke, in pixels of the pad."""

SHOW = "(picture) => { if (window.molaPad) window.molaPad(picture); }"


def asset(name: str) -> str:
    """The text of a file in `assets`."""
    return resources.files("mola.app.explore").joinpath("assets", name).read_text(encoding="utf-8")


def build_page(explorer: Explorer) -> gr.Blocks:
    """The page, ready to be served.

    Args:
        explorer: answers.

    Returns:
        Gradio's blocks.
    """
    subject, answers = explorer.subject, Answers(explorer)
    sight = subject.sight
    first = to_data_url(subject.examples[0].pixels) if subject.examples else ""
    neutral = [getattr(NEUTRAL, name) for name in SLIDERS]
    begin = (first, *neutral, False, 0)
    told, left, right = answers.look(*begin)
    with gr.Blocks(title="mola explorer", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(heading(subject))
        with gr.Row(elem_id="desk"):
            with gr.Column(scale=3, min_width=300, elem_id="controls"):
                pad = gr.HTML(
                    html_template=asset("pad.html"),
                    js_on_load=asset("pad.js"),
                    elem_id="pad",
                    first=first,
                    limit=LARGEST_FILE,
                    coloured=sight.shape[0] == 3,
                    pen=max(THINNEST, round(PAD / max(sight.shape[1:]) * PEN)),
                )
                note = gr.HTML("", elem_id="note")
                examples = gr.HTML(thumbnails(subject), js_on_load=asset("examples.js"), elem_id="examples")
                sliders = [
                    gr.Slider(*RANGES[name], value=getattr(NEUTRAL, name), step=step, label=label, elem_id=name)
                    for name, (label, step) in SLIDERS.items()
                ]
                invert = gr.Checkbox(label="Invert black and white", elem_id="invert")
                with gr.Row():
                    reset = gr.Button("Reset", elem_id="reset", min_width=80)
                    again = gr.Button("Other noise", elem_id="again", min_width=80)
                picture = gr.Textbox(first, visible="hidden", elem_id="picture")
                seed = gr.Number(0, precision=0, visible="hidden", elem_id="seed")
            with gr.Column(scale=8, min_width=300, elem_id="answers"):
                verdict_box = gr.HTML(told, elem_id="verdict")
                with gr.Row(elem_id="columns"):
                    with gr.Column(min_width=300):
                        first_column = gr.HTML(left, elem_id="first-column")
                    with gr.Column(min_width=300):
                        second_column = gr.HTML(right, elem_id="second-column")
                        curve = gr.HTML(answers.turn(*begin), elem_id="curve")
        asked = [picture, *sliders, invert, seed]
        quietly: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

        def on_drawn(event: gr.EventData) -> Any:
            return told_or(lambda: (answers.drawn(sent(event, "data", str)), ""))

        def on_dropped(event: gr.EventData) -> Any:
            return told_or(
                lambda: answers.dropped(
                    sent(event, "name", str), sent(event, "size", int), sent(event, "data", str | None)
                )
            )

        def on_chosen(event: gr.EventData) -> Any:
            return told_or(lambda: answers.chosen(sent(event, "index", int)))

        pad.input(on_drawn, None, [picture, note], trigger_mode="always_last", **quietly)
        pad.clear(lambda: ("", ""), None, [picture, note], **quietly)
        for event in (
            pad.upload(on_dropped, None, [picture, note], **quietly),
            examples.select(on_chosen, None, [picture, note], **quietly),
        ):
            event.then(None, picture, None, js=SHOW)
        reset.click(lambda: (*neutral, False), None, [*sliders, invert], **quietly)
        again.click(lambda now: int(now) + 1, seed, seed, **quietly)
        changed = [one.change for one in asked]
        gr.on(
            changed,
            in_words(answers.look),
            asked,
            [verdict_box, first_column, second_column],
            trigger_mode="always_last",
            **quietly,
        )
        gr.on(changed, in_words(answers.turn), asked, curve, trigger_mode="always_last", **quietly)
    return page


def sent(event: gr.EventData, name: str, kind: Any) -> Any:
    """What the page sent with an event."""
    value = event._data.get(name) if isinstance(event._data, dict) else None
    if not isinstance(value, kind):
        words = f"the page sent {name} = {value!r:.40}, and something else was expected: load it again."
        raise DataError(words)
    return value


def told_or(make: Any) -> Any:
    """A picture and a note; or, where it is refused, the old picture and why."""
    try:
        picture, words = make()
    except MolaError as error:
        return gr.skip(), message(str(error), refused=True)
    return picture, message(words)


def in_words(answer: Any) -> Any:
    """The same function; what is wrong with a question is told in the page."""

    def told(*asked: Any) -> Any:
        try:
            return answer(*asked)
        except MolaError as error:
            raise gr.Error(str(error), print_exception=False) from error

    return told


def mount(explorer: Explorer) -> Any:
    """The page as a web application.

    Args:
        explorer: answers.

    Returns:
        An ASGI application of FastAPI's.
    """
    from fastapi import FastAPI

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    gr.mount_gradio_app(
        app,
        build_page(explorer),
        path="/",
        theme=_theme(),
        css=asset("style.css"),
        head=f"<script>{asset('page.js')}</script>",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        show_error=True,
        max_file_size=LARGEST_FILE,
    )
    return app


def _theme() -> Any:
    # Gradio's theme: quiet greys, MoLA's green, and fonts that the machine has.
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    return gr.themes.Base(
        primary_hue="emerald",
        neutral_hue="slate",
        font=fonts,
        font_mono=["ui-monospace", "monospace"],
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_sm,
        text_size=gr.themes.sizes.text_md,
    )
