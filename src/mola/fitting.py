"""The ways to make a posterior: fit it, take the networks alone, or load it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.component import Component, Curvature, per_component
from mola.distributed import Team, check_sampler
from mola.errors import OptionError
from mola.laplace import Structure, as_structure, check_precision
from mola.likelihood import Gaussian, Likelihood, as_likelihood
from mola.links import Link, as_link
from mola.mixture import check_weighting
from mola.network import IGNORED, check_loader, check_positions, undisturbed
from mola.network.fingerprint import Watch
from mola.posterior import MoLA
from mola.regression import RegressionMoLA
from mola.saving import archive, storage
from mola.sums import SumsCheckpoint, sum_up
from mola.tuning.choosing import check_rule
from mola.tuning.data_checks import Remembering, shared_rows
from mola.tuning.rules import Rule


def _as_networks(models: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        return [models]  # a Sequential can be iterated, but is one network
    alone = isinstance(models, (str, Mapping)) or not isinstance(models, Iterable)
    networks: list[Any] = [models] if alone else list(models)
    named = next((one for one in networks if isinstance(one, (str, Path))), None)
    if named is not None:
        raise OptionError(
            f"models: expected one nn.Module or a list of them, got the name of a file, {str(named)!r}. Build the network and load "
            f"its weights first: network.load_state_dict(torch.load({str(named)!r}, weights_only=True)). The command `mola fit` takes "
            f"files."
        )
    if any(isinstance(one, Mapping) for one in networks):
        raise OptionError(
            "models: expected one nn.Module or a list of them, got a state dict: weights without a network. Build the network, call "
            "network.load_state_dict(state_dict), and pass the network."
        )
    if not networks or not all(isinstance(network, nn.Module) for network in networks):
        kinds = ", ".join(dict.fromkeys(type(network).__name__ for network in networks)) or "an empty list"
        raise OptionError(f"models: expected one nn.Module or a non-empty list of them, got {kinds}.")
    return networks


def fit(
    models: nn.Module | Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    structure: str | Structure = "kron",
    prior_precision: float | Sequence[float] = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    link: str | Link = "probit",
    head: str | Sequence[str] | None = None,
    progress: bool = True,
    *,
    rule: Rule | str | None = None,
    likelihood: str | Likelihood = "categorical",
    team: Team | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    distances: bool = True,
    positions: str | int = "all",
    ignore_index: int = IGNORED,
) -> MoLA:
    """Put a Laplace approximation on the last layer of each trained network: one pass over the training data.

    Data are read once, and every network sees each batch in turn. The networks are not modified.

    Args:
        models: one trained classifier, or K of them; architectures may differ, the number of classes may not.
        train_loader: any iterable of batches: `(x, y)`, `[x, y]`, `x` alone, or a mapping with the labels under "labels".
        val_loader: if given, the prior precision is tuned on it at once, by `rule`.
        structure: "kron" (Algorithm 1), "kron-exact", "kron-diag", "diag" or "full", or a `Structure`.
        prior_precision: lambda, one number or K.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        link: "probit", "probit-centered", "mean-field", "bridge" or "mc", or a `Link`.
        head: None finds each network's last linear layer; or its dotted name, one for all or one for each.
        progress: whether to show a progress bar on stderr, if that is a terminal.
        rule: how the prior precision is chosen, as for `tune`: "threshold" (the paper's; None, where there are validation data),
            "nll", "brier", "ece", "distance" (logits are cooled by the distance from the training classes, too), "evidence" (which
            takes no validation data), or an object such as `mola.Distance(price=0.02)`. Without validation data, None keeps
            `prior_precision`.
        likelihood: what the networks' outputs mean: "categorical" (one of C classes, by a softmax), "bernoulli" (yes or no, by one
            logit, or for each of C labels by one logit each), "gaussian" (numbers), or a `Likelihood` such as
            `mola.Gaussian(location=20.0, scale=5.0)`.
        team: the processes to fit with, from `mola.join()`: each passes the same networks and options and a shard of its own, of
            both loaders, and gets the same posterior, that of all the data. None fits alone.
        checkpoint: folder for the sums so far. A fit that was interrupted goes on from there when it is called again with the same
            networks, options and data in the same order. It is removed when the fit is done.
        checkpoint_every: batches between two checkpoints.
        distances: whether to sum what `rule="distance"` and `prediction.distance` need, too: C x P numbers for each network, and
            P x P. False saves them where there are very many classes.
        positions: for networks with outputs at many positions, (n, C, H, W) of a 1x1 convolution or (n, T, C) of a linear layer:
            "all" counts each position as a datum, as if they were independent; "average" counts each input as one datum, and its
            positions as parts of it; a number counts so many positions of each input, drawn at random and the same for all networks.
        ignore_index: positions with this label are left out.

    Returns:
        The posterior.

    Raises:
        OptionError: if an argument has a value that cannot be used; `HeadError` and `DataError` come from the networks
            and the loader.
    """
    together = Team.alone() if team is None else team
    checkpoints = SumsCheckpoint(checkpoint, checkpoint_every, together.rank, together.size)
    with together.work("fit"):
        if together.size > 1:
            check_sampler(train_loader)
        networks = _as_networks(models)
        if not isinstance(distances, bool):
            raise OptionError(f"distances must be True or False, got {distances!r}.")
        if val_loader is not None:
            check_loader(val_loader, "the validation loader")  # now, and not after the pass over the training data
        chosen_likelihood = as_likelihood(likelihood)
        check_rule(rule, val_loader, chosen_likelihood)
        used = check_positions(positions)
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise OptionError(f"ignore_index must be a whole number, a label that no class has; got {ignore_index!r}.")
        count = len(networks)
        chosen_structure, chosen_link = as_structure(structure), as_link(link, chosen_likelihood)
        weighting = check_weighting(weights, count)
        precisions = [check_precision(value) for value in per_component(prior_precision, count, "prior_precision")]
        single = head is None or isinstance(head, str) or not isinstance(head, Iterable)
        names: list[Any] = [head] * count if single else list(head or ())
        if len(names) != count or not all(isinstance(name, str | None) for name in names):
            raise OptionError(
                f"head: expected one name, or {count} of them (one for each model); got {len(names)}: {head!r}."
            )
        options = {
            "prior_precision": precisions,
            "weights": weighting if isinstance(weighting, str) else weighting.tolist(),
            "link": {"name": chosen_link.name, **chosen_link.settings()},
            "validation data": val_loader is not None,
            "rule": None if rule is None else rule if isinstance(rule, str) else type(rule).__name__,
            "checkpoint": checkpoints.active,
            "distances": distances,
            "positions": used,
            "ignore_index": ignore_index,
        }
        if val_loader is not None and together.size == 1:  # each process of a team sees its own shards alone
            check_loader(train_loader, "the training loader")
            train_loader, val_loader = Remembering(train_loader), Remembering(val_loader)
        # Sums made in inference mode could not be differentiated by mola.Evidence later.
        with torch.inference_mode(False), undisturbed(*networks):
            heads, sums = sum_up(
                networks,
                names,
                train_loader,
                chosen_structure,
                chosen_likelihood,
                team=together,
                checkpoints=checkpoints,
                options=options,
                progress=progress,
                distances=distances,
                positions=used,
                ignore_index=ignore_index,
            )
            trained = [head.trained_weights() for head in heads]
        # Not among the visited: some networks write into their buffers in every pass.
        curvatures = [
            Curvature(
                chosen_structure,
                factors,
                weights[chosen_likelihood.rows(len(weights))],
                Watch(network),
                chosen_likelihood.settled(factors.label_sums, factors.count),
                classes,
            )
            for network, weights, (factors, classes) in zip(networks, trained, sums, strict=True)
        ]
    components = [
        Component(network, one, curvature, precision)
        for network, one, curvature, precision in zip(networks, heads, curvatures, precisions, strict=True)
    ]
    posterior = _mixture(chosen_likelihood)(components, chosen_link, weighting)
    if val_loader is not None or rule is not None:
        posterior = posterior.tune(val_loader, rule, progress=progress, team=team)
        if isinstance(train_loader, Remembering) and isinstance(val_loader, Remembering):
            posterior = posterior.with_doubt(shared_rows(train_loader, val_loader))
    checkpoints.remove()
    return posterior


def ensemble(
    models: nn.Module | Sequence[nn.Module],
    weights: str | Sequence[float] | Tensor = "uniform",
    *,
    likelihood: str | Likelihood = "categorical",
) -> MoLA:
    """The deep ensemble of trained networks, or of one network its plain (MAP) prediction: no data needed.

    Args:
        models: one trained classifier, or K of them.
        weights: "uniform", or K numbers that sum to 1.
        likelihood: what the networks' outputs mean, as for `fit`.

    Returns:
        A posterior without covariance.
    """
    meaning = as_likelihood(likelihood)
    components = [Component(network, None, None, 1.0, meaning) for network in _as_networks(models)]
    return _mixture(meaning)(components, "probit", weights)


def load(directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> MoLA:
    """Load a saved posterior onto the networks it was fitted on.

    Args:
        directory: folder that `posterior.save` wrote.
        models: the networks, in the same order.

    Returns:
        The posterior; `StorageError` if the files are damaged or of another version, or a network is not the one that
        was fitted.
    """
    networks = _as_networks(models)
    components, parts = archive.unpack(*storage.read(directory), networks)
    return _mixture(components[0].likelihood)(components, *parts)


def _mixture(likelihood: Likelihood) -> type[MoLA]:
    return RegressionMoLA if isinstance(likelihood, Gaussian) else MoLA
