"""Contents of the explorer: a posterior, the preparation of its pictures, examples, and OOD scores of the validation data.

`folder_subject` reads a folder written by `molaplace fit`. `digits_subject` takes a few seconds to train the networks of the digits demo
and to fit and tune their posterior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from molaplace.cli.decisions import SCORE, default_alarm, read_columns
from molaplace.cli.explorer.pictures import Sight, to_image
from molaplace.cli.folder import PosteriorFolder
from molaplace.data.digits import CLASSES, SIDE, load_digits
from molaplace.data.preprocessing import Preprocessing
from molaplace.demo.data import train_digits
from molaplace.demo.run import DEFAULT, DemoSettings, demo_methods
from molaplace.errors import DataError, MolaError, OptionError
from molaplace.numerics import one_thread
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.progress import Progress, no_progress

EXAMPLES = 10
Example = tuple[str, Image.Image]


@dataclass(frozen=True)
class Reference:
    """OOD scores of the validation data, or of a subset if the validation set is large."""

    scores: Tensor
    alarm: float
    """Score above which `molaplace predict` flags an input as an outlier."""
    count: int
    """Size of the validation set."""

    def share_below(self, score: float) -> float:
        """Return the fraction of validation inputs whose scores are lower than `score`."""
        return float((self.scores < score).double().mean())


@dataclass(frozen=True)
class Subject:
    """The networks, the posterior and the examples shown on the page."""

    title: str
    posterior: MoLA
    classes: tuple[str, ...]
    sight: Sight
    examples: tuple[Example, ...]
    """Names and pictures of the examples; the page starts with the first example."""
    reference: Reference | None
    """OOD scores of the validation data, or None if there are no validation data."""
    notes: tuple[str, ...] = ()
    """Notes that explain why parts of the page are missing."""


def ood_examples(sight: Sight) -> list[Example]:
    """Return pictures that belong to no class: noise, a checkerboard and a photograph."""
    channels, height, width = sight.shape
    noise = torch.randint(256, sight.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(torch.uint8)
    side = max(1, min(height, width) // 4)
    checks = (torch.arange(height, device="cpu")[:, None] // side + torch.arange(width, device="cpu") // side) % 2 * 255
    return [
        ("noise", to_image(noise)),
        ("checks", to_image(checks.to(torch.uint8).expand(channels, -1, -1))),
        ("a flower", sight.fit(Image.fromarray(load_sample_image("flower.jpg")))),
    ]


def digits_subject(progress: Progress = no_progress, settings: DemoSettings | None = None) -> Subject:
    """Train the networks of `molaplace demo`, and fit and tune their posterior."""
    settings = settings or DemoSettings()
    progress("reading the digits", 0.0)
    digits = load_digits(settings.seed)

    def on_epoch(epoch: int) -> None:
        progress(f"training {settings.members} networks", 0.95 * epoch / settings.epochs)

    with one_thread():
        networks = train_digits(
            digits.train, members=settings.members, seed=settings.seed, epochs=settings.epochs, on_epoch=on_epoch
        )
        progress("fitting and tuning", 0.95)
        posterior = demo_methods(networks, digits.train.batches(), digits.val.batches())[DEFAULT]
        scores = posterior.predict(digits.val.inputs).ood_score.double()
    sight = Sight((1, SIDE, SIDE), Preprocessing(mode="L"))
    first_of_class = [digits.test.inputs[digits.test.labels == label][:1] for label in range(CLASSES)]
    examples = [(f"a test digit, {label}", sight.images(inputs)[0]) for label, inputs in enumerate(first_of_class)]
    return Subject(
        title=f"handwritten digits, {SIDE} x {SIDE} pixels: {settings.members} small, newly trained networks",
        posterior=posterior,
        classes=tuple(str(label) for label in range(CLASSES)),
        sight=sight,
        examples=(*examples, *ood_examples(sight)),
        reference=Reference(scores, default_alarm(scores)[0], len(scores)),
    )


def folder_subject(fitted: PosteriorFolder) -> Subject:
    """Return the contents for a posterior's folder."""
    folder = fitted.folder
    posterior = fitted.posterior
    if posterior.is_dense or not posterior.likelihood.mutually_exclusive:
        raise OptionError(
            f"the explorer needs networks that predict one of several classes for each picture; {folder} has the likelihood "
            f"{posterior.likelihood.name!r}{' and dense outputs' if posterior.is_dense else ''}. Use `molaplace predict` for this "
            f"posterior."
        )
    is_picture = isinstance(fitted.example, Tensor) and fitted.example.is_floating_point()
    sight = Sight(tuple(fitted.example.shape[1:]) if is_picture else (), fitted.preprocessing)
    validation = fitted.document["result"].get("validation")
    reference = None
    if validation is not None:
        scores = read_columns(folder)[SCORE]
        reference = Reference(scores, float(validation["outlier_threshold"]), int(validation["count"]))
    examples: list[Example] = []
    notes = [
        "There are no examples and no OOD scores for comparison, because the posterior was fitted without validation data."
    ]
    if fitted.job.val is not None:
        try:
            examples = _examples(fitted, fitted.job.val, sight)
            notes = []
        except MolaError as error:
            notes = [f"There are no examples, because {fitted.job.val} cannot be read: {error}"]
    return Subject(
        title=f"{folder}: {counted(len(posterior.networks), 'network')}, {', '.join(fitted.job.network)}",
        posterior=posterior,
        classes=fitted.output_names,
        sight=sight,
        examples=(*examples, *ood_examples(sight)),
        reference=reference,
        notes=tuple(notes),
    )


def _examples(fitted: PosteriorFolder, name: str, sight: Sight) -> list[Example]:
    # The examples are spread evenly over the set, because the images in a folder are sorted by class. If the size of a set is
    # unknown, its first inputs are used.
    source = fitted.open_dataset(name, labelled=False)
    single = replace(source, preprocessing=replace(source.preprocessing, batch_size=1))
    usable = (
        rows.inputs for rows in single.batches(0, max(1, (source.count or 0) // EXAMPLES)) if rows.inputs is not None
    )
    inputs = list(islice(usable, EXAMPLES))
    if not inputs:
        raise DataError("no input is usable.")
    return [(f"from {Path(name).name}", image) for image in sight.images(torch.cat(inputs)[:EXAMPLES])]
