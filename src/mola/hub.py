"""Folders for a model hub: networks, posterior and a model card. Nothing is sent or fetched, and no code of a folder is run.

config.json                     contents, with checksums; written last
networks/0/model.safetensors    weights of each network, with the network's own config.json for transformers
posterior/                      as written by `posterior.save`
tokenizer/, processor/          preprocessing of texts and images, if given
README.md                       the model card, as `huggingface_hub` writes it
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mola.errors import OptionError, StorageError, importing
from mola.evaluation import Evaluation
from mola.fitting import ensemble
from mola.likelihoods import LIKELIHOODS
from mola.posterior import MoLA
from mola.saving.files import write_atomically
from mola.saving.posterior import load_posterior
from mola.saving.schema import Optional, check, check_seal, parse, sealed
from mola.saving.weights import load_weights, save_weights

FORMAT, VERSION = "mola-hub-folder", 1
CONFIG, CARD, WEIGHTS = "config.json", "README.md", "model.safetensors"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
PREPROCESSING = {"text-classification": ("tokenizer", "texts"), "image-classification": ("processor", "images")}
"""Preprocessor of each task, and the inputs that it prepares."""

TASKS = {"ForImageClassification": "image-classification", "ForSequenceClassification": "text-classification"}
"""The hub's task, by the end of the class name of a transformers network."""

TAGS = ("mola", "uncertainty", "calibration", "laplace-approximation", "out-of-distribution-detection", "pytorch")
SCHEMA: dict[str, Any] = {
    "kind": str,
    "classes": [str],
    "weights": [float],
    "temperature": float,
    "pooling": float,
    "likelihood": {"name": str},
    "build": Optional(str),
    "networks": [{"type": str, "from_pretrained": bool, "dtype": Optional(str), "files": {str: str}}],
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
    build: str | None = None,
    networks: bool = True,
    tokenizer: Any = None,
    processor: Any = None,
) -> Path:
    """Write a posterior and its networks as a folder for a model hub, with a model card.

    Args:
        posterior: from `mola.fit` or `mola.ensemble`.
        folder: to write to; made if missing. The folder name is the model's name.
        classes: names of the outputs; None uses the names of a transformers configuration, or numbers.
        evaluation: results of this posterior alone, from `mola.evaluate(posterior, ...)`; its data sets and metrics go into the
            card.
        license: identifier of a license, such as "mit".
        tags: further tags for the hub.
        pipeline_tag: the hub's name of the task, such as "tabular-classification"; None uses that of transformers.
        build: where readers find the function that builds one network, as "package.module:function"; only shown in the
            card.
        networks: whether to write the networks' weights; without them, `load` needs the networks.
        tokenizer: prepares texts: any object with `save_pretrained`, written into the folder.
        processor: prepares images: any object with `save_pretrained`, written into the folder.

    Returns:
        The folder; `StorageError` if it contains the files of something else.
    """
    if not isinstance(posterior, MoLA):
        raise OptionError(f"expected a posterior of mola.fit or mola.ensemble, got {type(posterior).__name__}.")
    if build is not None and (build.count(":") != 1 or not all(build.split(":"))):
        raise OptionError(f'build must name a function as "package.module:function", got {build!r}.')
    helpers = {name: one for name, one in (("tokenizer", tokenizer), ("processor", processor)) if one is not None}
    for name, helper in helpers.items():
        if not hasattr(helper, "save_pretrained"):
            raise OptionError(f"{name}: expected an object with save_pretrained, got {type(helper).__name__}.")
    if evaluation is not None and len({predictor for predictor, _ in evaluation.rows}) > 1:
        raise OptionError("evaluation: expected that of this posterior alone: mola.evaluate(posterior, test_loader).")
    with importing("a model card", "huggingface_hub", "hub"):
        import huggingface_hub as library
    names, place = _class_names(posterior, classes), Path(folder).resolve()
    _clear(place)
    described = [
        _save_network(network, place / "networks" / str(index), weights=networks)
        for index, network in enumerate(posterior.networks)
    ]
    for name, helper in helpers.items():
        helper.save_pretrained(place / name)
    if posterior.structure is not None:
        posterior.save(place / "posterior")
    kind = type(posterior.networks[0]).__name__
    task = pipeline_tag or next((task for end, task in TASKS.items() if kind.endswith(end)), None)
    needed = PREPROCESSING.get(task or "")
    card = library.ModelCard.from_template(
        library.ModelCardData(
            library_name="mola",
            model_name=place.name,
            license=license,
            tags=[*TAGS, *(tag for tag in tags if tag not in TAGS)],
            pipeline_tag=task,
            eval_results=_results(library, evaluation, task),
        ),
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        name=place.name,
        posterior=posterior,
        likelihood=posterior.likelihood,
        kinds=sorted({type(network).__name__ for network in posterior.networks}),
        classes=names,
        build=build,
        needs_build=not all(one["from_pretrained"] and one["files"] for one in described),
        helpers={
            name: (re.sub(r"^transformers\..*", "transformers", type(one).__module__), type(one).__name__)
            for name, one in helpers.items()
        },
        missing=needed if needed and needed[0] not in helpers else None,
        evaluation=evaluation,
        plain=_plain,
        quoted=lambda text: json.dumps(text, ensure_ascii=False),
        listed=lambda values: ", ".join(f"{value:.4g}" for value in values),
    )
    write_atomically(place / CARD, str(card).encode())
    config = {
        "format": FORMAT,
        "version": VERSION,
        "library_name": "mola",
        "kind": "ensemble" if posterior.structure is None else "posterior",
        "classes": names,
        # A posterior has these in its own files, too; an ensemble has no others.
        "weights": posterior.weights.tolist(),
        "temperature": posterior.temperature,
        "pooling": posterior.pooling,
        "likelihood": {"name": posterior.likelihood.name, **posterior.likelihood.settings()},
        "build": build,
        "networks": described,
    }
    write_atomically(place / CONFIG, json.dumps(sealed(config), indent=2).encode())
    return place


def load(folder: str | Path, build: Callable[[], nn.Module] | type | Sequence[nn.Module] | None = None) -> MoLA:
    """Read a folder that `save` wrote, and check that it is complete and unchanged.

    Args:
        folder: the folder, downloaded.
        build: a function that makes one network of the architecture (its weights are replaced); a class with
            `from_pretrained`, such as transformers' `AutoModelForImageClassification`; the networks themselves, with
            their weights; or None for transformers networks.

    Returns:
        The posterior; `StorageError` if a file is missing, damaged, newer than this library, or belongs to another
        network, and `OptionError` if `build` is needed.
    """
    place = Path(folder)
    config = _read_config(place)
    if build is not None and not callable(build):
        models = list(build)
    else:
        models = [_load_network(place, index, entry, build) for index, entry in enumerate(config["networks"])]
    if config["kind"] != "ensemble":
        return load_posterior(place / "posterior", models)
    settings = {name: value for name, value in config["likelihood"].items() if name != "name"}
    try:
        likelihood = LIKELIHOODS[config["likelihood"]["name"]](**settings)
        plain = ensemble(models, config["weights"], likelihood=likelihood)
        return plain.with_temperature(config["temperature"]).with_pooling(config["pooling"])
    except (KeyError, TypeError, OptionError) as error:
        raise StorageError(f"{place / CONFIG} has a value that cannot be used: {error}") from error


def is_hub_folder(folder: str | Path) -> bool:
    """Return True if `save` wrote the folder."""
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
    # Text that stays text in Markdown: on one line, without marks of HTML, tables, code and links.
    return re.sub(r"([\\`|*\[\]])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _clear(folder: Path) -> None:
    # Remove the previous model in this folder; until the new one is complete, the folder does not load.
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; expected a folder.")
    if (folder / CONFIG).exists():
        _read_config(folder)  # refuses the folder of another library
        (folder / CONFIG).unlink()
        for name in ("networks", "tokenizer", "processor", "posterior"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _class_names(posterior: MoLA, given: Sequence[str] | None) -> list[str]:
    head = posterior.components[0].head
    width = None if head is None else posterior.likelihood.num_uncertain(head.outputs)
    known = getattr(getattr(posterior.networks[0], "config", None), "id2label", None)
    if given is None and isinstance(known, dict) and known:
        given = [known[index] for index in sorted(known)]
    if given is None and width is None:
        raise OptionError("classes: pass the names (or numbers) of the classes; a plain ensemble has none.")
    names = [str(name) for name in (range(width or 0) if given is None else given)]
    if len(set(names)) != len(names) or width not in (None, len(names)):
        raise OptionError(f"classes: expected {width or ''} different names, one for each output; got {names}.")
    return names


def _save_network(network: nn.Module, place: Path, *, weights: bool) -> dict[str, Any]:
    save_pretrained: Any = getattr(network, "save_pretrained", None)
    if weights and save_pretrained is not None:
        save_pretrained(place)
    elif weights:
        save_weights(network, place / WEIGHTS)
    dtypes = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    return {
        "type": f"{type(network).__module__}.{type(network).__qualname__}",
        "from_pretrained": save_pretrained is not None,
        "dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
        "files": {path.name: _checksum(path) for path in sorted(place.glob("*.safetensors"))},
    }


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = parse(path.read_bytes(), path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}): expected a folder of mola.hub.save.") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise StorageError(
            f"{path} was not written by mola: expected format {FORMAT!r}. Use a separate folder for mola."
        )
    if config.get("version") != VERSION:
        raise StorageError(
            f"{path} has version {config.get('version')!r}; this mola reads version {VERSION}. Update mola."
        )
    check_seal(config, path)
    check(config, SCHEMA, "")
    return config


def _load_network(folder: Path, index: int, entry: dict[str, Any], build: Any) -> nn.Module:
    place = folder / "networks" / str(index)
    if not entry["files"]:
        raise OptionError(f"{folder} was saved without its networks: pass them, mola.hub.load(folder, [network, ...]).")
    for name, checksum in entry["files"].items():
        path = place / Path(name.replace("\\", "/")).name  # inside the folder, whatever the document names
        if not path.is_file() or _checksum(path) != checksum:
            raise StorageError(f"{path} is {'damaged' if path.is_file() else 'missing'}: download the folder again.")
    dtype = getattr(torch, entry["dtype"], None) if entry["dtype"] else None
    if entry["dtype"] and not isinstance(dtype, torch.dtype):
        raise StorageError(f"{folder / CONFIG} names an unknown precision {entry['dtype']!r}.")
    if build is None:
        build = _transformers_class(entry, place)
    if hasattr(build, "from_pretrained"):
        return _read_pretrained(build, place, dtype)
    network: nn.Module = build()
    network = network if dtype is None else network.to(dtype)
    load_weights(network, place / WEIGHTS)
    return network.eval()


def _read_pretrained(build: Any, place: Path, dtype: torch.dtype | None) -> nn.Module:
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "use_safetensors": True}
    network: nn.Module
    if not str(getattr(build, "__module__", "")).startswith("transformers."):
        network = build.from_pretrained(place, **options)
        return network.eval()
    if build.__module__.startswith("transformers.models.auto"):
        options["trust_remote_code"] = False  # otherwise transformers offers to run code of the folder
    network, found = build.from_pretrained(place, output_loading_info=True, **options)
    # transformers fills weights that the file lacks with random numbers.
    absent = sorted([*found["missing_keys"], *(one[0] for one in found["mismatched_keys"])])
    if absent:
        raise StorageError(
            f"{place} lacks weights of the network that its {CONFIG} describes ({absent[0]} and {len(absent) - 1} more): download "
            f"the folder again."
        )
    return network.eval()


def _transformers_class(entry: dict[str, Any], place: Path) -> Any:
    # Only classes of transformers are looked up by name: any other name could run code.
    kind = entry["type"].split(".")
    if not entry["from_pretrained"] or kind[0] != "transformers":
        raise OptionError(
            f"{place} holds a {entry['type']}: pass a function that builds one, mola.hub.load(folder, build)."
        )
    with importing(f"loading a {kind[-1]}", "transformers", "transformers"):
        import transformers
    found = getattr(transformers, kind[-1], None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise StorageError(
            f"{place} holds a {kind[-1]}, which this version of transformers does not have. Pass build=."
        )
    return found
