"""A posterior as a traceable module that maps named tensors to the fields of a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from molaplace.errors import DataError, OptionError
from molaplace.images import Normalisation
from molaplace.laplace_mixture import NO_DISTANCES
from molaplace.network import Inputs, invalid_inputs
from molaplace.network.calling import LABELS, signature_of
from molaplace.numerics import as_tensor
from molaplace.options import did_you_mean
from molaplace.posterior import MoLA

OUTPUTS = ("probs", "label", "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance")
"""Fields of `mola.Prediction` that are exported by default; "distance" is included only if the posterior can compute distances."""

REGRESSION_OUTPUTS = ("mean", "std", "variance", "epistemic", "aleatoric", "ood_score", "distance")
"""Fields of `mola.RegressionPrediction` that are exported by default."""

MORE_OUTPUTS = ("logit_mean", "logit_variance")
MORE_REGRESSION_OUTPUTS = ("within", "between", "component_mean", "component_variance", "component_noise")
"""Fields that are exported only if they are listed in `outputs`."""


@dataclass(frozen=True)
class Signature:
    """Structure of a batch and names of its tensors.

    Args:
        kind: structure of the batch: "tensor", "tuple" (positional arguments) or "mapping" (keyword arguments).
        names: names of the tensors, in the order in which they are passed.
    """

    kind: str
    names: tuple[str, ...]

    @staticmethod
    def of(example: Inputs, network: nn.Module) -> Signature:
        """Return the signature of a batch; positional arguments are named after the parameters of the network's `forward`."""
        kind = "tensor"
        tensors: dict[str, Any] = {"input": example}
        if isinstance(example, Mapping):
            kind = "mapping"
            tensors = {key: value for key, value in example.items() if key != LABELS}
        elif isinstance(example, (tuple, list)):
            kind = "tuple"
            known = list(signature_of(network).parameters)
            names = [*known, *(f"input_{index}" for index in range(len(known), len(example)))]
            tensors = dict(zip(names, example, strict=False))
        if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise DataError(
                f"must be one batch as a tensor, a tuple of tensors or a mapping of tensors; got "
                f"{type(example).__name__} of {[type(value).__name__ for value in tensors.values()]}.",
                argument="example",
            )
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        if (
            any(not shape or shape[0] == 0 for shape in shapes.values())
            or len({shape[0] for shape in shapes.values()}) > 1
        ):
            raise DataError(
                f"must be tensors with the same batch size (at least 1) along their first axis; got shapes {shapes}.",
                argument="example",
            )
        return Signature(kind, tuple(tensors))

    def tensors(self, inputs: Inputs) -> list[Tensor]:
        """Return the tensors of a batch in order, converting NumPy arrays; the batch must be structured like the example."""
        try:
            values = [inputs] if self.kind == "tensor" else inputs
            if self.kind == "mapping":
                values = [inputs[name] for name in self.names]
            return [as_tensor(value) for value, _ in zip(values, self.names, strict=True)]
        except (TypeError, KeyError, ValueError, RuntimeError) as error:
            expected = "one tensor" if self.kind == "tensor" else f"a {self.kind} of tensors"
            raise DataError(
                f"must be {expected} for {', '.join(self.names)}; got {type(inputs).__name__}.", argument="inputs"
            ) from error

    def inputs(self, tensors: Sequence[Tensor]) -> Inputs:
        """Assemble tensors into network inputs."""
        if self.kind == "tensor":
            return tensors[0]
        return tuple(tensors) if self.kind == "tuple" else dict(zip(self.names, tensors, strict=True))


class Pixels(nn.Module):
    """A module that maps bytes (n, channels, height, width) to `(x / 255 - mean) / std`, so that an exported model accepts raw images.

    Args:
        mean: pixel means on a scale from 0 to 1, one per channel or one for all channels.
        std: pixel standard deviations on the same scale, one per channel or one for all channels.
    """

    def __init__(self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> None:
        super().__init__()
        self.normalisation: Normalisation = Normalisation(tuple(mean), tuple(std))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the normalised pixels as float32; raise `DataError` unless the pixels are bytes."""
        if pixels.dtype != torch.uint8:
            raise DataError(
                f"must contain raw pixels as bytes (torch.uint8), since the exported model takes inputs of the same type; got "
                f"{pixels.dtype}. `mola.export.Pixels` divides them by 255 and normalises them.",
                argument="example",
            )
        return self.normalisation(pixels)

    def extra_repr(self) -> str:
        """Return the means and standard deviations as text."""
        return f"mean={self.normalisation.mean}, std={self.normalisation.std}"


def check_outputs(outputs: Sequence[str] | None, posterior: MoLA) -> tuple[str, ...]:
    """Check the requested outputs and return them in field order; if none are given, return the posterior's defaults."""
    default = OUTPUTS if posterior.likelihood.classification else REGRESSION_OUTPUTS
    if outputs is None:
        return tuple(name for name in default if name != "distance" or posterior.has_distances)
    known = default + (MORE_OUTPUTS if posterior.likelihood.classification else MORE_REGRESSION_OUTPUTS)
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise OptionError(
            f"must be one or more of {', '.join(known)}; got {', '.join(map(str, unknown)) or 'no names'}."
            f"{did_you_mean(unknown[0], known) if unknown else ''}",
            argument="outputs",
        )
    if "distance" in wanted and not posterior.has_distances:
        raise OptionError(f"cannot contain 'distance': {NO_DISTANCES}", argument="outputs")
    return tuple(name for name in known if name in wanted)


class PosteriorGraph(nn.Module):
    """A module that uses the posterior's own code to map the tensors of a batch to the fields that `posterior.predict` returns.

    If `float16` is True, floating-point inputs are converted to half precision for the networks. The module `preparation`, if given,
    is first applied to the single input.
    """

    def __init__(
        self,
        posterior: MoLA,
        signature: Signature,
        outputs: Sequence[str],
        *,
        float16: bool = False,
        preparation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.signature: Signature = signature
        self.outputs: tuple[str, ...] = tuple(outputs)
        self.float16: bool = float16
        self.preparation: nn.Module | None = preparation
        self.networks: nn.ModuleList = nn.ModuleList(posterior.networks)
        # A posterior inside a tuple is not registered as a submodule, so only the tensors that the trace uses become constants.
        self.held: tuple[MoLA] = (posterior,)
        self.fingerprint: str = posterior.fingerprint  # computed before the trace, which cannot read tensors

    def train(self, mode: bool = True) -> Self:
        """Set the training flag of this module only. The networks keep their flags; each forward pass runs them in eval mode."""
        self.training = mode
        return self

    def network_inputs(self, tensors: Sequence[Tensor]) -> Inputs:
        """Return the networks' inputs after preparation, in half precision if `float16` is True."""
        if self.preparation is not None:
            tensors = [self.preparation(tensor) for tensor in tensors]
        if self.float16:
            tensors = [tensor.half() if tensor.is_floating_point() else tensor for tensor in tensors]
        return self.signature.inputs(tensors)

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return the requested fields, keyed by name and shaped as in `posterior.predict`."""
        posterior = self.held[0]
        invalid = invalid_inputs(self.signature.inputs(tensors))
        with torch.no_grad():
            captured = posterior.capture(self.network_inputs(tensors))
        prediction = posterior.make_prediction(captured)
        fields = {name: getattr(prediction, name) for name in self.outputs}
        if invalid is None or not any(tensor.is_floating_point() for tensor in tensors):
            return fields
        # Runtimes differ in whether a maximum or a ReLU keeps NaN, so marks are set on the outputs.
        marks = {"label": -1, "ood_score": torch.inf}
        for name, values in fields.items():
            mask = invalid.reshape(-1, *[1] * (values.dim() - 1))
            fields[name] = torch.where(mask, marks.get(name, torch.nan), values)
        return fields
