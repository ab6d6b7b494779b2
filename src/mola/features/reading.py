"""A loader read once, by all networks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.errors import DataError, HeadError, located
from mola.features.gathering import Gathered
from mola.features.watching import Features, Watched
from mola.heads import Head
from mola.likelihood import CATEGORICAL, Likelihood
from mola.networks import as_batch

__all__ = ["batch_count", "batches_of", "check_loader", "peek", "stream"]


def check_loader(loader: Iterable[Any], where: str) -> None:
    """Refuse what cannot be a loader, without reading from it.

    Args:
        loader: any iterable of batches, also one that can be read only once.
        where: words for the error message.

    Raises:
        DataError: if this is not an iterable of batches.
    """
    is_batch = isinstance(loader, tuple) and all(isinstance(part, Tensor) for part in loader)
    if isinstance(loader, (Tensor, Mapping)) or is_batch or not isinstance(loader, Iterable):
        message = (
            f"{where}: expected an iterable of batches, got {type(loader).__name__}. "
            f"Pass a DataLoader, or a single batch in a list: [(x, y)]."
        )
        raise DataError(message)


def batches_of(loader: Iterable[Any], where: str) -> Iterator[Any]:
    """An iterator over the batches of a loader, of which there may be none.

    Args:
        loader: any iterable of batches, also one that can be read only once.
        where: words for the error message.

    Returns:
        The iterator; `DataError` if this is not an iterable of batches.
    """
    check_loader(loader, where)
    return iter(loader)


def peek(loader: Iterable[Any], where: str) -> tuple[Any, Iterator[Any]]:
    """The first batch, and an iterator over all of them, the first included.

    Args:
        loader: any iterable of batches, also one that can be read only once.
        where: words for the error message.

    Returns:
        The first batch and an iterator over every batch.

    Raises:
        DataError: if the loader is empty or cannot be iterated.
    """
    batches = batches_of(loader, where)
    for first in batches:

        def every(first: Any = first) -> Iterator[Any]:
            yield first
            yield from batches

        return first, every()
    message = f"{where} is empty: it yielded no batch. An iterator that was read before has nothing left; pass the loader itself."
    raise DataError(message)


def batch_count(loader: Iterable[Any]) -> int | None:
    """How many batches a loader will yield, where it knows."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def stream(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | None],
    loader: Iterable[Any],
    *,
    where: str,
    progress: bool,
    total: int | None = None,
    labelled: bool = False,
    likelihood: Likelihood = CATEGORICAL,
    rows: int = 1,
    first: Sequence[Features] | None = None,
    start: int = 0,
    told: Callable[[int], None] = lambda batches: None,
) -> Iterator[tuple[list[Features], Tensor | None]]:
    """Read the loader once and yield what every network makes of it.

    All networks see each batch before the next is read, so data are loaded once for K networks and an iterator that can
    be read only once will do. Call it inside `undisturbed(*networks)`.

    Args:
        networks: the trained classifiers.
        heads: their last linear layers.
        loader: any iterable of batches.
        where: what the loader is for, as in "training loader"; used in messages and on the progress bar.
        progress: whether to show a progress bar on stderr, if that is a terminal.
        total: number of batches, for the progress bar.
        labelled: whether every batch must carry labels.
        likelihood: what the outputs mean; reads the labels.
        rows: batches smaller than this are gathered and come together, as long as they stay below it, in float64 and with the
            constant 1, until the next are asked for; larger ones come as they are. What is done with them, checks included,
            is then paid more rarely.
        first: what the networks make of the first batch, where that is known: they are not run on it again.
        start: number of batches of the loader that were read before.
        told: told how many batches there are in what is about to be yielded.

    Yields:
        One `Features` for each network, and the labels (n,) or None.

    Raises:
        DataError: for an empty batch, labels that are missing or out of range, or activations that are not finite.
        HeadError: if a network's output is not its head's in a pass.
    """
    _, batches = peek(loader, f"the {where}")
    had_labels: bool | None = None
    gathered, any_rows = Gathered(rows, heads, likelihood), start > 0

    def take() -> tuple[list[Features], Tensor | None]:
        nonlocal any_rows
        any_rows = True
        told(gathered.batches)
        return gathered.take()

    with ExitStack() as stack:
        watched = [stack.enter_context(Watched(network, head)) for network, head in zip(networks, heads, strict=True)]
        bar = stack.enter_context(
            tqdm(batches, desc=where, total=total, initial=start, disable=None if progress else True, leave=False)
        )
        for index, raw in enumerate(bar, start):
            place = f"batch {index} of the {where}"
            batch = as_batch(raw, place)
            if batch.labels is None and labelled:
                message = f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'."
                raise DataError(message)
            if had_labels is not None and had_labels != (batch.labels is not None):
                message = f"{place} {'has no' if had_labels else 'has'} labels, unlike the batches before it."
                raise DataError(message)
            had_labels = batch.labels is not None
            if first is not None:
                seen, first = list(first), None
            else:
                seen = []
                try:
                    for network in watched:
                        seen.append(network(batch.inputs))
                except (DataError, HeadError):
                    with located(f"{place}, models[{len(seen)}]"):
                        raise
            if not gathered.fits(len(seen[0].logits)):
                yield take()
            gathered.add(place, seen, batch.labels)
            del seen, batch, raw  # not kept while the next is made
            if gathered.full:
                yield take()
    if gathered.count:
        yield take()
    if not any_rows:
        message = f"the {where}: the networks gave no row for any batch. Is every position masked?"
        raise DataError(message)
