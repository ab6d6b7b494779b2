"""Load networks with `from_pretrained` from a folder that may come from a stranger. No code is downloaded or run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molaplace.errors import StorageError
from molaplace.saving.files import MAX_DOCUMENT, read_file
from molaplace.saving.schema import parse

ADAPTER = "adapter_config.json"
TIMM_TEXTS = ("global_pool",)
"""Arguments of timm whose texts choose among timm's own layers."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object, such as the configuration of transformers; raise `StorageError` if the file is missing or invalid."""
    config = parse(read_file(path, MAX_DOCUMENT), path)
    if not isinstance(config, dict):
        raise StorageError(f"{path} is damaged: expected a JSON object.")
    return config


def load_pretrained(network_class: Any, folder: Path, **options: Any) -> Any:
    """Return what `network_class.from_pretrained` loads from the files in a folder.

    A configuration may name code or files elsewhere, which transformers and timm would download, import or unpickle. Such a folder
    raises `StorageError`.
    """
    path = folder / "config.json"
    source = next(_sources(read_config(path)), None) if path.exists() else None
    module = str(getattr(network_class, "__module__", ""))
    if module.startswith("transformers.") and (folder / ADAPTER).exists():
        path = folder / ADAPTER
        source = "a backbone"
    if source is not None:
        raise StorageError(
            f"{path} names {source}, which transformers could download and run. If you trust it, load the network "
            f"yourself. Otherwise, remove the entry from the file."
        )
    if module.startswith("transformers.models.auto"):
        options["trust_remote_code"] = False  # otherwise transformers offers to run code from the folder
    return network_class.from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)


def _sources(config: Any, name: str = "") -> Iterator[str]:
    # Describe the entries, at any depth, that name code or files other than the folder's own config.json and weights.
    if isinstance(config, str) and name.endswith("_implementation") and "/" in config:
        yield f"the kernel {config!r}"
    if isinstance(config, list):
        for inner in config:
            yield from _sources(inner, name)
    if isinstance(config, dict):
        if config.get("configuration_files"):
            yield f"the configuration files {config['configuration_files']!r}"
        yield from _timm_sources(config)
        backbone = config.get("backbone")
        if isinstance(backbone, str) and (config.get("use_pretrained_backbone") or config.get("backbone_kwargs")):
            yield f"the pretrained backbone {backbone!r}"
        for key, inner in config.items():
            # An implementation may be given for each part of the network: {"text_config": "user/kernel"}.
            yield from _sources(inner, name if name.endswith("_implementation") else key)


def _timm_sources(config: dict[str, Any]) -> Iterator[str]:
    # A name with a source, such as "hf-hub:user/network", is a download. `model_args` are passed to `timm.create_model`, which may
    # unpickle a file that they name; numbers name no file.
    for key in ("architecture", "backbone"):
        if isinstance(config.get(key), str) and not re.fullmatch(r"[\w.-]+", config[key]):
            yield f"the network {config[key]!r}"
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        yield f"the arguments {arguments!r}"
        return
    for key, value in arguments.items():
        if not (_is_numeric(value) or (isinstance(value, str) and key in TIMM_TEXTS)):
            yield f"the argument {key}={value!r} of timm"


def _is_numeric(value: Any) -> bool:
    # Return whether a JSON value consists of numbers, Booleans and null alone.
    return all(map(_is_numeric, value)) if isinstance(value, list) else not isinstance(value, (str, dict))
