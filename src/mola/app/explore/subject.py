"""Content of the explorer: a posterior, how its networks take pictures, examples, and outlier scores to compare with.

`open_subject` reads a folder of `mola fit`; `digits_subject` trains, fits and tunes the digits demo, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mola.app.explore import ExploreOptions
from mola.app.explore.pictures import Sight, to_image
from mola.app.jobs.columns import output_names
from mola.app.jobs.decisions import Decisions, gated_threshold, make_decisions
from mola.app.jobs.folder import PosteriorFolder, open_posterior, read_scores, usual_alarm
from mola.app.jobs.job import Progress
from mola.app.jobs.pictures import Pictures
from mola.app.jobs.preparation import Intake
from mola.app.jobs.rows import Account, Loader
from mola.app.jobs.sets import UserSet, some_of
from mola.compare.demo_result import DEFAULT, DemoSettings
from mola.decisions.calibration import Calibration
from mola.errors import MolaError, OptionError
from mola.lab.data.embedded import CLASSES, SIDE, load_digits
from mola.lab.data.images import even_places
from mola.lab.demo import demo_methods, one_thread
from mola.lab.training import Recipe, digits_mlp, train_ensemble
from mola.options import counted
from mola.posterior import MoLA

ERROR_RATE = 0.05
"""Default share of wrong answers."""

EXAMPLES = 10
MAX_SCORED = 2000
"""Inputs of --reference that are scored."""


@dataclass(frozen=True)
class Reference:
    """Outlier scores of validation data; of very many, evenly spaced ranks."""

    scores: Tensor
    alarm: float
    """Score above which `mola predict` flags an input as outlying."""
    count: int
    """Number of validation data."""

    def share_below(self, score: float) -> float:
        """Return the share of the data with a lower score."""
        return float((self.scores < score).double().mean())


@dataclass(frozen=True)
class Subject:
    """Networks, posterior and examples of the page."""

    title: str
    posterior: MoLA
    classes: tuple[str, ...]
    sight: Sight
    examples: tuple[tuple[str, Image.Image], ...]
    """Names and pictures, the first shown at the start."""
    reference: Reference | None
    """None without scores of validation data."""
    decisions: Decisions | None
    """None if no error rate can be guaranteed."""
    notes: tuple[str, ...] = ()
    """Reasons for what is missing."""


def make_reference(scores: Tensor) -> Reference:
    """Return a reference from the scores (n,) of all data."""
    values = scores.double().cpu()
    return Reference(values, usual_alarm(values.numpy())[0], len(values))


def ood_examples(sight: Sight) -> list[tuple[str, Image.Image]]:
    """Return pictures of no class: noise, a checkerboard and, with scikit-learn, a photograph."""
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

    recipe, members, seed = Recipe(epochs=settings.epochs), settings.members, settings.seed
    with one_thread():
        networks = train_ensemble(digits_mlp, digits.train, recipe, members=members, seed=seed, on_epoch=on_epoch)
        progress("fitting and tuning", 0.95)
        posterior = demo_methods(networks, digits.train.batches(), digits.val.batches())[DEFAULT]
        prediction = posterior.predict(digits.val.inputs)
    scores = prediction.ood_score.double()
    reference = make_reference(scores)
    answer = gated_threshold(Calibration.of(prediction, digits.val.labels), scores, reference.alarm, ERROR_RATE)
    sight = Sight((1, SIDE, SIDE), Intake(mode="L"))
    first = [digits.test.inputs[digits.test.labels == label][:1] for label in range(CLASSES)]
    examples = [(f"a test digit, {label}", sight.images(one)[0]) for label, one in enumerate(first)]
    return Subject(
        title=f"handwritten digits, {SIDE} x {SIDE} pixels: {members} small networks, trained just now",
        posterior=posterior,
        classes=tuple(str(label) for label in range(CLASSES)),
        sight=sight,
        examples=(*examples, *ood_examples(sight)),
        reference=reference,
        decisions=Decisions(reference.alarm, answer),
    )


def open_subject(options: ExploreOptions, progress: Progress = lambda doing, done: None) -> Subject:
    """Open the folder of `mola fit` that the options name."""
    progress("loading networks", 0.0)
    folder = Path(str(options.posterior))
    fitted = open_posterior(folder, options.device, trust=options.trust, network=options.network)
    posterior = fitted.posterior
    if posterior.is_dense or not posterior.likelihood.mutually_exclusive:
        raise OptionError(
            f"the explorer needs networks that choose one of several classes for each picture; {folder} has the likelihood "
            f"{posterior.likelihood.name!r}{' and dense outputs' if posterior.is_dense else ''}. `mola predict` predicts for it."
        )
    is_picture = isinstance(fitted.example, Tensor) and fitted.example.is_floating_point()
    sight = Sight(tuple(fitted.example.shape[1:]) if is_picture else (), Intake.from_plain(fitted.preparation))
    notes: list[str] = []
    decisions = None
    try:
        rate = options.error_rate or ERROR_RATE
        decisions = make_decisions(fitted, error_rate=rate, certainty=options.certainty)
    except OptionError as error:
        if options.error_rate is not None:
            raise
        notes.append(f"No error rate can be guaranteed: {str(error).removeprefix('--error-rate: ')}")
    progress("reading validation data", 0.3)
    examples, reference = _read_reference(fitted, sight, options, notes)
    progress("done", 1.0)
    return Subject(
        title=f"{folder}: {counted(len(posterior.networks), 'network')}, {', '.join(fitted.job.network)}",
        posterior=posterior,
        classes=output_names(fitted),
        sight=sight,
        examples=(*examples, *ood_examples(sight)),
        reference=reference,
        decisions=decisions,
        notes=tuple(notes),
    )


def _read_reference(
    fitted: PosteriorFolder, sight: Sight, options: ExploreOptions, notes: list[str]
) -> tuple[list[tuple[str, Image.Image]], Reference | None]:
    # Examples and outlier scores, by default of the validation data.
    named, validation = options.reference or fitted.job.val, fitted.document["result"].get("validation")
    reference = None
    if validation is not None:
        reference = Reference(
            read_scores(fitted.folder)[0], float(validation["outlier_threshold"]), int(validation["count"])
        )
    if named is None:
        notes.append("Fitted without validation data: name some with --reference to see how outlying a picture is.")
        return [], reference
    try:
        data = fitted.open_set(named, labelled=False, directory=options.data, by_user=options.reference is not None)
        inputs = _read(data, EXAMPLES if options.reference is None else MAX_SCORED)
    except MolaError as error:
        if options.reference is not None:
            raise
        notes.append(f"No examples, since {named} cannot be read: {error} Name other data with --reference.")
        return [], reference
    if options.reference is not None:
        reference = make_reference(fitted.posterior.predict(torch.split(inputs, 256)).ood_score)
    some = inputs[even_places(len(inputs), min(EXAMPLES, len(inputs)))]
    return [(f"from {Path(named).name}", image) for image in sight.images(some)], reference


def _read(source: UserSet, count: int) -> Tensor:
    # A folder of images is read evenly, since it is in order of its classes; any other set from its start.
    if isinstance(source, Pictures) and source.count > count:
        source = some_of(source, even_places(source.count, count).tolist())
    parts: list[Tensor] = []
    for (inputs,) in Loader(source, Account(), labelled=False):
        parts.append(inputs)
        if sum(map(len, parts)) >= count:
            break
    return torch.cat(parts)[:count]
