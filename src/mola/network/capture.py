"""Features and outputs of networks: one pass of one network, or a loader read once by all networks together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.errors import DataError, HeadError, located
from mola.likelihoods import Likelihood
from mola.network.calling import Batch, Inputs, batches, call, unwrapped
from mola.network.dense import IGNORE_INDEX, Layout, Positions, drawn_positions
from mola.network.head import Head, Layer, carried_pass, find_head, hooked, same_tensor
from mola.numerics import to_float64


@dataclass(frozen=True)
class Captured:
    """The head's input and output in one pass of a network, in the network's precision and as views of its tensors.

    Args:
        features: (n, P'), or (n, positions, P') for dense outputs; P' is 0 without a head.
        outputs: (n, C), or (n, positions, C).
        head: the network's head; None where only outputs are needed.
        layout: of dense outputs; None for (n, C).
    """

    features: Tensor
    outputs: Tensor
    head: Head | None
    layout: Layout | None

    def __len__(self) -> int:
        return self.outputs.shape[:-1].numel()

    def rows(self, index: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return phi (m, P) with the constant 1 and outputs (m, C) of some rows, in float64.

        Args:
            index: slice of the rows, or their indices; rows of dense outputs are numbered by input, then by position.
        """
        features, outputs = (self._select(values, index) for values in (self.features, self.outputs))
        return to_float64(features) if self.head is None else self.head.lift(features), to_float64(outputs)

    def _select(self, values: Tensor, index: slice | Tensor) -> Tensor:
        if self.layout is None:
            return values[index]
        if isinstance(index, slice):
            index = torch.arange(*index.indices(len(self)), device=values.device)
        return values[index // self.layout.count, index % self.layout.count]

    def chunks(self, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield a range of rows, phi (m, P) and outputs (m, C) in float64, at most `size` rows at a time.

        In a trace with a dynamic batch size, which is no `int`, all rows come in one chunk.
        """
        total = self.outputs.shape[0] * (1 if self.layout is None else self.layout.count)
        if not isinstance(total, int) or total <= size:
            rows = self if self.layout is None else self._flat()
            yield slice(0, total), *rows.rows(slice(None))
            return
        for start in range(0, total, size):
            part = slice(start, min(start + size, total))
            yield part, *self.rows(part)

    def _flat(self) -> Captured:
        return Captured(self.features.flatten(0, 1), self.outputs.flatten(0, 1), self.head, None)


def capture(network: nn.Module, head: Head | None, inputs: Inputs, likelihood: Likelihood) -> Captured:
    """Run one pass of a network and capture the input and output of its head. Call it inside `evaluating(network)`.

    Plain tensor code that looks at no values, so that `torch.export` can trace it.

    Args:
        network: a trained network.
        head: as found by `find_head`; None to capture outputs alone; `check_logits` then refuses probabilities.
        inputs: one batch of inputs.
        likelihood: reads the outputs.
    """
    if head is None:
        return _without_head(network, inputs, likelihood)
    if head.every_position:
        features, outputs = carried_pass(network, head, inputs)
        return _captured(features, outputs, head, head.axis)
    calls: list[tuple[Tensor, Any]] = []  # passes of other threads among them: the output below is of this pass
    with hooked([head.layer], lambda _, features, output: calls.append((features, output))):
        outputs = call(network, inputs)
    if outputs.dim() != 2 + head.dense_axes or head.dense_axes == 0:
        outputs = likelihood.check_outputs(outputs, [(head.name, outputs.shape)])
    for features, output in reversed(calls):
        if same_tensor(output, outputs):
            return _captured(features, outputs, head, head.axis)
    raise HeadError(
        f"the network's output is not the output of its head {head.name!r} in this pass. Was the network changed?"
    )


def _captured(features: Tensor | None, outputs: Tensor, head: Head | None, axis: int) -> Captured:
    outputs = outputs.detach()
    if outputs.dim() == 2:
        return Captured(outputs[:, :0] if features is None else features.detach(), outputs, head, None)
    layout = Layout.of(outputs, axis)
    rows = layout.by_position(outputs)
    return Captured(rows[..., :0] if features is None else layout.by_position(features.detach()), rows, head, layout)


def _without_head(network: nn.Module, inputs: Inputs, likelihood: Likelihood) -> Captured:
    # The layer that gives dense outputs determines their class axis. Weak references: feature maps would fill memory.
    axes: list[tuple[weakref.ref[Tensor], torch.Size, int]] = []

    def record(layer: nn.Module, _: Tensor, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() > 2:
            axes.append((weakref.ref(output), output.shape, -1 if isinstance(layer, nn.Linear) else 1))

    with hooked([module for module in network.modules() if isinstance(module, Layer)], record):
        outputs = call(network, inputs)
    if outputs.dim() <= 2:
        return _captured(None, likelihood.check_outputs(outputs, [("", outputs.shape)]), None, -1)
    for output, _, axis in reversed(axes):
        if output() is outputs:
            return _captured(None, outputs, None, axis)
    last = axes[-1][1] if axes and axes[-1][2] == 1 else outputs.shape
    if last[:2] == outputs.shape[:2] and last[2:] != outputs.shape[2:]:  # resized after a convolution
        likelihood.check_outputs(Layout.of(outputs[:1], 1).by_position(outputs[:1])[0, :4096], [("", outputs.shape)])
        return _captured(None, outputs, None, 1)
    return _captured(None, outputs, None, find_head(network, inputs, None, likelihood).axis)


def check_logits(network: nn.Module, inputs: Inputs, outputs: Tensor, likelihood: Likelihood) -> None:
    """Refuse outputs (n, C) that are probabilities, of a network whose head was not looked for.

    Logits, too, may all lie between 0 and 1: outputs of a linear layer are never refused.
    """
    try:
        likelihood.check_outputs(outputs)
    except HeadError:
        with suppress(HeadError, DataError):
            find_head(network, inputs, None, likelihood)
            return
        raise


def find_heads(
    networks: Sequence[nn.Module], names: Sequence[str | None], inputs: Inputs, likelihood: Likelihood
) -> list[Head]:
    """Find the head of every network, or check the one named; all must have outputs of one kind.

    Call it inside `evaluating(*networks)`.
    """
    heads = []
    for index, (network, name) in enumerate(zip(networks, names, strict=True)):
        with located(f"networks[{index}] ({type(unwrapped(network)).__name__})"):
            heads.append(find_head(network, inputs, name, likelihood))
    outputs = [head.outputs for head in heads]
    if len(set(outputs)) > 1:
        raise HeadError(
            f"expected networks with the same number of outputs, got {outputs}. A mixture averages their predictions."
        )
    axes = [head.dense_axes for head in heads]
    if len(set(axes)) > 1:
        raise HeadError(f"expected networks with outputs of one kind, got outputs with {axes} axes of positions.")
    return heads


# --- reading a loader -------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows of one batch, or of a chunk of it, from every network.

    A batch without any row in use gives one empty `Rows`, so that each batch has its `last`.

    Args:
        features: phi (m, P) of each network with the constant 1, in float64.
        outputs: (m, C) of each network, in float64.
        labels: as the likelihood reads them; None if the loader yields none.
        inputs: number of the batch's inputs with rows in use; 0 before its last chunk.
        inputs_read: number of the batch's inputs; 0 before its last chunk.
        last: True for the last chunk of a batch.
    """

    features: list[Tensor]
    outputs: list[Tensor]
    labels: Tensor | None
    inputs: int
    inputs_read: int
    last: bool

    def __len__(self) -> int:
        return len(self.outputs[0])


def stream(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | None],
    loader: Iterable[Any],
    *,
    where: str,
    likelihood: Likelihood,
    labelled: bool | None = None,
    progress: bool = False,
    total: int | None = None,
    positions: Positions = "all",
    ignore_index: int = IGNORE_INDEX,
    first_batch: int = 0,
    first_input: int = 0,
    chunk: int = 4096,
    required: bool = True,
) -> Iterator[Rows]:
    """Read a loader once and yield the rows of every network. Call it inside `evaluating(*networks)`.

    All networks see each batch before the next is read: data are loaded once for K networks, and an iterator suffices.

    Args:
        networks: the trained networks.
        heads: their heads; None where only outputs are needed.
        loader: any iterable of batches.
        where: the loader's name in messages and on the progress bar, such as "training loader".
        likelihood: reads outputs and labels.
        labelled: True demands labels in every batch, False ignores them; None accepts labels in all batches or in none.
        progress: show a progress bar on stderr, if that is a terminal.
        total: number of batches, for the progress bar.
        positions: of dense outputs, a number to draw from each input; "all" and "average" use every position.
        ignore_index: label of positions that are left out.
        first_batch: number of batches read before, which continues their numbering.
        first_input: number of inputs in these batches, which continues the random draws of positions.
        chunk: largest number of rows at a time.
        required: raise `DataError` if no batch has a row in use; a shard of several processes may have none.
    """
    had_labels, any_rows = labelled, first_batch > 0
    shown = {"desc": where, "total": total, "initial": first_batch, "disable": None if progress else True}
    with tqdm(batches(loader, where, first_batch), **shown, leave=False) as bar:
        for index, batch in enumerate(bar, first_batch):
            place = f"batch {index} of the {where}"
            labels = None if labelled is False else batch.labels
            if had_labels is not None and had_labels != (labels is not None):
                raise DataError(
                    f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'."
                    if labelled
                    else f"{place} {'has no' if had_labels else 'has'} labels, unlike the batches before it."
                )
            had_labels = labels is not None
            seen = _captures(networks, heads, batch, likelihood, place)
            del batch
            for rows in _rows(seen, labels, likelihood, place, positions, ignore_index, first_input, chunk):
                any_rows = any_rows or len(rows) > 0
                first_input += rows.inputs_read
                yield rows
            del seen, labels, rows  # not kept while the next batch is loaded
    if required and not any_rows:
        raise DataError(f"the {where}: the networks gave no row for any batch. Is every position masked?")


def _captures(
    networks: Sequence[nn.Module], heads: Sequence[Head | None], batch: Batch, likelihood: Likelihood, place: str
) -> list[Captured]:
    seen: list[Captured] = []
    for index, (network, head) in enumerate(zip(networks, heads, strict=True)):
        with located(f"{place}, networks[{index}]"):
            one = capture(network, head, batch.inputs, likelihood)
            if head is None and one.layout is None:
                check_logits(network, batch.inputs, one.outputs, likelihood)
        seen.append(one)
    first = seen[0].layout
    if any((one.layout is None) != (first is None) for one in seen):
        raise DataError(
            f"{place}: some networks have dense outputs and others do not; a mixture needs the same from each."
        )
    for index, one in enumerate(seen[1:], 1):
        if first is not None and one.layout is not None:
            first.check_same(one.layout, f"{place}: networks[{index}]")
    counts = [len(one) for one in seen]
    if len(set(counts)) > 1:
        raise DataError(f"{place}: the networks gave {counts} rows; a mixture needs the same data from each.")
    return seen


def _rows(
    seen: Sequence[Captured],
    labels: Tensor | None,
    likelihood: Likelihood,
    place: str,
    positions: Positions,
    ignore_index: int,
    first_input: int,
    chunk: int,
) -> Iterator[Rows]:
    layout, outputs = seen[0].layout, seen[0].outputs
    per_input = 1 if layout is None else layout.count
    in_use: Tensor | None = None
    if layout is not None:
        if labels is not None:
            labels, in_use = _not_ignored(layout.labels(labels.cpu(), outputs.shape[-1], place), ignore_index)
        if isinstance(positions, int):
            in_use = _drawn(layout, in_use, positions, first_input)
    elif labels is not None and labels.shape[:1] != outputs.shape[:1]:
        likelihood.check_labels(labels, to_float64(outputs), place)  # raises, with the numbers of the whole batch
    total = len(seen[0]) if in_use is None else len(in_use)
    inputs_used = torch.zeros(outputs.shape[0], dtype=torch.bool, device="cpu")
    for start in range(0, max(total, 1), chunk):
        stop, last = min(start + chunk, total), start + chunk >= total
        index = slice(start, stop) if in_use is None else in_use[start:stop]
        numbers = torch.arange(start, stop, device="cpu") if in_use is None else in_use[start:stop]
        pairs = [one.rows(index) for one in seen]
        for position, (phi, logits) in enumerate(pairs):
            with located(f"{place}, networks[{position}]"):
                check_finite(phi, logits)
        own = None
        if labels is not None:
            own = labels[index].clone()  # a loader may reuse its memory for the next batch
            if len(own) == 0:  # a likelihood finds no range in no labels
                own = own.to(pairs[0][1].device, torch.float64 if own.is_floating_point() else torch.int64)
            else:
                own = likelihood.check_labels(own, pairs[0][1], place)
                known = likelihood.known(own)
                if known is not None:
                    own, numbers = own[known], numbers[known.cpu()]
                    pairs = [(phi[known.to(phi.device)], logits[known.to(phi.device)]) for phi, logits in pairs]
        inputs_used[numbers // max(per_input, 1)] = True
        if len(numbers) > 0 or last:
            yield Rows(
                features=[phi for phi, _ in pairs],
                outputs=[logits for _, logits in pairs],
                labels=own,
                inputs=int(inputs_used.sum()) if last else 0,
                inputs_read=len(inputs_used) if last else 0,
                last=last,
            )


def _not_ignored(labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    counts = labels != ignore_index
    if counts.dim() == 2:
        if bool((counts.any(1) & ~counts.all(1)).any()):
            # Bernoulli labels may be missing one by one; a Gaussian refuses NaN.
            labels = torch.where(counts, labels.double(), torch.nan)
        counts = counts.any(1)
    return labels, None if bool(counts.all()) else counts.nonzero().squeeze(1)


def _drawn(layout: Layout, in_use: Tensor | None, most: int, first_input: int) -> Tensor:
    rows = torch.arange(layout.inputs * layout.count, device="cpu") if in_use is None else in_use
    counts = torch.bincount(rows // max(layout.count, 1), minlength=layout.inputs).tolist()
    parts = torch.split(rows, counts)
    return torch.cat(
        [own[drawn_positions(len(own), most, first_input + index)] for index, own in enumerate(parts)] or [rows]
    )


def check_finite(phi: Tensor, outputs: Tensor) -> None:
    """Refuse features (m, P) or outputs (m, C) that are NaN or infinite, with the number of rows affected."""
    # NaN and infinity survive in a sum, and those of the features show in the outputs.
    if bool(outputs.sum().isfinite()):
        return
    for name, values in (("features", phi), ("outputs", outputs)):
        rows = int((~values.isfinite()).any(1).sum())
        if rows:
            raise DataError(
                f"{name} are NaN or infinite for {rows} of {len(values)} rows. Check the inputs and the network's "
                "weights for NaN; a network in float16 may overflow where bfloat16 or float32 does not."
            )
