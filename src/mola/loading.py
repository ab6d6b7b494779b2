"""Load a posterior, whichever kind of folder it was saved in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from mola.errors import OptionError, StorageError
from mola.fitting import Logits, as_networks
from mola.posterior import MoLA
from mola.saving.files import kind_of
from mola.saving.posterior import load_posterior


def load(
    directory: str | Path,
    networks: nn.Module | Sequence[nn.Module] | None = None,
    *,
    logits: Logits | Sequence[Logits] | None = None,
) -> MoLA:
    """Load a saved posterior onto the networks it was fitted on.

    Args:
        directory: folder that `posterior.save` or `mola.hub.save` wrote.
        networks: the networks, in the same order; None for a hub folder of transformers networks, which holds them.
        logits: as for `mola.fit`.

    Returns:
        The posterior; `StorageError` if the files are damaged or a network is not the one that was fitted.
    """
    from mola import hub, whole  # on first use: they need more than the core

    if Path(directory).is_file() and Path(directory).suffix in (".onnx", ".pt2"):
        raise StorageError(f"{directory} is an exported model: load it with mola.export.load({str(directory)!r}).")
    if hub.is_hub_folder(directory):
        return hub.load(directory, None if networks is None else as_networks(networks, logits))
    if networks is None:
        raise OptionError(f"networks: expected the networks that the posterior in {directory} was fitted on, got None.")
    if kind_of(directory) == "whole-posterior":
        return whole.load(directory, networks)
    return load_posterior(directory, as_networks(networks, logits))
