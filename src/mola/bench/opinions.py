"""What a method that is more than a last layer says of each set, asked once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mola.bench.layout import fast_inputs
from mola.bench.suite import Source
from mola.errors import StorageError
from mola.storage import read_sealed_tensors, sealed_tensors, write_atomically
from mola.uncertainty import entropy

__all__ = ["Opinion", "Opinions", "Voice"]

Voice = Callable[[Tensor], Tensor]
"""From a batch of inputs to probabilities (n, C): one draw, one member."""


@dataclass(frozen=True)
class Opinion:
    """The mean of some voices on one set."""

    probs: Tensor
    """(n, C)"""
    own_entropy: Tensor
    """(n,): the mean of the voices' own entropies."""

    @property
    def mutual_information(self) -> Tensor:
        """How much the voices disagree, (n,)."""
        return (entropy(self.probs) - self.own_entropy).clamp(min=0)

    @staticmethod
    def mean(opinions: Iterable[Opinion]) -> Opinion:
        """The voices of all of them together, each opinion with the same weight."""
        every = list(opinions)
        return Opinion(
            torch.stack([one.probs for one in every]).mean(0), torch.stack([one.own_entropy for one in every]).mean(0)
        )


class Opinions:
    """A folder of opinions; what is missing is asked for."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory, self.device = directory, torch.device(device)

    def ask(self, key: str, source: Source, voices: Callable[[], Iterable[Voice]]) -> Opinion:
        """The opinion of a method on a set.

        Args:
            key: of the method: the same key means the same voices.
            source: the set.
            voices: makes the voices, one after the other, if they have not been asked before.

        Returns:
            The opinion.

        Raises:
            StorageError: if the file is damaged.
        """
        path = self.directory / key / f"{source.checksum}.safetensors"
        if not path.exists():
            found = Opinion.mean(_asked(voice, source, self.device) for voice in voices())
            path.parent.mkdir(parents=True, exist_ok=True)
            content = sealed_tensors({"probs": found.probs, "entropy": found.own_entropy}, {"set": source.name})
            write_atomically(path, content)
        try:
            tensors = read_sealed_tensors(path)[0]
            return Opinion(tensors["probs"], tensors["entropy"])
        except (StorageError, KeyError) as error:
            message = f"{path} is not a whole file of predictions ({error}). Delete it: it will be made again."
            raise StorageError(message) from error


def _asked(voice: Voice, source: Source, device: torch.device) -> Opinion:
    with torch.no_grad():
        probs = torch.cat([voice(fast_inputs(inputs.to(device))).float().cpu() for inputs, _ in source.open()])
    return Opinion(probs, entropy(probs))
