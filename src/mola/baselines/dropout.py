r"""Monte Carlo dropout (Gal and Ghahramani, 2016): the average prediction of a network whose dropout stays on.

Each draw is one network: its masks are shared by all data, so that a prediction does not depend on the other data of its batch
(though on the length that sequences are padded to: a longer one has more to mask). For one input that is the same average as
with a mask for each datum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from mola.baselines.noise import loaded_likelihood, only_means, saved_likelihood
from mola.baselines.sgd import derived_seeds
from mola.errors import OptionError, located
from mola.likelihood import Likelihood, as_likelihood
from mola.mixture import Mixture
from mola.network import Inputs, call, check_finite, undisturbed
from mola.network.fingerprint import NETWORK, require_network, signature_of
from mola.numerics import check_seed
from mola.options import whole_number
from mola.saving import storage

MASKS = 0
"""Purpose of the seeds of the draws."""

WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
SELF_NORMALISING = (nn.AlphaDropout, nn.FeatureAlphaDropout)
ALPHA = -1.7580993408473766
"""What a self-normalising network (Klambauer et al., 2017) has at minus infinity: the value of a dropped unit."""

SCHEMA = {"samples": int, "seed": int, "network": NETWORK}

_door = threading.RLock()
"""Masks are put on the user's layers for the duration of a pass: one thread at a time."""


class McDropout(Mixture):
    """A trained network whose dropout layers stay on, averaged over draws; all other layers are in eval mode.

    Args:
        model: the trained classifier, borrowed and never changed. Its dropout must be layers (`nn.Dropout` and its
            relatives): calls of `torch.nn.functional.dropout` cannot be seen. The first dimension holds the data.
        samples: number of draws.
        seed: of the masks.
        likelihood: what the outputs mean, as for `mola.fit`.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: int = 30,
        *,
        seed: int = 0,
        likelihood: str | Likelihood = "categorical",
    ) -> None:
        samples = whole_number(samples, "samples")
        if not _active(model):
            raise OptionError(
                f"{type(model).__name__} has no dropout layer with a probability above 0, so that every draw would be the "
                f"same. Expected nn.Dropout or its relatives as layers; calls of torch.nn.functional.dropout cannot be seen."
            )
        meaning = only_means(as_likelihood(likelihood), "Monte Carlo dropout")
        super().__init__([partial(_one_draw, self, index) for index in range(samples)], likelihood=meaning)
        self.network, self.samples, self.seed = model, samples, check_seed(seed)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone: every pass sets the network's modes itself, and puts them back."""
        self.training = mode
        return self

    def of_likelihood(self, likelihood: Likelihood) -> McDropout:
        """The same network for outputs that mean something else, such as numbers with another noise."""
        return McDropout(self.network, self.samples, seed=self.seed, likelihood=likelihood)

    def extra_repr(self) -> str:
        """Draws and seed."""
        return f"samples={self.samples}, seed={self.seed}"

    def _member_probs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        return self._draws(inputs, derived_seeds(self.seed if seed is None else seed, MASKS, self.samples))

    def _draws(self, inputs: Inputs, seeds: Sequence[int]) -> list[Tensor]:
        members = []
        with _door, undisturbed(self.network), located("models[0]"):
            for seed in seeds:
                with _masked(self.network, seed):
                    logits = call(self.network, inputs)
                logits = self.likelihood.check_outputs(logits)
                check_finite(logits)
                dtype = torch.promote_types(logits.dtype, torch.float32)
                members.append(self.likelihood.probabilities(logits.to(dtype)))
        return members

    def save(self, directory: str | Path) -> Path:
        """Save the number of draws, the seed, what the outputs mean, and what tells the network.

        Args:
            directory: folder to write to.

        Returns:
            The folder, for `mola.McDropout.load(directory, model)`.
        """
        document: dict[str, Any] = {"samples": self.samples, "seed": self.seed, "network": signature_of(self.network)}
        document |= saved_likelihood(self.likelihood)
        return storage.write(directory, document, {}, kind="mc-dropout")

    @classmethod
    def load(cls, directory: str | Path, model: nn.Module) -> McDropout:
        """Load what `save` wrote onto the same network.

        Args:
            directory: folder that `save` wrote.
            model: the network.

        Returns:
            The predictor; `StorageError` if the files are damaged, or the network is another.
        """
        document, _ = storage.read(directory, "mc-dropout", SCHEMA)
        require_network(model, document["network"], "model")
        meaning = loaded_likelihood(document, "Monte Carlo dropout")
        return cls(model, document["samples"], seed=document["seed"], likelihood=meaning)


def _one_draw(predictor: McDropout, index: int, inputs: Inputs) -> Tensor:
    return predictor._draws(inputs, derived_seeds(predictor.seed, MASKS, index + 1)[-1:])[0]


def _active(network: nn.Module) -> list[_DropoutNd]:
    return [module for module in network.modules() if isinstance(module, _DropoutNd) and module.p > 0]


@contextmanager
def _masked(network: nn.Module, seed: int) -> Iterator[None]:
    generator = torch.Generator("cpu").manual_seed(seed)
    handles = [module.register_forward_hook(_dropping(generator)) for module in _active(network)]
    # Transformers have a faster way in eval mode, which packs padded sequences, and leaves layers out.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def _dropping(generator: torch.Generator) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def drop(layer: nn.Module, _: Any, passed: Tensor) -> Tensor:
        assert isinstance(layer, _DropoutNd)
        shape = (1, *passed.shape[1:])
        if isinstance(layer, WHOLE_CHANNELS):
            shape = (1, passed.shape[1], *[1] * (passed.dim() - 2))
        drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        kept = (drawn >= layer.p).to(passed.device, passed.dtype)
        if isinstance(layer, SELF_NORMALISING):
            scale = ((1 - layer.p) * (1 + layer.p * ALPHA**2)) ** -0.5 if layer.p < 1 else 0.0
            return scale * (passed * kept + ALPHA * (1 - kept)) - scale * ALPHA * layer.p
        return passed * kept / (1 - layer.p) if layer.p < 1 else torch.zeros_like(passed)

    return drop
