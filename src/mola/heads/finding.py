"""Find and check the last linear layer of any network, by watching one forward pass.

The head is the linear layer whose output *is* the network's output: not the last one defined, not the last one that
ran. A network that changes the logits after its last linear layer has no head in this sense, and the error says which
layer came closest and what the network does to its output. One change is allowed: a layer that runs at every position of a
sequence, of which the network then picks one for each input or averages several, as language models that classify do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mola.errors import DataError, HeadError
from mola.heads.explaining import check_logits, explain
from mola.heads.layer import Head, LayerCall, NamedCall, head_by_name
from mola.heads.positions import Carried
from mola.networks import Inputs, call

__all__ = ["find_head", "first_pass"]


def find_head(network: nn.Module, inputs: Inputs, name: str | None = None) -> Head:
    """The layer whose output is the network's output; see `first_pass`."""
    return first_pass(network, inputs, name)[0]


def first_pass(network: nn.Module, inputs: Inputs, name: str | None = None) -> tuple[Head, Tensor, Tensor]:
    """Watch one forward pass and find the layer whose output is the network's output.

    Call it inside `undisturbed(network)`.

    Args:
        network: the trained classifier.
        inputs: one batch of its inputs.
        name: dotted name of the layer that must be the head, to insist on one.

    Returns:
        The head, and what this pass gave: the head's input (n, P) and output (n, C).

    Raises:
        HeadError: if there is no such layer.
    """
    expected = None if name is None else head_by_name(network, name).layer
    calls, ran, logits = _watch(network, inputs)
    check_logits(logits, ran)
    matches = [seen for seen in calls if seen.gave(logits)]
    if not matches:
        found_along = _along_a_sequence(network, inputs, logits, ran)
        if found_along is None:
            raise HeadError(explain(network, logits, calls, ran))
        return _insist(found_along, expected, name, every_position=True), found_along.features, found_along.output
    found = matches[-1]
    _check_linear(found)
    return _insist(found, expected, name), found.features, logits


def _check_linear(found: NamedCall) -> None:
    """Refuse logits that are not what the layer makes of its input.

    Raises:
        HeadError: if they are not.
    """
    if not found.is_linear():
        message = (
            f"the network's output lies in the memory of layer {found.name!r} but is not its weight times its input plus "
            f"bias: the logits are overwritten in place after the layer, or the layer computes something else. "
            f"Pass a network that returns the plain output of {found.name!r}."
        )
        raise HeadError(message)
    found.check_untouched(found.name)


def _along_a_sequence(
    network: nn.Module, inputs: Inputs, logits: Tensor, ran: Sequence[tuple[str, torch.Size]]
) -> NamedCall | None:
    """The call of a layer that runs at every position, seen at the positions that the network takes; None if there is none."""
    rows, classes = logits.shape
    names = [name for name, shape in ran if len(shape) > 2 and (shape[0], shape[-1]) == (rows, classes)]
    if not names:
        return None
    head = head_by_name(network, names[-1])
    with Carried(head) as carried:
        try:
            features, again = carried.apart(carried.pass_of(network, inputs))
        except (DataError, HeadError):  # the network does more than to pick positions
            return None
    found = NamedCall(features, again, (0, 0), head.name, head.layer)
    return found if torch.allclose(again, logits, rtol=1e-3, atol=1e-3, equal_nan=True) and found.is_linear() else None


def _insist(found: NamedCall, expected: nn.Linear | None, name: str | None, *, every_position: bool = False) -> Head:
    if expected is not None and found.layer is not expected:
        message = (
            f"head={name!r} was given, but the network's output is the output of layer {found.name!r}. "
            f"Pass head={found.name!r}, or None to have it found."
        )
        raise HeadError(message)
    return Head(name or found.name, found.layer, every_position)


def _watch(network: nn.Module, inputs: Inputs) -> tuple[list[NamedCall], list[tuple[str, torch.Size]], Tensor]:
    """Calls of linear layers with a matrix as output; names and output shapes of all of them; the network's output."""
    calls: list[NamedCall] = []
    ran: list[tuple[str, torch.Size]] = []

    def record(name: str, layer: nn.Linear) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], output: object) -> None:
            if isinstance(output, Tensor):
                ran.append((name, output.shape))
                # Only matrices are kept: hidden states of a transformer (3-d) cannot be the logits and would fill memory.
                if output.dim() == 2:
                    seen = LayerCall.of(arguments, keywords, output)
                    calls.append(NamedCall(seen.features, output, seen.versions, name, layer))

        return hook

    handles = []
    try:
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(record(name, module), with_kwargs=True))
        return calls, ran, call(network, inputs)
    finally:
        for handle in handles:
            handle.remove()
