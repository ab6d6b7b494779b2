"""Open bundles: load a posterior, with its networks, from any folder that this library wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from molaplace.errors import OptionError, StorageError
from molaplace.fitting import Logits, Tokens, as_networks
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.options import counted
from molaplace.saving import posterior as last_layers
from molaplace.saving.bundle import CARD, MAX_OUTPUTS, Contents, read_bundle
from molaplace.saving.schema import from_json

Networks = nn.Module | Sequence[nn.Module]
Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Bundle:
    """A posterior with its networks, and what else its folder contains. Returned by `mola.load_bundle`."""

    folder: Path
    posterior: LaplaceMixture
    outputs: int
    """Number of outputs of each network."""
    contents: Contents
    """Class names, form and preparation of the inputs, where the networks come from, and how a command made the folder."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Scores of validation data, keyed by name; empty if there were none. See `validation_columns`."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, labels or targets, if they have names."""
        return self.contents.classes or None

    @property
    def example(self) -> Any:
        """A batch of 2 all-zero inputs for tracing: a tensor, or a mapping or tuple of tensors; None if their form is unknown."""
        return None if self.contents.inputs is None else self.contents.inputs.example()

    @property
    def card(self) -> str | None:
        """The model card, if there is one."""
        path = self.folder / CARD
        return path.read_text(encoding="utf-8") if path.is_file() else None


def load_bundle(
    directory: str | Path,
    networks: Networks | Build | None = None,
    *,
    trust: bool = False,
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
) -> Bundle:
    """Load a posterior with its networks, and everything else in its folder. The arguments are those of `mola.load`."""
    if not isinstance(directory, (str, Path)):
        raise OptionError(
            f"must be a folder's path, got a {type(directory).__name__}. The folder comes first: mola.load(directory, networks).",
            argument="directory",
        )
    folder = Path(directory)
    if folder.is_file() and folder.suffix in (".onnx", ".pt2"):
        raise StorageError(f"{folder} is an exported model. Load it with mola.export.load({str(folder)!r}).")
    document, tensors, columns, contents = read_bundle(folder)
    outputs = _outputs(document, folder)
    if networks is None or (callable(networks) and not isinstance(networks, nn.Module)):
        if not contents.networks:
            raise OptionError(
                f"must be the networks of the posterior in {folder}, got {networks!r}.", argument="networks"
            )
        networks = _load_networks(contents, folder, networks, outputs, trust=trust)
    models = as_networks(networks, logits, tokens, tokenizer)
    from molaplace.whole import (
        files as whole_networks,  # imported on first use, because few posteriors are over whole networks
    )

    unpack = {last_layers.LAST_LAYERS: last_layers.unpack, whole_networks.WHOLE_NETWORKS: whole_networks.unpack}
    over = str(document.get("over"))
    if over not in unpack:
        raise StorageError(f"{folder} is damaged: expected a posterior over {' or '.join(unpack)}, got {over!r}.")
    posterior = unpack[over](document, tensors, models, folder)
    uncertain = posterior.likelihood.num_uncertain(outputs)
    if len(contents.classes) not in (0, outputs, uncertain):
        raise StorageError(
            f"{folder} is damaged: expected the names of {counted(uncertain, 'output')}, got {len(contents.classes)} names."
        )
    return Bundle(folder, posterior, outputs, contents, columns)


def _load_networks(contents: Contents, folder: Path, build: Any, outputs: int, *, trust: bool) -> list[nn.Module]:
    networks = []
    for index, source in enumerate(contents.networks):
        try:
            networks.append(source.load(folder, build, outputs, trust=trust))
        except StorageError as error:
            error.place = error.place or f"networks[{index}]"
            raise
    return networks


def _outputs(document: Mapping[str, Any], folder: Path) -> int:
    # Return the number of outputs of the first network.
    try:
        component = document["components"][0]
        outputs: int = from_json(int, component.get("head", component)["outputs"])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise StorageError(f"{folder} is damaged: the number of outputs is missing. Copy it again.") from error
    if outputs > MAX_OUTPUTS:
        raise StorageError(f"{folder} is damaged: expected at most {MAX_OUTPUTS:,} outputs, got {outputs:,}.")
    return outputs


def load(
    directory: str | Path,
    networks: Networks | Build | None = None,
    *,
    trust: bool = False,
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
) -> LaplaceMixture:
    """Load a saved posterior and attach it to its networks.

    Args:
        directory: folder written by `posterior.save`, `mola.hub.save` or `molaplace fit`.
        networks: the networks that were passed to the fit, in the same order; or a function that builds a network of the right
            architecture, or a class with a `from_pretrained` method, into which the weights in the folder are loaded. Can be omitted if
            the folder contains transformers networks, or names a function that builds its networks and is trusted.
        trust: whether to import and run a function that only the folder names.
        logits: function that selects the logits from a network's output, as in `mola.fit`.
        tokens: tokens that are the classes of causal language models, as in `mola.fit`.
        tokenizer: the tokenizer of the language models, as in `mola.fit`.

    Returns:
        The posterior. Raises `StorageError` if the files are damaged or a network differs from the one used in the fit.
    """
    return load_bundle(directory, networks, trust=trust, logits=logits, tokens=tokens, tokenizer=tokenizer).posterior
