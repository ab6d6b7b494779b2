"""The base of every mixture of Laplace approximations: its settings, weights, predictions, tuning and stacking.

Mixtures are never changed in place: `tune`, `reweight` and `with_*` return new mixtures that share the networks.

A prediction, or one score of a search, takes these steps:

    inputs -> `capture` -> `Captured` -> `chunks` -> `Rows`     features and outputs of every network, chunk by chunk
    rows -> `project` -> `ProjectedRows`                        features in the basis of the curvature; distances: once for all settings
    rows, settings -> `spreads`, `divisors`                     `Spread`: covariance of the logits; divisors: temperature, distance
    -> `members`                                                `Members`: outputs, spreads, weights, divisors and pooling
    -> `distribution_of`: `Likelihood.predictive(members, link)`
         -> `Members.scaled`                                    logits after division and pooling
         -> the link, for classification                        logits -> probabilities of each member
    -> `Predictive`                                             `point()` predicts, `scores(labels)` scores

A search loops over settings for rows that are projected once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from molaplace.component import Component, per_component
from molaplace.distributed import Team
from molaplace.errors import DataError, MolaError, OptionError, warned
from molaplace.fingerprints import digest
from molaplace.function import PosteriorFunction, drawn_from
from molaplace.joint import JointPrediction
from molaplace.likelihoods import ClassificationLikelihood, Gaussian, Likelihood, Members, Predictive
from molaplace.links import PROBIT, Link, as_link
from molaplace.network import (
    Captured,
    Inputs,
    Rows,
    capture,
    changed_part,
    evaluating,
    gradients_of,
    one_batch,
    state_checksums,
    state_of,
)
from molaplace.numerics import check_generator, seed_from
from molaplace.options import counted, whole_number
from molaplace.predictor import Predictor
from molaplace.rules import Rule, Tuning, as_rule
from molaplace.rules.held_out import HeldOut, read_held_out
from molaplace.rules.objective import Objective, ScoreFunction
from molaplace.rules.rule import check_tuning
from molaplace.settings import FeatureScale, Reference, Settings
from molaplace.structures.base import Spread
from molaplace.structures.distance import ClassDistance
from molaplace.weights import check_weighting, evidence_weights, stacking_in_turn, stacking_weights, uniform_weights

STALE = "stale: the training data have changed since tuning, so tune again"
"""Line that marks a posterior whose settings were chosen for other training data."""

UNTUNED = "not tuned: settings are defaults or given by hand, so call tune(val_loader) with validation data"
"""Line that marks a posterior whose settings were not chosen on data."""

WORSE = 1.5
LEAST_GAP = 0.03
"""Ratio and difference in nats above which the log loss on training data is suspiciously larger than on validation data."""

WIDE = ("component_variance", "component_noise")
"""Results that stay in float64, because variances may overflow in float32 even if standard deviations do not."""

SAME = 1e-4
"""Relative difference below which two log-likelihoods are equal up to rounding errors of the networks, which depend on the batch size."""

NO_DISTANCES = (
    "there are no distances from the training data. Use mola.fit(networks, train_loader, distances=True). Plain ensembles and "
    "posteriors over whole networks provide no distances."
)


class WeightSamples(NamedTuple):
    """Weights drawn from the mixture."""

    weights: Tensor | list[Tensor]
    """Weights (S, C, P), with the bias as the last column, or a list of S tensors (C, P) if the networks have different widths."""
    component: Tensor
    """Index (S,) of the component that each draw comes from."""


@dataclass(frozen=True)
class ProjectedRows(Rows):
    """Rows with what every setting needs of them."""

    z: Sequence[Tensor | None] = ()
    """Features of each network in the basis of its curvature, or None without a Laplace approximation."""
    logs: tuple[Tensor, Tensor] | None = None
    """Log distances (K, n) and log norms (K, n) of the networks' features, or None if they are not needed."""

    @property
    def bytes(self) -> int:
        """Number of bytes that the features occupy."""
        return sum(values.nbytes for values in [*self.phi, *self.z] if values is not None)


class LaplaceMixture(Predictor):
    """A mixture of Laplace approximations. Calling it returns probabilities (n, C) or, for regression, means (n, D).

    Args:
        components: networks with their Laplace approximations.
        settings: prior precision of each component, temperature, pooling coefficient and distance exponent; by default, neutral
            settings with a prior precision of 1.
        link: map from logits to probabilities.
        weights: "uniform", "evidence", or the weights (K,) in float64.
        reference: typical distances of the validation data; by default, estimates from the training data.
        tuning: result of the rule that chose the settings, or None if no rule was used.
        stale: True if the training data have changed since the settings or the reference were chosen.
    """

    def __init__(
        self,
        components: Sequence[Component],
        settings: Settings | None = None,
        *,
        link: Link = PROBIT,
        weights: str | Tensor = "uniform",
        reference: Reference | None = None,
        tuning: Tuning | None = None,
        stale: bool = False,
    ) -> None:
        super().__init__()
        if not all(isinstance(component, Component) for component in components):
            raise OptionError(
                "must be made by mola.fit or mola.ensemble. For networks, call mola.fit(networks, train_loader).",
                argument="components",
            )
        count = len(components)
        self.components: tuple[Component, ...] = tuple(components)
        for index, component in enumerate(components):
            self.add_module(f"component_{index}", component)
        self.networks: tuple[nn.Module, ...] = tuple(component.network for component in components)
        """The trained networks."""
        self.likelihood = components[0].likelihood
        self.likelihoods: tuple[Likelihood, ...] = tuple(component.likelihood for component in components)
        """Likelihood of each component. In regression, the noise may differ between components."""
        self.settings: Settings = Settings((1.0,) * count) if settings is None else settings
        """Prior precision, temperature, pooling coefficient, distance exponent and onset."""
        self.link: Link = link
        self.tuning: Tuning | None = tuning
        self.stale: bool = stale
        """True if the training data have changed since tuning. The posterior should then be tuned again."""
        self.validation_reference: Reference | None = reference
        """Typical distances of the validation data, or None before tuning."""
        if reference is None and self.has_distances:
            scales = [FeatureScale(distance.training_distance, distance.training_norm) for distance in self.distances]
            reference = Reference(tuple(scales))
        self.reference: Reference | None = reference
        """Typical distances, feature norms and outlier scores, or None if there are no distances."""
        if self.settings.uses_distance and not self.has_distances:
            raise OptionError(NO_DISTANCES)
        self.weighting: str = weights if isinstance(weights, str) else "given"
        """How the weights are chosen: "uniform", "evidence" or "given"."""
        if isinstance(weights, Tensor):
            self.weights = weights
        else:
            self.weights = uniform_weights(count) if weights == "uniform" else evidence_weights(self.log_evidence())

    # --- properties -------------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Short digest of the mixture and its settings, which its predictions carry."""
        given_weights = self.weights.tolist() if self.weighting == "given" else self.weighting
        parts = [component.fingerprint for component in self.components]
        return digest(parts, self.settings, self.link, given_weights, self.validation_reference)

    @property
    def prior_precision(self) -> tuple[float, ...]:
        """Prior precision of each component."""
        return self.settings.prior_precision

    @property
    def temperature(self) -> float:
        """Temperature T, which divides all logits (T < 1 sharpens) or, in regression, multiplies the standard deviations."""
        return self.settings.temperature

    @property
    def pooling(self) -> float:
        """Pooling coefficient c, which contracts the networks' logits towards their mean (1: mix probabilities; 0: average logits)."""
        return self.settings.pooling

    @property
    def distance_exponent(self) -> float:
        """Distance exponent gamma. Larger values shrink logits faster with distance from the training classes; 0 has no effect."""
        return self.settings.distance_exponent

    @property
    def structure(self) -> str | None:
        """Name of the curvature structure, or None for a plain ensemble."""
        layer = self.components[0].layer
        return None if layer is None else layer.structure.name

    @property
    def distances(self) -> tuple[ClassDistance, ...]:
        """Each network's distances from the training classes; empty if the mixture cannot compute them."""
        distances = [component.layer.distance for component in self.components if component.layer is not None]
        return () if None in distances or len(distances) < len(self.components) else tuple(distances)  # type: ignore[arg-type]

    @property
    def has_distances(self) -> bool:
        """True if the posterior can compute distances from the training classes."""
        return len(self.distances) > 0

    @property
    def noise(self) -> Tensor:
        """Standard deviation (K, D) of the noise in the targets' units or, for heteroscedastic networks, the noise factor."""
        pairs = zip(self.components, self.settings.noise_factors, strict=True)
        return torch.stack([factor * component.likelihood.noise_levels(component.width) for component, factor in pairs])

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(network).__name__ for network in self.networks))
        networks = f"{counted(len(self.networks), 'network')} ({kinds})"
        weights = self.weighting
        if weights != "uniform":
            weights = f"{', '.join(f'{weight:.4g}' for weight in self.weights.tolist())} ({weights})"
        layer = self.components[0].layer
        if layer is None:
            return f"MoLA(a plain ensemble of {networks}, without covariance, weights: {weights})"
        lines = [f"MoLA({networks}, fitted on {layer.sums.count:,} training data"]
        lines += [] if self.tuning is None else [f"  {self.tuning.summary}"]
        lines += [f"  {STALE}"] if self.stale else []
        lines += [f"  {UNTUNED}"] if self.tuning is None else []
        lines.append(f"  structure: {self.structure}")
        if self.likelihood.classification:
            lines.append(f"  link: {self.link.name}")
        elif isinstance(self.likelihood, Gaussian):
            lines.append(f"  noise: {'; '.join(dict.fromkeys(_listed(row.tolist()) for row in self.noise))}")
        lines.append(f"  prior precision: {_listed(self.prior_precision)}")
        lines += [f"  {name.replace('_', ' ')}: {value:.4g}" for name, value in self.settings.changed().items()]
        return "\n".join([*lines, f"  weights: {weights}", ")"])

    def check_unchanged(self, kind: type[MolaError] = OptionError) -> None:
        """Raise an error of this kind if any weights of the networks have changed since the fit. All weights are read."""
        layers = [component.layer for component in self.components]
        if None in layers:
            return
        with evaluating(*self.networks):
            current = state_checksums(self.networks)
        for index, (network, checksums, layer) in enumerate(zip(self.networks, current, layers, strict=True)):
            assert layer is not None
            if checksums != layer.checksums:
                changed, unchanged = changed_part(network, checksums, layer.checksums)
                raise kind(
                    f"{changed} have changed since the posterior was fitted{unchanged}. Its curvature and its settings belong to the old "
                    f"weights. Restore them, or fit again.",
                    place=f"networks[{index}]",
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A conversion to another precision, such as `half()`, rounds the weights, and the posterior remembers the rounded ones.
        types = [tensor.dtype for network in self.networks for tensor in state_of(network).values()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if types != [tensor.dtype for network in self.networks for tensor in state_of(network).values()]:
            for component, checksums in zip(self.components, state_checksums(self.networks), strict=True):
                layer = component.layer
                if layer is None:
                    continue
                head = component.head
                weights = layer.weights
                if head is not None:
                    weights = component.likelihood.uncertain(head.weights()).to(weights)
                component.layer = replace(layer, checksums=checksums, weights=weights)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of this module only. The networks keep their own modes, but always predict in evaluation mode."""
        self.training = mode
        return self

    # --- predict ----------------------------------------------------------------------------------------------------

    def capture(self, inputs: Inputs) -> Captured:
        """Run every network once and capture the input and output of its head, with gradients if an input requires them."""
        with evaluating(*self.networks), gradients_of(inputs):
            return capture(self.networks, [component.head for component in self.components], inputs, self.likelihood)

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Return probabilities (n, C) or, for regression, means (n, D) for one batch.

        If an input requires gradients, the result is differentiable in the inputs and in the networks' parameters; the curvature is
        constant. Otherwise, the call builds no graph.

        Args:
            inputs: a tensor, a tuple of the networks' positional arguments, or a mapping of their keyword arguments.
            generator: source of random numbers for links that draw samples; by default, the link's seed is used.

        Returns:
            A tensor in the networks' precision, but at least float32. Dense outputs keep the layout of the logits.
        """
        captured = self.capture(one_batch(inputs))
        seed = seed_from(generator)
        return self.by_rows(
            captured, lambda rows: {"point": self.distribution_of(self.project(rows), seed=seed).point()}
        )["point"]

    def by_rows(
        self, captured: Captured, compute: Callable[[Rows], dict[str, Tensor]], row_size: int = 0
    ) -> dict[str, Tensor]:
        """Return the named results of `compute` for all chunks of rows, in the layout of the outputs.

        Results are on the networks' device and in the networks' precision, but at least float32, except those in `WIDE`. `compute`
        holds `row_size` values for each row, or as many as the link if that is more.
        """
        outputs = captured.outputs[0]
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        chunks = []
        for rows in captured.chunks(max(row_size, self.link.row_size(outputs.shape[-1]))):
            computed = compute(rows).items()
            chunks.append(
                {name: values if name in WIDE else values.to(dtype).to(outputs.device) for name, values in computed}
            )
        restore = captured.layout.restore
        results = {}
        for name in tuple(chunks[0]):
            results[name] = restore(torch.cat([chunk.pop(name) for chunk in chunks]))
        return results

    # --- joint predictions and functions ------------------------------------------------------------------------------

    def joint(self, inputs: Inputs) -> JointPrediction:
        """Return the joint distribution of the latent functions at all inputs of one batch, with covariances between inputs.

        In classification, the latent functions are the logits that the link receives, after temperature, distance and pooling. In
        regression, they are the targets without noise, in the targets' units. Matrices are computed when they are requested. If an
        input requires gradients, they are differentiable in the inputs and in the networks' parameters.
        """
        captured = self.capture(one_batch(inputs))
        captured.check_finite()
        return JointPrediction.of(self.members(self.project(captured.rows_at())), self.likelihood)

    def function(self, seed: int) -> PosteriorFunction:
        """Draw one function from the posterior: first a component according to its weight, then its weights.

        Every call of the result evaluates the same function and returns probabilities (n, C) or, for regression, targets (n, D)
        without noise. The same seed gives the same function.
        """
        return drawn_from(self, whole_number(seed, "seed", 0))

    def alone(self, index: int) -> Self:
        """Return the mixture that contains only the component with the given index."""
        own = slice(index, index + 1)
        noise_factor = self.settings.noise_factor[own]  # empty if no noise is changed
        settings = replace(self.settings, prior_precision=self.prior_precision[own], noise_factor=noise_factor)
        reference = None if self.reference is None else Reference(self.reference.scales[own])
        return self.with_parts(
            components=[self.components[index]], settings=settings, weights="uniform", reference=reference
        )

    # --- members ----------------------------------------------------------------------------------------------------

    def distances_and_norms(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the log distances (K, n) and the log norms (K, n) of the networks' features."""
        pairs = []
        for component, phi in zip(self.components, rows.phi, strict=True):
            layer = component.on(phi.device)
            if layer is None or layer.distance is None:
                raise OptionError(NO_DISTANCES)
            pairs.append(layer.distance.logs(phi))
        distances, norms = zip(*pairs, strict=True)
        return torch.stack(distances), torch.stack(norms)

    @property
    def row_size(self) -> int:
        """Number of values that a search holds for each row and network: those of the link and of the projected features."""
        layers = [component.layer for component in self.components if component.layer is not None]
        outputs = max((layer.curvature.outputs for layer in layers), default=1)
        return self.link.row_size(outputs) + max((layer.curvature.row_size for layer in layers), default=0)

    def log_distance(self, rows: Rows) -> Tensor:
        """Return the mixture's log distance (n,), relative to the reference."""
        assert self.reference is not None  # mixtures with distances have a reference
        return self.reference.log_distance(self.distances_and_norms(rows)[0], self.weights)

    def project(self, rows: Rows, *, distances: bool | None = None) -> ProjectedRows:
        """Return the rows with their features in the basis of each curvature and, by default if the settings use them, their distances."""
        pairs = zip(self.components, rows.phi, strict=True)
        z = [component.project(phi) for component, phi in pairs]
        needed = self.settings.uses_distance if distances is None else distances
        logs = self.distances_and_norms(rows) if needed else None
        return ProjectedRows(rows.phi, rows.outputs, rows.labels, z, logs)

    def spreads(self, rows: ProjectedRows, settings: Settings | None = None) -> list[Spread | None]:
        """Return the spread of each network's logits."""
        settings = self.settings if settings is None else settings
        parts = zip(self.components, rows.z, settings.prior_precision, settings.noise_factors, strict=True)
        return [component.spread(z, precision, factor) for component, z, precision, factor in parts]

    def divisors(self, rows: ProjectedRows, settings: Settings, weights: Tensor) -> Sequence[Tensor]:
        """Return the divisors of each network's logits."""
        like = rows.outputs[0]
        if not settings.uses_distance:
            return settings.divisors(like)
        assert self.reference is not None  # mixtures with distances have a reference
        log_distances, log_norms = self.distances_and_norms(rows) if rows.logs is None else rows.logs
        log_excess = self.reference.log_excess(log_norms)
        if not self.likelihood.classification:
            log_excess = torch.zeros_like(log_excess)  # the variance grows with the features
        return settings.divisors(like, self.reference.log_distance(log_distances, weights), log_excess)

    def members(
        self,
        rows: ProjectedRows,
        settings: Settings | None = None,
        weights: Tensor | None = None,
        spreads: Sequence[Spread | None] | None = None,
    ) -> Members:
        """Return the mixture's members for the given rows. The formulas are given in `molaplace.settings`.

        Args:
            rows: projected features and outputs of each network.
            settings: by default, the mixture's settings.
            weights: mixture weights (K,); by default, the mixture's weights.
            spreads: the result of `spreads` at these settings, if it is known.
        """
        settings = self.settings if settings is None else settings
        weights = self.weights if weights is None else weights
        return Members(
            outputs=rows.outputs,
            spreads=self.spreads(rows, settings) if spreads is None else spreads,
            weights=weights,
            divisors=self.divisors(rows, settings, weights),
            pooling=settings.pooling,
            likelihoods=self.likelihoods,
            temperature=settings.temperature,
            noise_factors=settings.noise_factors,
        )

    def distribution_of(self, rows: ProjectedRows, *, seed: int | None = None) -> Predictive:
        """Return the predictive distribution for the given rows; links that draw samples use `seed`."""
        return self.likelihood.predictive(self.members(rows), self.link, seed)

    # --- new mixtures from this one ---------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """Return the arguments with which the mixture can be constructed again."""
        return {
            "components": self.components,
            "settings": self.settings,
            "link": self.link,
            "weights": self.weights if self.weighting == "given" else self.weighting,
            "reference": self.validation_reference,
            "tuning": self.tuning,
            "stale": self.stale,
        }

    def with_parts(self, **changes: Any) -> Self:
        """Return the mixture with some constructor arguments replaced; `tuning` becomes None unless it is given."""
        return type(self)(**{**self.parts(), "tuning": None, **changes})

    def with_settings(self, **values: Any) -> Self:
        """Return the mixture with some of its settings replaced, by the names in `mola.settings.Settings`."""
        if "prior_precision" in values:
            for component in self.components:
                component.require_layer("a prior precision")
        if "noise_factor" in values:
            self.likelihood.noise_levels()
        for name in ("prior_precision", "noise_factor"):
            if name in values:
                values[name] = tuple(per_component(values[name], len(self.components), name))
        return self.with_parts(settings=replace(self.settings, **values))

    def with_prior_precision(self, prior_precision: float | Sequence[float] | Tensor) -> Self:
        """Return the mixture with a different prior precision, given as one number or one number per component."""
        return self.with_settings(prior_precision=prior_precision)

    def with_temperature(self, temperature: float | Tensor) -> Self:
        """Return the mixture with a different temperature, which divides all logits. Temperatures below 1 sharpen predictions."""
        return self.with_settings(temperature=temperature)

    def with_pooling(self, pooling: float | Tensor) -> Self:
        """Return the mixture with a different pooling coefficient (1 mixes the networks' probabilities; 0 averages their logits)."""
        return self.with_settings(pooling=pooling)

    def with_distance_exponent(self, exponent: float | Tensor, *, onset: float | None = None) -> Self:
        """Return the mixture with a different distance exponent and, if `onset` is given, a different onset.

        Args:
            exponent: distance exponent gamma; at 0, distance has no effect.
            onset: distance, relative to its median on the validation data, beyond which logits shrink; by default, unchanged.
        """
        return self.with_settings(distance_exponent=exponent, onset=self.settings.onset if onset is None else onset)

    def with_weights(self, weights: str | Sequence[float] | Tensor) -> Self:
        """Return the mixture with different weights: "uniform", "evidence", or K numbers that sum to 1."""
        return self.with_parts(weights=check_weighting(weights, len(self.components)))

    def with_link(self, link: str | Link) -> Self:
        """Return the mixture with a different link."""
        return self.with_parts(link=as_link(link, self.likelihood))

    # --- tune -------------------------------------------------------------------------------------------------------

    def read(self, loader: Iterable[Any] | HeldOut, where: str, *, labelled: bool | None, **options: Any) -> HeldOut:
        """Run the networks once over a loader and keep the data that tuning needs. A `HeldOut` is returned unchanged.

        The arguments have the same meaning as in `read_held_out`.
        """
        if isinstance(loader, HeldOut):
            loader.check_networks(self.networks, self.likelihood)
            if labelled and loader.labels is None:
                raise DataError("no labels were read. Pass batches of (inputs, labels).", place=f"the {loader.where}")
            return loader
        heads = [component.head for component in self.components]
        return read_held_out(self.networks, heads, loader, self.likelihood, where=where, labelled=labelled, **options)

    def tune(
        self,
        val_loader: Iterable[Any] | HeldOut | None = None,
        *,
        rule: Rule | str | None = None,
        progress: bool = True,
        team: Team | None = None,
    ) -> Self:
        """Choose the prior precision. Some rules also choose the temperature, pooling and distance exponent; others reset them.

        A plain ensemble has only a temperature, which the rule `mola.rules.Temperature` chooses; it is the ensemble's default.

        Args:
            val_loader: validation data, which are read once; not needed for `mola.rules.Evidence`.
            rule: the name of a rule, or an object from `mola.rules`; by default, the likelihood's default rule.
            progress: whether to show a progress bar if stderr is a terminal.
            team: processes that tune together. Each process reads its own shard.

        Returns:
            A new posterior, whose `tuning` attribute records the chosen settings.
        """
        is_plain = self.structure is None
        if rule is None and is_plain and self.likelihood.classification:
            rule = "temperature"
        chosen_rule = as_rule(rule, self.likelihood, val_loader)
        if chosen_rule.needs_covariance:
            for component in self.components:
                component.require_layer("tuning")
        # Without validation data, a stale reference is replaced by an estimate from the training data.
        reference = None if self.stale else self.validation_reference
        start = self.with_parts(settings=Settings(self.settings.prior_precision), reference=reference, stale=False)
        if self.weighting == "evidence" and chosen_rule.fixes_weights:
            start = start.with_weights(start.weights)
        data = None
        notes: tuple[str, ...] = ()
        with torch.inference_mode(False), torch.no_grad():
            if val_loader is not None:
                needs_labels = True if chosen_rule.needs_labels else None
                data = self.read(val_loader, "validation loader", labelled=needs_labels, progress=progress, team=team)
                data.check_labels()
                notes = (*self._notes_on_training_loss(data), *self._notes_on_training_data(data))
                held_out_reference = start.reference_on(data)
                if held_out_reference is not None:
                    notes += data.notes_on_norms(held_out_reference, self.distances)
                    start = start.with_parts(reference=held_out_reference)
            tuning = check_tuning(chosen_rule(Objective([(start, data)], team)), len(self.components))
            tuning = replace(tuning, notes=(*tuning.notes, *notes))
            if team is not None:
                tuning = team.share(tuning)
        return start.with_parts(settings=tuning.settings, tuning=tuning)

    def _log_likelihoods(self, data: HeldOut) -> tuple[float, Tensor] | None:
        # Return the total log-likelihood of the training data and that (n,) of each held-out datum under the first network, or None if
        # one of them is unknown.
        component = self.components[0]
        if component.layer is None or data.labels is None:
            return None
        known = component.likelihood.total_log_likelihood(component.layer.sums.weighted())
        return (known, component.likelihood.log_likelihood(data.outputs[0], data.labels)) if known else None

    def _notes_on_training_loss(self, data: HeldOut) -> tuple[str, ...]:
        # Warn, and return a note, if the first network is much worse on the training data than on the held-out data.
        pair = self._log_likelihoods(data)
        if pair is None or not self.likelihood.classification:
            return ()
        total, values = pair
        training_loss = -total / self.components[0].require_layer("a loss").sums.count
        loss = -float(values.mean())
        error = float(values.std(correction=0)) / math.sqrt(max(1.0, data.independent_share * len(values)))
        if training_loss <= max(WORSE * loss, loss + 4 * error + LEAST_GAP):
            return ()
        return (
            warned(
                f"the log loss of networks[0] is {training_loss:.3g} on the training data, but only {loss:.3g} on those of the "
                f"{data.where}. Networks are no worse on the data on which they were trained. Check that the training data are "
                f"prepared as in training (normalisation, channel order, labels), and that the two sets are not swapped."
            ),
        )

    def _notes_on_training_data(self, data: HeldOut) -> tuple[str, ...]:
        # Warn, and return a note, if the held-out data are the training data: as many, with the same log-likelihood.
        pair = self._log_likelihoods(data)
        if pair is None:
            return ()
        total, values = pair
        count = self.components[0].require_layer("a count").sums.count
        if len(values) != count or abs(float(values.sum()) - total) > SAME * abs(total):
            return ()
        return (
            warned(
                f"the {data.where}: these seem to be the training data, because there are as many, with the same log-likelihood. Networks "
                f"are more accurate and more confident on training data than on new data, so pass held-out data instead."
            ),
        )

    def reference_on(self, data: HeldOut) -> Reference | None:
        """Return the typical distances, norms and outlier scores of the validation data; None without features of a last layer."""
        return None

    def scores_at(
        self, candidates: Sequence[Settings], rows: ProjectedRows, score: ScoreFunction
    ) -> list[dict[str, Tensor]]:
        """Return the scores (m,) of each candidate's predictions for projected rows, keyed by name."""
        scores = []
        key: Any = None
        spreads: Sequence[Spread | None] = ()
        for settings in candidates:
            if (settings.prior_precision, settings.noise_factors) != key:
                # Many temperatures are tried at each prior precision.
                key = (settings.prior_precision, settings.noise_factors)
                # A covariance that vanishes is left out, because computing it would take most of the time.
                vanishes = not settings.has_covariance and not self.link.needs_covariance
                spreads = [None] * len(self.components) if vanishes else self.spreads(rows, settings)
            weights = evidence_weights(self.log_evidence_at(settings)) if self.weighting == "evidence" else self.weights
            members = self.members(rows, settings, weights, spreads)
            scores.append(score(self.likelihood.predictive(members, self.link), rows.labels))
        return scores

    def reweight(self, val_loader: Iterable[Any] | HeldOut, *, progress: bool = True, team: Team | None = None) -> Self:
        """Choose weights by stacking: maximise the mixture's log-likelihood on validation data.

        With pooling or a distance exponent, the components' predictions depend on the weights, and the log-likelihood is not concave
        in the weights. Predictions and weights are then updated alternately, starting once from the current weights and once from
        uniform weights. The result is no worse than either starting point.

        Args:
            val_loader: labelled validation data, which are read once.
            progress: whether to show a progress bar if stderr is a terminal.
            team: processes that reweight together. Each process reads its own shard.
        """
        with torch.no_grad():
            data = self.read(val_loader, "validation loader", labelled=True, progress=progress, team=team)
            data.check_labels()

            def evaluate(weights: Tensor) -> tuple[Tensor, float]:
                posterior = self.with_weights(weights)
                logs = data.by_rows(posterior._member_log_likelihoods)
                best = logs.amax(1, keepdim=True)
                relative = (logs - best).exp()
                mixture = (relative @ weights.to(relative)).clamp_min(torch.finfo(torch.float64).tiny).log()
                return relative, float((mixture + best.squeeze(1)).mean())

            if self.settings.distance_exponent == 0 and self.settings.pooling == 1:
                weights = stacking_weights(evaluate(self.weights)[0])
            else:
                weights = stacking_in_turn(evaluate, [self.weights.cpu(), uniform_weights(len(self.components))])
        shared = weights.tolist() if team is None else team.share(weights.tolist())
        tuning = self.tuning
        if tuning is not None:
            tuning = replace(tuning, summary=f"{tuning.summary} Stacking then chose the weights.")
        return self.with_weights(shared).with_parts(tuning=tuning)

    def _member_log_likelihoods(self, rows: Rows) -> Tensor:
        # Return the log-likelihood (m, K) of each datum, or of each known label of multi-label data, under each component. The
        # components are scaled and pooled as in the mixture.
        assert rows.labels is not None
        likelihood = self.likelihood
        if isinstance(likelihood, ClassificationLikelihood):
            probs = likelihood.member_probabilities(self.members(self.project(rows)), self.link)
            members: list[Predictive] = [likelihood.distribution(member) for member in probs]
        else:
            mixture: Any = self.distribution_of(self.project(rows))
            members = [mixture.component(index) for index in range(len(self.components))]
        return torch.stack([-member.scores(rows.labels)["nll"] for member in members], dim=-1)

    # --- evidence and samples ---------------------------------------------------------------------------------------

    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood of the training labels under each component, of shape (K,)."""
        return self.log_evidence_at(self.settings)

    def log_evidence_at(self, settings: Settings, networks: Sequence[int] | None = None) -> Tensor:
        """Return the log evidence of each component, or of those with the given indices, at other settings."""
        values = []
        with torch.no_grad():
            for index in range(len(self.components)) if networks is None else networks:
                precision = torch.tensor(settings.prior_precision[index], dtype=torch.float64, device="cpu")
                values.append(self.components[index].log_evidence(precision, settings.noise_factors[index]))
        return torch.stack(values).cpu()

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> WeightSamples:
        """Draw last-layer weights from the mixture: first a component according to its weight, then weights from its posterior.

        Of the settings, only the prior precision and the noise factor have an effect; all others act on the logits, not on the weights.

        Args:
            n: number of draws.
            generator: random number generator on the CPU; by default, torch's default generator.
        """
        count = whole_number(n, "n")
        check_generator(generator)
        layers = [component.require_layer("sampling weights") for component in self.components]
        choice = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        weights: list[Tensor] = [torch.empty(0, device="cpu")] * count
        for index, (layer, precision) in enumerate(zip(layers, self.prior_precision, strict=True)):
            draws_of_layer = (choice == index).nonzero().flatten().tolist()
            if draws_of_layer:
                curvature = layer.curvature_at(self.settings.noise_factors[index])
                offsets = curvature.in_weights(curvature.offsets(precision, len(draws_of_layer), generator))
                for draw, offset in zip(draws_of_layer, offsets, strict=True):
                    weights[draw] = layer.weights + offset
        same_shape = len({draw.shape for draw in weights}) == 1
        return WeightSamples(torch.stack(weights) if same_shape else weights, choice)

    # --- files ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def save(self, directory: str | Path, *, overwrite: bool = False) -> Path:
        """Save everything except the networks to a folder, and return the folder."""


def _listed(values: Iterable[float]) -> str:
    return ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))
