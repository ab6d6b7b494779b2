"""From inputs to probabilities and uncertainty as one module without choices: what is written to a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from mola.choices import did_you_mean
from mola.errors import OptionError
from mola.export.folding import fold
from mola.export.moments import Joint, JointMoments
from mola.export.signature import Signature
from mola.features import capture
from mola.laplace import SPARE
from mola.networks import undisturbed
from mola.posterior import MoLA
from mola.uncertainty import entropy_of_all, share_of, softmax_and_entropy, spread_draws

__all__ = ["OUTPUTS", "Exported", "check_outputs"]

OUTPUTS = ("probabilities", "label", "confidence", "entropy", "mutual_information", "ood_score")
"""What a graph can give, and gives unless told otherwise."""


def check_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """Names of outputs, in the order of `OUTPUTS`.

    Raises:
        OptionError: if there is none, or one is unknown.
    """
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    unknown = [name for name in wanted if name not in OUTPUTS]
    if unknown or not wanted:
        message = f"outputs: expected some of {', '.join(OUTPUTS)}; got {', '.join(map(str, unknown)) or 'none'}."
        message += did_you_mean(unknown[0], OUTPUTS) if unknown else ""
        raise OptionError(message)
    return tuple(name for name in OUTPUTS if name in wanted)


class Exported(nn.Module):
    """A posterior as one graph: the K networks, and the Bayesian head as constants.

    Every output equals what `posterior.predict` gives, to rounding. Run it once before it is traced: constants are made
    when they are first needed.

    Args:
        posterior: made by `mola.fit`, `mola.ensemble` or `mola.load`.
        signature: the inputs.
        outputs: which of `OUTPUTS`.
        float16: the networks are in half precision, and floating-point inputs are converted to it.
        preparation: a module that the one input goes through first, such as bytes to normalised pixels.

    Raises:
        OptionError: if the posterior is no MoLA, or some of its components have curvature and others do not.
    """

    def __init__(
        self,
        posterior: MoLA,
        signature: Signature,
        outputs: Sequence[str] = OUTPUTS,
        *,
        float16: bool = False,
        preparation: nn.Module | None = None,
    ) -> None:
        """Fold the posterior of each component.

        Raises:
            OptionError: if it cannot be exported.
        """
        super().__init__()
        if not isinstance(posterior, MoLA):
            message = (
                f"export takes a posterior of mola.fit, mola.ensemble or mola.load, got {type(posterior).__name__}. Over "
                f"last layers a prediction is a closed form of constants; other mixtures need gradients, drawn weights or "
                f"networks of their own. Pass the networks to mola.fit, and a trained Mimo to mola.mimo_mola."
            )
            raise OptionError(message)
        components = posterior.components
        self.signature, self.outputs, self.float16 = signature, check_outputs(outputs), float16
        self.link, self.preparation = posterior.link, preparation
        self.networks = nn.ModuleList(posterior.networks)
        self.heads = [component.head for component in components]
        ready = [component.prepare() for component in components]
        if any(one is None for one in ready) and not all(one is None for one in ready):
            message = "export: some components have curvature and others have none. Export a posterior of one kind."
            raise OptionError(message)
        self.has_curvature = ready[0] is not None
        folded = [
            fold(one, bias=head.has_bias)
            for one, head in zip(ready, self.heads, strict=True)
            if one is not None and head
        ]
        self.folded = nn.ModuleList(folded)
        self.register_buffer("weights", posterior.weights.to(torch.float32))
        if any(one.dtype == torch.float64 for one in folded):
            self.register_buffer("weights", posterior.weights.to(torch.float64))

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone: the networks are borrowed, and evaluated whatever their mode."""
        self.training = mode
        return self

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Outputs by name.

        Args:
            tensors: the inputs, in the signature's order.

        Returns:
            "probabilities" (n, C), and (n,) of all others.
        """
        if self.preparation is not None:
            tensors = tuple(self.preparation(tensor) for tensor in tensors)
        if self.float16:
            tensors = tuple(tensor.half() if tensor.is_floating_point() else tensor for tensor in tensors)
        inputs = self.signature.inputs(tensors)
        with undisturbed(*self.networks):
            seen = [capture(network, head, inputs) for network, head in zip(self.networks, self.heads, strict=True)]
        logits = [one.logits.to(torch.promote_types(one.logits.dtype, torch.float32)) for one in seen]
        mean = torch.cat(logits)
        features = [one.features.to(values.dtype) for one, values in zip(seen, logits, strict=True)]
        joint = Joint(list(self.folded), features) if self.has_curvature else None  # type: ignore[arg-type]
        moments = JointMoments(mean, mean, joint)  # type: ignore[arg-type]
        probs = self._mixed(self.link(moments))
        make: dict[str, Callable[[], Tensor]] = {
            "probabilities": lambda: probs,
            "label": lambda: probs.argmax(-1),
            "confidence": lambda: probs.amax(-1),
            "entropy": lambda: _entropy(probs),
            "mutual_information": lambda: _entropy(probs) * self._epistemic_share(mean, joint),
            "ood_score": lambda: self._ood_score(mean, joint, probs),
        }
        return {name: make[name]() for name in self.outputs}

    def _by_component(self, values: Tensor) -> Tensor:
        """(K n, ...) as (K, n, ...)."""
        return values.view(len(self.networks), -1, *values.shape[1:])

    def _mixed(self, values: Tensor) -> Tensor:
        """Weighted sum over components of (K n, ...)."""
        parts = self._by_component(values)
        weights: Tensor = self.weights  # type: ignore[assignment]
        return (weights.to(values.dtype).view(-1, *[1] * (parts.dim() - 1)) * parts).sum(0)

    def _epistemic_share(self, mean: Tensor, joint: Joint | None) -> Tensor:
        """`mola.uncertainty.epistemic_share`, on the same draws."""
        if joint is None:
            probs, entropies = softmax_and_entropy(mean, 1)
            by_quarter = self._mixed(probs)[:, None].expand(-1, 4, -1)
            return share_of(entropy_of_all(by_quarter), self._mixed(entropies))
        counts = [spread_draws(mean.shape[1], one.width) for one in joint.folded]
        if len(set(counts)) == 1:
            drawn = mean[:, :, None] + joint.deviations(counts[0], 0, "evenly")
            by_quarter, within = _by_quarter(drawn)
        else:  # networks of very different widths: one after the other
            parts = zip(self._by_component(mean), joint.alone(), counts, strict=True)
            each = [_by_quarter(own[:, :, None] + one.deviations(count, 0, "evenly")) for own, one, count in parts]
            by_quarter, within = (torch.cat(values) for values in zip(*each, strict=True))
        mixed = self._mixed(by_quarter.flatten(1)).view(-1, 4, mean.shape[1])
        return share_of(entropy_of_all(mixed), self._mixed(within))

    def _ood_score(self, mean: Tensor, joint: Joint | None, probs: Tensor) -> Tensor:
        if joint is None:
            return 1 - probs.amax(-1)
        # Where a length is 0, all features are, and so are the logits: nothing is known there, and 0 over little is 0. A length
        # whose square is next to nothing has lost its digits.
        length, centred = joint.length()[:, None], mean - mean.mean(-1, keepdim=True)
        least = (torch.finfo(mean.dtype).tiny * SPARE) ** 0.5
        scaled = torch.where((length < least) & (centred != 0), math.nan, centred / length.clamp_min(least))
        return -self._mixed(scaled).amax(-1)


def _by_quarter(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Mean probabilities (n, 4, C) of each quarter of the draws (n, C, S), and the mean entropy (n,) of all."""
    # Draws are the last axis: reductions over the classes then run along memory.
    probs, entropies = softmax_and_entropy(drawn, 1)
    quarters = probs.view(*probs.shape[:2], 4, probs.shape[2] // 4)
    return quarters.mean(3).transpose(1, 2), entropies.mean(-1)


def _entropy(probs: Tensor) -> Tensor:
    """Entropy in nats over the last axis, with fewer operations than `torch.special.entr` becomes in a graph."""
    return -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
