"""Batches of a user's data, with the inputs that cannot be used named and left out.

A set yields `Rows`: names of all inputs in a batch, an error for each that is no good, and the good ones as tensors. Fitting
reads the good ones through a `Loader`, which keeps account of the others; predicting writes a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mola.distributed import Team
from mola.errors import DataError
from mola.likelihoods import CATEGORICAL, Likelihood
from mola.likelihoods.bernoulli import MISSING
from mola.network import Inputs


class Rows(NamedTuple):
    """A batch: all of it by name, and the good part as tensors."""

    names: list[str]
    errors: list[str | None]
    """One for each name: why it was left out, or None."""
    inputs: Inputs
    """Of those without error; None if there are none."""
    labels: Tensor | None
    """Likewise (n,), where the set has labels."""
    notes: tuple[tuple[str, str], ...] = ()
    """Names of inputs that were used but are worth a word, and the word."""


class Set(Protocol):
    """Data as the user named them."""

    @property
    def name(self) -> str:
        """As the user named them."""

    @property
    def count(self) -> int | None:
        """How many inputs, where that is known."""

    def __iter__(self) -> Iterator[Rows]: ...


@dataclass
class Account:
    """What was left out and what is worth a word, by set and input; each is counted once, however often data are read."""

    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    noted: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, where: str, rows: Rows) -> None:
        """Take note of a batch."""
        for name, error in zip(rows.names, rows.errors, strict=True):
            if error is not None:
                self.left_out.setdefault(where, {})[name] = error
        for name, words in rows.notes:
            self.noted.setdefault(where, {})[name] = words

    def __len__(self) -> int:
        return sum(len(one) for one in self.left_out.values())

    def lines(self, shown: int = 5) -> list[str]:
        """For a person: a line for each input, the first few of each set, and a count of the others."""
        lines = []
        for found, verb in ((self.left_out, "left out"), (self.noted, "noted")):
            for where, entries in found.items():
                lines.append(f"{where}: {len(entries)} {'input' if len(entries) == 1 else 'inputs'} {verb}")
                lines += [f"  {name}: {words}" for name, words in list(entries.items())[:shown]]
                if len(entries) > shown:
                    lines.append(f"  and {len(entries) - shown} more")
        return lines

    def together(self, team: Team) -> Account:
        """What all processes noted."""
        whole = Account()
        for one in team.collect(self.plain()):
            for mine, theirs in ((whole.left_out, one["left_out"]), (whole.noted, one["noted"])):
                for where, entries in theirs.items():
                    mine.setdefault(where, {}).update(entries)
        return whole

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "left_out": {where: dict(entries) for where, entries in self.left_out.items()},
            "noted": {where: dict(entries) for where, entries in self.noted.items()},
        }


@dataclass(frozen=True)
class Loader:
    """The good inputs of a set as a loader for `mola.fit`, `tune` and `predict`.

    Attributes:
        source: the set.
        account: where the others are noted.
        strict: whether an input that is no good is an error instead.
        labelled: whether labels are asked for.
        tell: told which share of the set has been read, where its size is known.
        whole: whether this is all there is: then some of it must be good.
    """

    source: Set
    account: Account
    strict: bool = False
    labelled: bool = True
    tell: Callable[[float], None] = lambda share: None
    whole: bool = True

    def __iter__(self) -> Iterator[Any]:
        good = seen = 0
        for rows in self.source:
            seen += len(rows.names)
            self.tell(min(1.0, seen / (self.source.count or 2 * seen)))
            bad = next(((name, error) for name, error in zip(rows.names, rows.errors, strict=True) if error), None)
            if self.strict and (bad or rows.notes):
                name, words = bad or rows.notes[0]
                raise DataError(f"{name}: {words} (and --strict leaves nothing out).")
            self.account.add(self.source.name, rows)
            if rows.inputs is None:
                continue
            if self.labelled and rows.labels is None:
                raise DataError(f"{self.source.name} has no labels, which are needed here.")
            good += sum(error is None for error in rows.errors)
            # A mapping holds its labels itself: that is what loaders of such networks yield.
            if isinstance(rows.inputs, Mapping):
                yield dict(rows.inputs) if rows.labels is None else {**rows.inputs, "labels": rows.labels}
            else:
                yield (rows.inputs,) if rows.labels is None else (rows.inputs, rows.labels)
        if good == 0 and self.whole:
            first = next(iter(self.account.left_out.get(self.source.name, {}).items()), None)
            why = "" if first is None else f" The first: {first[0]}: {first[1]}."
            raise DataError(f"{self.source.name} holds no input that can be used.{why}")


def take(inputs: Inputs, good: Tensor) -> Inputs:
    """The inputs at which a truth value is set."""
    if isinstance(inputs, Tensor):
        return inputs[good]
    if isinstance(inputs, Mapping):
        return {name: take(one, good) for name, one in inputs.items()}
    return tuple(take(one, good) for one in inputs)


def _tensors(inputs: Inputs) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs
    return [tensor for part in parts for tensor in _tensors(part)]


def checked_rows(
    names: Sequence[str],
    inputs: Inputs,
    labels: Tensor | None,
    *,
    classes: int | None,
    dtype: torch.dtype,
    likelihood: Likelihood = CATEGORICAL,
) -> Rows:
    """Rows of tensors, without those that hold no finite numbers or whose label is no class.

    Args:
        names: of the inputs.
        inputs: a tensor, or a mapping or tuple of them, the first axis being the inputs.
        labels: (n,), or (n, C) where inputs have several; (n, H, W) or (n, T) of positions, which `fit` checks; or None.
        classes: how many there are, where that is known.
        dtype: that floating-point inputs are brought to.
        likelihood: what labels mean.

    Returns:
        The rows.
    """
    errors: list[str | None] = [None] * len(names)
    good = torch.ones(len(names), dtype=torch.bool)
    for tensor in _tensors(inputs):
        if tensor.is_floating_point() and len(tensor) == len(names):
            finite = tensor.reshape(len(tensor), -1).isfinite().all(1)
            for index in torch.nonzero(~finite).flatten().tolist():
                count = int((~tensor[index].isfinite()).sum())
                errors[index] = f"holds {count} {'value that is' if count == 1 else 'values that are'} nan or infinite"
            good &= finite.cpu()
    if labels is not None and not likelihood.mutually_exclusive:
        labels = labels.cpu().double() if labels.dim() < 3 else labels.cpu()
        fits = readable(labels, likelihood)
        for index in torch.nonzero(~fits & good).flatten().tolist():
            words = f"the labels {labels[index].tolist()}" if labels.dim() < 3 else "labels at some positions"
            errors[index] = f"has {words}, which likelihood {likelihood.name!r} does not take"
        good &= fits
    elif labels is not None and labels.dim() > 1:
        labels = labels.cpu().long()
    elif labels is not None:
        labels = labels.cpu().long()
        fits = labels >= 0
        if classes is not None:
            fits &= labels < classes
        for index in torch.nonzero(~fits & good).flatten().tolist():
            ends = "" if classes is None else f" (expected 0 to {classes - 1})"
            errors[index] = f"has the label {int(labels[index])}, which is not a class{ends}"
        good &= fits
    if not bool(good.any()):
        return Rows(list(names), errors, None, None)
    return Rows(list(names), errors, _cast(take(inputs, good), dtype), None if labels is None else labels[good])


def readable(labels: Tensor, likelihood: Likelihood) -> Tensor:
    """Rows (n,) whose labels the likelihood accepts: 0, 1 and missing ones, or finite targets."""
    rows = labels.reshape(len(labels), -1)
    if not likelihood.discrete:
        return rows.isfinite().all(1)
    return (rows.isnan() | (rows == MISSING) | (rows == 0) | (rows == 1)).all(1)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {name: _cast(one, dtype) for name, one in inputs.items()}
    return tuple(_cast(one, dtype) for one in inputs)
