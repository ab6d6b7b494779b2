"""Temperature scaling of networks without a Laplace approximation, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from molaplace.errors import OptionError
from molaplace.fitting import Logits, Tokens, ensemble
from molaplace.likelihoods import Likelihood
from molaplace.posterior import MoLA
from molaplace.rules.temperature import Temperature


def temperature_scaled(
    networks: nn.Module | Sequence[nn.Module],
    val_loader: Iterable[Any],
    *,
    mean: Literal["probabilities", "logits"] = "probabilities",
    weights: str | Sequence[float] | Tensor = "uniform",
    likelihood: str | Likelihood = "categorical",
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> MoLA:
    """Return a plain ensemble with the temperature that minimises the negative log-likelihood on the validation data.

    A weak prior, which the default rule shares, penalises temperatures below 1. It matters only with few validation data, above all if
    the networks classify all of them correctly.

    This is `mola.ensemble(networks).tune(val_loader, rule=mola.rules.Temperature())`; only T (`result.temperature`) needs to be saved.

    Args:
        networks: one trained classifier, or K of them; they are not modified.
        val_loader: validation data with labels, read once.
        mean: the quantity that is averaged over the networks, "probabilities" or "logits".
        weights: "uniform", or K numbers that sum to 1.
        likelihood: "categorical" or "bernoulli".
        logits: function that extracts the logits from a network's output, as for `mola.fit`.
        tokens: tokens that are the classes of causal language models, as for `mola.fit`.
        tokenizer: the tokenizer of the language models, as for `mola.fit`.
        progress: show a progress bar on stderr if it is a terminal.
    """
    rule = Temperature(mean)
    plain = ensemble(networks, weights, likelihood=likelihood, logits=logits, tokens=tokens, tokenizer=tokenizer)
    if not rule.applies_to(plain.likelihood):
        raise OptionError(
            f"a temperature divides logits, but likelihood {plain.likelihood.name!r} has no logits. Expected 'categorical' or 'bernoulli'. "
            f"For regression, use mola.calibration.scale_noise."
        )
    return plain.tune(val_loader, rule=rule, progress=progress)
