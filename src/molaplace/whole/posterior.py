"""WholeMoLA: a mixture of Laplace approximations over whole networks, or over subnetworks.

The features of a `WholeMoLA` are Jacobians. Jacobians are too large to store, so the inputs of held-out data are stored
instead. A search computes the Jacobians of a few data points at a time and uses them to evaluate all candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from molaplace.component import Component, LastLayer
from molaplace.distributed import Team
from molaplace.errors import DataError, located
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import ClassificationLikelihood, Likelihood
from molaplace.network import (
    Captured,
    Inputs,
    Rows,
    as_batch,
    capture_all,
    check_finite,
    check_loader,
    check_logits,
    evaluating,
)
from molaplace.prediction import Prediction
from molaplace.rules.held_out import HeldOut, read_held_out
from molaplace.sums import Sums
from molaplace.whole.jacobians import each_logit, size_of, some_of
from molaplace.whole.structures import WholeStructure


def coordinates(component: Component, inputs: Inputs, outputs: Tensor) -> Tensor:
    """Return a component's features: the Jacobians (n, C, D) of a few data points in the eigenbasis of its curvature.

    Args:
        component: component whose network is linearised.
        inputs: inputs of the data points.
        outputs: logits (n, C) of the network, in float64.
    """
    layer: Any = component.on(outputs.device)
    if not len(outputs):
        return outputs.new_zeros(0, layer.structure.outputs, layer.structure.layout.size)
    with evaluating(component.network), torch.no_grad():
        rows: Tensor = layer.curvature.coordinates(layer.structure.rows(component.network, inputs, each_logit)[1])
        return rows


def structure_of(component: Component) -> WholeStructure:
    """Return the structure of a component's curvature, which includes the layout of its weights."""
    layer = component.require_layer("a posterior over whole networks")
    assert isinstance(layer.structure, WholeStructure)
    return layer.structure


def make_component(network: nn.Module, structure: WholeStructure, sums: Sums, likelihood: Likelihood) -> Component:
    """Build the component for one network from its curvature sums."""
    layer = LastLayer(structure, sums, structure.layout.vector(network).cpu(), structure.solve(sums), None)
    return Component(network, None, layer, likelihood)


@dataclass(frozen=True)
class CapturedInputs(Captured):
    """The inputs and outputs of one pass through a network."""

    inputs: Inputs = None
    component: Component | None = None
    most: int = 1
    """Largest number of data points whose Jacobians are in memory at once."""

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the coordinates (m, C, D) and outputs (m, C) of a few data points at a time, in float64."""
        assert self.component is not None
        size, total, every = max(1, min(size, self.most)), self.layout.inputs, self.rows()[1]
        for start in range(0, max(total, 1), size):
            part = slice(start, min(start + size, total))
            yield coordinates(self.component, some_of(self.inputs, part, total), every[part]), every[part]


@dataclass(frozen=True)
class HeldInputs(HeldOut):
    """Held-out data whose inputs are kept in memory while candidates are compared."""

    batches: Sequence[tuple[Inputs, int]] = ()
    """Inputs and size of each batch."""
    components: Sequence[Component] = ()
    most: int = 1
    """Largest number of data points whose Jacobians are in memory at once."""

    def chunks(self, size: int) -> Iterator[tuple[Rows, Tensor | None]]:
        """Yield the coordinates and outputs of every network, and the labels, for a few data points at a time."""
        size, start = max(1, min(size, self.most)), 0
        for inputs, count in self.batches:
            for first in range(0, count, size):
                part = slice(first, min(first + size, count))
                whole, some = slice(start + part.start, start + part.stop), some_of(inputs, part, count)
                outputs = [values[whole] for values in self.outputs]
                pairs = zip(self.components, outputs, strict=True)
                yield (
                    Rows([coordinates(component, some, logits) for component, logits in pairs], outputs),
                    None if self.labels is None else self.labels[whole],
                )
            start += count


class WholeMoLA(LaplaceMixture):
    """A mixture of Laplace approximations over all weights of its networks, returned by `mola.whole.fit` and `mola.whole.load`.

    The networks are linearised around their trained weights, in eval mode. Every call computes the Jacobians of its data, which takes
    C backward passes through each network.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of uncertain weights in each network."""
        return tuple(component.require_layer("a size").weights.numel() for component in self.components)

    def why_no_distances(self) -> str:
        """Return a message that explains why there are no distances from the training data."""
        return "a posterior over whole networks provides no distances from the training data. Use mola.fit, which computes distances."

    def _data_at_once(self) -> int:
        # Return the largest number of data points whose Jacobians are in memory at once.
        structures = [structure_of(component) for component in self.components]
        smallest = min(structure.layout.data_at_once(structure.outputs) for structure in structures)
        return max(1, smallest // len(structures))

    # --- predict ----------------------------------------------------------------------------------------------------

    def capture(self, inputs: Inputs) -> Sequence[Captured]:
        """Run every network once, and store the inputs together with the outputs."""
        with evaluating(*self.networks), torch.no_grad():
            captured = capture_all(self.networks, [None] * len(self.networks), inputs, self.likelihood)
        most = self._data_at_once()
        return [
            CapturedInputs(
                network_pass.features, network_pass.outputs, network_pass.layout, None, inputs, component, most
            )
            for network_pass, component in zip(captured, self.components, strict=True)
        ]

    def predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        """Predict one batch. Error messages refer to the batch as `place`."""
        likelihood = self.likelihood
        assert isinstance(likelihood, ClassificationLikelihood)
        with located(place):
            captured = self.capture(inputs)
            for index, (network, network_pass) in enumerate(zip(self.networks, captured, strict=True)):
                with located(f"networks[{index}]"):
                    outputs = network_pass.outputs.flatten(0, 1)
                    check_finite(outputs[:, :0], outputs, range(len(outputs)))
                    check_logits(network, inputs, outputs[:4096], likelihood)

        def compute(rows: Rows) -> dict[str, Tensor]:
            members = self.members(rows)
            distribution = likelihood.predictive(members, self.link, seed)
            variances = [spread.variance() for spread in members.spreads if spread is not None]
            return {
                "probs": distribution.probs,
                "mutual_information": distribution.entropy() * likelihood.epistemic_share(members, seed or 0),
                "ood_score": distribution.outlier_score(),
                "logit_mean": torch.stack(list(rows.outputs)),
                "logit_variance": torch.stack(variances),
            }

        # All fields are computed together, because the Jacobians dominate the cost.
        fields: dict[str, Any] = dict(self._by_rows(captured, compute))
        return Prediction(fields, likelihood=likelihood)

    # --- tune -------------------------------------------------------------------------------------------------------

    def reference_on(self, data: HeldOut) -> None:
        """Return None, because there are no distances."""
        return

    def read(
        self,
        loader: Iterable[Any] | HeldOut,
        where: str,
        *,
        labelled: bool | None,
        progress: bool = False,
        team: Team | None = None,
    ) -> HeldOut:
        """Run the networks once on each batch of a loader, and keep the inputs, outputs and labels."""
        if isinstance(loader, HeldOut):
            return loader.checked(labelled=labelled)
        check_loader(loader, where)
        batches: list[tuple[Inputs, int]] = []

        def remembered() -> Iterator[Any]:
            for index, raw in enumerate(loader):
                batch = as_batch(raw, f"batch {index} of the {where}")
                # Copy the inputs, because a loader may reuse their memory for the next batch.
                copies = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch.inputs)
                batches.append((copies, size_of(copies)))
                yield raw

        heads = [None] * len(self.components)
        options: dict[str, Any] = {"where": where, "labelled": labelled, "progress": progress, "team": team}
        data = read_held_out(self.networks, heads, remembered(), self.likelihood, **options)
        count = sum(size for _, size in batches)
        if count != len(data):
            raise DataError(
                f"expected one row of logits for each datum, got {len(data)} rows for {count} data. The first dimension of every "
                f"input must be the batch dimension.",
                place=f"the {where}",
            )
        return HeldInputs(**vars(data), batches=batches, components=self.components, most=self._data_at_once())

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save everything except the networks, for loading with `mola.whole.load(directory, networks)`. See `MoLA.save`."""
        from molaplace.whole.files import save_whole

        return save_whole(self, directory)
