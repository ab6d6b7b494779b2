r"""Kronecker factors of all plain layers (Martens and Grosse, 2015; Grosse and Martens, 2016), by curvlinops.

For a layer that is used at T positions of a datum, with inputs a (the constant 1 of the bias included) and gradients g at
its output, summed over the rows of a root of the output Hessian,

.. math:: H \approx B \otimes \tfrac1N A, \qquad A = \sum_n \tfrac1T \sum_t a_{nt} a_{nt}^\top, \qquad B = \sum_n \sum_t
   g_{nt} g_{nt}^\top,

K-FAC "expand" of Eschenhagen et al. (2023). For one datum and T = 1 it is the exact block of H.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mola.errors import MissingExtraError
from mola.network import Inputs, call, without_autocast
from mola.network.calling import Differentiable
from mola.whole.jacobians import Layer, size_of, usable
from mola.whole.spectra import LayerSpectrum

__all__ = ["KroneckerFactors", "require_curvlinops"]


def require_curvlinops() -> ModuleType:
    """The curvature library.

    Returns:
        The module.

    Raises:
        MissingExtraError: if it is not installed.
    """
    try:
        with warnings.catch_warnings():
            # A dependency of it uses torch.jit.script, which newer versions of torch advise against: not the caller's concern.
            warnings.simplefilter("ignore", DeprecationWarning)
            import curvlinops
    except ImportError as error:
        raise MissingExtraError(
            feature="structure 'kron' of all layers", package="curvlinops-for-pytorch", extra="curvature"
        ) from error
    return curvlinops


class _Logits(nn.Module):
    """A network as curvlinops calls it, remembering the logits of the last pass."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.logits: Tensor | None = None
        object.__setattr__(self, "_differentiable", Differentiable(network))  # not a second path to the same layers

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits with gradients."""
        self.logits = call(self._differentiable, inputs)  # type: ignore[arg-type]
        return self.logits


class KroneckerFactors:
    """Sums over data of the two factors of every layer, in float64.

    Args:
        network: in eval mode; its hooks are as before after every batch.
        layers: those that are meant.
    """

    def __init__(self, network: nn.Module, layers: tuple[Layer, ...]) -> None:
        """Start from nothing."""
        # The library sums in the network's precision, and rounding in half precision outweighs most eigenvalues.
        self.lifted = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in network.parameters())
        if self.lifted:
            network = copy.deepcopy(network).float()
        self.network, self.layers = _Logits(network), layers
        own = dict(network.named_parameters())
        self.parameters = [own[name] for layer in layers for name in layer.parameters]
        self.inputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.count = 0

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more batch; gives the logits (n, C)."""
        curvlinops = require_curvlinops()
        size = size_of(inputs)
        hooks = [dict(module._forward_hooks) | dict(module._forward_pre_hooks) for module in self._modules()]
        try:
            with torch.inference_mode(False), torch.enable_grad(), without_autocast(self.parameters[0].device):
                inputs = usable(tree_map(_lifted, inputs) if self.lifted else inputs)
                operator = curvlinops.KFACLinearOperator(
                    self.network,
                    nn.CrossEntropyLoss(reduction="sum"),
                    self.parameters,
                    [(inputs, torch.zeros(size, dtype=torch.int64, device=self.parameters[0].device))],
                    check_deterministic=False,
                    fisher_type="type-2",
                    kfac_approx="expand",
                    num_per_example_loss_terms=1,
                    separate_weight_and_bias=False,
                    num_data=1,
                    batch_size_fn=size_of,
                )
                operator.compute_kronecker_factors()
        finally:
            for module, before in zip(self._modules(), hooks, strict=True):
                for kind in (module._forward_hooks, module._forward_pre_hooks):
                    for key in [key for key in kind if key not in before]:
                        del kind[key]
        state: dict[str, dict[str, Tensor]] = operator.state_dict()
        for total, found in (
            (self.inputs, state["input_covariances"]),
            (self.gradients, state["gradient_covariances"]),
        ):
            for name, factor in found.items():
                factor = factor.detach().cpu().double()
                total[name] = total[name] + factor if name in total else factor
        self.count += size
        logits, self.network.logits = self.network.logits, None
        assert logits is not None
        return logits.detach()

    def _modules(self) -> Sequence[Any]:
        return [self.network.network.get_submodule(layer.name) for layer in self.layers]

    def spectra(self) -> list[LayerSpectrum]:
        """Every layer in the eigenbases of its factors."""
        return [self._spectrum(layer) for layer in self.layers]

    def _spectrum(self, layer: Layer) -> LayerSpectrum:
        name = ".".join(filter(None, ("network", layer.name)))
        # Without a weight there is the constant 1 alone, whose mean square is 1.
        given = self.inputs[name] / self.count if layer.weight else torch.ones(1, 1, dtype=torch.float64)
        resolution = torch.finfo(self.parameters[0].dtype).eps
        (above, left), (across, right) = (_eigensystem(factor, resolution) for factor in (self.gradients[name], given))
        return LayerSpectrum(torch.outer(above, across), left, right)


def _lifted(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value


def _eigensystem(matrix: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    # Below, all is rounding: a direction that the data say nothing of, such as adding the same to all logits, is to have none.
    values = torch.where(values > resolution * values.max(), values, 0)
    return values, vectors.contiguous()  # rows in order, as they come back from a file
