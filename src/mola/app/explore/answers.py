"""What the page shows for a picture and the places of the sliders: the whole of the explorer, but for the page itself."""

from __future__ import annotations

from html import escape
from typing import Any

from mola.app.explore.bars import classes_card, confidence_card, members_card, split_card
from mola.app.explore.changes import Changes
from mola.app.explore.opinions import METHODS, Explorer, Opinions
from mola.app.explore.pictures import LARGEST_FILE, decode, from_data_url, too_large
from mola.app.explore.plots import score_card, turned_card
from mola.app.explore.sight import as_png
from mola.app.explore.subject import Subject
from mola.app.explore.words import percent, verdict
from mola.errors import DataError

__all__ = ["SLIDERS", "Answers", "heading", "message", "thumbnails"]

SLIDERS = {
    "rotation": ("Rotation (degrees)", 1),
    "scale": ("Size (times)", 0.05),
    "blur": ("Blur (% of the side)", 0.25),
    "noise": ("Noise (white is 1)", 0.01),
    "brightness": ("Brightness", 0.01),
    "contrast": ("Contrast (times)", 0.05),
}
"""Label and step of each, in the order of the page."""

NOTHING = '<section class="card verdict"><p>Draw something, drop a picture, or choose an example.</p></section>'


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
            return NOTHING, "", ""
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
        if size > LARGEST_FILE:
            raise DataError(too_large(name))
        if data is None:
            words = f"{name} cannot be read by the browser: a file can be dropped, a folder cannot."
            raise DataError(words)
        picture = decode(from_data_url(data, name), name)
        pixels, done = self.subject.sight.fit(picture.image)
        notes = [*picture.notes, *([done] if done else [])]
        return as_png(pixels), f"{name}: {'; '.join(notes)}." if notes else f"{name}, as it is."

    def chosen(self, index: int) -> tuple[str, str]:
        """An example and its name.

        Args:
            index: its place among the examples.

        Returns:
            The picture and a note.

        Raises:
            DataError: if there is none.
        """
        if not 0 <= index < len(self.subject.examples):
            words = f"there is no example {index}, only {len(self.subject.examples)} of them: load the page again."
            raise DataError(words)
        example = self.subject.examples[index]
        return as_png(example.pixels), example.name

    def _verdict(self, opinions: Opinions, seen: str) -> str:
        # A number and its unit stay on one line.
        first, *others = (escape(one).replace(" %", "\N{NO-BREAK SPACE}%") for one in verdict(opinions, self.subject))
        rest = "".join(f"<p>{one}</p>" for one in others)
        strip = "".join(
            f'<span><i class="{method}">{method}</i> {escape(self.subject.classes[opinions.label(method)][:8])} '
            f"<b>{percent(opinions.confidence(method))}</b></span>"
            for method in METHODS
        )
        return (
            f'<section class="card verdict"><figure><img src="{seen}" alt="The picture as the networks see it">'
            f'<figcaption>what the networks see</figcaption></figure><div aria-live="polite">'
            f'<p class="first">{first}</p>{rest}</div></section><div class="strip" aria-hidden="true">{strip}</div>'
        )


def as_changes(moved: tuple[Any, ...]) -> Changes:
    """The sliders' values, in the order of `SLIDERS`, then invert and seed."""
    *values, invert, seed = moved
    return Changes(**dict(zip(SLIDERS, map(float, values), strict=True)), invert=bool(invert), seed=int(seed))


def message(words: str, *, refused: bool = False) -> str:
    """A line below the pad."""
    if not words:
        return ""
    return (
        f'<p class="{"refused" if refused else "note"}" role="{"alert" if refused else "status"}">{escape(words)}</p>'
    )


def thumbnails(subject: Subject) -> str:
    """Examples to choose from."""
    if not subject.examples:
        return ""
    buttons = "".join(
        f'<button type="button" data-index="{index}" title="{escape(one.name)}" aria-label="{escape(one.name)}">'
        f'<img src="{as_png(one.pixels)}" alt=""></button>'
        for index, one in enumerate(subject.examples)
    )
    return f'<div class="thumbs" role="group" aria-label="Examples">{buttons}</div>'


def heading(subject: Subject) -> str:
    """What this is."""
    notes = "".join(f'<p class="left-out">{escape(one[:1].upper() + one[1:])}</p>' for one in subject.notes)
    return (
        '<header class="heading"><div><h1>mola explorer</h1>'
        f"<p>{escape(subject.title)} \N{MIDDLE DOT} {escape(subject.source)}</p></div>"
        '<button type="button" class="theme" aria-label="Light or dark" title="Light or dark">\N{FIRST QUARTER MOON}</button>'
        f"</header>{notes}"
    )
