"""A head that runs at every position of a sequence, of which the network then picks or averages some.

Language models classify so: their last layer gives scores (n, T, C) at all positions, and those at the last token of each
text are returned. What the layer saw there is found by sending it along: for the length of one pass the layer's input joins
its output as further columns, and whatever picks or averages positions does it to both alike.
"""

from __future__ import annotations

import threading
from typing import Any, Self

import torch
from torch import Tensor, nn

from mola.errors import HeadError
from mola.heads.layer import Head
from mola.networks import Inputs, call, without_autocast

__all__ = ["Carried"]


class Carried:
    """A head whose input is carried along with its output.

    A context: the hook is on the head inside, and is removed afterwards, whatever happens.

    Args:
        head: a layer that runs at every position.
    """

    def __init__(self, head: Head) -> None:
        """Get ready to carry."""
        self.head = head
        self._thread: int | None = None
        self._dtype: torch.dtype | None = None

    def __enter__(self) -> Self:
        """Put the hook on the head."""
        self._handle = self.head.layer.register_forward_hook(self._join, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _join(self, _: nn.Module, arguments: tuple[Tensor, ...], *rest: Any) -> Tensor | None:
        # Another thread may run the same network at the same time: its pass has hooks of its own.
        if self._thread != threading.get_ident():
            return None
        *keywords, output = rest
        features = arguments[0] if arguments else keywords[0]["input"]
        self._dtype = output.dtype
        with without_autocast(output.device):  # which refuses to join tensors of another half precision than its own
            return torch.cat([output, features], dim=-1)

    def pass_of(self, network: nn.Module, inputs: Inputs, device: torch.device | None = None) -> Tensor:
        """One forward pass of the network, without gradients: what it returns, with what is carried."""
        self._thread = threading.get_ident()
        try:
            return call(network, inputs, device)
        finally:
            self._thread = None

    def apart(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Take apart what the network returned.

        Args:
            joined: (n, C + the layer's number of inputs).

        Returns:
            The head's input (n, P) and output (n, C) at the positions that the network took.

        Raises:
            HeadError: if the network did more than to pick or average positions.
        """
        classes, width = self.head.classes, self.head.layer.in_features
        if joined.dim() != 2 or joined.shape[1] != classes + width:
            message = (
                f"the network does more to the output of its head {self.head.name!r} than to pick or average positions: "
                f"expected {classes + width} columns, got shape {tuple(joined.shape)}."
            )
            raise HeadError(message)
        return joined[:, classes:], joined[:, :classes].to(self._dtype)
