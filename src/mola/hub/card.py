"""The model card: YAML that a hub reads, text that people read, and how well the predictor does on named test sets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mola import metrics
from mola.errors import DataError, OptionError
from mola.likelihood import CATEGORICAL, Likelihood
from mola.network import as_batch, peek
from mola.posterior import MoLA
from mola.reliability import draw_reliability

METRICS: Mapping[str, tuple[str, Callable[[Tensor, Tensor], float]]] = {
    "accuracy": ("accuracy", metrics.accuracy),
    "nll": ("negative log-likelihood", metrics.negative_log_likelihood),
    "brier": ("Brier score", metrics.brier),
    "ece": ("expected calibration error, 15 bins", metrics.expected_calibration_error),
    "confidence": ("mean confidence", lambda probs, _: metrics.mean_confidence(probs)),
}
"""What is measured: a title and a function, by the short name."""


@dataclass(frozen=True)
class Measured:
    """Numbers measured on a test set.

    Args:
        dataset: its name, as a reader should see it.
        count: number of data in it.
        values: metrics by name.
        bins: for each bin of the confidence, (count, mean confidence, accuracy); empty bins left out. Without, there is no
            calibration table.
    """

    dataset: str
    count: int
    values: Mapping[str, float]
    bins: tuple[tuple[int, float, float], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        numbers = torch.tensor([float(value) for value in self.values.values()], dtype=torch.float64)
        if not self.dataset.strip() or self.count < 1 or not bool(torch.isfinite(numbers).all()):
            raise OptionError(
                f"expected the name of the test set, at least 1 datum and finite numbers; got {self.dataset!r}, "
                f"{self.count}, {dict(self.values)}."
            )


def measure(predictor: Callable[[Any], Tensor], loader: Iterable[Any], dataset: str, *, bins: int = 10) -> Measured:
    """Measure a predictor on labelled data, read once.

    Args:
        predictor: from inputs to probabilities (n, C), such as a posterior.
        loader: batches with labels that were used neither for training nor for tuning.
        dataset: name of the test set.
        bins: number of equal-width bins of the confidence in the calibration table.

    Returns:
        The numbers.
    """
    likelihood: Likelihood = getattr(predictor, "likelihood", CATEGORICAL)
    if not likelihood.discrete:
        raise OptionError(
            "numbers have neither accuracy nor confidence: pass mola.hub.Measured with your own scores to the card."
        )
    _, batches = peek(loader, "the test loader")
    probs, labels = [], []
    for index, raw in enumerate(batches):
        place = f"batch {index} of the test loader"
        batch = as_batch(raw, place)
        if batch.labels is None:
            raise DataError(f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'.")
        probs.append(predictor(batch.inputs).cpu())
        labels.append(likelihood.check_labels(batch.labels.cpu(), probs[-1], place))
    every, known = torch.cat(probs), torch.cat(labels)
    if not likelihood.competing:  # every label that is known is a question with two answers
        (table,), known = likelihood.table(every.T[None]), likelihood.asked(known)
        every, known = table.T[known >= 0], known[known >= 0]
    binned = metrics.bin_confidences(every, known, bins)
    rows = [(int(count), total / count, right / count) for count, total, right in binned.tolist() if count]
    values = {name: function(every, known) for name, (_, function) in METRICS.items()}
    return Measured(dataset, len(known), values, tuple(rows))


def write_reliability(measured: Measured, path: Path) -> bool:
    """Write the reliability diagram.

    Args:
        measured: with bins.
        path: picture to write.

    Returns:
        Whether it was drawn: not without matplotlib, or without bins. The table beside it says the same.
    """
    if not measured.bins:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(4, 4), layout="constrained")
    panel = figure.subplots()
    bins = [(count, count * confidence, count * accuracy) for count, confidence, accuracy in measured.bins]
    draw_reliability(panel, {measured.dataset: (bins, {"color": "#1f5fa8"})}, fewest=1)
    panel.set_title(measured.dataset)
    figure.savefig(path, dpi=110)
    return True


TAGS = ("mola", "uncertainty", "calibration", "laplace-approximation", "out-of-distribution-detection", "pytorch")


def model_card(
    posterior: MoLA,
    *,
    name: str,
    classes: Sequence[str],
    measured: Sequence[Measured],
    license: str | None,
    tags: Sequence[str],
    pipeline_tag: str | None,
    build: str | None,
    own_builder: bool,
    picture: str | None,
    preparing: Mapping[str, Any],
) -> str:
    """A README.md with YAML in front.

    Args:
        posterior: what the folder holds.
        name: of the model.
        classes: their names.
        measured: on each test set.
        license: its identifier on the hub.
        tags: further ones.
        pipeline_tag: the hub's name of the task.
        build: where the function that builds a network is, as "package.module:function".
        own_builder: whether loading needs such a function.
        picture: file name of the reliability diagram of the first test set.
        preparing: the tokenizer and the processor in the folder, by the name of theirs.

    Returns:
        The text.
    """
    front: dict[str, Any] = {"library_name": "mola", "tags": [*TAGS, *(tag for tag in tags if tag not in TAGS)]}
    if license is not None:
        front["license"] = license
    if pipeline_tag is not None:
        front["pipeline_tag"] = pipeline_tag
    if measured:
        front["model-index"] = [{"name": name, "results": [_result(one, pipeline_tag) for one in measured]}]
    parts = [
        f"---\n{as_yaml(front)}---\n\n# {_plain(name)}",
        _what_it_is(posterior, classes),
        _how_to_load(name, build, own_builder, preparing, discrete=posterior.likelihood.discrete),
        *_what_is_absent(pipeline_tag, preparing),
        *(_measured(one, picture if index == 0 else None) for index, one in enumerate(measured)),
        _how_it_was_made(posterior),
    ]
    return "\n\n".join(parts) + "\n"


def _result(measured: Measured, task: str | None) -> dict[str, Any]:
    slug = re.sub(r"[^a-z0-9]+", "-", measured.dataset.lower()).strip("-") or "test-set"
    return {
        "task": {"type": task or "other"},
        "dataset": {"name": measured.dataset, "type": slug},
        "metrics": [
            {"type": metric, "name": _title(metric), "value": round(float(value), 6)}
            for metric, value in measured.values.items()
        ],
    }


def _plain(text: str) -> str:
    # A text that stays text in Markdown: on one line, without marks of HTML, tables, code and links.
    return re.sub(r"([\\`|*\[\]])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _title(metric: str) -> str:
    return METRICS[metric][0] if metric in METRICS else metric


def _what_it_is(posterior: MoLA, classes: Sequence[str]) -> str:
    count = len(posterior.components)
    kind = "a plain ensemble" if posterior.structure is None else "last-layer Laplace approximations"
    networks = sorted({type(network).__name__ for network in posterior.networks})
    listed = ", ".join(map(_plain, classes[:20])) + (f" and {len(classes) - 20} more" if len(classes) > 20 else "")
    likelihood = posterior.likelihood
    what = "classifier" if likelihood.discrete else "predictor of numbers"
    outputs = "Classes" if likelihood.competing else "Labels, each yes or no" if likelihood.discrete else "Numbers"
    return (
        f"A {what} that says how sure it is: {count} trained network{'s' if count > 1 else ''} "
        f"({', '.join(networks)}) with {kind}, made with mola.\n\n"
        f"{outputs} ({len(classes)}): {listed}."
    )


def _what_is_absent(task: str | None, preparing: Mapping[str, Any]) -> list[str]:
    absent = {"text-classification": ("tokenizer", "texts"), "image-classification": ("processor", "images")}
    role, raw = absent.get(task or "", ("", ""))
    if not role or role in preparing:
        return []
    return [
        f"**This folder holds no {role}.** The networks take numbers, not {raw}: prepare {raw} with the {role} that the networks "
        f"were trained with, or the predictions mean nothing."
    ]


def _how_to_load(
    name: str, build: str | None, own_builder: bool, preparing: Mapping[str, Any], *, discrete: bool = True
) -> str:
    lines = ["import mola"]
    for helper in preparing.values():
        kind = type(helper)
        place = "transformers" if kind.__module__.startswith("transformers.") else kind.__module__
        lines.append(f"from {place} import {kind.__name__}")
    if own_builder and build is not None:
        module, function = build.split(":")
        lines.append(f"from {module} import {function} as build")
    argument = ", build" if own_builder else ""
    lines.append("")
    lines += [
        f"{role} = {type(one).__name__}.from_pretrained({json.dumps(f'{name}/{role}', ensure_ascii=False)})"
        for role, one in preparing.items()
    ]
    if "tokenizer" in preparing:
        lines.append('x = tokenizer(["a text"], padding=True, return_tensors="pt")')
    elif "processor" in preparing:
        lines.append('x = processor(images=[image], return_tensors="pt")')
    lines += [
        f"posterior = mola.load_from_hub_folder({json.dumps(name, ensure_ascii=False)}{argument})   # this folder, downloaded",
        "prediction = posterior.predict(x)       # a batch of inputs, or a loader",
        "prediction.probs, prediction.entropy, prediction.epistemic, prediction.ood_score"
        if discrete
        else "prediction.mean, prediction.interval(0.9), prediction.epistemic, prediction.ood_score",
    ]
    note = (
        "`build` makes one network of the architecture, with any weights.\n\n" if own_builder and build is None else ""
    )
    return "## Use\n\n```console\npip install mola-torch\n```\n\n" + note + "```python\n" + "\n".join(lines) + "\n```"


def _measured(measured: Measured, picture: str | None) -> str:
    rows = [f"| {_plain(_title(metric))} | {float(value):.4g} |" for metric, value in measured.values.items()]
    text = (
        f"## Measured on {_plain(measured.dataset)}\n\n{measured.count} data.\n\n| metric | value |\n|---|---|\n"
        + "\n".join(rows)
    )
    if measured.bins:
        text += "\n\nCalibration: among predictions of similar confidence, how many were right.\n\n"
        text += "| predictions | mean confidence | accuracy |\n|---|---|---|\n"
        text += "\n".join(f"| {count} | {mean:.3f} | {right:.3f} |" for count, mean, right in measured.bins)
    if picture is not None:
        text += f"\n\n![Accuracy over confidence]({picture})"
    return text + "\n\nThis holds for data like these; elsewhere, look at `ood_score`."


def _how_it_was_made(posterior: MoLA) -> str:
    rows = [
        ("networks", str(len(posterior.components))),
        ("mixture weights", ", ".join(f"{weight:.4g}" for weight in posterior.weights.tolist())),
    ]
    if not posterior.likelihood.competing:
        rows.append(("likelihood", posterior.likelihood.name))
    if posterior.structure is not None:
        counts = {one.curvature.factors.count for one in posterior.components if one.curvature is not None}
        rows += [
            ("structure", posterior.structure),
            ("link", posterior.link.name),
            ("prior precision", ", ".join(f"{value:.4g}" for value in posterior.prior_precision)),
            ("chosen by", "hand" if posterior.tuning is None else posterior.tuning.rule),
            ("training data", ", ".join(str(count) for count in sorted(counts))),
        ]
    rows += _cooled(posterior)
    return "## How it was made\n\n| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows)


def _cooled(posterior: MoLA) -> list[tuple[str, str]]:
    # What logits are divided by, in words; nothing where they stay as they are.
    rows, exponent = [], posterior.distance_exponent
    if posterior.temperature != 1:
        how = "sharpened" if posterior.temperature < 1 else "softened"
        rows.append(("temperature", f"{posterior.temperature:.4g}: logits are divided by it, and so {how}"))
    if exponent > 0:
        rows.append(
            (
                "caution by distance",
                f"exponent {exponent:.4g}: logits of inputs 2 times as far from the training classes as usual are divided by "
                f"{2**exponent:.3g}, 4 times as far by {4**exponent:.3g}",
            )
        )
    return rows


def as_yaml(value: Any, indent: int = 0) -> str:
    """Nested mappings and lists as YAML; texts and numbers are written as in JSON, which YAML includes."""
    pad, text = " " * indent, ""
    if isinstance(value, Mapping):
        for key, one in value.items():
            nested = isinstance(one, (Mapping, list))
            text += f"{pad}{key}:\n{as_yaml(one, indent + 2)}" if nested else f"{pad}{key}: {_scalar(one)}\n"
        return text
    for one in value:
        if isinstance(one, Mapping):
            inner = as_yaml(one, indent + 2)
            text += f"{pad}- {inner[indent + 2 :]}"
        else:
            text += f"{pad}- {_scalar(one)}\n"
    return text


def _scalar(value: Any) -> str:
    # Not 1e-06: without a point and a sign, YAML takes it for text.
    return np.format_float_positional(value, trim="0") if isinstance(value, float) else json.dumps(value)
