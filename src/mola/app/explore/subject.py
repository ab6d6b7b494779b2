"""What the explorer shows: a posterior, how its networks take pictures, examples, and outlier scores to compare with.

`open_subject` reads a folder of `mola fit`; `digits_subject` trains, fits and tunes the digits demo, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mola.app.explore.pictures import Sight, to_image
from mola.app.jobs.decisions import Decisions, gated_threshold, make_decisions
from mola.app.jobs.folder import open_posterior, read_scores, usual_alarm
from mola.app.jobs.job import Progress
from mola.app.jobs.pictures import Pictures
from mola.app.jobs.preparation import Intake
from mola.app.jobs.sets import UserSet, some_of
from mola.compare.demo_result import DEFAULT, DemoSettings
from mola.decisions.calibration import Calibration
from mola.errors import DataError, MolaError, OptionError
from mola.lab.data.embedded import CLASSES, SIDE, load_digits
from mola.lab.data.images import even_places
from mola.lab.demo import build_network, demo_methods, one_thread
from mola.lab.training import Recipe, train_ensemble
from mola.posterior import MoLA

ERROR_RATE = 0.05
"""Share of wrong answers, unless the user asks for another."""

EXAMPLES = 10
MAX_SCORED = 2000
"""Inputs of --reference that are scored."""


@dataclass(frozen=True)
class Reference:
    """Outlier scores of validation data: rising, with the number of data up to each of them."""

    scores: NDArray[np.float64]
    ranks: NDArray[np.int64]
    alarm: float
    """Score above which `mola predict` calls an input outlying."""

    @classmethod
    def of(cls, scores: Tensor) -> Reference:
        """From the scores (n,) of all data."""
        values = np.sort(scores.double().cpu().numpy())
        return cls(values, np.arange(1, len(values) + 1), usual_alarm(values)[0])

    @property
    def count(self) -> int:
        """Number of data."""
        return int(self.ranks[-1])

    def share_below(self, score: float) -> float:
        """Share of the data with a lower score."""
        return float(np.interp(score, self.scores, self.ranks, left=0)) / self.count


@dataclass(frozen=True)
class Subject:
    """Everything that the page needs."""

    title: str
    posterior: MoLA
    classes: tuple[str, ...]
    sight: Sight
    examples: tuple[tuple[str, Image.Image], ...]
    """Names and pictures, the first shown at the start."""
    reference: Reference | None
    """None where the scores of the validation data are unknown."""
    decisions: Decisions | None
    """When to answer; None where no error rate can be guaranteed."""
    notes: tuple[str, ...] = ()
    """What is missing, and why."""


def ood_examples(sight: Sight) -> list[tuple[str, Image.Image]]:
    """Pictures of no class: noise, a checkerboard and, with scikit-learn, a photograph."""
    channels, height, width = sight.shape
    noise = torch.randint(256, sight.shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    side = max(1, min(height, width) // 4)
    checks = (torch.arange(height)[:, None] // side + torch.arange(width) // side) % 2 * 255
    found = [("noise", to_image(noise)), ("checks", to_image(checks.to(torch.uint8).expand(channels, -1, -1)))]
    try:
        from sklearn import datasets
    except ImportError:
        return found
    return [*found, ("a flower", sight.fit(Image.fromarray(datasets.load_sample_image("flower.jpg"))))]


def digits_subject(progress: Progress = lambda doing, done: None, settings: DemoSettings | None = None) -> Subject:
    """Train the networks of `mola demo`, and fit and tune their posterior."""
    settings = settings or DemoSettings()
    progress("reading the digits", 0.0)
    digits = load_digits(settings.seed)

    def on_epoch(member: int, epoch: int) -> None:
        done = (member + epoch / settings.epochs) / settings.members
        progress(f"training network {member + 1} of {settings.members}", 0.95 * done)

    with one_thread():
        networks = train_ensemble(
            build_network,
            digits.train,
            Recipe(epochs=settings.epochs),
            members=settings.members,
            seed=settings.seed,
            on_epoch=on_epoch,
        )
        progress("fitting and tuning", 0.95)
        posterior = demo_methods(networks, digits.train.batches(), digits.val.batches())[DEFAULT]
        prediction = posterior.predict(digits.val.inputs)
    scores = prediction.ood_score.double()
    reference = Reference.of(scores)
    answer = gated_threshold(Calibration.of(prediction, digits.val.labels), scores, reference.alarm, ERROR_RATE)
    sight = Sight((1, SIDE, SIDE), Intake(mode="L"))
    first = [digits.test.inputs[digits.test.labels == label][:1] for label in range(CLASSES)]
    examples = [(f"a test digit, {label}", sight.images(one)[0]) for label, one in enumerate(first)]
    return Subject(
        title=f"handwritten digits, {SIDE} x {SIDE} pixels: {settings.members} small networks, trained just now",
        posterior=posterior,
        classes=tuple(str(label) for label in range(CLASSES)),
        sight=sight,
        examples=(*examples, *ood_examples(sight)),
        reference=reference,
        decisions=Decisions(reference.alarm, answer),
    )


def open_subject(
    folder: Path,
    progress: Progress = lambda doing, done: None,
    *,
    reference: str | None = None,
    directory: str | None = None,
    device: str = "cpu",
    trust: bool = False,
    network: tuple[str, ...] | list[str] = (),
    error_rate: float | None = None,
    certainty: float | None = None,
) -> Subject:
    """Open a folder of `mola fit`.

    Args:
        folder: the folder.
        progress: called with the present step and the share of the work done.
        reference: data to take examples from and compare outlier scores with; None uses the validation data of the fit.
        directory: folder of the built-in data sets.
        device: where to compute.
        trust: see `mola.app.jobs.folder.open_posterior`.
        network: likewise.
        error_rate: share of wrong answers; None uses 0.05 where that can be guaranteed.
        certainty: of the error rate; None uses 0.95.
    """
    progress("loading networks", 0.0)
    fitted = open_posterior(folder, device, trust=trust, network=network)
    posterior = fitted.posterior
    if not posterior.likelihood.mutually_exclusive:
        raise OptionError(
            f"the explorer needs networks that choose one of several classes, and the likelihood of {folder} is "
            f"{posterior.likelihood.name!r}. `mola predict` predicts for it."
        )
    fitted.refuse_positions("the explorer shows one prediction for each picture")
    is_picture = isinstance(fitted.example, Tensor) and fitted.example.is_floating_point()
    sight = Sight(tuple(fitted.example.shape[1:]) if is_picture else (), Intake.from_plain(fitted.preparation))
    notes, decisions, scores = [], None, None
    try:
        decisions = make_decisions(fitted, error_rate=error_rate or ERROR_RATE, certainty=certainty)
    except OptionError as error:
        if error_rate is not None:
            raise
        notes.append(f"No error rate can be guaranteed: {str(error).removeprefix('--error-rate: ')}")
    validation = fitted.document["result"].get("validation")
    if validation is not None and reference is None:
        kept, ranks, _ = read_scores(folder)
        scores = Reference(kept.numpy(), ranks.numpy(), float(validation["outlier_threshold"]))
    examples: list[tuple[str, Image.Image]] = []
    named = reference or fitted.job.val
    if named is not None:
        progress("reading validation data", 0.3)
        try:
            data = fitted.open_set(named, labelled=False, directory=directory, said=reference is not None)
            inputs = _read(data, EXAMPLES if reference is None else MAX_SCORED)
        except MolaError as error:
            if reference is not None:
                raise
            notes.append(f"No examples, since {named} cannot be read: {error} Name other data with --reference.")
        else:
            some = inputs[even_places(len(inputs), min(EXAMPLES, len(inputs)))]
            examples = [(f"from {Path(named).name}", image) for image in sight.images(some)]
            if reference is not None:
                progress("scoring", 0.5)
                scores = Reference.of(posterior.predict(torch.split(inputs, 256)).ood_score)
    elif validation is None:
        notes.append("Fitted without validation data: name some with --reference to see how outlying a picture is.")
    progress("done", 1.0)
    count = len(posterior.networks)
    return Subject(
        title=f"{folder}: {count} network{'s' if count > 1 else ''}, {', '.join(fitted.job.network)}",
        posterior=posterior,
        classes=fitted.classes or tuple(str(index) for index in range(fitted.outputs)),
        sight=sight,
        examples=(*examples, *ood_examples(sight)),
        reference=scores,
        decisions=decisions,
        notes=tuple(notes),
    )


def _read(source: UserSet, count: int) -> Tensor:
    # A folder of images is read evenly, since it is in order of its classes; any other set from its start.
    if isinstance(source, Pictures) and source.count > count:
        source = some_of(source, even_places(source.count, count).tolist())
    parts, found = [], 0
    for rows in source:
        parts.append(rows.inputs)
        found += len(rows.inputs)
        if found >= count:
            break
    if not found:
        raise DataError(f"{source.name} has no usable inputs.")
    return torch.cat(parts)[:count]
