"""Save and load model-hub folders that contain networks, a posterior and a model card.

This module does not upload or download anything, and never runs code from a folder. A folder contains:

config.json                     class names, and the type and precision of each network; written last
networks/0/model.safetensors    weights of each network; for transformers, also the network's own config.json
posterior/                      as written by `posterior.save`, with a checksum of each network's weights
tokenizer/, processor/          the objects that prepare texts and images, if given
README.md                       the model card, written by `huggingface_hub`
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from molaplace.errors import MissingExtraError, OptionError, StorageError
from molaplace.evaluation import Evaluation
from molaplace.posterior import MoLA
from molaplace.saving.files import write_atomically
from molaplace.saving.posterior import load_posterior
from molaplace.saving.schema import Optional, check, check_seal, parse, sealed
from molaplace.saving.weights import load_weights, save_weights

FORMAT, VERSION = "molaplace-hub-folder", 1
CONFIG, CARD, WEIGHTS = "config.json", "README.md", "model.safetensors"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
TASKS = {"ForImageClassification": "image-classification", "ForSequenceClassification": "text-classification"}
"""The hub's task names, keyed by the suffix of a transformers network's class name."""

TAGS = ("molaplace", "uncertainty", "calibration", "laplace-approximation", "out-of-distribution-detection", "pytorch")
SCHEMA: dict[str, Any] = {
    "classes": [str],
    "networks": [{"type": str, "from_pretrained": bool, "dtype": Optional(str)}],
}


def save(
    posterior: MoLA,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    evaluation: Evaluation | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    pipeline_tag: str | None = None,
    tokenizer: Any = None,
    processor: Any = None,
) -> Path:
    """Write a posterior, its networks and a model card to a folder for a model hub.

    Args:
        posterior: the posterior from `mola.fit`.
        folder: the folder to write to; it is created if it does not exist. Its name becomes the model's name.
        classes: names of the outputs; by default, those in the transformers configuration, or numbers if there are none.
        evaluation: results for this posterior alone, from `mola.evaluate(posterior, ...)`; the card lists the data sets and metrics.
        license: identifier of the licence, such as "mit".
        tags: additional tags for the hub.
        pipeline_tag: the hub's task name, such as "tabular-classification"; by default, the task of a transformers network.
        tokenizer: any object that prepares texts and has a `save_pretrained` method; it is saved in the folder.
        processor: any object that prepares images and has a `save_pretrained` method; it is saved in the folder.

    Returns:
        The path of the folder. `StorageError` is raised if the folder contains a model from another library.
    """
    if not isinstance(posterior, MoLA) or posterior.structure is None:
        got = "a plain ensemble" if isinstance(posterior, MoLA) else type(posterior).__name__
        raise OptionError(f"must be a posterior from mola.fit, got {got}.", argument="posterior")
    helpers = {name: one for name, one in (("tokenizer", tokenizer), ("processor", processor)) if one is not None}
    for name, helper in helpers.items():
        if not hasattr(helper, "save_pretrained"):
            raise OptionError(
                f"must be an object with a save_pretrained method, got {type(helper).__name__}.", argument=name
            )
    if evaluation is not None and len({predictor for predictor, _ in evaluation.rows}) > 1:
        raise OptionError(
            "must be results for this posterior alone, from mola.evaluate(posterior, test_loader).",
            argument="evaluation",
        )
    try:
        import huggingface_hub as library
    except ImportError as error:
        raise MissingExtraError("a model card", "huggingface_hub", "hub") from error
    names, place = _class_names(posterior, classes), Path(folder).resolve()
    _clear(place)
    described = [
        _save_network(network, place / "networks" / str(index)) for index, network in enumerate(posterior.networks)
    ]
    for name, helper in helpers.items():
        helper.save_pretrained(place / name)
    posterior.save(place / "posterior")
    kind = type(posterior.networks[0]).__name__
    task = pipeline_tag or next((task for end, task in TASKS.items() if kind.endswith(end)), None)
    card = library.ModelCard.from_template(
        library.ModelCardData(
            library_name="molaplace",
            model_name=place.name,
            license=license,
            tags=[*TAGS, *(tag for tag in tags if tag not in TAGS)],
            pipeline_tag=task,
            eval_results=_results(library, evaluation, task),
        ),
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        name=place.name,
        task=task,
        posterior=posterior,
        likelihood=posterior.likelihood,
        kinds=sorted({type(network).__name__ for network in posterior.networks}),
        classes=names,
        needs_build=not all(one["from_pretrained"] for one in described),
        helpers={
            name: (re.sub(r"^transformers\..*", "transformers", type(one).__module__), type(one).__name__)
            for name, one in helpers.items()
        },
        evaluation=evaluation,
        plain=_plain,
        quoted=lambda text: json.dumps(text, ensure_ascii=False),
        listed=lambda values: ", ".join(f"{value:.4g}" for value in values),
    )
    write_atomically(place / CARD, str(card).encode())
    config = {
        "format": FORMAT,
        "version": VERSION,
        "library_name": "molaplace",
        "classes": names,
        "networks": described,
    }
    write_atomically(place / CONFIG, json.dumps(sealed(config), indent=2).encode())
    return place


def load(folder: str | Path, build: Callable[[], nn.Module] | type | Sequence[nn.Module] | None = None) -> MoLA:
    """Load the posterior from a folder written by `save`, and check that the folder is complete and unchanged.

    Args:
        folder: the downloaded folder.
        build: a function that builds a network of the right architecture, into which the weights are loaded; a class with a
            `from_pretrained` method, such as `AutoModelForImageClassification` from transformers; or a list of networks that already
            have their weights. Not needed for transformers networks.

    Returns:
        The posterior. `StorageError` is raised if a file is missing or damaged, is newer than this library, or belongs to a different
        network. `OptionError` is raised if `build` is required but not given.
    """
    place = Path(folder)
    config = _read_config(place)
    if build is not None and not callable(build):
        models = list(build)
    else:
        models = [
            _load_network(place / "networks" / str(index), entry, build)
            for index, entry in enumerate(config["networks"])
        ]
    return load_posterior(place / "posterior", models)


def is_hub_folder(folder: str | Path) -> bool:
    """Return whether the folder was written by `save`."""
    try:
        config = json.loads((Path(folder) / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def _results(library: Any, evaluation: Evaluation | None, task: str | None) -> list[Any] | None:
    return [
        library.EvalResult(
            task_type=task or "other",
            dataset_type=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "data",
            dataset_name=name,
            metric_type=metric,
            metric_value=round(estimate.value, 6),
        )
        for (_, name), metrics in (evaluation.rows if evaluation else {}).items()
        for metric, estimate in metrics.items()
    ] or None


def _plain(text: str) -> str:
    # Return the text on a single line, with special HTML and Markdown characters escaped.
    return re.sub(r"([\\`|*\[\]])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _clear(folder: Path) -> None:
    # Remove the previous model; the folder then cannot be loaded until the new model is complete.
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file. Pass the path of a folder.")
    if (folder / CONFIG).exists():
        _read_config(folder)  # raises StorageError for a folder written by another library
        (folder / CONFIG).unlink()
        for name in ("networks", "tokenizer", "processor", "posterior"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _class_names(posterior: MoLA, given: Sequence[str] | None) -> list[str]:
    head = posterior.components[0].head
    width = posterior.likelihood.num_uncertain(head.outputs) if head else 0
    known = getattr(getattr(posterior.networks[0], "config", None), "id2label", None)
    if given is None and isinstance(known, dict) and known:
        given = [known[index] for index in sorted(known)]
    names = [str(name) for name in (range(width) if given is None else given)]
    if len(set(names)) != len(names) or len(names) != width:
        raise OptionError(f"must be {width} different names, one for each output; got {names}.", argument="classes")
    return names


def _save_network(network: nn.Module, place: Path) -> dict[str, Any]:
    save_pretrained: Any = getattr(network, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(place)
    else:
        save_weights(network, place / WEIGHTS)
    dtypes = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    return {
        "type": f"{type(network).__module__}.{type(network).__qualname__}",
        "from_pretrained": save_pretrained is not None,
        "dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = parse(path.read_bytes(), path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}). Expected a folder written by mola.hub.save."
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise StorageError(
            f"{path} was not written by molaplace: expected the format {FORMAT!r}. Use a separate folder for molaplace."
        )
    if config.get("version") != VERSION:
        raise StorageError(
            f"{path} has version {config.get('version')!r}, but this version of molaplace reads only version {VERSION}. Update molaplace."
        )
    check_seal(config, path)
    check(config, SCHEMA, "")
    return config


def _load_network(place: Path, entry: dict[str, Any], build: Any) -> nn.Module:
    # The checksums in the posterior reveal weights that are damaged or were initialised at random by transformers.
    dtype = getattr(torch, entry["dtype"], None) if entry["dtype"] else None
    if entry["dtype"] and not isinstance(dtype, torch.dtype):
        raise StorageError(
            f"the precision {entry['dtype']!r} in {CONFIG} is unknown; expected the name of a torch dtype. Download the "
            f"folder again.",
            place=str(place),
        )
    if build is None:
        build = _transformers_class(entry, place)
    network: nn.Module
    if not hasattr(build, "from_pretrained"):
        network = build()
        network = network if dtype is None else network.to(dtype)
        load_weights(network, place / WEIGHTS)
        return network.eval()
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "use_safetensors": True}
    if str(getattr(build, "__module__", "")).startswith("transformers.models.auto"):
        options["trust_remote_code"] = False  # otherwise transformers offers to run code from the folder
    try:
        network = build.from_pretrained(place, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"{place} is damaged or incomplete: {error} Download the folder again.") from error
    return network.eval()


def _transformers_class(entry: dict[str, Any], place: Path) -> Any:
    # Only transformers classes are looked up by name: importing anything else could run arbitrary code.
    kind = entry["type"].split(".")
    if not entry["from_pretrained"] or kind[0] != "transformers":
        raise OptionError(
            f"{place} holds a {entry['type']}. Pass a function that builds this network: mola.hub.load(folder, build)."
        )
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(f"loading a {kind[-1]}", "transformers", "transformers") from error
    found = getattr(transformers, kind[-1], None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise StorageError(
            f"{place} contains a {kind[-1]}, which this version of transformers does not provide. Pass a function that "
            f"builds this network: mola.hub.load(folder, build)."
        )
    return found
