"""Load a posterior from any folder written by this library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from molaplace.errors import OptionError, StorageError
from molaplace.fitting import Logits, Tokens, as_networks
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.saving.files import file_name
from molaplace.saving.posterior import load_posterior


def load(
    directory: str | Path,
    networks: nn.Module | Sequence[nn.Module] | None = None,
    *,
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
) -> LaplaceMixture:
    """Load a saved posterior and attach it to its networks.

    Args:
        directory: folder written by `posterior.save` or `mola.hub.save`.
        networks: the networks that were passed to the fit, in the same order; can be omitted for a hub folder that contains
            transformers networks.
        logits: function that selects the logits from a network's output, as in `mola.fit`.
        tokens: tokens that are the classes of causal language models, as in `mola.fit`.
        tokenizer: the tokenizer of the language models, as in `mola.fit`.

    Returns:
        The posterior. Raises `StorageError` if the files are damaged or a network differs from the one used in the fit.
    """
    if not isinstance(directory, (str, Path)):
        raise OptionError(
            f"must be a folder's path, got a {type(directory).__name__}. The folder comes first: mola.load(directory, networks).",
            argument="directory",
        )
    from molaplace import hub, whole  # imported on first use, because they need optional packages

    if Path(directory).is_file() and Path(directory).suffix in (".onnx", ".pt2"):
        raise StorageError(f"{directory} is an exported model. Load it with mola.export.load({str(directory)!r}).")
    if networks is None and (tokens is not None or not hub.is_hub_folder(directory)):
        raise OptionError(f"must be the networks of the posterior in {directory}, got None.", argument="networks")
    models = None if networks is None else as_networks(networks, logits, tokens, tokenizer)
    if models is None or hub.is_hub_folder(directory):
        return hub.load(directory, models)
    if Path(directory, file_name(whole.files.KIND)).exists():
        return whole.load(directory, models)
    return load_posterior(directory, models)
