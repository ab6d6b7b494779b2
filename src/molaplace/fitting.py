"""Functions that create a posterior: `fit` with a Laplace approximation, and `ensemble` without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from molaplace.component import Component, LastLayer, per_component
from molaplace.distributed import Team
from molaplace.errors import OptionError, located, warn
from molaplace.likelihoods import Likelihood, as_likelihood
from molaplace.links import Link, as_link
from molaplace.network import (
    IGNORE_INDEX,
    Branch,
    HeadNetwork,
    LogitsOf,
    Positions,
    TokenChoice,
    check_loader,
    check_network,
    check_positions,
    evaluating,
    token_ids,
    unwrapped,
)
from molaplace.posterior import MoLA
from molaplace.predictor import Predictor
from molaplace.rules import Rule, as_rule
from molaplace.saving.fit_checkpoint import FitCheckpoint
from molaplace.settings import Settings
from molaplace.structures import Structure, as_structure
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
    if isinstance(first, HeadNetwork):  # each of them takes features of its own
        return False
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
    if val_loader is not None:
        check_loader(val_loader, "validation loader")
    if rule is not None or val_loader is not None:
        as_rule(rule, likelihood, val_loader)  # reports an unsuitable rule before the pass over the data
    checkpoints = FitCheckpoint(checkpoint, checkpoint_every, team.rank, team.size)
    heads, checksums, totals = read_sums(
        models,
        names,
        train_loader,
        structure,
        likelihood,
        where="training loader",
        distances=distances,
        positions=positions,
        ignore_index=ignore_index,
        team=team,
        checkpoints=checkpoints,
        progress=progress,
    )
    components = []
    with torch.inference_mode(False), torch.no_grad(), evaluating(*models):
        for network, network_head, sums, parts in zip(models, heads, totals, checksums, strict=True):
            fitted = likelihood.fitted(sums.weighted())  # with the noise of a regression, unless it was given
            weights = fitted.uncertain(network_head.weights())
            layer = LastLayer.from_sums(structure, sums, weights, fitted, parts)
            components.append(Component(network, network_head, layer, fitted))
    warn_of_empty_classes(totals[0])
    posterior = MoLA(components, settings, link=link, weights=weighting)
    if val_loader is not None or rule is not None:
        posterior = posterior.tune(val_loader, rule=rule, progress=progress, team=team)
    checkpoints.remove()
    return posterior


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
