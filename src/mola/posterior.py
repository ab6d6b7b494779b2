"""The mixture of Laplace approximations. MAP, deep ensembles, last-layer Laplace and MoLA are all one class.

`MoLA` mixes K components (`component.py`). Posteriors are values: `tune`, `reweight` and `with_*` return new ones that share the
networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from mola import bounds
from mola.component import Component, per_component
from mola.distributed import Team
from mola.errors import BoundError, DataError, OptionError, located
from mola.laplace import Spread
from mola.likelihoods import ClassificationLikelihood, Gaussian, Likelihood, Members, Predictive
from mola.links import Link, as_link
from mola.mixture import Mixture
from mola.network import Captured, Inputs, Rows, capture_all, check_finite, check_logits, evaluating, one_batch
from mola.numerics import check_generator, seed_from
from mola.options import counted, whole_number
from mola.outliers import (
    COMBINED,
    DISTANCE,
    FAR_FIELD,
    MAX_PROBABILITY,
    NORM,
    VARIANCE,
    energies,
    far_field_score,
    max_probability_score,
    outlier_score,
)
from mola.prediction import disagreement, prediction_type
from mola.scaling import NO_COVARIANCE, Candidates, FeatureScale, LogitScaling, Reference
from mola.tuning import Rule, Tuning, as_rule
from mola.tuning.held_out import HeldOut, read_held_out
from mola.uncertainty import entropy, epistemic_share
from mola.weights import check_weighting, evidence_weights, stacking_in_turn, stacking_weights, uniform_weights

ROW_NUMBERS = 2**21
"""Numbers per component that one chunk of rows may hold: 16 MB in float64."""


class WeightSamples(NamedTuple):
    """Draws of last-layer weights from the mixture."""

    weights: Tensor | list[Tensor]
    """(S, C, P), the bias as last column; a list of (C, P) where the networks' widths differ."""
    component: Tensor
    """(S,): the component, and so the network's features, that each draw belongs to."""


class MoLA(Mixture):
    """A mixture of last-layer Laplace approximations. Made by `mola.fit`, `mola.ensemble` or `mola.load`.

    Calling it returns probabilities (n, C), or means (n, D) of a regression; `predict` returns a `Prediction`.

    Args:
        components: networks with their Laplace approximations.
        link: from logits to probabilities.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        tuning: how the prior precision was chosen.
        scaling: temperature, pooling and distance exponent.
    """

    def __init__(
        self,
        components: Sequence[Component],
        link: str | Link = "probit",
        weights: str | Sequence[float] | Tensor = "uniform",
        tuning: Tuning | None = None,
        scaling: LogitScaling | None = None,
    ) -> None:
        weighting = check_weighting(weights, len(components))
        by_evidence = isinstance(weighting, str) and weighting == "evidence"
        super().__init__(components, "uniform" if by_evidence else weighting, likelihood=components[0].likelihood)
        self.components: tuple[Component, ...] = tuple(components)
        self.link: Link = as_link(link, self.likelihood)
        self.weighting: str = weighting if isinstance(weighting, str) else "given"
        self.tuning: Tuning | None = tuning
        self.scaling: LogitScaling = LogitScaling() if scaling is None else scaling
        if self.has_distances and self.scaling.reference is None:
            self.scaling = replace(self.scaling, reference=self._training_reference())
        if self.scaling.exponent > 0 and not self.has_distances:
            raise OptionError(self._why_no_distances())
        if by_evidence:
            self.weights = evidence_weights(self.log_evidence())

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """The trained networks."""
        return tuple(component.network for component in self.components)

    @property
    def likelihoods(self) -> tuple[Likelihood, ...]:
        """Of each component: the noise of a regression may differ."""
        return tuple(component.likelihood for component in self.components)

    @property
    def prior_precision(self) -> tuple[float, ...]:
        """Of each component."""
        return tuple(component.prior_precision for component in self.components)

    @property
    def structure(self) -> str | None:
        """Name of the curvature structure; None for a plain ensemble."""
        layer = self.components[0].layer
        return None if layer is None else layer.structure.name

    @property
    def temperature(self) -> float:
        """T, which divides all logits: below 1 sharpens. Multiplies the standard deviations of a regression."""
        return self.scaling.temperature

    @property
    def pooling(self) -> float:
        """c, which contracts the networks' logits towards their mean: 1 mixes probabilities, 0 averages logits."""
        return self.scaling.pooling

    @property
    def distance_exponent(self) -> float:
        """gamma: how strongly logits shrink with the distance from the training classes; 0 is not at all."""
        return self.scaling.exponent

    @property
    def has_distances(self) -> bool:
        """Whether distances from the training classes are known."""
        return all(one.layer is not None and one.layer.distance is not None for one in self.components)

    @property
    def is_dense(self) -> bool:
        """Whether the networks have dense outputs: one for each pixel or token."""
        head = self.components[0].head
        return head is not None and head.dense_axes > 0

    @property
    def noise(self) -> Tensor:
        """Standard deviation (K, D) of a regression's noise in the targets' units; a factor for heteroscedastic networks."""
        rows = []
        for component in self.components:
            likelihood = component.likelihood
            if not isinstance(likelihood, Gaussian):
                raise OptionError(f"likelihood {likelihood.name!r} has no noise.")
            given: Any = likelihood.deviation(1).tolist() if likelihood.noise is None else likelihood.noise
            width = len(given) if component.layer is None else len(component.layer.weights)
            rows.append(torch.tensor(given, dtype=torch.float64, device="cpu").expand(width).clone())
        return torch.stack(rows)

    def _why_no_distances(self) -> str:
        if self.components[0].layer is None:
            return "a plain ensemble has no distances from the training data. Use mola.fit(networks, train_loader)."
        return "this posterior was fitted with distances=False. Fit again with distances=True to use the distance."

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(network).__name__ for network in self.networks))
        networks = f"{counted(len(self.networks), 'network')} ({kinds})"
        weights = self.weighting
        if weights != "uniform":
            weights = f"{', '.join(f'{weight:.4g}' for weight in self.weights.tolist())} ({weights})"
        layer, scaling = self.components[0].layer, self.scaling
        if layer is None:
            return f"MoLA(a plain ensemble of {networks}, without covariance, weights: {weights})"
        lines = [f"MoLA({networks}, fitted on {layer.sums.count:,} training data"]
        if self.tuning is not None:
            lines.append(f"  {self.tuning.summary}")
        lines.append(f"  structure: {self.structure}")
        if self.likelihood.classification:
            lines.append(f"  link: {self.link.name}")
        elif isinstance(self.likelihood, Gaussian):
            lines.append(f"  noise: {'; '.join(dict.fromkeys(_listed(row.tolist()) for row in self.noise))}")
        lines.append(f"  prior precision: {_listed(self.prior_precision)}")
        for name, value, neutral in (
            ("temperature", scaling.temperature, 1),
            ("pooling", scaling.pooling, 1),
            ("distance exponent", scaling.exponent, 0),
        ):
            if value != neutral:
                lines.append(f"  {name}: {value:.4g}")
        return "\n".join([*lines, f"  weights: {weights}", ")"])

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone: the networks keep theirs, and every pass evaluates them."""
        self.training = mode
        return self

    # --- predict ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Probabilities (n, C) of one batch, or means (n, D) of a regression.

        Args:
            inputs: a tensor, a tuple of positional or a mapping of keyword arguments of the networks.
            generator: source of randomness for links that draw; None uses the link's own seed.

        Returns:
            In the networks' precision, at least float32; dense outputs keep the layout of the logits.
        """
        captured, seed = self._captured(one_batch(inputs)), seed_from(generator)
        point = torch.cat([self.predictive(rows, seed).point() for rows in self._chunks(captured)])
        return _returned(point, captured[0])

    def _captured(self, inputs: Inputs) -> list[Captured]:
        with evaluating(*self.networks), torch.no_grad():
            heads = [component.head for component in self.components]
            return capture_all(self.networks, heads, inputs, self.likelihood)

    def _chunks(self, captured: Sequence[Captured]) -> Iterator[Rows]:
        widths = [one.features.shape[-1] + self.link.row_size(one.outputs.shape[-1]) for one in captured]
        size = max(1, ROW_NUMBERS // max(widths))
        for parts in zip(*(one.chunks(size) for one in captured), strict=True):
            yield Rows([phi for phi, _ in parts], [outputs for _, outputs in parts])

    def log_distances(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Logarithms of distance (K, n) and norm (K, n) of each network's features."""
        pairs = []
        for component, phi in zip(self.components, rows.phi, strict=True):
            layer = component.on(phi.device)
            if layer is None or layer.distance is None:
                raise OptionError(self._why_no_distances())
            pairs.append(layer.distance.logs(phi))
        return torch.stack([one for one, _ in pairs]), torch.stack([two for _, two in pairs])

    def _divisors(self, rows: Rows, weights: Tensor, candidates: Candidates | None = None) -> list[Tensor]:
        far = self.scaling.exponent > 0 if candidates is None else bool((candidates.exponent > 0).any())
        logs, norms = self.log_distances(rows) if far else None, self.likelihood.classification
        weights = weights.to(rows.outputs[0])
        return list(self.scaling.divisors(logs, weights, norms=norms, candidates=candidates).unbind(-3))

    def members(self, rows: Rows, candidates: Candidates | None = None) -> Members:
        """The components at rows that the networks have computed already, with these settings or with those of candidates."""
        parts, likelihoods = list(zip(self.components, rows.phi, strict=True)), self.likelihoods
        spreads: Sequence[Spread | None] = [None] * len(parts)
        if candidates is None:
            spreads, divisors = [one.spread(phi) for one, phi in parts], self._divisors(rows, self.weights)
            return Members(rows.outputs, spreads, self.weights, divisors, self.scaling.pooling, likelihoods)
        if self.link.needs_covariance or bool((candidates.precision < NO_COVARIANCE).any()):
            spreads = [one.spread(phi, candidates.precision[:, k]) for k, (one, phi) in enumerate(parts)]
        weights = self.weights
        if self.weighting == "evidence":  # these depend on the prior precision
            weights = self.with_prior_precision(candidates.precision[0].tolist()).weights
        divisors = self._divisors(rows, weights, candidates)
        return Members(rows.outputs, spreads, weights, divisors, candidates.pooling, likelihoods)

    def predictive(self, rows: Rows, seed: int | None = None, candidates: Candidates | None = None) -> Predictive:
        """The predictive distribution of rows that the networks have computed already."""
        return self.likelihood.predictive(self.members(rows, candidates), self.link, seed)

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Any:
        with located(place):
            captured = self._captured(inputs)
            for index, (component, one) in enumerate(zip(self.components, captured, strict=True)):
                with located(f"networks[{index}]"):
                    check_finite(one.features.flatten(0, 1), one.outputs.flatten(0, 1))
                    if component.head is None:
                        check_logits(component.network, inputs, one.rows(slice(0, 4096))[1], self.likelihood)
        # Copies: a network may reuse its memory for the next batch.
        kept = [replace(one, features=one.features.clone(), outputs=one.outputs.clone()) for one in captured]
        size = sum(one.features.nbytes + one.outputs.nbytes for one in kept)
        return self._make_prediction(lambda: self._chunks(kept), kept[0], seed, size)

    def predict_from_features(self, features: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """What `predict` returns for inputs that the networks have processed already.

        Args:
            features: (n, P) of each network: the input of its last layer, with the constant 1 if that has a bias.
            outputs: (n, C) of each network.
        """
        # Copies: fields are computed when they are first read.
        kept = [Captured.of(one.clone(), two.clone(), None) for one, two in zip(features, outputs, strict=True)]
        with torch.no_grad():
            return self._make_prediction(lambda: self._chunks(kept), kept[0])

    def _make_prediction(
        self,
        chunks: Callable[[], Iterator[Rows]],
        like: Captured,
        seed: int | None = None,
        held_bytes: int = 0,
    ) -> Any:
        def field(compute: Callable[[Rows], Tensor], dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
            def joined() -> Tensor:
                parts = [compute(rows) for rows in chunks()]
                return _returned(torch.cat(parts, dim=int(parts[0].dim() == 3)), like, dtype)

            return joined

        shared: dict[str, Any] = {
            "likelihood": self.likelihood,
            "axis": like.layout.axis if like.layout.sizes else -1,
            "held_bytes": held_bytes,
            "ood_score_name": self.ood_score_name,
        }
        distance = field(self._distance) if self.has_distances else None
        if not self.likelihood.classification:
            regression: dict[str, Any] = {
                "component_mean": field(lambda rows: self._moments(rows).means)(),
                # In float64: variances may leave the range of float32 where their roots do not.
                "component_variance": field(lambda rows: self._moments(rows).variances, torch.float64),
                "component_noise": field(self._noise, torch.float64),
                "ood_score": field(self._regression_score),
                "distance": distance,
            }
            return prediction_type(self.likelihood)(regression, weights=self.weights, **shared)
        far_field = self.ood_score_name != MAX_PROBABILITY
        discrete: dict[str, Any] = {
            "probs": field(lambda rows: self.predictive(rows, seed).point())(),
            "mutual_information": field(lambda rows: self._mutual_information(rows, seed)),
            "ood_score": field(self._ood_score),
            "logit_mean": field(lambda rows: torch.stack(list(rows.outputs))),
            "logit_variance": field(self._logit_variance),
            "distance": distance,
            "far_field": field(self._far_field) if far_field else None,
        }
        return prediction_type(self.likelihood)(discrete, **shared)

    def _logit_variance(self, rows: Rows) -> Tensor:
        spreads = [component.spread(phi) for component, phi in zip(self.components, rows.phi, strict=True)]
        pairs = zip(spreads, rows.outputs, strict=True)
        return torch.stack([torch.zeros_like(two) if one is None else one.variance() for one, two in pairs])

    def _mutual_information(self, rows: Rows, seed: int | None) -> Tensor:
        likelihood = self.likelihood
        assert isinstance(likelihood, ClassificationLikelihood)
        probs, (means, spreads) = self.predictive(rows, seed).point(), self.members(rows).scaled()
        return entropy(likelihood.choices(probs)) * epistemic_share(likelihood, means, spreads, self.weights, seed or 0)

    # --- outlier scores ---------------------------------------------------------------------------------------------

    @property
    def ood_score_name(self) -> str:
        """Name of the outlier score: the best one that is known."""
        if self.components[0].layer is None:
            return MAX_PROBABILITY if self.likelihood.classification else VARIANCE
        if not self.likelihood.classification:
            return DISTANCE if self.has_distances else NORM
        reference = self.scaling.reference
        return FAR_FIELD if reference is None or reference.score is None else COMBINED

    def _norms(self, rows: Rows) -> Tensor:
        layers = [component.on(phi.device) for component, phi in zip(self.components, rows.phi, strict=True)]
        return torch.stack([one.curvature.mahalanobis(phi) for one, phi in zip(layers, rows.phi, strict=True) if one])

    def _distance(self, rows: Rows) -> Tensor:
        return self.scaling.log_distance(self.log_distances(rows)[0], self.weights).exp()

    def _far_field(self, rows: Rows) -> Tensor:
        means = torch.stack(list(rows.outputs))
        return far_field_score(means, self._norms(rows), self.weights.to(means), self.likelihood)  # type: ignore[arg-type]

    def _outlier_terms(self, rows: Rows) -> tuple[Tensor, Tensor]:
        # Far field, mean energy and log distance (3, n), and the energy of each network (K, n).
        means, weights = torch.stack(list(rows.outputs)), self.weights.to(rows.outputs[0])
        log_distance, log_norm = self.log_distances(rows)
        own = energies(means, self.scaling.log_excess(log_norm), self.likelihood)  # type: ignore[arg-type]
        distance = self.scaling.log_distance(log_distance, weights)
        return torch.stack([self._far_field(rows), weights @ own, distance]), own

    def _ood_score(self, rows: Rows) -> Tensor:
        name = self.ood_score_name
        if name == MAX_PROBABILITY:
            return max_probability_score(self.predictive(rows).point(), self.likelihood)  # type: ignore[arg-type]
        if name == FAR_FIELD:
            return self._far_field(rows)
        assert self.scaling.reference is not None
        reference = self.scaling.reference.score_at(self.weights)
        assert reference is not None
        return outlier_score(list(self._outlier_terms(rows)[0]), reference)

    def _moments(self, rows: Rows) -> Any:
        found: Any = self.predictive(rows)
        return found

    def _noise(self, rows: Rows) -> Tensor:
        return self._moments(rows).noises * self.temperature**2

    def _regression_score(self, rows: Rows) -> Tensor:
        if self.ood_score_name == VARIANCE:
            return disagreement(self.weights, self._moments(rows).means, self._noise(rows))
        weights = self.weights.to(rows.outputs[0])
        if self.ood_score_name == NORM:
            return weights @ self._norms(rows).log()
        log_distance, log_norm = self.log_distances(rows)
        return self.scaling.log_distance(log_distance, weights) + weights @ self.scaling.log_excess(log_norm)

    def _training_reference(self) -> Reference:
        distances = [one.layer.distance for one in self.components if one.layer is not None]
        known = [one for one in distances if one is not None]
        return Reference(tuple(FeatureScale(one.training_distance, one.training_norm) for one in known))

    # --- new posteriors from this one -------------------------------------------------------------------------------

    def _with(self, **changes: Any) -> Self:
        parts: dict[str, Any] = {
            "components": self.components,
            "link": self.link,
            "weights": self.weighting if self.weighting != "given" else self.weights,
            "tuning": self.tuning,
            "scaling": self.scaling,
        }
        return type(self)(**(parts | changes))

    def with_prior_precision(self, prior_precision: float | Sequence[float]) -> Self:
        """The same mixture at another prior precision: one number, or one for each component."""
        for component in self.components:
            component.require_layer("a prior precision")
        values = per_component(prior_precision, len(self.components), "prior_precision")
        moved = [component.at(value) for component, value in zip(self.components, values, strict=True)]
        return self._with(components=moved, tuning=None)

    def with_temperature(self, temperature: float) -> Self:
        """The same mixture with another temperature, which divides all logits: below 1 sharpens."""
        return self._with(scaling=replace(self.scaling, temperature=temperature), tuning=None)

    def with_pooling(self, pooling: float) -> Self:
        """The same mixture with another pooling: 1 mixes the networks' probabilities, 0 averages their logits."""
        return self._with(scaling=replace(self.scaling, pooling=pooling), tuning=None)

    def with_distance_exponent(self, exponent: float, *, onset: float | None = None) -> Self:
        """The same mixture with another distance exponent: 0 is no distance. `onset` is the distance from which it counts."""
        onset = self.scaling.onset if onset is None else onset
        return self._with(scaling=replace(self.scaling, exponent=exponent, onset=onset), tuning=None)

    def with_weights(self, weights: str | Sequence[float] | Tensor) -> Self:
        """The same mixture with other weights: "uniform", "evidence", or K numbers that sum to 1."""
        return self._with(weights=weights)

    def with_link(self, link: str | Link) -> Self:
        """The same mixture with another link."""
        return self._with(link=link)

    def with_noise(self, noise: float | Sequence[float] | Tensor) -> Self:
        """The same regression with another noise, which rules then leave as it is.

        Args:
            noise: standard deviation in the targets' units: one number, one for each output, or (K, D), one for each component, too. A
                factor for heteroscedastic networks.
        """
        if not isinstance(self.likelihood, Gaussian):
            raise OptionError(f"likelihood {self.likelihood.name!r} has no noise.")
        given: Any = noise.tolist() if hasattr(noise, "tolist") else noise
        if given is None:
            raise OptionError(
                "noise: expected one number, or one for each output; got None. posterior.tune(val_loader) chooses it."
            )
        table = isinstance(given, (list, tuple)) and any(hasattr(row, "__len__") for row in given)
        rows = per_component(given, len(self.components), "noise") if table else [given] * len(self.components)
        moved = []
        for component, row in zip(self.components, rows, strict=True):
            likelihood = replace(component.likelihood, noise=row, estimated=False)  # type: ignore[type-var]
            if component.layer is not None:
                likelihood.deviation(len(component.layer.weights))  # type: ignore[attr-defined]
            moved.append(component.with_likelihood(likelihood))
        return self._with(components=moved, tuning=None)

    # --- tune -------------------------------------------------------------------------------------------------------

    def read(
        self,
        loader: Iterable[Any] | HeldOut,
        where: str,
        *,
        labelled: bool | None,
        progress: bool = False,
        team: Team | None = None,
    ) -> HeldOut:
        """Run the networks once over a loader and keep what tuning needs; what was read before is returned as it is."""
        if isinstance(loader, HeldOut):
            if labelled and loader.labels is None:
                raise DataError(f"the {where} was read without labels. Read batches of (inputs, labels).")
            return loader
        team = Team.single() if team is None else team
        heads = [component.head for component in self.components]
        return read_held_out(
            self.networks, heads, loader, self.likelihood, where=where, labelled=labelled, progress=progress, team=team
        )

    def tune(
        self,
        val_loader: Iterable[Any] | HeldOut | None = None,
        *,
        rule: Rule | str | None = None,
        progress: bool = True,
        team: Team | None = None,
    ) -> Self:
        """Choose the prior precision, and with some rules temperature, pooling and distance exponent; others reset these.

        Args:
            val_loader: validation data, read once; not for `mola.rules.Evidence`.
            rule: a name, or an object of `mola.rules`; None is the likelihood's default.
            progress: show a progress bar on stderr, if that is a terminal.
            team: processes that tune together, each with its own shard.

        Returns:
            A new posterior, whose `tuning` describes the choice.
        """
        for component in self.components:
            component.require_layer("tuning")
        chosen = as_rule(rule, self.likelihood, val_loader)
        start = self._with(scaling=LogitScaling(reference=self.scaling.reference), tuning=None)
        if getattr(chosen, "fixes_weights", False):
            start = start.with_weights(start.weights)
        data = None
        with torch.inference_mode(False), torch.no_grad():
            if val_loader is not None:
                needs_labels = True if getattr(chosen, "needs_labels", True) else None
                data = self.read(val_loader, "validation loader", labelled=needs_labels, progress=progress, team=team)
                data.check_labels()
                if self.has_distances:
                    start = start._with(scaling=replace(start.scaling, reference=start.reference_on(data)))
            tuning = chosen(start, data)  # type: ignore[arg-type]
            if team is not None:
                tuning = team.share(tuning)
        return start.tuned(tuning)

    def tuned(self, tuning: Tuning) -> Self:
        """The same mixture with what a rule chose."""
        moved = self.with_prior_precision(tuning.prior_precision)
        components = moved.components
        if tuning.noise_factors:
            pairs = zip(components, tuning.noise_factors, strict=True)
            components = tuple(component.noise_scaled(factor) for component, factor in pairs)
        scaling = replace(
            self.scaling,
            temperature=tuning.temperature,
            pooling=tuning.pooling,
            exponent=tuning.distance_exponent,
            onset=tuning.onset,
        )
        return moved._with(components=components, scaling=scaling, tuning=tuning)

    def reference_on(self, data: HeldOut) -> Reference:
        """Distances, norms and outlier scores that are usual on validation data."""
        reference = data.feature_scales(
            [layer.distance for one in self.components if (layer := one.on(torch.device("cpu")))]
        )
        if not self.likelihood.classification:
            return reference
        posterior = self._with(scaling=replace(self.scaling, reference=reference))
        parts = []
        for rows, _ in data.chunks(ROW_NUMBERS // max(phi.shape[1] for phi in data.phi)):
            terms, own = posterior._outlier_terms(rows)
            parts.append(torch.cat([terms, own]).T)
        return data.with_scores(reference, torch.cat(parts) if parts else None)

    def reweight(self, val_loader: Iterable[Any] | HeldOut, *, progress: bool = True, team: Team | None = None) -> Self:
        """Stacking: weights that maximise the mixture's log-likelihood on validation data.

        With pooling or a distance exponent the components' predictions depend on the weights. The log-likelihood is
        then not concave in the weights: predictions and weights are updated in turn, from these weights and from uniform ones, and the
        result is no worse than either start.

        Args:
            val_loader: validation data with labels, read once.
            progress: show a progress bar on stderr, if that is a terminal.
            team: processes that do it together, each with its own shard.
        """
        with torch.no_grad():
            data = self.read(val_loader, "validation loader", labelled=True, progress=progress, team=team)
            data.check_labels()

            def evaluate(weights: Tensor) -> tuple[Tensor, float]:
                posterior = self.with_weights(weights)
                parts = [posterior._member_log_likelihoods(*part) for part in _labelled(data)]
                logs = data.gather(torch.cat(parts) if parts else None)  # None: the shard of this process is empty
                best = logs.amax(1, keepdim=True)
                relative = (logs - best).exp()
                mixture = (relative @ weights.to(relative)).clamp_min(torch.finfo(torch.float64).tiny).log()
                return relative, float((mixture + best.squeeze(1)).mean())

            if self.scaling.exponent == 0 and self.scaling.pooling == 1:
                weights = stacking_weights(evaluate(self.weights)[0])
            else:
                weights = stacking_in_turn(evaluate, [self.weights.cpu(), uniform_weights(len(self.components))])
        shared = weights.tolist() if team is None else team.share(weights.tolist())
        return self.with_weights(shared)

    def _member_log_likelihoods(self, rows: Rows, labels: Tensor) -> Tensor:
        # Log-likelihood (m, K) of each datum, or of each known question, under each component, scaled and pooled as in the mixture.
        likelihood, count = self.likelihood, len(self.components)
        if isinstance(likelihood, ClassificationLikelihood):
            probs = likelihood.member_probabilities(self.members(rows), self.link)
            members: list[Predictive] = [likelihood.distribution(one) for one in probs]
        else:
            whole: Any = self.predictive(rows)
            names, one = ("means", "variances", "noises"), torch.ones(1, dtype=torch.float64, device="cpu")
            parts = [{name: getattr(whole, name)[k : k + 1] for name in names} for k in range(count)]
            members = [replace(whole, weights=one, **part) for part in parts]
        return torch.stack([-member.scores(labels)["nll"] for member in members], dim=-1)

    def log_evidence(self) -> Tensor:
        """Log marginal likelihoods (K,) of the training labels, one for each component."""
        with torch.no_grad():
            values = [
                one.log_evidence(torch.tensor(one.prior_precision, dtype=torch.float64, device="cpu"))
                for one in self.components
            ]
        return torch.stack(values).cpu()

    # --- samples and bounds -----------------------------------------------------------------------------------------

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> WeightSamples:
        """Draw last-layer weights from the mixture: a component by its weight, then weights from its posterior.

        Args:
            n: number of draws.
            generator: source of randomness, on the CPU; None uses torch's default.
        """
        count = whole_number(n, "n")
        check_generator(generator)
        layers = [component.require_layer("sampling weights") for component in self.components]
        choice = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        drawn: list[Tensor] = [torch.empty(0)] * count
        for index, (component, layer) in enumerate(zip(self.components, layers, strict=True)):
            places = (choice == index).nonzero().flatten().tolist()
            if places:
                deviations = layer.curvature.sample(component.prior_precision, len(places), generator)
                for place, deviation in zip(places, deviations, strict=True):
                    drawn[place] = layer.weights + deviation
        alike = len({one.shape for one in drawn}) == 1
        return WeightSamples(torch.stack(drawn) if alike else drawn, choice)

    def confidence_bound(self, inputs: Inputs, *, lemma: bool = False) -> Tensor:
        """Upper bound on the confidence in the predicted class of each input: the paper's Theorem.

        Args:
            inputs: one batch.
            lemma: return the bound of each component (the paper's Lemma) instead of the mixture's.

        Returns:
            (n,), or (K, n) with `lemma`; (n, C) and (K, n, C) for labels. `BoundError` for a link other than the probit.
        """
        self._require_bounds()
        captured = self._captured(one_batch(inputs))
        found = torch.cat(
            [bounds.mixture_bound(self, rows, lemma=lemma) for rows in self._chunks(captured)], dim=int(lemma)
        )
        return torch.stack([_returned(one, captured[0]) for one in found]) if lemma else _returned(found, captured[0])

    def far_field_limit(self, inputs: Tensor) -> Tensor:
        """Probabilities (n, C) that `posterior(delta * inputs)` approaches as delta grows without bound.

        Exact for bias-free ReLU networks, whose features scale with the input; this is checked. With a distance exponent it is 1/C,
        except for a network whose features are all 0 at an input, and so at any multiple of it.
        """
        self._require_bounds()
        once, far = self._captured(inputs), self._captured(bounds.SCALE * inputs)
        limit = bounds.far_field_limit(self, once, far)
        return _returned(limit, once[0])

    def _require_bounds(self) -> None:
        if not self.likelihood.classification:
            raise BoundError(
                "a regression has no confidence to bound: far away, its standard deviation grows without bound."
            )
        bounds.require_probit(self.link)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks: sums, prior precisions, weights, link, scaling, and a checksum of each network.

        Args:
            directory: folder to write to; what it held before stays readable until everything is written.

        Returns:
            The folder, for `mola.load(directory, networks)`.
        """
        from mola.saving.posterior import save_posterior

        return save_posterior(self, directory)


def _labelled(data: HeldOut) -> Iterator[tuple[Rows, Tensor]]:
    for rows, labels in data.chunks(ROW_NUMBERS // max(phi.shape[1] + 1 for phi in data.phi)):
        assert labels is not None
        yield rows, labels


def _returned(rows: Tensor, like: Captured, dtype: torch.dtype | None = None) -> Tensor:
    # From rows to the layout of the outputs; on the network's device in its precision, at least float32.
    if dtype is None:
        dtype = torch.promote_types(like.outputs.dtype, torch.float32)
        rows = rows.to(dtype).to(like.outputs.device)
    return like.layout.restore(rows)


def _listed(values: Iterable[float]) -> str:
    return ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))
