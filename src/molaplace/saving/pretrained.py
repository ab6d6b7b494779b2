"""Load networks with `from_pretrained` from a folder that may come from a stranger. No code is downloaded or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from molaplace.errors import StorageError
from molaplace.saving.files import MAX_DOCUMENT, read_file
from molaplace.saving.schema import parse


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object, such as the configuration of transformers; raise `StorageError` if the file is missing or invalid."""
    config = parse(read_file(path, MAX_DOCUMENT), path)
    if not isinstance(config, dict):
        raise StorageError(f"{path} is damaged: expected a JSON object.")
    return config


def load_pretrained(network_class: Any, folder: Path, **options: Any) -> Any:
    """Return what `network_class.from_pretrained` loads from the files in a folder.

    The implementation of attention that a configuration names may be a repository of compiled code, such as "user/kernel", which
    transformers would download and run. Such a folder raises `StorageError`.
    """
    path = folder / "config.json"
    kernels = _kernels(read_config(path)) if path.exists() else []
    if kernels:
        raise StorageError(
            f"{path} names the kernel {kernels[0]!r}, which transformers would download and run. If you trust it, load the network "
            f"yourself. Otherwise, remove the entry from the file."
        )
    if str(getattr(network_class, "__module__", "")).startswith("transformers.models.auto"):
        options["trust_remote_code"] = False  # otherwise transformers offers to run code from the folder
    return network_class.from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)


def _kernels(config: Any, name: str = "") -> list[str]:
    # Return the values, at any depth, of entries such as "attn_implementation" that name a repository.
    if isinstance(config, str):
        return [config] if name.endswith("_implementation") and "/" in config else []
    if isinstance(config, list):
        return [kernel for inner in config for kernel in _kernels(inner, name)]
    if isinstance(config, dict):
        # An implementation may be given for each part of the network: {"text_config": "user/kernel"}.
        parts = {key: name if name.endswith("_implementation") else key for key in config}
        return [kernel for key, inner in config.items() for kernel in _kernels(inner, parts[key])]
    return []
