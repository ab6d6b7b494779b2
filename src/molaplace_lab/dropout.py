"""Monte Carlo dropout (Gal and Ghahramani, 2016): average the predictions of a network whose dropout stays active at test time.

Within a draw, all inputs share the same masks, so a prediction depends on the other inputs in its batch only through the length to
which sequences are padded. For any one input, the average has the same distribution as with separate masks for each input.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from molaplace.errors import OptionError, located
from molaplace.likelihoods import Likelihood
from molaplace.mixture import Mixture
from molaplace.network import Inputs, evaluating
from molaplace.numerics import check_seed
from molaplace.options import whole_number
from molaplace_lab.members import derived_seeds, homoscedastic, member_output

MASKS = 0  # the `purpose` that makes the seeds for masks independent of other seeds

_lock = threading.RLock()  # one pass at a time, because the masks are applied by hooks on the user's layers


class McDropout(Mixture):
    """A predictor that averages a trained network over random dropout masks. Layers other than dropout run in eval mode.

    The network, the number of draws and the seed determine the predictions, so there is nothing else to save.

    Args:
        network: the trained network, which is not modified. Dropout must be applied by layers (`nn.Dropout` or its variants), because
            calls to `torch.nn.functional.dropout` cannot be detected. The first dimension of each input is the batch dimension.
        samples: number of draws.
        seed: random seed for the masks.
        likelihood: likelihood of the outputs, as in `mola.fit`.
    """

    def __init__(
        self,
        network: nn.Module,
        samples: int = 30,
        *,
        seed: int = 0,
        likelihood: str | Likelihood = "categorical",
    ) -> None:
        samples = whole_number(samples, "samples")
        if not _active(network):
            raise OptionError(
                f"{type(network).__name__} has no dropout layer with a probability above 0, so all draws would be identical. Expected "
                f"nn.Dropout layers or their variants; calls to torch.nn.functional.dropout cannot be detected."
            )
        meaning = homoscedastic(likelihood, "Monte Carlo dropout")
        super().__init__([partial(self._draw, index) for index in range(samples)], likelihood=meaning)
        self.network: nn.Module = network
        self.samples: int = samples
        self.seed: int = check_seed(seed)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module only; the network keeps its own mode and is switched to eval mode for each pass."""
        self.training = mode
        return self

    def with_likelihood(self, likelihood: Likelihood) -> McDropout:
        """Return a copy with the same draws but a different likelihood, for example one with a different noise level."""
        return McDropout(self.network, self.samples, seed=self.seed, likelihood=likelihood)

    def extra_repr(self) -> str:
        """Return the text that `repr` shows: the number of draws and the seed."""
        return f"samples={self.samples}, seed={self.seed}"

    def _member_outputs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        return [self._draw(index, inputs, seed) for index in range(self.samples)]

    def _draw(self, index: int, inputs: Inputs, seed: int | None = None) -> Tensor:
        own = derived_seeds(self.seed if seed is None else seed, MASKS, index + 1)[index]
        with _lock, evaluating(self.network), _masked(self.network, own), located("the network"):
            return member_output(self.network, inputs, self.likelihood)


def _active(network: nn.Module) -> list[_DropoutNd]:
    return [module for module in network.modules() if isinstance(module, _DropoutNd) and module.p > 0]


@contextmanager
def _masked(network: nn.Module, seed: int) -> Iterator[None]:
    # In eval mode, PyTorch's fast path for transformers packs padded sequences and bypasses dropout layers.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    handles = [module.register_forward_hook(_drop) for module in _active(network)]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def _drop(layer: nn.Module, _: Any, passed: Tensor) -> Tensor:
    # For a given mask, every kind of dropout is an elementwise affine function, determined by its values at 0 and 1.
    layer.training, state = True, torch.get_rng_state()
    offset = layer.forward(torch.zeros(1, *passed.shape[1:], dtype=torch.float32, device="cpu"))
    torch.set_rng_state(state)
    slope = layer.forward(torch.ones_like(offset)) - offset
    layer.training = False
    return passed * slope.to(passed) + offset.to(passed)
