"""MoLA: a mixture of last-layer Laplace approximations.

MAP, deep ensemble, last-layer Laplace and MoLA are this one class: one component or several, with or without
curvature. A posterior is a value: `tune`, `reweight` and `with_*` return new ones that share the networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mola import archive, storage
from mola.bounds import SCALE, component_bounds, far_field_logits, require_probit
from mola.component import Component, per_component
from mola.distributed import Team
from mola.errors import DataError, located
from mola.features import check_finite
from mola.laplace import LogitMoments
from mola.likelihood import CATEGORICAL
from mola.links import Link, as_link
from mola.mixture import Mixture
from mola.networks import Inputs, one_batch, undisturbed, without_autocast
from mola.prediction import Prediction, later
from mola.prior import Rule, choose_together
from mola.randomness import seed_from
from mola.sampling import WeightSamples, draw_weights
from mola.tuning import HeldOut, Problem, Tuning, read_held_out
from mola.uncertainty import entropy, epistemic_share, far_field_score, max_probability_score
from mola.weights import check_weighting, evidence_weights, stacking_weights

__all__ = ["MoLA"]


def _ood_score(moments: Sequence[LogitMoments], mean: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    lengths = [one.posterior.mahalanobis(one.features) for one in moments if one.posterior is not None]
    if len(lengths) < len(moments):
        return max_probability_score(probs)
    return far_field_score(mean, torch.stack(lengths), weights)


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
        weighting = check_weighting(weights, len(components))
        by_evidence = isinstance(weighting, str) and weighting == "evidence"
        super().__init__(components, "uniform" if by_evidence else weighting)
        self.components = tuple(components)
        self.link = as_link(link)
        self.weighting = weighting if isinstance(weighting, str) else "given"
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
        with undisturbed(*self.networks, passes_only=True):
            moments = self._moments(one_batch(inputs))
        with without_autocast(moments[0].mean.device):
            return self._mix([self.link(one, seed) for one in moments])

    def _moments(self, inputs: Inputs) -> list[LogitMoments]:
        moments = []
        for index, component in enumerate(self.components):
            with located(f"models[{index}]"):
                moments.append(component.moments(inputs))
                check_finite(moments[-1].mean)
        classes = [one.mean.shape[1] for one in moments]
        if len(set(classes)) > 1:
            message = f"expected networks with the same number of classes, got {classes}."
            raise DataError(message)
        return moments

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        with located(place), undisturbed(*self.networks, passes_only=True):
            moments = self._moments(inputs)
        with without_autocast(moments[0].mean.device):
            probs, weights = self._mix([self.link(one, seed) for one in moments]), self.weights
            mean = torch.stack([one.mean for one in moments])
        kept = [one.kept(values) for one, values in zip(moments, mean, strict=True)]
        return Prediction(
            probs,
            later(lambda: entropy(probs) * epistemic_share(kept, weights.tolist(), seed or 0), mean.device),
            later(lambda: _ood_score(kept, mean, probs, weights.to(mean)), mean.device),
            "far-field" if all(one.posterior is not None for one in kept) else "max-probability",
            mean,
            later(lambda: torch.stack([one.variance for one in kept]), mean.device),
            held=sum(one.features.nbytes for one in kept),
        )

    # --- new values from this one -----------------------------------------------------------------------------------

    def _with(self, **changes: Any) -> MoLA:
        weights: Any = self.weighting if self.weighting != "given" else self.weights
        parts = {"components": self.components, "link": self.link, "weights": weights, "tuning": self.tuning}
        return MoLA(**(parts | changes))

    def with_prior_precision(self, prior_precision: float | Sequence[float]) -> MoLA:
        """The same mixture at another prior precision: one number, or one for each component."""
        for component in self.components:
            component.require_curvature("a prior precision")
        values = per_component(prior_precision, len(self.components), "prior_precision")
        moved = [component.at(value) for component, value in zip(self.components, values, strict=True)]
        return self._with(components=moved, tuning=None)

    def with_weights(self, weights: str | Sequence[float] | Tensor) -> MoLA:
        """The same mixture with other weights: "uniform", "evidence", or K numbers that sum to 1."""
        return self._with(weights=weights)

    def with_link(self, link: str | Link) -> MoLA:
        """The same mixture with another link."""
        return self._with(link=link)

    def tune(
        self,
        val_loader: Iterable[Any] | None = None,
        rule: Rule | str | None = None,
        *,
        progress: bool = True,
        team: Team | None = None,
    ) -> MoLA:
        """Choose the prior precision.

        Args:
            val_loader: validation data, read once; not for `mola.Evidence`.
            rule: "threshold" (the paper's, as None), "nll", "brier", "ece" or "evidence", or an object such as
                `mola.ConfidenceThreshold(0.9)`. All but `mola.Evidence(shared=False)` choose one number for all components.
            progress: whether to show a progress bar on stderr, if that is a terminal.
            team: the processes that tune together, each with its own shard; None tunes alone.

        Returns:
            A new posterior; `.tuning` says how it was chosen. `OptionError` if the rule is none, or there is no curvature.
        """
        together = Team.alone() if team is None else team
        curvatures = [component.require_curvature("tuning the prior precision")[1] for component in self.components]

        def weights_at(precision: float) -> Tensor:
            if self.weighting != "evidence":
                return self.weights
            at = torch.tensor(precision, dtype=torch.float64, device="cpu")
            return evidence_weights(torch.stack([component.log_evidence(at) for component in self.components]))

        problem = Problem(
            spectra=[curvature.spectrum for curvature in curvatures],
            link=self.link,
            weights_at=weights_at,
            read=lambda loader, where, labelled: self._read(
                loader, where, labelled=labelled, progress=progress, team=together
            ),
            log_evidence=lambda index, precision: self.components[index].log_evidence(precision),
            progress=progress,
        )
        with torch.inference_mode(False), torch.no_grad():
            tuning = choose_together(rule, problem, val_loader, together)
        return self.with_prior_precision(tuning.prior_precision)._with(tuning=tuning)

    def reweight(self, val_loader: Iterable[Any], *, progress: bool = True, team: Team | None = None) -> MoLA:
        """Stacking: the weights that maximise the mixture's log-likelihood on validation data.

        Args:
            val_loader: validation data with labels, read once.
            progress: whether to show a progress bar on stderr, if that is a terminal.
            team: the processes that do it together, each with its own shard; None is this one alone.

        Returns:
            A new posterior.
        """
        together = Team.alone() if team is None else team
        with together.work("reweight"), torch.no_grad():
            data = self._read(val_loader, "validation loader", labelled=True, progress=progress, team=together)
            chosen = []
            for component, features, logits in zip(self.components, data.features, data.logits, strict=True):
                curvature = component.curvature
                posterior = None if curvature is None else curvature.spectrum.posterior(component.precision)
                probs = self.link(LogitMoments(logits.double(), features.double(), posterior))
                chosen.append(probs.gather(1, data.labels[:, None]).squeeze(1))  # type: ignore[index]
            weights = stacking_weights(together.rows(torch.stack(chosen, dim=1)))
            return self.with_weights(together.share(weights.tolist()))

    def _read(self, loader: Iterable[Any], where: str, *, labelled: bool, progress: bool, team: Team) -> HeldOut:
        heads = [component.head for component in self.components]
        with undisturbed(*self.networks):
            return read_held_out(
                self.networks, heads, loader, where=where, labelled=labelled, progress=progress, team=team
            )

    # --- what it knows ----------------------------------------------------------------------------------------------

    def log_evidence(self) -> Tensor:
        """Log marginal likelihoods (K,) of the training labels, one for each component."""
        with torch.no_grad():
            values = [
                component.log_evidence(torch.tensor(component.precision, dtype=torch.float64, device="cpu"))
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
        return draw_weights(self.components, self.weights, n, generator)

    def confidence_bound(self, inputs: Inputs, *, lemma: bool = False) -> Tensor:
        """Upper bound on the confidence of each input, for the class that is predicted there.

        The bound of a class holds for every input. Far away another class may win: take the bound there.

        Args:
            inputs: one batch.
            lemma: give the bound of each component (the paper's Lemma) instead of the mixture's (its Theorem).

        Returns:
            (n,), or (K, n) with `lemma`; `BoundError` for a link other than the probit.
        """
        require_probit(self.link)
        with undisturbed(*self.networks, passes_only=True):
            moments = self._moments(one_batch(inputs))
        with without_autocast(moments[0].mean.device):
            members = [self.link(one).cpu() for one in moments]
        bounds = torch.stack([component_bounds(component, members[0].shape[1]) for component in self.components])
        if lemma:
            return torch.stack([bound[probs.argmax(1)] for bound, probs in zip(bounds, members, strict=True)])
        return torch.einsum("k,kc->c", self.weights, bounds)[self._mix(members).argmax(1)]

    def far_field_limit(self, inputs: Tensor) -> Tensor:
        """Probabilities (n, C) that `posterior(delta * inputs)` approaches as delta grows without bound.

        Exact for bias-free ReLU networks, whose features scale with the input; this is checked.

        Args:
            inputs: a batch, as one tensor.

        Returns:
            Probabilities (n, C); `BoundError` if a network's features do not scale, or the link is not the probit.
        """
        require_probit(self.link)
        with undisturbed(*self.networks, passes_only=True):
            pairs = zip(self.components, self._moments(inputs), self._moments(SCALE * inputs), strict=True)
            limits = [far_field_logits(component, once, scaled) for component, once, scaled in pairs]
        return self._mix([CATEGORICAL.probabilities(logits) for logits in limits])

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks: factors, prior precisions, weights, link, and a fingerprint of each head.

        Args:
            directory: folder to write to; what it held before stays readable until all is written.

        Returns:
            The folder, for `mola.load(directory, models=...)`.
        """
        document, tensors = archive.pack(self.components, self.link, self.weights, self.weighting, self.tuning)
        return storage.write(directory, document, tensors)
