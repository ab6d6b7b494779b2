"""Mixtures of Laplace approximations: `LaplaceMixture`, what all kinds share, and `MoLA`, over last layers.

MAP, deep ensemble, last-layer Laplace and MoLA are one class, `MoLA`: one component or several, with or without curvature.
A posterior is a value: `tune`, `reweight` and `with_*` return new ones that share the networks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from mola.bounds import SCALE, component_bounds, divided_bounds, far_field_logits, require_probit
from mola.component import Component, LaplaceComponent, WeightSamples, draw_weights, per_component
from mola.cooling import Cooling, Usual
from mola.distributed import Team
from mola.errors import BoundError, DataError, OptionError, located, warn
from mola.laplace import ClassGeometry, FeatureSpread, LogitMoments, in_range
from mola.likelihood import Likelihood
from mola.links import Link, as_link, divided_and_cooled
from mola.mixture import (
    Mixture,
    check_weighting,
    describe_networks,
    describe_numbers,
    describe_weights,
    evidence_weights,
    stacked_in_turn,
    stacking_weights,
    uniform_weights,
)
from mola.network import DenseFeatures, Inputs, check_finite, one_batch, undisturbed, without_autocast
from mola.numerics import exact, seed_from
from mola.outliers import LEAST_SURE, OutlierScore, ood_score, score_name
from mola.positions import DenseBatch
from mola.prediction import Prediction, later
from mola.saving import archive, storage
from mola.tuning.candidates import NOT_HELD_OUT, HeldOut, LastLayerProblem, Problem, Tuning, read_held_out
from mola.tuning.choosing import choose_together
from mola.tuning.rules import Rule
from mola.uncertainty import energies, entropy, epistemic_share, outlier_terms

Kind = TypeVar("Kind", bound=LaplaceComponent)

NO_SPREAD = 1e-6
"""Relative spread of scores that are all alike."""

ROWS_AT_ONCE = 4096
"""Validation data whose outlier scores are made together."""


class LaplaceMixture(Mixture, ABC, Generic[Kind]):
    """A mixture of Laplace approximations, over whichever weights of its networks.

    Calling it gives probabilities (n, C); `predict` gives a `Prediction`.

    Args:
        components: the networks with their curvature.
        link: from logits to probabilities.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        tuning: how the prior precision was chosen, if it was.
        cooling: what logits are divided by before they become probabilities.
    """

    components: tuple[Kind, ...]
    link: Any
    _cooling: Cooling

    def __init__(
        self,
        components: Sequence[Kind],
        link: Any = "probit",
        weights: str | Sequence[float] | Tensor = "uniform",
        tuning: Tuning | None = None,
        cooling: Cooling | None = None,
    ) -> None:
        weighting = check_weighting(weights, len(components))
        by_evidence = isinstance(weighting, str) and weighting == "evidence"
        super().__init__(components, "uniform" if by_evidence else weighting)
        self.components = tuple(components)
        self.link = self._as_link(link)
        self.weighting = weighting if isinstance(weighting, str) else "given"
        self.tuning = tuning
        self._cooling = Cooling() if cooling is None else cooling
        self._check_cooling()
        if by_evidence:
            self.weights = evidence_weights(self.log_evidence())

    # --- what each kind says for itself -----------------------------------------------------------------------------

    @abstractmethod
    def _as_link(self, link: Any) -> Any:
        # The link of that name, or the link itself; `OptionError` if it is unknown.
        ...

    @abstractmethod
    def _held_out(self, loader: Iterable[Any], where: str, *, labelled: bool, progress: bool, team: Team) -> HeldOut:
        # Run every network once over a loader, and keep what tuning needs. Called inside `undisturbed(*networks)`.
        ...

    @abstractmethod
    def _problem(self, **shared: Any) -> Problem: ...

    @abstractmethod
    def _members_on(self, data: HeldOut) -> Iterable[Tensor]:
        # Probabilities (n, C) of each component on held-out data, in float64 on the CPU.
        ...

    @abstractmethod
    def _described(self) -> str: ...

    @property
    def has_distances(self) -> bool:
        """Whether distances from the training classes are known."""
        return False

    def _usual_in_training(self) -> Usual:
        # What is usual of the features, as the training data show it.
        raise OptionError(self._why_no_distances())

    def _usual_on(self, data: HeldOut) -> Usual:
        raise OptionError(self._why_no_distances())

    def _why_no_distances(self) -> str:
        return "there are no distances from the training data here: only posteriors of mola.fit have them, over last layers."

    def _check_cooling(self) -> None:
        if self._cooling.exponent > 0 and not self.has_distances:
            raise OptionError(self._why_no_distances())

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> tuple[float, ...]:
        """One for each component."""
        return tuple(component.precision for component in self.components)

    @property
    def likelihood(self) -> Likelihood:
        """What the networks' outputs mean."""
        return self.components[0].likelihood

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """The trained networks."""
        return tuple(component.network for component in self.components)

    @property
    def cooling(self) -> Cooling:
        """What logits are divided by before they become probabilities."""
        if self._cooling.usual is None and self.has_distances:
            # Not before it is asked for: it solves for the covariance within classes.
            self._cooling = replace(self._cooling, usual=self._usual_in_training())
        return self._cooling

    @property
    def temperature(self) -> float:
        """What all logits are divided by; below 1 sharpens."""
        return self._cooling.temperature

    @property
    def distance_exponent(self) -> float:
        """How strongly logits are cooled by the distance from the training classes; 0 is not at all."""
        return self._cooling.exponent

    def __repr__(self) -> str:
        # What it is made of and how it was tuned, in a few lines; the networks are in `.networks`.
        name, networks = type(self).__name__, describe_networks(self.networks)
        weights = describe_weights(self.weights, self.weighting)
        curvature = self.components[0].curvature
        if curvature is None:
            return f"{name}(a plain ensemble of {networks}, without covariance, weights: {weights})"
        tuned = "as given" if self.tuning is None else f"by {self.tuning.rule}"
        return (
            f"{name}({networks}, fitted on {curvature.count:,} training data\n"
            f"  structure: {self._described()}\n"
            f"{self._described_link()}"
            f"  prior precision: {describe_numbers(self.prior_precision)}, {tuned}\n"
            f"{self._described_cooling()}"
            f"  weights: {weights}\n)"
        )

    def _described_link(self) -> str:
        return f"  link: {self.link.name}\n"

    def _described_cooling(self) -> str:
        parts = [f"temperature {self.temperature:.4g}"] if self.temperature != 1 else []
        if self.distance_exponent > 0:
            parts.append(f"by distance, with exponent {self.distance_exponent:.4g}")
        return f"  logits cooled: {' and '.join(parts)}\n" if parts else ""

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
        self._look()
        with undisturbed(*self.networks, passes_only=True):
            moments = self._moments(one_batch(inputs))
        if isinstance(moments, DenseBatch):
            return moments.gather(lambda some: [self._returned_probabilities(some, seed)])[0]
        return self._returned_probabilities(moments, seed)

    def _returned_probabilities(self, moments: Sequence[LogitMoments], seed: int | None) -> Tensor:
        with without_autocast(moments[0].mean.device):
            return moments[0].returned(self._probabilities(moments, seed))

    def _probabilities(self, moments: Sequence[LogitMoments], seed: int | None) -> Tensor:
        # Probabilities (n, C) of the mixture, from its logits.
        return self._mix(self._members(moments, seed))

    def _members(self, moments: Sequence[LogitMoments], seed: int | None) -> list[Tensor]:
        # Probabilities (n, C) of each component.
        return [self.link(one, seed) for one in self._cooled(moments)]

    def _cooled(self, moments: Sequence[LogitMoments]) -> list[LogitMoments]:
        return list(moments) if self._cooling.changes_nothing else self.cooling(moments, self.weights)

    def _moments(self, inputs: Inputs) -> list[LogitMoments] | DenseBatch:
        # Moments of each network's logits; of outputs at many positions, what gives them in portions.
        moments: list[LogitMoments] = []
        dense: list[tuple[Any, DenseFeatures]] = []
        for index, component in enumerate(self.components):
            with located(f"models[{index}]"):
                found = component.observed(inputs)
                if isinstance(found, DenseFeatures):
                    dense.append((component, found))
                    continue
                moments.append(found)
                check_finite(moments[-1].mean)
        if dense:
            return DenseBatch.of(dense, others=len(moments))
        classes = [one.mean.shape[1] for one in moments]
        if len(set(classes)) > 1:
            raise DataError(f"expected networks with the same number of classes, got {classes}.")
        return in_range(moments)

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        self._look()
        with located(place), undisturbed(*self.networks, passes_only=True):
            moments = self._moments(inputs)
        if isinstance(moments, DenseBatch):
            return moments.prediction(lambda some: self._said_of(some, seed))
        return self._said_of(moments, seed)

    def _said_of(self, moments: Sequence[LogitMoments], seed: int | None) -> Prediction:
        with without_autocast(moments[0].mean.device):
            probs, weights = self._probabilities(moments, seed), self.weights
            mean = torch.stack([one.mean for one in moments])
        kept = [one.kept(values) for one, values in zip(moments, mean, strict=True)]
        back = moments[0].returned

        def share() -> Tensor:
            return epistemic_share(self._cooled(kept), weights.tolist(), seed or 0)

        likelihood = self.likelihood
        name = score_name(kept, self._cooling.usual)

        def score() -> OutlierScore:
            return ood_score(kept, mean, probs, weights.to(mean), self._cooling)

        def far_field() -> Tensor:
            found = score().far_field
            assert found is not None  # by its name
            return back(found)

        return Prediction(
            back(probs),
            later(lambda: back(entropy(likelihood.answer_probabilities(probs)) * share()), mean.device),
            later(lambda: back(score().values), mean.device),
            name,
            back(mean),
            later(lambda: back(torch.stack([one.variance for one in kept])), mean.device),
            later(lambda: back(self.cooling.log_distance(kept, weights).exp()), mean.device)
            if self.has_distances
            else None,
            None if name == LEAST_SURE else later(far_field, mean.device),
            held=probs.nbytes + sum(one.nbytes for one in kept),
            likelihood=likelihood,
        )

    # --- new values from this one -----------------------------------------------------------------------------------

    def _parts(self) -> dict[str, Any]:
        weights = self.weighting if self.weighting != "given" else self.weights
        return {
            "components": self.components,
            "link": self.link,
            "weights": weights,
            "tuning": self.tuning,
            "cooling": self._cooling,
        }

    def _with(self, **changes: Any) -> Self:
        return type(self)(**(self._parts() | changes))

    def with_prior_precision(self, prior_precision: float | Sequence[float]) -> Self:
        """The same mixture at another prior precision: one number, or one for each component."""
        for component in self.components:
            component.require_fitted("a prior precision")
        values = per_component(prior_precision, len(self.components), "prior_precision")
        moved = [component.at(value) for component, value in zip(self.components, values, strict=True)]
        return self._with(components=moved, tuning=None)

    def with_temperature(self, temperature: float) -> Self:
        """The same mixture with all logits divided by a temperature: above 1 is more careful, below 1 sharpens."""
        return self._with(cooling=replace(self._cooling, temperature=temperature), tuning=None)

    def with_distance_exponent(self, exponent: float) -> Self:
        """The same mixture with another exponent of the distance by which logits are cooled: 0 is not at all.

        Args:
            exponent: gamma; `mola.Distance` chooses it on validation data, mostly between 0.5 and 4.

        Returns:
            A new posterior; `OptionError` if nothing is known of distances.
        """
        return self._with(cooling=replace(self._cooling, exponent=exponent), tuning=None)

    def with_weights(self, weights: str | Sequence[float] | Tensor) -> Self:
        """The same mixture with other weights: "uniform", "evidence", or K numbers that sum to 1."""
        return self._with(weights=weights)

    def with_link(self, link: str | Link) -> Self:
        """The same mixture with another link."""
        return self._with(link=link)

    def tune(
        self,
        val_loader: Iterable[Any] | HeldOut | None = None,
        rule: Rule | str | None = None,
        *,
        progress: bool = True,
        team: Team | None = None,
    ) -> Self:
        """Choose the prior precision, and with some rules a temperature or an exponent of the distance; others set these to 1 and 0.

        Args:
            val_loader: validation data, read once, or what was read of them; not for `mola.Evidence`.
            rule: "threshold" (the paper's, as None), "nll", "brier", "ece", "distance" or "evidence", or an object such as
                `mola.Distance(price=0.02)`. All but `mola.Evidence(shared=False)` choose one prior precision for all components.
            progress: whether to show a progress bar on stderr, if that is a terminal.
            team: the processes that tune together, each with its own shard; None tunes alone.

        Returns:
            A new posterior; `.tuning` says how it was chosen. `OptionError` if the rule is none, or there is no curvature.
        """
        together = Team.alone() if team is None else team
        for component in self.components:
            component.require_fitted("tuning the prior precision")

        def weights_at(precision: float | Sequence[float]) -> Tensor:
            if self.weighting != "evidence":
                return self.weights
            each = per_component(precision, len(self.components), "prior_precision")
            at = torch.tensor(each, dtype=torch.float64, device="cpu")
            pairs = zip(self.components, at, strict=True)
            return evidence_weights(torch.stack([component.log_evidence(one) for component, one in pairs]))

        doubts: list[str] = []
        usual: list[Usual] = []
        seen: set[int] = set()

        def read(loader: Any, where: str, labelled: bool) -> HeldOut:
            data = self._read(loader, where, labelled=labelled, progress=progress, team=together)
            if labelled and id(data) not in seen:  # a rule may ask another, which reads the same data
                seen.add(id(data))
                doubts.extend(self._doubts(data))
            if self.has_distances and not usual:  # the validation data are read first
                usual.append(self._usual_on(data))
            return data

        problem = self._problem(
            weights_at=weights_at,
            read=read,
            log_evidence=lambda index, precision: self.components[index].log_evidence(precision),
            progress=progress,
            usual=usual,
            lacks_distances=None if self.has_distances else self._why_no_distances(),
        )
        with torch.inference_mode(False), torch.no_grad():
            tuning = choose_together(rule, problem, val_loader, together, check=self.check_networks)
        tuning = replace(tuning, notes=(*doubts, *tuning.notes))
        cooling = Cooling(tuning.temperature, tuning.distance_exponent, usual[0] if usual else self._cooling.usual)
        return self._at(tuning)._with(tuning=tuning, cooling=cooling)

    def _at(self, tuning: Tuning) -> Self:
        return self.with_prior_precision(tuning.prior_precision)

    def reweight(self, val_loader: Iterable[Any] | HeldOut, *, progress: bool = True, team: Team | None = None) -> Self:
        """Stacking: the weights that maximise the mixture's log-likelihood on validation data.

        Cooling by distance depends on the weights, through the mixture's distance. The log-likelihood is then not concave in them:
        distances and weights are found in turn, from these weights and from uniform ones, while the log-likelihood of the mixture as
        it predicts rises. The result is no worse than either start, though perhaps not the best there is; doing it again changes
        nothing.

        Args:
            val_loader: validation data with labels, read once, or what was read of them.
            progress: whether to show a progress bar on stderr, if that is a terminal.
            team: the processes that do it together, each with its own shard; None is this one alone.

        Returns:
            A new posterior.
        """
        together = Team.alone() if team is None else team
        with together.work("reweight"), torch.no_grad():
            data = self._read(val_loader, "validation loader", labelled=True, progress=progress, team=together)
            self._doubts(data)
            asked = self.likelihood.asked(data.labels)  # type: ignore[arg-type]
            known = (asked >= 0).nonzero().flatten()

            def likelihoods(posterior: Self) -> Tensor:
                tables = (self.likelihood.table(probs.T[None])[0] for probs in posterior._members_on(data))
                return together.rows(torch.stack([table[asked[known], known] for table in tables], dim=1))

            def judged(weights: Tensor) -> tuple[Tensor, float]:
                # One process speaks for all, of the score too: they take the same number of turns.
                at = self.with_weights(together.share(weights.tolist()))
                found = likelihoods(at)
                mixed = (found.double() @ at.weights.cpu()).clamp_min(torch.finfo(torch.float64).tiny)
                return found, together.share(float(mixed.log().mean()))

            if self.distance_exponent == 0:
                weights = stacking_weights(likelihoods(self))
            else:
                weights = stacked_in_turn(judged, [self.weights.cpu(), uniform_weights(len(self.components))])
            return self.with_weights(together.share(weights.tolist()))

    def _read(
        self, loader: Iterable[Any] | HeldOut, where: str, *, labelled: bool, progress: bool, team: Team
    ) -> HeldOut:
        if isinstance(loader, HeldOut):
            if labelled and loader.labels is None:
                raise DataError(f"the {where}: what was read of it has no labels. Read (inputs, labels).")
            return loader
        self.check_networks()
        with undisturbed(*self.networks):
            data = self._held_out(loader, where, labelled=labelled, progress=progress, team=team)
        if labelled:
            data.check_labels(where)
        return data

    def with_doubt(self, words: str | None) -> Self:
        """The same, with one more note on how it was tuned, which is warned of; what makes one doubt is said once.

        Args:
            words: for the user; None if there is nothing to say.

        Returns:
            A new posterior, or this one.
        """
        if words is None or self.tuning is None or any(NOT_HELD_OUT in note for note in self.tuning.notes):
            return self
        warn(words)
        return self._with(tuning=replace(self.tuning, notes=(words, *self.tuning.notes)))

    def _doubts(self, data: HeldOut) -> tuple[str, ...]:
        curvatures = [component.curvature for component in self.components if component.curvature is not None]
        if len(curvatures) < len(self.components):
            return ()
        words = data.unlike_held_out([(one.count, one.log_likelihood) for one in curvatures])
        if words is None:
            return ()
        warn(words)
        return (words,)

    def check_networks(self) -> None:
        """Compare every number of the networks with what was fitted; an error if one has changed.

        `save`, `tune`, `reweight` and exports do so. A prediction looks at where each tensor lies, how often PyTorch has counted a
        change of it, and a few of its numbers: it does not notice a few numbers that were changed through `.data`.
        """
        self._look(thorough=True)

    def _look(self, *, thorough: bool = False) -> None:
        for index, component in enumerate(self.components):
            with located(f"models[{index}]"):
                component.check_network(thorough=thorough)

    def log_evidence(self) -> Tensor:
        """Log marginal likelihoods (K,) of the training labels, one for each component."""
        with torch.no_grad():
            values = [
                component.log_evidence(torch.tensor(component.precision, dtype=torch.float64, device="cpu"))
                for component in self.components
            ]
        return torch.stack(values)


class MoLA(LaplaceMixture[Component]):
    """A mixture of last-layer Laplace approximations. Made by `mola.fit`, `mola.ensemble` or `mola.load`.

    Calling it gives probabilities (n, C); `predict` gives a `Prediction`.

    Args:
        components: the networks with their curvature.
        link: from logits to probabilities.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        tuning: how the prior precision was chosen, if it was.
    """

    link: Link

    def _as_link(self, link: str | Link) -> Link:
        return as_link(link, self.likelihood)

    def _members(self, moments: Sequence[LogitMoments], seed: int | None) -> list[Tensor]:
        if self.distance_exponent == 0 or self.link.cooled_by is None:  # without distances as ever, to the last bit
            return super()._members(moments, seed)
        pairs = zip(moments, self.cooling.divisors(moments, self.weights), strict=True)
        return [divided_and_cooled(self.link, one, divisor) for one, divisor in pairs]

    @property
    def structure(self) -> str | None:
        """Name of the curvature structure; None for a plain ensemble."""
        curvature = self.components[0].curvature
        return None if curvature is None else curvature.structure.name

    def _described(self) -> str:
        return str(self.structure)

    def _held_out(self, loader: Iterable[Any], where: str, *, labelled: bool, progress: bool, team: Team) -> HeldOut:
        heads = [component.head for component in self.components]
        return read_held_out(
            self.networks,
            heads,
            loader,
            where=where,
            labelled=labelled,
            progress=progress,
            team=team,
            likelihood=self.likelihood,
        )

    def _problem(self, **shared: Any) -> LastLayerProblem:
        curvatures = [component.curvature for component in self.components if component.curvature is not None]
        return LastLayerProblem(
            spectra=[one.spectrum for one in curvatures],
            link=self.link,
            likelihood=self.likelihood,
            geometries=self._geometries(),
            **shared,
        )

    def _geometries(self) -> list[ClassGeometry] | None:
        found = [None if one.curvature is None else one.curvature.geometry for one in self.components]
        return None if any(one is None for one in found) else [one for one in found if one is not None]

    @property
    def has_positions(self) -> bool:
        """Whether the networks have outputs at many positions of each input, as pixels or tokens."""
        head = self.components[0].head
        return head is not None and head.positions is not None

    @property
    def has_distances(self) -> bool:
        """Whether distances from the training classes are known."""
        return self._geometries() is not None

    def _usual_in_training(self) -> Usual:
        return Usual(tuple(one.training_scale for one in self._geometries() or ()))

    def _usual_on(self, data: HeldOut) -> Usual:
        usual, parts = data.usual(self._geometries() or ()), []
        cooling = Cooling(usual=usual)
        # At any prior precision: neither lengths nor distances depend on it.
        posteriors = [
            curvature.spectrum.posterior(component.precision)
            for component in self.components
            if (curvature := component.curvature) is not None
        ]
        log_distances, log_lengths = data.measured(self._geometries() or ())
        for part, features, logits in data.portions(ROWS_AT_ONCE):
            pairs = zip(posteriors, features, strict=True)
            lengths = torch.stack([posterior.mahalanobis(values) for posterior, values in pairs])
            distance = cooling.mean_log(log_distances[:, part], self.weights)
            excess, every = cooling.excess_of(log_lengths[:, part]), torch.stack(logits)
            own = energies(every, excess, self.likelihood)
            terms = outlier_terms(every, lengths, distance, excess, self.weights, self.likelihood, own)
            parts.append(torch.cat([terms, own]).T)
        rows = data.team.rows(torch.cat(parts) if parts else None)
        # One datum has no spread, and equal scores have none but rounding: they are then taken as they are.
        middle, spread = rows.mean(0), rows.std(0) if len(rows) > 1 else torch.zeros_like(rows[0])
        spread = torch.where(spread > NO_SPREAD * (1 + middle.abs()), spread, 1)
        pairs_of = zip(middle.tolist(), spread.tolist(), strict=True)
        score = data.team.share([list(pair) for pair in pairs_of])
        pairs_known = tuple((mean, deviation) for mean, deviation in score)
        return replace(usual, score=pairs_known[:3], energies=tuple(mean for mean, _ in pairs_known[3:]))

    def _why_no_distances(self) -> str:
        if self.components[0].curvature is None:
            return "a plain ensemble has no distances from the training data. Make the posterior with mola.fit(models, train_loader)."
        return (
            "this posterior has no distances from the training classes: it was fitted with distances=False, or by an older version of "
            "mola. Fit again: mola.fit(models, train_loader)."
        )

    def _members_on(self, data: HeldOut) -> Iterable[Tensor]:
        moments = []
        for component, features, logits in zip(self.components, data.features, data.logits, strict=True):
            curvature = component.curvature
            spread = None
            if curvature is not None:
                posterior = curvature.spectrum.posterior(component.precision).measured_by(component.distance)
                spread = posterior.at(features.double())
            moments.append(LogitMoments(logits.double(), spread, None, self.likelihood))
        return (self.link(one) for one in self._cooled(moments))

    def of_held_out(self, data: HeldOut, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """What `predict` says of data that the networks have seen already, without running them again.

        Args:
            data: as read with these networks and heads.
            part: which rows.

        Returns:
            Logits (K, n, C), probabilities (n, C) and outlier scores (n,), in main memory.
        """
        moments = []
        for component, features, logits in zip(self.components, data.features, data.logits, strict=True):
            posterior = component.prepare()
            own = logits.device, torch.promote_types(logits.dtype, torch.float32)
            device, dtype = own if posterior is None else (posterior.device, posterior.dtype)
            spread = None if posterior is None else posterior.at(features[part].to(device, dtype))
            moments.append(LogitMoments(logits[part].to(device, dtype), spread, None, self.likelihood))
        moments = in_range(moments)
        with torch.no_grad(), without_autocast(moments[0].mean.device):
            mean = torch.stack([one.mean for one in moments])
            probs = self._probabilities(moments, None)
            score = ood_score(moments, mean, probs, self.weights.to(mean), self._cooling).values
        mean, probs, score = (moments[0].returned(values).cpu() for values in (mean, probs, score))
        return mean, probs, score

    # --- what it knows ----------------------------------------------------------------------------------------------

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> WeightSamples:
        """Draw last-layer weights from the mixture.

        Args:
            n: number of draws.
            generator: source of randomness, on the CPU; None draws from torch's own.

        Returns:
            Weights in float64, and the component of each.
        """
        return draw_weights(self.components, self.weights, n, generator)

    def confidence_bound(self, inputs: Inputs, *, lemma: bool = False) -> Tensor:
        """Upper bound on the confidence of each input, for the class that is predicted there.

        The bound of a class holds for every input. Far away another class may win: take the bound there. Where logits are cooled, by
        a temperature or by distance, the bound is sharper: it is that of the input, and tends to 1/C as its features grow.

        Args:
            inputs: one batch.
            lemma: give the bound of each component (the paper's Lemma) instead of the mixture's (its Theorem).

        Returns:
            (n,), or (K, n) with `lemma`; for yes or no (n, C) and (K, n, C). `BoundError` for a link other than the probit.
        """
        require_probit(self.link)
        self._look()
        with undisturbed(*self.networks, passes_only=True):
            moments = self._moments(one_batch(inputs))
        if isinstance(moments, DenseBatch):
            if not (lemma and self.likelihood.competing):
                return moments.gather(lambda some: [self._bound(some, lemma=lemma)])[0]
            (found,) = moments.gather(lambda some: [self._bound(some, lemma=True)[:, :, None]])
            return found.squeeze(2 if moments.layout.axis == 1 else -1)
        return self._bound(moments, lemma=lemma)

    def _bound(self, moments: Sequence[LogitMoments], *, lemma: bool) -> Tensor:
        # Bounds (n,) of the mixture, or (K, n) of its components.
        with without_autocast(moments[0].mean.device):
            members = [one.returned(self.link(one)).cpu() for one in self._cooled(moments)]
        if not self._cooling.changes_nothing and self.structure is not None:
            return self._divided_bound(moments, members, lemma=lemma)
        bounds = torch.stack([component_bounds(component, members[0].shape[1]) for component in self.components])
        if not self.likelihood.competing:
            return self._of_answers(bounds[:, None].expand(-1, len(members[0]), -1), members, lemma=lemma)
        if lemma:
            return torch.stack([bound[probs.argmax(1)] for bound, probs in zip(bounds, members, strict=True)])
        return torch.einsum("k,kc->c", self.weights, bounds)[self._mix(members).argmax(1)]

    def _divided_bound(self, moments: Sequence[LogitMoments], members: Sequence[Tensor], *, lemma: bool) -> Tensor:
        bounds = []
        for component, one, divisor in zip(
            self.components, moments, self.cooling.divisors(moments, self.weights), strict=True
        ):
            assert isinstance(one.spread, FeatureSpread)  # where there is curvature
            lengths = torch.linalg.vector_norm(exact(one.spread.features), dim=1).cpu()
            bounds.append(divided_bounds(component, lengths, exact(divisor).cpu().expand_as(lengths)))
        return self._of_answers(torch.stack(bounds), members, lemma=lemma)

    def _of_answers(self, bounds: Tensor, members: Sequence[Tensor], *, lemma: bool) -> Tensor:
        # Of bounds (K, n, C) those of what is answered: of the predicted class (n,), or of each label (n, C), be it yes
        # or no.
        mixed = torch.einsum("k,knc->nc", self.weights, bounds)
        if not self.likelihood.competing:
            return bounds if lemma else mixed
        if lemma:
            each = zip(bounds, members, strict=True)
            return torch.stack([bound.gather(1, probs.argmax(1)[:, None]).squeeze(1) for bound, probs in each])
        return mixed.gather(1, self._mix(list(members)).argmax(1)[:, None]).squeeze(1)

    def far_field_limit(self, inputs: Tensor) -> Tensor:
        """Probabilities (n, C) that `posterior(delta * inputs)` approaches as delta grows without bound.

        Exact for bias-free ReLU networks, whose features scale with the input; this is checked. With cooling by distance it is 1/C,
        except for a network that has no features at all at an input, and so none at any multiple of it.

        Args:
            inputs: a batch, as one tensor.

        Returns:
            Probabilities (n, C).
        """
        require_probit(self.link)
        self._look()
        with undisturbed(*self.networks, passes_only=True):
            moments, scaled_moments = self._moments(inputs), self._moments(SCALE * inputs)
            if isinstance(moments, DenseBatch) or isinstance(scaled_moments, DenseBatch):
                raise BoundError(
                    "the far-field limit is not computed for outputs at many positions: pass a network that gives one row for each "
                    "input. posterior.confidence_bound(inputs) holds everywhere."
                )
            pairs = zip(self.components, moments, scaled_moments, strict=True)
            limits = [far_field_logits(component, once, scaled) for component, once, scaled in pairs]
            if self.distance_exponent > 0:
                members = zip(moments, self._cooled(moments), limits, strict=True)
                return self._mix([self._cooled_limit(*one) for one in members])
        return self._mix([self.likelihood.probabilities(logits) for logits in limits])

    def _cooled_limit(self, moments: LogitMoments, cooled: LogitMoments, logits: Tensor) -> Tensor:
        # 1/C where features grow, and what is said of the input where there are none.
        assert isinstance(moments.spread, FeatureSpread)
        width = moments.spread.posterior.distance.geometry.width  # type: ignore[union-attr]
        grow = moments.spread.features[:, :width].any(1, keepdim=True).to(logits.device)
        return torch.where(grow, 1 / self.likelihood.answers(logits.shape[1]), cooled.returned(self.link(cooled)))

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks: factors, prior precisions, weights, link, and checksums of each network.

        Args:
            directory: folder to write to; what it held before stays readable until all is written.

        Returns:
            The folder, for `mola.load(directory, models=...)`.
        """
        return storage.write(directory, *self.packed())

    def packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `save` writes: a document and tensors."""
        self.check_networks()
        return archive.pack(self.components, self.link, self.weights, self.weighting, self.tuning, self._cooling)
