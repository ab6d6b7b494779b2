"""One network and its head, watched: what a forward pass gives, and what the head saw in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from mola.errors import HeadError, located
from mola.heads import Carried, Head, LayerCall, check_logits, first_pass
from mola.networks import Inputs, call, device_of

__all__ = ["Features", "Watched", "capture", "find_heads", "first_passes"]


class Features(NamedTuple):
    """What one network makes of one batch: the head's input and output, in the network's precision."""

    features: Tensor
    """(n, P): input of the head; of `Lifted` rows, with the constant 1."""
    logits: Tensor
    """(n, C): output of the network."""


class Watched:
    """A network whose head is watched: every pass gives the logits and what the head saw.

    A context: the hook is on the head inside, and is removed afterwards, whatever happens. Use it inside
    `undisturbed(network)`.

    Args:
        network: the trained classifier.
        head: its last linear layer, or None where the logits are all that is wanted.
    """

    def __init__(self, network: nn.Module, head: Head | None) -> None:
        """Get ready to watch `head`."""
        self.network, self.head = network, head
        self.device = device_of(network)
        self._calls: list[LayerCall] | None = None
        self._carried = Carried(head) if head is not None and head.every_position else None

    def __enter__(self) -> Self:
        """Put the hook on the head."""
        self._handle = None
        if self._carried is not None:
            self._carried.__enter__()
        elif self.head is not None:
            self._handle = self.head.layer.register_forward_hook(self._keep, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hook."""
        if self._carried is not None:
            self._carried.__exit__()
        elif self._handle is not None:
            self._handle.remove()

    def _keep(self, _: nn.Module, arguments: tuple[Tensor, ...], *rest: Any) -> None:
        # For a moment, as this hook comes or goes in one thread, torch calls it without keywords in another.
        *keywords, output = rest
        if self._calls is not None:  # else somebody else runs the network between two passes
            self._calls.append(LayerCall.of(arguments, keywords[0] if keywords else {}, output))

    def __call__(self, inputs: Inputs) -> Features:
        """One forward pass.

        Args:
            inputs: one batch of inputs.

        Returns:
            Features (none without a head) and logits of the batch.

        Raises:
            HeadError: if the network's output was not the head's output this time.
        """
        if self._carried is not None:
            return Features(*self._carried.apart(self._carried.pass_of(self.network, inputs, self.device)))
        calls: list[LayerCall] = []
        self._calls = calls
        try:
            logits = call(self.network, inputs, self.device)
        finally:
            self._calls = None
        if self.head is None or logits.dim() != 2:
            check_logits(logits)
            return Features(logits[:, :0], logits)
        for seen in reversed(calls):
            if seen.gave(logits):
                seen.check_untouched(self.head.name)
                return Features(seen.features, logits)
        message = f"the network's output is not the output of its head {self.head.name!r} in this pass. Was the network changed?"
        raise HeadError(message)


def capture(network: nn.Module, head: Head | None, inputs: Inputs) -> Features:
    """What a network and its head make of one batch; see `Watched`."""
    with Watched(network, head) as watched:
        return watched(inputs)


def find_heads(networks: Sequence[nn.Module], names: Sequence[str | None], inputs: Inputs) -> list[Head]:
    """The head of every network; see `first_passes`."""
    return first_passes(networks, names, inputs)[0]


def first_passes(
    networks: Sequence[nn.Module], names: Sequence[str | None], inputs: Inputs
) -> tuple[list[Head], list[Features]]:
    """The head of every network, and what each makes of the first batch. Call it inside `undisturbed(*networks)`.

    Args:
        networks: the trained classifiers.
        names: for each, the dotted name of its head, or None to find it.
        inputs: one batch of inputs.

    Returns:
        One head, and one `Features`, for each network.

    Raises:
        HeadError: if a network has none, or if the numbers of classes differ.
    """
    heads, seen = [], []
    for index, (network, name) in enumerate(zip(networks, names, strict=True)):
        with located(f"models[{index}] ({type(network).__name__})"):
            head, features, logits = first_pass(network, inputs, name)
        heads.append(head)
        seen.append(Features(features, logits))
    classes = [head.classes for head in heads]
    if len(set(classes)) > 1:
        message = (
            f"expected networks with the same number of classes, got {classes}. A mixture averages their probabilities."
        )
        raise HeadError(message)
    return heads, seen
