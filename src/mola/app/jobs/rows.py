"""Batches of a user's data: unusable inputs are reported and left out; the others become tensors.

A set yields `Rows`: the names of all inputs in a batch, an error for each unusable input, and the other inputs as tensors. Fitting and
evaluation read them through a `Loader`, which records what was left out in an `Account`; prediction writes a row for each input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mola.distributed import Team
from mola.errors import DataError
from mola.network import Inputs
from mola.options import counted


class Rows(NamedTuple):
    """A batch: the names of all inputs, and the usable inputs as tensors."""

    names: list[str]
    errors: list[str | None]
    """For each name, why the input was left out, or None."""
    inputs: Inputs
    """Inputs without an error; None if there are none."""
    labels: Tensor | None
    """Labels of these inputs, if the set has labels."""
    notes: tuple[tuple[str, str], ...] = ()
    """Names of inputs that were used with a remark, and the remark."""

    def check_strict(self) -> None:
        """Raise `DataError` for the first input with an error or a remark."""
        for name, words in (*zip(self.names, self.errors, strict=True), *self.notes):
            if words is not None:
                raise DataError(f"{name}: {words} (and --strict leaves nothing out).")


class Set(Protocol):
    """Data as the user named them."""

    @property
    def name(self) -> str:
        """As the user named them."""

    @property
    def count(self) -> int | None:
        """Number of inputs, if known."""

    def __iter__(self) -> Iterator[Rows]: ...


@dataclass
class Account:
    """Inputs that were left out or used with a remark, by set and name; each is counted once, however often data are read."""

    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    noted: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, where: str, rows: Rows) -> None:
        """Record a batch."""
        for name, error in zip(rows.names, rows.errors, strict=True):
            if error is not None:
                self.left_out.setdefault(where, {})[name] = error
        for name, remark in rows.notes:
            self.noted.setdefault(where, {})[name] = remark

    def __len__(self) -> int:
        return sum(len(one) for one in self.left_out.values())

    def require_some(self, count: int, where: str) -> None:
        """Raise `DataError` with the first reason if no input of a set could be used."""
        if count == 0:
            first = next((f" The first: {name}: {why}." for name, why in self.left_out.get(where, {}).items()), "")
            raise DataError(f"{where} holds no input that can be used.{first}")

    def lines(self, shown: int = 5) -> list[str]:
        """Return a line for each input, the first few of each set, and a count of the others."""
        lines = []
        for found, verb in ((self.left_out, "left out"), (self.noted, "noted")):
            for where, entries in found.items():
                lines.append(f"{where}: {counted(len(entries), 'input')} {verb}")
                lines += [f"  {name}: {words}" for name, words in list(entries.items())[:shown]]
                if len(entries) > shown:
                    lines.append(f"  and {len(entries) - shown} more")
        return lines

    def together(self, team: Team) -> Account:
        """Return the records of all processes."""
        whole = Account()
        for one in team.collect(self):
            for mine, theirs in ((whole.left_out, one.left_out), (whole.noted, one.noted)):
                for where, entries in theirs.items():
                    mine.setdefault(where, {}).update(entries)
        return whole

    def plain(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return {"left_out": self.left_out, "noted": self.noted}


@dataclass(frozen=True)
class Loader:
    """The usable inputs of a set as a loader for `mola.fit`, `tune` and `predict`."""

    source: Set
    account: Account
    """Record of unusable inputs."""
    strict: bool = False
    """Raise an error for an unusable input instead."""
    labelled: bool = True
    """Require labels."""
    on_share: Callable[[float], None] = lambda share: None
    """Called with the share of the set that has been read."""
    whole: bool = True
    """Raise an error if no input is usable; a part of a set may have none."""

    def __iter__(self) -> Iterator[Any]:
        used = seen = 0
        for rows in self.source:
            seen += len(rows.names)
            self.on_share(share_read(seen, self.source.count))
            if self.strict:
                rows.check_strict()
            self.account.add(self.source.name, rows)
            if rows.inputs is None:
                continue
            if self.labelled and rows.labels is None:
                raise DataError(f"{self.source.name} has no labels, which are needed here.")
            used += rows.errors.count(None)
            yield as_loaded(rows)
        if self.whole:
            self.account.require_some(used, self.source.name)


def share_read(seen: int, count: int | None) -> float:
    """Return the share of a set that has been read; a set of unknown size counts as half read."""
    return min(1.0, seen / (count or 2 * seen))


def as_loaded(rows: Rows) -> Any:
    """Return inputs and labels as a loader yields them: a mapping holds its labels itself."""
    if isinstance(rows.inputs, Mapping):
        return dict(rows.inputs) if rows.labels is None else {**rows.inputs, "labels": rows.labels}
    return (rows.inputs,) if rows.labels is None else (rows.inputs, rows.labels)


def finite_rows(names: Sequence[str], inputs: Inputs, labels: Tensor | None, dtype: torch.dtype) -> Rows:
    """Return rows of tensors in the given floating-point type, without inputs that are not finite. The library checks the labels."""
    errors: list[str | None] = [None] * len(names)
    for tensor in tree_leaves(inputs):
        if tensor.is_floating_point():
            bad = (~tensor.isfinite()).reshape(len(tensor), -1).sum(1)
            for index in torch.nonzero(bad).flatten().tolist():
                count = int(bad[index])
                errors[index] = f"holds {count} {'value that is' if count == 1 else 'values that are'} nan or infinite"
    usable = torch.tensor([error is None for error in errors])
    if not bool(usable.any()):
        return Rows(list(names), errors, None, None)

    def prepared(tensor: Tensor) -> Tensor:
        kept = tensor[usable.to(tensor.device)]
        return kept.to(dtype) if kept.is_floating_point() else kept

    chosen = None if labels is None else labels.cpu()[usable]
    return Rows(list(names), errors, tree_map(prepared, inputs), chosen)
