"""Functions that create a posterior: `fit` with a Laplace approximation, and `ensemble` without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from molaplace.component import Component, LastLayer, per_component
from molaplace.distributed import Team, check_sampler
from molaplace.errors import DataError, OptionError, located, warn
from molaplace.likelihoods import Likelihood, as_likelihood
from molaplace.links import Link, as_link
from molaplace.network import (
    IGNORE_INDEX,
    Branch,
    Head,
    LogitsOf,
    Positions,
    StateChecksums,
    TokenChoice,
    as_batch,
    batch_count,
    check_loader,
    check_network,
    check_positions,
    check_positions_labelled,
    evaluating,
    find_heads,
    head_by_name,
    peek,
    state_checksums,
    token_ids,
    unwrapped,
)
from molaplace.posterior import MoLA
from molaplace.predictor import Predictor
from molaplace.rules import Rule, as_rule
from molaplace.saving.fit_checkpoint import FitCheckpoint
from molaplace.settings import Settings
from molaplace.structures import Structure, as_structure
from molaplace.structures.base import check_size
from molaplace.sums import Sums
from molaplace.training_sums import read_sums, warn_of_empty_classes
from molaplace.weights import check_weighting

Logits: TypeAlias = "Callable[[Any], Tensor]"
"""A function that maps a network's output to its logits."""


Tokens: TypeAlias = "Sequence[int] | Sequence[str]"
"""Classes that are tokens: ids, or strings."""


def as_networks(
    networks: nn.Module | Sequence[nn.Module],
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
) -> list[nn.Module]:
    """Return the networks as a list, without their torch.compile wrappers, and warn if the same network occurs twice.

    Networks with a function that extracts the logits from their output are wrapped in `LogitsOf`, and language models that choose among
    tokens in `TokenChoice`.
    """
    # A Sequential or a state dict is iterable, but counts as one thing.
    single = isinstance(networks, (nn.Module, str, Mapping)) and not isinstance(networks, nn.ModuleList)
    modules: list[Any] = list(networks) if isinstance(networks, Iterable) and not single else [networks]
    if not modules:
        raise OptionError(
            "must be an nn.Module or a non-empty list of nn.Modules, got an empty list.", argument="networks"
        )
    models = []
    for module in modules:
        if not isinstance(module, nn.Module) or isinstance(module, Predictor):
            raise _not_a_network(module)
        check_network(module)
        models.append(unwrapped(module))
    functions = [logits] * len(models) if logits is None or callable(logits) else list(logits)
    if len(functions) != len(models) or not (logits is None or all(map(callable, functions))):
        raise OptionError(
            f"must be a function that maps a network's output to its logits, such as `lambda output: output[0]`, or "
            f"a list of {len(models)} such functions; got {logits!r}.",
            argument="logits",
        )
    for first, second in combinations(range(len(models)), 2):
        if functions[first] is functions[second] and _are_copies(models[first], models[second]):
            warn(
                "the same network was passed more than once. Copies always agree, so the mixture is no better than a single network."
            )
            break
    if tokens is not None:
        if logits is not None:
            raise OptionError("selects the logits by itself, so it cannot be combined with logits=.", argument="tokens")
        ids = token_ids(tokens, tokenizer)
        choices: list[nn.Module] = []
        for index, model in enumerate(models):
            with located(f"networks[{index}]"):
                choices.append(TokenChoice(model, ids))
        return choices
    if tokenizer is not None:
        raise OptionError("turns the strings in tokens= into ids, but there are no tokens.", argument="tokenizer")
    pairs = zip(models, functions, strict=True)
    return [model if function is None else LogitsOf(model, function) for model, function in pairs]


def _not_a_network(value: Any) -> OptionError:
    got = type(value).__name__
    remedy = ""
    if isinstance(value, (str, Path)):
        got = f"a file name, {str(value)!r}"
        remedy = (
            f" Build the network and load its weights first: network.load_state_dict(torch.load({str(value)!r}, "
            f"weights_only=True)). The command `molaplace fit` accepts such files directly."
        )
    elif isinstance(value, Mapping):
        got = "a state dict"
        remedy = " Build the network, call network.load_state_dict(state_dict), and pass the network itself."
    elif isinstance(value, Predictor):
        remedy = (
            " It predicts probabilities already. Pass the networks themselves, such as posterior.networks. To tune a posterior, call "
            "posterior.tune(val_loader); to mix predictors, use mola.Mixture."
        )
    elif isinstance(value, type):
        got = f"the class {value.__name__}"
        remedy = f" Pass a trained instance of {value.__name__}."
    elif isinstance(value, (tuple, Tensor)):
        remedy = " The networks come before the data: mola.fit(networks, train_loader, val_loader)."
    message = f"must be an nn.Module or a non-empty list of nn.Modules, got {got}.{remedy}"
    return OptionError(message, argument="networks")


def _are_copies(first: nn.Module, second: nn.Module) -> bool:
    # Two modules that share all their parameters, such as two adapters of one backbone, may be different networks. Parameters that they
    # do not share tell copies apart.
    if first is second:
        return True
    left = list(first.parameters())
    right = list(second.parameters())
    if [values.shape for values in left] != [values.shape for values in right]:
        return False
    separate = [(values, others) for values, others in zip(left, right, strict=True) if values is not others]
    if not separate:  # views of one adapter or head
        return all(
            isinstance(model, Branch) or len(getattr(model, "peft_config", ())) == 1 for model in (first, second)
        )
    return all(torch.equal(values, others.to(values)) for values, others in separate)


def fit(
    networks: nn.Module | Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    *,
    rule: Rule | str | None = None,
    structure: str | Structure = "kron",
    link: str | Link = "probit",
    likelihood: str | Likelihood = "categorical",
    prior_precision: float | Sequence[float] = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    head: str | Sequence[str] | None = None,
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
    distances: bool = True,
    positions: Positions = "all",
    ignore_index: int = IGNORE_INDEX,
    team: Team | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> MoLA:
    """Fit a Laplace approximation to the last layer of each trained network in one pass over the training data.

    The data are read only once, and every network processes each batch. The networks are not modified.

    Args:
        networks: a trained network, or a list of K trained networks. Their architectures may differ, but they must all have the same
            number of outputs. A network wrapped in `torch.compile` runs without compilation; compile the part before its last layer.
        train_loader: any iterable of batches. A batch is `(x, y)`, `x` alone, or a mapping that holds the labels under the key
            "labels".
        val_loader: optional validation data on which the posterior is tuned.
        rule: the tuning rule, by name or as an object from `mola.rules`; by default, the likelihood's default rule. Without
            validation data, the default is to apply no rule and keep `prior_precision`.
        structure: "kron" (Algorithm 1), "kron-exact", "kron-diag", "diag" or "full", or an object from `mola.structures`.
        link: "probit", "probit-centred", "mean-field", "bridge" or "mc", or an object from `mola.links`.
        likelihood: "categorical" (one of C classes), "bernoulli" (binary or multi-label) or "gaussian" (regression), or an object from
            `mola.likelihoods`.
        prior_precision: prior precision lambda, used unless a rule chooses one: a single number, or one per network.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        head: dotted name of the last linear layer, or one name per network; by default, the layer is found automatically.
        logits: function that extracts the logits from a network's output, such as `lambda output: output[0]`, or one such function
            per network; not needed if the network returns the logits. Pass the same function to `mola.load`.
        tokens: for causal language models, the tokens that are the classes, as ids or as strings such as " A". The logits are those of
            these tokens after the last position that is not padding, and labels are indices into `tokens`. Pass the same tokens to
            `mola.load`.
        tokenizer: the tokenizer of the language models, needed if `tokens` are strings.
        distances: whether to compute the sums needed for distances from the training classes. For each network, these sums are
            matrices of shapes C x P and P x P.
        positions: how to treat dense outputs of shape (n, C, H, W) or (n, T, C). "all" treats each position as a datum, and "average"
            treats each input as a single datum. If `positions` is a number, that many positions are drawn from each input.
        ignore_index: label that marks positions to ignore.
        team: processes that share the fit; see `mola.distributed.join`. Each process reads its own shard, and every process returns
            the posterior for the combined data.
        checkpoint: folder in which intermediate sums are saved. If the fit is interrupted, repeating the call resumes it from
            these sums. The folder is removed when the fit is complete.
        checkpoint_every: number of batches between checkpoints.
        progress: whether to show a progress bar when stderr is a terminal.

    Raises:
        OptionError: if an argument is invalid. Unsuitable networks raise `HeadError`, and unsuitable batches raise `DataError`.
    """
    team = Team.single() if team is None else team
    if tokens is not None and head is not None:
        raise OptionError("makes the last layer by itself, so it cannot be combined with head=.", argument="tokens")
    models = as_networks(networks, logits, tokens, tokenizer)
    likelihood = as_likelihood(likelihood)
    structure = as_structure(structure)
    link = as_link(link, likelihood)
    count = len(models)
    weighting = check_weighting(weights, count)
    settings = Settings(tuple(per_component(prior_precision, count, "prior_precision")))
    names = per_component(head, count, "head")
    positions = check_positions(positions)
    check_loader(train_loader, "training loader")
    if val_loader is not None:
        check_loader(val_loader, "validation loader")
    if rule is not None or val_loader is not None:
        as_rule(rule, likelihood, val_loader)  # reports an unsuitable rule before the pass over the data
    if team.size > 1:
        check_sampler(train_loader)
        if not structure.additive:
            raise OptionError(
                "a running average depends on the order of the batches and cannot be computed by several processes. "
                "Use running_average=None."
            )
    checkpoints = FitCheckpoint(checkpoint, checkpoint_every, team.rank, team.size)

    # Sums computed in inference mode could not be differentiated later.
    with torch.inference_mode(False), torch.no_grad(), evaluating(*models):
        heads, batches = _heads_and_batches(models, names, train_loader, likelihood, team)
        heads = [replace(head, ignore_index=ignore_index, positions=positions) for head in heads]
        check_size(structure, [head.width for head in heads], heads[0].outputs)
        checksums = state_checksums(models)
        totals = read_sums(
            models,
            heads,
            checksums,
            batches,
            structure,
            likelihood,
            distances=distances,
            where="training loader",
            total=batch_count(train_loader),
            team=team,
            checkpoints=checkpoints,
            progress=progress,
        )
        components = [
            make_component(structure, likelihood, *network_parts)
            for network_parts in zip(models, heads, totals, checksums, strict=True)
        ]
    warn_of_empty_classes(totals[0])
    posterior = MoLA(components, settings, link=link, weights=weighting)
    if val_loader is not None or rule is not None:
        posterior = posterior.tune(val_loader, rule=rule, progress=progress, team=team)
    checkpoints.remove()
    return posterior


def _heads_and_batches(
    networks: Sequence[nn.Module],
    names: Sequence[str | None],
    loader: Iterable[Any],
    likelihood: Likelihood,
    team: Team,
) -> tuple[list[Head], Iterator[Any]]:
    # Return the heads and all batches. The heads are found by watching a forward pass on the first batch; a rank without data copies
    # them from another rank.
    if team.size == 1:
        first, batches = peek(loader, "training loader")
    else:
        batches = iter(loader)
        first = next(batches, None)
        batches = batches if first is None else chain([first], batches)
    heads = None
    if first is not None:
        batch_name = "batch 0 of the training loader"
        batch = as_batch(first, batch_name)
        heads = find_heads(networks, names, batch.inputs, likelihood)
        if heads[0].dense_axes == 1:  # before the size of a whole vocabulary is refused
            check_positions_labelled(networks, batch, heads[0].outputs, batch_name)
    descriptions = [(head.name, head.every_position, head.dense_axes) for head in heads or ()]
    descriptions = next((of_rank for of_rank in team.collect(descriptions) if of_rank), [])
    if not descriptions:
        raise DataError("the training loader is empty on every rank. Pass at least one batch.")
    if heads is None:
        heads = [
            replace(head_by_name(network, name), every_position=every_position, dense_axes=dense_axes)
            for network, (name, every_position, dense_axes) in zip(networks, descriptions, strict=True)
        ]
    return heads, batches


def make_component(
    structure: Structure,
    likelihood: Likelihood,
    network: nn.Module,
    head: Head,
    sums: Sums,
    checksums: StateChecksums,
) -> Component:
    """Build the component for one network from its sums. In regression, the noise is estimated from them unless it is given."""
    fitted = likelihood.fitted(sums.weighted())
    return Component(network, head, LastLayer.from_sums(structure, sums, head.weights(), fitted, checksums), fitted)


def ensemble(
    networks: nn.Module | Sequence[nn.Module],
    weights: str | Sequence[float] | Tensor = "uniform",
    *,
    likelihood: str | Likelihood = "categorical",
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
) -> MoLA:
    """Make a deep ensemble of trained networks, or a plain (MAP) predictor from one network; no data are needed.

    Args:
        networks: a trained network, or a list of K trained networks.
        weights: "uniform", or K numbers that sum to 1.
        likelihood: likelihood of the labels given the outputs, as for `fit`.
        logits: function that extracts the logits from a network's output, as for `fit`.
        tokens: tokens that are the classes of causal language models, as for `fit`.
        tokenizer: the tokenizer of the language models, as for `fit`.
    """
    likelihood = as_likelihood(likelihood)
    models = as_networks(networks, logits, tokens, tokenizer)
    components = [Component(network, None, None, likelihood) for network in models]
    return MoLA(components, weights=check_weighting(weights, len(models)))
