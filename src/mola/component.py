"""Components of a mixture: trained networks whose weights are Gaussian, in general and on the last layer alone.

`LaplaceComponent` is what a mixture asks of a component. `Component` is a network with a Laplace approximation on its last
layer, or with none. `draw_weights` draws last-layer weights from a mixture of them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from mola.errors import HeadError, MolaError, OptionError, StructureTooLargeError
from mola.laplace import (
    ClassDistance,
    ClassGeometry,
    ClassSums,
    Factors,
    LogitMoments,
    Posterior,
    Spectrum,
    Structure,
    check_precision,
)
from mola.laplace.memory import free_memory
from mola.likelihood import CATEGORICAL, Gaussian, Likelihood
from mola.network import DenseFeatures, Features, Head, Inputs, capture
from mola.network.fingerprint import Watch
from mola.numerics import check_generator
from mola.options import whole_number


class WeightCurvature(Protocol):
    """What passes over the training data leave of a network's uncertain weights, whichever they are."""

    @property
    def watch(self) -> Watch:
        """The network as it was fitted."""

    @property
    def count(self) -> int:
        """Number of training data."""

    @property
    def log_likelihood(self) -> float | None:
        """Sum over the training labels, or None if there were none."""

    @property
    def weights(self) -> Tensor:
        """The trained weights in float64: the posterior's mean."""

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Log determinant of the posterior precision matrix; differentiable in the prior precision."""


class LaplaceComponent(nn.Module, ABC):
    """A network whose logits are Gaussian: what a mixture of Laplace approximations asks of its components.

    Args:
        network: the trained classifier, shared and never changed.
        curvature: of its uncertain weights, or None for a network that stands alone.
        precision: prior precision.
    """

    curvature: WeightCurvature | None
    likelihood: Likelihood = CATEGORICAL
    """What the outputs mean."""

    def __init__(self, network: nn.Module, curvature: WeightCurvature | None, precision: float) -> None:
        super().__init__()
        self.network = network
        self.curvature = curvature
        self.precision = check_precision(precision)

    @abstractmethod
    def at(self, precision: float) -> Self:
        """The same network and curvature at another prior precision."""

    @abstractmethod
    def moments(self, inputs: Inputs) -> LogitMoments:
        """Gaussian over the logits of a batch. Call it inside `undisturbed(network)`."""

    def observed(self, inputs: Inputs) -> LogitMoments | DenseFeatures:
        """The same; of outputs at many positions, what moments are made of in portions."""
        return self.moments(inputs)

    @abstractmethod
    def _changed(self, names: Sequence[str]) -> MolaError: ...

    def prepare(self) -> object:
        """Get ready to predict where the network is now."""

    def check_network(self, *, thorough: bool = False) -> None:
        """Notice a network that was changed since it was fitted; then raise an error. Call it outside of `undisturbed(network)`.

        Args:
            thorough: compare every number, and not only a few of each tensor where PyTorch has counted no change.
        """
        changed = [] if self.curvature is None else self.curvature.watch.changed(thorough=thorough)
        if changed:
            raise self._changed(changed)

    def require_fitted(self, what: str) -> WeightCurvature:
        """The curvature.

        Args:
            what: what it is needed for, for the message.

        Returns:
            The curvature.
        """
        if self.curvature is None:
            raise OptionError(
                f"{what} needs curvature, and a plain ensemble has none. Make the posterior with mola.fit(models, train_loader)."
            )
        return self.curvature

    def log_evidence(self, precision: Tensor) -> Tensor:
        r"""Log marginal likelihood of the training labels at a prior precision; differentiable in it.

        .. math:: \sum_n \log p(y_n) - \tfrac\lambda2 \|\theta\|^2 + \tfrac d2 \log\lambda - \tfrac12 \log\det(H + \lambda I)

        over the d weights that are uncertain.

        Args:
            precision: lambda, a scalar in float64.

        Returns:
            A scalar.
        """
        curvature = self.require_fitted("the log evidence")
        if curvature.log_likelihood is None:
            raise OptionError("the log evidence needs training labels: fit with batches of (inputs, labels).")
        weights = curvature.weights
        prior = weights.numel() * precision.log() - precision * weights.square().sum()
        return curvature.log_likelihood + (prior - curvature.log_determinant(precision)) / 2


@dataclass(frozen=True)
class Curvature:
    """What one pass over the training data left: factors, and on demand their eigendecomposition."""

    structure: Structure
    factors: Factors
    trained: Tensor
    """Weights (C, P) of the last layer as they were, in the network's own precision: the posterior's mean."""
    watch: Watch
    """The network as it was."""
    likelihood: Likelihood = CATEGORICAL
    classes: ClassSums | None = None
    """Sums for distances from the training classes; None where there are none, as in files of older versions."""

    @cached_property
    def geometry(self) -> ClassGeometry | None:
        """The training classes, solved once; None without sums for distances."""
        return None if self.classes is None else ClassGeometry(self.classes)

    @property
    def weights(self) -> Tensor:
        """The trained weights (C, P) in float64."""
        return self.trained.double()

    @property
    def count(self) -> int:
        """Number of training data."""
        return self.factors.count

    @property
    def log_likelihood(self) -> float | None:
        """Sum over the training labels, or None if there were none."""
        sums = self.factors.label_sums
        return self.factors.log_likelihood if sums is None else self.likelihood.total_log_likelihood(sums, self.count)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Log determinant of the posterior precision matrix; differentiable in the prior precision."""
        return self.spectrum.log_determinant(precision)

    @cached_property
    def spectrum(self) -> Spectrum:
        """Solved once, shared by every prior precision that is tried."""
        scale = self.likelihood.output_scale(len(self.trained))
        factors = self.factors if scale is None else self.factors.weighted(scale)
        return self.structure.spectrum(factors, self.likelihood)

    def rescaled(self, factor: float) -> Curvature:
        """The same at a noise that is so many times as large; the eigenproblem is not solved again."""
        assert isinstance(self.likelihood, Gaussian)
        twin = replace(self, likelihood=self.likelihood.scaled(factor, len(self.trained)))
        if "spectrum" in vars(self):
            vars(twin)["spectrum"] = self.spectrum.divided(factor**2)
        if "geometry" in vars(self):
            vars(twin)["geometry"] = self.geometry
        return twin


_door = threading.RLock()
"""Posteriors are made by one thread at a time. One for all components: a lock of their own could not be copied or saved."""


class Component(LaplaceComponent):
    """A network whose logits are Gaussian: trained ones as mean, and the last layer's posterior as spread.

    Args:
        network: the trained classifier, shared and never changed.
        head: its last linear layer, or None without curvature.
        curvature: the last layer's, or None for a network that stands alone.
        precision: prior precision.
        likelihood: what the outputs mean, where there is no curvature, which knows it.
    """

    curvature: Curvature | None
    _posterior: Posterior | None

    def __init__(
        self,
        network: nn.Module,
        head: Head | None,
        curvature: Curvature | None,
        precision: float,
        likelihood: Likelihood = CATEGORICAL,
    ) -> None:
        super().__init__(network, curvature, precision)
        self.head = head
        self.likelihood = likelihood if curvature is None else curvature.likelihood
        # Registered while it is empty, too: an attribute of that name would later hide the module.
        self.register_module("_posterior", None)

    def at(self, precision: float) -> Component:
        """The same network and curvature at another prior precision."""
        return Component(self.network, self.head, self.curvature, precision, self.likelihood)

    def of_likelihood(self, likelihood: Likelihood) -> Component:
        """The same network and sums under a likelihood with other settings, such as another noise."""
        curvature = None if self.curvature is None else replace(self.curvature, likelihood=likelihood)
        return Component(self.network, self.head, curvature, self.precision, likelihood)

    def rescaled(self, factor: float) -> Component:
        """The same at a noise that is so many times as large."""
        if self.curvature is None or factor == 1:
            return self
        return Component(self.network, self.head, self.curvature.rescaled(factor), self.precision)

    @property
    def distance(self) -> ClassDistance | None:
        """How far features are from the training classes, in float64; None without sums for distances."""
        geometry = None if self.curvature is None else self.curvature.geometry
        return None if geometry is None else ClassDistance(geometry)

    def prepare(self) -> Posterior | None:
        """Build the posterior, if there is curvature, and move it to where the network is."""
        if self.curvature is None or self.head is None:
            return None
        # The network's owner may have moved it since. Any parameter tells: reading `weight` may compute it.
        like = next(self._own_parameters(), None)
        like = next(self.head.layer.parameters()) if like is None else like
        ready = self._posterior
        if ready is None or not ready.is_at(like.device, like.dtype):
            # Made anew and published when it is done: another thread may be predicting with the one there is.
            with _door:
                ready = self._posterior
                if ready is None or not ready.is_at(like.device, like.dtype):
                    ready = self.curvature.spectrum.posterior(self.precision).measured_by(self.distance)
                    ready.follow(like.device, like.dtype)
                    self._posterior = ready
        return ready

    def _own_parameters(self) -> Iterator[Tensor]:
        # Parameters that the head has itself: to look through the modules inside takes longer, and is paid at every
        # batch.
        assert self.head is not None
        return (one for one in self.head.layer._parameters.values() if one is not None)

    def _changed(self, names: Sequence[str]) -> HeadError:
        assert self.head is not None  # where there is curvature
        names = [name.replace("_orig_mod.", "") for name in names]  # put there by torch.compile
        within = f"{self.head.name}." if self.head.name else ""
        what = "the weights of head" if all(name.startswith(within) for name in names) else "layers other than head"
        return HeadError(
            f"{what} {self.head.name!r} changed since the posterior was fitted ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}). Fit again: mola.fit(...)."
        )

    def moments(self, inputs: Inputs) -> LogitMoments:
        """Gaussian over the logits of a batch, at all positions if there are many. Call it inside `undisturbed(network)`."""
        found = self.observed(inputs)
        return self.moments_of(found.all_rows()) if isinstance(found, DenseFeatures) else found

    def observed(self, inputs: Inputs) -> LogitMoments | DenseFeatures:
        """The same; of outputs at many positions, what moments are made of in portions."""
        seen = capture(self.network, self.head, inputs, self.likelihood)
        return seen if isinstance(seen, DenseFeatures) else self.moments_of(seen)

    def moments_of(self, seen: Features) -> LogitMoments:
        """Gaussian over the logits of rows that the network has made of its inputs."""
        posterior = self.prepare()
        if posterior is None or self.head is None:
            dtype = torch.promote_types(seen.logits.dtype, torch.float32)
            return LogitMoments(seen.logits.to(dtype), None, likelihood=self.likelihood)
        features = self.head.lift(seen.features.to(posterior.dtype))
        return LogitMoments(seen.logits.to(posterior.dtype), posterior.at(features), likelihood=self.likelihood)

    def require_curvature(self, what: str) -> tuple[Head, Curvature]:
        """Head and curvature; `OptionError` if this is a network that stands alone.

        Args:
            what: what they are needed for, for the message.

        Returns:
            The head and the curvature.
        """
        self.require_fitted(what)
        assert self.head is not None  # they come together
        assert self.curvature is not None
        return self.head, self.curvature


def per_component(value: Any, count: int, name: str) -> list[Any]:
    """One value for each component.

    Args:
        value: one for all, or one for each.
        count: number of components.
        name: of the argument, for the message.

    Returns:
        `count` values.
    """
    single = isinstance(value, (int, float, str, bytes)) or value is None or getattr(value, "ndim", 1) == 0
    try:
        values = [value] * count if single else list(value)
    except TypeError as error:
        raise OptionError(
            f"{name}: expected one number, or {count} of them (one for each component); got {value!r}."
        ) from error
    if len(values) != count:
        raise OptionError(
            f"{name}: expected one number, or {count} of them (one for each component); got {len(values)}."
        )
    return values


class WeightSamples(NamedTuple):
    """Draws of the last layer's weights from the mixture."""

    weights: Tensor | list[Tensor]
    """(S, C, P), the bias as last column where the head has one; a list of (C, P) where the networks' widths differ."""
    component: Tensor
    """(S,): which component, and so which network's features, each draw belongs to."""


def draw_weights(
    components: Sequence[Component], weights: Tensor, count: int, generator: torch.Generator | None
) -> WeightSamples:
    """Draw from the mixture: a component by its weight, then weights from its posterior.

    Args:
        components: with curvature.
        weights: (K,) of the mixture.
        count: number of draws.
        generator: on the CPU; None draws from torch's own.

    Returns:
        Weights in float64, and the component of each; `OptionError` if count is no whole number above 0, a component has no
        curvature, or the generator is not on the CPU.
    """
    count = whole_number(count, "n")
    check_generator(generator)
    curvatures = [component.require_curvature("sampling weights")[1] for component in components]
    needed = 8 * count * max(curvature.weights.numel() for curvature in curvatures)
    free = free_memory()
    if free is not None and needed > free:
        raise StructureTooLargeError(
            f"{count} draws of the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: draw fewer at a time."
        )
    choice = torch.multinomial(weights, count, replacement=True, generator=generator)
    drawn: list[Tensor] = [torch.empty(0)] * count
    for index, (component, curvature) in enumerate(zip(components, curvatures, strict=True)):
        places = (choice == index).nonzero().flatten().tolist()
        if places:
            deviations = curvature.spectrum.deviations(component.precision, len(places), generator)
            for place, deviation in zip(places, deviations, strict=True):
                drawn[place] = curvature.weights + deviation
    alike = len({one.shape for one in drawn}) == 1
    return WeightSamples(torch.stack(drawn) if alike else drawn, choice)
