"""What sums belong to, as a JSON document: networks, heads and structure. Sums of other ones must not be added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from mola.fingerprints import fingerprint, same_signature, signature
from mola.heads import Head, head_by_name
from mola.laplace import Structure
from mola.likelihood import Likelihood

__all__ = ["describe_heads", "difference", "heads_from", "identity_of"]


def identity_of(networks: Sequence[nn.Module], structure: Structure, likelihood: Likelihood) -> dict[str, Any]:
    """Networks by their numbers, and what is summed. Call it inside `undisturbed(*networks)`."""
    return {
        "networks": [signature(network) for network in networks],
        "structure": {"name": structure.name, **structure.settings()},
        "likelihood": likelihood.name,
    }


def describe_heads(heads: Sequence[Head]) -> list[dict[str, Any]]:
    """The heads by name, size and a checksum of their weights."""
    return [
        {
            "name": head.name,
            "classes": head.classes,
            "features": head.width,
            "every_position": head.every_position,
            "weights": fingerprint(head.weights())["float64"],
        }
        for head in heads
    ]


def heads_from(networks: Sequence[nn.Module], described: Sequence[dict[str, Any]]) -> list[Head]:
    """The heads that were described, without a pass of the networks; `HeadError` if a network has none of that name."""
    return [
        replace(head_by_name(network, entry["name"]), every_position=entry["every_position"])
        for network, entry in zip(networks, described, strict=True)
    ]


def difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """The first difference between two documents, in words: what, expected, got.

    Args:
        first: what is expected.
        second: what came; entries that are None in either are not compared.

    Returns:
        Words, or None where they agree.
    """
    for name, expected in first.items():
        got = second.get(name)
        if expected is None or got is None:
            continue
        if name == "networks":
            words = _other_network(expected, got)
        elif isinstance(expected, list) and isinstance(got, list) and name == "heads":
            pairs = zip(expected, got, strict=False)
            words = next(
                (f"the head of models[{k}]: {_shortened(a, b)}" for k, (a, b) in enumerate(pairs) if a != b), None
            )
        else:
            words = None if expected == got else f"{name}: expected {expected}, got {got}"
        if words is not None:
            return words
    return None


def _shortened(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """The entries of two heads that differ."""
    differing = [name for name in expected if expected[name] != got.get(name)]
    if differing == ["weights"]:
        return "its weights are other ones"
    return ", ".join(
        f"{name} expected {expected[name]}, got {got.get(name)}" for name in differing if name != "weights"
    )


def _other_network(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> str | None:
    if len(expected) != len(got):
        return f"models: expected {len(expected)}, got {len(got)}"
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        if "tensors" not in one:
            return f"an older version of mola wrote it, which cannot tell whether models[{index}] is the same"
        if not same_signature(other, one):
            return f"models[{index}] is another network: its numbers are other ones"
    return None
