"""Figures made of bars, as HTML: confidence, probabilities by class, the split of the entropy, the components.

Everything that is text comes from elsewhere, perhaps from a stranger's folder, and is escaped.
"""

from __future__ import annotations

import math
from html import escape

from mola.app.explore.opinions import METHODS, Opinions
from mola.app.explore.subject import Subject
from mola.app.explore.words import percent

__all__ = ["card", "classes_card", "confidence_card", "members_card", "split_card"]

ALL_SHOWN = 12
"""Up to so many classes, all are shown, in their order; of more, the most probable."""

SHOWN = 8
NAMES = 13
"""Letters of a class's name that there is room for beside its bars."""

LONG = 22
"""Letters of a class's name that are shown at all."""


def card(name: str, title: str, body: str, hint: str = "") -> str:
    """A framed figure with its title and how to read it."""
    below = f'<p class="hint">{hint}</p>' if hint else ""
    return f'<section class="card {name}" data-card="{name}"><h3>{title}</h3>{body}{below}</section>'


def short(name: str) -> str:
    """A name that fits, escaped."""
    return escape(name if len(name) <= LONG else f"{name[: LONG - 1]}\N{HORIZONTAL ELLIPSIS}")


def bar(method: str, share: float, words: str = "") -> str:
    """A horizontal bar from 0 to 1."""
    return f'<span class="track" title="{words}"><span class="bar {method}" style="width:{100 * share:.2f}%"></span></span>'


def confidence_card(opinions: Opinions, subject: Subject) -> str:
    """Label and confidence of each method."""
    rows = []
    letters = _letters([subject.classes[opinions.label(method)] for method in METHODS])
    for method in METHODS:
        value = opinions.confidence(method)
        label = short(subject.classes[opinions.label(method)])
        rows.append(
            f'<div class="row"><span class="method {method}">{method}</span><span class="label">{label}</span>'
            f'{bar(method, value)}<span class="number" data-confidence="{method}">{percent(value)}</span></div>'
        )
    hint = "MAP is the first network alone, DE the mean of all, MoLA their mixture of Laplace approximations."
    return card("confidence", "Confidence", f'<div style="--names:{letters}ch">{"".join(rows)}</div>', hint)


def _letters(names: list[str]) -> int:
    """Width of a column of names."""
    return min(NAMES, 1 + max(map(len, names)))


def shown_classes(opinions: Opinions) -> list[int]:
    """Which classes there is room for."""
    count = len(opinions.probs["MoLA"])
    if count <= ALL_SHOWN:
        return list(range(count))
    largest = [max(opinions.probs[method][index] for method in METHODS) for index in range(count)]
    return sorted(range(count), key=lambda index: -largest[index])[:SHOWN]


def classes_card(opinions: Opinions, subject: Subject) -> str:
    """Probabilities of each class by each method."""
    rows, shown = [], shown_classes(opinions)
    letters = _letters([subject.classes[index] for index in shown])
    for index in shown:
        name = subject.classes[index]
        bars = "".join(
            bar(method, opinions.probs[method][index], f"{method} {percent(opinions.probs[method][index])}")
            for method in METHODS
        )
        chosen = " chosen" if index == opinions.label("MoLA") else ""
        value = percent(opinions.probs["MoLA"][index])
        rows.append(
            f'<div class="class{chosen}"><span class="name" title="{escape(name)}">{short(name)}</span>'
            f'<span class="three">{bars}</span><span class="number">{value}</span></div>'
        )
    count = len(opinions.probs["MoLA"])
    hint = "Numbers are MoLA's."
    if count > len(rows):
        hint = f"The {len(rows)} most probable of {count} classes. {hint}"
    body = f'<div style="--names:{letters}ch">{"".join(rows)}</div>'
    return card("classes", f"Probabilities {legend()}", body, hint)


def legend() -> str:
    """Which colour is which method."""
    return '<span class="legend">' + "".join(f'<i class="{method}">{method}</i>' for method in METHODS) + "</span>"


def split_card(opinions: Opinions) -> str:
    """MoLA's entropy in its two parts, against the largest that so many classes allow."""
    most = math.log(len(opinions.probs["MoLA"]))
    total = opinions.aleatoric + opinions.epistemic
    parts = (("aleatoric", opinions.aleatoric), ("epistemic", opinions.epistemic))
    stacked = "".join(
        f'<span class="bar {name}" style="width:{100 * min(1.0, value / most):.2f}%" title="{name} {value:.3f} nats"></span>'
        for name, value in parts
    )
    named = "".join(
        f'<span class="part"><i class="{name}">{name}</i><b data-{name}>{value:.3f}</b></span>' for name, value in parts
    )
    body = (
        f'<div class="total"><b>{total:.3f}</b> nats of doubt, of at most {most:.2f}</div>'
        f'<div class="track tall">{stacked}</div><div class="parts">{named}</div>'
    )
    hint = "Epistemic: the weights are uncertain, which more data would mend. Aleatoric: the rest, such as an ambiguous picture."
    return card("split", "Where MoLA's doubt comes from", body, hint)


def members_card(opinions: Opinions, subject: Subject) -> str:
    """Each component's opinion: the network alone, and with its Laplace approximation."""
    rows = []
    for number, member in enumerate(opinions.members, start=1):
        alone, whole = max(member.network), max(member.laplace)
        said = [subject.classes[probs.index(top)] for probs, top in ((member.network, alone), (member.laplace, whole))]
        rows.append(
            f"<tr><th>{number}</th><td>{short(said[0])}</td><td>{bar('MAP', alone)}<span>{percent(alone)}</span></td>"
            f"<td>{short(said[1])}</td><td>{bar('MoLA', whole)}<span>{percent(whole)}</span></td>"
            f"<td>{100 * member.weight:.0f} %</td></tr>"
        )
    body = (
        '<div class="scroll"><table><thead><tr><th></th><th colspan="2">network alone</th><th colspan="2">with Laplace</th>'
        f"<th>weight</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    count = len(opinions.members)
    hint = "Where they disagree, the mixture is unsure." if count > 1 else "A mixture of one."
    return card("members", f"The {count} component{'s' if count > 1 else ''}", body, hint)
