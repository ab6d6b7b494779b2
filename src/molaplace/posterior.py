"""The mixture of Laplace approximations. One class, `MoLA`, covers MAP, deep ensembles, last-layer Laplace and MoLA.

`MoLA` mixes K components (`component.py`). Posteriors are never changed in place: `tune`, `reweight` and `with_*` return new
posteriors that share the networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from molaplace import bounds
from molaplace.component import Component, per_component
from molaplace.distributed import Team
from molaplace.errors import BoundError, DataError, OptionError, located
from molaplace.likelihoods import (
    ClassificationLikelihood,
    Gaussian,
    Likelihood,
    Members,
    Predictive,
    RegressionPredictive,
)
from molaplace.links import Link, as_link
from molaplace.mixture import Mixture
from molaplace.network import Captured, Inputs, Rows, capture_all, check_finite, check_logits, evaluating, one_batch
from molaplace.numerics import check_generator, seed_from
from molaplace.options import counted, whole_number
from molaplace.outliers import (
    COMBINED,
    DISTANCE,
    FAR_FIELD,
    MAX_PROBABILITY,
    NORM,
    VARIANCE,
    energies,
    far_field_score,
    outlier_score,
)
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.rules import Rule, Tuning, as_rule
from molaplace.rules.held_out import HeldOut, read_held_out
from molaplace.scaling import NO_COVARIANCE, Candidates, FeatureScale, LogitScaling, Reference
from molaplace.structures.base import Spread
from molaplace.weights import check_weighting, evidence_weights, stacking_in_turn, stacking_weights, uniform_weights

ROW_NUMBERS = 2**21
"""Largest number of values per component in one chunk of rows (16 MB in float64)."""


class WeightSamples(NamedTuple):
    """Last-layer weights drawn from the mixture."""

    weights: Tensor | list[Tensor]
    """Weights (S, C, P), with the bias as the last column, or a list of S tensors (C, P) if the networks have different widths."""
    component: Tensor
    """Index (S,) of the component that each draw comes from."""


class MoLA(Mixture):
    """A mixture of last-layer Laplace approximations, created by `mola.fit`, `mola.ensemble` or `mola.load`.

    Calling the mixture returns probabilities (n, C) or, for regression, means (n, D). `predict` returns a `Prediction`.

    Args:
        components: networks with their Laplace approximations.
        link: map from logits to probabilities, given as a name or a `Link`.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        tuning: result of the rule that chose the prior precision, or None if no rule was used.
        scaling: temperature, pooling coefficient and distance exponent.
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
        # Components cannot be called as predictors, so every method of Mixture that would call them is overridden.
        super().__init__(components, "uniform" if by_evidence else weighting, likelihood=components[0].likelihood)
        self.components: tuple[Component, ...] = tuple(components)
        self.networks: tuple[nn.Module, ...] = tuple(component.network for component in components)
        """The trained networks."""
        self.likelihoods: tuple[Likelihood, ...] = tuple(component.likelihood for component in components)
        """Likelihood of each component. In regression, the noise may differ between components."""
        self.link: Link = as_link(link, self.likelihood)
        self.weighting: str = weighting if isinstance(weighting, str) else "given"
        self.tuning: Tuning | None = tuning
        self.scaling: LogitScaling = LogitScaling() if scaling is None else scaling
        if self.has_distances and self.scaling.reference is None:
            distances = [one.layer.distance for one in components if one.layer and one.layer.distance]
            scales = tuple(FeatureScale(one.training_distance, one.training_norm) for one in distances)
            self.scaling = replace(self.scaling, reference=Reference(scales))
        if self.scaling.exponent > 0 and not self.has_distances:
            raise OptionError(self.why_no_distances())
        if by_evidence:
            self.weights = evidence_weights(self.log_evidence())

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> tuple[float, ...]:
        """Prior precision of each component."""
        return tuple(component.prior_precision for component in self.components)

    @property
    def structure(self) -> str | None:
        """Name of the curvature structure, or None for a plain ensemble."""
        layer = self.components[0].layer
        return None if layer is None else layer.structure.name

    @property
    def temperature(self) -> float:
        """Temperature T, which divides all logits (T < 1 sharpens) or, in regression, multiplies the standard deviations."""
        return self.scaling.temperature

    @property
    def pooling(self) -> float:
        """Pooling coefficient c, which contracts the networks' logits towards their mean (1: mix probabilities; 0: average logits)."""
        return self.scaling.pooling

    @property
    def distance_exponent(self) -> float:
        """Distance exponent gamma. Larger values shrink logits faster with distance from the training classes; 0 has no effect."""
        return self.scaling.exponent

    @property
    def has_distances(self) -> bool:
        """True if the posterior can compute distances from the training classes."""
        return all(one.layer is not None and one.layer.distance is not None for one in self.components)

    @property
    def is_dense(self) -> bool:
        """True if the networks have dense outputs, i.e. one output for each pixel or token."""
        head = self.components[0].head
        return head is not None and head.dense_axes > 0

    @property
    def noise(self) -> Tensor:
        """Standard deviation (K, D) of the noise in the targets' units or, for heteroscedastic networks, the noise factor."""
        rows = []
        for component in self.components:
            likelihood = component.likelihood
            if not isinstance(likelihood, Gaussian):
                raise OptionError(
                    f"likelihood {likelihood.name!r} has no noise. Only the Gaussian likelihood has noise."
                )
            given: Any = likelihood.deviation(1).tolist() if likelihood.noise is None else likelihood.noise
            width = len(given) if component.layer is None else len(component.layer.weights)
            rows.append(torch.tensor(given, dtype=torch.float64, device="cpu").expand(width).clone())
        return torch.stack(rows)

    def why_no_distances(self) -> str:
        """Return a message that explains why there are no distances from the training data."""
        if self.components[0].layer is None:
            return (
                "a plain ensemble provides no distances from the training data. Use mola.fit(networks, train_loader)."
            )
        return "this posterior was fitted with distances=False. Fit again with distances=True to use distances."

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(network).__name__ for network in self.networks))
        networks = f"{counted(len(self.networks), 'network')} ({kinds})"
        weights = self.weighting
        if weights != "uniform":
            weights = f"{', '.join(f'{weight:.4g}' for weight in self.weights.tolist())} ({weights})"
        layer = self.components[0].layer
        if layer is None:
            return f"MoLA(a plain ensemble of {networks}, without covariance, weights: {weights})"
        shown: dict[str, Any] = {"structure": self.structure}
        if self.likelihood.classification:
            shown["link"] = self.link.name
        elif isinstance(self.likelihood, Gaussian):
            shown["noise"] = "; ".join(dict.fromkeys(_listed(row.tolist()) for row in self.noise))
        shown["prior precision"] = _listed(self.prior_precision)
        shown |= {"temperature": self.temperature} if self.temperature != 1 else {}
        shown |= {"pooling": self.pooling} if self.pooling != 1 else {}
        shown |= {"distance exponent": self.distance_exponent} if self.distance_exponent != 0 else {}
        lines = [f"MoLA({networks}, fitted on {layer.sums.count:,} training data"]
        lines += [] if self.tuning is None else [f"  {self.tuning.summary}"]
        lines += [f"  {key}: {one if isinstance(one, str) else f'{one:.4g}'}" for key, one in shown.items()]
        return "\n".join([*lines, f"  weights: {weights}", ")"])

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of this module only. The networks keep their own modes, but always predict in evaluation mode."""
        self.training = mode
        return self

    # --- predict ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Return probabilities (n, C) or, for regression, means (n, D) for one batch.

        Args:
            inputs: a tensor, a tuple of the networks' positional arguments, or a mapping of their keyword arguments.
            generator: source of random numbers for links that draw samples; by default, the link's seed is used.

        Returns:
            A tensor in the networks' precision, but at least float32. Dense outputs keep the layout of the logits.
        """
        captured, seed = self.capture(one_batch(inputs)), seed_from(generator)
        return self._by_rows(captured, lambda rows: self.predictive(rows, seed).point())

    def capture(self, inputs: Inputs) -> list[Captured]:
        """Run every network once and capture the input and output of its head."""
        with evaluating(*self.networks), torch.no_grad():
            return capture_all(self.networks, [one.head for one in self.components], inputs, self.likelihood)

    def chunks(self, captured: Sequence[Captured]) -> Iterator[Rows]:
        """Yield the rows of captured forward passes in chunks of bounded size."""
        widths = [one.features.shape[-1] + self.link.row_size(one.outputs.shape[-1]) for one in captured]
        size = max(1, ROW_NUMBERS // max(widths))
        for pairs in zip(*(one.chunks(size) for one in captured), strict=True):
            yield Rows([phi for phi, _ in pairs], [outputs for _, outputs in pairs])

    def _by_rows(
        self, captured: Sequence[Captured], compute: Callable[[Rows], Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        # Return the results of `compute` for all chunks of rows, in the layout of the outputs. Unless a dtype is given, the results
        # are on the networks' device and in the networks' precision, but at least float32.
        parts = [compute(rows) for rows in self.chunks(captured)]
        first, rows = captured[0], torch.cat(parts, dim=int(parts[0].dim() == 3))
        if dtype is None:
            rows = rows.to(torch.promote_types(first.outputs.dtype, torch.float32)).to(first.outputs.device)
        return first.layout.restore(rows)

    def log_distances(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the log distances (K, n) and the log norms (K, n) of the networks' features."""
        pairs = []
        for component, phi in zip(self.components, rows.phi, strict=True):
            layer = component.on(phi.device)
            if layer is None or layer.distance is None:
                raise OptionError(self.why_no_distances())
            pairs.append(layer.distance.logs(phi))
        return torch.stack([one for one, _ in pairs]), torch.stack([two for _, two in pairs])

    def divisors(self, rows: Rows, weights: Tensor, candidates: Candidates | None = None) -> list[Tensor]:
        """Return the divisors of each network's logits, using the settings of this posterior or of the given candidates."""
        far = self.scaling.exponent > 0 if candidates is None else bool((candidates.exponent > 0).any())
        logs, norms = self.log_distances(rows) if far else None, self.likelihood.classification
        weights = weights.to(rows.outputs[0])
        return list(self.scaling.divisors(logs, weights, norms=norms, candidates=candidates).unbind(-3))

    def members(self, rows: Rows, candidates: Candidates | None = None) -> Members:
        """Return the mixture's members for the given rows, using the settings of this posterior or of the given candidates.

        The formulas are given in `mola.scaling`.
        """
        parts, likelihoods = list(zip(self.components, rows.phi, strict=True)), self.likelihoods
        spreads: Sequence[Spread | None] = [None] * len(parts)
        if candidates is None:
            spreads, divisors = [one.spread(phi) for one, phi in parts], self.divisors(rows, self.weights)
            scaling = self.scaling
            return Members(
                rows.outputs, spreads, self.weights, divisors, scaling.pooling, likelihoods, scaling.temperature
            )
        if self.link.needs_covariance or bool((candidates.precision < NO_COVARIANCE).any()):
            spreads = [one.spread(phi, candidates.precision[:, k]) for k, (one, phi) in enumerate(parts)]
        weights = self.weights
        if (
            self.weighting == "evidence"
        ):  # evidence weights depend on the prior precision, so `tuning.scores` passes one candidate at a time
            weights = self.with_prior_precision(candidates.precision[0].tolist()).weights
        divisors = self.divisors(rows, weights, candidates)
        return Members(
            rows.outputs, spreads, weights, divisors, candidates.pooling, likelihoods, candidates.temperature
        )

    def predictive(self, rows: Rows, seed: int | None = None, candidates: Candidates | None = None) -> Predictive:
        """Return the predictive distribution for the given rows, using the settings of this posterior or of the given candidates."""
        return self.likelihood.predictive(self.members(rows, candidates), self.link, seed)

    def predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Any:
        """Predict one batch. Error messages refer to the batch as `place`."""
        with located(place):
            captured = self.capture(inputs)
            for index, (component, one) in enumerate(zip(self.components, captured, strict=True)):
                with located(f"networks[{index}]"):
                    check_finite(one.features.flatten(0, 1), one.outputs.flatten(0, 1), range(one.outputs.numel()))
                    if component.head is None:
                        check_logits(component.network, inputs, one.rows(slice(0, 4096))[1], self.likelihood)
        # Copy the tensors, because a network may reuse their memory for the next batch.
        kept = [replace(one, features=one.features.clone(), outputs=one.outputs.clone()) for one in captured]
        return self.make_prediction(kept, seed)

    def predict_from_features(self, features: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """Return the prediction that `predict` would return, given features and outputs that the networks have already computed.

        Args:
            features: inputs (n, P) to each network's last layer, including the constant 1 if the layer has a bias.
            outputs: outputs (n, C) of each network.
        """
        # Copy the tensors, because the caller may change them before the fields are computed.
        kept = [Captured.of(one.clone(), two.clone(), None) for one, two in zip(features, outputs, strict=True)]
        with torch.no_grad():
            return self.make_prediction(kept)

    def make_prediction(self, captured: Sequence[Captured], seed: int | None = None) -> Any:
        """Predict from captured forward passes, which are kept because most fields are computed only when they are first read."""

        def field(compute: Callable[[Rows], Tensor], dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
            return lambda: self._by_rows(captured, compute, dtype)

        layout = captured[0].layout
        shared: dict[str, Any] = {
            "likelihood": self.likelihood,
            "axis": layout.axis if layout.sizes else -1,
            "ood_score_name": self.ood_score_name,
            "held_bytes": sum(
                part.numel() * part.element_size() for one in captured for part in (one.features, one.outputs)
            ),
        }
        fields: dict[str, Any] = {"ood_score": field(self._ood_score)}
        if self.has_distances:
            fields["distance"] = field(
                lambda rows: self.scaling.log_distance(self.log_distances(rows)[0], self.weights).exp()
            )
        if not self.likelihood.classification:
            fields["component_mean"] = field(lambda rows: self._mixture(rows).means)()
            # Use float64, because variances may overflow in float32 even if standard deviations do not.
            fields["component_variance"] = field(lambda rows: self._mixture(rows).variances, torch.float64)
            fields["component_noise"] = field(self._noise, torch.float64)
            return RegressionPrediction(fields, weights=self.weights, **shared)
        fields["probs"] = field(lambda rows: self.predictive(rows, seed).point())()
        fields["mutual_information"] = field(lambda rows: self.mutual_information(rows, seed))
        if self.distance_exponent > 0:
            fields["aleatoric"] = field(lambda rows: self._aleatoric(rows, seed))
        fields["logit_mean"] = field(lambda rows: torch.stack(list(rows.outputs)))
        fields["logit_variance"] = field(self.logit_variance)
        if self.ood_score_name != MAX_PROBABILITY:
            fields["far_field"] = field(self._far_field)
        return Prediction(fields, **shared)

    def logit_variance(self, rows: Rows) -> Tensor:
        """Return the variances (K, n, C) of the unscaled logits."""
        spreads = [component.spread(phi) for component, phi in zip(self.components, rows.phi, strict=True)]
        pairs = zip(spreads, rows.outputs, strict=True)
        return torch.stack([torch.zeros_like(two) if one is None else one.variance() for one, two in pairs])

    def _entropy(self, rows: Rows, seed: int | None) -> Tensor:
        return self.predictive(rows, seed).entropy()  # type: ignore[attr-defined]

    def mutual_information(self, rows: Rows, seed: int | None) -> Tensor:
        """Return the mutual information between the label and the weights, of shape (n,), or (n, C) for multi-label data."""
        assert isinstance(self.likelihood, ClassificationLikelihood)
        return self._entropy(rows, seed) * self.likelihood.epistemic_share(self.members(rows), seed or 0)

    def _aleatoric(self, rows: Rows, seed: int | None) -> Tensor:
        # Return the aleatoric entropy without the effect of distance. The entropy that distance adds is epistemic: nearby data would
        # remove it.
        near = copy(self)  # copied, because the constructor's checks of values cannot be traced
        near.scaling = replace(self.scaling, exponent=0.0)
        return torch.minimum(near._entropy(rows, seed) - near.mutual_information(rows, seed), self._entropy(rows, seed))

    def _mixture(self, rows: Rows) -> RegressionPredictive:
        found = self.predictive(rows)
        assert isinstance(found, RegressionPredictive)
        return found

    def _noise(self, rows: Rows) -> Tensor:
        return self._mixture(rows).noises

    # --- outlier scores ---------------------------------------------------------------------------------------------

    @property
    def ood_score_name(self) -> str:
        """Name of the outlier score used in predictions: the best one available."""
        if self.components[0].layer is None:
            return MAX_PROBABILITY if self.likelihood.classification else VARIANCE
        if not self.likelihood.classification:
            return DISTANCE if self.has_distances else NORM
        reference = self.scaling.reference
        return FAR_FIELD if reference is None or reference.score is None else COMBINED

    def _norms(self, rows: Rows) -> Tensor:
        layers = [component.on(phi.device) for component, phi in zip(self.components, rows.phi, strict=True)]
        return torch.stack([one.curvature.mahalanobis(phi) for one, phi in zip(layers, rows.phi, strict=True) if one])

    def _far_field(self, rows: Rows) -> Tensor:
        means = torch.stack(list(rows.outputs))
        return far_field_score(means, self._norms(rows), self.weights.to(means), self.likelihood)  # type: ignore[arg-type]

    def _outlier_terms(self, rows: Rows) -> tuple[Tensor, Tensor]:
        # Return the far-field score, mean energy and log distance as a tensor (3, n), and each network's energy (K, n).
        means, weights = torch.stack(list(rows.outputs)), self.weights.to(rows.outputs[0])
        log_distance, log_norm = self.log_distances(rows)
        own = energies(means, self.scaling.log_excess(log_norm), self.likelihood)  # type: ignore[arg-type]
        distance = self.scaling.log_distance(log_distance, weights)
        return torch.stack([self._far_field(rows), weights @ own, distance]), own

    def _ood_score(self, rows: Rows) -> Tensor:
        name, weights = self.ood_score_name, self.weights.to(rows.outputs[0])
        if name == MAX_PROBABILITY:
            return self.predictive(rows).outlier_score()
        if name == FAR_FIELD:
            return self._far_field(rows)
        if name == VARIANCE:
            return self._mixture(rows).disagreement()
        if name == NORM:
            return weights @ self._norms(rows).log()
        if name == DISTANCE:
            log_distance, log_norm = self.log_distances(rows)
            return self.scaling.log_distance(log_distance, weights) + weights @ self.scaling.log_excess(log_norm)
        reference = self.scaling.reference.score_at(self.weights) if self.scaling.reference else None
        assert reference is not None  # `ood_score_name` is COMBINED only if there is a reference
        return outlier_score(list(self._outlier_terms(rows)[0]), reference)

    # --- new posteriors from this one -------------------------------------------------------------------------------

    def with_parts(self, **changes: Any) -> Self:
        """Return the mixture with some constructor arguments replaced; `tuning` becomes None unless it is given."""
        parts: dict[str, Any] = {
            "components": self.components,
            "link": self.link,
            "weights": self.weighting if self.weighting != "given" else self.weights,
            "scaling": self.scaling,
        }
        return type(self)(**(parts | changes))

    def with_prior_precision(self, prior_precision: float | Sequence[float]) -> Self:
        """Return the mixture with a different prior precision, given as one number or one number per component."""
        for component in self.components:
            component.require_layer("a prior precision")
        values = per_component(prior_precision, len(self.components), "prior_precision")
        moved = [component.at(value) for component, value in zip(self.components, values, strict=True)]
        return self.with_parts(components=moved)

    def with_temperature(self, temperature: float) -> Self:
        """Return the mixture with a different temperature, which divides all logits. Temperatures below 1 sharpen predictions."""
        return self.with_parts(scaling=replace(self.scaling, temperature=temperature))

    def with_pooling(self, pooling: float) -> Self:
        """Return the mixture with a different pooling coefficient (1 mixes the networks' probabilities; 0 averages their logits)."""
        return self.with_parts(scaling=replace(self.scaling, pooling=pooling))

    def with_distance_exponent(self, exponent: float, *, onset: float | None = None) -> Self:
        """Return the mixture with a different distance exponent and, if `onset` is given, a different onset.

        Args:
            exponent: distance exponent gamma; at 0, distance has no effect.
            onset: distance, relative to its median on the validation data, beyond which logits shrink; by default, unchanged.
        """
        onset = self.scaling.onset if onset is None else onset
        return self.with_parts(scaling=replace(self.scaling, exponent=exponent, onset=onset))

    def with_weights(self, weights: str | Sequence[float] | Tensor) -> Self:
        """Return the mixture with different weights: "uniform", "evidence", or K numbers that sum to 1."""
        return self.with_parts(weights=weights)

    def with_link(self, link: str | Link) -> Self:
        """Return the mixture with a different link."""
        return self.with_parts(link=link)

    def with_noise(self, noise: float | Sequence[float] | Tensor) -> Self:
        """Return the regression posterior with a different noise level, which tuning rules then leave unchanged.

        Args:
            noise: standard deviation in the targets' units, given as one number, one number per output, or a table (K, D) with one row
                per component. For heteroscedastic networks, the noise is a factor that multiplies the predicted standard deviation.
        """
        if not isinstance(self.likelihood, Gaussian):
            raise OptionError(
                f"likelihood {self.likelihood.name!r} has no noise. Only the Gaussian likelihood has noise."
            )
        given: Any = noise.tolist() if hasattr(noise, "tolist") else noise
        if given is None:
            raise OptionError(
                "must be one number, or one for each output; got None. To choose the noise automatically, use "
                "posterior.tune(val_loader).",
                argument="noise",
            )
        table = isinstance(given, (list, tuple)) and any(hasattr(row, "__len__") for row in given)
        rows = per_component(given, len(self.components), "noise") if table else [given] * len(self.components)
        moved = []
        for component, row in zip(self.components, rows, strict=True):
            likelihood = replace(component.likelihood, noise=row, estimated=False)  # type: ignore[type-var]
            if component.layer is not None:
                likelihood.deviation(len(component.layer.weights))  # type: ignore[attr-defined]
            moved.append(component.with_likelihood(likelihood))
        return self.with_parts(components=moved)

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
        """Run the networks once over a loader and keep the data that tuning needs. A `HeldOut` is returned unchanged."""
        if isinstance(loader, HeldOut):
            if labelled and loader.labels is None:
                raise DataError(f"the {where} was read without labels. Pass batches of (inputs, labels).")
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
        """Choose the prior precision. Some rules also choose the temperature, pooling and distance exponent; others reset them.

        Args:
            val_loader: validation data, which are read once; not needed for `mola.rules.Evidence`.
            rule: the name of a rule, or an object from `mola.rules`; by default, the likelihood's default rule.
            progress: whether to show a progress bar if stderr is a terminal.
            team: processes that tune together. Each process reads its own shard.

        Returns:
            A new posterior, whose `tuning` attribute records the chosen settings.
        """
        for component in self.components:
            component.require_layer("tuning")
        chosen = as_rule(rule, self.likelihood, val_loader)
        start = self.with_parts(scaling=LogitScaling(reference=self.scaling.reference))
        if self.weighting == "evidence" and getattr(chosen, "fixes_weights", False):
            start = start.with_weights(start.weights)
        data: HeldOut | None = None
        notes: tuple[str, ...] = ()
        with torch.inference_mode(False), torch.no_grad():
            if val_loader is not None:
                needs_labels = True if getattr(chosen, "needs_labels", True) else None
                data = self.read(val_loader, "validation loader", labelled=needs_labels, progress=progress, team=team)
                data.check_labels()
                if self.has_distances:
                    reference = start.reference_on(data)
                    notes = data.notes_on_norms(reference, [one.layer.distance for one in self.components if one.layer])
                    start = start.with_parts(scaling=replace(start.scaling, reference=reference))
            tuning = chosen(start, data)  # type: ignore[arg-type]
            tuning = replace(tuning, notes=(*tuning.notes, *notes))
            if team is not None:
                tuning = team.share(tuning)
        return start.tuned(tuning)

    def tuned(self, tuning: Tuning) -> Self:
        """Return the mixture with the settings chosen by a rule."""
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
        return moved.with_parts(components=components, scaling=scaling, tuning=tuning)

    def reference_on(self, data: HeldOut) -> Reference:
        """Return the typical distances, norms and outlier scores of the validation data."""
        reference = data.feature_scales(
            [layer.distance for one in self.components if (layer := one.on(torch.device("cpu")))]
        )
        if not self.likelihood.classification:
            return reference
        posterior = self.with_parts(scaling=replace(self.scaling, reference=reference))
        parts = []
        for rows, _ in data.chunks(ROW_NUMBERS // max(phi.shape[1] for phi in data.phi)):
            terms, own = posterior._outlier_terms(rows)
            parts.append(torch.cat([terms, own]).T)
        return data.with_scores(reference, torch.cat(parts) if parts else None)

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
                size = ROW_NUMBERS // max(phi.shape[1] + 1 for phi in data.phi)
                parts = [posterior._member_log_likelihoods(*part) for part in data.chunks(size)]
                # `parts` is empty if the shard of this process is empty.
                logs = data.gather(torch.cat(parts) if parts else None)
                best = logs.amax(1, keepdim=True)
                relative = (logs - best).exp()
                mixture = (relative @ weights.to(relative)).clamp_min(torch.finfo(torch.float64).tiny).log()
                return relative, float((mixture + best.squeeze(1)).mean())

            if self.scaling.exponent == 0 and self.scaling.pooling == 1:
                weights = stacking_weights(evaluate(self.weights)[0])
            else:
                weights = stacking_in_turn(evaluate, [self.weights.cpu(), uniform_weights(len(self.components))])
        shared = weights.tolist() if team is None else team.share(weights.tolist())
        tuning = self.tuning
        if tuning is not None:
            tuning = replace(tuning, summary=f"{tuning.summary} Stacking then chose the weights.")
        return self.with_parts(weights=shared, tuning=tuning)

    def _member_log_likelihoods(self, rows: Rows, labels: Tensor | None) -> Tensor:
        # Return the log-likelihood (m, K) of each datum, or of each known label of multi-label data, under each component. The
        # components are scaled and pooled as in the mixture.
        assert labels is not None
        likelihood = self.likelihood
        if isinstance(likelihood, ClassificationLikelihood):
            probs = likelihood.member_probabilities(self.members(rows), self.link)
            members: list[Predictive] = [likelihood.distribution(one) for one in probs]
        else:
            whole = self._mixture(rows)
            members = [whole.component(k) for k in range(len(self.components))]
        return torch.stack([-member.scores(labels)["nll"] for member in members], dim=-1)

    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood of the training labels under each component, of shape (K,)."""
        with torch.no_grad():
            values = [
                one.log_evidence(torch.tensor(one.prior_precision, dtype=torch.float64, device="cpu"))
                for one in self.components
            ]
        return torch.stack(values).cpu()

    # --- samples and bounds -----------------------------------------------------------------------------------------

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> WeightSamples:
        """Draw last-layer weights from the mixture: first a component according to its weight, then weights from its posterior.

        Args:
            n: number of draws.
            generator: random number generator on the CPU; by default, torch's default generator.
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
        """Return an upper bound on the confidence in the predicted class of each input, based on the paper's theorem.

        The bound holds only for the probit link. Other links raise `BoundError`.

        Args:
            inputs: one batch.
            lemma: whether to return each component's bound (the paper's lemma) instead of the mixture's bound.

        Returns:
            Bounds of shape (n,), or (K, n) if `lemma` is True; for multi-label data, (n, C) or (K, n, C).
        """
        self._require_bounds()
        captured = self.capture(one_batch(inputs))
        if not lemma:
            return self._by_rows(captured, lambda rows: bounds.mixture_bound(self, rows, lemma=False))
        parts = [
            self._by_rows(captured, lambda rows, k=k: bounds.mixture_bound(self, rows, lemma=True)[k])  # type: ignore[misc]
            for k in range(len(self.components))
        ]
        return torch.stack(parts)

    def far_field_limit(self, inputs: Tensor) -> Tensor:
        """Return the probabilities (n, C) that `posterior(delta * inputs)` approaches as delta grows without bound.

        The limit is exact for bias-free ReLU networks, whose features scale with the input. Other networks raise `BoundError`. With
        a distance exponent, the limit is 1/C, except at inputs where all features of a network are 0, because such features
        remain 0 at every multiple of the input.
        """
        self._require_bounds()
        once, far = self.capture(inputs), self.capture(bounds.SCALE * inputs)
        limit = bounds.far_field_limit(self, once, far)
        return limit.to(torch.promote_types(once[0].outputs.dtype, torch.float32)).to(once[0].outputs.device)

    def _require_bounds(self) -> None:
        if not self.likelihood.classification:
            raise BoundError(
                "a regression model has no confidence to bound. Far from the training data, its standard deviation grows without "
                "bound."
            )
        bounds.require_probit(self.link)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save everything except the networks: sums, prior precisions, weights, link, scaling, and a checksum of each network.

        Args:
            directory: folder to write to. If the folder already contains a posterior, that posterior remains readable until the new
                one is complete.

        Returns:
            The folder, which can be passed to `mola.load(directory, networks)`.
        """
        from molaplace.saving.posterior import save_posterior

        return save_posterior(self, directory)


def _listed(values: Iterable[float]) -> str:
    return ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))
