"""Networks and batches in, streams of (features, logits, labels) out. Hooks are always removed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.errors import DataError, HeadError, located
from mola.heads import Head, check_logits, find_head, layer_input, same_tensor
from mola.likelihood import CATEGORICAL, Likelihood
from mola.networks import Inputs, as_batch, call

__all__ = ["Features", "batch_count", "capture", "check_finite", "find_heads", "peek", "stream"]


@dataclass(frozen=True)
class Features:
    """What one network makes of one batch: the head's input and output, in the network's precision."""

    features: Tensor
    """(n, P): input of the head, without the constant 1."""
    logits: Tensor
    """(n, C): output of the network."""


def capture(network: nn.Module, head: Head | None, inputs: Inputs) -> Features:
    """One forward pass, keeping what the head saw. Call it inside `undisturbed(network)`.

    Args:
        network: the trained classifier.
        head: its last linear layer, or None where the logits are all that is wanted.
        inputs: one batch of inputs.

    Returns:
        Features (none without a head) and logits of the batch.

    Raises:
        HeadError: if the network's output was not the head's output this time.
    """
    if head is None:
        logits = call(network, inputs)
        check_logits(logits)
        return Features(logits[:, :0], logits)
    seen: list[tuple[Tensor, Tensor, tuple[int, int]]] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], output: Tensor) -> None:
        features = layer_input(arguments, keywords)
        seen.append((features, output, (_version(features), _version(output))))

    handle = head.layer.register_forward_hook(keep, with_kwargs=True)
    try:
        logits = call(network, inputs)
    finally:
        handle.remove()
    for features, output, versions in reversed(seen):
        if output is logits or (not torch.compiler.is_compiling() and same_tensor(output, logits)):
            if (_version(features), _version(output)) != versions:
                message = (
                    f"the network overwrites the input or the output of its head {head.name!r} in place. Pass a network that "
                    f"returns the plain output of {head.name!r}."
                )
                raise HeadError(message)
            return Features(features, logits)
    message = f"the network's output is not the output of its head {head.name!r} in this pass. Was the network changed?"
    raise HeadError(message)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written in place; tensors of inference mode, and of a trace, do not count."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


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
    is_batch = isinstance(loader, tuple) and all(isinstance(part, Tensor) for part in loader)
    if isinstance(loader, (Tensor, Mapping)) or is_batch or not isinstance(loader, Iterable):
        message = (
            f"{where}: expected an iterable of batches, got {type(loader).__name__}. "
            f"Pass a DataLoader, or a single batch in a list: [(x, y)]."
        )
        raise DataError(message)
    batches = iter(loader)
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


def find_heads(networks: Sequence[nn.Module], names: Sequence[str | None], inputs: Inputs) -> list[Head]:
    """The head of every network, from one batch of inputs. Call it inside `undisturbed(*networks)`.

    Args:
        networks: the trained classifiers.
        names: for each, the dotted name of its head, or None to find it.
        inputs: one batch of inputs.

    Returns:
        One head for each network.

    Raises:
        HeadError: if a network has none, or if the numbers of classes differ.
    """
    heads = []
    for index, (network, name) in enumerate(zip(networks, names, strict=True)):
        with located(f"models[{index}] ({type(network).__name__})"):
            heads.append(find_head(network, inputs, name))
    classes = [head.classes for head in heads]
    if len(set(classes)) > 1:
        message = (
            f"expected networks with the same number of classes, got {classes}. A mixture averages their probabilities."
        )
        raise HeadError(message)
    return heads


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
) -> Iterator[tuple[list[Features], Tensor | None]]:
    """Read the loader once and yield, for each batch, what every network makes of it.

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

    Yields:
        One `Features` for each network, and the labels (n,) or None.

    Raises:
        DataError: for an empty batch, labels that are missing or out of range, or activations that are not finite.
    """
    _, batches = peek(loader, f"the {where}")
    had_labels: bool | None = None
    for index, raw in enumerate(
        tqdm(batches, desc=where, total=total, disable=None if progress else True, leave=False)
    ):
        place = f"batch {index} of the {where}"
        batch = as_batch(raw, place)
        if batch.labels is None and labelled:
            message = f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'."
            raise DataError(message)
        if had_labels is not None and had_labels != (batch.labels is not None):
            message = f"{place} {'has no' if had_labels else 'has'} labels, unlike the batches before it."
            raise DataError(message)
        had_labels = batch.labels is not None
        seen = []
        for position, (network, head) in enumerate(zip(networks, heads, strict=True)):
            with located(f"{place}, models[{position}]"):
                seen.append(capture(network, head, batch.inputs))
                if not all_finite(seen[-1].logits):  # what is wrong with the features shows in the logits
                    check_finite(seen[-1].features, "features")
                    check_finite(seen[-1].logits)
        labels = None if batch.labels is None else likelihood.check_labels(batch.labels, seen[0].logits, place)
        yield seen, labels


def all_finite(values: Tensor) -> bool:
    """Whether all are finite, in all but one small operation: NaN and infinity survive in a sum."""
    return math.isfinite(float(values.sum(dtype=torch.promote_types(values.dtype, torch.float32))))


def check_finite(values: Tensor, name: str = "logits") -> None:
    """Refuse activations that are NaN or infinite.

    Args:
        values: (n, ...); not looked at in a trace, which has no numbers.
        name: what they are, for the message.

    Raises:
        DataError: saying how many inputs are affected.
    """
    if torch.compiler.is_compiling() or all_finite(values):
        return
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        rows = int((~finite).any(1).sum())
        message = (
            f"{name} are NaN or infinite for {rows} of {len(values)} inputs. Check the inputs for NaN; "
            f"a network in float16 may overflow where bfloat16 or float32 does not."
        )
        raise DataError(message)
