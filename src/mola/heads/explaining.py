"""Outputs that are no logits, and networks that have no head: which layer came closest, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mola.errors import HeadError
from mola.heads.layer import NamedCall

__all__ = ["check_logits", "explain"]


ENOUGH = 4
"""Rows that tell probabilities from logits."""


def check_logits(logits: Tensor, ran: Sequence[tuple[str, torch.Size]] = ()) -> None:
    """Refuse outputs that are not the logits of a classifier.

    Args:
        logits: a network's output.
        ran: names and output shapes of the linear layers that ran, to name the last.

    Raises:
        HeadError: unless they are (batch, classes) with at least two classes, and no probabilities.
    """
    if logits.dim() == 1 and not ran:
        message = (
            f"expected logits of shape (batch, classes), got shape {tuple(logits.shape)}. A single input needs a batch around "
            f"it: inputs[None]."
        )
        raise HeadError(message)
    if logits.dim() != 2:
        near = f" Its last linear layer, {ran[-1][0]!r}, gives shape {tuple(ran[-1][1])}." if ran else ""
        message = (
            f"expected logits of shape (batch, classes), got shape {tuple(logits.shape)}.{near} "
            f"Pass a network that returns the output of its last linear layer as it is, without reshaping."
        )
        raise HeadError(message)
    if logits.shape[1] < 2:
        message = (
            f"expected at least 2 classes, got a network with {logits.shape[1]} output. A binary classifier with one "
            f"logit z becomes a two-class one with logits (0, z)."
        )
        raise HeadError(message)
    if not ran and _are_probabilities(logits):  # where layers were watched, `explain` says which comes after the last
        message = "the network's outputs are probabilities already: they sum to 1. Pass a network that returns logits."
        raise HeadError(message)


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether a network seems to end in a softmax. Of a few rows that cannot be told: logits may sum to 1 by chance."""
    if torch.compiler.is_compiling() or len(outputs) < ENOUGH or not bool((outputs >= 0).all()):
        return False
    rounding = 4 * torch.finfo(outputs.dtype).eps * outputs.shape[1] ** 0.5
    return bool((outputs.float().sum(1) - 1).abs().max() < max(1e-5, rounding))


def explain(
    network: nn.Module, logits: Tensor, calls: Sequence[NamedCall], ran: Sequence[tuple[str, torch.Size]]
) -> str:
    """Say which layer came closest to being the head, and what the network does to its output."""
    if not calls:
        other = f" Layer {ran[-1][0]!r} ran, with an output of shape {tuple(ran[-1][1])}." if ran else ""
        compiled = (
            " A compiled network hides its layers: pass the module you compiled."
            if hasattr(network, "_orig_mod")
            else ""
        )
        return (
            f"no nn.Linear layer with a 2-d output ran in the forward pass of {type(network).__name__}, so there is no last "
            f"linear layer to put a posterior on.{compiled}{other} End the network in an nn.Linear that maps features to logits."
        )
    sized = [seen for seen in calls if seen.output.shape == logits.shape]
    near = sized[-1] if sized else calls[-1]
    return (
        f"the network's output is not the output of its last linear layer: {near.name!r} gives shape "
        f"{tuple(near.output.shape)}, and the network {_change(near.output, logits)}. "
        f"Pass a network whose forward returns the output of {near.name!r} itself."
    )


def _change(before: Tensor, after: Tensor) -> str:
    if before.shape != after.shape:
        verb = "reshapes" if before.numel() == after.numel() else "changes"
        return f"{verb} it to {tuple(after.shape)}"
    if before.dtype != after.dtype and torch.equal(before.to(after.dtype), after):
        return f"converts it from {before.dtype} to {after.dtype}"
    before, after = before.double(), after.double()
    if torch.equal(before, after):
        return "copies it"
    if torch.allclose(before.softmax(1), after, atol=1e-3):
        return "applies a softmax to it"
    if torch.allclose(before.log_softmax(1), after, rtol=1e-3, atol=1e-3):
        return "applies a log-softmax to it"
    scale = float((before * after).sum() / (before * before).sum().clamp_min(1e-300))
    if torch.allclose(scale * before, after, rtol=1e-3, atol=1e-6):
        return f"scales it by {scale:.4g} (a temperature?)"
    return "computes something else from it"
