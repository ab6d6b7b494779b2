"""MoLA: a mixture of last-layer Laplace approximations.

MAP, deep ensemble, last-layer Laplace and MoLA are this one class: one component or several, with or without
curvature. A posterior is a value: `tune`, `reweight` and `with_*` return new ones that share the networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from mola import storage
from mola.bounds import class_bounds, far_field_logits, largest_logits
from mola.component import Component
from mola.errors import BoundError, DataError, MolaError, OptionError
from mola.features import batch_count, stream
from mola.laplace import LogitMoments
from mola.likelihood import CATEGORICAL
from mola.links import Link, Probit, as_link
from mola.mixture import Mixture, seed_from
from mola.networks import Inputs, undisturbed
from mola.prediction import Prediction
from mola.prior import ConfidenceThreshold, Rule
from mola.tuning import HeldOut, Problem, Tuning
from mola.uncertainty import entropy, far_field_score, max_probability_score
from mola.weights import evidence_weights, stacking_weights

__all__ = ["MoLA", "WeightSamples"]

SPREAD_DRAWS = 64
"""Draws of the logits behind the aleatoric-epistemic split of a prediction."""


class WeightSamples(NamedTuple):
    """Draws of the last layer's weights from the mixture."""

    weights: Tensor | list[Tensor]
    """(S, C, P), the bias as last column where the head has one; a list of (C, P) where the networks' widths differ."""
    component: Tensor
    """(S,): which component, and so which network's features, each draw belongs to."""


class MoLA(Mixture):
    """A mixture of Laplace approximations. Made by `mola.fit`, `mola.ensemble` or `mola.load`.

    Calling it gives probabilities (n, C); `predict` gives a `Prediction`.

    Args:
        components: the networks with their curvature.
        link: from logits to probabilities.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        tuning: how the prior precision was chosen, if it was.
    """

    def __init__(
        self,
        components: Sequence[Component],
        link: str | Link = "probit",
        weights: str | Sequence[float] | Tensor = "uniform",
        tuning: Tuning | None = None,
    ) -> None:
        """Bind components, a link and weights."""
        by_evidence = isinstance(weights, str) and weights == "evidence"
        super().__init__(components, "uniform" if by_evidence else weights)
        self.components = tuple(components)
        self.link = as_link(link)
        self.weighting = weights if isinstance(weights, str) else "given"
        self.tuning = tuning
        if by_evidence:
            self.weights = evidence_weights(self.log_evidence())

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> tuple[float, ...]:
        """One for each component."""
        return tuple(component.precision for component in self.components)

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """The trained networks."""
        return tuple(component.network for component in self.components)

    @property
    def structure(self) -> str | None:
        """Name of the curvature structure; None for a plain ensemble."""
        curvature = self.components[0].curvature
        return None if curvature is None else curvature.structure.name

    def extra_repr(self) -> str:
        """Structure, link, prior precisions and weights."""
        precisions = ", ".join(f"{value:.4g}" for value in self.prior_precision)
        return f"structure={self.structure}, link={self.link.name}, prior_precision=({precisions}), weights={self.weights.tolist()}"

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone, and get ready to predict.

        The networks keep their own mode: every pass evaluates them, whatever it is.
        """
        self.training = mode
        for component in self.components:
            component.prepare()
        return self

    # --- predict ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Probabilities (n, C).

        Args:
            inputs: a tensor, a tuple of positional or a mapping of keyword arguments of the networks.
            generator: source of randomness for links that draw; None uses the link's own seed.

        Returns:
            Probabilities, in float64 for networks in float64, else in float32.
        """
        seed = seed_from(generator)
        with undisturbed(*self.networks):
            return self._mix([self.link(moments, seed) for moments in self._moments(inputs)])

    def _moments(self, inputs: Inputs) -> list[LogitMoments]:
        moments = []
        for index, component in enumerate(self.components):
            try:
                moments.append(component.moments(inputs))
            except MolaError:
                raise
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                message = (
                    f"models[{index}] ({type(component.network).__name__}) failed on inputs of {_describe(inputs)}: {error}. "
                    f"Pass inputs of the shape and type that the network was trained on."
                )
                raise DataError(message) from error
        return moments

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        with undisturbed(*self.networks):
            moments = self._moments(inputs)
            for index, one in enumerate(moments):
                if not bool(torch.isfinite(one.mean).all()):
                    rows = int((~torch.isfinite(one.mean)).any(1).sum())
                    message = (
                        f"{place}, models[{index}]: logits are NaN or infinite for {rows} of {len(one.mean)} inputs."
                    )
                    raise DataError(message)
            probs = self._mix([self.link(one, seed) for one in moments])
            mean = torch.stack([one.mean for one in moments])
            variance = torch.stack([one.variance for one in moments])
            spread = entropy(probs) * self._epistemic_share(moments, seed)
            score, name = self._ood_score(moments, mean, probs)
        return Prediction(probs, spread, score, name, mean, variance)

    def _ood_score(self, moments: Sequence[LogitMoments], mean: Tensor, probs: Tensor) -> tuple[Tensor, str]:
        lengths = [one.posterior.mahalanobis(one.features) for one in moments if one.posterior is not None]
        if len(lengths) < len(moments):
            return max_probability_score(probs), "max-probability"
        return far_field_score(mean, torch.stack(lengths), self.weights.to(mean)), "far-field"

    def _epistemic_share(self, moments: Sequence[LogitMoments], seed: int | None) -> Tensor:
        """Share (n,) of the entropy that is mutual information between label and weights.

        Within a component it has no closed form, so it is measured on draws; as a share of the draws' own entropy it is
        between 0 and 1 whatever the link, and exact where the components have no covariance.
        """
        mixed, within = torch.zeros_like(moments[0].mean), torch.zeros_like(moments[0].mean[:, 0])
        for weight, one in zip(self.weights.tolist(), moments, strict=True):
            draws = 1 if one.posterior is None else SPREAD_DRAWS
            generator = torch.Generator().manual_seed(seed or 0)
            for drawn in one.draws(draws, generator, "logits"):
                probs = CATEGORICAL.probabilities(drawn)
                mixed += weight / draws * probs.sum(1)
                within += weight / draws * entropy(probs).sum(1)
        total = entropy(mixed)
        return torch.where(total > 0, 1 - within / total, torch.zeros_like(total)).clamp(0, 1)

    # --- new values from this one -----------------------------------------------------------------------------------

    def _with(self, **changes: Any) -> MoLA:
        weights: Any = self.weighting if self.weighting != "given" else self.weights
        parts = {"components": self.components, "link": self.link, "weights": weights, "tuning": self.tuning}
        return MoLA(**(parts | changes))

    def with_prior_precision(self, prior_precision: float | Sequence[float]) -> MoLA:
        """The same mixture at another prior precision: one number, or one for each component."""
        values = per_component(prior_precision, len(self.components), "prior_precision")
        moved = [component.at(value) for component, value in zip(self.components, values, strict=True)]
        return self._with(components=moved, tuning=None)

    def with_weights(self, weights: str | Sequence[float] | Tensor) -> MoLA:
        """The same mixture with other weights: "uniform", "evidence", or K numbers that sum to 1."""
        return self._with(weights=weights)

    def with_link(self, link: str | Link) -> MoLA:
        """The same mixture with another link."""
        return self._with(link=link)

    def tune(self, val_loader: Iterable[Any] | None = None, rule: Rule | None = None, *, progress: bool = True) -> MoLA:
        """Choose the prior precision.

        Args:
            val_loader: validation data, read once; not for `mola.Evidence`.
            rule: how to choose; None is the paper's, `mola.ConfidenceThreshold()`.
            progress: whether to show a progress bar on stderr, if that is a terminal.

        Returns:
            A new posterior; `.tuning` says how it was chosen.
        """
        curvatures = [component.require_curvature("tuning the prior precision")[1] for component in self.components]

        def weights_at(precision: float) -> Tensor:
            if self.weighting != "evidence":
                return self.weights
            at = torch.tensor(precision, dtype=torch.float64)
            return evidence_weights(torch.stack([component.log_evidence(at) for component in self.components]))

        problem = Problem(
            spectra=[curvature.spectrum for curvature in curvatures],
            link=self.link,
            weights_at=weights_at,
            read=lambda loader, where, labelled: self._read(loader, where, labelled=labelled, progress=progress),
            log_evidence=lambda index, precision: self.components[index].log_evidence(precision),
        )
        with torch.no_grad():
            tuning = (rule or ConfidenceThreshold()).choose(problem, val_loader)
        return self.with_prior_precision(tuning.prior_precision)._with(tuning=tuning)

    def reweight(self, val_loader: Iterable[Any], *, progress: bool = True) -> MoLA:
        """Stacking: the weights that maximise the mixture's log-likelihood on validation data.

        Args:
            val_loader: validation data with labels, read once.
            progress: whether to show a progress bar on stderr, if that is a terminal.

        Returns:
            A new posterior.
        """
        data = self._read(val_loader, "validation loader", labelled=True, progress=progress)
        chosen = []
        with torch.no_grad():
            for component, features, logits in zip(self.components, data.features, data.logits, strict=True):
                posterior = component.prepare()
                if posterior is not None:
                    posterior = component.curvature.spectrum.posterior(component.precision)  # type: ignore[union-attr]
                probs = self.link(LogitMoments(logits.double(), features.double(), posterior))
                chosen.append(probs.gather(1, data.labels[:, None]).squeeze(1))  # type: ignore[index]
        return self.with_weights(stacking_weights(torch.stack(chosen, dim=1)))

    def _read(self, loader: Iterable[Any], where: str, *, labelled: bool, progress: bool) -> HeldOut:
        """Run every network once over a loader, and keep what the heads saw, in main memory."""
        heads = [component.require_curvature("reading held-out data")[0] for component in self.components]
        features: list[list[Tensor]] = [[] for _ in heads]
        logits: list[list[Tensor]] = [[] for _ in heads]
        labels: list[Tensor] = []
        with undisturbed(*self.networks):
            batches = stream(
                self.networks,
                heads,
                loader,
                where=where,
                progress=progress,
                total=batch_count(loader),
                labelled=labelled,
            )
            for seen, batch_labels in batches:
                for index, (head, one) in enumerate(zip(heads, seen, strict=True)):
                    features[index].append(head.lift(one.features).cpu())
                    logits[index].append(one.logits.cpu())
                if batch_labels is not None:
                    labels.append(batch_labels.cpu())
        return HeldOut(
            [torch.cat(parts) for parts in features],
            [torch.cat(parts) for parts in logits],
            torch.cat(labels) if labels else None,
        )

    # --- what it knows ----------------------------------------------------------------------------------------------

    def log_evidence(self) -> Tensor:
        """Log marginal likelihoods (K,) of the training labels, one for each component."""
        with torch.no_grad():
            values = [
                component.log_evidence(torch.tensor(component.precision, dtype=torch.float64))
                for component in self.components
            ]
        return torch.stack(values)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> WeightSamples:
        """Draw last-layer weights from the mixture.

        Args:
            n: number of draws.
            generator: source of randomness, on the CPU; None draws from torch's own.

        Returns:
            Weights in float64, and the component of each.
        """
        if generator is not None:
            seed_from(torch.Generator(device=generator.device))
        choice = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        drawn: list[Tensor] = [torch.empty(0)] * n
        for index, component in enumerate(self.components):
            head, curvature = component.require_curvature("sampling weights")
            places = (choice == index).nonzero().flatten().tolist()
            if places:
                deviations = curvature.spectrum.deviations(component.precision, len(places), generator)
                for place, deviation in zip(places, deviations, strict=True):
                    drawn[place] = head.weights() + deviation
        alike = len({weights.shape for weights in drawn}) == 1
        return WeightSamples(torch.stack(drawn) if alike else drawn, choice)

    def confidence_bound(self, inputs: Inputs, *, lemma: bool = False) -> Tensor:
        """Upper bound on the confidence of each input, and of the same input scaled by any number.

        Args:
            inputs: one batch.
            lemma: give the bound of each component (the paper's Lemma) instead of the mixture's (its Theorem).

        Returns:
            (n,), or (K, n) with `lemma`.

        Raises:
            BoundError: if the link is not the probit, for which the bounds are proven.
        """
        if not isinstance(self.link, Probit):
            message = f"the confidence bounds hold for link 'probit', this posterior has {self.link.name!r}: use with_link('probit')."
            raise BoundError(message)
        with undisturbed(*self.networks):
            members = [self.link(moments) for moments in self._moments(inputs)]
        bounds = [
            self._class_bounds(component, probs.shape[1])
            for component, probs in zip(self.components, members, strict=True)
        ]
        if lemma:
            return torch.stack([bound[probs.argmax(1).cpu()] for bound, probs in zip(bounds, members, strict=True)])
        mixed = torch.einsum("k,kc->c", self.weights, torch.stack(bounds))
        return mixed[self._mix(members).argmax(1).cpu()]

    @staticmethod
    def _class_bounds(component: Component, classes: int) -> Tensor:
        """Upper bound (C,) on each class's probability; 1 for a network without covariance."""
        if component.head is None or component.curvature is None:
            return torch.ones(classes, dtype=torch.float64)
        smallest = component.curvature.spectrum.smallest_class_variance(component.precision)
        return class_bounds(largest_logits(component.head.weights(), smallest))

    def far_field_limit(self, inputs: Inputs) -> Tensor:
        """Probabilities (n, C) that `posterior(delta * inputs)` approaches as delta grows without bound.

        Exact for bias-free ReLU networks, whose features scale with the input; this is checked by doubling the input.

        Args:
            inputs: a batch, as one tensor.

        Returns:
            Probabilities (n, C).

        Raises:
            BoundError: if a network's features do not scale with its input, or the link is not the probit.
        """
        if not isinstance(self.link, Probit):
            message = f"the far-field limit is known for link 'probit', this posterior has {self.link.name!r}."
            raise BoundError(message)
        members = []
        with undisturbed(*self.networks):
            for index, (component, once, twice) in enumerate(
                zip(self.components, self._moments(inputs), self._moments(2 * inputs), strict=True)
            ):
                head, _ = component.require_curvature("the far-field limit")
                width = head.layer.in_features
                if not torch.allclose(twice.features[:, :width], 2 * once.features[:, :width], rtol=1e-4, atol=1e-6):
                    message = (
                        f"models[{index}]: doubling the input does not double the features, so there is no closed-form limit. "
                        f"It is known for ReLU networks without biases and without normalisation layers."
                    )
                    raise BoundError(message)
                direction = once.features.clone()
                direction[:, width:] = 0  # the constant 1 is nothing beside features that grow
                slope = direction @ head.weights().T.to(direction)
                moments = LogitMoments(slope, direction, once.posterior)
                members.append(CATEGORICAL.probabilities(far_field_logits(moments.mean, moments.variance)))
        return self._mix(members)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks: factors, prior precisions, weights, link, and a fingerprint of each head.

        Args:
            directory: folder to write to; what it held before stays readable until all is written.

        Returns:
            The folder, for `mola.load(directory, models=...)`.
        """
        parts, tensors = [], {}
        for index, component in enumerate(self.components):
            head, curvature = component.require_curvature("saving a posterior")
            parts.append(
                {
                    "head": head.name,
                    "features": head.width,
                    "bias": head.has_bias,
                    "fingerprint": storage.fingerprint(head.layer),
                    "prior_precision": component.precision,
                    "count": curvature.factors.count,
                    "log_likelihood": curvature.factors.log_likelihood,
                }
            )
            for name, tensor in curvature.factors.tensors().items():
                tensors[f"{index}.{name}"] = tensor
        head, curvature = self.components[0].require_curvature("saving a posterior")
        document = {
            "classes": head.classes,
            "likelihood": curvature.likelihood.name,
            "structure": {"name": curvature.structure.name, **curvature.structure.settings()},
            "link": {"name": self.link.name, **self.link.settings()},
            "weighting": self.weighting,
            "weights": self.weights.tolist(),
            "tuning": None if self.tuning is None else {"rule": self.tuning.rule, "notes": list(self.tuning.notes)},
            "components": parts,
        }
        return storage.write(directory, document, tensors)


def per_component(value: float | Sequence[float], count: int, name: str) -> list[float]:
    """One number for each component.

    Args:
        value: a number for all, or one for each.
        count: number of components.
        name: of the argument, for the message.

    Returns:
        `count` numbers.

    Raises:
        OptionError: if the numbers are not `count`.
    """
    values = [float(value)] * count if isinstance(value, (int, float)) else [float(each) for each in value]
    if len(values) != count:
        message = f"{name}: expected one number, or {count} of them (one for each component); got {len(values)}."
        raise OptionError(message)
    return values


def _describe(inputs: Inputs) -> str:
    if isinstance(inputs, Tensor):
        return f"shape {tuple(inputs.shape)} and type {str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, dict):
        return "{" + ", ".join(f"{key}: {_describe(value)}" for key, value in inputs.items()) + "}"
    if isinstance(inputs, (tuple, list)):
        return "(" + ", ".join(_describe(value) for value in inputs) + ")"
    return f"type {type(inputs).__name__}"
