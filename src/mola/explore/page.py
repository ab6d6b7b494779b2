"""The page, in gradio: a pad, examples and sliders on one side, what the networks say on the other.

Nothing about a user is kept on the server: the picture, in the networks' size, lies in the user's own page and comes along with
every question. Several users cannot see each other's.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import Any

from mola.errors import DataError, MissingExtraError, MolaError
from mola.explore.bars import classes_card, confidence_card, members_card, split_card
from mola.explore.changes import NEUTRAL, RANGES, Changes
from mola.explore.opinions import METHODS, Explorer, Opinions
from mola.explore.pictures import LARGEST_FILE, decode, from_data_url
from mola.explore.plots import score_card, turned_card
from mola.explore.sight import as_png
from mola.explore.words import percent, verdict

try:
    import gradio as gr
except ImportError as error:
    raise MissingExtraError(feature="the explorer", package="gradio", extra="explore") from error

__all__ = ["asset", "build_page"]

SLIDERS = {
    "rotation": ("Rotation (degrees)", 1),
    "scale": ("Size (times)", 0.05),
    "blur": ("Blur (% of the side)", 0.25),
    "noise": ("Noise (white is 1)", 0.01),
    "brightness": ("Brightness", 0.01),
    "contrast": ("Contrast (times)", 0.05),
}
"""Label and step of each, in the order of the page."""

PEN = {"thin": 20, "share": 1.15}
"""A stroke's width on a pad of 280: as thick as a pixel and a bit, and not too thin to see."""

SHOW = "(picture) => { if (window.molaPad) window.molaPad(picture); }"
THEME = "() => { document.body.classList.toggle('dark'); }"


def asset(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files("mola.explore").joinpath("assets", name).read_text(encoding="utf-8")


class Answers:
    """What the page shows for a picture and sliders; the events of the page call these.

    Args:
        explorer: answers.
    """

    def __init__(self, explorer: Explorer) -> None:
        """Bind the explorer."""
        self.explorer = explorer
        self.subject = explorer.subject

    def look(self, picture: str, *moved: Any) -> tuple[str, str, str]:
        """Verdict and the cards of both columns."""
        if not picture:
            empty = '<section class="card verdict"><p>Draw something, drop a picture, or choose an example.</p></section>'
            return empty, "", ""
        changes = as_changes(moved)
        pixels = self.subject.sight.read(picture)
        opinions = self.explorer.look(pixels, changes)
        seen = as_png((self.explorer.values(pixels, changes)[0] * 255).round().byte())
        subject = self.subject
        first = confidence_card(opinions, subject) + split_card(opinions)
        second = classes_card(opinions, subject) + members_card(opinions, subject)
        return self._verdict(opinions, seen), first + score_card(opinions, subject.reference), second

    def turn(self, picture: str, *moved: Any) -> str:
        """The curve over all angles."""
        if not picture:
            return ""
        changes = as_changes(moved)
        return turned_card(self.explorer.turn(self.subject.sight.read(picture), changes), changes.rotation)

    def drawn(self, data: str) -> str:
        """A drawing, in the networks' size."""
        return as_png(self.subject.sight.fit(decode(from_data_url(data, "the drawing")).image)[0])

    def dropped(self, name: str, size: int, data: str | None) -> tuple[str, str]:
        """A file in the networks' size, and what was done to it.

        Args:
            name: of the file.
            size: in bytes.
            data: as a `data:` address; None if the page did not send it, since it is too large or cannot be read.

        Returns:
            The picture and a note.

        Raises:
            DataError: if it cannot be used.
        """
        if data is None and size <= LARGEST_FILE:
            message = f"{name} cannot be read by the browser: a folder cannot be dropped, a file can."
            raise DataError(message)
        picture = decode(from_data_url(data if data is not None else "x" * (2 * LARGEST_FILE), name), name)
        pixels, done = self.subject.sight.fit(picture.image)
        notes = [*picture.notes, *([done] if done else [])]
        return as_png(pixels), f"{name}: {'; '.join(notes)}." if notes else f"{name}, as it is."

    def _verdict(self, opinions: Opinions, seen: str) -> str:
        sentences = verdict(opinions, self.subject)
        rest = "".join(f"<p>{escape(one)}</p>" for one in sentences[1:])
        strip = "".join(
            f'<span><i class="{method}">{method}</i> {escape(self.subject.classes[opinions.label(method)][:8])} '
            f"<b>{percent(opinions.confidence(method))}</b></span>"
            for method in METHODS
        )
        return (
            f'<section class="card verdict"><figure><img src="{seen}" alt="The picture as the networks see it">'
            f'<figcaption>what the networks see</figcaption></figure><div aria-live="polite"><p class="first">{escape(sentences[0])}</p>'
            f'{rest}</div></section><div class="strip" aria-hidden="true">{strip}</div>'
        )


def as_changes(moved: tuple[Any, ...]) -> Changes:
    """The sliders' values, in the order of `SLIDERS`, then invert and seed."""
    *values, invert, seed = moved
    return Changes(**dict(zip(SLIDERS, map(float, values), strict=True)), invert=bool(invert), seed=int(seed))


def message(words: str, *, refused: bool = False) -> str:
    """A line below the pad."""
    if not words:
        return ""
    return f'<p class="{"refused" if refused else "note"}" role="{"alert" if refused else "status"}">{escape(words)}</p>'


def build_page(explorer: Explorer) -> gr.Blocks:
    """The page, ready to be served.

    Args:
        explorer: answers.

    Returns:
        Gradio's blocks.
    """
    subject, answers = explorer.subject, Answers(explorer)
    sight = subject.sight
    first = as_png(subject.examples[0].pixels) if subject.examples else ""
    neutral = [getattr(NEUTRAL, name) for name in SLIDERS]
    begin = (first, *neutral, False, 0)
    told, left, right = answers.look(*begin)
    with gr.Blocks(title="mola explorer", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(heading(explorer))
        with gr.Row(elem_id="desk"):
            with gr.Column(scale=3, min_width=300, elem_id="controls"):
                pad = gr.HTML(
                    html_template=asset("pad.html"),
                    js_on_load=asset("pad.js"),
                    elem_id="pad",
                    first=first,
                    limit=LARGEST_FILE,
                    coloured=sight.shape[0] == 3,
                    pen=max(PEN["thin"], round(280 / max(sight.shape[1:]) * PEN["share"])),
                )
                note = gr.HTML("", elem_id="note")
                examples = gr.HTML(thumbnails(explorer), js_on_load=asset("examples.js"), elem_id="examples")
                sliders = [
                    gr.Slider(*RANGES[name], value=getattr(NEUTRAL, name), step=step, label=label, elem_id=name)
                    for name, (label, step) in SLIDERS.items()
                ]
                invert = gr.Checkbox(label="Invert (black on white becomes white on black)", elem_id="invert")
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
            return told_or(lambda: (answers.drawn(event._data["data"]), ""))

        def on_dropped(event: gr.EventData) -> Any:
            data = event._data
            return told_or(lambda: answers.dropped(str(data["name"]), int(data["size"]), data.get("data")))

        def on_chosen(event: gr.EventData) -> Any:
            example = subject.examples[int(event._data["index"]) % len(subject.examples)]
            return as_png(example.pixels), message(example.name)

        pad.input(on_drawn, None, [picture, note], trigger_mode="always_last", **quietly)
        pad.clear(lambda: ("", ""), None, [picture, note], **quietly)
        for event in (pad.upload(on_dropped, None, [picture, note], **quietly), examples.select(on_chosen, None, [picture, note], **quietly)):
            event.then(None, picture, None, js=SHOW)
        reset.click(lambda: (*neutral, False), None, [*sliders, invert], **quietly)
        again.click(lambda now: int(now) + 1, seed, seed, **quietly)
        changed = [one.change for one in asked]
        gr.on(changed, in_words(answers.look), asked, [verdict_box, first_column, second_column], trigger_mode="always_last", **quietly)
        gr.on(changed, in_words(answers.turn), asked, curve, trigger_mode="always_last", **quietly)
    return page


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


def thumbnails(explorer: Explorer) -> str:
    """Examples to choose from."""
    if not explorer.subject.examples:
        return ""
    buttons = "".join(
        f'<button type="button" data-index="{index}" title="{escape(one.name)}" aria-label="{escape(one.name)}">'
        f'<img src="{as_png(one.pixels)}" alt=""></button>'
        for index, one in enumerate(explorer.subject.examples)
    )
    return f'<div class="thumbs" role="group" aria-label="Examples">{buttons}</div>'


def heading(explorer: Explorer) -> str:
    """What this is."""
    subject = explorer.subject
    notes = "".join(f'<p class="left-out">{escape(one[:1].upper() + one[1:])}</p>' for one in subject.notes)
    return (
        '<header class="heading"><div><h1>mola explorer</h1>'
        f"<p>{escape(subject.title)} \N{MIDDLE DOT} {escape(subject.source)}</p></div>"
        f'<button type="button" class="theme" aria-label="Light or dark" title="Light or dark">\N{FIRST QUARTER MOON}</button></header>{notes}'
    )
