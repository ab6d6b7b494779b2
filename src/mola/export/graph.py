"""A posterior as one module without choices, from inputs to probabilities and uncertainty: what is written to a file.

`Signature` turns any batch that a network takes into tensors with names, and back. `Pixels` puts the step from bytes to what the
networks are given inside the graph, so that a file can take images as they are stored. `Exported` is the graph itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from mola.errors import DataError, OptionError
from mola.export.moments import GraphPosterior, Joint
from mola.laplace import SPARE, LogitMoments
from mola.likelihood import Likelihood
from mola.network import DenseFeatures, Inputs, capture, undisturbed
from mola.options import did_you_mean
from mola.outliers import COMBINED, FAR_FIELD, LEAST_SURE
from mola.posterior import MoLA
from mola.uncertainty import (
    energy_score,
    entropy_of_all,
    expected_sigmoid,
    label_energy_score,
    outlier_score,
    share_of,
    softmax_and_entropy,
    spread_draws,
)

LABELS = "labels"


@dataclass(frozen=True)
class Signature:
    """Names of the tensors among a network's inputs, and what else it is called with.

    Args:
        kind: "tensor", "tuple" (positional arguments) or "mapping" (keyword arguments).
        names: of the tensors, in order.
        places: where each tensor stands: its position or key.
        fixed: what is no tensor (flags, None), by position or key: part of the graph.
    """

    kind: str
    names: tuple[str, ...]
    places: tuple[Any, ...] = ()
    fixed: Mapping[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(example: Inputs, network: nn.Module) -> Signature:
        """The signature of a batch.

        Args:
            example: a tensor, a tuple of positional or a mapping of keyword arguments.
            network: says how its positional arguments are called.

        Returns:
            Names and places.
        """
        if isinstance(example, Tensor):
            found = Signature("tensor", ("input",), (0,))
        elif isinstance(example, (Mapping, tuple, list)):
            items = dict(example.items() if isinstance(example, Mapping) else enumerate(example))
            items.pop(LABELS, None)
            places = tuple(key for key, value in items.items() if isinstance(value, Tensor))
            kind = "mapping" if isinstance(example, Mapping) else "tuple"
            names = tuple(map(str, places)) if kind == "mapping" else _positional_names(network, places)
            fixed = {key: value for key, value in items.items() if not isinstance(value, Tensor)}
            found = Signature(kind, names, places, fixed)
        else:
            found = Signature("none", ())
        nested = [key for key, value in found.fixed.items() if isinstance(value, (Mapping, tuple, list))]
        if not found.names or nested:
            raise DataError(
                f"example: expected one batch as a tensor, a tuple of tensors or a mapping of tensors; got "
                f"{type(example).__name__}{f' with nested values at {nested}' if nested else ''}. Pass what posterior.predict takes."
            )
        found._check_batch(example)
        return found

    def _check_batch(self, example: Inputs) -> None:
        sizes = {name: tuple(tensor.shape) for name, tensor in zip(self.names, self.tensors(example), strict=True)}
        if (
            any(not shape or shape[0] == 0 for shape in sizes.values())
            or len({shape[0] for shape in sizes.values()}) > 1
        ):
            raise DataError(
                f"example: expected the batch as first axis of every tensor, at least one row; got shapes {sizes}."
            )
        for name, tensor in zip(self.names, self.tensors(example), strict=True):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise DataError(f"example: {name} holds NaN or infinite numbers. Pass a batch as the network sees it.")

    def tensors(self, inputs: Inputs) -> list[Tensor]:
        """The tensors of a batch, in order.

        Args:
            inputs: a batch like the example; arrays are taken too.

        Returns:
            One for each name.
        """
        try:
            values = [inputs] if self.kind == "tensor" else [inputs[place] for place in self.places]
            return [torch.as_tensor(value) for value in values]
        except (TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
            expected = {"tensor": "one tensor", "tuple": "a tuple of tensors", "mapping": "a mapping of tensors"}[
                self.kind
            ]
            raise DataError(
                f"inputs: expected {expected} for {', '.join(self.names)}; got {type(inputs).__name__}."
            ) from error

    def inputs(self, tensors: Sequence[Tensor]) -> Inputs:
        """What the network is called with."""
        if self.kind == "tensor":
            return tensors[0]
        values = dict(zip(self.places, tensors, strict=True)) | dict(self.fixed)
        return values if self.kind == "mapping" else tuple(values[position] for position in sorted(values))

    def as_json(self) -> dict[str, Any]:
        """Kind, names and places."""
        return {"kind": self.kind, "names": [*self.names], "places": [*self.places]}

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Signature:
        """What `as_json` made."""
        return Signature(entry["kind"], tuple(entry["names"]), tuple(entry["places"]))


def _positional_names(network: nn.Module, places: Sequence[int]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, one in inspect.signature(network.forward).parameters.items() if one.kind in kinds]
    return tuple(known[place] if place < len(known) else f"input_{place}" for place in places)


class Pixels(nn.Module):
    """`(x / 255 - mean) / std` by channel, of bytes (n, channels, height, width).

    Args:
        mean: of pixels between 0 and 1; one for each channel, or one for all.
        std: standard deviations likewise.
    """

    def __init__(self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> None:
        super().__init__()
        if not len(mean) or len(mean) != len(std) or not all(value > 0 for value in std):
            raise OptionError(f"Pixels: expected as many means as positive standard deviations, got {mean} and {std}.")
        self.statistics = tuple(mean), tuple(std)
        self.register_buffer("mean", torch.tensor(self.statistics[0], dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(self.statistics[1], dtype=torch.float32).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels in float32."""
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        return (pixels.to(torch.float32) / 255 - mean) / std

    def extra_repr(self) -> str:
        """The statistics."""
        mean, std = self.statistics
        return f"mean={mean}, std={std}"


DISTANCE = "distance"
OUTPUTS = ("probabilities", "label", "confidence", "entropy", "mutual_information", "ood_score", DISTANCE)
"""What a graph can give; "distance" where the posterior knows how far inputs are from the training classes."""

NUMBERS = ("mean", "variance", "epistemic", "aleatoric", "ood_score", DISTANCE)
"""The same where outputs are numbers: in the targets' units, and variances that add up."""


def check_outputs(outputs: Sequence[str] | None, posterior: MoLA) -> tuple[str, ...]:
    """Names of outputs, in the order of `OUTPUTS`, or of `NUMBERS` where the posterior predicts numbers.

    Args:
        outputs: some of them; None: all that the posterior has.
        posterior: what is exported.

    Returns:
        The names.
    """
    known = OUTPUTS if posterior.likelihood.discrete else NUMBERS
    if outputs is None:
        return tuple(name for name in known if name != DISTANCE or posterior.has_distances)
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        message = f"outputs: expected some of {', '.join(known)}; got {', '.join(map(str, unknown)) or 'none'}."
        message += did_you_mean(unknown[0], known) if unknown else ""
        raise OptionError(message)
    if DISTANCE in wanted and not posterior.has_distances:
        raise OptionError(f"outputs: {DISTANCE!r} cannot be given: {posterior._why_no_distances()}")
    return tuple(name for name in known if name in wanted)


class Exported(nn.Module):
    """A posterior as one graph: the K networks, and the Bayesian head as constants.

    Every output equals what `posterior.predict` gives, to rounding. Run it once before it is traced: constants are made
    when they are first needed.

    Args:
        posterior: made by `mola.fit`, `mola.ensemble` or `mola.load`.
        signature: the inputs.
        outputs: which of `OUTPUTS`; None: all that the posterior has.
        float16: the networks are in half precision, and floating-point inputs are converted to it.
        preparation: a module that the one input goes through first, such as bytes to normalised pixels.
    """

    def __init__(
        self,
        posterior: MoLA,
        signature: Signature,
        outputs: Sequence[str] | None = None,
        *,
        float16: bool = False,
        preparation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(posterior, MoLA):
            raise OptionError(
                f"export takes a posterior of mola.fit, mola.ensemble or mola.load, got {type(posterior).__name__}. Over "
                f"last layers a prediction is a closed form of constants; other mixtures need gradients, drawn weights or "
                f"networks of their own. Pass the networks to mola.fit, and a trained Mimo to mola.mimo_mola."
            )
        components = posterior.components
        self.likelihood: Likelihood = posterior.likelihood
        self.likelihoods = [component.likelihood for component in components]
        self.has_distances = posterior.has_distances
        self.signature, self.outputs, self.float16 = signature, check_outputs(outputs, posterior), float16
        self.link, self.cooling, self.preparation = posterior.link, posterior.cooling, preparation
        self.networks = nn.ModuleList(posterior.networks)
        self.heads = [component.head for component in components]
        ready = [component.prepare() for component in components]
        if any(one is None for one in ready) and not all(one is None for one in ready):
            raise OptionError(
                "export: some components have curvature and others have none. Export a posterior of one kind."
            )
        self.has_curvature = ready[0] is not None
        usual = self.cooling.usual
        self.usual_score = None if usual is None or not posterior.has_distances else usual.score_at(posterior.weights)
        self.posteriors = [
            GraphPosterior(one, bias=head.has_bias)
            for one, head in zip(ready, self.heads, strict=True)
            if one is not None and head
        ]
        self.constants = nn.ModuleList(self.posteriors)
        self.register_buffer("weights", posterior.weights.to(torch.float32))
        if any(one.posterior.dtype == torch.float64 for one in self.posteriors):
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
            "probabilities" (n, C), and (n,) of all others; for yes or no (n, C) of all that is said of an answer. Of numbers, mean
            and variances (n, D). Of outputs at many positions, all of them in the networks' layout.
        """
        if self.preparation is not None:
            tensors = tuple(self.preparation(tensor) for tensor in tensors)
        if self.float16:
            tensors = tuple(tensor.half() if tensor.is_floating_point() else tensor for tensor in tensors)
        inputs = self.signature.inputs(tensors)
        with undisturbed(*self.networks):
            pairs = zip(self.networks, self.heads, strict=True)
            found = [capture(network, head, inputs, self.likelihood) for network, head in pairs]
        # A graph has no turns: all positions of a batch are rows at once.
        seen = [one.all_rows() if isinstance(one, DenseFeatures) else one for one in found]
        logits = [one.logits.to(torch.promote_types(one.logits.dtype, torch.float32)) for one in seen]
        mean = torch.cat(logits)
        joint = None
        if self.has_curvature:
            features = [one.features.to(values.dtype) for one, values in zip(seen, logits, strict=True)]
            lifted = [head.lift(values) for head, values in zip(self.heads, features, strict=True) if head is not None]
            joint = Joint(self.posteriors, lifted)
        spreads = [None] * len(logits) if joint is None else joint.spreads
        each = [
            LogitMoments(values, spread, None, self.likelihood) for values, spread in zip(logits, spreads, strict=True)
        ]
        layout = found[0].layout if isinstance(found[0], DenseFeatures) else None
        made = self._answers(each, mean, joint) if self.likelihood.discrete else self._numbers(each, joint)
        if layout is None:
            return made
        return {name: layout.map(rows) if rows.dim() == 1 else layout.outputs(rows) for name, rows in made.items()}

    def _answers(self, each: Sequence[LogitMoments], mean: Tensor, joint: Joint | None) -> dict[str, Tensor]:
        divisors = self._divisors(each)
        moments = LogitMoments(mean, joint, None, self.likelihood)
        probs = self._mixed(self.link(moments if divisors is None else moments.divided(divisors)))
        answers = self.likelihood.answer_probabilities(probs)
        make: dict[str, Callable[[], Tensor]] = {
            "probabilities": lambda: probs,
            "label": lambda: answers.argmax(-1),
            "confidence": lambda: answers.amax(-1),
            "entropy": lambda: _entropy(answers),
            "mutual_information": lambda: _entropy(answers) * self._epistemic_share(mean, joint, divisors),
            "ood_score": lambda: self._ood_score(each, mean, joint, answers),
            DISTANCE: lambda: self.cooling.log_distance(each, self._weights).exp(),
        }
        return {name: make[name]() for name in self.outputs}

    def _numbers(self, each: Sequence[LogitMoments], joint: Joint | None) -> dict[str, Tensor]:
        # What is said of numbers: the moments of a mixture of normal distributions, in the targets' units.
        likelihoods: list[Any] = self.likelihoods
        units, pairs = likelihoods[0].variance_in_units, list(zip(likelihoods, each, strict=True))
        means = torch.stack([likelihood.probabilities(one.mean) for likelihood, one in pairs])
        noises = self.cooling.temperature**2 * torch.stack([one.noise_variance(own.mean) for one, own in pairs])
        variances = noises
        if joint is not None:
            variances = noises + self.cooling.temperature**2 * self._by_component(joint.variance())
        if self.cooling.exponent > 0:
            variances = variances * self.cooling.growth(each, self._weights).square()[:, None]
        shares = self._weights.to(means.dtype)[:, None, None]
        mean = (shares * means).sum(0)
        between = (shares * (means - mean).square()).sum(0)
        aleatoric, total = units((shares * noises).sum(0)), units((shares * variances).sum(0))

        def score() -> Tensor:
            if joint is None:
                return (between / aleatoric).log1p().mean(1)
            if not self.has_distances:
                return self._mixed(joint.length().log())
            excess = self.cooling.excess(each).log()
            return self.cooling.log_distance(each, self._weights) + self._weights.to(excess.dtype) @ excess

        make: dict[str, Callable[[], Tensor]] = {
            "mean": lambda: mean,
            "variance": lambda: total + between,
            "epistemic": lambda: total - aleatoric + between,
            "aleatoric": lambda: aleatoric,
            "ood_score": score,
            DISTANCE: lambda: self.cooling.log_distance(each, self._weights).exp(),
        }
        return {name: make[name]() for name in self.outputs}

    @property
    def _weights(self) -> Tensor:
        return self.get_buffer("weights")

    def _divisors(self, each: Sequence[LogitMoments]) -> Tensor | None:
        # What the logits (K n, C) of all networks are divided by (K n,); None where they stay as they are.
        if self.cooling.changes_nothing:
            return None
        return self.cooling.divisors(each, self._weights).expand(-1, each[0].mean.shape[0]).flatten()

    def _by_component(self, values: Tensor) -> Tensor:
        # (K n, ...) as (K, n, ...).
        return values.view(len(self.networks), -1, *values.shape[1:])

    def _mixed(self, values: Tensor) -> Tensor:
        # Weighted sum over components of (K n, ...).
        parts = self._by_component(values)
        return (self._weights.to(values.dtype).view(-1, *[1] * (parts.dim() - 1)) * parts).sum(0)

    def _epistemic_share(self, mean: Tensor, joint: Joint | None, divisors: Tensor | None) -> Tensor:
        if divisors is not None:
            mean = mean / divisors[:, None]
        if not self.likelihood.competing:
            return self._share_of_each_label(mean, joint, divisors)
        if joint is None:
            probs, entropies = softmax_and_entropy(mean, 1)
            by_quarter = self._mixed(probs)[:, None].expand(-1, 4, -1)
            return share_of(entropy_of_all(by_quarter), self._mixed(entropies))
        counts = [spread_draws(mean.shape[1], one.width) for one in joint.spreads]
        deviations = joint.drawn(counts, 0, "evenly")
        if divisors is not None:
            pairs = zip(deviations, self._by_component(divisors), strict=True)
            deviations = [drawn / divisor[:, None, None] for drawn, divisor in pairs]
        if len(set(counts)) == 1:
            by_quarter, within = _by_quarter(mean[:, :, None] + torch.cat(deviations))
        else:  # networks of very different widths: one after the other
            parts = zip(self._by_component(mean), deviations, strict=True)
            each = [_by_quarter(own[:, :, None] + drawn) for own, drawn in parts]
            by_quarter, within = (torch.cat(values) for values in zip(*each, strict=True))
        mixed = self._mixed(by_quarter.flatten(1)).view(-1, 4, mean.shape[1])
        return share_of(entropy_of_all(mixed), self._mixed(within))

    def _share_of_each_label(self, mean: Tensor, joint: Joint | None, divisors: Tensor | None) -> Tensor:
        # The same for labels that are yes or no, without draws: each logit is one Gaussian number.
        variance = torch.zeros_like(mean) if joint is None else joint.variance()
        if divisors is not None:
            variance = variance / divisors[:, None].square()
        yes, within = (self._mixed(values) for values in expected_sigmoid(mean, variance, mean.dtype))
        return share_of(_entropy(torch.stack([1 - yes, yes], -1)), within)

    @property
    def ood_score_name(self) -> str:
        """Which outlier score it gives: the posterior's."""
        if not self.likelihood.discrete:
            return "variance" if not self.has_curvature else "distance" if self.has_distances else "length"
        if not self.has_curvature:
            return LEAST_SURE
        return FAR_FIELD if self.usual_score is None else COMBINED

    def _ood_score(self, each: Sequence[LogitMoments], mean: Tensor, joint: Joint | None, answers: Tensor) -> Tensor:
        competing = self.likelihood.competing
        if joint is None:
            sure = answers.amax(-1)
            return 1 - (sure if competing else sure.mean(-1))
        far_field = self._far_field(mean, joint)
        if self.usual_score is None:
            return far_field
        excess = self.cooling.excess(each).flatten()[:, None]
        energy = self._mixed((energy_score if competing else label_energy_score)(mean / excess.square()))
        terms = [far_field, energy, self.cooling.log_distance(each, self._weights)]
        return outlier_score(torch.stack(terms), self.usual_score)

    def _far_field(self, mean: Tensor, joint: Joint) -> Tensor:
        # Where a length is 0, all features are, and so are the logits: nothing is known there, and 0 over little is 0. A length
        # whose square is next to nothing has lost its digits.
        competing = self.likelihood.competing
        length, centred = joint.length()[:, None], mean - mean.mean(-1, keepdim=True) if competing else mean
        least = (torch.finfo(mean.dtype).tiny * SPARE) ** 0.5
        scaled = torch.where((length < least) & (centred != 0), math.nan, centred / length.clamp_min(least))
        mixed = self._mixed(scaled)
        return -mixed.amax(-1) if competing else -mixed.abs().mean(-1) / 2


def _by_quarter(drawn: Tensor) -> tuple[Tensor, Tensor]:
    # Mean probabilities (n, 4, C) of each quarter of the draws (n, C, S), and the mean entropy (n,) of all.
    # Draws are the last axis: reductions over the classes then run along memory.
    probs, entropies = softmax_and_entropy(drawn, 1)
    quarters = probs.view(*probs.shape[:2], 4, probs.shape[2] // 4)
    return quarters.mean(3).transpose(1, 2), entropies.mean(-1)


def _entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
