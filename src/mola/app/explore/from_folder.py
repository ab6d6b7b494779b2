"""A folder that `mola fit` wrote, as something to explore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mola.app.explore.ood_examples import ood_examples
from mola.app.explore.reference import Reference
from mola.app.explore.sight import Sight
from mola.app.explore.subject import Example, Subject
from mola.app.jobs.arrays import InMemory
from mola.app.jobs.folder import open_posterior
from mola.app.jobs.job import Progress
from mola.app.jobs.pictures import Pictures
from mola.app.jobs.preparation import Intake
from mola.app.jobs.sets import UserSet, some_of
from mola.errors import DataError, MolaError, OptionError
from mola.lab.data.images import even_places
from mola.posterior import MoLA

__all__ = ["open_subject"]

EXAMPLES = 10
MOST_READ = 2000
"""Inputs that scores are computed for, where they were not kept when fitting."""

SLACK = 0.01
"""How far values may lie outside 0 to 1 by rounding."""


def open_subject(
    folder: Path,
    progress: Progress = lambda doing, done: None,
    *,
    reference: str | None = None,
    directory: str | None = None,
    device: str = "cpu",
    trust: bool = False,
    network: Sequence[str] = (),
) -> Subject:
    """Open a posterior's folder, find out how outlier scores are distributed, and look for examples.

    The distribution is that of the data named by `reference`; or what fitting kept of the validation data; or it is computed on
    these, if they can be read. Where neither is to be had, a note says so.

    Args:
        folder: that `mola fit` wrote.
        progress: told what is being done, and which share of the work is done.
        reference: data as the user names them.
        directory: that holds the built-in sets.
        device: where to compute.
        trust: see `mola.app.jobs.folder.open_posterior`.
        network: likewise.

    Returns:
        The subject.

    Raises:
        OptionError: if the networks do not see pictures, or take inputs that nobody knows how to make of pictures.
        MolaError: if the reference data cannot be read, or the folder is none.
    """
    progress("loading networks", 0.0)
    fitted = open_posterior(folder, device, trust=trust, network=network)
    if not isinstance(fitted.example, Tensor) or not fitted.example.is_floating_point():
        message = (
            "the explorer is for networks that see pictures, as one tensor of numbers: these take other inputs. "
            "`mola predict` predicts for them."
        )
        raise OptionError(message)
    sight = Sight.of(tuple(fitted.example.shape[1:]), Intake.from_plain(fitted.preparation))
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
            if found is None:
                found = Reference.of(_scores(posterior, thinned(data, MOST_READ), progress), named)
    except OptionError as error:
        if reference is not None or isinstance(error, _NotPixelsError):
            raise
        notes.append(_left_out(named, error, found))
    except MolaError as error:
        if reference is not None:
            raise
        notes.append(_left_out(named, error, found))
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
    )


class _NotPixelsError(OptionError):
    """Inputs that are not pixels in a known normalisation."""


def _left_out(named: str | None, error: MolaError, found: Reference | None) -> str:
    what = "examples are" if found is not None else "examples, and the outlier scores to compare with, are"
    return f"{what} missing, since {named} cannot be read here: {error} Name other data with --reference."


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
    """A few inputs as bytes.

    Raises:
        DataError: if there are none.
        _NotPixelsError: if they are no pixels.
    """
    found: list[Tensor] = []
    for inputs in _inputs(thinned(source, EXAMPLES)):
        found.append(inputs.cpu())
        if sum(map(len, found)) >= EXAMPLES:
            break
    if not found:
        message = f"{source.name} holds no input that can be used."
        raise DataError(message)
    whole = torch.cat(found)
    few = whole[even_places(len(whole), min(EXAMPLES, len(whole)))]
    values = sight.values(few)
    low, high = float(values.min()), float(values.max())
    if low < -SLACK or high > 1 + SLACK:
        message = (
            f"the inputs of {source.name} range from {low:.3g} to {high:.3g} where pixels range from 0 to 1: nobody knows how to make "
            f"such inputs of a picture. Fit on images or bytes, with --normalise or --mean and --std."
        )
        raise _NotPixelsError(message)
    pixels = (values * 255).round().clamp(0, 255).to(torch.uint8)
    return tuple(Example(f"from {Path(source.name).name}", one) for one in pixels)
