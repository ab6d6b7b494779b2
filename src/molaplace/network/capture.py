"""Capture features and outputs, either from one forward pass of a single network or from one pass of all networks over a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from molaplace.errors import DataError, HeadError, located
from molaplace.likelihoods import Likelihood
from molaplace.network.calling import Inputs, batches, call, unwrapped
from molaplace.network.dense import IGNORE_INDEX, Layout, Positions, drawn_positions
from molaplace.network.head import Head, Layer, carried_pass, find_head, hooked, same_tensor
from molaplace.numerics import float64_device, to_float64


@dataclass(frozen=True)
class Rows:
    """Features phi (m, P) and outputs (m, C) of every network for m rows, and any labels.

    The features are in float64 and end with the constant 1 if the head has a bias.
    """

    phi: Sequence[Tensor]
    outputs: Sequence[Tensor]
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.outputs[0])


@dataclass(frozen=True)
class Captured:
    """The head's input and output in one forward pass, as views of the network's tensors.

    Args:
        features: features of shape (n, positions, P'), without the constant 1. P' is 0 if there is no head.
        outputs: outputs of shape (n, positions, C); there is only one position unless the outputs are dense.
        layout: layout of the network's output.
        head: the network's head, or None if only the outputs are needed.
    """

    features: Tensor
    outputs: Tensor
    layout: Layout
    head: Head | None

    @staticmethod
    def of(features: Tensor | None, outputs: Tensor, head: Head | None, axis: int = -1) -> Captured:
        """Reshape features and outputs with class axis 1 or -1 to (n, positions, width)."""
        layout = Layout.of(outputs, axis)
        outputs = outputs.detach()
        rows = layout.by_position(outputs)
        feature_rows = rows[..., :0] if features is None else layout.by_position(features.detach())
        return Captured(feature_rows, rows, layout, head)

    def rows(self, index: slice | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the float64 features phi (m, P), including the constant 1, and outputs (m, C) of the selected rows.

        By default, all rows are selected. Rows are numbered by input, then by position.
        """
        if index is None:
            features = self.features.flatten(0, 1)
            outputs = self.outputs.flatten(0, 1)
        else:
            count = self.layout.count
            if isinstance(index, slice):
                index = torch.arange(*index.indices(self.layout.inputs * count), device=self.outputs.device)
            # Flattening first would copy whole feature maps.
            position = index // count, index % count
            features = self.features[position]
            outputs = self.outputs[position]
        return to_float64(features) if self.head is None else self.head.lift(features), to_float64(outputs)

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the features phi (m, P) and outputs (m, C) of all rows, at most `size` rows at a time.

        If the batch size is not an `int`, as in a trace with a dynamic batch size, all rows form a single chunk.
        """
        total = self.outputs.shape[0] * self.layout.count
        if not isinstance(total, int) or total <= size:
            yield self.rows()
            return
        for start in range(0, total, size):
            yield self.rows(slice(start, start + size))


def capture(network: nn.Module, head: Head | None, inputs: Inputs, likelihood: Likelihood) -> Captured:
    """Run one forward pass and capture the input and output of the network's head. Call this function inside `evaluating(network)`.

    The code does not branch on tensor values, so `torch.export` can trace it.

    Args:
        network: a trained network.
        head: head from `find_head`, or None to capture only the outputs. In that case, check the outputs with `check_logits`.
        inputs: one batch of inputs.
        likelihood: likelihood of the labels given the outputs.
    """
    if head is None:
        outputs, axis = _outputs_alone(network, inputs, likelihood)
        return Captured.of(None, outputs, None, axis)
    if head.every_position:
        return Captured.of(*carried_pass(network, head, inputs), head, head.axis)
    calls: list[tuple[Tensor, Any]] = []  # other threads may append too; the loop below finds the call from this pass
    with hooked([head.layer], lambda _, features, output: calls.append((features, output))):
        outputs = call(network, inputs)
    if outputs.dim() != 2 + head.dense_axes or head.dense_axes == 0:
        outputs = likelihood.check_outputs(outputs, [(head.name, outputs.shape)])
    for features, output in reversed(calls):
        if same_tensor(output, outputs):
            return Captured.of(features, outputs, head, head.axis)
    raise HeadError(
        f"in this pass, the network's output is not the output of its head {head.name!r}. If the network has changed, fit again."
    )


def _outputs_alone(network: nn.Module, inputs: Inputs, likelihood: Likelihood) -> tuple[Tensor, int]:
    # Return the outputs and their class axis. Dense outputs usually have the size of a layer's outputs along one of two axes only.
    outputs = call(network, inputs)
    if outputs.dim() <= 2:
        return likelihood.check_outputs(outputs, [("", outputs.shape)]), -1
    layers = [Head("", module) for module in network.modules() if isinstance(module, Layer)]
    axes = {layer.axis for layer in layers if outputs.shape[layer.axis] == layer.outputs}
    return outputs, axes.pop() if len(axes) == 1 else find_head(network, inputs, None, likelihood).axis


def capture_all(
    networks: Sequence[nn.Module], heads: Sequence[Head | None], inputs: Inputs, likelihood: Likelihood
) -> list[Captured]:
    """Capture one forward pass of every network; all outputs must have the same shape.

    Call this function inside `evaluating(*networks)`.
    """
    captured = []
    for index, (network, head) in enumerate(zip(networks, heads, strict=True)):
        with located(f"networks[{index}]"):
            captured.append(capture(network, head, inputs, likelihood))
    shapes = [
        (network_output.layout.inputs, *network_output.layout.sizes, network_output.outputs.shape[-1])
        for network_output in captured
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise DataError(
            f"expected networks with outputs of the same shape, because a mixture averages their predictions; got the shapes "
            f"{shapes} (inputs, positions, classes)."
        )
    return captured


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


def find_heads(
    networks: Sequence[nn.Module], names: Sequence[str | None], inputs: Inputs, likelihood: Likelihood
) -> list[Head]:
    """Find every network's head, or check it if it is named; all outputs must have the same width and number of position axes.

    Call this function inside `evaluating(*networks)`.
    """
    heads = []
    for index, (network, name) in enumerate(zip(networks, names, strict=True)):
        with located(f"networks[{index}] ({type(unwrapped(network)).__name__})"):
            heads.append(find_head(network, inputs, name, likelihood))
    outputs = [head.outputs for head in heads]
    axes = [head.dense_axes for head in heads]
    if len(set(outputs)) > 1:
        raise HeadError(
            f"expected networks with the same number of outputs, because a mixture averages their predictions; got {outputs}."
        )
    if len(set(axes)) > 1:
        raise HeadError(
            f"expected networks whose outputs have the same number of position axes, got {axes}. Dense and plain "
            f"outputs cannot be mixed."
        )
    return heads


# --- reading a loader -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedBatch:
    """Every network's features and outputs for one batch from a loader, with the indices of the rows in use.

    Args:
        networks: one `Captured` for each network.
        in_use: indices of the rows in use, on the CPU.
        labels: labels of the rows in use, as converted by the likelihood; None if the loader yields no labels.
        place: description of the batch, used in messages.
    """

    networks: Sequence[Captured]
    in_use: Tensor
    labels: Tensor | None
    place: str

    def __len__(self) -> int:
        return len(self.in_use)

    @property
    def inputs(self) -> int:
        """Number of inputs in the batch."""
        return self.networks[0].layout.inputs

    @property
    def used_inputs(self) -> int:
        """Number of inputs with at least one row in use."""
        return len(torch.unique_consecutive(self.in_use // self.networks[0].layout.count))

    def chunks(self, size: int = 4096) -> Iterator[Rows]:
        """Yield the rows in use, at most `size` at a time, or a single empty `Rows` if no row is in use."""
        for part in range(0, max(len(self), 1), size):
            index = self.in_use[part : part + size]
            pairs = [captured.rows(index.to(captured.outputs.device)) for captured in self.networks]
            for number, pair in enumerate(pairs):
                with located(f"{self.place}, networks[{number}]"):
                    check_finite(*pair, index)
            labels = None if self.labels is None else self.labels[part : part + size]
            yield Rows([phi for phi, _ in pairs], [outputs for _, outputs in pairs], labels)


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
    required: bool = True,
) -> Iterator[CapturedBatch]:
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
        required: whether to raise `DataError` if no batch has a row in use. Pass False when several processes read shards, because a
            shard may be empty.
    """
    had_labels = labelled
    any_rows = first_batch > 0
    bar_options = {"desc": where, "total": total, "initial": first_batch, "disable": None if progress else True}
    with tqdm(
        batches(loader, where, first_batch, required=required and not first_batch), **bar_options, leave=False
    ) as bar:
        for index, (inputs, batch_labels) in enumerate(bar, first_batch):
            place = f"batch {index} of the {where}"
            labels = None if labelled is False else batch_labels
            if had_labels is not None and had_labels != (labels is not None):
                raise DataError(
                    f"{place} has no labels. Make the loader yield (inputs, labels), or a mapping with the key 'labels'."
                    if labelled
                    else f"{place} {'has no' if had_labels else 'has'} labels, unlike the batches before it."
                )
            had_labels = labels is not None
            with located(place):
                captured = capture_all(networks, heads, inputs, likelihood)
                for number, (network, network_output) in enumerate(zip(networks, captured, strict=True)):
                    if network_output.head is None:
                        with located(f"networks[{number}]"):
                            check_logits(network, inputs, network_output.rows(slice(0, 4096))[1], likelihood)
            labels, in_use = _rows_in_use(captured[0], labels, likelihood, place, ignore_index)
            if isinstance(positions, int) and captured[0].layout.sizes:
                drawn = _drawn(captured[0].layout, in_use, positions, first_input)
                labels = None if labels is None else labels[drawn]
                in_use = in_use[drawn]
            batch = CapturedBatch(captured, in_use, labels, place)
            any_rows = any_rows or len(batch) > 0
            first_input += batch.inputs
            yield batch
            del inputs, batch_labels, captured, labels, in_use, batch  # free the memory before the next batch is loaded
    if required and not any_rows:
        raise DataError(
            f"no row of the {where} has a known label. Check that the labels do not mark every position as ignored."
        )


def _rows_in_use(
    captured: Captured, labels: Tensor | None, likelihood: Likelihood, place: str, ignore_index: int
) -> tuple[Tensor | None, Tensor]:
    # Return the labels of the labelled rows, as converted by the likelihood, and the indices of these rows.
    in_use = torch.arange(captured.layout.inputs * captured.layout.count, device="cpu")
    width = captured.outputs.shape[-1]
    if labels is None:
        return None, in_use
    if captured.layout.sizes:
        labels = captured.layout.labels(labels.cpu(), width, place)
        used = labels != ignore_index
        if used.dim() == 2:
            if bool((used.any(1) & ~used.all(1)).any()):
                # NaN marks individual labels as missing. A Bernoulli likelihood accepts NaN; a Gaussian likelihood rejects it.
                labels = torch.where(used, labels.double(), torch.nan)
            used = used.any(1)
        labels = labels[used]
        in_use = in_use[used]
    else:
        labels = labels.clone()  # the loader may reuse this memory for the next batch
    device = float64_device(captured.outputs.device)
    if len(in_use) == len(labels) == 0:  # the likelihood cannot check the range of an empty tensor of labels
        return labels.to(device, torch.float64 if labels.is_floating_point() else torch.int64), in_use
    # The likelihood uses only the device and shape of the outputs.
    outputs = torch.zeros((), dtype=torch.float64, device=device).expand(len(in_use), width)
    labels = likelihood.check_labels(labels, outputs, place)
    labelled = likelihood.known(labels)
    return (labels, in_use) if labelled is None else (labels[labelled], in_use[labelled.cpu()])


def _drawn(layout: Layout, in_use: Tensor, most: int, first_input: int) -> Tensor:
    # Return the drawn positions as indices into the rows in use.
    counts = torch.bincount(in_use // layout.count, minlength=layout.inputs)
    starts = counts.cumsum(0) - counts
    parts = zip(starts.tolist(), counts.tolist(), strict=True)
    return torch.cat(
        [start + drawn_positions(count, most, first_input + number) for number, (start, count) in enumerate(parts)]
    )


def check_finite(phi: Tensor, outputs: Tensor, rows: Tensor | range | None = None) -> None:
    """Raise `DataError` if features (m, P) or outputs (m, C) are not finite; `rows` holds their row numbers in the batch, if known."""
    # NaN and infinity propagate from the features to the outputs, and from the outputs to their sum.
    if bool(outputs.sum().isfinite()):
        return
    for name, values in (("features", phi), ("outputs", outputs)):
        affected = (~values.isfinite()).any(1).nonzero()
        if len(affected):
            where = "" if rows is None else f" (first: row {int(rows[int(affected[0])])})"
            raise DataError(
                f"{name} are NaN or infinite for {len(affected)} of {len(values)} rows{where}. Check the inputs "
                "and the network's weights for NaN. Values may overflow in a float16 network; use bfloat16 or float32 instead."
            )
