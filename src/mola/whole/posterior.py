"""WholeMoLA: a mixture of Laplace approximations over whole networks, or over subnetworks.

Its prior precision is tuned like that of a `MoLA`, but every candidate takes Jacobians: they are made once for all
candidates of a grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.cooling import Cooling
from mola.distributed import Team
from mola.errors import DataError, OptionError, located
from mola.laplace import LogitMoments, Spread
from mola.links import Link
from mola.network import Inputs, as_batch, check_loader, one_batch, undisturbed
from mola.network.calling import copied
from mola.numerics import exact, seed_from
from mola.posterior import LaplaceMixture
from mola.prediction import Prediction
from mola.tuning.candidates import HeldOut, Problem, Tuning, read_held_out
from mola.uncertainty import max_probability_score, mutual_information
from mola.whole import files
from mola.whole.component import (
    JointSpread,
    WeightDraws,
    WholeComponent,
    as_whole_link,
    contrasts,
    plain,
    seen_and_shift,
)
from mola.whole.jacobians import Directions
from mola.whole.spectra import WeightSpectrum


@dataclass(frozen=True)
class HeldInputs(HeldOut):
    """Held-out data with their inputs, which stay in memory while candidates are compared."""

    batches: Sequence[Inputs] = field(default_factory=tuple)


def _inputs_of(data: HeldOut) -> Sequence[Inputs]:
    if not isinstance(data, HeldInputs):
        raise DataError(
            "these held-out data were read by a posterior over last layers, without their inputs: pass the loader itself."
        )
    return data.batches


@dataclass(frozen=True, kw_only=True)
class WholeProblem(Problem):
    """A mixture over whole networks whose prior precision is to be chosen.

    The Jacobians of a batch are made once for all candidates of a grid, and again for those by which it grows.
    """

    spectra: Sequence[WeightSpectrum]
    link: Link | WeightDraws
    components: Sequence[WholeComponent]

    def _tried(self, data: HeldOut, precisions: Sequence[float]) -> Iterator[tuple[slice, slice, Tensor]]:
        batches = _inputs_of(data)
        mixing, start = torch.stack([self.weights_at(precision) for precision in precisions]), 0
        bar = tqdm(batches, desc="candidates", disable=None if self.progress else True, leave=False)
        for inputs in bar:
            with undisturbed(*(component.network for component in self.components)), torch.no_grad():
                members = [at_candidates(component, inputs, precisions, self.link) for component in self.components]
            for index, probs in enumerate(zip(*members, strict=True)):
                mixed = sum(weight * one for weight, one in zip(mixing[index], probs, strict=True))
                assert isinstance(mixed, Tensor)
                yield slice(index, index + 1), slice(start, start + len(mixed)), mixed.T[None]
            start += len(mixed)


def at_candidates(
    component: WholeComponent,
    inputs: Inputs,
    precisions: Sequence[float],
    link: Link | WeightDraws,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Probabilities (n, C) of one component at every candidate, in float64 on the CPU."""
    if isinstance(link, WeightDraws):
        drawn = [component.draws(inputs, link.samples, link.seed, precision).mean(0) for precision in precisions]
        return [probs.cpu().double() for probs in drawn]
    tried = _Tried(component, inputs, precisions)
    mean = tried.mean(link)
    rows = torch.arange(len(mean), device="cpu")
    moments = [LogitMoments(mean, _AtCandidate(tried, index, rows)) for index in range(len(precisions))]
    return [link(one if temperature == 1 else one.divided(mean.new_tensor(temperature))) for one in moments]


class _Tried:
    # One component at one batch under every candidate. What a link asks for is made then, for all candidates at once.
    # In float64 on the CPU.

    def __init__(self, component: WholeComponent, inputs: Inputs, precisions: Sequence[float]) -> None:
        self.component, self.inputs, self.precisions = component, inputs, precisions

    def mean(self, link: Link) -> Tensor:
        """Logits (n, C), from the pass that makes what the link will ask for, as far as it says."""
        if link.needs_covariance:
            return self.joints[0]
        return (self.variances if link.cooled_by == "variance" else self.contrast_variances)[0]

    @cached_property
    def variances(self) -> tuple[Tensor, Tensor]:
        """Logits (n, C), and variances (L, n, C) of the logits."""
        return self._along(plain)

    @cached_property
    def contrast_variances(self) -> tuple[Tensor, Tensor]:
        """Logits (n, C), and variances (L, n, C) of the centred logits."""
        return self._along(contrasts)

    def _along(self, directions: Directions) -> tuple[Tensor, Tensor]:
        grid = torch.tensor(self.precisions, dtype=torch.float64, device="cpu")
        mean, variances = self.component.variances(self.inputs, grid, directions)
        return exact(mean).cpu(), exact(variances).cpu()

    @cached_property
    def joints(self) -> tuple[Tensor, list[Tensor]]:
        """Logits (n, C), and for each candidate their covariance (n, C, C) along `seen_and_shift`."""
        portions = [
            (
                exact(logits).cpu(),
                [exact(self.component.covariance(rows, spectrum, one)).cpu() for one in self.precisions],
            )
            for logits, rows, spectrum in self.component.rows(self.inputs, seen_and_shift)
        ]
        mean = torch.cat([logits for logits, _ in portions])
        return mean, [torch.cat(parts) for parts in zip(*(found for _, found in portions), strict=True)]


class _AtCandidate(Spread):
    def __init__(self, tried: _Tried, index: int, rows: Tensor) -> None:
        self.tried, self.index, self.own = tried, index, rows

    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.tried.variances[1][self.index, self.own]

    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self.tried.contrast_variances[1][self.index, self.own]

    @property
    def _joint(self) -> JointSpread:
        return JointSpread(self.tried.joints[1][self.index][self.own])

    @property
    def width(self) -> int:
        """Numbers of each covariance."""
        return self._joint.width

    @property
    def noise_size(self) -> int:
        """Number of independent normals that one draw of the logits takes."""
        return self._joint.noise_size

    def average_contrast_variance(self) -> Tensor:
        """Ones (C,), as for `JointSpread`."""
        return torch.ones(self.tried.component.curvature.classes, dtype=torch.float64, device="cpu")

    def contrast_covariance(self) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""
        return self._joint.contrast_covariance()

    def perturb(self, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift."""
        return self._joint.perturb(noise)

    def __getitem__(self, rows: slice) -> _AtCandidate:
        return _AtCandidate(self.tried, self.index, self.own[rows])


class WholeMoLA(LaplaceMixture[WholeComponent]):
    """A mixture of Laplace approximations over all weights of its networks. Made by `mola.fit_whole` or `WholeMoLA.load`.

    Calling it gives probabilities (n, C); `predict` gives a `Prediction`. Networks are linearised around the trained
    weights, in eval mode; with the link "samples", they are run with drawn weights instead (BatchNorm with its trained
    statistics).

    Jacobians of the validation data are made once for a rule's grid, whatever its size, and once more for each decade by
    which the grid has to grow. With the link "samples" every candidate runs every draw: give the rule a short grid, or tune
    with a closed-form link first.

    Args:
        components: the networks with their curvature.
        structure: "kron", "diag", "full" or "subnetwork".
        link: from logits to probabilities, or "samples".
        weights: "uniform", "evidence", or K numbers that sum to 1.
        tuning: how the prior precision was chosen, if it was.
        cooling: what logits are divided by before they become probabilities; a temperature alone.
    """

    link: Link | WeightDraws

    def __init__(
        self,
        components: Sequence[WholeComponent],
        structure: str,
        link: str | Link | WeightDraws = "probit",
        weights: str | Sequence[float] | Tensor = "uniform",
        tuning: Tuning | None = None,
        cooling: Cooling | None = None,
    ) -> None:
        super().__init__(components, link, weights, tuning, cooling)
        self.structure = structure

    def _check_cooling(self) -> None:
        super()._check_cooling()
        if self.temperature != 1 and isinstance(self.link, WeightDraws):
            raise OptionError(
                "a temperature divides logits, and link 'samples' averages probabilities: choose a closed-form link first, such as "
                "with_link('probit')."
            )

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"structure": self.structure}

    @staticmethod
    def _as_link(link: str | Link | WeightDraws) -> Link | WeightDraws:
        return as_whole_link(link)

    def with_link(self, link: str | Link | WeightDraws, samples: int = 30, seed: int = 0) -> WholeMoLA:
        """The same mixture with another link; `samples` and `seed` are for "samples"."""
        return self._with(link=as_whole_link(link, samples, seed))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many weights of each network are uncertain."""
        return tuple(len(component.curvature.spectrum.values) for component in self.components)

    def _described(self) -> str:
        return f"{self.structure} over {', '.join(f'{size:,}' for size in dict.fromkeys(self.sizes))} weights"

    # --- predict ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Probabilities (n, C).

        Args:
            inputs: a tensor, a tuple of positional or a mapping of keyword arguments of the networks.
            generator: source of randomness for links that draw; None uses the link's own seed.

        Returns:
            Probabilities, in float64 for networks in float64, else in float32.
        """
        if not isinstance(self.link, WeightDraws):
            return super().forward(inputs, generator)
        drawn = self._draws(one_batch(inputs), self.link, seed_from(generator))
        return self._mix([probs.mean(0) for probs in drawn])

    def _draws(self, inputs: Inputs, link: WeightDraws, seed: int | None) -> list[Tensor]:
        drawn = []
        self._look()
        with undisturbed(*self.networks, passes_only=True), torch.no_grad():
            for index, component in enumerate(self.components):
                with located(f"models[{index}]"):
                    drawn.append(component.draws(inputs, link.samples, link.seed if seed is None else seed))
        return drawn

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        if not isinstance(self.link, WeightDraws):
            return super()._predict_batch(inputs, seed, place)
        with located(place):
            drawn = torch.cat(self._draws(inputs, self.link, seed))
        shares = (self.weights / self.link.samples).repeat_interleave(self.link.samples).to(drawn)
        probs = torch.einsum("s,snc->nc", shares, drawn)
        return Prediction(probs, mutual_information(drawn, shares), max_probability_score(probs), "max-probability")

    # --- tune -------------------------------------------------------------------------------------------------------

    def _held_out(self, loader: Iterable[Any], where: str, *, labelled: bool, progress: bool, team: Team) -> HeldInputs:
        check_loader(loader, f"the {where}")
        batches: list[Inputs] = []

        def remembered() -> Iterator[Any]:
            for index, raw in enumerate(loader):
                # Copied: a loader may use its memory again for the next batch.
                batches.append(copied(as_batch(raw, f"batch {index} of the {where}").inputs))
                yield raw

        heads = [None] * len(self.components)
        data = read_held_out(
            self.networks, heads, remembered(), where=where, labelled=labelled, progress=progress, team=team
        )
        return HeldInputs(data.features, data.logits, data.labels, batches, team=team)

    def _problem(self, **shared: Any) -> WholeProblem:
        spectra = [component.curvature.spectrum for component in self.components]
        return WholeProblem(spectra=spectra, link=self.link, components=self.components, **shared)

    def _members_on(self, data: HeldOut) -> Iterable[Tensor]:
        batches = _inputs_of(data)
        for component in self.components:
            with undisturbed(component.network):
                parts = [
                    at_candidates(component, one, [component.precision], self.link, self.temperature)[0]
                    for one in batches
                ]
            yield torch.cat(parts) if parts else torch.zeros(0, component.curvature.classes, dtype=torch.float64)

    def subnetwork(self, index: int = 0) -> dict[str, Tensor]:
        """Which weights of a network are uncertain.

        Args:
            index: of the network.

        Returns:
            For each parameter that is not fixed, a tensor of its shape that is true where the weight is uncertain.
        """
        if not 0 <= index < len(self.components):
            raise DataError(f"expected the index of one of {len(self.components)} networks, got {index}.")
        component = self.components[index]
        layout, chosen = component.curvature.layout, component.curvature.chosen
        marks = torch.ones(layout.size, dtype=torch.float64)
        if chosen is not None:
            marks = torch.zeros(layout.size, dtype=torch.float64).index_fill(0, chosen, 1.0)
        return {name: values > 0 for name, values in layout.tensors(component.network, marks).items()}

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks: spectra, prior precisions, weights, link, and what tells each network.

        Args:
            directory: folder to write to; what it held before stays readable until all is written.

        Returns:
            The folder, for `mola.WholeMoLA.load(directory, models)`.
        """
        self.check_networks()
        return files.write(
            directory,
            self.components,
            self.structure,
            self.link,
            self.weights,
            self.weighting,
            self.tuning,
            self._cooling,
        )

    @classmethod
    def load(cls, directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> WholeMoLA:
        """Load what `save` wrote onto the same networks.

        Args:
            directory: folder that `save` wrote.
            models: the networks, in the same order.

        Returns:
            The posterior; `StorageError` if the files are damaged, or a network is another.
        """
        components, structure, parts = files.read(directory, models)
        return cls(components, structure, *parts)
