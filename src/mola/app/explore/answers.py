"""What the page shows for a picture and the positions of the sliders: sentences, figures and pictures, as HTML.

The HTML is in `assets/answers.html`, which escapes every text: class names and titles may come from a stranger's folder.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader

from mola.app.explore.changes import Changes
from mola.app.explore.opinions import METHODS, Explorer, Opinions, Turned
from mola.app.explore.pictures import LARGEST_FILE, decode, from_data_url, to_data_url, too_large
from mola.app.explore.subject import Reference, Subject
from mola.app.jobs.decisions import decide
from mola.errors import DataError

SLIDERS = {
    "rotation": ("Rotation (degrees)", 1),
    "scale": ("Size (times)", 0.05),
    "blur": ("Blur (% of the side)", 0.25),
    "noise": ("Noise (white is 1)", 0.01),
    "brightness": ("Brightness", 0.01),
    "contrast": ("Contrast (times)", 0.05),
}
"""Label and step of each slider, in the order of the page."""

FULL_NAMES = {"MAP": "the single network", "DE": "the ensemble", "MoLA": "MoLA"}
RARE, ODD = 0.99, 0.95
"""Shares of the validation data that a picture must exceed to be called unlike them, or unusual."""

SURE = 0.9
MOST, LITTLE = 0.6, 0.15
"""Shares of the doubt that are called most of it, or little."""

TAKEN = 0.02
"""Confidence that caution by distance must take before it is told of."""

FARTHER = 1.05
"""Distance from which a picture is called farther than usual."""

ALL_SHOWN = 12
"""Up to this number of classes, all are shown, in their order; of more, the most probable."""

SHOWN = 8
WIDEST = 13
"""Letters of a class's name that there is room for beside its bars."""

LONGEST = 22
"""Letters of a class's name that are shown at all."""

BINS = 36
WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 34, 12, 14, 26
BASE = HEIGHT - BOTTOM
FRAME = {
    "width": WIDTH,
    "height": HEIGHT,
    "left": LEFT,
    "edge": LEFT / 2,
    "right": WIDTH - RIGHT,
    "top": TOP,
    "base": BASE,
    "below": HEIGHT - 8,
}
"""Of figures with axes, in the units of their SVG."""


def percent(value: float) -> str:
    """A probability in percent, never rounded to a certainty that it is not."""
    if value >= 0.9995 and value < 1:
        return "> 99.9 %"
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.1f} %"


def short(name: str) -> str:
    """A name that fits."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"


@cache
def _templates() -> Any:
    environment = Environment(
        loader=PackageLoader("mola.app.explore", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": percent, "short": short, "px": lambda value: f"{value:.1f}"}
    environment.globals |= {"METHODS": METHODS, "FRAME": FRAME}
    return environment.get_template("answers.html").module


def _render(part: str, *values: Any, **named: Any) -> str:
    return str(getattr(_templates(), part)(*values, **named)).strip()


class Answers:
    """What the page shows for a picture and sliders; the events of the page call these.

    Args:
        explorer: answers.
    """

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.subject = explorer.subject

    def look(self, picture: str, *moved: Any) -> tuple[str, str, str]:
        """The verdict, and the cards of both columns."""
        if not picture:
            return _render("verdict", [], [], ""), "", ""
        changes = as_changes(moved)
        pixels = self.subject.sight.read(picture)
        opinions = self.explorer.look(pixels, changes)
        seen = to_data_url((self.explorer.values(pixels, changes)[0] * 255).round().byte())
        subject = self.subject
        # A number and its unit stay on one line.
        said = [one.replace(" %", "\N{NO-BREAK SPACE}%") for one in verdict(opinions, subject)]
        first = (
            decision_card(opinions, subject)
            + confidence_card(opinions, subject)
            + split_card(opinions)
            + score_card(opinions, subject.reference)
        )
        second = classes_card(opinions, subject) + members_card(opinions, subject)
        return _render("verdict", said, _by_method(opinions, subject), seen), first, second

    def turn(self, picture: str, *moved: Any) -> str:
        """The curve over all angles."""
        if not picture:
            return ""
        changes = as_changes(moved)
        return turned_card(self.explorer.turn(self.subject.sight.read(picture), changes), changes.rotation)

    def drawn(self, data: str) -> str:
        """A drawing, in the networks' size."""
        return to_data_url(self.subject.sight.fit(decode(from_data_url(data, "the drawing")).image)[0])

    def dropped(self, name: str, size: int, data: str | None) -> tuple[str, str]:
        """A file in the networks' size, and what was done to it.

        Args:
            name: of the file.
            size: in bytes.
            data: as a `data:` URL; None if the page did not send it, because it is too large or cannot be read.

        Returns:
            The picture and a note.
        """
        if size > LARGEST_FILE:
            raise DataError(too_large(name))
        if data is None:
            words = f"the browser cannot read {name}: drop a file; a folder cannot be dropped."
            raise DataError(words)
        picture = decode(from_data_url(data, name), name)
        pixels, done = self.subject.sight.fit(picture.image)
        notes = [*picture.notes, *([done] if done else [])]
        return to_data_url(pixels), f"{name}: {'; '.join(notes)}." if notes else f"{name}, unchanged."

    def chosen(self, index: int) -> tuple[str, str]:
        """An example and its name.

        Args:
            index: its place among the examples.

        Returns:
            The picture and a note.
        """
        if not 0 <= index < len(self.subject.examples):
            words = f"there is no example {index}, only {len(self.subject.examples)} of them: reload the page."
            raise DataError(words)
        example = self.subject.examples[index]
        return to_data_url(example.pixels), example.name


def as_changes(moved: tuple[Any, ...]) -> Changes:
    """The sliders' values, in the order of `SLIDERS`, then invert and seed."""
    *values, invert, seed = moved
    return Changes(**dict(zip(SLIDERS, map(float, values), strict=True)), invert=bool(invert), seed=int(seed))


def message(words: str, *, refused: bool = False) -> str:
    """A line below the pad."""
    return _render("message", words, refused)


def thumbnails(subject: Subject) -> str:
    """Examples to choose from."""
    return _render("thumbnails", [(one.name, to_data_url(one.pixels)) for one in subject.examples])


def heading(subject: Subject) -> str:
    """What the page is about."""
    return _render("heading", subject.title, subject.source, [one[:1].upper() + one[1:] for one in subject.notes])


def _by_method(opinions: Opinions, subject: Subject) -> list[tuple[str, str, float]]:
    return [(method, subject.classes[opinions.label(method)], opinions.confidence(method)) for method in METHODS]


def _column(names: list[str]) -> int:
    return min(WIDEST, 1 + max(map(len, names)))


def confidence_card(opinions: Opinions, subject: Subject) -> str:
    """Label and confidence of each method."""
    rows = _by_method(opinions, subject)
    return _render("confidence", rows, _column([label for _, label, _ in rows]))


def decision_card(opinions: Opinions, subject: Subject) -> str:
    """Whether the picture would be answered, handed over, or called strange."""
    if subject.decisions is None or subject.decisions.answer is None:
        return _render("decision", "", "", "", subject.undecided)
    answer = subject.decisions.answer
    done = decide(subject.decisions, opinions.confidence("MoLA"), opinions.score)
    label = subject.classes[opinions.label("MoLA")]
    words = {
        "answer": f"Would answer: {short(label)}",
        "hand over": "Would hand over to a person",
        "strange": "Strange: would not be answered",
    }[done]
    because = {
        "answer": f"MoLA's confidence is above {percent(float(answer))}, and no alarm rings.",
        "hand over": f"MoLA's confidence is not above {percent(float(answer))}.",
        "strange": "The outlier score is above the alarm threshold.",
    }[done]
    promise = (
        f"On pictures like the validation images, at most {percent(answer.error_rate)} of the answers are wrong, with a certainty of "
        f"{percent(answer.certainty)}; {percent(answer.share)} of them would be answered."
    )
    return _render("decision", done, words, because, promise)


def shown_classes(opinions: Opinions) -> list[int]:
    """The classes that there is room for."""
    count = len(opinions.probs["MoLA"])
    if count <= ALL_SHOWN:
        return list(range(count))
    largest = [max(opinions.probs[method][index] for method in METHODS) for index in range(count)]
    return sorted(range(count), key=lambda index: -largest[index])[:SHOWN]


def classes_card(opinions: Opinions, subject: Subject) -> str:
    """Probabilities of each class by each method."""
    shown, chosen = shown_classes(opinions), opinions.label("MoLA")
    rows = [
        (subject.classes[index], {method: opinions.probs[method][index] for method in METHODS}, index == chosen)
        for index in shown
    ]
    return _render("classes", rows, len(opinions.probs["MoLA"]), _column([subject.classes[index] for index in shown]))


def split_card(opinions: Opinions) -> str:
    """MoLA's entropy in its two parts, against the largest that this number of classes allows."""
    parts = {"aleatoric": opinions.aleatoric, "epistemic": opinions.epistemic}
    return _render("split", parts, math.log(len(opinions.probs["MoLA"])))


def members_card(opinions: Opinions, subject: Subject) -> str:
    """Each component's opinion: the network alone, and with its Laplace approximation."""

    def said(probs: tuple[float, ...]) -> tuple[str, float]:
        return subject.classes[probs.index(max(probs))], max(probs)

    rows = [(said(member.network), said(member.laplace), member.weight) for member in opinions.members]
    return _render("members", rows)


def score_card(opinions: Opinions, reference: Reference | None) -> str:
    """The outlier score as a marker on the distribution of the validation data's."""
    score = opinions.score
    away = distance_words(opinions)
    if reference is None:
        return _render("score", score, away=away)
    # The axis shows the distribution, and the score, which may lie far outside.
    low, high = min(reference.scores[0], score), max(reference.scores[-1], score)
    margin = 0.04 * (high - low) or 0.5
    low, high = low - margin, high + margin
    edges = [low + (high - low) * index / BINS for index in range(BINS + 1)]
    shares = reference.histogram(edges)
    highest = (BASE - 2 * TOP) / (max(shares) or 1.0)

    def across(value: float) -> float:
        return LEFT / 2 + (WIDTH - LEFT / 2 - RIGHT) * (value - low) / (high - low)

    bars = [
        {
            "beyond": edge >= score,
            "x": across(edge) + 0.5,
            "y": BASE - highest * share,
            "width": across(edges[1]) - across(edges[0]) - 1,
            "height": highest * share,
        }
        for edge, share in zip(edges, shares, strict=False)
        if share > 0
    ]
    alarm = None if reference.alarm is None else {"score": reference.alarm, "x": across(reference.alarm)}
    return _render("score", score, reference.words(score), reference.count, bars, across(score), alarm, away)


def distance_words(opinions: Opinions) -> str:
    """How far the picture is from the training classes, and what that does to MoLA's confidence; empty where it is not known."""
    distance = opinions.distance
    if distance is None:
        return ""
    said = _times(distance)
    words = "Distance from the training classes: 1.0 is usual, this picture is "
    words += f"{said} times as far." if float(said) > 1 else f"no farther ({said})."
    if opinions.uncooled is None:
        return words
    return f"{words} Without caution by distance MoLA would be {percent(opinions.uncooled)} sure."


def turned_card(turned: Turned | None, rotation: float) -> str:
    """Confidence of each method against the angle, the present one marked."""
    if turned is None:
        return _render("turned")

    def across(angle: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (angle + 180) / 360

    def up(share: float) -> float:
        return BASE - (BASE - TOP) * share

    here = [(method, turned.confidence[method][turned.angles.index(rotation)]) for method in METHODS]
    said = ", ".join(f"{method} {percent(share)}" for method, share in here)
    return _render(
        "turned",
        f"Confidence against the angle of rotation; now at {rotation:g} degrees: {said}",
        [(f"{100 * share:.0f}%", up(share)) for share in (0.0, 0.5, 1.0)],
        [(f"{angle}°", across(angle)) for angle in (-180, -90, 0, 90, 180)],
        [
            (
                method,
                [(across(a), up(share)) for a, share in zip(turned.angles, turned.confidence[method], strict=True)],
            )
            for method in METHODS
        ],
        across(rotation),
        [(method, up(share)) for method, share in here],
    )


def verdict(opinions: Opinions, subject: Subject) -> list[str]:
    """A few sentences on what the methods say and why.

    Args:
        opinions: of one picture.
        subject: names the classes, and has scores to compare with.

    Returns:
        Sentences, the first the most important.
    """
    return [
        _chosen(opinions, subject.classes),
        *_strange(opinions, subject),
        *_cooled(opinions),
        *_why(opinions, subject.posterior.link.name),
    ]


def _chosen(opinions: Opinions, classes: tuple[str, ...]) -> str:
    said = {method: classes[opinions.label(method)] for method in METHODS}
    sure = {method: percent(opinions.confidence(method)) for method in METHODS}
    if len(set(said.values())) == 1:
        return (
            f"All say {said['MoLA']}: the single network with {sure['MAP']}, the ensemble with {sure['DE']}, "
            f"MoLA with {sure['MoLA']}."
        )
    parts = [f"{FULL_NAMES[method]} says {said[method]} with {sure[method]}" for method in METHODS]
    return f"They disagree: {', '.join(parts)}."


def _strange(opinions: Opinions, subject: Subject) -> list[str]:
    if subject.reference is None:
        return []
    share = subject.reference.share_below(opinions.score)
    compared = subject.reference.words(opinions.score)
    if share >= RARE:
        known = "This is unlike what the networks know"
        if opinions.confidence("MAP") >= SURE:
            known += ", however sure the single network is"
        return [f"{known}: it is {compared}."]
    if share >= ODD:
        return [f"It is unusual: {compared}."]
    return [f"As pictures go, it is not unusual: {compared}."]


def _cooled(opinions: Opinions) -> list[str]:
    sure = opinions.confidence("MoLA")
    if opinions.distance is None or opinions.uncooled is None or opinions.uncooled - sure < TAKEN:
        return []
    # Features that are longer than usual cool as well, however near their direction is.
    what = "its features are stronger than usual"
    if opinions.distance > FARTHER:
        what = f"the picture is {_times(opinions.distance)} times as far from the training classes as usual"
    return [
        f"Caution by distance lowers MoLA's confidence from {percent(opinions.uncooled)} to {percent(sure)}: {what}."
    ]


def _times(distance: float) -> str:
    return f"{distance:.0f}" if distance >= 100 else f"{distance:.1f}"


def _why(opinions: Opinions, link: str) -> list[str]:
    total = opinions.aleatoric + opinions.epistemic
    if opinions.confidence("MoLA") >= SURE or total < 0.05 * math.log(len(opinions.probs["MoLA"])):
        return []
    share = opinions.epistemic / total
    much = "Most" if share >= MOST else "Little" if share < LITTLE else "Part"
    alone = sum(max(member.network) for member in opinions.members) / len(opinions.members)
    reasons = []
    if share >= LITTLE:
        reasons.append(
            "weights that fit the training data equally well disagree here, and more data like this would settle it"
        )
    if alone < SURE:
        reasons.append(
            f"{'also, ' if reasons else ''}each network by itself is unsure ({percent(alone)} on average): the picture looks like "
            f"more than one class"
        )
    why = f"{much} of MoLA's doubt is epistemic ({100 * share:.0f} %), the other {100 * (1 - share):.0f} % aleatoric"
    if _cooled(opinions):
        why += ", which here includes doubt by distance"
    said = [f"{why}: {'; '.join(reasons)}." if reasons else f"{why}."]
    if alone >= SURE and link == "probit":
        said.append(
            f"Each network by itself is sure ({percent(alone)} on average). The probit link also lowers confidence by the variance "
            f"that the logits of all classes share, which is neither of the two; the link probit-centred leaves it out."
        )
    return said
