"""Monte Carlo dropout (Gal and Ghahramani, 2016): average the predictions of a network whose dropout stays active at test time.

Within a draw, all inputs share the same masks, so a prediction depends on the other inputs in its batch only through the length to
which sequences are padded. For any one input, the average has the same distribution as with separate masks for each input.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

import molaplace as mola
from molaplace.calibration import fit_temperature
from molaplace.errors import OptionError
from molaplace_lab.checksums import checksum
from molaplace_lab.context import RESUMED, Context, Predictor, StoredPrediction
from molaplace_lab.measures import BatchPrediction
from molaplace_lab.methods import FittedMethod
from molaplace_lab.training import derived_seeds

MASKS = 0  # the purpose of the seeds for masks


class MaskedNetwork(nn.Module):
    """A trained classifier whose dropout layers apply the masks that a seed determines. All other layers are in eval mode."""

    def __init__(self, network: nn.Module, seed: int) -> None:
        super().__init__()
        self.network: nn.Module = network
        self.seed: int = seed

    def forward(self, inputs: Any) -> Tensor:
        """Return the class probabilities (n, C) of a batch: a tensor, or a mapping of keyword arguments."""
        with _masked(self.network, self.seed):
            logits = self.network(**inputs) if isinstance(inputs, Mapping) else self.network(inputs)
        return logits.softmax(1)


def mc_dropout(network: nn.Module, samples: int = 30, *, seed: int = 0) -> mola.Mixture:
    """Return the mixture of a network's predictions over draws of its dropout masks.

    Args:
        network: the trained network, which is not modified. Dropout must be applied by layers (`nn.Dropout` or its variants), because
            calls to `torch.nn.functional.dropout` cannot be detected. The first dimension of each input is the batch dimension.
        samples: number of draws.
        seed: random seed for the masks.
    """
    if not _dropout_layers(network):
        raise OptionError(
            f"{type(network).__name__} has no dropout layer with a probability above 0, so all draws would be identical."
        )
    return mola.Mixture([MaskedNetwork(network, mask_seed) for mask_seed in derived_seeds(seed, MASKS, samples)])


def _dropout_layers(network: nn.Module) -> list[_DropoutNd]:
    return [module for module in network.modules() if isinstance(module, _DropoutNd) and module.p > 0]


@contextmanager
def _masked(network: nn.Module, seed: int) -> Iterator[None]:
    # In eval mode, PyTorch's fast path for transformers packs padded sequences and bypasses dropout layers.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    handles = [module.register_forward_hook(_drop) for module in _dropout_layers(network)]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def _drop(layer: nn.Module, _: Any, outputs: Tensor) -> Tensor:
    # For a given mask, every kind of dropout is an elementwise affine function, determined by its values at 0 and 1.
    layer.training = True
    state = torch.get_rng_state()
    offset = layer.forward(torch.zeros(1, *outputs.shape[1:], dtype=torch.float32, device="cpu"))
    torch.set_rng_state(state)
    slope = layer.forward(torch.ones_like(offset)) - offset
    layer.training = False
    return outputs * slope.to(outputs) + offset.to(outputs)


# --- in suites


@dataclass(frozen=True)
class DropoutMixture:
    """Monte Carlo dropout for one network, or the mixture of several networks, optionally with a temperature.

    The temperature divides the logarithms of the mean probabilities, and minimises the validation NLL.
    """

    name: str
    samples: int = 10
    temperature: bool = False
    components: int | None = 1
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {"weights": "uniform", "draws": self.samples} | ({"temperature": "shared"} if self.temperature else {})

    def fit(self, context: Context) -> FittedMethod:
        """Draw the masks and, if there is a temperature, choose it on the validation data."""
        start = time.perf_counter()
        predictors: dict[str, list[Predictor]] = {}
        for network in context.networks[: self.components]:
            key = checksum("dropout", network.checksum, self.samples)
            predictors[key] = list(mc_dropout(network.load().to(context.device), self.samples).predictors)
        chosen: dict[str, Any] = {"notes": [RESUMED]}
        if self.temperature:
            held_out = [
                (_log_probs(members), labels) for members, labels in context.predictions("validation", predictors)
            ]
            log_probs, labels = (torch.cat(tensors) for tensors in zip(*held_out, strict=True))
            chosen["temperature"] = fit_temperature(log_probs, labels)

        def predict(members: list[StoredPrediction], _: bool) -> BatchPrediction:
            mean = StoredPrediction.mean(members)
            if not self.temperature:
                return mean.with_scores(len(members) * self.samples)
            scaled = (_log_probs(members) / chosen["temperature"]).softmax(1)
            return replace(mean, probs=scaled).with_scores(1)  # the draws have no temperature: no mutual information

        return FittedMethod(
            lambda name: context.predictions(name, predictors), predict, chosen, time.perf_counter() - start
        )


def _log_probs(members: list[StoredPrediction]) -> Tensor:
    probs = StoredPrediction.mean(members).probs
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
