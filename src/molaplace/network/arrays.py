"""Features and outputs that were computed elsewhere, as arrays of any library, in place of a forward pass.

They come from JAX, Keras, a vector store or an inference server. Arrays are checked as strictly as networks are: the outputs must be
those that the head computes from the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from molaplace.errors import DataError, OptionError, located
from molaplace.likelihoods import Likelihood
from molaplace.network.capture import Captured, captured_passes, check_finite
from molaplace.network.head import Head, Layer, linear_errors
from molaplace.options import counted


class HeadNetwork(nn.Module):
    """The last layer of a network, as a network whose inputs are features.

    Args:
        layer: the linear layer.
        index: position of the layer's features among the arguments, because the networks of a mixture have different features.
    """

    def __init__(self, layer: nn.Linear, index: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.index: int = index

    def forward(self, *features: Tensor) -> Tensor:
        """Return the outputs for the features of every network."""
        return self.layer(as_rows(features[self.index], "features").to(self.layer.weight))


def as_rows(values: Any, argument: str) -> Tensor:
    """Return an array of any library as a tensor; arrays in memory that is not writable are copied."""
    if isinstance(values, Tensor):
        return values
    try:
        array = np.array(values)
        # The bfloat16 of JAX is a type that NumPy and PyTorch do not know.
        array = array.astype(np.float32) if array.dtype.kind == "V" else array.astype(array.dtype.newbyteorder("="))
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"must be an array or a list of arrays, got {type(values).__name__}: {error}", argument=argument
        ) from error


def as_arrays(values: Any, count: int, argument: str) -> list[Any]:
    """Return the arrays of each network as a list, given a list of `count` arrays or, for one network, the array itself."""
    arrays = list(values) if isinstance(values, (list, tuple)) else [values]
    if len(arrays) != count or not all(hasattr(array, "shape") for array in arrays):
        raise OptionError(
            f"must be an array with one row for each datum{f', or a list of {count} arrays' if count > 1 else ''}; got "
            f"{counted(len(arrays), 'value')}, the first of type {type(arrays[0]).__name__ if arrays else None}.",
            argument=argument,
        )
    return arrays


def as_layer(layer: Any, index: int) -> nn.Linear:
    """Return a last layer, given as nn.Linear or as a pair of a weight (C, P) and a bias (C,) or None."""
    argument = f"heads[{index}]"
    if isinstance(layer, nn.Linear):
        return layer
    if not isinstance(layer, tuple) or len(layer) != 2:
        raise OptionError(
            f"must be an nn.Linear or a pair (weight, bias), with None for no bias; got {type(layer).__name__}.",
            argument=argument,
        )
    weight = as_rows(layer[0], argument)
    bias = None if layer[1] is None else as_rows(layer[1], argument)
    if weight.dim() != 2 or not weight.is_floating_point() or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
        raise OptionError(
            f"must have a weight of shape (outputs, features) and a bias of shape (outputs,), got {shapes}. The kernel of a dense "
            f"layer in Keras or JAX has the shape (features, outputs): pass (kernel.T, bias).",
            argument=argument,
        )
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def captured_arrays(
    heads: Sequence[Head | None], features: Any, outputs: Any, likelihood: Likelihood, rows: slice = slice(None)
) -> Captured:
    """Return rows of features and outputs as if a forward pass had captured them; raise `DataError` if they do not fit the heads.

    Args:
        heads: head of each network, or None where only the outputs are needed.
        features: features (n, P) of each network, as in `as_arrays`. A last column of ones, for the bias, is accepted.
        outputs: outputs (n, C) of each network.
        likelihood: likelihood of the labels given the outputs.
        rows: rows to read.
    """
    count = len(heads)
    passes: list[tuple[Tensor | None, Tensor, int]] = []
    arrays = zip(as_arrays(features, count, "features"), as_arrays(outputs, count, "outputs"), heads, strict=True)
    for index, (inputs_of_layer, outputs_of_layer, head) in enumerate(arrays):
        with located(f"networks[{index}]"):
            logits = as_rows(outputs_of_layer[rows], "outputs")
            logits = likelihood.check_outputs(logits, [] if head is None else [(head.name, logits.shape)])
            phi = None
            if head is not None:
                phi = _without_constant(head, as_rows(inputs_of_layer[rows], "features"), logits)
            check_finite(logits, phi, torch.arange(len(logits), device="cpu") + (rows.start or 0))
            if head is not None and phi is not None and len(phi):
                _check_head(head.module, phi, logits, rows.start or 0)
        passes.append((phi, logits, -1))
    return captured_passes(heads, passes)


def _without_constant(head: Head, features: Tensor, outputs: Tensor) -> Tensor:
    # Return the features without a column of ones for the bias.
    if features.dim() == 2 and head.has_bias and features.shape[1] == head.width and bool((features[:, -1] == 1).all()):
        features = features[:, :-1]
    if tuple(features.shape) != (len(outputs), head.inputs) or outputs.shape[1] != head.outputs:
        raise DataError(
            f"the last layer takes {head.inputs} features and has {counted(head.outputs, 'output')}, but the features have the shape "
            f"{tuple(features.shape)} and the outputs {tuple(outputs.shape)}. Pass as many rows of inputs of the last layer as of its "
            f"outputs, and the weight with the shape (outputs, features)."
        )
    return features


def _check_head(layer: Layer, features: Tensor, outputs: Tensor, first_row: int) -> None:
    errors, tolerance = linear_errors(layer, features, outputs)
    worst = int(errors.amax(1).argmax())
    column = int(errors[worst].argmax())
    if float(errors[worst, column]) <= tolerance:
        return
    wrong = int((errors.amax(1) > tolerance).sum())
    raise DataError(
        f"the features do not give the outputs through the last layer: `features @ weight.T + bias` differs from the outputs in "
        f"{wrong:,} of {len(errors):,} rows, by up to {float(errors[worst, column]):.4g} (row {first_row + worst}, output {column}). "
        f"Pass the inputs of the last layer, in the same order as its outputs, and the outputs themselves, before the softmax."
    )
