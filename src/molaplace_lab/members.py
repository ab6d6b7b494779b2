"""Functions for seeds, outputs and saved tensors, shared by the baselines that average several members."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from molaplace.errors import OptionError
from molaplace.likelihoods import ClassificationLikelihood, Gaussian, Likelihood, as_likelihood
from molaplace.network import Inputs, call, check_finite, check_logits
from molaplace.numerics import check_seed, to_float64


def derived_seeds(seed: int, purpose: int, count: int) -> list[int]:
    """Derive `count` seeds from one seed. A larger `count` only appends seeds; different purposes give independent seeds."""
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    own = int(torch.randint(2**62, (purpose + 1,), generator=generator)[-1])
    return torch.randint(2**62, (count,), generator=generator.manual_seed(own)).tolist()


def member_output(network: nn.Module, inputs: Inputs, likelihood: Likelihood) -> Tensor:
    """Run a network that is already in eval mode and return its probabilities (n, C), or its means (n, D) in the targets' units."""
    outputs = call(network, inputs)
    outputs = likelihood.check_outputs(outputs, [("", outputs.shape)])
    check_finite(outputs[:, :0], outputs)
    check_logits(network, inputs, outputs, likelihood)
    exact = to_float64(outputs)
    if isinstance(likelihood, ClassificationLikelihood):
        point = likelihood.probabilities(exact)
    else:
        assert isinstance(likelihood, Gaussian)
        point = likelihood.in_units(likelihood.means(exact))
    return point.to(torch.promote_types(outputs.dtype, torch.float32)).to(outputs.device)


def homoscedastic(likelihood: str | Likelihood, method: str) -> Likelihood:
    """Return the likelihood, or raise `OptionError` if it predicts variances, which averaging the means would discard."""
    meaning = as_likelihood(likelihood)
    if isinstance(meaning, Gaussian) and meaning.heteroscedastic:
        raise OptionError(
            f"{method} averages means, so it would discard predicted variances. For networks that also predict variances, use "
            f"mola.fit or mola.ensemble."
        )
    return meaning


def all_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, keyed by name, including buffers that a state dict omits."""
    return {name: tensor.detach() for name, tensor in [*network.named_parameters(), *network.named_buffers()]}


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, keyed by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def shape_differences(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of missing, unexpected and wrongly shaped tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    return sorted({name for name, _ in shapes.items() ^ expected.items()})
