r"""Passes over the training data: the generalised Gauss-Newton matrix in some structure, summed batch by batch.

With the output Hessian of a datum written as :math:`\Lambda = S S^\top`, the rows :math:`S^\top J` of the Jacobian make
:math:`H = \sum_n (S^\top J)^\top (S^\top J)`: its diagonal is a sum of squares, its blocks are products of rows.

Kronecker factors of all plain layers (Martens and Grosse, 2015; Grosse and Martens, 2016) come from curvlinops. For a layer
that is used at T positions of a datum, with inputs a (the constant 1 of the bias included) and gradients g at its output,
summed over the rows of a root of the output Hessian,

.. math:: H \approx B \otimes \tfrac1N A, \qquad A = \sum_n \tfrac1T \sum_t a_{nt} a_{nt}^\top, \qquad B = \sum_n \sum_t
   g_{nt} g_{nt}^\top,

K-FAC "expand" of Eschenhagen et al. (2023). For one datum and T = 1 it is the exact block of H.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mola.errors import MissingExtraError, StructureTooLargeError
from mola.laplace.memory import free_memory
from mola.likelihood import CATEGORICAL, Likelihood
from mola.network import Inputs, call, without_autocast
from mola.network.calling import Differentiable
from mola.numerics import exact
from mola.whole.jacobians import Layer, Piece, Product, WeightLayout, jacobian_rows, size_of, usable
from mola.whole.spectra import Blocks, Dense, LayerSpectrum, WeightSpectrum, dense_rows

MATRICES = 4
"""Of the dense matrix's size: the sum, its eigenvectors, and what the eigensolver takes."""


class Sum(Protocol):
    """Curvature of one network, being summed."""

    explicit: int
    """Columns of the rows that are multiplied out."""

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""

    def spectrum(self) -> WeightSpectrum:
        """What was summed, in its eigenbasis."""


def roots(logits: Tensor, likelihood: Likelihood = CATEGORICAL) -> Tensor:
    r"""Directions (R, n, C) whose outer products sum to the output Hessian of each datum.

    With :math:`u = s q` and :math:`1^\top q = 1`, the Laplacian of :math:`u u^\top` is :math:`s^2 (\mathrm{diag}(q) - q
    q^\top)`, and a root of that has the rows :math:`s \sqrt{q_r} (e_r - q)`.
    """
    curvature = likelihood.curvature(logits.double())  # in float64: 1 - q of an almost certain class must not cancel
    parts = []
    if curvature.coupling is not None:
        total = curvature.coupling.sum(1, keepdim=True)
        share = curvature.coupling / total
        apart = torch.eye(share.shape[1], dtype=share.dtype, device=share.device)[:, None] - share
        parts.append((total * share.sqrt()).T[:, :, None] * apart)
    if curvature.separate is not None:
        parts.append(torch.diag_embed(curvature.separate.sqrt()).transpose(0, 1))
    return torch.cat(parts)


class DiagonalSum:
    """The diagonal, exactly.

    Args:
        network: in eval mode.
        layout: of the weights.
    """

    explicit = 0

    def __init__(self, network: nn.Module, layout: WeightLayout) -> None:
        self.network, self.layout = network, layout
        self.total = torch.zeros(layout.size, dtype=torch.float64, device="cpu")

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""
        rows = jacobian_rows(self.network, self.layout, inputs, roots)
        parts = [_squares(piece) for piece in rows.layers]
        if rows.rest is not None:
            parts.append(rows.rest.square().sum((0, 1)))
        self.total += torch.cat([part.flatten() for part in parts]).cpu().double()
        return rows.logits

    def spectrum(self) -> Blocks:
        """The diagonal is its own eigenbasis."""
        *parts, rest = self.layout.pieces(self.total)
        pairs = zip(self.layout.layers, parts, strict=True)
        return Blocks(tuple(LayerSpectrum(part.reshape(layer.rows, -1)) for layer, part in pairs), rest)


def _squares(piece: Piece | Product) -> Tensor:
    # Sum (O, I) over data and rows of the squares of a layer's rows.
    if isinstance(piece, Piece) and piece.single:
        return piece.gradients.squeeze(3).square().sum(1).T @ piece.inputs.squeeze(2).square()
    return piece.product().square().sum((0, 1))


def require_curvlinops() -> ModuleType:
    """The curvature library.

    Returns:
        The module.
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


class KroneckerSum:
    """K-FAC for layers that mix channels, the diagonal for normalisations and all the rest.

    Args:
        network: in eval mode.
        layout: of the weights.
    """

    explicit = 0

    def __init__(self, network: nn.Module, layout: WeightLayout) -> None:
        maps = tuple(layer for layer in layout.layers if not layer.scales)
        others = WeightLayout(tuple(layer for layer in layout.layers if layer.scales), layout.rest)
        self.layout = layout
        self.factors = KroneckerFactors(network, maps) if maps else None
        self.others = DiagonalSum(network, others) if others.size else None

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""
        logits = [part.add(inputs) for part in (self.others, self.factors) if part is not None]
        return logits[-1]

    def spectrum(self) -> Blocks:
        """Layers in the eigenbases of their factors."""
        maps = iter([] if self.factors is None else self.factors.spectra())
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        others = Blocks((), nothing) if self.others is None else self.others.spectrum()
        scales = iter(others.layers)
        return Blocks(tuple(next(scales if layer.scales else maps) for layer in self.layout.layers), others.rest)


class DenseSum:
    """The whole matrix, of all weights or of chosen ones.

    Args:
        network: in eval mode.
        layout: of the weights.
        chosen: places of some of them, rising; None: all.
    """

    def __init__(self, network: nn.Module, layout: WeightLayout, chosen: Tensor | None = None) -> None:
        self.network, self.layout, self.chosen = network, layout, chosen
        self.explicit = layout.size if chosen is None else len(chosen)
        self.total = torch.zeros(self.explicit, self.explicit, dtype=torch.float64, device="cpu")

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""
        rows = jacobian_rows(self.network, self.layout, inputs, roots)
        chosen = None if self.chosen is None else self.chosen.to(rows.logits.device)
        flat = dense_rows(rows, self.layout, chosen).flatten(0, 1)
        flat = exact(flat)  # before the product: in float32 its rounding outweighs a small prior precision
        self.total += (flat.T @ flat).cpu()
        return rows.logits

    def spectrum(self) -> Dense:
        """Solve the eigenproblem."""
        values, vectors = torch.linalg.eigh(self.total)
        return Dense(values.clamp_min(0), vectors.contiguous(), self.chosen, self.layout)


def check_dense_size(side: int, networks: int, advice: str) -> None:
    """Refuse a matrix that would not fit in memory.

    Args:
        side: number of weights.
        networks: how many there are.
        advice: what to use instead.
    """
    needed = 8 * side**2 * (2 * networks + MATRICES - 2)
    free = free_memory()
    if free is not None and needed > free:
        raise StructureTooLargeError(
            f"the covariance of {side} weights is a {side} x {side} matrix of {8 * side**2 / 1e9:.2f} GB; {networks} network(s) "
            f"need about {needed / 1e9:.2f} GB with the eigensolver, and {free / 1e9:.2f} GB are free. {advice}"
        )
