"""Capture features and outputs, either from one forward pass of a single network or from one pass of all networks over a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from molaplace.errors import DataError, HeadError, located
from molaplace.likelihoods import Likelihood
from molaplace.network.calling import Batch, Inputs, bare, named_batches, run, with_trunks_run
from molaplace.network.dense import IGNORE_INDEX, Layout, Positions, drawn_positions
from molaplace.network.head import Head, Layer, carried_pass, find_head, hooked, same_tensor, watched_pass
from molaplace.network.next_tokens import labels_of_logits
from molaplace.numerics import float64_device, to_float64
from molaplace.options import listed

VALUES_AT_ONCE = 2**21
"""Largest number of values per network in one chunk of rows (16 MB in float64)."""


EVERY = slice(None)


@dataclass(frozen=True)
class Rows:
    """Features phi (m, P) and outputs (m, C) of every network for m rows, and any labels.

    All are in float64. The features end with the constant 1 if the head has a bias.
    """

    phi: Sequence[Tensor]
    outputs: Sequence[Tensor]
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.outputs[0])


@dataclass(frozen=True)
class Captured:
    """The input and output of every network's head for one batch, as views of the networks' tensors, or for a whole loader."""

    heads: Sequence[Head | None]
    """The networks' heads; None where only the outputs are needed, or where the features need no constant 1."""
    features: Sequence[Tensor]
    """Features (n, P') without the constant 1 or, if the outputs are dense, (n, positions, P'). P' is 0 if there is no head."""
    outputs: Sequence[Tensor]
    """Outputs (n, C) or, if they are dense, (n, positions, C)."""
    layout: Layout
    in_use: Tensor | None = None
    """Indices, on the CPU, of the rows in use; None if all are. Rows are numbered by input, then by position."""
    labels: Tensor | None = None
    """Labels of the rows in use, as converted by the likelihood; None if there are no labels."""

    def __len__(self) -> int:
        return self.layout.num_rows if self.in_use is None else len(self.in_use)

    @property
    def row_numbers(self) -> Tensor:
        """Numbers of the rows in use, on the CPU."""
        return torch.arange(self.layout.num_rows, device="cpu") if self.in_use is None else self.in_use

    @property
    def used_inputs(self) -> int:
        """Number of inputs with at least one row in use."""
        if self.in_use is None:
            return self.layout.inputs
        return len(torch.unique_consecutive(self.in_use // self.layout.count))

    def rows_at(self, index: slice | Tensor = EVERY) -> Rows:
        """Return the rows at the given indices, without labels; by default, every row."""
        features = [self._at(values, index) for values in self.features]
        pairs = zip(self.heads, features, strict=True)
        phi = [to_float64(values) if head is None else head.lift(values) for head, values in pairs]
        return Rows(phi, [to_float64(self._at(values, index)) for values in self.outputs])

    def _at(self, values: Tensor, index: slice | Tensor) -> Tensor:
        if isinstance(index, slice):
            if not self.layout.sizes:
                return values[index]
            if index == EVERY:
                return values.flatten(0, 1)
            index = torch.arange(*index.indices(self.layout.num_rows), device=values.device)
        index = index.to(values.device)
        # Flattening first would copy whole feature maps.
        return values[index // self.layout.count, index % self.layout.count] if self.layout.sizes else values[index]

    def chunks(self, row_size: int = 512) -> Iterator[Rows]:
        """Yield the rows in use in chunks of bounded size, or a single empty `Rows` if no row is in use.

        The caller holds `row_size` values, in addition to the features, for each row and network. If the batch size is not an `int`,
        as in a trace with a dynamic batch size, all rows form a single chunk.
        """
        size = max(1, VALUES_AT_ONCE // (row_size + max(values.shape[-1] for values in self.features)))
        total = self.layout.num_rows if self.in_use is None else len(self.in_use)
        if not isinstance(total, int) or (self.in_use is None and total <= size):
            yield replace(self.rows_at(), labels=self.labels)
            return
        for start in range(0, max(total, 1), size):
            part = slice(start, start + size)
            labels = None if self.labels is None else self.labels[part]
            yield replace(self.rows_at(part if self.in_use is None else self.in_use[part]), labels=labels)

    def used(self) -> Captured:
        """Return the rows in use, without positions."""
        index = EVERY if self.in_use is None else self.in_use
        features = [self._at(values, index) for values in self.features]
        outputs = [self._at(values, index) for values in self.outputs]
        return Captured(self.heads, features, outputs, Layout.of(outputs[0], -1), labels=self.labels)

    def on_cpu(self) -> Captured:
        """Copy the rows in use to main memory, without positions, and with the outputs in float64."""
        used = self.used()
        return replace(
            used,
            features=[values.cpu().clone() for values in used.features],
            outputs=[values.cpu().to(torch.float64, copy=True) for values in used.outputs],
            labels=None if used.labels is None else used.labels.cpu(),
        )

    def copied(self) -> Captured:
        """Copy the tensors, because a loader or network may reuse their memory. Dense outputs are too large to copy."""
        if self.layout.sizes:
            return self
        return replace(
            self,
            features=[values.clone() for values in self.features],
            outputs=[values.clone() for values in self.outputs],
        )

    def check_finite(self) -> None:
        """Raise `DataError` if the features or outputs of any row in use are not finite."""
        for number, values in enumerate(self.outputs):
            if not bool(values.isfinite().all()):
                rows = self.rows_at(EVERY if self.in_use is None else self.in_use)
                with located(f"networks[{number}]"):
                    check_finite(rows.outputs[number], rows.phi[number], self.in_use, self.layout.count)

    def check_logits(self, networks: Sequence[nn.Module], inputs: Inputs, likelihood: Likelihood) -> None:
        """Raise `HeadError` if the outputs of a network without a known head are probabilities."""
        for number, head in enumerate(self.heads):
            if head is None:
                outputs = to_float64(self._at(self.outputs[number], slice(0, 4096)))
                with located(f"networks[{number}]"):
                    check_logits(networks[number], inputs, outputs, likelihood)


Pass: TypeAlias = "tuple[Tensor | None, Tensor, int]"
"""The head's input, if it was captured, the outputs and the class axis of a network."""

Passes: TypeAlias = "dict[tuple[int, Head | None, str], Pass]"
"""Passes over one batch that several mixtures share, keyed by the network's identity, its head and the name of the likelihood."""


def capture(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | None],
    inputs: Inputs,
    likelihood: Likelihood,
    passes: Passes | None = None,
) -> Captured:
    """Run every network once and capture its head's input and output; all outputs must have the same shape.

    Where the head is None, only the outputs are captured; call `check_logits` on the result. Call this function inside
    `evaluating(*networks)`. If gradients are enabled, the results are differentiable. The code does not branch on tensor values, so
    `torch.export` can trace it.

    Networks whose passes over the same inputs are in `passes` do not run again, and those that run are added. The outputs alone come
    with the input of any head, so mixtures with heads should come first.
    """
    passes = {} if passes is None else passes
    keys = [(id(network), head, likelihood.name) for network, head in zip(networks, heads, strict=True)]
    missing = [index for index, key in enumerate(keys) if key not in passes]
    ready = with_trunks_run([networks[index] for index in missing], inputs)
    for index, network in zip(missing, ready, strict=True):
        with located(f"networks[{index}]"):
            done = _forward_pass(network, heads[index], inputs, likelihood)
        passes[keys[index]] = done
        passes.setdefault((id(networks[index]), None, likelihood.name), (None, *done[1:]))
    return captured_passes(heads, [passes[key] for key in keys])


@torch.no_grad()
def find_heads(
    networks: Sequence[nn.Module], names: Sequence[str | None], inputs: Inputs, likelihood: Likelihood
) -> tuple[list[Head], Captured]:
    """Find every network's head, or check it if it is named, and capture its input and output in the same pass.

    Call this function inside `evaluating(*networks)`.
    """
    heads = []
    passes = []
    for index, (network, name) in enumerate(zip(with_trunks_run(networks, inputs), names, strict=True)):
        with located(f"networks[{index}] ({type(bare(network)).__name__})"):
            head, features, outputs = watched_pass(network, inputs, name, likelihood)
        heads.append(head)
        passes.append((features, outputs, head.axis))
    return heads, captured_passes(heads, passes)


def captured_passes(heads: Sequence[Head | None], passes: Sequence[Pass]) -> Captured:
    """Join the head's input (None without a head), the outputs and the class axis of every network."""
    features = []
    outputs = []
    layouts = []
    for head_inputs, logits, axis in passes:
        layout = Layout.of(logits, axis)
        if not torch.is_grad_enabled():
            # A network may return a parameter or its input, which require gradients nevertheless.
            logits = logits.detach()
            head_inputs = None if head_inputs is None else head_inputs.detach()
        outputs.append(layout.by_position(logits))
        features.append(outputs[-1][..., :0] if head_inputs is None else layout.by_position(head_inputs))
        layouts.append(layout)
    shapes = [(layout.inputs, *layout.sizes, values.shape[-1]) for layout, values in zip(layouts, outputs, strict=True)]
    if any(shape != shapes[0] for shape in shapes):
        raise HeadError(
            f"expected networks with outputs of the same shape, because a mixture averages their predictions; got the shapes "
            f"{shapes} (inputs, positions, classes)."
        )
    return Captured(heads, features, outputs, layouts[0])


def _forward_pass(network: nn.Module, head: Head | None, inputs: Inputs, likelihood: Likelihood) -> Pass:
    if head is None:
        return None, *_outputs_alone(network, inputs, likelihood)
    if head.every_position:
        return *carried_pass(network, head, inputs), head.axis
    calls: list[tuple[Tensor, Any]] = []  # other threads may append too; the loop below finds the call from this pass
    with hooked([head.module], lambda _, features, output: calls.append((features, output))):
        outputs = run(network, inputs)
    if outputs.dim() != 2 + head.dense_axes or head.dense_axes == 0:
        outputs = likelihood.check_outputs(outputs, [(head.name, outputs.shape)])
    for features, output in reversed(calls):
        if same_tensor(output, outputs):
            return features, outputs, head.axis
    raise HeadError(
        f"in this pass, the network's output is not the output of its head {head.name!r}. If the network has changed, fit again."
    )


def _outputs_alone(network: nn.Module, inputs: Inputs, likelihood: Likelihood) -> tuple[Tensor, int]:
    # Return the outputs and their class axis. Dense outputs usually have the size of a layer's outputs along one of two axes only.
    outputs = run(network, inputs)
    if outputs.dim() <= 2:
        return likelihood.check_outputs(outputs, [("", outputs.shape)]), -1
    layers = [Head("", module) for module in network.modules() if isinstance(module, Layer)]
    axes = {layer.axis for layer in layers if outputs.shape[layer.axis] == layer.outputs}
    return outputs, axes.pop() if len(axes) == 1 else find_head(network, inputs, None, likelihood).axis


def check_logits(network: nn.Module, inputs: Inputs, outputs: Tensor, likelihood: Likelihood) -> None:
    """Raise `HeadError` if the outputs (m, C) of a network without a known head are probabilities.

    The outputs of a linear layer are always accepted, because logits may happen to lie between 0 and 1.
    """
    try:
        likelihood.check_outputs(outputs)
    except HeadError:
        with suppress(HeadError, DataError):
            find_head(network, inputs, None, likelihood)
            return
        raise


# --- reading a loader -------------------------------------------------------------------------------------------------


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
    first: Captured | None = None,
    required: bool = True,
) -> Iterator[Captured]:
    """Read a loader once and yield every network's features and outputs for each batch.

    Call this function inside `evaluating(*networks)`. Every network processes a batch before the next batch is read. The data are
    therefore loaded only once for all networks, and the loader may be an iterator.

    Args:
        networks: the trained networks.
        heads: head of each network, or None where only the outputs are needed.
        loader: any iterable of batches.
        where: name of the loader, such as "training loader", shown in messages and on the progress bar.
        likelihood: likelihood of the labels given the outputs.
        labelled: if True, every batch must have labels; if False, labels are ignored. By default, either all batches must have labels
            or none may.
        progress: whether to show a progress bar when stderr is a terminal.
        total: number of batches, shown on the progress bar.
        positions: for dense outputs, the number of positions to draw from each input; "all" and "average" both use every position.
        ignore_index: label that marks positions to ignore.
        first_batch: index of the first batch that the loader yields; above 0 if a resumed fit skips earlier batches.
        first_input: number of inputs in the skipped batches, needed to draw the same positions as an uninterrupted fit.
        first: what the pass that found the heads captured for the first batch, which then is not run again.
        required: whether to raise `DataError` if no batch has a row in use. Pass False when several processes read shards, because a
            shard may be empty.
    """
    any_rows = first_batch > 0
    reader = named_batches(
        networks,
        loader,
        where,
        labelled=labelled,
        progress=progress,
        total=total,
        first_batch=first_batch,
        required=required and not first_batch,
    )
    for batch_name, batch in reader:
        with located(batch_name), torch.no_grad():
            captured = capture(networks, heads, batch.inputs, likelihood) if first is None else first
            first = None
            captured.check_logits(networks, batch.inputs, likelihood)
            captured = with_rows_in_use(
                captured, networks, batch, likelihood, batch_name, positions, ignore_index, first_input
            )
            captured.check_finite()
        any_rows = any_rows or len(captured) > 0
        first_input += captured.layout.inputs
        yield captured
        del batch, captured  # free the memory before the next batch is loaded
    if required and not any_rows:
        raise DataError(
            f"no row of the {where} has a known label. Check that the labels do not mark every position as ignored."
        )


def with_rows_in_use(
    captured: Captured,
    networks: Sequence[nn.Module],
    batch: Batch,
    likelihood: Likelihood,
    batch_name: str,
    positions: Positions,
    ignore_index: int,
    first_input: int,
) -> Captured:
    """Return the labelled rows of a batch, with their labels, or a draw of the positions of each input; see `stream`."""
    if batch.labels is not None:
        shape = captured.layout.shape(captured.outputs[0].shape[-1])
        labels = labels_of_logits(networks, batch, shape, ignore_index, batch_name)
        assert labels is not None
        captured = labelled_rows(captured, labels, likelihood, batch_name, ignore_index)
    if isinstance(positions, int) and captured.layout.sizes:
        captured = _with_drawn_positions(captured, positions, first_input)
    return captured


def labelled_rows(
    captured: Captured, labels: Tensor, likelihood: Likelihood, batch_name: str, ignore_index: int
) -> Captured:
    """Return only the labelled rows, with their labels as converted by the likelihood."""
    in_use = None
    like = captured.outputs[0]
    width = like.shape[-1]
    if captured.layout.sizes:
        labels = captured.layout.labels(labels.cpu(), width, batch_name)
        in_use_mask = labels != ignore_index
        if in_use_mask.dim() == 2:
            if bool((in_use_mask.any(1) & ~in_use_mask.all(1)).any()):
                # NaN marks individual labels as missing. A Bernoulli likelihood accepts NaN; a Gaussian likelihood rejects it.
                labels = torch.where(in_use_mask, labels.double(), torch.nan)
            in_use_mask = in_use_mask.any(1)
        labels = labels[in_use_mask]
        in_use = in_use_mask.nonzero().flatten()
    else:
        labels = labels.clone()  # the loader may reuse this memory for the next batch
    device = float64_device(like.device)
    count = captured.layout.num_rows if in_use is None else len(in_use)
    if count == len(labels) == 0:  # the likelihood cannot check the range of an empty tensor of labels
        empty = labels.to(device, torch.float64 if labels.is_floating_point() else torch.int64)
        return replace(captured, labels=empty, in_use=in_use)
    # The likelihood uses only the device and shape of the outputs.
    outputs = torch.zeros((), dtype=torch.float64, device=device).expand(count, width)
    labels = likelihood.check_labels(labels, outputs, batch_name)
    known = likelihood.known(labels)
    if known is not None:
        labels = labels[known]
        in_use = known.cpu().nonzero().flatten() if in_use is None else in_use[known.cpu()]
    return replace(captured, labels=labels, in_use=in_use)


def _with_drawn_positions(captured: Captured, most: int, first_input: int) -> Captured:
    # Return at most `most` of the rows in use of each input.
    layout = captured.layout
    in_use = captured.row_numbers
    counts = torch.bincount(in_use // layout.count, minlength=layout.inputs)
    starts = counts.cumsum(0) - counts
    parts = zip(starts.tolist(), counts.tolist(), strict=True)
    indices = torch.cat(
        [start + drawn_positions(count, most, first_input + number) for number, (start, count) in enumerate(parts)]
    )
    labels = None if captured.labels is None else captured.labels[indices]
    return replace(captured, labels=labels, in_use=in_use[indices])


def invalid_inputs(inputs: Inputs) -> Tensor | None:
    """Return which inputs (n,) of a batch are NaN or infinite; None without tensors.

    In a tuple or mapping, only NaN counts, because masks may be infinite. The code does not branch on tensor values.
    """
    single = isinstance(inputs, Tensor)
    values: Any = inputs.values() if isinstance(inputs, Mapping) else [inputs] if single else inputs
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
    if not tensors:
        return None
    invalid = torch.zeros(tensors[0].shape[0], dtype=torch.bool, device=tensors[0].device)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.shape[0] == tensors[0].shape[0]:
            unusable = ~tensor.isfinite() if single else tensor.isnan()
            invalid = invalid | (unusable.flatten(1).any(1) if tensor.dim() > 1 else unusable)
    return invalid


def check_inputs(inputs: Inputs) -> None:
    """Raise `DataError` if inputs are NaN or infinite: layers such as tanh would turn infinity into a typical feature."""
    invalid = invalid_inputs(inputs)
    if invalid is not None and bool(invalid.any()):
        raise _not_finite("inputs", invalid.nonzero().flatten(), len(invalid), "")


def _not_finite(name: str, rows: Tensor, count: int, remedy: str) -> DataError:
    numbers = rows.tolist()
    error = DataError(
        f"{name} are NaN or infinite for {len(numbers)} of {count} rows ({'row' if len(numbers) == 1 else 'rows'} {listed(numbers, 10)}). "
        f"{remedy}Leave these inputs out, or let predict(..., invalid='mark') mark them and answer the others."
    )
    error.rows = tuple(numbers)
    return error


def check_finite(outputs: Tensor, phi: Tensor | None = None, rows: Tensor | None = None, positions: int = 1) -> None:
    """Raise `DataError` if outputs (m, C) or features (m, P) are not finite.

    `rows` holds their row numbers, by default 0 to m - 1, and `positions` is the number of rows of each input.
    """
    # NaN and infinity propagate to the sum of the values.
    for name, values in (("features", phi), ("outputs", outputs)):
        if values is None or bool(values.sum().isfinite()):
            continue
        affected = (~values.isfinite()).any(1).nonzero().flatten()
        if len(affected):
            remedy = (
                "Check the inputs and the network's weights for NaN. Values may overflow in a float16 network; use bfloat16 or float32 "
                "instead. "
            )
            numbers = affected if rows is None else rows[affected.cpu()]
            error = _not_finite(name, numbers, len(values), remedy)
            error.rows = tuple(dict.fromkeys(number // positions for number in error.rows))
            raise error
