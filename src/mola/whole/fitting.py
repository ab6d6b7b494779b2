"""Fit a Laplace approximation over all weights of each network: one pass over the training data, or two for a subnetwork.

Before the pass, the layers that look like linear maps are tried on a few data: a layer with a forward pass of its own is not taken
for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm.auto import tqdm

from mola.component import per_component
from mola.errors import DataError, OptionError, located
from mola.fitting import ensemble
from mola.laplace import check_precision
from mola.likelihood import CATEGORICAL, Likelihood, as_likelihood
from mola.links import Link
from mola.mixture import check_weighting
from mola.network import (
    Inputs,
    as_batch,
    batch_count,
    call,
    check_finite,
    check_loader,
    peek,
    undisturbed,
)
from mola.network.calling import Differentiable
from mola.network.fingerprint import Watch
from mola.options import one_of
from mola.tuning.choosing import check_rule
from mola.tuning.rules import Rule
from mola.whole.component import WeightDraws, WholeComponent, WholeCurvature, as_whole_link
from mola.whole.jacobians import (
    Layer,
    WeightLayout,
    layer_rows,
    portions,
    size_of,
    some_of,
    trainable_layout,
    usable,
    watched,
)
from mola.whole.posterior import WholeMoLA
from mola.whole.sums import DenseSum, DiagonalSum, KroneckerSum, Sum, check_dense_size, require_curvlinops


def settled(network: nn.Module, layout: WeightLayout, inputs: Inputs) -> tuple[WeightLayout, int]:
    """Keep the layers whose rows are right; the parameters of others join the rest.

    A layer may be called twice, not at all (its weight used by hand), or with the data in another dimension than the first.
    Its rows for the first and the last datum are compared with what automatic differentiation says.

    Args:
        network: in eval mode.
        layout: as `trainable_layout` found it.
        inputs: one batch; a few of its data are looked at.

    Returns:
        The layout with the layers' positions, and the number of classes C.
    """
    size = size_of(inputs)
    count = min(3, size)
    own = dict(network.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
    kept = []
    with torch.inference_mode(False), torch.enable_grad(), watched(network, layout.layers) as seen:
        few = usable(tree_map(lambda value: some_of(value, slice(count), size), inputs))
        logits = call(Differentiable(network), few)
        CATEGORICAL.check_outputs(logits)
        check_finite(logits.detach())
        fitting = [layer for layer in layout.layers if _fits(seen[layer.name], network, layer, count)]
        # Not the sum of the logits: that of centred ones is 0, and says nothing.
        direction = torch.arange(1, logits.shape[1] + 1, device=logits.device).cos().to(logits)
        found = layer_rows(network, tuple(fitting), seen, logits, direction.expand_as(logits)[None], keep_graph=True)
        score = logits @ direction
        for layer, piece in zip(fitting, found, strict=True):
            rows = piece.product()[:, 0]
            if all(_agrees(rows[datum], layer, score[datum], own) for datum in (0, count - 1)):
                kept.append(replace(layer, positions=seen[layer.name][0][1][0].numel() // layer.rows))
    return layout.with_layers(kept, shapes), logits.shape[1]


def _agrees(row: Tensor, layer: Layer, score: Tensor, parameters: Mapping[str, Tensor]) -> bool:
    wanted = [parameters[name] for name in layer.parameters]
    exact = torch.autograd.grad(score, wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
    joined = layer.join(dict(zip(layer.parameters, exact, strict=True)))
    # In half precision both are rounded a few times on the way.
    rounding = 16 * torch.finfo(joined.dtype).eps
    largest = float(joined.abs().max())
    return torch.allclose(row, joined.to(row), rtol=max(1e-3, rounding), atol=max(1e-4, rounding) * largest)


def _fits(calls: list[tuple[Tensor, Tensor]], network: nn.Module, layer: Layer, count: int) -> bool:
    dimensions = 4 if isinstance(network.get_submodule(layer.name), nn.Conv2d) else 2
    return len(calls) == 1 and len(calls[0][0]) == count and calls[0][0].dim() >= dimensions


STRUCTURES = ("kron", "diag", "full")


def fit_whole(
    models: nn.Module | Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    *,
    structure: str | None = None,
    subnetwork: int | float | None = None,
    prior_precision: float | Sequence[float] = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    link: str | Link | WeightDraws = "probit",
    rule: Rule | str | None = None,
    samples: int = 30,
    seed: int = 0,
    progress: bool = True,
    likelihood: str | Likelihood = "categorical",
) -> WholeMoLA:
    """Put a Laplace approximation on all weights of each trained network, not on its last layer alone.

    The posterior of the weights that require gradients is Gaussian around the trained ones, with the precision `H + lambda
    I`, where H is the generalised Gauss-Newton matrix summed over the training data. The networks are not modified.

    Args:
        models: one trained classifier, or K of them; architectures may differ, the number of classes may not.
        train_loader: any iterable of batches: `(x, y)`, `[x, y]`, `x` alone, or a mapping with the labels under "labels".
            A subnetwork takes two passes, so that an iterator will not do.
        val_loader: if given, the prior precision is tuned on it at once, by `rule`.
        structure: "kron" (K-FAC of every linear and convolutional layer, the diagonal for all other parameters, such as
            BatchNorm's; needs the extra `curvature`), "diag" (the exact diagonal) or "full" (small networks only). None
            is "kron", or "full" for a subnetwork.
        subnetwork: how many weights, or which share of them (a fraction between 0 and 1), are uncertain: those with the
            largest marginal variance under the diagonal approximation (Daxberger et al., 2021), with every correlation
            between them. The others stay as they were trained, and so do weights that no training datum depends on
            (units that never fire), as long as there are others.
        prior_precision: lambda, one number or K.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        link: "probit", "probit-centered", "mean-field", "bridge" or "mc", on the linearised logits, or a `Link`; or
            "samples": the average of networks run with drawn weights, not linearised.
        rule: how the prior precision is chosen, as for `mola.fit`.
        samples: number of draws of "samples".
        seed: of these draws.
        progress: whether to show a progress bar on stderr, if that is a terminal.
        likelihood: "categorical": curvature over whole networks is for classes; `mola.fit` takes other likelihoods.

    Returns:
        The posterior.
    """
    if as_likelihood(likelihood) != CATEGORICAL:
        raise OptionError(
            f"likelihood {as_likelihood(likelihood).name!r}: fit_whole is for classes, whose curvature it sums over whole networks. "
            f"mola.fit(models, train_loader, likelihood=...) takes it, on last layers."
        )
    networks = ensemble(models).networks
    name = _structure(structure, subnetwork)
    if val_loader is not None:
        check_loader(val_loader, "the validation loader")  # now, and not after the pass over the training data
    check_rule(rule, val_loader)
    weighting, chosen_link = check_weighting(weights, len(networks)), as_whole_link(link, samples, seed)
    precisions = [check_precision(value) for value in per_component(prior_precision, len(networks), "prior_precision")]
    if name == "kron":
        require_curvlinops()
    if name == "subnetwork" and iter(train_loader) is train_loader:
        raise DataError(
            "a subnetwork takes two passes over the training data, got an iterator. Pass a DataLoader or a list of batches."
        )
    with torch.inference_mode(False), undisturbed(*networks):
        first, batches = peek(train_loader, "the training loader")
        layouts, classes = _layouts(networks, as_batch(first, "batch 0 of the training loader").inputs)
        _check_size(name, layouts, subnetwork)
        reading = _Reading(networks, layouts, classes, batch_count(train_loader), progress=progress)
        if name == "subnetwork":
            diagonals = [DiagonalSum(network, own) for network, own in zip(networks, layouts, strict=True)]
            reading.run(batches, diagonals, "training loader, pass 1 of 2")
            counted = reading.count
            places = [_largest(one.total, subnetwork) for one in diagonals]
            sums: list[Sum] = [
                DenseSum(network, own, place) for network, own, place in zip(networks, layouts, places, strict=True)
            ]
            reading.run(train_loader, sums, "training loader, pass 2 of 2")
            if reading.count != counted:
                raise DataError(
                    f"a subnetwork takes two passes over the training data, which gave {counted} data the first time and "
                    f"{reading.count} the second. Pass a DataLoader or a list of batches, which give the same data every time."
                )
        else:
            kinds: dict[str, Callable[[nn.Module, WeightLayout], Sum]] = {
                "kron": KroneckerSum,
                "diag": DiagonalSum,
                "full": DenseSum,
            }
            sums = [kinds[name](network, own) for network, own in zip(networks, layouts, strict=True)]
            reading.run(batches, sums, "training loader")
    components = [
        WholeComponent(
            network,
            WholeCurvature(own, one.spectrum(), own.vector(network), classes, reading.count, score, Watch(network)),
            precision,
        )
        for network, own, one, score, precision in zip(
            networks, layouts, sums, reading.log_likelihoods, precisions, strict=True
        )
    ]
    posterior = WholeMoLA(components, name, chosen_link, weighting)
    if val_loader is None and rule is None:
        return posterior
    return posterior.tune(val_loader, rule, progress=progress)


def _structure(structure: str | None, subnetwork: float | None) -> str:
    if subnetwork is None:
        return one_of("kron" if structure is None else structure, STRUCTURES, "structure")
    if structure not in (None, "full"):
        raise OptionError(
            f"a subnetwork has the full covariance of its weights: leave structure out, or pass 'full'; got {structure!r}."
        )
    whole = isinstance(subnetwork, int) and not isinstance(subnetwork, bool) and subnetwork >= 1
    share = isinstance(subnetwork, float) and 0 < subnetwork < 1
    if not whole and not share:
        raise OptionError(
            f"subnetwork must be a whole number of weights, or a share of them between 0 and 1; got {subnetwork!r}."
        )
    return "subnetwork"


def _count(size: int, subnetwork: float) -> int:
    return min(size, subnetwork) if isinstance(subnetwork, int) else max(1, round(subnetwork * size))


def _largest(diagonal: Tensor, subnetwork: float | None) -> Tensor:
    # Places, rising, of the weights with the largest marginal variance 1 / (h + lambda): of those with the smallest h.
    # Weights with h = 0 come last: no training datum depends on them (a third of a trained LeNet's belong to units that
    # never fire), so that the data say nothing of them at all, and they would take every place.
    assert subnetwork is not None
    order = torch.sort(torch.where(diagonal > 0, diagonal, torch.inf), stable=True).indices
    return order[: _count(len(diagonal), subnetwork)].sort().values


def _check_size(name: str, layouts: Sequence[WeightLayout], subnetwork: float | None) -> None:
    largest = max(layout.size for layout in layouts)
    if name == "full":
        check_dense_size(largest, len(layouts), "Use structure 'kron' or 'diag', or a subnetwork=1000.")
    if name == "subnetwork":
        assert subnetwork is not None
        if isinstance(subnetwork, int) and subnetwork > largest:
            raise OptionError(
                f"subnetwork={subnetwork} asks for more weights than there are: {largest} require gradients."
            )
        check_dense_size(_count(largest, subnetwork), len(layouts), "Use a smaller subnetwork, or structure 'kron'.")


def _layouts(networks: Sequence[nn.Module], inputs: Inputs) -> tuple[list[WeightLayout], int]:
    layouts, classes = [], []
    for index, network in enumerate(networks):
        with located(f"batch 0 of the training loader, models[{index}]"):
            layout, count = settled(network, trainable_layout(network), inputs)
        layouts.append(layout)
        classes.append(count)
    if len(set(classes)) > 1:
        raise DataError(f"expected networks with the same number of classes, got {classes}.")
    return layouts, classes[0]


class _Reading:
    # Passes over the training data: every network sees each batch in turn.

    def __init__(
        self,
        networks: Sequence[nn.Module],
        layouts: Sequence[WeightLayout],
        classes: int,
        total: int | None,
        *,
        progress: bool,
    ) -> None:
        self.networks, self.layouts, self.classes = networks, layouts, classes
        self.total, self.progress = total, progress
        self.count = 0
        self.log_likelihoods: list[float | None] = []

    def run(self, loader: Iterable[Any], sums: Sequence[Sum], where: str) -> None:
        """Read the loader once."""
        self.count, scores, labelled = 0, [0.0] * len(sums), set()
        bar = tqdm(loader, desc=where, total=self.total, disable=None if self.progress else True, leave=False)
        for index, raw in enumerate(bar):
            place = f"batch {index} of the training loader"
            batch = as_batch(raw, place)
            labelled.add(batch.labels is not None)
            if len(labelled) > 1:
                raise DataError(
                    f"{place} {'has no' if batch.labels is None else 'has'} labels, unlike the batches before it."
                )
            for position, one in enumerate(sums):
                with located(f"{place}, models[{position}]"):
                    logits = torch.cat(list(self._logits(position, one, batch.inputs)))
                if batch.labels is not None:
                    labels = CATEGORICAL.check_labels(batch.labels, logits, place)
                    scores[position] += float(CATEGORICAL.log_likelihood(logits.double(), labels).sum())
            self.count += len(logits)
        self.log_likelihoods = [score if labelled == {True} else None for score in scores]

    def _logits(self, position: int, one: Sum, inputs: Inputs) -> Iterator[Tensor]:
        for _, some in portions(inputs, self.layouts[position], self.classes, one.explicit):
            logits = one.add(some)
            CATEGORICAL.check_outputs(logits)
            check_finite(logits)
            yield logits
