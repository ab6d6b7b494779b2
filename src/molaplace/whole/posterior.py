"""WholeMoLA: a mixture of Laplace approximations over whole networks, or over subnetworks.

The features of a `WholeMoLA` are Jacobians. Jacobians are too large to store, so the inputs of held-out data are stored
instead. A search computes the Jacobians of a few data points at a time and uses them to evaluate all candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from molaplace.component import Component, LastLayer
from molaplace.distributed import Team
from molaplace.errors import DataError
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import ClassificationLikelihood, Likelihood
from molaplace.network import (
    Captured,
    Inputs,
    Rows,
    StateChecksums,
    as_batch,
    check_loader,
    evaluating,
)
from molaplace.numerics import float64_device
from molaplace.prediction import Prediction
from molaplace.rules.held_out import HeldOut
from molaplace.sums import Sums
from molaplace.whole.jacobians import each_logit, size_of, some_of
from molaplace.whole.structures import WholeStructure


def structure_of(component: Component) -> WholeStructure:
    """Return the structure of a component's curvature, which includes the layout of its weights."""
    layer = component.require_layer("a posterior over whole networks")
    assert isinstance(layer.structure, WholeStructure)
    return layer.structure


def make_component(
    network: nn.Module, structure: WholeStructure, sums: Sums, likelihood: Likelihood, checksums: StateChecksums
) -> Component:
    """Build the component for one network from its curvature sums."""
    layer = LastLayer(structure, sums, structure.layout.vector(network).cpu(), structure.solve(sums), None, checksums)
    return Component(network, None, layer, likelihood)


@dataclass(frozen=True)
class Jacobians:
    """The features of one network, which are computed when they are sliced, because Jacobians are too large to store."""

    component: Component
    batches: Sequence[tuple[Inputs, int]]
    """Inputs and size of each batch."""
    outputs: Tensor
    """Logits (n, C) for all batches."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of data points, and the number of values that one of them occupies while its features are computed."""
        structure = structure_of(self.component)
        return len(self.outputs), structure.outputs * structure.layout.total

    def __getitem__(self, part: slice) -> Tensor:
        """Return the features of some data points: their Jacobians (m, C, D) in the eigenbasis of the curvature, in float64."""
        layer: Any = self.component.on(float64_device(self.outputs.device))
        network = self.component.network
        start, stop, _ = part.indices(len(self.outputs))
        first = 0
        chunks = [torch.zeros(0, layer.structure.outputs, layer.structure.layout.size, device="cpu").to(layer.weights)]
        with evaluating(network), torch.no_grad():
            for inputs, count in self.batches:
                some = slice(max(start - first, 0), min(stop - first, count))
                if some.start < some.stop:
                    _, jacobians = layer.structure.rows(network, some_of(inputs, some, count), each_logit)
                    chunks.append(layer.curvature.coordinates(jacobians))
                first += count
        return torch.cat(chunks)


class WholeMoLA(LaplaceMixture):
    """A mixture of Laplace approximations over all weights of its networks, returned by `mola.whole.fit`.

    The networks are linearised around their trained weights, in eval mode. Every call computes the Jacobians of its data, which takes
    C backward passes through each network. Their results have no gradients.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of uncertain weights in each network."""
        return tuple(component.require_layer("a size").weights.numel() for component in self.components)

    # --- predict ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self, inputs: Inputs) -> Captured:
        """Run every network once, and store the inputs together with the outputs."""
        captured = super().capture(inputs)
        return self._with_jacobians(captured, [(inputs, captured.layout.inputs)])

    def _with_jacobians(self, captured: Captured, batches: Sequence[tuple[Inputs, int]]) -> Any:
        pairs = zip(self.components, captured.outputs, strict=True)
        features: Any = [Jacobians(component, batches, outputs) for component, outputs in pairs]
        return replace(captured, features=features)

    @torch.no_grad()
    def predict_batch(self, inputs: Inputs, seed: int | None = None) -> Prediction:
        """Predict one batch; links that draw samples use `seed`."""
        likelihood = self.likelihood
        assert isinstance(likelihood, ClassificationLikelihood)
        captured = super().capture(inputs)
        captured.check_finite()
        captured.check_logits(self.networks, inputs, likelihood)

        def compute(rows: Rows) -> dict[str, Tensor]:
            members = self.members(self.project(rows))
            distribution = likelihood.predictive(members, self.link, seed)
            variances = [spread.variance() for spread in members.spreads if spread is not None]
            return {
                "probs": distribution.probs,
                "mutual_information": distribution.entropy() * likelihood.epistemic_share(members, seed or 0),
                "ood_score": distribution.outlier_score(),
                "logit_mean": torch.stack(list(rows.outputs), 1),
                "logit_variance": torch.stack(variances, 1),
            }

        with_jacobians = self._with_jacobians(captured, [(inputs, captured.layout.inputs)])
        # All fields are computed together, because the Jacobians dominate the cost.
        fields = self.by_rows(with_jacobians, compute)
        return Prediction(fields, likelihood=likelihood, fingerprint=self.fingerprint)

    # --- tune -------------------------------------------------------------------------------------------------------

    def read(self, loader: Iterable[Any] | HeldOut, where: str, *, labelled: bool | None, **options: Any) -> HeldOut:
        """Run the networks once on each batch of a loader, and keep the inputs, outputs and labels."""
        if isinstance(loader, HeldOut):
            return super().read(loader, where, labelled=labelled)
        check_loader(loader, where)
        batches: list[tuple[Inputs, int]] = []

        def remembered() -> Iterator[Any]:
            for index, raw in enumerate(loader):
                batch = as_batch(raw, f"batch {index} of the {where}")
                # Copy the inputs, because a loader may reuse their memory for the next batch.
                copies = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch.inputs)
                batches.append((copies, size_of(copies)))
                yield raw

        data = super().read(remembered(), where, labelled=labelled, **options)
        team = options.get("team") or Team.single()
        batches = [batch for rank_batches in team.collect(batches) for batch in rank_batches]
        count = sum(size for _, size in batches)
        if count != len(data):
            raise DataError(
                f"expected one row of logits for each datum, got {len(data)} rows for {count} data. The first dimension of every "
                f"input must be the batch dimension.",
                place=f"the {where}",
            )
        return self._with_jacobians(data, batches)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        *,
        networks: bool = False,
        build: str | Sequence[str] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Save the posterior to a folder, with or without its networks; see `MoLA.save`."""
        from molaplace.saving.bundle import save_bundle
        from molaplace.whole.files import pack

        return save_bundle(self, directory, networks=networks, build=build, pack=pack, overwrite=overwrite)
