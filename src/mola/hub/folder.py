"""A folder for a model hub: write it, and read it.

config.json                     what is in it, with checksums; written last
networks/0/model.safetensors    weights of each network, with its own config.json where transformers made it
posterior/                      as `posterior.save` writes it
tokenizer/, processor/          what makes inputs of texts and images, where it was given
README.md, reliability.png      the model card
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mola.cooling import check_temperature
from mola.errors import MissingExtraError, OptionError, StorageError
from mola.fitting import ensemble, load
from mola.hub.card import Measured, model_card, write_reliability
from mola.likelihood import CATEGORICAL
from mola.posterior import MoLA
from mola.saving.storage import write_atomically
from mola.saving.weights_files import load_weights, save_weights
from mola.schema import Optional, check, check_seal, parse, sealed

FORMAT, VERSION = "mola-hub-folder", 1
COOLED_VERSION = 2
"""Of ensembles with a temperature, which a reader that does not know of it must not read; all other folders stay at `VERSION`."""
CONFIG, CARD, PICTURE, WEIGHTS = "config.json", "README.md", "reliability.png", "model.safetensors"
HELPERS = ("tokenizer", "processor")
"""Folders of what makes inputs of texts and images."""

TASKS = {"ForImageClassification": "image-classification", "ForSequenceClassification": "text-classification"}
"""The hub's name of a task, by the end of the name of a network of transformers."""

SCHEMA = {
    "kind": str,
    "classes": [str],
    "weights": [float],
    "build": Optional(str),
    "networks": [{"type": str, "from_pretrained": bool, "dtype": Optional(str), "files": {str: str}}],
}


def save_to_hub_folder(
    posterior: MoLA,
    directory: str | Path,
    *,
    classes: Sequence[str] | None = None,
    measured: Measured | Sequence[Measured] = (),
    license: str | None = None,
    tags: Sequence[str] = (),
    pipeline_tag: str | None = None,
    build: str | None = None,
    networks: bool = True,
    tokenizer: Any = None,
    processor: Any = None,
) -> Path:
    """Write a posterior and its networks as a folder for a model hub, with a model card. Nothing is sent anywhere.

    Args:
        posterior: of `mola.fit`, or a plain `mola.ensemble`.
        directory: folder to write to; made if missing. Its name is the model's.
        classes: names of the classes, in the order of the outputs; None takes those of a transformers configuration, or
            numbers.
        measured: what `mola.hub.measure` found on one test set or several; goes into the card.
        license: identifier of a license, such as "mit".
        tags: further tags for the hub.
        pipeline_tag: the hub's name of the task, such as "tabular-classification"; None takes that of transformers.
        build: where the function that builds one network is, as "package.module:function", for readers of the card.
        networks: whether to write the networks' weights; without, `load_from_hub_folder` needs the networks.
        tokenizer: that makes inputs of texts: anything with `save_pretrained`. It is written into the folder, and the card says
            how to load it; of text classifiers without one, the card says so.
        processor: likewise, that makes inputs of images.

    Returns:
        The folder; `StorageError` if it holds another model's files.
    """
    if not isinstance(posterior, MoLA):
        raise OptionError(f"expected a posterior of mola.fit or mola.ensemble, got {type(posterior).__name__}.")
    if build is not None and (build.count(":") != 1 or not all(build.split(":"))):
        raise OptionError(f'build must name a function as "package.module:function", got {build!r}.')
    helpers = dict(zip(HELPERS, (tokenizer, processor), strict=True))
    for role, helper in helpers.items():
        if helper is not None and not hasattr(helper, "save_pretrained"):
            raise OptionError(
                f"{role}: expected an object with save_pretrained, as transformers has them; got {type(helper).__name__}."
            )
    folder = Path(directory).resolve()
    names = _class_names(posterior, classes)
    posterior.check_networks()
    _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = [
        _save_network(network, folder, index) if networks else _described(network, {})
        for index, network in enumerate(posterior.networks)
    ]
    for role, helper in helpers.items():
        if helper is not None:
            helper.save_pretrained(folder / role)
    if posterior.structure is not None:
        posterior.save(folder / "posterior")
    sets = [measured] if isinstance(measured, Measured) else list(measured)
    drawn = bool(sets) and write_reliability(sets[0], folder / PICTURE)
    text = model_card(
        posterior,
        name=folder.name,
        classes=names,
        measured=sets,
        license=license,
        tags=tags,
        pipeline_tag=pipeline_tag or _task(posterior),
        build=build,
        own_builder=not all(one["from_pretrained"] and one["files"] for one in described),
        picture=PICTURE if drawn else None,
        preparing={role: helper for role, helper in helpers.items() if helper is not None},
    )
    write_atomically(folder / CARD, text.encode())
    # A posterior says itself how its logits are cooled; a plain ensemble has no file but this one.
    cooled = posterior.structure is None and posterior.temperature != 1
    config = sealed(
        {
            "format": FORMAT,
            "version": COOLED_VERSION if cooled else VERSION,
            "library_name": "mola",
            "kind": "ensemble" if posterior.structure is None else "posterior",
            "classes": names,
            "weights": posterior.weights.tolist(),
            **({"temperature": posterior.temperature} if cooled else {}),
            **({} if posterior.likelihood == CATEGORICAL else {"likelihood": posterior.likelihood.name}),
            "build": build,
            "networks": described,
        }
    )
    write_atomically(folder / CONFIG, json.dumps(config, indent=2).encode())
    return folder


def _clear(folder: Path) -> None:
    # Remove the networks and the picture of a model that was saved here before: the new one may have fewer.
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; expected a folder.")
    if not (folder / CONFIG).exists():
        return
    config = _read_config(folder)  # another model's files would be overwritten
    (folder / CONFIG).unlink()  # from here on until all is written the folder does not load
    for index in range(len(config["networks"])):
        shutil.rmtree(folder / "networks" / str(index), ignore_errors=True)
    for role in HELPERS:
        shutil.rmtree(folder / role, ignore_errors=True)
    (folder / PICTURE).unlink(missing_ok=True)


def _class_names(posterior: MoLA, given: Sequence[str] | None) -> list[str]:
    head = posterior.components[0].head
    if given is not None:
        names = [str(name) for name in given]
        if len(set(names)) != len(names) or (head is not None and len(names) != head.classes):
            wanted = "different names" if head is None else f"{head.classes} different names, one for each output"
            raise OptionError(f"classes: expected {wanted}, got {names}.")
        return names
    config = getattr(posterior.networks[0], "config", None)
    known = getattr(config, "id2label", None)
    if isinstance(known, dict) and known:
        return [str(known[index]) for index in sorted(known)]
    if head is None:
        raise OptionError("classes: the names (or numbers) of the classes are needed for a plain ensemble.")
    return [str(index) for index in range(head.classes)]


def _task(posterior: MoLA) -> str | None:
    name = type(posterior.networks[0]).__name__
    return next((task for end, task in TASKS.items() if name.endswith(end)), None)


def _save_network(network: nn.Module, folder: Path, index: int) -> dict[str, Any]:
    place = folder / "networks" / str(index)
    save_pretrained: Any = getattr(network, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(place)
    else:
        save_weights(network, place / WEIGHTS)
    return _described(network, {path.name: _checksum(path) for path in sorted(place.glob("*.safetensors"))})


def _described(network: nn.Module, files: dict[str, str]) -> dict[str, Any]:
    dtypes = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    return {
        "type": f"{type(network).__module__}.{type(network).__qualname__}",
        "from_pretrained": hasattr(network, "save_pretrained"),
        "dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
        "files": files,
    }


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_from_hub_folder(
    directory: str | Path, build: Callable[[], nn.Module] | type | Sequence[nn.Module] | None = None
) -> MoLA:
    """Read a folder that `save_to_hub_folder` wrote, with every check that it is whole.

    Args:
        directory: the folder, downloaded.
        build: a function that makes one network of the architecture (its weights are replaced); a class with
            `from_pretrained`, such as transformers' `AutoModelForImageClassification`; the networks themselves, with their
            weights; or None for networks of transformers.

    Returns:
        The posterior; `StorageError` if a file is missing, damaged, newer than this library, or not of this network, and
        `OptionError` if networks are needed to load it.
    """
    folder = Path(directory)
    config = _read_config(folder)
    if build is not None and not callable(build):
        models = list(build)
    else:
        models = [_load_network(folder, index, entry, build) for index, entry in enumerate(config["networks"])]
    if config["kind"] == "ensemble":
        plain = ensemble(models, config["weights"], likelihood=config.get("likelihood", CATEGORICAL.name))
        return plain.with_temperature(config["temperature"]) if "temperature" in config else plain
    return load(folder / "posterior", models)


def is_hub_folder(folder: Path) -> bool:
    """Whether `save_to_hub_folder` wrote a folder."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read ({error}): expected a folder of mola.save_to_hub_folder.") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise StorageError(
            f"{path} was not written by mola: expected format {FORMAT!r}. Choose a folder of its own for mola."
        )
    if config.get("version") not in (VERSION, COOLED_VERSION):
        raise StorageError(
            f"{path} has version {config.get('version')!r}; this mola reads versions {VERSION} and {COOLED_VERSION}. Update it."
        )
    check_seal(config, path)
    check(config, SCHEMA, "")
    if config["version"] == COOLED_VERSION:
        check(config, {"temperature": float}, "")
        try:
            check_temperature(config["temperature"])
        except OptionError as error:
            raise StorageError(f"{path} holds a value that cannot be used: {error}") from error
    return config


def _load_network(folder: Path, index: int, entry: dict[str, Any], build: Any) -> nn.Module:
    place = folder / "networks" / str(index)
    if not entry["files"]:
        raise OptionError(
            f"{folder} was saved without its networks: pass them as load_from_hub_folder(folder, [network, ...])."
        )
    for name, checksum in entry["files"].items():
        path = place / Path(name.replace("\\", "/")).name  # inside the folder, whatever the document says
        if not path.is_file() or _checksum(path) != checksum:
            raise StorageError(f"{path} is {'damaged' if path.is_file() else 'missing'}: download the folder again.")
    dtype = getattr(torch, entry["dtype"], None) if entry["dtype"] else None
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise StorageError(f"{folder / CONFIG} names an unknown precision {entry['dtype']!r}.")
    if build is None:
        build = _class_of_transformers(entry, place)
    if hasattr(build, "from_pretrained"):
        return _read_pretrained(build, place, dtype)
    network: nn.Module = build()
    network = network if dtype is None else network.to(dtype)
    load_weights(network, place / WEIGHTS)
    return network.eval()


def _read_pretrained(build: Any, place: Path, dtype: torch.dtype | None) -> nn.Module:
    # A network from its class; transformers would fill up what the file lacks with random numbers.
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "use_safetensors": True}
    if not str(getattr(build, "__module__", "")).startswith("transformers."):
        other: nn.Module = build.from_pretrained(place, **options)
        return other.eval()
    if build.__module__.startswith("transformers.models.auto"):
        options["trust_remote_code"] = False  # otherwise the user would be asked whether to run what lies in the folder
    network: nn.Module
    network, found = build.from_pretrained(place, output_loading_info=True, **options)
    absent = [*found["missing_keys"], *(one[0] for one in found["mismatched_keys"])]
    if absent:
        raise StorageError(
            f"{place} lacks weights of the network that its {CONFIG} describes ({sorted(absent)[0]} and {len(absent) - 1} more): "
            f"download the folder again."
        )
    return network.eval()


def _class_of_transformers(entry: dict[str, Any], place: Path) -> Any:
    # The class of transformers that a network was saved from; no other is looked up, as that would run any code.
    kind = entry["type"].split(".")
    if not entry["from_pretrained"] or kind[0] != "transformers":
        raise OptionError(
            f"{place} holds a {entry['type']}: pass a function that builds one, load_from_hub_folder(folder, build)."
        )
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            feature=f"loading a {kind[-1]}", package="transformers", extra="transformers"
        ) from error
    found = getattr(transformers, kind[-1], None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise StorageError(
            f"{place} holds a {kind[-1]}, which this version of transformers does not have. Pass build=."
        )
    return found
