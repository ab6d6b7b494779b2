"""What is explored: a posterior, how its networks see pictures, example pictures, and outlier scores to compare with.

A subject is made of a folder that `mola fit` wrote (`open_subject`), or of the digits demo, which is trained, fitted and tuned
here in seconds (`digits_subject`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mola.app.explore.pictures import Sight
from mola.app.jobs.arrays import InMemory
from mola.app.jobs.decisions import Decisions, gated_threshold, make_decisions
from mola.app.jobs.fit import quantiles
from mola.app.jobs.folder import open_posterior, usual_alarm
from mola.app.jobs.job import Progress
from mola.app.jobs.pictures import Pictures
from mola.app.jobs.preparation import Intake
from mola.app.jobs.sets import UserSet, some_of
from mola.compare.demo_result import COOLED, DemoSettings
from mola.decisions.calibration import Calibration
from mola.errors import DataError, MolaError, OptionError, StorageError
from mola.lab.data.embedded import CLASSES, SIDE, load_digits
from mola.lab.data.images import even_places
from mola.lab.demo import build_network, demo_methods, one_thread
from mola.lab.training import Recipe, train_ensemble
from mola.posterior import MoLA

NOISE_SEED = 0

TRAINED = 0.95
"""Share of the work that training is, as measured."""

ERROR_RATE = 0.05
"""Of what would be answered, where the user asks for no other."""

EXAMPLES = 10
MOST_READ = 2000
"""Inputs of other reference data that scores are computed for."""

SLACK = 0.01
"""How far values may lie outside 0 to 1 by rounding."""


@dataclass(frozen=True)
class Reference:
    """A distribution of scores, by its quantiles; between two of them it is taken to be even.

    Attributes:
        levels: shares, from 0 to 1.
        scores: that these shares stay below, never falling.
        count: how many inputs it was made of.
        name: of the data.
        alarm: the score above which `mola predict` calls an input outlying; None where that is not known.
    """

    levels: tuple[float, ...]
    scores: tuple[float, ...]
    count: int
    name: str
    alarm: float | None = None

    @classmethod
    def of(cls, scores: Tensor, name: str) -> Reference:
        """The distribution of these scores.

        Args:
            scores: (n,).
            name: of the data.

        Returns:
            The distribution.
        """
        if not len(scores):
            raise DataError(f"{name} holds no input that can be used, so there are no scores to compare with.")
        values = scores.double().cpu().numpy()
        return cls(*_columns(quantiles(values)), count=len(scores), name=name, alarm=usual_alarm(values)[0])

    @classmethod
    def from_plain(cls, validation: Mapping[str, Any] | None, name: str) -> Reference | None:
        """What `mola fit` wrote; None without validation data.

        Args:
            validation: of the results in `job.toml`.
            name: of the data.

        Returns:
            The distribution, or None.
        """
        if validation is None:
            return None
        try:
            levels, scores = _columns(validation["outlier_quantiles"])
            ordered = all(a < b for a, b in pairwise(levels))
            rising = all(a <= b for a, b in pairwise(scores))
            whole = (levels[0], levels[-1]) == (0.0, 1.0) and bool(np.isfinite(scores).all())
            sound, count = ordered and rising and whole, int(validation["count"])
            alarm = float(validation["outlier_threshold"])
        except (TypeError, ValueError, KeyError, IndexError):
            sound, count, alarm = False, 0, 0.0
        if not sound or count < 1:
            raise StorageError(
                "the saved quantiles of the outlier score are invalid: expected pairs of a share and a score, both rising."
            )
        return cls(levels, scores, count, name, alarm)

    def share_below(self, score: float) -> float:
        """Share of the data whose score is lower."""
        return float(np.interp(score, self.scores, self.levels))

    def histogram(self, edges: Sequence[float]) -> list[float]:
        """Shares of the data between one edge and the next; edges rise."""
        return np.diff([self.share_below(edge) for edge in edges]).tolist()

    def words(self, score: float) -> str:
        """How a score compares, in words."""
        share = self.share_below(score)
        if score > self.scores[-1]:
            return f"more outlying than all {self.count:,} validation images"
        if score < self.scores[0]:
            return f"less outlying than all {self.count:,} validation images"
        return f"more outlying than {100 * share:.{1 if share > 0.9 else 0}f} % of the validation data"


def _columns(pairs: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    levels, scores = zip(*pairs, strict=True)
    return tuple(float(one) for one in levels), tuple(float(one) for one in scores)


@dataclass(frozen=True)
class Example:
    """A picture to begin with: bytes (channels, height, width), and what it is called."""

    name: str
    pixels: Tensor


@dataclass(frozen=True)
class Subject:
    """Everything that the page needs, whoever made it.

    Attributes:
        title: what the networks tell apart, for the page.
        source: where the posterior comes from, in words.
        posterior: a mixture of Laplace approximations.
        classes: their names.
        sight: how the networks see pictures.
        reference: outlier scores of validation data, or None where they are not known.
        examples: to begin with.
        notes: what was left out on the way, and why.
        decisions: when pictures are answered, or called strange; None where that cannot be promised.
        undecided: why it cannot.
    """

    title: str
    source: str
    posterior: MoLA
    classes: tuple[str, ...]
    sight: Sight
    reference: Reference | None
    examples: tuple[Example, ...] = ()
    notes: tuple[str, ...] = ()
    decisions: Decisions | None = None
    undecided: str = ""


def ood_examples(sight: Sight) -> tuple[Example, ...]:
    """Noise, checks and, where scikit-learn brings it, a photograph of a flower.

    Args:
        sight: of the networks.

    Returns:
        Examples in the networks' size.
    """
    channels, height, width = sight.shape
    generator = torch.Generator().manual_seed(NOISE_SEED)
    noise = torch.randint(0, 256, sight.shape, generator=generator).to(torch.uint8)
    side = max(1, min(height, width) // 4)
    rows, columns = torch.arange(height)[:, None] // side, torch.arange(width) // side
    checks = (255 * ((rows + columns) % 2)).to(torch.uint8).expand(channels, height, width).contiguous()
    made = [Example("noise", noise), Example("checks", checks)]
    try:
        from PIL import Image
        from sklearn import datasets

        photograph = Image.fromarray(datasets.load_sample_image("flower.jpg"))
    except ImportError:
        return tuple(made)  # one example less
    return (*made, Example("a flower", sight.fit(photograph)[0]))


def digits_subject(progress: Progress = lambda doing, done: None, settings: DemoSettings | None = None) -> Subject:
    """Train the demo's networks, fit and tune their mixture.

    Args:
        progress: told what is being done, and which share of the work is done.
        settings: seed, number of networks and epochs; None is the demo's own.

    Returns:
        The subject: the networks and the posterior are those of `mola demo` with the same settings.
    """
    settings = settings or DemoSettings()
    progress("reading the digits", 0.0)
    digits = load_digits(settings.seed)

    def trained(member: int, epoch: int) -> None:
        done = (member + epoch / settings.epochs) / settings.members
        progress(f"training network {member + 1} of {settings.members}", TRAINED * done)

    with one_thread():
        recipe = Recipe(epochs=settings.epochs)
        networks = train_ensemble(
            build_network, digits.train, recipe, members=settings.members, seed=settings.seed, on_epoch=trained
        )
        progress("fitting and tuning", TRAINED)
        posterior = demo_methods(networks, digits.train.batches(), digits.val.batches())[COOLED]
        said = posterior.predict(digits.val.inputs)
        reference = Reference.of(said.ood_score, "digits:val")
        known = Calibration.of(said, digits.val.labels)
        answer = gated_threshold(known, said.ood_score.double(), reference.alarm, ERROR_RATE)
    sight = Sight.of((1, SIDE, SIDE), Intake(mode="L", shape=(1, SIDE, SIDE)))
    examples = []
    for label in range(CLASSES):
        place = int(torch.nonzero(digits.test.labels == label)[0])
        examples.append(Example(f"a test digit, {label}", (digits.test.inputs[place] * 255).round().to(torch.uint8)))
    progress("done", 1.0)
    return Subject(
        title="handwritten digits, 8 x 8 pixels",
        source=f"{settings.members} small networks, trained just now on scikit-learn's digits",
        posterior=posterior,
        classes=tuple(str(label) for label in range(CLASSES)),
        sight=sight,
        reference=reference,
        examples=(*examples, *ood_examples(sight)),
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
    network: Sequence[str] = (),
    error_rate: float | None = None,
    certainty: float | None = None,
) -> Subject:
    """Open a posterior's folder, find out how outlier scores are distributed, and look for examples.

    The distribution is that of the data named by `reference`, or what fitting kept of the validation data. Where neither is to be
    had, a note says so.

    Args:
        folder: that `mola fit` wrote.
        progress: told what is being done, and which share of the work is done.
        reference: data as the user names them.
        directory: that holds the built-in sets.
        device: where to compute.
        trust: see `mola.app.jobs.folder.open_posterior`.
        network: likewise.
        error_rate: of what would be answered; None is 0.05, if that can be promised.
        certainty: of the error rate; None is 0.95.

    Returns:
        The subject.
    """
    progress("loading networks", 0.0)
    fitted = open_posterior(folder, device, trust=trust, network=network)
    if not fitted.posterior.likelihood.mutually_exclusive:
        raise OptionError(
            f"the explorer shows one of several classes, and this posterior has the likelihood {fitted.posterior.likelihood.name!r}. "
            f"`mola predict` predicts for it."
        )
    if not isinstance(fitted.example, Tensor) or not fitted.example.is_floating_point():
        raise OptionError(
            "the explorer is for networks that see pictures, as one tensor of numbers: these take other inputs. "
            "`mola predict` predicts for them."
        )
    fitted.refuse_positions("the explorer shows one prediction for each picture")
    sight = Sight.of(tuple(fitted.example.shape[1:]), Intake.from_plain(fitted.preparation))
    decisions, undecided = None, ""
    try:
        rate = ERROR_RATE if error_rate is None else error_rate
        decisions = make_decisions(fitted, error_rate=rate, certainty=certainty)
    except OptionError as error:
        if error_rate is not None:
            raise
        undecided = str(error).removeprefix("--error-rate: ")
    posterior, notes = fitted.posterior, []
    named = reference or fitted.job.val
    found = None
    if reference is None:
        found = Reference.from_plain(fitted.document["result"].get("validation"), str(fitted.job.val))
    examples: tuple[Example, ...] = ()
    try:
        if named is not None:
            progress("reading validation data", 0.3)
            data = fitted.open_set(named, labelled=False, directory=directory, said=reference is not None)
            examples = _examples(sight, data)
            if reference is not None:
                found = Reference.of(_scores(posterior, thinned(data, MOST_READ), progress), named)
    except OptionError as error:
        if reference is not None or isinstance(error, _NotPixelsError):
            raise
        notes.append(_left_out(named, error))
    except MolaError as error:
        if reference is not None:
            raise
        notes.append(_left_out(named, error))
    if found is None and not notes:
        notes.append(
            "the posterior was fitted without validation data: name some with --reference to see how outlying a picture is."
        )
    progress("done", 1.0)
    return Subject(
        title=f"{len(posterior.networks)} network{'s' if len(posterior.networks) > 1 else ''}, {', '.join(fitted.job.network)}",
        source=str(folder),
        posterior=posterior,
        classes=fitted.classes or tuple(str(index) for index in range(fitted.outputs)),
        sight=sight,
        reference=found,
        examples=(*examples, *ood_examples(sight)),
        notes=tuple(notes),
        decisions=decisions,
        undecided=undecided,
    )


class _NotPixelsError(OptionError):
    pass


def _left_out(named: str | None, error: MolaError) -> str:
    return f"examples are missing, since {named} cannot be read here: {error} Name other data with --reference."


def thinned(source: UserSet, count: int) -> UserSet:
    """A set with at most about `count` inputs, evenly spaced where the set can be entered anywhere: files may be in order of classes.

    Args:
        source: the set.
        count: how many are wanted.

    Returns:
        A smaller set, or the set itself.
    """
    if source.count is None or source.count <= count:
        return source
    places = even_places(source.count, count)
    if isinstance(source, InMemory):
        return replace(source, values=source.values[places], labels=None)
    if isinstance(source, Pictures):
        return some_of(source, places.tolist())
    return source


def _inputs(source: UserSet) -> Iterator[Tensor]:
    for rows in source:
        if isinstance(rows.inputs, Tensor):
            yield rows.inputs


def _scores(posterior: MoLA, source: UserSet, progress: Progress) -> Tensor:
    like = next(posterior.networks[0].parameters())
    scores, seen = [torch.zeros(0)], 0
    for inputs in _inputs(source):
        scores.append(posterior.predict(inputs.to(like.device)).ood_score.float())
        seen += len(inputs)
        progress("scoring validation data", min(1.0, 0.3 + 0.7 * seen / min(source.count or MOST_READ, MOST_READ)))
        if seen >= MOST_READ:
            break
    return torch.cat(scores)


def _examples(sight: Sight, source: UserSet) -> tuple[Example, ...]:
    found: list[Tensor] = []
    for inputs in _inputs(thinned(source, EXAMPLES)):
        found.append(inputs.cpu())
        if sum(map(len, found)) >= EXAMPLES:
            break
    if not found:
        raise DataError(f"{source.name} holds no input that can be used.")
    whole = torch.cat(found)
    few = whole[even_places(len(whole), min(EXAMPLES, len(whole)))]
    values = sight.values(few)
    low, high = float(values.min()), float(values.max())
    if low < -SLACK or high > 1 + SLACK:
        raise _NotPixelsError(
            f"the inputs of {source.name} range from {low:.3g} to {high:.3g} where pixels range from 0 to 1: nobody knows how to make "
            f"such inputs of a picture. Fit on images or bytes, with --normalise or --mean and --std."
        )
    pixels = (values * 255).round().clamp(0, 255).to(torch.uint8)
    return tuple(Example(f"from {Path(source.name).name}", one) for one in pixels)
