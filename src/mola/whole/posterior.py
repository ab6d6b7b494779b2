"""WholeMoLA: a mixture of Laplace approximations over whole networks, or over subnetworks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mola.component import per_component
from mola.errors import DataError, located, warn
from mola.laplace import LogitMoments
from mola.links import Link, Probit
from mola.mixture import Mixture, describe_networks, describe_numbers, describe_weights
from mola.network import Inputs, undisturbed, without_autocast
from mola.prediction import Prediction, later
from mola.tuning.candidates import Tuning
from mola.tuning.rules import Rule, as_rule
from mola.tuning.weights import check_weighting, evidence_weights
from mola.uncertainty import entropy, epistemic_share, max_probability_score, mutual_information
from mola.whole import files
from mola.whole.component import WholeComponent
from mola.whole.links import WeightDraws, as_whole_link
from mola.whole.spectra import Dense
from mola.whole.tuning import HeldInputs, WholeProblem, read_inputs

__all__ = ["WholeMoLA"]


class WholeMoLA(Mixture):
    """A mixture of Laplace approximations over all weights of its networks. Made by `mola.fit_whole` or `WholeMoLA.load`.

    Calling it gives probabilities (n, C); `predict` gives a `Prediction`. Networks are linearised around the trained
    weights, in eval mode; with the link "samples", they are run with drawn weights instead (BatchNorm with its trained
    statistics).

    Args:
        components: the networks with their curvature.
        structure: "kron", "diag", "full" or "subnetwork".
        link: from logits to probabilities, or "samples".
        weights: "uniform", "evidence", or K numbers that sum to 1.
        tuning: how the prior precision was chosen, if it was.
    """

    def __init__(
        self,
        components: Sequence[WholeComponent],
        structure: str,
        link: str | Link | WeightDraws = "probit",
        weights: str | Sequence[float] | Tensor = "uniform",
        tuning: Tuning | None = None,
    ) -> None:
        """Bind components, a link and weights."""
        weighting = check_weighting(weights, len(components))
        by_evidence = isinstance(weighting, str) and weighting == "evidence"
        super().__init__(components, "uniform" if by_evidence else weighting)
        self.components, self.structure = tuple(components), structure
        self.link, self.tuning = as_whole_link(link), tuning
        self.weighting = weighting if isinstance(weighting, str) else "given"
        if by_evidence:
            self.weights = evidence_weights(self.log_evidence())

    @property
    def prior_precision(self) -> tuple[float, ...]:
        """One for each component."""
        return tuple(component.precision for component in self.components)

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """The trained networks."""
        return tuple(component.network for component in self.components)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many weights of each network are uncertain."""
        return tuple(len(component.curvature.spectrum.values) for component in self.components)

    def __repr__(self) -> str:
        """What it is made of and how it was tuned, in a few lines; the networks are in `.networks`."""
        tuned = "as given" if self.tuning is None else f"by {self.tuning.rule}"
        sizes = ", ".join(f"{size:,}" for size in dict.fromkeys(self.sizes))
        return (
            f"{type(self).__name__}({describe_networks(self.networks)}, fitted on {self.components[0].curvature.count:,} training "
            f"data\n"
            f"  structure: {self.structure} over {sizes} weights\n"
            f"  link: {self.link.name}\n"
            f"  prior precision: {describe_numbers(self.prior_precision)}, {tuned}\n"
            f"  weights: {describe_weights(self.weights, self.weighting)}\n)"
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone: every pass evaluates the networks, whatever theirs is."""
        self.training = mode
        return self

    # --- predict ----------------------------------------------------------------------------------------------------

    def _member_probs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        if isinstance(self.link, WeightDraws):
            return [drawn.mean(0) for drawn in self._draws(inputs, self.link, seed)]
        return self._linked(self.link, self._moments(inputs), seed)

    def _linked(self, link: Link, moments: Sequence[LogitMoments], seed: int | None) -> list[Tensor]:
        with without_autocast(moments[0].mean.device), torch.no_grad():
            return [one.returned(link(one, seed)) for one in moments]

    def _moments(self, inputs: Inputs) -> list[LogitMoments]:
        moments = []
        self._look()
        with undisturbed(*self.networks, passes_only=True):
            for index, component in enumerate(self.components):
                with located(f"models[{index}]"):
                    moments.append(component.moments(inputs))
        return [one.lifted() for one in moments] if any(one.given for one in moments) else moments

    def _look(self, *, thorough: bool = False) -> None:
        """Notice networks that were changed."""
        for component in self.components:
            component.check_network(thorough=thorough)

    def _draws(self, inputs: Inputs, link: WeightDraws, seed: int | None) -> list[Tensor]:
        drawn = []
        self._look()
        with undisturbed(*self.networks, passes_only=True), torch.no_grad():
            for index, component in enumerate(self.components):
                with located(f"models[{index}]"):
                    drawn.append(component.draws(inputs, link.samples, link.seed if seed is None else seed))
        return drawn

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        with located(place):
            if isinstance(self.link, WeightDraws):
                drawn = torch.cat(self._draws(inputs, self.link, seed))
                shares = (self.weights / self.link.samples).repeat_interleave(self.link.samples).to(drawn)
                probs = torch.einsum("s,snc->nc", shares, drawn)
                return Prediction(
                    probs, mutual_information(drawn, shares), max_probability_score(probs), "max-probability"
                )
            moments = self._moments(inputs)
            probs = self._mix(self._linked(self.link, moments, seed))
        weights = self.weights.tolist()
        mean = torch.stack([one.mean for one in moments])
        kept = [one.kept(values) for one, values in zip(moments, mean, strict=True)]
        back = moments[0].returned
        return Prediction(
            probs,
            later(lambda: back(entropy(probs) * epistemic_share(kept, weights, seed or 0)), mean.device),
            max_probability_score(probs),
            "max-probability",
            back(mean),
            later(lambda: back(torch.stack([one.variance for one in kept])), mean.device),
            held=probs.nbytes + sum(one.nbytes for one in kept),
        )

    # --- new values from this one -----------------------------------------------------------------------------------

    def _with(self, **changes: Any) -> WholeMoLA:
        weights: Any = self.weighting if self.weighting != "given" else self.weights
        parts = {
            "components": self.components,
            "structure": self.structure,
            "link": self.link,
            "weights": weights,
            "tuning": self.tuning,
        }
        return WholeMoLA(**(parts | changes))

    def with_prior_precision(self, prior_precision: float | Sequence[float]) -> WholeMoLA:
        """The same mixture at another prior precision: one number, or one for each component."""
        values = per_component(prior_precision, len(self.components), "prior_precision")
        moved = [component.at(value) for component, value in zip(self.components, values, strict=True)]
        return self._with(components=moved, tuning=None)

    def with_weights(self, weights: str | Sequence[float] | Tensor) -> WholeMoLA:
        """The same mixture with other weights: "uniform", "evidence", or K numbers that sum to 1."""
        return self._with(weights=weights)

    def with_link(self, link: str | Link | WeightDraws, samples: int = 30, seed: int = 0) -> WholeMoLA:
        """The same mixture with another link; `samples` and `seed` are for "samples"."""
        return self._with(link=as_whole_link(link, samples, seed))

    def tune(
        self, val_loader: Iterable[Any] | None = None, rule: Rule | str | None = None, *, progress: bool = True
    ) -> WholeMoLA:
        """Choose the prior precision.

        Jacobians of the validation data are made once for a rule's grid, whatever its size, and once more for each decade
        by which the grid has to grow. With the link "samples" every candidate runs every draw: give the rule a short
        grid, or tune with a closed-form link first.

        Args:
            val_loader: validation data, read once and kept in memory meanwhile; not for `mola.Evidence`.
            rule: "threshold" (the paper's, as None), "nll", "brier", "ece" or "evidence", or a rule object.
            progress: whether to show a progress bar on stderr, if that is a terminal.

        Returns:
            A new posterior; `.tuning` says how it was chosen. `OptionError` if the rule is none.
        """
        chosen = as_rule(rule, val_loader)
        self._look(thorough=True)

        def weights_at(precision: float) -> Tensor:
            if self.weighting != "evidence":
                return self.weights
            at = torch.tensor(precision, dtype=torch.float64, device="cpu")
            return evidence_weights(torch.stack([component.log_evidence(at) for component in self.components]))

        doubts: list[str] = []

        def read(loader: Iterable[Any], where: str, labelled: bool) -> HeldInputs:
            data = read_inputs(self.components, loader, where=where, labelled=labelled, progress=progress)
            if labelled:
                data.check_labels(where)
                curvatures = [component.curvature for component in self.components]
                words = data.unlike_held_out([(one.count, one.log_likelihood) for one in curvatures])
                if words is not None:
                    warn(words)
                    doubts.append(words)
            return data

        sampling = self.link if isinstance(self.link, WeightDraws) else None
        problem = WholeProblem(
            spectra=[component.curvature.spectrum for component in self.components],  # type: ignore[misc]
            link=Probit() if isinstance(self.link, WeightDraws) else self.link,
            weights_at=weights_at,
            read=read,
            log_evidence=lambda index, precision: self.components[index].log_evidence(precision),
            progress=progress,
            components=self.components,
            sampling=sampling,
        )
        with torch.inference_mode(False), torch.no_grad():
            tuning = chosen.choose(problem, val_loader)
        tuning = replace(tuning, notes=(*doubts, *tuning.notes))
        return self.with_prior_precision(tuning.prior_precision)._with(tuning=tuning)

    def log_evidence(self) -> Tensor:
        """Log marginal likelihoods (K,) of the training labels, one for each component."""
        with torch.no_grad():
            values = [
                component.log_evidence(torch.tensor(component.precision, dtype=torch.float64, device="cpu"))
                for component in self.components
            ]
        return torch.stack(values)

    def subnetwork(self, index: int = 0) -> dict[str, Tensor]:
        """Which weights of a network are uncertain.

        Args:
            index: of the network.

        Returns:
            For each parameter that is not fixed, a tensor of its shape that is true where the weight is uncertain.

        Raises:
            DataError: if there is no such network.
        """
        if not 0 <= index < len(self.components):
            message = f"expected the index of one of {len(self.components)} networks, got {index}."
            raise DataError(message)
        component = self.components[index]
        layout, spectrum = component.curvature.layout, component.curvature.spectrum
        marks = torch.ones(layout.size, dtype=torch.float64)
        if isinstance(spectrum, Dense) and spectrum.chosen is not None:
            marks = torch.zeros(layout.size, dtype=torch.float64).index_fill(0, spectrum.chosen, 1.0)
        return {name: values > 0 for name, values in layout.tensors(component.network, marks).items()}

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks: spectra, prior precisions, weights, link, and what tells each network.

        Args:
            directory: folder to write to; what it held before stays readable until all is written.

        Returns:
            The folder, for `mola.WholeMoLA.load(directory, models)`.
        """
        self._look(thorough=True)
        parts = files.Parts(list(self.components), self.structure, self.link, self.weights, self.weighting, self.tuning)
        return files.write(directory, parts)

    @classmethod
    def load(cls, directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> WholeMoLA:
        """Load what `save` wrote onto the same networks.

        Args:
            directory: folder that `save` wrote.
            models: the networks, in the same order.

        Returns:
            The posterior; `StorageError` if the files are damaged, or a network is another.
        """
        parts = files.read(directory, models)
        weights: Any = parts.weighting if parts.weighting != "given" else parts.weights
        return cls(parts.components, parts.structure, parts.link, weights, parts.tuning)
